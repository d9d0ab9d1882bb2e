"""Measurements of a pass over a batch: `observe`, and the statistics of norms that keep running ones."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import _core
from ..errors import InputError
from ..loop.model import Transformer


class Statistics(NamedTuple):
    """A batch's statistics over its real positions, in a norm with running statistics (batchnorm, powernorm-v,
    powernorm); NaN for those that the norm does not have. d is the number of features, γ the gain, and dy the gradient
    of the norm's output. x̂ is normalised by the batch's own statistics, σ_B = √(σ²_B + ε)."""

    mean: float
    """‖μ_B − μ‖₂/d, where μ is the running mean before the batch (Shen et al. 2020, Fig 2)."""
    variance: float
    """‖σ²_B − σ²‖₂/d, where σ² is the running variance (Fig 2, 4)."""
    power: float
    """‖ψ²_B − ψ²‖₂/d, where ψ² is the running mean square (Fig 4)."""
    mean_gradient: float
    """‖g_μ‖₂/d, g_μ = (γ/σ_B)⊙mean dy (eq 3, Fig 3); gradients are NaN if none were computed."""
    variance_gradient: float
    """‖g_σ²‖₂/d, g_σ² = (γ/σ_B)⊙mean(dy⊙x̂) (eq 3, Fig 3, 4)."""
    power_gradient: float
    """‖g_ψ²‖₂/d, g_ψ² = (γ/ψ_B)⊙mean(dy⊙x̂) (eq 6, Fig 4)."""
    bounded: float
    """The share of features with |γ_i| ≤ (ψ_B)_i, or (σ_B)_i, for which the norm lowers the loss's Lipschitz
    constant (Lemma 2)."""


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
    # The seed of the dropout masks; in evaluation there are none.
    seed = model._draw(tensors[0].device) if model.training else None
    arguments = model._options, names, tensors, source, target_input, seed, precision
    by_stack = _core.observe(*arguments, None if loss is None else _number(loss))
    stacks = ["encoder", "decoder"][-len(by_stack) :]  # a single stack is the decoder
    # For each stack the extension module returns ((cosines, active, sizes, scores, mixing), the norms' statistics).
    return {
        stack: Observed(cosines, active, [Statistics(*norm) for norm in norms], *sizes)
        for stack, ((cosines, active, *sizes), norms) in zip(stacks, by_stack)
    }


def _number(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns `loss` with gradients enabled and its result checked."""

    def checked(logits: Tensor) -> Tensor:
        """Returns the loss. Errors: InputError if it is not one number with a gradient."""
        with torch.enable_grad():
            value = loss(logits)
        if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad:
            return value
        kind = f"Tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"loss must return one number that depends on the logits; got a {kind}")

    return checked
