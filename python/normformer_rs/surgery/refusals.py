"""Refuses blocks and schemes that `swap_residuals` cannot convert, before anything changes."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ..declarations.declared import NormAt, only_norm
from ..errors import InputError
from ..nn.attention import BEFORE_PRODUCTS
from ..nn.place import Place
from .block_residual import POINTS, PROJECTIONS, norms_of, projected
from .blocks import (
    TORCH_STACKS,
    TORCHS,
    Group,
    declaration_of,
    parent_of,
    parts_of,
    path_of,
    place_of,
    structure_of,
)
from .handover import refuse_own_forward, refuse_passed_over
from .spec import has
from .stack_residual import StackResidual


def refuse(group: Group, place: Place, to: Any) -> None:
    """Raises InputError if a stack cannot be converted to the scheme `to`. `place`: the place of its first block, which
    holds the scheme's declaration."""
    for name, module in _reclassed(group):
        refuse_own_forward(name.lstrip("."), module)
    for i, (name, block) in enumerate(zip(group.names, group.blocks)):  # i is the layer's number
        for path in _removed(block, place.at(i)):
            if has(block, path):
                refuse_passed_over(f"{name}.{path}".lstrip("."), block.get_submodule(path), to)
        replaced = [] if isinstance(block, tuple(TORCHS)) else _replaced(block, place.at(i))
        if other := next((path for path in replaced if path in structure_of(block).elsewhere), None):
            raise InputError(
                f"{name}.{other} also norms a tensor that is not on the residual stream, and {to} has no norm there: "
                "choose a scheme that keeps the norm in its place"
            )
    if place_of(group.blocks[0]) is not None:
        raise InputError(
            f"{group.path} has another residual scheme of normformer_rs already: take that swap back with its undo(), "
            f"or build the layers with residual={to!r}"
        )
    takes = any(layer.takes for layer in place.declared.layers)  # a layer reads what an earlier one has kept
    joins_layers = place.declared.combine or place.declared.streams or place.declared.mixing or takes
    is_torchs = isinstance(group.blocks[0], tuple(TORCHS))
    # registered blocks' converted forward, and torch.nn's layers outside a torch.nn stack, pass on x alone
    if joins_layers and (
        declaration_of(type(group.blocks[0])) or (is_torchs and type(group.holder) not in TORCH_STACKS)
    ):
        raise InputError(
            f"{to} connects layers with each other, and the loop of {type(group.holder).__name__} does not: use "
            "normformer_rs.nn's TransformerEncoder and TransformerDecoder"
        )
    late_reader = next((b for b in group.blocks if not is_torchs and structure_of(b).reads_output), None)
    if late_reader is not None and (joins_layers or place.declared.end):
        raise InputError(
            f"a {type(late_reader).__name__} of {group.path} reads its residual stream after the last addition, and "
            f"{to} ends a stack in its own way: choose a scheme that has only x, and no norm after the last layer"
        )
    if group.end is not None and group.end.reads_elsewhere and joins_layers:
        name = f"{group.end.path}.{group.end.name}".lstrip(".")
        raise InputError(
            f"{name}, the norm after {group.path}, also norms the output of a block before "
            f"the last, which has several tensors under {to}: choose a scheme that has only x"
        )
    has_end = any(change.kind == "norm" for change in place.declared.end)
    if group.end is not None and not has_end and group.end.others:
        name = f"{group.end.path}.{group.end.name}".lstrip(".")
        raise InputError(
            f"{to} removes {name}, the norm after {group.path}, and {group.end.others}: give that place a norm of its "
            "own, or choose a scheme with a last norm"
        )
    sublayers = [sublayer for layer in place.declared.layers for sublayer in layer.sublayers]
    if not is_torchs:
        _refuse_inside(group, place, to)
        _refuse_shared(group, place, to)
    if any(isinstance(what, NormAt) and what.start != 1.0 for sublayer in sublayers for what in sublayer.around()):
        raise InputError(
            f"{to} with these options sets how the weights of norms start, and {group.path} keeps its norms as they "
            "are: leave the options out"
        )
    layers_differ = joins_layers or place.declared.growth
    if layers_differ and type(group.holder) in TORCH_STACKS and len(group.blocks) < group.depth:
        raise InputError(
            f"{to} treats each layer of {group.path} differently, but only {len(group.blocks)} of its {group.depth} "
            f"layers are {type(group.blocks[0]).__name__}s of their own: others are shared or of another class"
        )


def refuse_mixed(group: Group, place: Place, to: Any) -> None:
    """Raises InputError if a stack shares its stream with layers of another form, and the scheme `to` needs to know
    which layers a stack has. `place`: the place of its first block."""
    if group.shares_stream and not _is_local(place):
        raise InputError(
            f"{group.shares_stream}, and {to} depends on the number of layers, or does something before the first or "
            "after the last: choose a scheme that treats each layer for itself"
        )


def _is_local(place: Place) -> bool:
    """Returns whether a scheme treats each layer for itself, whatever the depth of the stack."""
    declared = place.declared
    # the declaration for another depth, here 2·depth + 1, shows whether the scheme depends on the depth
    depths = {"encoder_layers": 2 * place.depth + 1, "decoder_layers": 2 * place.depth + 1}
    deeper = Place(place.config.replace(**depths), place.stack, kinds=place.kinds).declared
    of_stack = declared.begin or declared.end or declared.growth or StackResidual.carries_more(place)
    return not of_stack and len(_forms((*declared.layers, *deeper.layers))) == 1


def _forms(layers: Iterable[Any]) -> set[str]:
    """Returns the different forms of layers that a scheme declares. Whether a layer is the stack's last one does not
    count as a difference."""
    return {repr(layer).replace("last=True", "last=False") for layer in layers}


def refuse_roles(group: Group, init: str | None) -> None:
    """Raises InputError if blocks are to be re-initialised (`init` is not None) and a matrix's role is unknown: its
    initial values depend on the role."""
    advice = "init=None keeps their weights"
    for name, block in zip(group.names, group.blocks):
        structure = None if isinstance(block, tuple(TORCHS)) else structure_of(block)
        if structure is None or init is None:
            continue
        if structure.no_roles:
            raise InputError(f"what the matrices of {name} are for could not be read ({structure.no_roles}): {advice}")
        unclear = next(
            (matrix.path for part in structure.parts for matrix in (*part.linears, *part.experts) if matrix.is_unclear),
            None,
        )
        if unclear is not None:
            raise InputError(
                f"{name}.{unclear} is a factor of a product, and the run does not show which factor goes through the "
                f"activation, so that their initial values cannot be told apart: {advice}"
            )


def _refuse_shared(group: Group, place: Place, to: Any) -> None:
    """Raises InputError if layers share a block and the scheme treats layers differently, or if the scheme does
    something at the begin or end of a pass through the stack, and the stack's calls do not show these."""
    forms = _forms(place.declared.layers)
    grows_by_layer = place.declared.growth is not None and place.declared.growth.by_layer
    shared = next((b for b in group.blocks if structure_of(b).calls > 1), None)
    if shared is not None and len(group.blocks) > 1:
        raise InputError(
            f"the model runs the {len(group.blocks)} blocks of {group.path} several times in a row, and which of its "
            f"{place.depth} layers runs then is known only where one block is all of them: {to} is not possible here"
        )
    if shared is not None and (grows_by_layer or len(forms) > 1):
        raise InputError(
            f"{to} treats each of {place.depth} layers differently, and they share a {type(shared).__name__} of "
            f"{group.path}: choose a scheme whose layers are alike"
        )
    passes = max(structure_of(block).passes for block in group.blocks)
    # whether the scheme does more after the last layer than the norm that the model has there
    own_end = any(change.kind != "norm" or group.end is None for change in place.declared.end)
    acts_on_passes = place.declared.begin or own_end or StackResidual.carries_more(place) or place.declared.is_profiled
    if group.runs != passes and acts_on_passes:
        counted = "1 pass" if passes == 1 else f"{passes} passes"
        raise InputError(
            f"{to} does something before its first layer, after its last one, or from one layer to another. The model "
            f"calls the module around {group.path} {group.runs} times for {counted} of its residual stream, so that a "
            "call does not show where a pass begins and ends: choose a scheme that has x alone, such as deepnorm"
        )


def _refuse_inside(group: Group, place: Place, to: Any) -> None:
    """Raises InputError if the scheme changes tensors inside sublayers at points that these blocks do not expose."""
    values = {option: getattr(place.config, option) for option in ("qk_norm", "qk_l2norm", "v_norm")}
    option = next((option for option, value in values.items() if value), None)  # the first that is switched on
    # the scheme or the option that acts there, for the message
    what = to if option is None else "qk_norm=True" if option == "qk_norm" else option
    advice = "choose another scheme" if option is None else "leave it out"
    # Without roles it is unknown which sublayers are attention, so the usual kinds of sublayers are taken.
    usual = Place(place.config, place.stack)
    acts_inside = any(s.inside for layer in usual.declared.layers for s in layer.sublayers)
    hooked: set[nn.Module] = set()  # the linear layers that the scheme acts at, so far
    for i, block in enumerate(group.blocks):
        kind = type(block).__name__
        if (why := structure_of(block).no_roles) and acts_inside:
            raise InputError(
                f"{what} acts inside sublayers, and what {kind}'s matrices are for is unknown ({why}): {advice}"
            )
        for part, sublayer in zip(parts_of(block), place.at(i).sublayers):
            paths: set[str] = set()  # the linear layers whose inputs or outputs the scheme changes by hooks
            for point in sublayer.inside:
                # Queries, keys and values can be changed only if known columns of one layer's output hold them: then a
                # hook on that layer reaches them. `found`: (path of the layer, …).
                found = projected(block, part, point, place.config.heads) if point in PROJECTIONS else None
                if point in BEFORE_PRODUCTS and found is None:
                    raise InputError(
                        f"{what} acts between projections and products of attention, and the run of {kind} does not "
                        f"show which columns of one layer's output are each head's {point}: {advice}"
                    )
                if part.is_parallel and point != "input":
                    raise InputError(
                        f"{what} acts inside attention or feed-forward, and {kind} adds both at once, as one branch: "
                        f"{advice}"
                    )
                if point not in (*PROJECTIONS, "input") and point not in POINTS:
                    raise InputError(f"{what} acts at {point} of attention, which {kind} does not expose: {advice}")
                if point in POINTS:
                    paths.add(path_of(block, part, POINTS[point][0]))  # raises if no layer, or several, have that role
                elif found is not None:
                    paths.add(found[0])
            for linear in {block.get_submodule(path) for path in paths}:
                if linear in hooked:
                    raise InputError(
                        f"{what} acts inside sublayers, and {kind}s of {group.path} share a {type(linear).__name__} "
                        f"there, which several sublayers call: {advice}"
                    )
                hooked.add(linear)


def _removed(block: nn.Module, place: Place) -> list[str]:
    """Returns the paths of the block's norms that the scheme does not call. `place`: the block's."""
    parts, sublayers = parts_of(block), place.sublayers
    if isinstance(block, tuple(TORCHS)):
        kept = {what.name for sublayer in sublayers for what in sublayer.around()}
        return [part.norm for i, part in enumerate(parts) if part.norm is not None and f"norm{i + 1}" not in kept]
    stay, move = norms_of(parts, sublayers)
    called = {*stay.values(), *move.values(), *(path for part in parts for path in part.twins)}
    return [path for part in parts for path in part.norms() if path not in called]


def _replaced(block: nn.Module, place: Place) -> list[str]:
    """Returns the paths of the block's norms that do not stay where they are under the scheme. `place`: the block's."""
    parts, sublayers = parts_of(block), place.sublayers
    kept: set[str | None] = set()
    for part, declared in zip(parts, sublayers):  # the model's sublayer, and what the scheme declares for it
        kept |= {*part.twins, part.before} if only_norm(declared.before) is not None else set()
        kept |= {part.after} if only_norm(declared.after) is not None else set()
        if not (part.before or part.after or part.branch):
            kept |= {part.norm}  # a registered class does not say where its norm stands
    return [path for part in parts for path in part.norms() if path not in kept]


def _reclassed(group: Group) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules whose class the conversion changes, as (path, module)."""
    for name, block in zip(group.names, group.blocks):
        yield name, block
        if isinstance(block, tuple(TORCHS)):
            yield from ((f"{name}.{n}", m) for n, m in block.named_children() if isinstance(m, nn.MultiheadAttention))
            continue
        declared = declaration_of(type(block))
        sites = declared.sites(block) if hasattr(declared, "sites") else {}
        yield from ((f"{name}.{path}", block.get_submodule(path)) for path in sites)
    if type(group.holder) in TORCH_STACKS:
        yield parent_of(group.path), group.holder
