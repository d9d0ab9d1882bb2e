"""t, the update's number that branchnorm's α_t grows with, in plain PyTorch loops."""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .declared import Growth, growth_now


class Growing(nn.Module):
    """A module that may hold a `t`: int64 (1,), set to k before the k-th update, 1 at the start, saved with the
    model."""

    growth: Growth | None = None
    t: Tensor

    def grow(self, growth: Growth | None, device: Any) -> None:
        """Takes over the growth, or hands it to whoever holds it from now on (None)."""
        self.growth = growth
        self._buffers.pop("t", None)
        if growth is not None:
            self.register_buffer("t", torch.ones(1, dtype=torch.int64, device=device))
        self._watched: tuple[int, int, int] | None = None
        self._has_warned = False

    def reset_growth(self) -> None:
        """t = 1."""
        if self.growth is not None:
            self.t.fill_(1)

    def alpha(self) -> Tensor | None:
        """α_t; None where nothing grows."""
        if self.growth is None:
            return None
        self._watch()
        return growth_now(self.t, self.growth.steps, self.growth.curve)

    def watched(self) -> Iterator[nn.Parameter]:
        """Parameters whose updates t should follow."""
        return self.parameters()

    def _watch(self) -> None:
        """Warns once where parameters have been updated and t has not moved. Reads counters of writes, not the
        device."""
        if not self.training or self._has_warned or torch.compiler.is_compiling():
            return
        parameter = next((p for p in self.watched() if p.requires_grad), None)
        if parameter is None or parameter.is_inference():
            return
        now, before = (id(parameter), parameter._version, self.t._version), self._watched
        self._watched = now
        if before and before[0] == now[0] and before[1] != now[1] and before[2] == now[2]:
            self._has_warned = True
            warnings.warn(
                "parameters have been updated but branchnorm's t has not moved, so that α_t stays where it is: call "
                "normformer_rs.nn.set_num_updates(model, k) before the k-th update",
                stacklevel=4,
            )
