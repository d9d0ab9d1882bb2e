"""Instructions of small calls under callgrind, on one thread: exact counts, also on a busy machine.

    python benches/calls.py [CHECKOUT …] [--calls 200]

Needs Valgrind. CHECKOUT is a checkout whose extension is built; without one it is this checkout. Each call's x is
(2, 1, width), of width 512 and, in brackets, 1. "backward" includes the forward pass. torch's own layer_norm stands
beside. Instrumentation is off until all calls have run a few times, and the cost of Python's loop is subtracted.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
WIDTHS = (512, 1)
WARM_UP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[HERE.parent])
    parser.add_argument("--calls", type=int, default=200)
    arguments = parser.parse_args()
    measured = [[counts(checkout, width, arguments.calls) for width in WIDTHS] for checkout in arguments.checkouts]
    print("| call |" + "".join(f" {checkout.resolve().name} |" for checkout in arguments.checkouts))
    print("|---|" + "---|" * len(measured))
    for name in measured[0][0]:
        cells = (f" {wide[name]:,.0f} ({narrow[name]:,.0f}) |" for wide, narrow in measured)
        print(f"| {name} |" + "".join(cells))


def counts(checkout: Path, width: int, calls: int) -> dict[str, float]:
    """Returns the number of instructions of one call, by the call's name, minus that of a call that does nothing."""
    with tempfile.TemporaryDirectory() as folder:
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out"]
        environment = {**os.environ, "PYTHONPATH": str(checkout / "python"), "OMP_NUM_THREADS": "1"}
        worker = [sys.executable, __file__, "--worker", str(width), str(calls)]
        done = subprocess.run([*valgrind, *worker], env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"valgrind ended with {done.returncode}:\n{done.stderr[-2000:]}")
        parts = sorted(Path(folder).glob("out.*"), key=lambda path: int(path.suffix[1:]))
        found = {}
        for path in parts:
            text = path.read_text(encoding="utf-8")
            reason = re.search(r"^desc: Trigger: dump (.*)$", text, re.M)
            if reason:
                found[reason[1]] = int(re.search(r"^totals: (\d+)", text, re.M)[1]) / calls
    empty = found.pop("nothing")
    return {name: count - empty for name, count in found.items()}


def answer(width: int, calls: int) -> None:
    """The worker, which runs under valgrind: makes callgrind write a dump of its counts for each call, with the call's
    name."""
    measured = small_calls(width)
    for call in measured.values():
        for _ in range(WARM_UP):
            call()
    control("--instr=on")
    for name, call in measured.items():
        for _ in range(calls):
            call()
        control(f"--dump={name}")


def control(command: str) -> None:
    subprocess.run(["callgrind_control", command, str(os.getpid())], capture_output=True, check=True)


def small_calls(width: int) -> dict[str, Callable[[], object]]:
    import torch
    from torch.nn.functional import layer_norm

    import normformer_rs  # noqa: F401  registers the operators

    ops = torch.ops.normformer_rs
    x, f, dy = (torch.randn(2, 1, width) for _ in range(3))
    weight, bias = torch.ones(width), torch.zeros(width)
    running = [torch.zeros(width), torch.ones(width), *torch.zeros(2, 1, dtype=torch.int64)]
    target, seed = torch.tensor([0, 0]), torch.tensor([1, 1, 1])

    def graph(call: Callable[..., object], *tensors: torch.Tensor) -> Callable[[], object]:
        leaves = [t.clone().requires_grad_() for t in tensors]
        return lambda: call(*leaves)

    def backward(call: Callable[..., torch.Tensor], dy: torch.Tensor, *tensors: torch.Tensor) -> Callable[[], object]:
        leaves = [t.clone().requires_grad_() for t in tensors]
        return lambda: torch.autograd.grad(call(*leaves), leaves, dy)

    def norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ops.layer_norm(x, w, b, 1e-5)[0]

    def torchs(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, (width,), w, b)

    def step(x: torch.Tensor, f: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ops.layer_norm_residual(x, f, None, None, w, b, 1e-5, 0.1, seed, 0)[1]

    def batch(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ops.batch_norm(x, w, b, None, *running, train=True)[0]

    def relu(x: torch.Tensor) -> torch.Tensor:
        return ops.relu_dropout(x, 0.1, seed, 0)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return ops.label_smoothed_cross_entropy(x, target, None, 0.9, 0.1 / width, 1)[0].sum()

    rows, one = x.view(2, width), torch.tensor(1.0)
    return {
        "nothing": lambda: None,
        "torch layer_norm, no graph": lambda: torchs(x, weight, bias),
        "torch layer_norm, backward": backward(torchs, dy, x, weight, bias),
        "layer_norm, no graph": lambda: norm(x, weight, bias),
        "layer_norm, graph": graph(norm, x, weight, bias),
        "layer_norm, backward": backward(norm, dy, x, weight, bias),
        "residual step": lambda: step(x, f, weight, bias),
        "residual step, backward": backward(step, dy, x, f, weight, bias),
        "batch_norm": lambda: batch(x, weight, bias),
        "batch_norm, backward": backward(batch, dy, x, weight, bias),
        "relu_dropout": lambda: relu(x),
        "relu_dropout, backward": backward(relu, dy, x),
        "cross-entropy": lambda: loss(rows),
        "cross-entropy, backward": backward(loss, one, rows),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        answer(*map(int, sys.argv[2:]))
    else:
        main()
