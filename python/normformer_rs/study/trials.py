"""The trials of a study, which are runs that are trained in a loop of the user's own."""

import dataclasses
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from ..errors import InputError
from ..loop.progress import write
from ..reproduce.declared import Options, Row, digest
from ..reproduce.results import Results, made_by
from ..reproduce.runs import Course, Runs, folder_of
from ..surgery import swap_norms, swap_residuals
from ..text import write_whole
from .checks import OWN_LOOP, OWN_START
from .command import finish
from .declared import Cell, Study
from .measured import chosen_of, results_of

_Model = TypeVar("_Model", bound=nn.Module)


class Trial:
    """One run of a study in a loop of your own: an arm, a rate and a seed.

    torch, numpy and random are seeded before each trial, and again by `apply`. Arms may draw different numbers of
    dropout masks, so do not draw batches from torch's generator: pass `generator=trial.generator`, which has the same
    seed, to the DataLoader, or shuffle before the first update.

    Attributes: arm, layers (None unless the study has depths), lr, seed, updates (the budget), generator.
    """

    def __init__(self, study: Study, cell: Cell, row: Row, lr: float, log: Path) -> None:
        """`row` and `cell` are this run's, `lr` its rate; `log` is the file for its losses. Seeds the random number
        generators."""
        self._study, self._row, self._log = study, row, log
        self.arm, self.lr, self.seed = cell.key["arm"], lr, row.seed
        # An arm's key has layers and init only if the study compares several of them.
        self.layers = int(cell.key["layers"]) if "layers" in cell.key else next(iter(study.layers), None)
        self.init = cell.key.get("init", next(iter(study.init)))
        self.updates = study.updates
        self.generator = torch.Generator().manual_seed(self.seed)
        self.losses: list[float] = []
        self.valid: float | None = None
        """The last validation loss that was reported; None if none was."""
        self.is_over = False
        self._began = time.monotonic()
        _seed(self.seed)

    def __repr__(self) -> str:
        return f"Trial({', '.join(self._row.key.values())}, seed {self.seed})"

    def apply(self, model: _Model, *, example: Any = None) -> _Model:
        """Applies the arm to a new model, in place, and returns it.

        If the arm is a table of options, these and the study's are swapped in: `residual` by `swap_residuals`, with the
        study's initialisation, then `norm` by `swap_norms`, with the norm's own initial values. Other options go to the
        first of the two swaps that the arm has. If the arm is a function, it is called with the model.

        Args:
            example: an input for the swap, needed if none can be made from the model's configuration.

        Errors: as those of the swaps; InputError for options of an arm that no swap takes.
        """
        arm = self._study.arms[self.arm]
        if callable(arm):
            changed = arm(model)  # None if the function has changed the model in place
            model = model if changed is None else changed
        else:
            _swap(model, {**self._study.options, **arm}, self.init, example)
        # Arms draw different numbers of initial values; after this line all continue with the same random numbers.
        _seed(self.seed)
        return model

    def report(self, step: int, loss: Any, valid: Any = None) -> bool:
        """Records an update; returns False if the trial is over: the budget is used, or the loss is not finite.

        Args:
            step: the number of the update, from 1.
            loss: the training loss, in nats per token, a number or a tensor of one.
            valid: the validation loss, if one was measured. If a trial reports none, the study compares the mean
                training loss of the last 50 updates, or of the last third of fewer than 150.

        Errors: InputError for a step that does not follow the one before.
        """
        if self.is_over:
            raise InputError(f"{self!r} is over: leave its loop when report returns False")
        if step <= len(self.losses):
            raise InputError(f"report: expected an update after {len(self.losses)}; got step {step}")
        # Updates that were skipped between two reports get the loss of the later report.
        self.losses += [_number(loss)] * (step - len(self.losses))
        if valid is not None:
            self.valid = _number(valid)
        is_finite = math.isfinite(self.losses[-1])
        self.is_over = not is_finite or (self.updates is not None and step >= self.updates)
        return not self.is_over

    def columns(self) -> Options:
        """Returns the columns of the trial's row: losses, and the verdict by docs/spec.md §4.14, which compares with
        the first loss instead of the unigram model's entropy."""
        course = Course.of(np.array(self.losses))
        first = self.losses[0] if self.losses else math.nan
        value = course.last if self.valid is None else self.valid
        is_finite = bool(self.losses) and math.isfinite(self.losses[-1]) and math.isfinite(value)
        return {
            "verdict": course.verdict(is_finite, first, value),
            "updates": len(self.losses),
            "first_nll": round(first, 4),
            "train_nll": round(course.last, 4),
            "slope": round(course.slope, 4),
            "valid_nll": round(value, 4),
            "seconds": round(time.monotonic() - self._began, 1),
        }


def trials(study: Study, output: Path) -> Iterator[Trial]:
    """Yields the trials that are missing and that no other process is making. If the user's loop raises an error in a
    trial, or stops it before the first report, the trial is not recorded, and the next call yields it again.

    Errors: InputError for a study that measures BLEU.
    """
    if study.metric != "valid_nll":
        raise InputError(f'a loop of your own reports losses: metric must be "valid_nll"; got "{study.metric}"')
    if study.tokens is not None or study.flop is not None:
        raise InputError("a loop of your own is counted in updates: give updates in place of tokens or flop")
    study = dataclasses.replace(study, text=OWN_LOOP)
    results = results_of(study, output)
    # Only the names and the locks of the runs are used here, so data and device do not matter.
    runs = Runs(output / "runs", Path("data"), device="cpu", progress=False)
    for cell, seed, lr in _wanted(study, results):
        row = study.row(cell, lr, seed)
        with runs.claim(row) as is_ours:
            results.read()
            if not is_ours or results.find(row) is not None:
                continue
            write(f"{output}: {', '.join(row.key.values())}, seed {row.seed}")
            trial = Trial(study, cell, row, lr, log_of(row, runs.folder))
            yield trial
            if trial.losses:
                _keep(trial, row, results)
    if results.rows:
        write(f"page: {output / 'study.html'}")
        finish(study, output)


def _wanted(study: Study, results: Results) -> Iterator[tuple[Cell, int, float]]:
    """Yields (cell, seed, rate) of all trials. For each reported seed, the trials that choose the rates come before
    those that are reported."""
    for seed in range(1, study.seeds + 1):
        for cell in study.cells:
            yield from ((cell, row.seed, lr) for row, lr in zip(study.tuning(cell, seed), study.lr))
        for cell in study.cells:
            # The trials that choose the rates have ended, some of them perhaps in other processes.
            results.read()
            chosen = chosen_of(study, results, cell, seed)
            if chosen is not None and chosen.rate is not None:
                yield cell, seed, chosen.rate


def log_of(row: Row, folder: Path) -> Path:
    """Returns the path of the file that holds a trial's losses."""
    return folder / f"{folder_of(row)}-{digest(row.key)}.json"


def _keep(trial: Trial, row: Row, results: Results) -> None:
    """Writes the losses of a trial to their file, and adds its row to the table."""
    # The losses are written first, so that a row in the table always has its file of losses, even after a crash.
    write_whole(trial._log, json.dumps({"key": row.key, "seed": row.seed, "losses": trial.losses}).encode())
    results.add(row, {**trial.columns(), **made_by()}, {})


def _swap(model: nn.Module, options: Options, init: str, example: Any) -> None:
    """Swaps the arm's residual scheme and norm into the model. The other options go to the first of the two swaps that
    the arm has. `init` initialises the scheme; `example` is an input for the swaps."""
    residual, norm = options.pop("residual", None), options.pop("norm", None)
    start = options.pop("init", "scheme" if init == OWN_START else init)
    if residual is not None:
        swap_residuals(model, residual, init=start, example=example, **options)
    if norm is not None:
        swap_norms(model, norm, init="default", example=example, **({} if residual is not None else options))


def _number(value: Any) -> float:
    """Returns a number, or the number in a tensor of one, as a float."""
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def _seed(seed: int) -> None:
    """Seeds the random number generators of torch, numpy and random."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
