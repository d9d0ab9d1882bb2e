"""The processes that train one model together; torchrun starts them."""

import atexit
import os
from typing import NamedTuple

import torch
import torch.distributed as dist

from .. import _core
from ..errors import InputError


class Rank(NamedTuple):
    """A process's place in a group of torch.distributed."""

    group: str
    """The group's name, under which torch's collectives find it."""
    rank: int
    size: int


def rank_in(group: "dist.ProcessGroup | None" = None) -> Rank | None:
    """Returns this process's place in `group` (default: all processes); None if the process is alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if group is None else group
    if group is None or group.size() == 1:
        return None
    return Rank(group.group_name, group.rank(), group.size())


def group_name(group: "dist.ProcessGroup | None" = None) -> str:
    """Registers a group with the operators and returns its name; "" if the process is alone."""
    place = rank_in(group)
    if place is None:
        return ""
    _core.join_group(*place)
    return place.group


def world(device: str) -> Rank | None:
    """Returns this process's place in the existing group, or in a new one if torchrun started the process.

    A new group stays until the process ends. Otherwise, in a second training, a process would look for the second group
    while a slower process still uses the first. The backend is Gloo on the CPU and NCCL on CUDA (each process uses the
    device of its LOCAL_RANK). Errors: InputError if torchrun's variables are incomplete.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if not size.isdecimal():
        raise InputError(f"WORLD_SIZE must be a number of processes, got {size!r}: start with torchrun, or unset it")
    if int(size) > 1 and not dist.is_initialized():
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            problem = f"WORLD_SIZE is set, {', '.join(missing)} is not"
            raise InputError(f"{problem}: start with torchrun, or unset WORLD_SIZE")
        on_cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
        if on_cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if on_cuda else "gloo")
        atexit.register(_leave)
    return rank_in()


def _leave() -> None:
    """Leaves the group at the end of the process, if there still is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
