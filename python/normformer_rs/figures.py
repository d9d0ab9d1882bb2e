"""The papers' pictures of finished runs: each function takes folders of runs, or results of `Trainer.fit`.

>>> from normformer_rs import figures
>>> figures.gains("runs/scalenorm", path="gains.png")  # doctest: +SKIP
PosixPath('gains.png')

Every function takes the picture's `path`, and `names` of the runs; None uses their folders' names. The path's ending
sets the format: png, svg or pdf. Each function returns the path. All raise InputError for no run, for a folder without
a run, if there are not as many names as runs, and if the runs lack the values to draw; and ImportError without
matplotlib.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from . import _core
from ._optional import require
from .analysis import Readings, observations
from .analysis.observations import Found
from .commands.options import RUN_CONFIG, read_run
from .config import DataConfig, TrainingConfig, TransformerConfig
from .errors import InputError
from .loop.history import History, histories
from .pictures import drawing
from .pictures.curves import told_apart

Run = History | str | PathLike[str]


def gradient_norms(
    *runs: Run, path: str | PathLike[str] = "gradient-norms.png", names: Sequence[str] | None = None
) -> Path:
    """Draws ‖g‖ before clipping, update by update, a panel for each run (Nguyen & Salazar 2019, Fig 2; Liu et al.
    2023, Fig 3)."""
    return _draw(runs, names, path, "Gradient norms", drawing.gradient_norms, observations.gradient_norms)


def bleu(*runs: Run, path: str | PathLike[str] = "bleu.png", names: Sequence[str] | None = None) -> Path:
    """Draws BLEU of the validation set over training, a line for each run (Nguyen & Salazar 2019, Fig 1; Liu et al.
    2023, Fig 5). InputError if a run measured none (criterion "bleu" does)."""

    def measured(history: History) -> Found:
        if not np.isfinite(history.evaluations.bleu).any():
            raise InputError(f'{history.output}: no BLEU was measured; train with criterion = "bleu"')
        return observations.bleu(history)

    return _draw(runs, names, path, "BLEU of held-out text", drawing.bleu, measured)


def bleu_by_depth(
    *runs: Run, path: str | PathLike[str] = "bleu-by-depth.png", names: Sequence[str] | None = None
) -> Path:
    """Draws the best BLEU of the validation set over the number of layers of both stacks (Liu et al. 2023, Fig 1), a
    line for each name; without names a line for each residual scheme and norm."""
    histories = _histories(runs, names)
    points_by_name: dict[str, list[tuple[int, float]]] = {}
    for number, history in enumerate(histories):
        scores = history.evaluations.bleu
        if not np.isfinite(scores).any():
            raise InputError(f'{history.output}: no BLEU was measured; train with criterion = "bleu"')
        model = _options(history)
        has_encoder = model["architecture"] != "decoder-only"
        depth = model["decoder_layers"] + (model["encoder_layers"] if has_encoder else 0)
        name = names[number] if names else f"{model['residual']}, {model['norm']}"
        points_by_name.setdefault(name, []).append((depth, float(np.nanmax(scores))))
    require("matplotlib", "the picture")
    # `lines` takes a tuple of depths and one of scores for each line, whose key is a tuple with its name.
    drawn: dict[tuple[str, ...], Any] = {
        (name,): tuple(zip(*sorted(points))) for name, points in points_by_name.items()
    }
    figure = drawing.lines(drawn, "BLEU by depth", "layers", "best BLEU of held-out text", markers=True)
    figure.axes[0].set_xticks(sorted({depth for points in points_by_name.values() for depth, _ in points}))
    return drawing.save(figure, Path(path))


def gains(
    *runs: Run,
    path: str | PathLike[str] = "gains.png",
    names: Sequence[str] | None = None,
    checkpoint: str = "last",
) -> Path:
    """Draws the learned g of each ScaleNorm by layer: attention on the left, feed-forwards on the right, with the
    last norm's as a square (Nguyen & Salazar 2019, Fig 3, 4). `checkpoint`: last, best, average or a number of
    updates."""
    return _draw(runs, names, path, "Learned g", drawing.gains, lambda run: observations.gains(run.output, checkpoint))


def singular_values(
    *runs: Run,
    path: str | PathLike[str] = "singular-values.png",
    names: Sequence[str] | None = None,
    checkpoint: str = "last",
) -> Path:
    """Draws σ_i/σ_1 of the embedding of target words, in descending order (Shen et al. 2020, Fig 6)."""

    def measured(run: History) -> Found:
        return observations.singular_values(run.output, checkpoint)

    return _draw(runs, names, path, "Singular values of the embedding", drawing.singular_values, measured)


def statistics(*runs: Run, path: str | PathLike[str] = "statistics.png", names: Sequence[str] | None = None) -> Path:
    """Draws the distances of batches' statistics from the running ones, and their part in the gradient, in the first
    norm over training (Shen et al. 2020, Fig 2 to 4). InputError if a run logged none: it needs `log_statistics`,
    and batchnorm, powernorm-v or powernorm."""
    lacking = "batch statistics were logged; train batchnorm, powernorm-v or powernorm with"
    measure = _logged(observations.statistics, lacking)
    return _draw(runs, names, path, "Batch statistics of the first norm", drawing.statistics, measure)


def changes(*runs: Run, path: str | PathLike[str] = "changes.png", names: Sequence[str] | None = None) -> Path:
    """Draws ‖F(x; θ) − F(x; θ₀)‖₂ of the decoder's output over training, the distance that a model has moved (Wang
    et al. 2022, Fig 3). InputError if a run was trained without `log_statistics`."""
    measure = _logged(observations.changes, "changes were logged; train with")
    return _draw(runs, names, path, "Change of the model's output", drawing.changes, measure)


def layers(
    *runs: Run,
    path: str | PathLike[str] = "layers.png",
    names: Sequence[str] | None = None,
    checkpoint: str = "last",
    source: str | PathLike[str] | None = None,
    target: str | PathLike[str] | None = None,
) -> Path:
    """Draws, by layer, the cosine of each layer's output with the one before, and the share of active units, encoder
    and decoder beside each other (Liu et al. 2023, Fig 8, 9). `source`, `target`: the files of a text; None for the
    run's validation set."""
    return _draw(runs, names, path, "Layers", drawing.layers, _reading(checkpoint, source, target))


def stream(
    *runs: Run,
    path: str | PathLike[str] = "stream.png",
    names: Sequence[str] | None = None,
    checkpoint: str = "last",
    source: str | PathLike[str] | None = None,
    target: str | PathLike[str] | None = None,
) -> Path:
    """Draws the mean |x| of the decoder's residual stream by layer; 0 is the stack's input. `source` and `target`
    are as for `layers`."""
    return _draw(runs, names, path, "Size of the residual stream", drawing.stream, _reading(checkpoint, source, target))


def readings(
    found: Sequence[Readings],
    measure: str,
    role: str,
    *,
    steps: Sequence[int] | None = None,
    path: str | PathLike[str] = "readings.png",
) -> Path:
    """Draws a measure of `analysis.probe` as a heat map, layer by time: one column for each of `found`, in order.

    Args:
        measure: a name of `analysis.MEASURES`.
        role: q, k, v, out, fc1, gate, fc2, norm, attention or layer.
        steps: the updates at which the readings were taken; None for 1, 2, …

    Returns: the path. Errors: InputError if nothing was read under these names, or if there are not as many steps.
    """
    steps = [*range(1, len(found) + 1)] if steps is None else [*steps]
    if len(steps) != len(found):
        raise InputError(f"readings needs a step for each of the {len(found)} readings; got {len(steps)}")
    columns = [step_readings.layers(measure, role) for step_readings in found]
    depth = 1 + max((layer for column in columns for layer in column), default=-1)  # 0 if nothing was read
    if not depth:
        of_layers = [reading for step_readings in found for reading in step_readings if reading.layer is not None]
        known = sorted({f"{reading.measure} of {reading.role}" for reading in of_layers})
        raise InputError(f"no {measure} of {role} was read; there are {', '.join(known) or 'none'}")
    require("matplotlib", "the picture")
    values = [[column.get(layer, np.nan) for column in columns] for layer in range(depth)]
    return drawing.save(drawing.heat(values, steps, f"{measure} of {role}"), Path(path))


def _reading(
    checkpoint: str, source: str | PathLike[str] | None, target: str | PathLike[str] | None
) -> Callable[[History], Found]:
    """Returns the function that measures a run's layers on a text, or on the run's validation set if `target` is
    None."""

    def measured(run: History) -> Found:
        if target is not None:
            return observations.layers(run.output, checkpoint, None if source is None else str(source), str(target))
        data = json.loads(_core.run_options(str(run.output), checkpoint))["data"]
        if data["valid_target"] is None or not Path(data["valid_target"]).exists():
            missing = f"{run.output}: its validation text is not at {data['valid_target']}"
            raise InputError(f"{missing}; give target=, source=")
        return observations.layers(run.output, checkpoint, data["valid_source"], data["valid_target"])

    return measured


def _options(run: History) -> dict[str, Any]:
    """Returns the options of a run from its config.json, with defaults for those that it lacks. Errors: InputError if
    that is missing or damaged."""
    fields = [field for kind in (TransformerConfig, TrainingConfig, DataConfig) for field in kind.FIELDS]
    saved = read_run(run.output, [field.name for field in fields])
    if not saved:
        raise InputError(f"{run.output}: no {RUN_CONFIG} there; expected the --output folder of a run")
    return {field.name: field.default for field in fields} | saved


def _logged(measure: Callable[[History], Found], lacking: str) -> Callable[[History], Found]:
    """Returns a function that calls `measure`, and raises InputError if the result is empty. The message is
    "no {lacking} log_statistics = N"."""

    def measured(history: History) -> Found:
        if not (numbers := measure(history)):
            raise InputError(f"{history.output}: no {lacking} log_statistics = N")
        return numbers

    return measured


def _histories(runs: Sequence[Run], names: Sequence[str] | None) -> list[History]:
    """Returns the histories of one or more runs. Errors: InputError."""
    if not runs:
        raise InputError("no run to draw; expected one or more folders of runs")
    return histories(runs, names)


def _draw(
    runs: Sequence[Run],
    names: Sequence[str] | None,
    path: str | PathLike[str],
    title: str,
    draw: Callable[[Mapping[str, drawing.Series], str], Any],
    measure: Callable[[History], Found],
) -> Path:
    """Measures the runs, draws their series with `draw`, saves the picture and returns its path. `measure` returns a
    run's numbers by the name of their series; `draw` gets, for each series, the numbers of all runs, and the title."""
    require("matplotlib", "the picture")
    histories = _histories(runs, names)
    series: dict[str, drawing.Series] = {}
    for history, name in zip(histories, names or told_apart([history.output for history in histories])):
        for series_name, numbers in measure(history).items():
            series.setdefault(series_name, {})[(name,)] = numbers
    return drawing.save(draw(series, title), Path(path))
