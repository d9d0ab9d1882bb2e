"""Computes figures from the numbers that are kept of a run. measures.py uses it after a run, remade.py for `reproduce
NAME --recompute`."""

import math
from collections.abc import Callable, Iterable

from .declared import Options
from .kept import Content


def perplexity(content: Content) -> Options:
    """Returns the best validation perplexity, the unigram model's perplexity, and their ratio."""
    best, unigram = _best_perplexity(content), _exp(content["unigram_entropy"])
    return {"perplexity": round(best, 2), "unigram": round(unigram, 2), "ratio": round(best / unigram, 4)}


def test_perplexity(content: Content) -> Options:
    """Returns a language model's perplexity on the test text and its best one on the validation set. Each is "" if it
    was not measured."""
    best = round(_best_perplexity(content), 2) if content["evaluations"]["perplexity"] else ""
    if "losses" not in content:
        return {"test_perplexity": "", "perplexity": best}
    _, nll = _means(content["losses"]["test"])
    return {"test_perplexity": round(_exp(nll), 2), "perplexity": best}


def loss(content: Content) -> Options:
    """Returns the last label-smoothed validation loss; NaN if there is none."""
    losses = content["evaluations"]["loss"]
    return {"valid_loss": round(losses[-1], 4) if losses else math.nan}


def valid_nll(content: Content) -> Options:
    """Returns the last validation NLL, the same number as in a run's verdict."""
    losses = content["evaluations"]["nll"]
    return {"valid_nll": round(losses[-1] if losses else math.nan, 4)}


def best_bleu(content: Content) -> Options:
    """Returns the best BLEU on the validation set; "" if it was never measured."""
    scores = [bleu for bleu in content["evaluations"]["bleu"] if math.isfinite(bleu)]
    return {"best_bleu": round(max(scores), 2) if scores else ""}


def last_bleu(content: Content) -> Options:
    """Returns the last BLEU on the validation set; "" if it was not measured."""
    scores = content["evaluations"]["bleu"]
    return {"bleu_valid": round(scores[-1], 2) if scores and math.isfinite(scores[-1]) else ""}


def smoothed(content: Content) -> Options:
    """Returns e^loss, with the label-smoothed loss, of training and test text, and the ratio test/training. Each is ""
    if the losses were not measured."""
    if "losses" not in content:
        return {"train_perplexity": "", "test_perplexity": "", "gap": ""}
    mean_losses = (_means(content["losses"][part])[0] for part in ("train", "test"))  # [0] is the loss, [1] the NLL
    train, test = map(_exp, mean_losses)
    return {"train_perplexity": round(train, 3), "test_perplexity": round(test, 3), "gap": round(test / train, 4)}


def _exp(x: float) -> float:
    """Returns e to the power x; infinity if that is too large for a float."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def _best_perplexity(content: Content) -> float:
    """Returns the lowest validation perplexity; NaN if there is none, or if one is NaN."""
    perplexities = content["evaluations"]["perplexity"]
    # NaN is looked for first, because min() of a list with NaN depends on the order of the list.
    return min(perplexities) if perplexities and not any(map(math.isnan, perplexities)) else math.nan


def _means(sums: list[float]) -> tuple[float, float]:
    """Returns loss and NLL per token, from their sums over a text and the number of its tokens."""
    loss, nll, tokens = sums
    return loss / tokens, nll / tokens


FIGURES: dict[str, Callable[[Content], Options]] = {
    "perplexity": perplexity,
    "test_perplexity": test_perplexity,
    "loss": loss,
    "bleu_curve": best_bleu,
    "statistics": last_bleu,
    "smoothed": smoothed,
}
"""For each measurement whose figures need no weights and no translations, the function that computes them."""


def is_kept(measures: Iterable[str]) -> bool:
    """Returns True if a figure of these measurements can be recomputed from the kept translations, losses or
    evaluations."""
    return not {"bleu", *FIGURES}.isdisjoint(measures)
