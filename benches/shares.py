"""Where an update's time goes: shares by kind of work, of this package and of PyTorch's own Transformer.

    python benches/shares.py CORPUS [--precision f32 bf16] [--updates 10] [--side ours eager] [--model JSON] [--top 0]

Both train as in training.py, with torch.profiler over so many updates after ten others. An operation counts its own
time, without that of operations that it calls. "outside" is the rest of the time: Rust and Python between operations,
waiting for a batch, and what the profiler itself costs. The allocator is told to keep memory on either side. `--model`
takes options of TransformerConfig, with `--side ours` only. `--top` lists so many operations with their calls an
update.

For machine code instead of operations, build with symbols (`maturin develop --profile profiling`) and run
`perf record -g` on our_worker.py.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import our_worker
import torch_worker
from torch.profiler import ProfilerActivity, profile
from windows import Quit

import normformer_rs as nfrs

WARM_UP = 10
KINDS: dict[str, tuple[str, ...]] = {
    "products": ("mm", "addmm", "linear", "matmul"),
    "attention": ("attention", "softmax"),
    "norms and residual steps": ("norm", "residual", "dropout", "bernoulli", "relu", "threshold"),
    "loss": ("cross_entropy", "log_softmax", "nll_loss"),
    "copies and casts": ("copy", "cat", "clone", "contiguous", "index", "embedding", "gather"),
    "sums": ("sum",),
    "additions and other arithmetic": ("add", "mul", "div", "fill", "zero", "eq", "where"),
    "optimizer": ("adam", "optimizer"),
}
"""The kinds of work, each with parts of operations' names. An operation belongs to the kind with the longest part that
its name contains."""


class Profiler:
    """Takes the place of the workers' `Windows`: ten updates run first, then `updates` run under the profiler, then
    training ends."""

    def __init__(self, updates: int) -> None:
        self.updates, self.done = updates, 0
        self.profile = profile(activities=[ProfilerActivity.CPU])

    def before_update(self) -> None:
        if self.done == WARM_UP:
            self.profile.start()
            self.start = time.perf_counter()
        if self.done == WARM_UP + self.updates:
            self.seconds = time.perf_counter() - self.start
            self.profile.stop()
            raise Quit

    def after_update(self, target_tokens: int, loss: float) -> None:
        self.done += 1


def kind(operation: str) -> str:
    name = operation.lower().rpartition("::")[2]
    found = [(len(part), kind) for kind, parts in KINDS.items() for part in parts if part in name]
    return max(found)[1] if found else "others"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="folder with train.en.gz, train.de.gz, valid.en.gz, valid.de.gz")
    parser.add_argument("--precision", nargs="+", default=["f32", "bf16"], choices=["f32", "bf16"])
    parser.add_argument("--side", nargs="+", default=["ours", "eager"], choices=["ours", "eager"])
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--model", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--top", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.model and arguments.side != ["ours"]:
        parser.error("--model changes this package's model only: give --side ours with it")
    nfrs.keep_memory()

    columns: dict[str, tuple[float, dict[str, tuple[float, float]]]] = {}
    for side in arguments.side:
        for precision in arguments.precision:
            seen = Profiler(arguments.updates)
            size: dict[str, Any] = {"max_tokens": arguments.max_tokens, "precision": precision}
            if side == "ours":
                our_worker.train(arguments.corpus, seen, arguments.model, {**size, "accumulate": 2})
            else:
                torch_worker.train(arguments.corpus, seen, update_freq=2, eager=True, **size)
            columns[f"{side} {precision}"] = (seen.seconds / seen.updates, operations(seen))
    table(columns)
    for name, (_, found) in columns.items():
        for operation, (seconds, calls) in sorted(found.items(), key=lambda item: -item[1][0])[: arguments.top]:
            print(f"{name:12} {operation:50} {1e3 * seconds:8.2f} ms {calls:8.1f} calls an update")


def operations(seen: Profiler) -> dict[str, tuple[float, float]]:
    """Returns, by operation, its seconds and its calls in an update."""
    return {event.key: (event.self_cpu_time_total / 1e6 / seen.updates, event.count / seen.updates)
            for event in seen.profile.key_averages()}  # fmt: skip


def table(columns: dict[str, tuple[float, dict[str, tuple[float, float]]]]) -> None:
    print(f"{'ms an update (share)':32}" + "".join(f"{name:>20}" for name in columns))
    shares = {}
    for name, (seconds, found) in columns.items():
        shares[name] = defaultdict[str, float](float)
        for operation, (time_, _) in found.items():
            shares[name][kind(operation)] += time_
        shares[name]["outside"] = seconds - sum(shares[name].values())
        shares[name]["all"] = seconds
    for row in (*KINDS, "others", "outside", "all"):
        cells = (f"{1e3 * found[row]:9.1f} ({found[row] / found['all']:6.1%})" for found in shares.values())
        print(f"{row:32}" + "".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()
