//! Who attends to whom in packed rows.

use super::packed::{Packed, Room};
use crate::error::{Error, Result};
use crate::operator::{self, Cargo};
use std::rc::Rc;
use tch::{Device, Kind, Tensor};

/// The sentences whose queries and keys meet.
#[derive(Debug)]
pub enum Ranges {
    /// int64 (n, 4): per sentence (q_start, q_len, k_start, k_len), as the attention operator takes it.
    Packed(Tensor),
    /// For torch's kernels on a GPU.
    Padded(Rc<Padded>),
}

impl Ranges {
    /// Each sentence of `queries` to the same sentence of `keys`; made on the host, for a device.
    pub fn between(queries: &Packed, keys: &Packed, device: Device) -> Result<Self> {
        if queries.sentences() != keys.sentences() {
            return Err(Error::invalid(format!(
                "source and target must have as many sentences, got {} and {}",
                keys.sentences(),
                queries.sentences()
            )));
        }
        let queries_of = queries.offsets.windows(2);
        let keys_of = keys.offsets.iter().zip(&keys.lengths);
        let rows: Vec<i64> = queries_of.zip(keys_of).flat_map(|(q, (k, n))| [q[0], q[1] - q[0], *k, *n]).collect();
        Ranges::fitting(&rows, queries.room.zip(keys.room), false, device)
    }

    /// Each sentence to its own past; padding, which comes after it, to the whole sentence.
    pub fn causal(sentences: &Packed, device: Device) -> Result<Self> {
        let mut rows = Vec::new();
        for (ends, &n) in sentences.offsets.windows(2).zip(&sentences.lengths) {
            rows.extend([ends[0], n, ends[0], n]);
            rows.extend((ends[0] + n..ends[1]).flat_map(|padding| [padding, 1, ends[0], n]));
        }
        Ranges::fitting(&rows, sentences.room.zip(sentences.room), true, device)
    }

    /// Of rows (q_start, q_len, k_start, k_len), flat, on a device.
    pub fn of(rows: &[i64], device: Device) -> Result<Self> {
        Ranges::fitting(rows, None, false, device)?.to(device)
    }

    fn fitting(rows: &[i64], rooms: Option<(Room, Room)>, causal: bool, device: Device) -> Result<Self> {
        if device != Device::Cpu || rooms.is_some() {
            if let Some(padded) = Padded::of(rows, rooms)?.filter(|padded| padded.is_square || !causal) {
                return Ok(Ranges::Padded(Rc::new(padded)));
            }
        }
        if rooms.is_some() {
            return Err(Error::invalid("a batch with an empty sentence cannot be filled up"));
        }
        Ok(Ranges::Packed(Tensor::f_from_slice(rows)?.f_reshape([-1, 4].as_slice())?))
    }

    pub fn shallow_clone(&self) -> Self {
        match self {
            Ranges::Packed(table) => Ranges::Packed(table.shallow_clone()),
            Ranges::Padded(padded) => Ranges::Padded(padded.clone()),
        }
    }
}

impl Cargo for Ranges {
    /// While nobody else holds them.
    fn tensors(&mut self) -> Vec<&mut Tensor> {
        match self {
            Ranges::Packed(table) => vec![table],
            Ranges::Padded(padded) => Rc::get_mut(padded).expect("clones are made of ranges in use").tensors(),
        }
    }
}

/// The sentences side by side, each filled up to the longest: what torch has kernels for on a GPU. All that it needs is
/// made on the host, once a batch, so that nobody waits for the device.
#[derive(Debug)]
pub struct Padded {
    /// The query row at each place, (n·q_len); any real one at padding.
    queries: Tensor,
    /// The same of keys, (n·k_len).
    keys: Tensor,
    /// bool (n, 1, 1, k_len): where keys are real.
    real: Tensor,
    /// The place of each query row; of rows that belong to no sentence, any.
    places: Tensor,
    sentences: i64,
    q_len: i64,
    k_len: i64,
    /// Every sentence has as many queries as keys.
    is_square: bool,
}

impl Padded {
    /// On the host, filling the rooms of queries and keys. None where the ranges do not hold every query row once, in
    /// order, or where one has no keys.
    fn of(rows: &[i64], rooms: Option<(Room, Room)>) -> Result<Option<Self>> {
        let mut ranges: Vec<[i64; 4]> = rows.chunks_exact(4).map(|r| [r[0], r[1], r[2], r[3]]).collect();
        let in_order = ranges.iter().try_fold(0, |end, [start, len, ..]| (*start == end).then_some(end + len));
        let longest = |column: usize| ranges.iter().map(|r| r[column]).max().unwrap_or(0);
        let (q_len, k_len) = rooms.map_or((longest(1), longest(3)), |(q, k)| (q.longest, k.longest));
        let Some(end) = in_order.filter(|_| q_len > 0 && ranges.iter().all(|r| r[3] > 0)) else { return Ok(None) };
        let is_square = ranges.iter().all(|r| r[1] == r[3]);
        let mut places: Vec<i64> =
            (0..).zip(&ranges).flat_map(|(s, r)| (0..r[1]).map(move |i| s * q_len + i)).collect();
        if let Some((queries, _)) = rooms {
            // Rows of no sentence read what those of sentences do, each another one's, because where many read one row
            // its gradient is gathered one by one; sentences that are not there look at one key, so that no softmax is
            // of nothing.
            places.extend((end..queries.rows).map(|row| places[(row % end) as usize]).collect::<Vec<_>>());
            let one = |s: usize| [ranges[s % ranges.len()][0], 0, ranges[s % ranges.len()][2], 1];
            let spare: Vec<_> = (ranges.len()..queries.sentences as usize).map(one).collect();
            ranges.extend(spare);
        }
        let filled = |start: usize, longest: i64| -> Result<Tensor> {
            let row = |r: &[i64; 4], i: i64| r[start] + if i < r[start + 1] { i } else { 0 };
            let all: Vec<i64> = ranges.iter().flat_map(|r| (0..longest).map(move |i| row(r, i))).collect();
            Ok(Tensor::f_from_slice(&all)?)
        };
        let real: Vec<bool> = ranges.iter().flat_map(|r| (0..k_len).map(move |i| i < r[3])).collect();
        let sentences = ranges.len() as i64;
        Ok(Some(Padded {
            queries: filled(0, q_len)?,
            keys: filled(2, k_len)?,
            real: Tensor::f_from_slice(&real)?.f_reshape([sentences, 1, 1, k_len].as_slice())?,
            places: Tensor::f_from_slice(&places)?,
            sentences,
            q_len,
            k_len,
            is_square,
        }))
    }

    fn tensors(&mut self) -> Vec<&mut Tensor> {
        let Padded { queries, keys, real, places, .. } = self;
        vec![queries, keys, real, places]
    }

    /// drop(softmax(scale·QKᵀ))V per sentence and head, of packed rows (rows, d) to packed rows; `causal` needs square
    /// ranges. `dropout`: (p, seed, site), of the packed operator's mask.
    pub fn attention(
        &self,
        [q, k, v]: [&Tensor; 3],
        heads: i64,
        causal: bool,
        scale: f64,
        dropout: Option<(f64, &Tensor, i64)>,
    ) -> Result<Tensor> {
        let split = |t: &Tensor, rows: &Tensor, len: i64| -> Result<Tensor> {
            let shape = [self.sentences, len, heads, -1];
            Ok(t.f_index_select(0, rows)?.f_reshape(shape.as_slice())?.f_transpose(1, 2)?)
        };
        let q = split(q, &self.queries, self.q_len)?;
        let (k, v) = (split(k, &self.keys, self.k_len)?, split(v, &self.keys, self.k_len)?);
        let out = match dropout {
            // A causal mask hides keys of padding too: it comes after the real ones.
            None => {
                let mask = (!causal).then_some(&self.real);
                Tensor::f_scaled_dot_product_attention(&q, &k, &v, mask, 0.0, causal, scale, false)?
            }
            Some(dropout) => self.dropped(&q.f_matmul(&k.f_transpose(2, 3)?)?, causal, scale, dropout)?.f_matmul(&v)?,
        };
        let rows = out.f_transpose(1, 2)?.f_reshape([self.sentences * self.q_len, -1].as_slice())?;
        Ok(rows.f_index_select(0, &self.places)?)
    }

    /// drop(softmax(scale·scores)), (n, heads, q_len, k_len), dropped as packed rows: so the mask is the operator's.
    fn dropped(
        &self,
        scores: &Tensor,
        causal: bool,
        scale: f64,
        (p, seed, site): (f64, &Tensor, i64),
    ) -> Result<Tensor> {
        let hidden = match causal {
            true => {
                self.real.f_new_ones([self.q_len, self.k_len].as_slice(), (Kind::Bool, scores.device()))?.f_triu(1)?
            }
            false => self.real.f_logical_not()?,
        };
        let (kind, wide) = (scores.kind(), if scores.kind() == Kind::Double { Kind::Double } else { Kind::Float });
        let scaled = scores.f_to_kind(wide)?.f_mul_scalar(scale)?.f_masked_fill(&hidden, f64::NEG_INFINITY)?;
        let weights = scaled.f_softmax(-1, None::<Kind>)?.f_transpose(1, 2)?;
        let [n, q_len, heads, k_len] = weights.size()[..] else { unreachable!("scores have four dimensions") };
        let packed = weights.f_reshape([n * q_len, heads * k_len].as_slice())?.f_index_select(0, &self.places)?;
        // Weights are not negative: of ReLU + dropout the dropout remains.
        let packed = operator::relu_dropout(&packed.f_reshape([-1, k_len].as_slice())?, p, Some(seed), site)?;
        let padded = packed.f_reshape([-1, heads * k_len].as_slice())?.f_index_select(0, &self.queries)?;
        let shape = [n, q_len, heads, k_len];
        Ok(padded.f_reshape(shape.as_slice())?.f_transpose(1, 2)?.f_to_kind(kind)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output and, if asked for, the gradients of q, k and v.
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
        let itself = [0, 3, 0, 3, 3, 1, 3, 1, 4, 5, 4, 5];
        let other = [0, 3, 0, 2, 3, 1, 2, 6, 4, 5, 8, 1];
        let shared = [0, 1, 0, 4, 1, 1, 4, 3, 2, 1, 0, 4];
        let seed = Tensor::from_slice(&[7i64, 3, 1]);
        let cases = [(itself, false, 9, 9), (itself, true, 9, 9), (other, false, 9, 9), (shared, false, 3, 7)];
        for ((rows, causal, queries, keys), p) in cases.into_iter().flat_map(|case| [(case, 0.0), (case, 0.4)]) {
            let padded = Padded::of(&rows, None).unwrap().unwrap();
            let Ranges::Packed(table) = Ranges::of(&rows, Device::Cpu).unwrap() else { panic!("not packed: {rows:?}") };
            let inputs = [queries, keys, keys].map(|rows| Tensor::randn([rows, 8], (Kind::Double, Device::Cpu)));
            // The operator's gradients want keys that no two sentences share.
            let gradients = rows != shared;
            let dropout = (p > 0.0).then_some((p, &seed, 5));
            let ours = |t: &[Tensor]| padded.attention([&t[0], &t[1], &t[2]], 2, causal, 0.7, dropout).unwrap();
            let packed = |t: &[Tensor]| {
                operator::attention(&t[0], &t[1], &t[2], &table, 2, causal, 0.7, p, Some(&seed), 5).unwrap()
            };
            for (ours, packed) in results(ours, &inputs, gradients).iter().zip(&results(packed, &inputs, gradients)) {
                assert!((ours - packed).abs().max().double_value(&[]) < 1e-12, "{rows:?} {p}");
            }
        }
    }

    #[test]
    fn ranges_that_cannot_be_padded_are_left_to_the_operator() {
        for rows in [vec![], vec![0, 2, 0, 2, 3, 1, 3, 1], vec![0, 2, 0, 0]] {
            assert!(Padded::of(&rows, None).unwrap().is_none(), "{rows:?}");
        }
        let fitting = |causal| Ranges::fitting(&[0, 1, 0, 2], None, causal, Device::Mps).unwrap();
        assert!(matches!((fitting(false), fitting(true)), (Ranges::Padded(_), Ranges::Packed(_))));
    }
}
