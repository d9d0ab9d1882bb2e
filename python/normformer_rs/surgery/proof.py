"""Proves what a run has found: with the scheme that the blocks are read to have, a model computes what it did."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..schemes import Combine, Learned, Place, ResidualSpec, Scheme, StackSpec, StreamStep, norm
from .blocks import Group, structure_of
from .examples import quietly
from .record import tensors_in
from .spec import Part
from .undo import Edits

_ERRORS = {torch.float64: 1e-5, torch.float32: 1e-4}
"""The allowed difference beside the largest number. Models in f64 have norms in f32."""
_IN_16_BITS = 0.1
"""The allowed difference, as the roots of the means of squares."""


class OwnForm(Scheme):
    """The scheme that blocks have. `is_wide`: with sums of all outputs, of which only the last counts, and a stream
    that is zero, so that the hidden state is as wide as schemes with several tensors make it."""

    name = "own-form"

    def __init__(self, group: Group, is_wide: bool = False) -> None:
        self.parts = tuple(structure_of(block).parts for block in group.blocks)
        self.has_end, self.is_wide = group.end is not None, is_wide

    def _part(self, place: Place) -> Part | None:
        parts = self.parts[min(place.layer, len(self.parts) - 1)]
        return parts[place.index] if place.index < len(parts) else None

    def around(self, place: Place) -> ResidualSpec:
        part = self._part(place)
        if part is None:
            return ResidualSpec(streams=[StreamStep(0.0, 0.0)] if self.is_wide else [])
        is_before = part.before is not None or (part.norm is not None and not (part.after or part.branch))
        return ResidualSpec(
            before=[norm()] if is_before else [],
            branch=[norm("branch_norm")] if part.branch is not None else [],
            after=[norm("after_norm")] if part.after is not None else [],
            alpha=part.alpha,
            beta=part.beta,
            streams=[StreamStep(0.0, 0.0)] if self.is_wide else [],
        )

    def stack(self, place: Place) -> StackSpec:
        size = place.layers + 1
        eye = [float(i == j) for i in range(size) for j in range(size)]
        combine = Combine(Learned("combine.weight", eye, (size, size)), skips_first=True) if self.is_wide else None
        return StackSpec(combine=combine, streams=[None] if self.is_wide else [], end=[norm()] if self.has_end else [])


def prove(
    model: nn.Module,
    run: Callable[[], Any],
    groups: list[Group],
    swap: Callable[[list[Group], Any, Edits], None],
    is_wide: bool,
) -> dict[str, str]:
    """The groups whose identity swap changes what the model computes, by their paths, with what differs. `swap` gives
    each of the groups a scheme; here everything is put back."""
    firsts = (next((p for p in b.parameters() if p.requires_grad), None) for g in groups for b in g.blocks)
    watched = [*dict.fromkeys(p for p in firsts if p is not None)]
    modes = [False] + ([True] if not any(_random(model)) else [])
    before = {mode: _observe(model, run, watched, mode) for mode in modes}

    def fault(some: list[Group]) -> str | None:
        edits = Edits(model, "an identity swap")
        try:
            swap(some, lambda group: OwnForm(group, is_wide), edits)
            for mode in modes:
                said = _differ(before[mode], _observe(model, run, watched, mode))
                if said is not None:
                    return said + " in training mode" * mode
            return None
        except Exception as reason:  # a model may raise anything on a hidden state of another width
            return f"{type(reason).__name__}: {str(reason).partition(chr(10))[0]}"
        finally:
            edits.take_back()

    if fault(groups) is None:
        return {}
    return {group.path: said for group in groups if (said := fault([group])) is not None}


def _random(model: nn.Module) -> Iterator[bool]:
    """Whether parts of the model draw random numbers in training mode, as far as their attributes tell."""
    for module in model.modules():
        for name, value in vars(module).items():
            if (
                isinstance(value, float)
                and value > 0
                and ("drop" in name or (name == "p" and "Drop" in type(module).__name__))
            ):
                yield True


def _observe(
    model: nn.Module, run: Callable[[], Any], watched: list[nn.Parameter], training: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """The model's outputs, and the gradients of a weighted sum of them, one parameter's of each block."""
    with quietly(model), torch.enable_grad():
        model.train(training)
        outputs = [t for t in tensors_in(run()) if t.is_floating_point()]
        followed = [t for t in outputs if t.requires_grad]
        gradients: list[Tensor] = []
        if watched and followed:
            total = torch.stack([(t.double().flatten() * _weights(t)).sum() for t in followed]).sum()
            with contextlib.suppress(RuntimeError):  # a model may write into what its gradient needs
                given = torch.autograd.grad(total, watched, allow_unused=True)
                gradients = [g for g in given if g is not None]
    return [t.detach() for t in outputs], gradients


def _differ(before: tuple[list[Tensor], list[Tensor]], now: tuple[list[Tensor], list[Tensor]]) -> str | None:
    """Outputs, and gradients where both sides have them."""
    said = difference(before[0], now[0])
    if said is None and before[1] and now[1]:
        said = difference(before[1], now[1])
        return said and said.replace("outputs", "gradients")
    return said


def _largest(t: Tensor) -> float:
    return t.abs().max().item()


def _root_of_mean(t: Tensor) -> float:
    return t.square().mean().sqrt().item()


def _weights(t: Tensor) -> Tensor:
    """Numbers that differ: a plain sum of normed rows would be constant."""
    return torch.arange(t.numel(), dtype=torch.float64, device=t.device).cos()


def difference(before: list[Tensor], now: list[Tensor], in_16_bits: float = _IN_16_BITS) -> str | None:
    """What sets two runs' outputs apart beyond rounding, in words."""
    if [t.shape for t in before] != [t.shape for t in now]:
        return "its outputs have other shapes"
    for a, b in zip(before, now):
        same = torch.isfinite(a)
        error = _ERRORS.get(a.dtype, in_16_bits)
        size: Any = _largest if a.dtype in _ERRORS else _root_of_mean
        scale, distance = (size(t[same].double()) if same.any() else 0.0 for t in (a, a - b))
        if not distance <= error * max(scale, 1e-3):
            return f"its outputs differ by {distance:.3g} of {scale:.3g}"
    return None
