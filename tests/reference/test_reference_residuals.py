"""Tests the oracle's residual schemes and inits against hand-written equations, identities and published numbers."""

import itertools
import math

import pytest
import torch
from torch.nn import functional

import reference as ref
from reference.by_hand import INPUT, RATES, SOURCE, Hand, embedded

VARIANTS = [
    *({"residual": name} for name in ref.RESIDUAL_NAMES),
    {"residual": "branchnorm", "branchnorm_growth": "sigmoid"},
    {"residual": "r-fixup", "r_fixup_mode": "paper"},
    {"residual": "dlcl", "dlcl_norm": "post"},
    {"residual": "normformer", "normformer_mode": "fairseq", "normformer_residual_scale": True},
    {"residual": "normformer", "normformer_head_scale": False, "normformer_attention_norm": False},
    {"residual": "peri-ln", "peri_ln_embedding_norm": False},
    {"residual": "ln-scaling", "ln_scaling_mode": "weight"},
    {"residual": "mix-ln", "mix_ln_part": 0.5},
    {"residual": "attnres", "attnres_block": 3},
    {"residual": "mhc", "mhc_streams": 2, "mhc_iterations": 3},
    {"residual": "attnres", "attnres_form": "normed", "attnres_queries": 3},
    {"residual": "mhc", "mhc_mixing": "none", "mhc_magnitude": 1.5},
    {"residual": "mhc", "mhc_mixing": "channel", "mhc_rank": 5},
    {"residual": "mhc", "mhc_end": "mean"},
    {"residual": "mhc", "mhc_end": "mean", "mhc_mixing": "channel", "mhc_rank": 3},
    {"residual": "hyper-connections", "hyper_connections_dynamic": False},
    *({"residual": "prores", "prores_scheme": name} for name in ("postnorm", "deepnorm", "sandwich", "ln-scaling")),
    {"residual": "prores", "prores_scheme": "ln-scaling", "ln_scaling_mode": "weight"},
    *(
        {"residual": "gpas", "gpas_scheme": name}
        for name in ("postnorm", "deepnorm", "sandwich", "ln-scaling", "mix-ln")
    ),
    {"residual": "gpas", "gpas_scheme": "mix-ln", "mix_ln_part": 0.5},
    {"residual": "value-residual", "value_residual_learned": False, "value_residual_start": 0.25},
    {"residual": "variance-gate", "variance_gate_temperature": 1.5},
    {"residual": "keel", "keel_alpha": 2.5},
    {"residual": "x0-lambdas", "x0_lambdas_backout": True},
    {"residual": "mhc-lite", "mhc_lite_streams": 3},
    {"residual": "mhc-lite", "mhc_lite_streams": 1},
]
per_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant.values())))


pytestmark = pytest.mark.usefixtures("one_thread")


def r_fixup(h, i, kind, x, memory):
    s = h.p(f"branch_scale{i}")
    if kind == "feed_forward":
        hidden = (h.linear("linear1", x - h.p("shift1")) - h.p("shift2")).relu()
        return x + s * h.linear("linear2", hidden - h.p("shift3"))
    y, scale = x - h.p(f"{kind}.input_shift"), h.p(f"{kind}.output_scale")
    joined = h.heads(kind, y, y if kind == "self_attn" else memory)
    return x + s * h.linear(f"{kind}.out_proj", joined if scale is None else scale * joined)


def normformer(h, i, kind, x, memory):
    c, y, f = h.config, h.norm(f"norm{i}", x), None
    if kind == "feed_forward":
        hidden = h.linear("linear1", y).relu()
        f = h.linear("linear2", h.norm("inner_norm", hidden) if c["normformer_ffn_norm"] else hidden)
        return (h.p(f"residual_scale{i}") if c["normformer_residual_scale"] else 1) * x + f
    if kind == "multihead_attn":
        return x + h.f(kind, y, memory)
    columns = 1
    if c["normformer_head_scale"]:
        columns = h.p("self_attn.head_scale").repeat_interleave(x.shape[-1] // c["heads"])
    joined = h.heads(kind, y, y)
    if c["normformer_mode"] == "paper":
        f = h.linear("self_attn.out_proj", columns * joined)
    else:
        f = columns * h.linear("self_attn.out_proj", joined)
    return x + (h.norm("post_norm1", f) if c["normformer_attention_norm"] else f)


def subln(h, i, kind, x, memory):
    y = h.norm(f"norm{i}", x)
    if kind == "feed_forward":
        return x + h.linear("linear2", h.norm("inner_norm", h.linear("linear1", y).relu()))
    if kind == "multihead_attn":
        return x + h.f(kind, y, memory)
    return x + h.linear("self_attn.out_proj", h.norm("self_attn.inner_norm", h.heads(kind, y, y)))


def dlcl(h, i, kind, x, memory):
    return (prenorm if h.config["dlcl_norm"] == "pre" else postnorm)(h, i, kind, x, memory)


def prenorm(h, i, kind, x, memory):
    return x + h.f(kind, h.norm(f"norm{i}", x), memory)


def hybridnorm(h, i, kind, x, memory):
    if kind != "feed_forward":
        return x + h.f(kind, x, memory)
    z = h.norm(f"norm{i - 1}", x)
    return h.f(kind, z, memory) + z


def is_first(h):
    return h.prefix.endswith(".0")


def prores(h, i, kind, x, memory):
    """The equation at the update at which the first layer has grown fully: layer l = 1, 2, … then has α = 1/l."""
    alpha, scheme = 1 / (int(h.prefix[-1]) + 1), h.config["prores_scheme"]
    if scheme in ("postnorm", "deepnorm"):
        return postnorm(h, i, kind, x, memory, ALPHA[h.stack] if scheme == "deepnorm" else 1.0, alpha)
    return x + alpha * (BY_HAND[scheme](h, i, kind, x, memory) - x)


def ln_scaling(h, i, kind, x, memory):
    factor = 1.0 if h.config["ln_scaling_mode"] == "weight" else (int(h.prefix[-1]) + 1) ** -0.5
    return x + h.f(kind, factor * h.norm(f"norm{i}", x), memory)


def mix_ln(h, *a):  # rounded down, half of 2 or 3 layers is one layer, and a quarter of them is none
    return (postnorm if is_first(h) and h.config["mix_ln_part"] == 0.5 else prenorm)(h, *a)


def postnorm(h, i, kind, x, memory, alpha=1.0, beta=1.0):
    return h.norm(f"norm{i}", alpha * x + beta * h.f(kind, x, memory))


def gpas(h, i, kind, x, memory):
    scheme, a = h.config["gpas_scheme"], h.p("forward_gate")
    kept = 1 - a * torch.sigmoid(a)
    if scheme == "mix-ln":
        scheme = "postnorm" if is_first(h) and h.config["mix_ln_part"] == 0.5 else "prenorm"
    if scheme in ("postnorm", "deepnorm"):
        return postnorm(h, i, kind, x, memory, kept * (ALPHA[h.stack] if scheme == "deepnorm" else 1))
    return kept * BY_HAND[scheme](h, i, kind, x, memory)


def value_residual(h, i, kind, x, memory):
    """The equation with the mixed values passed to `heads` directly."""
    if kind != "self_attn":
        return prenorm(h, i, kind, x, memory)
    y = h.norm(f"norm{i}", x)
    if is_first(h):
        h.shared[h.stack] = h.values(y)
        return x + h.f(kind, y, memory)
    own, first = h.p("self_attn.value_scale"), h.p("self_attn.first_value_scale")
    own, first = (0.25, 0.25) if own is None else (own, first)
    joined = h.heads(kind, y, y, v=own * h.values(y) + first * h.shared[h.stack])
    return x + h.linear("self_attn.out_proj", joined)


def x0_lambdas(h, i, kind, x, memory):
    if i == 1:
        x0 = x if is_first(h) else h.shared[h.stack]
        h.shared[h.stack] = x0
        if h.config["x0_lambdas_backout"] and h.prefix.endswith("layers.2"):  # the middle layer of 3; with 2 it is x
            h.shared[f"{h.stack} middle"] = x
        x = h.p("stream_scale") * x + h.p("embedding_scale") * x0
    return prenorm(h, i, kind, x, memory)


def depth_scaled(h, i, kind, x, memory):
    k = int(h.prefix[-1]) * (2 if h.stack == "encoder" else 3) + i + 1
    branch = BY_HAND["sandwich"](h, i, kind, x, memory) - x
    return math.sqrt((k - 1) / k) * x + branch / math.sqrt(k)


def variance_gate(h, i, kind, x, memory):
    beta = 1 / (1 + torch.exp(-h.p(f"residual_gate{i}") / h.config["variance_gate_temperature"]))
    branch = BY_HAND["sandwich"](h, i, kind, x, memory) - x
    return torch.sqrt(torch.clamp(1 - beta**2, min=1e-3)) * x + beta * branch


def keel(h, i, kind, x, memory):
    alpha = h.config["keel_alpha"] or {"encoder": 2 * 2, "decoder": 3 * 3}[h.stack]
    return h.norm(f"post_norm{i}", alpha * x + h.f(kind, h.norm(f"norm{i}", x), memory))


def ngpt(h, i, kind, x, memory):
    d, share = x.shape[-1], (h.p(f"share{i}") * 0.05 * x.shape[-1] ** 0.5).abs()
    if kind == "feed_forward":
        f = h.linear("linear2", (d**0.5 * h.p("linear1_scale") * h.linear("linear1", x)).relu())
    else:
        read = x if kind == "self_attn" else memory
        weights, biases = (h.p(f"{kind}.in_proj_{part}").chunk(3) for part in ("weight", "bias"))
        q, k, v = (
            functional.linear(y, w, b).unflatten(-1, (h.config["heads"], -1)).transpose(1, 2)
            for y, w, b in zip((x, read, read), weights, biases, strict=True)
        )
        s = (d**0.5 * h.p(f"{kind}.qk_scale")).unflatten(-1, (h.config["heads"], 1, -1))
        q, k = s * functional.normalize(q, dim=-1), s * functional.normalize(k, dim=-1)
        is_causal, scale = kind == "self_attn" and h.stack == "decoder", q.shape[-1] ** 0.5
        joined = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
        f = h.linear(f"{kind}.out_proj", joined.transpose(1, 2).flatten(-2))
    x, f = functional.normalize(x, dim=-1), functional.normalize(f, dim=-1)
    return functional.normalize(x + share * (f - x), dim=-1)


ALPHA = {"encoder": 0.81 * (2**4 * 3) ** (1 / 16), "decoder": 9**0.25}  # for 2 encoder and 3 decoder layers
OMEGA = {"encoder": math.sqrt(5 / math.log(5) - 1), "decoder": math.sqrt(10 / math.log(10) - 1)}
SIGMOID = (1 / (1 + math.exp(2.5)) - 1 / (1 + math.exp(5))) / math.tanh(2.5)  # logistic(5) − logistic(−5) = tanh(2.5)
GROWN = {"linear": 0.25, "exp": math.expm1(1.25) / math.expm1(5), "sigmoid": SIGMOID}
BY_HAND = {
    "postnorm": postnorm,
    "prenorm": prenorm,
    "deepnorm": lambda h, *a: postnorm(h, *a, alpha=ALPHA[h.stack]),
    "branchnorm": lambda h, *a: postnorm(h, *a, beta=GROWN[h.config["branchnorm_growth"]]),
    "rezero": lambda h, i, kind, x, m: x + h.p("branch_scale") * h.f(kind, x, m),
    "r-fixup": r_fixup,
    "t-fixup": lambda h, i, kind, x, m: x + h.f(kind, x, m),
    "admin": lambda h, i, *a: postnorm(h, i, *a, alpha=h.p(f"residual_scale{i}")),
    "admin-const": lambda h, *a: postnorm(h, *a, alpha=OMEGA[h.stack]),
    "dlcl": dlcl,
    "normformer": normformer,
    "subln": subln,
    "sandwich": lambda h, i, k, x, m: x + h.norm(f"post_norm{i}", h.f(k, h.norm(f"norm{i}", x), m)),
    "layerscale": lambda h, i, k, x, m: x + h.p(f"branch_scale{i}") * h.f(k, h.norm(f"norm{i}", x), m),
    "resi-dual": postnorm,
    "hybridnorm": hybridnorm,
    "hybridnorm-star": lambda h, *a: (prenorm if is_first(h) else hybridnorm)(h, *a),
    "olmo2": lambda h, i, k, x, m: x + h.norm(f"norm{i}", h.f(k, x, m)),
    "ln-scaling": ln_scaling,
    "mix-ln": mix_ln,
    "denseformer": prenorm,
    "keel": keel,
    "ngpt": ngpt,
    "b2t": lambda h, i, k, x, m: h.norm(f"norm{i}", h.f(k, x, m) + (x + h.bottom if k == "feed_forward" else x)),
}
BY_HAND |= {"gpas": gpas, "value-residual": value_residual, "x0-lambdas": x0_lambdas}
BY_HAND |= {"depth-scaled": depth_scaled, "variance-gate": variance_gate}
BY_HAND |= {"peri-ln": BY_HAND["sandwich"], "prores": prores}
END_NORM = ("prenorm", "normformer", "subln", "sandwich", "layerscale", "hybridnorm", "hybridnorm-star", "peri-ln")
END_NORM += ("olmo2", "ln-scaling", "mix-ln", "value-residual", "x0-lambdas", "depth-scaled", "variance-gate")


def rms(x):
    return functional.rms_norm(x, x.shape[-1:], None, 1e-6)


def attnres_by_hand(config, sublayers, whole, x, memory):
    is_plain = config["attnres_form"] == "plain"

    def attended(query, gain, sources):
        values = torch.stack(sources if is_plain else [rms(v) for v in sources], -1)  # (B, T, d, sources)
        keys = torch.stack([rms(v) for v in sources], -1)
        keys = keys * gain.unsqueeze(-1) if is_plain else keys / len(query) ** 0.5
        return (values * (query @ keys).softmax(-1).unsqueeze(-2)).sum(-1)

    sources = [x]
    for number, (h, i, kind) in enumerate(sublayers):
        query, gain = (h.p(f"depth_{part}{i}") if number else None for part in ("query", "gain"))
        if config["attnres_queries"] == 3 and kind == "self_attn":
            reads = [x if number == 0 else attended(query[j], None, sources) for j in range(3)]
            f = h.f(kind, *(h.norm(f"self_attn.{at}_input_norm", y) for at, y in zip("qkv", reads, strict=True)))
        else:
            f = h.f(kind, h.norm(f"norm{i}", x if number == 0 else attended(query, gain, sources)), memory)
        if number % config["attnres_block"] == 0:
            sources.append(f)
        else:
            sources[-1] = sources[-1] + f
    return attended(whole.p("end_depth_query"), whole.p("end_depth_gain"), sources)


def mhc_by_hand(config, sublayers, whole, x, memory):
    n, how, magnitude = config["mhc_streams"], config["mhc_mixing"], config["mhc_magnitude"]
    streams = x.unsqueeze(-2).repeat(1, 1, n, 1)

    def mixes(h, name, i=""):
        flat = rms(streams.flatten(-2))
        parts = (flat @ h.p(f"{name}_weight{i}").T).split([n, n, n * n][: len(h.p(f"{name}_scale{i}"))], -1)
        biases = h.p(f"{name}_bias{i}").split([part.shape[-1] for part in parts])
        return [s * part + b for s, part, b in zip(h.p(f"{name}_scale{i}"), parts, biases, strict=True)]

    def read(p):
        return torch.einsum("btn,btnd->btd", p.sigmoid() + 1e-6, streams)

    def channels(h, name, i=""):
        """Returns the tensor that is read, and the one from which the gates for writing are computed."""
        flat = rms(streams).flatten(-2) * h.p(f"{name}_gain{i}")
        low = functional.silu(flat @ h.p(f"{name}_down{i}").T / n)
        return ((low @ h.p(f"{name}_up{i}").T).sigmoid() * flat).unflatten(-1, (n, -1)).mean(-2), flat / n

    for h, i, kind in sublayers:
        r = torch.zeros(n, n, dtype=torch.float64)
        if how == "channel":
            y, flat = channels(h, "hyper", i)
            g = flat @ h.p(f"hyper_weight{i}").T
        else:
            p, g, *rest = mixes(h, "hyper", i)
            y = h.norm(f"norm{i}", read(p))
            r = rest[0].unflatten(-1, (n, n)) if rest else r
        m = r.softmax(-1) + 1e-6
        m = m / (m.sum(-2, keepdim=True) + 1e-6)
        for _ in range(config["mhc_iterations"] - 1):
            m = m / (m.sum(-1, keepdim=True) + 1e-6)
            m = m / (m.sum(-2, keepdim=True) + 1e-6)
        f = h.f(kind, y, memory)
        mixed = torch.einsum("btij,btid->btjd", m, streams) if how == "sinkhorn" else streams
        gates = magnitude * g.sigmoid() + (1e-6 if how == "none" else 0)
        streams = mixed + torch.einsum("btj,btd->btjd", gates, f)
    if config["mhc_end"] == "mean":
        return streams.mean(-2)
    return channels(whole, "end_hyper")[0] if how == "channel" else read(mixes(whole, "end_hyper")[0])


def mhc_lite_by_hand(config, sublayers, whole, x, memory):
    n = config["mhc_lite_streams"]
    streams = x.unsqueeze(-2).repeat(1, 1, n, 1)
    permutations = torch.eye(n, dtype=torch.float64)[torch.tensor(list(itertools.permutations(range(n))))]  # (n!, n, n)
    for h, i, kind in sublayers:
        flat = functional.normalize(streams.flatten(-2), dim=-1) * (n * x.shape[-1]) ** 0.5 * h.p(f"hyper_gain{i}")
        scale = h.p(f"hyper_scale{i}").repeat_interleave(torch.tensor([n, n, len(permutations)]))
        mixes = flat @ h.p(f"hyper_weight{i}").T * scale + h.p(f"hyper_bias{i}")
        r = torch.einsum("btr,rij->btij", mixes[..., 2 * n :].softmax(-1), permutations)
        y = torch.einsum("btn,btnd->btd", mixes[..., :n].sigmoid(), streams)
        f = h.f(kind, h.norm(f"norm{i}", y), memory)
        mixed = torch.einsum("btij,btid->btjd", r, streams)
        streams = mixed + 2 * mixes[..., n : 2 * n].sigmoid().unsqueeze(-1) * f.unsqueeze(-2)
    return streams.sum(-2)


def hyper_connections_by_hand(config, sublayers, whole, x, memory):
    n = config["hyper_connections_streams"]
    streams = x.unsqueeze(-2).repeat(1, 1, n, 1)
    for h, i, kind in sublayers:
        static = h.p(f"hyper_bias{i}").view(n, n + 2).expand(*x.shape[:2], n, n + 2)
        if config["hyper_connections_dynamic"]:
            affine = h.p(f"hyper_norm_weight{i}"), h.p(f"hyper_norm_bias{i}")
            moved = functional.layer_norm(streams, x.shape[-1:], *affine) @ h.p(f"hyper_weight{i}").T
            static = static + moved.tanh() * h.p(f"hyper_scale{i}")[[0] * (n + 1) + [1]]
        p, r, g = static.split([1, n, 1], -1)
        f = h.f(kind, h.norm(f"norm{i}", (p * streams).sum(-2)), memory)
        streams = r.transpose(-1, -2) @ streams + g * f.unsqueeze(-2)
    return streams.sum(-2)


SEVERAL = {"attnres": attnres_by_hand, "mhc": mhc_by_hand, "hyper-connections": hyper_connections_by_hand}
SEVERAL["mhc-lite"] = mhc_lite_by_hand


def stack_by_hand(state, config, stack, x, memory):
    c = ref.complete(config)
    whole = Hand(state, config, stack, 0)
    whole.prefix = stack
    kinds = ("self_attn", "feed_forward") if stack == "encoder" else ("self_attn", "multihead_attn", "feed_forward")
    if c["residual"] == "peri-ln" and c["peri_ln_embedding_norm"]:
        x = whole.norm("embedding_norm", x)
    if c["residual"] == "x0-lambdas":
        x = whole.norm("embedding_norm", x)
    if c["residual"] in SEVERAL:
        layers = (Hand(state, config, stack, n) for n in range(c[f"{stack}_layers"]))
        sublayers = [(h, i, kind) for h in layers for i, kind in enumerate(kinds, 1)]
        x = SEVERAL[c["residual"]](c, sublayers, whole, x, memory)
        has_norm = c["residual"] != "mhc" or c["mhc_mixing"] != "channel" or c["mhc_end"] == "mean"
        return whole.norm("norm", x) if has_norm else x
    is_dense = c["residual"] == "denseformer"
    outputs, is_dlcl, is_pre = [x], c["residual"] == "dlcl" or is_dense, c["dlcl_norm"] == "pre" or is_dense
    dual, shared = x, {}

    def row(n):
        if is_dense:
            weights = state[f"{stack}.combine.weight"][n]
            return sum(weights[k] * y for k, y in enumerate(outputs)) if n else x
        kept = [y if k == 0 or not is_pre else whole.norm(f"combine.norms.{k}", y) for k, y in enumerate(outputs)]
        total = torch.stack(kept, -1) @ state[f"{stack}.combine.weight"][n, : n + 1]
        return total if is_pre or n == 0 else whole.norm(f"combine.norms.{n}", total)

    for n in range(c[f"{stack}_layers"]):
        x = bottom = row(n) if is_dlcl else x
        for i, kind in enumerate(kinds, 1):
            dual = dual + Hand(state, config, stack, n).f(kind, x, memory) if c["residual"] == "resi-dual" else dual
            hand = Hand(state, config, stack, n)
            hand.bottom, hand.shared = bottom, shared
            x = BY_HAND[c["residual"]](hand, i, kind, x, memory)
        outputs.append(x)
    x = row(len(outputs) - 1) if is_dlcl else x
    if c["residual"] == "resi-dual":
        return x + whole.norm("dual_norm", dual)
    if c["residual"] == "r-fixup":
        x = x - state[f"{stack}.end_shift"]
        return state["encoder.end_scale"] * x if stack == "encoder" else x
    under = {"prores": c["prores_scheme"], "gpas": c["gpas_scheme"]}
    scheme = under.get(c["residual"], c["residual"])
    if scheme == "x0-lambdas" and c["x0_lambdas_backout"]:
        x = x + whole.p("backout_scale") * shared.get(f"{stack} middle", x)
    has_norm = scheme in END_NORM or (is_dlcl and is_pre)
    return whole.norm("norm", x) if has_norm else x


@per_variant
@pytest.mark.one_in(test=2)
def test_logits_are_the_equations(variant):
    config = {**variant, "decoder_layers": 3}
    state = ref.random_state(config)
    source, target = torch.randint(4, 32, (2, 4)), torch.randint(4, 32, (2, 5))
    memory = stack_by_hand(state, config, "encoder", embedded(state, source), None)
    x = stack_by_hand(state, config, "decoder", embedded(state, target), memory)
    theirs = x @ state["embedding.weight"].T
    torch.testing.assert_close(ref.forward(state, config, source, target), theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder-only"])
@pytest.mark.parametrize(
    "variant,norm",
    [(v, norm) for v in VARIANTS for norm in ref.NORM_NAMES if ref.is_defined(norm, v["residual"])],
    ids=lambda part: part if isinstance(part, str) else "-".join(map(str, part.values())),
)
@pytest.mark.one_in(test=290, all=241)
def test_every_parameter_has_a_gradient_and_padding_none(variant, norm, architecture):
    """The model is in training, and PowerNorm is past its warm-up."""
    config = {**variant, "norm": norm, "architecture": architecture, "powernorm_warmup": 0}
    if variant.get("x0_lambdas_backout"):
        # With 2 layers the remembered middle is the output itself, and a norm without ε cancels the factor on it.
        config["decoder_layers"] = 3
    source = SOURCE if architecture == "encoder-decoder" else None
    wide = [t if t is None else functional.pad(t, (2, 3), value=ref.PAD) for t in (source, INPUT)]
    logits, grads, states = [], [], []
    for inputs in ((source, INPUT), wide):
        state = ref.random_state(config)
        leaves = [state[name].requires_grad_() for name in ref.parameter_shapes(config)]
        logits.append(ref.pack(ref.forward(state, config, *inputs, RATES), inputs[1] != ref.PAD))
        grads.append(torch.autograd.grad(logits[-1].square().sum(), leaves))
        states.append({name: state[name] for name in ref.buffer_shapes(config)})
    for name, grad in zip(ref.parameter_shapes(config), grads[0]):
        assert grad.isfinite().all() and grad.any(), name
    torch.testing.assert_close(logits[0], logits[1])
    torch.testing.assert_close(grads[0], grads[1])
    torch.testing.assert_close(states[0], states[1])
    moved = {
        name for name, value in ref.random_state(config).items() if not torch.equal(value, {**state, **states[0]}[name])
    }
    assert moved == {name for name in ref.buffer_shapes(config) if not name.endswith(".t")}


def same(config, other, start=None):
    """Returns True if two configs give the same logits with the parameters of the first. `start` sets parameters whose
    names end in its keys to constants."""
    state = ref.random_state(config)
    for name, value in (start or {}).items():
        for key in state:
            if key.endswith(name):
                state[key] = torch.full_like(state[key], value)
    shared = {**ref.random_state(other), **state}
    names = {*ref.parameter_shapes(other), *ref.buffer_shapes(other)}
    ours = ref.forward(state, config, SOURCE, INPUT)
    theirs = ref.forward({name: shared[name] for name in names}, other, SOURCE, INPUT)
    real = INPUT != ref.PAD
    return torch.allclose(ours[real], theirs[real], rtol=1e-9, atol=1e-9)


QUERIES = ("depth_query1", "depth_query2", "depth_query3", "end_depth_query")


def test_identities(monkeypatch):
    postnorm, prenorm = {"residual": "postnorm"}, {"residual": "prenorm"}
    branchnorm = {"residual": "branchnorm", "branchnorm_steps": 40}
    assert not same(branchnorm, postnorm)
    assert same(branchnorm, postnorm, {".t": 40}) and same({**branchnorm, "branchnorm_steps": 0}, postnorm)
    prores = {"residual": "prores", "prores_steps": 20}
    assert not same(prores, prenorm) and same(prores, prenorm, {".t": 40})  # at t = 40 both layers have grown fully
    assert not same(prores, prenorm, {".t": 39})
    assert same({**prores, "prores_scheme": "sandwich"}, {"residual": "sandwich"}, {".t": 40})
    assert not same({"residual": "b2t"}, postnorm)
    off = dict.fromkeys(("head_scale", "attention_norm", "ffn_norm"), False)
    off = {f"normformer_{name}": value for name, value in off.items()}
    assert same({"residual": "normformer", **off}, prenorm) and not same({"residual": "normformer"}, prenorm)
    assert same({"residual": "layerscale"}, prenorm, {"branch_scale1": 1, "branch_scale2": 1, "branch_scale3": 1})
    assert same({"residual": "rezero"}, {"residual": "t-fixup"}, {"branch_scale": 1})
    ones = {f"residual_scale{i}": 1 for i in (1, 2, 3)}
    assert same({"residual": "admin"}, postnorm, ones) and not same({"residual": "admin"}, postnorm)
    assert same({"residual": "resi-dual"}, postnorm, {"dual_norm.weight": 0, "dual_norm.bias": 0})
    assert same({"residual": "peri-ln", "peri_ln_embedding_norm": False}, {"residual": "sandwich"})
    assert same({"residual": "mix-ln", "mix_ln_part": 0.5}, {"residual": "postnorm*1/2,prenorm"})
    assert same({"residual": "mix-ln"}, prenorm) and not same({"residual": "ln-scaling"}, prenorm)
    exact = {"norm_eps": 0.0}  # without ε, N of a mean equals N of the sum
    assert same({"residual": "attnres", **exact}, {**prenorm, **exact}, dict.fromkeys(QUERIES, 0))
    assert not same({"residual": "attnres", **exact}, {**prenorm, **exact})
    assert same({"residual": "prenorm*1,prenorm"}, prenorm) and same({"residual": "postnorm*1/3,prenorm"}, prenorm)
    assert not same({"residual": "postnorm*1,prenorm"}, prenorm)
    assert not same({"residual": "deepnorm"}, postnorm)
    monkeypatch.setattr("reference.residual.deepnorm_alpha", lambda config, stack: 1.0)
    assert same({"residual": "deepnorm"}, postnorm)


@pytest.mark.parametrize("norm", ref.NORM_NAMES)
@pytest.mark.one_in(test=2)
def test_rezero_and_r_fixup_start_as_the_identity(norm):
    """With zeroed branches the encoder's output is its embedding, as without layers. The same holds for a decoder
    without encoder."""
    zeros = {"rezero": ("branch_scale",), "r-fixup": ("out_proj.weight", "linear2.weight", "shift", "shift3")}
    for residual, names in zeros.items():
        config = {"residual": residual, "norm": norm}
        state = ref.random_state(config)
        for name in state:
            if name.endswith(names):
                state[name] = torch.zeros_like(state[name])
            if name == "encoder.end_scale":
                state[name] = torch.ones_like(state[name])
        busy = {name: value for name, value in ref.random_state(config).items() if name.startswith("decoder")}
        empty = {**state, **busy}
        short = {name: value for name, value in empty.items() if not name.startswith("encoder.layers")}
        pair = (
            ref.forward(empty, config, SOURCE, INPUT),
            ref.forward(short, {**config, "encoder_layers": 0}, SOURCE, INPUT),
        )
        torch.testing.assert_close(*pair)
        alone = {name: v for name, v in state.items() if "encoder" not in name and "multihead" not in name}
        for name in [name for name in alone if name.endswith(("branch_scale3", "norm3"))]:
            del alone[name]
        config = {**config, "architecture": "decoder-only"}
        target = torch.randint(4, 32, (2, 5))
        theirs = embedded(alone, target) @ alone["embedding.weight"].T
        torch.testing.assert_close(ref.forward(alone, config, None, target), theirs)


def test_dlcl_that_looks_at_the_last_layer_alone_is_postnorm():
    """The test uses that LayerNorm without ε is idempotent at γ = 1, β = 0."""
    config = {"residual": "dlcl", "dlcl_norm": "post", "norm_eps": 0.0}
    state = ref.random_state(config)
    for name, value in state.items():
        if name.endswith("combine.weight"):
            state[name] = torch.eye(len(value), dtype=torch.float64)
        if "norm" in name:
            state[name] = torch.full_like(value, float(name.endswith("weight")))
    plain = {name: value for name, value in state.items() if "combine" not in name}
    theirs = ref.forward(plain, {"residual": "postnorm", "norm_eps": 0.0}, SOURCE, INPUT)
    torch.testing.assert_close(ref.forward(state, config, SOURCE, INPUT), theirs)


def test_denseformer_starts_as_prenorm():
    config = {"residual": "denseformer", "decoder_layers": 3}
    state = ref.random_state(config)
    prenorm = {name: value for name, value in state.items() if "combine" not in name}
    for stack, size in (("encoder", 3), ("decoder", 4)):
        start = ref.expected_mean(config, f"{stack}.combine.weight")
        assert torch.equal(start, torch.eye(size))
        state[f"{stack}.combine.weight"] = start.double()
    theirs = ref.forward(prenorm, {**config, "residual": "prenorm"}, SOURCE, INPUT)
    torch.testing.assert_close(ref.forward(state, config, SOURCE, INPUT), theirs)


def test_dlcl_starts_as_the_mean_of_all_rows():
    config = {"residual": "dlcl", "decoder_layers": 3}
    start = ref.expected_mean(config, "decoder.combine.weight")
    rows = [[1, 0, 0, 0], [1 / 2, 1 / 2, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0], [1 / 4] * 4]
    torch.testing.assert_close(start, torch.tensor(rows))


def test_where_scalenorm_fixed_learns():
    """Under any scheme g is learned only in the norm through which the decoder's last output passes."""
    for name, end in (
        ("prenorm", ".norm"),
        ("postnorm", ".layers.1.norm3"),
        ("deepnorm", ".layers.1.norm3"),
        ("dlcl", ".norm"),
        ("normformer", ".norm"),
        ("rezero", None),
    ):
        names = ref.parameter_shapes({"residual": name, "norm": "scalenorm-fixed"})
        assert [n for n in names if "norm" in n] == ([f"decoder{end}.weight"] if end else []), name
    names = ref.parameter_shapes({"residual": "dlcl", "dlcl_norm": "post", "norm": "scalenorm-fixed"})
    assert [n for n in names if "norm" in n] == ["decoder.combine.norms.2.weight"]
