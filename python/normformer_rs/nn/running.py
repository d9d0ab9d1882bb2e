"""Norms with statistics over rows and steps: BatchNorm, PN-V and PowerNorm, and the group scaling before them."""

import copy
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from ..config import unknown
from ..errors import InputError
from . import formulas
from .averages import Steered, Steering
from .distributed import group_name
from .masks import check_mask, mask_for
from .norm_table import COLUMN_OPTIONS, CONSTANTS, DECLARED, NormSpec, composed_norm, used
from .recompute import RecomputedStatistics, is_second_run, will_recompute
from .result import Typed
from .sharding import is_sharded, mark_drawn, write_first
from .tracing import functionalizes, leaf

OPS = torch.ops.normformer_rs
MODES = ("paper", "release")
"""The modes of PowerNorm: the paper's algorithm, and that of the authors' code."""


class GroupScaling(nn.Module):
    """y = x/√(mean over each group of x² + 1e-5) over the last dimension, cut into `groups` equal parts; no parameters.

    Shapes: x (…, d) → the same, d a multiple of `groups`. dtypes: f32, f64, bf16, f16; y has x's. Errors: ValueError if
    `groups` does not divide d. Source: Shen et al. 2020, Appendix A ("layer-scale"), and its code.

    >>> GroupScaling(2)
    GroupScaling(groups=2)
    """

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        if groups < 1:
            raise InputError(f"groups must be at least 1, got {groups}")
        self.groups = groups

    @leaf
    def forward(self, x: Tensor) -> Tensor:
        return scale_groups(x, self.groups)

    def extra_repr(self) -> str:
        return f"groups={self.groups}"


def scale_groups(x: Tensor, groups: int) -> Tensor:
    """Applies GroupScaling as a function. Exported programs contain torch's own operations."""
    if torch.compiler.is_exporting():
        parts = x.unflatten(-1, (groups, x.shape[-1] // groups))
        options = DECLARED["rmsnorm"].as_floats(eps=CONSTANTS["groupscaling_eps"])
        return composed_norm(parts, [None], options, "rmsnorm").flatten(-2)
    return OPS.group_scaling(x, groups)


class RunningNorm(Steered, Typed):
    """The base class of norms with statistics over rows: parameters, buffers, masks, and one update of the statistics
    per training forward.

    With activation checkpointing, compile the checkpointed function. A function compiled inside a checkpoint cannot
    tell its second run from its first.
    """

    declared: NormSpec
    operator_name: str
    _state: tuple[str | None, str | None, str | None]
    """The names of its buffers in the operator's order."""
    shown: tuple[str, ...]
    """The names of the options that the operator gets besides `train` and `eps`."""
    own: tuple[str, ...]
    """The names of the options that the class reads itself."""
    gains: tuple[str, ...] = ("weight",)
    """The names of the parameters whose initial values `first_scale` multiplies."""
    takes_pad_mask = True
    first_scale: float = 1.0
    """A residual scheme's factor on the initial values of `gains`."""
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    refused: Tensor
    """The number of refused batches, (1,) int64: those that left the running statistics as they were, because their own
    were not finite. It is not a buffer, so checkpoints ignore it. An exported program may only write to buffers, so it
    does not count refused batches."""

    def __init_subclass__(cls, norm: str | None = None, beside: Sequence[str] = (), **rest: Any) -> None:
        """Sets the class's attributes from the table. `norm`: the name in the table. `beside`: the names of parameters,
        buffers and options that the class itself keeps or reads. Errors: ImportError for an entry with more than these
        and what the operator keeps."""
        super().__init_subclass__(**rest)
        if norm is not None:
            cls.declared = DECLARED[norm].with_columns(beside)
            cls.own = tuple(name for name in cls.declared.options if name in beside)
            cls.shown = tuple(name for name in cls.declared.options if name in COLUMN_OPTIONS)
            cls.operator_name = cls.declared.operator or ""
            statistics = (buffer.name for buffer in cls.declared.buffers if not buffer.is_counter)
            counters = (buffer.name for buffer in cls.declared.buffers if buffer.is_counter)
            counter = next((name for name in counters if name not in beside), None)
            cls._state = (next(statistics), next(statistics, None), counter)

    def __init__(
        self,
        num_features: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        groups: int = 0,
        sync: bool = False,
        process_group: "torch.distributed.ProcessGroup | None" = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.sync, self.process_group = sync, process_group
        num_features = check_width("num_features", num_features)
        check_eps(eps, is_positive=True)
        if groups < 0 or (groups and num_features % groups):
            raise InputError(f"groups must divide num_features {num_features}, or be 0 for no scaling; got {groups}")
        if groups and "groups" not in self.declared.options:
            raise InputError(f"{type(self).__name__} has no group scaling, got groups={groups}: leave it out")
        self.num_features, self.eps, self.groups = num_features, eps, groups
        self.elementwise_affine = elementwise_affine
        for parameter in self.declared.parameters:
            is_affine, is_bias = parameter.shape == "width", parameter.name.endswith("bias")
            # `elementwise_affine` does not concern single numbers, such as RepBN's share, which are always learned.
            is_learned = (elementwise_affine or not is_affine) and (bias or not is_bias)
            size = parameter.size(num_features)
            p = nn.Parameter(torch.empty(size, device=device, dtype=dtype)) if is_learned else None
            self.register_parameter(parameter.name, p)  # None: the attribute exists, but nothing is learned
        statistics_dtype = torch.float64 if (dtype or torch.get_default_dtype()) == torch.float64 else torch.float32
        for buffer in self.declared.buffers:
            buffer_dtype = torch.int64 if buffer.is_counter else statistics_dtype
            empty = torch.empty(buffer.size(num_features), device=device, dtype=buffer_dtype)
            self.register_buffer(buffer.name, empty)
        self.refused = torch.zeros(1, dtype=torch.int64, device=device)
        self._recomputed = RecomputedStatistics()
        options = {name: getattr(self, name) for name in self.declared.options}
        self.numbers_of = self.declared.numbers(num_features, options)
        self.reset_parameters()
        self.remember_copies()  # gives this module, and each later copy, its `_origin`

    def steering(self) -> Steering:
        # Training moves the weight and all buffers. Without a learned weight, nothing would show averaging.
        buffers = (getattr(self, buffer.name) for buffer in self.declared.buffers)
        return [(self.weight, buffer) for buffer in buffers if self.weight is not None]

    def settings(self) -> dict[str, Any]:
        """Returns the operator's options besides `train` and `eps`."""
        return {COLUMN_OPTIONS[name]: getattr(self, name) for name in self.shown}

    def in_use(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns weight and bias as the operator receives them."""
        return used(self.weight, self.numbers_of["weight"]), used(self.bias, self.numbers_of["bias"])

    def state(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns the operator's buffers: two statistics and a counter."""
        first, second, iters = (None if name is None else getattr(self, name) for name in self._state)
        return first, second, iters

    def reset_running_stats(self) -> None:
        """Resets the statistics to their initial values."""
        for buffer in self.declared.buffers:
            if buffer.name in self._state:
                getattr(self, buffer.name).fill_(buffer.start)
        self.refused.zero_()
        self.told()

    def reset_parameters(self) -> None:
        """Resets parameters and statistics to their initial values."""
        self.reset_running_stats()
        for name, numbers in self.numbers_of.items():
            if (parameter := getattr(self, name)) is not None:
                write_first(parameter, numbers, self.first_scale if name in self.gains else 1.0)
        mark_drawn(self)

    def frozen(self) -> tuple[Tensor | None, Tensor]:
        """Returns the statistics that evaluation uses: the mean that it subtracts (None: it subtracts nothing), and the
        mean square under the root. A class overrides this method if these are not its buffers."""
        first, second, _ = self.state()
        assert first is not None
        if self._state[0] == "running_mean":  # a norm that subtracts the mean; its second buffer is the variance
            assert second is not None
            return first, second
        return None, first

    @leaf
    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Returns N(x). `padding_mask`: bool in x's leading shape, True at padding; None for the mask that `with
        padding_mask(…)` has put in force."""
        if x.is_nested:
            return over_rows(self, x, padding_mask)
        if x.dim() and x.shape[-1] != self.num_features:
            raise InputError(f"x must be (…, {self.num_features}), got {tuple(x.shape)}")
        if self.returns != "x":
            x, dtype = self.widened(x)
            return self._normed(x, padding_mask).to(dtype)
        return self._normed(x, padding_mask)

    def _normed(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        """Returns N(x). In training it updates the statistics once; a recomputation in the backward pass uses those of
        the first run. `padding_mask`: as in `forward`."""
        if self.groups:
            x = scale_groups(x, self.groups)
        is_compiling, is_exporting = torch.compiler.is_compiling(), torch.compiler.is_exporting()
        # `_origin` links a copy to the module that it was copied from, such as a model's average to the model.
        if not is_compiling and self._origin is not None:
            if self.training:
                self._origin.trains()  # the statistics are its own from now on, no copied ones
            else:
                self.take_over()  # the statistics become that module's if this one's weights were averaged
        # Without the operator there is only evaluation, by a formula.
        unsupported = None  # a kind of call in which the operator cannot update statistics, in words
        if not is_compiling:
            if is_sharded(x):
                unsupported = "a DTensor"
            elif functionalizes():
                unsupported = "torch.func.functionalize"
        if unsupported is not None and self.training:
            raise InputError(
                f"{unsupported} cannot follow the running statistics of {type(self).__name__} in training: call eval() "
                "first, or train on plain tensors, where sync=True has the statistics of all ranks"
            )
        if not self.training and (is_exporting or unsupported is not None):
            mask = mask_for(x) if padding_mask is None else padding_mask
            # No statistics are measured, so only `hidden` counts: the positions where y is 0.
            y = formulas.running_norm(x, *self.frozen(), *self.in_use(), self.eps, self.hidden(mask))
            return self.completed(y, x, mask)
        # The operator counts the batches that it refuses: those whose statistics are not finite.
        if self.refused.device != x.device and not is_compiling:
            self._move_refused(x.device)
        # With None, refused batches are not counted.
        refused = self.refused if self.refused.device == x.device and not is_exporting else None
        # The mask is the explicit one if there is one, else that of the first run or the one in force.
        first_run = None  # (mask, statistics) of the forward that checkpointing repeats now
        if self.training and not is_compiling and is_second_run():
            first_run = self._recomputed.find(x, padding_mask)
        mask, first_stats = (mask_for(x), None) if first_run is None else first_run
        if padding_mask is not None:
            check_mask(padding_mask)
            mask = padding_mask
        options: dict[str, Any] = {"train": self.training, "eps": self.eps, **self.settings()}
        if self.sync and self.training:
            options["group"] = group_name(self.process_group)
        run = getattr(OPS, self.operator_name)
        # The operator also measures statistics, without the positions of `counted_out`.
        y, stats = run(x, *self.in_use(), self.counted_out(x, mask), *self.state(), refused, first_stats, **options)
        if self.training and not is_compiling and first_run is None and will_recompute():
            self._recomputed.add(x, mask, stats)
        return self.completed(y, x, mask)

    def counted_out(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """Returns the mask of the positions that are left out of the statistics; None if there are none. `mask`: True
        at padding."""
        return mask

    def completed(self, y: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
        """Returns the norm's result, given its operator's result y. `mask`: True at padding."""
        return y

    def hidden(self, mask: Tensor | None) -> Tensor | None:
        """Returns the mask of the positions where y is 0; None if there are none. `mask`: True at padding."""
        return mask

    def refused_batches(self) -> int:
        """Returns the number of batches that did not update the running statistics, because their own statistics were
        not finite. Waits for the device."""
        return int(self.refused)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves and casts the module, but keeps its statistics in 32 or 64 bits."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            # .half() and .bfloat16() convert parameters only, because running averages need their digits.
            if old is not None and new is not None and new.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = old.to(new.device)
        self._recomputed = RecomputedStatistics()
        self._move_refused(next(iter(self.buffers())).device)
        return self

    def _move_refused(self, device: torch.device) -> None:
        """Moves `refused`, which module.to() does not find, because it is not a buffer."""
        before = self.refused
        self.refused = torch.zeros_like(before, device=device)
        if not before.is_meta and not self.refused.is_meta:
            self.refused.copy_(before)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.remember_copies()

    def __deepcopy__(self, memo: dict[int, Any]) -> "RunningNorm":
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        # RunningNorm's own method is called, because parametrize gives instances a class whose __getstate__ raises.
        new.__setstate__(copy.deepcopy(RunningNorm.__getstate__(self), memo))
        new.process_group = self.process_group
        return new

    def __getstate__(self) -> dict[str, Any]:
        # A process group exists in this process only; a pickle stands for the default group.
        return super().__getstate__() | {"_recomputed": RecomputedStatistics(), "process_group": None}

    def extra_repr(self) -> str:
        more = "".join(f", {name}={getattr(self, name)}" for name in (*self.shown, *self.own))
        groups = f", groups={self.groups}" if self.groups else ""
        sync = ", sync=True" if self.sync else ""
        return f"{self.num_features}, eps={self.eps}{more}, elementwise_affine={self.elementwise_affine}{groups}{sync}"


class _OneAlpha(RunningNorm):
    """The base of norms with a single α for all running statistics."""

    def __init__(
        self,
        num_features: int | Sequence[int],
        eps: float = 1e-5,
        alpha: float = 0.9,
        *,
        device: Any = None,  # torch.nn.utils.skip_init looks for an argument of this name
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        self.alpha = check_alpha("alpha", alpha)
        super().__init__(num_features, eps, device=device, dtype=dtype, **settings)


class BatchNorm(_OneAlpha, norm="batchnorm"):
    """y = γ⊙(x − μ_B)/√(σ²_B + ε) + β, mean and biased variance per feature over all real positions.

    Training moves the running statistics, μ ← αμ + (1−α)μ_B and σ² (biased) alike; evaluation uses them. Features are
    the last dimension. dx = (γ/σ_B)[dy − mean dy − x̂⊙mean(dy⊙x̂)], the true gradient.

    >>> import torch
    >>> BatchNorm(4)(torch.randn(2, 3, 4)).shape
    torch.Size([2, 3, 4])

    Args:
        num_features: d. eps: ε. alpha: α, which is 1 − momentum in torch. elementwise_affine, bias: True for learned γ
            and β. groups: the groups of the GroupScaling that comes first; 0 for none. sync: in training, the ranks of
            `process_group` (default: all) treat their batches as one, merging counts, means and squares about them;
            every rank must call forward and backward equally often. γ and β get this rank's gradients, which DDP
            averages.

    Shapes: x (…, d), `padding_mask` (…), `weight`, `bias`, `running_mean`, `running_var` (d,). y, dx are 0 at padding;
    a batch with no real position moves no statistics, nor does one whose statistics are not finite
    (`refused_batches()`). dtypes: x and parameters f32, f64, bf16, f16, each its own; y has x's; statistics f32, or f64
    for an f64 module.
    Errors: InputError (a ValueError) for another width, ValueError for a mask of another shape, TypeError for integers.
    Source: Ioffe & Szegedy 2015; Shen et al. 2020, Algorithm 1, eq 1–3.
    """

    running_mean: Tensor
    running_var: Tensor

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict.pop(prefix + "num_batches_tracked", None)  # torch.nn's buffer, which only its momentum=None reads
        super()._load_from_state_dict(state_dict, prefix, *rest)


class PowerNormV(_OneAlpha, norm="powernorm-v"):
    """y = γ⊙x/√(ψ²_B + ε) + β, ψ²_B = mean x² per feature over all real positions (PN-V).

    Training moves ψ² ← αψ² + (1−α)ψ²_B; evaluation uses it. dx = (γ/ψ_B)[dy − x̂⊙mean(dy⊙x̂)], the true gradient.

    >>> import torch
    >>> PowerNormV(4, alpha=0.95)(torch.randn(2, 3, 4)).shape
    torch.Size([2, 3, 4])

    Arguments, shapes, masks, dtypes and errors are BatchNorm's; the buffer is `running_phi` (d,), 1 at the start.
    Source: Shen et al. 2020, Definition 1, eq 4–6.
    """

    running_phi: Tensor


class PowerNorm(RunningNorm, norm="powernorm"):
    """y = γ⊙x/√(ψ² + ε) + β with the running ψ² of the step before, and a running ν in the gradient.

    A training forward then sets ψ² ← α_f ψ² + (1−α_f)ψ²_B, with ψ²_B = mean x² per feature over real positions. The
    backward pass, with G = γ⊙dy, computes X′ = G − ν⊙x̂, dx = X′/√(ψ² + ε), ν ← ν(1 − (1−α_b)Γ) + (1−α_b)Λ,
    Γ = mean(x̂²), Λ = mean(G⊙x̂). This is an approximation by design: the gradient is not the derivative of the
    formula, and there is no second derivative. In the first `warmup_iters` training forwards ψ_B replaces ψ, with
    PN-V's exact gradient, and ψ² is the mean so far.

    `mode="release"` computes in every step exactly what the authors' mask_powernorm.py does: group scaling first, the
    running ψ² moved twice during warm-up, ψ_B in dx, means over padding too. Its state dicts load unchanged.

    >>> import torch
    >>> norm = PowerNorm(4, warmup_iters=100)
    >>> _ = norm(torch.randn(2, 3, 4))
    >>> norm.iters.item()
    1

    Args:
        num_features: d. eps: ε. alpha_fwd, alpha_bwd: α_f and α_b. warmup_iters: the warm-up, best equal to the
            learning rate's. mode: paper or release. groups: the groups of the GroupScaling that comes first, 0 for none
            (release: at least 1, and the number of heads in the authors' models). elementwise_affine, bias: True for
            learned γ and β.

    Shapes: x (…, d), `padding_mask` (…), `weight`, `bias` (d,); buffers `running_phi` (1, d, 1, 1) = ψ², first 1,
    `ema_gz` (1, d, 1, 1) = ν/(1−α_b), `iters` (1,). Masks, dtypes and errors are BatchNorm's. A second derivative in
    training, and torch.func there, are a NotImplementedError.
    Source: Shen et al. 2020, Definition 3, Algorithm 2, eq 8–13.
    """

    running_phi: Tensor
    ema_gz: Tensor
    iters: Tensor

    def __init__(
        self,
        num_features: int | Sequence[int],
        eps: float = 1e-5,
        alpha_fwd: float = 0.9,
        alpha_bwd: float = 0.9,
        warmup_iters: int = 4000,
        mode: str = "paper",
        groups: int | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        if mode not in MODES:
            raise InputError(unknown("mode", mode, MODES))
        if warmup_iters < 0:
            raise InputError(f"warmup_iters must be at least 0, got {warmup_iters}")
        groups = (1 if mode == "release" else 0) if groups is None else groups
        if mode == "release" and groups < 1:
            raise InputError(f"groups must be at least 1 in mode release, which always scales groups; got {groups}")
        self.alpha_fwd, self.alpha_bwd = check_alpha("alpha_fwd", alpha_fwd), check_alpha("alpha_bwd", alpha_bwd)
        self.warmup_iters, self.mode = warmup_iters, mode
        super().__init__(num_features, eps, groups=groups, device=device, dtype=dtype, **settings)

    def hidden(self, mask: Tensor | None) -> Tensor | None:
        # The authors' code, which mode="release" follows, computes y at padding, too.
        return None if self.mode == "release" else mask


def check_alpha(name: str, alpha: float) -> float:
    """Checks α and returns it; InputError outside [0, 1)."""
    if not 0 <= alpha < 1:
        raise InputError(f"{name} must lie in [0, 1), got {alpha}")
    return alpha


def check_sizes(name: str, sizes: Any) -> tuple[int, ...]:
    """Returns one size, or several, as a tuple. `name`: the argument, for messages. Errors: TypeError for a size that
    is no whole number; InputError for a negative one, and if there is none."""
    is_several = isinstance(sizes, Iterable) and not isinstance(sizes, str) and not hasattr(sizes, "__index__")
    checked = []
    for size in sizes if is_several else [sizes]:
        try:
            checked.append(index(size))
        except TypeError:
            raise TypeError(f"{name} must be a whole number, or several for a row norm; got {size!r}") from None
        if checked[-1] < 0:
            raise InputError(f"{name} must be at least 0, got {checked[-1]}")
    if not checked:
        raise InputError(f"{name} must name at least one dimension, got none")
    return tuple(checked)


def check_width(name: str, width: Any) -> int:
    """Returns the width of a norm over the last dimension alone, given as a number or as a sequence of one. `name`: the
    argument, for messages."""
    widths = check_sizes(name, width)
    if len(widths) > 1:
        raise InputError(f"{name} must be one width, as this norm is over the last dimension alone; got {widths}")
    return widths[0]


def check_eps(eps: float | None, is_positive: bool = False) -> None:
    """Raises InputError for an ε that makes ordinary rows NaN. None is valid: the caller replaces it by a number."""
    if eps is not None and not (eps > 0 if is_positive else eps >= 0):
        raise InputError(f"eps must be {'greater than 0' if is_positive else 'at least 0'}, got {eps}")


def over_rows(norm: nn.Module, x: Any, padding_mask: Tensor | None = None) -> Tensor:
    """Applies the norm to a nested tensor x (jagged layout), which holds no padding. Errors: InputError for another
    layout, for holes, for a jagged last dimension, and for a `padding_mask`."""
    if x.layout != torch.jagged:
        raise InputError(
            "nested tensors must have torch.jagged layout, got torch.strided: make x with layout=torch.jagged"
        )
    if x._ragged_idx == x.dim() - 1:
        raise InputError("the last dimension of a nested tensor must have one width, got a jagged one")
    if x.lengths() is not None:
        raise InputError("a nested tensor must have no holes between its parts: call x.contiguous() first")
    if padding_mask is not None:
        raise InputError("a nested tensor has no padding: leave out padding_mask")
    return torch.nested.nested_tensor_from_jagged(norm(x.values()), x.offsets(), jagged_dim=x._ragged_idx)
