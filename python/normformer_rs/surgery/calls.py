"""Keeps tensors during one call of a block or a stack, such as b2t's block input, which its last sublayer reads.

Each call has tensors of its own. They are stored in a context variable and not on the module, so that threads, nested
calls of one block, recomputation and exceptions do not mix them up.
"""

import contextvars
from typing import Any

import torch

from ..nn.interpreter import KeptTensors


class _Call:
    """A call of a block under way. `outer`: the call around it; `is_hooked`: whether the block's hooks began it;
    `kept`: the tensors that it keeps, by name."""

    def __init__(self, block: Any, outer: "_Call | None", is_hooked: bool) -> None:
        self.block, self.outer, self.is_hooked = block, outer, is_hooked
        self.kept: KeptTensors = {}


_innermost: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("normformer_rs_block_call", default=None)
# torch.compile supports no context variables, but it follows globals, so compiled code keeps its innermost call here.
# After a graph break, the eager part reads this global, too.
_innermost_compiled: _Call | None = None


def _here() -> _Call | None:
    """Returns the innermost call of a block. None: no block is called."""
    return _innermost_compiled if torch.compiler.is_compiling() else _innermost.get()


def _enter(call: _Call | None) -> None:
    """Makes `call` the innermost call of a block. None: no block is called."""
    global _innermost_compiled
    if torch.compiler.is_compiling():
        _innermost_compiled = call
    else:
        _innermost.set(call)


def _find(block: Any) -> _Call | None:
    """Returns the innermost call of a block. None: it has none under way."""
    call = _here() or _innermost_compiled
    while call is not None and call.block is not block:
        call = call.outer
    return call


class BlockCalls:
    """Hooks on a block that begin and end its calls. The hooks are bound methods of this object, so that copies and
    pickles of the block include it."""

    def __init__(self, block: Any) -> None:
        self.block = block

    def begin(self, *_: Any) -> None:
        """Begins a call of the block. A hook before the forward."""
        _enter(_Call(self.block, _here(), is_hooked=True))

    def end(self, *_: Any) -> None:
        """Ends the block's call. A hook after the forward."""
        call = _find(self.block)
        if call is not None:  # None: a hook that ran before `begin` may have raised, so that no call began
            _enter(call.outer)


def begin_call(block: Any) -> KeptTensors:
    """Returns the empty dictionary in which the block keeps tensors during this call. If the forward was called without
    the hooks, the call begins here."""
    call = _find(block)
    if call is None:
        call = _Call(block, _here(), is_hooked=False)
        _enter(call)
    call.kept.clear()
    return call.kept


def call_of(block: Any) -> KeptTensors:
    """Returns the tensors that the block has kept in the call under way."""
    call = _find(block)
    return {} if call is None else call.kept


def is_called(block: Any) -> bool:
    """Returns whether a call of the block is under way."""
    return _find(block) is not None


def end_call(block: Any) -> None:
    """Ends a call that `begin_call` began because the hooks did not run."""
    call = _find(block)
    if call is not None and not call.is_hooked:
        _enter(call.outer)


# The code below keeps calls of stacks, as the code above keeps calls of blocks.


class StackCall:
    """A call of the module around a stack of blocks."""

    def __init__(self, stack: Any, outer: "StackCall | None") -> None:
        self.stack, self.outer = stack, outer
        self.has_begun = self.is_finished = False
        """Whether a layer has run, and whether the last layer has run or the norm after the stack was called."""
        self.norms = 0
        """The number of calls so far of the norm after the stack."""
        self.last: tuple[Any, int] | None = None
        """The output of the block that ran last, and the number of its layer. None: no block has run."""


_innermost_stack: contextvars.ContextVar[StackCall | None] = contextvars.ContextVar(
    "normformer_rs_stack_call", default=None
)
_innermost_stack_compiled: StackCall | None = None


def _stack_here() -> StackCall | None:
    """Returns the innermost call of a module around a stack."""
    return _innermost_stack_compiled if torch.compiler.is_compiling() else _innermost_stack.get()


def _enter_stack(call: StackCall | None) -> None:
    """Makes `call` the innermost one of a module around a stack."""
    global _innermost_stack_compiled
    if torch.compiler.is_compiling():
        _innermost_stack_compiled = call
    else:
        _innermost_stack.set(call)


def begin_stack_call(stack: Any) -> None:
    """Begins a call of the module around a stack."""
    _enter_stack(StackCall(stack, _stack_here()))


def stack_call(stack: Any) -> StackCall | None:
    """Returns the call of a stack's module that is under way. None: something else calls the blocks."""
    call = _stack_here()
    while call is not None and call.stack is not stack:
        call = call.outer
    return call


def end_stack_call(stack: Any) -> StackCall | None:
    """Ends the call of a stack's module that is under way, and returns it."""
    call = stack_call(stack)
    if call is not None:
        _enter_stack(call.outer)
    return call
