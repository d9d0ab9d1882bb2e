"""Positions, activations, grouped queries and what else distinguishes today's decoders, against the oracle."""

import json

import pytest
import torch
from test_model import NORMS, RESIDUALS, SOURCES, TARGETS, compare

import normformer_rs as nfrs
import reference as ref

SHAPE = {"vocab_size": 23, "d_model": 16, "d_ff": 12, "heads": 4, "encoder_layers": 2, "decoder_layers": 2}
LLAMA = {
    "positions": "rotary",
    "activation": "swiglu",
    "kv_heads": 2,
    "linear_biases": False,
    "scale_embeddings": False,
    "norm": "rmsnorm",
}
GPT2 = {"positions": "learned", "max_positions": 9, "activation": "gelu", "scale_embeddings": False}


def build(**options):
    """As test_model's: a module in f64, the oracle's state of the same weights, and its options."""
    options = {**SHAPE, "architecture": "decoder-only", **options}
    model = nfrs.Transformer(nfrs.TransformerConfig(**{"dropout": 0.0, **options}), seed=3).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    state = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    state |= {name: b.clone() for name, b in model.named_buffers()}
    return model, state, options


def check(masks=None, **options):
    model, state, options = build(**options)
    source = ref.pad(SOURCES) if options["architecture"] == "encoder-decoder" else None
    model.train(masks is not None)
    compare(model, state, options, source, ref.pad(TARGETS), masks)


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("options", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.one_in(test=3)
def test_every_scheme(options, residual):
    check(residual=residual, **options)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("options", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_every_norm(options, norm):
    check(**{**options, "norm": norm})


@pytest.mark.parametrize("architecture", ["decoder-only", "encoder-decoder"])
@pytest.mark.parametrize(
    "options",
    [
        LLAMA,
        GPT2,
        {"positions": "rotary"},
        {"positions": "rotary", "rope_theta": 7.0, "qk_norm": True, "norm": "scalenorm"},
        {"positions": "rotary", "kv_heads": 1, "residual": "olmo2", "norm": "rmsnorm"},
        {"positions": "rotary", "kv_heads": 2, "residual": "hybridnorm"},
        {"positions": "learned", "max_positions": 6, "fixnorm": True, "tie_embeddings": "decoder"},
        {"positions": "learned", "max_positions": 6, "parametrisation": "completep", "base_width": 4, "base_depth": 1},
        {"positions": "none"},
        {"positions": "none", "scale_embeddings": False, "fixnorm": True},
        {"positions": "fairseq", "scale_embeddings": False, "kv_heads": 1},
        {"activation": "gelu", "residual": "postnorm"},
        {"activation": "silu", "residual": "normformer"},
        {"activation": "relu2", "residual": "r-fixup"},
        {"activation": "swiglu", "residual": "normformer", "kv_heads": 2},
        {"activation": "geglu", "residual": "subln"},
        {"activation": "geglu", "residual": "r-fixup", "r_fixup_mode": "paper"},
        {"activation": "swiglu", "parametrisation": "mup", "base_width": 4, "kv_heads": 1, "scale_embeddings": False},
        {"kv_heads": 2},
        {"kv_heads": 1, "qk_norm": True, "attention_scale": "inverse"},
        {"kv_heads": 4},
        {"linear_biases": False, "output_bias": True, "tie_embeddings": "none"},
        {"scale_embeddings": False, "residual": "peri-ln"},
    ],
    ids=str,
)
@pytest.mark.one_in(test=3, all=3)
def test_options(options, architecture):
    check(architecture=architecture, **options)


@pytest.mark.parametrize("architecture", ["decoder-only", "encoder-decoder"])
@pytest.mark.parametrize("activation", ["gelu", "silu", "relu2", "swiglu", "geglu"])
def test_dropout_masks_are_the_oracles(activation, architecture, monkeypatch):
    rates = {"dropout": 0.3, "attention_dropout": 0.2, "activation_dropout": 0.1, "embedding_dropout": 0.25}
    seed = torch.tensor([1234567890123, 7, 2])
    monkeypatch.setattr(nfrs.Transformer, "_draw", staticmethod(lambda device: seed))
    masks = ref.Dropout(0.25, 0.2, 0.1, 0.3, seed=1234567890123, update=7, micro_batch=2)
    options = {**LLAMA, "activation": activation, "architecture": architecture}
    check(masks, **options, **rates)


@pytest.mark.parametrize("options", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_profiling(options):
    """Padding has positions too, after its sentence's."""
    model, state, options = build(residual="admin", **{**options, "norm": "layernorm"})
    with torch.no_grad():
        for weights in (model.state_dict(), state):
            weights["embedding.weight"][ref.PAD] = 0
    model.profile(None, ref.pad(TARGETS))
    expected = ref.profile_admin(state, options, None, ref.pad(TARGETS), ref.Dropout())
    found = dict(model.named_parameters())
    for name, omega in expected.items():
        torch.testing.assert_close(found[name].detach(), omega, rtol=1e-10, atol=0)


def test_rotary_positions_tell_order_and_distance_alone():
    model, _, _ = build(**LLAMA)
    one, other = torch.tensor([[0, 5, 6, 7]]), torch.tensor([[0, 6, 5, 7]])
    assert not torch.allclose(model(None, one)[0, -1], model(None, other)[0, -1])
    deaf, _, _ = build(**{**LLAMA, "positions": "none", "decoder_layers": 1})
    torch.testing.assert_close(deaf(None, one)[0, -1], deaf(None, other)[0, -1], rtol=1e-12, atol=1e-12)


def test_padding_changes_nothing():
    for options in (LLAMA, GPT2):
        model, _, _ = build(**options)
        together = model(None, ref.pad(TARGETS))
        longest = max(map(len, TARGETS))
        left = model(None, torch.tensor([[ref.PAD] * (longest - len(t)) + t for t in TARGETS]))
        for i, target in enumerate(TARGETS):
            alone = model(None, torch.tensor([target]))[0]
            torch.testing.assert_close(together[i, : len(target)], alone, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(left[i, longest - len(target) :], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_bf16_products_stay_near(options):
    model, _, _ = build(**options)
    exact = model.float()(None, ref.pad(TARGETS))
    model.precision = "bf16"
    rough = model(None, ref.pad(TARGETS))
    assert rough.dtype == torch.bfloat16
    assert (rough.float() - exact).abs().max() < 0.1 * exact.std()
    rough.float().square().mean().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


def blocks(name, p, options):
    """The matrices that stand on each other in a parameter, each with its number."""
    width = ref.kv_width(options)
    rows = [options["d_model"], width, width] if name.endswith("in_proj_weight") else [len(p)]
    return enumerate(p.detach().split(rows))


@pytest.mark.parametrize("architecture", ["decoder-only", "encoder-decoder"])
@pytest.mark.parametrize("init", [entry["name"] for entry in nfrs.tables()["inits"]])
@pytest.mark.one_in(test=7, all=5)
def test_first_values(init, architecture):
    options = {"vocab_size": 600, "d_model": 128, "d_ff": 320, "heads": 8, "encoder_layers": 2, "decoder_layers": 3}
    options |= {"positions": "learned", "max_positions": 300, "activation": "swiglu", "kv_heads": 4}
    options |= {"init": init, "architecture": architecture}
    model = nfrs.Transformer(nfrs.TransformerConfig(**options), seed=1)
    names = {name for name, _ in model.named_parameters()}
    assert {"target_position_embedding.weight", "decoder.layers.2.linear3.weight"} <= names
    for name, p in model.named_parameters():
        for part, block in blocks(name, p, options):
            expected, bound = ref.expected_std(options, name, part), ref.expected_bound(options, name, part)
            assert bound is None or block.abs().max() <= bound * (1 + 1e-6), name
            if expected == 0:
                assert (block == ref.expected_mean(options, name)).all(), name
            else:
                # a sample's standard deviation of n numbers is within 5/√(2n) of the true one
                assert abs(block.std().item() / expected - 1) < 5 / (2 * block.numel()) ** 0.5 + 2e-3, name


@pytest.mark.parametrize(
    "options,message",
    [
        ({"positions": "learned", "max_positions": 4}, "5 tokens in a row, .* positions are max_positions = 4"),
        ({"kv_heads": 3}, "kv_heads must divide heads = 4, got 3; it may be 1, 2, 4"),
        ({"activation": "swish"}, "relu, gelu, silu, relu2, swiglu, geglu"),
        ({"positions": "alibi"}, "twt, fairseq, learned, rotary, none"),
        ({"positions": "rotary", "heads": 16}, "= 1 is odd"),
    ],
    ids=str,
)
def test_refuses(options, message):
    with pytest.raises(nfrs.InputError, match=message):
        build(**options)[0](None, ref.pad(TARGETS))


def test_configurations_from_before_the_options():
    """Both readers of a configuration take what had been the only way."""
    before = {"kv_heads": None, "activation": "relu", "linear_biases": True, "scale_embeddings": True}
    names = (*before, "max_positions", "rope_theta")
    new = nfrs.TransformerConfig(**SHAPE)
    old = {name: value for name, value in json.loads(new.to_json()).items() if name not in names}
    assert nfrs.TransformerConfig.from_dict(old) == new == new.replace(**before)
    assert nfrs._core.declare(json.dumps(old), "decoder") == nfrs._core.declare(new.to_json(), "decoder")
