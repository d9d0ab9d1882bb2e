//! Sublayers that read from several tensors and write to several: a [`Mixing`] with its parameters, and its
//! computation.

use super::depth_attention::attend;
use super::joint_read::{self, JointRead};
use super::residual::learned;
use super::sizes::{unit_rms, EPS, LEAST_NORM};
use super::Builder;
use crate::analysis::Watch;
use crate::error::{Error, Result};
use crate::kernel::joint_read::Divisor;
use crate::kernel::view::accumulation;
use crate::norm::composed::accumulate;
use crate::operator::{mix_streams, sinkhorn};
use crate::residual::{Gates, Mixing};
use tch::{Kind, Tensor};

/// The ε of the LayerNorm in [`Gates::Each`], equal to PyTorch's default.
const LAYER_NORM_EPS: f64 = 1e-5;

/// The indices of the parts of s·m + b that belong to the write gates g and to the matrix R; the part of p has index 0.
const G_PART: i64 = 1;
const R_PART: i64 = 2;

/// A declaration of a mixing, with its parameters in the order of [`Mixing::parameters`]. A hyper-connection
/// has one tensor H (…, n, d), which holds all streams. Attention over depth has the tensors v_0, v_1, …, each (…, d).
pub struct BuiltMixing {
    declared: Mixing,
    parameters: Vec<Tensor>,
    /// For [`Gates::Permuted`], all permutation matrices of n streams (n!, n·n), in lexicographic order.
    permutations: Option<Tensor>,
}

/// A hyper-connection's write, for which its read computes the weights.
pub struct PendingWrite {
    /// H, as the read returns it.
    streams: Tensor,
    weights: WriteWeights,
}

enum WriteWeights {
    /// The weights (Rᵀ, g), (…, n, n + 1), in the type in which the streams are computed: H⁺ = RᵀH + g⊙F(x).
    Mixed(Tensor),
    /// The write gates g, (…, n, 1): H⁺ = H + g⊙F(x).
    Gated(Tensor),
}

impl BuiltMixing {
    /// Declares the mixing's parameters, and computes the permutation matrices if its gates need them.
    pub fn build(b: &mut Builder, declared: &Mixing) -> Result<Self> {
        let parameters = declared.parameters().into_iter().map(|parameter| learned(b, parameter));
        let parameters = parameters.collect::<Result<Vec<_>>>()?;
        let permutations = match declared {
            Mixing::Hyper(hyper) if matches!(*hyper.gates, Gates::Permuted { .. }) => {
                Some(permutation_matrices(hyper.streams)?.f_to_device(parameters[0].device())?)
            }
            _ => None,
        };
        Ok(BuiltMixing { parameters, permutations, declared: declared.clone() })
    }

    /// Returns the mixing's first tensor for the stack's input x: H (…, n, d), whose n streams are all x, or v_0 = x.
    pub fn begin(&self, x: Tensor) -> Result<Tensor> {
        match &self.declared {
            Mixing::Hyper(hyper) => {
                let mut shape = x.size();
                shape.insert(shape.len() - 1, hyper.streams);
                let implicit = false; // an internal flag of PyTorch's
                Ok(x.f_unsqueeze(-2)?.f_expand(shape, implicit)?)
            }
            Mixing::Depth(_) => Ok(x),
        }
    }

    /// Returns the input of the sublayer (or of the stack's end), and the state that [`write`](Self::write) needs.
    /// `tensors` holds H alone, or v_0, v_1, …; `watch` is shown the scores of gates or outputs. In a training loop
    /// (`is_training`) kernels of the CPU compute the input; they have no second derivative.
    pub fn read(
        &self,
        tensors: &[&Tensor],
        watch: Option<&dyn Watch>,
        is_training: bool,
    ) -> Result<(Tensor, Option<PendingWrite>)> {
        let note = |scores: &Tensor| watch.map_or(Ok(()), |watch| watch.mixing(scores));
        let parameters: Vec<&Tensor> = self.parameters.iter().collect();
        match (&self.declared, parameters.as_slice()) {
            (Mixing::Hyper(hyper), parameters) => match (hyper.gates.as_ref(), parameters) {
                (Gates::Joint { magnitude, iterations, .. }, [weight, scale, bias]) => {
                    joint(tensors[0], [weight, scale, bias], *magnitude, *iterations, is_training, note)
                }
                (Gates::Permuted { .. }, [gain, weight, scale, bias]) => {
                    let permutations = self.permutations.as_ref().expect("`build` has made them");
                    permuted(tensors[0], [gain, weight, scale, bias], permutations, is_training, note)
                }
                (Gates::Each { .. }, [bias, dynamic @ ..]) => each(tensors[0], bias, dynamic, note),
                (Gates::Channel { magnitude, .. }, [gain, down, up, write @ ..]) => {
                    by_channel(tensors[0], [gain, down, up], write.first().copied(), *magnitude, note)
                }
                (Gates::Sum(c), _) => {
                    // x = c·Σ_i H_i, at a stack's end, where nothing is written.
                    let keepdim = false;
                    let sum = accumulate(tensors[0])?.f_sum_dim_intlist([-2i64].as_slice(), keepdim, None::<Kind>)?;
                    Ok((sum.f_mul_scalar(*c)?.f_to_kind(tensors[0].kind())?, None))
                }
                _ => unreachable!("`parameters` names them all"),
            },
            // A mixing without a query has only v_0 to read.
            (Mixing::Depth(_), []) => Ok((tensors[0].shallow_clone(), None)),
            (Mixing::Depth(_), [query, gain @ ..]) => {
                // The plain form has a gain on the outputs, and the normed form divides scores by √d. Both are factors
                // of the query.
                let (scaled_query, is_normed) = match gain {
                    [gain] => (accumulate(query)?.f_mul(&accumulate(gain)?)?, false),
                    _ => {
                        let d = *query.size().last().expect("a query has numbers");
                        (accumulate(query)?.f_mul_scalar((d as f64).powf(-0.5))?, true)
                    }
                };
                let [x, scores] = attend(tensors, &scaled_query, is_normed, is_training)?;
                note(&scores)?;
                Ok((x, None))
            }
        }
    }

    /// Returns the tensors (H, or v_0, v_1, …) after the sublayer. `unwritten` is the state that [`read`](Self::read)
    /// has returned, and f is F(x) after dropout.
    pub fn write(&self, mut tensors: Vec<Tensor>, unwritten: Option<PendingWrite>, f: Tensor) -> Result<Vec<Tensor>> {
        let f = f.f_to_kind(tensors[0].kind())?;
        match (&self.declared, unwritten) {
            (Mixing::Hyper(_), Some(PendingWrite { streams, weights })) => Ok(vec![match weights {
                WriteWeights::Mixed(weights) => mix_streams(&streams, &weights, Some(&f))?,
                WriteWeights::Gated(gates) => streams.f_addcmul(&gates, &f.f_unsqueeze(-2)?)?,
            }]),
            (Mixing::Hyper(_), None) => unreachable!("a hyper-connection writes after it has read"),
            (Mixing::Depth(depth), _) => {
                // Within a block, F(x) is added to the block's sum, the last v.
                let f = match depth.begins_block {
                    true => f,
                    false => tensors.pop().expect("v_0 is there").f_add(&f)?,
                };
                tensors.push(f);
                Ok(tensors)
            }
        }
    }

    /// Returns how many of the current `tensors` (a number) a layer leaves unchanged, if this is the mixing of its
    /// first sublayer.
    pub fn keeps(&self, tensors: usize) -> usize {
        match &self.declared {
            Mixing::Hyper(_) => 0,
            // F(x) is added to the last v, or becomes a new v if the sublayer begins a block.
            Mixing::Depth(depth) => tensors - usize::from(!depth.begins_block),
        }
    }

    /// True if this sublayer adds a new tensor to the list v_0, v_1, …
    pub fn adds(&self) -> bool {
        matches!(&self.declared, Mixing::Depth(depth) if depth.begins_block)
    }

    /// Returns one tensor for diagnostics: the mean over the streams of H, or over v_0, v_1, …
    pub fn seen(&self, tensors: &[&Tensor]) -> Result<Tensor> {
        let keepdim = false;
        match &self.declared {
            Mixing::Hyper(_) => Ok(tensors[0].f_mean_dim([-2i64].as_slice(), keepdim, None)?),
            Mixing::Depth(_) => Ok(Tensor::f_stack(tensors, 0)?.f_mean_dim([0i64].as_slice(), keepdim, None)?),
        }
    }
}

/// The sublayer's input x, and the state of its write; `None` if nothing is written, as at a stack's end.
type Read = (Tensor, Option<PendingWrite>);

/// The read of gates that are functions of all streams together, and their scores s·m + b.
struct Scores {
    read: JointRead,
    /// s, one number for each of p, g and R that the gates have.
    scale: Tensor,
    bias: Tensor,
}

impl Scores {
    /// Reads x from the streams H (…, n, d), and computes m = W vec(H) divided by the size of vec(H) that `divisor`
    /// names. `scale` is s and `bias` is b, of any type; `weight` is W, in the type of sums. `eps` is the number that
    /// is added to p.
    fn read(
        streams: &Tensor,
        [weight, scale, bias]: [&Tensor; 3],
        divisor: Divisor,
        eps: f64,
        is_training: bool,
    ) -> Result<Self> {
        let kind = accumulation(streams.kind());
        let (scale, bias) = (scale.f_to_kind(kind)?, bias.f_to_kind(kind)?);
        // The first number of s and the first n of b belong to p, which the read needs; the others belong to g and R.
        let n = streams.size()[streams.dim() - 2];
        let (p_bias, p_scale) = (bias.f_narrow(0, 0, n)?, scale.f_narrow(0, 0, 1)?);
        let read = joint_read::read(streams, [weight, &p_scale, &p_bias], divisor, eps, is_training)?;
        Ok(Scores { read, scale, bias })
    }

    /// Returns the part of s·m + b with this index: `count` numbers of m and b, from number `start` on, with the number
    /// s[index]. The indices are 0 for p, [`G_PART`] and [`R_PART`].
    fn part(&self, index: i64, start: i64, count: i64) -> Result<Tensor> {
        let scaled = self.read.mixes.f_narrow(-1, start, count)?.f_mul(&self.scale.f_narrow(0, index, 1)?)?;
        Ok(scaled.f_add(&self.bias.f_narrow(0, start, count)?)?)
    }
}

/// Reads the streams (…, n, d) with [`Gates::Joint`], functions of all streams together: returns x, and the weights of
/// the write. g is at most `magnitude`, and R is normalised `iterations` times. `note` shows the scores to a watch.
fn joint(
    streams: &Tensor,
    [weight, scale, bias]: [&Tensor; 3],
    magnitude: f64,
    iterations: i64,
    is_training: bool,
    note: impl Fn(&Tensor) -> Result<()>,
) -> Result<Read> {
    let n = streams.size()[streams.dim() - 2];
    let weight = weight.f_to_kind(accumulation(streams.kind()))?;
    let scores = Scores::read(streams, [&weight, scale, bias], Divisor::RootMeanSquare(EPS), EPS, is_training)?;
    note(&scores.read.mixes)?;
    // m and b have n numbers for p, then n for g, then n² for R.
    let (g_start, r_start) = (n, 2 * n);
    // g = c·σ(s₁m₁ + b₁) + ε, where c is the magnitude.
    let gates = |eps: f64| {
        let sigmoids = scores.part(G_PART, g_start, n)?.f_sigmoid()?;
        Ok::<_, Error>(sigmoids.f_mul_scalar(magnitude)?.f_add_scalar(eps)?)
    };
    // s has one number for p, and one each for g and R if there are such gates.
    let write = match scale.size1()? {
        // At the stack's end nothing is written.
        1 => None,
        // Without iterations the streams are not mixed: R = I.
        2 => Some(WriteWeights::Gated(gates(EPS)?.f_unsqueeze(-1)?.f_to_kind(streams.kind())?)),
        _ => {
            let logits = scores.part(R_PART, r_start, n * n)?.f_unflatten(-1, [n, n].as_slice())?;
            Some(mixed(&sinkhorn(&logits, iterations, EPS)?, &gates(0.0)?.f_unsqueeze(-1)?)?)
        }
    };
    let JointRead { streams, x, .. } = scores.read;
    Ok((x, write.map(|weights| PendingWrite { streams, weights })))
}

/// Returns x = Σ_i p_i H_i, (…, d), for streams H (…, n, d); p is (…, 1, n).
fn weighted_stream(streams: &Tensor, p: &Tensor) -> Result<Tensor> {
    let added = None; // the sum alone, without a sublayer output
    Ok(mix_streams(streams, p, added)?.f_squeeze_dim(-2)?)
}

/// Returns the weights (Rᵀ, g) of a write, (…, n, n + 1); R is (…, n, n) and g is (…, n, 1).
fn mixed(r: &Tensor, gates: &Tensor) -> Result<WriteWeights> {
    Ok(WriteWeights::Mixed(Tensor::f_cat(&[&r.f_transpose(-2, -1)?, gates], -1)?))
}

/// Reads the streams (…, n, d) with [`Gates::Permuted`]: returns x, and the weights of the write, in which R is a mean
/// of permutations. `permutations` holds all their matrices, (n!, n·n). `note` shows the gates' scores to a watch.
fn permuted(
    streams: &Tensor,
    [gain, weight, scale, bias]: [&Tensor; 4],
    permutations: &Tensor,
    is_training: bool,
    note: impl Fn(&Tensor) -> Result<()>,
) -> Result<Read> {
    let n = streams.size()[streams.dim() - 2];
    // γ·√(nd) is a gain on vec(H)/‖vec(H)‖. W's columns are multiplied by it, because W has fewer numbers than the
    // streams.
    let gain = gain.f_to_kind(accumulation(streams.kind()))?.f_mul_scalar((gain.size1()? as f64).sqrt())?;
    let weight = weight.f_to_kind(accumulation(streams.kind()))?.f_mul(&gain)?;
    let eps = 0.0; // nothing is added to p
    let scores = Scores::read(streams, [&weight, scale, bias], Divisor::Norm(LEAST_NORM), eps, is_training)?;
    note(&scores.read.mixes)?;
    // m and b have n numbers for p, then n for g, then n! for the weights of the permutations.
    let (g_start, r_start) = (n, 2 * n);
    let gates = scores.part(G_PART, g_start, n)?.f_sigmoid()?.f_mul_scalar(2.0)?.f_unsqueeze(-1)?;
    let shares = scores.part(R_PART, r_start, Gates::permutations(n))?.f_softmax(-1, None::<Kind>)?;
    // R = Σ_r shares_r P_r is computed in f64, because autocast and TF32 would round a product in f32.
    let r = shares.f_to_kind(Kind::Double)?.f_matmul(permutations)?.f_to_kind(shares.kind())?;
    let weights = mixed(&r.f_unflatten(-1, [n, n].as_slice())?, &gates)?;
    let JointRead { streams, x, .. } = scores.read;
    Ok((x, Some(PendingWrite { streams, weights })))
}

/// Returns all permutation matrices of n elements (n!, n·n) in lexicographic order. P_r has a 1 in row i and column j
/// if permutation r sends i to j.
fn permutation_matrices(n: i64) -> Result<Tensor> {
    let mut permutations: Vec<Vec<i64>> = vec![Vec::new()];
    for _ in 0..n {
        // Returns the beginnings that are longer by one element, which must not be in `start` yet.
        let longer = |start: &Vec<i64>| {
            let free = (0..n).filter(|j| !start.contains(j));
            free.map(|j| [&start[..], &[j]].concat()).collect::<Vec<_>>()
        };
        permutations = permutations.iter().flat_map(longer).collect();
    }
    // The matrices' elements, row by row: row i of a matrix has its 1 in column j.
    let ones = permutations.iter().flatten().flat_map(|j| (0..n).map(move |column| f64::from(column == *j)));
    Ok(Tensor::f_from_slice(&ones.collect::<Vec<f64>>())?.f_view([-1, n * n])?)
}

/// Reads the streams (…, n, d) with [`Gates::Each`], where each stream has gates of its own: returns x, and the weights
/// of the write. The gates are `bias` plus s⊙tanh(W·LayerNorm(H_i)), if `dynamic` holds LayerNorm's γ and β, W and s.
/// `note` shows the gates' scores to a watch.
fn each(streams: &Tensor, bias: &Tensor, dynamic: &[&Tensor], note: impl Fn(&Tensor) -> Result<()>) -> Result<Read> {
    let size = streams.size();
    let [.., n, d] = size[..] else { unreachable!("streams are (…, n, d)") };
    let h = accumulate(streams)?;
    let cast = |t: &Tensor| t.f_to_kind(h.kind());
    let implicit = false; // an internal flag of PyTorch's `expand`
    let mut rows = cast(bias)?.f_view([n, n + 2])?; // row i is p_i, R_i1 to R_in, g_i
    if let [gain, shift, weight, scale] = dynamic {
        let cudnn_enable = false;
        let normed = h.f_layer_norm([d], Some(cast(gain)?), Some(cast(shift)?), LAYER_NORM_EPS, cudnn_enable)?;
        let scores = normed.f_linear::<&Tensor>(&cast(weight)?, None)?;
        note(&scores)?;
        let change = scores.f_tanh()?; // (…, n, n + 2)
        let scale = cast(scale)?; // its first number is for p and R, its second for g
        let for_p_and_r = scale.f_narrow(0, 0, 1)?.f_expand([n + 1], implicit)?;
        let scale = Tensor::f_cat(&[for_p_and_r, scale.f_narrow(0, 1, 1)?], 0)?;
        rows = rows.f_add(&change.f_mul(&scale)?)?;
    }
    let rows = rows.f_expand([&size[..size.len() - 2], &[n, n + 2]].concat(), implicit)?;
    let (p, r, g) = (rows.f_narrow(-1, 0, 1)?, rows.f_narrow(-1, 1, n)?, rows.f_narrow(-1, n + 1, 1)?);
    let x = weighted_stream(streams, &p.f_transpose(-2, -1)?)?;
    let weights = mixed(&r, &g)?;
    Ok((x, Some(PendingWrite { streams: streams.shallow_clone(), weights })))
}

/// Reads the streams (…, n, d) with a gate for each of their channels, [`Gates::Channel`]: returns x, and the gates of
/// the write, if their matrix `write` is given. The read gates are σ(up·silu(down·Ĥ/n)), where Ĥ are the normed
/// streams; write gates are at most `magnitude`. `note` shows the read gates' scores to a watch.
fn by_channel(
    streams: &Tensor,
    [gain, down, up]: [&Tensor; 3],
    write: Option<&Tensor>,
    magnitude: f64,
    note: impl Fn(&Tensor) -> Result<()>,
) -> Result<Read> {
    let n = streams.size()[streams.dim() - 2];
    let h = accumulate(streams)?;
    let cast = |t: &Tensor| t.f_to_kind(h.kind());
    let normed = unit_rms(&h, EPS)?.f_flatten(-2, -1)?.f_mul(&cast(gain)?)?;
    // Returns the product of a matrix with vec(Ĥ)/n, where `normed` is vec(Ĥ), (…, n·d).
    let product = |weight: &Tensor| -> Result<Tensor> {
        Ok(normed.f_linear::<&Tensor>(&cast(weight)?, None)?.f_div_scalar(n as f64)?)
    };
    let scores = product(down)?.f_silu()?.f_linear::<&Tensor>(&cast(up)?, None)?;
    note(&scores)?;
    let read_gates = scores.f_sigmoid()?;
    let parts = read_gates.f_mul(&normed)?.f_unflatten(-1, [n, -1].as_slice())?;
    let keepdim = false;
    let x = parts.f_mean_dim([-2i64].as_slice(), keepdim, None::<Kind>)?.f_to_kind(streams.kind())?;
    let Some(write) = write else { return Ok((x, None)) };
    let gates = product(write)?.f_sigmoid()?.f_mul_scalar(magnitude)?.f_unsqueeze(-1)?.f_to_kind(streams.kind())?;
    Ok((x, Some(PendingWrite { streams: streams.shallow_clone(), weights: WriteWeights::Gated(gates) })))
}
