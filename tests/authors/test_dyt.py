"""Dynamic tanh against its authors' module, in f64."""

import types

import pytest
import torch
from authors_support import module

from normformer_rs import nn


@pytest.fixture
def authors():
    timm = types.ModuleType("timm.layers")
    timm.LayerNorm2d = type("LayerNorm2d", (torch.nn.LayerNorm,), {})
    commit = "aab5dde0bc1bdd4410f687dad404c87b31808f90"
    return module("jiachenzhu/DyT", commit, "dynamic_tanh.py", timm__layers=timm)


def test_first_values(authors):
    """Both modules start with the same numbers, under the same names."""
    ours, theirs = nn.DyT(6).state_dict(), authors.DynamicTanh(6, channels_last=True).state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("channels_last", [True, False])
def test_outputs_and_gradients(authors, channels_last):
    """`channels_last=False` is the authors' form for images, whose channels come second."""
    theirs = authors.DynamicTanh(6, channels_last).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours = nn.DyT(6, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    our_x = (3 * torch.randn(4, 5, 7, 6, dtype=torch.float64)).requires_grad_()
    their_x = our_x.detach().clone().requires_grad_()
    y = ours(our_x)
    expected = theirs(their_x) if channels_last else theirs(their_x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    slope = torch.randn_like(y)
    y.backward(slope)
    expected.backward(slope)
    torch.testing.assert_close(our_x.grad, their_x.grad, rtol=0, atol=1e-12)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=0, atol=1e-12)
