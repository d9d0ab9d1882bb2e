"""Draws the curves of training runs: those of one run, or of several in one picture."""

import io
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._optional import require
from ..text import write_whole

if TYPE_CHECKING:
    from ..loop.history import History

# If one run is drawn alone, these are the colours of training, validation, the best evaluation, and other lines.
_TRAIN, _VALID, _BEST, _LINE = "#8fb3d9", "#c8442f", "#1f6f4a", "#46688c"
SOFTWARE = "normformer_rs"
"""The name in a PNG's metadata; the extension module (ownership.rs) recognises a run's picture by it."""
_MANY = 8
"""With more runs than this, panels are taller and lines smoother."""
_GRID = {"color": "#e4e4e4", "linewidth": 0.8}
COLOURS = (
    *("#3b6fb5", "#d1495b", "#2e8b57", "#e08e1b", "#7a4fb3", "#17a2b8", "#9a5b3c", "#d64fa3", "#6b7a1f", "#444444"),
    *("#86b6ee", "#f2939e", "#7fcfa0", "#f6c46a", "#b99ae6", "#7fd6e3", "#c99a80", "#f0a3d3", "#b5c25c", "#9a9a9a"),
)
"""The colours of the runs, in order. Similar colours can be told apart by the names at the ends of the lines."""
_Panel = Callable[[Any, "Sequence[History]", "Sequence[str]"], None]
"""A function that draws runs, with their names, into one of matplotlib's axes."""


def draw(runs: "Sequence[History]", names: Sequence[str] | None, path: Path) -> Path:
    """Draws runs into one picture, as `normformer_rs.plot` says; returns its path."""
    return _save(_figure(runs, names or told_apart([run.output for run in runs])), path)


def told_apart(folders: Sequence[Path]) -> list[str]:
    """Returns the last parts of each path. All paths keep the same number of parts, the smallest that makes them
    differ.

    >>> told_apart([Path("a/run"), Path("b/run")])
    ['a/run', 'b/run']
    """
    parts = [folder.parts or ("training",) for folder in folders]
    length = next(
        (n for n in range(1, max(map(len, parts))) if len({part[-n:] for part in parts}) == len(parts)),
        max(map(len, parts)),
    )
    return ["/".join(part[-length:]) for part in parts]


def png(history: "History") -> bytes:
    """Returns the picture of one run as PNG, for notebooks. Errors: ImportError without matplotlib."""
    picture = io.BytesIO()
    _figure([history], told_apart([history.output])).savefig(picture, format="png", dpi=90)
    return picture.getvalue()


def _figure(runs: "Sequence[History]", names: Sequence[str]) -> Any:
    """Returns a figure with a panel for each quantity. Errors: ImportError without matplotlib."""
    require("matplotlib", "the picture of the curves")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(runs)
    rows, columns = (2, 2) if len(panels) == 4 else (1, len(panels))
    is_wide = len(runs) > 1  # leaves room for the runs' names beside the lines
    height = 4.6 if len(runs) > _MANY else 3.2
    figure = Figure(figsize=((6.2 if is_wide else 5) * columns, height * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, sharex=True, squeeze=False)
    for axis in axes.flat:
        axis.grid(True, **_GRID)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.01)
    for axis, panel in zip(axes.flat, panels):
        panel(axis, runs, names)
    for axis in axes[-1]:
        axis.set_xlabel("update")
    title = f"{names[0]}   {len(runs[0].update):,} updates" if len(runs) == 1 else f"{len(runs)} runs"
    figure.suptitle(title, fontsize=11, x=0.01, ha="left", weight="bold")
    return literal(figure)


def literal(figure: Any) -> Any:
    """Makes matplotlib show the text of a finished figure as it is, so that a name with dollar signs is not read as a
    formula. Returns the figure.

    Tick labels that an axis makes from its numbers stay formulas (10²). Bytes of a name that are not UTF-8 become
    \\udc80.
    """
    from matplotlib.text import Text
    from matplotlib.ticker import FixedFormatter, FuncFormatter

    tick_labels: set[Any] = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        if not isinstance(axis.get_major_formatter(), FixedFormatter | FuncFormatter):  # these two may show names
            tick_labels.update(axis.get_ticklabels(which="both"))
    for text in figure.findobj(Text):
        if text not in tick_labels:
            text.set_text(text.get_text().encode("utf-8", "backslashreplace").decode())
            text.set_parse_math(False)
    return figure


def _save(figure: Any, path: Path) -> Path:
    """Writes the figure in the format that the path's ending names, by default PNG. Returns the path."""
    picture = io.BytesIO()
    kind = path.suffix.removeprefix(".").lower() or "png"
    # A run recognises its own picture by this metadata; `--overwrite` may remove it.
    figure.savefig(picture, format=kind, metadata={"Software": SOFTWARE} if kind == "png" else None)
    write_whole(path, picture.getvalue())
    return path


def _panels(runs: "Sequence[History]") -> list[_Panel]:
    """Returns the panels: loss, BLEU (or perplexity if no run has measured BLEU), gradient norm and learning rate."""
    panels: list[_Panel] = [_loss]
    if any(np.isfinite(run.evaluations.bleu).any() for run in runs):
        panels.append(_bleu)
    elif any(np.isfinite(run.evaluations.perplexity).any() for run in runs):
        panels.append(_perplexity)
    return [*panels, _grad_norm, _rate]


def _titled(axis: Any, title: str, label: str) -> None:
    """Sets a panel's title and the label of its y axis."""
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_ylabel(label)


def _loss(axis: Any, runs: "Sequence[History]", names: Sequence[str]) -> None:
    """Draws the losses of training and validation. Several runs differ by colour, and each has its name at its end."""
    _titled(axis, "loss", "nats per token, smoothed")
    if len(runs) == 1:
        history, evaluations = runs[0], runs[0].evaluations
        axis.plot(history.update, history.loss, color=_TRAIN, linewidth=1.0, label="training")
        if len(evaluations.update):
            axis.plot(evaluations.update, evaluations.loss, "o-", color=_VALID, markersize=3, label="validation")
        axis.legend(frameon=False, fontsize=8)
        return
    axis.set_title("loss   (thin: training, dots: validation)", loc="left", fontsize=10)
    for run, colour in zip(runs, itertools.cycle(COLOURS)):
        axis.plot(run.update, _smooth(run.loss), color=colour, linewidth=0.9, alpha=0.75)
        axis.plot(run.evaluations.update, run.evaluations.loss, "o-", color=colour, markersize=3, linewidth=1.3)
    name_ends(axis, [(_last(run.evaluations.loss if len(run.evaluations.update) else _smooth(run.loss)), name, colour)
                 for run, name, colour in zip(runs, names, itertools.cycle(COLOURS))])  # fmt: skip


def _bleu(axis: Any, runs: "Sequence[History]", names: Sequence[str]) -> None:
    """Draws BLEU of each run's evaluations; higher is better."""
    _titled(axis, "validation BLEU", "BLEU")
    _from_zero(axis, [run.evaluations.bleu for run in runs])
    _evaluated(axis, runs, names, "bleu", np.nanargmax, ".2f")


def _perplexity(axis: Any, runs: "Sequence[History]", names: Sequence[str]) -> None:
    """Draws the perplexity of each run's evaluations; lower is better."""
    _titled(axis, "validation perplexity", "e^nats per token")
    _logarithmic(axis, [run.evaluations.perplexity for run in runs])
    _evaluated(axis, runs, names, "perplexity", np.nanargmin, ".4g")


def _evaluated(axis: Any, runs: "Sequence[History]", names: Sequence[str], field: str, best: Any, form: str) -> None:
    """Draws the values that the evaluations of each run have for `field`. If there is only one run, its best value is
    marked: `best` returns the index of the best of an array, and `form` formats the value."""
    for run, colour in zip(runs, itertools.cycle(COLOURS)):
        values = getattr(run.evaluations, field)
        measured = np.isfinite(values)
        if not measured.any():
            continue
        update, values = run.evaluations.update[measured], values[measured]
        best_index = best(values)
        axis.plot(update, values, "o-", color=colour if len(runs) > 1 else _VALID, markersize=3, linewidth=1.3)
        if len(runs) == 1:
            label = f"best {values[best_index]:{form}}"
            axis.plot(update[best_index], values[best_index], "o", color=_BEST, markersize=6, label=label)
            axis.legend(frameon=False, fontsize=8)
    if len(runs) > 1:
        ends = [_last(getattr(run.evaluations, field)) for run in runs]
        name_ends(axis, [*zip(ends, names, itertools.cycle(COLOURS))])


def _grad_norm(axis: Any, runs: "Sequence[History]", names: Sequence[str]) -> None:
    """Draws the gradient norm at each update, as a running mean if there are several runs."""
    _titled(axis, "gradient norm", "‖g‖ before clipping")
    _logarithmic(axis, [run.grad_norm for run in runs])
    parts = 25 if len(runs) > _MANY else 100  # fewer parts make smoother lines
    _lines(axis, runs, names, [_smooth(run.grad_norm, parts) if len(runs) > 1 else run.grad_norm for run in runs])


def _rate(axis: Any, runs: "Sequence[History]", names: Sequence[str]) -> None:
    """Draws the learning rate at each update."""
    _titled(axis, "learning rate", "learning rate")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
    _from_zero(axis, [run.lr for run in runs])
    _lines(axis, runs, names, [run.lr for run in runs])


def _from_zero(axis: Any, values: Sequence[Any]) -> None:
    """Scales the y axis from 0 to a little above the largest number that is not NaN, or to 1 if that is 0."""
    axis.set_ylim(0, 1.08 * max(float(np.nanmax(numbers, initial=0.0)) for numbers in values) or 1)


def _logarithmic(axis: Any, values: Sequence[Any]) -> None:
    """Makes the y axis logarithmic if there is at least one positive number, which it can show."""
    if any((numbers > 0).any() for numbers in values):
        logarithmic(axis)


def logarithmic(axis: Any, along: str = "y") -> None:
    """Makes the x or y axis logarithmic. Ticks are at 1, 2 and 5, so that a panel of less than a decade has some; an
    axis of three decades or more has fewer. Call it after everything has been drawn."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set(**{f"{along}scale": "log"})
    scale = getattr(axis, f"{along}axis")
    least, most = scale.get_view_interval()
    is_short = least <= 0 or most / least < 1e3
    scale.set_major_locator(LogLocator(subs=(1, 2, 5)) if is_short else LogLocator(numticks=5))
    scale.set_major_formatter(lambda value, _: f"{value:g}")
    scale.set_minor_formatter(NullFormatter())


def _lines(axis: Any, runs: "Sequence[History]", names: Sequence[str], values: Sequence[Any]) -> None:
    """Draws a line for each run; `values` has one array for each, with a number for each update."""
    if len(runs) == 1:
        axis.plot(runs[0].update, values[0], color=_LINE, linewidth=1.0)
        return
    # Runs with the same values, such as learning rates, share one line.
    runs_by_values: dict[bytes, list[int]] = {}
    for index, numbers in enumerate(values):
        runs_by_values.setdefault(numbers.tobytes(), []).append(index)
    ends = []
    for indices in runs_by_values.values():
        first = indices[0]
        colour = COLOURS[first % len(COLOURS)] if len(indices) == 1 else _LINE  # a shared line has no run's colour
        axis.plot(runs[first].update, values[first], color=colour, linewidth=1.1, alpha=0.85)
        several = "all" if len(indices) == len(runs) else f"{len(indices)} runs"
        ends.append((_last(values[first]), names[first] if len(indices) == 1 else several, colour))
    name_ends(axis, ends)


def _smooth(values: Any, parts: int = 100) -> Any:
    """Returns the running mean over windows of 1/`parts` of the run, so that lines close to each other can be told
    apart."""
    width = min(max(1, len(values) // parts), len(values))
    if width <= 1:
        return values
    # The first value is repeated, so that the result has as many numbers as `values`.
    padded = np.concatenate([np.full(width - 1, values[0]), values])
    return np.convolve(padded, np.full(width, 1 / width), mode="valid")


def _last(values: Any) -> float:
    """Returns the last finite number; NaN if there is none."""
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else float("nan")


def name_ends(axis: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Writes names beside the ends of lines; `ends` has (last value, name, colour) of each line. Names are moved apart
    if they would overlap."""
    low, high = axis.get_ylim()
    axis.set_ylim(low, high)  # fixes the limits, so that the heights below stay true
    is_log = axis.get_yscale() == "log"

    def height(value: float) -> float:
        """Returns the value's height in the panel: 0 at the lower edge, 1 at the upper one."""
        value, lower, upper = np.log(np.array([value, low, high])) if is_log else (value, low, high)
        return float((value - lower) / (upper - lower))

    marked = sorted((height(value), name, colour) for value, name, colour in ends if np.isfinite(value))
    for (y, name, colour), name_y in zip(marked, spread([y for y, *_ in marked])):
        connection = {
            "arrowstyle": "-",
            "color": colour,
            "linewidth": 0.6,
            "shrinkA": 0,
            "shrinkB": 0,
            "relpos": (0, 0.5),
        }
        # (1, y) is the line's end at the panel's right edge; the name stands outside the panel.
        axis.annotate(
            name, (1, y), (1.035, name_y), xycoords="axes fraction", textcoords="axes fraction", color=colour,
            fontsize=7.5, va="center", ha="left", annotation_clip=False, arrowprops=connection,
        )  # fmt: skip


def spread(heights: Sequence[float], gap: float = 0.062) -> list[float]:
    """Returns the rising heights, moved as little as needed so that neighbours are `gap` apart.

    >>> spread([0.5, 0.5], gap=0.1)
    [0.45, 0.55]
    """
    groups: list[list[float]] = []  # neighbours too close to each other; each group is centred on its mean
    for height in heights:
        groups.append([height])
        # A merged group has another mean, so it may be too close to the group before it.
        while len(groups) > 1 and _bottom(groups[-1], gap) - _top(groups[-2], gap) < gap:
            last = groups.pop()
            groups[-1] += last
    return [_bottom(group, gap) + i * gap for group in groups for i in range(len(group))]


def _bottom(group: Sequence[float], gap: float) -> float:
    """Returns the place of the lowest of a group's heights, once they are `gap` apart and centred on their mean."""
    return sum(group) / len(group) - gap * (len(group) - 1) / 2


def _top(group: Sequence[float], gap: float) -> float:
    """Returns the place of the highest of a group's heights, once they are `gap` apart and centred on their mean."""
    return _bottom(group, gap) + gap * (len(group) - 1)
