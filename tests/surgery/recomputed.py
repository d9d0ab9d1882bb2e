"""A second route to what a swapped model computes: the model as it was runs once more, and where its additions and
norms stand on the residual stream, the scheme's equations are computed in their place.

This uses no code that runs swapped blocks: no tensor class, no subclass of a block, no packed hidden state. It follows
the stream by the identity of tensors. It takes from the swap where the additions and norms of a block stand
(`Structure`), and the new parameters. What one change or one gain computes is `normformer_rs.nn`'s, which
`tests/reference` checks.
"""

import contextlib
import functools
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from normformer_rs.declarations.declared import only_norm
from normformer_rs.nn import mixing
from normformer_rs.nn.interpreter import apply_changes, apply_norm, gain
from normformer_rs.surgery.blocks import width_into
from normformer_rs.surgery.converted import residual_of
from normformer_rs.surgery.record import ADDITIONS, FOLLOWED, TIMES, exchanged, stream_in, takes_all, tensors_in
from normformer_rs.surgery.residual_stream import Identity

POINTS = {"after_heads": ("output", True), "after_output": ("output", False)}
POINTS |= {"before_activation": ("fc1", False), "after_activation": ("fc2", True)}
"""Points inside a sublayer: the linear layer by its role, and whether the point is before it."""


class State:
    """The tensors of one stack on their way: x, what goes beside it, and the outputs so far."""

    def __init__(self):
        self.x, self.others, self.outputs, self.kept, self.layer = None, (), [], {}, -1


class Block:
    """One call of a block, or of a loop over layers: the sublayers that its additions close, and the one under way.
    `whole`: its residual, or the loop's, which has one for each layer."""

    def __init__(self, whole, state, layer, given):
        self.whole, self.state, self.layer = whole, state, layer
        self.layers = getattr(whole, "layers", [whole])
        self.size = len(whole.parts) // len(self.layers)
        every = whole.structure.writes
        out = {i for i, part in enumerate(whole.parts) if part.memory and given.get(part.memory) is None}
        self.writes = [i for i in every if i not in out]
        self.numbers = [n for n, i in enumerate(every) if i not in out] + [len(every)]
        self.written, self.since, self.times, self.sum, self.read, self.rest = 0, 0, 0, None, None, ()
        self.residual, self.became = self.layers[0], None

    @property
    def part(self):
        return None if self.written == len(self.writes) else self.whole.parts[self.writes[self.written]]

    @property
    def sublayer(self):
        return self.residual.sublayers[self.writes[self.written] % self.size]

    def open(self):
        """The tensor that the sublayer under way is before."""
        s = self.state
        self.read = s.x
        if self.sublayer.mixing is not None:
            self.read, self.rest = mixing.read(self.sublayer.mixing, self.residual, (s.x, *s.others))

    def before(self, own=None):
        """What the sublayer reads. `own`: a norm that stands in for the scheme's."""
        main = only_norm(self.sublayer.before)
        if own is not None and main is not None:
            x = apply_norm(own, self.read, None)
        else:
            x = apply_changes(self.residual, self.sublayer.before, self.read, None, self.state.kept)
        return apply_changes(self.residual, self.sublayer.inside.get("input", ()), x, None)

    def shown(self):
        """The stream as the block's code sees it: where it reads without a norm, what the sublayer reads."""
        if self.part is None:
            return mixing.seen(self.residual.place.declared.mixing, (self.state.x, *self.state.others))
        return self.read if self.part.before is not None or self.sum is not None else self.before()

    def write(self, f):
        """The scheme's step with F(x) = f."""
        self.sum = f if self.sum is None else self.sum + f
        i, self.written, self.since, self.times = self.writes[self.written], self.written + 1, 0, 0
        if self.part is not None and self.writes[self.written] == i:
            return
        owner, s, f, self.sum, i = self.residual, self.state, self.sum, None, i % self.size
        sublayer, declared = owner.sublayers[i], owner.place.sublayers[i]
        f = apply_changes(owner, sublayer.branch, f / owner.parts[i].beta, None, s.kept) * declared.scale
        x = apply_changes(owner, sublayer.skip, s.x, None, s.kept)
        if sublayer.mixing is not None:
            s.x, *others = mixing.write(sublayer.mixing, (x, *s.others), self.rest, f)
            s.others = tuple(others)
        else:
            alpha_t = owner._stack[0].grown(owner.place.layer)
            steps = ((x, sublayer), *zip(s.others, sublayer.streams))
            x, *others = (self._step(step, t, f, alpha_t) for t, step in steps)
            s.x, s.others = apply_changes(owner, sublayer.after, x, None, s.kept), tuple(others)
        self.read = None
        if self.part is not None:
            if self.writes[self.written] // self.size > self.writes[self.written - 1] // self.size:
                self.residual, self.layer = self.layers[self.writes[self.written] // self.size], self.layer + 1
                enter_layer(s, self.residual, self.layer)
            self.open()

    def _step(self, step, x, f, alpha_t):
        alpha, beta = gain(self.residual, step.alpha, x, alpha_t), gain(self.residual, step.beta, x, alpha_t)
        return (x if alpha is None else alpha * x) + (f if beta is None else beta * f)


def enter_layer(state, residual, layer):
    """What a layer does to the stream as it begins."""
    stack = residual._stack[0]
    state.layer = layer
    if stack.place.declared.combine is not None:
        state.x = combined(stack.combine, state)
    state.x = apply_changes(residual, residual.opening, state.x, None, state.kept)


def combined(sums, state):
    """The sum of all outputs, with this row's weights."""
    row = len(state.outputs)
    norm = sums.norms[str(row)] if str(row) in sums.norms else nn.Identity()
    state.outputs.append(state.x if sums.on_sums else norm(state.x))
    if sums.skips_first and row == 0:
        return state.x
    total = sum(w * y for w, y in zip(sums.weight[row], state.outputs))
    return norm(total) if sums.on_sums else total


class Recomputed(TorchFunctionMode):
    """The base model's run, with the schemes of the swapped one. `base`: a copy of the model before the swap."""

    def __init__(self, base, swapped):
        super().__init__()
        self.blocks = {}
        for name, module in swapped.named_modules():
            if (residual := residual_of(module)) is not None and name in dict(base.named_modules()):
                self.blocks[base.get_submodule(name)] = (residual, module)
        self.base, self.swapped = base, swapped
        self.states, self.open, self.streams, self.within, self.alive = {}, [], {}, 0, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        stream = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if not self.open or self.within:
            return func(*args, **kwargs)
        block = self.open[-1]
        if name in ADDITIONS and len(args) == 2 and all(isinstance(a, torch.Tensor) for a in args):
            on = [a for a in args if id(a) in self.streams]
            if len(on) == 1:
                at = block.numbers[block.written], block.since
                block.since += 1
                f = kwargs.get("alpha", 1) * (args[1] if args[0] is on[0] else args[0])
                if at not in block.whole.structure.reads and f.shape == on[0].shape:
                    ways = self.streams[id(on[0])]
                    for _, back in reversed(ways):
                        f = back(f)
                    block.write(f)
                    made = self._stream(block.shown(), ways)
                    if name == "add_" and args[0] is not on[0]:
                        block.became = (args[0], made)
                    return made
        elif name in TIMES and id(stream) in self.streams and all(isinstance(a, int | float) for a in args[1:]):
            at = block.numbers[block.written], block.times
            block.times += 1
            if at in block.whole.structure.scales:
                return stream
        elif name in FOLLOWED | {"__getitem__"} and id(stream) in self.streams:
            made = func(*args, **kwargs)
            way = self._way(func, name, args, kwargs, stream, made)
            return made if way is None else self._stream(made, [*self.streams[id(stream)], way], is_made=True)
        return func(*args, **kwargs)

    def _way(self, func, name, args, kwargs, x, made):
        """An operation on the stream after which it goes on, and its inverse; None: it is a reading."""
        if not isinstance(made, torch.Tensor) or made.numel() != x.numel() or made.shape[-1:] != x.shape[-1:]:
            return None
        if name == "__getitem__" and not takes_all(args[1]):
            return None
        shape, dtype = x.shape, x.dtype

        def forth(t):
            return func(t, *args[1:], **kwargs)

        if name == "transpose":
            return forth, lambda t: t.transpose(*args[1:])
        return forth, lambda t: t.reshape(shape).to(dtype)

    def _stream(self, x, ways, is_made=False):
        for forth, _ in () if is_made else ways:
            x = forth(x)
        x = x.view_as(x)
        self.streams[id(x)] = ways
        self.alive.append(x)
        return x

    # Inside the sublayers.

    def _inside(self, block, whole):
        """Hooks on a block's linear layers for the changes at its points; returns their handles."""
        layers = getattr(whole, "layers", [whole])
        for residual, part, sublayer in ((one, *of) for one in layers for of in zip(one.parts, one.sublayers)):
            for point, changes in sublayer.inside.items():
                if point == "input":
                    continue
                role, is_before = POINTS.get(point, (point, False))
                (linear,) = [one for one in part.linears if role in one.roles]
                size = 0
                if point == role and not linear.rows:
                    size = width_into(self.blocks[block][1], part, "output") // residual.place.config.heads
                change = functools.partial(self._changed, residual, changes, linear, role, size)
                module = block.get_submodule(linear.path)
                if is_before:
                    yield module.register_forward_pre_hook(lambda _, args, change=change: (change(args[0]), *args[1:]))
                else:
                    yield module.register_forward_hook(lambda _, __, out, change=change: change(out))

    def _changed(self, residual, changes, linear, role, size, x):
        """x with the changes on its columns of that role, head by head."""
        columns = [*range(x.shape[-1])]
        if len(linear.roles) > 1 or linear.rows:
            columns = linear.rows_of(role, x.shape[-1])
            if linear.rows and None not in (heads := linear.heads(role)):
                sizes = [heads.count(head) for head in dict.fromkeys(heads)]
                columns, size = [i for _, i in sorted(zip(heads, columns))], sizes[0]
        y = x[..., columns]
        for change in changes:
            by_head = size and (change.kind == "unit" or (change.kind == "norm" and change.what.width == size))
            y = y.unflatten(-1, (-1, size)) if by_head else y
            y = apply_changes(residual, (change,), y, None, self.open[-1].state.kept)
            y = y.flatten(-2) if by_head else y
        return x.index_copy(-1, torch.tensor(columns), y)

    # Hooks.

    def enter(self, module, args, kwargs):
        if module not in self.blocks:
            self.within += 1
            return None
        whole = self.blocks[module][0]
        residual = getattr(whole, "layers", [whole])[0]
        x, stack = stream_in((args, kwargs)), residual._stack[0]
        given = dict(zip(self.blocks[module][1]._nfrs_names, args)) | kwargs
        state = self.states.setdefault(stack, State())
        is_shared = residual.structure.calls > 1
        layer = state.layer + 1 if is_shared else residual.place.layer
        declared = stack.place.declared
        images = residual.structure.has_channels_first
        rows = x.movedim(1, -1) if images else x
        if state.layer < 0 or not stack.is_wide:
            state.x = apply_changes(stack, declared.begin, rows, None, state.kept) if state.layer < 0 else rows
        if state.layer < 0:
            state.others = (state.x,) * len(declared.streams)
            state.x = mixing.begin(declared.mixing, state.x)
        enter_layer(state, residual, layer)
        self.open.append(Block(whole, state, layer, given))
        block = self.open[-1]
        block.open()
        ways = [(lambda t: t.movedim(-1, 1), lambda t: t.movedim(1, -1))] if images else []
        seen = self._stream(block.shown(), ways)
        return exchanged(args, x, seen), exchanged(kwargs, x, seen)

    def leave(self, module, args, kwargs, out):
        if module not in self.blocks:
            self.within -= 1
            return self._norm(module, args, out)
        block = self.open.pop()
        assert block.written == len(block.writes), "another way"
        state, stack = block.state, block.residual._stack[0]
        y = state.x
        if block.layer + 1 == stack.place.depth:
            y = self._finished(stack, state)
            del self.states[stack]
        elif stack.place.declared.mixing is not None:
            y = mixing.seen(stack.place.declared.mixing, (state.x, *state.others))
        y = y.movedim(-1, 1) if block.residual.structure.has_channels_first else y
        if end := getattr(block.whole, "end", ""):
            y = module.get_submodule(end).forward(y)
        out = out if block.became is None else exchanged(out, *block.became)
        last = next(t for t in tensors_in(out) if id(t) in self.streams)
        return exchanged(out, last, y)

    def _finished(self, stack, state):
        declared = stack.place.declared
        x = state.x
        if declared.combine is not None:
            x = combined(stack.combine, state)
        for at, s in zip(declared.streams, state.others):
            x = x + (s if at is None else apply_norm(getattr(stack, at.name), s, None))
        x, _ = mixing.read(declared.mixing, stack, (x, *state.others))
        return apply_changes(stack, stack.end, x, None, state.kept)

    def _norm(self, module, args, out):
        """What a module gives that stands on the stream, last on a branch, or after the stack."""
        if not self.open:
            gone = type(self.swapped.get_submodule(self.paths[module])) is nn.Identity
            return args[0] if gone else out
        block = self.open[-1]
        path = self.inside[module]
        parts = block.whole.parts
        if any(path in part.scales or path == part.branch for part in parts):
            return args[0]
        if id(args[0]) not in self.streams:
            return out
        part = block.part
        if part is not None and path in (part.before, *part.twins):
            kept = self.blocks_of[module].get_submodule(path)
            is_own = path in part.twins and not isinstance(kept, Identity)
            x = block.before(kept if is_own else None)
            for forth, _ in self.streams[id(args[0])]:
                x = forth(x)
            return x
        return args[0]

    def run(self, call):
        """The outputs of `call(base)`."""
        self.paths, self.inside, self.blocks_of, watched = {}, {}, {}, {*self.blocks}
        for block, (residual, swapped) in self.blocks.items():
            for part in residual.parts:
                for path in (*part.norms(), *part.scales):
                    module = block.get_submodule(path)
                    self.inside[module], self.blocks_of[module] = path, swapped
                    watched.add(module)
            if hasattr(residual, "layers"):  # the norm after the last layer stands in the loop
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
            for block, (residual, _) in self.blocks.items():
                for handle in self._inside(block, residual):
                    hooks.callback(handle.remove)
            # recomputation in the backward pass would miss the schemes
            direct = mock.patch("torch.utils.checkpoint.checkpoint", lambda run, *args, **_: run(*args))
            with self, direct:
                return call(self.base)
