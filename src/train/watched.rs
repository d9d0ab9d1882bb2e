//! The numbers that `log_statistics` logs for the first batch of an update: the size of the residual stream in each
//! layer, the distance between the model's output and the initial model's, and, for norms that keep running
//! statistics, how far batch statistics differ from these. Measuring does not affect the run.

use super::forward_backward::TrainStep;
use super::micro_batch::MicroBatch;
use crate::analysis::{Diagnostics, StackObservation};
use crate::error::Result;
use crate::model::{Context, Transformer, PAD};
use std::collections::BTreeMap;
use std::rc::Rc;
use tch::{no_grad, with_grad, Kind, Reduction, Tensor};

/// Numbers by name, such as `size/decoder.0`. Numbers that are not finite, or that the model does not have, are left
/// out.
pub type Watched = BTreeMap<String, f64>;

/// Returns the numbers of the model before the update. `first` is the model with its initial values.
pub fn watch(step: &TrainStep, first: &Transformer, batch: &MicroBatch) -> Result<Watched> {
    let mut numbers = Watched::new();
    let stack_names: &[&str] = if step.model.config.has_encoder() { &["encoder", "decoder"] } else { &["decoder"] };
    for (stack, observation) in stack_names.iter().zip(observe_stacks(step, batch)?) {
        let StackObservation { sizes, statistics, .. } = observation;
        for (layer, size) in sizes.into_iter().enumerate() {
            numbers.insert(format!("size/{stack}.{layer}"), size);
        }
        // `norm` counts the stack's norms with running statistics, in the order of execution.
        for (norm, of_batch) in statistics.into_iter().enumerate() {
            for (kind, moments) in [("batch_distance", of_batch.distance), ("batch_gradient", of_batch.gradient)] {
                let parts = [("mean", moments.mean), ("variance", moments.variance), ("power", moments.power)];
                numbers.extend(parts.map(|(part, number)| (format!("{kind}/{stack}.{norm}.{part}"), number)));
            }
        }
    }
    numbers.insert("change/decoder".into(), change(step, first, batch)?);
    numbers.retain(|_, number| number.is_finite());
    Ok(numbers)
}

/// Runs the model in training mode and returns the observations of each stack. If norms keep statistics, also computes
/// the gradients of the mean NLL.
fn observe_stacks(step: &TrainStep, batch: &MicroBatch) -> Result<Vec<StackObservation>> {
    let watch = Rc::new(Diagnostics::default());
    // A recomputation leaves running statistics as they are.
    let is_recompute = true;
    let ctx = step.context(&batch.seed).fork(is_recompute).watched(watch.clone());
    let pass = |ctx: &Context| step.model.features(&batch.input.read, ctx);
    let loss = match step.model.parameters.have_statistics() {
        true => Some(with_grad(|| -> Result<Tensor> {
            let logits = step.model.logits(&pass(&ctx)?, step.kind)?.f_to_kind(Kind::Float)?;
            Ok(logits.f_cross_entropy_loss::<&Tensor>(&batch.input.output, None, Reduction::Mean, PAD, 0.0)?)
        })?),
        false => {
            let _ = no_grad(|| pass(&ctx))?;
            None
        }
    };
    // `Rc::into_inner` needs the only reference to `watch`, and `ctx` has another.
    drop(ctx);
    Rc::into_inner(watch).expect("the pass is over").finish(loss.as_ref())
}

/// Returns the mean over target tokens of ‖F(x; θ) − F(x; θ₀)‖₂ (Wang et al. 2022a). F is the decoder's output without
/// dropout, θ₀ the initial parameters.
fn change(step: &TrainStep, first: &Transformer, batch: &MicroBatch) -> Result<f64> {
    no_grad(|| {
        let [current, initial] = [&step.model, first].map(|model| {
            let features = model.features(&batch.input.read, &Context::evaluation(step.kind))?;
            Ok::<_, crate::error::Error>(features.f_to_kind(Kind::Float)?)
        });
        let norms = current?.f_sub(&initial?)?.f_norm_scalaropt_dim(2.0, [-1i64].as_slice(), false)?;
        let real = norms.f_masked_select(&batch.input.output.f_ne(PAD)?)?;
        Ok(f64::try_from(real.f_mean(Kind::Double)?)?)
    })
}
