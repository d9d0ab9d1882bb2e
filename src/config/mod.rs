//! The options of a model and of a training run. Each configuration is declared once, by `config!`. This declaration
//! yields the Rust struct, the keys of a TOML file, Python's keyword arguments and the command line's flags, with
//! documentation, defaults and choices.

mod attention;
mod check;
mod generation;
mod names;
mod parametrisation;
mod positions;
pub mod resume;

pub use generation::GenerationOptions;
pub use names::{InitName, NormName, ParametrisationName, Residual};
pub use positions::Longest;

use crate::choice;
use crate::data::vocabulary;
use crate::error::{Error, Result};
use crate::metrics::Tokenize;
use crate::options::{config, unknown_field, AnyOption, Field, FieldType, Options};
use crate::parametrisation::AttentionScale;
use crate::residual::{Activation, NormOver, OutputGate, ValueNorm};
use crate::{init, norm, residual};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

choice! {
    pub enum Architecture ("architecture") { EncoderDecoder = "encoder-decoder", DecoderOnly = "decoder-only" }
}
choice! {
    /// Positions of docs/spec.md §4.2. For sinusoids, `twt` interleaves sines and cosines and counts from 0; `fairseq`
    /// has sines in one half, cosines in the other, and counts from padding_idx + 1.
    pub enum Positions ("positions") {
        Twt = "twt",
        Fairseq = "fairseq",
        Learned = "learned",
        Rotary = "rotary",
        None = "none",
    }
}
choice! {
    /// The decoder's first token: BOS in the release of Nguyen & Salazar 2019, EOS in fairseq.
    pub enum DecoderStart ("decoder_start") { Bos = "bos", Eos = "eos" }
}

impl DecoderStart {
    /// Returns the token's id, which is the same in every vocabulary.
    pub fn id(self) -> i64 {
        match self {
            DecoderStart::Bos => vocabulary::BOS.into(),
            DecoderStart::Eos => vocabulary::EOS.into(),
        }
    }
}
choice! {
    /// The embeddings that share one table: source, target and output; target and output; or none.
    pub enum Ties ("tie_embeddings") { All = "all", Decoder = "decoder", None = "none" }
}
choice! {
    /// The self-attention of a stack: softmax heads, or tensorized attention (docs/spec.md §4.4).
    pub enum AttentionName ("attention") { MultiHead = "multi-head", Tensorized = "tensorized" }
}
choice! {
    /// The rule that ranks hypotheses and ends a search.
    pub enum SearchRule ("rule") {
        /// Score/((5 + len)/6)^α; finished hypotheses compete with unfinished ones.
        Google = "google",
        /// Score/len^α; finished hypotheses leave the beam.
        Fairseq = "fairseq",
    }
}
choice! {
    /// The formula of label smoothing.
    pub enum SmoothingName ("smoothing") { Fairseq = "fairseq", Twt = "twt" }
}
choice! {
    pub enum Precision ("precision") { F32 = "f32", Bf16 = "bf16" }
}
choice! {
    /// The term to which Adam adds ε: √v (fairseq's form), or √v/√(1−β₂ᵗ) (Kingma & Ba's algorithm 1, torch's form).
    pub enum AdamForm ("adam_form") { Fairseq = "fairseq", Torch = "torch" }
}
choice! {
    /// Adam for all parameters, or another rule for some or all of them (docs/spec.md §4.9).
    pub enum OptimizerName ("optimizer") {
        Adam = "adam",
        Muon = "muon",
        Normuon = "normuon",
        Lion = "lion",
    }
}
choice! {
    /// The factor of an orthogonal matrix of r rows and c columns: 0.2·√max(r, c) (rms), or √max(1, r/c) (spectral).
    pub enum MuonScale ("muon_scale") { Rms = "rms", Spectral = "spectral" }
}
choice! {
    /// When the schedules val-decay and no-warmup lower the rate: as the authors' release does, or as their paper says.
    pub enum DecayRule ("lr_decay_rule") { Release = "release", Paper = "paper" }
}
choice! {
    /// The parameters that weight decay shrinks.
    pub enum DecayOf ("weight_decay_of") { Matrices = "matrices", All = "all" }
}
choice! {
    pub enum ScheduleName ("schedule") {
        InverseSqrt = "inverse-sqrt",
        ValDecay = "val-decay",
        NoWarmup = "no-warmup",
        TFixup = "t-fixup",
        Constant = "constant",
        /// Falls until the end of the run, as half a period of a cosine.
        Cosine = "cosine",
        /// Falls linearly until the end of the run.
        Linear = "linear",
        /// Warm-up, stable, decay: constant, then falls linearly over the last part of the run.
        Wsd = "wsd",
    }
}
impl ScheduleName {
    /// True if this schedule lowers the rate until the last update of the run.
    pub fn falls_to_the_end(self) -> bool {
        matches!(self, ScheduleName::Cosine | ScheduleName::Linear | ScheduleName::Wsd)
    }
}
choice! {
    /// The measure that selects the best checkpoint and decides when to stop.
    pub enum Criterion ("criterion") { Bleu = "bleu", Loss = "loss" }
}

config! {
    /// The options of a Transformer (docs/spec.md §1 to §4).
    pub struct TransformerConfig with options {
        "model" {
            /// encoder-decoder for translation, decoder-only for language modelling.
            architecture: Architecture = Architecture::EncoderDecoder,
            /// Number of entries in the joint vocabulary, special ones included.
            vocab_size: i64 = 0,
            /// Width of the model.
            d_model: i64 = 512,
            /// Width inside the feed-forward sublayers.
            d_ff: i64 = 2048,
            /// Attention heads; must divide d_model.
            heads: i64 = 8,
            /// Heads of keys and values; must divide heads, and heads/kv_heads query heads share one (grouped-query
            /// attention, Ainslie et al. 2023); default: heads.
            kv_heads: Option<i64> = None,
            /// Attention of a language model: multi-head, or tensorized (Ma et al. 2019), which reads segments of
            /// limited length.
            attention: AttentionName = AttentionName::MultiHead,
            /// Rank R of tensorized attention's one block.
            tensorized_rank: i64 = 40,
            /// T of tensorized attention, the maximum number of tokens that it reads at a time; its output projection
            /// is (d_model, T²).
            tensorized_segment: i64 = 32,
            /// Multiply the heads' outputs, before the output projection, by the sigmoid of a linear layer of
            /// attention's input: one number per head, or one per element (Qiu et al. 2025); default: no gate.
            output_gate: Option<OutputGate> = None,
            /// Give each head one more learned logit in its softmax, which belongs to no value (gpt-oss).
            sinks: bool = false,
            /// Replace attention's scores s by c·tanh(s/c) before the softmax (Gemma 2); default: no cap.
            score_softcap: Option<f64> = None,
            /// Value embeddings (nanochat): every second layer, counted back from the last, adds to its values the token's
            /// row of its own table, times a gate for each head of values: 3σ(Wx), x the first 12 columns of attention's
            /// input.
            value_embeddings: bool = false,
            /// Add to each embedding that of the token before, times λσ(w·x), x the first 24 columns of the embedding; λ is
            /// 0 at the start (nanochat).
            smear: bool = false,
            /// Activation between a feed-forward's matrices; swiglu and geglu have a third matrix (Shazeer 2020).
            activation: Activation = Activation::Relu,
            /// Give linear layers biases.
            linear_biases: bool = true,
            /// Number of encoder layers.
            encoder_layers: i64 = 6,
            /// Number of decoder layers.
            decoder_layers: i64 = 6,
        }
        "norm and residual" {
            /// The norm.
            norm: NormName = NormName::parse("layernorm").expect("the table has it"),
            /// The encoder's norm, if it differs from `norm`.
            encoder_norm: Option<NormName> = None,
            /// The decoder's norm, if it differs from `norm`.
            decoder_norm: Option<NormName> = None,
        } + norm::option_specs
        "norm and residual" {
            /// Residual scheme: where norms stand and how residuals are added. postnorm*3,prenorm means postnorm in a
            /// stack's first three layers and prenorm in the others; postnorm*1/4,prenorm means postnorm in its first
            /// quarter.
            residual: Residual = Residual::parse("prenorm").expect("the table has it"),
            /// Normalise the queries and keys of every head before their products (QK-norm), with the stack's norm,
            /// which must work row by row.
            qk_norm: bool = false,
            /// Rows that qk_norm normalises: each head's (head), or all heads' joined (all-heads; OLMo 2).
            qk_norm_over: NormOver = NormOver::Head,
            /// Apply qk_norm after the rotation of rotary positions, not before it (nanochat, Hunyuan).
            qk_norm_after_rotation: bool = false,
            /// Learn a weight in qk_norm; only rmsnorm works without one.
            qk_norm_weight: bool = true,
            /// Factor by which normed queries and normed keys are multiplied.
            qk_norm_scale: f64 = 1.0,
            /// A norm on each head's values: the stack's norm, weighted or, for rmsnorm, unweighted (Gemma 4); default:
            /// no norm.
            v_norm: Option<ValueNorm> = None,
            /// Scale queries and keys to length 1 (Henry et al. 2020). Each attention learns one factor of their
            /// products, initially log2(L² − L), instead of 1/√d_head, where this option is L, a length that few
            /// sentences exceed; default: off.
            qk_l2norm: Option<i64> = None,
            /// The initialisation (default: the one that goes with the residual scheme).
            init: Option<InitName> = None,
        } + residual::option_specs + init::option_specs
        "norm and residual" {
            /// Normalise word embeddings to unit length at the input and, if tied, at the output (FixNorm).
            fixnorm: bool = false,
        }
        "parametrisation" {
            /// Rule that scales init, forward pass, learning rate, weight decay and Adam's ε with width and depth.
            parametrisation: ParametrisationName = ParametrisationName("standard".into()),
            /// d_model of the base model, for which learning rate etc. were tuned: m_d = d_model/base_width.
            base_width: Option<i64> = None,
            /// Number of layers in each of the base model's stacks: m_L = layers/base_depth, for each stack.
            base_depth: Option<i64> = None,
            /// α of depth-mup and completep, from 0.5 to 1: branches are multiplied by m_L^(−α); default: the
            /// parametrisation's own.
            depth_alpha: Option<f64> = None,
            /// α_in, the factor of embeddings with their positions (Granite's embedding_multiplier).
            input_alpha: f64 = 1.0,
            /// α_out, the factor of logits, before their bias (1/logits_scaling of Granite, α_loss-softmax of u-mup).
            output_alpha: f64 = 1.0,
            /// Factor of every F(x) (Granite's residual_multiplier).
            residual_multiplier: f64 = 1.0,
            /// Factor of attention's scores as a number, instead of attention_scale (Granite).
            attention_multiplier: Option<f64> = None,
            /// Factor of attention's scores: 1/d_head (inverse) or 1/√d_head (inverse-sqrt); default: the
            /// parametrisation's own.
            attention_scale: Option<AttentionScale> = None,
            /// Tokens in a training sequence, from which u-mup takes the factor of attention's output; usually
            /// segment_length.
            attention_length: Option<i64> = None,
            /// α_attn-softmax of u-mup, the factor of attention's scores beside 1/d_head.
            attn_softmax_alpha: f64 = 1.0,
            /// α_ffn-act of u-mup, the factor of the input of silu's sigmoid.
            ffn_act_alpha: f64 = 1.0,
            /// α_res of u-mup, the size of all branches relative to the embedding.
            res_alpha: f64 = 1.0,
            /// α_res-attn-ratio of u-mup, the size of attention's branches relative to the feed-forwards'.
            res_attn_ratio: f64 = 1.0,
        }
        "model" {
            /// Positions: sinusoids (twt and fairseq, two layouts), a learned table, rotary ones on queries and keys of
            /// self-attention (Su et al. 2021), or none.
            positions: Positions = Positions::Twt,
            /// Number of learned positions, the maximum number of tokens in a sentence.
            max_positions: i64 = 1024,
            /// Base of rotary positions.
            rope_theta: f64 = 10000.0,
            /// Multiply word embeddings by √d_model.
            scale_embeddings: bool = true,
            /// The decoder's first token: bos, or eos as in fairseq.
            decoder_start: DecoderStart = DecoderStart::Bos,
            /// Embeddings that share one table: source, target and output (all), target and output (decoder), or none.
            tie_embeddings: Ties = Ties::All,
            /// Add a bias to the logits.
            output_bias: bool = false,
            /// Multiply each word's logit by a learned factor √d·s, s = 1/√d at the start (nGPT's s_z).
            logit_scale: bool = false,
            /// Replace logits z by c·tanh(z/c), in training, evaluation and decoding (Gemma 2); default: no cap.
            logit_softcap: Option<f64> = None,
            /// Dropout on sublayer outputs, and the default of the other dropout options.
            dropout: f64 = 0.3,
            /// Dropout on embeddings (default: `dropout`).
            embedding_dropout: Option<f64> = None,
            /// Dropout on attention weights (default: `dropout`).
            attention_dropout: Option<f64> = None,
            /// Dropout after the activation (default: `dropout`).
            activation_dropout: Option<f64> = None,
        }
    }
}

config! {
    /// The options of a training run (docs/spec.md §4.6 to §4.11).
    pub struct TrainingConfig {
        "training" {
            /// Stop after this many updates; 0 means no limit.
            updates: i64 = 10000,
            /// Stop after this many epochs; 0 means no limit.
            epochs: i64 = 0,
            /// Padded tokens in a micro-batch: the number of sentences times the longest side.
            max_tokens: i64 = 4096,
            /// Micro-batches per update.
            accumulate: i64 = 1,
            /// Learning-rate schedule.
            schedule: ScheduleName = ScheduleName::InverseSqrt,
            /// Peak learning rate (default: λ/√d·n_w^-½ for inverse-sqrt, 3e-4 for no-warmup).
            lr: Option<f64> = None,
            /// λ, the factor of a schedule's learning rate if no peak learning rate is given.
            lr_scale: f64 = 1.0,
            /// Multiply the learning rate of any schedule by this (2 gives 2x-lr).
            lr_multiplier: f64 = 1.0,
            /// Number of warm-up updates n_w.
            warmup: i64 = 4000,
            /// Warm-up as a share of `updates`, in place of `warmup`.
            warmup_share: Option<f64> = None,
            /// Share of the peak that cosine, linear and wsd reach at the last update.
            lr_end: f64 = 0.0,
            /// Share of the run, at its end, over which wsd lowers the rate.
            decay_share: f64 = 0.2,
            /// Learning rate at the start of warm-up; needs a peak learning rate.
            warmup_init_lr: f64 = 0.0,
            /// Condition for val-decay and no-warmup to lower the rate: an evaluation is worse than each of the
            /// lr_decay_patience before it (release), or so many in a row were no better than the best (paper).
            lr_decay_rule: DecayRule = DecayRule::Release,
            /// Factor α_decay by which val-decay and no-warmup lower the rate.
            lr_decay_factor: f64 = 0.8,
            /// Number of evaluations that lr_decay_rule looks at.
            lr_decay_patience: i64 = 3,
            /// Number updates from 0 in the learning rate, as fairseq does: with warm-up, the first update has the
            /// initial rate of the warm-up.
            count_from_zero: bool = false,
            /// Stop when the learning rate falls below this after warm-up.
            min_lr: f64 = 1e-6,
            /// Optimizer: adam; muon or normuon, which orthogonalise the momentum of the layers' matrices and
            /// leave other parameters to Adam; or lion.
            optimizer: OptimizerName = OptimizerName::Adam,
            /// Muon's μ.
            muon_momentum: f64 = 0.95,
            /// Muon's Nesterov form.
            muon_nesterov: bool = true,
            /// Factor of an orthogonalised r×c matrix: 0.2·√max(r, c), an update as large as Adam's, so that one learning
            /// rate serves both (rms), or √max(1, r/c) (spectral).
            muon_scale: MuonScale = MuonScale::Rms,
            /// Multiply the learning rate of the matrices by this; Adam keeps its own.
            muon_lr_multiplier: f64 = 1.0,
            /// Rescale each matrix after its update to the Frobenius norm that it had.
            muon_on_sphere: bool = false,
            /// NorMuon's β₂, of the rows' mean squares.
            normuon_beta2: f64 = 0.95,
            /// Adam's β₁, and Lion's.
            beta1: f64 = 0.9,
            /// Adam's β₂, and Lion's.
            beta2: f64 = 0.98,
            /// Adam's ε.
            adam_eps: f64 = 1e-8,
            /// Term to which Adam adds ε: √v (fairseq), or the bias-corrected √(v/(1−β₂ᵗ)) (torch).
            adam_form: AdamForm = AdamForm::Fairseq,
            /// Decoupled weight decay.
            weight_decay: f64 = 0.0,
            /// Parameters that decay: the matrices of linear layers and the tables (matrices), or all, as in fairseq.
            weight_decay_of: DecayOf = DecayOf::Matrices,
            /// After each update, and before the first, scale the matrices to unit vectors along the width: rows of tables
            /// and of matrices that read the residual stream, columns of those that write to it (nGPT).
            unit_matrices: bool = false,
            /// Clip the global gradient norm to this; 0 means never.
            clip_norm: f64 = 0.0,
            /// QK-clip: after each update, scale the rows of queries and keys of each head whose largest logit was above
            /// this, so that its logits shrink to it (Kimi K2); 0 means never.
            qk_clip: f64 = 0.0,
            /// Label smoothing ε.
            label_smoothing: f64 = 0.1,
            /// Formula of label smoothing.
            smoothing: SmoothingName = SmoothingName::Fairseq,
            /// Factor ζ of the z-loss: training adds ζ·log²Z to each token's loss, Z the sum over the vocabulary of exp
            /// of the logits.
            z_loss: f64 = 0.0,
            /// Never predict target vocabulary entries that do not occur in the training data.
            vocab_mask: bool = true,
            /// Replace source and decoder-input tokens by UNK with this probability.
            word_dropout: f64 = 0.0,
        }
        "run" {
            /// Evaluate every this many updates; 0 means at the end of each epoch.
            evaluate_every: i64 = 0,
            /// The measure that selects the best checkpoint and decides when to stop.
            criterion: Criterion = Criterion::Loss,
            /// Stop when the criterion has not improved for this many evaluations; 0 means never.
            patience: i64 = 0,
            /// Keep this many of the latest evaluations' checkpoints, for averaging.
            keep: i64 = 10,
            /// Log the gradient norm of each layer, and the gains, every this many updates; 0 means never.
            log_layers: i64 = 0,
            /// Log the residual stream's size by layer, how far the model's output has moved since the start, and how
            /// batch statistics differ from running ones, every this many updates; 0 means never.
            log_statistics: i64 = 0,
            /// Beam of the translations whose BLEU evaluations measure; 1 is greedy search, 0 measures no BLEU.
            evaluation_beam: i64 = 1,
            /// sacreBLEU's tokeniser for BLEU in evaluations; none counts words between spaces.
            evaluation_tokenize: Tokenize = Tokenize::None,
            /// Keep only the input of each layer and run layers again for their gradients: less memory, a third more
            /// time.
            activation_checkpointing: bool = false,
            /// f32, or bf16 products with f32 master weights.
            precision: Precision = Precision::F32,
            /// Type of Adam's moments: f32, or bf16 with stochastic rounding, which saves 4 bytes per parameter.
            moments: Precision = Precision::F32,
            /// cpu, cuda, cuda:N, or auto (cuda if available).
            device: String = "cpu".into(),
            /// On a GPU, record a step's kernels in a CUDA graph for each batch shape and launch them at once.
            cuda_graphs: bool = true,
            /// Seed of all random numbers.
            seed: u64 = 1,
        }
    }
}

config! {
    /// The text of a training run: UTF-8 files with one sentence a line, gzip or not; or fairseq's binarised folder.
    pub struct DataConfig {
        "data" {
            /// Source sentences (leave out for language modelling).
            train_source: Option<String> = None,
            /// Target sentences, or the text of a language model.
            train_target: String = String::new(),
            /// Source sentences of the validation set.
            valid_source: Option<String> = None,
            /// Target sentences of the validation set.
            valid_target: String = String::new(),
            /// Learn this many BPE merges on the training text, source and target together.
            bpe_operations: Option<i64> = None,
            /// Apply the BPE merges in this file (subword-nmt or fastBPE).
            bpe_codes: Option<String> = None,
            /// The text is split already: pieces stand between spaces, and `@@ ` is joined again for scoring.
            no_bpe: bool = false,
            /// fairseq's binarised folder, with the splits train and valid and their dictionary, instead of the files.
            data_bin: Option<String> = None,
            /// Source language of data_bin (default: from its files' names).
            source_lang: Option<String> = None,
            /// Target language of data_bin.
            target_lang: Option<String> = None,
            /// Leave out sentences longer than max_tokens instead of refusing them.
            skip_long: bool = false,
            /// Tokens in a row of language-model text.
            segment_length: i64 = 64,
        }
    }
}

config! {
    /// Options of a translation (docs/spec.md §4.12).
    pub struct SearchOptions {
        "search" {
            /// Number of live hypotheses; 1 is greedy search.
            beam: i64 = 4,
            /// google: score/((5+len)/6)^α, finished hypotheses compete; fairseq: score/len^α, they are set aside.
            rule: SearchRule = SearchRule::Google,
            /// Exponent of the length penalty (default: the rule's own, google 0.6, fairseq 1).
            alpha: Option<f64> = None,
            /// Translations per sentence, at most `beam`.
            n_best: i64 = 1,
            /// Maximum number of generated tokens (default: the source's + 50 for google, 200 for fairseq).
            max_length: Option<i64> = None,
        }
    }
}

/// Describes the differences between two JSON objects of options in words, such as "heads was 8, now 4"; empty if there
/// are none.
pub fn differences(old: &Value, new: &Value) -> String {
    let empty = Map::new();
    let (old, new) = (old.as_object().unwrap_or(&empty), new.as_object().unwrap_or(&empty));
    let names = old.keys().chain(new.keys().filter(|name| !old.contains_key(*name)));
    let value = |options: &Map<String, Value>, name: &String| options.get(name).unwrap_or(&Value::Null).to_string();
    let changes: Vec<String> = names
        .map(|name| (name, value(old, name), value(new, name)))
        .filter(|(_, old, new)| old != new)
        .map(|(name, old, new)| format!("{name} was {old}, now {new}"))
        .collect();
    changes.join("; ")
}

/// Reads a configuration from JSON. Errors call the configuration `what`.
pub fn from_json<T: DeserializeOwned>(what: &str, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| {
        let text = e.to_string();
        // serde appends "at line 1 column N", which is no help here: the text comes from arguments, not from a file.
        let end = text.rfind(" at line").unwrap_or(text.len());
        Error::invalid(format!("{what}: {}", &text[..end]))
    })
}
