"""Padding masks, read from a model's own calls, for norms that keep statistics."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.masks import Given, give, given
from ..nn.running import PowerNorm, RunningNorm
from .undo import Edits

_NAMES = (
    "attention_mask",
    "decoder_attention_mask",
    "key_padding_mask",
    "src_key_padding_mask",
    "tgt_key_padding_mask",
)
_PAIRS = ({"attention_mask", "decoder_attention_mask"}, {"src_key_padding_mask", "tgt_key_padding_mask"})
_CAUSAL = ("is_causal", "tgt_is_causal")
_OTHERWISE = "call the model inside `with normformer_rs.nn.padding_mask(…)`"
_LOOKS = 8
"""The number of training batches without masks that are searched for padding tokens; the host waits for the device in
each."""


def read_padding(model: nn.Module, edits: Edits) -> None:
    """Makes each module of `model` that takes padding masks hand them to the norms with statistics in it.

    The innermost such module counts. One that gets no mask leaves its outer one's in force, except where that takes a
    mask for each of two stacks. Masks of attention, (B, 1, T, T), count where nothing outer was given.
    """
    said: set[str] = set()
    for module in model.modules():
        places = _places(module)
        hears = any(isinstance(getattr(hook, "__self__", None), _Reader) for hook in module._forward_pre_hooks.values())
        if hears or not places or not any(isinstance(m, RunningNorm) for m in module.modules() if m is not module):
            continue
        reader = _Reader(module, places, said)
        edits.afterwards(module.register_forward_pre_hook(reader.enter, with_kwargs=True).remove)
        edits.afterwards(module.register_forward_hook(reader.leave, always_call=True).remove)


def _places(module: nn.Module) -> dict[str, int]:
    """The masks among its forward's arguments: names and positions."""
    try:
        names = [*inspect.signature(module.forward).parameters]
    except (TypeError, ValueError):  # a forward in C
        return {}
    return {name: names.index(name) for name in _NAMES if name in names}


class _Reader:
    """The hooks on one module. Its bound methods are copied and pickled with the module."""

    def __init__(self, module: nn.Module, places: dict[str, int], said: set[str]) -> None:
        self.places, self.said = places, said
        self.looks, self.looked_for_causal = 0, False
        self.takes_both = any(pair <= places.keys() for pair in _PAIRS)
        layouts = (getattr(m, "batch_first", None) for m in module.modules())
        self.batch_first = next((layout for layout in layouts if isinstance(layout, bool)), True)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        outer, is_compiling = given(), torch.compiler.is_compiling()
        masks = self._masks(args, kwargs, outer)
        if not masks and outer is not None and not outer.takes_both:
            masks = outer.masks
        give(Given(masks, self.takes_both, self, outer, [0, 0, 0] if outer is None else outer.tally))
        if module.training and torch.is_grad_enabled() and not is_compiling:
            self._warn_if_causal(module, kwargs)
            if outer is None and not masks:
                self._warn_of_padding_tokens(module, args, kwargs)

    def leave(self, module: nn.Module, _: Any, __: Any) -> None:
        now = given()
        if now is None or now.reader is not self:  # a hook before this one raised
            return
        give(now.outer)
        if now.outer is None and module.training and not torch.compiler.is_compiling():
            fitted, missed, doubtful = now.tally
            shapes = ", ".join(str(tuple(mask.shape)) for mask in now.masks) or "of its parts"
            if doubtful:
                text = f"norms with statistics got inputs that fit several of the padding masks {shapes}"
                self._say("several", f"{text}, and took padding in: {_OTHERWISE}")
            elif missed and not fitted:
                text = f"norms with statistics got inputs of other shapes than the padding masks {shapes}"
                self._say("none", f"{text}, and took padding in: {_OTHERWISE}")

    def _masks(self, args: Sequence[Any], kwargs: Mapping[str, Any], outer: Given | None) -> tuple[Tensor, ...]:
        read: dict[int, Tensor] = {}
        for name, position in self.places.items():
            mask = kwargs.get(name, args[position] if position < len(args) else None)
            if not isinstance(mask, Tensor):
                continue
            is_attentions = mask.dim() > 2
            if not is_attentions or ((outer is None or outer.takes_both) and mask.shape[0] > 1):
                read[id(mask)] = self._padding(name, mask)
        return tuple(read.values())

    def _padding(self, name: str, mask: Tensor) -> Tensor:
        """bool, True at padding, laid out as the module's input."""
        padding = mask != 0 if name.endswith("key_padding_mask") else is_hidden(mask)
        if padding.dim() > 2:  # (B, …, Q, K): no query attends to padding
            padding = padding.flatten(1, -2).all(1)
        return padding if self.batch_first or padding.dim() < 2 else padding.transpose(0, 1)

    def _warn_if_causal(self, module: nn.Module, kwargs: Mapping[str, Any]) -> None:
        is_causal = any(kwargs.get(name) is True for name in _CAUSAL) and any(map(_leaks, module.modules()))
        if is_causal or (not self.looked_for_causal and _has_leaking_causal_part(module)):
            self._say(
                "causal",
                "norms with statistics stand in a causal part of the model: in training, later tokens move its outputs "
                "at earlier ones; a norm of rows (layernorm, rmsnorm, scalenorm) keeps them apart",
            )
        self.looked_for_causal = True

    def _warn_of_padding_tokens(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Warns of padding tokens in a batch without a mask; silent where padding or its token cannot be told."""
        config: Any = getattr(module, "config", None)
        ends = {getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "sep")}
        pad, ids = getattr(config, "pad_token_id", None), kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(pad, int) or pad in ends or not isinstance(ids, Tensor) or ids.is_floating_point():
            return
        if self.looks < _LOOKS and ids.dim() == 2:
            self.looks += 1
            if bool((ids[:, [0, -1]] == pad).any()):
                wanted = " and ".join(self.places)
                text = f"norms with statistics took padding in: call {type(module).__name__} with its {wanted}"
                self._say("tokens", f"{text}, or {_OTHERWISE}")

    def _say(self, what: str, message: str) -> None:
        """Warns once per kind of message."""
        if what not in self.said:
            self.said.add(what)
            warnings.warn(message, stacklevel=2)


def is_hidden(mask: Tensor) -> Tensor:
    """True where a mask of Hugging Face's hides: False or 0, but below 0 where it is added to scores. The host does not
    wait for the device."""
    if not mask.is_floating_point():
        return mask == 0
    is_added = ((mask != 0) & (mask != 1)).any() | (mask != 1).all()
    return torch.where(is_added, mask < 0, mask == 0)


def _leaks(module: nn.Module) -> bool:
    """Its training forward depends on all rows of the batch. PowerNorm's after its warm-up does not: it uses earlier
    batches."""
    return isinstance(module, RunningNorm) and not (
        isinstance(module, PowerNorm) and module.mode == "paper" and module.warmup_iters == 0
    )


def _has_leaking_causal_part(model: nn.Module) -> bool:
    """A module that calls itself causal or a decoder, or the one around it, holds such a norm."""
    for name, module in model.named_modules():
        if getattr(module, "is_causal", False) is True or getattr(module, "is_decoder", False) is True:
            around = model.get_submodule(name.rpartition(".")[0])
            if any(_leaks(m) for m in around.modules()):
                return True
    return False
