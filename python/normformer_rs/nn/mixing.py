"""Runs sublayers that read x from several tensors and write F(x) to several (`declared.Mixing`).

The tensors are passed as a tuple from sublayer to sublayer. A hyper-connection has one, (…, n, d), with all streams;
attention over depth has one (…, d) for each output that it may attend to.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from ..declarations.declared import Channel, Each, HyperConnection, Joint, Mixing, Permuted, parts_of
from . import formulas

Tensors = tuple[Tensor, ...]


def without_autocast(device: str) -> Any:
    """Returns a context without autocast; some devices, such as meta, do not have autocast."""
    if not _has_autocast(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def _has_autocast(device: str) -> bool:
    """True if torch has autocast for this type of device. torch.compile takes the result for a constant."""
    return torch.amp.is_autocast_available(device)


# With this mark torch.compile takes the function's result for a constant. torch.compiler.assume_constant_result sets
# it, too, but would import the compiler, which takes 1.5 s.
_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]


def begin(mixing: Mixing | None, x: Tensor) -> Tensor:
    """Returns the first tensor, from the stack's input. A hyper-connection's n streams all are x initially."""
    return formulas.spread(x, mixing.streams) if isinstance(mixing, HyperConnection) else x


def reads_apart(mixing: Mixing | None) -> bool:
    """True if q, k and v each have their own input: then `read` returns the three, stacked."""
    # Only queries of attention over depth may have two dimensions: one query for each of q, k and v.
    return not isinstance(mixing, HyperConnection) and any(len(part.shape) == 2 for part in parts_of(mixing))


def read(mixing: Mixing | None, owner: nn.Module, tensors: Tensors) -> tuple[Tensor, Tensors]:
    """Returns x, and the tensors that `write` will need. Around a sublayer with a hyper-connection they are the weights
    of the streams and of F(x), or those of F(x) alone. There are none at a stack's end and for attention over depth."""
    parameters: Any = [getattr(owner, part.name) for part in parts_of(mixing)]
    if not isinstance(mixing, HyperConnection) and not parameters:
        return tensors[0], ()
    with without_autocast(tensors[0].device.type):  # the residual stream keeps its type
        if isinstance(mixing, HyperConnection):
            x, *unwritten = _gated(mixing.gates, tensors[0], *parameters)
            return x, tuple(unwritten)
        # The parameters are (query, gain), or a query alone.
        attend: Any = formulas.depth_attention if len(parameters) == 2 else formulas.normed_depth_attention
        return attend(tensors, *parameters), ()


def _gated(gates: Any, streams: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    """Returns x and, around a sublayer, one more tensor: [Rᵀ, g], (…, n, n + 1), or g alone, (…, n, 1). `gates`: the
    declared kind of gates; `streams`: (…, n, d); `parameters`: those of the gates, in declared order."""
    if isinstance(gates, Joint):
        weight, scale, bias = parameters
        if gates.scale.shape == (1,):  # at a stack's end there are only the gates for reading x
            return (formulas.hyper_read(streams, weight, scale, bias),)
        return formulas.hyper_connection(streams, weight, scale, bias, gates.iterations, gates.magnitude)
    if isinstance(gates, Permuted):
        return formulas.permuted_connection(streams, *parameters)
    if isinstance(gates, Each):
        return formulas.free_hyper_connection(streams, *parameters)
    if isinstance(gates, Channel):
        if gates.write is None:  # at a stack's end nothing is written
            return (formulas.channel_read(streams, *parameters),)
        gain, down, up, weight = parameters
        return formulas.channel_connection(streams, gain, down, up, weight, gates.magnitude)
    return (formulas.sum_of_streams(streams, gates),)


def write(mixing: Mixing, tensors: Tensors, unwritten: Tensors, f: Tensor) -> Tensors:
    """Returns the tensors after F(x) = f; dropout has already been applied to f. Attention over depth appends f, or
    adds f to the last tensor. A hyper-connection gets the streams that `read` got, perhaps in another dtype."""
    if isinstance(mixing, HyperConnection):
        (streams,), (weights,) = tensors, unwritten  # both tuples have one tensor
        if weights.shape[-1] == 1:  # g alone: every stream stays itself
            return (streams + weights.to(streams.dtype) * f.unsqueeze(-2),)
        return (formulas.mix_streams(streams, weights.to(torch.promote_types(streams.dtype, torch.float32)), f),)
    return (*tensors, f) if mixing.begins_block else (*tensors[:-1], tensors[-1] + f)


def seen(mixing: Mixing | None, tensors: Tensors) -> Tensor:
    """Returns one tensor in x's shape: x itself, the mean of the streams, or the mean of the outputs."""
    if mixing is None:
        return tensors[0]
    return tensors[0].mean(-2) if isinstance(mixing, HyperConnection) else torch.stack(tensors).mean(0)
