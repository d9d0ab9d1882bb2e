//! The numbers that `log_statistics` logs for the first batch of an update: those of the residual stream in each
//! layer, how far the model's output is from the initial model's, and the batch statistics of norms that keep running
//! ones. Measuring them does not affect the run.

use super::forward_backward::TrainStep;
use super::micro_batch::MicroBatch;
use crate::analysis::{StackObservation, Watch};
use crate::error::Result;
use crate::model::{Context, Transformer, PAD};
use std::collections::BTreeMap;
use std::rc::Rc;
use tch::{no_grad, with_grad, Kind, Reduction, Tensor};

/// Numbers by name. A number that the model does not have is left out.
pub type Watched = BTreeMap<String, f64>;

/// Returns the numbers of the model before the update. `first` is the model with its initial values.
pub fn watch(step: &TrainStep, first: &Transformer, batch: &MicroBatch) -> Result<Watched> {
    let mut found = Watched::new();
    let names: &[&str] = if step.model.config.has_encoder() { &["encoder", "decoder"] } else { &["decoder"] };
    for (stack, seen) in names.iter().zip(stacks(step, batch)?) {
        let StackObservation { sizes, statistics, .. } = seen;
        for (layer, size) in sizes.into_iter().enumerate() {
            found.insert(format!("size/{stack}.{layer}"), size);
        }
        for (norm, of_batch) in statistics.into_iter().enumerate() {
            let (distance, gradient) = (of_batch.distance, of_batch.gradient);
            for (what, moments) in [("batch_distance", distance), ("batch_gradient", gradient)] {
                let parts = [("mean", moments.mean), ("variance", moments.variance), ("power", moments.power)];
                found.extend(parts.map(|(part, number)| (format!("{what}/{stack}.{norm}.{part}"), number)));
            }
        }
    }
    found.insert("change/decoder".into(), change(step, first, batch)?);
    found.retain(|_, number| number.is_finite());
    Ok(found)
}

/// Observes a pass in training mode. If norms keep statistics, the pass also computes gradients of the mean NLL.
fn stacks(step: &TrainStep, batch: &MicroBatch) -> Result<Vec<StackObservation>> {
    let watch = Rc::new(Watch::default());
    let ctx = step.context(&batch.seed).fork(true).watched(watch.clone()); // a repeated pass updates no statistics
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
    drop(ctx);
    Rc::into_inner(watch).expect("the pass is over").finish(loss.as_ref())
}

/// Returns ‖F(x; θ) − F(x; θ₀)‖₂, in which F is the decoder's output without dropout and θ₀ are the initial
/// parameters, averaged over target tokens (Wang et al. 2022a).
fn change(step: &TrainStep, first: &Transformer, batch: &MicroBatch) -> Result<f64> {
    no_grad(|| {
        let [now, then] = [&step.model, first].map(|model| {
            let features = model.features(&batch.input.read, &Context::evaluation(step.kind))?;
            Ok::<_, crate::error::Error>(features.f_to_kind(Kind::Float)?)
        });
        let norms = now?.f_sub(&then?)?.f_norm_scalaropt_dim(2.0, [-1i64].as_slice(), false)?;
        let real = norms.f_masked_select(&batch.input.output.f_ne(PAD)?)?;
        Ok(f64::try_from(real.f_mean(Kind::Double)?)?)
    })
}
