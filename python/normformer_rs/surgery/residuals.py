"""Residual schemes exchanged in a model that somebody else wrote."""

import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import nn as nfnn
from .._core import InputError
from ..config import tables, unknown
from ..nn.declared import Draw, Learned, NormAt, Place, Sublayer, apply_changes, begin, close, configure, install, make
from ..nn.growing import Growing
from ..nn.initial import initial_values
from ..nn.layers import KINDS
from .edits import Edits, Repoint, Row, Swaps, refuse_wrapped
from .norms import read_norm


class Linear(NamedTuple):
    """A linear layer of a block: where it is, what its outputs are (query, key, value, output, fc1, fc2; several where
    they are stacked), and what the scheme's first values are multiplied by."""

    path: str
    roles: tuple[str, ...]
    factor: float = 1.0


class Part(NamedTuple):
    """A sublayer of a block: its kind (self-attention, cross-attention, feed-forward), and the paths of its norm, of
    its linear layers, and of a dropout on its output that stands inside a module and moves out to the residual."""

    kind: str
    norm: str
    linears: tuple[Linear, ...]
    dropout: str | None = None


_BLOCKS: dict[type[nn.Module], Any] = {}
_STACKS: dict[type[nn.Module], str] = {}


def register_block(kind: type[nn.Module], converted: type[nn.Module]) -> None:
    """Makes `swap_residuals` know a class of blocks.

    `converted` is a subclass with

    * `parts(self)`: the list of its `Part`s, in order;
    * a `forward` of kind's signature that runs `x = self.residual.step(i, x, F, dropout)` for each of them, F the
      sublayer without norm, dropout on its output and residual (a module that returns a tuple is fine: its first item
      is F(x));
    * `heads(self)`: the number of attention heads;
    * `sites(self)` (optional): {path of a child that holds one of the residuals: its converted class}. A site finds its
      block as `self.block_of[0]`.
    """
    if not issubclass(converted, kind):
        raise InputError(f"{converted.__name__} must be a subclass of {kind.__name__}, whose place it takes")
    _BLOCKS[kind] = converted


def register_stack(kind: type[nn.Module], end_norm: str) -> None:
    """Tells which attribute of a class of stacks is the norm after its last block."""
    _STACKS[kind] = end_norm


def _known_blocks() -> dict[type[nn.Module], Any]:
    """With Hugging Face's, if the model at hand may hold them."""
    if "transformers" in sys.modules:
        importlib.import_module("normformer_rs.surgery.huggingface")
    return _BLOCKS


class Point:
    """A hook that makes a scheme's changes at one point inside a block."""

    def __init__(self, residual: "BlockResidual", changes: Sequence[Any]) -> None:
        self.residual, self.changes = residual, tuple(changes)

    def before(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return apply_changes(self.residual, self.changes, args[0], None), *args[1:]

    def after(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        return apply_changes(self.residual, self.changes, output, None)


_POINTS = {"after_heads": ("output", "before"), "after_output": ("output", "after")}
_POINTS |= {"before_activation": ("fc1", "after"), "amid": ("fc2", "before")}


class BlockResidual(Growing):
    """A residual scheme in somebody else's block: its parameters and norms, beside the norms that the block has."""

    def __init__(self, block: nn.Module, place: Place, parts: Sequence[Part], first: "BlockResidual | None") -> None:
        super().__init__()
        like = next(block.parameters())
        factory = {"device": like.device, "dtype": like.dtype}
        # References, not children: their parameters are the block's and the first block's.
        self._block, self._first = (block,), (first,)
        self.place, self.paths = place, {f"norm{i + 1}": part.norm for i, part in enumerate(parts)}
        self.sublayers = tuple(_local(sublayer) for sublayer in place.sublayers)
        items = [what for s in self.sublayers for what in (*s.around(), *s.within()) if what.name not in self.paths]
        install(self, items, place, factory=factory)
        self.end: tuple[Any, ...] = ()
        self.training = block.training
        self.grow(place.declared.growth if first is None else None, like.device)

    def __getattr__(self, name: str) -> Any:
        paths = self.__dict__.get("paths", {})
        return self._block[0].get_submodule(paths[name]) if name in paths else super().__getattr__(name)

    def uses(self, name: str) -> bool:
        return any(what.name == name for sublayer in self.sublayers for what in sublayer.around())

    def reach_inside(self, part: Part, i: int) -> list[Any]:
        """Hooks on the block's linear layers for what stands inside sublayer i; their handles."""
        handles = []
        for point, changes in self.sublayers[i].inside.items():
            if point == "input":  # `step` does that
                continue
            role, when = _POINTS[point]
            linear = self._block[0].get_submodule(next(lin.path for lin in part.linears if role in lin.roles))
            hook = Point(self, changes)
            before = when == "before"
            handles.append(
                linear.register_forward_pre_hook(hook.before) if before else linear.register_forward_hook(hook.after)
            )
        return handles

    def finish(self, end: Sequence[Any]) -> None:
        """This is the last block: what follows the stack follows here."""
        like = next(self._block[0].parameters())
        for change in end:
            setattr(self, change.what.name, make(change.what, self.place, {"device": like.device, "dtype": like.dtype}))
        self.end = tuple(end)

    def step(
        self, i: int, x: Tensor, function: Callable[[Tensor], Any], dropout: nn.Module | float | None = None
    ) -> Any:
        """x⁺ of sublayer i; where the function returns a tuple, its further items after it."""
        sublayer: Sublayer = self.sublayers[i]
        given = apply_changes(self, sublayer.inside.get("input", ()), begin(self, sublayer, x, None), None)
        output = function(given)
        f, *rest = output if isinstance(output, tuple) else (output,)
        dropout = self._modules.get(f"dropout{i + 1}", dropout)
        if not isinstance(dropout, nn.Module):
            dropout = nn.Dropout(dropout or 0.0).train(self.training)
        alpha_t = (self._first[0] or self).alpha()
        x, _ = close(self, sublayer, x, f, dropout, Draw(x.device), alpha_t=alpha_t)
        if i + 1 == len(self.sublayers):
            x = apply_changes(self, self.end, x, None)
        return (x, *rest) if isinstance(output, tuple) else x

    def extra_repr(self) -> str:
        return f"{self.place.config.residual!r}, layer {self.place.layer} of {self.place.depth}"


def _local(sublayer: Sublayer) -> Sublayer:
    """Named as attributes of one module: self_attn.inner_norm is self_attn_inner_norm."""

    def flat(what: Any) -> Any:
        named = isinstance(what, NormAt | Learned)
        return dataclasses.replace(what, name=what.name.replace(".", "_")) if named else what

    inside = {
        point: tuple(dataclasses.replace(change, what=flat(change.what)) for change in changes)
        for point, changes in sublayer.inside.items()
    }
    return dataclasses.replace(sublayer, inside=inside)


class Group(NamedTuple):
    """Blocks that follow each other."""

    path: str
    """Of their list."""
    blocks: list[nn.Module]
    holder: nn.Module
    """The module that has the list."""

    @property
    def has_memory(self) -> bool:
        """They attend to an encoder's output."""
        return len(_parts(self.blocks[0])) == 3


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
    edits, rows, before = Edits(model), [], dict(model.named_parameters())
    try:
        for group, place in plans:
            old = [type(block).__name__ for block in group.blocks]
            convert = _convert_torchs if isinstance(group.blocks[0], tuple(_TORCHS)) else _convert_foreign
            notes = convert(group, place, edits)
            note = "weights kept" if init is None else f"init {place.declared.init}"
            for i, block in enumerate(group.blocks):
                rows.append(Row(f"{group.path}.{i}", old[i], f"{type(block).__name__}, {to}", note))
            rows += notes
        drawn = [] if init is None else [p for group, place in plans for p in _initialise(group, place, edits)]
        drawn += [p for group, place in plans if not place.declared.has_biases for p in _silence_biases(group, edits)]
        _repoint(optimizer, [group for group, _ in plans], before, dict(model.named_parameters()), drawn)(edits)
    except Exception:
        edits.undo()
        raise
    if optimizer is not None and any(place.declared.growth for _, place in plans):
        _move_t_with(optimizer, model, edits)
    edits.done()
    return Swaps(f"swap_residuals to {to}", rows, edits)


# Finding the blocks, and what their model looks like.


def _parts(block: Any) -> Sequence[Part]:
    """The sublayers of a known block, before or after its conversion."""
    for kind, parts in _TORCHS.items():
        if isinstance(block, kind):
            return parts
    return _known_blocks().get(type(block), type(block)).parts(block)


def _find(model: nn.Module) -> list[Group]:
    """All known blocks, those of one list together; InputError if there are none."""
    known = {*_TORCHS, *_known_blocks(), *_known_blocks().values()}
    found: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if type(module) in known:
            found.setdefault(name.rpartition(".")[0], []).append(module)
    if not found:
        kinds = ", ".join(sorted(kind.__name__ for kind in {*_TORCHS, *_known_blocks()}))
        raise InputError(
            f"{type(model).__name__} holds no Transformer block that is known; known are {kinds}: tell of another "
            "class with normformer_rs.surgery.register_block(kind, converted)"
        )
    return [Group(path, blocks, model.get_submodule(path.rpartition(".")[0])) for path, blocks in found.items()]


def _plans(
    model: nn.Module, to: str, depth: int | tuple[int, int] | None, init: str | None, options: Mapping[str, Any]
) -> list[tuple[Group, Place]]:
    """For each group of blocks the place of its first: the configuration says how deep the model is, and which stack it
    is."""
    groups = _find(model)
    with_memory, alone = [g for g in groups if g.has_memory], [g for g in groups if not g.has_memory]
    plans = []
    for group in groups:
        shape = _shape(group.blocks[0])
        if with_memory:
            sizes = (len((alone or with_memory)[0].blocks), len(with_memory[0].blocks))
            encoder, decoder = sizes if depth is None else (depth, depth) if isinstance(depth, int) else depth
            shape |= {"encoder_layers": encoder, "decoder_layers": decoder}
        else:
            layers = len(group.blocks) if depth is None else depth
            if not isinstance(layers, int):
                raise InputError(
                    f"depth must be one number: the model has no decoder that attends to an encoder; got {depth}"
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


def _place_of(block: Any) -> Place | None:
    """Where a block stands that has a scheme of the package already."""
    return getattr(getattr(block, "residual", block), "place", None)


def _shape(block: Any) -> dict[str, Any]:
    """The options of a configuration that the block itself decides."""
    place = _place_of(block)
    if place is not None:
        return {name: getattr(place.config, name) for name in ("d_model", "heads", "norm", "d_ff")}
    first, *_, last = _parts(block)
    norm = read_norm(block.get_submodule(first.norm))
    if norm is None:
        kind = type(block.get_submodule(first.norm)).__name__
        raise InputError(
            f"{type(block).__name__}'s {first.norm} is a {kind}, no norm that is known: tell of it with "
            "normformer_rs.surgery.register_norm(kind, reader)"
        )
    inner = next(linear.path for linear in last.linears if "fc2" in linear.roles)
    d_ff = _weight_and_bias(block, inner)[0].shape[0 if _is_transposed(block, inner) else 1]
    heads = (
        block.self_attn.num_heads if isinstance(block, tuple(_TORCHS)) else _known_blocks()[type(block)].heads(block)
    )
    return {"d_model": norm.width, "heads": heads, "norm": norm.computes, "d_ff": d_ff}


def _has(group: Group, place: Place) -> bool:
    """The blocks have this very scheme already."""
    now = _place_of(group.blocks[0])
    return now is not None and now.config == place.config


def _check(group: Group, place: Place, to: str) -> None:
    """InputError for what cannot be converted."""
    if _place_of(group.blocks[0]) is not None:
        raise InputError(
            f"{group.path} has another residual scheme of normformer_rs already: take that swap back with its undo(), "
            f"or build the layers with residual={to!r}"
        )
    if place.declared.combine and type(group.holder) not in _TORCH_STACKS:
        raise InputError(
            f"{to} connects layers with each other, and the loop of {type(group.holder).__name__} does not: use "
            "normformer_rs.nn's TransformerEncoder and TransformerDecoder"
        )


# Converting.


_ATTENTION = (Linear("in_proj_weight", ("query", "key", "value")), Linear("out_proj", ("output",)))
_FEED_FORWARD = (Linear("linear1", ("fc1",)), Linear("linear2", ("fc2",)))


def _torch_parts(*attentions: str) -> tuple[Part, ...]:
    parts = []
    for i, name in enumerate(attentions):
        linears = tuple(linear._replace(path=f"{name}.{linear.path}") for linear in _ATTENTION)
        parts.append(Part(KINDS[i], f"norm{i + 1}", linears))
    return (*parts, Part("feed-forward", f"norm{len(attentions) + 1}", _FEED_FORWARD))


_ENCODER, _DECODER = _torch_parts("self_attn"), _torch_parts("self_attn", "multihead_attn")
_TORCHS: dict[type[nn.Module], tuple[Part, ...]] = {
    nn.TransformerEncoderLayer: _ENCODER,
    nn.TransformerDecoderLayer: _DECODER,
    nfnn.TransformerEncoderLayer: _ENCODER,
    nfnn.TransformerDecoderLayer: _DECODER,
}
_OURS = {
    nn.TransformerEncoderLayer: nfnn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer: nfnn.TransformerDecoderLayer,
}
_TORCH_STACKS = {nn.TransformerEncoder: nfnn.TransformerEncoder, nn.TransformerDecoder: nfnn.TransformerDecoder}


def _convert_torchs(group: Group, place: Place, edits: Edits) -> list[Row]:
    """torch.nn's layers, and the stack if they stand in one, become the package's: children and names are the same."""
    notes, holder = [], group.holder
    in_stack = type(holder) in _TORCH_STACKS
    for i, layer in enumerate(group.blocks):
        for module in (layer, *(m for m in layer.children() if type(m) is nn.MultiheadAttention)):
            edits.remember(module)
        layer.__class__ = _OURS[type(layer)]
        layer.adopt(Place(place.config, place.stack, i), in_stack)  # type: ignore[operator]
    if in_stack:
        edits.remember(holder)
        norm, holder.__class__ = holder.norm, _TORCH_STACKS[type(holder)]
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
        converted = _known_blocks()[type(block)]
        parts = _parts(block)
        sites = converted.sites(block) if hasattr(converted, "sites") else {}
        for path in {
            "",
            *sites,
            *(part.norm.rpartition(".")[0] for part in parts),
            *(_parent(part.dropout) for part in parts),
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
    name = _STACKS.get(type(group.holder))
    end = place.declared.end
    if name is None or not any(change.kind == "norm" for change in end):
        group.blocks[-1].residual.finish(end)  # type: ignore[union-attr, operator]
        if name is not None:
            edits.remember(group.holder)
            notes.append(
                Row(
                    f"{_parent(group.path)}.{name}".lstrip("."),
                    type(group.holder.get_submodule(name)).__name__,
                    "Identity",
                )
            )
            setattr(group.holder, name, nn.Identity())
    return notes


def _parent(path: str | None) -> str:
    return (path or "").rpartition(".")[0]


def _put(block: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(block.get_submodule(parent), leaf, module)


# First values, and the optimizer.

_SLICES = {"query": (0, "in_proj_weight"), "key": (1, "in_proj_weight"), "value": (2, "in_proj_weight")}
_NAMES = {"self-attention": "self_attn.", "cross-attention": "multihead_attn.", "feed-forward": ""}


@torch.no_grad()
def _initialise(group: Group, place: Place, edits: Edits) -> list[nn.Parameter]:
    """Draws the blocks' linear layers as the scheme's init says, biases zero; what was drawn."""
    drawn, device = [], next(group.blocks[0].parameters()).device
    values: list[dict[str, Tensor]] = []
    for i, block in enumerate(group.blocks):
        for part in _parts(block):
            times: dict[str, int] = {}
            for path, roles, factor in part.linears:
                weight, bias = _weight_and_bias(block, path)
                edits.remember_values(p for p in (weight, bias) if p is not None)
                drawn += [p for p in (weight, bias) if p is not None]
                blocks = []
                for role in roles:
                    draw = times[role] = times.get(role, -1) + 1
                    if draw == len(values):  # gates and second layers of one role are drawn from another model
                        values.append(initial_values(place.config, device))
                    if values[draw]:
                        prefix = f"{place.stack}.layers.{i}.{_NAMES[part.kind]}"
                        blocks.append(_block_of(values[draw], prefix, role))
                if bias is not None:
                    bias.zero_()
                if not blocks:
                    continue  # the meta device has no values
                new = torch.cat(blocks) * factor
                new = new.T if _is_transposed(block, path) else new
                if new.shape != weight.shape:
                    raise InputError(
                        f"{type(block).__name__}'s {path} is {tuple(weight.shape)}, the scheme's values are "
                        f"{tuple(new.shape)}: heads of another width than d_model/heads are not drawn; pass init=None "
                        "and initialise the blocks yourself"
                    )
                weight.copy_(new)
    return drawn


def _block_of(values: Mapping[str, Tensor], prefix: str, role: str) -> Tensor:
    """(fan_out, fan_in)"""
    if role in _SLICES:
        third, name = _SLICES[role]
        return values[prefix + name].chunk(3)[third]
    return values[prefix + {"output": "out_proj", "fc1": "linear1", "fc2": "linear2"}[role] + ".weight"]


def _weight_and_bias(block: nn.Module, path: str) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Of a linear layer; torch.nn's attention has its stacked projection as a parameter."""
    if path.endswith("in_proj_weight"):
        attention: Any = block.get_submodule(_parent(path))
        return attention.in_proj_weight, attention.in_proj_bias
    linear: Any = block.get_submodule(path)
    return linear.weight, linear.bias


def _is_transposed(block: nn.Module, path: str) -> bool:
    """transformers' Conv1D keeps (fan_in, fan_out)."""
    return not path.endswith("in_proj_weight") and type(block.get_submodule(path)).__name__ == "Conv1D"


@torch.no_grad()
def _silence_biases(group: Group, edits: Edits) -> list[nn.Parameter]:
    """A scheme without biases holds those that are there at zero."""
    biases = [
        _weight_and_bias(block, lin.path)[1] for block in group.blocks for part in _parts(block) for lin in part.linears
    ]
    found = [bias for bias in biases if bias is not None]
    edits.remember_values(found)
    for bias in found:
        bias.zero_()
        bias.requires_grad_(False)
    return found


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
        anchor = max((q for q in kept & known if q.requires_grad), key=lambda q: (_common(names[q], name), names[q]))
        exchange.setdefault(anchor, [(names[anchor], anchor)]).append((name, p))
    return Repoint(optimizer, exchange, drawn)


def _common(one: str, other: str) -> int:
    a, b = one.split("."), other.split(".")
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _move_t_with(optimizer: torch.optim.Optimizer, model: nn.Module, edits: Edits) -> None:
    """After update k, t is k + 1."""
    holders = [m for m in model.modules() if isinstance(m, Growing) and m.growth is not None]

    def moved(*_: Any) -> None:
        for holder in holders:
            holder.t.add_(1)

    edits.afterwards(optimizer.register_step_post_hook(moved).remove)
