"""l2norm against the `justnorm` of nGPT's authors: in their whole model, and by itself, in f64."""

import types

import pytest
import torch
from authors_support import module
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from normformer_rs import nn

AUTHORS = "NVIDIA/ngpt", "ed19eb232380d41a9d71024b58d2403937d8f2c9", "model.py"
IN_F64 = {"torch.bfloat16": "torch.float64", "torch.float32": "torch.float64", "torch.float)": "torch.double)"}
IN_F64 |= {"dim, 2).float()": "dim, 2).double()"}
IN_F64 |= {"zeros((n_positions, dim))": "zeros((n_positions, dim), dtype=torch.float64)"}


def attend(q, k, v, softmax_scale, **_):  # flash_attn's, over (batch, length, heads, width)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=softmax_scale).transpose(1, 2)


@pytest.fixture
def authors():
    flash = types.SimpleNamespace(flash_attn_func=attend, flash_attn_qkvpacked_func=None)
    return module(*AUTHORS, IN_F64, flash_attn=flash, model=types.SimpleNamespace())


def test_model(authors, monkeypatch):
    """The loss, and all gradients, of their nGPT with random weights: with their norm and with ours in its place."""
    torch.manual_seed(0)
    config = authors.GPTConfig(vocab_size=11, n_layer=2, n_head=2, n_embd=16, base_scale=0.25, use_nGPT=1)
    model = authors.GPT(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ids, targets = torch.randint(11, (2, 3, 7))

    def run():
        logits, loss = model(ids, targets)
        return logits, loss, *torch.autograd.grad(loss, [*model.parameters()])

    expected, norms, calls = run(), {width: nn.L2Norm(width) for width in (8, 16)}, []
    ours = lambda block, x: calls.append(x.shape[-1]) or norms[x.shape[-1]](x)  # noqa: E731
    monkeypatch.setattr(authors.Block, "justnorm", ours)
    assert_close(run(), expected, rtol=0, atol=1e-12)
    assert sorted(calls) == 4 * [8] + 12 * [16]


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_norm(authors, scale):
    torch.manual_seed(0)
    ours, theirs = ((scale * torch.randn(5, 7, 16, dtype=torch.float64)).requires_grad_() for _ in range(2))
    theirs.data.copy_(ours.data)
    results, slope = (nn.L2Norm(16)(ours), authors.Block.justnorm(None, theirs)), torch.randn(5, 7, 16).double()
    assert_close(*results, rtol=0, atol=1e-12)
    torch.autograd.backward(results, [slope, slope])
    assert_close(ours.grad * scale, theirs.grad * scale, rtol=0, atol=1e-12)
