"""`normformer-rs translate`: translates a text with a trained model."""

import argparse
import time

from .. import text
from ..config import SearchConfig
from ..errors import InputError
from ..loop.progress import duration, write
from . import Command
from .beforehand import check_model
from .options import add_flags, add_model, given


def parser() -> Command:
    """Returns the help line, the function and the flags of `normformer-rs translate`."""

    def add(parser: argparse.ArgumentParser) -> None:
        """Adds the flags of the command to its parser."""
        add_model(parser, required=True)
        source = parser.add_mutually_exclusive_group()
        source.add_argument("--input", metavar="FILE", default=text.STANDARD, help="Source text; -: standard input.")
        source.add_argument("--data-bin", metavar="DIR", help="fairseq's binarised folder; its --split is read.")
        binarised = parser.add_argument_group("with --data-bin")
        binarised.add_argument("--split", metavar="NAME", default="test", help="Default: test.")
        binarised.add_argument("--source-lang", metavar="LANG", help="Default: as the files' names have it.")
        binarised.add_argument("--target-lang", metavar="LANG", help="Default: as the files' names have it.")
        parser.add_argument("--output", metavar="FILE", default=text.STANDARD, help="Translations; -: standard output.")
        parser.add_argument(
            "--max-tokens", metavar="N", type=int, default=8192, help="Padded source tokens in a batch."
        )
        add_flags(parser.add_argument_group("search"), SearchConfig.FIELDS)

    return "Translate a text, line by line; an empty line stays empty.", _run, add


def _run(args: argparse.Namespace) -> None:
    """Translates --input or --data-bin, and writes the translations."""
    if not 1 <= args.max_tokens < 2**31:
        raise InputError(f"max_tokens must lie in [1, 2147483648); got {args.max_tokens}")
    text.check_writable(args.output)
    search = SearchConfig(**given(args, SearchConfig))
    check_model(args.model, args.checkpoint)
    sentences = text.read_lines(args.input, empty=True) if args.data_bin is None else []
    from ..loop.translation import Binarised, translate

    lines: list[str] | Binarised = sentences
    if args.data_bin is not None:
        lines = Binarised(args.data_bin, args.split, args.source_lang, args.target_lang)
    start = time.monotonic()
    options = {"checkpoint": args.checkpoint, "precision": args.precision, "device": args.device}
    translations = translate(args.model, lines, search, max_tokens=args.max_tokens, **options)
    if search.n_best == 1:
        text.write_lines(args.output, (hypotheses[0].text for hypotheses in translations))
    else:  # the lines have Moses' n-best format: number ||| text ||| score
        numbered = ((i, h) for i, hypotheses in enumerate(translations) for h in hypotheses)
        text.write_lines(args.output, (f"{i} ||| {h.text} ||| {h.score:.6f}" for i, h in numbered))
    cut = sum(not hypothesis.finished for hypotheses in translations for hypothesis in hypotheses)
    note = f"; the greatest length (--max-length) cut {cut:,} translations" if cut else ""
    write(f"translated {len(translations):,} lines in {duration(time.monotonic() - start)}{note}")
