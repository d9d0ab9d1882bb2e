"""What reads a norm, and what writes the stream that norms read, found by one run of a model.

For `fold_norms` and exact swaps where blocks are not declared: a norm whose outputs only linear layers read can be
folded into them; LayerNorms that read sums of what linear layers and embeddings write can be RMSNorms once these are
centred.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InputError
from .examples import caller, failed_on, quietly
from .probe import RecognisedNorm
from .proof import difference
from .record import ADDITIONS, UNCHANGED, Key, Node, Record, each_once, record, tensors_in
from .stream import Matrix, Places, Site, find_faults, join

_PASSES = UNCHANGED | {"dropout", "drop_path", "expand", "repeat", "cat", "roll", "clamp"}
"""Operations after which a vector of mean 0 has mean 0, if they keep the last dimension."""
_MOVES = frozenset(
    {"flatten", "transpose", "transpose_last", "permute", "view", "reshape", "contiguous", "unflatten", "__getitem__"}
)
"""What may stand between a convolution and rows of its channels."""


class Stranger(Exception):
    """What stands in the way, in words."""


class Writer(NamedTuple):
    """A module or a parameter whose output is added to the stream; by its path."""

    name: str
    module: nn.Module
    leaf: str | None
    """The parameter's name in the module."""


class Flow:
    """A model's run, read from its norms outwards."""

    def __init__(self, model: nn.Module, run: Callable[[], Any], places: Places) -> None:
        self.places, self.model, self.run = places, model, run
        with quietly(model):
            model.eval()
            self.found: Record = record(model, (), run)
        self.readers: dict[Key, list[Node]] = {}
        for node in self.found.nodes:
            for at in dict.fromkeys(node.inputs):
                self.readers.setdefault(at, []).append(node)
        own = (
            (module, leaf, t)
            for module in model.modules()
            for leaf, t in (*module._parameters.items(), *module._buffers.items())
        )
        self.held = {id(t): (module, leaf) for module, leaf, t in own if t is not None}

    @classmethod
    def of(cls, model: nn.Module, example: Any, places: Places) -> "Flow | None":
        """None: no input is known, or the model does not take it. InputError: it does not take `example`."""
        run = caller(model, example)
        if run is None:
            return None
        try:
            return cls(model, run, places)
        except MemoryError:
            raise
        except Exception as reason:  # a model may raise anything
            if example is not None:
                raise failed_on(model, reason) from reason
            return None

    def outputs(self) -> list[Tensor]:
        """What the model computes in evaluation mode."""
        with quietly(self.model), torch.no_grad():
            self.model.eval()
            return [t.clone() for t in tensors_in(self.run()) if t.is_floating_point()]

    def check(self, before: list[Tensor], by: str) -> None:
        """InputError where the outputs have changed by more than rounding."""
        try:
            said = difference(before, self.outputs(), in_16_bits=0.3)  # folded weights are rounded anew
        except Exception as reason:  # a model may raise anything: one that reads the weight of a norm, say
            said = f"which then fails ({type(reason).__name__}: {reason})"
        if said is not None:
            raise InputError(
                f"{by} would change what {type(self.model).__name__} computes, {said}: nothing was changed"
            )

    def name(self, module: nn.Module) -> str:
        return min(self.places.modules[module])

    def calls(self, module: nn.Module) -> list[Node]:
        return [node for node in self.found.nodes if node.module is module]

    def norms(self, known: Mapping[nn.Module, Any]) -> list[nn.Module]:
        """Those that the run called, in its order."""
        called = (node.module for node in self.found.nodes if node.what == "norm")
        return [*dict.fromkeys(module for module in called if module is not None and module in known)]

    def only_read(self) -> dict[nn.Module, str]:
        """Norms that the run did not call, with the operation that read their parameters."""
        called = {node.module for node in self.found.nodes}
        readers: dict[int, Node] = {k[0]: node for node in self.found.nodes if node.module is None for k in node.inputs}
        found = {}
        for norm in (module for module, kind in self.found.kinds.items() if kind == "norm" and module not in called):
            node = next((readers[id(p)] for p in norm.parameters(recurse=False) if id(p) in readers), None)
            if node is not None:
                found[norm] = f"the model does not call it: the operation {node.what} reads its weight"
        return found

    # Forwards: who reads a norm.

    def sites(self, known: Mapping[nn.Module, RecognisedNorm]) -> dict[nn.Module, Site]:
        """Each norm with the linear layers that read it, or why nothing can be folded."""
        made: dict[nn.Module, Site] = {}
        sources: dict[nn.Module, set[nn.Module | None]] = {}
        for norm in self.norms(known):
            site = made[norm] = Site(names={*self.places.modules[norm]})
            try:
                linears = dict.fromkeys(linear for node in self.calls(norm) for linear in self._linears(node))
            except Stranger as reason:
                site.fault = str(reason)
                continue
            for linear in linears:
                sources.setdefault(linear, set()).add(norm)
                site.layers |= {*self.places.modules[linear]}
                axis = 1 if type(linear).__name__ == "Conv1D" else 0
                site.add([Matrix(self.name(linear), linear, "weight", "bias", axis)])
            if not linears:
                site.fault = "no linear layer reads it"
        for site in made.values():
            for matrix in site.readers:
                others = len(self.calls(matrix.owner)) > len(sources[matrix.owner]) or len(sources[matrix.owner]) > 1
                site.fault = site.fault or (f"{matrix.name} reads something else, too" if others else "")
        find_faults(made, self.places)
        return made

    def _linears(self, node: Node) -> Iterator[nn.Module]:
        """The linear layers that read what a norm has made. Errors: Stranger."""
        todo, width = [*node.outputs], node.made[0][-1:]
        for at in each_once(todo):
            if at in self.found.returned:
                raise Stranger("the model returns it")
            for reader in self.readers.get(at, ()):
                if reader.what == "linear" and reader.module is not None:
                    yield reader.module
                elif reader.what in UNCHANGED and all(size[-1:] == width for size in reader.made):
                    todo += reader.outputs
                elif reader.outputs[0] != at:
                    raise Stranger(f"{self._said(reader)} reads it, too")

    def _said(self, node: Node) -> str:
        if node.module is not None:
            return f"{self.name(node.module)}, a {type(node.module).__name__},"
        return f"the operation {node.what}"

    # Backwards and forwards: the stream between norms.

    def streams(
        self, known: Mapping[nn.Module, RecognisedNorm]
    ) -> tuple[dict[nn.Module, list[Writer]], dict[nn.Module, str]]:
        """LayerNorms that read nothing but what can be centred, each with its stream's writers; and the others, with
        the reason why not."""
        fit: dict[nn.Module, list[Writer]] = {}
        unfit: dict[nn.Module, str] = {}
        for norm in self.norms(known):
            if known[norm].computes != "layernorm":
                continue
            try:
                writers = {w: None for node in self.calls(norm) for w in self._stream(node.inputs[0], known)}
                fit[norm] = [*writers]
            except Stranger as reason:
                unfit[norm] = str(reason)
        return fit, unfit

    def _stream(self, start: Key, known: Mapping[nn.Module, RecognisedNorm]) -> list[Writer]:
        """The writers of all that is added up around a tensor. Errors: Stranger, for what a centred stream would
        change."""
        width = self._width(start)
        writers: dict[Writer, None] = {}
        todo = [start]
        for at in each_once(todo):
            if at in self.found.returned:
                raise Stranger("the model returns its residual stream without a norm")
            todo += self._sources(at, width, writers)
            for reader in self.readers.get(at, ()):
                norm = known.get(reader.module) if reader.what == "norm" and reader.module is not None else None
                if norm is not None and norm.computes == "layernorm":
                    continue
                keeps = reader.what in ADDITIONS | _PASSES or reader.factor is not None
                if not keeps or any(size[-1:] != (width,) for size in reader.made):
                    raise Stranger(f"{self._said(reader)} reads the residual stream")
                todo += [out for out in reader.outputs if out != at]
        return [*writers]

    def _width(self, at: Key) -> int:
        node = next(node for node in self.readers[at] if node.what == "norm")
        return node.shapes[node.inputs.index(at)][-1]

    def _sources(self, at: Key, width: int, writers: dict[Writer, None]) -> list[Key]:
        """What a tensor of the stream is made of: further tensors of the stream; writers are noted."""
        if at[0] in self.held:
            module, leaf = self.held[at[0]]
            writers[Writer(join(self.name(module), leaf), module, leaf)] = None
            return []
        number = self.found.made.get(at)
        if number is None:
            raise Stranger("the residual stream begins with an input of the model")
        node = self.found.nodes[number]
        if node.what in ("linear", "embedding", "scale", "norm") and node.module is not None:
            writers[Writer(self.name(node.module), node.module, None)] = None
            return []
        size = node.made[node.outputs.index(at)]
        if node.what in ADDITIONS | _PASSES or node.factor is not None:
            rows = [k for k, shape in zip(node.inputs, node.shapes) if shape[-1:] == (width,)]
            if size[-1:] == (width,) and len(rows) == len(node.inputs):
                return rows
        conv = self._convolution(node, width)
        if conv is None:
            raise Stranger(f"{self._said(node)} writes the residual stream")
        writers[Writer(self.name(conv), conv, None)] = None
        return []

    def _convolution(self, node: Node, width: int) -> nn.Module | None:
        """The convolution whose channels are the rows' columns."""
        while node.what in _MOVES and node.inputs and (number := self.found.made.get(node.inputs[0])) is not None:
            node = self.found.nodes[number]
        is_ours = node.what == "conv" and node.made[0][1] == width
        return node.module if is_ours else None
