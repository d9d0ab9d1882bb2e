"""What blocks compute, read from a record of one run: which additions carry the residual stream, which norms stand
on it or on branches, and which linear layers a branch is made of.

Read backwards from a block's output, additions, norms and changes of type lead along the stream to the block's input;
what is added there is a branch.
"""

import contextlib
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
"""Operations between the last matrix of a branch and the stream."""
_READS_ROWS = frozenset({"norm", "linear", "dropout", "drop_path", "scale"}) | ADDITIONS | TIMES
_NORMS = frozenset({"layer_norm", "rms_norm", "group_norm", "instance_norm", "batch_norm", "normalize"})
_BY_NUMBER = frozenset({"pow", "__pow__", "square", "sub", "__sub__", "rsub", "abs"}) | UNCHANGED | ADDITIONS | TIMES
_STATISTICS = frozenset({"mean", "sum", "var", "std", "norm", "vector_norm", "linalg_vector_norm", "var_mean"})
_ROOTS = frozenset(
    {"rsqrt", "sqrt", "sqrt_", "rsqrt_", "reciprocal", "std", "norm", "vector_norm", "linalg_vector_norm"}
)


class Unaccounted(Exception):
    """The block is not known to be a residual block; says what could not be accounted for."""


class NotResidual(Unaccounted):
    """The module adds nothing to its input."""


class Step(NamedTuple):
    """A step of the stream within a block: an addition or a norm."""

    node: Node
    branch: Key | None
    """What is added; None: a norm, or a factor."""

    @property
    def is_norm(self) -> bool:
        return self.node.what == "norm"


class Structure(NamedTuple):
    """A block: its sublayers, and how its additions are told apart."""

    parts: tuple[Part, ...]
    writes: tuple[int, ...]
    """The sublayer of each addition to the stream, in order."""
    reads: frozenset[tuple[int, int]]
    """Additions that only read the stream: (how many wrote before it, its number since)."""
    scales: frozenset[tuple[int, int]] = frozenset()
    """Multiplications of the stream by a number, counted in the same way."""
    has_channels_first: bool = False
    """Its stream is of images: convolutions read it, and rows go along the second dimension."""
    calls: int = 1
    """In one pass: the layers that share it."""
    is_in_place: bool = False
    """Its operations write into what it reads."""
    width: int | None = None
    """d; None: the norms tell."""
    is_found: bool = True
    """By a run; else it is declared."""
    heads: int | None = None
    """Of attention; None: none was recognised."""
    no_roles: str = ""
    """The reason why the roles of its matrices could not be told."""
    reads_output: bool = False
    """It reads its stream after the last addition."""
    loop: tuple[int, ...] = ()
    """The sublayers that the additions of the whole loop close, where the block is one layer of it."""
    elsewhere: frozenset[str] = frozenset()
    """Its norms that are also called on a tensor that is neither its stream nor a branch: Pegasus-X's global tokens."""


def norm_after(found: Record, block: nn.Module) -> nn.Module | None:
    """The norm that reads a block's last output, and stands in no block beside it."""
    around = {one for one in found.blocks if one is not block and any(part is block for part in one.modules())}
    inside = {part for one in found.blocks - around for part in one.modules()}
    return next((norm for norm in _norms_that_read(found, found.calls[block][-1]) if norm not in inside), None)


def reads(norm: nn.Module, found: Record, block: nn.Module) -> bool:
    """The norm reads an output of the block."""
    return any(norm is one for call in found.calls.get(block, ()) for one in _norms_that_read(found, call))


def _norms_that_read(found: Record, call: Call) -> Iterator[nn.Module]:
    """The norms that read what a call gives, as it is or moved."""
    seen = {call.y}
    for node in found.nodes[call.last :]:
        if node.inputs and node.inputs[0] in seen:
            if node.what == "norm" and node.module is not None:
                yield node.module
            elif node.what in UNCHANGED | {"dropout"}:
                seen |= {*node.outputs}


def calls_of(block: nn.Module, found: Record) -> list[Call]:
    """The calls of a block that has run. Errors: Unaccounted."""
    if block not in found.calls:
        raise NotResidual("the run did not call it with a tensor")
    return found.calls[block]


def structure(block: nn.Module, found: Record, roles: Roles) -> Structure:
    """The structure of a block that has run. Errors: Unaccounted."""
    calls = calls_of(block, found)
    made = [_Reader(block, found, call, roles).structure() for call in calls]
    if any(one.parts != made[0].parts for one in made):
        raise Unaccounted(f"its {len(calls)} calls in one pass compute different things")
    return made[0]._replace(calls=len(calls))


def writers(block: nn.Module, found: Record) -> Iterator[tuple[Owner, set[Owner]]]:
    """The last matrix of each of a block's branches, with all matrices of the branch."""
    for call in found.calls.get(block, []):
        reader = _Reader(block, found, call, Roles({}))
        with contextlib.suppress(Unaccounted):  # of which `structure` will tell
            branches = [step.branch for step in reader.steps() if step.branch is not None]
            for branch in branches:
                own = {owner for _, owner in reader.matrices(reader.reach(branch)[1])}
                yield from ((last, own) for last in reader.last(branch))


class _Reader:
    def __init__(self, block: nn.Module, found: Record, call: Call, roles: Roles) -> None:
        self.block, self.call, self.roles = block, call, roles
        self.record, self.nodes, self.made = found, found.nodes, found.made
        self.paths: dict[nn.Module | None, str] = {module: name for name, module in block.named_modules()}
        self.walked: dict[Key, list[Step] | None] = {}
        self.level: dict[Key, int] = {}
        """How many additions made each tensor of the stream."""
        self.heads: int | None = None

    def node(self, at: Key) -> Node | None:
        number = self.made.get(at)
        inside = number is not None and self.call.first <= number < self.call.last
        return self.nodes[number] if inside and number is not None else None

    def walk(self, at: Key) -> list[Step] | None:
        """The steps from the block's input to this tensor; None: it is not on the stream."""
        if at == self.call.x:
            return []
        if at not in self.walked:
            self.walked[at] = None
            self.walked[at] = self._walk(at)
        return self.walked[at]

    def _walk(self, at: Key) -> list[Step] | None:
        node = self.node(at)
        if node is None:
            return None
        if node.what == "norm" or self._is_same(node):
            before = self.walk(node.inputs[0])
            if before is None or node.what != "norm":
                return before
            return [*before, Step(node, None)]
        if node.factor is not None:
            before = self.walk(node.inputs[0])
            return None if before is None else [*before, Step(node, None)]
        if node.what in ADDITIONS and len(node.inputs) == 2 and node.shapes[0] == node.shapes[1]:
            ways = [(self.walk(node.inputs[i]), node.inputs[1 - i]) for i in (0, 1)]
            known = [(steps, branch) for steps, branch in ways if steps is not None]
            if known:
                steps, branch = min(known, key=lambda way: len(way[0]))
                return [*steps, Step(node, branch)]
        return None

    def steps(self) -> list[Step]:
        """The steps of the stream through the block. Errors: Unaccounted."""
        if self.call.y is None:
            raise NotResidual("it returns no tensor of its input's shape")
        steps = self.walk(self.call.y)
        if steps is None:
            inside = self.nodes[self.call.first : self.call.last]
            adds = any(node.what in ADDITIONS and self.call.shape in node.shapes for node in inside)
            raise (Unaccounted if adds else NotResidual)(self._blame(self.call.y))
        if not any(step.branch is not None for step in steps):
            raise NotResidual("nothing is added to its input")
        self._find_levels(steps)
        return steps

    def structure(self) -> Structure:
        steps = self.steps()
        self._refuse_functions()
        groups, writes = self._sublayers(steps)
        self.moving = self._moving(steps)
        parts = tuple(self._part(group, i) for i, group in enumerate(groups))
        reads, scales = self._reading_additions(steps), self._scales(steps)
        images = self._has_channels_first()
        width = self.call.shape[1 if images else -1]
        made = Structure(parts, writes, reads, scales, images, is_in_place=self._is_in_place(), width=width)
        made = made._replace(heads=self.heads, no_roles=self.roles.why, elsewhere=self._elsewhere(steps, parts))
        return made._replace(reads_output=self._reads_output())

    def _refuse_functions(self) -> None:
        """Unaccounted for a norm of the stream that no module computes: torch's function, or a formula. The stream
        times a root of its rows' statistics is one."""
        numbers, statistics, roots = {*self.level}, set[Key](), set[Key]()
        for node in self.nodes[self.call.first : self.call.last]:
            first = any(k in numbers for k in node.inputs[:1])
            some, root = (any(k in of for k in node.inputs) for of in (numbers, roots))
            statistic = any(k in statistics for k in node.inputs)
            if (node.what in _NORMS and first) or (node.what in TIMES and some and root):
                raise Unaccounted(
                    f"the operation {node.what} at {node.where} norms the residual stream, and only norms that are "
                    "modules, and are called as such, can be replaced: make it a module"
                )
            if node.what in _STATISTICS and first and node.made[0] != node.shapes[0]:
                (roots if node.what in _ROOTS else statistics).update(node.outputs)
            elif node.what in _ROOTS and statistic:
                roots.update(node.outputs)
            elif node.what in _BY_NUMBER and (some or root or statistic):
                (numbers if some else roots if root else statistics).update(node.outputs)

    def _reads_output(self) -> bool:
        last = {at for at, level in self.level.items() if level == max(self.level.values())}
        inside = self.nodes[self.call.first : self.call.last]
        return any(n.outputs[0] not in self.level and any(k in last for k in n.inputs) for n in inside)

    def _elsewhere(self, steps: list[Step], parts: tuple[Part, ...]) -> frozenset[str]:
        own = {path for part in parts for path in part.norms()}
        branches = {out for step in steps if step.branch is not None for out in self._tail_of(step.branch)}
        norms = (n for n in self.nodes[self.call.first : self.call.last] if n.what == "norm")
        others = (n for n in norms if n.inputs[0] not in self.level and n.outputs[0] not in branches)
        return frozenset(path for n in others if (path := self.paths.get(n.module, "")) in own)

    def _tail_of(self, branch: Key) -> Iterator[Key]:
        """The tensors from the last norm of a branch on."""
        at: Key | None = branch
        while at is not None:
            yield at
            node = self.node(at)
            passes = UNCHANGED | {"dropout", "drop_path", "scale"}
            goes_on = node is not None and node.inputs and (node.what in passes or node.factor is not None)
            at = node.inputs[0] if node is not None and goes_on else None

    def _is_in_place(self) -> bool:
        inside = self.nodes[self.call.first : self.call.last]
        return any(out not in n.inputs and out[0] in {k[0] for k in n.inputs} for n in inside for out in n.outputs)

    def _has_channels_first(self) -> bool:
        """Returns whether convolutions read the stream, and nothing else does. Errors: Unaccounted if which of its
        dimensions is the width is not known."""
        inside = self.nodes[self.call.first : self.call.last]
        readers = [n for n in inside if any(k in self.level for k in n.inputs) and n.outputs[0] not in self.level]
        if len(self.call.shape) < 3 or all(node.what != "conv" for node in inside):
            return False
        kinds = {node.what for node in readers}
        if {"conv", "linear"} <= kinds:
            raise Unaccounted(
                "a convolution and a linear layer read the stream, which take different dimensions for its width"
            )
        if "linear" in kinds:
            return False  # it reads the last dimension
        odd = next((node.what for node in readers if node.what not in _READS_ROWS and node.what != "conv"), None)
        if odd is not None:
            raise Unaccounted(
                f"convolutions stand behind the operation {odd}, and which dimension of the stream is its width is not "
                "known"
            )
        return bool(readers) and all(node.what == "conv" for node in readers)

    def _blame(self, at: Key) -> str:
        """What stands between the block's output and its input."""
        node = self.node(at)
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
        """How many additions each tensor of the stream has behind it."""
        on_path = {step.node.outputs[0] for step in steps}
        self.level[self.call.x] = 0
        adds = {step.node.outputs[0]: i + 1 for i, step in enumerate(s for s in steps if s.branch is not None)}
        for node in self.nodes[self.call.first : self.call.last]:
            out = node.outputs[0]
            if out in adds:
                self.level[out] = adds[out]
            elif node.inputs and node.inputs[0] in self.level and (self._is_same(node) or out in on_path):
                self.level[out] = self.level[node.inputs[0]]

    def _is_same(self, node: Node) -> bool:
        if node.what not in FOLLOWED or len(node.outputs) != 1 or not node.shapes:
            return False
        old, new = node.shapes[0], node.made[0]
        return old[-1:] == new[-1:] and math.prod(old) == math.prod(new)

    def reach(self, at: Key) -> tuple[set[Key], list[Node], set[Key]]:
        """Backwards from a branch to the stream: the stream's tensors that it reads, the nodes between, in order, and
        the tensors from outside the block."""
        read: set[Key] = set()
        outside: set[Key] = set()
        numbers: set[int] = set()
        todo = [at]
        for here in each_once(todo):
            if here in self.level:
                read.add(here)
                continue
            number = self.made.get(here)
            if number is None or not self.call.first <= number < self.call.last:
                outside.add(here)
                continue
            numbers.add(number)
            todo += self.nodes[number].inputs
        return read, [self.nodes[number] for number in sorted(numbers)], outside

    def _sublayers(self, steps: list[Step]) -> tuple[list[list[Step]], tuple[int, ...]]:
        """The steps of each sublayer. Additions whose branches read the stream before the addition ahead of them are
        parallel: of one sublayer."""
        groups: list[list[Step]] = []
        writes: list[int] = []
        scales: list[Step] = []
        for step in steps:
            if step.branch is None and not step.is_norm:
                scales.append(step)
                continue
            if step.branch is None:
                if not groups:
                    name = self.paths[step.node.module]
                    raise Unaccounted(f"{name} norms its input, and the normed one goes on as the stream")
                groups[-1].append(step)
                continue
            read, _, _ = self.reach(step.branch)
            if not read:
                raise Unaccounted("a tensor that is not computed from the stream is added to it")
            start = writes.count(len(groups) - 1) if groups else 0
            is_parallel = bool(groups) and max(self.level[k] for k in read) <= len(writes) - start
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
        wrote = {step.node.outputs[0] for step in steps}
        found, written, since = set(), 0, 0
        for node in self.nodes[self.call.first : self.call.last]:
            if node.what not in ADDITIONS or len(node.inputs) != 2:
                continue
            if node.outputs[0] in wrote:
                written, since = written + 1, 0
            elif sum(k in self.level for k in node.inputs) == 1:  # whatever the shapes: a batch of one broadcasts
                found.add((written, since))
                since += 1
        return frozenset(found)

    def _scales(self, steps: list[Step]) -> frozenset[tuple[int, int]]:
        """Multiplications of the stream that it goes on from, among all of the stream by a number."""
        wrote = {step.node.outputs[0] for step in steps if step.branch is not None}
        passed = {step.node.outputs[0] for step in steps if step.node.factor is not None}
        found, written, since = set(), 0, 0
        for node in self.nodes[self.call.first : self.call.last]:
            if node.outputs[0] in wrote:
                written, since = written + 1, 0
            elif node.factor is not None and node.inputs[0] in self.level:
                if node.outputs[0] in passed:
                    found.add((written, since))
                since += 1
        return frozenset(found)

    # One sublayer.

    def _moving(self, steps: list[Step]) -> set[nn.Module]:
        """Dropouts, and stochastic depth, that stand last on branches and nowhere else."""
        last: dict[nn.Module, int] = {}
        for step in steps:
            at = step.branch
            while at is not None:
                for module in (here := self._dropouts(at)):
                    last[module] = last.get(module, 0) + 1
                node = self.node(at)
                passes = UNCHANGED | {"drop_path", "scale", "norm"}
                if here or node is None or not (node.what in passes or node.factor is not None):
                    break
                at = node.inputs[0] if node.inputs else None
        inside = self.nodes[self.call.first : self.call.last]
        calls = {module: sum(node.module is module for node in inside) for module in last}
        return {module for module, count in last.items() if calls[module] == count}

    def _dropouts(self, at: Key) -> list[nn.Module]:
        """The dropouts, and stochastic depth, that gave this tensor."""
        node = self.node(at)
        own: list[nn.Module] = []
        if node is not None and node.module is not None and node.what in ("dropout", "drop_path"):
            own = [node.module]
        return own + [module for module in self.record.dropped.get(at, ()) if module in self.paths]

    def _part(self, group: list[Step], index: int) -> Part:
        branches = [step.branch for step in group if step.branch is not None]
        after = [self.paths[step.node.module] for step in group if step.is_norm]
        alpha = math.prod(step.node.factor for step in group if step.node.factor is not None)
        if len(after) > 1:
            raise Unaccounted(f"two norms follow each other on the stream, {after[0]} and {after[1]}")
        tails = [self._tail(branch) for branch in branches]
        tail = tails[0] if len(tails) == 1 else Tail()
        reached = [self.reach(branch) for branch in branches]
        nodes = [node for _, nodes, _ in reached for node in nodes]
        read = {k for keys, _, _ in reached for k in keys}
        norms = [node for node in nodes if node.what == "norm" and node.inputs[0] in read]
        before = [*dict.fromkeys(self.paths[node.module] for node in norms)]
        past = [n for n in nodes if n.what != "norm" and any(k in read for k in n.inputs) and not self._is_same(n)]
        memory, attends_outside = self._memory(reached, nodes)
        if attends_outside and memory is None:
            raise InputError(
                f"attention of a {type(self.block).__name__} reads keys and values from a tensor that is none of the "
                "block's arguments: pass the encoder's output to the block's forward"
            )
        ends = {owner for branch in branches for owner in self.last(branch)}
        linears, experts, kind = self._linears(nodes, ends, memory is not None)
        main = (*before, *after, *tail.norms[:1])
        return Part(
            kind,
            main[0] if main else None,
            linears,
            tail.dropout,
            drop_path=tail.drop_path,
            before=before[0] if before else None,
            twins=tuple(before[1:]),
            after=after[0] if after else None,
            branch=tail.norms[0] if tail.norms else None,
            reads_past=bool(before and past),
            memory=memory,
            is_parallel=len(branches) > 1 or bool(before[1:]) or self._is_sum(branches[0]),
            beta=tail.beta,
            scales=tail.scales,
            alpha=alpha,
            experts=experts,
        )

    def _tail(self, branch: Key) -> "Tail":
        """What stands last on a branch: dropout, norms, factors."""
        found, at = Tail(), branch
        while True:
            for module in self._dropouts(at):
                is_path = self.record.kinds.get(module) == "drop_path"
                if module in self.moving and is_path and found.drop_path is None:
                    found = found._replace(drop_path=self.paths[module])
                elif module in self.moving and not is_path and found.dropout is None:
                    found = found._replace(dropout=self.paths[module])
            node = self.node(at)
            if node is None or not node.inputs:
                break
            path = self.paths.get(node.module, "")
            if node.what == "norm" and not found.norms and found.beta == 1.0 and not found.scales:
                found = found._replace(norms=(path,))
            elif node.what == "scale":
                found = found._replace(scales=(*found.scales, path))
            elif node.factor:
                found = found._replace(beta=found.beta * node.factor)
            elif node.what not in UNCHANGED | {"dropout", "drop_path"}:
                break
            at = node.inputs[0]
        return found

    def _is_sum(self, branch: Key) -> bool:
        """The branch is a sum of two that both read the stream."""
        node = self.node(branch)
        while node is not None and node.what in UNCHANGED | {"dropout", "drop_path"} and node.inputs:
            node = self.node(node.inputs[0])
        if node is None or node.what not in ADDITIONS or len(node.inputs) != 2:
            return False
        reached = [self.reach(k) for k in node.inputs]
        return all(read and any(one.what == "linear" for one in nodes) for read, nodes, _ in reached)

    def _memory(
        self, reached: list[tuple[set[Key], list[Node], set[Key]]], nodes: list[Node]
    ) -> tuple[str | None, bool]:
        """The argument that values are made of, an encoder's output; and whether they are made of something else than
        the stream."""
        names = {at: name for at, name in self.call.arguments.items() if at != self.call.x}
        outside = {k for _, _, found in reached for k in found}
        layers = [n for n in nodes if n.what == "linear" and n.module is not None and n.inputs[0] in outside]
        told = [self.roles.of(owner_of(node.module)) for node in layers if node.module is not None]
        values = [n for n, one in zip(layers, told) if one and any(rows.role == "value" for rows in one.rows)]
        is_recognised = any(one.heads for _, owner in self.matrices(nodes) if (one := self.roles.of(owner)))
        first = next(iter(values if is_recognised else layers), None)
        return (None if first is None else names.get(first.inputs[0])), is_recognised and bool(values)

    def _without_adapters(self, path: str) -> str:
        """The path of the layer that an adapter of PEFT wraps, where this linear layer is part of one."""
        while type(self.block.get_submodule(path.rpartition(".")[0])).__module__.startswith("peft."):
            path = path.rpartition(".")[0]
        return path if not isinstance(self.block.get_submodule(path), nn.ModuleDict) else path.rpartition(".")[0]

    def matrices(self, nodes: list[Node]) -> list[tuple[str, Owner]]:
        """The linear layers, and parameters of two dimensions and more, that a branch multiplies by; their paths."""
        found: dict[Owner, str] = {}
        own = {id(p): (path, p) for path, p in self.block.named_parameters() if p.dim() >= 2}
        for node in nodes:
            if node.what == "linear" and node.module is not None:
                if node.module not in self.paths:
                    raise Unaccounted(f"it calls {named(node.module)} that is none of its parts")
                path = self._without_adapters(self.paths[node.module])
                if path not in found.values():
                    found.setdefault(owner_of(node.module), path)
            elif node.module is None:
                found |= {own[k[0]][1]: own[k[0]][0] for k in node.inputs if k[0] in own and own[k[0]][1] not in found}
        return [(self._layer(path), owner) for owner, path in found.items()]

    def _layer(self, path: str) -> str:
        """The path of the linear layer whose weight is read without calling it."""
        above, _, name = path.rpartition(".")
        return above if name == "weight" and isinstance(self.block.get_submodule(above), nn.Linear) else path

    def last(self, branch: Key) -> set[Owner]:
        """The matrices behind which nothing but additions, norms, dropout and factors stands before the stream."""
        found: set[Owner] = set()
        own = {id(p): p for p in self.block.parameters() if p.dim() >= 2}
        todo = [branch]
        for at in each_once(todo):
            node = self.node(at)
            if node is None or at in self.level:
                continue
            if node.what == "linear" and node.module is not None:
                found.add(owner_of(node.module))
                continue
            weights = [self._parameter(k, own) for k in node.inputs]
            if at in self.record.outputs_of_attention:
                found |= {p for p in weights if p is self.record.outputs_of_attention[at]}
            elif any(p is not None for p in weights) and node.what not in _ON_A_BRANCH:
                found |= {p for p in weights if p is not None}
            elif node.what in _ON_A_BRANCH:
                columns = node.made[0][-1:]
                todo += [k for k, shape in zip(node.inputs, node.shapes) if shape[-1:] == columns]
                todo += node.inputs[:1] if node.what in UNCHANGED else ()
        return found

    def _parameter(self, at: Key, own: dict[int, nn.Parameter]) -> nn.Parameter | None:
        """The parameter that a tensor is, or is a view or a copy of."""
        while at[0] not in own:
            node = self.node(at)
            if (
                node is None
                or node.what not in UNCHANGED | {"transpose_last", "index_select", "__get__"}
                or not node.inputs
            ):
                return None
            at = node.inputs[0]
        return own[at[0]]

    def _linears(
        self, nodes: list[Node], ends: set[Owner], reads_memory: bool
    ) -> tuple[tuple[Linear, ...], tuple[Linear, ...], str]:
        """The linear layers of a branch and its stacks of experts, with the roles of their rows, and its kind."""
        found = [(path, owner, told) for path, owner in self.matrices(nodes) if (told := self.roles.of(owner))]
        is_attention = reads_memory or any(
            told.reads_attention or told.mixes or told.heads for _, owner, told in found if owner in ends or told.heads
        )
        is_mixer = not any(told.heads for *_, told in found) and any(told.mixes for *_, told in found)
        self.heads = self.heads or next((told.heads for *_, told in found if told.heads), None)
        called = {owner_of(node.module) for node in nodes if node.module is not None and node.what == "linear"}
        linears: list[Linear] = []
        experts: list[Linear] = []
        for path, owner, told in found:
            rows = () if is_mixer else told.rows
            roles = tuple(dict.fromkeys(run.role for run in rows if run.role is not None))
            if owner in ends:
                roles, rows = ("output" if is_attention and not _ends_feed_forward(told, found) else "fc2",), ()
            is_stack = owner not in called and isinstance(owner, nn.Parameter) and owner.dim() > 2
            is_unclear = told.is_unclear and not is_mixer
            linear = Linear(path, roles, told.factor, rows, told.is_transposed, owner in called, is_unclear)
            (experts if is_stack else linears).append(linear)
        kind = "cross-attention" if reads_memory else "self-attention" if is_attention else "feed-forward"
        return tuple(linears), tuple(experts), kind


def named(module: nn.Module) -> str:
    """A module's class with its article, for messages."""
    kind = type(module).__name__
    return f"{'an' if kind[:1] in 'AEIOU' else 'a'} {kind}"


def _ends_feed_forward(told: Matrix, found: list[Any]) -> bool:
    """The matrix ends a feed-forward beside attention."""
    return not told.reads_attention and any(other.reads_attention for *_, other in found)


class Tail(NamedTuple):
    dropout: str | None = None
    drop_path: str | None = None
    norms: tuple[str, ...] = ()
    beta: float = 1.0
    scales: tuple[str, ...] = ()
