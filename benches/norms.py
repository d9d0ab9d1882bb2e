"""Norms and the residual step against PyTorch's own calls, on one instruction set: how many times as fast.

    NORMFORMER_RS_CPU=avx2 ATEN_CPU_CAPABILITY=avx2 python benches/norms.py

A round calls ours and PyTorch's in turn, and gives one ratio of their times; the figure is the rounds' median. It
measures memory as it comes, where the allocator may give fresh pages, then freed memory that the process keeps
(`normformer_rs.keep_memory()`). Prints CSV.

PyTorch's calls are F.layer_norm and F.rms_norm with weights of x's type, and x + f before them for the residual step
(without dropout). The step is timed forward and backward, from gradients of both x+ and y.
"""

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import normformer_rs

OPS = torch.ops.normformer_rs
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
EPS = 1e-5
Pair = tuple[Callable[[], object], Callable[[], object]]
"""Two calls that compute the same: this package's and PyTorch's."""


def pairs(rows: int, width: int, dtype: torch.dtype) -> Iterator[tuple[str, str, Pair]]:
    """Yields each comparison: the operator's name, "forward" or "both" (forward and backward), and the two calls."""
    x, f = (torch.randn(rows, width).to(dtype).requires_grad_() for _ in range(2))
    dx, dy = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype)
    weight, bias = torch.ones(width, requires_grad=True), torch.zeros(width, requires_grad=True)
    theirs, shift = weight.detach().to(dtype).requires_grad_(), bias.detach().to(dtype).requires_grad_()
    seed = torch.tensor([1, 2, 3])
    norms: dict[str, Pair] = {
        "layer_norm": (
            lambda: OPS.layer_norm(x, weight, bias, EPS)[0],
            lambda: F.layer_norm(x, (width,), theirs, shift, EPS),
        ),
        "rms_norm": (
            lambda: OPS.rms_norm(x, weight, None, EPS)[0],
            lambda: F.rms_norm(x, (width,), theirs, EPS),
        ),
    }
    inputs = {"layer_norm": ((x, weight, bias), (x, theirs, shift)), "rms_norm": ((x, weight), (x, theirs))}
    for name, (ours, torchs) in norms.items():
        mine, its = inputs[name]
        yield name, "forward", (_without_gradient(ours), _without_gradient(torchs))
        yield name, "both", (_with_gradient(ours, mine, dy), _with_gradient(torchs, its, dy))

    def step() -> tuple[Tensor, ...]:
        return OPS.layer_norm_residual(x, f, None, None, weight, bias, EPS, 0.0, seed, 0)[:2]

    def calls() -> tuple[Tensor, ...]:
        x_plus = x + f
        return x_plus, F.layer_norm(x_plus, (width,), theirs, shift, EPS)

    yield (
        "residual step",
        "both",
        (
            lambda: torch.autograd.grad(step(), (x, f, weight, bias), (dx, dy)),
            lambda: torch.autograd.grad(calls(), (x, f, theirs, shift), (dx, dy)),
        ),
    )


def _without_gradient(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return torch.no_grad()(call)


def _with_gradient(call: Callable[[], Tensor], inputs: tuple[Tensor, ...], dy: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(call(), inputs, dy)


def seconds(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def compare(pair: Pair, rounds: int) -> tuple[float, float, float]:
    """Returns the median of PyTorch's time / our time, and the medians of our and of PyTorch's time in ms."""
    ours, torchs = pair
    calls = max(1, round(0.004 / min(seconds(ours, 2), seconds(ours, 2))))
    seconds(torchs, 2)
    times = [(seconds(ours, calls), seconds(torchs, calls)) for _ in range(rounds)]
    mine, its = (1e3 * statistics.median(side) for side in zip(*times, strict=True))
    return statistics.median(b / a for a, b in times), mine, its


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 8, 64, 256], help="of x")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="a part of 'layer_norm forward', 'residual step both' and the like")
    arguments = parser.parse_args()
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["memory", "dtype", "megabytes", "what", "pass", "ratio", "ours_ms", "torch_ms"])
    for memory in ("as it comes", "kept"):
        if memory == "kept":
            normformer_rs.keep_memory()
        for name in arguments.dtypes:
            for megabytes in arguments.megabytes:
                rows = megabytes * 2**20 // (arguments.width * DTYPES[name].itemsize)
                for what, passes, pair in pairs(rows, arguments.width, DTYPES[name]):
                    if arguments.only in f"{what} {passes}":
                        found = compare(pair, arguments.rounds)
                        figures = [f"{found[0]:.3f}", *(f"{ms:.4f}" for ms in found[1:])]
                        table.writerow([memory, name, megabytes, what, passes, *figures])
                        sys.stdout.flush()


if __name__ == "__main__":
    main()
