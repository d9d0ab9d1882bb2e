"""`normformer-rs completion`: what Tab proposes in a shell."""

import argparse

from .. import text
from .._optional import require
from ..config import DataConfig, TrainingConfig, TransformerConfig
from . import Command

_SHELLS = ("bash", "zsh", "tcsh")
_FILES = {"FILE", "FILE.toml", "PATH", "RUN"}
_FOLDERS = {"DIR"}
_CHOICES = {
    field.name: field.choices
    for kind in (TransformerConfig, TrainingConfig, DataConfig)
    for field in kind.FIELDS
    if field.choices
}


def parser() -> Command:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "shell", metavar="SHELL", choices=_SHELLS, help=f"{', '.join(_SHELLS[:-1])} or {_SHELLS[-1]}."
        )

    return "Print a script with which Tab completes commands, options, names and files.", _completion, add


def _completion(args: argparse.Namespace) -> None:
    text.check_writable(text.STANDARD)
    shtab = require("shtab", "completion")
    from ..cli import _parser

    root = _parser()
    for command in _of(root):
        for action in command._actions:
            if action.metavar in _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # the attribute that shtab reads
            elif action.metavar in _FOLDERS:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.choices is None and action.nargs != 0:
                action.choices = _CHOICES.get(action.dest)
    print(shtab.complete(root, shell=args.shell))


def _of(root: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """The parsers of the commands."""
    return [
        parser
        for action in root._actions
        if isinstance(action, argparse._SubParsersAction)
        for parser in action.choices.values()
    ]
