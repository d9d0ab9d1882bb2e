"""Which row of a matrix makes queries, keys, values or a gate: read from what the model computes, not from names.

In one run with gradients, the output of every product with a parameter and of every attention becomes a leaf of
autograd's graph. A derivative then reaches from what attention receives, or from what the next matrix reads, back to
the rows that made it, and stops there. A row belongs to the queries of head h if the derivative of head h's queries by
that row's output is not zero, and so for keys and values.

A gated feed-forward multiplies a ⊙ φ(b). The run is repeated with a share of the rows times −2 and all others as they
were. The derivative by a row of a does not move unless the row of b beside it was scaled; the one by a row of b does.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .record import UNCHANGED, tensors_in
from .spec import Rows

Owner = nn.Parameter | nn.Module
"""A matrix: its parameter, or the linear layer that computes it from others."""

_PRODUCTS = frozenset({"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum"})
_BY_MATRIX = frozenset({"linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "grouped_mm", "_grouped_mm"})
_BY_MATRIX |= {"grouped_mm_fallback"}  # transformers' operator
_SWAPS = frozenset({"transpose", "t", "swapaxes", "swapdims", "adjoint", "permute", "__get__"})
_RUNS = 4
_SCALE = -2.0


class Matrix(NamedTuple):
    """What the outputs of a matrix are for.

    Attributes:
        rows: the roles of its rows, in order; empty: none was told.
        heads: of the attention that reads it, by role.
        reads_attention: it multiplies what attention gave.
        mixes: rows of the stream meet before it, and no attention was recognised.
        is_unclear: it is one of two factors of a product that could not be told apart.
        factor: d_head^−½ for queries whose products with keys nothing scales, else 1.
        is_transposed: the parameter is (fan_in, fan_out).
    """

    rows: tuple[Rows, ...] = ()
    heads: int | None = None
    reads_attention: bool = False
    mixes: bool = False
    is_unclear: bool = False
    factor: float = 1.0
    is_transposed: bool = False


class Roles(NamedTuple):
    """The matrices of a model that its run multiplied by."""

    matrices: Mapping[Owner, Matrix]
    why: str = ""
    """The reason why they could not be told."""

    def of(self, owner: Owner) -> Matrix | None:
        """What the rows of a matrix are for. None: the run did not multiply by it."""
        return self.matrices.get(owner)


def owner_of(module: nn.Module) -> Owner:
    """The matrix of a linear layer."""
    own = module._parameters.get("weight")
    return module if own is None else own


def find_roles(
    model: nn.Module, run: Callable[[], Any], norms: Set[nn.Module], writers: Mapping[Owner, set[Owner]]
) -> Roles:
    """The roles of all matrices of a model in evaluation mode. `writers`: the last matrix of each branch, and all
    matrices of the branch."""

    def again(first: _Traced, scales: Mapping[int, Tensor]) -> _Traced | None:
        """The run with the recorded outputs of all matrices and attentions, some of their rows scaled; None: it went
        another way."""
        other = _Traced(model, norms, first, scales)
        try:
            other.follow(run)
        except MemoryError:
            raise
        except Exception:  # what a scaled row leads to is the model's
            return None
        return other if len(other.products) == len(first.products) else None

    first = _Traced(model, norms)
    try:
        first.follow(run)
        return Roles(_Reader(first, writers).read(lambda scales: again(first, scales)))
    except MemoryError:
        raise
    except Exception as reason:  # a model may raise anything where gradients are recorded
        return Roles({}, f"{type(reason).__name__}: {str(reason).partition(chr(10))[0]}")


class Product(NamedTuple):
    """A product with a matrix: what it read, and its output, both with columns last."""

    owner: Owner
    x: Tensor
    leaf: Tensor
    is_transposed: bool = False


class Attention(NamedTuple):
    """What attention received, (…, tokens, columns) each, the scores that the softmax read, and its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    leaf: Tensor


class _Traced(TorchFunctionMode):
    """A run that ends autograd's graph at every matrix and every attention."""

    def __init__(
        self, model: nn.Module, norms: Set[nn.Module], first: "_Traced | None" = None, scales: Any = None
    ) -> None:
        super().__init__()
        self.model, self.norms, self.first, self.scales = model, norms, first, scales or {}
        self.owners: dict[int, Owner] = {id(p): p for p in model.parameters() if p.dim() >= 2}
        self.products: list[Product] = []
        self.attentions: list[Attention] = []
        self.known: dict[Owner, Matrix] = {}
        """The stacked projections of torch.nn's attention."""
        self.attended: set[int] = set()
        """The outputs of all attentions."""
        self.pairs: list[tuple[Tensor, Tensor, Tensor, bool]] = []
        """Products of two tensors: (…, rows, columns), (…, columns, rows), the result, and whether both factors depend
        on the model's input."""
        self.softmaxes: list[tuple[Tensor, Tensor, int]] = []
        self.constants: dict[int, Tensor] = {}
        """Tensors that are computed from parameters alone."""
        self.views: dict[int, tuple[Owner, bool, Tensor]] = {}
        """Views and copies of a parameter, and whether their last two dimensions are exchanged."""
        self.scaled: list[Tensor] = []
        """The factors of norms."""
        self.alive: list[Any] = []
        self.within = 0

    def follow(self, run: Callable[[], Any]) -> None:
        computed = [m for m in self.model.modules() if isinstance(m, nn.Linear) and "weight" not in m._parameters]
        with contextlib.ExitStack() as hooks:
            for module in (*computed, *self.norms):
                hooks.callback(module.register_forward_pre_hook(self._enter).remove)
                hooks.callback(module.register_forward_hook(self._leave).remove)
            with torch.enable_grad(), self:
                run()

    def _enter(self, *_: Any) -> None:
        self.within += 1

    def _leave(self, module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        self.within -= 1
        if self.within:
            return out
        return self._norm(given[0], out) if module in self.norms else self._matrix(module, given[0], out)

    def _norm(self, x: Tensor, out: Tensor) -> Tensor:
        """x divided by a constant for each row, which mixes no columns."""
        if not isinstance(out, Tensor) or out.shape != x.shape:
            return out
        scale = x.detach().square().mean(-1, keepdim=True).clamp_min(1e-12).rsqrt()
        if self.first is not None and self.first.scaled[len(self.scaled)].shape == scale.shape:
            scale = self.first.scaled[len(self.scaled)]
        self.scaled.append(scale)
        made = (x * scale).to(out.dtype)
        self._follow_constants("norm", [x], made)
        return made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.within:
            return out
        name = getattr(func, "__name__", "") or str(func)
        given = [*tensors_in(args), *tensors_in(kwargs)]
        self._follow_constants(name, given, out)
        if name == "multi_head_attention_forward":
            bound = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments
            return self._torchs_attention(bound, out)
        if not isinstance(out, Tensor) or not out.is_floating_point() or not given:
            return out
        if name in UNCHANGED | _SWAPS | {"index_select"} and (origin := self._origin(given[0])) is not None:
            moved = (
                name in _SWAPS
                and out.dim() >= 2
                and (out.stride(-1) > out.stride(-2)) != (given[0].stride(-1) > given[0].stride(-2))
            )
            self.views[id(out)] = origin[0], origin[1] != moved, out
        elif name == "scaled_dot_product_attention":
            return self._attended(*_of_attention(*args, **kwargs), out)
        elif name == "softmax":
            self.softmaxes.append((given[0], out, _dimension(args, kwargs)))
        elif (told := self._by_matrix(name, given, out)) is not None:
            return self._matrix(*told)
        elif name in _PRODUCTS and (pair := self._pair(name, args, given)) is not None:
            return self._product(*pair, out)
        return out

    # Where tensors come from.

    def _follow_constants(self, name: str, given: list[Tensor], out: Any) -> None:
        made = [*tensors_in(out)] if name != "__setitem__" else given[:1]
        is_constant = all(map(self._is_constant, given))
        for t in made:
            if is_constant:
                self.constants[id(t)] = t
            else:
                self.constants.pop(id(t), None)

    def _is_constant(self, t: Tensor) -> bool:
        return isinstance(t, nn.Parameter) or id(t) in self.constants

    def _origin(self, t: Tensor) -> tuple[Owner, bool] | None:
        if (own := self.owners.get(id(t))) is not None:
            return own, False
        return self.views[id(t)][:2] if id(t) in self.views else None

    def _by_matrix(
        self, name: str, given: list[Tensor], out: Tensor
    ) -> tuple[Owner, Tensor, Tensor, bool, bool] | None:
        """(matrix, what it multiplies, the output, whether the columns of both stand second last, whether the
        parameter is (fan_in, fan_out)). None: the call is no product with one matrix."""
        floats = [t for t in given if t.is_floating_point() and t.dim() >= 1]
        weights = [i for i, t in enumerate(floats) if t.dim() >= 2 and self._origin(t) is not None]
        others = [i for i, t in enumerate(floats) if i not in weights and not isinstance(t, nn.Parameter)]
        if len(weights) != 1 or not others or name not in _BY_MATRIX:
            return None
        weight, x = floats[weights[0]], floats[others[-1] if others[-1] < weights[0] else others[0]]
        owner, is_moved = self._origin(weight) or (None, False)
        assert owner is not None
        sides = weight.shape[-2:]
        by_rows = name == "linear"  # (fan_out, fan_in)
        if others[0] < weights[0] and (x.shape[-1], out.shape[-1]) == (tuple(sides[::-1]) if by_rows else tuple(sides)):
            return owner, x, out, False, is_moved == by_rows
        is_left = name in ("bmm", "matmul", "__matmul__") and weights[0] < others[0] and min(x.dim(), out.dim()) > 1
        if is_left and (out.shape[-2], x.shape[-2]) == tuple(sides):
            return owner, x.mT, out, True, is_moved
        return None

    def _matrix(
        self, owner: Owner, x: Tensor, out: Tensor, is_second_last: bool = False, is_transposed: bool = False
    ) -> Tensor:
        number = len(self.products)
        value = out.detach().mT if is_second_last else out.detach()
        if self.first is not None:
            before = self.first.products[number]
            if before.owner is not owner or before.leaf.shape != value.shape:
                raise RuntimeError("another way")
            value = before.leaf.detach()
            if number in self.scales:
                value = torch.where(self.scales[number], value * _SCALE, value)
        leaf = value.clone().requires_grad_()
        self.products.append(Product(owner, x, leaf, is_transposed))
        made = (leaf.mT if is_second_last else leaf).clone()  # a model may write into it
        if self._is_constant(x):
            self.constants[id(made)] = made
        self.alive.append(made)
        return made

    # Attention.

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, scores: Tensor, out: Tensor) -> Tensor:
        value = out.detach() if self.first is None else self.first.attentions[len(self.attentions)].leaf.detach()
        leaf = value.clone().requires_grad_()
        self.attentions.append(Attention(q, k, v, scores, leaf))
        self.attended.add(id(leaf))
        return leaf.clone()

    def _torchs_attention(self, given: Mapping[str, Any], out: Any) -> Any:
        """torch.nn's attention: its arguments say what each matrix is."""
        heads, width = given["num_heads"], given["embed_dim_to_check"]
        stacked = given["in_proj_weight"] if not given.get("use_separate_proj_weight") else None
        names: tuple[Any, ...] = ("query", "key", "value")
        rows = [tuple(Rows(name, head, width // heads) for head in range(heads)) for name in names]
        if stacked is not None:
            self.known[self.owners[id(stacked)]] = Matrix(sum(rows, ()), heads)
        else:
            for i, name in enumerate("qkv"):
                self.known[self.owners[id(given[f"{name}_proj_weight"])]] = Matrix(rows[i], heads)
        heads_output = out[0].detach().clone().requires_grad_()
        self.attended.add(id(heads_output))
        made = self._matrix(self.owners[id(given["out_proj_weight"])], heads_output, out[0])
        return (made, *out[1:])

    def _pair(self, name: str, args: Any, given: list[Tensor]) -> tuple[Tensor, Tensor] | None:
        """The two factors, as (…, rows, columns) and (…, columns, rows); None: no matrix is behind both."""
        two = given[1:] if name == "baddbmm" else given
        if len(two) != 2 or any(t.dim() < 2 or not t.requires_grad for t in two):
            return None
        return _of_einsum(args[0], *two) if name == "einsum" else (two[0], two[1])

    def _product(self, left: Tensor, right: Tensor, out: Tensor) -> Tensor:
        depends = not self._is_constant(left) and not self._is_constant(right)
        for i, (read, weights, dimension) in enumerate(self.softmaxes):
            is_left, is_right = (_leads(t, weights) for t in (left, right))
            before = [pair for pair in self.pairs if _leads(read, pair[2])] if is_left != is_right else []
            before = before if len(before) == 1 else [pair for pair in before if pair[3]]
            if len(before) == 1 and dimension in (-1, read.dim() - 1):
                del self.softmaxes[i]
                return self._attended(before[0][0], before[0][1].mT, right if is_left else left.mT, read, out)
        self.pairs.append((left, right, out, depends))
        return out


def _of_attention(
    query: Tensor, key: Tensor, value: Tensor, *_: Any, scale: float | None = None, **__: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What torch's operator received, and its scores without a mask."""
    groups = query.shape[-3] // key.shape[-3] if query.dim() > 3 and key.shape[-3] else 1
    keys = key.repeat_interleave(groups, -3) if groups > 1 else key
    return query, key, value, query @ keys.mT * (query.shape[-1] ** -0.5 if scale is None else scale)


def _of_einsum(equation: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """Factors of an einsum as matmul takes them."""
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return None
    given, made = equation.replace(" ", "").split("->")
    one, other = given.split(",")
    summed = [c for c in one if c in other and c not in made]
    shared = [c for c in one if c in other and c in made]
    own, its = [c for c in one if c not in other], [c for c in other if c not in one]
    if len(summed) != 1 or len(own) != 1 or len(its) != 1:
        return None
    left = torch.einsum(f"{one}->{''.join((*shared, own[0], summed[0]))}", a)
    return left, torch.einsum(f"{other}->{''.join((*shared, summed[0], its[0]))}", b)


def _dimension(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    given = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    return given if isinstance(given, int) else -1


def _leads(start: Tensor, goal: Tensor) -> bool:
    """`start` was computed from `goal`, with no matrix in between."""
    return start is goal or any(node is goal.grad_fn for node in _graph(start))


def _graph(t: Tensor) -> Iterator[Any]:
    """The nodes of autograd's graph behind a tensor, each once."""
    todo, seen = [t.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [before for before, _ in node.next_functions]


def _leaves(t: Tensor) -> set[int]:
    """The leaves that a tensor was computed from."""
    return {id(t)} if t.is_leaf else {id(node.variable) for node in _graph(t) if hasattr(node, "variable")}


class _Reader:
    """Reads the roles from the run."""

    def __init__(self, run: _Traced, writers: Mapping[Owner, set[Owner]]) -> None:
        self.run, self.writers = run, writers
        self.number = {id(product.leaf): i for i, product in enumerate(run.products)}
        self.random = torch.Generator().manual_seed(0)
        self.owned: dict[int, list[set[tuple[Any, int | None]]]] = {}
        self.unclear: set[int] = set()
        self.tested: set[int] = set()
        """Matrices that read more than one number of the matrices before in each column."""
        self.heads: dict[int, int] = {}
        self.factors: dict[int, float] = {}

    def read(self, again: Callable[[Any], _Traced | None]) -> dict[Owner, Matrix]:
        for attention in self.run.attentions:
            self._attention(attention)
        self._feed_forwards(again)
        found = dict(self.run.known)
        for i, product in enumerate(self.run.products):
            behind = _leaves(product.x) if product.owner in self.writers else set()
            reads_attention = bool(behind & self.run.attended)
            matrix = Matrix(
                _runs(self.owned.get(i, ())),
                self.heads.get(i),
                reads_attention,
                i in self.tested and not reads_attention and self._mixes(product, behind),
                i in self.unclear,
                self.factors.get(i, 1.0),
                product.is_transposed,
            )
            found[product.owner] = _joined(found.get(product.owner), matrix)
        return found

    def _weights(self, t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=self.random, device="cpu").to(t.device, t.dtype)

    def _reached(self, total: Tensor, leaves: set[int]) -> dict[int, Tensor]:
        """The derivatives of a number by the outputs of the matrices among `leaves`."""
        numbers = [i for leaf in leaves if (i := self.number.get(leaf)) is not None]
        if not numbers or not total.requires_grad:
            return {}
        outputs = [self.run.products[i].leaf for i in numbers]
        given = torch.autograd.grad(total, outputs, retain_graph=True, allow_unused=True)
        return {i: g for i, g in zip(numbers, given) if g is not None}

    def _own(self, i: int, rows: Iterable[int], role: str, head: int | None = None) -> None:
        owned = self.owned.setdefault(i, [set() for _ in range(self.run.products[i].leaf.shape[-1])])
        for row in rows:
            owned[row].add((role, head))

    # Queries, keys and values.

    def _attention(self, one: Attention) -> None:
        told = {role: self._heads(t) for role, t in (("query", one.q), ("key", one.k), ("value", one.v))}
        if not all(told.values()):
            return
        for (role, heads), width in zip(told.items(), (one.q.shape[-1], one.k.shape[-1], one.v.shape[-1])):
            for i, sets in heads.items():
                is_apart = sum(map(len, sets)) == len(set[int]().union(*sets)) and len(sets[0]) <= width
                for head, rows in enumerate(sets):
                    self._own(i, rows, role, head if is_apart else None)
        queries, keys = told["query"], told["key"]
        rows = len(set[int]().union(*(rows for sets in queries.values() for rows in sets))) if len(queries) == 1 else 0
        for i in {i for heads in told.values() for i in heads}:
            self.heads[i] = max(1, rows // one.q.shape[-1])
        if len(queries) == len(keys) == 1 and _is_unscaled(one, *(self._leaf(heads) for heads in (queries, keys))):
            self.factors[next(iter(queries))] = one.q.shape[-1] ** -0.5

    def _heads(self, t: Tensor) -> dict[int, list[set[int]]]:
        """The rows of each matrix that make each head of queries, keys or values."""
        found: dict[int, list[set[int]]] = {}
        leaves = _leaves(t)
        # one example's heads; a batch in the same dimension repeats them
        for part in (t[0] if t.dim() > 3 else t).reshape(-1, *t.shape[-2:]):
            for i, g in self._reached((part * self._weights(part)).sum(), leaves).items():
                rows = {*_columns(g).nonzero().flatten().tolist()}
                if rows and rows not in found.setdefault(i, []):
                    found[i].append(rows)
        return found

    def _leaf(self, heads: dict[int, Any]) -> Tensor:
        return self.run.products[next(iter(heads))].leaf

    def _mixes(self, product: Product, behind: set[int]) -> bool:
        """What a matrix reads in the last row depends on other rows of the matrices before."""
        x = product.x
        if not x.requires_grad or x.dim() < 3 or x.shape[-2] < 2:
            return False
        last = x[..., -1, :]
        inside = {id(p.leaf) for p in self.run.products if p.owner in self.writers[product.owner]}
        found = self._reached((last * self._weights(last)).sum(), behind & inside)
        alike = [g for g in found.values() if g.dim() == x.dim() and g.shape[-2] == x.shape[-2]]
        return any(bool((g[..., :-1, :] != 0).any()) for g in alike)

    # Feed-forwards.

    def _feed_forwards(self, again: Callable[[Any], _Traced | None]) -> None:
        """Tells fc1 from the gate."""
        tested: list[tuple[int, dict[int, Tensor], Tensor]] = []
        for i, product in enumerate(self.run.products):
            if product.owner not in self.writers or not product.x.requires_grad:
                continue
            behind, weights = _leaves(product.x), self._weights(product.x)
            own = self.writers[product.owner] - {product.owner}
            inside = {leaf for leaf in behind if self._owner(leaf) in own}
            found = self._reached((product.x * weights).sum(), inside)
            attends = bool(behind & self.run.attended)
            found = {j: g for j, g in found.items() if attends or j not in self.heads}
            if sum(g.shape[-1] for g in found.values()) == product.x.shape[-1] and not attends:
                for j, g in found.items():  # all of them: ReLU may have let none of a row's numbers through
                    self._own(j, range(g.shape[-1]), "fc1")
            elif found:
                tested.append((i, found, weights))
                self.tested.add(i)
        for i, linear, curved in self._linear_rows(tested, again):
            product = self.run.products[i]
            for j in linear:  # all rows of a matrix of one kind, where ReLU has let none of some rows' numbers through
                size, width = self.run.products[j].leaf.shape[-1], product.x.shape[-1]
                if size == width and bool(linear[j]) != bool(curved[j]):
                    linear[j], curved[j] = ({*range(size)} if rows[j] else set() for rows in (linear, curved))
            counts = [sum(map(len, rows.values())) for rows in (linear, curved)]
            if _leaves(product.x) & self.run.attended:
                for j in linear:
                    rows = linear[j] | curved[j]
                    self._own(j, [row for row in rows if j not in self.owned or not self.owned[j][row]], "gate")
            elif counts == [product.x.shape[-1]] * 2:
                for j in linear:
                    self._own(j, linear[j], "gate")
                    self._own(j, curved[j], "fc1")
            elif not self._mixes(product, _leaves(product.x)):
                self.unclear |= {*linear}

    def _owner(self, leaf: int) -> Owner | None:
        number = self.number.get(leaf)
        return None if number is None else self.run.products[number].owner

    def _linear_rows(
        self, tested: list[tuple[int, dict[int, Tensor], Tensor]], again: Callable[[Any], _Traced | None]
    ) -> Iterator[tuple[int, dict[int, set[int]], dict[int, set[int]]]]:
        """For each matrix the rows behind it by which what it reads is linear, and those by which it is not."""
        scaled = {j for _, found, _ in tested for j in found}
        shown = {(i, j): torch.zeros(g.shape[-1], device="cpu") for i, found, _ in tested for j, g in found.items()}
        patterns = {j: _patterns(self.run.products[j].leaf, self.random) for j in scaled}
        for turn in range(_RUNS if scaled else 0):
            other = again({j: patterns[j][turn] for j in scaled})
            for i, found, weights in tested if other is not None else ():
                assert other is not None
                outputs = [other.products[j].leaf for j in found]
                total = (other.products[i].x * weights).sum()
                given = torch.autograd.grad(total, outputs, retain_graph=True, allow_unused=True)
                for (j, before), now in zip(found.items(), given):
                    if now is not None:
                        stays = (now - before).abs() <= 4 * torch.finfo(now.dtype).eps * before.abs()
                        here = patterns[j][turn] & stays & (before != 0)
                        shown[i, j] += here.reshape(-1, here.shape[-1]).sum(0).cpu()
        for i, found, _ in tested:
            rows = {j: {*_columns(g).nonzero().flatten().tolist()} for j, g in found.items()}
            # a quarter of the places where a row counts shows it to be one of a, and hardly one place, by chance, of b
            counts = {j: (g != 0).reshape(-1, g.shape[-1]).sum(0).cpu() for j, g in found.items()}
            often = {j: shown[i, j] > _RUNS * counts[j] / 64 for j in found}
            linear = {j: rows[j] & {*often[j].nonzero().flatten().tolist()} for j in found}
            yield i, linear, {j: rows[j] - linear[j] for j in found}


def _columns(g: Tensor) -> Tensor:
    """The columns that are not zero everywhere."""
    return (g != 0).reshape(-1, g.shape[-1]).any(0)


def _is_unscaled(one: Attention, q: Tensor, k: Tensor) -> bool:
    """The scores are the plain products of what the two matrices gave, and of what is added. For then ∂sᵢᵢ/∂qᵢ = kᵢ; a
    rotation of both by one angle leaves it."""
    if not one.scores.requires_grad or q.dim() != 3 or k.dim() != 3 or q.shape[-1] != k.shape[-1]:
        return False
    rows = min(q.shape[1], k.shape[1])
    diagonal = one.scores.diagonal(dim1=-2, dim2=-1)
    (g,) = torch.autograd.grad(diagonal[torch.isfinite(diagonal)].sum(), q, retain_graph=True, allow_unused=True)
    return g is not None and torch.allclose(g[:, :rows], k[:, :rows], 1e-3, 1e-4 * float(k.detach().abs().max()))


def _patterns(leaf: Tensor, random: torch.Generator) -> list[Tensor]:
    """For each run which outputs of a matrix are scaled: a row in half of its places, hardly two rows in the same."""
    places = leaf[..., 0].numel()
    order = torch.rand(_RUNS * places, leaf.shape[-1], generator=random, device="cpu").argsort(0)
    chosen = order < _RUNS * places // 2
    return [part.reshape(leaf.shape).to(leaf.device) for part in chosen.chunk(_RUNS)]


def _runs(owned: Iterable[set[tuple[Any, int | None]]]) -> tuple[Rows, ...]:
    found: list[Rows] = []
    for one in owned:
        roles, heads = {role for role, _ in one}, {head for _, head in one}
        role = roles.pop() if len(roles) == 1 else None
        head = heads.pop() if len(heads) == 1 and role is not None else None
        if found and found[-1][:2] == (role, head):
            found[-1] = found[-1]._replace(size=found[-1].size + 1)
        else:
            found.append(Rows(role, head, 1))
    return tuple(found)


def _joined(one: Matrix | None, other: Matrix) -> Matrix:
    """Of two calls of one matrix, as of experts in turn: what either tells; nothing of the rows where they differ."""
    if one is None or one == other:
        return other
    rows = one.rows or other.rows
    differs = bool(other.rows) and rows != other.rows
    return one._replace(
        rows=(Rows(None, None, sum(run.size for run in rows)),) if differs else rows,
        heads=one.heads or other.heads,
        reads_attention=one.reads_attention or other.reads_attention,
        mixes=one.mixes or other.mixes,
        is_unclear=differs or (not rows and (one.is_unclear or other.is_unclear)),
        factor=one.factor if one.factor == other.factor else 1.0,
    )
