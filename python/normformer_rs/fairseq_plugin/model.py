"""The plug-in's architectures: fairseq's Transformer with this package's layers, which work on packed rows."""

from collections.abc import Callable
from typing import Any, ClassVar

import fairseq.utils
import torch
import torch.nn.functional as F
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import FairseqLanguageModel, register_model, register_model_architecture
from fairseq.models.transformer import (
    TransformerConfig as FairseqConfig,
)
from fairseq.models.transformer import (
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModelBase,
)
from fairseq.modules import FairseqDropout
from hydra.core.config_store import ConfigStore
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from normformer_rs import _core
from normformer_rs.config import TransformerConfig
from normformer_rs.declarations.declared import NormAt
from normformer_rs.errors import InputError
from normformer_rs.formats.convert import VERSION, check_version, configure, from_fairseq_names
from normformer_rs.nn import TransformerDecoderLayer, TransformerEncoderLayer, profile, set_num_updates
from normformer_rs.nn.build import make
from normformer_rs.nn.init import draw_table
from normformer_rs.nn.interpreter import KeptTensors, apply_norm
from normformer_rs.nn.layers import Layer
from normformer_rs.nn.norms import FIXNORM_EPS
from normformer_rs.nn.place import OWN
from normformer_rs.nn.stacks import Stack

from .options import SHAPES, LanguageModelOptions, TranslationOptions, defaults, plain, shape
from .packed import Packed, RowAttention, Rows, Sight, Step, Watched


class SelfLayer(TransformerEncoderLayer):
    """A layer of an encoder, or of a decoder without encoder."""

    attention_class = RowAttention
    self_attn: Any

    def forward(self, x: Tensor, own: Sight, **travelling: Any) -> Any:  # type: ignore[override]
        """Returns the output (N, d) for the rows x (N, d), which attend to `own`. `travelling` holds what the residual
        scheme hands from layer to layer: the factor `alpha_t` that grows in training, and `others`, the other residual
        streams and kept tensors. If `others` is given, the result is (output, others for the next layer)."""

        def attend(q: Tensor, kept: KeptTensors) -> Tensor:
            """Returns self-attention for the input q. `kept` collects tensors for later layers."""
            return self.self_attn(q, own, kept)

        return self._run(x, [attend], own.pad_mask, **travelling)


class CrossLayer(TransformerDecoderLayer):
    """A layer of a decoder that attends to an encoder's output."""

    attention_class = RowAttention
    self_attn: Any
    multihead_attn: Any

    def forward(self, x: Tensor, own: Sight, memory: Sight, **travelling: Any) -> Any:  # type: ignore[override]
        """Returns the output (N, d) for the rows x (N, d), which attend to `own` and then, in the encoder's output, to
        `memory`. `travelling`: as in `SelfLayer.forward`."""

        def attend(q: Tensor, kept: KeptTensors) -> Tensor:
            return self.self_attn(q, own, kept)

        def attend_memory(q: Tensor, kept: KeptTensors) -> Tensor:
            return self.multihead_attn(q, memory, kept)

        return self._run(x, [attend, attend_memory], own.pad_mask, **travelling)


class FixNormEmbedding(nn.Embedding):
    """An embedding whose rows are scaled to length one: W/max(‖row‖₂, 1e-12)."""

    def forward(self, tokens: Tensor) -> Tensor:
        return F.normalize(super().forward(tokens), dim=-1, eps=FIXNORM_EPS)


class _Side(Stack):
    """The common part of encoder and decoder: a fairseq stack with this package's layers and residual scheme.

    It is a mixin that comes before fairseq's class. A constructor calls that of fairseq's class first, then `finish`.
    """

    name: str
    # The following attributes are set by fairseq's classes.
    cfg: Any
    layers: Any
    dictionary: Any
    padding_idx: int
    embed_tokens: Any
    embed_scale: float
    embed_positions: Any
    layernorm_embedding: Any
    dropout_module: Any
    output_projection: Any

    def build_layer(self, kind: type[Layer], cfg: Any) -> Layer:
        """Returns a new layer of the class `kind`. `settle` sets its place in the stack later."""
        config = cfg.stacks[self.name]
        # These options are passed below in another form, or not at all.
        passed_below = (*OWN, "positions", "encoder_layers", "decoder_layers")
        options = {key: value for key, value in config.asdict().items() if key not in passed_below}
        depths = {"decoder_layers": config.decoder_layers}
        if config.architecture == "decoder-only":  # layers of `nn` treat a single stack as an encoder without decoder
            depths = {"encoder_layers": config.decoder_layers}
        elif self.name == "encoder" or kind is CrossLayer:
            depths["encoder_layers"] = config.encoder_layers
        activation = fairseq.utils.get_activation_fn(cfg.activation_fn)
        named: dict[str, Any] = {"d_model": config.d_model, "nhead": config.heads, "dim_feedforward": config.d_ff}
        named |= {"dropout": config.dropout, "activation": activation, "layer_norm_eps": config.norm_eps}
        named |= {"norm": config.norm, "residual": config.residual, "init": "torch"}  # `draw` re-initialises later
        return kind(**named, **depths, **options)

    def finish(self, cfg: Any) -> None:
        """Adds the parts of the residual scheme that belong to the whole stack. It is called after fairseq's
        constructor."""
        config: TransformerConfig = cfg.stacks[self.name]
        self.norm, self.place, self.end = None, None, ()  # `settle` sets them
        self.settle(config, self.name)
        assert self.place is not None
        declared = self.place.declared
        reads_other_layers = any(layer.takes for layer in declared.layers) or declared.combine is not None
        needs_all = reads_other_layers or declared.mixing is not None or declared.is_profiled
        # With --layerdrop fairseq makes a list of its own class, which leaves layers out at random.
        if needs_all and type(self.layers) is not nn.ModuleList:
            raise InputError(f"--residual {config.residual} needs every layer's output: leave --layerdrop out")
        if self.layernorm_embedding is not None:
            self.layernorm_embedding = make(NormAt("layernorm_embedding", config.d_model), self.place, {})
        if config.embedding_dropout is not None:
            self.dropout_module = FairseqDropout(config.embedding_dropout, module_name=type(self).__name__)

    def draw(self) -> None:
        """Initialises the layers and embeddings of this side, as the option `init` says. Embeddings that were loaded
        from a file stay."""
        assert self.place is not None
        config = self.place.config
        for layer in self.layers.children():
            layer.draw()
        is_shared = config.tie_embeddings == "all"  # the encoder draws the table that both sides share
        if not getattr(self.cfg, self.name).embed_path and not (is_shared and self.name == "decoder"):
            table = {"encoder": "source_embedding", "decoder": "target_embedding"}[self.name]
            draw_table(self.embed_tokens.weight, "embedding" if is_shared else table, config)
        if self.name == "decoder" and config.tie_embeddings == "none":
            draw_table(self.output_projection.weight, "output_projection", config)

    def embed(self, tokens: Tensor, positions: Tensor | None, pad_mask: Tensor | None) -> Tensor:
        """Returns dropout(N(√d·W[token] + position)), (N, d), for tokens (N,) and positions (N, d). N is the embedding
        norm, if there is one."""
        if self.training and self.cfg.word_dropout > 0:
            is_dropped = torch.rand(tokens.shape, device=tokens.device) < self.cfg.word_dropout
            tokens = tokens.masked_fill(is_dropped & tokens.ne(self.padding_idx), self.dictionary.unk())
        x = self.embed_scale * self.embed_tokens(tokens)
        x = x if positions is None else x + positions
        x = x if self.layernorm_embedding is None else apply_norm(self.layernorm_embedding, x, pad_mask)
        return self.dropout_module(x)

    def run(self, x: Tensor, sights: Callable[[int], tuple[Sight, ...]]) -> Tensor:
        """Returns x after all layers. `sights(i)` returns what the attentions of layer i attend to: itself, and the
        encoder's output if there is one."""
        # `children()` lists every layer. Iterating over the list itself would apply fairseq's LayerDrop, which leaves
        # some layers out.
        numbers = {layer: i for i, layer in enumerate(self._modules["layers"].children())}  # type: ignore[union-attr]

        def call(layer: Any, x: Tensor, **travelling: Any) -> Any:
            """Runs one layer; with --checkpoint-activations backward computes it again."""
            if self.cfg.checkpoint_activations and self.training:
                return checkpoint(layer, x, *sights(numbers[layer]), use_reentrant=False, **travelling)
            return layer(x, *sights(numbers[layer]), **travelling)

        return self._run(x, call, sights(0)[0].pad_mask)  # the rows of padding are the same in all layers

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> dict[str, Tensor]:
        """Replaces fairseq's method, which expects the names of fairseq's own layers; here the model renames them. A
        shared embedding that an old file stores only once is added under its second name. `name` is the prefix of this
        side's tensors."""
        assert self.place is not None
        projection, table = f"{name}.output_projection.weight", f"{name}.embed_tokens.weight"
        if self.name == "decoder" and self.place.config.tie_embeddings != "none" and table in state_dict:
            state_dict.setdefault(projection, state_dict[table])
        return state_dict

    def make_generation_fast_(self, name: str, retain_dropout: bool = False, **options: Any) -> None:
        """Does nothing, because these layers need no preparation for generation. Errors: InputError for
        --retain-dropout."""
        if retain_dropout:
            raise InputError("--retain-dropout: dropout is part of these layers' operators, and evaluation has none")

    def set_num_updates(self, num_updates: int) -> None:
        """Sets t of branchnorm and prepbn to the number of the next update. fairseq passes the number of updates made
        so far."""
        set_num_updates(self, num_updates + 1)


class Encoder(_Side, TransformerEncoderBase):
    """fairseq's encoder with this package's layers: embedding, positions, layers."""

    name = "encoder"

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding) -> None:
        TransformerEncoderBase.__init__(self, cfg, dictionary, embed_tokens)
        self.finish(cfg)

    def build_encoder_layer(self, cfg: Any) -> Layer:
        return self.build_layer(SelfLayer, cfg)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
    ) -> dict[str, list[Tensor]]:
        """Returns the same dictionary as fairseq's encoder, but with no hidden states of the layers."""
        padding = src_tokens.eq(self.padding_idx)
        rows = Rows.of(padding)
        positions = None if self.embed_positions is None else rows.pack(self.embed_positions(src_tokens))
        x = self.embed(rows.pack(src_tokens), positions, rows.pad_mask)
        x = self.run(x, lambda _: (Packed(rows),))  # in every layer the rows attend to each other
        return {
            "encoder_out": [rows.unpack(x).transpose(0, 1)],  # (S, B, d)
            "encoder_padding_mask": [padding],
            "encoder_embedding": [],
            "encoder_states": [],
            "fc_results": [],
            "src_tokens": [],
            "src_lengths": [rows.lengths.to(torch.int32).unsqueeze(1)],
        }


class Decoder(_Side, TransformerDecoderBase):
    """fairseq's decoder with this package's layers: embedding, positions, layers, output projection."""

    name = "decoder"
    vocab_mask: Tensor | None
    get_incremental_state: Any
    set_incremental_state: Any

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding, no_encoder_attn: bool = False) -> None:
        TransformerDecoderBase.__init__(self, cfg, dictionary, embed_tokens, no_encoder_attn)
        self.finish(cfg)
        self.begins_with_bos = cfg.stacks[self.name].decoder_start == "bos"
        self.register_buffer("vocab_mask", torch.ones(len(dictionary), dtype=torch.uint8) if cfg.vocab_mask else None)

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> Layer:
        """Returns a layer with attention to an encoder, or without it for a language model."""
        return self.build_layer(SelfLayer if no_encoder_attn else CrossLayer, cfg)

    def build_output_projection(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding) -> None:
        """Makes fairseq's output projection, and gives it a bias if the option `output_bias` asks for one."""
        super().build_output_projection(cfg, dictionary, embed_tokens)
        if cfg.stacks[self.name].output_bias:
            self.output_projection.bias = nn.Parameter(torch.zeros(len(dictionary)))

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None = None,
        incremental_state: dict[str, Any] | None = None,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Returns the features (B, T, d), and a dictionary whose `attn` holds, in evaluation, the attention weights of
        one layer to the source, (B, T, S): the mean over the first `alignment_heads` heads. That layer is
        `alignment_layer`, by default the last. With `full_context_alignment` self-attention is not causal."""
        memory = encoder_out["encoder_out"][0].transpose(0, 1) if encoder_out is not None else None  # (B, S, d)
        padding = encoder_out["encoder_padding_mask"][0] if encoder_out is not None else None  # (B, S)
        watched = len(self.layers) - 1 if alignment_layer is None else alignment_layer
        if incremental_state is not None:
            return self._step(prev_output_tokens, incremental_state, memory, padding, watched, alignment_heads)
        rows = Rows.of(prev_output_tokens.eq(self.padding_idx))
        positions = None if self.embed_positions is None else rows.pack(self.embed_positions(prev_output_tokens))
        tokens = rows.pack(prev_output_tokens)
        if self.begins_with_bos:
            tokens = self._begun(tokens, rows)
        own = Packed(rows, causal=not full_context_alignment)
        x = self.embed(tokens, positions, rows.pad_mask)
        if memory is None or padding is None:
            return rows.unpack(self.run(x, lambda _: (own,))), _attention_output(weights=None, heads=None)
        memory_rows = Rows.of(padding)
        cross = Packed(rows, memory=memory_rows.pack(memory), memory_rows=memory_rows)
        recording = Watched(cross)  # attends as `cross` does, and keeps the weights

        def sights(layer: int) -> tuple[Sight, ...]:
            return own, recording if layer == watched and not self.training else cross

        x = self.run(x, sights)
        return rows.unpack(x), _attention_output(recording.weights, alignment_heads)

    def _begun(self, tokens: Tensor, rows: Rows) -> Tensor:
        """Returns the packed tokens with BOS instead of the EOS with which fairseq begins a sentence. If a sentence
        begins with a language's tag, the tag stays."""
        starts, lengths = rows.spans().unbind(1)
        # An empty sentence has no first token; its start is the next sentence's.
        is_first = torch.zeros_like(tokens, dtype=torch.bool).index_fill(0, starts[lengths > 0], True)
        return tokens.masked_fill(is_first & tokens.eq(self.dictionary.eos()), self.dictionary.bos())

    def _step(
        self,
        tokens: Tensor,
        incremental_state: dict[str, Any],
        memory: Tensor | None,
        memory_padding: Tensor | None,
        watched: int,
        alignment_heads: int | None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Does one step of decoding, and returns the outputs of `extract_features` for the newest of `tokens` (B, T).
        `memory` is the encoder's output (B, S, d), `watched` the layer whose attention weights are returned."""
        # At the first step fairseq has no cache yet, and gets the one that the layers fill.
        cache = self.get_incremental_state(incremental_state, "kept") or {}
        self.set_incremental_state(incremental_state, "kept", cache)
        newest = tokens[:, -1:]
        padding, positions = newest.eq(self.padding_idx), None
        if self.embed_positions is not None:
            positions = self.embed_positions(tokens, incremental_state=incremental_state)[:, -1]
        recorded: list[Step] = []

        def sights(layer: int) -> tuple[Sight, ...]:
            """Returns what a layer's newest tokens attend to: the tokens so far, then the encoder's output."""
            own = Step(cache, f"{layer}.own.", padding, pad_mask=padding[:, 0])
            if memory is None or memory_padding is None:
                return (own,)
            cross = Step(cache, f"{layer}.memory.", memory_padding, memory=memory)
            if layer == watched:
                recorded.append(cross)
            return own, cross

        if self.begins_with_bos and tokens.shape[1] == 1:  # the newest token is the first
            newest = newest.masked_fill(newest.eq(self.dictionary.eos()), self.dictionary.bos())
        x = self.run(self.embed(newest[:, 0], positions, padding[:, 0]), sights)
        return x.unsqueeze(1), _attention_output(recorded[-1].weights if recorded else None, alignment_heads)

    def reorder_incremental_state(self, incremental_state: dict[str, Any], new_order: Tensor) -> None:
        """Reorders the cached tensors of all beams by `new_order`. Names with ".own." belong to keys and values of the
        target. Those of the source are the same for all beams of a sentence, so they are reordered only if the number
        of beams changes."""
        cache = self.get_incremental_state(incremental_state, "kept") or {}
        for name, tensor in cache.items():
            if ".own." in name or len(tensor) != len(new_order):
                cache[name] = tensor.index_select(0, new_order)

    def output_layer(self, features: Tensor) -> Tensor:
        """Returns the logits (B, T, V) for features (B, T, d)."""
        assert self.place is not None
        config, projection = self.place.config, self.output_projection
        if config.fixnorm and config.tie_embeddings != "none":  # the shared table's rows have length one here, too
            return F.linear(features, F.normalize(projection.weight, dim=-1, eps=FIXNORM_EPS), projection.bias)
        return projection(features)


_NEVER = -1e4
"""The logit of entries outside the target vocabulary."""


def _attention_output(weights: Tensor | None, heads: int | None) -> dict[str, Any]:
    """Returns the second output of fairseq's decoder: a dictionary with the attention weights, averaged over the first
    `heads` heads (None: over all)."""
    return {"attn": [None if weights is None else weights[:, :heads].mean(1)], "inner_states": []}


class _Model:
    """The common part of the translation model and the language model."""

    decoder: Decoder
    training: bool
    options: ClassVar[Any]
    _accepts_parts = False
    """True while `load_state_dict` loads a state that may have only a part of the tensors."""

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Adds the architecture's flags to the parser."""
        # Without defaults here, `shape` can see which flags were given, and set the others.
        gen_parser_from_dataclass(parser, cls.options(), delete_default=True)

    @classmethod
    def build_embedding(cls, cfg: Any, dictionary: Any, embed_dim: int, path: str | None = None) -> nn.Embedding:
        """Returns fairseq's table of word vectors. With --fixnorm its class is changed, so that its rows are scaled to
        length one when it is read."""
        embedding = super().build_embedding(cfg, dictionary, embed_dim, path)  # type: ignore[misc]
        if cfg.fixnorm:
            embedding.__class__ = FixNormEmbedding
        return embedding

    def begin(self) -> None:
        """Initialises the weights. Without a GPU it also makes the process keep freed memory, because every update
        allocates tensors of the same sizes."""
        if not torch.cuda.is_available():
            _core.keep_memory()
        for side in self.children():  # type: ignore[attr-defined]
            side.draw()
        if self.decoder.place.declared.is_profiled:  # type: ignore[union-attr]
            self.register_buffer("is_profiled", torch.zeros((), dtype=torch.uint8))  # type: ignore[attr-defined]
        self.register_buffer("version", torch.tensor(VERSION))  # type: ignore[attr-defined]

    def profile_once(self, **batch: Any) -> None:
        """Sets the gains that the residual scheme computes from a batch, if it has such gains. That happens once, on
        the first training batch."""
        if not self.training or not hasattr(self, "is_profiled") or self.is_profiled:
            return
        self.is_profiled.fill_(True)
        profile(self, **batch)  # type: ignore[arg-type]

    def get_normalized_probs(self, net_output: Any, log_probs: bool, sample: Any = None) -> Tensor:
        """Returns the probabilities of the vocabulary's entries, or their logarithms. Entries outside the target
        vocabulary get the probability 0."""
        mask, (logits, *_) = self.decoder.vocab_mask, net_output
        if mask is not None:
            # −10,000 makes the probability 0 in every dtype. The score stays finite, because a prefix or a constraint
            # may force a word outside the target vocabulary.
            logits = logits.masked_fill(~mask.bool(), _NEVER)
        return (F.log_softmax if log_probs else F.softmax)(logits, dim=-1, dtype=torch.float32)

    def load_state_dict(self, state_dict: Any, strict: bool = True, model_cfg: Any = None, args: Any = None) -> Any:
        """Runs fairseq's own method. With `strict` False, as fairseq loads averages over time, the state may have only
        a part of the tensors."""
        self._accepts_parts = not strict
        try:
            return super().load_state_dict(state_dict, strict, model_cfg, args)  # type: ignore[misc]
        finally:
            self._accepts_parts = False

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Renames, in place, the tensors of a checkpoint of fairseq's own `transformer` archs. Errors: InputError for a
        checkpoint whose tensors do not have this model's names and shapes."""
        from_fairseq_names(state_dict)
        check_version(state_dict)
        state_dict["version"] = torch.tensor(VERSION)
        super().upgrade_state_dict_named(state_dict, name)  # type: ignore[misc]
        if self._accepts_parts:
            return
        own = self.state_dict()  # type: ignore[attr-defined]
        for key in [*own, *state_dict]:
            wanted, given = (tuple(tensors[key].shape) if key in tensors else "none" for tensors in (own, state_dict))
            if wanted != given:
                raise InputError(
                    f"the checkpoint is another architecture's: {key} should be {wanted}, it is {given}; give the "
                    "flags that it was trained with"
                )


@register_model("nfrs_transformer", dataclass=TranslationOptions)
class TranslationModel(_Model, TransformerModelBase):
    """The architecture nfrs_transformer: an encoder and a decoder."""

    options = TranslationOptions

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "TranslationModel":
        """Returns a new model, initialised, for the flags and the dictionaries of the task."""
        flags = plain(cfg)
        nested = _nested(flags)
        source, target = task.source_dictionary, task.target_dictionary
        sides = {"encoder": source, "decoder": target}
        nested.stacks = {name: _stack(flags, name, dictionary) for name, dictionary in sides.items()}
        model = super().build_model(nested, task)
        model.begin()
        return model

    @classmethod
    def build_encoder(cls, cfg: Any, src_dict: Any, embed_tokens: nn.Embedding) -> Encoder:
        return Encoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg: Any, tgt_dict: Any, embed_tokens: nn.Embedding) -> Decoder:
        return Decoder(cfg, tgt_dict, embed_tokens)

    def forward(self, src_tokens: Tensor, src_lengths: Any, prev_output_tokens: Tensor, **options: Any) -> Any:
        """Returns the decoder's output. On the first training batch it also sets gains that are computed from a
        batch."""
        self.profile_once(src_tokens=src_tokens, src_lengths=src_lengths, prev_output_tokens=prev_output_tokens)
        encoder_out = self.encoder(src_tokens, src_lengths)
        return self.decoder(prev_output_tokens, encoder_out=encoder_out, src_lengths=src_lengths, **options)


@register_model("nfrs_transformer_lm", dataclass=LanguageModelOptions)
class LanguageModel(_Model, FairseqLanguageModel):
    """The architecture nfrs_transformer_lm: a decoder without encoder."""

    options = LanguageModelOptions

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "LanguageModel":
        """Returns a new model, initialised, for the flags and the dictionaries of the task."""
        flags = plain(cfg)
        if flags.max_target_positions is None:
            flags.max_target_positions = flags.tokens_per_sample
        nested, dictionary, input_dictionary = _nested(flags), task.target_dictionary, task.source_dictionary
        nested.stacks = {"decoder": _stack(flags, "decoder", dictionary)}
        if flags.share_decoder_input_output_embed and len(input_dictionary) != len(dictionary):
            raise InputError(
                "--share-decoder-input-output-embed needs one table, but --output-dictionary-size gives the output "
                f"{len(dictionary)} types of {len(input_dictionary)}: leave one of them out"
            )
        embedding = nn.Embedding(len(input_dictionary), flags.decoder_embed_dim, dictionary.pad())
        if flags.fixnorm:
            embedding.__class__ = FixNormEmbedding
        model = cls(Decoder(nested, dictionary, embedding, no_encoder_attn=True))
        model.begin()
        return model

    def forward(self, src_tokens: Tensor, **options: Any) -> Any:
        """Returns the decoder's output. On the first training batch it also sets gains that are computed from a
        batch."""
        self.profile_once(src_tokens=src_tokens)
        return self.decoder(src_tokens, **options)


def _nested(flags: Any) -> FairseqConfig:
    """Returns the flags as fairseq's nested configuration. Its normalize_before is off, so that fairseq adds no norm
    after a stack; the residual scheme adds its own."""
    nested = FairseqConfig.from_namespace(flags)
    nested.encoder.normalize_before = nested.decoder.normalize_before = False
    return nested


def _stack(flags: Any, name: str, dictionary: Any) -> TransformerConfig:
    """Returns this package's options for one stack. Errors: InputError for options that do not fit."""
    config = configure(flags, name, len(dictionary))
    if config.d_model % config.heads:
        raise InputError(f"--{name}-attention-heads must divide the width {config.d_model}; got {config.heads}")
    return config


def _register_shape(name: str) -> None:
    """Registers an architecture of nfrs_transformer with its default sizes, for flags and for hydra."""

    @register_model_architecture("nfrs_transformer", name)
    def _(given: Any) -> None:
        shape(name, given)

    node = TranslationOptions()
    for field, value in defaults(name).items():
        setattr(node, field, value)
    node._name = name
    ConfigStore.instance().store(name=name, group="model", node=node, provider="normformer_rs")


for _name in SHAPES:
    _register_shape(_name)
