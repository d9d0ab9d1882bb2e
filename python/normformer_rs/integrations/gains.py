"""Helpers for gains in other libraries' trainers: they return values for the log, and keep weight decay off gains."""

from typing import Any

import torch
from torch import Tensor, nn

from ..analysis import gradient_norms
from ..errors import InputError
from ..nn.step_hooks import Growing
from ..nn.training import learned_gains


@torch.no_grad()
def gain_values(model: nn.Module) -> dict[str, float]:
    """Returns values for the log by name. gain/NAME is the mean of a norm's gain or of a residual scheme's parameter.
    alpha/NAME is α_t of a stack whose α_t grows, or 1 − λ of a fading norm. If each layer has its own α_t, the names
    are alpha/NAME.layers.L. The host waits for the device only once."""
    values: dict[str, Tensor] = {}
    for name, p in learned_gains(model).items():
        if not name.endswith("bias"):
            # A parameter that is distributed over devices has this method, which gathers its parts.
            whole: Tensor = p.full_tensor() if hasattr(p, "full_tensor") else p
            values[f"gain/{name}"] = whole.detach().double().mean()
    for name, module in model.named_modules():
        if isinstance(module, Growing) and module.growth is not None:
            path = f"alpha/{name}".rstrip("/")  # the model itself has the name "", which would leave a slash
            if not module.growth.by_layer or module.place is None:
                values[path] = module.alpha_now(module.growth)[0]
                continue
            for layer in range(module.place.depth):
                values[f"{path}.layers.{layer}"] = module.alpha_now(module.growth, layer)[0]
    if not values:
        return {}
    # One tolist() of the stacked values waits for the device once, not once for each value.
    device = next(iter(values.values())).device
    return dict(zip(values, torch.stack([value.to(device) for value in values.values()]).tolist()))


def gradient_values(model: nn.Module) -> dict[str, float]:
    """Returns the gradient norm of each layer, from `analysis.gradient_norms`, under the name gradient/NAME. The
    dictionary is empty if no parameter has a gradient."""
    if all(p.grad is None for p in model.parameters()):
        return {}
    return {f"gradient/{name}": norm for name, norm in gradient_norms(model).items()}


class Undecayed:
    """Exempts gains and schemes' parameters from weight decay: during a step they are in a group without it.

    That group has the same options as their own group, except weight decay. If the optimizer has no such group, one is
    added for the step. Between steps the groups are as the trainer made them, so the trainer's checkpoints have the
    order of parameters that it expects, with or without this class, and a resumed run is bit-equal. Errors: InputError
    for anything but a torch.optim.Optimizer.
    """

    def __init__(self, optimizer: Any, model: nn.Module) -> None:
        """Adds hooks to the optimizer, or to the one inside a wrapper, that move the model's gains during each step."""
        while hasattr(optimizer, "optimizer"):  # Accelerate wraps optimizers
            optimizer = optimizer.optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            raise InputError(
                f"expected a torch.optim.Optimizer, got a {kind}: its weight decay cannot be kept off gains. "
                "Pass undecayed=False, and give it the groups of normformer_rs.nn.parameter_groups"
            )
        self._optimizer, self._gains = optimizer, {id(p): p for p in learned_gains(model).values()}
        self._before: list[tuple[dict[str, Any], list[Any]]] | None = None
        """The trainer's groups, each with its parameters, while the gains are in other groups; None between steps."""
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self._part()),
            optimizer.register_step_post_hook(lambda *_: self._join()),
            # A state dict that is taken during a step has the trainer's groups, too.
            optimizer.register_state_dict_pre_hook(lambda _: self._join()),
        ]

    def remove(self) -> None:
        """Restores the optimizer's groups and removes the hooks."""
        self._join()
        for handle in self._handles:
            handle.remove()

    def _part(self) -> None:
        """Moves the gains to groups without weight decay."""
        self._join()  # a step before this one may have raised
        groups, gains = self._optimizer.param_groups, self._gains
        self._before = [(group, group["params"]) for group in groups]
        for group, params in self._before:
            own_gains = [p for p in params if id(p) in gains]
            if own_gains and group.get("weight_decay"):
                group["params"] = [p for p in params if id(p) not in gains]
                # The gains move to a group with the same options but no weight decay: an existing one, or a new one.
                undecayed = next((g for g in groups if _is_same_but_undecayed(g, group)), None)
                if undecayed is None:
                    groups.append({**group, "params": own_gains, "weight_decay": 0.0})
                else:
                    undecayed["params"] = [*undecayed["params"], *own_gains]

    def _join(self) -> None:
        """Restores the trainer's groups, if the gains have been moved."""
        if self._before is not None:
            for group, params in self._before:
                group["params"] = params
            self._optimizer.param_groups[:] = [group for group, _ in self._before]
            self._before = None


def _is_same_but_undecayed(candidate: dict[str, Any], group: dict[str, Any]) -> bool:
    """Returns True if `candidate` has no weight decay, and otherwise the same options as `group`. Tensors, such as a
    learning rate on the device, are compared by identity, so that the host does not wait for the device."""
    not_compared = {"params", "param_names", "weight_decay"}
    return candidate.get("weight_decay") == 0 and all(
        key in not_compared
        or candidate.get(key) is value
        or (not isinstance(value, Tensor) and candidate.get(key) == value)
        for key, value in group.items()
    )
