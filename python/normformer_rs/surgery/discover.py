"""Finds a model's stacks of residual blocks: the lists whose entries all compute x plus branches."""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..errors import InputError
from .blocks import (
    LISTS,
    STRUCTURES,
    TORCHS,
    End,
    Group,
    declaration_of,
    is_block,
    is_converted,
    parent_of,
    structure_of,
)
from .converted import original
from .examples import caller, failed_on, quietly, refuse_without
from .loops import find_spans, layers_of, refuse_again, views
from .record import Record, record
from .roles import Roles, find_roles
from .structure import (
    NotResidual,
    Unaccounted,
    calls_of,
    is_added_to,
    named,
    norm_after,
    norms_after,
    reads,
    structure,
    writers,
)

Unknown = dict[str, str]
"""The path of a list whose modules look like blocks → the reason why they are not known ones."""


class Stacks(NamedTuple):
    """A model's stacks of blocks."""

    groups: list[Group]
    unknown: Unknown
    """Lists whose modules add something to a tensor of their input's shape but are no known blocks, and single modules
    that could not be explained: path → reason."""
    run: Callable[[], Any] | None
    """Runs the model with the same input as the run that found the stacks. None: no run was needed."""
    is_narrow: bool = False
    """Whether that run computed in 16 bits anywhere."""


def find_stacks(model: nn.Module, example: Any = None) -> Stacks:
    """Returns the model's stacks of blocks, and the lists that are no stacks with the reasons. torch.nn's blocks are
    recognised by their class, all others by one run of the model. The run also finds the norm after registered blocks.

    Errors: InputError if the model has no stack.
    """
    unknown: Unknown = {}
    not_residual: Unknown = {}
    candidates = [*_candidates(model)]  # (path, entries) of lists whose entries may be blocks
    singles = [*_alone(model)]  # blocks that are in no list
    if not candidates and not singles:
        raise InputError(
            f"{type(model).__name__} holds no list of modules (ModuleList, Sequential) with blocks: pass the part of "
            "the model that has one, or register the class of your block with normformer_rs.surgery.register_block"
        )
    blocks = [entry for _, entries in candidates for _, entry in entries] + [group.blocks[0] for group in singles]
    run_record, why_no_run = _run(model, blocks, example)
    groups: list[Group] = []
    stack_paths: list[str] = []
    refused: Unknown = {}  # entries of stacks that could not be explained
    listed: set[nn.Module] = set()  # the blocks of the lists so far
    for path, entries in _without_parts(candidates):
        if any(_is_below(path, stack) for stack in stack_paths):  # a list inside a block
            continue
        members, reasons = _examine(entries, run_record, why_no_run)
        reason = None if members else next(iter(reasons.values()))  # the first entry's reason stands for the list's
        if reason is None and run_record is not None and (stage := _stage(path, members, candidates, run_record)):
            not_residual[path] = stage
        elif reason is None and (fault := _twin_of_some(members)):
            raise InputError(f"{path}.{fault}")
        elif reason is None:
            if listed & {*members.values()}:
                raise InputError(
                    f"{path} shares some of its blocks with another list, so that their order in a stack is not known: "
                    "pass the part of the model that has one list of them"
                )
            stack_paths.append(path)
            listed |= {*members.values()}
            groups += _groups(model, path, members, run_record)
            # entries that surely are no residual blocks need no row of the table
            unexplained = {name: why for name, why in reasons.items() if not isinstance(why, NotResidual)}
            refused |= {
                f"{path}.{name}".lstrip("."): _in_words(name, entries, why) for name, why in unexplained.items()
            }
        elif isinstance(reason, NotResidual):
            not_residual[path] = _in_words(next(iter(reasons)), entries, reason)
        elif not any(_is_below(path, outer) for outer in unknown):
            unknown[path] = _in_words(next(iter(reasons)), entries, reason)
    # a list with a stack inside it, such as a list of stages, needs no reason
    unknown = {path: why for path, why in unknown.items() if not any(_is_below(stack, path) for stack in stack_paths)}
    unknown |= refused
    if run_record is not None:
        groups = _noted_mixed(
            [_with_end(group, run_record) for group in _joined(model, groups, run_record)], run_record
        )
    for group in singles:
        (path,), (block,) = group.names, group.blocks
        if any(block in other.blocks for other in groups):
            continue
        try:
            _store_structure(block, run_record, why_no_run)
            group = group._replace(end=_end(model, group.path, block, run_record))
            groups.append(group if run_record is None else _with_end(group, run_record))
        except Unaccounted as reason:
            unknown[path] = f"{named(block)}: {reason}"
    if not groups and run_record is not None:
        groups = _loops(model, candidates, example)
    if not groups:
        if run_record is None and why_no_run:
            raise refuse_without(model, why_no_run)
        raise none_found(model, unknown or not_residual)
    if run_record is None:
        return Stacks(groups, unknown, None)
    return Stacks(groups, unknown, caller(model, example), run_record.is_narrow)


def _loops(model: nn.Module, candidates: Any, example: Any) -> list[Group]:
    """Returns a group for each module whose forward loops over a list and adds the branches itself, so that the list's
    entries are no blocks. The group's blocks are views of the module, one for each layer (loops.py). `candidates`: the
    lists, as `_candidates` yields them."""
    owners: dict[str, nn.Module] = {}
    for path, _ in candidates:
        while path:  # each module around a list may have the loop over it
            path = parent_of(path)
            if not isinstance(owner := model.get_submodule(path), LISTS):
                refuse_again(owner)
                owners.setdefault(path, owner)
    run_record, _ = _run(model, [*owners.values()], example, are_loops=True)
    groups: list[Group] = []
    for path, owner in owners.items():
        if run_record is None or any(_is_below(group.path, path) for group in groups):  # its loop is in an inner module
            continue
        try:
            calls_of(owner, run_record)
            layers, end = layers_of(structure(owner, run_record, run_record.roles))
        except Unaccounted:
            continue
        names = [f"{path or type(owner).__name__}[{i}]" for i in range(len(layers))]
        span = run_record.spans.get(owner)
        group = Group(path, names, views(owner, layers), owner, len(layers), loop=owner, span=span)
        if end is not None:
            holder_path = f"{path}.{parent_of(end)}".strip(".")
            group = group._replace(end=End(model.get_submodule(holder_path), holder_path, end.rpartition(".")[2]))
        groups.append(group)
    return groups


def _stage(path: str, blocks: dict[str, nn.Module], candidates: Any, run_record: Record) -> str:
    """Returns the reason why the entries of the list at `path` are stages (themselves stacks of blocks); empty if they
    are blocks. An entry is a stage if a norm on its stream follows a list of blocks inside it, or if all of its
    sublayers belong to blocks inside it that have several sublayers each. `blocks`: the entries by name; `candidates`:
    all lists, as `_candidates` yields them."""
    for name, block in blocks.items():
        known, parts = STRUCTURES.get(block), {*block.modules()}
        lists = [entries for list_path, entries in candidates if list_path != path and _is_below(list_path, path)]
        inside = [entry for entries in lists for _, entry in entries if entry in parts and _is_known(entry, run_record)]
        # the blocks inside, of several sublayers each, account for all sublayers of the entry
        counts = [len(structure(entry, run_record, run_record.roles).parts) for entry in inside]
        if known is not None and counts and min(counts) > 1 and sum(counts) == len(known.parts):
            return f"{name} is a stage: its sublayers are those of a list of blocks"
        # a norm after a sublayer that no inner block contains stands after the whole inner list
        covered = {part for entry in inside for part in entry.modules()}
        after = [part.after for part in (() if known is None else known.parts) if part.after is not None]
        outside = (norm_path for norm_path in after if block.get_submodule(norm_path) not in covered)
        if inside and (norm := next(outside, None)):
            return f"{name} is a stage: its norm {norm} follows a list of blocks"
    return ""


def _is_known(block: nn.Module, run_record: Record) -> bool:
    """Returns whether the block's structure can be read from the run."""
    try:
        structure(block, run_record, run_record.roles)
    except Unaccounted:
        return False
    return True


def _joined(model: nn.Module, groups: list[Group], run_record: Record) -> list[Group]:
    """Returns the groups after joining lists that follow each other into one stack: the first block of one list reads
    the output of the last block of another."""
    joined: list[Group] = []
    for group in groups:
        before = next((earlier for earlier in joined if _follows(group, earlier, run_record)), None)
        if before is None:
            joined.append(group)
            continue
        path = before.path
        while path and not _is_below(group.path, path):  # up to the innermost module around both lists
            path = parent_of(path)
        is_list = isinstance(model.get_submodule(path), LISTS) and path  # a list of lists counts as the stack's list
        holder = _called(model, parent_of(path) if is_list else path, run_record)
        joined[joined.index(before)] = before._replace(
            path=path if is_list else before.path,
            names=[*before.names, *group.names],
            blocks=[*before.blocks, *group.blocks],
            holder=holder,
            depth=before.depth + group.depth,
            end=group.end,
            runs=run_record.runs.get(holder, 1),
        )
    return joined


def _without_parts(candidates: Any) -> list[tuple[str, list[tuple[str, nn.Module]]]]:
    """Returns the candidates without lists whose entries are all in a longer list, or in an equally long earlier one.
    `candidates`: the lists, as `_candidates` yields them."""
    sets = [{entry for _, entry in entries} for _, entries in candidates]

    def is_part(i: int) -> bool:
        """Returns whether another list has all entries of list i."""
        return any(sets[i] < other or (sets[i] == other and j < i) for j, other in enumerate(sets))

    return [candidate for i, candidate in enumerate(candidates) if not is_part(i)]


def _twin_of_some(blocks: dict[str, nn.Module]) -> str:
    """Returns the reason to refuse a list's blocks if some of them get their input as two arguments, and others do not;
    else "". The second argument would then be the stream for one block, and another tensor for the next."""
    twins = {name: STRUCTURES[block].twin for name, block in blocks.items() if block in STRUCTURES}
    name = next((name for name, twin in twins.items() if twin is not None), None)
    if name is None or None not in twins.values():
        return ""
    return (
        f"{name}, {named(blocks[name])}, gets its input as its argument {twins[name]}, too, and other blocks get "
        "another tensor there: pass a clone"
    )


def _noted_mixed(groups: list[Group], run_record: Record) -> list[Group]:
    """Returns the groups, with a note in those whose stream comes from another group or goes on to one. Some schemes
    refuse these later, since they need layers that are alike, and one depth."""
    notes: dict[int, str] = {}  # identity of a group → its note
    for group, other in itertools.permutations(groups, 2):
        # for the other group: the input of each call, and the tensors that it is a rearrangement of → the block
        calls_after = ((call, block) for block in other.blocks for call in run_record.calls.get(block, ()))
        after = {source: block for call, block in calls_after for source in run_record.sources(call.x)}
        for block in group.blocks:
            follower = next((after[call.y] for call in run_record.calls.get(block, ()) if call.y in after), None)
            if follower is None or STRUCTURES.get(block) is None or STRUCTURES.get(follower) is None:
                continue
            name, follower_name = group.names[group.blocks.index(block)], other.names[other.blocks.index(follower)]
            note = f"the stream goes from {name} straight to {follower_name}, whose layers are not alike"
            notes = {id(group): note, id(other): note} | notes  # a group keeps its first note
            break
    return [group._replace(shares_stream=notes.get(id(group), "")) for group in groups]


def _follows(group: Group, before: Group, run_record: Record) -> bool:
    """Returns whether the first block of `group` reads the output of the last block of `before`, and the two blocks
    have as many sublayers, the same width, and are each called once in a pass."""
    last, first = before.blocks[-1], group.blocks[0]
    if not {last, first} <= run_record.calls.keys() or any(block not in STRUCTURES for block in (last, first)):
        return False
    ends, begins = STRUCTURES[last], STRUCTURES[first]
    are_alike = (len(ends.parts), ends.width) == (len(begins.parts), begins.width)
    are_called_once = ends.calls == begins.calls == 1
    outputs, inputs = [call.y for call in run_record.calls[last]], [call.x for call in run_record.calls[first]]
    return are_alike and are_called_once and outputs == inputs


def none_found(model: nn.Module, unknown: Unknown) -> InputError:
    """Returns the error for a model without known blocks, with the reason for the first list."""
    path, reason = next(iter(unknown.items()))
    return InputError(
        f"{type(model).__name__}'s {path or 'list'} holds no blocks that add branches to a residual stream: {reason}"
    )


def _candidates(model: nn.Module) -> Iterator[tuple[str, list[tuple[str, nn.Module]]]]:
    """Yields the lists (ModuleList, Sequential) whose entries may be blocks, as (path, [(name, entry)]). An outer list
    comes before the lists inside it."""
    for path, module in model.named_modules():
        if isinstance(module, LISTS):
            entries = [(name, unwrapped(entry)) for name, entry in module.named_children()]
            entries = [(name, entry) for name, entry in entries if _may_be_block(entry)]
            if entries:
                yield path, entries


def _may_be_block(entry: nn.Module) -> bool:
    """Returns whether a list's entry is of a known block class, or has child modules and is no list itself."""
    return is_block(type(entry)) or (not isinstance(entry, LISTS) and next(entry.children(), None) is not None)


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module inside the wrappers of activation checkpointing and torch.compile."""
    inner = getattr(module, "_checkpoint_wrapped_module", module)
    return getattr(inner, "_orig_mod", inner)


def _is_below(path: str, other: str) -> bool:
    """Returns whether `path` is `other` or lies inside it."""
    return path == other or path.startswith(f"{other}.") or other == ""


def _run(model: nn.Module, blocks: list[nn.Module], example: Any, are_loops: bool = False) -> tuple[Record | None, str]:
    """Runs the model and returns (its record, ""), with the roles of its matrices in the record. If there is no record,
    returns (None, the reason); the reason is empty if no block needs a run. `are_loops`: the blocks are modules around
    lists, and may loop over them within their forward."""
    if all(isinstance(block, tuple(TORCHS)) or is_converted(block) for block in blocks):
        return None, ""
    if any(p.is_meta for p in model.parameters()):
        return _run_of_twin(model, blocks, example, are_loops)
    run = caller(model, example)
    if run is None:
        return None, "no input is known"
    with quietly(model):
        model.eval()
        try:
            run_record = record(model, blocks, run)
        except MemoryError:
            raise
        except Exception as reason:  # a model may raise anything
            if example is not None:
                raise failed_on(model, reason) from reason
            said = str(reason).partition("\n")[0]
            return None, f"it does not take the input that its configuration tells ({type(reason).__name__}: {said})"
        if are_loops:
            find_spans(model, run_record)
        # the roles are found in a further run, with gradients, which needs the norms and the matrices of each branch
        norms = {module for module, kind in run_record.kinds.items() if kind == "norm"}
        # the last matrix of each branch → all matrices of that branch
        ends = {last: own for block in blocks for last, own in writers(block, run_record)}
        run_record.roles = find_roles(model, run, norms, ends) if ends else Roles({})
    return run_record, ""


def _run_of_twin(model: nn.Module, blocks: list[nn.Module], example: Any, are_loops: bool) -> tuple[Record | None, str]:
    """Returns the record of a run for a model on the meta device, where many models cannot run. A copy of the model
    runs on the CPU instead. Then the original's modules replace those of the copy in the record. To save memory, all
    rows of a matrix of the copy are views of one row."""
    names = {module: name for name, module in model.named_modules()}
    twin, copies = copy.deepcopy(model), {}  # `copies`: the twin's parameter on the meta device → the one on the CPU
    for module in twin.modules():
        for name, p in module._parameters.items():
            if p is not None and p not in copies:
                # an explicit CPU, since from_pretrained sets torch's default device to meta
                row = torch.rand(p.shape[-1:], device="cpu") * 0.2 - 0.1
                copies[p] = nn.Parameter(row.to(p.dtype).expand(p.shape), p.requires_grad)
            module._parameters[name] = None if p is None else copies[p]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else torch.zeros_like(buffer, device="cpu")
    blocks_of_twin = {block: twin.get_submodule(names[block]) for block in blocks}
    with _OneRow():  # linear layers then do not expand a row into a whole matrix in memory
        run_record, why_no_run = _run(twin, [*blocks_of_twin.values()], example, are_loops)
    if run_record is not None:
        # the copy's module → the model's
        originals = {twin.get_submodule(name): module for module, name in names.items()}
        run_record.stand_for(originals)
        parameters = dict(model.named_parameters())
        paths = {p: path for path, p in twin.named_parameters()}
        matrices = run_record.roles.matrices.items()  # the keys are linear layers and bare parameters
        run_record.roles = run_record.roles._replace(
            matrices={
                originals[key] if isinstance(key, nn.Module) else parameters[paths[key]]: roles
                for key, roles in matrices
            }
        )
    return run_record, why_no_run


class _OneRow(TorchFunctionMode):
    """Computes linear layers with the matrices of `_run_of_twin`, whose rows are all equal: multiplies by one row and
    repeats the result. torch would copy the whole matrix into memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch; a linear layer with equal rows is computed from one row."""
        # its arguments, which may be given by position or by name
        given = dict(zip(("input", "weight", "bias"), args)) | (kwargs or {})
        if func is nn.functional.linear and given["weight"].stride() == (0, 1):  # its rows are one row in memory
            x, weight, bias = given["input"], given["weight"], given.get("bias")
            y = func(x, weight[:1]).expand(*x.shape[:-1], len(weight))
            return y.clone() if bias is None else y + bias  # the clone may be written in place, as a real output may
        return func(*args, **(kwargs or {}))


def _examine(
    entries: list[tuple[str, nn.Module]], run_record: Record | None, why_no_run: str
) -> tuple[dict[str, nn.Module], dict[str, Unaccounted]]:
    """Returns the blocks of a list by their names, and for each other entry the reason why it is no block. If only some
    entries of a class are blocks, no entry counts as one. `entries`: (name, module); `why_no_run`: the reason if
    `run_record` is None."""
    blocks: dict[str, nn.Module] = {}
    reasons: dict[str, Unaccounted] = {}
    for name, entry in entries:
        try:
            _store_structure(entry, run_record, why_no_run)
            blocks[name] = entry
        except Unaccounted as reason:
            reasons[name] = reason
    refused = {type(entry) for name, entry in entries if name in reasons}
    return ({} if any(type(block) in refused for block in blocks.values()) else blocks), reasons


def _in_words(name: str, entries: list[tuple[str, nn.Module]], reason: Unaccounted | None) -> str:
    """Returns a message with the name and class of a list's entry, and the reason why it is no block."""
    return f"{name}, {named(dict(entries)[name])}: {reason}"


def _store_structure(block: Any, run_record: Record | None, why_no_run: str) -> None:
    """Stores a block's structure in STRUCTURES. Blocks of torch.nn's, converted and registered classes get no entry,
    since their class says what they compute. `why_no_run`: the reason if `run_record` is None. Errors: Unaccounted."""
    if isinstance(block, tuple(TORCHS)) and original(type(block)) not in TORCHS:
        base = next(kind for kind in TORCHS if isinstance(block, kind))
        raise Unaccounted(f"it is a subclass of {base.__name__}, and its forward may be another: use {base.__name__}")
    if isinstance(block, tuple(TORCHS)) or is_converted(block):
        return
    if run_record is None:
        raise Unaccounted(why_no_run)
    calls_of(block, run_record)  # raises if the run did not call the block
    if declaration_of(type(block)) is None:
        STRUCTURES[block] = structure(block, run_record, run_record.roles)
    else:
        STRUCTURES.pop(block, None)


def _alone(model: nn.Module) -> Iterator[Group]:
    """Yields the blocks of known classes that are in no list, each as a group of its own."""
    for path, module in model.named_modules():
        parent = model.get_submodule(parent_of(path))
        if is_block(type(module)) and (path == "" or not isinstance(parent, LISTS)):
            holder = model.get_submodule(parent_of(parent_of(path)))
            yield Group(parent_of(path), [path], [module], holder, depth=1)


def _groups(model: nn.Module, path: str, blocks: dict[str, nn.Module], run_record: Record | None) -> Iterator[Group]:
    """Yields the blocks of the list at `path` as groups that may each be one stack. The blocks of a group have the same
    number of sublayers and the same width, or the same class if no structure is known. `blocks`: by their names."""
    holder, listed = _called(model, parent_of(path), run_record), model.get_submodule(path)
    alike: dict[Any, dict[str, nn.Module]] = {}
    for name, block in _in_order(blocks, run_record).items():
        structure = structure_of(block) if not isinstance(block, tuple(TORCHS)) else None
        criterion = type(block) if structure is None else (len(structure.parts), structure.width)
        alike.setdefault(criterion, {})[f"{path}.{name}".lstrip(".")] = block
    entries = [unwrapped(entry) for entry in listed._modules.values() if entry is not None]
    for by_name in alike.values():
        members = [*by_name.values()]
        kinds = tuple({type(block) for block in members})
        # The number of layers: a block with a recorded structure counts as often as a pass calls it, another block as
        # often as it stands in the list.
        uncounted = [entry for entry in entries if entry in members and entry not in STRUCTURES]
        depth = len(uncounted) + sum(_layers(member) for member in members if member in STRUCTURES)
        # entries that are no blocks, but of a subclass of the blocks' class, are layers of the stack, too
        depth += sum(isinstance(entry, kinds) and entry not in blocks.values() for entry in entries)
        runs = 1 if run_record is None else run_record.runs.get(holder, 1)
        yield Group(
            path,
            [*by_name],
            members,
            holder,
            depth=max(depth, len(members)),
            end=_end(model, path, members[-1], run_record),
            runs=runs,
        )


def _in_order(blocks: dict[str, nn.Module], run_record: Record | None) -> dict[str, nn.Module]:
    """Returns a list's blocks in the order in which the run has called them."""
    if run_record is None or any(block not in run_record.calls for block in blocks.values()):
        return blocks
    return dict(sorted(blocks.items(), key=lambda item: run_record.calls[item[1]][0].first))


def _called(model: nn.Module, path: str, run_record: Record | None) -> nn.Module:
    """Returns the module at a path or, if its forward was not called, the innermost module around it whose forward was.
    A ModuleDict, for example, has no forward. A list is returned as it is."""
    module = model.get_submodule(path)
    while path and run_record is not None and module not in run_record.runs and not isinstance(module, LISTS):
        path = parent_of(path)
        module = model.get_submodule(path)
    return module


def _layers(block: nn.Module) -> int:
    """Returns how many layers share a block: its number of calls in one pass."""
    return STRUCTURES[block].calls if block in STRUCTURES else 1


def _end(model: nn.Module, path: str, last: nn.Module, run_record: Record | None) -> End | None:
    """Returns the norm after the stack's last block. None: there is none, or it is not the stack's. `path`: the path of
    the list of blocks; `last`: the last block."""
    norm = None if run_record is None or last not in run_record.calls else norm_after(run_record, last)
    if norm is None or run_record is None or is_added_to(run_record, last):
        return None
    name = next(name for name, module in model.named_modules() if module is norm)
    is_prenorm = STRUCTURES[last].parts[-1].after is None if last in STRUCTURES else True
    # A post-norm stack ends with the norm of its last sublayer and needs no other. A further norm is the stack's own
    # only if it lies in the module that holds the list; a norm outside that module belongs to what follows the stack.
    if not is_prenorm and not _is_below(name, parent_of(path)):
        return None
    owner = parent_of(name)
    return End(model.get_submodule(owner), owner, name.rpartition(".")[2])


def _with_end(group: Group, run_record: Record) -> Group:
    """Returns the group with three facts about its end norm filled in: whether the norm also reads outputs of blocks
    before the last (`reads_elsewhere`), how often it is called before the first block (`early`), and what else it
    norms, or which other norm reads the stack's output (`others`)."""
    end, last = group.end, group.blocks[-1]
    if end is None:
        return group
    elsewhere = any(reads(end.norm, run_record, block) for block in group.blocks if block is not last)
    calls = run_record.calls.get(group.blocks[0])
    early = sum(node.module is end.norm for node in run_record.nodes[: calls[0].first if calls else 0])
    others = ""
    if last in run_record.calls:
        called_blocks = [block for block in group.blocks if block in run_record.calls]
        readers = [norm for block in called_blocks for norm in norms_after(run_record, block)]
        own_calls = sum(norm is end.norm for norm in readers)
        # the end norm's calls on tensors that are no outputs of the blocks
        other_calls = sum(node.module is end.norm for node in run_record.nodes) - own_calls
        rival = next((norm for norm in norms_after(run_record, last) if norm is not end.norm), None)
        if early or other_calls:
            others = f"the model also calls it {'before the first layer' if early else 'on another tensor'}"
        elif rival is not None:
            others = f"{named(rival)} norms the output of that stack, too"
    return group._replace(end=end._replace(reads_elsewhere=elsewhere, early=early, others=others))
