"""Dropout inside operators: the masks' seeds, and the check whether an operator may replace a module."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from .formulas import wide

OPS = torch.ops.normformer_rs
Where = tuple[float, Tensor | None, int]
"""(p, seed, site) in the form that operators get."""


class Draw:
    """The dropout masks of one forward: a seed from torch's generator, drawn when it is first needed, and a site for
    each mask."""

    is_kept = False
    """True once a compiled graph saves the seed (`kept_seed`)."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seed, self.sites = device, None, 0  # type: tuple[torch.device, Tensor | None, int]

    def __call__(self, p: float) -> Where:
        """Returns the next mask in the form that operators get: rate, seed and site."""
        if p > 0 and self.seed is None:
            # Masks of one forward share the seed, three random numbers, and differ by their site.
            self.seed = torch.randint(2**63 - 1, (3,), device=self.device)
        self.sites += 1
        return p, self.seed if p > 0 else None, self.sites

    def drop(self, x: Tensor, p: float) -> tuple[Tensor, Where]:
        """Returns x, and the dropout (rate, seed, site) that an operator must still apply. Under torch.func and in
        compiled graphs operators' formulas read no seed. There x already has dropout, by the same mask, and the rate
        is 0."""
        where = self(p)
        _, seed, site = where
        if seed is None or not (torch.compiler.is_compiling() or is_transformed()):
            return x, where
        if is_run_again() and not self.is_kept:  # the backward graph must read this seed, not draw another
            self.seed, self.is_kept = OPS.kept_seed(self.seed), True
        wide_x, cols = wide(x), x.shape[-1]
        rows = x.numel() // max(cols, 1)
        mask = OPS.dropout_mask(self.seed, rows, cols, p, site)
        return (wide_x * mask.view(x.shape).to(wide_x.dtype)).to(x.dtype), (0.0, None, site)


def drop(x: Tensor, where: Where) -> Tensor:
    """Returns x after the dropout that `where`, (rate, seed, site), describes: the residual step 0 + drop(x) of a
    stream of zeros."""
    _, seed, _ = where
    if seed is None:
        return x
    no_gains, no_norm = (None, None), (None, None, 0.0)  # α and β; weight, bias and an ε that nothing reads
    return OPS.residual(torch.zeros_like(x), x, *no_gains, *no_norm, *where)[0]


def is_transformed() -> bool:
    """True inside torch.func's grad, vmap or jvp, or transforms made from them."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_plain(module: nn.Module, kind: type) -> bool:
    """True if the module is exactly of that class and has no hooks, so that a fused operator may replace its call."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    # A swap's subclass of a norm names in `computes_as` the class that it computes as.
    actual_kind = getattr(type(module), "computes_as", type(module))
    is_kind = actual_kind is kind and "forward" not in module.__dict__
    return is_kind and not hooks and not nn.modules.module._has_any_global_hook()


def rate(dropout: Any) -> float | None:
    """Returns p of a plain dropout, 0 in evaluation; None if the module itself must be called."""
    if not is_plain(dropout, nn.Dropout) or dropout.p >= 1:  # operators cannot drop all, because they divide by 1 − p
        return None
    # Dynamo treats is_exporting() as true in torch.compile, too. So compiled graphs contain torch's dropout, unless the
    # backward graph may run it again with other numbers.
    if torch.compiler.is_exporting() and not (dropout.training and dropout.p > 0 and is_run_again()):
        return None
    return dropout.p if dropout.training else 0.0


# torch.compile's partitioner may run forward operations again in the backward graph, to save memory. Random operations
# such as torch's dropout then give other numbers. But the partitioner respects a mark on a node of the graph, so the
# operator `kept_seed` marks the seed as a tensor that must be saved.


def is_run_again() -> bool:
    """True if compiled with an activation memory budget, so that the backward graph may run forward operations
    again."""
    return torch.compiler.is_compiling() and _has_budget()


def _has_budget() -> bool:
    """Returns whether torch.compile has an activation memory budget below 1, and defines `kept_seed` if so. Errors:
    InputError for a budget of 0."""
    from torch._functorch import config

    if torch.compiler.is_exporting():
        return False
    if config.activation_memory_budget == 0:
        raise InputError(
            "with activation_memory_budget = 0 torch.compile draws another dropout mask in the backward pass than in "
            "the forward pass, in torch.nn too: take a budget above 0, or dropout 0"
        )
    has_budget = config.activation_memory_budget < 1 or config.aggressive_recomputation
    if has_budget:
        _define()
    return has_budget


# With this mark torch.compile takes the function's result for a constant. torch.compiler.assume_constant_result sets
# it, too, but would import the compiler, which takes 1.5 s.
_has_budget._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _kept_seed_in_graph(mode: Any, seed: Tensor) -> Any:
    """Makes `kept_seed` a node that the partitioner must save. `mode`: the tracing mode, which has the graph's
    tracer."""
    from torch.fx.experimental.proxy_tensor import get_proxy_slot, track_tensor_tree
    from torch.utils.checkpoint import CheckpointPolicy

    seed_slot: Any = get_proxy_slot(seed, mode.tracer)
    node = mode.tracer.create_proxy("call_function", OPS.kept_seed.default, (seed_slot.proxy,), {})
    node.node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return track_tensor_tree(seed.clone(), node, constant=None, tracer=mode.tracer)


@functools.cache
def _define() -> torch.library.Library:
    """Defines `kept_seed` when it is first needed, because every import would otherwise take a millisecond longer."""
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

    library = torch.library.Library("normformer_rs", "FRAGMENT")
    library.define("kept_seed(Tensor seed) -> Tensor")
    library.impl("kept_seed", torch.clone, "CompositeExplicitAutograd")
    library.impl("kept_seed", torch.empty_like, "Meta")
    OPS.kept_seed.default.py_impl(ProxyTorchDispatchMode)(_kept_seed_in_graph)
    return library
