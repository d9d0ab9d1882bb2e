"""What a study will cost: parameters, operations, time, memory and disk, by measured updates."""

import tempfile
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..config import DataConfig, TrainingConfig, TransformerConfig, split
from ..errors import InputError
from ..loop.history import History
from ..loop.training import DryRun, Trainer
from ..reproduce.corpora import CORPORA, Corpus, missing, prepare
from ..reproduce.declared import Options
from .declared import Cell, Study

_UPDATES = 8
_WARM = 3
"""Updates that are not counted: the first ones allocate."""


class Cost(NamedTuple):
    """The cost of one arm, all its runs together."""

    cell: Cell
    runs: int
    parameters: int
    flop: float
    """6 · parameters · padded tokens (Kaplan et al. 2020)."""
    seconds: float
    memory: int
    """Bytes of one run."""
    disk: int
    """Bytes of all checkpoints that stay."""


def parameters(options: Options, text: tuple[str, Corpus], data: str | PathLike[str]) -> int:
    """Returns the number of a model's parameters, with the text's vocabulary. Errors: InputError for missing files."""
    name, corpus = text
    check_text(name, Path(data))
    with tempfile.TemporaryDirectory() as folder:
        made = prepare(name, Path(data), Path(folder), {**CORPORA, name: corpus})
        files = {role: str(path) for role, path in made.items()}
        return _trainer({**corpus.options, **options}, files, "cpu").dry_run().parameters


def check_text(name: str, data: Path) -> None:
    """Checks that a corpus is there. Errors: InputError with the files that are missing."""
    for lacking, files in missing([name] if name in CORPORA else [], data).items():
        raise InputError(
            f"text {lacking} needs {len(files)} files that {data} lacks (plain or .gz): {', '.join(files)}. "
            f"{CORPORA[lacking].title}: {CORPORA[lacking].origin}"
        )


def costs(study: Study, device: str) -> list[Cost]:
    """Returns what each arm costs, by a few updates of each. Errors: as those of a run."""
    name, corpus = study.corpus
    with tempfile.TemporaryDirectory() as folder:
        files = prepare(name, Path(study.data), Path(folder), {**CORPORA, name: corpus})
        return [_cost(study, cell, corpus, {role: str(path) for role, path in files.items()}, device)
                for cell in study.cells]  # fmt: skip


def _cost(study: Study, cell: Cell, corpus: Corpus, files: Options, device: str) -> Cost:
    options = study.row(cell, study.lr[0], 1).options
    runs, updates = study.seeds * (len(study.lr) + 1), options["updates"]
    needs: DryRun = _trainer({**corpus.options, **options}, files, device).dry_run()
    few = {"updates": _UPDATES, "evaluate_every": _UPDATES, "warmup": _UPDATES}
    with tempfile.TemporaryDirectory() as output:
        short = _trainer({**corpus.options, **options, **few}, files, device)
        made: History = short.fit(output, progress=False, tensorboard=False, curves=False, overwrite=True)
        # The last update's time holds the evaluation.
        seconds = float(np.median(np.diff(made.seconds)[_WARM - 1 : -1]))
        disk = sum(path.stat().st_size for path in Path(output).rglob("*") if path.is_file())
    training: Any = TrainingConfig(**split(options, TransformerConfig, TrainingConfig, DataConfig)[1])
    tokens = updates * training.max_tokens * training.accumulate
    flop = 6.0 * needs.parameters * tokens * runs
    return Cost(cell, runs, needs.parameters, flop, seconds * updates * runs, needs.training_bytes, disk * runs)


def _trainer(options: Options, files: Options, device: str) -> Trainer:
    needed = {role: path for role, path in files.items() if not role.startswith("test")}
    options = {**options, **needed, "device": device}
    model, training, data = split(options, TransformerConfig, TrainingConfig, DataConfig)
    return Trainer(TransformerConfig(**model), TrainingConfig(**training), DataConfig(**data))
