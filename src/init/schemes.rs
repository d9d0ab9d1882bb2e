//! The entries of the table of initialisations.

use super::{embedding, xavier_normal, xavier_uniform, Fill, Init, Role, Table};
use crate::choice;
use crate::options::{option_spec, positive};
use crate::residual::{LayerContext, StackName, Sublayer};

pub static XAVIER: Init = Init {
    name: "xavier",
    definition: "every linear Xavier normal, std √(2/(fan_in + fan_out)), q, k and v each for itself",
    source: "Glorot & Bengio 2010",
    options: &[],
    linear: |_, fan_in, fan_out, _| xavier_normal(1.0, fan_in, fan_out),
    bias: |_, _| Fill::Constant(0.0),
    embedding: |_, model, _| embedding(model.d_model),
    output: |d, v, _| xavier_normal(1.0, d, v),
    has_fixed_std: false,
};

pub static SMALL: Init = Init {
    name: "smallinit",
    definition: "attention q, k, v, out: std √(2/(5d)); feed-forward √(2/(d + d_ff))",
    source: "Nguyen & Salazar 2019, §2.2",
    linear: |role, fan_in, fan_out, place| match role {
        Role::FeedForward1 | Role::FeedForward2 | Role::Gate | Role::OutputGate => xavier_normal(1.0, fan_in, fan_out),
        // All matrices of attention have the std √(2/(5d)), which is Xavier's if fan_in + fan_out = d + 4d.
        _ => xavier_normal(1.0, place.model.d_model, 4 * place.model.d_model),
    },
    ..XAVIER
};

pub static FAIRSEQ: Init = Init {
    name: "fairseq",
    definition: "Xavier uniform; q, k, v gain 1/√2; an untied output N(0, 1/d)",
    source: "fairseq; Nguyen & Salazar 2019, App C",
    linear: |role, fan_in, fan_out, _| match role {
        Role::Query | Role::Key | Role::Value => xavier_uniform(0.5f64.sqrt(), fan_in, fan_out),
        _ => xavier_uniform(1.0, fan_in, fan_out),
    },
    output: |d, _, _| embedding(d),
    ..XAVIER
};

/// Returns the distribution of weights and biases in torch's `nn.Linear`: uniform between ±1/√fan_in.
fn torch_linear(fan_in: i64) -> Fill {
    Fill::Uniform { bound: (fan_in as f64).powf(-0.5) }
}

pub static FAIRSEQ_0_12_2: Init = Init {
    name: "fairseq-0.12.2",
    definition: "attention as in fairseq; fc1, fc2, their biases and those of q, k and v U(−a, a), a = 1/√fan_in; \
                 embeddings and an untied output N(0, 1/d)",
    source: "fairseq 0.12.2",
    linear: |role, fan_in, fan_out, place| match role {
        Role::FeedForward1 | Role::FeedForward2 | Role::Gate | Role::OutputGate => torch_linear(fan_in),
        _ => (FAIRSEQ.linear)(role, fan_in, fan_out, place),
    },
    bias: |role, fan_in| match role {
        Role::AttentionOutput => Fill::Constant(0.0),
        _ => torch_linear(fan_in),
    },
    ..FAIRSEQ
};

pub static B2T: Init = Init {
    name: "b2t",
    definition: "fairseq-0.12.2's, and the matrices of a stack of L layers × L^(−1/2)",
    source: "Takase et al. 2023",
    linear: |role, fan_in, fan_out, place| {
        (FAIRSEQ_0_12_2.linear)(role, fan_in, fan_out, place).times((place.layers() as f64).powf(-0.5))
    },
    ..FAIRSEQ_0_12_2
};

pub static DEEPNORM: Init = Init {
    name: "deepnorm",
    definition:
        "Xavier normal, gain β on fc1, fc2, v, out; β_e = 0.87(N⁴M)^(−1/16), β_d = (12M)^(−1/4), one stack (8L)^(−1/4)",
    source: "Wang et al. 2022a; Liu et al. 2023, eq 3",
    linear: |role, fan_in, fan_out, place| xavier_normal(on_values(role, deepnorm_beta(place)), fan_in, fan_out),
    ..XAVIER
};

/// Returns DeepNorm's β, the gain of the initial values. The formulas are for an encoder, for a decoder, and for a
/// single stack. n, m and l are the numbers of layers in these stacks.
fn deepnorm_beta(place: &LayerContext) -> f64 {
    place.constant(
        |n, m| 0.87 * (n.powi(4) * m).powf(-1.0 / 16.0),
        |_, m| (12.0 * m).powf(-0.25),
        |l| (8.0 * l).powf(-0.25),
    )
}

pub static SUBLN: Init = Init {
    name: "subln",
    definition: "Xavier normal, gain γ on fc1, fc2, v, out but cross-attention's; γ_e = √(ln 3M·ln 2N/3), γ_d = √(ln 3M), one stack √(ln 2L)",
    source: "Wang et al. 2022b",
    linear: |role, fan_in, fan_out, place| {
        let gain = if place.sublayer == Sublayer::CrossAttention { 1.0 } else { subln_gamma(place) };
        xavier_normal(on_values(role, gain), fan_in, fan_out)
    },
    ..XAVIER
};

/// Returns Sub-LN's γ, the gain of the initial values. The formulas are for an encoder, for a decoder, and for a single
/// stack. n, m and l are the numbers of layers in these stacks.
fn subln_gamma(place: &LayerContext) -> f64 {
    place.constant(
        |n, m| ((3.0 * m).ln() * (2.0 * n).ln() / 3.0).sqrt(),
        |_, m| (3.0 * m).ln().sqrt(),
        |l| (2.0 * l).ln().sqrt(),
    )
}

choice! {
    pub enum DsInitMode ("ds_init_mode") { Paper = "paper", Release = "release" }
}

option_spec! {
    /// Factor α of ds-init.
    DS_ALPHA ("ds_init_alpha"): f64 = 1.0;
    /// Bound of ds-init: proportional to 1/√l (paper) or l^(−1/4) (release) in layer l.
    DS_MODE ("ds_init_mode"): DsInitMode = DsInitMode::Paper;
}

pub static DS_INIT: Init = Init {
    name: "ds-init",
    definition: "U(−a, a), a = √(6/(fan_in + fan_out))·α/√l in layer l of its stack",
    source: "Zhang et al. 2019 (DS-Init)",
    options: &[&DS_ALPHA, &DS_MODE],
    linear: |_, fan_in, fan_out, place| {
        let depth = (place.layer + 1) as f64;
        let shrink = match place.options.get(&DS_MODE) {
            DsInitMode::Paper => depth.powf(-0.5),
            DsInitMode::Release => depth.powf(-0.25),
        };
        xavier_uniform(place.options.get(&DS_ALPHA) * shrink, fan_in, fan_out)
    },
    output: |d, v, _| xavier_uniform(1.0, d, v),
    ..XAVIER
};

pub static T_FIXUP: Init = Init {
    name: "t-fixup",
    definition: "Xavier uniform; q, k × 1/√2; encoder v, out, fc1, fc2 × 0.67·N^(−1/4); decoder's × (9M)^(−1/4); embeddings std d^(−1/2)·(9N)^(−1/4) or (9M)^(−1/4)",
    source: "Huang et al. 2020",
    options: &[],
    linear: |role, fan_in, fan_out, place| match role {
        Role::Query | Role::Key => xavier_uniform(0.5f64.sqrt(), fan_in, fan_out),
        Role::Gate | Role::OutputGate => xavier_uniform(1.0, fan_in, fan_out),
        _ => xavier_uniform(t_fixup_gain(place), fan_in, fan_out),
    },
    embedding: |table, model, _| {
        let decoder = (9.0 * model.decoder_layers as f64).powf(-0.25);
        let scale = match table {
            Table::Target => decoder,
            _ if !model.has_encoder => decoder,
            Table::Source | Table::Shared => (9.0 * model.encoder_layers as f64).powf(-0.25),
        };
        Fill::Normal { std: scale * (model.d_model as f64).powf(-0.5) }
    },
    output: |d, v, _| xavier_uniform(1.0, d, v),
    ..XAVIER
};

/// Returns the gain by which T-Fixup multiplies initial values in this stack.
fn t_fixup_gain(place: &LayerContext) -> f64 {
    match place.stack {
        StackName::Encoder => 0.67 * (place.encoder_layers() as f64).powf(-0.25),
        StackName::Decoder => (9.0 * place.decoder_layers() as f64).powf(-0.25),
    }
}

pub static R_FIXUP: Init = Init {
    name: "r-fixup",
    definition:
        "L = 2N + 3M branches (one stack 2L): q, k, v Xavier normal × L^(−1/6), fc1 × L^(−1/2), out, fc2 and an untied output zero",
    source: "Zhang et al. 2019 (Fixup)",
    linear: |role, fan_in, fan_out, place| {
        // `branches` is L, the number of additions to residual streams. With an encoder, a decoder's layer has three
        // sublayers, one of them cross-attention.
        let branches = match place.model.has_encoder {
            true => 2 * place.encoder_layers() + 3 * place.decoder_layers(),
            false => place.additions(),
        } as f64;
        match role {
            Role::Query | Role::Key | Role::Value => xavier_normal(branches.powf(-1.0 / 6.0), fan_in, fan_out),
            Role::FeedForward1 => xavier_normal(branches.powf(-0.5), fan_in, fan_out),
            Role::Gate | Role::OutputGate => xavier_normal(1.0, fan_in, fan_out),
            Role::AttentionOutput | Role::FeedForward2 => Fill::Constant(0.0),
        }
    },
    output: |_, _, _| Fill::Constant(0.0),
    ..XAVIER
};

option_spec! {
    /// Standard deviation σ of normal and llama-depth.
    INIT_STD ("init_std"): f64 = 0.02, positive;
}

pub static NORMAL: Init = Init {
    name: "normal",
    definition: "every linear, embedding and untied output N(0, 0.02²), cut at 3σ",
    source: "OLMo-core, normal; most open language models",
    options: &[&INIT_STD],
    linear: |_, _, _, place| Fill::CutNormal { std: place.options.get(&INIT_STD) },
    embedding: |_, _, options| Fill::CutNormal { std: options.get(&INIT_STD) },
    output: |_, _, options| Fill::CutNormal { std: options.get(&INIT_STD) },
    has_fixed_std: true,
    ..XAVIER
};

pub static LLAMA_DEPTH: Init = Init {
    name: "llama-depth",
    definition: "as normal; out, fc2 and a gated feed-forward's third 0.02/√(2l) in layer l of its stack; embeddings \
                 N(0, 1), an untied output 1/√d",
    source: "OLMo-core, llama_depth",
    linear: |role, _, _, place| {
        // The matrices that write to the residual stream, and the gate's, begin smaller in higher layers.
        let depth = match role {
            Role::AttentionOutput | Role::FeedForward2 | Role::Gate => 2.0 * (place.layer + 1) as f64,
            _ => 1.0,
        };
        Fill::CutNormal { std: place.options.get(&INIT_STD) / depth.sqrt() }
    },
    embedding: |_, _, _| Fill::Normal { std: 1.0 },
    output: |d, _, _| normal_by_fan_in(d),
    ..NORMAL
};

/// Returns the normal distribution with variance 1/fan_in, truncated at three standard deviations.
fn normal_by_fan_in(fan_in: i64) -> Fill {
    Fill::CutNormal { std: (fan_in as f64).powf(-0.5) }
}

pub static FAN_IN: Init = Init {
    name: "fan-in",
    definition:
        "every linear and an untied output N(0, 1/fan_in), cut at 3σ; embeddings 1 after their scale √d, if they \
                 have it",
    source: "OLMo-core, fan_in",
    linear: |_, fan_in, _, _| normal_by_fan_in(fan_in),
    embedding: |_, model, _| match model.scales_embeddings {
        true => embedding(model.d_model),
        false => Fill::Normal { std: 1.0 },
    },
    output: |d, _, _| normal_by_fan_in(d),
    ..XAVIER
};

/// The standard deviation of GPT-2's initialisation.
const GPT2_STD: f64 = 0.02;

pub static GPT2: Init = Init {
    name: "gpt2",
    definition:
        "every linear, embedding and untied output N(0, 0.02²); attention's out and fc2 0.02/√(2N), N layers of their \
                 stack, under the parametrisation standard",
    source: "Radford et al. 2019, §2.3; nanoGPT",
    options: &[],
    linear: |role, _, _, place| match role {
        Role::AttentionOutput | Role::FeedForward2 if place.model.scaled.parametrisation.is_standard() => {
            Fill::Normal { std: GPT2_STD / (2.0 * place.layers() as f64).sqrt() }
        }
        _ => Fill::Normal { std: GPT2_STD },
    },
    embedding: |_, _, _| Fill::Normal { std: GPT2_STD },
    output: |_, _, _| Fill::Normal { std: GPT2_STD },
    has_fixed_std: true,
    ..XAVIER
};

/// Returns `gain` for the matrices through which values pass, and 1 for q, k and gates. So the hidden row of a gated
/// feed-forward is multiplied by the gain only once, as in torchscale's GLU.
fn on_values(role: Role, gain: f64) -> f64 {
    match role {
        Role::Query | Role::Key | Role::Gate | Role::OutputGate => 1.0,
        _ => gain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::residual::tests::{near, place_of};

    #[test]
    fn the_papers_constants() {
        let check = |constant: fn(&LayerContext) -> f64, layers, encoder, decoder| {
            near(place_of(layers, StackName::Encoder, constant), encoder);
            near(place_of(layers, StackName::Decoder, constant), decoder);
        };
        check(deepnorm_beta, 6, "0.4970", "0.3433");
        check(deepnorm_beta, 18, "0.3526", "0.2608");
        check(deepnorm_beta, 50, "0.2562", "0.2021");
        check(deepnorm_beta, 100, "0.2063", "0.1699");
        check(deepnorm_beta, 500, "0.1248", "0.1136");
        check(subln_gamma, 6, "1.5473", "1.7001");
        check(subln_gamma, 100, "3.1739", "2.3883");
        check(t_fixup_gain, 6, "0.4281", "0.3689");
        check(t_fixup_gain, 100, "0.2119", "0.1826");
    }
}
