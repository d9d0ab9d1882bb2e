"""Finds which parameters of a study's arms have initial values that are bit-equal to the baseline's."""

import hashlib

import torch

from ..config import TransformerConfig
from ..loop.model import Transformer
from ..reproduce.declared import Options
from .declared import Cell, Study

_TYPES = 64
"""The size of the vocabulary of the models that are compared. It is small, because it changes only the embeddings."""
_SHOWN = 3
"""The number of kinds of parameters that a line names."""


def unequal(study: Study) -> list[list[str]]:
    """Returns a line for each arm except the baseline: its name, the number of its parameter tensors, how many of them
    have the same initial values as in the baseline with the same seed, and the first names of the others."""
    starts = {cell.name: _start(study, cell) for cell in study.cells}
    lines = []
    for cell in study.cells:
        base = study.baseline_of(cell)
        if base is None:
            continue
        own_start, baseline_start = starts[cell.name], starts[base.name]
        kinds = list(dict.fromkeys(_kind(name) for name in own_start if own_start[name] != baseline_start.get(name)))
        equal = sum(own_start[name] == baseline_start.get(name) for name in own_start)
        shown = ", ".join(kinds[:_SHOWN]) + (f" and {len(kinds) - _SHOWN} more kinds" if len(kinds) > _SHOWN else "")
        lines.append([cell.name, str(len(own_start)), str(equal), shown or "none"])
    return lines


def _kind(name: str) -> str:
    """Returns a parameter's name with * in place of the number of its layer."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _start(study: Study, cell: Cell) -> dict[str, tuple[torch.Size, bytes]]:
    """Returns the shape and a digest of the initial values of each parameter. Digests are returned instead of tensors,
    so that only one model is in memory at a time."""
    options: Options = study.row(cell, study.lr[0], seed=1).options
    known = {field.name for field in TransformerConfig.FIELDS}
    model = TransformerConfig(**{name: value for name, value in options.items() if name in known})
    parameters = Transformer(model.replace(vocab_size=_TYPES), seed=1).state_dict()
    return {
        name: (tensor.shape, hashlib.sha256(tensor.numpy().tobytes()).digest()) for name, tensor in parameters.items()
    }
