"""Output gates, sinks and softcaps in the life of modules; test_parity.py has their values."""

import copy
import pickle

import pytest
import torch
from nn_support import FF, HEADS, D, encoder
from torch import nn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn
from normformer_rs.surgery import swap_residuals

PARTS = {"output_gate": "head", "sinks": True, "score_softcap": 2.0}


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
def test_copies_pickles_and_exports_compute_the_same():
    model, x = encoder(**PARTS).double().eval(), torch.randn(2, 5, D).double()
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


@pytest.mark.parametrize("option", PARTS)
def test_what_leaves_attention_as_it_is_refuses_them(option):
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, HEADS, FF, batch_first=True), 2)
    with pytest.raises(nfrs.InputError, match=f"{option} is a part of attention"):
        swap_residuals(stack, "postnorm", **{option: PARTS[option]})
    with pytest.raises(nfrs.InputError, match=f"{option} is a part of attention"):
        nfnn.Residual(nn.Linear(D, D), D, kind="self-attention", **{option: PARTS[option]})
