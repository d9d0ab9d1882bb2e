"""Padding masks for norms deep inside models that do not pass masks on."""

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError

_masks: contextvars.ContextVar[tuple[Tensor, ...]] = contextvars.ContextVar("normformer_rs_padding_masks", default=())
# torch.compile supports no context variables and treats thread-locals as constants, but it guards globals. So compiled
# code reads this global.
_masks_compiled: tuple[Tensor, ...] = ()


class GivenMasks(NamedTuple):
    """The masks with which a model was called, in force while the module that got them runs."""

    masks: tuple[Tensor, ...]
    """bool, (B, T) or (T, B), True at padding."""
    takes_both: bool
    """True if the module takes a mask for each of two stacks, encoder and decoder."""
    reader: Any
    """The object whose hooks put these masks in force."""
    outer: "GivenMasks | None"
    """The masks that were in force before."""
    tally: list[int]
    """The numbers of norm inputs, since the outermost call, that one mask fits, no mask fits, and several masks fit."""
    decoders: tuple[Tensor, ...] = ()
    """The decoder's mask, computed from labels or tokens if its caller passes none; empty if there is none."""


_given: contextvars.ContextVar[GivenMasks | None] = contextvars.ContextVar("normformer_rs_given_masks", default=None)
_given_compiled: GivenMasks | None = None
"""The masks that `given` returns in compiled code, for the same reason as `_masks_compiled`."""


@contextmanager
def padding_mask(*masks: Tensor, batch_first: bool = True) -> Iterator[None]:
    """Makes norms with statistics leave out the positions that these masks mark, anywhere in a model, inside the block.

    >>> import torch
    >>> from normformer_rs import nn
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), nn.PowerNormV(4))
    >>> with padding_mask(torch.tensor([[False, False, True]])):
    ...     y = model(torch.randn(1, 3, 4))
    >>> y[0, 2].abs().sum().item()
    0.0

    Args:
        masks: bool, (B, T), True at padding. If there are several (source and target), each norm uses the one that has
            its input's shape.
        batch_first: True if the model's tensors are (B, T, d), False for (T, B, d). Rows in one dimension, (B·T, d) or
            (T·B, d), are recognised too.

    The innermost `with` block of the thread is in force (in compiled models, of the process). Errors: InputError in a
    norm whose input has the shape of none of the masks, or of two that differ.
    """
    for mask in masks:
        if mask.dtype != torch.bool or mask.dim() != 2:
            got = f"{mask.dtype} {tuple(mask.shape)}"
            raise InputError(f"a padding mask must be bool (B, T), True at padding; got {got}")
    global _masks_compiled
    before, _masks_compiled = _masks_compiled, tuple(mask if batch_first else mask.transpose(0, 1) for mask in masks)
    token = _masks.set(_masks_compiled)
    try:
        yield
    finally:
        _masks.reset(token)
        _masks_compiled = before


def check_mask(mask: Any) -> None:
    """Raises TypeError unless the padding mask is a bool tensor."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            f"padding_mask must be bool, True at padding; got {got}: of a tokenizer's mask, 1 at real tokens, give "
            "attention_mask == 0"
        )


def mask_for(x: Tensor) -> Tensor | None:
    """Returns the mask in force for x (…, d): from `padding_mask`, else from the model's own arguments, else None."""
    masks = _masks_compiled if torch.compiler.is_compiling() else _masks.get()
    rows = x.shape[:-1]
    if not masks:
        return _given_for(rows)
    fitting = [mask for mask in masks if mask.shape == rows]
    # x may have its rows in one dimension, as in (B·T, d).
    fitting = fitting or [mask.reshape(-1) for mask in masks if (mask.numel(),) == tuple(rows)]
    if _is_one(fitting):
        return fitting[0]
    shapes = ", ".join(str(tuple(mask.shape)) for mask in masks)
    if not fitting:
        raise InputError(f"x has shape {tuple(x.shape)}, and the padding masks in force have {shapes}: none fits")
    raise InputError(
        f"x has shape {tuple(x.shape)}, which fits several of the padding masks in force, {shapes}: put each part of "
        "the model into a `with padding_mask(…)` of its own"
    )


def _is_one(fitting: list[Tensor]) -> bool:
    """True if the list has one mask, perhaps several times."""
    return len(fitting) > 0 and all(mask is fitting[0] for mask in fitting)


# The functions below handle masks from a model's own arguments, which `surgery.padding` reads. If none of them fits the
# input of a norm, the norm gets no mask.


def given() -> GivenMasks | None:
    """Returns the masks of the innermost running module that takes masks."""
    return _given_compiled if torch.compiler.is_compiling() else _given.get()


def give(new: GivenMasks | None) -> None:
    """Puts these masks in force."""
    global _given_compiled
    if torch.compiler.is_compiling():
        _given_compiled = new
    else:
        _given.set(new)


def _given_for(rows: torch.Size) -> Tensor | None:
    """Returns the mask from the model's arguments that fits rows of this shape. None if no mask fits, or several
    different ones do. Counts the outcome in `tally`."""
    in_force = given()
    if in_force is None or not in_force.masks:
        return None
    masks = in_force.masks
    fitting = [mask for mask in masks if mask.shape == rows]
    # The norm's input may be (T, B, d) where the mask is (B, T), or have its rows in one dimension.
    fitting = fitting or [mask.T for mask in masks if len(rows) == 2 and mask.shape == rows[::-1]]
    fitting = fitting or [mask.reshape(-1) for mask in masks if (mask.numel(),) == tuple(rows)]
    is_one = _is_one(fitting)
    if len(rows) > 1 and not torch.compiler.is_compiling():
        one_fits, none_fits, several_fit = range(3)  # the indices of `tally`
        outcome = one_fits if is_one else several_fit if fitting else none_fits
        in_force.tally[outcome] += 1
    return fitting[0] if is_one else None
