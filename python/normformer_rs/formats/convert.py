"""Converts fairseq's checkpoints into this package's and back: the flags, the names of parameters, the files.

Inside layers, parameters have the names of torch.nn. The plug-in's architectures use these already; the layers of
fairseq's own `transformer` archs are renamed.
"""

import argparse
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import _core
from ..config import ATTENTION, LANGUAGE_MODELS, OWN, PARAMETRISATION, TrainingConfig, TransformerConfig
from ..declarations.file_class import refuse_code
from ..errors import InputError
from ..loop.model import load_run
from ..nn.scheme import declare

Path_ = str | PathLike[str]

# The first part converts fairseq's flags.

FAIRSEQS: tuple[str, ...] = (
    "architecture",
    "vocab_size",
    "d_model",
    "d_ff",
    "heads",
    "encoder_layers",
    "decoder_layers",
    "positions",
)
FAIRSEQS += ("tie_embeddings", "dropout", "attention_dropout", "activation_dropout", *LANGUAGE_MODELS)
FAIRSEQS += (*ATTENTION, *PARAMETRISATION)
"""Options of this package's models for which the plug-in has no flag, because fairseq's own flags or its data set them,
or because its models cannot have them."""
REFUSED: tuple[str, ...] = (
    "adaptive_input",
    "adaptive_softmax_cutoff",
    "quant_noise_pq",
    "quant_noise_scalar",
    "no_cross_attention",
)
REFUSED += ("cross_self_attention", "base_layers", "encoder_layers_to_keep", "decoder_layers_to_keep")
REFUSED += ("offload_activations", "character_embeddings", "char_inputs", "tie_adaptive_weights", "tie_adaptive_proj")
REFUSED += ("no_decoder_final_norm", "encoder_xformers_att_config")
REFUSED += ("decoder_xformers_att_config", "scale_fc", "scale_attn", "scale_heads", "scale_resids")
"""fairseq's flags that this package's models do not support; each must be off."""
FIXED: dict[str, Any] = {"activation_fn": "relu", "no_scale_embedding": False, "layernorm_embedding": False}
FIXED |= {"no_token_positional_embeddings": False}
"""fairseq's flags that the plug-in's architectures support, but the training loop only with these values."""
SIZES = ("embed_dim", "ffn_embed_dim", "layers", "attention_heads")
"""The sizes of a stack. fairseq has a flag for each size of each stack, such as --encoder-embed-dim."""


def complete(flags: Mapping[str, Any]) -> argparse.Namespace:
    """Returns a model's flags with all sizes. If a size of the decoder is missing, it is copied from the encoder.

    Errors: InputError for flags that models of this package do not support.
    """
    flags = dict(flags)
    if flags.get("scalenorm_fixed_g"):
        _fix_g(flags)
    for name in REFUSED:
        if flags.get(name):
            raise InputError(f"--{name.replace('_', '-')} has no place in a model of this package: leave it out")
    for key in SIZES:
        if flags.get(f"decoder_{key}") is None:
            flags[f"decoder_{key}"] = flags[f"encoder_{key}"]
    for name in ("decoder_input_dim", "decoder_output_dim"):
        if flags.get(name) is None:
            flags[name] = flags["decoder_embed_dim"]
    return argparse.Namespace(**flags)


def _fix_g(flags: dict[str, Any]) -> None:
    """Applies --scalenorm-fixed-g to the flags, in place: the norm scalenorm becomes scalenorm-fixed."""
    norms = [flags.get(f"{side}_norm") or flags["norm"] for side in ("encoder", "decoder")]
    if not {"scalenorm", "scalenorm-fixed"}.intersection(norms):
        raise InputError(
            f"--scalenorm-fixed-g is an option of --norm scalenorm; got {' and '.join(dict.fromkeys(norms))}"
        )
    for name in ("norm", "encoder_norm", "decoder_norm"):
        if flags.get(name) == "scalenorm":
            flags[name] = "scalenorm-fixed"


def own_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those flags whose value may name a user's own class: the norms and the residual scheme."""
    return {name: flags[name] for name in OWN if name in flags}


def configure(flags: argparse.Namespace, stack: str, vocab_size: int) -> TransformerConfig:
    """Returns this package's options for one stack ("encoder" or "decoder") of the model that the flags describe.
    Errors: InputError for options that do not fit."""
    named = vars(flags)  # the flags' values by name
    is_alone = "encoder_layers" not in named  # a language model has no flags of an encoder
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
        elif "no_" + field.name in named:  # an option that is on by default has a flag that turns it off
            options[field.name] = not named["no_" + field.name]
    options |= {"residual": _residual(flags, is_alone), "decoder_start": named.get("decoder_start", "eos")}
    ties: Any = "decoder" if getattr(flags, "share_decoder_input_output_embed", False) else "none"
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
        activation_dropout=float(named.get("activation_dropout") or named.get("relu_dropout") or 0.0),
    )


def _residual(flags: argparse.Namespace, is_alone: bool) -> str:
    """Returns the residual scheme that the flags set: by --residual, or by fairseq's --*-normalize-before, which must
    agree with it. `is_alone`: True for a language model, which has no encoder."""
    scheme = getattr(flags, "residual", None)
    sides = ["decoder"] if is_alone else ["encoder", "decoder"]
    are_prenorm = [getattr(flags, f"{side}_normalize_before", False) for side in sides]
    if not any(are_prenorm):
        # Without a flag nfrs_transformer_lm is prenorm. fairseq's own archs, which have no --residual, are postnorm.
        return scheme or ("prenorm" if is_alone and hasattr(flags, "residual") else "postnorm")
    if not all(are_prenorm) or scheme not in (None, "prenorm"):
        names = " and ".join(f"--{side}-normalize-before" for side in sides)
        means = f"{names} {'means' if is_alone else 'together mean'}"
        got = f"--residual {scheme}" if all(are_prenorm) else "one alone"
        raise InputError(f"{means} --residual prenorm; got {got}: leave {'it' if is_alone else 'them'} out")
    return "prenorm"


# The second part converts the names of parameters.

_STOCK = re.compile(r"(?:^|\.)layers\.\d+\.fc1\.weight$")
"""Matches a parameter that only fairseq's own archs have; the plug-in's archs call it linear1."""
_LAYER = re.compile(r"^(encoder|decoder)\.layers\.(\d+)\.(.+)$")
"""Matches a parameter of a layer: its stack, the layer's number, and its name within the layer."""
_NORMS = {
    "encoder": {"self_attn_layer_norm": "norm1", "final_layer_norm": "norm2"},
    "decoder": {"self_attn_layer_norm": "norm1", "encoder_attn_layer_norm": "norm2", "final_layer_norm": "norm3"},
}
"""This package's names for the norms in a layer of each stack, by fairseq's names."""
_INSIDE = {"encoder_attn": "multihead_attn", "fc1": "linear1", "fc2": "linear2"}
"""This package's names for the other modules in a layer, as far as fairseq's names differ."""
_NEVER_TRAINED = re.compile(r"^(in_proj|out_proj|fc1|fc2)_(weight|bias)$")
"""Matches second copies of parameters that fairseq's encoder layers keep for their fast path."""


def from_fairseq_names(state: dict[str, Tensor]) -> None:
    """Renames, in place, the parameters of a checkpoint of fairseq's `transformer` archs to this package's names.

    q, k and v become one matrix (they were one until fairseq 0.8), norms are numbered in their order, and copies that
    were never trained are dropped. A checkpoint with this package's names stays as it is.
    """
    if not any(_STOCK.search(name) for name in state):
        return
    is_alone = not any(".encoder_attn." in name for name in state)  # a language model's decoder
    for name in [*state]:
        in_layer = _LAYER.match(name)
        if in_layer:
            stack, number, rest = in_layer.groups()
            value = state.pop(name)
            if not _NEVER_TRAINED.match(rest):
                # Without attention to an encoder, a decoder's layers have the norms of an encoder's.
                norms = _NORMS["encoder" if is_alone else stack]
                state[f"{stack}.layers.{number}.{_rename(rest, norms)}"] = value
        elif name == "decoder.embed_out":  # the output projection's name until fairseq 0.9
            state["decoder.output_projection.weight"] = state.pop(name)
        elif re.match(r"^(encoder|decoder)\.layer_norm\.", name):
            state[name.replace(".layer_norm.", ".norm.")] = state.pop(name)
    _join(state)


def _rename(rest: str, norms: dict[str, str]) -> str:
    """Returns this package's name for a parameter within a layer. `norms` maps fairseq's names of norms to ours."""
    first, dot, others = rest.partition(".")
    return norms.get(first, _INSIDE.get(first, first)) + dot + others


def _join(state: dict[str, Tensor]) -> None:
    """Joins the weights, and the biases, of q_proj, k_proj and v_proj into those of in_proj, in place."""
    for name in [name for name in state if ".q_proj." in name]:
        parts = [state.pop(name.replace(".q_proj.", f".{which}_proj.")) for which in "qkv"]
        state[name.replace(".q_proj.", ".in_proj_")] = torch.cat(parts)


_TABLES: dict[str, dict[str, tuple[str, ...]]] = {
    "all": {"embedding": ("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection")},
    "decoder": {
        "source_embedding": ("encoder.embed_tokens",),
        "target_embedding": ("decoder.embed_tokens", "decoder.output_projection"),
    },
    "none": {
        "source_embedding": ("encoder.embed_tokens",),
        "target_embedding": ("decoder.embed_tokens",),
        "output_projection": ("decoder.output_projection",),
    },
}
"""For each value of `tie_embeddings`, this package's tables of word vectors and the fairseq modules that hold them."""
_POSITIONS = {"encoder": "source_position_embedding", "decoder": "target_position_embedding"}
"""This package's learned table of positions for each of fairseq's stacks."""
_FIRST_POSITION = 2
"""The row of the first position in fairseq's tables of positions; row 1 belongs to padding."""
_FAIRSEQ_ONLY = re.compile(r"(^|\.)(version|_float_tensor|weights|is_profiled|vocab_mask)$")
"""Matches buffers of fairseq's models that have no counterpart among this package's tensors."""


def to_canonical(state: Mapping[str, Tensor], ties: str) -> dict[str, Tensor]:
    """Returns the parameters and buffers of a fairseq model under this package's names. `ties`: the value of
    `tie_embeddings`."""
    renamed = dict(state)
    from_fairseq_names(renamed)
    canonical = {}
    for table, holders in _TABLES[ties].items():
        weights = [renamed[f"{holder}.weight"] for holder in holders if f"{holder}.weight" in renamed]
        if weights:
            canonical[f"{table}.weight"] = weights[0]
    if "decoder.output_projection.bias" in renamed:
        canonical["output_projection.bias"] = renamed["decoder.output_projection.bias"]
    for side, table in _POSITIONS.items():
        if f"{side}.embed_positions.weight" in renamed:
            canonical[f"{table}.weight"] = renamed[f"{side}.embed_positions.weight"][_FIRST_POSITION:]
    # Tables and output projection were copied above; layers keep all their tensors, the rest all but fairseq's buffers.
    for name, value in renamed.items():
        if ".layers." in name or not (_FAIRSEQ_ONLY.search(name) or ".embed_" in name or "output_projection" in name):
            canonical[name] = value
    halves = (torch.float16, torch.bfloat16)  # the types that --fp16 and --bf16 save
    return {name: value.float() if value.dtype in halves else value for name, value in canonical.items()}


def from_canonical(state: Mapping[str, Tensor], ties: str) -> dict[str, Tensor]:
    """Returns the state dict of a model of the plug-in for parameters under this package's names; it is the inverse of
    `to_canonical`. `ties`: the value of `tie_embeddings`."""
    fairseq_state = {name: value for name, value in state.items() if name.split(".")[0] in ("encoder", "decoder")}
    sides = {name.split(".")[0] for name in fairseq_state}
    for table, holders in _TABLES[ties].items():
        for holder in holders:
            if f"{table}.weight" in state and holder.split(".")[0] in sides:
                fairseq_state[f"{holder}.weight"] = state[f"{table}.weight"]
    if "output_projection.bias" in state:
        fairseq_state["decoder.output_projection.bias"] = state["output_projection.bias"]
    fairseq_state["version"] = torch.tensor(VERSION)
    for side in sides:
        # fairseq takes a stack of a version below 3 for one without a last norm.
        fairseq_state[f"{side}.version"] = torch.tensor([3.0])
        positions = state.get(f"{_POSITIONS[side]}.weight")
        if positions is None:  # for sinusoids fairseq saves only this buffer
            fairseq_state[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
        else:
            before = positions.new_zeros(_FIRST_POSITION, positions.shape[1])
            fairseq_state[f"{side}.embed_positions.weight"] = torch.cat([before, positions])
    return fairseq_state


VERSION = 1
"""The version of the nfrs architectures' state in fairseq's checkpoints."""


def check_version(state: Mapping[str, Tensor]) -> None:
    """Raises InputError for a checkpoint of a later version."""
    version = int(state.get("version", VERSION))
    if version > VERSION:
        raise InputError(
            f"the checkpoint is of version {version} of the nfrs architectures, this package knows up to {VERSION}: "
            "install a newer normformer_rs"
        )


# The third part reads and writes files.

SAFE: list[Any] = [argparse.Namespace, np.ndarray, np.dtype, *(type(np.dtype(name)) for name in ("int64", "float64"))]
for _name, _function in (("_reconstruct", np.zeros(1).__reduce__()[0]), ("scalar", np.float64(0).__reduce__()[0])):
    # `__reduce__()[0]` is the function that a pickle calls to make the object again.
    SAFE += [(_function, f"numpy.{core}.multiarray.{_name}") for core in ("core", "_core")]
"""The types besides tensors and plain data that a fairseq checkpoint may hold: flags (argparse.Namespace), and numpy's
numbers, which are in the metrics of --eval-bleu. numpy's functions have two names, because numpy 2 renamed core to
_core."""


def read_checkpoint(path: Path_, trust: bool = False) -> dict[str, Any]:
    """Reads a fairseq checkpoint: tensors, plain data and the types in `SAFE`.

    Errors: InputError for other files, and, without `trust`, for other types, because loading them could run code.
    """
    if not Path(path).is_file():
        raise InputError(f"{path}: no such file; expected a checkpoint of fairseq")
    try:
        # When it ends, the context manager removes its types from torch's list of allowed types. Types that are in this
        # list already are not given to it, because the program may need them later.
        allowed = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([kind for kind in SAFE if kind not in allowed]):
            saved = torch.load(path, map_location="cpu", weights_only=not trust)
    except Exception as error:  # a damaged file may raise anything
        unsafe = re.search(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)", str(error))
        if unsafe:
            raise InputError(
                f"{path}: holds {unsafe[1]}, which is neither a tensor nor plain data, and loading it could run code: "
                "--trust loads it all the same"
            ) from error
        reason = " ".join(str(error).split("\n")[0].split()) or type(error).__name__
        raise InputError(f"{path}: not a checkpoint of fairseq, or damaged ({reason})") from error
    state = saved.get("model") if isinstance(saved, dict) else None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(
            f"{path}: not a checkpoint of fairseq: expected a dictionary with model, a dictionary of tensors"
        )
    return saved


def flags_of(saved: Mapping[str, Any], path: Path_) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the model's flags and the task's flags of a checkpoint; `path` is its file, for messages. Errors:
    InputError if they are missing, or if the architecture is no Transformer of fairseq or of the plug-in."""
    cfg, args = saved.get("cfg"), saved.get("args")
    # Older checkpoints have args instead of cfg, with the flags of model and task together.
    parts = [cfg.get("model"), cfg.get("task")] if isinstance(cfg, Mapping) else [args, args]
    model, task = (vars(part) if isinstance(part, argparse.Namespace) else part for part in parts)
    if not isinstance(model, dict) or not isinstance(task, dict):
        raise InputError(f"{path}: not a checkpoint of fairseq: expected cfg, with model and task, or args")
    arch = model.get("_name") or model.get("arch") or ""
    if not re.match(r"(nfrs_)?transformer(_|$)", arch):
        raise InputError(f'{path}: a model of the architecture "{arch}"; expected a transformer… or nfrs_transformer…')
    return model, task


def from_fairseq(path: Path_, output: Path_, *, data: Path_ | None = None, trust: bool = False) -> None:
    """Writes a fairseq checkpoint as a run's folder of this package.

    Args:
        path: a .pt of `nfrs_transformer…` or `transformer…`, with one dictionary for both languages.
        output: a folder that does not exist yet.
        data: fairseq's binarised folder, for its dictionary; None for the folder that the model was trained on.
        trust: True to load a .pt that could run code, or that names code to run: a norm or scheme file.py:Class.

    Errors: InputError for other architectures, dictionaries that differ, and existing folders.
    """
    if Path(output).exists():
        raise InputError(f"{output} exists already; give a new folder")
    saved = read_checkpoint(path, trust)
    flags, task = flags_of(saved, path)
    refuse_code(own_flags(flags), path, trust)
    # fairseq's data may be several folders, joined by colons; it reads the dictionary of the first.
    dictionary = _dictionary(Path(data or str(task.get("data") or ".").split(":")[0]), task)
    try:
        complete_flags = complete(flags)
        vocab_size = 0  # save_model takes the size from the dictionary
        config = configure(complete_flags, "decoder", vocab_size)
        encoder_config = config
        if config.architecture != "decoder-only":
            encoder_config = configure(complete_flags, "encoder", vocab_size)
    except InputError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: its options are not those of a Transformer of fairseq 0.7 or later: {error}"
        ) from error
    if config != encoder_config:
        raise InputError(
            f"{path}: encoder and decoder differ in feed-forward width or heads; this package has one of each"
        )
    for flag, supported in FIXED.items():
        if flags.get(flag) not in (None, False, supported):
            raise InputError(
                f"{path}: --{flag.replace('_', '-')} {flags[flag]}: models of this package have ReLU, and word vectors "
                "times √d with positions, not normed"
            )
    config = config.replace(**_learned_positions(flags, saved["model"], config, path))
    check_version(saved["model"])
    try:
        state = to_canonical(saved["model"], config.tie_embeddings)
    except KeyError as error:
        raise InputError(f"{path}: its model lacks {error}") from error
    mask = saved["model"].get("decoder.vocab_mask")
    training = TrainingConfig(vocab_mask=mask is not None).to_json()
    types = None if mask is None else mask.bool().tolist()  # for each id, True if it is in the target vocabulary
    try:
        _core.save_model(str(output), config.to_json(), training, str(dictionary), types, [*state], [*state.values()])
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _learned_positions(
    flags: Mapping[str, Any], state: Mapping[str, Tensor], config: TransformerConfig, path: Path_
) -> dict[str, Any]:
    """Returns the options `positions` and `max_positions` for learned positions; an empty dictionary for sinusoids.
    `state`: the checkpoint's tensors; `path`: its file, for messages. Errors: InputError if encoder and decoder
    differ."""
    sides = ["decoder"] if config.architecture == "decoder-only" else ["encoder", "decoder"]  # type: ignore[attr-defined]
    learned = [side for side in sides if flags.get(f"{side}_learned_pos")]
    if not learned:
        return {}
    if learned != sides:
        raise InputError(
            f"{path}: --{learned[0]}-learned-pos alone: models of this package have learned positions on both "
            "sides, or on none"
        )
    tables = [state.get(f"{side}.embed_positions.weight") for side in sides]
    rows = {len(table) - _FIRST_POSITION for table in tables if table is not None}
    if len(rows) > 1:
        raise InputError(
            f"{path}: its tables of positions have {' and '.join(map(str, sorted(rows)))} rows; models of this package "
            "have one max_positions for source and target"
        )
    return {"positions": "learned", "max_positions": rows.pop() if rows else 0}


def _dictionary(folder: Path, task: Mapping[str, Any]) -> Path:
    """Returns the path of the dictionary in the folder. `task`: fairseq's flags of the task, which name the languages.
    Errors: InputError if there is none, or if the two languages have different ones."""
    names = [f"dict.{task[side]}.txt" for side in ("source_lang", "target_lang") if task.get(side)]
    # If fairseq has detected the languages from the files, the checkpoint does not name them, and `names` is empty.
    # Then all dictionaries in the folder are compared.
    paths = [folder / name for name in names] or sorted(folder.glob("dict.*txt"))
    if not paths or not all(path.is_file() for path in paths):
        raise InputError(f"{folder}: no {' or '.join(names) or 'dict.LANG.txt'}: give --data DIR")
    if any(path.read_bytes() != paths[0].read_bytes() for path in paths):
        raise InputError(f"{folder}: two dictionaries; this package has one for both languages (--joined-dictionary)")
    return paths[0]


def to_fairseq(directory: Path_, output: Path_, *, checkpoint: str = "best") -> None:
    """Writes a checkpoint of the run in `directory` as a .pt of `nfrs_transformer` or `nfrs_transformer_lm`.

    Errors: InputError for options that the plug-in's models do not have, and existing files.
    """
    if Path(output).exists():
        raise InputError(f"{output} exists already; give a new file")
    config, tensors = load_run(directory, checkpoint)
    if config.positions not in ("fairseq", "learned"):
        raise InputError(
            f"{directory}: its positions are {config.positions}; fairseq has positions = fairseq or learned"
        )
    # In the plug-in's models these options have their defaults, except for max_positions, which its flags set.
    for field in TransformerConfig.FIELDS:
        if (
            field.name in LANGUAGE_MODELS
            and field.name != "max_positions"
            and (value := getattr(config, field.name)) != field.default
        ):
            raise InputError(f"{directory}: its {field.name} is {value}, which no Transformer of the plug-in has")
    state = from_canonical(tensors, config.tie_embeddings)
    if declare(config, "decoder").is_profiled:
        state["is_profiled"] = torch.tensor(1, dtype=torch.uint8)
    types = _core.target_vocabulary(str(directory))  # for each id, True if the vocabulary has it; None for no mask
    flags = flags_from(config) | {"vocab_mask": types is not None}
    if types is not None:
        state["decoder.vocab_mask"] = torch.tensor(types, dtype=torch.uint8)
    # fairseq reads these entries from every checkpoint, although this one has no state of an optimizer.
    history = {"optimizer_name": "adam", "criterion_name": "nfrs_label_smoothed_cross_entropy", "num_updates": 0}
    history |= {"lr_scheduler_state": {"best": None}}
    iterator = {"epoch": 1, "iterations_in_epoch": 0}
    saved = {"args": argparse.Namespace(**flags), "model": state, "optimizer_history": [history]}
    torch.save(saved | {"extra_state": {"train_iterator": iterator}, "last_optimizer_state": None}, output)


def flags_from(config: TransformerConfig) -> dict[str, Any]:
    """Returns the plug-in's flags for a configuration; it is the inverse of `configure`. Errors: InputError for a
    parametrisation and for options of attention that the plug-in does not have."""
    for field in TransformerConfig.FIELDS:
        unsupported = (*ATTENTION, *PARAMETRISATION)
        if field.name in unsupported and (value := getattr(config, field.name)) != field.default:
            raise InputError(f"{field.name} = {value} has no place in fairseq: only the training loop and nn have it")
    flags: dict[str, Any] = {"data": ".", "criterion": "cross_entropy"}
    if config.architecture == "encoder-decoder":
        flags |= {"arch": "nfrs_transformer", "task": "translation"}
        flags["share_all_embeddings"] = config.tie_embeddings == "all"
        stacks = ["encoder", "decoder"]
    else:
        flags |= {"arch": "nfrs_transformer_lm", "task": "language_modeling"}
        stacks = ["decoder"]
    flags["share_decoder_input_output_embed"] = config.tie_embeddings != "none"
    for stack in stacks if config.positions == "learned" else []:
        side = {"encoder": "source", "decoder": "target"}[stack]
        flags |= {f"{stack}_learned_pos": True, f"max_{side}_positions": config.max_positions}
    for stack in stacks:
        sizes = (config.d_model, config.d_ff, getattr(config, f"{stack}_layers"), config.heads)  # in the order of SIZES
        flags |= {f"{stack}_{key}": size for key, size in zip(SIZES, sizes)}
    for field in TransformerConfig.FIELDS:
        value = getattr(config, field.name)
        if field.name in ("dropout", "attention_dropout", "activation_dropout"):
            flags[field.name] = config.dropout if value is None else value
        elif field.name not in FAIRSEQS:  # an option that is on by default has a flag that turns it off
            flags |= {f"no_{field.name}": not value} if field.default is True else {field.name: value}
    # A language model of the plug-in has no flag for decoder_start; this package's option must be "eos".
    return flags | ({} if len(stacks) == 2 else {"decoder_start": "eos"})
