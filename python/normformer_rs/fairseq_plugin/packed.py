"""Packed batches: one row for each real token, sentence after sentence; and attention between such rows.

fairseq pads its batches, on either side. Packing keeps padding out of norms, products and statistics. While admin is
profiled, padding has rows, too, because its gains come from the whole batch (docs/spec.md §3.4). Step-by-step decoding
has one row for each sentence, and keeps the keys and values of earlier steps.
"""

import dataclasses
import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..nn import MultiheadAttention
from ..nn.attention import INPUTS, is_of_joined_heads
from ..nn.dropout import Draw
from ..nn.interpreter import KeptTensors, apply_changes
from ..nn.profiling import is_profiling

OPS = torch.ops.normformer_rs


@dataclasses.dataclass(frozen=True)
class Rows:
    """The positions of a (B, T) batch's real tokens; while gains are profiled, also of its padding."""

    shape: torch.Size
    index: Tensor
    """(N,): the place of each row in the flattened batch."""
    lengths: Tensor
    """(B,): the number of each sentence's real tokens."""
    pad_mask: Tensor | None = None
    """(N,), True at padding rows, which come last; None if there is no padding."""

    @classmethod
    def of(cls, padding: Tensor) -> "Rows":
        """Builds the rows from a mask (B, T), True at padding."""
        flat, lengths = padding.flatten(), (~padding).sum(1)
        if not is_profiling():
            return cls(padding.shape, (~flat).nonzero().squeeze(1), lengths)
        index = flat.to(torch.uint8).argsort(stable=True)
        return cls(padding.shape, index, lengths, flat[index])

    def pack(self, x: Tensor) -> Tensor:
        """Packs (B, T, …) into (N, …)."""
        return x.flatten(0, 1).index_select(0, self.index)

    def unpack(self, rows: Tensor) -> Tensor:
        """Unpacks (N, d) into (B, T, d), zero at padding that has no row."""
        padded = rows.new_zeros(self.shape.numel(), rows.shape[-1])
        return padded.index_copy(0, self.index, rows).unflatten(0, self.shape)

    def padding(self) -> Tensor:
        """Returns a mask (B, T), True at padding."""
        index = self.index if self.pad_mask is None else self.index[~self.pad_mask]
        real = torch.zeros(self.shape.numel(), dtype=torch.bool, device=index.device)
        return ~real.index_fill(0, index, True).unflatten(0, self.shape)

    def spans(self) -> Tensor:
        """Returns (B, 2): the start of each sentence's rows, and their number."""
        return torch.stack((self.lengths.cumsum(0) - self.lengths, self.lengths), 1)

    def ranges(self, keys: "Rows") -> Tensor:
        """Returns the operator's ranges of attention: each sentence attends to that of `keys`, each row of padding
        to all rows of its sentence there."""
        spans = torch.cat((self.spans(), keys.spans()), 1)
        if self.pad_mask is None:
            return spans
        rows = self.pad_mask.nonzero()
        alone = torch.cat((rows, torch.ones_like(rows)), 1)
        return torch.cat((spans, torch.cat((alone, keys.spans()[self.index[rows[:, 0]] // self.shape[1]]), 1)))


class Sight(Protocol):
    """The keys and values that one sublayer's queries attend to."""

    @property
    def pad_mask(self) -> Tensor | None: ...

    def attend(self, attention: "RowAttention", query: Tensor, kept: KeptTensors) -> Tensor:
        """Returns the heads' outputs, joined, (N, d), for queries (N, d)."""


class RowAttention(MultiheadAttention):
    """Attention between rows; parameters and a residual scheme's changes, which may add to `kept`, are those of
    MultiheadAttention."""

    def forward(self, query: Tensor, sight: Sight, kept: KeptTensors) -> Tensor:  # type: ignore[override]
        query = self._change("input", query, sight.pad_mask, kept)
        if self.is_apart:
            given = zip(INPUTS, query if self.reads_apart else (query, query, query))
            query = torch.stack([self._change(point, x, sight.pad_mask, kept) for point, x in given])
        joined = self._change("after_heads", sight.attend(self, query, kept), sight.pad_mask, kept)
        return self._change("after_output", self.out_proj(joined), sight.pad_mask, kept)

    @property
    def is_apart(self) -> bool:
        """True if q, k and v have separate inputs: three queries, stacked."""
        return self.reads_apart or any(point in self.inside for point in INPUTS)

    def project(self, x: Tensor, which: str, kept: KeptTensors) -> tuple[Tensor, ...]:
        """Projects x with the projections of `which`, neighbouring letters of "qkv", in one product, with the
        scheme's changes of queries, keys and values. If q, k and v have separate inputs, x is these, stacked."""
        if self.is_apart and len(which) == 3:
            return tuple(part for name, own in zip(which, x) for part in self.project(own, name, kept))
        d, start = self.embed_dim, "qkv".index(which)
        chosen = slice(start * d, (start + len(which)) * d)
        bias = None if self.in_proj_bias is None else self.in_proj_bias[chosen]
        parts = F.linear(x, self.in_proj_weight[chosen], bias).split(d, -1)
        changed = (self._change_heads(_POINTS[name], part, kept) for name, part in zip(which, parts))
        # There are no rotary positions here, so the changes after the rotation follow at once.
        return tuple(self._change_heads(f"rotated_{_POINTS[name]}", part, kept) for name, part in zip(which, changed))

    def _change_heads(self, point: str, x: Tensor, kept: KeptTensors | None) -> Tensor:
        for change in self.inside.get(point, ()):
            if is_of_joined_heads(change, self.head_dim):
                x = apply_changes(self, (change,), x, None, kept)
            else:
                x = apply_changes(self, (change,), x.unflatten(-1, (self.num_heads, -1)), None, kept).flatten(-2)
        return x


_POINTS = {"q": "query", "k": "key", "v": "value"}


@dataclasses.dataclass(frozen=True)
class Packed:
    """Whole sentences: queries of `rows` attend to `rows`, or to `memory` with its rows `memory_rows`."""

    rows: Rows
    causal: bool = False
    memory: Tensor | None = None
    memory_rows: Rows | None = None

    @property
    def pad_mask(self) -> Tensor | None:
        return self.rows.pad_mask

    def attend(self, attention: RowAttention, query: Tensor, kept: KeptTensors) -> Tensor:
        if self.memory is None or self.memory_rows is None:
            (q, k, v), keys = attention.project(query, "qkv", kept), self.rows
        else:
            (q,), keys = attention.project(query, "q", kept), self.memory_rows
            k, v = attention.project(self.memory, "kv", kept)
        scale = 1 / math.sqrt(attention.head_dim)
        draw = Draw(query.device)(attention.dropout if attention.training else 0.0)
        return OPS.attention(q, k, v, self.rows.ranges(keys), attention.num_heads, self.causal, scale, *draw)[0]


@dataclasses.dataclass
class Watched:
    """Attention to memory that also records its weights."""

    at: Packed
    pad_mask: None = None
    weights: Tensor | None = None
    """The weights, (B, heads, T, S), set by `attend`."""

    def attend(self, attention: RowAttention, query: Tensor, kept: KeptTensors) -> Tensor:
        rows, memory, keys = self.at.rows, self.at.memory, self.at.memory_rows
        assert memory is not None and keys is not None
        (q,), (k,) = attention.project(query, "q", kept), attention.project(memory, "k", kept)
        self.weights = weigh(attention, rows.unpack(q), keys.unpack(k), keys.padding())
        return self.at.attend(attention, query, kept)


def weigh(attention: RowAttention, q: Tensor, k: Tensor, padding: Tensor) -> Tensor:
    """Returns the attention weights (B, heads, T, S) for q (B, T, d), k (B, S, d) and k's padding (B, S)."""
    q, k = (t.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for t in (q, k))
    scores = (q / math.sqrt(attention.head_dim)) @ k.transpose(-1, -2)
    return scores.masked_fill(padding[:, None, None, :], -math.inf).softmax(-1)


@dataclasses.dataclass
class Step:
    """One step of decoding: a row for each sentence's newest token, and the keys and values of earlier tokens, or of
    `memory`."""

    cache: dict[str, Tensor]
    """Tensors by name, batch first: reordering the beams selects from each of them."""
    name: str
    padding: Tensor
    """The padding of the newest tokens, (B, 1), or of memory, (B, S)."""
    memory: Tensor | None = None
    pad_mask: Tensor | None = None
    weights: Tensor | None = None
    """The weights, (B, heads, 1, S), set by `attend`."""

    def attend(self, attention: RowAttention, query: Tensor, kept: KeptTensors) -> Tensor:
        if self.memory is None:
            q, k, v = attention.project(query.unsqueeze(-2), "qkv", kept)
            k, v, padding = self._append("key", k), self._append("value", v), self._append("padding", self.padding)
        else:
            (q,), padding = attention.project(query.unsqueeze(-2), "q", kept), self.padding
            if self.name + "key" not in self.cache:
                k, v = attention.project(self.memory, "kv", kept)
                self.cache[self.name + "key"], self.cache[self.name + "value"] = k, v
            k, v = self.cache[self.name + "key"], self.cache[self.name + "value"]
        self.weights = weigh(attention, q, k, padding)
        return (self.weights @ v.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)).transpose(1, 2).flatten(1)

    def _append(self, what: str, new: Any) -> Any:
        name = self.name + what
        self.cache[name] = torch.cat((self.cache[name], new), 1) if name in self.cache else new
        return self.cache[name]
