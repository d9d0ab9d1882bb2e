"""Norms and parameters that a residual scheme declares, by the names that they get in their owner."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _core
from ..config import TransformerConfig
from ..first_values import Normal
from .sharding import write_whole


class NormAt(NamedTuple):
    """The stack's norm under a name; `last`: no norm of the stack follows it; `ends_stack`: it stands after the last
    layer; `start`: multiplies the first value of its weight; `is_weighted`: False leaves an rmsnorm's weight out."""

    name: str
    width: int
    last: bool = False
    ends_stack: bool = False
    start: float = 1.0
    is_weighted: bool = True


class Learned(NamedTuple):
    """A parameter. `value`: the first value of all its elements, or of each, row after row, or what they are drawn
    of. `sums_over`: what its products are summed over: "nothing", "width", "root-width" or "depth"."""

    name: str
    shape: tuple[int, ...]
    value: float | tuple[float, ...] | Normal
    sums_over: str = "nothing"

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "Learned":
        """From Rust's JSON."""
        value = found["value"]
        if isinstance(value, dict):
            value = Normal(value["normal"])
        value = tuple(value) if isinstance(value, list) else value
        return cls(found["name"], tuple(found["shape"]), value, found.get("sums_over", "nothing"))

    @torch.no_grad()
    def write(self, p: Tensor) -> None:
        """Sets the parameter to its first values."""
        if isinstance(self.value, Normal):
            std = self.value.std
            write_whole(p, lambda whole: whole.normal_(std=std))
        elif isinstance(self.value, tuple):
            values = torch.tensor(self.value, dtype=torch.float64, device="cpu").view(self.shape)
            write_whole(p, lambda whole: whole.copy_(values))
        else:
            p.fill_(self.value)


def drawn_over_width(config: TransformerConfig) -> float:
    """The factor of a parametrisation on the std of drawn matrices of norms and schemes. Their products are sums over
    the width."""
    m_d = config.d_model / (config.base_width or config.d_model)
    return _core.multipliers(config.parametrisation, "hidden-vector", m_d, 1.0, None, "width")["init"]
