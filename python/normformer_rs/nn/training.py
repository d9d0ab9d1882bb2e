"""Helpers for plain PyTorch training loops: update numbers, parameter groups, admin's profiling."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from .attention import MultiheadAttention
from .build import LEARNED
from .norms import RowNorm
from .own import OwnNorm
from .profiling import is_profiling, profiling
from .running import RunningNorm
from .stacks import Sums
from .step_hooks import Growing, were_profiled

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, RowNorm, RunningNorm, Sums)
"""Modules whose parameters are all gains."""
MATRICES = ("embedding", "hidden-matrix")
"""The roles of parameters with weight decay."""
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_MATRICES = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag, nn.MultiheadAttention)
"""Modules of torch.nn, besides the recurrent ones, whose weights are matrices in any shape."""


def set_num_updates(model: nn.Module, n: int) -> int:
    """Sets t to n in every stack of `model` whose scheme grows (branchnorm), and in every norm that fades (prepbn): n
    is the number of the next update, from 1.

    Steps of torch's optimizers advance t automatically. Call this if the loop counts differently (a run that resumes
    without its saved t), or if no torch optimizer owns the parameters.

    Returns the number of such stacks and norms. Errors: InputError for n < 1.
    """
    if n < 1:
        raise InputError(f"n is the number of the update about to be made, from 1; got {n}")
    holders = [module for module in model.modules() if isinstance(module, Growing) and module.growth is not None]
    for holder in holders:
        holder.set_t(n)
    return len(holders)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns two groups for an optimizer: matrices, with `weight_decay`, and norms, gains and biases, without.

    The second group has the parameters of at most one dimension, those of norms and residual schemes, and those with a
    single row or column outside linear layers and embeddings. Parameters that need no gradient are left out.
    `normformer_rs.param_groups` does this too, and scales rates by a parametrisation.

    >>> from torch import nn
    >>> groups = parameter_groups(nn.Linear(2, 3), 0.1)
    >>> [(group["weight_decay"], len(group["params"])) for group in groups]
    [(0.1, 1), (0.0, 1)]
    """
    vectors = {id(p) for p in learned_gains(model).values()} | vector_ids(model) | set(summed_over(model))
    for module in model.modules():
        # A normformer_rs.Transformer gets the roles of its parameters from Rust.
        read_parts: Any = getattr(module, "_parts", None)
        if read_parts is not None:
            parts = read_parts()
            roles = {name: role for name, (role, *_) in parts.items()}  # a part begins with its role
            vectors |= {id(p) for name, p in module.named_parameters() if roles[name] not in MATRICES}
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if id(p) not in vectors]
    others = [p for p in trained if id(p) in vectors]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def vector_ids(model: nn.Module) -> set[int]:
    """Returns the ids of parameters that are vectors: at most one of their dimensions is above 1, as in gains and class
    tokens.

    In linear, convolutional, recurrent and embedding layers of torch.nn, a weight such as (1, d) still is a matrix.
    """
    ids: set[int] = set()
    for module in model.modules():
        has_matrices = isinstance(module, (*_MATRICES, *_RECURRENT))
        for p in module.parameters(recurse=False):
            if p.dim() <= 1 or (not has_matrices and sum(n > 1 for n in p.shape) <= 1):
                ids.add(id(p))
    return ids


def summed_over(model: nn.Module) -> dict[int, str]:
    """Returns, by each parameter's id, the dimension over which products with a norm's or residual scheme's
    parameter are summed: "nothing", "width", "root-width" or "depth"."""
    dimensions: dict[int, str] = {}
    for module in model.modules():
        declared: dict[str, str] = {**vars(module).get(LEARNED, {})}
        if isinstance(module, RowNorm):
            declared |= {p.name: _matrix_over(p.shape) for p in module.declared.parameters}
        if isinstance(module, OwnNorm):
            declared |= {name: _matrix_over(module.norm.shape(name)) for name in module.norm.parameters}
        for name, p in module.named_parameters(recurse=False):
            if name in declared:
                dimensions[id(p)] = declared[name]
    return dimensions


def _matrix_over(shape: Any) -> str:
    """Returns the dimension over which products with a norm's parameter of this declared shape are summed: "width" for
    a matrix whose rows have x's width, otherwise "nothing"."""
    return "width" if not isinstance(shape, str) and shape[-1] == "width" else "nothing"


def learned_gains(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of norms and of residual schemes, by their names."""
    gains = {}
    for name, module in model.named_modules():
        # The parts of a normformer_rs.Transformer are of the class nn.Module itself.
        is_container = type(module) is nn.Module
        # There, the part `combine` stands for a `Sums`.
        is_norm = isinstance(module, _NORMS) or (is_container and name.rpartition(".")[2] == "combine")
        is_scheme = isinstance(module, Growing | MultiheadAttention) or is_container
        for own_name, p in module.named_parameters(recurse=False):
            # A layer's own vectors are its scheme's gains, except for biases.
            if is_norm or (is_scheme and p.dim() <= 1 and not own_name.endswith("bias")):
                gains[f"{name}.{own_name}".lstrip(".")] = p
    return gains


def profile(model: nn.Module, *batch: Any, **keywords: Any) -> int:
    """Sets admin's gains ω by one forward of `model` on a training batch: model(*batch, **keywords), with dropout on.

    At the start of each stack r is 1. Sublayer after sublayer then sets ω_i ← r and r ← √(Var(ω_i x_i) + Var f_i), with
    the biased variance over all elements, padding included, and f after its dropout (Liu et al. 2020; docs/spec.md
    §3.4). Under torch.distributed rank 0's values are used. Running statistics do not change.

    Returns the number of gains that were set. Errors: InputError if there are none.
    """
    was_training = {module: module.training for module in model.modules()}
    statistics = [module for module in model.modules() if isinstance(module, RunningNorm)]
    # Profiling is no training step, so the running statistics get their values back.
    saved = [(t, t.clone()) for module in statistics for t in (*module.buffers(recurse=False), module.refused)]
    try:
        model.train()
        with profiling() as done:
            model(*batch, **keywords)
    finally:
        for module, training in was_training.items():
            module.training = training
        with torch.no_grad():
            for buffer, before in saved:
                buffer.copy_(before)
    if done.gains == 0:
        raise InputError(
            'no gain was profiled: the forward met no layer with residual="admin"; normformer_rs.Transformer has a '
            "method profile() of its own"
        )
    were_profiled(model.modules())
    return done.gains


def profile_at_first_forward(model: nn.Module) -> Callable[[], None]:
    """Hooks the model so that its first training forward calls `profile` with its batch, for the outermost called
    module that has such gains. Does nothing if a gain is not 1. Returns a function that removes the hooks."""
    gains = {module: module.profiled_gains() for module in model.modules() if isinstance(module, Growing)}
    waiting = {module for module, own in gains.items() if own}  # the modules whose gains no forward has profiled yet
    if any(bool((p.detach() != 1).any()) for module in waiting for p in gains[module]):
        return lambda: None
    handles: dict[nn.Module, Any] = {}

    def end() -> None:
        """Removes all hooks that are left."""
        for handle in handles.values():
            handle.remove()

    @torch.compiler.disable
    def before(module: nn.Module, batch: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """The hook before a forward. It profiles the module with the forward's own arguments."""
        if not module.training or not torch.is_grad_enabled() or is_profiling():
            return
        # This is the outermost called module. It profiles for all modules inside, so their hooks go.
        inside = {*module.modules()}
        for hooked in inside & handles.keys():
            handles.pop(hooked).remove()
        if waiting & inside:
            waiting.difference_update(inside)
            profile(module, *batch, **keywords)
        if not waiting:
            end()

    for module in model.modules() if waiting else ():
        if not waiting.isdisjoint(module.modules()):
            handles[module] = module.register_forward_pre_hook(before, with_kwargs=True)
    return end
