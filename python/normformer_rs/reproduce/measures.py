"""Measurements of a finished run besides its verdict. Each returns columns of the table and series for the picture."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from .. import _core, text
from ..analysis import observations
from ..analysis.observations import brief
from ..loop.translation import Perplexity, evaluate_loss
from ..scores import RESAMPLES, counts, resampling_seed, score
from . import made
from .declared import Options, Scale
from .kept import Content, digest_of, of_log
from .runs import Run, Runs

START = 100
"""The number of first updates that count as a run's start."""
_SCORED = 1000
"""The number of sentence pairs whose loss `smoothed` measures, of training and test text each."""


class Measured(NamedTuple):
    """The result of a measurement: columns of the table, series by name, and the data from which `--recompute` computes
    the columns again."""

    columns: Options = {}  # noqa: RUF012
    series: dict[str, list[float]] = {}  # noqa: RUF012
    kept: Content = {}  # noqa: RUF012
    translations: list[str] = []  # noqa: RUF012


def bleu(runs: Runs, run: Run, scale: Scale) -> Measured:
    """Returns the BLEU of the translated part of the corpus; "" if the run did not reach its end."""
    if not run.has_ended:
        return Measured({"bleu": "", "sacrebleu": ""})
    hypotheses, references = runs.translations(run, scale)
    tokenize = runs.corpora[run.row.corpus].tokenize
    scores, line_counts = score(hypotheses, references, tokenize=tokenize), counts(hypotheses, references, tokenize)
    settings = {"tokenize": tokenize, "resamples": RESAMPLES, "seed": resampling_seed()}
    kept = {"references": digest_of(references), "counts": {**settings, **line_counts._asdict()}}
    columns = {"bleu": round(scores.bleu, 2), "sacrebleu": scores.sacrebleu}
    return Measured(columns, series={}, kept=kept, translations=hypotheses)


def p_value(runs: Runs, run: Run, baseline: Run, scale: Scale) -> Measured:
    """Returns p of the difference in BLEU between two runs, by the paired bootstrap; "" if one of them did not reach
    its end."""
    if not run.has_ended or not baseline.has_ended:
        return Measured({"p": ""})
    hypotheses, references = runs.translations(run, scale)
    baseline_hypotheses, _ = runs.translations(baseline, scale)
    scores = score(hypotheses, references, baseline_hypotheses, tokenize=runs.corpora[run.row.corpus].tokenize)
    p = round(scores.comparison.p_value, 4) if scores.comparison else ""
    return Measured({"p": p}, series={}, kept={"baseline": digest_of(baseline_hypotheses)})


def gradients(runs: Runs, run: Run, scale: Scale) -> Measured:
    """Returns the gradient norms of the first `START` updates."""
    return Measured(series={"gradients": brief(run.history.grad_norm[:START])})


def losses(runs: Runs, run: Run, scale: Scale) -> Measured:
    """Returns the training NLL of the first `START` updates."""
    return Measured(series={"losses": brief(run.history.nll[:START])})


def first(runs: Runs, run: Run, scale: Scale) -> Measured:
    """Returns the training NLL of the first batch, before any update."""
    nll = run.history.nll
    return Measured({"first_nll": round(float(nll[0]), 4) if len(nll) else math.nan})


def validation(runs: Runs, run: Run, scale: Scale) -> Measured:
    """Returns the validation NLL, and the updates after which it was measured."""
    evaluations = run.history.evaluations
    return Measured(series={"evaluated": brief(evaluations.update), "validation": brief(evaluations.nll)})


def start(runs: Runs, run: Run, scale: Scale) -> Measured:
    """Returns the first, the median and the largest gradient norm of the first `START` updates, and the training NLL of
    the last of these updates."""
    norms, nll = run.history.grad_norm[:START], run.history.nll[:START]
    if not len(norms):
        return Measured()
    numbers = norms[0], np.median(norms), np.max(norms), nll[-1]
    names = "first_norm", "median_norm", "largest_norm", "last_nll"
    return Measured({name: round(float(number), 4) for name, number in zip(names, numbers)})


def kept_of_log(run: Run) -> Content:
    """Returns the numbers of a run's log that are kept beside the table."""
    return of_log(run.history.evaluations, run.verdict["unigram_entropy"])


def perplexity(runs: Runs, run: Run, scale: Scale) -> Measured:
    """Returns the best validation perplexity, the unigram model's perplexity, and their ratio."""
    return Measured(made.perplexity(kept_of_log(run)))


def loss(runs: Runs, run: Run, scale: Scale) -> Measured:
    """Returns the last label-smoothed validation loss."""
    return Measured(made.loss(kept_of_log(run)))


def growth(runs: Runs, run: Run, scale: Scale) -> Measured:
    """Returns, for a language model's last checkpoint on the validation set, the mean |x| of the residual stream before
    the first layer and after each layer, and the last of these over the first. The column is "" if the run did not
    reach its end."""
    if not run.has_ended:
        return Measured({"growth": ""})
    sizes = observations.layers(run.output, "last", None, str(run.files["valid_target"]))["size-decoder"]
    return Measured({"growth": round(sizes[-1] / sizes[0], 4)}, {"sizes": sizes})


def bleu_curve(runs: Runs, run: Run, scale: Scale) -> Measured:
    """Returns BLEU on the validation set at each evaluation, by greedy search, and the best of these."""
    return Measured(made.best_bleu(kept_of_log(run)), observations.bleu(run.history))


def raw_gradients(runs: Runs, run: Run, scale: Scale) -> Measured:
    """Returns every gradient norm of the run, before clipping, and their median and maximum."""
    norms = run.history.grad_norm
    if not len(norms):
        return Measured()
    numbers = {"median_norm": round(float(np.median(norms)), 4), "largest_norm": round(float(np.max(norms)), 4)}
    return Measured(numbers, observations.gradient_norms(run.history))


def gains(runs: Runs, run: Run, scale: Scale) -> Measured:
    """Returns the learned g of the ScaleNorms: for each kind of sublayer a series over the layers. The table gets two
    columns: the largest g of all, and the g of the decoder's final norm."""
    series = observations.gains(run.output, _checkpoint(run, scale))
    largest = max(g for by_layer in series.values() for g in by_layer)
    return Measured({"largest_gain": round(largest, 3), "final_gain": round(series["gain-final"][0], 3)}, series)


def singular(runs: Runs, run: Run, scale: Scale) -> Measured:
    """Returns the singular values of the target embedding, divided by the largest, and the shares of them that are
    above 0.5 and above 0.1."""
    series = observations.singular_values(run.output, _checkpoint(run, scale))
    values = np.array(series["singular"])
    shares = {name: round(float((values > bound).mean()), 4) for name, bound in (("half", 0.5), ("tenth", 0.1))}
    return Measured(shares, series)


def statistics(runs: Runs, run: Run, scale: Scale) -> Measured:
    """Returns statistics of the encoder's first norm over training, as `log_statistics` logs them: the distance of a
    batch's statistics from the running ones, and the part of the input's gradient that flows through the batch's
    statistics. The columns are means over the second half of the run."""
    series = observations.statistics(run.history)
    if not series:
        return Measured({"distance": "", "gradient": "", "bleu_valid": ""})

    def late_mean(kind: str) -> float:
        """Returns the mean over the second half of the run, of all series of the kind "distance" or "gradient"."""
        halves = [values[len(values) // 2 :] for name, values in series.items() if name.startswith(f"{kind}-")]
        return float(f"{np.mean([np.mean(half) for half in halves]):.4g}")

    means = {"distance": late_mean("distance"), "gradient": late_mean("gradient")}
    return Measured({**means, **made.last_bleu(kept_of_log(run))}, series)


def layers(runs: Runs, run: Run, scale: Scale) -> Measured:
    """Returns, for the last checkpoint on the validation set, the cosine between each layer's output and that of the
    layer before, and the share of active units in each feed-forward sublayer. The columns are their means, "" if the
    run did not reach its end."""
    if not run.has_ended:
        return Measured({"cosine": "", "active": ""})
    source, target = (str(run.files[f"valid_{side}"]) for side in ("source", "target"))
    observed = observations.layers(run.output, "last", source, target)
    series = {name: numbers for name, numbers in observed.items() if not name.startswith("size-")}

    def mean(kind: str) -> float:
        """Returns the mean of all numbers in the series of a kind."""
        numbers = [number for name, values in series.items() if name.startswith(kind) for number in values]
        return round(float(np.mean(numbers)), 4)

    return Measured({kind: mean(kind) for kind in ("cosine", "active")}, series)


def growth_curve(runs: Runs, run: Run, scale: Scale) -> Measured:
    """Returns α_t of BranchNorm over the run's updates."""
    steps, curve = run.row.options["branchnorm_steps"], run.row.options["branchnorm_growth"]
    updates = range(1, len(run.history.update) + 1)
    alphas = [float(_core.growth(steps, curve, torch.tensor([t]))) for t in updates]
    return Measured(series={"alpha": [float(f"{alpha:.5g}") for alpha in alphas]})


def smoothed(runs: Runs, run: Run, scale: Scale) -> Measured:
    """Returns e^loss, with the label-smoothed loss without dropout, of training and test text, and the ratio
    test/training."""
    if not run.has_ended:
        return Measured(made.smoothed({}))
    kept = {"losses": {part: _losses(run, part, _checkpoint(run, scale)) for part in ("train", "test")}}
    return Measured(made.smoothed(kept), series={}, kept=kept)


def _losses(run: Run, part: str, checkpoint: str) -> list[float]:
    """Returns `_sums` of the first `_SCORED` pairs of a part ("train" or "test"). The pairs are written to temporary
    files, because the measurement reads files."""
    files = [run.output / f"{part}.{side}.scored.txt" for side in ("source", "target")]
    for file, side in zip(files, ("source", "target")):
        text.write_lines(str(file), text.read_lines(str(run.files[f"{part}_{side}"]))[:_SCORED])
    sums = _sums(evaluate_loss(run.output, *files, checkpoint=checkpoint))
    for file in files:
        file.unlink()
    return sums


def _sums(means: Perplexity) -> list[float]:
    """Returns the sum of the loss, the sum of the NLL and the number of tokens."""
    return [means.loss * means.tokens, means.nll * means.tokens, means.tokens]


def test_perplexity(runs: Runs, run: Run, scale: Scale) -> Measured:
    """Returns the perplexity of a language model's best checkpoint on the test text, and the best perplexity on the
    validation set."""
    if not run.has_ended:
        return Measured(made.test_perplexity(kept_of_log(run)))
    # A language model's text has no source.
    kept = {"losses": {"test": _sums(evaluate_loss(run.output, None, run.files["test_target"]))}}
    return Measured(made.test_perplexity({**kept_of_log(run), **kept}), series={}, kept=kept)


def _checkpoint(run: Run, scale: Scale) -> str:
    """Returns "best" if the scale translates with the best checkpoint. Otherwise returns "last", because averaged
    checkpoints are made for translation only."""
    return "best" if scale.checkpoint == "best" else "last"


_MEASURES = (
    *(bleu, gradients, losses, first, validation, start, perplexity, loss, growth, bleu_curve, raw_gradients, gains),
    *(singular, statistics, layers, growth_curve, smoothed, test_perplexity),
)
MEASURES: dict[str, Callable[[Runs, Run, Scale], Measured]] = {measure.__name__: measure for measure in _MEASURES}
