"""Norms whose class is made of their entry in Rust's table: those of rows that norms.py does not write out.

composed.pyi declares them for type checkers; `python -m normformer_rs._stubs --write` writes it.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import config
from . import formulas, norms
from .row_norm import OPS, RowNorm


class Composed(RowNorm):
    """A norm by its operator or, where it has no kernels, by its composed form, an operator that torch decomposes."""

    name: str
    option_names: tuple[str, ...]

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        cls.name, cls.option_names = cls.declared.name, cls.declared.options

    def own(self, x: Tensor) -> Sequence[Any]:
        return [getattr(self, name) for name in self.numbers] if self.numbers else super().own(x)

    def call(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if self.operator:
            return getattr(OPS, self.operator)(x, weight, bias, *self.own(x))[0]
        given = {"weight": weight, "bias": bias}
        parameters = [given[name] if name in given else getattr(self, name).flatten() for name in self.names]
        return OPS.composed_norm(x, parameters, self.options(x), self.name)

    def options(self, x: Tensor) -> list[float]:
        """The options of x̂ as numbers, in the table's order."""
        return [self.eps_for(x) if name == "eps" else getattr(self, name) for name in self.option_names]

    def formula(self, x: Tensor) -> Tensor:
        n, written = len(self.normalized_shape), getattr(formulas, self.name, None)
        rows = x if n == 1 else x.flatten(-n)
        given = {name: None if p is None else p.flatten() for name, p in self._parameters.items()}
        if written is None:
            y = self.call(rows, given["weight"], given["bias"])
        else:
            y = written(rows, *(given[name] for name in self.names), *self.options(x))
        return y if n == 1 else y.unflatten(-1, self.normalized_shape)


def signature(entry: Mapping[str, Any]) -> inspect.Signature:
    """The constructor: LayerNorm's, without ε, parameters and bias where the norm has none, and with its own options
    after ε."""
    has_bias = any(parameter["name"] == "bias" for parameter in entry["parameters"])
    kinds: dict[str, tuple[Any, Any]] = {"normalized_shape": (int | Sequence[int], inspect.Parameter.empty)}
    kinds |= {o["name"]: (float, float(o["default"])) for o in entry["options"]}
    kinds |= {"elementwise_affine": (bool, True)} if entry["parameters"] else {}
    kinds |= {"bias": (bool, True)} if has_bias else {}
    kinds |= {"device": (Any, None), "dtype": (torch.dtype | None, None)}
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    own = [inspect.Parameter(name, either, default=start, annotation=kind) for name, (kind, start) in kinds.items()]
    return inspect.Signature([inspect.Parameter("self", either), *own], return_annotation=None)


def doc(entry: Mapping[str, Any]) -> str:
    """The class's documentation."""
    return f"{entry['equation']}; source: {entry['source']}. Arguments, shapes, dtypes and errors are LayerNorm's."


def _class(entry: Mapping[str, Any]) -> type[Composed]:
    constructor = signature(entry)
    takes = {"eps", "elementwise_affine", "bias", "device", "dtype"}

    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        given = constructor.bind(self, *arguments, **options)
        given.apply_defaults()
        del given.arguments["self"]
        shape = given.arguments.pop("normalized_shape")
        for name in [name for name in given.arguments if name not in takes]:
            setattr(self, name, given.arguments.pop(name))
        RowNorm.__init__(self, shape, **given.arguments)

    __init__.__signature__ = constructor  # type: ignore[attr-defined]
    body = {"__init__": __init__, "__doc__": doc(entry), "__module__": __name__, "__qualname__": entry["module"]}
    return type(RowNorm)(entry["module"], (Composed,), body, norm=entry["name"])


ENTRIES: list[Mapping[str, Any]] = [
    entry
    for entry in config.ENTRIES["norms"]
    if entry["form"] in ("composed", "rows") and not hasattr(norms, entry["module"])
]
"""The entries of the table that become classes here."""
CLASSES: dict[str, type[Composed]] = {entry["module"]: _class(entry) for entry in ENTRIES}
globals().update(CLASSES)
__all__ = [*CLASSES]
