"""Row norms on tensors that are shared out over processes: DTensor's placements, and FSDP2."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from normformer_rs import nn as nfnn
from normformer_rs.nn.registry import FUSED
from normformer_rs.nn.sharding import OPERATORS
from normformer_rs.surgery import swap_norms
from row_norms import ENTRIES

D = 8
NORMS = {
    "layernorm": lambda: nfnn.LayerNorm(D),
    "layernorm, no bias": lambda: nfnn.LayerNorm(D, bias=False),
    "rmsnorm": lambda: nfnn.RMSNorm(D),
    "scalenorm": lambda: nfnn.ScaleNorm(D),
    "scalenorm-fixed": lambda: nfnn.norm_class("scalenorm-fixed")(D),
    "dyt": lambda: nfnn.DyT(D),
}
SCHEMES = ("postnorm", "prenorm", "rezero", "deepnorm", "sandwich", "layerscale")
GROWING = ("branchnorm", "prores", "gpas")
SWAPS = ("layernorm", "scalenorm", "rmsnorm", "dyt")


def numbers(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shards(mesh):
    """Every norm, with the rows of either dimension shared out, is the norm of the whole."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_module, distribute_tensor

    x, dy = numbers(4, 6, D, seed=1), numbers(4, 6, D, seed=2)
    for make in NORMS.values():
        for place in (Shard(0), Shard(1), Replicate()):
            plain = make().double()
            norm = distribute_module(copy.deepcopy(plain), mesh)
            whole, part = x.clone().requires_grad_(), distribute_tensor(x, mesh, [place]).requires_grad_()
            expected, y = plain(whole), norm(part)
            expected.backward(dy)
            y.backward(distribute_tensor(dy, mesh, [place]))
            assert y.placements == part.grad.placements == (place,)
            torch.testing.assert_close(y.full_tensor(), expected)
            torch.testing.assert_close(part.grad.full_tensor(), whole.grad)
            for found, wanted in zip(norm.parameters(), plain.parameters(), strict=True):
                assert found.grad.placements == ((Replicate() if place == Replicate() else Partial()),)
                torch.testing.assert_close(found.grad.full_tensor(), wanted.grad)
        with pytest.raises(RuntimeError, match="a norm needs whole rows, but dimension 2, its width, is sharded"):
            norm(distribute_tensor(x, mesh, [Shard(2)]))


def residuals(mesh):
    """A residual connection with sharded or replicated rows is that of the whole, with its gradients."""
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    x, dy = numbers(4, 6, D, seed=1), numbers(4, 6, D, seed=2)
    for scheme in (*SCHEMES, *GROWING):
        torch.manual_seed(0)
        plain = nfnn.Residual(nn.Linear(D, D), D, scheme=scheme, layers=2, layer=1).double()
        for place in (Shard(0), Replicate()):
            residual = distribute_module(copy.deepcopy(plain), mesh)
            plain.zero_grad()
            whole, part = x.clone().requires_grad_(), distribute_tensor(x, mesh, [place]).requires_grad_()
            expected, y = plain(whole), residual(part)
            expected.backward(dy)
            y.backward(distribute_tensor(dy, mesh, [place]))
            torch.testing.assert_close(y.full_tensor(), expected)
            torch.testing.assert_close(part.grad.full_tensor(), whole.grad)
            for found, wanted in zip(residual.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(found.grad.full_tensor(), wanted.grad)


def running(mesh):
    """Norms with statistics are those of the whole in evaluation, and refuse to train by name."""
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    x, dy = numbers(4, 6, D, seed=1), numbers(4, 6, D, seed=2)
    for kind in (nfnn.BatchNorm, nfnn.PowerNormV, nfnn.PowerNorm):
        plain = kind(D).double()
        plain(x)  # moves the statistics
        norm = distribute_module(copy.deepcopy(plain), mesh)
        for place in (Shard(0), Replicate()):
            whole, part = x.clone().requires_grad_(), distribute_tensor(x, mesh, [place]).requires_grad_()
            expected, y = plain.eval()(whole), norm.eval()(part)
            expected.backward(dy)
            y.backward(distribute_tensor(dy, mesh, [place]))
            torch.testing.assert_close(y.full_tensor(), expected)
            torch.testing.assert_close(part.grad.full_tensor(), whole.grad)
            with pytest.raises(ValueError, match=f"DTensor cannot follow the running statistics of {kind.__name__}"):
                norm.train()(part)


def train(model, steps, part=lambda x: x):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, target = numbers(4, 6, D, seed=step), numbers(4, 6, D, seed=100 + step)
        optimizer.zero_grad()
        (model(part(x)) - part(target)).square().mean().backward()
        optimizer.step()


def fully_sharded(mesh):
    """A swapped model that FSDP2 shares out learns as the whole one does."""
    from torch.distributed.fsdp import fully_shard

    for to in SWAPS:
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.GELU(), nn.Linear(D, D), nn.LayerNorm(D)).double()
        swap_norms(whole, to)
        sharded = copy.deepcopy(whole)
        for part in (sharded[1], sharded[4], sharded):
            fully_shard(part, mesh=mesh)
        train(whole, 3)
        train(sharded, 3, lambda x: x.chunk(mesh.size())[mesh.get_rank()])
        for found, wanted in zip(sharded.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(found.full_tensor(), wanted)


def work(rank, ranks, meeting):
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        shards(mesh)
        residuals(mesh)
        running(mesh)
        fully_sharded(mesh)
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # of torch's own
def test_rows_on_one_rank(tmp_path):
    work(0, 1, tmp_path / "meet")


@pytest.mark.full
def test_rows_on_two_ranks(tmp_path):
    mp.spawn(work, (2, str(tmp_path / "meet")), nprocs=2)


@pytest.mark.full
def test_the_rules_cost_nothing_until_dtensor_comes():
    code = "import sys; from normformer_rs import nn; assert 'torch.distributed.tensor' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_fused_row_norm_has_a_rule():
    assert {kind.operator for kind in FUSED} == set(OPERATORS) == set(ENTRIES)
