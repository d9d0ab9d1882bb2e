"""Residual schemes at one point, to the eight digits of vectors that were computed without PyTorch."""

import pytest
import torch
from torch import nn

from normformer_rs import nn as nfnn

X, F = [1.0, -2.0, 3.0, 0.5], [0.5, 0.5, -1.0, 2.0]
X0 = [0.2, 0.1, -0.3, 0.4]


class Given(nn.Module):
    """F(x) = f; keeps x."""

    def forward(self, x):
        self.x = x
        return torch.tensor([F], dtype=torch.float64)


def near(found, expected):
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64), rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    "scheme,options,expected",
    [
        ("prenorm", {}, [1.5, -1.5, 2.0, 2.5]),
        ("postnorm", {}, [0.78113336, -0.78113336, 1.04151115, 1.30188893]),
        ("peri-ln", {}, [1.42640128, -1.57359872, 2.14719744, 2.20560511]),
        ("mix-ln", {"layers": 4}, [0.78113336, -0.78113336, 1.04151115, 1.30188893]),
        ("mix-ln", {"layers": 3}, [1.5, -1.5, 2.0, 2.5]),
        (
            "deepnorm",
            {"layers": 6, "norm": "layernorm", "norm_eps": 1e-5},
            [0.23768344, -1.66378406, 0.99451349, 0.43158714],
        ),
    ],
    ids=str,
)
def test_the_sum(scheme, options, expected):
    options = {"norm": "rmsnorm", "norm_eps": 1e-6, "layers": 1, "layer": 0, **options}
    block = nfnn.Residual(Given(), 4, scheme=scheme, **options).double()
    near(block(torch.tensor([X], dtype=torch.float64)), expected)


def test_b2t_adds_the_layers_input():
    """LN(x₀ + x + f), where F(x₀) of attention and its norm give x."""
    layer = nfnn.TransformerEncoderLayer(
        4, 1, 4, 0.0, layer_norm_eps=1e-5, batch_first=True, residual="b2t", encoder_layers=1
    ).double()
    layer.norm1.register_forward_hook(lambda *_: torch.tensor([[X]], dtype=torch.float64))
    layer.linear2.register_forward_hook(lambda *_: torch.tensor([[F]], dtype=torch.float64))
    near(layer(torch.tensor([[X0]], dtype=torch.float64))[0], [0.29822443, -1.64808238, 0.29822443, 1.05163352])


def test_prores_at_a_quarter_of_its_way():
    """L = 4, T·L = 400, t = 100: layer l has 1/l."""
    for layer, alpha in enumerate([1.0, 0.5, 0.3333333333333333, 0.25]):
        block = nfnn.Residual(Given(), 4, scheme="prores", prores_steps=100, layer=layer, layers=4).double()
        assert nfnn.set_num_updates(block, 100) == 1
        found = block(torch.tensor([X], dtype=torch.float64))
        near(found, [x + alpha * f for x, f in zip(X, F, strict=True)])


@pytest.mark.parametrize("mode", ["constant", "weight"])
def test_ln_scaling_in_the_fourth_layer(mode):
    """RMS(x)/2 by either reading."""
    named = {"norm": "rmsnorm", "residual": "ln-scaling", "ln_scaling_mode": mode, "encoder_layers": 4, "layer": 3}
    layer = nfnn.TransformerEncoderLayer(4, 1, 4, 0.0, layer_norm_eps=1e-6, batch_first=True, **named).double()
    nn.init.zeros_(layer.self_attn.out_proj.weight)
    read = []
    layer.linear1.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0][0]))
    layer(torch.tensor([[X]], dtype=torch.float64))
    near(read[0], [0.26490643, -0.52981287, 0.7947193, 0.13245322])
    weight = layer.norm2.weight.mean().item()
    assert weight == (1.0 if mode == "constant" else 0.5)
