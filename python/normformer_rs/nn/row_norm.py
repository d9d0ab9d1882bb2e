"""The base class of norms that work row by row."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from . import sharding
from .norm_table import DECLARED, NormSpec, Numbers, composed_norm, used
from .result import Typed
from .running import check_eps, check_sizes, over_rows
from .tracing import leaf

OPS = torch.ops.normformer_rs


def unit_rows(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """Returns gain·x/max(‖x‖₂, ε): ScaleNorm as a function. Exported programs contain torch's own operations."""
    if torch.compiler.is_exporting():
        return composed_norm(x, [gain], DECLARED["scalenorm"].as_floats(eps=eps), "scalenorm")
    return OPS.scale_norm(x, gain, None, eps)[0]  # of (y, statistics for the backward pass)


class RowNorm(Typed):
    """A norm over the last dimensions, each row separately: y = weight⊙x̂ + bias."""

    declared: NormSpec
    operator: str
    names: tuple[str, ...]
    """The parameters' names."""
    numbers: tuple[str, ...]
    """The names of the parameters that x̂ depends on: all but weight and bias."""
    has_eps: bool
    has_bias: bool
    has_one_gain: bool
    """True if the weight is a single number."""
    weight: Any
    """A parameter, or None."""
    bias: Any
    """A parameter, or None."""
    first_scale: float = 1.0
    """A residual scheme's factor on the initial value of γ."""

    def __init_subclass__(cls, norm: str | None = None, **rest: Any) -> None:
        """Sets the class's attributes from the table. `norm`: the name there; None keeps the parent's attributes."""
        super().__init_subclass__(**rest)
        if norm is None:
            return
        cls.declared = declared = DECLARED[norm]
        cls.operator = declared.operator or ""
        cls.names = tuple(parameter.name for parameter in declared.parameters)
        cls.numbers = tuple(name for name in cls.names if name not in ("weight", "bias"))
        cls.has_eps = "eps" in declared.options
        cls.has_bias = "bias" in cls.names
        cls.has_one_gain = any(p.name == "weight" and p.shape == "one" for p in declared.parameters)

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        shape = check_sizes("normalized_shape", normalized_shape)
        self.normalized_shape, self.elementwise_affine = shape, elementwise_affine
        if self.has_eps:
            check_eps(eps)
            self.eps = eps
        left_out: set[str] = set()
        if not elementwise_affine:
            left_out = {"weight", "bias"}
        elif not bias:
            left_out = {"bias"}
        # A subclass with further options has set them before this constructor runs.
        options = {name: getattr(self, name) for name in self.declared.options}
        self.numbers_of = self.declared.numbers(self.width, options)
        for parameter in self.declared.parameters:
            # A parameter with a number per feature has x's normed dimensions, however many these are. The sides of a
            # matrix may be options, which are attributes of the module.
            size = shape if parameter.shape == "width" else parameter.size(self.width, vars(self))
            empty = torch.empty(size, device=device, dtype=dtype)
            self.register_parameter(parameter.name, None if parameter.name in left_out else nn.Parameter(empty))
        for name in {"weight", "bias"}.difference(self.names):  # every norm has both attributes
            self.register_parameter(name, None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the parameters to their initial values."""
        for name, parameter in self._parameters.items():
            if parameter is not None:
                numbers = self.numbers_of.get(name, Numbers(0.0))
                sharding.write_first(parameter, numbers, self.first_scale if name == "weight" else 1.0)
        sharding.mark_drawn(self)

    def gain(self) -> float:
        """Returns the initial value of the weight, as the operator receives it."""
        return self.numbers_of["weight"].at_start() if "weight" in self.numbers_of else 1.0

    def in_use(self, name: str) -> Tensor | None:
        """Returns the parameter `name` as the operator receives it, factor·(offset + p)."""
        p = getattr(self, name)
        return used(p, self.numbers_of[name]) if name in self.numbers_of else p

    @property
    def width(self) -> int:
        """The number of elements per row."""
        return math.prod(self.normalized_shape)

    def parameters_in_use(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns weight and bias as the operator receives them; a gain that is not learned becomes a constant."""
        weight, bias = self.weight, self.bias
        if weight is None and (self.has_one_gain or self.gain() != 1.0):
            return x.new_full((1,), self.gain(), dtype=torch.promote_types(x.dtype, torch.float32)), bias
        weight_numbers, bias_numbers = map(self.numbers_of.get, ("weight", "bias"))
        weight = weight if weight_numbers is None else used(weight, weight_numbers)
        return weight, bias if bias_numbers is None else used(bias, bias_numbers)

    def eps_for(self, x: Tensor) -> float:
        """Returns ε. If `eps` is None, it is the machine epsilon of the dtype in which x is computed, as in torch."""
        return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if self.eps is None else self.eps

    def own(self, x: Tensor) -> Sequence[Any]:
        """Returns the operator's arguments after weight and bias: ε, or the parameters that x̂ depends on."""
        return [self.in_use(name) for name in self.numbers] if self.numbers else (self.eps_for(x),)

    def call(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Returns y for rows x (…, width): by the norm's operator, or by the composed form if it has none."""
        if not self.operator:
            return self.composed(x, weight, bias)
        return getattr(OPS, self.operator)(x, weight, bias, *self.own(x))[0]  # (y, statistics for the backward pass)

    def composed(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Returns the same as `call`, computed by the composed form, an operator that torch decomposes."""
        # The composed form takes a single number as (1,).
        scalars = {p.name for p in self.declared.parameters if p.shape == "one"}
        tensors: dict[str, Tensor | None] = {"weight": weight, "bias": bias}
        for name in self.numbers:
            p = self.in_use(name)
            tensors[name] = p.flatten() if name in scalars and p is not None else p
        parameters = [tensors[name] for name in self.names]
        return composed_norm(x, parameters, self.options(x), self.declared.name)

    def options(self, x: Tensor) -> list[float]:
        """Returns all options as numbers, in the table's order: a word becomes its index among its choices."""
        given = {name: self.eps_for(x) if name == "eps" else getattr(self, name) for name in self.declared.options}
        return self.declared.as_floats(**given)

    def fuses(self, x: Tensor) -> bool:
        """True if the fused residual step can compute this norm of a residual stream with x's dtype, from the tensors
        of `parameters_in_use` and `own`."""
        return len(self.normalized_shape) == 1 and (self.returns == "x" or self.result_dtype(x) == x.dtype)

    def formula(self, x: Tensor) -> Tensor:
        """Returns N(x), computed in torch's own operations, for exported programs."""
        return self._on_rows(self.composed, x)

    def _on_rows(self, run: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Calls run(x, weight, bias) with the dimensions of a row flattened into one, and restores them."""
        weight, bias = self.parameters_in_use(x)
        n = len(self.normalized_shape)
        if n == 1:
            return run(x, weight, bias)
        flat = (None if p is None else p.flatten() for p in (weight, bias))
        return run(x.flatten(-n), *flat).unflatten(-1, self.normalized_shape)

    @leaf
    def forward(self, x: Tensor) -> Tensor:
        """Returns N(x) in x's dtype, or in the one that `returns` sets."""
        if x.is_nested:
            return over_rows(self, x)
        if x.shape[-len(self.normalized_shape) :] != self.normalized_shape:
            raise InputError(f"x must end in {self.normalized_shape}, got shape {tuple(x.shape)}")
        if self.returns != "x":
            x, dtype = self.widened(x)
            return self._normed(x).to(dtype)
        return self._normed(x)

    def _normed(self, x: Tensor) -> Tensor:
        """Returns N(x) in x's dtype; exported programs contain torch's own operations."""
        if torch.compiler.is_exporting():
            return self.formula(x)
        if type(x) is not Tensor and not torch.compiler.is_compiling():
            sharding.register()  # x may be a DTensor, for which operators need sharding rules
        return self._on_rows(self.call, x)

    def extra_repr(self) -> str:
        shown = [name for name in self.declared.options if name in vars(self)]
        options = [f"{name}={getattr(self, name)}" for name in shown if name != "elementwise_affine"]
        if self.names:
            options.append(f"elementwise_affine={self.elementwise_affine}")
        return ", ".join([str(self.normalized_shape), *options])


class OffsetNorm(RowNorm):
    """A norm that also loads the `g` of x-transformers, whose norms compute x/‖x‖·√d·(g + offset). The offset is 1 with
    `unit_offset`, and 0 without."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = 1e-5,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        unit_offset: bool = False,
    ) -> None:
        self.unit_offset = unit_offset
        super().__init__(normalized_shape, eps, elementwise_affine, bias=False, device=device, dtype=dtype)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        g, weight = prefix + "g", prefix + "weight"
        if self.weight is not None and g in state_dict and weight not in state_dict:
            # x-transformers multiplies x/‖x‖ by √d. If the norm has a weight per feature, x̂ contains this factor, and
            # `self.gain()` is 1. If the norm has a single gain, `self.gain()` is √d.
            gain = (state_dict.pop(g) + float(self.unit_offset)) * self.gain()
            state_dict[weight] = self.numbers_of["weight"].inverse(gain)
        super()._load_from_state_dict(state_dict, prefix, *rest)
