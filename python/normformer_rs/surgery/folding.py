"""Admin's gains folded into the weights around them, after training."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..model import Transformer
from ..nn.scheme import Learned, Place
from .blocks import DECODER, ENCODER, Part, is_transposed, parts_of, place_of, weight_and_bias
from .residuals import find_groups


class _Site(NamedTuple):
    """A sublayer: its norm's name, its gain ω, the norm itself, and the matrices that x is multiplied by."""

    name: str
    omega: nn.Parameter
    norm: Any
    readers: list[Tensor]


@torch.no_grad()
def fold_admin(model: nn.Module) -> int:
    """Moves admin's gains ω into the weights around them, in place. A plain post-norm Transformer remains, except for
    each stack's first sublayer.

    In x⁺ = N(ω⊙x + F(x)), x comes from the norm of the sublayer before. That norm's γ and β are multiplied by ω, and ω
    becomes 1. The columns of the matrices that read x are divided by ω: queries, keys and values, or fc1; of attention
    to an encoder the queries only. The model's outputs change by rounding only; outputs of single layers change.

    >>> from normformer_rs import nn
    >>> fold_admin(nn.Transformer(8, 2, 2, 2, 16, residual="admin"))
    8

    Args:
        model: a `normformer_rs.Transformer`, or any tree with layers that have the scheme (`normformer_rs.nn`'s, or
            swapped ones).

    Returns: how many gains were folded. Errors: InputError for a model without them, for a norm whose gain is not one
    number per column, for an ω with a zero in it, and for parameters that layers share; nothing has been changed then.
    Source: Liu et al. 2020; docs/spec.md §2.9.
    """
    stacks = [[*stack] for stack in _stacks(model)]
    pairs = [(before, site) for stack in stacks for before, site in itertools.pairwise(stack)]
    if not pairs:
        raise InputError(f'{type(model).__name__} holds no layer with residual="admin"')
    for before, site in pairs:
        weight = getattr(before.norm, "weight", None)
        if weight is None or weight.shape != site.omega.shape:
            kind = type(before.norm).__name__
            raise InputError(f"{before.name}, a {kind}, has no gain for each column to take ω in")
        if not site.omega.all():
            raise InputError(f"the ω before {site.name} has a zero, and columns cannot be divided by it")
    changed = [t.data_ptr() for before, site in pairs for t in (before.norm.weight, *site.readers)]
    if len({*changed}) < len(changed):
        raise InputError("layers share parameters, whose gains ω differ: they cannot be folded into them")
    for before, site in pairs:
        for tensor in (before.norm.weight, getattr(before.norm, "bias", None)):
            if tensor is not None:
                tensor.mul_(site.omega)
        for reader in site.readers:
            reader.div_(site.omega)
        site.omega.fill_(1)
    return len(pairs)


def _stacks(model: nn.Module) -> Iterator[Iterator[_Site]]:
    """The sublayers of each stack that has the scheme."""
    if isinstance(model, Transformer):
        for stack in ("encoder", "decoder"):
            if stack in model._modules:
                layers = [*model.get_submodule(f"{stack}.layers").named_children()]
                yield (site for i, layer in layers for site in _sites(layer, layer, Place(model.config, stack, int(i))))
        return
    for group in find_groups(model):
        placed = [(block, getattr(block, "residual", block), place_of(block)) for block in group.blocks]
        yield (site for block, owner, place in placed if place is not None for site in _sites(block, owner, place))


def _sites(block: nn.Module, owner: nn.Module, place: Place) -> Iterator[_Site]:
    """`owner`: the module that has the scheme's parameters."""
    if place.config.residual == "admin":
        parts = (ENCODER if len(place.sublayers) == 2 else DECODER) if type(block) is nn.Module else parts_of(block)
        for sublayer, part in zip(place.sublayers, parts):
            assert isinstance(sublayer.alpha, Learned)
            omega: Any = getattr(owner, sublayer.alpha.name)
            yield _Site(
                f"layer {place.layer}'s {part.norm}", omega, block.get_submodule(part.norm), [*_readers(block, part)]
            )


def _readers(block: nn.Module, part: Part) -> Iterator[Tensor]:
    """The matrices of a sublayer that x is multiplied by, as views whose last dimension is x's."""
    reading = {"query", "fc1"} if part.kind == "cross-attention" else {"query", "key", "value", "fc1"}
    for linear in part.linears:
        weight = weight_and_bias(block, linear.path)[0]
        rows = weight.T if is_transposed(block, linear.path) else weight
        for role, matrix in zip(linear.roles, rows.chunk(len(linear.roles))):
            if role in reading:
                yield matrix
