"""A second route to what a swapped model computes, which proves each swap: the model from before the swap runs, and
where its additions and norms stand on the residual stream, the scheme's equations are computed in their place.

This uses no code that runs swapped blocks: no tensor class, no subclass of a block, no packed hidden state. It follows
the stream by the identity of tensors. It takes from the swap where the additions and norms of a block stand
(`Structure`), and the new parameters. What one change or gain computes is checked by the package's tests.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ..declarations.declared import Change, only_norm
from ..errors import InputError
from ..nn import mixing
from ..nn.interpreter import apply_changes, apply_norm, gain
from .block_residual import POINTS
from .blocks import width_into
from .converted import residual_of
from .examples import caller
from .proof import Observed, differ, in_words, observe
from .record import (
    ADDITIONS,
    FOLLOWED,
    TIMES,
    Span,
    exchanged,
    factor_of,
    has_factor,
    kind_of,
    stream_in,
    takes_all,
    tensors_in,
)
from .residual_stream import Identity

Way = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
"""An operation that a block applies to the residual stream without reading it, such as a reshape, and its inverse:
(forth, back)."""


class State:
    """The scheme's tensors of one stack at one time of a run.

    Attributes:
        x: the residual stream.
        others: the scheme's further streams.
        outputs: the input of the stack and the outputs of its layers so far, if the scheme sums them.
        kept: the tensors that changes keep for later ones, by name.
        layer: the number of the layer under way; −1: none has begun.
    """

    def __init__(self) -> None:
        self.x: Any = None
        self.others: tuple[Tensor, ...] = ()
        self.outputs: list[Tensor] = []
        self.kept: dict[str, Tensor] = {}
        self.layer = -1


class Branches:
    """Finds sublayers that norm their input by code of their own, which this route cannot see. Two more runs show them:
    sublayers without a known norm read 2·x in one, and x with its columns moved by one in the other. A sublayer norms
    its input if F(2·x) is F(x), but F of the moved x is not."""

    def __init__(self, is_bare: bool = False) -> None:
        self.is_bare = is_bare
        """Whether the runs leave out the scheme's norms inside sublayers, such as those of queries and keys, which
        would count as the sublayers' own."""
        self.values: list[Tensor] = []
        """The branches F(x) of the first run, in order."""
        self.changed: Callable[[Tensor], Tensor] | None = None
        """The change of what sublayers read. None: this is the first run."""
        self.changes: list[dict[int, tuple[float, str]]] = []
        """For each later run: the number of a branch → (the largest change of its numbers, the sublayer's name)."""
        self.number = 0
        """How many branches the run under way has had."""

    def again(self, changed: Callable[[Tensor], Tensor] | None) -> None:
        """Begins another run, in which sublayers read `changed(x)`. None: the first run, with x itself."""
        self.changed, self.number = changed, 0
        if changed is not None:
            self.changes.append({})

    def kept(self, f: Tensor, name: str) -> Tensor:
        """Notes the branch f, and returns it as the first run had it, so that later sublayers get equal inputs in all
        runs. `name`: the sublayer's, if it has no norm before it, else ""."""
        if self.changed is None:
            self.values.append(f.detach())
            return f
        before, self.number = self.values[self.number], self.number + 1
        if name:
            self.changes[-1][self.number] = (f.detach() - before).abs().max().item(), name
        return before

    def norming(self) -> str:
        """Returns the name of a sublayer that norms its input by itself; "": there is none."""
        doubled, moved = self.changes
        return next((name for i, (change, name) in doubled.items() if change < NO_CHANGE * moved[i][0]), "")


NO_CHANGE = 1e-3
"""F(2·x) counts as F(x) if it differs by less than this share of the change that the moved x makes. It is not 0,
because of a norm's ε."""


class Block:
    """One call of a block, or of a loop over layers. `whole`: its `BlockResidual`, or its `LoopResidual`, which has a
    `BlockResidual` for each layer. `given`: the call's arguments by name; `kind`: the name of its class."""

    def __init__(
        self, whole: Any, state: State, layer: int, given: dict[str, Any], branches: "Branches", kind: str
    ) -> None:
        self.whole, self.state, self.layer, self.branches, self.kind = whole, state, layer, branches, kind
        self.layers: Any = getattr(whole, "layers", [whole])
        self.size = len(whole.parts) // len(self.layers)  # the number of sublayers in a layer
        all_writes = whole.structure.writes
        # cross-attentions that this call leaves out, since it has no encoder's output
        left_out = {i for i, part in enumerate(whole.parts) if part.memory and given.get(part.memory) is None}
        self.writes = [i for i in all_writes if i not in left_out]
        """For each addition to the stream, the number of the sublayer that it belongs to."""
        self.numbers = [n for n, i in enumerate(all_writes) if i not in left_out] + [len(all_writes)]
        """For each addition to the stream, its number in `Structure.reads`, which also counts those left out."""
        self.written = 0
        """How many additions to the stream have run."""
        # the next three count from the last addition that wrote the stream
        self.factors: list[float] = []  # the numbers by which the block's code has multiplied tensors
        self.reading_additions = 0  # the number of additions that had the stream as an operand
        self.multiplications = 0  # the number of multiplications of the stream by numbers
        self.sum: Tensor | None = None  # the sum so far, if the sublayer under way adds several branches
        self.read: Any = None  # x, or a mixture of the streams, before the norm of the sublayer under way
        self.rest: Any = ()  # the tensors that `mixing.read` returns for `mixing.write`, besides that mixture
        self.residual = self.layers[0]
        self.became: tuple[Tensor, Tensor] | None = None
        """(F, the stream), if the block added the stream to F in place, and may return F."""

    @property
    def part(self) -> Any:
        """The `Part` of the sublayer under way; None after the last one."""
        return None if self.written == len(self.writes) else self.whole.parts[self.writes[self.written]]

    @property
    def sublayer(self) -> Any:
        """The scheme's `Sublayer` of the sublayer under way."""
        return self.residual.sublayers[self.writes[self.written] % self.size]

    def open(self) -> None:
        """Begins a sublayer: sets the tensor that its norm gets."""
        state = self.state
        self.read = state.x
        if self.sublayer.mixing is not None:
            self.read, self.rest = mixing.read(self.sublayer.mixing, self.residual, (state.x, *state.others))

    def before(self, own: nn.Module | None = None) -> Tensor:
        """Returns the tensor that the sublayer reads; in a later run of `branches`, that tensor with their change.
        `own`: a norm in place of the scheme's."""
        x = self._before(own)
        changed = self.branches.changed
        return x if changed is None or self.part.before is not None else changed(x)

    def _before(self, own: nn.Module | None) -> Tensor:
        """Returns the tensor that the scheme lets the sublayer read. `own`: as in `before`."""
        main = only_norm(self.sublayer.before)
        if own is not None and main is not None:
            x = apply_norm(own, self.read, None)
        else:
            x = apply_changes(self.residual, self.sublayer.before, self.read, None, self.state.kept)
        return apply_changes(self.residual, self.sublayer.inside.get("input", ()), x, None)

    def shown(self) -> Tensor:
        """Returns the stream as the block's code sees it. If the block has no norm before the sublayer, that is the
        tensor that the sublayer reads."""
        if self.part is None:
            return mixing.seen(self.residual.place.declared.mixing, (self.state.x, *self.state.others))
        return self.read if self.part.before is not None or self.sum is not None else self.before()

    def write(self, f: Tensor) -> None:
        """Computes the scheme's step with the branch F(x) = f. If the sublayer adds several branches one by one, this
        computes it with their sum at the last one."""
        self._check_factor()
        f = self.branches.kept(f, f"the sublayer {self.part} of a {self.kind}" if self.part.before is None else "")
        self.sum = f if self.sum is None else self.sum + f
        number = self.writes[self.written]  # the sublayer's number; a loop counts sublayers across its layers
        self.written += 1
        self.reading_additions = self.multiplications = 0
        if self.part is not None and self.writes[self.written] == number:  # the sublayer adds another branch
            return
        f, self.sum = self.sum, None
        owner, state, i = self.residual, self.state, number % self.size
        sublayer, declared = owner.sublayers[i], owner.place.sublayers[i]
        # the division takes back the block's own factor, in whose place the scheme has its gains
        f = apply_changes(owner, sublayer.branch, f / owner.parts[i].beta, None, state.kept) * declared.scale
        x = apply_changes(owner, sublayer.skip, state.x, None, state.kept)
        if sublayer.mixing is not None:
            state.x, *others = mixing.write(sublayer.mixing, (x, *state.others), self.rest, f)
            state.others = tuple(others)
        else:
            alpha_t = owner._stack[0].grown(owner.place.layer)
            steps = ((x, sublayer), *zip(state.others, sublayer.streams))
            x, *others = (self._step(step, t, f, alpha_t) for t, step in steps)
            state.x, state.others = apply_changes(owner, sublayer.after, x, None, state.kept), tuple(others)
        self.read = None
        if self.part is not None:
            layer = self.writes[self.written] // self.size  # the next sublayer's layer within the loop
            if layer > number // self.size:
                self.residual, self.layer = self.layers[layer], self.layer + 1
                enter_layer(state, self.residual, self.layer)
            self.open()

    def _check_factor(self) -> None:
        """Raises RuntimeError if the code did not multiply a tensor by the branch's factor, as it did in the run that
        the swap is based on."""
        factors, self.factors = self.factors, []
        if self.part.beta != 1 and not has_factor(factors, self.part.beta):
            raise RuntimeError(f"the branch of {self.part} has another factor than {self.part.beta:g}")

    def _step(self, step: Any, x: Tensor, f: Tensor, alpha_t: Any) -> Tensor:
        """Returns α·x + β·f with the gains of a sublayer or of a further stream."""
        alpha, beta = gain(self.residual, step.alpha, x, alpha_t), gain(self.residual, step.beta, x, alpha_t)
        return (x if alpha is None else (alpha * x).to(x.dtype)) + (f if beta is None else (beta * f).to(f.dtype))


def enter_layer(state: State, residual: Any, layer: int) -> None:
    """Changes the stream as a layer does at its begin."""
    stack = residual._stack[0]
    state.layer = layer
    if stack.place.declared.combine is not None:
        state.x = combined(stack.combine, state)
    state.x = apply_changes(residual, residual.opening, state.x, None, state.kept)


def combined(sums: Any, state: State) -> Tensor:
    """Returns the weighted sum of the stack's input and all outputs so far. `sums`: the stack's module with a row of
    weights for each layer, and with norms of the outputs or (`on_sums`) of the sums."""
    row = len(state.outputs)  # the number of the layer that gets the sum
    norm = sums.norms[str(row)] if str(row) in sums.norms else nn.Identity()
    state.outputs.append(state.x if sums.on_sums else norm(state.x))
    if sums.skips_first and row == 0:
        return state.x
    total = sum(w * y for w, y in zip(sums.weight[row], state.outputs))
    return norm(total) if sums.on_sums else total


class Recomputes(Exception):
    """Raised in a backward pass that runs parts of the model once more, as a checkpoint does: this route has no schemes
    there."""


class LayersAreMissing(Exception):
    """Raised if a run leaves out layers, as LayerDrop does: this route ends stacks after their last layer."""

    def __init__(self) -> None:
        super().__init__("the run leaves out layers of a stack, or runs them in another order than the list's")


class Recomputed(TorchFunctionMode):
    """A run of the model from before the swap, with the swapped model's schemes. `base`: a copy of the model, made
    before the swap by `copied`."""

    def __init__(self, base: nn.Module, swapped: nn.Module, branches: Branches | None = None) -> None:
        super().__init__()
        there = dict(base.named_modules())
        # a wrapper, such as torch.compile's, also has the attributes of the module inside, which comes after it
        owners = {residual_of(module): (name, module) for name, module in swapped.named_modules()}
        self.blocks: dict[nn.Module, tuple[Any, Any]] = {
            there[name]: (residual, module)
            for residual, (name, module) in owners.items()
            if residual is not None and name in there
        }
        """For each block of the base model: its residual, and the swapped block."""
        self.base, self.swapped = base, swapped
        self.states: dict[Any, State] = {}  # by stack
        self.open: list[Block] = []  # calls of blocks under way, the innermost last
        self.streams: dict[int, Sequence[Way]] = {}
        """The identity of each tensor that is the stream → the operations that the block has applied to it so far."""
        self.followed: dict[int, tuple[nn.Module, tuple[str, ...]]] = {}
        """The identity of a tensor from which a loop's stream is computed → the loop, and the operations to come."""
        self.within = 0  # norms and scales under way, whose operations are left alone
        self.branches = Branches() if branches is None else branches
        self.dtypes: set[torch.dtype] = set()
        """The dtypes of the operations' results. Two routes do not share the rounding of 16-bit numbers."""
        self.alive: list[Tensor] = []  # keeps the stream's tensors alive, so that no identity is used twice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._called(func, args, kwargs)
        if isinstance(out, Tensor):
            self.dtypes.add(out.dtype)
        return out

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of an operation of the model. If the operation writes the stream, or scales or clamps it,
        the result is the stream that the scheme has there."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        stream: Any = args[0] if args else None
        following = next((self.followed[id(t)] for t in tensors_in(args) if id(t) in self.followed), None)
        if following is not None and kind_of(name) == following[1][0] and not self.within:
            owner, operations = following
            return self._followed(owner, func(*args, **kwargs), operations[1:])
        if not self.open or self.within:
            return func(*args, **kwargs)
        block = self.open[-1]
        if (factor := factor_of(name, args, kwargs)) is not None:
            block.factors.append(factor)
        if name in ADDITIONS and len(args) == 2 and all(isinstance(a, torch.Tensor) for a in args):
            operands = [a for a in args if id(a) in self.streams]
            if len(operands) == 1:
                x = operands[0]
                number = block.numbers[block.written], block.reading_additions  # as in `Structure.reads`
                block.reading_additions += 1
                f = kwargs.get("alpha", 1) * (args[1] if args[0] is x else args[0])
                if number not in block.whole.structure.reads and f.shape == x.shape:
                    ways = self.streams[id(x)]
                    for _, back in reversed(ways):  # f gets the layout in which the scheme computes
                        f = back(f)
                    block.write(f)
                    made = self._stream(block.shown(), ways)
                    if name == "add_" and args[0] is not x:
                        block.became = (args[0], made)
                    return made
        elif (
            name in TIMES
            and id(stream) in self.streams
            and all(isinstance(a, int | float) for a in (*args[1:], *kwargs.values()))
        ):
            number = block.numbers[block.written], block.multiplications  # as in `Structure.scales`
            block.multiplications += 1
            if number in block.whole.structure.scales:  # the scheme has gains in place of the block's factor
                return stream
        elif name == "clamp" and id(stream) in self.streams:  # the block bounds its stream, which the scheme keeps
            block.state.x = func(block.state.x, *args[1:], **kwargs)
            if block.part is not None:
                block.open()
            return self._stream(block.shown(), self.streams[id(stream)])
        elif name in FOLLOWED | {"__getitem__"} and id(stream) in self.streams:
            made = func(*args, **kwargs)
            way = self._way(func, name, args, kwargs, stream, made)
            return made if way is None else self._stream(made, [*self.streams[id(stream)], way], is_made=True)
        return func(*args, **kwargs)

    def _way(self, func: Any, name: str, args: Any, kwargs: Any, x: Tensor, made: Any) -> Way | None:
        """Returns the operation `func`, called on the stream x, and its inverse. None: its result `made` is no longer
        the stream."""
        if not isinstance(made, torch.Tensor) or made.numel() != x.numel() or made.shape[-1:] != x.shape[-1:]:
            return None
        if name == "__getitem__" and not takes_all(args[1]):
            return None
        shape, dtype = x.shape, x.dtype

        def forth(t: Tensor) -> Tensor:
            changed: Tensor = func(t, *args[1:], **kwargs)
            return changed

        if name == "transpose":
            return forth, lambda t: t.transpose(*args[1:])
        return forth, lambda t: t.reshape(shape).to(dtype)

    def _stream(self, x: Tensor, ways: Sequence[Way], is_made: bool = False) -> Tensor:
        """Returns x with the operations `ways` applied, and notes the result as the stream. `is_made`: x has gone
        through them already."""
        for forth, _ in () if is_made else ways:
            x = forth(x)
        x = x.view_as(x)  # a new tensor, since streams are known by identity, and x may also be something else
        self.streams[id(x)] = ways
        self.alive.append(x)
        return x

    # Inside the sublayers.

    def _inside(self, block: nn.Module, whole: Any) -> Iterator[Any]:
        """Registers hooks on a block's linear layers for the changes inside its sublayers; yields their handles.
        `whole`: the block's `BlockResidual` or `LoopResidual`."""
        layers: Any = getattr(whole, "layers", [whole])
        sublayers = ((residual, *pair) for residual in layers for pair in zip(residual.parts, residual.sublayers))
        for residual, part, sublayer in sublayers:
            for point, changes in sublayer.inside.items():
                if self.branches.is_bare:
                    changes = tuple(change for change in changes if change.kind not in ("norm", "unit"))
                if point == "input" or not changes:  # `Block.before` makes the changes of the input
                    continue
                role, side = POINTS.get(point, (point, "after"))
                (linear,) = [linear for linear in part.linears if role in linear.roles]
                size = 0
                # the point is at queries, keys or values; if `linear.rows` has their heads, `_changed` finds the size
                if point == role and not linear.rows:
                    size = width_into(self.blocks[block][1], part, "output") // residual.place.config.heads
                change = functools.partial(self._changed, residual, changes, linear, role, size)
                module = block.get_submodule(linear.path)
                if side == "before":
                    yield module.register_forward_pre_hook(lambda _, args, change=change: (change(args[0]), *args[1:]))
                else:
                    yield module.register_forward_hook(lambda _, __, out, change=change: change(out))

    def _changed(
        self, residual: Any, changes: Sequence[Change], linear: Any, role: str, size: int, x: Tensor
    ) -> Tensor:
        """Returns x, an input or output of `linear`, with the changes on its columns of that role. `size`: the width of
        a head, if norms of that width apply to each head. 0: they do not, or `linear.rows` has the heads."""
        columns = [*range(x.shape[-1])]
        if len(linear.roles) > 1 or linear.rows:
            columns = linear.rows_of(role, x.shape[-1])
            if linear.rows and None not in (heads := linear.heads(role)):
                sizes = [heads.count(head) for head in dict.fromkeys(heads)]
                columns, size = [i for _, i in sorted(zip(heads, columns))], sizes[0]  # sorted by head
        y = x[..., columns]
        for change in changes:
            by_head = size and (change.kind == "unit" or (change.kind == "norm" and change.what.width == size))
            y = y.unflatten(-1, (-1, size)) if by_head else y
            y = apply_changes(residual, (change,), y, None, self.open[-1].state.kept)
            y = y.flatten(-2) if by_head else y
        return x.index_copy(-1, torch.tensor(columns, device=x.device), y)

    # Hooks.

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Runs before a module of `run`. Gives a block the stream that the scheme has there."""
        if module not in self.blocks:
            self.within += 1
            return None
        x: Any = stream_in((args, kwargs))
        seen = self._begun(module, x, dict(zip(self.blocks[module][1]._nfrs_names, args)) | kwargs)
        return exchanged(args, x, seen), exchanged(kwargs, x, seen)

    def _begun(self, module: nn.Module, x: Tensor, given: dict[str, Any]) -> Tensor:
        """Begins a call of a block, and returns its stream. `x`: the stream's first tensor; `given`: the call's
        arguments by name."""
        whole = self.blocks[module][0]
        residual = getattr(whole, "layers", [whole])[0]  # the first layer's, if the block is a loop
        stack = residual._stack[0]
        state = self.states.setdefault(stack, State())
        is_shared = residual.structure.calls > 1  # several layers share the block
        layer = state.layer + 1 if is_shared else residual.place.layer
        if layer != state.layer + 1:
            raise LayersAreMissing
        declared = stack.place.declared
        has_images = residual.structure.has_channels_first
        rows = x.movedim(1, -1) if has_images else x
        is_first = state.layer < 0
        # between blocks the model may change x, but not the hidden state of a scheme that has more tensors than x
        if is_first or not stack.is_wide:
            state.x = apply_changes(stack, declared.begin, rows, None, state.kept) if is_first else rows
        if is_first:
            state.others = (state.x,) * len(declared.streams)
            state.x = mixing.begin(declared.mixing, state.x)
        enter_layer(state, residual, layer)
        self.open.append(Block(whole, state, layer, given, self.branches, type(module).__name__))
        block = self.open[-1]
        block.open()
        ways = [(lambda t: t.movedim(-1, 1), lambda t: t.movedim(1, -1))] if has_images else []
        return self._stream(block.shown(), ways)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        """Runs after a module of `run`. Returns its output with the scheme: a block's with the new stream, or the
        tensor in place of a norm's output."""
        if module not in self.blocks:
            self.within -= 1
            return self._norm(module, args, out)
        call, y = self._ended(module)
        out = out if call.became is None else exchanged(out, *call.became)
        stream = next(t for t in tensors_in(out) if id(t) in self.streams)
        return exchanged(out, stream, y)

    def _followed(self, owner: nn.Module, x: Tensor, operations: tuple[str, ...]) -> Tensor:
        """Returns the stream of a loop that begins with x. If operations are still to come before it begins, notes
        their kinds, and returns x."""
        if not operations:
            return self._begun(owner, x, {})
        self.followed[id(x)] = owner, operations
        self.alive.append(x)
        return x

    def _ended(self, module: nn.Module) -> tuple[Block, Tensor]:
        """Ends the call of a block that has begun last. Returns it, and the tensor in place of its stream."""
        block = self.open.pop()
        if block.written != len(block.writes):
            raise RuntimeError(f"{block.written} of {len(block.writes)} additions to the stream were seen")
        state, stack = block.state, block.residual._stack[0]
        y = state.x
        # the stack ends with the last block of the list, also if `depth=` gives it more layers
        if block.layer + 1 == len(stack._blocks) * block.residual.structure.calls:
            y = self._finished(stack, state)
            del self.states[stack]
        elif stack.place.declared.mixing is not None:
            y = mixing.seen(stack.place.declared.mixing, (state.x, *state.others))
        y = y.movedim(-1, 1) if block.residual.structure.has_channels_first else y
        if end := getattr(block.whole, "end", ""):
            y = module.get_submodule(end).forward(y)
        return block, y

    def _span(self, owner: nn.Module, span: Span) -> Iterator[Any]:
        """Registers hooks on the modules between which a loop has its stream; yields their handles."""

        def begin(_: nn.Module, __: Any, out: Any) -> Any:
            return self._followed(owner, out, span.operations)

        def end(_: nn.Module, *given: Any) -> Any:
            stream = next(t for t in tensors_in(given) if id(t) in self.streams)
            y = self._ended(owner)[1]
            return exchanged(given[-1] if span.is_norm else given, stream, y)

        first, last = map(owner.get_submodule, (span.begin, span.end))
        yield first.register_forward_hook(begin)
        if span.is_norm:
            yield last.register_forward_hook(end)
        else:
            yield last.register_forward_pre_hook(end, with_kwargs=True)

    def _finished(self, stack: Any, state: State) -> Tensor:
        """Returns the stack's output after its last layer."""
        declared = stack.place.declared
        x = state.x
        if declared.combine is not None:
            x = combined(stack.combine, state)
        for end_norm, stream in zip(declared.streams, state.others):  # each is added, after its norm if it has one
            x = x + (stream if end_norm is None else apply_norm(getattr(stack, end_norm.name), stream, None))
        x, _ = mixing.read(declared.mixing, stack, (x, *state.others))
        return apply_changes(stack, stack.end, x, None, state.kept)

    def _norm(self, module: nn.Module, args: Any, out: Any) -> Any:
        """Returns the output that the norm or factor `module` has with the scheme. It stands on the stream, last on a
        branch, or after the stack. `args`, `out`: its input and its own output."""
        if not self.open:  # outside all blocks: a norm after the stack, which the swap may have removed
            gone = module in self.paths and type(self.swapped.get_submodule(self.paths[module])) is nn.Identity
            return args[0] if gone else out
        block = self.open[-1]
        if module not in self.inside:  # the norm after the stack, which a block calls, too
            return out
        path = self.inside[module]
        parts = block.whole.parts
        # the scheme has its own factors and branch norms, so `Block.write` gets the branch without the block's
        if any(path in part.scales or path == part.branch for part in parts):
            return args[0]
        if id(args[0]) not in self.streams:
            return out
        part = block.part
        if part is not None and path in (part.before, *part.twins):  # the norm before the sublayer under way
            kept = self.blocks_of[module].get_submodule(path)
            is_own = path in part.twins and not isinstance(kept, Identity)
            x = block.before(kept if is_own else None)
            for forth, _ in self.streams[id(args[0])]:
                x = forth(x)
            return x.clone()  # without a norm this is the stream, and the block may write into what its norm returns
        return args[0]  # a norm after a sublayer, which `Block.write` has computed if the scheme has one

    def run(self, call: Callable[[nn.Module], Any]) -> Any:
        """Returns `call(base)`, computed with the schemes. Hooks are registered on the blocks, on their norms and
        factors, and on norms that the swap has removed elsewhere."""
        spans = {
            block: span for block, (residual, _) in self.blocks.items() if (span := getattr(residual, "span", None))
        }
        watched = {*self.blocks} - spans.keys()  # the modules that get hooks
        self.paths: dict[nn.Module, str] = {}  # modules after the stack that the swap has removed → their paths
        self.inside: dict[nn.Module, str] = {}  # norms and factors inside blocks → their paths there
        self.blocks_of: dict[nn.Module, Any] = {}  # the same modules → their swapped blocks
        for block, (residual, swapped) in self.blocks.items():
            for part in residual.parts:
                for path in (*part.norms(), *part.scales):
                    module = block.get_submodule(path)
                    self.inside[module], self.blocks_of[module] = path, swapped
                    watched.add(module)
            # a block that is a loop also contains the norm after its last layer
            if hasattr(residual, "layers"):
                there = dict(swapped.named_modules())
                for path, module in block.named_modules():
                    now = there.get(path)
                    gone = type(now) is nn.Identity and not isinstance(module, nn.Identity | nn.Dropout)
                    if path and module not in watched and (gone or path == residual.end):
                        self.inside[module], self.blocks_of[module] = path, swapped
                        watched.add(module)
        for path, module in self.base.named_modules():
            try:
                now = self.swapped.get_submodule(path)
            except AttributeError:
                continue
            if module not in watched and type(now) is nn.Identity and type(module) is not nn.Identity:
                inside = any(path.startswith(f"{p}.") for p, m in self.base.named_modules() if m in self.blocks)
                if not inside:
                    self.paths[module] = path
                    watched.add(module)
        with contextlib.ExitStack() as hooks:
            for module in watched:
                hooks.callback(module.register_forward_pre_hook(self.enter, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(self.leave, with_kwargs=True).remove)
            for owner, span in spans.items():
                for handle in self._span(owner, span):
                    hooks.callback(handle.remove)
            for block, (residual, _) in self.blocks.items():
                for handle in self._inside(block, residual):
                    hooks.callback(handle.remove)
            with self:
                returned = call(self.base)
        if any(state.layer >= 0 for state in self.states.values()):
            raise LayersAreMissing
        return returned


def copied(model: nn.Module) -> nn.Module:
    """Returns a copy of the model's modules that shares all their tensors."""
    # modules may also keep tensors of an earlier call, which torch does not copy
    held = (t for module in model.modules() for t in tensors_in(vars(module)))
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers(), *held)}
    base = copy.deepcopy(model, shared)
    for module in base.modules():
        if not isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
            module.register_forward_pre_hook(_refuse_backward)
    return base


def _refuse_backward(*_: Any) -> None:
    """Raises `Recomputes` in a backward pass."""
    if torch._C._current_graph_task_id() != -1:
        raise Recomputes


def disagreement(
    model: nn.Module,
    base: nn.Module,
    example: Any,
    now: Observed,
    training: bool,
    shifts: Mapping[nn.Parameter, Tensor],
) -> str | None:
    """Returns a message if a run of the swapped model differs from this route's run of `base`. None: they agree.

    Runs in f32 that differ are made again in f64, where rounding is no reason. In a run that computes in 16 bits
    gradients are not compared, and outputs as those of 16 bits. Gradients are not compared either if the backward pass
    runs parts of the model once more, and nothing is if a run in training mode leaves out layers.

    Args:
        example: the example of `swap_residuals`.
        now: the run of the swapped model.
        shifts: the numbers that were added to its parameters.
    """

    def second(given: Any, is_double: bool) -> tuple[Observed, set[torch.dtype]]:
        """Returns this route's run on the example `given`, and the dtypes that it computes in. Errors: InputError for a
        sublayer that norms its input unseen."""
        route = Recomputed(base, model)
        run = functools.partial(route.run, lambda base_model: _call(base_model, given))
        more: Any = {"beside": [model], "is_double": is_double}
        first = observe(base, run, [], training, now.has_backward, shifts, **more)
        branches = route.branches
        parts = [part for whole, _ in route.blocks.values() for part in whole.parts]
        # in training mode a batch norm within a branch also makes it independent of the size of its input
        if not training and first.error is None and any(part.before is None for part in parts):
            if any(sublayer.inside for residual in _layers(route) for sublayer in residual.sublayers):
                branches = Branches(is_bare=True)
            # the order that `norming` expects; a first run without the changes inside, if the scheme has some
            runs = (lambda x: 2 * x, lambda x: x.roll(1, -1))
            for changed in (None, *runs) if branches.is_bare else runs:
                branches.again(changed)
                more_route = Recomputed(base, model, branches)
                run = functools.partial(more_route.run, lambda base_model: _call(base_model, given))
                again = observe(base, run, [], training, False, shifts, **more)
                if again.error is not None:
                    return again, route.dtypes
            if name := branches.norming():
                raise InputError(
                    f"{name} gives the same branch for twice its input: it norms its input by a formula, or by a "
                    "module that is not called on the residual stream itself, and a scheme cannot replace that. Make "
                    "it a module that is called on the stream"
                )
        return first, route.dtypes

    message = _compared(*second(example, is_double=False), now, training)
    is_single = any(t.dtype == torch.float32 for t in now.outputs)
    # an example that is a function makes its own tensors, which cannot be made f64
    if message is None or callable(example) or not is_single:
        return message
    doubled = tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, example)
    exact = observe(model, lambda: _call(model, doubled), [], training, now.has_backward, shifts, is_double=True)
    return message if exact.error is not None else _compared(*second(doubled, is_double=True), exact, training)


def _layers(route: Recomputed) -> Iterator[Any]:
    """Yields the `BlockResidual` of each layer."""
    for whole, _ in route.blocks.values():
        yield from getattr(whole, "layers", [whole])


def _call(model: nn.Module, example: Any) -> Any:
    """Returns the model's output for the example."""
    run = caller(model, example)
    assert run is not None  # there was one before the swap
    return run()


_EXACT = 1e-9
"""The allowed difference in f64 relative to the largest number, if nothing is computed in f32."""


def _compared(second: Observed, dtypes: set[torch.dtype], now: Observed, training: bool) -> str | None:
    """Returns a message about the first difference between this route's run and the swapped model's. None: they agree
    as far as they can be compared. `dtypes`: those that the run computes in."""
    is_narrow = bool(dtypes & {torch.float16, torch.bfloat16})
    if isinstance(second.error, LayersAreMissing) and training:
        return None
    if isinstance(second.error, Recomputes):
        second = second._replace(error=None, gradients={})
    if second.error is not None and now.error is None:
        return in_words(second.error)
    if is_narrow:
        second, now = (run._replace(outputs=[t.bfloat16() for t in run.outputs]) for run in (second, now))
        second = second._replace(gradients={})
    pairs = [] if is_narrow else [*zip(second.outputs, now.outputs)]
    if any(a.shape == b.shape and not torch.equal(a.isfinite(), b.isfinite()) for a, b in pairs):
        return "other numbers of its outputs are finite"
    return differ(second, now) if torch.float32 in dtypes else differ(second, now, _EXACT)
