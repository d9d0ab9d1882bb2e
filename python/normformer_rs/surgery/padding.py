"""Reads padding masks from the arguments of a model's calls, and hands them to norms that keep statistics."""

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.attention import HIDDEN
from ..nn.masks import GivenMasks, give, given
from ..nn.running import PowerNorm, RunningNorm
from .undo import Edits

_NAMES = (
    "attention_mask",
    "decoder_attention_mask",
    "key_padding_mask",
    "src_key_padding_mask",
    "tgt_key_padding_mask",
)
"""The arguments that are padding masks."""
_PAIRS = ({"attention_mask", "decoder_attention_mask"}, {"src_key_padding_mask", "tgt_key_padding_mask"})
"""The two masks of a module that has an encoder and a decoder."""
_STACKS = {"attention_mask": "input_ids", "decoder_attention_mask": "decoder_input_ids"}
"""The name of a mask in Hugging Face's models → the name of the tokens that it belongs to."""
_READ = (*_NAMES, *_STACKS.values(), "labels", "encoder_hidden_states")
"""The arguments from which padding can be read."""
_IGNORED = -100
"""The label that Hugging Face's losses ignore."""
_CAUSAL = ("is_causal", "tgt_is_causal")
"""The arguments that say that a call is causal."""
_OTHERWISE = "call the model inside `with normformer_rs.nn.padding_mask(…)`"
"""The last advice of several warnings."""
_LOOKS = 8
"""How many training batches without masks are searched for padding tokens. The host waits for the device in each."""


def read_padding(model: nn.Module, edits: Edits) -> None:
    """Makes each module of `model` whose forward takes padding masks pass them to the norms with statistics inside it.

    If such modules are nested, the inner module's masks are used. If it gets none, the outer module's are used, unless
    the outer module takes a mask for each of two stacks. Attention masks, (B, 1, T, T), are used if no outer module
    with masks of one stack is running. `edits`: undoes the hooks with the swap.
    """
    said: set[str] = set()  # the kinds of warnings given so far, by any reader of the model
    for module in model.modules():
        names = _arguments(module)
        has_reader = any(
            isinstance(getattr(hook, "__self__", None), _Reader) for hook in module._forward_pre_hooks.values()
        )
        if has_reader or not any(name in names for name in _NAMES):
            continue
        if not any(isinstance(m, RunningNorm) for m in module.modules() if m is not module):
            continue
        reader = _Reader(module, names, said)
        edits.afterwards(module.register_forward_pre_hook(reader.enter, with_kwargs=True).remove)
        edits.afterwards(module.register_forward_hook(reader.leave, always_call=True).remove)


def _arguments(module: nn.Module) -> dict[str, int]:
    """Returns the arguments of a module's forward from which padding can be read: name → position."""
    try:
        names = [*inspect.signature(module.forward).parameters]
    except (TypeError, ValueError):  # a forward that is written in C has no signature
        return {}
    return {name: names.index(name) for name in _READ if name in names}


class _Reader:
    """The hooks on one module that takes padding masks. Copies and pickles of the module include this object, since the
    hooks are its bound methods. `names`: as `_arguments` returns them; `said`: the kinds of warnings given so far."""

    def __init__(self, module: nn.Module, names: dict[str, int], said: set[str]) -> None:
        self.names, self.said = names, said
        self.looks, self.looked_for_causal = 0, False  # `looks`: the batches that were searched for padding tokens
        self.takes_both = any(pair <= names.keys() for pair in _PAIRS)  # a mask for each of two stacks
        layouts = (getattr(m, "batch_first", None) for m in module.modules())
        self.batch_first = next((layout for layout in layouts if isinstance(layout, bool)), True)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Gives norms inside the module the masks among its arguments, or the masks of a module around it. The hook
        before a call."""
        running, is_compiling = self._begun(), torch.compiler.is_compiling()
        # an earlier call of this module may still be noted, since a KeyboardInterrupt skips the hook that ends a call
        outer = given() if running is None else running.outer
        values = ((name, kwargs.get(name, args[i] if i < len(args) else None)) for name, i in self.names.items())
        tensors = {name: value for name, value in values if isinstance(value, Tensor)}
        masks, decoders = self._masks(tensors, outer), self._decoders(module, tensors, outer)
        if not masks and "encoder_hidden_states" in tensors:  # the module is a decoder that got no mask
            masks = decoders if outer is None else outer.decoders or decoders
        if not masks and outer is not None and not outer.takes_both:
            masks = outer.masks
        # counts the norms' inputs that fit one mask, none, and several; the norms increment it
        tally = [0, 0, 0] if outer is None else outer.tally
        give(GivenMasks(masks + decoders if self.takes_both else masks, self.takes_both, self, outer, tally, decoders))
        if module.training and torch.is_grad_enabled() and not is_compiling:
            self._warn_if_causal(module, kwargs)
            if outer is None and (self.takes_both or not masks):
                self._warn_of_padding_tokens(module, tensors, decoders)

    def leave(self, module: nn.Module, _: Any, __: Any) -> None:
        """Restores the outer masks, and warns if masks did not fit the norms' inputs. The hook after a call."""
        now = self._begun()
        if now is None:  # no call began, because a hook that ran before `enter` raised
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

    def _begun(self) -> GivenMasks | None:
        """Returns the masks of this module's innermost call that is running. None: there is no such call."""
        now = given()
        while now is not None and now.reader is not self:
            now = now.outer
        return now

    def _masks(self, tensors: Mapping[str, Tensor], outer: GivenMasks | None) -> tuple[Tensor, ...]:
        """Returns the padding masks among a call's arguments (`tensors`), each once. `outer`: the masks of the call
        around this one."""
        read: dict[int, Tensor] = {}  # a mask's identity → the positions that are padding
        for name, mask in tensors.items():
            is_attention_mask = mask.dim() > 2
            # `read_padding` says which attention masks count; one for a single row may be a causal mask for all rows
            if name in _NAMES and (
                not is_attention_mask or ((outer is None or outer.takes_both) and mask.shape[0] > 1)
            ):
                read[id(mask)] = self._padding(name, mask)
        return tuple(read.values())

    def _decoders(
        self, module: nn.Module, tensors: Mapping[str, Tensor], outer: GivenMasks | None
    ) -> tuple[Tensor, ...]:
        """Returns a padding mask for a decoder that is called without one in training, or (). The mask follows from the
        padding of the decoder's tokens, or else from that of the labels, shifted to the right by one as models shift
        them to make the decoder's input. `tensors`: the call's arguments; `outer`: the masks of the call around it."""
        if not module.training:
            return ()
        if "decoder_attention_mask" in self.names:
            if "decoder_attention_mask" in tensors:
                return ()
            if outer is not None and outer.decoders:
                return outer.decoders
            labels, ids = tensors.get("labels"), tensors.get("decoder_input_ids")
        else:  # the module may be the decoder itself, whose caller has the labels
            is_without = "encoder_hidden_states" in tensors and not any(name in tensors for name in _NAMES)
            labels, ids = None, tensors.get("input_ids") if is_without else None
        pad, is_sure = _pad_token(module)  # `is_sure`: the token has no other use
        if ids is not None and ids.dim() == 2 and is_sure:
            hidden = torch.eq(ids, pad)
            # T5 begins a decoder's input with the padding token, which is no padding at that place
            if pad == getattr(getattr(module, "config", None), "decoder_start_token_id", None):
                hidden = hidden & (torch.arange(ids.shape[1], device=ids.device) > 0)
            return (hidden,)
        if labels is not None and labels.dim() == 2 and (ids is None or ids.shape == labels.shape):
            hidden = torch.eq(labels, _IGNORED)
            hidden = hidden | torch.eq(labels, pad) if is_sure else hidden
            return (nn.functional.pad(hidden[:, :-1], (1, 0)),)  # the start token, which comes first, is no padding
        return ()

    def _padding(self, name: str, mask: Tensor) -> Tensor:
        """Returns a mask as bool, True at padding, in the layout of the module's input."""
        if name.endswith("key_padding_mask"):
            padding = mask <= HIDDEN if mask.is_floating_point() else mask != 0
        else:
            padding = is_hidden(mask)
        if padding.dim() > 2:  # (B, …, queries, keys): padding is what no query attends to
            padding = padding.flatten(1, -2).all(1)
        return padding if self.batch_first or padding.dim() < 2 else padding.transpose(0, 1)

    def _warn_if_causal(self, module: nn.Module, kwargs: Mapping[str, Any]) -> None:
        """Warns if a causal part of the model holds norms whose training forward mixes positions."""
        is_causal = any(kwargs.get(name) is True for name in _CAUSAL) and any(map(_leaks, module.modules()))
        if is_causal or (not self.looked_for_causal and _has_leaking_causal_part(module)):
            self._say(
                "causal",
                "norms with statistics stand in a causal part of the model: in training, later tokens move its outputs "
                "at earlier ones; a norm of rows (layernorm, rmsnorm, scalenorm) keeps them apart",
            )
        self.looked_for_causal = True

    def _warn_of_padding_tokens(
        self, module: nn.Module, tensors: Mapping[str, Tensor], decoders: tuple[Tensor, ...]
    ) -> None:
        """Warns if a stack's batch without a mask has padding tokens. Does nothing if no padding token is known.
        `decoders`: the masks that were made for a decoder without one."""
        pad, is_sure = _pad_token(module)
        # the missing masks → the tokens that they would belong to
        unmasked = {
            mask: tensors.get(tokens) for mask, tokens in _STACKS.items() if mask in self.names and mask not in tensors
        }
        if decoders:
            unmasked.pop("decoder_attention_mask", None)
        batches = [(mask, ids) for mask, ids in unmasked.items() if ids is not None and ids.dim() == 2]
        if pad < 0 or not batches or self.looks >= _LOOKS:
            return
        self.looks += 1
        for mask, ids in batches:
            padded = ids == pad
            if not is_sure:  # the token may also end a sentence, but if two follow each other, one is padding
                padded = padded[:, 1:] & padded[:, :-1]
            if padded.shape[1] and bool(padded[:, [0, -1]].any()):  # a row begins or ends with padding
                text = f"norms with statistics took padding in: call {type(module).__name__} with its {mask}"
                self._say(mask, f"{text}, or {_OTHERWISE}")

    def _say(self, what: str, message: str) -> None:
        """Warns once per kind of message (`what`)."""
        if what not in self.said:
            self.said.add(what)
            warnings.warn(message, stacklevel=2)


def is_hidden(mask: Tensor) -> Tensor:
    """Returns True at the positions that a mask of Hugging Face hides. These have False or 0, or, in a mask that is
    added to scores, a number far below 0. The host does not wait for the device."""
    if not mask.is_floating_point():
        return mask == 0
    # A mask with other numbers than 0 and 1 is added to scores. A mask without a 1 is, too: else a mask of zeros, which
    # adds nothing, would hide everything.
    is_added = ((mask != 0) & (mask != 1)).any() | (mask != 1).all()
    return torch.where(is_added, mask <= HIDDEN, mask == 0)


def _pad_token(module: nn.Module) -> tuple[int, bool]:
    """Returns the padding token in a module's configuration (−1: there is none), and whether that token has no other
    use."""
    config: Any = getattr(module, "config", None)
    pad = getattr(config, "pad_token_id", None)
    if not isinstance(pad, int):
        return -1, False
    return pad, pad not in {getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "sep")}


def _leaks(module: nn.Module) -> bool:
    """Returns whether a norm's training forward depends on all rows of the batch. PowerNorm's does not after its
    warm-up, since it uses statistics of earlier batches."""
    return isinstance(module, RunningNorm) and not (
        isinstance(module, PowerNorm) and module.mode == "paper" and module.warmup_iters == 0
    )


def _has_leaking_causal_part(model: nn.Module) -> bool:
    """Returns whether a module that calls itself causal or a decoder, or the module around it, holds a norm whose
    training forward depends on all rows of the batch."""
    for name, module in model.named_modules():
        if getattr(module, "is_causal", False) is True or getattr(module, "is_decoder", False) is True:
            around = model.get_submodule(name.rpartition(".")[0])
            if any(_leaks(m) for m in around.modules()):
                return True
    return False
