"""Initial values of linear layers and embeddings, from Rust's table of initialisations."""

import functools
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from .. import _core
from ..config import TransformerConfig
from ..errors import InputError
from .place import Place
from .sharding import whole, write_whole

Role = Literal["query", "key", "value", "output", "fc1", "fc2", "gate", "output_gate"]
"""The role of a matrix in a layer, on which its initial values depend."""


@torch.no_grad()
def draw_linear(
    weight: Tensor,
    bias: Tensor | None,
    roles: Sequence[Role],
    place: Place,
    sublayer: int,
    widths: Sequence[int] | None = None,
) -> None:
    """Initialises a linear layer's (fan_out, fan_in) matrix in place, from torch's generator, and its bias.

    The values are those of the configuration's init for these roles in sublayer number `sublayer` of the place. If the
    matrix stacks several roles (q, k and v), each has a block of rows and is drawn separately. `widths`: the blocks'
    numbers of rows; None if they are equal.
    """
    config = place.config.to_json(place.kinds)
    position = (config, place.stack, place.layer, sublayer, place.kinds)
    sizes = [weight.shape[0]]
    groups: list[list[str]] = [[*roles]]  # Rust splits the rows evenly among the roles of one call
    if widths is not None and len({*widths}) > 1:  # uneven blocks need a call for each role
        sizes, groups = [*widths], [[role] for role in roles]

    def draw(t: Tensor) -> None:
        """Fills t, which has the weight's shape, block after block."""
        for block, group in zip(t.split(sizes), groups, strict=True):
            _core.draw_linear(block, group, *position)

    def draw_bias(t: Tensor) -> None:
        """Fills t, which has the bias's shape, block after block. Its values may depend on fan_in."""
        for block, group in zip(t.split(sizes), groups, strict=True):
            _core.draw_bias(block, group, weight.shape[1], config)

    write_whole(weight, draw)
    if bias is not None:
        write_whole(bias, draw_bias)


def draw_module(
    module: nn.Module,
    roles: Sequence[Role],
    place: Place,
    sublayer: int,
    widths: Sequence[int] | None = None,
    prefix: str = "",
) -> None:
    """Initialises the parameters `weight` and `bias` of a module, with `prefix` before both names. If a torch
    parametrisation computes one of them, its values are drawn as a plain tensor and assigned, so that torch inverts the
    parametrisation.

    Errors: InputError if the parametrisation has no inverse.
    """
    weight, bias = (getattr(module, prefix + name) for name in ("weight", "bias"))
    computed = {
        prefix + name: torch.empty_like(value)
        for name, value in (("weight", weight), ("bias", bias))
        if is_parametrized(module, prefix + name)
    }
    targets = computed.get(prefix + "weight", weight), computed.get(prefix + "bias", bias)
    draw_linear(*targets, roles, place, sublayer, widths)
    for name, value in computed.items():
        try:
            with torch.no_grad():
                setattr(module, name, value)
        except (NotImplementedError, RuntimeError, ValueError) as reason:
            raise InputError(_computed(module, name)) from reason


def refuse_computed(layer: nn.Module) -> None:
    """Raises InputError for weights that initial values cannot reach: those of torch's older weight_norm,
    spectral_norm and pruning, which compute them before each forward, and of parametrisations without an inverse."""
    for module in layer.modules():
        for name in module._parameters:  # weight_norm's weight_g, and weight_orig of spectral_norm and pruning
            weight = name.removesuffix("_g").removesuffix("_orig")
            if weight != name and weight not in module._parameters and hasattr(module, weight):
                raise InputError(_computed(module, weight))
        for name, parametrizations in getattr(module, "parametrizations", {}).items():
            if not all(hasattr(parametrization, "right_inverse") for parametrization in parametrizations):
                raise InputError(_computed(module, name))


def _computed(module: nn.Module, name: str) -> str:
    """Returns the message for a weight or bias `name` whose initial values cannot be set."""
    return (
        f"the {name} of a {type(module).__name__} is computed from other parameters, and its initial values cannot be "
        "set: build the stack first, and reparametrise or prune its layers afterwards"
    )


@torch.no_grad()
def draw_table(weight: Tensor, name: str, config: TransformerConfig) -> None:
    """Initialises the parameter `name` in place: "embedding", "source_embedding", "target_embedding" (one row per
    vocabulary entry), or an untied "output_projection"."""
    write_whole(weight, lambda t: _core.draw_table(t, name, config.to_json()))


class FirstValues:
    """The `reset_parameters` of one linear layer in a Transformer's layer, instead of torch.nn.Linear's.

    Loops that reset every module separately, parents first or children first, thus end with the values of the layer's
    initialisation. `drawn`: the matrix's roles; or "torch" or "xavier", for the values of torch.nn's layers or of
    torch.nn's whole Transformer, with attention's output bias 0. Once `layer` is deleted, or converted back to
    torch.nn's class, a call does what torch.nn's method does.
    """

    def __init__(
        self, linear: nn.Module, layer: nn.Module, drawn: tuple[Role, ...] | str, place: Place, sublayer: int
    ) -> None:
        # The references are weak, because the linear layer holds this object: a cycle would delay the release of a
        # dropped model's weights.
        self.linear, self.layer = weakref.ref(linear), weakref.ref(layer)
        self.drawn, self.place, self.sublayer = drawn, place, sublayer

    def __call__(self) -> None:
        """Sets the linear layer to its initial values."""
        linear: Any = self.linear()
        drawn = self.drawn
        if not getattr(self.layer(), "has_own_values", False):
            type(linear).reset_parameters(linear)
            return
        if not isinstance(drawn, str):
            draw_module(linear, drawn, self.place, self.sublayer)
            return
        with whole(linear):
            type(linear).reset_parameters(linear)
            if drawn == "xavier":
                nn.init.xavier_uniform_(linear.weight)
        # torch.nn's attention has an out_proj of this class, and sets its bias to 0.
        if isinstance(linear, NonDynamicallyQuantizableLinear) and linear.bias is not None:
            nn.init.zeros_(linear.bias)

    def __reduce__(self) -> Any:
        """Pickles as torch.nn's own method, so that models converted back to plain torch.nn do not need this package.
        A copied or unpickled layer sets the methods of its linear layers again."""
        linear: Any = self.linear()
        return functools.partial, (type(linear).reset_parameters, linear)
