"""Schemes that read x from several tensors: published vectors, first values, and what a layer does alone."""

import pytest
import torch
from nn_support import FF, HEADS, MIXED, D
from torch import nn

from normformer_rs import nn as nfnn
from normformer_rs.nn import formulas

X0, X, F = [0.2, 0.1, -0.3, 0.4], [1.0, -2.0, 3.0, 0.5], [0.5, 0.5, -1.0, 2.0]


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def stack_of(residual, outputs, **options):
    """A one-layer encoder of width 4 without its last norm. Its sublayers give these outputs, whatever they read."""
    layer = nfnn.TransformerEncoderLayer(
        4, 1, 8, 0.0, residual=residual, encoder_layers=1, dtype=torch.float64, **options
    )
    encoder = nfnn.TransformerEncoder(layer, 1)
    encoder.norm = nn.Identity()
    with torch.no_grad():
        for linear, output in zip((encoder.layers[0].self_attn.out_proj, encoder.layers[0].linear2), outputs):
            linear.weight.zero_()
            linear.bias.copy_(numbers(*output))
    return encoder


def close(found, *values):
    torch.testing.assert_close(found, numbers(*values), rtol=0, atol=1e-8)


def test_denseformers_weights():
    encoder = stack_of("denseformer", ([x - x0 for x, x0 in zip(X, X0)], [0.0] * 4))
    with torch.no_grad():
        close(encoder(numbers(X0))[0], *X)
        encoder.combine.weight[1] = numbers(0.25, 0.75)
        close(encoder(numbers(X0))[0], 0.8, -1.475, 2.175, 0.475)


def test_attention_over_depth():
    encoder = stack_of("attnres", (X, F))
    assert not encoder.end_depth_query.any() and (encoder.end_depth_gain == 1).all()
    with torch.no_grad():
        close(encoder(numbers(X0))[0], *(sum(v) / 3 for v in zip(X0, X, F)))
        encoder.end_depth_query.copy_(numbers(0.5, -0.25, 0.1, 0.0))
        expected = 0.65318207, -0.80017767, 1.09715588, 0.83747047
        close(encoder(numbers(X0))[0], *expected)
        outputs = [numbers(*v) for v in (X0, X, F)]
        close(formulas.depth_attention(outputs, encoder.end_depth_query, torch.ones(4)), *expected)
        shares = formulas.depth_attention(list(torch.eye(3, 4).double() * 1e4), numbers(*[0.0] * 4), torch.ones(4))
        close(shares / 1e4, *[1 / 3] * 3, 0.0)


def test_attention_over_blocks():
    """The embedding, and one sum of both outputs."""
    encoder = stack_of("attnres", (X, F), attnres_block=2)
    with torch.no_grad():
        close(encoder(numbers(X0))[0], *(sum(v) / 2 for v in zip(X0, X, F)))


def test_sinkhorn_as_deepseek_has_it():
    logits = numbers([1.0, 0.2], [-0.3, 0.5])
    close(formulas.sinkhorn(logits, 10), [0.68997341, 0.31002559], [0.31002559, 0.68997341])
    first = logits.softmax(-1) + 1e-6
    close(formulas.sinkhorn(logits, 1), *(first / (first.sum(0) + 1e-6)).tolist())


def test_streams_are_read_and_written():
    """With φ = 0, weights are those of the biases: H⁺_j = g_j f + Σ_i R_ij H_i, and R is not symmetric."""
    encoder = stack_of("mhc", (X, F), mhc_streams=3, mhc_iterations=2)
    layer, logits = encoder.layers[0], numbers([1.0, 0.2, -2.0], [-0.3, 0.5, 1.0], [0.7, -1.0, 0.1])
    gates, shares = ((0.3, -0.7, 1.0), (-1.0, 0.4, 0.0)), (2.0, -0.5, 0.1)
    with torch.no_grad():
        for i in (1, 2):
            bias = getattr(layer, f"hyper_bias{i}")
            bias[3:6] = numbers(*gates[i - 1])
            bias[6:] = logits.flatten()
        encoder.end_hyper_bias.copy_(numbers(*shares))
        r = logits.softmax(-1) + 1e-6
        for over in (0, 1, 0):
            r = r / (r.sum(over, keepdim=True) + 1e-6)
        streams = numbers(X0, X0, X0)
        for f, g in zip((X, F), gates):
            streams = r.T @ streams + 2 * numbers(*g).sigmoid()[:, None] * numbers(f)
        close(encoder(numbers(X0))[0], *((numbers(*shares).sigmoid() + 1e-6) @ streams).tolist())


def test_how_streams_start():
    layer = nfnn.TransformerEncoderLayer(D, HEADS, FF, residual="mhc", mhc_streams=3)
    encoder = nfnn.TransformerEncoder(layer, 2)
    for number, (block, i) in enumerate((block, i) for block in encoder.layers for i in (1, 2)):
        weight, scale, bias = (getattr(block, f"hyper_{part}{i}") for part in ("weight", "scale", "bias"))
        assert weight.shape == (15, 3 * D) and not weight.any()
        assert scale.tolist() == pytest.approx([0.01] * 3)
        near = [1.0 if stream == number % 3 else -1.0 for stream in range(3)]
        apart = [0.0 if i == j else -8.0 for i in range(3) for j in range(3)]
        assert bias.tolist() == [*near, *near, *apart]
    assert encoder.end_hyper_weight.shape == (3, 3 * D) and encoder.end_hyper_bias.tolist() == [0.0] * 3


@pytest.mark.parametrize("residual", MIXED)
def test_a_layer_alone_begins_and_ends_its_streams(residual):
    layer = nfnn.TransformerEncoderLayer(D, HEADS, FF, 0.0, batch_first=True, residual=residual, encoder_layers=1)
    x = torch.randn(2, 5, D)
    assert layer(x).shape == x.shape and layer(x[0]).shape == x[0].shape
    x.requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("options", [{"mhc_streams": 0}, {"mhc_iterations": 0}, {"attnres_block": 0}], ids=str)
def test_counts_begin_at_one(options):
    name = next(iter(options))
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        nfnn.TransformerEncoderLayer(D, HEADS, FF, residual=name.partition("_")[0], **options)
