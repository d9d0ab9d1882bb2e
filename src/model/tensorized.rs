//! Tensorized attention (Ma et al. 2019) with one block, as in the language models of PowerNorm's paper (docs/spec.md
//! §4.4).

use super::linear::linear;
use super::residual::Inside;
use super::sinusoids::{SinusoidRow, Sinusoids};
use super::{Builder, Context, Ranges};
use crate::error::Result;
use crate::init::{Fill, Init, Role};
use crate::residual::{LayerContext, Point, TensorizedSizes};
use tch::{Kind, Tensor};

/// The name, the definition and the source, for the tables of the documentation.
pub const TENSORIZED: [&str; 3] = [
    "tensorized",
    "Σ_jk W_o[jk]·Σ_r c_r((q_i + u)_r k_jr + (q_i + w)_r p_jr) v_kr over j, k ≤ i in a segment of at most T tokens, p_j \
     projected sinusoids of T − 1 − j; `--attention tensorized`, language models only. Each layer has its own u and w; \
     c = 1/R, u = w = 0 at the start *(ours)*",
    "Ma et al. 2019, one block, as Shen et al. 2020, §5.1",
];

/// Tensorized attention: out_i = W_o·vec_{jk} Σ_r c_r((q_i + u)_r k_jr + (q_i + w)_r p_jr) v_kr for j, k ≤ i. The
/// vector has T² entries, and its other entries are 0.
pub struct Tensorized {
    /// The matrix (3R, d) in which the projections to q, k and v are stacked.
    in_weight: Tensor,
    /// The weight (R, d) that projects the sinusoidal encoding of the distance T − 1 − j.
    position_weight: Tensor,
    /// The core c, (R).
    core: Tensor,
    /// The biases u and w, (R).
    biases: [Tensor; 2],
    /// The output matrix W_o, (d, T²).
    out_weight: Tensor,
    positions: Sinusoids,
    rank: i64,
    segment: i64,
}

impl Tensorized {
    /// Declares the parameters of tensorized attention at this place.
    pub fn build(b: &mut Builder, place: &LayerContext, init: &Init, sizes: TensorizedSizes) -> Result<Self> {
        let (d, TensorizedSizes { rank, segment }) = (place.model.d_model, sizes);
        let entries = segment.saturating_mul(segment);
        let mut linear =
            |name: &str, shape: [i64; 2], fill: &Fill| b.within(name, |b| b.parameter("weight", &shape, fill));
        let out_weight = linear("out_proj", [d, entries], &(init.linear)(Role::AttentionOutput, entries, d, place))?;
        let position_weight = linear("position_proj", [rank, d], &(init.linear)(Role::Key, d, rank, place))?;
        let stacked = init.linears(&[Role::Query, Role::Key, Role::Value], d, rank, place);
        let zeros = Fill::Constant(0.0);
        Ok(Tensorized {
            in_weight: b.parameter("in_proj_weight", &[3 * rank, d], &stacked)?,
            position_weight,
            // With these initial values the core computes the mean over r.
            core: b.parameter("core", &[rank], &Fill::Constant(1.0 / rank as f64))?,
            biases: [b.parameter("content_bias", &[rank], &zeros)?, b.parameter("position_bias", &[rank], &zeros)?],
            out_weight,
            positions: Sinusoids::new(SinusoidRow::Twt, d),
            rank,
            segment,
        })
    }

    /// Computes attention of each token to its past, in sentences of at most T tokens. x is (rows, d), and `inside`
    /// holds the residual scheme's changes inside the sublayer.
    pub fn attend(&self, x: &Tensor, ranges: &Ranges, inside: &Inside, ctx: &Context) -> Result<Tensor> {
        let x = inside.at(Point::Input, x.shallow_clone(), &ctx.rows())?;
        let qkv = ctx.linear(&x, &self.in_weight, None)?.f_split(self.rank, 1)?;
        let out = match ranges.segments()? {
            Some(segments) => {
                let [q, k, v] = segments.side_by_side([&qkv[0], &qkv[1], &qkv[2]])?;
                // Sentences may be padded to more than a segment's T tokens. All keys after the first T are padding.
                let keys = k.size()[1].min(self.segment);
                let absent = segments.absent_keys()?;
                let entries = self.entries(&q, &k.f_narrow(1, 0, keys)?, &v.f_narrow(1, 0, keys)?, absent.as_ref())?;
                segments.pack(&ctx.linear(&entries.f_flatten(0, 1)?, &self.output(keys)?, None)?)?
            }
            None => x.f_zeros_like()?.f_to_kind(ctx.kind)?, // there are no rows
        };
        inside.at(Point::AfterOutput, out, &ctx.rows())
    }

    /// Returns the entries that W_o reads, (n, queries, keys²). For query i, the entry of keys j and k is
    /// Σ_r c_r((q_i + u)_r k_jr + (q_i + w)_r p_jr) v_kr, where p_j is the projected encoding of position T − 1 − j. q, k
    /// and v are (n, queries or keys, R). `absent`, bool (n, keys), is true at padding.
    fn entries(&self, q: &Tensor, k: &Tensor, v: &Tensor, absent: Option<&Tensor>) -> Result<Tensor> {
        let (kind, device) = (q.kind(), q.device());
        let [n, queries, rank] = q.size()[..] else { unreachable!("queries have three dimensions") };
        let keys = k.size()[1];
        let table = self.positions.table(self.segment, self.in_weight.kind(), device)?.f_narrow(0, 0, self.segment)?;
        // Row j of the flipped table encodes T − 1 − j.
        let table = table.f_flip([0i64].as_slice())?.f_narrow(0, 0, keys)?;
        let (bias, flat) = (None, None); // without flat buffers, autograd records the product
        let p = linear(&table, &self.position_weight, bias, kind, flat)?; // (keys, R)
        let core = self.core.f_to_kind(kind)?;
        // Returns c⊙(q + bias) for the bias u or w, (n, queries, 1, R).
        let weighted = |bias: &Tensor| q.f_add(&bias.f_to_kind(kind)?)?.f_mul(&core)?.f_unsqueeze(2);
        let [content, position] = self.biases.each_ref().map(weighted);
        // `scores` is (n, queries, keys, R); the product with v sums over R.
        let scores = content?.f_mul(&k.f_unsqueeze(1)?)?.f_add(&position?.f_mul(&p)?)?;
        let entries = scores.f_reshape([n, queries * keys, rank].as_slice())?.f_matmul(&v.f_transpose(1, 2)?)?;
        // An entry of keys j and k is 0 if either key comes after the query, or is padding.
        let indices = |end: i64| Tensor::f_arange(end, (Kind::Int64, device));
        let future = indices(keys)?.f_gt_tensor(&indices(queries)?.f_unsqueeze(1)?)?; // (queries, keys)
        let mut hidden = future.f_unsqueeze(2)?.f_logical_or(&future.f_unsqueeze(1)?)?; // (queries, j, k)
        if let Some(absent) = absent {
            let absent = absent.f_unsqueeze(2)?.f_logical_or(&absent.f_unsqueeze(1)?)?.f_unsqueeze(1)?;
            hidden = hidden.f_logical_or(&absent)?;
        }
        let entries = entries.f_reshape([n, queries, keys, keys].as_slice())?.f_masked_fill(&hidden, 0.0)?;
        Ok(entries.f_flatten(2, 3)?)
    }

    /// Returns the columns of W_o that belong to the first `keys` positions, (d, keys²).
    fn output(&self, keys: i64) -> Result<Tensor> {
        let t = self.segment;
        let weight = self.out_weight.f_unflatten(1, [t, t].as_slice())?;
        Ok(weight.f_narrow(1, 0, keys)?.f_narrow(2, 0, keys)?.f_flatten(1, 2)?)
    }
}
