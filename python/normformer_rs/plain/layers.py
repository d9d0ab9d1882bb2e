"""Sublayers, layers and stacks."""

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn import formulas
from .mixing import One
from .norms import keep


class StreamStep(nn.Module):
    """α⊙s + β⊙f of a stream s beside x."""

    alpha: Tensor | None
    beta: Tensor | None

    def __init__(self, alpha: Tensor | None, beta: Tensor | None) -> None:
        super().__init__()
        keep(self, alpha=alpha, beta=beta)

    def forward(self, s: Tensor, f: Tensor) -> Tensor:
        return formulas.residual(s, f, self.alpha, self.beta)


class Around(nn.Module):
    """x⁺ = N_after(α⊙x + β⊙drop(s·N_amid(f))), f = F(N_before(x)), s = `scale`; an absent norm is Identity, an absent
    gain None. `steps` move the streams beside x. `adds_bottom`: in the sum, x is x plus the layer's input."""

    alpha: Tensor | None
    beta: Tensor | None

    def __init__(
        self,
        before: nn.Module,
        amid: nn.Module,
        after: nn.Module,
        alpha: Tensor | None,
        beta: Tensor | None,
        dropout: nn.Module,
        steps: list[nn.Module] | None = None,
        scale: float = 1.0,
        adds_bottom: bool = False,
    ) -> None:
        super().__init__()
        self.before, self.amid, self.after, self.dropout = before, amid, after, dropout
        self.scale, self.adds_bottom = scale, adds_bottom
        self.steps = nn.ModuleList(steps)
        keep(self, alpha=alpha, beta=beta)

    def forward(self, x: Tensor, f: Tensor, others: list[Tensor]) -> Tensor:
        """x⁺; the streams beside x are changed in their list."""
        f = self.dropout(self.amid(f))
        if self.scale != 1.0:
            f = f * self.scale
        for i, step in enumerate(self.steps):
            others[i] = step(others[i], f)
        return self.after(formulas.residual(x, f, self.alpha, self.beta))

    def begin(self, x: Tensor, others: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        """x and the streams beside it; a layer that stands alone begins them."""
        return (x, [x for _ in range(len(self.steps))]) if others is None else (x, others)

    def enter(self, x: Tensor, others: list[Tensor]) -> Tensor:
        """What F reads."""
        return self.before(x)

    def join(self, x: Tensor, bottom: Tensor) -> Tensor:
        """x in the sum; `bottom`: the layer's input."""
        return x + bottom if self.adds_bottom else x

    def end(self, x: Tensor, others: list[Tensor]) -> Tensor:
        """The output of a layer that stands alone."""
        return x


class Attention(nn.Module):
    """Multi-head attention with changes at its input, on queries, keys and values, on the joined heads and at its
    output."""

    in_proj_weight: Tensor
    in_proj_bias: Tensor | None
    scale: float | None

    def __init__(
        self,
        in_proj_weight: Tensor,
        in_proj_bias: Tensor | None,
        out_proj: nn.Module,
        heads: int,
        dropout: float,
        batch_first: bool,
        changes: dict[str, nn.Module],
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.heads, self.dropout, self.batch_first, self.out_proj = heads, float(dropout), batch_first, out_proj
        self.input, self.query, self.key, self.value = (changes[at] for at in ("input", "query", "key", "value"))
        self.after_heads, self.after_output = changes["after_heads"], changes["after_output"]
        keep(self, in_proj_weight=in_proj_weight, in_proj_bias=in_proj_bias)

    def forward(
        self,
        query: Tensor,
        memory: Tensor | None,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        """The output; memory=None: attention to the query itself."""
        is_batched = query.dim() == 3
        if not is_batched:
            query = query.unsqueeze(0)
            memory = None if memory is None else memory.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query = query.transpose(0, 1)
            memory = None if memory is None else memory.transpose(0, 1)
        query = self.input(query)
        d, bias = query.shape[-1], self.in_proj_bias
        source = query if memory is None else memory
        q = F.linear(query, self.in_proj_weight[:d], None if bias is None else bias[:d])
        k = F.linear(source, self.in_proj_weight[d : 2 * d], None if bias is None else bias[d : 2 * d])
        v = F.linear(source, self.in_proj_weight[2 * d :], None if bias is None else bias[2 * d :])
        q, k, v = self.query(self.split(q)), self.key(self.split(k)), self.value(self.split(v))

        only_causal = is_causal and key_padding_mask is None
        if is_causal and attn_mask is None:
            attn_mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        mask: Tensor | None = None
        if not only_causal:
            if attn_mask is not None:
                mask = self.additive(attn_mask, q)
                if mask.dim() == 3:
                    mask = mask.unflatten(0, [q.shape[0], self.heads])
            if key_padding_mask is not None:
                padding = self.additive(key_padding_mask, q)[:, None, None, :]
                mask = padding if mask is None else mask + padding
        p = self.dropout if self.training else 0.0
        heads = F.scaled_dot_product_attention(q, k, v, mask, p, only_causal, scale=self.scale)
        joined = heads.transpose(1, 2).flatten(-2)
        out = self.after_output(self.out_proj(self.after_heads(joined)))
        if not is_batched:
            return out.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1)

    def split(self, x: Tensor) -> Tensor:
        """(B, T, d) → (B, heads, T, d_head)."""
        return x.unflatten(-1, [self.heads, x.shape[-1] // self.heads]).transpose(1, 2)

    def additive(self, mask: Tensor, like: Tensor) -> Tensor:
        """A boolean mask as 0 and −∞; a float mask as it is."""
        if mask.dtype == torch.bool:
            return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))
        return mask.to(like.dtype)


class TorchAttention(nn.Module):
    """torch.nn.MultiheadAttention, called as `Attention` is."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self,
        query: Tensor,
        memory: Tensor | None,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        source = query if memory is None else memory
        if attn_mask is None and is_causal:
            dim = 1 if self.attention.batch_first and query.dim() == 3 else 0
            shape = [query.shape[dim], source.shape[dim]]
            attn_mask = torch.ones(shape, dtype=torch.bool, device=query.device).triu(1)
        return self.attention(
            query, source, source, attn_mask=attn_mask, key_padding_mask=key_padding_mask, need_weights=False
        )[0]


class FeedForward(nn.Module):
    """W₂·drop(φ(W₁x + b₁)) + b₂ with changes at its input, before φ and before W₂."""

    def __init__(
        self,
        linear1: nn.Module,
        activation: nn.Module,
        dropout: nn.Module,
        linear2: nn.Module,
        changes: tuple[nn.Module, nn.Module, nn.Module],
    ) -> None:
        super().__init__()
        self.linear1, self.activation, self.dropout, self.linear2 = linear1, activation, dropout, linear2
        self.input, self.before_activation, self.amid = changes

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(self.before_activation(self.linear1(self.input(x))))
        return self.linear2(self.amid(self.dropout(h)))


class Activation(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward; torch.nn.TransformerEncoderLayer's call."""

    def __init__(self, arounds: list[Any], self_attn: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.around1, self.around2 = arounds
        self.self_attn, self.feed_forward = self_attn, feed_forward

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        others: list[Tensor] | None = None,
    ) -> Tensor:
        x, streams = self.around1.begin(src, others)
        f = self.self_attn(self.around1.enter(x, streams), None, src_mask, src_key_padding_mask, is_causal)
        x = self.around1(x, f, streams)
        f = self.feed_forward(self.around2.enter(x, streams))
        x = self.around2(self.around2.join(x, src), f, streams)
        return self.around2.end(x, streams) if others is None else x


class DecoderLayer(nn.Module):
    """Self-attention, attention to the encoder, feed-forward; torch.nn.TransformerDecoderLayer's call."""

    def __init__(
        self, arounds: list[Any], self_attn: nn.Module, multihead_attn: nn.Module, feed_forward: nn.Module
    ) -> None:
        super().__init__()
        self.around1, self.around2, self.around3 = arounds
        self.self_attn, self.multihead_attn, self.feed_forward = self_attn, multihead_attn, feed_forward

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
        others: list[Tensor] | None = None,
    ) -> Tensor:
        x, streams = self.around1.begin(tgt, others)
        f = self.self_attn(self.around1.enter(x, streams), None, tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        x = self.around1(x, f, streams)
        y = self.around2.enter(x, streams)
        f = self.multihead_attn(y, memory, memory_mask, memory_key_padding_mask, memory_is_causal)
        x = self.around2(x, f, streams)
        f = self.feed_forward(self.around3.enter(x, streams))
        x = self.around3(self.around3.join(x, tgt), f, streams)
        return self.around3.end(x, streams) if others is None else x


class Through(nn.Module):
    """A layer's input is the previous layer's output."""

    def forward(self, y: Tensor, outputs: list[Tensor]) -> Tensor:
        return y


class Remember(nn.Module):
    """The first layer's input is what the stack reads, which later sums weigh, too."""

    def forward(self, y: Tensor, outputs: list[Tensor]) -> Tensor:
        outputs.append(y)
        return y


class Sum(nn.Module):
    """A layer's input is a learned sum of all outputs so far; `norm` stands on the newest, or on the sum."""

    weight: Tensor

    def __init__(self, weight: Tensor, row: int, norm: nn.Module, on_sum: bool) -> None:
        super().__init__()
        self.row, self.norm, self.on_sum = row, norm, on_sum
        keep(self, weight=weight)

    def forward(self, y: Tensor, outputs: list[Tensor]) -> Tensor:
        outputs.append(y if self.on_sum else self.norm(y))
        total = torch.stack(outputs, -1) @ self.weight[self.row, : self.row + 1].to(y.dtype)
        return self.norm(total) if self.on_sum else total


class Stack(nn.Module):
    """Layers, each with the sum that enters it (Through, Remember, Sum), the last sum, the norms of the streams beside
    x, the way in which mixed streams begin and are read (One, HyperEnd, DepthEnd), and the end
    and the begin of the stack.

    Encoder and Decoder write their loops out: TorchScript compiles no loop over layers with the arguments of either. It
    compiles only one side of a condition on a constant, so torch.nn's layers, which take no streams, may stand in a
    stack without any.
    """

    has_streams: Final[bool]

    def __init__(
        self,
        layers: list[nn.Module],
        sums: list[nn.Module],
        streams: list[nn.Module],
        mixing: nn.Module,
        end: nn.Module,
        begin: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.begin = nn.Identity() if begin is None else begin
        *sums, self.last_sum = sums
        self.layers, self.sums, self.end = nn.ModuleList(layers), nn.ModuleList(sums), end
        self.streams, self.mixing = nn.ModuleList(streams), mixing
        self.has_streams = len(streams) > 0 or not isinstance(mixing, One)

    def finish(self, x: Tensor, outputs: list[Tensor], others: list[Tensor]) -> Tensor:
        """The stack's output, from the last layer's."""
        x = self.last_sum(x, outputs)
        for i, norm in enumerate(self.streams):
            x = x + norm(others[i])
        return self.end(self.mixing(x, others))


class Encoder(Stack):
    """torch.nn.TransformerEncoder's call."""

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        x = self.begin(src)
        outputs: list[Tensor] = []
        others = [x for _ in range(len(self.streams))]
        x = self.mixing.begin(x)  # type: ignore[operator]
        causal = is_causal is not None and is_causal
        for layer, enter in zip(self.layers, self.sums):
            x = enter(x, outputs)
            if self.has_streams:
                x = layer(x, mask, src_key_padding_mask, causal, others)
            else:
                x = layer(x, mask, src_key_padding_mask, causal)
        return self.finish(x, outputs, others)


class Decoder(Stack):
    """torch.nn.TransformerDecoder's call."""

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        x = self.begin(tgt)
        outputs: list[Tensor] = []
        others = [x for _ in range(len(self.streams))]
        x = self.mixing.begin(x)  # type: ignore[operator]
        own, other = (tgt_mask, tgt_key_padding_mask), (memory_mask, memory_key_padding_mask)
        causal = (tgt_is_causal is not None and tgt_is_causal, memory_is_causal)
        for layer, enter in zip(self.layers, self.sums):
            x = enter(x, outputs)
            if self.has_streams:
                x = layer(x, memory, own[0], other[0], own[1], other[1], causal[0], causal[1], others)
            else:
                x = layer(x, memory, own[0], other[0], own[1], other[1], causal[0], causal[1])
        return self.finish(x, outputs, others)


class Residual(nn.Module):
    """x⁺ around a sublayer that takes x alone and returns F(x)."""

    def __init__(self, around: Any, sublayer: nn.Module) -> None:
        super().__init__()
        self.around, self.sublayer = around, sublayer

    def forward(self, x: Tensor) -> Tensor:
        return self.around(x, self.sublayer(self.around.enter(x, [])), [])
