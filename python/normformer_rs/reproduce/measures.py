"""What is measured of a run that is over, beside its verdict: columns of the table, and series for the picture."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from .. import _core, analysis, text
from ..model import Transformer
from ..scores import score
from .corpora import CORPORA
from .declared import Options, Scale
from .runs import Run, Runs

START = 100
"""The updates of the pictures of a run's start."""
_ROWS, _LENGTH, _EOS = 32, 64, 2
"""Of the held-out text that the finished model reads: rows, tokens of each, and what stands before the text."""


class Measured(NamedTuple):
    """Columns, and series by name."""

    columns: Options = {}  # noqa: RUF012
    series: dict[str, list[float]] = {}  # noqa: RUF012


def bleu(runs: Runs, run: Run, scale: Scale) -> Measured:
    """BLEU of the scored part; empty where the run did not reach its end."""
    if not run.has_ended:
        return Measured({"bleu": "", "sacrebleu": ""})
    found = score(*runs.translations(run, scale), tokenize=CORPORA[run.row.corpus].tokenize)
    return Measured({"bleu": round(found.bleu, 2), "sacrebleu": found.sacrebleu})


def p_value(runs: Runs, run: Run, baseline: Run, scale: Scale) -> float | str:
    """By paired bootstrap; empty where one of the two runs did not reach its end."""
    if not run.has_ended or not baseline.has_ended:
        return ""
    hypotheses, references = runs.translations(run, scale)
    theirs, _ = runs.translations(baseline, scale)
    found = score(hypotheses, references, theirs, tokenize=CORPORA[run.row.corpus].tokenize)
    return round(found.comparison.p_value, 4) if found.comparison else ""


def gradients(runs: Runs, run: Run, scale: Scale) -> Measured:
    """The gradient norms at the start."""
    return Measured(series={"gradients": _brief(run.history.grad_norm[:START])})


def losses(runs: Runs, run: Run, scale: Scale) -> Measured:
    """The training NLL at the start."""
    return Measured(series={"losses": _brief(run.history.nll[:START])})


def validation(runs: Runs, run: Run, scale: Scale) -> Measured:
    """The validation NLL, and the updates after which it was measured."""
    evaluations = run.history.evaluations
    return Measured(series={"evaluated": _brief(evaluations.update), "validation": _brief(evaluations.nll)})


def start(runs: Runs, run: Run, scale: Scale) -> Measured:
    """The gradient norms at the start in three numbers, and the last training NLL of it."""
    norms, nll = run.history.grad_norm[:START], run.history.nll[:START]
    if not len(norms):
        return Measured()
    numbers = norms[0], np.median(norms), np.max(norms), nll[-1]
    names = "first_norm", "median_norm", "largest_norm", "last_nll"
    return Measured({name: round(float(number), 4) for name, number in zip(names, numbers)})


def perplexity(runs: Runs, run: Run, scale: Scale) -> Measured:
    """The best validation perplexity, and the unigram model's."""
    best = float(np.min(run.history.evaluations.perplexity)) if len(run.history.evaluations.update) else math.nan
    unigram = math.exp(run.verdict["unigram_entropy"])
    numbers = {"perplexity": round(best, 2), "unigram": round(unigram, 2), "ratio": round(best / unigram, 4)}
    return Measured(numbers)


def loss(runs: Runs, run: Run, scale: Scale) -> Measured:
    """The last validation loss, smoothed."""
    losses = run.history.evaluations.loss
    return Measured({"valid_loss": round(float(losses[-1]), 4) if len(losses) else math.nan})


def growth(runs: Runs, run: Run, scale: Scale) -> Measured:
    """Of a language model at its run's end, on held-out text: the mean |x| of the stream before the first layer and
    after each, and the last over the first; empty where the run did not reach its end."""
    if not run.has_ended:
        return Measured({"growth": ""})
    lines = _core.encode(str(run.output), text.read_lines(str(run.files["valid_target"])))
    tokens = [_EOS, *(token for line in lines for token in [*line, _EOS])]
    rows = max(1, min(_ROWS, len(tokens) // _LENGTH))
    read = torch.tensor(tokens[: rows * _LENGTH]).view(rows, -1)
    sizes = analysis.observe(Transformer.from_checkpoint(run.output, "last"), None, read)["decoder"].sizes
    return Measured({"growth": round(float(sizes[-1] / sizes[0]), 4)}, {"sizes": _brief(sizes)})


def _brief(values: "np.ndarray") -> list[float]:
    return [float(f"{value:.5g}") for value in values]


MEASURES: dict[str, Callable[[Runs, Run, Scale], Measured]] = {
    measure.__name__: measure for measure in (bleu, gradients, losses, validation, start, perplexity, loss, growth)
}
