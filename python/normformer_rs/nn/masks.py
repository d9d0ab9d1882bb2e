"""Padding masks for norms deep inside models that know nothing of them."""

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..errors import InputError

_masks: contextvars.ContextVar[tuple[Tensor, ...]] = contextvars.ContextVar("normformer_rs_padding_masks", default=())
# torch.compile knows no context variables, and takes a thread-local one for a constant; a global it watches.
_masks_compiled: tuple[Tensor, ...] = ()


@contextmanager
def padding_mask(*masks: Tensor, batch_first: bool = True) -> Iterator[None]:
    """Inside, norms with statistics leave out what these masks mark, wherever in a model they stand.

    >>> import torch
    >>> from normformer_rs import nn
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), nn.PowerNormV(4))
    >>> with padding_mask(torch.tensor([[False, False, True]])):
    ...     y = model(torch.randn(1, 3, 4))
    >>> y[0, 2].abs().sum().item()
    0.0

    Args:
        masks: bool, (B, T), True at padding. Of several (source and target) a norm takes the one of its input's shape.
        batch_first: whether the model's tensors are (B, T, d); else (T, B, d). Rows in one dimension, (B·T, d) or
            (T·B, d), are recognised too.

    The innermost `with` of a thread counts (compiled models: of the process). Errors: InputError in a norm whose input
    has the shape of none of the masks, or of two that differ.
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


def mask_for(x: Tensor) -> Tensor | None:
    """The mask that is in force for x (…, d); None outside of any."""
    masks = _masks_compiled if torch.compiler.is_compiling() else _masks.get()
    if not masks:
        return None
    rows = x.shape[:-1]
    fitting = [mask for mask in masks if mask.shape == rows]
    fitting = fitting or [mask.reshape(-1) for mask in masks if (mask.numel(),) == tuple(rows)]
    if len(fitting) == 1 or (fitting and all(mask is fitting[0] for mask in fitting)):
        return fitting[0]
    shapes = ", ".join(str(tuple(mask.shape)) for mask in masks)
    if not fitting:
        raise InputError(f"x has shape {tuple(x.shape)}, and the padding masks in force have {shapes}: none fits")
    raise InputError(
        f"x has shape {tuple(x.shape)}, which fits several of the padding masks in force, {shapes}: put each part of "
        "the model into a `with padding_mask(…)` of its own"
    )
