"""Text generation with language models, and their perplexity on long texts."""

from collections.abc import Callable, Iterable
from os import PathLike, fspath
from typing import NamedTuple

from .. import _core
from ..config import GenerationConfig
from ..errors import InputError
from ..text import check_lines

Listener = Callable[[int, int, str | None], None]
"""A function that gets the prompt's index, the sample's index and the new text; None instead of text marks its end."""


class Generation(NamedTuple):
    """A continuation of a prompt by a language model."""

    text: str
    """The generated text, to be appended to the prompt; it begins with a space if it begins with a new word."""
    log_probability: float
    """The sum of log p of the new tokens, at temperature 1 and over all tokens."""
    tokens: int
    """The number of new tokens: pieces, and ends of sentence."""
    finished: bool
    """True if the text has the requested number of ends of sentence; False if max_length ended it."""


class WindowPerplexity(NamedTuple):
    """The perplexity of a language model on a text, read through a sliding window."""

    nll: float
    """Cross-entropy in nats per token."""
    perplexity: float
    """e^nll."""
    tokens: int
    """The number of pieces, plus an end for each line."""
    words: int
    """The number of words between white space, plus an end for each line."""
    word_perplexity: float
    """e^(nll·tokens/words); inf if that exceeds the largest float, as it may in a language without spaces."""
    lines: int
    characters: int
    """The number of characters, plus an end for each line."""
    bits_per_character: float
    """nll·tokens/(characters·ln 2)."""


def generate(
    model: str | PathLike[str],
    prompts: Iterable[str],
    generation: GenerationConfig | None = None,
    *,
    on_text: Listener | None = None,
    checkpoint: str | int = "best",
    max_tokens: int = 8192,
    precision: str = "f32",
    device: str = "cpu",
) -> list[list[Generation]]:
    """Returns, for each prompt, the `generation.samples` texts with which a language model continues it.

    A next token is drawn from softmax(logits/temperature), cut to the `top_k` most probable tokens and then to the
    fewest of them with the probability `top_p` (Holtzman et al. 2020, eq 2 and 3). Temperature 0 takes the most
    probable token. A text's random draws depend only on the seed, the prompt and the sample's index, and not on other
    prompts or on how prompts share batches.

    Args:
        model: the `output` of training.
        prompts: beginnings of texts; a newline is an end of sentence, and "" is the beginning of a text.
        generation: the options; default `GenerationConfig()`.
        on_text: called with new text while it comes, as (prompt, sample, text); text is None when that text is over. A
            word may come in several parts.
        checkpoint: best, last, average, or an update's number.
        max_tokens: the tokens of all windows in a batch together; a larger number needs more memory and is faster.
        precision: f32 or bf16.
        device: cpu, cuda, cuda:N, or auto, which is cuda if there is one.

    Errors: InputError for a model with an encoder, a missing or damaged checkpoint, and numbers out of range;
    Interrupted after Ctrl-C, between two tokens; any error that `on_text` raises.
    """
    options = (generation or GenerationConfig()).to_json()
    # One text would become a list of characters, so it stays a text, which `check_lines` refuses.
    given = prompts if isinstance(prompts, str | bytes) else list(prompts)
    check_lines("prompts", given)
    if not 1 <= max_tokens < 2**63:
        raise InputError(f"max_tokens must be at least 1, and below 2⁶³; got {max_tokens}")
    arguments = (options, on_text, str(checkpoint), max_tokens, precision, device)
    texts_by_prompt = _core.generate(fspath(model), list(given), *arguments)
    return [[Generation(*text) for text in texts] for texts in texts_by_prompt]


def evaluate_windows(
    model: str | PathLike[str],
    text: str | PathLike[str],
    *,
    window: int | None = None,
    stride: int | None = None,
    checkpoint: str | int = "best",
    precision: str = "f32",
    device: str = "cpu",
) -> WindowPerplexity:
    """Returns the perplexity of the file `text` under a language model that reads it through a sliding window.

    Windows of `window` predicted tokens begin every `stride` tokens. Each token is scored once, in the first window
    that contains it: after at least `window` − `stride` tokens of context, or all of the text before it. A smaller
    stride gives each token more context and takes more time.

    Args:
        model: the `output` of training.
        text: a file in UTF-8, plain or gzip.
        window: the number of predicted tokens; None for the run's segment_length.
        stride: from 1 to `window`; None for half of the window.
        checkpoint: best, last, average, or an update's number.
        precision: f32 or bf16.
        device: cpu, cuda, cuda:N, or auto, which is cuda if there is one.

    Errors: InputError for a model with an encoder, a missing checkpoint or file, and numbers out of range; Interrupted
    after Ctrl-C, between batches.
    """
    for name, number in (("window", window), ("stride", stride)):
        if number is not None and not 1 <= number < 2**63:
            raise InputError(f"{name} must be at least 1, and below 2⁶³; got {number}")
    given = fspath(model), fspath(text), window, stride, str(checkpoint), precision, device
    return WindowPerplexity(*_core.evaluate_windows(*given))
