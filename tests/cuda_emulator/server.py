"""The process behind `device.Server`: a request a line, an answer a line."""

import contextlib
import json
import os
import signal
import sys
import traceback
from tempfile import TemporaryFile

from . import cases, checks, column_cases, device  # noqa: F401  the cases name their detectors

WAITS = 4
"""A process may take so many times the seconds that it may compute."""


def serve() -> None:
    """Answers requests until there are no more."""
    if "libasan" not in os.environ.get("LD_PRELOAD", ""):  # under which no C++ exception may be thrown
        _warm()
    for line in sys.stdin:
        detector, env = json.loads(line)
        with TemporaryFile("w+", errors="replace") as said:
            child = os.fork()
            if child == 0:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                _run(checks.DETECTORS[detector], env)
            _, status = os.waitpid(child, 0)
            said.seek(0)
            answer = f"{said.read()}\n{_how(status)}" if status else ""
        print(json.dumps(answer), flush=True)


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"


def _run(detector: checks.Detector, env: dict[str, str]) -> None:
    os.environ.update(env)
    # Either ends the process, as nothing handles SIGPROF and SIGALRM: one that computes, one that waits. A mutant may
    # overwrite a lock.
    seconds = float(env["MOCK_SECONDS"])
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WAITS * seconds)
    status = 0
    try:
        device.attempt(detector.case, *detector.arguments)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _warm() -> None:
    """Runs each case once without the device, so that torch has made ready what the forks will use."""
    checks.REAL = "cpu"
    for case in {detector.case: detector for detector in checks.DETECTORS}.values():
        with contextlib.suppress(AssertionError, RuntimeError):  # the CPU may have no kernel, and checks targets
            device.attempt(case.case, *case.arguments)
    checks.REAL = None
