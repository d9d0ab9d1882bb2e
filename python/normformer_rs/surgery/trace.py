"""Traces a run of a model with gradients. The output of every product with a parameter, and of every attention, becomes
a new leaf of autograd's graph, so that derivatives stop there."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .record import UNCHANGED, tensors_in
from .spec import Rows

Owner = nn.Parameter | nn.Module
"""The key of a matrix: its parameter, or the linear layer if it computes its weight from other parameters."""

_PRODUCTS = frozenset({"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum"})
"""Operations that may multiply two tensors that the run computed, as attention does."""
_BY_MATRIX = frozenset({"linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "grouped_mm", "_grouped_mm"})
_BY_MATRIX |= {"grouped_mm_fallback"}  # this operator is defined by transformers
"""Operations that may multiply a tensor by a parameter."""
_TRANSPOSES = frozenset({"transpose", "t", "swapaxes", "swapdims", "adjoint", "permute", "__get__"})
"""Operations that may exchange the last two dimensions; `__get__` reads the attributes T and mT."""
_SCALE = -2.0
"""A repeated run multiplies chosen outputs by this number."""


class Product(NamedTuple):
    """A product with a matrix: its input x and its output `leaf`, both with the columns in the last dimension.
    `is_transposed`: the parameter's shape is (fan_in, fan_out)."""

    owner: Owner
    x: Tensor
    leaf: Tensor
    is_transposed: bool = False


class Attention(NamedTuple):
    """One attention: its inputs q, k and v, each (…, tokens, columns); the scores that the softmax read; and its
    output `leaf`."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    leaf: Tensor


class _Pair(NamedTuple):
    """A product of two tensors, as matmul computes it."""

    left: Tensor
    """(…, rows, columns)."""
    right: Tensor
    """(…, columns, rows)."""
    out: Tensor
    depends: bool
    """Whether both factors depend on the model's input."""


class Trace(TorchFunctionMode):
    """Traces a run, and makes leaves of the outputs of all matrices and attentions.

    A repeated run traces the model once more, with `first`, the trace of the first run: every matrix and attention
    returns what it returned there. `scales` chooses some of these outputs, which are multiplied by −2: the number of a
    product → a mask of its output. `norms`: the model's norms.
    """

    def __init__(
        self, model: nn.Module, norms: Set[nn.Module], first: "Trace | None" = None, scales: Any = None
    ) -> None:
        """Prepares a trace; the class's text describes the arguments. Matrices are parameters of two or more
        dimensions."""
        super().__init__()
        self.model, self.norms, self.first, self.scales = model, norms, first, scales or {}
        self.owners: dict[int, Owner] = {id(p): p for p in model.parameters() if p.dim() >= 2}
        self.products: list[Product] = []
        self.attentions: list[Attention] = []
        self.known: dict[Owner, tuple[tuple[Rows, ...], int]] = {}
        """For each input projection of torch.nn's attention, the roles of its rows and the number of heads, which the
        call's arguments tell."""
        self.attended: set[int] = set()
        """Identities of the leaves that are attentions' outputs."""
        self.pairs: list[_Pair] = []
        """Products that may be the q kᵀ of a later attention."""
        self.softmaxes: list[tuple[Tensor, Tensor, int]] = []
        """Calls of softmax that no attention was found for yet: (its input, its output, its dimension)."""
        self.constants: dict[int, Tensor] = {}
        """Tensors that are computed from parameters alone."""
        self.views: dict[int, tuple[Owner, bool, Tensor]] = {}
        """Views and copies of a parameter, by identity: (the parameter, whether the last two dimensions are exchanged,
        the view itself)."""
        self.scaled: list[Tensor] = []
        """The factor by which each norm multiplied each row, in the order of the norms' calls."""
        self.alive: list[Any] = []  # keeps tensors alive, so that no identity is used twice
        self.within = 0
        """How many hooked modules are running. Operations inside them are not recorded."""

    def follow(self, run: Callable[[], Any]) -> None:
        """Traces `run()`. A call of a norm counts as one operation, whose output `_norm` replaces. So does a call of a
        linear layer that computes its weight: the weight is no parameter, so the layer stands for its matrix."""
        computed = [m for m in self.model.modules() if isinstance(m, nn.Linear) and "weight" not in m._parameters]
        with contextlib.ExitStack() as hooks:
            for module in (*computed, *self.norms):
                hooks.callback(module.register_forward_pre_hook(self._enter).remove)
                hooks.callback(module.register_forward_hook(self._leave).remove)
            # roles.py takes derivatives of what the run computes, even if the caller has switched gradients off
            with torch.enable_grad(), self:
                run()

    def _enter(self, *_: Any) -> None:
        """Stops recording at the start of a hooked module's call."""
        self.within += 1

    def _leave(self, module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """Replaces the output of a hooked module: a norm's by scaled rows, a linear layer's by a new leaf."""
        self.within -= 1
        if self.within:
            return out
        return self._norm(given[0], out) if module in self.norms else self._matrix(module, given[0], out)

    def _norm(self, x: Tensor, out: Tensor) -> Tensor:
        """Replaces a norm's output by x times a constant for each row. Unlike the norm this mixes no columns, so
        derivatives through it still tell the columns apart. Returns `out` itself if it has not x's shape."""
        if not isinstance(out, Tensor) or out.shape != x.shape:
            return out
        scale = x.detach().square().mean(-1, keepdim=True).clamp_min(1e-12).rsqrt()
        # a repeated run takes the first run's constants, since outputs multiplied by −2 would change its own
        if self.first is not None and self.first.scaled[len(self.scaled)].shape == scale.shape:
            scale = self.first.scaled[len(self.scaled)]
        self.scaled.append(scale)
        scaled_rows = (x * scale).to(out.dtype)
        self._follow_constants("norm", [x], scaled_rows)
        return scaled_rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch. Records views of parameters, products and softmaxes, and returns the outputs of
        matrices and attentions as new leaves."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "") or str(func)
        out = self._recorded(name, args)
        if out is None:
            out = func(*args, **kwargs)
        if self.within:
            return out
        given = [*tensors_in(args), *tensors_in(kwargs)]  # the tensors among the arguments
        self._follow_constants(name, given, out)
        if name == "multi_head_attention_forward":
            bound = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments
            return self._torchs_attention(bound, out)
        if not isinstance(out, Tensor) or not out.is_floating_point() or not given:
            return out
        if name in UNCHANGED | _TRANSPOSES | {"index_select"} and (origin := self._origin(given[0])) is not None:
            owner, is_exchanged = origin  # whether the last two dimensions are exchanged already
            transposes = (  # the order of the last two strides shows whether a call exchanged these dimensions
                name in _TRANSPOSES
                and out.dim() >= 2
                and (out.stride(-1) > out.stride(-2)) != (given[0].stride(-1) > given[0].stride(-2))
            )
            self.views[id(out)] = owner, is_exchanged != transposes, out  # a second exchange undoes the first
        elif name == "scaled_dot_product_attention":
            return self._attended(*_of_attention(*args, **kwargs), out)
        elif name == "softmax":
            self.softmaxes.append((given[0], out, _dimension(args, kwargs)))
        elif (arguments := self._by_matrix(name, given, out)) is not None:
            return self._matrix(*arguments)
        elif name in _PRODUCTS and (pair := self._pair(name, args, given)) is not None:
            return self._product(*pair, out)
        return out

    def _recorded(self, name: str, args: Any) -> Tensor | None:
        """Returns the output that the first run recorded for this call of torch's `linear`, so that it is not computed
        again. `name`, `args`: the function's. None: it must be computed."""
        number = len(self.products)
        if self.first is None or self.within or name != "linear" or number >= len(self.first.products):
            return None
        before = self.first.products[number]
        has_same_matrix = len(args) > 1 and args[1] is before.owner
        return before.leaf.detach() if has_same_matrix and args[0].shape[:-1] == before.leaf.shape[:-1] else None

    # The methods below find out whether a tensor is a parameter, a view of one, or a constant.

    def _follow_constants(self, name: str, given: list[Tensor], out: Any) -> None:
        """Adds an operation's outputs to `constants` if all of its inputs, `given`, are constant."""
        made = [*tensors_in(out)] if name != "__setitem__" else given[:1]  # x[…] = y writes into x and returns nothing
        is_constant = all(map(self._is_constant, given))
        for t in made:
            if is_constant:
                self.constants[id(t)] = t
            else:  # an in-place operation may have written into a constant
                self.constants.pop(id(t), None)

    def _is_constant(self, t: Tensor) -> bool:
        """Returns whether a tensor is a parameter or is computed from parameters alone."""
        return isinstance(t, nn.Parameter) or id(t) in self.constants

    def _origin(self, t: Tensor) -> tuple[Owner, bool] | None:
        """Returns a matrix if the tensor is that matrix, a view of it or a copy of it, and whether the tensor's last
        two dimensions are exchanged. None: the tensor is none of these."""
        if (own := self.owners.get(id(t))) is not None:
            return own, False
        return self.views[id(t)][:2] if id(t) in self.views else None

    def _by_matrix(
        self, name: str, given: list[Tensor], out: Tensor
    ) -> tuple[Owner, Tensor, Tensor, bool, bool] | None:
        """Returns the arguments of `_matrix` for a product with a matrix: (matrix, its input with columns last, the
        output, whether the output's columns are its second last dimension, whether the parameter is (fan_in, fan_out)).
        None: the call is no product with one matrix. `given`: the tensors among the function's arguments."""
        floats = [t for t in given if t.is_floating_point() and t.dim() >= 1]
        # positions of the matrix among the arguments, and of tensors that are no parameters
        weights = [i for i, t in enumerate(floats) if t.dim() >= 2 and self._origin(t) is not None]
        others = [i for i, t in enumerate(floats) if i not in weights and not isinstance(t, nn.Parameter)]
        if len(weights) != 1 or not others or name not in _BY_MATRIX:
            return None
        # x stands last before the matrix, since addmm's addend comes first; or first, since linear's bias comes last
        weight, x = floats[weights[0]], floats[others[-1] if others[-1] < weights[0] else others[0]]
        # whether `weight`, perhaps a transposed view, has the parameter's dimensions exchanged
        owner, is_exchanged = self._origin(weight) or (None, False)
        assert owner is not None
        weight_shape = weight.shape[-2:]
        by_rows = name == "linear"  # its weight is (fan_out, fan_in)
        fan_in_and_out = tuple(weight_shape[::-1]) if by_rows else tuple(weight_shape)
        # x·W, or linear(x, W): the output's columns are its last dimension
        if others[0] < weights[0] and (x.shape[-1], out.shape[-1]) == fan_in_and_out:
            is_transposed = is_exchanged == by_rows  # W is (fan_in, fan_out) here, except in linear
            return owner, x, out, False, is_transposed
        # W·x: the columns of x and of the output are their second last dimension
        weight_is_left = (
            name in ("bmm", "matmul", "__matmul__") and weights[0] < others[0] and min(x.dim(), out.dim()) > 1
        )
        if weight_is_left and (out.shape[-2], x.shape[-2]) == tuple(weight_shape):
            is_transposed = is_exchanged  # W is (fan_out, fan_in) here
            return owner, x.mT, out, True, is_transposed
        return None

    def _matrix(
        self, owner: Owner, x: Tensor, out: Tensor, is_second_last: bool = False, is_transposed: bool = False
    ) -> Tensor:
        """Records a product with a matrix, and returns its output as a new leaf. In a repeated run the output is that
        of the first run, multiplied by −2 where `scales` says so. `is_second_last`: whether the columns are the second
        last dimension of `out`. Errors: RuntimeError if the run differs from the first."""
        number = len(self.products)
        value = out.detach().mT if is_second_last else out.detach()
        if self.first is not None:
            before = self.first.products[number]
            # the products of both runs are matched by number, so they must come in the same order
            if before.owner is not owner or before.leaf.shape != value.shape:
                raise RuntimeError("another way")
            value = before.leaf.detach()
            if number in self.scales:
                value = torch.where(self.scales[number], value * _SCALE, value)
        leaf = value.clone().requires_grad_()
        self.products.append(Product(owner, x, leaf, is_transposed))
        returned = (leaf.mT if is_second_last else leaf).clone()  # a model may write into it
        if self._is_constant(x):
            self.constants[id(returned)] = returned
        self.alive.append(returned)
        return returned

    # The methods below find attentions.

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, scores: Tensor, out: Tensor) -> Tensor:
        """Records an attention, and returns its output `out` as a new leaf; in a repeated run, the first run's output.
        The arguments are those of `Attention`."""
        value = out.detach() if self.first is None else self.first.attentions[len(self.attentions)].leaf.detach()
        leaf = value.clone().requires_grad_()
        self.attentions.append(Attention(q, k, v, scores, leaf))
        self.attended.add(id(leaf))
        return leaf.clone()

    def _torchs_attention(self, given: Mapping[str, Any], out: Any) -> Any:
        """Records a call of torch.nn's functional attention. Returns its result, with the output projection's output as
        a new leaf. `given`: the call's arguments by name, which say which matrix is which; `out`: its result."""
        heads, width = given["num_heads"], given["embed_dim_to_check"]
        stacked = given["in_proj_weight"] if not given.get("use_separate_proj_weight") else None
        names: tuple[Any, ...] = ("query", "key", "value")
        rows = [tuple(Rows(name, head, width // heads) for head in range(heads)) for name in names]
        if stacked is not None:
            self.known[self.owners[id(stacked)]] = sum(rows, ()), heads  # the rows of q, k and v, one after the other
        else:
            for i, name in enumerate("qkv"):
                self.known[self.owners[id(given[f"{name}_proj_weight"])]] = rows[i], heads
        # The function does not return the heads' joint output, which its output matrix reads. A tensor of the same
        # shape stands for it.
        heads_output = out[0].detach().clone().requires_grad_()
        self.attended.add(id(heads_output))
        projected = self._matrix(self.owners[id(given["out_proj_weight"])], heads_output, out[0])
        return (projected, *out[1:])

    def _pair(self, name: str, args: Any, given: list[Tensor]) -> tuple[Tensor, Tensor] | None:
        """Returns the two factors of a product, as (…, rows, columns) and (…, columns, rows). None: the call does not
        have two factors that both depend on a matrix, that is, require a gradient. `given`: the tensors in `args`."""
        factors = given[1:] if name == "baddbmm" else given  # baddbmm's first tensor is the addend
        if len(factors) != 2 or any(t.dim() < 2 or not t.requires_grad for t in factors):
            return None
        return _of_einsum(args[0], *factors) if name == "einsum" else (factors[0], factors[1])

    def _product(self, left: Tensor, right: Tensor, out: Tensor) -> Tensor:
        """Records an attention if one factor of a product comes from a softmax over an earlier product, which is then
        q kᵀ. Otherwise notes the product as a possible q kᵀ of a later attention."""
        depends = not self._is_constant(left) and not self._is_constant(right)
        for i, (scores, weights, dimension) in enumerate(self.softmaxes):
            # `weights` is the softmax of `scores`. Attention multiplies it by the values, so exactly one factor has it.
            is_left, is_right = (_leads(t, weights) for t in (left, right))
            pairs = [pair for pair in self.pairs if _leads(scores, pair.out)] if is_left != is_right else []
            if len(pairs) != 1:  # of several products, q kᵀ is the one whose factors both depend on the model's input
                pairs = [pair for pair in pairs if pair.depends]
            if len(pairs) == 1 and dimension in (-1, scores.dim() - 1):  # a softmax over the keys
                del self.softmaxes[i]
                q, k_transposed = pairs[0].left, pairs[0].right
                return self._attended(q, k_transposed.mT, right if is_left else left.mT, scores, out)
        self.pairs.append(_Pair(left, right, out, depends))
        return out


def _of_attention(
    query: Tensor, key: Tensor, value: Tensor, *_: Any, scale: float | None = None, **__: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the inputs of scaled_dot_product_attention, and its scores without a mask."""
    # grouped-query attention: several heads of queries share a head of keys
    queries_per_key = query.shape[-3] // key.shape[-3] if query.dim() > 3 and key.shape[-3] else 1
    keys = key.repeat_interleave(queries_per_key, -3) if queries_per_key > 1 else key
    return query, key, value, query @ keys.mT * (query.shape[-1] ** -0.5 if scale is None else scale)


def _of_einsum(equation: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns the factors a and b of an einsum, such as "bqhd,bkhd->bhqk", in the layout of matmul's arguments. None:
    the einsum is no batch of matrix products."""
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return None
    given, result = equation.replace(" ", "").split("->")
    letters_a, letters_b = given.split(",")
    # the dimensions to sum over, those of the batch, and those that only one factor has
    summed = [c for c in letters_a if c in letters_b and c not in result]
    shared = [c for c in letters_a if c in letters_b and c in result]
    only_a, only_b = [c for c in letters_a if c not in letters_b], [c for c in letters_b if c not in letters_a]
    if len(summed) != 1 or len(only_a) != 1 or len(only_b) != 1:
        return None
    left = torch.einsum(f"{letters_a}->{''.join((*shared, only_a[0], summed[0]))}", a)
    return left, torch.einsum(f"{letters_b}->{''.join((*shared, summed[0], only_b[0]))}", b)


def _dimension(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the dimension that a call of softmax names; −1 if it names none."""
    given = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    return given if isinstance(given, int) else -1


def _leads(start: Tensor, goal: Tensor) -> bool:
    """Returns whether `start` was computed from `goal` with no matrix in between."""
    return start is goal or any(node is goal.grad_fn for node in _graph(start))


def _graph(t: Tensor) -> Iterator[Any]:
    """Yields the nodes of autograd's graph from a tensor back to its leaves, each once."""
    todo, seen = [t.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [before for before, _ in node.next_functions]


def leaves_of(t: Tensor) -> set[int]:
    """Returns the identities of the leaves that a tensor was computed from."""
    return {id(t)} if t.is_leaf else {id(node.variable) for node in _graph(t) if hasattr(node, "variable")}
