"""Folds learned gains into the weights around them, after training: those of norms, and admin's ω."""

import functools
import itertools
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..declarations.declared import Learned
from ..errors import InputError
from ..loop.model import Transformer
from ..nn.layers import Layer
from ..nn.place import Place
from .blocks import Part, parent_of, parts_of, place_of, torchs_parts, weight_and_bias
from .converted import residual_of
from .flow import Flow
from .handover import refuse_offloaded
from .marker import mark
from .norms import replace, unweighted
from .optimizers import Exchange, watch
from .probe import RecognisedNorm
from .recognise import read_norm
from .spec import has
from .stream import Places, Site, join, readers, refuse_meta, widened
from .undo import Edits, Row, Swaps, refuse_wrapped
from .whole import State


def fold_norms(model: nn.Module, *, example: Any = None) -> Swaps:
    """Folds the γ and β of norms into the linear layers that read them, in place; the norms remain without weights.

    With y = γ⊙x̂ + β and z = Wy + b, z = (W·diag(γ))x̂ + (b + Wβ). A layernorm or rmsnorm can be folded if only linear
    layers read it: in pre-norm blocks those of queries, keys and values, or the first ones of the feed-forward. The
    last norm is folded if one linear layer reads it and that layer shares no weight with an embedding. A linear layer
    without a bias gets one if there is a β. The model's outputs change by rounding only, in training mode, too.
    Gradients are those of another parametrisation, so make the optimizer afterwards.

    Runs in both modes show which layers read a norm. A trial fold with random gains then proves that the outputs stay.

    >>> from torch import nn
    >>> model = nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
    >>> print(fold_norms(model))
    fold_norms: 3
    module   old        new                    note
    norm1    LayerNorm  LayerNorm, unweighted  weight, bias into self_attn
    norm2    LayerNorm  LayerNorm, unweighted  weight, bias into linear1
    (model)  fast path  off                    torch.nn's fused evaluation would bypass the norms

    Args:
        model: any tree of modules.
        example: an input for the runs, as in `swap_residuals`. None: one is made for torch.nn's models, too.

    Returns: the table of the changes; norms that stay have a row with the reason. Its `undo()` brings weights and norms
    back bit for bit.

    Errors: InputError for a model that cannot be run, has no norm that can be folded, or whose outputs would change;
    for DistributedDataParallel and FSDP models, and for weights on the meta device. After an error the model is
    unchanged.
    Source: Graef et al. 2024 (FlashNorm); docs/spec.md §4.16.
    """
    return fold_named(model, None, example)


def fold_named(model: nn.Module, names: Collection[str] | None, example: Any) -> Swaps:
    """Folds like `fold_norms`, but only the norms with these names. `names=None`: all."""
    refuse_wrapped(model)
    return Edits(model, "fold_norms").all_or_none(functools.partial(_fold_norms, model, names, example))


@torch.no_grad()
def _fold_norms(model: nn.Module, names: Collection[str] | None, example: Any, edits: Edits) -> Swaps:
    """Finds the norms, proves by a trial fold that the outputs do not change, and folds. Returns the table."""
    by = edits.title
    refuse_meta(model, by)
    sites, flow = _found(model, by, example)
    wanted = {*(names or ())}
    # norms that are not to be folded get that as their fault
    for site in sites.values() if names is not None else ():
        site.fault = site.fault or ("" if site.names & wanted else "it was not folded before it was saved")
    _prove(model, sites, flow, edits)
    rows = _fold_all(model, sites, edits)
    edits.done()
    return Swaps(by, rows, edits)


def _prove(model: nn.Module, sites: dict[nn.Module, Site], flow: Flow, edits: Edits) -> None:
    """Folds as a trial, compares the model's outputs, and restores everything. Errors: InputError if the outputs
    change. For the trial, constant parameters get random numbers, since gains of 1 and weights of 0 would hide a
    difference. `sites`: each norm with the layers that read it; `flow`: runs the model."""
    trial, state = Edits(model, edits.title), edits.state
    assert state is not None
    trial.state = state  # shared, so that restoring it also takes the trial's changes back
    random = torch.Generator().manual_seed(0)
    try:
        for p in dict.fromkeys(model.parameters()):
            if _is_constant(p):
                state.keep_values([p])
                # gains move by about a third; matrices of 1/√fan_in keep the outputs at the size of their inputs
                size = 0.3 if p.dim() < 2 else p.shape[-1] ** -0.5
                p.add_((size * torch.randn(p.shape, generator=random)).to(p))
        before = flow.outputs()
        _fold_all(model, sites, trial)
        flow.check(before, edits.title)
    finally:
        state.restore()
        state.values.clear()  # the real fold records the values anew


def _is_constant(p: nn.Parameter) -> bool:
    """Returns whether all numbers of a plain floating-point parameter are equal."""
    is_plain = type(p) is nn.Parameter and p.layout == torch.strided and p.is_floating_point() and p.itemsize > 1
    return is_plain and p.numel() > 0 and bool((p == p.flatten()[0]).all())


def _fold_all(model: nn.Module, sites: dict[nn.Module, Site], edits: Edits) -> list[Row]:
    """Folds every norm of `sites` that can be folded. Returns a row of the table for each norm, with the reason if it
    stays."""
    rows: list[Row] = []
    folded: dict[nn.Module, nn.Module] = {}  # norm → the norm without weights that replaces it
    adds_biases = False
    for norm, site in sites.items():
        known, kind, name = read_norm(norm), type(norm).__name__, min(site.names)
        # the names of the norm's gain and bias; a norm without both has nothing to fold
        learned = [] if known is None else [leaf for leaf in (known.gain, known.bias) if leaf is not None]
        fault = site.fault if known and known.computes in ("layernorm", "rmsnorm") else "no layernorm or rmsnorm"
        if fault:
            rows.append(Row(name, kind, kind, f"stays: {fault}"))
        elif known is not None and learned:
            folded[norm] = unweighted(model, name, norm, known)
            note = f"{', '.join(learned)} into {site.said}"
            rows += [Row(name, kind, f"{type(folded[norm]).__name__}, unweighted", note) for name in sorted(site.names)]
            adds_biases |= _fold(norm, known, site, edits)
    rows += replace(model, [(name, norm) for norm in folded for name in sorted(sites[norm].names)], folded, edits)
    if folded:
        names = sorted(name for norm in folded for name in sites[norm].names)
        record = {"fold_norms": True, "names": names, **({"biases": True} if adds_biases else {})}
        mark(model, "folded", "norms", edits, record)  # notes the fold in a Hugging Face configuration
    return rows


def _found(model: nn.Module, by: str, example: Any) -> tuple[dict[nn.Module, Site], Flow]:
    """Runs the model in both modes. Returns the norms that it calls, each with the linear layers that read it, and the
    flow. Errors: InputError if none can be folded."""
    flow = Flow.needed(model, example, Places(model), modes=(False, True))
    sites = flow.sites({module: known for module in model.modules() if (known := read_norm(module)) is not None})
    if sites and all(site.fault for site in sites.values()):
        name, fault = next((min(site.names), site.fault) for site in sites.values())
        title = type(model).__name__
        raise InputError(f"{by} finds no norm of {title} that linear layers alone read: of {name}, {fault}")
    if not sites:
        raise InputError(f"{by} finds no norm in {type(model).__name__}'s run that it knows")
    return sites, flow


def _fold(norm: nn.Module, known: RecognisedNorm, site: Site, edits: Edits) -> bool:
    """Folds γ and β of a norm into the linear layers that read it (`site.readers`). Returns True if a layer had no bias
    and got one. `known`: the norm's description, by which γ is factor·(offset + its parameter)."""
    gain = None if known.gain is None else known.factor * (known.offset + widened(getattr(norm, known.gain)))
    bias = None if known.bias is None else getattr(norm, known.bias)
    exchange: Exchange = {}  # the weight of a layer with a new bias → that weight and the bias
    for matrix in site.readers:
        if bias is not None and matrix.offsets() is None:
            edits.remember(matrix.owner)
            matrix.add_bias()
            weight, new_bias = matrix.parameters[matrix.weight], matrix.parameters[matrix.bias]
            exchange[weight] = [(join(matrix.name, matrix.weight), weight), (join(matrix.name, matrix.bias), new_bias)]
    watch(exchange, {}, edits)  # optimizers then warn if they do not have the new biases
    edits.remember_values([*dict.fromkeys(p for matrix in site.readers for p in matrix.parameters.values())])
    for matrix in site.readers:
        matrix.take_in(gain, bias)
    return bool(exchange)


class _Site(NamedTuple):
    """A sublayer with admin's scheme: its norm's name, its gain ω, its norm, and the matrices that read its input x."""

    name: str
    omega: nn.Parameter
    norm: Any
    readers: list[Tensor]


def fold_admin(model: nn.Module) -> int:
    """Moves admin's gains ω into the weights around them, in place. A plain post-norm Transformer remains, except for
    each stack's first sublayer.

    In x⁺ = N(ω⊙x + F(x)), x comes from the norm of the preceding sublayer. That norm's γ and β are multiplied by ω,
    and ω becomes 1. To make up for this, the columns of the matrices that read x are divided by ω: those of queries,
    keys and values (in attention to an encoder, of queries only), or of fc1. The model's outputs change by rounding
    only, but the outputs of single layers change.

    >>> from normformer_rs import nn
    >>> fold_admin(nn.Transformer(8, 2, 2, 2, 16, residual="admin"))
    8

    Args:
        model: a `normformer_rs.Transformer`, or any tree with layers that have the scheme (`normformer_rs.nn`'s, or
            swapped ones).

    Returns: how many gains were folded. Errors: InputError for a model without such gains, for a norm whose gain is not
    one number per column, for an ω with a zero in it, and for parameters that layers share. After an error the model is
    unchanged.
    Source: Liu et al. 2020; docs/spec.md §2.9.
    """
    refuse_offloaded(model)
    stacks = [[*stack] for stack in _stacks(model)]
    # each sublayer with the one before it, whose norm takes in ω; the first of a stack has none
    pairs = [(before, site) for stack in stacks for before, site in itertools.pairwise(stack)]
    if not pairs:
        raise InputError(f'{type(model).__name__} holds no layer with residual="admin"')
    for before, site in pairs:
        weight = getattr(before.norm, "weight", None)
        if weight is None or weight.shape != site.omega.shape:
            kind = type(before.norm).__name__
            raise InputError(f"{before.name}, a {kind}, has no gain for each column to take ω in")
        if not site.omega.all():
            raise InputError(f"the ω before {site.name} has a zero, and columns cannot be divided by it")
    # a tensor that occurs twice would be multiplied or divided twice
    changed = [t.data_ptr() for before, site in pairs for t in (before.norm.weight, *site.readers)]
    if len({*changed}) < len(changed):
        raise InputError("layers share parameters, whose gains ω differ: they cannot be folded into them")
    state = State(model)
    return state.run(functools.partial(_fold_admin, pairs, state))


@torch.no_grad()
def _fold_admin(pairs: list[tuple[_Site, _Site]], state: State) -> int:
    """Folds the ω of each pair's second sublayer into the norm of the first and the matrices that read it. Returns the
    number of pairs."""
    for before, site in pairs:
        written = (before.norm.weight, getattr(before.norm, "bias", None), *site.readers, site.omega)
        state.keep_values(tensor for tensor in written if tensor is not None)
    for before, site in pairs:
        for tensor in (before.norm.weight, getattr(before.norm, "bias", None)):
            if tensor is not None:
                tensor.mul_(site.omega)
        for reader in site.readers:
            reader.div_(site.omega)
        site.omega.fill_(1)
    return len(pairs)


def _stacks(model: nn.Module) -> Iterator[Iterator[_Site]]:
    """Yields an iterator for each stack of the model, over its sublayers with admin's scheme, in order."""
    if isinstance(model, Transformer):
        for stack in ("encoder", "decoder"):
            if stack in model._modules:
                layers = [*model.get_submodule(f"{stack}.layers").named_children()]
                yield (site for i, layer in layers for site in _sites(layer, layer, Place(model.config, stack, int(i))))
        return
    # key of a stack → its blocks in order: (block, the module that has the scheme's parameters, place)
    stacks: dict[Any, list[tuple[nn.Module, nn.Module, Place]]] = {}
    for name, block in model.named_modules():
        owner, place = residual_of(block) or block, place_of(block)
        # a swapped block, or a layer of `normformer_rs.nn`
        if place is not None and (owner is not block or isinstance(block, Layer)):
            # the path of the list, without the attributes of torch.compile's and checkpoints' wrappers
            list_path = parent_of(name.replace("._orig_mod", "").replace("._checkpoint_wrapped_module", ""))
            # layers of one list, class, number of sublayers and width form one stack
            kind = type(block), len(place.sublayers), place.config.d_model
            stacks.setdefault((list_path, *kind), []).append((block, owner, place))
    for blocks in stacks.values():
        yield (site for block, owner, place in blocks for site in _sites(block, owner, place))


def _sites(block: nn.Module, owner: nn.Module, place: Place) -> Iterator[_Site]:
    """Yields the sublayers of a block with admin's scheme. `owner`: the module that has the scheme's parameters."""
    if place.config.residual == "admin":
        if has(block, "self_attn.value_gate"):
            raise InputError("the gates of value embeddings read some columns of x, and ω has no place in them")
        # the layers of a `normformer_rs.Transformer` are plain modules with torch.nn's names
        parts = torchs_parts(block) if type(block) is nn.Module else parts_of(block)
        for sublayer, part in zip(place.sublayers, parts):
            assert isinstance(sublayer.alpha, Learned)
            omega: Any = getattr(owner, sublayer.alpha.name)
            norm: Any = getattr(owner, f"norm{place.sublayers.index(sublayer) + 1}")
            yield _Site(f"layer {place.layer}'s {part.norm}", omega, norm, [*_readers(block, part)])


def _readers(block: nn.Module, part: Part) -> Iterator[Tensor]:
    """Yields the matrices of a sublayer that read x, as views whose last dimension is x's width."""
    for linear in part.linears:
        weight_and_bias(block, linear.path)  # raises if the layer has no weight of its own
    yield from (matrix.rows() for matrix in readers(block, "", part))
