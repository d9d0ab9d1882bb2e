"""A residual scheme's declaration, read from Rust.

Rust writes each scheme once (`src/residual`), as plain data: the norms, gains and changes at the four places of a
Transformer. Around a sublayer F, with drop the dropout on its output,

    x⁺ = after(α⊙skip(x) + β⊙drop(branch(F(before(x)))))

with before, skip, branch and after lists of changes. A change may leave x under a name, for others later in the stack.
A scheme may have further streams beside x; every sublayer updates them. Or x is read from several tensors (mixing.py).
`build.py` makes modules and parameters of a declaration, `interpreter.py` runs it.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import _core
from ..config import TransformerConfig
from ..declared import (
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
    from_json,
    parts_of,
)
from ..errors import InputError

MOST_LAYERS = 10_000
"""Layers of a stack, at most. Rust has the same bound for whole models."""
Inside = Mapping[str, tuple[Change, ...]]
"""Changes by the point they stand at: input, query, key, value, after_heads, after_output, before_activation,
after_activation."""


class Sublayer(NamedTuple):
    """Around (`ResidualSpec`) and inside one sublayer."""

    before: tuple[Change, ...]
    skip: tuple[Change, ...]
    branch: tuple[Change, ...]
    after: tuple[Change, ...]
    alpha: Gain
    beta: Gain
    streams: tuple[StreamStep, ...]
    mixing: Mixing | None
    """How x is read and F(x) written; None: as above."""
    inside: Inside
    scale: float
    """Of F(x): the parametrisation's factor, where β has not taken it."""

    @property
    def outside(self) -> tuple[Change, ...]:
        """The changes around it."""
        return (*self.before, *self.skip, *self.branch, *self.after)

    def around(self) -> list[NormAt | Learned]:
        """Everything declared around it."""
        return parts_of((self.outside, self.alpha, self.beta, self.streams, self.mixing))

    def within(self) -> list[NormAt | Learned]:
        """Everything declared inside it."""
        return parts_of((*self.inside.values(),))


class LayerSpec(NamedTuple):
    """A layer: what changes x as it begins, its sublayers, and the names of what it takes of others and leaves."""

    begin: tuple[Change, ...]
    sublayers: tuple[Sublayer, ...]
    takes: tuple[str, ...]
    leaves: tuple[str, ...]


class SchemeSpec(NamedTuple):
    """A scheme's declaration for one stack: its layers, its `StackSpec`, and what it says of the whole."""

    layers: tuple[LayerSpec, ...]
    begin: tuple[Change, ...]
    combine: Combine | None
    streams: tuple[NormAt | None, ...]
    """The norm that each stream beside x ends with."""
    mixing: Mixing | None
    """How the stack's output is read; None: it is x."""
    growth: Growth | None
    end: tuple[Change, ...]
    has_biases: bool
    is_profiled: bool
    norm: str
    init: str
    attention: float | None
    """What scores are multiplied by; None: 1/√d_head."""


@functools.lru_cache(maxsize=64)
def declare(config: TransformerConfig, stack: Any, kinds: tuple[str, ...] | None = None) -> SchemeSpec:
    """The declaration of the configuration's scheme for its "encoder" or "decoder". `kinds`: a layer's sublayers, where
    they are not the stack's. Errors: InputError."""
    stacks = ("decoder_layers",) if config.architecture == "decoder-only" else ("encoder_layers", "decoder_layers")
    for name in stacks:
        if not 1 <= getattr(config, name) <= MOST_LAYERS:
            raise InputError(f"{name} must lie between 1 and {MOST_LAYERS}; got {getattr(config, name)}")
    over_width = drawn_over_width(config)

    def scaled(found: dict[str, Any]) -> dict[str, Any]:
        if found.get("sums_over") == "width" and isinstance(found["value"], dict):
            found["value"]["normal"] *= over_width
        return found

    found = json.loads(_core.declare(config.to_json(kinds), stack, kinds), object_hook=scaled)
    flow: StackSpec = from_json(StackSpec, found["flow"])
    whole = {key: found[key] for key in ("has_biases", "is_profiled", "norm", "init", "attention")}
    return SchemeSpec(tuple(map(_layer, found["layers"])), **flow._asdict(), **whole)


def drawn_over_width(config: TransformerConfig) -> float:
    """The factor of a parametrisation on the std of drawn matrices of norms and schemes. Their products are sums over
    the width."""
    m_d = config.d_model / (config.base_width or config.d_model)
    return _core.multipliers(config.parametrisation, "hidden-vector", m_d, 1.0, None, "width")["init"]


def _layer(found: dict[str, Any]) -> LayerSpec:
    sublayers = tuple(map(_sublayer, found["sublayers"]))
    return LayerSpec(from_json(Changes, found["begin"]), sublayers, tuple(found["takes"]), tuple(found["leaves"]))


def _sublayer(found: dict[str, Any]) -> Sublayer:
    inside: dict[str, tuple[Change, ...]] = {}
    for point, change in found["inside"]:
        inside[point] = (*inside.get(point, ()), from_json(Change, change))
    return Sublayer(**from_json(ResidualSpec, found["around"])._asdict(), inside=inside, scale=found["scale"])
