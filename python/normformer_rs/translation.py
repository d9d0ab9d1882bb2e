"""Uses of a trained model: translation, averages over checkpoints, perplexity."""

from collections.abc import Iterable, Sequence
from os import PathLike, fspath
from typing import Any, NamedTuple

from . import _core
from .config import SearchConfig
from .errors import InputError
from .text import check_lines


class Translation(NamedTuple):
    """A hypothesis."""

    text: str
    """Words, subword pieces joined."""
    score: float
    """By the search's rule; higher is better."""
    finished: bool = True
    """The model ended it; otherwise `max_length`, the rule's or the model's greatest length did."""


class Perplexity(NamedTuple):
    """How well a model predicts a text, per target token."""

    loss: float
    """Label-smoothed cross-entropy, nats."""
    nll: float
    """Cross-entropy, nats."""
    perplexity: float
    """e^nll; inf where that is beyond all numbers."""
    tokens: int


class Binarised(NamedTuple):
    """The source side of a split of fairseq's binarised folder."""

    folder: str | PathLike[str]
    """The --destdir of fairseq-preprocess."""
    split: str = "test"
    source_lang: str | None = None
    """None: as the files' names have it."""
    target_lang: str | None = None


def translate(
    model: str | PathLike[str],
    lines: Iterable[str] | Binarised,
    search: SearchConfig | None = None,
    *,
    checkpoint: str | int = "best",
    max_tokens: int = 8192,
    precision: str = "f32",
    device: str = "cpu",
) -> list[list[Translation]]:
    """For each line the `search.n_best` best translations, best first.

    Args:
        model: the `output` of training.
        lines: source text, cut into subwords as in training, or fairseq's binarised folder.
        search: default: `SearchConfig()`.
        checkpoint: best, last, average, or an update's number.
        max_tokens: padded source tokens in a batch: memory for speed, the translations do not depend on it.
        precision: f32 or bf16.
        device: cpu, cuda, cuda:N, or auto: cuda where there is one.

    Errors: InputError for a missing or damaged checkpoint or folder; Interrupted after Ctrl-C, between batches.
    """
    options = (search or SearchConfig()).to_json()
    source: Any = (fspath(lines.folder), *lines[1:]) if isinstance(lines, Binarised) else _sentences(lines)
    if max_tokens < 1:
        raise InputError(f"max_tokens must be at least 1, got {max_tokens}")
    found = _core.translate(fspath(model), source, options, str(checkpoint), max_tokens, precision, device)
    return [[Translation(*hypothesis) for hypothesis in hypotheses] for hypotheses in found]


def _sentences(lines: Iterable[str]) -> list[str]:
    sentences = lines if isinstance(lines, str | bytes) else list(lines)
    check_lines("lines", sentences)
    return list(sentences)


def average(model: str | PathLike[str], *, last: int | None = None, updates: Sequence[int] | None = None) -> str:
    """Averages the parameters of the `last` checkpoints, or of those of the named updates, as checkpoint "average".

    Returns its path. Errors: InputError where there are fewer checkpoints, and for numbers out of range.
    """
    for name, number, least in (("last", last, 1), *(("updates", update, 0) for update in updates or ())):
        if number is not None and not least <= number < 2**63:
            raise InputError(f"{name} must be at least {least}, and below 2⁶³; got {number}")
    return _core.average(fspath(model), last, None if updates is None else list(updates))


def evaluate_loss(
    model: str | PathLike[str],
    source: str | PathLike[str] | None,
    target: str | PathLike[str],
    *,
    checkpoint: str | int = "best",
    precision: str = "f32",
    device: str = "cpu",
) -> Perplexity:
    """The perplexity of the file `target`, given the file `source` (None for a language model).

    Errors: InputError for a missing checkpoint or files of different length; Interrupted after Ctrl-C, between batches.
    """
    source = None if source is None else fspath(source)
    return Perplexity(*_core.evaluate_loss(fspath(model), source, fspath(target), str(checkpoint), precision, device))
