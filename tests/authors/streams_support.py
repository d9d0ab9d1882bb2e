"""Our stacks with several streams, their sublayers, and their comparison with the authors' streams around these."""

import copy

import torch
from torch.testing import assert_close

from normformer_rs import nn

N, WIDTH = 3, 12
PARTS = ["weight", "scale", "bias", "norm_weight", "norm_bias"]


def stack_of(kind, residual, **options):
    torch.manual_seed(0)
    given = {"batch_first": True, "dtype": torch.float64, "residual": residual, f"{kind.lower()}_layers": 3}
    layer = getattr(nn, f"Transformer{kind}Layer")(WIDTH, 3, 20, 0.0, **given, **options)
    return getattr(nn, f"Transformer{kind}")(layer, 3)


def sublayers(stack, mask=None, memory=None):
    """Yields what each sublayer has for its streams, PARTS, and its F(N(x)). Decoders need a memory."""
    for layer in stack.layers:
        functions = [lambda y, to=layer.self_attn: to(y, y, y, attn_mask=mask, need_weights=False)[0]]
        if isinstance(stack, nn.TransformerDecoder):
            functions += [lambda y, to=layer.multihead_attn: to(y, memory, memory, need_weights=False)[0]]
        functions += [lambda y, layer=layer: layer.linear2(layer.linear1(y).relu())]
        for i, function in enumerate(functions, 1):
            norm = getattr(layer, f"norm{i}")
            parts = {part: getattr(layer, f"hyper_{part}{i}", None) for part in PARTS}
            yield parts, lambda y, function=function, norm=norm: function(norm(y))


def compare(stack, run):
    """Compares our stack with `run`, the authors' streams around a copy of its sublayers, at random weights: outputs
    and the gradients of inputs and of all parameters."""
    for parameter in stack.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    theirs, inputs = copy.deepcopy(stack), [torch.randn(2, 5, WIDTH, dtype=torch.float64)]
    if isinstance(stack, nn.TransformerDecoder):
        inputs.append(torch.randn(2, 4, WIDTH, dtype=torch.float64))
    ours, copied = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    outputs = stack(*ours, mask), run(theirs, copied[0], sublayers(theirs, mask, *copied[1:]))
    assert_close(*outputs, rtol=0, atol=1e-12)
    torch.autograd.backward(outputs, [torch.randn_like(outputs[0])] * 2)
    assert_close([x.grad for x in ours], [x.grad for x in copied], rtol=0, atol=1e-10)
    found, expected = ({name: p.grad for name, p in each.named_parameters()} for each in (stack, theirs))
    assert all(gradient.abs().max() > 0 for gradient in found.values())
    assert_close(found, expected, rtol=0, atol=1e-10)
