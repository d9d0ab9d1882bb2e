"""The Transformer of SPEC §4, as functions of a state dict over padded (batch, time) token tensors.

Names of parameters are torch.nn.Transformer's. A config is a dict with the keys of `DEFAULTS`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .norms import DEFAULT_EPS, apply_norm, fixnorm, residual_step
from .operators import PAD, UNK, attention, causal_mask, masked_log_softmax, relu_dropout
from .philox import dropout_keep, dropout_scale

State = Mapping[str, Tensor]
Config = Mapping[str, Any]

DEFAULTS: dict[str, Any] = {
    "architecture": "encoder-decoder",  # or "decoder-only"
    "vocab_size": 32,
    "d_model": 16,
    "d_ff": 32,
    "heads": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "norm": "layernorm",
    "encoder_norm": None,  # None: norm
    "decoder_norm": None,
    "residual": "prenorm",  # or "postnorm"
    "fixnorm": False,
    "positions": "twt",  # or "fairseq"
    "tie_embeddings": "all",  # or "decoder", "none"
    "output_bias": False,
    "norm_eps": None,  # None: the norm's own
}


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Rates, and the address of the masks: Philox(seed, update, micro_batch, site, element)."""

    embedding: float = 0.0
    attention: float = 0.0
    activation: float = 0.0
    residual: float = 0.0
    seed: int = 0
    update: int = 0
    micro_batch: int = 0


def complete(config: Config) -> dict[str, Any]:
    """The config with what it leaves out, and each stack's norm, filled in."""
    full = {**DEFAULTS, **config}
    for stack in ("encoder", "decoder"):
        full[f"{stack}_norm"] = full[f"{stack}_norm"] or full["norm"]
    return full


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and shape."""
    c = complete(config)
    d, d_ff, vocab = c["d_model"], c["d_ff"], c["vocab_size"]
    translates = c["architecture"] == "encoder-decoder"
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, fan_out: int, fan_in: int) -> None:
        shapes[f"{name}.weight"] = (fan_out, fan_in)
        shapes[f"{name}.bias"] = (fan_out,)

    def multihead(name: str) -> None:
        shapes[f"{name}.in_proj_weight"] = (3 * d, d)
        shapes[f"{name}.in_proj_bias"] = (3 * d,)
        linear(f"{name}.out_proj", d, d)

    def norm(name: str, kind: str, is_last_of_decoder: bool) -> None:
        if kind in ("layernorm", "rmsnorm"):
            shapes[f"{name}.weight"] = (d,)
        if kind == "layernorm":
            shapes[f"{name}.bias"] = (d,)
        if kind == "scalenorm" or (kind == "scalenorm-fixed" and is_last_of_decoder):
            shapes[f"{name}.weight"] = (1,)

    def stack(name: str, has_cross_attention: bool) -> None:
        kind, layers, is_postnorm = c[f"{name}_norm"], c[f"{name}_layers"], c["residual"] == "postnorm"
        sublayers = 3 if has_cross_attention else 2
        for i in range(layers):
            layer = f"{name}.layers.{i}"
            multihead(f"{layer}.self_attn")
            if has_cross_attention:
                multihead(f"{layer}.multihead_attn")
            linear(f"{layer}.linear1", d_ff, d)
            linear(f"{layer}.linear2", d, d_ff)
            for j in range(1, sublayers + 1):
                is_last = is_postnorm and name == "decoder" and i == layers - 1 and j == sublayers
                norm(f"{layer}.norm{j}", kind, is_last)
        if not is_postnorm:
            norm(f"{name}.norm", kind, name == "decoder")

    if c["tie_embeddings"] == "all":
        shapes["embedding.weight"] = (vocab, d)
    else:
        if translates:
            shapes["source_embedding.weight"] = (vocab, d)
        shapes["target_embedding.weight"] = (vocab, d)
    if translates:
        stack("encoder", has_cross_attention=False)
    stack("decoder", has_cross_attention=translates)
    if c["tie_embeddings"] == "none":
        shapes["output_projection.weight"] = (vocab, d)
    if c["output_bias"]:
        shapes["output_projection.bias"] = (vocab,)
    return shapes


def sinusoids(positions: Tensor, d: int, layout: str) -> Tensor:
    """Sinusoidal positions (…, d) of integer positions (…), in f64 (SPEC §4).

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


def forward(
    state: State, config: Config, source: Tensor | None, target_input: Tensor, dropout: Dropout | None = None
) -> Tensor:
    """Logits (B, T, V) of source (B, S) (None for a decoder alone) and target_input (B, T).

    Logits at padding are meaningless. Without `dropout` this is evaluation.
    """
    return _Run(state, config, dropout).logits(source, target_input)


class _Run:
    """One forward pass: the state, the config, and the number of the next dropout site."""

    def __init__(self, state: State, config: Config, dropout: Dropout | None) -> None:
        self.state, self.config, self.dropout = state, complete(config), dropout or Dropout()
        self.site = 0
        odd = set(state) ^ set(parameter_shapes(config))
        if odd:
            raise KeyError(f"names missing from the state or unexpected in it: {sorted(odd)}")

    # The model, from the whole to its parts.

    def logits(self, source: Tensor | None, target_input: Tensor) -> Tensor:
        memory = source_real = None
        if self.config["architecture"] == "encoder-decoder":
            source_real = source != PAD
            memory = self.stack("encoder", self.embed("source", source), source_real)
        target_real = target_input != PAD
        x = self.stack("decoder", self.embed("target", target_input), target_real, memory, source_real)
        return self.project(x)

    def embed(self, side: str, tokens: Tensor) -> Tensor:
        """dropout(√d·E[token] + position), position counted over real tokens."""
        table, real, d = self.table(side), tokens != PAD, self.config["d_model"]
        position = real.cumsum(-1) - 1
        first = 0 if self.config["positions"] == "twt" else PAD + 1
        encoding = sinusoids(position + first, d, self.config["positions"]) * real.unsqueeze(-1)
        x = math.sqrt(d) * table[tokens] + encoding.to(table.dtype)
        mask = self.keep(self.dropout.embedding, real, d)
        return x if mask is None else x * mask * dropout_scale(self.dropout.embedding)

    def stack(
        self, name: str, x: Tensor, real: Tensor, memory: Tensor | None = None, memory_real: Tensor | None = None
    ) -> Tensor:
        """All layers of one stack and, under prenorm, its end norm (TwT eq 2, 3)."""
        allowed = real[:, None, None, :]  # (B, 1, 1, T): no query attends to padding
        if name == "decoder":
            allowed = allowed & causal_mask(real.shape[1])
        for i in range(self.config[f"{name}_layers"]):
            x = self.layer(name, f"{name}.layers.{i}", x, real, allowed, memory, memory_real)
        return x if self.config["residual"] == "postnorm" else self.norm(name, f"{name}.norm", x)

    def layer(
        self,
        stack: str,
        name: str,
        x: Tensor,
        real: Tensor,
        allowed: Tensor,
        memory: Tensor | None,
        memory_real: Tensor | None,
    ) -> Tensor:
        """Self-attention, cross-attention where there is a memory, feed-forward; the memory is never normed here."""
        norms = iter((f"{name}.norm1", f"{name}.norm2", f"{name}.norm3"))

        def self_attention(y: Tensor) -> Tensor:
            return self.multihead(f"{name}.self_attn", y, y, allowed, real, real)

        def cross_attention(y: Tensor) -> Tensor:
            seen = memory_real[:, None, None, :]
            return self.multihead(f"{name}.multihead_attn", y, memory, seen, real, memory_real)

        x = self.residual(stack, next(norms), x, self_attention, real)
        if memory is not None:
            x = self.residual(stack, next(norms), x, cross_attention, real)
        return self.residual(stack, next(norms), x, lambda y: self.feed_forward(name, y, real), real)

    def residual(self, stack: str, norm: str, x: Tensor, sublayer: Callable[[Tensor], Tensor], real: Tensor) -> Tensor:
        """postnorm: x⁺ = N(x + dropout(F(x))); prenorm: x⁺ = x + dropout(F(N(x)))."""
        is_postnorm = self.config["residual"] == "postnorm"
        f = sublayer(x if is_postnorm else self.norm(stack, norm, x))
        p = self.dropout.residual
        x_plus, _ = residual_step(x, f, self.keep(p, real, x.shape[-1]), dropout_scale(p))
        return self.norm(stack, norm, x_plus) if is_postnorm else x_plus

    def multihead(
        self, name: str, query: Tensor, memory: Tensor, allowed: Tensor, query_real: Tensor, key_real: Tensor
    ) -> Tensor:
        """W_o·Concat(head_h) + b_o, head_h = Attention(W_q,h·query, W_k,h·memory, W_v,h·memory)."""
        heads, d = self.config["heads"], self.config["d_model"]
        w_q, w_k, w_v = self.state[f"{name}.in_proj_weight"].split(d)
        b_q, b_k, b_v = self.state[f"{name}.in_proj_bias"].split(d)

        def split(x: Tensor) -> Tensor:
            return x.unflatten(-1, (heads, d // heads)).transpose(1, 2)  # (B, heads, T, d_head)

        p = self.dropout.attention
        keep = self.attention_keep(p, query_real, key_real)
        q, k, v = split(query @ w_q.T + b_q), split(memory @ w_k.T + b_k), split(memory @ w_v.T + b_v)
        heads_out = attention(q, k, v, allowed, keep, dropout_scale(p))
        return self.linear(f"{name}.out_proj", heads_out.transpose(1, 2).flatten(-2))

    def feed_forward(self, layer: str, x: Tensor, real: Tensor) -> Tensor:
        """W₂·dropout(relu(W₁x + b₁)) + b₂."""
        p = self.dropout.activation
        mask = self.keep(p, real, self.config["d_ff"])
        return self.linear(f"{layer}.linear2", relu_dropout(self.linear(f"{layer}.linear1", x), mask, dropout_scale(p)))

    def project(self, x: Tensor) -> Tensor:
        """logits = x·Wᵀ (+ b), W the target embedding as it is used at the input (unscaled) where they are tied."""
        tied = self.config["tie_embeddings"] != "none"
        weight = self.table("target") if tied else self.state["output_projection.weight"]
        logits = x @ weight.T
        return logits + self.state["output_projection.bias"] if self.config["output_bias"] else logits

    def table(self, side: str) -> Tensor:
        """The word embedding of `source` or `target`, its rows of length 1 under FixNorm."""
        name = "embedding" if self.config["tie_embeddings"] == "all" else f"{side}_embedding"
        weight = self.state[f"{name}.weight"]
        return fixnorm(weight) if self.config["fixnorm"] else weight

    def norm(self, stack: str, name: str, x: Tensor) -> Tensor:
        eps = DEFAULT_EPS if self.config["norm_eps"] is None else self.config["norm_eps"]
        kind = self.config[f"{stack}_norm"]
        return apply_norm(kind, x, self.state.get(f"{name}.weight"), self.state.get(f"{name}.bias"), eps)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.state[f"{name}.weight"].T + self.state[f"{name}.bias"]

    # Dropout masks, addressed over packed rows: the real tokens of the batch, sentence after sentence.

    def keep(self, p: float, real: Tensor, width: int) -> Tensor | None:
        """(B, T, width): row = index of the real token, column = feature. p = 0 uses up a site number too."""
        packed = self.packed_keep(p, int(real.sum()), width)
        return None if packed is None else unpack(packed, real, fill=True)

    def attention_keep(self, p: float, query_real: Tensor, key_real: Tensor) -> Tensor | None:
        """(B, heads, T, S): row = packed query row·heads + head, column = index of the key in its sentence."""
        heads, rows, longest = self.config["heads"], int(query_real.sum()), int(key_real.sum(-1).max())
        packed = self.packed_keep(p, rows * heads, longest)
        if packed is None:
            return None
        padded = unpack(packed.view(rows, heads, longest), query_real, fill=True)  # (B, T, heads, longest)
        column = (key_real.cumsum(-1) - 1).clamp(min=0)[:, None, None, :]  # (B, 1, 1, S)
        return padded.gather(-1, column.expand(-1, *padded.shape[1:3], -1)).transpose(1, 2)

    def packed_keep(self, p: float, rows: int, cols: int) -> Tensor | None:
        where, site = self.dropout, self.site
        self.site += 1
        if p == 0:
            return None
        return dropout_keep(where.seed, where.update, where.micro_batch, site, rows, cols, p)


def random_state(config: Config, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A state for comparisons, with nothing constant: weights of std 1/√fan_in, g and γ near their start."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in parameter_shapes(config).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.split(".")[-2].startswith("norm") and name.endswith("weight"):
            start = 1.0 if shape != (1,) else math.sqrt(complete(config)["d_model"])
            value = start * (1 + 0.1 * noise)
        elif len(shape) == 1:
            value = 0.1 * noise
        else:
            value = noise * shape[-1] ** -0.5
        state[name] = value.to(dtype)
    return state


def pad(sentences: Sequence[Sequence[int]]) -> Tensor:
    """(B, longest) long tensor, padded on the right."""
    longest = max((len(sentence) for sentence in sentences), default=0)
    rows = [list(sentence) + [PAD] * (longest - len(sentence)) for sentence in sentences]
    return torch.tensor(rows, dtype=torch.long).view(len(rows), longest)


def pack(padded: Tensor, real: Tensor) -> Tensor:
    """(B, T, …) → (real tokens, …), sentence after sentence."""
    return padded[real]


def unpack(packed: Tensor, real: Tensor, fill: float | bool = 0) -> Tensor:
    """(real tokens, …) → (B, T, …), `fill` at padding."""
    padded = packed.new_full((*real.shape, *packed.shape[1:]), fill)
    padded[real] = packed
    return padded


def cumulative_lengths(real: Tensor) -> Tensor:
    """(B + 1,): where each sentence's packed rows start, and their total."""
    return torch.nn.functional.pad(real.sum(-1).cumsum(0), (1, 0))


def word_dropout(tokens: Tensor, keep: Tensor) -> Tensor:
    """UNK in place of every non-pad token, BOS and EOS too, where `keep` is False (SPEC §4)."""
    return torch.where((tokens != PAD) & ~keep, UNK, tokens)


def log_probabilities(
    state: State, config: Config, source: Tensor | None, target_input: Tensor, vocabulary_mask: Tensor | None = None
) -> Tensor:
    """log p (B, T, V) in evaluation, −∞ outside the target vocabulary."""
    return masked_log_softmax(forward(state, config, source, target_input), vocabulary_mask)
