"""Computes Adam, clipping, learning rates and one training step (docs/spec.md §4.7 to §4.10).

TwT is Nguyen & Salazar 2019.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .config import Config, complete
from .model import Dropout, Run
from .operators import PAD, label_smoothed_cross_entropy
from .parameters import State, buffer_shapes


@dataclasses.dataclass
class Adam:
    """Adam: θ ← θ − lr·wd·θ − lr·√(1−β₂ᵗ)/(1−β₁ᵗ)·m/(√v+ε), fairseq's form of Kingma & Ba 2015 §2; decay is decoupled.

    m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g². Every parameter decays, norms and biases too. The form "torch" is their
    algorithm 1, as torch.optim has it: … − lr·m̂/(√v̂+ε), m̂ = m/(1−β₁ᵗ), v̂ = v/(1−β₂ᵗ).
    """

    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.0
    form: str = "fairseq"
    updates: int = 0
    first: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    second: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    def step(self, state: State, grads: Mapping[str, Tensor], lr: float) -> dict[str, Tensor]:
        """Returns the parameters after one update."""
        self.updates += 1
        b1, b2 = self.betas
        rest1, rest2 = 1 - b1**self.updates, 1 - b2**self.updates
        after = {}
        for name, grad in grads.items():
            self.first[name] = b1 * self.first.get(name, torch.zeros_like(grad)) + (1 - b1) * grad
            self.second[name] = b2 * self.second.get(name, torch.zeros_like(grad)) + (1 - b2) * grad**2
            decayed = state[name] - lr * self.weight_decay * state[name]
            if self.form == "torch":
                moved = self.first[name] / rest1 / ((self.second[name] / rest2).sqrt() + self.eps)
            else:
                moved = math.sqrt(rest2) / rest1 * self.first[name] / (self.second[name].sqrt() + self.eps)
            after[name] = (decayed - lr * moved).detach()
        return after


def clip_by_global_norm(grads: Mapping[str, Tensor], max_norm: float) -> tuple[dict[str, Tensor], float]:
    """Returns g·min(1, max_norm/(‖g‖₂+1e-6)) and ‖g‖₂, the norm of all gradients together, as torch and fairseq do. A
    `max_norm` of 0 does not clip."""
    norm = math.sqrt(sum(float((grad.double() ** 2).sum()) for grad in grads.values()))
    factor = min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
    return {name: grad * factor for name, grad in grads.items()}, norm


def inverse_sqrt_lambda(n: int, d_model: int, warmup_updates: int, scale: float = 1.0) -> float:
    """Returns the rate λ/√d·min(1/√n, n/n_w^{1.5}), with n = 1 for the first update (TwT eq 7). `2x-lr` is λ = 2."""
    return scale / math.sqrt(d_model) * min(n**-0.5, n / warmup_updates**1.5)


def inverse_sqrt_peak(
    n: int, peak: float, warmup_updates: int, warmup_init_lr: float = 0.0, count_from_zero: bool = False
) -> float:
    """Returns a rate that is linear from warmup_init_lr to the peak over n_w updates, then peak·√(n_w/n); it is
    constant for n_w = 0.

    n = 1 for the first update; with `count_from_zero` the first update has n = 0 in the formula, as in fairseq.
    """
    if warmup_updates == 0:
        return peak
    n = n - 1 if count_from_zero else n
    if n < warmup_updates:
        return warmup_init_lr + (peak - warmup_init_lr) * n / warmup_updates
    return peak * math.sqrt(warmup_updates / n)


def t_fixup_decay(n: int, lr: float, period: int = 4000) -> float:
    """Returns the rate lr·√(P/(P+n)), without warm-up (T-Fixup)."""
    return lr * math.sqrt(period / (period + n))


@dataclasses.dataclass
class ValDecay:
    """A schedule with linear warm-up to the peak. The peak is multiplied by 0.8 whenever an evaluation's score is below
    those of the three evaluations before it.

    `no-warmup` is `ValDecay(3e-4, warmup_updates=0)`. Evaluations during warm-up (n < n_w) are remembered but do not
    change the rate. This is the rule of TwT's release.
    """

    peak: float
    warmup_updates: int = 0
    warmup_init_lr: float = 0.0
    factor: float = 0.8
    patience: int = 3
    scores: list[float] = dataclasses.field(default_factory=list)

    def learning_rate(self, n: int) -> float:
        """Returns the rate of update n = 1, 2, …"""
        if n < self.warmup_updates:
            return self.warmup_init_lr + (self.peak - self.warmup_init_lr) * n / self.warmup_updates
        return self.peak

    def evaluated(self, n: int, bleu: float) -> None:
        """Records the score of the evaluation after update n, and lowers the peak if the rule says so."""
        before = self.scores[-self.patience :]
        self.scores.append(bleu)
        if n >= self.warmup_updates and len(before) == self.patience and bleu < min(before):
            self.peak *= self.factor


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of padded integer tensors: source (B, S) or None, target_input (B, T), target (B, T)."""

    source: Tensor | None
    target_input: Tensor
    target: Tensor


@dataclasses.dataclass(frozen=True)
class Step:
    """The results of one update: the new state with its buffers, loss and NLL per token, the number of tokens, the
    gradients and their norm before clipping, and the largest logit of each head by the name of its attention."""

    state: dict[str, Tensor]
    loss: float
    nll: float
    tokens: int
    grads: dict[str, Tensor]
    grad_norm: float
    largest: dict[str, Tensor]


def train_step(
    state: State,
    config: Config,
    micro_batches: Sequence[Batch],
    optimizer: Adam,
    lr: float,
    *,
    smoothing: float = 0.1,
    formula: str = "fairseq",
    vocabulary_mask: Tensor | None = None,
    max_norm: float = 0.0,
    qk_clip: float = 0.0,
    dropout: Dropout | None = None,
) -> Step:
    """Makes one update: forward, Σ smoothed loss / Σ non-pad targets over all micro-batches, backward, clip, Adam,
    QK-clip.

    `dropout` holds this update's number; its micro_batch is set to 0, 1, … here. Before the k-th update BranchNorm's t
    is set to k. Running statistics change with each micro-batch, those of PowerNorm only with the update's last one.
    """
    buffers = {name: state[name].clone() for name in buffer_shapes(config)}
    for name, buffer in buffers.items():
        if name.endswith(".t"):
            buffer.fill_(optimizer.updates + 1)
    leaves = {name: value.detach().clone().requires_grad_() for name, value in state.items() if name not in buffers}
    tokens = sum(int((batch.target != PAD).sum()) for batch in micro_batches)
    total = total_nll = 0.0
    grads = {name: torch.zeros_like(value) for name, value in leaves.items()}
    largest: dict[str, Tensor] = {}
    for index, batch in enumerate(micro_batches):
        here = dataclasses.replace(dropout or Dropout(), micro_batch=index)
        is_partial = index < len(micro_batches) - 1
        steps = {name.rpartition(".")[0] for name in buffers if name.endswith(".iters")} if is_partial else set()
        moving = {name: b.clone() if name.rpartition(".")[0] in steps else b for name, b in buffers.items()}
        run = Run({**leaves, **moving}, config, here)
        logits = run.logits(batch.source, batch.target_input)
        largest = {name: torch.maximum(found, largest.get(name, found)) for name, found in run.largest.items()}
        loss, nll = label_smoothed_cross_entropy(logits, batch.target, smoothing, formula, vocabulary_mask)
        parts = torch.autograd.grad(loss / tokens, list(leaves.values()))
        grads = {name: grad + part for (name, grad), part in zip(grads.items(), parts, strict=True)}
        total, total_nll = total + loss.item(), total_nll + nll.item()
    clipped, norm = clip_by_global_norm(grads, max_norm)
    after = {**optimizer.step(state, clipped, lr), **buffers}
    after = clip_queries_and_keys(after, config, largest, qk_clip)
    return Step(after, total / tokens, total_nll / tokens, tokens, grads, norm, largest)


def clip_queries_and_keys(
    state: State, config: Config, largest: Mapping[str, Tensor], limit: float
) -> dict[str, Tensor]:
    """Returns the state with W_q^h, W_k^h and their biases multiplied by √min(1, τ/S_h) in each head h. Heads that
    share keys have one S, their largest. A `limit` of 0 does not clip."""
    config = complete(config)
    size, after = config["d_model"] // config["heads"], dict(state)
    shared = config["heads"] // config["kv_heads"]
    for name, of_heads in largest.items():
        for leaf in ("in_proj_weight", "in_proj_bias"):
            if f"{name}.{leaf}" not in state or limit == 0:
                continue
            t = state[f"{name}.{leaf}"].clone()
            for group in range(config["kv_heads"]):
                top = max(of_heads[group * shared : (group + 1) * shared].tolist())
                gamma = limit / top if top > limit else 1.0
                for head in range(group * shared, (group + 1) * shared):
                    t[head * size : (head + 1) * size] *= math.sqrt(gamma)
                first = config["d_model"] + group * size
                t[first : first + size] *= math.sqrt(gamma)
            after[f"{name}.{leaf}"] = t
    return after
