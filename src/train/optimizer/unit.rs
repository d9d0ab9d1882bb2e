//! Matrices on the sphere: after each update every vector of d_model numbers has norm 1 (Loshchilov et al. 2024).

use crate::error::Result;
use crate::parametrisation::{ParameterRole, Part};
use tch::{no_grad, Tensor};

/// The smallest norm by which a vector is divided. A vector of zeros, such as padding's embedding, stays zero.
const EPS: f64 = 1e-12;
/// Vectors whose norm is this near to 1 are not scaled when training begins. So a resumed run has the same bits as an
/// uninterrupted one.
const NEAR: f64 = 1e-4;

/// The matrices, each with the dimension along which its vectors lie.
#[derive(Default)]
pub struct UnitMatrices(Vec<(Tensor, i64)>);

impl UnitMatrices {
    /// Adds the parameter `t` if it is a table of words, a matrix that reads the residual stream (then its rows are
    /// the vectors), or a matrix that writes to the stream (then its columns are). `t` shares memory with the model's
    /// parameter.
    pub fn add(&mut self, name: &str, part: Part, t: &Tensor) {
        self.0.extend(dimension(name, part, t.dim()).map(|dimension| (t.shallow_clone(), dimension)));
    }

    /// Divides each vector by its norm, unless the norm is near 1 already. Called when training begins.
    pub fn begin(&self) -> Result<()> {
        self.each(|m, lengths| {
            let is_unit = lengths.f_sub_scalar(1.0)?.f_abs()?.f_lt(NEAR)?;
            Ok(m.f_where_self(&is_unit, &m.f_div(&lengths.f_clamp_min(EPS)?)?)?)
        })
    }

    /// Divides each vector by its norm. `is_alive` is given on a GPU; if it is false there, because an update was not
    /// finite, nothing changes.
    pub fn normalise(&self, is_alive: Option<&Tensor>) -> Result<()> {
        self.each(|m, lengths| {
            let unit = m.f_div(&lengths.f_clamp_min(EPS)?)?;
            is_alive.map_or(Ok(unit.shallow_clone()), |alive| Ok(unit.f_where_self(alive, m)?))
        })
    }

    /// Replaces each matrix by `changed(matrix, lengths of its vectors)`. The lengths have size 1 in the dimension
    /// along which the vectors lie, so that they broadcast over the matrix.
    fn each(&self, changed: impl Fn(&Tensor, &Tensor) -> Result<Tensor>) -> Result<()> {
        no_grad(|| {
            self.0.iter().try_for_each(|(m, dimension)| {
                let lengths = m.f_norm_scalaropt_dim(2.0, [*dimension].as_slice(), true)?;
                m.shallow_clone().f_copy_(&changed(m, &lengths)?)?;
                Ok(())
            })
        })
    }
}

/// Returns the dimension along which the vectors of d_model numbers lie: 1 if they are rows, 0 if they are columns.
/// `dimensions` is the parameter's number of dimensions. Returns `None` for parameters that are no such matrix, for
/// tables of positions, and for value embeddings and their gates: rows of value embeddings are attention's values, not
/// vectors of the residual stream.
pub fn dimension(name: &str, part: Part, dimensions: usize) -> Option<i64> {
    let is_of_positions = part.role == ParameterRole::Embedding && name.contains("position");
    let is_of_values = name.contains(".value_embedding.") || name.contains(".value_gate.");
    let writes_to_stream = name.ends_with("out_proj.weight") || name.ends_with("linear2.weight");
    // Columns lie along dimension 0, rows along dimension 1.
    (dimensions == 2 && part.is_matrix() && !is_of_positions && !is_of_values).then_some(i64::from(!writes_to_stream))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parametrisation::{part, DeclaredAs};
    use tch::{Device, Kind};

    #[test]
    fn vectors_along_the_width_get_length_one() {
        tch::manual_seed(0);
        let random = |rows, columns| Tensor::randn([rows, columns], (Kind::Double, Device::Cpu));
        let names = ["embedding.weight", "decoder.layers.0.linear1.weight", "decoder.layers.0.linear2.weight"];
        let matrices = [random(5, 4), random(6, 4), random(4, 6)];
        let _ = matrices[0].get(1).fill_(0.0);
        let before = matrices.each_ref().map(|m| m.copy());
        let (mut unit, others) = (UnitMatrices::default(), [random(3, 4), random(5, 2), random(1, 4)]);
        let kept = others.each_ref().map(|m| m.copy());
        let value = |part: &str| format!("decoder.layers.0.self_attn.value_{part}.weight");
        let other_names = ["position_embedding.weight".into(), value("embedding"), value("gate")];
        let other_names = other_names.each_ref().map(String::as_str);
        for (name, m) in names.into_iter().zip(&matrices).chain(other_names.into_iter().zip(&others)) {
            unit.add(name, part(name, 2, DeclaredAs::Weights), m);
        }
        unit.begin().unwrap();
        assert_eq!(others, kept);
        for (i, (m, before)) in matrices.iter().zip(&before).enumerate() {
            // Only linear2, matrix 2, writes to the residual stream, so its vectors are columns.
            let dimension = [if i == 2 { 0i64 } else { 1 }];
            let lengths = before.norm_scalaropt_dim(2.0, dimension.as_slice(), true).clamp_min(1e-12);
            assert!((m - before / lengths).abs().max().double_value(&[]) < 1e-15);
        }
        let bits = matrices.each_ref().map(|m| m.copy());
        unit.begin().unwrap();
        assert!(matrices.iter().zip(&bits).all(|(m, bits)| m == bits));
        unit.normalise(Some(&Tensor::from(false))).unwrap();
        assert!(matrices.iter().zip(&bits).all(|(m, bits)| m == bits));
    }
}
