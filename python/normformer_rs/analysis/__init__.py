"""The papers' analyses of a trained model: gains, gradients, spectra, statistics, cosines.

>>> import normformer_rs as nfrs
>>> from normformer_rs import analysis
>>> shape = {"d_model": 16, "d_ff": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
>>> model = nfrs.Transformer(nfrs.TransformerConfig(vocab_size=20, norm="scalenorm", **shape), seed=1)
>>> analysis.gains(model)[0]
Gain(name='encoder.layers.0.norm1', layer=0, kind='encoder.layers.*.norm1', g=4.0)
>>> seen = analysis.observe(model, torch.tensor([[5, 6, 7, 2]]), torch.tensor([[0, 8, 9]]))
>>> [(stack, len(found.cosines)) for stack, found in seen.items()]
[('encoder', 1), ('decoder', 1)]
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from .. import _core
from ..errors import InputError
from ..loop.model import Transformer
from ..nn.masks import mask_for
from ..nn.norms import RowNorm
from ..nn.recompute import is_second_run
from ..nn.running import OPS, RunningNorm
from .coordinates import CoordinateCheck, coordinate_check
from .probing import MEASURES, Probe, Reading, Readings, probe

__all__ = [
    "MEASURES",
    "CoordinateCheck",
    "Gain",
    "Observed",
    "Probe",
    "Reading",
    "Readings",
    "Statistics",
    "coordinate_check",
    "gains",
    "gradient_norms",
    "observe",
    "probe",
    "spectrum",
    "statistics",
]


class Gain(NamedTuple):
    """A norm's learned gain g."""

    name: str
    """The norm's name."""
    layer: int | None
    """The layer, from 0: the first number in the name. None outside layers, for example in dlcl's sums."""
    kind: str
    """The name with `*` for that number. Norms of the same kind are the points of one curve over depth."""
    g: float


def gains(model: nn.Module) -> list[Gain]:
    """Returns the learned g of every scalenorm and lpnorm, in the order of the modules (Nguyen & Salazar 2019, Fig 3,
    4).

    Args:
        model: a `Transformer`, or any module with such norms of `normformer_rs.nn`, for example a swapped model.
    """
    modules = dict(model.named_modules())
    # A Transformer's modules are plain containers; its only weights of a single number are those of norms.
    ours = {inner for module in modules.values() if isinstance(module, Transformer) for inner in module.modules()}
    found = []
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        module = modules[path]
        is_norm = module in ours or (isinstance(module, RowNorm) and module.has_one_gain)
        if is_norm and leaf == "weight" and parameter.numel() == 1:
            number = _layer(path)
            kind = path if number is None else f"{path[: number.start()]}*{path[number.end() :]}"
            found.append(Gain(path, None if number is None else int(number[0]), kind, parameter.item()))
    return found


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """Returns the Euclidean norm of each layer's gradient (Nguyen & Salazar 2019, Fig 2; Liu et al. 2023, Fig 3). Call
    it after `backward`, before clipping.

    A parameter's layer is its name up to the first number; outside layers it is the outermost module. Entries follow
    the order of the modules. The squares of the norms sum up to the square of the whole gradient's norm. With a
    gradient scaler, unscale first.

    Errors: InputError if there are no gradients.
    """
    norms: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            path = name.rpartition(".")[0]
            number = _layer(path)
            group = path.partition(".")[0] if number is None else path[: number.end()]
            norms.setdefault(group, []).append(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64))
    if not norms:
        raise InputError("no parameter has a gradient: call backward() first, and gradient_norms before zero_grad()")
    return {group: torch.stack(found).norm().item() for group, found in norms.items()}


def spectrum(weight: Tensor | ArrayLike) -> NDArray[np.float64]:
    """Returns the singular values σ_i/σ_1 of a matrix, in descending order. For the word embedding: Shen et al. 2020,
    Fig 6.

    >>> spectrum([[0.0, 2.0], [1.0, 0.0], [0.0, 0.0]])
    array([1. , 0.5])

    Errors: InputError for anything but a matrix of finite numbers, and for zeros only.
    """
    try:
        given = torch.as_tensor(weight).detach()
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"weight must be a matrix of numbers; got a {type(weight).__name__}: {error}") from error
    if given.dim() != 2 or given.is_complex() or given.numel() == 0:
        raise InputError(f"weight must be a matrix of numbers; got {given.dtype} of shape {tuple(given.shape)}")
    matrix = given.cpu().double()
    if not bool(matrix.isfinite().all()):
        raise InputError("weight must be finite; some of its numbers are not")
    if not bool(matrix.any()):
        raise InputError("weight must be not all 0: there is no largest singular value to divide by")
    values = torch.linalg.svdvals(matrix)
    return (values / values[0]).numpy()


def _layer(path: str) -> re.Match[str] | None:
    """Finds the layer in a module's name: the first number. Returns None for dlcl's sums, which are between layers."""
    return None if "combine" in path.split(".") else re.search(r"\b\d+\b", path)


class Statistics(NamedTuple):
    """A batch's statistics over its real positions, in a norm with running statistics (batchnorm, powernorm-v,
    powernorm); NaN for those that the norm does not have. x̂ is normalised by the batch's own statistics,
    σ_B = √(σ²_B + ε)."""

    mean: float
    """‖μ_B − μ‖₂/d, where μ is the running mean before the batch (Shen et al. 2020, Fig 2)."""
    variance: float
    """‖σ²_B − σ²‖₂/d (Fig 2, 4)."""
    power: float
    """‖ψ²_B − ψ²‖₂/d (Fig 4)."""
    mean_gradient: float
    """‖g_μ‖₂/d, g_μ = (γ/σ_B)⊙mean dy (eq 3, Fig 3); gradients are NaN if none were computed."""
    variance_gradient: float
    """‖g_σ²‖₂/d, g_σ² = (γ/σ_B)⊙mean(dy⊙x̂) (eq 3, Fig 3, 4)."""
    power_gradient: float
    """‖g_ψ²‖₂/d, g_ψ² = (γ/ψ_B)⊙mean(dy⊙x̂) (eq 6, Fig 4)."""
    bounded: float
    """The share of features with |γ_i| ≤ (ψ_B)_i, or (σ_B)_i, for which the norm lowers the loss's Lipschitz
    constant (Lemma 2)."""


@contextmanager
def statistics(model: nn.Module) -> Iterator[dict[str, Statistics]]:
    """Collects, inside the block, the batches' statistics in all norms of `normformer_rs.nn` with running statistics,
    in any model.

    >>> from normformer_rs.nn import PowerNormV
    >>> model = nn.Sequential(nn.Linear(4, 4), PowerNormV(4))
    >>> with statistics(model) as found:
    ...     model(torch.randn(2, 3, 4)).square().mean().backward()
    >>> list(found), found["1"].power_gradient > 0
    (['1'], True)

    The dictionary is filled when the block ends. Its keys are the names of the norms that ran, in the order of the
    modules; a norm's last forward counts. Gradients need a `backward` through the norm inside the block. The model's
    outputs and state do not change. `normformer_rs.Transformer` has no such modules: use `observe`. A compiled model
    calls no hooks: give the original model.
    """
    norms = {name: module for name, module in model.named_modules() if isinstance(module, RunningNorm)}
    seen: dict[str, _Forward] = {}
    found: dict[str, Statistics] = {}
    with ExitStack() as hooks:
        for name, norm in norms.items():
            before, after = _hooks(name, seen)
            hooks.callback(norm.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(norm.register_forward_hook(after).remove)
        yield found
    found.update((name, seen[name].statistics()) for name in norms if name in seen)


@dataclass
class _Forward:
    """A norm's inputs, and its output's gradient once there is one."""

    x: Tensor
    pad_mask: Tensor | None
    weight: Tensor | None
    mean: Tensor | None
    square: Tensor
    eps: float
    dy: Tensor | None = None

    def differentiated(self, dy: Tensor) -> None:
        """Keeps the first gradient, which is the last forward's, because backward runs in reverse."""
        self.dy = dy if self.dy is None else self.dy

    def statistics(self) -> Statistics:
        given = self.x, self.pad_mask, self.weight, self.mean, self.square
        return Statistics(*_core.statistics(*given, self.eps, self.dy))


def _hooks(name: str, seen: dict[str, _Forward]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Returns the hooks that run before and after a norm's forward."""

    @torch.no_grad()
    def before(norm: RunningNorm, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        if is_second_run():  # a second run, for activation checkpointing
            return
        given = given | dict(zip(("x", "padding_mask"), args))
        x, mask = given["x"].detach(), given.get("padding_mask")
        x = OPS.group_scaling(x, norm.groups) if norm.groups else x.clone()
        mask = mask_for(x) if mask is None else mask
        mask = None if mask is None else mask.clone()
        weight = None if norm.weight is None else norm.weight.clone()
        mean, square = (None if t is None else t.clone() for t in norm.frozen())
        assert square is not None
        seen[name] = _Forward(x, mask, weight, mean, square, norm.eps)

    def after(_norm: RunningNorm, _args: tuple[Any, ...], y: Tensor) -> None:
        forward = seen.get(name)
        if forward is not None and y.requires_grad:
            y.register_hook(forward.differentiated)

    return before, after


class Observed(NamedTuple):
    """Measurements of one stack in a pass over the real tokens of a batch."""

    cosines: NDArray[np.float64]
    """(layers,): the mean cosine similarity between each layer's output and the previous layer's (Liu et al. 2023,
    Fig 8). The first layer is compared with the stack's input."""
    active: NDArray[np.float64]
    """(layers,): the share of feed-forward activations that are not 0 after ReLU and its dropout (Liu et al. 2023, Fig
    9)."""
    statistics: list[Statistics]
    """The statistics of the norms that keep running ones, in the order of the pass."""
    sizes: NDArray[np.float64]
    """(layers + 1,): the mean |x| of the stack's input and of each layer's output (Yang et al. 2022, App D.1)."""
    scores: NDArray[np.float64]
    """(attentions,): the mean |score| that attention's softmax gets, over the queries and keys of one sentence, and the
    past alone where attention is causal; in the order of the pass."""
    mixing: NDArray[np.float64]
    """(connections,): the mean |score| from which a connection's weights are computed (attnres, mhc,
    hyper-connections); empty under other schemes."""


def observe(
    model: Transformer,
    source: Tensor | None,
    target_input: Tensor,
    loss: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Observed]:
    """Observes "encoder" and "decoder" in one pass over a batch, in the model's current mode. No state changes.

    In evaluation there is no dropout, and norms use their running statistics. In training, dropout masks follow one
    draw from torch's generator, and norms use their training statistics. Compare running statistics with a batch in
    training mode, because dropout widens a batch's statistics.

    Args:
        source, target_input: token ids, as for the model's call.
        loss: maps the logits (B, T, V) to one number, for the gradients in `statistics`; no parameter's `grad` changes.

    Errors: InputError for a model of another class, and for a loss that is not one number that depends on the logits.
    """
    if not isinstance(model, Transformer):
        raise InputError(f"model must be a normformer_rs.Transformer; got a {type(model).__name__}")
    names, tensors, precision = model._tensors()
    seed = model._draw(tensors[0].device) if model.training else None
    given = model._options, names, tensors, source, target_input, seed, precision
    found = _core.observe(*given, None if loss is None else _number(loss))
    stacks = ["encoder", "decoder"][-len(found) :]
    return {
        stack: Observed(cosines, active, [Statistics(*norm) for norm in norms], *sizes)
        for stack, ((cosines, active, *sizes), norms) in zip(stacks, found)
    }


def _number(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns `loss` with gradients enabled and its result checked."""

    def checked(logits: Tensor) -> Tensor:
        with torch.enable_grad():
            value = loss(logits)
        if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad:
            return value
        got = f"Tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"loss must return one number that depends on the logits; got a {got}")

    return checked
