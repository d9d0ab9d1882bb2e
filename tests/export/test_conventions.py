"""What torch.nn's norms accept and refuse, ours accept and refuse."""

import pytest
import torch
from torch import nn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn

D = 8
TABLE = [entry["name"] for entry in nfrs.tables()["norms"]]
RUNNING = ("batchnorm", "powernorm-v", "powernorm", "repbn", "prepbn")


def test_batch_norm_loads_torchs_state():
    theirs, x = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)), torch.randn(20, D)
    for _ in range(3):
        theirs(x)
    ours = nn.Sequential(nn.Linear(D, D), nfnn.BatchNorm(D))
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


@pytest.mark.parametrize("name", TABLE)
def test_eps(name):
    kind = nfnn.norm_class(name)
    if name in ("dyt", "derf"):
        with pytest.raises(TypeError, match="unexpected keyword argument 'eps'"):
            kind(D, eps=1e-5)
        return
    for eps in (-1e-5, float("nan"), *((0.0,) if name in RUNNING else ())):
        wanted = "greater than 0" if name in RUNNING else "at least 0"
        with pytest.raises(nfrs.InputError, match=f"eps must be {wanted}, got {eps}"):
            kind(D, eps=eps)
    if name not in RUNNING:
        assert kind(D, eps=0.0)(torch.randn(3, D)).isfinite().all()


@pytest.mark.parametrize("name", TABLE)
def test_jagged_tensors(name):
    norm = nfnn.norm_class(name)(D)
    parts = [torch.randn(2, D), torch.randn(3, D)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    y = norm(x) + x
    (dx,) = torch.autograd.grad(y.values().square().sum(), x)
    fresh, rows = nfnn.norm_class(name)(D), torch.cat(parts).requires_grad_()
    fresh.load_state_dict(norm.state_dict())
    expected = fresh(rows) + rows
    torch.testing.assert_close(y.values(), expected)
    torch.testing.assert_close(dx.values(), torch.autograd.grad(expected.square().sum(), rows)[0])


def test_jagged_tensors_that_are_refused():
    norm, dense = nfnn.PowerNormV(D), torch.randn(2, 5, D)
    holes = torch.nested.narrow(dense, 1, torch.tensor([0, 1]), torch.tensor([3, 2]), layout=torch.jagged)
    norm(holes.contiguous())
    columns = torch.nested.nested_tensor_from_jagged(torch.randn(D, D), torch.tensor([0, 3, D]), jagged_dim=2)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    for x, rest, message in [
        (holes, (), r"call x\.contiguous\(\) first"),
        (columns, (), "must have one width"),
        (holes.contiguous(), (mask,), "leave out padding_mask"),
    ]:
        with pytest.raises(nfrs.InputError, match=message):
            norm(x, *rest)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_without_jagged_layout_are_refused():
    with pytest.raises(nfrs.InputError, match=r"layout=torch\.jagged"):
        nfnn.RMSNorm(D)(torch.nested.nested_tensor([torch.randn(2, D), torch.randn(3, D)]))


def test_a_residual_may_drop_everything():
    block = nfnn.Residual(nn.Linear(D, D), D, scheme="prenorm", dropout=1.0)
    x = torch.randn(3, D)
    assert torch.equal(block(x), x)
