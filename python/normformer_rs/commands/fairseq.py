"""`normformer-rs fairseq` and `fairseq-user-dir`: fairseq's commands with the plug-in.

The options that a command of fairseq requires are checked before fairseq's import, which takes seconds.
"""

import argparse
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .. import text
from ..config import unknown
from ..errors import InputError
from . import PROG, Command
from .options import HELP, UsageError


def parser() -> Command:
    """Returns the help line, the function and the flags of `normformer-rs fairseq`."""

    def add(parser: argparse.ArgumentParser) -> None:
        """Adds the flags of the command to its parser."""
        parser.add_argument("command", metavar="COMMAND", help=f"One of {', '.join(COMMANDS)}.")
        rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="The arguments of fairseq-COMMAND.")
        rest.required = False

    return "fairseq's commands with this package's architectures, schedules and criterion.", _run, add


def _run(args: argparse.Namespace) -> None:
    """Runs a command of fairseq in this process."""
    check(args.command, args.arguments)
    text.check_writable(text.STANDARD)  # because fairseq prints and logs to standard output
    sys.argv = [f"{PROG} fairseq", args.command, *args.arguments]
    # The module runs as with `python -m`, so that workers that fairseq spawns import the same main module and its
    # patches.
    try:
        runpy.run_module("normformer_rs.fairseq_plugin.command", run_name="__main__", alter_sys=True)
    except (ImportError, KeyboardInterrupt):
        raise
    except Exception:
        traceback.print_exc()  # the error is fairseq's own, so a traceback helps
        raise SystemExit(1) from None


class FairseqCommand(NamedTuple):
    """A command of fairseq: its usage line and the options that it needs."""

    usage: str
    needs: tuple[tuple[str, ...], ...] = ()
    """Groups of options; one of each group must be given."""


COMMANDS = {
    "preprocess": FairseqCommand(
        "--source-lang LANG --target-lang LANG --trainpref PREFIX --validpref PREFIX --destdir DIR",
        (
            ("--trainpref", "--srcdict"),
            ("--source-lang", "-s", "--only-source"),
            ("--target-lang", "-t", "--only-source"),
        ),
    ),
    "train": FairseqCommand(
        "DATA --arch nfrs_transformer --optimizer adam --lr X --max-tokens N",
        (("--arch", "-a"), ("--optimizer",), ("--max-tokens", "--batch-size", "--max-sentences")),
    ),
    "generate": FairseqCommand("DATA --path FILE.pt", (("--path",),)),
    "interactive": FairseqCommand("DATA --path FILE.pt", (("--path",),)),
    "validate": FairseqCommand("DATA --path FILE.pt --task translation", (("--path",), ("--task",))),
    "score": FairseqCommand("--sys FILE --ref FILE"),
    "eval-lm": FairseqCommand("DATA --path FILE.pt", (("--path",),)),
    "hydra-train": FairseqCommand("task=NAME task.data=DATA model=NAME optimizer=NAME dataset.max_tokens=N"),
}


def check(command: str, arguments: Sequence[str]) -> None:
    """Raises InputError if fairseq has no such command, and UsageError if an option that the command needs is
    missing."""
    if command not in COMMANDS:
        raise InputError(unknown("command", command, COMMANDS))
    known = COMMANDS[command]

    def is_given(option: str) -> bool:
        """Returns True if an argument is the option, alone or joined with its value."""
        joined = option + "=" if option.startswith("--") else option  # such as --arch=NAME, or -sde for -s de
        return any(argument == option or argument.startswith(joined) for argument in arguments)

    # The first option of a group stands for the whole group in the error.
    missing = [group[0] for group in known.needs if not any(map(is_given, group))]
    # fairseq itself handles --help and checks all other options. A command without any argument is an error here.
    if HELP.intersection(arguments) or (arguments and not missing):
        return
    what = ", ".join(missing) if missing else "arguments"
    raise UsageError(
        f"fairseq {command} needs {what}", f"usage: normformer-rs fairseq {command} {known.usage} …; --help lists all"
    )


def user_dir_parser() -> Command:
    """Returns the help line, the function and the flags of `normformer-rs fairseq-user-dir`."""

    def run(_: argparse.Namespace) -> None:
        """Prints the path of the plug-in's folder."""
        text.check_writable(text.STANDARD)
        print(Path(__file__).parents[1] / "fairseq_plugin")

    return "Print the folder for the --user-dir of fairseq's own commands (Python 3.10).", run, lambda _: None
