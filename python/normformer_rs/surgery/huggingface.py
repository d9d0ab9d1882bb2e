"""Blocks of Hugging Face `transformers` with a forward of their own: BERT and its like, GPT-2, T5.

Each mixin stands before the original class and hands its residuals to `self.residual`; `converted.py` joins the two.
Nothing here imports `transformers`.
"""

from typing import Any, ClassVar

from torch import Tensor

from .converted import ConvertedBlock, ConvertedSite, converted_class
from .spec import BlockSpec, Linear, Part, attention, feed_forward

# BERT: x⁺ = N(x + F(x)) in BertSelfOutput and BertOutput


class BertAttention(ConvertedSite):
    def forward(
        self: Any,
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


class BertBlock(ConvertedBlock):
    spec = BlockSpec(
        (
            *(
                Part(
                    kind,
                    f"{path}.output.LayerNorm",
                    attention(f"{path}.self", f"{path}.output.dense", "query key value"),
                )
                for kind, path in (("self-attention", "attention"), ("cross-attention", "crossattention"))
            ),
            Part("feed-forward", "output.LayerNorm", feed_forward("intermediate.dense", "output.dense")),
        ),
        heads="attention.self.num_attention_heads",
    )
    passed_over: ClassVar[tuple[str, ...]] = ("attention.output", "crossattention.output", "output")

    def sites(self: Any) -> dict[str, type]:
        paths = [path for path in ("attention", "crossattention") if hasattr(self, path)]
        return {path: converted_class(type(self.get_submodule(path)), BertAttention) for path in paths}

    def feed_forward_chunk(self: Any, attention_output: Tensor) -> Tensor:
        def function(x: Tensor) -> Tensor:
            return self.output.dense(self.intermediate(x))

        last = len(self.residual.sublayers) - 1
        return self.residual.step(last, attention_output, function, self.output.dropout)


# RoBERTa-PreLayerNorm: x⁺ = x + F(N(x)), in BERT's modules


class RobertaPreLayerNormBlock(BertBlock):
    spec = BlockSpec(
        (
            *(
                Part(
                    kind,
                    f"{path}.LayerNorm",
                    attention(f"{path}.self", f"{path}.output.dense", "query key value"),
                )
                for kind, path in (("self-attention", "attention"), ("cross-attention", "crossattention"))
            ),
            Part(
                "feed-forward",
                "intermediate.LayerNorm",
                feed_forward("intermediate.dense", "output.dense"),
            ),
        ),
        heads="attention.self.num_attention_heads",
    )
    passed_over = (*BertBlock.passed_over, "intermediate")

    def feed_forward_chunk(self: Any, attention_output: Tensor) -> Tensor:
        def function(x: Tensor) -> Tensor:
            return self.output.dense(self.intermediate.intermediate_act_fn(self.intermediate.dense(x)))

        last = len(self.residual.sublayers) - 1
        return self.residual.step(last, attention_output, function, self.output.dropout)


# GPT-2: x⁺ = x + F(N(x)), dropout inside F


class GPT2Block(ConvertedBlock):
    spec = BlockSpec(
        (
            Part(
                "self-attention",
                "ln_1",
                (Linear("attn.c_attn", ("query", "key", "value")), Linear("attn.c_proj", ("output",))),
                "attn.resid_dropout",
            ),
            Part(
                "cross-attention",
                "ln_cross_attn",
                (
                    Linear("crossattention.q_attn", ("query",)),
                    Linear("crossattention.c_attn", ("key", "value")),
                    Linear("crossattention.c_proj", ("output",)),
                ),
                "crossattention.resid_dropout",
            ),
            Part("feed-forward", "ln_2", feed_forward("mlp.c_fc", "mlp.c_proj"), "mlp.dropout"),
        ),
        heads="attn.num_heads",
    )

    def forward(
        self: Any,
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


class T5LayerSelfAttention(ConvertedSite):
    def forward(
        self: Any,
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


class T5LayerCrossAttention(ConvertedSite):
    def forward(
        self: Any,
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


class T5LayerFF(ConvertedSite):
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        last = len(self.block.residual.sublayers) - 1
        return self.block.residual.step(last, hidden_states, self.DenseReluDense, self.dropout)


class T5Block(ConvertedBlock):
    def parts(self: Any) -> list[Part]:
        # T5 does not divide scores by √d_kv; smaller queries do it instead.
        factor = self.layer[0].SelfAttention.key_value_proj_dim ** -0.5
        found = []
        for i, (kind, name) in enumerate((("self-attention", "SelfAttention"), ("cross-attention", "EncDecAttention"))):
            if i < len(self.layer) - 1:
                path = f"layer.{i}.{name}"
                found.append(Part(kind, f"layer.{i}.layer_norm", attention(path, f"{path}.o", "q k v", factor)))
        path = f"layer.{len(self.layer) - 1}"
        inner = f"{path}.DenseReluDense"
        gated = hasattr(self.layer[-1].DenseReluDense, "wi_0")
        linears = feed_forward(f"{inner}.wi_0 {inner}.wi_1" if gated else f"{inner}.wi", f"{inner}.wo")
        return [*found, Part("feed-forward", f"{path}.layer_norm", linears)]

    def heads(self: Any) -> int:
        return self.layer[0].SelfAttention.n_heads

    def sites(self: Any) -> dict[str, type]:
        mixins: list[type] = [T5LayerSelfAttention, T5LayerCrossAttention, T5LayerFF]
        if len(self.layer) == 2:
            mixins.pop(1)
        return {f"layer.{i}": converted_class(type(self.layer[i]), mixin) for i, mixin in enumerate(mixins)}
