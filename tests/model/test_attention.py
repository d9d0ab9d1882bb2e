"""Attention's options against the classes of transformers that define them, and against the oracle."""

import contextlib
import importlib
import json
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from test_architecture import LLAMA, build, check
from torch.func import functional_call

import normformer_rs as nfrs
import reference as ref

D, HEADS, KV = 16, 4, 2
WIDTH = D // HEADS
TOKENS = torch.tensor([[0, 14, 15, 9, 20, 5, 5], [0, 16, 17, 18, 19, 3, 22]])
BLOCK = {"norm": "rmsnorm", "activation": "gelu", "linear_biases": False, "scale_embeddings": False, "norm_eps": 1e-6}
BLOCK |= {"positions": "rotary", "kv_heads": KV}
"""A pre-norm block whose attention is another library's, in every other respect plain."""


@contextlib.contextmanager
def exact():
    """transformers casts norms and softmax to float32; of float64 they stay what they are."""
    softmax, to = F.softmax, torch.Tensor.to

    def own(scores, *args, dtype=None, **settings):
        return softmax(scores, *args, **settings)

    def keep(x, *args, **settings):
        return x if args == (torch.float32,) and x.dtype == torch.float64 else to(x, *args, **settings)

    with (
        mock.patch.object(F, "softmax", own),
        mock.patch.object(torch.Tensor, "float", lambda x: x.double()),
        mock.patch.object(torch.Tensor, "to", keep),
    ):
        yield


def rotation(direction, theta=10000.0):
    angles = torch.arange(TOKENS.shape[1])[:, None] * theta ** (-torch.arange(WIDTH // 2).double() / (WIDTH // 2))
    angles = torch.cat([angles, angles], -1)[None]
    return angles.cos(), angles.sin() * direction


def made(name, kind, **options):
    """An attention class of transformers, and its arguments beside x."""
    transformers = pytest.importorskip("transformers")
    configuration = getattr(transformers, f"{kind}Config")
    shape = {"hidden_size": D, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": WIDTH}
    shape |= {"num_hidden_layers": 1, "rms_norm_eps": 1e-6, "layer_types": ["full_attention"]}
    config = configuration(**{**shape, **options})
    config._attn_implementation = "eager"
    classes = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    return getattr(classes, f"{kind}Attention")(config, 0).double().eval()


def projections(state, at):
    """q_proj, k_proj, v_proj and o_proj of our stacked matrices."""
    parts = state[f"{at}.in_proj_weight"].split([D, KV * WIDTH, KV * WIDTH])
    weights = {f"{letter}_proj.weight": part for letter, part in zip("qkv", parts)}
    return weights | {"o_proj.weight": state[f"{at}.out_proj.weight"]}


def norms(state, at, q="q_norm", k="k_norm"):
    return {f"{q}.weight": state[f"{at}.q_norm.weight"], f"{k}.weight": state[f"{at}.k_norm.weight"]}


def gate_among_queries(state, at):
    """Of each head first the queries' rows, then the gate's."""
    weights = projections(state, at)
    rows = [t.view(HEADS, WIDTH, D) for t in (weights["q_proj.weight"], state[f"{at}.gate_proj.weight"])]
    return weights | {"q_proj.weight": torch.cat(rows, 1).view(2 * D, D)} | norms(state, at)


def skeleton(state, attend, zero_centred=False):
    """Logits of the block's language model with that attention."""

    def norm(name, x):
        weight = state[f"{name}.weight"] + zero_centred
        return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    x = state["embedding.weight"][TOKENS]
    for layer in range(2):
        at = f"decoder.layers.{layer}"
        x = x + attend(f"{at}.self_attn", norm(f"{at}.norm1", x))
        hidden = F.gelu(norm(f"{at}.norm2", x) @ state[f"{at}.linear1.weight"].T)
        x = x + hidden @ state[f"{at}.linear2.weight"].T
    return norm("decoder.norm", x) @ state["embedding.weight"].T


def plain(state, at):
    return projections(state, at)


def normed(state, at):
    return projections(state, at) | norms(state, at)


def with_sinks(state, at):
    return projections(state, at) | {"sinks": state[f"{at}.sinks"]}


DEFINED = {
    "output_gate, qwen3_next": (
        {"norm": "rmsnorm:gemma", "qk_norm": True, "output_gate": "element"},
        ("qwen3_next", "Qwen3Next", {}),
        gate_among_queries,
    ),
    "output_gate, afmoe": (
        {"qk_norm": True, "output_gate": "element"},
        ("afmoe", "Afmoe", {"layer_types": ["sliding_attention"]}),
        lambda state, at: normed(state, at) | {"gate_proj.weight": state[f"{at}.gate_proj.weight"]},
    ),
    "output_gate, lfm3": (
        {"qk_norm": True, "output_gate": "head"},
        ("lfm3", "Lfm3", {"use_attention_gate": True}),
        lambda state, at: normed(state, at) | {"g_proj.weight": state[f"{at}.gate_proj.weight"]},
    ),
    "qk_norm, qwen3": ({"qk_norm": True}, ("qwen3", "Qwen3", {}), normed),
    "all-heads, olmoe": ({"qk_norm": True, "qk_norm_over": "all-heads"}, ("olmoe", "Olmoe", {}), normed),
    "all-heads, minimax_m2": (
        {"qk_norm": True, "qk_norm_over": "all-heads"},
        ("minimax_m2", "MiniMaxM2", {"rotary_dim": WIDTH}),
        normed,
    ),
    "after rotation, hunyuan": (
        {"qk_norm": True, "qk_norm_after_rotation": True},
        ("hunyuan_v1_dense", "HunYuanDenseV1", {}),
        lambda state, at: projections(state, at) | norms(state, at, "query_layernorm", "key_layernorm"),
    ),
    "unweighted, nanochat": (
        {"qk_norm": True, "qk_norm_after_rotation": True, "qk_norm_weight": False},
        ("nanochat", "NanoChat", {}),
        plain,
    ),
    "times 1.2, nanochat": (
        {"qk_norm": True, "qk_norm_after_rotation": True, "qk_norm_weight": False, "qk_norm_scale": 1.2},
        ("nanochat", "NanoChat", {}),
        plain,
    ),
    # scores have no 1/√d_head there: here the fourth root of d_head on each of queries and keys
    "v_norm, gemma4": (
        {"qk_norm": True, "qk_norm_scale": WIDTH**0.25, "v_norm": "unweighted"},
        ("gemma4", "Gemma4Text", {"global_head_dim": WIDTH, "num_global_key_value_heads": KV}),
        normed,
    ),
    "sinks, gpt_oss": ({"sinks": True}, ("gpt_oss", "GptOss", {"attention_bias": False}), with_sinks),
    "sinks, granite_swa": (
        {"sinks": True},
        ("granite_swa", "GraniteSWA", {"attention_multiplier": WIDTH**-0.5}),
        with_sinks,
    ),
    "softcap, gemma2": (
        {"score_softcap": 0.3},
        ("gemma2", "Gemma2", {"attn_logit_softcapping": 0.3, "query_pre_attn_scalar": WIDTH}),
        plain,
    ),
}
"""Options, the class of transformers that has them, and its weights of ours."""


@pytest.mark.parametrize("name", DEFINED)
def test_it_is_the_class_that_defines_it(name):
    """Logits and every gradient, in f64."""
    options, (module, kind, settings), weights = DEFINED[name]
    model, state, options = build(**{**BLOCK, **options})
    theirs = made(module, kind, **settings)
    theirs.scaling *= 1.2**2 if name.startswith("times 1.2") else 1.0  # their repository has it, the class does not
    causal = torch.full((TOKENS.shape[1],) * 2, float("-inf")).double().triu(1)[None, None]

    def attend(at, x):
        cos, sin = rotation(-1 if module == "nanochat" else 1)  # its heads turn the other way
        if module == "gpt_oss":  # an angle once for both numbers of a pair
            cos, sin = cos[..., : WIDTH // 2], sin[..., : WIDTH // 2]
        given = {"position_embeddings": (cos, sin), "attention_mask": causal}
        if module == "gemma4":  # which layers may read of others
            given["shared_kv_states"] = {}
        own = weights(state, at)
        assert {*own} == {*dict(theirs.named_parameters())}
        return functional_call(theirs, own, (x,), given)[0]

    with exact():
        expected = skeleton(state, attend, zero_centred=options["norm"] == "rmsnorm:gemma")
    logits = model(None, TOKENS)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    weight = torch.randn_like(expected)
    (logits * weight).sum().backward()
    with exact():
        (expected * weight).sum().backward()
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad, state[key].grad, rtol=1e-9, atol=1e-9, msg=lambda m, n=key: f"{n}: {m}")


SEED = torch.tensor([1234567890123, 7, 2])
PARTS = (
    {"output_gate": "head", "residual": "normformer"},
    {"output_gate": "element", "residual": "r-fixup", "linear_biases": True},
    {"output_gate": "element", "kv_heads": 1, "residual": "subln"},
    {"logit_softcap": 0.5},
    {"logit_softcap": 2.0, "output_bias": True, "tie_embeddings": "none", "parametrisation": "mup", "base_width": 8},
    {"qk_norm": True, "qk_norm_over": "all-heads"},
    {"qk_norm": True, "qk_norm_after_rotation": True, "qk_norm_over": "all-heads", "norm": "scalenorm"},
    {"qk_norm": True, "qk_norm_weight": False, "qk_norm_scale": 1.2, "v_norm": "unweighted", "norm": "rmsnorm:gemma"},
    {"v_norm": "weighted", "norm": "layernorm", "residual": "olmo2"},
    {"v_norm": "weighted", "qk_l2norm": 30},
    {"sinks": True},
    {"sinks": True, "qk_norm": True, "output_gate": "head", "residual": "postnorm"},
    {"score_softcap": 0.3},
    {"sinks": True, "score_softcap": 0.3, "kv_heads": 4, "attention_scale": "inverse"},
)


@pytest.mark.parametrize("architecture", ["decoder-only", "encoder-decoder"])
@pytest.mark.parametrize("options", PARTS, ids=str)
@pytest.mark.one_in(test=2)
def test_it_is_the_oracles(options, architecture):
    check(**{**LLAMA, **options}, architecture=architecture)


@pytest.mark.parametrize("architecture", ["decoder-only", "encoder-decoder"])
@pytest.mark.parametrize("options", [{"sinks": True}, {"score_softcap": 0.5}, {"output_gate": "element"}], ids=str)
def test_dropout_masks_are_the_oracles(options, architecture, monkeypatch):
    monkeypatch.setattr(nfrs.Transformer, "_draw", staticmethod(lambda device: SEED))
    masks = ref.Dropout(0.3, 0.2, 0.3, 0.3, seed=1234567890123, update=7, micro_batch=2)
    rates = {"dropout": 0.3, "attention_dropout": 0.2}
    check(masks, **{**LLAMA, **options}, **rates, architecture=architecture)


@pytest.mark.parametrize("init", ["xavier", "smallinit", "gpt2", "r-fixup", "ds-init", "llama-depth"])
@pytest.mark.one_in(test=3, all=3)
def test_first_values(init):
    """A gate starts as a linear layer does, sinks as gpt-oss's; llama-depth damps only what writes to the stream."""
    options = {"vocab_size": 30, "d_model": 128, "d_ff": 64, "heads": 32, "architecture": "decoder-only", "init": init}
    options |= {"decoder_layers": 3, "sinks": True}
    for kind, rows in (("head", 32), ("element", 128)):
        options["output_gate"] = kind
        parameters = dict(nfrs.Transformer(nfrs.TransformerConfig(**options), seed=1).named_parameters())
        for layer in range(3):
            at = f"decoder.layers.{layer}.self_attn"
            assert parameters[f"{at}.gate_proj.weight"].shape == (rows, 128)
            assert parameters[f"{at}.sinks"].shape == (32,)
            for name in (f"{at}.gate_proj.weight", f"{at}.sinks"):
                p, std = parameters[name].detach(), ref.expected_std(options, name)
                assert abs(p.std().item() / std - 1) < 5 / (2 * p.numel()) ** 0.5, name
            assert not parameters[f"{at}.gate_proj.bias"].any()


def test_first_values_of_tables_and_gates():
    """A table starts as the values' matrix does, gates between 0 and 0.02, smear's scale at 0."""
    options = {"vocab_size": 300, "d_model": 128, "d_ff": 64, "heads": 8, "kv_heads": 4, "decoder_layers": 3}
    options |= {"architecture": "decoder-only", "value_embeddings": True, "smear": True}
    parameters = dict(nfrs.Transformer(nfrs.TransformerConfig(**options), seed=1).named_parameters())
    tables = [name for name in parameters if "value_embedding" in name]
    assert tables == [f"decoder.layers.{layer}.self_attn.value_embedding.weight" for layer in (0, 2)]
    for name in (*tables, *(name for name in parameters if name.endswith("gate.weight"))):
        p, std = parameters[name].detach(), ref.expected_std(options, name)
        assert abs(p.std().item() / std - 1) < 5 / (2 * p.numel()) ** 0.5, name
        assert "gate" not in name or (p.min() >= 0 and p.max() < 0.02)
    assert parameters["decoder.layers.0.self_attn.value_gate.weight"].shape == (4, 12)
    assert parameters["decoder.smear_gate.weight"].shape == (1, 24)
    assert parameters["decoder.smear_scale"].tolist() == [0.0]


def test_without_the_options_nothing_changes():
    """The parameters' names and numbers, and a configuration from before."""
    model = nfrs.Transformer(
        nfrs.TransformerConfig(**{**LLAMA, "vocab_size": 23, "d_model": 16, "d_ff": 12, "heads": 4})
    )
    names = ("output_gate", "sinks", "score_softcap", "logit_softcap", "v_norm", "qk_norm_over", "qk_norm_weight")
    names += ("qk_norm_after_rotation", "qk_norm_scale", "value_embeddings", "smear")
    old = {name: value for name, value in json.loads(model.config.to_json()).items() if name not in names}
    assert nfrs.TransformerConfig.from_dict(old) == model.config
    assert not any(part in name for name in model.state_dict() for part in ("gate_proj", "sinks", "_norm."))


@pytest.mark.parametrize(
    "options,message",
    [
        ({"output_gate": "row"}, "head, element"),
        ({"logit_softcap": 0.0}, "logit_softcap must be greater than 0"),
        ({"score_softcap": -1.0}, "score_softcap must be greater than 0"),
        ({"qk_norm_over": "all-heads"}, "qk_norm_over is an option of qk_norm, which is off"),
        ({"v_norm": "unweighted", "norm": "layernorm"}, "leaves out the weight of rmsnorm"),
        ({"attention": "tensorized", "sinks": True}, "tensorized attention has no heads, so sinks"),
        (
            {"attention": "tensorized", "value_embeddings": True},
            "tensorized attention has no heads, so value_embeddings",
        ),
        ({"smear": True, "parametrisation": "mup", "base_width": 8}, "does not say what becomes of smear = true"),
    ],
    ids=str,
)
def test_refuses(options, message):
    with pytest.raises(nfrs.InputError, match=message):
        nfrs.Transformer(
            nfrs.TransformerConfig(architecture="decoder-only", vocab_size=10, d_model=8, heads=2, **options)
        )
