"""First values of linear layers and embeddings, from Rust's table of initialisations."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from .. import _core
from ..config import TransformerConfig
from .place import Place

Role = Literal["query", "key", "value", "output", "fc1", "fc2"]


@torch.no_grad()
def draw_linear(weight: Tensor, bias: Tensor | None, roles: Sequence[Role], place: Place, sublayer: int) -> None:
    """Draws a linear layer's (fan_out, fan_in) matrix in place, from torch's generator; its bias becomes zero.

    The configuration's init decides, for these roles in that sublayer of the place. Stacked roles are drawn one by one,
    each with its block of rows.
    """
    _core.draw_linear(weight, list(roles), place.config.to_json(), place.stack, place.layer, sublayer)
    if bias is not None:
        bias.zero_()


@torch.no_grad()
def draw_table(weight: Tensor, name: str, config: TransformerConfig) -> None:
    """Draws the parameter `name` in place: "embedding", "source_embedding", "target_embedding" (a row a type), or an
    untied "output_projection"."""
    _core.draw_table(weight, name, config.to_json())
