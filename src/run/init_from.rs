//! The initial values of a new run's model, taken from a checkpoint of another run.

use super::folder::{read_configs, read_vocabulary};
use crate::config::{differences, TransformerConfig};
use crate::data::Vocabulary;
use crate::error::{Error, Result};
use crate::model::Transformer;
use crate::train::checkpoint::CheckpointStore;
use crate::train::{self, load_parameters, to_arrays};
use std::path::Path;
use tch::{Device, Tensor};

/// Options that may differ without a warning, because the same weights suit any value of them.
const MAY_DIFFER: [&str; 5] = ["vocab_size", "dropout", "embedding_dropout", "attention_dropout", "activation_dropout"];

/// Returns the model with the weights of another run's checkpoint, and warnings for the user. `model` has its initial
/// values and this `vocabulary`. The pair is the other run's folder and the name of the checkpoint.
///
/// A row of a table is copied to the row of the same vocabulary entry. An entry that the other run does not have
/// keeps its initial row.
///
/// Errors if the folder holds no run, or if the other model's parameters have other names or sizes.
pub fn with_weights_of(
    model: Transformer,
    vocabulary: &Vocabulary,
    (folder, checkpoint): (&Path, &str),
    device: Device,
) -> Result<(Transformer, Vec<String>)> {
    let configs = read_configs(folder)?;
    let (path, (arrays, config)) =
        CheckpointStore::at(folder).read(checkpoint, |path| train::checkpoint::load_model(path))?;
    let their_config = configs.of_checkpoint(&path, &config)?.model;
    let their_vocabulary = read_vocabulary(folder)?;
    // The parameters of both models, by name. Those of the other model then replace ours.
    let theirs = load_parameters(&arrays, device)?;
    let mut ours = load_parameters(&to_arrays(&model.parameters)?, device)?;
    let refuse = |why: String| {
        Error::invalid(format!(
            "init_from: {} is of another model: {why}; {}",
            path.display(),
            differing(&their_config, &model.config).unwrap_or("give the options of its model".into())
        ))
    };
    // `rows` has a pair of rows, ours and theirs, for each entry that both vocabularies have.
    let rows = vocabulary.shared_with(&their_vocabulary);
    if let Some(name) = theirs.keys().filter(|name| !ours.contains_key(*name)).min() {
        return Err(refuse(format!("this run's has no {name}")));
    }
    for (name, own) in &mut ours {
        let other = theirs.get(name).ok_or_else(|| refuse(format!("it has no {name}")))?;
        let is_table = name.ends_with("embedding.weight") || name.starts_with("output_projection.");
        // The size of one row in our and in their parameter; `None` if it has no row for each vocabulary entry.
        let row_sizes = [(&*own, vocabulary), (other, &their_vocabulary)].map(|(t, vocabulary)| {
            let has_row_per_entry = is_table && t.size().first() == Some(&(vocabulary.len() as i64));
            has_row_per_entry.then(|| t.size()[1..].to_vec())
        });
        match row_sizes {
            [Some(own_row), Some(other_row)] if own_row == other_row => *own = with_rows(own, other, &rows)?,
            _ if own.size() == other.size() => *own = other.shallow_clone(),
            _ => return Err(refuse(format!("its {name} is {:?}, this run's {:?}", other.size(), own.size()))),
        }
    }
    let mut warnings = Vec::new();
    if rows.len() < vocabulary.len() {
        warnings.push(format!(
            "{} of the vocabulary's {} types are not in {}: their rows keep the drawn values",
            vocabulary.len() - rows.len(),
            vocabulary.len(),
            folder.display()
        ));
    }
    if let Some(differences) = differing(&their_config, &model.config) {
        warnings.push(format!("the weights of {} were trained in another model: {differences}", path.display()));
    }
    Ok((Transformer::to_train(&model.config, &ours)?, warnings))
}

/// Returns the table `own` with some rows replaced by rows of `other`. Each pair in `rows` is (row of `own`, row of
/// `other`).
fn with_rows(own: &Tensor, other: &Tensor, rows: &[(i64, i64)]) -> Result<Tensor> {
    let (own_rows, other_rows): (Vec<i64>, Vec<i64>) = rows.iter().copied().unzip();
    let index_tensor = |ids: &[i64]| Ok::<_, Error>(Tensor::f_from_slice(ids)?.f_to_device(own.device())?);
    let copied = other.f_index_select(0, &index_tensor(&other_rows)?)?;
    Ok(own.f_index_copy(0, &index_tensor(&own_rows)?, &copied)?)
}

/// Describes the options in which two models differ, except those of `MAY_DIFFER`; `None` if there are none.
fn differing(theirs: &TransformerConfig, ours: &TransformerConfig) -> Option<String> {
    let [theirs, ours] = [theirs, ours].map(|config| {
        let mut options = serde_json::json!(config);
        if let Some(options) = options.as_object_mut() {
            MAY_DIFFER.iter().for_each(|name| drop(options.remove(*name)));
        }
        options
    });
    (theirs != ours).then(|| differences(&theirs, &ours))
}

/// Splits RUN or RUN:CHECKPOINT into the folder and the checkpoint, which is `best` by default. The name of an existing
/// folder may have a colon.
pub fn parse(text: &str) -> (&Path, &str) {
    match text.rsplit_once(':') {
        Some((folder, checkpoint)) if !Path::new(text).is_dir() => (Path::new(folder), checkpoint),
        _ => (Path::new(text), "best"),
    }
}
