"""The profiling pass, which computes the gains of admin (Liu et al. 2020; docs/spec.md §3.4)."""

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
    """Returns every residual_scale ω of `admin`, from one training forward (Liu et al. 2020; docs/spec.md §3.4).

    Buffers do not change. In each stack r begins at 1; for each sublayer in order ω_i = r, then
    r ← √(Var(ω_i x_i) + Var f_i), with f_i after its dropout. Var is the biased variance over all elements, or over
    real positions only if `count_padding` is False. The forward continues with the ω that was just set.
    """
    run = _Profile({name: value.detach().clone() for name, value in state.items()}, config, dropout, count_padding)
    run.logits(source, target_input)
    return run.omegas


class _Profile(Run):
    """A forward pass in which every sublayer sets its ω before it uses it."""

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
