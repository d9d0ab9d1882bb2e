"""Hooks on optimizers' steps. They advance t, the number of the update on which α_t of branchnorm and prores
and λ of prepbn depend, and warn if admin's gains were never profiled."""

import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..declarations.declared import Growth, Learned
from ..errors import InputError
from .averages import Steered, Steering
from .growth import alpha
from .place import Place

PATIENCE = 8
"""A warning comes after this many updates of the weights that did not move t. A smaller number would be wrong: some
methods, such as sharpness-aware and adversarial training, also write to weights once or twice between steps."""


class Growing(Steered):
    """A module that may hold a buffer `t`: int64 (1,), the number of the next update, 1 initially, saved with the
    model. t grows by one with each step of the optimizer that has the first trainable matrix of `watched()`."""

    growth: Growth | None = None
    begins: int = 0
    """The number of the update at which α_t is 0 and begins to grow."""
    place: Place | None = None
    t: Tensor

    def grow(self, growth: Growth | None, device: Any) -> None:
        """Makes this module hold t for the growth. With None, it holds no t: another module does, or nothing grows."""
        self.growth = growth
        self._buffers.pop("t", None)
        if growth is not None:
            self.register_buffer("t", torch.ones(1, dtype=torch.int64, device=device))
        self._watched: tuple[float, float] | None = None  # the weight's sum and t, when `_watch` last looked
        self._unmoved = self._times_set = 0  # the numbers of updates that did not move t, and of calls of `set_t`
        self._follow()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._follow()  # the hooks do not know a copied or unpickled module yet

    def _follow(self) -> None:
        """Registers the module with the hooks on optimizers' steps, for its t and for gains that need profiling."""
        if self.growth is not None:
            self.remember_copies()
            follow_steps(self)
        if self.profiled_gains():
            _UNPROFILED.add(self)
            _listen()

    def reset_growth(self) -> None:
        """Sets t = 1, and marks gains as not profiled."""
        if self.growth is not None:
            self.t.fill_(1)
            self.told()
        self._follow()

    def set_t(self, n: int) -> None:
        """Sets t to n, the number of the next update."""
        if self.growth is not None:
            self.t.fill_(n)
            self.told()
            self._times_set += 1
            if self._times_set == PATIENCE:  # the caller counts updates itself, so `_watch` need not warn
                self._unmoved = PATIENCE

    def steering(self) -> Steering:
        """Returns t, with the parameter whose updates it counts; empty if this module holds no t."""
        # In a copy, t is paired with the parameter that stands where the source has the one whose updates move t.
        origin, own_parameters = self._origin, [*self.watched()]
        if self.growth is None or origin is None:
            return []
        source = origin.source() or self
        source_parameters = [*source.watched()]  # a copy's parameters may be frozen
        owner = first_trained(source_parameters) if any(p.requires_grad for p in source_parameters) else None
        # If all of the source is frozen, there is no owner, and the first matrix stands for it.
        pairs = zip(own_parameters, source_parameters)
        candidates = [own for own, p in pairs if p is owner or (owner is None and p.dim() > 1)]
        return [(own, self.t) for own in candidates[:1]]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Loads the module's tensors, and t also from an average of models that all had this t. Errors: InputError for
        an average of different t."""
        t = state_dict.get(prefix + "t")
        # An average of several models has a floating-point t.
        if self.growth is not None and isinstance(t, Tensor) and t.is_floating_point() and not t.is_meta:
            whole = t.round()
            # An average of equal numbers may have rounding errors: 1e-3, or 1e-6 of a t above 1000.
            if bool((t - whole).abs().max() > 1e-3 * max(1.0, t.abs().max().item() * 1e-3)):
                raise InputError(
                    f"{prefix}t must be the number of an update, a whole number; got {t.tolist()}, an average of "
                    f"several: average the weights alone, and set {prefix}t to the t of the model that goes on"
                )
            state_dict[prefix + "t"] = whole.to(torch.int64)  # rounded first: 200.9999 would become 200
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def grown(self, layer: int = 0) -> Tensor | None:
        """Returns α_t in a layer counted from 0; None if nothing grows."""
        if self.growth is None:
            return None
        if not torch.compiler.is_compiling():  # a compiled graph would contain the `no_grad` of these two calls
            self.take_over()
            self._watch()
        return self.alpha_now(self.growth, layer)

    def alpha_now(self, growth: Growth, layer: int = 0) -> Tensor:
        """Returns α_t in a layer counted from 0, without the check that t moves."""
        return alpha(growth, self.t - self.begins if self.begins else self.t, layer)

    def watched(self) -> Iterator[nn.Parameter]:
        """Yields the parameters whose updates t counts."""
        return self.parameters()

    def followed(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yields (parameter, t): the optimizer of that parameter advances t."""
        owner = first_trained(self.watched()) if self.growth is not None else None
        if owner is not None:
            yield owner, self.t

    def profiled_gains(self) -> list[nn.Parameter]:
        """Returns this module's gains that profiling sets from a training batch (admin's ω)."""
        if self.place is None or not self.place.declared.is_profiled:
            return []
        names = [sublayer.alpha.name for sublayer in self.place.sublayers if isinstance(sublayer.alpha, Learned)]
        return [p for p in map(self._parameters.get, names) if p is not None]

    @torch.no_grad()
    def _watch(self) -> None:
        """Warns once if parameters keep changing while t does not move. Stops looking once a step has moved t."""
        if not self.training or self._unmoved >= PATIENCE or torch.compiler.is_compiling() or is_captured():
            return
        parameter = first_trained(self.watched())
        if parameter is None or parameter.is_meta or (self._origin is not None and self._origin.has_stepped):
            return
        local: Any = parameter.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        now, before = (local.double().sum().item(), float(self.t)), self._watched  # both are (the weight's sum, t)
        self._watched = now
        if before is None:
            return
        (weight_before, t_before), (weight_now, t_now) = before, now
        is_same_weight, is_same_t = weight_before == weight_now, t_before == t_now
        if is_same_weight or not is_same_t:
            return
        self._unmoved += 1
        if self._unmoved == PATIENCE:
            warnings.warn(
                f"parameters have been updated {PATIENCE} times but t of the residual scheme or norm has not moved, so "
                "that α_t or λ stays where it is: no torch.optim.Optimizer that owns them made the step; call "
                "normformer_rs.nn.set_num_updates(model, k) before the k-th update",
                stacklevel=4,
            )


def is_captured() -> bool:
    """True if kernels are being recorded in a CUDA graph, where the host must not wait."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def first_trained(parameters: Iterable[nn.Parameter]) -> nn.Parameter | None:
    """Returns the first matrix that needs a gradient, a branch's weight; if there is none, the first parameter that
    does."""
    trained = [p for p in parameters if p.requires_grad]
    return next((p for p in trained if p.dim() > 1), trained[0] if trained else None)


# The hooks below act on every optimizer of the process. They are registered when the first module needs them.

_FOLLOWING: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Modules with a t that steps advance."""
_UNPROFILED: "weakref.WeakSet[Growing]" = weakref.WeakSet()
"""Modules with gains that have neither been profiled nor been in a step."""


class _Step(NamedTuple):
    """A step that has begun and not ended."""

    moved: set[int]
    """Ids of each t that was advanced during this step. If the step calls another one, t thus advances once."""
    at_start: list[Growing]
    """Unprofiled modules, all of whose gains were 1 when the step began. The step's closure may still profile them."""


_UNDER_WAY: "weakref.WeakKeyDictionary[torch.optim.Optimizer, _Step]" = weakref.WeakKeyDictionary()
"""The steps that have begun and not ended, by optimizer."""
_LISTENING: list[Any] = []
"""The handles of the two hooks; empty until they are registered."""


def follow_steps(module: Any) -> None:
    """Makes optimizers advance t: for each (owner, t) of `module.followed()`, by steps of the owner's optimizer.

    After k steps from t = 1, t is k + 1; steps that a gradient scaler skips do not count. Copies of a module must call
    this too.

    This works for every torch.optim.Optimizer: eager, compiled, or recorded in a CUDA graph. Each replay of the graph
    advances t with the parameters. An optimizer of other tensors, such as float32 copies, does not advance t.
    """
    _FOLLOWING.add(module)
    _listen()


def were_profiled(modules: Iterable[nn.Module]) -> None:
    """Marks the modules' gains as profiled."""
    _UNPROFILED.difference_update(m for m in modules if isinstance(m, Growing))


def _listen() -> None:
    """Registers the hooks with every optimizer of the process, once."""
    if not _LISTENING:  # with `disable`, compiled steps run the hooks eagerly
        _LISTENING.append(register_optimizer_step_pre_hook(torch.compiler.disable(_begin)))
        _LISTENING.append(register_optimizer_step_post_hook(torch.compiler.disable(_end)))


def _owned(optimizer: torch.optim.Optimizer) -> set[int]:
    """Returns the ids of the parameters that the optimizer updates."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _begin(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Runs before a step: notes that it has begun."""
    if _FOLLOWING or _UNPROFILED:
        _UNDER_WAY[optimizer] = _Step(set(), _at_start(optimizer) if _UNPROFILED else [])


def _end(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Runs after a step: advances each t, and warns of gains that were never profiled."""
    step = _UNDER_WAY.pop(optimizer, None)
    if step is None:
        return
    if _FOLLOWING:
        _move(optimizer, step.moved)
    unprofiled = [m for m in step.at_start if m in _UNPROFILED]
    if unprofiled:
        were_profiled(unprofiled)  # so that the warning comes only once
        warnings.warn(
            f"admin's gains ω were all 1 in {len(unprofiled)} modules, as if never profiled: call "
            "normformer_rs.nn.profile(model, *batch) with a training batch before the first update",
            stacklevel=4,
        )


@torch.no_grad()
def _move(optimizer: torch.optim.Optimizer, moved: set[int]) -> None:
    """Advances each t whose owner the optimizer has, unless its id is in `moved`."""
    # A gradient scaler sets `found_inf` for optimizers that skip steps with infinite gradients by themselves.
    owned, skipped = _owned(optimizer), getattr(optimizer, "found_inf", None)
    for module in [*_FOLLOWING]:
        # A swap's undo() gives a module its old class, which has no `followed`.
        for owner, t in module.followed() if hasattr(module, "followed") else ():
            if id(owner) in owned and id(t) not in moved:
                # A fused optimizer decides on the device whether to skip; the host does not read it.
                t.add_(1 if skipped is None else (skipped == 0).to(t.device))
                if isinstance(module, Steered):
                    module.keep_step(t)
                for step in _UNDER_WAY.values():  # steps that called this one must not advance t again
                    step.moved.add(id(t))


def _at_start(optimizer: torch.optim.Optimizer) -> list[Growing]:
    """Returns the unprofiled modules whose gains this optimizer has, if all these gains are 1. Otherwise the modules
    were profiled, since profiling leaves only a stack's first gain at 1, and the result is empty. The host reads each
    gain once."""
    if is_captured():
        return []
    owned = _owned(optimizer)
    gains = {module: module.profiled_gains() if isinstance(module, Growing) else [] for module in [*_UNPROFILED]}
    stepped = [module for module, own in gains.items() if any(id(p) in owned for p in own)]
    if all(bool((p.detach() == 1).all()) for module in stepped for p in gains[module]):
        return stepped
    were_profiled(stepped)
    return []
