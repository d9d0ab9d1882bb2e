"""Describes the blocks of other libraries' models: their sublayers, linear layers, norms and widths."""

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
from .record import Span
from .spec import Linear, Part, Rows, at, has
from .structure import Structure

_BLOCKS: dict[type[nn.Module], type[nn.Module]] = {}
"""For each class registered with `register_block`, its converted subclass."""


def register_block(kind: type[nn.Module], converted: type[nn.Module]) -> None:
    """Declares the sublayers of a class of blocks. This is needed if no run of the model can show the blocks'
    additions, as in a fused kernel.

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

    `swap_residuals` still runs the model once, to find the norm after the blocks. A swap changes the class of the
    blocks to the subclass, which has

    * `parts(self)`: the list of its `Part`s, in order;
    * a `forward` of kind's signature that runs `x = self.residual.step(i, x, F, dropout)` for each part. F is the
      sublayer without its norm, the dropout on its output and its residual connection. If F returns a tuple, its first
      item is F(x);
    * `heads(self)`: the number of attention heads;
    * `sites(self)` (optional): {path of a child that makes one of the additions: the child's converted class}. Such a
      child finds its block as `self.block_of[0]`.

    Args:
        kind: the class of the blocks.
        converted: the subclass.

    Errors: InputError for a class that is not a subclass of kind.
    """
    if not issubclass(converted, kind):
        raise InputError(f"{converted.__name__} must be a subclass of {kind.__name__}: its blocks become blocks of it")
    _BLOCKS[kind] = converted


def declaration_of(kind: type) -> Any:
    """Returns the subclass that was passed to `register_block` for a class of blocks; `kind` may also be that subclass,
    or a converted class. None: the class is not registered."""
    kind = original(kind)
    return _BLOCKS.get(kind, kind if kind in _BLOCKS.values() else None)


def is_block(kind: type[nn.Module]) -> bool:
    """Returns whether a class is one of torch.nn's, this package's or the registered classes of blocks."""
    return kind in TORCHS or declaration_of(kind) is not None


STRUCTURES: "weakref.WeakKeyDictionary[nn.Module, Structure]" = weakref.WeakKeyDictionary()
"""For each block, the structure that the latest run of its model showed."""


def structure_of(block: Any) -> Structure:
    """Returns a block's structure, as a run has found it or as its registered class declares it."""
    if is_converted(block):
        return residual_of(block).structure
    return STRUCTURES[block] if declaration_of(type(block)) is None else declared_structure(block)


def is_converted(block: Any) -> bool:
    """Returns whether the block has a scheme of this package."""
    return residual_of(block) is not None


def declared_structure(block: Any) -> Structure:
    """Returns the structure that the registered class of a block declares."""
    declared: list[Part] = declaration_of(type(block)).parts(block)
    memory = "encoder_hidden_states"  # the argument's name in Hugging Face's decoders
    parts = tuple(part._replace(memory=memory) if part.kind == "cross-attention" else part for part in declared)
    return Structure(parts, writes=tuple(range(len(parts))), reads=frozenset(), is_found=False)


# The linear layers of torch.nn's Transformer layers. Attention's paths begin at the attention, the others at the layer.
_ATTENTION = (Linear("in_proj_weight", ("query", "key", "value")), Linear("out_proj", ("output",)))
_FEED_FORWARD = (Linear("linear1", ("fc1",)), Linear("linear2", ("fc2",)))


def __torch_parts(*attentions: str) -> tuple[Part, ...]:
    """Returns the sublayers of a layer of torch.nn with attentions of these names: self-attention, cross-attention."""
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
"""The layers of torch.nn and of this package, whose sublayers are known without a run."""
TORCH_STACKS = {nn.TransformerEncoder: nfnn.TransformerEncoder, nn.TransformerDecoder: nfnn.TransformerDecoder}


def parts_of(block: Any) -> Sequence[Part]:
    """Returns the sublayers of a known block, converted or not."""
    if isinstance(block, tuple(TORCHS)):
        return torchs_parts(block)
    return structure_of(block).parts


def stacked_rows(attention: nn.Module) -> list[tuple[int, int]]:
    """Returns (first row, number of rows) of queries, keys and values in torch.nn's stacked projection matrix."""
    rows, d = attention.in_proj_weight.shape  # type: ignore[union-attr, misc]
    key_rows = (rows - d) // 2  # keys and values have equally many heads, perhaps fewer than queries
    return [(0, d), (d, key_rows), (d + key_rows, key_rows)]


def torchs_parts(block: Any) -> tuple[Part, ...]:
    """Returns the sublayers of a layer that has torch.nn's names. Included are the extras of this package's layers:
    output gates, the third matrix of a gated feed-forward, and fewer heads of keys and values."""
    *attentions, feed_forward = DECODER if has(block, "multihead_attn") else ENCODER
    parts = []
    for name, part in zip(("self_attn", "multihead_attn"), attentions):
        stacked, *others = part.linears
        weight = getattr(at(block, name), "in_proj_weight", None)
        # if the matrix does not have 3·d rows, queries have more of them than keys and values
        if weight is not None and weight.shape[0] != 3 * weight.shape[1]:
            sizes = (size for _, size in stacked_rows(at(block, name)))
            heads = (None,) * 3  # the rows of each role are not divided by head
            stacked = stacked._replace(rows=tuple(map(Rows, stacked.roles, heads, sizes)))
        if has(block, f"{name}.gate_proj"):
            others.append(Linear(f"{name}.gate_proj", ("output_gate",)))
        parts.append(part._replace(linears=(stacked, *others)))
    if has(block, "linear3"):
        linears = (*feed_forward.linears, Linear("linear3", ("gate",)))
        feed_forward = feed_forward._replace(linears=linears)
    return (*parts, feed_forward)


LISTS = (nn.ModuleList, nn.Sequential)


class Group(NamedTuple):
    """A stack: blocks that run one after the other."""

    path: str
    """The path of the list that holds them."""
    names: list[str]
    """The paths of the blocks; names such as PATH[0] for the layers of a loop."""
    blocks: list[nn.Module]
    holder: nn.Module
    """The module that has the list as an attribute."""
    depth: int
    """The stack's number of layers. It exceeds the number of blocks if layers share a block, or if some are of a
    subclass."""
    end: "End | None" = None
    """The norm after the last block. None: there is none."""
    runs: int = 1
    """How often one run of the model calls the holder. Each call begins and ends the stack."""
    loop: nn.Module | None = None
    """The module whose forward runs through all layers, if the blocks are views of it (`loops.py`). Else None."""
    span: Span | None = None
    """Where the stream begins and ends, if that is within the forward of `loop`. Else None."""
    shares_stream: str = ""
    """If the stream also passes through blocks of another group: a message that says from which block to which. Else
    empty."""

    @property
    def has_memory(self) -> bool:
        """Whether the blocks attend to an encoder's output."""
        return any(part.kind == "cross-attention" for part in parts_of(self.blocks[0]))


class End(NamedTuple):
    """The norm after a stack: its owner, the owner's path, and the norm's name there.

    Attributes:
        reads_elsewhere: whether it also norms the output of a block before the last.
        early: how often it is called before the first block, as nanochat does with its embeddings.
        others: what else the model norms by it, or norms beside it, in words; "": nothing.
    """

    owner: nn.Module
    path: str
    name: str
    reads_elsewhere: bool = False
    early: int = 0
    others: str = ""

    @property
    def norm(self) -> nn.Module:
        return self.owner.get_submodule(self.name)


def place_of(block: Any) -> Place | None:
    """Returns the place (configuration, stack and layer) of a block that already has a scheme of this package, else
    None."""
    return getattr(residual_of(block) or block, "place", None)


def shape_of(block: Any) -> dict[str, Any]:
    """Returns the options of `TransformerConfig` that follow from a block: width, heads, norm, its ε, feed-forward
    width. Errors: InputError if the block's norm is of no known kind."""
    place = place_of(block)
    if place is not None:
        return {name: getattr(place.config, name) for name in ("d_model", "heads", "norm", "norm_eps", "d_ff")}
    parts = parts_of(block)
    norm = next((block.get_submodule(part.norm) for part in parts if part.norm is not None), None)
    known = None if norm is None else read_norm(norm)
    user_norm = norm if isinstance(norm, OwnNorm) else None
    if user_norm is not None:  # `known` then serves for the width only
        known = RecognisedNorm(user_norm.width, "layernorm")
    if norm is not None and known is None:
        known = _by_width(norm, structure_of(block).width)
    if norm is not None and known is None:
        name = next(part.norm for part in parts if part.norm is not None)
        raise InputError(
            f"{type(block).__name__}'s {name} is a {type(norm).__name__}, no known norm: register it with "
            "normformer_rs.surgery.register_norm(kind, reader)"
        )
    width = known.width if known is not None else structure_of(block).width
    # the number of columns of the last matrix of the last feed-forward
    d_ff = next((size for part in reversed(parts) if (size := _width_into(block, part, "fc2"))), None)
    # a block without known feed-forward counts as one of the usual width 4·d
    shape: dict[str, Any] = {"d_model": width, "heads": _heads_of(block), "d_ff": d_ff or 4 * (width or 1)}
    if user_norm is not None:
        return shape | {"norm": user_norm.norm}
    if known is not None and known.eps is not None and math.isfinite(known.eps):
        shape["norm_eps"] = known.eps
    return shape | {"norm": "layernorm" if known is None else known.computes}


def _by_width(norm: nn.Module, width: int | None) -> RecognisedNorm | None:
    """Returns what a norm computes whose parameters do not show its width, by trial calls at the stream's width. If
    these fail, a module with one weight for each column counts as a layernorm. None: it is neither."""
    if width is None:
        return None
    found = probe(norm, width)
    if isinstance(found, RecognisedNorm):
        return found
    weight = next(norm.parameters(recurse=False), None)
    return RecognisedNorm(width, "layernorm") if weight is not None and weight.numel() == width else None


def _heads_of(block: Any) -> int:
    """Returns the number of attention heads; 1 if no attention was recognised."""
    if type(block) in TORCHS:
        return block.self_attn.num_heads
    declared = declaration_of(type(block))
    if declared is not None:
        return declared.heads(block)
    return structure_of(block).heads or 1


def _width_into(block: nn.Module, part: Part, role: Role) -> int | None:
    """Returns the fan-in of the first linear layer with that role. None: there is none."""
    path = next((linear.path for linear in part.linears if role in linear.roles), None)
    return None if path is None else _fan_in(block, path)


def path_of(block: nn.Module, part: Part, role: Role) -> str:
    """Returns the path of the one linear layer with that role. Errors: InputError if there is none, or several."""
    linears = [linear for linear in part.linears if role in linear.roles]
    path = linears[0].path if linears else None
    is_found = type(block) not in TORCHS and structure_of(block).is_found  # by a run, and not declared
    if is_found and (len(linears) != 1 or not linears[0].is_called):
        shown: str | None = path  # for the message: the one layer, if the block does not call it
        if len(linears) != 1:
            shown = f"{len(linears)} linear layers" if linears else "no linear layer"
        raise InputError(
            f"the scheme acts at {role!r} of the {part.kind}, and {type(block).__name__} shows {shown} there, as "
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
    """Returns the fan-in of the one linear layer with that role. Errors: InputError."""
    return _fan_in(block, path_of(block, part, role))


def _fan_in(block: nn.Module, path: str) -> int:
    """Returns the fan-in of the linear layer at a path. Errors: InputError if the layer has no weight of its own."""
    owner, weight, _ = projection(block, path)
    if getattr(owner, weight, None) is None:
        raise _no_own_weight(block, path, owner)
    return getattr(owner, weight).shape[0 if is_transposed(block, path) else 1]


def weight_and_bias(block: nn.Module, path: str) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Returns a linear layer's weight and bias, which the caller may write. In torch.nn's attention, `path` may name
    the stacked projection, which is a bare parameter.

    Errors: InputError if the layer has no weight of its own, because a parametrization or a wrapper computes it.
    """
    owner, weight, bias = projection(block, path)
    if weight not in owner._parameters or not _is_editable(getattr(owner, weight)):
        raise _no_own_weight(block, path, owner)
    return getattr(owner, weight), getattr(owner, bias, None)


def projection(block: nn.Module, path: str) -> tuple[nn.Module, str, str]:
    """Returns (owner, the weight's name, the bias's name) of the linear layer at a path. If the path is that of a bare
    parameter, the owner is the module that has it."""
    parent, name = block.get_submodule(parent_of(path)), path.rpartition(".")[2]
    if name in parent._parameters:
        return parent, name, name.removesuffix("weight") + "bias"
    return block.get_submodule(path), "weight", "bias"


def _no_own_weight(block: nn.Module, path: str, owner: nn.Module) -> InputError:
    """Returns the error for the linear layer `owner` at a path of the block, which has no weight to write into."""
    kind = type(owner)
    what = kind.__name__ if kind.__module__.startswith(("torch.", "transformers.")) else full_name(kind)
    weight = owner._parameters.get("weight")
    lack = "has no weight of its own" if weight is None else f"has a weight of type {type(weight).__name__}, and none"
    return InputError(
        f"{path} of a {type(block).__name__} is a {what}, which {lack} to change: change the model first, and then "
        "parametrize, wrap or quantize its layers; swap_residuals(..., init=None) leaves their weights alone"
    )


def _is_editable(weight: Tensor) -> bool:
    """Returns whether a weight is a plain floating-point tensor, or a FakeTensor, which has no data."""
    is_plain = type(weight) in (Tensor, nn.Parameter) or type(weight).__name__ == "FakeTensor"
    return is_plain and weight.is_floating_point()


def is_transposed(block: nn.Module, path: str) -> bool:
    """Returns whether the weight at a path has the shape (fan_in, fan_out), as that of transformers' Conv1D."""
    parts = parts_of(block) if block in STRUCTURES or is_converted(block) else ()  # those that a run has found
    if any(linear.path == path and linear.is_transposed for part in parts for linear in part.linears):
        return True
    return not path.endswith("in_proj_weight") and type(at(block, path)).__name__ == "Conv1D"


def parent_of(path: str | None) -> str:
    """Returns a module path without its last name."""
    return (path or "").rpartition(".")[0]


def like_of(block: nn.Module) -> Tensor:
    """Returns a parameter with the block's device and dtype: its first floating-point one, since quantized ones have
    another dtype."""
    return next((p for p in block.parameters() if p.is_floating_point()), next(block.parameters()))


def full_name(kind: type) -> str:
    """Returns module and qualified name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"
