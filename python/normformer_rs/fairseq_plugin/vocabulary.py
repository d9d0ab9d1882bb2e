"""The target vocabulary V_t: types seen on the target side of the training data, EOS and UNK; never PAD or BOS."""

from typing import Any

import torch
from torch import Tensor

from normformer_rs import _core
from normformer_rs._core import InputError


def target_types(task: Any, everything: Tensor) -> Tensor:
    """True in V_t. `everything`, all true, comes back where the training data are not there: a checkpoint says then."""
    cfg = task.cfg or task.args  # fairseq's language modelling has args
    source, target = getattr(cfg, "source_lang", None), getattr(cfg, "target_lang", None)
    pair = (source, target) if source and target else None
    seen = torch.zeros_like(everything)
    try:
        for folder in str(cfg.data).split(":"):
            found = torch.tensor(_core.target_types(folder, pair))
            seen[: len(found)] |= found  # a task may add types of its own to the dictionary
    except InputError:
        return everything
    return seen
