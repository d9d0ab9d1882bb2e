"""SIGTERM and SIGHUP end work as Ctrl-C does: Slurm, Kubernetes and a closing terminal send them."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def as_ctrl_c() -> Iterator[None]:
    """Within, both signals raise KeyboardInterrupt, so that a run saves before it ends.

    A handler that somebody has set stays, and so does nohup's choice to ignore SIGHUP. Python delivers signals to the
    main thread alone: in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        for number in taken:
            if signal.getsignal(number) is _stop:  # or somebody has set another meanwhile
                signal.signal(number, signal.SIG_DFL)


def _stop(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)
