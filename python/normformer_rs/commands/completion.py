"""`normformer-rs --print-completion`: prints a script with which Tab completes commands in a shell."""

import argparse
from typing import Any

from .. import text
from .._optional import require
from ..config import DataConfig, TrainingConfig, TransformerConfig
from .options import Parser

SHELLS = ("bash", "zsh", "tcsh")
# Tab completes a value as a file or folder if the option's metavar is one of these, and else from its choices.
_FILES = {"FILE", "FILE.toml", "PATH", "RUN"}
_FOLDERS = {"DIR"}
_CHOICES = {
    field.name: field.choices
    for kind in (TransformerConfig, TrainingConfig, DataConfig)
    for field in kind.FIELDS
    if field.choices
}


class PrintCompletion(argparse.Action):
    """The action of --print-completion: prints the completion script of the named shell and ends the command."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        text.check_writable(text.STANDARD)
        shtab = require("shtab", "completion")
        for command in _command_parsers(parser):
            command.add_options()
            for action in command._actions:
                if action.metavar in _FILES:
                    action.complete = shtab.FILE  # type: ignore[attr-defined]  # the attribute that shtab reads
                elif action.metavar in _FOLDERS:
                    action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
                elif action.choices is None and action.nargs != 0:  # a switch has nargs = 0, and no value
                    action.choices = _CHOICES.get(action.dest)
        print(shtab.complete(parser, shell=values))
        parser.exit()


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the flag to the parser of all commands."""
    shells = f"{', '.join(SHELLS[:-1])} or {SHELLS[-1]}"
    help_ = f"Print a script with which Tab completes commands, options, names and files in {shells}."
    parser.add_argument("--print-completion", metavar="SHELL", choices=SHELLS, action=PrintCompletion, help=help_)


def _command_parsers(root: argparse.ArgumentParser) -> list[Parser]:
    """Returns the parser of each command, such as train or translate, from the root parser."""
    return [
        parser
        for action in root._actions
        if isinstance(action, argparse._SubParsersAction)
        for parser in action.choices.values()
    ]
