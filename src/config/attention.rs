//! Checks of the attention options.

use super::parametrisation::scores_options;
use super::{AttentionName, Positions, TrainingConfig, TransformerConfig};
use crate::error::{Error, Result};
use crate::norm::{rms_norm, Spec};
use crate::residual::{Change, LayerContext, NormOver, Point, SchemeRef, StackName, ValueNorm, SCHEMES};

/// Errors if attention options contradict each other or the residual scheme, or would do nothing.
pub(super) fn check(config: &TransformerConfig) -> Result<()> {
    check_norms_before_products(config)?;
    check_qk_norm(config)?;
    check_unweighted(config)?;
    check_tokens(config)?;
    match config.attention {
        AttentionName::Tensorized => check_tensorized(config),
        _ => Ok(()),
    }
}

/// Errors if a softcap, of logits or of scores, is not positive.
pub(super) fn check_softcaps(config: &TransformerConfig) -> Result<()> {
    for (name, cap) in [("logit_softcap", config.logit_softcap), ("score_softcap", config.score_softcap)] {
        if let Some(cap) = cap.filter(|cap| !(*cap > 0.0 && cap.is_finite())) {
            return Err(Error::invalid(format!("{name} must be greater than 0, got {cap}; none leaves it out")));
        }
    }
    Ok(())
}

/// Errors if `kv_heads` does not divide `heads`.
pub(super) fn check_sizes(config: &TransformerConfig) -> Result<()> {
    match config.kv_heads {
        Some(kv_heads) if kv_heads < 1 || config.heads % kv_heads != 0 => {
            let divisors: Vec<String> =
                (1..=config.heads).filter(|n| config.heads % n == 0).map(|n| n.to_string()).collect();
            Err(Error::invalid(format!(
                "kv_heads must divide heads = {}, got {kv_heads}; it may be {}",
                config.heads,
                divisors.join(", ")
            )))
        }
        _ => Ok(()),
    }
}

/// Errors if options add norms of queries, keys or values that the residual scheme already has, or if such a norm keeps
/// statistics. Those statistics are means over a stack's tokens, but rows of queries and keys belong to heads, or in
/// cross-attention to another stack.
///
/// A scheme makes a [`Change`], such as a norm, at a [`Point`] inside a sublayer. Points before the products lie on q,
/// k and v, before attention multiplies them.
fn check_norms_before_products(config: &TransformerConfig) -> Result<()> {
    let schemes = config.schemes();
    let is_norm_on_qkv = |point: Point, change: &Change| point.is_before_products() && change.norm().is_some();
    let norm_scheme = schemes.all().find(|scheme| has_change_inside(config, scheme, is_norm_on_qkv));
    // `Unit` scales rows to length 1. It conflicts with the options as a norm does, but keeps no statistics.
    let is_unit_on_qkv =
        |point: Point, change: &Change| point.is_before_products() && matches!(change, Change::Unit(_));
    let unit_scheme = schemes.all().find(|scheme| has_change_inside(config, scheme, is_unit_on_qkv));
    let options = [("qk_norm", config.qk_norm), ("qk_l2norm", config.qk_l2norm.is_some())];
    let normalising_scheme = norm_scheme.as_ref().or(unit_scheme.as_ref());
    let chosen_option = options.iter().find(|(_, is_on)| *is_on);
    if let (Some(scheme), Some((option, _))) = (normalising_scheme, chosen_option) {
        return Err(Error::invalid(format!(
            "residual {:?} has norms on queries and keys of its own: leave {option} out",
            scheme.name()
        )));
    }
    let is_norm_on_v = |point: Point, change: &Change| point == Point::Value && change.norm().is_some();
    let value_scheme = schemes.all().find(|scheme| has_change_inside(config, scheme, is_norm_on_v));
    if let (Some(scheme), Some(norm)) = (value_scheme, config.v_norm) {
        return Err(Error::invalid(format!(
            "residual {:?} has norms on values of its own, so v_norm = {:?} would be a second one: leave it out",
            scheme.name(),
            norm.name()
        )));
    }
    check_qk_l2norm(config)?;
    // `owner` says, for the error message, which scheme or option puts norms on q, k or v.
    let owner = match norm_scheme {
        Some(scheme) => format!("residual {:?} has norms on queries and keys", scheme.name()),
        None if config.qk_norm => "qk_norm has norms on queries and keys".into(),
        None if config.v_norm.is_some() => "v_norm has norms on values".into(),
        None => return Ok(()),
    };
    let has_statistics = |norm: &&str| crate::norm::find(norm).is_ok_and(Spec::has_statistics);
    match [config.encoder_norm(), config.decoder_norm()].into_iter().find(has_statistics) {
        Some(norm) => Err(Error::invalid(format!("{owner}, which {norm} cannot be: choose a norm without statistics"))),
        None => Ok(()),
    }
}

/// Errors if options of `qk_norm` make no sense or would do nothing.
fn check_qk_norm(config: &TransformerConfig) -> Result<()> {
    let scale = config.qk_norm_scale;
    if !(scale > 0.0 && scale.is_finite()) {
        return Err(Error::invalid(format!("qk_norm_scale must be greater than 0, got {scale}")));
    }
    // Each option of qk_norm, with whether it differs from its default.
    let options = [
        ("qk_norm_over", config.qk_norm_over != NormOver::Head),
        ("qk_norm_after_rotation", config.qk_norm_after_rotation),
        ("qk_norm_weight", !config.qk_norm_weight),
        ("qk_norm_scale", scale != 1.0),
    ];
    let given_option = options.iter().find(|(_, is_given)| *is_given);
    if let (Some((option, _)), false) = (given_option, config.qk_norm) {
        return Err(Error::invalid(format!("{option} is an option of qk_norm, which is off: leave it out")));
    }
    if config.qk_norm_after_rotation && config.positions != Positions::Rotary {
        return Err(Error::invalid(format!(
            "qk_norm_after_rotation would do nothing with positions = {:?}, which rotate nothing: leave it out, or choose \
             positions = \"rotary\"",
            config.positions.name()
        )));
    }
    Ok(())
}

/// Errors if an option leaves out the weight of a norm although a stack's norm is not rmsnorm. Only
/// rmsnorm works without one.
fn check_unweighted(config: &TransformerConfig) -> Result<()> {
    let options = [
        ("qk_norm_weight = false", !config.qk_norm_weight),
        ("v_norm = \"unweighted\"", config.v_norm == Some(ValueNorm::Unweighted)),
    ];
    let Some((option, _)) = options.iter().find(|(_, is_on)| *is_on) else { return Ok(()) };
    // `encoder_norm` also has a value in a model without an encoder; there it is skipped.
    let norms = [config.encoder_norm(), config.decoder_norm()].into_iter().skip(usize::from(!config.has_encoder()));
    for norm in norms {
        if crate::norm::find(norm)?.name != rms_norm::SPEC.name {
            return Err(Error::invalid(format!(
                "{option} leaves out the weight of rmsnorm, and this model has norm {norm:?}: leave it out, or choose \
                 rmsnorm or one of its families"
            )));
        }
    }
    Ok(())
}

/// Errors if `qk_l2norm` conflicts with other options. `qk_l2norm` scales queries and keys to length 1, and multiplies
/// scores by a learned factor.
fn check_qk_l2norm(config: &TransformerConfig) -> Result<()> {
    let Some(length) = config.qk_l2norm else { return Ok(()) };
    // The factor begins at log2(L² − L), where L is `length`. For L = 1 this would be log2(0).
    if length < 2 {
        return Err(Error::invalid(format!("qk_l2norm must be a length of at least 2, got {length}")));
    }
    if config.qk_norm {
        return Err(Error::invalid("qk_norm and qk_l2norm both norm queries and keys: leave one of them out"));
    }
    if let Some((option, _)) = scores_options(config).into_iter().find(|(_, is_given)| *is_given) {
        return Err(Error::invalid(format!(
            "qk_l2norm learns the factor of scores, so {option} would do nothing: leave it out"
        )));
    }
    Ok(())
}

/// Errors if `value_embeddings` or `smear` is on in a model with an encoder. Both are defined for language models only.
fn check_tokens(config: &TransformerConfig) -> Result<()> {
    let options = [("value_embeddings", config.value_embeddings), ("smear", config.smear)];
    match options.into_iter().find(|(_, is_on)| *is_on && config.has_encoder()) {
        Some((option, _)) => Err(Error::invalid(format!(
            "{option} is a language model's: give architecture = \"decoder-only\", or leave it out"
        ))),
        None => Ok(()),
    }
}

/// Errors if an option cannot be combined with tensorized attention.
fn check_tensorized(config: &TransformerConfig) -> Result<()> {
    if config.has_encoder() {
        return Err(Error::invalid(
            "attention = \"tensorized\" is a language model's: give architecture = \"decoder-only\", or leave it out",
        ));
    }
    let options = [
        ("qk_norm", config.qk_norm),
        ("qk_l2norm", config.qk_l2norm.is_some()),
        ("v_norm", config.v_norm.is_some()),
        ("output_gate", config.output_gate.is_some()),
        ("sinks", config.sinks),
        ("score_softcap", config.score_softcap.is_some()),
        ("value_embeddings", config.value_embeddings),
    ];
    if let Some((option, _)) = options.iter().find(|(_, is_on)| *is_on) {
        return Err(Error::invalid(format!(
            "tensorized attention has no heads, so {option} would do nothing: leave it out"
        )));
    }
    if let Some(kv_heads) = config.kv_heads {
        return Err(Error::invalid(format!(
            "tensorized attention has no heads, so kv_heads = {kv_heads} would do nothing: leave it out"
        )));
    }
    if let Some(p) = config.attention_dropout {
        return Err(Error::invalid(format!(
            "tensorized attention has no weights to drop, so attention_dropout = {p} would do nothing: leave it out"
        )));
    }
    // Between attention's projections are q, k and v, and the joined outputs of the heads.
    let is_between_projections = |point: Point, _: &Change| point.is_before_products() || point == Point::AfterHeads;
    let needs_heads = |scheme: &SchemeRef| has_change_inside(config, scheme, is_between_projections);
    if let Some(scheme) = config.schemes().all().find(|scheme| needs_heads(scheme)) {
        let usable: Vec<&str> =
            SCHEMES.iter().filter(|scheme| !needs_heads(&SchemeRef::Table(scheme))).map(|s| s.name).collect();
        return Err(Error::invalid(format!(
            "residual {:?} has a part between attention's projections, and tensorized attention has no heads: choose one \
             of {}, or options of it without that part",
            scheme.name(),
            usable.join(", ")
        )));
    }
    Ok(())
}

/// Errors if `qk_clip` is on but would not work. QK-clip multiplies a head's rows of the query and key matrices by √γ,
/// so that the head's scores are multiplied by γ. Norms of queries and keys undo this, and so do optimizers that
/// rescale matrices after an update.
pub(super) fn check_qk_clip(model: &TransformerConfig, training: &TrainingConfig) -> Result<()> {
    if training.qk_clip == 0.0 {
        return Ok(());
    }
    // After such a change, the queries or keys are no longer proportional to the rows of their matrix.
    let undoes_scaling = |point: Point, change: &Change| {
        use Change::{Mix, Norm, Shift, Unit};
        point.is_before_products()
            && point != Point::Value
            && matches!(change, Norm(_) | Shift(_) | Unit(_) | Mix { .. })
    };
    let options = [
        ("attention = \"tensorized\"", model.attention == AttentionName::Tensorized),
        ("qk_norm", model.qk_norm),
        ("qk_l2norm", model.qk_l2norm.is_some()),
        ("score_softcap", model.score_softcap.is_some()),
        ("unit_matrices", training.unit_matrices),
        ("muon_on_sphere", training.muon_on_sphere),
    ];
    let conflicting_option = options.iter().find(|(_, is_on)| *is_on).map(|(option, _)| option.to_string());
    let schemes = model.schemes();
    let conflicting_scheme = schemes.all().find(|scheme| has_change_inside(model, scheme, undoes_scaling));
    match conflicting_option.or_else(|| conflicting_scheme.map(|scheme| format!("residual = {:?}", scheme.name()))) {
        Some(other) => Err(Error::invalid(format!(
            "qk_clip = {} scales the rows of queries and keys so that the logits of a head shrink alike, and with {other} \
             they would not: leave one of them out",
            training.qk_clip
        ))),
        None => Ok(()),
    }
}

/// True if, inside any sublayer of the model, the scheme makes a change for which `is_sought(point, change)` is true.
/// `point` is where the change acts in the sublayer.
fn has_change_inside(
    config: &TransformerConfig,
    scheme: &SchemeRef,
    is_sought: impl Fn(Point, &Change) -> bool,
) -> bool {
    let stacks = StackName::of(&config.outline());
    // The place of each stack's first sublayer.
    let mut first_places = stacks.iter().map(|stack| config.place(*stack, 0));
    first_places.any(|first| {
        // A scheme may differ from layer to layer, so each layer is visited.
        (0..first.layers())
            .flat_map(|layer| LayerContext { layer, ..first }.each())
            .any(|place| scheme.inside(&place).iter().any(|(point, change)| is_sought(*point, change)))
    })
}

#[cfg(test)]
mod tests {
    use crate::config::{from_json, TransformerConfig};

    #[test]
    fn norms_before_products_have_no_statistics_and_one_owner() {
        // Expects that a model with these options is refused with a message that contains `part`.
        let check = |options: &str, part: &str| {
            let text = format!(r#"{{"vocab_size": 10, {options}}}"#);
            let e = from_json::<TransformerConfig>("model", &text).unwrap().validate().unwrap_err().to_string();
            assert!(e.contains(part), "{e}");
        };
        check(r#""norm": "powernorm-v", "qk_norm": true"#, "which powernorm-v cannot");
        check(
            r#""encoder_norm": "batchnorm", "residual": "olmo2""#,
            r#""olmo2" has norms on queries and keys, which batch"#,
        );
        check(r#""norm": "powernorm", "residual": "prenorm*1,hybridnorm""#, r#"residual "hybridnorm" has norms"#);
        check(r#""residual": "hybridnorm", "qk_norm": true"#, "leave qk_norm out");
        check(r#""residual": "hybridnorm", "qk_l2norm": 72"#, "leave qk_l2norm out");
        check(r#""residual": "ngpt", "qk_l2norm": 72"#, "leave qk_l2norm out");
        check(r#""residual": "prenorm*1,ngpt", "qk_norm": true"#, "leave qk_norm out");
        check(r#""residual": "ngpt", "attention_scale": "inverse""#, "attention_scale would do nothing");
        check(r#""residual": "ngpt", "attention_multiplier": 0.3"#, "attention_multiplier would do nothing");
        check(r#""qk_norm": true, "qk_l2norm": 72"#, "leave one of them out");
        check(r#""qk_l2norm": 72, "attention_scale": "inverse""#, "attention_scale would do nothing");
        check(r#""qk_l2norm": 1"#, "at least 2, got 1");
        check(r#""qk_norm_scale": 1.2"#, "qk_norm_scale is an option of qk_norm, which is off");
        check(r#""qk_norm_weight": false"#, "qk_norm_weight is an option of qk_norm");
        check(r#""qk_norm": true, "qk_norm_scale": -1"#, "greater than 0, got -1");
        check(r#""qk_norm": true, "qk_norm_after_rotation": true"#, r#"nothing with positions = "twt""#);
        check(r#""qk_norm": true, "qk_norm_weight": false"#, r#"this model has norm "layernorm""#);
        check(r#""norm": "rmsnorm", "encoder_norm": "dyt", "v_norm": "unweighted""#, r#"has norm "dyt""#);
        check(r#""norm": "batchnorm", "v_norm": "weighted""#, "v_norm has norms on values, which batchnorm");
        check(r#""residual": "hybridnorm", "v_norm": "weighted""#, "norms on values of its own");
        check(r#""score_softcap": -50"#, "score_softcap must be greater than 0, got -50");
        check(r#""logit_softcap": 0"#, "logit_softcap must be greater than 0, got 0");
        let tensorized = r#""architecture": "decoder-only", "attention": "tensorized""#;
        check(&format!(r#"{tensorized}, "residual": "olmo2""#), "between attention's projections");
        check(&format!(r#"{tensorized}, "output_gate": "head""#), "no heads, so output_gate would do nothing");
        check(&format!(r#"{tensorized}, "sinks": true"#), "no heads, so sinks would do nothing");
        check(&format!(r#"{tensorized}, "score_softcap": 5"#), "no heads, so score_softcap would do nothing");
        check(r#""smear": true"#, "smear is a language model's");
        check(&format!(r#"{tensorized}, "value_embeddings": true"#), "no heads, so value_embeddings would do nothing");
        check(&format!(r#"{tensorized}, "v_norm": "weighted""#), "no heads, so v_norm would do nothing");
    }
}
