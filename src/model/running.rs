//! Norms with running statistics in a model.

use super::norm::{BuiltParameter, Norm, NormParameters, RowContext};
use super::Builder;
use crate::analysis::Columns;
use crate::error::{Error, Result};
use crate::kernel::columns::ColumnOptions;
use crate::norm::composed::accumulate;
use crate::norm::operators::{BlendedNormOpSpec, ColumnNormOpSpec};
use crate::norm::power_norm::PowerNormMode;
use crate::norm::spec::{NormArgs, StateBuffer, CLOCK};
use crate::norm::statistics::StateTensors;
use crate::norm::{NormContext, Spec};
use crate::operator::{group_scaling, Column, ColumnNormOp, RowNormOp};
use crate::residual::{Growth, GrowthCurve};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use tch::{Kind, Tensor};

/// The statistics that each norm has used in a forward pass, kept for the recomputation. The key is the norm's address.
pub type UsedStatistics = Rc<RefCell<HashMap<usize, Tensor>>>;

pub(super) struct BuiltColumnNorm {
    operator: &'static ColumnNormOp,
    centred: bool,
    affine: NormParameters,
    /// The first running statistic: μ or ψ².
    first: Tensor,
    /// The second running statistic: σ² or ν.
    second: Option<Tensor>,
    iters: Option<Tensor>,
    /// The number of batches whose statistics were refused because they were not finite.
    refused: Tensor,
    options: ColumnOptions,
    sync: bool,
    groups: i64,
}

/// Builds the norm from parameters that have been declared already; `given` holds the values of its options. Declares
/// the norm's buffers, and returns the clock t if there is one.
pub(super) fn build(
    spec: &Spec,
    kernels: &'static ColumnNormOpSpec,
    affine: NormParameters,
    b: &mut Builder,
    context: &NormContext,
    given: &NormArgs,
) -> Result<(BuiltColumnNorm, Option<Tensor>)> {
    // The values of a norm's options by keyword, as f64 and as i64; `None` if the norm has no such option.
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
    // A counter is the clock t or PowerNorm's number of updates; the other buffers are the running statistics.
    let (mut buffers, mut iters, mut clock) = (Vec::new(), None, None);
    for (declared, buffer) in spec.buffers.iter().zip(buffers_of(spec, b, given)?) {
        match declared.is_counter {
            true if declared.name == CLOCK.name => clock = Some(buffer),
            true => iters = Some(buffer),
            false => buffers.push(buffer),
        }
    }
    let mut statistics = buffers.into_iter();
    let first = statistics.next().expect("a norm with statistics of columns declares one");
    let groups = count("groups").unwrap_or(0);
    if groups > 0 && context.width % groups != 0 {
        return Err(Error::invalid(format!("a norm of width {} cannot be scaled in {groups} groups", context.width)));
    }
    let (sync, second, refused) = (given.flag("sync"), statistics.next(), b.refused()?);
    let (operator, centred) = (ColumnNormOp::of(kernels), kernels.kernel.centred);
    let built = BuiltColumnNorm { operator, centred, affine, first, second, iters, refused, options, sync, groups };
    Ok((built, clock))
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
    /// Normalises each column of x by statistics over the rows. Training also updates the running statistics. If the
    /// norm has groups, each row is first scaled in groups.
    fn forward(&self, x: &Tensor, rows: &RowContext) -> Result<Tensor> {
        let BuiltColumnNorm { operator, first, second, iters, options, .. } = self;
        let scaled = if self.groups > 0 { group_scaling(x, self.groups)? } else { x.shallow_clone() };
        // A norm's address identifies it in the map of statistics.
        let key = std::ptr::from_ref(self) as usize;
        // `used` holds the statistics that the first run used, if this is a recomputation.
        let used = rows
            .statistics
            .filter(|_| rows.is_recompute)
            .and_then(|statistics| statistics.borrow().get(&key).map(Tensor::shallow_clone));
        // A recomputation that finds no kept statistics works on copies, so that nothing is updated twice. PowerNorm
        // counts updates, so its statistics change only with the last micro-batch of an update.
        let is_frozen = rows.is_recompute && used.is_none() || rows.is_partial && iters.is_some();
        // The operator updates its state in place.
        let state = |t: &Tensor| if is_frozen { t.copy() } else { t.shallow_clone() };
        let [weight, bias] = self.affine.values()?;
        let (y, stats) = operator.call(&Column {
            x: &scaled,
            weight: weight.as_ref(),
            bias: bias.as_ref(),
            pad_mask: rows.pad_mask,
            state: StateTensors {
                first: Some(state(first)),
                second: second.as_ref().map(state),
                iters: iters.as_ref().map(state),
                refused: Some(state(&self.refused)),
            },
            stats: used.as_ref(),
            options: ColumnOptions {
                train: rows.train,
                ranks: if self.sync { rows.group.ranks() } else { None },
                ..*options
            },
        })?;
        // The first run keeps its statistics for the recomputation.
        if let (false, Some(statistics)) = (rows.is_recompute, rows.statistics) {
            statistics.borrow_mut().insert(key, stats);
        }
        if let Some(watch) = rows.watch {
            // A norm that centres keeps μ and σ²; otherwise the first statistic is ψ².
            let (mean, square) = match second {
                Some(variance) if self.centred => (Some(first), variance),
                _ => (None, first),
            };
            watch.running_norm(
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

/// A norm with column statistics, plus a learned multiple of x. During training, the norm may fade in from a row norm.
pub(super) struct BuiltBlendedNorm {
    columns: BuiltColumnNorm,
    /// η, the learned factor of x, (1,).
    share: BuiltParameter,
    fade: Option<Fade>,
}

/// The row norm of a fading norm's first updates, and the schedule by which it fades out.
struct Fade {
    operator: &'static RowNormOp,
    weight: BuiltParameter,
    bias: Option<BuiltParameter>,
    eps: f64,
    /// The growth of 1 − λ over T updates; λ is the weight of the row norm.
    growth: Growth,
    /// The number w of updates before the growth begins.
    warm: i64,
    /// The number of the coming update, int64 (1,).
    t: Tensor,
}

impl BuiltBlendedNorm {
    /// Builds the norm from parameters that have been declared already. Declares the norm's buffers. `blend` names the
    /// operators of the two norms; `given` holds the values of the norm's options.
    pub fn build(
        spec: &Spec,
        blend: &'static BlendedNormOpSpec,
        mut affine: NormParameters,
        b: &mut Builder,
        context: &NormContext,
        given: &NormArgs,
    ) -> Result<Self> {
        // `inside` holds η, then the weight and the bias of the row norm, in the order of the declaration.
        let mut inside = std::mem::take(&mut affine.inside).into_iter();
        let share = inside.next().expect("a blended norm declares its share of x");
        let (columns, clock) = build(spec, blend.columns, affine, b, context, given)?;
        let fade = blend.from.map(|from| Fade {
            operator: RowNormOp::of(from(given)),
            weight: inside.next().expect("a norm that fades declares the weight of the norm of rows"),
            bias: inside.next(),
            eps: given.float("eps"),
            growth: Growth { steps: given.float("steps") as i64, curve: GrowthCurve::Linear, by_layer: false },
            warm: given.float("warm") as i64,
            t: clock.expect("a norm that fades declares a clock"),
        });
        Ok(BuiltBlendedNorm { columns, share, fade })
    }
}

impl Norm for BuiltBlendedNorm {
    /// Returns N(x) + η⊙x. In training, a norm that fades in returns λ·R(x) + (1−λ)·(N(x) + η⊙x), with the row norm R.
    fn forward(&self, x: &Tensor, rows: &RowContext) -> Result<Tensor> {
        let wide = accumulate(x)?;
        let padding = rows.pad_mask.map(|mask| mask.f_unsqueeze(-1)).transpose()?;
        // Returns t with zeros at padding.
        let real = |t: &Tensor| match &padding {
            Some(padding) => t.f_masked_fill(padding, 0.0),
            None => Ok(t.shallow_clone()),
        };
        let x_real = real(&wide)?;
        let fade = self.fade.as_ref().filter(|_| rows.train);
        // `hidden` is true at the rows that the statistics leave out; `None` if they leave out just the padding.
        let hidden = fade.map(|fade| fade.hidden(&wide, rows.pad_mask)).transpose()?.flatten();
        let blended =
            self.columns.forward(&wide, &RowContext { pad_mask: hidden.as_ref().or(rows.pad_mask), ..*rows })?;
        // y is N(x) + η⊙x, in which padding adds nothing.
        let mut y = blended.f_add(&x_real.f_mul(&self.share.value()?.f_to_kind(wide.kind())?)?)?;
        if let Some(fade) = fade {
            y = real(&fade.mix(&x_real, &y)?)?;
        }
        Ok(y.f_to_kind(x.kind())?)
    }
}

impl Fade {
    /// Returns a mask that hides every row from the norm with statistics during the warm-up, and padding always;
    /// `None` if there is no warm-up.
    fn hidden(&self, x: &Tensor, pad_mask: Option<&Tensor>) -> Result<Option<Tensor>> {
        if self.warm == 0 {
            return Ok(None);
        }
        let size = x.size();
        let implicit = false; // an internal flag of PyTorch's `expand`
        let warming = self.t.f_le(self.warm)?.f_expand(&size[..size.len() - 1], implicit)?;
        Ok(Some(match pad_mask {
            Some(mask) => mask.f_logical_or(&warming)?,
            None => warming.f_contiguous()?,
        }))
    }

    /// Returns λ·R(x) + (1−λ)·y, where R is the row norm and λ falls from 1 to 0 over the updates.
    fn mix(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        // `grown` is 1 − λ, which is 0 up to update w + 1 and then grows. The growth is the same in all layers.
        let layer = 0;
        let grown = self.growth.alpha(&self.t.f_sub_scalar(self.warm + 1)?, layer, x.kind())?;
        let bias = self.bias.as_ref().map(BuiltParameter::value).transpose()?;
        let normed = self.operator.call(x, Some(&self.weight.value()?), bias.as_ref(), self.eps)?;
        Ok(normed.f_mul(&grown.f_neg()?.f_add_scalar(1.0)?)?.f_add(&y.f_mul(&grown)?)?)
    }
}
