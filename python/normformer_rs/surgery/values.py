"""The first values of blocks whose residual scheme was exchanged."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .._core import InputError
from ..nn.declared import Place
from ..nn.initial import initial_values
from .blocks import Group, is_transposed, parts_of, weight_and_bias
from .edits import Edits

_SLICES = {"query": (0, "in_proj_weight"), "key": (1, "in_proj_weight"), "value": (2, "in_proj_weight")}
_NAMES = {"self-attention": "self_attn.", "cross-attention": "multihead_attn.", "feed-forward": ""}


@torch.no_grad()
def initialise(group: Group, place: Place, edits: Edits) -> list[nn.Parameter]:
    """Draws the blocks' linear layers as the scheme's init says, biases zero; what was drawn."""
    drawn, device = [], next(group.blocks[0].parameters()).device
    values: list[dict[str, Tensor]] = []
    for i, block in enumerate(group.blocks):
        for part in parts_of(block):
            times: dict[str, int] = {}
            for path, roles, factor in part.linears:
                weight, bias = weight_and_bias(block, path)
                edits.remember_values(p for p in (weight, bias) if p is not None)
                drawn += [p for p in (weight, bias) if p is not None]
                blocks = []
                for role in roles:
                    draw = times[role] = times.get(role, -1) + 1
                    if draw == len(values):  # gates and second layers of one role are drawn from another model
                        values.append(initial_values(place.config, device))
                    if values[draw]:
                        prefix = f"{place.stack}.layers.{i}.{_NAMES[part.kind]}"
                        blocks.append(_block_of(values[draw], prefix, role))
                if bias is not None:
                    bias.zero_()
                if not blocks:
                    continue  # the meta device has no values
                new = torch.cat(blocks) * factor
                new = new.T if is_transposed(block, path) else new
                if new.shape != weight.shape:
                    raise InputError(
                        f"{type(block).__name__}'s {path} is {tuple(weight.shape)}, the scheme's values are "
                        f"{tuple(new.shape)}: heads of another width than d_model/heads are not drawn; pass init=None "
                        "and initialise the blocks yourself"
                    )
                weight.copy_(new)
    return drawn


def _block_of(values: Mapping[str, Tensor], prefix: str, role: str) -> Tensor:
    """(fan_out, fan_in)"""
    if role in _SLICES:
        third, name = _SLICES[role]
        return values[prefix + name].chunk(3)[third]
    return values[prefix + {"output": "out_proj", "fc1": "linear1", "fc2": "linear2"}[role] + ".weight"]


@torch.no_grad()
def silence_biases(group: Group, edits: Edits) -> list[nn.Parameter]:
    """A scheme without biases holds those that are there at zero."""
    biases = [
        weight_and_bias(block, lin.path)[1]
        for block in group.blocks
        for part in parts_of(block)
        for lin in part.linears
    ]
    found = [bias for bias in biases if bias is not None]
    edits.remember_values(found)
    for bias in found:
        bias.zero_()
        bias.requires_grad_(False)
    return found
