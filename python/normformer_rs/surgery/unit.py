"""Keeps the vectors of matrices at length 1 when training nGPT in PyTorch."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from .blocks import TORCHS, is_transposed, torchs_parts, weight_and_bias
from .converted import residual_of
from .init import unreached

_LEAST = 1e-12
"""The smallest length that a vector is divided by."""


@torch.no_grad()
def unit_matrices_(model: nn.Module, tables: Iterable[nn.Module] | None = None) -> list[str]:
    """Divides the vectors of a model's matrices along the width by their lengths, in place: W ← W/‖W‖₂.

    The vectors are the rows of word tables and of matrices that read the residual stream, and the columns of matrices
    that write to it: attention's output projection and the last matrix of a feed-forward. For nGPT, call this once
    before the first step of the optimizer, and after each step. The training loop's option is `unit_matrices`.

    >>> import torch, normformer_rs as nfrs
    >>> layer = nfrs.nn.TransformerEncoderLayer(8, 2, 16, residual="ngpt")
    >>> model = nfrs.nn.TransformerEncoder(layer, 2)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> len(nfrs.unit_matrices_(model))
    8
    >>> model(torch.randn(3, 1, 8)).sum().backward()
    >>> optimizer.step()
    >>> names = nfrs.unit_matrices_(model)
    >>> torch.testing.assert_close(model.layers[0].linear2.weight.norm(dim=0), torch.ones(16))

    Args:
        model: a `normformer_rs.Transformer`, a model of `normformer_rs.nn`'s or torch.nn's layers, or one whose blocks
            `swap_residuals` has swapped.
        tables: the modules with word tables, (V, d) each. None: those of a `normformer_rs.Transformer`, or the input
            and output embeddings of a Hugging Face model.

    Returns the names of the matrices. Vectors shorter than 1e-12 are divided by that.

    Errors: InputError for a model without such layers, and for a matrix of a block whose use is not known.
    Source: Loshchilov et al. 2024; docs/spec.md §4.9.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    # identity of a matrix → (the matrix, the dimension along which its vectors lie)
    found = {id(p): (p, dimension) for p, dimension in _of_blocks(model)}
    if not found:
        raise InputError(
            f"found no matrices in {type(model).__name__}: expected a normformer_rs.Transformer, layers of "
            "normformer_rs.nn or torch.nn, or blocks that swap_residuals has swapped"
        )
    for table in _tables(model) if tables is None else tables:
        weight = _weight_of(table)
        if weight is None or id(weight) not in names:
            raise InputError(f"tables: a {type(table).__name__} has no table (V, d) among the model's parameters")
        found[id(weight)] = weight, 1  # the rows of a table are vectors
    for p, dimension in found.values():
        p.div_(p.norm(dim=dimension, keepdim=True).clamp_min(_LEAST))
    return [names[identity] for identity in found]


def _tables(model: nn.Module) -> list[nn.Module]:
    """Returns the input and output embeddings of a Hugging Face model of text; none of other models."""
    tables: list[Any] = [getattr(model, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output")]
    return [table for table in tables if _weight_of(table) is not None]


def _weight_of(module: Any) -> nn.Parameter | None:
    """Returns an embedding's matrix. None: the module's weight is no matrix, as in the convolutions of image models."""
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, nn.Parameter) and weight.dim() == 2 else None


def _of_blocks(model: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    """Yields each matrix of a model's blocks, and the dimension along which its vectors lie."""
    for path, module in model.named_modules():
        # a `normformer_rs.Transformer` has this method, which returns name → dimension for its matrices
        dimensions: Any = getattr(module, "_unit_dimensions", None)
        if dimensions is None:
            yield from _of_block(path, module)
            continue
        own = dict(module.named_parameters(remove_duplicate=False))
        yield from ((own[name], dimension) for name, dimension in dimensions().items())


def _of_block(path: str, block: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    """Yields each matrix of a block, and the dimension along which its vectors lie: columns for matrices that write the
    residual stream, rows for all others. Yields nothing if the module is no known block."""
    residual = residual_of(block)
    torchs = torchs_parts(block) if isinstance(block, tuple(TORCHS)) else ()
    parts = torchs if residual is None else residual.structure.parts
    if residual is not None and (unknown := unreached(block)):
        raise InputError(f"{path}.{unknown[0]} is neither of attention nor of a feed-forward: its unit is not known")
    for part in parts:
        for linear in part.linears:
            writes = {*linear.roles} <= {"output", "fc2"}
            # The stream's width is dimension 0 of a matrix (fan_out, fan_in) that writes, and 1 of one that reads. In a
            # transposed matrix it is the other way round.
            yield weight_and_bias(block, linear.path)[0], int(writes == is_transposed(block, linear.path))
        for linear in part.experts:
            writes = {*linear.roles} <= {"output", "fc2"}
            # a stack of matrices has the experts in dimension 0
            yield block.get_parameter(linear.path), 1 + int(writes == linear.is_transposed)
