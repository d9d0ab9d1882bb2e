"""Row norms on tensors that are shared out over processes: DTensor's placements, and FSDP2."""

import copy
import subprocess
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import normformer_rs as nfrs
from normformer_rs import load_swapped
from normformer_rs import nn as nfnn
from normformer_rs.nn.registry import FUSED
from normformer_rs.nn.sharding import OPERATORS
from normformer_rs.surgery import swap_norms, swap_residuals
from row_norms import ENTRIES

ROWS = ("layernorm", "rmsnorm", "scalenorm", "scalenorm-fixed", "dyt", "derf")

D = 8
NORMS = [*(e["name"] for e in nfrs.tables()["norms"]), *(e["name"] for e in nfrs.tables()["families"])]
RUNNING = {"batchnorm": "BatchNorm", "powernorm": "PowerNorm", "powernorm-v": "PowerNormV"}
RUNNING |= {"repbn": "RepBN", "prepbn": "PRepBN"}
SCHEMES = [entry["name"] for entry in nfrs.tables()["residuals"]]
SHARP_SCHEMES = ("postnorm", "deepnorm", "sandwich", "gpas", "normformer")
SWAPPED = ("branchnorm", "mhc")
SCHEMES_OF_LLAMA = ("sandwich", "deepnorm", "branchnorm", "dlcl", "mhc", "value-residual", "resi-dual", "normformer")
SCHEMES_OF_LLAMA += ("prores", "x0-lambdas", "attnres")
SWAPS = ("layernorm", "scalenorm", "rmsnorm", "dyt")


def numbers(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same_when_shared(plain, mesh, place, *given):
    """With parameters on every rank and rows shared out, a module is that of the whole, with all its gradients."""
    from torch.distributed.tensor import distribute_module, distribute_tensor

    module = distribute_module(copy.deepcopy(plain), mesh)
    plain.zero_grad()
    whole = [x.clone().requires_grad_() for x in given]
    parts = [distribute_tensor(x, mesh, [place]).requires_grad_() for x in given]
    expected, y = plain(*whole), module(*parts)
    dy = numbers(*expected.shape, seed=9)
    expected.backward(dy)
    y.backward(distribute_tensor(dy, mesh, [place]))
    assert y.placements == (place,)
    torch.testing.assert_close(y.full_tensor(), expected)
    for part, x in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.grad.full_tensor(), x.grad)
    for (name, found), wanted in zip(module.named_parameters(), plain.parameters(), strict=True):
        if wanted.grad is None:
            assert found.grad is None or not found.grad.full_tensor().any(), name
        else:
            torch.testing.assert_close(found.grad.full_tensor(), wanted.grad)
    return module, parts


def norm_of(name):
    torch.manual_seed(0)
    return nfnn.norm_class(name)(D, **({"part": 0.5} if name == "rmsnorm:partial" else {})).double()


def norms(mesh, names):
    """Every norm, with the rows of either dimension shared out, is the norm of the whole. Norms with running statistics
    refuse to train, by name."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    x = numbers(4, 6, D, seed=1)
    for name in names:
        for place in (Shard(0), Shard(1), Replicate()):
            if name == "gated-rmsnorm" and place == Shard(1):
                continue  # its matrix product is torch's, which refuses this placement, as nn.Linear does
            plain = norm_of(name)
            if name in RUNNING:
                plain(x)  # moves the statistics
                plain.eval()
            module, parts = same_when_shared(plain, mesh, place, x)
            if name in RUNNING:
                with pytest.raises(ValueError, match=f"DTensor cannot follow the .* statistics of {RUNNING[name]} "):
                    module.train()(*parts)
            for leaf, p in () if name == "gated-rmsnorm" else module.named_parameters():
                if leaf.startswith("row_"):
                    continue  # prepbn's norm of rows, which evaluation leaves out
                assert p.grad.placements == (Replicate() if place == Replicate() else Partial(),)
        if name in ROWS:
            with pytest.raises(RuntimeError, match="a norm needs whole rows, but dimension 2, its width, is sharded"):
                module(distribute_tensor(x, mesh, [Shard(2)]))


def residuals(mesh, schemes):
    """A residual connection, an encoder, and an encoder with a decoder are those of the whole. A scheme that changes
    more than the connection refuses to be one, by name."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.nn.attention import SDPBackend, sdpa_kernel

    x, target = numbers(4, 6, D, seed=1), numbers(4, 5, D, seed=2)
    for scheme in schemes:
        layer = {"d_model": D, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
        torch.manual_seed(0)
        encoder = nfnn.TransformerEncoder(nfnn.TransformerEncoderLayer(**layer, residual=scheme), 2)
        both = nfnn.Transformer(D, 2, 1, 1, 16, 0.0, batch_first=True, residual=scheme)
        try:
            one = nfnn.Residual(nn.Linear(D, D), D, scheme=scheme, layers=2, layer=1)
        except nfrs.InputError as refusal:
            assert f"{scheme} also works" in str(refusal)
            one = None
        for place in (Shard(0), Replicate()):
            if one is not None:
                same_when_shared(one.double(), mesh, place, x)
            with sdpa_kernel(SDPBackend.MATH):  # torch has no sharding rule for its flash attention on CPUs
                same_when_shared(encoder.double(), mesh, place, x)
                same_when_shared(both.double(), mesh, place, x, target)


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


def swapped_and_sharded(mesh, schemes):
    """A Llama with another scheme, shared out by blocks, learns as the whole one does; t counts; it is saved whole."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=30, **shape)).double()
    tokens = torch.randint(0, 30, (4, 7), generator=torch.Generator().manual_seed(1))
    for scheme in schemes:
        whole, sharded = (copy.deepcopy(plain) for _ in range(2))
        for model in (whole, sharded):  # no copy of a swapped model, since a copy's t follows the original's
            table = swap_residuals(model, scheme, init=None)
        for part in (*sharded.model.layers, sharded):
            fully_shard(part, mesh=mesh)
        losses = []
        for model, own in ((whole, tokens), (sharded, tokens.chunk(mesh.size())[mesh.get_rank()])):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(3):
                optimizer.zero_grad()
                model(input_ids=own, labels=own).loss.backward()
                optimizer.step()
            losses.append(model(input_ids=tokens, labels=tokens).loss.detach())
        torch.testing.assert_close(*losses, msg=scheme)
        with pytest.raises(nfrs.InputError, match=r"undo\(\) first"):
            table.undo()
        ts = [[int(m.t) for m in model.modules() if "t" in m._buffers] for model in (whole, sharded)]
        assert ts[0] == ts[1] and set(ts[0]) <= {4}, (scheme, ts)
        state = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if mesh.get_rank() == 0:
            with tempfile.TemporaryDirectory() as folder:
                sharded.save_pretrained(folder, state_dict=state)
                loaded = load_swapped(folder).state_dict()
            assert all(torch.equal(loaded[name], t) for name, t in state.items()), scheme


def work(rank, ranks, meeting, names, schemes):
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        norms(mesh, names)
        residuals(mesh, schemes)
        fully_sharded(mesh)
        swapped_and_sharded(mesh, SWAPPED if schemes == SHARP_SCHEMES else SCHEMES_OF_LLAMA)
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # of torch's own
def test_rows_on_one_rank(tmp_path):
    work(0, 1, tmp_path / "meet", [*ROWS, "batchnorm"], SHARP_SCHEMES)


@pytest.mark.parametrize(
    ("names", "schemes"),
    [
        pytest.param(["rmsnorm", *RUNNING], SHARP_SCHEMES, marks=pytest.mark.full, id="some"),
        pytest.param(NORMS, SCHEMES, marks=pytest.mark.long, id="all"),
    ],
)
def test_rows_on_two_ranks(tmp_path, names, schemes):
    mp.spawn(work, (2, str(tmp_path / "meet"), names, schemes), nprocs=2)


@pytest.mark.full
def test_the_rules_cost_nothing_until_dtensor_comes():
    code = "import sys; from normformer_rs import nn; assert 'torch.distributed.tensor' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_fused_row_norm_has_a_rule():
    assert {kind.operator for kind in FUSED} == set(OPERATORS) == set(ENTRIES)
