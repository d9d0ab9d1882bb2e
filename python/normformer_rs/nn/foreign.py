"""Layers outside the package's stacks: in torch.nn's, in lists of other modules, and alone.

`place_layers` sets their places. A layer without a place refuses to run if its scheme needs one.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from .. import _core
from ..config import TransformerConfig
from ..declarations.declared import NormAt, replaced
from ..errors import InputError
from .build import make
from .init import refuse_computed
from .place import Place
from .scheme import SchemeSpec, Sublayer
from .sharding import write_whole

STACKS = (nn.TransformerEncoder, nn.TransformerDecoder)
LISTS = (nn.ModuleList, nn.Sequential)


class Placeable(nn.Module):
    """A layer that can be given a place in a stack."""

    placed: Literal["stack", "call", "arguments", "depth"] | None = None
    """The source of its place: a stack of this package, `place_layers`, or its own arguments. "depth": the arguments
    gave the depth, but no number. None: the layer got no place, and counts as layer 0 of 1."""
    has_own_values = True
    """True: the module's direct parameters, such as a scheme's gains, have initial values that `draw_xavier` keeps."""
    keeps_torchs_values: Any
    """True if linear layers are initialised as in torch.nn; otherwise as the layer's `init` says."""
    knows_encoder = False
    """True if a decoder layer knows the depth of the encoder."""


def place_layers(layers: nn.Module | Iterable[nn.Module], *, init: bool) -> None:
    """Gives the layers of a stack that is not this package's their numbers and the depth.

    >>> import torch
    >>> from normformer_rs import nn as nfnn
    >>> layer = nfnn.TransformerEncoderLayer(16, 4, 32, batch_first=True, residual="deepnorm")
    >>> stack = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    >>> nfnn.place_layers(stack, init=True)
    >>> stack(torch.zeros(2, 5, 16)).shape
    torch.Size([2, 5, 16])

    Args:
        layers: all layers of one stack, in the order in which they run: torch.nn's TransformerEncoder or
            TransformerDecoder, a ModuleList, a Sequential, or any iterable. Lists within it are stages of the stack.
        init: True re-initialises the linear layers for their places, as a TransformerEncoder of this package does,
            whatever their weights were. False keeps all weights and t, for trained or loaded layers.

    Layers may be placed again. A layer that occurs several times, with shared weights, counts each time. The other
    stack's depth comes from the layers' arguments (`decoder_layers` for an encoder's). torch.nn.Transformer
    re-initialises all matrices of the stacks that it is given, so place their layers afterwards.

    Errors: InputError, before anything changes, for modules that are no layers of this package, layers of several kinds
    or schemes, another depth than in the layers' arguments, a shared layer whose scheme needs the number, schemes that
    work between layers, and a stack of torch.nn without the norm with which the scheme ends.
    """
    entries = _checked([*_entries(layers)], init)
    first, n = entries[0], len(entries)
    # A shared layer gets the first of its numbers.
    numbers = {layer: entries.index(layer) for layer in dict.fromkeys(entries)}
    config, stack = first.place.config.replace(**_depths(first, n)), first.place.stack
    places = [Place(config, stack, i) for i in numbers.values()]
    place = places[0]
    draws = init and not first.keeps_torchs_values  # True if the layers get the initial values of their scheme
    if needs_stack(place.declared):
        raise InputError(_between_layers(place))
    is_shared = len(numbers) < n  # one module stands at several places, and can hold only one number
    if is_shared and "number" in (asks(place.config, place.stack, draws) or ""):
        raise InputError(
            f'residual "{place.config.residual}" asks for each layer\'s number, and of the {n} layers some are one '
            "module, with shared weights: choose a scheme that asks for the depth alone, such as deepnorm"
        )
    # Without a named scheme (`is_torchs`) a stack ends as in torch.nn: with a norm, or with none.
    if isinstance(layers, STACKS) and layers.norm is None and place.declared.end and not first.is_torchs:
        raise InputError(
            f'residual "{place.config.residual}" ends a stack with a norm, and this stack of torch.nn has none: give '
            f'it norm=normformer_rs.nn.norm_class("{place.declared.norm}")({place.config.d_model})'
        )
    for layer, its_place in zip(numbers, places):
        layer.take_place(its_place)
        if draws:
            layer.reset_parameters()
        elif init:
            layer.reset_growth()


def _checked(entries: list[Any], init: bool) -> list[Any]:
    """Checks the entries and returns them. `init`: as in `place_layers`. Errors: InputError if they are not the layers
    of one stack."""
    if not entries:
        raise InputError("place_layers needs the layers of a stack; got none")
    first, n = entries[0], len(entries)
    for i, layer in enumerate(entries):
        if not isinstance(layer, Placeable):
            raise InputError(
                f"place_layers takes layers of normformer_rs.nn (TransformerEncoderLayer, TransformerDecoderLayer); "
                f"entry {i} is a {type(layer).__name__}: give the layers themselves, place_layers([m.layer for m in …])"
            )
        if type(layer) is not type(first) or _template(layer) != _template(first):
            raise InputError(
                f"the layers of a stack have one class, scheme and size, but entry {i} differs from entry 0: give each "
                "layer its own layer= and encoder_layers= (a decoder's: decoder_layers=)"
            )
        place: Any = layer.place
        if layer.placed in ("arguments", "depth") and place.depth != n:
            raise InputError(
                f"the arguments of layer {i} gave a depth of {place.depth}, and the stack has {n} layers: give "
                "place_layers all of them, or leave the depth out of the arguments"
            )
        if init:
            refuse_computed(layer)
    return entries


def _entries(layers: Any) -> Iterator[Any]:
    """Yields the layers, including those of nested lists. A shared layer comes each time that it occurs."""
    if isinstance(layers, nn.Module) and not isinstance(layers, (*STACKS, *LISTS)):
        raise InputError(
            "place_layers takes torch.nn's TransformerEncoder or TransformerDecoder, or a list of layers; got a "
            f"{type(layers).__name__}: stacks of normformer_rs.nn place their layers themselves"
        )
    for entry in layers.layers if isinstance(layers, STACKS) else layers:
        if isinstance(entry, LISTS):
            yield from _entries(entry)
        else:
            yield entry


def _depths(layer: Any, n: int) -> dict[str, Any]:
    """Returns the depth options of a layer's configuration, for a stack of n layers."""
    config = layer.place.config
    if len(layer.kinds) == 2:  # an encoder's layer, without attention to another stack
        return layer._depths(n, config.decoder_layers if config.architecture == "encoder-decoder" else None)
    return layer._depths(config.encoder_layers if layer.knows_encoder else None, n)


def _template(layer: Any) -> TransformerConfig:
    """Returns a layer's configuration, without the depth of its own stack."""
    return layer.place.config.replace(**_depths(layer, 1))


def draw_xavier(model: nn.Module) -> None:
    """Initialises a model's matrices as in torch.nn.Transformer, Xavier uniform, except for a scheme's own
    parameters and the layers that have a scheme's values."""
    # `kept` has these layers and all modules in them.
    kept = {part for layer in model.modules() if _has_schemes_values(layer) for part in layer.modules()}
    drawn = (m for m in model.modules() if m not in kept and not getattr(m, "has_own_values", False))
    # `fromkeys` draws a shared parameter once.
    for p in dict.fromkeys(p for module in drawn for p in module.parameters(recurse=False)):
        if p.dim() > 1:
            write_whole(p, nn.init.xavier_uniform_)


def _has_schemes_values(module: nn.Module) -> bool:
    """True for a layer of this package whose matrices have the initial values of its scheme's initialisation."""
    return isinstance(module, Placeable) and not module.keeps_torchs_values


def refusal(place: Place, placed: str | None, draws: bool) -> str | None:
    """Returns the reason why a layer may not run outside a stack of this package; None if it may. `placed`: the source
    of its place, as in `Placeable`. `draws`: True if its initial values are the scheme's."""
    is_single_layer = placed == "arguments" and place.depth == 1
    if not is_single_layer:
        # A layer without a place counts as layer 0 of 1, and a stack of one layer may lack the scheme's parts between
        # layers. So the scheme is declared for a stack of _DEPTH layers instead.
        declared = place.declared if placed is not None else _of_depth(place.config, place.stack, _DEPTH).declared
        if needs_stack(declared):  # in a stack of several layers, one may read tensors that another keeps
            return _between_layers(place)
    needed = asks(place.config, place.stack, draws) if placed in (None, "depth") else None
    # With its depth known ("depth"), a layer can lack only its number.
    if needed is None or (placed == "depth" and "number" not in needed):
        return None
    missing = needed if placed is None else "the layer's number"
    return (
        f'residual "{place.config.residual}" asks for {missing}, and nobody '
        "has told this layer: build normformer_rs.nn's stack (TransformerEncoder, TransformerDecoder); or, for another "
        "stack, call normformer_rs.nn.place_layers(layers, init=True) with all its layers (init=False keeps trained "
        "weights); or give layer= and encoder_layers= (a decoder's: decoder_layers=)"
    )


def _between_layers(place: Place) -> str:
    """Returns the message for a layer whose scheme works between layers."""
    return (
        f'residual "{place.config.residual}" works between layers, too, which a layer cannot do by itself: put it into '
        "normformer_rs.nn's stack (TransformerEncoder, TransformerDecoder); of a single layer, say so by its depth, "
        "encoder_layers=1"
    )


def needs_stack(declared: SchemeSpec) -> bool:
    """True if the scheme has parts outside its layers, other than a norm at the end."""
    joins_layers = bool(declared.begin or declared.combine or declared.streams or declared.mixing)
    passes_tensors = any(layer.takes for layer in declared.layers)
    return joins_layers or passes_tensors or any(change.kind != "norm" for change in declared.end)


_DEPTH = 8
"""The depth of the stack in which layers are compared; it shows the effects of a layer's number and of the depth."""


@functools.lru_cache(maxsize=256)
def asks(config: TransformerConfig, stack: str, draws: bool, only: int | None = None) -> str | None:
    """Returns "the depth" or "the layer's number and the depth" if the layer's computation depends on them, or, with
    `draws`, its initial values do; otherwise None. `stack`: "encoder" or "decoder"; `only`: the number of the one
    sublayer to check, None for all."""
    # The layer depends on number or depth if it is described differently at different places. These two are the place
    # of the only layer of a stack, and that of the first layer of a deep one.
    alone, first = _of_depth(config, stack, 1), _of_depth(config, stack, _DEPTH)
    # The layers of a mixture may differ only at a depth above _DEPTH.
    is_mixture = "," in str(config.residual) or config.residual == "mix-ln"
    by_layer = first.declared.growth is not None and first.declared.growth.by_layer
    description = _described(first, only)
    if is_mixture or by_layer or any(_described(first.at(i), only) != description for i in range(1, _DEPTH)):
        return "the layer's number and the depth"
    values = _first_values(first) if draws else []
    if draws and _first_values(first.at(_DEPTH - 1)) != values:
        return "the layer's number and the depth"
    # All layers of one stack are alike if this line is reached. Those of a stack of another depth may still differ.
    needs_depth = _described(alone, only) != description or (draws and _first_values(alone) != values)
    return "the depth" if needs_depth else None


@functools.lru_cache(maxsize=256)
def _of_depth(config: TransformerConfig, stack: str, depth: int) -> Place:
    """Returns the first layer's place in the "encoder" or "decoder" of a model whose stacks have `depth` layers."""
    names = ("encoder_layers", "decoder_layers") if config.architecture == "encoder-decoder" else ("decoder_layers",)
    return Place(config.replace(**dict.fromkeys(names, depth)), stack)


def _described(place: Place, only: int | None) -> list[Any]:
    """Returns a description of the layer, or of its sublayer `only`, that is equal for layers that compute the same."""
    if only is not None:
        return _sublayer(place.sublayers[only], place)
    return [place.spec.begin, *(_sublayer(sublayer, place) for sublayer in place.sublayers)]


def _sublayer(sublayer: Sublayer, place: Place) -> list[Any]:
    """Returns a description of the sublayer, which is equal for sublayers that compute the same. The norms' field
    `last` is left out, because it changes norms only in a decoder; there the norms are built and compared."""
    norms = [what for what in (*sublayer.around(), *sublayer.within()) if isinstance(what, NormAt)]
    alike = replaced(sublayer, lambda part: part._replace(last=False) if isinstance(part, NormAt) else part)
    # A norm's repr shows the settings that `last` changes.
    with torch.random.fork_rng(devices=[]):  # the user's next draws must not depend on whether this ran before
        return [alike, [repr(make(norm, place, {"device": "meta"})) for norm in norms if place.stack == "decoder"]]


def _first_values(place: Place) -> list[Any]:
    """Returns small matrices, drawn from one seed with the initialisation of this place. They are equal for two places
    with the same initialisation."""
    attentions = len(place.sublayers) - 1
    # For each sublayer its matrices, and for each matrix the roles of its blocks of rows.
    roles_of_sublayers = [[["query", "key", "value"], ["output"]]] * attentions + [[["fc1"], ["fc2"]]]
    values, position = [], (place.config.to_json(), place.stack, place.layer)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for sublayer, matrices in enumerate(roles_of_sublayers):
            for roles in matrices:
                torch.default_generator.manual_seed(0)  # torch.manual_seed would seed every GPU, too
                # A small matrix, with 3 rows for each role, is enough to tell initialisations apart.
                weight = torch.empty(3 * len(roles), 3, dtype=torch.float64, device="cpu")
                _core.draw_linear(weight, roles, *position, sublayer)
                values.append(weight.tolist())
    return values
