"""The blocks of other libraries' models as surgery reads them: sublayers, linear layers, norms and shape."""

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from .. import nn as nfnn
from ..errors import InputError
from ..nn.init import Role
from ..nn.layers import KINDS
from ..nn.own import OwnNorm
from ..nn.place import Place
from .converted import original, residual_of
from .probe import RecognisedNorm, probe
from .recognise import read_norm
from .spec import Linear, Part, Rows, at, has
from .structure import Structure

_BLOCKS: dict[type[nn.Module], type[nn.Module]] = {}
"""The subclass of each registered class of blocks."""


def register_block(kind: type[nn.Module], converted: type[nn.Module]) -> None:
    """Declares the sublayers of a class of blocks whose additions no run of the model can show, as in a fused kernel.

    >>> import torch
    >>> from torch import nn
    >>> from normformer_rs import swap_residuals
    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
    ...
    ...     def feed(self, x):
    ...         return self.down(self.up(x).relu())
    ...
    ...     def forward(self, x):
    ...         return torch.stack((x, self.feed(self.norm(x)))).sum(0)
    >>> class Converted(Block):
    ...     def parts(self):
    ...         return [Part("feed-forward", "norm", (Linear("up", ("fc1",)), Linear("down", ("fc2",))))]
    ...
    ...     def heads(self):
    ...         return 1
    ...
    ...     def forward(self, x):
    ...         return self.residual.step(0, x, self.feed)
    >>> register_block(Block, Converted)
    >>> model = nn.Sequential(Block(), Block())
    >>> print(swap_residuals(model, "deepnorm", example=torch.ones(1, 2, 8)))
    swap_residuals to deepnorm: 2
    module  old    new                  note
    0       Block  Converted, deepnorm  init deepnorm, 2 weights drawn; up (fc1), down (fc2)
    1       Block  Converted, deepnorm  init deepnorm, 2 weights drawn

    `swap_residuals` still runs the model once, to find the norm after the blocks. Swapped blocks become blocks of the
    subclass, which has

    * `parts(self)`: the list of its `Part`s, in order;
    * a `forward` of kind's signature that runs `x = self.residual.step(i, x, F, dropout)` for each of them, F the
      sublayer without norm, dropout on its output and residual (a module that returns a tuple is fine: its first item
      is F(x));
    * `heads(self)`: the number of attention heads;
    * `sites(self)` (optional): {path of a child that holds one of the residuals: its converted class}. A site finds its
      block as `self.block_of[0]`.

    Args:
        kind: the class of the blocks.
        converted: the subclass.

    Errors: InputError for a class that is not a subclass of kind.
    """
    if not issubclass(converted, kind):
        raise InputError(f"{converted.__name__} must be a subclass of {kind.__name__}: its blocks become blocks of it")
    _BLOCKS[kind] = converted


def declaration_of(kind: type) -> Any:
    """The subclass that a class of blocks is registered with, before or after a conversion. None: it is not."""
    kind = original(kind)
    return _BLOCKS.get(kind, kind if kind in _BLOCKS.values() else None)


def is_block(kind: type[nn.Module]) -> bool:
    """A class of blocks that is known, before or after its conversion."""
    return kind in TORCHS or declaration_of(kind) is not None


STRUCTURES: "weakref.WeakKeyDictionary[nn.Module, Structure]" = weakref.WeakKeyDictionary()
"""The structure of each block, as the latest run of its model showed it."""


def structure_of(block: Any) -> Structure:
    """A block's structure, found or declared."""
    if is_converted(block):
        return residual_of(block).structure
    return STRUCTURES[block] if declaration_of(type(block)) is None else declared_structure(block)


def is_converted(block: Any) -> bool:
    """The block has a scheme of this package."""
    return residual_of(block) is not None


def declared_structure(block: Any) -> Structure:
    """The structure of a block of a registered class."""
    own: list[Part] = declaration_of(type(block)).parts(block)
    memory = "encoder_hidden_states"
    parts = tuple(part._replace(memory=memory) if part.kind == "cross-attention" else part for part in own)
    return Structure(parts, tuple(range(len(parts))), frozenset(), is_found=False)


_ATTENTION = (Linear("in_proj_weight", ("query", "key", "value")), Linear("out_proj", ("output",)))
_FEED_FORWARD = (Linear("linear1", ("fc1",)), Linear("linear2", ("fc2",)))


def __torch_parts(*attentions: str) -> tuple[Part, ...]:
    parts = []
    for i, name in enumerate(attentions):
        linears = tuple(linear._replace(path=f"{name}.{linear.path}") for linear in _ATTENTION)
        parts.append(Part(KINDS[i], f"norm{i + 1}", linears))
    return (*parts, Part("feed-forward", f"norm{len(attentions) + 1}", _FEED_FORWARD))


ENCODER, DECODER = __torch_parts("self_attn"), __torch_parts("self_attn", "multihead_attn")
TORCHS: dict[type[nn.Module], tuple[Part, ...]] = {
    nn.TransformerEncoderLayer: ENCODER,
    nn.TransformerDecoderLayer: DECODER,
    nfnn.TransformerEncoderLayer: ENCODER,
    nfnn.TransformerDecoderLayer: DECODER,
}
TORCH_STACKS = {nn.TransformerEncoder: nfnn.TransformerEncoder, nn.TransformerDecoder: nfnn.TransformerDecoder}


def parts_of(block: Any) -> Sequence[Part]:
    """The sublayers of a known block, before or after its conversion."""
    if isinstance(block, tuple(TORCHS)):
        return torchs_parts(block)
    return structure_of(block).parts


def stacked_rows(attention: nn.Module) -> list[tuple[int, int]]:
    """The first row and the number of rows of queries, keys and values in torch.nn's stacked matrix."""
    rows, d = attention.in_proj_weight.shape  # type: ignore[union-attr, misc]
    shared = (rows - d) // 2  # heads of keys may be fewer
    return [(0, d), (d, shared), (d + shared, shared)]


def torchs_parts(block: Any) -> tuple[Part, ...]:
    """The sublayers of a layer with torch.nn's names, with what this package's layers have beside them: output gates,
    a gated feed-forward's third matrix, and fewer heads of keys."""
    *attentions, feed_forward = DECODER if has(block, "multihead_attn") else ENCODER
    found = []
    for name, part in zip(("self_attn", "multihead_attn"), attentions):
        stacked, *others = part.linears
        weight = getattr(at(block, name), "in_proj_weight", None)
        if weight is not None and weight.shape[0] != 3 * weight.shape[1]:
            sizes = (size for _, size in stacked_rows(at(block, name)))
            stacked = stacked._replace(rows=tuple(map(Rows, stacked.roles, (None,) * 3, sizes)))
        if has(block, f"{name}.gate_proj"):
            others.append(Linear(f"{name}.gate_proj", ("output_gate",)))
        found.append(part._replace(linears=(stacked, *others)))
    if has(block, "linear3"):
        linears = (*feed_forward.linears, Linear("linear3", ("gate",)))
        feed_forward = feed_forward._replace(linears=linears)
    return (*found, feed_forward)


class Group(NamedTuple):
    """Blocks that follow each other."""

    path: str
    """The path of their list."""
    names: list[str]
    blocks: list[nn.Module]
    holder: nn.Module
    """The module that has the list."""
    depth: int
    """The list's number of layers: more than blocks where entries share one, or are of a subclass."""
    end: "End | None" = None
    """The norm after the last of them."""
    loop: nn.Module | None = None
    """The module whose forward runs through all of them, where the blocks are views of it (`loops.py`)."""

    @property
    def has_memory(self) -> bool:
        """They attend to an encoder's output."""
        return any(part.kind == "cross-attention" for part in parts_of(self.blocks[0]))


class End(NamedTuple):
    """The norm after a stack: its owner, the owner's path, and the norm's name there.

    Attributes:
        reads_elsewhere: it also norms what another block than the last one gives.
        early: its calls before the first block, as of nanochat's embeddings.
    """

    owner: nn.Module
    path: str
    name: str
    reads_elsewhere: bool = False
    early: int = 0

    @property
    def norm(self) -> nn.Module:
        return self.owner.get_submodule(self.name)


def place_of(block: Any) -> Place | None:
    """The place of a block that has a scheme of the package already; else None."""
    return getattr(residual_of(block) or block, "place", None)


def shape_of(block: Any) -> dict[str, Any]:
    """The options of a configuration that follow from the block: width, heads, norm, feed-forward width."""
    place = place_of(block)
    if place is not None:
        return {name: getattr(place.config, name) for name in ("d_model", "heads", "norm", "norm_eps", "d_ff")}
    parts = parts_of(block)
    norm = next((block.get_submodule(part.norm) for part in parts if part.norm is not None), None)
    found = None if norm is None else read_norm(norm)
    own = norm if isinstance(norm, OwnNorm) else None
    if own is not None:
        found = RecognisedNorm(own.width, "layernorm")
    if norm is not None and found is None:
        found = _by_width(norm, structure_of(block).width)
    if norm is not None and found is None:
        name = next(part.norm for part in parts if part.norm is not None)
        raise InputError(
            f"{type(block).__name__}'s {name} is a {type(norm).__name__}, no known norm: register it with "
            "normformer_rs.surgery.register_norm(kind, reader)"
        )
    width = found.width if found is not None else structure_of(block).width
    d_ff = next((size for part in reversed(parts) if (size := _width_into(block, part, "fc2"))), None)
    shape: dict[str, Any] = {"d_model": width, "heads": _heads_of(block), "d_ff": d_ff or 4 * (width or 1)}
    if own is not None:
        return shape | {"norm": own.norm}
    if found is not None and found.eps is not None and math.isfinite(found.eps):
        shape["norm_eps"] = found.eps
    return shape | {"norm": "layernorm" if found is None else found.computes}


def _by_width(norm: nn.Module, width: int | None) -> RecognisedNorm | None:
    """A norm that no trial call could recognise by itself: one whose parameters do not tell its width, recognised at
    the stream's; or something else with a weight for each column, to which layernorm stands nearest."""
    if width is None:
        return None
    found = probe(norm, width)
    if isinstance(found, RecognisedNorm):
        return found
    own = next(norm.parameters(recurse=False), None)
    return RecognisedNorm(width, "layernorm") if own is not None and own.numel() == width else None


def _heads_of(block: Any) -> int:
    """The number of attention heads; 1 where none is recognised."""
    if type(block) in TORCHS:
        return block.self_attn.num_heads
    declared = declaration_of(type(block))
    return structure_of(block).heads or 1 if declared is None else declared.heads(block)


def _width_into(block: nn.Module, part: Part, role: Role) -> int | None:
    """The fan-in of the first linear layer with that role, if there is one."""
    path = next((linear.path for linear in part.linears if role in linear.roles), None)
    return None if path is None else _fan_in(block, path)


def path_of(block: nn.Module, part: Part, role: Role) -> str:
    """The path of the one linear layer with that role; InputError where there is none, or several."""
    linears = [linear for linear in part.linears if role in linear.roles]
    path = linears[0].path if linears else None
    is_found = type(block) not in TORCHS and structure_of(block).is_found
    if is_found and (len(linears) != 1 or not linears[0].is_called):
        count = "no linear layer" if not linears else f"{len(linears)} linear layers" if len(linears) > 1 else path
        raise InputError(
            f"the scheme acts at {role!r} of the {part.kind}, and {type(block).__name__} shows {count} there, as "
            "mixtures of experts and fused functions do: choose another scheme"
        )
    if path is None:
        raise InputError(
            f"the declaration of {type(block).__name__} names no linear layer with the role {role!r} in its "
            f"{part.kind}, as of a mixture of experts, and its width is needed: give a layer that role in "
            "normformer_rs.surgery.register_block"
        )
    return path


def width_into(block: nn.Module, part: Part, role: Role) -> int:
    """The fan-in of the linear layer with that role."""
    return _fan_in(block, path_of(block, part, role))


def _fan_in(block: nn.Module, path: str) -> int:
    owner, weight, _ = projection(block, path)
    if getattr(owner, weight, None) is None:
        raise _made_of_something_else(block, path, owner)
    return getattr(owner, weight).shape[0 if is_transposed(block, path) else 1]


def weight_and_bias(block: nn.Module, path: str) -> tuple[nn.Parameter, nn.Parameter | None]:
    """A linear layer's weight and bias, for writing; torch.nn's attention has its stacked projection as a parameter.

    Errors: InputError where the layer has no weight of its own: a parametrization or a wrapper makes it.
    """
    owner, weight, bias = projection(block, path)
    if weight not in owner._parameters or not _is_editable(getattr(owner, weight)):
        raise _made_of_something_else(block, path, owner)
    return getattr(owner, weight), getattr(owner, bias, None)


def projection(block: nn.Module, path: str) -> tuple[nn.Module, str, str]:
    """(owner, the weight's name, the bias's name) of a linear layer."""
    parent, name = block.get_submodule(parent_of(path)), path.rpartition(".")[2]
    if name in parent._parameters:
        return parent, name, name.removesuffix("weight") + "bias"
    return block.get_submodule(path), "weight", "bias"


def _made_of_something_else(block: nn.Module, path: str, owner: nn.Module) -> InputError:
    kind = type(owner)
    what = kind.__name__ if kind.__module__.startswith(("torch.", "transformers.")) else full_name(kind)
    own = owner._parameters.get("weight")
    has = "has no weight of its own" if own is None else f"has a weight of type {type(own).__name__}, and none"
    return InputError(
        f"{path} of a {type(block).__name__} is a {what}, which {has} to change: change the model first, and then "
        "parametrize, wrap or quantize its layers; swap_residuals(..., init=None) leaves their weights alone"
    )


def _is_editable(weight: Tensor) -> bool:
    """A plain tensor of floating point, or one without data."""
    is_plain = type(weight) in (Tensor, nn.Parameter) or type(weight).__name__ == "FakeTensor"
    return is_plain and weight.is_floating_point()


def is_transposed(block: nn.Module, path: str) -> bool:
    """transformers' Conv1D keeps (fan_in, fan_out)."""
    parts = parts_of(block) if block in STRUCTURES or is_converted(block) else ()
    if any(linear.path == path and linear.is_transposed for part in parts for linear in part.linears):
        return True
    return not path.endswith("in_proj_weight") and type(at(block, path)).__name__ == "Conv1D"


def parent_of(path: str | None) -> str:
    return (path or "").rpartition(".")[0]


def like_of(block: nn.Module) -> Tensor:
    """A parameter that tells device and dtype; quantized ones do not."""
    return next((p for p in block.parameters() if p.is_floating_point()), next(block.parameters()))


def full_name(kind: type) -> str:
    """Module and name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"
