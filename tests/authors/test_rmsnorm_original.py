"""The families `rmsnorm:original` and `rmsnorm:partial` against RMSNorm's authors' module, in f64."""

import pytest
import torch
from authors_support import module

from normformer_rs import nn

AUTHORS = "bzhangGo/rmsnorm", "2e726f1a3f106bb719056422f4f9b6aca03d3ce6", "rmsnorm_torch.py"
WIDTH = 40
CASES = {"original": ("rmsnorm:original", {}, {}), "partial": ("rmsnorm:partial", {}, {"p": 1 / 16})}
CASES |= {"partial, 30%": ("rmsnorm:partial", {"part": 0.3}, {"p": 0.3})}
CASES |= {"options": ("rmsnorm", {"eps_place": "outside", "eps": 1e-3}, {"eps": 1e-3})}


@pytest.mark.parametrize("scale", [1.0, 1e-7], ids=["usual", "tiny"])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(case, scale):
    """Rows of usual and of tiny numbers, beside which ε counts. The authors' bias, off by default, we do not have."""
    torch.manual_seed(0)
    name, options, theirs = CASES[case]
    theirs = module(*AUTHORS).RMSNorm(WIDTH, **theirs)
    ours = nn.norm_class(name)(WIDTH, dtype=torch.float64, **options)
    torch.testing.assert_close(ours.weight, theirs.scale.double(), rtol=0, atol=0)  # the first values
    theirs = theirs.double()
    torch.nn.init.normal_(theirs.scale)
    ours.load_state_dict({"weight": theirs.scale})
    our_x = (scale * torch.randn(4, 5, WIDTH, dtype=torch.float64)).requires_grad_()
    their_x = our_x.detach().clone().requires_grad_()
    y, expected = ours(our_x), theirs(their_x)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    slope = torch.randn_like(y)
    y.backward(slope), expected.backward(slope)
    torch.testing.assert_close(our_x.grad * scale, their_x.grad * scale, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.weight.grad, theirs.scale.grad, rtol=0, atol=1e-12)
