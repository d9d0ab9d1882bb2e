"""Output gates in the life of modules; test_parity.py has their values."""

import copy
import pickle

import pytest
import torch
from nn_support import FF, HEADS, D, encoder
from torch import nn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn
from normformer_rs.surgery import swap_residuals

PARTS = {"output_gate": "head"}


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
    layer = nfnn.TransformerEncoderLayer(64, 64, FF, residual=residual, output_gate="element")
    attention = layer.self_attn
    for _ in range(2):
        assert attention.gate_proj.weight.shape == (64, 64) and 0.02 < attention.gate_proj.weight.std() < 0.3
        before = attention.gate_proj.weight.detach().clone()
        with torch.no_grad():
            attention.gate_proj.weight.fill_(7)
        layer.reset_parameters()
        assert not torch.equal(before, attention.gate_proj.weight)


@pytest.mark.parametrize("option", PARTS)
def test_what_leaves_attention_as_it_is_refuses_them(option):
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, HEADS, FF, batch_first=True), 2)
    with pytest.raises(nfrs.InputError, match=f"{option} is a part of attention"):
        swap_residuals(stack, "postnorm", **{option: PARTS[option]})
    with pytest.raises(nfrs.InputError, match=f"{option} is a part of attention"):
        nfnn.Residual(nn.Linear(D, D), D, kind="self-attention", **{option: PARTS[option]})
