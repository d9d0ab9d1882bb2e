"""Multi-head attention with a residual scheme's changes inside it."""

import math
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import TransformerConfig
from ..declarations.declared import Change, is_of_joined_heads
from ..errors import InputError
from .dropout import Draw, is_run_again
from .generators import drawn_apart
from .interpreter import KeptTensors, apply_changes
from .rotary import rotated
from .scheme import Inside
from .sharding import write_whole
from .tracing import leaf

INPUTS = ("query_input", "key_input", "value_input")
"""The points before the separate projections of self-attention's q, k and v."""
BEFORE_PRODUCTS = frozenset(("query", "key", "value", *INPUTS))
"""The points where a change acts on q, k or v alone, before attention multiplies them."""


class MultiheadAttention(nn.MultiheadAttention):
    """softmax(s·QKᵀ + mask)V per head, heads joined, output projection: torch.nn.MultiheadAttention with changes
    at points inside it, as a residual scheme declares them. s is `scale`, or 1/√d_head if that is None.

    `inside` names changes at `input` (before the projection of queries, and also of keys and values in self-attention),
    `query_input`, `key_input` and `value_input` (in self-attention, before each projection alone), `query`, `key` and
    `value` (a norm of width d_head acts on each head separately, one of width d_model on all heads joined),
    `after_heads` (the heads' outputs, joined) and `after_output` (after `out_proj`).

    `set_parts` adds what a configuration asks for. An output gate multiplies the heads' outputs by σ(W_g·query + b_g),
    one number per head or one per element, before `after_heads`, with W_g in `gate_proj`. Sinks are one more logit per
    head, `sinks`, in the sum of its softmax. A softcap c turns scores s into c·tanh(s/c). With sinks or a softcap, the
    matrix of scores is materialised, because torch's fused attention has neither. With `kv_heads`, keys and values have
    fewer heads, and several heads of queries share one of them. Rotary positions of self-attention count from 0 over
    the tokens that `key_padding_mask` leaves.

    Parameters, masks, layouts and results are torch.nn's; `out_proj` is called as a module, so its hooks and
    replacements take effect.

    Shapes: query (B, T, d), key and value (B, S, d) with `batch_first`, else (T, B, d) and (S, B, d), or without B;
    `attn_mask` (T, S) or (B·heads, T, S) and `key_padding_mask` (B, S), True or −∞ at hidden positions; norms with
    statistics leave out the keys at which it is True, or −9,000 and less. `is_causal` without `attn_mask` is a causal
    mask (torch.nn requires both).

    Errors: InputError for masks of another shape. Source: Vaswani et al. 2017, §3.2.
    """

    inside: Inside = types.MappingProxyType({})
    scale: float | None = None
    reads_apart: bool = False
    """True for self-attention whose q, k and v have separate inputs."""
    score_softcap: float | None = None
    kv_heads: int | None = None
    """The number of heads of keys and values; None for as many as there are of queries."""
    rope_theta: float | None = None
    """The base of rotary positions; None for no rotation."""
    sinks: nn.Parameter

    def set_inside(self, inside: Inside) -> None:
        """Sets the changes; their modules and parameters are attributes of this module."""
        self.inside = dict(inside)

    def set_parts(self, config: TransformerConfig, bias: bool, *, is_self: bool, **factory: Any) -> None:
        """Makes the parts that the configuration sets: `kv_heads`, rotary positions of self-attention, `output_gate`,
        `sinks`, `score_softcap`. `bias`: True for biases of the projections; `factory`: device and dtype."""
        if config.kv_heads not in (None, self.num_heads):
            self.kv_heads = config.kv_heads
            rows = sum(self.widths)  # fewer for k and v than in the matrix that torch.nn has made
            self.in_proj_weight = nn.Parameter(torch.empty(rows, self.embed_dim, **factory))
            if bias:
                self.in_proj_bias = nn.Parameter(torch.empty(rows, **factory))
            super()._reset_parameters()
        self.rope_theta = config.rope_theta if is_self and config.positions == "rotary" else None
        self.is_self_attention = is_self
        if config.output_gate is not None:  # drawn apart, so that the option does not shift the draws of other matrices
            with drawn_apart(self.in_proj_weight.device, "gate", is_self):
                self.gate_proj = nn.Linear(self.embed_dim, OUTPUT_GATES[config.output_gate](self), bias=bias, **factory)
        if config.sinks:
            self.sinks = nn.Parameter(torch.empty(self.num_heads, **factory))
            self.reset_sinks()
        self.score_softcap = config.score_softcap

    def reset_sinks(self) -> None:
        """Initialises the sinks, if there are any, as in gpt-oss: N(0, 0.02²)."""
        if self._parameters.get("sinks") is not None:
            # "sinks" and the base of rotary positions tell these draws from others that begin at the same state.
            with drawn_apart(self.sinks.device, "sinks", self.rope_theta):
                write_whole(self.sinks, lambda whole: nn.init.normal_(whole, std=0.02))

    def _reset_parameters(self) -> None:
        """Initialises the matrices as in torch.nn, and the sinks and the gate, if there are any. torch.nn's constructor
        calls this before sinks and a gate can exist."""
        super()._reset_parameters()
        self.reset_sinks()
        if self.gate is not None:
            with drawn_apart(self.gate.weight.device, "gate", self.is_self_attention):
                self.gate.reset_parameters()

    @property
    def widths(self) -> tuple[int, int, int]:
        """The numbers of rows of queries, keys and values in the stacked matrix."""
        key_width = self.head_dim * (self.num_heads if self.kv_heads is None else self.kv_heads)
        return self.embed_dim, key_width, key_width

    @property
    def gate(self) -> nn.Linear | None:
        """`gate_proj`, if there is one."""
        gate: Any = self._modules.get("gate_proj")
        return gate

    @leaf
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        kept: KeptTensors | None = None,
        is_self: bool = False,
    ) -> Any:
        """Returns (output, weights or None). Weights are (B, T, S), or (B, heads, T, S) with
        average_attn_weights=False. `is_self`: True if query, key and value were one tensor, even if a wrapper's hooks
        have since made three of it. `kept`: the tensors that earlier places of a stack have kept under names. If `kept`
        is not None, the result has a third item: these tensors, and those that the changes here keep."""
        kept = None if kept is None else dict(kept)
        # Without one stacked matrix, or with added keys, torch.nn's own forward runs, which has no place for changes.
        if not self._qkv_same_embed_dim or self.bias_k is not None or self.add_zero_attn:
            if self.inside or self.scale is not None or self.gate is not None or self._is_capped():
                raise InputError(
                    "changes inside attention, another scale, a gate, sinks and a softcap need kdim = vdim = "
                    "embed_dim, no bias_kv and no add_zero_attn"
                )
            given: Any = (query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return super().forward(*given)
        is_batched = query.dim() == 3
        # Self-attention gets one tensor three times, or has separate inputs.
        is_self = is_self or self.reads_apart or (_is_one(key, query) and _is_one(value, query))
        if not is_batched:
            query, key, value = (t.unsqueeze(0) for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))  # (B, T or S, d)
        self._check(query, key, attn_mask, key_padding_mask)

        # The mask marks keys; only in self-attention are these also the rows that changes see.
        padding = None if key_padding_mask is None or not is_self else is_masked(key_padding_mask)
        if not self.reads_apart:
            query = self._change("input", query, padding, kept)
            key, value = (query, query) if is_self else (key, value)  # one tensor: `_project` needs one product
        if is_self and any(point in self.inside for point in INPUTS):
            inputs = zip(INPUTS, (query, key, value))
            query, key, value = (self._change(point, x, padding, kept) for point, x in inputs)
        q, k, v = self._project(query, key, value)
        q, k, v = (self._change_heads(point, x, kept) for point, x in (("query", q), ("key", k), ("value", v)))
        if self.rope_theta is not None:
            if not is_self:
                raise InputError("rotary positions need queries, keys and values of one sequence")
            q, k = rotated((q, k), self.rope_theta, padding)
        q, k = (self._change_heads(point, x, kept) for point, x in (("rotated_query", q), ("rotated_key", k)))
        if self.kv_heads is not None:
            k, v = (self._for_each_query(x) for x in (k, v))
        p = self.dropout if self.training else 0.0  # the rate of dropout on the attention weights
        weights = None
        uses_own_dropout = p > 0 and is_run_again()  # torch's dropout would draw another mask in the backward pass
        # torch's fused attention returns no weights, and has neither sinks nor a softcap nor this dropout.
        is_composed = need_weights or uses_own_dropout or self._is_capped()
        mask, is_causal = self._mask(q, k, attn_mask, key_padding_mask, is_causal, is_composed)
        if is_composed:
            scale = math.sqrt(1.0 / self.head_dim) if self.scale is None else self.scale
            scores = (q * scale) @ k.transpose(-1, -2)
            shares = self._softmax(scores, mask)
            dropped = shares
            if uses_own_dropout:
                dropped = Draw(q.device).drop(shares, p)[0]
            elif p > 0:
                dropped = F.dropout(shares, p)
            heads = dropped @ v
            if need_weights:
                weights = shares.mean(1) if average_attn_weights else shares
        else:
            heads = F.scaled_dot_product_attention(
                q, k, v, mask, p, is_causal, scale=self.scale
            )  # (B, heads, T, d_head)
        joined = self._gated(heads.transpose(1, 2).flatten(-2), query)
        joined = self._change("after_heads", joined, padding, kept)
        out = self._change("after_output", self.out_proj(joined), padding, kept)
        # The results go back to the caller's layout.
        if not is_batched:
            out, weights = out.squeeze(0), None if weights is None else weights.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1)
        return (out, weights) if kept is None else (out, weights, kept)

    def _for_each_query(self, x: Tensor) -> Tensor:
        """Repeats keys or values (B, kv_heads, S, d_head) for all heads of queries: (B, heads, S, d_head)."""
        queries_per_key = self.num_heads // x.shape[1]
        if torch.compiler.is_exporting():  # repeat_interleave would fix a dynamic length
            return x[:, torch.arange(self.num_heads, device=x.device) // queries_per_key]
        return x.repeat_interleave(queries_per_key, 1)

    def _change(self, point: str, x: Tensor, padding: Tensor | None, kept: KeptTensors | None) -> Tensor:
        """Returns x (B, T, d) after the changes at a point. `padding`: (B, T), True at padding."""
        changes: tuple[Change, ...] = self.inside.get(point, ())
        return apply_changes(self, changes, x, padding, kept)

    def _is_capped(self) -> bool:
        """True if a softcap or sinks make the softmax differ from torch's."""
        return self.score_softcap is not None or self._parameters.get("sinks") is not None

    def _softmax(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """Returns the attention weights, (B, heads, T, S), of scores in this shape. `mask`: what is added to them."""
        if self.score_softcap is not None:
            scores = torch.tanh(scores / self.score_softcap) * self.score_softcap
        scores = scores if mask is None else scores + mask
        if self._parameters.get("sinks") is None:
            return F.softmax(scores, dim=-1)
        sinks = self.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        # A sink is the logit of one more key. It takes a share of the sum, but has no value, so its column is dropped.
        return F.softmax(torch.cat([scores, sinks], -1), dim=-1)[..., :-1]

    def _gated(self, joined: Tensor, x: Tensor) -> Tensor:
        """Returns the heads' outputs `joined` (…, d) times the output gate σ(W_g x + b_g), if there is one."""
        if self.gate is None:
            return joined
        gate = torch.sigmoid(self.gate(x))
        if gate.shape[-1] == joined.shape[-1]:  # one number per element
            return joined * gate
        # Otherwise there is one number per head.
        return (joined.unflatten(-1, (self.num_heads, -1)) * gate.unsqueeze(-1)).flatten(-2)

    def _change_heads(self, point: str, x: Tensor, kept: KeptTensors | None) -> Tensor:
        """Returns queries, keys or values x (B, heads, T, d_head) after the changes at a point."""
        for change in self.inside.get(point, ()):
            if is_of_joined_heads(change, self.head_dim):
                joined = apply_changes(self, (change,), x.transpose(1, 2).flatten(-2), None, kept)
                x = joined.unflatten(-1, (x.shape[1], -1)).transpose(1, 2)
            else:
                x = apply_changes(self, (change,), x, None)  # without `kept`, which only changes of joined heads use
        return x

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v, (B, heads, T or S, d_head) each: one product if all three read one tensor, two if only
        k and v do."""
        weight, bias, widths = self.in_proj_weight, self.in_proj_bias, self.widths

        def projected(x: Tensor, first: int, count: int) -> tuple[Tensor, ...]:
            """Multiplies x by `count` blocks of the stacked matrix from block `first` on: 0 is q's, 1 k's, 2 v's."""
            start, chosen_widths = sum(widths[:first]), widths[first : first + count]
            chosen = slice(start, start + sum(chosen_widths))
            out = F.linear(x, weight[chosen], None if bias is None else bias[chosen])
            parts = out.split(chosen_widths, -1)
            return tuple(part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)

        if key is value:
            q, k, v = projected(query, 0, 3) if key is query else (*projected(query, 0, 1), *projected(key, 1, 2))
        else:
            q, k, v = *projected(query, 0, 1), *projected(key, 1, 1), *projected(value, 2, 1)
        return q, k, v

    def _mask(
        self,
        q: Tensor,
        k: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        is_composed: bool,
    ) -> tuple[Tensor | None, bool]:
        """Returns the mask that is added to the scores, (·, ·, T, S), and True if torch's fused attention applies its
        own causal mask instead. `is_composed`: True if the scores are computed here, without fused attention."""
        queries, keys = q.shape[-2], k.shape[-2]
        if is_causal and key_padding_mask is None and not is_composed:
            return None, True
        if is_causal and attn_mask is None:
            attn_mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(1)
        mask = None if attn_mask is None else additive(attn_mask, q.dtype)
        if mask is not None and mask.dim() == 3:  # (B·heads, T, S)
            mask = mask.unflatten(0, (-1, self.num_heads))
        if key_padding_mask is not None:
            padding = additive(key_padding_mask, q.dtype)[:, None, None, :]
            mask = padding if mask is None else mask + padding
        return mask, False

    def _check(self, query: Tensor, key: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> None:
        """Raises InputError for shapes that do not fit each other. All are batch first."""
        (batch, queries, width), keys = query.shape, key.shape[1]
        if width != self.embed_dim:
            raise InputError(f"query must be (…, {self.embed_dim}) wide as d_model says; got {width}")
        # A mask may differ between sentences and heads, or be one for all.
        whole, single = (batch * self.num_heads, queries, keys), (queries, keys)
        if attn_mask is not None and attn_mask.shape not in (whole, single):
            raise InputError(f"attention mask must be {single} or {whole}; got {tuple(attn_mask.shape)}")
        if key_padding_mask is not None and key_padding_mask.shape != (batch, keys):
            raise InputError(f"key padding mask must be {(batch, keys)}; got {tuple(key_padding_mask.shape)}")


def _is_one(a: Tensor, b: Tensor) -> bool:
    """True if a and b are one tensor, or views of the same memory, as reentrant checkpoints make from one tensor."""
    if a is b or torch.compiler.is_compiling() or type(a) is not Tensor or type(b) is not Tensor:
        return a is b  # compiled code and subclasses of Tensor may have no memory to compare
    if (a.shape, a.dtype, a.device, a.layout) != (b.shape, b.dtype, b.device, b.layout) or a.layout != torch.strided:
        return False
    try:
        return a.stride() == b.stride() and 0 != a.data_ptr() == b.data_ptr()  # 0: no memory, as on meta
    except RuntimeError:  # tensors of torch.func's transformations have no memory
        return False


OUTPUT_GATES: dict[str, Callable[[nn.MultiheadAttention], int]] = {
    "head": lambda attention: attention.num_heads,
    "element": lambda attention: attention.embed_dim,
}
"""An output gate's name → a function that returns the number of the gate's outputs in an attention."""


HIDDEN = -9e3
"""The value of a float mask at or below which a position is hidden: e⁻⁹⁰⁰⁰ is 0 in every dtype. Masks of −10,000 are
common, and bfloat16 rounds them to −9,984."""


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a mask to add to scores of this dtype: a boolean one (True: hidden) as 0 and −∞, a float one as it is."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    _check_kind(mask)
    return mask.to(dtype)


def is_masked(mask: Tensor) -> Tensor:
    """Returns a mask that is True at padding: for a float mask, at −9,000 and less, −∞ included."""
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        return mask
    _check_kind(mask)
    return mask <= HIDDEN


def _check_kind(mask: Any) -> None:
    """Raises InputError unless the mask, which is not boolean, is a floating-point tensor."""
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            f"masks must be bool (True: hidden) or floating point (added to scores); got {got}: of a tokenizer's mask, "
            "1 at real tokens, give attention_mask == 0"
        )
