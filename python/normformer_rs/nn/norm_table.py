"""Rust's table of norms, as named tuples."""

import functools
import json
import math
from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .. import _core
from ..config import ENTRIES
from .tracing import records_core


class TensorSpec(NamedTuple):
    """A parameter or a buffer."""

    name: str
    shape: str | Sequence[int | str]
    """The shape: "one", "width", "column", or a matrix's sides: numbers, "width" and names of options."""
    start: Any
    """The initial value of every element; a parameter's may be a formula as text (`NormSpec.numbers` evaluates it)."""
    is_counter: bool = False
    """True for a buffer of type int64 that counts steps."""
    std: Any = 0.0
    """This field and the next two are those of `Numbers`, for parameters."""
    offset: Any = 0.0
    factor: Any = 1.0

    def size(self, width: int, options: Mapping[str, Any] = MappingProxyType({})) -> tuple[int, ...]:
        """Returns the tensor's size in a norm of this width with these options."""
        return size_of(self.shape, width, options)


def size_of(shape: str | Sequence[int | str], width: int, options: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the size of a parameter with this declared shape, in a norm of this width. `options`: the values of the
    options that the sides of a matrix may name."""
    if isinstance(shape, str):
        return {"one": (1,), "width": (width,), "column": (1, width, 1, 1)}[shape]
    known = {**options, "width": width}
    return tuple(int(known[side]) if isinstance(side, str) else side for side in shape)


class Numbers(NamedTuple):
    """A parameter p of one norm: its initial values, and its scale. The operator gets factor·(offset + p)."""

    start: float
    """The initial value of p."""
    std: float = 0.0
    """If not 0, the initial values of p are drawn from N(0, std²)."""
    offset: float = 0.0
    factor: float = 1.0

    def first(self, scale: float) -> float:
        """Returns the initial value of p for which the operator's value is multiplied by `scale`."""
        return self.start if scale == 1.0 else (self.offset + self.start) * scale - self.offset

    def at_start(self) -> float:
        """Returns the operator's initial value."""
        return self.factor * (self.offset + self.start)

    def inverse(self, value: Tensor) -> Tensor:
        """Returns the p for which the operator gets this value."""
        return value / self.factor - self.offset


def used(p: Tensor | None, numbers: Numbers) -> Tensor | None:
    """Returns factor·(offset + p), in f32 at least, because a sum in 16 bits would lose small p."""
    if p is None or (numbers.offset == 0.0 and numbers.factor == 1.0):
        return p
    wide = p.to(torch.promote_types(p.dtype, torch.float32))
    total = wide if numbers.offset == 0.0 else wide + numbers.offset
    return total if numbers.factor == 1.0 else total * numbers.factor


def composed_norm(x: Tensor, parameters: list[Tensor | None], options: list[float], name: str) -> Tensor:
    """Computes a norm of rows by its composed form, an operator that torch decomposes. `parameters` are as kernels
    receive them. The result is contiguous, like a kernel's."""
    run: Any = _core.composed_norm if records_core() else torch.ops.normformer_rs.composed_norm
    y: Tensor = run(x, parameters, options, name)
    return y.contiguous()


COLUMN_OPTIONS = {
    "alpha": "alpha",
    "alpha_fwd": "alpha",
    "alpha_bwd": "alpha_bwd",
    "warmup_iters": "warmup",
    "mode": "variant",
}
"""The options that a norm with column statistics may declare besides eps, groups and sync, and its operator's names for
them. src/model/running.rs reads the same ones."""


_AFFINE = [("weight", "width"), ("bias", "width")]
"""The (name, shape) of every parameter that the operator of a norm with column statistics has."""


class NormSpec(NamedTuple):
    """A norm's entry: its module's class, parameters, buffers and options, and its operator."""

    name: str
    module: str
    form: Literal["composed", "rows", "columns", "chosen"]
    operator: str | None
    """None if the norm has no operator of its own, or its options choose one."""
    parameters: tuple[TensorSpec, ...]
    buffers: tuple[TensorSpec, ...]
    options: Mapping[str, Any]
    """The options' defaults, in order."""
    choices: Mapping[str, list[str]]
    """The choices of the options that are words."""

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "NormSpec":
        """Reads an entry of `normformer_rs.tables()`."""
        parameters = tuple(TensorSpec(**fields) for fields in entry["parameters"])
        buffers = tuple(TensorSpec(**fields) for fields in entry["buffers"])
        options = {option["name"]: option["default"] for option in entry["options"]}
        plain = {key: entry[key] for key in ("name", "module", "form", "operator")}
        choices = {option["name"]: option["choices"] for option in entry["options"] if "choices" in option}
        return cls(**plain, parameters=parameters, buffers=buffers, options=options, choices=choices)

    def with_columns(self, beside: Container[str] = ()) -> "NormSpec":
        """Checks an entry with column statistics, and returns it. `beside`: the names of tensors and options that the
        norm's own class handles. Errors: ImportError for any other that its operator lacks and would drop."""
        statistics = [buffer.shape for buffer in self.buffers if not buffer.is_counter]
        counters = [buffer.shape for buffer in self.buffers if buffer.is_counter and buffer.name not in beside]
        knows_buffers = 1 <= len(statistics) <= 2 and {*statistics} <= {"width", "column"} and counters in ([], ["one"])
        known = ("eps", *COLUMN_OPTIONS, "groups", "sync")
        others = [name for name in self.options if name not in known and name not in beside]
        problem = None  # if the entry does not fit: (what it declares, what its operator has), in words
        if not knows_buffers:
            listed = ", ".join(f"{buffer.name} ({buffer.shape})" for buffer in self.buffers)
            problem = f"the buffers {listed}", "one or two statistics (width or column) and at most one counter (one)"
        elif [(p.name, p.shape) for p in self.parameters if p.name not in beside] != _AFFINE:
            problem = f"the parameters {', '.join(p.name for p in self.parameters)}", "WEIGHT and BIAS"
        elif others:
            problem = f"the option {others[0]}", ", ".join(known)
        if problem is not None:
            raise ImportError(f"norm {self.name} declares {problem[0]}: a norm with column statistics has {problem[1]}")
        return self

    def numbers(self, width: int, given: Mapping[str, Any]) -> dict[str, Numbers]:
        """Returns the numbers of each parameter by name, in a norm of this width with the options `given`. Errors:
        InputError for an invalid option."""
        # JSON has no infinity, so Rust reads such a number as text.
        plain = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in given.items()
        }
        return dict(_numbers(self.name, width, json.dumps(plain, default=float)))

    def as_floats(self, **given: Any) -> list[float]:
        """Returns all options as operators take them, in order: a flag is 0 or 1, a word its index among its
        choices."""
        options = {**self.options, **given}
        return [
            float(self.choices[name].index(value) if name in self.choices else value) for name, value in options.items()
        ]


@functools.lru_cache(maxsize=1024)
def _numbers(name: str, width: int, given: str) -> list[tuple[str, Numbers]]:
    """Returns (parameter, its numbers) for the norm `name`. `given`: its options as JSON, because the arguments of a
    cached function need a hash."""
    rows = _core.norm_numbers(name, width, given)  # (start, std, offset, factor) of each parameter
    return [(p.name, Numbers(*numbers)) for p, numbers in zip(DECLARED[name].parameters, rows, strict=True)]


class Family(NamedTuple):
    """A norm of the table with the options of a family of models."""

    name: str
    norm: str
    settings: Mapping[str, Any]
    """The module's keyword arguments."""


FAMILIES: dict[str, Family] = {
    entry["name"]: Family(entry["name"], entry["norm"], entry["settings"]) for entry in ENTRIES["families"]
}
"""Every family by its name: rmsnorm:llama, …"""
CONSTANTS: dict[str, float] = {entry["name"]: entry["value"] for entry in ENTRIES["constants"]}
DECLARED: dict[str, NormSpec] = {entry["name"]: NormSpec.of(entry) for entry in ENTRIES["norms"]}
"""Every norm of the table by its name."""
