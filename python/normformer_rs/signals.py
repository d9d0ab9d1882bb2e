"""Ctrl-C, SIGTERM and SIGHUP end work alike: Slurm, Kubernetes and a closing terminal send the last two."""

import contextlib
import itertools
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_REPEATED = 1


@contextlib.contextmanager
def as_ctrl_c() -> Iterator[None]:
    """Within, each of the signals raises KeyboardInterrupt, so that a run saves before it ends.

    A launcher repeats the signal that the terminal has sent to its processes, too. So the second one is ignored: it
    would raise within the work that saves and says so. The third raises again, for somebody who does not want to wait.

    A handler that somebody has set stays, and so does nohup's choice to ignore SIGHUP. Python delivers signals to the
    main thread alone: in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = itertools.count()

    def stop(number: int, _: FrameType | None) -> None:
        if next(heard) != _REPEATED:
            raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    before = {number: b for number, b in before.items() if b in (signal.SIG_DFL, signal.default_int_handler)}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is stop:  # or somebody has set another meanwhile
                signal.signal(number, handler)
