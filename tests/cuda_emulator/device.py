"""The emulated device, and processes in which it is the only one there is."""

import atexit
import multiprocessing
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

HERE = Path(__file__).parent


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
    return folder


def environment(cache_folder: Path, **more: str) -> dict[str, str]:
    """What a process needs to find the emulated device; `more` as driver.cpp and compiler.cpp list it."""
    return {"NORMFORMER_RS_CUDA_LIBRARIES": str(libraries()), "NORMFORMER_RS_CACHE": str(cache_folder), **more}


def sanitized(code: str, env: dict[str, str]) -> subprocess.CompletedProcess:
    """Python code on the emulated device under the address sanitizer, which sees each access to memory that torch has
    not allocated."""
    found = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout
    sanitizer = {"LD_PRELOAD": found.strip(), "ASAN_OPTIONS": "detect_leaks=0", "MOCK_FLAGS": "-fsanitize=address"}
    path = os.pathsep.join(filter(None, sys.path))
    setup = "import torch; torch.set_num_threads(1)\nfrom cuda_emulator import cases\n"
    return subprocess.run(
        [sys.executable, "-c", setup + code],
        env={**os.environ, **env, **sanitizer, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


@cache
def _server() -> multiprocessing.context.ForkServerContext:
    """Where processes fork from, with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cuda_emulator.cases"])
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
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        # New tensors are full of NaN: what a kernel leaves unwritten shows.
        torch._C._set_deterministic_algorithms(True)
        connection.send((True, work(*arguments)))
    except BaseException:
        connection.send((False, traceback.format_exc()))
    sys.stdout.flush()
    os._exit(0)
