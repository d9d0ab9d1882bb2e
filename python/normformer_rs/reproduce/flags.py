"""The flags of `normformer-rs reproduce`. The names in its help are generated from the entries."""

import argparse
from pathlib import Path

from .. import text
from ..commands import Command
from . import SCALES


def parser() -> Command:
    """Returns the command: its line of help, the function that runs it, and the function that adds its flags."""

    def add(parser: argparse.ArgumentParser) -> None:
        """Adds the flags of the command to its parser."""
        from . import REPRODUCTIONS

        parser.usage = "%(prog)s NAME… --scale check|here|paper [OPTION …]"
        entries = [f"{entry.name}: {entry.title}; {entry.source}." for entry in REPRODUCTIONS.values()]
        sizes = [f"{scale}: {about}." for scale, about in SCALES.items()]
        parser.epilog = "\n".join(["names:", *entries, "all: each that has the scale.", "", "scales:", *sizes])
        parser.add_argument("names", metavar="NAME", nargs="+", help="Listed below; or all.")
        parser.add_argument("--scale", metavar="SCALE", choices=[*SCALES], required=True, help="Listed below.")
        parser.add_argument("--data", metavar="DIR", default="data", help="Folder of the corpora. Default: data.")
        runs = "Folder of the runs. A stopped one goes on when the command is given again. Default: runs/reproduce."
        parser.add_argument("--output", metavar="DIR", default="runs/reproduce", help=runs)
        tables = "Folder of the tables and pictures; rows that are there stay. Default: the scale's in --output."
        parser.add_argument("--results", metavar="DIR", help=tables)
        marks = "Put table and picture into this Markdown file, between their marks or at its end."
        parser.add_argument("--write", metavar="FILE", help=marks)
        seeds = "Seeds of each run; tables then have mean ± standard deviation. Default: the entry's, mostly 1."
        parser.add_argument("--seeds", metavar="N", type=int, help=seeds)
        parser.add_argument("--device", metavar="NAME", default="cpu", help="cpu, cuda, cuda:N or auto. Default: cpu.")
        parser.add_argument("--dry-run", action="store_true", help="Print runs, options and files, then stop.")
        parser.add_argument("--no-train", action="store_true", help="Make no run; show the measured rows.")
        again = "Recompute the stored figures from the files beside the table, compare, and stop."
        parser.add_argument("--recompute", action="store_true", help=again)
        parser.add_argument("--no-progress", action="store_true", help="No progress bar.")

    return "Repeat a paper's table, and show the paper's figures beside the new ones.", _run, add


def _run(args: argparse.Namespace) -> None:
    """Makes the reproductions that the command line names."""
    text.check_writable(text.STANDARD)
    from . import command

    command.run(
        args.names,
        args.scale,
        data=Path(args.data),
        output=Path(args.output),
        results=Path(args.results) if args.results else None,
        write_to=Path(args.write) if args.write else None,
        train=not args.no_train,
        dry_run=args.dry_run,
        recompute=args.recompute,
        seeds=args.seeds,
        device=args.device,
        progress=not args.no_progress,
    )
