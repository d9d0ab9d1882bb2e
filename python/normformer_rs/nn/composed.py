"""Norm classes that are built from their entries in Rust's table, where no file beside this one defines them.

composed.pyi declares them for type checkers; `python -m normformer_rs._stubs --write` writes it.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from .. import config
from . import blended, norms, running
from .row_norm import RowNorm
from .running import RunningNorm

_KINDS: dict[str, Any] = {"float": float, "int": int, "bool": bool}
_Arguments = dict[str, tuple[Any, Any]]
"""The name of an argument → (type, default)."""


def signature(entry: Mapping[str, Any]) -> inspect.Signature:
    """Returns the constructor's signature: LayerNorm's, with the norm's own options in the place of `eps`, and without
    the arguments for parameters or a bias that the norm lacks. For a norm with statistics over rows it is PowerNormV's,
    with the norm's own options in the place of `eps` and `alpha`."""
    if entry.get("form") == "columns":
        return _running_signature(entry)
    has_bias = any(parameter["name"] == "bias" for parameter in entry["parameters"])
    arguments: _Arguments = {"normalized_shape": (int | Sequence[int], inspect.Parameter.empty)}
    arguments |= {option["name"]: _option(option) for option in entry["options"]}
    arguments |= {"elementwise_affine": (bool, True)} if entry["parameters"] else {}
    arguments |= {"bias": (bool, True)} if has_bias else {}
    arguments |= {"device": (Any, None), "dtype": (torch.dtype | None, None)}
    return _signature(_parameters(arguments, inspect.Parameter.POSITIONAL_OR_KEYWORD))


def _running_signature(entry: Mapping[str, Any]) -> inspect.Signature:
    """Returns the constructor's signature for a norm with statistics over rows."""
    options = {option["name"]: _option(option) for option in entry["options"]}
    positional: _Arguments = {"num_features": (int | Sequence[int], inspect.Parameter.empty)}
    positional |= {name: option for name, option in options.items() if name not in ("groups", "sync")}
    named: _Arguments = {"elementwise_affine": (bool, True), "bias": (bool, True)}
    named |= {"groups": (int, 0)} if "groups" in options else {}
    named |= {"sync": (bool, False), "process_group": (Any, None)} if "sync" in options else {}
    named |= {"device": (Any, None), "dtype": (torch.dtype | None, None)}
    either, by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return _signature([*_parameters(positional, either), *_parameters(named, by_name)])


def _parameters(arguments: _Arguments, kind: Any) -> list[inspect.Parameter]:
    """Returns a signature's parameters. `kind`: inspect's constant for parameters by position or by keyword."""
    return [
        inspect.Parameter(name, kind, default=default, annotation=annotation)
        for name, (annotation, default) in arguments.items()
    ]


def _signature(parameters: list[inspect.Parameter]) -> inspect.Signature:
    """Returns a constructor's signature, with `self` before these parameters."""
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return inspect.Signature([self_parameter, *parameters], return_annotation=None)


def _option(option: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns (type, default) of an option of a norm's entry."""
    if "choices" in option:
        return Literal[tuple(option["choices"])], option["default"]
    kind = _KINDS[option["kind"]]
    return kind, kind(option["default"])


def doc(entry: Mapping[str, Any]) -> str:
    """Returns the docstring of an entry's class."""
    like = "PowerNormV" if entry["form"] == "columns" else "LayerNorm"
    return f"{entry['equation']}; source: {entry['source']}. Arguments, shapes, dtypes and errors are {like}'s."


def build(entry: Mapping[str, Any]) -> type[RowNorm | RunningNorm]:
    """Returns the class of an entry of the table. Errors: ImportError if it declares what its form would drop."""
    constructor = signature(entry)
    base: type[RowNorm | RunningNorm] = RunningNorm if entry["form"] == "columns" else RowNorm
    base_arguments = inspect.signature(base).parameters

    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        bound = constructor.bind(self, *arguments, **options)
        bound.apply_defaults()
        del bound.arguments["self"]
        # Options that the base class does not take become attributes first, because its constructor reads them.
        for name in [name for name in bound.arguments if name not in base_arguments]:
            setattr(self, name, bound.arguments.pop(name))
        base.__init__(self, **bound.arguments)

    __init__.__signature__ = constructor  # type: ignore[attr-defined]
    body = {"__init__": __init__, "__doc__": doc(entry), "__module__": __name__, "__qualname__": entry["module"]}
    return type(base)(entry["module"], (base,), body, norm=entry["name"])


ENTRIES: list[Mapping[str, Any]] = [
    entry
    for entry in config.ENTRIES["norms"]
    if entry["form"] in ("composed", "rows", "columns")
    and not any(hasattr(home, entry["module"]) for home in (norms, running, blended))
]
"""The entries of the table that become classes here."""
CLASSES: dict[str, type[RowNorm | RunningNorm]] = {entry["module"]: build(entry) for entry in ENTRIES}
globals().update(CLASSES)
__all__ = [*CLASSES]
