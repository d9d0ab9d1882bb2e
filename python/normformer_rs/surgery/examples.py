"""Finds an input for one run of a model: the caller's example, or a small input made for models of torch.nn, of this
package, of Hugging Face and of timm."""

import collections
import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .. import nn as nfnn
from ..errors import InputError

TOKENS = 6
"""The number of tokens in each row of a made input."""
_ENCODERS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nfnn.TransformerEncoder, nfnn.TransformerEncoderLayer)
_DECODERS = (nn.TransformerDecoder, nn.TransformerDecoderLayer, nfnn.TransformerDecoder, nfnn.TransformerDecoderLayer)
_WHOLE = (nn.Transformer, nfnn.Transformer)


def caller(model: nn.Module, example: Any) -> Callable[[], Any] | None:
    """Returns a function that runs the model on the example: keyword arguments, a tuple of arguments, one argument, or
    a function of the model. Without an example, the input follows from the model's class and configuration. None: no
    input is known."""
    if callable(example):
        return lambda: example(model)
    # detached, since a traced run takes a tensor that requires a gradient for one that a matrix has computed
    example = tree_map(lambda t: t.detach() if isinstance(t, Tensor) and t.requires_grad else t, example)
    if isinstance(example, Mapping):
        return lambda: model(**example)
    if example is not None:
        arguments = example if isinstance(example, tuple | list) else (example,)
        return lambda: model(*arguments)
    made = _made(model)
    return None if made is None else (lambda: model(**made))


@contextlib.contextmanager
def quietly(model: nn.Module) -> Iterator[None]:
    """Restores training modes, buffers and random states after a `with` block. Inside it, random numbers are the same
    each time, and compiled code and torch.nn's fused evaluation are off."""
    modes = {module: module.training for module in model.modules()}
    contents = [(value, copy.copy(value)) for module in modes for value in _containers(module)]
    # (module, name, buffer, copy of its numbers)
    buffers = [(m, name, b, b.clone()) for m in modes for name, b in m._buffers.items() if b is not None]
    devices = [p.device for p in model.parameters() if p.device.type == "cuda"][:1]
    numpy: Any = sys.modules.get("numpy.random")  # None: nobody has imported it, so nobody draws from it
    python_state, numpy_state = random.getstate(), numpy and numpy.get_state()
    is_fused = torch.backends.mha.get_fastpath_enabled()  # the fused evaluation, which fails without biases
    with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed every GPU, too
        for device in devices:
            torch.cuda.default_generators[device.index or 0].manual_seed(0)
        random.seed(0)
        if numpy:
            numpy.seed(0)
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(is_fused)
            random.setstate(python_state)
            if numpy:
                numpy.set_state(numpy_state)
            for module, mode in modes.items():
                module.training = mode
            for container, before in contents:
                if not _is_same(container, before):
                    container.clear()
                    (container.extend if isinstance(container, list | collections.deque) else container.update)(before)
            with torch.no_grad(), torch._C.DisableTorchFunction():  # a recorded run must not see these copies
                for owner, name, buffer, value in buffers:
                    owner._buffers[name] = buffer
                    buffer.copy_(value)


def _is_same(container: Any, other: Any) -> bool:
    """Returns whether two containers hold the same objects in the same order."""
    if isinstance(container, dict):
        return list(container) == list(other) and _is_same([*container.values()], [*other.values()])
    return len(container) == len(other) and all(a is b for a, b in zip(container, other))


_TORCHS_OWN = frozenset(vars(nn.Module()))
"""The attributes that every module has, such as the dictionary of its children."""


def _containers(module: nn.Module) -> Iterator[Any]:
    """Yields the lists, dictionaries, sets and queues that a module has as its own attributes. A run may fill them."""
    for name, value in vars(module).items():
        if name not in _TORCHS_OWN and type(value) in (list, dict, set, collections.deque):
            yield value


def _made(model: nn.Module) -> dict[str, Tensor] | None:
    """Returns keyword arguments made for a model. None: no input is known."""
    config = getattr(model, "config", None)
    p = next(model.parameters(), None)  # gives the dtype and device of the input
    if p is None:
        return None
    if type(model).__module__.startswith("timm."):  # its models take images
        settings = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
        size = settings.get("input_size", (3, 224, 224))
        embed: Any = getattr(model, "patch_embed", None)
        size = (size[0], *(getattr(embed, "img_size", None) or size[1:]))  # (channels, height, width)
        return {"x": _numbers(p, 2, *size)}
    if isinstance(model, _ENCODERS + _DECODERS + _WHOLE):
        return _of_torchs(model, p)
    if not hasattr(config, "model_type"):
        return None
    return _of_transformers(model, config, p)


def _of_torchs(model: nn.Module, p: Tensor) -> dict[str, Tensor] | None:
    """Returns inputs for a Transformer of torch.nn or of this package, or for an encoder, decoder or layer of one. `p`:
    a parameter, for dtype and device. None: the model has no attention, whose width is needed."""
    attention = next((m for m in model.modules() if isinstance(m, nn.MultiheadAttention)), None)
    if attention is None:
        return None
    names = ("src",) if isinstance(model, _ENCODERS) else ("tgt", "memory")
    names = ("src", "tgt") if isinstance(model, _WHOLE) else names
    # two rows of 3 vectors in the first input, and of 4 in the second
    given = {name: _numbers(p, 2, length, attention.embed_dim) for name, length in zip(names, (3, 4))}
    return {name: x if attention.batch_first else x.transpose(0, 1) for name, x in given.items()}


def _numbers(p: Tensor, *shape: int) -> Tensor:
    """Returns random numbers of this shape, with the dtype and device of the parameter p. torch's random state does not
    change."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(0), device="cpu").to(p.device, p.dtype)


def _of_transformers(model: Any, config: Any, p: Tensor) -> dict[str, Tensor] | None:
    """Returns inputs for a Hugging Face model: tokens, images or audio, as its configuration says. `p`: a parameter,
    for dtype and device. None: the model's main input is of another kind."""
    name = getattr(model, "main_input_name", "input_ids")
    # the configurations of the parts that read text and images; the model's own if a part has none
    text, vision = (_sub(config, *names) for names in (("text_config", "decoder"), ("vision_config",)))
    given: dict[str, Tensor] = {}
    # a text classifier finds each row's last token by the padding; without a padding token it accepts only one row
    is_classifier = type(model).__name__.endswith("ForSequenceClassification")
    rows = 1 if is_classifier and getattr(config, "pad_token_id", None) is None else 2

    def tokens(part_config: Any) -> Tensor:
        """Returns different tokens, (rows, TOKENS), below the vocabulary's size."""
        size: int = getattr(part_config, "vocab_size", 0) or getattr(config, "vocab_size", 100)
        first = min(4, size - 1)  # the first numbers often are padding and other special tokens
        return torch.arange(rows * TOKENS, device=p.device).view(rows, TOKENS) % (size - first) + first

    if name == "input_ids" or model.__class__.__name__.startswith(("CLIPModel", "SiglipModel")):
        given["input_ids"] = tokens(text)
    if name == "pixel_values" or (vision is not config and "input_ids" in given and _takes(model, "pixel_values")):
        size = getattr(vision, "image_size", 32)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(vision, "num_channels", 3)
        frames = getattr(config, "num_frames", None)  # models of videos have it
        given["pixel_values"] = _numbers(p, 1, *([frames] if frames else []), channels, height, width)
        if "input_ids" in given:  # the same image twice, for the two rows of tokens
            given["pixel_values"] = given["pixel_values"].expand(2, *given["pixel_values"].shape[1:])
    if name in ("input_features", "input_values"):
        bins = getattr(config, "num_mel_bins", None)  # models that read spectrograms have it; others read sound waves
        length = 2 * getattr(config, "max_source_positions", 200)  # Whisper's convolutions halve it
        if name == "input_values" and bins:
            given[name] = _numbers(p, 1, getattr(config, "max_length", 64), bins)
        else:
            # without bins, a quarter of a second of sound at 16 kHz
            given[name] = _numbers(p, 1, bins, length) if bins else _numbers(p, 1, 4000)
    if not given:
        return None
    if getattr(config, "add_cross_attention", False) and _takes(model, "encoder_hidden_states"):
        columns: int = getattr(config, "hidden_size", 0) or getattr(config, "n_embd", 1)
        given["encoder_hidden_states"] = _numbers(p, next(iter(given.values())).shape[0], 3, columns)
    if getattr(config, "is_encoder_decoder", False) and _takes(model, "decoder_input_ids"):
        given["decoder_input_ids"] = tokens(text)[: next(iter(given.values())).shape[0]]
    return given


def _sub(config: Any, *names: str) -> Any:
    """Returns the first configuration inside `config` under one of these names, or `config` itself."""
    return next((found for name in names if hasattr(found := getattr(config, name, None), "to_dict")), config)


def _takes(model: nn.Module, name: str) -> bool:
    """Returns whether the model's forward has an argument of this name."""
    import inspect

    return name in inspect.signature(model.forward).parameters


def refuse_without(model: nn.Module, why: str) -> InputError:
    """Returns the error for a model for which no input is known, or that fails on the input made for it."""
    return InputError(
        f"{type(model).__name__}'s parts are found by running the model once, and {why}: pass example=, the keyword "
        "arguments of a call as a dictionary (or a function of the model)"
    )


def failed_on(model: nn.Module, reason: Exception) -> InputError:
    """Returns the error for a model that fails on the user's example."""
    return InputError(
        f"the run of {type(model).__name__} on example failed ({type(reason).__name__}: {reason}): pass the keyword "
        "arguments of a call that works, on the model's device"
    )
