"""Runs fairseq-COMMAND with the plug-in.

A spawned worker imports this module, and so the package, before fairseq. The package patches Python when it is
imported. No patch may move into `main`, which workers do not call.
"""

import argparse
import importlib
import os
import sys

from normformer_rs.commands.fairseq import check
from normformer_rs.commands.options import HELP, UsageError
from normformer_rs.errors import InputError
from normformer_rs.text import escaped


class _PrintLater:
    """Prints the help and ends the command when it is called for the second time. fairseq calls it twice, and adds the
    architecture's flags in between; its own --help would end before that."""

    is_complete = False

    def __call__(self, parser: argparse.ArgumentParser) -> None:
        """Prints the parser's help and exits at the second call; at the first call it does nothing."""
        if self.is_complete:
            parser.print_help()
            raise SystemExit(0)
        self.is_complete = True


def main() -> int:
    """Runs fairseq's command that sys.argv names. Returns the exit code: 0, or 2 after an error in one line if the
    plug-in refuses something. The plug-in's own flag --trust allows a checkpoint's options to name code."""
    _, *arguments = sys.argv
    if "--trust" in arguments:
        arguments.remove("--trust")
        os.environ["NORMFORMER_RS_TRUST"] = "1"  # a variable, so that processes that fairseq starts see it, too
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
        print(f"normformer-rs fairseq: error: {escaped(str(refusal))}", file=sys.stderr)
        if isinstance(refusal, UsageError):
            print(refusal.where, file=sys.stderr)
        return 2
    return 0


def _refusal(error: BaseException | None) -> InputError | None:
    """Returns the InputError from which the error was raised, possibly through exceptions of fairseq; None if there is
    none."""
    while error is not None and not isinstance(error, InputError):
        error = error.__cause__ or error.__context__
    return error


if __name__ == "__main__":
    raise SystemExit(main())
