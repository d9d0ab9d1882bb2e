"""The parts of a residual scheme as JSON: `to_json` writes each type of declared.py and `from_json` reads it, both
through `_codec`, which follows the types of its fields. A variant of a Rust enum is {its name: its content}.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from ..errors import InputError
from .declared import (
    GROWING,
    KINDS,
    Change,
    Changes,
    Channel,
    Curve,
    DepthAttention,
    Each,
    FirstValues,
    Gain,
    Gates,
    HyperConnection,
    Joint,
    Learned,
    Mixing,
    NormAt,
    Part,
    Permuted,
    Stream,
)
from .first_values import Normal, number


class Owner(NamedTuple):
    """The module that owns the norms and parameters of a declaration: the width of its rows, and the prefix (`path`)
    and suffix (`number`) of their names in the module."""

    width: int
    path: str = ""
    number: str = ""

    def own(self, part: Any, what: str) -> Any:
        """Returns a norm or a parameter under the name that it has in the module, with its width or shape filled in.
        `what`: the part's name in messages."""
        name = self.path + _text(part.name, f"{what}.name")
        if isinstance(part, NormAt):
            width = self.width if part.width is None else part.width
            return NormAt(name + self.number, width, part.start)
        # Sublayers share a parameter by its name, which then has no number, so `shared` itself need not be written.
        name += "" if part.shared else self.number
        shape = part.shape if isinstance(part.shape, list | tuple) else [part.shape]
        # An array becomes a list. Its shape is not empty, unlike that of a single number of numpy.
        value = [*part.value] if getattr(part.value, "shape", None) else part.value
        return part._replace(name=name, value=value, shape=shape, shared=False)


def to_json(kind: Any, value: Any, owner: Owner, what: str) -> Any:
    """Returns the value as the JSON that Rust reads. `owner`: the module that will own its norms and parameters;
    `what`: the value's name in messages. Errors: InputError for a value of another type than `kind`."""
    return _codec(kind).write(value, owner, what)


def from_json(kind: Any, stored: Any) -> Any:
    """Returns the value of type `kind` that Rust wrote as `stored`."""
    return _codec(kind).read(stored)


def refusal(what: str, expected: str, value: Any) -> InputError:
    """Returns the error for a wrong value. `what`: the value's name; `expected`: the values allowed, in words."""
    return InputError(f"{what} must be {expected}; got {value!r}")


class _Codec(NamedTuple):
    """The functions that write a type's values as JSON, and read them."""

    write: Callable[[Any, Owner, str], Any]
    """Converts a value to JSON; it also gets the module that owns the value, and the value's name in messages."""
    read: Callable[[Any], Any]
    """Makes the value from its JSON."""


@functools.cache
def _codec(kind: Any) -> _Codec:
    """Returns the codec of a type: a class, a Literal, a union or a sequence."""
    if kind in _CODECS:
        return _CODECS[kind]()
    if get_origin(kind) is Literal:
        return _codec(str)
    kinds = [argument for argument in get_args(kind) if argument is not NoneType]
    if len(kinds) < len(get_args(kind)):  # X | None, where X may be a union, too
        return _optional(_codec(functools.reduce(operator.or_, kinds)))
    if isinstance(kind, UnionType):  # X | Sequence[X]
        return _one_or_list(_codec(kinds[0]))
    # Only two kinds of types are left: Sequence[X], with the argument X, and named tuples, which have no argument.
    return _list(_codec(kinds[0])) if kinds else _fields(kind)


def _leaf(check: Callable[[Any, str], Any], read: Callable[[Any], Any] = lambda stored: stored) -> _Codec:
    """Returns the codec of a type without parts. `check` returns a value as JSON holds it, or raises; it gets the value
    and its name in messages. `read` makes the value from what JSON holds."""
    return _Codec(lambda value, _, what: check(value, what), read)


def _optional(codec: _Codec) -> _Codec:
    """Returns the codec of `X | None`, where `codec` is X's."""

    def write(value: Any, owner: Owner, what: str) -> Any:
        """Returns the value as JSON. `what` names it in messages."""
        return None if value is None else codec.write(value, owner, what)

    return _Codec(write, lambda stored: None if stored is None else codec.read(stored))


def _list(codec: _Codec) -> _Codec:
    """Returns the codec of a list of values that `codec` writes."""

    def write(value: Any, owner: Owner, what: str) -> Any:
        """Returns the list as JSON. `what` names it in messages."""
        if not isinstance(value, Iterable) or isinstance(value, str):
            raise refusal(what, "a list", value)
        return [codec.write(item, owner, what) for item in value]

    return _Codec(write, lambda stored: tuple(map(codec.read, stored)))


def _one_or_list(codec: _Codec) -> _Codec:
    """Returns the codec of `X | Sequence[X]`."""
    many = _list(codec)

    def write(value: Any, owner: Owner, what: str) -> Any:
        """Returns the value, or the list of values, as JSON. `what` names it in messages."""
        is_list = isinstance(value, list | tuple) and not hasattr(value, "_fields")  # a named tuple is one X
        return (many if is_list else codec).write(value, owner, what)

    return _Codec(write, lambda stored: (many if isinstance(stored, list) else codec).read(stored))


def _enum(variants: Mapping[str, Any], expected: str) -> _Codec:
    """Returns the codec of a Rust enum, {the variant's name: its content}. `variants`: name → type of the content;
    `expected`: the types in words, for messages."""
    # A variant that holds a float also accepts an int.
    codecs = {tag: (int | float if kind is float else kind, _codec(kind)) for tag, kind in variants.items()}

    def write(value: Any, owner: Owner, what: str) -> Any:
        """Returns {variant's name: content}. `what` names the value in messages."""
        for tag, (kind, codec) in codecs.items():
            if isinstance(value, kind):
                return {tag: codec.write(value, owner, what)}
        raise refusal(what, expected, value)

    def read(stored: Any) -> Any:
        ((tag, content),) = stored.items()  # the dictionary has one entry
        _, codec = codecs[tag]
        return codec.read(content)

    return _Codec(write, read)


def _gain() -> _Codec:
    """Returns the codec of `Gain`: "one" and "growing" are plain texts, a curve is {its kind: its other fields}."""
    plain = _enum(
        {"constant": float, "learned": Learned}, "a number, GROWING, a Learned, or a curve of one, as sigmoid(…)"
    )
    curve, texts = _codec(Curve), {1.0: "one", GROWING: "growing"}

    def write(value: Any, owner: Owner, what: str) -> Any:
        """Returns the gain as JSON. `what` names it in messages."""
        if isinstance(value, str | int | float) and value in texts:
            return texts[value]
        if isinstance(value, Curve):
            fields = curve.write(value, owner, what)
            return {fields.pop("kind"): fields}
        return plain.write(value, owner, what)

    def read(stored: Any) -> Any:
        if isinstance(stored, str):
            return 1.0 if stored == "one" else stored
        ((tag, content),) = stored.items()
        return plain.read(stored) if tag in ("constant", "learned") else curve.read({"kind": tag, **content})

    return _Codec(write, read)


def _change() -> _Codec:
    """Returns the codec of `Change`, {the kind: its content}."""
    codecs = {kind: _codec(content_type) for kind, content_type in KINDS.items()}

    def write(value: Any, owner: Owner, what: str) -> Any:
        """Returns {the change's kind: its content}. `what` names the change in messages."""
        if not isinstance(value, Change):
            raise refusal(what, 'changes, as norm("norm") or keep("x")', value)
        if value.kind not in [*codecs]:  # in a list, because a kind of a wrong type may have no hash
            raise refusal(f"{what}: the kind of a change", f"one of {', '.join(codecs)}", value.kind)
        return {value.kind: codecs[value.kind].write(value.what, owner, f"{what}: {value.kind}")}

    def read(stored: Any) -> Any:
        ((kind, content),) = stored.items()
        return Change(kind, codecs[kind].read(content))

    return _Codec(write, read)


def _changes() -> _Codec:
    """Returns the codec of `Changes`: one change, or several, as a list."""
    many = _list(_codec(Change))

    def write(value: Any, owner: Owner, what: str) -> Any:
        """Returns a list of changes as JSON. `what` names them in messages."""
        is_list = isinstance(value, Iterable) and not isinstance(value, Change | str)
        return many.write(value if is_list else [value], owner, what)

    return _Codec(write, many.read)


def _stream() -> _Codec:
    """Returns the codec of `Stream`, {"norm": the norm or None}."""
    norm = _optional(_codec(NormAt))

    def write(value: Any, owner: Owner, what: str) -> Any:
        return {"norm": norm.write(value, owner, what)}

    return _Codec(write, lambda stored: norm.read(stored["norm"]))


def _first_values() -> _Codec:
    """Returns the codec of initial values: a number, a list, or {"normal": std}."""

    def write(value: Any, _: Owner, what: str) -> Any:
        """Returns the initial value as JSON. `what` names it in messages."""
        if isinstance(value, Normal):
            return {"normal": number(value.std, what)}
        return [number(item, what) for item in value] if isinstance(value, list | tuple) else number(value, what)

    def read(stored: Any) -> Any:
        if isinstance(stored, dict):
            return Normal(stored["normal"])
        return tuple(stored) if isinstance(stored, list) else stored

    return _Codec(write, read)


_LEFT_OUT = ("is_weighted", "shared", "sums_over")
"""Fields that are written only if they differ from their default."""


def _fields(kind: Any) -> _Codec:
    """Returns the codec of a named tuple, which becomes an object with its fields."""
    codecs = {name: _codec(annotation) for name, annotation in kind.__annotations__.items()}
    expected = {Learned: 'a Learned, as Learned("gain", 1.0)', NormAt: 'a Norm, as Norm("norm")'}
    defaults = {name: kind._field_defaults[name] for name in _LEFT_OUT if name in codecs}

    def write(value: Any, owner: Owner, what: str) -> Any:
        """Returns the fields by name. `what` names the value in messages."""
        if not isinstance(value, kind):
            raise refusal(what, expected.get(kind, f"a {kind.__name__}"), value)
        if isinstance(value, Part):  # a norm or a parameter gets the name that it has in its module
            value = owner.own(value, what)
            what = f"{what}: {value.name}"
        written = {}
        for name, content in zip(codecs, value):  # a named tuple has its fields' values in the order of their names
            if name not in defaults or content != defaults[name]:
                written[name] = codecs[name].write(content, owner, f"{what}.{name}")
        return written

    return _Codec(write, lambda stored: kind(**{name: codecs[name].read(content) for name, content in stored.items()}))


def _text(value: Any, what: str) -> str:
    """Checks that a value is a text, and returns it. `what`: its name in messages."""
    if not isinstance(value, str):
        raise refusal(what, "a text", value)
    return value


def _whole(value: Any, what: str) -> int:
    """Checks that a value is a whole number, as sizes and counts must be, and returns it. `what`: its name in
    messages."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or abs(int(value)) >= 2**63:
        raise InputError(f"{what} must be a whole number of 64 bits; got {str(value)[:60]!r}")
    return int(value)


_GATES = {"joint": Joint, "permuted": Permuted, "each": Each, "channel": Channel, "sum": float}
_MIXING = {"hyper": HyperConnection, "depth": DepthAttention}
"""The types in the unions `Gates` and `Mixing`, by their names in JSON."""
_CODECS: dict[Any, Callable[[], _Codec]] = {
    bool: lambda: _leaf(lambda value, _: bool(value)),
    int: lambda: _leaf(_whole),
    float: lambda: _leaf(number, float),
    str: lambda: _leaf(_text),
    FirstValues: _first_values,
    Gain: _gain,
    Change: _change,
    Changes: _changes,
    Stream: _stream,
    Gates: lambda: _enum(_GATES, "a Joint, a Permuted, an Each, a Channel or a number"),
    Mixing: lambda: _enum(_MIXING, "a HyperConnection or a DepthAttention"),
}
"""For each type whose fields alone do not determine its codec, a function that makes the codec."""
