"""Finds the structure of residual blocks from a record of one run: which additions carry the residual stream, which
norms act on the stream or on a branch, and which linear layers make up each branch.

`_Reader` starts at a block's output and follows additions, norms and changes of dtype backwards to the block's input.
The tensors on this path are the residual stream. The other operand of each addition on the path is a branch.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from ..errors import InputError
from .record import ADDITIONS, FOLLOWED, TIMES, UNCHANGED, Call, Key, Node, Record, each_once
from .roles import Matrix, Owner, Roles, owner_of
from .spec import Linear, Part

_ON_A_BRANCH = UNCHANGED | ADDITIONS | TIMES | {"norm", "dropout", "drop_path", "scale"}
_ON_A_BRANCH |= {"sum", "index_add", "index_add_", "scatter_add", "scatter_add_", "index_put_", "index_select", "where"}
_ON_A_BRANCH |= {"cat", "concat", "stack", "split", "chunk", "unbind", "expand", "roll", "flip", "pad", "masked_fill"}
"""Names of operations that may come between a branch's last matrix and the addition to the stream."""
_READS_ROWS = frozenset({"norm", "linear", "dropout", "drop_path", "scale"}) | ADDITIONS | TIMES
"""If only these operations and convolutions read the stream, it is known which of its dimensions is the width."""
_NORMS = frozenset({"layer_norm", "rms_norm", "group_norm", "instance_norm", "batch_norm", "normalize"})
"""Functions of torch that norm a tensor."""
_ELEMENTWISE = frozenset({"pow", "__pow__", "square", "sub", "__sub__", "rsub", "abs"}) | UNCHANGED | ADDITIONS | TIMES
"""Operations that compute each number of their output from the numbers at one place of their inputs."""
_STATISTICS = frozenset({"mean", "sum", "var", "std", "norm", "vector_norm", "linalg_vector_norm", "var_mean"})
"""Operations that may compute a number for each row."""
_ROOTS = frozenset(
    {"rsqrt", "sqrt", "sqrt_", "rsqrt_", "reciprocal", "std", "norm", "vector_norm", "linalg_vector_norm"}
)
"""Operations that give a row's length, or the inverse of it, from the row or from its statistics."""


class Unaccounted(Exception):
    """Raised if a module cannot be shown to be a residual block. The message names the operation or layer at fault."""


class NotResidual(Unaccounted):
    """Raised if a module adds nothing to its input, so it is certainly no residual block."""


class Step(NamedTuple):
    """A step of the stream within a block: an addition, a norm, or a multiplication by a number."""

    node: Node
    branch: Key | None
    """The tensor that the addition adds to the stream. None if the step is a norm, or a multiplication by a number."""

    @property
    def is_norm(self) -> bool:
        return self.node.what == "norm"


class _Reached(NamedTuple):
    """A branch, followed backwards from its result to the stream."""

    read: set[Key]
    """The tensors of the stream that the branch reads."""
    nodes: list[Node]
    """The branch's operations, in the order of the run."""
    outside: set[Key]
    """The tensors from outside the block that the branch reads."""


class Structure(NamedTuple):
    """A block's sublayers, and the order of its additions, by which a swapped forward recognises each of them."""

    parts: tuple[Part, ...]
    writes: tuple[int, ...]
    """For each addition to the stream, in order: the number of the sublayer whose branch it adds."""
    reads: frozenset[tuple[int, int]]
    """Additions that have the stream as an operand but do not write it. Each is (number of writing additions before
    it, its index among the reading additions since the last writing one)."""
    scales: frozenset[tuple[int, int]] = frozenset()
    """Multiplications of the stream by a number, numbered like the additions in `reads`."""
    has_channels_first: bool = False
    """Whether the stream holds images that convolutions read. Its width is then the second dimension."""
    calls: int = 1
    """How often one pass calls the block, that is, how many layers share it."""
    passes: int = 1
    """How many passes one run of the model has: the input of each is not computed from the block's earlier outputs, as
    in an encoder that reads two texts apart."""
    is_in_place: bool = False
    """Whether an operation of the block overwrites one of its inputs."""
    width: int | None = None
    """The stream's width d. None: it is the width of the block's norms."""
    is_found: bool = True
    """Whether a run found this structure. If False, the block's registered class declares it."""
    heads: int | None = None
    """The attention's number of heads. None: no attention was recognised."""
    no_roles: str = ""
    """The reason why the roles of the block's matrices could not be found. Empty: they were found."""
    reads_output: bool = False
    """Whether the block reads its stream again after the last addition."""
    loop: tuple[int, ...] = ()
    """If the block is one layer of a loop (loops.py): the `writes` of the whole loop. Else empty."""
    twin: str | None = None
    """The name of another argument that also receives the block's input. None: there is none."""
    second: str | None = None
    """The name of the argument that is a second stream, to which the block also adds branches, as MMDiT's text. A
    scheme leaves that stream as it is. None: there is none."""
    elsewhere: frozenset[str] = frozenset()
    """Paths of the block's norms that also norm a tensor outside the stream and its branches, such as the global tokens
    of Pegasus-X, or that the code around the blocks calls, too."""


def norm_after(run_record: Record, block: nn.Module) -> nn.Module | None:
    """Returns the norm that reads the output of a block's last call. A norm inside a block does not count, unless that
    block contains this one. None: there is no such norm."""
    inside = _inside_others(run_record, block)
    return next(
        (norm for norm in _norms_that_read(run_record, run_record.calls[block][-1]) if norm not in inside), None
    )


def _inside_others(run_record: Record, block: nn.Module) -> set[nn.Module]:
    """Returns the modules of all blocks that do not contain this one."""
    enclosing = {
        other for other in run_record.blocks if other is not block and any(m is block for m in other.modules())
    }
    return {part for other in run_record.blocks - enclosing for part in other.modules()}


def reads(norm: nn.Module, run_record: Record, block: nn.Module) -> bool:
    """Returns whether the norm reads the output of any call of the block in the recorded run."""
    return any(
        norm is reader for call in run_record.calls.get(block, ()) for reader in _norms_that_read(run_record, call)
    )


def norms_after(run_record: Record, block: nn.Module) -> list[nn.Module]:
    """Returns the norms outside the blocks that read the output of a block's calls, each as often as it does."""
    inside = _inside_others(run_record, block)
    calls = run_record.calls[block]
    return [norm for call in calls for norm in _norms_that_read(run_record, call) if norm not in inside]


def is_added_to(run_record: Record, block: nn.Module) -> bool:
    """Returns whether the model itself adds something to the output of a block's last call: then the stream goes on."""
    call = run_record.calls[block][-1]
    later = run_record.nodes[call.last :]
    return any(node.what in ADDITIONS and call.y in node.inputs and len(node.inputs) == 2 for node in later)


def _norms_that_read(run_record: Record, call: Call) -> Iterator[nn.Module]:
    """Yields the norms that read a call's output, directly or after operations that only move or cast it."""
    seen, width = {call.y}, call.shape[-1]
    for node in run_record.nodes[call.last :]:
        if node.inputs and node.inputs[0] in seen:
            # The width is the last dimension, or dimension 1 of images. A norm with neither has rows of another width,
            # such as several patches that Swin has merged into one.
            if node.what == "norm" and node.module is not None and {width, call.shape[1]} & {*node.shapes[0][1:]}:
                yield node.module
            elif node.what in UNCHANGED | {"dropout"}:
                seen |= {*node.outputs}


def calls_of(block: nn.Module, run_record: Record) -> list[Call]:
    """Returns the recorded calls of a block. Errors: NotResidual if there are none."""
    if block not in run_record.calls:
        raise NotResidual("the run did not call it with a tensor")
    return run_record.calls[block]


def structure(block: nn.Module, run_record: Record, roles: Roles) -> Structure:
    """Returns the structure of a block from its recorded calls. `roles`: what the model's matrices compute. Errors:
    Unaccounted."""
    calls = calls_of(block, run_record)
    structures = [_Reader(block, run_record, call, roles).structure() for call in calls]
    if any(other.parts != structures[0].parts for other in structures):
        raise Unaccounted(f"its {len(calls)} calls in one pass compute different things")
    lengths = [1]  # the number of calls in each pass
    for before, after in itertools.pairwise(calls):
        # a call begins another pass if its input is not computed from the preceding call's output
        if run_record.derives(after.x, before.y):
            lengths[-1] += 1
        else:
            lengths.append(1)
    if len({*lengths}) > 1:
        raise Unaccounted(f"its {len(calls)} calls in one run belong to {len(lengths)} passes of different lengths")
    return structures[0]._replace(calls=lengths[0], passes=len(lengths))


def writers(block: nn.Module, run_record: Record) -> Iterator[tuple[Owner, set[Owner]]]:
    """Yields the last matrix of each branch of a block, together with all matrices of that branch."""
    for call in run_record.calls.get(block, []):
        reader = _Reader(block, run_record, call, Roles({}))  # no roles: they are found later, from these matrices
        with contextlib.suppress(Unaccounted):  # `structure` raises the same error for this block later
            branches = [step.branch for step in reader.steps() if step.branch is not None]
            for branch in branches:
                own = {owner for _, owner in reader.matrices(reader.reach(branch).nodes)}
                yield from ((last, own) for last in reader.last(branch))


class _Reader:
    """Reads a block's structure from one of its recorded calls."""

    def __init__(self, block: nn.Module, run_record: Record, call: Call, roles: Roles) -> None:
        """Takes the record of the run, the call in it that is read, and the roles of the model's matrices."""
        self.block, self.call, self.roles = block, call, roles
        self.record, self.nodes, self.made = run_record, run_record.nodes, run_record.made
        self.paths: dict[nn.Module | None, str] = {module: name for name, module in block.named_modules()}
        self.walked: dict[Key, list[Step] | None] = {}
        """Cached results of `walk`."""
        self.level: dict[Key, int] = {}
        """For each tensor of the stream, the number of additions to the stream before it."""
        self.heads: int | None = None
        self.normed: set[Key] = set()
        """The outputs of the norms through which the sublayers so far read the stream."""

    def node(self, tensor: Key) -> Node | None:
        """Returns the operation of this call that made a tensor. None if the tensor was made outside the call."""
        number = self.made.get(tensor)
        inside = number is not None and self.call.first <= number < self.call.last
        return self.nodes[number] if inside and number is not None else None

    def walk(self, tensor: Key) -> list[Step] | None:
        """Returns the steps from the block's input to this tensor. None: the tensor is not on the stream."""
        if tensor == self.call.x:
            return []
        if tensor not in self.walked:
            self.walked[tensor] = None  # so that the recursion in `_walk` ends if it meets this tensor again
            self.walked[tensor] = self._walk(tensor)
        return self.walked[tensor]

    def _walk(self, tensor: Key) -> list[Step] | None:
        """Computes `walk`'s result. If both operands of an addition are on the stream, the one with fewer steps counts
        as the stream and the other as the branch."""
        node = self.node(tensor)
        if node is None:
            return None
        if node.what == "norm" or self._is_same(node):
            before = self.walk(node.inputs[0])
            if before is None or node.what != "norm":  # a cast or reshape is no step of its own
                return before
            return [*before, Step(node, None)]
        if node.factor is not None:  # a multiplication by a number
            before = self.walk(node.inputs[0])
            return None if before is None else [*before, Step(node, None)]
        if node.what in ADDITIONS and len(node.inputs) == 2 and node.shapes[0] == node.shapes[1]:
            # each operand as the stream (its steps), with the other one as the branch
            operands = [(self.walk(node.inputs[i]), node.inputs[1 - i]) for i in (0, 1)]
            on_stream = [(steps, branch) for steps, branch in operands if steps is not None]
            if on_stream:
                steps, branch = min(on_stream, key=lambda operand: len(operand[0]))
                return [*steps, Step(node, branch)]
        return None

    def steps(self) -> list[Step]:
        """Returns the steps of the stream from the block's input to its output, and fills `level`. Errors:
        Unaccounted."""
        if self.call.y is None:
            raise NotResidual("it returns no tensor of its input's shape")
        steps = self.walk(self.call.y)
        if steps is None:
            inside = self.nodes[self.call.first : self.call.last]
            # if something is added to a tensor like the stream, the block may be residual in a way unknown here
            adds = any(node.what in ADDITIONS and self.call.shape in node.shapes for node in inside)
            raise (Unaccounted if adds else NotResidual)(self._blame(self.call.y))
        if not any(step.branch is not None for step in steps):
            raise NotResidual("nothing is added to its input")
        self._find_levels(steps)
        return steps

    def structure(self) -> Structure:
        """Returns the block's structure in this call. Errors: Unaccounted, InputError."""
        steps = self.steps()
        self._refuse_functions()
        groups, writes = self._sublayers(steps)
        self.moving = self._moving(steps)  # `_part` reads it through `_tail`
        parts = tuple(map(self._part, groups))
        reads, scales = self._reading_additions(steps), self._scales(steps)
        channels_first = self._has_channels_first()
        width = self.call.shape[1 if channels_first else -1]
        if all(width not in p.shape for p in self.block.parameters()):
            raise Unaccounted(
                f"its input is of {' × '.join(map(str, self.call.shape))}, and none of its parameters has {width} rows "
                "or columns: which dimension is the stream's width is not clear"
            )
        result = Structure(parts, writes, reads, scales, channels_first, is_in_place=self._is_in_place(), width=width)
        result = result._replace(heads=self.heads, no_roles=self.roles.why, elsewhere=self._elsewhere(steps, parts))
        return result._replace(
            reads_output=self._reads_output(), second=self._second_stream(steps), twin=self.call.twin
        )

    def _refuse_functions(self) -> None:
        """Raises Unaccounted if the stream is normed outside a module, by a function of torch or by a formula. A
        product of the stream with a root of its rows' statistics counts as a norm."""
        values = {*self.level}  # the stream, and tensors computed from it element by element
        statistics = set[Key]()  # means, variances and sums of its rows
        roots = set[Key]()  # roots and reciprocals of these statistics
        for node in self.nodes[self.call.first : self.call.last]:
            is_norm_beside = node.what == "norm" and node.inputs[0] not in self.level
            if is_norm_beside and any(source in self.level for source in self.record.sources(node.inputs[0])):
                raise Unaccounted(
                    f"a {type(node.module).__name__} norms a part or a rearrangement of the residual stream, and only "
                    "a norm that is called on the stream itself can be replaced"
                )
            reads_value_first = any(k in values for k in node.inputs[:1])
            reads_value = any(k in values for k in node.inputs)
            reads_root = any(k in roots for k in node.inputs)
            reads_statistic = any(k in statistics for k in node.inputs)
            if (node.what in _NORMS and reads_value_first) or (node.what in TIMES and reads_value and reads_root):
                raise Unaccounted(
                    f"the operation {node.what} at {node.where} norms the residual stream, and only norms that are "
                    "modules, and are called as such, can be replaced: make it a module"
                )
            # an operation that computes a statistic of rows changes the shape
            if node.what in _STATISTICS and reads_value_first and node.made[0] != node.shapes[0]:
                (roots if node.what in _ROOTS else statistics).update(node.outputs)
            elif node.what in _ROOTS and reads_statistic:
                roots.update(node.outputs)
            elif node.what in _ELEMENTWISE:
                if reads_value:
                    values.update(node.outputs)
                elif reads_root:
                    roots.update(node.outputs)
                elif reads_statistic:
                    statistics.update(node.outputs)

    def _second_stream(self, steps: list[Step]) -> str | None:
        """Returns the name of an argument beside the input to which the block adds branches of its own. None: there is
        none."""
        branches = [step.branch for step in steps if step.branch is not None]
        # the outputs of the branches of the main stream, and that stream itself
        main_outputs = {out for branch in branches for node in self.reach(branch).nodes for out in node.outputs}
        main_outputs |= {step.node.outputs[0] for step in steps}
        for node in self.nodes[self.call.first : self.call.last]:
            is_sum = node.what in ADDITIONS and len(node.inputs) == 2 and node.shapes[0] == node.shapes[1]
            if not is_sum or node.outputs[0] in main_outputs:
                continue
            for operand, branch in (node.inputs, node.inputs[::-1]):  # either operand may be the argument
                name = self.call.arguments.get(operand) if operand != self.call.x else None
                if name is not None and any(n.what == "linear" for n in self.reach(branch).nodes):
                    return name
        return None

    def _reads_output(self) -> bool:
        """Returns whether an operation off the stream reads the stream after its last addition."""
        last = {tensor for tensor, level in self.level.items() if level == max(self.level.values())}
        inside = self.nodes[self.call.first : self.call.last]
        return any(n.outputs[0] not in self.level and any(k in last for k in n.inputs) for n in inside)

    def _elsewhere(self, steps: list[Step], parts: tuple[Part, ...]) -> frozenset[str]:
        """Returns the paths of the block's norms that also norm a tensor outside the stream and its branches, in the
        block or in the code around all blocks."""
        own = {path for part in parts for path in part.norms()}
        branch_ends = {out for step in steps if step.branch is not None for out in self._tail_of(step.branch)}
        norms = (n for n in self.nodes[self.call.first : self.call.last] if n.what == "norm")
        off_stream = [n for n in norms if n.inputs[0] not in self.level and n.outputs[0] not in branch_ends]
        calls = [call for calls in self.record.calls.values() for call in calls]
        off_stream += [
            node
            for i, node in enumerate(self.nodes)
            if node.what == "norm"
            and self.paths.get(node.module) in own
            and not any(c.first <= i < c.last for c in calls)
        ]
        return frozenset(path for n in off_stream if (path := self.paths.get(n.module, "")) in own)

    def _tail_of(self, branch: Key) -> Iterator[Key]:
        """Yields a branch's result, and backwards from there the tensors that the result is a view, cast, dropout or
        multiple of. The last one is the output of any other operation, such as a norm."""
        tensor = branch
        while True:
            yield tensor
            node = self.node(tensor)
            if node is None or not node.inputs:
                return
            if node.what not in UNCHANGED | {"dropout", "drop_path", "scale"} and node.factor is None:
                return
            tensor = node.inputs[0]

    def _is_in_place(self) -> bool:
        """Returns whether an operation overwrites an input: its output is the input's tensor in a new version."""
        inside = self.nodes[self.call.first : self.call.last]
        # a key is (identity, version)
        return any(out not in n.inputs and out[0] in {k[0] for k in n.inputs} for n in inside for out in n.outputs)

    def _has_channels_first(self) -> bool:
        """Returns whether convolutions read the stream, and nothing else does. Errors: Unaccounted if it is not clear
        which dimension of the stream is its width."""
        inside = self.nodes[self.call.first : self.call.last]
        # operations that read the stream and whose output is not the stream
        readers = [n for n in inside if any(k in self.level for k in n.inputs) and n.outputs[0] not in self.level]
        if len(self.call.shape) < 3 or all(node.what != "conv" for node in inside):
            return False
        kinds = {node.what for node in readers}
        if {"conv", "linear"} <= kinds:
            raise Unaccounted(
                "a convolution and a linear layer read the stream, which take different dimensions for its width"
            )
        if "linear" in kinds:
            return False  # a linear layer reads the last dimension
        unclear = next((node.what for node in readers if node.what not in _READS_ROWS and node.what != "conv"), None)
        if unclear is not None:
            raise Unaccounted(
                f"convolutions stand behind the operation {unclear}, and which dimension of the stream is its width is "
                "not known"
            )
        return bool(readers) and all(node.what == "conv" for node in readers)

    def _blame(self, tensor: Key) -> str:
        """Returns a message that names the operation at which the search from the output back to the input ended."""
        node = self.node(tensor)
        while node is not None and (node.what == "norm" or node.what in UNCHANGED):
            node = self.node(node.inputs[0])
        if node is None:
            return "its output is not made of its input by operations that can be followed"
        where = self.paths.get(node.module, "")
        what = (
            f"{where}, a {type(node.module).__name__},"
            if node.module is not None
            else f"the operation {node.what} at {node.where}"
        )
        return f"{what} stands on the stream where an addition or a norm was expected"

    def _find_levels(self, steps: list[Step]) -> None:
        """Fills `level`: for each tensor of the stream, the number of additions before it."""
        on_path = {step.node.outputs[0] for step in steps}
        self.level[self.call.x] = 0
        adds = {step.node.outputs[0]: i + 1 for i, step in enumerate(s for s in steps if s.branch is not None)}
        for node in self.nodes[self.call.first : self.call.last]:
            out = node.outputs[0]
            if out in adds:
                self.level[out] = adds[out]
            # a cast, a norm or a factor on the path adds nothing, so the level stays
            elif node.inputs and node.inputs[0] in self.level and (self._is_same(node) or out in on_path):
                self.level[out] = self.level[node.inputs[0]]

    def _is_same(self, node: Node) -> bool:
        """Returns whether an operation only casts or reshapes its input and keeps the input's rows."""
        if node.what not in FOLLOWED or len(node.outputs) != 1 or not node.shapes:
            return False
        old, new = node.shapes[0], node.made[0]
        return old[-1:] == new[-1:] and math.prod(old) == math.prod(new)

    def reach(self, branch: Key) -> _Reached:
        """Follows a branch backwards from its result to the stream, and returns what it reads and computes."""
        read: set[Key] = set()
        outside: set[Key] = set()
        numbers: set[int] = set()
        todo = [branch]
        for tensor in each_once(todo):  # also yields the inputs that the loop appends to `todo`
            if tensor in self.level:
                read.add(tensor)
                continue
            number = self.made.get(tensor)
            if number is None or not self.call.first <= number < self.call.last:
                outside.add(tensor)
                continue
            numbers.add(number)
            todo += self.nodes[number].inputs
        return _Reached(read, [self.nodes[number] for number in sorted(numbers)], outside)

    def _sublayers(self, steps: list[Step]) -> tuple[list[list[Step]], tuple[int, ...]]:
        """Returns the steps of each sublayer, and for each addition the number of its sublayer. If an addition's branch
        reads the stream as it was before the preceding addition, the two are parallel and form one sublayer."""
        groups: list[list[Step]] = []
        writes: list[int] = []
        scales: list[Step] = []  # multiplications of the stream that belong to the next addition's sublayer
        for step in steps:
            if step.branch is None and not step.is_norm:
                scales.append(step)
                continue
            if step.branch is None:  # a norm on the stream belongs to the sublayer before it
                if not groups:
                    name = self.paths[step.node.module]
                    raise Unaccounted(f"{name} norms its input, and the normed one goes on as the stream")
                groups[-1].append(step)
                continue
            read = self.reach(step.branch).read
            if not read:
                raise Unaccounted("a tensor that is not computed from the stream is added to it")
            in_last_group = writes.count(len(groups) - 1) if groups else 0
            level_before_group = len(writes) - in_last_group
            # the branch reads the stream as it was before the last group's additions
            is_parallel = bool(groups) and max(self.level[k] for k in read) <= level_before_group
            if is_parallel:
                groups[-1].append(step)
            else:
                groups.append([*scales, step])
                scales = []
            writes.append(len(groups) - 1)
        if scales:
            raise Unaccounted(f"the stream is multiplied by {scales[0].node.factor:g} outside an addition")
        return groups, tuple(writes)

    def _reading_additions(self, steps: list[Step]) -> frozenset[tuple[int, int]]:
        """Returns the additions that read the stream but do not write it, numbered as in `Structure.reads`."""
        outputs_on_path = {step.node.outputs[0] for step in steps}
        # `written`: the writing additions so far; `since`: the reading additions after the last writing one
        reading, written, since = set(), 0, 0
        for node in self.nodes[self.call.first : self.call.last]:
            if node.what not in ADDITIONS or len(node.inputs) != 2:
                continue
            if node.outputs[0] in outputs_on_path:
                written, since = written + 1, 0
            # `level` has the tensors of the stream, so one operand is the stream. An addition of two of its tensors
            # gets no number, as in a swapped forward (`_added` in residual_stream.py).
            elif sum(k in self.level for k in node.inputs) == 1:  # the other operand may be broadcast
                reading.add((written, since))
                since += 1
        return frozenset(reading)

    def _scales(self, steps: list[Step]) -> frozenset[tuple[int, int]]:
        """Returns the multiplications by a number that change the stream itself, numbered as in `Structure.scales`."""
        added = {step.node.outputs[0] for step in steps if step.branch is not None}
        scaled = {step.node.outputs[0] for step in steps if step.node.factor is not None}
        # `written`: the additions to the stream so far; `since`: the multiplications of the stream after the last one,
        # also those whose result is not the stream
        found, written, since = set(), 0, 0
        for node in self.nodes[self.call.first : self.call.last]:
            if node.outputs[0] in added:
                written, since = written + 1, 0
            elif node.factor is not None and node.inputs[0] in self.level:  # its input is the stream
                if node.outputs[0] in scaled:
                    found.add((written, since))
                since += 1
        return frozenset(found)

    # The methods below describe one sublayer.

    def _moving(self, steps: list[Step]) -> set[nn.Module]:
        """Returns the modules of dropout and stochastic depth that are called only at the ends of branches."""
        at_ends: dict[nn.Module, int] = {}
        for step in steps:
            tensor = step.branch
            while tensor is not None:  # goes backwards from the branch's result to its last dropout
                dropouts = self._dropouts(tensor)
                for module in dropouts:
                    at_ends[module] = at_ends.get(module, 0) + 1
                node = self.node(tensor)
                may_follow_dropout = UNCHANGED | {"drop_path", "scale", "norm"}
                if dropouts or node is None or not (node.what in may_follow_dropout or node.factor is not None):
                    break
                tensor = node.inputs[0] if node.inputs else None
        inside = self.nodes[self.call.first : self.call.last]
        # a module that is also called elsewhere in the block must stay there
        calls = {module: sum(node.module is module for node in inside) for module in at_ends}
        return {module for module, count in at_ends.items() if calls[module] == count}

    def _dropouts(self, tensor: Key) -> list[nn.Module]:
        """Returns the modules of dropout and stochastic depth that returned this tensor. In evaluation mode, dropout
        returns its input itself, so there may be several."""
        node = self.node(tensor)
        own: list[nn.Module] = []
        if node is not None and node.module is not None and node.what in ("dropout", "drop_path"):
            own = [node.module]
        return own + [module for module in self.record.dropped.get(tensor, ()) if module in self.paths]

    def _part(self, group: list[Step]) -> Part:
        """Returns the description of one sublayer. `group`: its additions, and the norms and factors on the stream that
        belong to it. Errors: Unaccounted, InputError."""
        branches = [step.branch for step in group if step.branch is not None]
        after = [self.paths[step.node.module] for step in group if step.is_norm]
        alpha = math.prod(step.node.factor for step in group if step.node.factor is not None)
        if len(after) > 1:
            raise Unaccounted(f"two norms follow each other on the stream, {after[0]} and {after[1]}")
        tails = [self._tail(branch) for branch in branches]
        tail = tails[0] if len(tails) == 1 else Tail()  # the end of one of several branches is not that of their sum
        # torch.add(x, f, alpha=…) multiplies f by alpha. If f is the only branch, alpha is part of the branch's factor.
        scaled = next((step for step in group if step.node.alpha != 1.0), None)
        if scaled is not None and (len(branches) > 1 or scaled.branch != scaled.node.inputs[1]):
            raise Unaccounted(
                f"the addition at {scaled.node.where} has a factor alpha on the stream or on one of several branches"
            )
        tail = tail if scaled is None else tail._replace(beta=tail.beta * scaled.node.alpha)
        reached = [self.reach(branch) for branch in branches]
        nodes = [node for each in reached for node in each.nodes]
        read = {k for each in reached for k in each.read}  # the tensors of the stream that the branches read
        norms = [node for node in nodes if node.what == "norm" and node.inputs[0] in read]
        # an earlier sublayer's norm, whose output this one reads again, belongs to the earlier one
        norms = [node for node in norms if node.outputs[0] not in self.normed]
        self.normed |= {node.outputs[0] for node in norms}
        before = [*dict.fromkeys(self.paths[node.module] for node in norms)]
        reads_past_norm = [
            n for n in nodes if n.what != "norm" and any(k in read for k in n.inputs) and not self._is_same(n)
        ]
        memory, attends_outside = self._memory(reached, nodes)
        if attends_outside and memory is None:
            raise InputError(
                f"attention of a {type(self.block).__name__} reads keys and values from a tensor that is none of the "
                "block's arguments: pass the encoder's output to the block's forward"
            )
        ends = {owner for branch in branches for owner in self.last(branch)}
        linears, experts, kind = self._linears(nodes, ends, memory is not None)
        all_norms = (*before, *after, *tail.norms[:1])
        return Part(
            kind,
            norm=all_norms[0] if all_norms else None,
            linears=linears,
            dropout=tail.dropout,
            drop_path=tail.drop_path,
            before=before[0] if before else None,
            twins=tuple(before[1:]),
            after=after[0] if after else None,
            branch=tail.norms[0] if tail.norms else None,
            reads_past=bool(before and reads_past_norm),
            memory=memory,
            is_parallel=len(branches) > 1 or bool(before[1:]) or self._is_sum(branches[0]),
            beta=tail.beta,
            scales=tail.scales,
            alpha=alpha,
            experts=experts,
        )

    def _tail(self, branch: Key) -> "Tail":
        """Returns the dropout, norms and factors at the end of a branch. It is followed backwards from its result, to
        the first operation that is none of these. Dropouts and factors may also stand before the norm."""
        tail, tensor = Tail(), branch
        while True:
            for module in self._dropouts(tensor):
                is_drop_path = self.record.kinds.get(module) == "drop_path"
                if module in self.moving and is_drop_path and tail.drop_path is None:
                    tail = tail._replace(drop_path=self.paths[module])
                elif module in self.moving and not is_drop_path and tail.dropout is None:
                    tail = tail._replace(dropout=self.paths[module])
            node = self.node(tensor)
            if node is None or not node.inputs:
                break
            path = self.paths.get(node.module, "")
            # a norm ends the branch only if no factor follows it
            if node.what == "norm" and not tail.norms and tail.beta == 1.0 and not tail.scales:
                tail = tail._replace(norms=(path,))
            elif node.what == "scale":
                tail = tail._replace(scales=(*tail.scales, path))
            elif node.factor:
                tail = tail._replace(beta=tail.beta * node.factor)
            elif node.what not in UNCHANGED | {"dropout", "drop_path"}:
                break
            tensor = node.inputs[0]
        return tail

    def _is_sum(self, branch: Key) -> bool:
        """Returns whether the branch is a sum of two branches that both read the stream through linear layers."""
        node = self.node(branch)
        while node is not None and node.what in UNCHANGED | {"dropout", "drop_path"} and node.inputs:
            node = self.node(node.inputs[0])
        if node is None or node.what not in ADDITIONS or len(node.inputs) != 2:
            return False
        reached = [self.reach(k) for k in node.inputs]
        return all(each.read and any(node.what == "linear" for node in each.nodes) for each in reached)

    def _memory(self, reached: list[_Reached], nodes: list[Node]) -> tuple[str | None, bool]:
        """Returns the name of the block's argument that attention's values are computed from, such as an encoder's
        output (None: no such argument), and whether values are computed from a tensor other than the stream. `nodes`:
        the operations of all branches in `reached`."""
        names = {tensor: name for tensor, name in self.call.arguments.items() if tensor != self.call.x}
        outside = {k for each in reached for k in each.outside}
        # the linear layers that read a tensor from outside the block, and those of them that compute values
        layers = [n for n in nodes if n.what == "linear" and n.module is not None and n.inputs[0] in outside]
        roles_of_layers = [self.roles.of(owner_of(node.module)) for node in layers if node.module is not None]
        value_layers = [
            n
            for n, matrix in zip(layers, roles_of_layers)
            if matrix and any(rows.role == "value" for rows in matrix.rows)
        ]
        has_attention = any(matrix.heads for _, owner in self.matrices(nodes) if (matrix := self.roles.of(owner)))
        # if no attention was recognised, any linear layer that reads rows from outside the block counts; a tensor with
        # fewer dimensions than the stream, such as a condition, has no rows
        readers_of_rows = [n for n in layers if len(n.shapes[0]) >= len(self.call.shape)]
        first = next(iter(value_layers if has_attention else readers_of_rows), None)
        argument = None if first is None else names.get(first.inputs[0])
        attends_outside = has_attention and bool(value_layers)
        return argument, attends_outside

    def _without_adapters(self, path: str) -> str:
        """Returns the path that a linear layer had before PEFT wrapped it; now PEFT's wrapper has that path, and holds
        the layer and its adapter's layers. Returns `path` itself if it lies in no wrapper."""

        def is_pefts(path: str) -> bool:
            return type(self.block.get_submodule(path)).__module__.startswith("peft.")

        above = path.rpartition(".")[0]
        wrapper = above.rpartition(".")[0]
        # an adapter's layers stand in a ModuleDict of the wrapper: q_proj.lora_A.default becomes q_proj
        if isinstance(self.block.get_submodule(above), nn.ModuleDict) and is_pefts(wrapper):
            path = wrapper if hasattr(self.block.get_submodule(wrapper), "base_layer") else path
        while is_pefts(path.rpartition(".")[0]):  # the layer is a child of the wrapper: q_proj.base_layer
            path = path.rpartition(".")[0]
        return path

    def matrices(self, nodes: list[Node]) -> list[tuple[str, Owner]]:
        """Returns the linear layers among a branch's operations, and the parameters of two or more dimensions that the
        operations read, as (path, matrix)."""
        paths: dict[Owner, str] = {}
        own = {id(p): (path, p) for path, p in self.block.named_parameters() if p.dim() >= 2}
        for node in nodes:
            if node.what == "linear" and node.module is not None:
                if node.module not in self.paths:
                    raise Unaccounted(f"it calls {named(node.module)} that is none of its parts")
                # an adapter's layers have the path of the layer that they adapt, which counts once
                path = self._without_adapters(self.paths[node.module])
                if path not in paths.values():
                    paths.setdefault(owner_of(node.module), path)
            elif node.module is None:
                for identity, _ in node.inputs:  # a key is (identity, version)
                    if identity in own:
                        path, p = own[identity]
                        paths.setdefault(p, path)
        return [(self._layer(path), owner) for owner, path in paths.items()]

    def _layer(self, path: str) -> str:
        """Returns a linear layer's path if `path` is that of the layer's weight, which the block then reads without
        calling the layer. Else returns `path`."""
        above, _, name = path.rpartition(".")
        return above if name == "weight" and isinstance(self.block.get_submodule(above), nn.Linear) else path

    def last(self, branch: Key) -> set[Owner]:
        """Returns a branch's last matrices: those followed only by additions, norms, dropout, factors and the like."""
        last_matrices: set[Owner] = set()
        own = {id(p): p for p in self.block.parameters() if p.dim() >= 2}
        todo = [branch]
        for tensor in each_once(todo):  # also yields the inputs that the loop appends to `todo`
            node = self.node(tensor)
            if node is None or tensor in self.level:  # from outside the block, or the stream itself
                continue
            if node.what == "linear" and node.module is not None:
                last_matrices.add(owner_of(node.module))
                continue
            weights = [self._parameter(k, own) for k in node.inputs]
            if tensor in self.record.outputs_of_attention:
                last_matrices |= {p for p in weights if p is self.record.outputs_of_attention[tensor]}
            # an operation with a parameter, other than those that may follow the last matrix, is a product with it
            elif any(p is not None for p in weights) and node.what not in _ON_A_BRANCH:
                last_matrices |= {p for p in weights if p is not None}
            elif node.what in _ON_A_BRANCH:
                columns = node.made[0][-1:]  # an input with other columns is an index or a mask, not the branch
                todo += [k for k, shape in zip(node.inputs, node.shapes) if shape[-1:] == columns]
                todo += node.inputs[:1] if node.what in UNCHANGED else ()  # a view may have other columns
        return last_matrices

    def _parameter(self, tensor: Key, own: dict[int, nn.Parameter]) -> nn.Parameter | None:
        """Returns a parameter if the tensor is that parameter, a view of it or a copy of it, else None. `own`: the
        block's parameters by identity."""
        while tensor[0] not in own:
            node = self.node(tensor)
            if (
                node is None
                or node.what not in UNCHANGED | {"transpose_last", "index_select", "__get__"}
                or not node.inputs
            ):
                return None
            tensor = node.inputs[0]
        return own[tensor[0]]

    def _linears(
        self, nodes: list[Node], ends: set[Owner], reads_memory: bool
    ) -> tuple[tuple[Linear, ...], tuple[Linear, ...], str]:
        """Returns a branch's linear layers, its stacks of experts (parameters of three dimensions), both with the roles
        of their rows, and its kind: cross-attention, self-attention or feed-forward. `ends`: the branch's last
        matrices; `reads_memory`: whether attention reads another tensor than the stream."""
        matrices = [(path, owner, matrix) for path, owner in self.matrices(nodes) if (matrix := self.roles.of(owner))]
        # a branch is attention if a matrix computes heads, or if the last one reads attention's output or mixes tokens
        is_attention = reads_memory or any(
            matrix.heads or (owner in ends and (matrix.reads_attention or matrix.mixes))
            for _, owner, matrix in matrices
        )
        # token mixing without attention, as in MLP-Mixer: the rows of its matrices get no roles
        is_mixer = not any(matrix.heads for *_, matrix in matrices) and any(matrix.mixes for *_, matrix in matrices)
        self.heads = self.heads or next((matrix.heads for *_, matrix in matrices if matrix.heads), None)
        called = {owner_of(node.module) for node in nodes if node.module is not None and node.what == "linear"}
        linears: list[Linear] = []
        experts: list[Linear] = []
        for path, owner, matrix in matrices:
            rows = () if is_mixer else matrix.rows
            roles = tuple(dict.fromkeys(run.role for run in rows if run.role is not None))
            if owner in ends:  # all rows of the last matrix have one role, so `rows` is empty
                roles, rows = ("output" if is_attention and not _ends_feed_forward(matrix, matrices) else "fc2",), ()
            is_stack = owner not in called and isinstance(owner, nn.Parameter) and owner.dim() > 2
            is_unclear = matrix.is_unclear and not is_mixer
            linear = Linear(path, roles, matrix.factor, rows, matrix.is_transposed, owner in called, is_unclear)
            (experts if is_stack else linears).append(linear)
        kind = "cross-attention" if reads_memory else "self-attention" if is_attention else "feed-forward"
        return tuple(linears), tuple(experts), kind


def named(module: nn.Module) -> str:
    """Returns the name of a module's class with its article, for messages."""
    kind = type(module).__name__
    return f"{'an' if kind[:1] in 'AEIOU' else 'a'} {kind}"


def _ends_feed_forward(last: Matrix, found: list[Any]) -> bool:
    """Returns whether a branch's last matrix ends a feed-forward parallel to attention: this matrix does not read
    attention's output, but another one does. `found`: tuples that end with a `Matrix`, one for each of the branch."""
    return not last.reads_attention and any(other.reads_attention for *_, other in found)


class Tail(NamedTuple):
    """The modules and the factor at the end of a branch; modules are given by their paths.

    Attributes:
        norms: the norm that ends the branch, or empty.
        beta: the product of the numbers that multiply the branch.
        scales: modules that multiply the branch by a vector, as LayerScale does.
    """

    dropout: str | None = None
    drop_path: str | None = None
    norms: tuple[str, ...] = ()
    beta: float = 1.0
    scales: tuple[str, ...] = ()
