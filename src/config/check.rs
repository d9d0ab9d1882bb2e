//! Checks of each option's value, and of options that depend on each other.

use super::{attention, parametrisation, positions};
use super::{
    Architecture, AttentionName, Criterion, DataConfig, OptimizerName, ScheduleName, TrainingConfig, TransformerConfig,
};
use crate::error::{Error, Result};
use crate::norm::conventions::KEYWORDS;
use crate::norm::spec::NORM_EPS;
use crate::norm::{rms_norm, Spec};
use crate::options::{at_most, below_one, AnyOption};
use crate::residual::{Change, LayerContext, ModelShape, QkNorm, Schemes, StackName, Sublayer, TensorizedSizes};

/// The maximum number of layers in a stack. Checks visit every layer, and dlcl and denseformer have a weight for
/// every pair of layers.
const MOST_LAYERS: i64 = 10_000;

impl TransformerConfig {
    /// Checks all options, each alone and against the others.
    pub fn validate(&self) -> Result<()> {
        let positive = [("d_model", self.d_model), ("d_ff", self.d_ff), ("heads", self.heads)];
        for (name, value) in positive.into_iter().chain([("decoder_layers", self.decoder_layers)]) {
            if value < 1 {
                return Err(Error::invalid(format!("{name} must be at least 1, got {value}")));
            }
        }
        for (name, value) in [("encoder_layers", self.encoder_layers), ("decoder_layers", self.decoder_layers)] {
            at_most(name, value, MOST_LAYERS)?;
        }
        if self.vocab_size < 5 {
            return Err(Error::invalid(format!(
                "vocab_size must be at least 5 (four special types and one of text), got {}",
                self.vocab_size
            )));
        }
        if self.d_model % self.heads != 0 {
            // More than 64 heads are possible; the message lists only the usual numbers.
            let divisors: Vec<String> =
                (1..=self.d_model.min(64)).filter(|h| self.d_model % h == 0).map(|h| h.to_string()).collect();
            return Err(Error::invalid(format!(
                "d_model must be divisible by heads, got d_model {} and heads {}; heads may be {}",
                self.d_model,
                self.heads,
                divisors.join(", ")
            )));
        }
        positions::check_sizes(self)?;
        attention::check_sizes(self)?;
        if self.architecture == Architecture::EncoderDecoder && self.encoder_layers < 1 {
            return Err(Error::invalid(format!(
                "encoder_layers must be at least 1, got {}; a model without an encoder is architecture = \"decoder-only\"",
                self.encoder_layers
            )));
        }
        self.check_options()?;
        self.schemes().check(self.residual.as_str(), &self.outline())
    }

    /// Returns the residual schemes of the model's layers.
    pub fn schemes(&self) -> &Schemes {
        self.residual.schemes()
    }

    /// Checks the options that do not depend on the model's sizes. For a layer that is built without a model, these are
    /// all checks.
    pub fn check_options(&self) -> Result<()> {
        self.check_options_of(&[])
    }

    /// Checks like [`check_options`](Self::check_options), for a model whose layers have the sublayers `kinds`. An
    /// empty `kinds` means the usual sublayers of an encoder's or a decoder's layer.
    pub fn check_options_of(&self, kinds: &[Sublayer]) -> Result<()> {
        for (name, p) in [
            ("dropout", Some(self.dropout)),
            ("embedding_dropout", self.embedding_dropout),
            ("attention_dropout", self.attention_dropout),
            ("activation_dropout", self.activation_dropout),
        ] {
            p.map_or(Ok(()), |p| below_one(name, p))?;
        }
        TransformerConfig::option_specs().iter().try_for_each(|option_spec| option_spec.check(&self.options))?;
        self.schemes().all().try_for_each(|scheme| scheme.check_options(&self.options))?;
        for (name, value) in
            [("tensorized_rank", self.tensorized_rank), ("tensorized_segment", self.tensorized_segment)]
        {
            if value < 1 {
                return Err(Error::invalid(format!("{name} must be at least 1, got {value}")));
            }
        }
        self.schemes().check_given(self.outline(), &self.options, kinds)?;
        self.check_that_options_matter()?;
        parametrisation::check(self)?;
        positions::check(self)?;
        attention::check_softcaps(self)?;
        attention::check(self)
    }

    /// Errors if an option would do nothing: an option of a norm, scheme, initialisation or attention that is not
    /// chosen, or a choice of norm if the scheme has no norms.
    fn check_that_options_matter(&self) -> Result<()> {
        let (residual, schemes, init) = (self.residual.as_str(), self.schemes(), self.init());
        // `used` has the options that the chosen schemes, norms and initialisation read.
        let mut used: Vec<&'static dyn AnyOption> =
            schemes.all().flat_map(|scheme| scheme.options()).copied().collect();
        for norm in [self.encoder_norm(), self.decoder_norm()] {
            used.extend(crate::norm::find(norm)?.options.iter().filter_map(|keyword| keyword.option));
        }
        used.extend(crate::init::find(init)?.options);
        let default = TransformerConfig::default();
        let json = |config: &TransformerConfig| serde_json::to_value(config).expect("options are plain data");
        let (own, default) = (json(self), json(&default));
        for field in TransformerConfig::fields() {
            // Options such as `d_model` have no owner, and every model reads them.
            let Some(owner) = owner(field.name) else { continue };
            let is_used = owner == self.attention.name() || used.iter().any(|option| option.name() == field.name);
            if own[field.name] != default[field.name] && !is_used {
                return Err(Error::invalid(format!(
                    "{} = {} is an option of {owner}, and this model has norm {}, residual {residual:?}, init {init:?} and \
                     attention {:?}: leave it out",
                    field.name,
                    own[field.name],
                    match self.encoder_norm() == self.decoder_norm() {
                        true => format!("{:?}", self.decoder_norm()),
                        false => format!("{:?} and {:?}", self.encoder_norm(), self.decoder_norm()),
                    },
                    self.attention.name(),
                )));
            }
        }
        self.check_norm_options()?;
        self.check_initial_weights()?;
        if let (Some(norm), false) = (&self.encoder_norm, self.has_encoder()) {
            return Err(Error::invalid(format!(
                "a decoder-only model has no encoder, so encoder_norm = {:?} would do nothing: leave it out",
                norm.as_str()
            )));
        }
        let norms = [("encoder_norm", &self.encoder_norm), ("decoder_norm", &self.decoder_norm)];
        let given_norm = norms.into_iter().find_map(|(name, norm)| Some((name, norm.as_ref()?)));
        match given_norm {
            Some((name, norm)) if !schemes.have_norms(self.outline(), &self.options) => Err(Error::invalid(format!(
                "residual {residual:?} has no norms, so {name} = {:?} would do nothing: leave it out",
                norm.as_str()
            ))),
            _ => Ok(()),
        }
    }

    /// Errors if the scheme sets the initial values of norms' weights, but a stack's norm has no weight.
    fn check_initial_weights(&self) -> Result<()> {
        let schemes = self.schemes();
        for stack in StackName::of(&self.outline()) {
            let first = self.place(*stack, 0);
            let (norm, options) = crate::norm::named(first.norm_name(), &self.options)?;
            let places = (0..first.layers()).flat_map(|layer| LayerContext { layer, ..first }.each());
            // What the scheme declares around each sublayer; its norms are among these changes.
            let mut declarations = places.map(|place| schemes.at(&place).around(&place));
            // `start` is a factor of the weight's initial value. A norm without a weight works as if the factor were 1.
            if !norm.learns_weight(&options)
                && declarations.any(|spec| spec.changes().filter_map(Change::norm).any(|norm| norm.start != 1.0))
            {
                return Err(Error::invalid(format!(
                    "residual {:?} sets the first value of its norms' weights, and {} has none: leave its option out, or \
                     choose another norm",
                    self.residual.as_str(),
                    norm.name
                )));
            }
        }
        Ok(())
    }

    /// Errors if norm_eps is set and neither norm has an ε, or if options of rmsnorm are set without rmsnorm. A family,
    /// such as `rmsnorm:llama`, is rmsnorm with fixed options.
    fn check_norm_options(&self) -> Result<()> {
        let norm_has_eps = |name: &str| {
            let is_eps = |option: &&dyn AnyOption| option.name() == NORM_EPS.name;
            let has_eps = |spec: &Spec| spec.options.iter().any(|keyword| keyword.option.as_ref().is_some_and(is_eps));
            crate::norm::find(name).map(has_eps)
        };
        let (encoder, decoder) = (self.encoder_norm(), self.decoder_norm());
        // An option of rmsnorm counts as given if its value is not the default. (`field` takes a heading of --help.)
        let given_option = KEYWORDS
            .iter()
            .filter_map(|keyword| keyword.option)
            .find(|option| option.name() != NORM_EPS.name && self.options.value(*option) != option.field("").default);
        let has_rmsnorm = [encoder, decoder].contains(&rms_norm::SPEC.name);
        if let Some(option) = given_option.filter(|_| !has_rmsnorm) {
            // The message names a norm without this option: if possible a family, whose name has a colon.
            let (name, family) = (option.name(), if encoder.contains(':') { encoder } else { decoder });
            return Err(Error::invalid(format!(
                "{family} has conventions of its own, so {name} would do nothing: leave it out, or choose norm = {:?}",
                rms_norm::SPEC.name
            )));
        }
        match self.options.get(&NORM_EPS) {
            Some(eps) if !norm_has_eps(encoder)? && !norm_has_eps(decoder)? => Err(Error::invalid(format!(
                "norm {decoder:?} has no epsilon, so norm_eps = {eps} would do nothing: leave it out"
            ))),
            _ => Ok(()),
        }
    }

    pub fn has_encoder(&self) -> bool {
        self.architecture == Architecture::EncoderDecoder
    }

    /// Returns the model's shape in the form that the tables of norms, schemes and initialisations need.
    pub fn outline(&self) -> ModelShape<'_> {
        let sizes = TensorizedSizes { rank: self.tensorized_rank, segment: self.tensorized_segment };
        ModelShape {
            d_model: self.d_model,
            d_ff: self.d_ff,
            heads: self.heads,
            kv_heads: self.kv_heads.unwrap_or(self.heads),
            activation: self.activation,
            has_biases: self.linear_biases,
            scales_embeddings: self.scale_embeddings,
            has_encoder: self.has_encoder(),
            encoder_layers: self.encoder_layers,
            decoder_layers: self.decoder_layers,
            encoder_norm: self.encoder_norm(),
            decoder_norm: self.decoder_norm(),
            qk_norm: self.qk_norm.then_some(QkNorm {
                over: self.qk_norm_over,
                after_rotation: self.qk_norm_after_rotation,
                is_weighted: self.qk_norm_weight,
                scale: self.qk_norm_scale,
            }),
            v_norm: self.v_norm,
            qk_l2norm: self.qk_l2norm,
            tensorized: (self.attention == AttentionName::Tensorized).then_some(sizes),
            output_gate: self.output_gate,
            sinks: self.sinks,
            score_softcap: self.score_softcap,
            value_embeddings: self.value_embeddings.then_some(self.vocab_size),
            smear: self.smear,
            scaled: self.scaled(),
        }
    }

    /// Returns the place of the first sublayer in layer `layer` (counted from 0) of a stack, with the model's shape and
    /// options.
    pub fn place(&self, stack: StackName, layer: i64) -> LayerContext<'_> {
        LayerContext::new(self.outline(), &self.options, stack, layer)
    }

    /// Returns the name of the initialisation: the one given, or else the one that goes with the scheme.
    pub fn init(&self) -> &str {
        match &self.init {
            Some(name) => name.as_str(),
            None => self.schemes().init(),
        }
    }

    /// Returns the name of the encoder's norm; in a model without an encoder, of the norm that it would have.
    pub fn encoder_norm(&self) -> &str {
        self.encoder_norm.as_ref().unwrap_or(&self.norm).as_str()
    }

    pub fn decoder_norm(&self) -> &str {
        self.decoder_norm.as_ref().unwrap_or(&self.norm).as_str()
    }
}

/// Returns the norm, scheme, initialisation or attention to which an option belongs, judged by the option's prefix:
/// `powernorm_mode` belongs to powernorm. `None` means that all models have the option.
fn owner(option: &str) -> Option<&'static str> {
    let norms = crate::norm::NORMS.iter().map(|n| n.name);
    let residuals = crate::residual::SCHEMES.iter().map(|s| s.name);
    let inits = crate::init::INITS.iter().map(|i| i.name);
    let mut names = norms.chain(residuals).chain(inits).chain([AttentionName::Tensorized.name()]);
    names.find(|name| option.strip_prefix(&name.replace('-', "_")).is_some_and(|rest| rest.starts_with('_')))
}

impl TrainingConfig {
    /// Checks all options, each alone and against the others.
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
            ("log_layers", self.log_layers, 0),
            ("log_statistics", self.log_statistics, 0),
            ("evaluation_beam", self.evaluation_beam, 0),
        ] {
            if value < least {
                return Err(Error::invalid(format!("{name} must be at least {least}, got {value}")));
            }
        }
        if self.criterion == Criterion::Bleu && self.evaluation_beam == 0 {
            return Err(Error::invalid(
                "criterion = \"bleu\" needs an evaluation_beam of at least 1, got 0, which measures no BLEU: give 1 for \
                 greedy search, or criterion = \"loss\"",
            ));
        }
        // The random numbers of dropout distinguish at most 2¹⁶ micro-batches per update.
        if self.accumulate > 1 << 16 {
            return Err(Error::invalid(format!("accumulate must be at most 65536, got {}", self.accumulate)));
        }
        // True if the rate never falls below min_lr, so that this option cannot end the run. With the other schedules
        // the rate falls without end, or after evaluations.
        let ignores_min_lr = match self.schedule {
            ScheduleName::Constant | ScheduleName::Cosine | ScheduleName::Linear | ScheduleName::Wsd => true,
            ScheduleName::InverseSqrt => self.warmup == 0,
            ScheduleName::TFixup | ScheduleName::ValDecay | ScheduleName::NoWarmup => false,
        };
        if self.updates == 0 && self.epochs == 0 && self.patience == 0 && (self.min_lr <= 0.0 || ignores_min_lr) {
            let why = if self.min_lr > 0.0 { ", for the rate never falls below min_lr" } else { "" };
            let or = if ignores_min_lr { "" } else { ", or min_lr" };
            return Err(Error::invalid(format!(
                "nothing would stop this run{why}: give updates, epochs or patience{or}"
            )));
        }
        if let Some(lr) = self.lr.filter(|lr| lr.is_nan() || *lr <= 0.0) {
            return Err(Error::invalid(format!("lr must be greater than 0, got {lr}")));
        }
        if !(self.adam_eps > 0.0 && self.adam_eps.is_finite()) {
            return Err(Error::invalid(format!("adam_eps must be greater than 0, got {}", self.adam_eps)));
        }
        for (name, factor) in [("lr_scale", self.lr_scale), ("lr_multiplier", self.lr_multiplier)] {
            if !(factor > 0.0 && factor.is_finite()) {
                return Err(Error::invalid(format!("{name} must be greater than 0, got {factor}")));
            }
        }
        if !(self.lr_decay_factor > 0.0 && self.lr_decay_factor < 1.0) {
            return Err(Error::invalid(format!("lr_decay_factor must lie in (0, 1), got {}", self.lr_decay_factor)));
        }
        crate::options::at_least_one("lr_decay_patience", self.lr_decay_patience)?;
        for (name, value) in [
            ("warmup_init_lr", self.warmup_init_lr),
            ("weight_decay", self.weight_decay),
            ("clip_norm", self.clip_norm),
            ("qk_clip", self.qk_clip),
            ("z_loss", self.z_loss),
        ] {
            if !(value >= 0.0 && value.is_finite()) {
                return Err(Error::invalid(format!("{name} must be at least 0, got {value}")));
            }
        }
        below_one("muon_momentum", self.muon_momentum)?;
        below_one("normuon_beta2", self.normuon_beta2)?;
        self.check_optimizer()?;
        self.check_schedule()?;
        below_one("beta1", self.beta1)?;
        below_one("beta2", self.beta2)?;
        below_one("label_smoothing", self.label_smoothing)?;
        below_one("word_dropout", self.word_dropout)?;
        // lr_scale is a factor of the rate in eq 7 of TwT (Nguyen & Salazar 2019). It does nothing if `lr` or the
        // schedule gives the rate instead.
        let rate_source = match (self.schedule, self.lr) {
            (_, Some(lr)) => Some(format!("lr = {lr}")),
            (ScheduleName::NoWarmup, None) => Some("schedule = no-warmup".into()),
            _ => None,
        };
        if let (Some(rate_source), true) = (rate_source, self.lr_scale != 1.0) {
            return Err(Error::invalid(format!(
                "lr_scale = {0} scales the rate that the width gives (TwT eq 7), and here {rate_source} says it: leave one out, or give lr_multiplier = {0}",
                self.lr_scale
            )));
        }
        Ok(())
    }
}

impl TrainingConfig {
    /// Checks the training options that depend on options of the model.
    pub fn check_with(&self, model: &TransformerConfig) -> Result<()> {
        attention::check_qk_clip(model, self)
    }

    /// Errors if options of the schedules that fall until the last update make no sense or would do nothing.
    fn check_schedule(&self) -> Result<()> {
        let (default, name) = (TrainingConfig::default(), self.schedule.name());
        let falls = self.schedule.falls_to_the_end();
        below_one("lr_end", self.lr_end)?;
        for (option, share) in [("decay_share", Some(self.decay_share)), ("warmup_share", self.warmup_share)] {
            if share.is_some_and(|share| !(share > 0.0 && share <= 1.0)) {
                return Err(Error::invalid(format!("{option} must lie in (0, 1], got {}", share.unwrap_or_default())));
            }
        }
        if self.updates == 0 && (falls || self.warmup_share.is_some()) {
            let what = if falls { format!("schedule = {name:?}") } else { "warmup_share".into() };
            return Err(Error::invalid(format!("{what} needs the length of the run: give updates")));
        }
        let is_wsd = self.schedule == ScheduleName::Wsd;
        // `matters` is true if the schedule reads the option.
        for (option, is_given, matters) in [
            ("lr_end", self.lr_end != default.lr_end, falls),
            ("decay_share", self.decay_share != default.decay_share, is_wsd),
        ] {
            if is_given && !matters {
                return Err(Error::invalid(format!(
                    "{option} would do nothing with schedule = {name:?}: leave it out"
                )));
            }
        }
        Ok(())
    }

    /// Errors if an option belongs to an optimizer that the run does not use, or makes no sense.
    fn check_optimizer(&self) -> Result<()> {
        let (default, name) = (TrainingConfig::default(), self.optimizer.name());
        if !(self.muon_lr_multiplier > 0.0 && self.muon_lr_multiplier.is_finite()) {
            return Err(Error::invalid(format!(
                "muon_lr_multiplier must be greater than 0, got {}",
                self.muon_lr_multiplier
            )));
        }
        let is_muon = matches!(self.optimizer, OptimizerName::Muon | OptimizerName::Normuon);
        // Each option of Muon, with whether it differs from its default.
        let muon_options = [
            ("muon_momentum", self.muon_momentum != default.muon_momentum),
            ("muon_nesterov", self.muon_nesterov != default.muon_nesterov),
            ("muon_scale", self.muon_scale != default.muon_scale),
            ("muon_lr_multiplier", self.muon_lr_multiplier != default.muon_lr_multiplier),
            ("muon_on_sphere", self.muon_on_sphere != default.muon_on_sphere),
        ];
        if self.muon_on_sphere && self.unit_matrices {
            return Err(Error::invalid(
                "muon_on_sphere keeps each matrix's norm, and unit_matrices then sets the length of each of its vectors: \
                 leave one of them out",
            ));
        }
        let normuon_options = [("normuon_beta2", self.normuon_beta2 != default.normuon_beta2)];
        let is_normuon = self.optimizer == OptimizerName::Normuon;
        // Each option is paired with whether the chosen optimizer reads it.
        let muon_options = muon_options.into_iter().map(|option| (option, is_muon));
        let all_options = muon_options.chain(normuon_options.map(|option| (option, is_normuon)));
        for ((option, is_given), matters) in all_options {
            if is_given && !matters {
                return Err(Error::invalid(format!(
                    "{option} would do nothing with optimizer = {name:?}: leave it out"
                )));
            }
        }
        Ok(())
    }
}

impl DataConfig {
    /// Checks all options, each alone and against the others.
    pub fn validate(&self) -> Result<()> {
        if self.segment_length < 1 {
            return Err(Error::invalid(format!("segment_length must be at least 1, got {}", self.segment_length)));
        }
        let files = [
            ("train_source", self.train_source.is_some()),
            ("train_target", !self.train_target.is_empty()),
            ("valid_source", self.valid_source.is_some()),
            ("valid_target", !self.valid_target.is_empty()),
            ("bpe_operations", self.bpe_operations.is_some()),
            ("bpe_codes", self.bpe_codes.is_some()),
        ];
        let languages = [("source_lang", self.source_lang.is_some()), ("target_lang", self.target_lang.is_some())];
        // Returns the name of the first option that is given.
        let given =
            |options: &[(&'static str, bool)]| options.iter().find(|(_, is_given)| *is_given).map(|(name, _)| *name);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::from_json;

    #[test]
    fn unknown_words_and_keys_name_the_choices() {
        let e = from_json::<TransformerConfig>("model", r#"{"norm": "scalnorm"}"#).unwrap_err().to_string();
        assert!(e.contains("layernorm") && e.contains("did you mean \"scalenorm\""), "{e}");
        let e = from_json::<TransformerConfig>("model", r#"{"scale_fc": true}"#).unwrap_err().to_string();
        assert!(e.contains("scale_fc") && e.contains("d_model") && !e.contains(" line "), "{e}");
    }

    #[test]
    fn the_tables_options_are_keys_like_others() {
        let read = |text: &str| from_json::<TransformerConfig>("model", text);
        let message = |text: &str| read(text).unwrap_err().to_string();
        let config =
            read(r#"{"branchnorm_steps": 7, "lpnorm_p": "inf", "norm_eps": 1, "ds_init_alpha": 1.0}"#).unwrap();
        let written = serde_json::to_value(&config).unwrap();
        let names: Vec<&str> = TransformerConfig::fields().iter().map(|field| field.name).collect();
        assert!(
            names.iter().all(|name| written.get(name).is_some()) && names.len() == written.as_object().unwrap().len()
        );
        let checked = ["branchnorm_steps", "lpnorm_p", "norm_eps", "ds_init_alpha", "branchnorm_growth"];
        assert_eq!(checked.map(|name| written[name].to_string()), ["7", "\"inf\"", "1.0", "1.0", "\"linear\""]);
        assert_eq!(read(&written.to_string()).unwrap(), config);
        assert_eq!(read(r#"{"ds_init_alpha": 1, "norm_eps": null}"#).unwrap(), TransformerConfig::default());
        assert_eq!(message(r#"{"branchnorm_steps": "x"}"#), r#"model: invalid type: string "x", expected i64"#);
        assert_eq!(message(r#"{"d_model": "x"}"#), r#"model: invalid type: string "x", expected i64"#);
        assert!(message(r#"{"branchnorm_growth": "linaer"}"#).contains("did you mean \"linear\""));
        for twice in [r#"{"d_ff": 1, "d_ff": 1}"#, r#"{"dlcl_norm": "pre", "dlcl_norm": "pre"}"#] {
            assert!(message(twice).contains("duplicate field `d"), "{twice}");
        }
        assert!(message("3").contains("expected struct TransformerConfig"));
    }

    /// Several norms, schemes or initialisations may share an option. The list of all options has it only once.
    #[test]
    fn an_option_of_several_is_declared_once() {
        let norms = crate::norm::NORMS.iter().flat_map(|norm| norm.options).filter_map(|keyword| keyword.option);
        let schemes = crate::residual::SCHEMES.iter().flat_map(|scheme| scheme.options).copied();
        let inits = crate::init::INITS.iter().flat_map(|init| init.options).copied();
        // `field` takes a heading of --help, which does not matter here.
        let shown = |option: &dyn AnyOption| serde_json::to_value(option.field("")).unwrap();
        let all = TransformerConfig::option_specs();
        for option in norms.chain(schemes).chain(inits) {
            let same: Vec<_> = all.iter().filter(|other| other.name() == option.name()).collect();
            assert!(same.len() == 1 && shown(*same[0]) == shown(option), "{}", option.name());
        }
        let own: Vec<&str> = TransformerConfig::fields().iter().map(|field| field.name).collect();
        assert!(own.iter().all(|name| own.iter().filter(|other| other == &name).count() == 1));
    }

    #[test]
    fn options_that_would_do_nothing_are_mistakes() {
        // Expects that a model with these options is refused with a message that contains `part`.
        let check = |options: &str, part: &str| {
            let text = format!(r#"{{"vocab_size": 10, {options}}}"#);
            let e = from_json::<TransformerConfig>("model", &text).unwrap().validate().unwrap_err().to_string();
            assert!(e.contains(part), "{e}");
        };
        check(r#""residual": "prenorm", "branchnorm_steps": 10"#, "an option of branchnorm");
        check(r#""residual": "prenorm", "normformer_ffn_norm": false"#, "an option of normformer");
        check(r#""residual": "prenorm", "ds_init_alpha": 0.5"#, "an option of ds-init");
        check(r#""norm": "rmsnorm", "powernorm_warmup": 10"#, "an option of powernorm, and this model has norm");
        check(
            r#""norm": "powernorm-v", "powernorm_warmup": 10"#,
            r#"powernorm, and this model has norm "powernorm-v""#,
        );
        check(r#""init": "r-fixup", "r_fixup_mode": "paper""#, "an option of r-fixup, and this model has norm");
        check(r#""encoder_norm": "powernorm", "lpnorm_p": 3"#, r#""powernorm" and "layernorm""#);
        check(r#""residual": "rezero", "decoder_norm": "rmsnorm""#, "has no norms");
        check(r#""residual": "postnorm*6,prenorm""#, "leaves none to prenorm");
        check(r#""architecture": "decoder-only", "encoder_norm": "rmsnorm""#, "has no encoder");
        check(r#""norm": "dyt", "norm_eps": 1e-3"#, r#"norm "dyt" has no epsilon, so norm_eps = 0.001"#);
        let fine = r#"{"vocab_size": 10, "norm": "dyt", "decoder_norm": "rmsnorm", "norm_eps": 1e-3}"#;
        from_json::<TransformerConfig>("model", fine).unwrap().validate().unwrap();
        let fine = r#"{"vocab_size": 10, "residual": "branchnorm", "branchnorm_steps": 10, "decoder_norm": "rmsnorm"}"#;
        from_json::<TransformerConfig>("model", fine).unwrap().validate().unwrap();
        let fine =
            r#"{"vocab_size": 10, "residual": "prores", "prores_scheme": "ln-scaling", "ln_scaling_mode": "weight"}"#;
        from_json::<TransformerConfig>("model", fine).unwrap().validate().unwrap();
        let fine = r#"{"vocab_size": 10, "encoder_norm": "powernorm-v", "powernorm_alpha_fwd": 0.95}"#;
        from_json::<TransformerConfig>("model", fine).unwrap().validate().unwrap();
    }

    #[test]
    fn rates_must_be_such_that_something_is_learned() {
        for wrong in [
            "lr_scale\": 0",
            "lr_scale\": -1",
            "lr_multiplier\": 0",
            "warmup_init_lr\": -0.1",
            "lr\": 0",
            "adam_eps\": 0",
            "adam_eps\": -1",
            "weight_decay\": -5",
            "clip_norm\": -1",
        ] {
            let config: TrainingConfig = from_json("training", &format!("{{\"{wrong}}}")).unwrap();
            let e = config.validate().unwrap_err().to_string();
            assert!(e.starts_with(wrong.split('"').next().unwrap()), "{wrong}: {e}");
        }
    }

    #[test]
    fn a_scale_that_does_not_enter_the_rate_is_a_mistake() {
        let check = |options: &str| from_json::<TrainingConfig>("training", options).unwrap().validate();
        for (options, part) in [
            (r#"{"lr_scale": 2, "lr": 0.005}"#, "lr = 0.005 says it: leave one out, or give lr_multiplier = 2"),
            (r#"{"lr_scale": 2, "schedule": "no-warmup"}"#, "schedule = no-warmup says it"),
        ] {
            let e = check(options).unwrap_err().to_string();
            assert!(e.contains(part), "{options}: {e}");
        }
        check(r#"{"lr_scale": 2, "schedule": "val-decay"}"#).unwrap();
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
