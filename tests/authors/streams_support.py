"""Our stacks with several streams, their sublayers, and their comparison with the authors' streams around these."""

import copy
import types

import torch
from torch.testing import assert_close

from normformer_rs import nn

N, WIDTH = 3, 12
PARTS = ["weight", "scale", "bias", "norm_weight", "norm_bias", "gain"]


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


def rearrange(x, pattern, s=1, **_):  # what the modules use of einops
    split = {"(b s) ... d -> b ... s d": lambda: x.unflatten(0, (-1, s)).movedim(1, -2)}
    split |= {"b ... f s d -> (b s) ... (f d)": lambda: x.squeeze(-3).movedim(-2, 1).flatten(0, 1)}
    split |= {"b ... s d -> (b s) ... d": lambda: x.movedim(-2, 1).flatten(0, 1)}
    split |= {"(f s) d -> f s d": lambda: x.unflatten(0, (-1, s)), "... -> ... 1": lambda: x.unsqueeze(-1)}
    split |= {"b ... (f d) -> b ... f d": lambda: x.unsqueeze(-2), "b ... f d -> b ... (f d)": lambda: x.flatten(-2)}
    split |= {
        "... (s f) -> ... s f": lambda: x.unflatten(-1, (s, -1)),
        "b ... s d -> b ... (s d)": lambda: x.flatten(-2),
    }
    split |= {"... (f s v) -> ... s f v": lambda: x.unsqueeze(-1).unsqueeze(-1)}
    split |= {"b ... -> (b s) ...": lambda: x.repeat_interleave(s, 0)}
    split |= {"(b s) ... -> b ...": lambda: x.unflatten(0, (-1, s)).sum(1)}
    return split[pattern]()


def einsum(x, y, pattern):
    for name, letter in {"f1": "f", "f2": "g", " ": ""}.items():
        pattern = pattern.replace(name, letter)
    return torch.einsum(pattern, x, y.to(x.dtype))


def layer(pattern, **options):
    return lambda x: rearrange(x, pattern, **options)


def put(owner, **tensors):
    """Puts our tensors in the place of parameters, so that gradients reach them."""
    for name, tensor in tensors.items():
        assert owner._parameters.pop(name).shape == tensor.shape
        setattr(owner, name, tensor)


EINOPS = types.SimpleNamespace(rearrange=rearrange, einsum=einsum, repeat=None, reduce=None)
LAYERS = types.SimpleNamespace(Rearrange=layer, Reduce=layer)
