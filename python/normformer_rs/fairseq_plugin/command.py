"""fairseq-COMMAND with the plug-in in it.

A spawned worker imports this module again before it imports fairseq, and with it the package, which patches Python
first: so nothing may move from the package into `main`.
"""

import argparse
import importlib
import sys

from normformer_rs.errors import InputError
from normformer_rs.fairseq_commands import check
from normformer_rs.options import HELP, UsageError


class _PrintLater:
    """Prints a parser's help when it is handed over the second time: fairseq's own --help ends before it has added the
    flags of the architecture."""

    is_complete = False

    def __call__(self, parser: argparse.ArgumentParser) -> None:
        if self.is_complete:
            parser.print_help()
            raise SystemExit(0)
        self.is_complete = True


def main() -> int:
    """Runs fairseq's command; its exit code, or 2 with one line where the plug-in refuses something."""
    _, *arguments = sys.argv
    try:
        check(arguments[0] if arguments else "", arguments[1:])
        sys.argv = [f"fairseq-{arguments[0]}", *arguments[1:]]
        command = importlib.import_module("fairseq_cli." + arguments[0].replace("-", "_")).cli_main
        names_arch = any(word in ("--arch", "-a") or word.startswith("--arch=") for word in arguments)
        if arguments[0] == "train" and names_arch and HELP.intersection(arguments):
            sys.argv = [argument for argument in sys.argv if argument not in HELP]
            command(modify_parser=_PrintLater())
        else:
            command()
    except Exception as error:
        refusal = _refusal(error)
        if refusal is None:
            raise
        print(f"normformer-rs fairseq: error: {refusal}", file=sys.stderr)
        if isinstance(refusal, UsageError):
            print(refusal.where, file=sys.stderr)
        return 2
    return 0


def _refusal(error: BaseException | None) -> InputError | None:
    """What the plug-in refused, also where fairseq has raised an exception of its own over it."""
    while error is not None and not isinstance(error, InputError):
        error = error.__cause__ or error.__context__
    return error


if __name__ == "__main__":
    raise SystemExit(main())
