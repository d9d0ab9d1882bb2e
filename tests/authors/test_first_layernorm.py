"""LayerNorm against its first authors' function, written for Theano, in f64."""

import types

import pytest
import torch
from authors_support import module

from normformer_rs import nn

AUTHORS = "ryankiros/layer-norm", "7a9a1bf7c6553b5a89949c5c860bdfc0937af483", "layers.py"
CHANGES = {"x.var(1)": "x.var(1, correction=0)"}  # Theano's variance is the biased one


@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["usual", "small"])
def test_outputs_and_gradients(scale):
    """Torch's functions stand for Theano's. Rows of small numbers, too, beside which ε counts."""
    theano = types.SimpleNamespace(tensor=types.SimpleNamespace(sqrt=torch.sqrt, tanh=torch.tanh))
    authors = module(*AUTHORS, CHANGES, theano=theano, theano__tensor=theano.tensor)
    torch.manual_seed(0)
    ours = nn.LayerNorm(24, dtype=torch.float64)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter)
    given = [scale * torch.randn(9, 24, dtype=torch.float64) + 0.5, ours.bias.detach(), ours.weight.detach()]
    x, *theirs = (tensor.clone().requires_grad_() for tensor in given)
    our_x = given[0].clone().requires_grad_()
    y, expected = ours(our_x), authors.ln(x, *theirs)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    slope = torch.randn_like(y)
    y.backward(slope), expected.backward(slope)
    torch.testing.assert_close(our_x.grad * scale, x.grad * scale, rtol=0, atol=1e-12)
    found = [ours.bias.grad, ours.weight.grad]
    torch.testing.assert_close(found, [p.grad for p in theirs], rtol=0, atol=1e-12)
