"""Figures computed from a run's kept numbers, both by measures.py and by `reproduce NAME --recompute`."""

import math
from collections.abc import Callable, Iterable

from .declared import Options
from .kept import Told


def perplexity(told: Told) -> Options:
    """Returns the best validation perplexity, and the unigram model's."""
    best, unigram = _best_perplexity(told), _exp(told["unigram_entropy"])
    return {"perplexity": round(best, 2), "unigram": round(unigram, 2), "ratio": round(best / unigram, 4)}


def test_perplexity(told: Told) -> Options:
    """Returns a language model's perplexity of test text, and its best of the validation set; "" without them."""
    best = round(_best_perplexity(told), 2) if told["evaluations"]["perplexity"] else ""
    if "losses" not in told:
        return {"test_perplexity": "", "perplexity": best}
    _, nll = _means(told["losses"]["test"])
    return {"test_perplexity": round(_exp(nll), 2), "perplexity": best}


def loss(told: Told) -> Options:
    """Returns the last validation loss, smoothed."""
    losses = told["evaluations"]["loss"]
    return {"valid_loss": round(losses[-1], 4) if losses else math.nan}


def valid_nll(told: Told) -> Options:
    """Returns the last validation NLL, as a run's verdict has it."""
    losses = told["evaluations"]["nll"]
    return {"valid_nll": round(losses[-1] if losses else math.nan, 4)}


def best_bleu(told: Told) -> Options:
    """Returns the best BLEU of the validation set."""
    found = [bleu for bleu in told["evaluations"]["bleu"] if math.isfinite(bleu)]
    return {"best_bleu": round(max(found), 2) if found else ""}


def last_bleu(told: Told) -> Options:
    """Returns the last BLEU of the validation set."""
    found = told["evaluations"]["bleu"]
    return {"bleu_valid": round(found[-1], 2) if found and math.isfinite(found[-1]) else ""}


def smoothed(told: Told) -> Options:
    """Returns exponentials of the label-smoothed loss of training and test text, and their ratio; "" without them."""
    if "losses" not in told:
        return {"train_perplexity": "", "test_perplexity": "", "gap": ""}
    train, test = (_exp(_means(told["losses"][part])[0]) for part in ("train", "test"))
    return {"train_perplexity": round(train, 3), "test_perplexity": round(test, 3), "gap": round(test / train, 4)}


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def _best_perplexity(told: Told) -> float:
    found = told["evaluations"]["perplexity"]
    return min(found) if found and not any(map(math.isnan, found)) else math.nan


def _means(sums: list[float]) -> tuple[float, float]:
    """Returns loss and NLL per token of text, from its sums of both and its tokens."""
    loss, nll, tokens = sums
    return loss / tokens, nll / tokens


FIGURES: dict[str, Callable[[Told], Options]] = {
    "perplexity": perplexity,
    "test_perplexity": test_perplexity,
    "loss": loss,
    "bleu_curve": best_bleu,
    "statistics": last_bleu,
    "smoothed": smoothed,
}
"""The figures of each measure that are made of numbers alone."""


def is_kept(measures: Iterable[str]) -> bool:
    """True if translations, losses or the log's evaluations are enough for a figure of these measures."""
    return not {"bleu", *FIGURES}.isdisjoint(measures)
