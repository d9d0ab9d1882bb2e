"""The picture of a training run."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ._optional import require

if TYPE_CHECKING:
    from .history import History

_TRAIN, _VALID, _BEST = "#8fb3d9", "#c8442f", "#1f6f4a"
_GRID = {"color": "#e4e4e4", "linewidth": 0.8}


def save(history: "History", path: Path) -> Path:
    """Loss, BLEU, gradient norm and learning rate against updates, as one picture; the user's pyplot is not touched.

    Errors: ImportError without matplotlib.
    """
    require("matplotlib", "the picture of the curves")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, sharex=True)
    _loss(axes[0, 0], history)
    _bleu(axes[0, 1], history)
    _line(axes[1, 0], history, history.grad_norm, "gradient norm", "‖g‖ before clipping")
    axes[1, 0].set_yscale("log")
    _line(axes[1, 1], history, history.lr, "learning rate", "learning rate")
    axes[1, 1].ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    for axis in axes.flat:
        axis.grid(True, **_GRID)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.01)
    for axis in axes[1]:
        axis.set_xlabel("update")
    title = f"{history.output.name or 'training'}   {len(history.update):,} updates"
    figure.suptitle(title, fontsize=11, x=0.01, ha="left", weight="bold", parse_math=False)
    figure.savefig(path)
    return path


def _loss(axis: Any, history: "History") -> None:
    evaluations = history.evaluations
    axis.plot(history.update, history.loss, color=_TRAIN, linewidth=1.0, label="training")
    if len(evaluations.update):
        axis.plot(evaluations.update, evaluations.loss, "o-", color=_VALID, markersize=3, label="validation")
    axis.set_title("loss", loc="left", fontsize=10)
    axis.set_ylabel("nats per token, smoothed")
    axis.legend(frameon=False, fontsize=8)


def _bleu(axis: Any, history: "History") -> None:
    evaluations = history.evaluations
    axis.set_title("validation BLEU", loc="left", fontsize=10)
    axis.set_ylabel("BLEU")
    scored = np.isfinite(evaluations.bleu)
    if not scored.any():
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color="#888888")
        return
    update, bleu = evaluations.update[scored], evaluations.bleu[scored]
    axis.plot(update, bleu, "o-", color=_VALID, markersize=3)
    best = bleu.argmax()
    axis.plot(update[best], bleu[best], "o", color=_BEST, markersize=6, label=f"best {bleu[best]:.2f}")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=8, loc="lower right")


def _line(axis: Any, history: "History", values: Any, title: str, label: str) -> None:
    axis.plot(history.update, values, color="#46688c", linewidth=1.0)
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_ylabel(label)
