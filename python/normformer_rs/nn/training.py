"""What plain PyTorch training loops do for norms and residual schemes."""

from typing import Any

import torch
from torch import nn

from ..errors import InputError
from .growing import Growing
from .norms import RowNorm
from .profiling import profiling
from .running import RunningNorm
from .stacks import Sums

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, RowNorm, RunningNorm, Sums)


def set_num_updates(model: nn.Module, n: int) -> int:
    """t ← n in every stack of `model` whose scheme grows (branchnorm). Call it with k before the k-th update.

    Returns how many stacks there were. Errors: InputError for n < 1.
    """
    if n < 1:
        raise InputError(f"n is the number of the update about to be made, from 1; got {n}")
    holders = [module for module in model.modules() if isinstance(module, Growing) and module.growth is not None]
    for holder in holders:
        holder.t.fill_(n)
    return len(holders)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: matrices, with `weight_decay`, and norms, gains and biases, without.

    A parameter of at most one dimension, in a norm, or of dlcl's sums counts as the latter; those that need no gradient
    are left out.

    >>> from torch import nn
    >>> groups = parameter_groups(nn.Linear(2, 3), 0.1)
    >>> [(group["weight_decay"], len(group["params"])) for group in groups]
    [(0.1, 1), (0.0, 1)]
    """
    undecayed = {
        p
        for name, module in model.named_modules()
        # normformer_rs.Transformer is made of nameless modules.
        if isinstance(module, _NORMS) or (type(module) is nn.Module and name.rpartition(".")[2] == "combine")
        for p in module.parameters(recurse=False)
    }
    wanted = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in wanted if p.dim() > 1 and p not in undecayed]
    others = [p for p in wanted if p.dim() <= 1 or p in undecayed]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def profile(model: nn.Module, *batch: Any, **keywords: Any) -> int:
    """Sets admin's gains ω by one forward of `model` on a training batch: model(*batch, **keywords), dropout on.

    Down each stack, with r = 1 at first: ω_i ← r, r ← √(Var(ω_i x_i) + Var f_i), the biased variance over all elements,
    padding included, f after its dropout (Liu et al. 2020; SPEC §3). Under torch.distributed rank 0's values count.
    Running statistics stay as they are.

    Returns the number of gains that were set. Errors: InputError where there are none.
    """
    was_training = {module: module.training for module in model.modules()}
    statistics = [module for module in model.modules() if isinstance(module, RunningNorm)]
    kept = [(t, t.clone()) for module in statistics for t in (*module.buffers(recurse=False), module.refused)]
    try:
        model.train()
        with profiling() as done:
            model(*batch, **keywords)
    finally:
        for module, training in was_training.items():
            module.training = training
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)
    if done.gains == 0:
        raise InputError('no gain was profiled: the forward met no layer with residual="admin"')
    return done.gains
