//! Diagnostics of a model that papers report (docs/spec.md §5), recorded during one pass over sentences.

use crate::error::{Error, Result};
use crate::host::host;
use ndarray::{Array1, Array2, ArrayView1, Axis, Zip};
use std::cell::RefCell;
use std::fmt::Debug;
use tch::{Kind, Tensor};

/// Diagnostics of one stack from one pass, in the order of execution.
#[derive(Debug, Default)]
pub struct StackObservation {
    /// For each layer: the mean over rows of the cosine between its output and the previous layer's output. The first
    /// layer is compared with the stack's input (Liu et al. 2023, Fig 8).
    pub cosines: Vec<f64>,
    /// For each feed-forward sublayer: the share of activations that are not zero (Liu et al. 2023, Fig 9).
    pub active: Vec<f64>,
    /// An entry for each norm with running statistics.
    pub statistics: Vec<Statistics>,
    /// The mean |x| of the stack's input and of every layer's output (coordinate checks, Yang et al. 2022, App D.1).
    pub sizes: Vec<f64>,
    /// For each attention: the mean |score| of the scores that enter the softmax, sinks apart.
    pub scores: Vec<f64>,
    /// For each residual connection whose weights depend on its input: the mean |score| of the scores from which the
    /// weights are computed.
    pub mixing: Vec<f64>,
}

/// A value for each of the statistics μ, σ² and ψ²; NaN if the norm does not have the statistic.
#[derive(Clone, Copy, Debug)]
pub struct Moments {
    pub mean: f64,
    pub variance: f64,
    /// The value for ψ², the mean square.
    pub power: f64,
}

/// A comparison of a batch's statistics s_B with a norm's running statistics s.
#[derive(Clone, Copy, Debug)]
pub struct Statistics {
    /// ‖s_B − s‖₂/d (Shen et al. 2020, Fig 2, 4).
    pub distance: Moments,
    /// ‖g‖₂/d, where g is the part of x's gradient that flows through each statistic (Fig 3, 4 of that paper):
    /// (γ/σ_B)⊙mean dy for μ_B, (γ/σ_B)⊙mean(dy⊙x̂) for σ²_B, and (γ/ψ_B)⊙mean(dy⊙x̂) for ψ²_B. NaN without a gradient.
    pub gradient: Moments,
    /// The share of channels with |γ| ≤ ψ_B, or ≤ σ_B if the norm centres (Shen et al. 2020, Lemma 2).
    pub bounded: f64,
}

impl From<Statistics> for [f64; 7] {
    /// Returns the distances of μ, σ² and ψ², then their gradients, then the share of bounded channels.
    fn from(Statistics { distance, gradient, bounded }: Statistics) -> Self {
        [distance.mean, distance.variance, distance.power, gradient.mean, gradient.variance, gradient.power, bounded]
    }
}

/// The input and the state of a norm with running statistics.
#[derive(Debug)]
pub struct Columns {
    /// The norm's input (…, d), after group scaling.
    pub x: Tensor,
    /// True at padding. The mask has x's shape without the last dimension.
    pub pad_mask: Option<Tensor>,
    /// The norm's γ; `None` means ones.
    pub weight: Option<Tensor>,
    /// The running mean; `None` if the norm does not centre x.
    pub mean: Option<Tensor>,
    /// The running σ², or ψ² if the norm does not centre x.
    pub square: Tensor,
    pub eps: f64,
}

impl Columns {
    /// Compares the statistics of the rows that are not padding with the running ones. `dy` is the loss's gradient with
    /// respect to the norm's output; without it the gradients of the result are NaN.
    pub fn statistics(&self, dy: Option<&Tensor>) -> Result<Statistics> {
        if let Some(dy) = dy.filter(|dy| dy.size() != self.x.size()) {
            let (given, found) = (dy.size(), self.x.size());
            return Err(Error::invalid(format!("a gradient of shape {given:?} is no gradient of a norm of {found:?}")));
        }
        let x = self.real_rows(&self.x)?;
        let (count, width) = (x.nrows() as f64, x.ncols());
        // A norm without a running mean does not centre x, so 0 is subtracted instead of the mean.
        let running_mean = self.mean.as_ref().map(vector).transpose()?;
        let mean = running_mean.as_ref().map_or_else(|| Array1::zeros(width), |_| x.sum_axis(Axis(0)) / count);
        let x = x - &mean;
        let square = (&x * &x).sum_axis(Axis(0)) / count;
        let scale = square.mapv(|v| 1.0 / (v + self.eps).sqrt());
        // `gain` is γ/σ_B, or γ/ψ_B if the norm does not centre x.
        let gain = self.weight.as_ref().map_or_else(|| Ok(Array1::ones(width)), vector)? * &scale;
        let mut gradients = [f64::NAN; 2]; // of the mean, and of σ² or ψ²
        if let Some(dy) = dy {
            let dy = self.real_rows(dy)?;
            // The two gradients are gain⊙mean dy and gain⊙mean(dy⊙x̂), where x̂ = x⊙scale and means are over rows.
            let sums = [dy.sum_axis(Axis(0)), (dy * &x * &scale).sum_axis(Axis(0))];
            gradients = sums.map(|sum| length_over_width(&(sum * &gain / count)));
        }
        // The second value belongs to σ² if the norm centres x, otherwise to ψ².
        let moments = |mean: f64, square: f64| match running_mean {
            Some(_) => Moments { mean, variance: square, power: f64::NAN },
            None => Moments { mean: f64::NAN, variance: f64::NAN, power: square },
        };
        // A channel is bounded if |γ| ≤ σ_B, or ≤ ψ_B. This means that the size of its gain is at most 1.
        let bounded = gain.iter().filter(|v| v.abs() <= 1.0).count() as f64 / width as f64;
        // `drift` is the distance of the batch's mean from the running one; NaN if the norm keeps no mean.
        let drift = running_mean.as_ref().map_or(f64::NAN, |running| length_over_width(&(&mean - running)));
        Ok(Statistics {
            distance: moments(drift, length_over_width(&(&square - vector(&self.square)?))),
            gradient: moments(gradients[0], gradients[1]),
            bounded: if count > 0.0 { bounded } else { f64::NAN }, // NaN if all rows are padding
        })
    }

    /// Returns the rows of x, or of a tensor of its shape, that are not padding.
    fn real_rows(&self, x: &Tensor) -> Result<Array2<f64>> {
        let all_rows = rows(x)?;
        let Some(mask) = &self.pad_mask else { return Ok(all_rows) };
        let is_padding = vector(mask)?; // true has become 1, false 0
        let kept: Vec<usize> = (0..is_padding.len()).filter(|&row| is_padding[row] == 0.0).collect();
        Ok(all_rows.select(Axis(0), &kept))
    }
}

/// Functions that a model calls while it runs, with what it computes. A model without a watch computes nothing extra.
/// Each function does nothing unless a watch defines it.
#[allow(unused_variables)]
pub trait Watch: Debug {
    /// A stack begins, with the input x.
    fn stack(&self, x: &Tensor) -> Result<()> {
        Ok(())
    }

    /// A layer begins, with the input x.
    fn layer_input(&self, x: &Tensor) -> Result<()> {
        Ok(())
    }

    /// A layer ends, with the output x.
    fn layer(&self, x: &Tensor) -> Result<()> {
        Ok(())
    }

    /// A linear layer has computed y from x; `weight` is its matrix, or those rows of the matrix that were used.
    fn product(&self, weight: &Tensor, x: &Tensor, y: &Tensor) -> Result<()> {
        Ok(())
    }

    /// The norm of this name has computed y.
    fn norm(&self, name: &str, y: &Tensor) -> Result<()> {
        Ok(())
    }

    /// A norm with running statistics has computed y from this input. The statistics must not change before the watch
    /// has read them.
    fn running_norm(&self, input: Columns, y: &Tensor) {}

    /// An activation has computed h.
    fn activations(&self, h: &Tensor) -> Result<()> {
        Ok(())
    }

    /// An attention will compute its softmax.
    fn attention(&self, logits: &Logits) -> Result<()> {
        Ok(())
    }

    /// A residual connection computes its weights from these scores.
    fn mixing(&self, scores: &Tensor) -> Result<()> {
        Ok(())
    }
}

/// The logits of an attention, which are computed only if a watch asks for them.
pub struct Logits<'a> {
    /// Calls a function for one group of sentences after the other, with the logits (…, heads, queries, keys) of the
    /// group, and with a mask that broadcasts to them and is true where the query attends to the key.
    pub each: &'a EachLogits<'a>,
    /// One more logit for each head, (heads), which belongs to no key.
    pub sinks: Option<&'a Tensor>,
}

type EachLogits<'a> = dyn Fn(&mut dyn FnMut(Tensor, Tensor) -> Result<()>) -> Result<()> + 'a;

/// The watch that records the diagnostics of papers.
#[derive(Debug, Default)]
pub struct Diagnostics {
    stacks: RefCell<Vec<StackObservation>>,
    norms: RefCell<Vec<NormObservation>>,
    /// The output of the latest layer; before the first layer, the stack's input.
    last: RefCell<Option<Array2<f64>>>,
}

/// The input and the output of one norm during the pass.
#[derive(Debug)]
struct NormObservation {
    /// The index of the norm's stack.
    stack: usize,
    input: Columns,
    y: Tensor,
}

impl Diagnostics {
    /// Ends the recording and returns the diagnostics of each stack. Gradients are those of `loss`, which was computed
    /// from the pass; without a loss they are NaN.
    pub fn finish(self, loss: Option<&Tensor>) -> Result<Vec<StackObservation>> {
        let (mut stacks, norms) = (self.stacks.into_inner(), self.norms.into_inner());
        let outputs: Vec<&Tensor> = norms.iter().map(|norm| &norm.y).collect();
        let gradients = match loss {
            Some(loss) if !outputs.is_empty() => {
                let (keep_graph, create_graph) = (false, false);
                Tensor::f_run_backward(&[loss], &outputs, keep_graph, create_graph)?
            }
            _ => Vec::new(),
        };
        for (i, norm) in norms.iter().enumerate() {
            // The gradient is undefined if the loss does not depend on the norm.
            let dy = gradients.get(i).filter(|dy| dy.defined());
            stacks[norm.stack].statistics.push(norm.input.statistics(dy)?);
        }
        Ok(stacks)
    }

    /// Keeps x, the current rows of the residual stream, and records their mean |x|.
    fn remember(&self, x: Array2<f64>) {
        self.add(|stack| stack.sizes.push(x.mapv(f64::abs).mean().unwrap_or(f64::NAN)));
        self.last.replace(Some(x));
    }

    /// Applies `record` to the observation of the current stack, if a stack has begun.
    fn add(&self, record: impl FnOnce(&mut StackObservation)) {
        if let Some(stack) = self.stacks.borrow_mut().last_mut() {
            record(stack);
        }
    }
}

impl Watch for Diagnostics {
    /// Begins the observation of a new stack, whose input is x.
    fn stack(&self, x: &Tensor) -> Result<()> {
        self.stacks.borrow_mut().push(StackObservation::default());
        self.remember(rows(x)?);
        Ok(())
    }

    /// Records the mean cosine of the rows of x, a layer's output, with those of the previous layer's output.
    fn layer(&self, x: &Tensor) -> Result<()> {
        let x = rows(x)?;
        if let Some(before) = self.last.take() {
            let cosines = Zip::from(before.rows()).and(x.rows()).map_collect(cosine);
            self.add(|stack| stack.cosines.push(cosines.mean().unwrap_or(f64::NAN)));
        }
        self.remember(x);
        Ok(())
    }

    /// Keeps the input and the output y of a norm until [`finish`](Self::finish) computes its statistics.
    fn running_norm(&self, input: Columns, y: &Tensor) {
        if let Some(stack) = self.stacks.borrow().len().checked_sub(1) {
            self.norms.borrow_mut().push(NormObservation { stack, input, y: y.shallow_clone() });
        }
    }

    /// Records the share of the numbers of h that are not 0.
    fn activations(&self, h: &Tensor) -> Result<()> {
        let h = rows(h)?;
        let active = h.iter().filter(|v| **v != 0.0).count() as f64 / h.len() as f64;
        self.add(|stack| stack.active.push(active));
        Ok(())
    }

    /// Records the mean |score| over all pairs of a query and a key that it attends to.
    fn attention(&self, logits: &Logits) -> Result<()> {
        let (mut total, mut pairs) = (0.0, 0.0);
        (logits.each)(&mut |logits, seen| {
            let sizes = logits.f_abs()?.f_masked_fill(&seen.f_logical_not()?, 0.0)?;
            total += f64::try_from(sizes.f_sum(Kind::Double)?)?;
            pairs += f64::try_from(seen.f_expand_as(&logits)?.f_sum(Kind::Double)?)?;
            Ok(())
        })?;
        self.add(|stack| stack.scores.push(total / pairs));
        Ok(())
    }

    /// Records the mean |score| of a residual connection's scores.
    fn mixing(&self, scores: &Tensor) -> Result<()> {
        let size = mean_size(scores)?;
        self.add(|stack| stack.mixing.push(size));
        Ok(())
    }
}

/// Returns the mean |x| over all elements.
fn mean_size(x: &Tensor) -> Result<f64> {
    Ok(f64::try_from(&x.f_abs()?.f_mean(Kind::Double)?)?)
}

/// Returns the cosine of x and y; 0 if either is zero.
fn cosine(x: ArrayView1<f64>, y: ArrayView1<f64>) -> f64 {
    let norms = (x.dot(&x) * y.dot(&y)).sqrt();
    if norms > 0.0 {
        x.dot(&y) / norms
    } else {
        0.0
    }
}

/// Returns ‖v‖₂/d, where d is the number of elements of v.
fn length_over_width(v: &Array1<f64>) -> f64 {
    v.dot(v).sqrt() / v.len() as f64
}

/// Copies x to the host as an f64 matrix (rows, width). The width is the last dimension of x.
fn rows(x: &Tensor) -> Result<Array2<f64>> {
    let width = x.size().last().copied().unwrap_or(1).max(1) as usize; // at least 1, because it is a divisor
    let values = vector(x)?.into_raw_vec_and_offset().0;
    let shape = (values.len() / width, width);
    Array2::from_shape_vec(shape, values).map_err(|e| Error::invalid(e.to_string()))
}

/// Copies all elements of x to the host, as a flat f64 array.
fn vector(x: &Tensor) -> Result<Array1<f64>> {
    Ok(Array1::from_vec(host("what is looked at", x)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    #[test]
    fn each_stack_has_its_own_layers() {
        let watch = Diagnostics::default();
        let x = Tensor::from_slice(&[1.0, 0.0, 0.0, 2.0]).reshape([2, 2]);
        watch.stack(&x).unwrap();
        watch.layer(&Tensor::from_slice(&[3.0, 4.0, 0.0, -1.0]).reshape([2, 2])).unwrap();
        watch.layer(&Tensor::zeros([2, 2], (Kind::Float, Device::Cpu))).unwrap();
        watch.activations(&Tensor::from_slice(&[0.0, 1.0, 2.0, -0.0]).reshape([1, 4])).unwrap();
        watch.stack(&x).unwrap();
        watch.layer(&x).unwrap();
        let seen = watch.finish(None).unwrap();
        assert_eq!((&*seen[0].cosines, &*seen[0].active), ([(0.6 - 1.0) / 2.0, 0.0].as_slice(), [0.5].as_slice()));
        assert_eq!((&*seen[1].cosines, seen[1].active.len()), ([1.0].as_slice(), 0));
    }

    /// Builds an input whose real rows are (1, 2) and (3, 6): means 2, 4; variances 1, 4; ψ² 5, 20.
    fn given(mean: Option<Tensor>, square: f64) -> Columns {
        let numbers = |values: &[f64]| Tensor::from_slice(values);
        let x = numbers(&[1.0, 2.0, 9.0, 9.0, 3.0, 6.0]).reshape([3, 2]);
        let pad_mask = Some(Tensor::from_slice(&[false, true, false]));
        Columns { x, pad_mask, weight: Some(numbers(&[-0.5, 4.0])), mean, square: numbers(&[square; 2]), eps: 0.0 }
    }

    #[test]
    fn statistics_of_batch_norm() {
        let dy = Tensor::from_slice(&[1.0, 2.0, 7.0, 7.0, 5.0, 4.0]).reshape([3, 2]);
        let found = given(Some(Tensor::from_slice(&[1.0, 1.0])), 1.0).statistics(Some(&dy)).unwrap();
        // x̂ is −1 and 1 in both columns; γ/σ_B is −0.5 and 2; mean dy is 3 and 3, mean(dy⊙x̂) 2 and 1.
        assert_eq!((found.distance.mean, found.distance.variance), (10f64.sqrt() / 2.0, 1.5));
        assert_eq!(found.gradient.mean, (1.5f64.powi(2) + 6f64.powi(2)).sqrt() / 2.0);
        assert_eq!(found.gradient.variance, (1f64 + 4.0).sqrt() / 2.0);
        assert!(found.distance.power.is_nan() && found.gradient.power.is_nan());
        assert_eq!(found.bounded, 0.5);
    }

    #[test]
    fn statistics_of_power_norm() {
        let dy = Tensor::from_slice(&[1.0, 1.0, 7.0, 7.0, 0.0, 0.0]).reshape([3, 2]);
        let found = given(None, 2.0).statistics(Some(&dy)).unwrap();
        // γ/ψ_B ⊙ mean(dy⊙x̂) = γ/ψ²_B ⊙ (1, 2)/2
        assert_eq!(found.distance.power, (9f64 + 324.0).sqrt() / 2.0);
        assert!((found.gradient.power - (0.05f64.powi(2) + 0.2f64.powi(2)).sqrt() / 2.0).abs() < 1e-15);
        assert!(found.distance.mean.is_nan() && found.gradient.mean.is_nan() && found.gradient.variance.is_nan());
        assert_eq!(found.bounded, 1.0);
        assert!(given(None, 2.0).statistics(None).unwrap().gradient.power.is_nan());
    }
}
