"""Records one run of a model: every operation, and every call of a norm, dropout or linear layer."""

import contextlib
import copy
import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .probe import has_stateful_parts
from .recognise import alike, looks_like_a_norm, read_norm

RESIDUAL: Any = torch.ops.normformer_rs.residual
"""The package's residual operator. With two arguments it is an addition. Its outputs after the first serve its
backward pass."""
ADDITIONS = frozenset({"add", "__add__", "__iadd__", "__radd__", "add_"})
UNCHANGED = frozenset(
    (
        *("to", "float", "type", "contiguous", "clamp", "clone", "type_as", "double", "half", "bfloat16", "detach"),
        *("view", "reshape", "flatten", "unflatten", "transpose", "permute", "squeeze", "unsqueeze", "__getitem__"),
        *("alias", "view_as", "expand_as", "narrow", "requires_grad_"),
    )
)
"""Operations that change at most the dtype, shape or order of a tensor's numbers, or select some of them."""
FOLLOWED = UNCHANGED - {"detach", "permute", "__getitem__", "requires_grad_"}
"""Operations of UNCHANGED whose output is still the residual stream, if they keep its rows."""
TIMES = frozenset(
    (
        *("mul", "__mul__", "__rmul__", "mul_", "__imul__", "multiply", "multiply_"),
        *("div", "__truediv__", "div_", "__itruediv__", "divide", "divide_", "true_divide", "true_divide_"),
    )
)
"""Multiplications and divisions, element by element."""


def kind_of(name: str) -> str:
    """Returns the same word for all spellings of an addition, and of a multiplication; other names as they are."""
    return "+" if name in ADDITIONS else "*" if name in TIMES else name


def factor_of(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float | None:
    """Returns the number by which the operation `name` multiplies a tensor, or by which an addition multiplies its
    second operand (`alpha`). None: there is none."""
    given = (*args, *kwargs.values())
    numbers = [a for a in given if isinstance(a, int | float) and not isinstance(a, bool)]
    if name in TIMES and len(numbers) == 1 and numbers[0]:
        return 1 / numbers[0] if "div" in name else numbers[0]
    return kwargs["alpha"] if name in ADDITIONS and kwargs.get("alpha", 1) != 1 else None


def has_factor(factors: Sequence[float], wanted: float) -> bool:
    """Returns whether one of the numbers by which a block has multiplied tensors is `wanted`, or their product is."""
    return any(math.isclose(wanted, n, rel_tol=1e-6) for n in (*factors, math.prod(factors)))


Key = tuple[int, int]
"""Identifies a tensor and its values: (its id, its version, which each in-place write increments)."""


class Node(NamedTuple):
    """A recorded operation. The call of a norm, linear layer, dropout, … counts as one operation.

    Attributes:
        module: the module that was called; None: a function of torch.
        inputs, shapes: the tensors among its arguments, and their shapes.
        outputs: the tensors that it returned.
    """

    what: str
    """The operation's name; for a module that counts as one operation its kind, such as norm or linear."""
    module: nn.Module | None
    inputs: tuple[Key, ...]
    shapes: tuple[tuple[int, ...], ...]
    outputs: tuple[Key, ...]
    made: tuple[tuple[int, ...], ...] = ()
    """The shapes of the outputs."""
    factor: float | None = None
    """The number, if the operation multiplies a tensor by one."""
    where: str = ""
    """The file and line of the model's code that called the operation."""
    alpha: float = 1.0
    """The number by which an addition multiplies its second operand."""


class Call(NamedTuple):
    """A call of a block.

    Attributes:
        first, last: its nodes are `nodes[first:last]` of the record.
        x, shape: its input on the stream, and its shape.
        y: its output of the same shape; None: it has none.
        arguments: the tensors among its arguments → the names of the arguments.
    """

    first: int
    last: int
    x: Key
    shape: tuple[int, ...]
    y: Key | None
    arguments: Mapping[Key, str]
    twin: str | None = None
    """The name of another argument that is the tensor x, too: the first one, if there are several."""


class Span(NamedTuple):
    """Where the stream of a loop begins and ends within a forward.

    Attributes:
        begin, end: the paths of the module from whose output the stream's first tensor is computed, and of the one that
            reads its last tensor.
        is_norm: whether the end is the norm after the stack. The stream then ends with its output.
        operations: the kinds (`kind_of`) of the operations between that output and the stream's first tensor,
            such as the addition of positions.
    """

    begin: str
    operations: tuple[str, ...]
    end: str
    is_norm: bool


def key(t: Tensor) -> Key:
    """Returns the key of a tensor in its present version."""
    return id(t), t._version


def takes_all(index: Any) -> bool:
    """Returns whether an index consists of slices of step 1 and `...` only. If the indexed tensor keeps its shape, such
    an index takes everything in order."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(i is Ellipsis or (isinstance(i, slice) and i.step in (None, 1)) for i in parts)


def stream_in(arguments: Any) -> Tensor | None:
    """Returns the residual stream among a block's arguments: the first floating-point tensor of two or more
    dimensions."""
    return next((a for a in tensors_in(arguments) if a.is_floating_point() and a.dim() >= 2), None)


def each_once(todo: list[Key]) -> Iterator[Key]:
    """Pops keys from the end of `todo` until it is empty, and yields each key once. The caller may append keys
    meanwhile."""
    seen: set[Key] = set()
    while todo:
        tensor_key = todo.pop()
        if tensor_key not in seen:
            seen.add(tensor_key)
            yield tensor_key


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested tuples, lists and dictionaries, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


def exchanged(value: Any, old: Tensor, new: Tensor) -> Any:
    """Returns `value`, such as a call's arguments, with the tensor `old` replaced by `new`."""
    if value is old:
        return new
    if all(t is not old for t in tensors_in(value)):
        return value  # the same object: a block may write into a list or dictionary that it gets
    return rebuilt(value, lambda item: exchanged(item, old, new))


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a copy of a (named) tuple, list or mapping with `change` applied to each item. Returns other values as
    they are."""
    if isinstance(value, tuple) and hasattr(value, "_make"):  # a named tuple
        return value._make(map(change, value))
    if type(value) in (tuple, list):
        return type(value)(map(change, value))
    if type(value) is dict:
        return {key: change(item) for key, item in value.items()}
    if isinstance(value, Mapping):
        new = copy.copy(value)
        for key in value:
            new[key] = change(value[key])  # type: ignore[index]
        return new
    return value


class Record(TorchFunctionMode):
    """Records a model's run."""

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.made: dict[Key, int] = {}
        """For each tensor, the index in `nodes` of the operation that made it."""
        self.dropped: dict[Key, list[nn.Module]] = {}
        """For each tensor, the modules of dropout and stochastic depth that returned it unchanged, as in evaluation
        mode."""
        self.calls: dict[nn.Module, list[Call]] = {}
        self.spans: dict[nn.Module, Span] = {}
        """For each module with a loop whose stream begins and ends within its forward (loops.py): where."""
        self.runs: dict[nn.Module, int] = {}
        """For each block, and each module that has a block inside it, how often it was called."""
        self.outputs_of_attention: dict[Key, Tensor] = {}
        """For each output of torch's functional attention, the weight of its output projection."""
        self.roles: Any = None
        """The `Roles` of the model's matrices; None until `discover` has found them."""
        self.returned: set[Key] = set()
        """The tensors that the run returned."""
        self.open: list[tuple[nn.Module, int, Tensor, Key, list[tuple[Key, str]]]] = []
        """The calls of blocks that have not returned yet, the innermost last: (block, number of nodes before the call,
        its input on the stream, that input's key, `Call.arguments`)."""
        self.within = 0
        """How many modules that count as one operation are running. Operations inside them are not recorded."""
        self.is_narrow = False
        """Whether an operation returned 16-bit numbers."""
        self.alive: list[Any] = []  # keeps tensors alive, so that no identity is used twice
        self.kinds = {part: kind for part in model.modules() if (kind := _counts_as(part))}
        """The modules whose calls count as one operation each, with their kinds."""
        self.blocks = {*blocks}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch and records it."""
        if self.within:
            return func(*args, **(kwargs or {}))
        given = [*tensors_in(args), *tensors_in(kwargs or {})]
        before = [key(t) for t in given]  # an in-place operation changes these keys
        out = func(*args, **(kwargs or {}))
        is_ours = func is RESIDUAL
        name = str(func) if is_ours else getattr(func, "__name__", "")
        # a transpose that moves the last dimension, and an index that keeps everything, get names of their own
        if name == "transpose" and len(args) > 2 and any(d % args[0].dim() == args[0].dim() - 1 for d in args[1:3]):
            name = "transpose_last"
        elif name == "__getitem__" and takes_all(args[1]) and out.shape == args[0].shape:
            name = "alias"
        # a factor is the number by which one tensor is multiplied or divided
        factor = factor_of(name, args, kwargs or {}) if name in TIMES and len(given) == 1 else None
        alpha = (kwargs or {}).get("alpha", 1.0) if name in ADDITIONS else 1.0
        self.add(name, None, given, before, out[0] if is_ours else out, factor, alpha)
        if name == "multi_head_attention_forward":
            bound = inspect.signature(func).bind(*args, **(kwargs or {})).arguments
            self.outputs_of_attention[key(out[0])] = bound["out_proj_weight"]
        return out

    def add(
        self,
        what: str,
        module: nn.Module | None,
        given: list[Tensor],
        keys: list[Key],
        out: Any,
        factor: Any = None,
        alpha: float = 1.0,
    ) -> None:
        """Records an operation. `given`: its inputs; `keys`: their keys before it ran; `out`: its result, in which
        tensors may be nested; other arguments as in `Node`."""
        made = [*tensors_in(out)]
        if not made:
            return
        self.is_narrow = self.is_narrow or any(t.dtype in (torch.float16, torch.bfloat16) for t in made)
        self.alive += [given, made]
        outputs = tuple(map(key, made))
        # in evaluation mode, dropout may return its input itself
        if what in ("dropout", "drop_path") and module is not None and outputs[0] in keys:
            self.dropped.setdefault(outputs[0], []).append(module)
        # an output that is one of the inputs was made earlier
        self.made |= dict.fromkeys((k for k in outputs if k not in keys), len(self.nodes))
        shapes = tuple(tuple(t.shape) for t in given)
        output_shapes = tuple(tuple(t.shape) for t in made)
        self.nodes.append(Node(what, module, tuple(keys), shapes, outputs, output_shapes, factor, _where(), alpha))

    def stand_for(self, own: Mapping[nn.Module, nn.Module]) -> None:
        """Replaces each recorded module by its counterpart in a model of the same structure (`own`: recorded module →
        counterpart)."""
        self.nodes = [n if n.module is None else n._replace(module=own[n.module]) for n in self.nodes]
        self.calls = {own[block]: calls for block, calls in self.calls.items()}
        self.spans = {own[module]: span for module, span in self.spans.items()}
        self.runs = {own[module]: count for module, count in self.runs.items()}
        self.kinds = {own[module]: kind for module, kind in self.kinds.items()}
        self.blocks = {own[block] for block in self.blocks}
        self.dropped = {key: [own[module] for module in dropouts] for key, dropouts in self.dropped.items()}

    def sources(self, x: Key) -> Iterator[Key]:
        """Yields the key of a tensor, and those of the tensors of which it is a rearrangement or a cast."""
        yield x
        while x in self.made and self.nodes[self.made[x]].what in UNCHANGED | {"transpose_last"}:
            x = self.nodes[self.made[x]].inputs[0]
            yield x

    def derives(self, x: Key, y: Key | None) -> bool:
        """Returns whether the run computed the tensor x from the tensor y."""
        todo = [x]
        for tensor_key in each_once(todo):  # also yields the keys that the loop appends to `todo`
            identity, version = tensor_key
            if tensor_key == y:
                return True
            if tensor_key in self.made:
                todo += self.nodes[self.made[tensor_key]].inputs
            elif version > 0:  # an operation that returns nothing wrote it, as x[0] = … does
                todo.append((identity, version - 1))
        return False

    # The function `record` registers the methods below as hooks of modules.

    def count(self, module: nn.Module, _: Any) -> None:
        """Counts a module's call."""
        self.runs[module] = self.runs.get(module, 0) + 1

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes the start of a module's call. A hook before it."""
        if module in self.blocks and not self.within:
            x = stream_in((args, kwargs))
            if x is not None:
                self.open.append((module, len(self.nodes), x, key(x), _named(module, args, kwargs)))
                self.alive.append([*tensors_in((args, kwargs))])
        if module in self.kinds:
            self.within += 1

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Records the end of a module's call: as one operation, as a call of a block, or both. A hook after it."""
        if module in self.kinds:
            self.within -= 1
            if self.kinds[module] == "attention":  # binding puts queries, keys and values into the signature's order
                kwargs = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
                args = ()
            given = [*tensors_in((args, kwargs))]
            if not self.within:
                self.add(self.kinds[module], module, given, [key(t) for t in given], out)
        if self.open and self.open[-1][0] is module:  # this module is the block whose call began last
            _, first, x, key_of_x, named = self.open.pop()
            # the block may return several tensors: its output on the stream is the first one of x's shape
            like_x = (t for t in tensors_in(out) if t.shape == x.shape and t.is_floating_point())
            y = next(like_x, None)
            self.alive.append(y)  # else a later tensor might get the same identity, and so the same key
            key_of_y = None if y is None else key(y)
            # the arguments that are x; a second one is a twin, of which `swap_residuals` needs to know only one
            names_of_x = [name for argument_key, name in named if argument_key == key_of_x]
            twin = names_of_x[1] if len(names_of_x) > 1 else None
            call = Call(first, len(self.nodes), key_of_x, tuple(x.shape), key_of_y, dict(named), twin)
            self.calls.setdefault(module, []).append(call)


def _where() -> str:
    """Returns file and line of the innermost frame outside torch and this package, that is, of the model's code."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "normformer_rs"):
        frame = frame.f_back
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _named(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Key, str]]:
    """Returns the tensors among a call's arguments, each with the argument's name in the block's signature. Tensors in
    tuples, lists and dictionaries get the name of their argument."""
    try:
        bound = inspect.signature(block.forward).bind(*args, **kwargs)
    except TypeError:  # the arguments do not fit the signature
        return []
    parameters = bound.signature.parameters.values()
    rest = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), "")  # the name of **kwargs
    collected = bound.arguments.pop(rest, {})
    flat = {**bound.arguments, **collected}
    return [(key(t), name) for name, value in flat.items() for t in tensors_in(value)]


_RECOGNISED: dict[Any, bool] = {}
"""Cached results of `is_norm`. Modules that compute alike have one key: the result of `alike`."""


def _counts_as(module: nn.Module) -> str | None:
    """Returns a module's kind if a call of it counts as one operation, else None."""
    if isinstance(module, torch.jit.ScriptModule):
        return None  # compiled modules take no hooks, so their operations count one by one
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return "dropout"
    kind = type(module).__name__
    if isinstance(module, nn.Linear) or kind == "Conv1D":
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "conv"
    if next(module.children(), None) is not None:  # of the others with children, only norms count as one operation
        return "norm" if not has_stateful_parts(module) and is_norm(module) else None
    if re.search("drop_?path|stochastic_?depth", kind, re.IGNORECASE):
        return "drop_path"
    if is_norm(module):
        return "norm"
    own = [*module.parameters(recurse=False)]
    return "scale" if re.search("layer_?scale", kind, re.IGNORECASE) and len(own) == 1 else None


def is_norm(module: nn.Module) -> bool:
    """Returns whether the module is a norm, judged by its class's name or by its computation."""
    if next(module.parameters(recurse=False), None) is None and not looks_like_a_norm(module):
        return False
    like = alike(module)
    if like is module:  # no other module is known to be alike, so there is nothing to cache
        return looks_like_a_norm(module) or read_norm(module) is not None
    if like not in _RECOGNISED:
        _RECOGNISED[like] = looks_like_a_norm(module) or read_norm(module) is not None
    return _RECOGNISED[like]


def record(
    model: nn.Module, blocks: Iterable[nn.Module], run: Callable[[], Any], whole: Iterable[nn.Module] = ()
) -> Record:
    """Returns the record of `run()`, which runs the model. The attentions in `whole` count as one operation each."""
    found = Record(model, blocks)
    found.kinds |= dict.fromkeys(whole, "attention")
    with contextlib.ExitStack() as hooks:
        for module in {*found.kinds, *found.blocks}:
            hooks.callback(module.register_forward_pre_hook(found.enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(found.leave, with_kwargs=True).remove)
        for module in model.modules():
            if any(part in found.blocks for part in module.modules()):
                hooks.callback(module.register_forward_pre_hook(found.count).remove)
        with torch.no_grad(), found:
            result = run()
        found.returned = {key(t) for t in tensors_in(result)}
        found.alive.append(result)
    return found
