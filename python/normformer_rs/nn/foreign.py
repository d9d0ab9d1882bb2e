"""Layers outside the package's stacks: in torch.nn's, in lists and sequences of other modules, and alone.

torch.nn's stacks, and most models, hold copies of one layer in a ModuleList. When a module gets such a list, its layers
take their places in it, as in a stack of ours. A layer that has no place refuses to run where its scheme asks for one.
"""

import functools
import weakref
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from .. import _core
from ..config import TransformerConfig
from ..errors import InputError
from .place import Place
from .registry import norm_of_config
from .scheme import SchemeSpec, Sublayer
from .sharding import write_whole
from .specs import NormAt

STACKS = (nn.TransformerEncoder, nn.TransformerDecoder)
LISTS = (nn.ModuleList, nn.Sequential)


class Placeable(nn.Module):
    """A layer that takes a place in a stack."""

    placed: Literal["stack", "list", "arguments"] | None = None
    """The source of its place: a stack of this package, a list, its own arguments. None: it stands alone at depth 1."""
    has_own_values = True
    keeps_torchs_values: Any
    lacks_end = False
    """The stack that holds it should end with a norm, and has none."""

    def review(self) -> None:
        """Decides anew whether it may run."""
        raise NotImplementedError


@functools.cache
def listen() -> None:
    """Hears of every module that a module gets, from the first layer on."""
    register_module_module_registration_hook(_registered)


def _registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if isinstance(child, LISTS):
        layers = [*child.children()]
        is_ours = getattr(parent, "places_layers", False)
        if layers and not is_ours and all(isinstance(layer, Placeable) for layer in layers):
            place_list(layers, isinstance(parent, STACKS))
    elif isinstance(child, Placeable):
        if isinstance(parent, LISTS) and child.placed is None and name not in parent._modules:  # the list grows
            for layer in parent.children():
                if isinstance(layer, Placeable) and layer.placed == "list":
                    layer.placed = None
                    layer.review()
    elif isinstance(parent, nn.Transformer) and child is not None and "d_model" not in vars(parent):
        if any(_has_schemes_values(layer) for layer in child.modules()):  # its constructor's next step
            vars(parent)["_reset_parameters"] = _Xavier(parent)
    elif name == "norm" and isinstance(parent, STACKS) and "layers" in parent._modules:
        for layer in parent.layers.children():
            if isinstance(layer, Placeable):
                layer.lacks_end = False
                layer.review()


def place_list(layers: list[Any], in_torchs: bool) -> None:
    """Gives the layers of a list, or of a stack of torch.nn, their places; those whose weights are as they were drawn
    are drawn anew, for their depth.

    Layers of a stack of ours keep their places, and so do trained ones, and those that their arguments gave another
    depth. Errors: InputError where these then have one number, and the scheme asks for it.
    """
    first, n = layers[0], len(layers)
    place, has_trained = first.place, not all(layer.is_fresh() for layer in layers)
    placed = {layer.placed for layer in layers}
    is_mixed = any(type(layer) is not type(first) or _template(layer) != _template(first) for layer in layers)
    if is_mixed or "stack" in placed or (placed == {"list"} and has_trained):
        return
    numbers = {layer.place.layer for layer in layers}
    if "arguments" in placed and not (numbers == {0} and place.depth == n):
        asked = asks(place.config, place.stack, not first.keeps_torchs_values) or ""
        if len(numbers) < n and "number" in asked:
            raise InputError(
                f"residual {place.config.residual!r} asks for each layer's number, and of {n} layers in a list some "
                f"have the same one, of a depth of {place.depth}: give each its own layer="
            )
        return
    config = place.config
    if len(first.kinds) == 2:
        is_pair = config.architecture == "encoder-decoder"
        depths = first._depths(n, config.decoder_layers if is_pair else None)
    else:
        depths = first._depths(config.encoder_layers if "arguments" in placed else None, n)
    for i, layer in enumerate(layers):
        is_fresh = layer.is_fresh()
        layer.move(Place(config.replace(**depths), place.stack, i))
        layer.grow(layer.place.declared.growth, layer.linear1.weight.device)
        layer.placed, layer.lacks_end = "list", in_torchs and not layer.is_torchs and bool(layer.place.declared.end)
        layer.review()
        if is_fresh and not layer.keeps_torchs_values:
            layer.draw()


def _template(layer: Any) -> TransformerConfig:
    """A layer's configuration, without a depth that only a list has given."""
    config = layer.place.config
    return config if layer.placed == "arguments" else config.replace(**layer._depths(1, None))


class _Xavier:
    """torch.nn.Transformer's `_reset_parameters`, once, for one whose stacks hold layers with a scheme's values."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)

    def __call__(self) -> None:
        model: Any = self.model()
        del vars(model)["_reset_parameters"]
        draw_xavier(model)


def draw_xavier(model: nn.Module) -> None:
    """Draws a model's matrices as torch.nn.Transformer does, Xavier uniform, but for a scheme's own parameters and the
    layers that have a scheme's values."""
    kept = {part for layer in model.modules() if _has_schemes_values(layer) for part in layer.modules()}
    drawn = (m for m in model.modules() if m not in kept and not getattr(m, "has_own_values", False))
    for p in dict.fromkeys(p for module in drawn for p in module.parameters(recurse=False)):
        if p.dim() > 1:
            write_whole(p, nn.init.xavier_uniform_)


def _has_schemes_values(module: nn.Module) -> bool:
    return isinstance(module, Placeable) and not module.keeps_torchs_values


def refusal(place: Place, placed: str | None, lacks_end: bool, draws: bool) -> str | None:
    """Why a layer may not run outside a stack of ours; None: it may. `draws`: its first values are the scheme's."""
    declared, name, ours = place.declared, str(place.config.residual), "normformer_rs.nn's stack"
    if needs_stack(declared) and not (placed == "arguments" and place.depth == 1):
        return (
            f'residual "{name}" works between layers, too, which a layer cannot do by itself: put it into {ours} '
            "(TransformerEncoder, TransformerDecoder); of a single layer, say so by its depth, encoder_layers=1"
        )
    if placed is None and (what := asks(place.config, place.stack, draws)):
        return (
            f'residual "{name}" asks for {what}, and nobody has told this layer: put it into {ours}, into torch.nn\'s, '
            "or a list that belongs to a module; or give layer= and encoder_layers= (a decoder's: decoder_layers=)"
        )
    if lacks_end:
        norm = declared.norm
        return (
            f'residual "{name}" ends a stack with a norm, and this stack of torch.nn has none: give it '
            f'norm=normformer_rs.nn.norm_class("{norm}")({place.config.d_model}), or take {ours}'
        )
    return None


def needs_stack(declared: SchemeSpec) -> bool:
    """The scheme has parts outside its layers, other than a norm at the end."""
    others = declared.begin or declared.combine or declared.streams or declared.mixing
    takes = any(layer.takes for layer in declared.layers)
    return bool(others) or takes or any(change.kind != "norm" for change in declared.end)


@functools.lru_cache(maxsize=64)
def asks(config: TransformerConfig, stack: str, draws: bool) -> str | None:
    """The depth, or depth and number, if the layer's computation depends on it; with `draws`, its first values, too."""
    names = ("encoder_layers", "decoder_layers") if config.architecture == "encoder-decoder" else ("decoder_layers",)
    shallow = Place(config.replace(**dict.fromkeys(names, 1)), stack)
    first, *_, last = (Place(config.replace(**dict.fromkeys(names, 3)), stack, i) for i in range(3))
    alone, one, other = (_described(place, draws) for place in (shallow, first, last))
    is_mixture = "," in str(config.residual)  # its shares may only show at greater depth
    by_layer = first.declared.growth is not None and first.declared.growth.by_layer
    if is_mixture or by_layer or one != other:
        return "the layer's number and the depth"
    return "the depth" if alone != one else None


def _described(place: Place, draws: bool) -> list[Any]:
    found: list[Any] = [repr(place.spec.begin), *(_sublayer(sublayer, place) for sublayer in place.sublayers)]
    return found + (_first_values(place) if draws else [])


def _sublayer(sublayer: Sublayer, place: Place) -> list[str]:
    """Everything in it; the last norm of a stack counts as another only if it is made otherwise."""
    norms = [what for what in (*sublayer.around(), *sublayer.within()) if isinstance(what, NormAt)]
    plain = {repr(norm): repr(norm._replace(last=False)) for norm in norms}
    text = repr(sublayer)
    for written, alike in plain.items():
        text = text.replace(written, alike)
    made = [repr(norm_of_config(place.norm, n.width, place.config, last_of_decoder=n.last)) for n in norms]
    return [text, *(made if place.stack == "decoder" else [])]


def _first_values(place: Place) -> list[Any]:
    """Small matrices drawn as the place's are, each from one seed."""
    attentions = len(place.sublayers) - 1
    drawn: Iterator[tuple[int, list[str]]] = (
        (i, roles)
        for i, kinds in enumerate([[["query", "key", "value"], ["output"]]] * attentions + [[["fc1"], ["fc2"]]])
        for roles in kinds
    )
    found, where = [], (place.config.to_json(), place.stack, place.layer)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for sublayer, roles in drawn:
            torch.manual_seed(0)
            weight = torch.empty(3 * len(roles), 3, dtype=torch.float64, device="cpu")
            _core.draw_linear(weight, roles, *where, sublayer)
            found.append(weight.tolist())
    return found
