"""Residual schemes against the code that defines them: whole blocks of transformers, from their own weights, in f64."""

import pytest
import torch
from torch import nn

import normformer_rs as nfrs

transformers = pytest.importorskip("transformers")
LAYERS, WIDTH = 4, 16


def stirred(module):
    """Weights that are not their first values."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3 + (p.dim() == 1))
    return module


def residual(function, scheme, number, kind, norms):
    """Our connection around their F, with their norms."""
    made = nfrs.nn.Residual(
        function, WIDTH, scheme=scheme, norm="rmsnorm", kind=kind, layer=number, layers=LAYERS
    ).double()
    for name, module in norms.items():
        assert name in made._modules
        made._modules[name] = module
    return made


def agree(theirs, ours, x, parameters):
    """Outputs and all gradients."""
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = [torch.autograd.grad(y, [x, *parameters], dy, retain_graph=True) for y in (theirs, ours)]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-10)


class Named(nn.Module):
    """F with what their layer passes on to it."""

    def __init__(self, module, **given):
        super().__init__()
        self.module, self.given = module, given

    def forward(self, x):
        out = self.module(hidden_states=x, **self.given) if self.given else self.module(x)
        return out[0] if isinstance(out, tuple) else out


def test_gated_rmsnorm_is_axk2s(monkeypatch):
    from transformers.models.axk2.modeling_axk2 import AXK2Config, AXK2GatedRMSNorm

    theirs = stirred(AXK2GatedRMSNorm(AXK2Config(hidden_size=WIDTH, gated_norm_rank=5)).double())
    ours = nfrs.nn.GatedRMSNorm(WIDTH, rank=5, eps=1e-6, dtype=torch.float64)
    weights = [theirs.norm.weight, theirs.mlp.fc1.weight, theirs.mlp.fc2.weight]
    assert [name for name, _ in ours.named_parameters()] == ["weight", "gate_down", "gate_up"]
    for name, weight in zip(("weight", "gate_down", "gate_up"), weights, strict=True):
        setattr(ours, name, weight)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    with monkeypatch.context() as wide:  # theirs computes in f32
        wide.setattr(torch.Tensor, "float", torch.Tensor.double)
        wide.setattr(torch, "float32", torch.float64)
        y = theirs(x)
    agree(y, ours(x), x, weights)
    ours.reset_parameters()
    assert (ours.weight == 1).all() and 0.01 < ours.gate_down.std() < 0.03


@pytest.mark.parametrize("number", range(LAYERS))
def test_depth_scaled_is_beams(number):
    from transformers.models.beam.modeling_beam import BeamConfig, BeamDecoderLayer

    config = BeamConfig(
        hidden_size=WIDTH,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=LAYERS,
        mlp_layer_types=["dense"] * LAYERS,
        attn_implementation="eager",
    )
    block = stirred(BeamDecoderLayer(config, number).double())
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    turned = torch.randn(2, 1, 5, 8, dtype=torch.float64).unbind(0)
    given = {"position_embeddings": turned, "attention_mask": None}
    theirs = block(x, **given)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    norms = {"norm1": block.input_layernorm, "post_norm1": block.post_attention_layernorm}
    attention = residual(Named(block.self_attn, **given), "depth-scaled", number, "self-attention", norms)
    norms = {"norm2": block.pre_feedforward_layernorm, "post_norm2": block.post_feedforward_layernorm}
    feed_forward = residual(block.mlp, "depth-scaled", number, "feed-forward", norms)
    agree(theirs, feed_forward(attention(x)), x, [*block.parameters()])


def test_variance_gate_is_muse_sparks():
    from transformers.models.muse_spark.modeling_muse_spark import MuseSparkResidualGate

    class Config:
        hidden_size, residual_gate_temperature = WIDTH, 0.3

    gate, f = MuseSparkResidualGate(Config).double(), nn.Linear(WIDTH, WIDTH).double()
    with torch.no_grad():
        gate.gate.copy_(torch.linspace(-1, 2.5, WIDTH))  # from closed to where the clamp at 10⁻³ holds
    made = residual(f, "variance-gate", 1, "feed-forward", {"norm2": nn.Identity(), "post_norm2": nn.Identity()})
    made.residual_gate2 = gate.gate
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    assert (torch.sigmoid(gate.gate / 0.3).square() > 1 - 1e-3).any()
    agree(gate(x, f(x)), made(x), x, [gate.gate, *f.parameters()])


def test_the_first_values_are_theirs():
    tables = {name: nfrs.nn.TransformerEncoder(nfrs.nn.TransformerEncoderLayer(8, 2, residual=name), 3) for name in NEW}
    values = {
        name: [layer.stream_scale.item() for layer in stack.layers] for name, stack in tables.items() if "x0" in name
    }
    assert values["x0-lambdas"] == pytest.approx([1.15, 1.10, 1.05])
    lambdas = [layer.embedding_scale.item() for layer in tables["x0-lambdas"].layers]
    assert lambdas == pytest.approx([0.20, 0.125, 0.05])
    assert all(layer.forward_gate.item() == 0 for layer in tables["gpas"].layers)
    assert [layer.self_attn.value_scale.item() for layer in list(tables["value-residual"].layers)[1:]] == [0.5, 0.5]


NEW = ("gpas", "value-residual", "x0-lambdas")


def test_gpas_scales_x_and_not_its_gradient():
    """At a, y = (1 − silu(a))x, and dx is dy (Chen et al. 2025, eq 5)."""
    made = nfrs.nn.Residual(nn.Identity(), WIDTH, scheme="gpas", norm="rmsnorm").double()
    made._modules["norm2"] = nn.Identity()
    made.sublayer = Zero()
    with torch.no_grad():
        made.forward_gate.fill_(0.7)
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    y = made(x)
    silu = 0.7 * torch.sigmoid(torch.tensor(0.7, dtype=torch.float64))
    torch.testing.assert_close(y, (1 - silu) * x)
    dx, da = torch.autograd.grad(y.sum(), [x, made.forward_gate])
    torch.testing.assert_close(dx, torch.ones_like(x))
    assert da.item() != 0


class Zero(nn.Module):
    def forward(self, x):
        return torch.zeros_like(x)
