//! What sublayers read of several tensors and write to several, built and run: [`Mixing`] says how.

use super::residual::learned;
use super::Builder;
use crate::error::Result;
use crate::residual::{DepthAttention, HyperConnection, Mixing};
use tch::{Kind, Tensor};

/// ε of both forms' mean squares, of p, and of Sinkhorn's divisions.
const EPS: f64 = 1e-6;

pub enum BuiltMixing {
    Hyper(BuiltHyper),
    Depth(BuiltDepth),
}

/// One tensor H (…, n, d) holds all streams.
pub struct BuiltHyper {
    streams: i64,
    iterations: i64,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
}

/// The tensors are v_0, v_1, … (…, d).
pub struct BuiltDepth {
    /// (query, gain).
    weights: Option<(Tensor, Tensor)>,
    begins_block: bool,
}

/// What a hyper-connection makes of H as it reads, for writing: H⁺ = `mixed` + `gates`⊙F(x).
pub struct Unwritten {
    /// Σ_i R_ij H_i, (…, n, d).
    mixed: Tensor,
    /// (…, n, 1)
    gates: Tensor,
}

impl BuiltMixing {
    pub fn build(b: &mut Builder, declared: &Mixing) -> Result<Self> {
        Ok(match declared {
            Mixing::Hyper(HyperConnection { streams, iterations, weight, scale, bias }) => {
                let (weight, scale, bias) = (learned(b, weight)?, learned(b, scale)?, learned(b, bias)?);
                BuiltMixing::Hyper(BuiltHyper { streams: *streams, iterations: *iterations, weight, scale, bias })
            }
            Mixing::Depth(DepthAttention { weights, begins_block }) => {
                let weights = match weights {
                    Some((query, gain)) => Some((learned(b, query)?, learned(b, gain)?)),
                    None => None,
                };
                BuiltMixing::Depth(BuiltDepth { weights, begins_block: *begins_block })
            }
        })
    }

    /// The first tensor, of what the stack reads.
    pub fn begin(&self, x: Tensor) -> Result<Tensor> {
        match self {
            BuiltMixing::Hyper(hyper) => {
                let mut shape = x.size();
                shape.insert(shape.len() - 1, hyper.streams);
                Ok(x.f_unsqueeze(-2)?.f_expand(shape, false)?)
            }
            BuiltMixing::Depth(_) => Ok(x),
        }
    }

    /// x of a sublayer, or of the stack's end, and what is left for [`write`](Self::write).
    pub fn read(&self, tensors: &[&Tensor]) -> Result<(Tensor, Option<Unwritten>)> {
        match self {
            BuiltMixing::Hyper(hyper) => hyper.read(tensors[0]),
            BuiltMixing::Depth(depth) => Ok((depth.read(tensors)?, None)),
        }
    }

    /// The tensors after F(x) = f, dropped.
    pub fn write(&self, mut tensors: Vec<Tensor>, unwritten: Option<Unwritten>, f: Tensor) -> Result<Vec<Tensor>> {
        let f = f.f_to_kind(tensors[0].kind())?;
        match (self, unwritten) {
            (BuiltMixing::Hyper(_), Some(Unwritten { mixed, gates })) => {
                Ok(vec![mixed.f_addcmul(&gates, &f.f_unsqueeze(-2)?)?])
            }
            (BuiltMixing::Hyper(_), None) => unreachable!("a hyper-connection writes after it has read"),
            (BuiltMixing::Depth(depth), _) => {
                let f = match depth.begins_block {
                    true => f,
                    false => tensors.pop().expect("v_0 is there").f_add(&f)?,
                };
                tensors.push(f);
                Ok(tensors)
            }
        }
    }

    /// How many of the tensors so far a layer that begins with this sublayer leaves as they are.
    pub fn keeps(&self, tensors: usize) -> usize {
        match self {
            BuiltMixing::Hyper(_) => 0,
            BuiltMixing::Depth(depth) => tensors - usize::from(!depth.begins_block),
        }
    }

    /// Whether this sublayer leaves one tensor more.
    pub fn adds(&self) -> bool {
        matches!(self, BuiltMixing::Depth(BuiltDepth { begins_block: true, .. }))
    }

    /// For those who look on: the mean of the streams, or of all v.
    pub fn seen(&self, tensors: &[&Tensor]) -> Result<Tensor> {
        match self {
            BuiltMixing::Hyper(_) => Ok(tensors[0].f_mean_dim([-2i64].as_slice(), false, None)?),
            BuiltMixing::Depth(_) => Ok(Tensor::f_stack(tensors, 0)?.f_mean_dim([0i64].as_slice(), false, None)?),
        }
    }
}

impl BuiltHyper {
    fn read(&self, streams: &Tensor) -> Result<(Tensor, Option<Unwritten>)> {
        let n = self.streams;
        let flat = wide(&streams.f_flatten(-2, -1)?)?; // (…, n·d)
        let weight = self.weight.f_to_kind(flat.kind())?;
        let mixes = flat.f_linear::<&Tensor>(&weight, None)?.f_mul(&inverse_rms(&flat)?)?;
        let part = |index: i64, from: i64, count: i64| -> Result<Tensor> {
            let scale = self.scale.f_narrow(0, index, 1)?.f_to_kind(flat.kind())?;
            let bias = self.bias.f_narrow(0, from, count)?.f_to_kind(flat.kind())?;
            Ok(mixes.f_narrow(-1, from, count)?.f_mul(&scale)?.f_add(&bias)?)
        };
        let reading = part(0, 0, n)?.f_sigmoid()?.f_add_scalar(EPS)?.f_unsqueeze(-2)?; // (…, 1, n)
        if self.scale.size1()? == 1 {
            let x = reading.f_to_kind(streams.kind())?.f_matmul(streams)?;
            return Ok((x.f_squeeze_dim(-2)?, None));
        }
        let gates = part(1, n, n)?.f_sigmoid()?.f_mul_scalar(2.0)?.f_unsqueeze(-1)?;
        let logits = part(2, 2 * n, n * n)?.f_unflatten(-1, [n, n].as_slice())?;
        let residual = sinkhorn(&logits, self.iterations)?.f_transpose(-2, -1)?;
        // x and the mixed streams as one product.
        let both = Tensor::f_cat(&[reading, residual], -2)?.f_to_kind(streams.kind())?.f_matmul(streams)?; // (…, 1 + n, d)
        let mixed = both.f_narrow(-2, 1, n)?;
        let gates = gates.f_to_kind(streams.kind())?;
        Ok((both.f_select(-2, 0)?, Some(Unwritten { mixed, gates })))
    }
}

impl BuiltDepth {
    fn read(&self, outputs: &[&Tensor]) -> Result<Tensor> {
        let Some((query, gain)) = &self.weights else { return Ok(outputs[0].shallow_clone()) };
        let query = wide(query)?.f_mul(&wide(gain)?)?;
        let logits = outputs.iter().map(|v| {
            let v = wide(v)?;
            Ok(v.f_matmul(&query.f_to_kind(v.kind())?)?.f_unsqueeze(-1)?.f_mul(&inverse_rms(&v)?)?)
        });
        let shares = Tensor::f_cat(&logits.collect::<Result<Vec<_>>>()?, -1)?.f_softmax(-1, None::<Kind>)?;
        let shares = shares.f_to_kind(outputs[0].kind())?;
        let share = |i: usize| shares.f_narrow(-1, i as i64, 1);
        // Sum by sum: no copy of all outputs stays for the backward pass.
        let first = outputs[0].f_mul(&share(0)?)?;
        (1..outputs.len()).try_fold(first, |sum, i| Ok(sum.f_addcmul(outputs[i], &share(i)?)?))
    }
}

/// Rows, then columns, divided by their sums: softmax(logits) + ε over rows, each column divided by its sum + ε, then
/// rows and columns `iterations` − 1 times (deepseek-ai/TileKernels).
fn sinkhorn(logits: &Tensor, iterations: i64) -> Result<Tensor> {
    let divided = |m: &Tensor, by: i64| -> Result<Tensor> {
        Ok(m.f_div(&m.f_sum_dim_intlist([by].as_slice(), true, None::<Kind>)?.f_add_scalar(EPS)?)?)
    };
    let first = divided(&logits.f_softmax(-1, None::<Kind>)?.f_add_scalar(EPS)?, -2)?;
    (1..iterations).try_fold(first, |m, _| divided(&divided(&m, -1)?, -2))
}

/// 1/√(mean x² + ε) over the last dimension, which stays, of width 1.
fn inverse_rms(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_square()?.f_mean_dim([-1i64].as_slice(), true, None::<Kind>)?.f_add_scalar(EPS)?.f_rsqrt()?)
}

/// x in f32, or f64 where it is that already.
fn wide(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_to_kind(if x.kind() == Kind::Double { Kind::Double } else { Kind::Float })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With ten normalisations of columns.
    #[test]
    fn sinkhorn_as_deepseek_has_it() {
        let logits = Tensor::from_slice(&[1.0, 0.2, -0.3, 0.5]).view([2, 2]);
        let found = Vec::<f64>::try_from(sinkhorn(&logits, 10).unwrap().flatten(0, -1)).unwrap();
        for (found, printed) in found.iter().zip([0.68997341, 0.31002559, 0.31002559, 0.68997341]) {
            assert!((found - printed).abs() < 1e-8, "{found} {printed}");
        }
    }
}
