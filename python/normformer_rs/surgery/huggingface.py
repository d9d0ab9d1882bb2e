"""Blocks of Hugging Face `transformers` that take any residual scheme: BERT, GPT-2, T5, Marian.

Each class is its original with the residuals taken out of `forward` and handed to `self.residual` (`residuals.py`).
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.bert import modeling_bert as bert
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.models.marian import modeling_marian as marian
from transformers.models.t5 import modeling_t5 as t5

from ..nn.initial import Role
from .blocks import Linear, Part, register_block, register_stack


def _attention(path: str, output: str, names: tuple[str, str, str], factor: float = 1.0) -> tuple[Linear, ...]:
    roles: tuple[tuple[Role, ...], ...] = (("query",), ("key",), ("value",))
    inputs = (Linear(f"{path}.{name}", role, factor if role == ("query",) else 1.0) for name, role in zip(names, roles))
    return (*inputs, Linear(output, ("output",)))


class _Block:
    """A block with a scheme."""

    residual: Any


class _Site:
    """A module inside a block that holds one of its residuals."""

    block_of: tuple[Any]

    @property
    def block(self) -> Any:
        return self.block_of[0]


# BERT: x⁺ = N(x + F(x)) in BertSelfOutput and BertOutput


class BertAttention(_Site, bert.BertAttention):
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        def function(x: Tensor) -> tuple[Tensor, Any]:
            heads, weights = self.self(
                x,
                encoder_hidden_states=encoder_hidden_states,
                attention_mask=encoder_attention_mask if self.is_cross_attention else attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
            return self.output.dense(heads), weights

        return self.block.residual.step(int(self.is_cross_attention), hidden_states, function, self.output.dropout)


class BertLayer(_Block, bert.BertLayer):
    def sites(self) -> dict[str, type[nn.Module]]:
        return {path: BertAttention for path in ("attention", "crossattention") if hasattr(self, path)}

    def parts(self) -> list[Part]:
        names = ("query", "key", "value")
        found = []
        for kind, path in (("self-attention", "attention"), ("cross-attention", "crossattention")):
            if hasattr(self, path):
                linears = _attention(f"{path}.self", f"{path}.output.dense", names)
                found.append(Part(kind, f"{path}.output.LayerNorm", linears))
        linears = (Linear("intermediate.dense", ("fc1",)), Linear("output.dense", ("fc2",)))
        return [*found, Part("feed-forward", "output.LayerNorm", linears)]

    def heads(self) -> int:
        return self.attention.self.num_attention_heads

    def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
        def function(x: Tensor) -> Tensor:
            return self.output.dense(self.intermediate(x))

        last = len(self.residual.sublayers) - 1
        return self.residual.step(last, attention_output, function, self.output.dropout)


# GPT-2: x⁺ = x + F(N(x)), dropout inside F


class GPT2Block(_Block, gpt2.GPT2Block):
    def parts(self) -> list[Part]:
        stacked = Linear("attn.c_attn", ("query", "key", "value"))
        found = [Part("self-attention", "ln_1", (stacked, Linear("attn.c_proj", ("output",))), "attn.resid_dropout")]
        if hasattr(self, "crossattention"):
            memory = (
                Linear("crossattention.q_attn", ("query",)),
                Linear("crossattention.c_attn", ("key", "value")),
                Linear("crossattention.c_proj", ("output",)),
            )
            found.append(Part("cross-attention", "ln_cross_attn", memory, "crossattention.resid_dropout"))
        linears = (Linear("mlp.c_fc", ("fc1",)), Linear("mlp.c_proj", ("fc2",)))
        return [*found, Part("feed-forward", "ln_2", linears, "mlp.dropout")]

    def heads(self) -> int:
        return self.attn.num_heads

    def forward(
        self,
        hidden_states: Any,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = False,
        **kwargs: Any,
    ) -> Tensor:
        def attend(x: Tensor) -> Any:
            own = {"past_key_values": past_key_values, "attention_mask": attention_mask, "use_cache": use_cache}
            return self.attn(x, **own, **kwargs)

        def attend_memory(x: Tensor) -> Any:
            own = {"past_key_values": past_key_values, "attention_mask": attention_mask}
            memory = {"encoder_hidden_states": encoder_hidden_states, "encoder_attention_mask": encoder_attention_mask}
            return self.crossattention(x, **own, **memory)

        x, *_ = self.residual.step(0, hidden_states, attend)
        if encoder_hidden_states is not None:
            x, *_ = self.residual.step(1, x, attend_memory)
        return self.residual.step(len(self.residual.sublayers) - 1, x, self.mlp)


# T5: x⁺ = x + F(N(x)) in each of the block's layers, RMSNorm


class T5LayerSelfAttention(_Site, t5.T5LayerSelfAttention):
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        def function(x: Tensor) -> Any:
            own = {"mask": attention_mask, "position_bias": position_bias, "past_key_values": past_key_values}
            return self.SelfAttention(x, **own, **kwargs)

        return self.block.residual.step(0, hidden_states, function, self.dropout)


class T5LayerCrossAttention(_Site, t5.T5LayerCrossAttention):
    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        def function(x: Tensor) -> Any:
            own = {"mask": attention_mask, "position_bias": position_bias, "past_key_values": past_key_values}
            return self.EncDecAttention(x, key_value_states=key_value_states, **own, **kwargs)

        return self.block.residual.step(1, hidden_states, function, self.dropout)


class T5LayerFF(_Site, t5.T5LayerFF):
    def forward(self, hidden_states: Tensor) -> Tensor:
        last = len(self.block.residual.sublayers) - 1
        return self.block.residual.step(last, hidden_states, self.DenseReluDense, self.dropout)


class T5Block(_Block, t5.T5Block):
    layer: Any

    def parts(self) -> list[Part]:
        # T5 does not divide scores by √d_kv; smaller queries do it instead.
        factor = self.layer[0].SelfAttention.key_value_proj_dim ** -0.5
        found = []
        for i, (kind, name) in enumerate((("self-attention", "SelfAttention"), ("cross-attention", "EncDecAttention"))):
            if i < len(self.layer) - 1:
                path = f"layer.{i}.{name}"
                found.append(
                    Part(kind, f"layer.{i}.layer_norm", _attention(path, f"{path}.o", ("q", "k", "v"), factor))
                )
        path = f"layer.{len(self.layer) - 1}"
        wide = ("wi_0", "wi_1") if hasattr(self.layer[-1].DenseReluDense, "wi_0") else ("wi",)
        linears = (*(Linear(f"{path}.DenseReluDense.{name}", ("fc1",)) for name in wide),)
        return [
            *found,
            Part("feed-forward", f"{path}.layer_norm", (*linears, Linear(f"{path}.DenseReluDense.wo", ("fc2",)))),
        ]

    def heads(self) -> int:
        return self.layer[0].SelfAttention.n_heads

    def sites(self) -> dict[str, type[nn.Module]]:
        kinds: list[type[nn.Module]] = [T5LayerSelfAttention, T5LayerCrossAttention, T5LayerFF]
        if len(self.layer) == 2:
            kinds.pop(1)
        return {f"layer.{i}": kind for i, kind in enumerate(kinds)}


# Marian: x⁺ = N(x + F(x))


class _Marian(_Block):
    def parts(self: Any) -> list[Part]:
        found = []
        for kind, name in (("self-attention", "self_attn"), ("cross-attention", "encoder_attn")):
            if hasattr(self, name):
                linears = _attention(name, f"{name}.out_proj", ("q_proj", "k_proj", "v_proj"))
                found.append(Part(kind, f"{name}_layer_norm", linears))
        return [*found, Part("feed-forward", "final_layer_norm", (Linear("fc1", ("fc1",)), Linear("fc2", ("fc2",))))]

    def heads(self: Any) -> int:
        return self.self_attn.num_heads

    def feed_forward(self: Any, x: Tensor) -> Tensor:
        h = self.activation_fn(self.fc1(x))
        return self.fc2(nn.functional.dropout(h, p=self.activation_dropout, training=self.training))


class MarianEncoderLayer(_Marian, marian.MarianEncoderLayer):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        def attend(x: Tensor) -> Any:
            return self.self_attn(x, attention_mask=attention_mask, **kwargs)

        x, *_ = self.residual.step(0, hidden_states, attend, self.dropout)
        x = self.residual.step(1, x, self.feed_forward, self.dropout)
        if x.dtype == torch.float16 and not torch.isfinite(x).all():
            limit = torch.finfo(x.dtype).max - 1000
            x = torch.clamp(x, min=-limit, max=limit)
        return x


class MarianDecoderLayer(_Marian, marian.MarianDecoderLayer):
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = True,
        **kwargs: Any,
    ) -> Tensor:
        def attend(x: Tensor) -> Any:
            return self.self_attn(x, past_key_values=past_key_values, attention_mask=attention_mask, **kwargs)

        def attend_memory(x: Tensor) -> Any:
            memory = {"key_value_states": encoder_hidden_states, "attention_mask": encoder_attention_mask}
            return self.encoder_attn(x, past_key_values=past_key_values, **memory, **kwargs)

        x, *_ = self.residual.step(0, hidden_states, attend, self.dropout)
        if encoder_hidden_states is not None:
            x, *_ = self.residual.step(1, x, attend_memory, self.dropout)
        return self.residual.step(2, x, self.feed_forward, self.dropout)


register_block(bert.BertLayer, BertLayer)
register_block(gpt2.GPT2Block, GPT2Block)
register_block(t5.T5Block, T5Block)
register_block(marian.MarianEncoderLayer, MarianEncoderLayer)
register_block(marian.MarianDecoderLayer, MarianDecoderLayer)
register_stack(gpt2.GPT2Model, "ln_f")
register_stack(t5.T5Stack, "final_layer_norm")
