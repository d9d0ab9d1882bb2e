"""Group scaling, and PowerNorm-V as autograd differentiates PowerNorm's release in its warm-up, in f64."""

import pytest
import torch
from authors_support import module

from normformer_rs import nn

AUTHORS = "sIncerass/powernorm", "9ea6226a3203d5d6fcee07a5c6dec38ec6bc5e9f", "fairseq/modules/norms/mask_powernorm.py"
WIDTH = 8


def assert_equal(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def two_of(x):
    return x.requires_grad_(), x.detach().clone().requires_grad_()


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groupscaling(groups):
    """Our scaling stands before a norm; this one, in evaluation at its first values, divides by √(1 + ε) alone."""
    torch.manual_seed(0)
    authors = module(*AUTHORS)
    ours = nn.PowerNormV(WIDTH, groups=groups, dtype=torch.float64).eval()
    our_x, their_x = two_of(2 * torch.randn(7, 3, WIDTH, dtype=torch.float64) + 0.5)
    y, expected = ours(our_x) * (1 + 1e-5) ** 0.5, authors.GroupScaling1D(group_num=groups)(their_x)
    assert_equal(y, expected)
    slope = torch.randn_like(y)
    assert_equal(torch.autograd.grad(y, our_x, slope), torch.autograd.grad(expected, their_x, slope))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
def test_powernorm_v(groups, masked):
    """In its last step of warm-up the release divides by the batch's ψ and moves ψ² once: PN-V, but for the gradient,
    which it approximates. Here every step is the last one, and autograd takes the gradient of the release's forward.
    """
    torch.manual_seed(0)
    changes = {"PowerFunction.apply(": "PowerFunction.forward(Context(), "}
    authors = module(*AUTHORS, changes)
    authors.Context = type("Context", (), {"save_for_backward": lambda *_: None})
    theirs = authors.MaskPowerNorm(WIDTH, group_num=groups).double()
    ours = nn.PowerNormV(WIDTH, groups=groups, dtype=torch.float64)
    weights = dict(theirs.named_parameters())
    for parameter in weights.values():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict({**ours.state_dict(), **weights})
    real = torch.arange(7)[:, None] < torch.tensor([7, 5, 2] if masked else [7, 7, 7])
    for step in range(1, 9):
        theirs.warmup_iters = step
        ours.train(step < 7), theirs.train(step < 7)
        our_x, their_x = two_of(2 * torch.randn(7, 3, WIDTH, dtype=torch.float64) + 0.5)
        y, expected = ours(our_x, ~real), theirs(their_x, ~real.T)
        assert_equal(y[real], expected[real])
        slope = torch.randn_like(y)[real]
        found = torch.autograd.grad(y[real], [our_x, *ours.parameters()], slope)
        expected = torch.autograd.grad(expected[real], [their_x, *theirs.parameters()], slope)
        assert_equal(found, expected)
        assert_equal(ours.running_phi.flatten(), theirs.running_phi.flatten())
