"""The base class of a Transformer's layers: construction, initial values, and the run through the sublayers."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import unknown
from ..declarations.declared import Learned, NormAt, only_norm, parts_of, passes, renamed
from ..errors import InputError
from . import mixing
from .attention import MultiheadAttention, additive, is_masked
from .build import install, reset, reset_module
from .dropout import Draw, is_plain, is_run_again, rate
from .foreign import Placeable, refusal
from .generators import drawn_apart
from .init import FirstValues, Role, draw_module
from .interpreter import KeptTensors, Streams, apply_changes, begin, close, is_distributed, open_streams, start
from .place import Place, configure, in_short, whole_number
from .profiling import follow
from .scheme import Sublayer
from .sharding import mark_drawn
from .step_hooks import Growing

OPS = torch.ops.normformer_rs
Activation = str | Callable[[Tensor], Tensor]
KINDS = ("self-attention", "cross-attention", "feed-forward")


class Layer(Growing, Placeable):
    """The base class of encoder and decoder layers: construction, and a residual scheme's run through the sublayers."""

    kinds: tuple[str, ...]
    """The kinds of the sublayers, in order: two in an encoder's layer, three in a decoder's."""
    attentions: tuple[str, ...]
    """The names of the attributes that hold the attentions, in order."""
    attention_class: type[MultiheadAttention] = MultiheadAttention
    place: Place
    self_attn: Any
    multihead_attn: Any
    activation: Any
    is_torchs: bool
    """True if neither a scheme nor an initialisation was named: then arrangement and initial values are torch.nn's."""
    is_xavier = False
    """True if the initial values are those of torch.nn.Transformer, not of torch.nn's single layers."""
    _refusal: str | None = None
    """The error's message if the layer may not run outside a stack of this package; None if it may."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        norm: str = "layernorm",
        residual: str | None = None,
        init: str | None = None,
        layer: int | None = None,
        encoder_layers: int | None = None,
        decoder_layers: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        scheme = residual or ("prenorm" if norm_first else "postnorm")
        depths = self._depths(encoder_layers, decoder_layers)
        given = {"norm": norm, "residual": scheme, "norm_eps": own_eps(layer_norm_eps), "dropout": dropout, **depths}
        if init not in (None, "torch"):
            given["init"] = init
        if len(self.kinds) == 2 and "encoder_layers" not in depths:  # an encoder that stands alone has one norm
            given["norm"] = options.pop("encoder_norm", None) or norm
            if options.pop("decoder_norm", None) is not None:
                raise InputError(
                    "decoder_norm is given, but the encoder stands alone: leave it out, or say decoder_layers"
                )
        if isinstance(activation, str) and activation in _ACTIVATIONS:  # a function has no name in a configuration
            given["activation"] = activation
        config = configure(options, d_model=d_model, d_ff=dim_feedforward, heads=nhead, **given)
        if nhead < 1 or d_model % nhead:
            raise InputError(f"nhead must divide d_model, {d_model}; got {nhead}")
        _check_attention(config, options)
        # An encoder that stands alone is a "decoder" here, because Rust calls a single stack decoder-only.
        is_encoder = "encoder_layers" in depths and len(self.kinds) == 2
        self.place = Place(config, "encoder" if is_encoder else "decoder", layer or 0)
        layer_number(self.place.layer, self.place.depth)
        self.is_torchs, self.norm_first = residual is None and init is None, norm_first
        declared, factory = self.place.declared, {"device": device, "dtype": dtype}

        def rate_of(name: str) -> float:
            """Returns a rate of the configuration; `dropout` where it has none."""
            value = getattr(config, name)
            return dropout if value is None else value

        attention = {"dropout": rate_of("attention_dropout"), "batch_first": batch_first, **factory}
        has_biases = bias and declared.has_biases and config.linear_biases
        for name in self.attentions:
            setattr(self, name, self.attention_class(d_model, nhead, bias=has_biases, **attention))
            getattr(self, name).set_parts(config, has_biases, is_self=name == "self_attn", **factory)
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=has_biases, **factory)
        self.dropout = nn.Dropout(rate_of("activation_dropout"))
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=has_biases, **factory)
        if config.activation in GATED:
            self.linear3 = nn.Linear(d_model, dim_feedforward, bias=has_biases, **factory)
        self._install(factory, bias)
        for i in range(len(self.kinds)):
            setattr(self, f"dropout{i + 1}", nn.Dropout(dropout))
        self.activation = _activation(activation)
        self.grow(declared.growth, device)
        self.keeps_torchs_values = init == "torch" or self.is_torchs
        if not self.keeps_torchs_values:
            self.draw()
        # An encoder's layer has two kinds of sublayers.
        own_depth = encoder_layers if len(self.kinds) == 2 else decoder_layers
        if own_depth is None:
            self.placed = None
        elif layer is None and own_depth > 1:  # in a stack of one layer, the number is known
            self.placed = "depth"
        else:
            self.placed = "arguments"
        self.knows_encoder = encoder_layers is not None
        self._review()

    @property
    def keeps_torchs_values(self) -> bool:
        """True if linear layers are initialised as in torch.nn; otherwise as `init` says."""
        return self._keeps_torchs_values

    @keeps_torchs_values.setter
    def keeps_torchs_values(self, keeps: bool) -> None:
        self._keeps_torchs_values = keeps
        self._set_linear_resets()

    def _set_linear_resets(self) -> None:
        """Gives each linear layer a `reset_parameters` of its own, for code that resets modules one by one."""
        for linear, roles, sublayer in self._linears():
            # `FirstValues` takes a word for torch.nn's values, and the matrix's roles for those of `init`.
            drawn = ("xavier" if self.is_xavier else "torch") if self.keeps_torchs_values else roles
            vars(linear)["reset_parameters"] = FirstValues(linear, self, drawn, self.place, sublayer)
        if not self.keeps_torchs_values:
            for linear, _, _ in self._linears():
                mark_drawn(linear)
            for name in self.attentions:
                mark_drawn(getattr(self, name))

    def _linears(self) -> Iterator[tuple[Any, tuple[Role, ...], int]]:
        """Yields (linear layer, roles, its sublayer's number), without attention's stacked matrix of q, k and v."""
        for i, name in enumerate(self.attentions):
            yield getattr(self, name).out_proj, ("output",), i
            if (gate := getattr(getattr(self, name), "gate", None)) is not None:
                yield gate, ("output_gate",), i
        last = len(self.attentions)
        yield self.linear1, ("fc1",), last
        yield self.linear2, ("fc2",), last
        if (gate := self._modules.get("linear3")) is not None:
            yield gate, ("gate",), last

    def _depths(self, encoder_layers: int | None, decoder_layers: int | None) -> dict[str, Any]:
        """Returns the configuration's architecture and depths, from the depths that the caller gave or left out."""
        raise NotImplementedError

    def _install(self, factory: Mapping[str, Any], bias: bool) -> None:
        """Makes the scheme's norms and parameters, in the layer and in its attentions. `factory`: device and dtype;
        `bias`: True for norms with biases."""
        self.has_norm_biases = bias
        self._enter_attentions()
        # `part` counts the calls, so that each draws other random values.
        for part, (owner, items) in enumerate(self._declared()):
            install(owner, items, self.place, part, factory=factory, bias=bias)

    def _enter_attentions(self) -> None:
        """Sets the changes inside the attentions, and the factor of their scores."""
        for name, sublayer in zip(self.attentions, self.place.sublayers):
            attention: MultiheadAttention = getattr(self, name)
            # The layer's name self_attn.norm1 is norm1 in the attention itself.
            without_prefix = operator.methodcaller("removeprefix", f"{name}.")
            attention.set_inside(renamed(sublayer.inside, without_prefix))
            attention.reads_apart = mixing.reads_apart(sublayer.mixing)
            attention.scale = self.place.declared.attention

    def _declared(self) -> Iterator[tuple[nn.Module, list[NormAt | Learned]]]:
        """Yields (module, the norms and parameters that the scheme declares in that module)."""
        begin = parts_of(self.place.spec.begin)
        yield self, [*begin, *(item for sublayer in self.place.sublayers for item in sublayer.around())]
        for name in self.attentions:
            attention: MultiheadAttention = getattr(self, name)
            yield attention, [item for changes in attention.inside.values() for item in parts_of(changes)]
        yield self, [*self.place.sublayers[-1].within()]

    def move(self, place: Place) -> None:
        """Moves the layer to a place of the same kind in a stack of this package, with that place's scheme,
        constants and norms. Parts that both places share stay."""
        device = self.linear1.weight.device
        factory = {"device": device, "dtype": self.linear1.weight.dtype}
        items_before = [{*items} for _, items in self._declared()]
        self.place = place
        self._enter_attentions()
        for part, (before, (owner, items)) in enumerate(zip(items_before, self._declared())):
            # The new place does not have these parts of the old one.
            for name in {item.name for item in before} - {item.name for item in items}:
                delattr(owner, name)
            missing = [item for item in items if item not in before]  # `part` counts the calls, as in `_install`
            install(owner, missing, place, part, factory=factory, bias=self.has_norm_biases)
        self.grow(None, device)  # the stack holds t, so the layer holds none
        self._set_linear_resets()
        self.placed, self.knows_encoder, self._refusal = "stack", True, None

    def take_place(self, place: Place) -> None:
        """Moves the layer to a place outside this package's stacks, with its weights and its own t."""
        t, knows_encoder = self._buffers.get("t"), self.knows_encoder  # `move` changes both, as for a stack's layer
        self.move(place)
        self.grow(place.declared.growth, self.linear1.weight.device)
        if self.growth is not None and t is not None:
            self.t = t
        self.placed, self.knows_encoder = "call", knows_encoder
        self._review()

    def _review(self) -> None:
        """Decides whether the layer may run outside a stack of this package."""
        self._refusal = refusal(self.place, self.placed, draws=not self.keeps_torchs_values)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._set_linear_resets()  # pickled linear layers have torch.nn's own `reset_parameters`

    def adopt(self, place: Place, in_stack: bool) -> None:
        """Completes a converted torch.nn layer: its children stay, including the norms that the scheme keeps.
        `in_stack`: True if a stack of this package holds the layer, and t with it."""
        self.place, self.is_torchs, self.keeps_torchs_values = place, False, True
        self.placed, self.knows_encoder, self._refusal = "stack", True, None
        # torch.nn's norms come back below, in place of the scheme's new norms with the same names.
        norms = {name: self._modules.pop(name) for name in [*self._modules] if name.startswith("norm")}
        for name in self.attentions:
            if type(attention := getattr(self, name)) is nn.MultiheadAttention:
                attention.__class__ = MultiheadAttention
        weight = self.linear1.weight
        self._install({"device": weight.device, "dtype": weight.dtype}, bias=self.linear1.bias is not None)
        for name, norm in norms.items():
            if name in self._modules:
                setattr(self, name, norm)
        self.grow(None if in_stack else place.declared.growth, weight.device)
        self.train(self.training)

    def reset_parameters(self) -> None:
        """Resets linear layers (as `init` says, or as torch.nn does), norms, gains and t."""
        if self.keeps_torchs_values:
            linears = (self.linear1, self.linear2, self._modules.get("linear3"))
            for module in (*(getattr(self, name) for name in self.attentions), *linears):
                reset_module(module)
        else:
            self.draw()
        for part, (owner, items) in enumerate(self._declared()):
            reset(owner, items, part)
        self.reset_growth()

    def draw(self) -> None:
        """Initialises the linear layers as `init` says, whatever their values were."""
        for linear, roles, i in self._linears():
            if roles == ("output",):  # an attention's out_proj: the stacked matrix of q, k and v is drawn first
                attention: MultiheadAttention = getattr(self, self.attentions[i])
                widths = getattr(attention, "widths", None)  # None: torch.nn's attention, with equal numbers of rows
                draw_module(attention, ("query", "key", "value"), self.place, i, widths, prefix="in_proj_")
                attention.reset_sinks()
            # An output gate is an option, so its draws must not shift those of the other matrices.
            with drawn_apart(linear.weight.device, i) if roles == ("output_gate",) else nullcontext():
                draw_module(linear, roles, self.place, i)

    def _run(
        self,
        x: Tensor,
        attend: Sequence[Callable[[Tensor, KeptTensors], Tensor]],
        padding_mask: Tensor | None,
        alpha_t: Tensor | None = None,
        others: tuple[Tensor, ...] | None = None,
    ) -> Any:
        """Runs x through the sublayers: the attentions (`attend`, one function each) and the feed-forward.

        In a stack whose scheme has several tensors, `others` has the streams beside x, and the tensors that earlier
        layers have kept for this one. The result is then (x, others), where `others` ends with the tensors that this
        layer keeps. With others=None, the streams begin and end in this layer, and the result is x; streams that are
        mixed end as their mean."""
        if self._refusal is not None and others is None:
            raise InputError(self._refusal)
        alpha_t = self.grown(self.place.layer) if alpha_t is None else alpha_t
        if alpha_t is None and self.place.declared.growth is not None:
            raise InputError(
                f'residual "{self.place.config.residual}" grows with t, which the stack of this layer holds: run the '
                "stack; or call normformer_rs.nn.place_layers(layers, init=False), and set_num_updates for t"
            )
        draw, declared, sublayers = Draw(x.device), self.place.declared, self.place.sublayers
        spec = self.place.spec
        # `others` has streams first, then one kept tensor for each name in `takes`.
        count = 0 if others is None else len(others) - len(spec.takes)  # the number of streams beside x
        streams = start(declared, x) if others is None else Streams(x, others[:count])
        kept: KeptTensors = dict(zip(spec.takes, others[count:], strict=True)) if others else {}
        if spec.begin:
            streams = streams._replace(x=apply_changes(self, spec.begin, streams.x, padding_mask, kept))
        streams = streams._replace(kept=kept)
        for i, sublayer in enumerate(sublayers):
            if self.placed != "stack":
                is_told = self.placed not in (None, "depth") or not declared.is_profiled  # as `follow` defines it
                follow(self.place.layer, i, is_told)
            streams = open_streams(self, sublayer, streams)
            branch_input = begin(self, sublayer, streams, padding_mask)
            is_last = i + 1 == len(sublayers)
            f = self._feed_forward(branch_input, draw, padding_mask, kept) if is_last else attend[i](branch_input, kept)
            following = None if is_last else only_norm(sublayers[i + 1].before)
            step: dict[str, Any] = {"following": following, "alpha_t": alpha_t, "padding_mask": padding_mask}
            streams = close(self, sublayer, streams, f, getattr(self, f"dropout{i + 1}"), draw, **step)
        if others is not None:
            return streams.x, (*streams.others, *(kept[name] for name in spec.leaves))
        return mixing.seen(declared.mixing, (streams.x, *streams.others))

    def _feed_forward(self, x: Tensor, draw: Draw, padding_mask: Tensor | None, kept: KeptTensors) -> Tensor:
        """Returns W₂·drop(φ(W₁x + b₁)) + b₂, or with a gate W₂·drop(φ(W₁x + b₁)⊙(W₃x + b₃)) + b₂."""
        inside = self.place.sublayers[-1].inside

        def change(point: str, x: Tensor) -> Tensor:
            """Returns x after the scheme's changes at a point inside the feed-forward."""
            return apply_changes(self, inside.get(point, ()), x, padding_mask, kept)

        x, gate = change("input", x), self._modules.get("linear3")
        h = change("before_activation", self.linear1(x))  # (…, d_ff)
        p = rate(self.dropout)
        is_relu = self.activation is F.relu or (
            isinstance(self.activation, nn.Module) and is_plain(self.activation, nn.ReLU)
        )
        # One operator computes dropout and ReLU. Dropout's factors are not negative, so they may come before the ReLU.
        if is_relu and gate is None and p is not None and not is_distributed(h):
            h, where = draw.drop(h, p)  # (rate, seed, site) of the dropout that the operator still applies
            h = OPS.relu_dropout(h, *where)
        else:
            h = self.activation(h) if gate is None else self.activation(h) * gate(x)
            # A recomputation in the backward pass must drop the same elements as the first run.
            h = draw.drop(h, p)[0] if p and is_run_again() else self.dropout(h)
        return self.linear2(change("after_activation", h))

    def _padding(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """Returns a key padding mask, (B, T) or (T), in x's leading shape, True at padding."""
        if mask is None:
            return None
        mask = is_masked(mask)
        # Without batch_first, x is (T, B, d).
        return mask if mask.dim() == 1 or self.self_attn.batch_first else mask.transpose(0, 1)

    def extra_repr(self) -> str:
        return f"residual={self.place.config.residual!r}, norm={self.place.declared.norm!r}"


def attended(layer: Layer, name: str, x: Tensor, memory: Tensor, kept: KeptTensors, **masks: Any) -> Tensor:
    """Returns the output of the layer's attention `name`; the changes inside it may add tensors to `kept`. If q, k and
    v have separate inputs, `x` is the three, stacked. An attention of another class is called as torch.nn's layers do.

    Errors: InputError if the scheme needs changes inside attention, and the module there does not apply them.
    """
    attention = getattr(layer, name)
    inside, reads_apart = getattr(attention, "inside", None), getattr(attention, "reads_apart", None)
    if inside is None or reads_apart is None:
        sublayer, wraps_ours = _check_other_attention(layer, name, attention)
        reads_apart = mixing.reads_apart(sublayer.mixing)
        inside = {}
        if not wraps_ours:
            masks = _torchs_masks(layer, attention, x, memory, **masks)
    # A subclass may have a forward of its own, without `is_self`, which says that q, k and v read one tensor.
    if memory is x and getattr(type(attention), "forward", None) is MultiheadAttention.forward:
        masks["is_self"] = True
    inputs = x.unbind() if reads_apart else (x, memory, memory)
    if not any(map(passes, inside.values())):  # no change reads or writes `kept`
        return attention(*inputs, need_weights=False, **masks)[0]
    f, _, kept_after = attention(*inputs, need_weights=False, **masks, kept=kept)
    kept.update(kept_after)
    return f


def _check_other_attention(layer: Layer, name: str, attention: Any) -> tuple[Sublayer, bool]:
    """Checks an attention of another class. Returns its sublayer, and True if it wraps one of this package's
    attentions, which then applies the changes inside. InputError if the scheme needs more than its modules can do."""
    config, sublayer = layer.place.config, layer.place.sublayers[layer.attentions.index(name)]
    wraps_ours = any(isinstance(module, MultiheadAttention) for module in attention.modules())
    parts = {part: getattr(config, part) for part in ("output_gate", "sinks", "score_softcap")}
    parts["kv_heads"] = None if config.kv_heads == config.heads else config.kv_heads
    parts["positions"] = "rotary" if config.positions == "rotary" and name == "self_attn" else None
    needs = [f"{part}={value!r}" for part, value in parts.items() if value]
    needs += [f"changes at {point}" for point in sublayer.inside]
    # The declared factor of scores is None for torch.nn's, 1/√d_head.
    needs += ["another scale"] if layer.place.declared.attention is not None else []
    needs += ["inputs of their own for q, k and v"] if mixing.reads_apart(sublayer.mixing) else []
    if wraps_ours:  # the wrapper passes everything on, except for kept tensors
        needs = [f"changes at {point}" for point, changes in sublayer.inside.items() if passes(changes)]
    if needs:
        raise InputError(
            f"{name} is a {type(attention).__module__}.{type(attention).__name__}, but residual "
            f"{config.residual!r} with its options needs {', '.join(needs)} inside attention: keep "
            "normformer_rs.nn.MultiheadAttention there, or take a scheme that stays around it (prenorm, deepnorm, …)"
        )
    return sublayer, wraps_ours


def _torchs_masks(
    layer: Layer,
    attention: Any,
    x: Tensor,
    memory: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
) -> dict[str, Any]:
    """Returns masks as torch.nn's layers pass them to attention: an encoder's as floats, a causal one as a tensor."""
    if is_causal and attn_mask is None:
        length_dim = 1 if x.dim() == 3 and getattr(attention, "batch_first", False) else 0
        lengths = x.shape[length_dim], memory.shape[length_dim]
        attn_mask = torch.ones(*lengths, dtype=torch.bool, device=x.device).triu(1)
    masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}
    if len(layer.kinds) == 2:  # an encoder's layer
        masks = {name: None if mask is None else additive(mask, x.dtype) for name, mask in masks.items()}
    return {**masks, "is_causal": is_causal}


def own_eps(layer_norm_eps: float | None) -> float | None:
    """Returns torch.nn's `layer_norm_eps` as `norm_eps`. torch.nn's default, 1e-5, becomes None, the norm's own
    default, because norms without an ε refuse a number."""
    return None if layer_norm_eps == 1e-5 else layer_norm_eps


def _check_attention(config: Any, options: Mapping[str, Any]) -> None:
    """Raises InputError for heads that cannot share keys, and positions that a layer cannot have."""
    if options.get("positions", "rotary") != "rotary":
        raise InputError(
            f"a layer adds no positions, got positions={options['positions']!r}: add them to its input, or take "
            'positions="rotary", which turns queries and keys'
        )
    heads, kv_heads = config.heads, config.kv_heads
    if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
        divisors = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise InputError(f"kv_heads must divide nhead, {heads}: it may be {', '.join(divisors)}; got {kv_heads}")
    if config.positions == "rotary" and config.d_model // heads % 2:
        raise InputError(
            f"rotary positions turn pairs of numbers, so d_model/nhead must be even; got {config.d_model}/{heads}"
        )


def _relu2(x: Tensor) -> Tensor:
    """Returns max(x, 0)²."""
    return F.relu(x).square()


_ACTIVATIONS: dict[Any, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "relu2": _relu2}
_ACTIVATIONS |= {"swiglu": F.silu, "geglu": F.gelu}
GATED = ("swiglu", "geglu")
"""Activations whose output is multiplied by a third matrix's product."""


def _activation(activation: Activation) -> Callable[[Tensor], Tensor]:
    """Returns an activation's function. Errors: InputError for an unknown name."""
    if callable(activation):
        return activation
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise InputError(unknown("activation", activation, _ACTIVATIONS) + "; a callable will do, too")
    return _ACTIVATIONS[activation]


def layer_number(layer: int, layers: int) -> int:
    """Returns the layer's number; InputError if there is no such layer."""
    number = whole_number("layer", layer)
    if not 0 <= number < layers:
        raise InputError(f"layer must lie in 0 … {layers - 1} (there are {layers} layers); got {in_short(layer)}")
    return number
