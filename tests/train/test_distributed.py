"""Several processes that train one model, over gloo: statistics of all ranks' batches, and the training loop."""

import ast
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from train_support import events, losses, weights

import normformer_rs as nfrs
from normformer_rs import nn as nfnn
from processes import errors_of

D, RANKS, STEPS = 6, 3, 4
NORMS = {
    "batchnorm": lambda **o: nfnn.BatchNorm(D, **o),
    "powernorm-v": lambda **o: nfnn.PowerNormV(D, **o),
    "powernorm": lambda **o: nfnn.PowerNorm(D, warmup_iters=2, **o),
    "repbn": lambda **o: nfnn.RepBN(D, **o),
    "prepbn": lambda **o: nfnn.PRepBN(D, steps=3, warm=1, **o),
    "powernorm-release": lambda **o: nfnn.PowerNorm(D, warmup_iters=2, mode="release", groups=2, **o),
}
# How statistics are computed: by the CPU's kernels, by formulas, or by what a GPU's tensors take (formulas too; float32
# because float64 has no kernels there anyway).
WAYS = ["kernels", "composed", "on a device"]
OPERATORS = ["batch_norm", "power_norm_v", "power_norm"]
CASES = list(itertools.product(NORMS, [False, True], WAYS))


def made(name, dtype=torch.float64, **options):
    norm = NORMS[name](dtype=dtype, **options)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, D))
    return norm


def batches(masked):
    """Per step (x, dy, padding) of all ranks, each (ranks, rows, d): far from the origin; one rank has no real row."""
    generator = torch.Generator().manual_seed(3)
    for step in range(STEPS):
        shape = (RANKS, 5 + step, D)
        x = (
            torch.randn(shape, generator=generator, dtype=torch.float64) * (1 + step)
            + torch.arange(RANKS)[:, None, None]
        )
        padding = torch.rand(shape[:2], generator=generator) < 0.4
        padding[step % RANKS] = True
        yield x, torch.randn(shape, generator=generator, dtype=torch.float64), padding if masked else None


def steps(norm, masked, part):
    """What comes of every step: y, dx, dγ, dβ and the buffers. `part` cuts a rank's rows out of a tensor."""
    found = []
    for x, dy, padding in batches(masked):
        x, dy = part(x).to(norm.weight.dtype, copy=True).requires_grad_(), part(dy).to(norm.weight.dtype)
        norm.zero_grad()
        y = norm(x, None if padding is None else part(padding))
        y.backward(dy)
        if isinstance(norm, nfnn.PRepBN):
            norm.set_t(len(found) + 2)
        found.append([y.detach(), x.grad, norm.weight.grad.clone(), norm.bias.grad.clone()])
        found[-1] += [b.clone() for b in norm.buffers()]
    return found


def composed_kernels():
    """Sends the operators to their composed formulas, as other devices do."""
    library = torch.library.Library("normformer_rs", "IMPL")
    for name in OPERATORS:
        for op in (name, f"{name}_backward"):
            overload = getattr(torch.ops.normformer_rs, op).default

            def call(*args, _overload=overload, **kwargs):
                return _overload.redispatch(
                    torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd), *args, **kwargs
                )

            library.impl(op, call, "CPU", with_keyset=False, allow_override=True)
    return library


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    found = {}
    for way in WAYS:
        library = composed_kernels() if way == "composed" else None
        nfrs._core.cuda_stand_in(way == "on a device")
        dtype = torch.float32 if way == "on a device" else torch.float64
        before = nfrs._core.operator_counts()
        for name, masked, _ in (case for case in CASES if case[2] == way):
            found[name, masked, way] = steps(made(name, dtype, sync=True), masked, lambda t: t[rank])
        after = nfrs._core.operator_counts()
        calls = [after[op][i] - before[op][i] for op in OPERATORS for i in (0, 1)]
        assert all((calls[i] > 0) == ((i % 2 == 0) == (way == "kernels")) for i in range(len(calls))), calls
        nfrs._core.cuda_stand_in(False)
        del library
    # Statistics that are not synchronised stay this rank's.
    found["alone"] = steps(made("batchnorm"), False, lambda t: t[rank])
    torch.save(found, f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(worker, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / str(rank)) for rank in range(RANKS)]


@pytest.mark.parametrize("name,masked,way", CASES)
@pytest.mark.one_in(all=24)
def test_the_ranks_batches_are_one_batch(found, name, masked, way):
    tolerance = 1e-5 if way == "on a device" else 1e-9
    whole = steps(made(name), masked, lambda t: t.flatten(0, 1))
    for step, (y, dx, dweight, dbias, *buffers) in enumerate(whole):
        ranks = [each[name, masked, way][step] for each in found]
        for got, want in [
            (torch.cat([r[0] for r in ranks]), y),
            (torch.cat([r[1] for r in ranks]), dx),
            (sum(r[2] for r in ranks), dweight),
            (sum(r[3] for r in ranks), dbias),
            *((b, want) for r in ranks for b, want in zip(r[4:], buffers)),
        ]:
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, check_dtype=False)


@pytest.mark.full
def test_without_sync_each_rank_has_its_own(found):
    for rank, each in enumerate(found):
        for got, want in zip(each["alone"], steps(made("batchnorm"), False, lambda t, rank=rank: t[rank])):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_an_unknown_group_is_said():
    with pytest.raises(ValueError, match="no process group that normformer_rs was told of"):
        torch.ops.normformer_rs.batch_norm(torch.randn(3, D), train=True, group="elsewhere")


@pytest.mark.long
def test_statistics_of_ranks_with_little_memory_left():
    """Numbers of all ranks are refused as a kernel's other work space is, and the process lives on. torch's fake group
    stands for the ranks."""
    program = """
        import resource
        import torch
        import torch.distributed as dist
        import torch.fx.experimental.symbolic_shapes  # a first backward pass imports it
        from torch.testing._internal.distributed.fake_pg import FakeStore
        from normformer_rs import nn
        torch.set_num_threads(1)
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        columns = 4_000_000
        norm, x = nn.BatchNorm(columns, elementwise_affine=False, sync=True), torch.zeros(2, columns)
        x.requires_grad_()
        y, limit, told = norm(x), resource.getrlimit(resource.RLIMIT_AS), {}
        dy = torch.zeros(2, columns)
        for name, call in {
            "forward": lambda: norm(x),
            "backward": lambda: torch.autograd.grad(y, x, dy, retain_graph=True),
        }.items():
            for megabytes in range(20, 1600, 20):
                now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (now + (megabytes << 20), limit[1]))
                try:
                    call()
                    said = "done"
                except RuntimeError as e:
                    said = "work space" if "work space" in str(e) else "torch's" if "memory" in str(e) else str(e)
                finally:
                    resource.setrlimit(resource.RLIMIT_AS, limit)
                told[name, said] = told.get((name, said), 0) + 1
                if said == "done":
                    break
        print(told)
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    words = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    told = ast.literal_eval(done.stdout)
    wanted = {(name, said) for name in ("forward", "backward") for said in ("done", "work space")}
    assert wanted <= told.keys() <= wanted | {(name, "torch's") for name in ("forward", "backward")}, told


def command(output, data, ranks, **options):
    settings = {"d-model": 16, "d-ff": 24, "heads": 2, "encoder-layers": 2, "decoder-layers": 2, "dropout": 0.2}
    settings |= {"updates": 6, "max-tokens": 40, "schedule": "constant", "lr": 1e-2, "evaluate-every": 3, "seed": 2}
    settings |= {key.replace("_", "-"): value for key, value in {**data, **options}.items()}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    flags = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return [sys.executable, *launcher, "-m", "normformer_rs", "train", "--no-bpe", "--output", str(output), *flags]


def run(*arguments, resume=False, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = command(*arguments, **options) + (["--resume"] if resume else [])
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)


def same_weights(a, b, tolerance):
    a, b = weights(a), weights(b)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options",
    [{"norm": "scalenorm"}, {"residual": "admin", "activation-checkpointing": "true"}, {"optimizer": "normuon"}],
    ids=["scalenorm", "admin", "normuon"],
)
@pytest.mark.one_in(all=3)
def test_ranks_are_accumulation(tmp_path, corpus, options):
    """Two ranks take turns with the micro-batches, and the random numbers, that one rank accumulates."""
    flags = {k: v for k, v in options.items() if v != "true"}
    extra = [f"--{k}" for k, v in options.items() if v == "true"]
    for output, ranks, accumulate in [("alone", 1, 4), ("two", 2, 2)]:
        words = command(tmp_path / output, corpus, ranks, accumulate=accumulate, **flags) + extra
        done = subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    alone, two = losses(tmp_path / "alone"), losses(tmp_path / "two")
    assert list(alone) == list(two) == [1, 2, 3, 4, 5, 6]
    for update, loss in alone.items():
        assert two[update] == pytest.approx(loss, rel=2e-6)
    assert len(events(tmp_path / "two", "evaluated")) == 2 and events(tmp_path / "two", "started")[0]["ranks"] == 2
    same_weights(tmp_path / "alone", tmp_path / "two", 2e-4)


@pytest.mark.full
def test_a_checkpoint_does_not_depend_on_the_ranks(tmp_path, corpus):
    assert run(tmp_path / "run", corpus, 2, updates=3, accumulate=1, norm="batchnorm").returncode == 0
    done = run(tmp_path / "run", corpus, 1, updates=6, accumulate=2, norm="batchnorm", resume=True)
    assert done.returncode == 0, done.stderr
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


@pytest.mark.full
def test_what_one_rank_says_stops_all(tmp_path, corpus):
    assert run(tmp_path / "run", corpus, 1).returncode == 0
    done = run(tmp_path / "run", corpus, 2)
    assert done.returncode != 0 and "already holds a run" in done.stderr


def wait_for(folder, wanted, *processes):
    """Until the run has made more updates than that, or a process has ended."""
    while all(process.poll() is None for process in processes):
        if (folder / "log.jsonl").exists() and len(losses(folder)) > wanted:
            return
        time.sleep(0.01)


@pytest.mark.parametrize("place", ["between updates", "within an evaluation"])
@pytest.mark.one_in(all=2)
def test_ctrl_c_saves_once_for_all(tmp_path, corpus, place):
    wanted = 5
    if place == "within an evaluation":
        wanted = 2  # the evaluation after the third update takes seconds
        for name in ("valid_source", "valid_target"):
            Path(corpus[name]).write_text(Path(corpus[name]).read_text() * 1000)
    words = command(tmp_path / "run", corpus, 2, updates=100000)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for(tmp_path / "run", wanted, process)
    os.killpg(process.pid, signal.SIGINT)
    errors = errors_of(process)
    assert errors.count("--resume goes on") == 2, errors
    last = max(losses(tmp_path / "run"))
    if place == "within an evaluation":
        assert last == 3 and not events(tmp_path / "run", "evaluated")
        for name in ("valid_source", "valid_target"):
            Path(corpus[name]).write_text("".join(Path(corpus[name]).read_text().splitlines(True)[:8]))
    assert run(tmp_path / "run", corpus, 2, updates=last + 3, resume=True).returncode == 0
    assert list(losses(tmp_path / "run")) == list(range(1, last + 4))


AGAIN = """
import json, os, sys, time
from train_support import fit
output, corpus = sys.argv[1], json.loads(sys.argv[2])
for number in range(3):
    if int(os.environ["RANK"]) == number % 2:
        time.sleep(0.5)  # the other one is there first
    fit(f"{output}/{number}", corpus, training={"updates": 2, "max_tokens": 40})
"""


@pytest.mark.parametrize("launcher", ["torchrun", "variables"])
@pytest.mark.one_in(all=2)
def test_ranks_train_one_model_after_another(tmp_path, corpus, launcher):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    (tmp_path / "again.py").write_text(AGAIN)
    words = [str(tmp_path / "again.py"), str(tmp_path), json.dumps({k: str(v) for k, v in corpus.items()})]
    place = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    if launcher == "torchrun":
        starts = [(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], place)]
    else:
        place |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        starts = [([], {**place, "RANK": str(rank)}) for rank in range(2)]
    ranks = [
        subprocess.Popen([sys.executable, *more, *words], env={**os.environ, **own}, stderr=subprocess.PIPE, text=True)
        for more, own in starts
    ]
    said = [errors_of(rank) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), said
    for number in range(3):
        assert list(losses(tmp_path / str(number))) == [1, 2]
        assert events(tmp_path / str(number), "started")[0]["ranks"] == 2


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.one_in(all=2)
def test_a_rank_that_loses_its_partner_says_so_in_one_line(tmp_path, corpus, dies):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = command(tmp_path / "run", corpus, 1, updates=100000)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(words, env={**os.environ, **place, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    wait_for(tmp_path / "run", 4, *ranks)
    ranks[dies].kill()
    said = errors_of(ranks[1 - dies])
    errors_of(ranks[dies])
    assert ranks[1 - dies].returncode == 4 and "Traceback" not in said
    (line,) = [line for line in said.splitlines() if "error:" in line]
    assert f"rank {1 - dies} of 2 lost a partner" in line and "--resume" in line
    assert run(tmp_path / "run", corpus, 2, updates=max(losses(tmp_path / "run")) + 2, resume=True).returncode == 0
