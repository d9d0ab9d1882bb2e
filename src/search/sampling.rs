//! The choice of a next token: temperature, then top-k, then top-p, then a draw (docs/spec.md §4.17).

use crate::config::GenerationOptions;
use crate::error::Result;
use std::cmp::Ordering;

/// The settings of the choice of a next token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// The number by which logits are divided. If it is 0, the most probable token is always chosen.
    temperature: f64,
    /// The number of most probable tokens that may be drawn; `None` means all.
    top_k: Option<usize>,
    /// The fewest most probable tokens whose probabilities together reach `top_p` may be drawn; 1 allows all.
    top_p: f64,
}

/// A token that may be drawn. `weight` is proportional to its probability.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Chance {
    token: usize,
    logit: f64,
    weight: f64,
}

impl Sampling {
    /// Builds the sampling from options.
    pub fn of(options: &GenerationOptions) -> Result<Self> {
        options.validate()?;
        let GenerationOptions { temperature, top_k, top_p, .. } = *options;
        Ok(Sampling { temperature, top_k: top_k.map(|k| k as usize), top_p })
    }

    /// Returns the id of the token that `uniform`, a random number in [0, 1), selects. There is one logit for each
    /// token, −∞ for forbidden ones; at least one must be finite.
    pub fn choose(&self, logits: &[f64], uniform: f64) -> usize {
        if self.temperature == 0.0 {
            return most_probable(logits);
        }
        let chances = self.chances(logits);
        let total: f64 = chances.iter().map(|chance| chance.weight).sum();
        // Take the first token at which the cumulative weight exceeds this share of the total.
        let mut sum = 0.0;
        for chance in &chances {
            sum += chance.weight;
            if sum > uniform * total {
                return chance.token;
            }
        }
        // Because of rounding, the sum of all weights may not exceed `uniform`·total; then the last token is chosen.
        chances.iter().rev().find(|chance| chance.weight > 0.0).map_or(most_probable(logits), |chance| chance.token)
    }

    /// Returns the tokens that may be drawn, after temperature, top-k and top-p. They are sorted if top-k or top-p
    /// has been applied.
    fn chances(&self, logits: &[f64]) -> Vec<Chance> {
        let best = logits[most_probable(logits)];
        // The largest logit is subtracted first, so that exp does not overflow.
        let chance =
            |(token, &logit): (usize, &f64)| Chance { token, logit, weight: ((logit - best) / self.temperature).exp() };
        let mut chances: Vec<Chance> = logits.iter().enumerate().map(chance).collect();
        if let Some(k) = self.top_k.filter(|k| *k < chances.len()) {
            sort_first(&mut chances, k);
            chances.truncate(k);
        }
        if self.top_p < 1.0 {
            self.keep_nucleus(&mut chances);
        }
        chances
    }

    /// Keeps the fewest most probable tokens that have at least the share `top_p` of the total weight.
    fn keep_nucleus(&self, chances: &mut Vec<Chance>) {
        let wanted = self.top_p * chances.iter().map(|chance| chance.weight).sum::<f64>();
        // Usually few tokens suffice, so tokens are sorted in blocks, and only as many blocks as are needed. The first
        // block has 64 tokens; each later one makes eight times as many sorted.
        let (mut sum, mut kept, mut sorted) = (0.0, 0, 0); // the weight of the first `kept` tokens; how many are sorted
        while kept < chances.len() && sum < wanted {
            if kept == sorted {
                let sorted_next = chances.len().min(64.max(8 * sorted));
                sort_first(&mut chances[sorted..], sorted_next - sorted);
                sorted = sorted_next;
            }
            sum += chances[kept].weight;
            kept += 1;
        }
        chances.truncate(kept.max(1)); // a tiny `top_p` still leaves the most probable token
    }
}

/// Moves the `count` most probable tokens to the front, in order.
fn sort_first(chances: &mut [Chance], count: usize) {
    if count < chances.len() {
        chances.select_nth_unstable_by(count, before);
    }
    chances[..count].sort_unstable_by(before);
}

/// Orders tokens by logit, the largest first. On ties the lower id comes first.
fn before(a: &Chance, b: &Chance) -> Ordering {
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.token.cmp(&b.token))
}

/// Returns the token with the largest logit. On ties it is the one with the lowest id.
fn most_probable(logits: &[f64]) -> usize {
    (1..logits.len()).fold(0, |best, token| if logits[token] > logits[best] { token } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::random::{Purpose, Random};

    /// The logit of a forbidden token.
    const NONE: f64 = f64::NEG_INFINITY;

    fn sampling(temperature: f64, top_k: Option<usize>, top_p: f64) -> Sampling {
        Sampling { temperature, top_k, top_p }
    }

    /// Returns the probabilities straight from the definition, by sorting all tokens.
    fn plain(logits: &[f64], Sampling { temperature, top_k, top_p }: &Sampling) -> Vec<f64> {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
        order.truncate(top_k.unwrap_or(logits.len()));
        // Returns the softmax over the kept tokens alone.
        let share = |kept: &[usize]| -> Vec<f64> {
            let weights: Vec<f64> =
                kept.iter().map(|&token| ((logits[token] - logits[kept[0]]) / temperature).exp()).collect();
            let total: f64 = weights.iter().sum();
            weights.iter().map(|weight| weight / total).collect()
        };
        let sums = share(&order).into_iter().scan(0.0, |sum, p| {
            *sum += p;
            Some(*sum)
        });
        let kept = 1 + sums.take_while(|sum| sum < top_p).count();
        order.truncate(kept.min(order.len()));
        let mut probabilities = vec![0.0; logits.len()];
        order.iter().zip(share(&order)).for_each(|(&token, p)| probabilities[token] = p);
        probabilities
    }

    /// Returns the probability with which `choose` selects each token.
    fn drawn(logits: &[f64], sampling: &Sampling) -> Vec<f64> {
        let chances = sampling.chances(logits);
        let total: f64 = chances.iter().map(|chance| chance.weight).sum();
        let mut probabilities = vec![0.0; logits.len()];
        chances.iter().for_each(|chance| probabilities[chance.token] = chance.weight / total);
        probabilities
    }

    /// Returns `count` random logits in [0, 8).
    fn logits(count: usize, seed: u64) -> Vec<f64> {
        let mut random = Random::new(seed, 0, 0, Purpose::NextToken);
        (0..count).map(|_| 8.0 * random.uniform()).collect()
    }

    #[test]
    fn probabilities_equal_the_definition() {
        for (seed, count) in [(1, 5), (2, 63), (3, 64), (4, 65), (5, 700), (6, 3000)] {
            let mut logits = logits(count, seed);
            logits[1] = NONE;
            logits[3] = logits[0];
            for temperature in [0.2, 1.0, 5.0] {
                for top_k in [None, Some(1), Some(2), Some(4), Some(100)] {
                    for top_p in [1e-9, 0.1, 0.5, 0.9, 0.999, 1.0] {
                        let sampling = sampling(temperature, top_k, top_p);
                        let (found, wanted) = (drawn(&logits, &sampling), plain(&logits, &sampling));
                        let far = found.iter().zip(&wanted).any(|(a, b)| (a - b).abs() > 1e-12);
                        assert!(!far, "{count} {sampling:?}: {found:?} {wanted:?}");
                        assert_eq!(found[1], 0.0);
                    }
                }
            }
        }
    }

    /// Returns Pearson's statistic of draws with `sampling` against the exact probabilities of `wanted`, and its
    /// degrees of freedom.
    fn statistic(sampling: &Sampling, wanted: &Sampling, logits: &[f64], draws: usize) -> (f64, usize) {
        let mut random = Random::new(20, 0, 0, Purpose::NextToken);
        let mut counts = vec![0usize; logits.len()];
        (0..draws).for_each(|_| counts[sampling.choose(logits, random.uniform())] += 1);
        let probabilities = plain(logits, wanted);
        let mut sum = 0.0;
        for (count, p) in counts.iter().zip(&probabilities) {
            let expected = p * draws as f64;
            sum += match expected > 0.0 {
                true => (*count as f64 - expected).powi(2) / expected,
                false => *count as f64 * 1e9, // a forbidden token was drawn
            };
        }
        (sum, probabilities.iter().filter(|p| **p > 0.0).count() - 1)
    }

    #[test]
    fn draws_have_the_distribution() {
        let logits: Vec<f64> = logits(30, 9).iter().map(|logit| logit / 2.0).collect();
        for sampling in [
            sampling(1.0, None, 1.0),
            sampling(0.7, None, 1.0),
            sampling(2.0, Some(8), 1.0),
            sampling(1.5, None, 0.8),
            sampling(1.5, Some(20), 0.9),
        ] {
            let (sum, freedom) = statistic(&sampling, &sampling, &logits, 200_000);
            // A chi-square variable has mean k and variance 2k. It exceeds its mean by four standard deviations less
            // than once in 10,000 times.
            let limit = freedom as f64 + 4.0 * (2.0 * freedom as f64).sqrt() + 4.0;
            assert!(freedom >= 5 && sum < limit, "{sampling:?}: {sum} of {freedom}");
            // A temperature that is wrong by a tenth must be detected.
            let wrong = Sampling { temperature: sampling.temperature * 1.1, ..sampling.clone() };
            let sum = statistic(&wrong, &sampling, &logits, 200_000).0;
            assert!(sum > limit, "{sampling:?}: {sum}");
        }
    }

    #[test]
    fn ends_of_the_unit_interval_and_ties() {
        let all = sampling(1.0, None, 1.0);
        let last = 1.0 - f64::EPSILON / 2.0; // the largest number below 1
        assert_eq!((all.choose(&[NONE, 0.0, 0.0, NONE], 0.0), all.choose(&[NONE, 0.0, 0.0, NONE], last)), (1, 2));
        assert_eq!(all.choose(&[NONE, 3.0, NONE], last), 1);
        let top_one = sampling(1.0, Some(1), 1.0);
        assert_eq!([0.0, 0.5, last].map(|u| top_one.choose(&[0.0, 2.0, 2.0], u)), [1; 3], "of equals the lower id");
        let top_two = sampling(1.0, Some(2), 1.0);
        assert_eq!(top_two.choose(&[5.0, -0.0, 0.0, 0.0], last), 1);
        let nucleus = sampling(1.0, None, 0.5);
        assert_eq!(nucleus.choose(&[0.0, 0.0], last), 0, "half of the probability is enough");
        let greedy = sampling(0.0, None, 1.0);
        assert_eq!(greedy.choose(&[NONE, 1.0, 4.0, 4.0], last), 2);
        assert_eq!(sampling(1e-300, None, 1.0).choose(&[1.0, 1.0 + 1e-9, 0.0], last), 1);
    }
}
