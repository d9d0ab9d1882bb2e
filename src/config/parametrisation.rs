//! A model's parametrisation, computed from its options.

use super::{AttentionName, NormName, Positions, Ties, TransformerConfig};
use crate::error::{Error, Result};
use crate::norm::{l2_norm, layer_norm, rep_bn, rms_norm};
use crate::parametrisation::{
    self, AttentionScale, Multipliers, Parametrisation, Part, Scaled, StepSize, UnitScaled, PARAMETRISATIONS,
};
use crate::residual::{Activation, StackName};

impl TransformerConfig {
    /// Returns the model's parametrisation with its sizes and factors.
    pub fn scaled(&self) -> Scaled {
        // The name was checked when the option was read.
        let parametrisation = parametrisation::find(self.parametrisation.as_str()).unwrap_or(PARAMETRISATIONS[0]);
        let unit = parametrisation.is_unit_scaled.then(|| self.unit_scaled());
        Scaled {
            parametrisation,
            d_model: self.d_model,
            // Without the option, the base model of u-μP has width 1, and any other model is its own base.
            base_width: self.base_width.unwrap_or(if unit.is_some() { 1 } else { self.d_model }),
            base_depth: self.base_depth,
            depth_alpha: self.depth_alpha,
            input: self.input_alpha,
            output: self.output_alpha,
            attention: self.attention_scale.unwrap_or(parametrisation.attention),
            residual: self.residual_multiplier,
            given_scores: unit.map(|unit| unit.scores()).or(self.attention_multiplier),
            unit,
        }
    }

    /// Returns the sizes and multipliers with which u-μP computes its factors.
    fn unit_scaled(&self) -> UnitScaled {
        UnitScaled {
            d_model: self.d_model as f64,
            d_ff: self.d_ff as f64,
            d_head: (self.d_model / self.heads.max(1)) as f64,
            layers: self.decoder_layers as f64,
            vocab_size: self.vocab_size as f64,
            length: self.attention_length.unwrap_or(SHORTEST) as f64,
            attention: self.attn_softmax_alpha,
            activation: self.ffn_act_alpha,
            residual: self.res_alpha,
            attention_ratio: self.res_attn_ratio,
            loss: self.output_alpha,
        }
    }

    /// Returns a sort key and a parameter's multipliers, for an optimizer with steps of this size. `name` is the
    /// parameter's full name, and `part` its role in the model. Sorting parameters by the key puts equal multipliers
    /// next to each other, except under u-μP. The multipliers of u-μP are made for Adam alone.
    pub fn multipliers(&self, name: &str, part: Part, shape: &[i64], step_size: StepSize) -> (u8, Multipliers) {
        let scaled = self.scaled();
        if let Some(unit) = scaled.unit {
            return (0, unit.multipliers(name, part, shape));
        }
        if scaled.parametrisation.is_standard() {
            return (0, Multipliers::ONE);
        }
        let (stack, layers) = match name.starts_with("encoder.") {
            true => (StackName::Encoder, self.encoder_layers),
            false => (StackName::Decoder, self.decoder_layers),
        };
        // Each combination of role, `sums_over` (four values) and stack (two) has its own key.
        let key = 2 * (4 * part.role as u8 + part.sums_over as u8) + stack as u8;
        (key, scaled.parameter(part, layers, step_size))
    }

    /// Returns the factor of attention's scores qᵀk; `None` if it is the usual 1/√d_head.
    pub fn unusual_scores(&self) -> Option<f64> {
        let scaled = self.scaled();
        let is_unusual = scaled.given_scores.is_some() || scaled.attention != AttentionScale::InverseSqrt;
        is_unusual.then(|| scaled.scores(self.d_model / self.heads.max(1)))
    }
}

/// Errors if options of the parametrisation contradict each other or would do nothing.
pub(super) fn check(config: &TransformerConfig) -> Result<()> {
    let (chosen, name) = (config.scaled().parametrisation, config.parametrisation.as_str());
    // Options that some parametrisations need and the others do not read.
    let base_options = [
        ("base_width", config.base_width),
        ("base_depth", config.base_depth),
        ("attention_length", config.attention_length),
    ];
    for (option, value) in base_options {
        let is_needed = chosen.base.contains(&option);
        match value {
            None if is_needed => {
                let what = match option {
                    "attention_length" => "the number of tokens in a training sequence, usually segment_length",
                    _ => "that of the model for which learning rate and the like were tuned",
                };
                return Err(Error::invalid(format!("parametrisation {name:?} needs {option}: {what}")));
            }
            Some(value) if !is_needed => {
                return Err(Error::invalid(format!(
                "{option} = {value} would do nothing, as parametrisation is {name:?}: leave it out, or choose one of {}",
                names_where(|p| p.base.contains(&option))
            )))
            }
            Some(value) if value < 1 => return Err(Error::invalid(format!("{option} must be at least 1, got {value}"))),
            _ => {}
        }
    }
    for (option, value) in [
        ("input_alpha", config.input_alpha),
        ("output_alpha", config.output_alpha),
        ("residual_multiplier", config.residual_multiplier),
        ("attention_multiplier", config.attention_multiplier.unwrap_or(1.0)),
        ("attn_softmax_alpha", config.attn_softmax_alpha),
        ("ffn_act_alpha", config.ffn_act_alpha),
        ("res_alpha", config.res_alpha),
        ("res_attn_ratio", config.res_attn_ratio),
    ] {
        if !(value > 0.0 && value.is_finite()) {
            return Err(Error::invalid(format!("{option} must be greater than 0, got {value}")));
        }
    }
    if config.attention_multiplier.is_some() && config.attention_scale.is_some() {
        return Err(Error::invalid(
            "attention_scale and attention_multiplier both say the factor of attention's scores: leave one of them out",
        ));
    }
    check_unit_scaled(config, chosen)?;
    match config.depth_alpha {
        Some(alpha) if chosen.alpha.is_none() => {
            return Err(Error::invalid(format!(
            "depth_alpha = {alpha} would do nothing, as parametrisation is {name:?}: leave it out, or choose one of {}",
            names_where(|p| p.alpha.is_some())
        )))
        }
        Some(alpha) if !(0.5..=1.0).contains(&alpha) => {
            return Err(Error::invalid(format!("depth_alpha must lie in [0.5, 1], got {alpha}")))
        }
        _ => {}
    }
    let is_tensorized = config.attention == AttentionName::Tensorized;
    for (option, is_given) in scores_options(config) {
        if is_tensorized && is_given {
            return Err(Error::invalid(format!(
                "tensorized attention has no heads, so {option} would do nothing: leave it out"
            )));
        }
    }
    let schemes = config.schemes();
    // Schemes on the sphere, such as nGPT's, keep vectors at length 1.
    let all_on_sphere = schemes.all().all(|scheme| scheme.is_on_sphere());
    let given_option = scores_options(config).into_iter().find(|(_, is_given)| *is_given);
    if let (true, Some((option, _))) = (all_on_sphere, given_option) {
        return Err(Error::invalid(format!(
            "residual = {:?} sets the factor of attention's scores itself, so {option} would do nothing: leave it out",
            config.residual
        )));
    }
    let l2norm = l2_norm::SPEC.name;
    if !chosen.is_standard() && [config.encoder_norm(), config.decoder_norm()].contains(&l2norm) {
        return Err(Error::invalid(format!(
            "parametrisation {name:?} wants norms whose numbers are as large in every width, and those of {l2norm} fall \
             as 1/√d: choose rmsnorm or scalenorm"
        )));
    }
    let repbn = rep_bn::SPEC.name;
    if chosen.alpha.is_some() && [config.encoder_norm(), config.decoder_norm()].contains(&repbn) {
        return Err(Error::invalid(format!(
            "parametrisation {name:?} wants branches of one size, and {repbn} adds ηx, so that branches grow with the \
             residual stream: choose another norm, or parametrisation \"mup\""
        )));
    }
    // `alpha` is the exponent of the depth in the branches' factor. `own_depth` names a scheme whose residual stream is
    // not a plain sum of branches, and says why.
    if let (Some(_), Some((scheme, why))) = (chosen.alpha, config.schemes().own_depth()) {
        return Err(Error::invalid(format!(
            "parametrisation {name:?} multiplies branches by a power of the depth, for their sum; under residual = \
             {scheme:?} {why}: choose another scheme, or parametrisation \"mup\""
        )));
    }
    let on_sphere = schemes.all().find(|scheme| scheme.is_on_sphere());
    let on_sphere = on_sphere.map(|scheme| format!("residual = {:?}", scheme.name()));
    // Parts of a model for which only the standard parametrisation is defined.
    let undefined = [
        (is_tensorized, "attention = \"tensorized\""),
        (config.fixnorm, "fixnorm = true"),
        (config.logit_scale, "logit_scale = true"),
        (config.value_embeddings, "value_embeddings = true"),
        (config.smear, "smear = true"),
        (on_sphere.is_some(), on_sphere.as_deref().unwrap_or_default()),
    ];
    let conflict = undefined.into_iter().find(|(is_on, _)| *is_on && !chosen.is_standard());
    match conflict {
        Some((_, what)) => Err(Error::invalid(format!(
            "parametrisation {name:?} does not say what becomes of {what}: leave that out, or take parametrisation \
             \"standard\""
        ))),
        None => Ok(()),
    }
}

/// The shortest `attention_length`. u-μP's factor of attention's output is infinite where the length's logarithm is 0.
const SHORTEST: i64 = 2;

/// The schemes that add F(x) to x without factors and place only norms before and after F.
const PLAIN_SUMS: [&str; 4] = ["prenorm", "sandwich", "peri-ln", "olmo2"];

/// Errors if the model is not one for which u-μP is defined, or if options of u-μP are given without it.
fn check_unit_scaled(config: &TransformerConfig, chosen: &Parametrisation) -> Result<()> {
    let own_options = [
        ("attn_softmax_alpha", config.attn_softmax_alpha),
        ("ffn_act_alpha", config.ffn_act_alpha),
        ("res_alpha", config.res_alpha),
        ("res_attn_ratio", config.res_attn_ratio),
    ];
    if !chosen.is_unit_scaled {
        return match own_options.into_iter().find(|(_, value)| *value != 1.0) {
            Some((option, value)) => Err(Error::invalid(format!(
                "{option} = {value} would do nothing, as parametrisation is {:?}: leave it out, or choose {}",
                chosen.name,
                names_where(|p| p.is_unit_scaled)
            ))),
            None => Ok(()),
        };
    }
    if let Some(length) = config.attention_length.filter(|length| *length < SHORTEST) {
        return Err(Error::invalid(format!("attention_length must be at least {SHORTEST}, got {length}")));
    }
    let has_no_dropout = |rate: Option<f64>| rate.unwrap_or(0.0) == 0.0;
    let is_supported = |norm: &NormName| {
        // The names of rmsnorm's families begin with "rmsnorm:".
        let family = norm.as_str().split(':').next().unwrap_or_default();
        [rms_norm::SPEC.name, layer_norm::SPEC.name].contains(&family)
    };
    let norms = "rmsnorm, one of its families, or layernorm";
    // Each rule is an option, the required value in words, and whether the option has this value.
    let rules = [
        ("architecture", "\"decoder-only\"", !config.has_encoder()),
        ("residual", "one of prenorm, sandwich, peri-ln, olmo2", {
            config.schemes().all().all(|scheme| PLAIN_SUMS.contains(&scheme.name()))
        }),
        // `norm` holds only if no `decoder_norm` replaces it.
        ("norm", norms, config.decoder_norm.is_some() || is_supported(&config.norm)),
        ("decoder_norm", norms, config.decoder_norm.as_ref().is_none_or(is_supported)),
        ("activation", "\"swiglu\"", config.activation == Activation::SwiGlu),
        ("positions", "\"rotary\" or \"none\"", matches!(config.positions, Positions::Rotary | Positions::None)),
        ("tie_embeddings", "\"none\"", config.tie_embeddings == Ties::None),
        ("dropout", "0", config.dropout == 0.0),
        ("embedding_dropout", "0", has_no_dropout(config.embedding_dropout)),
        ("attention_dropout", "0", has_no_dropout(config.attention_dropout)),
        ("activation_dropout", "0", has_no_dropout(config.activation_dropout)),
    ];
    // Options that must keep their defaults.
    let excluded = [
        "init",
        "output_bias",
        "qk_norm",
        "v_norm",
        "qk_l2norm",
        "output_gate",
        "sinks",
        "score_softcap",
        "logit_softcap",
        "input_alpha",
        "residual_multiplier",
        "attention_multiplier",
        "attention_scale",
    ];
    let json = |config: &TransformerConfig| serde_json::to_value(config).expect("options are plain data");
    let (given, default) = (json(config), json(&TransformerConfig::default()));
    let wrong = rules
        .into_iter()
        .filter(|(_, _, is_right)| !is_right)
        .map(|(option, wanted, _)| format!("{option} must be {wanted}, got {}", given[option]));
    let given_although_excluded = excluded
        .into_iter()
        .filter(|option| given[option] != default[option])
        .map(|option| format!("{option} = {} must be left out", given[option]));
    let violations: Vec<String> = wrong.chain(given_although_excluded).collect();
    match violations.is_empty() {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "parametrisation {:?} is defined for language models of the paper's kind: {}",
            chosen.name,
            violations.join("; ")
        ))),
    }
}

/// Returns the names of the options that set the factor of attention's scores, each with true if it is given.
pub(super) fn scores_options(config: &TransformerConfig) -> [(&'static str, bool); 2] {
    [
        ("attention_scale", config.attention_scale.is_some()),
        ("attention_multiplier", config.attention_multiplier.is_some()),
    ]
}

/// Returns the names of the parametrisations for which `is_so` is true, for error messages.
fn names_where(is_so: impl Fn(&Parametrisation) -> bool) -> String {
    PARAMETRISATIONS.iter().filter(|p| is_so(p)).map(|p| p.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stack_has_its_own_depth() {
        let text = r#"{"parametrisation": "completep", "base_width": 256, "base_depth": 2, "depth_alpha": 0.5,
            "encoder_layers": 8, "decoder_layers": 32}"#;
        let config: TransformerConfig = crate::config::from_json("model", text).unwrap();
        // The encoder has m_L = 8/2, the decoder 32/2. Branches are multiplied by m_L^(−1/2). The width has m_d = 2.
        assert_eq!([8, 32].map(|layers| config.scaled().branch(layers)), [0.5, 0.25]);
        let part = |name, dimensions| parametrisation::part(name, dimensions, parametrisation::DeclaredAs::Weights);
        let multipliers_of =
            |name, dimensions| config.multipliers(name, part(name, dimensions), &[1], StepSize::Entries).1;
        let encoder = Multipliers { init: 0.5f64.sqrt(), lr: 0.25, weight_decay: 2.0, eps: 0.25 };
        let found = multipliers_of("encoder.layers.0.linear1.weight", 2);
        assert!((found.init - encoder.init).abs() < 1e-15);
        assert_eq!(Multipliers { init: encoder.init, ..found }, encoder);
        let decoder = Multipliers { init: 1.0, lr: 0.25, weight_decay: 0.0, eps: 0.125 };
        assert_eq!(multipliers_of("decoder.layers.0.linear1.bias", 1), decoder);
        assert_eq!(multipliers_of("embedding.weight", 2), Multipliers { eps: 0.5, ..Multipliers::ONE });
        assert_eq!(config.scaled().logits(), 0.5);
    }
}
