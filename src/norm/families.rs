//! Norms named after families of models. Each is a norm of the table with fixed values for some options (docs/spec.md
//! §1.16).

use super::conventions::KEYWORDS;
use super::rms_norm;
use super::spec::{NormContext, Spec, NORM_EPS};
use crate::options::Options;
use serde_json::{json, Value};

/// A norm of the table for which some options are set.
pub struct Family {
    /// The norm's name, a colon, and the family's name.
    pub name: &'static str,
    pub equation: &'static str,
    pub source: &'static str,
    pub spec: &'static Spec,
    /// The value of ε, unless the configuration sets one.
    pub eps: f64,
    /// Returns the values of the other options that the family sets, by name.
    overrides: fn() -> Value,
}

/// Every family that a model can use by name.
pub static FAMILIES: &[Family] = &[
    Family {
        name: "rmsnorm:llama",
        equation: "y = γ⊙round(x/√(mean x²+ε)), rounded to x's type before the product; ε = 1e-6",
        source: "Llama, Mistral, Qwen3; transformers' LlamaRMSNorm",
        spec: &rms_norm::SPEC,
        eps: 1e-6,
        overrides: || json!({"rmsnorm_cast": "before"}),
    },
    Family {
        name: "rmsnorm:olmo",
        equation: "y = γ⊙x/√(mean x²+ε), rounded once; ε = 1e-6",
        source: "OLMo 2; transformers' Olmo2RMSNorm",
        spec: &rms_norm::SPEC,
        eps: 1e-6,
        overrides: || json!({}),
    },
    Family {
        name: "rmsnorm:gemma",
        equation: "y = (1+w)⊙x/√(mean x²+ε), w = 0 at the start, rounded once; ε = 1e-6",
        source: "Gemma 1 to 3, Qwen3-Next; transformers' GemmaRMSNorm",
        spec: &rms_norm::SPEC,
        eps: 1e-6,
        overrides: || json!({"rmsnorm_zero_centred": true}),
    },
    Family {
        name: "rmsnorm:gemma4",
        equation: "y = γ⊙x/√(mean x²+ε), rounded once; ε = 1e-6",
        source: "Gemma 4, whose norm of values has no weight; transformers' Gemma4RMSNorm",
        spec: &rms_norm::SPEC,
        eps: 1e-6,
        overrides: || json!({}),
    },
    Family {
        name: "rmsnorm:deepseek-v4",
        equation: "y = round(1/√(mean x²+ε))·x, nothing learned, the scale rounded to x's type; ε = 1e-6",
        source: "DeepSeek-V4's queries; transformers' DeepseekV4UnweightedRMSNorm",
        spec: &rms_norm::SPEC,
        eps: 1e-6,
        overrides: || json!({"rmsnorm_weight": false, "rmsnorm_cast": "scale"}),
    },
    Family {
        name: "rmsnorm:nanochat",
        equation: "y = x/√(mean x²+ε), nothing learned, rounded once; ε = 2⁻²³",
        source: "nanochat, modded-nanogpt; torch's rms_norm without a weight",
        spec: &rms_norm::SPEC,
        eps: f32::EPSILON as f64,
        overrides: || json!({"rmsnorm_weight": false}),
    },
    Family {
        name: "rmsnorm:original",
        equation: "y = γ⊙x/(√(mean x²)+ε), ε = 1e-8",
        source: "Zhang & Sennrich 2019, release",
        spec: &rms_norm::SPEC,
        eps: 1e-8,
        overrides: || json!({"rmsnorm_eps_place": "outside"}),
    },
    Family {
        name: "rmsnorm:partial",
        equation: "y = γ⊙x/(√(mean of the first ⌊d/16⌋ numbers' x²)+ε), ε = 1e-8 (pRMSNorm)",
        source: "Zhang & Sennrich 2019, §4, release",
        spec: &rms_norm::SPEC,
        eps: 1e-8,
        overrides: || json!({"rmsnorm_eps_place": "outside", "rmsnorm_part": 0.0625}),
    },
];

impl Family {
    /// Returns `given` with the family's values: ε if `given` has none, and all other options of rmsnorm.
    pub fn options(&self, given: &Options) -> Options {
        let mut options = given.clone();
        if given.get(&NORM_EPS).is_none() {
            options.set(&NORM_EPS, json!(self.eps)).expect("ε is a number");
        }
        // An option of rmsnorm that the family does not set has its default. (`field` takes a heading of --help.)
        let overrides = (self.overrides)();
        for option in KEYWORDS.iter().filter_map(|keyword| keyword.option).filter(|o| o.name() != NORM_EPS.name) {
            let value = overrides.get(option.name()).cloned().unwrap_or_else(|| option.field("").default);
            options.set(option, value).expect("a family says what its options may be");
        }
        options
    }

    /// Returns the family as JSON, from which Python builds the module.
    pub fn describe(&self) -> Value {
        let keyword_arguments =
            self.spec.keyword_arguments(&NormContext { options: &self.options(&Options::NONE), ..NormContext::ANY });
        json!({
            "name": self.name,
            "equation": self.equation,
            "source": self.source,
            "norm": self.spec.name,
            "settings": keyword_arguments,
        })
    }
}
