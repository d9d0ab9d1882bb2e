//! FixNorm: word embeddings of unit length (Nguyen & Salazar 2019, §2.3, eq 6; docs/spec.md §1.11).

use crate::error::Result;
use tch::Tensor;

/// The name, the equation and the source, for the tables of the documentation.
pub const ABOUT: [&str; 3] = [
    "fixnorm",
    "W̃ = W/max(‖row‖₂, 1e-12) of the word embedding, at the input (×√d) and, tied, at the output; U(−0.01, 0.01) at \
     the start. With scalenorm the logits are g·cos(w, x)",
    "Nguyen & Salazar 2019, §2.3, eq 6",
];

/// The bound of the initial embeddings, which are uniform. Its size hardly matters, as rows are scaled to unit length.
pub const INIT_BOUND: f64 = 0.01;

/// The smallest length by which a row is divided, so that rows of zeros stay zero.
pub const EPS: f64 = 1e-12;

/// Returns `W̃ = W / max(‖row‖₂, ε)`, row by row; W is (V, d).
pub fn fix_norm(weight: &Tensor) -> Result<Tensor> {
    let length = weight.f_norm_scalaropt_dim(2.0, [-1i64].as_slice(), true)?.f_clamp_min(EPS)?;
    Ok(weight.f_div(&length)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    #[test]
    fn rows_have_unit_length_and_a_zero_row_stays_zero() {
        let w = Tensor::randn([4, 3], (Kind::Double, Device::Cpu));
        let _ = w.get(2).zero_();
        let lengths =
            Vec::<f64>::try_from(fix_norm(&w).unwrap().square().sum_dim_intlist([1i64].as_slice(), false, None))
                .unwrap();
        assert!((lengths[0] - 1.0).abs() < 1e-12 && lengths[2] == 0.0, "{lengths:?}");
    }
}
