"""`normformer-rs text`: writes fields of records into text files."""

import argparse

from .. import text
from ..errors import InputError
from . import Command


def parser() -> Command:
    """Returns the help line, the function and the flags of `normformer-rs text`."""

    def add(parser: argparse.ArgumentParser) -> None:
        """Adds the flags of the command to its parser."""
        ends = ", ".join(text.RECORDS)
        about = f"A file ({ends}; plain or gzip), or the name of a data set of the Hugging Face hub."
        parser.add_argument("source", metavar="SOURCE", help=about)
        field = "A field of each record; a dot leads into a nested one, as in translation.de. May be repeated."
        parser.add_argument("--field", metavar="NAME", action="append", required=True, help=field)
        output = "Text file with one line for each record; one for each --field, in the same order."
        parser.add_argument("--output", metavar="FILE", action="append", required=True, help=output)
        parser.add_argument("--limit", metavar="N", type=int, help="Stop after so many records.")
        hub = parser.add_argument_group("data sets of the hub")
        hub.add_argument("--split", metavar="NAME", default="train", help="The part that is read. Default: train.")
        hub.add_argument("--subset", metavar="NAME", help="The configuration, if there are several, such as de-en.")
        hub.add_argument("--streaming", action="store_true", help="Read while downloading, and keep no copy.")

    return "Extract text from files of records (.jsonl, .csv, .parquet) and from data sets of the hub.", _run, add


def _run(args: argparse.Namespace) -> None:
    """Writes each --field of the records into the --output in the same place."""
    if len(args.field) != len(args.output):
        raise InputError(
            f"{len(args.field)} times --field and {len(args.output)} times --output; expected one --output for each "
            "--field"
        )
    if len({*args.output}) < len(args.output):
        raise InputError(f"two fields would be written to one file; got --output {' --output '.join(args.output)}")
    if args.limit is not None and args.limit < 1:
        raise InputError(f"--limit must be at least 1; got {args.limit}")
    for path in args.output:
        text.check_writable(path)
    from ..formats import records

    options = {"split": args.split, "config": args.subset, "streaming": args.streaming, "limit": args.limit}
    # Turns records, each with a value for every field, into a column for each field.
    columns = list(zip(*records.read(args.source, args.field, **options), strict=True))
    for name, path, lines in zip(args.field, args.output, columns, strict=True):
        text.check_lines(f"{args.source}: {name}", lines)
        text.write_lines(path, lines)
