"""Rotary positions of queries and keys (Su et al. 2021, eq 34)."""

import torch
from torch import Tensor


def rotated(x: tuple[Tensor, ...], theta: float, padding: Tensor | None = None) -> tuple[Tensor, ...]:
    """Rotates queries and keys, (B, heads, T, d_head) each, by their positions, counted from 0 over real tokens;
    `padding` (B, T) is True at the others.

    With h = d_head/2, element j < h of row t and element j + h turn together by t·θ^(−j/h), as in GPT-NeoX and in the
    training loop. Angles are computed in float64, products in float32 at least.
    """
    length, half = x[0].shape[-2], x[0].shape[-1] // 2
    device, wide = x[0].device, torch.promote_types(x[0].dtype, torch.float32)
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    if padding is None:
        positions = torch.arange(length, device=device)
    else:  # each real token's position is the number of those before it; padding before the first gets 0
        positions = ((~padding).cumsum(-1) - 1).clamp_min(0).unsqueeze(1)
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)  # (T, d_head/2), or (B, 1, T, d_head/2)

    def turned(rows: Tensor) -> Tensor:
        """Returns (B, heads, T, d_head) with each pair of elements turned by its angle."""
        first, second = rows[..., :half], rows[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(rows.dtype)

    return tuple(turned(rows) for rows in x)
