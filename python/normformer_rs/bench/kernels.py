"""Measures the bandwidths of the kernels, and a small norm in a CUDA graph, without the cost of launches."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import nn
from .figures import Figures

OPS = torch.ops.normformer_rs
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
WIDTH = 1024
"""The number of features in a row of the measured tensors."""
EPS = 1e-5
REPEATS = 20
"""The number of calls whose times give a median."""
CALLS = 10
"""The number of calls that one CUDA graph records."""
BARS = {"layer_norm": (0.9, 0.85), "rms_norm": (0.9, 0.85), "scale_norm": (0.9, 0.85), "power_norm": (0.8, 0.8)}
"""The shares of the copy rate that a norm should reach in bf16: forward, backward."""
Norm = tuple[str, Callable[[], Tensor], list[Tensor]]
"""A norm to be measured: its name, a function that runs the forward pass, and the tensors that get a gradient."""


def seconds(run: Callable[[], object], device: str, repeats: int = REPEATS) -> float:
    """Returns the median time of a call in seconds: by events on a GPU, by the wall clock on a CPU."""
    for _ in range(3):  # warm-up: the heap of a CPU settles, the kernels of a GPU are compiled
        run()
    if not device.startswith("cuda"):
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    awaken(device, duration=0.1)  # the GPU may have lowered its clock rate during the compilation
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for before, after in events:
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in events) / 1e3  # from milliseconds


def awaken(device: str, duration: float = 0.5) -> None:
    """Copies a tensor for `duration` seconds, so that an idle GPU raises its clock rate."""
    if device.startswith("cuda"):
        x = torch.zeros(2**26, device=device)
        until = time.perf_counter() + duration
        while time.perf_counter() < until:
            x.clone()
            torch.cuda.synchronize()


def buffers(device: str, megabytes: int) -> Iterator[tuple[str, Tensor]]:
    """Yields, for each dtype, its name and a random tensor of `megabytes` MiB, which should exceed any cache."""
    awaken(device)
    for name, dtype in DTYPES.items():
        yield name, torch.randn(megabytes * 2**20 // (WIDTH * dtype.itemsize), WIDTH, device=device, dtype=dtype)


def bandwidth(figures: Figures, device: str, megabytes: int) -> None:
    """Measures the bandwidth of each norm, forward and backward, and the speed-up of the fused residual step, with
    dropout and without, on tensors of `megabytes` MiB."""
    for name, x in buffers(device, megabytes):
        shares(figures, "bandwidth", name, x, norms(x))
        for p in (0.1, 0.0):
            what = f"residual step, p = {p}, {name}"
            with figures.attempt("bandwidth", what):
                bar = 1.8 if p and name == "bf16" else None  # the smallest speed-up that the fused step should have
                figures.add("bandwidth", what, residual(x, p, device), "× the unfused calls", bar)


def compiled(figures: Figures, device: str, megabytes: int) -> None:
    """Measures layer norm under torch.compile."""
    import torch._functorch.config as config

    with config.patch(donated_buffer=False):  # the compiled backward pass runs several times on the same buffers
        for name, x in buffers(device, megabytes):
            shares(figures, "compiled", name, x, [compiled_layer_norm(x)])


def compiled_layer_norm(x: Tensor) -> Norm:
    """Returns torch's layer norm of x (rows, WIDTH), compiled for this shape, with its name and the tensors that get a
    gradient."""
    x = x.detach().requires_grad_()
    weight, bias = (torch.ones(WIDTH, device=x.device, dtype=x.dtype).requires_grad_() for _ in range(2))
    call = torch.compile(lambda: F.layer_norm(x, (WIDTH,), weight, bias, EPS), dynamic=False)
    return "torch.compile of layer_norm", call, [x, weight, bias]


def shares(figures: Figures, section: str, name: str, x: Tensor, norms: Iterable[Norm]) -> None:
    """Measures the bandwidth of the norms of x as shares of the best copy rate; `name` is the name of x's type. A copy
    is measured before each norm, and the best of these copies shows what the device can do."""
    device, target, copies = str(x.device), torch.empty_like(x), list[float]()
    rates = dict[str, tuple[float, float]]()
    for norm, call, inputs in norms:
        with figures.attempt(section, f"{norm}, {name}"):
            # A copy and a forward pass read x and write as much. A backward pass reads x and dy, and writes dx.
            copies.append(2 * x.nbytes / seconds(lambda: target.copy_(x), device))
            forward, backward = norm_seconds(call, inputs, device)
            rates[norm] = (2 * x.nbytes / forward, 3 * x.nbytes / backward)
    copy = max(copies)
    figures.add(section, f"copy, {name}", copy / 1e9, "GB/s")
    for norm, norm_rates in rates.items():
        bars = BARS.get(norm, (None, None)) if name == "bf16" else (None, None)
        for direction, rate, bar in zip(("forward", "backward"), norm_rates, bars):
            figures.add(section, f"{norm}, {direction}, {name}", rate / copy, "of the copy", bar)


def norm_seconds(call: Callable[[], Tensor], inputs: list[Tensor], device: str) -> tuple[float, float]:
    """Returns the median seconds of the forward pass `call`, and of the backward pass to the tensors `inputs`."""
    forward = seconds(lambda: call().detach(), device)
    y = call()
    dy = torch.randn_like(y)
    backward = seconds(lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True), device)
    return forward, backward


def norms(x: Tensor) -> Iterator[Norm]:
    """Yields the norms to be measured: four of this package, two of torch, one of Liger."""
    x = x.detach().requires_grad_()
    width, device = x.shape[-1], x.device
    weight, bias = (torch.ones(width, device=device).requires_grad_() for _ in range(2))
    # The functions of torch and Liger get weights in x's dtype, the package's own operators weights in f32.
    own_weight, own_bias = (t.detach().to(x.dtype).requires_grad_() for t in (weight, bias))
    gain = torch.ones(1, device=device).requires_grad_()
    power_norm = nn.PowerNorm(width, warmup_iters=0, device=device)
    yield "layer_norm", lambda: OPS.layer_norm(x, weight, bias, EPS)[0], [x, weight, bias]
    yield "rms_norm", lambda: OPS.rms_norm(x, weight, None, EPS)[0], [x, weight]
    yield "scale_norm", lambda: OPS.scale_norm(x, gain, None, EPS)[0], [x, gain]
    yield "power_norm", lambda: power_norm(x), [x, *power_norm.parameters()]
    yield "F.layer_norm", lambda: F.layer_norm(x, (width,), own_weight, own_bias, EPS), [x, own_weight, own_bias]
    yield "F.rms_norm", lambda: F.rms_norm(x, (width,), own_weight, EPS), [x, own_weight]

    def liger() -> Tensor:
        """Returns Liger's RMSNorm of x. The import is here, so that a missing Liger leaves only this norm out."""
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # type: ignore[import-not-found]

        # The last arguments are an offset of the weight, the mode of casts, and whether dy may be overwritten.
        return LigerRMSNormFunction.apply(x, own_weight, EPS, 0.0, "llama", False)

    yield "Liger's rms_norm", liger, [x, own_weight]


def residual(x: Tensor, p: float, device: str) -> float:
    """Returns the speed-up of the fused residual step, forward and backward: the time of dropout, addition and layer
    norm in separate PyTorch calls, divided by the time of the fused step. `p` is the rate of dropout."""
    # x is the residual stream, f the output of a sublayer.
    x, f = (t.detach().requires_grad_() for t in (x, torch.randn_like(x)))
    weight, bias = (torch.ones(x.shape[-1], device=x.device, dtype=x.dtype).requires_grad_() for _ in range(2))
    # The seed of dropout masks: (seed, update, micro-batch).
    seed, inputs = torch.tensor([1, 2, 3], device=x.device), (x, f, weight, bias)
    gradients = (torch.randn_like(x), torch.randn_like(x))

    def unfused() -> None:
        """Runs dropout, addition and layer norm one by one, forward and backward."""
        x_plus = x + F.dropout(f, p)
        torch.autograd.grad((x_plus, F.layer_norm(x_plus, x.shape[-1:], weight, bias)), inputs, gradients)

    def fused() -> None:
        """Runs the fused residual step, forward and backward."""
        # None stands for a factor of 1 on x and on f. The last argument is the number of the dropout site.
        x_plus, y, _ = OPS.layer_norm_residual(x, f, None, None, weight, bias, EPS, p, seed, 0)
        torch.autograd.grad((x_plus, y), inputs, gradients)

    return seconds(unfused, device) / seconds(fused, device)


def small(figures: Figures, device: str) -> None:
    """Measures layer norm on a 4096×512 tensor against torch's own. Both are recorded in a CUDA graph, so the times do
    not contain the cost of launches."""
    awaken(device)
    x = torch.randn(4096, 512, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight, bias = (torch.ones(512, device=device, dtype=x.dtype).requires_grad_() for _ in range(2))
    dy = torch.randn_like(x)
    calls = {
        "layer_norm": lambda: OPS.layer_norm(x, weight, bias, EPS)[0],
        "F.layer_norm": lambda: F.layer_norm(x, (512,), weight, bias, EPS),
    }
    times = {}
    for name, call in calls.items():
        # A function reads a loop's variable only when it runs, so the default keeps the call of this turn.
        def run(call: Callable[[], Tensor] = call) -> None:
            torch.autograd.grad(call(), (x, weight, bias), dy)

        times[name] = seconds(captured(run, CALLS).replay, device) / CALLS
        figures.add("graph", f"{name}, 4096×512, bf16", times[name] * 1e6, "µs")
    ratio = times["F.layer_norm"] / times["layer_norm"]
    figures.add("graph", "layer_norm against F.layer_norm", ratio, "times as fast", bar=1.0)


def captured(run: Callable[[], None], calls: int) -> Any:
    """Returns a CUDA graph that records `calls` calls of `run`. As torch demands, `run` is called a few times on a side
    stream first."""
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
