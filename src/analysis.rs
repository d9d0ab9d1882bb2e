//! What the papers look at in a model (SPEC §5), seen during one pass over sentences.

use crate::error::{Error, Result};
use ndarray::{Array1, Array2, ArrayView1, Axis, Zip};
use std::cell::RefCell;
use tch::{Device, Kind, Tensor};

/// One stack's pass, in the order in which things happen.
#[derive(Debug, Default)]
pub struct Seen {
    /// Per layer: the mean over rows of the cosine of its output and the one before, the first's being what the stack
    /// reads (BrN Fig 8).
    pub cosines: Vec<f64>,
    /// Per feed-forward: the share of activations that are not zero (BrN Fig 9).
    pub active: Vec<f64>,
    /// Per norm with running statistics.
    pub distances: Vec<Distances>,
}

/// ‖s_B − s‖₂/d of the rows' own statistics s_B and the running ones s (PN Fig 2, 4); NaN of those that the norm has not.
#[derive(Clone, Copy, Debug)]
pub struct Distances {
    pub mean: f64,
    pub variance: f64,
    /// Of ψ², the mean square.
    pub power: f64,
}

/// Looks on as a model runs; with nobody looking nothing is computed.
#[derive(Debug, Default)]
pub struct Watch {
    stacks: RefCell<Vec<Seen>>,
    /// The newest output of a layer.
    last: RefCell<Option<Array2<f64>>>,
}

impl Watch {
    /// What was seen of each stack.
    pub fn finish(&self) -> Vec<Seen> {
        self.stacks.take()
    }

    /// A stack begins with these rows.
    pub fn stack(&self, x: &Tensor) -> Result<()> {
        self.stacks.borrow_mut().push(Seen::default());
        self.last.replace(Some(rows(x)?));
        Ok(())
    }

    /// A layer ends with these.
    pub fn layer(&self, x: &Tensor) -> Result<()> {
        let x = rows(x)?;
        if let Some(before) = self.last.take() {
            let cosines = Zip::from(before.rows()).and(x.rows()).map_collect(cosine);
            self.add(|seen| seen.cosines.push(cosines.mean().unwrap_or(f64::NAN)));
        }
        self.last.replace(Some(x));
        Ok(())
    }

    /// After an activation.
    pub fn activations(&self, h: &Tensor) -> Result<()> {
        let h = rows(h)?;
        let active = h.iter().filter(|v| **v != 0.0).count() as f64 / h.len() as f64;
        self.add(|seen| seen.active.push(active));
        Ok(())
    }

    /// Rows of which a norm has a running mean and variance.
    pub fn centred(&self, x: &Tensor, mean: &Tensor, variance: &Tensor) -> Result<()> {
        let x = rows(x)?;
        let found = Distances {
            mean: distance(x.mean_axis(Axis(0)), vector(mean)?),
            variance: distance(Some(x.var_axis(Axis(0), 0.0)), vector(variance)?),
            power: f64::NAN,
        };
        self.add(|seen| seen.distances.push(found));
        Ok(())
    }

    /// Rows of which a norm has a running ψ².
    pub fn power(&self, x: &Tensor, power: &Tensor) -> Result<()> {
        let squares = rows(x)?.mapv_into(|v| v * v);
        let power = distance(squares.mean_axis(Axis(0)), vector(power)?);
        self.add(|seen| seen.distances.push(Distances { mean: f64::NAN, variance: f64::NAN, power }));
        Ok(())
    }

    fn add(&self, note: impl FnOnce(&mut Seen)) {
        if let Some(seen) = self.stacks.borrow_mut().last_mut() {
            note(seen);
        }
    }
}

/// 0 where either is.
fn cosine(x: ArrayView1<f64>, y: ArrayView1<f64>) -> f64 {
    let norms = (x.dot(&x) * y.dot(&y)).sqrt();
    if norms > 0.0 {
        x.dot(&y) / norms
    } else {
        0.0
    }
}

/// ‖a − b‖₂/d; NaN of no rows.
fn distance(a: Option<Array1<f64>>, b: Array1<f64>) -> f64 {
    a.map_or(f64::NAN, |a| {
        let difference = a - &b;
        difference.dot(&difference).sqrt() / b.len() as f64
    })
}

/// (rows, width) in f64, on the host.
fn rows(x: &Tensor) -> Result<Array2<f64>> {
    let width = x.size().last().copied().unwrap_or(1).max(1) as usize;
    let values = vector(x)?.into_raw_vec_and_offset().0;
    let shape = (values.len() / width, width);
    Array2::from_shape_vec(shape, values).map_err(|e| Error::invalid(e.to_string()))
}

fn vector(x: &Tensor) -> Result<Array1<f64>> {
    let flat = x.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?.f_reshape([-1i64].as_slice())?;
    Ok(Array1::from_vec(Vec::<f64>::try_from(flat)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stack_has_its_own_layers() {
        let watch = Watch::default();
        let x = Tensor::from_slice(&[1.0, 0.0, 0.0, 2.0]).reshape([2, 2]);
        watch.stack(&x).unwrap();
        watch.layer(&Tensor::from_slice(&[3.0, 4.0, 0.0, -1.0]).reshape([2, 2])).unwrap();
        watch.layer(&Tensor::zeros([2, 2], (Kind::Float, Device::Cpu))).unwrap();
        watch.activations(&Tensor::from_slice(&[0.0, 1.0, 2.0, -0.0]).reshape([1, 4])).unwrap();
        watch.stack(&x).unwrap();
        watch.layer(&x).unwrap();
        let seen = watch.finish();
        assert_eq!((&*seen[0].cosines, &*seen[0].active), ([(0.6 - 1.0) / 2.0, 0.0].as_slice(), [0.5].as_slice()));
        assert_eq!((&*seen[1].cosines, seen[1].active.len()), ([1.0].as_slice(), 0));
    }

    #[test]
    fn distances_are_per_number() {
        let watch = Watch::default();
        let x = Tensor::from_slice(&[1.0, 2.0, 3.0, 6.0]).reshape([2, 2]); // means 2, 4; variances 1, 4; ψ² 5, 20
        watch.stack(&x).unwrap();
        let ones = Tensor::ones([2], (Kind::Float, Device::Cpu));
        watch.centred(&x, &ones, &ones).unwrap();
        watch.power(&x, &(ones * 2)).unwrap();
        let found = watch.finish().remove(0).distances;
        assert_eq!((found[0].mean, found[0].variance), (10f64.sqrt() / 2.0, 1.5));
        assert_eq!(found[1].power, (9f64 + 324.0).sqrt() / 2.0);
        assert!(found[0].power.is_nan() && found[1].mean.is_nan() && found[1].variance.is_nan());
    }
}
