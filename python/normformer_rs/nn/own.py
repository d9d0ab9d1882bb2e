"""The module of a norm that the user has declared (normformer_rs.norms)."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..declarations.norm import Norm, in_wide
from ..errors import InputError
from .norm_table import Numbers, size_of, used
from .result import Typed
from .running import check_width
from .sharding import mark_drawn, write_first
from .tracing import leaf


class OwnNorm(Typed):
    """A declared norm over the last dimension, which has size `width`; each row is normed separately."""

    first_scale = 1.0
    """The factor of `weight`'s initial value, as a residual scheme declares it."""

    def __init__(self, norm: Norm, width: Any, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.norm, self.width = norm, check_width("width", width)
        self.numbers_of = {
            name: Numbers(norm.start(name, self.width), norm.std(name), p.offset, p.factor)
            for name, p in norm.parameters.items()
        }
        for name in norm.parameters:
            if not math.isfinite(self.numbers_of[name].at_start()):
                raise InputError(f"{norm!r} starts {name} at {self.numbers_of[name].start}: it must be finite")
            # `norm.shape` has replaced names of options by their values, so no option is left to look up.
            empty = torch.empty(size_of(norm.shape(name), self.width, {}), device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(empty))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the parameters to their initial values."""
        for name, numbers in self.numbers_of.items():
            write_first(getattr(self, name), numbers, self.first_scale if name == "weight" else 1.0)
        mark_drawn(self)

    @leaf
    def forward(self, x: Tensor) -> Tensor:
        """Returns N(x) in x's dtype, or in the one that `returns` sets."""
        if x.shape[-1:] != (self.width,):
            raise InputError(f"x must end in ({self.width},), got shape {tuple(x.shape)}")
        x, dtype = self.widened(x)
        parameters = [used(getattr(self, name), numbers) for name, numbers in self.numbers_of.items()]
        return in_wide(self.norm, x, parameters).contiguous().to(dtype)

    def extra_repr(self) -> str:
        return f"{self.width}, {self.norm!r}"
