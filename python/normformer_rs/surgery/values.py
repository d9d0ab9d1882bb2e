"""The first values of blocks whose residual scheme was exchanged."""

import torch
from torch import nn

from ..nn.declared import Place
from ..nn.initial import draw_linear
from .blocks import Group, is_transposed, parts_of, weight_and_bias
from .edits import Edits


@torch.no_grad()
def initialise(group: Group, place: Place, edits: Edits) -> list[nn.Parameter]:
    """Draws the blocks' linear layers as the scheme's init says, biases zero; what was drawn."""
    drawn = []
    for i, block in enumerate(group.blocks):
        here = Place(place.config, place.stack, i)
        for j, part in enumerate(parts_of(block)):
            for path, roles, factor in part.linears:
                weight, bias = weight_and_bias(block, path)
                parameters = [p for p in (weight, bias) if p is not None]
                edits.remember_values(parameters)
                drawn += parameters
                draw_linear(weight.T if is_transposed(block, path) else weight, bias, roles, here, j)
                weight.mul_(factor)
    return drawn


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
