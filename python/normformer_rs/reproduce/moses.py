"""Preprocesses text as Moses does, with sacremoses and subword-nmt, in several processes."""

import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path

from .._optional import require

_CHUNK = 2000
"""The number of lines that a process gets at a time."""
# The tags before and after a sentence of a test set.
_SEGMENT = re.compile(r'<seg id="[0-9]*">\s*')
_END = re.compile(r"\s*</seg>\s*")
_SPACES = re.compile(r"\s+")


def segments(lines: Iterable[str]) -> Iterator[str]:
    """Yields the sentences of a test set, from the lines of its SGML or XML file."""
    for line in lines:
        if "<seg id" in line:  # the apostrophe is replaced as in fairseq's scripts
            yield _END.sub("", _SEGMENT.sub("", line)).replace("’", "'")


def cleaned(pairs: Iterable[tuple[str, str]], most: int, ratio: float) -> Iterator[tuple[str, str]]:
    """Yields the pairs that Moses' clean-corpus-n.perl keeps: both sides have 1 to `most` words, and the longer side
    has at most `ratio` times as many words as the shorter one. White space becomes single spaces."""
    for pair in pairs:
        source, target = (_SPACES.sub(" ", side).strip() for side in pair)
        sizes = [len(side.split(" ")) if side else 0 for side in (source, target)]
        if min(sizes) and max(sizes) <= most and max(sizes) <= ratio * min(sizes):
            yield source, target


def tokenized(
    lines: Iterable[str], language: str, workers: int, *, dashes: bool = False, normalised: bool = False
) -> Iterator[str]:
    """Returns an iterator over the lines, tokenised as Moses' tokenizer.perl -l `language` does. With `dashes` it is
    called with -a. With `normalised`, normalize-punctuation.perl and remove-non-printing-char.perl come before it.

    Errors: ImportError without sacremoses.
    """
    require("sacremoses", "tokenising text as Moses does")
    return _mapped(_tokenize, (language, dashes, normalised), lines, workers)


def learn_bpe(paths: Iterable[Path], codes: Path, operations: int) -> None:
    """Learns BPE merges from the files with subword-nmt, and writes them to `codes`. Errors: ImportError without
    subword-nmt."""
    learner = require("subword_nmt.learn_bpe", "learning BPE as fairseq's scripts do")

    def lines() -> Iterator[str]:
        for path in paths:
            with path.open(encoding="utf-8", newline="\n") as file:
                yield from file

    with codes.open("w", encoding="utf-8") as file:
        learner.learn_bpe(lines(), file, operations)


def split(lines: Iterable[str], codes: Path, workers: int) -> Iterator[str]:
    """Returns an iterator over the lines with words split into pieces, as `subword-nmt apply-bpe` does. Errors:
    ImportError without subword-nmt."""
    require("subword_nmt.apply_bpe", "splitting words by BPE")
    return _mapped(_split, (codes,), lines, workers)


def _mapped(work: Callable, options: tuple, lines: Iterable[str], workers: int) -> Iterator[str]:
    """Yields the results of `work(chunk, *options)` for chunks of the lines, in order, computed by several processes.
    At most about 4 chunks per process wait, so that memory stays small."""
    iterator = iter(lines)
    chunks = iter(lambda: list(islice(iterator, _CHUNK)), [])  # ends at the first empty chunk
    if workers < 2:
        for chunk in chunks:
            yield from work(chunk, *options)
        return
    import multiprocessing  # imported here, because it takes 12 ms and --help does not need it

    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        waiting: list = []
        for chunk in chunks:
            waiting.append(pool.apply_async(work, (chunk, *options)))
            if len(waiting) > 4 * workers:
                yield from waiting.pop(0).get()
        for result in waiting:
            yield from result.get()


def _tokenize(lines: list[str], language: str, dashes: bool, normalised: bool) -> list[str]:
    """Returns the lines tokenised, as `tokenized` says; it runs in the processes of `_mapped`."""
    normalizer, tokenizer = _tools(language)
    if normalised:
        lines = [_unprinted().sub(" ", normalizer.normalize(line)) for line in lines]
    return [tokenizer.tokenize(line, aggressive_dash_splits=dashes, return_str=True) for line in lines]


@cache
def _tools(language: str):  # type: ignore[no-untyped-def]
    """Returns Moses' normaliser of punctuation and its tokeniser for a language. Each process makes them once."""
    import sacremoses

    return sacremoses.MosesPunctNormalizer(lang=language), sacremoses.MosesTokenizer(lang=language)


@cache
def _unprinted() -> re.Pattern[str]:
    """Returns a pattern for the characters of Unicode's category "other" (C), like Perl's \\p{C}."""
    ranges: list[list[int]] = []  # the first and the last code of each range
    for code in range(sys.maxunicode + 1):
        if unicodedata.category(chr(code)).startswith("C"):
            if ranges and ranges[-1][1] == code - 1:  # the character follows the last range
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
    return re.compile("[" + "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges) + "]")


def _split(lines: list[str], codes: Path) -> list[str]:
    """Returns the lines with words split into pieces; it runs in the processes of `_mapped`."""
    return [_bpe(codes).process_line(line) for line in lines]


@cache
def _bpe(codes: Path):  # type: ignore[no-untyped-def]
    """Returns subword-nmt's splitter with the merges in the file `codes`. Each process reads them once."""
    from subword_nmt.apply_bpe import BPE

    with codes.open(encoding="utf-8") as file:
        return BPE(file)
