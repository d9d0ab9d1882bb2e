"""Tracing of the package's modules: torch.fx records each as one call, like torch.nn's."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy


def records_core() -> bool:
    """True if torch.export records the torch operations that the extension module calls, so that a saved program needs
    no operator of this package. False under Dynamo, which cannot trace into the extension module."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def functionalizes() -> bool:
    """True inside torch.func.functionalize, which rejects other libraries' operators that may write to an argument."""
    top = torch._C._functorch.peek_interpreter_stack()  # the innermost transformation of torch.func
    return top is not None and top.key() == torch._C._functorch.TransformType.Functionalize


Forward = TypeVar("Forward", bound=Callable[..., Any])


def leaf(forward: Forward) -> Forward:
    """Makes `torch.fx.symbolic_trace` record a module's forward as one call instead of tracing through it, and makes
    the forward reject arrays with a clear message.

    Tracers only look for leaves in torch.nn, so the module itself records the call when it is given a Proxy.
    """

    @functools.wraps(forward)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(x, Tensor):
            if isinstance(x, Proxy):
                tracer: Any = x.tracer
                return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)
            # An object with __torch_function__ stands in for a tensor, so the forward may take it.
            if args and not hasattr(x, "__torch_function__"):
                name = f"{type(x).__module__}.{type(x).__name__}".removeprefix("builtins.")
                raise TypeError(
                    f"{type(self).__name__} takes a torch.Tensor, got {name}: torch.as_tensor(x) makes one of arrays"
                )
        return forward(self, *args, **kwargs)

    return cast(Forward, call)
