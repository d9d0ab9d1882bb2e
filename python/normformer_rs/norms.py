"""A norm of one's own, declared in Python: a function of torch, and what it learns.

`nn`'s modules, `swap_norms`, the training loop and fairseq's models take it where they take a name. It needs no kernel;
the loop calls it through PyTorch's dispatcher, so it is slower than the table's.
"""

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from .errors import InputError
from .first_values import Normal

__all__ = ["Norm", "Parameter"]


class Parameter(NamedTuple):
    """What a norm learns, p. The function gets factor·(offset + p). `start`: every element of p at the start, a number,
    a function of the norm's width, or `schemes.Normal`; `shape`: "one" number, one per column ("width"), or the two
    sides of a matrix, each a number, "width" or the name of an option."""

    start: float | Callable[[int], float] | Normal = 1.0
    shape: str | Sequence[int | str] = "width"
    offset: float = 0.0
    factor: float = 1.0


class Norm:
    """The base of norms: override `normalize`, and name what it learns and its options.

    >>> import torch
    >>> class MaxNorm(Norm):
    ...     name, equation = "maxnorm", "y = γ⊙x/max(max|x|, ε)"
    ...     parameters, options = {"weight": Parameter()}, {"eps": 1e-5}
    ...     def normalize(self, x, weight, eps):
    ...         return weight * x / x.abs().amax(-1, keepdim=True).clamp_min(eps)
    >>> MaxNorm()(4)(torch.tensor([1.0, -2.0, 4.0, 0.0]))
    tensor([ 0.2500, -0.5000,  1.0000,  0.0000], grad_fn=<DivBackward0>)

    An object with other options is made by keyword: MaxNorm(eps=1e-3). Called with a width it makes a module. Call a
    parameter that stands outside `weight`: schemes that set how norms start ask for it.
    """

    name: ClassVar[str]
    """Letters, digits, - and _; none of the package's."""
    equation: ClassVar[str] = ""
    source: ClassVar[str] = ""
    parameters: ClassVar[Mapping[str, Parameter]] = {}
    """By name, in the order in which `normalize` takes them: at most eight."""
    options: ClassVar[Mapping[str, float]] = {}
    """Numbers by name, with their defaults."""

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if isinstance(getattr(cls, "name", None), str):
            _define()
            _CLASSES.setdefault(cls.name, []).insert(0, cls)
            _of.cache_clear()

    def __init__(self, **options: float) -> None:
        if not isinstance(getattr(self, "name", None), str):
            raise InputError(f'{type(self).__name__} has no name: write name = "…" in the class')
        for name, value in options.items():
            if name not in self.options:
                raise InputError(f"{type(self).__name__} has no option {name!r}; it has {', '.join(self.options)}")
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise InputError(f"{name} must be a finite number; got {value!r}")
        self.given = {name: float(options.get(name, value)) for name, value in self.options.items()}

    def normalize(self, x: Any, *parameters: Any, **options: float) -> Any:
        """y of x (…, width), f32 or f64, row by row, by torch's operations, which autograd follows. Parameters have
        their shapes."""
        raise NotImplementedError(f"{type(self).__name__} must say what it computes: def normalize(self, x, …)")

    def __call__(self, width: int, device: Any = None, dtype: Any = None) -> Any:
        """A module over rows of this width."""
        from .nn.own import OwnNorm

        return OwnNorm(self, width, device=device, dtype=dtype)

    def start(self, name: str, width: int) -> float:
        """A parameter at the start."""
        value = self.parameters[name].start
        if isinstance(value, Normal):
            return 0.0
        return float(value(width) if callable(value) else value)

    def std(self, name: str) -> float:
        """Of the normal distribution that a parameter is drawn from; 0: none."""
        value = self.parameters[name].start
        return float(value.std) if isinstance(value, Normal) else 0.0

    def shape(self, name: str) -> str | list[int | str]:
        """A parameter's: a name, or the sides of a matrix, numbers and "width". Errors: InputError for other words."""
        shape = self.parameters[name].shape
        if shape in ("one", "width"):
            return shape
        known: Mapping[Any, Any] = self.given
        sides: list[Any] = [shape] if isinstance(shape, str) else [known.get(side, side) for side in shape]
        fits = [side == "width" or (not isinstance(side, str) and side >= 1 and side == int(side)) for side in sides]
        if len(sides) != 2 or not all(fits):
            raise InputError(
                f'{self!r}: {name} has the shape {shape!r}; valid: "one", "width", or two sides of a matrix, each a '
                f'number, "width" or an option ({_listed(self.options)})'
            )
        return [side if side == "width" else int(side) for side in sides]

    def declare(self, config: Any) -> dict[str, Any]:
        """Everything that the norm declares in a model of this configuration, as config.json holds it."""
        d_head = config.d_model // max(config.heads, 1)
        widths = sorted({config.d_model, config.d_ff, d_head, (config.kv_heads or config.heads) * d_head})
        parameters = [
            {
                "name": name,
                "shape": self.shape(name),
                "start": {str(width): self.start(name, width) for width in widths},
                **({"std": self.std(name)} if self.std(name) else {}),
                "offset": float(p.offset),
                "factor": float(p.factor),
            }
            for name, p in self.parameters.items()
        ]
        about = {key: getattr(self, key) for key in ("name", "equation", "source")}
        return {**about, "parameters": parameters, "options": self.given}

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.given == other.given  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), *self.given.items()))


_CLASSES: dict[str, list[type[Norm]]] = {}
"""The classes by name, the newest first: a notebook's cell runs again, and two projects may choose one name."""


def declared(data: Mapping[str, Any]) -> Norm:
    """The norm of a config.json: of the newest class of its name that declares the same parameters. Errors: InputError
    where no such class has been imported."""
    name, options = str(data.get("name")), data.get("options", {})
    if name not in _CLASSES:
        raise InputError(
            f"norm {name!r} is a function in Python, which a run does not hold: import the module that declares it, or "
            'name it with norm = "file.py:Class"'
        )
    wanted = [(p["name"], p["shape"], p.get("offset", 0.0), p.get("factor", 1.0)) for p in data.get("parameters", ())]
    for cls in _CLASSES[name]:
        if cls.options.keys() == options.keys():
            norm = cls(**options)
            own = [(key, norm.shape(key), p.offset, p.factor) for key, p in cls.parameters.items()]
            if own == wanted:
                return norm
    raise InputError(
        f"norm {name!r} of this run learns {_listed(p[0] for p in wanted)} and has the options {_listed(options)}; "
        f"the class {_CLASSES[name][0].__name__} of that name declares other parameters (names, shapes, offsets, "
        "factors) or options: import the class that the run was made with"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


@functools.cache
def _of(declaration: str) -> Norm:
    return declared(json.loads(declaration))


_defined: list[Any] = []


def _define() -> None:
    """Defines the operator that the loop calls."""
    if _defined:
        return
    import torch

    from . import nn  # noqa: F401  the core comes before its namespace is extended

    library = torch.library.Library("normformer_rs", "FRAGMENT")
    parameters = ", ".join(f"Tensor? p{i}" for i in range(8))
    library.define(f"own_norm(Tensor x, {parameters}, str declaration) -> Tensor")
    library.impl("own_norm", _run, "CompositeImplicitAutograd")
    _defined.append(library)  # it lives as long as the process


def _run(x: Any, *given: Any) -> Any:
    *parameters, declaration = given
    return in_wide(_of(declaration), x, [p for p in parameters if p is not None])


def in_wide(norm: Norm, x: Any, parameters: Any) -> Any:
    """y in x's type, computed in f32 at least."""
    import torch

    wide = torch.promote_types(x.dtype, torch.float32)
    y = norm.normalize(x.to(wide), *(p.to(wide) for p in parameters), **norm.given)
    if y.shape != x.shape:
        raise InputError(f"{norm!r} must give y of x's shape {tuple(x.shape)}; got {tuple(y.shape)}")
    return y.to(x.dtype)
