"""The input of a block's call, which b2t's last sublayer adds.

Each call has an input of its own. It lives beside the calls of a thread and not on the module, so that threads, a
block inside itself, recomputation and exceptions do not mix.
"""

import contextvars
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError


class _Call:
    """A call of a block under way."""

    def __init__(self, block: Any, outer: "_Call | None", is_hooked: bool) -> None:
        self.block, self.outer, self.is_hooked = block, outer, is_hooked
        self.bottom: Tensor | None = None


_innermost: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("normformer_rs_block_call", default=None)
# torch.compile supports no context variables, but it follows globals. At a graph break the eager part reads it, too.
_innermost_compiled: _Call | None = None


def _here() -> _Call | None:
    return _innermost_compiled if torch.compiler.is_compiling() else _innermost.get()


def _enter(call: _Call | None) -> None:
    global _innermost_compiled
    if torch.compiler.is_compiling():
        _innermost_compiled = call
    else:
        _innermost.set(call)


def _find(block: Any) -> _Call | None:
    """The block's innermost call."""
    call = _here() or _innermost_compiled
    while call is not None and call.block is not block:
        call = call.outer
    return call


class BlockCalls:
    """Hooks on a block that begin and end its calls. Their bound methods are copied and pickled with the block."""

    def __init__(self, block: Any) -> None:
        self.block = block

    def begin(self, *_: Any) -> None:
        _enter(_Call(self.block, _here(), is_hooked=True))

    def end(self, *_: Any) -> None:
        call = _find(self.block)
        if call is not None:  # a hook before this one may have raised
            _enter(call.outer)


def keep_bottom(block: Any, x: Tensor) -> None:
    """Remembers the block's input. A forward that is called past the hooks begins a call here."""
    call = _find(block)
    if call is None:
        call = _Call(block, _here(), is_hooked=False)
        _enter(call)
    call.bottom = x


def bottom_for(block: Any, x: Tensor) -> Tensor:
    """The block's input in the call that the last sublayer, whose input is x, belongs to."""
    call = _find(block)
    bottom = None if call is None else call.bottom
    if call is None or bottom is None:
        raise InputError("b2t's last sublayer adds the block's input, and got none: call the block, not a part of it")
    if bottom.shape != x.shape:
        raise InputError(
            f"b2t's last sublayer adds the block's input, {tuple(bottom.shape)}, and got a part of it, "
            f"{tuple(x.shape)}: do not chunk the feed-forward (chunk_size_feed_forward=0)"
        )
    if not call.is_hooked:
        _enter(call.outer)
    return bottom
