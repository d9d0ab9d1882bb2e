"""Proves the structure that a run has found: blocks are swapped to the scheme that they already have, and the model's
results must not change."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import InputError
from ..schemes import Combine, Learned, Place, ResidualSpec, Scheme, StackSpec, StreamStep, norm
from .blocks import Group, structure_of
from .examples import quietly
from .record import exchanged, rebuilt, stream_in, tensors_in
from .spec import Part
from .stack_residual import WIDE
from .undo import Edits

_ERRORS = {torch.float64: 1e-5, torch.float32: 1e-4}
"""The allowed difference relative to the largest number, by dtype. f64 allows 1e-5, since many models compute some of
their numbers in f32."""
_MANY, _SUMS = 1_000_000, 1021
"""A gradient of more than _MANY numbers is compared by _SUMS sums of its numbers instead."""
_IN_16_BITS = 0.1
"""In 16 bits, the allowed ratio of the root mean square of the difference to that of the numbers."""


class OwnForm(Scheme):
    """The scheme that the blocks already have, as a run has found it. With `is_wide` it also has a second stream of
    zeros, and a weighted sum of all outputs in which only the last has a weight. These change no result, but make the
    hidden state wider, as schemes with several tensors do. A model that reads hidden states between blocks then fails
    the proof."""

    name = "own-form"

    def __init__(self, group: Group, is_wide: bool = False) -> None:
        self.parts = tuple(structure_of(block).parts for block in group.blocks)
        self.has_end, self.is_wide = group.end is not None, is_wide

    def _part(self, place: Place) -> Part | None:
        """Returns the description of the sublayer at a place. None: its block has fewer sublayers."""
        parts = self.parts[min(place.layer, len(self.parts) - 1)]
        return parts[place.index] if place.index < len(parts) else None

    def around(self, place: Place) -> ResidualSpec:
        """Returns the norms and factors of the block's own sublayer."""
        part = self._part(place)
        if part is None:
            return ResidualSpec(streams=[StreamStep(0.0, 0.0)] if self.is_wide else [])
        # if the block does not say where its norm stands, it stands before the sublayer
        is_before = part.before is not None or (part.norm is not None and not (part.after or part.branch))
        return ResidualSpec(
            before=[norm()] if is_before else [],
            branch=[norm("branch_norm")] if part.branch is not None else [],
            after=[norm("after_norm")] if part.after is not None else [],
            alpha=part.alpha,
            beta=part.beta,
            streams=[StreamStep(0.0, 0.0)] if self.is_wide else [],  # s⁺ = 0·s + 0·F(x)
        )

    def stack(self, place: Place) -> StackSpec:
        """Returns the model's own norm after the stack, and if `is_wide` the additions that change no result."""
        size = place.layers + 1  # the sum is over x and the output of each layer
        eye = [float(i == j) for i in range(size) for j in range(size)]  # each sum is its last term
        combine = Combine(Learned("combine.weight", eye, (size, size)), skips_first=True) if self.is_wide else None
        return StackSpec(combine=combine, streams=[None] if self.is_wide else [], end=[norm()] if self.has_end else [])


def prove(
    model: nn.Module,
    groups: list[Group],
    swap: Callable[[list[Group], Any, Edits], None],
    is_wide: bool,
    look: "Look",
    before: "Mapping[bool, Observed]",
) -> dict[str, str]:
    """Swaps groups to their own scheme and back. Returns the groups whose swap changed the model's results: path → a
    message about the difference.

    Args:
        swap: swap(groups, to, edits) gives each group the scheme `to(group)`, recording its edits.
        is_wide: whether the hidden state gets wider in the trial, as in `OwnForm`.
        look: runs the model.
        before: the runs before the swap; key True: in training mode, False: in evaluation mode.
    """

    def fault(tested: list[Group]) -> str | None:
        """Swaps groups to their own scheme and back. Returns a message if the results changed, else None."""
        edits = Edits(model, "an identity swap")
        try:
            swap(tested, lambda group: OwnForm(group, is_wide), edits)
            for mode, old in before.items():
                message = differ(old, look(mode, old.has_backward))
                if message is not None:
                    return message + (" in training mode" if mode else "")
            return None
        except Exception as reason:  # a model may raise anything on a hidden state of another width
            return in_words(reason)
        finally:
            edits.take_back()
            for group in tested:  # a loop's views are not part of the model, so take_back() does not reach them
                for view in () if group.loop is None else group.blocks:
                    vars(view).pop("residual", None)

    if fault(groups) is None:
        return {}
    # swapping each group alone shows which ones are at fault
    return {group.path: message for group in groups if (message := fault([group])) is not None}


Gradients = dict[Any, Tensor]
"""The gradients of a weighted sum of the outputs with respect to each parameter and the input of each group's first
block: parameter or block → gradient."""


class Observed(NamedTuple):
    """The outputs and gradients of one run."""

    outputs: list[Tensor]
    gradients: "Gradients"
    error: Exception | None = None
    """The exception that ended the run or its backward pass. None: there was none."""
    has_backward: bool = True
    recomputes: bool = False
    """Whether the backward pass ran modules once more, as checkpoints do."""


NO_SHIFTS: Mapping[nn.Parameter, Tensor] = {}

Look = Callable[[bool, bool], Observed]
"""A function (training, has_backward) that runs a model in that mode, with or without a backward pass."""


def in_both_modes(look: Look) -> dict[bool, Observed]:
    """Runs a model in training mode (key True) and evaluation mode (key False). If both give equal outputs, they
    compute the same, and no backward pass is run in evaluation mode."""
    trained, evaluated = look(True, True), look(False, False)  # (training, has_backward)
    pairs = zip(trained.outputs, evaluated.outputs)
    is_same = len(trained.outputs) == len(evaluated.outputs) and all(torch.equal(a, b) for a, b in pairs)
    return {False: evaluated if is_same and trained.error is None else look(False, True), True: trained}


def observe(
    model: nn.Module,
    run: Any,
    groups: list[Group],
    training: bool,
    has_backward: bool,
    shifts: Mapping[nn.Parameter, Tensor] = NO_SHIFTS,
    beside: Sequence[nn.Module] = (),
    is_double: bool = False,
    leaves_large: bool = False,
) -> Observed:
    """Returns the outputs and gradients of one run of the model, `run()`. The random state is the same for each run.
    The rate of dropout is 0, since the fused step draws other masks than torch.

    Args:
        groups: stacks, whose inputs' gradients are observed as well as those of parameters.
        training: run in training mode.
        has_backward: also run the backward pass; else there are no gradients.
        shifts: numbers that are added to parameters in this run.
        beside: other models whose modules the run uses.
        is_double: parameters and buffers are f64 in this run.
        leaves_large: gradients of parameters of more than _MANY numbers are not computed.
    """
    outputs: list[Tensor] = []
    gradients: Gradients = {}
    run_again: list[nn.Module] = []  # the modules that the backward pass ran once more

    def note(module: nn.Module, _: Any) -> None:
        """Adds a module that runs within a backward pass to `run_again`. A hook before its call."""
        if torch._C._current_graph_task_id() != -1:
            run_again.append(module)

    with contextlib.ExitStack() as around:
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                around.callback(module.register_forward_pre_hook(note).remove)
        for each in (model, *beside):
            around.enter_context(quietly(each))
            around.enter_context(_undropped(each))
            each.train(training)
            if is_double:
                _double_buffers(each)
        around.enter_context(torch.enable_grad())
        around.enter_context(_tapped((model, *beside), groups, gradients, shifts, is_double, leaves_large))
        try:
            outputs = [t for t in tensors_in(_plain(run())) if t.is_floating_point()]
            followed = [t for t in outputs if t.requires_grad]
            if followed and has_backward:
                torch.stack([(t.double().flatten() * _weights(t)).sum() for t in followed]).sum().backward()
        except MemoryError:
            raise
        except Exception as reason:  # a model may raise anything
            return Observed([t.detach() for t in outputs], {}, reason, has_backward)
    return Observed([t.detach() for t in outputs], gradients, None, has_backward, bool(run_again))


def _plain(value: Any) -> Any:
    """Returns a model's output with lists in place of dataclasses that are no dictionaries."""
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping | type):
        return [_plain(getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return rebuilt(value, _plain)


def _double_buffers(model: nn.Module) -> None:
    """Replaces the model's buffers by f64 copies; `quietly` puts them back."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.double()


@contextlib.contextmanager
def _undropped(model: nn.Module) -> Iterator[None]:
    """Sets the rate of all dropout layers to 0 inside a `with` block. A dropout between blocks would also drop the
    further tensors of a scheme that travel in the hidden state, and at rate 0 no comparison would show it. So these
    layers raise an error for such a hidden state."""
    rates = [(module, module.p) for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]
    hooks = [module.register_forward_pre_hook(_refuse_wide) for module, _ in rates]
    try:
        for module, _ in rates:
            module.p = 0.0
        yield
    finally:
        for module, p in rates:
            module.p = p
        for hook in hooks:
            hook.remove()


def _refuse_wide(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Raises InputError if a dropout layer gets a hidden state that holds more than x."""
    if args and isinstance(args[0], Tensor) and args[0] in WIDE:
        raise InputError(f"a {type(module).__name__} acts on the hidden state between blocks")


def _accumulate(table: Gradients, owner: Any, gradient: Tensor) -> None:
    """Adds a gradient, or its sums if it is large, to the table's entry for `owner`."""
    g = gradient.detach().to_dense().flatten()
    if g.numel() > _MANY:
        whole = g.numel() // _SUMS * _SUMS
        sums, rest = g[:whole].view(-1, _SUMS).sum(0), g[whole:]  # sum i adds the numbers at i, i + _SUMS, …
        g = sums + F.pad(rest, (0, _SUMS - rest.numel()))
    table[owner] = table[owner] + g if owner in table else g  # reentrant checkpoints give gradients in parts


class _Tap(torch.autograd.Function):
    """Makes a stand-in for a parameter. Its gradient goes to the function `accumulate` only: neither the parameter's
    hooks nor its `grad` see it."""

    @staticmethod
    def forward(ctx: Any, alias: Tensor, accumulate: Callable[[Tensor], None]) -> Tensor:
        """Returns a view of `alias`, the parameter's detached tensor, so that autograd calls `backward` with the view's
        gradient."""
        ctx.accumulate = accumulate
        return alias.view_as(alias)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Hands the gradient to `accumulate`, and passes none on."""
        ctx.accumulate(gradient)
        return None, None


@contextlib.contextmanager
def _tapped(
    models: Sequence[nn.Module],
    groups: list[Group],
    table: Gradients,
    shifts: Mapping[nn.Parameter, Tensor],
    is_double: bool,
    leaves_large: bool,
) -> Iterator[None]:
    """Collects gradients in the table inside a `with` block: those of all parameters, which stand-ins replace there,
    and those of the input of each group's first block. Reentrant checkpoints need that input to require a gradient.
    `shifts`: numbers that are added to parameters; `is_double`: parameters are f64;
    `leaves_large`: parameters of more than _MANY numbers get no gradient."""
    inputs: dict[nn.Module, tuple[Tensor, Tensor]] = {}  # first block → (its input, the copy that replaces it)

    def enter(block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Replaces a first block's input by a copy whose gradient goes into the table."""
        x = stream_in((args, kwargs))
        if x is None or not torch.is_grad_enabled():
            return None
        if block not in inputs:
            new = (x if x.grad_fn is not None else x.detach().requires_grad_()).clone()
            new.register_hook(functools.partial(_accumulate, table, block))
            inputs[block] = x, new
        elif x is not inputs[block][0]:  # this is another call, by a layer that shares the block or by recomputation
            return None
        _, new = inputs[block]
        return exchanged(args, x, new), exchanged(kwargs, x, new)

    owners = [m for model in models for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    held = [(m, name, p) for m in owners for name, p in m._parameters.items() if p is not None]
    replaced = [(m, name, p) for m, name, p in held if p.requires_grad or (is_double and p.is_floating_point())]
    taps: dict[nn.Parameter, Any] = {}  # parameter → the tensor in its place
    for p in dict.fromkeys(p for _, _, p in replaced):
        value = p.detach().double() if is_double else p.detach()
        value = value + shifts[p] if p in shifts else value
        tap = functools.partial(_accumulate, table, p)
        has_gradient = p.requires_grad and not (leaves_large and p.numel() > _MANY)
        taps[p] = _Tap.apply(value.requires_grad_(), tap) if has_gradient else value
    hooks = [g.blocks[0].register_forward_pre_hook(enter, with_kwargs=True) for g in groups]
    try:
        for module, name, p in replaced:
            module._parameters[name] = taps[p]
        yield
    finally:
        for module, name, p in replaced:
            module._parameters[name] = p
        for hook in hooks:
            hook.remove()


def differ(before: Observed, now: Observed, in_64_bits: float = _ERRORS[torch.float64]) -> str | None:
    """Returns a message about the first difference between two observations. None: they agree. `in_64_bits`: the
    tolerance in f64."""
    if before.error is not None and not before.outputs:
        return f"without a swap it fails, and nothing can be compared: {in_words(before.error)}"
    if now.error is not None and before.error is None:
        return in_words(now.error)
    # if the model has no backward pass, only outputs are compared
    message = difference(before.outputs, now.outputs, in_64_bits=in_64_bits)
    if message is not None:
        return message
    pairs = [(g, now.gradients.get(p)) for p, g in before.gradients.items()]
    # small gradients are compared relative to 1 % of the largest one: their own rounding errors are no fault
    top = max((size for g, _ in pairs if math.isfinite(size := _largest(g))), default=0.0)
    for g, other in pairs:
        other = torch.zeros_like(g) if other is None else other
        message = difference([g], [other], least=top * 1e-2, in_64_bits=in_64_bits)
        if message is not None:
            return message.replace("outputs differ", "gradients differ")
    return None


def random_shifts(model: nn.Module, made: Sequence[nn.Module]) -> dict[nn.Parameter, Tensor]:
    """Returns random numbers to add to parameters, so that no gain is 1 and no two are alike: to those of the modules
    `made`, which a swap has made, and to all vectors."""
    generator = torch.Generator().manual_seed(0)
    new = {p for module in made for p in module.parameters()}
    sizes = {p: 0.3 if p in new else 0.1 for p in model.parameters() if p in new or p.dim() == 1}  # standard deviations
    return {p: (size * torch.randn(p.shape, generator=generator)).to(p) for p, size in sizes.items()}


def in_words(reason: Exception | None) -> str:
    """Returns an exception's class and the first line of its message."""
    return f"{type(reason).__name__}: {str(reason).partition(chr(10))[0]}"


def _largest(t: Tensor) -> float:
    """Returns the largest magnitude in t; 0 if t is empty."""
    return t.abs().max().item() if t.numel() else 0.0


def _root_of_mean(t: Tensor) -> float:
    """Returns the root mean square of t."""
    return t.double().square().mean().sqrt().item()


def _weights(t: Tensor) -> Tensor:
    """Returns different weights for a sum over t, since an unweighted sum over normed rows would be constant."""
    return torch.arange(t.numel(), dtype=torch.float64, device=t.device).cos()


def difference(
    before: list[Tensor],
    now: list[Tensor],
    in_16_bits: float = _IN_16_BITS,
    least: float = 1e-3,
    in_64_bits: float = _ERRORS[torch.float64],
) -> str | None:
    """Returns a message if two runs' outputs differ by more than rounding, else None. `in_16_bits`, `in_64_bits`: the
    tolerances in 16 bits and in f64. `least`: the difference is taken relative to at least this number."""
    if [t.shape for t in before] != [t.shape for t in now]:
        return "its outputs have other shapes"
    for a, b in zip(before, now):
        error = in_64_bits if a.dtype == torch.float64 else _ERRORS.get(a.dtype, in_16_bits)
        # in 16 bits a few numbers may differ much by rounding, so the mean counts instead of the largest number
        size_of: Any = _largest if a.dtype in _ERRORS else _root_of_mean
        gap, is_finite = a - b, torch.isfinite(a)
        if not is_finite.all():  # compare only the numbers that were finite before
            a, gap = a[is_finite], gap[is_finite]
        # the sizes of the numbers before and of the differences
        scale, distance = (size_of(t) if t.numel() else 0.0 for t in (a, gap))
        # `not … <=` instead of `>`, so that a distance of NaN counts as a difference
        if not distance <= error * max(scale, least):
            return f"its outputs differ by {distance:.3g} of {scale:.3g}"
    return None
