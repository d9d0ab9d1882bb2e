"""`normformer-rs export`, without torch until it runs."""

import argparse
from collections.abc import Callable

from .progress import write


def parser() -> tuple[str, Callable[[argparse.Namespace], None], Callable[[argparse.ArgumentParser], None]]:
    """The command's line of help, the function that runs it, and the one that adds its flags."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", metavar="DIR", required=True, help="The --output of training.")
        names = "best, last, average or an update's number. Default: best."
        parser.add_argument("--checkpoint", metavar="NAME", default="best", help=names)
        parser.add_argument("--output", metavar="DIR", required=True, help="A new folder.")

    return "Write a language model as a folder that Hugging Face's transformers reads.", _export, add


def _export(args: argparse.Namespace) -> None:
    from .huggingface import to_huggingface

    name = to_huggingface(args.model, args.output, checkpoint=args.checkpoint)
    write(f"wrote {args.output}: {name}")
