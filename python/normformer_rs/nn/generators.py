"""Draws of initial values that leave torch's generators as they are."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def drawn_apart(device: torch.device | str | None, *where: Any) -> Iterator[None]:
    """Draws inside the block come from another seed, which follows from the states of torch's generators (of the CPU
    and, if it is CUDA's, of the device) and from `where`. Afterwards the generators are as they were. Thus parameters
    that a scheme or an option adds do not shift the draws of the others. `device`: None for torch's default. `where`
    distinguishes `with` blocks that begin from the same states."""
    generators = _generators(device)
    states = [generator.get_state() for generator in generators]
    text = b"".join(bytes(state.tolist()) for state in states) + repr(where).encode()
    seed = int.from_bytes(hashlib.sha256(text).digest()[:7], "little")  # 7 bytes always fit into an int64
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def move_on() -> None:
    """Advances torch's generator by one number. Otherwise two modules that draw all their parameters apart would begin
    from the same state and be equal."""
    torch.rand((), device="cpu")


def _generators(device: torch.device | str | None) -> list[torch.Generator]:
    """Returns torch's default generators of the CPU and, if the device is CUDA's, of the device."""
    device = torch.get_default_device() if device is None else torch.device(device)
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()  # makes CUDA's generators, if nothing has used CUDA yet
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]
