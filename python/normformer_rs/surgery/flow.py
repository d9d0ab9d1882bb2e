"""Finds from a run of a model which modules read each norm's output, and which write the stream that norms read.

`fold_norms` and exact swaps need this. A norm can be folded into linear layers if only they read its output. A
LayerNorm can become an RMSNorm if its input is a sum of outputs of linear layers and embeddings, and these are centred.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import nn as nfnn
from ..errors import InputError
from ..nn.attention import INPUTS
from .blocks import stacked_rows
from .examples import caller, failed_on, quietly, refuse_without
from .probe import RecognisedNorm
from .proof import difference
from .record import ADDITIONS, RESIDUAL, TIMES, UNCHANGED, Key, Node, Record, each_once, key, record, tensors_in
from .stream import Matrix, Places, Site, disturbed, join

_PASSES = UNCHANGED | {"dropout", "drop_path", "expand", "repeat", "cat", "roll", "clamp"}
"""Operations that keep the mean of a vector at 0, if they keep its last dimension."""
_ATTENTIONS = (nn.MultiheadAttention.forward, nfnn.MultiheadAttention.forward)
"""The forwards of the attentions that may count as one operation."""
_MOVES = frozenset(
    {"flatten", "transpose", "transpose_last", "permute", "view", "reshape", "contiguous", "unflatten", "__getitem__"}
)
"""Operations that may come between a convolution's output and the rows whose columns are its channels."""


class Stranger(Exception):
    """Raised if a norm cannot be folded, or a residual stream cannot be centred; names the operation at fault."""


class Writer(NamedTuple):
    """A module whose output, or a parameter whose value, is added to the residual stream. `name`: its path."""

    name: str
    module: nn.Module
    leaf: str | None
    """The parameter's name in the module. None: the module's output is added."""


class Flow:
    """A recorded run of a model, with the readers and writers of each tensor."""

    def __init__(
        self, model: nn.Module, run: Callable[[], Any], places: Places, modes: tuple[bool, ...], whole: bool
    ) -> None:
        """Runs the model; the arguments are those of `of`, with `run` in place of an example."""
        self.places, self.model, self.run, self.modes = places, model, run, modes
        modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        attentions = [module for module in modules if whole and type(module).forward in _ATTENTIONS]
        self.found: Record = record(model, modules, self._runs, attentions)
        """The record of the runs."""
        self.readers: dict[Key, list[Node]] = {}
        """For each tensor, the operations that read it."""
        for node in self.found.nodes:
            for tensor in dict.fromkeys(node.inputs):
                self.readers.setdefault(tensor, []).append(node)
        held = (
            (module, leaf, t)
            for module in model.modules()
            for leaf, t in (*module._parameters.items(), *module._buffers.items())
        )
        self.held = {id(t): (module, leaf) for module, leaf, t in held if t is not None}
        """The identity of each parameter and buffer → its module and its name there."""
        # a key is (identity, version)
        self.raw = {k[0]: node for node in self.found.nodes if node.module is None for k in node.inputs}
        """The identity of a tensor → the last operation that read it outside a module that counts as one operation."""

    @classmethod
    def of(
        cls, model: nn.Module, example: Any, places: Places, modes: tuple[bool, ...] = (False,), whole: bool = False
    ) -> "Flow | None":
        """Runs the model and returns its flow. None: no input is known, or the model fails on it.

        Args:
            places: the names of the model's modules and tensors.
            modes: one run for each entry, in training mode if it is True.
            whole: if True, each attention of torch.nn and of this package counts as one operation.

        Errors: InputError if the model fails on `example`.
        """
        run = caller(model, example)
        if run is None:
            return None
        try:
            return cls(model, run, places, modes, whole)
        except (MemoryError, InputError):
            raise
        except Exception as reason:  # a model may raise anything
            if example is not None:
                raise failed_on(model, reason) from reason
            return None

    @classmethod
    def needed(cls, model: nn.Module, example: Any, places: Places, modes: tuple[bool, ...] = (False,)) -> "Flow":
        """Returns the flow as `of` does, with `whole=True`. Errors: InputError if the model cannot be run."""
        flow = cls.of(model, example, places, modes, whole=True)
        if flow is None:
            raise refuse_without(model, "no input is known that it takes")
        return flow

    def _runs(self) -> list[Any]:
        """Returns the model's results of one run in each mode."""
        returned = []
        for training in self.modes:
            with quietly(self.model), torch.no_grad():
                self.model.train(training)
                try:
                    returned.append(self.run())
                except Exception as reason:
                    if not training:
                        raise
                    kind, said = type(self.model).__name__, f"{type(reason).__name__}: {reason}"
                    raise InputError(
                        f"{kind} does not run in training mode ({said}), and what it computes there must stay, too: "
                        "pass example=, the arguments of a call that works"
                    ) from reason
        return returned

    def outputs(self) -> list[Tensor]:
        """Returns copies of the floating-point tensors that the model returns, over all modes."""
        return [t.clone() for t in tensors_in(self._runs()) if t.is_floating_point()]

    def check(self, before: list[Tensor], by: str) -> None:
        """Raises InputError if the outputs differ from `before` by more than rounding, in any mode. `by`: what changed
        the model, for the message."""
        try:
            # in 16 bits the fold rounds the weights once more, so 0.3 is allowed instead of 0.1
            fault = difference(before, self.outputs(), in_16_bits=0.3)
        except Exception as reason:  # a model may raise anything, for instance if it reads a norm's weight itself
            fault = f"which then fails ({type(reason).__name__}: {reason})"
        if fault is not None:
            raise InputError(
                f"{by} would change what {type(self.model).__name__} computes, {fault}: nothing was changed"
            )

    def name(self, module: nn.Module) -> str:
        """Returns a module's path, the alphabetically first if it has several."""
        return min(self.places.modules[module])

    def calls(self, module: nn.Module) -> list[Node]:
        """Returns the recorded calls of a module."""
        return [node for node in self.found.nodes if node.module is module]

    def norms(self, known: Mapping[nn.Module, Any]) -> list[nn.Module]:
        """Returns the norms of `known` that the run called, in the order of their first calls."""
        called = (node.module for node in self.found.nodes if node.what == "norm")
        return [*dict.fromkeys(module for module in called if module is not None and module in known)]

    def only_read(self) -> dict[nn.Module, str]:
        """Returns the norms that the run did not call although it read their parameters, each with a message that names
        the reading operation."""
        called = {node.module for node in self.found.nodes}
        norms = (module for module, kind in self.found.kinds.items() if kind == "norm" and module not in called)
        return {norm: f"the model does not call it: {said}" for norm in norms if (said := self._read_raw(norm))}

    def _read_raw(self, module: nn.Module) -> str:
        """Returns a message if an operation outside a module's own calls reads one of its parameters, else "". Folding
        would change that operation's result, too."""
        node = next((self.raw[id(p)] for p in module.parameters(recurse=False) if id(p) in self.raw), None)
        return "" if node is None else f"the operation {node.what} reads its weight"

    def formulas(self) -> Iterator[tuple[str, nn.Module, str]]:
        """Yields the norms that are written as operations in a module's forward: the path of the innermost such module,
        the module, and a message."""
        values = {key(t): t for t in tensors_in(self.found.alive)}  # all tensors of the run
        # (number of operations, call, module), sorted so that the innermost of nested calls comes first
        spans = sorted(
            ((call.last - call.first, call, module) for module, calls in self.found.calls.items() for call in calls),
            key=lambda span: span[0],
        )
        norming: dict[nn.Module, str] = {}  # innermost module → the operation in its forward that norms
        # operations that read the parameters of an uncalled norm are left out: `only_read` reports them
        reported = {id(p) for norm in self.only_read() for p in norm.parameters(recurse=False)}
        for number, node in enumerate(self.found.nodes):
            if node.module is None and reported.isdisjoint(k[0] for k in node.inputs) and _norms_rows(node, values):
                inside = (module for _, call, module in spans if call.first <= number < call.last)
                norming.setdefault(next(inside, self.model), node.what)
        for module, what in norming.items():
            yield self.name(module), module, f"the operation {what} in its forward norms rows, and no module does"

    def check_calls(self, exchanged: Mapping[nn.Module, nn.Module], by: str) -> None:
        """Runs the model after a swap. Raises InputError if it still calls an old norm, or calls the new one less
        often. `exchanged`: old norm → new norm; `by`: the swap's title, for messages."""
        calls: dict[nn.Module, int] = {}

        def count(module: nn.Module, _: Any) -> None:
            calls[module] = calls.get(module, 0) + 1

        with contextlib.ExitStack() as hooks:
            for new in {*exchanged.values()}:  # hooks on a new norm also run on the old one: the two share them
                hooks.callback(new.register_forward_pre_hook(count).remove)
            try:
                self._runs()
            except Exception as reason:  # a model may raise anything
                kind, said = type(self.model).__name__, f"{type(reason).__name__}: {reason}"
                raise InputError(f"{kind} does not run with {by} ({said}): nothing was changed") from reason
        for old, new in exchanged.items():
            if old in calls or calls.get(new, 0) < len(self.calls(old)):
                raise InputError(
                    f"{type(self.model).__name__} goes on calling {self.name(old)}, a {type(old).__name__}, by another "
                    "name than that, such as out of a list or a closure, where no swap reaches it: have the forward "
                    "call it by its name"
                )

    # The methods below go forwards, from norms to the layers that read them.

    def sites(self, known: Mapping[nn.Module, RecognisedNorm]) -> dict[nn.Module, Site]:
        """Returns for each norm a `Site`: the linear layers that read it, or the reason why nothing can be folded."""
        site_of: dict[nn.Module, Site] = {}
        sources: dict[Matrix, dict[int, nn.Module]] = {}
        """For each linear layer that reads a norm: the identity of a call's `Node` → the norm that the call reads."""
        for norm in self.norms(known):
            site = site_of[norm] = Site({*self.places.modules[norm]}, self._read_raw(norm))
            try:
                read = [matrix_and_call for node in self.calls(norm) for matrix_and_call in self._linears(node)]
            except Stranger as reason:
                site.fault = str(reason)
                continue
            for matrix, call in read:
                sources.setdefault(matrix, {})[call] = norm
            site.readers = [*dict.fromkeys(matrix for matrix, _ in read)]
            site.fault = site.fault if read else "no linear layer reads it"
        for norm, site in site_of.items():
            faults = self._faults(site, sources, known[norm].bias is not None)
            site.fault = site.fault or next(filter(None, faults), "")
        return site_of

    def _faults(self, site: Site, sources: Mapping[Matrix, Mapping[int, nn.Module]], has_bias: bool) -> Iterator[str]:
        """Yields the reasons why a norm cannot be folded into the linear layers that read it; empty strings do not
        count. `site`: the norm's, with its readers; `sources`: as in `sites`; `has_bias`: whether the norm has a bias,
        which is folded into the layers' biases."""
        layers = {name for matrix in site.readers for name in self.places.modules[matrix.owner]}  # all their names
        for matrix in site.readers:
            name, owner, norm_of_call = matrix.name, matrix.owner, sources[matrix]
            # some call of the layer reads no norm, or its calls read several norms
            reads_others = len(self.calls(owner)) > len(norm_of_call) or len({*norm_of_call.values()}) > 1
            yield f"{name} reads something else, too" if reads_others else ""
            read_elsewhere = self._read_raw(owner)
            yield f"{name} is called, and {read_elsewhere}" if read_elsewhere else ""
            yield self._merged(name, owner) if has_bias and matrix.offsets() is None else ""
        tied = self.places.tied(site.readers)
        yield f"{tied} shares a parameter with another layer" if tied else ""
        for matrix in site.readers:
            yield matrix.fault()
            other = self.places.beyond(matrix, layers)
            yield f"{matrix.name} shares a parameter with {other}" if other else ""

    def _linears(self, node: Node) -> Iterator[tuple[Matrix, int]]:
        """Yields the linear layers that read the output of a norm's call, each with the identity of the reading call.
        Errors: Stranger if anything else reads the output."""
        todo, columns = [*node.outputs], node.made[0][-1:]  # the last dimension of the norm's output, as a tuple
        for tensor in each_once(todo):  # the loop appends tensors that still hold the norm's columns
            if tensor in self.found.returned:
                raise Stranger("the model returns it")
            for reader in self.readers.get(tensor, ()):
                is_identity = reader.what == "dropout" and getattr(reader.module, "p", None) == 0
                if reader.what == "linear" and reader.module is not None:
                    # the dimension of the weight that counts the outputs
                    axis = 1 if type(reader.module).__name__ == "Conv1D" else 0
                    yield Matrix(self.name(reader.module), reader.module, "weight", "bias", axis), id(reader)
                elif projections := self._projections(reader, tensor):
                    yield from ((matrix, id(reader)) for matrix in projections)
                elif (is_identity or reader.what in UNCHANGED) and all(shape[-1:] == columns for shape in reader.made):
                    todo += reader.outputs
                elif reader.outputs[0] != tensor:  # an operation that returns this very tensor does not use its numbers
                    raise Stranger(f"{self._described(reader)} reads it, too")

    def _projections(self, reader: Node, tensor: Key) -> list[Matrix]:
        """Returns the matrices of the attention `reader` that read `tensor`: those of queries, keys and values, and of
        the output gate. Empty if `reader` is no attention, or if a scheme changes the attention's inputs first."""
        owner: Any = reader.module
        if reader.what != "attention" or owner.in_proj_weight is None or _changes(owner, "input", *INPUTS):
            return []
        stacked = Matrix(self.name(owner), owner, "in_proj_weight", "in_proj_bias", 0)
        shares = stacked_rows(owner)
        # inputs 0, 1 and 2 are those of queries, keys and values; the output gate reads input 0, too
        matrices = [stacked._replace(share=shares[i]) for i in range(3) if reader.inputs[i] == tensor]
        gate = getattr(owner, "gate", None) if reader.inputs[0] == tensor else None
        return matrices if gate is None else [*matrices, Matrix(self.name(gate), gate, "weight", "bias", 0)]

    def _merged(self, name: str, linear: nn.Module) -> str:
        """Returns the reason why no bias can be added to a linear layer, or "". The reason is a module around it that
        only adds up linear layers, such as an adapter: merging their weights would lose the bias."""
        for module, calls in self.found.calls.items():
            for call in calls:
                inside = self.found.nodes[call.first : call.last]
                linears = {node.module for node in inside if node.what == "linear"}
                if linear in linears and len(linears) > 1 and all(map(_is_affine, inside)):
                    return f"{name} has no bias, and a merge of the {type(module).__name__} around it would lose one"
        return ""

    def _described(self, node: Node) -> str:
        """Returns the name of an operation or module for messages."""
        if node.module is not None:
            return f"{self.name(node.module)}, a {type(node.module).__name__},"
        return f"the operation {node.what}"

    # The methods below go backwards and forwards, to all writers and readers of the stream between norms.

    def streams(
        self, known: Mapping[nn.Module, RecognisedNorm]
    ) -> tuple[dict[nn.Module, list[Writer]], dict[nn.Module, str]]:
        """Returns the LayerNorms whose input can be centred, each with the writers of its stream, and the other
        LayerNorms, each with the reason why its input cannot be."""
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
        """Returns the writers of the stream that the tensor `start` belongs to. Errors: Stranger if a centred stream
        would change anything but LayerNorms' inputs, for instance the model's output."""
        width = self._width(start)
        writers: dict[Writer, None] = {}  # an ordered set
        todo = [start]
        for tensor in each_once(todo):  # the loop appends the tensors from which this one comes, and those made of it
            if tensor in self.found.returned:
                raise Stranger("the model returns its residual stream without a norm")
            todo += self._sources(tensor, width, writers)
            for reader in self.readers.get(tensor, ()):
                norm = known.get(reader.module) if reader.what == "norm" and reader.module is not None else None
                if norm is not None and norm.computes == "layernorm":
                    continue
                # sums, moves and multiplications by a number keep the mean of a row at 0, if its columns stay
                keeps = reader.what in ADDITIONS | _PASSES | {str(RESIDUAL)} or reader.factor is not None
                if not keeps or any(shape[-1:] != (width,) for shape in reader.made):
                    raise Stranger(f"{self._described(reader)} reads the residual stream")
                todo += [output for output in reader.outputs if output != tensor]
        return [*writers]

    def _width(self, tensor: Key) -> int:
        """Returns the number of columns of a tensor that a norm reads."""
        node = next(node for node in self.readers[tensor] if node.what == "norm")
        return node.shapes[node.inputs.index(tensor)][-1]

    def _sources(self, tensor: Key, width: int, writers: dict[Writer, None]) -> list[Key]:
        """Returns the tensors of the stream, of `width` columns, that `tensor` is computed from. If `tensor` is a
        parameter or a module's output instead, adds that to `writers`, and returns nothing. Errors: Stranger if
        anything else computes it."""
        if tensor[0] in self.held:
            module, leaf = self.held[tensor[0]]
            writers[Writer(join(self.name(module), leaf), module, leaf)] = None
            return []
        number = self.found.made.get(tensor)
        if number is None:
            raise Stranger("the residual stream begins with an input of the model, or in a swapped block")
        node = self.found.nodes[number]
        if node.what in ("linear", "embedding", "scale", "norm") and node.module is not None:
            writers[Writer(self.name(node.module), node.module, None)] = None
            return []
        # an attention counts as one operation, whose output matrix writes the stream unless a scheme acts after it
        if node.what == "attention" and node.outputs[0] == tensor and not _changes(node.module, "after_output"):
            attention: Any = node.module
            if said := disturbed(self.name(attention), attention):
                raise Stranger(said)
            writers[Writer(self.name(attention.out_proj), attention.out_proj, None)] = None
            return []
        made_shape = node.made[node.outputs.index(tensor)]
        # with two arguments, the residual operator is an addition
        is_sum = node.what in ADDITIONS or (node.what == str(RESIDUAL) and len(node.inputs) == 2)
        if is_sum or node.what in _PASSES or node.factor is not None:
            operands = [k for k, shape in zip(node.inputs, node.shapes) if shape[-1:] == (width,)]
            # an operand of another width, such as one column, would be added to every column
            if made_shape[-1:] == (width,) and len(operands) == len(node.inputs):
                return operands
        conv = self._convolution(node, width)
        if conv is None:
            raise Stranger(f"{self._described(node)} writes the residual stream")
        writers[Writer(self.name(conv), conv, None)] = None
        return []

    def _convolution(self, node: Node, width: int) -> nn.Module | None:
        """Returns the convolution whose channels are the columns of `node`'s output. None: there is none."""
        while node.what in _MOVES and node.inputs and (number := self.found.made.get(node.inputs[0])) is not None:
            node = self.found.nodes[number]
        has_width = node.what == "conv" and node.made[0][1] == width  # dimension 1 of a convolution is its channels
        return node.module if has_width else None


def _changes(attention: Any, *points: str) -> bool:
    """Returns whether a residual scheme of this package acts at one of these points of an attention."""
    return any(point in getattr(attention, "inside", ()) for point in points)


def _norms_rows(node: Node, values: Mapping[Key, Tensor]) -> bool:
    """Returns whether an operation is a norm over the last dimension, or a product y = x·(factor for each row) whose
    rows all have the same length although those of x differ. `values`: the tensors of the run."""
    if node.what in ("layer_norm", "rms_norm"):
        return True
    if node.what not in TIMES | {"normalize"} or node.factor is not None or node.made[0][-1] < 4:
        return False  # rows of fewer than 4 numbers may have equal lengths by chance
    y, x = values.get(node.outputs[0]), None
    for tensor, shape in zip(node.inputs, node.shapes):
        x = values.get(tensor) if shape == node.made[0] else x  # x is the operand of y's shape
    # a norm gives rows whose lengths differ by more than 5 % the same length, up to 1 %
    return x is not None and y is not None and _spread(y) < 0.01 and _spread(x) > 0.05


def _spread(rows: Tensor) -> float:
    """Returns the standard deviation of the rows' lengths, divided by their mean. NaN if there are fewer than two."""
    if not rows.is_floating_point() or rows.shape[:-1].numel() < 2:
        return math.nan
    lengths = rows.detach().double().norm(dim=-1)
    return float(lengths.std() / lengths.mean())


def _is_affine(node: Node) -> bool:
    """Returns whether an operation may be part of a sum of linear layers."""
    return node.what in ADDITIONS | UNCHANGED | {"linear", "dropout"} or node.factor is not None
