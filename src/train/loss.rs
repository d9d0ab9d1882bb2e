//! The output projection and the loss, computed in blocks of rows. Only one block's logits exist at a time, and the
//! cross-entropy overwrites them with their gradient. So the logits, perhaps 10,000 for each token, need not travel to
//! memory and back.
//!
//! A softmax over a target vocabulary V_t needs only the logits in V_t. So the rows of the output matrix that belong
//! to V_t are gathered once per pass, and their gradients are added to the gradient of the matrix.

use crate::config::{SmoothingName, TrainingConfig};
use crate::error::Result;
use crate::kernel::cross_entropy as kernel;
use crate::kernel::product::{add_product, product};
use crate::kernel::row_sum::add_rows;
use crate::kernel::view::accumulation;
use crate::model::{FlatBuffers, FlatParameter, Transformer, PAD};
use crate::operator;
use tch::{no_grad, Kind, Tensor};

/// The number of rows in a block. At |V| = 10,000 a block's logits take 20 MB in bf16, and the products are large
/// enough for full speed.
const BLOCK: i64 = 1024;

/// Returns the two weights of label smoothing, for a target vocabulary with `valid` entries.
pub fn smoothing(config: &TrainingConfig, valid: usize) -> kernel::Smoothing {
    match config.smoothing {
        SmoothingName::Fairseq => kernel::Smoothing::fairseq(config.label_smoothing, valid),
        SmoothingName::Twt => kernel::Smoothing::twt(config.label_smoothing, valid),
    }
}

/// The sums of losses over target tokens, in nats. They are 0-dim f64 tensors, so that the host does not wait for the
/// device.
pub struct LossSums {
    pub loss: Tensor,
    pub nll: Tensor,
}

/// The loss function: cross-entropy with label smoothing over the target vocabulary V_t, and the z-loss.
pub struct Objective {
    /// bool (V), true in the target vocabulary; `None` if it contains all entries.
    pub mask: Option<Tensor>,
    smoothing: kernel::Smoothing,
    /// The entries of V_t; `None` if it contains all entries.
    entries: Option<TargetEntries>,
    /// The factor of the square of log Σ exp(logits), which training adds to the loss.
    pub z_loss: f64,
}

/// The entries of the target vocabulary, each with its column of logits.
struct TargetEntries {
    /// The ids of V_t, int64 (|V_t|), ascending.
    ids: Tensor,
    /// The column of each vocabulary entry, int64 (V). PAD has `IGNORED`, and entries outside V_t have |V_t|, which is
    /// no column.
    columns: Tensor,
}

impl TargetEntries {
    /// The column of PAD: rows with this target do not count.
    const IGNORED: i64 = -1;

    /// Numbers the columns of logits from 0, one for each entry that the mask allows.
    fn of(mask: &Tensor) -> Result<Self> {
        let ids = mask.f_nonzero()?.f_view(-1i64)?;
        // At an entry that the mask allows, the cumulative sum counts the allowed entries up to this one, so its column
        // is the sum minus 1.
        let columns = mask.f_cumsum(0, Kind::Int64)?.f_sub_scalar(1)?;
        let columns = columns.f_masked_fill(&mask.f_logical_not()?, ids.size()[0])?;
        let _ = columns.f_narrow(0, PAD, 1)?.f_fill_(TargetEntries::IGNORED)?;
        Ok(TargetEntries { ids, columns })
    }
}

/// A buffer for the logits of one block. It is kept between steps, so that its memory is allocated once.
#[derive(Default)]
pub struct Workspace {
    logits: Option<Tensor>,
}

impl Workspace {
    /// Returns the first `rows` rows of the buffer, which has [`BLOCK`] rows. Replaces the buffer if its width is not
    /// `cols`, its type is not `kind`, or its device is not that of `like`.
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
    /// Builds the loss without z-loss. `mask`, bool (V), is true in the target vocabulary; `None` means all entries.
    pub fn new(mask: Option<Tensor>, smoothing: kernel::Smoothing) -> Result<Self> {
        let entries = mask.as_ref().map(TargetEntries::of).transpose()?;
        Ok(Objective { mask, smoothing, entries, z_loss: 0.0 })
    }

    /// Returns the z-loss ζ·log²Z of each row of `logits` (rows, columns), with Z = Σ exp(logits) and ζ the option
    /// `z_loss`; 0 for rows for which `counts`, bool (rows), is false. Returns also the gradient with respect to the
    /// logits of `scale` times this loss, `scale`·2ζ·log Z·softmax(logits). Both are f32, or f64 if the logits are.
    /// Returns `None` without a z-loss.
    fn z_loss(&self, logits: &Tensor, counts: &Tensor, scale: &Tensor) -> Result<Option<(Tensor, Tensor)>> {
        if self.z_loss == 0.0 {
            return Ok(None);
        }
        let kind = accumulation(logits.kind());
        let logits = logits.f_to_kind(kind)?;
        let log_z = logits.f_logsumexp([-1i64].as_slice(), true)?;
        let counted = log_z.f_mul(&counts.f_unsqueeze(-1)?.f_to_kind(kind)?)?;
        let loss = counted.f_square()?.f_mul_scalar(self.z_loss)?.f_squeeze_dim(-1)?;
        let slope = counted.f_mul_scalar(2.0 * self.z_loss)?.f_mul(&scale.f_to_kind(kind)?)?;
        let softmax = logits.f_sub(&log_z)?.f_exp()?;
        Ok(Some((loss, softmax.f_mul(&slope)?)))
    }

    /// Returns the column of logits that each target has, and the column number that means "ignore this row".
    fn columns(&self, targets: &Tensor) -> Result<(Tensor, i64)> {
        Ok(match &self.entries {
            Some(entries) => (entries.columns.f_index_select(0, targets)?, TargetEntries::IGNORED),
            None => (targets.shallow_clone(), PAD),
        })
    }

    /// Returns the sums of the loss over `features` (rows, d), and back-propagates `scale`·Σ loss into the model.
    /// `targets` is int64 (rows), and `scale` 0-dim f64, both on the same device. `kind` is the type of matrix
    /// products. `flat` is the flat buffers; `None` on a GPU.
    pub fn backward(
        &self,
        model: &Transformer,
        features: &Tensor,
        targets: &Tensor,
        scale: &Tensor,
        kind: Kind,
        flat: Option<&FlatBuffers>,
        workspace: &mut Workspace,
    ) -> Result<LossSums> {
        // The output projection's weight is (V, d), and its bias, if there is one, (V).
        let ((weight, bias), softcap) = (model.output()?, model.softcap());
        let (sums, dh, weight, bias) = no_grad(|| {
            // `weight` and `bias` sum gradients over blocks, `w` and `b` are the values for the products. `h` are the
            // features, and `dh` is their gradient.
            let summed = |t: &Tensor| OutputGradient::new(t, kind, flat, self.entries.as_ref());
            let (weight, bias) = (summed(&weight)?, bias.map(summed).transpose()?);
            let (w, b) = (&weight.place.value, bias.as_ref().map(|b| &b.place.value));
            let h = features.f_detach()?.f_to_kind(kind)?;
            let dh = h.f_empty_like()?;
            let mut sums = LossSums::zero(&h)?;
            let (targets, ignored) = self.columns(targets)?;
            for (start, rows) in blocks(h.size()[0]) {
                let h = h.f_narrow(0, start, rows)?;
                let mut logits = workspace.block(rows, w.size()[0], kind, &h)?;
                product(&logits, &h, &w.f_transpose(0, 1)?, b)?;
                // `write` caps the logits, and `slope` is the softcap's derivative. It is computed from the capped
                // logits now, because the cross-entropy overwrites them below.
                let slope = softcap.map(|cap| cap.write(&mut logits).and_then(|()| cap.slope(&logits))).transpose()?;
                let targets = targets.f_narrow(0, start, rows)?;
                let z_loss = self.z_loss(&logits, &targets.f_ne(ignored)?, scale)?;
                let (loss, nll) =
                    operator::cross_entropy_in_place(&mut logits, &targets, None, self.smoothing, ignored, scale)?;
                sums.add(&loss, &nll)?;
                if let Some((loss, gradient)) = z_loss {
                    let _ = sums.loss.f_add_(&loss.f_sum(Kind::Double)?)?;
                    let sum = logits.f_add(&gradient)?;
                    logits.f_copy_(&sum)?;
                }
                // From here on `logits` holds the gradient with respect to the logits, still without the softcap's
                // derivative.
                if let Some(slope) = slope {
                    let _ = logits.f_mul_(&slope)?;
                }
                product(&dh.f_narrow(0, start, rows)?, &logits, w, None)?;
                add_product(&weight.place.gradient, &logits, &h)?;
                if let Some(bias) = &bias {
                    add_rows(&bias.place.gradient, &logits)?;
                }
            }
            Ok::<_, crate::error::Error>((sums, dh, weight, bias))
        })?;
        for gradient in [Some(weight), bias].into_iter().flatten() {
            gradient.propagate(self.entries.as_ref())?;
        }
        // Autograd propagates the gradient of the features through the rest of the model.
        operator::backward_from(features, &dh.f_to_kind(features.kind())?)?;
        Ok(sums)
    }

    /// Returns the sums of the loss without gradients and without the z-loss. The arguments are those of
    /// [`backward`](Self::backward).
    pub fn forward(
        &self,
        model: &Transformer,
        features: &Tensor,
        targets: &Tensor,
        kind: Kind,
        workspace: &mut Workspace,
    ) -> Result<LossSums> {
        let ((weight, bias), softcap) = (model.output()?, model.softcap());
        // Only the rows of V_t are needed, in the type of products.
        let cast = |t: &Tensor| rows_of(&t.f_to_kind(kind)?, self.entries.as_ref());
        let (w, b) = (cast(&weight)?, bias.map(cast).transpose()?);
        let h = features.f_to_kind(kind)?;
        let (targets, ignored) = self.columns(targets)?;
        let mut sums = LossSums::zero(&h)?;
        for (start, rows) in blocks(h.size()[0]) {
            let mut logits = workspace.block(rows, w.size()[0], kind, &h)?;
            product(&logits, &h.f_narrow(0, start, rows)?, &w.f_transpose(0, 1)?, b.as_ref())?;
            softcap.map_or(Ok(()), |cap| cap.write(&mut logits))?;
            let targets = targets.f_narrow(0, start, rows)?;
            let (loss, nll) = operator::cross_entropy(&logits, &targets, None, self.smoothing, ignored)?;
            sums.add(&loss, &nll)?;
        }
        Ok(sums)
    }
}

/// A parameter of the output projection, or a tensor computed from one, with its gradient summed over all blocks.
struct OutputGradient {
    /// The parameter and its gradient; only the rows in V_t, if there is a target vocabulary.
    place: FlatParameter,
    /// The gradient with all rows; `None` if `place` has all rows already.
    gradient: Option<Tensor>,
    /// The tensor from which autograd propagates the complete gradient; `None` if the gradient lies in the flat
    /// buffers.
    source: Option<Tensor>,
}

impl OutputGradient {
    /// Makes the gradient, initially 0, of the parameter `t` or of a tensor computed from one. Products compute in
    /// `kind`. `flat` is the flat buffers, `None` on a GPU; `entries` is V_t, the part of the vocabulary that targets
    /// may have.
    fn new(t: &Tensor, kind: Kind, flat: Option<&FlatBuffers>, entries: Option<&TargetEntries>) -> Result<Self> {
        // In the flat buffers the gradient is complete where it lies. Otherwise autograd must propagate it.
        let (place, source) = match flat.map(|flat| flat.place(t)).transpose()?.flatten() {
            Some(place) => (place, None),
            None => (FlatParameter { value: t.f_to_kind(kind)?, gradient: t.f_zeros_like()? }, Some(t.shallow_clone())),
        };
        if entries.is_none() {
            return Ok(OutputGradient { place, gradient: None, source });
        }
        // Products use only the rows in V_t. `propagate` adds the gradient of these to that of all rows.
        let value = rows_of(&place.value, entries)?;
        let gradient = value.f_zeros_like()?.f_to_kind(place.gradient.kind())?;
        Ok(OutputGradient { place: FlatParameter { value, gradient }, gradient: Some(place.gradient), source })
    }

    /// Adds the gradient of the rows in V_t to that of all rows. Then autograd propagates the complete gradient, unless
    /// it lies in the flat buffers.
    fn propagate(self, entries: Option<&TargetEntries>) -> Result<()> {
        let mut gradient = self.place.gradient;
        if let (Some(mut whole), Some(entries)) = (self.gradient, entries) {
            // `index_add_` would take three times as long on a CPU.
            let sum = rows_of(&whole, Some(entries))?.f_add_(&gradient)?;
            let _ = whole.f_index_copy_(0, &entries.ids, &sum)?;
            gradient = whole;
        }
        self.source.map_or(Ok(()), |t| operator::backward_from(&t, &gradient))
    }
}

/// Returns the rows of `t` that belong to V_t, or all rows without a target vocabulary.
fn rows_of(t: &Tensor, entries: Option<&TargetEntries>) -> Result<Tensor> {
    Ok(match entries {
        Some(entries) => t.f_index_select(0, &entries.ids)?,
        None => t.shallow_clone(),
    })
}

impl LossSums {
    /// Returns sums of 0 on the device of `like`.
    fn zero(like: &Tensor) -> Result<Self> {
        // An empty list of sizes makes a 0-dim tensor.
        let zero = || Tensor::f_zeros([0i64; 0].as_slice(), (Kind::Double, like.device()));
        Ok(LossSums { loss: zero()?, nll: zero()? })
    }

    /// Adds the losses of a block, which have one number for each row.
    fn add(&mut self, loss: &Tensor, nll: &Tensor) -> Result<()> {
        for (sum, of_rows) in [(&mut self.loss, loss), (&mut self.nll, nll)] {
            let _ = sum.f_add_(&of_rows.f_sum(Kind::Double)?)?;
        }
        Ok(())
    }

    /// Returns a copy that has its own memory.
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

/// Splits `rows` rows into blocks. Returns the first row and the number of rows of each block.
fn blocks(rows: i64) -> impl Iterator<Item = (i64, i64)> {
    (0..rows).step_by(BLOCK as usize).map(move |start| (start, BLOCK.min(rows - start)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TransformerConfig;
    use tch::Device;

    const V: i64 = 40;

    /// Builds a small model with `V` vocabulary entries, always the same for the same options.
    fn model(fixnorm: bool, logit_softcap: Option<f64>) -> Transformer {
        let config = TransformerConfig {
            vocab_size: V,
            d_model: 16,
            d_ff: 8,
            heads: 2,
            encoder_layers: 1,
            decoder_layers: 1,
            fixnorm,
            output_bias: true,
            logit_softcap,
            logit_scale: logit_softcap.is_some(),
            ..Default::default()
        };
        tch::manual_seed(8);
        Transformer::new(&config, 4, Device::Cpu, Kind::Double).unwrap()
    }

    /// The loss over the logits of V_t alone is compared with a softmax over all logits in which the others are
    /// masked.
    #[test]
    fn the_projection_on_the_target_vocabulary_is_the_masked_one() {
        let ids = Tensor::arange(V, (Kind::Int64, Device::Cpu));
        let mask = ids.remainder(3).not_equal(1).logical_or(&ids.less(4));
        let rows = BLOCK + 30;
        let targets = mask.nonzero().view(-1i64);
        let targets =
            targets.index_select(0, &ids.repeat([rows / V + 1]).narrow(0, 0, rows).remainder(targets.size()[0]));
        assert!(targets.eq(PAD).sum(Kind::Int64).int64_value(&[]) > 1);
        for (fixnorm, softcap) in [(false, None), (true, None), (false, Some(0.7))] {
            let h = Tensor::randn([rows, 16], (Kind::Double, Device::Cpu));
            let scale = Tensor::from(0.25);
            let found = [false, true].map(|composed| {
                let (model, h) = (model(fixnorm, softcap), h.copy().set_requires_grad(true));
                let objective = Objective::new(Some(mask.copy()), kernel::Smoothing::fairseq(0.1, 29)).unwrap();
                let capped = |z: Tensor| softcap.map_or(z.shallow_clone(), |c| (z / c).tanh() * c);
                let sums = if composed {
                    let (w, b) = model.output().unwrap();
                    let (loss, nll) = operator::cross_entropy(
                        &capped(h.linear(&w, b)),
                        &targets,
                        Some(&mask),
                        objective.smoothing,
                        PAD,
                    )
                    .unwrap();
                    operator::backward_from(&loss, &scale.expand(loss.size(), false).contiguous()).unwrap();
                    LossSums { loss: loss.sum(Kind::Double), nll: nll.sum(Kind::Double) }
                } else {
                    let workspace = &mut Workspace::default();
                    let alone = no_grad(|| objective.forward(&model, &h, &targets, Kind::Double, workspace)).unwrap();
                    let sums = objective.backward(&model, &h, &targets, &scale, Kind::Double, None, workspace).unwrap();
                    assert_eq!(alone.loss.double_value(&[]), sums.loss.double_value(&[]));
                    sums
                };
                let (w, b) = (model.parameters.tensors()[0].grad(), model.output().unwrap().1.unwrap().grad());
                [sums.loss.detach(), sums.nll.detach(), h.grad(), w, b]
            });
            for (place, (ours, composed)) in found[0].iter().zip(&found[1]).enumerate() {
                assert!(ours.allclose(composed, 1e-9, 1e-12, false), "fixnorm {fixnorm} {softcap:?}: {place}");
            }
        }
    }

    /// The z-loss is compared with autograd's gradient of ζ·logsumexp² over the rows that count.
    #[test]
    fn the_z_loss_adds_its_gradient() {
        let mask = Tensor::arange(V, (Kind::Int64, Device::Cpu)).remainder(3).not_equal(1);
        let targets = mask.nonzero().view(-1i64);
        for softcap in [None, Some(0.7)] {
            let h = Tensor::randn([targets.numel() as i64, 16], (Kind::Double, Device::Cpu));
            let scale = Tensor::from(0.25);
            let run = |z_loss: f64| {
                let (model, h) = (model(false, softcap), h.copy().set_requires_grad(true));
                let mut objective = Objective::new(Some(mask.copy()), kernel::Smoothing::fairseq(0.1, 29)).unwrap();
                objective.z_loss = z_loss;
                let workspace = &mut Workspace::default();
                let sums = objective.backward(&model, &h, &targets, &scale, Kind::Double, None, workspace).unwrap();
                (sums.loss.double_value(&[]), h.grad())
            };
            let ((plain, without), (loss, with)) = (run(0.0), run(0.3));
            let (model, x) = (model(false, softcap), h.copy().set_requires_grad(true));
            let (w, b) = model.output().unwrap();
            let logits = x.linear(&w, b).index_select(1, &mask.nonzero().view(-1i64));
            let logits = softcap.map_or(logits.shallow_clone(), |c| (&logits / c).tanh() * c);
            let counts = targets.not_equal(PAD).to_kind(Kind::Double);
            let z = (logits.logsumexp([-1i64].as_slice(), false).square() * counts).sum(Kind::Double) * 0.3;
            (&z * &scale).backward();
            assert!((loss - plain - z.double_value(&[])).abs() < 1e-9);
            assert!((with - without).allclose(&x.grad(), 1e-9, 1e-12, false), "{softcap:?}");
        }
    }

    #[test]
    fn a_target_outside_the_vocabulary_is_refused() {
        let mask = Tensor::arange(V, (Kind::Int64, Device::Cpu)).not_equal(9);
        let objective = Objective::new(Some(mask), kernel::Smoothing::fairseq(0.1, 39)).unwrap();
        let h = Tensor::zeros([2, 16], (Kind::Double, Device::Cpu));
        let run = |target: i64| {
            let targets = Tensor::from_slice(&[5, target]);
            no_grad(|| objective.forward(&model(false, None), &h, &targets, Kind::Double, &mut Workspace::default()))
        };
        assert!(run(39).is_ok() && run(PAD).is_ok());
        assert!(run(9).err().unwrap().to_string().contains("not in the target vocabulary"));
    }
}
