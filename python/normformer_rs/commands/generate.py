"""`normformer-rs generate`: continues prompts with a language model, and shows the text as it comes."""

import argparse
import time
from collections.abc import Sequence

from .. import text
from ..config import GenerationConfig
from ..errors import InputError
from ..loop.progress import duration, write
from . import Command
from .beforehand import check_model
from .options import add_flags, add_model, given


def parser() -> Command:
    """Returns the help line, the function and the flags of `normformer-rs generate`."""

    def add(parser: argparse.ArgumentParser) -> None:
        """Adds the flags of the command to its parser."""
        add_model(parser, required=True)
        prompts = parser.add_mutually_exclusive_group()
        repeated = "The beginning of a text; may be repeated, one text for each. A newline in it ends a sentence."
        prompts.add_argument("--prompt", metavar="TEXT", action="append", help=repeated)
        prompts.add_argument(
            "--input", metavar="FILE", default=text.STANDARD, help="Prompts, one a line; -: standard input."
        )
        parser.add_argument(
            "--output",
            metavar="FILE",
            default=text.STANDARD,
            help="Texts. Default: - (standard output), while they are generated.",
        )
        parser.add_argument(
            "--max-tokens", metavar="N", type=int, default=8192, help="Tokens of the windows in a batch."
        )
        add_flags(parser.add_argument_group("generation"), GenerationConfig.FIELDS)

    return "Continue texts with a language model.", _run, add


def _run(args: argparse.Namespace) -> None:
    """Continues the prompts. On standard output texts are shown while they grow; a file gets them at the end."""
    if not 1 <= args.max_tokens < 2**31:
        raise InputError(f"max_tokens must lie in [1, 2147483648); got {args.max_tokens}")
    text.check_writable(args.output)
    generation = GenerationConfig(**given(args, GenerationConfig))
    check_model(args.model, args.checkpoint)
    prompts = args.prompt or text.read_lines(args.input, empty=True)
    from ..loop.generation import generate

    # A text of several sentences has several lines, so an empty line separates it from the next one.
    live = Live(prompts, generation.samples, "" if generation.sentences == 1 else "\n")
    options = {"checkpoint": args.checkpoint, "precision": args.precision, "device": args.device}
    options |= {"on_text": live if args.output == text.STANDARD else None, "max_tokens": args.max_tokens}
    start = time.monotonic()
    try:
        generated = generate(args.model, prompts, generation, **options)
    finally:
        live.close()
    if args.output != text.STANDARD:
        whole_texts = (prompt + sample.text for prompt, samples in zip(prompts, generated) for sample in samples)
        text.write_lines(args.output, (whole + "\n" * (generation.sentences != 1) for whole in whole_texts))
    tokens = sum(sample.tokens for samples in generated for sample in samples)
    write(f"generated {tokens:,} tokens in {duration(time.monotonic() - start)}")


class Live:
    """Shows texts on standard output in the prompts' order: the first unfinished text as it grows, the others later.

    `between` is written after each text's last line.
    """

    def __init__(self, prompts: Sequence[str], samples: int, between: str) -> None:
        """`samples` is the number of texts that continue each prompt."""
        self._waiting = [prompt for prompt in prompts for _ in range(samples)]
        """For each text the part that is not shown yet. At the start this is its prompt."""
        self._is_over = [False] * len(self._waiting)
        self._samples, self._between = samples, between
        self._turn = 0
        """The index of the first unfinished text, which is shown while it grows."""
        self._is_open = False
        """True if the last shown line has not ended yet."""

    def __call__(self, prompt: int, sample: int, new: str | None) -> None:
        """Takes the new part of a text, or None if the text is over, and shows what may be shown now. `prompt` is the
        prompt's index, `sample` the index of the text among those of this prompt."""
        place = prompt * self._samples + sample
        if new is None:
            self._is_over[place] = True
        else:
            self._waiting[place] += new
        # The waiting part of the first unfinished text is shown. If that text is over now, the next one has its turn.
        shown = ""
        while self._turn < len(self._waiting):
            shown += self._waiting[self._turn]
            self._waiting[self._turn] = ""
            if not self._is_over[self._turn]:
                break
            shown += "\n" + self._between
            self._turn += 1
        self._show(shown)

    def close(self) -> None:
        """Ends the last shown line if its text was stopped in the middle."""
        if self._is_open:
            self._show("\n")

    def _show(self, shown: str) -> None:
        """Writes text to standard output, and records whether it ends in the middle of a line."""
        if shown:
            self._is_open = not shown.endswith("\n")
            text.write_out(shown.encode("utf-8"))
