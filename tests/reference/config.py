"""The options of a model, which are a dictionary with keys of `DEFAULTS`."""

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]

DEFAULTS: dict[str, Any] = {
    "architecture": "encoder-decoder",  # or "decoder-only"
    "vocab_size": 32,
    "d_model": 16,
    "d_ff": 32,
    "heads": 2,
    "kv_heads": None,  # None means the value of heads
    "attention": "multi-head",  # or "tensorized"
    "tensorized_rank": 40,
    "tensorized_segment": 32,
    "output_gate": None,  # or "head", "element"
    "sinks": False,
    "score_softcap": None,
    "value_embeddings": False,
    "smear": False,
    "activation": "relu",  # or "gelu", "silu", "relu2", "swiglu", "geglu"
    "linear_biases": True,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "norm": "layernorm",
    "encoder_norm": None,  # None means the value of norm; so for decoder_norm
    "decoder_norm": None,
    "norm_eps": None,  # None means the norm's own ε
    "lpnorm_p": 2.0,
    "rmsnorm_weight": True,
    "rmsnorm_zero_centred": False,
    "rmsnorm_cast": "after",  # or "before", "scale"
    "rmsnorm_eps_place": "inside",  # or "outside"
    "rmsnorm_part": 1.0,
    "batchnorm_alpha": 0.9,
    "repbn_start": "ones",  # or "zeros"
    "prepbn_steps": 4000,
    "prepbn_warm": 0,
    "prepbn_row": "layernorm",  # or "rmsnorm"
    "powernorm_mode": "paper",  # or "release"
    "powernorm_warmup": 4000,
    "powernorm_alpha_fwd": 0.9,
    "powernorm_alpha_bwd": 0.9,
    "gated_rmsnorm_rank": 16,
    "init_std": 0.02,
    "groupscaling": 1,  # the number of groups of GroupScaling before norms with batch statistics; 0: none
    "residual": "prenorm",
    "qk_norm": False,
    "qk_norm_over": "head",  # or "all-heads"
    "qk_norm_after_rotation": False,
    "qk_norm_weight": True,
    "qk_norm_scale": 1.0,
    "v_norm": None,  # or "weighted", "unweighted"
    "qk_l2norm": None,  # or a length L of sentences, from which the factor of scores starts
    "branchnorm_steps": 4000,
    "branchnorm_growth": "linear",  # or "exp", "sigmoid"
    "r_fixup_mode": "release",  # or "paper"
    "dlcl_norm": "pre",  # or "post"
    "normformer_mode": "paper",  # or "fairseq"
    "normformer_head_scale": True,
    "normformer_attention_norm": True,
    "normformer_ffn_norm": True,
    "normformer_residual_scale": False,
    "layerscale_init": 1e-4,
    "peri_ln_embedding_norm": True,
    "ln_scaling_mode": "constant",  # or "weight"
    "mix_ln_part": 0.25,
    "attnres_block": 1,  # the number of sublayers in a block
    "attnres_form": "plain",  # or "normed"
    "attnres_queries": 1,  # or 3: q, k and v each have their own query
    "mhc_streams": 4,
    "mhc_iterations": 20,
    "gpas_scheme": "prenorm",  # or "postnorm", "deepnorm", "sandwich", "ln-scaling", "mix-ln"
    "value_residual_start": 0.5,
    "value_residual_learned": True,
    "variance_gate_temperature": 0.3,
    "mhc_mixing": "sinkhorn",  # or "none", "channel"
    "mhc_magnitude": 2.0,
    "mhc_rank": 320,
    "mhc_end": "gates",  # or "mean"
    "mhc_lite_streams": 4,
    "x0_lambdas_backout": False,
    "keel_alpha": 0.0,  # 0 means the stack's number of sublayers
    "hyper_connections_streams": 4,
    "hyper_connections_dynamic": True,
    "prores_steps": 1000,
    "prores_scheme": "prenorm",  # or "postnorm", "deepnorm", "sandwich", "ln-scaling"
    "init": None,  # None means the scheme's own
    "ds_init_mode": "paper",  # or "release"
    "fixnorm": False,
    "parametrisation": "standard",  # or "mup", "depth-mup", "completep", "u-mup"
    "base_width": None,
    "base_depth": None,
    "depth_alpha": None,  # None means the parametrisation's own α
    "input_alpha": 1.0,
    "output_alpha": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "attention_scale": None,  # or "inverse", "inverse-sqrt"
    "attention_length": None,
    "attn_softmax_alpha": 1.0,
    "ffn_act_alpha": 1.0,
    "res_alpha": 1.0,
    "res_attn_ratio": 1.0,
    "positions": "twt",  # or "fairseq", "learned", "rotary", "none"
    "max_positions": 1024,
    "rope_theta": 10000.0,
    "scale_embeddings": True,
    "tie_embeddings": "all",  # or "decoder", "none"
    "output_bias": False,
    "logit_scale": False,
    "logit_softcap": None,
}
DEFAULT_INITS = {
    "prenorm": "smallinit",
    "postnorm": "smallinit",
    "deepnorm": "deepnorm",
    "branchnorm": "deepnorm",
    "subln": "subln",
    "t-fixup": "t-fixup",
    "r-fixup": "r-fixup",
    "resi-dual": "fairseq-0.12.2",
    "hybridnorm": "gpt2",
    "hybridnorm-star": "gpt2",
    "mix-ln": "smallinit",
    "prores": "smallinit",
    "b2t": "b2t",
    "gpas": "smallinit",
    "value-residual": "smallinit",
    "x0-lambdas": "smallinit",
    "depth-scaled": "gpt2",
    "variance-gate": "gpt2",
}  # every other scheme has xavier


def complete(config: Config) -> dict[str, Any]:
    """Returns the config with all options: missing ones have their defaults, each stack has its norm, and `init` is the
    residual scheme's own if it is not given."""
    full = {**DEFAULTS, **config}
    for stack in ("encoder", "decoder"):
        full[f"{stack}_norm"] = full[f"{stack}_norm"] or full["norm"]
    full["kv_heads"] = full["kv_heads"] or full["heads"]
    names = [part.partition("*")[0] for part in full["residual"].split(",")]
    inits = {DEFAULT_INITS.get(name, "xavier") for name in names}
    full["init"] = full["init"] or (inits.pop() if len(inits) == 1 else "xavier")
    return full


def kv_width(config: Config) -> int:
    """Returns the width of a row of keys, or of values: that of kv_heads heads with d/heads columns."""
    c = complete(config)
    return c["kv_heads"] * (c["d_model"] // c["heads"])


def is_gated(config: Config) -> bool:
    return complete(config)["activation"] in ("swiglu", "geglu")


def stacks(config: Config) -> tuple[str, ...]:
    return ("encoder", "decoder") if complete(config)["architecture"] == "encoder-decoder" else ("decoder",)


def is_one_stack(config: Config) -> bool:
    return len(stacks(config)) == 1


def layer_counts(config: Config) -> tuple[int, int]:
    """Returns (N, M), the numbers of layers of encoder and decoder. A single stack has L = M layers."""
    c = complete(config)
    return c["encoder_layers"], c["decoder_layers"]
