"""Draws the pictures of reproductions from their tables and series, without pyplot."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._optional import require
from ..pictures import drawing
from ..pictures.curves import COLOURS, logarithmic, name_ends
from ..pictures.drawing import INK, PALE, Series, heading, highlight, lines, new_figure, of_updates, save
from .declared import Reproduction
from .results import Results
from .spread import Spread
from .tables import COLUMNS, number


def draw(entry: Reproduction, scale: str, results: Results) -> Path | None:
    """Draws the picture of a reproduction. Returns its path, or None if the series that it needs are missing.

    Errors: ImportError without matplotlib.
    """
    require("matplotlib", "the picture of a reproduction")
    shown = entry.scales[scale].shown
    # If there are no series at all, [""] asks for one that cannot exist, so that nothing is drawn.
    wanted = _SERIES.get(shown.picture, [*results.series] or [""])
    if shown.picture not in _OF_TABLES and not {*wanted} <= results.series.keys():
        return None
    figure = PICTURES[shown.picture](
        results, entry.title if scale != "check" else f"{entry.title} (check)", shown.value
    )
    return save(figure, results.path(".png"))


def _dots(results: Results, title: str, value: str) -> Any:
    """Returns a figure with a line of dots for each row, in the table's order. A dot shows the measured column `value`.
    Its colour stands for the row's value of the key that `Shown.across` names."""
    shown = results.scale.shown
    points: dict[str, list[tuple[str, float, float]]] = {}
    for row, columns in results.measured:
        measured = number(columns.get(value, ""))
        # The values of these keys are names that are clear without the key before them.
        words = [word if key in ("run", "residual", "norm", "encoder_norm") else f"{key} {word}"
                 for key, word in row.key.items() if key != shown.across]  # fmt: skip
        label = ", ".join(words)
        points.setdefault(label, [])
        if measured is not None and math.isfinite(measured):
            points[label].append((row.key.get(shown.across, ""), measured, _sd(columns.get(value, ""))))
    groups = list(dict.fromkeys(row.key.get(shown.across, "") for row, _ in results.measured))
    figure = new_figure(7.2, 0.34 * len(points) + 1.35)
    axis = figure.subplots()
    # Heights count from the bottom, so the table's first row is drawn at the top.
    for height, dots in enumerate(reversed(points.values())):
        axis.axhline(height, color=PALE, linewidth=1, zorder=0)
        for group, measured, sd in dots:
            colour = COLOURS[groups.index(group) % len(COLOURS)]
            axis.errorbar(measured, height, xerr=sd, fmt="o", color=colour, markersize=6, zorder=2)
            if len(groups) == 1:  # with several dots on a line their numbers would overlap
                text = f"{measured:{COLUMNS[value].form}}"
                offset = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center"}
                axis.annotate(text, (measured, height), **offset, fontsize=7.5, color=colour)
    axis.set_yticks(range(len(points)), [*reversed(points)], fontsize=9)
    axis.set_ylim(-0.6, len(points) - 0.2)
    axis.margins(x=0.12)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False, labelsize=8.5)
    axis.set_xlabel(COLUMNS[value].heading, fontsize=9)
    names = [(f"{shown.across} {group}", COLOURS[i % len(COLOURS)]) for i, group in enumerate(groups) if group]
    heading(figure, title, names)
    return figure


def _sd(value: str | Spread) -> float:
    """Returns the standard deviation over seeds; 0 for the value of a single seed."""
    return value.sd if isinstance(value, Spread) else 0.0


def _validation(results: Results, title: str, value: str) -> Any:
    """Returns a figure with the validation NLL of each run over its updates. If only the table exists, it has dots of
    the final values instead."""
    updates, losses = (results.series.get(name, {}) for name in ("evaluated", "validation"))
    runs = [key for key in losses if losses[key] and key in updates]
    if not runs:
        return _dots(results, title, value)
    figure = new_figure(7.2, 3.6)
    axis = figure.subplots()
    for key, shade in zip(runs, itertools.cycle(COLOURS)):
        axis.plot(updates[key], losses[key], "o-", color=shade, markersize=3, linewidth=1.3)
    axis.grid(True, color=PALE, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    of_updates(axis)
    axis.set_ylabel("validation NLL, nats per token", fontsize=9)
    axis.margins(x=0.01)
    name_ends(axis, [(losses[key][-1], ", ".join(key), shade) for key, shade in zip(runs, itertools.cycle(COLOURS))])
    heading(figure, title, [])
    return figure


def _gradients(results: Results, title: str, value: str) -> Any:
    """Returns the figure of `gradients` for the series that the runs have kept."""
    return gradients(results.series.get("gradients", {}), f"{title}: gradient norms of the first updates")


def gradients(series: Series, title: str) -> Any:
    """Returns a figure with a panel for each scheme and in it a line for each learning rate. The lines of all other
    schemes are in the background, in grey. `series` maps (scheme, rate) to the gradient norms."""
    schemes, rates = list(dict.fromkeys(scheme for scheme, _ in series)), rates_of(series)
    columns = min(5, len(schemes)) if len(schemes) > 6 else 3  # rows of 3 panels, or of 5 if there are many
    rows = math.ceil(len(schemes) / columns)
    figure = new_figure(2.35 * columns, 1.75 * rows + 0.9)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axis, scheme in zip(axes.flat, schemes):
        highlight(axis, series, [(scheme, rate, colour(rate, rates)) for rate in rates])
        axis.set_title(scheme, loc="left", fontsize=9.5, color=INK, pad=3)
    for axis in axes.flat[len(schemes) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("update", fontsize=8.5)
    figure.supylabel("‖g‖ before clipping", fontsize=9)
    heading(figure, title, [(f"lr {float(rate):g}", colour(rate, rates)) for rate in rates])
    return figure


def _start(results: Results, title: str, value: str) -> Any:
    """Returns a figure like Fig 3 of the BranchNorm paper: a column of panels for each rate, a colour for each scheme;
    gradient norms above, training NLL below."""
    norms, losses = results.series.get("gradients", {}), results.series.get("losses", {})
    schemes, rates = list(dict.fromkeys(scheme for scheme, _ in norms)), rates_of(norms)
    parts = [("‖g‖ before clipping", norms), *([("training NLL, nats", losses)] if losses else [])]
    figure = new_figure(4.4 * len(rates) + 0.4, 2.5 * len(parts) + 0.6)
    axes = figure.subplots(len(parts), len(rates), sharex=True, sharey="row", squeeze=False)
    for line, (label, series) in zip(axes, parts):
        line[0].set_ylabel(label, fontsize=9)
        for axis, rate in zip(line, rates):
            for scheme, shade in zip(schemes, itertools.cycle(COLOURS)):
                values = series.get((scheme, rate), [])
                axis.plot(range(1, len(values) + 1), values, color=shade, linewidth=1.2)
            axis.grid(True, color=PALE, linewidth=0.6)
            axis.spines[["top", "right"]].set_visible(False)
            axis.margins(x=0.01)
    for axis, rate in zip(axes[0], rates):
        logarithmic(axis)
        axis.set_title(f"lr {float(rate):g}", loc="left", fontsize=9.5, color=INK)
    for axis in axes[-1]:
        of_updates(axis)
    heading(figure, title, [*zip(schemes, itertools.cycle(COLOURS))])
    return figure


def _comparison(results: Results, title: str, value: str) -> Any:
    """Returns a figure with three panels, one for each number, and a line for each name. The name with the best value
    from the common initialisation comes first. Each rate has a dot with its standard deviation: a filled one from the
    common initialisation, a hollow one from the scheme's own. A value far beyond the others is an arrow at the edge,
    with its number."""
    rates = list(dict.fromkeys(row.key["lr"] for row, _ in results.measured))
    common = results.scale.rows[0].key["init"]
    best_by_name: dict[str, float] = {}  # the lowest value from the common initialisation, over the rates
    for row, columns in results.measured:
        reached = number(columns.get(value, ""))
        if row.key["init"] == common and reached is not None and math.isfinite(reached):
            best_by_name[row.key["name"]] = min(best_by_name.get(row.key["name"], math.inf), reached)
    all_names = dict.fromkeys(row.key["name"] for row, _ in results.measured)
    names = sorted(all_names, key=lambda name: best_by_name.get(name, math.inf))
    heights = {name: len(names) - 1 - i for i, name in enumerate(names)}
    figure = new_figure(9.6, 0.21 * len(names) + 1.3)
    panels = figure.subplots(1, 3, sharey=True)
    # In the first panel an arrow at this edge stands for a dot beyond it.
    edge = _edge([number(columns.get(value, "")) for _, columns in results.measured])
    for axis, column in zip(panels, (value, "largest_grad_norm", "growth")):
        for height in heights.values():
            axis.axhline(height, color=PALE, linewidth=0.8, zorder=0)
        for row, columns in results.measured:
            measured = number(columns.get(column, ""))
            if measured is not None and math.isfinite(measured):
                shade, is_common = colour(row.key["lr"], rates), row.key["init"] == common
                # The filled dot lies a little above the name's line, the hollow one below.
                place = heights[row.key["name"]] + (0.16 if is_common else -0.16)
                if column == value and measured > edge:
                    axis.plot(edge, place, ">", color=shade, markersize=4, clip_on=False)
                    offset = {"xytext": (-5, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
                    axis.annotate(f"{measured:.0f}", (edge, place), **offset, fontsize=7, color=shade)
                    continue
                axis.errorbar(measured, place, xerr=_sd(columns.get(column, "")), fmt="o", color=shade, markersize=4,
                              markerfacecolor=shade if is_common else "white", linewidth=1)  # fmt: skip
        axis.set_xlabel(COLUMNS[column].heading, fontsize=8.5)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(left=False, labelsize=7.5)
        if column != value:
            logarithmic(axis, "x")
        elif edge < math.inf:
            axis.set_xlim(right=edge)
    panels[0].set_yticks([*heights.values()], [*heights])
    panels[0].set_ylim(-0.7, len(names) - 0.3)
    heading(figure, f"{title} (hollow: own initialisation)", [(f"lr {float(r):g}", colour(r, rates)) for r in rates])
    return figure


def _edge(values: Sequence[float | None]) -> float:
    """Returns the upper end of an axis that leaves out extreme values: the ninth decile plus twice the distance between
    the first and the ninth decile. Returns infinity if no value is above that."""
    finite = sorted(v for v in values if v is not None and math.isfinite(v))
    if not finite:
        return math.inf
    low, high = finite[len(finite) // 10], finite[-1 - len(finite) // 10]
    edge = high + 2 * (high - low)
    return edge if finite[-1] > edge else math.inf


def _by_key(results: Results, title: str, value: str) -> Any:
    """Returns a figure of the value over the key `Shown.across`, on a logarithmic axis, with a line for each
    combination of the other keys."""
    shown = results.scale.shown
    curves: dict[tuple[str, ...], tuple[list[float], list[float]]] = {}
    for row, columns in results.measured:
        measured, place = number(columns.get(value, "")), number(row.key[shown.across])
        if measured is not None and place is not None and math.isfinite(measured):
            line_key = tuple(word for key, word in row.key.items() if key != shown.across)
            x, y = curves.setdefault(line_key, ([], []))
            x.append(place)
            y.append(measured)
    figure = lines(curves, title, shown.across, COLUMNS[value].heading, markers=True)
    axis = figure.axes[0]
    ticks = sorted({x for xs, _ in curves.values() for x in xs})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    return figure


def _of_series(draw: Callable[[Mapping[str, Series], str], Any]) -> Callable[[Results, str, str], Any]:
    """Returns a function for `PICTURES` that draws the series alone. `draw` takes the series by name and the title."""
    return lambda results, title, value: draw(results.series, title)


PICTURES: dict[str, Callable[[Results, str, str], Any]] = {
    "dots": _dots,
    "validation": _validation,
    "gradients": _gradients,
    "start": _start,
    "comparison": _comparison,
    "curves": _of_series(drawing.bleu),
    "raw": _of_series(drawing.gradient_norms),
    "gains": _of_series(drawing.gains),
    "singular": _of_series(drawing.singular_values),
    "statistics": _of_series(drawing.statistics),
    "layers": _of_series(drawing.layers),
    "growth": _of_series(drawing.growth),
    "by_key": _by_key,
}
"""The functions that make the figures, by the names that `Shown.picture` uses. Each gets the results, the title and the
column's name in `Shown.value`."""
_OF_TABLES = ("dots", "comparison", "by_key")
"""The pictures that are drawn from the table alone, without series."""
_SERIES = {"validation": ["evaluated", "validation"], "gradients": ["gradients"], "start": ["gradients"]}
"""The series that a picture needs. A picture that is not listed here draws whatever series there are."""


def rates_of(series: Series) -> list[str]:
    """Returns the learning rates in the keys (scheme, rate), in ascending order."""
    return sorted({rate for _, rate in series}, key=float)


def colour(rate: str, rates: Sequence[str]) -> str:
    """Returns the colour of a learning rate, which is one of `rates`."""
    return COLOURS[rates.index(rate) % len(COLOURS)]
