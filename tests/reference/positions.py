"""Position encodings (docs/spec.md §4.2): sinusoids, and the rotation of queries and keys."""

import math

import torch
from torch import Tensor


def sinusoids(positions: Tensor, d: int, layout: str) -> Tensor:
    """Returns the sinusoids (…, d) of integer positions (…), in f64 (docs/spec.md §4.2).

    twt: columns 2i and 2i+1 are sin and cos of pos·10000^{−2i/d}; fairseq: the first half of the columns are the sines,
    the second the cosines, of pos·exp(−j·ln 10000/(d/2−1)), and an odd d ends in a zero column.
    """
    if layout == "twt":
        column = torch.arange(d)
        angles = positions.unsqueeze(-1) * 10000.0 ** (-2.0 * (column // 2).double() / d)
        return torch.where(column % 2 == 0, angles.sin(), angles.cos())
    if layout == "fairseq":
        half = d // 2
        angles = positions.unsqueeze(-1) * torch.exp(-torch.arange(half).double() * math.log(10000.0) / (half - 1))
        table = torch.cat([angles.sin(), angles.cos()], -1)
        return torch.nn.functional.pad(table, (0, d - 2 * half))
    raise ValueError(f"unknown positions {layout!r}; the layouts are twt, fairseq")


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Returns heads x (B, heads, T, d) after rotation by their positions (B, T): x_j and x_{j+d/2} are one complex
    number, which is rotated by position·θ^{−2j/d} (Su et al. 2021, eq 34, in GPT-NeoX's layout)."""
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] * theta ** (-torch.arange(half).double() / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1).to(x.dtype)


def positions_of(real: Tensor) -> Tensor:
    """Returns the position (B, T) of each token among the real tokens of its sentence, from 0. Padding is numbered
    after them."""
    return torch.where(real, real.cumsum(-1), real.sum(-1, keepdim=True) + (~real).cumsum(-1)) - 1
