"""The oracle's residual schemes and inits against hand-written equations, identities and published numbers."""

import itertools
import math

import pytest
import torch
from torch.nn import functional

import reference as ref

SOURCE = ref.pad([[5, 6, 7, 8, 2], [9, 4, 2], [11, 2]])
INPUT = ref.pad([[0, 9, 8], [0, 5, 6, 7, 4], [0, 10, 4]])
TARGET = ref.pad([[9, 8, 2], [5, 6, 7, 4, 2], [10, 4, 2]])
RATES = ref.Dropout(0.1, 0.2, 0.3, 0.4, seed=7, update=3)
VARIANTS = [
    *({"residual": name} for name in ref.RESIDUAL_NAMES),
    {"residual": "branchnorm", "branchnorm_growth": "sigmoid"},
    {"residual": "r-fixup", "r_fixup_mode": "paper"},
    {"residual": "dlcl", "dlcl_norm": "post"},
    {"residual": "normformer", "normformer_mode": "fairseq", "normformer_residual_scale": True},
    {"residual": "normformer", "normformer_head_scale": False, "normformer_attention_norm": False},
]
per_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant.values())))


pytestmark = pytest.mark.usefixtures("one_thread")


class Hand:
    """A layer's parameters and pieces, written with torch.nn.functional: layernorm, no padding, no dropout."""

    def __init__(self, state, config, stack, layer):
        self.state, self.config, self.stack, self.prefix = state, ref.complete(config), stack, f"{stack}.layers.{layer}"

    def p(self, name):
        return self.state.get(f"{self.prefix}.{name}")

    def norm(self, name, x):
        return functional.layer_norm(x, x.shape[-1:], self.p(f"{name}.weight"), self.p(f"{name}.bias"))

    def heads(self, kind, query, memory):
        d, heads = query.shape[-1], self.config["heads"]
        weights = self.p(f"{kind}.in_proj_weight").split(d)
        biases = [None] * 3 if (bias := self.p(f"{kind}.in_proj_bias")) is None else bias.split(d)
        q, k, v = map(functional.linear, (query, memory, memory), weights, biases)
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        is_causal = self.stack == "decoder" and kind == "self_attn"
        return functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(-2)

    def linear(self, name, x):
        return functional.linear(x, self.p(f"{name}.weight"), self.p(f"{name}.bias"))

    def f(self, kind, x, memory):
        """F as it is without a scheme."""
        if kind == "feed_forward":
            return self.linear("linear2", self.linear("linear1", x).relu())
        return self.linear(f"{kind}.out_proj", self.heads(kind, x, x if kind == "self_attn" else memory))


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


def postnorm(h, i, kind, x, memory, alpha=1.0, beta=1.0):
    return h.norm(f"norm{i}", alpha * x + beta * h.f(kind, x, memory))


ALPHA = {"encoder": 0.81 * (2**4 * 3) ** (1 / 16), "decoder": 9**0.25}  # of 2 and 3 layers
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
}


def stack_by_hand(state, config, stack, x, memory):
    c = ref.complete(config)
    whole = Hand(state, config, stack, 0)
    whole.prefix = stack
    kinds = ("self_attn", "feed_forward") if stack == "encoder" else ("self_attn", "multihead_attn", "feed_forward")
    outputs, is_dlcl, is_pre = [x], c["residual"] == "dlcl", c["dlcl_norm"] == "pre"
    dual = x

    def row(n):
        kept = [y if k == 0 or not is_pre else whole.norm(f"combine.norms.{k}", y) for k, y in enumerate(outputs)]
        total = torch.stack(kept, -1) @ state[f"{stack}.combine.weight"][n, : n + 1]
        return total if is_pre or n == 0 else whole.norm(f"combine.norms.{n}", total)

    for n in range(c[f"{stack}_layers"]):
        x = row(n) if is_dlcl else x
        for i, kind in enumerate(kinds, 1):
            dual = dual + Hand(state, config, stack, n).f(kind, x, memory) if c["residual"] == "resi-dual" else dual
            x = BY_HAND[c["residual"]](Hand(state, config, stack, n), i, kind, x, memory)
        outputs.append(x)
    x = row(len(outputs) - 1) if is_dlcl else x
    if c["residual"] == "resi-dual":
        return x + whole.norm("dual_norm", dual)
    if c["residual"] == "r-fixup":
        x = x - state[f"{stack}.end_shift"]
        return state["encoder.end_scale"] * x if stack == "encoder" else x
    has_norm = c["residual"] in ("prenorm", "normformer", "subln", "sandwich", "layerscale") or (is_dlcl and is_pre)
    return whole.norm("norm", x) if has_norm else x


def embedded(state, tokens):
    d = state["embedding.weight"].shape[1]
    return d**0.5 * state["embedding.weight"][tokens] + ref.sinusoids(torch.arange(tokens.shape[1]), d, "twt")


@per_variant
def test_logits_are_the_equations(variant):
    config = {**variant, "decoder_layers": 3}
    state = ref.random_state(config)
    source, target = torch.randint(4, 32, (2, 4)), torch.randint(4, 32, (2, 5))
    memory = stack_by_hand(state, config, "encoder", embedded(state, source), None)
    x = stack_by_hand(state, config, "decoder", embedded(state, target), memory)
    theirs = x @ state["embedding.weight"].T
    torch.testing.assert_close(ref.forward(state, config, source, target), theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder-only"])
@pytest.mark.parametrize("norm", ref.NORM_NAMES)
@per_variant
def test_every_parameter_has_a_gradient_and_padding_none(variant, norm, architecture):
    """In training, PowerNorm past its warm-up."""
    config = {**variant, "norm": norm, "architecture": architecture, "powernorm_warmup": 0}
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
    """Do two configs give the same logits from the parameters of the first, which `start` may set?"""
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


def test_identities(monkeypatch):
    postnorm, prenorm = {"residual": "postnorm"}, {"residual": "prenorm"}
    branchnorm = {"residual": "branchnorm", "branchnorm_steps": 40}
    assert not same(branchnorm, postnorm)
    assert same(branchnorm, postnorm, {".t": 40}) and same({**branchnorm, "branchnorm_steps": 0}, postnorm)
    off = dict.fromkeys(("head_scale", "attention_norm", "ffn_norm"), False)
    off = {f"normformer_{name}": value for name, value in off.items()}
    assert same({"residual": "normformer", **off}, prenorm) and not same({"residual": "normformer"}, prenorm)
    assert same({"residual": "layerscale"}, prenorm, {"branch_scale1": 1, "branch_scale2": 1, "branch_scale3": 1})
    assert same({"residual": "rezero"}, {"residual": "t-fixup"}, {"branch_scale": 1})
    ones = {f"residual_scale{i}": 1 for i in (1, 2, 3)}
    assert same({"residual": "admin"}, postnorm, ones) and not same({"residual": "admin"}, postnorm)
    assert same({"residual": "resi-dual"}, postnorm, {"dual_norm.weight": 0, "dual_norm.bias": 0})
    assert same({"residual": "prenorm*1,prenorm"}, prenorm) and same({"residual": "postnorm*1/3,prenorm"}, prenorm)
    assert not same({"residual": "postnorm*1,prenorm"}, prenorm)
    assert not same({"residual": "deepnorm"}, postnorm)
    monkeypatch.setattr("reference.residual.deepnorm_alpha", lambda config, stack: 1.0)
    assert same({"residual": "deepnorm"}, postnorm)


@pytest.mark.parametrize("norm", ref.NORM_NAMES)
def test_rezero_and_r_fixup_start_as_the_identity(norm):
    """Their encoder gives its embedding, as one without layers does, and so does a lone decoder."""
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
    """LayerNorm without ε is idempotent at γ = 1, β = 0."""
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


def test_dlcl_starts_as_the_mean_of_all_rows():
    config = {"residual": "dlcl", "decoder_layers": 3}
    start = ref.expected_mean(config, "decoder.combine.weight")
    rows = [[1, 0, 0, 0], [1 / 2, 1 / 2, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0], [1 / 4] * 4]
    torch.testing.assert_close(start, torch.tensor(rows))


def test_where_scalenorm_fixed_learns():
    """The norm that the decoder's last output passes, whatever the scheme."""
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


def test_names():
    plain = set(ref.parameter_shapes({}))
    layer = "decoder.layers.0."
    for variant, more, less in (
        ({"residual": "sandwich"}, {"post_norm1.bias", "post_norm2.bias", "post_norm3.bias"}, set()),
        ({"residual": "layerscale"}, {"branch_scale1", "branch_scale2", "branch_scale3"}, set()),
        (
            {"residual": "subln"},
            {"self_attn.inner_norm.weight", "inner_norm.weight"},
            {"multihead_attn.inner_norm.weight"},
        ),
        (
            {"residual": "normformer", "normformer_residual_scale": True},
            {"self_attn.head_scale", "post_norm1.weight", "inner_norm.weight", "residual_scale3"},
            {"post_norm2.weight", "multihead_attn.head_scale", "residual_scale1"},
        ),
        (
            {"residual": "r-fixup", "r_fixup_mode": "paper"},
            {"self_attn.input_shift", "multihead_attn.output_scale", "shift1", "shift2", "shift3", "branch_scale3"},
            {"linear1.bias", "self_attn.in_proj_bias", "multihead_attn.out_proj.bias", "norm1.weight"},
        ),
    ):
        names = {name.removeprefix(layer) for name in ref.parameter_shapes(variant) if name.startswith(layer)}
        assert more <= names and not less & names, variant
    assert plain <= set(ref.parameter_shapes({"residual": "dlcl"}))
    assert ref.parameter_shapes({"residual": "subln"})["encoder.layers.1.inner_norm.weight"] == (32,)
    assert ref.buffer_shapes({"residual": "branchnorm"}) == {"encoder.t": (1,), "decoder.t": (1,)}
    mixed = {"encoder_norm": "powernorm", "encoder_layers": 1, "powernorm_mode": "release"}
    expected = itertools.product(("layers.0.norm1", "layers.0.norm2", "norm"), ("running_phi", "ema_gz", "iters"))
    assert set(ref.buffer_shapes(mixed)) == {f"encoder.{norm}.{name}" for norm, name in expected}
    with pytest.raises(ValueError, match="unknown residual scheme 'mixnorm'"):
        ref.parameter_shapes({"residual": "mixnorm"})


def test_admin_profile():
    config = {"residual": "admin", "architecture": "decoder-only"}
    state, target = ref.random_state(config), torch.randint(4, 32, (2, 5))
    x, r, expected = embedded(state, target), 1.0, {}
    for n, (i, kind) in itertools.product(range(2), enumerate(("self_attn", "feed_forward"), 1)):
        h = Hand(state, config, "decoder", n)
        expected[f"{h.prefix}.residual_scale{i}"] = torch.full((16,), r).double()
        f = h.f(kind, x, None)
        x_plus = h.norm(f"norm{i}", r * x + f)
        r, x = ((r * x).var(correction=0) + f.var(correction=0)).sqrt().item(), x_plus
    torch.testing.assert_close(ref.profile_admin(state, config, None, target, ref.Dropout()), expected)


def test_admin_profile_of_two_stacks_dropout_and_padding():
    config = {"residual": "admin", "encoder_norm": "powernorm"}
    state = ref.random_state(config)
    before = {name: value.clone() for name, value in state.items()}
    plain, dropped = (ref.profile_admin(state, config, SOURCE, INPUT, d, False) for d in (ref.Dropout(), RATES))
    wide = [functional.pad(t, (2, 3), value=ref.PAD) for t in (SOURCE, INPUT)]
    torch.testing.assert_close(ref.profile_admin(state, config, *wide, RATES, False), dropped)
    assert set(plain) == {name for name in state if "residual_scale" in name} and len(plain) == 10
    for stack in ("encoder", "decoder"):
        assert (plain[f"{stack}.layers.0.residual_scale1"] == 1).all()
        assert (plain[f"{stack}.layers.0.residual_scale2"] > 1).all()
    assert not torch.allclose(dropped["encoder.layers.0.residual_scale2"], plain["encoder.layers.0.residual_scale2"])
    counted = ref.profile_admin(state, config, SOURCE, INPUT, RATES)
    assert not torch.allclose(dropped["encoder.layers.0.residual_scale2"], counted["encoder.layers.0.residual_scale2"])
    torch.testing.assert_close(state, before, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["paper", "release"])
def test_training_moves_buffers_once_per_micro_batch_and_t_before_the_update(mode):
    config = {
        "residual": "branchnorm",
        "encoder_norm": "powernorm",
        "decoder_norm": "batchnorm",
        "powernorm_mode": mode,
    }
    state = {**ref.random_state(config), **ref.fresh_buffers(config)}
    batches = [ref.Batch(SOURCE[i : i + 1], INPUT[i : i + 1], TARGET[i : i + 1]) for i in range(3)]
    adam = ref.Adam()
    for n in (1, 2):
        before = state
        state = ref.train_step(state, config, batches, adam, 0.01).state
        assert state["encoder.t"].item() == state["decoder.t"].item() == n
        assert state["encoder.layers.0.norm1.iters"].item() == 3 * n
        for name in ("encoder.layers.0.norm1.ema_gz", "decoder.layers.1.norm3.running_var"):
            assert not torch.equal(state[name], before[name])
    assert set(state) == set(ref.random_state(config))


def test_group_scaling_in_models():
    """A decoder of no layers is its end norm: one group, none, or in release mode the heads."""
    for name, options, groups in (
        ("powernorm", {}, 1),
        ("powernorm-v", {"groupscaling": 4}, 4),
        ("powernorm", {"groupscaling": 0}, 0),
        ("powernorm", {"groupscaling": 0, "powernorm_mode": "release"}, 2),
        ("batchnorm", {}, 1),
    ):
        config = {"norm": name, "architecture": "decoder-only", "decoder_layers": 0, **options}
        state, target = ref.random_state(config), torch.randint(4, 32, (2, 5))
        x = embedded(state, target)
        x = ref.group_scaling(x, groups) if groups else x
        p = {key.removeprefix("decoder.norm."): value.flatten() for key, value in state.items()}
        mean, square = (p["running_mean"], p["running_var"]) if name == "batchnorm" else (0, p["running_phi"])
        theirs = p["weight"] * (x - mean) / (square + 1e-5).sqrt() + p["bias"]
        logits = ref.forward(state, config, None, target)
        torch.testing.assert_close(logits, theirs @ state["embedding.weight"].T)


def test_the_released_end_norms_warm_up_for_a_thousand_steps():
    """At α = 1 only the warm-up's cumulative mean moves ψ²."""
    config = {"norm": "powernorm", "powernorm_mode": "release", "powernorm_warmup": 2000, "powernorm_alpha_fwd": 1.0}
    state = ref.random_state(config)
    for name in state:
        if name.endswith("iters"):
            state[name] += 1500
    before = {name: value.clone() for name, value in state.items()}
    ref.forward(state, config, SOURCE, INPUT, ref.Dropout())
    still = {name for name in state if name.endswith("running_phi") and torch.equal(state[name], before[name])}
    assert still == {"encoder.norm.running_phi", "decoder.norm.running_phi"}


def depth(layers, **options):
    return {"encoder_layers": layers, "decoder_layers": layers, **options}


def test_constants_are_the_published_ones():
    vectors = {
        6: (1.4179, 0.4970, 2.0598, 0.3433),
        18: (1.9987, 0.3526, 2.7108, 0.2608),
        50: (2.7505, 0.2562, 3.4996, 0.2021),
        100: (3.4157, 0.2063, 4.1618, 0.1699),
        500: (5.6482, 0.1248, 6.2233, 0.1136),
    }
    for layers, vector in vectors.items():
        ours = [f(depth(layers), s) for s in ("encoder", "decoder") for f in (ref.deepnorm_alpha, ref.deepnorm_beta)]
        assert ours == pytest.approx(vector, abs=5.01e-5), layers
    for function, rows, tolerance in (
        (ref.subln_gamma, {6: (1.5473, 1.7001), 100: (3.1739, 2.3883)}, 5e-5),
        (ref.t_fixup_factor, {6: (0.4281, 0.3689), 100: (0.2119, 0.1826)}, 5e-5),
        (ref.admin_omega, {6: (2.017, 2.335), 100: (6.075, 7.193)}, 5e-4),
    ):
        for layers, row in rows.items():
            ours = [function(depth(layers), stack) for stack in ("encoder", "decoder")]
            assert ours == pytest.approx(row, abs=tolerance), (function, layers)
    alone = {"architecture": "decoder-only", "decoder_layers": 8}
    assert ref.deepnorm_alpha(alone, "decoder") == 2.0
    assert ref.deepnorm_beta(alone, "decoder") == pytest.approx(64**-0.25)
    assert ref.subln_gamma(alone, "decoder") == pytest.approx(math.sqrt(math.log(16)))
    assert ref.admin_omega(alone, "decoder") == pytest.approx(math.sqrt(17 / math.log(17) - 1))
    assert ref.fixup_branches(alone) == 16 and ref.fixup_branches(depth(6)) == 30


def test_branchnorm_grows_as_published():
    for growth, row in {
        "linear": (0.25, 0.5),
        "exp": (0.016894, 0.075858),
        "sigmoid": (0.070104, 0.5),
    }.items():
        ours = [ref.branchnorm_alpha(t, 4000, growth) for t in (1000, 2000)]
        assert ours == pytest.approx(row, abs=5e-7)
        assert ref.branchnorm_alpha(0, 4000, growth) == 0
        assert ref.branchnorm_alpha(3999, 4000, growth) < 1 == ref.branchnorm_alpha(4000, 4000, growth)
        assert ref.branchnorm_alpha(9000, 4000, growth) == 1 == ref.branchnorm_alpha(1, 0, growth)


def test_initial_distributions():
    """(std, is it uniform) of every role, in units of Xavier's of its shape; d = 128, d_ff = 320, 6 + 4 layers."""
    shape = {"d_model": 128, "d_ff": 320, "encoder_layers": 6, "decoder_layers": 4, "tie_embeddings": "decoder"}
    roles = {
        "q": ("self_attn.in_proj_weight", 0, 256),
        "k": ("self_attn.in_proj_weight", 1, 256),
        "v": ("self_attn.in_proj_weight", 2, 256),
        "out": ("self_attn.out_proj.weight", 0, 256),
        "fc1": ("linear1.weight", 0, 448),
        "fc2": ("linear2.weight", 0, 448),
        "cross q": ("multihead_attn.in_proj_weight", 0, 256),
        "cross v": ("multihead_attn.in_proj_weight", 2, 256),
        "cross out": ("multihead_attn.out_proj.weight", 0, 256),
    }
    half, small = 0.5**0.5, 0.4**0.5
    beta_e, beta_d = 0.87 * (6**4 * 4) ** (-1 / 16), 48**-0.25
    gamma_e, gamma_d = math.sqrt(math.log(12) * math.log(12) / 3), math.sqrt(math.log(12))
    fixup_e, fixup_d, branches = 0.67 * 6**-0.25, 36**-0.25, 24
    sixth = branches ** (-1 / 6)
    tables = {  # q, k, v, out, fc1, fc2 of the encoder; the same and q, v, out of the cross-attention of the decoder
        "xavier": ([1] * 6, [1] * 9),
        "smallinit": ([small] * 4 + [1, 1], [small] * 4 + [1, 1] + [small] * 3),
        "fairseq": ([half] * 3 + [1] * 3, [half] * 3 + [1] * 3 + [half, half, 1]),
        "deepnorm": ([1, 1] + [beta_e] * 4, [1, 1] + [beta_d] * 4 + [1, beta_d, beta_d]),
        "subln": ([1, 1] + [gamma_e] * 4, [1, 1] + [gamma_d] * 4 + [1, 1, 1]),
        "ds-init": ([3**-0.5] * 6, [3**-0.5] * 9),
        "t-fixup": ([half, half] + [fixup_e] * 4, [half, half] + [fixup_d] * 4 + [half, fixup_d, fixup_d]),
        "r-fixup": ([sixth] * 3 + [0, branches**-0.5, 0], [sixth] * 3 + [0, branches**-0.5, 0, sixth, sixth, 0]),
    }
    assert (*tables, "gpt2") == ref.INIT_NAMES
    for init, stacks in tables.items():
        config = {**shape, "init": init}
        for stack, row in zip(("encoder", "decoder"), stacks):
            for (role, (name, part, fans)), gain in zip(roles.items(), row):
                name = f"{stack}.layers.2.{name}"
                std = ref.expected_std(config, name, part)
                assert std == pytest.approx(gain * math.sqrt(2 / fans)), (init, stack, role)
                is_uniform = init in ("fairseq", "ds-init", "t-fixup")
                bound = ref.expected_bound(config, name, part)
                assert bound == (pytest.approx(gain * math.sqrt(6 / fans)) if is_uniform else None), (init, role)
        assert ref.expected_std(config, "encoder.layers.2.linear1.bias") == 0
        gains = (54**-0.25, 36**-0.25) if init == "t-fixup" else (1, 1)
        for side, gain in zip(("source", "target"), gains):
            name = f"{side}_embedding.weight"
            assert ref.expected_std(config, name) == pytest.approx(gain * 128**-0.5)
            assert ref.expected_bound(config, name) is None
            assert ref.expected_bound({**config, "fixnorm": True}, name) == pytest.approx(0.01)
    gpt2 = {**shape, "init": "gpt2"}
    for stack, depth in (("encoder", 12**-0.5), ("decoder", 8**-0.5)):
        for role, (name, part, _) in roles.items():
            if stack == "decoder" or not role.startswith("cross"):
                std = ref.expected_std(gpt2, f"{stack}.layers.2.{name}", part)
                assert std == pytest.approx(0.02 * (depth if role.endswith(("out", "fc2")) else 1)), (stack, role)
    assert ref.expected_std(gpt2, "source_embedding.weight") == 0.02
    release = {**shape, "init": "ds-init", "ds_init_mode": "release"}
    assert ref.expected_std(release, "encoder.layers.3.linear1.weight") == pytest.approx(4**-0.25 * math.sqrt(2 / 448))
    shared = {**shape, "init": "t-fixup", "tie_embeddings": "all"}
    assert ref.expected_std(shared, "embedding.weight") == pytest.approx(54**-0.25 * 128**-0.5)


def test_default_inits_and_first_values():
    theirs = {"prenorm": "smallinit", "postnorm": "smallinit", "branchnorm": "deepnorm", "resi-dual": "fairseq"}
    own = ("deepnorm", "subln", "t-fixup", "r-fixup")
    for name in ref.RESIDUAL_NAMES:
        expected = name if name in own else theirs.get(name, "xavier")
        assert ref.complete({"residual": name})["init"] == expected
    assert ref.complete({"residual": "subln", "init": "xavier"})["init"] == "xavier"
    layer = "encoder.layers.0."
    for config, name, value in (
        ({"residual": "rezero"}, f"{layer}branch_scale", 0),
        ({"residual": "layerscale"}, f"{layer}branch_scale1", 1e-4),
        ({"residual": "r-fixup"}, f"{layer}branch_scale1", 1),
        ({"residual": "r-fixup"}, f"{layer}shift2", 0),
        ({"residual": "admin"}, f"{layer}residual_scale1", 1),
        ({"residual": "subln", "norm": "scalenorm"}, f"{layer}inner_norm.weight", 32**0.5),
        ({"norm": "lpnorm", "lpnorm_p": 4}, f"{layer}norm1.weight", 2),
        ({"norm": "lpnorm", "lpnorm_p": math.inf}, f"{layer}norm1.weight", 1),
        ({"norm": "powernorm"}, f"{layer}norm1.weight", 1),
        ({}, f"{layer}linear1.bias", 0),
    ):
        assert ref.expected_mean(config, name) == value, name
        assert ref.expected_std(config, name) == 0
    fresh = ref.fresh_buffers({"norm": "powernorm", "residual": "branchnorm"})
    assert fresh["encoder.t"].tolist() == [1] and fresh["encoder.t"].dtype == torch.int64
    assert fresh[f"{layer}norm1.iters"].dtype == torch.int64 and not fresh[f"{layer}norm1.ema_gz"].any()
    assert (fresh[f"{layer}norm1.running_phi"] == 1).all() and fresh[f"{layer}norm1.running_phi"].shape == (1, 16, 1, 1)
