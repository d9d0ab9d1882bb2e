"""fairseq's binarised folders: dictionaries (`dict.LANG.txt`) and token files (`.bin` with `.idx`), read safely.

An `.idx` is a magic word, a version, the number type, the count of sentences, their lengths (int32) and where each
begins in the `.bin` (int64, in bytes); the `.bin` is the numbers, sentence after sentence. Nothing that a file says
about lengths is believed before it is compared with the files' sizes, and nothing is read into memory but the index.
"""

import struct
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._core import InputError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}
SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")


class Binarised:
    """The sentences of one side of a split, as ids with EOS at the end.

    Args:
        prefix: the path without `.bin` and `.idx`, such as data-bin/train.de-en.de.

    Errors: InputError for missing, truncated or damaged files, and for fairseq's older formats.
    """

    def __init__(self, prefix: str | PathLike[str]) -> None:
        self.path, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        for path in (self.path, index):
            if not path.is_file():
                raise InputError(f"{path}: no such file; expected what fairseq-preprocess writes")
        size = index.stat().st_size
        with index.open("rb") as file:
            header = file.read(_HEADER.size)
        magic, version, code, count = _HEADER.unpack(header) if len(header) == _HEADER.size else (b"", 0, 0, 0)
        if magic != MAGIC:
            raise InputError(
                f"{index}: not an index of fairseq's mmap format; preprocess again, without --dataset-impl"
            )
        if version != 1 or code not in _TYPES:
            raise InputError(
                f"{index}: version {version}, number type {code}; this package reads version 1 of integers"
            )
        if size != _HEADER.size + count * 12:
            raise InputError(
                f"{index}: {count} sentences need {_HEADER.size + count * 12} bytes; it has {size} and is damaged"
            )
        with index.open("rb") as file:
            file.seek(_HEADER.size)
            self.lengths: NDArray[np.int32] = np.fromfile(file, "<i4", count)
            starts = np.fromfile(file, "<i8", count)
        kind = np.dtype(_TYPES[code])
        ends = np.concatenate(([0], self.lengths.cumsum(dtype=np.int64)))
        if (self.lengths < 0).any() or (starts != ends[:-1] * kind.itemsize).any():
            raise InputError(f"{index}: lengths and positions contradict each other; it is damaged")
        if self.path.stat().st_size != ends[-1] * kind.itemsize:
            raise InputError(
                f"{self.path}: {ends[-1]} numbers need {ends[-1] * kind.itemsize} bytes, it has "
                f"{self.path.stat().st_size}; it is damaged, or another index's"
            )
        self._ends = ends
        self.tokens: Any = np.memmap(self.path, kind, "r") if ends[-1] else np.empty(0, kind)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> NDArray[Any]:
        """The ids of sentence i."""
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        i %= len(self)
        return self.tokens[self._ends[i] : self._ends[i + 1]]

    def types(self) -> NDArray[np.int64]:
        """The different ids, sorted; in pieces of 16 MiB, so that files larger than memory will do."""
        found: set[int] = set()
        for start in range(0, len(self.tokens), 1 << 21):
            found.update(np.unique(self.tokens[start : start + (1 << 21)]).tolist())
        return np.array(sorted(found), np.int64)


def find(folder: str | PathLike[str], split: str, source: str | None, target: str) -> Path:
    """The prefix of a split's target side, whichever language was named first; of a single language where source is
    None."""
    names = [f"{split}.{source}-{target}.{target}", f"{split}.{target}-{source}.{target}"] if source else [split]
    for name in names:
        if Path(folder, name + ".idx").is_file():
            return Path(folder, name)
    raise InputError(f"{folder}: no {' or '.join(name + '.idx' for name in names)}")


def read_dictionary(path: str | PathLike[str]) -> list[str]:
    """Pieces by their ids, the four special ones first. Errors: InputError for a line that is not `piece count`."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected fairseq's dict.LANG.txt in UTF-8 ({error})") from error
    pieces = list(SPECIALS)
    for number, line in enumerate(lines[: -1 if lines[-1] == "" else None], 1):
        piece, _, count = line.rpartition(" ")
        if not piece or not count.isdecimal():
            raise InputError(f'{path}, line {number}: expected "piece count"; got {line!r}')
        pieces.append(piece)
    return pieces
