"""Which parameters of a study's arms start bit-equal, and what an arm costs."""

from ..config import TransformerConfig, split
from ..loop.model import Transformer
from ..reproduce.declared import Options
from .declared import Cell, Study

_TYPES = 64
"""The vocabulary of the models that are compared; its size changes the tables of words alone."""
_SHOWN = 3


def unequal(study: Study) -> list[list[str]]:
    """Returns for each arm but the baseline: its name, its parameters, how many of them start as the baseline's do
    with the same seed, and the first others' names."""
    found = []
    for cell in study.cells:
        base = study.baseline_of(cell)
        if base is None:
            continue
        own, theirs = (_start(study, one) for one in (cell, base))
        unlike = [name for name, t in own.items()
                  if name not in theirs or t.shape != theirs[name].shape or not t.equal(theirs[name])]  # fmt: skip
        kinds = list(dict.fromkeys(_kind(name) for name in unlike))
        shown = ", ".join(kinds[:_SHOWN]) + (f" and {len(kinds) - _SHOWN} more kinds" if len(kinds) > _SHOWN else "")
        found.append([cell.name, str(len(own)), str(len(own) - len(unlike)), shown or "none"])
    return found


def _kind(name: str) -> str:
    """Returns a parameter's name without the numbers of layers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _start(study: Study, cell: Cell) -> dict:
    options: Options = study.row(cell, study.lr[0], 1).options
    known = {field.name for field in TransformerConfig.FIELDS}
    (model,) = split({name: value for name, value in options.items() if name in known}, TransformerConfig)
    return Transformer(TransformerConfig(**{**model, "vocab_size": _TYPES}), seed=1).state_dict()
