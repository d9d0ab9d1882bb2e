"""A class of Transformer blocks as data: its sublayers, their norms, linear layers and dropouts."""

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from ..errors import InputError
from ..nn.init import Role


class Rows(NamedTuple):
    """Rows of a matrix that follow each other and do the same.

    Attributes:
        role: query, key, value, output, fc1, fc2 or gate; None: another, or several.
        head: whose queries, keys or values; None: all heads' or none's.
        size: how many.
    """

    role: Role | None
    head: int | None
    size: int


class Linear(NamedTuple):
    """A linear layer of a block, or a parameter that stacks one for each expert.

    Attributes:
        path: its path in the block.
        roles: its outputs: query, key, value, output, fc1, fc2, gate; several where they are stacked.
        factor: multiplies the scheme's first values.
        rows: the role of every row; empty: each role has an equal share, in order.
        is_transposed: the parameter is (fan_in, fan_out), as a stack of experts may be.
        is_called: as a module; else its weight is read alone, and hooks on it do not run.
        is_unclear: it is one of two factors of a product that could not be told apart.
    """

    path: str
    roles: tuple[Role, ...]
    factor: float = 1.0
    rows: tuple[Rows, ...] = ()
    is_transposed: bool = False
    is_called: bool = True
    is_unclear: bool = False

    def rows_of(self, role: Role, size: int) -> list[int]:
        """The rows with that role of a matrix of `size` rows."""
        if not self.rows:
            share, first = size // len(self.roles), self.roles.index(role)
            return [*range(first * share, (first + 1) * share)]
        roles = [rows.role for rows in self.rows for _ in range(rows.size)]
        return [i for i, one in enumerate(roles) if one == role]

    def __str__(self) -> str:
        """Its last name and its roles, with the heads of queries, keys and values."""
        counts = [len({*self.heads(role)} - {None}) for role in self.roles]
        heads = f", {'+'.join(map(str, counts))} heads" if all(counts) and counts else ""
        roles = "+".join(self.roles) or "stays"
        name = self.path.removesuffix(".weight").rpartition(".")[2]
        return f"{name} ({roles}{heads})" if name != roles else f"{name}{heads}"

    def heads(self, role: Role) -> list[int | None]:
        """The head of each row with that role."""
        return [rows.head for rows in self.rows for _ in range(rows.size) if rows.role == role]


class Part(NamedTuple):
    """A sublayer of a block.

    Attributes:
        kind: self-attention, cross-attention or feed-forward.
        norm: the path of its norm.
        linears: its linear layers; of a gated pair the one before the activation comes first.
        dropout: the dropout on its output: an attribute of the block (a module or a rate), or a path with a dot: a
            module inside the sublayer, which moves out to the residual.
        drop_path: the path of stochastic depth on its output, which moves out to the residual.
        run: ignored: the block's own forward runs it.
        before, after, branch: its norms by their place: N(x) that F reads, N(x + F), N(F).
        twins: norms that stand beside `before`, where parallel branches have their own.
        reads_past: F reads x beside its norm, too.
        memory: the block's argument that cross-attention reads; without it the sublayer is left out.
        is_parallel: F is a sum of branches, attention beside a feed-forward.
        alpha: multiplies x.
        experts: parameters that are stacks of matrices, one for each expert, with their roles.
        beta: the number that multiplies F(x) last.
        scales: modules that multiply F(x) last, each by a vector: LayerScale.
    """

    kind: str
    norm: str | None
    linears: tuple[Linear, ...]
    dropout: str | None = None
    run: tuple[str, ...] = ()
    before: str | None = None
    after: str | None = None
    branch: str | None = None
    twins: tuple[str, ...] = ()
    reads_past: bool = False
    memory: str | None = None
    is_parallel: bool = False
    beta: float = 1.0
    scales: tuple[str, ...] = ()
    alpha: float = 1.0
    experts: tuple[Linear, ...] = ()
    drop_path: str | None = None

    def __str__(self) -> str:
        """Its matrices with their roles; cross-attention says that it is."""
        told = ", ".join(map(str, (*self.linears, *self.experts))) or "no matrix"
        return f"cross-attention {told}" if self.kind == "cross-attention" else told

    @property
    def moves(self) -> str | None:
        """The path of a dropout that moves out of the sublayer."""
        return self.dropout if self.dropout is not None and "." in self.dropout else None

    def norms(self) -> list[str]:
        """The paths of all its norms."""
        places = (self.norm, self.before, self.after, self.branch, *self.twins)
        return [*dict.fromkeys(path for path in places if path is not None)]

    def paths(self) -> Iterator[str]:
        """The paths that the block must have for it."""
        yield from () if self.norm is None else (self.norm,)
        yield from (linear.path.removesuffix(".in_proj_weight") for linear in self.linears)
        yield from (path for path in (self.dropout, *self.run) if path is not None)


class Stack(NamedTuple):
    """The residual stream around a stack's blocks; paths are those of the module that holds them.

    Attributes:
        norm: the norm after the last block.
        writers: the modules and parameters that add up to the first block's input; `a|b`: b where a is None. None: not
            declared.
        after: children that read the norm, or come later.
    """

    norm: str
    writers: tuple[str, ...] | None = None
    after: tuple[str, ...] = ()


class BlockSpec(NamedTuple):
    """A class of blocks as data, for `register_block`: its sublayers in the order in which its forward adds them.

    Attributes:
        parts: the sublayers in order; cross-attention is left out of blocks that have none.
        heads: the path of the number of attention heads.
        clamps: ignored: the block's own forward does it.
        norm_first: its norms stand before its sublayers, x + F(N(x)); or the path of the attribute that says so.
            Needed by `fold_norms` and exact swaps, which take no other blocks.
    """

    parts: tuple[Part, ...]
    heads: str
    clamps: bool = False
    norm_first: bool | str | None = None

    def parts_of(self, block: Any) -> list[Part]:
        """The sublayers that this block has."""
        return [part for part in self.parts if part.kind != "cross-attention" or has(block, part.norm or "")]

    def heads_of(self, block: Any) -> int:
        return at(block, self.heads)

    def check(self, block: nn.Module) -> None:
        """InputError where the block is not as declared: another version of its library may have changed it."""
        name, parts = type(block).__name__, self.parts_of(block)
        paths = [*(path for part in parts for path in part.paths()), self.heads]
        missing = [path for path in paths if not has(block, path)]
        if missing:
            raise InputError(
                f"{name} has no {missing[0]}, which its declaration names: another version of its library may have "
                "changed it; declare it with normformer_rs.surgery.register_block"
            )
        known = {path.partition(".")[0] for path in paths}
        unknown = [child for child, module in block.named_children() if child not in known and _learns(module)]
        if unknown:
            raise InputError(
                f"{name} holds {unknown[0]}, which its declaration does not name: declare it with "
                "normformer_rs.surgery.register_block"
            )


def _learns(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def at(block: Any, path: str) -> Any:
    """The value at a path of attributes."""
    return operator.attrgetter(path)(block)


def chosen(module: Any, paths: str) -> str | None:
    """The first of the paths `a|b` that is there and not None; None: all of them are None. AttributeError where none is
    there."""
    there = [path for path in paths.split("|") if has(module, path)]
    if not there:
        at(module, paths.split("|")[0])
    return next((path for path in there if at(module, path) is not None), None)


def has(block: Any, path: str) -> bool:
    """The path exists."""
    try:
        at(block, path)
    except AttributeError:
        return False
    return True
