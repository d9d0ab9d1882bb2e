"""Makes subclasses of other libraries' classes at run time; modules that a swap converts get them as their class."""

import functools
import inspect
from typing import Any, ClassVar

from torch import nn


class Converted:
    """A base of the classes made here. Pickles name the two classes that such a class is made of, since itself it is
    made at run time. The attributes' names begin with `_nfrs_`, so that they differ from those of any module."""

    _nfrs_kind: ClassVar[type[nn.Module]]
    """The original class."""
    _nfrs_how: ClassVar[Any]
    """This package's class that changes its behaviour."""

    def __reduce_ex__(self: Any, _: Any) -> Any:
        """Pickles the two classes and the attributes; `_rebuild` makes the class anew."""
        kind = type(self)
        return _rebuild, (kind._nfrs_kind, kind._nfrs_how), self.__dict__.copy()


def original(kind: Any) -> Any:
    """Returns the original class of a class made here, and any other class as it is."""
    return kind._nfrs_kind if issubclass(kind, Converted) else kind


def residual_of(block: Any) -> Any:
    """Returns a block's module of the scheme: its attribute `residual`, or `scheme_residual` if the block had a
    `residual` before the swap. None: the block has no scheme."""
    for name in NAMES:
        own = getattr(block, name, None)
        if getattr(own, "structure", None) is not None:
            return own
    return None


NAMES = ("residual", "scheme_residual")
"""The attributes that may hold a block's module of the scheme, in the order in which they are tried."""


class StreamBlock(Converted):
    """A block that runs its own forward on a residual stream (`residual_stream.py`)."""

    _nfrs_names: ClassVar[tuple[str, ...]]
    """The names of the forward's arguments."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of the original class's forward, with the scheme."""
        return residual_of(self).run(functools.partial(type(self)._nfrs_kind.forward, self), args, kwargs)


def names_of(block: Any) -> tuple[str, ...]:
    """Returns the names of the arguments of a StreamBlock's forward."""
    names: tuple[str, ...] = type(block)._nfrs_names
    return names


_MADE: dict[tuple[Any, Any], Any] = {}
"""The classes made so far, by the arguments of `converted_class`."""


def converted_class(kind: type[nn.Module], how: Any) -> Any:
    """Returns the subclass of `kind` for converted modules. `how`: the class of this package that comes first among its
    bases."""
    if (kind, how) not in _MADE:
        body: dict[str, Any] = {"_nfrs_kind": kind, "_nfrs_how": how, "__module__": __name__, "__doc__": kind.__doc__}
        if issubclass(how, StreamBlock):
            body["_nfrs_names"] = tuple(inspect.signature(kind.forward).parameters)[1:]  # without self
        _MADE[kind, how] = type(kind.__name__, (how, kind), body)
    return _MADE[kind, how]


def _rebuild(kind: type[nn.Module], how: Any) -> Any:
    """Returns an empty module of a converted class; unpickling fills it."""
    converted = converted_class(kind, how)
    return converted.__new__(converted)
