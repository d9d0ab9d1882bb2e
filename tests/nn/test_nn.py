"""The modules of normformer_rs.nn as ordinary modules: copies, hooks, compilers, resets, bad input."""

import copy
import pickle

import pytest
import torch
from nn_support import BETWEEN_LAYERS, FF, HEADS, MIXED, OPTIONS, RESIDUALS, D, encoder, shake
from torch import nn

import normformer_rs as nfrs
from normformer_rs import _core
from normformer_rs import nn as nfnn


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.one_in(test=8, all=5)
def test_copies_pickles_and_state_dicts(residual):
    model, x = encoder(residual), torch.randn(2, 5, D)
    expected = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), expected)
    other = encoder(residual)
    assert not torch.equal(other(x), expected)
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(other(x), expected)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert torch.equal(torch.func.functional_call(other, state, (x,)), expected)
    assert model.double()(x.double()).dtype == torch.float64
    half = model.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, atol=0.3, rtol=0.1)


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.one_in(test=3, all=2)
def test_the_fused_steps_run_and_equal_the_modules_one_by_one(residual):
    """A hook on every child takes the slow way; both agree, and in training the masks do, too."""
    model, x = encoder(residual, dropout=0.3), torch.randn(2, 5, D)
    before = _core.operator_counts()
    torch.manual_seed(0)
    fused = model(x)
    after = _core.operator_counts()
    kernel = (
        "residual"
        if residual in ("rezero", "r-fixup", "t-fixup", "olmo2", "gpas", "ngpt", *MIXED)
        else "scale_norm_residual"
    )
    assert after[kernel][0] > before[kernel][0] and after[kernel][1] == before[kernel][1]
    heard = []
    for name, child in model.named_modules():
        if isinstance(child, nfnn.ScaleNorm):
            child.register_forward_hook(lambda *_, n=name: heard.append(n))
    torch.manual_seed(0)
    torch.testing.assert_close(model(x), fused, rtol=1e-5, atol=1e-5)
    assert sorted(heard) == sorted(name for name, child in model.named_modules() if isinstance(child, nfnn.ScaleNorm))


def test_hooks_on_every_child_fire_and_surgery_on_a_child_takes_effect():
    model, x, heard = encoder("prenorm", dropout=0.1), torch.randn(2, 5, D), []
    for name, child in model.named_modules():
        child.register_forward_hook(lambda *_, n=name: heard.append(n))
    model(x)
    assert set(heard) == {name for name, _ in model.named_modules()} - {"layers"}
    model = encoder("prenorm")
    expected = model(x)
    for path in ("layers.0.norm2", "layers.1.norm1", "norm", "layers.0.linear1", "layers.0.self_attn.out_proj"):
        changed = copy.deepcopy(model)
        parent, leaf = path.rpartition(".")[::2]
        setattr(changed.get_submodule(parent), leaf, nn.Sequential(model.get_submodule(path), nn.Tanh()))
        assert (changed(x) - expected).abs().max() > 1e-3, path
    changed = copy.deepcopy(model)
    changed.layers[0].norm2 = nn.LayerNorm(D)
    assert (changed(x) - expected).abs().max() > 1e-3


def test_dropout_follows_torchs_generator():
    for residual in ("postnorm", "sandwich"):
        model, x = encoder(residual, dropout=0.5), torch.randn(2, 5, D)

        def run(seed, model=model, x=x):
            torch.manual_seed(seed)
            return model(x)

        assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))
        assert not torch.equal(run(1), model(x))
        model.eval()
        assert torch.equal(run(1), run(2))
    # rates of children count: a dropout turned off by hand, and one replaced
    model = encoder("prenorm", dropout=0.5)
    for layer in model.layers:
        layer.dropout.p = layer.dropout1.p = 0.0
        layer.dropout2, layer.self_attn.dropout = nn.Identity(), 0.0
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize(
    "residual",
    [
        "prenorm",
        "postnorm",
        "branchnorm",
        "subln",
        "r-fixup",
        "hybridnorm",
        "olmo2",
        "peri-ln",
        "prores",
        "b2t",
        *BETWEEN_LAYERS,
    ],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.one_in(all=18)
def test_compile_export_and_vmap(residual):
    model, x = encoder(residual).eval(), torch.randn(2, 5, D)
    expected = model(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(x), expected, rtol=1e-5, atol=1e-5)
    exported = torch.export.export(model, (x,))
    torch.testing.assert_close(exported.module()(x), expected, rtol=1e-5, atol=1e-5)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    call = lambda one: torch.func.functional_call(model, state, (one.unsqueeze(0),)).squeeze(0)  # noqa: E731
    torch.testing.assert_close(torch.vmap(call)(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.one_in(test=2)
def test_autocast_keeps_the_stream(residual):
    model, x = encoder(residual, dropout=0.1), torch.randn(2, 5, D)
    seen = []
    model.layers[1].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert {y.dtype, *seen} == {torch.float32}
    y.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)


def test_a_patched_forward_is_called():
    model, called = encoder("postnorm", dropout=0.0), []
    norm = model.layers[0].norm1
    norm.forward = lambda *inputs, **options: called.append(1) or type(norm).forward(norm, *inputs, **options)
    model(torch.randn(2, 5, D))
    assert called


def test_wrapped_layers_leave_padding_out_of_the_stacks_statistics():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    layer = nfnn.TransformerEncoderLayer(D, HEADS, FF, 0.0, norm="powernorm-v", residual="prenorm", batch_first=True)
    plain = nfnn.TransformerEncoder(layer, 2)
    wrapped = copy.deepcopy(plain)
    for i, layer in enumerate(wrapped.layers):
        wrapped.layers[i] = checkpoint_wrapper(layer)
    x, mask = torch.randn(2, 5, D), torch.tensor([[False] * 5, [False, False, True, True, True]])
    x[mask] *= 100
    a, b = (model(x, src_key_padding_mask=mask)[~mask] for model in (plain, wrapped))
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(plain.norm.running_phi, wrapped.norm.running_phi)


@pytest.mark.parametrize("norm_first", [False, True])
def test_norms_after_the_stacks_are_known_as_such(norm_first):
    options = {"norm": "powernorm", "powernorm_mode": "release", "powernorm_warmup": 8000, "norm_first": norm_first}
    model = nfnn.Transformer(D, HEADS, 2, 2, FF, **options)
    assert model.encoder.norm.warmup_iters == model.decoder.norm.warmup_iters == 1000
    assert model.encoder.layers[0].norm1.warmup_iters == 8000


def test_copies_keep_their_process_group():
    norm = nfnn.BatchNorm(D)
    norm.process_group = object()
    copied = copy.deepcopy(norm)
    assert copied.process_group is norm.process_group
    copied(torch.randn(4, D))
    assert not torch.equal(copied.running_mean, norm.running_mean)


def test_meta_device_costs_nothing_and_materialises():
    model = nfnn.Transformer(D, HEADS, 1, 1, FF, residual="subln", device="meta")
    assert all(p.is_meta for p in model.parameters())
    real = nfnn.Transformer(D, HEADS, 1, 1, FF, residual="subln")
    model.load_state_dict(real.state_dict(), assign=True)
    x = torch.randn(3, 2, D)
    assert torch.equal(model.eval()(x, x), real.eval()(x, x))


# Residual

OUT_OF_REACH = ("subln", "normformer", "r-fixup", "ln-scaling", "b2t", *BETWEEN_LAYERS)


@pytest.mark.parametrize(
    "scheme", ["prenorm", "postnorm", "deepnorm", "branchnorm", "rezero", "admin", "sandwich", "prores"]
)
def test_residual_around_any_module(scheme):
    place = {"layer": 1, "layers": 3}
    block = shake(nfnn.Residual(nn.Linear(D, D), D, scheme=scheme, **OPTIONS.get(scheme, {}), **place).double())
    x = torch.randn(4, D).double()
    f = block.sublayer
    norm = lambda i, x: nn.functional.layer_norm(x, (D,), *getattr(block, i).parameters())  # noqa: E731
    expected = {
        "prenorm": lambda: x + f(norm("norm2", x)),
        "postnorm": lambda: norm("norm2", x + f(x)),
        "deepnorm": lambda: norm("norm2", 6**0.25 * x + f(x)),
        "branchnorm": lambda: norm("norm2", x + f(x) / 4),
        "rezero": lambda: x + block.branch_scale * f(x),
        "admin": lambda: norm("norm2", block.residual_scale2 * x + f(x)),
        "sandwich": lambda: x + norm("post_norm2", f(norm("norm2", x))),
        "prores": lambda: x + f(norm("norm2", x)) / 8,
    }[scheme]()
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("residual", [None, *RESIDUALS])
@pytest.mark.parametrize("kind", ["encoder", "transformer", "residual"])
@pytest.mark.one_in(test=15, all=10)
def test_reset_parameters_gives_first_values_back(residual, kind):
    def build(seed):
        torch.manual_seed(seed)
        if kind == "residual":
            return nfnn.Residual(nn.Linear(D, D), D, scheme=residual or "postnorm", norm="batchnorm", layers=1)
        if kind == "transformer":
            return nfnn.Transformer(D, HEADS, 2, 2, FF, residual=residual)
        return nfnn.TransformerEncoder(nfnn.TransformerEncoderLayer(D, HEADS, FF, residual=residual), 2)

    if kind == "residual" and residual in (*OUT_OF_REACH, "hybridnorm", "hybridnorm-star", "olmo2", "ngpt"):
        return
    one, other = build(0).state_dict(), build(1).state_dict()
    constant = [name for name in one if torch.equal(one[name], other[name])]
    assert kind == "residual" or len(constant) > 3
    model = build(2).to("meta").to_empty(device="cpu")
    for t in (*model.parameters(), *model.buffers()):
        t.data.fill_(7 if t.dtype == torch.int64 else torch.nan)
    model.reset_parameters()
    state = model.state_dict()
    for name in constant:
        assert torch.equal(state[name], one[name]), name
    for name in state.keys() - {*constant}:
        if state[name].numel() < 100:  # deviations of few numbers differ by more
            assert state[name].isfinite().all() and not torch.equal(state[name], one[name]), name
        else:
            assert 0.5 < state[name].std() / one[name].std() < 2, name


def test_reset_parameters_of_somebody_elses_layers():
    encoder = nfnn.TransformerEncoder(nn.TransformerEncoderLayer(D, HEADS, FF), 2)
    before = {name: p.clone() for name, p in encoder.named_parameters()}
    with torch.no_grad():
        for p in encoder.parameters():
            p.fill_(torch.nan)
    encoder.reset_parameters()
    for name, p in encoder.named_parameters():
        assert p.isfinite().all() and (p.dim() > 1 or torch.equal(p, before[name]) or "linear" in name), name


def test_dlcls_sums_are_means_under_torchs_values_too():
    model = nfnn.Transformer(D, HEADS, 2, 2, FF, residual="dlcl", init="torch", bias=False)
    expected = torch.ones(3, 3).tril() / torch.arange(1, 4)[:, None]
    assert torch.equal(model.encoder.combine.weight, expected)
    model.reset_parameters()
    assert torch.equal(model.decoder.combine.weight, expected)
    assert not [name for name, _ in model.named_parameters() if "bias" in name]


def test_biases_and_norms_of_a_lone_encoder():
    layer = nfnn.TransformerEncoderLayer(D, HEADS, FF, bias=False, residual="prenorm", encoder_norm="layernorm")
    encoder = nfnn.TransformerEncoder(layer, 2)
    assert [name for name, _ in encoder.named_parameters() if "bias" in name] == []
    layer = nfnn.TransformerEncoderLayer(D, HEADS, FF, residual="prenorm", encoder_norm="rmsnorm")
    assert {type(m) for m in nfnn.TransformerEncoder(layer, 2).modules() if "Norm" in type(m).__name__} == {
        nfnn.RMSNorm
    }
    with pytest.raises(ValueError, match="the encoder stands alone"):
        nfnn.TransformerEncoderLayer(D, HEADS, FF, decoder_norm="rmsnorm")
    with pytest.raises(ValueError, match='unknown option "tensorized_rank"'):  # the loop's language models have that
        nfnn.TransformerEncoderLayer(D, HEADS, FF, tensorized_rank=3)
    with pytest.raises(ValueError, match="encoder_norm"):
        nfrs.Transformer(nfrs.TransformerConfig(vocab_size=9, architecture="decoder-only", encoder_norm="rmsnorm"))


def test_residual_passes_tuples_and_arguments():
    block = nfnn.Residual(nn.MultiheadAttention(D, HEADS, batch_first=True), D, kind="self-attention")
    x = torch.randn(2, 3, D)
    out, weights = block(x, x, x)
    assert out.shape == x.shape and weights.shape == (2, 3, 3)
    attentions = {"hybridnorm": "self-attention", "olmo2": "cross-attention", "value-residual": "self-attention"}
    reaching = {**dict.fromkeys(OUT_OF_REACH, "feed-forward"), **attentions}
    for scheme, kind in reaching.items():
        with pytest.raises(ValueError, match="out of a Residual's reach"):
            nfnn.Residual(nn.Linear(D, D), D, scheme=scheme, kind=kind)


@pytest.mark.parametrize("fill", [-torch.inf, -1e9, -9984.0, torch.finfo(torch.float32).min])
def test_float_masks_hide_padding_from_statistics(fill):
    """What attention's softmax gives no weight is padding for the norms too."""
    layer = nfnn.TransformerEncoderLayer(
        D, HEADS, FF, 0.0, batch_first=True, residual="subln", norm="batchnorm", encoder_layers=1
    )
    x, padding = torch.randn(3, 5, D), torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 1], [0] * 5]).bool()
    expected, twin = copy.deepcopy(layer)(x, src_key_padding_mask=padding), copy.deepcopy(layer)
    found = twin(x, src_key_padding_mask=torch.zeros(3, 5).masked_fill(padding, fill))
    torch.testing.assert_close(found[~padding], expected[~padding])
    soft = copy.deepcopy(layer)(x, src_key_padding_mask=torch.zeros(3, 5).masked_fill(padding, -3.0))
    assert (soft - expected).abs()[~padding].max() > 1e-3  # less attention is no padding


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: nfnn.TransformerEncoderLayer(D, HEADS, residual="prnorm"), r"did you mean .prenorm"),
        (lambda: nfnn.TransformerEncoderLayer(D, HEADS, norm="scalnorm"), r"did you mean .scalenorm"),
        (lambda: nfnn.TransformerEncoderLayer(D, HEADS, init="deepnrm"), r"did you mean .deepnorm"),
        (lambda: nfnn.TransformerEncoderLayer(D, HEADS, branchnorm_step=3), r"did you mean .branchnorm_steps"),
        (lambda: nfnn.TransformerEncoderLayer(D, HEADS, activation="rel"), r"did you mean .relu"),
        (lambda: nfnn.TransformerEncoderLayer(D, HEADS, layer=3, encoder_layers=2), r"layer must lie in 0 … 1"),
        (lambda: nfnn.TransformerEncoder(encoder().layers[0], 0), "must lie between 1 and 10000"),
        (lambda: encoder()(torch.randn(2, 5, D), torch.ones(4, 5, dtype=torch.bool)), r"must be \(5, 5\) or"),
        (
            lambda: encoder()(torch.randn(2, 5, D), src_key_padding_mask=torch.ones(2, 4, dtype=torch.bool)),
            r"key padding mask must be \(2, 5\); got \(2, 4\)",
        ),
        (lambda: encoder()(torch.randn(2, 5, D), torch.ones(5, 5, dtype=torch.long)), "must be bool"),
        (
            lambda: encoder()(torch.randn(2, 5, D), src_key_padding_mask=torch.ones(2, 5, dtype=torch.long)),
            "got torch.int64: of a tokenizer's mask, 1 at real tokens, give attention_mask == 0",
        ),
        (lambda: encoder("t-fixup")(torch.randn(2, 5, D + 1)), "16"),
    ],
)
def test_bad_input_is_said(call, message):
    with pytest.raises(ValueError, match=message):
        call()
