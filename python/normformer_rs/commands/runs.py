"""The commands that work on trained runs: `normformer-rs average`, `plot` and `convert`."""

import argparse
from pathlib import Path

from .. import text
from ..errors import InputError
from ..loop.progress import write
from . import Command
from .beforehand import check_average, check_model


def average_parser() -> Command:
    """Returns the help line, the function and the flags of `normformer-rs average`."""

    def add(parser: argparse.ArgumentParser) -> None:
        """Adds the flags of the command to its parser."""
        parser.add_argument("--model", metavar="DIR", required=True, help="The --output of training.")
        which = parser.add_mutually_exclusive_group(required=True)
        which.add_argument("--last", metavar="N", type=int, help="The last N checkpoints.")
        which.add_argument("--updates", metavar="N", type=int, nargs="+", help="The checkpoints of these updates.")

    return "Average checkpoints; translate with --checkpoint average.", _average, add


def _average(args: argparse.Namespace) -> None:
    """Averages checkpoints and prints the path of the average."""
    text.check_writable(text.STANDARD)
    check_average(args.model, args.last, args.updates)
    from ..loop.translation import average

    print(average(args.model, last=args.last, updates=args.updates))


def plot_parser() -> Command:
    """Returns the help line, the function and the flags of `normformer-rs plot`."""

    def add(parser: argparse.ArgumentParser) -> None:
        """Adds the flags of the command to its parser."""
        parser.add_argument("runs", metavar="RUN", nargs="+", help="The --output of training; several are overlaid.")
        where = (
            "The picture: .png, .svg or .pdf. Default: curves.png, in the run's folder if there is one run, else here."
        )
        parser.add_argument("--output", metavar="FILE", help=where)
        parser.add_argument("--names", metavar="NAME", nargs="+", help="Names of the runs. Default: their folders.")

    return "Draw loss, BLEU or perplexity, gradient norm and learning rate of runs.", _plot, add


def _plot(args: argparse.Namespace) -> None:
    """Draws the runs and prints the picture's path."""
    text.check_writable(text.STANDARD)
    from ..loop.history import plot

    alone = Path(args.runs[0]) / "curves.png" if len(args.runs) == 1 else "curves.png"
    print(plot(*args.runs, path=args.output or alone, names=args.names))


def convert_parser() -> Command:
    """Returns the help line, the function and the flags of `normformer-rs convert`."""

    def add(parser: argparse.ArgumentParser) -> None:
        """Adds the flags of the command to its parser."""
        parser.add_argument("--from", dest="origin", metavar="PATH", required=True, help="A .pt, or a run's --output.")
        parser.add_argument("--to", metavar="PATH", required=True, help="A new --output folder, or a new .pt.")
        parser.add_argument("--data", metavar="DIR", help="fairseq's binarised folder, for its dictionary.")
        parser.add_argument(
            "--checkpoint", metavar="NAME", default="best", help="The checkpoint of a run. Default: best."
        )
        parser.add_argument(
            "--trust",
            action="store_true",
            help="Load a .pt even if that could run code.",
        )

    return "Turn a fairseq checkpoint into a model of this package, or back.", _convert, add


def _convert(args: argparse.Namespace) -> None:
    """Converts a fairseq checkpoint to a run's folder, or a run to a fairseq checkpoint."""
    if args.origin.endswith(".pt") == args.to.endswith(".pt"):
        raise InputError(f"one of --from and --to must be a .pt of fairseq; got {args.origin} and {args.to}")
    if Path(args.to).exists():
        raise InputError(f"{args.to} exists already; give a new {'file' if args.to.endswith('.pt') else 'folder'}")
    if args.to.endswith(".pt"):
        check_model(args.origin, args.checkpoint)
    elif not Path(args.origin).is_file():
        raise InputError(f"{args.origin}: no such file; expected a checkpoint of fairseq")
    from ..formats import convert

    if args.origin.endswith(".pt"):
        convert.from_fairseq(args.origin, args.to, data=args.data, trust=args.trust)
    else:
        convert.to_fairseq(args.origin, args.to, checkpoint=args.checkpoint)
    write(f"wrote {args.to}")
