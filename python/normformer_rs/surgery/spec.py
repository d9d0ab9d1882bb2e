"""Types that describe a Transformer block: its sublayers, with their norms, linear layers and dropouts."""

import operator
from typing import Any, NamedTuple

from ..nn.init import Role


class Rows(NamedTuple):
    """Adjacent rows of a matrix that have the same role.

    Attributes:
        role: query, key, value, output, fc1, fc2, gate or output_gate; None: another role, or several.
        head: the head that the rows belong to; None: to all heads, or to none.
        size: the number of rows.
    """

    role: Role | None
    head: int | None
    size: int


class Linear(NamedTuple):
    """A linear layer of a block, or a parameter that stacks the matrices of several experts.

    Attributes:
        path: its path in the block.
        roles: the roles of its outputs: query, key, value, output, fc1, fc2, gate, output_gate; several if the matrix
            stacks them.
        factor: the scheme's initial values are multiplied by it.
        rows: the role of every row; empty: each role has an equal share, in order.
        is_transposed: the parameter's shape is (fan_in, fan_out), as a stack of experts may have it.
        is_called: the block calls the layer; if False, it only reads the weight, and hooks on the layer do not run.
        is_unclear: a gated feed-forward computes one of its two factors with it, and it is unknown which one.
    """

    path: str
    roles: tuple[Role, ...]
    factor: float = 1.0
    rows: tuple[Rows, ...] = ()
    is_transposed: bool = False
    is_called: bool = True
    is_unclear: bool = False

    def rows_of(self, role: Role, size: int) -> list[int]:
        """Returns the indices of the rows with that role. `size`: the matrix's number of rows."""
        if not self.rows:
            share, position = size // len(self.roles), self.roles.index(role)
            return [*range(position * share, (position + 1) * share)]
        roles = [rows.role for rows in self.rows for _ in range(rows.size)]  # the role of each row
        return [i for i, row_role in enumerate(roles) if row_role == role]

    def __str__(self) -> str:
        """Returns the layer's name and roles, with the number of heads of each role that has heads."""
        counts = [len({*self.heads(role)} - {None}) for role in self.roles]  # None: a row without a known head
        heads = f", {'+'.join(map(str, counts))} heads" if all(counts) and counts else ""
        roles = "+".join(self.roles) or "stays"
        name = self.path.removesuffix(".weight").rpartition(".")[2]
        return f"{name} ({roles}{heads})" if name != roles else f"{name}{heads}"

    def heads(self, role: Role) -> list[int | None]:
        """Returns the head of each row with that role."""
        return [rows.head for rows in self.rows for _ in range(rows.size) if rows.role == role]


class Part(NamedTuple):
    """A sublayer of a block.

    Attributes:
        kind: self-attention, cross-attention or feed-forward.
        norm: the path of its norm.
        linears: its linear layers. Of a gated pair, the layer before the activation comes first.
        dropout: the dropout on its output: the name of an attribute of the block (a module or a rate), or a path with a
            dot. Such a path names a module inside the sublayer, which a swap moves to the scheme's `BlockResidual`.
        drop_path: the path of stochastic depth on its output, which moves there, too.
        before, after, branch: the paths of its norms, by place: F(N(x)), N(x + F(x)), N(F(x)).
        twins: if parallel branches have norms of their own, the paths of those norms except `before`.
        reads_past: F also reads x without its norm.
        memory: the name of the block's argument that cross-attention reads, such as an encoder's output. A call without
            it leaves the sublayer out.
        is_parallel: F is a sum of branches, such as attention and a feed-forward.
        alpha: the number that multiplies x.
        experts: parameters that stack one matrix for each expert, with their roles.
        beta: the number that multiplies F(x) last.
        scales: paths of modules that multiply F(x) last, each by a vector, as LayerScale does.
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
        """Returns the sublayer's matrices with their roles; for cross-attention, its kind comes first."""
        matrices = ", ".join(map(str, (*self.linears, *self.experts))) or "no matrix"
        return f"cross-attention {matrices}" if self.kind == "cross-attention" else matrices

    @property
    def moves(self) -> str | None:
        """The path of the dropout that moves out of the sublayer. None: there is none."""
        return self.dropout if self.dropout is not None and "." in self.dropout else None

    def norms(self) -> list[str]:
        """Returns the paths of all its norms."""
        places = (self.norm, self.before, self.after, self.branch, *self.twins)
        return [*dict.fromkeys(path for path in places if path is not None)]


def at(block: Any, path: str) -> Any:
    """Returns the value at a path of attributes, such as self_attn.dropout."""
    return operator.attrgetter(path)(block)


def has(block: Any, path: str) -> bool:
    """Returns whether a path of attributes exists."""
    try:
        at(block, path)
    except AttributeError:
        return False
    return True
