"""The command `normformer-rs`: the table of its commands, and what it does about their errors."""

import os
import sys
from collections.abc import Callable, Sequence

from .commands import PROG, Command, evaluate, export, fairseq, generate, runs, train, translate
from .config import __version__, readable
from .errors import DivergedError, InputError, Interrupted
from .options import Parser, UsageError
from .progress import log_to_stderr
from .reproduce import flags as reproduce

COMMANDS: dict[str, Callable[[], Command]] = {
    "train": train.parser,
    "translate": translate.parser,
    "generate": generate.parser,
    "evaluate": evaluate.parser,
    "average": runs.average_parser,
    "plot": runs.plot_parser,
    "demo": train.demo_parser,
    "reproduce": reproduce.parser,
    "convert": runs.convert_parser,
    "export": export.parser,
    "fairseq": fairseq.parser,
    "fairseq-user-dir": fairseq.user_dir_parser,
}
"""In the order of `--help`."""
EXIT_FAILURE = 2
_FAILURES = (
    InputError,
    ImportError,
    Interrupted,
    KeyboardInterrupt,
    DivergedError,
    OSError,
    RuntimeError,
    MemoryError,
    UnicodeError,
)
"""Errors reported in one line, without a traceback; any other is a bug."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, or 2 with a line on stderr that says what is wrong.

    A command line that cannot be read has a second line: how it is written, or where to look.
    """
    log_to_stderr()
    try:
        for word in sys.argv[1:] if argv is None else argv:
            readable("argument", word)
        args = _parser().parse_args(argv)
        args.run(args)
        return 0
    except BrokenPipeError:
        # The output's reader has gone, as in `… | head`: the flush at exit must not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("NORMFORMER_RS_TRACEBACK") == "1":
            raise
        if not isinstance(error, _FAILURES):
            raise
        what = "interrupted" if isinstance(error, (Interrupted, KeyboardInterrupt)) else "error"
        message = " ".join(str(error).split())
        print(f"{PROG}: {what}" + (f": {message}" if message else ""), file=sys.stderr)
        if isinstance(error, UsageError):
            print(error.where, file=sys.stderr)
        return EXIT_FAILURE


def _parser() -> Parser:
    parser = Parser(prog=PROG, description="Trains Transformers, translates and continues texts with them.")
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for name, build in COMMANDS.items():
        summary, run, add = build()
        command = commands.add_parser(name, help=summary, description=summary)
        command.set_defaults(run=run, parser=command)
        add(command)
    return parser
