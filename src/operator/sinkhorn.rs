//! `y = sinkhorn(logits)`: matrices whose rows and columns sum to nearly 1.

use super::call::{values, Call};
use super::declare::{gradient, leader, tensor, DtypeRule, Kernels, Operator};
use super::engine::Handle;
use crate::error::{Error, Result};
use crate::kernel::sinkhorn::call as kernel;
use tch::Tensor;

static HANDLE: Handle = Handle::new("sinkhorn");

/// Normalises matrices of logits (…, n, n) through the dispatcher. It takes the softmax of each row and adds ε. Then it
/// divides columns and rows in turn by their sums + ε, until the columns have been divided `iterations` times.
pub fn sinkhorn(logits: &Tensor, iterations: i64, eps: f64) -> Result<Tensor> {
    let [y] = HANDLE.call(&values![logits, iterations, eps])?;
    Ok(y)
}

/// Declares sinkhorn, which has kernels only on the CPU, with its backward operator.
pub(super) fn operator() -> Operator {
    Operator::new(
        "sinkhorn(Tensor logits, int iterations, float eps=1e-06) -> Tensor",
        [leader("logits", "*nn")],
        [tensor("y", "*nn", DtypeRule::Same)],
    )
    .plan(|call| {
        let [_, iterations, eps] = call.arguments();
        check("sinkhorn", iterations.int(), eps.float())
    })
    .kernel_on(Kernels::Cpu, |call| {
        let ([logits, iterations, eps], [y]) = (call.arguments(), call.outputs());
        kernel::forward(&logits.view, iterations.int() as usize, eps.float(), &y.view)
    })
    .formula(|call: &Call| {
        let [logits, iterations, eps] = call.arguments();
        Ok(vec![Some(kernel::composed(&logits.required(), iterations.int(), eps.float())?)])
    })
    .backward(
        Operator::new(
            "sinkhorn_backward(Tensor dy, Tensor logits, int iterations, float eps) -> Tensor",
            [tensor("dy", "*nn", DtypeRule::Same), leader("logits", "*nn")],
            [gradient("dlogits", "logits")],
        )
        .plan(|call| {
            let [_, _, iterations, eps] = call.arguments();
            check("sinkhorn_backward", iterations.int(), eps.float())
        })
        .kernel_on(Kernels::Cpu, |call| {
            let ([dy, logits, iterations, eps], [dlogits]) = (call.arguments(), call.outputs());
            kernel::backward(&dy.view, &logits.view, iterations.int() as usize, eps.float(), &dlogits.view)
        }),
    )
    .counted(&HANDLE)
}

/// Errors unless there are 1 to [`MOST`] iterations and ε is above 0. `name` is the operator's name.
fn check(name: &str, iterations: i64, eps: f64) -> Result<()> {
    if !(1..=MOST).contains(&iterations) {
        return Err(Error::invalid(format!("{name}: iterations must be from 1 to {MOST}, got {iterations}")));
    }
    match eps > 0.0 {
        true => Ok(()),
        false => Err(Error::invalid(format!("{name}: eps must be above 0, got {eps}"))),
    }
}

/// The maximum number of iterations. The backward pass needs memory for each of them: it keeps the matrices after every
/// division.
const MOST: i64 = 10_000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{force, Level};
    use crate::testing::assert_near;
    use tch::{Device, Kind};

    /// The expected values are DeepSeek's after ten normalisations of the columns.
    #[test]
    fn as_deepseek_has_it() {
        let logits = Tensor::from_slice(&[1.0, 0.2, -0.3, 0.5]).view([2, 2]);
        let found = Vec::<f64>::try_from(sinkhorn(&logits, 10, 1e-6).unwrap().flatten(0, -1)).unwrap();
        for (found, printed) in found.iter().zip([0.68997341, 0.31002559, 0.31002559, 0.68997341]) {
            assert!((found - printed).abs() < 1e-8, "{found} {printed}");
        }
    }

    #[test]
    fn kernels_compute_the_formula_and_its_gradient() {
        tch::manual_seed(2);
        for level in Level::ALL {
            force(Some(level));
            for (kind, bound) in [(Kind::Float, 2e-5), (Kind::Double, 1e-12), (Kind::BFloat16, 2e-2)] {
                for (count, n, iterations) in [(0, 4, 20), (1, 1, 1), (3, 2, 1), (16, 4, 20), (133, 4, 20), (17, 7, 3)]
                {
                    let logits = Tensor::randn([count, n, n], (Kind::Double, Device::Cpu)) * 3;
                    // `m` is a result, and `dm` its gradient.
                    let dm = Tensor::randn([count, n, n], (Kind::Double, Device::Cpu)).to_kind(kind);
                    let gradient = |logits: &Tensor, m: &Tensor| {
                        let dm = dm.to_kind(m.kind());
                        Tensor::run_backward(&[(m * dm).sum(m.kind())], &[logits], false, false).remove(0)
                    };
                    let logits = logits.to_kind(kind).set_requires_grad(true);
                    let exact = logits.detach().to_kind(Kind::Double).set_requires_grad(true);
                    let found = sinkhorn(&logits, iterations, 1e-6).unwrap();
                    let wanted = kernel::composed(&exact, iterations, 1e-6).unwrap();
                    let pairs = [(&found, &wanted), (&gradient(&logits, &found), &gradient(&exact, &wanted))];
                    for (found, wanted) in pairs {
                        assert_eq!(found.kind(), kind);
                        assert_near(found, wanted, bound, 0.0, &format!("{level:?} {kind:?} {count} {n} {iterations}"));
                    }
                }
            }
        }
        force(None);
    }
}
