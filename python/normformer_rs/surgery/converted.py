"""Subclasses that surgery makes of other libraries' classes, and converted blocks."""

import functools
import inspect
from typing import Any, ClassVar

from torch import nn


class Converted:
    """A block with a scheme, or a module inside one. Its class is made at run time, so pickles name the original
    class."""

    kind: ClassVar[type[nn.Module]]
    how: ClassVar[Any]

    def __reduce_ex__(self: Any, _: Any) -> Any:
        return _rebuild, (self.kind, self.how), self.__dict__.copy()


def original(kind: Any) -> Any:
    """A class before surgery made a subclass of it."""
    return kind.kind if issubclass(kind, Converted) else kind


def residual_of(block: Any) -> Any:
    """The scheme's part of a block: its `residual`, or `scheme_residual` where the block has something of its own under
    that name. None: it has no scheme."""
    for name in NAMES:
        own = getattr(block, name, None)
        if getattr(own, "structure", None) is not None:
            return own
    return None


NAMES = ("residual", "scheme_residual")


class StreamBlock(Converted):
    """A block that runs its own forward on a residual stream (`residual_stream.py`)."""

    names: ClassVar[tuple[str, ...]]
    """Arguments of its forward."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return residual_of(self).run(functools.partial(self.kind.forward, self), args, kwargs)


_MADE: dict[tuple[Any, Any], Any] = {}


def converted_class(kind: type[nn.Module], how: Any) -> Any:
    """The subclass that modules of a class become; `how`: a class of this package that comes before it."""
    if (kind, how) not in _MADE:
        body: dict[str, Any] = {"kind": kind, "how": how, "__module__": __name__, "__doc__": kind.__doc__}
        if issubclass(how, StreamBlock):
            body["names"] = tuple(inspect.signature(kind.forward).parameters)[1:]
        _MADE[kind, how] = type(kind.__name__, (how, kind), body)
    return _MADE[kind, how]


def _rebuild(kind: type[nn.Module], how: Any) -> Any:
    converted = converted_class(kind, how)
    return converted.__new__(converted)
