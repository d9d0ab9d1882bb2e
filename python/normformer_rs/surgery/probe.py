"""Finds by trial calls which norm a module computes, whatever its class and its parameters are called."""

import contextlib
import copy
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from .. import nn as nfnn
from ..config import tables
from ..nn.norms import RowNorm
from ..nn.result import Typed
from .handover import own_forward


class RecognisedNorm(NamedTuple):
    """A norm over the last dimension, y = factor·(offset + gain)⊙x̂ + bias.

    x̂ is the norm `computes` of `normformer_rs.tables()` with its first gain: ScaleNorm's is √d·x/max(‖x‖₂, ε).
    """

    width: int
    computes: str
    gain: str | None = None
    """The gain's name in the module. None: the norm learns no gain, and factor·offset is 1."""
    bias: str | None = None
    eps: float | None = math.nan
    """ε in the formula of `computes`. None: the machine epsilon of the dtype that it computes in; nan: unknown."""
    offset: float = 0.0
    factor: float = 1.0
    returns: Literal["x", "weight", "promoted"] = "x"
    """Which tensor the result's dtype comes from (`nn.result`)."""


KINDS: dict[str, Any] = {entry["name"]: nfnn.norm_class(entry["name"]) for entry in tables()["norms"]}
"""The class of every norm of the table."""


class _Settings(NamedTuple):
    """Settings of trial calls: device, dtype, the sizes of rows, and the allowed error."""

    device: torch.device
    dtype: torch.dtype
    large: float
    """A factor of rows at which ε has no effect."""
    huge: float
    """A factor of rows whose numbers can still be squared."""
    tiny: float
    """A factor of rows at which ε dominates."""
    error: float
    """The largest gap, relative to the largest number, at which two results count as equal."""


_EXACT = _Settings(torch.device("cpu"), torch.float64, large=1e6, huge=1e12, tiny=1e-30, error=1e-9)
_NEAR = 1e-3
"""The allowed error for rows in which ε has an effect. It is larger than `_Settings.error`, since a module may add ε
elsewhere than the table's norm does: to σ instead of σ², for example."""


def probe(module: nn.Module, width: int | None = None, computes: str | None = None) -> RecognisedNorm | str:
    """Returns the norm that trial calls of a copy of the module show, or the reason why it is none. The module and the
    random state do not change.

    The first calls are in f64 on the CPU. If they show no norm, further calls are in f32 on the module's device, since
    its kernels may support nothing else.

    Args:
        width, computes: the norm's width and its name in the table, if they are known.
    """
    refused = _refused(module)
    if refused is not None:
        return refused
    parameters = dict(module.named_parameters(recurse=False))
    width = _width(module, parameters) if width is None else width
    if width is None:
        return "its width is unknown"
    names = [name for name, kind in KINDS.items() if _measures(kind) and computes in (None, name)]
    first = next(iter(parameters.values()), None)
    device = _EXACT.device if first is None or first.is_meta else first.device
    found: RecognisedNorm | str = f"computes no norm over rows of width {width}"
    in_f32 = _Settings(device, torch.float32, large=1e3, huge=1e9, tiny=1e-18, error=1e-4)
    for settings in (_EXACT, in_f32):
        with _EXACT.device:  # whatever the caller's default device, the trial draws its numbers on the CPU
            try:
                found = _find(_Trial(module, parameters, width, settings), names)
            except Exception as reason:  # a module may raise anything for rows that it does not take
                said = str(reason).partition("\n")[0]
                found = f"takes no rows of width {width} ({type(reason).__name__}: {said})"
        if isinstance(found, RecognisedNorm):
            break
    return found


def result_of(module: nn.Module, width: int) -> Literal["x", "weight", "promoted"]:
    """Returns which tensor the dtype of a norm's result comes from: x, its weight, or both. Calls of a copy on the meta
    device show it."""
    if isinstance(module, Typed):
        return module.returns
    if type(module).__module__.startswith("torch.nn.") or not module._parameters:
        return "x"
    result_dtypes = []  # for each pair (dtype of the weight, dtype of x)
    for weight_dtype, x_dtype in ((torch.float16, torch.float32), (torch.float32, torch.float16)):
        try:
            twin = copy.copy(module)
            twin._parameters = {
                name: None if p is None else nn.Parameter(torch.empty(p.shape, dtype=weight_dtype, device="meta"))
                for name, p in module._parameters.items()
            }
            with warnings.catch_warnings(action="ignore"):
                x = torch.empty(2, width, dtype=x_dtype, device="meta")
                result_dtypes.append(_forward(module)(twin, x).dtype)
        except Exception:  # another library's kernel may not run on the meta device
            return "x"
    if result_dtypes == [torch.float16, torch.float32]:  # the dtypes of the weight in the two calls
        return "weight"
    return "promoted" if result_dtypes == [torch.float32] * 2 else "x"


def _measures(kind: Any) -> bool:
    """Returns whether norms of a class divide each row by a length, and learn a gain and at most a bias. Trial calls
    recognise only such norms."""
    return issubclass(kind, RowNorm) and kind.has_eps and kind.names in (("weight",), ("weight", "bias"))


def _refused(module: nn.Module) -> str | None:
    """Returns the reason why a module gets no trial calls, or None."""
    if is_parametrized(module):
        return "parametrized: remove its parametrizations first, and parametrize the new norm"
    if type(module).__module__.startswith("torch.nn.") and type(module) not in (nn.LayerNorm, nn.RMSNorm):
        return "torch.nn's own, and it normalises over other dimensions"
    if has_stateful_parts(module):
        return "made of other modules"
    forward = own_forward(module)
    if forward is not None and getattr(forward, "__self__", None) is not module:
        return "has a forward of its own, which was put into the instance"
    tensors = [f"the buffer {name}" for name, buffer in module.named_buffers(recurse=False) if buffer is not None]
    tensors += [f"the tensor {name}" for name, value in vars(module).items() if isinstance(value, Tensor)]
    if tensors:
        return f"keeps {', '.join(tensors)}"
    if len(module._parameters) > 2:
        return f"has {len(module._parameters)} parameters"
    try:
        _, *arguments = inspect.signature(_forward(module)).parameters.values()  # without self
    except (TypeError, ValueError):
        return "its forward takes no x"
    if len(arguments) != 1:
        return f"its forward takes {', '.join(str(p) for p in arguments[1:]) or 'nothing'} beside x"
    return None


def has_stateful_parts(module: nn.Module) -> bool:
    """Returns whether a module has children with parameters or buffers, or children but no parameters of its own. A
    norm may have children without numbers: x-transformers' LayerNorm calls one and multiplies by its own gain."""
    inner = [*module.children()]
    return any([*child.parameters()] or [*child.buffers()] for child in inner) or (
        bool(inner) and not module._parameters
    )


def _forward(module: nn.Module) -> Callable[..., Any]:
    """Returns a module's forward as a function of (module, x): the method that was put into the instance if there is
    one, else its class's."""
    return getattr(own_forward(module), "__func__", type(module).forward)


def _width(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> int | None:
    """Returns a norm's width: the length of its parameters. If they are single numbers or missing, it is the only whole
    number > 1 among the attributes. None: the width is unknown."""
    sizes = {p.shape[-1] for p in parameters.values() if p.numel() > 1}
    if not sizes:
        for name, value in vars(module).items():
            # a width may be in a tuple, as normalized_shape=(d,) is
            number = value[0] if isinstance(value, Sequence) and len(value) == 1 else value
            if name[0] != "_" and type(number) is int and number > 1:
                sizes.add(number)
    are_rows = all(p.numel() in (1, p.shape[-1]) for p in parameters.values() if p.dim())
    return sizes.pop() if len(sizes) == 1 and are_rows else None


class _Trial:
    """Trial calls of a norm with rows x of its width. `parameters`: the module's own, by name."""

    def __init__(
        self, module: nn.Module, parameters: Mapping[str, nn.Parameter], width: int, settings: _Settings
    ) -> None:
        self.module, self.parameters, self.width, self.settings = module, parameters, width, settings
        self._generator = torch.Generator("cpu").manual_seed(0)
        # 2 · 3 rows. The dimension before the last differs from the width, so that a norm over it is noticed.
        shape = (2, 5 if width == 3 else 3, width)
        # rows with different means, which tell layernorm from rmsnorm
        self.x = self._normal(*shape) + self._normal(*shape[:2], 1)

    def _normal(self, *shape: int) -> Tensor:
        """Returns normally distributed numbers in f64."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def drawn(self) -> dict[str, Tensor]:
        """Returns random values for the parameters, from 0.5 to 1.5."""
        return {
            name: torch.rand(p.shape, generator=self._generator, dtype=torch.float64) + 0.5
            for name, p in self.parameters.items()
        }

    def answer(self, scale: float, values: Mapping[str, Tensor], training: bool = False) -> Tensor:
        """Returns the module's output for scale·x; parameters that are not in `values` are zero."""
        return self._call(scale * self.x, values, training).detach().double().cpu()

    def _call(self, x: Tensor, values: Mapping[str, Tensor], training: bool) -> Tensor:
        """Returns the output of a copy of the module. Errors: ValueError if its shape is not that of x."""
        device, dtype = self.settings.device, self.settings.dtype
        filled = {name: values.get(name, torch.zeros(p.shape)) for name, p in self.parameters.items()}
        twin = _stand_in(self.module, {name: p.to(device, dtype) for name, p in filled.items()}).train(training)
        with _undisturbed(self.settings), torch.set_grad_enabled(x.requires_grad):
            y = _forward(self.module)(twin, x.to(device, dtype))
        if not isinstance(y, Tensor) or y.shape != x.shape:
            raise ValueError(f"returns {tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__}")
        return y

    def agrees(self, known: RecognisedNorm, eps: float) -> bool:
        """Returns whether the norm `known` with this ε agrees with the module in harder cases, in both modes: gains of
        both signs and any size, many rows, rows with few large numbers, huge rows, rows without a batch, gradients. The
        error may be ten times that of the first trial."""
        large, huge, error = self.settings.large, self.settings.huge, self.settings.error
        # half of the drawn numbers, which are from 0.5 to 1.5, become negative
        values = {name: torch.where(value > 1, value, -value) for name, value in self.drawn().items()}
        # 300 rows, whose numbers differ in size by powers of ten
        many = self._normal(1, 300, self.width) * self._normal(1, 300, self.width).mul(2).exp()
        many[0, :9, 1:] *= 1e-6  # nine rows that one number dominates
        # pairs of x and the factor of the parameters' values
        cases = [(large * many, 1.0), (huge * self.x, -1.0), (large * self.x, 1e4), (large * self.x, -1e4)]
        for training in (False, True):
            for x, factor in cases:
                scaled = {name: factor * value for name, value in values.items()}
                y, expected = self._call(x, scaled, training).double().cpu(), _compute(known, x, scaled, eps)
                if not _gap(y, expected) < 10 * error:
                    return False
        return self._is_alike(known, eps, large * self.x[0], values) and self._has_gradient(known, eps, values)

    def _is_alike(self, known: RecognisedNorm, eps: float, x: Tensor, values: Mapping[str, Tensor]) -> bool:
        """Returns whether the norm agrees with the module for x without a batch, or the module does not accept x."""
        try:
            y = self._call(x, values, training=False)
        except Exception:  # the module does not accept rows without a batch
            return True
        return _gap(y.double().cpu(), _compute(known, x, values, eps)) < 10 * self.settings.error

    def _has_gradient(self, known: RecognisedNorm, eps: float, values: Mapping[str, Tensor]) -> bool:
        """Returns whether the norm's gradient agrees with the module's, or the module fails in training mode."""
        x = (self.settings.large * self.x).requires_grad_()
        dy = self._normal(*self.x.shape)  # the derivative of some loss with respect to y
        try:
            y = self._call(x, values, training=True)
        except Exception:  # the module fails in training mode or with gradients, so it is used for inference only
            return True
        with torch.enable_grad():
            expected = torch.autograd.grad(_compute(known, x, values, eps), x, dy)[0]
        dx = torch.autograd.grad(y, x, dy.to(y))[0] if y.requires_grad else torch.zeros_like(expected)
        return _gap(dx, expected) < 10 * self.settings.error


def _find(trial: _Trial, names: Sequence[str]) -> RecognisedNorm | str:
    """Returns the norm among `names` that the module computes, or the reason why it computes none of them."""
    large, tiny, error = trial.settings.large, trial.settings.tiny, trial.settings.error
    no_norm = f"computes no norm over rows of width {trial.width}"

    # Large rows show all terms of y = factor·(offset + gain)⊙x̂ + bias, because ε has no effect in them.
    # The parameter whose effect (slope) in every row is its own values is the bias. The other one is the gain.
    zero, values = trial.answer(large, {}), trial.drawn()
    slopes = {name: trial.answer(large, {name: value}) - zero for name, value in values.items()}
    biases = [name for name, slope in slopes.items() if _gap(slope, values[name].expand(slope.shape)) < error]
    gains = [name for name in slopes if name not in biases]
    if len(biases) > 1 or len(gains) > 1:
        return "its parameters are not a gain and a bias"
    gain, bias = next(iter(gains), None), next(iter(biases), None)
    x_hat = slopes[gain] / values[gain] if gain else zero  # the module's x̂, times factor
    fits = [(name, *_fit(x_hat, _row(name, large * trial.x, 0.0))) for name in names]  # (norm, factor, gap)
    fitting = [(name, factor) for name, factor, gap in fits if gap < error]
    if not fitting:
        return no_norm
    offset, gap = _fit(zero, x_hat)  # with zeros as parameters, y = offset·(factor·x̂)
    if gap > error:
        return "its gain does not multiply a norm"
    _, first_factor = fitting[0]
    if gain is None and abs(first_factor - 1) > error:
        return f"multiplies by {first_factor:.6g}, which no gain of its own could carry"
    if gain:
        # of norms that fit, those with as many gains (one number, or a vector) come first
        has_one = trial.parameters[gain].numel() == 1
        fitting = [(name, factor) for name, factor in fitting if KINDS[name].has_one_gain == has_one] or fitting

    # In tiny rows x̂ is x divided by a power of ε, from which ε follows. Norms that agree for tiny and large rows still
    # differ between them, at the size where ε begins to count.
    tiny_zero = trial.answer(tiny, {})
    tiny_x_hat = (trial.answer(tiny, {gain: values[gain]}) - tiny_zero) / values[gain] if gain else tiny_zero
    new_values, candidates = trial.drawn(), []  # candidates: (gap where ε begins to count, norm, ε)
    for name, factor in fitting:
        offset, factor = _rounded(offset, error), _rounded(factor, error, trial.width)
        eps, size = _epsilon(name, tiny_x_hat / factor, tiny * trial.x)  # `size`: of rows where ε begins to count
        known = RecognisedNorm(trial.width, name, gain, bias, _attribute(trial, eps), offset, factor)
        gaps = []
        for scale in (large, 1.0, max(size, tiny)):
            expected = _compute(known, scale * trial.x, new_values, eps)
            gaps.append(max(_gap(trial.answer(scale, new_values, training), expected) for training in (False, True)))
        gap_large, gap_near, gap_at_eps = gaps
        if max(gap_large, gap_near) < _NEAR:
            candidates.append((gap_at_eps, known, eps))
    if not candidates:
        return no_norm
    _, best, eps = min(candidates, key=lambda candidate: candidate[0])
    return best if trial.agrees(best, eps) else f"computes {best.computes} for some rows, gains or modes alone"


def _stand_in(module: nn.Module, parameters: Mapping[str, Tensor]) -> nn.Module:
    """Returns a copy of a module with the given parameters and no hooks. Its forward cannot change the module."""
    twin = object.__new__(type(module))
    nn.Module.__init__(twin)
    # nn.Module's own attributes stay as its constructor made them: without hooks, parameters and children
    torchs_own = {*vars(twin)}
    for name, value in vars(module).items():
        if name not in torchs_own and name != "forward":
            vars(twin)[name] = copy.copy(value) if isinstance(value, (list, dict, set)) else value
    for name in module._parameters:
        twin._parameters[name] = nn.Parameter(parameters[name], requires_grad=False) if name in parameters else None
    for name, part in module._modules.items():
        twin._modules[name] = None if part is None else _stand_in(part, {})
    return twin


@contextlib.contextmanager
def _undisturbed(settings: _Settings) -> Iterator[None]:
    """Runs a `with` block without gradients, autocast, compiler and warnings, and without changing the states of the
    random generators."""
    device = settings.device
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(device)
        if settings is _EXACT:
            stack.enter_context(Widened())
        yield


class Widened(TorchFunctionMode):
    """Makes a forward that converts to f32 compute in f64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch with f64 in place of every other floating-point dtype."""

        def wide(value: Any) -> Any:
            """Returns f64 for a floating-point dtype, and any other argument as it is."""
            return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            func = Tensor.double
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def _row(name: str, x: Tensor, eps: float) -> Tensor:
    """Returns x̂, the norm of the rows x without gain and bias, as the table's norm `name` computes it."""
    return KINDS[name](x.shape[-1], eps=eps, elementwise_affine=False)(x)


def _compute(known: RecognisedNorm, x: Tensor, values: Mapping[str, Tensor], eps: float) -> Tensor:
    """Returns the output of a recognised norm with these parameter values."""
    gain = values[known.gain] if known.gain else 0.0
    y = known.factor * (known.offset + gain) * _row(known.computes, x, eps)
    return y + values[known.bias] if known.bias else y


def _fit(y: Tensor, x: Tensor) -> tuple[float, float]:
    """Returns the number c that fits y ≈ c·x best (least squares), and the gap between y and c·x relative to x."""
    c = float((y * x).sum() / (x * x).sum())
    return c, _gap(y, c * x, x)


def _gap(y: Tensor, expected: Tensor, unit: Tensor | None = None) -> float:
    """Returns the largest |y − expected| divided by the largest number of `unit` (None: of `expected`). It is inf if a
    number is not finite."""
    gap = float((y - expected).abs().max() / (expected if unit is None else unit).abs().max())
    return gap if math.isfinite(gap) else math.inf


def _rounded(value: float, error: float, width: int = 1) -> float:
    """Returns 0, 1, √d or 1/√d if the value equals one of them within the error, else the value. `width`: d."""
    exact_values = (0.0, 1.0, math.sqrt(width), 1 / math.sqrt(width))
    return next((exact for exact in exact_values if abs(value - exact) <= error * max(abs(exact), 1 / width)), value)


def _epsilon(name: str, x_hat: Tensor, x: Tensor) -> tuple[float, float]:
    """Returns ε of a module that computes the norm `name`, and the size of rows at which ε begins to count. `x_hat`:
    the module's x̂ of rows x much smaller than that.

    For such rows x̂ = x·ε^−power, where power is ½ if ε is added to a mean square, and 1 if it is a lower bound of a
    length. The table's norm with two values of ε shows its power, and then the module's x̂ shows the module's ε.
    """
    largest = float(x_hat.abs().max())
    if not math.isfinite(largest) or _gap(x_hat, _row(name, x, 0.0)) < _NEAR:  # x̂ is that of ε = 0
        return 0.0, 0.0
    # the largest |x̂| of the table's norm with ε = 1 and ε = 4
    largest_at_1, largest_at_4 = (float(_row(name, x, eps).abs().max()) for eps in (1.0, 4.0))
    power = math.log(largest_at_1 / largest_at_4, 4)
    eps = (largest_at_1 / largest) ** (1 / power)
    return eps, eps**power


def _attribute(trial: _Trial, eps: float) -> float | None:
    """Returns the module's attribute that equals the ε found; without such an attribute, the ε found. None: the module
    uses the machine epsilon."""
    # ε was computed from a power of x̂, so it is less exact than x̂: an attribute may differ from it by √error
    tolerance, attributes = math.sqrt(trial.settings.error), vars(trial.module)
    if "eps" in attributes and attributes["eps"] is None:
        machine = torch.finfo(trial.settings.dtype).eps
        if abs(eps - machine) <= tolerance * machine:
            return None
    # classes give ε many names, so any positive float may be it
    numbers = [value for value in attributes.values() if type(value) is float and value > 0]
    rounded = float(f"{eps:.10g}")  # without the rounding errors of the trial calls, which reach the last digits in f64
    return next((value for value in numbers if abs(eps - value) <= tolerance * value), rounded)
