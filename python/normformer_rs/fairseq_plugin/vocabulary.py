"""Finds the target vocabulary V_t: the entries that occur on the target side of the training data, EOS and UNK, but
never PAD or BOS."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fairseq.data import data_utils
from fairseq.data.indexed_dataset import infer_dataset_impl
from fairseq.utils import split_paths
from torch import Tensor

from normformer_rs.errors import InputError


def target_types(task: Any, subset: str) -> Tensor:
    """Returns a flag for each vocabulary entry, True if it is in V_t. `subset` is the name of the training data; all
    its shards in all folders are read, as fairseq trains on all of them.

    Errors: InputError if there are no such data, or if they hold ids that the dictionary does not have.
    """
    cfg = task.cfg or task.args  # fairseq's task for language modelling has no cfg, only args
    dictionary = task.target_dictionary
    seen = torch.zeros(len(dictionary), dtype=torch.bool)
    source, target = getattr(cfg, "source_lang", None), getattr(cfg, "target_lang", None)
    # fairseq names the files of a pair of languages in either order.
    endings = [f".{pair}.{target}" for pair in (f"{source}-{target}", f"{target}-{source}")] if target else [""]
    for folder in split_paths(cfg.data):
        for path in _shards(Path(folder), subset, endings):
            for ids in _ids(path, dictionary):
                if not bool(((ids >= 0) & (ids < len(dictionary))).all()):
                    raise InputError(
                        f"{path}: holds ids outside its dictionary of {len(dictionary)} types; it is damaged, or "
                        "another dictionary's: preprocess again"
                    )
                seen[ids] = True
    seen[[dictionary.bos(), dictionary.pad()]] = False
    seen[[dictionary.eos(), dictionary.unk()]] = True
    return seen


def _shards(folder: Path, subset: str, endings: list[str]) -> Iterator[str]:
    """Yields the paths, without .bin or .idx, of the target side of the shards `subset`, `subset`1, `subset`2, …, which
    fairseq joins."""
    for number in itertools.count():
        paths = [str(folder / f"{subset}{number or ''}{ending}") for ending in endings]
        path = next(filter(infer_dataset_impl, paths), None)
        if path is None and number == 0:
            raise InputError(
                f"{' or '.join(paths)}: not there; --vocab-mask reads the target side of the training data"
            )
        if path is None:
            return
        yield path


def _ids(path: str, dictionary: Any) -> Iterator[Tensor]:
    """Yields the token ids of a file, those of 4,096 sentences at a time in one tensor."""
    kind = infer_dataset_impl(path)
    # fairseq's "cached" data must be prefetched before they are read by index, the same data as "lazy" need not.
    data = data_utils.load_indexed_dataset(path, dictionary, "lazy" if kind == "cached" else kind)
    for start in range(0, len(data), 4096):
        yield torch.cat([data[i] for i in range(start, min(start + 4096, len(data)))])
