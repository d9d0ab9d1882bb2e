"""Writes language models as folders for Hugging Face's `transformers`: config.json, model.safetensors, a tokenizer."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _core
from ..config import TransformerConfig
from ..errors import InputError
from ..loop.model import Transformer, load_run
from ..text import read_regular
from .tokenizer import tokenizer_files

_BOS, _PAD, _EOS = 0, 1, 2
"""The ids of the special pieces."""
_EPS = {"layernorm": 1e-5, "rmsnorm": 1e-5, **dict.fromkeys(("rmsnorm:gemma", "rmsnorm:llama", "rmsnorm:olmo"), 1e-6)}
"""The ε of each norm if the option norm_eps is None."""
_VOCABULARY, _CODES = "vocabulary.txt", "bpe.codes"
"""Two files of a run that define how text becomes token ids. A run without bpe.codes was trained on tokenised text."""
_FREE = {"vocab_size", "d_model", "d_ff", "heads", "encoder_layers", "decoder_layers", "decoder_norm", "norm_eps"}
_FREE |= {
    "init",
    "init_std",
    "ds_init_alpha",
    "ds_init_mode",
    "max_positions",
    "rope_theta",
    "scale_embeddings",
    "decoder_start",
}
_FREE |= {"tie_embeddings", "dropout", "embedding_dropout", "attention_dropout", "activation_dropout"}
"""Options that may have any value, because every architecture has them or because they matter in training only. Any
other option must be at its default, or have a value that the architecture supports (`_Family.options`)."""


@dataclasses.dataclass(frozen=True)
class _Family:
    """An architecture of Hugging Face, and the mapping of this package's parameters to it."""

    name: str
    options: Mapping[str, tuple[Any, ...]]
    """Options besides `_FREE`, and the values that the architecture supports; () means any value."""
    config: Callable[[TransformerConfig], dict[str, Any]]
    layers: str
    """The name of the architecture's list of layers."""
    names: Mapping[str, str]
    """The names of the architecture's modules, by the names that this package uses, within a layer and outside."""
    parts: Callable[[TransformerConfig, str, Tensor], Iterable[tuple[str, Tensor]]]
    """A function that converts a module's weight or bias into the architecture's form. It returns pairs (module,
    tensor), of which there are several if this package stacks what are separate modules there."""
    always_biased: tuple[str, ...] = ()
    """Modules that always have a bias in the architecture; it is set to zero if this package's model has none."""
    scales_embeddings: bool = False
    """True if the architecture multiplies the input embeddings by √d, as this package does with `scale_embeddings`."""
    changes: tuple[Callable[[TransformerConfig, dict[str, Tensor]], dict[str, Tensor]], ...] = ()
    """Functions that change the parameters where transformers' classes define one differently from this package."""

    def misfits(self, config: TransformerConfig) -> list[str]:
        """Returns a text for each option of the model that the architecture does not support."""
        texts = []
        for field in TransformerConfig.FIELDS:
            if field.name in _FREE:
                continue
            value, allowed = getattr(config, field.name), self.options.get(field.name, (field.default,))
            if field.name == "norm":  # decoder_norm, if it is given, counts instead
                value = config.decoder_norm or config.norm
            if field.name == "kv_heads":  # None, the default, means as many as `heads`
                value = None if value == config.heads else value
            # The empty tuple in `options` means that any value is allowed.
            if value not in allowed and self.options.get(field.name) != ():
                texts.append(f"{field.name} = {json.dumps(value)} (there {' or '.join(map(json.dumps, allowed))})")
        return texts

    def state(self, config: TransformerConfig, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields the names and values of the architecture's parameters, computed from this package's `state`."""
        for change in self.changes:
            state = change(config, {**state})
        words = state["embedding.weight" if config.tie_embeddings == "all" else "target_embedding.weight"]
        # This package scales embeddings when it reads them, so its output matrix is not scaled, even if it is tied.
        # The scale is √d if only this package multiplies by √d, 1/√d if only the architecture does, otherwise 1.
        scale = config.d_model ** (0.5 * (config.scale_embeddings - self.scales_embeddings))
        yield self.names["embedding"] + ".weight", words * scale
        if not self.is_tied(config):
            yield self.names["output_projection"] + ".weight", state.get("output_projection.weight", words)
        if config.positions == "learned":
            yield self.names["positions"] + ".weight", state["target_position_embedding.weight"]
        for name, tensor in self._with_biases(config, state).items():
            in_layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+?)(?:[._](weight|bias))?", name)
            if in_layer is not None:
                index, module, kind = in_layer.groups()
                for part, values in self.parts(config, module, tensor):
                    end = "" if kind is None else f".{kind}"  # sinks are parameters without ".weight" or ".bias"
                    yield f"{self.layers}.{index}.{self.names.get(part, part)}{end}", values
            elif name.startswith("decoder.norm."):
                yield f"{self.names['decoder.norm']}.{name.rpartition('.')[2]}", tensor

    def is_tied(self, config: TransformerConfig) -> bool:
        """Returns True if one matrix can be both the embedding and the output projection in the architecture."""
        return config.tie_embeddings != "none" and config.scale_embeddings == self.scales_embeddings

    def _with_biases(self, config: TransformerConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the state with a zero bias for each module in `always_biased` that has none."""
        full = dict(state)
        for name, weight in state.items():
            if name.startswith("decoder.layers.") and name.endswith("weight"):
                bias = name.removesuffix("weight") + "bias"
                module = re.sub(r"decoder\.layers\.\d+\.|[._]weight$", "", name)
                if module in self.always_biased and bias not in state:
                    full[bias] = torch.zeros_like(weight[:, 0])
        return full


# The functions below serve several architectures.


def _rate(config: TransformerConfig, name: str) -> float:
    """Returns a dropout rate: the option `name`, or `dropout` if that is None."""
    value = getattr(config, name)
    return config.dropout if value is None else value


def _eps(config: TransformerConfig) -> float:
    """Returns the ε of the decoder's norms."""
    return _EPS[str(config.decoder_norm or config.norm)] if config.norm_eps is None else config.norm_eps


def _shape(config: TransformerConfig) -> dict[str, Any]:
    """Returns the sizes and the dropout of attention, under the names that most architectures have in config.json."""
    return {
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.decoder_layers,
        "num_attention_heads": config.heads,
        "max_position_embeddings": config.max_positions,
        "attention_dropout": _rate(config, "attention_dropout"),
    }


def _key_width(config: TransformerConfig) -> int:
    """Returns the number of rows of the key projection, which is that of the value projection, too."""
    return (config.kv_heads or config.heads) * (config.d_model // config.heads)


def _separate(config: TransformerConfig, module: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Returns a module's tensor unchanged, except that the stacked in_proj is split into q_proj, k_proj and v_proj."""
    if module != "self_attn.in_proj":
        return [(module, tensor)]
    keys = _key_width(config)
    widths = [len(tensor) - 2 * keys, keys, keys]  # the rows of queries may include those of the output gates
    return zip((f"self_attn.{letter}_proj" for letter in "qkv"), tensor.split(widths))


_NORM = re.compile(r"norm\d?\.weight$")
"""Matches the name of a norm's weight, such as decoder.layers.0.norm1.weight."""


def _zero_centred(config: TransformerConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state with 1 subtracted from the norms' weights, because the architecture multiplies by 1 + weight.
    Norms such as rmsnorm:gemma have that form already, so their weights stay."""
    if (config.decoder_norm or config.norm) != "rmsnorm":
        return state
    return {name: tensor - 1 if _NORM.search(name) else tensor for name, tensor in state.items()}


def _gates_among_queries(config: TransformerConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Moves the output gates into in_proj: the rows of each head's gate follow the rows of the head's queries, as
    Qwen3Next expects them."""
    for name in [name for name in state if name.endswith("gate_proj.weight")]:
        stacked = name.replace("gate_proj.", "in_proj_")
        queries, rest = state[stacked].split([config.d_model, 2 * _key_width(config)])
        # The rows of queries and of gates, by head: (heads, d_head, d) each.
        heads = [rows.unflatten(0, (config.heads, -1)) for rows in (queries, state.pop(name))]
        state[stacked] = torch.cat([torch.cat(heads, 1).flatten(0, 1), rest])
    return state


def _transposed(config: TransformerConfig, module: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Returns a module's tensor, transposed if it is a matrix: GPT-2's linear layers have the shape (in, out)."""
    return [(module, tensor.T if tensor.dim() == 2 else tensor)]


def _by_head(config: TransformerConfig, module: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Returns a module's tensor. The rows of in_proj are ordered by head: q, k and v of the first head, then those of
    the next, as GPT-NeoX has them."""
    if module == "self_attn.in_proj":
        by_projection = tensor.unflatten(0, (3, config.heads, -1))  # the rows of q, k and v, by head
        tensor = by_projection.transpose(0, 1).flatten(0, 2)
    return [(module, tensor)]


# The parts below describe the architectures.

_DECODER = {"architecture": ("decoder-only",), "residual": ("prenorm",)}
"""The values that these two options have in most architectures."""
_PLAIN = {"relu": "relu", "gelu": "gelu", "silu": "silu", "relu2": "relu2"}
_GATED = {"swiglu": "silu", "geglu": "gelu"}
"""Hugging Face's names for the activations of feed-forwards without a gate and with one."""
_ROTARY_RMS = {
    "norm": ("rmsnorm", "rmsnorm:llama"),
    "positions": ("rotary",),
    "activation": tuple(_GATED),
    "kv_heads": (),
}
"""The values that Llama and its relatives support; () means any value."""
_LLAMA_NAMES = {
    "embedding": "model.embed_tokens",
    "output_projection": "lm_head",
    "decoder.norm": "model.norm",
    "self_attn.out_proj": "self_attn.o_proj",
    "linear1": "mlp.gate_proj",
    "linear3": "mlp.up_proj",
    "linear2": "mlp.down_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}


def _llama_like(model_type: str) -> Callable[[TransformerConfig], dict[str, Any]]:
    """Returns a function that makes the config.json of an architecture with Llama's names. `model_type` is its name
    there."""

    def config_of(config: TransformerConfig) -> dict[str, Any]:
        """Returns the config.json of a model with these options."""
        return _shape(config) | {
            "model_type": model_type,
            "num_key_value_heads": config.kv_heads or config.heads,
            "head_dim": config.d_model // config.heads,
            "hidden_act": _GATED[config.activation],
            "rms_norm_eps": _eps(config),
            "attention_bias": config.linear_biases,
            "mlp_bias": config.linear_biases,
            # transformers 5 reads rope_parameters, and earlier versions read rope_theta.
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "rope_theta": config.rope_theta,
        }

    return config_of


def _qwen3_next(config: TransformerConfig) -> dict[str, Any]:
    """Returns the config.json of Qwen3-Next without linear attention and without experts."""
    layers = range(config.decoder_layers)
    rope = {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": 1.0}
    return _llama_like("qwen3_next")(config) | {
        "layer_types": ["full_attention" for _ in layers],
        "mlp_only_layers": [*layers],  # no layer has experts
        "rope_parameters": rope,
        "partial_rotary_factor": 1.0,
    }


def _gemma2(config: TransformerConfig) -> dict[str, Any]:
    """Returns the config.json of Gemma 2 without sliding windows."""
    d_head = config.d_model // config.heads
    return _llama_like("gemma2")(config) | {
        "hidden_activation": _GATED[config.activation],
        "layer_types": ["full_attention"] * config.decoder_layers,
        "query_pre_attn_scalar": d_head,
        "attn_logit_softcapping": config.score_softcap,
        "final_logit_softcapping": config.logit_softcap,
    }


_MULTIPLIERS = dict.fromkeys(("input_alpha", "output_alpha", "residual_multiplier", "attention_multiplier"), ())
"""The multipliers that Granite supports, with any value."""


def _granite(model_type: str) -> Callable[[TransformerConfig], dict[str, Any]]:
    """Returns a function that makes the config.json of a Granite architecture. `model_type` is its name there."""

    def config_of(config: TransformerConfig) -> dict[str, Any]:
        """Returns the config.json of a model with these options."""
        return _llama_like(model_type)(config) | {
            "layer_types": ["full_attention"] * config.decoder_layers,
            "embedding_multiplier": config.input_alpha,
            "residual_multiplier": config.residual_multiplier,
            "logits_scaling": 1 / config.output_alpha,  # transformers divides the logits by this number
            "attention_multiplier": config.attention_multiplier or (config.d_model // config.heads) ** -0.5,
        }

    return config_of


def _gpt2(config: TransformerConfig) -> dict[str, Any]:
    """Returns the config.json of GPT-2."""
    return {
        "model_type": "gpt2",
        "n_embd": config.d_model,
        "n_inner": config.d_ff,
        "n_layer": config.decoder_layers,
        "n_head": config.heads,
        "n_positions": config.max_positions,
        "activation_function": _PLAIN[config.activation],
        "layer_norm_epsilon": _eps(config),
        "resid_pdrop": config.dropout,
        "embd_pdrop": _rate(config, "embedding_dropout"),
        "attn_pdrop": _rate(config, "attention_dropout"),
    }


def _gpt_neox(config: TransformerConfig) -> dict[str, Any]:
    """Returns the config.json of GPT-NeoX with the sublayers one after the other."""
    rope = {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": 1.0}
    return _shape(config) | {
        "model_type": "gpt_neox",
        "hidden_act": _PLAIN[config.activation],
        "layer_norm_eps": _eps(config),
        "hidden_dropout": config.dropout,
        "attention_bias": config.linear_biases,
        "use_parallel_residual": False,
        "rope_parameters": rope,
        "rotary_emb_base": config.rope_theta,
        "rotary_pct": 1.0,
    }


_FAMILIES = (
    _Family(
        "LlamaForCausalLM",
        {**_DECODER, **_ROTARY_RMS, "linear_biases": (True, False)},
        _llama_like("llama"),
        "model.layers",
        _LLAMA_NAMES,
        _separate,
    ),
    _Family(
        "Qwen3ForCausalLM",
        {**_DECODER, **_ROTARY_RMS, "qk_norm": (True,), "linear_biases": (False,)},
        _llama_like("qwen3"),
        "model.layers",
        _LLAMA_NAMES,
        _separate,
    ),
    _Family(
        "Olmo2ForCausalLM",
        {
            **_DECODER,
            **_ROTARY_RMS,
            "norm": ("rmsnorm", "rmsnorm:olmo"),
            "residual": ("olmo2",),
            "linear_biases": (False,),
        },
        _llama_like("olmo2"),
        "model.layers",
        _LLAMA_NAMES | {"norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm"},
        _separate,
    ),
    _Family(
        "Qwen3NextForCausalLM",
        {
            **_DECODER,
            **_ROTARY_RMS,
            "norm": ("rmsnorm", "rmsnorm:gemma"),
            "qk_norm": (True,),
            "output_gate": ("element",),
            "linear_biases": (False,),
        },
        _qwen3_next,
        "model.layers",
        _LLAMA_NAMES,
        _separate,
        changes=(_zero_centred, _gates_among_queries),
    ),
    _Family(
        "HunYuanDenseV1ForCausalLM",
        {
            **_DECODER,
            **_ROTARY_RMS,
            "qk_norm": (True,),
            "qk_norm_after_rotation": (True,),
            "linear_biases": (False,),
        },
        _llama_like("hunyuan_v1_dense"),
        "model.layers",
        _LLAMA_NAMES | {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"},
        _separate,
    ),
    _Family(
        "Gemma2ForCausalLM",
        {
            **_DECODER,
            **_ROTARY_RMS,
            "norm": ("rmsnorm", "rmsnorm:gemma"),
            "residual": ("sandwich",),
            "score_softcap": (),
            "logit_softcap": (),
            "linear_biases": (False,),
        },
        _gemma2,
        "model.layers",
        _LLAMA_NAMES
        | {"post_norm1": "post_attention_layernorm", "norm2": "pre_feedforward_layernorm"}
        | {"post_norm2": "post_feedforward_layernorm"},
        _separate,
        scales_embeddings=True,
        changes=(_zero_centred,),
    ),
    _Family(
        "GraniteSWAForCausalLM",
        {
            **_DECODER,
            **_ROTARY_RMS,
            "sinks": (True,),
            "linear_biases": (True, False),
            **_MULTIPLIERS,
        },
        _granite("granite_swa"),
        "model.layers",
        _LLAMA_NAMES,
        _separate,
    ),
    _Family(
        "GraniteForCausalLM",
        {**_DECODER, **_ROTARY_RMS, "linear_biases": (True, False), **_MULTIPLIERS},
        _granite("granite"),
        "model.layers",
        _LLAMA_NAMES,
        _separate,
    ),
    _Family(
        "GPT2LMHeadModel",
        {**_DECODER, "positions": ("learned",), "activation": tuple(_PLAIN), "linear_biases": (True, False)},
        _gpt2,
        "transformer.h",
        {
            "embedding": "transformer.wte",
            "positions": "transformer.wpe",
            "output_projection": "lm_head",
            "decoder.norm": "transformer.ln_f",
            "self_attn.in_proj": "attn.c_attn",
            "self_attn.out_proj": "attn.c_proj",
            "linear1": "mlp.c_fc",
            "linear2": "mlp.c_proj",
            "norm1": "ln_1",
            "norm2": "ln_2",
        },
        _transposed,
        ("self_attn.in_proj", "self_attn.out_proj", "linear1", "linear2"),
    ),
    _Family(
        "GPTNeoXForCausalLM",
        {**_DECODER, "positions": ("rotary",), "activation": tuple(_PLAIN), "linear_biases": (True, False)},
        _gpt_neox,
        "gpt_neox.layers",
        {
            "embedding": "gpt_neox.embed_in",
            "output_projection": "embed_out",
            "decoder.norm": "gpt_neox.final_layer_norm",
            "self_attn.in_proj": "attention.query_key_value",
            "self_attn.out_proj": "attention.dense",
            "linear1": "mlp.dense_h_to_4h",
            "linear2": "mlp.dense_4h_to_h",
            "norm1": "input_layernorm",
            "norm2": "post_attention_layernorm",
        },
        _by_head,
        ("linear1", "linear2"),
    ),
)


def _family(config: TransformerConfig, origin: str) -> _Family:
    """Returns an architecture that computes the model. `origin`: the model's folder, for messages. Errors: InputError
    if there is none; it names the options that the nearest architecture does not support."""
    misfits = [(family.misfits(config), family) for family in _FAMILIES]
    unsupported, nearest = min(misfits, key=lambda entry: len(entry[0]))
    if unsupported:
        names = ", ".join(family.name for family in _FAMILIES)
        raise InputError(
            f"{origin}: no architecture of Hugging Face among {names} computes this model; {nearest.name} is nearest, "
            f"and has no counterpart of {', '.join(unsupported)}"
        )
    return nearest


def to_huggingface(
    model: str | PathLike[str] | Transformer, output: str | PathLike[str], *, checkpoint: str | int = "best"
) -> str:
    """Writes a language model as a new folder for `AutoModelForCausalLM` and `AutoTokenizer`. Returns the name of the
    model's class in transformers.

    Args:
        model: the `output` of training, or a Transformer.
        output: a new folder for config.json, generation_config.json and model.safetensors; for a run also its
            vocabulary and merges, tokenizer.json and tokenizer_config.json.
        checkpoint: a run's checkpoint, as in `Transformer.from_checkpoint`.

    LlamaForCausalLM computes prenorm with rmsnorm, rotary positions and swiglu or geglu. Qwen3ForCausalLM computes the
    same with norms on each head's queries and keys, HunYuanDenseV1ForCausalLM with these norms after the rotation,
    Qwen3NextForCausalLM with these norms and an output gate for each element, GraniteForCausalLM with multipliers of
    embeddings, branches, scores and logits, GraniteSWAForCausalLM with sinks and the same multipliers, Olmo2ForCausalLM
    under olmo2, and Gemma2ForCausalLM under sandwich, with softcaps of scores and logits as options.
    GPT2LMHeadModel computes prenorm with layernorm, learned positions and relu, gelu or silu; GPTNeoXForCausalLM the
    same with rotary positions. If embeddings are scaled by √d_model and the class does not scale them, the written
    embedding is multiplied by √d_model, and the output projection is a separate matrix. max_position_embeddings is the
    run's `segment_length`; for a Transformer, and with learned positions, it is `max_positions`. generation_config.json
    suppresses the tokens that the target vocabulary leaves out. Logits agree up to rounding: transformers keeps rotary
    angles and RMS norms in float32, whatever the type of the model.

    The tokenizer returns the ids that `generate` reads: an end of sentence begins a text, and replaces each newline.
    It applies merges one by one: with 4000 of them a line takes milliseconds.

    Errors: InputError for options that have no counterpart there, naming them, and for an existing `output`.
    """
    types: list[bool] | None = None  # for each id, True if it is in the target vocabulary
    texts: dict[str, str] = {}  # the content of the text files, by their names
    context: int | None = None  # the run's segment_length
    if isinstance(model, Transformer):
        config, state, origin = model.config, {k: v.detach() for k, v in model.state_dict().items()}, "the model"
    else:
        (config, state), origin = load_run(model, checkpoint), str(model)
        types = _core.target_vocabulary(origin)
        context = json.loads(_core.run_options(origin, str(checkpoint)))["data"]["segment_length"]
        paths = [path for path in (Path(model) / name for name in (_VOCABULARY, _CODES)) if path.exists()]
        if paths:
            _core.encode(origin, [])  # raises for damaged files
        # Files are read as bytes, so that a carriage return in a piece is not changed into a newline. U+FEFF at the
        # start is a piece: these files have no byte order mark.
        texts = {path.name: read_regular(path).decode("utf-8") for path in paths}
    family = _family(config, origin)
    # The ids outside the target vocabulary, without BOS and PAD, which are suppressed in any case.
    unseen = [i for i, known in enumerate(types or ()) if not known and i not in (_BOS, _PAD)]
    if texts:
        texts |= tokenizer_files(texts[_VOCABULARY], texts.get(_CODES), unseen, config.vocab_size)
    suppressed = [_BOS, _PAD, *unseen]
    # Training and `generate` begin a text with EOS.
    ids = {"bos_token_id": _EOS, "eos_token_id": _EOS, "pad_token_id": _PAD}
    words = state["embedding.weight" if config.tie_embeddings == "all" else "target_embedding.weight"]
    shared = {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": family.is_tied(config),
        "architectures": [family.name],
    }
    shared |= {"dtype": str(words.dtype).removeprefix("torch.")}
    has_own_length = context is None or config.positions == "learned"
    exported = config if has_own_length else config.replace(max_positions=context)
    settings = {"config.json": family.config(exported) | shared | ids}
    settings |= {"generation_config.json": ids | {"suppress_tokens": suppressed}}
    texts |= {name: json.dumps(content, indent=2) + "\n" for name, content in settings.items()}
    tensors = {name: tensor.contiguous() for name, tensor in family.state(config, state)}
    _core.write_arrays(str(output), texts, [*tensors], [*tensors.values()])
    return family.name
