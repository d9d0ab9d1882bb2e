"""Kernel bandwidth through PyTorch: norms and the fused residual step, against the copy rate of the same run.

    python benches/kernels.py

It measures twice: with the allocator's defaults, where large tensors pay for fresh pages, and after
`normformer_rs.keep_memory()`. Forward and backward of a norm move 5 times its input (read x, write y; read dy and x,
write dx), a copy 2 times. The residual step without dropout moves 8 tensors (read x and f, write x+ and y; read x+, dx+
and dy, write one gradient). The rates count just these passes. Medians of several; a row is one size and dtype.
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F

import normformer_rs
from normformer_rs.bench import kernels

OPS = torch.ops.normformer_rs
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def seconds(run: Callable[[], object], repeats: int) -> float:
    return kernels.seconds(run, "cpu", repeats)


def norm_rates(x: torch.Tensor, repeats: int) -> dict[str, float]:
    """Returns the bandwidth in GB/s of each norm's forward and backward together, and of a copy."""
    width, moved = x.shape[-1], x.numel() * x.element_size()
    x.requires_grad_()
    vector, shift = (torch.ones(width, requires_grad=True) for _ in range(2))
    gain, dy, target = torch.ones(1, requires_grad=True), torch.randn_like(x), torch.empty_like(x)
    weight, bias = vector.detach().to(x.dtype).requires_grad_(), shift.detach().to(x.dtype).requires_grad_()
    calls = {
        "layer_norm": (lambda: OPS.layer_norm(x, vector, shift, 1e-5)[0], (x, vector, shift)),
        "rms_norm": (lambda: OPS.rms_norm(x, vector, None, 1e-5)[0], (x, vector)),
        "scale_norm": (lambda: OPS.scale_norm(x, gain, None, 1e-5)[0], (x, gain)),
        "F.layer_norm": (lambda: F.layer_norm(x, (width,), weight, bias), (x, weight, bias)),
    }
    rates = {"copy": 2 * moved / seconds(lambda: target.copy_(x.detach()), repeats) / 1e9}
    for name, (call, inputs) in calls.items():
        rates[name] = 5 * moved / seconds(lambda c=call, i=inputs: torch.autograd.grad(c(), i, dy), repeats) / 1e9
    return rates


def residual_rates(dtype: torch.dtype, p: float, repeats: int, rows: int, width: int = 512) -> tuple[float, float]:
    """Returns the speed-up of the fused residual step over PyTorch's separate calls, forward and backward, and the
    step's share of the copy rate."""
    x, f = (torch.randn(rows, width, dtype=dtype, requires_grad=True) for _ in range(2))
    weight, bias = (torch.ones(width, dtype=dtype, requires_grad=True) for _ in range(2))
    seed, inputs = torch.tensor([1, 2, 3]), (x, f, weight, bias)
    da, db = torch.randn(rows, width, dtype=dtype), torch.randn(rows, width, dtype=dtype)

    def unfused():
        x_plus = x + F.dropout(f, p)
        return torch.autograd.grad((x_plus, F.layer_norm(x_plus, (width,), weight, bias)), inputs, (da, db))

    def fused():
        x_plus, y, _ = OPS.layer_norm_residual(x, f, None, None, weight, bias, 1e-5, p, seed, 0)
        return torch.autograd.grad((x_plus, y), inputs, (da, db))

    target, taken = torch.empty_like(da), seconds(fused, repeats)
    return seconds(unfused, repeats) / taken, 4 * seconds(lambda: target.copy_(da), repeats) / taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, default=8192, help="rows of the residual step")
    arguments = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, width {arguments.width}, GB/s (share of the copy rate)")
    print("allocator as it comes")
    measure(arguments)
    normformer_rs.keep_memory()
    print("freed memory kept")
    measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    for name, dtype in DTYPES.items():
        for megabytes in arguments.megabytes:
            rows = megabytes * 2**20 // (arguments.width * dtype.itemsize)
            repeats = arguments.repeats if megabytes > 8 else 10 * arguments.repeats
            rates = norm_rates(torch.randn(rows, arguments.width).to(dtype), repeats)
            shown = "  ".join(f"{k} {v:5.1f} ({v / rates['copy']:.2f})" for k, v in rates.items())
            print(f"{name:4} {megabytes:4} MB  {shown}", flush=True)
    for name, dtype in DTYPES.items():
        for p in (0.1, 0.0):
            ratio, share = residual_rates(dtype, p, 3 * arguments.repeats, arguments.rows)
            print(
                f"{name:4} fused residual step, layer_norm, p = {p}: {ratio:.2f} times the PyTorch calls, "
                f"{share:.2f} of the copy rate",
                flush=True,
            )


if __name__ == "__main__":
    main()
