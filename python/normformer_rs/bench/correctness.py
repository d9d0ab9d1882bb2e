"""Checks correctness on a GPU: runs the operators' tests, some also under compute-sanitizer, and compares training
losses with the CPU's."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np

from .figures import Figures
from .training import TINY, Precision, history

SUITES = (
    "cuda/test_cuda.py",
    "operators/test_kernels.py",
    "operators/test_operators.py",
    "norms/test_norms.py",
    "norms/test_norm_modules.py",
)
FEW = 280
"""The number of sentences. It is small, so that an epoch has few batches, and most of the ten updates are replayed from
CUDA graphs."""
ALLOWED: dict[Precision, float] = {"f32": 1e-4, "bf16": 3e-2}
"""The largest allowed difference of a training loss, in nats per token."""


def losses(figures: Figures, device: str) -> None:
    """Measures the largest difference between ten training losses on the device and on the CPU."""
    for precision, allowed in ALLOWED.items():
        what = f"ten losses as on the CPU, {precision}"
        with figures.attempt("losses", what):
            runs = (history(TINY, d, updates=10, precision=precision, count=FEW) for d in (device, "cpu"))
            on_device, on_cpu = (run.loss for run in runs)
            difference = float(np.abs(on_device - on_cpu).max())
            figures.add("losses", what, difference, "largest difference", allowed, most=True)


def tests(figures: Figures, folder: Path, device: str) -> None:
    """Runs the suites of operator tests on the device. They run in parallel, because they spend most of their time
    compiling kernels on the CPU."""
    threads = str(max(1, (os.cpu_count() or 1) // len(SUITES)))

    def run(suite: str) -> tuple[int, Path]:
        """Runs a suite. Returns pytest's exit status and the log's path."""
        log = figures.folder / f"{Path(suite).stem}.log"
        return pytest(folder / suite, device, log, OMP_NUM_THREADS=threads), log

    with ThreadPoolExecutor(len(SUITES)) as pool:
        runs = {pool.submit(run, suite): suite for suite in SUITES}
        for running in as_completed(runs):
            what = f"tests/{runs[running]} on the device"
            with figures.attempt("tests", what):
                status, log = running.result()
                # Status 1 means that tests failed; the last line of the log says how many.
                crashed = f"exit {status}: " if status not in (0, 1) else ""
                figures.add(
                    "tests", what, crashed + (log.read_text().splitlines() or ["no output"])[-1].strip("= "), ""
                )


def sanitized(figures: Figures, folder: Path, device: str, tool: str) -> None:
    """Runs a selection of the tests, with some for each kernel, under a tool of compute-sanitizer. torch's caching
    allocator is off, because it would hide writes beside a tensor. `tool` is such as memcheck or racecheck."""
    with figures.attempt(tool, "compute-sanitizer"):
        sanitizer = shutil.which("compute-sanitizer")
        if sanitizer is None:
            raise FileNotFoundError("compute-sanitizer is not on PATH")
        # API errors are not reported, because torch makes some driver calls that it expects to fail.
        prefix = [sanitizer, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9"]
        chosen = ["-k", "either_kind or from_one_side or late_rows or relu or cross_entropy or test_adam"]
        log = figures.folder / f"{tool}.log"
        status = pytest(folder / SUITES[0], device, log, prefix, chosen, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        if "Device not supported" in log.read_text():
            raise RuntimeError("Device not supported")
        # 9 is the exit code that the prefix asks for.
        outcomes = {0: "clean", 9: f"errors: see {log.name}"}
        figures.add(tool, "compute-sanitizer", outcomes.get(status, f"exit {status}: see {log.name}"), "")


def pytest(
    tests: Path, device: str, log: Path, before: Sequence[str] = (), chosen: Sequence[str] = (), **environment: str
) -> int:
    """Runs tests on a device and returns pytest's exit status. Their output is written to the log while they run.
    `before` are words before the command, such as a tool that runs it; `chosen` are options of pytest."""
    if not tests.exists():
        raise FileNotFoundError(f"{tests} is not there: it is among the project's tests")
    environment = {"NORMFORMER_RS_TEST_DEVICE": device, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
    options = ["-q", "--maxfail=20", "-p", "no:cacheprovider", "-m", "device and not cpu", *chosen]
    command = [*before, sys.executable, "-m", "pytest", str(tests), *options]
    with log.open("w") as file:
        return subprocess.run(command, env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT).returncode
