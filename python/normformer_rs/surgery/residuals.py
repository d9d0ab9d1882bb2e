"""`swap_residuals` gives the blocks of a model another residual scheme."""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import nn as nfnn
from ..config import ATTENTION, PARAMETRISATION, TransformerConfig
from ..errors import InputError
from ..nn.layers import Layer
from ..nn.norm_table import NormSpec
from ..nn.place import Place, configure, count_of_layers, in_short
from .block_residual import BlockResidual
from .blocks import (
    LISTS,
    TORCH_STACKS,
    TORCHS,
    Group,
    declaration_of,
    parent_of,
    parts_of,
    place_of,
    shape_of,
    structure_of,
)
from .converted import NAMES, StreamBlock, converted_class, original, residual_of
from .discover import Stacks, find_stacks, none_found, unwrapped
from .handover import mark_new, own_forward, rebind_forward, reclass
from .init import count_weights, initialise, sign_of_training, silence_biases, unreached
from .loops import LoopResidual
from .marker import mark, warn_of_adapters
from .optimizers import Exchange, Repoint
from .proof import (
    Look,
    Observed,
    OwnForm,
    in_both_modes,
    in_words,
    observe,
    prove,
    random_shifts,
)
from .refusals import refuse, refuse_mixed, refuse_roles
from .residual_stream import Identity, StreamNorm
from .second_route import copied, disagreement
from .spec import at, has
from .stack_residual import StackCalls, StackResidual, show
from .structure import named
from .undo import Edits, Row, Swaps, refuse_wrapped
from .whole import LEVEL

UNSAID = "(scheme, unless the model looks trained)"
"""The default of `init`: the scheme's initialisation, and an error if the model looks trained."""


def swap_residuals(
    model: nn.Module,
    to: Any,
    *,
    depth: int | tuple[int, int] | None = None,
    init: str | None = UNSAID,
    optimizer: torch.optim.Optimizer | None = None,
    example: Any = None,
    **options: Any,
) -> Swaps:
    """Gives a model's Transformer blocks another residual scheme, in place.

    Blocks are recognised by what they compute, whatever they are called: the modules of a list are blocks if each adds
    branches to its input. The model runs on `example` several times. The first run finds which additions carry the
    residual stream, which norms stand there, and which linear layers make up each branch. The next runs are with the
    scheme that the blocks have, which must change neither outputs nor gradients, in evaluation and training mode. The
    last runs are with the new scheme: they must give what the model from before the swap gives when the scheme's
    equations take the places of its additions and norms. torch.nn's layers need no run.

    A block keeps its identity, its own forward, linear layers, dropouts, hooks and norms; norms that the scheme does
    not have become identities, and new norms are of the block's kind. A sum of attention and feed-forward, as in GPT-J,
    is one branch. Factors of a branch, such as Granite's number and LayerScale's vectors, belong to the blocks' old
    scheme and are removed, but `layerscale` with init=None takes over such vectors. If a scheme has n tensors, they
    travel inside the hidden state, which is then n times as wide between the blocks.

    >>> from torch import nn
    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    >>> print(swap_residuals(model, "deepnorm"))
    swap_residuals to deepnorm: 2
    module    old                      new                                note
    layers.0  TransformerEncoderLayer  TransformerEncoderLayer, deepnorm  init deepnorm, 4 weights drawn
    layers.1  TransformerEncoderLayer  TransformerEncoderLayer, deepnorm  init deepnorm, 4 weights drawn

    By default the blocks' linear layers are re-initialised as the scheme says. A model that looks trained is refused
    unless `init` is given: `init=None` keeps its weights.

    A Hugging Face model's `config.normformer_rs` then names the scheme, and each swapped block's state has a key of the
    scheme's name, which the stock class reports as unexpected. Load such a file into a model that was swapped alike:

        model = BertForMaskedLM.from_pretrained(name)        # load the stock model,
        swap_residuals(model, "deepnorm", init=None)         # then swap,
        model.load_state_dict(state)                         # then load what a swapped model has saved

    Args:
        model: any tree of modules that holds known blocks.
        to: a name from `normformer_rs.tables()["residuals"]`; names by layer, such as `postnorm*3,prenorm`; or your own
            `Scheme`.
        depth: the number of layers for the scheme's constants: one number, or (encoder, decoder). None: the model's.
        init: the initialisation of the blocks' linear layers: "scheme" for the scheme's own, another name from
            `tables()["inits"]`, or None to keep the weights. If left out, it is "scheme", with an error if the model
            looks trained. Embeddings and everything else outside the blocks keep their values.
        optimizer: gets the scheme's parameters, each in the group of an old parameter, and loses the removed ones. The
            state of re-initialised parameters is dropped. An optimizer that is not passed warns at its next step.
        example: an input for the runs: keyword arguments in a dictionary, a tuple of arguments, one tensor, or a
            function of the model. None: one made from the configuration of a Hugging Face or timm model.
        options: the options of `TransformerConfig` that the scheme has (`branchnorm_steps`, …).

    Returns: the table of the changes, with a row for each list of blocks that stays; its `undo()` reverses them.

    Errors: InputError for unknown names and options; a model without lists of residual blocks (the message names the
    addition or module at fault); a model that does not run on the example; models whose parameters something else holds
    (DistributedDataParallel, FSDP, DTensors, DeepSpeed, accelerate's offloading); hooks on norms that the scheme does
    not call; a forward that was put into a block's instance; an optimizer that does not own the parameters; schemes
    that act inside attention or feed-forward, if the block does not expose that point; schemes that connect layers, if
    the model reads its hidden states between blocks; without `init`, a model that looks trained. UserWarning if biases
    that look trained are set to zero, and for blocks that stay as they are.
    """
    to = next(field for field in TransformerConfig.FIELDS if field.name == "residual").check(to)
    model = unwrapped(model)
    refuse_wrapped(model)
    _refuse_options(options)
    change = functools.partial(_swap, model, to, _depth(depth), init, optimizer, example, options)
    return Edits(model, f"swap_residuals to {to}", optimizer).all_or_none(change)


def _swap(
    model: nn.Module,
    to: Any,
    depth: int | tuple[int, int] | None,
    init: str | None,
    optimizer: torch.optim.Optimizer | None,
    example: Any,
    options: Mapping[str, Any],
    edits: Edits,
) -> Swaps:
    """Makes the swap of `swap_residuals`, whose arguments have been checked; records it in `edits`, which can undo it.
    Its steps: find the stacks, prove their structure, refuse unsuitable ones, convert the blocks, run the model,
    re-initialise, exchange the optimizer's parameters."""
    is_init_given = init != UNSAID
    init = init if is_init_given else "scheme"
    stacks = find_stacks(model, example)
    all_plans = _plans(stacks.groups, to, depth, init, options)
    plans = [(group, place) for group, place in all_plans if not _has(group, place)]
    can_run = stacks.run is not None and plans and not any(p.is_meta for p in model.parameters())
    # look(training, has_backward) runs the model and returns its outputs and gradients
    look = functools.partial(observe, model, stacks.run, [group for group, _ in plans])
    has_second_proof = all(_is_provable(group) for group, _ in plans)
    # The first proof, of the blocks' own scheme, leaves the gradients of large matrices to the second, if that one
    # compares gradients: it does not in 16 bits, nor if the backward pass runs modules once more.
    leaves_large = has_second_proof and not stacks.is_narrow
    # the model's results before the swap, by mode, with which the proof and `_try` compare later ones
    seen = in_both_modes(functools.partial(look, leaves_large=leaves_large)) if can_run else {}
    if leaves_large and any(run.recomputes for run in seen.values()):
        leaves_large, seen = False, in_both_modes(look)
    if seen and not any(run.outputs or run.error is not None for run in seen.values()):
        raise InputError(
            f"{type(model).__name__}'s call on example returned no floating-point tensor, and a swap is proven by what "
            "the model returns: let example= be a call, or a function of the model, that returns its outputs"
        )
    for group, place in plans:
        refuse_mixed(group, place, to)
    plans = _proven(model, stacks, plans, functools.partial(look, leaves_large=leaves_large), seen)
    for group, place in plans:
        refuse(group, place, to)
        refuse_roles(group, init)
    # a sign that the model was trained, in words; None: there is none
    trained = next((sign for group, _ in plans if (sign := sign_of_training(group, optimizer))), None)
    draws_by_default = not is_init_given and any(count_weights(block) for group, _ in plans for block in group.blocks)
    if trained is not None and draws_by_default:
        raise InputError(
            f"{edits.title} would draw first values for linear layers of {type(model).__name__} that look trained "
            f'({trained}): give init=None to keep their weights, or init="scheme" to draw them'
        )
    # a copy of the model for the proof by a second route; None: there is no such proof
    base = copied(model) if seen and has_second_proof else None
    # the model changes only from here on
    title, before = edits.title, dict(model.named_parameters())
    rows, existing = [], {*model.modules(), *before.values()}  # `existing`: modules and parameters before the swap
    # new norms get the options of the block's first norm, which is looked up here because the conversion may remove it
    first_norms = [_first_norm(group) for group, _ in plans]
    for (group, place), like in zip(plans, first_norms):
        old_kinds = [type(block).__name__ for block in group.blocks]
        convert = _convert_torchs if isinstance(group.blocks[0], tuple(TORCHS)) else _convert_foreign
        keeps_weights = init is None
        notes = convert(group, place, edits, keeps_weights)
        if like is not None:
            _take_over_options(group.holder, existing, like)
        like_weight = None if like is None else next(like.parameters(), None)
        mark_new(group.holder, existing, group.blocks[0], like_weight)
        for i, block in enumerate(group.blocks):
            drawn_note = f"init {place.declared.init}, {count_weights(block)} weights drawn"
            note = "weights kept" if init is None else drawn_note
            if init is not None and (unreached_names := _unreached(group, i)):
                more = ", …" if len(unreached_names) > 3 else ""
                note += f", not {', '.join(unreached_names[:3])}{more}"
            note += "" if place.declared.has_biases else ", biases held at zero"
            parts = [] if type(block) in TORCHS else parts_of(block)
            removed = [f"the branch's factor {part.beta:g}" for part in parts if part.beta != 1.0]
            removed += [path for part in parts for path in part.scales]
            note += f", {removed[0]} gone" if removed else ""
            second = None if type(block) in TORCHS else structure_of(block).second
            note += f", its second stream {second} stays as it is" if second is not None else ""
            # among neighbours with equal sublayers only the first one's are listed
            if parts and (i == 0 or parts != parts_of(group.blocks[i - 1])):
                note += f"; {'; '.join(map(str, parts))}"
            rows.append(Row(group.names[i] or "(model)", old_kinds[i], f"{type(block).__name__}, {to}", note))
        rows += notes
    gone = {module for module in existing if isinstance(module, nn.Module)} - {*model.modules()}
    _try(model, look, seen if plans else {}, to, gone, base, example)
    # re-initialise the linear layers, and give the optimizer the new parameters
    drawn: list[nn.Parameter] = []
    for group, place in plans if init is not None else ():
        drawn += initialise(group, place, edits)
        for layer in group.blocks:
            if isinstance(layer, Layer):  # a later `reset_parameters` then draws the scheme's initial values, too
                layer.keeps_torchs_values = False
    drawn += [p for group, place in plans if not place.declared.has_biases for p in silence_biases(group, edits)]
    _repoint(optimizer, [group for group, _ in plans], before, dict(model.named_parameters()), drawn)(edits)
    if plans:
        arguments = {"swap_residuals": _plain(to, plans[0][1]), "depth": depth, **options}
        mark(model, "residual", str(to), edits, arguments)  # the configuration then says how to repeat the swap
    edits.done()
    # add rows for the lists of blocks that stay as they are, and warn of them
    for path, why in stacks.unknown.items() if plans else ():
        stays = model.get_submodule(path)
        kind = type(next(stays.children()) if isinstance(stays, LISTS) else stays)
        rows.append(Row(path or "(model)", kind.__name__, "stays", why))
        warnings.warn(f"{title} leaves {path or 'a list'} as it is: {why}", stacklevel=LEVEL)
    for group, _ in plans:
        second = None if type(group.blocks[0]) in TORCHS else structure_of(group.blocks[0]).second
        if second is not None:
            warnings.warn(
                f"{title} leaves {second}, a second stream of the blocks in {group.path}, as it is", stacklevel=LEVEL
            )
    blocks = ((n, block) for group, _ in plans for n, block in zip(group.names, group.blocks))
    new_modules = ((f"{n}.residual", residual_of(block)) for n, block in blocks if residual_of(block) is not None)
    warn_of_adapters(model, title, new_modules)  # type: ignore[arg-type]
    if trained is not None and drawn and init is None:
        warnings.warn(
            f"{title} set {len(drawn)} biases of {type(model).__name__} to zero, and they look trained ({trained}): "
            "undo() brings them back",
            stacklevel=LEVEL,
        )
    return Swaps(title, rows, edits)


# The functions below make the plans of a swap, and check them.


def _plans(
    groups: list[Group], to: Any, depth: int | tuple[int, int] | None, init: str | None, options: Mapping[str, Any]
) -> list[tuple[Group, Place]]:
    """Returns each group of blocks with the place of its first block. A place holds the configuration with the scheme
    `to` and the model's depths, and whether the stack is an encoder or a decoder. Errors: InputError if `depth` does
    not fit the model."""
    decoders = [group for group in groups if group.has_memory]
    encoders = [group for group in groups if not group.has_memory]
    plans = []
    for group in groups:
        shape = shape_of(group.blocks[0])
        if decoders:  # some blocks attend to an encoder's output, so the other ones are encoders
            # encoders may differ in depth; decoders take that of the first
            encoder_group = group if not group.has_memory else (encoders or decoders)[0]
            if depth is None:
                encoder, decoder = encoder_group.depth, decoders[0].depth
            else:
                encoder, decoder = (depth, depth) if isinstance(depth, int) else depth
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
            configure(options, residual=to, **shape),
            # without any cross-attention, the model counts as decoder-only
            "encoder" if decoders and not group.has_memory else "decoder",
            kinds=_kinds(group),
        )
        if place.depth < len(group.blocks):
            raise InputError(
                f"depth must be at least {len(group.blocks)}, as many blocks as {group.path} has; got {depth}"
            )
        plans.append((group, place))
    return plans


def _depth(given: Any) -> int | tuple[int, int] | None:
    """Returns the caller's `depth` after checking it. Errors: InputError."""
    if not isinstance(given, tuple | list):
        return None if given is None else count_of_layers("depth", given)
    if len(given) != 2:
        raise InputError(f"depth must be one number, or (encoder, decoder); got {in_short(given)}")
    return count_of_layers("depth", given[0]), count_of_layers("depth", given[1])


def _refuse_options(options: Mapping[str, Any]) -> None:
    """Raises InputError for options of attention, positions and parametrisation, which a swap cannot change."""
    for name in options:
        if name in ("positions", *ATTENTION):
            raise InputError(
                f"{name} is a part of models that are built here, and swap_residuals leaves attention and linear "
                "layers as they are: leave it out"
            )
        if name in PARAMETRISATION:
            raise InputError(
                f"{name} is an option of models that are built here, and swap_residuals has no parametrisation: leave "
                "it out; normformer_rs.param_groups gives an optimizer the parametrisation's rates"
            )


_USUAL = (("self-attention", "feed-forward"), ("self-attention", "cross-attention", "feed-forward"))
"""The kinds of the sublayers in a Transformer's encoder layer and decoder layer."""


def _kinds(group: Group) -> tuple[str, ...] | None:
    """Returns the kinds of the sublayers in the group's blocks. None: they are a Transformer's usual ones. A sublayer
    that is attention in some blocks and something else in others counts as attention."""
    kinds_of_blocks = [[part.kind for part in parts_of(block)] for block in group.blocks]
    by_priority = ["cross-attention", "self-attention", "feed-forward"]
    kinds = tuple(min(kinds_at_place, key=by_priority.index) for kinds_at_place in zip(*kinds_of_blocks))
    return None if kinds in _USUAL else kinds


def _has(group: Group, place: Place) -> bool:
    """Returns whether the blocks already have exactly the scheme and options of `place`."""
    now = place_of(group.blocks[0])
    return now is not None and now.config == place.config


def _unreached(group: Group, i: int) -> list[str]:
    """Returns the names of block i's matrices that re-initialisation leaves as they are. If the blocks are views of a
    loop (`loops.py`), the first one gets the names of the whole loop, and the others get none."""
    if group.loop is None:
        return unreached(group.blocks[i])
    return [] if i else unreached(group.loop, group.blocks)


def _first_norm(group: Group) -> nn.Module | None:
    """Returns the first norm of the group's first block. None: the block has no norm."""
    paths = [part.norm for part in parts_of(group.blocks[0]) if part.norm is not None]
    return group.blocks[0].get_submodule(paths[0]) if paths else None


def _take_over_options(stack: nn.Module, existing: set[Any], like: nn.Module) -> None:
    """Replaces norms that the scheme has added, and that have the class of the norm `like`, by norms with the options
    of `like`. `existing`: the modules from before the swap, which stay."""

    def options_of(norm: Any) -> dict[str, Any]:
        return {name: getattr(norm, name) for name in norm.declared.options}

    if not isinstance(getattr(like, "declared", None), NormSpec):  # `like` is none of this package's norms
        return
    alike = [
        (parent, name, child)
        for parent in stack.modules()
        for name, child in parent._modules.items()
        if type(child) is type(like)
    ]
    for parent, name, norm in alike:
        # only norms that the scheme has added, and that differ from `like`, are replaced
        if norm in existing or norm is None or (options := options_of(like)) == options_of(norm):
            continue
        first = next(norm.parameters())  # for its device and dtype
        size = getattr(norm, "normalized_shape", None) or norm.num_features
        new: Any = type(norm)(size, **options, device=first.device, dtype=first.dtype)
        for leaf, parameter in norm._parameters.items():
            if parameter is None:  # the scheme's norm has no such parameter
                new.register_parameter(leaf, None)
        if hasattr(norm, "first_scale"):  # the scheme scales the initial values of the norm's gain
            new.first_scale = norm.first_scale
            new.reset_parameters()
        setattr(parent, name, new.train(norm.training))


def _plain(to: Any, place: Place) -> Any:
    """Returns the scheme in a form that JSON can hold: its name or its declaration."""
    return to.declare(place.config, place.kinds) if hasattr(to, "declare") else to


def _proven(
    model: nn.Module, stacks: Stacks, plans: list[tuple[Group, Place]], look: Look, seen: Mapping[bool, Observed]
) -> list[tuple[Group, Place]]:
    """Returns the plans whose blocks pass the proof: a swap to the scheme that they already have must not change the
    model's results. Groups that fail are added to `stacks.unknown`. `seen`: the model's results before the swap, for
    training mode (True) and evaluation mode (False)."""
    foreign = [group for group, _ in plans if _is_provable(group)]
    if not foreign or not seen:
        return plans
    # a wider hidden state also shows whether a stack's first layer gets all of the stack's input
    is_wide = any(StackResidual.carries_more(place) or place.declared.begin for _, place in plans)

    def swap(groups: list[Group], to: Any, edits: Edits) -> None:
        """Gives each group the scheme `to(group)`."""
        for group in groups:
            ((_, place),) = _plans([group], to(group), depth=None, init=None, options={})  # one group gives one plan
            _convert_foreign(group, place, edits, keeps=True)

    for path, fault in prove(model, foreign, swap, is_wide, look, seen).items():
        what = "between its blocks the model reads their hidden state: " if is_wide else ""
        stacks.unknown[path] = f"swapped into the scheme that they have, they compute something else: {what}{fault}"
    plans = [(group, place) for group, place in plans if group.path not in stacks.unknown]
    if not plans:
        raise none_found(model, stacks.unknown)
    return plans


def _try(
    model: nn.Module,
    look: Any,
    seen: Mapping[bool, Observed],
    to: Any,
    gone: set[nn.Module],
    base: nn.Module | None,
    example: Any,
) -> None:
    """Runs the swapped model in both modes, and `base` with the scheme's equations by the second route. In both, random
    numbers are added to the gains. Errors: InputError if the two differ, if the swapped model fails although the model
    ran before the swap, or if it calls one of the modules `gone`, which the swap has removed. Schemes that act inside
    sublayers fail if the layers there do not have the roles that were found.

    Args:
        look: runs the model, as `observe`.
        seen: the runs before the swap, by mode (True: training mode).
        base: a copy of the model from before the swap; None: the blocks are torch.nn's or of a registered class, for
            which there is no second route.
        example: the example of `swap_residuals`.
    """
    made = [module for module in model.modules() if isinstance(module, BlockResidual | StackResidual)]
    shifts = random_shifts(model, made)
    growing = [module.t for module in made if module.growth is not None]  # t counts the updates, from 1
    try:
        for t in growing:
            t.fill_(LATER)
        for training, old in seen.items():
            mode = f"{to}{' in training mode' * training}"
            new = _run_without(gone, functools.partial(look, training, old.has_backward, shifts), model, to)
            if new.error is not None and old.error is None:
                raise InputError(
                    f"{type(model).__name__} does not run with {mode} ({in_words(new.error)}): choose another scheme"
                ) from new.error
            if base is None:
                continue
            message = disagreement(model, base, example, new, training, shifts)
            if message is not None:
                raise InputError(
                    f"{type(model).__name__} swapped to {mode} does not compute the scheme's equations at the places "
                    f"where it adds its branches: {message}. Choose another scheme, and report the model's forward"
                )
    finally:
        for t in growing:
            t.fill_(1)


LATER = 7
"""The update number t in a proof's runs. At t = 1, branchnorm gives branches almost no weight, which would hide
faults."""


def _run_without(gone: set[nn.Module], run: Callable[[], Observed], model: nn.Module, to: Any) -> Observed:
    """Returns `run()`, a run of the swapped model. Errors: InputError if it calls one of the modules `gone`."""
    called: list[nn.Module] = []

    def note(module: nn.Module, _: Any) -> None:
        if module in gone:  # the identity in a norm's place shares the norm's hooks, and its calls do not count
            called.append(module)

    hooks = [module.register_forward_pre_hook(note) for module in gone]
    try:
        observed = run()
    finally:
        for hook in hooks:
            hook.remove()
    if called:
        raise InputError(
            f"{type(model).__name__} still calls {named(called[0])} that {to} removes: it holds it in a plain "
            "list, a function or another place that is no attribute of a module. Make it an attribute"
        )
    return observed


def _is_provable(group: Group) -> bool:
    """Returns whether a run has shown the blocks' structure, and they have no scheme of this package yet. That of
    torch.nn's layers and registered classes is known without a run."""
    is_known = isinstance(group.blocks[0], tuple(TORCHS)) or declaration_of(type(group.blocks[0])) is not None
    return not is_known and structure_of(group.blocks[0]).is_found and place_of(group.blocks[0]) is None


# The functions below convert blocks to the scheme.


_OURS = {
    nn.TransformerEncoderLayer: nfnn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer: nfnn.TransformerDecoderLayer,
}
"""The class of this package for each of torch.nn's layers."""


def _convert_torchs(group: Group, place: Place, edits: Edits, _: bool) -> list[Row]:
    """Turns torch.nn's layers, and their stack if there is one, into this package's. Their children keep their names.
    Returns rows of the table about norms before the first layer and after the last: the last norm was added or removed,
    or the caller must add one. The fourth argument is unused; it exists because `_convert_foreign` has it."""
    notes, holder = [], group.holder
    in_stack = type(holder) in TORCH_STACKS
    for i, layer in enumerate(group.blocks):
        for module in layer.modules():  # all modules, since the linear layers are re-initialised later
            edits.remember(module)
        # accelerate may leave a copy of the class's forward in an instance; as `adopt` changes the class of attentions,
        # their copies are renewed after it. Forwards of a user's own stay, and only now can the two be told apart.
        with_stock_forward = [module for module in layer.children() if own_forward(module) is None]
        reclass(layer, _OURS[type(layer)])
        layer.adopt(Place(place.config, place.stack, i), in_stack)  # type: ignore[operator]
        for module in with_stock_forward:
            rebind_forward(module)
    if in_stack:
        edits.remember(holder)
        norm = holder.norm
        reclass(holder, TORCH_STACKS[type(holder)])
        holder.adopt(place)  # type: ignore[operator]
        path = f"{group.path.removesuffix('layers')}norm"
        if (norm is None) != (holder.norm is None):
            old, new = ("none" if n is None else type(n).__name__ for n in (norm, holder.norm))
            notes.append(Row(path, old, new, f"last norm {'added' if norm is None else 'removed'}"))
    for where, changes in (("before the first", place.declared.begin), ("after the last", place.declared.end)):
        if changes and not in_stack:
            note = f"{place.config.residual} needs a norm {where} layer: add it yourself"
            notes.append(Row(group.path, "", "", note))
    return notes


def _convert_foreign(group: Group, place: Place, edits: Edits, keeps: bool) -> list[Row]:
    """Turns blocks into subclasses that run on a residual stream or call the scheme's steps. Each block gets an
    attribute `residual` with its modules of the scheme, and the module that has the list gets `stack_residual`.
    `keeps`: the blocks keep their weights, so LayerScale vectors are copied into the scheme's β. Returns rows of the
    table about the last norm."""
    notes: list[Row] = []
    holder = None if isinstance(group.holder, LISTS) else group.holder
    has_end = any(change.kind == "norm" for change in place.declared.end)
    # a swap to prenorm adds no last norm to a model whose blocks are pre-norm already and have none after them
    stays_without_end = place.config.residual == "prenorm" and group.end is None and _is_prenorm(group)
    omits_end = has_end and (group.end is not None or stays_without_end)
    stack = StackResidual(place, group.blocks, has_end_norm=omits_end)
    structures = [structure_of(block) for block in group.blocks]
    places = map(place.at, range(place.depth))
    residuals = [
        BlockResidual(block, block_place, structure, stack)
        for block, block_place, structure in zip(group.blocks, places, structures)
    ]
    for block, residual in zip(group.blocks, residuals):
        stack.keeps(residual.kept_widths())
        if keeps:
            residual.take_scales()
        if group.loop is None:
            _convert_block(block, residual, declaration_of(type(block)), edits)
    if group.loop is not None:
        _convert_loop(group, residuals, stack, has_end, edits)
    elif holder is not None:
        edits.remember(holder)
        setattr(holder, _name(holder, group), stack)
        calls = StackCalls(stack, early=0 if group.end is None else group.end.early)
        edits.afterwards(holder.register_forward_pre_hook(calls.begin, prepend=True).remove)
        edits.afterwards(holder.register_forward_hook(calls.end, always_call=True).remove)
        if stack.is_wide:
            path = parent_of(group.path)
            # the module that has the list, and all modules around it: their outputs may have the wide hidden state
            around = [path.rsplit(".", i)[0] for i in range(path.count(".") + 1)] if path else []
            for outer in (*around, ""):
                edits.afterwards(edits.model.get_submodule(outer).register_forward_hook(show).remove)
    else:  # a bare list cannot hold the stack's parameters, so the first block does
        residual_of(group.blocks[0]).add_module("stack", stack)
    if group.end is not None and not has_end:
        path = f"{group.end.path}.{group.end.name}".lstrip(".")
        notes.append(Row(path, type(group.end.norm).__name__, "Identity", "last norm removed"))
        norm, identity = group.end.norm, nn.Identity()
        edits.succeed(norm, identity)
        for module in [*edits.model.modules()]:  # each module that has the norm as a child is about to change
            if any(child is norm for child in module.children()):
                edits.remember(module)
        _put_everywhere(edits.model, norm, identity)
    if group.loop is not None:  # after the exchange of a last norm, which may end the stream
        for handle in residual_of(group.loop).hook_span():
            edits.afterwards(handle.remove)
    if group.end is not None and holder is not None and group.loop is None:  # only then was `calls` set above
        edits.afterwards(group.end.norm.register_forward_pre_hook(calls.before_norm).remove)
    return notes


def _is_prenorm(group: Group) -> bool:
    """Returns whether a run found that the blocks compute x + F(N(x)) and nothing else."""
    structures = [structure_of(block) for block in group.blocks]
    return all(
        structure.is_found
        and part.norms() == [part.before, *part.twins]  # no norm stands after a sublayer or on a branch
        and (part.alpha, part.beta, part.scales) == (1, 1, ())  # no factors on x or F(N(x))
        for structure in structures
        for part in structure.parts
    )


def _name(holder: nn.Module, group: Group) -> str:
    """Returns the name of the attribute that will hold a stack's `StackResidual`. If a module has a second stack, its
    name begins with that of the list."""
    return (
        "stack_residual" if not hasattr(holder, "stack_residual") else f"{group.path.rpartition('.')[2]}_stack_residual"
    )


def _convert_block(block: Any, residual: BlockResidual, own: Any, edits: Edits) -> None:
    """Turns a block into a subclass that computes the scheme, with the attribute `residual`. `own`: the subclass that
    `register_block` has for the block, or None."""
    # children of a registered block that make some of its additions: path → converted class
    sites = own.sites(block) if hasattr(own, "sites") else {}
    for path in {"", *sites}:
        edits.remember(block.get_submodule(path))
    reclass(block, own or converted_class(original(type(block)), StreamBlock))
    for path, kind in sites.items():
        site = block.get_submodule(path)
        reclass(site, kind)
        site.__dict__["block_of"] = (block,)  # a tuple, so that torch does not register the block as a child
    _exchange_parts(block, residual, own, edits)
    setattr(block, _free_name(block), residual)
    for handle in residual.follow_calls():
        edits.afterwards(handle.remove)


def _free_name(module: nn.Module) -> str:
    """Returns the name under which a module gets its residual: the second one if it has an attribute of the first."""
    first, second = NAMES
    return second if hasattr(module, first) else first


def _convert_loop(
    group: Group, residuals: Sequence[BlockResidual], stack: StackResidual, has_end: bool, edits: Edits
) -> None:
    """Turns a module whose forward loops over the layers (`group.loop`) into a subclass whose forward runs on a
    residual stream. `residuals`: one for each layer; `has_end`: the scheme ends with a norm."""
    loop: Any = group.loop
    edits.remember(loop)
    for view, residual in zip(group.blocks, residuals):
        # written past nn.Module's __setattr__, so that it is no child of the module that the view shares children with
        view.__dict__["residual"] = residual
        _exchange_parts(loop, residual, own=None, edits=edits)
    end = ""
    if has_end and group.end is not None:
        norm = group.end.norm
        edits.remember(norm)
        reclass(norm, converted_class(original(type(norm)), StreamNorm))
        end = next(path for path, module in loop.named_modules() if module is norm)
    reclass(loop, converted_class(original(type(loop)), StreamBlock))
    setattr(loop, _free_name(loop), LoopResidual(loop, residuals, stack, end, group.span))


def _exchange_parts(block: nn.Module, residual: BlockResidual, own: Any, edits: Edits) -> None:
    """Exchanges a block's norms, dropouts and factors for the scheme's parts: norms stay, move to the residual or
    become identities; dropouts move to the residual; factors are removed. `own`: the subclass that `register_block` has
    for the block, or None."""
    parts = residual.parts
    norms = [path for part in parts for path in part.norms()]
    dropouts = [part.dropout for part in parts if part.dropout is not None and _is_module(block, part.dropout)]
    drop_paths = [part.drop_path for part in parts if part.drop_path is not None]
    # the form that the blocks already have (OwnForm) keeps their factors
    scales = [path for part in parts for path in part.scales if not isinstance(residual.place.config.residual, OwnForm)]
    moved = {block.get_submodule(path) for path in (*norms, *dropouts, *drop_paths)}
    names = [name for name, module in block.named_modules(remove_duplicate=False) if module in moved]
    for parent in {parent_of(path) for path in (*names, *scales)}:
        edits.remember(block.get_submodule(parent))
    for name, path in residual.moved.items():  # norms of branches: name in the scheme → path in the block
        residual.add_module(name, block.get_submodule(path))
    for path in dict.fromkeys(norms):
        norm = block.get_submodule(path)
        if not residual.uses(path):  # the scheme has no norm there
            _put_everywhere(block, norm, _identity_for(norm))
        elif own is None:
            edits.remember(norm)
            reclass(norm, converted_class(original(type(norm)), StreamNorm))
    for path in scales:
        _put(block, path, nn.Identity())
    # sublayer i's dropout moves to the residual as dropout{i + 1}; stochastic depth, if any, runs after it
    for i, part in enumerate(parts):
        drop = part.dropout
        if drop is not None and _is_module(block, drop) and (own is None or part.moves is not None):
            residual.add_module(f"dropout{i + 1}", block.get_submodule(drop))
        if part.drop_path is not None:
            dropouts_in_order = [residual._modules.get(f"dropout{i + 1}"), block.get_submodule(part.drop_path)]
            joined = nn.Sequential(*(module for module in dropouts_in_order if module is not None))
            residual.add_module(f"dropout{i + 1}", joined)
    moves = [part.moves for part in parts if part.moves is not None]
    # a registered block keeps its own dropouts in place, except those that move
    for path in [*dropouts, *drop_paths] if own is None else moves:
        if not isinstance(dropout := block.get_submodule(path), nn.Identity):
            _put_everywhere(block, dropout, nn.Identity())
    for point in residual.reach_inside():
        edits.afterwards(point.remove)


def _put_everywhere(block: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Puts `new` into the place of `old` under all names that `old` has in the block."""
    for path in [name for name, module in block.named_modules(remove_duplicate=False) if module is old]:
        _put(block, path, new)


def _identity_for(norm: nn.Module) -> Identity:
    """Returns an identity to replace a norm. It has an empty weight, since some blocks read the dtype of their norm's
    weight."""
    identity, like = Identity(), next(norm.parameters(), None)
    if like is not None:
        identity.register_buffer("weight", like.new_empty(0).detach(), persistent=False)
    return identity


def _is_module(block: nn.Module, path: str) -> bool:
    """Returns whether there is a module at a path of the block. A dropout may also be a rate, a plain number."""
    return has(block, path) and isinstance(at(block, path), nn.Module)


def _put(block: nn.Module, path: str, module: nn.Module) -> None:
    """Puts a module into the place of another one, in the same training mode."""
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
    """Returns the exchange that removes old parameters from the optimizer, and adds each new one to the group of an old
    one. A vector joins the group of a vector, since groups of norms, gains and biases often have no weight
    decay. Among the candidates, the nearest by path is chosen. `before`, `after`: the model's parameters by name before
    and after the swap; `drawn`: those that were re-initialised."""
    known, kept = {*before.values()}, {*after.values()}
    # old parameter → the (name, parameter) pairs in its place: itself, if it stays, and the new ones that join it
    exchange: Exchange = {p: [] for p in known - kept}
    names = {p: name for name, p in before.items()}
    for name, p in after.items():
        if p in known:
            continue
        candidates = [q for q in known if q.requires_grad] or [*known]
        # the nearest old parameter is a vector if the new one is, and shares the longest beginning of its path; among
        # equally near ones the name decides
        anchor = max(candidates, key=lambda q: ((q.dim() > 1) == (p.dim() > 1), _common(names[q], name), names[q]))
        exchange.setdefault(anchor, [(names[anchor], anchor)] if anchor in kept else []).append((name, p))
    return Repoint(optimizer, exchange, names, drawn)


def _common(path: str, other_path: str) -> int:
    """Returns how many names two paths have in common at their beginning."""
    names, others = path.split("."), other_path.split(".")
    return next((i for i, (x, y) in enumerate(zip(names, others)) if x != y), min(len(names), len(others)))
