"""A residual scheme of one's own, declared in Python.

A scheme answers for every place of a model, in plain data: numbers, norms, parameters and changes by name. The training
loop, the modules of `normformer_rs.nn`, `swap_residuals` and fairseq's models build what it declares. A run's
config.json holds the data, so that a run loads where the class is not to be had. What cannot be built is refused before
anything is.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

from .errors import InputError
from .file_class import FromFile
from .first_values import Normal, number

__all__ = [
    "GROWING",
    "Change",
    "Channel",
    "Combine",
    "Curve",
    "DeclaredScheme",
    "DepthAttention",
    "Dynamic",
    "Each",
    "Growth",
    "HyperConnection",
    "Joint",
    "Learned",
    "Norm",
    "Normal",
    "Place",
    "ResidualSpec",
    "Scheme",
    "StackSpec",
    "StreamStep",
    "co_sigmoid",
    "damp_forward",
    "head_scale",
    "keep",
    "mix",
    "norm",
    "scale",
    "shift",
    "sigmoid",
    "times",
    "unit",
]

Point = Literal[
    "input",
    "query_input",
    "key_input",
    "value_input",
    "query",
    "key",
    "value",
    "rotated_query",
    "rotated_key",
    "after_heads",
    "after_output",
    "before_activation",
    "after_activation",
]
SELF_ATTENTION, CROSS_ATTENTION, FEED_FORWARD = "self-attention", "cross-attention", "feed-forward"
_PATHS = {SELF_ATTENTION: "self_attn.", CROSS_ATTENTION: "multihead_attn.", FEED_FORWARD: ""}
GROWING = "growing"
"""A gain that is the stack's α_t (`Growth`)."""


class Norm(NamedTuple):
    """The stack's norm under a name. `width`: of its rows, None: what stands there; `start`: multiplies the first value
    of its weight."""

    name: str
    width: int | None = None
    start: float = 1.0


class Learned(NamedTuple):
    """A parameter: its first values, one for all numbers, a list of each, or `Normal`; (1,) is a scalar. `shared`:
    around the sublayers of a layer one parameter, where each has its own otherwise. `sums_over`: what its products are
    summed over, so that parametrisations scale its rate: "nothing", "width" (a `Normal` has a smaller std in wider
    models, too), "root-width" (over the width, and divided by its root) or "depth"."""

    name: str
    value: float | Sequence[float] | Normal
    shape: int | Sequence[int] = 1
    shared: bool = False
    sums_over: Literal["nothing", "width", "root-width", "depth"] = "nothing"


class Curve(NamedTuple):
    """A gain made of a parameter w: `sigmoid` or `co_sigmoid`."""

    kind: str
    of: Learned
    temperature: float


Gain = float | str | Learned | Curve
"""What x or F(x) is multiplied by: a number, GROWING, a parameter, or a curve of one."""


class Change(NamedTuple):
    """What happens to x at a place."""

    kind: str
    what: Any


def norm(name: str = "norm", width: int | None = None, start: float = 1.0) -> Change:
    """N(x), the stack's norm."""
    return Change("norm", Norm(name, width, start))


def shift(parameter: Learned) -> Change:
    """x − b"""
    return Change("shift", parameter)


def scale(parameter: Learned) -> Change:
    """x⊙s"""
    return Change("scale", parameter)


def head_scale(parameter: Learned) -> Change:
    """Each head's columns times its own number; the parameter has one a head."""
    return Change("head_scale", parameter)


def damp_forward(parameter: Learned) -> Change:
    """x − silu(a)·sg(x), sg(x) being x without its gradient: x is scaled, its gradient is not (Chen et al. 2025)."""
    return Change("damp_forward", parameter)


def times(c: float) -> Change:
    """c·x"""
    return Change("times", c)


def unit(eps: float = 1e-12) -> Change:
    """x/max(‖x‖₂, ε)"""
    return Change("unit", eps)


def keep(name: str) -> Change:
    """Leaves x under a name, for `mix` later in the stack."""
    return Change("keep", name)


def mix(name: str, own: Gain = 1.0, kept: Gain = 1.0) -> Change:
    """own⊙x + kept⊙(what was left under the name)"""
    return Change("mix", (name, own, kept))


def sigmoid(of: Learned, temperature: float = 1.0) -> Curve:
    """σ(w/τ)"""
    return Curve("sigmoid", of, temperature)


def co_sigmoid(of: Learned, temperature: float = 1.0) -> Curve:
    """√max(1 − σ(w/τ)², 10⁻³)"""
    return Curve("co_sigmoid", of, temperature)


Changes = Change | Iterable[Change]


class StreamStep(NamedTuple):
    """s⁺ = α⊙s + β⊙drop(f) of a stream s beside x."""

    alpha: Gain = 1.0
    beta: Gain = 1.0


class Joint(NamedTuple):
    """Gates of n streams, functions of all at once (docs/spec.md §2.23): around a sublayer weight (2n + n², n·d), scale
    (3,), bias (2n + n²,); without iterations, which means R = I, (2n, n·d), (2,), (2n,); at a stack's end (n, n·d),
    (1,), (n,)."""

    weight: Learned
    scale: Learned
    bias: Learned
    magnitude: float = 2.0
    iterations: int = 20


class Dynamic(NamedTuple):
    """What moves `Each`: s⊙tanh(W·LayerNorm(H_i)). gain and shift are LayerNorm's, (d,); weight (n + 2, d); scale
    (2,)."""

    gain: Learned
    shift: Learned
    weight: Learned
    scale: Learned


class Each(NamedTuple):
    """Gates of n streams, numbers and functions of each stream by itself (docs/spec.md §2.31): bias (n·(n + 2),), row
    after row p_i, R_i1 to R_in, g_i."""

    bias: Learned
    dynamic: Dynamic | None = None


class Channel(NamedTuple):
    """Gates of n streams by channel (docs/spec.md §2.23): gain (n·d,), down (r, n·d), up (n·d, r), write (n, n·d); at a
    stack's end no write."""

    gain: Learned
    down: Learned
    up: Learned
    write: Learned | None = None
    magnitude: float = 2.0


class HyperConnection(NamedTuple):
    """x is read of n streams, and F(x) written to them: H⁺_j = g_j drop(F(Σ_i p_i⊙H_i)) + Σ_i R_ij H_i. A number for
    `gates`, at a stack's end: p_i."""

    streams: int
    gates: Joint | Each | Channel | float


class DepthAttention(NamedTuple):
    """x attends over the outputs of earlier sublayers (docs/spec.md §2.22). `weights`: (query, gain), each (d,); a
    query alone: normed outputs are summed up, and of three queries (3, d) q, k and v have an input each; None: nothing
    but the embedding is there. `begins_block`: F(x) begins a new output, else it is added to the last."""

    weights: tuple[Learned, Learned] | Learned | None
    begins_block: bool = True


Mixing = HyperConnection | DepthAttention


class ResidualSpec(NamedTuple):
    """Around a sublayer: x⁺ = after(α⊙skip(x) + β⊙drop(branch(F(before(x))))). A `mixing` stands in place of skip,
    after, α, β and streams."""

    before: Changes = ()
    skip: Changes = ()
    branch: Changes = ()
    after: Changes = ()
    alpha: Gain = 1.0
    beta: Gain = 1.0
    streams: Sequence[StreamStep] = ()
    mixing: Mixing | None = None


class Combine(NamedTuple):
    """A layer's input as a learned sum of all outputs so far: `weight` (L + 1, L + 1), lower-triangular; norms on the
    outputs, or on the sums. `skips_first`: the first layer reads the embedding itself."""

    weight: Learned
    norms: Sequence[Norm] = ()
    on_sums: bool = False
    skips_first: bool = False


class Growth(NamedTuple):
    """α_t = min(1, curve(t/T)), T = `steps` updates; `by_layer`: T·l in layer l, counted from 1."""

    steps: int
    curve: Literal["linear", "exp", "sigmoid"] = "linear"
    by_layer: bool = False


class StackSpec(NamedTuple):
    """A stack: changes before its first layer and after its last, and how layers follow each other. `streams`: for each
    stream beside x the norm that it ends with, or None."""

    begin: Changes = ()
    combine: Combine | None = None
    streams: Sequence[Norm | None] = ()
    mixing: Mixing | None = None
    growth: Growth | None = None
    end: Changes = ()


@dataclass(frozen=True)
class Place:
    """Where in a model a scheme is asked."""

    config: Any = field(repr=False)
    """The model's TransformerConfig."""
    stack: Literal["encoder", "decoder"]
    layer: int = 0
    """Of the stack, from 0."""
    index: int = 0
    """The sublayer's number in its layer, from 0."""
    block: tuple[str, ...] | None = None
    """A layer's sublayers, where they are not its stack's, as in blocks of other libraries."""

    @property
    def has_encoder(self) -> bool:
        return self.config.architecture == "encoder-decoder"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The sublayers of a layer here."""
        if self.block is not None:
            return self.block
        has_three = self.stack == "decoder" and self.has_encoder
        return (SELF_ATTENTION, CROSS_ATTENTION, FEED_FORWARD) if has_three else (SELF_ATTENTION, FEED_FORWARD)

    @property
    def sublayer(self) -> str:
        """self-attention, cross-attention or feed-forward."""
        return self.kinds[self.index]

    @property
    def sublayers(self) -> int:
        """In a layer."""
        return len(self.kinds)

    @property
    def number(self) -> int:
        """Of the sublayer in its stack, from 0."""
        return self.layer * self.sublayers + self.index

    @property
    def encoder_layers(self) -> int:
        """0 without an encoder."""
        return self.config.encoder_layers if self.has_encoder else 0

    @property
    def decoder_layers(self) -> int:
        return self.config.decoder_layers

    @property
    def layers(self) -> int:
        """Of this stack."""
        return self.encoder_layers if self.stack == "encoder" else self.decoder_layers

    @property
    def is_last(self) -> bool:
        """The stack's last sublayer."""
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
        """A number by the kind of stack: of an encoder or a decoder by their depths N and M, of one stack by its L,
        half the number of its additions."""
        if not self.has_encoder:
            return alone(self.decoder_layers if self.block is None else self.layers * self.sublayers / 2)
        return (encoder if self.stack == "encoder" else decoder)(self.encoder_layers, self.decoder_layers)


class Scheme(FromFile):
    """The base of residual schemes: override `around`, and whatever else the scheme needs.

    >>> from normformer_rs.schemes import ResidualSpec, norm
    >>> class Keel(Scheme):
    ...     name, source, init = "keel", "arXiv 2601.19895", "smallinit"
    ...     def around(self, place):
    ...         return ResidualSpec(before=norm("inner_norm"), alpha=2.0 * place.layers, after=norm())
    >>> import normformer_rs as nfrs
    >>> nfrs.nn.TransformerEncoderLayer(8, 2, 16, residual=Keel()).inner_norm1.normalized_shape
    (8,)

    Names around a sublayer get its number in the layer (norm1, norm2, …), and inside an attention its path; parameters
    and modules bear them in state dicts and checkpoints. A norm named `norm` takes over a block's own in a swap.
    """

    name: ClassVar[str]
    """Letters, digits, - and _; none of the package's."""
    equation: ClassVar[str] = ""
    source: ClassVar[str] = ""
    init: ClassVar[str] = "xavier"
    """The initialisation that goes with it."""
    has_biases: ClassVar[bool] = True
    """Linear layers have biases."""
    is_profiled: ClassVar[bool] = False
    """Learned α are set by profiling the first batch (docs/spec.md §3.4)."""

    def around(self, place: Place) -> ResidualSpec:
        """Around a sublayer."""
        return ResidualSpec()

    def inside(self, place: Place) -> Mapping[Point, Changes]:
        """Inside a sublayer, by point: input; of a self-attention query_input, key_input, value_input; of an attention
        query, key, value, after_heads, after_output; of a feed-forward before_activation, after_activation."""
        return {}

    def layer(self, place: Place) -> Changes:
        """On x as a layer begins."""
        return ()

    def stack(self, place: Place) -> StackSpec:
        """Before, between and after the layers."""
        return StackSpec()

    def declare(self, config: Any, kinds: tuple[str, ...] | None = None) -> dict[str, Any]:
        """Everything that the scheme declares in a model of this configuration, as config.json holds it. `kinds`: the
        sublayers of a layer, where they are not its stack's.

        Errors: InputError where a method returns something else than it should. Whether the declaration can be built is
        checked where it is.
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
        return hash((type(self), *sorted(vars(self))))  # equal values, such as 1 and 1.0, may print differently


_ABOUT: dict[str, type] = {"name": str, "equation": str, "source": str, "init": str}
_ABOUT |= {"has_biases": bool, "is_profiled": bool}
"""What a scheme says of itself, and the types."""


def _same(one: Any, other: Any) -> bool:
    """Arrays and tensors are equal where all their numbers are, also within lists and dictionaries."""
    if hasattr(one, "shape") or hasattr(other, "shape"):
        return getattr(one, "shape", None) == getattr(other, "shape", None) and bool((one == other).all())
    if type(one) is type(other) and isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if type(one) is type(other) and isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    return bool(one == other)


class DeclaredScheme(Scheme):
    """A scheme read from a config.json, without its class: what it declared in a model of one size."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        try:
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


# Declarations as data.


class _Names(NamedTuple):
    """How names become those of the owner: by a sublayer's number, or by an attention's path."""

    place: Place
    number: str = ""
    path: str = ""
    width: int = 0

    def of(self, name: str, shared: bool = False) -> str:
        return f"{self.path}{name}{'' if shared else self.number}"


def _stack(scheme: Scheme, first: Place) -> dict[str, Any]:
    places = [replace(first, layer=layer) for layer in range(first.layers)]
    layers = [_layer(scheme, place) for place in places]
    spec = _expected(scheme, "stack", StackSpec, scheme.stack(first))
    at = _Names(first, width=first.d_model)
    stack = {
        "begin": _changes(scheme, "stack", spec.begin, at),
        "combine": _combine(scheme, spec.combine, at),
        "streams": [{"norm": norm and _norm(norm, at)} for norm in _list(scheme, "stack", "streams", spec.streams)],
        "mixing": _mixing(spec.mixing, at),
        "growth": _growth(scheme, spec.growth),
        "end": _changes(scheme, "stack", spec.end, at),
    }
    ends = [stream["norm"] for stream in stack["streams"] if stream["norm"]]
    ends += [change["norm"] for change in stack["end"] if "norm" in change]
    for norm in ends:
        norm["ends_stack"] = True
    around = [s["around"] for one in layers for s in one["sublayers"]]
    norms = [c["norm"] for one in around for key in _LISTS for c in one[key] if "norm" in c]
    for norm in (norms + (stack["combine"] or {"norms": []})["norms"] + ends)[-1:]:
        norm["last"] = True
    return {"layers": layers, "stack": stack}


def _combine(scheme: Scheme, combine: Combine | None, at: _Names) -> dict[str, Any] | None:
    if combine is None:
        return None
    parts = _expected(scheme, "stack", Combine, combine)._asdict()
    norms = [_norm(norm, at) for norm in _list(scheme, "stack", "norms", combine.norms)]
    switches = {key: bool(value) for key, value in parts.items() if key not in ("weight", "norms")}
    return {**switches, "weight": _learned(combine.weight, at), "norms": norms}


def _growth(scheme: Scheme, growth: Growth | None) -> dict[str, Any] | None:
    if growth is None:
        return None
    steps, curve, by_layer = _expected(scheme, "stack", Growth, growth)
    return {"steps": _whole(steps, "growth's steps"), "curve": str(curve), "by_layer": bool(by_layer)}


def _list(scheme: Scheme, method: str, what: str, given: Any) -> list[Any]:
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise InputError(f"{method}() of {type(scheme).__name__}: {what} must be a list; got {given!r}")
    return [*given]


def _layer(scheme: Scheme, place: Place) -> dict[str, Any]:
    sublayers = []
    for index in range(place.sublayers):
        here = replace(place, index=index)
        spec = _expected(scheme, "around", ResidualSpec, scheme.around(here))
        at = _Names(here, str(index + 1), width=here.d_model)
        around = {key: _changes(scheme, "around", getattr(spec, key), at) for key in _LISTS}
        around |= {"alpha": _gain(spec.alpha, at), "beta": _gain(spec.beta, at), "mixing": _mixing(spec.mixing, at)}
        steps = [
            _expected(scheme, "around", StreamStep, step) for step in _list(scheme, "around", "streams", spec.streams)
        ]
        around["streams"] = [{"alpha": _gain(step.alpha, at), "beta": _gain(step.beta, at)} for step in steps]
        points = _expected(scheme, "inside", Mapping, scheme.inside(here))
        inside = [[point, one] for point, some in points.items() for one in _inside(scheme, point, some, here)]
        sublayers.append({"around": around, "inside": inside})
    begin = _changes(scheme, "layer", scheme.layer(place), _Names(place, width=place.d_model))
    return {"begin": begin, "sublayers": sublayers}


_LISTS = ("before", "branch", "skip", "after")
"""In the order in which they act."""


def _inside(scheme: Scheme, point: str, changes: Changes, place: Place) -> list[Any]:
    widths = {"before_activation": place.d_ff, "after_activation": place.d_ff}
    widths |= dict.fromkeys(("query", "key", "value", "rotated_query", "rotated_key"), place.d_head)
    at = _Names(place, path=_PATHS[place.sublayer], width=widths.get(point, place.d_model))
    return _changes(scheme, "inside", changes, at)


def _expected(scheme: Scheme, method: str, kind: Any, got: Any) -> Any:
    if not isinstance(got, kind):
        raise InputError(f"{method}() of {type(scheme).__name__} must return a {kind.__name__}; got {got!r}")
    return got


def _changes(scheme: Scheme, method: str, changes: Any, at: _Names) -> list[Any]:
    changes = [changes] if isinstance(changes, Change) or not isinstance(changes, Iterable) else list(changes)
    for change in changes:
        if not isinstance(change, Change):
            raise InputError(
                f'{method}() of {type(scheme).__name__} must give changes, as norm("norm") or keep("x"); got {change!r}'
            )
    return [{change.kind: _what(change, at)} for change in changes]


def _what(change: Change, at: _Names) -> Any:
    kind, what = change
    if kind == "norm":
        return _norm(what, at)
    if kind in ("times", "unit"):
        return number(what, f"the number of {kind}")
    if kind == "keep":
        return _text(what, "the name of keep")
    if kind == "mix":
        if not isinstance(what, tuple) or len(what) != 3:
            raise InputError(f"mix takes a name and two gains; got {what!r}")
        name, own, kept = what
        return {"name": _text(name, "the name of mix"), "own": _gain(own, at), "kept": _gain(kept, at)}
    return _learned(what, at)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{what} must be a text; got {value!r}")
    return value


def _whole(value: Any, what: str) -> int:
    """A whole number, which a size or a count must be."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or abs(int(value)) >= 2**63:
        raise InputError(f"{what} must be a whole number of 64 bits; got {str(value)[:60]!r}")
    return int(value)


def _norm(norm: Norm, at: _Names) -> dict[str, Any]:
    if not isinstance(norm, Norm):
        raise InputError(f'a norm must be a schemes.Norm, as Norm("norm"); got {norm!r}')
    name = _text(norm.name, "a norm's name")
    width = at.width if norm.width is None else norm.width
    return {
        "name": at.of(name),
        "width": _whole(width, f"the width of norm {name!r}"),
        "last": False,
        "ends_stack": False,
        "start": number(norm.start, f"the start of norm {name!r}"),
    }


def _learned(parameter: Learned, at: _Names) -> dict[str, Any]:
    if not isinstance(parameter, Learned):
        raise InputError(f'a parameter must be a Learned, as Learned("gain", 1.0); got {parameter!r}')
    name = at.of(_text(parameter.name, "a parameter's name"), bool(parameter.shared))
    sides: Any = [parameter.shape] if not isinstance(parameter.shape, (list, tuple)) else parameter.shape
    shape = [_whole(side, f"a side of {name}'s shape") for side in sides]
    value: Any = parameter.value
    if isinstance(value, Normal):
        value = {"normal": number(value.std, name)}
    elif isinstance(value, (list, tuple)) or getattr(value, "shape", None):
        value = [number(one, name) for one in value]
    else:
        value = number(value, name)
    sums_over = {} if parameter.sums_over == "nothing" else {"sums_over": str(parameter.sums_over)}
    return {"name": name, "shape": shape, "value": value, **sums_over}


def _gain(gain: Gain, at: _Names) -> Any:
    if isinstance(gain, Learned):
        return {"learned": _learned(gain, at)}
    if isinstance(gain, Curve):
        return {
            gain.kind: {"of": _learned(gain.of, at), "temperature": number(gain.temperature, "a curve's temperature")}
        }
    if isinstance(gain, str) and gain == GROWING:
        return gain
    if isinstance(gain, str) or not isinstance(gain, (int, float)):
        raise InputError(f"a gain must be a number, GROWING, a Learned, sigmoid(…) or co_sigmoid(…); got {gain!r}")
    return "one" if gain == 1 else {"constant": number(gain, "a gain")}


def _mixing(mixing: Mixing | None, at: _Names) -> Any:
    if mixing is None:
        return None
    if isinstance(mixing, HyperConnection):
        return {"hyper": {"streams": _whole(mixing.streams, "streams"), "gates": _gates(mixing.gates, at)}}
    if not isinstance(mixing, DepthAttention):
        raise InputError(f"mixing must be a HyperConnection or a DepthAttention; got {mixing!r}")
    weights: Any = mixing.weights
    if weights is not None:
        is_list = isinstance(weights, (list, tuple)) and not isinstance(weights, Learned)
        weights = [_learned(weight, at) for weight in weights] if is_list else _learned(weights, at)
    return {"depth": {"weights": weights, "begins_block": bool(mixing.begins_block)}}


_GATES = {Joint: "joint", Each: "each", Channel: "channel"}


def _gates(gates: Joint | Each | Channel | float, at: _Names) -> dict[str, Any]:
    if isinstance(gates, (int, float)):
        return {"sum": number(gates, "a hyper-connection's gates")}
    if type(gates) not in _GATES:
        raise InputError(f"a hyper-connection's gates must be Joint, Each, Channel or a number; got {gates!r}")
    return {_GATES[type(gates)]: _gate_parts(gates, at)}


def _gate_parts(gates: Joint | Each | Channel | Dynamic, at: _Names) -> dict[str, Any]:
    """Its parameters and numbers, by name."""

    def part(name: str, value: Any) -> Any:
        if name == "iterations":
            return _whole(value, name)
        if name == "magnitude":
            return number(value, name)
        if name in ("dynamic", "write") and value is None:
            return None
        return _gate_parts(value, at) if isinstance(value, Dynamic) else _learned(value, at)

    return {name: part(name, value) for name, value in gates._asdict().items()}
