"""Output gates, sinks, softcaps, grouped queries, rotary positions and gated feed-forwards in the life of modules;
test_parity.py has their values."""

import copy
import pickle
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from nn_support import FF, HEADS, D, encoder, shake
from torch import nn
from torch.utils.checkpoint import checkpoint

import normformer_rs as nfrs
from normformer_rs import nn as nfnn
from normformer_rs.surgery import swap_residuals

PARTS = {"output_gate": "head", "sinks": True, "score_softcap": 2.0}
MODERN = {"kv_heads": 2, "positions": "rotary", "activation": "swiglu", "linear_biases": False}


def test_weights_leave_out_the_sinks():
    layer = encoder(**PARTS).double().layers[0]
    x, mask = torch.randn(2, 5, D).double(), torch.ones(5, 5, dtype=torch.bool).triu(1)
    found, none = layer.self_attn(x, x, x, attn_mask=mask, need_weights=False)
    same, weights = layer.self_attn(x, x, x, attn_mask=mask, average_attn_weights=False)
    torch.testing.assert_close(found, same, rtol=1e-12, atol=1e-12)
    assert none is None and weights.shape == (2, HEADS, 5, 5)
    assert (weights.sum(-1) < 1).all() and (weights.masked_select(mask) == 0).all()
    with torch.no_grad():
        layer.self_attn.sinks.fill_(-1e9)
    torch.testing.assert_close(layer.self_attn(x, x, x, attn_mask=mask)[1].sum(-1), torch.ones(2, 5).double())


@pytest.mark.full
@pytest.mark.parametrize("parts", [PARTS, MODERN], ids=["parts", "modern"])
def test_copies_pickles_and_exports_compute_the_same(parts):
    model, x = encoder(**parts).double().eval(), torch.randn(2, 5, D).double()
    wanted = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.compile(model, backend="eager")):
        torch.testing.assert_close(other(x), wanted, rtol=1e-12, atol=1e-12)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("residual", [None, "prenorm"])
def test_first_values_come_back(residual):
    torch.manual_seed(2)
    layer = nfnn.TransformerEncoderLayer(64, 64, FF, residual=residual, output_gate="element", sinks=True)
    attention = layer.self_attn
    for _ in range(2):
        assert attention.sinks.shape == (64,) and abs(attention.sinks.std() / 0.02 - 1) < 0.5
        assert attention.gate_proj.weight.shape == (64, 64) and 0.02 < attention.gate_proj.weight.std() < 0.3
        before = attention.sinks.detach().clone()
        with torch.no_grad():
            attention.sinks.fill_(7)
            attention.gate_proj.weight.fill_(7)
        layer.reset_parameters()
        assert not torch.equal(before, attention.sinks)


@pytest.mark.parametrize("is_self", [True, False])
def test_a_reset_draws_the_gate_as_the_constructor_does(is_self):
    layer = nfnn.TransformerDecoderLayer(16, 4, FF, residual="prenorm", output_gate="element")
    attention = layer.self_attn if is_self else layer.multihead_attn
    torch.manual_seed(0)
    config = layer.place.config
    attention.set_parts(config, True, is_self=is_self)
    made = attention.gate_proj.weight.detach().clone()
    torch.manual_seed(0)
    with mock.patch.object(nn.MultiheadAttention, "_reset_parameters"):
        attention._reset_parameters()
    assert torch.equal(made, attention.gate_proj.weight)


@pytest.mark.parametrize("residual", [None, "prenorm"])
def test_grouped_and_gated_values_come_back(residual):
    layer = nfnn.TransformerEncoderLayer(64, 8, 96, residual=residual, **MODERN)
    parameters = dict(layer.named_parameters())
    assert parameters["self_attn.in_proj_weight"].shape == (96, 64) and parameters["linear3.weight"].shape == (96, 64)
    assert [name for name in parameters if name.endswith("bias")] == ["norm1.bias", "norm2.bias"]
    drawn = ("self_attn.in_proj_weight", "linear1.weight", "linear3.weight")
    before = [parameters[name].std().item() for name in drawn]
    with torch.no_grad():
        for name in drawn:
            parameters[name].fill_(7)
    layer.reset_parameters()
    for name, std in zip(drawn, before, strict=True):
        assert abs(parameters[name].std().item() / std - 1) < 0.1, name


def test_a_modern_block_is_one_constructor():
    """As torch computes it, from the layer's own weights."""
    layer = nfnn.TransformerEncoderLayer(
        32, 4, 48, 0.0, batch_first=True, residual="prenorm", norm="rmsnorm", dtype=torch.float64, **MODERN
    )
    shake(layer)
    x = torch.randn(2, 7, 32, dtype=torch.float64, requires_grad=True)
    q, k, v = (layer.norm1(x) @ layer.self_attn.in_proj_weight.T).split([32, 16, 16], -1)
    q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (q, k, v))
    turn = torch.polar(torch.ones(7, 4).double(), torch.arange(7)[:, None] * 10000.0 ** (-torch.arange(4).double() / 4))

    def turned(t):
        pairs = torch.view_as_complex(t.unflatten(-1, (2, 4)).transpose(-1, -2).contiguous()) * turn
        return torch.view_as_real(pairs).transpose(-1, -2).flatten(-2)

    heads = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
    y = x + layer.self_attn.out_proj(heads.transpose(1, 2).flatten(-2))
    normed = layer.norm2(y)
    wanted = y + layer.linear2(F.silu(layer.linear1(normed)) * layer.linear3(normed))
    found = layer(x, is_causal=True)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    factors = torch.randn_like(found)
    parameters = [x, *layer.parameters()]
    gradients = [torch.autograd.grad((out * factors).sum(), parameters) for out in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{"positions": "rotary"}, {"residual": "ln-scaling"}], ids=str)
def test_self_attention_is_known_where_hooks_made_three_tensors_of_one(options):
    """Reentrant checkpoints, and wrappers that pass arguments through functions of autograd, as FSDP's."""
    place = {"residual": "prenorm", "layer": 1, "encoder_layers": 3}
    layer = nfnn.TransformerEncoderLayer(D, HEADS, FF, 0.0, batch_first=True, **place | options)
    x, y = (torch.randn(2, 5, D).requires_grad_() for _ in range(2))
    y.data.copy_(x.data)
    attention = layer.self_attn
    attention(x, x, x)[0].square().sum().backward()
    checkpoint(lambda q, k, v: attention(q, k, v)[0], y, y, y, use_reentrant=True).square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    wanted = layer(x)
    attention.register_forward_pre_hook(lambda _, args: tuple(t.clone() for t in args))
    torch.testing.assert_close(layer(x), wanted)


class Own(nfnn.MultiheadAttention):
    """A subclass whose forward takes torch.nn's arguments alone."""

    def forward(self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None, is_causal=False):
        return super().forward(query, key, value, key_padding_mask, need_weights, attn_mask, is_causal=is_causal)


def test_a_subclass_with_torchs_arguments_runs():
    layer, x = encoder(positions="rotary").layers[0], torch.randn(2, 5, D)
    wanted = layer(x)
    layer.self_attn.__class__ = Own
    torch.testing.assert_close(layer(x), wanted)


def test_grouped_queries_export_with_a_dynamic_length():
    model = encoder(kv_heads=2, positions="rotary").eval()
    length = torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(model, (torch.randn(2, 5, D),), dynamic_shapes={"src": {1: length}}).module()
    x = torch.randn(2, 9, D)
    torch.testing.assert_close(exported(x), model(x), rtol=1e-5, atol=1e-5)


def test_as_many_heads_of_keys_as_of_queries_are_torchs():
    layer = nfnn.TransformerEncoderLayer(D, HEADS, FF, residual="prenorm", kv_heads=HEADS)
    layer.self_attn = nn.MultiheadAttention(D, HEADS)
    assert layer(torch.randn(3, 2, D)).shape == (3, 2, D)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_heads": 3}, "kv_heads must divide nhead, 4: it may be 1, 2, 4; got 3"),
        ({"positions": "learned"}, "a layer adds no positions, got positions='learned'"),
        ({"rope_theta": 100.0}, "rope_theta = 100"),
        ({"activation": "swish"}, "swiglu"),
        ({"activation": [1]}, "swiglu"),
        ({"positions": "rotary", "nhead": 16}, "d_model/nhead must be even; got 16/16"),
        ({"qk_norm_after_rotation": True, "qk_norm": True}, "rotate nothing"),
    ],
    ids=str,
)
def test_refuses(options, message):
    with pytest.raises(nfrs.InputError, match=message):
        nfnn.TransformerEncoderLayer(**{"d_model": D, "nhead": HEADS, "residual": "prenorm", **options})


@pytest.mark.parametrize("option", PARTS)
def test_what_leaves_attention_as_it_is_refuses_them(option):
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, HEADS, FF, batch_first=True), 2)
    with pytest.raises(nfrs.InputError, match=f"{option} is a part of models"):
        swap_residuals(stack, "postnorm", **{option: PARTS[option]})
    with pytest.raises(nfrs.InputError, match="linear_biases is a part of a layer"):
        nfnn.Residual(nn.Linear(D, D), D, linear_biases=False)
    with pytest.raises(nfrs.InputError, match=f"{option} is a part of a layer"):
        nfnn.Residual(nn.Linear(D, D), D, kind="self-attention", **{option: PARTS[option]})
