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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from .. import _core
from ..config import TransformerConfig
from ..errors import InputError
from . import mixing
from .growth import Growth
from .specs import Learned, NormAt, drawn_over_width

MOST_LAYERS = 10_000
"""Layers of a stack, at most. Rust has the same bound for whole models."""
GROWING = "growing"
"""Stands for a gain that is the stack's α_t."""


class Curve(NamedTuple):
    """A gain made of a parameter w: "sigmoid", σ(w/τ), or "co_sigmoid", √max(1 − σ(w/τ)², 10⁻³)."""

    of: Learned
    kind: str
    temperature: float


Gain = float | str | Learned | Curve
"""The factor of x or F(x): a number, GROWING, a parameter (a scalar or one number per column), or a curve of one."""


class Mix(NamedTuple):
    """own⊙x + kept⊙(what was left under the name)."""

    name: str
    own: Gain
    kept: Gain


class Change(NamedTuple):
    """What happens to x at a place: a norm, shift, scale, constant factor (`times`), division by the length (`unit`),
    a scaling that leaves the gradient (`damp_forward`); x is left under a name (`keep`) or mixed with what was (`mix`).
    """

    kind: Literal["norm", "shift", "scale", "head_scale", "damp_forward", "times", "unit", "keep", "mix"]
    what: Any
    """A NormAt, a Learned, a number (the constant, or the least length), a name, or a Mix."""

    def parts(self) -> Iterator[NormAt | Learned]:
        """Its norm and parameters."""
        if isinstance(self.what, NormAt | Learned):
            yield self.what
        if isinstance(self.what, Mix):
            yield from filter(None, map(parameter, (self.what.own, self.what.kept)))

    def renamed(self, rename: Callable[[str], str]) -> "Change":
        """The same change, its norm and parameters under other names."""
        if isinstance(self.what, NormAt | Learned):
            return Change(self.kind, self.what._replace(name=rename(self.what.name)))
        if isinstance(self.what, Mix):
            own, kept = (_renamed(gain, rename) for gain in (self.what.own, self.what.kept))
            return Change(self.kind, Mix(self.what.name, own, kept))
        return self

    def below(self, path: str) -> "Change":
        """The same change, its names relative to the module at `path`."""
        return self.renamed(lambda name: name.removeprefix(path + "."))


def parameter(gain: Gain) -> Learned | None:
    """A gain's parameter."""
    return gain.of if isinstance(gain, Curve) else gain if isinstance(gain, Learned) else None


def _renamed(gain: Gain, rename: Callable[[str], str]) -> Gain:
    if isinstance(gain, Curve):
        return gain._replace(of=gain.of._replace(name=rename(gain.of.name)))
    return gain._replace(name=rename(gain.name)) if isinstance(gain, Learned) else gain


def parts_of(changes: Iterable[Change]) -> list[NormAt | Learned]:
    """The norms and parameters of changes."""
    return [part for change in changes for part in change.parts()]


def passes(changes: Iterable[Change]) -> bool:
    """One of them keeps a tensor for others, or reads what was kept."""
    return any(change.kind in ("keep", "mix") for change in changes)


def only_norm(changes: tuple[Change, ...]) -> NormAt | None:
    """The norm that is all that stands there."""
    return changes[0].what if len(changes) == 1 and changes[0].kind == "norm" else None


Inside = Mapping[str, tuple[Change, ...]]
"""Changes by the point they stand at: input, query, key, value, after_heads, after_output, before_activation,
after_activation."""


class StreamStep(NamedTuple):
    """s⁺ = α⊙s + β⊙drop(f) of a stream s beside x (Rust's `StreamStep`)."""

    alpha: Gain
    beta: Gain


class Sublayer(NamedTuple):
    """Around and inside one sublayer."""

    before: tuple[Change, ...]
    skip: tuple[Change, ...]
    branch: tuple[Change, ...]
    after: tuple[Change, ...]
    alpha: Gain
    beta: Gain
    streams: tuple[StreamStep, ...]
    inside: Inside
    scale: float
    """Of F(x): the parametrisation's factor, where β has not taken it."""
    mixing: mixing.Mixing | None
    """How x is read and F(x) written; None: as above."""

    @property
    def outside(self) -> tuple[Change, ...]:
        """The changes around it."""
        return (*self.before, *self.skip, *self.branch, *self.after)

    def around(self) -> Iterator[NormAt | Learned]:
        """Everything declared around it."""
        yield from parts_of(self.outside)
        gains = (gain for step in self.streams for gain in (step.alpha, step.beta))
        yield from filter(None, map(parameter, (self.alpha, self.beta, *gains)))
        if self.mixing is not None:
            yield from self.mixing.parameters()

    def within(self) -> Iterator[NormAt | Learned]:
        """Everything declared inside it."""
        return (part for changes in self.inside.values() for part in parts_of(changes))


class LayerSpec(NamedTuple):
    """A layer: what changes x as it begins, its sublayers, and the names of what it takes of others and leaves."""

    begin: tuple[Change, ...]
    sublayers: tuple[Sublayer, ...]
    takes: tuple[str, ...]
    leaves: tuple[str, ...]


class Combine(NamedTuple):
    """A layer's input as a learned sum of all outputs so far (Rust's `Combine`)."""

    weight: Learned
    norms: tuple[NormAt, ...]
    on_sums: bool
    skips_first: bool


class SchemeSpec(NamedTuple):
    """A scheme's declaration for one stack."""

    layers: tuple[LayerSpec, ...]
    begin: tuple[Change, ...]
    combine: Combine | None
    streams: tuple[NormAt | None, ...]
    """The norm that each stream beside x ends with."""
    mixing: mixing.Mixing | None
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
    flow = found["flow"]
    combine, growth = flow["combine"], flow["growth"]
    return SchemeSpec(
        layers=tuple(_layer(layer) for layer in found["layers"]),
        begin=_changes(flow["begin"]),
        combine=combine and _combine(**combine),
        streams=tuple(stream["norm"] and NormAt(**stream["norm"]) for stream in flow["streams"]),
        mixing=mixing.parse(flow["mixing"]),
        growth=growth and Growth(**growth),
        end=_changes(flow["end"]),
        **{key: found[key] for key in ("has_biases", "is_profiled", "norm", "init", "attention")},
    )


def _layer(found: dict[str, Any]) -> LayerSpec:
    sublayers = tuple(_sublayer(one) for one in found["sublayers"])
    return LayerSpec(_changes(found["begin"]), sublayers, tuple(found["takes"]), tuple(found["leaves"]))


def _sublayer(found: dict[str, Any]) -> Sublayer:
    around = found["around"]
    points = dict.fromkeys(point for point, _ in found["inside"])
    return Sublayer(
        before=_changes(around["before"]),
        skip=_changes(around["skip"]),
        branch=_changes(around["branch"]),
        after=_changes(around["after"]),
        alpha=_gain(around["alpha"]),
        beta=_gain(around["beta"]),
        streams=tuple(StreamStep(_gain(step["alpha"]), _gain(step["beta"])) for step in around["streams"]),
        inside={point: _changes(c for p, c in found["inside"] if p == point) for point in points},
        scale=found["scale"],
        mixing=mixing.parse(around["mixing"]),
    )


def _gain(found: Any) -> Gain:
    if isinstance(found, str):
        return 1.0 if found == "one" else found
    ((kind, value),) = found.items()
    if kind == "constant":
        return float(value)
    return Learned.of(value) if kind == "learned" else Curve(Learned.of(value["of"]), kind, value["temperature"])


def _combine(weight: dict[str, Any], norms: list[dict[str, Any]], **switches: bool) -> Combine:
    return Combine(Learned.of(weight), tuple(NormAt(**at) for at in norms), **switches)


def _changes(found: Iterable[dict[str, Any]]) -> tuple[Change, ...]:
    return tuple(_change(change) for change in found)


def _change(found: dict[str, Any]) -> Change:
    kind: Any
    ((kind, what),) = found.items()
    read: dict[str, Callable[[Any], Any]] = {"norm": lambda what: NormAt(**what), "times": float, "unit": float}
    read |= {"keep": str, "mix": lambda what: Mix(what["name"], _gain(what["own"]), _gain(what["kept"]))}
    return Change(kind, read.get(kind, Learned.of)(what))
