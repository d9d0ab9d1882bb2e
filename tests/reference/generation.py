"""Continues texts with a language model, and measures its loss on long texts, token by token (docs/spec.md §4.13,
§4.17)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import Config
from .model import log_probabilities
from .operators import EOS
from .parameters import State


def choices(log_p: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """Returns the probabilities (V,) from which a next token is drawn, after temperature, top-k and top-p.

    Tokens are sorted by probability; of equally probable tokens that with the lower id comes first (Fan et al. 2018 for
    top-k; Holtzman et al. 2020, eq 2, 3).
    """
    order = sorted(range(len(log_p)), key=lambda token: (-float(log_p[token]), token))
    kept = order[: len(order) if top_k is None else top_k]
    shares = torch.softmax(log_p[kept] / temperature, -1)
    size = next((n for n in range(1, len(kept)) if float(shares[:n].sum()) >= top_p), len(kept))
    found = torch.zeros_like(log_p)
    found[kept[:size]] = shares[:size] / shares[:size].sum()
    return found


def window_of(tokens: Sequence[int], context: int) -> list[int]:
    """Returns the tokens of a text that the model reads: all if they fit into `context`. Otherwise half contexts are
    dropped from the beginning, as few as possible."""
    begin = 0
    while len(tokens) - begin > context:
        begin += max(1, context // 2)
    return [*tokens[begin:]]


def next_log_p(state: State, config: Config, text: Sequence[int], context: int, mask: Tensor | None) -> Tensor:
    """Returns log p (V,) of the token that follows a text. EOS is put before the text."""
    read = torch.tensor([window_of([EOS, *text], context)])
    return log_probabilities(state, config, None, read, mask)[0, -1]


def greedy_text(
    state: State,
    config: Config,
    prompt: Sequence[int],
    *,
    context: int,
    max_length: int,
    sentences: int,
    mask: Tensor | None = None,
) -> tuple[list[int], float]:
    """Returns the new tokens, each of which is the most probable one, and the sum of their log p."""
    made: list[int] = []
    total = 0.0
    while len(made) < max_length and not 0 < sentences <= made.count(EOS):
        log_p = next_log_p(state, config, [*prompt, *made], context, mask)
        made.append(int(log_p.argmax()))
        total += float(log_p[made[-1]])
    return made, total


def window_losses(
    state: State, config: Config, tokens: Sequence[int], window: int, stride: int, mask: Tensor | None = None
) -> list[float]:
    """Returns −log p of each token of a text. Windows begin at 0, stride, 2·stride, …; a token is scored in the first
    window that contains it."""
    found = []
    for place, token in enumerate(tokens):
        begin = 0
        while place >= begin + window:
            begin += stride
        read = [EOS if begin == 0 else tokens[begin - 1], *tokens[begin:place]]
        found.append(-float(log_probabilities(state, config, None, torch.tensor([read]), mask)[0, -1, token]))
    return found
