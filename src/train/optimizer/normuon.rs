//! NorMuon: Muon in which each row is divided by the root of a running mean of the row's mean square (Li et al.
//! 2025).

use super::muon::{norms, Muon};
use super::rule::{mix, Rule};
use crate::config::TrainingConfig;
use crate::error::Result;
use crate::parametrisation::{Part, StepSize};
use tch::{Kind, Tensor};

/// The ε that the paper's code adds to norms.
const EPS: f64 = 1e-10;
/// The ε that the paper's code adds to a matrix's norm before the Newton–Schulz iteration.
const MATRIX_EPS: f64 = 1e-7;

/// With O = NS(d) as in Muon: v ← v + (1 − β₂)(mean of O² over each row − v), U = O/(√v + ε), and step =
/// scale·U·‖O‖/(‖U‖ + ε).
pub struct NorMuon {
    muon: Muon,
    beta2: f64,
}

impl NorMuon {
    /// Reads the rule's settings from the options.
    pub fn of(config: &TrainingConfig) -> Self {
        NorMuon { muon: Muon::of(config), beta2: config.normuon_beta2 }
    }
}

impl Rule for NorMuon {
    /// The state is Muon's momentum, then v, which has one number for each row.
    fn state(&self, size: &[i64]) -> Vec<(&'static str, Vec<i64>)> {
        let rows = ("second_momentum_buffer", vec![size[0], 1]);
        self.muon.state(size).into_iter().chain([rows]).collect()
    }

    /// NorMuon updates the parameters that Muon does.
    fn takes(&self, part: Part, size: &[i64]) -> bool {
        self.muon.takes(part, size)
    }

    /// Updates the momentum, and returns Muon's direction d.
    fn direction(&self, gradient: &Tensor, state: &mut [Tensor]) -> Result<Tensor> {
        self.muon.direction(gradient, state)
    }

    /// NorMuon's directions are orthogonalised, as Muon's are.
    fn is_orthogonal(&self) -> bool {
        true
    }

    /// Applies the Newton–Schulz iteration to the matrices, divided by their Frobenius norms + ε.
    fn orthogonalised(&self, directions: &Tensor) -> Result<Tensor> {
        self.muon.iterate(directions, &norms(directions)?.f_add_scalar(MATRIX_EPS)?)
    }

    /// Updates v with the mean of O² over each row, and returns U·‖O‖/(‖U‖ + ε) with U = O/(√v + ε).
    fn finished(&self, direction: Tensor, state: &mut [Tensor]) -> Result<Tensor> {
        // `direction` is O, `state[1]` is v, and `rows` is U.
        let squares = direction.f_square()?.f_mean_dim([-1i64].as_slice(), true, None::<Kind>)?;
        mix(&mut state[1], &squares, 1.0 - self.beta2)?;
        let rows = direction.f_div(&state[1].f_sqrt()?.f_add_scalar(EPS)?)?;
        let ratio = direction.f_norm()?.f_div(&rows.f_norm()?.f_add_scalar(EPS)?)?;
        Ok(rows.f_mul(&ratio)?)
    }

    fn factor(&self, size: &[i64]) -> f64 {
        self.muon.factor(size)
    }

    fn step_size(&self) -> StepSize {
        self.muon.step_size()
    }

    fn keeps_norm(&self) -> bool {
        self.muon.keeps_norm()
    }
}
