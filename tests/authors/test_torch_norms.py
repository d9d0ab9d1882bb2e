"""layernorm, rmsnorm, lpnorm and l2norm against PyTorch's own code, of the version that is pinned here, in f64.

For lpnorm there is no code of authors (docs/spec.md §1.5): F.normalize has its clamp of ‖x‖_p, and no g.
"""

import math

import pytest
import torch
from torch.nn import functional as F

from normformer_rs import nn

COMMIT = "70d99e998b4955e0049d13a98d77ae1b14db1f45"  # of PyTorch 2.11
WIDTH = 12
pytestmark = pytest.mark.skipif(torch.version.git_version != COMMIT, reason="another version of PyTorch")


def normalised(p):
    def module(x, g):
        return g * F.normalize(x, p=p, dim=-1, eps=1e-5)

    return module


def torchs(module):
    """Returns the function that such a module of torch.nn computes of x and of given parameters."""
    names = [name for name, _ in module.named_parameters()]
    return lambda x, *weights: torch.func.functional_call(module, dict(zip(names, weights, strict=True)), x)


CASES = {"layernorm": (nn.LayerNorm(WIDTH), torchs(torch.nn.LayerNorm(WIDTH)))}
CASES["rmsnorm"] = nn.RMSNorm(WIDTH), torchs(torch.nn.RMSNorm(WIDTH, eps=1e-5))
CASES["rmsnorm, no ε"] = nn.RMSNorm(WIDTH, eps=None), torchs(torch.nn.RMSNorm(WIDTH))
CASES["l2norm"] = nn.L2Norm(WIDTH), lambda x: F.normalize(x, dim=-1)
CASES |= {f"lpnorm, p = {p}": (nn.LpNorm(WIDTH, p), normalised(p)) for p in (1.0, 1.5, 2.0, 3.0, math.inf)}


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-7])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(case, scale):
    """Usual rows, small ones, and tiny ones, beside which ε counts; two ties for the largest number."""
    torch.manual_seed(0)
    ours, theirs = CASES[case]
    weights = [torch.randn(p.shape, dtype=torch.float64, requires_grad=True) for p in ours.parameters()]
    x = scale * torch.randn(4, 5, WIDTH, dtype=torch.float64)
    x[0, :2, 7] = -5 * scale
    x[0, 1, 3] = 5 * scale
    x.requires_grad_()
    named = dict(zip(dict(ours.named_parameters()), weights, strict=True))
    y, expected = torch.func.functional_call(ours, named, x), theirs(x, *weights)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    slope = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, *weights], slope)
    expected = torch.autograd.grad(expected, [x, *weights], slope)
    torch.testing.assert_close(found[0] * scale, expected[0] * scale, rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1:], expected[1:], rtol=0, atol=1e-12)
