"""The norms that keep statistics across rows and steps: BatchNorm, PN-V and PowerNorm, forward and backward.

They are defined in docs/spec.md §1.6 to §1.9. "PN eq 3" is equation 3 of the PowerNorm paper, Shen et al. 2020.

x is (…, d); pad_mask has x's leading shape and is True at padding. Only the B real positions count, and at padding
y = 0 and dx = 0 (except in PowerNorm's release mode). Each class updates its buffers in place: running statistics in
`forward`, ν in `backward`. `forward` returns what its own backward needs, so two forwards before one backward each keep
their own ψ. `norm(x, pad_mask, training)` is differentiable by autograd.

If a statistic is not finite in every feature, no buffer is updated. That is so, too, if there are no real positions.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .norms import DEFAULT_EPS, ROW_NORMS, computed, layer_norm, rms_norm

POWER_NORM_MODES = ("paper", "release")


@dataclasses.dataclass(frozen=True)
class Saved:
    """The tensors that a forward keeps for its backward, for the positions that count: x̂ (positions, d), the divisor
    `root` of x, and the mask of these positions.

    `is_exact` is True in PowerNorm's warm-up, where the gradient is that of PN-V.
    """

    x_hat: Tensor
    root: Tensor
    counted: Tensor
    is_exact: bool = False


class BatchStatisticsNorm:
    """The common base of the three norms. Each defines `forward` and `backward` itself."""

    def __init__(self, weight: Tensor, bias: Tensor, buffers: Mapping[str, Tensor], eps: float = DEFAULT_EPS) -> None:
        self.weight, self.bias, self.buffers, self.eps = weight, bias, buffers, eps

    def __call__(self, x: Tensor, pad_mask: Tensor | None = None, training: bool = True) -> Tensor:
        if training:
            return _Differentiable.apply(x, self.weight, self.bias, self, pad_mask)
        return self.evaluate(x, pad_mask)

    def forward(self, x: Tensor, pad_mask: Tensor | None = None) -> tuple[Tensor, Saved]:
        """Returns y in training, and the tensors that `backward` needs."""
        raise NotImplementedError

    def backward(self, dy: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (dx, dγ, dβ)."""
        raise NotImplementedError

    def evaluate(self, x: Tensor, pad_mask: Tensor | None = None) -> Tensor:
        """Returns y = γ⊙x/√(ψ²+ε) + β, with the running ψ²."""
        root = (self.running("running_phi", x) + self.eps).sqrt()
        counted = self.counted(x, pad_mask)
        return self.output(computed(x[counted]) / root, counted, x)

    def counted(self, x: Tensor, pad_mask: Tensor | None) -> Tensor:
        """Returns a mask with x's leading shape that is True where y is computed: at real positions."""
        return real_positions(x, pad_mask)

    def output(self, x_hat: Tensor, counted: Tensor, x: Tensor) -> Tensor:
        """Returns y = γ⊙x̂ + β at the positions that count, 0 elsewhere."""
        return scattered(self.weight.to(x_hat.dtype) * x_hat + self.bias.to(x_hat.dtype), counted, x.dtype)

    def gradients(self, dx: Tensor, dy: Tensor, saved: Saved, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dx in x's shape, dγ = Σ dy⊙x̂ and dβ = Σ dy."""
        d_weight, d_bias = (dy * saved.x_hat).sum(0), dy.sum(0)
        return scattered(dx, saved.counted, dtype), d_weight.to(self.weight.dtype), d_bias.to(self.bias.dtype)

    def running(self, name: str, x: Tensor) -> Tensor:
        """Returns the buffer as a vector (d,), in the type in which x is computed."""
        return self.buffers[name].detach().to(computed(x).dtype).flatten()

    def take_in(self, **values: Tensor) -> None:
        """Copies each value into the buffer of its name. If a value is not finite, no buffer changes."""
        if all(value.isfinite().all() for value in values.values()):
            for name, value in values.items():
                self.buffers[name].copy_(value.view(self.buffers[name].shape))


class BatchNorm(BatchStatisticsNorm):
    """BatchNorm (PN Alg 1): y = γ⊙(x−μ_B)/√(σ²_B+ε) + β with biased σ²_B, then μ ← αμ+(1−α)μ_B and the same for σ².
    Evaluation uses μ and σ²."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        buffers: Mapping[str, Tensor],
        alpha: float = 0.9,
        eps: float = DEFAULT_EPS,
    ) -> None:
        super().__init__(weight, bias, buffers, eps)
        self.alpha = alpha

    def forward(self, x: Tensor, pad_mask: Tensor | None = None) -> tuple[Tensor, Saved]:
        counted = self.counted(x, pad_mask)
        rows = computed(x[counted])
        mean = rows.mean(0)
        variance = ((rows - mean) ** 2).mean(0)
        root = (variance + self.eps).sqrt()
        saved = Saved((rows - mean) / root, root, counted)
        self.take_in(
            running_mean=self.alpha * self.running("running_mean", x) + (1 - self.alpha) * mean,
            running_var=self.alpha * self.running("running_var", x) + (1 - self.alpha) * variance,
        )
        return self.output(saved.x_hat, counted, x), saved

    def backward(self, dy: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (dx, dγ, dβ), with dx_i = (γ/σ_B)[dy_i − mean(dy) − x̂_i·mean(dy⊙x̂)] (PN eq 3)."""
        g, x_hat = computed(dy[saved.counted]), saved.x_hat
        inner = g - g.mean(0) - x_hat * (g * x_hat).mean(0)
        return self.gradients(self.weight.to(g.dtype) / saved.root * inner, g, saved, dy.dtype)

    def evaluate(self, x: Tensor, pad_mask: Tensor | None = None) -> Tensor:
        root = (self.running("running_var", x) + self.eps).sqrt()
        counted = self.counted(x, pad_mask)
        return self.output((computed(x[counted]) - self.running("running_mean", x)) / root, counted, x)


class PowerNormV(BatchStatisticsNorm):
    """PN-V (PN Def 1): y = γ⊙x̂ + β with x̂ = x/√(ψ²_B+ε) and ψ²_B = mean x², then ψ² ← αψ²+(1−α)ψ²_B. Evaluation uses
    ψ²."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        buffers: Mapping[str, Tensor],
        alpha: float = 0.9,
        eps: float = DEFAULT_EPS,
    ) -> None:
        super().__init__(weight, bias, buffers, eps)
        self.alpha = alpha

    def forward(self, x: Tensor, pad_mask: Tensor | None = None) -> tuple[Tensor, Saved]:
        counted = self.counted(x, pad_mask)
        rows = computed(x[counted])
        phi_batch = (rows**2).mean(0)
        root = (phi_batch + self.eps).sqrt()
        saved = Saved(rows / root, root, counted)
        self.take_in(running_phi=self.alpha * self.running("running_phi", x) + (1 - self.alpha) * phi_batch)
        return self.output(saved.x_hat, counted, x), saved

    def backward(self, dy: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (dx, dγ, dβ), with dx_i = (γ/ψ_B)[dy_i − x̂_i·mean(dy⊙x̂)] (PN eq 6)."""
        g, x_hat = computed(dy[saved.counted]), saved.x_hat
        inner = g - x_hat * (g * x_hat).mean(0)
        return self.gradients(self.weight.to(g.dtype) / saved.root * inner, g, saved, dy.dtype)


class PowerNorm(BatchStatisticsNorm):
    """PN: the forward divides by the running ψ of the step before, the backward replaces mean(G⊙x̂) by the running ν.

    Buffers: running_phi = ψ², ema_gz = ν/(1−α_b), iters = t, the training forwards taken in (PN Def 3, Alg 2).
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        buffers: Mapping[str, Tensor],
        mode: str = "paper",
        warmup: int = 4000,
        alpha_fwd: float = 0.9,
        alpha_bwd: float = 0.9,
        eps: float = DEFAULT_EPS,
    ) -> None:
        super().__init__(weight, bias, buffers, eps)
        if mode not in POWER_NORM_MODES:
            raise ValueError(f"unknown mode {mode!r}; the modes are {', '.join(POWER_NORM_MODES)}")
        self.mode, self.warmup, self.alpha_fwd, self.alpha_bwd = mode, warmup, alpha_fwd, alpha_bwd

    def counted(self, x: Tensor, pad_mask: Tensor | None) -> Tensor:
        """Returns the mask of real positions; in release mode every position counts, also padding."""
        return real_positions(x, pad_mask if self.mode == "paper" else None)

    def forward(self, x: Tensor, pad_mask: Tensor | None = None) -> tuple[Tensor, Saved]:
        """Returns y and what `backward` needs. ψ²_B is the mean of x² over real positions, t the number of this update.

        paper: x̂ = x/√(ψ²+ε), then ψ² ← αψ²+(1−α)ψ²_B (eq 8, 10); while t ≤ warm-up x̂ = x/√(ψ²_B+ε) with PN-V's
        gradient, then ψ² ← ψ² + (ψ²_B−ψ²)/t.
        release: z = x/√(ψ²_B+ε) while t ≤ warm-up, else x/√(ψ²+ε); while t < warm-up ψ² ← ψ²·(t−1)/t + ψ²_B/t, and
        then always ψ² ← αψ²+(1−α)ψ²_B; the backward divides by the batch's √(ψ²_B+ε).
        """
        counted, phi = self.counted(x, pad_mask), self.running("running_phi", x)
        phi_batch = (computed(x[real_positions(x, pad_mask)]) ** 2).mean(0)
        iters = self.buffers["iters"] + 1
        t = int(iters)
        warming_up = t <= self.warmup
        root = ((phi_batch if warming_up else phi) + self.eps).sqrt()
        x_hat = computed(x[counted]) / root
        if self.mode == "paper":
            saved = Saved(x_hat, root, counted, is_exact=warming_up)
            rate = 1 / t if warming_up else 1 - self.alpha_fwd
        else:
            saved = Saved(x_hat, (phi_batch + self.eps).sqrt(), counted)
            rate = 1 - self.alpha_fwd
            if t < self.warmup:
                phi = phi * (t - 1) / t + phi_batch / t
        self.take_in(running_phi=phi + rate * (phi_batch - phi), iters=iters)
        return self.output(x_hat, counted, x), saved

    def backward(self, dy: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (dx, dγ, dβ): G = γ⊙dy, X′ = G − ν⊙x̂, dx = X′/√(ψ²+ε), then ν ← ν(1−(1−α_b)Γ)+(1−α_b)Λ (eq 11–13).

        Γ = mean(x̂²), Λ = mean(G⊙x̂); in the paper mode's warm-up X′ = G − Λ⊙x̂.
        """
        g, x_hat = computed(dy[saved.counted]), saved.x_hat
        big_g = self.weight.to(g.dtype) * g
        nu = (1 - self.alpha_bwd) * self.running("ema_gz", dy)
        gamma, lamda = (x_hat**2).mean(0), (big_g * x_hat).mean(0)
        x_prime = big_g - (lamda if saved.is_exact else nu) * x_hat
        nu = nu * (1 - (1 - self.alpha_bwd) * gamma) + (1 - self.alpha_bwd) * lamda
        self.take_in(ema_gz=nu / (1 - self.alpha_bwd))
        return self.gradients(x_prime / saved.root, g, saved, dy.dtype)


class RepBN(BatchNorm):
    """RepBN (SLAB): y = BN(x) + η·x. `buffers` has η, too, as `share`."""

    def __call__(self, x: Tensor, pad_mask: Tensor | None = None, training: bool = True) -> Tensor:
        share = self.buffers["share"] * x.masked_fill(~self.counted(x, pad_mask).unsqueeze(-1), 0.0)
        return super().__call__(x, pad_mask, training) + share


class PRepBN(RepBN):
    """PRepBN (SLAB): λ·R(x) + (1−λ)·RepBN(x) in training, with λ = 1 − (t−1−w)/T between 0 and 1, RepBN(x) in
    evaluation. While t ≤ w RepBN is not computed. `buffers` has η, t, and R's weight and bias, too."""

    def __init__(self, *given: Any, steps: int = 4000, warm: int = 0, row: str = "layernorm", **options: Any) -> None:
        super().__init__(*given, **options)
        self.steps, self.warm, self.row = steps, warm, row

    def __call__(self, x: Tensor, pad_mask: Tensor | None = None, training: bool = True) -> Tensor:
        t, weight = int(self.buffers["t"]), self.buffers["row_weight"]
        if not training:
            return super().__call__(x, pad_mask, training)
        counted = self.counted(x, pad_mask)
        is_rms = self.row == "rmsnorm"
        rows = x[counted]
        normed = (
            rms_norm(rows, weight, self.eps) if is_rms else layer_norm(rows, weight, self.buffers["row_bias"], self.eps)
        )
        y = scattered(normed, counted, x.dtype)
        if t <= self.warm:
            return y
        lamda = max(0.0, 1 - (t - 1 - self.warm) / self.steps)
        return lamda * y + (1 - lamda) * super().__call__(x, pad_mask, training)


BATCH_NORMS: dict[str, type[BatchStatisticsNorm]] = {
    "batchnorm": BatchNorm,
    "powernorm-v": PowerNormV,
    "powernorm": PowerNorm,
}
BLENDED_NORMS: dict[str, type[RepBN]] = {"repbn": RepBN, "prepbn": PRepBN}
NORM_NAMES = (*ROW_NORMS, *BATCH_NORMS, *BLENDED_NORMS)


def real_positions(x: Tensor, pad_mask: Tensor | None) -> Tensor:
    """Returns a mask with x's leading shape, True where x is not padding; without `pad_mask` every position is real."""
    if pad_mask is None:
        return torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
    return ~pad_mask


def scattered(rows: Tensor, where: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor (…, d) with the rows (positions, d) at the positions that `where` marks, and zeros elsewhere."""
    full = rows.new_zeros((*where.shape, rows.shape[-1]), dtype=dtype)
    full[where] = rows.to(dtype)
    return full


class _Differentiable(torch.autograd.Function):
    """Makes a norm's `forward` and `backward` one step of autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: BatchStatisticsNorm, pad_mask: Tensor | None):
        y, ctx.saved = norm.forward(x, pad_mask)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor):
        return (*ctx.norm.backward(dy, ctx.saved), None, None)
