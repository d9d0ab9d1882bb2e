"""Processes that tests start."""

import contextlib
import os
import signal
import subprocess


def errors_of(process: subprocess.Popen, seconds: float = 150) -> str:
    """Returns the error output of a process when it has ended. One that does not end in time is killed, with its group
    if it leads one: it would train on beside all later tests."""
    try:
        return process.communicate(timeout=seconds)[1]
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(process.pid) == process.pid:
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
