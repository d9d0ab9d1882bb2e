"""Updates the buffers of averaged copies of a model (EMA, SWA and similar methods).

The buffers are the update number t of schemes whose gains grow, and the running statistics of norms. Averaging methods
copy a model and average its parameters, with or without its buffers. But the copy needs the buffers of the model that
trains: averaging truncates integers such as t, and averaging parameters alone leaves the buffers unchanged. So a copy
remembers its source module. If the source has been trained further, and something other than the copy's own optimizer
has written the copy's weights, the copy takes over the source's buffers.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

Steering = Sequence[tuple[Tensor, Tensor]]
"""Pairs (weight, buffer): training changes both, so the buffer fits only the current values of the weight."""


class Origin:
    """Links a module (the holder) to the module that it was copied from. A pickle contains an empty link."""

    def __init__(self) -> None:
        self.holder: Any = _nobody
        """A weak reference to the module that has this link."""
        self.source: Any = _nobody
        """A weak reference to the module that the holder was copied from, until the holder trains by itself."""
        self.has_trained = False
        """True once an optimizer step or a training forward has changed the buffers."""
        self.has_stepped = False
        """True once an optimizer step has changed a buffer."""
        self.seen: list[Tensor] = []
        """The sums of each weight and buffer (`_marks`) when they were last known to fit each other."""
        self.copies: weakref.WeakSet[Origin] = weakref.WeakSet()
        self.last: dict[int, Tensor] = {}
        """The buffers' values after the last optimizer step, by their index in `steering()`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Origin":
        """Returns the link of a copy of the holder, which leads to the module that trains."""
        new, module = Origin(), self.holder()
        # A copy of a copy follows the module that trains, too.
        if self.source() is not None:
            new.source, new.seen = self.source, self.seen
            self.source()._origin.copies.add(new)
        elif module is not None:
            new.source, new.seen = self.holder, _marks(module.steering())
            self.copies.add(new)
        return new

    def __reduce__(self) -> Any:
        """Pickles as an empty link, because weak references cannot be pickled."""
        return Origin, ()

    def trains(self) -> None:
        """Records that the holder changes its buffers by itself from now on."""
        if not self.has_trained:
            self.has_trained, self.source = True, _nobody


class Steered(nn.Module):
    """The base of modules whose forward pass depends on buffers that training moves, such as t or running
    statistics."""

    _origin: Origin | None = None

    def steering(self) -> Steering:
        """Returns the buffers, each paired with a weight that training changes at the same time."""
        raise NotImplementedError

    def remember_copies(self) -> None:
        """Links later copies to this module. Call it in the constructor and in `__setstate__`."""
        origin = vars(self).get("_origin") or Origin()
        origin.holder = weakref.ref(self)
        vars(self)["_origin"] = origin
        if _told not in self._load_state_dict_post_hooks.values():  # a copy already has the hook
            self.register_load_state_dict_post_hook(_told)

    @torch.no_grad()
    def told(self) -> None:
        """Records that the current buffers fit the current weights."""
        if self._origin is not None:
            self._origin.last.clear()
            if self._origin.source() is not None:
                self._origin.seen = _marks(self.steering())

    @torch.no_grad()
    def take_over(self) -> None:
        """Sets the buffers to those of the module that this one was copied from, if its weights were averaged since
        then. The host does not wait for the device."""
        origin = self._origin
        if origin is None or torch.compiler.is_compiling():
            return
        if origin.last and not self.training and len(origin.copies):
            # For an evaluation, averaged buffers were written into the model that trains. Restore its own.
            for i, (_, buffer) in enumerate(self.steering()):
                if i in origin.last:
                    buffer.copy_(origin.last[i])
        source = origin.source()
        if source is None:
            return
        mine = self.steering()
        if len(mine) != len(origin.seen) or not all(isinstance(weight, nn.Parameter) for weight, _ in mine):
            return  # torch.func has replaced the parameters by other tensors
        if any(hasattr(buffer, "device_mesh") for _, buffer in (*mine, *source.steering())):
            return  # one of the two is sharded over processes
        theirs = (buffer for _, buffer in source.steering())
        for (_, buffer), source_buffer, now, before in zip(mine, theirs, _marks(mine), origin.seen, strict=True):
            weight_now, buffer_now = now  # the sum of each tensor, now and when they were known to fit
            weight_before, buffer_before = before.to(now.device)
            # True if something has written the weight. The bool stays on the device, so that the host need not wait.
            must_copy = weight_now != weight_before
            if buffer.is_floating_point():  # a buffer that was averaged as well keeps its average
                must_copy &= buffer_now == buffer_before
            elif not source._origin.has_trained:  # then the source's counter never moved, so the copy keeps its own
                continue
            buffer.copy_(torch.where(must_copy.to(buffer.device), source_buffer.to(buffer.device), buffer))
        origin.seen = _marks(mine)

    def keep_step(self, buffer: Tensor) -> None:
        """Records that an optimizer step of this module has changed this buffer, and keeps the buffer's new value."""
        if (origin := self._origin) is None:
            return
        origin.trains()
        origin.has_stepped = True
        for i, (_, own) in enumerate(self.steering()):
            if own is buffer:
                if i in origin.last and origin.last[i].device == own.device:
                    origin.last[i].copy_(own)
                else:
                    origin.last[i] = own.detach().clone()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # A move or a cast changes the sums in `seen` without training, so they are checked before it and renewed after.
        self.take_over()
        super()._apply(fn, recurse)
        self.told()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles and copies the module with buffers that fit its weights."""
        self.take_over()
        return super().__reduce_ex__(protocol)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Saves buffers that fit the weights."""
        self.take_over()
        super()._save_to_state_dict(destination, prefix, keep_vars)


def _told(module: Any, _: Any) -> None:
    """The hook after `load_state_dict`: the loaded buffers fit the loaded weights."""
    module.told()


def _nobody() -> None:
    """Stands for a weak reference to no module: a call returns None."""
    return None


def _marks(steering: Steering) -> list[Tensor]:
    """Returns, for each pair, the sums of weight and buffer, (2,). A sum that differs later shows a changed tensor."""
    marks = []
    for weight, buffer in steering:
        # Apple's GPUs (MPS) have no f64.
        dtype = torch.float64 if weight.device.type != "mps" else torch.float32
        pair: list[Any] = [weight.detach(), buffer.detach()]
        local = [t.to_local() if hasattr(t, "to_local") else t for t in pair]
        sums = [t.sum(dtype=dtype).to(local[0].device) for t in local]
        marks.append(torch.stack(sums))
    return marks
