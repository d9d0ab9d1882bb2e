"""The options of a model, a training run, its data and a search, as frozen dataclasses.

The lists come from Rust through _tables.json, so each name, default, choice and help text is defined once. Rust checks
options against each other (`heads` divides `d_model`) when it uses them. Nothing here imports torch, so that the
command line answers at once.
"""

import contextlib
import copy
import dataclasses
import inspect
import json
import math
import numbers
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

from . import _tables
from .declarations.file_class import load_class, names_code, refuse_code
from .declarations.synonyms import meant, plain
from .errors import InputError

_TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
_NOUNS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a string"}
_RANGES: dict[str, tuple[float, float | None, str]] = {
    "seed": (0, None, ""),
    "beam": (1, None, ""),
    "n_best": (1, None, ""),
    "max_length": (1, None, ""),
    # A large exponent alpha makes the length penalty infinite, and then every score is 0 or infinite.
    "alpha": (-10, 10, ": all scores would be 0 or infinite"),
}
"""The least and largest values that are checked before the extension module is loaded, and a reason for the error. The
extension module checks all other options."""
_C = TypeVar("_C", bound="Config")


class Field(NamedTuple):
    """One option."""

    name: str
    kind: str
    """The option's type: int, float, bool or str."""
    optional: bool
    """True if None is allowed."""
    default: Any
    choices: tuple[str, ...]
    """The allowed words; empty if any value is allowed."""
    help: str
    group: str
    """The heading of `--help` that lists it."""
    per_layer: bool = False
    """True if layers may have different choices: `choice*layers,…,choice`, from the bottom up."""

    @property
    def annotation(self) -> Any:
        """The option's Python type, for signatures."""
        return _TYPES[self.kind] | None if self.optional else _TYPES[self.kind]

    def check(self, value: Any) -> Any:
        """Returns the value in this option's type (an int becomes a float if needed). Errors: InputError if it has
        another type or is not allowed."""
        if value is None and self.optional:
            return None
        if self.name in OWN and (users_own := _declared(self.name, value)) is not None:
            return users_own
        # bool is a subclass of int, but True is no number here.
        if self.kind == "float" and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if self.kind == "int" and not isinstance(value, (int, str)) and hasattr(value, "__index__"):
            value = operator.index(value)  # converts an integer of numpy
        if self.kind == "float" and isinstance(value, numbers.Real) and not isinstance(value, (int, float)):
            value = float(value)  # converts a number of numpy, or a fraction
        if self.kind == "str" and isinstance(value, os.PathLike):
            value = os.fspath(value)
        if self.kind == "float" and value == "inf":
            value = math.inf  # JSON has no infinity, so files hold the text "inf"
        kind = _TYPES[self.kind]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            none = (" or none" if _speaks_flags else " or None") * self.optional
            raise InputError(f"{self.name} must be {_NOUNS[self.kind]}{none}; got {value!r}")
        # The exponent of lpnorm may be ∞: that norm is the largest |x|.
        if self.kind == "float" and not math.isfinite(value) and self.name != "lpnorm_p":
            raise InputError(f"{self.name} must be a finite number; got {value}")
        if self.kind == "int" and not -(2**63) <= value < 2**63:
            raise InputError(f"{self.name} must be a whole number of 64 bits; got {value}")
        least, most, reason = _RANGES.get(self.name, (None, None, ""))
        if least is not None and value < least and most is None:
            raise InputError(f"{self.name} must be at least {least}; got {value}")
        if most is not None and not least <= value <= most:
            raise InputError(f"{self.name} must lie between {least} and {most}; got {value}{reason}")
        if self.kind == "str":
            value = readable(self.name, value)
        # In a mixture by layers, `choice*layers,…,choice`, only the choices are checked here.
        words = [part.partition("*")[0] for part in value.split(",")] if self.per_layer else [value]
        for word in words if self.choices else ():
            if word not in self.choices:
                none = "; leave it out, or give None, for none" if self.optional and word.lower() == "none" else ""
                raise InputError(unknown(self.name, word, self.choices) + none)
        return value


OWN = {"residual": "schemes", "norm": "norms", "encoder_norm": "norms", "decoder_norm": "norms"}
"""Options that accept an object of the user's own, and the module in which such objects are declared."""


def _declared(option: str, value: Any) -> Any:
    """Returns a user's own scheme or norm, given as an object, a class, its entry in a config.json, or
    file.py:Class; None if the value is none of these. `option`: the option's name, "residual" for a scheme."""
    if isinstance(value, str) and not names_code(value):
        return None
    from . import schemes  # imported only here, because few models have an object of the user's own
    from .declarations import norm

    kind: Any = schemes.Scheme if option == "residual" else norm.Norm
    if isinstance(value, str):
        value = load_class(option, value, kind)
    if isinstance(value, Mapping):
        return schemes.DeclaredScheme(value) if option == "residual" else norm.declared(value)
    if isinstance(value, type) and issubclass(value, kind):
        return value()
    return value if isinstance(value, kind) else None


def readable(name: str, text: str) -> str:
    """Returns the text, decoded from UTF-8 if the locale's encoding has not done so.

    Errors: InputError if UTF-8 cannot represent it: bytes of another encoding, as in a file's name, and lone
    surrogates.
    """
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        pass
    try:
        # Python keeps a byte that the locale cannot decode as a surrogate.
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name}: {text!r} holds a lone surrogate, which no text in UTF-8 has: leave it out"
        ) from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}: {data!r} is not UTF-8; expected a name in UTF-8: rename the file or folder, or give a link to it"
        ) from error


def closest(got: str, choices: Iterable[str]) -> str:
    """Returns a text such as ` (did you mean "scalenorm"?)`, with the choices for which `got` is a synonym in the
    literature, or else the choice with the closest spelling; "" if no choice is close. Case is ignored, and - equals
    _."""
    choices = list(choices)
    same_letters = [choice for choice in choices if plain(choice) == plain(got)]
    if names := same_letters or meant(got, choices):
        quoted = " or ".join(f'"{name}"' for name in names)
        return f" (did you mean {quoted}?)"
    nearest = min(choices, key=lambda choice: _distance(plain(choice), plain(got)), default="")
    # A close name has at most one wrong letter, and one more for every four letters. Rust has the same limit.
    is_close = _distance(plain(nearest), plain(got)) <= 1 + len(got) // 4
    return f' (did you mean "{nearest}"?)' if nearest and is_close else ""


def _distance(a: str, b: str) -> int:
    """Returns the Levenshtein distance: the number of letters to insert, remove or replace."""
    row = list(range(len(b) + 1))  # the distances of a's first i letters to each beginning of b; i = 0 here
    for i, letter in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        # Before step j, row[:j] holds distances for i, row[j:] those for i − 1, and `diagonal` the old row[j − 1].
        for j, other in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (letter != other))
    return row[-1]


def unknown(what: str, got: Any, choices: Iterable[str]) -> str:
    """Returns an error such as `unknown norm "scalnorm" (did you mean "scalenorm"?); expected one of layernorm, …`, for
    the name `got`; `what` is the kind of name. If the name belongs to another table, the text names its option:
    `("mix-ln" is a residual scheme: residual="mix-ln")`, on the command line as a flag."""
    got, choices = str(got), list(choices)
    near = _of_another_table(got) or closest(got, choices)
    return f'unknown {what} "{got}"{near}; expected one of {", ".join(choices)}'


_speaks_flags = False
"""True while the command line runs: messages then name flags, otherwise keywords of Python."""


@contextlib.contextmanager
def speaking_flags() -> Iterator[None]:
    """Makes messages inside the block name options as flags."""
    global _speaks_flags
    before, _speaks_flags = _speaks_flags, True
    try:
        yield
    finally:
        _speaks_flags = before


_OPTIONS_OF_TABLES = {
    "norms": ("norm", "a norm"),
    "residuals": ("residual", "a residual scheme"),
    "inits": ("init", "an initialisation"),
    "parametrisations": ("parametrisation", "a parametrisation"),
}
"""For each table, the option that accepts its names, and the noun for one of them in messages."""


def _of_another_table(got: str) -> str:
    """Returns a note that the name belongs to the table of another option; "" if it belongs to no table."""
    for table, (option, kind) in _OPTIONS_OF_TABLES.items():
        if any(entry["name"] == got for entry in ENTRIES[table]):
            return f' ("{got}" is {kind}: ' + (f"--{option} {got})" if _speaks_flags else f'{option}="{got}")')
    return ""


class _Signature:
    """A descriptor that computes the constructor's signature on access, for notebooks and help()."""

    def __get__(self, instance: Any, owner: Any) -> inspect.Signature:
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Signature(
            [inspect.Parameter(f.name, kind, default=f.default, annotation=f.annotation) for f in owner.FIELDS]
        )


class Config:
    """Options, given by keyword. Unknown names and wrong values raise InputError, which lists the valid ones."""

    FIELDS: ClassVar[tuple[Field, ...]] = ()
    __signature__: ClassVar[Any] = _Signature()

    def __init__(self, **options: Any) -> None:
        names = [field.name for field in self.FIELDS]
        for name in options:
            if name not in names:
                raise InputError(unknown(f"option of {type(self).__name__}", name, names))
        for field in self.FIELDS:
            # The dataclass is frozen, so even its constructor cannot assign attributes in the usual way.
            object.__setattr__(self, field.name, field.check(options.get(field.name, field.default)))

    # These methods are written here, because the dataclass decorator would compile them for each class, which would
    # add 3 ms to every import.

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in self.asdict().items())})"

    def __eq__(self, other: object) -> bool:
        return self.asdict() == other.asdict() if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.asdict().values()))

    def asdict(self) -> dict[str, Any]:
        """Returns the options by name, in order."""
        return {field.name: getattr(self, field.name) for field in self.FIELDS}

    def replace(self: _C, **options: Any) -> _C:
        """Returns a copy with some options changed."""
        return type(self)(**{**self.asdict(), **options})

    def to_json(self, kinds: tuple[str, ...] | None = None) -> str:
        """Returns the options as a JSON object. `kinds`: the kinds of a layer's sublayers, if they differ from its
        stack's."""
        return json.dumps({name: self._plain(name, value, kinds) for name, value in self.asdict().items()})

    def _plain(self, name: str, value: Any, kinds: tuple[str, ...] | None) -> Any:
        """Returns the value of option `name` as it is written in JSON. `kinds`: as in `to_json`."""
        if hasattr(value, "declare"):  # a user's own object
            # A norm's declaration does not depend on the sublayers.
            return value.declare(self, kinds) if name == "residual" else value.declare(self)
        return "inf" if value == math.inf else value

    @classmethod
    def from_dict(cls: type[_C], options: Mapping[str, Any], *, trust: bool = False) -> _C:
        """Builds a configuration from a dictionary, the inverse of `asdict`; missing names get their defaults. With
        `trust` a value file.py:Class runs that file's code; without, it is an InputError."""
        if not isinstance(options, Mapping):
            raise InputError(f"{cls.__name__} takes options by name; got {options!r}")
        refuse_code({name: value for name, value in options.items() if name in OWN}, cls.__name__, trust)
        return cls(**options)

    @classmethod
    def from_json(cls: type[_C], text: str, *, trust: bool = False) -> _C:
        """Builds a configuration from JSON, the inverse of `to_json`. `trust`: as in `from_dict`."""
        try:
            options = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{cls.__name__}: not valid JSON ({error})") from error
        return cls.from_dict(options, trust=trust)


def _document(summary: str, fields: Iterable[Field]) -> str:
    """Returns the docstring of a configuration class."""
    lines = [summary, ""]
    for field in fields:
        kind = field.kind + " or None" * field.optional
        choices = f" One of {', '.join(field.choices)}." if field.choices else ""
        lines.append(f"{field.name}: {kind} = {field.default!r}\n    {field.help}{choices}")
    return "\n".join(lines)


_TABLES = _tables.read()
__version__: str = _TABLES["version"]
ENTRIES: dict[str, list[dict[str, Any]]] = _TABLES["tables"]
"""The tables themselves, which the package's modules share; `tables` returns a copy for users."""


def _generate(name: str, which: str, summary: str) -> Any:
    """Returns a configuration class, called `name`, with the options that Rust lists under `which`. `summary`: the
    first line of its docstring."""
    entries = _TABLES["options"][which]
    fields = tuple(Field(**{**entry, "choices": tuple(entry["choices"])}) for entry in entries)
    columns = [(field.name, field.annotation, dataclasses.field(default=field.default)) for field in fields]
    namespace = {"FIELDS": fields, "__doc__": _document(summary, fields), "__module__": __name__}
    inherited = {"init": False, "repr": False, "eq": False}  # methods that `Config` has for all classes
    config = dataclasses.make_dataclass(name, columns, bases=(Config,), namespace=namespace, frozen=True, **inherited)
    config.__module__ = __name__  # for pickle: Python 3.12 and later put make_dataclass's caller here
    return config


TransformerConfig = _generate("TransformerConfig", "model", "A Transformer.")
_LATER = {
    "TrainingConfig": ("training", "A training run."),
    "DataConfig": ("data", "The text of a training run, and how it is cut into pieces."),
    "SearchConfig": ("search", "How translations are searched."),
    "GenerationConfig": ("generation", "How a language model continues a text."),
}
"""Classes that are made on first access, because `nn` does not need them."""


def __getattr__(name: str) -> Any:
    """Makes a class of `_LATER` when it is first accessed."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = _generate(name, *_LATER[name])
    return globals()[name]


LANGUAGE_MODELS = ("attention", "tensorized_rank", "tensorized_segment")
LANGUAGE_MODELS += ("activation", "max_positions", "scale_embeddings")
LANGUAGE_MODELS += ("value_embeddings", "smear", "logit_scale", "logit_softcap")
"""Options of a model that only the training loop's models have: neither layers of `nn` nor fairseq's models have
them."""
ATTENTION = ("output_gate", "sinks", "score_softcap", "kv_heads", "rope_theta", "qk_norm_after_rotation")
ATTENTION += ("linear_biases",)
"""Options within a layer that layers of `nn` have, too, but fairseq's models and swapped blocks do not."""
PARAMETRISATION = tuple(field.name for field in TransformerConfig.FIELDS if field.group == "parametrisation")
"""Options that set how multipliers follow width and depth."""


def split(options: Mapping[str, Any], *kinds: type[Config]) -> list[dict[str, Any]]:
    """Returns, for each class, its options from a flat mapping. Errors: InputError for a name that no class has."""
    parts = [{k: v for k, v in options.items() if k in {f.name for f in kind.FIELDS}} for kind in kinds]
    known = [field.name for kind in kinds for field in kind.FIELDS]
    for name in options:
        if name not in known:
            raise InputError(unknown("option", name, known))
    return parts


def tables() -> dict[str, list[dict[str, Any]]]:
    """Returns the tables of norms, residual schemes and initialisations that a model may name: each a list of {name,
    equation, source}.

    A norm's entry also describes its module: its class in `normformer_rs.nn`, parameters, options and operator.
    `others` has further parts of models.
    """
    from . import _html  # imported only here, because its imports take 2 ms

    return _html.Tables({name: _html.Table(rows) for name, rows in copy.deepcopy(ENTRIES).items()})
