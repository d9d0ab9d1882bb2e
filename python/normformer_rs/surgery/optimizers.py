"""Exchanges the parameters of optimizers in a swap. An optimizer that was not passed to the swap warns at its next
step."""

import gc
import sys
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import InputError
from .handover import refuse_hooked
from .undo import Edits
from .whole import HEIRS

Exchange = dict[nn.Parameter, list[tuple[str, nn.Parameter]]]
"""For each old parameter, the (name, parameter) pairs that replace it. If it stays, it is one of them."""


class Repoint:
    """Exchanges an optimizer's parameters when called. The constructor raises all errors, before anything changes.

    Args:
        exchange: for each old parameter the (name, parameter) pairs that replace it, in the same parameter group. The
            old parameter's state is dropped unless it is one of them.
        names: the old parameters' names.
        drawn: parameters that stay but lose their state, because they were re-initialised.

    Errors: InputError if the optimizer does not own an old parameter that requires a gradient.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        exchange: Exchange,
        names: Mapping[nn.Parameter, str],
        drawn: Sequence[nn.Parameter] = (),
    ) -> None:
        self.optimizer, self.exchange, self.names, self.drawn = optimizer, exchange, names, drawn
        for p, new in exchange.items():
            if any(q is not p and q.requires_grad for _, q in new):  # then p's hooks would miss a parameter to train
                refuse_hooked(names[p], p)
        if optimizer is None:
            return
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [p for p in exchange if p.requires_grad and id(p) not in owned]
        if missing:
            raise InputError(
                f"the optimizer does not own {len(missing)} of the {len(exchange)} parameters that are swapped "
                f"(the first is of shape {tuple(missing[0].shape)}): pass the optimizer that was made of this model's "
                "parameters"
            )

    def __call__(self, edits: Edits) -> None:
        """Makes the exchange, and adds its reversal to the undo of `edits`."""
        watch(self.exchange, self._reversed(), edits)
        if self.optimizer is None:
            return
        optimizer, old = self.optimizer, []  # `old`: each group with its (name, parameter) pairs from before
        for group in optimizer.param_groups:
            before = _named(group)
            old.append((group, before))
            _set(group, [pair for name, p in before for pair in self.exchange.get(p, [(name, p)])])
        # a parameter that stays is one of its own replacements
        removed = (p for p, new in self.exchange.items() if all(p is not q for _, q in new))
        for p in (*self.drawn, *removed):
            optimizer.state.pop(p, None)  # the moments of old values do not fit new ones

        def reverse() -> None:
            """Reverses the exchange, and drops the state of the new parameters."""
            for group, before in old:
                for q in self._take_back(group, before):
                    optimizer.state.pop(q, None)

        edits.afterwards(reverse)

    def _reversed(self) -> Exchange:
        """Returns the exchange that an undo makes: the new parameters → the old ones. Old parameters that stay are left
        out."""
        back: Exchange = {}
        for p, new in self.exchange.items():
            if any(p is q for _, q in new):  # p stays in the model
                continue
            for _, q in new:
                back.setdefault(q, []).append((self.names[p], p))
        return back

    def _take_back(self, group: dict[str, Any], before: Sequence[tuple[str, nn.Parameter]]) -> set[nn.Parameter]:
        """Restores the exchanged parameters of a group (`before`: its parameters at the swap). Parameters that were
        added or removed since stay so. Returns the new parameters, which the undo removes."""
        new = {q for _, p in before for _, q in self.exchange.get(p, ())} - {p for _, p in before}
        # the group's present parameters without the new ones; the loop inserts each old one that is missing
        kept = [(name, q) for name, q in _named(group) if q not in new]
        for i, (name, p) in enumerate(before):
            if p in self.exchange and all(p is not q for _, q in kept):
                earlier = {q for _, q in before[:i]}
                # p's place is right after the last parameter in `kept` that came before it at the swap
                position = max((j + 1 for j, (_, q) in enumerate(kept) if q in earlier), default=0)
                kept.insert(position, (name, p))
        _set(group, kept)
        return new


def _named(group: dict[str, Any]) -> list[tuple[str, nn.Parameter]]:
    """Returns a group's (name, parameter) pairs; without names in the group, the names are empty."""
    return [*zip(group.get("param_names") or [""] * len(group["params"]), group["params"])]


def _set(group: dict[str, Any], named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Gives a group these parameters, and their names if the group has names."""
    group["params"] = [p for _, p in named]
    if "param_names" in group:
        group["param_names"] = [name for name, _ in named]


# The code below finds optimizers that were not passed to the swap.


class _Heirs(NamedTuple):
    """The new parameters with which a swap replaced an old one: (name, weak reference) pairs. `title`: the swap's."""

    title: str
    named: list[tuple[str, "weakref.ref[nn.Parameter]"]]


_CHECKED: "weakref.WeakKeyDictionary[torch.optim.Optimizer, int]" = weakref.WeakKeyDictionary()
"""For each optimizer, the value of `_exchanges` when it was last checked."""
_exchanges = 0
"""The number of exchanges in this process so far."""
_LISTENING: list[Any] = []
"""The handle of `_check`'s hook, once it is registered."""


def watch(exchange: Exchange, back: Exchange, edits: Edits) -> None:
    """Makes each optimizer warn at its next step if it has an old parameter of the exchange, and no optimizer has the
    new one. `back`: the exchange of the undo."""
    records, title = _expect(edits.title, exchange), f"undo() of {edits.title}"

    def undo() -> None:
        """Stops expecting the new parameters, and expects the old ones."""
        for p, heirs in records:
            HEIRS[p].remove(heirs)
        _expect(title, back)

    edits.afterwards(undo)


def _expect(title: str, exchange: Exchange) -> list[tuple[nn.Parameter, _Heirs]]:
    """Records the new parameters of an exchange in HEIRS, and hooks the steps of optimizers. Returns the records."""
    global _exchanges
    _exchanges += 1
    records = []
    for p, new in exchange.items():
        heirs = _Heirs(title, [(name, weakref.ref(q)) for name, q in new if q is not p])
        if heirs.named:
            HEIRS.setdefault(p, []).append(heirs)
            records.append((p, heirs))
    # making an optimizer loads torch._dynamo, so without that module there is no optimizer that could warn
    if not _LISTENING and "torch._dynamo" in sys.modules:
        _LISTENING.append(register_optimizer_step_pre_hook(torch.compiler.disable(_check)))
    return records


def _check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Warns if new parameters of a swap belong to no optimizer, and this one has the old ones. Runs before a step, once
    after each exchange."""
    if _CHECKED.get(optimizer) == _exchanges:
        return
    _CHECKED[optimizer] = _exchanges
    forgotten = _forgotten(optimizer)
    if forgotten:
        owned = {id(p) for other in _optimizers() for group in other.param_groups for p in group["params"]}
        unowned = [(title, name) for title, name, q in forgotten if id(q) not in owned]
        if unowned:
            title, name = unowned[0]
            more = f" and {len(unowned) - 1} more parameters" if len(unowned) > 1 else ""
            warnings.warn(
                f"{title} made {name}{more}, and no optimizer has them: this {type(optimizer).__name__} still has "
                "the parameters from before, so that its steps leave the new ones as they are. Pass optimizer= to the "
                "swap, or make the optimizer afterwards",
                stacklevel=4,  # the line that calls step(), past two wrappers of torch
            )


def _forgotten(optimizer: torch.optim.Optimizer) -> list[tuple[str, str, nn.Parameter]]:
    """Returns the parameters that replaced an optimizer's parameters but are not in the optimizer, each with its swap's
    title and its name."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    owned, forgotten = {id(p) for p in own}, []
    for heirs in (heirs for p in own for heirs in HEIRS.get(p, ())):
        for name, reference in heirs.named:
            q = reference()
            if q is not None and q.requires_grad and id(q) not in owned:
                forgotten.append((heirs.title, name, q))
    return forgotten


def _optimizers() -> list[torch.optim.Optimizer]:
    """Returns all optimizers of the process."""
    # `type(…)`, since isinstance would read `__class__` of foreign objects, which may run their code
    return [candidate for candidate in gc.get_objects() if issubclass(type(candidate), torch.optim.Optimizer)]
