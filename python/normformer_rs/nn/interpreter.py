"""Runs a residual scheme's declaration in a module that has its norms and parameters, without code for single schemes.

The step around a sublayer, scheme.py's x⁺, is one operator. It is fused with the only norm of `after`, or of the next
sublayer's `before`, if that norm works row by row.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..declarations.declared import GROWING, Change, Curve, Gain, Learned, NormAt, StreamStep, only_norm
from ..errors import InputError
from . import formulas, mixing
from .dropout import Draw, drop, is_plain, rate
from .profiling import profile_step
from .registry import FUSED
from .row_norm import unit_rows
from .scheme import SchemeSpec, Sublayer

OPS = torch.ops.normformer_rs


def apply_norm(norm: nn.Module, x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Returns N(x); a norm with statistics gets the padding mask too."""
    return norm(x, padding_mask) if getattr(norm, "takes_pad_mask", False) else norm(x)


KeptTensors = dict[str, Tensor]
"""The tensors that earlier places of a stack have kept under names."""


def apply_changes(
    owner: nn.Module, changes: Iterable[Change], x: Tensor, padding_mask: Tensor | None, kept: KeptTensors | None = None
) -> Tensor:
    """Returns x after the changes at one place, which may add to `kept`."""
    for change in changes:
        # `content` is the owner's norm or parameter, or else a constant, a name or a Mix.
        content = getattr(owner, change.what.name) if isinstance(change.what, NormAt | Learned) else change.what
        if change.kind == "norm":
            x = apply_norm(content, x, padding_mask)
        elif change.kind == "shift":
            x = x - content.to(x.dtype)
        elif change.kind == "scale":
            x = x * content.to(x.dtype)
        elif change.kind == "times":
            x = x * content
        elif change.kind == "unit":
            x = unit_rows(x, None, content)
        elif change.kind == "damp_forward":
            x = x - F.silu(content).to(x.dtype) * x.detach()
        elif change.kind == "keep":
            _kept(kept)[content] = x
        elif change.kind == "mix":
            x = _times(owner, content.own, x) + _times(owner, content.kept, _find(_kept(kept), content.name, x))
        else:  # head_scale: one number for the columns of each head
            x = (x.unflatten(-1, (content.numel(), -1)) * content.to(x.dtype).unsqueeze(-1)).flatten(-2)
    return x


def _kept(kept: KeptTensors | None) -> KeptTensors:
    """Returns the dictionary of kept tensors. Errors: InputError if there is none, because no stack runs the layer."""
    if kept is None:
        raise InputError(
            "this scheme hands tensors from layer to layer: put the layer into a stack of normformer_rs.nn"
        )
    return kept


def _find(kept: KeptTensors, name: str, x: Tensor) -> Tensor:
    """Returns the tensor kept under a name. Errors: InputError if there is none, or its shape is not that of x."""
    if name not in kept:
        raise InputError(f"nothing was kept as {name!r} before this place: call the whole stack or block, not a part")
    if (tensor := kept[name]).shape != x.shape:
        raise InputError(
            f"{name!r} was kept as {tuple(tensor.shape)}, and is mixed into a part of it, {tuple(x.shape)}: do not "
            "chunk the feed-forward (chunk_size_feed_forward=0)"
        )
    return tensor


def _times(owner: nn.Module, factor: Gain, x: Tensor) -> Tensor:
    """Returns x times a declared gain of `owner`."""
    multiplier = gain(owner, factor, x, None)  # a mix has no growing gain
    return x if multiplier is None else x * multiplier.to(x.dtype)


class Streams(NamedTuple):
    """The tensors that one sublayer passes to the next: x and the streams beside it (`others`). `normed` is the next
    sublayer's N(x), if one fused step computed both.

    If a scheme reads x from several tensors, `x` and `others` are these tensors. Between a sublayer's reading and its
    writing, `read` is the tensor that it has read, and `unwritten` has the tensors that the writing needs.
    """

    x: Tensor
    others: tuple[Tensor, ...] = ()
    normed: Tensor | None = None
    read: Tensor | None = None
    unwritten: tuple[Tensor, ...] = ()
    kept: KeptTensors | None = None
    """The tensors that changes have kept for later places; sublayers add to the dictionary."""
    outputs: tuple[Tensor, ...] = ()
    """The outputs of earlier layers, in swapped models whose later layers read them. This package's stacks keep these
    outputs themselves."""


def start(declared: SchemeSpec, x: Tensor) -> Streams:
    """Returns the streams at the beginning of a stack."""
    return Streams(mixing.begin(declared.mixing, x), (x,) * len(declared.streams))


def open_streams(owner: nn.Module, sublayer: Sublayer, streams: Streams) -> Streams:
    """Returns the streams, with the tensor that the sublayer reads from them if it reads several."""
    if sublayer.mixing is None:
        return streams
    read, unwritten = mixing.read(sublayer.mixing, owner, (streams.x, *streams.others))
    return streams._replace(normed=None, read=read, unwritten=unwritten)


def begin(owner: nn.Module, sublayer: Sublayer, streams: Streams, padding_mask: Tensor | None) -> Tensor:
    """Returns F's input, before(x)."""
    if streams.normed is not None:
        return streams.normed
    x = streams.x if streams.read is None else streams.read
    return apply_changes(owner, sublayer.before, x, padding_mask, streams.kept)


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
) -> Streams:
    """Returns the streams after F(…) = f. `dropout`: the module for f; `draw`: the masks of this forward. `following`:
    the norm that is the only change of the next sublayer's `before`; if the step fuses it, the result also holds N(x⁺).
    `alpha_t`: the growing gain, None if nothing grows."""
    f = apply_changes(owner, sublayer.branch, f, padding_mask, streams.kept)
    x = apply_changes(owner, sublayer.skip, streams.x, padding_mask, streams.kept)
    if sublayer.scale != 1.0:
        f = f * sublayer.scale
    is_composed = torch.compiler.is_exporting() or is_distributed(x) or is_distributed(f)
    p = None if is_distributed(f) else rate(dropout)  # the rate that the operator applies
    if p is None:  # the dropout module itself must be called; nothing is left for the operator to drop
        f, p = dropout(f), 0.0
    if x.dtype in (torch.float64, torch.float16, torch.bfloat16) or f.dtype == torch.float64:
        f = f.to(x.dtype)  # so the residual stream keeps its dtype
    f, where = draw.drop(f, p)  # (rate, seed, site) of the dropout that the operator still applies
    if sublayer.mixing is not None:
        f = drop(f, where).to(x.dtype)
        written = mixing.write(sublayer.mixing, (x, *streams.others), streams.unwritten, f)
        return Streams(written[0], written[1:], kept=streams.kept, outputs=streams.outputs)

    def gains(step: Sublayer | StreamStep) -> tuple[Tensor | None, Tensor | None]:
        """Returns α and β; None stands for 1."""
        return gain(owner, step.alpha, x, alpha_t), gain(owner, step.beta, x, alpha_t)

    def add(s: Tensor, alpha: Tensor | None, beta: Tensor | None) -> Tensor:
        """Returns α⊙s + β⊙drop(f) for a stream s."""
        if is_composed:
            return formulas.residual(s, f, alpha, beta)
        no_norm = None, None, 0.0  # no weight, no bias, and an ε that nothing reads
        return OPS.residual(s, f, alpha, beta, *no_norm, *where)[0]

    others = tuple(add(s, *gains(step)) for s, step in zip(streams.others, sublayer.streams, strict=True))
    alpha, beta = gains(sublayer)
    if alpha is not None and owner.place.declared.is_profiled:
        profile_step(alpha, x, f if beta is None else f * beta.to(f.dtype), where)
    # The norm to fuse: the only change of `after`, or, without an `after`, of the next sublayer's `before`.
    declared_norm = only_norm(sublayer.after) if sublayer.after else following
    norm: Any = None if declared_norm is None else getattr(owner, declared_norm.name)
    can_fuse = not is_composed and norm is not None and is_row_norm(norm) and norm.fuses(x)
    if not can_fuse:
        x_plus = apply_changes(owner, sublayer.after, add(x, alpha, beta), padding_mask, streams.kept)
        return Streams(x_plus, others, kept=streams.kept, outputs=streams.outputs)
    fused = getattr(OPS, norm.operator + "_residual")
    # With an `after`, N(x⁺) is the stream itself; otherwise it is the input of the next F, in the dtype of f.
    dtype = x.dtype if sublayer.after else f.dtype
    x_plus, y, _ = fused(x, f, alpha, beta, *norm.parameters_in_use(x), *norm.own(x), *where, dtype)
    x_plus, normed = (y, None) if sublayer.after else (x_plus, y)
    return Streams(x_plus, others, normed, kept=streams.kept, outputs=streams.outputs)


def gain(owner: nn.Module, declared: Gain, x: Tensor, alpha_t: Tensor | None) -> Tensor | None:
    """Returns a gain that `owner` declares, as a tensor on x's device; None stands for 1. `alpha_t`: the growing
    gain."""
    if isinstance(declared, Learned):
        return getattr(owner, declared.name)
    if isinstance(declared, Curve):
        return _CURVES[declared.kind](getattr(owner, declared.of.name) / declared.temperature)
    if declared == GROWING:
        return alpha_t
    assert isinstance(declared, float)
    return None if declared == 1.0 else x.new_full((1,), declared, dtype=torch.promote_types(x.dtype, torch.float32))


_CURVES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    # 1 − σ² = (1 − σ)(1 + σ) = σ(−w)(1 + σ(w)), without the cancellation of 1 − σ².
    "co_sigmoid": lambda w: (torch.sigmoid(-w) * (1 + torch.sigmoid(w))).clamp_min(1e-3).sqrt(),
    "magnitude": torch.abs,
    "co_magnitude": lambda w: 1 - w.abs(),
}
"""The functions of w/τ, by the names of the curves."""


def is_distributed(x: Tensor) -> bool:
    """True for a DTensor. It needs torch's own operations, because the fused step has no sharding rules."""
    return type(x) is not Tensor and hasattr(x, "device_mesh")


def is_row_norm(norm: Any) -> bool:
    """True if the fused step can compute this norm."""
    return any(is_plain(norm, kind) for kind in FUSED)
