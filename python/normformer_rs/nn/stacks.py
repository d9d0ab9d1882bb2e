"""Stacks of layers, and the whole Transformer, with torch.nn's interface."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import TransformerConfig
from ..declarations.declared import Change, Combine, Mixing, NormAt, parts_of
from ..errors import InputError
from . import mixing
from .build import LEARNED, install, make, reset, reset_module, write
from .foreign import draw_xavier
from .generators import drawn_apart
from .init import refuse_computed
from .interpreter import KeptTensors, apply_changes, apply_norm, start
from .layer import Activation, Layer
from .layers import TransformerDecoderLayer, TransformerEncoderLayer
from .place import Place, count_of_layers
from .profiling import begin_stack
from .sharding import mark_drawn
from .step_hooks import Growing
from .tracing import leaf

_BEGIN, _END, _MIXING = range(10, 13)
"""The `part` of a stack's own calls of `install`. Those of its layers count from 0 and are below 10."""


class Sums(nn.Module):
    """Learned sums of all outputs so far (Wang et al. 2019; Pagliardini et al. 2024).

    Row l of `weight` has the factors of y_0 (the embedding) to y_l (the output of layer l). Its sum is the input of
    layer l + 1; the last row's sum is the stack's output. With `skips_first` the first layer reads y_0 itself.

    If the scheme declares norms, `norms["l"]` applies to y_l or, with `on_sums`, to row l's sum.
    """

    has_own_values = True

    def __init__(self, declared: Combine, place: Place, factory: Mapping[str, Any], bias: bool) -> None:
        super().__init__()
        self.on_sums, self.skips_first = declared.on_sums, declared.skips_first
        # `first` declares the initial values of `weight`.
        self.first, self.weight = declared.weight, make(declared.weight, place, factory)
        vars(self)[LEARNED] = {"weight": declared.weight.sums_over}
        # The declared name "combine.norms.3" becomes the key "3".
        norms = {norm.name.rsplit(".", 1)[1]: make(norm, place, factory, bias) for norm in declared.norms}
        self.norms = nn.ModuleDict(norms)
        mark_drawn(self)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets the weights and the norms to their initial values."""
        with drawn_apart(self.weight.device, "sums"):
            write(self.first, self.weight)
            mark_drawn(self)
            for norm in self.norms.values():
                reset_module(norm)

    def forward(self, y: Tensor, outputs: list[Tensor], padding_mask: Tensor | None) -> Tensor:
        """Appends output y to the earlier `outputs`, and returns the next layer's input."""
        row = len(outputs)

        def normed(x: Tensor) -> Tensor:
            """Returns N(x) if the scheme declares a norm for this row, otherwise x."""
            return apply_norm(self.norms[str(row)], x, padding_mask) if str(row) in self.norms else x

        outputs.append(y if self.on_sums else normed(y))
        if self.skips_first and row == 0:
            return y
        weights = self.weight[row, : row + 1].to(y.dtype)
        with mixing.without_autocast(y.device.type):  # the residual stream keeps its type
            total = torch.stack(outputs, -1) @ weights
        return normed(total) if self.on_sums else total


class Stack(Growing):
    """The base class of encoder and decoder: layers, connected as the residual scheme declares, and the scheme's
    end."""

    place: Place | None
    norm: nn.Module | None
    combine: Sums | None
    streams: tuple[NormAt | None, ...] = ()
    """The norm at the end of each stream beside x."""
    begin: tuple[Change, ...] = ()
    mixing: Mixing | None = None
    """The way in which the output is read from the layers' tensors; None if it is x."""
    layers: Any
    end: tuple[Change, ...]
    has_own_values = True

    def __init__(self, layer: nn.Module, num_layers: int, norm: nn.Module | None) -> None:
        super().__init__()
        num_layers = count_of_layers("num_layers", num_layers)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(num_layers))
        self.num_layers, self.norm, self.place, self.end = num_layers, norm, None, ()

    def settle(self, config: TransformerConfig, stack: str) -> None:
        """Moves each layer to its place in one stack of the configuration, and adds the scheme's own parts of the
        stack."""
        first: Any = self.layers[0]
        declared = (place := Place(config, stack)).declared
        weight = first.linear1.weight
        factory = {"device": weight.device, "dtype": weight.dtype}
        for i, layer in enumerate(self.layers.children()):  # iterating fairseq's list would skip layers
            layer.move(Place(config, stack, i))
        # Without a named scheme, the stack ends as in torch.nn: with the given norm, or with none.
        self._extend(place, declared.end if not first.is_torchs else (), factory, first.has_norm_biases)
        for layer in self.layers.children():
            if not layer.keeps_torchs_values:
                refuse_computed(layer)
                layer.reset_parameters()

    def adopt(self, place: Place) -> None:
        """Completes a converted torch.nn stack: its layers stay, and its norm if the scheme ends with one."""
        weight, end = self.layers[0].linear1.weight, place.declared.end
        if not any(change.kind == "norm" for change in end):
            self.norm = None
        factory = {"device": weight.device, "dtype": weight.dtype}
        self._extend(place, end, factory, self.layers[0].has_norm_biases)
        self.train(self.training)

    def _extend(self, place: Place, end: tuple[Change, ...], factory: Mapping[str, Any], bias: bool) -> None:
        """Adds the scheme's own parts of the stack; an existing norm stays. `place`: the first layer's, with what
        the scheme declares; `end`: the changes after the last layer; `factory`: device and dtype; `bias`: True for
        norms with biases."""
        self.place, declared = place, place.declared
        if declared.combine is not None:
            with drawn_apart(factory["device"], "sums"):
                self.combine = Sums(declared.combine, place, factory, bias)
        for change in end:
            if change.kind != "norm" or self.norm is None:  # a norm that the caller gave replaces the scheme's
                install(self, parts_of(change), place, _END, factory=factory, bias=bias)
        end_norms = (norm for norm in declared.streams if norm is not None)
        install(self, (*parts_of(declared.begin), *end_norms), place, _BEGIN, factory=factory, bias=bias)
        install(self, parts_of(declared.mixing), place, _MIXING, factory=factory)
        self.begin, self.streams, self.mixing = declared.begin, declared.streams, declared.mixing
        self.end = tuple(change for change in end if change.kind != "norm")
        self.grow(declared.growth, factory["device"])

    def reset_parameters(self) -> None:
        """Resets the layers, the scheme's own parts of the stack, and t."""
        for module in (*self.layers.children(), self._modules.get("combine"), self.norm):
            reset_module(module)
        reset(self, parts_of(self.end), _END)
        end_norms = (norm for norm in self.streams if norm is not None)
        reset(self, (*parts_of(self.begin), *end_norms), _BEGIN)
        reset(self, parts_of(self.mixing), _MIXING)
        self.reset_growth()

    def _run(self, x: Tensor, call: Callable[..., Any], padding_mask: Tensor | None) -> Tensor:
        """Runs x through the layers by `call(layer, x, **keywords)`. Each layer gets α_t, if the scheme has a factor
        that grows during training; the other residual streams, if the scheme has several; and the tensors that earlier
        layers have kept for it."""
        begin_stack()
        kept: KeptTensors = {}
        x = apply_changes(self, self.begin, x, padding_mask, kept)
        is_by_layer = self.growth is not None and self.growth.by_layer  # then each layer has its own α_t
        alpha_t = None if is_by_layer else self.grown()
        combine, outputs = self._modules.get("combine"), []  # type: ignore[var-annotated]
        specs = () if self.place is None else self.place.declared.layers
        passes_kept = any(spec.takes or spec.leaves for spec in specs)
        has_several = bool(self.streams) or self.mixing is not None or passes_kept
        if has_several or combine is not None:
            self._refuse_changed()
        # From here, `others` has the streams beside x; a layer gets and returns kept tensors after them.
        x, others, *_ = start(self.place.declared, x) if has_several and self.place is not None else (x, ())
        for layer in self.layers:
            x = x if combine is None else combine(x, outputs, padding_mask)  # x is the last layer's output
            alpha_t = self.grown(layer.place.layer) if is_by_layer else alpha_t
            grown = {} if alpha_t is None else {"alpha_t": alpha_t}
            if has_several:
                spec = layer.place.spec
                x, others = call(layer, x, **grown, others=(*others, *(kept[name] for name in spec.takes)))
                count = len(others) - len(spec.leaves)  # the number of streams beside x
                others, newly_kept = others[:count], others[count:]
                kept |= zip(spec.leaves, newly_kept, strict=True)
            else:
                x = call(layer, x, **grown)
        x = x if combine is None else combine(x, outputs, padding_mask)
        for end_norm, stream in zip(self.streams, others):  # adds the streams beside x to x
            x = x + (stream if end_norm is None else apply_norm(getattr(self, end_norm.name), stream, padding_mask))
        x, _ = mixing.read(self.mixing, self, (x, *others))
        x = apply_changes(self, self.end, x, padding_mask, kept)
        return x if self.norm is None else apply_norm(self.norm, x, padding_mask)

    def _refuse_changed(self) -> None:
        """Raises InputError if the layers are not those for which the scheme's parts between layers were made."""
        assert self.place is not None
        # The number of each layer in the stack that it was made for. A layer without a place counts as unmoved.
        numbers = [getattr(getattr(layer, "place", None), "layer", i) for i, layer in enumerate(self.layers)]
        if numbers != [*range(self.place.depth)]:
            raise InputError(
                f'residual "{self.place.config.residual}" connects layers 0 … {self.place.depth - 1}, one after the '
                f"other, and this stack now runs {numbers}: build a stack of the new depth, and load the weights that "
                "it shares with this one"
            )


def _padding(stack: Stack, x: Tensor, mask: Tensor | None) -> Tensor | None:
    """Returns the key padding mask in x's leading shape, True at padding; None if the layers are not this package's."""
    # The wrappers of torch.compile and activation checkpointing pass attributes through.
    layers_own = getattr(stack.layers[0], "_padding", None)
    return None if layers_own is None else layers_own(x, mask)


class TransformerEncoder(Stack):
    """num_layers copies of a layer: torch.nn.TransformerEncoder with any residual scheme.

    >>> import torch
    >>> layer = TransformerEncoderLayer(16, 4, 32, batch_first=True, residual="deepnorm")
    >>> encoder = TransformerEncoder(layer, 6)
    >>> encoder(torch.zeros(2, 5, 16)).shape
    torch.Size([2, 5, 16])

    Args:
        encoder_layer: one layer; if its `residual` or `init` was named, every copy is re-initialised for its depth.
        num_layers: the number of copies.
        norm: a module after the last layer. None for no norm, as in torch.nn, or for the scheme's own (prenorm's N, …)
            if the layer's `residual` was named.
        enable_nested_tensor, mask_check: accepted and ignored; these layers have no path with nested tensors.
        decoder_layers: the depth of the decoder, for schemes whose constants depend on it; None if the encoder stands
            alone.

    A scheme's own parameters and buffers (`t`, `combine.weight`, `end_shift`, …) have the names of
    `normformer_rs.Transformer`. Errors: InputError.
    """

    def __init__(
        self,
        encoder_layer: nn.Module,
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
        *,
        decoder_layers: int | None = None,
    ) -> None:
        super().__init__(encoder_layer, num_layers, norm)
        if isinstance(encoder_layer, TransformerEncoderLayer):
            depths = encoder_layer._depths(num_layers, decoder_layers)
            stack = "encoder" if "encoder_layers" in depths else "decoder"
            self.settle(encoder_layer.place.config.replace(**depths), stack)

    @leaf
    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Returns the encoded sequence. Shapes and masks are as in torch.nn."""
        masks = {"src_mask": mask, "src_key_padding_mask": src_key_padding_mask, "is_causal": bool(is_causal)}

        def call(layer: nn.Module, x: Tensor, **grown: Any) -> Any:
            return layer(x, **masks, **grown)

        return self._run(src, call, _padding(self, src, src_key_padding_mask))


class TransformerDecoder(Stack):
    """num_layers copies of a layer: torch.nn.TransformerDecoder with any residual scheme.

    Args: as in `TransformerEncoder`; encoder_layers=None: as many as the decoder has.
    """

    def __init__(
        self,
        decoder_layer: nn.Module,
        num_layers: int,
        norm: nn.Module | None = None,
        *,
        encoder_layers: int | None = None,
    ) -> None:
        super().__init__(decoder_layer, num_layers, norm)
        if isinstance(decoder_layer, TransformerDecoderLayer):
            depths = decoder_layer._depths(encoder_layers, num_layers)
            self.settle(decoder_layer.place.config.replace(**depths), "decoder")

    @leaf
    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Returns the decoded sequence. Shapes and masks are as in torch.nn."""
        masks = {
            "tgt_mask": tgt_mask,
            "memory_mask": memory_mask,
            "tgt_key_padding_mask": tgt_key_padding_mask,
            "memory_key_padding_mask": memory_key_padding_mask,
            "tgt_is_causal": bool(tgt_is_causal),
            "memory_is_causal": memory_is_causal,
        }

        def call(layer: nn.Module, x: Tensor, **grown: Any) -> Any:
            return layer(x, memory, **masks, **grown)

        return self._run(tgt, call, _padding(self, tgt, tgt_key_padding_mask))


class Transformer(nn.Module):
    """Encoder and decoder: torch.nn.Transformer with any norm, residual scheme and initialisation.

    >>> import torch
    >>> model = Transformer(16, 4, 2, 2, 32, batch_first=True, norm="scalenorm", residual="prenorm")
    >>> model(torch.zeros(2, 5, 16), torch.zeros(2, 3, 16)).shape
    torch.Size([2, 3, 16])

    Args: torch.nn's, and by keyword those of `TransformerEncoderLayer`, and encoder_norm, decoder_norm (None: `norm`).
        residual=None is torch.nn's arrangement: `norm_first` chooses between prenorm and postnorm, and both stacks end
        with a norm; a named scheme ends its stacks as its equation says.

    With layernorm and residual=None, keys, initial values and outputs are torch.nn's. Names under `encoder.` and
    `decoder.` are those of `normformer_rs.Transformer`, which computes the same stacks from the same weights. Errors:
    InputError; RuntimeError as in torch.nn if widths or batches of src and tgt differ.
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = F.relu,
        custom_encoder: Any | None = None,
        custom_decoder: Any | None = None,
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
        **options: Any,
    ) -> None:
        super().__init__()
        arguments = (
            d_model,
            nhead,
            dim_feedforward,
            dropout,
            activation,
            layer_norm_eps,
            batch_first,
            norm_first,
            bias,
        )
        depths = {"encoder_layers": num_encoder_layers, "decoder_layers": num_decoder_layers}
        keeps_torchs = residual is None and init is None
        named = {"norm": norm, "residual": residual, **depths, **options, "device": device, "dtype": dtype}
        named["init"] = init

        def end(layer: Layer) -> nn.Module | None:
            """Returns the last norm of torch.nn's arrangement; a named scheme makes its own."""
            declared = NormAt("norm", d_model, last=True, ends_stack=True)
            factory = {"device": device, "dtype": dtype}
            return make(declared, layer.place, factory, bias) if residual is None else None

        self.encoder: Any = custom_encoder
        if custom_encoder is None:
            layer: Layer = TransformerEncoderLayer(*arguments, **named)
            self.encoder = TransformerEncoder(layer, num_encoder_layers, end(layer), decoder_layers=num_decoder_layers)
        self.decoder: Any = custom_decoder
        if custom_decoder is None:
            layer = TransformerDecoderLayer(*arguments, **named)
            self.decoder = TransformerDecoder(layer, num_decoder_layers, end(layer), encoder_layers=num_encoder_layers)
        self.d_model, self.nhead, self.batch_first, self.init = d_model, nhead, batch_first, init
        self.keeps_torchs_values = keeps_torchs or init == "torch"
        if self.keeps_torchs_values:
            for module in self.modules():
                if isinstance(module, Layer) and module.keeps_torchs_values:
                    # Setting `keeps_torchs_values` again tells the linear layers of `is_xavier`.
                    module.is_xavier, module.keeps_torchs_values = True, True
            self._reset_parameters()

    def reset_parameters(self) -> None:
        """Resets everything: as `init` says, or as in torch.nn.Transformer, with all matrices Xavier uniform."""
        for stack in (self.encoder, self.decoder):
            reset_module(stack)
        if self.keeps_torchs_values:
            self._reset_parameters()

    def _reset_parameters(self) -> None:
        draw_xavier(self)

    @leaf
    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Returns the decoded sequence, in tgt's shape. Shapes and masks are as in torch.nn."""
        batch = 0 if self.batch_first else 1  # the dimension of sentences
        if src.dim() == 3 and src.shape[batch] != tgt.shape[batch]:
            raise RuntimeError(
                f"src and tgt must have the same number of sentences; got {src.shape[batch]} and {tgt.shape[batch]}"
            )
        if src.shape[-1] != self.d_model or tgt.shape[-1] != self.d_model:
            raise RuntimeError(
                f"src and tgt must be d_model = {self.d_model} wide; got {src.shape[-1]}, {tgt.shape[-1]}"
            )
        memory = self.encoder(src, src_mask, src_key_padding_mask, src_is_causal)
        masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, tgt_is_causal, memory_is_causal)
        return self.decoder(tgt, memory, *masks)

    @staticmethod
    def generate_square_subsequent_mask(
        sz: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Returns a mask (sz, sz): −∞ above the diagonal, 0 elsewhere."""
        return nn.Transformer.generate_square_subsequent_mask(sz, device, dtype)
