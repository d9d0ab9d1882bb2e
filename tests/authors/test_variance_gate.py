"""variance-gate against Muse Spark's decoder layer of transformers: first values, output and all gradients, in f64."""

import pytest
import torch
from torch.testing import assert_close

from normformer_rs import nn

WIDTH, TEMPERATURE = 16, 0.3


class Attention(torch.nn.Module):
    def __init__(self, module, **given):
        super().__init__()
        self.module, self.given = module, given

    def forward(self, x):
        return self.module(hidden_states=x, **self.given)[0]


@pytest.mark.parametrize("std", [0.02, 2.0])
def test_layer(std, monkeypatch):
    """Gates as at the start, and so wide that α's lower bound holds for some. Our connections have the layer's own
    attention, feed-forward and norms: after attention one without a weight, after the feed-forward one that weighs its
    input (spec.md, 2.30)."""
    pytest.importorskip("transformers.models.muse_spark")
    from transformers.models.muse_spark import modeling_muse_spark as authors

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # in which the norms compute
    torch.manual_seed(0)
    size = {"hidden_size": WIDTH, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    size |= {"head_dim": 8, "num_hidden_layers": 1, "mlp_layer_types": ["dense"], "layer_types": ["full_attention"]}
    config = authors.MuseSparkTextConfig(**size, residual_gate_temperature=TEMPERATURE, attn_implementation="eager")
    layer = authors.MuseSparkTextDecoderLayer(config, 0).double()
    for name, parameter in layer.named_parameters():
        torch.nn.init.normal_(parameter, std=std if "residual_gate" in name else 0.5)
    given = {"position_embeddings": torch.randn(2, 1, 5, 8, dtype=torch.float64).unbind(0), "attention_mask": None}
    sublayers = Attention(layer.self_attn, **given), layer.mlp
    ours, x = [], torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    for i, (kind, theirs) in enumerate([("attention", "self-attention"), ("feedforward", "feed-forward")], 1):
        made = nn.Residual(
            sublayers[i - 1], WIDTH, scheme="variance-gate", norm="rmsnorm", kind=theirs, layers=1
        ).double()
        assert getattr(made, f"residual_gate{i}").std().item() == pytest.approx(0.02, rel=0.7)
        before = layer.input_layernorm if i == 1 else layer.pre_feedforward_layernorm
        made._modules |= {f"norm{i}": before, f"post_norm{i}": getattr(layer, f"post_{kind}_layernorm")}
        setattr(made, f"residual_gate{i}", getattr(layer, f"post_{kind}_residual_gate").gate)
        ours.append(made)
    y, expected = ours[1](ours[0](x)), layer(x, **given)
    assert_close(y, expected, rtol=0, atol=1e-12)
    slope, parameters = torch.randn_like(y), list(layer.parameters())
    found, wanted = (torch.autograd.grad(out, [x, *parameters], slope) for out in (y, expected))
    assert_close(found, wanted, rtol=0, atol=1e-10)
    is_bound = torch.sigmoid(layer.post_feedforward_residual_gate.gate / TEMPERATURE).square() > 1 - 1e-3
    assert is_bound.any() == (std > 1)
