"""`normformer-rs data`: converts corpora from the form in which publishers release them to the files that
reproductions read."""

import argparse
import os
import shlex
from pathlib import Path

from .. import text
from ..commands import Command
from ..commands.options import UsageError
from ..config import closest
from ..errors import InputError
from . import releases


def parser() -> Command:
    """Returns the command: its line of help, the function that runs it, and the function that adds its flags."""

    def add(parser: argparse.ArgumentParser) -> None:
        """Adds the flags of the command to its parser."""
        parser.usage = "%(prog)s [NAME] [--raw DIR] [--data DIR] [--workers N]"
        entries = [f"{name}: {release.about}. Fetch {'; '.join(release.fetch)}."
                   for name, release in releases.RELEASES.items()]  # fmt: skip
        parser.epilog = "\n".join(["names:", *entries])
        parser.add_argument("name", metavar="NAME", nargs="?", help="Listed below. Without it: list what --data has.")
        raw = "Folder below which the release lies, unpacked. Default: raw."
        parser.add_argument("--raw", metavar="DIR", default="raw", help=raw)
        parser.add_argument("--data", metavar="DIR", default="data", help="Folder of the corpora. Default: data.")
        workers = "Processes that tokenise. Default: one for each core."
        parser.add_argument("--workers", metavar="N", type=int, default=os.cpu_count() or 1, help=workers)

    return "Make the corpora of `reproduce` from their publishers' files.", _run, add


def _run(args: argparse.Namespace) -> None:
    """Makes the corpora of a release, or without a name lists the corpora that exist. Errors: InputError after the
    files are written, if their lines or their text are not the expected ones."""
    from . import REPRODUCTIONS

    text.check_writable(text.STANDARD)
    data = Path(args.data)
    if args.name is None:
        for name, release in releases.RELEASES.items():
            counts = releases.counted(name, data)
            print(f"{name}: {release.about}; {'here' if counts else f'not in {data}'}")
            _show(counts, releases.altered(name, data))
        return
    if args.name not in releases.RELEASES:
        near = closest(args.name, releases.RELEASES)
        raise UsageError(f'unknown name "{args.name}"{near}', "normformer-rs data --help lists the names")
    if args.workers < 1:
        raise InputError(f"--workers must be at least 1; got {args.workers}")
    counts = releases.prepare(args.name, Path(args.raw), data, args.workers)
    altered = releases.altered(args.name, data)
    _show(counts, altered)
    corpora = releases.RELEASES[args.name].corpora
    readers = [entry.name for entry in REPRODUCTIONS.values()
               if any(row.corpus in corpora for scale in entry.scales.values() for row in scale.rows)]  # fmt: skip
    plan_command = f"normformer-rs reproduce NAME --scale paper --data {shlex.quote(str(data))} --dry-run"
    reader = f"{', '.join(readers)} ({plan_command})" if readers else f'normformer-rs compare (text = "{args.name}")'
    print(f"read by: {reader}")
    wrong = [f"{count.corpus} {count.part} has {count.lines:,} lines" for count in counts if not count.agrees]
    wrong += [f"{path} has another text than results were measured on" for path in altered]
    if wrong:
        raise InputError(
            f"{'; '.join(wrong)}; see above what is expected. The files are kept: was the download complete, and is it "
            "the release that the paper used?"
        )


def _show(counts: list[releases.Counted], altered: list[str]) -> None:
    """Prints the number of lines of each part, and the files whose text is not the one that results were measured
    on."""
    for count in counts:
        expected = f" ({count.paper} expected)" if count.paper else ""
        print(f"  {count.corpus} {count.part}: {count.lines:,} lines{expected}")
    for path in altered:
        print(f"  {path}: another text than results were measured on")
