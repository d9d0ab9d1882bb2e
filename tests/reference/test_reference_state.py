"""Tests the oracle's names, profiled gains, buffers, constants and initial values."""

import itertools
import math

import pytest
import torch
from torch.nn import functional

import reference as ref
from reference.by_hand import INPUT, RATES, SOURCE, TARGET, Hand, embedded

pytestmark = pytest.mark.usefixtures("one_thread")


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
            {"residual": "hybridnorm"},
            {"norm2.weight", *(f"{a}_attn.{n}_norm.weight" for a in ("self", "multihead") for n in "qkv")},
            {"norm1.weight", "norm3.weight"},
        ),
        ({"residual": "olmo2"}, {"norm1.weight", "multihead_attn.k_norm.weight"}, {"self_attn.v_norm.weight"}),
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
def test_training_moves_buffers_and_t_before_the_update(mode):
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
        assert state["encoder.layers.0.norm1.iters"].item() == n, "PowerNorm's steps are updates"
        for name in ("encoder.layers.0.norm1.ema_gz", "decoder.layers.1.norm3.running_var"):
            assert not torch.equal(state[name], before[name])
    assert set(state) == set(ref.random_state(config))


def test_group_scaling_in_models():
    """The test uses a decoder without layers, which consists of its end norm. GroupScaling has one group, none, or in
    release mode as many as there are heads."""
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
    """With α = 1 only the cumulative mean of the warm-up changes ψ², so unchanged buffers are past their warm-up."""
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
    """Compares the std of every role, in units of Xavier's std for its shape, and whether the distribution is uniform.
    The model has d = 128, d_ff = 320 and 6+4 layers."""
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
    # Each init has two lists: q, k, v, out, fc1, fc2 of the encoder; for the decoder the same six, then q, v and out of
    # cross-attention.
    tables = {
        "xavier": ([1] * 6, [1] * 9),
        "smallinit": ([small] * 4 + [1, 1], [small] * 4 + [1, 1] + [small] * 3),
        "fairseq": ([half] * 3 + [1] * 3, [half] * 3 + [1] * 3 + [half, half, 1]),
        "deepnorm": ([1, 1] + [beta_e] * 4, [1, 1] + [beta_d] * 4 + [1, beta_d, beta_d]),
        "subln": ([1, 1] + [gamma_e] * 4, [1, 1] + [gamma_d] * 4 + [1, 1, 1]),
        "ds-init": ([3**-0.5] * 6, [3**-0.5] * 9),
        "t-fixup": ([half, half] + [fixup_e] * 4, [half, half] + [fixup_d] * 4 + [half, fixup_d, fixup_d]),
        "r-fixup": ([sixth] * 3 + [0, branches**-0.5, 0], [sixth] * 3 + [0, branches**-0.5, 0, sixth, sixth, 0]),
    }
    first, second = ((448 / (6 * fan_in)) ** 0.5 for fan_in in (128, 320))
    linears = [half] * 3 + [1, first, second]
    tables["fairseq-0.12.2"] = (linears, [*linears, half, half, 1])
    e, d = 6**-0.5, 0.5  # L^{−1/2} for 6 and for 4 layers
    tables["b2t"] = ([g * e for g in linears], [g * d for g in (*linears, half, half, 1)])
    assert {*tables, "gpt2", "normal", "llama-depth", "fan-in"} == {*ref.INIT_NAMES}
    for init, stacks in tables.items():
        config = {**shape, "init": init}
        for stack, row in zip(("encoder", "decoder"), stacks):
            for (role, (name, part, fans)), gain in zip(roles.items(), row):
                name = f"{stack}.layers.2.{name}"
                std = ref.expected_std(config, name, part)
                assert std == pytest.approx(gain * math.sqrt(2 / fans)), (init, stack, role)
                is_uniform = init in ("fairseq", "fairseq-0.12.2", "ds-init", "t-fixup", "b2t")
                bound = ref.expected_bound(config, name, part)
                assert bound == (pytest.approx(gain * math.sqrt(6 / fans)) if is_uniform else None), (init, role)
        is_drawn = init in ("fairseq-0.12.2", "b2t")
        of_bias = ref.expected_std(config, "encoder.layers.2.linear1.bias")
        assert of_bias == (pytest.approx((3 * 128) ** -0.5) if is_drawn else 0)
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
    cut = 0.9865782
    for init, name, std in (
        ("normal", "decoder.layers.2.linear2.weight", 0.02 * cut),
        ("normal", "source_embedding.weight", 0.02 * cut),
        ("llama-depth", "decoder.layers.2.linear2.weight", 0.02 * cut / 6**0.5),
        ("llama-depth", "decoder.layers.2.linear1.weight", 0.02 * cut),
        ("llama-depth", "source_embedding.weight", 1.0),
        ("fan-in", "decoder.layers.2.linear2.weight", cut * 320**-0.5),
        ("fan-in", "decoder.layers.2.linear1.weight", cut * 128**-0.5),
        ("fan-in", "source_embedding.weight", 128**-0.5),
    ):
        assert ref.expected_std({**shape, "init": init}, name) == pytest.approx(std, rel=1e-6), (init, name)
    release = {**shape, "init": "ds-init", "ds_init_mode": "release"}
    assert ref.expected_std(release, "encoder.layers.3.linear1.weight") == pytest.approx(4**-0.25 * math.sqrt(2 / 448))
    shared = {**shape, "init": "t-fixup", "tie_embeddings": "all"}
    assert ref.expected_std(shared, "embedding.weight") == pytest.approx(54**-0.25 * 128**-0.5)


def test_default_inits_and_first_values():
    theirs = {"prenorm": "smallinit", "postnorm": "smallinit", "branchnorm": "deepnorm", "resi-dual": "fairseq-0.12.2"}
    theirs |= {"hybridnorm": "gpt2", "hybridnorm-star": "gpt2", "mix-ln": "smallinit", "prores": "smallinit"}
    theirs |= {"gpas": "smallinit", "value-residual": "smallinit", "x0-lambdas": "smallinit"}
    theirs |= {"depth-scaled": "gpt2", "variance-gate": "gpt2"}
    own = ("deepnorm", "subln", "t-fixup", "r-fixup", "b2t")
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
        ({"residual": "ln-scaling", "ln_scaling_mode": "weight"}, "encoder.layers.1.norm1.weight", 2**-0.5),
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
