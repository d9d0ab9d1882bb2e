"""ReLU with dropout, attention and label-smoothed cross-entropy (docs/spec.md §4.3, §4.7), computed as their
equations."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .norms import computed

BOS, PAD, EOS, UNK = 0, 1, 2, 3


def relu_dropout(x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Returns y = max(x, 0)⊙mask·scale, whose slope at 0 is 0. `mask` is True where y is kept; None keeps all of y,
    without a scale."""
    y = torch.relu(computed(x))
    return (y if mask is None else y * mask * scale).to(x.dtype)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu2": lambda x: torch.where(x > 0, x * x, 0 * x),
}
ACTIVATIONS |= {"geglu": ACTIVATIONS["gelu"], "swiglu": ACTIVATIONS["silu"]}


def causal_mask(length: int) -> Tensor:
    """Returns a mask (length, length) that is True where query i may attend to key j, that is for j ≤ i."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None = None,
    keep: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns (softmax(q·kᵀ/√d_head)⊙keep·scale)·v (Vaswani et al. 2017, eq 1).

    With a `softcap` c, softmax is of c·tanh(s/c); with `sinks` b (heads,), of shares e^s/(Σ e^s + e^b).

    query (…, T, d_head), key and value (…, S, d_head); `allowed` (True: may attend) and `keep` (True: weight is kept)
    broadcast to (…, T, S). A query that may attend to nothing gets zero.
    """
    q, k, v = computed(query), computed(key), computed(value)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (…, T, S)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if allowed is not None:
        allowed = allowed.expand_as(scores)
        blind = ~allowed.any(-1, keepdim=True)
        scores = scores.masked_fill(~allowed & ~blind, -math.inf)
        weights = scores.softmax(-1).masked_fill(blind, 0.0)
    else:
        weights = scores.softmax(-1)
    if sinks is not None:  # scales the weights to e^s/(Σ e^s + e^b)
        weights = weights / (1 + torch.exp(sinks[:, None] - scores.logsumexp(-1))).unsqueeze(-1)
    if keep is not None:
        weights = weights * keep * scale
    return (weights @ v).to(query.dtype)


def masked_log_softmax(logits: Tensor, vocabulary_mask: Tensor | None = None) -> Tensor:
    """Returns log p_v over the target vocabulary V_t, whose entries are True in `vocabulary_mask` (V,). Outside V_t it
    is −∞."""
    z = computed(logits)
    if vocabulary_mask is not None:
        z = z.masked_fill(~vocabulary_mask, -math.inf)
    return z.log_softmax(-1)


def label_smoothed_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    smoothing: float = 0.1,
    formula: str = "fairseq",
    vocabulary_mask: Tensor | None = None,
    ignore_index: int = PAD,
) -> tuple[Tensor, Tensor]:
    """Returns (Σ smoothed loss, Σ NLL) over the targets that are not `ignore_index`; logits (…, V), targets (…).

    fairseq: (1−ε−ε_i)·NLL + ε_i·Σ_{v∈V_t}(−log p_v), ε_i = ε/(|V_t|−1); twt: (1−ε)·NLL + ε·Σ_{v∈V_t}(−log p_v)/|V_t|.
    """
    real = targets != ignore_index
    log_p = masked_log_softmax(logits[real], vocabulary_mask)  # (real, V)
    nll = -log_p.gather(-1, targets[real].unsqueeze(-1)).squeeze(-1)
    inside = log_p if vocabulary_mask is None else log_p[:, vocabulary_mask]  # (real, |V_t|)
    size = inside.shape[-1]
    uniform = -inside.sum(-1)
    if formula == "fairseq":
        each = smoothing / (size - 1)
        loss = (1 - smoothing - each) * nll + each * uniform
    elif formula == "twt":
        loss = (1 - smoothing) * nll + smoothing * uniform / size
    else:
        raise ValueError(f"unknown label smoothing {formula!r}; the formulas are fairseq, twt")
    return loss.sum(), nll.sum()
