"""What a user, a hook of autograd or a small memory may do to an operator: an error in torch's words, never memory."""

import os
import subprocess
import sys
import textwrap

import fuzz
import pytest
import torch
from operators_support import OF_X

import normformer_rs as nfrs

OPS = torch.ops.normformer_rs
EPS = 1e-5
X = torch.randn(6, 8)
ONE = torch.ones((), dtype=torch.float64)
RANGES = torch.tensor([[0, 6, 0, 6]])


def column_backward(op, x=X, dy=X, stats=None, **buffers):
    stats = torch.zeros(6, 8) if stats is None else stats
    return getattr(OPS, op + "_backward")(dy, x, None, None, None, None, stats, train=True)


def attention_backward(q=X, k=X, v=X, dout=X, lse=None, ranges=RANGES, heads=2):
    lse = torch.zeros(6, heads) if lse is None else lse
    return OPS.attention_backward(dout, q, k, v, lse, ranges, heads, False, 1.0, 0.0, None, 0)


def entropy_backward(dloss=X[:, 0], logits=X, target=None, mask=None, lse=X[:, :2]):
    target = torch.zeros(6, dtype=torch.int64) if target is None else target
    return OPS.label_smoothed_cross_entropy_backward(dloss, logits, target, mask, lse, 1.0, 0.0, -1)


def residual_backward(dx_plus=X, dy=X, x=None, f=X, stats=None, alpha=None, p=0.0, seed=None):
    stats = torch.zeros(6, 2) if stats is None else stats
    return OPS.layer_norm_residual_backward(dx_plus, dy, X, x, f, alpha, None, None, None, stats, EPS, p, seed, 0)


WRONG = {
    # (call, part of the message)
    "a scalar": (lambda: OPS.lp_norm_forward(torch.tensor(1.0), None, 3.0, EPS), "x must have shape"),
    "lp_norm's statistics": (
        lambda: OPS.lp_norm_backward(X, X, None, torch.zeros(6, 2), 3.0, EPS),
        r"stats must have shape \[6, 1\], got shape \[6, 2\]",
    ),
    "another dtype of k": (
        lambda: attention_backward(
            q=X.double(), k=X.half(), v=X.half(), dout=X.double(), lse=torch.zeros(6, 2).double()
        ),
        "k must be Double, as q is; got Half",
    ),
    "attention's lse": (lambda: attention_backward(lse=torch.zeros(6, 1)), r"lse must have shape \[6, 2\]"),
    "lse in 16 bits": (lambda: attention_backward(lse=torch.zeros(6, 2).half()), "lse must be float32"),
    "attention's dout": (lambda: attention_backward(dout=X[:5]), r"dout must have shape \[6, 8\]"),
    "fewer keys than the ranges": (lambda: attention_backward(k=X[:2], v=X[:2]), "lies outside"),
    **{
        f"{op}'s statistics in 16 bits": (
            lambda op=op: column_backward(op, stats=torch.zeros(6, 8).half()),
            "stats must be float32, which x is computed in; got Half",
        )
        for op in ("batch_norm", "power_norm", "power_norm_v")
    },
    "statistics of fewer columns": (lambda: column_backward("batch_norm", stats=torch.zeros(6, 7)), r"shape \[6, 8\]"),
    "a gradient of fewer rows": (lambda: column_backward("batch_norm", dy=X[:5]), "dy must have shape"),
    "one buffer of two": (lambda: OPS.batch_norm(X, None, None, None, X[0], train=True), "or neither"),
    "a row norm's statistics": (
        lambda: OPS.layer_norm_backward(X, X, None, None, torch.zeros(6, 1), EPS),
        r"stats must have shape \[6, 2\], got shape \[6, 1\]",
    ),
    "statistics on another device": (
        lambda: OPS.layer_norm_backward(X, X, None, None, torch.zeros(6, 2, device="meta"), EPS),
        "stats must be where x is, on cpu, got meta",
    ),
    "a row norm's gradient in 16 bits": (
        lambda: OPS.layer_norm_backward(X.half(), X, None, None, torch.zeros(6, 2), EPS),
        "dy must be Float, as x is; got Half",
    ),
    "a step's statistics": (lambda: residual_backward(stats=torch.zeros(5, 2)), r"stats must have shape \[6, 2\]"),
    "a step's branch": (lambda: residual_backward(f=X[:, :7]), r"f must have shape \[6, 8\]"),
    "a step's stream": (lambda: residual_backward(x=X[:5], alpha=X[0]), r"x must have shape \[6, 8\]"),
    "a gain of another width": (lambda: residual_backward(alpha=X[0, :7]), "alpha must hold 1 or 8 numbers"),
    "no seed": (lambda: residual_backward(p=0.5), "a seed is needed"),
    "a seed of two numbers": (lambda: residual_backward(p=0.5, seed=torch.zeros(2).long()), "seed must hold 3 numbers"),
    "cross-entropy's lse": (lambda: entropy_backward(lse=X[:5, :2]), r"lse must have shape \[6, 2\]"),
    "cross-entropy's dloss": (lambda: entropy_backward(dloss=X[0, :1]), r"dloss must have shape \[6\]"),
    "cross-entropy's targets": (lambda: entropy_backward(target=torch.zeros(6)), "target must be int64"),
    "cross-entropy's mask": (lambda: entropy_backward(mask=torch.ones(7).bool()), r"mask must have shape \[8\]"),
    "relu's gradient": (lambda: OPS.relu_dropout_backward(X[:5], X, 0.0), "dy must have shape"),
    "logits that overlap": (
        lambda: OPS.label_smoothed_cross_entropy_(
            torch.zeros(1, 8).expand(6, 8), torch.zeros(6).long(), None, 1.0, 0.0, -1, ONE
        ),
        "must be contiguous",
    ),
    "buffers of one memory": (
        lambda: OPS.adam_(*[X[0].clone()] * 4, *[torch.ones(1)] * 3, 0.9, 0.9, EPS),
        "memory location",
    ),
}


# values, what has no kernel for tensors without memory, and two devices
ONLY_CPU = (
    "fewer keys than the ranges",
    "logits that overlap",
    "buffers of one memory",
    "statistics on another device",
)


@pytest.mark.parametrize(
    "case,device", [(case, d) for case in WRONG for d in ("cpu", "meta") if d == "cpu" or case not in ONLY_CPU]
)
def test_a_wrong_tensor_is_named(case, device):
    call, message = WRONG[case]
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message) as caught, Everything(device):
        call()
    assert "panicked" not in str(caught.value)


class Everything(torch.utils._python_dispatch.TorchDispatchMode):
    """Sends the arguments of our operators to a device."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "normformer_rs" and self.device != "cpu":
            args = tuple(a.to(self.device) if isinstance(a, torch.Tensor) else a for a in args)
        return func(*args, **(kwargs or {}))


def half(t):
    return t.half() if t.is_floating_point() else t


@pytest.mark.parametrize(
    "call",
    [
        lambda x: OPS.layer_norm(x, None, None, EPS),
        lambda x: OPS.layer_norm_residual(x, x * 2, None, None, None, None, EPS, 0.0, None, 0),
        lambda x: OPS.batch_norm(x, train=True),
        lambda x: OPS.power_norm_v(x, train=True),
        lambda x: OPS.attention(x, x, x, RANGES, 2, False, 1.0, 0.0, None, 0),
        lambda x: OPS.label_smoothed_cross_entropy(x, torch.zeros(6).long(), None, 1.0, 0.0, -1),
        lambda x: (OPS.relu_dropout(x, 0.0, None, 0),),
    ],
    ids=["layer_norm", "residual", "batch_norm", "power_norm_v", "attention", "cross_entropy", "relu_dropout"],
)
def test_hooks_that_change_what_was_saved(call):
    x = X.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(half, lambda t: t):
        y = call(x)[0]
    with pytest.raises((RuntimeError, TypeError), match=r"must be|expected"):
        y.sum().backward()


@pytest.mark.parametrize("op", ["batch_norm", "power_norm_v"])
def test_hooks_that_change_the_device_of_what_is_differentiated_again(op):
    x = X.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.to("meta"), lambda t: t):
        y = getattr(OPS, op)(x, train=True)[0]
    with pytest.raises(ValueError, match=f"{op}: saved tensors must lie on cpu, got one on meta"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_hooks_that_change_the_shape_of_what_is_differentiated_again():
    x, weight = X.clone().requires_grad_(), torch.ones(8)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t[:, 1:] if t.shape == x.shape else t, lambda t: t):
        y = OPS.layer_norm(x, weight, None, EPS)[0]
    with pytest.raises(ValueError, match="layer_norm: weight must hold 1 or 7 numbers"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.parametrize("layout", ["to_sparse", "to_mkldnn"])
@pytest.mark.parametrize(
    "call",
    [
        *OF_X.values(),
        lambda x: OPS.layer_norm(X, x, None, EPS),
        lambda x: OPS.residual(x, x, None, None, None, None, EPS, 0.0, None, 0),
        lambda x: OPS.batch_norm(x, train=True),
        lambda x: OPS.attention(x, x, x, RANGES, 2, False, 1.0, 0.0, None, 0),
        lambda x: OPS.label_smoothed_cross_entropy(x, torch.zeros(6).long(), None, 1.0, 0.0, -1),
    ],
)
def test_other_layouts_are_refused(call, layout):
    with pytest.raises(NotImplementedError, match="must be a dense"):
        call(getattr(X, layout)())


def test_memory_that_was_taken_away():
    x = torch.randn(64, 64)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="only 0 bytes of storage"):
        OPS.layer_norm(x, None, None, EPS)
    with pytest.raises(RuntimeError, match="only 0 bytes of storage"):
        OPS.adam_(*[t.flatten() for t in (torch.zeros(64, 64),) * 3], x.view(-1), *[torch.ones(1)] * 3, 0.9, 0.9, EPS)


@pytest.mark.parametrize("rows", [2**33, 2**55])
def test_more_keys_than_memory(rows):
    q, k = torch.randn(4, 8), torch.randn(1, 8).expand(rows, 8)
    ranges = torch.tensor([[0, 4, 0, rows]])
    with pytest.raises(RuntimeError, match=r"not enough memory|can't allocate|overflow"):
        OPS.attention(q, k, k, ranges, 2, False, 1.0, 0.0, None, 0)


@pytest.mark.full
def test_kernels_with_little_memory_left():
    """Whatever a kernel asks for, and cannot have, is an exception; the process lives on."""
    program = """
        import resource
        import torch
        import normformer_rs
        OPS = torch.ops.normformer_rs
        torch.set_num_threads(1)
        columns = 5_000_000
        x, w = torch.zeros(2, columns, dtype=torch.bfloat16), torch.ones(columns, dtype=torch.bfloat16)
        target, one = torch.zeros(2, dtype=torch.int64), torch.ones((), dtype=torch.float64)
        y, stats = OPS.layer_norm(x, w, w, 1e-5)
        batch = OPS.batch_norm(x, w, w, train=True)[1]
        seed = torch.zeros(3, dtype=torch.int64)
        calls = {
            "cross_entropy": lambda: OPS.label_smoothed_cross_entropy(x, target, None, 1.0, 0.1, -1),
            "cross_entropy_": lambda: OPS.label_smoothed_cross_entropy_(x, target, None, 1.0, 0.1, -1, one),
            "layer_norm": lambda: OPS.layer_norm(x, w, w, 1e-5),
            "layer_norm_backward": lambda: OPS.layer_norm_backward(x, x, w, w, stats, 1e-5),
            "residual": lambda: OPS.rms_norm_residual(x, x, w, w, w, None, 1e-5, 0.1, seed, 0),
            "batch_norm": lambda: OPS.batch_norm(x, w, w, train=True),
            "batch_norm_backward": lambda: OPS.batch_norm_backward(x, x, w, None, None, None, batch, train=True),
            "relu_dropout": lambda: OPS.relu_dropout(x, 0.1, seed, 0),
        }
        limit = resource.getrlimit(resource.RLIMIT_AS)
        for name, call in calls.items():
            refused = passed = ours = 0
            for megabytes in (5, 15, 30, 60, 130, 2000):
                now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (now + (megabytes << 20), limit[1]))
                try:
                    call()
                    passed += 1
                except RuntimeError as e:
                    assert "memory" in str(e), e
                    refused += 1
                    ours += "work space" in str(e)
                finally:
                    resource.setrlimit(resource.RLIMIT_AS, limit)
            print(name, refused, passed, ours, flush=True)
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = {name: tuple(map(int, counts)) for name, *counts in map(str.split, done.stdout.splitlines())}
    assert len(told) == 8 and all(passed for _, passed, _ in told.values()), told
    assert told["cross_entropy"][2], "no work space of a kernel was refused"


THROWS = """
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <new>
static std::size_t armed = 0;
extern "C" void arm(std::size_t bytes) { armed = bytes; }
void* operator new(std::size_t bytes) {
  Dl_info by;
  if (bytes == armed && dladdr(__builtin_return_address(0), &by) && std::strstr(by.dli_fname, "normformer_rs/_core")) {
    armed = 0;
    throw 7;
  }
  if (void* p = std::malloc(bytes)) return p;
  throw std::bad_alloc();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
"""


@pytest.mark.full
def test_whatever_cpp_throws_is_an_error(tmp_path):
    """An int, where Rust calls attention through the dispatcher with ten arguments of 16 bytes."""
    library = tmp_path / "throws.so"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library), "-ldl"]
    subprocess.run(command, input=THROWS, text=True, check=True)
    program = """
        import ctypes, sys
        import torch
        import normformer_rs as nfrs
        shape = {"d_model": 8, "d_ff": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
        model, ids = nfrs.Transformer(nfrs.TransformerConfig(vocab_size=9, **shape)).eval(), torch.tensor([[5, 6, 2]])
        before = model(ids, ids)
        ctypes.CDLL(sys.argv[1]).arm(ctypes.c_size_t(160))
        try:
            model(ids, ids)
        except RuntimeError as error:
            print(error)
        assert torch.equal(model(ids, ids), before)
    """
    words = [sys.executable, "-c", textwrap.dedent(program), str(library)]
    done = subprocess.run(words, env=os.environ | {"LD_PRELOAD": str(library)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "C++ threw what is no std::exception" in done.stdout


def test_more_micro_batches_than_dropout_tells_apart():
    with pytest.raises(ValueError, match="accumulate must be at most 65536"):
        nfrs.Trainer(nfrs.TransformerConfig(), nfrs.TrainingConfig(accumulate=2**63 - 1), nfrs.DataConfig()).fit(
            "never"
        )


def test_a_target_that_is_no_class_where_there_is_no_kernel():
    """What torch.func runs is the formula, and it indexes by targets."""
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        torch.func.grad(
            lambda z: OPS.label_smoothed_cross_entropy(z, torch.full((6,), 9), None, 1.0, 0.0, -1)[0].sum()
        )(X)


@pytest.mark.parametrize("calls", [96, 1500])
@pytest.mark.one_in(all=2)
def test_fuzz(calls):
    told = []
    counts = fuzz.fuzz(calls, seed=calls, processes=2, out=told.append)
    assert counts["calls"] == calls and counts["accepted"] > calls / 4 and counts["refused"] > calls / 8, counts
    assert not (counts["crashes"] or counts["panics"] or counts["wrong values"]), "\n".join(told)


@pytest.mark.filterwarnings("ignore")  # of torch, about faulty arguments
def test_the_fuzzer_sees_a_wrong_value(monkeypatch):
    """Its twins are asked, and an error of a tenth is one in every type."""
    valid = [n for n in range(400) if "valid" in fuzz_kind(n)]
    assert len(valid) > 50
    own = fuzz.run
    monkeypatch.setattr(fuzz, "run", lambda op, a: [t * 1.1 if t.is_floating_point() else t for t in own(op, a)])
    assert sum(fuzz.call(0, n).startswith("wrong") for n in valid) > len(valid) / 4


def fuzz_kind(number):
    d = fuzz.Draw(0, number)
    d.one(*fuzz.OPS_BY_NAME)
    return d.one(*fuzz.HOWS)
