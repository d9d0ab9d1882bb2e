"""Reads options from the command line and from TOML files. Both use the names of the configs' fields; any other name
is an error."""

import argparse
import contextlib
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..config import OWN, Config, DataConfig, Field, TrainingConfig, TransformerConfig, closest, unknown
from ..declarations.file_class import refuse_code
from ..errors import InputError
from ..loop.presets import find_preset
from ..text import STANDARD, check_writable, read_json, read_small
from . import fairseq_words

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RUN_CONFIG = "config.json"
"""The file in a run's folder that holds its options."""
SECTIONS = ("model", "training", "data")
"""The tables in which a file may group its options."""
EXCLUSIVE = {"bpe_operations", "bpe_codes", "no_bpe", "data_bin"}
"""Options that choose the tokenisation, of which only one may be set (the text of data_bin is tokenised already). One
on the command line replaces one from a file or from an earlier run."""
HELP = {"-h", "--help"}
_FIELDS = {field.name: field for kind in (TransformerConfig, TrainingConfig, DataConfig) for field in kind.FIELDS}
LISTED = "`normformer-rs train --help` lists the options"


class UsageError(InputError):
    """An error for a command line that cannot be parsed. `where` is a second line: the usage, or where to find it."""

    def __init__(self, message: str, where: str) -> None:
        super().__init__(message)
        self.where = where


class _Formatter(argparse.HelpFormatter):
    """Keeps words such as val-decay whole, and shows a switch and its opposite as --[no-]fixnorm."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Returns an option as help shows it. argparse would show both forms of a switch, --NAME and --no-NAME."""
        if isinstance(action, argparse.BooleanOptionalAction):
            return "--[no-]" + action.option_strings[0].removeprefix("--")
        return super()._format_action_invocation(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wraps each line as a paragraph; the lines of a list are indented after their first line."""
        wrapped_lines = []
        for line in text.splitlines():
            # A line that begins with "NAME: " is an entry of a list; its first and its other lines have these indents.
            first, others = ("  ", "      ") if re.match(r"[\w-]+: ", line) else ("", "")
            wrapped = textwrap.wrap(line, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)
            wrapped_lines += wrapped or [""]  # an empty line stays
        return "\n".join(indent + line for line in wrapped_lines)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Wraps an option's help text, without breaks at hyphens."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError, and reports an unknown option before any other error, with the closest option.

    `add` is a function that adds the parser's options. It is called when they are first needed, so that no command
    waits for the options of another one.
    """

    def __init__(self, add: Callable[[argparse.ArgumentParser], None] | None = None, **settings: Any) -> None:
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, **settings)
        self._add = add

    def add_options(self) -> None:
        """Adds the options that are still missing."""
        if (add := self._add) is not None:
            self._add = None
            add(self)

    @property
    def _takes_command(self) -> bool:
        """True if a command with its own options follows this parser's options."""
        return any(action.nargs in (argparse.PARSER, argparse.REMAINDER) for action in self._actions)

    def error(self, message: str) -> Any:
        # argparse itself would print the message and end the process.
        raise UsageError(message, f"{self.prog} --help lists the {'commands' if self._takes_command else 'options'}")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses the words after the program's name. Errors: UsageError if some are left over."""
        parsed, extra = self.parse_known_args(args, namespace)
        if extra:
            parser = getattr(parsed, "parser", self)  # cli.py stores the parser of the command that was called
            folder = "; fairseq's folder is --data-bin DIR" * ("--data-bin" in parser._option_string_actions)
            parser.error(f'unexpected argument "{extra[0]}"; options begin with --{folder}')
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does, after fairseq's aliases are replaced and unknown options refused. Options may be
        written with underscores."""
        self.add_options()
        args = sys.argv[1:] if args is None else list(args)
        # Only the words before "--", or before the name of a command, are this parser's options.
        end = next((i for i, word in enumerate(args) if word == "--"), len(args))
        if self._takes_command:
            end = next((i for i, word in enumerate(args) if not word.startswith("-")), len(args))
        # fairseq's flags become this package's own; `prog` ends with the command's name.
        aliases = fairseq_words.SAME.get(self.prog.rpartition(" ")[2], {})
        for i, word in enumerate(args[:end]):
            name, equals, value = word.partition("=")
            if name.startswith("--"):
                name = name.replace("_", "-")
            args[i] = aliases.get(name, name) + equals + value
            if not HELP.intersection(args):  # with --help, argparse prints the help whatever else is given
                self._check_flag(args[i].partition("=")[0])
        return super().parse_known_args(args, namespace)

    def _check_flag(self, name: str) -> None:
        """Raises UsageError if a word looks like an option but is none of this parser's."""
        if _FLAG.fullmatch(name) and name not in self._option_string_actions:
            long = [flag for flag in self._option_string_actions if flag.startswith("--")]
            self.error(fairseq_words.answer(name, long) or f'unknown option "{name}"{closest(name, long)}')

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse itself would print help to standard error if standard output is closed, and would ignore a full disk.
        check_writable(STANDARD)
        (file or sys.stderr).write(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raises UsageError for a value that is none of the option's choices, with the closest choice."""
        if action.choices is not None and value not in action.choices:
            self.error(unknown(str(action.metavar).lower(), value, action.choices))


_FLAG = re.compile(r"-[^\s\d.]\S*")
"""Matches a word that is meant as an option: not -, not a negative number, not text with spaces."""


def flag(name: str) -> str:
    """Returns the flag of an option: --d-model for d_model."""
    return "--" + name.replace("_", "-")


def add_flags(group: Any, fields: Iterable[Field]) -> None:
    """Adds a flag for each field. A flag that is not given sets no value, so that files and presets can set it."""
    for field in fields:
        _add_flag(group, field)


def _add_flag(group: Any, field: Field) -> None:
    """Adds a field's flag. A bool is a switch with an opposite unless its name begins with no_; others have a value."""
    settings: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": _help(field)}
    if field.kind != "bool":
        settings |= {"metavar": _metavar(field)}
    elif field.name.startswith("no_"):
        settings |= {"action": "store_true"}
    else:
        settings |= {"action": argparse.BooleanOptionalAction}
    group.add_argument(flag(field.name), **settings)


def _help(field: Field) -> str:
    """Returns a field's help text and its default, and its choices if the help text does not name them all."""
    are_named = all(re.search(rf"(?<![\w-]){choice}(?![\w-])", field.help) for choice in field.choices)
    choices = "" if are_named else f" One of {', '.join(field.choices)}."
    default = ("yes" if field.default else "no") if field.kind == "bool" else field.default
    shown = "" if default in (None, "") else f" Default: {default}."
    return f"{field.help}{choices}{shown}".replace("%", "%%")


def _metavar(field: Field) -> str:
    """Returns the name that help shows for the value of a field's flag."""
    if field.kind != "str":
        return {"int": "N", "float": "X"}[field.kind]
    named = {"data_bin": "DIR", "source_lang": "LANG", "target_lang": "LANG"}
    return named.get(field.name, "FILE" if field.group == "data" else "NAME")


def add_model(parser: Any, required: bool) -> None:
    """Adds the flags of a trained model: its folder and checkpoint, precision and device."""
    parser.add_argument("--model", metavar="DIR", required=required, help="The --output of training.")
    parser.add_argument(
        "--checkpoint", metavar="NAME", default="best", help="best, last, average or an update's number."
    )
    for name in ("precision", "device"):
        field = next(field for field in TrainingConfig.FIELDS if field.name == name)
        parser.add_argument(
            flag(name), metavar="NAME", default=field.default, help=f"{field.help} Default: {field.default}."
        )


def given(args: argparse.Namespace, *kinds: type[Config]) -> dict[str, Any]:
    """Returns, by name, the values of those fields of the configs `kinds` that are given on the command line."""
    options = {}
    for field in (field for kind in kinds for field in kind.FIELDS):
        if hasattr(args, field.name):
            value = getattr(args, field.name)
            options[field.name] = parse(field, value) if isinstance(value, str) else value
    exclusive = [flag(name) for name in options if name in EXCLUSIVE and options[name]]
    if len(exclusive) > 1:
        raise InputError(f"{' and '.join(exclusive)} exclude each other; give one of them")
    return options


def parse(field: Field, text: str) -> Any:
    """Parses a value from a command line's text; "none" means None if the option allows it."""
    if field.optional and text.lower() == "none":
        return None
    if (field.name, text) in fairseq_words.VALUES:
        raise InputError(fairseq_words.VALUES[field.name, text])
    value: Any = text
    with contextlib.suppress(ValueError):  # text that is no number stays text, which `check` below refuses
        value = {"int": int, "float": float}.get(field.kind, str)(text)
    return field.check(value)


def read_toml(path: str | Path, known: Iterable[str], trust: bool = False) -> dict[str, Any]:
    """Returns the options in a TOML file. They may be at the top level or in the tables [model], [training] and [data],
    and their names may be written with - or _.

    Errors: InputError for a missing file, wrong syntax, an unknown name, a name that is given twice and a wrong value;
    without `trust` also for a value that names code, file.py:Class.
    """
    try:
        content = tomllib.loads(read_small(path, pipe=True))
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; expected a TOML file of options") from error
    except InputError:  # this class is a ValueError, which the next clause would catch
        raise
    except (ValueError, RecursionError) as error:  # wrong syntax, or numbers and tables that Python's limits refuse
        raise InputError(f"{path}: not valid TOML: {error}") from error
    return _flat(content, path, list(known), trust)


def read_run(
    output: str | Path, known: Iterable[str], from_checkpoint: str | None = None, trust: bool = False
) -> dict[str, Any]:
    """Returns the options that a run's checkpoint was trained with, by default those of the newest checkpoint. They
    differ from the options at the run's start if it was resumed with others. Returns {} if `output` holds no run.

    Errors: InputError if the run's files are damaged; without `trust` also for a value that names code.
    """
    path = Path(output) / RUN_CONFIG
    try:
        content = read_json(path, "the run cannot be resumed")
    except FileNotFoundError:
        return {}
    from .. import _core

    saved = json.loads(_core.run_options(str(output), from_checkpoint))
    saved = {} if saved is None else saved
    if not isinstance(saved, dict):
        raise InputError(
            f"{output}: the {RUN_CONFIG} of its checkpoint must be a table of options; got {type(saved).__name__}: "
            "choose another checkpoint with --from-checkpoint"
        )
    content |= {section: saved[section] for section in SECTIONS if section in saved}
    return _flat(content, path, list(known), trust)


def _flat(content: dict[str, Any], path: str | Path, known: list[str], trust: bool) -> dict[str, Any]:
    """Returns the options by name, both those at the top level of `content` and those in its tables. `path` is the file
    that errors name; `trust` allows values that name code."""
    options: dict[str, Any] = {}
    for section, table in [("", content), *((name, content[name]) for name in SECTIONS if name in content)]:
        if not isinstance(table, dict):
            raise InputError(f"{path}: {section} must be a table, [{section}]; got {table!r}")
        for key, value in table.items():
            name = key.replace("-", "_")
            if not section and name in SECTIONS:  # the outer loop reads this table itself
                continue
            if name not in known:
                raise InputError(f'{path}: unknown option "{key}"{closest(name, known)}; {LISTED}')
            if name in options:
                raise InputError(f"{path}: {name} is given twice")
            if name in OWN:
                refuse_code({name: value}, path, trust)
            options[name] = _checked(name, value, path)
    return options


def _checked(name: str, value: Any, path: str | Path) -> Any:
    """Returns the value if it is valid for the option `name`; otherwise raises an InputError that names the file."""
    try:
        if name == "preset":
            find_preset(value)
        return _FIELDS[name].check(value) if name in _FIELDS else value
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def layered(preset: str | None, *layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the options of a preset and of layers, each overriding those before it."""
    merged: dict[str, Any] = find_preset(preset) if preset is not None else {}
    for layer in layers:
        if any(layer.get(name) for name in EXCLUSIVE):  # this layer replaces an earlier choice of the tokenisation
            merged = {name: value for name, value in merged.items() if name not in EXCLUSIVE}
        merged.update(layer)
    return merged
