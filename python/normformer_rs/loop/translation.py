"""Functions that use a trained model: translation, checkpoint averaging, perplexity."""

from collections.abc import Iterable, Sequence
from os import PathLike, fspath
from typing import Any, NamedTuple

from .. import _core
from ..config import SearchConfig
from ..errors import InputError
from ..text import check_lines


class Translation(NamedTuple):
    """A hypothesis of the search."""

    text: str
    """The words, with subword pieces joined."""
    score: float
    """The score by the search's rule; higher is better."""
    finished: bool = True
    """True if the model ended the translation; False if `max_length`, the rule's limit or the model's maximum length
    cut it off."""


class Perplexity(NamedTuple):
    """The perplexity of a model on a text, per target token."""

    loss: float
    """The label-smoothed cross-entropy in nats."""
    nll: float
    """The cross-entropy in nats."""
    perplexity: float
    """e^nll; inf if that exceeds the largest float."""
    tokens: int


class Binarised(NamedTuple):
    """The source side of a split of fairseq's binarised folder."""

    folder: str | PathLike[str]
    """The --destdir of fairseq-preprocess."""
    split: str = "test"
    source_lang: str | None = None
    """The source language; None for the one in the files' names."""
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
    """Returns, for each line, the `search.n_best` best translations, best first.

    Args:
        model: the `output` of training.
        lines: source text, cut into subwords as in training, or fairseq's binarised folder.
        search: the options; default `SearchConfig()`.
        checkpoint: best, last, average, or an update's number.
        max_tokens: the number of padded source tokens in a batch, which changes memory and speed, but no translation.
        precision: f32 or bf16.
        device: cpu, cuda, cuda:N, or auto, which is cuda if there is one.

    Errors: InputError for a missing or damaged checkpoint or folder; Interrupted after Ctrl-C, between batches.
    """
    options = (search or SearchConfig()).to_json()
    # Binarised text is passed on as the tuple (folder, split, source_lang, target_lang).
    source: Any = (fspath(lines.folder), *lines[1:]) if isinstance(lines, Binarised) else _sentences(lines)
    if not 1 <= max_tokens < 2**63:
        raise InputError(f"max_tokens must be from 1 to 2⁶³ − 1, got {max_tokens}")
    by_line = _core.translate(fspath(model), source, options, str(checkpoint), max_tokens, precision, device)
    return [[Translation(*hypothesis) for hypothesis in hypotheses] for hypotheses in by_line]


def _sentences(lines: Iterable[str]) -> list[str]:
    """Returns the lines as a list. Errors: InputError for one text instead of lines, and for a line that is no text."""
    # One text would become a list of characters, so it stays a text, which `check_lines` refuses.
    sentences = lines if isinstance(lines, str | bytes) else list(lines)
    check_lines("lines", sentences)
    return list(sentences)


def average(model: str | PathLike[str], *, last: int | None = None, updates: Sequence[int] | None = None) -> str:
    """Averages the parameters of the `last` checkpoints, or of the checkpoints of the given updates, and saves them as
    the checkpoint "average".

    Returns its path. Errors: InputError if there are fewer checkpoints, and for numbers out of range.
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
    """Returns the perplexity of the file `target`, given the file `source` (None for a language model).

    Errors: InputError for a missing checkpoint or files of different length; Interrupted after Ctrl-C, between batches.
    """
    source = None if source is None else fspath(source)
    return Perplexity(*_core.evaluate_loss(fspath(model), source, fspath(target), str(checkpoint), precision, device))
