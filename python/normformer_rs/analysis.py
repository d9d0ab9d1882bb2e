"""What the papers look at in a trained model.

>>> import normformer_rs as nf
>>> from normformer_rs import analysis
>>> shape = {"d_model": 16, "d_ff": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
>>> model = nf.Transformer(nf.TransformerConfig(vocab_size=20, norm="scalenorm", **shape), seed=1)
>>> analysis.gains(model)[0]
Gain(name='encoder.layers.0.norm1', layer=0, kind='encoder.layers.*.norm1', g=4.0)
>>> seen = analysis.observe(model, torch.tensor([[5, 6, 7, 2]]), torch.tensor([[0, 8, 9]]))
>>> [(stack, len(found.cosines)) for stack, found in seen.items()]
[('encoder', 1), ('decoder', 1)]
"""

import re
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from . import _core
from ._core import InputError
from .model import Transformer
from .nn.norms import RowNorm


class Gain(NamedTuple):
    """The learned g of a norm that has one."""

    name: str
    """The norm's."""
    layer: int | None
    """The first number in the name: its layer, from 0. None outside layers, as dlcl's sums are."""
    kind: str
    """The name without that number: what one curve over depth has in common."""
    g: float


def gains(model: nn.Module) -> list[Gain]:
    """The learned g of every scalenorm and lpnorm, in the order of the modules (Nguyen & Salazar 2019, Fig 3, 4).

    Args:
        model: a `Transformer`, or any module with such norms of `normformer_rs.nn`, a swapped model too.
    """
    modules = dict(model.named_modules())
    # Transformers' modules are plain containers; of their weights only those of norms are one number.
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
    """The Euclidean norm of the gradient of each layer, and of what stands outside layers by its outermost module, in
    the order of the modules (Nguyen & Salazar 2019, Fig 2; Liu et al. 2023, Fig 3). Call it after `backward`, before
    clipping.

    A layer is what a name has up to its first number. The squares of all norms sum up to the whole gradient's. With a
    gradient scaler, unscale first.

    Errors: InputError where there are no gradients.
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
    """Singular values σ_i/σ_1 of a matrix, falling, such as the word embedding's (Shen et al. 2020, Fig 6).

    >>> spectrum([[0.0, 2.0], [1.0, 0.0], [0.0, 0.0]])
    array([1. , 0.5])

    Errors: InputError for what is not a matrix of finite numbers, or holds zeros only.
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
    """Where a module's name says its layer: the first number, but for dlcl's sums, which stand between layers."""
    return None if "combine" in path.split(".") else re.search(r"\b\d+\b", path)


class Observed(NamedTuple):
    """One stack's pass over the real tokens of a batch."""

    cosines: NDArray[np.float64]
    """(layers,): the mean cosine similarity of each layer's output and the output before it, the first one's being what
    the stack reads (Liu et al. 2023, Fig 8)."""
    active: NDArray[np.float64]
    """(layers,): the share of feed-forward activations that are not 0 after ReLU and its dropout (Liu et al. 2023, Fig
    9)."""
    distances: NDArray[np.float64]
    """(norms, 3), of the norms that keep statistics, in the order of the pass: ‖μ_B − μ‖₂/d, ‖σ²_B − σ²‖₂/d and
    ‖ψ²_B − ψ²‖₂/d between the batch's statistics and the running ones; NaN of those that a norm has not (Shen et al.
    2020, Fig 2, 4)."""


def observe(model: Transformer, source: Tensor | None, target_input: Tensor) -> dict[str, Observed]:
    """What is seen of "encoder" and "decoder" as a model reads a batch in the mode that it is in. Nothing moves.

    In evaluation nothing is dropped, and norms use their running statistics. In training there is dropout, its masks
    following one draw from torch's generator, and norms use what they use in training; that is what running statistics
    are to be compared with, for dropout widens a batch's.

    Args:
        source, target_input: token ids, as for the model's call.

    Errors: InputError for other modules.
    """
    if not isinstance(model, Transformer):
        raise InputError(f"model must be a normformer_rs.Transformer; got a {type(model).__name__}")
    names, tensors, precision = model._tensors()
    seed = model._draw(tensors[0].device) if model.training else None
    found = _core.observe(model.config.to_json(), names, tensors, source, target_input, seed, precision)
    stacks = ["encoder", "decoder"][-len(found) :]
    return {stack: Observed(*arrays) for stack, arrays in zip(stacks, found)}
