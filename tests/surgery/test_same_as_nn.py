"""Blocks written by hand, swapped, compute what `normformer_rs.nn`'s stacks do with the same weights: every scheme."""

import pytest
import torch
from surgery_support import SWAPPABLE
from torch import nn

from normformer_rs import nn as nfnn
from normformer_rs.surgery import swap_residuals

D, HEADS, FF, LAYERS = 16, 4, 24, 3


class Attention(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(D, D, bias=bias) for _ in range(4))
        self.num_heads = HEADS

    def forward(self, x, memory=None):
        memory = x if memory is None else memory
        q, k, v = (
            project(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for project, y in ((self.q_proj, x), (self.k_proj, memory), (self.v_proj, memory))
        )
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o_proj(heads.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.up, self.down = nn.Linear(D, FF, bias=bias), nn.Linear(FF, D, bias=bias)

    def forward(self, x):
        return self.down(nn.functional.relu(self.up(x)))


class Llama(nn.Module):
    """Pre-norm, RMSNorm, no biases."""

    norm, bias = nn.RMSNorm, False

    def __init__(self):
        super().__init__()
        self.attn, self.mlp = Attention(self.bias), FeedForward(self.bias)
        self.norm_1, self.norm_2 = (self.norm(D, eps=1e-5) for _ in range(2))

    def forward(self, hidden):
        hidden = hidden + self.attn(self.norm_1(hidden))
        return hidden + self.mlp(self.norm_2(hidden))


class Bert(Llama):
    """Post-norm, LayerNorm."""

    norm, bias = nn.LayerNorm, True

    def forward(self, hidden):
        hidden = self.norm_1(hidden + self.attn(hidden))
        return self.norm_2(hidden + self.mlp(hidden))


class T5(Llama):
    """Pre-norm, with attention to an encoder."""

    def __init__(self):
        super().__init__()
        self.cross, self.norm_3 = Attention(self.bias), self.norm(D, eps=1e-5)

    def forward(self, hidden, memory):
        hidden = hidden + self.attn(self.norm_1(hidden))
        hidden = hidden + self.cross(self.norm_3(hidden), memory)
        return hidden + self.mlp(self.norm_2(hidden))


class Stack(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))
        self.ln_f = nn.RMSNorm(D, eps=1e-5) if block is not Bert else None

    def forward(self, x, *memory):
        for block in self.blocks:
            x = block(x, *memory)
        return x if self.ln_f is None else self.ln_f(x)


def ours(block, residual):
    """The package's stack of the same form."""
    names = {"norm": "rmsnorm" if block is not Bert else "layernorm", "residual": residual, "batch_first": True}
    kind, stack = (nfnn.TransformerEncoderLayer, nfnn.TransformerEncoder)
    if block is T5:
        kind, stack = (nfnn.TransformerDecoderLayer, nfnn.TransformerDecoder)
    return stack(kind(D, HEADS, FF, 0.0, bias=block.bias, **names), LAYERS).double().eval()


def copy_weights(model, stack, block):
    """Into the package's stack, by the names that both have."""
    norms = {"norm1": "norm_1", "norm2": "norm_2"} if block is not T5 else {"norm1": "norm_1", "norm2": "norm_3"}
    norms |= {"norm3": "norm_2"} if block is T5 else {}
    copied = set()

    def put(to, value):
        assert to.shape == value.shape
        copied.add(to)
        to.copy_(value)

    for layer, one in zip(stack.layers, model.blocks, strict=True):
        attentions = [(layer.self_attn, one.attn)] + ([(layer.multihead_attn, one.cross)] if block is T5 else [])
        for attention, own in attentions:
            put(attention.in_proj_weight, torch.cat([p.weight for p in (own.q_proj, own.k_proj, own.v_proj)]))
            put(attention.out_proj.weight, own.o_proj.weight)
            if attention.in_proj_bias is not None:
                put(attention.in_proj_bias, torch.cat([p.bias for p in (own.q_proj, own.k_proj, own.v_proj)]))
                put(attention.out_proj.bias, own.o_proj.bias)
        for linear, own in ((layer.linear1, one.mlp.up), (layer.linear2, one.mlp.down)):
            put(linear.weight, own.weight)
            if linear.bias is not None:
                put(linear.bias, own.bias)
        for name, parameter in layer.named_parameters():
            if parameter in copied:
                continue
            path, _, leaf = name.rpartition(".")
            own = getattr(one.residual, path.replace(".", "_"), None) if path else one.residual
            own = getattr(one, norms[path]) if own is None and path in norms else own
            own = one.residual if own is None else own
            held = own.get_parameter(leaf) if hasattr(own, leaf) else one.residual.get_parameter(name.replace(".", "_"))
            put(parameter, held)
    beside = model.stack_residual
    for name, parameter in stack.named_parameters():
        if parameter in copied or name.startswith("layers."):
            continue
        own = model.ln_f if name.startswith("norm.") and not hasattr(beside, "norm") else beside
        put(parameter, own.get_parameter(name.removeprefix("norm.") if own is model.ln_f else name))
    assert copied >= {*stack.parameters()}


@pytest.mark.parametrize("block", [Llama, Bert, T5])
@pytest.mark.parametrize("residual", SWAPPABLE)
@pytest.mark.one_in(test=48, all=47)
def test_the_same_stack(block, residual):
    torch.manual_seed(1)
    model = Stack(block).double().eval()
    x, memory = torch.randn(2, 5, D, dtype=torch.float64), torch.randn(2, 4, D, dtype=torch.float64)
    arguments = (x, memory) if block is T5 else (x,)
    depth = {"depth": (LAYERS, LAYERS)} if block is T5 else {}
    swap_residuals(model, residual, init=None, example=arguments, **depth)
    stack = ours(block, residual)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:  # r-fixup has no biases
                p.add_(0.1 * torch.randn_like(p))
        copy_weights(model, stack, block)
    given = [a.clone().requires_grad_() for a in arguments]
    for one in (*model.blocks, *stack.layers):
        if hasattr(one, "t"):
            one.t.fill_(1)
    y, z = model(*given), stack(*given)
    torch.testing.assert_close(y, z, rtol=1e-9, atol=1e-9)
    for a, b in zip(torch.autograd.grad(y.square().sum(), given), torch.autograd.grad(z.square().sum(), given)):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
