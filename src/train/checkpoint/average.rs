//! Checkpoint averaging (Vaswani et al. 2017, section 6.1).

use std::path::{Path, PathBuf};

use half::{bf16, f16};
use serde_json::Value;

use super::{directory, load_model, Array, Arrays, Checkpoint, Dtype, Manifest};
use crate::config::{differences, TransformerConfig};
use crate::error::{Error, Result};

/// Returns the model's options from a checkpoint's `config`. Options that did not exist when it was written get their
/// defaults. If this version cannot read the options, returns them as they are.
fn options_of(config: &Value) -> Value {
    let read = serde_json::from_value::<TransformerConfig>(config["model"].clone());
    read.map_or_else(|_| config["model"].clone(), |model| serde_json::json!(model))
}

/// Returns the mean of several checkpoints of one model: θ = 1/n Σ θ_i for every array of floating-point numbers,
/// including running statistics, summed in f64 and rounded once to the array's dtype. Integer arrays and the state
/// are copied from the checkpoint with the highest update. The result has no optimizer state. The order of `paths`
/// does not matter.
///
/// # Errors
/// Errors if `paths` is empty or has the same checkpoint twice, if the models' options, names, shapes or dtypes
/// differ, if a dtype is narrower than 16 bits, if [`load`](super::load) fails, or if the user interrupts between two
/// checkpoints.
pub fn average(paths: &[impl AsRef<Path>], check_interrupt: &mut dyn FnMut() -> Result<()>) -> Result<Checkpoint> {
    let mut checkpoints: Vec<(Manifest, PathBuf)> = Vec::new();
    for path in paths {
        let folder = directory(path.as_ref())?;
        checkpoints.push((Manifest::read(&folder)?, folder));
    }
    checkpoints.sort_by(|(a, a_folder), (b, b_folder)| (a.update, a_folder).cmp(&(b.update, b_folder)));
    // Equal folders have equal updates, so sorting has put them next to each other.
    let mut neighbours = checkpoints.windows(2).map(|pair| (&pair[0].1, &pair[1].1));
    if let Some((folder, _)) = neighbours.find(|(folder, next)| folder == next) {
        return Err(Error::invalid(format!("{} is to be averaged twice; name it once", folder.display())));
    }
    let n = checkpoints.len() as f64;
    let Some((newest, newest_folder)) = checkpoints.pop() else {
        return Err(Error::invalid("nothing to average: expected at least one checkpoint"));
    };
    // The newest model is added last, and its arrays then receive the means.
    let (mut model, config) = load_model(&newest_folder)?;
    // For each array, in the order of `model`, the sums of its numbers.
    let mut sums: Vec<Vec<f64>> = model.values().map(|array| vec![0.0; count_floats(array)]).collect();
    for (_, folder) in &checkpoints {
        check_interrupt()?;
        let (other, other_config) = load_model(folder)?;
        let differ = |what: String| {
            let newest = newest_folder.display();
            Error::invalid(format!("{newest} and {} cannot be averaged: {what}", folder.display()))
        };
        // Training may have continued with other options, but the model's options must be the same.
        let options = differences(&options_of(&other_config), &options_of(&config));
        if !options.is_empty() {
            return Err(differ(options));
        }
        if let Some(what) = array_difference(&model, &other) {
            return Err(differ(what));
        }
        add_arrays(&mut sums, &other)?;
    }
    add_arrays(&mut sums, &model)?;
    for (array, sum) in model.values_mut().zip(&sums) {
        match array.dtype {
            Dtype::F64 => write_means(array.data.to_mut(), sum, n, f64::to_le_bytes),
            Dtype::F32 => write_means(array.data.to_mut(), sum, n, |x| (x as f32).to_le_bytes()),
            Dtype::BF16 => write_means(array.data.to_mut(), sum, n, |x| bf16::from_f64(x).to_le_bytes()),
            Dtype::F16 => write_means(array.data.to_mut(), sum, n, |x| f16::from_f64(x).to_le_bytes()),
            // Integers stay as they are in the newest checkpoint.
            _ => (),
        }
    }
    Ok(Checkpoint { model, optimizer: Arrays::new(), state: newest.state, config })
}

/// Returns how many numbers of an array are averaged: all, or none if the array holds integers.
fn count_floats(array: &Array) -> usize {
    match array.dtype {
        Dtype::F64 | Dtype::F32 | Dtype::BF16 | Dtype::F16 => array.data.len() * 8 / array.dtype.bitsize(),
        _ => 0,
    }
}

/// Adds a model's arrays of floating-point numbers to the sums, which have one entry for each array, in the order of
/// `model`.
fn add_arrays(sums: &mut [Vec<f64>], model: &Arrays) -> Result<()> {
    // `N` is the number of bytes of an element, and `number` converts these bytes.
    fn add<const N: usize>(sums: &mut [f64], data: &[u8], number: impl Fn([u8; N]) -> f64) {
        sums.iter_mut().zip(data.as_chunks().0).for_each(|(sum, &bytes)| *sum += number(bytes));
    }
    for (sum, (name, array)) in sums.iter_mut().zip(model) {
        match array.dtype {
            Dtype::F64 => add(sum, &array.data, f64::from_le_bytes),
            Dtype::F32 => add(sum, &array.data, |b| f32::from_le_bytes(b).into()),
            Dtype::BF16 => add(sum, &array.data, |b| bf16::from_le_bytes(b).into()),
            Dtype::F16 => add(sum, &array.data, |b| f16::from_le_bytes(b).into()),
            Dtype::BOOL | Dtype::U8 | Dtype::I8 | Dtype::I16 | Dtype::U16 => (),
            Dtype::I32 | Dtype::U32 | Dtype::I64 | Dtype::U64 => (),
            other => return Err(Error::invalid(format!("array {name:?} is {other:?}, which has no average"))),
        }
    }
    Ok(())
}

/// Writes each sum divided by `n` into an array's data. `N` is the number of bytes of an element, and `to_bytes` rounds
/// to the array's type.
fn write_means<const N: usize>(data: &mut [u8], sums: &[f64], n: f64, to_bytes: impl Fn(f64) -> [u8; N]) {
    data.as_chunks_mut().0.iter_mut().zip(sums).for_each(|(target, sum)| *target = to_bytes(sum / n));
}

/// Describes the first difference between two models' arrays: a name, a dtype or a shape; `None` if there is none.
fn array_difference(first: &Arrays, second: &Arrays) -> Option<String> {
    let name_only_in = |a: &Arrays, b: &Arrays| a.keys().find(|name| !b.contains_key(*name)).cloned();
    if let Some(name) = name_only_in(first, second) {
        return Some(format!("only the first has array {name:?}"));
    }
    if let Some(name) = name_only_in(second, first) {
        return Some(format!("only the second has array {name:?}"));
    }
    // Both maps are sorted and have the same names, so `zip` pairs the arrays by name.
    let mut pairs = first.iter().zip(second);
    let ((name, a), (_, b)) = pairs.find(|((_, a), (_, b))| (a.dtype, &a.shape) != (b.dtype, &b.shape))?;
    Some(format!(
        "array {name:?} is {:?} {:?} in the first, {:?} {:?} in the second",
        a.dtype, a.shape, b.dtype, b.shape
    ))
}
