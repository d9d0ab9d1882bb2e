"""Builds modules and parameters from a residual scheme's declaration, in the module that owns them."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..declarations.declared import Learned, NormAt
from ..declarations.first_values import Normal
from .generators import drawn_apart
from .place import Place
from .registry import norm_of_config
from .sharding import mark_drawn, whole, write_whole

LEARNED = "_learned_by_scheme"
"""The name of a module's attribute: a dictionary from its scheme's parameters to the dimension over which products with
the parameter are summed (`Learned.sums_over`)."""


def make(
    what: NormAt | Learned,
    place: Place,
    factory: Mapping[str, Any],
    bias: bool = True,
) -> Any:
    """Makes the norm or parameter that `what` declares, with its initial values. `factory`: device and dtype. `bias`:
    True to learn the biases of norms."""
    if isinstance(what, Learned):
        shape: Any = what.shape
        parameter = nn.Parameter(torch.empty(shape, **factory))
        write(what, parameter)
        return parameter
    assert what.width is not None
    position: dict[str, Any] = {
        "last_of_decoder": what.last and place.stack == "decoder",
        "ends_stack": what.ends_stack,
        "is_weighted": what.is_weighted,
    }
    norm = norm_of_config(place.norm, what.width, place.config, **position, bias=bias, **factory)
    if what.start != 1.0:
        _begin_at(norm, what)
    return norm


def _begin_at(norm: Any, at: NormAt) -> None:
    """Sets the norm to its initial values, with the scheme's factor on γ, which `at` declares."""
    norm.first_scale = at.start  # the norm's own reset_parameters uses this factor
    reset_module(norm)


@torch.no_grad()
def write(what: Learned, p: Tensor) -> None:
    """Sets the parameter p to the initial values that `what` declares."""
    value: Any = what.value
    shape: Any = what.shape
    if isinstance(value, Normal):
        write_whole(p, lambda whole: whole.normal_(std=value.std))
    elif isinstance(value, tuple):
        values = torch.tensor(value, dtype=torch.float64, device="cpu").view(shape)
        write_whole(p, lambda whole: whole.copy_(values))
    else:
        p.fill_(value)


def install(owner: nn.Module, items: Iterable[NormAt | Learned], place: Place, part: int = 0, **making: Any) -> None:
    """Registers the declared norms and parameters in `owner`; a parameter that sublayers share is made once. `part`:
    the number of this call within the layer, so that each call draws other random values. `making`: `make`'s
    `factory` and `bias`."""
    installed = set()
    with drawn_apart(making["factory"].get("device"), part):
        for what in items:
            if what not in installed:
                installed.add(what)
                setattr(owner, what.name, make(what, place, **making))
                if isinstance(what, Learned):
                    vars(owner).setdefault(LEARNED, {})[what.name] = what.sums_over
    if installed and not isinstance(owner, nn.MultiheadAttention):  # attention's matrices may have torch.nn's values
        mark_drawn(owner)


@torch.no_grad()
def reset(owner: nn.Module, items: Iterable[NormAt | Learned], part: int = 0) -> None:
    """Sets the declared norms and parameters to their initial values, with `install`'s draws. `part`: as in
    `install`."""
    # `owned` has the parameter or the module of each declaration. Any parameter among them tells the device.
    owned: dict[NormAt | Learned, Any] = {what: getattr(owner, what.name) for what in items}
    parameters = (item if isinstance(item, Tensor) else next(item.parameters(), None) for item in owned.values())
    device = next((p.device for p in parameters if p is not None), None)
    with drawn_apart(device, part):
        for what, one in owned.items():
            if isinstance(what, Learned):
                write(what, one)
            else:
                _begin_at(one, what)


def reset_module(module: nn.Module | None) -> None:
    """Sets a module to its initial values, by its own `reset_parameters` or otherwise by its children's."""
    if module is None:
        return
    if isinstance(module, nn.MultiheadAttention):
        module.out_proj.reset_parameters()  # torch.nn's reset of attention leaves out_proj out
    own_reset: Any = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    if own_reset is not None:
        with whole(module):
            own_reset()
        return
    for child in module.children():
        reset_module(child)
