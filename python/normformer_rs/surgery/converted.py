"""Makes subclasses of other libraries' classes at run time; modules that a swap converts get them as their class."""

import functools
import inspect
from typing import Any, ClassVar

from torch import nn


class Converted:
    """A base of the classes made here. `kind`: the original class; `how`: this package's class that changes its
    behaviour. Pickles name these two, since the class itself is made at run time."""

    kind: ClassVar[type[nn.Module]]
    how: ClassVar[Any]

    def __reduce_ex__(self: Any, _: Any) -> Any:
        return _rebuild, (self.kind, self.how), self.__dict__.copy()


def original(kind: Any) -> Any:
    """Returns the original class of a class made here, and any other class as it is."""
    return kind.kind if issubclass(kind, Converted) else kind


def residual_of(block: Any) -> Any:
    """Returns a block's module of the scheme: its attribute `residual`, or `scheme_residual` if the block had a
    `residual` before the swap. None: the block has no scheme."""
    for name in NAMES:
        own = getattr(block, name, None)
        if getattr(own, "structure", None) is not None:
            return own
    return None


NAMES = ("residual", "scheme_residual")


class StreamBlock(Converted):
    """A block that runs its own forward on a residual stream (`residual_stream.py`)."""

    names: ClassVar[tuple[str, ...]]
    """The names of the forward's arguments."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return residual_of(self).run(functools.partial(self.kind.forward, self), args, kwargs)


_MADE: dict[tuple[Any, Any], Any] = {}


def converted_class(kind: type[nn.Module], how: Any) -> Any:
    """Returns the subclass of `kind` for converted modules. `how`: the class of this package that comes first among its
    bases."""
    if (kind, how) not in _MADE:
        body: dict[str, Any] = {"kind": kind, "how": how, "__module__": __name__, "__doc__": kind.__doc__}
        if issubclass(how, StreamBlock):
            body["names"] = tuple(inspect.signature(kind.forward).parameters)[1:]
        _MADE[kind, how] = type(kind.__name__, (how, kind), body)
    return _MADE[kind, how]


def _rebuild(kind: type[nn.Module], how: Any) -> Any:
    """Returns an empty module of a converted class; unpickling fills it."""
    converted = converted_class(kind, how)
    return converted.__new__(converted)
