"""Muon and NorMuon against their authors' optimizers: 20 steps in f64."""

import json

import pytest
import torch
from authors_support import module

from normformer_rs import _core

SIZES = [(6, 10), (10, 6), (7, 7)]
IN_F64 = {"G.bfloat16()": "G.clone()"}


def compare(optimizer, options, state, size):
    """`optimizer`: makes the authors' optimizer of a parameter."""
    torch.manual_seed(0)
    ours = torch.randn(size, dtype=torch.float64)
    theirs = torch.nn.Parameter(ours.clone())
    steps = optimizer(theirs)
    for _ in range(20):
        gradient = torch.randn(size, dtype=torch.float64)
        theirs.grad = gradient.clone()
        steps.step()
        _core.step_by_rule(
            json.dumps({"weight_decay": 0.1, "muon_scale": "spectral", **options}), ours, gradient, state, 0.02
        )
    torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_normuon(size):
    authors = module("zichongli5/NorMuon", "d45c9a4280d758e2cf0b2b8333765d040e953937", "normuon.py", IN_F64)
    state = [torch.zeros(size, dtype=torch.float64), torch.zeros(size[0], 1, dtype=torch.float64)]
    made = lambda p: authors.SingleDeviceNorMuon([p], lr=0.02, weight_decay=0.1)  # noqa: E731
    compare(made, {"optimizer": "normuon"}, state, size)


@pytest.mark.parametrize("size", SIZES)
def test_muon(size):
    """The authors add 1e-7 to the norm; ours, as torch.optim.Muon, takes the larger of the two."""
    changes = IN_F64 | {"X.norm(dim=(-2, -1), keepdim=True) + 1e-7": "X.norm(dim=(-2, -1), keepdim=True)"}
    authors = module("KellerJordan/Muon", "857d1adc159e098212f828d927460782d3da59e9", "muon.py", changes)
    made = lambda p: authors.SingleDeviceMuon([p], lr=0.02, weight_decay=0.1)  # noqa: E731
    compare(made, {"optimizer": "muon"}, [torch.zeros(size, dtype=torch.float64)], size)
