"""PowerNorm's release mode and BatchNorm against the modules of PowerNorm's authors: training and evaluation in f64."""

import pytest
import torch
from authors_support import module

from normformer_rs import nn

COMMIT = "9ea6226a3203d5d6fcee07a5c6dec38ec6bc5e9f"
FOLDER = "fairseq/modules/norms"
WIDTH = 8


def assert_equal(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def compare_step(ours, theirs, mask=None):
    """Compares the output, and the gradients of the input and of all parameters, on one random batch."""
    our_x = (2 * torch.randn(7, 3, WIDTH, dtype=torch.float64) + 0.5).requires_grad_()
    their_x = our_x.detach().clone().requires_grad_()
    y, expected = ours(our_x, mask), theirs(their_x, None if mask is None else mask.T)
    assert_equal(y, expected)
    slope = torch.randn_like(y)
    found = torch.autograd.grad(y, [our_x, *ours.parameters()], slope)
    assert_equal(found, torch.autograd.grad(expected, [their_x, *theirs.parameters()], slope))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("warmup", [0, 5])
def test_powernorm(groups, warmup, masked):
    """Twelve steps of training, through the warm-up and beyond, then evaluation; all of the state after each step."""
    authors = module("sIncerass/powernorm", COMMIT, f"{FOLDER}/mask_powernorm.py", {"saved_variables": "saved_tensors"})
    theirs = authors.MaskPowerNorm(WIDTH, warmup_iters=warmup, group_num=groups).double()
    ours = nn.PowerNorm(WIDTH, warmup_iters=warmup, groups=groups, mode="release", dtype=torch.float64)
    assert_equal(dict(ours.state_dict()), dict(theirs.state_dict()))  # the first values
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    mask = torch.arange(7)[:, None] >= torch.tensor([7, 5, 2]) if masked else None
    for step in range(14):
        ours.train(step < 12), theirs.train(step < 12)
        compare_step(ours, theirs, mask)
        assert_equal(dict(ours.state_dict()), dict(theirs.state_dict()))


def test_batchnorm():
    """Without padding, which the authors fill with the mean. Their running variance is unbiased, ours is biased."""
    theirs = module("sIncerass/powernorm", COMMIT, f"{FOLDER}/mask_syncbatchnorm.py").MaskSyncBatchNorm(WIDTH).double()
    ours = nn.BatchNorm(WIDTH, alpha=0.95, groups=1, dtype=torch.float64)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    for step in range(1, 6):
        compare_step(ours, theirs)
        assert_equal(ours.running_mean, theirs.running_mean)
        assert_equal((ours.running_var - 0.95**step) * 21 / 20, theirs.running_var - 0.95**step)
    ours.load_state_dict(theirs.state_dict())
    compare_step(ours.eval(), theirs.eval())
