"""Keeps the statistics of training forwards that activation checkpointing recomputes in the backward pass."""

from typing import NamedTuple

import torch
from torch import Tensor

LIMIT = 32
"""The maximum number of forwards of one norm that may wait for their backward pass."""


def will_recompute() -> bool:
    """True if the current forward may be recomputed: it builds no graph, or hooks handle the tensors that it saves."""
    return not torch.is_grad_enabled() or saves_by_hooks()


def saves_by_hooks() -> bool:
    """True if hooks handle the tensors that the current forward saves, as in activation checkpointing."""
    also_while_tracing = True
    return torch._C._autograd._top_saved_tensors_default_hooks(also_while_tracing) is not None


def is_second_run() -> bool:
    """True inside a backward pass, where activation checkpointing runs a forward for the second time."""
    return torch._C._current_graph_task_id() != -1  # -1 stands for no backward pass


class _Run(NamedTuple):
    """A norm's forward: the sums of its input's columns, its mask, and its statistics."""

    sums: Tensor
    mask: Tensor | None
    stats: Tensor


class RecomputedStatistics:
    """The statistics of a norm's last forwards that will be recomputed. A second run finds those of its first run by
    its inputs: the explicit mask, and sums of x's columns.

    If several forwards fit, `find` chooses the one with the fewest look-ups, and of these the latest, because backward
    runs in reverse. The host waits for the device only if some forwards had a mask and some had none.
    """

    def __init__(self) -> None:
        self._runs: dict[torch.Size, list[_Run]] = {}
        self._found: dict[torch.Size, Tensor] = {}  # the number of look-ups of each run
        self._shapes: list[torch.Size] = []  # the shapes in the order of the forwards
        self._backward, self._finds = -1, 0  # the last backward pass that called `find`, and its number of calls

    def add(self, x: Tensor, mask: Tensor | None, stats: Tensor) -> None:
        """Keeps a forward's mask and statistics."""
        runs, look_ups = self._runs.setdefault(x.shape, []), self._found.get(x.shape)
        if look_ups is None or look_ups.device != x.device:  # no run of this shape is known on this device
            runs.clear()
            look_ups = torch.zeros(0, device=x.device)
        runs.append(_Run(_sums(x), mask, stats))
        self._found[x.shape] = torch.cat([look_ups, look_ups.new_zeros(1)])  # the new run has no look-ups yet
        self._shapes.append(x.shape)
        if len(self._shapes) > LIMIT:
            oldest = self._shapes.pop(0)
            self._runs[oldest] = self._runs[oldest][1:]
            self._found[oldest] = self._found[oldest][1:]
            if not self._runs[oldest]:
                del self._runs[oldest], self._found[oldest]

    @torch.no_grad()
    def find(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor | None, Tensor] | None:
        """Returns the mask and the statistics of this forward's first run; None if no forward of that shape is
        known. `mask`: the explicit one. Errors: RuntimeError if a backward pass repeats more forwards than are kept."""
        runs = self._runs.get(x.shape, [])
        if not runs or self._found[x.shape].device != x.device:
            return None
        backward = torch._C._current_graph_task_id()  # every backward pass has another number
        self._finds = self._finds + 1 if backward == self._backward else 1
        self._backward = backward
        if self._finds > LIMIT:
            raise RuntimeError(
                f"activation checkpointing of a norm with statistics: more than {LIMIT} of its forwards wait for one "
                "backward pass, and the statistics of the first ones are gone: call backward more often"
            )
        if len(runs) == 1:
            return runs[0].mask, runs[0].stats
        distance = (torch.stack([run.sums for run in runs]) - _sums(x)).abs().amax(-1)  # (number of runs,)
        if any(_is_same(run.mask, mask) for run in runs):  # then runs with another mask cannot be the first run
            for i, run in enumerate(runs):
                if not _is_same(run.mask, mask):
                    distance[i] = torch.inf
        look_ups, latest_first = self._found[x.shape], torch.arange(len(runs), 0, -1, device=x.device)
        # Only runs at the smallest distance count. The one with the fewest look-ups comes first; among equals the
        # latest, for which `latest_first` is smallest: it falls from len(runs) to 1.
        order = torch.where(distance == distance.min(), look_ups * len(runs) + latest_first, torch.inf)
        best = order.argmin(0, keepdim=True)
        self._found[x.shape] = look_ups + (latest_first == len(runs) - best)  # adds 1 at index `best`
        masks = [run.mask for run in runs if run.mask is not None]
        if masks and len(masks) < len(runs):  # with a mask the graph differs, so the host must know which run it is
            return runs[int(best)].mask, runs[int(best)].stats
        # `best` stays on the device and indexes stacked tensors there.
        return torch.stack(masks)[best][0] if masks else None, torch.stack([run.stats for run in runs])[best][0]


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """True if both are one tensor, or views of the same memory, as checkpointing makes them."""
    return one is not None and other is not None and one.data_ptr() == other.data_ptr() and one.shape == other.shape


def _sums(x: Tensor) -> Tensor:
    """Returns weighted sums of x's columns, (d,). Each row has another weight, so that the order of rows counts."""
    rows = x.detach().reshape(-1, x.shape[-1])
    weights = torch.linspace(0.5, 1.5, len(rows), dtype=x.dtype, device=x.device) / max(len(rows), 1)
    return (weights @ rows).nan_to_num()  # two NaNs would not be equal
