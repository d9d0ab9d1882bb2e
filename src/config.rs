//! The options of a model and of a training run: one list each, from which come the Rust struct, the keys of a TOML
//! file, Python's keyword arguments and the command line's flags, with their documentation, defaults and choices.

use crate::error::{unknown, Error, Result};
use crate::init::DsInitMode;
use crate::norm::lp_norm;
use crate::norm::power_norm::PowerNormMode;
use crate::residual::{Curve, DlclNorm, NormFormerMode, RFixupMode};
use crate::search::{Rule, SearchConfig};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};

/// One option, for those who list them (Python, `--help`, the documentation).
#[derive(Debug, Clone, Serialize)]
pub struct Field {
    pub name: &'static str,
    /// int, float, bool or str.
    pub kind: &'static str,
    pub optional: bool,
    pub default: serde_json::Value,
    pub choices: Vec<&'static str>,
    pub help: &'static str,
}

/// A type that an option may have.
pub trait FieldType {
    const KIND: &'static str;
    const OPTIONAL: bool = false;
    fn choices() -> Vec<&'static str> {
        Vec::new()
    }
}

macro_rules! field_types {
    ($($t:ty => $kind:literal),*) => { $(impl FieldType for $t { const KIND: &'static str = $kind; })* };
}
field_types!(i64 => "int", u64 => "int", f64 => "float", bool => "bool", String => "str");

impl<T: FieldType> FieldType for Option<T> {
    const KIND: &'static str = T::KIND;
    const OPTIONAL: bool = true;
    fn choices() -> Vec<&'static str> {
        T::choices()
    }
}

/// An option with a fixed set of words.
#[macro_export]
macro_rules! choice {
    ($(#[$meta:meta])* pub enum $name:ident ($what:literal) { $($(#[$doc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
        pub enum $name { $($(#[$doc])* #[serde(rename = $word)] $variant),+ }
        impl $name {
            pub fn parse(word: &str) -> $crate::error::Result<Self> {
                match word {
                    $($word => Ok($name::$variant),)+
                    other => Err($crate::error::unknown($what, other, [$($word),+])),
                }
            }
        }
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                let word = String::deserialize(d)?;
                $name::parse(&word).map_err(serde::de::Error::custom)
            }
        }
        impl $crate::config::FieldType for $name {
            const KIND: &'static str = "str";
            fn choices() -> Vec<&'static str> { vec![$($word),+] }
        }
    };
}

/// A name out of one of the package's tables.
macro_rules! table_name {
    ($(#[$meta:meta])* $name:ident, $what:literal, $names:expr) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Eq, Serialize)]
        pub struct $name(String);
        impl $name {
            pub fn parse(word: &str) -> Result<Self> {
                if !$names.any(|n| n == word) {
                    return Err(unknown($what, word, $names));
                }
                Ok($name(word.to_string()))
            }
            pub fn as_str(&self) -> &str { &self.0 }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                $name::parse(&String::deserialize(d)?).map_err(serde::de::Error::custom)
            }
        }
        impl FieldType for $name {
            const KIND: &'static str = "str";
            fn choices() -> Vec<&'static str> { $names.collect() }
        }
    };
}
table_name!(/// A norm of [`crate::norm::NORMS`].
    NormName, "norm", crate::norm::NORMS.iter().map(|n| n.name));
table_name!(/// A residual scheme of [`crate::residual::SCHEMES`].
    ResidualName, "residual", crate::residual::SCHEMES.iter().map(|s| s.name()));
table_name!(/// An initialisation of [`crate::init::INITS`].
    InitName, "init", crate::init::INITS.iter().map(|i| i.name));

macro_rules! config {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[doc = $doc:literal])+ $field:ident : $ty:ty = $default:expr),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name { $($(#[doc = $doc])+ pub $field: $ty),+ }

        impl Default for $name {
            fn default() -> Self {
                $name { $($field: $default),+ }
            }
        }

        impl $name {
            /// Every option, in order.
            pub fn fields() -> Vec<Field> {
                let default = $name::default();
                vec![$(Field {
                    name: stringify!($field),
                    kind: <$ty as FieldType>::KIND,
                    optional: <$ty as FieldType>::OPTIONAL,
                    default: serde_json::to_value(&default.$field).expect("an option's default is plain data"),
                    choices: <$ty as FieldType>::choices(),
                    help: concat!($($doc),+).trim_ascii(),
                }),+]
            }
        }
    };
}

choice! {
    pub enum Architecture ("architecture") { EncoderDecoder = "encoder-decoder", DecoderOnly = "decoder-only" }
}
choice! {
    /// SPEC §4: `twt` interleaves sine and cosine and counts from 0; `fairseq` puts them in two halves and counts from
    /// padding_idx + 1.
    pub enum Positions ("positions") { Twt = "twt", Fairseq = "fairseq" }
}
choice! {
    /// What the decoder reads first: TwT's release begins with BOS, fairseq with EOS.
    pub enum DecoderStart ("decoder_start") { Bos = "bos", Eos = "eos" }
}

impl DecoderStart {
    /// The type's id.
    pub fn id(self) -> i64 {
        match self {
            DecoderStart::Bos => crate::model::BOS,
            DecoderStart::Eos => crate::model::EOS,
        }
    }
}
choice! {
    pub enum Ties ("tie_embeddings") { All = "all", Decoder = "decoder", None = "none" }
}
choice! {
    pub enum Smoothing ("smoothing") { Fairseq = "fairseq", Twt = "twt" }
}
choice! {
    pub enum Precision ("precision") { F32 = "f32", Bf16 = "bf16" }
}
choice! {
    pub enum ScheduleName ("schedule") {
        InverseSqrt = "inverse-sqrt",
        ValDecay = "val-decay",
        NoWarmup = "no-warmup",
        TFixup = "t-fixup",
        Constant = "constant",
    }
}
choice! {
    /// What decides which checkpoint is best, and when to stop.
    pub enum Criterion ("criterion") { Bleu = "bleu", Loss = "loss" }
}

config! {
    /// A Transformer (SPEC §4).
    pub struct TransformerConfig {
        /// encoder-decoder for translation, decoder-only for language modelling.
        architecture: Architecture = Architecture::EncoderDecoder,
        /// Number of types in the joint vocabulary, special ones included.
        vocab_size: i64 = 0,
        /// Width of the model.
        d_model: i64 = 512,
        /// Width inside the feed-forward sublayers.
        d_ff: i64 = 2048,
        /// Attention heads; must divide d_model.
        heads: i64 = 8,
        /// Encoder layers.
        encoder_layers: i64 = 6,
        /// Decoder layers.
        decoder_layers: i64 = 6,
        /// The norm.
        norm: NormName = NormName("layernorm".into()),
        /// The encoder's norm, where it differs from `norm`.
        encoder_norm: Option<NormName> = None,
        /// The decoder's norm, where it differs from `norm`.
        decoder_norm: Option<NormName> = None,
        /// The norm's epsilon; none: the norm's own default.
        norm_eps: Option<f64> = None,
        /// p of lpnorm, from 1 to inf.
        lpnorm_p: lp_norm::Exponent = lp_norm::Exponent(2.0),
        /// α of batchnorm's running statistics: old·α + new·(1 − α).
        batchnorm_alpha: f64 = 0.9,
        /// powernorm as the paper defines it, or step for step as its authors released it.
        powernorm_mode: PowerNormMode = PowerNormMode::Paper,
        /// Training forwards that powernorm warms up for; set it to the learning rate's warm-up.
        powernorm_warmup: i64 = 4000,
        /// α of the running ψ² of powernorm and powernorm-v.
        powernorm_alpha_fwd: f64 = 0.9,
        /// α of powernorm's ν.
        powernorm_alpha_bwd: f64 = 0.9,
        /// powernorm's statistics over all ranks together, as batchnorm's and powernorm-v's always are.
        powernorm_sync: bool = false,
        /// Groups of the scaling before batchnorm, powernorm-v and powernorm; 0: none; powernorm's release: heads.
        groupscaling: i64 = 1,
        /// Where the norms stand and how residuals are added.
        residual: ResidualName = ResidualName("prenorm".into()),
        /// The initialisation; none: the one that goes with the residual scheme.
        init: Option<InitName> = None,
        /// T of branchnorm: α_t = min(1, t/T) reaches 1 at this update.
        branchnorm_steps: i64 = 4000,
        /// How branchnorm's α grows.
        branchnorm_growth: Curve = Curve::Linear,
        /// Whether dlcl's layers are prenorm's or postnorm's.
        dlcl_norm: DlclNorm = DlclNorm::Pre,
        /// normformer (1): each head times its own scalar.
        normformer_head_scale: bool = true,
        /// normformer (2): a norm on the self-attention's output.
        normformer_attention_norm: bool = true,
        /// normformer (3): a norm inside the feed-forward.
        normformer_ffn_norm: bool = true,
        /// normformer (4): a learned scale on the feed-forward's residual.
        normformer_residual_scale: bool = false,
        /// normformer's head scales before the output projection (paper) or after it (fairseq).
        normformer_mode: NormFormerMode = NormFormerMode::Paper,
        /// r-fixup as its authors released it, or with the paper's scalar before the attention's output projection.
        r_fixup_mode: RFixupMode = RFixupMode::Release,
        /// λ of layerscale at the start.
        layerscale_init: f64 = 1e-4,
        /// ds-init's α.
        ds_init_alpha: f64 = 1.0,
        /// ds-init's bound: ∝ 1/√l (paper) or l^(−1/4) (release).
        ds_init_mode: DsInitMode = DsInitMode::Paper,
        /// Normalise word embeddings to unit length, at the input and, tied, at the output (FixNorm).
        fixnorm: bool = false,
        /// Layout of the sinusoidal positions.
        positions: Positions = Positions::Twt,
        /// What the decoder reads first: bos, or eos as fairseq has it.
        decoder_start: DecoderStart = DecoderStart::Bos,
        /// Which embeddings are one table: source, target and output (all), target and output (decoder), none.
        tie_embeddings: Ties = Ties::All,
        /// A bias on the logits.
        output_bias: bool = false,
        /// Dropout on sublayer outputs, and everywhere below that says nothing else.
        dropout: f64 = 0.3,
        /// Dropout on embeddings; none: `dropout`.
        embedding_dropout: Option<f64> = None,
        /// Dropout on attention weights; none: `dropout`.
        attention_dropout: Option<f64> = None,
        /// Dropout after ReLU; none: `dropout`.
        activation_dropout: Option<f64> = None,
    }
}

config! {
    /// A training run (SPEC §4).
    pub struct TrainingConfig {
        /// Stop after this many updates; 0: no such limit.
        updates: i64 = 10000,
        /// Stop after this many epochs; 0: no such limit.
        epochs: i64 = 0,
        /// Padded tokens in a micro-batch: sentences times the longest side.
        max_tokens: i64 = 4096,
        /// Micro-batches per update.
        accumulate: i64 = 1,
        /// Learning-rate schedule.
        schedule: ScheduleName = ScheduleName::InverseSqrt,
        /// Peak learning rate; none: λ/√d·n_w^-½ for inverse-sqrt, 3e-4 for no-warmup.
        lr: Option<f64> = None,
        /// λ of inverse-sqrt without a peak learning rate.
        lr_scale: f64 = 1.0,
        /// Multiplies the learning rate of any schedule (2x-lr: 2).
        lr_multiplier: f64 = 1.0,
        /// Warm-up updates n_w.
        warmup: i64 = 4000,
        /// Learning rate at the start of warm-up, with a peak learning rate.
        warmup_init_lr: f64 = 0.0,
        /// Stop when the learning rate falls below this after warm-up.
        min_lr: f64 = 1e-6,
        /// Adam's β₁.
        beta1: f64 = 0.9,
        /// Adam's β₂.
        beta2: f64 = 0.98,
        /// Adam's ε.
        adam_eps: f64 = 1e-8,
        /// Decoupled weight decay.
        weight_decay: f64 = 0.0,
        /// Clip the global gradient norm to this; 0: never.
        clip_norm: f64 = 0.0,
        /// Label smoothing ε.
        label_smoothing: f64 = 0.1,
        /// Formula of label smoothing.
        smoothing: Smoothing = Smoothing::Fairseq,
        /// Keep target types that training never shows at probability zero.
        vocab_mask: bool = true,
        /// Turn source and decoder-input tokens into UNK with this probability.
        word_dropout: f64 = 0.0,
        /// Evaluate every so many updates; 0: at the end of each epoch.
        evaluate_every: i64 = 0,
        /// What decides which checkpoint is best, and when to stop.
        criterion: Criterion = Criterion::Loss,
        /// Stop when the criterion has not improved for so many evaluations; 0: never.
        patience: i64 = 0,
        /// Keep this many of the latest evaluations' checkpoints, for averaging.
        keep: i64 = 10,
        /// Beam of the translations that evaluations score; 1: greedy.
        evaluation_beam: i64 = 1,
        /// Keep only what enters each layer and run layers again for their gradients: less memory, a third more time.
        activation_checkpointing: bool = false,
        /// f32, or bf16 products with f32 master weights.
        precision: Precision = Precision::F32,
        /// cpu, cuda or cuda:N.
        device: String = "cpu".into(),
        /// Seed of everything random.
        seed: u64 = 1,
    }
}

config! {
    /// The text of a training run: files in UTF-8, one sentence a line, gzip or not; or fairseq's binarised folder.
    pub struct DataConfig {
        /// Source sentences; none for language modelling.
        train_source: Option<String> = None,
        /// Target sentences, or the text of a language model.
        train_target: String = String::new(),
        /// Held-out source sentences.
        valid_source: Option<String> = None,
        /// Held-out target sentences.
        valid_target: String = String::new(),
        /// Learn this many BPE merges on the training text, source and target together.
        bpe_operations: Option<i64> = None,
        /// Apply the merges of this file (subword-nmt or fastBPE).
        bpe_codes: Option<String> = None,
        /// The text is split already: pieces stand between spaces, and `@@ ` is joined again for scoring.
        no_bpe: bool = false,
        /// fairseq's binarised folder instead of the files: splits train and valid, and their dictionary.
        data_bin: Option<String> = None,
        /// Source language of data_bin; none: as its files' names have it.
        source_lang: Option<String> = None,
        /// Target language of data_bin.
        target_lang: Option<String> = None,
        /// Leave out sentences longer than max_tokens instead of refusing them.
        skip_long: bool = false,
        /// Tokens in a row of language-model text.
        segment_length: i64 = 64,
    }
}

config! {
    /// How to translate (SPEC §4, "beam").
    pub struct SearchOptions {
        /// Hypotheses alive at a time; 1: greedy.
        beam: i64 = 4,
        /// google: score/((5+len)/6)^α, finished hypotheses compete; fairseq: score/len^α, they are set aside.
        rule: Rule = Rule::Google,
        /// Exponent of the length penalty; none: the rule's own (google 0.6, fairseq 1).
        alpha: Option<f64> = None,
        /// Translations per sentence, at most `beam`.
        n_best: i64 = 1,
        /// Most tokens generated; none: the source's + 50 (google) or 200 (fairseq).
        max_length: Option<i64> = None,
    }
}

impl SearchOptions {
    pub fn config(&self) -> Result<SearchConfig> {
        let size = |name: &str, n: i64| {
            usize::try_from(n).map_err(|_| Error::invalid(format!("{name} must be at least 1, got {n}")))
        };
        let config = SearchConfig {
            beam: size("beam", self.beam)?,
            rule: self.rule,
            alpha: self.alpha.unwrap_or(SearchConfig::new(self.rule).alpha),
            n_best: size("n_best", self.n_best)?,
            max_length: self.max_length.map(|n| size("max_length", n)).transpose()?,
        };
        config.validate()?;
        Ok(config)
    }
}

impl TransformerConfig {
    /// Checks what one option cannot know of another.
    pub fn validate(&self) -> Result<()> {
        let positive = [("d_model", self.d_model), ("d_ff", self.d_ff), ("heads", self.heads)];
        for (name, value) in positive.into_iter().chain([("decoder_layers", self.decoder_layers)]) {
            if value < 1 {
                return Err(Error::invalid(format!("{name} must be at least 1, got {value}")));
            }
        }
        if self.vocab_size < 5 {
            return Err(Error::invalid(format!(
                "vocab_size must be at least 5 (four special types and one of text), got {}",
                self.vocab_size
            )));
        }
        if self.d_model % self.heads != 0 {
            let divisors: Vec<String> =
                (1..=self.d_model.min(64)).filter(|h| self.d_model % h == 0).map(|h| h.to_string()).collect();
            return Err(Error::invalid(format!(
                "d_model must be divisible by heads, got d_model {} and heads {}; heads may be {}",
                self.d_model,
                self.heads,
                divisors.join(", ")
            )));
        }
        if self.d_model % 2 != 0 {
            return Err(Error::invalid(format!(
                "d_model must be even (sine and cosine take half each), got {}",
                self.d_model
            )));
        }
        if self.architecture == Architecture::EncoderDecoder && self.encoder_layers < 1 {
            return Err(Error::invalid(format!(
                "encoder_layers must be at least 1, got {}; a model without an encoder is architecture = \"decoder-only\"",
                self.encoder_layers
            )));
        }
        for (name, p) in [
            ("dropout", Some(self.dropout)),
            ("embedding_dropout", self.embedding_dropout),
            ("attention_dropout", self.attention_dropout),
            ("activation_dropout", self.activation_dropout),
        ] {
            check_range(name, p, 0.0, 1.0)?;
        }
        lp_norm::check(self.lpnorm_p.0)?;
        for (name, alpha) in [
            ("batchnorm_alpha", self.batchnorm_alpha),
            ("powernorm_alpha_fwd", self.powernorm_alpha_fwd),
            ("powernorm_alpha_bwd", self.powernorm_alpha_bwd),
        ] {
            check_range(name, Some(alpha), 0.0, 1.0)?;
        }
        for (name, value) in [("powernorm_warmup", self.powernorm_warmup), ("groupscaling", self.groupscaling)] {
            if value < 0 {
                return Err(Error::invalid(format!("{name} must be at least 0, got {value}")));
            }
        }
        if self.branchnorm_steps < 0 {
            return Err(Error::invalid(format!("branchnorm_steps must be at least 0, got {}", self.branchnorm_steps)));
        }
        self.check_that_options_matter()
    }

    /// An option that would do nothing is a mistake: one of a scheme, norm or init that is not chosen, or a norm where
    /// the scheme has none.
    fn check_that_options_matter(&self) -> Result<()> {
        let (residual, init) = (self.residual.as_str(), self.init());
        let default = TransformerConfig::default();
        let json = |config: &TransformerConfig| serde_json::to_value(config).expect("options are plain data");
        let (own, default) = (json(self), json(&default));
        for field in TransformerConfig::fields() {
            let Some(owner) = owner(field.name) else { continue };
            if own[field.name] != default[field.name] && owner != residual && owner != init {
                return Err(Error::invalid(format!(
                    "{} = {} is an option of {}, and this model has residual {residual:?} and init {init:?}: leave it out",
                    field.name, own[field.name], owner
                )));
            }
        }
        let scheme = crate::residual::find(residual)?;
        let norms = [("encoder_norm", &self.encoder_norm), ("decoder_norm", &self.decoder_norm)];
        match norms.into_iter().find_map(|(name, norm)| Some((name, norm.as_ref()?))) {
            Some((name, norm)) if !crate::residual::has_norms(scheme, self) => Err(Error::invalid(format!(
                "residual {residual:?} has no norms, so {name} = {:?} would do nothing: leave it out",
                norm.as_str()
            ))),
            _ => Ok(()),
        }
    }

    pub fn has_encoder(&self) -> bool {
        self.architecture == Architecture::EncoderDecoder
    }

    /// The initialisation: the one named, or the scheme's.
    pub fn init(&self) -> &str {
        match &self.init {
            Some(name) => name.as_str(),
            None => crate::residual::find(self.residual.as_str()).map_or("xavier", |scheme| scheme.init()),
        }
    }

    pub fn encoder_norm(&self) -> &str {
        self.encoder_norm.as_ref().unwrap_or(&self.norm).as_str()
    }

    pub fn decoder_norm(&self) -> &str {
        self.decoder_norm.as_ref().unwrap_or(&self.norm).as_str()
    }
}

/// The scheme or init that an option belongs to: the one whose name the option's begins with.
fn owner(option: &str) -> Option<&'static str> {
    let residuals = crate::residual::SCHEMES.iter().map(|s| s.name());
    let mut names = residuals.chain(crate::init::INITS.iter().map(|i| i.name));
    names.find(|name| option.strip_prefix(&name.replace('-', "_")).is_some_and(|rest| rest.starts_with('_')))
}

impl TrainingConfig {
    pub fn validate(&self) -> Result<()> {
        for (name, value, least) in [
            ("updates", self.updates, 0),
            ("epochs", self.epochs, 0),
            ("max_tokens", self.max_tokens, 1),
            ("accumulate", self.accumulate, 1),
            ("warmup", self.warmup, 0),
            ("keep", self.keep, 0),
            ("patience", self.patience, 0),
            ("evaluate_every", self.evaluate_every, 0),
            ("evaluation_beam", self.evaluation_beam, 1),
        ] {
            if value < least {
                return Err(Error::invalid(format!("{name} must be at least {least}, got {value}")));
            }
        }
        if self.updates == 0 && self.epochs == 0 && self.patience == 0 && self.min_lr <= 0.0 {
            return Err(Error::invalid("nothing would stop this run: give updates, epochs, patience or min_lr"));
        }
        if let Some(lr) = self.lr.filter(|lr| lr.is_nan() || *lr <= 0.0) {
            return Err(Error::invalid(format!("lr must be greater than 0, got {lr}")));
        }
        check_range("beta1", Some(self.beta1), 0.0, 1.0)?;
        check_range("beta2", Some(self.beta2), 0.0, 1.0)?;
        check_range("label_smoothing", Some(self.label_smoothing), 0.0, 1.0)?;
        check_range("word_dropout", Some(self.word_dropout), 0.0, 1.0)
    }
}

impl DataConfig {
    /// Checks what one option cannot know of another.
    pub fn validate(&self) -> Result<()> {
        let files = [
            ("train_source", self.train_source.is_some()),
            ("train_target", !self.train_target.is_empty()),
            ("valid_source", self.valid_source.is_some()),
            ("valid_target", !self.valid_target.is_empty()),
            ("bpe_operations", self.bpe_operations.is_some()),
            ("bpe_codes", self.bpe_codes.is_some()),
        ];
        let languages = [("source_lang", self.source_lang.is_some()), ("target_lang", self.target_lang.is_some())];
        let given = |options: &[(&'static str, bool)]| options.iter().find(|(_, is_given)| *is_given).map(|o| o.0);
        match (&self.data_bin, given(&files), given(&languages)) {
            (Some(folder), Some(name), _) => Err(Error::invalid(format!(
                "data_bin {folder} is text already, split and numbered: leave {name} out, or data_bin"
            ))),
            (None, _, Some(name)) => Err(Error::invalid(format!(
                "{name} chooses among the languages of data_bin: give that, or leave it out"
            ))),
            _ => Ok(()),
        }
    }
}

fn check_range(name: &str, value: Option<f64>, least: f64, below: f64) -> Result<()> {
    match value {
        Some(v) if !(least..below).contains(&v) => {
            Err(Error::invalid(format!("{name} must lie in [{least}, {below}), got {v}")))
        }
        _ => Ok(()),
    }
}

/// Reads a configuration out of JSON; `what` is named in the message of a wrong one.
pub fn from_json<T: DeserializeOwned>(what: &str, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| {
        let text = e.to_string();
        // serde appends "at line 1 column N", which means nothing for arguments that were never a file.
        let end = text.rfind(" at line").unwrap_or(text.len());
        Error::invalid(format!("{what}: {}", &text[..end]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_words_and_keys_name_the_choices() {
        let e = from_json::<TransformerConfig>("model", r#"{"norm": "scalnorm"}"#).unwrap_err().to_string();
        assert!(e.contains("layernorm") && e.contains("did you mean \"scalenorm\""), "{e}");
        let e = from_json::<TransformerConfig>("model", r#"{"scale_fc": true}"#).unwrap_err().to_string();
        assert!(e.contains("scale_fc") && e.contains("d_model") && !e.contains("line"), "{e}");
    }

    #[test]
    fn options_that_would_do_nothing_are_mistakes() {
        let check = |options: &str, part: &str| {
            let text = format!(r#"{{"vocab_size": 10, {options}}}"#);
            let e = from_json::<TransformerConfig>("model", &text).unwrap().validate().unwrap_err().to_string();
            assert!(e.contains(part), "{e}");
        };
        check(r#""residual": "prenorm", "branchnorm_steps": 10"#, "an option of branchnorm");
        check(r#""residual": "prenorm", "normformer_ffn_norm": false"#, "an option of normformer");
        check(r#""residual": "prenorm", "ds_init_alpha": 0.5"#, "an option of ds-init");
        check(r#""residual": "rezero", "decoder_norm": "rmsnorm""#, "has no norms");
        let fine = r#"{"vocab_size": 10, "residual": "branchnorm", "branchnorm_steps": 10, "decoder_norm": "rmsnorm"}"#;
        from_json::<TransformerConfig>("model", fine).unwrap().validate().unwrap();
    }

    #[test]
    fn text_comes_from_files_or_from_a_folder() {
        let check = |options: &str| from_json::<DataConfig>("data", options).unwrap().validate();
        let both = check(r#"{"data_bin": "bin", "bpe_codes": "codes"}"#).unwrap_err().to_string();
        assert!(both.contains("data_bin bin") && both.contains("leave bpe_codes out"), "{both}");
        let neither = check(r#"{"train_target": "en.txt", "source_lang": "de"}"#).unwrap_err().to_string();
        assert!(neither.contains("source_lang chooses"), "{neither}");
        check(r#"{"data_bin": "bin", "source_lang": "de", "no_bpe": true}"#).unwrap();
    }

    #[test]
    fn heads_must_divide_the_width() {
        let config = TransformerConfig { vocab_size: 10, d_model: 12, heads: 5, ..Default::default() };
        let e = config.validate().unwrap_err().to_string();
        assert!(e.contains("1, 2, 3, 4, 6, 12"), "{e}");
    }
}
