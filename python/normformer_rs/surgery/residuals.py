"""Residual schemes exchanged in a model that somebody else wrote."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import nn as nfnn
from ..config import tables, unknown
from ..errors import InputError
from ..nn.declared import Place, configure
from ..nn.growing import Growing
from ..nn.layers import Layer
from .blocks import STACKS, TORCH_STACKS, TORCHS, Group, known_blocks, parent_of, parts_of, place_of, shape_of
from .edits import Edits, Repoint, Row, Swaps, refuse_wrapped
from .steps import BlockResidual
from .values import initialise, silence_biases


def swap_residuals(
    model: nn.Module,
    to: str,
    *,
    depth: int | tuple[int, int] | None = None,
    init: str | None = "scheme",
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Swaps:
    """Gives a model's Transformer blocks another residual scheme, in place.

    Known are torch.nn's encoder and decoder layers and the blocks of BERT, GPT-2, T5 and Marian of Hugging Face
    `transformers`; `register_block` adds others. Blocks keep their identity, their linear layers, dropouts, hooks and
    norms (a scheme without norms puts identities in their places); new norms are of the kind that the block has.

    >>> from torch import nn
    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    >>> print(swap_residuals(model, "deepnorm"))
    swap_residuals to deepnorm: 2
    module    old                      new                                note
    layers.0  TransformerEncoderLayer  TransformerEncoderLayer, deepnorm  init deepnorm
    layers.1  TransformerEncoderLayer  TransformerEncoderLayer, deepnorm  init deepnorm

    Args:
        model: any tree of modules that holds known blocks.
        to: a name out of `normformer_rs.tables()["residuals"]`.
        depth: layers for the scheme's constants: one number, or (encoder, decoder). None: as many as there are.
        init: of the blocks' linear layers: "scheme": the scheme's own; another name out of `tables()["inits"]`; None:
            their values stay. Embeddings and what lies outside the blocks keep theirs.
        optimizer: then holds the scheme's parameters too, in the group of the block's first parameter, and no longer
            what went out; state of what was drawn anew is dropped. For branchnorm a step hook moves t: no
            `set_num_updates` is needed.
        options: those of `TransformerConfig` that the scheme has (`branchnorm_steps`, …).

    Returns: the table of what was done; its `undo()` takes it back.

    Errors: InputError for unknown names and options; a model without known blocks; DistributedDataParallel and FSDP
    models; an optimizer that does not own the parameters; dlcl outside torch.nn's stacks, whose loop would have to
    change.
    """
    names = [entry["name"] for entry in tables()["residuals"]]
    if to not in names:
        raise InputError(unknown("residual", to, names))
    refuse_wrapped(model)
    plans = [(group, place) for group, place in _plans(model, to, depth, init, options) if not _has(group, place)]
    for group, place in plans:
        _check(group, place, to)
    title, before = f"swap_residuals to {to}", dict(model.named_parameters())
    edits, rows = Edits(model, title), []
    try:
        for group, place in plans:
            old = [type(block).__name__ for block in group.blocks]
            convert = _convert_torchs if isinstance(group.blocks[0], tuple(TORCHS)) else _convert_foreign
            notes = convert(group, place, edits)
            note = "weights kept" if init is None else f"init {place.declared.init}"
            for i, block in enumerate(group.blocks):
                rows.append(Row(group.names[i] or "(model)", old[i], f"{type(block).__name__}, {to}", note))
            rows += notes
        drawn = []
        for group, place in plans if init is not None else ():
            drawn += initialise(group, place, edits)
            for layer in group.blocks:
                if isinstance(layer, Layer):
                    layer.keeps_torchs_values = False
        drawn += [p for group, place in plans if not place.declared.has_biases for p in silence_biases(group, edits)]
        _repoint(optimizer, [group for group, _ in plans], before, dict(model.named_parameters()), drawn)(edits)
    except Exception:
        edits.undo()
        raise
    if optimizer is not None:
        _move_t_with(optimizer, model, edits)
    edits.done()
    return Swaps(title, rows, edits)


# Finding the blocks, and what their model looks like.


def find_groups(model: nn.Module) -> list[Group]:
    """All known blocks, those of one list that are alike together; InputError if there are none."""
    known = {*TORCHS, *known_blocks(), *known_blocks().values()}
    found: dict[Any, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        if type(module) in known:
            # As wide as each other, or they could not follow each other; heads and d_ff may differ within a stack.
            kind = type(module), len(parts_of(module)), shape_of(module)["d_model"]
            found.setdefault((parent_of(_without_wrappers(name)), *kind), {})[name] = module
    if not found:
        kinds = ", ".join(sorted({kind.__name__ for kind in (*TORCHS, *known_blocks())}))
        raise InputError(
            f"{type(model).__name__} holds no Transformer block that is known; known are {kinds}, and not their "
            "subclasses: tell of another class with normformer_rs.surgery.register_block(kind, converted)"
        )
    return [_group(model, path, blocks) for (path, *_), blocks in found.items()]


def _group(model: nn.Module, path: str, blocks: Mapping[str, nn.Module]) -> Group:
    own = [*blocks.values()]
    # Each time that a block is there, and subclasses of it, which stay as they are; a head beside them is no layer.
    wrapped = (
        getattr(entry, "_checkpoint_wrapped_module", entry) for entry in model.get_submodule(path)._modules.values()
    )
    entries = [getattr(entry, "_orig_mod", entry) for entry in wrapped]
    kind = type(own[0])
    depth = sum(entry in own or (isinstance(entry, kind) and type(entry) is not kind) for entry in entries)
    return Group(path, [*blocks], own, model.get_submodule(parent_of(path)), max(depth, len(own)))


def _without_wrappers(path: str) -> str:
    """Of what torch.compile and activation checkpointing have put around a layer."""
    return path.replace("._orig_mod", "").replace("._checkpoint_wrapped_module", "")


def _plans(
    model: nn.Module, to: str, depth: int | tuple[int, int] | None, init: str | None, options: Mapping[str, Any]
) -> list[tuple[Group, Place]]:
    """For each group of blocks the place of its first: the configuration says how deep the model is, and which stack it
    is."""
    groups = find_groups(model)
    with_memory, alone = [g for g in groups if g.has_memory], [g for g in groups if not g.has_memory]
    plans = []
    for group in groups:
        shape = shape_of(group.blocks[0])
        if with_memory:
            sizes = ((alone or with_memory)[0].depth, with_memory[0].depth)
            encoder, decoder = sizes if depth is None else (depth, depth) if isinstance(depth, int) else depth
            shape |= {"encoder_layers": encoder, "decoder_layers": decoder}
        else:
            layers = group.depth if depth is None else depth
            if not isinstance(layers, int):
                raise InputError(
                    f"depth must be one number: the model has no decoder that attends to an encoder; got {depth!r}"
                )
            shape |= {"architecture": "decoder-only", "decoder_layers": layers}
        if init not in (None, "scheme"):
            shape["init"] = init
        place = Place(
            configure(options, residual=to, **shape), "encoder" if with_memory and not group.has_memory else "decoder"
        )
        if place.depth < len(group.blocks):
            raise InputError(
                f"depth must be at least {len(group.blocks)}, as many blocks as {group.path} has; got {depth}"
            )
        plans.append((group, place))
    return plans


def _has(group: Group, place: Place) -> bool:
    """The blocks have this very scheme already."""
    now = place_of(group.blocks[0])
    return now is not None and now.config == place.config


def _check(group: Group, place: Place, to: str) -> None:
    """InputError for what cannot be converted."""
    if place_of(group.blocks[0]) is not None:
        raise InputError(
            f"{group.path} has another residual scheme of normformer_rs already: take that swap back with its undo(), "
            f"or build the layers with residual={to!r}"
        )
    if place.declared.combine and type(group.holder) not in TORCH_STACKS:
        raise InputError(
            f"{to} connects layers with each other, and the loop of {type(group.holder).__name__} does not: use "
            "normformer_rs.nn's TransformerEncoder and TransformerDecoder"
        )
    own_way = place.declared.combine or place.declared.growth
    if own_way and type(group.holder) in TORCH_STACKS and len(group.blocks) < group.depth:
        raise InputError(
            f"{to} treats each of the {group.depth} layers of {group.path} in its own way, of which "
            f"{len(group.blocks)} are {type(group.blocks[0]).__name__}s of their own: others are shared or of another "
            "class"
        )


# Converting.


_OURS = {
    nn.TransformerEncoderLayer: nfnn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer: nfnn.TransformerDecoderLayer,
}


def _convert_torchs(group: Group, place: Place, edits: Edits) -> list[Row]:
    """torch.nn's layers, and the stack if they stand in one, become the package's: children and names are the same."""
    notes, holder = [], group.holder
    in_stack = type(holder) in TORCH_STACKS
    for i, layer in enumerate(group.blocks):
        for module in (layer, *(m for m in layer.children() if type(m) is nn.MultiheadAttention)):
            edits.remember(module)
        layer.__class__ = _OURS[type(layer)]
        layer.adopt(Place(place.config, place.stack, i), in_stack)  # type: ignore[operator]
    if in_stack:
        edits.remember(holder)
        norm, holder.__class__ = holder.norm, TORCH_STACKS[type(holder)]
        holder.adopt(place)  # type: ignore[operator]
        path = f"{group.path.removesuffix('layers')}norm"
        if (norm is None) != (holder.norm is None):
            names = ["none" if n is None else type(n).__name__ for n in (norm, holder.norm)]
            notes.append(Row(path, names[0], names[1], "after the stack"))
    elif place.declared.end:
        notes.append(
            Row(group.path, "", "", f"{place.config.residual} wants a norm after the last layer: that is yours to add")
        )
    return notes


def _convert_foreign(group: Group, place: Place, edits: Edits) -> list[Row]:
    """Blocks become subclasses of theirs that call the scheme's steps; what the scheme has stands in `residual`."""
    notes, first = [], None
    for i, block in enumerate(group.blocks):
        converted = known_blocks()[type(block)]
        parts = parts_of(block)
        sites = converted.sites(block) if hasattr(converted, "sites") else {}
        for path in {
            "",
            *sites,
            *(part.norm.rpartition(".")[0] for part in parts),
            *(parent_of(part.dropout) for part in parts),
        }:
            edits.remember(block.get_submodule(path))
        residual = BlockResidual(block, Place(place.config, place.stack, i), parts, first)
        first = first or residual
        block.__class__ = converted
        for path, kind in sites.items():
            site = block.get_submodule(path)
            site.__class__ = kind
            site.__dict__["block_of"] = (block,)
        for j, part in enumerate(parts):
            if not residual.uses(f"norm{j + 1}"):
                _put(block, part.norm, nn.Identity())
            if part.dropout is not None:
                residual.add_module(f"dropout{j + 1}", block.get_submodule(part.dropout))
                _put(block, part.dropout, nn.Identity())
            for handle in residual.reach_inside(part, j):
                edits.afterwards(handle.remove)
        block.residual = residual
    name = STACKS.get(type(group.holder))
    end = place.declared.end
    if name is None or not any(change.kind == "norm" for change in end):
        group.blocks[-1].residual.finish(end)  # type: ignore[union-attr, operator]
        if name is not None:
            edits.remember(group.holder)
            notes.append(
                Row(
                    f"{parent_of(group.path)}.{name}".lstrip("."),
                    type(group.holder.get_submodule(name)).__name__,
                    "Identity",
                )
            )
            setattr(group.holder, name, nn.Identity())
    return notes


def _put(block: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    holder: Any = block.get_submodule(parent)
    setattr(holder, leaf, module.train(getattr(holder, leaf).training))


def _repoint(
    optimizer: torch.optim.Optimizer | None,
    groups: Sequence[Group],
    before: Mapping[str, nn.Parameter],
    after: Mapping[str, nn.Parameter],
    drawn: Sequence[nn.Parameter],
) -> Repoint:
    """What went out leaves the optimizer; what is new stands behind the first parameter of its module that the
    optimizer has."""
    known, kept = {*before.values()}, {*after.values()}
    exchange: dict[nn.Parameter, list[tuple[str, nn.Parameter]]] = {p: [] for p in known - kept}
    names = {p: name for name, p in before.items()}
    for name, p in after.items():
        if p in known:
            continue
        # the nearest old parameter: the one whose name begins with as much of this one's path
        there = [q for q in kept & known if q.requires_grad] or [*(kept & known)]
        if not there:
            continue
        anchor = max(there, key=lambda q: (_common(names[q], name), names[q]))
        exchange.setdefault(anchor, [(names[anchor], anchor)]).append((name, p))
    return Repoint(optimizer, exchange, drawn)


def _common(one: str, other: str) -> int:
    a, b = one.split("."), other.split(".")
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


_MOVED: "weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.WeakSet[Growing]]" = weakref.WeakKeyDictionary()
"""The modules whose t an optimizer moves."""


def _move_t_with(optimizer: torch.optim.Optimizer, model: nn.Module, edits: Edits) -> None:
    """After update k, t is k + 1, wherever t stands and this optimizer does not move it already."""
    moved_already = _MOVED.setdefault(optimizer, weakref.WeakSet())
    holders = [m for m in model.modules() if isinstance(m, Growing) and m.growth is not None and m not in moved_already]
    if not holders:
        return
    moved_already.update(holders)
    edits.afterwards(lambda: moved_already.difference_update(holders))

    def moved(*_: Any) -> None:
        for holder in holders:
            holder.t.add_(1)

    edits.afterwards(optimizer.register_step_post_hook(moved).remove)
