"""Makes a change of a model happen wholly or not at all, even if an exception interrupts it.

`State` copies everything about a model that a swap may write, before anything is written. If an exception then comes at
any line, Ctrl-C included, everything is restored. Restoring is idempotent: if it is interrupted, it runs again.
"""

import functools
import operator
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")
LEVEL = 5
"""The `stacklevel` for warnings in functions that `Edits.all_or_none` runs. They then name the line that called the
swap."""

SWAPS: "weakref.WeakKeyDictionary[nn.Module, list[list[str]]]" = weakref.WeakKeyDictionary()
"""For each module, the titles of the swaps that changed it and were not undone, in order. Each title is a list of one
string, so that equal titles of different swaps differ by identity."""
HEIRS: Any = WeakTensorKeyDictionary()
"""For each parameter that a swap exchanged, the new parameters in its place: a list with one entry for each swap."""

_HOLDERS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set))
"""The names of a module's dictionaries and sets: parameters, buffers, children, hooks."""


def configs_of(model: nn.Module) -> Iterator[Any]:
    """Yields each Hugging Face configuration of a model and its parts once, since parts may share them."""
    configs = {id(module.__dict__.get("config")): module.__dict__.get("config") for module in model.modules()}
    yield from (config for config in configs.values() if hasattr(config, "model_type") and hasattr(config, "to_dict"))


class State:
    """A copy of a model's state that can be put back: classes, attributes, children, hooks, tensors, configurations,
    the optimizer's groups, the record of swaps, and the random state. Parameters' values are kept only for those passed
    to `keep_values`.

    `optimizer`: the optimizer whose groups and state change; `beside`: modules outside the model that change, too.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None, beside: Iterable[nn.Module] = ()) -> None:
        modules = dict.fromkeys(module for top in (model, *beside) for module in top.modules())
        # Each of the following lists has (object, its contents at this time), as `restore` reads them.
        self._modules = [(module, type(module), {**vars(module)}) for module in modules]
        holders = (own.get(name) for _, _, own in self._modules for name in _HOLDERS)
        distinct = {id(holder): holder for holder in holders if isinstance(holder, dict | set)}
        self._holders = [(holder, _copied(holder)) for holder in distinct.values()]
        tensors = {id(t): t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None}
        self._tensors = [(t, t.requires_grad, {**vars(t)}, _hooks(t)) for t in tensors.values()]
        buffers = {id(b): b for m in modules for b in m._buffers.values() if b is not None and not is_lazy(b)}
        self._buffers = [(b, _version(b), b.detach().clone()) for b in buffers.values()]
        self._optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        owned: list[dict[Any, Any]] = [*self._optimizer.param_groups, self._optimizer.state] if self._optimizer else []
        written = [*owned, *(vars(config) for config in configs_of(model))]
        self._dicts = [(dictionary, {**dictionary}) for dictionary in written]
        self._records: list[tuple[Any, Any, list[Any]]] = []  # (SWAPS or HEIRS, a key in it, copy of the entry)
        self._records += [(SWAPS, module, [*SWAPS.get(module, ())]) for module in modules]
        self._records += [(HEIRS, t, [*HEIRS.get(t, ())]) for t in tensors.values()]
        self._random = _random_states(tensors.values())
        self._has_gradients = torch.is_grad_enabled()
        self._handlers: dict[int, Any] = {}  # number of a signal → its handler, which `_settle` replaces for a while
        self._deferred: list[int] = []  # numbers of the signals that came meanwhile
        self.values: dict[Tensor, tuple[Tensor, bool]] = {}
        """For each tensor that is written in place, its value and `requires_grad` from before."""
        self.finish: Callable[[], None] | None = None
        """An idempotent function that completes the change. If it is set, an interrupt completes the change; if it is
        None, an interrupt puts everything back."""

    def keep_values(self, tensors: Iterable[Tensor]) -> None:
        """Keeps the values of tensors. Call this before they are written."""
        for t in tensors:
            if t not in self.values:
                self.values[t] = t.detach().clone(), t.requires_grad

    def keep_dicts(self, dicts: Iterable[dict[Any, Any]]) -> None:
        """Keeps the contents of further dictionaries. Call this before they are written."""
        self._dicts += [(dictionary, {**dictionary}) for dictionary in dicts]

    def run(self, change: Callable[[], T]) -> T:
        """Makes a change and returns its result. If an exception ends it, everything is put back, or, if `finish` is
        set, the change is completed."""
        try:
            try:
                return change()
            except BaseException:
                self._settle()
                raise
        except BaseException:  # settle once more, since a second interrupt may have come during the lines above
            self._settle()
            raise

    def _settle(self) -> None:
        """Completes the change or restores everything. Signals that arrive meanwhile are held back and raised at the
        end, so that they do not interrupt it."""
        try:
            if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
                for number in signal.valid_signals():
                    handler = signal.getsignal(number)
                    if callable(handler) and handler != self._defer:
                        self._handlers[number] = handler
                        signal.signal(number, self._defer)
            (self.finish or self.restore)()
        finally:
            while self._handlers:  # an entry is removed only after its handler is back, in case of an interrupt
                signal_number, handler = next(iter(self._handlers.items()))
                signal.signal(signal_number, handler)
                del self._handlers[signal_number]
        _raise(self._deferred)

    def _defer(self, number: int, _: FrameType | None) -> None:
        """Notes a signal for later. The handler of all signals while `_settle` runs."""
        self._deferred.append(number)

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back."""
        for module, kind, own in self._modules:
            if type(module) is not kind:
                module.__class__ = kind
            _put_back(vars(module), own)
        for holder, items in self._holders:
            _put_back(holder, items)
        for t, requires_grad, attributes, (hooks, copy_of_hooks) in self._tensors:
            _put_back(vars(t), attributes)
            if t._backward_hooks is not hooks:
                t._backward_hooks = hooks
            if hooks is not None:
                _put_back(hooks, copy_of_hooks)
            if t.requires_grad != requires_grad:
                t.requires_grad_(requires_grad)
        write(self.values)
        for buffer, version, value in self._buffers:
            if _version(buffer) != version:
                buffer.copy_(value)
        for dictionary, items in self._dicts:
            _put_back(dictionary, items)
        for record, key, entries in self._records:
            present_entries = record.get(key)
            if present_entries is not None:
                present_entries[:] = entries
        for set_state, state in self._random:
            set_state(state)
        torch.set_grad_enabled(self._has_gradients)


@torch.no_grad()
def write(values: Mapping[Tensor, tuple[Tensor, bool]]) -> None:
    """Writes values and `requires_grad` into tensors: tensor → (value, `requires_grad`)."""
    for t, (value, requires_grad) in values.items():
        if t.requires_grad != requires_grad:
            t.requires_grad_(requires_grad)
        t.copy_(value)


def _copied(holder: Any) -> Any:
    """Returns a shallow copy of a dictionary or a set."""
    return {*holder} if isinstance(holder, set) else {**holder}


def _put_back(holder: Any, contents: Any) -> None:
    """Restores the contents and order of a dictionary or a set, if they differ."""
    if isinstance(holder, set):
        is_same = holder == contents
    else:  # compared by identity, since tensors have no plain equality
        is_same = len(holder) == len(contents) and all(map(operator.is_, holder.values(), contents.values()))
        is_same = is_same and all(map(operator.is_, holder, contents))
    if not is_same:
        holder.clear()
        holder.update(contents)


def _hooks(t: Tensor) -> tuple[Any, Any]:
    """Returns a tensor's dictionary of gradient hooks and a copy of it; (None, None) if it has no such dictionary."""
    hooks: Any = t._backward_hooks
    return hooks, None if hooks is None else {**hooks}


def _version(t: Tensor) -> int | None:
    """Returns a tensor's count of in-place writes. None: the tensor was made in inference mode, and counts none."""
    return None if t.is_inference() else t._version


def _random_states(tensors: Iterable[Tensor]) -> list[tuple[Callable[[Tensor], Any], Tensor]]:
    """Returns the states of the random generators of the CPU and of the tensors' GPUs, each with the function that sets
    it."""
    states: list[tuple[Callable[[Tensor], Any], Tensor]] = [(torch.set_rng_state, torch.get_rng_state())]
    for device in {t.device for t in tensors if t.device.type == "cuda"}:
        states.append((functools.partial(torch.cuda.set_rng_state, device=device), torch.cuda.get_rng_state(device)))
    return states


def _raise(numbers: list[int]) -> None:
    """Raises each of the signals with these numbers, and empties the list. The recursion goes on even if the handler of
    a signal raises an exception, as that of Ctrl-C does."""
    if numbers:
        try:
            signal.raise_signal(numbers.pop(0))
        finally:
            _raise(numbers)
