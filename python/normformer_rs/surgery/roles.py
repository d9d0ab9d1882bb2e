"""Finds which rows of a matrix compute queries, keys, values or a gate. The roles are read from the model's
computation, not from names.

In one run with gradients, the output of every product with a parameter and of every attention becomes a leaf of
autograd's graph. So a derivative of attention's inputs, or of the next matrix's input, reaches back to the rows that
computed them, and stops there. A row belongs to the queries of head h if the derivative of head h's queries with
respect to that row's output is not zero. Keys and values are found likewise.

A gated feed-forward computes a ⊙ φ(b). To tell a from b, the run is repeated with some rows' outputs multiplied by −2.
The derivative with respect to a row of a is φ(b), so it changes only if the matching row of b was scaled. The
derivative with respect to a row of b changes if either row was scaled. Rows of a are called linear, rows of b curved.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .spec import Rows
from .trace import Attention, Owner, Product, Trace, leaves_of

_RUNS = 4
"""How often the run is repeated with scaled outputs."""


class Matrix(NamedTuple):
    """The roles of a matrix's outputs.

    Attributes:
        rows: the roles of its rows, in order; empty if none was found.
        heads: the number of heads of the attention that reads its output; None: no attention does.
        reads_attention: its input is computed from attention's output.
        mixes: its input mixes several rows of the stream, but no attention was recognised.
        is_unclear: a gated feed-forward computes one of its two factors with it, and it is unknown which one.
        factor: d_head^−½ if it computes queries, and the attention does not scale their products with keys; else 1.
        is_transposed: the parameter's shape is (fan_in, fan_out).
    """

    rows: tuple[Rows, ...] = ()
    heads: int | None = None
    reads_attention: bool = False
    mixes: bool = False
    is_unclear: bool = False
    factor: float = 1.0
    is_transposed: bool = False


class Roles(NamedTuple):
    """The roles of all matrices that a run of the model multiplied by."""

    matrices: Mapping[Owner, Matrix]
    why: str = ""
    """The reason why the roles could not be found. Empty: they were."""

    def of(self, owner: Owner) -> Matrix | None:
        """Returns the roles of a matrix's rows. None: the run did not multiply by it."""
        return self.matrices.get(owner)


def owner_of(module: nn.Module) -> Owner:
    """Returns the key of a linear layer's matrix: its weight, or the module if it computes its weight from others."""
    own = module._parameters.get("weight")
    return module if own is None else own


def find_roles(
    model: nn.Module, run: Callable[[], Any], norms: Set[nn.Module], writers: Mapping[Owner, set[Owner]]
) -> Roles:
    """Returns the roles of all matrices of a model in evaluation mode. `run`: runs the model; `norms`: its norms;
    `writers`: the last matrix of each branch → all matrices of the branch."""

    def again(first: Trace, scales: Mapping[int, Tensor]) -> Trace | None:
        """Repeats the run with the first run's outputs of matrices and attentions; those in `scales` are scaled. None:
        the repeated run failed, or multiplied by other matrices."""
        other = Trace(model, norms, first, scales)
        try:
            other.follow(run)
        except MemoryError:
            raise
        except Exception:  # the model may fail on scaled rows
            return None
        has_same_products = len(other.products) == len(first.products)
        return other if has_same_products else None

    first = Trace(model, norms)
    try:
        first.follow(run)
        return Roles(_Reader(first, writers).read(lambda scales: again(first, scales)))
    except MemoryError:
        raise
    except Exception as reason:  # a model may raise anything where gradients are recorded
        return Roles({}, f"{type(reason).__name__}: {str(reason).partition(chr(10))[0]}")


class _Tested(NamedTuple):
    """A branch's last matrix whose input may be a product of two factors.

    Attributes:
        number: the number of its product.
        derivatives: the numbers of the products that compute the input → derivatives of the input's weighted sum with
            respect to their outputs.
        weights: the weights of that sum, in the input's shape.
    """

    number: int
    derivatives: dict[int, Tensor]
    weights: Tensor


class _Reader:
    """Reads the roles of matrices from a traced run. `writers`: the last matrix of each branch → all matrices of the
    branch."""

    def __init__(self, run: Trace, writers: Mapping[Owner, set[Owner]]) -> None:
        self.run, self.writers = run, writers
        self.number = {id(product.leaf): i for i, product in enumerate(run.products)}
        """For each matrix's output, by its identity, the number of the product."""
        self.random = torch.Generator().manual_seed(0)
        self.owned: dict[int, list[set[tuple[Any, int | None]]]] = {}
        """For each product's number, the (role, head) pairs found for each row of its matrix."""
        self.unclear: set[int] = set()
        """Numbers of the products with one factor of a gated feed-forward, where it is unknown which factor."""
        self.tested: set[int] = set()
        """Numbers of the products whose inputs combine several outputs of earlier matrices in each column."""
        self.heads: dict[int, int] = {}
        """For each product's number, `Matrix.heads` of its matrix."""
        self.factors: dict[int, float] = {}
        """For each product's number, `Matrix.factor` of its matrix."""

    def read(self, again: Callable[[Any], Trace | None]) -> dict[Owner, Matrix]:
        """Returns the roles. `again`: repeats the run with some outputs scaled (see `find_roles`)."""
        for attention in self.run.attentions:
            self._attention(attention)
        self._feed_forwards(again)
        found = {owner: Matrix(rows, heads) for owner, (rows, heads) in self.run.known.items()}
        for i, product in enumerate(self.run.products):
            # the outputs of earlier matrices and attentions from which a branch's last matrix computes its input
            behind = leaves_of(product.x) if product.owner in self.writers else set()
            reads_attention = bool(behind & self.run.attended)
            matrix = Matrix(
                rows=_runs(self.owned.get(i, ())),
                heads=self.heads.get(i),
                reads_attention=reads_attention,
                mixes=i in self.tested and not reads_attention and self._mixes(product, behind),
                is_unclear=i in self.unclear,
                factor=self.factors.get(i, 1.0),
                is_transposed=product.is_transposed,
            )
            found[product.owner] = _joined(found.get(product.owner), matrix)
        return found

    def _weights(self, t: Tensor) -> Tensor:
        """Returns random numbers of a tensor's shape. Derivatives of a sum with such weights do not cancel."""
        return torch.randn(t.shape, generator=self.random, device="cpu").to(t.device, t.dtype)

    def _reached(self, total: Tensor, leaves: set[int]) -> dict[int, Tensor]:
        """Returns the derivatives of `total` with respect to those of `leaves` that are outputs of matrices: number of
        the product → derivative."""
        numbers = [i for leaf in leaves if (i := self.number.get(leaf)) is not None]
        if not numbers or not total.requires_grad:
            return {}
        outputs = [self.run.products[i].leaf for i in numbers]
        given = torch.autograd.grad(total, outputs, retain_graph=True, allow_unused=True)
        return {i: g for i, g in zip(numbers, given) if g is not None}

    def _own(self, i: int, rows: Iterable[int], role: str, head: int | None = None) -> None:
        """Notes a role, and the head if it is known, for some rows of the matrix of product i."""
        if i not in self.owned:
            self.owned[i] = [set() for _ in range(self.run.products[i].leaf.shape[-1])]
        for row in rows:
            self.owned[i][row].add((role, head))

    # The methods below find queries, keys and values.

    def _attention(self, attention: Attention) -> None:
        """Notes which rows compute the queries, keys and values of an attention, its number of heads, and the factor of
        its queries. Notes nothing if queries, keys or values come from no matrix."""
        # role → number of a product → the set of its matrix's rows for each head
        heads_of_role = {
            role: self._heads(t) for role, t in (("query", attention.q), ("key", attention.k), ("value", attention.v))
        }
        if not all(heads_of_role.values()):
            return
        for (role, heads), width in zip(
            heads_of_role.items(), (attention.q.shape[-1], attention.k.shape[-1], attention.v.shape[-1])
        ):
            for i, sets in heads.items():
                # a row belongs to one head only if the sets are disjoint and no larger than a head
                are_disjoint = sum(map(len, sets)) == len(set[int]().union(*sets))
                are_heads = are_disjoint and len(sets[0]) <= width
                for head, rows in enumerate(sets):
                    self._own(i, rows, role, head if are_heads else None)
        queries, keys = heads_of_role["query"], heads_of_role["key"]
        query_rows = [set[int]().union(*sets) for sets in queries.values()]
        # if several matrices compute the queries, as with an adapter, each must have rows of its own for every head
        by_matrix = zip(queries.values(), query_rows)
        # each matrix's number of heads; 0 if heads have rows in common
        counts = {len(sets) if sum(map(len, sets)) == len(rows) else 0 for sets, rows in by_matrix}
        if len(query_rows) == 1:
            count = len(query_rows[0]) // attention.q.shape[-1]  # the number of rows divided by that of one head
        else:
            count = counts.pop() if len(counts) == 1 else 0  # 0: unknown
        for i in {i for heads in heads_of_role.values() for i in heads}:
            self.heads[i] = max(1, count)
        if len(queries) == len(keys) == 1 and _is_unscaled(
            attention, *(self._leaf(heads) for heads in (queries, keys))
        ):
            self.factors[next(iter(queries))] = attention.q.shape[-1] ** -0.5

    def _heads(self, t: Tensor) -> dict[int, list[set[int]]]:
        """Returns, for each matrix that `t` (queries, keys or values) is computed from, the set of rows of each
        head."""
        rows_of_heads: dict[int, list[set[int]]] = {}
        leaves = leaves_of(t)
        # the heads of one example; if batch and heads share a dimension, later examples add no new sets
        for head in (t[0] if t.dim() > 3 else t).reshape(-1, *t.shape[-2:]):
            for i, g in self._reached((head * self._weights(head)).sum(), leaves).items():
                rows = {*_columns(g).nonzero().flatten().tolist()}
                if rows and rows not in rows_of_heads.setdefault(i, []):
                    rows_of_heads[i].append(rows)
        return rows_of_heads

    def _leaf(self, heads: dict[int, Any]) -> Tensor:
        """Returns the output of the one matrix in a result of `_heads`."""
        return self.run.products[next(iter(heads))].leaf

    def _mixes(self, product: Product, behind: set[int]) -> bool:
        """Returns whether a branch mixes tokens: whether its last matrix reads, for the last token, outputs of the
        branch's earlier matrices at other tokens. `product`: that of the last matrix; `behind`: the leaves that its
        input is computed from."""
        x = product.x
        if not x.requires_grad or x.dim() < 3 or x.shape[-2] < 2:
            return False
        last = x[..., -1, :]
        inside = {id(p.leaf) for p in self.run.products if p.owner in self.writers[product.owner]}
        derivatives = self._reached((last * self._weights(last)).sum(), behind & inside)
        # outputs with another number of tokens cannot be compared
        comparable = [g for g in derivatives.values() if g.dim() == x.dim() and g.shape[-2] == x.shape[-2]]
        return any(bool((g[..., :-1, :] != 0).any()) for g in comparable)

    # The methods below find the matrices of feed-forwards.

    def _feed_forwards(self, again: Callable[[Any], Trace | None]) -> None:
        """Finds the matrices that compute the input of a feed-forward's last matrix, and notes which rows are fc1 and
        which the gate. If that input also depends on attention's output, its other factor is attention's output gate.
        `again`: repeats the run with some outputs scaled (see `find_roles`)."""
        tested: list[_Tested] = []
        for i, product in enumerate(self.run.products):
            if product.owner not in self.writers or not product.x.requires_grad:
                continue
            behind, weights = leaves_of(product.x), self._weights(product.x)
            own = self.writers[product.owner] - {product.owner}  # the branch's other matrices
            inside = {leaf for leaf in behind if self._owner(leaf) in own}
            derivatives = self._reached((product.x * weights).sum(), inside)
            attends = bool(behind & self.run.attended)
            # matrices of queries, keys and values (`heads`) count only if they may also hold rows of an output gate
            derivatives = {j: g for j, g in derivatives.items() if attends or j not in self.heads}
            # a product of two factors would read twice as many rows as the input has columns
            is_one_factor = sum(g.shape[-1] for g in derivatives.values()) == product.x.shape[-1]
            if is_one_factor and not attends:
                for j, g in derivatives.items():  # all rows: a zero derivative may only mean that ReLU returned 0
                    self._own(j, range(g.shape[-1]), "fc1")
            elif derivatives:
                tested.append(_Tested(i, derivatives, weights))
                self.tested.add(i)
        for i, linear, curved in self._linear_rows(tested, again):
            product = self.run.products[i]
            # The rows of a matrix as wide as the input are all of one kind. Rows for which ReLU returned 0 have no
            # derivative and are in neither set, so they join the others.
            for j in linear:
                size, width = self.run.products[j].leaf.shape[-1], product.x.shape[-1]
                if size == width and bool(linear[j]) != bool(curved[j]):
                    all_rows = {*range(size)}
                    linear[j], curved[j] = (all_rows, set()) if linear[j] else (set(), all_rows)
            counts = [sum(map(len, rows.values())) for rows in (linear, curved)]
            if leaves_of(product.x) & self.run.attended:
                for j in linear:  # the rows that have no role yet
                    rows = linear[j] | curved[j]
                    self._own(j, [row for row in rows if j not in self.owned or not self.owned[j][row]], "output_gate")
            elif counts == [product.x.shape[-1]] * 2:  # a and φ(b) each have one row for each column of the input
                for j in linear:
                    self._own(j, linear[j], "gate")
                    self._own(j, curved[j], "fc1")
            elif not self._mixes(product, leaves_of(product.x)):  # a branch that mixes tokens is no feed-forward
                self.unclear |= {*linear}

    def _owner(self, leaf: int) -> Owner | None:
        """Returns the matrix whose output is the leaf with this identity. None: it is no matrix's output."""
        number = self.number.get(leaf)
        return None if number is None else self.run.products[number].owner

    def _linear_rows(
        self, tested: list[_Tested], again: Callable[[Any], Trace | None]
    ) -> Iterator[tuple[int, dict[int, set[int]], dict[int, set[int]]]]:
        """Yields for each product in `tested` its number, and two dictionaries: the number of a product that computes
        its input → the linear rows of that product's matrix, and likewise its curved rows. `again`: see `find_roles`.

        Repeated runs scale each row at half of the places (an example's token) of all runs. A row is linear if the
        derivative with respect to it often stays where the row was scaled (see the module's docstring)."""
        scaled = {j for _, derivatives, _ in tested for j in derivatives}
        # (i, j) → at how many places the derivative with respect to each row stayed although the row was scaled
        kept = {
            (i, j): torch.zeros(g.shape[-1], device="cpu")
            for i, derivatives, _ in tested
            for j, g in derivatives.items()
        }
        patterns = {j: _patterns(self.run.products[j].leaf, self.random) for j in scaled}
        for repetition in range(_RUNS if scaled else 0):
            other = again({j: patterns[j][repetition] for j in scaled})
            for i, derivatives, weights in tested if other is not None else ():
                assert other is not None
                outputs = [other.products[j].leaf for j in derivatives]
                total = (other.products[i].x * weights).sum()
                new_derivatives = torch.autograd.grad(total, outputs, retain_graph=True, allow_unused=True)
                for (j, before), now in zip(derivatives.items(), new_derivatives):
                    if now is not None:
                        # a derivative stays if it is equal up to a few roundings
                        stays = (now - before).abs() <= 4 * torch.finfo(now.dtype).eps * before.abs()
                        kept_here = patterns[j][repetition] & stays & (before != 0)
                        kept[i, j] += kept_here.reshape(-1, kept_here.shape[-1]).sum(0).cpu()
        for i, derivatives, _ in tested:
            rows = {j: {*_columns(g).nonzero().flatten().tolist()} for j, g in derivatives.items()}
            # A linear row keeps its derivative where it is scaled and its row of b is not: at about a quarter of all
            # places. A curved row keeps it hardly anywhere. The threshold is 1/64 of the places.
            counts = {j: (g != 0).reshape(-1, g.shape[-1]).sum(0).cpu() for j, g in derivatives.items()}
            often = {j: kept[i, j] > _RUNS * counts[j] / 64 for j in derivatives}
            linear = {j: rows[j] & {*often[j].nonzero().flatten().tolist()} for j in derivatives}
            yield i, linear, {j: rows[j] - linear[j] for j in derivatives}


def _columns(g: Tensor) -> Tensor:
    """Returns a mask of the columns that are not zero everywhere."""
    return (g != 0).reshape(-1, g.shape[-1]).any(0)


def _is_unscaled(attention: Attention, q: Tensor, k: Tensor) -> bool:
    """Returns whether the scores are plain products of the outputs of the two matrices, without a factor; terms may be
    added. Then ∂sᵢᵢ/∂qᵢ = kᵢ, also if query and key i are rotated by the same angle. `q`, `k`: those outputs, (batch,
    tokens, columns)."""
    if not attention.scores.requires_grad or q.dim() != 3 or k.dim() != 3 or q.shape[-1] != k.shape[-1]:
        return False
    rows = min(q.shape[1], k.shape[1])
    diagonal = attention.scores.diagonal(dim1=-2, dim2=-1)  # −∞ where a mask hides the key
    (g,) = torch.autograd.grad(diagonal[torch.isfinite(diagonal)].sum(), q, retain_graph=True, allow_unused=True)
    if g is None:
        return False
    return torch.allclose(g[:, :rows], k[:, :rows], rtol=1e-3, atol=1e-4 * float(k.detach().abs().max()))


def _patterns(leaf: Tensor, random: torch.Generator) -> list[Tensor]:
    """Returns, for each repeated run, a mask of a matrix's outputs to scale. `leaf`: those outputs. Each row is scaled
    at a random half of its places over all runs, so two rows hardly ever share a pattern."""
    places = leaf[..., 0].numel()
    # for each row, a random permutation of its places in all runs, whose lower half is chosen
    order = torch.rand(_RUNS * places, leaf.shape[-1], generator=random, device="cpu").argsort(0)
    chosen = order < _RUNS * places // 2
    return [part.reshape(leaf.shape).to(leaf.device) for part in chosen.chunk(_RUNS)]


def _runs(owned: Iterable[set[tuple[Any, int | None]]]) -> tuple[Rows, ...]:
    """Returns the roles of a matrix's rows, with neighbours of equal role and head joined into one run of rows. Rows
    with several roles, or none, get the role None."""
    runs: list[Rows] = []
    for pairs, neighbours in itertools.groupby(owned):
        roles, heads = {role for role, _ in pairs}, {head for _, head in pairs}
        role = roles.pop() if len(roles) == 1 else None
        head = heads.pop() if len(heads) == 1 and role is not None else None
        size = sum(1 for _ in neighbours)
        # neighbours with different pairs may still have the same role and head, such as none
        if runs and runs[-1][:2] == (role, head):
            runs[-1] = runs[-1]._replace(size=runs[-1].size + size)
        else:
            runs.append(Rows(role, head, size))
    return tuple(runs)


def _joined(first: Matrix | None, second: Matrix) -> Matrix:
    """Joins the findings from two products with one matrix, such as those for several experts (`first` is None: there
    was no earlier product). If they differ about the rows, the rows get no role."""
    if first is None or first == second:
        return second
    rows = first.rows or second.rows
    differs = bool(second.rows) and rows != second.rows
    return first._replace(
        rows=(Rows(None, None, sum(run.size for run in rows)),) if differs else rows,
        heads=first.heads or second.heads,
        reads_attention=first.reads_attention or second.reads_attention,
        mixes=first.mixes or second.mixes,
        is_unclear=differs or (not rows and (first.is_unclear or second.is_unclear)),
        factor=first.factor if first.factor == second.factor else 1.0,
    )
