//! Positions (docs/spec.md §4.2): rows that are added to word embeddings, or rotations of queries and keys.

use super::sinusoids::{SinusoidRow, Sinusoids};
use super::{Builder, Packed};
use crate::config::{Positions, TransformerConfig};
use crate::error::Result;
use crate::init::{Init, Table};
use crate::kernel::view::accumulation;
use tch::{Kind, Tensor};

/// The positions that are added to the word embeddings of one side.
pub enum PositionEmbedding {
    Nothing,
    Sinusoids(Sinusoids),
    /// A learned table, (max_positions, d).
    Learned(Tensor),
}

impl PositionEmbedding {
    /// Builds the positions of `side`, source or target. A learned table is initialised like that side's words.
    pub fn build(b: &mut Builder, config: &TransformerConfig, init: &Init, side: Table) -> Result<Self> {
        let d = config.d_model;
        Ok(match config.positions {
            Positions::Twt => PositionEmbedding::Sinusoids(Sinusoids::new(SinusoidRow::Twt, d)),
            Positions::Fairseq => PositionEmbedding::Sinusoids(Sinusoids::new(SinusoidRow::Fairseq, d)),
            Positions::Learned => {
                let name =
                    if side == Table::Source { "source_position_embedding" } else { "target_position_embedding" };
                let fill = init.table(side, &config.outline(), &config.options);
                PositionEmbedding::Learned(
                    b.within(name, |b| b.parameter("weight", &[config.max_positions, d], &fill))?,
                )
            }
            Positions::Rotary | Positions::None => PositionEmbedding::Nothing,
        })
    }

    /// Returns the row to add to each embedded token, (rows, d), with zeros at padding; `None` if positions add
    /// nothing. `kind` is the type of the embeddings.
    pub fn rows(&self, input: &Packed, kind: Kind) -> Result<Option<Tensor>> {
        let rows = match self {
            PositionEmbedding::Nothing => return Ok(None),
            PositionEmbedding::Sinusoids(sinusoids) => {
                let table = sinusoids.table(input.end, kind, input.positions.device())?;
                table.f_index_select(0, &input.positions)?
            }
            PositionEmbedding::Learned(table) => {
                let (padding_id, scale_grad_by_freq, sparse) = (-1, false, false); // −1: no position counts as padding
                Tensor::f_embedding(table, &input.positions, padding_id, scale_grad_by_freq, sparse)?
            }
        };
        match &input.real {
            Some(real) => Ok(Some(rows.f_mul(&real.f_to_kind(rows.kind())?)?)),
            None => Ok(Some(rows)),
        }
    }
}

/// Rotary positions (Su et al. 2021, eq 34): pair j of a head's elements is rotated by the angle
/// position·θ^(−2j/d_head).
pub struct Rotary(Sinusoids);

impl Rotary {
    /// Returns the rotations of a model; `None` if its positions are not rotary.
    pub fn of(config: &TransformerConfig) -> Option<Self> {
        let layout = SinusoidRow::Rotary { theta: config.rope_theta };
        (config.positions == Positions::Rotary).then(|| Rotary(Sinusoids::new(layout, config.d_model / config.heads)))
    }

    /// Returns the rotation for each row of the input. `kind` is the type of matrix products.
    pub fn rotation(&self, input: &Packed, kind: Kind) -> Result<Rotation> {
        let kind = accumulation(kind); // angles of late positions need more than 16 bits
        let table = self.0.table(input.end, kind, input.positions.device())?;
        let rows = table.f_index_select(0, &input.positions)?.f_unsqueeze(1)?; // (rows, 1, d_head)
        let [cos, sin] = halves(&rows)?;
        Ok(Rotation { cos, sin })
    }
}

/// The cos and sin of each row's angles, (rows, 1, d_head/2).
#[derive(Debug)]
pub struct Rotation {
    cos: Tensor,
    sin: Tensor,
}

impl Rotation {
    /// Rotates queries or keys (rows, heads·d_head). The two halves x₁ and x₂ of each head become x₁cos − x₂sin and
    /// x₂cos + x₁sin, which is GPT-NeoX's layout.
    pub fn turn(&self, x: &Tensor) -> Result<Tensor> {
        let d_head = 2 * self.cos.size()[2];
        let [first, second] = halves(&x.f_unflatten(-1, [-1, d_head].as_slice())?)?;
        let Rotation { cos, sin } = self;
        let turned = [first.f_mul(cos)?.f_sub(&second.f_mul(sin)?)?, second.f_mul(cos)?.f_add(&first.f_mul(sin)?)?];
        Ok(Tensor::f_cat(&turned, -1)?.f_flatten(-2, -1)?.f_to_kind(x.kind())?)
    }
}

/// Returns the first and the second half of the last dimension.
fn halves(x: &Tensor) -> Result<[Tensor; 2]> {
    let half = x.size().last().expect("rows have a width") / 2;
    Ok([x.f_narrow(-1, 0, half)?, x.f_narrow(-1, half, half)?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    #[test]
    fn turned_products_depend_on_the_distance_alone() {
        let rotary = Rotary(Sinusoids::new(SinusoidRow::Rotary { theta: 50.0 }, 6));
        let turned = |x: &Tensor, position: i64| {
            let row = Packed::new(&[4], &[position], vec![0, 1]).unwrap();
            rotary.rotation(&row, Kind::Double).unwrap().turn(x).unwrap()
        };
        let [q, k] = [(); 2].map(|()| Tensor::randn([1, 12], (Kind::Double, Device::Cpu)));
        let product = |i, j| (turned(&q, i) * turned(&k, j)).sum(Kind::Double).double_value(&[]);
        assert!((product(9, 2) - product(1007, 1000)).abs() < 1e-10);
        assert!((product(9, 2) - product(9, 3)).abs() > 1e-3);
        assert!((turned(&q, 5).square() - q.square()).sum(Kind::Double).double_value(&[]).abs() < 1e-12);
    }
}
