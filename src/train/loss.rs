//! The output projection and the loss, in blocks of rows: logits exist for one block at a time, and the cross-entropy
//! leaves their gradient where they were, so that 10,000 logits a token never travel to memory and back.

use crate::config::{SmoothingName, TrainingConfig};
use crate::error::Result;
use crate::kernel::cross_entropy as kernel;
use crate::kernel::product::{add_product, add_rows};
use crate::model::{Flat, Placed, Transformer, PAD};
use crate::operator;
use tch::{no_grad, Kind, Tensor};

/// Rows of a block: 20 MB of bf16 logits at |V| = 10,000, and matrix products still large enough to run at full speed.
const BLOCK: i64 = 1024;

/// Label smoothing's two weights, for a target vocabulary of `valid` types.
pub fn smoothing(config: &TrainingConfig, valid: usize) -> kernel::Smoothing {
    match config.smoothing {
        SmoothingName::Fairseq => kernel::Smoothing::fairseq(config.label_smoothing, valid),
        SmoothingName::Twt => kernel::Smoothing::twt(config.label_smoothing, valid),
    }
}

/// Sums over target tokens, in nats; 0-dim f64 tensors, so that nobody waits for the device.
pub struct LossSums {
    pub loss: Tensor,
    pub nll: Tensor,
}

/// What the loss is taken against.
pub struct Objective {
    /// bool (V), true in the target vocabulary; none: all types.
    pub mask: Option<Tensor>,
    pub smoothing: kernel::Smoothing,
}

/// Memory for one block of logits, kept between steps.
#[derive(Default)]
pub struct Workspace {
    logits: Option<Tensor>,
}

impl Workspace {
    fn block(&mut self, rows: i64, cols: i64, kind: Kind, like: &Tensor) -> Result<Tensor> {
        let fits = |t: &Tensor| t.size()[1] == cols && t.kind() == kind && t.device() == like.device();
        if !self.logits.as_ref().is_some_and(fits) {
            self.logits = Some(Tensor::f_empty([BLOCK, cols].as_slice(), (kind, like.device()))?);
        }
        let whole = self.logits.as_ref().expect("the block was made above");
        Ok(whole.f_narrow(0, 0, rows)?)
    }
}

impl Objective {
    /// Sums of the loss over `features` (rows, d), with the gradient of `scale`·Σ loss (0-dim f64, beside them)
    /// back-propagated into the model.
    pub fn backward(
        &self,
        model: &Transformer,
        features: &Tensor,
        targets: &Tensor,
        scale: &Tensor,
        kind: Kind,
        flat: Option<&Flat>,
        workspace: &mut Workspace,
    ) -> Result<LossSums> {
        let (weight, bias) = model.output()?; // (V, d)
        let (sums, dh, weight, bias) = no_grad(|| {
            let (weight, bias) =
                (Adding::to(&weight, kind, flat)?, bias.map(|b| Adding::to(b, kind, flat)).transpose()?);
            let (w, b) = (&weight.place.value, bias.as_ref().map(|b| &b.place.value));
            let h = features.f_detach()?.f_to_kind(kind)?;
            let dh = h.f_empty_like()?;
            let mut sums = LossSums::zero(&h)?;
            for (start, rows) in blocks(h.size()[0]) {
                let h = h.f_narrow(0, start, rows)?;
                let mut logits = workspace.block(rows, w.size()[0], kind, &h)?;
                project(&h, w, b, &logits)?;
                let targets = targets.f_narrow(0, start, rows)?;
                let (loss, nll) = operator::cross_entropy_in_place(
                    &mut logits,
                    &targets,
                    self.mask.as_ref(),
                    self.smoothing,
                    PAD,
                    scale,
                )?;
                sums.add(&loss, &nll)?;
                // logits now holds their gradient
                let _ = logits.f_mm_out(&dh.f_narrow(0, start, rows)?, w)?;
                add_product(&weight.place.gradient, &logits, &h)?;
                if let Some(bias) = &bias {
                    add_rows(&bias.place.gradient, &logits)?;
                }
            }
            Ok::<_, crate::error::Error>((sums, dh, weight, bias))
        })?;
        for summed in [Some(weight), bias].into_iter().flatten() {
            summed.hand_on()?;
        }
        operator::backward_from(features, &dh.f_to_kind(features.kind())?)?;
        Ok(sums)
    }

    /// Sums of the loss, without gradients.
    pub fn forward(
        &self,
        model: &Transformer,
        features: &Tensor,
        targets: &Tensor,
        kind: Kind,
        workspace: &mut Workspace,
    ) -> Result<LossSums> {
        let (weight, bias) = model.output()?;
        let (w, b) = (weight.f_to_kind(kind)?, bias.map(|b| b.f_to_kind(kind)).transpose()?);
        let h = features.f_to_kind(kind)?;
        let mut sums = LossSums::zero(&h)?;
        for (start, rows) in blocks(h.size()[0]) {
            let logits = workspace.block(rows, w.size()[0], kind, &h)?;
            project(&h.f_narrow(0, start, rows)?, &w, b.as_ref(), &logits)?;
            let targets = targets.f_narrow(0, start, rows)?;
            let (loss, nll) = operator::cross_entropy(&logits, &targets, self.mask.as_ref(), self.smoothing, PAD)?;
            sums.add(&loss, &nll)?;
        }
        Ok(sums)
    }
}

/// A parameter of the output projection, or a function of one, and its gradient of all blocks.
struct Adding {
    place: Placed,
    /// It is not in the flat buffers: autograd takes its gradient on, when all blocks are in it.
    elsewhere: Option<Tensor>,
}

impl Adding {
    fn to(t: &Tensor, kind: Kind, flat: Option<&Flat>) -> Result<Self> {
        Ok(match flat.map(|flat| flat.place(t)).transpose()?.flatten() {
            Some(place) => Adding { place, elsewhere: None },
            None => {
                let place = Placed { value: t.f_to_kind(kind)?, gradient: t.f_zeros_like()? };
                Adding { place, elsewhere: Some(t.shallow_clone()) }
            }
        })
    }

    fn hand_on(self) -> Result<()> {
        self.elsewhere.map_or(Ok(()), |t| operator::backward_from(&t, &self.place.gradient))
    }
}

impl LossSums {
    fn zero(like: &Tensor) -> Result<Self> {
        let zero = || Tensor::f_zeros([0i64; 0].as_slice(), (Kind::Double, like.device()));
        Ok(LossSums { loss: zero()?, nll: zero()? })
    }

    fn add(&mut self, loss: &Tensor, nll: &Tensor) -> Result<()> {
        for (sum, rows) in [(&mut self.loss, loss), (&mut self.nll, nll)] {
            let _ = sum.f_add_(&rows.f_sum(Kind::Double)?)?;
        }
        Ok(())
    }

    /// The same numbers in memory of their own.
    pub fn copy(&self) -> Result<Self> {
        Ok(LossSums { loss: self.loss.f_detach_copy()?, nll: self.nll.f_detach_copy()? })
    }

    /// Adds another batch's sums.
    pub fn merge(&mut self, other: &LossSums) -> Result<()> {
        let _ = self.loss.f_add_(&other.loss)?;
        let _ = self.nll.f_add_(&other.nll)?;
        Ok(())
    }
}

fn blocks(rows: i64) -> impl Iterator<Item = (i64, i64)> {
    (0..rows).step_by(BLOCK as usize).map(move |start| (start, BLOCK.min(rows - start)))
}

/// out = h Wᵀ + b
fn project(h: &Tensor, weight: &Tensor, bias: Option<&Tensor>, out: &Tensor) -> Result<()> {
    let _ = h.f_mm_out(out, &weight.f_transpose(0, 1)?)?;
    if let Some(bias) = bias {
        let _ = out.shallow_clone().f_add_(bias)?;
    }
    Ok(())
}
