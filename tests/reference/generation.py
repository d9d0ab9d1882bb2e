"""Texts that a language model continues, and its loss on long ones, token by token (docs/spec.md §4.13, §4.17)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import Config
from .model import log_probabilities
from .operators import EOS
from .parameters import State


def choices(log_p: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """The probabilities (V,) from which a next token is drawn: temperature, then top-k, then top-p, everything sorted.

    Of equal tokens the lower id is the more probable one (Fan et al. 2018 for top-k; Holtzman et al. 2020, eq 2, 3).
    """
    order = sorted(range(len(log_p)), key=lambda token: (-float(log_p[token]), token))
    kept = order[: len(order) if top_k is None else top_k]
    shares = torch.softmax(log_p[kept] / temperature, -1)
    size = next((n for n in range(1, len(kept)) if float(shares[:n].sum()) >= top_p), len(kept))
    found = torch.zeros_like(log_p)
    found[kept[:size]] = shares[:size] / shares[:size].sum()
    return found


def window_of(tokens: Sequence[int], context: int) -> list[int]:
    """What the model reads of a text: all, or from as few half windows on as make it fit."""
    begin = 0
    while len(tokens) - begin > context:
        begin += max(1, context // 2)
    return [*tokens[begin:]]


def next_log_p(state: State, config: Config, text: Sequence[int], context: int, mask: Tensor | None) -> Tensor:
    """log p (V,) of the token after a text, before which stands EOS."""
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
    """The new tokens, each the most probable one, and their Σ log p."""
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
    """−log p of each token of a text, in the first of the windows 0, stride, 2·stride, … that has it."""
    found = []
    for place, token in enumerate(tokens):
        begin = 0
        while place >= begin + window:
            begin += stride
        read = [EOS if begin == 0 else tokens[begin - 1], *tokens[begin:place]]
        found.append(-float(log_probabilities(state, config, None, torch.tensor([read]), mask)[0, -1, token]))
    return found
