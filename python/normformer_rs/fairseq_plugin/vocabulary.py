"""The target vocabulary V_t: types seen on the target side of the training data, EOS and UNK; never PAD or BOS."""

from typing import Any

import torch
from torch import Tensor

from normformer_rs import binarised
from normformer_rs._core import InputError


def target_types(task: Any, everything: Tensor) -> Tensor:
    """True in V_t. `everything`, all true, comes back where the training data are not there: a checkpoint says then."""
    cfg, dictionary = task.cfg or task.args, task.target_dictionary  # fairseq's language modelling has args
    source, target = getattr(cfg, "source_lang", None), getattr(cfg, "target_lang", None) or ""
    seen = torch.zeros_like(everything)
    try:
        for folder in str(cfg.data).split(":"):
            prefix = binarised.find(folder, "train", source, target)
            seen[torch.from_numpy(binarised.Binarised(prefix).types())] = True
    except InputError:
        return everything
    seen[[dictionary.eos(), dictionary.unk()]] = True
    seen[[dictionary.bos(), dictionary.pad()]] = False
    return seen
