"""What a block keeps during one call, as b2t keeps its input for the last sublayer.

Each call has tensors of its own. They live beside the calls of a thread and not on the module, so that threads, a
block inside itself, recomputation and exceptions do not mix.
"""

import contextvars
from typing import Any

import torch

from ..nn.interpreter import KeptTensors


class _Call:
    """A call of a block under way."""

    def __init__(self, block: Any, outer: "_Call | None", is_hooked: bool) -> None:
        self.block, self.outer, self.is_hooked = block, outer, is_hooked
        self.kept: KeptTensors = {}


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


def begin_call(block: Any) -> KeptTensors:
    """What the block keeps from its first sublayer on: nothing yet. A forward that is called past the hooks begins a
    call here."""
    call = _find(block)
    if call is None:
        call = _Call(block, _here(), is_hooked=False)
        _enter(call)
    call.kept.clear()
    return call.kept


def call_of(block: Any) -> KeptTensors:
    """What the block has kept so far in the call under way."""
    call = _find(block)
    return {} if call is None else call.kept


def end_call(block: Any) -> None:
    """Ends a call that began past the hooks."""
    call = _find(block)
    if call is not None and not call.is_hooked:
        _enter(call.outer)


# Calls of stacks.


class StackCall:
    """A call of the module around a stack of blocks."""

    def __init__(self, stack: Any, outer: "StackCall | None") -> None:
        self.stack, self.outer = stack, outer
        self.has_begun = self.is_finished = False
        self.norms = 0
        """Calls of the norm after the stack so far."""
        self.last: tuple[Any, int] | None = None
        """The hidden state that the last block so far gave, and the block's number."""


_innermost_stack: contextvars.ContextVar[StackCall | None] = contextvars.ContextVar(
    "normformer_rs_stack_call", default=None
)
_innermost_stack_compiled: StackCall | None = None


def _stack_here() -> StackCall | None:
    return _innermost_stack_compiled if torch.compiler.is_compiling() else _innermost_stack.get()


def _enter_stack(call: StackCall | None) -> None:
    global _innermost_stack_compiled
    if torch.compiler.is_compiling():
        _innermost_stack_compiled = call
    else:
        _innermost_stack.set(call)


def begin_stack_call(stack: Any) -> None:
    """Begins a call of the module around a stack."""
    _enter_stack(StackCall(stack, _stack_here()))


def stack_call(stack: Any) -> StackCall | None:
    """The call under way; None: blocks are called by something else."""
    call = _stack_here()
    while call is not None and call.stack is not stack:
        call = call.outer
    return call


def end_stack_call(stack: Any) -> StackCall | None:
    """Ends the call under way."""
    call = stack_call(stack)
    if call is not None:
        _enter_stack(call.outer)
    return call
