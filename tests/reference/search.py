"""Greedy and beam search (docs/spec.md §4.12), one sentence at a time, without a cache.

PAD and BOS are never generated. Of equally good candidates that of the better hypothesis comes first, then that with
the lower token id.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .config import Config
from .model import log_probabilities
from .operators import BOS, EOS, PAD
from .parameters import State

RULES = ("google", "fairseq")


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A hypothesis: its tokens (with EOS if it is finished), the sum of their log p, and the length-normalised score by
    which hypotheses are ranked."""

    tokens: tuple[int, ...] = ()
    log_probability: float = 0.0
    score: float = 0.0

    @property
    def finished(self) -> bool:
        return self.tokens[-1:] == (EOS,)


# A function that gets hypotheses and a number n, and returns the n best continuations of each hypothesis. Impossible
# continuations are left out.
Candidates = Callable[[list[Hypothesis], int], list[list[Hypothesis]]]


def length_penalty(rule: str, length: int, alpha: float) -> float:
    """Returns the divisor of Σ log p: ((5+len)/6)^α for google (Wu et al. 2016, eq 14), len^α for fairseq. len counts
    EOS."""
    if rule == "google":
        return ((5 + length) / 6) ** alpha
    if rule == "fairseq":
        return length**alpha
    raise ValueError(f"unknown rule {rule!r}; the rules are {', '.join(RULES)}")


def greedy(
    state: State,
    config: Config,
    source: Sequence[int] | None,
    *,
    rule: str = "google",
    alpha: float | None = None,
    max_length: int | None = None,
    vocabulary_mask: Tensor | None = None,
) -> Hypothesis:
    """Returns the hypothesis that always takes the most probable next token, within the rule's limits on length."""
    alpha, limit = _settings(rule, alpha, source, max_length)
    best = Hypothesis()
    while not best.finished and len(best.tokens) < limit:
        (log_p,) = _next(state, config, source, [best], vocabulary_mask)
        log_p = _limited(log_p, rule, len(best.tokens), limit)
        token = int(log_p.argmax())
        best = _extended(best, token, float(log_p[token]), rule, alpha)
    return best


def beam_search(
    state: State,
    config: Config,
    source: Sequence[int] | None,
    beam: int,
    *,
    rule: str = "google",
    alpha: float | None = None,
    max_length: int | None = None,
    vocabulary_mask: Tensor | None = None,
    n_best: int | None = None,
) -> list[Hypothesis]:
    """Returns the `n_best` best hypotheses, best first; by default all that were found, at most `beam`.

    `alpha` defaults to 0.6 (google), 1.0 (fairseq); `max_length` to the source's tokens + 50 (google, EOS included) and
    200 (fairseq, EOS not included).
    """
    alpha, limit = _settings(rule, alpha, source, max_length)
    search = _google if rule == "google" else _fairseq

    def candidates(hypotheses: list[Hypothesis], count: int) -> list[list[Hypothesis]]:
        steps = _next(state, config, source, hypotheses, vocabulary_mask)
        groups = []
        for hypothesis, log_p in zip(hypotheses, steps, strict=True):
            values, tokens = _limited(log_p, rule, len(hypothesis.tokens), limit).sort(descending=True, stable=True)
            best = zip(values[:count].tolist(), tokens[:count].tolist(), strict=True)
            groups.append([_extended(hypothesis, token, v, rule, alpha) for v, token in best if v > -math.inf])
        return groups

    return search(candidates, beam, limit)[:n_best]


def _google(candidates: Candidates, beam: int, limit: int) -> list[Hypothesis]:
    """Returns the final beam of google's search. Finished hypotheses stay in the beam with their score. The search ends
    when all are finished, or have `limit` tokens."""
    hypotheses = [Hypothesis()]
    for _ in range(limit):
        growing = [hypothesis for hypothesis in hypotheses if not hypothesis.finished]
        if not growing:
            break
        grown = iter(candidates(growing, beam))
        pool = [c for hypothesis in hypotheses for c in ([hypothesis] if hypothesis.finished else next(grown))]
        hypotheses = sorted(pool, key=lambda hypothesis: -hypothesis.score)[:beam]
    return hypotheses


def _fairseq(candidates: Candidates, beam: int, limit: int) -> list[Hypothesis]:
    """Returns the final hypotheses of fairseq's search. In each step the 2·beam most probable candidates are taken.
    Those among the first `beam` that end in EOS are final; the first `beam` of those that do not end in EOS grow on.
    The search ends with `beam` final hypotheses, or at `limit`, where only EOS can follow."""
    growing, final = [Hypothesis()], []
    while growing and len(final) < beam:
        pool = [candidate for group in candidates(growing, 2 * beam) for candidate in group]
        pool = sorted(pool, key=lambda hypothesis: -hypothesis.log_probability)[: 2 * beam]
        final += [hypothesis for hypothesis in pool[:beam] if hypothesis.finished]
        growing = [hypothesis for hypothesis in pool if not hypothesis.finished][:beam]
    return sorted(final[:beam], key=lambda hypothesis: -hypothesis.score)


def _settings(
    rule: str, alpha: float | None, source: Sequence[int] | None, max_length: int | None
) -> tuple[float, int]:
    """Returns α, and the maximum number of tokens that can be generated, EOS included."""
    if rule == "google":
        if max_length is None:
            max_length = sum(token != PAD for token in source) + 50
        return 0.6 if alpha is None else alpha, max_length
    if rule == "fairseq":
        return 1.0 if alpha is None else alpha, (200 if max_length is None else max_length) + 1
    raise ValueError(f"unknown rule {rule!r}; the rules are {', '.join(RULES)}")


def _next(
    state: State,
    config: Config,
    source: Sequence[int] | None,
    hypotheses: list[Hypothesis],
    vocabulary_mask: Tensor | None,
) -> Tensor:
    """Returns log p (hypotheses, V) of the next token of each hypothesis; all hypotheses have the same length. It is −∞
    for PAD and BOS."""
    prefixes = torch.tensor([(BOS, *hypothesis.tokens) for hypothesis in hypotheses])
    sources = None if source is None else torch.tensor([list(source)] * len(hypotheses))
    with torch.no_grad():
        log_p = log_probabilities(state, config, sources, prefixes, vocabulary_mask)[:, -1].clone()
    log_p[:, [PAD, BOS]] = -math.inf
    return log_p


def _limited(log_p: Tensor, rule: str, length: int, limit: int) -> Tensor:
    """Returns log p with −∞ for tokens that are not allowed: EOS as the first token; under fairseq's rule all but EOS
    as the last token."""
    is_eos = torch.arange(len(log_p)) == EOS
    if length == 0:
        log_p = log_p.masked_fill(is_eos, -math.inf)
    if rule == "fairseq" and length == limit - 1:
        log_p = log_p.masked_fill(~is_eos, -math.inf)
    return log_p


def _extended(hypothesis: Hypothesis, token: int, log_p: float, rule: str, alpha: float) -> Hypothesis:
    total, length = hypothesis.log_probability + log_p, len(hypothesis.tokens) + 1
    return Hypothesis((*hypothesis.tokens, token), total, total / length_penalty(rule, length, alpha))
