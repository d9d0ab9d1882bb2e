"""Declares the residual schemes (docs/spec.md §2): parts around a sublayer, inside it, and around a stack's layers.

A scheme is a function that returns a declaration, made of the dataclasses below; model.py computes what is declared.
TwT is Nguyen & Salazar 2019, BrN Liu et al. 2023.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from . import mixing as mixes
from .batch_norms import BATCH_NORMS, BLENDED_NORMS
from .config import Config, complete, is_gated, is_one_stack, kv_width
from .constants import admin_omega, deepnorm_alpha
from .declared import Parameter
from .parametrisation import forward_factors


@dataclasses.dataclass(frozen=True)
class Norm:
    """The stack's norm, whose result is multiplied by `times`. `is_last_of_decoder` marks the norm in which
    scalenorm-fixed learns its g; `ends_stack` marks a norm after the layers. `start` is the initial value of the weight
    as a multiple of the usual one; without `is_weighted` there is no weight."""

    name: str
    width: int
    is_last_of_decoder: bool = False
    ends_stack: bool = False
    start: float = 1.0
    is_weighted: bool = True
    times: float = 1.0


@dataclasses.dataclass(frozen=True)
class Shift:
    """A change of x to x − b."""

    by: Parameter


@dataclasses.dataclass(frozen=True)
class Scale:
    """A change of x to x⊙s, times a constant."""

    by: Parameter
    times: float = 1.0


@dataclasses.dataclass(frozen=True)
class Times:
    """A change of x to x·c."""

    factor: float


@dataclasses.dataclass(frozen=True)
class HeadScale:
    """A change that multiplies the columns of each head h by γ_h."""

    by: Parameter


@dataclasses.dataclass(frozen=True)
class Growth:
    """A gain: α_t of BranchNorm or ProRes, with the buffer t."""

    t: Parameter
    steps: int
    curve: str = "linear"


@dataclasses.dataclass(frozen=True)
class Unit:
    """A change of x to x/max(‖x‖₂, 1e-12), times g if it is given."""

    by: Parameter | None = None


@dataclasses.dataclass(frozen=True)
class UnitHeads:
    """A change of each head x_h to x_h/max(‖x_h‖₂, 1e-12); then all columns are multiplied by s and by a constant."""

    by: Parameter
    times: float


@dataclasses.dataclass(frozen=True)
class Damp:
    """A change of x to x − silu(a)·sg(x), where sg stops the gradient."""

    by: Parameter


@dataclasses.dataclass(frozen=True)
class Remember:
    """Leaves x as it is, and remembers it under a name for `Blend`."""

    name: str = "first"


@dataclasses.dataclass(frozen=True)
class Blend:
    """A change of x to own·x + first·(the tensor that `Remember` has remembered under the name)."""

    own: Parameter | float
    first: Parameter | float
    name: str = "first"


@dataclasses.dataclass(frozen=True)
class Gate:
    """A gain: σ(w/τ), or with `rest` √max(1 − σ(w/τ)², 10⁻³)."""

    w: Parameter
    temperature: float
    rest: bool = False


@dataclasses.dataclass(frozen=True)
class Share:
    """A gain: |w/τ|, or with `rest` 1 − |w/τ|."""

    w: Parameter
    temperature: float
    rest: bool = False


Change = Norm | Shift | Scale | Times | HeadScale | Unit | UnitHeads | Damp | Remember | Blend
Gain = float | Parameter | Growth | Gate | Share


def own_parts(part: Any) -> Iterator[Any]:
    """Yields the parameters of a change or a gain. Yields any other part itself."""
    match part:
        case Blend(own, first):
            yield from (own, first)
        case Gate(w) | Share(w):
            yield w
        case _:
            yield getattr(part, "by", part)


@dataclasses.dataclass(frozen=True)
class Sublayer:
    """Declares a sublayer, x⁺ = N_after(α⊙x + β⊙dropout(N_output(F(N_before(x))))), and the changes inside F.

    With `skip`, x is replaced by N_skip(x) everywhere in the equation. `inside` has changes at these points of F:
    "input", the input of q, k and v (in cross-attention of q only) or of linear1; "query_input", "key_input" and
    "value_input", the separate inputs in self-attention; "query", "key" and "value", each head (a norm of width d_head)
    or the whole vector (a norm of width d_model); "rotated_query" and "rotated_key", the same after the rotation;
    "heads", the joined heads before out_proj; "projected", the result of out_proj; "hidden", before the ReLU;
    "activated", after the ReLU and its dropout.
    """

    skip: Norm | None = None

    before: Norm | None = None
    after: Norm | None = None
    output: Norm | None = None
    alpha: Gain = 1.0
    beta: Gain = 1.0
    inside: Mapping[str, Change] = dataclasses.field(default_factory=dict)
    has_biases: bool = True
    streams: tuple[tuple[Gain, Gain], ...] = ()
    """α and β of each stream s beside x: s⁺ = α⊙s + β⊙dropout(N_output(F(…))), with the same dropout mask as x⁺."""
    mixing: mixes.Mixing = None
    adds_bottom: bool = False
    """True if x⁺ = N_after(x₀ + α⊙x + …), where x₀ is the layer's input."""
    first: tuple[Change, ...] = ()
    """Changes of x before everything else in the sublayer."""
    on_x: Change | None = None
    """A change of x in the sum, but not in F's input."""
    on_sum: Change | None = None

    def parts(self) -> Iterator[Change | Gain | None]:
        """Yields all parts that may have parameters."""
        yield from (self.skip, self.before, self.after, self.output, self.alpha, self.beta, *self.inside.values())
        yield from (*self.first, self.on_x, self.on_sum)
        yield from (gain for gains in self.streams for gain in gains)
        yield from mixes.parts(self.mixing)


@dataclasses.dataclass(frozen=True)
class Combine:
    """DLCL: the input of layer l+1 is Σ_{k≤l} W_{lk} N_k(y_k) if `is_pre`, otherwise N_l(Σ_{k≤l} W_{lk} y_k).

    y_k is the output of layer k, and y_0 the embedding. y_0 and the sum of row 0 are not normalised. Row L is the
    stack's output. N_l is norms[l−1].
    """

    weight: Parameter
    norms: tuple[Norm, ...]
    is_pre: bool
    is_dense: bool = False  # True for DenseFormer: there are no norms, and layer 1 reads y_0


@dataclasses.dataclass(frozen=True)
class Stack:
    """The declaration of a stack: changes of x before the first layer (`begin`) and after the last (`end`), and the way
    in which a layer's input is combined from all earlier outputs (None: it is the last one). `streams` are the norms N
    of streams s beside x. A stream begins as x after `begin`; N(s) is added to x before `end`."""

    begin: tuple[Change, ...] = ()
    end: tuple[Change, ...] = ()
    combine: Combine | None = None
    streams: tuple[Norm, ...] = ()
    mixing: mixes.Mixing = None

    def parts(self) -> Iterator[Change | Parameter]:
        yield from (*self.begin, *self.streams, *self.end, *mixes.parts(self.mixing))
        if self.combine is not None:
            yield from (Scale(self.combine.weight), *self.combine.norms)


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a sublayer: its stack, its layer, counted from 0, its kind, and its number in the layer, counted
    from 1."""

    config: Config
    stack: str
    layer: int
    kind: str  # self_attn, multihead_attn or feed_forward
    index: int

    @property
    def prefix(self) -> str:
        return f"{self.stack}.layers.{self.layer}"

    @property
    def is_last(self) -> bool:
        """True if this is the last sublayer of the stack."""
        return self.layer == self.config[f"{self.stack}_layers"] - 1 and self.kind == "feed_forward"

    def norm(self, name: str, width: str = "d_model", is_last_of_decoder: bool = False) -> Norm:
        return Norm(f"{self.prefix}.{name}", self.config[width], is_last_of_decoder)

    def parameter(self, name: str, shape: tuple[int, ...], start: float | Tensor) -> Parameter:
        return Parameter(f"{self.prefix}.{name}", shape, start)

    def vector(self, name: str, start: float) -> Parameter:
        """Returns a parameter of this sublayer with one number per column."""
        return self.parameter(f"{name}{self.index}", (self.config["d_model"],), start)

    def scalar(self, name: str, start: float) -> Parameter:
        return self.parameter(name, (1,), start)


def places(config: Config, stack: str) -> list[Place]:
    """Returns the places of a stack's sublayers, in order."""
    kinds = ["self_attn", "feed_forward"]
    if stack == "decoder" and not is_one_stack(config):
        kinds.insert(1, "multihead_attn")
    layers = range(config[f"{stack}_layers"])
    return [Place(config, stack, layer, kind, index) for layer in layers for index, kind in enumerate(kinds, 1)]


# The functions below declare a sublayer. Each docstring has the sublayer's equation; x⁺ is the sublayer's result.


def postnorm(place: Place) -> Sublayer:
    """Declares x⁺ = N(x+F(x)) (TwT eq 2)."""
    is_last_of_decoder = place.stack == "decoder" and place.is_last
    return Sublayer(after=place.norm(f"norm{place.index}", is_last_of_decoder=is_last_of_decoder))


def prenorm(place: Place) -> Sublayer:
    """Declares x⁺ = x+F(N(x)) (TwT eq 3)."""
    return Sublayer(before=place.norm(f"norm{place.index}"))


def deepnorm(place: Place) -> Sublayer:
    """Declares x⁺ = N(αx+F(x)) (BrN eq 2)."""
    return dataclasses.replace(postnorm(place), alpha=deepnorm_alpha(place.config, place.stack))


def branchnorm(place: Place) -> Sublayer:
    """Declares x⁺ = N(x+α_t F(x)) (BrN eq 7)."""
    c = place.config
    return dataclasses.replace(postnorm(place), beta=growth(place, c["branchnorm_steps"], c["branchnorm_growth"]))


def growth(place: Place, steps: int, curve: str = "linear") -> Growth:
    """Returns the gain α_t that grows to 1 in `steps` updates."""
    return Growth(Parameter(f"{place.stack}.t", (1,), 1), steps, curve)


def prores(place: Place) -> Sublayer:
    """The branch of another scheme, `prores_scheme`, times min(t/(T·l), 1) in layer l = 1, 2, … (Chen et al. 2026)."""
    beta = growth(place, place.config["prores_steps"] * (place.layer + 1))
    return dataclasses.replace(SCHEMES[place.config["prores_scheme"]][0](place), beta=beta)


def b2t(place: Place) -> Sublayer:
    """Declares x⁺ = N(x+F(x)), and x⁺ = N(x₀+x+F(x)) in the feed-forward; x₀ is the layer's input (Takase et al.
    2023)."""
    return dataclasses.replace(postnorm(place), adds_bottom=place.kind == "feed_forward")


def gpas(place: Place) -> Sublayer:
    """The equation of another scheme, `gpas_scheme`, with the change x ← x − silu(a)·sg(x): on the sum, or, if a norm
    follows the sum, on x before it. Each layer has one a (Chen et al. 2025, release)."""
    sublayer = SCHEMES[place.config["gpas_scheme"]][0](place)
    gate = Damp(place.scalar("forward_gate", 0.0))
    return dataclasses.replace(sublayer, **{"on_x" if sublayer.after is not None else "on_sum": gate})


def value_residual(place: Place) -> Sublayer:
    """Declares prenorm with the values λV + μV₁ in self-attention; V₁ are those of the first layer (Zhou et al.
    2024)."""
    if place.kind != "self_attn":
        return prenorm(place)
    start = place.config["value_residual_start"]
    own, first = (place.scalar(f"self_attn.{name}", start) for name in ("value_scale", "first_value_scale"))
    blend = Blend(own, first) if place.config["value_residual_learned"] else Blend(start, start)
    return dataclasses.replace(prenorm(place), inside={"value": Remember() if place.layer == 0 else blend})


def x0_lambdas(place: Place) -> Sublayer:
    """Declares prenorm with x ← λx + μx₀ before each layer; x₀ is the normalised embedding (nanochat)."""
    part = place.layer / max(place.config[f"{place.stack}_layers"] - 1, 1)
    own = place.scalar("stream_scale", 1.15 - 0.1 * part)
    blend = Blend(own, place.scalar("embedding_scale", 0.2 - 0.15 * part))
    middle = place.config["x0_lambdas_backout"] and place.layer == place.config[f"{place.stack}_layers"] // 2 + 1
    first = (Remember("middle"), blend) if middle else (blend,)
    return dataclasses.replace(prenorm(place), first=first if place.index == 1 else ())


def depth_scaled(place: Place) -> Sublayer:
    """Declares x⁺ = √((k−1)/k)·x + N(F(N(x)))/√k, k from 2 (Beam)."""
    kinds = 2 if place.stack == "encoder" or is_one_stack(place.config) else 3
    k = place.layer * kinds + place.index + 1
    return dataclasses.replace(sandwich(place), alpha=((k - 1) / k) ** 0.5, beta=k**-0.5)


def variance_gate(place: Place) -> Sublayer:
    """Declares x⁺ = √(1−β²)⊙x + β⊙N(F(N(x))), β = σ(w/τ) (Muse Spark)."""
    name, shape = f"{place.prefix}.residual_gate{place.index}", (place.config["d_model"],)
    w, tau = Parameter(name, shape, std=0.02), place.config["variance_gate_temperature"]
    return dataclasses.replace(sandwich(place), alpha=Gate(w, tau, rest=True), beta=Gate(w, tau))


def rezero(place: Place) -> Sublayer:
    """Declares x⁺ = x+a_l F(x), a_l one scalar per layer, 0 at first (Bachlechner et al. 2020)."""
    return Sublayer(beta=place.scalar("branch_scale", 0.0))


def r_fixup(place: Place) -> Sublayer:
    """Declares x + s·W_o·Attn(W_q(x−b), W_k(x−b), W_v(x−b)) for attention. In cross-attention only the queries' input
    is shifted; in mode paper there is a scalar before W_o. The feed-forward is x + s·W₂(drop(relu(W₁(x−b₁)−b₂))−b₃).
    Matrices have no bias (Zhang et al. 2019, release)."""
    if place.kind == "feed_forward":
        points = {"input": "shift1", "hidden": "shift2", "activated": "shift3"}
        inside: dict[str, Change] = {point: Shift(place.scalar(name, 0.0)) for point, name in points.items()}
    else:
        inside = {"input": Shift(place.scalar(f"{place.kind}.input_shift", 0.0))}
        if place.config["r_fixup_mode"] == "paper":
            inside["heads"] = Scale(place.scalar(f"{place.kind}.output_scale", 1.0))
    return Sublayer(beta=place.scalar(f"branch_scale{place.index}", 1.0), inside=inside, has_biases=False)


def t_fixup(place: Place) -> Sublayer:
    """Declares x⁺ = x+F(x) (Huang et al. 2020)."""
    return Sublayer()


def admin(place: Place) -> Sublayer:
    """Declares x⁺ = N(ω⊙x+F(x)), ω learned, from `profile_admin` (Liu et al. 2020)."""
    return dataclasses.replace(postnorm(place), alpha=place.vector("residual_scale", 1.0))


def admin_const(place: Place) -> Sublayer:
    """Declares x⁺ = N(ωx+F(x)), ω one constant per stack."""
    return dataclasses.replace(postnorm(place), alpha=admin_omega(place.config, place.stack))


def dlcl(place: Place) -> Sublayer:
    """Declares an ordinary pre-norm or post-norm sublayer. The norms of the combination of layers are declared with the
    stack (Wang et al. 2019)."""
    if place.config["dlcl_norm"] == "pre":
        return prenorm(place)
    return Sublayer(after=place.norm(f"norm{place.index}"))


def normformer(place: Place) -> Sublayer:
    """Declares prenorm with four additions that can be switched off: (1) Concat(γ_h·head_h)W^O in self-attention, with
    γ_h after W^O in mode fairseq; (2) a norm after that, before the dropout; (3) W₂·N(σ(W₁·N(x)+b₁))+b₂; (4) λ⊙x
    instead of x in the feed-forward's sum. Cross-attention has none of them (Shleifer et al. 2021)."""
    config, sublayer = place.config, prenorm(place)
    inside: dict[str, Change] = {}
    if place.kind == "self_attn":
        if config["normformer_head_scale"]:
            point = "projected" if config["normformer_mode"] == "fairseq" else "heads"
            inside[point] = HeadScale(place.parameter("self_attn.head_scale", (config["heads"],), 1.0))
        if config["normformer_attention_norm"]:
            sublayer = dataclasses.replace(sublayer, output=place.norm(f"post_norm{place.index}"))
    if place.kind == "feed_forward":
        if config["normformer_ffn_norm"]:
            inside["activated"] = place.norm("inner_norm", "d_ff")
        if config["normformer_residual_scale"]:
            sublayer = dataclasses.replace(sublayer, alpha=place.vector("residual_scale", 1.0))
    return dataclasses.replace(sublayer, inside=inside)


def subln(place: Place) -> Sublayer:
    """Declares x + W^O N(Attn(N(x))) in self-attention, x + W₂N(φ(W₁N(x))) in the feed-forward, and prenorm in
    cross-attention (Wang et al. 2022b)."""
    inside: dict[str, dict[str, Change]] = {
        "self_attn": {"heads": place.norm("self_attn.inner_norm")},
        "multihead_attn": {},
        "feed_forward": {"activated": place.norm("inner_norm", "d_ff")},
    }
    return dataclasses.replace(prenorm(place), inside=inside[place.kind])


def sandwich(place: Place) -> Sublayer:
    """Declares x⁺ = x+N(F(N(x))) (Ding et al. 2021)."""
    return dataclasses.replace(prenorm(place), output=place.norm(f"post_norm{place.index}"))


def keel(place: Place) -> Sublayer:
    """Declares x⁺ = N(αx+F(N(x))), α the stack's number of sublayers (Chen & Wei 2026)."""
    kinds = 2 if place.stack == "encoder" or is_one_stack(place.config) else 3
    alpha = place.config["keel_alpha"] or float(kinds * place.config[f"{place.stack}_layers"])
    return dataclasses.replace(prenorm(place), alpha=alpha, after=place.norm(f"post_norm{place.index}"))


def ngpt(place: Place) -> Sublayer:
    """Declares x⁺ = u((1 − |a|)⊙u(x) + |a|⊙u(F(x))), where u scales to length one. Inside F, queries, keys and the
    hidden layer are scaled (Loshchilov et al. 2024)."""
    c = place.config
    d, f, root = c["d_model"], c["d_ff"], math.sqrt(c["d_model"])
    share = place.vector("share", 1 / root), 1 / root / 0.05
    around = Sublayer(on_x=Unit(), output=Unit(), after=Unit(), alpha=Share(*share, rest=True), beta=Share(*share))
    if place.kind == "feed_forward":
        gate = {"activated": Scale(place.parameter("linear3_scale", (f,), 1.0), root)} if is_gated(c) else {}
        inside = {"hidden": Scale(place.parameter("linear1_scale", (f,), 1.0), root), **gate}
        return dataclasses.replace(around, inside=inside)
    grouped = c["kv_heads"] not in (None, c["heads"])
    names = ("query_scale", "key_scale") if grouped else ("qk_scale", "qk_scale")
    d_head = d // c["heads"]
    times = math.sqrt(d_head) / forward_factors(c, place.stack).scores
    points = ("rotated_query", "rotated_key") if place.kind == "self_attn" else ("query", "key")
    q, k = (
        UnitHeads(place.parameter(f"{place.kind}.{name}", (width,), 1 / root), root * factor)
        for name, width, factor in zip(names, (d, kv_width(c)), (times, 1.0), strict=True)
    )
    return dataclasses.replace(around, inside=dict(zip(points, (q, k), strict=True)))


def layerscale(place: Place) -> Sublayer:
    """Declares x⁺ = x+λ⊙F(N(x)) (Touvron et al. 2021)."""
    return dataclasses.replace(prenorm(place), beta=place.vector("branch_scale", place.config["layerscale_init"]))


def resi_dual(place: Place) -> Sublayer:
    """Declares x⁺ = N(x+F(x)), s⁺ = s+F(x) (Xie et al. 2023)."""
    return Sublayer(after=place.norm(f"norm{place.index}"), streams=((1.0, 1.0),))


def hybridnorm(place: Place) -> Sublayer:
    """Declares x⁺ = x + Attn(x) with norms on q, k and v of each head, and for the feed-forward x⁺ = z+F(z) with
    z = N(x) (Zhuo et al. 2025, release). N's name has the number of the attention sublayer before it."""
    if place.kind == "feed_forward":
        return Sublayer(skip=place.norm(f"norm{place.index - 1}"))
    width = place.config["d_model"] // place.config["heads"]
    points = ("query", "key", "value")
    return Sublayer(inside={at: Norm(f"{place.prefix}.{place.kind}.{at[0]}_norm", width) for at in points})


def hybridnorm_star(place: Place) -> Sublayer:
    """Declares hybridnorm, but with x⁺ = x+F(N(x)) in the first layer, which has the norms on q, k and v, too."""
    sublayer = hybridnorm(place)
    if place.layer > 0:
        return sublayer
    return dataclasses.replace(sublayer, skip=None, before=place.norm(f"norm{place.index}"))


def olmo2(place: Place) -> Sublayer:
    """Declares x⁺ = x+N(F(x)), with norms on q and k over all heads together (OLMo-core)."""
    inside: dict[str, Change] = {}
    if place.kind != "feed_forward":
        widths = {"query": place.config["d_model"], "key": kv_width(place.config)}
        inside = {at: Norm(f"{place.prefix}.{place.kind}.{at[0]}_norm", width) for at, width in widths.items()}
    return Sublayer(output=place.norm(f"norm{place.index}"), inside=inside)


def ln_scaling(place: Place) -> Sublayer:
    """Declares x⁺ = x+F(N(x)/√l) in layer l = 1, 2, …; in mode weight 1/√l is the initial value of N's weight instead
    (Sun et al. 2025)."""
    factor, sublayer = (place.layer + 1) ** -0.5, prenorm(place)
    if place.config["ln_scaling_mode"] == "constant":
        return dataclasses.replace(sublayer, inside={"input": Times(factor)})
    return dataclasses.replace(sublayer, before=dataclasses.replace(sublayer.before, start=factor))


def mix_ln(place: Place) -> Sublayer:
    """Declares postnorm in the first part (`mix_ln_part`) of the layers, rounded down, prenorm after it (Li et al.
    2024)."""
    is_post = place.layer < int(place.config["mix_ln_part"] * place.config[f"{place.stack}_layers"])
    return postnorm(place) if is_post else prenorm(place)


def attnres(place: Place) -> Sublayer:
    """Declares prenorm that reads from all earlier outputs. If q, k and v read separately, each has its own norm."""
    sublayer = mixed(mixes.attnres)(place)
    if place.config["attnres_queries"] == 1 or place.kind != "self_attn":
        return sublayer
    inside = {f"{at}_input": place.norm(f"self_attn.{at[0]}_input_norm") for at in ("query", "key", "value")}
    return dataclasses.replace(sublayer, before=None, inside=inside)


def mixed(how: Callable[[Place], mixes.Mixing]) -> Callable[[Place], Sublayer]:
    """Returns a function that declares prenorm with the mixing that `how` returns. Mixing by channel has norms of its
    own, so F has none before it."""

    def sublayer(place: Place) -> Sublayer:
        mixing = how(place)
        return dataclasses.replace(Sublayer() if isinstance(mixing, mixes.Channels) else prenorm(place), mixing=mixing)

    return sublayer


# The functions below declare the parts around the layers of a stack.


def as_prores_scheme(config: Config, stack: str) -> Stack:
    """Returns the declaration of the scheme that prores changes."""
    return SCHEMES[config["prores_scheme"]][1](config, stack)


def as_gpas_scheme(config: Config, stack: str) -> Stack:
    """Returns the declaration of the scheme that gpas changes."""
    return SCHEMES[config["gpas_scheme"]][1](config, stack)


def remembered_embedding(config: Config, stack: str) -> Stack:
    """Returns a stack that remembers x₀ = N(embedding), and has N after the last layer."""
    begin = (Norm(f"{stack}.embedding_norm", config["d_model"]), Remember())
    end = end_norm(config, stack).end
    if config["x0_lambdas_backout"]:
        end = (Blend(1.0, Parameter(f"{stack}.backout_scale", (1,), -0.2), "middle"), *end)
        is_last = config[f"{stack}_layers"] // 2 + 1 == config[f"{stack}_layers"]
        end = (Remember("middle"), *end) if is_last else end
    return Stack(begin=begin, end=end)


def nothing(config: Config, stack: str) -> Stack:
    """Returns a stack whose output is that of its last layer."""
    return Stack()


def end_norm(config: Config, stack: str) -> Stack:
    """Returns a stack with N after the last layer."""
    return Stack(end=(Norm(f"{stack}.norm", config["d_model"], stack == "decoder", ends_stack=True),))


def both_ends(config: Config, stack: str) -> Stack:
    """Returns a stack with N after the last layer, and N before the first if `peri_ln_embedding_norm` is on (Kim et al.
    2025)."""
    begin = (Norm(f"{stack}.embedding_norm", config["d_model"]),)
    return dataclasses.replace(end_norm(config, stack), begin=begin if config["peri_ln_embedding_norm"] else ())


def end_dual(config: Config, stack: str) -> Stack:
    """Returns a stack whose output is x + N(s), with the second stream s."""
    norm = Norm(f"{stack}.dual_norm", config["d_model"], stack == "decoder", ends_stack=True)
    return Stack(streams=(norm,))


def end_shift(config: Config, stack: str) -> Stack:
    """Returns a stack of R-Fixup. Its output is s·(x−b) in the encoder, x−b in the decoder."""
    end: tuple[Change, ...] = (Shift(Parameter(f"{stack}.end_shift", (1,), 0.0)),)
    if stack == "encoder":
        end += (Scale(Parameter(f"{stack}.end_scale", (1,), 1.0)),)
    return Stack(end=end)


def combination(config: Config, stack: str) -> Stack:
    """Returns a stack of DLCL. W is lower-triangular; all entries of row l are 1/(l+1) at first. With dlcl_norm "pre"
    the sum of the last row is normalised, too."""
    is_pre, layers = config["dlcl_norm"] == "pre", config[f"{stack}_layers"]
    size = layers + 1
    start = torch.ones(size, size).tril() / torch.arange(1, size + 1).unsqueeze(-1)
    norms = tuple(
        Norm(f"{stack}.combine.norms.{row}", config["d_model"], not is_pre and stack == "decoder" and row == layers)
        for row in range(1, size)
    )
    combine = Combine(Parameter(f"{stack}.combine.weight", (size, size), start), norms, is_pre)
    return Stack(end=end_norm(config, stack).end if is_pre else (), combine=combine)


def dense(config: Config, stack: str) -> Stack:
    """Returns a stack of DenseFormer: W = I at first, and the sum of the last row is normalised (Pagliardini et al.
    2024)."""
    size = config[f"{stack}_layers"] + 1
    weight = Parameter(f"{stack}.combine.weight", (size, size), torch.eye(size))
    return Stack(end=end_norm(config, stack).end, combine=Combine(weight, (), is_pre=False, is_dense=True))


def end_mixed(how: Callable[[Config, str], mixes.Mixing]) -> Callable[[Config, str], Stack]:
    """Returns a function that declares a stack whose output is read by the mixing that `how` returns. N follows, except
    for mixing by channel, which has norms of its own."""

    def stack_of(config: Config, stack: str) -> Stack:
        mixing = how(config, stack)
        begin = Stack() if isinstance(mixing, mixes.Channels) else end_norm(config, stack)
        return dataclasses.replace(begin, mixing=mixing)

    return stack_of


SCHEMES: dict[str, tuple[Callable[[Place], Sublayer], Callable[[Config, str], Stack]]] = {
    "postnorm": (postnorm, nothing),
    "prenorm": (prenorm, end_norm),
    "deepnorm": (deepnorm, nothing),
    "branchnorm": (branchnorm, nothing),
    "rezero": (rezero, nothing),
    "r-fixup": (r_fixup, end_shift),
    "t-fixup": (t_fixup, nothing),
    "admin": (admin, nothing),
    "admin-const": (admin_const, nothing),
    "dlcl": (dlcl, combination),
    "normformer": (normformer, end_norm),
    "subln": (subln, end_norm),
    "sandwich": (sandwich, end_norm),
    "layerscale": (layerscale, end_norm),
    "resi-dual": (resi_dual, end_dual),
    "hybridnorm": (hybridnorm, end_norm),
    "hybridnorm-star": (hybridnorm_star, end_norm),
    "peri-ln": (sandwich, both_ends),
    "olmo2": (olmo2, end_norm),
    "ln-scaling": (ln_scaling, end_norm),
    "mix-ln": (mix_ln, end_norm),
    "denseformer": (prenorm, dense),
    "attnres": (attnres, end_mixed(mixes.end_attnres)),
    "mhc": (mixed(mixes.mhc), end_mixed(mixes.end_mhc)),
    "hyper-connections": (mixed(mixes.hyper_connections), end_mixed(mixes.end_hyper_connections)),
    "prores": (prores, as_prores_scheme),
    "b2t": (b2t, nothing),
    "gpas": (gpas, as_gpas_scheme),
    "value-residual": (value_residual, end_norm),
    "x0-lambdas": (x0_lambdas, remembered_embedding),
    "depth-scaled": (depth_scaled, end_norm),
    "variance-gate": (variance_gate, end_norm),
    "keel": (keel, nothing),
    "ngpt": (ngpt, nothing),
    "mhc-lite": (mixed(mixes.mhc_lite), end_mixed(mixes.end_mhc_lite)),
}
RESIDUAL_NAMES = tuple(SCHEMES)


def is_defined(norm: str, residual: str) -> bool:
    """Returns True if the scheme can have the norm. A scheme with norms on queries, keys or values cannot have one with
    batch statistics."""
    config = complete({"norm": norm, "residual": residual})
    inside = [found for place in places(config, "decoder") for found in describe_sublayer(place).inside.items()]
    norms = {point for point, change in inside if isinstance(change, Norm)}
    return norm not in (*BATCH_NORMS, *BLENDED_NORMS) or not norms & {"query", "key", "value"}


def describe_sublayer(place: Place) -> Sublayer:
    """Returns the declaration of the sublayer at `place`: that of its layer's scheme, and the norms of queries, keys
    and values that the model's options add."""
    sublayer = _scheme(place.config, place.stack, place.layer)[0](place)
    length = place.config["qk_l2norm"]
    if length is not None and place.kind != "feed_forward":
        g = place.parameter(f"{place.kind}.qk_scale", (1,), math.log2(length**2 - length))
        units = {"query": Unit(g), "key": Unit()}
        return dataclasses.replace(sublayer, inside={**sublayer.inside, **units, **_projected_norms(place)})
    if place.kind == "feed_forward":
        return sublayer
    return dataclasses.replace(sublayer, inside={**sublayer.inside, **_projected_norms(place)})


def _projected_norms(place: Place) -> dict[str, Norm]:
    """Returns the norms on queries, keys and values that the options qk_norm and v_norm add to any scheme."""
    c, norms = place.config, {}
    width = c["d_model"] // c["heads"]
    if c["qk_norm"]:
        is_whole, is_later = c["qk_norm_over"] == "all-heads", c["qk_norm_after_rotation"] and place.kind == "self_attn"
        for at, heads in (("query", c["heads"]), ("key", c["kv_heads"])):
            norms[f"rotated_{at}" if is_later else at] = Norm(
                f"{place.prefix}.{place.kind}.{at[0]}_norm",
                heads * width if is_whole else width,
                is_weighted=c["qk_norm_weight"],
                times=c["qk_norm_scale"],
            )
    if c["v_norm"] is not None:
        name = f"{place.prefix}.{place.kind}.v_norm"
        norms["value"] = Norm(name, width, is_weighted=c["v_norm"] == "weighted")
    return norms


def describe_stack(config: Config, stack: str) -> Stack:
    """Returns the declaration of `stack`. The part before the layers is that of the first layer's scheme, all else that
    of the last layer's."""
    first, last = (_scheme(config, stack, layer)[1](config, stack) for layer in (0, config[f"{stack}_layers"] - 1))
    return dataclasses.replace(last, begin=first.begin)


def _scheme(config: Config, stack: str, layer: int):
    *first, last = config["residual"].split(",")
    layers: list[str] = []
    for part in first:  # name*3 means three layers; name*1/4 a quarter of the stack's layers, rounded down
        name, _, share = part.partition("*")
        numerator, _, denominator = share.partition("/")
        count = config[f"{stack}_layers"] * int(numerator) // int(denominator) if denominator else int(numerator)
        layers += [name] * count
    name = layers[layer] if 0 <= layer < len(layers) else last
    if name not in SCHEMES:
        raise ValueError(f"unknown residual scheme {name!r}; the schemes are {', '.join(SCHEMES)}")
    return SCHEMES[name]
