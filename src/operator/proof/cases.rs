//! The cases of a proof, and how each changes the actual call.
//!
//! Most cases have more rows than the device processes at once. Together the cases test both sides of every run-time
//! condition of the kernels, such as with and without a mask. Norms with column statistics have further conditions:
//! rows are real or padding, a call trains or evaluates, the variant is the paper's or the release's, inputs are finite
//! or not, and counters are low, high or at the end of a warm-up.

use super::maker::{counted, few_columns, is_kept, rows, Maker, Tensors, FEW, LATE, LONG};
use crate::cuda::Device;
use crate::error::Result;
use crate::kernel::columns::gpu::slabs;
use crate::operator::argument::{Argument, DtypeRule, Reading};
use crate::operator::call::{Call, Value};
use crate::operator::declare::Operator;
use crate::operator::register::Declared;
use tch::{Kind, Tensor};

/// A change to the actual call, before its kernels are compared with the formula.
#[derive(Clone, Copy, PartialEq)]
pub enum Case {
    /// The call as it is.
    Usual,
    /// Some rows are corner cases: huge, tiny, zero, of a length near ε, with a NaN, or with one or two large numbers.
    Extreme,
    /// The call's mask is left out or, if it has none, one is added.
    Masked,
    /// Every row is padding, during a warm-up, so there are no rows to measure.
    Padding,
    /// Columns have means that are not 0, and counters are high.
    Late,
    /// Training and evaluation are exchanged.
    Other,
    /// Counters are this many steps before the end of a warm-up, and there are few rows.
    Before(i64),
    /// The variants `paper` and `release` are exchanged. One row out of this many is padding.
    Variant(i64),
    /// A number in this column (−1 is the last) is NaN or infinite. Flat buffers have no columns; their scale is NaN.
    Spoilt(i64),
    /// There are few columns, and so many rows that slabs (the rows that a block sums) exceed their minimum size.
    Long,
}

impl Case {
    pub const ALL: [Case; 13] = [
        Case::Usual,
        Case::Extreme,
        Case::Masked,
        Case::Padding,
        Case::Late,
        Case::Other,
        Case::Before(1),
        Case::Before(0),
        Case::Variant(2),
        Case::Variant(1),
        Case::Spoilt(0),
        Case::Spoilt(-1),
        Case::Long,
    ];
}

/// Returns the call's values as the case changes them, and the test tensors that replace the tensors among them, at the
/// same indices; `None` if the case makes no sense for this call.
pub fn arguments(
    operator: &Operator,
    call: &Call,
    device: Device,
    case: Case,
) -> Result<Option<(Vec<Value>, Tensors)>> {
    let declared = Declared::new(operator)?;
    let (leader, leader_place) = declared.leader()?;
    let mut given = call.all().to_vec();
    let x = given[leader_place].required();
    let has_state = declared.table.iter().any(|(argument, _)| matches!(argument.reading, Reading::State));
    if !makes_sense(case, &declared, &given, has_state)? {
        return Ok(None);
    }
    change_numbers(case, &declared, &mut given);
    // `given` points to these tensors, until test tensors replace all tensor arguments.
    let fabricated = change_tensors(case, &declared, &x, &mut given)?;
    // Returns the value of the argument with this name; `None` if the operator has no such argument.
    let number = |name: &str| declared.place(name).map(|place| given[place]);
    let counter = match case {
        Case::Late | Case::Other | Case::Variant(_) => Some(LATE),
        Case::Padding => Some(0),
        Case::Before(steps) => number("warmup").map(|warmup| warmup.int() - steps),
        _ => None,
    };
    let rows = match case {
        Case::Long => LONG,
        Case::Before(_) => FEW,
        _ => rows(&x, device),
    };
    // A mask that the case adds marks the first row as padding, which the paper's variant must not read.
    let has_mask = matches!(case, Case::Masked | Case::Long) && fabricated.iter().any(|t| t.kind() == Kind::Bool);
    let maker = Maker {
        rows,
        is_whole: leader.sizes == "*",
        is_dropped: number("seed").and(number("p")).is_some_and(|p| p.float() > 0.0),
        has_state,
        has_corners: leader.sizes == "*d" && !has_state,
        is_logits: leader.sizes == "nc",
        is_hidden: has_mask && number("variant").is_some_and(|variant| variant.text() == "paper"),
        is_backward: operator.forward.get().is_some(),
        case,
        counter,
        eps: number("eps").map_or(1.0, |eps| eps.float()),
    };
    // If a backward operator takes outputs of its forward operator, its tensors come from one forward call.
    let tensors = match operator.forward.get().filter(|_| declared.table.iter().any(|(a, _)| is_kept(operator, a))) {
        None => maker.all(&declared, &given)?,
        Some(forward) => maker.after(forward, &declared, &given)?,
    };
    Ok(Some((given, tensors)))
}

/// True if the case changes something on which the operator's kernels may depend.
fn makes_sense(case: Case, declared: &Declared, given: &[Value], has_state: bool) -> Result<bool> {
    let (leader, leader_place) = declared.leader()?;
    let has = |name: &str| declared.place(name).is_some();
    let mask = mask_of(declared);
    Ok(match case {
        Case::Usual => true,
        // Flat buffers have no rows. In rows of one number there is nothing to compare.
        Case::Extreme => leader.sizes != "=n" && given[leader_place].required().size().last() != Some(&1),
        // A mask of classes is not added: if it excluded a row's target, the row would have no gradient to compare.
        Case::Masked => mask.is_some_and(|(argument, place)| argument.sizes == "*" || !given[place].is_none()),
        Case::Padding => has_state && mask.is_some(),
        Case::Late | Case::Long => has_state,
        Case::Other => has("train"),
        Case::Before(_) => has("warmup"),
        Case::Variant(_) => has("variant"),
        Case::Spoilt(_) => has_state || leader.sizes == "=n",
    })
}

/// Changes the call's numbers, flags and words as the case requires.
fn change_numbers(case: Case, declared: &Declared, given: &mut [Value]) {
    let mut change = |name: &str, new_value: &dyn Fn(Value) -> Value| {
        if let Some(place) = declared.place(name) {
            given[place] = new_value(given[place]);
        }
    };
    match case {
        Case::Other => change("train", &|train| (!train.flag()).into()),
        Case::Before(_) | Case::Padding => change("warmup", &|warmup| warmup.int().max(3).into()),
        Case::Variant(_) => change("variant", &|v| if v.text() == "paper" { "release" } else { "paper" }.into()),
        _ => (),
    }
}

/// Replaces tensors among the call's values `given` as the case requires; `x` is the leader's tensor. `given` points to
/// the returned tensors, so callers must keep them.
fn change_tensors(case: Case, declared: &Declared, x: &Tensor, given: &mut [Value]) -> Result<Vec<Tensor>> {
    let mut fabricated: Vec<(usize, Tensor)> = Vec::new();
    if let Some((_, place)) = mask_of(declared) {
        // Returns a mask that marks every n-th row, from the first, as padding.
        let every =
            |n: i64| -> Result<Tensor> { Ok(counted(&x.size()[..x.dim() - 1], x.device())?.f_remainder(n)?.f_eq(0)?) };
        match case {
            Case::Masked if !given[place].is_none() => given[place] = Value::from(None::<f64>),
            Case::Masked => fabricated.push((place, every(2)?)),
            Case::Padding => fabricated.push((place, every(1)?)),
            Case::Variant(n) => fabricated.push((place, every(n)?)),
            Case::Long => {
                // A slab is the rows that one block sums. In every second slab, the mask marks the first three quarters
                // of the rows as padding.
                let (row, (slab, _)) = (counted(&[LONG], x.device())?, slabs(LONG));
                let is_in_first_part = row.f_remainder(slab)?.f_lt(slab * 3 / 4)?;
                let is_in_even_slab = row.f_remainder(2 * slab)?.f_lt(slab)?;
                fabricated.push((place, is_in_even_slab.f_logical_and(&is_in_first_part)?));
            }
            _ => (),
        }
    }
    if case == Case::Long {
        for (argument, place) in declared.table.iter().filter(|(argument, _)| argument.sizes.ends_with('d')) {
            if let Some(real) = given[*place].tensor() {
                fabricated.push((*place, few_columns(argument, &real)?));
            }
        }
    }
    for (place, tensor) in &fabricated {
        let view = given[*place].view; // the test tensor gets the alignment of the view's address
        given[*place] = tensor.into();
        given[*place].view = view;
    }
    Ok(fabricated.into_iter().map(|(_, tensor)| tensor).collect())
}

/// Returns the operator's mask and its index in the schema, if it has one: no other argument is a bool tensor.
fn mask_of<'a>(declared: &Declared<'a>) -> Option<(&'a Argument, usize)> {
    declared.table.iter().copied().find(|(argument, _)| argument.dtype == DtypeRule::Bool)
}
