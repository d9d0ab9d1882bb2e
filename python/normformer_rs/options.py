"""Options from the command line and from TOML files: both have the configs' names, and nothing else is known."""

import argparse
import contextlib
import json
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ._core import InputError
from .config import Config, Field, unknown
from .presets import find_preset

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RUN_CONFIG = "config.json"
"""Where a run's folder keeps its options."""
SECTIONS = ("model", "training", "data")
"""Tables in which a file may group its options."""
EXCLUSIVE = {"bpe_operations", "bpe_codes", "no_bpe", "data_bin"}
"""Ways to cut words (data_bin's are cut); naming one replaces another that a file or an earlier run named."""


class _Formatter(argparse.HelpFormatter):
    """Leaves words such as val-decay whole."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """Errors in one line, with the closest option where one is unknown."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, **settings)

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
    for field in kind.FIELDS:
        if field.name not in skip:
            _add_flag(group, field)


def _add_flag(group: Any, field: Field) -> None:
    settings: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": _help(field)}
    if field.kind != "bool":
        settings |= {"metavar": _metavar(field)}
    elif field.name.startswith("no_"):
        settings |= {"action": "store_true"}
    else:
        settings |= {"action": argparse.BooleanOptionalAction}
    group.add_argument(flag(field.name), **settings)


def _help(field: Field) -> str:
    choices = f" One of {', '.join(field.choices)}." if field.choices else ""
    default = "none" if field.default is None else field.default
    if field.kind == "bool":
        default = "yes" if default else "no"
    shown = "" if field.default == "" else f" Default: {default}."
    return f"{field.help}{choices}{shown}".replace("%", "%%")


def _metavar(field: Field) -> str:
    if field.choices:
        return "NAME"
    return {"int": "N", "float": "X"}.get(field.kind, "TEXT")


def given(args: argparse.Namespace, *kinds: type[Config]) -> dict[str, Any]:
    """The options of the configs that the command line names, as values."""
    options = {}
    for field in (field for kind in kinds for field in kind.FIELDS):
        if hasattr(args, field.name):
            value = getattr(args, field.name)
            options[field.name] = parse(field, value) if isinstance(value, str) else value
    ways = [flag(name) for name in options if name in EXCLUSIVE and options[name]]
    if len(ways) > 1:
        raise InputError(f"{' and '.join(ways)} exclude each other; give one of them")
    return options


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
    return _flat(content, path, list(known))


def read_run(output: str | Path, known: Iterable[str]) -> dict[str, Any]:
    """The options that a run was started with; none where `output` holds no run. Errors: InputError if damaged."""
    path = Path(output) / RUN_CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error}); the run cannot be resumed") from error
    return _flat(content, path, list(known))


def _flat(content: dict[str, Any], path: str | Path, known: list[str]) -> dict[str, Any]:
    """The options by name, out of tables too."""
    options: dict[str, Any] = {}
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
