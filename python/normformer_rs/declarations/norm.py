"""Declarations of norms that users write in Python, the register of their classes, and the operator that runs them."""

import contextlib
import gc
import itertools
import json
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, ClassVar, NamedTuple

from .. import _loading
from ..errors import InputError
from .file_class import FromFile
from .first_values import Normal, number


class Parameter(NamedTuple):
    """A parameter p of a norm. `normalize` gets factor·(offset + p).

    `start` is the initial value of every element of p: a number, a function of the norm's width, or `schemes.Normal`.
    `shape` is "one" for a single number, "width" for one number per column, or the two sides of a matrix, each a
    number, "width" or the name of an option."""

    start: float | Callable[[int], float] | Normal = 1.0
    shape: str | Sequence[int | str] = "width"
    offset: float = 0.0
    factor: float = 1.0


class Norm(FromFile):
    """A norm's declaration, without its module: the base of `norms.Norm`, from which users derive their classes."""

    name: ClassVar[str]
    """The norm's name: letters, digits, - and _; none of the package's."""
    equation: ClassVar[str] = ""
    source: ClassVar[str] = ""
    parameters: ClassVar[Mapping[str, Parameter]] = {}
    """The parameters by name, in the order in which `normalize` takes them: at most eight."""
    options: ClassVar[Mapping[str, float]] = {}
    """Numbers by name, with their default values."""

    def __init_subclass__(cls, **rest: Any) -> None:
        """Registers a class that has a name; one without is a base of others."""
        super().__init_subclass__(**rest)
        if isinstance(getattr(cls, "name", None), str):
            _register(cls)

    def __init__(self, **options: float) -> None:
        """Makes the norm with these options; the others have their defaults. Errors: InputError for an unknown option,
        a value that is no number, and a wrong declaration."""
        if not isinstance(getattr(self, "name", None), str):
            raise InputError(f'{type(self).__name__} has no name: write name = "…" in the class')
        _register(type(self))
        self._check()
        for name in options:
            if name not in self.options:
                raise InputError(f"{type(self).__name__} has no option {name!r}; it has {', '.join(self.options)}")
        self.given = {name: number(options.get(name, value), name) for name, value in self.options.items()}

    def _check(self) -> None:
        """Raises InputError if the class declares something of a wrong type."""
        kind = type(self).__name__
        for key in ("equation", "source"):
            if not isinstance(getattr(self, key), str):
                raise InputError(f"{kind}.{key} must be a text; got {getattr(self, key)!r}")
        for key, expected in (("options", "numbers"), ("parameters", "Parameter objects")):
            declared: Any = getattr(self, key)
            if not isinstance(declared, Mapping) or not all(isinstance(name, str) for name in declared):
                raise InputError(f"{kind}.{key} must be a dictionary from names to {expected}; got {declared!r}")
        for name, p in self.parameters.items():
            if not isinstance(p, Parameter):
                raise InputError(f"{kind}.parameters[{name!r}] must be a Parameter; got {p!r}")
            for key in ("offset", "factor"):
                number(getattr(p, key), f"{kind}: the {key} of {name}")

    def normalize(self, x: Any, *parameters: Any, **options: float) -> Any:
        """Returns y for x (…, width), f32 or f64, computed row by row with torch's operations, which autograd
        follows. Parameters have their declared shapes; options come by keyword."""
        raise NotImplementedError(f"{type(self).__name__} must say what it computes: def normalize(self, x, …)")

    def start(self, name: str, width: int) -> float:
        """Returns a parameter's initial value in a norm of this width; 0 if it is random."""
        value = self.parameters[name].start
        if isinstance(value, Normal):
            return 0.0
        return number(value(width) if callable(value) else value, f"{self!r}: the start of {name}")

    def std(self, name: str) -> float:
        """Returns the std of the normal distribution of a parameter's initial values; 0 if they are not random."""
        value = self.parameters[name].start
        return number(value.std, f"{self!r}: the std of {name}") if isinstance(value, Normal) else 0.0

    def shape(self, name: str) -> str | list[int | str]:
        """Returns a parameter's shape: "one", "width", or the two sides of a matrix, each a number or "width". Errors:
        InputError for other words."""
        shape: Any = self.parameters[name].shape
        if isinstance(shape, str) and shape in ("one", "width"):
            return shape
        stated: list[Any] = [*shape] if isinstance(shape, (list, tuple)) else [shape]
        # An option's name stands for its value; "width" stays, because one declaration serves all widths.
        sides: list[Any] = [self.given.get(side, side) if isinstance(side, str) else side for side in stated]
        fits = [
            side == "width" or (isinstance(side, (int, float)) and 1 <= side < 2**31 and side == int(side))
            for side in sides
        ]
        if len(sides) != 2 or not all(fits):
            raise InputError(
                f'{self!r}: {name} has the shape {shape!r}; valid: "one", "width", or two sides of a matrix, each a '
                f'number, "width" or an option ({_listed(self.options)})'
            )
        return [side if side == "width" else int(side) for side in sides]

    def declare(self, config: Any) -> dict[str, Any]:
        """Returns everything that the norm declares in a model of this configuration, as config.json holds it.

        Errors: InputError if the model also has another class of this name, because parameters and files only know
        names.
        """
        for other in own_norms({key: getattr(config, key, None) for key in _OPTIONS}):
            if other.name == self.name and type(other) is not type(self):
                raise InputError(
                    f"two classes of one model, {_place(type(self))} and {_place(type(other))}, are called "
                    f"{self.name!r}: give one of them another name"
                )
        d_head = config.d_model // max(config.heads, 1)
        # A norm may have rows of these widths: the residual stream's, the feed-forward's, one head's, and that of all
        # heads of keys. `max` only avoids a division by zero, because Rust refuses 0 heads later.
        widths = sorted({config.d_model, config.d_ff, d_head, (config.kv_heads or config.heads) * d_head})
        parameters = [
            {
                "name": name,
                "shape": self.shape(name),
                "start": {str(width): self.start(name, width) for width in widths},
                **({"std": self.std(name)} if self.std(name) else {}),
                "offset": float(p.offset),
                "factor": float(p.factor),
            }
            for name, p in self.parameters.items()
        ]
        about = {key: getattr(self, key) for key in ("name", "equation", "source")}
        return {**about, "parameters": parameters, "options": self.given}

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.given == other.given  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), *self.given.items()))


_OPTIONS = ("norm", "encoder_norm", "decoder_norm")
"""A model's options that accept a norm."""
_CLASSES: dict[str, list[weakref.ref[type[Norm]]]] = {}
"""The classes by name, the newest first: a notebook's cell may run again, and two projects may choose the same name.
The references are weak, so unused classes disappear."""
_SERIALS: weakref.WeakValueDictionary[int, type[Norm]] = weakref.WeakValueDictionary()
"""The classes by their serial number in this process."""
_NEXT = itertools.count(1)
"""The serial numbers that no class has yet."""
_SERIAL = "\x1f"
"""The separator between a declaration's source and its class's serial number. It is never written to a file."""
_USED: list[tuple[int, tuple[type[Norm], ...]]] = []
"""The classes given to `using`, the latest last, each with its thread."""
_FOUND: weakref.WeakValueDictionary[str, Norm] = weakref.WeakValueDictionary()
"""The norms that `_norm_of` has found, by declaration. Their classes keep them alive."""


def _register(cls: type[Norm]) -> None:
    """Adds a class to the register, once, with a serial number of its own."""
    if "_serial" not in vars(cls):
        _define()
        # `_found` holds the norms that `_norm_of` has found of this class.
        cls._serial, cls._found = next(_NEXT), {}  # type: ignore[attr-defined]
        _SERIALS[cls._serial] = cls  # type: ignore[attr-defined]
        _CLASSES.setdefault(cls.name, []).insert(0, weakref.ref(cls))
        _FOUND.clear()  # a declaration may now mean the new class


def own_norms(options: Mapping[str, Any]) -> list[Norm]:
    """Returns the user's own norms among a model's options."""
    return [norm for key in _OPTIONS if isinstance(norm := options.get(key), Norm)]


def options_here(config: Any) -> str:
    """Returns `config.to_json()` for a model of this process: each of the user's own norms refers to its class by
    serial number, so that a later class of the same name changes nothing. The text is never written to a file."""
    text = config.to_json()
    own = {key: norm for key in _OPTIONS if isinstance(norm := getattr(config, key), Norm)}
    if not own:
        return text
    options = json.loads(text)
    for key, norm in own.items():
        options[key]["source"] += f"{_SERIAL}{type(norm)._serial}"  # type: ignore[attr-defined]
    return json.dumps(options)


@contextlib.contextmanager
def using(*norms: Norm | type[Norm]) -> Iterator[None]:
    """Makes a declaration in config.json stand for one of these classes inside the block, if several classes have its
    name and declare the same.

    >>> class Halved(Norm):
    ...     name, parameters = "halved", {"weight": Parameter()}
    ...     def normalize(self, x, weight):
    ...         return weight * x / 2
    >>> with using(Halved):
    ...     print(declared({"name": "halved", "parameters": [{"name": "weight", "shape": "width"}]}))
    halved

    Errors: InputError if another thread uses another class of the same name.
    """
    classes = tuple(norm if isinstance(norm, type) else type(norm) for norm in norms)
    here = threading.get_ident()
    for thread, others in _USED:
        for cls, other in itertools.product(classes, others):
            if thread != here and cls.name == other.name and not _alike(cls, other):
                raise InputError(f"norm {cls.name!r}: another thread uses another class of that name: run one by one")
    used = (here, classes)
    _USED.append(used)
    _FOUND.clear()
    try:
        yield
    finally:
        _USED.remove(used)
        _FOUND.clear()


def declared(data: Mapping[str, Any]) -> Norm:
    """Returns the norm of a config.json, from the class of its name that declares the same parameters and options.

    Errors: InputError if no such class has been imported, or if several have been that may compute different things,
    and for data that are no declaration.
    """
    _check_data(data)
    name, options = data["name"], data.get("options", {})
    for _, classes in reversed(_USED):  # the classes of the innermost `using` block come first
        for cls in classes:
            if fitting_norm := _fitting(cls, data):
                return fitting_norm
    if not _known(name):
        raise InputError(
            f"norm {name!r} is a function in Python, which a run does not hold: import the module that declares it, or "
            'name it with norm = "file.py:Class"'
        )
    fitting = _fitting_of(name, data)
    if len(fitting) > 1:
        # When a notebook's cell runs again, its old class stays until the garbage collector runs. The list is cleared
        # first, because its norms would keep old classes alive.
        fitting.clear()
        gc.collect()
        fitting = _fitting_of(name, data)
    if len(fitting) > 1:
        raise InputError(
            f"norm {name!r} of this run may be one of {len(fitting)} classes, "
            f"{', '.join(_place(type(norm)) for norm in fitting)}: say which one it is, within "
            f'"with normformer_rs.norms.using({type(fitting[0]).__name__}):"'
        )
    if not fitting:
        learned = _listed(p["name"] for p in data.get("parameters", ()))
        raise InputError(
            f"norm {name!r} of this run learns {learned} and has the options {_listed(options)}; "
            f"the class {_known(name)[0].__name__} of that name declares other parameters (names, shapes, offsets, "
            "factors) or options: import the class that the run was made with"
        )
    return fitting[0]


def _check_data(data: Any) -> None:
    """Raises InputError for data that are no norm's declaration."""

    def is_parameter(p: Any) -> bool:
        return (
            isinstance(p, Mapping)
            and isinstance(p.get("name"), str)
            and isinstance(p.get("shape"), (str, list))
            and all(_is_number(p.get(key, 0.0)) for key in ("offset", "factor", "std"))
        )

    parameters, options = data.get("parameters", []), data.get("options", {})
    fits = isinstance(data.get("name"), str) and isinstance(parameters, list) and all(map(is_parameter, parameters))
    if not fits or not isinstance(options, Mapping) or not all(map(_is_number, options.values())):
        shown = repr(data) if len(repr(data)) <= 120 else f"{repr(data)[:120]}…"
        raise InputError(
            f"a norm's declaration has a name, parameters (each with name, shape, offset, factor) and options, which "
            f"are numbers; got {shown}"
        )


def _is_number(value: Any) -> bool:
    """True for a number of JSON. True and False are none, although Python counts them as integers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _known(name: str) -> list[type[Norm]]:
    """Returns the classes of a name, the newest first."""
    return [cls for ref in _CLASSES.get(name, ()) if (cls := ref()) is not None]


def _fitting_of(name: str, data: Mapping[str, Any]) -> list[Norm]:
    """Returns a norm of each class with this name that declares these data. Of classes that compute the same, only the
    newest counts."""
    fitting: list[Norm] = []
    for cls in _known(name):
        norm = _fitting(cls, data)
        if norm is not None and not any(_alike(type(other), cls) for other in fitting):
            fitting.append(norm)
    return fitting


def _fitting(cls: type[Norm], data: Mapping[str, Any]) -> Norm | None:
    """Returns the norm of this class that declares these data; None if the class declares others."""
    if cls.name != data["name"] or cls.options.keys() != data.get("options", {}).keys():
        return None
    try:
        norm = cls(**data.get("options", {}))
        own_parameters = [(key, norm.shape(key), p.offset, p.factor) for key, p in cls.parameters.items()]
    except InputError:  # the class refuses the options
        return None
    parameters = data.get("parameters", ())
    wanted_parameters = [(p["name"], p["shape"], p.get("offset", 0.0), p.get("factor", 1.0)) for p in parameters]
    return norm if own_parameters == wanted_parameters else None


def _alike(one: type[Norm], other: type[Norm]) -> bool:
    """True if two classes compute the same: one inherits all from the other, or a notebook's cell ran again
    unchanged."""

    def own(cls: type[Norm]) -> dict[str, Any]:
        """Returns the attributes that a class adds to `Norm`, except for its declarations."""
        declared = {"name", "equation", "source", "parameters", "options", "_serial", "_found"}
        # The attributes come from the class and from those of its bases that derive from `Norm`.
        names = {name for kind in cls.__mro__[: cls.__mro__.index(Norm)] for name in vars(kind)} - declared
        return {name: getattr(cls, name) for name in names if name == "__init__" or not name.startswith("__")}

    def same(a: Any, b: Any) -> bool:
        """True if two attributes are equal. Functions are equal if their code is, and if they read the same globals."""
        if isinstance(a, FunctionType) and isinstance(b, FunctionType):
            same_code = (a.__code__, a.__defaults__, a.__kwdefaults__) == (b.__code__, b.__defaults__, b.__kwdefaults__)
            # A closure's values may differ, so functions with one are equal only if they are one object.
            return a is b or (same_code and a.__globals__ is b.__globals__ and a.__closure__ is b.__closure__ is None)
        plain = (int, float, str, bool, tuple, type(None))
        return a is b or (type(a) is type(b) and isinstance(a, plain) and a == b)

    mine, theirs = own(one), own(other)
    return one is other or (mine.keys() == theirs.keys() and all(same(mine[name], theirs[name]) for name in mine))


def _place(cls: type[Norm]) -> str:
    """Returns a class's name with its module, for messages."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _listed(names: Iterable[str]) -> str:
    """Returns the names with commas between them; "nothing" if there are none."""
    return ", ".join(names) or "nothing"


def _norm_of(declaration: str) -> Norm:
    """Returns the norm that a model's declaration describes: from the class that the model was made with, if that still
    exists; otherwise as `declared` finds it for a file. `declaration`: the norm's JSON, as `options_here` writes it."""
    norm = _FOUND.get(declaration)
    if norm is None:
        data = json.loads(declaration)
        data["source"], _, serial = data["source"].partition(_SERIAL)
        made_with = _SERIALS.get(int(serial)) if serial.isdecimal() else None
        norm = (made_with and _fitting(made_with, data)) or declared(data)
        type(norm)._found[declaration] = _FOUND[declaration] = norm  # type: ignore[attr-defined]
    return norm


_defined: list[Any] = []
"""The library of `_define`, once it is defined. It must live as long as the process."""


def _define() -> None:
    """Defines, once, the operator by which the training loop calls the users' own norms."""
    if _defined:
        return
    _loading.load()  # the extension module must be loaded before its namespace is extended
    import torch

    library = torch.library.Library("normformer_rs", "FRAGMENT")
    parameters = ", ".join(f"Tensor? p{i}" for i in range(8))  # a norm may declare at most eight
    library.define(f"own_norm(Tensor x, {parameters}, str declaration) -> Tensor")
    library.impl("own_norm", _run, "CompositeImplicitAutograd")
    _defined.append(library)  # torch removes the operator once its library is deleted


def _run(x: Any, *given: Any) -> Any:
    """Computes the operator. `given`: the parameters, padded with None, and the norm's declaration."""
    *parameters, declaration = given
    return in_wide(_norm_of(declaration), x, [p for p in parameters if p is not None])


def in_wide(norm: Norm, x: Any, parameters: Any) -> Any:
    """Returns y = N(x) in x's dtype, computed in f32 at least. `parameters`: the values that `normalize` gets, in
    order. Errors: InputError if y has another shape than x."""
    import torch

    wide = torch.promote_types(x.dtype, torch.float32)
    y = norm.normalize(x.to(wide), *(p.to(wide) for p in parameters), **norm.given)
    if y.shape != x.shape:
        raise InputError(f"{norm!r} must give y of x's shape {tuple(x.shape)}; got {tuple(y.shape)}")
    return y.to(x.dtype)
