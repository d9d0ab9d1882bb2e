"""Norms as modules, with torch.nn's constructors and keys."""

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import TransformerConfig, tables, unknown
from ..errors import InputError
from . import formulas, sharding
from .running import BatchNorm, GroupScaling, PowerNorm, PowerNormV, check_eps, over_rows
from .tracing import Unscriptable, leaf

OPS = torch.ops.normformer_rs
sharding.register()
FIXNORM_EPS = 1e-12
"""The ε of FixNorm."""


class RowNorm(Unscriptable, nn.Module):
    """A norm over the last dimensions, each row for itself."""

    operator: str
    has_bias = False
    has_one_gain = False

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
        check_eps(eps)
        self.normalized_shape, self.eps, self.elementwise_affine = shape, eps, elementwise_affine
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if elementwise_affine:
            made = {"device": device, "dtype": dtype}
            self.weight = nn.Parameter(torch.empty(1 if self.has_one_gain else shape, **made))
            if self.has_bias and bias:
                self.bias = nn.Parameter(torch.empty(shape, **made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Parameters as at the start."""
        if self.weight is not None:
            nn.init.constant_(self.weight, self.gain())
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def gain(self) -> float:
        """The weight at the start."""
        return 1.0

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
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class LayerNorm(RowNorm):
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

    operator = "layer_norm"
    has_bias = True

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
            # x/‖x‖·√d is x̂ already where a weight is wanted per feature, and a unit vector ·√d where it is one gain.
            state_dict[weight] = (state_dict.pop(g) + float(self.unit_offset)) * self.gain()
        super()._load_from_state_dict(state_dict, prefix, *rest)


class RMSNorm(_Offset):
    """y = γ⊙x/√(mean x² + ε) over the last dimensions: torch.nn.RMSNorm, but for its default ε (None there).

    >>> RMSNorm(4, eps=None)
    RMSNorm((4,), eps=None, elementwise_affine=True)

    Args:
        normalized_shape, elementwise_affine: as in LayerNorm. eps: ε; None: the machine epsilon of the computing type.
        unit_offset: a `g` of x-transformers that is loaded is γ − 1.

    Shapes, dtypes, errors: LayerNorm's. Source: Zhang & Sennrich 2019; Nguyen & Salazar 2019, §4.2.
    """

    operator = "rms_norm"

    def formula(self, x: Tensor) -> Tensor:
        return formulas.rms_norm(x, self.weight, list(self.normalized_shape), self.eps_for(x))


class ScaleNorm(_Offset):
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

    operator = "scale_norm"
    has_one_gain = True

    def gain(self) -> float:
        return math.sqrt(self.width)

    def formula(self, x: Tensor) -> Tensor:
        return formulas.lp_norm(x, self.weight, self.gain(), 2.0, len(self.normalized_shape), self.eps_for(x))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        scale, weight = prefix + "scale", prefix + "weight"
        if self.weight is not None and scale in state_dict and weight not in state_dict:
            state_dict[weight] = state_dict.pop(scale).reshape(1)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class FixedScaleNorm(ScaleNorm):
    """ScaleNorm with g = √d that is not learned (Nguyen & Salazar 2019, Table 7)."""

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-5, **settings: Any) -> None:
        super().__init__(normalized_shape, eps, **{"elementwise_affine": False, **settings})


class LpNorm(RowNorm):
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

    has_one_gain = True

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

    def gain(self) -> float:
        return self.width ** (1 / self.p)

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
        """The table as at the start."""
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


class _Formula(RowNorm):
    """A norm that Rust's table gives by its formula alone; the class is made of the entry."""

    def call(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return OPS.norm_formula(x, weight, bias, self.eps_for(x), self.operator)

    def formula(self, x: Tensor) -> Tensor:
        return self.call(x, *self.parameters_in_use(x))  # a composition, which torch.export takes apart


def _of_entry(entry: Mapping[str, Any]) -> type[nn.Module]:
    """maxnorm: MaxNorm(normalized_shape, eps=1e-5, elementwise_affine=True, bias=True, device=None, dtype=None)."""
    name = "".join(part.capitalize() for part in entry["name"].replace("norm", "-norm").split("-"))
    doc = f"{entry['equation']}; source: {entry['source']}. Arguments, shapes, dtypes and errors are LayerNorm's."
    settings = {"operator": entry["name"], "has_bias": entry["formula"]["has_bias"]}
    return type(name, (_Formula,), {**settings, "__doc__": doc, "__module__": __name__})


_CLASSES: dict[str, type[nn.Module]] = {
    entry["name"]: _of_entry(entry) for entry in tables()["norms"] if "formula" in entry
} | {
    "layernorm": LayerNorm,
    "rmsnorm": RMSNorm,
    "scalenorm": ScaleNorm,
    "scalenorm-fixed": FixedScaleNorm,
    "lpnorm": LpNorm,
    "batchnorm": BatchNorm,
    "powernorm-v": PowerNormV,
    "powernorm": PowerNorm,
}


def norm_class(name: str) -> Any:
    """The class of a norm's name, one of `normformer_rs.tables()`; InputError with the names if there is none.

    >>> norm_class("scalenorm").__name__
    'ScaleNorm'
    """
    if name not in _CLASSES:
        raise InputError(unknown("norm", name, _CLASSES))
    return _CLASSES[name]


def norm_of_config(
    name: str,
    width: int,
    config: TransformerConfig,
    *,
    last_of_decoder: bool = False,
    ends_stack: bool = False,
    bias: bool = True,
    device: Any = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """The norm that a model of this configuration has, with its options: lpnorm_p, powernorm_mode, groupscaling, …

    `last_of_decoder`: the one that keeps its gain under scalenorm-fixed. `ends_stack`: it stands after a stack, where
    powernorm's release mode warms up for 1000 forwards. `bias`: whether norms that have one learn it.
    """
    settings: dict[str, Any] = {"device": device, "dtype": dtype}
    if config.norm_eps is not None:
        settings["eps"] = config.norm_eps
    groups = config.groupscaling
    if name == "layernorm":
        settings.update(bias=bias)
    elif name == "scalenorm-fixed":
        settings.update(elementwise_affine=last_of_decoder)
    elif name == "lpnorm":
        settings.update(p=config.lpnorm_p)
    elif name == "batchnorm":
        settings.update(alpha=config.batchnorm_alpha, groups=groups, sync=True, bias=bias)
    elif name == "powernorm-v":
        settings.update(alpha=config.powernorm_alpha_fwd, groups=groups, sync=True, bias=bias)
    elif name == "powernorm":
        is_release = config.powernorm_mode == "release"
        settings.update(
            alpha_fwd=config.powernorm_alpha_fwd,
            alpha_bwd=config.powernorm_alpha_bwd,
            warmup_iters=1000 if is_release and ends_stack else config.powernorm_warmup,
            mode=config.powernorm_mode,
            groups=config.heads if is_release else groups,
            sync=config.powernorm_sync,
            bias=bias,
        )
    return norm_class(name)(width, **settings)


__all__ = [
    "BatchNorm",
    "FixNormEmbedding",
    "FixedScaleNorm",
    "GroupScaling",
    "LayerNorm",
    "LpNorm",
    "PowerNorm",
    "PowerNormV",
    "RMSNorm",
    "ScaleNorm",
    "norm_class",
    "norm_of_config",
]
