"""Applies residual schemes to modules whose forward loops over all layers and adds the branches itself, as in
x-transformers and vit-pytorch. Their list holds attentions and feed-forwards instead of blocks.

The forward runs on a residual stream as a block's does, and each of its layers has a `BlockResidual`. A layer is
represented by a view: a shallow copy of the module with the loop, whose structure has only that layer's sublayers.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ..errors import InputError
from ..nn.interpreter import Streams, open_streams
from .block_residual import BlockResidual, run_on_stream
from .blocks import STRUCTURES
from .converted import names_of, residual_of
from .residual_stream import Stream
from .stack_residual import StackResidual
from .structure import Structure, Unaccounted


def layers_of(structure: Structure) -> tuple[list[Structure], str | None]:
    """Returns the structures of a loop's layers, and the path of the norm after the last layer (None: there is none). A
    layer is the shortest sequence of kinds of sublayers whose repetition gives the loop. `structure`: that of the
    module with the loop, whose sublayers are those of all layers. Errors: Unaccounted."""
    parts, end = structure.parts, None
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
    if structure.has_channels_first or structure.calls > 1:
        raise Unaccounted("a loop over images, or one that a model runs several times, is not known")
    parts_of_layers = [parts[i : i + layer_size] for i in range(0, len(parts), layer_size)]
    return [
        structure._replace(parts=layer_parts, writes=tuple(range(layer_size)), loop=structure.writes)
        for layer_parts in parts_of_layers
    ], end


def views(owner: nn.Module, structures: Sequence[Structure]) -> list[nn.Module]:
    """Returns a view of `owner`, the module with the loop, for each layer's structure."""
    made = []
    for structure in structures:
        view = copy.copy(owner)
        STRUCTURES[view] = structure
        made.append(view)
    return made


class LoopResidual(nn.Module):
    """A residual scheme in a module whose forward runs through the layers of a stack. Sublayers are numbered across the
    layers. `owner`: the module; `layers`: the scheme in each layer; `stack`: its parts for the whole stack; `end`: the
    path of the norm after the last layer, or "" if there is none."""

    def __init__(self, owner: nn.Module, layers: Sequence[BlockResidual], stack: StackResidual, end: str = "") -> None:
        super().__init__()
        self._owner, self.end = (owner,), end  # a tuple, so that torch does not register the owner as a child
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
        names = names_of(self._owner[0])
        return run_on_stream(self, names, forward, args, kwargs)

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
