"""The Transformer of docs/spec.md §4 with any norm and residual scheme. Token tensors are padded, (batch, time)."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .batch_norms import BATCH_NORMS, BLENDED_NORMS
from .config import Config, complete, kv_width
from .constants import branchnorm_alpha
from .mixing import begin, read, write
from .norms import (
    DEFAULT_EPS,
    FAMILIES,
    L2_EPS,
    apply_norm,
    fixnorm,
    group_scaling,
    residual_step,
    rms_conventions,
)
from .operators import ACTIVATIONS, PAD, UNK, attention, causal_mask, masked_log_softmax, relu_dropout
from .parameters import State, buffer_shapes, parameter_shapes
from .parametrisation import UnitScaled, forward_factors, unit_factors
from .philox import dropout_keep, dropout_scale
from .positions import positions_of, rotated, sinusoids
from .residual import (
    Blend,
    Change,
    Combine,
    Damp,
    Gain,
    Gate,
    Growth,
    HeadScale,
    Norm,
    Parameter,
    Place,
    Remember,
    Scale,
    Share,
    Shift,
    Times,
    Unit,
    UnitHeads,
    describe_stack,
    describe_sublayer,
    places,
)

RELEASED_END_WARMUP = 1000  # the warm-up of the norm after a stack in PowerNorm's release mode


@dataclasses.dataclass(frozen=True)
class Dropout:
    """The rates of dropout, and the numbers from which masks are drawn: Philox(seed, update, micro_batch, site,
    element)."""

    embedding: float = 0.0
    attention: float = 0.0
    activation: float = 0.0
    residual: float = 0.0
    seed: int = 0
    update: int = 0
    micro_batch: int = 0


def forward(
    state: State, config: Config, source: Tensor | None, target_input: Tensor, dropout: Dropout | None = None
) -> Tensor:
    """Returns the logits (B, T, V) for source (B, S) (None for a decoder without encoder) and target_input (B, T).

    Logits at padding have no meaning. Without `dropout` this is evaluation. With it, even if its rates are 0, this is
    training: norms with batch statistics use those of the batch and update their buffers in `state` in place.
    """
    return Run(state, config, dropout).logits(source, target_input)


class Run:
    """One forward pass. It holds the state, the config and the number of the next dropout site."""

    def __init__(self, state: State, config: Config, dropout: Dropout | None) -> None:
        self.state, self.config, self.dropout = state, complete(config), dropout or Dropout()
        self.is_training = dropout is not None
        self.site = 0
        self.memory: dict[str, Tensor] = {}
        self.largest: dict[str, Tensor] = {}
        """The largest logit of each head, (heads), by the name of its attention."""
        odd = set(state) ^ {*parameter_shapes(config), *buffer_shapes(config)}
        if odd:
            raise KeyError(f"names missing from the state or unexpected in it: {sorted(odd)}")

    # The model, from the whole to its parts.

    def logits(self, source: Tensor | None, target_input: Tensor) -> Tensor:
        memory = source_real = None
        if self.config["architecture"] == "encoder-decoder":
            source_real = source != PAD
            memory = self.stack("encoder", self.embed("source", source), source_real)
        target_real, self.tokens = target_input != PAD, target_input
        x = self.stack("decoder", self.embed("target", target_input), target_real, memory, source_real)
        return self.project(x)

    def embed(self, side: str, tokens: Tensor) -> Tensor:
        """Returns dropout(α_in(√d·E[token] + position)). Positions are counted over real tokens; the d of √d is the
        width of the parametrisation's base model."""
        table, real, d = self.table(side), tokens != PAD, self.config["d_model"]
        encoding = self.encoding(side, positions_of(real)) * real.unsqueeze(-1)
        times = forward_factors(self.config, "decoder")
        x = times.input * (times.embedding * table[tokens] + encoding.to(table.dtype))
        mask = self.keep(self.dropout.embedding, real, d)
        return x if mask is None else x * mask * dropout_scale(self.dropout.embedding)

    def encoding(self, side: str, positions: Tensor) -> Tensor:
        """Returns the vectors (…, d) that are added to the embeddings of words at these positions (…)."""
        kind, d = self.config["positions"], self.config["d_model"]
        if kind == "learned":
            return self.state[f"{side}_position_embedding.weight"][positions]
        if kind in ("rotary", "none"):
            return torch.zeros(*positions.shape, d)
        return sinusoids(positions + (0 if kind == "twt" else PAD + 1), d, kind)

    def stack(
        self, name: str, x: Tensor, real: Tensor, memory: Tensor | None = None, memory_real: Tensor | None = None
    ) -> Tensor:
        """Returns the output of one stack: all layers, and what the scheme does before, between and after them. The
        decoder reads `memory`, the encoder's output, as it is, without another norm."""
        about = describe_stack(self.config, name)
        allowed = real[:, None, None, :]  # (B, 1, 1, T): no query attends to padding
        if name == "decoder":
            allowed = allowed & causal_mask(real.shape[1])

        def function(place: Place, y: Tensor) -> Tensor:
            if place.kind == "feed_forward":
                return self.feed_forward(place, y, real)
            if place.kind == "self_attn" and self.config["attention"] == "tensorized":
                return self.tensorized(place, y, real)
            if place.kind == "self_attn":
                return self.multihead(place, y, y, allowed, real, real)
            return self.multihead(place, y, memory, memory_real[:, None, None, :], real, memory_real)

        smears = self.config["smear"]
        for change in about.begin:
            if smears and isinstance(change, Remember):
                x, smears = self.smeared(x, real), False
            x = self.changed(change, name, x, real)
        x = self.smeared(x, real) if smears else x
        outputs, streams = [x], begin(about, x)
        for place in places(self.config, name):
            if place.index == 1:
                x = self.combined(about.combine, name, outputs, real)
                bottom = x
            x, streams = self.sublayer(place, x, streams, function, real, bottom)
            if place.kind == "feed_forward":
                outputs.append(self.remembered(about.combine, name, place.layer, x, real))
        x = self.combined(about.combine, name, outputs, real)
        x, _ = read(about.mixing, self.state, [x, *streams])
        for norm, s in zip(about.streams, streams, strict=False):
            x = x + self.changed(norm, name, s, real)
        for change in about.end:
            x = self.changed(change, name, x, real)
        return x

    def remembered(self, combine: Combine | None, stack: str, layer: int, y: Tensor, real: Tensor) -> Tensor:
        """Returns a layer's output as later layers read it: N_k(y_k) under pre-norm DLCL, otherwise y_k."""
        return self.changed(combine.norms[layer] if combine and combine.is_pre else None, stack, y, real)

    def combined(self, combine: Combine | None, stack: str, outputs: Sequence[Tensor], real: Tensor) -> Tensor:
        """Returns the next layer's input: the last output, or under DLCL and DenseFormer the next row's sum
        Σ_k W_{lk} y_k, which post-norm DLCL also normalises."""
        if combine is None or (combine.is_dense and len(outputs) == 1):
            return outputs[-1]
        row = len(outputs) - 1
        weights = self.state[combine.weight.name][row]
        total = sum(weight * y for weight, y in zip(weights, outputs, strict=False))
        is_bare = combine.is_pre or combine.is_dense or row == 0
        return self.changed(None if is_bare else combine.norms[row - 1], stack, total, real)

    def sublayer(
        self,
        place: Place,
        x: Tensor,
        streams: Sequence[Tensor],
        function: Callable[[Place, Tensor], Tensor],
        real: Tensor,
        bottom: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns x⁺ = N_after(α⊙x + β⊙dropout(f)), with f = N_output(F(N_before(x))), and α⊙s + β⊙dropout(f) for each
        stream s. If the scheme says so, `bottom`, the layer's input, is added before N_after."""
        about = describe_sublayer(place)
        for change in about.first:
            x = self.changed(change, place.stack, x, real)
        x = self.changed(about.skip, place.stack, x, real)
        y, weights = read(about.mixing, self.state, [x, *streams])
        y = self.changed(about.before, place.stack, y, real)
        y = self.changed(about.inside.get("input"), place.stack, y, real)
        f = self.changed(about.output, place.stack, function(place, y), real)
        unit = self.unit(place)
        f = f * forward_factors(self.config, place.stack).branch * unit.branch
        keep = self.keep(self.dropout.residual, real, x.shape[-1])
        if about.mixing is not None:
            f = f if keep is None else f * keep * dropout_scale(self.dropout.residual)
            x, *streams = write(about.mixing, [x, *streams], weights, f)
            return x, streams
        others = [self.step(s, f, keep, *gains) for s, gains in zip(streams, about.streams, strict=True)]
        x_plus = self.step_of_x(place, unit.skip * self.changed(about.on_x, place.stack, x, real), f, keep, real)
        x_plus = self.changed(about.on_sum, place.stack, x_plus, real)
        x_plus = x_plus + bottom if about.adds_bottom else x_plus
        return self.changed(about.after, place.stack, x_plus, real), others

    def unit(self, place: Place) -> UnitScaled:
        return unit_factors(self.config, 2 * place.layer + place.index - 1)

    def step_of_x(self, place: Place, x: Tensor, f: Tensor, keep: Tensor | None, real: Tensor) -> Tensor:
        about = describe_sublayer(place)
        return self.step(x, f, keep, about.alpha, about.beta)

    def step(self, x: Tensor, f: Tensor, keep: Tensor | None, alpha: Gain, beta: Gain) -> Tensor:
        """Returns α⊙x + β⊙dropout(f)."""
        scale = dropout_scale(self.dropout.residual)
        return residual_step(x, f, keep, scale, self.gain(alpha), self.gain(beta))[0]

    def multihead(
        self, place: Place, query: Tensor, memory: Tensor, allowed: Tensor, query_real: Tensor, key_real: Tensor
    ) -> Tensor:
        """Returns W_o·Concat(head_h) + b_o, with head_h = Attention(W_q,h·query, W_k,h·memory, W_v,h·memory)."""
        heads, d, name = self.config["heads"], self.config["d_model"], f"{place.prefix}.{place.kind}"
        inside = describe_sublayer(place).inside
        widths = [d, kv_width(self.config), kv_width(self.config)]
        w_q, w_k, w_v = self.state[f"{name}.in_proj_weight"].split(widths)
        bias = self.state.get(f"{name}.in_proj_bias")
        b_q, b_k, b_v = [0] * 3 if bias is None else bias.split(widths)

        def split(x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, d // heads)).transpose(1, 2)  # (B, heads or kv_heads, T, d_head)

        def join(x: Tensor) -> Tensor:
            return x.transpose(1, 2).flatten(-2)

        p = self.dropout.attention
        keep = self.attention_keep(p, query_real, key_real)

        def projected(point: str, x: Tensor, real: Tensor) -> Tensor:
            change = inside.get(point)
            is_whole = isinstance(change, UnitHeads) or (isinstance(change, Norm) and change.width == x.shape[-1])
            x = self.changed(change, place.stack, x if is_whole else split(x), real)
            return x if is_whole else join(x)

        inputs = list(query) if query.dim() == 4 else [query, memory, memory]
        points = zip(("query_input", "key_input", "value_input"), inputs, strict=True)
        of_q, of_k, of_v = (self.changed(inside.get(point), place.stack, y, key_real) for point, y in points)
        times = self.of_products(d)
        q = projected("query", (of_q @ w_q.T + b_q) * times, query_real)
        k = projected("key", (of_k @ w_k.T + b_k) * times, key_real)
        v = split(projected("value", self.with_tokens(name, (of_v @ w_v.T + b_v) * times, of_q), key_real))
        if self.config["positions"] == "rotary" and place.kind == "self_attn":
            q, k = (join(rotated(split(x), positions_of(query_real), self.config["rope_theta"])) for x in (q, k))
        q, k = split(projected("rotated_query", q, query_real)), split(projected("rotated_key", k, key_real))
        shared = heads // self.config["kv_heads"]  # head h of the queries has head ⌊h/shared⌋ of keys and values
        k, v = (x[:, [head // shared for head in range(heads)]] for x in (k, v))
        scale = 1.0 if self.config["qk_l2norm"] is not None else forward_factors(self.config, place.stack).scores
        q = q * (scale * math.sqrt(d // heads))  # because `attention` itself multiplies scores by 1/√d_head
        seen = (allowed & query_real[:, None, :, None]).expand(-1, heads, -1, -1)
        scores = (q @ k.transpose(-2, -1)).detach() / math.sqrt(d // heads)
        self.largest[name] = scores.masked_fill(~seen, -math.inf).amax((0, 2, 3))
        how = {"softcap": self.config["score_softcap"], "sinks": self.state.get(f"{name}.sinks")}
        joined = attention(q, k, v, allowed, keep, dropout_scale(p), **how).transpose(1, 2)  # (B, T, heads, d_head)
        joined = joined * self.unit(place).heads
        if self.config["output_gate"] is not None:
            gates = 1 / (1 + torch.exp(-self.linear(f"{name}.gate_proj", query)))
            joined = joined * gates.unflatten(-1, (heads, -1))
        joined = joined.flatten(-2)
        joined = self.changed(inside.get("heads"), place.stack, joined, query_real)
        projected = self.linear(f"{name}.out_proj", joined)
        return self.changed(inside.get("projected"), place.stack, projected, query_real)

    def with_tokens(self, name: str, v: Tensor, x: Tensor) -> Tensor:
        """Returns the values v (B, T, kv_width). If the layer has a value embedding, the token's row of it is added,
        multiplied in each head by the gate 3σ(W x_{:12})."""
        table = self.state.get(f"{name}.value_embedding.weight")
        if table is None:
            return v
        gate = self.state[f"{name}.value_gate.weight"]
        factors = 3 / (1 + torch.exp(-(x[..., : gate.shape[1]] @ gate.T)))
        return v + table[self.tokens] * factors.repeat_interleave(v.shape[-1] // len(gate), -1)

    def smeared(self, x: Tensor, real: Tensor) -> Tensor:
        """Returns x_t + λσ(w·x_t)x_{t−1}; the first real token of a row is not changed."""
        gate, scale = self.state["decoder.smear_gate.weight"][0], self.state["decoder.smear_scale"]
        positions = positions_of(real)
        rows = []
        for sentence, mask, at in zip(x, real, positions, strict=True):
            found, before = [], None
            for row, is_real, position in zip(sentence, mask, at, strict=True):
                share = scale / (1 + torch.exp(-(row[: len(gate)] @ gate)))
                found.append(row + share * before if is_real and position > 0 else row)
                before = row if is_real else before
            rows.append(torch.stack(found))
        return torch.stack(rows)

    def tensorized(self, place: Place, x: Tensor, real: Tensor) -> Tensor:
        """Returns W_o·vec_{jk}[Σ_r c_r((q_i + u)_r k_jr + (q_i + w)_r p_jr) v_kr] for each position i. An entry is 0 if
        j or k is after i or is padding."""
        segment, name = self.config["tensorized_segment"], f"{place.prefix}.self_attn"
        c, u, w = (self.state[f"{name}.{part}"] for part in ("core", "content_bias", "position_bias"))
        q, k, v = (x @ self.state[f"{name}.in_proj_weight"].T).chunk(3, dim=-1)
        left = sinusoids(segment - 1 - torch.arange(segment), self.config["d_model"], "twt").to(x.dtype)
        p = self.linear(f"{name}.position_proj", left)
        rows = []
        for i in range(x.shape[1]):
            entries = x.new_zeros(len(x), segment, segment)
            for j in range(i + 1):
                first = c * ((q[:, i] + u) * k[:, j] + (q[:, i] + w) * p[j])
                both = real[:, j, None] & real[:, : i + 1]
                entries[:, j, : i + 1] = torch.einsum("br,bkr->bk", first, v[:, : i + 1]) * both
            rows.append(self.linear(f"{name}.out_proj", entries.flatten(1)))
        return self.changed(describe_sublayer(place).inside.get("projected"), place.stack, torch.stack(rows, 1), real)

    def feed_forward(self, place: Place, x: Tensor, real: Tensor) -> Tensor:
        """Returns W₂·dropout(σ(W₁x + b₁)) + b₂. If the activation is gated, σ(W₁x + b₁) is multiplied by W₃x + b₃
        (Shazeer 2020, eqs 5 and 6)."""
        p, inside = self.dropout.activation, describe_sublayer(place).inside
        mask = self.keep(p, real, self.config["d_ff"])
        hidden = self.linear(f"{place.prefix}.linear1", x)
        hidden = self.changed(inside.get("hidden"), place.stack, hidden, real)
        if self.config["activation"] == "relu":
            activated = relu_dropout(hidden, mask, dropout_scale(p))
        else:
            unit = self.unit(place)
            activated = ACTIVATIONS[self.config["activation"]](unit.activation * hidden) / unit.activation * unit.gated
            if f"{place.prefix}.linear3.weight" in self.state:
                activated = activated * self.linear(f"{place.prefix}.linear3", x)
            activated = activated if mask is None else activated * mask * dropout_scale(p)
        activated = self.changed(inside.get("activated"), place.stack, activated, real)
        return self.linear(f"{place.prefix}.linear2", activated)

    def project(self, x: Tensor) -> Tensor:
        """Returns the logits z = x·Wᵀ (+ b), or c·tanh(z/c) with a softcap c. If embeddings are tied, W is the target
        embedding as the input uses it, but not scaled by √d."""
        tied = self.config["tie_embeddings"] != "none"
        weight = self.table("target") if tied else self.state["output_projection.weight"]
        if self.config["logit_scale"]:
            weight = weight * (self.state["output_projection.scale"] * self.config["d_model"] ** 0.5).unsqueeze(-1)
        logits = (x * forward_factors(self.config, "decoder").logits) @ weight.T
        logits = logits + self.state["output_projection.bias"] if self.config["output_bias"] else logits
        c = self.config["logit_softcap"]
        return logits if c is None else c * torch.tanh(logits / c)

    def table(self, side: str) -> Tensor:
        """Returns the word embedding of `source` or `target`; under FixNorm its rows have length 1."""
        name = "embedding" if self.config["tie_embeddings"] == "all" else f"{side}_embedding"
        weight = self.state[f"{name}.weight"]
        return fixnorm(weight) if self.config["fixnorm"] else weight

    def changed(self, change: Change | None, stack: str, x: Tensor, real: Tensor) -> Tensor:
        """Returns x after the change that the scheme makes at this point; x itself for None."""
        match change:
            case None:
                return x
            case Norm():
                return self.norm(stack, change, x, real) * change.times
            case Shift(by):
                return x - self.state[by.name]
            case Scale(by, times):
                return x * self.state[by.name] * times
            case Times(factor):
                return x * factor
            case Unit(by):
                unit = x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12)
                return unit if by is None else unit * self.state[by.name]
            case UnitHeads(by, times):
                heads = x.unflatten(-1, (-1, self.config["d_model"] // self.config["heads"]))
                unit = heads / heads.norm(dim=-1, keepdim=True).clamp(min=1e-12)
                return unit.flatten(-2) * self.state[by.name] * times
            case Damp(by):
                return x - torch.nn.functional.silu(self.state[by.name]) * x.detach()
            case Remember():
                self.memory[change.name] = x
                return x
            case Blend(own, first):
                return self.gain(own) * x + self.gain(first) * self.memory[change.name]
            case HeadScale(by):
                scale = self.state[by.name]
                return (x.unflatten(-1, (len(scale), -1)) * scale.unsqueeze(-1)).flatten(-2)

    def gain(self, gain: Gain) -> float | Tensor:
        match gain:
            case Parameter():
                return self.state[gain.name]
            case Growth(t, steps, curve):
                return branchnorm_alpha(int(self.state[t.name]), steps, curve)
            case Gate(w, temperature, rest):
                share = torch.sigmoid(self.state[w.name] / temperature)
                return (1 - share * share).clamp(min=1e-3).sqrt() if rest else share
            case Share(w, temperature, rest):
                share = (self.state[w.name] / temperature).abs()
                return 1 - share if rest else share
        return gain

    def norm(self, stack: str, norm: Norm, x: Tensor, real: Tensor) -> Tensor:
        """Returns N(x), with the stack's norm. A norm with batch statistics gets the real positions only; its result is
        0 at padding."""
        c, kind = self.config, self.config[f"{stack}_norm"]
        own = L2_EPS if kind == "l2norm" else FAMILIES.get(kind, {}).get("eps", DEFAULT_EPS)
        eps = own if c["norm_eps"] is None else c["norm_eps"]
        weight, bias = self.state.get(f"{norm.name}.weight"), self.state.get(f"{norm.name}.bias")
        prefix = f"{norm.name}."
        kept = {name.removeprefix(prefix): value for name, value in self.state.items() if name.startswith(prefix)}
        if kind not in (*BATCH_NORMS, *BLENDED_NORMS):
            conventions = rms_conventions(kind, c) if kind.startswith("rmsnorm") else {}
            conventions.pop("weight", None)
            if not norm.is_weighted:
                conventions["zero_centred"] = False
            return apply_norm(kind, x, weight, bias, eps, c["lpnorm_p"], kept, conventions)
        options, groups = {"alpha": c["powernorm_alpha_fwd"]}, c["groupscaling"]
        if kind in BLENDED_NORMS:
            options, groups = {"alpha": c["batchnorm_alpha"]}, 0
        if kind == "prepbn":
            options |= {"steps": c["prepbn_steps"], "warm": c["prepbn_warm"], "row": c["prepbn_row"]}
        if kind == "batchnorm":
            options = {"alpha": c["batchnorm_alpha"]}
        if kind == "powernorm":
            is_release = c["powernorm_mode"] == "release"
            options = {
                "mode": c["powernorm_mode"],
                "warmup": RELEASED_END_WARMUP if is_release and norm.ends_stack else c["powernorm_warmup"],
                "alpha_fwd": c["powernorm_alpha_fwd"],
                "alpha_bwd": c["powernorm_alpha_bwd"],
            }
            groups = c["heads"] if is_release else groups
        rows = pack(x, real)
        rows = group_scaling(rows, groups) if groups else rows
        layer = {**BATCH_NORMS, **BLENDED_NORMS}[kind](weight, bias, kept, eps=eps, **options)
        return unpack(layer(rows, training=self.is_training), real)

    def linear(self, name: str, x: Tensor) -> Tensor:
        weight = self.state[f"{name}.weight"]
        return (x @ weight.T + self.state.get(f"{name}.bias", 0)) * self.of_products(weight.shape[1])

    def of_products(self, fan_in: int) -> float:
        """Returns the factor of a product with a matrix of a layer."""
        return fan_in**-0.5 if unit_factors(self.config, 0).has_products else 1.0

    # Dropout masks, addressed over packed rows: the real tokens of the batch, sentence after sentence.

    def keep(self, p: float, real: Tensor, width: int) -> Tensor | None:
        """Returns the mask (B, T, width) of kept elements, or None for p = 0, which uses a site number, too. In the
        packed mask, row is the index of the real token and column the feature."""
        packed = self.packed_keep(p, int(real.sum()), width)
        return None if packed is None else unpack(packed, real, fill=True)

    def attention_keep(self, p: float, query_real: Tensor, key_real: Tensor) -> Tensor | None:
        """Returns the mask (B, heads, T, S) of kept attention weights, or None for p = 0. In the packed mask, row is
        (packed row of the query)·heads + head, and column is the index of the key in its sentence."""
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


def pad(sentences: Sequence[Sequence[int]]) -> Tensor:
    """Returns the sentences as a tensor (B, longest) of integers, padded on the right."""
    longest = max((len(sentence) for sentence in sentences), default=0)
    rows = [list(sentence) + [PAD] * (longest - len(sentence)) for sentence in sentences]
    return torch.tensor(rows, dtype=torch.long).view(len(rows), longest)


def pack(padded: Tensor, real: Tensor) -> Tensor:
    """Returns the rows (real tokens, …) of a padded tensor (B, T, …), sentence after sentence."""
    return padded[real]


def unpack(packed: Tensor, real: Tensor, fill: float | bool = 0) -> Tensor:
    """Returns the padded tensor (B, T, …) of rows (real tokens, …), with `fill` at padding."""
    padded = packed.new_full((*real.shape, *packed.shape[1:]), fill)
    padded[real] = packed
    return padded


def cumulative_lengths(real: Tensor) -> Tensor:
    """Returns the index of each sentence's first packed row, and the number of all rows, (B + 1,)."""
    return torch.nn.functional.pad(real.sum(-1).cumsum(0), (1, 0))


def word_dropout(tokens: Tensor, keep: Tensor) -> Tensor:
    """Returns the tokens with UNK where `keep` is False. BOS and EOS may be replaced, too, but not padding
    (docs/spec.md §4.8)."""
    return torch.where((tokens != PAD) & ~keep, UNK, tokens)


def log_probabilities(
    state: State, config: Config, source: Tensor | None, target_input: Tensor, vocabulary_mask: Tensor | None = None
) -> Tensor:
    """Returns log p (B, T, V) in evaluation; it is −∞ outside the target vocabulary."""
    return masked_log_softmax(forward(state, config, source, target_input), vocabulary_mask)
