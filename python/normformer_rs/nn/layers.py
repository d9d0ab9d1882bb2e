"""Layers of a Transformer as torch.nn has them, with any norm, residual scheme and initialisation."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import unknown
from ..errors import InputError
from .attention import MultiheadAttention, is_masked
from .declaration import made_of
from .dropout import Draw, is_plain, is_run_again, rate
from .foreign import Placeable, listen, refusal
from .init import FirstValues, Role, draw_linear
from .interpreter import Streams, apply_changes, begin, close, open_streams, start
from .making import install, reset, reset_module
from .parts import Learned, NormAt
from .place import Place, configure
from .profiling import follow
from .tracing import Unscriptable, leaf
from .updates import Growing

OPS = torch.ops.normformer_rs
Activation = str | Callable[[Tensor], Tensor]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}
KINDS = ("self-attention", "cross-attention", "feed-forward")


class Residual(Unscriptable, Growing):
    """A residual connection around any module: x⁺ = N_after(α⊙x + β⊙drop(N_amid(F(N_before(x))))), as the scheme says.

    >>> import torch
    >>> block = Residual(torch.nn.Linear(8, 8), 8, scheme="deepnorm", norm="scalenorm", layers=6)
    >>> block(torch.zeros(2, 8)).shape
    torch.Size([2, 8])

    Args:
        sublayer: F. The Residual passes on further arguments. Of a tuple that F returns, the first item is F(x); the
            Residual returns the others after x⁺.
        d_model: the width of x.
        scheme, norm: names from `normformer_rs.tables()`.
        kind: which sublayer of a layer F is, for schemes that treat them differently: self-attention, cross-attention,
            feed-forward.
        dropout: the rate p on F's output, from 0 to 1. Below 1 it is rounded to a multiple of 1/65,536.
        layer, layers: this layer's number from 0, and how many there are, for schemes whose constants depend on depth.
        norm_eps: the norm's ε; None: its own default.
        options: those of `TransformerConfig` that the scheme or norm has (`branchnorm_steps`, `layerscale_init`, …).

    Modules and parameters: `norm1`, `post_norm1`, `residual_scale1`, `branch_scale`, … (the number is the sublayer's in
    its layer). A norm that the scheme declares before the first layer or after the last (prenorm's N) is the caller's
    to add.

    Shapes: x (…, d_model) → the same. Errors: InputError for unknown names, and for schemes that also reach inside the
    sublayer or between layers (subln, normformer, r-fixup, ln-scaling, an attention of hybridnorm or olmo2, dlcl,
    denseformer, resi-dual, attnres, mhc, b2t's feed-forward): those need a TransformerEncoderLayer or a stack.
    """

    place: Place

    def __init__(
        self,
        sublayer: nn.Module,
        d_model: int,
        *,
        scheme: str = "prenorm",
        norm: str = "layernorm",
        kind: Literal["self-attention", "cross-attention", "feed-forward"] = "feed-forward",
        dropout: float = 0.0,
        layer: int = 0,
        layers: int = 1,
        norm_eps: float | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise InputError(unknown("kind", kind, KINDS))
        depths = {"decoder_layers": layers} if kind != "cross-attention" else dict.fromkeys(_DEPTHS, layers)
        architecture = "decoder-only" if kind != "cross-attention" else "encoder-decoder"
        given = {"norm": norm, "residual": scheme, "norm_eps": norm_eps, "architecture": architecture, **depths}
        config = configure(options, d_model=d_model, d_ff=d_model, heads=1, **given)
        self.place = Place(config, "decoder", _layer_number(layer, layers))
        names = ("self-attention", "feed-forward") if architecture == "decoder-only" else KINDS
        self.number = names.index(kind)
        self.declared = self.place.sublayers[self.number]
        whole = self.place.declared
        joins = whole.combine or whole.streams or whole.mixing or self.declared.adds_bottom
        if self.declared.inside or joins:
            where = "inside the sublayer" if self.declared.inside else "between sublayers"
            raise InputError(
                f"{scheme} also works {where}, out of a Residual's reach: use TransformerEncoderLayer in a "
                "TransformerEncoder, or a scheme that stays around the sublayer (prenorm, deepnorm, sandwich, …)"
            )
        self.sublayer, self.dropout = sublayer, nn.Dropout(dropout)
        install(self, self.declared.around(), self.place, factory={"device": device, "dtype": dtype})
        self.grow(self.place.declared.growth, device)

    def reset_parameters(self) -> None:
        """Resets the scheme's norms, gains and t, and F by its own `reset_parameters`."""
        reset(self, self.declared.around())
        reset_module(self.sublayer)
        self.reset_growth()

    @leaf
    def forward(self, x: Tensor, *args: Any, padding_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """x⁺. `padding_mask`, x's leading shape, True at padding, is for norms with statistics."""
        follow(self.place.layer, self.number)
        streams = Streams(x)
        f, *rest = _tuple(self.sublayer(begin(self, self.declared, streams, padding_mask), *args, **kwargs))
        step: dict[str, Any] = {"alpha_t": self.alpha(self.place.layer), "padding_mask": padding_mask}
        x_plus = close(self, self.declared, streams, f, self.dropout, Draw(x.device), **step).x
        return (x_plus, *rest) if rest else x_plus

    def extra_repr(self) -> str:
        return f"scheme={self.place.config.residual!r}, norm={self.place.declared.norm!r}"


def _tuple(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)


_DEPTHS = ("encoder_layers", "decoder_layers")


def _layer_number(layer: int, layers: int) -> int:
    if not 0 <= layer < layers:
        raise InputError(f"layer must lie in 0 … {layers - 1} (there are {layers} layers); got {layer}")
    return layer


class Layer(Unscriptable, Growing, Placeable):
    """The base of encoder and decoder layers: construction, and a residual scheme's run through the sublayers."""

    kinds: tuple[str, ...]
    attentions: tuple[str, ...]
    attention_class: type[MultiheadAttention] = MultiheadAttention
    place: Place
    self_attn: Any
    multihead_attn: Any
    activation: Any
    is_torchs: bool
    """Neither a scheme nor an initialisation was named: torch.nn's arrangement and first values."""
    is_xavier = False
    """Of torch.nn's first values, those of torch.nn.Transformer."""
    _refusal: str | None = None
    _versions: tuple[int, ...] | None = None
    """Of the matrices as they were drawn; None: they have been written since."""

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
        layer: int = 0,
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
        if len(self.kinds) == 2 and "encoder_layers" not in depths:  # alone, the encoder has one norm
            given["norm"] = options.pop("encoder_norm", None) or norm
            if options.pop("decoder_norm", None) is not None:
                raise InputError(
                    "decoder_norm is given, but the encoder stands alone: leave it out, or say decoder_layers"
                )
        config = configure(options, d_model=d_model, d_ff=dim_feedforward, heads=nhead, **given)
        self.place = Place(
            config, "encoder" if "encoder_layers" in depths and len(self.kinds) == 2 else "decoder", layer
        )
        _layer_number(layer, self.place.depth)
        self.is_torchs, self.norm_first = residual is None and init is None, norm_first
        declared, factory = self.place.declared, {"device": device, "dtype": dtype}

        def rate_of(name: str) -> float:
            value = getattr(config, name)
            return dropout if value is None else value

        attention = {"dropout": rate_of("attention_dropout"), "batch_first": batch_first, **factory}
        has_biases = bias and declared.has_biases
        for name in self.attentions:
            setattr(self, name, self.attention_class(d_model, nhead, bias=has_biases, **attention))
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=has_biases, **factory)
        self.dropout = nn.Dropout(rate_of("activation_dropout"))
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=has_biases, **factory)
        self._install(factory, bias)
        for i in range(len(self.kinds)):
            setattr(self, f"dropout{i + 1}", nn.Dropout(dropout))
        self.activation = _activation(activation)
        self.grow(declared.growth, device)
        self.keeps_torchs_values = init == "torch" or self.is_torchs
        if not self.keeps_torchs_values:
            self.draw()
        own = encoder_layers if len(self.kinds) == 2 else decoder_layers
        self.placed = None if own is None else "arguments"
        self.review()
        listen()

    @property
    def keeps_torchs_values(self) -> bool:
        """Linear layers start as torch.nn's do; else as `init` says."""
        return self._keeps_torchs_values

    @keeps_torchs_values.setter
    def keeps_torchs_values(self, keeps: bool) -> None:
        self._keeps_torchs_values = keeps
        self._tell_linears()

    def _tell_linears(self) -> None:
        """Tells the linear layers their first values, for those who reset them one by one."""
        for linear, roles, sublayer in self._linears():
            drawn = ("xavier" if self.is_xavier else "torch") if self.keeps_torchs_values else roles
            vars(linear)["reset_parameters"] = FirstValues(linear, drawn, self.place, sublayer)

    def _linears(self) -> Iterator[tuple[Any, tuple[Role, ...], int]]:
        """The linear layers with their roles and the numbers of their sublayers; attention's stacked one is none."""
        for i, name in enumerate(self.attentions):
            yield getattr(self, name).out_proj, ("output",), i
        last = len(self.attentions)
        yield self.linear1, ("fc1",), last
        yield self.linear2, ("fc2",), last

    def _depths(self, encoder_layers: int | None, decoder_layers: int | None) -> dict[str, Any]:
        raise NotImplementedError

    def _install(self, factory: Mapping[str, Any], bias: bool) -> None:
        self.has_norm_biases = bias
        self._enter_attentions()
        for owner, items in self._declared():
            install(owner, items, self.place, factory=factory, bias=bias)

    def _enter_attentions(self) -> None:
        """Hands the attentions the changes inside them, and what their scores are multiplied by."""
        for name, sublayer in zip(self.attentions, self.place.sublayers):
            inside = {point: tuple(c.below(name) for c in changes) for point, changes in sublayer.inside.items()}
            attention: MultiheadAttention = getattr(self, name)
            attention.set_inside(inside)
            attention.scale = self.place.declared.attention

    def _declared(self) -> Iterator[tuple[nn.Module, list[NormAt | Learned]]]:
        """The scheme's norms and parameters in the layer, with the module that holds them."""
        yield self, [what for sublayer in self.place.sublayers for what in sublayer.around()]
        for name in self.attentions:
            attention: MultiheadAttention = getattr(self, name)
            yield attention, [what for changes in attention.inside.values() for what in made_of(changes)]
        yield self, [*self.place.sublayers[-1].within()]

    def move(self, place: Place) -> None:
        """Moves the layer to another place of the same kind, with that place's scheme, constants and norms. Parts that
        both places share stay."""
        device = self.linear1.weight.device
        factory = {"device": device, "dtype": self.linear1.weight.dtype}
        old = [{*items} for _, items in self._declared()]
        self.place = place
        self._enter_attentions()
        for had, (owner, wanted) in zip(old, self._declared()):
            for name in {what.name for what in had} - {what.name for what in wanted}:
                delattr(owner, name)
            missing = [what for what in wanted if what not in had]
            install(owner, missing, place, factory=factory, bias=self.has_norm_biases)
        self.grow(None, device)
        self._tell_linears()
        self.placed, self.lacks_end, self._refusal = "stack", False, None

    def review(self) -> None:
        """Decides whether the layer may run where it stands."""
        self._refusal = None if self.placed == "stack" else self._find_refusal(not self.keeps_torchs_values)

    def _find_refusal(self, draws: bool) -> str | None:
        return refusal(self.place, self.placed, self.lacks_end, draws)

    def _refuse(self) -> None:
        """InputError where the layer may not run. Values that are no longer the drawn ones ask for no depth."""
        if not self.is_fresh():
            self._refusal = self._find_refusal(False)
        if self._refusal is not None:
            raise InputError(self._refusal)

    def is_fresh(self) -> bool:
        """Its matrices are as they were drawn."""
        return self._versions is not None and self._versions == self._written()

    def _written(self) -> tuple[int, ...]:
        stacked = (getattr(self, name).in_proj_weight for name in self.attentions)
        weights = (*stacked, *(linear.weight for linear, _, _ in self._linears()))
        return tuple(-1 if w is None or w.is_inference() else w._version for w in weights)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        is_fresh = self.is_fresh()
        super()._apply(fn, recurse)
        self._versions = self._written() if is_fresh else None
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_versions": () if self.is_fresh() else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._tell_linears()
        if self._versions is not None:  # copies count from 0
            self._versions = self._written()

    def adopt(self, place: Place, in_stack: bool) -> None:
        """Completes a converted torch.nn layer: its children stay, with the norms that the scheme keeps."""
        self.place, self.is_torchs, self.keeps_torchs_values = place, False, True
        self.placed, self.lacks_end, self._refusal = "stack", False, None
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
            for module in (*(getattr(self, name) for name in self.attentions), self.linear1, self.linear2):
                reset_module(module)
        else:
            self.draw()
        for owner, items in self._declared():
            reset(owner, items)
        self.reset_growth()

    def draw(self) -> None:
        """Draws the linear layers as `init` says, whatever their values were."""
        for linear, roles, i in self._linears():
            if i < len(self.attentions):
                attention: MultiheadAttention = getattr(self, self.attentions[i])
                stacked: tuple[Role, ...] = ("query", "key", "value")
                draw_linear(attention.in_proj_weight, attention.in_proj_bias, stacked, self.place, i)
            draw_linear(linear.weight, linear.bias, roles, self.place, i)
        self._versions = self._written()

    def _run(
        self,
        x: Tensor,
        attend: Sequence[Callable[[Tensor], Tensor]],
        padding_mask: Tensor | None,
        alpha_t: Tensor | None = None,
        others: tuple[Tensor, ...] | None = None,
    ) -> Any:
        """x through the sublayers: the attentions, given as functions, and the feed-forward. With `others`, the streams
        beside x, returns (x, others); without, the streams begin and end here, those that are mixed as their mean."""
        if self._refusal is not None and others is None:
            self._refuse()
        alpha_t = self.alpha(self.place.layer) if alpha_t is None else alpha_t
        draw, declared, sublayers = Draw(x.device), self.place.declared, self.place.sublayers
        streams = start(declared, x) if others is None else Streams(x, others)
        for i, sublayer in enumerate(sublayers):
            if self.placed != "stack":
                follow(self.place.layer, i)
            streams = open_streams(self, sublayer, streams)
            given = begin(self, sublayer, streams, padding_mask)
            is_last = i + 1 == len(sublayers)
            f = self._feed_forward(given, draw, padding_mask) if is_last else attend[i](given)
            following = None if is_last else sublayers[i + 1].before
            step: dict[str, Any] = {
                "following": following,
                "alpha_t": alpha_t,
                "padding_mask": padding_mask,
                "bottom": x,
            }
            streams = close(self, sublayer, streams, f, getattr(self, f"dropout{i + 1}"), draw, **step)
        if others is not None:
            return streams[:2]
        return streams.x if declared.mixing is None else declared.mixing.seen((streams.x, *streams.others))

    def _feed_forward(self, x: Tensor, draw: Draw, padding_mask: Tensor | None) -> Tensor:
        """W₂·drop(φ(W₁x + b₁)) + b₂."""
        inside = self.place.sublayers[-1].inside

        def change(point: str, x: Tensor) -> Tensor:
            return apply_changes(self, inside.get(point, ()), x, padding_mask)

        h = change("before_activation", self.linear1(change("input", x)))  # (…, d_ff)
        p = rate(self.dropout)
        is_relu = self.activation is F.relu or (
            isinstance(self.activation, nn.Module) and is_plain(self.activation, nn.ReLU)
        )
        if is_relu and p is not None:
            h, where = draw.drop(h, p)  # a mask is not negative: it may come before the ReLU
            h = OPS.relu_dropout(h, *where)
        else:
            h = self.activation(h)
            h = draw.drop(h, p)[0] if p and is_run_again() else self.dropout(h)
        return self.linear2(change("amid", h))

    def _padding(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """A key padding mask, (B, T) or (T), in x's leading shape, True at padding."""
        if mask is None:
            return None
        mask = is_masked(mask)
        return mask if mask.dim() == 1 or self.self_attn.batch_first else mask.transpose(0, 1)

    def extra_repr(self) -> str:
        return f"residual={self.place.config.residual!r}, norm={self.place.declared.norm!r}"


def own_eps(layer_norm_eps: float | None) -> float | None:
    """torch.nn's argument as `norm_eps`. 1e-5 becomes None: it is every norm's default, and norms without an ε refuse
    others."""
    return None if layer_norm_eps == 1e-5 else layer_norm_eps


def _activation(activation: Activation) -> Callable[[Tensor], Tensor]:
    if callable(activation):
        return activation
    if activation not in _ACTIVATIONS:
        raise InputError(unknown("activation", activation, _ACTIVATIONS) + "; a callable will do, too")
    return _ACTIVATIONS[activation]


class TransformerEncoderLayer(Layer):
    """Self-attention and feed-forward, each in a residual connection: torch.nn.TransformerEncoderLayer with any norm,
    scheme and initialisation.

    >>> import torch
    >>> layer = TransformerEncoderLayer(16, 4, 32, batch_first=True, norm="scalenorm", residual="prenorm")
    >>> layer(torch.zeros(2, 5, 16)).shape
    torch.Size([2, 5, 16])

    Args: torch.nn's. `layer_norm_eps` is any norm's ε; a norm without one takes 1e-5 alone. `dropout` lies in [0, 1),
        though torch.nn takes 1 too. All rates but attention's are rounded to multiples of 1/65,536. By keyword
        norm, residual, init: names out of `normformer_rs.tables()`; `residual` may be a mixture by layers
            (`postnorm*1/4,prenorm`). residual=None: postnorm, or prenorm if `norm_first`, with torch.nn's first values
            unless `init` is named; init=None: the one that goes with the scheme; init="torch": torch.nn's.
        layer: this layer's number in its stack, from 0. A TransformerEncoder sets it, and so does a list (below).
        encoder_layers, decoder_layers: how deep the model is, for schemes whose constants depend on it. Without
            decoder_layers the encoder stands alone, as BERT's does. A TransformerEncoder sets them, and so does a list.
        options: those of `TransformerConfig` that the scheme or norm has (`branchnorm_steps`, `normformer_mode`, …),
            and `attention_dropout`, `activation_dropout` (None: `dropout`); `parametrisation`, `base_width`,
            `base_depth`, `depth_alpha` and `attention_scale`. Factors of embeddings and logits are the caller's, and
            rates `normformer_rs.param_groups`'.

    Parameters and buffers bear torch.nn's names; a scheme's own those of `normformer_rs.Transformer`. With layernorm,
    state dicts are torch.nn's both ways. Dropout masks follow torch's generator, but are not torch.nn's.

    Outside a TransformerEncoder of this package, copies of one layer take their places when a module gets the
    ModuleList or Sequential that holds them, as torch.nn.TransformerEncoder does: number, depth, and first values if
    nothing has written to the weights. A depth that arguments gave stays, unless it is the list's length. Schemes that
    work between layers, too (dlcl, resi-dual, mhc, …) need this package's stack. torch.nn's stacks want a scheme's last
    norm as `norm`; in other modules it is theirs to add.

    Shapes: src (B, T, d_model) with `batch_first`, (T, B, d_model) without, or (T, d_model); the same out.
    Errors: InputError for unknown names and options, for masks of another shape, and in `forward` where the scheme asks
    for a depth or a number that nobody gave, for parts of a stack, or for a norm after it.
    Source: Vaswani et al. 2017; each scheme's in `normformer_rs.tables()`.
    """

    kinds = ("self-attention", "feed-forward")
    attentions = ("self_attn",)

    def _depths(self, encoder_layers: int | None, decoder_layers: int | None) -> dict[str, Any]:
        layers = 1 if encoder_layers is None else encoder_layers
        if decoder_layers is None:  # one stack, which Rust calls a decoder alone
            return {"architecture": "decoder-only", "decoder_layers": layers}
        return {"architecture": "encoder-decoder", "encoder_layers": layers, "decoder_layers": decoder_layers}

    @leaf
    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        alpha_t: Tensor | None = None,
        others: tuple[Tensor, ...] | None = None,
    ) -> Any:
        """The layer's output. Masks as in torch.nn. A stack passes `alpha_t` if the scheme grows, and `others`, the
        streams beside x, if layers have several: the result is then (output, others)."""

        def attend(x: Tensor) -> Tensor:
            masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask, "is_causal": is_causal}
            return self.self_attn(x, x, x, need_weights=False, **masks)[0]

        return self._run(src, [attend], self._padding(src, src_key_padding_mask), alpha_t, others)


class TransformerDecoderLayer(Layer):
    """Self-attention, attention to the encoder's output, and feed-forward, each in a residual connection:
    torch.nn.TransformerDecoderLayer with any norm, scheme and initialisation.

    Keys and values of the attention to the encoder read its output as it is: only the query stream is normed.

    Args, parameters, errors: as `TransformerEncoderLayer`; encoder_layers=None: as many as the decoder has.
    Shapes: tgt (B, T, d_model) and memory (B, S, d_model) with `batch_first`; (B, T, d_model) out.
    """

    kinds = KINDS
    attentions = ("self_attn", "multihead_attn")

    def _depths(self, encoder_layers: int | None, decoder_layers: int | None) -> dict[str, Any]:
        layers = 1 if decoder_layers is None else decoder_layers
        others = layers if encoder_layers is None else encoder_layers
        return {"architecture": "encoder-decoder", "encoder_layers": others, "decoder_layers": layers}

    @leaf
    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
        *,
        alpha_t: Tensor | None = None,
        others: tuple[Tensor, ...] | None = None,
    ) -> Any:
        """The layer's output. Masks as in torch.nn. A stack passes `alpha_t` if the scheme grows, and `others`, the
        streams beside x, if layers have several: the result is then (output, others)."""

        def attend(x: Tensor) -> Tensor:
            masks = {"attn_mask": tgt_mask, "key_padding_mask": tgt_key_padding_mask, "is_causal": tgt_is_causal}
            return self.self_attn(x, x, x, need_weights=False, **masks)[0]

        def attend_memory(x: Tensor) -> Tensor:
            masks = {
                "attn_mask": memory_mask,
                "key_padding_mask": memory_key_padding_mask,
                "is_causal": memory_is_causal,
            }
            return self.multihead_attn(x, memory, memory, need_weights=False, **masks)[0]

        padding_mask = self._padding(tgt, tgt_key_padding_mask)
        return self._run(tgt, [attend, attend_memory], padding_mask, alpha_t, others)
