"""How cases on the device are checked: tensors, gradients, errors, and the counters that say a kernel ran."""

import os
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

import reference as ref
import row_norms
from normformer_rs import _core
from normformer_rs.nn.norm_table import DECLARED
from row_norms import EPS, OPS, call, step

__all__ = ["EPS", "OPS", "call", "step"]
SEED = (5 << 32 | 77, 3, 1)
SITE = 5
NORMS = {None: None, **row_norms.NORMS}
COLUMN_NORMS = {DECLARED[name].operator: twin for name, twin in ref.BATCH_NORMS.items()}
REAL = os.environ.get("NORMFORMER_RS_TEST_DEVICE", "").replace("emulated", "") or None
"""A real device to run on, where the tests were told of one."""


def calls(dtype):
    """Calls of kernel and of composed formula that one of an operator makes: CUDA's kernels are not for float64."""
    return (0, 1) if REAL and dtype == torch.float64 else (1, 0)


TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@contextmanager
def on_device(operator):
    """Tensors of the CPU take the CUDA kernels' way inside (those of a real device take it anyway), and `operator` must
    have run them."""
    before = _core.operator_counts()[operator]
    _core.cuda_stand_in(not REAL)
    try:
        yield
    finally:
        _core.cuda_stand_in(False)
    after = _core.operator_counts()[operator]
    is_proven = "MOCK_MUTANT" in os.environ and os.environ.get("NORMFORMER_RS_CUDA") == "auto"
    is_refused = is_proven and after[1] > before[1]  # the proof has refused the mutant: the formula has run
    assert is_refused or (after[0] > before[0] and after[1] == before[1]), f"{operator} ran its formula, not its kernel"


def randn(rows, width, dtype, misaligned=False):
    """A contiguous matrix; misaligned, it starts one element past a 16-byte border."""
    start = int(misaligned)
    flat = torch.randn(rows * width + start, dtype=torch.float64).to(dtype)[start:]
    assert (flat.data_ptr() % 16 != 0) == misaligned
    return flat.view(rows, width)


def parameters(norm, width):
    """[weight, bias, *numbers]."""
    return [None, None] if norm is None else row_norms.parameters(norm, width, torch.float32)


def leaves(tensors, dtype=None):
    return [None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]


def close(name, ours, exact, theirs, terms):
    """At most twice the error of the formula in PyTorch with the same dtype, and free: one rounding of the result, and
    in f32 one of each of the factors that are summed."""
    assert ours.shape == exact.shape, name
    own, wide = torch.finfo(ours.dtype), torch.finfo(torch.float32)
    free = own.eps * exact.abs().max() + own.tiny + 4 * wide.eps * terms
    error = (ours.double() - exact).abs().max()
    allowed = 2 * (theirs.double() - exact).abs().max() + free
    assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def check(function, formula, inputs, outputs, operator, slope=1.0):
    """Outputs and gradients of function(*inputs) on the device against formula(*inputs) in float64.

    Outputs are (name, whether a gradient comes back); inputs may be None. `slope` is what a gradient is multiplied by
    before parts of it cancel.
    """
    own = leaves(inputs)
    with on_device(operator):
        ours = function(*own)
        backs = [torch.randn_like(y) if back else None for y, (_, back) in zip(ours, outputs)]
        chosen = [(y, d) for y, d in zip(ours, backs) if d is not None]
        used = [t for t in own if t is not None]
        found = torch.autograd.grad(
            [y for y, _ in chosen], used, [d for _, d in chosen], materialize_grads=True, allow_unused=True
        )

    def by_formula(dtype):
        copies = leaves(inputs, dtype)
        results = formula(*copies)
        used = [t for t in copies if t is not None]
        loss = sum((y.double() * d.double()).sum() for y, d in zip(results, backs) if d is not None)
        return results, torch.autograd.grad(loss, used, materialize_grads=True, allow_unused=True)

    exact, exact_gradients = by_formula(torch.float64)
    theirs, their_gradients = by_formula(torch.float32)
    for (name, _), o, e, t in zip(outputs, ours, exact, theirs):
        close(name, o.detach(), e.detach(), t.detach().to(o.dtype), e.detach().abs().max())
    size = slope * max(d.double().abs().max() for d in backs if d is not None)
    for i, (o, e, t) in enumerate(zip(found, exact_gradients, their_gradients)):
        # What is summed over rows and columns before it cancels.
        terms = e.abs().max() + size * (ours[0].numel() if o.numel() == 1 else ours[0].shape[0]) ** 0.5
        close(f"gradient {i}", o, e, t.to(o.dtype), terms)


class Detector(NamedTuple):
    """A call of a case that finds mutants."""

    case: Callable[..., None]
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.case.__name__}{self.arguments!r}"


DETECTORS: list[Detector] = []
"""All calls that `detects` has named."""


def detects(*calls: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Marks a case as one that finds mutants of the kernels (mutants.py), called with each of these arguments."""

    def mark(case: Any) -> Any:
        DETECTORS.extend(Detector(case, arguments) for arguments in calls)
        return case

    return mark
