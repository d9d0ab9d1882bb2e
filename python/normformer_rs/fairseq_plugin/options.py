"""The architectures' flags: fairseq's own for a Transformer, and this package's, out of its tables."""

import argparse
import dataclasses
from collections.abc import Iterator
from enum import Enum
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models.transformer import TransformerConfig as FairseqConfig
from fairseq.models.transformer_lm import TransformerLanguageModelConfig as FairseqLanguageModelConfig
from omegaconf import DictConfig, OmegaConf

from normformer_rs._core import InputError
from normformer_rs.config import Field, TrainingConfig, TransformerConfig

FAIRSEQS = ("architecture", "vocab_size", "d_model", "d_ff", "heads", "encoder_layers", "decoder_layers", "positions")
FAIRSEQS += ("tie_embeddings", "dropout", "attention_dropout", "activation_dropout")
"""Options of a model that fairseq has flags of its own for, or that its data decide."""
OFF = {"word_dropout": 0.0, "vocab_mask": False}
"""Options of training that are the model's affair in fairseq; off unless asked for."""
REFUSED = ("adaptive_input", "adaptive_softmax_cutoff", "quant_noise_pq", "quant_noise_scalar", "no_cross_attention")
REFUSED += ("cross_self_attention", "base_layers", "encoder_layers_to_keep", "decoder_layers_to_keep")
REFUSED += ("offload_activations", "character_embeddings", "no_decoder_final_norm", "encoder_xformers_att_config")
REFUSED += ("decoder_xformers_att_config", "scale_fc", "scale_attn", "scale_heads", "scale_resids")
"""fairseq's flags that these architectures have no place for."""
SHAPES: dict[str, dict[str, Any]] = {
    "nfrs_transformer_tiny": {"embed_dim": 128, "ffn_embed_dim": 256, "layers": 4, "attention_heads": 4},
    "nfrs_transformer_iwslt_de_en": {"ffn_embed_dim": 1024, "attention_heads": 4},
    "nfrs_transformer_wmt_en_de": {},
    "nfrs_transformer_wmt_en_de_big": {"embed_dim": 1024, "ffn_embed_dim": 4096, "attention_heads": 16},
}
"""What encoder and decoder are where --encoder-… and --decoder-… flags say nothing else."""
DROPOUTS: dict[str, dict[str, float]] = {"nfrs_transformer_wmt_en_de_big": {"dropout": 0.3, "attention_dropout": 0.1}}


def _own_fields() -> Iterator[tuple[str, Any, Any]]:
    fields = [field for field in TransformerConfig.FIELDS if field.name not in FAIRSEQS]
    fields += [field._replace(default=OFF[field.name]) for field in TrainingConfig.FIELDS if field.name in OFF]
    for field in fields:
        yield _own_field(field)


def _own_field(field: Field) -> tuple[str, Any, Any]:
    """A field of this package as fairseq has them: a switch that is on at first becomes one that turns it off."""
    name, default, help_ = field.name, field.default, field.help.replace("%", "%%")
    kind: Any = {"int": int, "float": float, "bool": bool, "str": str}[field.kind]
    if field.choices:
        kind = ChoiceEnum(list(field.choices))
    if name == "residual":  # --encoder-normalize-before and --decoder-normalize-before are fairseq's word for it
        default, help_ = None, help_ + " Default: postnorm, prenorm with --*-normalize-before or in a language model."
    if default is True:
        name, default, help_ = "no_" + name, False, "Leave out: " + help_
    elif not isinstance(default, bool) and name != "residual":
        help_ += f" Default: {'none' if default is None else default}."
    if default is None:
        kind = Optional[kind]  # noqa: UP007, UP045: omegaconf 2.0 does not know `kind | None`
    return name, kind, dataclasses.field(default=default, metadata={"help": help_})


def _fairseq_fields(config: type, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """fairseq's fields by their flags' names, nested ones flat; what only points at another field is left open."""
    for field in dataclasses.fields(config):
        if field.name.startswith("_"):
            continue
        if isinstance(field.type, type) and issubclass(field.type, FairseqDataclass):
            yield from _fairseq_fields(field.type, field.name + "_")
            continue
        default, kind = field.default, field.type
        points = isinstance(default, str) and default.startswith("${model.")
        if points or prefix == "decoder_" and field.name in _SIZES:
            default, kind = None, Optional[kind]  # noqa: UP007, UP045
        yield prefix + field.name, kind, dataclasses.field(default=default, metadata=dict(field.metadata))


_SIZES = ("embed_dim", "ffn_embed_dim", "layers", "attention_heads")


def _dataclass(name: str, summary: str, fairseqs: type) -> Any:
    fields = {name: (name, kind, field) for name, kind, field in (*_fairseq_fields(fairseqs), *_own_fields())}
    made = dataclasses.make_dataclass(name, list(fields.values()), bases=(FairseqDataclass,))
    made.__doc__, made.__module__ = summary, __name__
    return made


TranslationOptions = _dataclass("TranslationOptions", "Flags of nfrs_transformer.", FairseqConfig)
LanguageModelOptions = _dataclass(
    "LanguageModelOptions", "Flags of nfrs_transformer_lm.", FairseqLanguageModelConfig
)


def shape(name: str, given: Any) -> None:
    """Gives the flags that are not there the values of the named architecture."""
    for stack in ("encoder", "decoder"):
        for key, value in SHAPES[name].items():
            _set_default(given, f"{stack}_{key}", value)
    for key, value in DROPOUTS.get(name, {}).items():
        _set_default(given, key, value)


def _set_default(given: Any, name: str, value: Any) -> None:
    if getattr(given, name, None) is None:
        setattr(given, name, value)


def plain(options: Any) -> argparse.Namespace:
    """The flags as plain values, from a command line, a hydra config or a checkpoint; open sizes are the encoder's.

    Errors: InputError for flags that these architectures have no place for.
    """
    if isinstance(options, DictConfig):
        options = argparse.Namespace(**OmegaConf.to_container(options, resolve=True, enum_to_str=True))
    flags = {key: str(value) if isinstance(value, Enum) else value for key, value in vars(options).items()}
    for name in REFUSED:
        if flags.get(name):
            raise InputError(f"--{name.replace('_', '-')} has no place in an nfrs_transformer: leave it out")
    for key in _SIZES:
        if flags[f"decoder_{key}"] is None:
            flags[f"decoder_{key}"] = flags[f"encoder_{key}"]
    for name in ("decoder_input_dim", "decoder_output_dim"):
        if flags[name] is None:
            flags[name] = flags["decoder_embed_dim"]
    return argparse.Namespace(**flags)


def configure(flags: argparse.Namespace, stack: str, vocab_size: int) -> TransformerConfig:
    """This package's options for one stack of the model that the flags describe. Errors: InputError."""
    named = vars(flags)
    is_alone = "encoder_layers" not in named
    widths = {named[name] for name in named if name in ("encoder_embed_dim", "decoder_input_dim", "decoder_output_dim")}
    if widths - {flags.decoder_embed_dim}:
        raise InputError(
            f"embeddings, encoder and decoder must be equally wide; got {flags.decoder_embed_dim} and "
            f"{', '.join(map(str, sorted(widths - {flags.decoder_embed_dim})))}"
        )
    options = {}
    for field in TransformerConfig.FIELDS:
        if field.name in named and field.name not in FAIRSEQS:
            options[field.name] = named[field.name]
        elif "no_" + field.name in named:
            options[field.name] = not named["no_" + field.name]
    options["residual"] = _residual(flags, is_alone)
    ties = "decoder" if flags.share_decoder_input_output_embed else "none"
    return TransformerConfig(
        **options,
        architecture="decoder-only" if is_alone else "encoder-decoder",
        vocab_size=vocab_size,
        d_model=flags.decoder_embed_dim,
        d_ff=named[f"{stack}_ffn_embed_dim"],
        heads=named[f"{stack}_attention_heads"],
        **({} if is_alone else {"encoder_layers": flags.encoder_layers}),
        decoder_layers=flags.decoder_layers,
        positions="fairseq",
        tie_embeddings="all" if named.get("share_all_embeddings") else ties,
        dropout=float(flags.dropout),
        attention_dropout=float(flags.attention_dropout),
        activation_dropout=float(flags.activation_dropout or named.get("relu_dropout") or 0.0),
    )


def _residual(flags: argparse.Namespace, is_alone: bool) -> str:
    """The residual scheme; fairseq's older flags are understood where they agree with --residual."""
    if is_alone:  # fairseq's language models are prenorm whatever the flag says
        return flags.residual or "prenorm"
    before = [flags.encoder_normalize_before, flags.decoder_normalize_before]
    if not any(before):
        return flags.residual or "postnorm"
    if not all(before) or flags.residual not in (None, "prenorm"):
        raise InputError(
            "--encoder-normalize-before and --decoder-normalize-before together mean --residual prenorm; got one "
            f"alone, or --residual {flags.residual}: leave them out"
        )
    return "prenorm"
