"""fairseq's commands and the options that each requires, checked before fairseq's import, which takes seconds."""

from collections.abc import Sequence
from typing import NamedTuple

from .config import unknown
from .errors import InputError
from .options import HELP, UsageError


class Command(NamedTuple):
    """A command of fairseq."""

    usage: str
    needs: tuple[tuple[str, ...], ...] = ()
    """One option of each group must be given."""


COMMANDS = {
    "preprocess": Command(
        "--source-lang LANG --target-lang LANG --trainpref PREFIX --validpref PREFIX --destdir DIR",
        (
            ("--trainpref", "--srcdict"),
            ("--source-lang", "-s", "--only-source"),
            ("--target-lang", "-t", "--only-source"),
        ),
    ),
    "train": Command(
        "DATA --arch nfrs_transformer --optimizer adam --lr X --max-tokens N",
        (("--arch", "-a"), ("--optimizer",), ("--max-tokens", "--batch-size", "--max-sentences")),
    ),
    "generate": Command("DATA --path FILE.pt", (("--path",),)),
    "interactive": Command("DATA --path FILE.pt", (("--path",),)),
    "validate": Command("DATA --path FILE.pt --task translation", (("--path",), ("--task",))),
    "score": Command("--sys FILE --ref FILE"),
    "eval-lm": Command("DATA --path FILE.pt", (("--path",),)),
    "hydra-train": Command("task=NAME task.data=DATA model=NAME optimizer=NAME dataset.max_tokens=N"),
}


def check(command: str, arguments: Sequence[str]) -> None:
    """Raises InputError for a command that fairseq does not have, UsageError where one lacks what it needs."""
    if command not in COMMANDS:
        raise InputError(unknown("command", command, COMMANDS))
    known = COMMANDS[command]

    def is_given(option: str) -> bool:
        joined = option + "=" if option.startswith("--") else option  # --arch=NAME, -sde
        return any(argument == option or argument.startswith(joined) for argument in arguments)

    missing = [group[0] for group in known.needs if not any(map(is_given, group))]
    if HELP.intersection(arguments) or (arguments and not missing):
        return
    what = ", ".join(missing) if missing else "arguments"
    raise UsageError(
        f"fairseq {command} needs {what}", f"usage: normformer-rs fairseq {command} {known.usage} …; --help lists all"
    )
