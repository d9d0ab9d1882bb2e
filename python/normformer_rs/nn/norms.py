"""Norms as modules, with torch.nn's constructors and keys."""

import math
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError
from . import formulas, sharding
from .running import check_eps, over_rows
from .table import DECLARED, Declared
from .tracing import Unscriptable, leaf

OPS = torch.ops.normformer_rs
sharding.register()
FIXNORM_EPS = 1e-12
"""The ε of FixNorm."""


class RowNorm(Unscriptable, nn.Module):
    """A norm over the last dimensions, each row for itself: y = weight⊙x̂ + bias."""

    declared: Declared
    operator: str
    names: tuple[str, ...]
    """The parameters' names."""
    numbers: tuple[str, ...]
    """Those that enter x̂: all but weight and bias."""
    has_eps: bool
    has_bias: bool
    has_one_gain: bool
    weight: Any
    """A parameter, or None."""
    bias: Any
    """A parameter, or None."""

    def __init_subclass__(cls, norm: str | None = None, **rest: Any) -> None:
        """`norm`: the name in the table."""
        super().__init_subclass__(**rest)
        if norm is None:
            return
        cls.declared = declared = DECLARED[norm]
        cls.operator = declared.operator or ""
        cls.names = tuple(parameter.name for parameter in declared.parameters)
        cls.numbers = tuple(name for name in cls.names if name not in ("weight", "bias"))
        cls.has_eps = "eps" in declared.options
        cls.has_bias = "bias" in cls.names
        cls.has_one_gain = any(p.name == "weight" and p.shape == "one" for p in declared.parameters)

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        shape = tuple(normalized_shape) if isinstance(normalized_shape, Iterable) else (index(normalized_shape),)
        if not shape:
            raise InputError("normalized_shape must name at least one dimension, got none")
        self.normalized_shape, self.elementwise_affine = shape, elementwise_affine
        if self.has_eps:
            check_eps(eps)
            self.eps = eps
        left_out = {"weight", "bias"} if not elementwise_affine else set() if bias else {"bias"}
        for declared in self.declared.parameters:
            empty = torch.empty(1 if declared.shape == "one" else shape, device=device, dtype=dtype)
            self.register_parameter(declared.name, None if declared.name in left_out else nn.Parameter(empty))
        for name in {"weight", "bias"}.difference(self.names):
            self.register_parameter(name, None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the parameters to their first values."""
        for name, parameter in self._parameters.items():
            if parameter is not None:
                nn.init.constant_(parameter, self.start(name))

    def start(self, name: str) -> float:
        """The first value of a parameter."""
        start = next(parameter.start for parameter in self.declared.parameters if parameter.name == name)
        if start != "length":
            return start
        p: float | None = getattr(self, "p", None)
        return math.sqrt(self.width) if p is None else self.width ** (1 / p)

    def gain(self) -> float:
        """The first value of the weight."""
        return self.start("weight")

    @property
    def width(self) -> int:
        """Numbers per row."""
        return math.prod(self.normalized_shape)

    def parameters_in_use(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias as the operator takes them; a gain that is not learned is a constant."""
        if self.has_one_gain and self.weight is None:
            return x.new_full((1,), self.gain(), dtype=torch.promote_types(x.dtype, torch.float32)), None
        return self.weight, self.bias

    def eps_for(self, x: Tensor) -> float:
        """ε; None stands for the machine epsilon of the type that x is computed in, as in torch."""
        return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if self.eps is None else self.eps

    def own(self, x: Tensor) -> Sequence[Any]:
        """What the operator takes beside weight and bias: ε, or the learned numbers of x̂."""
        return (self.eps_for(x),)

    def call(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The operator on rows."""
        return getattr(OPS, self.operator)(x, weight, bias, self.eps_for(x))[0]

    def formula(self, x: Tensor) -> Tensor:
        """The same in torch's own operations, for exported programs."""
        raise NotImplementedError

    @leaf
    def forward(self, x: Tensor) -> Tensor:
        """N(x) in x's dtype."""
        n = len(self.normalized_shape)
        if x.is_nested:
            return over_rows(self, x)
        if tuple(x.shape[-n:]) != self.normalized_shape:
            raise InputError(f"x must end in {self.normalized_shape}, got shape {tuple(x.shape)}")
        if torch.compiler.is_exporting():
            return self.formula(x)
        if type(x) is not Tensor and not torch.compiler.is_compiling():
            sharding.register()
        weight, bias = self.parameters_in_use(x)
        if n == 1:
            return self.call(x, weight, bias)
        flat = (None if p is None else p.flatten() for p in (weight, bias))
        return self.call(x.flatten(-n), *flat).unflatten(-1, self.normalized_shape)

    def extra_repr(self) -> str:
        shown = [name for name in self.declared.options if name in vars(self)]
        options = [f"{name}={getattr(self, name)}" for name in shown if name != "elementwise_affine"]
        if self.names:
            options.append(f"elementwise_affine={self.elementwise_affine}")
        return ", ".join([str(self.normalized_shape), *options])


class LayerNorm(RowNorm, norm="layernorm"):
    """y = γ⊙(x − μ)/√(σ² + ε) + β over the last dimensions, σ² biased: torch.nn.LayerNorm.

    >>> LayerNorm(4)
    LayerNorm((4,), eps=1e-05, elementwise_affine=True)

    Args:
        normalized_shape: the last dimensions' sizes, or the last one's. eps: ε. elementwise_affine, bias: whether there
            are γ and β.

    Shapes: x (…, *normalized_shape) → the same; `weight`, `bias` normalized_shape. dtypes: x and parameters f32, f64,
    bf16, f16, each its own; y has x's, also under autocast. Errors: InputError (a ValueError) for another shape,
    TypeError for integers. Source: Ba et al. 2016.
    """

    def formula(self, x: Tensor) -> Tensor:
        return formulas.layer_norm(x, self.weight, self.bias, list(self.normalized_shape), self.eps_for(x))

    def extra_repr(self) -> str:
        return nn.LayerNorm.extra_repr(self)  # type: ignore[arg-type]  # as this torch writes it


class _Offset(RowNorm):
    """Reads the `g` of x-transformers, where a norm ends in ·√d·(g + offset)."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = 1e-5,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        unit_offset: bool = False,
    ) -> None:
        self.unit_offset = unit_offset
        super().__init__(normalized_shape, eps, elementwise_affine, False, device, dtype)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        g, weight = prefix + "g", prefix + "weight"
        if self.weight is not None and g in state_dict and weight not in state_dict:
            # Their factor √d belongs to x̂ where there is a weight per feature, and to the weight where it is one gain.
            state_dict[weight] = (state_dict.pop(g) + float(self.unit_offset)) * self.gain()
        super()._load_from_state_dict(state_dict, prefix, *rest)


class RMSNorm(_Offset, norm="rmsnorm"):
    """y = γ⊙x/√(mean x² + ε) over the last dimensions: torch.nn.RMSNorm, but for its default ε (None there).

    >>> RMSNorm(4, eps=None)
    RMSNorm((4,), eps=None, elementwise_affine=True)

    Args:
        normalized_shape, elementwise_affine: as in LayerNorm. eps: ε; None: the machine epsilon of the computing type.
        unit_offset: a `g` of x-transformers that is loaded is γ − 1.

    Shapes, dtypes, errors: LayerNorm's. Source: Zhang & Sennrich 2019; Nguyen & Salazar 2019, §4.2.
    """

    def formula(self, x: Tensor) -> Tensor:
        return formulas.rms_norm(x, self.weight, list(self.normalized_shape), self.eps_for(x))


class BiasedRMSNorm(RMSNorm):
    """y = γ⊙x/√(mean x² + ε) + β: the RMSNorm of exact swaps, where no linear layer can take β. 16-bit rows are
    computed in f32 and rounded once.

    >>> BiasedRMSNorm(4).bias
    Parameter containing:
    tensor([0., 0., 0., 0.], requires_grad=True)
    """

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float | None = 1e-5, bias: bool = True, **rest: Any
    ) -> None:
        super().__init__(normalized_shape, eps, **rest)
        if bias:
            empty = torch.empty(self.normalized_shape, device=rest.get("device"), dtype=rest.get("dtype"))
            self.bias = nn.Parameter(empty)
            self.reset_parameters()

    def start(self, name: str) -> float:
        return 0.0 if name == "bias" else super().start(name)

    def call(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if bias is None:
            return super().call(x, weight, None)
        wide = torch.promote_types(x.dtype, torch.float32)
        y = super().call(x.to(wide), None if weight is None else weight.to(wide), None)
        return (y + bias.to(wide)).to(x.dtype)

    def formula(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        y = super().formula(x.to(wide))
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class ScaleNorm(_Offset, norm="scalenorm"):
    """y = g·x/max(‖x‖₂, ε) over the last dimensions, one g = √d, learned unless elementwise_affine=False.

    >>> ScaleNorm(4).weight
    Parameter containing:
    tensor([2.], requires_grad=True)

    Args:
        normalized_shape: as in LayerNorm; d is their product. eps: ε, a clamp. elementwise_affine: is g learned.
        unit_offset: a `g` of x-transformers that is loaded is g/√d − 1.

    Loads the `scale` of Nguyen and Salazar's code (a number) and the `g` of x-transformers (g/√d) as `weight` (1,).
    Shapes, dtypes, errors: LayerNorm's. Source: Nguyen & Salazar 2019, eq 5.
    """

    def formula(self, x: Tensor) -> Tensor:
        return formulas.lp_norm(x, self.weight, self.gain(), 2.0, len(self.normalized_shape), self.eps_for(x))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        scale, weight = prefix + "scale", prefix + "weight"
        if self.weight is not None and scale in state_dict and weight not in state_dict:
            state_dict[weight] = state_dict.pop(scale).reshape(1)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class FixedScaleNorm(ScaleNorm, norm="scalenorm-fixed"):
    """ScaleNorm with g = √d that is not learned (Nguyen & Salazar 2019, Table 7)."""

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-5, **settings: Any) -> None:
        super().__init__(normalized_shape, eps, **{"elementwise_affine": False, **settings})


class LpNorm(RowNorm, norm="lpnorm"):
    """y = g·x/max(‖x‖_p, ε) over the last dimensions, one g = d^{1/p}, learned unless elementwise_affine=False.

    With n = ‖x‖_p, u = x/n and w = sign(x)(|x|/n)^{p−1} (p = ∞: sign(x)/k at the k where |x| = n),
    dx = (g/n)(dy − w⟨u, dy⟩) where n > ε, else (g/ε)dy. p = 2 is ScaleNorm, with its kernels.

    >>> LpNorm(8, p=3).weight
    Parameter containing:
    tensor([2.], requires_grad=True)

    Args:
        normalized_shape, eps: as in ScaleNorm. p: from 1 to inf. elementwise_affine: whether g is learned.

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
        if not p >= 1:
            raise InputError(f"p must be at least 1, or inf, got {p}")
        self.p = p
        super().__init__(normalized_shape, eps, elementwise_affine, False, device, dtype)

    def call(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return OPS.lp_norm(x, weight, self.p, self.eps_for(x))

    def formula(self, x: Tensor) -> Tensor:
        return formulas.lp_norm(x, self.weight, self.gain(), self.p, len(self.normalized_shape), self.eps_for(x))

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, p={self.p}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class FixNormEmbedding(Unscriptable, nn.Embedding):
    """Word embeddings of unit length, w/max(‖w‖₂, 1e-12), times `scale`; the table starts uniform in ±0.01 (FixNorm).

    >>> import torch
    >>> table = FixNormEmbedding(10, 4)
    >>> table(torch.tensor([[1, 2]])).norm(dim=-1).round(decimals=4)
    tensor([[1., 1.]], grad_fn=<RoundBackward1>)

    Args:
        num_embeddings, embedding_dim, padding_idx: torch.nn.Embedding's; the padding row starts like any other, for
            zeros have no direction, and gets no gradient. scale: √d at a Transformer's input.

    Shapes: ids (…) → (…, d). `normalised_weight()` is the table (V, d) that a tied output projection takes.
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

    def reset_parameters(self) -> None:
        """Draws the table anew, uniform in ±0.01."""
        nn.init.uniform_(self.weight, -0.01, 0.01)

    @leaf
    def forward(self, input: Tensor) -> Tensor:
        """Rows of the normalised table, times `scale`."""
        rows = F.embedding(input, self.weight, self.padding_idx)
        if torch.compiler.is_exporting():
            return formulas.lp_norm(rows, None, self.scale, 2.0, 1, FIXNORM_EPS)
        gain = rows.new_full((1,), self.scale, dtype=torch.promote_types(rows.dtype, torch.float32))
        return OPS.scale_norm(rows, gain, None, FIXNORM_EPS)[0]

    def normalised_weight(self) -> Tensor:
        """The table (V, d), its rows of unit length."""
        if torch.compiler.is_exporting():
            return formulas.lp_norm(self.weight, None, 1.0, 2.0, 1, FIXNORM_EPS)
        return OPS.scale_norm(self.weight, None, None, FIXNORM_EPS)[0]

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
