"""Lion against its authors' optimizer for PyTorch: 20 steps in f64, the momentum included."""

import json

import pytest
import torch
from authors_support import module

from normformer_rs import _core

AUTHORS = "google/automl", "6a54c8741e7c3265d4547c4f35f47a0391122dc5", "lion/lion_pytorch.py"


@pytest.mark.parametrize("size", [(6, 10), (10, 6), (7,)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lion(size, weight_decay):
    """With the authors' β₂, 0.99; here it is that of `beta2`, as Adam's (docs/spec.md §4.9)."""
    torch.manual_seed(0)
    ours = torch.randn(size, dtype=torch.float64)
    theirs = torch.nn.Parameter(ours.clone())
    steps = module(*AUTHORS).Lion([theirs], lr=0.02, weight_decay=weight_decay)
    state = [torch.zeros(size, dtype=torch.float64)]
    options = json.dumps({"optimizer": "lion", "weight_decay": weight_decay, "beta2": 0.99})
    for _ in range(20):
        gradient = torch.randn(size, dtype=torch.float64)
        theirs.grad = gradient.clone()
        steps.step()
        _core.step_by_rule(options, ours, gradient, state, 0.02)
    torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(state[0], steps.state[theirs]["exp_avg"], rtol=0, atol=1e-12)
