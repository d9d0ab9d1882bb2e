"""`normformer-rs evaluate`: measures BLEU of translations and the perplexity of a model."""

import argparse
from typing import Any

from .. import text
from ..errors import InputError
from . import Command
from .beforehand import check_model
from .options import add_model


def parser() -> Command:
    """Returns the help line, the function and the flags of `normformer-rs evaluate`."""

    def add(parser: argparse.ArgumentParser) -> None:
        """Adds the flags of the command to its parser."""
        bleu = parser.add_argument_group("BLEU of translations")
        bleu.add_argument("--hypothesis", metavar="FILE", help="Translations, one a line.")
        bleu.add_argument("--reference", metavar="FILE", required=True, help="Reference translations.")
        bleu.add_argument("--baseline", metavar="FILE", help="Another system's translations, for a paired bootstrap.")
        tokenize = "sacreBLEU's tokeniser: 13a, none for tokenised text, zh for Chinese, char, …"
        bleu.add_argument("--tokenize", metavar="NAME", default="13a", help=tokenize)
        bleu.add_argument("--lowercase", action="store_true", help="Ignore case.")
        bleu.add_argument("--no-bpe", action="store_true", help="The texts are split: join pieces that end in `@@`.")
        bleu.add_argument(
            "--split-compounds",
            action="store_true",
            help="Split a-b into three words, as for WMT14 En-De; for tokenised text, with --tokenize none.",
        )
        perplexity = parser.add_argument_group("perplexity of a model, given --source, on --reference")
        add_model(perplexity, required=False)
        perplexity.add_argument("--source", metavar="FILE", help="Source text; none for a language model.")
        window = "For a language model: slide a window of N tokens over the text. Default: segment_length."
        perplexity.add_argument("--window", metavar="N", type=int, help=window)
        stride = "Tokens by which the window moves; each token is scored once. Default: half the window."
        perplexity.add_argument("--stride", metavar="N", type=int, help=stride)

    return "Score translations, or a model's perplexity.", _run, add


def _run(args: argparse.Namespace) -> None:
    """Prints BLEU of --hypothesis, and the perplexity of --model, if they are given."""
    if args.hypothesis is None and args.model is None:
        raise InputError("evaluate needs --hypothesis FILE (for BLEU), --model DIR (for perplexity), or both")
    is_windowed = args.window is not None or args.stride is not None
    if args.model is not None and is_windowed and args.source is not None:
        raise InputError("--window and --stride are for the text of a language model, which has no --source")
    text.check_writable(text.STANDARD)
    if args.model is not None:
        check_model(args.model, args.checkpoint)
        for path in (args.source, args.reference):
            if path is not None:
                text.check_readable(path)
    if args.hypothesis is not None:
        _score(args)
    if args.model is not None:
        options = {"checkpoint": args.checkpoint, "precision": args.precision, "device": args.device}
        if is_windowed:
            _run_windows(args, options)
            return
        from ..loop.translation import evaluate_loss

        measured = evaluate_loss(args.model, args.source, args.reference, **options)
        print(
            f"perplexity: {measured.perplexity:.3f} (nll {measured.nll:.4f}, smoothed loss {measured.loss:.4f} nats "
            f"per token, {measured.tokens:,} tokens)"
        )


def _score(args: argparse.Namespace) -> None:
    """Prints BLEU of --hypothesis and, with --baseline, the comparison with the other system."""
    texts = [None if path is None else text.read_lines(path)
             for path in (args.hypothesis, args.reference, args.baseline)]  # fmt: skip
    from .. import _core, scores

    if args.no_bpe:
        texts = [None if lines is None else [_core.join_line(line) for line in lines] for lines in texts]
    hypotheses, references, baseline = texts
    assert hypotheses is not None and references is not None
    options = {"tokenize": args.tokenize, "lowercase": args.lowercase, "split_compounds": args.split_compounds}
    score = scores.score(hypotheses, references, baseline, **options)
    print(f"sacreBLEU:  {score.sacrebleu}")
    print(f"multi-bleu: {score.multi_bleu}")
    if score.comparison is not None:
        print(f"bootstrap:  {score.comparison}")


def _run_windows(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Prints the perplexity of a language model that reads --reference through a sliding window."""
    from ..loop.generation import evaluate_windows

    score = evaluate_windows(args.model, args.reference, window=args.window, stride=args.stride, **options)
    print(f"perplexity: {score.perplexity:.3f} (nll {score.nll:.4f} nats per token, {score.tokens:,} tokens)")
    print(
        f"per word:   {score.word_perplexity:.3f} ({score.words:,} words, the ends of {score.lines:,} lines among them)"
    )
    print(f"bits:       {score.bits_per_character:.4f} per character ({score.characters:,}, with the ends of lines)")
