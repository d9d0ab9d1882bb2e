"""The emulated device, and processes in which it is the only one there is."""

import atexit
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

HERE = Path(__file__).parent

STORE = HERE.parents[1] / ".pytest_cache" / "d" / "emulated-kernels"
"""Kernels compiled by earlier processes, which `pytest --cache-clear` deletes."""
STORED_FOR = 14 * 24 * 3600
"""Seconds that a kernel stays there after its last use."""


@cache
def libraries() -> Path:
    """A folder with a libcuda.so.1 and a libnvrtc.so that run kernels on the CPU."""
    folder = Path(mkdtemp(prefix="cuda-emulator-"))
    atexit.register(shutil.rmtree, folder)
    common = ["g++", "-O1", "-g", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    header = f'-DHOST_HEADER="{HERE / "host.hpp"}"'
    jobs = [
        subprocess.Popen([*common, str(HERE / source), "-o", str(folder / name), header, "-ldl"])
        for source, name in [("driver.cpp", "libcuda.so.1"), ("compiler.cpp", "libnvrtc.so.13")]
    ]
    assert [job.wait() for job in jobs] == [0, 0], "the emulator does not compile"
    _forget_old_kernels()
    return folder


def _forget_old_kernels() -> None:
    for kernel in STORE.glob("*"):
        with suppress(FileNotFoundError):  # another process did it
            if time.time() - kernel.stat().st_mtime > STORED_FOR:
                kernel.unlink()


def environment(cache_folder: Path, **more: str) -> dict[str, str]:
    """What a process needs to find the emulated device, whose kernels are taken as they are; `more` as driver.cpp and
    compiler.cpp list it."""
    return {
        "NORMFORMER_RS_CUDA": os.environ.get("NORMFORMER_RS_CUDA", "trust"),
        "NORMFORMER_RS_CUDA_LIBRARIES": str(libraries()),
        "NORMFORMER_RS_CACHE": str(cache_folder),
        "MOCK_STORE": str(STORE),
        **more,
    }


class Server:
    """A process that runs cases on the emulated device, each in a fork that needs no warming up.

    `is_sanitized`: under the address sanitizer, which sees each access to memory that torch has not allocated.
    """

    def __init__(self, is_sanitized: bool = False) -> None:
        more = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if is_sanitized:
            found = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
            more |= {"LD_PRELOAD": found.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
            more |= {"MOCK_FLAGS": "-fsanitize=address"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from cuda_emulator import server; server.serve()"],
            env={**os.environ, **more},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, detector: int, env: dict[str, str]) -> str:
        """What goes wrong in the call DETECTORS[detector] with these variables; "" where it passes. Kernels under the
        sanitizer need a cache of their own."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([detector, env]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate("")


@cache
def _server() -> multiprocessing.context.ForkServerContext:
    """Where processes fork from, with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"cuda_emulator.{name}" for name in ("cases", "column_cases", "launcher_cases")])
    # The server imports along its own path, and before Python 3.13 nobody tells it ours.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
    return context


def run(work: Callable[..., Any], *arguments: Any, env: dict[str, str]) -> Any:
    """work(*arguments) in a fresh process with these variables: its result, or AssertionError with its traceback."""
    here, there = _server().Pipe(duplex=False)
    process = _server().Process(target=_child, args=(there, work, arguments, env))
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
        connection.send((True, attempt(work, *arguments)))
    except BaseException:
        connection.send((False, traceback.format_exc()))
    sys.stdout.flush()
    os._exit(0)


def attempt(work: Callable[..., Any], *arguments: Any) -> Any:
    """work(*arguments) in this process, from a fixed seed and on one thread."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    # New tensors are full of NaN: what a kernel leaves unwritten shows.
    torch._C._set_deterministic_algorithms(True)
    return work(*arguments)
