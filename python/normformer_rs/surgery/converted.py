"""The classes of converted blocks: subclasses that hand their residuals to `self.residual` (`block_residual.py`)."""

import functools
import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .spec import BlockSpec, Part, at


class Converted:
    """A block with a scheme, or a module inside one. Its class is made at run time, so pickles name the original
    class."""

    kind: ClassVar[type[nn.Module]]
    how: ClassVar[Any]

    def __reduce_ex__(self: Any, _: Any) -> Any:
        return _rebuild, (self.kind, self.how), self.__dict__.copy()


class ConvertedBlock(Converted):
    """A converted block. Forwards of their own call `self.residual.step` themselves."""

    residual: Any
    spec: ClassVar[BlockSpec]
    passed_over: ClassVar[tuple[str, ...]] = ()
    """Modules that the original block calls, and of which this one calls the parts."""


class ConvertedSite(Converted):
    """A module inside a block that holds one of its residuals."""

    block_of: tuple[Any]

    @property
    def block(self) -> Any:
        return self.block_of[0]


class SpecBlock(ConvertedBlock):
    """A block that runs its sublayers as declared, one after another.

    Attention gets the block's own arguments under their names: masks, positions, caches, and those that a later version
    of its library adds. Cross-attention gets the encoder's output and mask as `key_value_states` and `attention_mask`,
    and is left out where no output is given.
    """

    names: ClassVar[tuple[str, ...]]
    """Arguments of the block's own forward after its input."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(self.names[: len(args)], args, strict=True)) | kwargs
        memory = {"key_value_states": given.pop("encoder_hidden_states", None)}
        memory["attention_mask"] = given.pop("encoder_attention_mask", None)
        arguments = {"self-attention": given, "cross-attention": given | memory, "feed-forward": {}}
        x = hidden_states
        for i, part in enumerate(self.residual.parts):
            if part.kind != "cross-attention" or memory["key_value_states"] is not None:
                x = self.residual.step(i, x, functools.partial(_run, self, part, arguments[part.kind]))
        if self.spec.clamps and x.dtype == torch.float16:
            limit = torch.finfo(x.dtype).max - 1000
            x = torch.clamp(x, min=-limit, max=limit)
        return x


def _run(block: Any, part: Part, given: dict[str, Any], x: Tensor) -> Tensor:
    """F(x) by the block's modules; `given` goes to the first of them. Of a tuple its first item counts."""
    for path in part.run:
        what = at(block, path)
        if isinstance(what, float | int):
            x = nn.functional.dropout(x, what, block.training)
        else:
            x = what(x, **given)
            x, given = x[0] if isinstance(x, tuple) else x, {}
    return x


_MADE: dict[tuple[Any, Any], Any] = {}


def converted_class(kind: type[nn.Module], how: Any) -> Any:
    """The subclass that modules of a class become: `how` is a `BlockSpec`, or a mixin with a forward of its own."""
    if (kind, how) not in _MADE:
        _MADE[kind, how] = _make(kind, how)
    return _MADE[kind, how]


def _make(kind: type[nn.Module], how: Any) -> Any:
    mixin = SpecBlock if isinstance(how, BlockSpec) else how
    body: dict[str, Any] = {"kind": kind, "how": how, "__module__": __name__, "__doc__": kind.__doc__}
    spec = how if isinstance(how, BlockSpec) else getattr(how, "spec", None)
    if spec is not None:
        body |= {"spec": spec, "parts": lambda block: spec.parts_of(block), "heads": lambda block: spec.heads_of(block)}
    if mixin is SpecBlock:
        body["names"] = tuple(inspect.signature(kind.forward).parameters)[2:]
    return type(kind.__name__, (mixin, kind), body)


def _rebuild(kind: type[nn.Module], how: Any) -> Any:
    converted = converted_class(kind, how)
    return converted.__new__(converted)
