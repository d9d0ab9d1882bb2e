"""The Rust Transformer against the plain PyTorch oracle, and against torch.nn's layers."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import normformer_rs as nfrs
import reference as ref

NORMS = [entry["name"] for entry in nfrs.tables()["norms"]]
RESIDUALS = [entry["name"] for entry in nfrs.tables()["residuals"]]
PAIRS = [pair for pair in itertools.product(NORMS, RESIDUALS) if ref.is_defined(*pair)]
SHAPE = {"vocab_size": 23, "d_model": 16, "d_ff": 24, "heads": 4, "encoder_layers": 2, "decoder_layers": 3}
SOURCES = [[5, 6, 7, 8, 9, 2], [10, 2], [11, 12, 13, 2]]
TARGETS = [[0, 14, 15], [0, 16, 17, 18, 19], [0]]


FAMILIES = [entry["name"] for entry in nfrs.tables()["families"]]
RMSNORM = (
    {"rmsnorm_zero_centred": True},
    {"rmsnorm_cast": "before"},
    {"rmsnorm_cast": "scale", "rmsnorm_weight": False},
    {"rmsnorm_eps_place": "outside", "residual": "postnorm"},
    {"rmsnorm_part": 0.5, "rmsnorm_zero_centred": True, "residual": "sandwich"},
)
TOKENS = {"value_embeddings": True, "smear": True, "architecture": "decoder-only", "d_model": 32}
PRORES = ("prenorm", "postnorm", "deepnorm", "sandwich", "ln-scaling")


def build(dtype=torch.float64, **options):
    """A module and the oracle's state dict of the same random weights."""
    if options.get("norm") in ref.BLENDED_NORMS:  # η = 1 doubles the stream at each norm
        options = {"repbn_start": "zeros"} | options
    config = nfrs.TransformerConfig(**{**SHAPE, "dropout": 0.0, **options})
    model = nfrs.Transformer(config, seed=3).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():  # away from γ = 1 and β = 0
            p.add_(torch.randn_like(p) * 0.1)
    state = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    state |= {name: b.clone() for name, b in model.named_buffers()}
    return model, state, {**SHAPE, **options}


def compare(model, state, options, source, target, dropout=None, rtol=1e-9):
    logits = model(source, target)
    options = {k: v for k, v in options.items() if "dropout" not in k}
    expected = ref.forward(state, options, source, target, dropout)
    real = target != ref.PAD
    torch.testing.assert_close(logits[real], expected[real], rtol=rtol, atol=rtol)
    weight = torch.randn_like(expected)[real]
    (logits[real] * weight).sum().backward()
    (expected[real] * weight).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(
            p.grad, state[name].grad, rtol=rtol, atol=10 * rtol, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("norm,residual", PAIRS)
@pytest.mark.one_in(test=35, all=25)
def test_logits_and_every_gradient_equal_the_oracles(norm, residual):
    model, state, options = build(norm=norm, residual=residual)
    compare(model, state, options, ref.pad(SOURCES), ref.pad(TARGETS))


@pytest.mark.parametrize(
    "options",
    [
        {"residual": "dlcl", "dlcl_norm": "post"},
        {"residual": "dlcl", "dlcl_norm": "post", "norm": "scalenorm-fixed"},
        {"residual": "r-fixup", "r_fixup_mode": "paper"},
        {"residual": "normformer", "normformer_mode": "fairseq", "normformer_residual_scale": True},
        {"residual": "normformer", "normformer_head_scale": False, "normformer_attention_norm": False},
        {"residual": "normformer", "normformer_ffn_norm": False},
        {"residual": "layerscale", "layerscale_init": 0.5},
        {"residual": "peri-ln", "peri_ln_embedding_norm": False},
        {"residual": "ln-scaling", "ln_scaling_mode": "weight"},
        {"residual": "ln-scaling", "ln_scaling_mode": "weight", "norm": "scalenorm"},
        {"residual": "mix-ln", "mix_ln_part": 0.5},
        {"residual": "peri-ln*1,hybridnorm*1,olmo2", "encoder_layers": 3},
        {"residual": "attnres", "attnres_block": 2},
        {"residual": "attnres", "attnres_block": 3, "norm": "scalenorm-fixed"},
        {"residual": "attnres", "attnres_block": 100},
        {"residual": "mhc", "mhc_streams": 1},
        {"residual": "mhc", "mhc_streams": 2, "mhc_iterations": 1},
        {"residual": "mhc", "mhc_iterations": 3, "norm": "scalenorm-fixed"},
        {"residual": "attnres", "attnres_form": "normed", "attnres_block": 2},
        {"residual": "attnres", "attnres_form": "normed", "attnres_queries": 3},
        {"residual": "attnres", "attnres_form": "normed", "attnres_queries": 3, "kv_heads": 1, "positions": "rotary"},
        {"residual": "attnres", "attnres_form": "normed", "attnres_queries": 3, "norm": "batchnorm"},
        {"residual": "mhc", "mhc_streams": 3, "mhc_end": "mean"},
        {"residual": "mhc", "mhc_streams": 3, "mhc_mixing": "none", "mhc_magnitude": 1.5},
        {"residual": "mhc", "mhc_streams": 3, "mhc_mixing": "channel", "mhc_rank": 5},
        {"residual": "mhc", "mhc_mixing": "channel", "mhc_rank": 3, "mhc_end": "mean", "norm": "scalenorm-fixed"},
        {"residual": "hyper-connections", "hyper_connections_streams": 3},
        {"residual": "hyper-connections", "hyper_connections_dynamic": False},
        {"residual": "mhc-lite", "mhc_lite_streams": 3},
        {"residual": "x0-lambdas", "x0_lambdas_backout": True},
        {"residual": "ngpt", "activation": "swiglu", "positions": "rotary", "kv_heads": 2},
        {"residual": "ngpt", "activation": "geglu", "logit_scale": True, "output_bias": True, "tie_embeddings": "none"},
        {"logit_scale": True, "fixnorm": True, "tie_embeddings": "decoder"},
        {"value_embeddings": True, "architecture": "decoder-only", "kv_heads": 2, "decoder_layers": 3},
        {"smear": True, "architecture": "decoder-only"},
        {**TOKENS, "residual": "x0-lambdas", "norm": "rmsnorm", "positions": "rotary"},
        {**TOKENS, "residual": "sandwich", "v_norm": "weighted", "qk_l2norm": 30, "fixnorm": True},
        *({"residual": "prores", "prores_steps": 2, "prores_scheme": name} for name in PRORES),
        {"residual": "prores", "prores_steps": 2, "prores_scheme": "ln-scaling", "ln_scaling_mode": "weight"},
        {"residual": "postnorm*1,prores", "prores_steps": 2, "prores_scheme": "deepnorm", "norm": "scalenorm-fixed"},
        {"residual": "b2t", "norm": "scalenorm-fixed"},
        {"residual": "b2t*1,prenorm"},
        {"qk_l2norm": 72},
        {"qk_l2norm": 2, "norm": "batchnorm", "residual": "r-fixup"},
        {"qk_l2norm": 30, "residual": "subln", "architecture": "decoder-only"},
        *({"norm": "rmsnorm", **options} for options in RMSNORM),
        {"residual": "ln-scaling", "ln_scaling_mode": "weight", "norm": "rmsnorm:gemma"},
        {"encoder_norm": "rmsnorm:gemma", "decoder_norm": "rmsnorm", "rmsnorm_zero_centred": True},
        {"norm": "rmsnorm:original", "norm_eps": 0.5, "qk_norm": True},
        {"qk_norm": True},
        {"qk_norm": True, "norm": "scalenorm-fixed", "residual": "r-fixup"},
        {"qk_norm": True, "norm": "rmsnorm", "residual": "normformer"},
        {"residual": "postnorm*1,prenorm"},
        {"residual": "postnorm*1/2,prenorm", "norm": "scalenorm-fixed"},
        {"residual": "subln*1,rezero"},
        {"residual": "sandwich*1,branchnorm*1,normformer", "encoder_layers": 3},
        {"fixnorm": True},
        {"fixnorm": True, "norm": "scalenorm", "output_bias": True},
        {"fixnorm": True, "tie_embeddings": "decoder"},
        {"tie_embeddings": "none", "output_bias": True},
        {"positions": "fairseq"},
        {"encoder_norm": "scalenorm", "decoder_norm": "rmsnorm"},
        {"norm_eps": 0.5, "norm": "scalenorm"},
    ],
    ids=str,
)
@pytest.mark.one_in(test=6, all=4)
def test_options(options):
    model, state, options = build(**options)
    source = None if options.get("architecture") == "decoder-only" else ref.pad(SOURCES)
    compare(model, state, options, source, ref.pad(TARGETS))


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("norm", FAMILIES)
@pytest.mark.one_in(test=37, all=28)
def test_every_family_under_every_scheme(norm, residual):
    if norm == "rmsnorm:partial" and residual.startswith("hybridnorm"):
        with pytest.raises(nfrs.InputError, match=r"rmsnorm_part = 0\.0625 of 4 numbers is none"):
            build(norm=norm, residual=residual)
        return
    # Of 16 numbers it would measure one, and rows that happen to begin near 0 would magnify every rounding.
    shape = {"d_model": 64, "d_ff": 96} if norm == "rmsnorm:partial" else {}
    model, state, options = build(norm=norm, residual=residual, **shape)
    compare(model, state, options, ref.pad(SOURCES), ref.pad(TARGETS))


def test_a_factor_of_scores_starts_as_published():
    """log2(L² − L), one for each attention; docs/spec.md §2.1."""
    config = nfrs.TransformerConfig(**SHAPE, qk_l2norm=72)
    scales = {name: p for name, p in nfrs.Transformer(config).named_parameters() if "qk_scale" in name}
    assert len(scales) == 2 + 2 * 3
    assert all(p.shape == (1,) and abs(p.item() - 12.319672120946995) < 1e-6 for p in scales.values())


@pytest.mark.parametrize("norm,residual", sorted({*itertools.product(NORMS, RESIDUALS)} - {*PAIRS}))
def test_pairs_that_are_not_defined_are_refused(norm, residual):
    with pytest.raises(nfrs.InputError, match=f'residual "{residual}" has norms on queries and keys, which {norm}'):
        build(norm=norm, residual=residual)


def test_a_norm_without_a_weight_has_no_first_value_to_set():
    with pytest.raises(nfrs.InputError, match=r'"ln-scaling" sets the first value .* scalenorm-fixed has none'):
        build(norm="scalenorm-fixed", residual="ln-scaling", ln_scaling_mode="weight")


@pytest.mark.parametrize("norm,residual", PAIRS)
@pytest.mark.one_in(test=21, all=15)
def test_decoder_only(norm, residual):
    model, state, options = build(architecture="decoder-only", norm=norm, residual=residual)
    compare(model, state, options, None, ref.pad(TARGETS))


TENSORIZED = {"architecture": "decoder-only", "attention": "tensorized", "tensorized_rank": 6, "tensorized_segment": 7}


@pytest.mark.parametrize(
    "norm,residual", [*((norm, "prenorm") for norm in NORMS), *(("layernorm", r) for r in RESIDUALS)]
)
@pytest.mark.one_in(test=4, all=3)
def test_tensorized_attention(norm, residual):
    if residual in ("normformer", "subln", "hybridnorm", "hybridnorm-star", "olmo2", "value-residual", "ngpt"):
        with pytest.raises(nfrs.InputError, match=f'residual "{residual}" has a part between attention.*dlcl'):
            build(**TENSORIZED, norm=norm, residual=residual)
        return
    model, state, options = build(**TENSORIZED, norm=norm, residual=residual)
    compare(model, state, options, None, ref.pad(TARGETS))


def test_tensorized_attention_reads_segments():
    model, state, options = build(**TENSORIZED)
    whole = ref.pad([[0, *range(5, 11)], [0, 12]])  # one as long as the model reads
    compare(model, state, options, None, whole)
    before = model(None, whole)
    whole[0, 5] = 20
    after = model(None, whole)
    assert torch.equal(before[0, :5], after[0, :5]) and not torch.isclose(before[0, 5:], after[0, 5:]).all(-1).any()
    with pytest.raises(nfrs.InputError, match=r"8 tokens in a row, .* reads at most tensorized_segment = 7"):
        model(None, ref.pad([[0, *range(5, 12)]]))
    model.float().precision = "bf16"
    rough = model(None, whole)
    assert (rough.float() - after).abs().max() < 0.1 * after.std()
    assert model(None, torch.full((2, 3), ref.PAD)).shape == (2, 3, 23)


def test_tensorized_attention_as_profiled():
    """Padding looks at its whole sentence there."""
    model, state, options = build(**TENSORIZED, residual="admin")
    tokens = ref.pad(TARGETS)
    expected = ref.profile_admin(state, options, None, tokens, ref.Dropout())
    model.profile(None, tokens)
    found = dict(model.named_parameters())
    for name, omega in expected.items():
        torch.testing.assert_close(found[name], omega, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"architecture": "encoder-decoder"}, "is a language model's"),
        ({"attention_dropout": 0.1}, "no weights to drop, so attention_dropout = 0.1"),
        ({"tensorized_rank": 0}, "tensorized_rank must be at least 1, got 0"),
        ({"attention": "multi-head"}, 'an option of tensorized, and .* attention "multi-head": leave it out'),
        ({"attention": "linear"}, "multi-head, tensorized"),
    ],
    ids=str,
)
def test_tensorized_attention_refuses(options, message):
    with pytest.raises(nfrs.InputError, match=message):
        nfrs.Transformer(nfrs.TransformerConfig(**{**SHAPE, **TENSORIZED, **options}))


@pytest.mark.parametrize(
    "options,error,message",
    [
        ({"residual": "dlcl", "encoder_layers": 10**9}, nfrs.InputError, "encoder_layers must be at most 10000"),
        ({"residual": "denseformer", "decoder_layers": 10001}, nfrs.InputError, "at most 10000, got 10001"),
        ({"residual": "mhc", "mhc_streams": 10**5}, nfrs.InputError, "mhc_streams must be at most 100, got 100000"),
        ({"residual": "hyper-connections", "hyper_connections_streams": 101}, nfrs.InputError, "at most 100, got 101"),
        ({**TENSORIZED, "tensorized_segment": 2**62}, RuntimeError, "Storage size calculation overflowed"),
    ],
    ids=str,
)
def test_numbers_beyond_any_memory_are_refused(options, error, message):
    """They are an error, not the end of the process, which an allocation of Rust's would be."""
    with pytest.raises(error, match=message):
        nfrs.Transformer(nfrs.TransformerConfig(**{**SHAPE, **options}))


def test_f32_within_rounding():
    model, state, options = build(dtype=torch.float32)
    # eps 1.2e-7 times the square root of the few hundred additions on the longest path, times a margin of ten
    compare(model, state, options, ref.pad(SOURCES), ref.pad(TARGETS), rtol=2e-5)


def test_bf16_products_stay_near():
    model, _, _ = build(dtype=torch.float32)
    exact = model(ref.pad(SOURCES), ref.pad(TARGETS))
    model.precision = "bf16"
    rough = model(ref.pad(SOURCES), ref.pad(TARGETS))
    assert rough.dtype == torch.bfloat16
    # bf16 rounds at 2^-9; five layers of products on unit-size rows
    assert (rough.float() - exact).abs().max() < 0.1 * exact.std()
    rough.float().square().mean().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.one_in(test=6, all=3)
def test_dropout_masks_are_the_oracles(residual, monkeypatch):
    model, state, options = build(
        residual=residual, dropout=0.3, attention_dropout=0.2, activation_dropout=0.1, embedding_dropout=0.25
    )
    seed = torch.tensor([1234567890123, 7, 2])
    monkeypatch.setattr(nfrs.Transformer, "_draw", staticmethod(lambda device: seed))
    dropout = ref.Dropout(
        embedding=0.25, attention=0.2, activation=0.1, residual=0.3, seed=1234567890123, update=7, micro_batch=2
    )
    compare(model.train(), state, options, ref.pad(SOURCES), ref.pad(TARGETS), dropout)


def test_padding_changes_nothing():
    model, _, _ = build()
    alone = [model(torch.tensor([s]), torch.tensor([t]))[0] for s, t in zip(SOURCES, TARGETS)]
    together = model(ref.pad(SOURCES), ref.pad(TARGETS))
    longest = max(map(len, SOURCES))
    left = model(torch.tensor([[ref.PAD] * (longest - len(s)) + s for s in SOURCES]), ref.pad(TARGETS))
    for i, one in enumerate(alone):
        torch.testing.assert_close(together[i, : len(one)], one, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(left[i, : len(one)], one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm_first", [False, True])
def test_equals_torch_nn_from_the_same_weights(norm_first):
    """The stacks alone: torch.nn's layers on our embeddings, ours minus the output projection, tied."""
    model, state, _ = build(residual="prenorm" if norm_first else "postnorm")
    d, heads, ff = SHAPE["d_model"], SHAPE["heads"], SHAPE["d_ff"]
    end = nn.LayerNorm(d) if norm_first else None
    common = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(d, heads, ff, **common), SHAPE["encoder_layers"], end, enable_nested_tensor=False
    ).double()
    end = nn.LayerNorm(d) if norm_first else None
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(d, heads, ff, **common), SHAPE["decoder_layers"], end)
    decoder = decoder.double()
    for part, prefix in ((encoder, "encoder."), (decoder, "decoder.")):
        part.load_state_dict({k.removeprefix(prefix): v for k, v in model.state_dict().items() if k.startswith(prefix)})
    source, target = ref.pad(SOURCES), ref.pad(TARGETS)

    def embed(tokens):
        positions = ref.sinusoids(torch.arange(tokens.shape[1]), d, "twt").double()
        return state["embedding.weight"][tokens] * d**0.5 + positions

    length = target.shape[1]
    memory = encoder(embed(source), src_key_padding_mask=source == ref.PAD)
    hidden = decoder(
        embed(target),
        memory,
        tgt_mask=torch.ones(length, length, dtype=torch.bool).triu(1),
        tgt_key_padding_mask=target == ref.PAD,
        memory_key_padding_mask=source == ref.PAD,
    )
    expected = hidden @ state["embedding.weight"].T
    real = target != ref.PAD
    torch.testing.assert_close(model(source, target)[real], expected[real], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("curve", ["linear", "exp", "sigmoid"])
@pytest.mark.parametrize("t", [1, 40, 99, 100, 500])
def test_growth(curve, t):
    model, state, options = build(residual="branchnorm", branchnorm_growth=curve, branchnorm_steps=100)
    model.set_num_updates(t)
    state |= {name: b.clone() for name, b in model.named_buffers()}
    assert state["encoder.t"].item() == state["decoder.t"].item() == t
    compare(model, state, options, ref.pad(SOURCES), ref.pad(TARGETS))


@pytest.mark.parametrize("t", [1, 3, 4, 7, 100])
def test_layers_grow_one_after_the_other(t):
    model, state, options = build(residual="prores", prores_steps=4)
    model.set_num_updates(t)
    state |= {name: b.clone() for name, b in model.named_buffers()}
    compare(model, state, options, ref.pad(SOURCES), ref.pad(TARGETS))


@pytest.mark.parametrize("norm", ["layernorm", "batchnorm", "powernorm-v", "powernorm", "prepbn"])
def test_profiling(norm):
    """Padding counts in the gains and enters no norm's statistics."""
    model, state, options = build(residual="admin", norm=norm)
    with torch.no_grad():
        for weights in (model.state_dict(), state):  # as at the start: padding has a zero row
            weights["embedding.weight"][ref.PAD] = 0
    model.profile(ref.pad(SOURCES), ref.pad(TARGETS))
    expected = ref.profile_admin(state, options, ref.pad(SOURCES), ref.pad(TARGETS), ref.Dropout())
    gains = {name: p for name, p in model.named_parameters() if "residual_scale" in name}
    assert gains.keys() == expected.keys() and len(gains) == 2 * 2 + 3 * 3
    for name, gain in gains.items():
        torch.testing.assert_close(gain.detach(), expected[name].expand_as(gain), rtol=1e-10, atol=0, msg=name)


def test_a_gain_that_is_not_finite_is_refused():
    """repbn's output grows with its input, and so the gains from sublayer to sublayer."""
    config = nfrs.TransformerConfig(vocab_size=40, d_model=32, d_ff=64, heads=4, norm="repbn", residual="admin")
    with pytest.raises(nfrs.InputError, match="a gain on x of inf: expected a finite number"):
        nfrs.Transformer(config, seed=1).profile(ref.pad(SOURCES), ref.pad(TARGETS))


def test_only_admin_is_profiled():
    plain, _, _ = build(residual="deepnorm")
    with pytest.raises(ValueError, match="nothing to profile"):
        plain.profile(ref.pad(SOURCES), ref.pad(TARGETS))


@pytest.mark.parametrize("ties", ["all", "none"])
@pytest.mark.parametrize("init", [entry["name"] for entry in nfrs.tables()["inits"]])
@pytest.mark.one_in(test=10, all=7)
def test_initial_standard_deviations(init, ties):
    options = {**SHAPE, "vocab_size": 600, "d_model": 128, "d_ff": 320, "init": init, "tie_embeddings": ties}
    model = nfrs.Transformer(nfrs.TransformerConfig(**options), seed=1)
    for name, p in model.named_parameters():
        blocks = p.detach().chunk(3) if name.endswith("in_proj_weight") else [p.detach()]
        for part, block in enumerate(blocks):
            expected, bound = ref.expected_std(options, name, part), ref.expected_bound(options, name, part)
            assert bound is None or block.abs().max() <= bound * (1 + 1e-6), name
            if expected == 0:
                assert (block == ref.expected_mean(options, name)).all(), name
            else:
                # a sample's standard deviation of n numbers is within 5/√(2n) of the true one
                assert abs(block.std().item() / expected - 1) < 5 / (2 * block.numel()) ** 0.5 + 2e-3, name


def test_it_is_an_ordinary_module(tmp_path):
    import copy
    import pickle

    model, _, _ = build(dtype=torch.float32)
    source, target = ref.pad(SOURCES), ref.pad(TARGETS)
    expected = model(source, target)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(source, target), expected)
    other = nfrs.Transformer(model.config, seed=9)
    assert not torch.equal(other(source, target), expected)
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(other(source, target), expected)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.clone() for p in model.parameters()]
    model(source, target).square().mean().backward()
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_bad_input_is_said():
    model, _, _ = build()
    with pytest.raises(ValueError, match="token 23, but the vocabulary has 23 types"):
        model(torch.tensor([[23]]), ref.pad(TARGETS[:1]))
    with pytest.raises(ValueError, match="int64 tensor"):
        model(torch.zeros(1, 2), ref.pad(TARGETS[:1]))
    with pytest.raises(ValueError, match="as many sentences"):
        model(ref.pad(SOURCES), ref.pad(TARGETS[:2]))
    with pytest.raises(ValueError, match="needs source sentences"):
        model(None, ref.pad(TARGETS))
    with pytest.raises(ValueError, match=r"did you mean .scalenorm"):
        nfrs.TransformerConfig(norm="scalnorm")
    with pytest.raises(ValueError, match="divisible by heads"):
        nfrs.Transformer(nfrs.TransformerConfig(**{**SHAPE, "heads": 3}))


@pytest.mark.parametrize("limit", [None, "AVX2"])
@pytest.mark.one_in(all=2)
def test_bf16_products_after_the_import(limit):
    """In a process of its own: on some virtual machines torch alone dies of the product. A user's limit stays."""
    code = """if True:
        import subprocess, torch, normformer_rs
        x = torch.ones(64, 64, dtype=torch.bfloat16)
        assert (x @ x)[0, 0] == 64
        print(subprocess.check_output("printf %s $ONEDNN_MAX_CPU_ISA", shell=True, text=True))
    """
    environment = {name: value for name, value in os.environ.items() if not name.endswith("MAX_CPU_ISA")}
    environment |= {} if limit is None else {"ONEDNN_MAX_CPU_ISA": limit}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert done.stdout.strip() in ({"AVX2"} if limit else {"", "AVX512_CORE_FP16"})
