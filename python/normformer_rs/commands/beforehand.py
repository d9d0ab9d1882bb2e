"""Checks folders and files before torch is imported, because that import takes seconds.

The extension module repeats these checks when it reads.
"""

import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from ..config import DataConfig, TransformerConfig
from ..errors import InputError
from ..text import check_readable
from .options import RUN_CONFIG

CHECKPOINTS, CHECKSUMS = "checkpoints", "checksums.txt"
_LINKS = ("best", "last")
"""Names that stand for one of a run's checkpoints; the extension module resolves them."""


def check_run(folder: str | PathLike[str]) -> None:
    """Raises InputError if the folder holds no run."""
    if not Path(folder, RUN_CONFIG).exists():
        raise InputError(
            f"{folder} holds no model: expected the output folder of a training run, with its {RUN_CONFIG}"
        )


def check_model(folder: str | PathLike[str], checkpoint: str = "best") -> None:
    """Raises InputError if the folder holds no run, or if the run has no checkpoint of that name or update."""
    check_run(folder)
    if len(Path(checkpoint).parts) > 1 or os.path.exists(checkpoint):
        return  # the value is a path, and the extension module checks the checkpoint there
    checkpoints = Path(folder, CHECKPOINTS)
    names = sorted(path.name for path in checkpoints.iterdir()) if checkpoints.is_dir() else []
    if checkpoint in names or (checkpoint in _LINKS and names):
        return
    # The names of checkpoints begin with "update-" and the update's number in eight digits.
    number = checkpoint.removeprefix("update-")
    if number.isdecimal() and any(name.startswith(f"update-{int(number):08}") for name in names):
        return
    raise InputError(f'there is no checkpoint "{checkpoint}"; {checkpoints} has {", ".join(names) or "no checkpoint"}')


def check_average(folder: str | PathLike[str], last: int | None, updates: Sequence[int] | None) -> None:
    """Raises InputError if `last` or an update's number is out of range, or if the folder holds no run."""
    for name, number, least in (("last", last, 1), *(("updates", update, 0) for update in updates or ())):
        if number is not None and not least <= number < 2**63:
            raise InputError(f"{name} must be at least {least}, and below 2⁶³; got {number}")
    check_run(folder)


def check_output(output: str, resume: bool, from_checkpoint: str | None, overwrite: bool) -> None:
    """Raises InputError if a run cannot write to `output`: there is nothing to resume, or a run would be lost."""
    if resume and overwrite:
        raise InputError("resume and overwrite exclude each other: go on with the run, or start again?")
    if from_checkpoint is not None and not resume:
        raise InputError(f"from_checkpoint = {from_checkpoint!r} is a checkpoint to resume from: give resume, too")
    holds_run = Path(output, RUN_CONFIG).exists()
    if resume and not holds_run:
        raise InputError(f"{output} holds no run to resume: leave out --resume to start one")
    # A folder with config.json but without checksums.txt may belong to another program. The extension module checks it.
    if holds_run and Path(output, CHECKSUMS).exists() and not (resume or overwrite):
        raise InputError(
            f"{output} already holds a run: --resume continues it, --overwrite starts anew, or choose another output"
        )


def check_data(model: TransformerConfig, data: DataConfig) -> None:
    """Raises InputError if a text file is not named or does not exist, or if no tokenisation is chosen. If fairseq's
    binarised folder (`data_bin`) is given, nothing is checked here."""
    given: dict[str, Any] = data.asdict()
    if given["data_bin"] is not None:
        return
    has_source = model.architecture == "encoder-decoder"  # type: ignore[attr-defined]
    for part in ("train", "valid"):
        if not given[f"{part}_target"]:
            raise InputError(f"{part}_target is missing: give a text file, one sentence a line")
        if has_source and given[f"{part}_source"] is None:
            raise InputError(
                f"{part}_source is missing: an encoder-decoder model needs source and target files (a language model "
                'is architecture = "decoder-only")'
            )
    if given["bpe_operations"] is None and given["bpe_codes"] is None and not given["no_bpe"]:
        raise InputError(
            "how is text cut into pieces? Give one of bpe_operations (learn merges), bpe_codes (a file of merges), or "
            "no_bpe (the text is split already)"
        )
    for name in ("train_source", "train_target", "valid_source", "valid_target", "bpe_codes"):
        if given[name] is not None:
            check_readable(given[name])
