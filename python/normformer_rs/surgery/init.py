"""Re-initialises blocks whose residual scheme was exchanged, and looks for signs that they were trained."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..nn.init import draw_linear
from ..nn.place import Place
from .blocks import Group, is_transposed, parts_of, weight_and_bias
from .converted import residual_of
from .signs import sign_in_norm
from .spec import Linear
from .undo import Edits


@torch.no_grad()
def initialise(group: Group, place: Place, edits: Edits) -> list[nn.Parameter]:
    """Re-initialises the blocks' linear layers with the scheme's initialisation, and sets their biases to zero. Returns
    these parameters. `place`: the place of the group's first block."""
    drawn = []
    for i, block in enumerate(group.blocks):
        here = place.at(i)
        for j, part in enumerate(parts_of(block)):  # j is the sublayer's number in the block
            for linear in part.linears:
                if not linear.roles:  # without a known role there are no initial values for it
                    continue
                weight, bias = weight_and_bias(block, linear.path)
                parameters = [p for p in (weight, bias) if p is not None]
                edits.remember_values(parameters)
                drawn += parameters
                transposed = is_transposed(block, linear.path)
                # A transposed weight is drawn in a copy and written back: filling contiguous rows is 5 times faster.
                by_rows = weight.T.contiguous() if transposed else weight
                _draw(linear, by_rows, bias, here, j)
                if transposed:
                    weight.copy_(by_rows.T)
                weight.mul_(linear.factor)
            for linear in part.experts:
                stacked_matrices = block.get_parameter(linear.path)  # one matrix for each expert
                if linear.roles:
                    edits.remember_values([stacked_matrices])
                    drawn.append(stacked_matrices)
                    for matrix in stacked_matrices:
                        _draw(linear, matrix.T if linear.is_transposed else matrix, None, here, j)
    return drawn


def _draw(linear: Linear, weight: Tensor, bias: Tensor | None, place: Place, sublayer: int) -> None:
    """Re-initialises a matrix, (fan_out, fan_in), and its bias. If it stacks several roles, each role's rows are drawn
    as a separate matrix. `linear`: describes the matrix; `sublayer`: the sublayer's number in the block."""
    if not linear.rows:
        draw_linear(weight, bias, linear.roles, place, sublayer)
        return
    for role in linear.roles:
        numbers = linear.rows_of(role, weight.shape[0])
        first, end = numbers[0], numbers[-1] + 1
        if end - first == len(numbers):  # adjacent rows can be drawn in place
            draw_linear(weight[first:end], None if bias is None else bias[first:end], (role,), place, sublayer)
            continue
        # other rows are drawn beside the matrix, and then copied into it
        index = torch.tensor(numbers, device=weight.device)
        rows = weight.new_empty(len(numbers), weight.shape[1])
        part_of_bias = weight.new_empty(len(numbers)) if bias is None else bias[index]
        draw_linear(rows, None if bias is None else part_of_bias, (role,), place, sublayer)
        weight[index] = rows
        if bias is not None:
            bias[index] = part_of_bias


def unreached(block: nn.Module, beside: Sequence[nn.Module] = ()) -> list[str]:
    """Returns the names of a block's matrices that `initialise` leaves as they are, because they have no known role:
    routers, convolutions, embeddings, latent projections. `beside`: views of the block, one for each layer of a loop
    (loops.py), whose matrices are known, too."""
    parts = [part for view in (block, *beside) for part in parts_of(view)]
    linears = [linear for part in parts for linear in part.linears if linear.roles]
    experts = [linear for part in parts for linear in part.experts if linear.roles]
    known = {weight_and_bias(block, linear.path)[0] for linear in linears}
    known |= {block.get_parameter(linear.path) for linear in experts}
    residual = residual_of(block)
    schemes = set() if residual is None else {*residual.parameters()}  # the scheme's own parameters do not count
    return [name for name, p in block.named_parameters() if p.dim() > 1 and p not in known and p not in schemes]


@torch.no_grad()
def silence_biases(group: Group, edits: Edits) -> list[nn.Parameter]:
    """Sets the blocks' biases to zero and freezes them, for schemes without biases. Returns them."""
    biases = [
        weight_and_bias(block, linear.path)[1]
        for block in group.blocks
        for part in parts_of(block)
        for linear in part.linears
    ]
    present = [bias for bias in biases if bias is not None]
    edits.remember_values(present)
    for bias in present:
        bias.zero_()
        bias.requires_grad_(False)
    return present


@torch.no_grad()
def sign_of_training(group: Group, optimizer: torch.optim.Optimizer | None) -> str | None:
    """Returns a message that says why a group looks trained. None: it does not.

    Signs are changed gains and biases of norms, and state in the optimizer. Linear layers give no sign, because their
    initial values are random.
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
    """Returns the number of matrices in a block that `initialise` draws."""
    return sum(bool(linear.roles) for part in parts_of(block) for linear in (*part.linears, *part.experts))
