"""A class of Transformer blocks as data: its sublayers, their norms, linear layers and dropouts."""

import operator
from typing import Any, NamedTuple

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


def at(block: Any, path: str) -> Any:
    """The value at a path of attributes."""
    return operator.attrgetter(path)(block)


def has(block: Any, path: str) -> bool:
    """The path exists."""
    try:
        at(block, path)
    except AttributeError:
        return False
    return True
