"""The log of a training run, as numpy arrays."""

import base64
import dataclasses
import html
import json
import logging
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .._html import table
from .._optional import available, require
from ..errors import InputError
from ..pictures import curves
from ..text import open_regular

LOG = "log.jsonl"
_SHOWN = ("update", "epoch", "loss", "nll", "perplexity", "bleu", "best", "seconds")
"""The columns of the table of evaluations that a notebook shows."""
_logger = logging.getLogger("normformer_rs")


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluations:
    """The validations of a run; each array has one entry per validation. NaN marks values that were not measured."""

    update: NDArray[np.int64]
    epoch: NDArray[np.int64]
    loss: NDArray[np.float64]
    """Label-smoothed cross-entropy, nats per token."""
    nll: NDArray[np.float64]
    """Cross-entropy, nats per token."""
    perplexity: NDArray[np.float64]
    """e^nll."""
    bleu: NDArray[np.float64]
    """The BLEU score, 0 to 100."""
    best: NDArray[np.bool_]
    """True if the evaluation is better than all before it."""
    seconds: NDArray[np.float64]
    """The time that the evaluation took, in seconds."""


@dataclasses.dataclass(frozen=True, eq=False)
class History:
    """The record of a training run: losses, rates and gradient norms, one entry per update."""

    update: NDArray[np.int64]
    epoch: NDArray[np.int64]
    loss: NDArray[np.float64]
    """Label-smoothed cross-entropy, nats per token."""
    nll: NDArray[np.float64]
    """Cross-entropy, nats per token."""
    lr: NDArray[np.float64]
    grad_norm: NDArray[np.float64]
    """The Euclidean norm of the gradient of all parameters, before clipping."""
    largest_logit: NDArray[np.float64]
    """The largest logit of all attentions in the update's batches; NaN without `qk_clip`."""
    tokens_per_second: NDArray[np.float64]
    """The number of real target tokens per second."""
    seconds: NDArray[np.float64]
    """The training time so far, in seconds."""
    evaluations: Evaluations
    layers: dict[str, NDArray[np.float64]] = dataclasses.field(default_factory=dict)
    """The values of `log_layers`: gradient/LAYER, the norm of each layer's gradient before clipping; gain/NAME, the
    mean of each gain before the update; and with `qk_clip` logit/ATTENTION.HEAD, the largest logit of each head in the
    update's batches. The values of `log_statistics`, measured on the update's first batch before the update:
    size/STACK.LAYER, the mean |x| of the residual stream (0: the stack's input); change/decoder, the mean over tokens
    of ‖F(x; θ) − F(x; θ₀)‖₂ for the decoder's output; batch_distance/STACK.NORM.PART and
    batch_gradient/STACK.NORM.PART, as in `analysis.Statistics`; PART is mean, variance or power. NaN marks an update
    for which a value was not logged."""
    parameters: int = 0
    output: Path = Path()

    @property
    def best(self) -> int | None:
        """The index of the best evaluation in `evaluations`; None before the first one."""
        (best,) = np.nonzero(self.evaluations.best)
        return int(best[-1]) if len(best) else None

    @classmethod
    def read(cls, output: str | PathLike[str]) -> "History":
        """Reads the history in `output`/log.jsonl. Damaged lines are left out, with one warning.

        Errors: FileNotFoundError; InputError if the log is no regular file.
        """
        return cls.of(read_events(Path(output) / LOG), output)

    @classmethod
    def of(cls, events: Iterable[dict[str, Any]], output: str | PathLike[str]) -> "History":
        """Returns the history that a log's events describe."""
        started, updates, evaluations = _replay(events)
        return cls(
            **_columns(cls, updates),
            evaluations=Evaluations(**_columns(Evaluations, evaluations)),
            layers=_layers(updates),
            parameters=started.get("parameters") or 0,
            output=Path(output),
        )

    def plot(self, path: str | PathLike[str] | None = None) -> Path:
        """Draws loss, BLEU or perplexity, gradient norm and learning rate to `path`, by default `output`/curves.png.
        `normformer_rs.plot` draws several runs into one picture.

        Errors: InputError before the first update; ImportError without matplotlib.
        """
        return plot(self, path=path if path is not None else self.output / "curves.png")

    def to_pandas(self) -> Any:
        """Returns a pandas.DataFrame with a row for each update, its `layers` as further columns, and the values of
        `evaluations` as columns `valid_loss`, …: NaN if an update was not evaluated.

        Errors: ImportError without pandas.
        """
        pandas = require("pandas", "History.to_pandas")
        updates = pandas.DataFrame({**_arrays(self), **self.layers}).set_index("update")
        evaluations = pandas.DataFrame(_arrays(self.evaluations)).set_index("update")
        return updates.join(evaluations.drop(columns="epoch").add_prefix("valid_"))

    def _repr_html_(self) -> str:
        """Returns the evaluations as an HTML table, with the picture if matplotlib is installed."""
        picture = ""
        if len(self.update) and available("matplotlib"):
            data = base64.b64encode(curves.png(self)).decode()
            picture = f'<img src="data:image/png;base64,{data}" alt="{html.escape(repr(self))}">'
        rows = zip(*(getattr(self.evaluations, name) for name in _SHOWN))
        cells = [[f"{value:.4g}" if isinstance(value, float) else f"{value}" for value in row] for row in rows]
        return table(_SHOWN, cells, repr(self)) + picture

    def __repr__(self) -> str:
        return f"History({len(self.update)} updates, {len(self.evaluations.update)} evaluations, {str(self.output)!r})"


def plot(
    *runs: "History | str | PathLike[str]",
    path: str | PathLike[str] = "curves.png",
    names: Sequence[str] | None = None,
) -> Path:
    """Draws runs into one picture: loss, BLEU or perplexity, gradient norm, learning rate.

    Args:
        runs: results of `Trainer.fit`, or the folders of runs; at most 20.
        path: the picture's path; its ending sets the format: png, svg, pdf.
        names: the runs' names, shown at the ends of their curves; None for the names of their folders, with as many
            parents as are needed to tell them apart.

    BLEU is shown if a run has measured it, otherwise perplexity; a panel for which no run has numbers is left out.
    pyplot is not used.

    Returns: the path. Errors: InputError for no run, for more than 20, for a folder without log.jsonl, if there are not
    as many names as runs; ImportError without matplotlib.
    """
    if not 1 <= len(runs) <= len(curves.COLOURS):
        raise InputError(f"plot takes 1 to {len(curves.COLOURS)} runs; got {len(runs)}")
    for run in (drawn := histories(runs, names)):
        if not len(run.update):
            raise InputError(f"{run.output}: this run has made no update yet, so there is nothing to draw")
    return curves.draw(drawn, names, Path(path))


def histories(runs: "Sequence[str | PathLike[str] | History]", names: Sequence[str] | None = None) -> "list[History]":
    """Returns the histories of runs that are given as folders or histories. `names`: one for each run. Errors:
    InputError."""
    if names is not None and len(names) != len(runs):
        raise InputError(f"a picture needs a name for each of the {len(runs)} runs; got {len(names)} names")
    read = []
    for run in runs:
        if not isinstance(run, History):
            if not Path(run, LOG).is_file():
                raise InputError(f"{run}: no {LOG} there; expected the --output folder of a run")
            run = History.read(run)
        read.append(run)
    return read


def _arrays(part: "History | Evaluations") -> dict[str, NDArray[Any]]:
    """Returns the fields that are arrays, by name."""
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


def read_events(path: Path) -> list[dict[str, Any]]:
    """Reads the events of a log, in order. Lines that a crash or a full disk has damaged, and lines that the loop never
    writes, are left out with one warning.

    Errors: FileNotFoundError; InputError for a folder, a device or a pipe.
    """
    events: list[dict[str, Any]] = []
    number, damaged, first_damaged = 0, 0, 0
    with open_regular(path) as log:
        for number, line in enumerate(_lines(log), 1):
            if (event := _event(line)) is not None:
                events.append(event)
            else:
                damaged, first_damaged = damaged + 1, first_damaged or number
    if damaged:
        _logger.warning(
            "%s: %d of %d lines are damaged or incomplete, and left out; the first is line %d",
            *(path, damaged, number, first_damaged),
        )
    return events


def _lines(log: BinaryIO) -> Iterator[bytes]:
    """Yields the lines of a log without their line ends. A line that is too long for an event is cut off."""
    while line := log.readline(_LONGEST + 1):
        rest = line
        while len(rest) > _LONGEST and not rest.endswith(b"\n"):
            rest = log.readline(_LONGEST + 1)
        yield line.removesuffix(b"\n")


def _event(line: bytes) -> dict[str, Any] | None:
    """Returns the event in a line of the log, or None if the line is damaged or is no event that the loop writes."""
    if len(line) > _LONGEST:
        return None
    try:
        event = _DECODER.decode(line.decode("utf-8"))
        if b"\\u" in line:
            json.dumps(event, ensure_ascii=False).encode("utf-8")  # fails on a lone surrogate, which is no text
        return event if _is_event(event) else None
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    """Refuses NaN and Infinity, which Python's decoder would accept."""
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_MOST = sys.float_info.max
"""The largest finite float; JSON may hold larger integers."""
_LONGEST = 4 << 20
"""The maximum length of a line in bytes. For comparison: a line with the values of 1,000 layers has about 100 kB."""
_CELLS = 1 << 27
"""The maximum number of values in `History.layers`: 2²⁷ float64 are 1 GiB."""
_COUNTS = ("update", "epoch", "parameters")
"""The fields that are integers."""
_NO_COLUMNS = ("evaluations", "layers", "output")
"""The fields of `History` that are no arrays with a number for each update."""


def _numbers(cls: type) -> list[str]:
    """Returns the names of a class's fields that hold arrays of floating-point numbers."""
    names = (field.name for field in dataclasses.fields(cls))
    return [name for name in names if name not in (*_COUNTS, *_NO_COLUMNS, "best")]


_NUMBERS: dict[str, list[str]] = {
    "started": ["unigram_entropy"],
    "updated": _numbers(History),
    "evaluated": _numbers(Evaluations),
}
"""For each kind of event, the names of the floating-point numbers that are read from it."""


def _is_event(event: Any) -> bool:
    """Returns True if the fields that are read from the event have the types that the training loop writes."""
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return False
    numbers = _NUMBERS.get(event["event"])
    if numbers is None:
        return True
    if event["event"] != "started" and event.get("update") is None:
        return False
    counts = [value for value in map(event.get, _COUNTS) if value is not None]
    are_counts = set(map(type, counts)) <= {int} and all(0 <= count < 2**63 for count in counts)
    is_flag = type(event.get("best")) in (bool, type(None))
    are_numbers = _are_numbers(map(event.get, numbers))
    return are_counts and is_flag and are_numbers and _are_layers(event.get("layers"), event.get("statistics"))


def _are_numbers(values: Iterable[Any]) -> bool:
    """Returns True if each value is a finite float, an int or None, which stands for a number that JSON cannot hold.
    A bool is refused, although Python counts it as an int."""
    numbers = [value for value in values if value is not None]
    return (
        set(map(type, numbers)) <= {int, float}
        and -_MOST <= min(numbers, default=0) <= max(numbers, default=0) <= _MOST
    )


def _are_layers(layers: Any, statistics: Any) -> bool:
    """Returns True if an event's fields `layers` and `statistics` have the form that `layer_values` reads. Each field
    may be missing (None). `layers` holds a dictionary of numbers for each kind of value, such as `{"gains": {NAME:
    NUMBER}}`; `statistics` is one dictionary of numbers."""
    if not isinstance(layers, dict | None):
        return False
    tables = list((layers or {}).values())  # name → number in each table
    if statistics is not None:
        tables.append(statistics)
    return all(isinstance(values, dict) and _are_numbers(values.values()) for values in tables)


def _replay(events: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the last "started" event, and the updates and evaluations that count. A resumed run continues from a
    checkpoint, so the events after that checkpoint's update, logged before the resume, are dropped."""
    started: dict[str, Any] = {}
    updates: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    for event in events:
        name = event["event"]
        if name == "started":
            started = event
            resumed_from = event.get("update") or 0
            updates = {update: logged for update, logged in updates.items() if update <= resumed_from}
            evaluations = {update: logged for update, logged in evaluations.items() if update <= resumed_from}
        elif name == "updated":
            updates[event["update"]] = event
        elif name == "evaluated":
            evaluations[event["update"]] = event
    return started, list(updates.values()), list(evaluations.values())


def layer_values(event: Mapping[str, Any]) -> dict[str, float]:
    """Returns the values that an "updated" event has for `History.layers`, by name: gradient/LAYER, gain/NAME,
    logit/ATTENTION.HEAD and the statistics. The dictionary is empty if the event has none."""
    layers = event.get("layers") or {}
    values = {f"{kind}/{name}": value for kind in ("gradient", "gain", "logit")
              for name, value in layers.get(f"{kind}s", {}).items()}  # fmt: skip
    values |= event.get("statistics") or {}
    return {name: math.nan if value is None else value for name, value in values.items()}


def _layers(events: list[dict[str, Any]]) -> dict[str, NDArray[np.float64]]:
    """Returns `History.layers` from the "updated" events."""
    logged = [layer_values(event) for event in events]
    names = {name for values in logged for name in values}
    cells, values_logged = len(names) * len(logged), sum(map(len, logged))
    # A forged log may name a new layer in each line, and the table of names and updates would fill the memory. In an
    # honest log far more than one of 64 cells has a value.
    if cells > max(_CELLS, 64 * values_logged):
        _logger.warning("%d names of layers are too many for %d updates: no layers are read", len(names), len(logged))
        return {}
    return {name: np.array([values.get(name, math.nan) for values in logged]) for name in sorted(names, key=_natural)}


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns a sort key that puts layer 2 before layer 10. Numbers are compared by length, then as text, because int()
    refuses the very long numbers that a forged log may have."""
    parts = re.split(r"0*([0-9]+)", name)  # texts are at even indices, numbers without leading zeros at odd ones
    return [(len(part), part) if i % 2 else (-1, part) for i, part in enumerate(parts)]


def _columns(cls: type, events: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
    """Returns, for each array field of a class, the array of that field's values in the events."""
    types_and_defaults: Mapping[str, tuple[Any, Any]] = {
        "update": (np.int64, 0),
        "epoch": (np.int64, 0),
        "best": (np.bool_, False),
    }
    columns = {}
    for field in dataclasses.fields(cls):
        if field.name in (*_NO_COLUMNS, "parameters"):
            continue
        dtype, default = types_and_defaults.get(field.name, (np.float64, math.nan))
        values = [event.get(field.name) for event in events]
        columns[field.name] = np.array([default if value is None else value for value in values], dtype=dtype)
    return columns
