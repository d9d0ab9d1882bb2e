"""A residual scheme's declaration, read from Rust.

Rust writes each scheme once (`src/residual`), as plain data: the norms, gains and changes at the four places of a
Transformer. Around a sublayer F, with drop the dropout on its output,

    x⁺ = N_after(α⊙x + β⊙drop(N_amid(F(N_before(x)))))

A scheme may have further streams beside x; every sublayer updates them. Or x is read from several tensors (mixing.py).
`making.py` makes modules and parameters of a declaration, `interpreter.py` runs it.
"""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from .. import _core
from ..config import TransformerConfig
from . import mixing
from .growth import Growth
from .parts import Learned, NormAt

GROWING = "growing"
"""Stands for a gain that is the stack's α_t."""
Gain = float | str | Learned
"""The factor of x or F(x): a number, GROWING, or a parameter (a scalar or one number per column)."""


class Change(NamedTuple):
    """A norm, shift, scale, constant factor (`times`) or division by the length (`unit`) at a point inside a sublayer,
    or before or after the stack."""

    kind: Literal["norm", "shift", "scale", "head_scale", "times", "unit"]
    what: Any
    """A NormAt, a Learned, or a number: the constant, or the least length."""

    @property
    def is_made(self) -> bool:
        """It is a module or a parameter."""
        return self.kind not in ("times", "unit")

    def below(self, path: str) -> "Change":
        """The same change, its name relative to the module at `path`."""
        if not self.is_made:
            return self
        return Change(self.kind, self.what._replace(name=self.what.name.removeprefix(path + ".")))


def made_of(changes: Iterable[Change]) -> list[NormAt | Learned]:
    """The norms and parameters of changes."""
    return [change.what for change in changes if change.is_made]


Inside = Mapping[str, tuple[Change, ...]]
"""Changes by the point they stand at: input, query, key, value, after_heads, after_output, before_activation, amid."""


class StreamStep(NamedTuple):
    """s⁺ = α⊙s + β⊙drop(f) of a stream s beside x (Rust's `StreamStep`)."""

    alpha: Gain
    beta: Gain


class Sublayer(NamedTuple):
    """Around and inside one sublayer."""

    before: NormAt | None
    alpha: Gain
    beta: Gain
    amid: NormAt | None
    after: NormAt | None
    streams: tuple[StreamStep, ...]
    inside: Inside
    scale: float
    """Of F(x): the parametrisation's factor, where β has not taken it."""
    mixing: mixing.Mixing | None
    """How x is read and F(x) written; None: as above."""
    adds_bottom: bool = False
    """In the sum, x is x plus the layer's input."""

    def around(self) -> Iterator[NormAt | Learned]:
        """Everything declared around it."""
        gains = (gain for step in self.streams for gain in (step.alpha, step.beta))
        for what in (self.before, self.amid, self.after, self.alpha, self.beta, *gains):
            if isinstance(what, NormAt | Learned):
                yield what
        if self.mixing is not None:
            yield from self.mixing.parameters()

    def within(self) -> Iterator[NormAt | Learned]:
        """Everything declared inside it."""
        return (what for changes in self.inside.values() for what in made_of(changes))


class Combine(NamedTuple):
    """A layer's input as a learned sum of all outputs so far (Rust's `Combine`)."""

    weight: Learned
    norms: tuple[NormAt, ...]
    on_sums: bool
    skips_first: bool


class Declared(NamedTuple):
    """A scheme's declaration for one stack."""

    layers: tuple[tuple[Sublayer, ...], ...]
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
def declare(config: TransformerConfig, stack: Any) -> Declared:
    """The declaration of the configuration's scheme for its "encoder" or "decoder"."""
    found = json.loads(_core.declare(config.to_json(), stack))
    flow = found["flow"]
    combine, growth = flow["combine"], flow["growth"]
    return Declared(
        layers=tuple(_layer(layer) for layer in found["layers"]),
        begin=tuple(_change(change) for change in flow["begin"]),
        combine=combine and _combine(**combine),
        streams=tuple(stream["norm"] and NormAt(**stream["norm"]) for stream in flow["streams"]),
        mixing=mixing.parse(flow["mixing"]),
        growth=growth and Growth(**growth),
        end=tuple(_change(change) for change in flow["end"]),
        **{key: found[key] for key in ("has_biases", "is_profiled", "norm", "init", "attention")},
    )


def _layer(found: dict[str, Any]) -> tuple[Sublayer, ...]:
    shared = [Learned.of(parameter) for parameter in found["shared"]]
    read: dict[str, Callable[[Any], Gain]]
    read = {"constant": float, "learned": Learned.of, "shared": shared.__getitem__}

    def gain(found: Any) -> Gain:
        if isinstance(found, str):
            return 1.0 if found == "one" else found
        ((kind, value),) = found.items()
        return read[kind](value)

    def sublayer(found: dict[str, Any]) -> Sublayer:
        around = found["around"]
        norms: dict[str, Any] = {key: around[key] and NormAt(**around[key]) for key in ("before", "amid", "after")}
        points = dict.fromkeys(point for point, _ in found["inside"])
        inside = {point: tuple(_change(c) for p, c in found["inside"] if p == point) for point in points}
        streams = tuple(StreamStep(gain(step["alpha"]), gain(step["beta"])) for step in around["streams"])
        return Sublayer(
            **norms,
            alpha=gain(around["alpha"]),
            beta=gain(around["beta"]),
            streams=streams,
            inside=inside,
            scale=found["scale"],
            mixing=mixing.parse(around["mixing"]),
            adds_bottom=around["adds_bottom"],
        )

    return tuple(sublayer(one) for one in found["sublayers"])


def _combine(weight: dict[str, Any], norms: list[dict[str, Any]], **switches: bool) -> Combine:
    return Combine(Learned.of(weight), tuple(NormAt(**at) for at in norms), **switches)


def _change(found: dict[str, Any]) -> Change:
    kind: Any
    ((kind, what),) = found.items()
    read: dict[str, Callable[[Any], Any]] = {"norm": lambda what: NormAt(**what), "times": float, "unit": float}
    return Change(kind, read.get(kind, Learned.of)(what))
