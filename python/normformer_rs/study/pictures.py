"""Draws the pictures of a study, without pyplot."""

import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..pictures.curves import COLOURS, name_ends
from ..pictures.drawing import PALE, heading, new_figure, save
from ..reproduce.tables import COLUMNS
from .outcome import Arm, Outcome


def drawn(outcome: Outcome, output: Path) -> Iterator[tuple[Path, str]]:
    """Draws the pictures for which the study has numbers. Yields the path of each picture and a description of it."""
    heading_of_metric = COLUMNS[outcome.study.metric].heading
    if any(values for arm in outcome.arms for values in arm.curve.values()):
        about = f"{heading_of_metric} against the learning rate: mean over seeds, band from the lowest to the highest"
        yield save(_by_rate(outcome), output / "by-rate.png"), about
        about = f"sensitivity to the rate against the best {heading_of_metric} of the grid"
        yield save(_sensitivity(outcome), output / "sensitivity.png"), about
    if len(outcome.study.layers) > 1 and any(arm.found for arm in outcome.arms):
        yield save(_by_depth(outcome), output / "by-depth.png"), f"{heading_of_metric} against the number of layers"


def _by_rate(outcome: Outcome) -> Any:
    """Returns a figure of the metric against the rate, with a panel for each depth. A cross at the top marks a rate
    with failed runs."""
    panels = _panels(outcome)
    figure = new_figure(6.4 * len(panels), 3.8)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    marks = []  # (axis, ends, crosses) of each panel
    for axis, (title, arms) in zip(axes, panels.items()):
        ends, crosses = [], []  # (last value, name, colour) of each line; (rate, colour) of each rate with failed runs
        for arm, shade in zip(arms, itertools.cycle(COLOURS)):
            points = {rate: [value for value in values if value is not None] for rate, values in arm.curve.items()}
            points = {rate: values for rate, values in sorted(points.items()) if values}
            if points:
                means = [statistics.fmean(values) for values in points.values()]
                axis.plot([*points], means, "o-", color=shade, markersize=4, linewidth=1.4)
                low, high = [min(values) for values in points.values()], [max(values) for values in points.values()]
                axis.fill_between([*points], low, high, color=shade, alpha=0.15, linewidth=0)
                ends.append((means[-1], _name(arm), shade))
            crosses += [(rate, shade) for rate, values in arm.curve.items() if None in values]
        marks.append((axis, ends, crosses))
        axis.set_xscale("log")
        axis.set_xticks([*outcome.study.lr], [f"{rate:g}" for rate in outcome.study.lr])
        axis.minorticks_off()
        axis.set_xlabel("learning rate", fontsize=9)
        axis.set_title(title, loc="left", fontsize=9)
        _plain(axis)
    # The panels share their limits, which are settled once all of them have been drawn.
    for axis, ends, crosses in marks:
        top = axis.get_ylim()[1]
        for rate, shade in crosses:
            axis.plot(rate, top, "x", color=shade, markersize=7, clip_on=False)
        name_ends(axis, ends)
    axes[0].set_ylabel(COLUMNS[outcome.study.metric].heading, fontsize=9)
    heading(figure, "By learning rate", [])
    return figure


def _sensitivity(outcome: Outcome) -> Any:
    """Returns a figure with a dot for each arm: its sensitivity to the rate against its best mean over the seeds."""
    figure = new_figure(6.4, 3.6)
    axis = figure.subplots()
    for arm, shade in zip(outcome.arms, itertools.cycle(COLOURS)):
        means = [statistics.fmean(finished) for values in arm.curve.values()
                 if (finished := [value for value in values if value is not None])]  # fmt: skip
        if means:
            best = min(means) if COLUMNS[outcome.study.metric].falls else max(means)
            axis.plot(best, arm.sensitivity, "o", color=shade, markersize=7)
            offset = {"xytext": (7, -3), "textcoords": "offset points"}
            axis.annotate(arm.cell.name, (best, arm.sensitivity), **offset, fontsize=8.5, color=shade)
    axis.set_xlabel(f"best {COLUMNS[outcome.study.metric].heading} of the grid", fontsize=9)
    axis.set_ylabel("sensitivity to the rate, nats", fontsize=9)
    axis.margins(x=0.25, y=0.15)
    _plain(axis)
    heading(figure, "Sensitivity to the rate", [])
    return figure


def _by_depth(outcome: Outcome) -> Any:
    """Returns a figure of the metric against the number of layers, with a line for each arm."""
    # The points of each arm, by its name. A point is (depth, mean, lowest value, highest value).
    lines: dict[str, list[tuple[int, float, float, float]]] = {}
    for arm in outcome.arms:
        if arm.found:
            line = lines.setdefault(_name(arm), [])
            line.append((int(arm.cell.key["layers"]), statistics.fmean(arm.found), min(arm.found), max(arm.found)))
    figure = new_figure(6.4, 3.8)
    axis, ends = figure.subplots(), []
    for (name, points), shade in zip(lines.items(), itertools.cycle(COLOURS)):
        depths, means, low, high = zip(*sorted(points))
        axis.plot(depths, means, "o-", color=shade, markersize=4, linewidth=1.4)
        axis.fill_between(depths, low, high, color=shade, alpha=0.15, linewidth=0)
        ends.append((means[-1], name, shade))
    axis.set_xticks(sorted(outcome.study.layers))
    axis.set_xlabel("layers", fontsize=9)
    axis.set_ylabel(COLUMNS[outcome.study.metric].heading, fontsize=9)
    _plain(axis)
    name_ends(axis, ends)
    heading(figure, "By depth", [])
    return figure


def _panels(outcome: Outcome) -> dict[str, list[Arm]]:
    """Returns the arms of each depth, by the title of the depth's panel."""
    panels: dict[str, list[Arm]] = {}
    for arm in outcome.arms:
        layers = arm.cell.key.get("layers")
        panels.setdefault(f"{layers} layers" if layers else "", []).append(arm)
    return panels


def _name(arm: Arm) -> str:
    """Returns the arm's name without its number of layers, which the panel or the axis shows."""
    return ", ".join(value for column, value in arm.cell.key.items() if column != "layers")


def _plain(axis: Any) -> None:
    """Adds a grid to the axis, and removes the lines at its top and right."""
    axis.grid(True, color=PALE, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8.5)
