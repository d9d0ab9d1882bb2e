"""Parameter groups for an optimizer, with weight decay and the multipliers of a parametrisation.

>>> import normformer_rs as nfrs
>>> shape = {"d_model": 64, "d_ff": 128, "heads": 4, "encoder_layers": 4, "decoder_layers": 4}
>>> scaled = {"parametrisation": "completep", "base_width": 32, "base_depth": 2}
>>> model = nfrs.Transformer(nfrs.TransformerConfig(vocab_size=20, **shape, **scaled), seed=1)
>>> for group in nfrs.param_groups(model, 1e-2, weight_decay=0.1):
...     print(group["role"], len(group["params"]), group["lr"], group["weight_decay"], group["eps"])
embedding 1 0.01 0.1 5e-09
hidden-matrix 40 0.005 0.2 2.5e-09
hidden-vector 80 0.01 0.0 2.5e-09
end 4 0.01 0.0 5e-09
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from .. import _core
from ..config import tables, unknown
from ..errors import InputError
from ..nn.layer import Layer
from ..nn.training import MATRICES, learned_gains, summed_over, vector_ids
from .model import Transformer

ROLES = ("embedding", "hidden-matrix", "hidden-vector", "end")
UNIT_SCALED = "u-mup"
_WIDTHS = ("d_model", "hidden_size", "n_embd", "embed_dim", "dim")
"""Names under which other libraries' configurations hold the width of the residual stream."""


def param_groups(
    model: nn.Module,
    lr: float,
    *,
    parametrisation: str | None = None,
    base_width: int | None = None,
    base_depth: int | None = None,
    depth_alpha: float | None = None,
    weight_decay: float = 0.0,
    eps: float = 1e-8,
    width: int | None = None,
    depth: int | None = None,
    optimizer: str = "adam",
    muon_scale: str | None = None,
) -> list[dict[str, Any]]:
    """Returns groups for Adam or AdamW, or for these and Muon, each with its lr, weight_decay and eps: the values tuned
    on the base model, times the parametrisation's multipliers for the role of the group's parameters.

    With m_d = width/base_width, m_L = depth/base_depth and the exponent α (completep 1, depth-mup 1/2):

        role           lr                       weight decay               ε
        embedding      lr                       weight_decay               ε/m_d
        hidden-matrix  lr·(1/m_d)·m_L^(α−1)     weight_decay·m_d           (ε/m_d)·m_L^(−α)
        hidden-vector  lr·m_L^(α−1)             0                          (ε/m_d)·m_L^(−α)
        end            lr                       0                          ε/m_d

    A norm's or a scheme's parameter whose products are summed over the width (attnres' queries, mhc's matrices) has
    lr/m_d, or lr/√m_d if the sum is divided by the width's root; one whose products are summed over the layers (dlcl,
    denseformer) has lr/m_L. None of them decays.

    mup has these without m_L, and leaves weight_decay unchanged; standard has no multipliers, and vectors do not decay.

    u-mup has no base model: the same lr is used for models of every size. In stacks of L layers matrices have
    lr/√(L·fan_in), vectors lr/√L; embeddings have lr/√d, the output and the last norm lr. weight_decay is divided by
    the group's lr, so that torch's product of the two is weight_decay at the highest rate; ε is divided by the ratio of
    the authors' scaled gradient to the true one in a batch of one token (docs/spec.md §3.7).

    A normformer_rs.Transformer has its own parametrisation and sizes, and so do the layers of `normformer_rs.nn`. In
    any other model a block is a module in a ModuleList or Sequential whose modules are all of one class and have
    matrices. Its matrices are hidden-matrix, its vectors, norms and gains hidden-vector; a parameter with a single row
    is a vector, unless it belongs to a linear layer or an embedding table. Tables (nn.Embedding) are embedding, and so
    are matrices outside blocks that map to or from the width (an output head, tied or not, position tables, a patch
    projection); a width × width matrix outside blocks is a hidden-matrix with m_L = 1. Everything else is end.

    **Only half of a parametrisation.** If the model is not this package's, its author must also multiply initialisation
    and forward pass: std of hidden matrices × 1/√m_d, branches × m_L^(−α), logits × 1/m_d, attention scores 1/d_head.
    Without these the optimal rate does not carry over to other sizes.

    **Muon.** With `optimizer="muon"` each group also has the keys `optimizer` and `names`, the names of its parameters.
    Muon trains the matrices of blocks; Adam trains tables, the output, vectors and stacked experts. Muon's groups have
    no ε, because `torch.optim.Muon` uses that name for another number. Under a parametrisation the rate of Muon's
    matrices depends on `muon_scale`. With "spectral" (adjust_lr_fn="original") a step has the same spectral norm at all
    widths, and the rate is lr·m_L^(α−1). With "rms" (adjust_lr_fn="match_rms_adamw") that norm grows with √m_d, and the
    rate is lr·m_d^(−½)·m_L^(α−1). completep divides the decay by the factor that the rate gets for the width, so that
    lr·weight_decay does not depend on the width.

    >>> from torch import nn, optim
    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    >>> groups = param_groups(encoder, 1e-3, weight_decay=0.1, optimizer="muon")
    >>> [(group["optimizer"], len(group["params"])) for group in groups]
    [('muon', 8), ('adam', 16)]
    >>> muon = optim.Muon([g for g in groups if g["optimizer"] == "muon"], adjust_lr_fn="match_rms_adamw")
    >>> adam = optim.AdamW([g for g in groups if g["optimizer"] == "adam"])

    Args:
        lr, weight_decay, eps: the values tuned on the base model.
        parametrisation: a name from `normformer_rs.tables()["parametrisations"]`; None for the model's own, or else
            standard.
        base_width, base_depth: the base model's sizes; None for the model's own.
        depth_alpha: α, from 0.5 to 1; None for the model's own, or the parametrisation's.
        width: the residual stream's width; None to find it in the model's config or embeddings.
        depth: the layers of every stack; None for each stack's own number.
        optimizer: "adam", or "muon".
        muon_scale: "spectral" or "rms", the scale of Muon's steps; needed with a parametrisation.

    Returns dictionaries of params, role, lr, weight_decay and eps, one for each role and depth that occurs; parameters
    that need no gradient are left out. Schedulers multiply each group's lr.

    Errors: InputError if a size is missing or blocks cannot be found, for options that would do nothing, and for
    numbers out of range. Sources: Yang et al. 2022; Dey et al. 2025, Table 1, eq 40; for Muon, Yang, Simon & Bernstein
    2023, Condition 1 (docs/spec.md §3.7).
    """
    if optimizer not in ("adam", "muon"):
        raise InputError(unknown("optimizer", optimizer, ("adam", "muon")))
    own = _own_options(model)
    name = _agreed("parametrisation", parametrisation, own.get("parametrisation"), "standard")
    if name == UNIT_SCALED:
        if optimizer != "adam":
            raise InputError(f'parametrisation "{name}" has rates for Adam alone: leave optimizer out')
        given: dict[str, Any] = {"width": width, "depth": depth, "base_width": base_width, "base_depth": base_depth}
        given |= {"depth_alpha": depth_alpha, "muon_scale": muon_scale}
        return _unit_groups(model, lr, weight_decay, eps, given)
    step_size = _step_size(optimizer, muon_scale, name)
    base_width = _agreed("base_width", base_width, own.get("base_width"))
    base_depth = _agreed("base_depth", base_depth, own.get("base_depth"))
    alpha = _agreed("depth_alpha", depth_alpha, own.get("depth_alpha"))
    _check(name, base_width, base_depth, alpha, lr=lr, weight_decay=weight_decay, eps=eps)
    # With standard and Adam all multipliers are 1, so blocks need not be found.
    needs_blocks = name != "standard" or optimizer == "muon"
    places = [*_places(model, needs_blocks, width)]
    # m_d and m_L are the model's width and depth, each as a multiple of the base model's.
    m_d = 1.0 if base_width is None else _width(model, width) / base_width
    names = {id(p): path for path, p in model.named_parameters()}
    groups: dict[tuple[int, str, float, bool], dict[str, Any]] = {}
    for place in places:
        layers = place.layers if depth is None else depth
        sums_over = place.sums_over if name != "standard" else "nothing"
        is_scaled_by_depth = place.role.startswith("hidden") or sums_over == "depth"
        m_L = layers / base_depth if base_depth is not None and place.layers > 0 and is_scaled_by_depth else 1.0
        is_block_matrix = place.role == "hidden-matrix" and place.layers > 0 and place.parameter.dim() == 2
        uses_adam = optimizer == "adam" or not is_block_matrix
        # The multipliers depend on these four values, so parameters that agree in them share a group. The index of the
        # role comes first, because groups are returned in the order of ROLES.
        key = ROLES.index(place.role), sums_over, m_L, uses_adam
        if key not in groups:
            # In this measure the optimizer's steps have the same size at all widths: for Adam, the size of entries.
            constant_measure = "entries" if uses_adam else step_size
            factors = _core.multipliers(name, place.role, m_d, m_L, alpha, sums_over, constant_measure)
            decay = weight_decay if place.role in MATRICES else 0.0
            groups[key] = {
                "params": [],
                "role": place.role,
                "lr": lr * factors["lr"],
                "weight_decay": decay * factors["weight_decay"],
                "eps": eps * factors["eps"],
            }
            if optimizer == "muon":
                groups[key] |= {"optimizer": "adam" if uses_adam else "muon", "names": []}
            if not uses_adam:
                del groups[key]["eps"]
        groups[key]["params"].append(place.parameter)
        if optimizer == "muon":
            groups[key]["names"].append(names[id(place.parameter)])
    return [groups[key] for key in sorted(groups)]


def _step_size(optimizer: str, muon_scale: str | None, parametrisation: str) -> str:
    """Returns the name, in Rust, of the measure in which Muon's steps have the same size at all widths. Errors:
    InputError if `muon_scale` is unknown, missing, or would do nothing."""
    sizes = {"spectral": "spectral-norm", "rms": "orthogonal"}
    if muon_scale is not None and muon_scale not in sizes:
        raise InputError(unknown("muon_scale", muon_scale, [*sizes]))
    if muon_scale is not None and optimizer != "muon":
        raise InputError(f'muon_scale would do nothing with optimizer = "{optimizer}": leave it out')
    if optimizer == "muon" and parametrisation != "standard" and muon_scale is None:
        raise InputError(
            f"with parametrisation \"{parametrisation}\" the rate of Muon's matrices depends on its steps' scale: give "
            'muon_scale, "rms" for adjust_lr_fn="match_rms_adamw" of torch.optim.Muon, "spectral" for "original"'
        )
    return sizes[muon_scale or "rms"]


def _unit_groups(
    model: nn.Module, lr: float, weight_decay: float, eps: float, others: dict[str, Any]
) -> list[dict[str, Any]]:
    """Returns the groups of u-mup, one for each set of multipliers.

    Errors: InputError for another package's model, whose forward pass is not u-mup's, and if one of the `others`, which
    are options by name that would do nothing, is not None.
    """
    if not isinstance(model, Transformer):
        raise InputError(
            f'parametrisation "{UNIT_SCALED}" is for normformer_rs.Transformer, got {type(model).__name__}: build that '
            "model, or take the optimizers of the package unit-scaling"
        )
    if given := [option for option, value in others.items() if value is not None]:
        raise InputError(f'{given[0]} would do nothing, as parametrisation is "{UNIT_SCALED}": leave it out')
    _check(UNIT_SCALED, base_width=None, base_depth=None, alpha=None, lr=lr, weight_decay=weight_decay, eps=eps)
    parts, multipliers = model._parts(), model._unit_multipliers()
    groups: dict[tuple[int, float, float], dict[str, Any]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            role, _ = parts[name]
            lr_factor, decay_factor, eps_factor = multipliers[name]
            # The decay is divided by lr, because torch multiplies it by the group's lr.
            decay = weight_decay / lr if role in MATRICES and lr else 0.0
            values = {"lr": lr * lr_factor, "weight_decay": decay * decay_factor, "eps": eps * eps_factor}
            key = ROLES.index(role), lr_factor, eps_factor
            group = groups.setdefault(key, {"params": [], "role": role, **values})
            group["params"].append(p)
    return [groups[key] for key in sorted(groups)]


class _Placed(NamedTuple):
    """A parameter, its role, the number of layers of its stack (0 outside stacks), and what its products are summed
    over ("nothing", "depth", …)."""

    parameter: nn.Parameter
    role: str
    layers: int
    sums_over: str = "nothing"


def _own_options(model: nn.Module) -> dict[str, Any]:
    """Returns the options of the parametrisation with which this package built the model or its layers; empty if the
    model is not this package's."""
    config = model.config if isinstance(model, Transformer) else None
    if config is None:
        layers = [module for module in model.modules() if isinstance(module, Layer)]
        config = layers[0].place.config if layers else None
    names = ("parametrisation", "base_width", "base_depth", "depth_alpha")
    return {} if config is None else {name: getattr(config, name) for name in names}


def _agreed(name: str, given: Any, own: Any, otherwise: Any = None) -> Any:
    """Returns the first of `given`, the model's `own` value and `otherwise` that is not None. Raises InputError if
    `given` and `own` differ."""
    if given is not None and own is not None and given != own:
        raise InputError(
            f"{name} = {given} was given, and the model was built with {own}: leave it out, or build another"
        )
    chosen = own if given is None else given
    return otherwise if chosen is None else chosen


def _check(name: str, base_width: int | None, base_depth: int | None, alpha: float | None, **numbers: float) -> None:
    """Raises InputError if the parametrisation `name` does not exist, or if an option is missing, would do nothing or
    is out of range. `numbers` are options by name that must be finite and not negative."""
    entries = {entry["name"]: entry for entry in tables()["parametrisations"]}
    if name not in entries:
        raise InputError(unknown("parametrisation", name, [*entries]))
    for option, value in (("base_width", base_width), ("base_depth", base_depth)):
        is_needed = option in entries[name]["needs"]
        if is_needed and value is None:
            raise InputError(f'parametrisation "{name}" needs {option}: that of the model for which lr was tuned')
        if not is_needed and value is not None:
            raise InputError(f'{option} = {value} would do nothing, as parametrisation is "{name}": leave it out')
        if value is not None and value < 1:
            raise InputError(f"{option} must be at least 1; got {value}")
    if alpha is not None and entries[name]["alpha"] is None:
        raise InputError(f'depth_alpha = {alpha} would do nothing, as parametrisation is "{name}": leave it out')
    if alpha is not None and not 0.5 <= alpha <= 1:
        raise InputError(f"depth_alpha must lie in [0.5, 1]; got {alpha}")
    for option, number in numbers.items():
        if not 0 <= number < float("inf"):
            raise InputError(f"{option} must be at least 0; got {number}")


def _places(model: nn.Module, needs_blocks: bool, width: int | None) -> Iterator[_Placed]:
    """Yields every trained parameter once, with its role. Without `needs_blocks` a model without repeated blocks is
    accepted. `width`: the residual stream's width; None to find it."""
    if isinstance(model, Transformer):
        depths = {"encoder": model.config.encoder_layers, "decoder": model.config.decoder_layers}
        parts = model._parts()
        for name, p in model.named_parameters():
            if p.requires_grad:
                role, sums_over = parts[name]
                yield _Placed(p, role, depths.get(name.partition(".")[0], 0), sums_over)
        return
    blocks = dict(_blocks(model))
    if needs_blocks and not blocks:
        raise InputError(_no_blocks(model))
    sums = summed_over(model)  # what a parameter's products are summed over, by the parameter's id
    vectors = {id(p) for p in learned_gains(model).values()} | vector_ids(model) | set(sums)
    seen = set()  # so that a parameter that several modules share is yielded once
    for path, module in model.named_modules():
        # The number of blocks in the stack of the block that contains the module; 0 outside blocks. With a dot at the
        # end, layers.1 is no prefix of layers.10.
        layers = next((n for block, n in blocks.items() if f"{path}.".startswith(f"{block}.")), 0)
        for _, p in module.named_parameters(recurse=False):
            if p.requires_grad and id(p) not in seen:
                seen.add(id(p))
                is_vector, is_in_block = id(p) in vectors, layers > 0
                role = _role(model, module, p, is_vector, is_in_block, width)
                sums_over = sums.get(id(p), "nothing")
                yield _Placed(p, role, _layers_of(blocks, path) if sums_over == "depth" else layers, sums_over)


def _layers_of(blocks: dict[str, int], path: str) -> int:
    """Returns the number of layers of the stack that contains the module. In swapped models a module of this package
    may be outside the stack: then the stack is one below the module's nearest parent that contains a stack. `blocks`:
    the number of layers in the stack of each block, by the block's path."""
    depth = next((layers for block, layers in blocks.items() if f"{path}.".startswith(f"{block}.")), 0)
    while not depth and path:
        path = path.rpartition(".")[0]
        prefix = f"{path}." if path else ""
        depth = next((layers for block, layers in blocks.items() if block.startswith(prefix)), 0)
    return depth


def _role(
    model: nn.Module, module: nn.Module, p: nn.Parameter, is_vector: bool, is_in_block: bool, width: int | None
) -> str:
    """Returns the role of a parameter of `module`, as the documentation of `param_groups` defines the roles. `width`:
    the residual stream's width; None to find it."""
    if isinstance(module, nn.Embedding) and not is_vector:
        return "embedding"
    if is_in_block:
        return "hidden-vector" if is_vector else "hidden-matrix"
    if is_vector:
        return "end"
    # Outside blocks only a width × width matrix is hidden; others map to or from the width.
    is_square = p.dim() == 2 and p.shape[0] == p.shape[1]
    return "hidden-matrix" if is_square and p.shape[0] == _find_width(model, width) else "embedding"


def _blocks(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yields the path of every block and the number of blocks in its stack. A list inside a block, such as a list of
    experts, is no stack."""
    outer: list[str] = []  # the paths of the blocks found so far; a block comes before the lists inside it
    for path, module in model.named_modules():
        children = [*module.named_children()]
        is_list = isinstance(module, nn.ModuleList | nn.Sequential) and len({type(child) for _, child in children}) == 1
        if not is_list or any(f"{path}.".startswith(f"{block}.") for block in outer):
            continue
        if all(_has_matrices(child) for _, child in children):
            for name, _ in children:
                outer.append(f"{path}.{name}".lstrip("."))
                yield outer[-1], len(children)


def last_stack(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks of the model's last list of blocks. Errors: InputError if it has none."""
    paths = [path for path, _ in _blocks(model)]
    if not paths:
        raise InputError(_no_blocks(model))
    stack = paths[-1].rpartition(".")[0]
    return [model.get_submodule(path) for path in paths if path.rpartition(".")[0] == stack]


def _no_blocks(model: nn.Module) -> str:
    """Returns the error's text for a model without repeated blocks."""
    return (
        f"found no repeated blocks in {type(model).__name__}: expected a ModuleList or Sequential of modules of "
        "one class that hold matrices; give the module that has it"
    )


def _has_matrices(module: nn.Module) -> bool:
    """Returns True if at least two matrices belong to submodules of the module. A linear layer has only its own matrix,
    so a list of linear layers is no stack."""
    return sum(p.dim() > 1 and "." in name for name, p in module.named_parameters()) > 1


def _width(model: nn.Module, given: int | None) -> int:
    """Returns the width as `_find_width` does. Errors: InputError if it is not found."""
    width = _find_width(model, given)
    if width is None:
        raise InputError(
            f"cannot tell the width of {type(model).__name__}: its config has none of {', '.join(_WIDTHS)}, and its "
            "embeddings do not agree on one; give width="
        )
    return width


def _find_width(model: nn.Module, given: int | None) -> int | None:
    """Returns the residual stream's width: the given one, or else that of this package's layers, of the model's
    config, of torch's Transformer layers or of the embeddings. Returns None if none is found, or if several differ."""
    if given is not None:
        return given
    own_widths = [module.place.config.d_model for module in model.modules() if isinstance(module, Layer)]
    if own_widths:
        return own_widths[0]
    config = getattr(model, "config", None)
    config_values = (getattr(config, name, None) for name in _WIDTHS)
    config_width = next((value for value in config_values if isinstance(value, int)), None)
    if config_width is not None:
        return config_width
    torch_layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    layer_widths = [module.self_attn.embed_dim for module in model.modules() if isinstance(module, torch_layers)]
    embedding_widths = [module.embedding_dim for module in model.modules() if isinstance(module, nn.Embedding)]
    widths = {*(layer_widths or embedding_widths)}
    return next(iter(widths)) if len(widths) == 1 else None
