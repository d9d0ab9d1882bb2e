"""`normformer-rs doctor`: checks the installation on this machine and suggests fixes."""

import argparse
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from .. import text
from . import Command, versions


def parser() -> Command:
    """Returns the help line, the function and the flags of `normformer-rs doctor`."""

    def add(parser: argparse.ArgumentParser) -> None:
        pass  # the command has no flags

    return "Check torch, cores, devices and kernels of this machine, and suggest fixes.", _doctor, add


def _doctor(args: argparse.Namespace) -> None:
    """Prints facts about the installation, then advice, one line for each."""
    text.check_writable(text.STANDARD)
    print(versions.report())
    print(f"compiled for this Python: {', '.join(_cores())}")
    advice = [*_processor()]
    for line, what_to_do in _devices():
        print(line)
        advice += what_to_do
    for line, what_to_do in _kernels():
        print(line)
        advice += what_to_do
    print("\n".join(f"to do: {what}" for what in advice) or "to do: nothing")


def _cores() -> list[str]:
    """Returns the file names of the extension module, one for each version of torch; the one in use is marked."""
    from .. import _core

    used = Path(_core.__file__)
    return [f"{path.name}{' (in use)' if path == used else ''}" for path in sorted(used.parent.glob("_core*.so"))]


def _processor() -> Iterator[str]:
    """Yields advice about the processor and torch's threads."""
    import torch

    from .. import _core

    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    threads = torch.get_num_threads()
    if threads > cores:
        yield f"torch has {threads} threads for {cores} cores: set OMP_NUM_THREADS={cores}"
    # None lets the kernels use the best instruction set that the processor has.
    if platform.machine() == "x86_64" and _core.cpu_level(None) == "baseline":
        yield "the processor has no AVX2: kernels run, several times slower"


def _devices() -> Iterator[tuple[str, list[str]]]:
    """Yields a line about each CUDA device, and advice if its kernels cannot run."""
    import torch

    from .. import _core

    count = torch.cuda.device_count()
    if count == 0:
        yield "CUDA: torch sees no device", []
    for device in range(count):
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        name = f"cuda:{device}, {torch.cuda.get_device_name(device)}, compute capability {capability}"
        try:
            missing = _core.cuda_missing(device)
        except RuntimeError as error:  # an environment variable requires kernels, so their absence is an error
            missing = str(error)
        if missing is None:
            yield f"{name}: kernels run", []
        else:
            yield f"{name}: composed formulas run", [f"{name} has no kernels: {missing}"]


def _kernels() -> Iterator[tuple[str, list[str]]]:
    """Yields, for each device and driver with which kernels were checked, a line with the numbers of right and wrong
    kernels, and advice for each wrong one."""
    from .. import _core

    verdicts_by_device: dict[str, dict[str, list[str]]] = {}
    damaged = 0
    for line in _core.cuda_verdicts():
        match [text.escaped(part) for part in line.split("\t")]:
            case [device, program, options, kernel, ("right" | "wrong") as verdict]:
                kernels = verdicts_by_device.setdefault(device, {"right": [], "wrong": []})
                kernels[verdict].append(f"{program} {options} {kernel}")
            case _:
                damaged += 1
    if damaged:
        yield f"kernels: {damaged} of the kept verdicts' lines are damaged or incomplete, and left out", []
    for device, verdicts in verdicts_by_device.items():
        right, wrong = verdicts["right"], verdicts["wrong"]
        yield (
            f"kernels on {device}: {len(right)} proven right, {len(wrong)} wrong",
            [f"report this, whose formula runs in its place: {kernel} on {device}" for kernel in wrong],
        )
