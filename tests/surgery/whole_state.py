"""A model's whole state, and an interrupt at one line of the package."""

import os
import signal
import sys

import torch

import normformer_rs
from normformer_rs.surgery.whole import HEIRS, SWAPS

PACKAGE = os.path.dirname(normformer_rs.__file__) + os.sep
PLAIN = (bool, int, float, str, bytes, type(None), tuple, list, dict, set, torch.dtype, torch.device)


class Is:
    """Equal to itself alone; a plain value, or a bound method, by `==`."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        a, b = self.value, other.value
        is_plain = type(a) is type(b) and (type(a) in PLAIN or hasattr(a, "__self__"))
        return a is b or (is_plain and not holds_tensor(a) and a == b)

    def __repr__(self):
        return f"{type(self.value).__name__} {self.value if type(self.value) in PLAIN else id(self.value)}"


def holds_tensor(value):
    if isinstance(value, tuple | list | set):
        return any(map(holds_tensor, value))
    return any(map(holds_tensor, value.values())) if isinstance(value, dict) else isinstance(value, torch.Tensor)


def bits(t):
    return t.detach().clone().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def whole_state(model, optimizer=None):
    """Everything about a model that a swap may write, by its path."""
    state = {}
    for path, module in model.named_modules(remove_duplicate=False):
        state[path, "module"], state[path, "class"] = Is(module), type(module)
        for name, value in vars(module).items():
            if isinstance(value, dict):  # parameters, buffers, children and hooks, in order
                state[path, name] = [(key, Is(one)) for key, one in value.items()]
            else:
                state[path, name] = Is({*value}) if isinstance(value, set) else Is(value)
        state[path, "swaps"] = [title for (title,) in SWAPS.get(module, ())]
        config = vars(module).get("config")
        if config is not None:
            state[path, "config's own"] = {name: Is(value) for name, value in vars(config).items()}
        for name, t in (*module._parameters.items(), *module._buffers.items()):
            if t is not None:
                hooks = (
                    None if t._backward_hooks is None else [(key, Is(one)) for key, one in t._backward_hooks.items()]
                )
                own = {key: Is(value) for key, value in vars(t).items()}
                heirs = [heirs.title for heirs in HEIRS.get(t, ())]
                state[path, name, "tensor"] = bits(t), t.requires_grad, t.dtype, Is(t.grad), hooks or None, own, heirs
    if optimizer is not None:
        for i, group in enumerate(optimizer.param_groups):
            state["group", i] = {k: [*map(Is, v)] if isinstance(v, list) else Is(v) for k, v in group.items()}
        state["moments"] = {p: {k: Is(v) for k, v in own.items()} for p, own in optimizer.state.items()}
    state["gradients are recorded"] = torch.is_grad_enabled()
    state["handlers"] = [Is(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    state["random"] = bits(torch.get_rng_state())
    return state


LOST = ("moments", "random")
"""Numbers drawn, and moments of parameters that were exchanged or drawn anew, do not come back with an undo."""


def differences(before, now, but=()):
    """The keys under which two states differ, but for some."""
    keys = [key for key in {**before, **now} if key not in but]
    return [key for key in keys if key not in before or key not in now or before[key] != now[key]]


def keyboard():
    raise KeyboardInterrupt


def memory():
    raise MemoryError


def sigint():
    os.kill(os.getpid(), signal.SIGINT)


class Interrupted:
    """Within, `how` happens once, at the k-th line that the package runs. `lines` counts them."""

    def __init__(self, at=0, how=keyboard):
        self.at, self.how, self.lines, self.place = at, how, 0, None

    def __enter__(self):
        self.traced = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self.traced)

    def trace(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                self.place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                self.how()
        return self.trace
