"""The batches that a run reads and their order, which the run's seed determines (docs/spec.md §4.8)."""

import itertools
import struct
from collections.abc import Iterator, Sequence

from .model import pad
from .operators import EOS
from .training import Batch

_TIE_BREAK, _BATCH_ORDER = 1, 2
_QUARTERS = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
_DIAGONALS = ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))


def chacha8(key: bytes, block: int) -> list[int]:
    """Returns sixteen 32-bit words: a block of ChaCha (Bernstein 2008) with eight rounds, a 64-bit counter and nonce
    0."""
    first = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key), block % 2**32, block >> 32, 0, 0]
    x = [*first]
    for a, b, c, d in 4 * (_QUARTERS + _DIAGONALS):
        for grown, by, turned, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[grown] = (x[grown] + x[by]) % 2**32
            x[turned] ^= x[grown]
            x[turned] = (x[turned] << bits | x[turned] >> 32 - bits) % 2**32
    return [(word + start) % 2**32 for word, start in zip(x, first, strict=True)]


def _numbers(seed: int, epoch: int, purpose: int) -> Iterator[int]:
    """Yields random 64-bit numbers. Each consists of two words of ChaCha, the low half first."""
    key = struct.pack("<4Q", seed, epoch, 0, purpose)
    words = itertools.chain.from_iterable(chacha8(key, block) for block in itertools.count())
    return (low | next(words) << 32 for low in words)


def _shuffle(items: list, numbers: Iterator[int]) -> None:
    """Shuffles the items in place, by the Fisher-Yates algorithm from the end. A place is drawn as a number with just
    enough bits for it; a number that is too large is drawn again."""
    for last in range(len(items) - 1, 0, -1):
        drawn = (number % 2 ** last.bit_length() for number in numbers)
        place = next(number for number in drawn if number <= last)
        items[last], items[place] = items[place], items[last]


def _plan(lengths: Sequence[int], max_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Returns the batches of an epoch, as lists of segment numbers. Segments are sorted by length, at random if the
    lengths are equal; then batches are filled one after the other; at last the batches are shuffled."""
    order = [*range(len(lengths))]
    _shuffle(order, _numbers(seed, epoch, _TIE_BREAK))
    batches: list[list[int]] = [[]]
    for sentence in sorted(order, key=lambda i: lengths[i]):
        if (len(batches[-1]) + 1) * lengths[sentence] > max_tokens:
            batches.append([])
        batches[-1].append(sentence)
    _shuffle(batches, _numbers(seed, epoch, _BATCH_ORDER))
    return batches


def language_model_batches(stream: Sequence[int], segment_length: int, max_tokens: int, seed: int) -> Iterator[Batch]:
    """Yields batches of a text's segments without end. The input of a segment begins with the token before it, which is
    EOS for the first segment."""
    begins = range(0, len(stream), segment_length)
    rows = [[stream[i - 1] if i else EOS, *stream[i : i + segment_length]] for i in begins]
    lengths = [len(row) - 1 for row in rows]
    for epoch in itertools.count():
        for batch in _plan(lengths, max_tokens, seed, epoch):
            yield Batch(None, pad([rows[i][:-1] for i in batch]), pad([rows[i][1:] for i in batch]))
