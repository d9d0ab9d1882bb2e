"""Draws pictures from the tables of benches/results. `python benches/figures.py` draws the README's picture again.

../docs/images/depth.png    validation losses of deep stacks by scheme
`scheme` draws the picture of gradient norms on each scheme's page. `normformer-rs reproduce` draws the pictures in
benches/results.
"""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from normformer_rs.pictures.drawing import INK, OTHERS, heading, highlight, new_figure, save
from normformer_rs.reproduce.pictures import rates_of
from normformer_rs.reproduce.results import read_series

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
LOW, HIGH = "#3b6fb5", "#d1495b"


def scheme(name: str, sources: Iterable[tuple[str, Path]], path: Path) -> Path | None:
    """Draws a scheme's gradient norms, with a panel for each depth and rate; those of other schemes are grey. Returns
    the picture's path, or None if the scheme was not run."""
    panels = [(depth, found, rate) for depth, file in sources if file.exists() for found in [read_series(file)]
              for rate in rates_of(found) if (name, rate) in found]  # fmt: skip
    if not panels:
        return None
    figure = new_figure(2.7 * len(panels) + 0.3, 2.7)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (depth, found, rate) in zip(axes, panels):
        highlight(axis, {key: norms for key, norms in found.items() if key[1] == rate}, [(name, rate, HIGH)])
        axis.set_title(f"{depth} layers, lr {float(rate):g}", loc="left", fontsize=9.5, color=INK)
        axis.set_xlabel("update", fontsize=8.5)
    axes[0].set_ylabel("‖g‖ before clipping", fontsize=9)
    return save(figure, path)


def losses(tables: Sequence[tuple[str, Path]], path: Path) -> Path:
    """Draws the last validation loss of each scheme and rate, with a panel for each depth; the best scheme comes first.
    Returns the picture's path."""
    read = [(title, _by_scheme(file)) for title, file in tables]
    tallest = max(len(found) for _, found in read)
    figure = new_figure(4.6 * len(read), 0.235 * tallest + 1.25)
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
    heading(figure, "Deep Transformers without warm-up, by residual scheme", [("lr 5e-4", LOW), ("lr 2e-3", HIGH)])
    return save(figure, path)


def _by_scheme(path: Path) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["residual"], []).append(row)
    return found


def main() -> None:
    tables = []
    for layers in (18, 50):
        file = RESULTS / f"brn-table1-{layers}-here.csv"
        updates = next(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))["updates"]
        tables.append((f"{layers}+{layers} layers, {updates} updates", file))
    print(losses(tables, IMAGES / "depth.png"))


if __name__ == "__main__":
    main()
