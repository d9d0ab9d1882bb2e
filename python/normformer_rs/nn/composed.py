"""Norm classes that are built from their entries in Rust's table: row norms that norms.py does not define itself.

composed.pyi declares them for type checkers; `python -m normformer_rs._stubs --write` writes it.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from .. import config
from . import norms
from .row_norm import RowNorm

_KINDS: dict[str, Any] = {"float": float, "int": int, "bool": bool}


def signature(entry: Mapping[str, Any]) -> inspect.Signature:
    """Returns the constructor's signature: LayerNorm's, without ε, parameters and bias if the norm has none, and
    with its own options after ε."""
    has_bias = any(parameter["name"] == "bias" for parameter in entry["parameters"])
    kinds: dict[str, tuple[Any, Any]] = {"normalized_shape": (int | Sequence[int], inspect.Parameter.empty)}
    kinds |= {option["name"]: _option(option) for option in entry["options"]}
    kinds |= {"elementwise_affine": (bool, True)} if entry["parameters"] else {}
    kinds |= {"bias": (bool, True)} if has_bias else {}
    kinds |= {"device": (Any, None), "dtype": (torch.dtype | None, None)}
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    own = [inspect.Parameter(name, either, default=start, annotation=kind) for name, (kind, start) in kinds.items()]
    return inspect.Signature([inspect.Parameter("self", either), *own], return_annotation=None)


def _option(option: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns (type, default)."""
    if "choices" in option:
        return Literal[tuple(option["choices"])], option["default"]
    kind = _KINDS[option["kind"]]
    return kind, kind(option["default"])


def doc(entry: Mapping[str, Any]) -> str:
    """Returns the class's docstring."""
    return f"{entry['equation']}; source: {entry['source']}. Arguments, shapes, dtypes and errors are LayerNorm's."


def _class(entry: Mapping[str, Any]) -> type[RowNorm]:
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
    return type(RowNorm)(entry["module"], (RowNorm,), body, norm=entry["name"])


ENTRIES: list[Mapping[str, Any]] = [
    entry
    for entry in config.ENTRIES["norms"]
    if entry["form"] in ("composed", "rows") and not hasattr(norms, entry["module"])
]
"""The entries of the table that become classes here."""
CLASSES: dict[str, type[RowNorm]] = {entry["module"]: _class(entry) for entry in ENTRIES}
globals().update(CLASSES)
__all__ = [*CLASSES]
