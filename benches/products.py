"""The matrix products of a training update, shape by shape: MKL as torch calls it, OpenBLAS as numpy does, oneDNN, and
the crate `gemm`.

    cargo build --release --manifest-path benches/gemm/Cargo.toml
    python benches/products.py [--rows 3300] [--rounds 7] [--output results/products.csv]

An update of training.py's model (transformer-tiny on multi30k-bpe-en-de, two micro-batches of `--rows` real tokens a
side) multiplies, in f32,

    forward  y = x Wᵀ,    dx  dx = dy W,    dW  dW = dyᵀ x

for each linear layer, and blocks of rows for the output matrix. MKL and OpenBLAS get their operands as the loop has
them, and write to memory that is kept. oneDNN gets both row by row, and makes its result anew.

Each library runs in a process of its own, for its idle threads wait actively for more work, and would slow down another
library's in the same process. The processes take turns, and each round begins with another one. The times are medians
over the rounds.
OMP_NUM_THREADS sets the threads of all four.

MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell ONEDNN_MAX_CPU_ISA=AVX2 holds all to AVX2. Prints GFLOP/s, and
what an update's products take with each library and with the best one for each shape. Fails if a result is wrong. The
crate, which no variable holds to AVX2, is measured only if it has been built.
"""

import argparse
import csv
import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from our_worker import MODEL

VOCABULARY = 9712
CRATE = Path(__file__).parent / "gemm" / "target" / "release" / "libgemm_side.so"
BLOCKS = 3
"""The number of blocks of rows in which the products with the output matrix are computed (src/train/loss.rs)."""
MICRO_BATCHES = 2
PAUSE = 0.2
"""Seconds after which threads of the library that was measured before wait for work asleep."""


@dataclass(frozen=True)
class Product:
    """A product C (m, n) = A (m, k) B (k, n). `of` says which of a linear layer's products it is: forward, dx or dW."""

    of: str
    m: int
    n: int
    k: int
    calls: int
    """The number of such products in an update."""

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


def linear(outputs: int, inputs: int, rows: int, calls: int) -> list[Product]:
    calls *= MICRO_BATCHES
    return [
        Product("forward", rows, outputs, inputs, calls),
        Product("dx", rows, inputs, outputs, calls),
        Product("dW", outputs, inputs, rows, calls),
    ]


def products(rows: int) -> list[Product]:
    d, ff = MODEL["d_model"], MODEL["d_ff"]
    encoders, decoders = MODEL["encoder_layers"], MODEL["decoder_layers"]
    layers = encoders + decoders
    return [
        *linear(3 * d, d, rows, layers),  # queries, keys and values of self-attention
        *linear(d, d, rows, layers + 2 * decoders),  # outputs of attention, queries of cross-attention
        *linear(2 * d, d, rows, decoders),  # keys and values of cross-attention, from the encoder's output
        *linear(ff, d, rows, layers),
        *linear(d, ff, rows, layers),
        *linear(VOCABULARY, d, rows // BLOCKS, BLOCKS),
    ]


def call_of(side: str, p: Product) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    """Returns a function that computes the product with the library `side`, and the product in f64."""
    generator = torch.Generator().manual_seed(1)
    rows = lambda *size: torch.rand(size, generator=generator) - 0.5  # noqa: E731
    if p.of == "forward":
        a, b = rows(p.m, p.k), rows(p.n, p.k).t()
    elif p.of == "dx":
        a, b = rows(p.m, p.k), rows(p.k, p.n)
    else:
        a, b = rows(p.k, p.m).t(), rows(p.k, p.n)
    wanted = a.double() @ b.double()
    if side == "MKL":
        to = torch.empty(p.m, p.n)
        return lambda: torch.mm(a, b, out=to), wanted
    if side == "OpenBLAS":
        other, left, right = np.empty((p.m, p.n), np.float32), a.numpy(), b.numpy()
        return lambda: torch.from_numpy(np.matmul(left, right, out=other)), wanted
    if side == "oneDNN":
        dense = a.contiguous().to_mkldnn(), b.t().contiguous().to_mkldnn()
        return lambda: torch._C._nn.mkldnn_linear(*dense), wanted
    return of_crate(a, b, torch.empty(p.m, p.n)), wanted


def of_crate(a: torch.Tensor, b: torch.Tensor, to: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Returns a function that computes to = ab with the crate `gemm`."""
    product = ctypes.CDLL(str(CRATE)).product
    matrix = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_ssize_t]
    product.argtypes = [*[ctypes.c_size_t] * 3, *matrix * 3, ctypes.c_size_t]
    given = [part for t in (to, a, b) for part in (t.data_ptr(), *t.stride())]
    shape, threads = (a.shape[0], b.shape[1], a.shape[1]), torch.get_num_threads()

    def call(operands: tuple = (a, b)) -> torch.Tensor:  # the crate reads their memory
        product(*shape, *given, threads)
        return to

    return call


def seconds(call: Callable[[], torch.Tensor], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def work(side: str) -> None:
    """Measures the products that are named on standard input, a JSON line each, until it ends.

    Answers with the seconds of a call. A product's first line checks its result, too.
    """
    last = None
    for line in sys.stdin:
        p = Product(**json.loads(line))
        if p != last:
            call, wanted = call_of(side, p)
            found = call()
            dense = found.to_dense() if found.is_mkldnn else found
            torch.testing.assert_close(dense.double(), wanted, rtol=1e-4, atol=1e-3, msg=f"{p}, {side}")
            times, last = max(1, round(0.1 / seconds(call, 5))), p
        time.sleep(PAUSE)
        seconds(call, 3)
        print(seconds(call, times), flush=True)


class Side:
    """A library in a process of its own."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, __file__, "--side", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self, p: Product) -> float:
        """Returns the seconds of one call of the product."""
        print(json.dumps(asdict(p)), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{p}: the library's process has failed, see its message above")
        return float(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3300)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        return work(arguments.side)
    sides = {name: Side(name) for name in ("MKL", "OpenBLAS", "oneDNN", *(["gemm"] if CRATE.exists() else []))}

    def measured(p: Product) -> dict[str, float]:
        taken = {name: [] for name in sides}
        for i in range(arguments.rounds):
            for name in [*sides][i % len(sides) :] + [*sides][: i % len(sides)]:
                taken[name].append(sides[name].seconds(p))
        return {name: statistics.median(times) for name, times in taken.items()}

    table = []
    for p in products(arguments.rows):
        found = measured(p)
        best = min(found, key=lambda name: found[name])
        row = {"product": p.of, "m": p.m, "n": p.n, "k": p.k, "calls": p.calls}
        row |= {f"{name} GFLOP/s": round(p.flops / taken / 1e9, 1) for name, taken in found.items()}
        row |= {f"{name} ms": round(1e3 * taken * p.calls, 2) for name, taken in found.items()}
        table.append({**row, "best": best, "best ms": round(1e3 * found[best] * p.calls, 2)})
        print(" ".join(f"{key} {value}" for key, value in table[-1].items()), flush=True)
    for name in (*sides, "best"):
        print(f"an update's products with {name}: {sum(row[f'{name} ms'] for row in table):.0f} ms")
    square = Product("dx", 2048, 2048, 2048, 1)
    for name, taken in measured(square).items():
        print(f"2048² with {name}: {square.flops / taken / 1e9:.0f} GFLOP/s")
    if arguments.output:
        with arguments.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, table[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)


if __name__ == "__main__":
    main()
