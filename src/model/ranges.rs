//! Attention ranges: the keys to which each query attends, as ranges of packed rows.

use super::gather::gather;
use super::host_batch::HostBatch;
use super::packed::{Packed, PaddedShape};
use crate::error::{Error, Result};
use crate::host::host;
use crate::kernel::attention::Extras;
use crate::kernel::view::accumulation;
use crate::operator;
use std::rc::Rc;
use tch::{Device, Kind, Tensor};

/// The keys to which each query attends, sentence by sentence.
#[derive(Debug)]
pub enum Ranges {
    /// int64 (n, 4): the range (q_start, q_len, k_start, k_len) of each sentence, which the attention operator reads.
    Packed(Tensor),
    /// Padded sentences, for torch's kernels on a GPU.
    Padded(Rc<Padded>),
}

impl Ranges {
    /// Returns ranges in which each sentence of `queries` attends to the sentence of the same index in `keys`. The
    /// ranges are on the host, in the form that `device` needs.
    pub fn between(queries: &Packed, keys: &Packed, device: Device) -> Result<Self> {
        if queries.sentences() != keys.sentences() {
            return Err(Error::invalid(format!(
                "source and target must have as many sentences, got {} and {}",
                keys.sentences(),
                queries.sentences()
            )));
        }
        let query_ends = queries.offsets.windows(2);
        let key_ranges = keys.offsets.iter().zip(&keys.lengths);
        let table = query_ends.zip(key_ranges).flat_map(|(ends, (&k_start, &k_len))| {
            let (q_start, q_len) = (ends[0], ends[1] - ends[0]); // with padding; `k_len` leaves padding out
            [q_start, q_len, k_start, k_len]
        });
        let table: Vec<i64> = table.collect();
        let is_causal = false;
        Ranges::fitting(
            &table,
            [queries.rows(), keys.rows()],
            queries.padded_shape.zip(keys.padded_shape),
            is_causal,
            device,
        )
    }

    /// Returns ranges in which each token attends to itself and to earlier tokens of its sentence. Padding, which
    /// follows the sentence, attends to all real tokens. The ranges are on the host, in the form that `device` needs.
    pub fn causal(sentences: &Packed, device: Device) -> Result<Self> {
        let mut table = Vec::new();
        for (ends, &real_len) in sentences.offsets.windows(2).zip(&sentences.lengths) {
            let (start, end) = (ends[0], ends[1]);
            // Each range is (q_start, q_len, k_start, k_len). A range's last query reads all its keys, so each row of
            // padding has a range of its own.
            table.extend([start, real_len, start, real_len]);
            table.extend((start + real_len..end).flat_map(|padding| [padding, 1, start, real_len]));
        }
        let (rows, is_causal) = (sentences.rows(), true);
        Ranges::fitting(&table, [rows, rows], sentences.padded_shape.zip(sentences.padded_shape), is_causal, device)
    }

    /// Builds ranges on a device from a flat list of (q_start, q_len, k_start, k_len).
    pub fn of(table: &[i64], device: Device) -> Result<Self> {
        // Column 0 holds the starts of queries, and column 2 those of keys. The next column holds the length.
        let end = |start: usize| table.chunks_exact(4).map(|r| r[start] + r[start + 1]).max().unwrap_or(0);
        let is_causal = false;
        Ranges::fitting(table, [end(0), end(2)], None, is_causal, device)?.to(device)
    }

    /// Returns the largest q·k of each head, (heads), over all pairs of a query and a key that it attends to; −∞ if
    /// there are none. `qk` holds the queries and the keys as packed rows, (rows, d).
    pub fn largest_product(&self, qk: [&Tensor; 2], heads: i64, causal: bool) -> Result<Tensor> {
        let kind = accumulation(qk[0].kind());
        let mut largest = Tensor::f_full([heads].as_slice(), f64::NEG_INFINITY, (kind, qk[0].device()))?;
        self.each_product(qk, heads, causal, |products, seen| {
            let products = products.f_masked_fill(&seen.f_logical_not()?, f64::NEG_INFINITY)?;
            // Products are (…, heads, queries, keys), so this is the largest per sentence and head.
            let keepdim = false;
            let by_sentence = products.f_amax([-2i64, -1].as_slice(), keepdim)?.f_reshape([-1, heads].as_slice())?;
            largest = largest.f_maximum(&by_sentence.f_amax([0i64].as_slice(), keepdim)?)?;
            Ok(())
        })?;
        Ok(largest)
    }

    /// Calls `visit` with the products q·k of all heads, (…, heads, queries, keys), and with a mask that broadcasts to
    /// them. The mask is true where the query attends to the key. There is one call for each sentence, or one for all
    /// padded sentences. Products of 16-bit rows are f32.
    pub fn each_product(
        &self,
        [q, k]: [&Tensor; 2],
        heads: i64,
        causal: bool,
        mut visit: impl FnMut(Tensor, Tensor) -> Result<()>,
    ) -> Result<()> {
        // Splits rows into heads, (…, heads, rows, d_head), in f32 or f64 and without gradients.
        let split = |t: &Tensor| -> Result<Tensor> {
            let t = if t.kind() == Kind::Double { t.f_detach()? } else { t.f_detach()?.f_to_kind(Kind::Float)? };
            Ok(t.f_unflatten(-1, [heads, -1].as_slice())?.f_transpose(-3, -2)?)
        };
        let table = match self {
            Ranges::Packed(table) => table,
            Ranges::Padded(padded) => {
                let [q, k, _] = padded.side_by_side([q, k, k])?; // it takes values too, which are not needed here
                return visit(split(&q)?.f_matmul(&split(&k)?.f_transpose(-2, -1)?)?, padded.seen(causal)?);
            }
        };
        let (q, k) = (split(q)?, split(k)?);
        for row in host("attention: ranges", table)?.chunks_exact(4) {
            let [q_start, q_len, k_start, k_len] = [row[0], row[1], row[2], row[3]];
            if q_len == 0 || k_len == 0 {
                continue;
            }
            let keys = k.f_narrow(1, k_start, k_len)?.f_transpose(1, 2)?;
            let all = Tensor::f_ones([q_len, k_len].as_slice(), (Kind::Bool, q.device()))?;
            // The last query reads all keys, and each query before it one key fewer.
            let seen = if causal { all.f_tril(k_len - q_len)? } else { all };
            visit(q.f_narrow(1, q_start, q_len)?.f_matmul(&keys)?, seen)?;
        }
        Ok(())
    }

    /// Builds ranges on the host from a flat list of (q_start, q_len, k_start, k_len). They are padded for a GPU or for
    /// given `shapes` of queries and keys, if they can be padded; else they are packed. `row_counts` holds the numbers
    /// of query rows and of key rows, without the rows that fill up a shape.
    fn fitting(
        table: &[i64],
        row_counts: [i64; 2],
        shapes: Option<(PaddedShape, PaddedShape)>,
        causal: bool,
        device: Device,
    ) -> Result<Self> {
        if device != Device::Cpu || shapes.is_some() {
            // A causal mask over padded sentences needs as many queries as keys in each.
            if let Some(padded) = Padded::of(table, row_counts, shapes)?.filter(|padded| padded.is_square || !causal) {
                return Ok(Ranges::Padded(Rc::new(padded)));
            }
        }
        // Only padded ranges can have the given shapes.
        if shapes.is_some() {
            return Err(Error::invalid("a batch with an empty sentence cannot be filled up"));
        }
        Ok(Ranges::Packed(Tensor::f_from_slice(table)?.f_reshape([-1, 4].as_slice())?))
    }

    /// Returns causal ranges in which each sentence and its padding form one segment. Padding attends to the whole
    /// sentence, or to the segment's first row if there is only padding. `None` if there are no queries.
    pub fn segments(&self) -> Result<Option<Rc<Padded>>> {
        let table = match self {
            Ranges::Padded(padded) => return Ok(Some(padded.clone())),
            Ranges::Packed(table) => table,
        };
        let mut segments: Vec<i64> = Vec::new(); // a flat list of ranges, as in `table`
        for row in host::<i64>("ranges", table)?.chunks_exact(4) {
            let [q_start, q_len, k_start, k_len] = [row[0], row[1], row[2], row[3]];
            // Padding directly follows its sentence and has the same first key, so it extends the segment.
            match segments.last_chunk_mut::<4>() {
                Some([_, segment_len, first_key, _]) if *first_key == k_start => *segment_len += q_len,
                _ if q_len > 0 => segments.extend([q_start, q_len, k_start, k_len.max(1)]),
                _ => {}
            }
        }
        // Column 0 holds the starts of queries, and column 2 those of keys. The next column holds the length.
        let end = |start: usize| segments.chunks_exact(4).map(|r| r[start] + r[start + 1]).max().unwrap_or(0);
        let padded = Padded::of(&segments, [end(0), end(2)], None)?;
        Ok(padded.map(|padded| padded.to(table.device())).transpose()?.map(Rc::new))
    }

    /// Returns the same ranges, which share the tensors.
    pub fn shallow_clone(&self) -> Self {
        match self {
            Ranges::Packed(table) => Ranges::Packed(table.shallow_clone()),
            Ranges::Padded(padded) => Ranges::Padded(padded.clone()),
        }
    }
}

impl HostBatch for Ranges {
    /// Returns the tensors of the ranges, which must have no other owner.
    fn tensors(&mut self) -> Vec<&mut Tensor> {
        match self {
            Ranges::Packed(table) => vec![table],
            Ranges::Padded(padded) => Rc::get_mut(padded).expect("clones are made of ranges in use").tensors(),
        }
    }
}

/// Sentences side by side, each padded to the length of the longest, as torch's GPU kernels need them. All index
/// tensors are built on the host, once per batch. So no pass makes the host wait for the device.
#[derive(Debug)]
pub struct Padded {
    queries: Places,
    keys: Places,
    /// True where keys are real, bool (n, 1, 1, k_len).
    real: Tensor,
    /// True where queries are padding, bool (n·q_len, 1).
    gaps: Tensor,
    sentences: i64,
    q_len: i64,
    k_len: i64,
    /// True if every sentence has as many queries as keys.
    is_square: bool,
}

/// The places of packed rows among padded sentences.
#[derive(Debug)]
struct Places {
    /// The row that is copied to each place, (n·len); at padding, some real row.
    rows: Tensor,
    /// The place of each row, (rows); arbitrary for rows outside all sentences. Empty if several places hold the same
    /// row.
    places: Tensor,
    /// True at rows outside all sentences, bool (rows, 1).
    absent: Tensor,
}

impl Places {
    /// Computes the places of sentences given as ranges (start, length) of `row_count` rows, each padded to `longest`.
    fn of(ranges: &[[i64; 2]], row_count: i64, longest: i64) -> Result<Self> {
        // Padding gets copies of its sentence's first row.
        let rows: Vec<i64> = ranges
            .iter()
            .flat_map(|&[start, len]| (0..longest).map(move |i| start + if i < len { i } else { 0 }))
            .collect();
        let (mut places, mut absent, mut copies) = (vec![0; row_count as usize], vec![true; row_count as usize], 0);
        // Place i of a sentence has the number sentence·longest + i.
        for (sentence, &[start, len]) in (0..).zip(ranges) {
            for i in 0..len {
                places[(start + i) as usize] = sentence * longest + i;
                absent[(start + i) as usize] = false;
            }
            copies += len; // the number of places with real rows
        }
        // If sentences share rows, these rows have several places, so no list can give the place of each row.
        if copies > absent.iter().filter(|absent| !**absent).count() as i64 {
            places.clear();
        }
        Ok(Places {
            rows: Tensor::f_from_slice(&rows)?,
            places: Tensor::f_from_slice(&places)?,
            absent: Tensor::f_from_slice(&absent)?.f_reshape([-1, 1].as_slice())?,
        })
    }

    /// Copies packed rows to their places among padded sentences.
    fn fill(&self, packed: &Tensor) -> Result<Tensor> {
        match self.places.numel() {
            // Without `places`, several places share a row, so the gradient needs a sum.
            0 => Ok(packed.f_index_select(0, &self.rows)?),
            _ => gather(packed, &self.rows, &self.places, &self.absent),
        }
    }

    /// Returns the tensors that move to a device.
    fn tensors(&mut self) -> [&mut Tensor; 3] {
        [&mut self.rows, &mut self.places, &mut self.absent]
    }
}

impl HostBatch for Padded {
    /// Returns the tensors that move to a device.
    fn tensors(&mut self) -> Vec<&mut Tensor> {
        let Padded { queries, keys, real, gaps, .. } = self;
        queries.tensors().into_iter().chain(keys.tensors()).chain([real, gaps]).collect()
    }
}

impl Padded {
    /// Builds the places on the host from a flat list of (q_start, q_len, k_start, k_len), padded to the given shapes
    /// of queries and keys, or to the longest sentence. `row_counts` holds the numbers of query rows and of key rows.
    /// Returns `None` unless the ranges contain every query row once and in order, and every sentence has keys.
    fn of(table: &[i64], row_counts: [i64; 2], shapes: Option<(PaddedShape, PaddedShape)>) -> Result<Option<Self>> {
        // Each range is [q_start, q_len, k_start, k_len]; these are the columns of the two lengths.
        const Q_LEN: usize = 1;
        const K_LEN: usize = 3;
        let mut ranges: Vec<[i64; 4]> = table.chunks_exact(4).map(|r| [r[0], r[1], r[2], r[3]]).collect();
        // `in_order` is `None` unless each sentence's queries begin where those before it end.
        let in_order = ranges.iter().try_fold(0, |end, [start, len, ..]| (*start == end).then_some(end + len));
        let longest = |column: usize| ranges.iter().map(|r| r[column]).max().unwrap_or(0);
        let (q_len, k_len) = shapes.map_or((longest(Q_LEN), longest(K_LEN)), |(q, k)| (q.longest, k.longest));
        if in_order.is_none() || q_len == 0 || ranges.iter().any(|r| r[K_LEN] == 0) {
            return Ok(None);
        }
        let [q_rows, k_rows] = shapes.map_or(row_counts, |(q, k)| [q.rows, k.rows]);
        let is_square = ranges.iter().all(|r| r[Q_LEN] == r[K_LEN]);
        if let Some((query_shape, _)) = shapes {
            // The sentences that fill up the batch attend to one key, because a softmax over no keys is NaN. They
            // begin where real sentences begin, so that their padding copies rows that exist.
            let spare_range = |s: usize| {
                let [q_start, _, k_start, _] = ranges[s % ranges.len()];
                [q_start, 0, k_start, 1]
            };
            let spare: Vec<_> = (ranges.len()..query_shape.sentences as usize).map(spare_range).collect();
            ranges.extend(spare);
        }
        // Returns, for each sentence and each place up to `longest`, whether the place holds a real row. `column` is
        // that of the lengths in a range.
        let is_real = |longest: i64, column: usize| -> Result<Tensor> {
            let real: Vec<bool> = ranges.iter().flat_map(|r| (0..longest).map(move |i| i < r[column])).collect();
            Ok(Tensor::f_from_slice(&real)?)
        };
        let sentences = ranges.len() as i64;
        let queries: Vec<_> = ranges.iter().map(|&[q_start, q_len, ..]| [q_start, q_len]).collect();
        // Keys to which no query attends get no gradient, so they need no place.
        let read_keys = |&[_, q_len, k_start, k_len]: &[i64; 4]| [k_start, if q_len > 0 { k_len } else { 0 }];
        let keys: Vec<_> = ranges.iter().map(read_keys).collect();
        Ok(Some(Padded {
            queries: Places::of(&queries, q_rows, q_len)?,
            keys: Places::of(&keys, k_rows, k_len)?,
            real: is_real(k_len, K_LEN)?.f_reshape([sentences, 1, 1, k_len].as_slice())?,
            gaps: is_real(q_len, Q_LEN)?.f_logical_not()?.f_reshape([-1, 1].as_slice())?,
            sentences,
            q_len,
            k_len,
            is_square,
        }))
    }

    /// Copies packed queries to (n, q_len, …), and packed keys and values to (n, k_len, …). Padding gets the values
    /// of some real row.
    pub fn side_by_side(&self, [q, k, v]: [&Tensor; 3]) -> Result<[Tensor; 3]> {
        let fill = |t: &Tensor, places: &Places, len: i64| -> Result<Tensor> {
            Ok(places.fill(t)?.f_reshape([self.sentences, len, -1].as_slice())?)
        };
        Ok([fill(q, &self.queries, self.q_len)?, fill(k, &self.keys, self.k_len)?, fill(v, &self.keys, self.k_len)?])
    }

    /// Returns a mask that is true where keys are padding, bool (n, k_len). Returns `None` if sentences have as many
    /// queries as keys: then a causal mask hides the padding from every real query.
    pub fn absent_keys(&self) -> Result<Option<Tensor>> {
        let absent = || self.real.f_logical_not()?.f_reshape([self.sentences, self.k_len].as_slice());
        Ok((!self.is_square).then(absent).transpose()?)
    }

    /// Undoes [`side_by_side`](Self::side_by_side) for queries: copies padded rows, (n·q_len, …), back to packed rows.
    pub fn pack(&self, padded_rows: &Tensor) -> Result<Tensor> {
        // Each packed row comes from its place. Places at padding, `gaps`, are left out.
        gather(padded_rows, &self.queries.places, &self.queries.rows, &self.gaps)
    }

    /// Computes drop(softmax(scale·QKᵀ))V per sentence and head. Inputs and result are packed rows (rows, d).
    /// `causal` needs as many queries as keys in each sentence. `dropout` is (p, seed, site); its mask equals
    /// that of [`operator::attention`]. `extras` are a softcap and sinks. With extras or dropout, all scores are stored
    /// in memory.
    pub fn attention(
        &self,
        [q, k, v]: [&Tensor; 3],
        heads: i64,
        causal: bool,
        scale: f64,
        extras: &Extras,
        dropout: Option<(f64, &Tensor, i64)>,
    ) -> Result<Tensor> {
        // Splits rows into heads: (n, heads, len, d_head).
        let split = |t: &Tensor| t.f_unflatten(-1, [heads, -1].as_slice())?.f_transpose(1, 2);
        let [q, k, v] = self.side_by_side([q, k, v])?;
        let (q, k, v) = (split(&q)?, split(&k)?, split(&v)?);
        let out = match dropout {
            // A causal mask also hides padding keys, which come after the real ones.
            None if extras.are_none() => {
                let mask = (!causal).then_some(&self.real);
                operator::padded_attention([&q, &k, &v], mask, causal, scale)?
            }
            _ => self.weights(&q.f_matmul(&k.f_transpose(2, 3)?)?, causal, scale, extras, dropout)?.f_matmul(&v)?,
        };
        self.pack(&out.f_transpose(1, 2)?.f_reshape([self.sentences * self.q_len, -1].as_slice())?)
    }

    /// Returns a mask that is true where a real query attends to a real key, bool (n, 1, q_len, k_len).
    fn seen(&self, causal: bool) -> Result<Tensor> {
        let queries = self.gaps.f_logical_not()?.f_reshape([self.sentences, 1, self.q_len, 1].as_slice())?;
        let seen = self.real.f_logical_and(&queries)?;
        if !causal {
            return Ok(seen);
        }
        let past = Tensor::f_ones([self.q_len, self.k_len].as_slice(), (Kind::Bool, seen.device()))?.f_tril(0)?;
        Ok(seen.f_logical_and(&past)?)
    }

    /// Returns drop(softmax(scale·scores)) for scores (n, heads, q_len, k_len). `extras` are a softcap and sinks of
    /// this softmax. `dropout` is (p, seed, site). Dropout is applied to packed rows, so that its mask equals that of
    /// [`operator::attention`].
    fn weights(
        &self,
        scores: &Tensor,
        causal: bool,
        scale: f64,
        extras: &Extras,
        dropout: Option<(f64, &Tensor, i64)>,
    ) -> Result<Tensor> {
        // `hidden` is true where a query must not attend to a key. A causal mask also hides padding keys, which come
        // last.
        let hidden = match causal {
            true => {
                self.real.f_new_ones([self.q_len, self.k_len].as_slice(), (Kind::Bool, scores.device()))?.f_triu(1)?
            }
            false => self.real.f_logical_not()?,
        };
        let (kind, wide) = (scores.kind(), accumulation(scores.kind()));
        let weights = extras.softmax(&scores.f_to_kind(wide)?.f_mul_scalar(scale)?, &hidden)?;
        let Some((p, seed, site)) = dropout else { return Ok(weights.f_to_kind(kind)?) };
        // Heads and queries change places, so that one packed row holds all weights of a query.
        let weights = weights.f_transpose(1, 2)?;
        let [n, q_len, heads, k_len] = weights.size()[..] else { unreachable!("scores have four dimensions") };
        let packed = self.pack(&weights.f_reshape([n * q_len, heads * k_len].as_slice())?)?;
        // Weights are never negative, so the operator for ReLU with dropout only applies dropout.
        let packed = operator::relu_dropout(&packed.f_reshape([-1, k_len].as_slice())?, p, Some(seed), site)?;
        let padded = self.queries.fill(&packed.f_reshape([-1, heads * k_len].as_slice())?)?;
        let shape = [n, q_len, heads, k_len];
        Ok(padded.f_reshape(shape.as_slice())?.f_transpose(1, 2)?.f_to_kind(kind)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the output and, if asked for, the gradients of q, k and v.
    fn results(attend: impl Fn(&[Tensor]) -> Tensor, inputs: &[Tensor; 3], gradients: bool) -> Vec<Tensor> {
        let inputs = inputs.each_ref().map(|t| t.copy().set_requires_grad(gradients));
        let out = attend(&inputs);
        if !gradients {
            return vec![out];
        }
        let weights = Tensor::arange(out.numel() as i64, (Kind::Double, Device::Cpu)).sin().view_as(&out);
        (&out * weights).sum(Kind::Double).backward();
        [out].into_iter().chain(inputs.iter().map(Tensor::grad)).collect()
    }

    #[test]
    fn padded_attention_equals_the_packed_operator() {
        // Flat lists of (q_start, q_len, k_start, k_len).
        let itself = [0, 3, 0, 3, 3, 1, 3, 1, 4, 5, 4, 5];
        let other = [0, 3, 0, 2, 3, 1, 2, 6, 4, 5, 8, 1];
        let shared = [0, 1, 0, 4, 1, 1, 4, 3, 2, 1, 0, 4];
        let seed = Tensor::from_slice(&[7i64, 3, 1]);
        let gap = [0, 3, 1, 3, 3, 1, 4, 1, 4, 5, 7, 2]; // no query reads some of the keys
        let cases = [
            (itself, false, 9, 9),
            (itself, true, 9, 9),
            (other, false, 9, 9),
            (gap, false, 9, 11),
            (shared, false, 3, 7),
        ];
        for ((rows, causal, queries, keys), p) in cases.into_iter().flat_map(|case| [(case, 0.0), (case, 0.4)]) {
            let padded = Padded::of(&rows, [queries, keys], None).unwrap().unwrap();
            let Ranges::Packed(table) = Ranges::of(&rows, Device::Cpu).unwrap() else { panic!("not packed: {rows:?}") };
            let inputs = [queries, keys, keys].map(|rows| Tensor::randn([rows, 8], (Kind::Double, Device::Cpu)));
            // The operator's gradients are valid only if no two sentences share keys.
            let gradients = rows != shared;
            let dropout = (p > 0.0).then_some((p, &seed, 5));
            let sinks = Tensor::from_slice(&[0.3, -1.2]);
            let compare = |extras: &Extras, packed: &dyn Fn(&[Tensor]) -> Tensor| {
                let ours =
                    |t: &[Tensor]| padded.attention([&t[0], &t[1], &t[2]], 2, causal, 0.7, extras, dropout).unwrap();
                let (ours, packed) = (results(ours, &inputs, gradients), results(packed, &inputs, gradients));
                for (ours, packed) in ours.iter().zip(&packed) {
                    assert!((ours - packed).abs().max().double_value(&[]) < 1e-12, "{rows:?} {p} {extras:?}");
                }
            };
            compare(&Extras::NONE, &|t| {
                operator::attention(&t[0], &t[1], &t[2], &table, 2, causal, 0.7, p, Some(&seed), 5).unwrap()
            });
            let extras = Extras { softcap: Some(0.8), sinks: Some(&sinks) };
            compare(&extras, &|t| {
                let qkv = [&t[0], &t[1], &t[2]];
                operator::composed_attention(qkv, &table, 2, causal, 0.7, &extras, dropout).unwrap()
            });
        }
    }

    #[test]
    fn ranges_that_cannot_be_padded_are_left_to_the_operator() {
        for rows in [vec![], vec![0, 2, 0, 2, 3, 1, 3, 1], vec![0, 2, 0, 0]] {
            assert!(Padded::of(&rows, [4, 3], None).unwrap().is_none(), "{rows:?}");
        }
        let fitting = |causal| Ranges::fitting(&[0, 1, 0, 2], [1, 2], None, causal, Device::Mps).unwrap();
        assert!(matches!((fitting(false), fitting(true)), (Ranges::Padded(_), Ranges::Packed(_))));
    }
}
