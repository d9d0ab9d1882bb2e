"""RepBN, BatchNorm plus a learned share of x, and PRepBN, which fades to it from a norm of rows while it trains."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..declarations.declared import Growth
from .averages import Steering
from .formulas import wide
from .norm_table import DECLARED, composed_norm, used
from .running import OPS, BatchNorm
from .step_hooks import Growing


class RepBN(BatchNorm, norm="repbn", beside=("share", "start")):
    """y = γ⊙(x − μ_B)/√(σ²_B + ε) + β + η·x: BatchNorm plus a learned share η of x (RepBN).

    Mean and biased variance are per feature over all real positions; training moves the running statistics as BatchNorm
    does, evaluation uses them. dx is BatchNorm's + η·dy, dη = Σ dy·x over real positions.

    >>> import torch
    >>> RepBN(4)(torch.randn(2, 3, 4)).shape
    torch.Size([2, 3, 4])

    Args:
        num_features, eps, alpha, elementwise_affine, bias, sync, process_group: BatchNorm's; it has no group scaling.
        start: the first γ and η. "ones": both 1, as in the authors' models of images. "zeros": both 0, as in their
            Llama. β starts at 0.

    Shapes: `share` (1,) = η, all else as BatchNorm's; y, dx are 0 at padding. dtypes: BatchNorm's; in 16 bits the sum
    is made in f32 and rounded once. Errors: BatchNorm's; InputError for an unknown start.
    Source: Guo et al. 2024 (SLAB), and its code.
    """

    share: nn.Parameter
    gains = ("weight", "share", "row_weight")

    def __init__(
        self,
        num_features: int | Sequence[int],
        eps: float = 1e-5,
        alpha: float = 0.9,
        start: str = "ones",
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        self.start = start
        super().__init__(num_features, eps, alpha, device=device, dtype=dtype, **settings)

    def steering(self) -> Steering:
        """Returns the running statistics, each with a parameter that every update moves together with them."""
        owner = self.share if self.weight is None else self.weight
        return [(owner, getattr(self, buffer.name)) for buffer in self.declared.buffers]

    def _normed(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        # In f32 the sum in `completed` is rounded only once. Integers stay, so that the operator refuses them.
        wide_x = wide(x) if x.is_floating_point() else x
        return super()._normed(wide_x, padding_mask).to(x.dtype).contiguous()

    def completed(self, y: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
        """Returns y + η·x, where y is BatchNorm's result and x counts as 0 at padding."""
        share = used(self.share, self.numbers_of["share"])
        assert share is not None
        return y + share.to(x.dtype) * hidden(x, mask)


class PRepBN(
    RepBN, Growing, norm="prepbn", beside=("share", "row_weight", "row_bias", "t", "start", "steps", "warm", "row")
):
    """y = λ·R(x) + (1 − λ)·RepBN(x) in training, RepBN(x) in evaluation (PRepBN); R is LayerNorm or RMSNorm.

    In update t, counted from 1, λ = 1 − (t − 1 − w)/T, at most 1 and at least 0. While t ≤ w RepBN is not computed: its
    statistics stay, and γ, β and η get gradients of 0. Set w + T to at most the number of updates, because evaluation
    uses RepBN alone, whatever λ is.

    `t` moves by one with each step of the optimizer that has R's weight; `normformer_rs.nn.set_num_updates` sets it.

    >>> import torch
    >>> norm, x = PRepBN(4, steps=2), torch.randn(2, 3, 4)
    >>> torch.allclose(norm(x), torch.nn.functional.layer_norm(x, (4,)))
    True
    >>> norm.set_t(3)
    >>> torch.equal(norm(x), RepBN(4)(x))
    True

    Args:
        num_features, eps, alpha, start, elementwise_affine, bias, sync, process_group: RepBN's; R has the same ε.
        steps: T. warm: w. row: R, "layernorm", or "rmsnorm" as in the authors' Llama.

    Shapes: `row_weight`, `row_bias` (d,), R's γ and β, of which RMSNorm has no β; `t` int64 (1,); all else as RepBN's.
    dtypes: RepBN's. Errors: RepBN's; InputError for T < 1, w < 0 and an unknown R.
    Source: Guo et al. 2024 (SLAB), and its code.
    """

    row_weight: nn.Parameter | None
    row_bias: nn.Parameter | None

    def __init__(
        self,
        num_features: int | Sequence[int],
        eps: float = 1e-5,
        alpha: float = 0.9,
        steps: int = 4000,
        warm: int = 0,
        row: str = "layernorm",
        start: str = "ones",
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        self.steps, self.warm, self.row = steps, warm, row
        super().__init__(num_features, eps, alpha, start, device=device, dtype=dtype, **settings)
        if row == "rmsnorm":
            self.row_bias = None
        self.begins = warm + 1  # 1 − λ begins to grow after the warm-up
        self.grow(Growth(steps), self.share.device)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.reset_growth()

    def watched(self) -> Iterator[nn.Parameter]:
        """Yields the parameters whose updates t counts, R's weight first."""
        if self.row_weight is not None:
            yield self.row_weight  # the only gain that learns in the warm-up
        yield from self.parameters(recurse=False)

    def steering(self) -> Steering:
        """Returns the running statistics and t, each with a parameter whose updates move it."""
        owner = next(self.watched())  # each update of this parameter moves t
        # RepBN's list ends with t, paired with another parameter; this pair is replaced.
        return [*super().steering()[:-1], (owner, self.t)]

    def counted_out(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """Returns the mask of the positions that are left out of RepBN's statistics. `mask`: True at padding."""
        if not self.training or not self.warm:
            return mask
        # During the warm-up no position counts, so that the statistics stay.
        warming = (self.t <= self.warm).expand(x.shape[:-1])
        return warming.contiguous() if mask is None else mask | warming

    def completed(self, y: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
        """Returns λ·R(x) + (1 − λ)·RepBN(x) in training and RepBN(x) in evaluation; 0 at padding."""
        y = super().completed(y, x, mask)
        rep_bn_share = self.grown() if self.training else None  # 1 − λ
        if rep_bn_share is None:
            return y
        rep_bn_share = rep_bn_share.to(y.dtype)
        return hidden((1 - rep_bn_share) * self._of_rows(hidden(x, mask)) + rep_bn_share * y, mask)

    def _of_rows(self, x: Tensor) -> Tensor:
        """Returns R(x), the norm of each row alone: a LayerNorm, or an RMSNorm with `row="rmsnorm"`."""
        names = ("row_weight", "row_bias")
        declared, affine = DECLARED[self.row], [used(getattr(self, name), self.numbers_of[name]) for name in names]
        if torch.compiler.is_exporting():
            options = declared.as_floats(eps=self.eps)
            # An RMSNorm of the table has a weight alone.
            return composed_norm(x, affine[: len(declared.parameters)], options, self.row)
        # The operator returns (y, statistics for the backward pass).
        y: Tensor = getattr(OPS, declared.operator or "")(x, *affine, self.eps)[0]
        return y


def hidden(x: Tensor, mask: Tensor | None) -> Tensor:
    """Returns x with zeros where the mask, in x's leading shape, is True; x itself without a mask."""
    return x if mask is None else x.masked_fill(mask.unsqueeze(-1), 0.0)
