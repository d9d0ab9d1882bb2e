"""The emulated device, and processes in which it is the only one there is."""

import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

HERE = Path(__file__).parent


@cache
def libraries() -> Path:
    """A folder with a libcuda.so.1 and a libnvrtc.so that run kernels on the CPU."""
    folder = Path(mkdtemp(prefix="cuda-emulator-"))
    common = ["g++", "-O1", "-g", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    header = f'-DHOST_HEADER="{HERE / "host.hpp"}"'
    jobs = [
        subprocess.Popen([*common, str(HERE / source), "-o", str(folder / name), header, "-ldl"])
        for source, name in [("driver.cpp", "libcuda.so.1"), ("compiler.cpp", "libnvrtc.so.13")]
    ]
    assert [job.wait() for job in jobs] == [0, 0], "the emulator does not compile"
    return folder


def environment(cache_folder: Path, **more: str) -> dict[str, str]:
    """What a process needs to find the emulated device; `more` as driver.cpp and compiler.cpp list it."""
    return {"NORMFORMER_RS_CUDA_LIBRARIES": str(libraries()), "NORMFORMER_RS_CACHE": str(cache_folder), **more}


def run(work: Callable[..., Any], *arguments: Any, env: dict[str, str]) -> Any:
    """work(*arguments) in a fresh process with these variables: its result, or AssertionError with its traceback."""
    context = multiprocessing.get_context("forkserver")
    # Imported once; every process starts from there.
    context.set_forkserver_preload(["cuda_emulator.cases"])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(there, work, arguments, env))
    process.start()
    there.close()
    try:
        succeeded, result = here.recv()
    except EOFError:
        succeeded, result = False, "the process died"
    process.join()
    assert succeeded, result
    return result


def _child(connection: Any, work: Callable[..., Any], arguments: tuple, env: dict[str, str]) -> None:
    os.environ.update(env)
    try:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        connection.send((True, work(*arguments)))
    except BaseException:
        connection.send((False, traceback.format_exc()))
    sys.stdout.flush()
    os._exit(0)
