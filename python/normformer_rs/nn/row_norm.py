"""The base of norms that work row by row."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from . import sharding
from .running import check_eps, check_size, over_rows
from .table import DECLARED, Declared
from .tracing import leaf

OPS = torch.ops.normformer_rs
sharding.register()


class RowNorm(nn.Module):
    """A norm over the last dimensions, each row for itself: y = weight⊙x̂ + bias."""

    declared: Declared
    operator: str
    names: tuple[str, ...]
    """The parameters' names."""
    numbers: tuple[str, ...]
    """Those that enter x̂: all but weight and bias."""
    has_eps: bool
    has_bias: bool
    has_one_gain: bool
    weight: Any
    """A parameter, or None."""
    bias: Any
    """A parameter, or None."""
    first_scale: float = 1.0
    """Multiplies the first value of γ, as a residual scheme declares it."""

    def __init_subclass__(cls, norm: str | None = None, **rest: Any) -> None:
        """`norm`: the name in the table."""
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
        is_several = isinstance(normalized_shape, Iterable) and not isinstance(normalized_shape, str)
        sizes: Any = normalized_shape if is_several else [normalized_shape]
        shape = tuple(check_size("normalized_shape", size) for size in sizes)
        if not shape:
            raise InputError("normalized_shape must name at least one dimension, got none")
        self.normalized_shape, self.elementwise_affine = shape, elementwise_affine
        if self.has_eps:
            check_eps(eps)
            self.eps = eps
        left_out = {"weight", "bias"} if not elementwise_affine else set() if bias else {"bias"}
        for declared in self.declared.parameters:
            empty = torch.empty(1 if declared.shape == "one" else shape, device=device, dtype=dtype)
            self.register_parameter(declared.name, None if declared.name in left_out else nn.Parameter(empty))
        for name in {"weight", "bias"}.difference(self.names):
            self.register_parameter(name, None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the parameters to their first values."""
        offset = float(getattr(self, "zero_centred", False))
        for name, parameter in self._parameters.items():
            if parameter is not None:
                start = self.start(name)
                is_scaled = name == "weight" and self.first_scale != 1.0
                nn.init.constant_(parameter, (start + offset) * self.first_scale - offset if is_scaled else start)

    def start(self, name: str) -> float:
        """The first value of a parameter."""
        start = next(parameter.start for parameter in self.declared.parameters if parameter.name == name)
        if start != "length":
            return start
        p: float | None = getattr(self, "p", None)
        return math.sqrt(self.width) if p is None else self.width ** (1 / p)

    def gain(self) -> float:
        """The first value of the weight."""
        return self.start("weight")

    @property
    def width(self) -> int:
        """Numbers per row."""
        return math.prod(self.normalized_shape)

    def parameters_in_use(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias as the operator takes them; a gain that is not learned is a constant."""
        if self.has_one_gain and self.weight is None:
            return x.new_full((1,), self.gain(), dtype=torch.promote_types(x.dtype, torch.float32)), None
        return self.weight, self.bias

    def eps_for(self, x: Tensor) -> float:
        """ε; None stands for the machine epsilon of the type that x is computed in, as in torch."""
        return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if self.eps is None else self.eps

    def own(self, x: Tensor) -> Sequence[Any]:
        """The operator's arguments beside weight and bias: ε, or the learned numbers of x̂."""
        return (self.eps_for(x),)

    def call(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The operator on rows."""
        return getattr(OPS, self.operator)(x, weight, bias, self.eps_for(x))[0]

    def fuses(self, x: Tensor) -> bool:
        """The fused residual step computes this norm of a stream of x's dtype, from `parameters_in_use` and `own`."""
        return len(self.normalized_shape) == 1

    def formula(self, x: Tensor) -> Tensor:
        """The same in torch's own operations, for exported programs."""
        raise NotImplementedError

    @leaf
    def forward(self, x: Tensor) -> Tensor:
        """N(x) in x's dtype."""
        n = len(self.normalized_shape)
        if x.is_nested:
            return over_rows(self, x)
        if tuple(x.shape[-n:]) != self.normalized_shape:
            raise InputError(f"x must end in {self.normalized_shape}, got shape {tuple(x.shape)}")
        if torch.compiler.is_exporting():
            return self.formula(x)
        if type(x) is not Tensor and not torch.compiler.is_compiling():
            sharding.register()
        weight, bias = self.parameters_in_use(x)
        if n == 1:
            return self.call(x, weight, bias)
        flat = (None if p is None else p.flatten() for p in (weight, bias))
        return self.call(x.flatten(-n), *flat).unflatten(-1, self.normalized_shape)

    def extra_repr(self) -> str:
        shown = [name for name in self.declared.options if name in vars(self)]
        options = [f"{name}={getattr(self, name)}" for name in shown if name != "elementwise_affine"]
        if self.names:
            options.append(f"elementwise_affine={self.elementwise_affine}")
        return ", ".join([str(self.normalized_shape), *options])


class OffsetNorm(RowNorm):
    """Reads the `g` of x-transformers, where a norm ends in ·√d·(g + offset)."""

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
        super().__init__(normalized_shape, eps, elementwise_affine, False, device, dtype)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        g, weight = prefix + "g", prefix + "weight"
        if self.weight is not None and g in state_dict and weight not in state_dict:
            # Their factor √d belongs to x̂ where there is a weight per feature, and to the weight where it is one gain.
            gain = (state_dict.pop(g) + float(self.unit_offset)) * self.gain()
            state_dict[weight] = gain - 1.0 if getattr(self, "zero_centred", False) else gain
        super()._load_from_state_dict(state_dict, prefix, *rest)
