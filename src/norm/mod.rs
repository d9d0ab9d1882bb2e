//! Normalisation layers: one table, one file per norm.
//!
//! A norm declares its equation, parameters, buffers, options and composed form in a [`Spec`]. A norm of rows may add
//! its arithmetic for one row, which both its own operator and the fused residual step use. A norm with column
//! statistics adds a function that settles them: it updates the running statistics and returns those to apply.
//! [`kernel::columns`](crate::kernel::columns) calls it.

pub mod batch_norm;
pub mod composed;
pub mod conventions;
pub mod derf;
pub mod dyt;
pub mod families;
pub mod fix_norm;
pub mod gated_rms_norm;
pub mod given;
pub mod group_scaling;
pub mod l2_norm;
pub mod layer_norm;
pub mod lp_norm;
pub mod operators;
pub mod power_norm;
pub mod power_norm_v;
pub mod rep_bn;
pub mod rms_norm;
pub mod scale_norm;
pub mod spec;
pub mod statistics;

use crate::error::{unknown, Result};
use crate::options::{distinct, AnyOption, Options};
use families::FAMILIES;
use operators::{ColumnNormOpSpec, RowNormOpSpec};
pub use spec::{Form, NormContext, Spec};
use std::borrow::Cow;

/// Every norm that a model can use by name.
pub static NORMS: &[&Spec] = &[
    &layer_norm::SPEC,
    &rms_norm::SPEC,
    &scale_norm::SPEC,
    &scale_norm::FIXED,
    &lp_norm::SPEC,
    &batch_norm::SPEC,
    &power_norm_v::SPEC,
    &power_norm::SPEC,
    &rep_bn::SPEC,
    &rep_bn::PROGRESSIVE,
    &dyt::SPEC,
    &derf::SPEC,
    &l2_norm::SPEC,
    &gated_rms_norm::SPEC,
];

// The compiler checks every entry. A `const` block may not use iterators.
const _: () = {
    let mut i = 0;
    while i < NORMS.len() {
        assert!(
            NORMS[i].keeps_its_buffers(),
            "a norm that declares buffers needs Form::Columns or Form::Blended: no other form keeps them"
        );
        i += 1;
    }
};

/// Every norm with row kernels. Each has an operator, which is registered at the norm's index in this list.
pub static ROW_NORMS: &[&RowNormOpSpec] =
    &[&layer_norm::OPERATOR, &rms_norm::OPERATOR, &scale_norm::OPERATOR, &dyt::OPERATOR, &derf::OPERATOR];

/// Every norm with column statistics. Each has an operator, which is registered at the norm's index in this list.
pub static COLUMN_NORMS: &[&ColumnNormOpSpec] =
    &[&batch_norm::OPERATOR, &power_norm_v::OPERATOR, &power_norm::OPERATOR];

/// Iterates over every name that models can use: first the norms', then the families'.
pub fn names() -> impl Iterator<Item = &'static str> {
    NORMS.iter().map(|norm| norm.name).chain(FAMILIES.iter().map(|family| family.name))
}

/// Returns the entry of the table with this name. For the name of a family, returns the entry of its norm.
pub fn find(name: &str) -> Result<&'static Spec> {
    let family = || FAMILIES.iter().find(|family| family.name == name).map(|family| family.spec);
    let user_declared = || given::find(name);
    NORMS
        .iter()
        .copied()
        .find(|n| n.name == name)
        .or_else(family)
        .or_else(user_declared)
        .ok_or_else(|| unknown("norm", name, names()))
}

/// Returns the entry of the table with this name, and the options. If the name is a family's, the options have the
/// family's values.
pub fn named<'a>(name: &str, options: &'a Options) -> Result<(&'static Spec, Cow<'a, Options>)> {
    let resolved = match FAMILIES.iter().find(|family| family.name == name) {
        Some(family) => Cow::Owned(family.options(options)),
        None => Cow::Borrowed(options),
    };
    Ok((find(name)?, resolved))
}

/// Returns the options of all norms, each option once.
pub fn option_specs() -> Vec<&'static dyn AnyOption> {
    distinct(NORMS.iter().flat_map(|norm| norm.options).filter_map(|keyword| keyword.option))
}
