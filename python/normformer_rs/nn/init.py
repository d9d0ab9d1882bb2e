"""First values of linear layers and embeddings, from Rust's table of initialisations."""

import functools
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .. import _core
from ..config import TransformerConfig
from .place import Place
from .sharding import whole, write_whole

Role = Literal["query", "key", "value", "output", "fc1", "fc2", "gate"]


@torch.no_grad()
def draw_linear(weight: Tensor, bias: Tensor | None, roles: Sequence[Role], place: Place, sublayer: int) -> None:
    """Draws a linear layer's (fan_out, fan_in) matrix in place, from torch's generator, and its bias.

    The configuration's init decides, for these roles in that sublayer of the place. Stacked roles are drawn one by one,
    each with its block of rows.
    """
    told: list[str] = [*roles]
    where = (place.config.to_json(place.kinds), place.stack, place.layer, sublayer, place.kinds)
    write_whole(weight, lambda t: _core.draw_linear(t, told, *where))
    if bias is not None:
        write_whole(bias, lambda t: _core.draw_bias(t, told, weight.shape[1], where[0]))


@torch.no_grad()
def draw_table(weight: Tensor, name: str, config: TransformerConfig) -> None:
    """Draws the parameter `name` in place: "embedding", "source_embedding", "target_embedding" (a row a type), or an
    untied "output_projection"."""
    write_whole(weight, lambda t: _core.draw_table(t, name, config.to_json()))


class FirstValues:
    """The `reset_parameters` of one linear layer in a Transformer's layer, in place of torch.nn.Linear's.

    Loops that reset every module by itself, parents first or children first, so end in the values of the layer's
    initialisation. `drawn`: the matrix's roles; or "torch" or "xavier", as the layers of torch.nn or torch.nn's whole
    Transformer start, attention's output with bias 0. Once `layer` is gone, or torch.nn's again, so is this.
    """

    def __init__(
        self, linear: nn.Module, layer: nn.Module, drawn: tuple[Role, ...] | str, place: Place, sublayer: int
    ) -> None:
        # Weak, as the linear layer holds this: a cycle would keep the weights of a dropped model for a while.
        self.linear, self.layer = weakref.ref(linear), weakref.ref(layer)
        self.told = drawn, place, sublayer

    def __call__(self) -> None:
        linear: Any = self.linear()
        drawn, place, sublayer = self.told
        if not getattr(self.layer(), "has_own_values", False):
            type(linear).reset_parameters(linear)
            return
        if not isinstance(drawn, str):
            draw_linear(linear.weight, linear.bias, drawn, place, sublayer)
            return
        with whole(linear):
            type(linear).reset_parameters(linear)
            if drawn == "xavier":
                nn.init.xavier_uniform_(linear.weight)
        if isinstance(linear, NonDynamicallyQuantizableLinear) and linear.bias is not None:
            nn.init.zeros_(linear.bias)

    def __reduce__(self) -> Any:
        """As a copy, torch.nn's own: the layer tells its copies' linear layers anew, and models that were made plain
        hold nothing of this package."""
        linear: Any = self.linear()
        return functools.partial, (type(linear).reset_parameters, linear)
