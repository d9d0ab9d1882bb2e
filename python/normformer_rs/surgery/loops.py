"""Applies residual schemes to modules whose forward loops over all layers and adds the branches itself, as in
x-transformers and vit-pytorch. Their list holds attentions and feed-forwards instead of blocks.

The forward runs on a residual stream as a block's does, and each of its layers has a `BlockResidual`. A layer is
represented by a view: a shallow copy of the module with the loop, whose structure has only that layer's sublayers.

A forward that also embeds the tokens, or also computes logits, has a span: the stream begins with the output of one of
its modules, such as the embedding, and ends where another one reads it, such as the last norm.
"""

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..nn.interpreter import Streams, open_streams
from .block_residual import BlockResidual, finished, run_on_stream, started
from .blocks import LISTS, STRUCTURES
from .converted import names_of, residual_of
from .record import Call, Record, Span, exchanged, kind_of, tensors_in
from .residual_stream import RUNS, Followed, Pass, Stream, under_way
from .roles import Roles
from .stack_residual import StackResidual
from .structure import Structure, Unaccounted, structure


def layers_of(loop: Structure) -> tuple[list[Structure], str | None]:
    """Returns the structures of a loop's layers, and the path of the norm after the last layer (None: there is none). A
    layer is the shortest sequence of kinds of sublayers whose repetition gives the loop. `loop`: the structure of the
    module with the loop, whose sublayers are those of all layers. Errors: Unaccounted."""
    parts, end = loop.parts, None
    # if a norm follows only the last sublayer, it is the norm after the last layer
    if parts[-1].after is not None and all(part.after is None for part in parts[:-1]):
        end = parts[-1].after
        norm = parts[-1].before or parts[-1].branch  # the sublayer's own norm, now that `after` is the stack's
        parts = (*parts[:-1], parts[-1]._replace(after=None, norm=norm))
    kinds = [part.kind for part in parts]
    # the smallest n for which repeating the first n kinds gives all kinds
    layer_size = next(n for n in range(1, len(kinds) + 1) if kinds == (kinds[:n] * len(kinds))[: len(kinds)])
    # a layer has at most self-attention, cross-attention and a feed-forward
    if len(kinds) % layer_size or layer_size > 3:
        raise Unaccounted(f"its sublayers do not repeat, so that its layers are not known: {', '.join(kinds)}")
    if loop.has_channels_first or loop.calls > 1:
        raise Unaccounted("a loop over images, or one that a model runs several times, is not known")
    parts_of_layers = [parts[i : i + layer_size] for i in range(0, len(parts), layer_size)]
    if len({tuple((part.alpha, part.beta) for part in layer_parts) for layer_parts in parts_of_layers}) > 1:
        raise Unaccounted("its layers multiply the stream or their branches by different numbers")
    return [
        loop._replace(parts=layer_parts, writes=tuple(range(layer_size)), loop=loop.writes)
        for layer_parts in parts_of_layers
    ], end


_BEFORE = frozenset({"+", "*", "dropout", "to", "float", "contiguous"})
"""Kinds of the operations that may come between a module's output and the first tensor of a stream."""


def find_spans(model: nn.Module, run_record: Record) -> None:
    """Looks in a module's own forward for a loop, for each module in `run_record.blocks` that got no stream as an
    argument. Adds the loop's operations to the record as a call, and where its stream begins and ends as a span. All
    modules of the model's lists that belong to the module must run in that loop. `model`: the model of the record."""
    listed = {part for module in model.modules() if isinstance(module, LISTS) for part in module.modules()}
    counts = Counter(node.module for node in run_record.nodes)
    for owner in run_record.blocks - run_record.calls.keys():
        paths = {module: path for path, module in owner.named_modules()}
        calls = [(i, n.module) for i, n in enumerate(run_record.nodes) if n.module is not None and n.module in paths]
        layers = [i for i, module in calls if module in listed]
        around = [(i, module) for i, module in calls if module not in listed and counts[module] == 1]
        before = [(i, module) for i, module in around if i < min(layers, default=0)]
        after = [(i, module) for i, module in around if i > max(layers, default=len(run_record.nodes))]
        norms = [(i, module, True) for i, module in after if run_record.kinds[module] == "norm"]
        ends = [*norms[::-1], *((i, module, False) for i, module in reversed(after))]
        # the last beginning first, since a dropout in evaluation mode returns its input itself
        beginnings = [
            (first, maker, operations)
            for made, maker in reversed(before)
            for first, operations in reversed([*_beginnings(run_record, made, layers[0])])
        ]
        for (first, maker, operations), (read, reader, is_norm) in itertools.product(beginnings, ends):
            call = _between(run_record, first, read, is_norm)
            if call is None:
                continue
            run_record.calls[owner] = [call]
            if _is_loop(owner, run_record):
                run_record.spans[owner] = Span(paths[maker], operations, paths[reader], is_norm)
                break
            del run_record.calls[owner]


def _is_loop(owner: nn.Module, run_record: Record) -> bool:
    """Returns whether a module's call in the record is a loop over layers."""
    try:
        layers_of(structure(owner, run_record, Roles({})))
    except (Unaccounted, InputError):
        return False
    return True


def _beginnings(run_record: Record, made: int, until: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yields the position of each operation whose output may be a stream's first tensor, and the kinds of the
    operations that lead to it: first the call of a module at the position `made`, then the chain of operations that
    starts with its output. `until`: the position of the first layer."""
    operations: tuple[str, ...] = ()
    yield made, operations
    for i in range(made + 1, until):
        node, before = run_record.nodes[i], run_record.nodes[made]
        is_next = before.outputs[0] in node.inputs and node.module is None and kind_of(node.what) in _BEFORE
        if is_next and node.made[:1] == before.made[:1]:
            made, operations = i, (*operations, kind_of(node.what))
            yield made, operations


def _between(run_record: Record, first: int, last: int, is_norm: bool) -> Call | None:
    """Returns the operations after the position `first` as a call whose input x is the output at `first`. Its output y
    is the tensor that the operation at `last` reads; if that is the norm after the stack (`is_norm`), the call includes
    it, and y is its output. None: x and y have unlike shapes, the tensor that is read at `last` has other readers, or
    the model uses another tensor of the call after it."""
    nodes, reader = run_record.nodes, run_record.nodes[last]
    x, read, shape = nodes[first].outputs[0], reader.inputs[0], reader.shapes[0]
    made = {x} | {output for node in nodes[first + 1 : last] for output in node.outputs}
    used_later = {k for node in nodes[last + 1 :] for k in node.inputs} | run_record.returned
    is_alone = not made & (used_later | {*reader.inputs[1:]}) and sum(read in node.inputs for node in nodes) == 1
    if nodes[first].made[0] != shape or not is_alone:
        return None
    y, end = (reader.outputs[0], last + 1) if is_norm else (read, last)
    return Call(first + 1, end, x, shape, y, {})


def views(owner: nn.Module, structures: Sequence[Structure]) -> list[nn.Module]:
    """Returns a view of `owner`, the module with the loop, for each layer's structure."""
    made = []
    for layer in structures:
        view = copy.copy(owner)
        STRUCTURES[view] = layer
        made.append(view)
    return made


class LoopResidual(nn.Module):
    """A residual scheme in a module whose forward runs through the layers of a stack. Sublayers are numbered across the
    layers. `owner`: the module; `layers`: the scheme in each layer; `stack`: its parts for the whole stack; `end`: the
    path of the norm after the last layer, or "" if there is none; `span`: where its stream begins and
    ends, if that is within its forward."""

    def __init__(
        self,
        owner: nn.Module,
        layers: Sequence[BlockResidual],
        stack: StackResidual,
        end: str = "",
        span: Span | None = None,
    ) -> None:
        super().__init__()
        self._owner, self.end = (owner,), end  # a tuple, so that torch does not register the owner as a child
        self.span = span
        self.compiled_call: Pass | None = None
        """The call under way in compiled code, which does not see `RUNS`."""
        self.layers, self.stack = nn.ModuleList(layers), stack
        self.parts = tuple(part for layer in layers for part in layer.parts)
        self.size = len(layers[0].parts)
        """The number of sublayers in a layer."""
        self.structure = layers[0].structure._replace(parts=self.parts, writes=layers[0].structure.loop)

    def described(self) -> str:
        """Returns the module's name for messages."""
        return f"a {type(self._owner[0]).__name__}"

    def module_at(self, path: str) -> nn.Module:
        """Returns the module at a path of the module with the loop."""
        return self._owner[0].get_submodule(path)

    def layer_of(self, i: int) -> tuple[BlockResidual, int]:
        """Returns the layer that sublayer i belongs to, and the sublayer's number there."""
        layer: Any = self.layers[i // self.size]
        return layer, i % self.size

    def place_in(self, _: Tensor) -> tuple[int, bool]:
        """Returns the number of the layer that the loop's input enters, and whether the stack begins with it."""
        return 0, True

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the output of the module's own forward, with the scheme."""
        if self.span is None:
            return run_on_stream(self, names_of(self._owner[0]), forward, args, kwargs)
        call = Pass(self, self.structure.writes, self.structure)
        if torch.compiler.is_compiling():
            self.compiled_call = call
            out = forward(*args, **kwargs)
            self.compiled_call = None
        else:
            with under_way(call):
                out = forward(*args, **kwargs)
        if not call.is_over or any(isinstance(t, Stream) for t in tensors_in(out)):
            raise InputError(
                f"{self.described()} went another way than in the run that it was swapped by: its residual stream runs "
                f"from the output of {self.span.begin} to {self.span.end}, and this call did not go there, or returned "
                "the stream itself: swap with an example that goes this way"
            )
        return out

    def begin_stream(self, _: nn.Module, __: Any, x: Tensor) -> Tensor | None:
        """Returns the stream that begins with x, or x followed through the span's operations. A hook after the call of
        the module at the span's begin. None: something else than the loop's forward calls that module. Errors:
        InputError if the stream has begun already."""
        calls = [self.compiled_call] if torch.compiler.is_compiling() else RUNS.under_way
        call = calls[-1] if calls else None
        if call is None or call.residual is not self or self.span is None:
            return None
        if call.has_begun:
            raise InputError(
                f"{self.described()} calls its {self.span.begin} twice, where its residual stream begins, unlike in "
                "the run that it was swapped by: run its forward once for each"
            )
        call.has_begun = True
        return Followed.of(x, self.span.operations, lambda x: started(self, x, call)[0])

    def end_stream(self, _: nn.Module, *given: Any) -> Any:
        """Replaces the stream among the tensors `given` by the stack's output. A hook before the call of the module at
        the span's end, with its arguments; after the call if that module is the norm after the stack: then its output
        comes last."""
        stream = next((t for t in tensors_in(given) if isinstance(t, Stream) and t.under_way.residual is self), None)
        if stream is None:
            return None
        stream.under_way.end()
        y = finished(self, stream, stream.under_way, 0)
        if self.span is not None and self.span.is_norm:
            return exchanged(given[-1], stream, y)
        return exchanged(given, stream, y)

    def hook_span(self) -> Iterator[Any]:
        """Registers hooks on the modules where the stream begins and ends; yields their handles."""
        if self.span is not None:
            first, last = (self._owner[0].get_submodule(path) for path in (self.span.begin, self.span.end))
            yield first.register_forward_hook(self.begin_stream)
            if self.span.is_norm:
                yield last.register_forward_hook(self.end_stream)
            else:
                yield last.register_forward_pre_hook(self.end_stream, with_kwargs=True)

    def read(self, i: int, streams: Streams, norm: nn.Module | None) -> Tensor:
        """Returns the tensor that sublayer i reads. `norm`: the module's norm, if the sublayer reads through one."""
        layer, number = self.layer_of(i)
        return layer.read(number, streams, norm)

    def write(self, i: int, streams: Streams, f: Tensor, following: int | None) -> Streams:
        """Returns the streams after sublayer i has added its branch f. `following`: the next sublayer's number. None:
        sublayer i is the last."""
        layer, number = self.layer_of(i)
        if following is not None and following // self.size == i // self.size:  # it is in the same layer
            return layer.write(number, streams, f, following % self.size)
        streams = layer.write(number, streams, f, None)
        if following is None:
            return streams
        # the next sublayer begins the next layer, so the streams leave this layer and enter that one
        next_layer, number = self.layer_of(following)
        streams = next_layer.enter(layer.leave(streams, i // self.size), following // self.size, begins=False)
        return open_streams(next_layer, next_layer.sublayers[number], streams)

    def leave(self, streams: Streams, _: int) -> Tensor:
        """Returns the loop's output from the streams after the last layer."""
        layer: Any = self.layers[-1]
        y = layer.leave(streams, len(self.layers) - 1)
        return self._owner[0].get_submodule(self.end)(y) if self.end else y

    def stands_before(self, norm: nn.Module, stream: Stream) -> bool:
        """Returns whether the sublayer under way reads the stream through this norm. If not, the norm stands after a
        sublayer."""
        run = stream.under_way
        if stream.written >= len(run.writes):  # all additions to the stream are made
            return False
        layer, i = self.layer_of(run.writes[stream.written])  # the sublayer of the next addition
        part = layer.parts[i]
        paths = (path for path in (part.before, *part.twins) if path is not None)
        return any(self._owner[0].get_submodule(path) is norm for path in paths)


def refuse_again(owner: nn.Module) -> None:
    """Raises InputError if a module with a loop already has a scheme of this package."""
    if isinstance(residual_of(owner), LoopResidual):
        raise InputError(
            f"{type(owner).__name__} has another residual scheme of normformer_rs already: take that swap back with "
            "its undo()"
        )
