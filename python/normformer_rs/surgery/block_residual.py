"""A residual scheme in another library's block."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ..nn.build import install, make, reset
from ..nn.dropout import Draw
from ..nn.init import Role
from ..nn.interpreter import Streams, apply_changes, begin, close
from ..nn.place import Place
from ..nn.profiling import begin_stack
from ..nn.scheme import Change, Sublayer, parts_of, passes
from ..nn.specs import Learned, NormAt
from ..nn.step_hooks import Growing
from .blocks import path_of, width_into
from .calls import BlockCalls, begin_call, call_of, end_call
from .marker import mark_block
from .spec import Part


class Point:
    """A hook that applies a scheme's changes at one point inside a block."""

    def __init__(self, block: Any, changes: Sequence[Any]) -> None:
        self.block, self.changes = block, tuple(changes)

    def before(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return apply_changes(self.block.residual, self.changes, args[0], None), *args[1:]

    def after(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        return apply_changes(self.block.residual, self.changes, output, None)


_POINTS: dict[str, tuple[Role, str]] = {"after_heads": ("output", "before"), "after_output": ("output", "after")}
_POINTS |= {"before_activation": ("fc1", "after"), "after_activation": ("fc2", "before")}


class BlockResidual(Growing):
    """A residual scheme in another library's block: its parameters, and the norms that the block lacks.

    It may be copied alone, and the copy take its place, as by PEFT's `modules_to_save`: both refer to the same blocks,
    and these find the one in force as their `residual`.
    """

    place: Place

    def __init__(self, block: nn.Module, place: Place, parts: Sequence[Part], first: Any) -> None:
        """`first`: the stack's first block; None: this one is."""
        super().__init__()
        like = _like(block)
        factory = {"device": like.device, "dtype": like.dtype}
        # References, not children: their parameters are the block's and the first block's.
        self._block, self._first = (block,), (first,)
        self.place, self.parts = place, tuple(parts)
        self.paths = {f"norm{i + 1}": part.norm for i, part in enumerate(parts)}
        self.sublayers = tuple(_local(block, part, sublayer) for part, sublayer in zip(parts, place.sublayers))
        self.opening = place.spec.begin
        self.passes = passes((*self.opening, *(change for s in self.sublayers for change in s.outside)))
        install(self, self._declared(), place, factory=factory)
        mark_block(self, str(place.config.residual), like.device)
        self.begin: tuple[Any, ...] = place.declared.begin if first is None else ()
        install(self, parts_of(self.begin), place, factory=factory)
        self.end: tuple[Any, ...] = ()
        self.training = block.training
        self.grow(place.declared.growth if first is None else None, like.device)

    def _declared(self) -> list[NormAt | Learned]:
        """The scheme's norms and parameters that the block itself lacks."""
        declared = [*parts_of(self.opening), *(what for s in self.sublayers for what in (*s.around(), *s.within()))]
        return [what for what in declared if what.name not in self.paths]

    def reset_parameters(self) -> None:
        """Resets the scheme's norms, gains and t."""
        reset(self, [*self._declared(), *parts_of((*self.begin, *self.end))])
        self.reset_growth()

    def __getattr__(self, name: str) -> Any:
        paths = self.__dict__.get("paths", {})
        return self._block[0].get_submodule(paths[name]) if name in paths else super().__getattr__(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "BlockResidual":
        if not memo:  # the copy of a residual, not of a model
            memo |= {id(block): block for block in (*self._block, *self._first)}
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__dict__, memo))
        return new

    def watched(self) -> Iterator[nn.Parameter]:
        return self._block[0].parameters()

    def uses(self, name: str) -> bool:
        return any(what.name == name for sublayer in self.sublayers for what in sublayer.around())

    def reach_inside(self, part: Part, i: int) -> list[Any]:
        """Registers hooks on the block's linear layers for the changes inside sublayer i; returns their handles."""
        handles = []
        for point, changes in self.sublayers[i].inside.items():
            if point == "input":  # `step` applies these
                continue
            role, when = _POINTS[point]
            linear = self._block[0].get_submodule(path_of(self._block[0], part, role))
            hook = Point(self._block[0], changes)
            before = when == "before"
            handles.append(
                linear.register_forward_pre_hook(hook.before) if before else linear.register_forward_hook(hook.after)
            )
        return handles

    def follow_calls(self) -> list[Any]:
        """Registers hooks around the block's calls, where the scheme keeps something during one; returns their
        handles."""
        if not self.passes:
            return []
        block = self._block[0]
        calls = BlockCalls(block)
        return [
            block.register_forward_pre_hook(calls.begin, prepend=True),
            block.register_forward_hook(calls.end, always_call=True),
        ]

    def finish(self, end: Sequence[Any]) -> None:
        """Makes this the last block, which also applies the changes after the stack."""
        like = _like(self._block[0])
        for what in parts_of(end):
            setattr(self, what.name, make(what, self.place, {"device": like.device, "dtype": like.dtype}))
        self.end = tuple(end)

    def step(
        self, i: int, x: Tensor, function: Callable[[Tensor], Any], dropout: nn.Module | float | None = None
    ) -> Any:
        """x⁺ of sublayer i, with F = `function`. Of a tuple that F returns, the first item is F(x); the others follow
        x⁺. `dropout`: a module or a rate; None: the one that the sublayer's `Part` names."""
        if i == 0 and self._first[0] is None:
            begin_stack()
        if i == 0:
            kept = begin_call(self._block[0]) if self.passes else {}
            x = apply_changes(self, (*self.begin, *self.opening), x, None, kept)
        else:
            kept = call_of(self._block[0]) if self.passes else {}
        sublayer: Sublayer = self.sublayers[i]
        streams = Streams(x, kept=kept)
        given = apply_changes(self, sublayer.inside.get("input", ()), begin(self, sublayer, streams, None), None)
        output = function(given)
        f, *rest = output if isinstance(output, tuple) else (output,)
        declared = self.parts[i].dropout
        if self.parts[i].moves is not None:
            dropout = self._modules[f"dropout{i + 1}"]
        elif dropout is None and declared is not None:
            dropout = getattr(self._block[0], declared)
        if not isinstance(dropout, nn.Module):
            dropout = nn.Dropout(dropout or 0.0).train(self.training)
        holder = self if self._first[0] is None else self._first[0].residual
        alpha_t = holder.alpha(self.place.layer)
        x = close(self, sublayer, streams, f, dropout, Draw(x.device), alpha_t=alpha_t).x
        if i + 1 == len(self.sublayers):
            if self.passes:
                end_call(self._block[0])
            x = apply_changes(self, self.end, x, None)
        return (x, *rest) if isinstance(output, tuple) else x

    def extra_repr(self) -> str:
        return f"{self.place.config.residual!r}, layer {self.place.layer} of {self.place.depth}"


def _like(block: nn.Module) -> Tensor:
    """A parameter that tells device and dtype; quantized ones do not."""
    return next((p for p in block.parameters() if p.is_floating_point()), next(block.parameters()))


def _local(block: nn.Module, part: Part, sublayer: Sublayer) -> Sublayer:
    """The sublayer with names of one module's attributes: self_attn.inner_norm becomes self_attn_inner_norm. A norm
    after the heads gets the heads' joint width, which in T5 need not be d_model."""

    def flat(point: str, change: Change) -> Change:
        change = change.renamed(lambda name: name.replace(".", "_"))
        if point != "after_heads" or not isinstance(change.what, NormAt):
            return change
        return change._replace(what=change.what._replace(width=width_into(block, part, "output")))

    inside = {point: tuple(flat(point, change) for change in changes) for point, changes in sublayer.inside.items()}
    return sublayer._replace(inside=inside)
