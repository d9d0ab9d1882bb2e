"""A residual scheme's declaration, read from Rust, and its one interpreter.

Rust writes each scheme once (`src/residual`), as plain data: the norms, gains and changes at the four places of a
Transformer. This file makes child modules and parameters of them and runs them; it names no scheme. Around a sublayer
F, with drop the dropout on its output,

    x⁺ = N_after(α⊙x + β⊙drop(N_amid(F(N_before(x)))))

in one step. It is fused with N_after, or with the next sublayer's first norm, where that norm works row by row. A
scheme may have further streams beside x; every sublayer updates them. Or x is read from several tensors (mixing.py).
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .. import _core
from ..config import LANGUAGE_MODELS, TransformerConfig, unknown
from ..errors import InputError
from . import formulas, mixing
from .profiling import profile_step
from .registry import FUSED, norm_of_config

OPS = torch.ops.normformer_rs
GROWING = "growing"
"""Stands for a gain that is the stack's α_t."""


@dataclasses.dataclass(frozen=True)
class NormAt:
    """The stack's norm under a name; `last`: no norm of the stack follows it; `ends_stack`: it stands after the last
    layer; `start`: multiplies the first value of its weight."""

    name: str
    width: int
    last: bool = False
    ends_stack: bool = False
    start: float = 1.0


@dataclasses.dataclass(frozen=True)
class Learned:
    """A parameter. `value`: the first value of all its elements, or of each, row after row."""

    name: str
    shape: tuple[int, ...]
    value: float | tuple[float, ...]

    def first(self, **factory: Any) -> Tensor:
        """Its first values."""
        if isinstance(self.value, tuple):
            return torch.tensor(self.value, **factory).view(self.shape)
        return torch.full(self.shape, self.value, **factory)

    @torch.no_grad()
    def write(self, p: Tensor) -> None:
        """Sets the parameter to its first values."""
        if isinstance(self.value, tuple):
            p.copy_(self.first(dtype=p.dtype, device=p.device))
        else:
            p.fill_(self.value)


Gain = float | str | Learned
"""The factor of x or F(x): a number, GROWING, or a parameter (a scalar or one number per column)."""


@dataclasses.dataclass(frozen=True)
class Change:
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
        return Change(self.kind, dataclasses.replace(self.what, name=self.what.name.removeprefix(path + ".")))


def made_of(changes: Iterable[Change]) -> list[NormAt | Learned]:
    """The norms and parameters of changes."""
    return [change.what for change in changes if change.is_made]


Inside = Mapping[str, tuple[Change, ...]]
"""Changes by the point they stand at: input, query, key, value, after_heads, after_output, before_activation, amid."""


@dataclasses.dataclass(frozen=True)
class StreamStep:
    """s⁺ = α⊙s + β⊙drop(f) of a stream s beside x (Rust's `StreamStep`)."""

    alpha: Gain
    beta: Gain


@dataclasses.dataclass(frozen=True)
class Sublayer:
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


@dataclasses.dataclass(frozen=True)
class Combine:
    """A layer's input as a learned sum of all outputs so far (Rust's `Combine`)."""

    weight: Learned
    norms: tuple[NormAt, ...]
    on_sums: bool
    skips_first: bool


@dataclasses.dataclass(frozen=True)
class Growth:
    """α_t = min(1, curve(t/steps)); `by_layer`: with steps·l in layer l, counted from 1."""

    steps: int
    curve: str
    by_layer: bool = False

    def now(self, t: Tensor, layer: int) -> Tensor:
        """α_t of t, (1,), in a layer counted from 0."""
        return OPS.growth(t, self.steps * (layer + 1) if self.by_layer else self.steps, self.curve)


@dataclasses.dataclass(frozen=True)
class Declared:
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
        mixing=mixing.parse(flow["mixing"], _learned),
        growth=growth and Growth(**growth),
        end=tuple(_change(change) for change in flow["end"]),
        **{key: found[key] for key in ("has_biases", "is_profiled", "norm", "init", "attention")},
    )


def _layer(found: dict[str, Any]) -> tuple[Sublayer, ...]:
    shared = [_learned(parameter) for parameter in found["shared"]]

    def gain(found: Any) -> Gain:
        if isinstance(found, str):
            return 1.0 if found == "one" else found
        ((kind, value),) = found.items()
        return {"constant": lambda: value, "learned": lambda: _learned(value), "shared": lambda: shared[value]}[kind]()

    def sublayer(found: dict[str, Any]) -> Sublayer:
        around = found["around"]
        norms: dict[str, Any] = {key: around[key] and NormAt(**around[key]) for key in ("before", "amid", "after")}
        points = dict.fromkeys(point for point, _ in found["inside"])
        inside = {point: tuple(_change(c) for p, c in found["inside"] if p == point) for point in points}
        streams = tuple(StreamStep(gain(step["alpha"]), gain(step["beta"])) for step in around["streams"])
        options: dict[str, Any] = {
            "alpha": gain(around["alpha"]),
            "beta": gain(around["beta"]),
            "scale": found["scale"],
        }
        options |= {"mixing": mixing.parse(around["mixing"], _learned), "adds_bottom": around["adds_bottom"]}
        return Sublayer(**norms, streams=streams, inside=inside, **options)

    return tuple(sublayer(one) for one in found["sublayers"])


def _learned(found: dict[str, Any]) -> Learned:
    value = found["value"]
    return Learned(found["name"], tuple(found["shape"]), tuple(value) if isinstance(value, list) else value)


def _combine(weight: dict[str, Any], norms: list[dict[str, Any]], **switches: bool) -> Combine:
    return Combine(_learned(weight), tuple(NormAt(**at) for at in norms), **switches)


def _change(found: dict[str, Any]) -> Change:
    kind: Any
    ((kind, what),) = found.items()
    read: dict[str, Callable[[Any], Any]] = {"norm": lambda what: NormAt(**what), "times": float, "unit": float}
    return Change(kind, read.get(kind, _learned)(what))


@dataclasses.dataclass(frozen=True)
class Place:
    """A layer's position: the model's configuration, the stack, and the layer's number from 0."""

    config: TransformerConfig
    stack: str
    layer: int = 0
    declared: Declared = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "declared", declare(self.config, self.stack))

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        return self.declared.layers[self.layer]

    @property
    def depth(self) -> int:
        return len(self.declared.layers)

    # `declared` is the whole stack's: copies of a layer share it, and pickles read it again.
    def __deepcopy__(self, _: Any) -> "Place":
        return self

    def __reduce__(self) -> Any:
        return Place, (self.config, self.stack, self.layer)


OWN: tuple[str, ...] = (
    "architecture",
    "vocab_size",
    "d_model",
    "d_ff",
    "heads",
    "norm",
    "norm_eps",
    "residual",
    "init",
    "fixnorm",
    "input_alpha",
    "output_alpha",
)
OWN += ("positions", "tie_embeddings", "output_bias", "dropout", "embedding_dropout", *LANGUAGE_MODELS)
"""Options of a whole model that layers take under torch.nn's names, or not at all."""


def configure(options: Mapping[str, Any], **given: Any) -> TransformerConfig:
    """A TransformerConfig of a module's arguments and its free options; InputError for an unknown option."""
    known = [field.name for field in TransformerConfig.FIELDS if field.name not in OWN]
    for name in options:
        if name not in known:
            raise InputError(unknown("option", name, known))
    return TransformerConfig(**{"vocab_size": 5, **options, **given})


# Modules and parameters from a declaration.


def make(
    what: NormAt | Learned,
    place: Place,
    factory: Mapping[str, Any],
    bias: bool = True,
) -> Any:
    """The norm, or the parameter. `factory`: device and dtype; `bias`: whether norms that have one learn it."""
    if isinstance(what, Learned):
        return nn.Parameter(what.first(**factory))
    last = what.last and place.stack == "decoder"
    where: dict[str, Any] = {"last_of_decoder": last, "ends_stack": what.ends_stack}
    norm = norm_of_config(place.declared.norm, what.width, place.config, **where, bias=bias, **factory)
    _begin_at(norm, what)
    return norm


@torch.no_grad()
def _begin_at(norm: Any, at: NormAt) -> None:
    """The first value of a norm's weight, from the norm's own."""
    if at.start != 1.0:
        offset = float(getattr(norm, "zero_centred", False))
        norm.weight.add_(offset).mul_(at.start).sub_(offset)


def install(owner: nn.Module, items: Iterable[NormAt | Learned], place: Place, **making: Any) -> None:
    """Registers the declared norms and parameters in `owner`; a parameter that sublayers share is made once."""
    made = set()
    for what in items:
        if what not in made:
            made.add(what)
            setattr(owner, what.name, make(what, place, **making))


@torch.no_grad()
def reset(owner: nn.Module, items: Iterable[NormAt | Learned]) -> None:
    """Sets the declared norms and parameters to their first values."""
    for what in items:
        made: Any = getattr(owner, what.name)
        if isinstance(what, Learned):
            what.write(made)
        else:
            reset_module(made)
            _begin_at(made, what)


def reset_module(module: nn.Module | None) -> None:
    """Sets a module to its first values, by its own `reset_parameters` or else by its children's."""
    if module is None:
        return
    if isinstance(module, nn.MultiheadAttention):
        module.out_proj.reset_parameters()  # its own reset leaves that out
    own: Any = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    if own is not None:
        own()
        return
    for child in module.children():
        reset_module(child)


# Running a declaration.


class Draw:
    """Dropout masks of one forward: a seed from torch's generator, drawn when first needed, and a site for each
    mask."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seed, self.sites = device, None, 0  # type: tuple[torch.device, Tensor | None, int]

    def __call__(self, p: float) -> tuple[float, Tensor | None, int]:
        """(p, seed, site) as operators take them."""
        if p > 0 and self.seed is None:
            self.seed = torch.randint(2**63 - 1, (3,), device=self.device)
        self.sites += 1
        return p, self.seed if p > 0 else None, self.sites


def is_plain(module: nn.Module, kind: type) -> bool:
    """The module is exactly of that class and has no hooks, so a fused operator may replace its call."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    is_own = type(module) is kind and "forward" not in module.__dict__
    return is_own and not own and not nn.modules.module._has_any_global_hook()


def rate(dropout: Any) -> float | None:
    """p of a plain dropout, 0 in evaluation; None: the module itself must be called."""
    if torch.compiler.is_exporting() or not is_plain(dropout, nn.Dropout) or dropout.p >= 1:
        return None
    return dropout.p if dropout.training else 0.0


def apply_norm(norm: nn.Module, x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """N(x); a norm with statistics gets the padding mask too."""
    return norm(x, padding_mask) if getattr(norm, "takes_pad_mask", False) else norm(x)


def apply_changes(owner: nn.Module, changes: Iterable[Change], x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """x after the changes at one point."""
    for change in changes:
        made = getattr(owner, change.what.name) if change.is_made else change.what
        if change.kind == "norm":
            x = apply_norm(made, x, padding_mask)
        elif change.kind == "shift":
            x = x - made.to(x.dtype)
        elif change.kind == "scale":
            x = x * made.to(x.dtype)
        elif change.kind == "times":
            x = x * made
        elif change.kind == "unit":
            is_exporting = torch.compiler.is_exporting()
            x = formulas.lp_norm(x, None, 1.0, 2.0, 1, made) if is_exporting else OPS.scale_norm(x, None, None, made)[0]
        else:
            x = (x.unflatten(-1, (made.numel(), -1)) * made.to(x.dtype).unsqueeze(-1)).flatten(-2)
    return x


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """The accumulation type for rows of `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def gain(owner: nn.Module, declared: Gain, x: Tensor, alpha_t: Tensor | None) -> Tensor | None:
    """The factor as a tensor; None: one."""
    if isinstance(declared, Learned):
        return getattr(owner, declared.name)
    if declared == GROWING:
        return alpha_t
    assert isinstance(declared, float)
    return None if declared == 1.0 else x.new_full((1,), declared, dtype=accumulation(x.dtype))


class Streams(NamedTuple):
    """The tensors that one sublayer hands to the next: x and the streams beside it. `normed` is the next sublayer's
    N(x), where one fused step made both. Where x is read from several tensors, these are `x` and `others`, and from
    reading to writing `read` is what was read, `unwritten` what the writing needs."""

    x: Tensor
    others: tuple[Tensor, ...] = ()
    normed: Tensor | None = None
    read: Tensor | None = None
    unwritten: tuple[Tensor, ...] = ()


def start(declared: Declared, x: Tensor) -> Streams:
    """The streams as a stack begins."""
    first = x if declared.mixing is None else declared.mixing.begin(x)
    return Streams(first, (x,) * len(declared.streams))


def open_streams(owner: nn.Module, sublayer: Sublayer, streams: Streams) -> Streams:
    """The streams with what the sublayer reads of them, where it reads several."""
    if sublayer.mixing is None:
        return streams
    read, unwritten = sublayer.mixing.read(owner, (streams.x, *streams.others))
    return Streams(streams.x, streams.others, None, read, unwritten)


def begin(owner: nn.Module, sublayer: Sublayer, streams: Streams, padding_mask: Tensor | None) -> Tensor:
    """F's input: N_before(x), or x where there is no such norm."""
    if streams.normed is not None:
        return streams.normed
    x = streams.x if streams.read is None else streams.read
    return x if sublayer.before is None else apply_norm(getattr(owner, sublayer.before.name), x, padding_mask)


def close(
    owner: Any,
    sublayer: Sublayer,
    streams: Streams,
    f: Tensor,
    dropout: nn.Module,
    draw: Draw,
    *,
    following: NormAt | None = None,
    alpha_t: Tensor | None = None,
    padding_mask: Tensor | None = None,
    bottom: Tensor | None = None,
) -> Streams:
    """The streams after F(…) = f. `following`: the next sublayer's first norm; where the step fuses it, the result
    holds N(x⁺) too. `bottom`: the layer's input, for sublayers that add it."""
    x = streams.x if not sublayer.adds_bottom or bottom is None else streams.x + bottom
    if sublayer.amid is not None:
        f = apply_norm(getattr(owner, sublayer.amid.name), f, padding_mask)
    if sublayer.scale != 1.0:
        f = f * sublayer.scale
    p = rate(dropout)
    if p is None:
        f, p = dropout(f), 0.0
    if x.dtype in (torch.float64, torch.float16, torch.bfloat16) or f.dtype == torch.float64:
        f = f.to(x.dtype)  # the residual stream keeps its type
    where = draw(p)
    if sublayer.mixing is not None:
        if p > 0:
            f = OPS.residual(torch.zeros_like(f), f, None, None, None, None, 0.0, *where)[0]
        written = sublayer.mixing.write((x, *streams.others), streams.unwritten, f.to(x.dtype))
        return Streams(written[0], written[1:])

    def gains(step: Sublayer | StreamStep) -> tuple[Tensor | None, Tensor | None]:
        return gain(owner, step.alpha, x, alpha_t), gain(owner, step.beta, x, alpha_t)

    def add(s: Tensor, alpha: Tensor | None, beta: Tensor | None) -> Tensor:
        if torch.compiler.is_exporting():
            return formulas.residual(s, f, alpha, beta)
        return OPS.residual(s, f, alpha, beta, None, None, 0.0, *where)[0]

    others = tuple(add(s, *gains(step)) for s, step in zip(streams.others, sublayer.streams, strict=True))
    alpha, beta = gains(sublayer)
    if alpha is not None and owner.place.declared.is_profiled:
        profile_step(alpha, x, f if beta is None else f * beta.to(f.dtype), where)
    at = sublayer.after or following
    norm: Any = None if at is None else getattr(owner, at.name)
    if torch.compiler.is_exporting() or norm is None or not (is_row_norm(norm) and norm.fuses(x)):
        x_plus = add(x, alpha, beta)
        return Streams(x_plus if sublayer.after is None else apply_norm(norm, x_plus, padding_mask), others)
    fused = getattr(OPS, norm.operator + "_residual")
    dtype = f.dtype if sublayer.after is None else x.dtype
    x_plus, y, _ = fused(x, f, alpha, beta, *norm.parameters_in_use(x), *norm.own(x), *where, dtype)
    return Streams(x_plus, others, y) if sublayer.after is None else Streams(y, others)


def is_row_norm(norm: Any) -> bool:
    """The fused step can compute this norm."""
    return any(is_plain(norm, kind) for kind in FUSED)


def growth_now(t: Tensor, steps: int, curve: str) -> Tensor:
    """α_t of t, (1,) int64, on t's device: the host never reads it."""
    return _core.growth(steps, curve, t)  # type: ignore[arg-type]


# An operator, so that compiled graphs contain it. `torch.library.custom_op` would read this file to make it: 13 ms.
_LIBRARY = torch.library.Library("normformer_rs", "FRAGMENT")
_LIBRARY.define("growth(Tensor t, SymInt steps, str curve) -> Tensor")
_LIBRARY.impl("growth", growth_now, "CompositeExplicitAutograd")
_LIBRARY.impl("growth", lambda t, steps, curve: torch.empty_like(t, dtype=torch.float64), "Meta")
