"""Applies a residual scheme in another library's block."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..config import TransformerConfig
from ..declarations.declared import Change, Learned, NormAt, only_norm, parts_of, passes, renamed
from ..errors import InputError
from ..nn.build import install, reset
from ..nn.dropout import Draw
from ..nn.generators import move_on
from ..nn.init import Role
from ..nn.interpreter import Streams, apply_changes, begin, close, open_streams
from ..nn.place import Place
from ..nn.scheme import Sublayer
from ..nn.step_hooks import Growing
from .blocks import is_transposed, like_of, path_of, projection, width_into
from .calls import BlockCalls, begin_call, call_of, end_call, is_called
from .converted import names_of, residual_of
from .marker import mark_module
from .record import exchanged, rebuilt, stream_in, tensors_in
from .residual_stream import Pass, Stream, bare, under_way
from .spec import Part
from .stack_residual import StackResidual
from .structure import Structure


class Point:
    """Applies a scheme's changes at one point inside a block, by a hook before or after the linear layer at `path`.
    `is_before`: whether the hook runs before it. `columns`: the columns of its output that are changed (None: all).
    `d_head`: the width of a head, for changes that treat heads separately; 0: no change does.

    The hook is on the module now at `path`. If PEFT has put an adapter around the linear layer, it is on the adapter,
    since the changes apply to the adapted layer's input or output.
    """

    def __init__(
        self,
        block: Any,
        path: str,
        is_before: bool,
        changes: Sequence[Change],
        columns: Sequence[int] | None = None,
        d_head: int = 0,
    ) -> None:
        self.block, self.path, self.changes, self.d_head = block, path, tuple(changes), d_head
        self.is_before = is_before
        self.hooked: nn.Module | None = None
        self.columns = None if columns is None else [*columns]
        # adjacent columns are taken as a slice [first:end]; others need an index tensor on each device
        is_range = columns is not None and [*columns] == [*range(columns[0], columns[-1] + 1)]
        self.range = (columns[0], columns[-1] + 1) if is_range and columns is not None else None
        self.indices: dict[torch.device, Tensor] = {}
        self.put(block.get_submodule(path))

    def follow(self) -> None:
        """Moves the hook if another module has taken the linear layer's place."""
        module = self.block.get_submodule(self.path)
        if module is not self.hooked:
            self.remove()
            self.put(module)

    def put(self, module: nn.Module) -> None:
        """Registers the hook on a module."""
        self.hooked = module
        if self.is_before:
            module.register_forward_pre_hook(self.before)
        else:
            module.register_forward_hook(self.after)

    def remove(self) -> None:
        """Removes the hook."""
        module = self.hooked
        assert module is not None
        hooks: dict[int, Any] = module._forward_pre_hooks if self.is_before else module._forward_hooks
        # in a copy of the model, torch's handle would still refer to the original's hook, so the hook is found by the
        # object that it is bound to
        for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]:
            del hooks[key]
        self.hooked = None

    def before(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the linear layer's arguments with the first one, its input, changed. A hook before its call."""
        return self._change(args[0]), *args[1:]

    def after(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        """Returns the linear layer's output with the point's columns changed. A hook after its call."""
        if self.columns is None:
            return self._change(output)
        if self.range is not None:
            first, end = self.range
            x = self._change(output[..., first:end])
            is_whole = x.shape == output.shape
            return x if is_whole else torch.cat([output[..., :first], x, output[..., end:]], -1)
        if output.device not in self.indices:
            self.indices[output.device] = torch.tensor(self.columns, device=output.device)
        index = self.indices[output.device]
        return output.index_copy(-1, index, self._change(output.index_select(-1, index)).to(output.dtype))

    def _change(self, x: Tensor) -> Tensor:
        """Returns x after all changes. Norms of a head's width, and unit vectors, apply to each head by itself."""
        for change in self.changes:
            by_head = change.kind == "unit" or (change.kind == "norm" and change.what.width == self.d_head)
            by_head = by_head and self.d_head > 0
            x = x.unflatten(-1, (-1, self.d_head)) if by_head else x
            x = self._once(change, x)
            x = x.flatten(-2) if by_head else x
        return x

    def _once(self, change: Change, x: Tensor) -> Tensor:
        """Returns x after one change, which may keep a tensor for later changes, or use one that was kept."""
        # a tensor is kept until the block's forward ends
        residual, kept = residual_of(self.block), call_of(self.block)
        # the change mixes x with a tensor of an earlier layer
        if change.kind == "mix" and change.what.name in residual.place.spec.takes:
            # outside the block's call, but in a backward pass: a checkpoint inside the block runs this part again
            if not is_called(self.block) and torch._C._current_graph_task_id() != -1:
                raise InputError(
                    f"{residual.described()} computes a part again in the backward pass, where tensors of earlier "
                    "layers are gone: checkpoint the whole block"
                )
            kept.setdefault(change.what.name, x)  # if no earlier layer has kept this tensor, x stands for it
        return apply_changes(residual, (change,), x, padding_mask=None, kept=kept)


POINTS: dict[str, tuple[Role, str]] = {"after_heads": ("output", "before"), "after_output": ("output", "after")}
POINTS |= {"before_activation": ("fc1", "after"), "after_activation": ("fc2", "before")}
"""For each point inside a sublayer: the role of the linear layer with the hook, and the side that the hook is on."""
PROJECTIONS: tuple[Role, ...] = ("query", "key", "value")
"""Points at the outputs of attention's projections. Their names are the roles of the projections' rows."""


def projected(block: nn.Module, part: Part, role: Role, heads: int) -> tuple[str, list[int], int] | None:
    """Returns where an attention computes its queries, keys or values (`role`): the linear layer's path, the columns of
    its output that hold them, head by head, and the width of a head. None: several layers compute them, or a part's
    code reads the layer's weight without calling it, or a feed-forward adds its output to the same branch, or it is not
    known which head each column belongs to."""
    linears = [linear for linear in part.linears if role in linear.roles]
    if len(linears) != 1 or not linears[0].is_called or part.is_parallel:
        return None
    linear = linears[0]
    owner, weight, _ = projection(block, linear.path)
    rows = getattr(owner, weight).shape[1 if is_transposed(block, linear.path) else 0]
    index = linear.rows_of(role, rows)
    if linear.rows:
        row_heads = linear.heads(role)  # the head of each row
        sizes = {row_heads.count(head) for head in {*row_heads}}
        if None in row_heads or len(sizes) != 1:  # a row's head is unknown, or heads have different widths
            return None
        d_head = sizes.pop()
        index = [i for _, i in sorted(zip(row_heads, index))]  # sorted by head
    else:
        d_head = width_into(block, part, "output") // heads  # the output matrix reads all heads side by side
        # without known rows, each role must have an equal share of them, which holds whole heads
        if rows % len(linear.roles) or len(index) % d_head:
            return None
    return linear.path, index, d_head


class BlockResidual(Growing):
    """A residual scheme in another library's block. It has the scheme's parameters, and the norms that the block
    lacks.

    PEFT's `modules_to_save` replaces this module by a copy. Both refer to the same block, and the block's attribute
    `residual` is the one in use.
    """

    place: Place

    def __init__(self, block: nn.Module, place: Place, structure: Structure, stack: StackResidual) -> None:
        super().__init__()
        like = like_of(block)
        factory = {"device": like.device, "dtype": like.dtype}
        # Block and stack are kept in tuples, so that torch does not register them as children: their parameters are not
        # this module's.
        self._block, self._stack = (block,), (stack,)
        self.place, self.structure, self.parts = place, structure, structure.parts
        pairs = zip(self.parts, place.sublayers, strict=True)
        self.sublayers = tuple(_local(block, part, sublayer, place.config) for part, sublayer in pairs)
        # the block's norms that the scheme uses, name in the scheme → path: those that stay there, and those that move
        self.paths, self.moved = norms_of(self.parts, self.sublayers)
        self.opening = place.spec.begin  # the changes at the layer's begin
        # whether changes keep tensors for later ones: outside the sublayers' branches, and inside them
        self.passes = passes((*self.opening, *(change for s in self.sublayers for change in s.outside)))
        self.passes_inside = any(passes(changes) for s in self.sublayers for changes in s.inside.values())
        self.points: tuple[Point, ...] = ()
        install(self, self._declared(), place, factory=factory)
        move_on()  # so that modules whose parameters are drawn next get other random numbers
        mark_module(self, f"scheme_{place.config.residual}", like.device)
        self.train(block.training)
        self.grow(None, like.device)  # None: the stack's module counts the updates t, not this one

    def _declared(self) -> list[NormAt | Learned]:
        """Returns the scheme's norms and parameters that the block itself lacks."""
        declared = [*parts_of(self.opening), *(what for s in self.sublayers for what in (*s.around(), *s.within()))]
        return [what for what in declared if what.name not in self.paths and what.name not in self.moved]

    def reset_parameters(self) -> None:
        """Resets the scheme's norms, gains and step count t."""
        reset(self, self._declared())
        move_on()
        self.reset_growth()

    def __getattr__(self, name: str) -> Any:
        # norms that stay in the block are attributes of this module, too, under the scheme's names; `paths` is missing
        # while the constructor runs
        paths = self.__dict__.get("paths", {})
        return self._block[0].get_submodule(paths[name]) if name in paths else super().__getattr__(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "BlockResidual":
        if not memo:  # this module alone is copied, not a model: the copy refers to the same block and stack
            memo |= {id(shared): shared for shared in (*self._block, *self._stack, *self.points)}
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__dict__, memo))
        return new

    def watched(self) -> Iterator[nn.Parameter]:
        """Returns the block's parameters, since t counts the updates of these."""
        return self._block[0].parameters()

    def uses(self, path: str) -> bool:
        """Returns whether the block's norm at that path stays there because the scheme calls it. A twin (the norm of a
        parallel branch) stays if the scheme has a norm before that sublayer."""
        if path in self.paths.values():
            return True
        number = next((i for i, part in enumerate(self.parts) if path in part.twins), None)
        return number is not None and only_norm(self.sublayers[number].before) is not None

    def described(self) -> str:
        """Returns the block's layer number and class for messages."""
        return f"layer {self.place.layer}, a {type(self._block[0]).__name__},"

    @torch.no_grad()
    def take_scales(self) -> None:
        """Copies the block's LayerScale vectors into the scheme's learned β, for sublayers that have both in the same
        shape."""
        for part, sublayer in zip(self.parts, self.sublayers):
            if isinstance(sublayer.beta, Learned) and len(part.scales) == 1:
                (scale,), beta = self.module_at(part.scales[0]).parameters(), self.get_parameter(sublayer.beta.name)
                if scale.shape == beta.shape:
                    beta.copy_(scale)

    def kept_widths(self) -> dict[str, int]:
        """Returns the widths of the tensors that changes at queries, keys and values keep: their name → width."""
        widths: dict[str, int] = {}
        for part, sublayer in zip(self.parts, self.sublayers):
            for point, changes in sublayer.inside.items():
                names = [change.what for change in changes if change.kind == "keep"]
                if point in PROJECTIONS:
                    projection_found = projected(self._block[0], part, point, self.place.config.heads)
                    if projection_found is not None:
                        _, columns, _ = projection_found
                        widths |= dict.fromkeys(names, len(columns))
        return widths

    def reach_inside(self) -> Iterator[Point]:
        """Registers hooks on the block's linear layers for the changes inside sublayers; yields their points."""
        block = self._block[0]
        for part, sublayer in zip(self.parts, self.sublayers):
            for where, changes in sublayer.inside.items():
                if where == "input":  # `read` applies these changes, so they need no hook
                    continue
                if where in PROJECTIONS:
                    projection_found = projected(block, part, where, self.place.config.heads)
                    assert projection_found is not None  # refusals.py has refused blocks for which it is None
                    path, columns, d_head = projection_found
                    point = Point(block, path, is_before=False, changes=changes, columns=columns, d_head=d_head)
                else:
                    role, when = POINTS[where]
                    path = path_of(block, part, role)
                    point = Point(
                        block, path, is_before=when == "before", changes=changes, columns=_columns(part, path, role)
                    )
                self.points += (point,)
                yield point

    def follow_calls(self) -> list[Any]:
        """Registers hooks around the block's calls if the scheme keeps tensors during a call; returns their
        handles."""
        if not self.passes:
            return []
        block = self._block[0]
        calls = BlockCalls(block)
        return [
            block.register_forward_pre_hook(calls.begin, prepend=True),
            block.register_forward_hook(calls.end, always_call=True),
        ]

    def enter(self, x: Tensor, layer: int, begins: bool) -> Streams:
        """Returns the layer's streams for the hidden state x that it receives. `layer`: its number in this call;
        `begins`: whether the stack begins with it."""
        streams = self._stack[0].open(x, layer, begins)
        for point in self.points:
            point.follow()
        if self.passes_inside:
            # A `Point`, which is a hook inside the block, gets no streams: `_once` looks for kept tensors in the
            # dictionary of the block's call. That one takes over what the streams keep, and then serves both.
            begin_call(self._block[0]).update(streams.kept or {})
            streams = streams._replace(kept=call_of(self._block[0]))
        return streams._replace(x=apply_changes(self, self.opening, streams.x, padding_mask=None, kept=streams.kept))

    def leave(self, streams: Streams, layer: int) -> Tensor:
        """Returns the hidden state that the layer passes on. `layer`: the layer's number in this call."""
        y = self._stack[0].close(streams, layer)
        if self.passes_inside:
            end_call(self._block[0])
        return y

    # `run_on_stream` calls the methods below. LoopResidual has the same ones, for a forward that runs through layers.

    def layer_of(self, i: int) -> tuple["BlockResidual", int]:
        """Returns the layer that sublayer i belongs to, here always this one, and the sublayer's number there."""
        return self, i

    def place_in(self, x: Tensor) -> tuple[int, bool]:
        """Returns the number of the layer that x enters, and whether the stack begins with it."""
        is_shared = self.structure.calls > 1  # several layers share the block
        return self._stack[0].number(x, self.place.layer, is_shared)

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns `forward(*args, **kwargs)`, the output of the block's own forward, with the scheme."""
        return run_on_stream(self, names_of(self._block[0]), forward, args, kwargs)

    def read(self, i: int, streams: Streams, norm: nn.Module | None) -> Tensor:
        """Returns the tensor that sublayer i reads. `norm`: the block's own norm, if the sublayer reads through one."""
        part, sublayer = self.parts[i], self.sublayers[i]
        if norm is None and part.before is not None:  # the block reads x itself here, and N(x) elsewhere
            return streams.x if streams.read is None else streams.read
        owner: Any = self
        # A parallel branch with a norm of its own reads through that one. N(x) in `streams.normed`, if a fused step has
        # computed it, is the scheme's norm's, and must not be used.
        if norm is not None and any(self.module_at(path) is norm for path in part.twins):
            main = only_norm(sublayer.before)
            owner = self if main is None else _Through(self, main.name, norm)
            streams = streams._replace(normed=None)
        x = begin(owner, sublayer, streams, padding_mask=None)
        return apply_changes(self, sublayer.inside.get("input", ()), x, padding_mask=None)

    def write(self, i: int, streams: Streams, f: Tensor, following: int | None) -> Streams:
        """Returns the streams after sublayer i has added its branch f. `following`: the next sublayer's number; None:
        there is none."""
        dropout = self._modules.get(f"dropout{i + 1}") or nn.Dropout(0.0)  # the block's dropout, if it has moved here
        # one fused step also computes the next sublayer's N(x⁺), if that sublayer has one norm and reads x⁺ alone
        fusible = None if following is None or self.parts[following].twins else self.sublayers[following]
        next_norm = None if fusible is None or fusible.mixing is not None else only_norm(fusible.before)
        streams = self._closed(i, streams, f, dropout, next_norm)
        return streams if following is None else open_streams(self, self.sublayers[following], streams)

    def _closed(self, i: int, streams: Streams, f: Tensor, dropout: nn.Module, following: NormAt | None) -> Streams:
        """Returns the streams after sublayer i has added its branch f. `following`: the next sublayer's norm, which the
        same fused step computes; None: it does not."""
        alpha_t = self._stack[0].grown(self.place.layer)
        if self.parts[i].beta != 1.0:  # undo the block's own factor on the branch: the scheme has its own
            f = f / self.parts[i].beta
        draw = Draw(f.device)  # gives the dropout's random numbers
        return close(self, self.sublayers[i], streams, f, dropout, draw, following=following, alpha_t=alpha_t)

    def stands_before(self, norm: nn.Module, stream: Stream) -> bool:
        """Returns whether the sublayer under way reads the stream through this norm of the block. If not, the norm
        stands after a sublayer."""
        run = stream.under_way
        if stream.written >= len(run.writes):
            return False
        part = self.parts[run.writes[stream.written]]
        return any(self.module_at(path) is norm for path in (part.before, *part.twins) if path is not None)

    def module_at(self, path: str) -> nn.Module:
        """Returns the block's module at a path."""
        return self._block[0].get_submodule(path)

    # The converted forward of a registered class calls `step` for each sublayer.

    def step(
        self, i: int, x: Tensor, function: Callable[[Tensor], Any], dropout: nn.Module | float | None = None
    ) -> Any:
        """Returns x⁺ of sublayer i, with F = `function`. The first sublayer's step also begins the layer, the last
        one's ends it. If F returns a tuple, its first item is F(x), and the result is a tuple of x⁺ and the other
        items. `dropout`: a module or a rate; None: the one that the sublayer's `Part` names."""
        stack = self._stack[0]
        if i == 0:
            for point in self.points:
                point.follow()
            kept = begin_call(self._block[0]) if self.passes else {}
            _, begins = stack.number(x, self.place.layer, is_shared=False)
            x = stack.open(x, self.place.layer, begins).x
            x = apply_changes(self, self.opening, x, padding_mask=None, kept=kept)
        else:
            kept = call_of(self._block[0]) if self.passes else {}
        sublayer: Sublayer = self.sublayers[i]
        streams = Streams(x, kept=kept)
        normed = begin(self, sublayer, streams, padding_mask=None)
        output = function(apply_changes(self, sublayer.inside.get("input", ()), normed, padding_mask=None))
        f, *rest = output if isinstance(output, tuple) else (output,)
        # a dropout that moved here comes first, then the caller's, then the one that the block's `Part` names
        dropout_name = self.parts[i].dropout
        if self.parts[i].moves is not None:
            dropout = self._modules[f"dropout{i + 1}"]
        elif dropout is None and dropout_name is not None:
            dropout = getattr(self._block[0], dropout_name)
        if not isinstance(dropout, nn.Module):
            dropout = nn.Dropout(dropout or 0.0).train(self.training)
        streams = self._closed(i, streams, f, dropout, following=None)
        x = streams.x
        if i + 1 == len(self.sublayers):
            if self.passes:
                end_call(self._block[0])
            x = stack.close(streams, self.place.layer)
        return (x, *rest) if isinstance(output, tuple) else x

    def extra_repr(self) -> str:
        return f"{self.place.config.residual!r}, layer {self.place.layer} of {self.place.depth}"


def run_on_stream(
    owner: Any, names: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Returns the output of a block's own `forward(*args, **kwargs)`, run on a residual stream with a scheme. `owner`:
    a `BlockResidual` or `LoopResidual`; `names`: the names of the forward's arguments, in order."""
    x = stream_in((args, kwargs))
    if x is None:
        raise InputError(f"{owner.described()} got no tensor with rows to be its residual stream")
    given = dict(zip(names, args, strict=False)) | kwargs
    # the block skips its cross-attentions, and their additions, if the call passes no encoder's output
    left_out = {i for i, part in enumerate(owner.parts) if part.memory and given.get(part.memory) is None}
    # the sublayer that each addition belongs to
    writes = tuple(i for i in owner.structure.writes if i not in left_out)
    run = Pass(owner, writes, owner.structure)
    stream, layer = started(owner, x, run)
    # the forward gets the stream in place of x; the stream replaces the block's additions by the scheme's
    args, kwargs = exchanged(args, x, stream), exchanged(kwargs, x, stream)
    with under_way(run):
        out = forward(*args, **kwargs)
    run.end()
    if run.became is not None:
        branch, stream_after = run.became  # the block may return the branch, to which it added the stream in place
        out = exchanged(out, branch, stream_after)
    last = next((t for t in tensors_in(out) if isinstance(t, Stream)), None)
    y = finished(owner, last, run, layer)
    return out if last is None else _without_streams(out, last, y)


def started(owner: Any, x: Tensor, run: Pass) -> tuple[Stream, int]:
    """Returns the stream of a call that begins with x, and the number of the layer that it enters."""
    rows = x.movedim(1, -1) if owner.structure.has_channels_first else x
    layer, begins = owner.place_in(x)
    first_layer, i = owner.layer_of(run.writes[0])
    streams = open_streams(first_layer, first_layer.sublayers[i], first_layer.enter(rows, layer, begins))
    read = streams.x if streams.read is None else streams.read  # the tensor that the first sublayer reads
    return Stream.of(run.shown(read), run, streams, written=0, parallel=None, shape=read.shape), layer


def finished(owner: Any, last: Stream | None, run: Pass, layer: int) -> Tensor:
    """Returns the plain tensor in place of `last`, the stream after a call's last addition. Errors: InputError if there
    is none, or if additions are missing."""
    if last is None or last.written != len(run.writes):
        done = 0 if last is None else last.written
        raise InputError(
            f"{owner.described()} went another way than in the run that it was swapped by: {done} of its "
            f"{len(run.writes)} additions closed a sublayer (chunked feed-forwards and fused paths do that): switch "
            "that off, or undo() the swap"
        )
    return run.shown(owner.leave(last.streams, layer))


class _Through:
    """Wraps a BlockResidual so that its attribute `name` is the module `norm`. Functions of the interpreter, which read
    norms from it by name, then use that norm."""

    def __init__(self, residual: BlockResidual, name: str, norm: nn.Module) -> None:
        self._residual, self._name, self._norm = residual, name, norm

    def __getattr__(self, name: str) -> Any:
        return self._norm if name == self._name else getattr(self._residual, name)


def _columns(part: Part, path: str, role: Role) -> list[int] | None:
    """Returns the columns of the output of the linear layer at `path` that have that role. None: all."""
    linear = next(linear for linear in part.linears if linear.path == path)
    return linear.rows_of(role, 0) if linear.rows else None  # 0: the size is not read if the layer lists its rows


def _without_streams(value: Any, last: Stream, y: Tensor) -> Any:
    """Returns a block's output with plain tensors instead of streams: `y` for the stream `last`."""
    if isinstance(value, Stream):
        return y if value is last else bare(value)
    if not any(isinstance(t, Stream) for t in tensors_in(value)):
        return value
    return rebuilt(value, lambda item: _without_streams(item, last, y))


def norms_of(parts: Sequence[Part], sublayers: Sequence[Sublayer]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the block's norms that serve as the scheme's norms: name in the scheme → path in the block. The first
    dictionary has those that stay in place, the second those that act on a branch and move to the residual."""
    stay: dict[str, str] = {}
    move: dict[str, str] = {}
    for part, sublayer in zip(parts, sublayers):
        own: dict[str, str | None] = {"before": part.before, "after": part.after, "branch": part.branch}
        if not any(own.values()) and part.norm is not None:
            own["before"] = part.norm  # a registered class names its norm without saying where it stands
        unmatched = []  # the scheme's norms for which the block has none at the same place
        for where in ("before", "after", "branch"):
            names = [what.name for what in parts_of(getattr(sublayer, where)) if isinstance(what, NormAt)]
            if names and (path := own[where]) is not None:
                (move if where == "branch" else stay)[names.pop(0)] = path
                own[where] = None
            unmatched += names
        for where, path in own.items():  # the block's remaining norms serve for those, whatever their places
            if path is not None and unmatched:
                (move if where == "branch" else stay)[unmatched.pop(0)] = path
    return stay, move


def _local(block: nn.Module, part: Part, sublayer: Sublayer, config: TransformerConfig) -> Sublayer:
    """Returns the sublayer adapted to a block. Dots in names become underscores, since one module holds all parts:
    self_attn.inner_norm becomes self_attn_inner_norm. A norm after the heads gets the heads' joint width, which in T5
    need not be d_model. A norm of queries, keys or values gets the width of these, or of one head.
    """
    d_model, heads = config.d_model, config.heads

    def flat(point: str, change: Change) -> Change:
        """Returns a change at a point inside the sublayer, with the block's names and widths."""
        change = renamed(change, lambda name: name.replace(".", "_"))
        if not isinstance(change.what, NormAt):
            return change
        if point == "after_heads":
            return change._replace(what=change.what._replace(width=width_into(block, part, "output")))
        projection_found = projected(block, part, point, heads) if point in PROJECTIONS else None
        if projection_found is None:
            return change
        _, columns, d_head = projection_found
        by_head = change.what.width == d_model // heads and heads > 1  # the scheme declared it for one head
        return change._replace(what=change.what._replace(width=d_head if by_head else len(columns)))

    inside = {point: tuple(flat(point, change) for change in changes) for point, changes in sublayer.inside.items()}
    return sublayer._replace(inside=inside)
