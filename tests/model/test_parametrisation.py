"""Parametrisations: multipliers against the paper's table, the Rust model against the oracle, and coordinate checks."""

import itertools
import math

import numpy as np
import pytest
import torch
from test_model import RESIDUALS, SHAPE, SOURCES, TARGETS, build, compare
from torch import nn

import normformer_rs as nfrs
import reference as ref
from normformer_rs import _core, analysis, schemes
from normformer_rs import nn as nfnn
from normformer_rs.formats.convert import flags_from

NAMES = [entry["name"] for entry in nfrs.tables()["parametrisations"] if entry["name"] != "u-mup"]
BASE = {"base_width": 4, "base_depth": 2}
SCALED = {
    "mup": {"parametrisation": "mup", "base_width": 4},
    "depth-mup": {"parametrisation": "depth-mup", **BASE},
    "completep": {"parametrisation": "completep", **BASE},
}
UNIT = {"parametrisation": "u-mup", "attention_length": 9, "architecture": "decoder-only", "activation": "swiglu"}
UNIT |= {"norm": "rmsnorm", "rmsnorm_weight": False, "positions": "rotary", "tie_embeddings": "none", "dropout": 0.0}
ALPHAS = {"attn_softmax_alpha": 3.0, "ffn_act_alpha": 0.6, "res_alpha": 0.7, "res_attn_ratio": 1.7, "output_alpha": 1.3}
OWN_DEPTH = ("attnres", "dlcl", "depth-scaled", "variance-gate", "x0-lambdas", "ngpt")
"""Their branches do not simply add up, so that depth-mup and completep refuse them."""
pytestmark = pytest.mark.usefixtures("one_thread")


# Multipliers and roles


def of_the_paper(name, role, m_n, m_l, alpha):
    """Dey et al. 2025, Table 1 and eq 40 (decay and ε: its reference code), each role's (init, lr, decay, ε)."""
    width_only = {
        "embedding": (1, 1, 1, 1 / m_n),
        "hidden-matrix": (1 / math.sqrt(m_n), 1 / m_n, 1, 1 / m_n),
        "hidden-vector": (1, 1, 0, 1 / m_n),
        "end": (1, 1, 0, 1 / m_n),
    }
    with_depth = {
        "embedding": (1, 1, 1, 1 / m_n),
        "hidden-matrix": (m_n**-0.5, m_l ** (alpha - 1) / m_n, m_n, 1 / (m_n * m_l**alpha)),
        "hidden-vector": (1, m_l ** (alpha - 1), 0, 1 / (m_n * m_l**alpha)),
        "end": (1, 1, 0, 1 / m_n),
    }
    return {"standard": dict.fromkeys(with_depth, (1, 1, 1, 1)), "mup": width_only}.get(name, with_depth)[role]


@pytest.mark.parametrize("role", ["embedding", "hidden-matrix", "hidden-vector", "end"])
@pytest.mark.parametrize("name", NAMES)
def test_multipliers_are_the_papers(name, role):
    default = {"completep": 1.0, "depth-mup": 0.5}.get(name, 1.0)
    for m_n, m_l, given in itertools.product((0.5, 1, 8), (1, 3, 16), (None, 0.5, 0.75, 1.0)):
        found = _core.multipliers(name, role, m_n, m_l, given)
        expected = of_the_paper(name, role, m_n, m_l, default if given is None else given)
        assert tuple(found[key] for key in ("init", "lr", "weight_decay", "eps")) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(("step_size", "exponent"), [("spectral-norm", 0.0), ("orthogonal", -0.5)])
@pytest.mark.parametrize("name", ["mup", "depth-mup", "completep"])
def test_rates_of_orthogonal_steps_keep_the_spectral_norm(name, step_size, exponent):
    """‖ΔW‖ is Θ(√(fan_out/fan_in)) (Yang, Simon & Bernstein 2023); completep's decay in a step is that of any width."""
    for m_n, m_l in itertools.product((0.5, 1, 8), (1, 3, 16)):
        adam = _core.multipliers(name, "hidden-matrix", m_n, m_l)
        found = _core.multipliers(name, "hidden-matrix", m_n, m_l, None, "nothing", step_size)
        assert found["lr"] == pytest.approx(adam["lr"] * m_n * m_n**exponent, rel=1e-14)
        decay = 1.0 if name == "mup" else m_n**-exponent
        assert found["weight_decay"] == pytest.approx(decay, rel=1e-14)
        assert (found["init"], found["eps"]) == (adam["init"], adam["eps"])
        for role in ("embedding", "hidden-vector", "end"):
            others = [_core.multipliers(name, role, m_n, m_l, None, "nothing", size) for size in ("entries", step_size)]
            assert others[0] == others[1]


def parts(**options):
    """By the name of each parameter its role, and what its products are summed over."""
    return nfrs.Transformer(nfrs.TransformerConfig(**{**SHAPE, **options}))._parts()


def test_names_and_declarations_give_roles():
    found = parts(tie_embeddings="none", output_bias=True, residual="dlcl", norm="scalenorm")
    for name, role in (
        ("source_embedding.weight", "embedding"),
        ("output_projection.weight", "embedding"),
        ("output_projection.bias", "end"),
        ("encoder.layers.0.self_attn.in_proj_weight", "hidden-matrix"),
        ("decoder.layers.1.multihead_attn.out_proj.bias", "hidden-vector"),
        ("decoder.layers.1.norm1.weight", "hidden-vector"),
        ("decoder.combine.norms.1.weight", "end"),
    ):
        assert found[name] == (role, "nothing"), name
    assert found["decoder.combine.weight"] == ("end", "depth")
    assert parts(residual="rezero")["decoder.layers.0.branch_scale"] == ("hidden-vector", "nothing")


SUMMED = [
    ({"residual": "denseformer"}, "combine.weight", "end", "depth"),
    ({"residual": "attnres"}, "layers.1.depth_query1", "hidden-vector", "width"),
    ({"residual": "attnres", "attnres_form": "normed"}, "layers.1.depth_query1", "hidden-vector", "root-width"),
    ({"residual": "attnres"}, "end_depth_query", "end", "width"),
    ({"residual": "mhc"}, "layers.0.hyper_weight2", "hidden-vector", "width"),
    ({"residual": "mhc"}, "end_hyper_weight", "end", "width"),
    ({"residual": "mhc", "mhc_mixing": "channel"}, "layers.0.hyper_up1", "hidden-vector", "nothing"),
    ({"residual": "mhc", "mhc_mixing": "channel"}, "layers.0.hyper_down1", "hidden-vector", "width"),
    ({"residual": "hyper-connections"}, "layers.0.hyper_weight1", "hidden-vector", "width"),
    ({"residual": "hyper-connections"}, "layers.0.hyper_bias1", "hidden-vector", "depth"),
    ({"norm": "gated-rmsnorm"}, "layers.0.norm1.gate_down", "hidden-vector", "width"),
    ({"norm": "gated-rmsnorm"}, "layers.0.norm1.gate_up", "hidden-vector", "nothing"),
]


@pytest.mark.parametrize("options, name, role, sums_over", SUMMED, ids=str)
def test_rates_follow_what_is_summed(options, name, role, sums_over):
    """In the loop's model, in `param_groups` of it, and of a stack of `nn`; none of these parameters decays."""
    assert parts(**options)[f"decoder.{name}"] == (role, sums_over)
    m_d, m_l, scaled = 4, 4, {"parametrisation": "completep", "base_width": 4, "base_depth": 2}
    if options.get("residual") == "attnres":  # has no depth of its own
        scaled = {"parametrisation": "mup", "base_width": 4}
    shape = {**SHAPE, "decoder_layers": 8, "architecture": "decoder-only"}
    model = nfrs.Transformer(nfrs.TransformerConfig(**shape, **options, **scaled))
    layer = nfnn.TransformerEncoderLayer(16, 4, 32, encoder_layers=8, **options, **scaled)
    stack = nn.ModuleDict({"words": nn.Embedding(9, 16), "decoder": nfnn.TransformerEncoder(layer, 8)})
    rate = {"nothing": 1, "width": 1 / m_d, "root-width": m_d**-0.5, "depth": 1 / m_l}[sums_over]
    for made in (model, stack):
        p = made.get_parameter(f"decoder.{name}")
        (group,) = (g for g in nfrs.param_groups(made, 1.0, weight_decay=0.1) if any(p is q for q in g["params"]))
        assert (group["lr"], group["weight_decay"]) == (pytest.approx(rate), 0.0)
        matrices, others = (g["params"] for g in nfnn.parameter_groups(made, 0.1))
        assert any(p is q for q in others) and not any(p is q for q in matrices)


# The model


OPTIONS = [
    *SCALED.values(),
    {**SCALED["completep"], "depth_alpha": 0.75, "input_alpha": 3.0, "output_alpha": 0.5},
    {**SCALED["completep"], "tie_embeddings": "none", "output_bias": True, "init": "gpt2"},
    {**SCALED["completep"], "attention_scale": "inverse-sqrt", "encoder_layers": 1},
    {**SCALED["mup"], "qk_norm": True, "norm": "rmsnorm", "output_alpha": 2.0},
    {**SCALED["completep"], "residual": "postnorm*1,layerscale", "layerscale_init": 0.5},
    {**SCALED["completep"], "residual": "normformer", "normformer_residual_scale": True},
    {"attention_scale": "inverse"},
    {"attention_multiplier": 0.3, "input_alpha": 3.0, "output_alpha": 0.5, "residual_multiplier": 0.4},
    {"residual_multiplier": 0.4, "residual": "mhc"},
    {**SCALED["completep"], "residual_multiplier": 0.4, "residual": "postnorm", "attention_multiplier": 0.3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_logits_and_gradients_equal_the_oracles(options):
    model, state, options = build(**options)
    compare(model, state, options, ref.pad(SOURCES), ref.pad(TARGETS))


UNIT_MODELS = {
    "the paper's": {"linear_biases": False},
    "alphas": ALPHAS,
    "layernorm": {
        **ALPHAS,
        "norm": "layernorm",
        "rmsnorm_weight": True,
        "positions": "none",
        "kv_heads": 2,
        "scale_embeddings": False,
    },
    "sandwich": {"rmsnorm_weight": True, "residual": "sandwich", "decoder_layers": 1},
    "peri-ln": {**ALPHAS, "rmsnorm_weight": True, "residual": "peri-ln"},
    "llama": {"norm": "rmsnorm:llama", "rmsnorm_weight": True, "linear_biases": False},
    "olmo2*1,prenorm": {**ALPHAS, "rmsnorm_weight": True, "residual": "olmo2*1,prenorm"},
}


@pytest.mark.parametrize("case", UNIT_MODELS)
def test_unit_scaled_models_equal_the_oracles(case):
    """Logits, gradients and each parameter's multipliers; the parameters begin with std 1, as the authors'."""
    model, state, options = build(**UNIT | UNIT_MODELS[case])
    compare(model, state, options, None, ref.pad(TARGETS))
    names = {id(p): name for name, p in model.named_parameters()}
    found = {}
    for group in nfrs.param_groups(model, 0.5, weight_decay=0.1, eps=1e-3):
        is_vector = group["role"] in ("hidden-vector", "end")
        for p in group["params"]:
            rate, decay, eps = ref.unit_multipliers(options, names[id(p)], tuple(p.shape))
            expected = [0.5 * rate, 0.0 if is_vector else 0.1 / 0.5 * decay, 1e-3 * eps]
            found[names[id(p)]] = [group[key] for key in ("lr", "weight_decay", "eps")]
            assert found[names[id(p)]] == pytest.approx(expected, rel=1e-12), names[id(p)]
    assert found.keys() == set(names.values())


def test_unit_scaled_models_start_with_unit_matrices():
    shape = {**SHAPE, **UNIT, "vocab_size": 600, "d_model": 128, "d_ff": 320}
    for name, p in nfrs.Transformer(nfrs.TransformerConfig(**shape), seed=1).named_parameters():
        std = p.detach()[2:].std().item() if p.dim() > 1 else 0.0
        assert abs(std - (p.dim() > 1)) < 5 / (2 * p.numel()) ** 0.5, name


UNIT_REFUSALS = {
    "architecture": ("encoder-decoder", ' must be "decoder-only", got "encoder-decoder"'),
    "residual": ("prenorm*1,deepnorm", ' must be one of prenorm, sandwich, peri-ln, olmo2, got "prenorm[*]1,deepnorm"'),
    "norm": ("scalenorm", ' must be rmsnorm, one of its families, or layernorm, got "scalenorm"'),
    "activation": ("geglu", ' must be "swiglu", got "geglu"'),
    "positions": ("learned", ' must be "rotary" or "none", got "learned"'),
    "tie_embeddings": ("all", ' must be "none", got "all"'),
    "dropout": (0.1, " must be 0, got 0.1$"),
    "attention_dropout": (0.2, " must be 0, got 0.2$"),
    "decoder_norm": ("dyt", ' must be rmsnorm, one of its families, or layernorm, got "dyt"'),
    "init": ("gpt2", ' = "gpt2" must be left out'),
    **dict.fromkeys(("output_bias", "qk_norm", "sinks"), (True, " = true must be left out")),
    **dict.fromkeys(("input_alpha", "residual_multiplier"), (0.5, " = 0.5 must be left out")),
    "attention_scale": ("inverse", ' = "inverse" must be left out'),
    "smear": (True, " = true: leave that out"),
    "attention_length": (1, " must be at least 2, got 1"),
    "base_width": (8, " = 8 would do nothing"),
    "res_alpha": (0.0, " must be greater than 0, got 0"),
}


@pytest.mark.parametrize("option", UNIT_REFUSALS)
def test_unit_scaled_models_refuse(option):
    value, message = UNIT_REFUSALS[option]
    plain = {"rmsnorm_weight": True} if "norm" in option else {}
    with pytest.raises(nfrs.InputError, match=f"{option}{message}"):
        nfrs.Transformer(nfrs.TransformerConfig(**SHAPE | UNIT | plain | {option: value}))


def test_options_of_unit_scaled_models_are_refused_elsewhere():
    for option, value in ALPHAS.items() - {("output_alpha", 1.3)}:
        with pytest.raises(nfrs.InputError, match=f'{option} = {value:g} would do nothing, as .* "standard".* u-mup'):
            nfrs.Transformer(nfrs.TransformerConfig(**SHAPE, **{option: value}))
    with pytest.raises(nfrs.InputError, match=r"attention_length = 9 would do nothing.* u-mup"):
        nfrs.Transformer(nfrs.TransformerConfig(**SHAPE, attention_length=9))
    with pytest.raises(nfrs.InputError, match='"u-mup" needs attention_length: the number of tokens'):
        nfrs.Transformer(nfrs.TransformerConfig(**SHAPE, **UNIT | {"attention_length": None}))
    with pytest.raises(nfrs.InputError, match='"u-mup" is one of whole models'):
        nfnn.TransformerEncoderLayer(16, 4, 32, parametrisation="u-mup")
    with pytest.raises(nfrs.InputError, match=r'"u-mup" is for normformer_rs[.]Transformer, got Linear'):
        nfrs.param_groups(nn.Linear(4, 4), 1.0, parametrisation="u-mup")
    model = nfrs.Transformer(nfrs.TransformerConfig(**SHAPE, **UNIT))
    with pytest.raises(nfrs.InputError, match='depth would do nothing, as parametrisation is "u-mup"'):
        nfrs.param_groups(model, 1.0, depth=3)


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder-only"])
@pytest.mark.parametrize("residual", [name for name in RESIDUALS if name not in OWN_DEPTH])
@pytest.mark.one_in(test=5, all=3)
def test_every_scheme_scales_its_branches(residual, architecture):
    model, state, options = build(**SCALED["completep"], residual=residual, architecture=architecture)
    source = ref.pad(SOURCES) if architecture == "encoder-decoder" else None
    compare(model, state, options, source, ref.pad(TARGETS))


@pytest.mark.parametrize("norm", ["layernorm", "dyt"])
@pytest.mark.parametrize("residual", ["prenorm", "postnorm", "rezero"])
def test_dropout_masks_and_factors_go_together(norm, residual):
    rates = {"dropout": 0.4, "embedding_dropout": 0.1, "attention_dropout": 0.2, "activation_dropout": 0.3}
    model, state, options = build(**SCALED["completep"], norm=norm, residual=residual, **rates)
    torch.manual_seed(5)
    seed = model._draw(torch.device("cpu"))
    torch.manual_seed(5)
    dropout = ref.Dropout(0.1, 0.2, 0.3, 0.4, seed=int(seed[0]))
    compare(model.train(), state, options, ref.pad(SOURCES), ref.pad(TARGETS), dropout)


@pytest.mark.parametrize("name", SCALED)
def test_a_base_model_is_the_standard_one(name):
    """With m_d = m_L = 1 and 1/√d_head, not a bit differs."""
    base = {"base_width": SHAPE["d_model"], "attention_scale": "inverse-sqrt", "parametrisation": name}
    base |= {} if name == "mup" else {"base_depth": 2}
    standard, _, _ = build(decoder_layers=2)
    model, _, _ = build(decoder_layers=2, **base)
    model.load_state_dict(standard.state_dict())
    source, target = ref.pad(SOURCES), ref.pad(TARGETS)
    assert torch.equal(model(source, target), standard(source, target))
    scaled, _, _ = build(decoder_layers=2, **base | {"base_width": 4})
    scaled.load_state_dict(standard.state_dict())
    assert not torch.allclose(scaled(source, target), standard(source, target), rtol=1e-2)


def test_profiling_sees_the_branch_factor():
    options = {**SHAPE, **SCALED["completep"], "residual": "admin", "dropout": 0.0}
    model = nfrs.Transformer(nfrs.TransformerConfig(**options), seed=2).double()
    state = {name: t.detach().clone() for name, t in model.state_dict().items()}
    model.profile(ref.pad(SOURCES), ref.pad(TARGETS))
    del options["dropout"]
    expected = ref.profile_admin(state, options, ref.pad(SOURCES), ref.pad(TARGETS), ref.Dropout())
    for name, gain in expected.items():
        torch.testing.assert_close(
            model.state_dict()[name], gain.expand_as(model.state_dict()[name]), rtol=1e-9, atol=0
        )


@pytest.mark.parametrize("init", [entry["name"] for entry in nfrs.tables()["inits"]])
@pytest.mark.parametrize("ties", ["all", "none"])
@pytest.mark.one_in(test=4, all=3)
def test_first_values_are_the_base_models(init, ties):
    """Hidden matrices σ_base/√m_d, which is what an init by fans draws anyway; tables σ_base."""
    shape = {**SHAPE, "vocab_size": 600, "d_model": 128, "d_ff": 320, "init": init, "tie_embeddings": ties}
    options = {**shape, "parametrisation": "completep", "base_width": 32, "base_depth": 2}
    model = nfrs.Transformer(nfrs.TransformerConfig(**options), seed=1)
    base = nfrs.Transformer(nfrs.TransformerConfig(**shape | {"d_model": 32, "d_ff": 80}), seed=1)
    std_of_base = {name: p.detach()[2:].std().item() for name, p in base.named_parameters() if p.dim() > 1}
    for name, p in model.named_parameters():
        blocks = p.detach().chunk(3) if name.endswith("in_proj_weight") else [p.detach()]
        for part, block in enumerate(blocks):
            expected = ref.expected_std(options, name, part)
            if expected > 0:
                assert abs(block.std().item() / expected - 1) < 5 / (2 * block.numel()) ** 0.5 + 2e-3, name
        if name.endswith(("embedding.weight", "output_projection.weight")) and expected > 0:
            assert std_of_base[name] == pytest.approx(expected, rel=0.03), name
        if init not in ("gpt2", "normal", "llama-depth") and name.endswith("linear1.weight"):
            assert expected == pytest.approx(std_of_base[name] / 2, rel=0.05), name


@pytest.mark.parametrize(
    "options,message",
    [
        ({"parametrisation": "mup"}, r'"mup" needs base_width: that of the model'),
        ({"parametrisation": "completep", "base_width": 4}, "needs base_depth"),
        ({"parametrisation": "mup", **BASE}, r"base_depth = 2 would do nothing.*depth-mup, completep"),
        ({"base_width": 4}, r'base_width = 4 would do nothing, as parametrisation is "standard".*mup'),
        ({"residual_multiplier": 0.0}, "residual_multiplier must be greater than 0, got 0"),
        ({"attention_multiplier": -1.0}, "attention_multiplier must be greater than 0, got -1"),
        ({"attention_multiplier": 0.1, "attention_scale": "inverse"}, "both say the factor of attention's scores"),
        ({"attention_multiplier": 0.1, "qk_l2norm": 72}, "attention_multiplier would do nothing"),
        ({**SCALED["mup"], "output_alpha": 0.0}, "output_alpha must be greater than 0, got 0"),
        ({**SCALED["mup"], "depth_alpha": 0.7}, "depth_alpha = 0.7 would do nothing"),
        ({**SCALED["completep"], "depth_alpha": 0.4}, r"depth_alpha must lie in \[0.5, 1\], got 0.4"),
        ({**SCALED["mup"], "base_width": 0}, "base_width must be at least 1, got 0"),
        ({**SCALED["mup"], "fixnorm": True}, r'"mup" does not say what becomes of fixnorm'),
        ({**SCALED["mup"], "norm": "l2norm"}, "those of l2norm fall as 1/√d: choose rmsnorm or scalenorm"),
        ({**SCALED["completep"], "norm": "repbn"}, "repbn adds ηx, so that branches grow with the residual stream"),
        ({**SCALED["completep"], "residual": "attnres"}, "its inputs are averages of outputs: choose another scheme"),
        (
            {**SCALED["depth-mup"], "residual": "prenorm*1,depth-scaled"},
            'under residual = "depth-scaled" its k-th addition has',
        ),
        (
            {**SCALED["mup"], "architecture": "decoder-only", "attention": "tensorized"},
            'does not say what becomes of attention = "tensorized"',
        ),
        (
            {"architecture": "decoder-only", "attention": "tensorized", "attention_scale": "inverse"},
            "no heads, so attention_scale would do nothing",
        ),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(nfrs.InputError, match=message):
        nfrs.Transformer(nfrs.TransformerConfig(**SHAPE, **options))


# normformer_rs.nn


@pytest.mark.parametrize(
    "name, residual",
    [
        (name, scheme)
        for name in ("mup", "completep")
        for scheme in RESIDUALS
        if scheme != "ngpt" and (name == "mup" or scheme not in OWN_DEPTH)
    ],
)
@pytest.mark.one_in(test=8, all=3)
def test_the_skeleton_is_the_rust_model(name, residual):
    scaled = {**SCALED[name], "residual": residual}
    rust, _, _ = build(**scaled)
    sizes = (SHAPE["d_model"], SHAPE["heads"], SHAPE["encoder_layers"], SHAPE["decoder_layers"], SHAPE["d_ff"], 0.0)
    skeleton = nfnn.Transformer(*sizes, batch_first=True, dtype=torch.float64, **scaled)
    state = rust.state_dict()
    table = state.pop("embedding.weight")
    skeleton.load_state_dict(state, strict=True)

    def embed(tokens):
        real = tokens != ref.PAD
        positions = ref.sinusoids((real.cumsum(-1) - 1).clamp(min=0), SHAPE["d_model"], "twt").double()
        return (table[tokens] * scaled["base_width"] ** 0.5 + positions) * real.unsqueeze(-1)

    source, target = ref.pad(SOURCES), ref.pad(TARGETS)
    masks = {"src_key_padding_mask": source == ref.PAD, "tgt_key_padding_mask": target == ref.PAD}
    masks |= {"memory_key_padding_mask": source == ref.PAD}
    causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
    given = embed(source), embed(target)
    out = skeleton(*given, tgt_mask=causal, **masks)
    logits = (out / (SHAPE["d_model"] / scaled["base_width"])) @ table.T
    real = target != ref.PAD
    torch.testing.assert_close(logits[real], rust(source, target)[real], rtol=1e-9, atol=1e-9)


def test_weights_of_attention_have_its_scale():
    layer = nfnn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, **SCALED["mup"], residual="prenorm").double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    out, weights = layer.self_attn(x, x, x)
    torch.testing.assert_close(out, layer.self_attn(x, x, x, need_weights=False)[0])
    twin = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    twin.load_state_dict(layer.self_attn.state_dict())
    with torch.no_grad():
        twin.in_proj_weight[:16] /= 2  # √d_head
        twin.in_proj_bias[:16] /= 2
    torch.testing.assert_close(weights, twin(x, x, x)[1])


def test_first_values_in_nn_are_the_loops():
    layer = nfnn.TransformerEncoderLayer(
        64, 4, 256, residual="prenorm", init="gpt2", parametrisation="mup", base_width=4
    )
    assert layer.linear2.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)


class Reading(schemes.Scheme):
    """A scheme of one's own, whose drawn parameter is summed over the width."""

    name = "reading"

    def around(self, place):
        w = schemes.Learned("w", schemes.Normal(0.1), shape=place.d_model, sums_over="width")
        return schemes.ResidualSpec(before=[schemes.scale(w)])


OVER_WIDTH = {
    "mhc, by channel": (
        {"residual": "mhc", "mhc_mixing": "channel", "mhc_rank": 64},
        ("hyper_down1", "hyper_weight1"),
        0.02,
    ),
    "mhc, unmixed": ({"residual": "mhc", "mhc_mixing": "none"}, ("hyper_weight1",), 0.02),
    "gated-rmsnorm": ({"norm": "gated-rmsnorm", "residual": "prenorm"}, ("norm1.gate_down",), 0.02),
    "own scheme": ({"residual": Reading()}, ("w1",), 0.1),
}


@pytest.mark.parametrize("name", ["standard", "mup", "completep"])
@pytest.mark.parametrize("case", OVER_WIDTH)
@pytest.mark.one_in(test=4, all=2)
def test_what_reads_the_width_starts_as_hidden_matrices_do(case, name):
    """In the loop, in `nn`, and after a reset; a matrix that does not read the width keeps its std."""
    options, names, std = OVER_WIDTH[case]
    width = 4096 if case == "own scheme" else 256  # numbers to measure a std by
    scaled = {} if name == "standard" else SCALED[name] | {"base_width": width // 16}
    expected = std if name == "standard" else std / 4
    shape = {"vocab_size": 9, "d_model": width, "d_ff": 8, "heads": 4, "decoder_layers": 2}
    model = nfrs.Transformer(nfrs.TransformerConfig(**shape, architecture="decoder-only", **options, **scaled), seed=1)
    layer = nfnn.TransformerEncoderLayer(width, 4, 8, encoder_layers=1, layer=0, **options, **scaled)
    loops, ours = (m.get_submodule(at) for m, at in ((model, "decoder.layers.0"), (layer, "")))
    for reset in (False, True):
        if reset:
            layer.reset_parameters()
        for parameter, made in itertools.product(names, (loops, ours)):
            p = made.get_parameter(parameter).detach()
            assert abs(p.std().item() / expected - 1) < 5 / (2 * p.numel()) ** 0.5, (parameter, reset)
        for other in {"hyper_up1", "norm1.gate_up"} & dict(ours.named_parameters()).keys():
            for p in (made.get_parameter(other).detach() for made in (loops, ours)):
                assert abs(p.std().item() / 0.02 - 1) < 5 / (2 * p.numel()) ** 0.5, (other, reset)


def test_other_homes_refuse_by_name():
    layer = {"batch_first": True, "residual": "prenorm"}
    with pytest.raises(nfrs.InputError, match='unknown option "input_alpha"'):
        nfnn.TransformerEncoderLayer(16, 4, 32, **layer, **SCALED["mup"], input_alpha=2.0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
    with pytest.raises(nfrs.InputError, match=r"parametrisation .*swap_residuals has no parametrisation.*param_groups"):
        nfrs.swap_residuals(model, "prenorm", parametrisation="mup", base_width=8)
    with pytest.raises(nfrs.InputError, match="parametrisation = mup has no place in fairseq"):
        flags_from(nfrs.TransformerConfig(**SHAPE, **SCALED["mup"]))


# Groups for optimizers


def roles(model, **options):
    """Of every parameter by name."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    groups = nfrs.param_groups(model, 1e-2, **options)
    found = {names[id(p)]: group["role"] for group in groups for p in group["params"]}
    assert {*found} == {*names.values()}
    assert sum(len(group["params"]) for group in groups) == len(found)
    return found


@pytest.mark.parametrize("options", [{}, *SCALED.values()], ids=str)
def test_groups_have_every_multiplier(options):
    model = nfrs.Transformer(nfrs.TransformerConfig(**SHAPE, **options, norm="dyt"), seed=1)
    groups = nfrs.param_groups(model, 0.01, weight_decay=0.1, eps=1e-6)
    name, m_d = options.get("parametrisation", "standard"), 16 / options.get("base_width", 16)
    alpha = {"completep": 1.0, "depth-mup": 0.5}.get(name, 0.0)
    names = {id(p): n for n, p in model.named_parameters()}
    assert sum(len(group["params"]) for group in groups) == len(names)
    for group in groups:
        for parameter in group["params"]:
            full = names[id(parameter)]
            layers = SHAPE[f"{full.split('.')[0]}_layers"] if ".layers." in full else 2
            m_l = layers / options.get("base_depth", layers)
            role, _ = model._parts()[full]
            _, lr, decay, eps = of_the_paper(name, role, m_d, m_l, alpha)
            if role in ("hidden-vector", "end"):
                decay = 0
            found = [group[key] for key in ("role", "lr", "weight_decay", "eps")]
            assert found == [role, *map(pytest.approx, (0.01 * lr, 0.1 * decay, 1e-6 * eps))], full
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(groups).step()


def test_groups_of_nn_stacks():
    def stack(**options):
        layer = nfnn.TransformerEncoderLayer(16, 4, 32, residual="denseformer", **options)
        return nn.ModuleDict({"words": nn.Embedding(9, 16), "body": nfnn.TransformerEncoder(layer, 4)})

    model = stack(**SCALED["completep"])
    found = roles(model)
    assert found["words.weight"] == "embedding" and found["body.layers.3.linear1.weight"] == "hidden-matrix"
    assert found["body.combine.weight"] == "end"
    for name, p in model.named_parameters():
        kind = "hidden-matrix" if p.dim() > 1 else "hidden-vector"
        if name.startswith("body."):
            assert found[name] == (kind if ".layers." in name else "end"), name
    (matrices,) = (g for g in nfrs.param_groups(model, 1.0, eps=1.0) if g["role"] == "hidden-matrix")
    assert (matrices["lr"], matrices["eps"]) == (1 / 4, 1 / 8)
    frozen = stack(**SCALED["mup"])
    frozen.words.weight.requires_grad_(False)
    assert "words.weight" not in roles(frozen)


def tiny_gpt2(transformers, **options):
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=4, n_head=4, **options)
    )


def test_groups_of_hugging_face_models():
    transformers = pytest.importorskip("transformers")
    options = {"parametrisation": "completep", "base_width": 16, "base_depth": 2}
    for ties in (True, False):
        model = tiny_gpt2(transformers, tie_word_embeddings=ties)
        found = roles(model, **options)
        assert {n for n, role in found.items() if role == "embedding"} == {
            "transformer.wte.weight",
            "transformer.wpe.weight",
            *([] if ties else ["lm_head.weight"]),
        }
        ends = {n for n, role in found.items() if role == "end"}
        assert ends == {"transformer.ln_f.weight", "transformer.ln_f.bias"}
        for name, role in found.items():
            if ".h." in name:
                matrix = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
                assert role == ("hidden-matrix" if matrix else "hidden-vector"), name
    groups = {group["role"]: group for group in nfrs.param_groups(model, 1.0, **options, weight_decay=0.5, eps=1.0)}
    assert [groups["hidden-matrix"][key] for key in ("lr", "weight_decay", "eps")] == [1 / 2, 1.0, 1 / 4]
    shape = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    llama = roles(transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads)), **options)
    assert llama["model.layers.2.self_attn.k_proj.weight"] == "hidden-matrix"
    assert llama["model.layers.2.input_layernorm.weight"] == "hidden-vector"
    assert (llama["model.norm.weight"], llama["lm_head.weight"]) == ("end", "embedding")
    del heads["num_key_value_heads"]
    bert = roles(transformers.BertForMaskedLM(transformers.BertConfig(**shape, **heads)), **options)
    assert bert["cls.predictions.transform.dense.weight"] == "hidden-matrix"  # d × d outside the blocks
    assert bert["bert.embeddings.position_embeddings.weight"] == "embedding"
    assert bert["bert.embeddings.LayerNorm.weight"] == "end"
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=4, num_heads=4
    )
    t5 = transformers.T5ForConditionalGeneration(config)
    found = roles(t5, **options)
    assert found["decoder.block.3.layer.1.EncDecAttention.q.weight"] == "hidden-matrix"
    assert found["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] == "embedding"
    matrices = [g for g in nfrs.param_groups(t5, 1.0, **options, eps=1.0) if g["role"] == "hidden-matrix"]
    assert sorted(group["eps"] for group in matrices) == [1 / 4, 1 / 2]  # four layers and two over two


def test_groups_of_other_models():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(nn.Linear(5, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 3))
    found = roles(model, parametrisation="mup", base_width=8)
    assert [found[name] for name in ("0.weight", "0.bias", "2.weight", "2.bias")] == ["embedding", "end"] * 2
    assert found["1.layers.0.self_attn.in_proj_weight"] == "hidden-matrix"
    # A list of linear layers is no stack, and one of another kind neither.
    plain = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 5))
    with pytest.raises(nfrs.InputError, match="found no repeated blocks in Sequential"):
        nfrs.param_groups(plain, 1e-2, parametrisation="mup", base_width=8)
    assert [g["lr"] for g in nfrs.param_groups(plain, 1e-2, weight_decay=0.1)] == [1e-2, 1e-2]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    body = nn.ModuleDict(
        {"a": nn.Embedding(5, 16), "b": nn.Embedding(5, 8), "blocks": nn.ModuleList([Block(), Block()])}
    )
    with pytest.raises(nfrs.InputError, match=r"cannot tell the width of ModuleDict.*give width="):
        nfrs.param_groups(body, 1e-2, parametrisation="mup", base_width=8)
    (matrices,) = (
        group
        for group in nfrs.param_groups(body, 1.0, parametrisation="completep", **BASE, width=16, depth=8)
        if group["role"] == "hidden-matrix"
    )
    assert matrices["lr"] == 1 / 4 and matrices["eps"] == pytest.approx(1e-8 / 16)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"parametrisation": "mu"}, 'unknown parametrisation "mu"'),
        ({"parametrisation": "mup"}, "needs base_width"),
        ({"parametrisation": "depth-mup", "base_width": 8}, "needs base_depth"),
        ({"parametrisation": "mup", **BASE}, "base_depth = 2 would do nothing"),
        ({"parametrisation": "mup", "base_width": 8, "depth_alpha": 1.0}, "depth_alpha = 1.0 would do nothing"),
        ({"parametrisation": "completep", **BASE, "depth_alpha": 2.0}, r"depth_alpha must lie in \[0.5, 1\]; got 2.0"),
        ({"base_width": 8}, "base_width = 8 would do nothing"),
        ({"parametrisation": "mup", "base_width": -1}, "base_width must be at least 1; got -1"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0; got -1.0"),
    ],
    ids=str,
)
def test_groups_refuse(options, message):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    with pytest.raises(nfrs.InputError, match=message):
        nfrs.param_groups(model, 1e-2, **options)


def test_groups_are_the_models_own():
    """A parametrisation has a forward pass, too, so its groups are not for a model that was built without it."""
    model = nfrs.Transformer(nfrs.TransformerConfig(**SHAPE, **SCALED["mup"]), seed=1)
    assert [g["lr"] for g in nfrs.param_groups(model, 1.0)] == [1.0, 1 / 4, 1.0, 1.0]
    assert nfrs.param_groups(model, 1.0, **SCALED["mup"])[1]["lr"] == 1 / 4
    with pytest.raises(nfrs.InputError, match="base_width = 8 was given, and the model was built with 4"):
        nfrs.param_groups(model, 1.0, base_width=8)
    standard = nfrs.Transformer(nfrs.TransformerConfig(**SHAPE), seed=1)
    with pytest.raises(nfrs.InputError, match="parametrisation = mup was given, and the model was built with standard"):
        nfrs.param_groups(standard, 1.0, **SCALED["mup"])


# Coordinate checks


LANGUAGE_MODEL = {"architecture": "decoder-only", "vocab_size": 40, "d_model": 32, "d_ff": 64, "heads": 2}
STREAM = ("embedding", "first layer", "middle layer", "last layer")


@pytest.mark.parametrize("init", ["xavier", "gpt2"])
@pytest.mark.one_in(test=2)
def test_sizes_do_not_depend_on_the_width(init):
    """Of the stream after three updates: |slope| < 0.1 under completep; growing under the standard parametrisation."""
    config = nfrs.TransformerConfig(**LANGUAGE_MODEL, decoder_layers=2, init=init)
    scaled = config.replace(parametrisation="completep", base_width=32, base_depth=2)
    widths = (32, 64, 128, 256)
    found = analysis.coordinate_check(scaled, widths=widths).slopes()
    standard = analysis.coordinate_check(config, widths=widths).slopes()
    assert all(abs(found[place]) < 0.1 for place in STREAM), found
    assert standard["last layer"] > 0.3, standard


@pytest.mark.parametrize("scale", ["spectral", "rms"])
@pytest.mark.one_in(test=2)
def test_sizes_under_muon_do_not_depend_on_the_width(scale):
    config = nfrs.TransformerConfig(**LANGUAGE_MODEL, decoder_layers=2)
    scaled = config.replace(parametrisation="completep", base_width=32, base_depth=2)
    found = analysis.coordinate_check(scaled, widths=(32, 64, 128, 256), muon_scale=scale).slopes()
    assert all(abs(found[place]) < 0.1 for place in STREAM), found


@pytest.mark.full
@pytest.mark.parametrize("scale", ["spectral", "rms"])
def test_sizes_under_muon_do_not_depend_on_the_depth(scale):
    config = nfrs.TransformerConfig(**LANGUAGE_MODEL, decoder_layers=2)
    scaled = config.replace(parametrisation="completep", base_width=32, base_depth=2)
    given = {"depths": (2, 4, 8, 16), "lr": 3e-2, "muon_scale": scale}
    found, standard = (analysis.coordinate_check(one, **given).slopes() for one in (scaled, config))
    assert all(abs(found[place]) < 0.1 for place in ("embedding", "middle layer", "last layer", "logits")), found
    assert standard["last layer"] > 0.3, standard


@pytest.mark.one_in(test=2)
@pytest.mark.parametrize("lr", [0.1, 0.5])
def test_sizes_of_unit_scaled_models_do_not_depend_on_the_width(lr):
    config = nfrs.TransformerConfig(**LANGUAGE_MODEL | UNIT | {"attention_length": 16}, decoder_layers=2)
    found = analysis.coordinate_check(config, widths=(32, 64, 128, 256), lr=lr).slopes()
    assert all(abs(found[place]) < 0.1 for place in STREAM), found


@pytest.mark.full
def test_sizes_do_not_depend_on_the_depth():
    config = nfrs.TransformerConfig(**LANGUAGE_MODEL, decoder_layers=2)
    scaled = config.replace(parametrisation="completep", base_width=32, base_depth=2)
    depths = (2, 4, 8, 16)
    found = analysis.coordinate_check(scaled, depths=depths).slopes()
    standard = analysis.coordinate_check(config, depths=depths).slopes()
    assert all(abs(found[place]) < 0.1 for place in ("embedding", "middle layer", "last layer", "logits")), found
    assert standard["last layer"] > 0.3, standard


class Noting(nn.Module):
    """A stack whose forward notes the mean |x| of its input, of each block's output and of its own."""

    def __init__(self, width):
        super().__init__()
        made = (nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for _ in range(4))
        self.blocks, self.out, self.passes = nn.ModuleList(made), nn.Linear(width, 5), []

    def forward(self, x):
        seen = [x]
        for block in self.blocks:
            seen.append(block(seen[-1]))
        seen.append(self.out(seen[-1]))
        self.passes.append([t.abs().mean().item() for t in seen])
        return seen[-1]


def test_any_model_has_a_coordinate_check():
    """The sizes are those that the model's own forward notes, after each of the updates that a loop by hand makes."""
    made = []

    def make(width, seed):
        torch.manual_seed(seed)
        model, x = Noting(width), torch.randn(8, width)
        made.append(model)
        return model, lambda: (model(x) - 1).square().mean()

    found = analysis.coordinate_check(make, widths=(16, 64), updates=2, lr=1e-2, seeds=(3,))
    for i, width in enumerate((16, 64)):
        model, loss = make(width, 3)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, betas=(0.9, 0.98), weight_decay=0.0)
        for update in range(3):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
            seen = model.passes[update]
            assert found.sizes[i, update] == pytest.approx([*(seen[n] for n in (0, 1, 2, 4, 5)), 0, 0], rel=1e-5)
    assert "scores" not in found.slopes() and found.parametrisation == "standard"
    small = analysis.coordinate_check(
        make, widths=(16, 64), updates=2, seeds=(3,), groups=lambda model: [{"params": model.parameters(), "lr": 0.0}]
    )
    assert (small.sizes[:, 0] == small.sizes[:, 2]).all() and small.parametrisation == "groups"
    for groups, scale, said in (
        (lambda model: [{"params": [model.out.weight], "optimizer": "muon"}], None, "the groups name Muon: expected"),
        (lambda model: [{"params": model.parameters()}], "rms", "no group names Muon, so muon_scale"),
    ):
        with pytest.raises(nfrs.InputError, match=said):
            analysis.coordinate_check(make, widths=(16, 64), groups=groups, muon_scale=scale)
    with pytest.raises(nfrs.InputError, match="found no repeated blocks in Linear"):
        analysis.coordinate_check(lambda width, seed: (nn.Linear(4, 4), lambda: None), widths=(1, 2))
    with pytest.raises(nfrs.InputError, match="the loss did not run the blocks of Noting"):
        analysis.coordinate_check(lambda width, seed: (Noting(4), lambda: torch.zeros(())), widths=(1, 2))


@pytest.mark.full
def test_a_coordinate_check_and_its_picture(tmp_path):
    pytest.importorskip("matplotlib")
    config = nfrs.TransformerConfig(**{**LANGUAGE_MODEL, "architecture": "encoder-decoder"}, encoder_layers=1)
    check = analysis.coordinate_check(config, depths=(1, 2), updates=1, seeds=(1,))
    assert check.sizes.shape == (2, 2, 7) and np.isfinite(check.sizes).all() and (check.sizes[..., :6] > 0).all()
    assert not check.sizes[..., 6].any() and "mixing scores" not in check.slopes()
    check.save(tmp_path / "check.png")
    assert (tmp_path / "check.png").read_bytes().startswith(b"\x89PNG")
    model = nfrs.Transformer(config.replace(dropout=0.0, encoder_layers=2, decoder_layers=2), seed=1)
    seen = analysis.observe(model, ref.pad(SOURCES), ref.pad(TARGETS))
    table = model.state_dict()["embedding.weight"]
    real = ref.pad(TARGETS) != ref.PAD
    positions = ref.sinusoids((real.cumsum(-1) - 1).clamp(min=0), 32, "twt")
    embedded = table[ref.pad(TARGETS)] * 32**0.5 + positions
    assert seen["decoder"].sizes[0] == pytest.approx(embedded[real].abs().mean().item(), rel=1e-6)
    with pytest.raises(nfrs.InputError, match="two or more widths or two or more depths"):
        analysis.coordinate_check(config, widths=(32,))
    with pytest.raises(nfrs.InputError, match=r"multiples of d_head = 16 .*; got 40"):
        analysis.coordinate_check(config, widths=(32, 40))
