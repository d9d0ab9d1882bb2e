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
from .observed import Observed, Statistics, observe
from .probing import MEASURES, Probe, Reading, Readings, probe
from .spikes import spike_score

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
    "spike_score",
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
    # A Transformer's modules are plain containers, so no class tells which of them are norms. But there only norms have
    # a weight of one number.
    ours = {inner for module in modules.values() if isinstance(module, Transformer) for inner in module.modules()}
    result = []
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        module = modules[path]
        is_norm = module in ours or (isinstance(module, RowNorm) and module.has_one_gain)
        if is_norm and leaf == "weight" and parameter.numel() == 1:
            layer = _layer(path)
            kind = path if layer is None else f"{path[: layer.start()]}*{path[layer.end() :]}"
            result.append(Gain(path, None if layer is None else int(layer[0]), kind, parameter.item()))
    return result


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
            layer = _layer(path)
            group = path.partition(".")[0] if layer is None else path[: layer.end()]
            norms.setdefault(group, []).append(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64))
    if not norms:
        raise InputError("no parameter has a gradient: call backward() first, and gradient_norms before zero_grad()")
    # The norm of the parameters' norms is the norm of all their numbers.
    return {group: torch.stack(part_norms).norm().item() for group, part_norms in norms.items()}


def spectrum(weight: Tensor | ArrayLike) -> NDArray[np.float64]:
    """Returns the singular values σ_i/σ_1 of a matrix, in descending order. For the word embedding: Shen et al. 2020,
    Fig 6.

    >>> spectrum([[0.0, 2.0], [1.0, 0.0], [0.0, 0.0]])
    array([1. , 0.5])

    Errors: InputError for anything but a matrix of finite numbers, and for zeros only.
    """
    try:
        tensor = torch.as_tensor(weight).detach()
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"weight must be a matrix of numbers; got a {type(weight).__name__}: {error}") from error
    if tensor.dim() != 2 or tensor.is_complex() or tensor.numel() == 0:
        raise InputError(f"weight must be a matrix of numbers; got {tensor.dtype} of shape {tuple(tensor.shape)}")
    matrix = tensor.cpu().double()
    if not bool(matrix.isfinite().all()):
        raise InputError("weight must be finite; some of its numbers are not")
    if not bool(matrix.any()):
        raise InputError("weight must be not all 0: there is no largest singular value to divide by")
    values = torch.linalg.svdvals(matrix)
    return (values / values[0]).numpy()


def _layer(path: str) -> re.Match[str] | None:
    """Returns the match of the layer's number in a module's name, the first number there. Returns None if there is no
    number, and for dlcl's sums, which lie between the layers."""
    return None if "combine" in path.split(".") else re.search(r"\b\d+\b", path)


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
    modules; only a norm's last forward counts. Gradients need a `backward` through the norm inside the block. The
    model's outputs and state do not change. `normformer_rs.Transformer` has no such modules: use `observe`. A compiled
    model calls no hooks: give the original model.
    """
    norms = {name: module for name, module in model.named_modules() if isinstance(module, RunningNorm)}
    seen: dict[str, _Forward] = {}
    results: dict[str, Statistics] = {}
    with ExitStack() as hooks:
        for name, norm in norms.items():
            before, after = _hooks(name, seen)
            hooks.callback(norm.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(norm.register_forward_hook(after).remove)
        yield results
    results.update((name, seen[name].statistics()) for name in norms if name in seen)


@dataclass
class _Forward:
    """The inputs of a norm's forward, and the gradient `dy` of its output once backward has computed it."""

    x: Tensor
    pad_mask: Tensor | None
    weight: Tensor | None
    mean: Tensor | None
    """The running mean before the batch; None if the norm subtracts no mean."""
    square: Tensor
    """The running variance before the batch, or the running mean square if the norm subtracts no mean."""
    eps: float
    dy: Tensor | None = None

    def differentiated(self, dy: Tensor) -> None:
        """A hook on the output: keeps the first gradient that arrives. Backward runs in reverse, so it belongs to the
        norm's last forward."""
        self.dy = dy if self.dy is None else self.dy

    def statistics(self) -> Statistics:
        """Returns the batch's statistics; those of gradients are NaN if no gradient was kept."""
        inputs = self.x, self.pad_mask, self.weight, self.mean, self.square
        return Statistics(*_core.statistics(*inputs, self.eps, self.dy))


def _hooks(name: str, seen: dict[str, _Forward]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Returns the hooks that run before and after the forward of the norm `name`. They store its inputs, and its
    output's gradient, in `seen`."""

    @torch.no_grad()
    def before(norm: RunningNorm, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        """Stores copies of the norm's inputs and of its running statistics."""
        if is_second_run():  # activation checkpointing runs the forward again in backward
            return
        arguments = arguments | dict(zip(("x", "padding_mask"), args))  # arguments by position get their names
        x, mask = arguments["x"].detach(), arguments.get("padding_mask")
        # Copies are kept, because the forward updates the running statistics in place, and the caller may change x.
        # A norm with groups normalises the result of group scaling, which is a new tensor.
        x = OPS.group_scaling(x, norm.groups) if norm.groups else x.clone()
        mask = mask_for(x) if mask is None else mask
        mask = None if mask is None else mask.clone()
        weight = None if norm.weight is None else norm.weight.clone()
        running = norm.frozen()  # the running mean, and the running variance or mean square
        mean, square = (None if t is None else t.clone() for t in running)
        assert square is not None
        seen[name] = _Forward(x, mask, weight, mean, square, norm.eps)

    def after(_norm: RunningNorm, _args: tuple[Any, ...], y: Tensor) -> None:
        """Asks torch to store the gradient of the output in backward."""
        forward = seen.get(name)
        if forward is not None and y.requires_grad:
            y.register_hook(forward.differentiated)

    return before, after
