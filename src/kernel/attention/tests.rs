//! Tests of the kernel against the definition, weight by weight in f64.

use super::*;
use crate::cpu::philox::Stream;
use crate::cpu::simd::{force, Level};
use half::{bf16, f16};

/// Returns a number in [−1, 1) that looks random and depends only on i.
fn noise(i: usize) -> f64 {
    ((i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as f64 / (1 << 23) as f64 - 1.0
}

/// A case whose queries, keys and values are slices of one projection of `stride` columns, as in training.
struct Case<E: Element> {
    attention: ScaledDotProduct,
    sequences: Vec<Sequence>,
    rows: usize,
    qkv: Vec<E>,
    dout: Vec<E>,
}

/// The outputs of both passes; `dqkv` has the shape of a case's `qkv`.
struct Outputs<E: Element> {
    out: Vec<E>,
    lse: Vec<E::Acc>,
    dqkv: Vec<E>,
}

/// The value of results before a pass, which stays in rows of no sequence.
const UNTOUCHED: f64 = 42.0;

impl<E: Element> Case<E> {
    /// Builds a case with sequences of (q_len, k_len), and a row between them that no sequence uses. `p` is dropout's
    /// rate; numbers lie in [−size, size).
    fn new(heads: usize, d_head: usize, lengths: &[(usize, usize)], causal: bool, p: f64, size: f64) -> Self {
        let mut rows = 1;
        let mut sequences = vec![];
        for &(q_len, k_len) in lengths {
            sequences.push(Sequence { q_start: rows, q_len, k_start: rows, k_len });
            rows += q_len.max(k_len) + 1;
        }
        let stream = Stream { seed: 11, update: 3, micro_batch: 1, site: 9 };
        let scale = 1.0 / (d_head as f64).sqrt();
        let attention = ScaledDotProduct { heads, d_head, scale, causal, dropout: Dropout::new(p, stream) };
        let width = heads * d_head;
        let random = |n, from| (0..n).map(|i| E::store(E::Acc::from_f64(size * noise(i + from)))).collect();
        Case { attention, sequences, rows, qkv: random(rows * 3 * width, 0), dout: random(rows * width, 7_000_000) }
    }

    fn width(&self) -> usize {
        self.attention.heads * self.attention.d_head
    }

    /// Runs the kernel's forward and backward passes.
    fn run(&self) -> Outputs<E> {
        let (a, s, width) = (&self.attention, &self.sequences[..], self.width());
        let [q, k, v] = [0, 1, 2].map(|i| Matrix { data: &self.qkv[i * width..], stride: 3 * width });
        let mark = E::Acc::from_f64(UNTOUCHED);
        let mut out = vec![E::store(mark); self.rows * width];
        let mut lse = vec![mark; self.rows * a.heads];
        let mut dqkv = vec![E::store(mark); self.rows * 3 * width];
        let lengths = (out.len(), lse.len(), dqkv.len());
        // SAFETY: the three vectors live to the end of this function, and nothing else uses them meanwhile.
        unsafe {
            let o = MatrixMut::new(out.as_mut_ptr(), lengths.0, width);
            forward(a, s, q, k, v, o, MatrixMut::new(lse.as_mut_ptr(), lengths.1, a.heads));
            let [dq, dk, dv] =
                [0, 1, 2].map(|i| MatrixMut::new(dqkv.as_mut_ptr().add(i * width), lengths.2 - i * width, 3 * width));
            let (dout, lse) = (Matrix { data: &self.dout, stride: width }, Matrix { data: &lse, stride: a.heads });
            backward(a, s, q, k, v, dout, lse, None, dq, dk, dv);
        }
        Outputs { out, lse, dqkv }
    }

    /// Computes all outputs from the definition, in f64, one weight at a time.
    fn naive(&self) -> Outputs<f64> {
        let a = &self.attention;
        let (d, width) = (a.d_head, self.width());
        // Returns column c of q, k or v (part 0, 1 or 2) in a row.
        let x = |row: usize, part: usize, c: usize| self.qkv[(row * 3 + part) * width + c].load().to_f64();
        let mut out = vec![UNTOUCHED; self.rows * width];
        let mut lse = vec![UNTOUCHED; self.rows * a.heads];
        let mut dqkv = vec![UNTOUCHED; self.rows * 3 * width];
        for s in &self.sequences {
            // Zeroes the columns of one part in a row of a matrix with `parts` parts.
            let clear = |matrix: &mut Vec<f64>, row: usize, part: usize, parts: usize| {
                matrix[(row * parts + part) * width..][..width].fill(0.0)
            };
            (s.q_start..s.q_start + s.q_len).for_each(|row| clear(&mut out, row, 0, 1));
            (s.q_start..s.q_start + s.q_len).for_each(|row| clear(&mut dqkv, row, 0, 3));
            for row in s.k_start..s.k_start + s.k_len {
                clear(&mut dqkv, row, 1, 3);
                clear(&mut dqkv, row, 2, 3);
            }
            for (i, h) in (0..s.q_len).flat_map(|i| (0..a.heads).map(move |h| (i, h))) {
                let (row, from) = (s.q_start + i, h * d);
                let visible = |j: &usize| !a.causal || *j as i64 <= i as i64 + s.k_len as i64 - s.q_len as i64;
                let keys: Vec<usize> = (0..s.k_len).filter(visible).collect();
                let dot = |j: usize| (from..from + d).map(|c| x(row, 0, c) * x(s.k_start + j, 1, c)).sum::<f64>();
                let scores: Vec<f64> = keys.iter().map(|j| a.scale * dot(*j)).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                lse[row * a.heads + h] = if keys.is_empty() { f64::NEG_INFINITY } else { max + sum.ln() };
                let mut random = philox::scratch(1, s.k_len);
                if let Some(dropout) = &a.dropout {
                    philox::fill(&dropout.stream, row * a.heads + h, 1, s.k_len, &mut random);
                }
                let factor = |j: usize| match &a.dropout {
                    Some(dropout) => (random[j] >= dropout.threshold) as u8 as f64 * dropout.scale,
                    None => 1.0,
                };
                let p: Vec<f64> = scores.iter().map(|s| (s - max).exp() / sum).collect();
                let dout = |c: usize| self.dout[row * width + c].load().to_f64();
                let dp: Vec<f64> = keys
                    .iter()
                    .map(|j| factor(*j) * (from..from + d).map(|c| dout(c) * x(s.k_start + j, 2, c)).sum::<f64>())
                    .collect();
                let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum(); // the formula's D
                for (n, &j) in keys.iter().enumerate() {
                    let (key, ds) = (s.k_start + j, p[n] * (dp[n] - mean));
                    for c in from..from + d {
                        out[row * width + c] += factor(j) * p[n] * x(key, 2, c);
                        dqkv[row * 3 * width + c] += a.scale * ds * x(key, 1, c);
                        dqkv[(key * 3 + 1) * width + c] += a.scale * ds * x(row, 0, c);
                        dqkv[(key * 3 + 2) * width + c] += factor(j) * p[n] * dout(c);
                    }
                }
            }
        }
        Outputs { out, lse, dqkv }
    }

    /// Compares the kernel with the definition; `unit` is the storage type's rounding.
    fn compare(&self, unit: f64, what: &str) {
        let acc = if size_of::<E::Acc>() == 8 { f64::EPSILON } else { f32::EPSILON as f64 };
        let (got, want) = (self.run(), self.naive());
        let largest = |x: &[f64]| x.iter().fold(1.0f64, |m, x| if *x == UNTOUCHED { m } else { m.max(x.abs()) });
        // A score has √d_head rounding errors of its own size, which the exponential passes on; sums over keys and
        // queries add the root of their number. All errors are relative to the largest value among the results of the
        // same kind.
        let longest = self.sequences.iter().map(|s| s.q_len.max(s.k_len)).max().unwrap_or(0);
        let score = self.qkv.iter().map(|x| x.load().to_f64().abs()).fold(0.0, f64::max).powi(2)
            * (self.attention.d_head as f64).sqrt();
        let steps = 4.0 * acc * (score + 8.0) * ((longest + self.attention.d_head) as f64).sqrt();
        let check = |got: &[E], want: &[f64], name: &str| {
            let size = largest(want);
            for (i, (got, want)) in got.iter().zip(want).enumerate() {
                let got = got.load().to_f64();
                let tolerance = unit * want.abs() + steps * size + if size_of::<E>() == 2 { 1e-7 } else { 0.0 };
                assert!((got - want).abs() <= tolerance, "{what}: {name}[{i}] {got} for {want}, {tolerance:e}");
            }
        };
        check(&got.out, &want.out, "out");
        check(&got.dqkv, &want.dqkv, "dqkv");
        for (got, want) in got.lse.iter().zip(&want.lse) {
            assert!(got.to_f64() == *want || (got.to_f64() - want).abs() <= steps, "{what}: log sum");
        }
    }
}

/// The (q_len, k_len) of sequences: short, long, and without queries or keys.
const LENGTHS: [(usize, usize); 9] = [(1, 1), (7, 7), (14, 9), (0, 3), (3, 0), (17, 33), (5, 31), (16, 16), (70, 40)];

/// Compares kernel and definition for many shapes on every level; `unit` is the storage type's rounding.
fn agree<E: Element>(unit: f64) {
    for level in Level::ALL {
        force(Some(level));
        for (heads, d_head) in [(1, 1), (2, 2), (2, 7), (4, 32), (3, 16), (1, 31), (1, 123)] {
            for (causal, p) in [(false, 0.0), (true, 0.0), (false, 0.3), (true, 0.3)] {
                let what = format!("{level:?} heads {heads} d_head {d_head} causal {causal} p {p}");
                Case::<E>::new(heads, d_head, &LENGTHS, causal, p, 1.0).compare(unit, &what);
            }
        }
    }
    force(None);
}

#[test]
fn agrees_with_the_definition_in_f32() {
    agree::<f32>(f32::EPSILON as f64);
}

#[test]
fn agrees_with_the_definition_in_f64() {
    agree::<f64>(f64::EPSILON);
}

#[test]
fn agrees_with_the_definition_in_bf16() {
    agree::<bf16>(2f64.powi(-8));
}

#[test]
fn agrees_with_the_definition_in_f16() {
    agree::<f16>(2f64.powi(-11));
}

#[test]
fn long_rows_go_through_in_blocks() {
    Case::<f32>::new(2, 8, &[(130, 700)], true, 0.1, 1.0).compare(f32::EPSILON as f64, "long");
}

#[test]
fn scores_of_any_size() {
    for size in [0.0, 1e-30, 30.0] {
        Case::<f64>::new(2, 16, &[(9, 9), (20, 20)], false, 0.0, size).compare(f64::EPSILON, "size");
    }
    let big = Case::<f32>::new(2, 16, &[(9, 9)], false, 0.0, 1e9).run();
    assert!(big.out.iter().chain(&big.dqkv).all(|x| x.is_finite()));
}

#[test]
fn gradients_are_those_of_the_forward() {
    // With a step along the gradient g itself, the central difference has error h²: f(x ± h·g) gives |g|².
    let mut c = Case::<f64>::new(2, 5, &[(6, 6), (4, 11), (8, 5)], true, 0.25, 1.0);
    let loss = |c: &Case<f64>| -> f64 {
        let rows = c.sequences.iter().flat_map(|s| s.q_start..s.q_start + s.q_len);
        let out = c.run().out;
        rows.map(|r| (0..c.width()).map(|i| out[r * c.width() + i] * c.dout[r * c.width() + i]).sum::<f64>()).sum()
    };
    let gradient: Vec<f64> = c.run().dqkv.iter().map(|g| if *g == UNTOUCHED { 0.0 } else { *g }).collect();
    let (x, h) = (c.qkv.clone(), 1e-5);
    let mut loss_at = |t: f64| {
        c.qkv = x.iter().zip(&gradient).map(|(x, g)| x + t * g).collect();
        loss(&c)
    };
    let slope = (loss_at(h) - loss_at(-h)) / (2.0 * h);
    let want: f64 = gradient.iter().map(|g| g * g).sum();
    assert!((slope / want - 1.0).abs() < 1e-6, "{slope} for {want}");
}

#[test]
fn any_split_of_the_sequences_gives_the_same() {
    let mut c = Case::<f32>::new(3, 24, &LENGTHS, true, 0.2, 1.0);
    let whole = c.run();
    let sequences = std::mem::take(&mut c.sequences);
    for s in sequences {
        c.sequences = vec![s];
        let (alone, width) = (c.run(), c.width());
        for row in s.q_start..s.q_start + s.q_len {
            assert_eq!(alone.out[row * width..][..width], whole.out[row * width..][..width]);
            assert_eq!(alone.dqkv[row * 3 * width..][..width], whole.dqkv[row * 3 * width..][..width]);
        }
    }
}

#[test]
#[should_panic(expected = "of the output")]
fn rows_beyond_the_output_are_refused() {
    let x = [0.0f32; 8];
    let (mut out, mut lse) = ([0.0f32; 3], [0.0f32; 4]);
    let m = Matrix { data: &x, stride: 2 };
    let a = ScaledDotProduct { heads: 1, d_head: 2, scale: 1.0, causal: false, dropout: None };
    // SAFETY: the vectors have these lengths, and nothing else uses them.
    let (o, l) = unsafe { (MatrixMut::new(out.as_mut_ptr(), 3, 2), MatrixMut::new(lse.as_mut_ptr(), 4, 1)) };
    forward(&a, &[Sequence { q_start: 0, q_len: 2, k_start: 0, k_len: 2 }], m, m, m, o, l);
}
