//! Tests of generation with tiny models in float64. The expected texts come from a loop over single texts that reads
//! every window from its start.

use super::*;
use crate::config::{from_json, TransformerConfig};
use std::collections::BTreeMap;
use tch::Device;

const V: i64 = 23;

/// Returns a mask that allows EOS and the ids 4 to 19.
fn allowed() -> Vec<bool> {
    (0..V).map(|id| id == EOS || (4..20).contains(&id)).collect()
}

/// Builds a model whose weights are a fixed sequence, so that it does not depend on other tests.
fn model(options: &str) -> Transformer {
    let small = r#""vocab_size": 23, "d_model": 16, "d_ff": 24, "heads": 2, "decoder_layers": 2"#;
    let text = format!(r#"{{"architecture": "decoder-only", {small}, {options}}}"#);
    let config: TransformerConfig = from_json("model", &text).unwrap();
    let drawn = Transformer::new(&config, 4, Device::Cpu, Kind::Double).unwrap();
    let mut start = 0.5;
    let mut weights: BTreeMap<String, Tensor> = drawn
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
    weights.extend(drawn.parameters.buffers().map(|(name, tensor)| (name.to_string(), tensor.shallow_clone())));
    Transformer::with_parameters(&config, &weights).unwrap()
}

/// Builds settings from JSON; `context` is the window's length.
fn config(options: &str, context: i64) -> GenerationConfig {
    GenerationConfig::of(&from_json("generation", options).unwrap(), context).unwrap()
}

/// Returns 50 prompts of 0 to 19 tokens.
fn prompts() -> Vec<Vec<i64>> {
    let token = |i: i64| if i % 11 == 7 { EOS } else { 4 + (i * 7919) % 16 };
    (0..50).map(|n| (0..n * 13 % 20).map(|i| token(n * 31 + i)).collect()).collect()
}

/// Returns the first sample of each prompt.
fn given(prompts: &[Vec<i64>]) -> Vec<Prompt<'_>> {
    prompts.iter().map(|tokens| Prompt { tokens, sample: 0 }).collect()
}

/// Generates texts with a cache, or by reading each window again at every step.
fn run(model: &Transformer, prompts: &[Prompt], config: &GenerationConfig, is_cached: bool) -> Vec<Generation> {
    let reader = &mut Reader::new(model, Kind::Double, is_cached);
    continue_texts(reader, prompts, Some(&allowed()), config, &mut |_, _, _| Ok(()), &mut || Ok(())).unwrap()
}

/// Generates as the definition says: one text at a time, with a pass over its whole window at every step.
fn plain(model: &Transformer, prompt: &Prompt, config: &GenerationConfig) -> Generation {
    let mut random = Random::new(config.seed, digest(prompt.tokens), prompt.sample, Purpose::NextToken);
    let (mut tokens, mut generated) = ([&[EOS], prompt.tokens].concat(), Generation::default());
    while generated.tokens.len() < config.max_length && !generated.finished {
        let (mut begin, step) = (0, (config.context / 2).max(1));
        while tokens.len() - begin > config.context {
            begin += step;
        }
        let read = Sentences::new(None, Packed::of(&[&tokens[begin..]]).unwrap(), Device::Cpu).unwrap();
        let features = model.features(&read, &Context::evaluation(Kind::Double)).unwrap();
        let last = model.logits(&features, Kind::Double).unwrap().select(0, -1);
        let mut logits = Vec::<f64>::try_from(last).unwrap();
        let allowed = allowed();
        logits.iter_mut().enumerate().filter(|(id, _)| !allowed[*id]).for_each(|(_, logit)| *logit = f64::NEG_INFINITY);
        let token = config.sampling.choose(&logits, random.uniform());
        let log_p = Vec::<f64>::try_from(Tensor::from_slice(&logits).log_softmax(-1, Kind::Double)).unwrap();
        generated.log_probability += log_p[token];
        generated.tokens.push(token as i64);
        tokens.push(token as i64);
        let ends = generated.tokens.iter().filter(|token| **token == EOS).count();
        generated.finished = ends == config.sentences && config.sentences > 0;
    }
    generated
}

/// Asserts that both have the same texts, with nearly equal probabilities.
fn same(found: &[Generation], wanted: &[Generation]) {
    assert_eq!(found.len(), wanted.len());
    for (a, b) in found.iter().zip(wanted) {
        assert_eq!((&a.tokens, a.finished), (&b.tokens, b.finished));
        assert!((a.log_probability - b.log_probability).abs() < 1e-9, "{} {}", a.log_probability, b.log_probability);
    }
}

#[test]
fn cached_equals_uncached_on_50_prompts() {
    let all = prompts();
    let model = model(r#""norm": "scalenorm", "residual": "prenorm""#);
    for (options, context) in [
        (r#"{"max_length": 30, "sentences": 3}"#, 64),
        (r#"{"max_length": 25, "sentences": 0, "temperature": 0}"#, 9),
        (r#"{"max_length": 25, "sentences": 0, "temperature": 0.8, "top_k": 6, "top_p": 0.95}"#, 8),
        (r#"{"max_length": 7, "sentences": 1}"#, 1),
    ] {
        let config = config(options, context);
        let wanted: Vec<Generation> = given(&all).iter().map(|prompt| plain(&model, prompt, &config)).collect();
        same(&run(&model, &given(&all), &config, true), &wanted);
        same(&run(&model, &given(&all), &config, false), &wanted);
        let lengths: std::collections::BTreeSet<usize> =
            wanted.iter().map(|generated| generated.tokens.len()).collect();
        assert!(config.sentences == 0 || lengths.len() > 3, "{lengths:?}");
    }
}

#[test]
fn cached_decoding_equals_whole_windows_for_every_scheme() {
    let all = prompts()[..6].to_vec();
    let config = config(r#"{"max_length": 12, "sentences": 0}"#, 7);
    for options in [
        r#""residual": "postnorm", "norm": "rmsnorm", "qk_norm": true"#,
        r#""residual": "dlcl""#,
        r#""residual": "mhc""#,
        r#""residual": "attnres""#,
        r#""residual": "attnres", "attnres_form": "normed", "attnres_queries": 3"#,
        r#""residual": "mhc", "mhc_mixing": "channel", "mhc_rank": 3"#,
        r#""residual": "hyper-connections""#,
        r#""residual": "resi-dual""#,
        r#""residual": "denseformer""#,
        r#""residual": "hybridnorm", "positions": "fairseq", "fixnorm": true"#,
        r#""residual": "branchnorm", "norm": "batchnorm", "output_bias": true"#,
        r#""output_gate": "head", "sinks": true, "logit_softcap": 1.5"#,
        r#""residual": "x0-lambdas", "value_embeddings": true, "smear": true, "positions": "rotary""#,
        r#""output_gate": "element", "score_softcap": 0.5, "v_norm": "weighted", "qk_norm": true, "qk_norm_scale": 2.0"#,
    ] {
        let model = model(options);
        let wanted: Vec<Generation> = given(&all).iter().map(|prompt| plain(&model, prompt, &config)).collect();
        same(&run(&model, &given(&all), &config, true), &wanted);
    }
}

#[test]
fn tensorized_attention_reads_windows_whole() {
    let model = model(r#""attention": "tensorized", "tensorized_rank": 3, "tensorized_segment": 6"#);
    let (all, config) = (prompts()[..8].to_vec(), config(r#"{"max_length": 9, "sentences": 0}"#, 6));
    let wanted: Vec<Generation> = given(&all).iter().map(|prompt| plain(&model, prompt, &config)).collect();
    let found = |config| {
        generate(&model, &given(&all), Some(&allowed()), config, Kind::Double, &mut |_, _, _| Ok(()), &mut || Ok(()))
    };
    same(&found(&config).unwrap(), &wanted);
    let e = found(&GenerationConfig { context: 7, ..config.clone() }).unwrap_err().to_string();
    assert!(e.contains("7 tokens in a row") && e.contains("tensorized_segment = 6"), "{e}");
}

/// A text depends neither on the other texts of its batch nor on their order.
#[test]
fn a_text_does_not_depend_on_the_batch() {
    let (all, model) = (prompts(), model(r#""residual": "prenorm""#));
    let config = config(r#"{"max_length": 20, "sentences": 2}"#, 11);
    let together = run(&model, &given(&all), &config, true);
    let alone: Vec<Generation> =
        given(&all).into_iter().flat_map(|prompt| run(&model, &[prompt], &config, true)).collect();
    same(&together, &alone);
    let mut turned = given(&all);
    turned.reverse();
    let mut found = run(&model, &turned, &config, true);
    found.reverse();
    same(&found, &together);
}

/// The batch has three samples of each prompt, not next to each other, and the windows move on.
#[test]
fn samples_share_the_pass_over_their_prompt() {
    let (all, model) = (prompts()[..9].to_vec(), model(r#""residual": "value-residual", "positions": "rotary""#));
    let sampled: Vec<Prompt> =
        (0..3).flat_map(|sample| all.iter().map(move |tokens| Prompt { tokens, sample })).collect();
    for (options, context) in [(r#"{"max_length": 12, "sentences": 2}"#, 64), (r#"{"max_length": 20}"#, 7)] {
        let config = config(options, context);
        let wanted: Vec<Generation> = sampled.iter().map(|prompt| plain(&model, prompt, &config)).collect();
        same(&run(&model, &sampled, &config, true), &wanted);
    }
    let config = config(r#"{"max_length": 1}"#, 64);
    let mut texts: Vec<PartialText> = sampled.iter().map(|prompt| PartialText::new(prompt, &config)).collect();
    let mut reader = Reader::new(&model, Kind::Double, true);
    assert_eq!(reader.next(&mut texts, &config).unwrap().unwrap().len(), 27);
    let read: usize = all.iter().map(|tokens| tokens.len() + 1).sum();
    assert_eq!(reader.cache.rows(), read, "each prompt is read once");
}

#[test]
fn draws_depend_on_seed_sample_and_prompt() {
    let model = model(r#""residual": "prenorm""#);
    let generated = |seed: u64, sample: u64, prompt: &[i64]| {
        let config = GenerationConfig { seed, ..config(r#"{"max_length": 30, "sentences": 0}"#, 64) };
        run(&model, &[Prompt { tokens: prompt, sample }], &config, true).remove(0).tokens
    };
    let first = generated(1, 0, &[5, 6]);
    assert_eq!(first, generated(1, 0, &[5, 6]));
    let all = [first, generated(2, 0, &[5, 6]), generated(1, 1, &[5, 6]), generated(1, 0, &[6, 5])];
    assert_eq!(std::collections::HashSet::from(all).len(), 4);
    assert_eq!(digest(&[5, 6]), digest(&[5, 6]));
    // The value is FNV-1a of eight zero bytes, computed in Python.
    assert_eq!(digest(&[0]), 0xa8c7_f832_281a_39c5);
}

#[test]
fn on_token_gets_each_token_and_may_stop_generation() {
    let (all, model) = (prompts()[..5].to_vec(), model(r#""residual": "prenorm""#));
    let config = config(r#"{"max_length": 10, "sentences": 1}"#, 64);
    let mut tokens_and_ends = vec![(Vec::new(), 0); 5];
    let mut on_token = |number: usize, token: i64, is_over: bool| {
        tokens_and_ends[number].0.push(token);
        tokens_and_ends[number].1 += usize::from(is_over);
        Ok(())
    };
    let texts = given(&all);
    let generated = generate(&model, &texts, None, &config, Kind::Double, &mut on_token, &mut || Ok(())).unwrap();
    assert_eq!(tokens_and_ends, generated.iter().map(|generated| (generated.tokens.clone(), 1)).collect::<Vec<_>>());
    assert!(generated.iter().all(|generated| generated.tokens.iter().all(|token| ![BOS, PAD].contains(token))));
    let stop = || Err(Error::Interrupted("stop".into()));
    let stopped = generate(&model, &texts, None, &config, Kind::Double, &mut |_, _, _| Ok(()), &mut || stop());
    assert!(matches!(stopped, Err(Error::Interrupted(_))));
    let stopped = generate(&model, &texts, None, &config, Kind::Double, &mut |_, _, _| stop(), &mut || Ok(()));
    assert!(matches!(stopped, Err(Error::Interrupted(_))));
}

#[test]
fn an_encoder_and_nan_are_errors() {
    let config = config("{}", 64);
    let error_of = |model: &Transformer| {
        let prompts = [Prompt { tokens: &[5], sample: 0 }];
        let generated = generate(model, &prompts, None, &config, Kind::Double, &mut |_, _, _| Ok(()), &mut || Ok(()));
        generated.unwrap_err().to_string()
    };
    let with_encoder = TransformerConfig { vocab_size: 9, d_model: 8, d_ff: 8, heads: 1, ..Default::default() };
    let with_encoder = Transformer::new(&with_encoder, 4, Device::Cpu, Kind::Double).unwrap();
    assert!(error_of(&with_encoder).contains("has an encoder: translate with it"));
    let model = model(r#""residual": "prenorm""#);
    tch::no_grad(|| drop(model.parameters.tensors()[0].shallow_clone().fill_(f64::NAN)));
    assert!(error_of(&model).contains("after 0 generated tokens of text 0 (from 0) are not numbers (NaN)"));
}

#[test]
fn windows_move_by_half_a_context() {
    for context in 1..12 {
        let config = config("{}", context);
        let windows: Vec<usize> = (1..60).map(|length| config.window(length)).collect();
        for (index, pair) in windows.windows(2).enumerate() {
            let (before, start, length) = (pair[0], pair[1], index + 2);
            assert!(start == before || start == before + config.stride());
            let read = length - start;
            assert!(
                (1..=context as usize).contains(&read) && (start == 0 || read > context as usize - config.stride())
            );
        }
    }
}
