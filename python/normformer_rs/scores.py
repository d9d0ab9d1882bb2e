"""BLEU of translations: sacreBLEU with its signature, multi-bleu.perl's line, and the paired bootstrap."""

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import _core
from ._optional import require
from .config import unknown
from .errors import InputError
from .text import check_lines

RESAMPLES = 1000
SEED = "SACREBLEU_SEED"
"""The environment variable with the seed of the resamples, as in sacreBLEU: 12345 by default; "none" for a random
seed."""
_ROUNDING = 1e-9
"""Two differences of BLEU count as equal if they are closer than this share of BLEU's range, 100. One more match
changes BLEU by at least 1e-7 of the range."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The comparison of two systems on the same references, by a paired bootstrap (Koehn 2004)."""

    bleu: float
    baseline: float
    p_value: float
    """The probability of a difference at least this large under resampling if there were none; 1 for equal systems."""
    resamples: int

    def __str__(self) -> str:
        return (
            f"baseline BLEU = {self.baseline:.2f}, difference = {self.bleu - self.baseline:+.2f}, "
            f"p = {self.p_value:.4f} (paired bootstrap, {self.resamples} resamples)"
        )


@dataclasses.dataclass(frozen=True)
class Scores:
    """BLEU, 0 to 100, and the lines to quote."""

    bleu: float
    """sacreBLEU's score."""
    sacrebleu: str
    """sacreBLEU's line, signature first."""
    multi_bleu: str
    """multi-bleu.perl's line, to the byte: words are separated by ASCII white space, and `lowercase` is its -lc."""
    comparison: Comparison | None = None


def score(
    hypotheses: Sequence[str],
    references: Sequence[str],
    baseline: Sequence[str] | None = None,
    *,
    tokenize: str = "13a",
    lowercase: bool = False,
    split_compounds: bool = False,
    resamples: int = RESAMPLES,
) -> Scores:
    """Computes BLEU of hypotheses against one reference each, and compares them with a baseline's translations if
    given.

    Args:
        tokenize: sacreBLEU's tokeniser: 13a for plain text, none for text that is tokenised already.
        lowercase: ignore case.
        resamples: the number of resamples of the paired bootstrap.
        split_compounds: a-b becomes a ##AT##-##AT## b in tokenised text, for comparisons on WMT14 En-De
            (Vaswani et al. 2017; Nguyen & Salazar 2019, App A).

    With d the difference in BLEU, dᵢ that of n resamples of the lines, and m the mean of all dᵢ,
    p = (1 + #{i: |dᵢ − m| ≥ |d|})/(1 + n): two-sided, the distribution of the resamples shifted to a difference of 0
    (Efron & Tibshirani 1993, §16.4). Resamples and seed are sacreBLEU's. sacreBLEU's own p subtracts the mean of |dᵢ|
    from |dᵢ|. At the level 0.05 it called 11 % of 1,000 pairs of equal systems different; the p above called 6 %
    different.

    Errors: InputError for no lines, for sequences of different length, for `resamples` below 1, and for compounds to
    split in text that is not tokenised; ImportError without sacrebleu.
    """
    if isinstance(resamples, bool) or not hasattr(resamples, "__index__") or resamples < 1:
        raise InputError(f"resamples must be a whole number of at least 1; got {resamples!r}")
    for name, lines in (("hypothesis", hypotheses), ("reference", references), ("baseline", baseline)):
        if lines is not None:
            check_lines(f"the {name}", lines)
    metrics = require("sacrebleu.metrics", "scoring translations")
    if tokenize not in metrics.BLEU.TOKENIZERS:
        raise InputError(unknown("tokenize", tokenize, metrics.BLEU.TOKENIZERS))
    for name, lines in (("hypothesis", hypotheses), ("baseline", baseline)):
        if lines is not None and len(lines) != len(references):
            raise InputError(
                f"the {name} has {len(lines)} lines and the reference {len(references)}; expected one reference for "
                "each line, in the same order"
            )
    if not len(references):
        raise InputError("there is nothing to score: the hypothesis and the reference have no lines")
    if split_compounds:
        if tokenize != "none":
            raise InputError(
                f'split_compounds takes text that is tokenised already, with tokenize = "none"; got "{tokenize}"'
            )
        hypotheses, references = _split_compounds(hypotheses), _split_compounds(references)
        baseline = None if baseline is None else _split_compounds(baseline)
    # `force` prevents the warning that the text looks tokenised, because `tokenize` says what it is.
    metric = metrics.BLEU(tokenize=tokenize, lowercase=lowercase, force=True, references=[list(references)])
    bleu = metric.corpus_score(list(hypotheses), None)
    # A text times False is "", so the signature mentions compounds only if they are split.
    signature = metric.get_signature().format() + "|compounds:split" * split_compounds
    return Scores(
        bleu=bleu.score,
        sacrebleu=bleu.format(signature=signature),
        multi_bleu=json.loads(_core.bleu(list(hypotheses), list(references), lowercase))["text"],
        comparison=None if baseline is None else _compare(metric, hypotheses, baseline, resamples),
    )


def _split_compounds(lines: Sequence[str]) -> list[str]:
    """Returns the lines with a ##AT##-##AT## b in place of each compound a-b."""
    return [re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line) for line in lines]


class Counts(NamedTuple):
    """The counts of each line from which BLEU is computed, and the way in which they were counted. BLEU and p can be
    computed from them without the text."""

    lines: list[list[int]]
    """For each line the numbers of words in the hypothesis and in the reference, of common n-grams of length 1 to 4,
    and of the hypothesis's n-grams of length 1 to 4."""
    signature: str
    """sacreBLEU's signature, with its version."""


def counts(hypotheses: Sequence[str], references: Sequence[str], tokenize: str) -> Counts:
    """Returns the counts of each line, from which `score_counts` computes what `score` computes from the text. Errors:
    ImportError without sacrebleu."""
    metrics = require("sacrebleu.metrics", "scoring translations")
    metric = metrics.BLEU(tokenize=tokenize, force=True, references=[list(references)])
    lines = metric._extract_corpus_statistics(list(hypotheses), None)
    return Counts([[int(count) for count in line] for line in lines], metric.get_signature().format())


def score_counts(
    ours: Counts, theirs: Counts | None = None, *, resamples: int = RESAMPLES, seed: str = "12345"
) -> tuple[float, str, Comparison | None]:
    """Returns BLEU, sacreBLEU's line, and the comparison with a baseline, all as `score` computes them from the
    text. `ours`, `theirs`: the counts of the system and of the baseline; without a baseline there is no comparison."""
    metric = require("sacrebleu.metrics", "scoring translations").BLEU(force=True)
    bleu = metric._compute_score_from_stats(np.sum(ours.lines, 0).tolist())
    line = bleu.format(signature=ours.signature)
    if theirs is None:
        return bleu.score, line, None
    if len(ours.lines) != len(theirs.lines):
        raise InputError(
            f"a baseline is compared line by line: expected counts of {len(ours.lines)} lines, got {len(theirs.lines)}"
        )
    rows = _draws(len(ours.lines), resamples, seed)
    return bleu.score, line, _compare_counts(metric, np.array(ours.lines), np.array(theirs.lines), rows)


def _compare(metric: Any, hypotheses: Sequence[str], baseline: Sequence[str], resamples: int) -> Comparison:
    """Compares two systems by a paired bootstrap over the same counts of lines, and with the same draws, as sacreBLEU's
    own test."""
    ours, theirs = (np.array(metric._extract_corpus_statistics(lines, None)) for lines in (hypotheses, baseline))
    return _compare_counts(metric, ours, theirs, _draws(len(baseline), resamples, resampling_seed()))


def _compare_counts(metric: Any, own: NDArray[Any], baseline: NDArray[Any], rows: NDArray[np.int64]) -> Comparison:
    """Compares two systems from the counts of their lines, (lines, counts). `rows`: the indices of each resample's
    lines, (resamples, lines)."""
    own_resampled, baseline_resampled = (_resampled(metric, statistics, rows) for statistics in (own, baseline))
    all_lines = np.arange(len(own))[None]
    own_bleu, baseline_bleu = (_resampled(metric, statistics, all_lines)[0] for statistics in (own, baseline))
    resamples = len(rows)
    differences = own_resampled - baseline_resampled
    # The condition |dᵢ − m| ≥ |d| in the docstring of `score`. Differences that only rounding tells apart are equal.
    is_as_large = np.abs(differences - differences.mean()) >= abs(own_bleu - baseline_bleu) - 100 * _ROUNDING
    p_value = (1 + int(is_as_large.sum())) / (1 + resamples)
    return Comparison(float(own_bleu), float(baseline_bleu), p_value, resamples)


def resampling_seed() -> str:
    """Returns the seed of the resamples that the environment asks for."""
    return os.environ.get(SEED, "12345")


def _draws(lines: int, resamples: int, seed: str) -> NDArray[np.int64]:
    """Returns the indices of each resample's lines, (resamples, lines), as sacreBLEU draws them. `lines`: the number of
    lines; `seed`: a whole number, or "none" for a random seed."""
    try:
        generator = np.random.default_rng(None if seed.lower() == "none" else int(seed))
    except ValueError as error:
        raise InputError(f'{SEED} must be a whole number or "none"; got "{seed}"') from error
    return generator.choice(lines, size=(resamples, lines), replace=True)


def _resampled(metric: Any, statistics: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the BLEU of each resample. `statistics`: the counts of each line; `rows`: as in `_compare_counts`. A
    resample's counts are whole numbers, so equal ones give equal scores, bit for bit."""
    counts = (statistics[chosen].sum(0).tolist() for chosen in rows)
    return np.array([metric._compute_score_from_stats(count).score for count in counts])
