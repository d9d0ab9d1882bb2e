"""The pictures of benches/results: `python benches/figures.py` draws them anew from the tables there.

depth18.png, depth50.png    gradient norms of the first 100 updates, a panel for each scheme (BrN Fig 3)
../docs/images/depth.png    validation losses of deep stacks by scheme, README's picture
"""

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
LOW, HIGH, OTHERS, INK = "#3b6fb5", "#d1495b", "#cfcfcf", "#333333"
Curves = dict[tuple[str, str], list[float]]


def curves(path: Path) -> Curves:
    """The gradient norms by (scheme, learning rate)."""
    with path.open(newline="", encoding="utf-8") as file:
        return {(scheme, lr): [float(norm) for norm in norms] for scheme, lr, *norms in csv.reader(file)}


def gradients(found: Curves, title: str, path: Path) -> Path:
    """A panel for each scheme, a line for each rate; behind them, in grey, those of all schemes."""
    schemes, rates = list(dict.fromkeys(scheme for scheme, _ in found)), _rates(found)
    columns = min(5, len(schemes)) if len(schemes) > 6 else 3
    rows = math.ceil(len(schemes) / columns)
    figure = _figure(2.35 * columns, 1.75 * rows + 0.9)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axis, scheme in zip(axes.flat, schemes):
        _highlight(axis, found, [(scheme, rate, _colour(rate, rates)) for rate in rates])
        axis.set_title(scheme, loc="left", fontsize=9.5, color=INK, pad=3)
    for axis in axes.flat[len(schemes) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("update", fontsize=8.5)
    figure.supylabel("‖g‖ before clipping", fontsize=9)
    _heading(figure, title, [(f"lr {float(rate):g}", _colour(rate, rates)) for rate in rates])
    return _save(figure, path)


def scheme(name: str, sources: Iterable[tuple[str, Path]], path: Path) -> Path | None:
    """One scheme's gradient norms at each depth and rate, the others' in grey; None where it was not run."""
    panels = [(depth, found, rate) for depth, file in sources if file.exists() for found in [curves(file)]
              for rate in _rates(found) if (name, rate) in found]  # fmt: skip
    if not panels:
        return None
    figure = _figure(2.7 * len(panels) + 0.3, 2.7)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (depth, found, rate) in zip(axes, panels):
        _highlight(axis, {key: norms for key, norms in found.items() if key[1] == rate}, [(name, rate, HIGH)])
        axis.set_title(f"{depth} layers, lr {float(rate):g}", loc="left", fontsize=9.5, color=INK)
        axis.set_xlabel("update", fontsize=8.5)
    axes[0].set_ylabel("‖g‖ before clipping", fontsize=9)
    return _save(figure, path)


def losses(tables: Sequence[tuple[str, Path]], path: Path) -> Path:
    """The last validation loss by scheme and rate, a panel for each depth, the best first."""
    read = [(title, _by_scheme(file)) for title, file in tables]
    tallest = max(len(found) for _, found in read)
    figure = _figure(4.6 * len(read), 0.235 * tallest + 1.25)
    axes = figure.subplots(1, len(read), sharex=True, squeeze=False)[0]
    for axis, (title, found) in zip(axes, read):
        ranked = sorted(found, key=lambda name: min(float(row["valid_nll"]) for row in found[name]))
        for height, name in zip(range(tallest - 1, -1, -1), ranked):
            points = sorted((float(row["lr"]), float(row["valid_nll"])) for row in found[name])
            axis.plot([loss for _, loss in points], [height] * len(points), color=OTHERS, linewidth=2.2, zorder=1)
            for (_, loss), colour in zip(points, (LOW, HIGH)):
                axis.plot(loss, height, "o", color=colour, markersize=5.5, zorder=2)
        axis.set_yticks(range(tallest - 1, tallest - 1 - len(ranked), -1), ranked, fontsize=9)
        axis.set_ylim(-0.7, tallest - 0.3)
        entropy = float(found[ranked[0]][0]["unigram_entropy"])
        lowest = (tallest - len(ranked) - 0.35) / tallest
        axis.axvline(entropy, ymin=max(lowest, 0), color="#888888", linewidth=1, linestyle=(0, (4, 3)), zorder=0)
        axis.annotate("unigram model", (entropy + 0.07, tallest - 0.8), fontsize=8, color="#666666", va="center")
        axis.set_title(title, loc="left", fontsize=9.5, color=INK)
        axis.grid(True, axis="x", color="#ececec", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(left=False, labelsize=8.5)
        axis.set_xlabel("validation loss, nats per token: less is better", fontsize=8.5)
    _heading(figure, "Deep Transformers without warm-up, by residual scheme", [("lr 5e-4", LOW), ("lr 2e-3", HIGH)])
    return _save(figure, path)


def _by_scheme(path: Path) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["residual"], []).append(row)
    return found


def _rates(found: Curves) -> list[str]:
    return sorted({rate for _, rate in found}, key=float)


def _colour(rate: str, rates: Sequence[str]) -> str:
    return (LOW, HIGH, "#3a7d44")[rates.index(rate) % 3]


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _highlight(axis: Any, found: Curves, chosen: Sequence[tuple[str, str, str]]) -> None:
    for norms in found.values():
        axis.plot(range(1, len(norms) + 1), norms, color=OTHERS, linewidth=0.4, alpha=0.6, zorder=1)
    for name, rate, colour in chosen:
        if (name, rate) in found:
            norms = np.array(found[name, rate])
            axis.plot(range(1, len(norms) + 1), norms, color=colour, linewidth=1.1, zorder=2)
    axis.set_yscale("log")
    axis.grid(True, color="#ececec", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)
    axis.margins(x=0.01)


def _heading(figure: Figure, title: str, names: Sequence[tuple[str, str]]) -> None:
    """The title, and beside it the names of the colours, drawn in them."""
    figure.suptitle(title, fontsize=11, x=0.01, ha="left", weight="bold", color=INK)
    at = 0.995
    for name, colour in reversed(names):
        figure.text(at, 0.992, f"●  {name}", color=colour, fontsize=9.5, ha="right", va="top", weight="bold")
        at -= 1.05 / figure.get_figwidth()


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    return path


def main() -> None:
    tables = []
    for layers in (18, 50):
        file = RESULTS / f"depth{layers}.csv"
        updates = next(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))["updates"]
        tables.append((f"{layers}+{layers} layers, {updates} updates", file))
        title = f"Gradient norms, {layers}+{layers} layers"
        print(gradients(curves(RESULTS / f"depth{layers}-gradients.csv"), title, RESULTS / f"depth{layers}.png"))
    print(losses(tables, IMAGES / "depth.png"))


if __name__ == "__main__":
    main()
