"""Makes SIGTERM and SIGHUP act like Ctrl-C. Slurm and Kubernetes send SIGTERM; a terminal that closes sends SIGHUP."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Stops:
    """The signal handler inside `as_ctrl_c`. It counts signals, and remembers that the user wants to stop until `ask`
    raises KeyboardInterrupt."""

    def __init__(self, outside: int) -> None:
        self.count = 0
        """The number of signals that have arrived."""
        self.held = 0
        """The number of `held` blocks that are running. While it is positive, the first signal raises nothing."""
        self.requested_by: str | None = None
        """The name of the last signal that was not ignored, None before the first. It is stored, because some code may
        swallow the exception that the handler raises."""
        self.outside = outside
        """The number of the outermost stack frames that do not belong to the block of `as_ctrl_c`."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal that arrives while `frame` runs."""
        self.count += 1
        if self.count == 2:  # the second signal is ignored: probably a launcher has repeated the first
            return
        self.requested_by = signal.Signals(number).name
        if self.count == 1:  # only the first signal waits; a third one raises at once
            if self.held:  # `ask` raises the exception later
                return
            importer = _importer(frame, self.outside)
            if importer is not None:
                _ask_after(importer)
                return
        raise KeyboardInterrupt(self.requested_by)


_stops: _Stops | None = None
"""The handler of the running `as_ctrl_c` block; None outside such a block."""


@contextlib.contextmanager
def as_ctrl_c(ends_process: bool = False) -> Iterator[None]:
    """Makes each of the signals raise KeyboardInterrupt inside the block, so that a run saves before it ends.

    A launcher repeats the signal that the terminal has already sent to its processes. So the second one is ignored: it
    would raise inside the work that saves and reports. The third raises again, for a user who does not want to wait.
    Inside an import the first one raises at the import's end, because torch's import, and others, swallow the
    exception.

    A handler that the program has set itself stays, and so does nohup's choice to ignore SIGHUP. In a thread other than
    the main one nothing changes, because Python delivers signals only to the main thread.

    Args:
        ends_process: True if the process ends after the block. Then the handlers stay, because a second signal may
            still come before the end.
    """
    global _stops
    if not _is_main() or _stops is not None:
        yield
        return
    # The three innermost frames are those of this function, of contextlib, and of the caller, which runs the block. All
    # other frames are outside.
    stops = _stops = _Stops(len(_frames(sys._getframe())) - 3)
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    replaced = {number: handler for number, handler in handlers.items() if handler in defaults}
    for number in replaced:
        signal.signal(number, stops)
    try:
        yield
    finally:
        if not ends_process:
            for number, handler in replaced.items():
                if signal.getsignal(number) is stops:  # a handler that was set inside the block stays
                    signal.signal(number, handler)
            _stops = None


def ask() -> None:
    """Raises KeyboardInterrupt if a signal has come since `as_ctrl_c` began, even if its exception was swallowed."""
    if _stops is not None and _stops.requested_by is not None and _is_main():
        raise KeyboardInterrupt(_stops.requested_by)


def first_signal() -> signal.Signals:
    """Returns the signal that came inside `as_ctrl_c`. Returns SIGINT if none came, for example because the run stops
    at the request of another rank."""
    name = _stops.requested_by if _stops is not None else None
    return signal.SIGINT if name is None else signal.Signals[name]


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delays the exception of the first signal until `ask` is called or the block ends. It protects work that an
    exception would leave half done."""
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
    """Marks a part of a `held` block that signals may interrupt, such as a user's callback. A signal that has been
    delayed raises at the start of the part."""
    stops = _stops
    if stops is None or not _is_main():
        yield
        return
    ask()
    held_blocks, stops.held = stops.held, 0
    try:
        yield
    finally:
        stops.held = held_blocks


def _is_main() -> bool:
    """True in the main thread, the only one to which Python delivers signals."""
    return threading.current_thread() is threading.main_thread()


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Returns the frame and its callers, the innermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _importer(frame: FrameType | None, outside: int) -> FrameType | None:
    """Returns the frame that runs the outermost import statement above `frame`, or None if there is none. The `outside`
    outermost frames do not count."""
    frames = _frames(frame)
    block_frames = frames[: len(frames) - outside]
    # The indices of importlib's frames. Frames are listed from the innermost one, so the last index is the outermost.
    imports = [i for i, f in enumerate(block_frames) if f.f_code.co_filename.startswith("<frozen importlib._bootstrap")]
    # The caller of importlib's outermost frame runs the import statement.
    return block_frames[imports[-1] + 1] if imports and imports[-1] + 1 < len(block_frames) else None


def _ask_after(frame: FrameType) -> None:
    """Calls `ask` as soon as the frame itself continues, by setting its trace function. Python calls a frame's trace
    function only while `sys.settrace` has set some function, so a function that does nothing is set."""
    before = sys.gettrace()

    def ask_once(*_: Any) -> None:
        frame.f_trace = None
        sys.settrace(before)
        ask()

    frame.f_trace = ask_once
    sys.settrace(lambda *_: None)
