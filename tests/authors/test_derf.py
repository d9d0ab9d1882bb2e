"""Dynamic erf against its authors' modules, those of images and of DNA models, in f64."""

import types

import pytest
import torch
from authors_support import module

from normformer_rs import nn

AUTHORS = "zlab-princeton/Derf", "8dd9ea3cc70370f423a80a80af6f72466bc621db"
KINDS = {"last": {"channels_last": True}, "second": {"channels_last": False}, "DNA": {}}


def their_norm(kind):
    """Returns the authors' module over six columns, which are a tensor's last dimension or, in images, its second."""
    timm = types.ModuleType("timm.layers")
    timm.LayerNorm2d = type("LayerNorm2d", (torch.nn.LayerNorm,), {})
    folder = "DNA model" if kind == "DNA" else "ViT"
    return module(*AUTHORS, f"{folder}/dynamic_erf.py", timm__layers=timm).Dynamic_erf(6, **KINDS[kind])


def in_our_names(tensors):
    """Our `s` is their `shift`."""
    return {name.replace("shift", "s"): tensor for name, tensor in tensors}


@pytest.mark.parametrize("kind", KINDS)
def test_first_values(kind):
    ours, theirs = nn.Derf(6).state_dict(), in_our_names(their_norm(kind).state_dict().items())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients(kind):
    torch.manual_seed(0)
    theirs = their_norm(kind).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours = nn.Derf(6, dtype=torch.float64)
    ours.load_state_dict(in_our_names(theirs.state_dict().items()))
    our_x = (2 * torch.randn(4, 5, 7, 6, dtype=torch.float64)).requires_grad_()
    their_x = our_x.detach().clone().requires_grad_()
    y = ours(our_x)
    expected = theirs(their_x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1) if kind == "second" else theirs(their_x)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    slope = torch.randn_like(y)
    y.backward(slope), expected.backward(slope)
    gradients = in_our_names((name, parameter.grad) for name, parameter in theirs.named_parameters())
    found = {name: parameter.grad for name, parameter in ours.named_parameters()}
    torch.testing.assert_close(found | {"x": our_x.grad}, gradients | {"x": their_x.grad}, rtol=0, atol=1e-12)
