//! Multi-head attention on packed rows.

use super::norm::RowContext;
use super::residual::Inside;
use super::sink_attention::sink_attention;
use super::stacked_attention::stacked_attention;
use super::value_embedding::ValueEmbedding;
use super::written_rows::WrittenRows;
use super::{times, Builder, Context, Ranges, Reads};
use crate::analysis::Logits;
use crate::error::Result;
use crate::init::{Fill, Init, Role};
use crate::kernel::attention::Extras;
use crate::operator::{self, Recording};
use crate::parametrisation::SumsOver;
use crate::residual::{LayerContext, OutputGate, Point};
use tch::{no_grad, Device, Tensor};

/// The standard deviation with which sink logits are initialised, gpt-oss's `initializer_range`.
const SINKS_STD: f64 = 0.02;

/// Multi-head attention: softmax(s·QKᵀ)V for each head, then the output projection of the joined heads. s is
/// 1/√d_head, or another factor that the parametrisation sets. q, k and v are stacked in one matrix, as in torch.nn.
/// With grouped queries (Ainslie et al. 2023), query head h uses the keys and values of head ⌊h·kv_heads/heads⌋. With
/// a gate, the heads' outputs are multiplied by σ(W_g x); x is the input of the query projection. Scores may be
/// capped. Each head may have a sink: one more logit in its softmax, which belongs to no value.
pub struct Attention {
    in_weight: Tensor,
    in_bias: Option<Tensor>,
    out_weight: Tensor,
    out_bias: Option<Tensor>,
    gate: Option<Gate>,
    value_embedding: Option<ValueEmbedding>,
    /// The sink logit of each head, (heads).
    sinks: Option<Tensor>,
    /// Each head's largest logit so far, from passes that measure logits, (heads).
    largest: Tensor,
    softcap: Option<f64>,
    d: i64,
    heads: i64,
    kv_heads: i64,
    /// The width of a row of keys, or of values.
    kv_width: i64,
    scale: f64,
    /// The factor of the heads' outputs.
    heads_scale: f64,
}

/// W_g and its bias, with one row for each head or for each element of the heads' outputs.
struct Gate {
    weight: Tensor,
    bias: Option<Tensor>,
}

/// The keys and values of decoded tokens. Each token of a hypothesis has one row, which is kv_width wide.
pub struct Cache {
    keys: WrittenRows,
    values: WrittenRows,
}

impl Attention {
    /// Declares the parameters of the attention sublayer at this place.
    pub fn build(b: &mut Builder, place: &LayerContext, init: &Init, has_biases: bool) -> Result<Self> {
        let (d, heads) = (place.model.d_model, place.model.heads);
        let (kv_heads, kv_width) = (place.model.kv_heads, place.kv_width());
        let parts = [(Role::Query, d), (Role::Key, kv_width), (Role::Value, kv_width)];
        let stacked = Fill::Rows(parts.map(|(role, rows)| (rows, init.matrix(role, d, rows, place))).to_vec());
        // Declares the stacked biases of these parts, if linear layers have biases.
        let bias = |b: &mut Builder, name: &str, parts: &[(Role, i64)]| {
            let width = parts.iter().map(|(_, rows)| rows).sum();
            has_biases.then(|| b.parameter(name, &[width], &init.biases(parts, d))).transpose()
        };
        let rows = d + 2 * kv_width;
        let in_weight = b.parameter("in_proj_weight", &[rows, d], &stacked)?;
        let in_bias = bias(b, "in_proj_bias", &parts)?;
        let (out_weight, out_bias) = b.within("out_proj", |b| {
            let weight = b.parameter("weight", &[d, d], &init.matrix(Role::AttentionOutput, d, d, place))?;
            Ok((weight, bias(b, "bias", &[(Role::AttentionOutput, d)])?))
        })?;
        let gate = place.model.output_gate.map(|kind| {
            let rows = if kind == OutputGate::Head { heads } else { d };
            b.within("gate_proj", |b| {
                let weight = b.parameter("weight", &[rows, d], &init.matrix(Role::OutputGate, d, rows, place))?;
                Ok(Gate { weight, bias: bias(b, "bias", &[(Role::OutputGate, rows)])? })
            })
        });
        let (gate, scale) = (gate.transpose()?, place.model.scaled.scores(d / heads));
        let start = Fill::Normal { std: SINKS_STD };
        let sinks = place.model.sinks.then(|| b.own("sinks", &[heads], &start, SumsOver::Nothing)).transpose()?;
        let value_embedding = ValueEmbedding::build(b, place, init)?;
        let softcap = place.model.score_softcap;
        // QK-clip reads the heads' largest logits, and scales the projections down.
        let largest = b.heads(&in_weight, in_bias.as_ref(), heads, kv_heads)?;
        Ok(Attention {
            in_weight,
            in_bias,
            out_weight,
            out_bias,
            gate,
            value_embedding,
            sinks,
            largest,
            softcap,
            d,
            heads,
            kv_heads,
            kv_width,
            scale,
            heads_scale: place.model.scaled.unit.map_or(1.0, |unit| unit.heads()),
        })
    }

    /// Computes self-attention within each sentence, with `causal` to the past alone. x is (rows, d), or (3, rows, d)
    /// if q, k and v have separate inputs. `inside` holds the residual scheme's changes inside the sublayer.
    pub fn attend(&self, x: &Tensor, ranges: &Ranges, causal: bool, inside: &Inside, ctx: &Context) -> Result<Tensor> {
        let (x, stacked) = self.stacked(x, inside, ctx)?;
        // If nothing changes q, k or v separately, one kernel reads them from the stacked projection. Otherwise `heads`
        // gets them as three tensors, and calls `measure` itself.
        if let (Ranges::Packed(table), true) = (ranges, self.stays_stacked(&stacked, inside, ctx)) {
            let columns_from = |start| stacked.f_narrow(1, start, self.d);
            let (q, k) = (columns_from(0)?, columns_from(self.d)?);
            self.measure([&q, &k], ranges, causal, ctx)?;
            let heads = stacked_attention(&stacked, table, self.heads, causal, self.scale, self.dropout(ctx))?;
            return self.output(heads, &x, inside, ctx);
        }
        let qkv = self.queries_keys_values(stacked, &x, inside, ctx)?;
        self.output(self.heads(qkv.each_ref(), ranges, causal, ctx)?, &x, inside, ctx)
    }

    /// Returns the input of the query projection and `[q|k|v]`, the three projections side by side. x is (rows, d), or
    /// (3, rows, d) if q, k and v have separate inputs.
    fn stacked(&self, x: &Tensor, inside: &Inside, ctx: &Context) -> Result<(Tensor, Tensor)> {
        let x = inside.at(Point::Input, x.shallow_clone(), &ctx.rows())?;
        let is_apart = x.dim() > 2;
        // If q, k and v have the same input, one product computes all three.
        if !is_apart && !Point::INPUTS.into_iter().any(|point| inside.changes(point)) {
            let stacked = ctx.linear(&x, &self.in_weight, self.in_bias.as_ref())?;
            return Ok((x, stacked));
        }
        let (mut projected, mut start, mut query_input) = (Vec::new(), 0, None);
        let widths = [self.d, self.kv_width, self.kv_width];
        for (index, (point, width)) in Point::INPUTS.into_iter().zip(widths).enumerate() {
            let input = if is_apart { x.f_select(0, index as i64)? } else { x.shallow_clone() };
            let input = inside.at(point, input, &ctx.rows())?;
            projected.push(self.project(&input, start, width, ctx)?);
            query_input.get_or_insert(input); // the queries come first
            start += width;
        }
        Ok((query_input.expect("queries are projected first"), Tensor::f_cat(&projected, -1)?))
    }

    /// True if [`stacked_attention`] can be used: in training on a CPU with flat buffers, if nothing changes `[q|k|v]`
    /// before attention's kernels.
    fn stays_stacked(&self, stacked: &Tensor, inside: &Inside, ctx: &Context) -> bool {
        let is_changed = Point::BEFORE_PRODUCTS.into_iter().any(|point| inside.changes(point));
        let is_training = ctx.has_flat() && Recording::is_on() && stacked.requires_grad();
        let is_plain = !is_changed
            && self.value_embedding.is_none()
            && !ctx.turns()
            && !self.is_grouped()
            && self.extras().are_none();
        is_training && stacked.device() == Device::Cpu && is_plain
    }

    /// Returns the softcap and the sinks, the two options of the softmax that the attention operator does not support.
    fn extras(&self) -> Extras<'_> {
        Extras { softcap: self.softcap, sinks: self.sinks.as_ref() }
    }

    /// Returns (p, seed, site) of the dropout on attention weights in this pass; `None` if there is none. p is the
    /// rate, and `site` numbers this dropout among those of the pass.
    fn dropout<'a>(&self, ctx: &'a Context) -> Option<(f64, &'a Tensor, i64)> {
        // The site is counted even without dropout, so that later sites always have the same numbers.
        let (site, p) = (ctx.dropout_site(), ctx.rates.attention);
        ctx.seed.as_ref().filter(|_| p > 0.0).map(|seed| (p, seed, site))
    }

    /// Computes attention from the queries of x (rows, d) to the keys and values in `memory`, which
    /// [`memory`](Self::memory) has returned. `ranges` says which rows of both belong to one sentence, and `inside`
    /// holds the residual scheme's changes inside the sublayer.
    pub fn attend_memory(
        &self,
        x: &Tensor,
        memory: &(Tensor, Tensor),
        ranges: &Ranges,
        inside: &Inside,
        ctx: &Context,
    ) -> Result<Tensor> {
        let (x, q) = self.queries(x, inside, ctx)?;
        let ((k, v), causal) = (memory, false);
        self.output(self.heads([&q, k, v], ranges, causal, ctx)?, &x, inside, ctx)
    }

    /// Computes the attention of [`attend_memory`](Self::attend_memory) in a decoding step. `reads` lists the memory
    /// rows that each query reads.
    pub fn read_memory(
        &self,
        x: &Tensor,
        memory: &(Tensor, Tensor),
        reads: &Reads,
        inside: &Inside,
        ctx: &Context,
    ) -> Result<Tensor> {
        let (x, q) = self.queries(x, inside, ctx)?;
        let (k, v) = memory;
        self.output(self.read([&q, k, v], reads, ctx)?, &x, inside, ctx)
    }

    /// Returns the input of the query projection (x after the scheme's changes in `inside`), and the queries.
    fn queries(&self, x: &Tensor, inside: &Inside, ctx: &Context) -> Result<(Tensor, Tensor)> {
        let x = inside.at(Point::Input, x.shallow_clone(), &ctx.rows())?;
        let q = self.project(&x, 0, self.d, ctx)?; // the matrix's first d rows belong to the queries
        let q = inside.at_heads(Point::Query, q, self.heads, &ctx.rows())?;
        Ok((x, q))
    }

    /// Returns the keys and values, (rows, kv_width), of `memory`, the encoder output (rows, d). `inside` holds the
    /// residual scheme's changes inside the sublayer.
    pub fn memory(&self, memory: &Tensor, inside: &Inside, ctx: &Context) -> Result<(Tensor, Tensor)> {
        // In the stacked matrix, the rows of keys and values follow the d rows of queries.
        let [k, v] = parts(self.project(memory, self.d, 2 * self.kv_width, ctx)?, [self.kv_width; 2])?;
        let change = |point, x| inside.at_heads(point, x, self.kv_heads, &ctx.rows());
        Ok((change(Point::Key, k)?, change(Point::Value, v)?))
    }

    /// Splits `[q|k|v]` into queries, keys and values, and applies the scheme's changes and the rotation by positions.
    /// x is the input of the query projection.
    fn queries_keys_values(&self, stacked: Tensor, x: &Tensor, inside: &Inside, ctx: &Context) -> Result<[Tensor; 3]> {
        let [q, k, v] = parts(stacked, [self.d, self.kv_width, self.kv_width])?;
        let v = match &self.value_embedding {
            Some(embedding) => embedding.added(v, x, ctx)?,
            None => v,
        };
        let change = |point, x, heads| inside.at_heads(point, x, heads, &ctx.rows());
        let q = change(Point::Query, q, self.heads)?;
        let k = change(Point::Key, k, self.kv_heads)?;
        let v = change(Point::Value, v, self.kv_heads)?;
        let q = change(Point::RotatedQuery, ctx.turned(q)?, self.heads)?;
        let k = change(Point::RotatedKey, ctx.turned(k)?, self.kv_heads)?;
        Ok([q, k, v])
    }

    /// Projects x with `length` rows of the matrix in which the projections to q, k and v are stacked, from row `start`
    /// on.
    fn project(&self, x: &Tensor, start: i64, length: i64, ctx: &Context) -> Result<Tensor> {
        let used_rows = |t: &Tensor| t.f_narrow(0, start, length);
        let bias = self.in_bias.as_ref().map(used_rows).transpose()?;
        ctx.linear(x, &used_rows(&self.in_weight)?, bias.as_ref())
    }

    /// Computes causal self-attention within each new slot (a text in the cache), for all its tokens at once; x is
    /// (rows, d), and `own` says which rows form a slot. Writes the tokens' keys and values to the cache from
    /// `first_row` on.
    pub fn begin(
        &self,
        x: &Tensor,
        cache: &mut Option<Cache>,
        first_row: usize,
        own: &Ranges,
        inside: &Inside,
        ctx: &Context,
    ) -> Result<Tensor> {
        let (x, stacked) = self.stacked(x, inside, ctx)?;
        let qkv = self.queries_keys_values(stacked, &x, inside, ctx)?;
        let [_, k, v] = &qkv;
        Cache::of(cache, k, WrittenRows::ROOM_OF_TEXT)?.write(k, v, first_row as i64)?;
        let causal = true;
        self.output(self.heads(qkv.each_ref(), own, causal, ctx)?, &x, inside, ctx)
    }

    /// Computes self-attention for one more token in each slot of the cache; x is (slots, d). Writes the tokens' keys
    /// and values to the cache from `first_row` on. `reads` lists the rows that each slot reads, these new ones
    /// included.
    pub fn step(
        &self,
        x: &Tensor,
        cache: &mut Option<Cache>,
        first_row: usize,
        reads: &Reads,
        inside: &Inside,
        ctx: &Context,
    ) -> Result<Tensor> {
        let (x, stacked) = self.stacked(x, inside, ctx)?;
        let [q, k, v] = self.queries_keys_values(stacked, &x, inside, ctx)?;
        let cache = Cache::of(cache, &k, WrittenRows::ROOM_OF_STEP)?;
        cache.write(&k, &v, first_row as i64)?;
        self.output(self.read([&q, cache.keys.all(), cache.values.all()], reads, ctx)?, &x, inside, ctx)
    }

    /// Computes attention of single queries to the rows that each of them reads. On the CPU the kernel reads the rows
    /// where they are. The rows are gathered first if gradients are recorded, if heads share keys, or on another
    /// device.
    fn read(&self, [q, k, v]: [&Tensor; 3], reads: &Reads, ctx: &Context) -> Result<Tensor> {
        if q.device() == Device::Cpu && !Recording::is_on() && !self.is_grouped() {
            return reads.attention([q, k, v], self.heads, self.scale, &self.extras());
        }
        let (k, v, ranges) = reads.gathered([k, v], q.device())?;
        let causal = false; // each query attends to all rows that it reads
        self.heads([q, &k, &v], &ranges, causal, ctx)
    }

    /// Returns the outputs of all heads side by side, (rows, d). The queries are (rows, d), and the keys and values are
    /// (key rows, kv_width).
    fn heads(&self, [q, k, v]: [&Tensor; 3], ranges: &Ranges, causal: bool, ctx: &Context) -> Result<Tensor> {
        ctx.show(|watch| {
            let (k, extras) = (self.for_each_query(k)?, self.extras());
            // The watch calls `each` to visit the logits, sentence by sentence.
            let each = |visit: &mut dyn FnMut(Tensor, Tensor) -> Result<()>| {
                ranges.each_product([q, &k], self.heads, causal, |products, seen| {
                    visit(extras.capped(products.f_mul_scalar(self.scale)?)?, seen)
                })
            };
            watch.attention(&Logits { each: &each, sinks: extras.sinks })
        })?;
        self.measure([q, k], ranges, causal, ctx)?;
        let (dropout, extras) = (self.dropout(ctx), self.extras());
        match ranges {
            // The attention operator supports neither softcap nor sinks.
            Ranges::Packed(table) if !extras.are_none() => {
                let (k, v) = (self.for_each_query(k)?, self.for_each_query(v)?);
                // On the CPU a kernel computes attention without sinks, and `sink_attention` corrects the result.
                if let (Extras { softcap: None, sinks: Some(sinks) }, Device::Cpu) = (extras, q.device()) {
                    let qkv = [q, &k, &v];
                    return sink_attention(qkv, sinks, table, self.heads, causal, self.scale, dropout);
                }
                operator::composed_attention([q, &k, &v], table, self.heads, causal, self.scale, &extras, dropout)
            }
            // `among_groups` gives queries other row numbers, on which a causal mask and dropout depend.
            Ranges::Packed(table) if self.is_grouped() && !causal && dropout.is_none() => {
                self.among_groups([q, k, v], table)
            }
            Ranges::Packed(table) => {
                let (k, v) = (self.for_each_query(k)?, self.for_each_query(v)?);
                let (p, seed, site) = dropout.map_or((0.0, None, 0), |(p, seed, site)| (p, Some(seed), site));
                operator::attention(q, &k, &v, table, self.heads, causal, self.scale, p, seed, site)
            }
            Ranges::Padded(padded) => {
                let (k, v) = (self.for_each_query(k)?, self.for_each_query(v)?);
                padded.attention([q, &k, &v], self.heads, causal, self.scale, &extras, dropout)
            }
        }
    }

    /// Updates `largest`, each head's largest logit so far, with the scores of these queries and keys, if the pass
    /// measures logits. Attention's kernels return no scores, so the products QKᵀ are computed again.
    fn measure(&self, [q, k]: [&Tensor; 2], ranges: &Ranges, causal: bool, ctx: &Context) -> Result<()> {
        // In a recomputation, the first run has measured the same logits already.
        if !ctx.measures_logits || ctx.is_recompute {
            return Ok(());
        }
        no_grad(|| {
            let products = ranges.largest_product([q, &self.for_each_query(k)?], self.heads, causal)?; // (heads)
            let logits = products.f_mul_scalar(self.scale)?.f_to_kind(self.largest.kind())?;
            // The update is in place, because the model's `AttentionHeads` share this tensor.
            self.largest.shallow_clone().f_copy_(&self.largest.f_maximum(&logits)?)?;
            Ok(())
        })
    }

    /// Returns the sublayer's output from the joined heads (rows, d). Multiplies them by u-μP's factor and by the gate
    /// of x, then applies the output projection, with the scheme's changes before and after it.
    fn output(&self, heads: Tensor, x: &Tensor, inside: &Inside, ctx: &Context) -> Result<Tensor> {
        let rows: RowContext = ctx.rows();
        let heads = times(heads, self.heads_scale)?;
        let heads = match &self.gate {
            Some(gate) => gate.apply(heads, x, ctx)?,
            None => heads,
        };
        let heads = inside.at(Point::AfterHeads, heads, &rows)?;
        let out = ctx.linear(&heads, &self.out_weight, self.out_bias.as_ref())?;
        inside.at(Point::AfterOutput, out, &rows)
    }

    /// True if several query heads share a head of keys and values.
    fn is_grouped(&self) -> bool {
        self.kv_heads < self.heads
    }

    /// Repeats each head of keys or values (rows, kv_width) for all query heads that share the head: (rows, d).
    fn for_each_query(&self, x: &Tensor) -> Result<Tensor> {
        if !self.is_grouped() {
            return Ok(x.shallow_clone());
        }
        let (shared, width) = (self.heads / self.kv_heads, self.d / self.heads); // query heads per key head, d_head
        let by_head = x.f_reshape([-1, self.kv_heads, 1, width].as_slice())?;
        let implicit = false; // an internal flag of PyTorch's
        let repeated = by_head.f_expand([-1, -1, shared, -1].as_slice(), implicit)?;
        Ok(repeated.f_reshape([-1, self.d].as_slice())?)
    }

    /// Computes attention without a causal mask and without dropout, (rows, d). Query heads that share keys and values
    /// become rows of one head, so that keys and values are not repeated. `table` holds a range for each sentence.
    fn among_groups(&self, [q, k, v]: [&Tensor; 3], table: &Tensor) -> Result<Tensor> {
        let (shared, width) = (self.heads / self.kv_heads, self.d / self.heads); // query heads per key head, d_head
        let rows = q.f_reshape([-1, self.kv_heads, shared, width].as_slice())?.f_transpose(1, 2)?;
        let rows = rows.f_reshape([-1, self.kv_width].as_slice())?; // (query rows·shared, kv_width)

        // Each query becomes `shared` rows, so the queries' ranges grow by this factor; the keys' ranges stay. A row of
        // the table is (q_start, q_len, k_start, k_len).
        let factors = Tensor::f_from_slice(&[shared, shared, 1, 1])?.f_to_device(table.device())?;
        let table = table.f_mul(&factors)?;
        let (causal, p, seed, site) = (false, 0.0, None, 0); // no mask and no dropout
        let heads = operator::attention(&rows, k, v, &table, self.kv_heads, causal, self.scale, p, seed, site)?;
        // The heads of each query, which are in several rows, come back into one row.
        let heads = heads.f_reshape([-1, shared, self.kv_heads, width].as_slice())?.f_transpose(1, 2)?;
        Ok(heads.f_reshape([-1, self.d].as_slice())?)
    }
}

impl Gate {
    /// Returns the heads' outputs (rows, d) times σ(W_g x).
    fn apply(&self, heads: Tensor, x: &Tensor, ctx: &Context) -> Result<Tensor> {
        let gate = ctx.linear(x, &self.weight, self.bias.as_ref())?.f_sigmoid()?; // (rows, d) or (rows, heads)
        let is_by_element = gate.size() == heads.size();
        if is_by_element {
            return Ok(heads.f_mul(&gate)?);
        }
        let by_head = heads.f_unflatten(-1, [gate.size()[1], -1].as_slice())?; // (rows, heads, d_head)
        Ok(by_head.f_mul(&gate.f_unsqueeze(-1)?)?.f_flatten(-2, -1)?)
    }
}

/// Splits the columns of a stacked projection, such as `[q|k|v]`, into matrices of these widths.
fn parts<const N: usize>(stacked: Tensor, widths: [i64; N]) -> Result<[Tensor; N]> {
    let parts = stacked.f_split_with_sizes(widths.as_slice(), 1)?;
    Ok(parts.try_into().expect("as many parts as widths"))
}

impl Cache {
    /// Returns the existing cache, or a new one with room for `room_factor` times the rows of k.
    fn of<'a>(cache: &'a mut Option<Cache>, k: &Tensor, room_factor: i64) -> Result<&'a mut Self> {
        match cache {
            Some(cache) => Ok(cache),
            None => {
                let empty = || WrittenRows::empty(k, room_factor * k.size()[0]);
                Ok(cache.insert(Cache { keys: empty()?, values: empty()? }))
            }
        }
    }

    /// Writes the rows of k and v into the cache, from `first_row` on.
    fn write(&mut self, k: &Tensor, v: &Tensor, first_row: i64) -> Result<()> {
        self.keys.write(k, first_row)?;
        self.values.write(v, first_row)
    }

    /// Keeps only the rows that `kept` lists: row kept[i] becomes row i.
    pub fn keep(&mut self, kept: &Tensor) -> Result<()> {
        self.keys.keep(kept)?;
        self.values.keep(kept)
    }
}
