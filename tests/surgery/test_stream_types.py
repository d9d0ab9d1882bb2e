"""Swapped blocks that cast their stream between reading and adding, as those with `residual_in_fp32` do."""

import copy

import pytest
import torch
from torch import Tensor, nn

import normformer_rs as nfrs

D = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)


class WideSum(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.first_norm(x))
        x = (x.float() + h).to(h.dtype)
        h = self.second(self.second_norm(x))
        return (x.float() + h).to(h.dtype)


class WideStream(Block):
    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        x = x + self.first(self.first_norm(x.to(dtype))).float()
        x = x + self.second(self.second_norm(x.to(dtype))).float()
        return x.to(dtype)


class NarrowSum(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.first_norm(x))
        x = (x.bfloat16() + h.bfloat16()).to(h.dtype)
        h = self.second(self.second_norm(x))
        return (x.bfloat16() + h.bfloat16()).to(h.dtype)


class Model(nn.Module):
    def __init__(self, block: type[Block]):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(block() for _ in range(3)), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@pytest.mark.parametrize("scheme", ["mhc", "mhc-lite", "hyper-connections", "prenorm"])
@pytest.mark.parametrize("block", [WideSum, WideStream, NarrowSum])
def test_a_cast_stream_computes_the_same_in_every_type(block, scheme):
    model = Model(block).eval()
    x = torch.randn(3, 5, D)
    nfrs.swap_residuals(model, scheme, init=None, example=(x,))
    wanted = model(x)
    for dtype in (torch.bfloat16, torch.float64):
        cast = copy.deepcopy(model).to(dtype)
        y = cast(x.to(dtype))
        y.square().sum().backward()
        assert y.dtype == dtype
        assert all(p.grad.isfinite().all() for p in cast.layers.parameters())
        bound = 1e-5 if dtype == torch.float64 and block is not NarrowSum else 0.1
        torch.testing.assert_close(y.float(), wanted, rtol=0, atol=bound)
