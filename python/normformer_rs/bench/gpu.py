"""Correctness, bandwidth and training speed on one CUDA device, with no Rust, no compiler and no network needed there.

Each section runs in its own process with a time limit. It writes each figure to gpu.csv as soon as it is measured (one
row per figure, with its bound), and its output to gpu.log. Several calls may share a folder: a figure that is measured
again replaces the earlier one. If a machine lacks something, the row reads "unmeasured", with the reason.

Bandwidths count the data that must move (forward: read x, write y; backward: read dy and x, write dx) and are shares of
the best rate of device-to-device copies of the same buffers, which are larger than any cache. Times are medians.

Compiled kernels are stored in the folder that NORMFORMER_RS_CACHE names, or in ~/.cache. A later call with the same
folder compiles none.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from . import correctness, kernels, training
from .figures import Figures, line


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the command line, except --only, --limit and --here."""

    output: Path
    tests: Path
    device: str
    megabytes: int
    updates: int


class Section(NamedTuple):
    """A group of measurements that runs in a process of its own."""

    what: str
    """A description of the measurement, for the help text."""
    limit: float
    """The time limit in seconds."""
    run: Callable[[Figures, Options], None]


def compiled(figures: Figures, options: Options) -> None:
    """Measures torch.compile of a norm, and of a model in training."""
    kernels.compiled(figures, options.device, options.megabytes)
    training.compiled(figures, options.device, options.updates)


def sanitized(tool: str) -> Callable[[Figures, Options], None]:
    """Returns the function that runs tests under a tool of compute-sanitizer."""
    return lambda f, o: correctness.sanitized(f, o.tests, o.device, tool)


# The first sections are quick and seldom fail, so that a call that is stopped early has measured them. In the lambdas f
# are the figures, o the options.
SECTIONS = {
    "losses": Section("ten training losses against the CPU's", 120, lambda f, o: correctness.losses(f, o.device)),
    "graph": Section("a small norm in a CUDA graph", 60, lambda f, o: kernels.small(f, o.device)),
    "bandwidth": Section("norms and the residual step", 120, lambda f, o: kernels.bandwidth(f, o.device, o.megabytes)),
    "training": Section(
        "transformer-base in the training loop", 180, lambda f, o: training.ours(f, o.device, o.updates)
    ),
    "reference": Section("torch.nn.Transformer", 120, lambda f, o: training.reference(f, o.device, o.updates)),
    "tests": Section("the operators' tests", 420, lambda f, o: correctness.tests(f, o.tests, o.device)),
    "memcheck": Section("some of them under compute-sanitizer", 240, sanitized("memcheck")),
    "racecheck": Section("the same by its tool for races", 240, sanitized("racecheck")),
    "compiled": Section("torch.compile of a norm and of torch.nn.Transformer", 420, compiled),
}


def measure(options: Options, sections: Sequence[str], limit: float | None = None) -> None:
    """Measures each section in its own process. A section is stopped after `limit` seconds, or after its own limit if
    `limit` is None."""
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit(
            "no CUDA device is there, or torch was built without CUDA: --device cpu shows the program at work"
        )
    figures = Figures(options.output, options.device)
    for section in sections:
        if failure := apart(section, options, limit or SECTIONS[section].limit):
            figures.add(section, "whole section", f"unmeasured: {failure}", "")
        for row in figures.rows(section):
            print(line(row), flush=True)
        if section in ("training", "reference", "compiled"):
            training.compare(figures)
        try:
            figures.draw()
        except ImportError as error:
            print(f"no gpu.png: {error}")


def here(options: Options, sections: Sequence[str]) -> None:
    """Measures the sections in this process, without time limits."""
    figures = Figures(options.output, options.device)
    for section in sections:
        figures.forget_unmeasured(section)
        start = time.perf_counter()
        with figures.attempt(section, "whole section"):
            SECTIONS[section].run(figures, options)
            figures.add(section, "whole section", time.perf_counter() - start, "s")


def apart(section: str, options: Options, limit: float) -> str:
    """Measures a section in a new process, whose output goes to gpu.log. Returns how the process failed, or "" if it
    did not fail."""
    log = options.output / "gpu.log"
    with log.open("a") as file:
        print(f"==== {section}", file=file, flush=True)
        child = subprocess.Popen(
            command(section, options), stdout=file, stderr=subprocess.STDOUT, preexec_fn=os.setpgrp
        )
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            return f"stopped after {limit:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # ends the child and all processes that it has started
            child.wait()
    if status < 0:  # the process died by the signal with that number
        return signal.Signals(-status).name
    return f"exit {status}: {log.read_text().splitlines()[-1][:200]}" if status else ""


def command(section: str, options: Options) -> list[str]:
    """Returns the command that measures a section in its own process."""
    given = [f"--{name}={value}" for name, value in dataclasses.asdict(options).items()]
    return [sys.executable, "-m", "normformer_rs.bench", "gpu", *given, f"--only={section}", "--here"]
