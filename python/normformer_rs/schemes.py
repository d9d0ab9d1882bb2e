"""A residual scheme of your own, declared in Python.

A scheme declares plain data for every sublayer of a model: numbers, norms, parameters and changes by name. The training
loop, the modules of `normformer_rs.nn`, `swap_residuals` and fairseq's models build their connections from these data.
A run's config.json holds the data, so that a run loads without the class. A declaration that cannot be built is refused
before anything is built.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from .declarations import declared
from .declarations.codec import Owner, refusal, to_json
from .declarations.declared import *  # noqa: F403
from .declarations.declared import Changes, Point, ResidualSpec, StackSpec
from .declarations.declared import Gain as Gain  # re-exported for annotations, like Mixing
from .declarations.declared import Mixing as Mixing
from .declarations.declared import NormAt as Norm
from .declarations.file_class import FromFile
from .declarations.first_values import Normal
from .errors import InputError

__all__ = ["DeclaredScheme", "Norm", "Normal", "Place", "Scheme"]
__all__ += declared.__all__

SELF_ATTENTION, CROSS_ATTENTION, FEED_FORWARD = "self-attention", "cross-attention", "feed-forward"
_PATHS = {SELF_ATTENTION: "self_attn.", CROSS_ATTENTION: "multihead_attn.", FEED_FORWARD: ""}
"""The prefix of the names of norms and parameters inside a sublayer, by the sublayer's kind."""


@dataclass(frozen=True)
class Place:
    """The place of a sublayer in a model; a scheme's methods get it, and return the declaration for this place."""

    config: Any = field(repr=False)
    """The model's TransformerConfig."""
    stack: Literal["encoder", "decoder"]
    layer: int = 0
    """The layer's number in the stack, from 0."""
    index: int = 0
    """The sublayer's number in its layer, from 0."""
    block: tuple[str, ...] | None = None
    """The kinds of a layer's sublayers, if they differ from its stack's, as in blocks of other libraries."""

    @property
    def has_encoder(self) -> bool:
        return self.config.architecture == "encoder-decoder"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of a layer's sublayers."""
        if self.block is not None:
            return self.block
        has_three = self.stack == "decoder" and self.has_encoder
        return (SELF_ATTENTION, CROSS_ATTENTION, FEED_FORWARD) if has_three else (SELF_ATTENTION, FEED_FORWARD)

    @property
    def sublayer(self) -> str:
        """The sublayer's kind: self-attention, cross-attention or feed-forward."""
        return self.kinds[self.index]

    @property
    def sublayers(self) -> int:
        """The number of sublayers in a layer."""
        return len(self.kinds)

    @property
    def number(self) -> int:
        """The number of the sublayer in its stack, from 0."""
        return self.layer * self.sublayers + self.index

    @property
    def encoder_layers(self) -> int:
        """The encoder's number of layers; 0 without an encoder."""
        return self.config.encoder_layers if self.has_encoder else 0

    @property
    def decoder_layers(self) -> int:
        return self.config.decoder_layers

    @property
    def layers(self) -> int:
        """The number of layers of this stack."""
        return self.encoder_layers if self.stack == "encoder" else self.decoder_layers

    @property
    def is_last(self) -> bool:
        """True for the stack's last sublayer."""
        return self.number + 1 == self.layers * self.sublayers

    @property
    def d_model(self) -> int:
        return self.config.d_model

    @property
    def d_ff(self) -> int:
        return self.config.d_ff

    @property
    def heads(self) -> int:
        return self.config.heads

    @property
    def d_head(self) -> int:
        return self.d_model // self.heads

    def constant(
        self,
        encoder: Callable[[int, int], float],
        decoder: Callable[[int, int], float],
        alone: Callable[[float], float],
    ) -> float:
        """Returns a constant that depends on the kind of stack. In a model with encoder and decoder, the function for
        this stack gets their depths N and M. In a single stack, `alone` gets L, half the number of the stack's
        additions."""
        if not self.has_encoder:
            return alone(self.decoder_layers if self.block is None else self.layers * self.sublayers / 2)
        return (encoder if self.stack == "encoder" else decoder)(self.encoder_layers, self.decoder_layers)


class Scheme(FromFile):
    """The base class of residual schemes: override `around`, and any other method that the scheme needs.

    >>> from normformer_rs.schemes import ResidualSpec, norm
    >>> class TwoNorms(Scheme):
    ...     name, init = "two-norms", "smallinit"
    ...     def around(self, place):
    ...         return ResidualSpec(before=norm("inner_norm"), alpha=2.0 * place.layers, after=norm())
    >>> import normformer_rs as nfrs
    >>> nfrs.nn.TransformerEncoderLayer(8, 2, 16, residual=TwoNorms()).inner_norm1.normalized_shape
    (8,)

    Names around a sublayer get its number in the layer (norm1, norm2, …), and inside an attention its path; parameters
    and modules have these names in state dicts and checkpoints. In a swap, a norm named `norm` is a block's own.
    """

    name: ClassVar[str]
    """The scheme's name: letters, digits, - and _; none of the package's."""
    equation: ClassVar[str] = ""
    source: ClassVar[str] = ""
    init: ClassVar[str] = "xavier"
    """The initialisation that goes with the scheme."""
    has_biases: ClassVar[bool] = True
    """True if linear layers have biases."""
    is_profiled: ClassVar[bool] = False
    """True if learned α are set by profiling the first batch (docs/spec.md §3.4)."""

    def around(self, place: Place) -> ResidualSpec:
        """Returns the connection around a sublayer."""
        return ResidualSpec()

    def inside(self, place: Place) -> Mapping[Point, Changes]:
        """Returns the changes inside a sublayer, by point: input; in a self-attention query_input, key_input,
        value_input; in an attention query, key, value, after_heads, after_output; in a feed-forward
        before_activation, after_activation."""
        return {}

    def layer(self, place: Place) -> Changes:
        """Returns the changes of x at the beginning of a layer."""
        return ()

    def stack(self, place: Place) -> StackSpec:
        """Returns the changes before the stack's first layer and after its last, and the connections between layers."""
        return StackSpec()

    def declare(self, config: Any, kinds: tuple[str, ...] | None = None) -> dict[str, Any]:
        """Returns everything that the scheme declares in a model of this configuration, as config.json holds it.
        `kinds`: the kinds of a layer's sublayers, if they differ from its stack's.

        Errors: InputError if a method returns something of another type. The code that builds the declaration checks
        whether it can be built.
        """
        if not isinstance(getattr(self, "name", None), str):
            raise InputError(f'{type(self).__name__} has no name: write name = "…" in the class')
        stacks: tuple[Literal["encoder", "decoder"], ...]
        stacks = ("encoder", "decoder") if config.architecture == "encoder-decoder" else ("decoder",)
        about = {key: getattr(self, key) for key in _ABOUT}
        for key, kind in _ABOUT.items():
            if not isinstance(about[key], kind):
                raise InputError(f"{type(self).__name__}.{key} must be a {kind.__name__}; got {about[key]!r}")
        return {**about, "stacks": {stack: _stack(self, Place(config, stack, block=kinds)) for stack in stacks}}

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({options})"

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        mine, theirs = vars(self), vars(other)
        return mine.keys() == theirs.keys() and all(_same(mine[k], theirs[k]) for k in mine)

    def __hash__(self) -> int:
        return hash((type(self), *sorted(vars(self))))  # only names count, because values may have no hash


_ABOUT: dict[str, type] = {"name": str, "equation": str, "source": str, "init": str}
_ABOUT |= {"has_biases": bool, "is_profiled": bool}
"""The attributes that describe a scheme, and their types."""


def _same(one: Any, other: Any) -> bool:
    """Returns True if two values are equal. Arrays and tensors, also within lists and dictionaries, are equal if their
    shapes and all their numbers are equal."""
    if hasattr(one, "shape") or hasattr(other, "shape"):
        return getattr(one, "shape", None) == getattr(other, "shape", None) and bool((one == other).all())
    if type(one) is type(other) and isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if type(one) is type(other) and isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    return bool(one == other)


class DeclaredScheme(Scheme):
    """A scheme that was read from a config.json, without its class. It has the declaration for a model of one size."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        try:
            # The copy holds plain data alone, and later changes of `data` do not reach it.
            self.data = json.loads(json.dumps(data, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"a scheme's declaration must be plain data: {error}") from error
        self.name = str(data.get("name"))  # type: ignore[misc]

    def declare(self, config: Any, kinds: tuple[str, ...] | None = None) -> dict[str, Any]:
        return self.data

    def __repr__(self) -> str:
        return f"DeclaredScheme({self.name!r})"

    def __hash__(self) -> int:
        return hash(json.dumps(self.data, sort_keys=True))


# The functions below write declarations as plain data.


def _stack(scheme: Scheme, first: Place) -> dict[str, Any]:
    """Returns a scheme's declaration for one stack, as config.json holds it. `first`: the place of the stack's first
    sublayer."""
    layers = [_layer(scheme, replace(first, layer=layer)) for layer in range(first.layers)]
    stack = to_json(StackSpec, scheme.stack(first), Owner(first.d_model), f"{type(scheme).__name__}.stack()")
    end_norms = [stream["norm"] for stream in stack["streams"] if stream["norm"]]
    end_norms += [change["norm"] for change in stack["end"] if "norm" in change]
    for norm in end_norms:
        norm["ends_stack"] = True
    # All norms are listed in the order in which they run: in the layers, between layers, and at the stack's end.
    connections = [sublayer["around"] for layer in layers for sublayer in layer["sublayers"]]
    changes = [change for connection in connections for key in _LISTS for change in connection[key]]
    layer_norms = [change["norm"] for change in changes if "norm" in change]
    combining_norms = stack["combine"]["norms"] if stack["combine"] else []
    all_norms = layer_norms + combining_norms + end_norms
    if all_norms:
        all_norms[-1]["last"] = True  # the norm that runs last in the stack
    return {"layers": layers, "stack": stack}


_LISTS = ("before", "branch", "skip", "after")
"""The lists of changes, in the order in which they act."""


def _layer(scheme: Scheme, place: Place) -> dict[str, Any]:
    """Returns a scheme's declaration for one layer, as config.json holds it. `place`: the layer's first sublayer."""
    sublayers, name = [], type(scheme).__name__
    for index in range(place.sublayers):
        here = replace(place, index=index)
        owner = Owner(here.d_model, number=str(index + 1))
        around = to_json(ResidualSpec, scheme.around(here), owner, f"{name}.around()")
        points = scheme.inside(here)
        if not isinstance(points, Mapping):
            raise refusal(f"{name}.inside()", "a dictionary of changes by point", points)
        inside = [
            [point, change]
            for point, changes in points.items()
            for change in to_json(Changes, changes, _inside(point, here), f"{name}.inside()[{point!r}]")
        ]
        sublayers.append({"around": around, "inside": inside})
    begin = to_json(Changes, scheme.layer(place), Owner(place.d_model), f"{name}.layer()")
    return {"begin": begin, "sublayers": sublayers}


def _inside(point: str, place: Place) -> Owner:
    """Returns the module that owns the norms and parameters at a point inside a sublayer."""
    # At all other points x has the width d_model.
    widths = {"before_activation": place.d_ff, "after_activation": place.d_ff}
    widths |= dict.fromkeys(("query", "key", "value", "rotated_query", "rotated_key"), place.d_head)
    return Owner(widths.get(point, place.d_model), path=_PATHS[place.sublayer])
