"""`normformer-rs export`: writes a language model as a folder for Hugging Face."""

import argparse

from ..loop.progress import write
from . import Command
from .beforehand import check_model


def parser() -> Command:
    """Returns the help line, the function and the flags of `normformer-rs export`."""

    def add(parser: argparse.ArgumentParser) -> None:
        """Adds the flags of the command to its parser."""
        parser.add_argument("--model", metavar="DIR", required=True, help="The --output of training.")
        names = "best, last, average or an update's number. Default: best."
        parser.add_argument("--checkpoint", metavar="NAME", default="best", help=names)
        parser.add_argument("--output", metavar="DIR", required=True, help="A new folder.")

    return "Write a language model as a folder that Hugging Face's transformers reads.", _run, add


def _run(args: argparse.Namespace) -> None:
    """Writes the model's folder for Hugging Face."""
    check_model(args.model, args.checkpoint)
    from ..formats.huggingface import to_huggingface

    name = to_huggingface(args.model, args.output, checkpoint=args.checkpoint)
    write(f"wrote {args.output}: {name}")
