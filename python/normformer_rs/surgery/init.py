"""First values for blocks whose residual scheme was exchanged."""

import torch
from torch import nn

from ..nn.init import draw_linear
from ..nn.place import Place
from .blocks import Group, is_transposed, parts_of, weight_and_bias
from .converted import residual_of
from .signs import sign_in_norm
from .spec import at
from .undo import Edits


@torch.no_grad()
def initialise(group: Group, place: Place, edits: Edits) -> list[nn.Parameter]:
    """Draws the blocks' linear layers as the scheme's init says, and zeroes their biases. Returns these parameters."""
    drawn = []
    for i, block in enumerate(group.blocks):
        here = place.at(i)
        for j, part in enumerate(parts_of(block)):
            for path, roles, factor, groups in part.linears:
                weight, bias = weight_and_bias(block, path)
                parameters = [p for p in (weight, bias) if p is not None]
                edits.remember_values(parameters)
                drawn += parameters
                draw_linear(weight.T if is_transposed(block, path) else weight, bias, roles, here, j)
                if groups is not None:  # drawn one role after another, kept head by head
                    heads = weight.unflatten(0, (len(roles), at(block, groups), -1))
                    weight.copy_(heads.transpose(0, 1).flatten(0, 2))
                weight.mul_(factor)
            for path, roles, *_ in part.experts:
                stack = block.get_parameter(path)
                edits.remember_values([stack])
                drawn.append(stack)
                for matrix in stack:
                    width = place.config.d_model
                    is_transposed_here = matrix.shape[0 if roles == ("fc1",) else 1] == width
                    draw_linear(matrix.T if is_transposed_here else matrix, None, roles, here, j)
    return drawn


def unreached(block: nn.Module) -> list[str]:
    """Matrices of a block that no initialisation of a Transformer's layers knows: convolutions, routers, embeddings."""
    known = {weight_and_bias(block, linear.path)[0] for part in parts_of(block) for linear in part.linears}
    known |= {block.get_parameter(linear.path) for part in parts_of(block) for linear in part.experts}
    own = residual_of(block)
    beside = set() if own is None else {*own.parameters()}
    return [name for name, p in block.named_parameters() if p.dim() > 1 and p not in known and p not in beside]


@torch.no_grad()
def silence_biases(group: Group, edits: Edits) -> list[nn.Parameter]:
    """Freezes the blocks' biases at zero, for schemes without biases. Returns them."""
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


@torch.no_grad()
def sign_of_training(group: Group, optimizer: torch.optim.Optimizer | None) -> str | None:
    """A sign that a group's weights were trained, in words; None: there is no sign.

    Linear layers give none, because their first values are random.
    """
    for name, block in zip(group.names, group.blocks):
        for part in parts_of(block):
            for path in part.norms():
                if sign := sign_in_norm(block.get_submodule(path), f"{name}.{path}".lstrip(".")):
                    return sign
        if optimizer is not None and any(optimizer.state.get(p) for p in block.parameters()):
            return "the optimizer has state of them"
    return None


def count_weights(block: nn.Module) -> int:
    """The number of matrices that `initialise` draws."""
    return sum(len(part.linears) + len(part.experts) for part in parts_of(block))
