"""Packed batches, which have one row for each real token, sentence after sentence; and attention between such rows.

fairseq pads its batches, on the left or on the right. Packing keeps padding out of norms, products and statistics.
While the gains of admin are profiled, padding has rows, too, because they are computed from the whole batch
(docs/spec.md §3.4). In step-by-step decoding there is one row for each sentence, and the keys and values of earlier
steps are cached.
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
    """The positions of the real tokens in a padded batch (B, T); while gains are profiled, also those of padding."""

    shape: torch.Size
    index: Tensor
    """The position of each row in the flattened batch, (N,)."""
    lengths: Tensor
    """The number of real tokens of each sentence, (B,)."""
    pad_mask: Tensor | None = None
    """A mask (N,) that is True for rows of padding, which come last; None if padding has no rows."""

    @classmethod
    def of(cls, padding: Tensor) -> "Rows":
        """Returns the rows of a batch, from a mask (B, T) that is True at padding."""
        flat, lengths = padding.flatten(), (~padding).sum(1)
        if not is_profiling():
            return cls(padding.shape, (~flat).nonzero().squeeze(1), lengths)
        index = flat.to(torch.uint8).argsort(stable=True)  # real tokens in their order, then padding
        return cls(padding.shape, index, lengths, flat[index])

    def pack(self, x: Tensor) -> Tensor:
        """Returns the rows (N, …) of a padded tensor (B, T, …)."""
        return x.flatten(0, 1).index_select(0, self.index)

    def unpack(self, rows: Tensor) -> Tensor:
        """Returns the padded tensor (B, T, d) of rows (N, d); it is zero at padding that has no row."""
        padded = rows.new_zeros(self.shape.numel(), rows.shape[-1])
        return padded.index_copy(0, self.index, rows).unflatten(0, self.shape)

    def padding(self) -> Tensor:
        """Returns the mask (B, T) that is True at padding."""
        index = self.index if self.pad_mask is None else self.index[~self.pad_mask]
        real = torch.zeros(self.shape.numel(), dtype=torch.bool, device=index.device)
        return ~real.index_fill(0, index, True).unflatten(0, self.shape)

    def spans(self) -> Tensor:
        """Returns, for each sentence, the index of its first row and the number of its rows, (B, 2)."""
        return torch.stack((self.lengths.cumsum(0) - self.lengths, self.lengths), 1)

    def ranges(self, keys: "Rows") -> Tensor:
        """Returns the ranges that the attention operator expects, (ranges, 4): start and number of query rows, start
        and number of key rows. The queries of a sentence attend to the keys of the same sentence in `keys`. Each row of
        padding has its own range, and attends to the keys of its sentence."""
        ranges = torch.cat((self.spans(), keys.spans()), 1)
        if self.pad_mask is None:
            return ranges
        padding_rows = self.pad_mask.nonzero()
        padding_queries = torch.cat((padding_rows, torch.ones_like(padding_rows)), 1)
        # A position in the flattened batch, divided by the batch's width, is the number of its sentence.
        sentences = self.index[padding_rows[:, 0]] // self.shape[1]
        padding_ranges = torch.cat((padding_queries, keys.spans()[sentences]), 1)
        return torch.cat((ranges, padding_ranges))


class Sight(Protocol):
    """The keys and values that the queries of one sublayer attend to."""

    @property
    def pad_mask(self) -> Tensor | None:
        """A mask (N,) that is True for rows of padding; None if padding has no rows."""

    def attend(self, attention: "RowAttention", query: Tensor, kept: KeptTensors) -> Tensor:
        """Returns the joined outputs of all heads, (N, d), for the queries' input (N, d). `kept` collects tensors that
        the residual scheme keeps for later layers."""


class RowAttention(MultiheadAttention):
    """MultiheadAttention between packed rows. Parameters are the same, and so are the changes that a residual scheme
    makes inside; these may add tensors to `kept`."""

    def forward(self, query: Tensor, sight: Sight, kept: KeptTensors) -> Tensor:  # type: ignore[override]
        """Returns the attention's output (N, d) for the rows of queries (N, d). `sight` holds the keys and values."""
        query = self._change("input", query, sight.pad_mask, kept)
        if self.is_apart:
            inputs = zip(INPUTS, query if self.reads_apart else (query, query, query))
            query = torch.stack([self._change(point, x, sight.pad_mask, kept) for point, x in inputs])
        joined = self._change("after_heads", sight.attend(self, query, kept), sight.pad_mask, kept)
        return self._change("after_output", self.out_proj(joined), sight.pad_mask, kept)

    @property
    def is_apart(self) -> bool:
        """True if q, k and v have separate inputs. Then these three are stacked into one tensor (3, …)."""
        return self.reads_apart or any(point in self.inside for point in INPUTS)

    def project(self, x: Tensor, which: str, kept: KeptTensors) -> tuple[Tensor, ...]:
        """Returns the projections of x that `which` names, with the scheme's changes of queries, keys and values.
        `which` is "qkv" or a part of it, such as "kv"; one matrix product computes them all. If q, k and v have
        separate inputs, x holds the three inputs, stacked, and each has its own product. Each result is (…, d)."""
        if self.is_apart and len(which) == 3:
            return tuple(self.project(own_input, name, kept)[0] for name, own_input in zip(which, x))
        # The matrix has d rows for queries, then d for keys, then d for values.
        d, start = self.embed_dim, "qkv".index(which)
        chosen = slice(start * d, (start + len(which)) * d)
        bias = None if self.in_proj_bias is None else self.in_proj_bias[chosen]
        parts = F.linear(x, self.in_proj_weight[chosen], bias).split(d, -1)
        changed = (self._change_heads(_POINTS[name], part, kept) for name, part in zip(which, parts))
        # There are no rotary positions here, so the changes after the rotation follow at once.
        return tuple(self._change_heads(f"rotated_{_POINTS[name]}", part, kept) for name, part in zip(which, changed))

    def _change_heads(self, point: str, x: Tensor, kept: KeptTensors | None) -> Tensor:
        """Applies the scheme's changes at `point` to queries, keys or values (…, d): each head's by itself, unless a
        change is for all heads joined."""
        for change in self.inside.get(point, ()):
            if is_of_joined_heads(change, self.head_dim):
                x = apply_changes(self, (change,), x, padding_mask=None, kept=kept)
            else:
                heads = x.unflatten(-1, (self.num_heads, -1))  # (…, heads, d_head)
                x = apply_changes(self, (change,), heads, padding_mask=None, kept=kept).flatten(-2)
        return x


_POINTS = {"q": "query", "k": "key", "v": "value"}
"""The points inside attention at which a residual scheme may change queries, keys and values."""


@dataclasses.dataclass(frozen=True)
class Packed:
    """Attention between whole sentences: the queries of `rows` attend to `rows` themselves, or, if `memory` is given,
    to its rows, whose positions are `memory_rows`."""

    rows: Rows
    causal: bool = False
    memory: Tensor | None = None
    memory_rows: Rows | None = None

    @property
    def pad_mask(self) -> Tensor | None:
        return self.rows.pad_mask

    def attend(self, attention: RowAttention, query: Tensor, kept: KeptTensors) -> Tensor:
        """As `Sight.attend`; the kernel computes it for all sentences at once."""
        if self.memory is None or self.memory_rows is None:
            (q, k, v), keys = attention.project(query, "qkv", kept), self.rows
        else:
            (q,), keys = attention.project(query, "q", kept), self.memory_rows
            k, v = attention.project(self.memory, "kv", kept)
        scale = 1 / math.sqrt(attention.head_dim)
        # The operator gets the dropout's rate, seed and site.
        draw = Draw(query.device)(attention.dropout if attention.training else 0.0)
        return OPS.attention(q, k, v, self.rows.ranges(keys), attention.num_heads, self.causal, scale, *draw)[0]


@dataclasses.dataclass
class Watched:
    """Attention to the encoder's output that also records the attention weights."""

    cross: Packed
    """The attention whose weights are recorded."""
    pad_mask: None = None
    weights: Tensor | None = None
    """The attention weights (B, heads, T, S), which `attend` sets."""

    def attend(self, attention: RowAttention, query: Tensor, kept: KeptTensors) -> Tensor:
        """As `Sight.attend`; the weights are computed a second time, because the kernel does not return them."""
        rows, memory, keys = self.cross.rows, self.cross.memory, self.cross.memory_rows
        assert memory is not None and keys is not None
        (q,), (k,) = attention.project(query, "q", kept), attention.project(memory, "k", kept)
        self.weights = weigh(attention, rows.unpack(q), keys.unpack(k), keys.padding())
        return self.cross.attend(attention, query, kept)


def weigh(attention: RowAttention, q: Tensor, k: Tensor, padding: Tensor) -> Tensor:
    """Returns the attention weights (B, heads, T, S) for queries q (B, T, d), keys k (B, S, d), and a mask (B, S) that
    is True where k is padding."""
    q, k = (t.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for t in (q, k))
    scores = (q / math.sqrt(attention.head_dim)) @ k.transpose(-1, -2)
    return scores.masked_fill(padding[:, None, None, :], -math.inf).softmax(-1)


@dataclasses.dataclass
class Step:
    """Attention in one step of decoding. The queries are the newest token of each sentence; keys and values are those
    of all tokens so far, or those of `memory` if it is given. They are kept in the cache."""

    cache: dict[str, Tensor]
    """Tensors by name. Their first dimension is the batch; when beams are reordered, its entries are selected."""
    name: str
    """The beginning of the tensors' names in the cache."""
    padding: Tensor
    """A mask that is True at padding: of the newest tokens, (B, 1), or of memory, (B, S)."""
    memory: Tensor | None = None
    pad_mask: Tensor | None = None
    weights: Tensor | None = None
    """The attention weights (B, heads, 1, S), which `attend` sets."""

    def attend(self, attention: RowAttention, query: Tensor, kept: KeptTensors) -> Tensor:
        """As `Sight.attend`, for one query of each sentence."""
        # unsqueeze(-2) adds the dimension of time, which has the newest token alone.
        if self.memory is None:
            q, k, v = attention.project(query.unsqueeze(-2), "qkv", kept)
            k, v, padding = self._append("key", k), self._append("value", v), self._append("padding", self.padding)
        else:
            (q,), padding = attention.project(query.unsqueeze(-2), "q", kept), self.padding
            if self.name + "key" not in self.cache:  # keys and values of memory are projected in the first step only
                k, v = attention.project(self.memory, "kv", kept)
                self.cache[self.name + "key"], self.cache[self.name + "value"] = k, v
            k, v = self.cache[self.name + "key"], self.cache[self.name + "value"]
        self.weights = weigh(attention, q, k, padding)
        values = v.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)  # (B, heads, S, d_head)
        return (self.weights @ values).transpose(1, 2).flatten(1)

    def _append(self, what: str, new: Any) -> Any:
        """Appends the newest tokens' tensor to the cached one, along the time, and returns the result."""
        name = self.name + what
        self.cache[name] = torch.cat((self.cache[name], new), 1) if name in self.cache else new
        return self.cache[name]
