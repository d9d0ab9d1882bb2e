"""Ctrl-C, SIGTERM and SIGHUP end work alike: Slurm, Kubernetes and a closing terminal send the last two."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Stops:
    """The handler within `as_ctrl_c`: counts the signals, and keeps the one that waits for `held` work to end."""

    def __init__(self) -> None:
        self.heard = 0
        self.held = 0
        self.waiting: str | None = None

    def __call__(self, number: int, _: FrameType | None) -> None:
        self.heard += 1
        if self.heard == 2:
            return
        if self.heard == 1 and self.held:
            self.waiting = signal.Signals(number).name
            return
        self.waiting = None
        raise KeyboardInterrupt(signal.Signals(number).name)


_stops: _Stops | None = None


@contextlib.contextmanager
def as_ctrl_c(ends_process: bool = False) -> Iterator[None]:
    """Within, each of the signals raises KeyboardInterrupt, so that a run saves before it ends.

    A launcher repeats the signal that the terminal has sent to its processes, too. So the second one is ignored: it
    would raise within the work that saves and says so. The third raises again, for somebody who does not want to wait.

    A handler that somebody has set stays, and so does nohup's choice to ignore SIGHUP. Python delivers signals to the
    main thread alone: in another one nothing changes.

    Args:
        ends_process: the process ends with the block, so the handlers stay: a second signal may come until then.
    """
    global _stops
    if threading.current_thread() is not threading.main_thread() or _stops is not None:
        yield
        return
    stops = _stops = _Stops()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    before = {number: b for number, b in before.items() if b in (signal.SIG_DFL, signal.default_int_handler)}
    for number in before:
        signal.signal(number, stops)
    try:
        yield
    finally:
        if not ends_process:
            for number, handler in before.items():
                if signal.getsignal(number) is stops:  # or somebody has set another meanwhile
                    signal.signal(number, handler)
            _stops = None


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Within, the first signal waits for the end: an exception amid a queue's work leaves the queue locked for good."""
    stops = _stops
    if stops is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    stops.held += 1
    try:
        yield
    finally:
        stops.held -= 1
        if not stops.held and stops.waiting is not None:
            name, stops.waiting = stops.waiting, None
            raise KeyboardInterrupt(name)
