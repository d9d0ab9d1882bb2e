"""Draws of initial values that leave torch's generators as they are."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _generators(device: torch.device | str | None) -> list[torch.Generator]:
    """Returns torch's generators of the CPU and of the device, which is torch's default if it is None."""
    device = torch.get_default_device() if device is None else torch.device(device)
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()  # before that, there are no generators
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


@contextmanager
def drawn_apart(device: torch.device | str | None, *where: Any) -> Iterator[None]:
    """Inside the block torch's generators of the CPU and of the device start anew, from their states and `where`, which
    tells parts apart that are drawn one after the other. After it they are as they were, so that parameters which a
    scheme or an option adds do not shift the draws of the others."""
    generators = _generators(device)
    states = [generator.get_state() for generator in generators]
    try:
        for generator, state in zip(generators, states, strict=True):
            text = bytes(state.tolist()) + repr(where).encode()
            generator.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:7], "little"))
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def move_on(device: torch.device | str | None) -> None:
    """Moves torch's generators on by one number, whatever the scheme. The next module, if its parameters are all drawn
    apart, then draws others."""
    for generator in _generators(device):
        torch.rand((), generator=generator, device=generator.device)
