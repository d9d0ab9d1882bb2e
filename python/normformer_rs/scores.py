"""BLEU of translations: sacreBLEU with its signature, multi-bleu.perl's line, and the paired bootstrap."""

import dataclasses
import json
import re
from collections.abc import Sequence

from . import _core
from ._optional import require
from .config import unknown
from .errors import InputError

RESAMPLES = 1000


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two systems on the same references (Koehn 2004)."""

    bleu: float
    baseline: float
    p_value: float
    """Probability of a difference at least this large under resampling, were there none."""
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
    """sacreBLEU's."""
    sacrebleu: str
    """Its line, signature first."""
    multi_bleu: str
    """multi-bleu.perl's line: white space separates words."""
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
    """BLEU of hypotheses against one reference each, and against a baseline's translations where they are given.

    Args:
        tokenize: sacreBLEU's tokeniser: 13a for plain text, none for text that is tokenised already.
        lowercase: ignore case.
        split_compounds: a-b becomes a ##AT##-##AT## b in tokenised text, for comparisons on WMT14 En-De
            (Vaswani et al. 2017; Nguyen & Salazar 2019, App A).

    Errors: InputError for sequences of different length, and compounds to split in text that is not tokenised;
    ImportError without sacrebleu.
    """
    metrics = require("sacrebleu.metrics", "scoring translations")
    if tokenize not in metrics.BLEU.TOKENIZERS:
        raise InputError(unknown("tokenize", tokenize, metrics.BLEU.TOKENIZERS))
    for name, lines in (("hypothesis", hypotheses), ("baseline", baseline)):
        if lines is not None and len(lines) != len(references):
            raise InputError(
                f"the {name} has {len(lines)} lines and the reference {len(references)}; expected one reference for "
                "each line, in the same order"
            )
    if split_compounds:
        if tokenize != "none":
            raise InputError(
                f'split_compounds takes text that is tokenised already, with tokenize = "none"; got "{tokenize}"'
            )
        hypotheses, references = _split_compounds(hypotheses), _split_compounds(references)
        baseline = None if baseline is None else _split_compounds(baseline)
    # force: no warning that the text looks tokenised, since `tokenize` says what it is.
    metric = metrics.BLEU(tokenize=tokenize, lowercase=lowercase, force=True, references=[list(references)])
    found = metric.corpus_score(list(hypotheses), None)
    signature = metric.get_signature().format() + "|compounds:split" * split_compounds
    return Scores(
        bleu=found.score,
        sacrebleu=found.format(signature=signature),
        multi_bleu=_multi_bleu(hypotheses, references, lowercase),
        comparison=None if baseline is None else _compare(metric, hypotheses, baseline, resamples),
    )


def _split_compounds(lines: Sequence[str]) -> list[str]:
    return [re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line) for line in lines]


def _multi_bleu(hypotheses: Sequence[str], references: Sequence[str], lowercase: bool) -> str:
    if lowercase:
        hypotheses, references = [line.lower() for line in hypotheses], [line.lower() for line in references]
    return json.loads(_core.bleu(list(hypotheses), list(references)))["text"]


def _compare(metric: object, hypotheses: Sequence[str], baseline: Sequence[str], resamples: int) -> Comparison:
    significance = require("sacrebleu.significance", "the paired bootstrap")
    systems = [("baseline", list(baseline)), ("hypothesis", list(hypotheses))]
    test = significance.PairedTest(systems, {"BLEU": metric}, None, test_type="bs", n_samples=resamples)
    _, results = test()
    ours, theirs = results["BLEU"][1], results["BLEU"][0]
    return Comparison(ours.score, theirs.score, float(ours.p_value), resamples)
