"""Transformer layers with torch.nn's interface, and with any norm, residual scheme and initialisation."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..config import ATTENTION, TransformerConfig, unknown
from ..declarations.declared import passes
from ..errors import InputError
from .build import install, reset, reset_module
from .dropout import Draw
from .foreign import asks
from .generators import move_on
from .interpreter import KeptTensors, Streams, begin, close
from .layer import KINDS, Layer, attended, layer_number
from .place import Place, configure
from .profiling import follow
from .step_hooks import Growing
from .tracing import leaf


class Residual(Growing):
    """Wraps any module in a residual connection by a scheme: x⁺ = after(α⊙skip(x) + β⊙drop(branch(F(before(x))))).

    >>> import torch
    >>> block = Residual(torch.nn.Linear(8, 8), 8, scheme="deepnorm", norm="scalenorm", layers=6)
    >>> block(torch.zeros(2, 8)).shape
    torch.Size([2, 8])

    Args:
        sublayer: F. The Residual passes on further arguments. If F returns a tuple, its first item is F(x), and the
            Residual returns the others after x⁺.
        d_model: the width of x.
        scheme, norm: names from `normformer_rs.tables()`.
        kind: the kind of sublayer that F is, for schemes that treat them differently: self-attention, cross-attention,
            feed-forward.
        dropout: the rate p on F's output, from 0 to 1. Below 1 it is rounded to a multiple of 1/65,536.
        layer, layers: this layer's number from 0, and the number of layers. Schemes whose constants depend on them need
            them.
        norm_eps: the norm's ε; None for its own default.
        options: the options of `TransformerConfig` that the scheme or norm has (`branchnorm_steps`, `layerscale_init`,
            …).

    Modules and parameters are `norm1`, `post_norm1`, `residual_scale1`, `branch_scale`, … (the number is the sublayer's
    in its layer). The caller adds a norm that the scheme declares before the first layer or after the last (prenorm's
    N).

    Shapes: x (…, d_model) → the same. Errors: InputError for unknown names, and for schemes that also change things
    inside the sublayer or between layers (subln, normformer, r-fixup, ln-scaling, an attention of hybridnorm or olmo2,
    dlcl, denseformer, resi-dual, attnres, mhc, hyper-connections, b2t's feed-forward): those need a
    TransformerEncoderLayer or a stack.
    """

    place: Place
    is_told = True
    """True if the caller gave the layer's number, or the number does not matter because there is one layer."""

    def __init__(
        self,
        sublayer: nn.Module,
        d_model: int,
        *,
        scheme: str = "prenorm",
        norm: str = "layernorm",
        kind: Literal["self-attention", "cross-attention", "feed-forward"] = "feed-forward",
        dropout: float = 0.0,
        layer: int | None = None,
        layers: int | None = None,
        norm_eps: float | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise InputError(unknown("kind", kind, KINDS))
        attention_parts = ("positions", *ATTENTION, "attention_scale", "attention_multiplier")
        defaults = {field.name: field.default for field in TransformerConfig.FIELDS}
        if refused := [name for name in attention_parts if name in options and options[name] != defaults[name]]:
            raise InputError(f"{refused[0]} is a part of a layer, and a Residual leaves F as it is: leave it out")
        depth = 1 if layers is None else layers
        depths = {"decoder_layers": depth} if kind != "cross-attention" else dict.fromkeys(_DEPTHS, depth)
        architecture = "decoder-only" if kind != "cross-attention" else "encoder-decoder"
        configured = {"norm": norm, "residual": scheme, "norm_eps": norm_eps, "architecture": architecture, **depths}
        # F may be any module, so d_ff and heads are only valid numbers.
        config = configure(options, d_model=d_model, d_ff=d_model, heads=1, **configured)
        self.place = Place(config, "decoder", layer_number(layer or 0, depth))
        # These are the kinds of the sublayers of one layer, in order.
        names = ("self-attention", "feed-forward") if architecture == "decoder-only" else KINDS
        self.number = names.index(kind)
        self.declared = self.place.sublayers[self.number]
        scheme_spec = self.place.declared
        joins_layers = scheme_spec.combine or scheme_spec.streams or scheme_spec.mixing
        works_between = joins_layers or self.place.spec.begin or passes(self.declared.outside)
        if self.declared.inside or works_between:
            where = "inside the sublayer" if self.declared.inside else "between sublayers"
            raise InputError(
                f"{config.residual} also works {where}, out of a Residual's reach: use TransformerEncoderLayer in a "
                "TransformerEncoder, or a scheme that stays around the sublayer (prenorm, deepnorm, sandwich, …)"
            )
        self.is_told = layers is not None and (layer is not None or layers == 1)
        if not self.is_told:
            needed = asks(config, "decoder", draws=False, only=self.number) or ""
            # Without `layers` both are unknown; with it, only the number.
            lacks_one = needed != "" if layers is None else "number" in needed
            if lacks_one:
                raise InputError(
                    f'residual "{config.residual}" asks for {needed}: give layers=, the depth, and layer=, from 0'
                )
        self.sublayer, self.dropout = sublayer, nn.Dropout(dropout)
        install(self, self.declared.around(), self.place, factory={"device": device, "dtype": dtype})
        move_on()
        self.grow(self.place.declared.growth, device)

    def reset_parameters(self) -> None:
        """Resets the scheme's norms, gains and t, and F with its own `reset_parameters`."""
        reset(self, self.declared.around())
        move_on()
        reset_module(self.sublayer)
        self.reset_growth()

    @leaf
    def forward(self, x: Tensor, *args: Any, padding_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Returns x⁺. `padding_mask`: for norms with statistics; x's shape without the width, True at padding."""
        is_told = self.is_told or not self.place.declared.is_profiled  # as `follow` defines it
        follow(self.place.layer, self.number, is_told)
        streams = Streams(x)
        f, *rest = _tuple(self.sublayer(begin(self, self.declared, streams, padding_mask), *args, **kwargs))
        step: dict[str, Any] = {"alpha_t": self.grown(self.place.layer), "padding_mask": padding_mask}
        x_plus = close(self, self.declared, streams, f, self.dropout, Draw(x.device), **step).x
        return (x_plus, *rest) if rest else x_plus

    def extra_repr(self) -> str:
        return f"scheme={self.place.config.residual!r}, norm={self.place.declared.norm!r}"


def _tuple(output: Any) -> tuple[Any, ...]:
    """Returns a sublayer's output as a tuple, which begins with F(x)."""
    return output if isinstance(output, tuple) else (output,)


_DEPTHS = ("encoder_layers", "decoder_layers")
"""The options with the depths of the two stacks."""


class TransformerEncoderLayer(Layer):
    """Self-attention and feed-forward, each in a residual connection: torch.nn.TransformerEncoderLayer with any norm,
    scheme and initialisation.

    >>> import torch
    >>> layer = TransformerEncoderLayer(16, 4, 32, batch_first=True, norm="scalenorm", residual="prenorm")
    >>> layer(torch.zeros(2, 5, 16)).shape
    torch.Size([2, 5, 16])

    Args: torch.nn's. `layer_norm_eps` is any norm's ε; a norm without one accepts only 1e-5. `dropout` lies in [0, 1),
        although torch.nn also accepts 1. All rates but attention's are rounded to multiples of 1/65,536. By keyword:
        norm, residual, init: names from `normformer_rs.tables()`; `residual` may be a mixture by layers
            (`postnorm*1/4,prenorm`). residual=None: postnorm, or prenorm if `norm_first`, with torch.nn's initial
            values unless `init` is named. init=None: the initialisation that goes with the scheme; init="torch":
            torch.nn's.
        layer: this layer's number in its stack, from 0. A TransformerEncoder of this package sets it.
        encoder_layers, decoder_layers: the depths of the model, for schemes whose constants depend on them. Without
            decoder_layers the encoder stands alone, as in BERT. A TransformerEncoder of this package sets them.
        activation: torch.nn's, or by name a modern one of the training loop: `silu`, `relu2`, and `swiglu` and `geglu`,
            which have a third matrix, `linear3` (Shazeer 2020, eqs 5 and 6).
        options: the options of `TransformerConfig` that the scheme or norm has (`branchnorm_steps`, `normformer_mode`,
            …), and `attention_dropout`, `activation_dropout` (None: `dropout`); `kv_heads` (grouped queries),
            `positions="rotary"` with `rope_theta` for self-attention, `linear_biases=False`; `qk_norm` and its options,
            `qk_l2norm`, `v_norm`; `output_gate`, `sinks`, `score_softcap`; `parametrisation`, `base_width`,
            `base_depth`, `depth_alpha`, `attention_scale` or `attention_multiplier`, and `residual_multiplier`. The
            caller applies the factors of embeddings and logits, and `normformer_rs.param_groups` those of rates.

    Parameters and buffers have torch.nn's names; a scheme's own have those of `normformer_rs.Transformer`. With
    layernorm, state dicts are torch.nn's in both directions. Dropout masks follow torch's generator, but are not
    torch.nn's.

    Outside a TransformerEncoder of this package, in torch.nn.TransformerEncoder or in a list of another module, a layer
    whose scheme depends on its number or the depth needs them: from `place_layers`, or from `layer` and
    `encoder_layers`. The caller adds a scheme's last norm there, in torch.nn's stacks as `norm`. Schemes that also work
    between layers (dlcl, resi-dual, mhc, …) need this package's stack.

    Shapes: src (B, T, d_model) with `batch_first`, (T, B, d_model) without, or (T, d_model); the same out.
    Errors: InputError for unknown names and options, for masks of another shape, and in `forward` if the scheme needs a
    depth or a number that was not given, parts of a stack, or a norm after it.
    Source: Vaswani et al. 2017; each scheme's in `normformer_rs.tables()`.
    """

    kinds = ("self-attention", "feed-forward")
    attentions = ("self_attn",)

    def _depths(self, encoder_layers: int | None, decoder_layers: int | None) -> dict[str, Any]:
        """Returns the configuration's architecture and depths. Without `decoder_layers` the encoder stands alone."""
        layers = 1 if encoder_layers is None else encoder_layers
        if decoder_layers is None:  # one stack, which Rust calls decoder-only
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
        """Returns the layer's output. Masks are as in torch.nn. A stack passes `alpha_t` if the scheme grows. If the
        scheme has several tensors, the stack also passes `others`: the streams beside x, and the tensors that earlier
        layers have kept for this one. The result is then (output, others), with the tensors that this layer keeps."""

        def attend(x: Tensor, kept: KeptTensors) -> Tensor:
            masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask, "is_causal": is_causal}
            return attended(self, "self_attn", x, x, kept, **masks)

        return self._run(src, [attend], self._padding(src, src_key_padding_mask), alpha_t, others)


class TransformerDecoderLayer(Layer):
    """Self-attention, attention to the encoder's output, and feed-forward, each in a residual connection:
    torch.nn.TransformerDecoderLayer with any norm, scheme and initialisation.

    Keys and values of the attention to the encoder are its output without a norm: only the query stream is normed.

    Args, parameters, errors: as in `TransformerEncoderLayer`; encoder_layers=None: the decoder's number.
    Shapes: tgt (B, T, d_model) and memory (B, S, d_model) with `batch_first`; (B, T, d_model) out.
    """

    kinds = KINDS
    attentions = ("self_attn", "multihead_attn")

    def _depths(self, encoder_layers: int | None, decoder_layers: int | None) -> dict[str, Any]:
        """Returns the configuration's architecture and depths. Without `encoder_layers`, both depths are equal."""
        layers = 1 if decoder_layers is None else decoder_layers
        encoder_depth = layers if encoder_layers is None else encoder_layers
        return {"architecture": "encoder-decoder", "encoder_layers": encoder_depth, "decoder_layers": layers}

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
        """Returns the layer's output. Masks are as in torch.nn. A stack passes `alpha_t` if the scheme grows. If the
        scheme has several tensors, the stack also passes `others`: the streams beside x, and the tensors that earlier
        layers have kept for this one. The result is then (output, others), with the tensors that this layer keeps."""

        def attend(x: Tensor, kept: KeptTensors) -> Tensor:
            masks = {"attn_mask": tgt_mask, "key_padding_mask": tgt_key_padding_mask, "is_causal": tgt_is_causal}
            return attended(self, "self_attn", x, x, kept, **masks)

        def attend_memory(x: Tensor, kept: KeptTensors) -> Tensor:
            masks = {
                "attn_mask": memory_mask,
                "key_padding_mask": memory_key_padding_mask,
                "is_causal": memory_is_causal,
            }
            return attended(self, "multihead_attn", x, memory, kept, **masks)

        padding_mask = self._padding(tgt, tgt_key_padding_mask)
        return self._run(tgt, [attend, attend_memory], padding_mask, alpha_t, others)
