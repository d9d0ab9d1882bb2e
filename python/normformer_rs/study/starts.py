"""Which parameters of a study's arms start bit-equal."""

import hashlib

import torch

from ..config import TransformerConfig
from ..loop.model import Transformer
from ..reproduce.declared import Options
from .declared import Cell, Study

_TYPES = 64
"""The vocabulary of the models that are compared; its size changes the tables of words alone."""
_SHOWN = 3


def unequal(study: Study) -> list[list[str]]:
    """Returns for each arm but the baseline: its name, its parameters, how many of them start as the baseline's do
    with the same seed, and the first others' names."""
    starts = {cell.name: _start(study, cell) for cell in study.cells}
    found = []
    for cell in study.cells:
        base = study.baseline_of(cell)
        if base is None:
            continue
        own, theirs = starts[cell.name], starts[base.name]
        kinds = list(dict.fromkeys(_kind(name) for name in own if own[name] != theirs.get(name)))
        equal = sum(own[name] == theirs.get(name) for name in own)
        shown = ", ".join(kinds[:_SHOWN]) + (f" and {len(kinds) - _SHOWN} more kinds" if len(kinds) > _SHOWN else "")
        found.append([cell.name, str(len(own)), str(equal), shown or "none"])
    return found


def _kind(name: str) -> str:
    """Returns a parameter's name without the numbers of layers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _start(study: Study, cell: Cell) -> dict[str, tuple[torch.Size, bytes]]:
    """Returns shape and digest of each parameter, so that one model is in memory at a time."""
    options: Options = study.row(cell, study.lr[0], 1).options
    known = {field.name for field in TransformerConfig.FIELDS}
    model = TransformerConfig(**{name: value for name, value in options.items() if name in known})
    made = Transformer(model.replace(vocab_size=_TYPES), seed=1).state_dict()
    return {name: (t.shape, hashlib.sha256(t.numpy().tobytes()).digest()) for name, t in made.items()}
