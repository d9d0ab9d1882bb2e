"""Options from the command line and from TOML files: both have the configs' names, and nothing else is known."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ._core import InputError
from .config import Config, Field, find_preset, unknown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SECTIONS = ("model", "training", "data")
"""Tables in which a file may group its options."""
EXCLUSIVE = {"bpe_operations", "bpe_codes", "no_bpe"}
"""Three ways to cut words; naming one replaces another that a file or an earlier run named."""


class Parser(argparse.ArgumentParser):
    """Errors in one line, with the closest option where one is unknown."""

    def error(self, message: str) -> Any:
        raise InputError(message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, extra = self.parse_known_args(args, namespace)
        if extra:
            parser = getattr(parsed, "parser", self)
            flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
            if not extra[0].startswith("-"):
                raise InputError(f'unexpected argument "{extra[0]}"; options begin with --, see {parser.prog} --help')
            raise InputError(unknown("option", extra[0].partition("=")[0], flags))
        return parsed


def flag(name: str) -> str:
    """d_model → --d-model"""
    return "--" + name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser, title: str, kind: type[Config], skip: Iterable[str] = ()) -> None:
    """A flag for each option of a config. Those not given leave no trace, so that files and presets can speak."""
    group = parser.add_argument_group(title)
    exclusive = group.add_mutually_exclusive_group()
    for field in kind.FIELDS:
        if field.name not in skip:
            _add_flag(exclusive if field.name in EXCLUSIVE else group, field)


def _add_flag(group: Any, field: Field) -> None:
    settings: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": _help(field)}
    if field.kind != "bool":
        settings |= {"type": _reader(field), "metavar": _metavar(field)}
    elif field.name.startswith("no_"):
        settings |= {"action": "store_true"}
    else:
        settings |= {"action": argparse.BooleanOptionalAction}
    group.add_argument(flag(field.name), **settings)


def _help(field: Field) -> str:
    choices = f" One of {', '.join(field.choices)}." if field.choices else ""
    default = "none" if field.default is None else field.default
    default = {True: "yes", False: "no"}.get(default, default) if field.kind == "bool" else default
    shown = "" if field.default == "" else f" Default: {default}."
    return f"{field.help}{choices}{shown}".replace("%", "%%")


def _metavar(field: Field) -> str:
    if field.choices:
        return "NAME"
    return {"int": "N", "float": "X"}.get(field.kind, "TEXT")


def _reader(field: Field) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return parse(field, text)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def parse(field: Field, text: str) -> Any:
    """A value out of a command line's text; "none" stands for None where that is a value."""
    if field.optional and text.lower() == "none":
        return None
    value: Any = text
    with contextlib.suppress(ValueError):  # what stays a string is refused by name
        value = {"int": int, "float": float}.get(field.kind, str)(text)
    return field.check(value)


def read_toml(path: str | Path, known: Iterable[str]) -> dict[str, Any]:
    """The options of a file, flat or in the tables [model], [training] and [data], with - or _ in their names.

    Errors: InputError for a missing file, wrong syntax, an unknown name, one given twice.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; expected a TOML file of options") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not valid UTF-8; expected a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not valid TOML: {error}") from error
    known, options = list(known), {}
    for section, table in [("", content), *((name, content[name]) for name in SECTIONS if name in content)]:
        if not isinstance(table, dict):
            raise InputError(f"{path}: {section} must be a table, [{section}]; got {table!r}")
        for key, value in table.items():
            name = key.replace("-", "_")
            if not section and name in SECTIONS:
                continue
            if name not in known:
                raise InputError(f"{path}: {unknown('option', key, known)}")
            if name in options:
                raise InputError(f"{path}: {name} is given twice")
            options[name] = value
    return options


def layered(preset: str | None, *layers: Mapping[str, Any]) -> dict[str, Any]:
    """The preset's options under the layers', each over those before it."""
    merged: dict[str, Any] = find_preset(preset) if preset is not None else {}
    for layer in layers:
        if any(layer.get(name) for name in EXCLUSIVE):
            merged = {name: value for name, value in merged.items() if name not in EXCLUSIVE}
        merged.update(layer)
    return merged
