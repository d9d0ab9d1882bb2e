"""A residual scheme's declaration, read from Rust.

Rust writes each scheme once (`src/residual`), as plain data: the norms, gains and changes at the four places of a
Transformer. Around a sublayer F, with drop the dropout on its output,

    x⁺ = after(α⊙skip(x) + β⊙drop(branch(F(before(x)))))

with before, skip, branch and after lists of changes. A change may keep x under a name for later changes in the stack. A
scheme may have further streams beside x, which every sublayer updates, or may read x from several tensors (mixing.py).
`build.py` makes modules and parameters from a declaration, `interpreter.py` runs it.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import _core
from ..config import TransformerConfig
from ..declarations.codec import from_json
from ..declarations.declared import (
    Change,
    Changes,
    Combine,
    Gain,
    Growth,
    Learned,
    Mixing,
    NormAt,
    ResidualSpec,
    StackSpec,
    StreamStep,
    parts_of,
)
from ..errors import InputError

MOST_LAYERS = 10_000
"""The maximum number of a stack's layers. Rust has the same limit for whole models."""
Inside = Mapping[str, tuple[Change, ...]]
"""Changes by their point: input, query, key, value, after_heads, after_output, before_activation, after_activation."""


class Sublayer(NamedTuple):
    """The declaration around (`ResidualSpec`) and inside one sublayer."""

    before: tuple[Change, ...]
    skip: tuple[Change, ...]
    branch: tuple[Change, ...]
    after: tuple[Change, ...]
    alpha: Gain
    beta: Gain
    streams: tuple[StreamStep, ...]
    mixing: Mixing | None
    """The way in which x is read and F(x) written; None for the equation of this module's docstring."""
    inside: Inside
    scale: float
    """The parametrisation's factor on F(x); 1 if it was folded into β."""

    @property
    def outside(self) -> tuple[Change, ...]:
        """The changes around the sublayer."""
        return (*self.before, *self.skip, *self.branch, *self.after)

    def around(self) -> list[NormAt | Learned]:
        """Returns everything declared around the sublayer."""
        return parts_of((self.outside, self.alpha, self.beta, self.streams, self.mixing))

    def within(self) -> list[NormAt | Learned]:
        """Returns everything declared inside the sublayer."""
        return parts_of((*self.inside.values(),))


class LayerSpec(NamedTuple):
    """A layer: the changes of x at its beginning, its sublayers, the names of tensors that it reads from earlier
    layers, and of those that it keeps for later ones."""

    begin: tuple[Change, ...]
    sublayers: tuple[Sublayer, ...]
    takes: tuple[str, ...]
    leaves: tuple[str, ...]


class SchemeSpec(NamedTuple):
    """A scheme's declaration for one stack: its layers, the fields of its `StackSpec`, and those of the whole
    scheme."""

    layers: tuple[LayerSpec, ...]
    begin: tuple[Change, ...]
    combine: Combine | None
    streams: tuple[NormAt | None, ...]
    """The norm at the end of each stream beside x."""
    mixing: Mixing | None
    """The way in which the stack's output is read; None if the output is x."""
    growth: Growth | None
    end: tuple[Change, ...]
    has_biases: bool
    is_profiled: bool
    norm: str
    init: str
    attention: float | None
    """The factor of scores; None for 1/√d_head."""


@functools.lru_cache(maxsize=64)
def declare(config: TransformerConfig, stack: Any, kinds: tuple[str, ...] | None = None) -> SchemeSpec:
    """Returns the declaration of the configuration's scheme for its "encoder" or "decoder". `kinds`: the kinds of a
    layer's sublayers, if they differ from the stack's. Errors: InputError."""
    stacks = ("decoder_layers",) if config.architecture == "decoder-only" else ("encoder_layers", "decoder_layers")
    for name in stacks:
        if not 1 <= getattr(config, name) <= MOST_LAYERS:
            raise InputError(f"{name} must lie between 1 and {MOST_LAYERS}; got {getattr(config, name)}")
    over_width = drawn_over_width(config)

    def scaled(part: dict[str, Any]) -> dict[str, Any]:
        """Scales the std of a random matrix whose products are sums over the width. JSON's reader calls it for every
        object, so most objects stay as they are."""
        if part.get("sums_over") == "width" and isinstance(part["value"], dict):
            part["value"]["normal"] *= over_width
        return part

    data = json.loads(_core.declare(config.to_json(kinds), stack, kinds), object_hook=scaled)
    flow: StackSpec = from_json(StackSpec, data["flow"])
    scheme_fields = {key: data[key] for key in ("has_biases", "is_profiled", "norm", "init", "attention")}
    return SchemeSpec(tuple(map(_layer, data["layers"])), **flow._asdict(), **scheme_fields)


def drawn_over_width(config: TransformerConfig) -> float:
    """Returns the factor by which the parametrisation scales the std of those random matrices of norms and schemes
    whose products are sums over the width."""
    times_as_wide = config.d_model / (config.base_width or config.d_model)  # the ratio to the base model
    times_as_deep, depth_alpha = 1.0, None  # the std of sums over the width does not depend on the depth
    multipliers = _core.multipliers(
        config.parametrisation, "hidden-vector", times_as_wide, times_as_deep, depth_alpha, "width"
    )
    return multipliers["init"]


def _layer(data: dict[str, Any]) -> LayerSpec:
    """Returns a layer's declaration from the JSON that Rust wrote."""
    sublayers = tuple(map(_sublayer, data["sublayers"]))
    return LayerSpec(from_json(Changes, data["begin"]), sublayers, tuple(data["takes"]), tuple(data["leaves"]))


def _sublayer(data: dict[str, Any]) -> Sublayer:
    """Returns a sublayer's declaration from the JSON that Rust wrote. Changes at one point keep their order."""
    inside: dict[str, tuple[Change, ...]] = {}
    for point, change in data["inside"]:
        inside[point] = (*inside.get(point, ()), from_json(Change, change))
    return Sublayer(**from_json(ResidualSpec, data["around"])._asdict(), inside=inside, scale=data["scale"])
