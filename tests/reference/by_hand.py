"""A small batch for tests, and the parts of a layer written out by hand, to compare the oracle with."""

import torch
from torch.nn import functional

import reference as ref

SOURCE = ref.pad([[5, 6, 7, 8, 2], [9, 4, 2], [11, 2]])
INPUT = ref.pad([[0, 9, 8], [0, 5, 6, 7, 4], [0, 10, 4]])
TARGET = ref.pad([[9, 8, 2], [5, 6, 7, 4, 2], [10, 4, 2]])
RATES = ref.Dropout(0.1, 0.2, 0.3, 0.4, seed=7, update=3)


class Hand:
    """One layer: its parameters and its parts, computed with torch.nn.functional. It has layernorm, and neither padding
    nor dropout."""

    def __init__(self, state, config, stack, layer):
        self.state, self.config, self.stack, self.prefix = state, ref.complete(config), stack, f"{stack}.layers.{layer}"

    def p(self, name):
        return self.state.get(f"{self.prefix}.{name}")

    def norm(self, name, x):
        return functional.layer_norm(x, x.shape[-1:], self.p(f"{name}.weight"), self.p(f"{name}.bias"))

    def values(self, x):
        """Returns the values of the self-attention, before they are split into heads."""
        weight, bias = (self.p(f"self_attn.in_proj_{part}")[-x.shape[-1] :] for part in ("weight", "bias"))
        return functional.linear(x, weight, bias)

    def heads(self, kind, query, memory, values=None, v=None):
        d, heads = query.shape[-1], self.config["heads"]
        weights = self.p(f"{kind}.in_proj_weight").split(d)
        biases = [None] * 3 if (bias := self.p(f"{kind}.in_proj_bias")) is None else bias.split(d)
        q, k, projected = map(functional.linear, (query, memory, memory if values is None else values), weights, biases)
        v = projected if v is None else v
        is_whole = self.config["residual"] == "olmo2"
        if is_whole:
            q, k = self.norm(f"{kind}.q_norm", q), self.norm(f"{kind}.k_norm", k)
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        if self.p(f"{kind}.q_norm.weight") is not None and not is_whole:
            q, k, v = (self.norm(f"{kind}.{name}_norm", t) for name, t in (("q", q), ("k", k), ("v", v)))
        is_causal = self.stack == "decoder" and kind == "self_attn"
        return functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(-2)

    def linear(self, name, x):
        return functional.linear(x, self.p(f"{name}.weight"), self.p(f"{name}.bias"))

    def f(self, kind, x, memory, values=None):
        """Returns F(x) without any change by a residual scheme. With `values`, self-attention has its queries from x,
        its keys from `memory` and its values from `values`."""
        if kind == "feed_forward":
            return self.linear("linear2", self.linear("linear1", x).relu())
        memory = x if kind == "self_attn" and values is None else memory
        return self.linear(f"{kind}.out_proj", self.heads(kind, x, memory, values))


def embedded(state, tokens):
    d = state["embedding.weight"].shape[1]
    return d**0.5 * state["embedding.weight"][tokens] + ref.sinusoids(torch.arange(tokens.shape[1]), d, "twt")
