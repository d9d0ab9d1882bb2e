"""ReZero against its authors' layers, rztx.py."""

import pytest
import torch
from authors_support import module

from normformer_rs import nn

WIDTH, HEADS, HIDDEN, LAYERS = 12, 3, 20, 3
REZERO = ("majumderb/rezero", "e2c94a825c5564217e8cf4d75a28d59cab1d7029", "rezero/transformer/rztx.py")


def stacks(activation, decoder):
    """Returns the authors' layers and our stack in f64, without dropout, at their first values."""
    authors = module(*REZERO)
    kind = "Decoder" if decoder else "Encoder"
    sizes = (WIDTH, HEADS, HIDDEN, 0.0, activation)
    theirs = [getattr(authors, f"RZTX{kind}Layer")(*sizes) for _ in range(LAYERS)]
    layer = getattr(nn, f"Transformer{kind}Layer")(*sizes, residual="rezero")
    return torch.nn.ModuleList(theirs).double(), getattr(nn, f"Transformer{kind}")(layer, LAYERS).double()


def our_name(name):
    """Returns our name for one of the authors' parameters in a ModuleList of their layers."""
    return "layers." + name.replace("resweight", "branch_scale")


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_outputs_and_gradients(activation, decoder):
    """Random weights in place of the first ones. The authors have no norm after the stack, and neither have we."""
    torch.manual_seed(0)
    theirs, ours = stacks(activation, decoder)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours.load_state_dict({our_name(name): value for name, value in theirs.state_dict().items()})
    inputs = [torch.randn(length, 2, WIDTH, dtype=torch.float64) for length in ((5, 4) if decoder else (5,))]
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    their_inputs, our_inputs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    their_output = their_inputs[0]
    for layer in theirs:
        their_output = layer(their_output, *their_inputs[1:], mask)
    our_output = ours(*our_inputs, mask)
    torch.testing.assert_close(our_output, their_output, rtol=0, atol=1e-11)
    weights = torch.randn_like(our_output)
    names = [our_name(name) for name, _ in theirs.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in ours.named_parameters())
    our_gradients = torch.autograd.grad((our_output * weights).sum(), [*our_inputs, *map(ours.get_parameter, names)])
    their_gradients = torch.autograd.grad((their_output * weights).sum(), [*their_inputs, *theirs.parameters()])
    torch.testing.assert_close(our_gradients, their_gradients, rtol=0, atol=1e-11)


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
def test_the_factor_starts_at_zero(decoder):
    theirs, ours = stacks("relu", decoder)
    for layer, our_layer in zip(theirs, ours.layers, strict=True):
        torch.testing.assert_close(our_layer.branch_scale, layer.resweight, rtol=0, atol=0)
        assert our_layer.branch_scale.item() == 0
