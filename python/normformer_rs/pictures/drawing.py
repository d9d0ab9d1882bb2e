"""Draws figures like those of the papers, from series of numbers by name and by run. pyplot is not used."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .curves import COLOURS, literal, name_ends

# INK is the colour of text, OTHERS that of runs in the background, PALE that of grids.
INK, OTHERS, PALE = "#333333", "#cfcfcf", "#ececec"

Series = dict[tuple[str, ...], list[float]]
"""The numbers of each run, by the tuple of names that identifies the run."""


def bleu(series: Mapping[str, Series], title: str) -> Any:
    """Returns a figure of BLEU on the validation set over training, with a line for each run. `series` has the scores
    ("bleu") and the updates after which they were measured ("evaluated")."""
    updates, scores = (series.get(name, {}) for name in ("evaluated", "bleu"))
    drawn = {key: (updates[key], scores[key]) for key in scores if scores[key] and key in updates}
    return lines(drawn, title, "update", "BLEU of held-out text", markers=True)


def gradient_norms(series: Mapping[str, Series], title: str) -> Any:
    """Returns a figure of the gradient norm at each update, from the series "raw". Each run has its own panel, so that
    its spikes do not hide those of other runs."""
    runs = series.get("raw", {})
    figure = new_figure(7.2, 1.3 * len(runs) + 0.9)
    axes = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)
    for axis, (key, norms), shade in zip(axes.flat, runs.items(), itertools.cycle(COLOURS)):
        axis.plot(range(1, len(norms) + 1), norms, color=shade, linewidth=0.5)
        axis.set_title(", ".join(key), loc="left", fontsize=9, color=INK, pad=2)
        axis.set_yscale("log")
        axis.grid(True, color=PALE, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.01)
        axis.tick_params(labelsize=7.5)
    of_updates(axes[-1][0])
    figure.supylabel("‖g‖ before clipping", fontsize=9)
    heading(figure, title, [])
    return figure


def gains(series: Mapping[str, Series], title: str) -> Any:
    """Returns a figure of ScaleNorm's g by layer: norms of attention on the left, of feed-forward sublayers and the
    last norm on the right. Each run has its own line style. The series are "gain-PLACE", such as
    gain-encoder-attention and gain-final."""
    places = {name.removeprefix("gain-"): runs for name, runs in series.items() if name.startswith("gain-")}
    shades = dict(zip(("encoder-attention", "decoder-attention", "decoder-encoder"), COLOURS))
    shades |= dict(zip(("encoder-feed-forward", "decoder-feed-forward"), COLOURS))
    keys = list(dict.fromkeys(key for runs in places.values() for key in runs))
    styles = dict(zip(keys, itertools.cycle(("-", "--", ":"))))
    figure = new_figure(8.6, 3.4)
    left, right = figure.subplots(1, 2, sharey=True)
    for place, shade in shades.items():
        axis = left if place.endswith(("attention", "decoder-encoder")) else right
        for key, values in places.get(place, {}).items():
            axis.plot(range(1, len(values) + 1), values, "o", linestyle=styles[key], color=shade, markersize=3,
                      linewidth=1.2)  # fmt: skip
    # The last norm is drawn as a square behind the last layer, filled for the first run only.
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


def singular_values(series: Mapping[str, Series], title: str) -> Any:
    """Returns a figure of singular values over the largest one, with a line for each run."""
    drawn = {key: (range(1, len(values) + 1), values) for key, values in series.get("singular", {}).items()}
    return lines(drawn, title, "number of the singular value", "over the largest")


def statistics(series: Mapping[str, Series], title: str) -> Any:
    """Returns a figure with two panels: above, the distance of a batch's statistics from the running ones; below, the
    part of the gradient that flows through the statistics. There is a line for each run and statistic."""
    updates = series.get("logged", {})
    figure = new_figure(7.2, 4.6)
    axes = figure.subplots(2, 1, sharex=True)
    names: list[tuple[str, str]] = []
    for axis, what, label in zip(axes, ("distance", "gradient"), ("‖s_B − s‖/d", "‖g_s‖/d")):
        parts = {name: runs for name, runs in series.items() if name.startswith(f"{what}-")}
        curves = [(key, name, numbers) for name, runs in parts.items() for key, numbers in runs.items() if numbers]
        for (key, name, numbers), shade in zip(curves, itertools.cycle(COLOURS)):
            axis.plot(updates[key], numbers, color=shade, linewidth=1)
            if what == "distance":
                names.append((f"{', '.join(key)}: {name.removeprefix('distance-')}", shade))
        axis.set_yscale("log")
        axis.set_ylabel(label, fontsize=9)
        axis.grid(True, color=PALE, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    of_updates(axes[-1])
    heading(figure, title, names)
    return figure


def layers(series: Mapping[str, Series], title: str) -> Any:
    """Returns a figure with the cosine to the layer before (above) and the share of active units (below) by layer.
    Encoder and decoder are beside each other."""
    stacks = [stack for stack in ("encoder", "decoder") if f"cosine-{stack}" in series]
    figure = new_figure(4.3 * len(stacks), 4.6)
    axes = figure.subplots(2, len(stacks), sharey="row", squeeze=False)
    keys = list(dict.fromkeys(key for name, runs in series.items() if name.startswith("cosine-")
                              for key in runs))  # fmt: skip
    shades = dict(zip(keys, itertools.cycle(COLOURS)))
    # The upper row of panels shows the cosines, the lower one the active units; each has a panel for each stack.
    for line, (what, label) in zip(axes, (("cosine", "cosine with the layer before"), ("active", "active units"))):
        for axis, stack in zip(line, stacks):
            for key, values in series.get(f"{what}-{stack}", {}).items():
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


def growth(series: Mapping[str, Series], title: str) -> Any:
    """Returns a figure of a growing gain α at each update, with a line for each run."""
    drawn = {key: (range(1, len(alphas) + 1), alphas) for key, alphas in series.get("alpha", {}).items()}
    return lines(drawn, title, "update", "α")


def changes(series: Mapping[str, Series], title: str) -> Any:
    """Returns a figure of the change of the model's output over training, with a line for each run."""
    drawn = {key: (series["logged"][key], values) for key, values in series["change"].items()}
    return lines(drawn, title, "update", "‖F(x; θ) − F(x; θ₀)‖₂")


def stream(series: Mapping[str, Series], title: str) -> Any:
    """Returns a figure of the mean |x| of the decoder's residual stream by layer, on a logarithmic axis, with a line
    for each run."""
    # The first size is that of the stack's input, which counts as layer 0.
    drawn = {key: (range(len(sizes)), sizes) for key, sizes in series["size-decoder"].items()}
    figure = lines(drawn, title, "layer", "mean |x|", markers=True)
    figure.axes[0].set_yscale("log")
    return figure


def lines(drawn: Mapping[tuple[str, ...], Any], title: str, x: str, y: str, *, markers: bool = False) -> Any:
    """Returns a figure with a line for each run, and the run's name at the end of its line. `drawn` has each run's
    (places on the x axis, values); `x` and `y` are the axes' labels."""
    figure = new_figure(7.2, 3.6)
    axis = figure.subplots()
    shades = dict(zip(drawn, itertools.cycle(COLOURS)))
    for key, (places, values) in drawn.items():
        axis.plot(places, values, "o-" if markers else "-", color=shades[key], markersize=3, linewidth=1.3)
    axis.grid(True, color=PALE, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel(x, fontsize=8.5)
    axis.set_ylabel(y, fontsize=9)
    axis.margins(x=0.01)
    name_ends(axis, [(values[-1], ", ".join(key), shades[key]) for key, (_, values) in drawn.items()])
    heading(figure, title, [])
    return figure


def heat(values: Sequence[Sequence[float]], steps: Sequence[int], title: str) -> Any:
    """Returns a heat map of `values`: a line for each layer, with the first layer lowest, and a column for each update
    in `steps`."""
    figure = new_figure(7.2, 0.28 * len(values) + 1.5)
    axis = figure.subplots()
    image = axis.imshow(values, aspect="auto", origin="lower", cmap="viridis", interpolation="nearest")
    figure.colorbar(image, ax=axis, pad=0.02).ax.tick_params(labelsize=7.5)
    shown = range(0, len(steps), max(1, len(steps) // 8))
    axis.set_xticks([*shown], [f"{steps[i]:,}" for i in shown], fontsize=8)
    axis.set_xlabel("update", fontsize=8.5)
    axis.set_ylabel("layer", fontsize=9)
    axis.yaxis.get_major_locator().set_params(integer=True)
    heading(figure, title, [])
    return figure


def of_updates(axis: Any) -> None:
    """Labels an x axis that counts updates."""
    axis.set_xlabel("update", fontsize=8.5)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.tick_params(labelsize=8.5)


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure of this size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def highlight(axis: Any, runs: Series, chosen: Sequence[tuple[str, str, str]]) -> None:
    """Draws the gradient norms of all `runs` in grey, and over them those of the chosen runs in colour. `runs` has
    (scheme, rate) as keys; each chosen run is given as (scheme, rate, colour)."""
    for norms in runs.values():
        axis.plot(range(1, len(norms) + 1), norms, color=OTHERS, linewidth=0.4, alpha=0.6, zorder=1)
    for name, rate, shade in chosen:
        if (name, rate) in runs:
            chosen_norms = runs[name, rate]
            axis.plot(range(1, len(chosen_norms) + 1), chosen_norms, color=shade, linewidth=1.1, zorder=2)
    axis.set_yscale("log")
    axis.grid(True, color=PALE, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)
    axis.margins(x=0.01)


def heading(figure: Any, title: str, names: Sequence[tuple[str, str]]) -> None:
    """Writes the title, and the legend of `names` and colours: to the right of the title, or below it if both do not
    fit in one line."""
    # These widths in inches are estimates: 0.105 for a letter of a name, 0.35 for the dot and the gap beside it, 0.0925
    # for a letter of the title.
    widths = [0.105 * len(name) + 0.35 for name, _ in names]
    fits = 0.0925 * len(title) + sum(widths) - 0.35 < figure.get_figwidth()
    figure.suptitle(title if fits else f"{title}\n", fontsize=11, x=0.01, ha="left", weight="bold", color=INK)
    # In shares of the figure's width and height; the legend is written from right to left.
    right, top = 0.995, 0.992 if fits else 0.992 - 0.2 / figure.get_figheight()
    for (name, shade), width in zip(reversed(names), reversed(widths)):
        figure.text(right, top, f"●  {name}", color=shade, fontsize=9.5, ha="right", va="top", weight="bold")
        right -= width / figure.get_figwidth()


def save(figure: Any, path: Path) -> Path:
    """Writes a figure in the format of the path's ending, and creates missing folders. Returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A PNG would name matplotlib and its version in its metadata; this is left out, so that files do not depend on it.
    literal(figure).savefig(path, metadata={"Software": None} if path.suffix.lower() in ("", ".png") else None)
    return path
