"""The command `normformer-rs`: the table of its commands, and the handling of their errors.

| exit code | what happened |
|---|---|
| 0 | success |
| 1 | a bug: Python's traceback is shown |
| 2 | bad input: options, files, a library that is not installed |
| 3 | training diverged |
| 4 | the machine failed: a full disk, too little memory, an error of libtorch, a lost rank |
| death by a signal | SIGINT, SIGTERM or SIGHUP, after the run is saved; SIGPIPE if the output's reader is gone |
"""

import atexit
import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence

from .commands import (
    PROG,
    Command,
    completion,
    doctor,
    evaluate,
    export,
    fairseq,
    generate,
    records,
    runs,
    train,
    translate,
    versions,
)
from .commands.options import Parser, UsageError
from .config import __version__, readable, speaking_flags
from .errors import DivergedError, InputError, Interrupted
from .loop.progress import log_to_stderr
from .loop.signals import as_ctrl_c, ask, first_signal
from .reproduce import data
from .reproduce import flags as reproduce
from .study import flags as compare
from .text import escaped, hold_standard_files, write_out

COMMANDS: dict[str, Callable[[], Command]] = {
    "train": train.parser,
    "translate": translate.parser,
    "generate": generate.parser,
    "evaluate": evaluate.parser,
    "average": runs.average_parser,
    "plot": runs.plot_parser,
    "demo": train.demo_parser,
    "compare": compare.parser,
    "reproduce": reproduce.parser,
    "text": records.parser,
    "data": data.parser,
    "convert": runs.convert_parser,
    "export": export.parser,
    "fairseq": fairseq.parser,
    "fairseq-user-dir": fairseq.user_dir_parser,
    "doctor": doctor.parser,
}
"""The commands, in the order of `--help`."""
BAD_INPUT, DIVERGED, FAILED, BY_SIGNAL = 2, 3, 4, 128
"""Exit codes; a signal's number is added to the last one."""
_LONGEST = 3000
"""The maximum length of an error's line, in characters."""
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
_FAULTS_OF_THE_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
"""Values of `errno` for failures of the machine, which no other input would avoid."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code. Unless the code is 0, a line on stderr says what is wrong.

    If the command line cannot be parsed, a second line shows its usage or where to find it. Without `argv`, the command
    comes from the process's arguments; if a signal stops such a command, the process ends by the same signal, so that
    shells and schedulers see the cause.
    """
    if argv is None:
        _start_in_utf8()
    hold_standard_files()
    log_to_stderr()
    stopped_by: list[int] = []
    if argv is None:
        atexit.register(_die, stopped_by)  # registered first, so it runs last, after the functions of libraries
    with as_ctrl_c(ends_process=argv is None), speaking_flags():
        code = _run(argv)
    if code > BY_SIGNAL:
        stopped_by.append(code - BY_SIGNAL)
    return code


def _die(stopped_by: list[int]) -> None:
    """Ends the process by the signal that stopped the command, if one did."""
    if not stopped_by:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    signal.signal(stopped_by[0], signal.SIG_DFL)
    os.kill(os.getpid(), stopped_by[0])


def _run(argv: Sequence[str] | None) -> int:
    """Runs the command and reports its errors; returns the exit code."""
    try:
        try:
            words = [readable("argument", word) for word in (sys.argv[1:] if argv is None else argv)]
            words = _asking_for_help(words)
            if sorted(words) == sorted(versions.FLAGS):  # `--version --all`, in any order
                print(versions.report())
                return 0
            args = _parser().parse_args(words)
            args.run(args)
            ask()  # raises KeyboardInterrupt if a signal came and some code swallowed its exception
        finally:  # `--help` raises SystemExit, and its text must be written, too
            if sys.stdout is not None and not sys.stdout.closed:
                write_out()
        return 0
    except BrokenPipeError:
        # The reader of the output has closed it, for example in `… | head`.
        _drop_output()
        return BY_SIGNAL + signal.SIGPIPE
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("NORMFORMER_RS_TRACEBACK") == "1" or not isinstance(error, _FAILURES):
            raise
        if isinstance(error, OSError):
            _drop_output()
        report(error)
        return _exit_code(error)


def _asking_for_help(words: list[str]) -> list[str]:
    """Returns `COMMAND --help` for `help COMMAND` and `--help COMMAND`, and `--help` for no words."""
    if words and words[0] not in ("help", "-h", "--help"):
        return words
    return [*(word for word in words[1:2] if word in COMMANDS), "--help"]


def _exit_code(error: BaseException) -> int:
    """Returns the exit code for an error that is reported in one line."""
    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        return BY_SIGNAL + first_signal()
    if isinstance(error, DivergedError):
        return DIVERGED
    if isinstance(error, OSError):
        return FAILED if error.errno in _FAULTS_OF_THE_MACHINE else BAD_INPUT
    return FAILED if isinstance(error, (RuntimeError, MemoryError)) else BAD_INPUT


def report(error: BaseException) -> None:
    """Prints an error as one line on standard error, and a second line if the command line cannot be parsed."""
    what = "interrupted" if isinstance(error, (Interrupted, KeyboardInterrupt)) else "error"
    message = escaped(" ".join(str(error).split()))
    # A message may quote a forged file. A long one is cut down to its first 2000 and last 997 characters.
    if len(message) > _LONGEST:
        message = f"{message[: _LONGEST - 1000]} … {message[-997:]}"
    lines = [f"{PROG}: {what}" + (f": {message}" if message else "")]
    if isinstance(error, UsageError):
        lines.append(error.where)
    with contextlib.suppress(OSError):  # the terminal may be gone
        for line in lines:
            print(escaped(line), file=sys.stderr)


def _drop_output() -> None:
    """Drops the text that could not be written to standard output, so that the flush at exit does not fail again."""
    try:
        sys.stdout.flush()
    except (AttributeError, OSError):
        # The buffer keeps the text, so the flush at exit writes it to /dev/null.
        with contextlib.suppress(AttributeError, OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _start_in_utf8() -> None:
    """Restarts the process in Python's UTF-8 mode if its locale has another encoding, for example with LC_ALL=C.

    Arguments, file names and texts are UTF-8 everywhere; Python fixes the encoding of file names when it starts.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1" and sys.executable:
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _parser() -> Parser:
    """Returns the parser of the command line. A command's own options are added only if it is the one that runs."""
    parser = Parser(prog=PROG, description="Trains Transformers, translates and continues texts with them.")
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    parser.add_argument("--all", action="store_true", help="With --version: torch, Python, processor and devices, too.")
    completion.add_to(parser)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for name, build in COMMANDS.items():
        # `add` adds the command's own options to its parser; `run` runs the command with the parsed options.
        summary, run, add = build()
        command = commands.add_parser(name, help=summary, description=summary, add=add)
        command.set_defaults(run=run, parser=command)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
