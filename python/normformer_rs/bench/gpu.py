"""Correctness, bandwidth and training speed on one CUDA device, with no Rust, no compiler and no network needed there.

Writes gpu.csv (one row a figure, with the bar it is held to), gpu.png and gpu.log. What a machine lacks is a row that
reads "unmeasured", with the reason. Bandwidths count what must move (forward: read x, write y; backward: read dy and x,
write dx) and are shares of the rate of a device-to-device copy of the same buffers, which are larger than any cache.
Times are medians.
"""

import csv
import datetime
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _core, nn
from .training import losses, rates

OPS = torch.ops.normformer_rs
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
WIDTH = 1024
EPS = 1e-5
REPEATS = 20
CALLS = 10
"""In a CUDA graph."""


class Figures:
    """The rows, written as they come, so that a run that is cut short leaves what it has measured."""

    def __init__(self, folder: Path, device: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rows = folder, list[dict[str, Any]]()
        (folder / "gpu.log").write_text("")
        self.on_cuda = device.startswith("cuda")
        name = torch.cuda.get_device_name(device) if self.on_cuda else "cpu"
        date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        self.common = {"device": name, "date": date, "torch": torch.__version__, "version": _core.__version__}

    def add(
        self, section: str, what: str, value: float | str, unit: str, bar: float | None = None, most: bool = False
    ) -> None:
        """A figure; `bar` is the least that it should be on a GPU, or the most."""
        bar = bar if self.on_cuda else None
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        met = ""
        if bar is not None and not isinstance(value, str):
            met = "yes" if (value <= bar if most else value >= bar) else "no"
        row = {"section": section, "what": what, "value": shown, "unit": unit, "bar": bar or "", "met": met}
        self.rows.append(row | self.common)
        self.say(f"{section:12} {what:48} {shown:>10} {unit}" + (f"  (bar {bar:g}: {met})" if met else ""))
        with (self.folder / "gpu.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(self.rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)

    def say(self, text: str) -> None:
        print(text, flush=True)
        with (self.folder / "gpu.log").open("a") as file:
            print(text, file=file)

    @contextmanager
    def attempt(self, section: str, what: str) -> Iterator[None]:
        """What fails inside is reported as unmeasured, and the rest goes on."""
        try:
            yield
        except Exception as error:  # whatever a machine may lack
            reason = " ".join(str(error).split())[:200]
            self.add(section, what, f"unmeasured: {type(error).__name__}: {reason}", "")


def measure(output: Path, tests: Path, device: str, megabytes: int, updates: int, quick: bool = False) -> None:
    """Measures everything, the quick and certain first; `quick` leaves out what torch.compile has to compile."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit(
            "no CUDA device is there, or torch was built without CUDA: --device cpu shows the program at work"
        )
    figures = Figures(output, device)
    correctness(figures, tests, device)
    with figures.attempt("correctness", "training losses"):
        for precision, off in losses(device).items():
            what, allowed = f"ten losses as on the CPU, {precision}", {"f32": 1e-4, "bf16": 3e-2}[precision]
            figures.add("correctness", what, off, "largest difference", allowed, most=True)
    with figures.attempt("bandwidth", "kernels"):
        bandwidth(figures, device, megabytes, quick)
    with figures.attempt("graph", "4096×512"):
        small(figures, device)
    with figures.attempt("training", "transformer-base"):
        trained(figures, device, updates, quick)
    with figures.attempt("picture", "gpu.png"):
        draw(figures)
    with figures.attempt("correctness", "compute-sanitizer"):
        sanitized(figures, tests, device)


# ---- correctness ----


def correctness(figures: Figures, tests: Path, device: str) -> None:
    """The operators' test-suite on the device."""
    for suite in ("test_cuda.py", "test_operators.py", "test_norms.py", "test_norm_modules.py"):
        with figures.attempt("correctness", f"tests/{suite} on the device"):
            done = run_tests(tests / suite, device, [], ["-m", "device and not cpu"])
            figures.say(done.stdout[-4000:] + done.stderr[-2000:])
            summary = (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
            figures.add("correctness", f"tests/{suite} on the device", summary, "", None)


def sanitized(figures: Figures, tests: Path, device: str) -> None:
    """A few of the tests, one of each kernel, under compute-sanitizer. torch's allocator would hide what is written
    beside a tensor, so it allocates each by itself."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        raise FileNotFoundError("compute-sanitizer is not on PATH")
    chosen = ["-k", "either_kind or from_one_side or late_rows or relu or cross_entropy or test_adam"]
    done = run_tests(
        tests / "test_cuda.py", device, [sanitizer, "--error-exitcode", "9"], chosen, PYTORCH_NO_CUDA_MEMORY_CACHING="1"
    )
    figures.say(done.stdout[-2000:])
    figures.add("correctness", "compute-sanitizer", "clean" if done.returncode == 0 else f"exit {done.returncode}", "")


def run_tests(
    tests: Path, device: str, before: list[str], options: list[str], **environment: str
) -> subprocess.CompletedProcess[str]:
    if not tests.exists():
        raise FileNotFoundError(f"{tests} is not there: it is among the project's tests")
    environment = {**os.environ, "NORMFORMER_RS_TEST_DEVICE": device, "NORMFORMER_RS_CUDA": "require", **environment}
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests), *options]
    return subprocess.run([*before, *pytest], env=environment, capture_output=True, text=True)


# ---- kernels ----


def seconds(run: Callable[[], object], device: str, repeats: int = REPEATS) -> float:
    """The median time of a call, by the device's own clock."""
    for _ in range(3):  # A CPU's heap has to find its shape, a GPU's kernels have to be there.
        run()
    if not device.startswith("cuda"):
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for before, after in events:
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in events) / 1e3


def bandwidth(figures: Figures, device: str, megabytes: int, quick: bool) -> None:
    """Each norm forward and backward, and the residual step, on buffers that no cache holds."""
    for name, dtype in DTYPES.items():
        x = torch.randn(megabytes * 2**20 // (WIDTH * dtype.itemsize), WIDTH, device=device, dtype=dtype)
        copy = 2 * x.nbytes / copy_seconds(x, device)
        figures.add("bandwidth", f"copy, {name}", copy / 1e9, "GB/s")
        for norm, call, inputs in norms(x, quick):
            with figures.attempt("bandwidth", f"{norm}, {name}"):
                forward, backward = norm_seconds(call, inputs, device)
                bars = BARS.get(norm, (None, None)) if name == "bf16" else (None, None)
                for way, share, bar in zip(
                    ("forward", "backward"), (2 * x.nbytes / forward / copy, 3 * x.nbytes / backward / copy), bars
                ):
                    figures.add("bandwidth", f"{norm}, {way}, {name}", share, "of the copy", bar)
        for p in (0.1, 0.0):
            ratio = residual(x[: len(x) // 4], p, device)
            figures.add(
                "bandwidth", f"residual step, p = {p}, {name}", ratio, "× the unfused calls", 1.8 if p else None
            )


def copy_seconds(x: Tensor, device: str) -> float:
    target = torch.empty_like(x)
    return seconds(lambda: target.copy_(x), device)


def norm_seconds(call: Callable[[], Tensor], inputs: list[Tensor], device: str) -> tuple[float, float]:
    """Of the forward and of the backward pass."""
    forward, y = seconds(lambda: call().detach(), device), call()
    dy = torch.randn_like(y)
    return forward, seconds(lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True), device)


BARS = {"layer_norm": (0.9, 0.85), "rms_norm": (0.9, 0.85), "scale_norm": (0.9, 0.85), "power_norm": (0.8, 0.8)}


def norms(x: Tensor, quick: bool) -> Iterator[tuple[str, Callable[[], Tensor], list[Tensor]]]:
    """(name, forward, what gets a gradient) of our norms and of others'."""
    x = x.detach().requires_grad_()
    width, device = x.shape[-1], x.device
    weight, bias = (torch.ones(width, device=device).requires_grad_() for _ in range(2))
    own_weight, own_bias = (t.detach().to(x.dtype).requires_grad_() for t in (weight, bias))
    gain = torch.ones(1, device=device).requires_grad_()
    power_norm = nn.PowerNorm(width, warmup_iters=0, device=device)
    yield "layer_norm", lambda: OPS.layer_norm(x, weight, bias, EPS)[0], [x, weight, bias]
    yield "rms_norm", lambda: OPS.rms_norm(x, weight, None, EPS)[0], [x, weight]
    yield "scale_norm", lambda: OPS.scale_norm(x, gain, None, EPS)[0], [x, gain]
    yield "power_norm", lambda: power_norm(x), [x, *power_norm.parameters()]
    yield "F.layer_norm", lambda: F.layer_norm(x, (width,), own_weight, own_bias, EPS), [x, own_weight, own_bias]
    yield "F.rms_norm", lambda: F.rms_norm(x, (width,), own_weight, EPS), [x, own_weight]
    if not quick:
        compiled = torch.compile(lambda: F.layer_norm(x, (width,), own_weight, own_bias, EPS))
        yield "torch.compile of layer_norm", compiled, [x, own_weight, own_bias]

    def liger() -> Tensor:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # type: ignore[import-not-found]

        return LigerRMSNormFunction.apply(x, own_weight, EPS, 0.0, "llama", False)

    yield "Liger's rms_norm", liger, [x, own_weight]


def residual(x: Tensor, p: float, device: str) -> float:
    """Time of dropout, addition and layer norm in PyTorch calls over the fused step's, forward and backward."""
    x, f = (t.detach().requires_grad_() for t in (x, torch.randn_like(x)))
    weight, bias = (torch.ones(x.shape[-1], device=x.device, dtype=x.dtype).requires_grad_() for _ in range(2))
    seed, inputs = torch.tensor([1, 2, 3], device=x.device), (x, f, weight, bias)
    backs = (torch.randn_like(x), torch.randn_like(x))

    def unfused() -> None:
        x_plus = x + F.dropout(f, p)
        torch.autograd.grad((x_plus, F.layer_norm(x_plus, x.shape[-1:], weight, bias)), inputs, backs)

    def fused() -> None:
        x_plus, y, _ = OPS.layer_norm_residual(x, f, None, None, weight, bias, EPS, p, seed, 0)
        torch.autograd.grad((x_plus, y), inputs, backs)

    return seconds(unfused, device) / seconds(fused, device)


def small(figures: Figures, device: str) -> None:
    """4096×512 in a CUDA graph, against torch's own layer norm: what launches cost is left out."""
    x = torch.randn(4096, 512, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight, bias = (torch.ones(512, device=device, dtype=x.dtype).requires_grad_() for _ in range(2))
    dy = torch.randn_like(x)
    calls = {
        "layer_norm": lambda: OPS.layer_norm(x, weight, bias, EPS)[0],
        "F.layer_norm": lambda: F.layer_norm(x, (512,), weight, bias, EPS),
    }
    times = {}
    for name, call in calls.items():

        def run(call: Callable[[], Tensor] = call) -> None:
            torch.autograd.grad(call(), (x, weight, bias), dy)

        times[name] = seconds(captured(run, CALLS).replay, device) / CALLS
        figures.add("graph", f"{name}, 4096×512, bf16", times[name] * 1e6, "µs")
    ratio = times["F.layer_norm"] / times["layer_norm"]
    figures.add("graph", "layer_norm against F.layer_norm", ratio, "times as fast", 1.0)


def captured(run: Callable[[], None], calls: int) -> Any:
    """A CUDA graph of so many calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph


# ---- training ----


def trained(figures: Figures, device: str, updates: int, quick: bool) -> None:
    """Real target tokens a second on transformer-base, against torch.nn.Transformer."""
    found: dict[str, float] = {}
    for name, rate in rates(device, updates, quick):
        with figures.attempt("training", name):
            found[name] = rate()
            figures.add("training", name, found[name], "target tokens/s")
    ours = found.get("normformer_rs")
    plain = found.get("normformer_rs, no CUDA graphs")
    if ours and plain:
        figures.add("training", "CUDA graphs against none", ours / plain, "times")
    compiled = [rate for name, rate in found.items() if "compiled" in name]
    if ours and "torch.nn.Transformer, eager" in found:
        figures.add("training", "against eager", ours / found["torch.nn.Transformer, eager"], "times", 2.0)
    if ours and compiled:
        figures.add("training", "against the better compiled form", ours / max(compiled), "times", 1.2)


def draw(figures: Figures) -> None:
    """The shares of the copy rate as bars."""
    from matplotlib.figure import Figure

    shares = [(row["what"], float(row["value"])) for row in figures.rows if row["unit"] == "of the copy"]
    shares.reverse()
    figure = Figure(figsize=(8, 0.3 * len(shares) + 1), dpi=150, layout="constrained")
    axis = figure.subplots()
    axis.barh([what for what, _ in shares], [share for _, share in shares], color="#4878a8")
    axis.axvline(1.0, color="#555555", linewidth=0.8)
    axis.set(xlabel="share of the copy rate", title=f"{figures.common['device']}, {figures.common['date']}")
    figure.savefig(figures.folder / "gpu.png")
