"""Random calls of all registered operators: python tests/operators/fuzz.py --calls 10000 --seed 0

A call's arguments follow from (seed, number) alone. Some are valid, some have a fault or several, some are anything
that the schema allows. Backward operators are called directly, by autograd, and with saved tensors that a hook has
changed. Some valid calls are made inside modes and wrappers of torch's (fuzz_contexts.py). A quarter of the calls runs
sixteen at once. Every tensor ends at a page that cannot be read: an overrun is a crash. Calls run in child processes; a
crash is counted, its number printed, and another child goes on behind it.

Accepted calls without NaN are compared with the formulas of tests/reference in float64. The last line counts calls,
accepted and refused ones, crashes, panics and wrong values; the exit status is 1 where one of the last three is not 0.
`--only N` repeats call N in this process and prints its arguments.
"""

import argparse
import os
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import fuzz_contexts  # noqa: E402
from fuzz_tensors import Draw, faulty  # noqa: E402
from fuzz_twins import (  # noqa: E402
    DIFFERENTIABLE,
    OPS,
    OPS_BY_NAME,
    Wrong,
    compare,
    family,
    is_plain,
    is_whole,
    scale_of,
    wide,
    written,
)

HOWS = ("valid", "valid", "faulty", "faulty", "wild", "autograd", "hooks", "context", "context", "context")
THREADS = 16
SILENCE = 120
"""Seconds without a call's end after which a child counts as crashed."""


def run(op: str, a: dict) -> list[Tensor]:
    arguments = OPS_BY_NAME[op]
    if op == "dropout_mask" and 2**26 < abs(a["rows"] * a["cols"]) < 2**58:
        raise ValueError("not asked: a mask that may end the machine's memory")
    positional = [a[s.name] for s in arguments if not s.kwarg_only]
    out = getattr(OPS, op)(*positional, **{s.name: a[s.name] for s in arguments if s.kwarg_only})
    return [] if out is None else [out] if isinstance(out, Tensor) else list(out)


def drawn(d: Draw, kind: str):
    """Anything of that type, as schemas print it."""
    if kind.startswith("List["):
        return [drawn(d, kind[5:-1]) for _ in range(d.one(0, 1, 2, 3))]
    if "Tensor" not in kind:
        return d.scalar(kind)
    return None if "Optional" in kind and d.chance(0.4) else d.anything()


def anything(d: Draw, op: str) -> dict:
    return {s.name: drawn(d, str(s.type)) for s in OPS_BY_NAME[op]}


def with_faults(d: Draw, op: str, a: dict) -> dict:
    a = dict(a)
    for _ in range(d.one(1, 1, 2, 3)):
        s = d.one(*OPS_BY_NAME[op])
        kind = str(s.type)
        if "Tensor" not in kind or kind.startswith("List["):
            a[s.name] = drawn(d, kind)
        elif a[s.name] is None or d.chance(0.1):
            a[s.name] = d.anything()
        elif "Optional" in kind and d.chance(0.2):
            a[s.name] = None
        else:
            a[s.name] = faulty(d, a[s.name])
    return a


def twins(op: str, a: dict, before: dict, out: list[Tensor]):
    """The oracle's float64 arguments and outputs."""
    made = family(op)
    if made is None or made[1] is None:
        return None, {}
    leaves = wide(a | {name: before[name] for name in written(op)})
    leaves |= {"before": before, "stored": [t.detach() for t in out]}
    return leaves, made[1](op, leaves)


def judge(op: str, a: dict, before: dict, out: list[Tensor]) -> None:
    """Compares a call's outputs and what it has written with its twin's."""
    scale = scale_of(a)
    _, twin = twins(op, a, before, out)
    for key, t in twin.items():
        ours = out[key] if isinstance(key, int) else a[key].detach().view_as(t)
        compare(f"{op}: {key}", ours, t, *scale)


def valid(d: Draw, op: str) -> dict | None:
    """Valid arguments; None where this program knows of none."""
    made = family(op)
    return None if made is None else made[0](d, op)


def copies(a: dict) -> dict:
    """The arguments, dense tensors copied: as they were before a call."""
    usual = lambda t: isinstance(t, Tensor) and t.layout == torch.strided and t.device.type == "cpu"  # noqa: E731
    return {name: t.detach().clone() if usual(t) and is_whole(t) else t for name, t in a.items()}


def backward_arguments(d: Draw, op: str) -> tuple[dict, dict, list[Tensor], dict, dict] | None:
    """Of NAME_backward after a valid forward call: its arguments, and the forward call's."""
    forward = op.removesuffix("_backward")
    a = valid(d, forward)
    if a is None or forward.startswith("lp_norm"):
        return None
    before = copies(a)
    out = run(forward, a)
    floating = [t for t in out if t.is_floating_point()]
    cotangents = [d.normal(t.shape, t.dtype) for t in floating[:2]]
    b = {}
    for s in OPS_BY_NAME[op]:
        if s.name in ("dy", "dx_plus", "dout", "dloss"):
            b[s.name] = cotangents[1 if s.name == "dy" and "residual" in op else 0]
        elif s.name in ("stats", "lse"):
            b[s.name] = out[-1]
        elif s.name in ("x_plus", "y"):
            b[s.name] = out[0]
        else:
            b[s.name] = a[s.name]
    if forward == "residual":
        b["dy"] = None
    elif "dx_plus" in b and d.chance(0.4):
        b[d.one("dx_plus", "dy")] = None
    if "x_plus" in b and a["alpha"] is None:
        b["x"] = None
    return b, a, out, before, dict(zip(range(2), cotangents))


def direct_backward(d: Draw, op: str) -> bool:
    made = backward_arguments(d, op)
    if made is None:
        return wild(d, op)
    b, a, out, before, _ = made
    if d.chance(0.6):
        run(op, with_faults(d, op, b))
        return True
    moved = {name: b[name].clone() for name in written(op) if b[name] is not None}
    found = run(op, b)
    forward = op.removesuffix("_backward")
    if not is_plain(a):
        return True
    leaves, twin = twins(forward, a, before | moved, out)
    if 0 not in twin:
        return True
    cotangent = {0: b["dx_plus"], 1: b["dy"]} if "dx_plus" in b else {0: b[OPS_BY_NAME[op][0].name]}
    wrt = [s.name for s in OPS_BY_NAME[forward] if s.name in DIFFERENTIABLE]
    gradients(op, a, leaves, twin, cotangent, dict(zip(wrt, found)))
    return True


def gradients(op: str, a: dict, leaves: dict, twin: dict, cotangent: dict, found: dict, eps: float = 0.0) -> None:
    """Compares gradients with autograd's of the twin; `eps`: of the narrowest type on the way."""
    used = [i for i, c in cotangent.items() if c is not None and i in twin and twin[i].requires_grad]
    wrt = [n for n in found if isinstance(a[n], Tensor)]
    if not used or not wrt:
        return
    wanted = torch.autograd.grad(
        [twin[i] for i in used],
        [leaves[n] for n in wrt],
        [cotangent[i].double() for i in used],
        allow_unused=True,
        materialize_grads=True,
    )
    largest, rows, is_double = scale_of(a | {f"cotangent {i}": cotangent[i] for i in used})
    if "norm" in op:  # what a row or column is multiplied by, unless the gradient is large itself
        largest *= max(1.0, a.get("eps", 1.0) ** -0.5) ** (1 / 3)
    for n, e in zip(wrt, wanted):
        o = found[n]
        if o is None or (o.numel() == 0 and e.numel() != 0):  # dα not asked for, or df = dx
            continue
        same = o.reshape(e.shape) if o.numel() == e.numel() else o
        compare(f"{op}: gradient of {n}", same, e, largest, rows, is_double, eps)


def in_context(d: Draw, op: str) -> bool:
    """A valid call in a mode or a wrapper of torch's, judged as a plain one."""
    kind = d.one(*fuzz_contexts.CONTEXTS, "hooks that keep", "hooks that keep", "gradient", "gradient")
    if kind == "hooks that keep":
        return by_autograd(d, op, fuzz_contexts.HOOKS[d.one(*fuzz_contexts.HOOKS)], keeps=True)
    a = valid(d, op)
    if a is None or (kind in ("gradient", "subclass again") and not fuzz_contexts.wrt(a)):
        return wild(d, op)
    before = copies(a)
    if kind == "gradient":
        found = fuzz_contexts.outer_gradient(d, op, a, run, None)
        if is_plain(before):
            out = run(op, a)
            leaves, twin = twins(op, a, before, out)
            cotangent = {i: torch.ones_like(out[i]) for i in ((0, 1) if op.endswith("_residual") else (0,))}
            if 0 in twin:
                narrow = torch.finfo(a[fuzz_contexts.wrt(a)[0]].dtype).eps
                gradients(op, a, leaves, twin, cotangent, found, narrow)
        return True
    judged = lambda out: judge(op, a, before, out) if is_plain(before) else None  # noqa: E731
    fuzz_contexts.CONTEXTS[kind](d, op, a, run, judged)
    return True


def by_autograd(d: Draw, op: str, hooks, keeps: bool = False) -> bool:
    """`hooks` pack and unpack saved tensors, and keep their numbers where `keeps`."""
    a = valid(d, op)
    if a is None or not any(n in a for n in DIFFERENTIABLE):
        return wild(d, op)
    before = copies(a)
    wrt = [n for n in DIFFERENTIABLE if isinstance(a.get(n), Tensor) and a[n].is_floating_point()]
    for n in wrt:
        a[n].requires_grad_()
    if hooks is None:
        out = run(op, a)
    else:
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            out = run(op, a)
    used = [i for i, t in enumerate(out) if t.requires_grad]
    if not used:
        return True
    cotangent = {i: d.normal(out[i].shape, out[i].dtype) for i in used}
    outputs, inputs = [out[i] for i in used], [a[n] for n in wrt]
    is_composed = d.chance(
        0.3
    )  # to be differentiated again: by formula, whose numbers on the way have their tensors' types
    found = torch.autograd.grad(outputs, inputs, list(cotangent.values()), create_graph=is_composed, allow_unused=True)
    if (hooks is None or keeps) and is_plain(a):
        leaves, twin = twins(op, a, before, out)
        if 0 in twin:
            narrow = torch.finfo(a[wrt[0]].dtype).eps if is_composed else 0.0
            gradients(op, a, leaves, twin, cotangent, dict(zip(wrt, found)), narrow)
    return True


def wild(d: Draw, op: str) -> bool:
    run(op, anything(d, op))
    return True


def shown(t):
    is_dense = isinstance(t, Tensor) and t.layout == torch.strided
    return (t.dtype, tuple(t.shape), t.stride()) if is_dense else t


def call(seed: int, number: int, show: bool = False) -> str:
    """Makes the call: "accepted", "refused: why", "panic: …" or "wrong: …"."""
    d = Draw(seed, number)
    op = d.one(*OPS_BY_NAME)
    how = d.one(*HOWS)
    if show:
        print(f"call {number} of seed {seed}: {op}, {how}", flush=True)
    try:
        if op.endswith("_backward"):
            if how == "wild":
                wild(d, op)
            else:
                direct_backward(d, op)
        elif how == "wild" or family(op) is None:
            wild(d, op)
        elif how == "autograd" and not op.endswith("_"):
            by_autograd(d, op, None)
        elif how == "hooks" and not op.endswith("_"):
            # Formulas save tensors for torch's own functions, which read storage that is not there.
            by_autograd(d, op, (lambda t: faulty(d, t, may_free=False) if d.chance(0.4) else t, lambda t: t))
        elif how == "context":
            in_context(d, op)
        else:
            a = valid(d, op)
            if how != "valid":
                a = with_faults(d, op, a)
            before = copies(a)
            if show:
                print({name: shown(t) for name, t in a.items()})
            out = run(op, a)
            if is_plain(before if written(op) else a):
                judge(op, a, before, out)
    except Wrong as e:
        return f"wrong: {op}, {how}: {e}"
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as e:
        if show:
            traceback.print_exc()
        text = str(e).split("\n")[0]
        if "panicked" in text or "INTERNAL ASSERT" in text:
            return f"panic: {op}, {how}: {text}"
        is_known = family(op) is not None and not op.startswith("lp_norm_") and not op.endswith("_backward")
        if how == "valid" and is_known:  # anything that the schema allows is drawn for the others
            return f"wrong: {op}: a valid call was refused: {text}"
        return f"refused: {text}"
    return "accepted"


# ---- child and parent ----


def child(seed: int, first: int, end: int, progress: Path, results: Path) -> None:
    """Calls first..end; before every one (or sixteen) its number goes to `progress`."""
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(THREADS)
    with open(progress, "r+b", buffering=0) as now, open(results, "a") as told:
        number = first
        while number < end:
            together = min(THREADS, end - number) if number % (4 * THREADS) < THREADS and number % THREADS == 0 else 1
            now.seek(0)
            now.write(struct.pack("qq", number, together))
            numbers = range(number, number + together)
            outcomes = list(pool.map(lambda n: call(seed, n), numbers)) if together > 1 else [call(seed, number)]
            for n, outcome in zip(numbers, outcomes):
                told.write(f"{n}\t{outcome}\n")
            told.flush()
            number += together


def fuzz(calls: int, seed: int, processes: int, out=print) -> dict[str, int]:
    """Runs the calls in child processes; returns the counts."""
    counts = dict.fromkeys(("calls", "accepted", "refused", "crashes", "panics", "wrong values"), 0)
    with tempfile.TemporaryDirectory() as folder:
        share = -(-calls // processes // (4 * THREADS)) * 4 * THREADS
        waiting = [(start, min(start + share, calls)) for start in range(0, calls, share)]
        running: list[tuple[subprocess.Popen, int, Path]] = []
        made = 0
        while waiting or running:
            while waiting and len(running) < processes:
                first, end = waiting.pop(0)
                progress, results = Path(folder, f"{made}.now"), Path(folder, f"{made}.told")
                made += 1
                progress.write_bytes(struct.pack("qq", first, 1))
                results.touch()
                command = [
                    sys.executable,
                    __file__,
                    "--child",
                    str(seed),
                    str(first),
                    str(end),
                    str(progress),
                    str(results),
                ]
                environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
                running.append((subprocess.Popen(command, env=environment), end, progress))
            time.sleep(0.05)
            for entry in list(running):
                process, end, progress = entry
                if time.time() - progress.stat().st_mtime > SILENCE:
                    process.kill()
                    process.wait()
                status = process.poll()
                if status is None:
                    continue
                running.remove(entry)
                if status == 0:
                    continue
                number, together = struct.unpack("qq", progress.read_bytes())
                counts["crashes"] += 1
                counts["calls"] += together
                which = f"call {number}" + (f" to {number + together - 1}, at once" if together > 1 else "")
                out(f"crash (status {status}): {which} of seed {seed}")
                if number + together < end:
                    waiting.append((number + together, end))
        for results in Path(folder).glob("*.told"):
            for line in results.read_text().splitlines():
                number, outcome = line.split("\t", 1)
                counts["calls"] += 1
                kind = outcome.split(":")[0]
                counts[{"panic": "panics", "wrong": "wrong values"}.get(kind, kind)] += 1
                if kind in ("panic", "wrong"):
                    out(f"{outcome}: call {number} of seed {seed}")
    return counts


def line(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        seed, first, end, progress, results = sys.argv[2:]
        child(int(seed), int(first), int(end), Path(progress), Path(results))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", type=int, help="the number of one call")
    options = parser.parse_args()
    if options.only is not None:
        torch.set_num_threads(1)
        print(call(options.seed, options.only, show=True))
        return 0
    counts = fuzz(options.calls, options.seed, options.processes)
    print(line(counts))
    return int(any(counts[name] for name in ("crashes", "panics", "wrong values")))


if __name__ == "__main__":
    sys.exit(main())
