"""Computes dropout masks from the place where they are used, with Philox4x32-10 (Salmon et al. 2011, "Random123"), in
numpy."""

import numpy as np
import torch
from torch import Tensor

_LOW_32 = np.uint64(0xFFFFFFFF)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85  # added to the key's two words in each round (golden ratio and √3 − 1)
_ROUNDS = 10


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Returns uint32 words (…, 4): ten rounds of Philox over counters (…, 4), with one key of two 32-bit words.

    A round maps (c₀, c₁, c₂, c₃) to (hi(M₁c₂)⊕c₁⊕k₀, lo(M₁c₂), hi(M₀c₀)⊕c₃⊕k₁, lo(M₀c₀)).
    """
    c0, c1, c2, c3 = np.moveaxis(np.asarray(counter, dtype=np.uint64), -1, 0)
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            product1 & _LOW_32,
            (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            product0 & _LOW_32,
        )
        k0, k1 = (k0 + _WEYL[0]) % 2**32, (k1 + _WEYL[1]) % 2**32
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def dropout_threshold(p: float) -> int:
    """Returns T = round(p·2¹⁶), rounded half up and at most 65535. An element is dropped if its 16-bit number is below
    T."""
    return min(int(np.floor(p * 65536 + 0.5)), 65535)


def dropout_scale(p: float) -> float:
    """Returns 1/(1 − T/2¹⁶), the factor of kept values. It makes the expectation exact for the rate T/2¹⁶ that is
    really used."""
    return 1.0 / (1.0 - dropout_threshold(p) / 65536)


def dropout_keep(seed: int, update: int, micro_batch: int, site: int, rows: int, cols: int, p: float) -> Tensor:
    """Returns a bool tensor (rows, cols) that is True for the elements that are kept.

    Element (r, c) takes number e = c mod 8 of the eight 16-bit numbers, low halves first, in the four words of
    Philox(key = (seed low, seed high), counter = (⌊c/8⌋, r, site | micro_batch·2¹⁶, update mod 2³²)).
    """
    blocks = -(-cols // 8)
    counter = np.empty((rows, blocks, 4), dtype=np.uint64)
    counter[..., 0] = np.arange(blocks)
    counter[..., 1] = np.arange(rows)[:, None]
    counter[..., 2] = (site | micro_batch << 16) % 2**32
    counter[..., 3] = update % 2**32
    words = philox4x32(counter, (seed % 2**32, (seed >> 32) % 2**32))
    halves = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=-1)  # (rows, blocks, 4, 2)
    numbers = halves.reshape(rows, blocks * 8)[:, :cols]
    return torch.from_numpy(numbers >= dropout_threshold(p))
