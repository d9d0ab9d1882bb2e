"""The pictures of reproductions, drawn from their tables and series. pyplot is not touched."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._optional import require
from ..curves import COLOURS, logarithmic, name_ends
from .declared import Reproduction
from .results import Results, Series
from .spread import Spread
from .tables import COLUMNS, number

INK, OTHERS, PALE = "#333333", "#cfcfcf", "#ececec"


def draw(entry: Reproduction, scale: str, results: Results) -> Path:
    """Draws the picture of what was measured; its path. Errors: ImportError without matplotlib."""
    require("matplotlib", "the picture of a reproduction")
    shown = entry.scales[scale].shown
    figure = PICTURES[shown.picture](
        results, entry.title if scale != "check" else f"{entry.title} (check)", shown.value
    )
    return save(figure, results.path(".png"))


def _dots(results: Results, title: str, value: str) -> Any:
    """A line for each row, in the table's order; a colour for each value of the key that runs across."""
    shown = results.scale.shown
    points: dict[str, list[tuple[str, float, float]]] = {}
    for row, found in results.measured:
        measured = number(found.get(value, ""))
        label = ", ".join(v if k in ("run", "residual", "norm", "encoder_norm") else f"{k} {v}"
                          for k, v in row.key.items() if k != shown.across)  # fmt: skip
        points.setdefault(label, [])
        if measured is not None and math.isfinite(measured):
            points[label].append((row.key.get(shown.across, ""), measured, _sd(found.get(value, ""))))
    groups = list(dict.fromkeys(row.key.get(shown.across, "") for row, _ in results.measured))
    figure = new_figure(7.2, 0.34 * len(points) + 1.35)
    axis = figure.subplots()
    for height, found_here in enumerate(reversed(points.values())):
        axis.axhline(height, color=PALE, linewidth=1, zorder=0)
        for group, measured, sd in found_here:
            colour = COLOURS[groups.index(group) % len(COLOURS)]
            axis.errorbar(measured, height, xerr=sd, fmt="o", color=colour, markersize=6, zorder=2)
            if len(groups) == 1:  # numbers of several would lie on each other
                text = f"{measured:{COLUMNS[value].form}}"
                where = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center"}
                axis.annotate(text, (measured, height), **where, fontsize=7.5, color=colour)
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
    return value.sd if isinstance(value, Spread) else 0.0


def _validation(results: Results, title: str, value: str) -> Any:
    """A line for each run, its name at its end; dots where only the table is there."""
    updates, losses = (results.series.get(name, {}) for name in ("evaluated", "validation"))
    runs = [key for key in losses if losses[key] and key in updates]
    if not runs:
        return _dots(results, title, value)
    figure = new_figure(7.2, 3.6)
    axis = figure.subplots()
    for key, shade in zip(runs, COLOURS):
        axis.plot(updates[key], losses[key], "o-", color=shade, markersize=3, linewidth=1.3)
    axis.grid(True, color=PALE, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    _of_updates(axis)
    axis.set_ylabel("validation NLL, nats per token", fontsize=9)
    axis.margins(x=0.01)
    name_ends(axis, [(losses[key][-1], ", ".join(key), shade) for key, shade in zip(runs, COLOURS)])
    heading(figure, title, [])
    return figure


def _gradients(results: Results, title: str, value: str) -> Any:
    return gradients(results.series.get("gradients", {}), f"{title}: gradient norms of the first updates")


def gradients(found: Series, title: str) -> Any:
    """A panel for each scheme, a line for each rate; behind them, in grey, those of all schemes."""
    schemes, rates = list(dict.fromkeys(scheme for scheme, _ in found)), rates_of(found)
    columns = min(5, len(schemes)) if len(schemes) > 6 else 3
    rows = math.ceil(len(schemes) / columns)
    figure = new_figure(2.35 * columns, 1.75 * rows + 0.9)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axis, scheme in zip(axes.flat, schemes):
        highlight(axis, found, [(scheme, rate, colour(rate, rates)) for rate in rates])
        axis.set_title(scheme, loc="left", fontsize=9.5, color=INK, pad=3)
    for axis in axes.flat[len(schemes) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("update", fontsize=8.5)
    figure.supylabel("‖g‖ before clipping", fontsize=9)
    heading(figure, title, [(f"lr {float(rate):g}", colour(rate, rates)) for rate in rates])
    return figure


def _start(results: Results, title: str, value: str) -> Any:
    """BrN Fig 3: a panel for each rate, a colour for each scheme; gradient norms above, training NLL below."""
    norms, losses = results.series.get("gradients", {}), results.series.get("losses", {})
    schemes, rates = list(dict.fromkeys(scheme for scheme, _ in norms)), rates_of(norms)
    parts = [("‖g‖ before clipping", norms), *([("training NLL, nats", losses)] if losses else [])]
    figure = new_figure(4.4 * len(rates) + 0.4, 2.5 * len(parts) + 0.6)
    axes = figure.subplots(len(parts), len(rates), sharex=True, sharey="row", squeeze=False)
    for line, (label, series) in zip(axes, parts):
        line[0].set_ylabel(label, fontsize=9)
        for axis, rate in zip(line, rates):
            for scheme, shade in zip(schemes, COLOURS):
                values = series.get((scheme, rate), [])
                axis.plot(range(1, len(values) + 1), values, color=shade, linewidth=1.2)
            axis.grid(True, color=PALE, linewidth=0.6)
            axis.spines[["top", "right"]].set_visible(False)
            axis.margins(x=0.01)
    for axis, rate in zip(axes[0], rates):
        logarithmic(axis)
        axis.set_title(f"lr {float(rate):g}", loc="left", fontsize=9.5, color=INK)
    for axis in axes[-1]:
        _of_updates(axis)
    heading(figure, title, [*zip(schemes, COLOURS)])
    return figure


def _comparison(results: Results, title: str, value: str) -> Any:
    """A line for each name, the best from the common initialisation first; a panel for each number; a dot and its
    standard deviation for each rate, filled from the common initialisation, hollow from the scheme's own."""
    rates = list(dict.fromkeys(row.key["lr"] for row, _ in results.measured))
    common = results.scale.rows[0].key["init"]
    best: dict[str, float] = {}
    for row, found in results.measured:
        reached = number(found.get(value, ""))
        if row.key["init"] == common and reached is not None and math.isfinite(reached):
            best[row.key["name"]] = min(best.get(row.key["name"], math.inf), reached)
    names = sorted(dict.fromkeys(row.key["name"] for row, _ in results.measured), key=lambda n: best.get(n, math.inf))
    heights = {name: len(names) - 1 - i for i, name in enumerate(names)}
    figure = new_figure(9.6, 0.21 * len(names) + 1.3)
    panels = figure.subplots(1, 3, sharey=True)
    for axis, column in zip(panels, (value, "largest_grad_norm", "growth")):
        for height in heights.values():
            axis.axhline(height, color=PALE, linewidth=0.8, zorder=0)
        for row, found in results.measured:
            measured = number(found.get(column, ""))
            if measured is not None and math.isfinite(measured):
                shade, is_common = colour(row.key["lr"], rates), row.key["init"] == common
                place = heights[row.key["name"]] + (0.16 if is_common else -0.16)
                axis.errorbar(measured, place, xerr=_sd(found.get(column, "")), fmt="o", color=shade, markersize=4,
                              markerfacecolor=shade if is_common else "white", linewidth=1)  # fmt: skip
        axis.set_xlabel(COLUMNS[column].heading, fontsize=8.5)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(left=False, labelsize=7.5)
        if column != value:
            logarithmic(axis, "x")
    panels[0].set_yticks([*heights.values()], [*heights])
    panels[0].set_ylim(-0.7, len(names) - 0.3)
    heading(figure, f"{title} (hollow: own initialisation)", [(f"lr {float(r):g}", colour(r, rates)) for r in rates])
    return figure


def _curves(results: Results, title: str, value: str) -> Any:
    """BLEU of held-out text over training, a line for each run."""
    updates, scores = (results.series.get(name, {}) for name in ("evaluated", "bleu"))
    lines = {key: (updates[key], scores[key]) for key in scores if scores[key] and key in updates}
    return _lines(lines, title, "update", "BLEU of held-out text", markers=True)


def _raw(results: Results, title: str, value: str) -> Any:
    """Gradient norms, update by update: a panel for each run, so that no spike hides another run's."""
    found = results.series.get("raw", {})
    figure = new_figure(7.2, 1.3 * len(found) + 0.9)
    axes = figure.subplots(len(found), 1, sharex=True, sharey=True, squeeze=False)
    for axis, (key, norms), shade in zip(axes.flat, found.items(), itertools.cycle(COLOURS)):
        axis.plot(range(1, len(norms) + 1), norms, color=shade, linewidth=0.5)
        axis.set_title(", ".join(key), loc="left", fontsize=9, color=INK, pad=2)
        axis.set_yscale("log")
        axis.grid(True, color=PALE, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.01)
        axis.tick_params(labelsize=7.5)
    _of_updates(axes[-1][0])
    figure.supylabel("‖g‖ before clipping", fontsize=9)
    heading(figure, title, [])
    return figure


def _gains(results: Results, title: str, value: str) -> Any:
    """g by depth: attention on the left, feed-forwards and the last norm on the right; a line style for each run."""
    places = {name.removeprefix("gain-"): found for name, found in results.series.items() if name.startswith("gain-")}
    shades = dict(zip(("encoder-attention", "decoder-attention", "decoder-encoder"), COLOURS))
    shades |= dict(zip(("encoder-feed-forward", "decoder-feed-forward"), COLOURS))
    keys = list(dict.fromkeys(key for found in places.values() for key in found))
    styles = dict(zip(keys, itertools.cycle(("-", "--", ":"))))
    figure = new_figure(8.6, 3.4)
    left, right = figure.subplots(1, 2, sharey=True)
    for place, shade in shades.items():
        axis = left if place.endswith(("attention", "decoder-encoder")) else right
        for key, values in places.get(place, {}).items():
            axis.plot(range(1, len(values) + 1), values, "o", linestyle=styles[key], color=shade, markersize=3,
                      linewidth=1.2)  # fmt: skip
    for key, values in places.get("final", {}).items():
        depth = len(places["decoder-feed-forward"][key])
        right.plot(depth + 1, values[0], "s", color=INK, markersize=4, fillstyle="full" if key == keys[0] else "none")
    for axis, about in ((left, "attention"), (right, "feed-forward, and the last norm (square)")):
        axis.set_title(about, loc="left", fontsize=9, color=INK)
        axis.set_xlabel("layer", fontsize=8.5)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(True, color=PALE, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("g", fontsize=9)
    words = "; ".join(f"{', '.join(key)} {style}" for key, style in styles.items()) if len(keys) > 1 else ""
    names = [*zip(("encoder", "decoder", "decoder to encoder"), COLOURS)]
    heading(figure, f"{title}   {words}".rstrip(), names)
    return figure


def _singular(results: Results, title: str, value: str) -> Any:
    lines = {key: (range(1, len(found) + 1), found) for key, found in results.series.get("singular", {}).items()}
    return _lines(lines, title, "number of the singular value", "over the largest")


def _statistics(results: Results, title: str, value: str) -> Any:
    """Distances from running statistics above, parts of the gradient below; a line for each run and statistic."""
    updates = results.series.get("logged", {})
    figure = new_figure(7.2, 4.6)
    axes = figure.subplots(2, 1, sharex=True)
    names: list[tuple[str, str]] = []
    for axis, what, label in zip(axes, ("distance", "gradient"), ("‖s_B − s‖/d", "‖g_s‖/d")):
        parts = {name: found for name, found in results.series.items() if name.startswith(f"{what}-")}
        pairs = [(key, name, numbers) for name, found in parts.items() for key, numbers in found.items() if numbers]
        for (key, name, numbers), shade in zip(pairs, itertools.cycle(COLOURS)):
            axis.plot(updates[key], numbers, color=shade, linewidth=1)
            if what == "distance":
                names.append((f"{', '.join(key)}: {name.removeprefix('distance-')}", shade))
        axis.set_yscale("log")
        axis.set_ylabel(label, fontsize=9)
        axis.grid(True, color=PALE, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    _of_updates(axes[-1])
    heading(figure, title, names)
    return figure


def _layers(results: Results, title: str, value: str) -> Any:
    """By layer, encoder and decoder beside each other: cosines above, active units below."""
    figure = new_figure(8.6, 4.6)
    axes = figure.subplots(2, 2, sharey="row")
    keys = list(dict.fromkeys(key for name, found in results.series.items() if name.startswith("cosine-")
                              for key in found))  # fmt: skip
    shades = dict(zip(keys, itertools.cycle(COLOURS)))
    for line, (what, label) in zip(axes, (("cosine", "cosine with the layer before"), ("active", "active units"))):
        for axis, stack in zip(line, ("encoder", "decoder")):
            for key, values in results.series.get(f"{what}-{stack}", {}).items():
                axis.plot(range(1, len(values) + 1), values, "o-", color=shades[key], markersize=2.5, linewidth=1.2)
            axis.set_title(stack, loc="left", fontsize=9, color=INK)
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.grid(True, color=PALE, linewidth=0.6)
            axis.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel(label, fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("layer", fontsize=8.5)
    heading(figure, title, [(", ".join(key), shade) for key, shade in shades.items()])
    return figure


def _growth(results: Results, title: str, value: str) -> Any:
    lines = {key: (range(1, len(found) + 1), found) for key, found in results.series.get("alpha", {}).items()}
    return _lines(lines, title, "update", "α")


def _by_key(results: Results, title: str, value: str) -> Any:
    """The value over the key that runs across, a number on a logarithmic axis; a line for each of the other keys."""
    shown = results.scale.shown
    lines: dict[tuple[str, ...], tuple[list[float], list[float]]] = {}
    for row, found in results.measured:
        measured, at = number(found.get(value, "")), number(row.key[shown.across])
        if measured is not None and at is not None and math.isfinite(measured):
            rest = tuple(v for k, v in row.key.items() if k != shown.across)
            x, y = lines.setdefault(rest, ([], []))
            x.append(at)
            y.append(measured)
    figure = _lines(lines, title, shown.across, COLUMNS[value].heading, markers=True)
    axis = figure.axes[0]
    ticks = sorted({x for xs, _ in lines.values() for x in xs})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    return figure


def _lines(lines: Mapping[tuple[str, ...], Any], title: str, x: str, y: str, *, markers: bool = False) -> Any:
    """A line for each run, its name at its end."""
    figure = new_figure(7.2, 3.6)
    axis = figure.subplots()
    shades = dict(zip(lines, itertools.cycle(COLOURS)))
    for key, (at, values) in lines.items():
        axis.plot(at, values, "o-" if markers else "-", color=shades[key], markersize=3, linewidth=1.3)
    axis.grid(True, color=PALE, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel(x, fontsize=8.5)
    axis.set_ylabel(y, fontsize=9)
    axis.margins(x=0.01)
    name_ends(axis, [(values[-1], ", ".join(key), shades[key]) for key, (_, values) in lines.items()])
    heading(figure, title, [])
    return figure


def _of_updates(axis: Any) -> None:
    axis.set_xlabel("update", fontsize=8.5)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.tick_params(labelsize=8.5)


PICTURES: dict[str, Callable[[Results, str, str], Any]] = {
    "dots": _dots,
    "validation": _validation,
    "gradients": _gradients,
    "start": _start,
    "comparison": _comparison,
    "curves": _curves,
    "raw": _raw,
    "gains": _gains,
    "singular": _singular,
    "statistics": _statistics,
    "layers": _layers,
    "growth": _growth,
    "by_key": _by_key,
}
"""By the name that `Shown.picture` has; each takes the results, the title and the column of `Shown.value`."""


def rates_of(found: Series) -> list[str]:
    return sorted({rate for _, rate in found}, key=float)


def colour(rate: str, rates: Sequence[str]) -> str:
    return COLOURS[rates.index(rate) % len(COLOURS)]


def new_figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def highlight(axis: Any, found: Series, chosen: Sequence[tuple[str, str, str]]) -> None:
    """All runs in grey, the chosen (scheme, rate, colour) on them."""
    for norms in found.values():
        axis.plot(range(1, len(norms) + 1), norms, color=OTHERS, linewidth=0.4, alpha=0.6, zorder=1)
    for name, rate, shade in chosen:
        if (name, rate) in found:
            chosen_norms = found[name, rate]
            axis.plot(range(1, len(chosen_norms) + 1), chosen_norms, color=shade, linewidth=1.1, zorder=2)
    axis.set_yscale("log")
    axis.grid(True, color=PALE, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)
    axis.margins(x=0.01)


def heading(figure: Any, title: str, names: Sequence[tuple[str, str]]) -> None:
    """The title; at the right, or below it where both do not fit, the names of the colours, drawn in them."""
    widths = [0.105 * len(name) + 0.35 for name, _ in names]  # inches
    fits = 0.0925 * len(title) + sum(widths) - 0.35 < figure.get_figwidth()
    figure.suptitle(title if fits else f"{title}\n", fontsize=11, x=0.01, ha="left", weight="bold", color=INK)
    at, top = 0.995, 0.992 if fits else 0.992 - 0.2 / figure.get_figheight()
    for (name, shade), width in zip(reversed(names), reversed(widths)):
        figure.text(at, top, f"●  {name}", color=shade, fontsize=9.5, ha="right", va="top", weight="bold")
        at -= width / figure.get_figwidth()


def save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    return path
