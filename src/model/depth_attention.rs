//! Attention over depth (docs/spec.md §2.22): a kernel in training loops on a CPU, elsewhere tch's operations.

use crate::error::Result;
use crate::kernel::depth_attention::call::{self as kernel, Operands};
use crate::kernel::depth_attention::EPS;
use crate::kernel::view::accumulation;
use crate::norm::composed::accumulate;
use crate::operator::{evaluate, Differentiable};
use tch::{Kind, Tensor};

/// Returns the sum Σ_i a_i v_i of the outputs v_0, v_1, …, each (…, d), with a = softmax_i⟨query, v_i/RMS(v_i)⟩, and
/// the scores before the softmax. The normed form (`is_normed`) sums up v_i/RMS(v_i). The query is (d) or (queries, d);
/// a gain on v_i is already multiplied into it. The sum is (…, d) or (queries, …, d). The scores, (…, queries,
/// outputs), have no gradient. In a training loop (`is_training`) a kernel of the CPU computes both; it has no second
/// derivative.
pub fn attend(outputs: &[&Tensor], query: &Tensor, is_normed: bool, is_training: bool) -> Result<[Tensor; 2]> {
    // The queries, (queries, d), in the type of sums.
    let u = query
        .f_to_kind(accumulation(outputs[0].kind()))?
        .f_view([-1, *query.size().last().expect("a query has numbers")])?;
    let [x, scores] = match is_training && outputs[0].numel() > 0 {
        false => composed(outputs, &u, is_normed)?,
        true => {
            let inputs: Vec<&Tensor> = std::iter::once(&u).chain(outputs.iter().copied()).collect();
            evaluate(DepthAttentionNode { is_normed }, &inputs)?.try_into().expect("a sum and scores")
        }
    };
    Ok([if query.dim() == 1 { x.f_squeeze_dim(0)? } else { x }, scores.f_detach()?])
}

struct DepthAttentionNode {
    is_normed: bool,
}

impl DepthAttentionNode {
    /// Calls `compute` with the kernel's operands. `inputs` are the queries (queries, d), then the outputs (…, d).
    fn with<R>(&self, inputs: Vec<Tensor>, compute: impl FnOnce(&Operands) -> Result<R>) -> Result<R> {
        let inputs = inputs.iter().map(|t| Ok(t.f_contiguous()?)).collect::<Result<Vec<_>>>()?;
        let [queries, outputs @ ..] = &inputs[..] else { unreachable!("the queries are an input") };
        compute(&Operands { outputs, queries, is_normed: self.is_normed })
    }
}

impl Differentiable for DepthAttentionNode {
    /// Returns true: the backward pass needs the queries and the outputs.
    fn saves_inputs(&self) -> bool {
        true
    }

    /// Returns the sums x and the scores; the inputs are the queries, then the outputs v_0, v_1, …
    fn forward(&self, inputs: Vec<Tensor>) -> Result<Vec<Tensor>> {
        self.with(inputs, |operands| {
            // x is (queries, …, d), and the scores are (…, queries, outputs).
            let (first, queries) = (&operands.outputs[0], operands.queries.size()[0]);
            let mut size = first.size();
            let x = Tensor::f_empty([&[queries], &size[..]].concat(), (first.kind(), first.device()))?;
            size.pop(); // d, in whose place the scores have two other dimensions
            size.extend([queries, operands.outputs.len() as i64]);
            let scores = Tensor::f_empty(size.as_slice(), (operands.queries.kind(), first.device()))?;
            kernel::forward(operands, &x.f_unbind(0)?, &scores)?;
            Ok(vec![x, scores])
        })
    }

    /// Returns the gradients of the queries and of each output.
    fn backward(&self, inputs: Vec<Tensor>, gradients: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        // The scores, the second result, have no gradient.
        let Some(dx) = &gradients[0] else { return Ok(inputs.iter().map(|_| None).collect()) };
        self.with(inputs, |operands| {
            let (first, queries) = (&operands.outputs[0], operands.queries);
            let du = Tensor::f_zeros(queries.size().as_slice(), (queries.kind(), first.device()))?;
            let empty = |_: &Tensor| Tensor::f_empty(first.size().as_slice(), (first.kind(), first.device()));
            let dv = operands.outputs.iter().map(empty).collect::<std::result::Result<Vec<_>, _>>()?;
            kernel::backward(operands, &dx.f_contiguous()?.f_unbind(0)?, &du, &dv)?;
            Ok(std::iter::once(du).chain(dv).map(Some).collect())
        })
    }
}

/// Computes what [`attend`] returns with tch's operations: the sums (queries, …, d) and the scores (…, queries,
/// outputs). `u` holds the queries, (queries, d), in the type of sums.
fn composed(outputs: &[&Tensor], u: &Tensor, is_normed: bool) -> Result<[Tensor; 2]> {
    // Each output has scores ⟨u, v/RMS(v)⟩ and a scale 1/RMS(v).
    let scores_and_scales = outputs.iter().map(|v| {
        let v = accumulate(v)?;
        let keepdim = true;
        let mean_square = v.f_square()?.f_mean_dim([-1i64].as_slice(), keepdim, None::<Kind>)?;
        let scale = mean_square.f_add_scalar(EPS)?.f_rsqrt()?;
        Ok((v.f_linear::<&Tensor>(u, None)?.f_mul(&scale)?, scale)) // (…, queries), (…, 1)
    });
    let (scores, scales): (Vec<_>, Vec<_>) = scores_and_scales.collect::<Result<Vec<_>>>()?.into_iter().unzip();
    let scores = Tensor::f_stack(&scores, -1)?;
    let mut weights = scores.f_softmax(-1, None::<Kind>)?;
    if is_normed {
        // The weight of v_i/RMS(v_i) becomes the weight of v_i.
        weights = weights.f_mul(&Tensor::f_cat(&scales, -1)?.f_unsqueeze(-2)?)?;
    }
    let weights = weights.f_to_kind(outputs[0].kind())?;
    // Returns the weighted sum of the outputs for the query with this index.
    let sum = |query: i64| -> Result<Tensor> {
        let weight = |i: usize| weights.f_select(-2, query)?.f_narrow(-1, i as i64, 1);
        // The terms are added one by one: a stacked copy of all outputs would have to be kept for the backward pass.
        let first = outputs[0].f_mul(&weight(0)?)?;
        (1..outputs.len()).try_fold(first, |sum, i| Ok(sum.f_addcmul(outputs[i], &weight(i)?)?))
    };
    let x = match u.size()[0] {
        1 => sum(0)?.f_unsqueeze(0)?,
        queries => Tensor::f_stack(&(0..queries).map(sum).collect::<Result<Vec<_>>>()?, 0)?,
    };
    Ok([x, scores])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{force, Level};
    use crate::testing::assert_near;
    use tch::Device;

    #[test]
    fn the_kernel_computes_the_formula_and_its_gradients() {
        tch::manual_seed(4);
        let random = |size: &[i64], kind: Kind| Tensor::randn(size, (Kind::Double, Device::Cpu)).to_kind(kind);
        for level in Level::ALL {
            force(Some(level));
            for (kind, bound) in [(Kind::Float, 1e-4), (Kind::Double, 1e-12), (Kind::BFloat16, 2e-2)] {
                for (rows, d, outputs, queries, is_normed) in
                    [(1, 1, 1, 1, false), (3, 33, 2, 1, true), (900, 96, 5, 1, false), (70, 64, 4, 3, true)]
                {
                    let v: Vec<Tensor> = (0..outputs).map(|_| random(&[2, rows, d], kind)).collect();
                    let query = random(&[queries, d], if kind == Kind::Double { kind } else { Kind::Float });
                    let g = random(&[queries, 2, rows, d], kind);
                    type Form = fn(&[&Tensor], &Tensor, bool) -> Result<[Tensor; 2]>;
                    // Returns the gradients of the query and the outputs, then the results, computed in this type.
                    let run = |kind: Kind, form: Form| {
                        let leaf = |t: &Tensor| {
                            let wide = kind == Kind::Double;
                            if wide { t.to_kind(kind) } else { t.copy() }.set_requires_grad(true)
                        };
                        let (query, v): (Tensor, Vec<Tensor>) = (leaf(&query), v.iter().map(leaf).collect());
                        let outputs: Vec<&Tensor> = v.iter().collect();
                        let [x, scores] = form(&outputs, &query, is_normed).unwrap();
                        let loss = (&x * g.to_kind(x.kind())).sum(x.kind());
                        let leaves: Vec<&Tensor> = std::iter::once(&query).chain(outputs).collect();
                        let mut results = Tensor::run_backward(&[loss], &leaves, false, false);
                        results.extend([x, scores]);
                        results
                    };
                    for (found, wanted) in
                        run(kind, |v, u, normed| attend(v, u, normed, true)).iter().zip(run(Kind::Double, composed))
                    {
                        // With one output the scores have no influence, so the query's gradient is 0.
                        let floor = if outputs == 1 { 1e-2 } else { 0.0 };
                        assert_near(found, &wanted, bound, floor, &format!("{level:?} {kind:?} {rows} {d} {outputs}"));
                    }
                }
            }
        }
        force(None);
    }
}
