"""Hands over what other libraries keep on modules and parameters, such as hooks and marks, when a swap replaces these.
If something cannot be handed over, an error names it."""

import functools
import inspect
import types
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from .converted import Converted, converted_class
from .signs import HANDED_ON

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""A module's dictionaries of hooks, and flags that belong to them."""
_ATTRIBUTES_OF_ALL = frozenset(vars(nn.Module()))
"""The attributes that every module has."""
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_OF_SHAPE = ("infshape",)
"""Attributes that fit every parameter of the same shape: mup's widths."""


# The functions below concern modules.


def hand_over(old: nn.Module, new: nn.Module) -> None:
    """Gives the module `new`, which replaces `old`, the hooks of `old`, its accelerate hook, and the plain values that
    other libraries wrote on it.

    Both modules share the dictionaries of hooks, so that torch's handles still remove them. An attribute counts as
    written by others if no function of either class names it, such as transformers' `_is_hf_initialized`.
    """
    for hooks in _HOOKS:
        if hooks in old.__dict__:
            new.__dict__[hooks] = old.__dict__[hooks]
    kinds: tuple[Any, Any] = type(old), type(new)
    known_names = _ATTRIBUTES_OF_ALL.union({HANDED_ON}, *map(_names_in, kinds))
    written_by_others = {
        name: value for name, value in vars(old).items() if name not in known_names and _is_plain(value)
    }
    new.__dict__.update(written_by_others)
    if "_is_hf_initialized" not in vars(old):  # `new` may have marked itself; transformers would then not initialise it
        new.__dict__.pop("_is_hf_initialized", None)
    # the class that changes the behaviour of `old`, such as StreamNorm, if a swap converted `old`
    behaviour = getattr(type(old), "_nfrs_how", None)
    if getattr(behaviour, "goes_over", False) and not isinstance(new, Converted):
        reclass(new, converted_class(type(new), behaviour))
    _hand_over_accelerates(old, new)


def _hand_over_accelerates(old: nn.Module, new: nn.Module) -> None:
    """Removes accelerate's hook from `new`, and gives `new` the hook of `old`. The hook consists of an attribute
    `forward` in the instance, which wraps `_old_forward`."""
    if has_accelerates_hook(new):
        beneath = own_forward(new)  # the forward that the hook wraps, if it is not the class's
        for name in ("_hf_hook", "_old_forward", "forward"):
            del new.__dict__[name]
        new.__dict__.update({} if beneath is None else {"forward": beneath})
    if has_accelerates_hook(old):
        wrapper: Any = old.__dict__["forward"]
        # accelerate binds the module as the first argument
        rebound = functools.partial(wrapper.func, new, *wrapper.args[1:], **wrapper.keywords)
        hooked = {"_hf_hook": old.__dict__["_hf_hook"], "_old_forward": new.forward}
        new.__dict__.update(hooked | {"forward": functools.update_wrapper(rebound, new.forward)})


def has_accelerates_hook(module: nn.Module) -> bool:
    """Returns whether accelerate's hook runs around the module's forward."""
    own = vars(module)
    return "_hf_hook" in own and "_old_forward" in own and isinstance(own.get("forward"), functools.partial)


def own_forward(module: nn.Module) -> Any:
    """Returns a forward that was put into the instance, leaving out accelerate's wrapper. None: the class's forward is
    called, or the module is compiled code."""
    if isinstance(module, torch.jit.ScriptModule):  # the class of a compiled module has no forward
        return None
    own: dict[str, Any] = vars(module)
    forward = own["_old_forward"] if has_accelerates_hook(module) else own.get("forward")
    function, owner = getattr(forward, "__func__", None), getattr(forward, "__self__", None)
    is_stock = function is type(module).forward and owner is module  # the class's forward, bound to the instance
    return None if is_stock else forward


def refuse_own_forward(name: str, module: nn.Module) -> None:
    """Raises InputError if a forward was put into a module's instance: it would hide the forward of the class that the
    swap gives the module."""
    if own_forward(module) is not None:
        raise InputError(
            f"{name or 'the model'}, a {type(module).__name__}, has a forward of its own, which was put into the "
            "instance and would be called instead of the scheme's: swap first, then patch it"
        )


def refuse_passed_over(name: str, module: nn.Module, scheme: str) -> None:
    """Raises InputError if a module has hooks that would never run: under `scheme`, the block does not call it."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise InputError(
            f"{name}, a {type(module).__name__}, has hooks, and the block does not call it with {scheme}: remove them "
            "first"
        )


def reclass(module: nn.Module, kind: type[nn.Module]) -> None:
    """Changes a module's class to `kind`. If accelerate has put a copy of the class's forward into the instance, it is
    replaced by that of `kind`."""
    has_stock_forward = own_forward(module) is None
    module.__class__ = kind
    if has_stock_forward:
        rebind_forward(module)


def rebind_forward(module: nn.Module) -> None:
    """Replaces the copy of a class's forward in the instance, if there is one, by the forward of the present class.
    accelerate stores that copy as `_old_forward` or, once its hook was removed, as `forward`."""
    name = "_old_forward" if has_accelerates_hook(module) else "forward"
    if name in vars(module):
        module.__dict__[name] = types.MethodType(type(module).forward, module)


def refuse_offloaded(model: nn.Module) -> None:
    """Raises InputError if accelerate offloads some of the model's weights; names the first module."""
    for name, module in model.named_modules():
        hook = vars(module).get("_hf_hook")
        if any(getattr(part, "offload", False) for part in (hook, *getattr(hook, "hooks", ()))):
            raise InputError(
                f"accelerate offloads {name or 'the model'} and loads its weights by their names at each call, so new "
                "parameters would stay empty: swap first, then dispatch; or take the hooks off with "
                "accelerate.hooks.remove_hook_from_submodules(model)"
            )


@functools.cache
def _names_in(kind: Any) -> frozenset[str]:
    """Returns all names of attributes and globals that occur in the code of a class's functions."""
    names: set[str] = set()
    for parent in kind.__mro__:
        if parent is nn.Module:
            break
        for function in vars(parent).values():
            # the code of a function or of a property's getter; nested functions are among its constants
            function_code = getattr(inspect.unwrap(getattr(function, "fget", None) or function), "__code__", None)
            codes = [] if function_code is None else [function_code]
            while codes:
                code = codes.pop()
                names.update(code.co_names)
                codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(names)


def _is_plain(value: Any) -> bool:
    """Returns whether a value is a number, string, dtype, device or None, or a collection of such values."""
    if isinstance(value, tuple | list | set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


# The functions below concern parameters.


def hand_over_parameter(name: str, old: Tensor, new: Tensor) -> None:
    """Gives the parameter `new`, which replaces `old`, the attributes of `old` and, if the shapes are equal, its
    gradient hooks.

    `name`: the parameter's path, for messages.

    Errors: InputError if something cannot be handed over: a hook after accumulation, which belongs to the optimizer of
    `old`; gradient hooks, or attributes that depend on the shape, if the shapes differ; attributes that are no plain
    values.
    """
    refuse_held(name, old, new)
    hand_over_plain(old, new)
    if old.shape == new.shape:
        for attribute in _OF_SHAPE:
            if attribute in vars(old):
                setattr(new, attribute, getattr(old, attribute))
        if old._backward_hooks:
            new._backward_hooks = old._backward_hooks  # one dictionary, so that handles remove it from both


def hand_over_plain(old: Tensor, new: Tensor) -> None:
    """Copies the attributes of `old` that are plain values to `new`: `_no_weight_decay`, `sequence_parallel`, …"""
    for name, value in vars(old).items():
        if _is_plain(value) and not name.startswith("_dynamo"):  # Dynamo's marks belong to one tensor
            setattr(new, name, value)


def refuse_held(name: str, old: Tensor, new: Tensor) -> None:
    """Raises InputError if the parameter `old` has a hook or attribute that `new` in its place cannot have."""
    refuse_hooked(name, old)
    # `held`: the first thing that cannot be handed over, for the message; "": all can
    held = "" if old.shape == new.shape or not old._backward_hooks else "a gradient hook (register_hook)"
    for attribute, value in vars(old).items():
        # plain values are copied, and Dynamo's marks are left behind
        is_plain_or_dynamos = _is_plain(value) or attribute.startswith("_dynamo")
        if not is_plain_or_dynamos and not (attribute in _OF_SHAPE and old.shape == new.shape):
            held = held or f"the attribute {attribute}, a {type(value).__name__}"
    if held:
        change = "" if old.shape == new.shape else f" of shape {tuple(new.shape)} instead of {tuple(old.shape)}"
        raise InputError(
            f"{name} has {held}, which the parameter{change} in its place cannot take over: remove it first, and set "
            "it again afterwards"
        )


def refuse_hooked(name: str, parameter: Tensor) -> None:
    """Raises InputError if a parameter has a hook that runs after its gradient is accumulated, or an optimizer of
    torch's `_apply_optimizer_in_backward`."""
    own_optimizer = hasattr(parameter, "_in_backward_optimizers")
    if own_optimizer or getattr(parameter, "_post_accumulate_grad_hooks", None):
        what = "an optimizer" if own_optimizer else "a hook of register_post_accumulate_grad_hook, perhaps an optimizer"
        raise InputError(
            f"{name} has {what} in the backward pass, and new parameters would have none and stay untrained: remove it "
            "first, and register it again afterwards"
        )


def mark_new(stack: nn.Module, existing: set[Any], block: nn.Module, like: Tensor | None) -> None:
    """Marks the modules and parameters of a stack that are new, that is, not in `existing`. Modules are marked as
    initialised if `block` is, since transformers' `init_weights()` would otherwise reset their parameters (norms to 1,
    Gemma's to 0). Parameters get the plain attributes of the parameter `like`; None: they get none."""
    if getattr(block, "_is_hf_initialized", False):
        for module in stack.modules():
            if module not in existing:
                module.__dict__["_is_hf_initialized"] = True
    for parameter in () if like is None else stack.parameters():
        if parameter not in existing:
            hand_over_plain(like, parameter)  # type: ignore[arg-type]
