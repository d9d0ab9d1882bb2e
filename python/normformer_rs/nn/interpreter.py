"""Runs a residual scheme's declaration in a module that has its norms and parameters; it names no scheme.

The step around a sublayer, declaration.py's x⁺, is one operator. It is fused with N_after, or with the next sublayer's
first norm, where that norm works row by row.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import formulas
from .declaration import GROWING, Change, Declared, Gain, StreamStep, Sublayer
from .dropout import Draw, drop, is_plain, rate
from .parts import Learned, NormAt
from .profiling import profile_step
from .registry import FUSED
from .row_norm import unit_rows

OPS = torch.ops.normformer_rs


def apply_norm(norm: nn.Module, x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """N(x); a norm with statistics gets the padding mask too."""
    return norm(x, padding_mask) if getattr(norm, "takes_pad_mask", False) else norm(x)


def apply_changes(owner: nn.Module, changes: Iterable[Change], x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """x after the changes at one point."""
    for change in changes:
        made = getattr(owner, change.what.name) if change.is_made else change.what
        if change.kind == "norm":
            x = apply_norm(made, x, padding_mask)
        elif change.kind == "shift":
            x = x - made.to(x.dtype)
        elif change.kind == "scale":
            x = x * made.to(x.dtype)
        elif change.kind == "times":
            x = x * made
        elif change.kind == "unit":
            x = unit_rows(x, None, made)
        else:
            x = (x.unflatten(-1, (made.numel(), -1)) * made.to(x.dtype).unsqueeze(-1)).flatten(-2)
    return x


class Streams(NamedTuple):
    """The tensors that one sublayer hands to the next: x and the streams beside it. `normed` is the next sublayer's
    N(x), where one fused step made both. Where x is read from several tensors, these are `x` and `others`, and from
    reading to writing `read` is what was read, `unwritten` what the writing needs."""

    x: Tensor
    others: tuple[Tensor, ...] = ()
    normed: Tensor | None = None
    read: Tensor | None = None
    unwritten: tuple[Tensor, ...] = ()


def start(declared: Declared, x: Tensor) -> Streams:
    """The streams as a stack begins."""
    first = x if declared.mixing is None else declared.mixing.begin(x)
    return Streams(first, (x,) * len(declared.streams))


def open_streams(owner: nn.Module, sublayer: Sublayer, streams: Streams) -> Streams:
    """The streams with what the sublayer reads of them, where it reads several."""
    if sublayer.mixing is None:
        return streams
    read, unwritten = sublayer.mixing.read(owner, (streams.x, *streams.others))
    return Streams(streams.x, streams.others, None, read, unwritten)


def begin(owner: nn.Module, sublayer: Sublayer, streams: Streams, padding_mask: Tensor | None) -> Tensor:
    """F's input: N_before(x), or x where there is no such norm."""
    if streams.normed is not None:
        return streams.normed
    x = streams.x if streams.read is None else streams.read
    return x if sublayer.before is None else apply_norm(getattr(owner, sublayer.before.name), x, padding_mask)


def close(
    owner: Any,
    sublayer: Sublayer,
    streams: Streams,
    f: Tensor,
    dropout: nn.Module,
    draw: Draw,
    *,
    following: NormAt | None = None,
    alpha_t: Tensor | None = None,
    padding_mask: Tensor | None = None,
    bottom: Tensor | None = None,
) -> Streams:
    """The streams after F(…) = f. `following`: the next sublayer's first norm; where the step fuses it, the result
    holds N(x⁺) too. `bottom`: the layer's input, for sublayers that add it."""
    x = streams.x if not sublayer.adds_bottom or bottom is None else streams.x + bottom
    if sublayer.amid is not None:
        f = apply_norm(getattr(owner, sublayer.amid.name), f, padding_mask)
    if sublayer.scale != 1.0:
        f = f * sublayer.scale
    p = rate(dropout)
    if p is None:
        f, p = dropout(f), 0.0
    if x.dtype in (torch.float64, torch.float16, torch.bfloat16) or f.dtype == torch.float64:
        f = f.to(x.dtype)  # the residual stream keeps its type
    f, where = draw.drop(f, p)
    if sublayer.mixing is not None:
        written = sublayer.mixing.write((x, *streams.others), streams.unwritten, drop(f, where).to(x.dtype))
        return Streams(written[0], written[1:])

    def gains(step: Sublayer | StreamStep) -> tuple[Tensor | None, Tensor | None]:
        return gain(owner, step.alpha, x, alpha_t), gain(owner, step.beta, x, alpha_t)

    def add(s: Tensor, alpha: Tensor | None, beta: Tensor | None) -> Tensor:
        if torch.compiler.is_exporting():
            return formulas.residual(s, f, alpha, beta)
        return OPS.residual(s, f, alpha, beta, None, None, 0.0, *where)[0]

    others = tuple(add(s, *gains(step)) for s, step in zip(streams.others, sublayer.streams, strict=True))
    alpha, beta = gains(sublayer)
    if alpha is not None and owner.place.declared.is_profiled:
        profile_step(alpha, x, f if beta is None else f * beta.to(f.dtype), where)
    at = sublayer.after or following
    norm: Any = None if at is None else getattr(owner, at.name)
    if torch.compiler.is_exporting() or norm is None or not (is_row_norm(norm) and norm.fuses(x)):
        x_plus = add(x, alpha, beta)
        return Streams(x_plus if sublayer.after is None else apply_norm(norm, x_plus, padding_mask), others)
    fused = getattr(OPS, norm.operator + "_residual")
    dtype = f.dtype if sublayer.after is None else x.dtype
    x_plus, y, _ = fused(x, f, alpha, beta, *norm.parameters_in_use(x), *norm.own(x), *where, dtype)
    return Streams(x_plus, others, y) if sublayer.after is None else Streams(y, others)


def gain(owner: nn.Module, declared: Gain, x: Tensor, alpha_t: Tensor | None) -> Tensor | None:
    """The factor as a tensor; None: one."""
    if isinstance(declared, Learned):
        return getattr(owner, declared.name)
    if declared == GROWING:
        return alpha_t
    assert isinstance(declared, float)
    return None if declared == 1.0 else x.new_full((1,), declared, dtype=torch.promote_types(x.dtype, torch.float32))


def is_row_norm(norm: Any) -> bool:
    """The fused step can compute this norm."""
    return any(is_plain(norm, kind) for kind in FUSED)
