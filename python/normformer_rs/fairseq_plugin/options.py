"""The flags of the plug-in's architectures: fairseq's own flags of a Transformer, and those of this package's options,
which are generated from its tables."""

import argparse
import ast
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from enum import Enum
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models.transformer import TransformerConfig as FairseqConfig
from fairseq.models.transformer_lm import TransformerLanguageModelConfig as FairseqLanguageModelConfig
from omegaconf import DictConfig, OmegaConf

from normformer_rs.config import OWN, Field, TrainingConfig, TransformerConfig
from normformer_rs.declarations.file_class import refuse_code
from normformer_rs.errors import InputError
from normformer_rs.formats.convert import FAIRSEQS, SIZES, complete, own_flags

TRAINING = {"word_dropout": 0.0, "vocab_mask": False}
"""This package's training options that are flags of the model in fairseq, with their defaults, which are off."""
SHAPES: dict[str, dict[str, Any]] = {
    "nfrs_transformer_tiny": {"embed_dim": 128, "ffn_embed_dim": 256, "layers": 4, "attention_heads": 4},
    "nfrs_transformer_iwslt_de_en": {"ffn_embed_dim": 1024, "attention_heads": 4},
    "nfrs_transformer_wmt_en_de": {},
    "nfrs_transformer_wmt_en_de_big": {"embed_dim": 1024, "ffn_embed_dim": 4096, "attention_heads": 16},
}
"""For each architecture the default values of the --encoder-… and --decoder-… flags."""
FOLLOWING: dict[str, tuple[str, ...]] = dict.fromkeys(SHAPES, ("embed_dim",))
FOLLOWING["nfrs_transformer_tiny"] += ("ffn_embed_dim",)
"""For each architecture the sizes that the decoder copies from the encoder if they are not given. The width is always
copied. The feed-forward width is copied in tiny only, as in fairseq's tiny architecture; in the other architectures the
decoder has its own default, here or in fairseq."""
DROPOUTS: dict[str, dict[str, float]] = {"nfrs_transformer_wmt_en_de_big": {"dropout": 0.3, "attention_dropout": 0.1}}


def _own_fields(is_alone: bool) -> Iterator[tuple[str, Any, Any]]:
    """Yields the name, type and dataclass field of each flag for an option of this package. `is_alone` is True for a
    language model."""
    defaults = TRAINING | {"decoder_start": "eos"}  # fairseq begins a sentence with EOS, unlike this package
    without_flag = (*FAIRSEQS, "decoder_start") if is_alone else FAIRSEQS
    fields = [field for field in TransformerConfig.FIELDS if field.name not in without_flag]
    fields += [field for field in TrainingConfig.FIELDS if field.name in TRAINING]
    for field in fields:
        yield _own_field(field._replace(default=defaults.get(field.name, field.default)))
    yield "scalenorm_fixed_g", bool, dataclasses.field(default=False, metadata={"help": _FIXED_G})


_FIXED_G = "ScaleNorm's g stays at its first value, √d: --norm scalenorm --scalenorm-fixed-g is --norm scalenorm-fixed."


def _own_field(field: Field) -> tuple[str, Any, Any]:
    """Returns the name, type and dataclass field with which fairseq makes a flag for an option of this package. For a
    switch that is on by default the flag is no_NAME, which turns it off."""
    name, default, help_ = field.name, field.default, field.help.replace("%", "%%")
    kind: Any = {"int": int, "float": float, "bool": bool, "str": str}[field.kind]
    if field.per_layer:
        help_ += f" One of {', '.join(field.choices)}."
    elif field.choices and name in OWN:
        help_ += f" One of {', '.join(field.choices)}; or file.py:Class, a norm of your own."
    elif field.choices:
        kind = ChoiceEnum(list(field.choices))
    if name == "residual":  # fairseq's flags for it: --encoder-normalize-before, --decoder-normalize-before
        default, help_ = None, help_ + " Default: postnorm, prenorm with --*-normalize-before or in a language model."
    if default is True:
        name, default, help_ = "no_" + name, False, "Leave out: " + help_
    elif not isinstance(default, bool) and name != "residual":
        help_ += f" Default: {'none' if default is None else default}."
    if default is None:
        kind = Optional[kind]  # noqa: UP045  omegaconf 2.0 does not support `kind | None`
    return name, kind, dataclasses.field(default=default, metadata={"help": help_})


def _fairseq_fields(config: type, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields the name, type and dataclass field of each flag of fairseq's configuration. Nested configurations are
    flattened, with their name as prefix. A default that refers to another field becomes None."""
    for field in dataclasses.fields(config):
        if field.name.startswith("_"):
            continue
        if isinstance(field.type, type) and issubclass(field.type, FairseqDataclass):
            yield from _fairseq_fields(field.type, field.name + "_")
            continue
        default, kind = field.default, field.type
        is_reference = isinstance(default, str) and default.startswith("${model.")
        # `complete` copies these sizes where they are missing, so they must have no default of their own.
        is_decoder_size = prefix + field.name in _FROM_DECODER or (prefix == "decoder_" and field.name in SIZES)
        if is_reference or is_decoder_size:
            default, kind = None, Optional[kind]  # noqa: UP045
        yield prefix + field.name, kind, dataclasses.field(default=default, metadata=dict(field.metadata))


_FROM_DECODER = ("decoder_input_dim", "decoder_output_dim")
"""Widths whose default is the width of the decoder."""


def _dataclass(name: str, summary: str, fairseqs: type) -> Any:
    """Returns a configuration class with the flags of fairseq's class `fairseqs` and of this package. If both have a
    flag of the same name, this package's definition counts."""
    own = _own_fields(is_alone=fairseqs is FairseqLanguageModelConfig)
    fields = {name: (name, kind, field) for name, kind, field in (*_fairseq_fields(fairseqs), *own)}
    made = dataclasses.make_dataclass(name, list(fields.values()), bases=(FairseqDataclass,))
    made.__doc__, made.__module__ = summary, __name__
    return made


TranslationOptions = _dataclass("TranslationOptions", "Flags of nfrs_transformer.", FairseqConfig)
LanguageModelOptions = _dataclass("LanguageModelOptions", "Flags of nfrs_transformer_lm.", FairseqLanguageModelConfig)


def defaults(name: str) -> dict[str, Any]:
    """Returns the default flags of the named architecture, without the sizes that the decoder copies from the
    encoder."""
    sizes = {f"{stack}_{key}": value for stack in ("encoder", "decoder") for key, value in SHAPES[name].items()
             if stack == "encoder" or key not in FOLLOWING[name]}  # fmt: skip
    return sizes | DROPOUTS.get(name, {})


def shape(name: str, given: Any) -> None:
    """Sets flags that are missing, in place, to the defaults of the named architecture. `plain` adds the sizes that the
    decoder copies from the encoder."""
    for flag, value in defaults(name).items():
        if getattr(given, flag, None) is None:
            setattr(given, flag, value)


def plain(options: Any) -> argparse.Namespace:
    """Returns the flags of a command line, a hydra configuration or a checkpoint as plain values. Sizes of the decoder
    that are missing are copied from the encoder.

    Errors: InputError for flags that these architectures do not support, for invalid values, and for a value that names
    code if it comes from a checkpoint and not from the command line.
    """
    if isinstance(options, DictConfig):
        values: Any = OmegaConf.to_container(options, resolve=True, enum_to_str=True)
        options = argparse.Namespace(**values)
    flags: dict[str, Any] = {
        key: str(value) if isinstance(value, Enum) else value for key, value in vars(options).items()
    }
    texts = {name: value for name, value in own_flags(flags).items() if isinstance(value, str)}
    typed = _typed()  # what the user has typed needs no --trust
    origin = f"the options of a fairseq checkpoint (where there is no --trust, set {TRUST}=1)"
    trust = os.environ.get(TRUST) == "1"
    refuse_code({name: value for name, value in texts.items() if value not in typed}, origin, trust)
    for name in ("encoder_layers", "decoder_layers"):
        if flags.get(name) is not None and flags[name] < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1; got {flags[name]}")
    if not 0 <= flags["word_dropout"] < 1:
        raise InputError(f"--word-dropout must be at least 0 and below 1; got {flags['word_dropout']}")
    return complete(flags)


TRUST = "NORMFORMER_RS_TRUST"
"""The environment variable that lets a checkpoint's options name code."""


def _typed() -> set[Any]:
    """Returns the values that a user has typed on the command line: the words, the parts after an equals sign, and the
    values in the dictionary of --model-overrides."""
    words = {part for word in sys.argv[1:] for part in (word, word.partition("=")[2])}
    overrides: list[Any] = []
    for word in words:
        with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            value = ast.literal_eval(word) if word.startswith("{") else {}
            if isinstance(value, dict):
                overrides += [override for override in value.values() if isinstance(override, str)]
    return {*words, *overrides}
