"""Records the changes that a swap makes to a model, undoes them, and shows them as a table."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._html import table
from ..errors import InputError
from .handover import hand_over, hand_over_parameter, reclass, refuse_held, refuse_offloaded
from .whole import SWAPS, State, T, write

_DICTS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""The attributes of a module that are changed in place, so that their contents are copied."""
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")


class Row(NamedTuple):
    """One line of the table: a module's path, its old and its new class, and a note."""

    name: str
    old: str
    new: str
    note: str = ""


_MISSING: Any = object()  # stands for the value of a key that a dictionary does not have


class _Module(NamedTuple):
    """A copy of a module's state at one time: its class, its attributes, and the contents of its dictionaries of
    tensors and children."""

    kind: type[nn.Module]
    attributes: dict[str, Any]
    held: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, module: nn.Module) -> "_Module":
        """Returns a copy of the module's present state."""
        attributes = {name: value for name, value in module.__dict__.items() if name not in _DICTS}
        return cls(type(module), attributes, {name: _copied(module.__dict__[name]) for name in _DICTS})


def _copied(held: dict[str, Any] | set[str]) -> dict[str, Any]:
    """Returns a copy of a dictionary. A set becomes a dictionary with its items as keys, so that `_merged` takes it."""
    return dict.fromkeys(held, True) if isinstance(held, set) else {**held}


def _merged(now: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `now` with the changes from `before` to `after` reversed, in the order of `before`. Other changes since
    `after` stay."""
    changed = {key for key in {**before, **after} if before.get(key, _MISSING) is not after.get(key, _MISSING)}
    # keys with the value _MISSING did not exist before, or others have removed them since
    values = {key: (before if key in changed else now).get(key, _MISSING) for key in {**before, **now}}
    return {key: value for key, value in values.items() if value is not _MISSING}


def _digest(t: Tensor) -> int | None:
    """Returns a checksum of a tensor's bits. None if it has no plain numbers: it is empty, on the meta device,
    quantized, sparse or of a subclass."""
    is_plain = type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided and not t.is_quantized
    if not is_plain or t.is_meta or t.numel() == 0:
        return None
    dense = torch.view_as_real(t.detach()) if t.is_complex() else t.detach()
    bits = dense.contiguous().flatten().view(torch.uint8)
    try:
        return int(bits.view(torch.int64).sum())  # 8 bytes at a time, if size and alignment allow it
    except RuntimeError:
        return int(bits.sum(dtype=torch.int64))


class Edits:
    """The changes that a swap makes to a model, with their undo. Later changes by other code survive the undo."""

    def __init__(self, model: nn.Module, title: str, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model, self._optimizer = model, optimizer
        self._title = [title]  # in a list, whose identity tells swaps with equal titles apart (SWAPS)
        self.state: State | None = State(model, optimizer)
        """The model's state before the changes. None: the changes are complete."""
        self._before: dict[nn.Module, _Module] = {}
        """Each module that changes, with its state before the changes."""
        self._after: dict[nn.Module, _Module] = {}
        """The same modules, with their states after the changes."""
        self._back: list[Callable[[], None]] = []  # functions that `undo` calls, the last one first
        self._values: dict[Tensor, tuple[Tensor, bool]] = {}  # tensor → (its value, `requires_grad`) from before
        self._written: list[tuple[Tensor, int | None]] = []
        """Each parameter and buffer with its checksum when the changes were complete."""
        self._places: list[tuple[Tensor, torch.device, torch.dtype]] = []
        """Each parameter with its device and dtype when the changes were complete."""
        self._heirs: list[tuple[str, nn.Parameter, nn.Parameter]] = []  # (name, new parameter, old one)

    @property
    def title(self) -> str:
        """The swap's title, for messages."""
        return self._title[0]

    def all_or_none(self, change: Callable[["Edits"], T]) -> T:
        """Makes the changes and returns the result. If an exception ends them, the model is put back; an exception from
        torch or from Python becomes an InputError."""
        assert self.state is not None
        try:
            return self.state.run(functools.partial(change, self))
        except (InputError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as reason:
            said = f"{type(reason).__name__}: {str(reason).partition(chr(10))[0][:200]}"  # the message's first line
            raise InputError(
                f"{self.title} is not possible, and nothing was changed: {_unsupported(self.model)}{said}"
            ) from reason

    def remember(self, module: nn.Module) -> None:
        """Records a module. Call this before the module's class, attributes, parameters, buffers or children change."""
        if module not in self._before:
            self._before[module] = _Module.of(module)

    def remember_values(self, parameters: Iterable[nn.Parameter]) -> None:
        """Records the values of parameters. Call this before they are written."""
        assert self.state is not None
        self.state.keep_values(parameters)

    def succeed(self, old: nn.Module, new: nn.Module) -> None:
        """Hands hooks and marks of the module `old` over to `new`, which replaces it; `undo` hands them back."""
        hand_over(old, new)
        self.afterwards(functools.partial(hand_over, new, old))

    def succeed_parameter(self, name: str, old: nn.Parameter, new: nn.Parameter) -> None:
        """Makes `undo` hand the hooks and attributes of the parameter `new` back to `old`, which it had replaced."""
        self._heirs.append((name, new, old))
        self.afterwards(functools.partial(hand_over_parameter, name, new, old))

    def afterwards(self, back: Callable[[], None]) -> None:
        """Adds a function that `undo` calls. The function added last runs first."""
        self._back.append(back)

    def take_back(self) -> None:
        """Restores the model's state from before the changes. Only possible before `done`."""
        assert self.state is not None
        self.state.restore()

    def done(self) -> None:
        """Ends the changes. From here on, writes to parameters count as training."""
        assert self.state is not None
        self._after = {module: _Module.of(module) for module in self._before}
        for module in self._before:
            SWAPS.setdefault(module, []).append(self._title)
        self._written = [(t, _digest(t)) for t in (*self.model.parameters(), *self.model.buffers())]
        self._places = [(p, p.device, p.dtype) for p in self.model.parameters()]
        self._values, self.state = self.state.values, None

    def was_trained(self) -> bool:
        """Returns whether parameters or buffers differ from those right after the changes. Version counters cannot tell
        this, because fused optimizers do not advance them."""
        return any(_digest(t) != digest for t, digest in self._written)

    def undo(self, then: Callable[[], None]) -> None:
        """Reverses all changes, and then calls `then` once, or twice after an interrupt.

        If an exception interrupts the reversal, all changes are kept. Once it has begun to write values, it is
        completed instead.

        Errors: InputError, before anything changes, if a later swap changed the same modules, or if the new parameters
        have hooks or attributes that the old ones cannot have.
        """
        for module in self._after:
            (later,) = SWAPS[module][-1]  # the title of the last swap of this module, in a list of one
            if SWAPS[module][-1] is not self._title:
                same = f"{self.title} and changed the same {type(module).__name__}"
                raise InputError(f"{later} came after {same}: undo() that first")
        refuse_wrapped(self.model, "undo()")
        for name, new, old in self._heirs:
            refuse_held(name, new, old)
        # the children from before the swap, which the undo puts back, are written as well
        earlier = [child for module in self._before.values() for child in module.held["_modules"].values()]
        state = State(self.model, self._optimizer, [*self._before, *(child for child in earlier if child is not None)])
        state.run(functools.partial(self._undo, state, then))

    def _undo(self, state: State, then: Callable[[], None]) -> None:
        """Reverses all changes. Once `state.finish` is set, an interrupt completes the undo."""
        # the identities of the swapped model's tensors, by which the restored ones are told from those that stay
        swapped = {id(t) for t in (*self.model.parameters(), *self.model.buffers())}
        for module, before in self._before.items():
            self._restore(module, before, self._after[module])
            SWAPS[module].pop()
        for back in reversed(self._back):
            back()
        self._bring_buffers_along(swapped)
        state.finish = functools.partial(self._finish, self._moves(swapped), then)
        state.finish()

    def _finish(
        self, moves: Sequence[tuple[nn.Parameter, torch.device, torch.dtype]], then: Callable[[], None]
    ) -> None:
        """Completes an undo. After an interrupt it runs once more, so it must be idempotent. `moves`: restored
        parameters, each with the device and dtype to move to."""
        for parameter, device, dtype in moves:
            parameter.data, parameter.grad = parameter.data.to(device, dtype), None
        write(self._values)
        then()

    def _restore(self, module: nn.Module, before: _Module, after: _Module) -> None:
        """Reverses the changes to one module. `before`, `after`: its state before and after the swap."""
        if before.kind is not after.kind:
            reclass(module, before.kind)
        held = {name: module.__dict__[name] for name in _DICTS}  # the dictionaries stay the same objects
        own = {name: value for name, value in module.__dict__.items() if name not in _DICTS}
        own = _merged(own, before.attributes, after.attributes)
        module.__dict__.clear()
        module.__dict__.update(own | held)
        for name, values in held.items():
            restored = _merged(_copied(values), before.held[name], after.held[name])
            if name == "_modules":  # each child takes the settings of the one that it replaces, or else of its parent
                for key in restored:
                    replaced = values.get(key)
                    _adopt_settings(module if replaced is None else replaced, restored[key])
            values.clear()
            values.update(restored)

    def _moves(self, swapped: set[int]) -> list[tuple[nn.Parameter, torch.device, torch.dtype]]:
        """Returns the restored parameters that must move, each with the device and dtype that the model was given since
        the swap. `swapped`: the identities of the swapped model's tensors, which are no restored ones."""
        # (device, dtype) right after the swap → (device, dtype) now, as the swapped parameters show it
        moved = {(device, dtype): (p.device, p.dtype) for p, device, dtype in self._places}
        restored = ((p, (p.device, p.dtype)) for p in self.model.parameters() if id(p) not in swapped)
        return [(p, *moved[place]) for p, place in restored if moved.get(place, place) != place]

    def _bring_buffers_along(self, swapped: set[int]) -> None:
        """Moves restored buffers to the device that the model was given since the swap."""
        devices = {device: p.device for p, device, _ in self._places}  # device right after the swap → device now
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in swapped:
                    module._buffers[name] = buffer.to(devices.get(buffer.device, buffer.device))


def _adopt_settings(current: nn.Module, restored: nn.Module | None) -> None:
    """Gives a restored module the training mode and the parameters' `requires_grad` of the module `current`, which it
    replaces."""
    if restored is None or current is restored:
        return
    restored.train(current.training)
    parameters = dict(current.named_parameters(recurse=False))
    for name, parameter in restored.named_parameters(recurse=False):
        # a parameter without a counterpart follows the first one of `current`, if there is any
        fallback = next(iter(parameters.values()), parameter)
        parameter.requires_grad_(parameters.get(name, fallback).requires_grad)


def _unsupported(model: nn.Module) -> str:
    """Returns a message about the first part of a model that swaps do not support, such as a compiled or quantized one;
    "" if there is none."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            return f"{name or 'the model'} is compiled by torch.jit: swap first, and script or trace afterwards. "
    for name, p in model.named_parameters():
        if p.layout != torch.strided or p.itemsize == 1 or p.is_complex() or p.is_quantized:
            return f"{name} is a {p.layout} tensor of {p.dtype}: convert the model to dense floating-point numbers. "
    return ""


class Swaps(Sequence[Row]):
    """The table of a swap: rows of (name, old, new, note). Prints as a table; `undo()` reverses the swap."""

    def __init__(self, title: str, rows: Sequence[Row], edits: Edits | None = None) -> None:
        self.title, self._rows, self._edits = title, list(rows), edits

    def undo(self) -> "Swaps":
        """Restores the model. Without training in between, its outputs are bit-equal to those before the swap.

        After training, restored modules have their weights from before the swap; all other weights keep what they
        learned. The table's notes say which of the two holds. Changes that others made in between, hooks for example,
        stay. Restored modules take the device and dtype that the model was given since.

        If Ctrl-C interrupts it, the model stays swapped, and `undo()` can be called again; near the end, the undo is
        completed instead.

        Errors: InputError if this swap was undone already; if a later one changed the same modules: undo that first; or
        if the model is wrapped or sharded by now, as after `fully_shard`.
        """
        if self._edits is None:
            raise InputError(f"{self.title}: this has been taken back already, or is itself the way back")
        note = (
            "trained since: what the swap replaced or drew is as before it, the rest as learned"
            if self._edits.was_trained()
            else "bit-equal to before the swap"
        )
        back = Swaps(f"{self.title}, taken back", [Row(r.name, r.new, r.old, note) for r in self._rows])
        self._edits.undo(self._forget)
        return back

    def _forget(self) -> None:
        """Makes a second `undo` impossible."""
        self._edits = None

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        return table(Row._fields, self._rows, f"{self.title}: {len(self._rows) or 'nothing to do'}")

    def __repr__(self) -> str:
        if not self._rows:
            return f"{self.title}: nothing to do"
        table = [Row("module", "old", "new", "note"), *self._rows]
        widths = [max(len(row[i]) for row in table) for i in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]
        return "\n".join([f"{self.title}: {len(self._rows)}", *lines])


def refuse_wrapped(model: nn.Module, change: str = "swap") -> None:
    """Raises InputError if something else holds the model's parameters: a wrapper such as FSDP, a device mesh, or
    accelerate's offloading. `change`: what is to change them, for the message."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    for name, module in model.named_modules():
        wrapper = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            raise InputError(
                f"{name or 'the model'} is wrapped in {wrapper}, which holds on to the parameters it was given and "
                f"would neither synchronise nor shard new ones: {change} first, then wrap"
            )
    for name, p in model.named_parameters():
        if hasattr(p, "device_mesh") or hasattr(p, "ds_id"):
            kind, step = ("a DTensor", "parallelise") if hasattr(p, "device_mesh") else ("DeepSpeed's", "initialise")
            raise InputError(f"{name} is {kind}, and new parameters would not be: {change} first, then {step} it")
    refuse_offloaded(model)
