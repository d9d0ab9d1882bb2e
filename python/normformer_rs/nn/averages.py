"""Updates the buffers of copies of a model whose weights are averages. These buffers are the update number t of growing
schemes and the statistics of norms, on which a forward pass depends.

EMA, SWA and similar methods copy a model and average its parameters, with or without its buffers. The copy needs the
buffers of the model that trains: averaging truncates whole numbers, and averaging parameters alone leaves the buffers
unchanged. So a copy remembers the module that it was made from. If that module has trained on, and the copy's weights
were written without an optimizer step of the copy's own, the copy takes over these buffers.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

Steering = Sequence[tuple[Tensor, Tensor]]
"""Pairs (weight, buffer): the buffer belongs to these values of the weight."""


class Origin:
    """The link of a module to the module that it was copied from. It is not pickled."""

    def __init__(self) -> None:
        self.holder: Any = _nobody
        self.source: Any = _nobody
        """A weak reference to the module that a copy was made from, until the copy trains by itself."""
        self.has_trained = False
        """True once a step of an optimizer, or a forward pass in training, has moved the buffers."""
        self.has_stepped = False
        """True once a step of an optimizer has moved a buffer."""
        self.seen: list[Tensor] = []
        """The sums of the weights and buffers at the last time that they were known to belong together."""
        self.copies: weakref.WeakSet[Origin] = weakref.WeakSet()
        self.last: dict[int, Tensor] = {}
        """The buffers after the last step, by their places in `steering()`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Origin":
        new, module = Origin(), self.holder()
        if self.source() is not None:
            new.source, new.seen = self.source, self.seen
            self.source()._origin.copies.add(new)
        elif module is not None:
            new.source, new.seen = self.holder, _marks(module.steering())
            self.copies.add(new)
        return new

    def __reduce__(self) -> Any:
        return Origin, ()

    def trains(self) -> None:
        """Records that the module moves its buffers by itself from now on."""
        if not self.has_trained:
            self.has_trained, self.source = True, _nobody


class Steered(nn.Module):
    """The base of modules whose forward pass depends on buffers that training moves, such as t or running
    statistics."""

    _origin: Origin | None = None

    def steering(self) -> Steering:
        """Returns the buffers, each with a weight that training moves together with it."""
        raise NotImplementedError

    def remember_copies(self) -> None:
        """Links later copies to this module. Call it in the constructor and in `__setstate__`."""
        origin = vars(self).get("_origin") or Origin()
        origin.holder = weakref.ref(self)
        vars(self)["_origin"] = origin
        if _told not in self._load_state_dict_post_hooks.values():
            self.register_load_state_dict_post_hook(_told)

    @torch.no_grad()
    def told(self) -> None:
        """Records that the current buffers belong to the current weights."""
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
            # For an evaluation, averaged buffers were written into the model that trains: its own are restored.
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
        for (_, buffer), its, now, seen in zip(mine, source.steering(), _marks(mine), origin.seen, strict=True):
            is_averaged = now[0] != seen[0].to(now.device)
            if buffer.is_floating_point():  # if this buffer was averaged as well, its average stays
                is_averaged &= now[1] == seen[1].to(now.device)
            elif not source._origin.has_trained:
                continue
            buffer.copy_(torch.where(is_averaged.to(buffer.device), its[1].to(buffer.device), buffer))
        origin.seen = _marks(mine)

    def keep_step(self, buffer: Tensor) -> None:
        """Records that the module's own step has moved this buffer."""
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
        self.take_over()
        super()._apply(fn, recurse)
        self.told()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.take_over()
        return super().__reduce_ex__(protocol)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.take_over()
        super()._save_to_state_dict(destination, prefix, keep_vars)


def _told(module: Any, _: Any) -> None:
    module.told()


def _nobody() -> None:
    return None


def _marks(steering: Steering) -> list[Tensor]:
    """Returns two sums of each pair, (2,), which change when a value does."""
    found = []
    for weight, buffer in steering:
        kind = torch.float64 if weight.device.type != "mps" else torch.float32
        local: list[Any] = [weight.detach(), buffer.detach()]
        local = [t.to_local() if hasattr(t, "to_local") else t for t in local]
        sums = [t.sum(dtype=kind).to(local[0].device) for t in local]
        found.append(torch.stack(sums))
    return found
