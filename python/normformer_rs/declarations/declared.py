"""The parts of a residual scheme: the types that users write, modules run and JSON holds, as Rust declares them
(`residual/declared.rs`, `residual/mixing.rs`). It imports no torch.

`to_json` writes each type and `from_json` reads it, both through `_codec`, which follows the types of its fields.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from ..errors import InputError
from .first_values import Normal, number

__all__ = [
    "GROWING",
    "Change",
    "Channel",
    "Combine",
    "Curve",
    "DepthAttention",
    "Dynamic",
    "Each",
    "Growth",
    "HyperConnection",
    "Joint",
    "Learned",
    "Permuted",
    "ResidualSpec",
    "StackSpec",
    "StreamStep",
    "co_magnitude",
    "co_sigmoid",
    "damp_forward",
    "head_scale",
    "keep",
    "magnitude",
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
GROWING = "growing"
"""The gain that is the stack's α_t (`Growth`)."""


class NormAt(NamedTuple):
    """The stack's norm under a name. `width` is the width of its rows, None for the usual one at its place; `start`
    multiplies the initial value of its weight. The package sets the others: `last` if no norm of the stack follows
    it; `ends_stack` if it comes after the last layer; `is_weighted` is False for an rmsnorm without a weight."""

    name: str
    width: int | None = None
    start: float = 1.0
    last: bool = False
    ends_stack: bool = False
    is_weighted: bool = True


FirstValues = float | Sequence[float] | Normal


class Learned(NamedTuple):
    """A parameter. `value` holds its initial values: one for all numbers, a list of each, or `Normal`; the shape
    (1,) is a scalar. `shared`: around the sublayers of a layer there is one parameter instead of one for each.
    `sums_over`: the dimension over which its products are summed, by which parametrisations scale its rate:
    "nothing", "width" (a `Normal` has a smaller std in wider models, too), "root-width" (over the width, and divided
    by its root) or "depth"."""

    name: str
    value: FirstValues
    shape: int | Sequence[int] = 1
    shared: bool = False
    sums_over: Literal["nothing", "width", "root-width", "depth"] = "nothing"


class Curve(NamedTuple):
    """A gain computed from a parameter w: `sigmoid`, `co_sigmoid`, `magnitude` or `co_magnitude`."""

    kind: str
    of: Learned
    temperature: float


def sigmoid(of: Learned, temperature: float = 1.0) -> Curve:
    """Returns the gain σ(w/τ)."""
    return Curve("sigmoid", of, temperature)


def co_sigmoid(of: Learned, temperature: float = 1.0) -> Curve:
    """Returns the gain √max(1 − σ(w/τ)², 10⁻³)."""
    return Curve("co_sigmoid", of, temperature)


def magnitude(of: Learned, temperature: float = 1.0) -> Curve:
    """Returns the gain |w/τ|."""
    return Curve("magnitude", of, temperature)


def co_magnitude(of: Learned, temperature: float = 1.0) -> Curve:
    """Returns the gain 1 − |w/τ|."""
    return Curve("co_magnitude", of, temperature)


Gain = float | str | Learned | Curve
"""The factor of x or F(x): a number, GROWING, a parameter (a scalar or one number per column), or a curve of a
parameter."""


class Mix(NamedTuple):
    """own⊙x + kept⊙(the tensor kept under the name)"""

    name: str
    own: Gain = 1.0
    kept: Gain = 1.0


_KINDS: dict[str, Any] = {
    "norm": NormAt,
    "shift": Learned,
    "scale": Learned,
    "head_scale": Learned,
    "damp_forward": Learned,
    "times": float,
    "unit": float,
    "keep": str,
    "mix": Mix,
}
"""The kinds of changes, and the type of each one's content. The functions of these names say what they do."""


class Change(NamedTuple):
    """A change of x at its place: its kind and the kind's content."""

    kind: str
    what: Any


def norm(name: str = "norm", width: int | None = None, start: float = 1.0) -> Change:
    """Normalises x with the stack's norm: N(x)."""
    return Change("norm", NormAt(name, width, start))


def shift(parameter: Learned) -> Change:
    """Subtracts a parameter: x − b."""
    return Change("shift", parameter)


def scale(parameter: Learned) -> Change:
    """Multiplies by a parameter: x⊙s."""
    return Change("scale", parameter)


def head_scale(parameter: Learned) -> Change:
    """Multiplies each head's columns by its own number; the parameter has one number per head."""
    return Change("head_scale", parameter)


def damp_forward(parameter: Learned) -> Change:
    """Scales x but not its gradient: x − silu(a)·sg(x), where sg(x) is x without its gradient (Chen et al. 2025)."""
    return Change("damp_forward", parameter)


def times(c: float) -> Change:
    """Multiplies by a constant: c·x."""
    return Change("times", c)


def unit(eps: float = 1e-12) -> Change:
    """Scales x to unit length: x/max(‖x‖₂, ε)."""
    return Change("unit", eps)


def keep(name: str) -> Change:
    """Keeps x under a name, for a later `mix` in the stack."""
    return Change("keep", name)


def mix(name: str, own: Gain = 1.0, kept: Gain = 1.0) -> Change:
    """Mixes x with a kept tensor: own⊙x + kept⊙(the tensor kept under the name)."""
    return Change("mix", Mix(name, own, kept))


Changes = Change | Iterable[Change]


class StreamStep(NamedTuple):
    """The step s⁺ = α⊙s + β⊙drop(f) of a stream s beside x; f is the sublayer's output, as for x."""

    alpha: Gain = 1.0
    beta: Gain = 1.0


class Joint(NamedTuple):
    """Gates of n streams that are functions of all streams together (docs/spec.md §2.23). Shapes: around a sublayer
    weight (2n + n², n·d), scale (3,), bias (2n + n²,); without iterations, which means R = I, (2n, n·d), (2,),
    (2n,); at a stack's end (n, n·d), (1,), (n,)."""

    weight: Learned
    scale: Learned
    bias: Learned
    magnitude: float = 2.0
    iterations: int = 20


class Permuted(NamedTuple):
    """Gates of n streams that are functions of all streams together, with weighted means of all permutations
    (docs/spec.md §2.33): gain (n·d,), weight (2n + n!, n·d), scale (3,), bias (2n + n!,)."""

    gain: Learned
    weight: Learned
    scale: Learned
    bias: Learned


class Dynamic(NamedTuple):
    """The input-dependent part of `Each`: s⊙tanh(W·LayerNorm(H_i)). gain and shift are LayerNorm's, (d,); weight is
    W, (n + 2, d); scale is s, (2,)."""

    gain: Learned
    shift: Learned
    weight: Learned
    scale: Learned


class Each(NamedTuple):
    """Gates of n streams: learned numbers, plus functions of each stream alone (docs/spec.md §2.31). bias
    (n·(n + 2),) holds, row after row, p_i, R_i1 to R_in, g_i."""

    bias: Learned
    dynamic: Dynamic | None = None


class Channel(NamedTuple):
    """Gates of n streams by channel (docs/spec.md §2.23): gain (n·d,), down (r, n·d), up (n·d, r), write (n, n·d);
    at a stack's end there is no write."""

    gain: Learned
    down: Learned
    up: Learned
    write: Learned | None = None
    magnitude: float = 2.0


Gates = Joint | Permuted | Each | Channel | float


class HyperConnection(NamedTuple):
    """Reads x from n streams and writes F(x) to them: H⁺_j = g_j drop(F(Σ_i p_i⊙H_i)) + Σ_i R_ij H_i. At a stack's
    end `gates` may be a number, which is every p_i."""

    streams: int
    gates: Gates


class DepthAttention(NamedTuple):
    """x attends over the outputs of earlier sublayers (docs/spec.md §2.22). `weights` is (query, gain), each (d,);
    with a query alone normed outputs are summed up, and with three queries (3, d) q, k and v have an input each; it
    is None if the embedding is the only output. `begins_block`: F(x) begins a new output; otherwise it is added to
    the last one."""

    weights: Learned | tuple[Learned, Learned] | None
    begins_block: bool = True


Mixing = HyperConnection | DepthAttention
Stream = NormAt | None
"""The norm at the end of a stream beside x; None for no norm."""


class ResidualSpec(NamedTuple):
    """The connection around a sublayer: x⁺ = after(α⊙skip(x) + β⊙drop(branch(F(before(x))))). A `mixing` replaces
    skip, after, α, β and streams."""

    before: Changes = ()
    skip: Changes = ()
    branch: Changes = ()
    after: Changes = ()
    alpha: Gain = 1.0
    beta: Gain = 1.0
    streams: Sequence[StreamStep] = ()
    mixing: Mixing | None = None


class Combine(NamedTuple):
    """A layer's input as a learned sum of all outputs so far: `weight` is (L + 1, L + 1), lower-triangular; `norms`
    apply to the outputs or, with `on_sums`, to the sums. `skips_first`: the first layer reads the embedding itself."""

    weight: Learned
    norms: Sequence[NormAt] = ()
    on_sums: bool = False
    skips_first: bool = False


class Growth(NamedTuple):
    """The growing gain α_t = min(1, curve(t/T)), where T is `steps` updates or, with `by_layer`, T·l in layer l,
    counted from 1."""

    steps: int
    curve: Literal["linear", "exp", "sigmoid"] = "linear"
    by_layer: bool = False


class StackSpec(NamedTuple):
    """A stack: changes before its first layer and after its last, and the connections between layers. `streams` has,
    for each stream beside x, the norm at its end, or None."""

    begin: Changes = ()
    combine: Combine | None = None
    streams: Sequence[Stream] = ()
    mixing: Mixing | None = None
    growth: Growth | None = None
    end: Changes = ()


# Functions of declarations.

_Part = NormAt | Learned


def replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns the value with each of its norms and parameters replaced by `change` of it."""
    if isinstance(value, _Part):
        return change(value)
    if isinstance(value, Mapping):
        return {key: replaced(inner, change) for key, inner in value.items()}
    if isinstance(value, tuple):
        inner = (replaced(inner, change) for inner in value)
        return type(value)._make(inner) if hasattr(value, "_make") else tuple(inner)
    return value


def renamed(value: Any, rename: Callable[[str], str]) -> Any:
    """Returns the value with its norms and parameters renamed."""
    return replaced(value, lambda part: part._replace(name=rename(part.name)))


def parts_of(value: Any) -> list[Any]:
    """Returns the norms and parameters of a declaration, in order."""
    if isinstance(value, _Part):
        return [value]
    return [part for inner in value for part in parts_of(inner)] if isinstance(value, tuple) else []


def passes(changes: Iterable[Change]) -> bool:
    """True if one of the changes keeps a tensor for others, or reads a kept one."""
    return any(change.kind in ("keep", "mix") for change in changes)


def only_norm(changes: Sequence[Change]) -> NormAt | None:
    """Returns the norm if it is the only change, otherwise None."""
    return changes[0].what if len(changes) == 1 and changes[0].kind == "norm" else None


def is_of_joined_heads(change: Change, head_dim: int) -> bool:
    """True if a change of queries, keys or values works on all heads joined, and not on each."""
    if change.kind == "norm":
        return change.what.width != head_dim
    if change.kind in ("shift", "scale"):
        return tuple(change.what.shape) not in ((1,), (head_dim,))
    return change.kind in ("keep", "mix", "damp_forward")


# JSON: a variant of a Rust enum is {its name: its content}.


class Owner(NamedTuple):
    """The module that owns the norms and parameters of a place: the width of its rows, and the texts before (`path`)
    and after (`number`) their names in it."""

    width: int
    path: str = ""
    number: str = ""

    def own(self, part: Any, what: str) -> Any:
        """Returns a norm or a parameter under the name that it has in the module, with its width or shape filled in."""
        name = self.path + _text(part.name, f"{what}.name")
        if isinstance(part, NormAt):
            width = self.width if part.width is None else part.width
            return NormAt(name + self.number, width, part.start)
        name += "" if part.shared else self.number
        shape = part.shape if isinstance(part.shape, list | tuple) else [part.shape]
        value = [*part.value] if getattr(part.value, "shape", None) else part.value
        return part._replace(name=name, value=value, shape=shape, shared=False)


def to_json(kind: Any, value: Any, owner: Owner, what: str) -> Any:
    """Returns a value of this type as Rust reads it. `what` names it in messages. Errors: InputError for a value of
    another type."""
    return _codec(kind).write(value, owner, what)


def from_json(kind: Any, found: Any) -> Any:
    """Returns a value of this type, read from what Rust wrote."""
    return _codec(kind).read(found)


def refusal(what: str, expected: str, value: Any) -> InputError:
    """Makes the error for a value that is not what it must be."""
    return InputError(f"{what} must be {expected}; got {value!r}")


class _Codec(NamedTuple):
    """The functions that write a type's values as JSON, and read them."""

    write: Callable[[Any, Owner, str], Any]
    read: Callable[[Any], Any]


@functools.cache
def _codec(kind: Any) -> _Codec:
    if kind in _CODECS:
        return _CODECS[kind]()
    if get_origin(kind) is Literal:
        return _codec(str)
    kinds = [one for one in get_args(kind) if one is not NoneType]
    if len(kinds) < len(get_args(kind)):
        return _optional(_codec(functools.reduce(operator.or_, kinds)))
    if isinstance(kind, UnionType):
        return _one_or_list(_codec(kinds[0]))
    return _list(_codec(kinds[0])) if kinds else _fields(kind)


def _leaf(check: Callable[[Any, str], Any], read: Callable[[Any], Any] = lambda found: found) -> _Codec:
    return _Codec(lambda value, _, what: check(value, what), read)


def _optional(codec: _Codec) -> _Codec:
    def write(value: Any, owner: Owner, what: str) -> Any:
        return None if value is None else codec.write(value, owner, what)

    return _Codec(write, lambda found: None if found is None else codec.read(found))


def _list(codec: _Codec) -> _Codec:
    def write(value: Any, owner: Owner, what: str) -> Any:
        if not isinstance(value, Iterable) or isinstance(value, str):
            raise refusal(what, "a list", value)
        return [codec.write(one, owner, what) for one in value]

    return _Codec(write, lambda found: tuple(map(codec.read, found)))


def _one_or_list(codec: _Codec) -> _Codec:
    """Returns the codec of `X | Sequence[X]`."""
    many = _list(codec)

    def write(value: Any, owner: Owner, what: str) -> Any:
        is_list = isinstance(value, list | tuple) and not hasattr(value, "_fields")
        return (many if is_list else codec).write(value, owner, what)

    return _Codec(write, lambda found: (many if isinstance(found, list) else codec).read(found))


def _enum(variants: Mapping[str, Any], expected: str) -> _Codec:
    codecs = {tag: (int | float if kind is float else kind, _codec(kind)) for tag, kind in variants.items()}

    def write(value: Any, owner: Owner, what: str) -> Any:
        for tag, (kind, codec) in codecs.items():
            if isinstance(value, kind):
                return {tag: codec.write(value, owner, what)}
        raise refusal(what, expected, value)

    def read(found: Any) -> Any:
        ((tag, what),) = found.items()
        return codecs[tag][1].read(what)

    return _Codec(write, read)


def _gain() -> _Codec:
    plain = _enum(
        {"constant": float, "learned": Learned}, "a number, GROWING, a Learned, or a curve of one, as sigmoid(…)"
    )
    curve, units = _codec(Curve), {1.0: "one", GROWING: "growing"}

    def write(value: Any, owner: Owner, what: str) -> Any:
        if isinstance(value, str | int | float) and value in units:
            return units[value]
        if isinstance(value, Curve):
            fields = curve.write(value, owner, what)
            return {fields.pop("kind"): fields}
        return plain.write(value, owner, what)

    def read(found: Any) -> Any:
        if isinstance(found, str):
            return 1.0 if found == "one" else found
        ((tag, what),) = found.items()
        return plain.read(found) if tag in ("constant", "learned") else curve.read({"kind": tag, **what})

    return _Codec(write, read)


def _change() -> _Codec:
    codecs = {kind: _codec(what) for kind, what in _KINDS.items()}

    def write(value: Any, owner: Owner, what: str) -> Any:
        if not isinstance(value, Change):
            raise refusal(what, 'changes, as norm("norm") or keep("x")', value)
        if value.kind not in [*codecs]:
            raise refusal(f"{what}: the kind of a change", f"one of {', '.join(codecs)}", value.kind)
        return {value.kind: codecs[value.kind].write(value.what, owner, f"{what}: {value.kind}")}

    def read(found: Any) -> Any:
        ((kind, what),) = found.items()
        return Change(kind, codecs[kind].read(what))

    return _Codec(write, read)


def _changes() -> _Codec:
    many = _list(_codec(Change))

    def write(value: Any, owner: Owner, what: str) -> Any:
        is_list = isinstance(value, Iterable) and not isinstance(value, Change | str)
        return many.write(value if is_list else [value], owner, what)

    return _Codec(write, many.read)


def _stream() -> _Codec:
    norm = _optional(_codec(NormAt))
    return _Codec(lambda *value: {"norm": norm.write(*value)}, lambda found: norm.read(found["norm"]))


def _first_values() -> _Codec:
    def write(value: Any, _: Owner, what: str) -> Any:
        if isinstance(value, Normal):
            return {"normal": number(value.std, what)}
        return [number(one, what) for one in value] if isinstance(value, list | tuple) else number(value, what)

    def read(found: Any) -> Any:
        if isinstance(found, dict):
            return Normal(found["normal"])
        return tuple(found) if isinstance(found, list) else found

    return _Codec(write, read)


_LEFT_OUT = ("is_weighted", "shared", "sums_over")
"""Fields that are written only if they differ from their default."""


def _fields(kind: Any) -> _Codec:
    codecs = {name: _codec(one) for name, one in kind.__annotations__.items()}
    expected = {Learned: 'a Learned, as Learned("gain", 1.0)', NormAt: 'a Norm, as Norm("norm")'}
    silent = {name: kind._field_defaults[name] for name in _LEFT_OUT if name in codecs}

    def write(value: Any, owner: Owner, what: str) -> Any:
        if not isinstance(value, kind):
            raise refusal(what, expected.get(kind, f"a {kind.__name__}"), value)
        if isinstance(value, _Part):
            value = owner.own(value, what)
            what = f"{what}: {value.name}"
        given = ((name, part) for name, part in zip(codecs, value) if name not in silent or part != silent[name])
        return {name: codecs[name].write(part, owner, f"{what}.{name}") for name, part in given}

    return _Codec(write, lambda found: kind(**{name: codecs[name].read(part) for name, part in found.items()}))


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise refusal(what, "a text", value)
    return value


def _whole(value: Any, what: str) -> int:
    """Checks that a value is a whole number, as sizes and counts must be, and returns it."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or abs(int(value)) >= 2**63:
        raise InputError(f"{what} must be a whole number of 64 bits; got {str(value)[:60]!r}")
    return int(value)


_GATES = {"joint": Joint, "permuted": Permuted, "each": Each, "channel": Channel, "sum": float}
_MIXING = {"hyper": HyperConnection, "depth": DepthAttention}
_CODECS: dict[Any, Callable[[], _Codec]] = {
    bool: lambda: _leaf(lambda value, _: bool(value)),
    int: lambda: _leaf(_whole),
    float: lambda: _leaf(number, float),
    str: lambda: _leaf(_text),
    FirstValues: _first_values,
    Gain: _gain,
    Change: _change,
    Changes: _changes,
    Stream: _stream,
    Gates: lambda: _enum(_GATES, "a Joint, a Permuted, an Each, a Channel or a number"),
    Mixing: lambda: _enum(_MIXING, "a HyperConnection or a DepthAttention"),
}
"""Makers of the codecs of types whose fields alone do not determine it."""
