"""Progress of training on standard error: a bar in a terminal or a notebook, lines of text elsewhere."""

import contextlib
import logging
import math
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

from .._optional import available
from ..text import escaped

SECONDS_BETWEEN_LINES = 10.0


class Progress(Protocol):
    """An observer of a run's events, as `_core.train` reports them."""

    def started(self, event: Mapping[str, Any]) -> None: ...
    def updated(self, event: Mapping[str, Any]) -> None: ...
    def evaluated(self, event: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


def choose(wanted: bool) -> Progress:
    """Returns a bar if standard error is a terminal or a notebook that can show one, otherwise lines of text. Returns
    an observer that shows nothing if `wanted` is False."""
    if not wanted:
        return Silent()
    # Without widgets, a notebook prints every step of a bar as a new output.
    if available("tqdm") and (available("ipywidgets") if _in_notebook() else sys.stderr.isatty()):
        return Bar()
    return Lines()


class Silent:
    """Shows nothing."""

    def started(self, event: Mapping[str, Any]) -> None: ...
    def updated(self, event: Mapping[str, Any]) -> None: ...
    def evaluated(self, event: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class Bar:
    """Shows progress as tqdm's bar."""

    def __init__(self) -> None:
        from tqdm.auto import tqdm

        self._tqdm = tqdm
        self._bar: Any = None
        # The texts behind the bar: about the latest update, and about the latest evaluation.
        self._update = self._evaluation = ""

    def started(self, event: Mapping[str, Any]) -> None:
        total = event.get("updates") or None  # 0 means no limit; then there is no bar, only a count
        layout = "{desc}{n_fmt}{unit} [{elapsed}{postfix}]"
        if total:
            layout = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
        self._bar = self._tqdm(
            total=total, initial=event.get("update", 0), bar_format=layout, unit=" updates", dynamic_ncols=True
        )

    def updated(self, event: Mapping[str, Any]) -> None:
        self._update = _brief(event)
        self._show(refresh=False)
        self._bar.update(event["update"] - self._bar.n)  # tqdm takes the number of new steps; n is its count so far

    def evaluated(self, event: Mapping[str, Any]) -> None:
        bleu = event.get("bleu")
        self._evaluation = f"valid {number(event, 'loss'):.3f}" + (f" BLEU {bleu:.2f}" if bleu is not None else "")
        self._show(refresh=True)

    def _show(self, refresh: bool) -> None:
        """Sets the texts behind the bar. Without `refresh` they appear with the bar's next step."""
        self._bar.set_postfix_str(", ".join(filter(None, (self._update, self._evaluation))), refresh=refresh)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class Lines:
    """Prints a line about the newest update on standard error, at most every ten seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        """The time of the latest line, or of the start."""

    def started(self, event: Mapping[str, Any]) -> None: ...

    def updated(self, event: Mapping[str, Any]) -> None:
        if time.monotonic() - self._last >= SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            print(f"update {event['update']} (epoch {event['epoch']}): {_brief(event)}", file=sys.stderr, flush=True)

    def evaluated(self, event: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def write(text: str) -> None:
    """Prints a line on standard error, above the bar if there is one."""
    tqdm = sys.modules.get("tqdm")  # if nothing has imported tqdm, there is no bar
    if tqdm is None:
        print(text, file=sys.stderr, flush=True)
    else:
        tqdm.tqdm.write(text, file=sys.stderr)


class Handler(logging.Handler):
    """Writes the package's log to standard error, above the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        with contextlib.suppress(OSError):  # the terminal may be gone
            write(prefix + escaped(record.getMessage()))


def log_to_stderr() -> None:
    """Sends the package's log to standard error from now on."""
    logger = logging.getLogger("normformer_rs")
    if not any(isinstance(handler, Handler) for handler in logger.handlers):
        logger.addHandler(Handler())
        logger.setLevel(logging.INFO)


def number(event: Mapping[str, Any], name: str) -> float:
    """Returns a number of an event; NaN if it is missing or None, which the log holds for NaN and infinities."""
    value = event.get(name)
    return math.nan if value is None else float(value)


def duration(seconds: float) -> str:
    """Formats a time as 4:05 or 1:02:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _brief(event: Mapping[str, Any]) -> str:
    """Formats an "updated" event: speed, loss, learning rate and, if it is known, the time left."""
    left = event.get("time_left")
    rate, loss, lr = (number(event, name) for name in ("tokens_per_second", "loss", "lr"))
    text = f"{rate:,.0f} tokens/s, loss {loss:.3f}, lr {lr:.2e}"
    return text + (f", {duration(left)} left" if left is not None else "")


def _in_notebook() -> bool:
    """Returns True if this process runs a notebook's code: then IPython's shell is Jupyter's, which uses ZeroMQ."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"
