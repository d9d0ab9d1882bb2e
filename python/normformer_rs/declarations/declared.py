"""The types of a residual scheme's parts: users write them, modules run them, and `codec.py` converts them to JSON.
Rust declares the same types (`residual/declared.rs`, `residual/mixing.rs`). This module imports no torch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from .first_values import Normal

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
    multiplies the initial value of its weight. The package sets the other fields: `last` is True if no norm of the
    stack follows; `ends_stack`, if it comes after the last layer; `is_weighted` is False for an rmsnorm without a
    weight."""

    name: str
    width: int | None = None
    start: float = 1.0
    last: bool = False
    ends_stack: bool = False
    is_weighted: bool = True


FirstValues = float | Sequence[float] | Normal


class Learned(NamedTuple):
    """A parameter. `value` is its initial value: one number for all elements, a list with a number for each, or
    `Normal`. The shape (1,) is a scalar. `shared`: the sublayers of a layer share one parameter instead of having one
    each. `sums_over`: the dimension over which products with the parameter are summed; parametrisations scale its
    learning rate by this. It is "nothing", "width" (a `Normal` has a smaller std in wider models, too), "root-width"
    (over the width, and divided by its root) or "depth"."""

    name: str
    value: FirstValues
    shape: int | Sequence[int] = 1
    shared: bool = False
    sums_over: Literal["nothing", "width", "root-width", "depth"] = "nothing"


class Curve(NamedTuple):
    """A gain computed from a parameter w (`of`) and a temperature τ. `kind` is the name of the function that makes it:
    sigmoid, co_sigmoid, magnitude or co_magnitude."""

    kind: str
    of: Learned
    temperature: float


def sigmoid(of: Learned, temperature: float = 1.0) -> Curve:
    """Returns the gain σ(w/τ), where w is the parameter `of`, and τ the temperature."""
    return Curve("sigmoid", of, temperature)


def co_sigmoid(of: Learned, temperature: float = 1.0) -> Curve:
    """Returns the gain √max(1 − σ(w/τ)², 10⁻³), where w is the parameter `of`, and τ the temperature."""
    return Curve("co_sigmoid", of, temperature)


def magnitude(of: Learned, temperature: float = 1.0) -> Curve:
    """Returns the gain |w/τ|, where w is the parameter `of`, and τ the temperature."""
    return Curve("magnitude", of, temperature)


def co_magnitude(of: Learned, temperature: float = 1.0) -> Curve:
    """Returns the gain 1 − |w/τ|, where w is the parameter `of`, and τ the temperature."""
    return Curve("co_magnitude", of, temperature)


Gain = float | str | Learned | Curve
"""The factor of x or F(x): a number, GROWING, a parameter (a scalar or one number per column), or a curve of a
parameter."""


class Mix(NamedTuple):
    """The content of a `mix` change: own⊙x + kept⊙(the tensor kept under the name)."""

    name: str
    own: Gain = 1.0
    kept: Gain = 1.0


KINDS: dict[str, Any] = {
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
"""The kinds of changes, and the type of each one's content. The functions with these names describe the changes."""


class Change(NamedTuple):
    """A change of x at its place: its kind and the kind's content."""

    kind: str
    what: Any


def norm(name: str = "norm", width: int | None = None, start: float = 1.0) -> Change:
    """Normalises x with the stack's norm: N(x). The arguments are the first three fields of `NormAt`."""
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
    """Reads x from n streams H_i and writes F(x) to them: H⁺_j = g_j drop(F(Σ_i p_i⊙H_i)) + Σ_i R_ij H_i. `gates`
    declares p, R and g. At a stack's end it may be a number, which is every p_i."""

    streams: int
    gates: Gates


class DepthAttention(NamedTuple):
    """x attends over the outputs of earlier sublayers (docs/spec.md §2.22). `weights` is (query, gain), each (d,), or a
    query alone, for a sum of normed outputs. With three queries (3, d), q, k and v have an input each. `weights` is
    None if the embedding is the only output. `begins_block`: F(x) begins a new output; otherwise F(x) is added to the
    last one."""

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


# The functions below search and change declarations.

Part = NormAt | Learned


def replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns the value, a part of a declaration, with each of its norms and parameters replaced by `change(part)`."""
    if isinstance(value, Part):
        return change(value)
    if isinstance(value, Mapping):
        return {key: replaced(inner, change) for key, inner in value.items()}
    if isinstance(value, tuple):
        items = (replaced(inner, change) for inner in value)
        return type(value)._make(items) if hasattr(value, "_make") else tuple(items)  # a named tuple keeps its type
    return value


def renamed(value: Any, rename: Callable[[str], str]) -> Any:
    """Returns the value with its norms and parameters renamed."""
    return replaced(value, lambda part: part._replace(name=rename(part.name)))


def parts_of(value: Any) -> list[Any]:
    """Returns the norms and parameters of a declaration, in order."""
    if isinstance(value, Part):
        return [value]
    return [part for inner in value for part in parts_of(inner)] if isinstance(value, tuple) else []


def passes(changes: Iterable[Change]) -> bool:
    """True if one of the changes keeps a tensor for others, or reads a kept one."""
    return any(change.kind in ("keep", "mix") for change in changes)


def only_norm(changes: Sequence[Change]) -> NormAt | None:
    """Returns the norm if it is the only change, otherwise None."""
    return changes[0].what if len(changes) == 1 and changes[0].kind == "norm" else None


def is_of_joined_heads(change: Change, head_dim: int) -> bool:
    """True if a change of queries, keys or values acts on all heads joined, instead of on each head separately.
    `head_dim`: the width of one head."""
    if change.kind == "norm":
        return change.what.width != head_dim
    if change.kind in ("shift", "scale"):  # a scalar, or one number per column of a head, acts on each head
        return tuple(change.what.shape) not in ((1,), (head_dim,))
    return change.kind in ("keep", "mix", "damp_forward")
