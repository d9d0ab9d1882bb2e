"""Norms as modules, with torch.nn's constructors and keys."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError
from .formulas import wide
from .norm_table import CONSTANTS
from .row_norm import OPS, OffsetNorm, RowNorm, unit_rows
from .sharding import mark_drawn, write_whole
from .tracing import leaf

FIXNORM_EPS = CONSTANTS["fixnorm_eps"]
"""The ε of FixNorm."""


class LayerNorm(RowNorm, norm="layernorm"):
    """y = γ⊙(x − μ)/√(σ² + ε) + β over the last dimensions, σ² biased: torch.nn.LayerNorm.

    >>> LayerNorm((2, 4)).weight.shape
    torch.Size([2, 4])

    Args:
        normalized_shape: the last dimensions' sizes, or the last one's. eps: ε. elementwise_affine, bias: True for
            learned γ and β.

    Shapes: x (…, *normalized_shape) → the same; `weight`, `bias` normalized_shape. dtypes: x and parameters f32, f64,
    bf16, f16, each its own; y has x's, also under autocast. Errors: InputError (a ValueError) for another shape,
    TypeError for integers. Source: Ba et al. 2016.
    """

    def formula(self, x: Tensor) -> Tensor:
        # Runtimes of exported programs have kernels for torch's own operator.
        wide_x = wide(x)
        weight, bias = (None if p is None else p.to(wide_x.dtype) for p in self.parameters_in_use(x))
        return F.layer_norm(wide_x, self.normalized_shape, weight, bias, self.eps_for(x)).to(x.dtype)

    def extra_repr(self) -> str:
        return nn.LayerNorm.extra_repr(self)  # type: ignore[arg-type]  # the form of this torch version


class RMSNorm(OffsetNorm, norm="rmsnorm"):
    """y = γ⊙x/√(mean x² + ε) over the last dimensions: torch.nn.RMSNorm, except for its default ε (None there).

    >>> RMSNorm(4, eps=None)
    RMSNorm((4,), eps=None, elementwise_affine=True)
    >>> RMSNorm(4, eps=1e-6, zero_centred=True)  # Gemma's: norm_class("rmsnorm:gemma")(4)
    RMSNorm((4,), eps=1e-06, zero_centred=True, elementwise_affine=True)

    Args:
        normalized_shape, elementwise_affine: as in LayerNorm. eps: ε; None: the machine epsilon of the computing type.
        unit_offset: a `g` of x-transformers that is loaded is γ − 1.
        zero_centred: the weight is γ − 1, 0 initially; 1 + weight is computed in f32 (f64 for f64).
        cast: when 16-bit rows are rounded: "after" the product with γ; "before" it as well, so that x̂ is rounded
            (Llama); or "scale", so that 1/√(mean x² + ε) is rounded before its product with x (DeepSeek-V4's queries).
        eps_place: "inside" the root, or "outside", √(mean x²) + ε, as in the original release.
        part: p; the mean is over the first ⌊p·d⌋ numbers of a row (pRMSNorm).

    ε outside, p < 1 and, in 16 bits, cast="scale" are composed of torch's operations. Everything else runs on RMSNorm's
    kernels; with cast="before" in 16 bits, the product with γ is a separate operation after the kernel.

    Shapes, dtypes, errors: LayerNorm's; InputError for any other word, and if ⌊p·d⌋ is 0. Source: Zhang & Sennrich
    2019; Nguyen & Salazar 2019, §4.2; the families' code (docs/spec.md §1.16).
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = 1e-5,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        unit_offset: bool = False,
        zero_centred: bool = False,
        cast: Literal["after", "before", "scale"] = "after",
        eps_place: Literal["inside", "outside"] = "inside",
        part: float = 1.0,
    ) -> None:
        # These options come first, because the constructor of RowNorm reads them.
        self.zero_centred, self.cast, self.eps_place, self.part = zero_centred, cast, eps_place, part
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, unit_offset=unit_offset)

    def measured(self) -> int:
        """Returns ⌊p·d⌋, the number of a row's first elements that the mean is over."""
        return math.floor(self.part * self.width)

    def rounds_once(self, x: Tensor) -> bool:
        """True if the kernels compute all of this norm for rows of x's dtype."""
        is_usual = self.eps_place == "inside" and self.part == 1
        return is_usual and (self.cast == "after" or x.dtype in (torch.float32, torch.float64))

    def fuses(self, x: Tensor) -> bool:
        """True if the fused residual step can compute this norm, with all of its options, for x's dtype."""
        return super().fuses(x) and self.rounds_once(x)

    def call(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if self.rounds_once(x):
            return super().call(x, weight, bias)
        y = OPS.conventional_rms_norm(x, weight, self.eps_for(x), self.cast, self.eps_place, self.part)
        return y.contiguous()  # a kernel's result is contiguous, too

    def extra_repr(self) -> str:
        # Options that torch.nn.RMSNorm does not have are shown only if their value is unusual.
        usual = {"zero_centred": False, "cast": "after", "eps_place": "inside", "part": 1.0}
        unusual = {name: getattr(self, name) for name, value in usual.items() if getattr(self, name) != value}
        shown = {"eps": self.eps, **unusual, "elementwise_affine": self.elementwise_affine}
        return ", ".join([str(self.normalized_shape), *(f"{name}={value}" for name, value in shown.items())])


class BiasedRMSNorm(RMSNorm):
    """y = γ⊙x/√(mean x² + ε) + β: the RMSNorm of exact swaps, for places where no linear layer can include β. 16-bit
    rows are computed in f32 and rounded once.

    >>> BiasedRMSNorm(4).bias
    Parameter containing:
    tensor([0., 0., 0., 0.], requires_grad=True)
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = 1e-5,
        bias: bool = True,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(normalized_shape, eps, device=device, dtype=dtype, **rest)
        if bias:  # RMSNorm's constructor makes none
            empty = torch.empty(self.normalized_shape, device=device, dtype=dtype)
            self.bias = nn.Parameter(empty)
            self.reset_parameters()

    def call(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return self._with_bias(super().call, x, weight, bias)

    def composed(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return self._with_bias(super().composed, x, weight, bias)

    def _with_bias(self, run: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Returns run(x, weight, None) + bias in x's dtype, where `run` computes an RMSNorm without bias. The sum is
        made in f32 at least."""
        if bias is None:
            return run(x, weight, None)
        wide_dtype = torch.promote_types(x.dtype, torch.float32)
        y = run(x.to(wide_dtype), None if weight is None else weight.to(wide_dtype), None)
        return (y + bias.to(wide_dtype)).to(x.dtype)


class ScaleNorm(OffsetNorm, norm="scalenorm"):
    """y = g·x/max(‖x‖₂, ε) over the last dimensions, one g = √d, learned unless elementwise_affine=False.

    >>> ScaleNorm(4).weight
    Parameter containing:
    tensor([2.], requires_grad=True)

    Args:
        normalized_shape: as in LayerNorm; d is their product. eps: ε, a clamp. elementwise_affine: True for a learned
            g.
        unit_offset: a `g` of x-transformers that is loaded is g/√d − 1.

    It loads the `scale` of Nguyen and Salazar's code (a number) and the `g` of x-transformers (g/√d) as `weight` (1,).
    Shapes, dtypes, errors: LayerNorm's. Source: Nguyen & Salazar 2019, eq 5.
    """

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        # Nguyen and Salazar's code saves g as the number `scale`; here it is `weight` (1,).
        scale, weight = prefix + "scale", prefix + "weight"
        if self.weight is not None and scale in state_dict and weight not in state_dict:
            state_dict[weight] = state_dict.pop(scale).reshape(1)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class FixedScaleNorm(ScaleNorm, norm="scalenorm-fixed"):
    """ScaleNorm with g = √d that is not learned (Nguyen & Salazar 2019, Table 7)."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        device: Any = None,  # torch.nn.utils.skip_init looks for an argument of this name
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(normalized_shape, eps, **{"elementwise_affine": False, **settings}, device=device, dtype=dtype)


class LpNorm(RowNorm, norm="lpnorm"):
    """y = g·x/max(‖x‖_p, ε) over the last dimensions, one g = d^{1/p}, learned unless elementwise_affine=False.

    With n = ‖x‖_p, u = x/n and w = sign(x)(|x|/n)^{p−1} (p = ∞: sign(x)/k at the k where |x| = n),
    dx = (g/n)(dy − w⟨u, dy⟩) where n > ε, else (g/ε)dy. p = 2 is ScaleNorm, with its kernels.

    >>> LpNorm(8, p=3).weight
    Parameter containing:
    tensor([2.], requires_grad=True)

    Args:
        normalized_shape, eps: as in ScaleNorm. p: from 1 to inf. elementwise_affine: True for a learned g.

    Shapes, dtypes, errors: LayerNorm's; InputError for p < 1. Source: Nguyen & Salazar 2019, §5 (future work).
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        p: float = 2.0,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # p comes first, because the constructor of RowNorm reads it: the first g is d^{1/p}.
        self.p = p
        super().__init__(normalized_shape, eps, elementwise_affine, bias=False, device=device, dtype=dtype)

    def call(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return OPS.lp_norm(x, weight, self.p, self.eps_for(x))

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, p={self.p}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class FixNormEmbedding(nn.Embedding):
    """Word embeddings of unit length, w/max(‖w‖₂, 1e-12), times `scale`; initially the table is uniform in ±0.01
    (FixNorm).

    >>> import torch
    >>> table = FixNormEmbedding(10, 4)
    >>> table(torch.tensor([[1, 2]])).norm(dim=-1).round(decimals=4)
    tensor([[1., 1.]], grad_fn=<RoundBackward1>)

    Args:
        num_embeddings, embedding_dim, padding_idx: torch.nn.Embedding's; the padding row is initialised like any other,
            because zeros have no direction, and gets no gradient. scale: √d at a Transformer's input.

    Shapes: ids (…) → (…, d). `normalised_weight()` is the table (V, d) for a tied output projection.
    Source: Nguyen & Chiang 2018; Nguyen & Salazar 2019, §2.3, eq 6.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        scale: float = 1.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.scale = scale

    @classmethod
    def from_pretrained(  # type: ignore[override]  # fewer options
        cls, embeddings: Tensor, freeze: bool = True, padding_idx: int | None = None, scale: float = 1.0
    ) -> "FixNormEmbedding":
        """Returns a table with these rows (V, d), which it divides by their lengths; with `freeze` they are not
        trained.

        >>> import torch
        >>> FixNormEmbedding.from_pretrained(torch.tensor([[3.0, 4.0]]))(torch.tensor([0]))
        tensor([[0.6000, 0.8000]])

        The arguments are torch.nn.Embedding's, except for `max_norm`, `scale_grad_by_freq` and `sparse`, which this
        table does not have.
        """
        if embeddings.dim() != 2:
            raise InputError(f"embeddings must be a table (V, d); got shape {tuple(embeddings.shape)}")
        rows, columns = embeddings.shape
        # On the meta device no memory is allocated and nothing is drawn for the weight that the next line replaces.
        table = cls(rows, columns, padding_idx, scale, device="meta", dtype=embeddings.dtype)
        table.weight = nn.Parameter(embeddings, requires_grad=not freeze)
        mark_drawn(table)
        return table

    def reset_parameters(self) -> None:
        """Re-initialises the table, uniform in ±0.01."""
        bound = CONSTANTS["fixnorm_bound"]
        write_whole(self.weight, lambda whole: nn.init.uniform_(whole, -bound, bound))
        mark_drawn(self)

    @leaf
    def forward(self, input: Tensor) -> Tensor:
        """Returns rows of the normalised table, times `scale`."""
        rows = F.embedding(input, self.weight, self.padding_idx)
        gain = rows.new_full((1,), self.scale, dtype=torch.promote_types(rows.dtype, torch.float32))
        return unit_rows(rows, gain, FIXNORM_EPS)

    def normalised_weight(self) -> Tensor:
        """Returns the table (V, d), its rows of unit length."""
        return unit_rows(self.weight, None, FIXNORM_EPS)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", scale={self.scale}" if self.scale != 1 else "")


__all__ = [
    "FixNormEmbedding",
    "FixedScaleNorm",
    "LayerNorm",
    "LpNorm",
    "RMSNorm",
    "RowNorm",
    "ScaleNorm",
]
