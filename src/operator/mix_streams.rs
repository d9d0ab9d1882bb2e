//! `y = weights·streams`: weighted sums of the streams of hyper-connections.

use super::call::{values, Value};
use super::declare::{gradient, leader, tensor, DtypeRule, Kernels, Operator};
use super::engine::Handle;
use crate::error::{Error, Result};
use crate::kernel::mix_streams::call::{self as kernel, Inputs};
use tch::Tensor;

static HANDLE: Handle = Handle::new("mix_streams");

/// Computes y_i = Σ_j w_ij h_j (…, m, d) through the dispatcher. h_j are the n streams (…, n, d), followed by `added`
/// (…, d) if it is given. The weights are (…, m, n), or (…, m, n + 1) with `added`, in the type of the computation.
pub fn mix_streams(streams: &Tensor, weights: &Tensor, added: Option<&Tensor>) -> Result<Tensor> {
    let [y] = HANDLE.call(&values![streams, weights, added])?;
    Ok(y)
}

/// Declares mix_streams, which has kernels only on the CPU, with its backward operator.
pub(super) fn operator() -> Operator {
    // The letters of sizes: n streams, m sums, d columns, and k columns of weights (`check` compares k with n).
    Operator::new(
        "mix_streams(Tensor streams, Tensor weights, Tensor? added=None) -> Tensor",
        [
            leader("streams", "*nd"),
            tensor("weights", "*mk", DtypeRule::Computed),
            tensor("added", "*d", DtypeRule::Same).optional(),
        ],
        [tensor("y", "*md", DtypeRule::Same)],
    )
    .plan(|call| {
        let [streams, weights, added] = call.arguments();
        check("mix_streams", [streams, weights, added])
    })
    .kernel_on(Kernels::Cpu, |call| {
        let ([streams, weights, added], [y]) = (call.arguments(), call.outputs());
        kernel::forward(&inputs([streams, weights, added]), &y.view)
    })
    .formula(|call| {
        let [streams, weights, added] = call.arguments();
        Ok(vec![Some(kernel::composed(&streams.required(), &weights.required(), added.tensor().as_ref())?)])
    })
    .backward(
        Operator::new(
            "mix_streams_backward(Tensor dy, Tensor streams, Tensor weights, Tensor? added) -> (Tensor, Tensor, Tensor)",
            [
                tensor("dy", "*md", DtypeRule::Same),
                leader("streams", "*nd"),
                tensor("weights", "*mk", DtypeRule::Computed),
                tensor("added", "*d", DtypeRule::Same).optional(),
            ],
            [gradient("dstreams", "streams"), gradient("dweights", "weights"), gradient("dadded", "added")],
        )
        .plan(|call| {
            let [_, streams, weights, added] = call.arguments();
            check("mix_streams_backward", [streams, weights, added])
        })
        .kernel_on(Kernels::Cpu, |call| {
            let ([dy, streams, weights, added], [dstreams, dweights, dadded]) = (call.arguments(), call.outputs());
            let gradients = [&dstreams.view, &dadded.view, &dweights.view];
            kernel::backward(&dy.view, &inputs([streams, weights, added]), gradients)
        }),
    )
    .counted(&HANDLE)
}

/// Reads the operator's inputs. The weights have a column for each stream, and a last one for `added` if it is given.
fn inputs<'a>([streams, weights, added]: [&'a Value; 3]) -> Inputs<'a> {
    let added = (!added.is_none()).then_some(&added.view);
    let n = weights.view.cols() - usize::from(added.is_some());
    Inputs { n, streams: &streams.view, added, weights: &weights.view }
}

/// Errors unless the weights (…, m, k) fit the streams (…, n, d): k must be n, or n + 1 with `added`.
fn check(name: &str, [streams, weights, added]: [&Value; 3]) -> Result<()> {
    let (streams, weights) = (streams.required().size(), weights.required().size());
    // n streams; m rows and k columns of weights, the last two sizes.
    let n = streams[streams.len() - 2];
    let [m, k] = [2, 1].map(|back| weights[weights.len() - back]);
    let wanted = n + i64::from(!added.is_none());
    let why = if added.is_none() { "one for each stream" } else { "one for each stream and one for `added`" };
    if k != wanted {
        return Err(Error::invalid(format!("{name}: weights must have {wanted} columns, {why}, got {k}")));
    }
    match n >= 1 && m >= 1 {
        true => Ok(()),
        false => {
            Err(Error::invalid(format!("{name}: expected at least one stream and one row of weights, got {n}, {m}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{force, Level};
    use crate::testing::assert_near;
    use tch::{Device, Kind};

    #[test]
    fn kernels_compute_the_formula_and_its_gradients() {
        tch::manual_seed(2);
        for level in Level::ALL {
            force(Some(level));
            for (kind, bound) in [(Kind::Float, 1e-6), (Kind::Double, 1e-14), (Kind::BFloat16, 1e-2)] {
                // `count` is the number of positions; `is_added` is true if there is a further row.
                for (count, m, n, d, is_added) in [
                    (0, 1, 4, 8, true),
                    (1, 1, 1, 1, false),
                    (3, 1, 4, 33, false),
                    (700, 4, 4, 96, true),
                    (5, 3, 2, 0, true),
                ] {
                    let weight_kind = if kind == Kind::Double { kind } else { Kind::Float };
                    let random =
                        |size: &[i64], kind: Kind| Tensor::randn(size, (Kind::Double, Device::Cpu)).to_kind(kind);
                    let k = n + i64::from(is_added);
                    let inputs =
                        [random(&[count, n, d], kind), random(&[count, m, k], weight_kind), random(&[count, d], kind)];
                    let dy = random(&[count, m, d], kind);
                    // Returns the gradients and the result of f on inputs of this type.
                    let run = |kind: Kind, f: fn(&Tensor, &Tensor, Option<&Tensor>) -> Result<Tensor>| {
                        let is_exact = kind == Kind::Double;
                        let leaf =
                            |t: &Tensor| if is_exact { t.to_kind(kind) } else { t.copy() }.set_requires_grad(true);
                        let [h, w, added] = inputs.each_ref().map(leaf);
                        let y = f(&h, &w, is_added.then_some(&added)).unwrap();
                        let sum = (&y * dy.to_kind(y.kind())).sum(y.kind());
                        let leaves = if is_added { vec![&h, &w, &added] } else { vec![&h, &w] };
                        let mut results = Tensor::run_backward(&[sum], &leaves, false, false);
                        results.push(y);
                        results
                    };
                    for (found, wanted) in run(kind, mix_streams).iter().zip(run(Kind::Double, kernel::composed)) {
                        assert_near(found, &wanted, bound, 0.0, &format!("{level:?} {kind:?} {count} {m} {n} {d}"));
                    }
                }
            }
        }
        force(None);
    }
}
