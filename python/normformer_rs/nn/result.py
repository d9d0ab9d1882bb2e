"""The dtype of a norm's result: x's, or that of the norm that it replaces in another library's model."""

from typing import Any, Literal

import torch
from torch import Tensor, nn


class Typed(nn.Module):
    """A norm whose result may have another dtype than x."""

    returns: Literal["x", "weight", "promoted"] = "x"
    """The source of the dtype: x, the norm's weight, as in T5, or both, as in Llama."""

    def return_like(self, returns: Literal["x", "weight", "promoted"], like: Tensor) -> None:
        """Sets the source of the dtype. A norm without parameters keeps an empty buffer of `like`'s dtype in place of a
        weight; casts of the norm change that dtype, too."""
        self.returns = returns
        if returns != "x" and next(self.parameters(recurse=False), None) is None:
            self.register_buffer("like", torch.empty(0, dtype=like.dtype, device=like.device), persistent=False)

    def result_dtype(self, x: Tensor) -> torch.dtype:
        """Returns the result's dtype for this x."""
        if self.returns == "x":
            return x.dtype
        stand_in: Any = self._buffers.get("like")  # of a norm without parameters
        weight = next(self.parameters(recurse=False)) if stand_in is None else stand_in
        return weight.dtype if self.returns == "weight" else torch.promote_types(x.dtype, weight.dtype)

    def widened(self, x: Tensor) -> tuple[Tensor, torch.dtype]:
        """Returns x in a dtype from which the result is rounded only once, and the result's dtype."""
        dtype = self.result_dtype(x)
        return x.to(torch.promote_types(x.dtype, dtype)), dtype
