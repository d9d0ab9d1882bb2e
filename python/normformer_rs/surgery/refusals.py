"""What `swap_residuals` cannot convert, refused before anything changes."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..errors import InputError
from ..nn.attention import BEFORE_PRODUCTS
from ..nn.place import Place
from ..nn.specs import NormAt
from .blocks import TORCH_STACKS, TORCHS, Group, converted_of, is_known_stack, parent_of, parts_of, place_of
from .handover import refuse_own_forward, refuse_passed_over
from .recognise import read_norm
from .spec import has


def refuse(group: Group, place: Place, to: Any) -> None:
    """InputError for what cannot be converted."""
    for name, module in _reclassed(group):
        refuse_own_forward(name.lstrip("."), module)
    for i, (name, block) in enumerate(zip(group.names, group.blocks)):
        kept = {what.name for s in Place(place.config, place.stack, i).sublayers for what in s.around()}
        removed = [part.norm for j, part in enumerate(parts_of(block)) if f"norm{j + 1}" not in kept]
        for path in (*removed, *getattr(converted_of(type(block)), "passed_over", ())):
            if has(block, path):
                refuse_passed_over(f"{name}.{path}".lstrip("."), block.get_submodule(path), to)
    if place_of(group.blocks[0]) is not None:
        raise InputError(
            f"{group.path} has another residual scheme of normformer_rs already: take that swap back with its undo(), "
            f"or build the layers with residual={to!r}"
        )
    takes = any(layer.takes for layer in place.declared.layers)
    joins_layers = place.declared.combine or place.declared.streams or place.declared.mixing or takes
    if joins_layers and type(group.holder) not in TORCH_STACKS:
        raise InputError(
            f"{to} connects layers with each other, and the loop of {type(group.holder).__name__} does not: use "
            "normformer_rs.nn's TransformerEncoder and TransformerDecoder"
        )
    sublayers = [sublayer for layer in place.declared.layers for sublayer in layer.sublayers]
    inside = {point for sublayer in sublayers for point in sublayer.inside}
    if inside & BEFORE_PRODUCTS and not isinstance(group.blocks[0], tuple(TORCHS)):
        what, way = to, "choose another scheme"
        asked = {
            "qk_norm=True": place.config.qk_norm,
            "qk_l2norm": place.config.qk_l2norm,
            "v_norm": place.config.v_norm,
        }
        if any(asked.values()):
            what, way = next(option for option, value in asked.items() if value), "leave it out"
        raise InputError(
            f"{what} acts between projections and products of attention, which {type(group.blocks[0]).__name__} "
            f"does not expose: {way}"
        )
    if any(isinstance(what, NormAt) and what.start != 1.0 for sublayer in sublayers for what in sublayer.around()):
        raise InputError(
            f"{to} with these options sets how the weights of norms start, and {group.path} keeps its norms as they "
            "are: leave the options out"
        )
    own_way = joins_layers or place.declared.growth
    if own_way and type(group.holder) in TORCH_STACKS and len(group.blocks) < group.depth:
        raise InputError(
            f"{to} treats each layer of {group.path} differently, but only {len(group.blocks)} of its {group.depth} "
            f"layers are {type(group.blocks[0]).__name__}s of their own: others are shared or of another class"
        )


def _reclassed(group: Group) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose class a conversion changes, with their names."""
    for name, block in zip(group.names, group.blocks):
        yield name, block
        if isinstance(block, tuple(TORCHS)):
            yield from ((f"{name}.{n}", m) for n, m in block.named_children() if isinstance(m, nn.MultiheadAttention))
            continue
        converted = converted_of(type(block))
        sites = converted.sites(block) if hasattr(converted, "sites") else {}
        yield from ((f"{name}.{path}", block.get_submodule(path)) for path in sites)
    if type(group.holder) in TORCH_STACKS:
        yield parent_of(group.path), group.holder


def refuse_unknown_end(model: nn.Module, group: Group, to: Any) -> None:
    """InputError for a norm around the blocks that may be their last: the scheme's own would come on top."""
    is_alone = group.blocks[0] is model
    if group.end is not None or is_alone or isinstance(group.blocks[0], tuple(TORCHS)):
        return
    path: str | None = group.path
    while path is not None:
        around = model.get_submodule(path)
        kind = type(around).__name__
        if is_known_stack(type(around)):
            return
        norm = next((name for name, child in around.named_children() if read_norm(child) is not None), None)
        if norm is not None and path == group.path:
            raise InputError(
                f"{path or kind} lists a norm, {norm}, with its blocks, and {to} must know whether it follows them: "
                "put it beside their list, and register the module around both with "
                "normformer_rs.surgery.register_stack"
            )
        if norm is not None:
            raise InputError(
                f"{kind} has a norm, {norm}, beside its blocks, and {to} must know whether it follows them: call "
                f'normformer_rs.surgery.register_stack({kind}, "{norm}"), or register_stack({kind}, None) if none does'
            )
        path = parent_of(path) if path else None
