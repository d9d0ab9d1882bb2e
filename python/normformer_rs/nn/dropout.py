"""Dropout inside operators: the masks' seeds, and modules that an operator may stand in for."""

from typing import Any

import torch
from torch import Tensor, nn


class Draw:
    """Dropout masks of one forward: a seed from torch's generator, drawn when first needed, and a site for each
    mask."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seed, self.sites = device, None, 0  # type: tuple[torch.device, Tensor | None, int]

    def __call__(self, p: float) -> tuple[float, Tensor | None, int]:
        """(p, seed, site) as operators take them."""
        if p > 0 and self.seed is None:
            self.seed = torch.randint(2**63 - 1, (3,), device=self.device)
        self.sites += 1
        return p, self.seed if p > 0 else None, self.sites


def is_plain(module: nn.Module, kind: type) -> bool:
    """The module is exactly of that class and has no hooks, so a fused operator may replace its call."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    is_own = type(module) is kind and "forward" not in module.__dict__
    return is_own and not own and not nn.modules.module._has_any_global_hook()


def rate(dropout: Any) -> float | None:
    """p of a plain dropout, 0 in evaluation; None: the module itself must be called."""
    if torch.compiler.is_exporting() or not is_plain(dropout, nn.Dropout) or dropout.p >= 1:
        return None
    return dropout.p if dropout.training else 0.0
