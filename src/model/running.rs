//! A norm with running statistics in a model.

use super::norm::{Norm, NormParameters, RowContext};
use super::Builder;
use crate::analysis::Columns;
use crate::error::{Error, Result};
use crate::kernel::columns::ColumnOptions;
use crate::norm::operators::ColumnNormOpSpec;
use crate::norm::power_norm::PowerNormMode;
use crate::norm::spec::{NormArgs, StateBuffer};
use crate::norm::statistics::StateTensors;
use crate::norm::{NormContext, Spec};
use crate::operator::{group_scaling, Column, ColumnNormOp};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use tch::{Kind, Tensor};

/// The statistics that each norm has used in a forward pass, kept because a recomputation for the gradient needs
/// them.
pub type UsedStatistics = Rc<RefCell<HashMap<usize, Tensor>>>;

struct BuiltColumnNorm {
    operator: &'static ColumnNormOp,
    centred: bool,
    affine: NormParameters,
    /// The first running statistic: μ or ψ².
    first: Tensor,
    /// The second running statistic: σ² or ν.
    second: Option<Tensor>,
    iters: Option<Tensor>,
    /// The number of batches whose statistics were refused because they are not finite.
    refused: Tensor,
    options: ColumnOptions,
    sync: bool,
    groups: i64,
}

/// Builds the norm from parameters that have been declared already. Declares the norm's buffers.
pub(super) fn build(
    spec: &Spec,
    kernels: &'static ColumnNormOpSpec,
    affine: NormParameters,
    b: &mut Builder,
    context: &NormContext,
    given: &NormArgs,
) -> Result<Box<dyn Norm>> {
    let number = |keyword: &str| given.number(keyword);
    let count = |keyword: &str| given.value(keyword).and_then(|value| value.as_i64());
    let default = ColumnOptions::default();
    let options = ColumnOptions {
        eps: number("eps").unwrap_or(default.eps),
        alpha: number("alpha").or(number("alpha_fwd")).unwrap_or(default.alpha),
        alpha_bwd: number("alpha_bwd").unwrap_or(default.alpha_bwd),
        warmup: count("warmup_iters").unwrap_or(default.warmup),
        release: given.is("mode", PowerNormMode::Release.name()),
        ..default
    };
    let (mut buffers, mut iters) = (Vec::new(), None);
    for (declared, buffer) in spec.buffers.iter().zip(buffers_of(spec, b, given)?) {
        match declared.is_counter {
            true => iters = Some(buffer),
            false => buffers.push(buffer),
        }
    }
    let mut buffers = buffers.into_iter();
    let first = buffers.next().expect("a norm with statistics of columns declares one");
    let groups = count("groups").unwrap_or(0);
    if groups > 0 && context.width % groups != 0 {
        return Err(Error::invalid(format!("a norm of width {} cannot be scaled in {groups} groups", context.width)));
    }
    let (sync, second, refused) = (given.flag("sync"), buffers.next(), b.refused()?);
    let (operator, centred) = (ColumnNormOp::of(kernels), kernels.kernel.centred);
    Ok(Box::new(BuiltColumnNorm { operator, centred, affine, first, second, iters, refused, options, sync, groups }))
}

/// Declares the norm's buffers and returns them in the order of the declaration.
fn buffers_of(spec: &Spec, b: &mut Builder, given: &NormArgs) -> Result<Vec<Tensor>> {
    let buffer = |buffer: &StateBuffer| {
        let kind = if buffer.is_counter { Kind::Int64 } else { b.statistics_kind() };
        b.buffer(buffer.name, &buffer.shape.of(given), buffer.start, kind)
    };
    spec.buffers.iter().map(buffer).collect()
}

impl Norm for BuiltColumnNorm {
    fn forward(&self, x: &Tensor, rows: &RowContext) -> Result<Tensor> {
        let BuiltColumnNorm { operator, first, second, iters, options, .. } = self;
        let scaled = if self.groups > 0 { group_scaling(x, self.groups)? } else { x.shallow_clone() };
        let key = std::ptr::from_ref(self) as usize;
        let used = rows
            .statistics
            .filter(|_| rows.is_recompute)
            .and_then(|statistics| statistics.borrow().get(&key).map(Tensor::shallow_clone));
        // A recomputation that finds no kept statistics works on copies, so that nothing is updated twice. PowerNorm
        // counts updates, so its statistics change only with the last micro-batch of an update.
        let stays = rows.is_recompute && used.is_none() || rows.is_partial && iters.is_some();
        let own = |t: &Tensor| if stays { t.copy() } else { t.shallow_clone() };
        let [weight, bias] = self.affine.values()?;
        let (y, stats) = operator.call(&Column {
            x: &scaled,
            weight: weight.as_ref(),
            bias: bias.as_ref(),
            pad_mask: rows.pad_mask,
            state: StateTensors {
                first: Some(own(first)),
                second: second.as_ref().map(own),
                iters: iters.as_ref().map(own),
                refused: Some(own(&self.refused)),
            },
            stats: used.as_ref(),
            options: ColumnOptions {
                train: rows.train,
                ranks: if self.sync { rows.group.ranks() } else { None },
                ..*options
            },
        })?;
        if let (false, Some(statistics)) = (rows.is_recompute, rows.statistics) {
            statistics.borrow_mut().insert(key, stats);
        }
        if let Some(watch) = rows.watch {
            let (mean, square) = match second {
                Some(variance) if self.centred => (Some(first), variance),
                _ => (None, first),
            };
            watch.norm(
                Columns {
                    x: scaled,
                    pad_mask: rows.pad_mask.map(Tensor::shallow_clone),
                    weight,
                    mean: mean.map(Tensor::shallow_clone),
                    square: square.shallow_clone(),
                    eps: options.eps,
                },
                &y,
            );
        }
        Ok(y)
    }
}
