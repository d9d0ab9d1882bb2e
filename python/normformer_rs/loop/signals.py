"""Makes SIGTERM and SIGHUP act like Ctrl-C: Slurm, Kubernetes and a closing terminal send these two."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Stops:
    """The signal handler within `as_ctrl_c`: counts the signals, and keeps the wish to stop until `ask` raises it."""

    def __init__(self, outside: int) -> None:
        self.heard = 0
        self.held = 0
        self.wish: str | None = None
        """The first signal's name. It stays, because some code may swallow the exception that the signal raises."""
        self.outside = outside
        """The number of stack frames around the work."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.heard += 1
        if self.heard == 2:
            return
        self.wish = signal.Signals(number).name
        if self.heard == 1:
            if self.held:
                return
            importer = _importer(frame, self.outside)
            if importer is not None:
                _ask_after(importer)
                return
        raise KeyboardInterrupt(self.wish)


_stops: _Stops | None = None


@contextlib.contextmanager
def as_ctrl_c(ends_process: bool = False) -> Iterator[None]:
    """Makes each of the signals raise KeyboardInterrupt inside the block, so that a run saves before it ends.

    A launcher repeats the signal that the terminal has already sent to its processes. So the second one is ignored: it
    would raise inside the work that saves and reports. The third raises again, for a user who does not want to wait.
    Inside an import the first one raises at the import's end, because torch's import, and others, swallow the
    exception.

    A handler that the program has set itself stays, and so does nohup's choice to ignore SIGHUP. Python delivers
    signals only to the main thread: in another one nothing changes.

    Args:
        ends_process: the process ends with the block, so the handlers stay, because a second signal may come until
            then.
    """
    global _stops
    if not _is_main() or _stops is not None:
        yield
        return
    stops = _stops = _Stops(len(_frames(sys._getframe())) - 3)  # minus this frame, contextlib's, and the work's own
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    before = {number: b for number, b in before.items() if b in (signal.SIG_DFL, signal.default_int_handler)}
    for number in before:
        signal.signal(number, stops)
    try:
        yield
    finally:
        if not ends_process:
            for number, handler in before.items():
                if signal.getsignal(number) is stops:  # unless another handler has been set meanwhile
                    signal.signal(number, handler)
            _stops = None


def ask() -> None:
    """Raises KeyboardInterrupt if a signal has come before, even if its own exception was swallowed."""
    if _stops is not None and _stops.wish is not None and _is_main():
        raise KeyboardInterrupt(_stops.wish)


def first_signal() -> signal.Signals:
    """Returns the first signal that came inside `as_ctrl_c`; SIGINT if none did, as after another rank's stop."""
    wish = _stops.wish if _stops is not None else None
    return signal.SIGINT if wish is None else signal.Signals[wish]


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delays the first signal inside the block until an `ask` or the block's end, for work that an exception would
    leave half done."""
    stops = _stops
    if stops is None or not _is_main():
        yield
        return
    stops.held += 1
    try:
        yield
    finally:
        stops.held -= 1
    if not stops.held:
        ask()


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Marks a part of `held` work that a signal may interrupt, also one that is waiting: functions of the user's."""
    stops = _stops
    if stops is None or not _is_main():
        yield
        return
    ask()
    held, stops.held = stops.held, 0
    try:
        yield
    finally:
        stops.held = held


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Returns the frame and its callers."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _importer(frame: FrameType | None, outside: int) -> FrameType | None:
    """Returns the frame of the outermost import that the frame is part of, without the `outside` outermost frames."""
    frames = _frames(frame)
    inside = frames[: len(frames) - outside]
    imports = [i for i, f in enumerate(inside) if f.f_code.co_filename.startswith("<frozen importlib._bootstrap")]
    return inside[imports[-1] + 1] if imports and imports[-1] + 1 < len(inside) else None


def _ask_after(frame: FrameType) -> None:
    """Calls `ask` as soon as the frame itself continues. Python calls a frame's trace function only if some trace is
    set."""
    before = sys.gettrace()

    def asks(*_: Any) -> None:
        frame.f_trace = None
        sys.settrace(before)
        ask()

    frame.f_trace = asks
    sys.settrace(lambda *_: None)
