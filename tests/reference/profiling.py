"""Admin's profiling pass (Liu et al. 2020; docs/spec.md §3.4)."""

import math

import torch
from torch import Tensor

from .config import Config
from .model import Dropout, Run
from .parameters import State
from .residual import Place, describe_sublayer


def profile_admin(
    state: State,
    config: Config,
    source: Tensor | None,
    target_input: Tensor,
    dropout: Dropout,
    count_padding: bool = True,
) -> dict[str, Tensor]:
    """Every residual_scale of `admin`, from one training forward (Liu et al. 2020; docs/spec.md §3.4).

    Buffers do not move. Down each stack from r = 1: ω_i = r, r ← √(Var(ω_i x_i) + Var f_i), f_i after its dropout, Var
    the biased variance over all elements; the forward goes on with the ω just set. `count_padding=False`: over real
    positions only.
    """
    run = _Profile({name: value.detach().clone() for name, value in state.items()}, config, dropout, count_padding)
    run.logits(source, target_input)
    return run.omegas


class _Profile(Run):
    """Admin's profiling pass: every sublayer sets its own ω first."""

    def __init__(self, state: State, config: Config, dropout: Dropout, count_padding: bool) -> None:
        super().__init__(state, config, dropout)
        self.count_padding, self.omegas, self.r = count_padding, {}, 1.0

    def step_of_x(self, place: Place, x: Tensor, f: Tensor, keep: Tensor | None, real: Tensor) -> Tensor:
        if (place.layer, place.index) == (0, 1):
            self.r = 1.0
        name = describe_sublayer(place).alpha.name
        self.state[name] = self.omegas[name] = torch.full_like(self.state[name], self.r)
        x_plus = super().step_of_x(place, x, f, keep, real)
        residual, counted = self.r * x, torch.ones_like(real) if self.count_padding else real
        branch = x_plus - residual  # f after its dropout
        self.r = math.sqrt(residual[counted].var(correction=0) + branch[counted].var(correction=0))
        return x_plus
