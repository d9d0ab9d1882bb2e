"""Reads the logits of attention while a model runs: the scores that softmax receives, after masks."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

MASKED = torch.finfo(torch.float32).min / 2
"""A logit of at most this value belongs to a masked pair, since masks add −∞ or the lowest number of a dtype."""
_ELEMENTS = 2**22
"""The number of pairs whose logits are computed at a time: the f64 logits of a whole attention may not fit in
memory."""


class Attentions(TorchFunctionMode):
    """Calls the function `heard` for each attention inside a `with` block, with an iterator over parts of its logits in
    f64. Each part has some of the queries.

    An attention is a call of torch's operator, of torch.nn's modules, or of a softmax over the last of three or more
    dimensions.
    """

    def __init__(self, heard: Callable[[Iterator[Tensor]], None]) -> None:
        super().__init__()
        self._heard = heard

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls `heard` if torch's function is an attention, then runs the function."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with torch.no_grad():
            if name == "scaled_dot_product_attention":
                self._heard(_of_operator(*args, **kwargs))
            elif name == "softmax":
                x = args[0] if args else kwargs["input"]
                dim = args[1] if len(args) > 1 else kwargs.get("dim")
                if x.dim() >= 3 and dim in (-1, x.dim() - 1):
                    self._heard(part.double() for part in x.detach().split(_rows(x.shape), -2))
            elif name == "multi_head_attention_forward":
                bound = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
                bound.apply_defaults()
                self._heard(_of_module(bound.arguments))
        return func(*args, **kwargs)


def _rows(shape: torch.Size) -> int:
    """Returns the number of queries whose logits are computed at a time, so that these are about `_ELEMENTS` numbers.
    `shape` is that of all logits, (…, queries, keys)."""
    return max(1, _ELEMENTS * shape[-2] // max(1, shape.numel()))


def _of_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Iterator[Tensor]:
    """Yields the logits of torch's operator, for parts of the queries. The arguments are those of
    `scaled_dot_product_attention`."""
    keys = key.detach().double()
    if key.dim() > 3 and key.shape[-3] != query.shape[-3]:  # several heads of queries share a head of keys
        keys = keys.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    part_size = _rows(torch.Size([*query.shape[:-1], keys.shape[-2]]))
    for first in range(0, query.shape[-2], part_size):
        queries = query.detach()[..., first : first + part_size, :].double()
        logits = queries @ keys.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            # Row i of this part is the query first + i, which sees the keys up to its own number.
            is_past = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril(first)
            logits = logits.masked_fill(~is_past, -math.inf)
        if attn_mask is not None:
            has_one_row = attn_mask.dim() < 2 or attn_mask.shape[-2] == 1  # a mask of one row is for all queries
            mask = attn_mask if has_one_row else attn_mask[..., first : first + part_size, :]
            # In a mask of bool True lets a query see a key; a mask of numbers is added.
            logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
        yield logits


def _of_module(arguments: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the logits of torch.nn's attention, (B, heads, queries, keys), for parts of the queries. `arguments` are
    those of `multi_head_attention_forward`, by name."""
    query, key, heads = arguments["query"], arguments["key"], arguments["num_heads"]
    if arguments["use_separate_proj_weight"]:
        weights = [arguments["q_proj_weight"], arguments["k_proj_weight"]]
    else:  # one matrix has the rows of queries, keys and values, in this order
        weights = list(arguments["in_proj_weight"].chunk(3)[:2])
    bias = arguments["in_proj_bias"]
    biases = bias.chunk(3)[:2] if bias is not None else (None, None)
    q, k = (F.linear(x, w, b) for x, w, b in zip((query, key), weights, biases))
    if q.dim() == 2:  # the input has no dimension for the batch
        q, k = q[:, None], k[:, None]
    # This gives the heads a dimension of their own: (T, B, d) → (B, heads, T, d_head).
    q, k = (t.reshape(len(t), t.shape[1], heads, -1).permute(1, 2, 0, 3) for t in (q, k))
    mask = _added(arguments["attn_mask"], q.dtype)
    if mask is not None and mask.dim() == 3:  # its shape is (B·heads, queries, keys)
        mask = mask.view(-1, heads, *mask.shape[-2:])
    padding = _added(arguments["key_padding_mask"], q.dtype)
    # If a mask is given, is_causal only says that this mask is causal.
    is_causal = arguments["is_causal"] and mask is None
    if padding is not None:
        padding = padding.view(-1, 1, 1, padding.shape[-1])
        mask = padding if mask is None else mask + padding
    # The logits do not depend on the values, so k stands for them.
    return _of_operator(q, k, k, mask, is_causal=is_causal)


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Returns a mask of torch.nn's modules as numbers that are added to logits. In a mask of bool, True marks what is
    masked and becomes −∞."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
