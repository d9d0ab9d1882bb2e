//! Tests of search with a tiny model in float64. The expected results come from decoding without a cache, which reads
//! every prefix from its start.

use super::*;
use crate::config::{Positions, TransformerConfig};
use crate::model::{Sentences, BOS, EOS, UNK};
use std::collections::BTreeMap;
use tch::Device;

const V: i64 = 12;
const SENTENCES: [&[i64]; 4] = [&[4, 7, 9, EOS], &[5, EOS], &[11, 4, 4, 8, 6, 10, EOS], &[UNK, 6, EOS]];

/// Builds a model whose weights are a fixed pseudo-random sequence, which begins at `offset`. Other offsets give other
/// models.
fn model(offset: f64) -> Transformer {
    let config = TransformerConfig {
        vocab_size: V,
        d_model: 16,
        d_ff: 24,
        heads: 2,
        encoder_layers: 2,
        decoder_layers: 2,
        positions: Positions::Twt,
        ..Default::default()
    };
    let drawn = Transformer::new(&config, 4, Device::Cpu, Kind::Double).unwrap();
    let mut start = offset;
    let weights: BTreeMap<String, Tensor> = drawn
        .parameters
        .iter()
        .map(|(name, tensor)| {
            let n = tensor.numel() as i64;
            // The fractional part of a large sine is a hash of its argument; less 1/2 it lies in [−0.5, 0.5).
            let noise = ((Tensor::arange(n, (Kind::Double, Device::Cpu)) + start) * 12.9898).sin() * 43.7585;
            start += n as f64;
            let uniform = &noise - noise.floor() - 0.5;
            let centre = if name.contains("norm") && name.ends_with("weight") { 1.0 } else { 0.0 };
            (name.to_string(), (uniform + centre).reshape(tensor.size()))
        })
        .collect();
    Transformer::with_parameters(&config, &weights).unwrap()
}

fn packed(sentences: &[&[i64]]) -> Packed {
    Packed::of(sentences).unwrap()
}

/// Returns a mask that allows all entries except PAD, BOS and 9 to 11.
fn mask() -> Tensor {
    Tensor::from_slice(&(0..V).map(|id| (EOS..9).contains(&id)).collect::<Vec<bool>>())
}

/// Translates sentences in one batch, in float64.
fn run(
    model: &Transformer,
    sentences: &[&[i64]],
    mask: Option<&Tensor>,
    config: &SearchConfig,
) -> Vec<Vec<Hypothesis>> {
    search(model, &packed(sentences), mask, config, Kind::Double, &mut || Ok(())).unwrap()
}

/// Returns log p of the token after a prefix, from a pass over the whole prefix. Only the mask forbids tokens.
fn uncached(model: &Transformer, source: &[i64], prefix: &[i64], mask: Option<&Tensor>) -> Vec<f64> {
    let ctx = Context::evaluation(Kind::Double);
    let target = packed(&[&[&[BOS], prefix].concat()]);
    let read = Sentences::new(Some(packed(&[source])), target, Device::Cpu).unwrap();
    let features = model.features(&read, &ctx).unwrap();
    let mut logits = model.logits(&features, Kind::Double).unwrap().select(0, -1).detach();
    if let Some(mask) = mask {
        logits = logits.masked_fill(&mask.logical_not(), f64::NEG_INFINITY);
    }
    Vec::try_from(logits.log_softmax(-1, Kind::Double)).unwrap()
}

/// Returns the tokens that a rule allows after a prefix: EOS is never the first one, and under fairseq's rule the only
/// one at the limit.
fn allowed(rule: SearchRule, prefix: &[i64], limit: usize) -> impl Iterator<Item = i64> {
    let (is_first, is_last) = (prefix.is_empty(), rule == SearchRule::Fairseq && prefix.len() + 1 == limit);
    (EOS..V).filter(move |&id| if id == EOS { !is_first } else { !is_last })
}

/// Translates each sentence by greedy search, as a beam search with one hypothesis.
fn greedy(
    model: &Transformer,
    source: &Packed,
    mask: Option<&Tensor>,
    rule: SearchRule,
    max_length: Option<usize>,
    kind: Kind,
) -> Result<Vec<Hypothesis>> {
    let config = SearchConfig { beam: 1, max_length, ..SearchConfig::new(rule) };
    Ok(search(model, source, mask, &config, kind, &mut || Ok(()))?.into_iter().flatten().collect())
}

/// Returns the tokens and log p of greedy search without a cache.
fn naive_greedy(
    model: &Transformer,
    source: &[i64],
    mask: Option<&Tensor>,
    rule: SearchRule,
    limit: usize,
) -> (Vec<i64>, f64) {
    let (mut tokens, mut total) = (vec![], 0.0);
    while tokens.len() < limit && tokens.last() != Some(&EOS) {
        let log_p = uncached(model, source, &tokens, mask);
        let best = allowed(rule, &tokens, limit)
            .reduce(|a, b| if log_p[b as usize] > log_p[a as usize] { b } else { a })
            .expect("something is always allowed");
        total += log_p[best as usize];
        tokens.push(best);
    }
    (tokens, total)
}

/// Returns the tokens of a hypothesis, and EOS if the hypothesis has ended.
fn with_eos(hypothesis: &Hypothesis) -> Vec<i64> {
    let mut tokens = hypothesis.tokens.clone();
    tokens.extend(hypothesis.finished.then_some(EOS));
    tokens
}

#[test]
fn a_beam_of_one_is_greedy() {
    // Google's limit is the source's length + 50. fairseq's is 200, which takes too long without a cache, so the test
    // sets a smaller one.
    let settings = [
        (SearchRule::Google, None),
        (SearchRule::Google, Some(1)),
        (SearchRule::Fairseq, Some(1)),
        (SearchRule::Fairseq, Some(9)),
    ];
    for (offset, mask) in [(0.0, None), (0.25, Some(mask()))] {
        let (model, mask) = (model(offset), mask.as_ref());
        for (rule, max_length) in settings {
            let found = greedy(&model, &packed(&SENTENCES), mask, rule, max_length, Kind::Double).unwrap();
            assert_eq!(found.len(), SENTENCES.len());
            for (source, hypothesis) in SENTENCES.iter().zip(found) {
                let (tokens, total) = naive_greedy(&model, source, mask, rule, rule.limit(source.len(), max_length));
                assert_eq!(with_eos(&hypothesis), tokens);
                assert!((hypothesis.log_probability - total).abs() < 1e-9);
            }
        }
    }
}

/// Sentences end at different steps, so slots move and their number falls. Each must still read its own tokens and
/// source.
#[test]
fn a_batch_is_its_sentences_and_the_cache_changes_nothing() {
    let (mut ended, mut lengths) = (0, std::collections::BTreeSet::new());
    for (rule, beam) in
        [(SearchRule::Google, 4), (SearchRule::Fairseq, 5), (SearchRule::Google, 3), (SearchRule::Fairseq, 2)]
    {
        for (offset, mask) in [(0.0, None), (0.25, Some(mask())), (0.5, None)] {
            let (model, mask) = (model(offset), mask.as_ref());
            let config = SearchConfig { beam, n_best: beam, max_length: Some(20), ..SearchConfig::new(rule) };
            let together = run(&model, &SENTENCES, mask, &config);
            for (source, batch) in SENTENCES.iter().zip(&together) {
                let alone = &run(&model, &[source], mask, &config)[0];
                assert_eq!(batch.len(), alone.len());
                for (a, b) in batch.iter().zip(alone) {
                    assert_eq!((&a.tokens, a.finished), (&b.tokens, b.finished));
                    assert!((a.score - b.score).abs() < 1e-9);
                    let tokens = with_eos(a);
                    let total: f64 = (0..tokens.len())
                        .map(|t| uncached(&model, source, &tokens[..t], mask)[tokens[t] as usize])
                        .sum();
                    assert!((a.log_probability - total).abs() < 1e-9, "{} {total}", a.log_probability);
                    assert!((a.score - total / rule.penalty(tokens.len(), config.alpha)).abs() < 1e-9);
                    ended += usize::from(a.finished);
                    lengths.insert(tokens.len());
                }
                assert!(batch.is_sorted_by(|a, b| a.score >= b.score));
            }
        }
    }
    assert!(
        ended > 20 && lengths.len() > 4,
        "the models are too simple for this test: {ended} ended, {lengths:?} long"
    );
}

#[test]
fn n_best_is_a_prefix_of_all_hypotheses() {
    let model = model(0.0);
    for rule in [SearchRule::Google, SearchRule::Fairseq] {
        let config = SearchConfig { beam: 5, n_best: 5, ..SearchConfig::new(rule) };
        let all = run(&model, &SENTENCES, None, &config);
        let two = run(&model, &SENTENCES, None, &SearchConfig { n_best: 2, ..config });
        for (all, two) in all.iter().zip(&two) {
            assert_eq!((all.len(), &all[..2]), (5, two.as_slice()));
        }
    }
}

/// Returns every sequence that the rules allow, with its log p; finds them by recursion.
fn exhaust(
    model: &Transformer,
    mask: &Tensor,
    rule: SearchRule,
    limit: usize,
    prefix: &[i64],
    total: f64,
    all: &mut Vec<(Vec<i64>, f64)>,
) {
    if prefix.last() == Some(&EOS) || prefix.len() == limit {
        return all.push((prefix.to_vec(), total));
    }
    let log_p = uncached(model, SENTENCES[0], prefix, Some(mask));
    for token in allowed(rule, prefix, limit).filter(|&token| log_p[token as usize] > f64::NEG_INFINITY) {
        exhaust(model, mask, rule, limit, &[prefix, &[token]].concat(), total + log_p[token as usize], all);
    }
}

#[test]
fn a_beam_of_all_sequences_finds_the_best() {
    for (rule, max_length) in [(SearchRule::Google, 3), (SearchRule::Fairseq, 2)] {
        for offset in [0.0, 0.25] {
            let model = model(offset);
            let mut all = Vec::new();
            exhaust(&model, &mask(), rule, 3, &[], 0.0, &mut all);
            let config = SearchConfig { beam: all.len(), n_best: all.len(), ..SearchConfig::new(rule) };
            let config = SearchConfig { max_length: Some(max_length), ..config };
            let score = |(tokens, total): &(Vec<i64>, f64)| total / rule.penalty(tokens.len(), config.alpha);
            all.sort_by(|a, b| score(b).total_cmp(&score(a)));
            // There are 6 words. The sequences are one word and EOS, two words and EOS, and under google's rule three
            // words without EOS.
            assert_eq!(all.len(), if rule == SearchRule::Google { 6 + 36 + 216 } else { 6 + 36 });
            let found = &run(&model, &SENTENCES[..1], Some(&mask()), &config)[0];
            assert_eq!(
                found.iter().map(with_eos).collect::<Vec<_>>(),
                all.iter().map(|(t, _)| t.clone()).collect::<Vec<_>>()
            );
        }
    }
}

/// All logits are equal, so every choice is a tie.
#[test]
fn ties_go_to_the_better_hypothesis_then_to_the_lower_id() {
    let model = model(0.0);
    tch::no_grad(|| model.parameters.tensors().iter().for_each(|t| drop(t.shallow_clone().zero_())));
    let config =
        |rule, max_length| SearchConfig { beam: 3, n_best: 3, max_length: Some(max_length), ..SearchConfig::new(rule) };
    let found = |config| run(&model, &SENTENCES[..2], None, &config)[1].iter().map(with_eos).collect::<Vec<_>>();
    // Longer sequences are less probable, but the length penalty with α = 1 makes their scores equal.
    assert_eq!(found(config(SearchRule::Fairseq, 2)), [vec![3, EOS], vec![3, 3, EOS], vec![3, 4, EOS]]);
    assert_eq!(found(config(SearchRule::Google, 2)), [vec![3, EOS], vec![3, 3], vec![3, 4]]);
}

#[test]
fn nan_is_an_error_that_says_where() {
    let model = model(0.0);
    tch::no_grad(|| drop(model.parameters.tensors()[0].shallow_clone().fill_(f64::NAN)));
    let config = SearchConfig::default();
    let e = search(&model, &packed(&SENTENCES), None, &config, Kind::Double, &mut || Ok(())).unwrap_err().to_string();
    assert!(e.contains("after 0 generated tokens of sentence 0") && e.contains("NaN"), "{e}");
}

#[test]
fn no_sentences_and_wrong_settings() {
    let model = model(0.0);
    let right = SearchConfig::default();
    assert!(run(&model, &[], None, &right).is_empty());
    for (config, says) in [
        (SearchConfig { beam: 0, ..right.clone() }, "beam must be at least 1, got 0"),
        (SearchConfig { n_best: 5, ..right.clone() }, "n_best must lie between 1 and the beam, 4; got 5"),
        (SearchConfig { n_best: 0, ..right.clone() }, "got 0"),
        (SearchConfig { alpha: f64::NAN, ..right.clone() }, "alpha must lie in [-10, 10], got NaN"),
        (SearchConfig { alpha: 1e6, ..right.clone() }, "alpha must lie in [-10, 10], got 1000000"),
        (SearchConfig { max_length: Some(0), ..right.clone() }, "max_length must be at least 1"),
    ] {
        let e =
            search(&model, &packed(&SENTENCES), None, &config, Kind::Double, &mut || Ok(())).unwrap_err().to_string();
        assert!(e.contains(says), "{e}");
    }
}
