"""First values of modules, out of Rust's table of initialisations."""

import torch
from torch import Tensor, nn

from .. import _core
from ..config import TransformerConfig
from .declared import Place


def initial_values(config: TransformerConfig, device: torch.device) -> dict[str, Tensor]:
    """A whole model's first values by canonical name, after one draw from torch's generator; none on the meta
    device."""
    if device.type == "meta":
        return {}
    seed = int(torch.randint(2**63 - 1, (), device="cpu"))
    with torch.random.fork_rng(devices=[]):
        return dict(_core.parameters(config.to_json(), seed, str(device)))


@torch.no_grad()
def initialise(module: nn.Module, place: Place, prefix: str, values: dict[str, Tensor] | None = None) -> None:
    """Gives the module's parameters the values under `prefix`. Those without a value keep theirs."""
    parameters = dict(module.named_parameters())
    if values is None:
        values = initial_values(place.config, next(iter(parameters.values())).device)
    for name, parameter in parameters.items():
        if prefix + name in values:
            parameter.copy_(values[prefix + name])
