//! The choice of the most probable next tokens of each slot, from logits on the model's device.

use super::SearchConfig;
use crate::config::SearchRule;
use crate::error::{Error, Result};
use crate::host::host;
use crate::kernel::view::accumulation;
use crate::model::{BOS, EOS, PAD};
use std::sync::Arc;
use tch::{Kind, Tensor};

/// A next token and its log-probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Continuation {
    pub token: i64,
    pub log_probability: f64,
}

/// Says whether EOS may, or must, be the next token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Eos {
    Forbidden,
    Allowed,
    /// No token but EOS may come next.
    Forced,
}

impl Eos {
    /// Returns the constraint on EOS as the next token, after `length` tokens. Only fairseq's rule forces EOS, when the
    /// next token is the last one allowed.
    pub fn at(length: usize, config: &SearchConfig) -> Self {
        match config.rule {
            _ if length == 0 => Eos::Forbidden,
            // This rule's limit does not depend on the source's length, so any length will do.
            SearchRule::Fairseq if length + 1 == config.limit(0) => Eos::Forced,
            _ => Eos::Allowed,
        }
    }
}

/// The target vocabulary V_t: the tokens that the model may predict.
pub(super) struct TargetVocabulary {
    /// 0 for tokens in V_t and −∞ for others, (V). It is added to logits; in libtorch an addition is six times as fast
    /// as masked_fill_.
    bias: Option<Tensor>,
    /// The ids of V_t, ascending; `None` if V_t = V.
    ids: Option<Arc<[i64]>>,
}

impl TargetVocabulary {
    /// Builds the vocabulary from a mask, bool (`size`), which is true at its tokens; `None` allows all. Errors if the
    /// mask has the wrong type or shape, or forbids EOS or all words.
    pub fn new(mask: Option<&Tensor>, size: i64) -> Result<Self> {
        let Some(mask) = mask else { return Ok(TargetVocabulary { bias: None, ids: None }) };
        if mask.kind() != Kind::Bool || mask.size() != [size] {
            return Err(Error::invalid(format!(
                "the target vocabulary's mask must be bool of shape [{size}], got {:?} of shape {:?}",
                mask.kind(),
                mask.size()
            )));
        }
        let allowed = host::<bool>("the target vocabulary's mask", mask)?;
        let is_word = |id: i64| ![BOS, PAD, EOS].contains(&id);
        if !allowed[EOS as usize] || !(0..size).any(|id| is_word(id) && allowed[id as usize]) {
            return Err(Error::invalid(
                "the target vocabulary's mask must allow EOS and at least one type besides EOS, PAD and BOS",
            ));
        }
        // The bias, which is added to logits, is 0 for allowed tokens and −∞ for others.
        let zeros = Tensor::f_zeros([size].as_slice(), (Kind::Float, mask.device()))?;
        let ids = (0..size).filter(|id| allowed[*id as usize]).collect();
        Ok(TargetVocabulary {
            bias: Some(zeros.f_masked_fill(&mask.f_logical_not()?, f64::NEG_INFINITY)?),
            ids: Some(ids),
        })
    }

    /// Returns the ids of V_t, ascending; `None` if V_t = V.
    pub fn ids(&self) -> Option<&[i64]> {
        self.ids.as_deref()
    }

    /// Returns this vocabulary for use in another thread.
    pub fn share(&self) -> Self {
        TargetVocabulary { bias: self.bias.as_ref().map(Tensor::shallow_clone), ids: self.ids.clone() }
    }

    /// Returns the log-softmax of logits (slots, V) over the target vocabulary. Tokens that may not come next get −∞
    /// after the softmax, so the other ones keep their probabilities.
    pub fn log_probabilities(&self, mut logits: Tensor, eos: Eos) -> Result<Tensor> {
        if let Some(bias) = &self.bias {
            logits = logits.f_add_(&bias.f_to_device(logits.device())?)?;
        }
        let kind = accumulation(logits.kind());
        let log_p = logits.f_log_softmax(-1, kind)?;
        // Sets `count` columns to −∞, from the token `first_id` on.
        let forbid = |first_id: i64, count: i64| -> Result<()> {
            let _ = log_p.f_narrow(1, first_id, count)?.f_fill_(f64::NEG_INFINITY)?;
            Ok(())
        };
        forbid(BOS, 1)?;
        forbid(PAD, 1)?;
        match eos {
            Eos::Allowed => {}
            Eos::Forbidden => forbid(EOS, 1)?,
            Eos::Forced => {
                forbid(0, EOS)?;
                forbid(EOS + 1, log_p.size()[1] - EOS - 1)?;
            }
        }
        Ok(log_p)
    }
}

/// Returns the `count` largest entries of each row of `log_p` (slots, V), best first. On ties the lower id comes
/// first.
pub(super) fn best(log_p: &Tensor, count: usize) -> Result<Vec<Vec<Continuation>>> {
    let vocab_size = log_p.size()[1];
    let count = count.min(vocab_size as usize);
    // One more entry than requested is fetched. If it equals the last requested one, topk has chosen arbitrarily among
    // equal entries.
    let fetched = vocab_size.min(count as i64 + 1);
    let (is_largest, is_sorted) = (true, true);
    let (values, tokens) = log_p.f_topk(fetched, 1, is_largest, is_sorted)?;
    let (values, tokens) = (host::<f64>("log p", &values)?, host::<i64>("tokens", &tokens)?);
    let continuations: Vec<Continuation> = tokens
        .into_iter()
        .zip(values)
        .map(|(token, log_probability)| Continuation { token, log_probability })
        .collect();
    let mut rows: Vec<Vec<Continuation>> = continuations.chunks_exact(fetched as usize).map(<[_]>::to_vec).collect();
    let is_tied = |row: &Vec<Continuation>| {
        let last = row[count - 1].log_probability;
        row.get(count).is_some_and(|left_out| left_out.log_probability == last && last > f64::NEG_INFINITY)
    };
    let tied: Vec<usize> = (0..rows.len()).filter(|&slot| is_tied(&rows[slot])).collect();
    // Tied rows get all entries that equal their last one or are larger; the sort below chooses among them.
    if !tied.is_empty() {
        let last = |slot: &usize| rows[*slot][count - 1].log_probability;
        let entries = at_least(log_p, &tied, &tied.iter().map(last).collect::<Vec<f64>>())?;
        tied.iter().for_each(|&slot| rows[slot].clear());
        entries.into_iter().for_each(|(slot, continuation)| rows[slot].push(continuation));
    }
    for row in &mut rows {
        row.sort_by(|a, b| b.log_probability.total_cmp(&a.log_probability).then(a.token.cmp(&b.token)));
        row.truncate(count);
    }
    Ok(rows)
}

/// Returns the entries of some `rows` of `log_p` (slots, V) that are large enough, each with its row. `least` holds the
/// smallest value that is large enough, one for each of `rows`.
fn at_least(log_p: &Tensor, rows: &[usize], least: &[f64]) -> Result<Vec<(usize, Continuation)>> {
    let device = log_p.device();
    let index: Vec<i64> = rows.iter().map(|&row| row as i64).collect();
    let log_p = log_p.f_index_select(0, &Tensor::f_from_slice(&index)?.f_to_device(device)?)?;
    let least = Tensor::f_from_slice(least)?.f_to_kind(log_p.kind())?.f_to_device(device)?.f_unsqueeze(1)?;
    let chosen = log_p.f_ge_tensor(&least)?;
    let values = host::<f64>("log p", &log_p.f_masked_select(&chosen)?)?;
    // Each place is a pair (row, token), in the order of masked_select.
    let places = host::<i64>("places", &chosen.f_nonzero()?)?;
    let entries = places.chunks_exact(2).zip(values).map(|(place, log_probability)| {
        let (row, token) = (rows[place[0] as usize], place[1]);
        (row, Continuation { token, log_probability })
    });
    Ok(entries.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    /// On ties the lower id comes first, even if only some of the equal entries are within the count.
    #[test]
    fn ties_go_to_the_lower_id() {
        let rows: [f32; 12] = [-1.0, -3.0, -1.0, -3.0, -3.0, -0.5, -2.0, -2.0, -2.0, -2.0, -2.0, -2.0];
        let log_p = Tensor::from_slice(&rows).reshape([2, 6]);
        let tokens = |count| -> Vec<Vec<i64>> {
            best(&log_p, count).unwrap().iter().map(|row| row.iter().map(|c| c.token).collect()).collect()
        };
        assert_eq!(tokens(1), [vec![5], vec![0]]);
        assert_eq!(tokens(2), [vec![5, 0], vec![0, 1]]);
        assert_eq!(tokens(4), [vec![5, 0, 2, 1], vec![0, 1, 2, 3]]);
        assert_eq!(tokens(9), [vec![5, 0, 2, 1, 3, 4], vec![0, 1, 2, 3, 4, 5]]);
    }

    #[test]
    fn nan_is_among_the_best() {
        let mut logits = vec![0.5f32; 3000];
        logits[1700] = f32::NAN;
        let vocabulary = TargetVocabulary::new(None, 1000).unwrap();
        let log_p = vocabulary.log_probabilities(Tensor::from_slice(&logits).reshape([3, 1000]), Eos::Allowed).unwrap();
        let has_nan: Vec<bool> =
            best(&log_p, 3).unwrap().iter().map(|row| row.iter().any(|c| c.log_probability.is_nan())).collect();
        assert_eq!(has_nan, [false, true, false]);
    }

    #[test]
    fn a_mask_must_fit_and_allow_eos_and_a_word() {
        let message =
            |flags: &[bool]| TargetVocabulary::new(Some(&Tensor::from_slice(flags)), 6).err().unwrap().to_string();
        assert!(message(&[true; 5]).contains("bool of shape [6], got Bool of shape [5]"));
        assert!(message(&[true, true, true, false, false, false]).contains("at least one type besides EOS"));
        assert!(message(&[false, false, false, true, true, true]).contains("must allow EOS"));
    }

    #[test]
    fn probabilities_add_up_to_one_within_the_mask() {
        let mask = Tensor::from_slice(&[false, false, true, true, false, true]);
        let vocabulary = TargetVocabulary::new(Some(&mask), 6).unwrap();
        let log_p = |eos| {
            let log_p =
                vocabulary.log_probabilities(Tensor::zeros([1, 6], (Kind::BFloat16, Device::Cpu)), eos).unwrap();
            Vec::<f32>::try_from(log_p.view(-1)).unwrap()
        };
        let (third, none) = (-(3f32.ln()), f32::NEG_INFINITY);
        assert_eq!(log_p(Eos::Allowed), [none, none, third, third, none, third]);
        assert_eq!(log_p(Eos::Forbidden), [none, none, none, third, none, third]);
        assert_eq!(log_p(Eos::Forced), [none, none, third, none, none, none]);
    }
}
