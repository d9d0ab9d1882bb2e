"""The modules of normformer_rs.nn against torch.nn's, and against the Rust model whose skeleton they are."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import normformer_rs as nfrs
import reference as ref
from normformer_rs import _core
from normformer_rs import nn as nfnn

NORMS = [entry["name"] for entry in nfrs.tables()["norms"]]
RESIDUALS = [entry["name"] for entry in nfrs.tables()["residuals"]]
D, HEADS, FF = 16, 4, 24
SOURCES = [[5, 6, 7, 8, 9, 2], [10, 2], [11, 12, 13, 2]]
TARGETS = [[0, 14, 15], [0, 16, 17, 18, 19], [0]]
SHAPE = {"vocab_size": 23, "d_model": D, "d_ff": FF, "heads": HEADS, "encoder_layers": 2, "decoder_layers": 3}
# 1/4 is exact in f32
OPTIONS = {"branchnorm": {"branchnorm_steps": 4}, "layerscale": {"layerscale_init": 0.1}}


def shake(model):
    """Away from γ = 1, β = 0 and branches that start at zero."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def rust_and_skeleton(norm="layernorm", residual="prenorm", **options):
    """The Rust loop's model, its skeleton of the same weights, and what the stacks read."""
    options = {**OPTIONS.get(residual, {}), **options}
    config = nfrs.TransformerConfig(**{**SHAPE, "dropout": 0.0, "norm": norm, "residual": residual, **options})
    rust = shake(nfrs.Transformer(config, seed=3).double())
    skeleton = nfnn.Transformer(
        D,
        HEADS,
        2,
        3,
        FF,
        0.0,
        batch_first=True,
        dtype=torch.float64,
        norm=norm,
        residual=residual,
        **options,
    )
    state = rust.state_dict()
    skeleton.load_state_dict({k: v for k, v in state.items() if k.startswith(("encoder.", "decoder."))}, strict=True)
    return rust, skeleton


def embed(table, tokens):
    real = tokens != ref.PAD
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    return (table[tokens] * D**0.5 + ref.sinusoids(positions, D, "twt").to(table.dtype)) * real.unsqueeze(-1)


def run_skeleton(skeleton, table, source, target):
    length = target.shape[1]
    out = skeleton(
        embed(table, source),
        embed(table, target),
        tgt_mask=torch.ones(length, length, dtype=torch.bool).triu(1),
        src_key_padding_mask=source == ref.PAD,
        tgt_key_padding_mask=target == ref.PAD,
        memory_key_padding_mask=source == ref.PAD,
    )
    return out @ table.T


def compare(rust, skeleton, left=False, rtol=1e-9):
    source, target = ref.pad(SOURCES), ref.pad(TARGETS)
    if left:
        longest = source.shape[1]
        source = torch.tensor([[ref.PAD] * (longest - len(s)) + s for s in SOURCES])
    table = rust.state_dict()["embedding.weight"].clone().requires_grad_()
    expected, logits = rust(source, target), run_skeleton(skeleton, table, source, target)
    real = target != ref.PAD
    torch.testing.assert_close(logits[real], expected[real], rtol=rtol, atol=rtol)
    weight = torch.randn_like(expected)[real]
    (expected[real] * weight).sum().backward()
    (logits[real] * weight).sum().backward()
    grads = {name: p.grad for name, p in rust.named_parameters()}
    torch.testing.assert_close(table.grad, grads.pop("embedding.weight"), rtol=10 * rtol, atol=10 * rtol)
    ours = {name: p.grad for name, p in skeleton.named_parameters()}
    assert ours.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(ours[name], grad, rtol=10 * rtol, atol=10 * rtol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("norm", NORMS)
def test_the_skeleton_is_the_rust_model(norm, residual):
    compare(*rust_and_skeleton(norm, residual))


@pytest.mark.parametrize(
    "options",
    [
        {"residual": "dlcl", "dlcl_norm": "post"},
        {"residual": "normformer", "normformer_residual_scale": True},
        {"residual": "normformer", "normformer_mode": "fairseq"},
        {"residual": "r-fixup", "r_fixup_mode": "paper"},
        {"residual": "branchnorm", "branchnorm_growth": "sigmoid"},
        {"qk_norm": True},
        {"qk_norm": True, "norm": "scalenorm", "residual": "r-fixup"},
        {"residual": "postnorm*1/3,prenorm"},
        {"residual": "subln*1,rezero"},
        {"residual": "sandwich*1,postnorm", "norm": "scalenorm-fixed"},
        {"norm": "powernorm", "powernorm_mode": "release", "residual": "prenorm"},
        {"norm": "lpnorm", "lpnorm_p": 3.0, "groupscaling": 0},
        {"encoder_norm": "scalenorm", "decoder_norm": "rmsnorm", "residual": "sandwich"},
    ],
    ids=str,
)
def test_options_and_left_padding(options):
    rtol = 1e-7 if "branchnorm_growth" in options else 1e-9  # α_t comes to Python in f32
    compare(*rust_and_skeleton(**options), left=True, rtol=rtol)


# torch.nn as it is


def pair(kind, norm_first=False, **options):
    """torch.nn's module and ours, of one seed."""
    made = []
    for library in (nn, nfnn):
        torch.manual_seed(5)
        common = {"dropout": 0.1, "norm_first": norm_first, "dtype": torch.float64, **options}
        if kind == "Transformer":
            made.append(library.Transformer(D, HEADS, 2, 2, FF, **common))
            continue
        layer = getattr(library, f"Transformer{kind}Layer")(D, HEADS, FF, **common)
        nested = {"enable_nested_tensor": False} if kind == "Encoder" else {}
        made.append(getattr(library, f"Transformer{kind}")(layer, 2, nn.LayerNorm(D, dtype=torch.float64), **nested))
    return made


def masks(batch, length, kind):
    causal = torch.ones(length, length, dtype=torch.bool).triu(1)
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[0, -2:] = True
    if kind == "float":
        return torch.zeros(length, length).double().masked_fill(causal, -1e4), torch.zeros(batch, length).double()
    return {"none": (None, None), "causal": (causal, None), "padding": (None, padding), "both": (causal, padding)}[kind]


@pytest.mark.parametrize("mask", ["none", "causal", "padding", "both", "float"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", ["Encoder", "Decoder", "Transformer"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_it_is_torchs_from_the_same_seed(kind, norm_first, mask):
    """Keys, first values, outputs and gradients."""
    theirs, ours = pair(kind, norm_first, batch_first=True)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    for a, b in zip(theirs.parameters(), ours.parameters()):
        assert torch.equal(a, b)
    shake(theirs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    theirs.eval(), ours.eval()
    x, y = torch.randn(3, 5, D).double(), torch.randn(3, 5, D).double()
    attention, padding = masks(3, 5, mask)
    arguments = {
        "Encoder": ((x,), {"mask": attention, "src_key_padding_mask": padding}),
        "Decoder": ((y, x), {"tgt_mask": attention, "memory_key_padding_mask": padding}),
        "Transformer": ((x, y), {"tgt_mask": attention, "src_mask": attention, "src_key_padding_mask": padding}),
    }[kind]
    a, b = (model(*arguments[0], **arguments[1]) for model in (theirs, ours))
    torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)
    weight = torch.randn_like(a)
    (a * weight).sum().backward(), (b * weight).sum().backward()
    for (name, p), q in zip(theirs.named_parameters(), ours.parameters()):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"activation": "gelu"}, {"activation": torch.tanh}],
    ids=["plain", "no bias", "gelu", "a function"],
)
def test_layouts_and_arguments_are_torchs(options):
    for batch_first, shape in ((False, (5, 3, D)), (True, (3, 5, D)), (True, (5, D))):
        theirs, ours = pair("Encoder", batch_first=batch_first, **options)
        x = torch.randn(shape).double()
        padding = torch.zeros(shape[:-1] if batch_first else shape[1::-1], dtype=torch.bool)
        padding[..., -1] = True
        theirs.eval(), ours.eval()
        torch.testing.assert_close(ours(x, src_key_padding_mask=padding), theirs(x, src_key_padding_mask=padding))
        causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
        torch.testing.assert_close(ours(x, causal, is_causal=True), theirs(x, causal, is_causal=True))


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("mask", ["none", "both"])
def test_attention_and_its_weights_are_torchs(mask, average):
    torch.manual_seed(1)
    theirs = nn.MultiheadAttention(D, HEADS, batch_first=True)
    ours = nfnn.MultiheadAttention(D, HEADS, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    q, k, v = torch.randn(3, 3, 5, D)
    attention, padding = masks(3, 5, mask)
    given = {"attn_mask": attention, "key_padding_mask": padding, "average_attn_weights": average}
    for inputs in ((q, k, v), (q, k, k), (q, q, q)):
        for a, b in zip(theirs(*inputs, **given), ours(*inputs, **given)):
            torch.testing.assert_close(b, a)
    other = nfnn.MultiheadAttention(D, HEADS, kdim=3, vdim=7, add_bias_kv=True, batch_first=True)
    assert other(q, torch.randn(3, 4, 3), torch.randn(3, 4, 7))[0].shape == q.shape


def test_per_head_masks_of_other_shapes_and_causal_without_a_mask():
    layer = nfnn.TransformerEncoderLayer(D, HEADS, FF, 0.0, batch_first=True).double()
    x = torch.randn(3, 5, D).double()
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected = layer(x, causal)
    torch.testing.assert_close(layer(x, causal.expand(3 * HEADS, 5, 5)), expected)
    torch.testing.assert_close(layer(x, is_causal=True), expected)
    real = torch.zeros(3, 5, dtype=torch.bool)
    torch.testing.assert_close(layer(x, src_key_padding_mask=real, is_causal=True), expected)


# First values


@pytest.mark.parametrize("init", [entry["name"] for entry in nfrs.tables()["inits"]])
def test_initial_standard_deviations(init):
    options = {**SHAPE, "vocab_size": 5, "d_model": 128, "d_ff": 320, "init": init, "residual": "deepnorm"}
    rust = nfrs.Transformer(nfrs.TransformerConfig(**options), seed=1).state_dict()
    model = nfnn.Transformer(128, HEADS, 2, 3, 320, residual="deepnorm", init=init)
    alone = nfnn.TransformerDecoder(
        nfnn.TransformerDecoderLayer(128, HEADS, 320, residual="deepnorm", init=init), 3, encoder_layers=2
    )
    for prefix, module in (("", model), ("decoder.", alone)):
        for name, p in module.named_parameters():
            value, made = rust[prefix + name], p.detach()
            for a, b in zip(value.chunk(3), made.chunk(3)) if "in_proj_weight" in name else [(value, made)]:
                if a.std() == 0 or a.numel() < 1000:
                    assert torch.equal(a, b), name
                else:  # two samples of n numbers differ by a few 1/√(2n)
                    assert abs(a.std() / b.std() - 1) < 8 / (2 * a.numel()) ** 0.5, name
    assert not torch.equal(model.encoder.layers[0].linear1.weight, model.encoder.layers[1].linear1.weight)


def test_an_encoder_alone_is_one_stack():
    layer = nfnn.TransformerEncoderLayer(D, HEADS, FF, residual="deepnorm")
    assert nfnn.TransformerEncoder(layer, 6).layers[3].place.sublayers[0].alpha == pytest.approx(12**0.25)
    both = nfnn.TransformerEncoder(layer, 6, decoder_layers=6)
    assert both.layers[3].place.sublayers[0].alpha == pytest.approx(1.4179, abs=1e-4)
    block = nfnn.Residual(nn.Linear(D, D), D, scheme="deepnorm", layers=6)
    assert block.declared.alpha == pytest.approx(12**0.25)


def test_seeds_fix_first_values_and_leave_the_generator_in_step():
    def build():
        torch.manual_seed(4)
        return nfnn.Transformer(D, HEADS, 1, 1, FF, residual="prenorm"), torch.rand(1)

    (one, after), (other, again) = build(), build()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters())) and torch.equal(after, again)
    third = nfnn.Transformer(D, HEADS, 1, 1, FF, residual="prenorm")
    assert not torch.equal(one.encoder.layers[0].linear1.weight, third.encoder.layers[0].linear1.weight)


# Ordinary modules


def encoder(residual="prenorm", norm="scalenorm", dropout=0.0, **options):
    layer = nfnn.TransformerEncoderLayer(
        D, HEADS, FF, dropout, batch_first=True, residual=residual, norm=norm, **options
    )
    return shake(nfnn.TransformerEncoder(layer, 2))


@pytest.mark.parametrize("residual", RESIDUALS)
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
def test_the_fused_steps_run_and_equal_the_modules_one_by_one(residual):
    """A hook on every child takes the slow way; both agree, and in training the masks do, too."""
    model, x = encoder(residual, dropout=0.3), torch.randn(2, 5, D)
    before = _core.operator_counts()
    torch.manual_seed(0)
    fused = model(x)
    after = _core.operator_counts()
    kernel = "residual" if residual in ("rezero", "r-fixup", "t-fixup") else "scale_norm_residual"
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


@pytest.mark.parametrize("residual", ["prenorm", "postnorm", "branchnorm", "dlcl", "subln", "r-fixup", "resi-dual"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
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


@pytest.mark.parametrize("scheme", ["prenorm", "postnorm", "deepnorm", "branchnorm", "rezero", "admin", "sandwich"])
def test_residual_around_any_module(scheme):
    block = shake(nfnn.Residual(nn.Linear(D, D), D, scheme=scheme, **OPTIONS.get(scheme, {}), layers=3).double())
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
    }[scheme]()
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("residual", [None, *RESIDUALS])
@pytest.mark.parametrize("kind", ["encoder", "transformer", "residual"])
def test_reset_parameters_gives_first_values_back(residual, kind):
    def build(seed):
        torch.manual_seed(seed)
        if kind == "residual":
            return nfnn.Residual(nn.Linear(D, D), D, scheme=residual or "postnorm", norm="batchnorm")
        if kind == "transformer":
            return nfnn.Transformer(D, HEADS, 2, 2, FF, residual=residual)
        return nfnn.TransformerEncoder(nfnn.TransformerEncoderLayer(D, HEADS, FF, residual=residual), 2)

    if kind == "residual" and residual in ("subln", "normformer", "r-fixup", "dlcl", "resi-dual"):
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


def test_parameter_groups_leave_norms_and_sums_alone():
    stack = nfnn.TransformerEncoder(nfnn.TransformerEncoderLayer(D, HEADS, FF, residual="dlcl"), 2)
    model = nn.ModuleDict({"stack": stack, "norm": nfnn.LayerNorm((3, 4)), "torchs": nn.LayerNorm((3, 4))})
    matrices, others = (group["params"] for group in nfnn.parameter_groups(model, 0.1))
    names = {p: name for name, p in model.named_parameters()}
    assert {names[p].rsplit(".", 1)[0].rsplit(".", 1)[-1] for p in matrices} == {
        "linear1",
        "linear2",
        "self_attn",
        "out_proj",
    }
    assert {"norm.weight", "torchs.weight", "stack.combine.weight"} <= {names[p] for p in others}
    rust = nfrs.Transformer(nfrs.TransformerConfig(vocab_size=9, d_model=D, heads=HEADS, residual="dlcl"))
    names = {p: name for name, p in rust.named_parameters()}
    matrices, _ = (group["params"] for group in nfnn.parameter_groups(rust, 0.1))
    assert matrices and not any("combine" in names[p] for p in matrices)
    theirs = nn.ModuleDict({"combine": nn.Linear(2, 2)})
    assert len(nfnn.parameter_groups(theirs, 0.1)[0]["params"]) == 1


def test_residual_passes_tuples_and_arguments():
    block = nfnn.Residual(nn.MultiheadAttention(D, HEADS, batch_first=True), D, kind="self-attention")
    x = torch.randn(2, 3, D)
    out, weights = block(x, x, x)
    assert out.shape == x.shape and weights.shape == (2, 3, 3)
    for scheme in ("subln", "normformer", "r-fixup", "dlcl", "resi-dual"):
        with pytest.raises(ValueError, match="out of a Residual's reach"):
            nfnn.Residual(nn.Linear(D, D), D, scheme=scheme)


# Loops


def test_set_num_updates_moves_t_and_says_when_nobody_does():
    model, x = encoder("branchnorm", branchnorm_steps=4), torch.randn(2, 5, D)
    assert list(dict(model.named_buffers())) == ["t"] and model.t.item() == 1
    early = model(x)
    assert nfnn.set_num_updates(model, 4) == 1 and model.t.item() == 4
    assert not torch.equal(model(x), early)

    def by_hand():
        model(x).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.01 * p.grad)

    for k in range(1, 4):
        nfnn.set_num_updates(model, k)
        by_hand()
    with pytest.warns(UserWarning, match="set_num_updates"):
        by_hand(), model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_hand(), model(x)
        model.eval(), by_hand(), model(x)
        frozen = encoder("branchnorm").eval()
        frozen(x)
    with pytest.raises(ValueError, match="from 1"):
        nfnn.set_num_updates(model, 0)
    assert nfnn.set_num_updates(encoder("prenorm"), 3) == 0


def test_profile_sets_the_rust_models_gains():
    """docs/spec.md §3.4, admin; what Rust's own profiling does is tested there."""
    layer = nfnn.TransformerEncoderLayer(D, HEADS, FF, 0.0, batch_first=True, residual="admin", norm="layernorm")
    model, x = nfnn.TransformerEncoder(layer, 3).eval(), 2 * torch.randn(4, 5, D)
    y, r, expected = x, torch.ones(()), []
    with torch.no_grad():
        for block in model.layers:
            for i, branch in enumerate((lambda z, b=block: b.self_attn(z, z, z)[0], None)):
                f = branch(y) if branch else block.linear2(block.linear1(y).relu())
                expected.append(r)
                scaled = r * y
                r = (scaled.var(correction=0) + f.var(correction=0)).sqrt()
                y = getattr(block, f"norm{i + 1}")(scaled + f)
    assert nfnn.profile(model, x) == 6 and not model.training
    gains = [getattr(block, f"residual_scale{i}") for block in model.layers for i in (1, 2)]
    for gain, omega in zip(gains, expected):
        torch.testing.assert_close(gain.detach(), omega.expand(D))
    torch.testing.assert_close(model(x), y)
    with pytest.raises(ValueError, match="no gain was profiled"):
        nfnn.profile(encoder("prenorm"), x)


@pytest.mark.parametrize("norm", ["layernorm", "powernorm"])
def test_profile_sets_the_same_gains_as_rust(norm):
    rust, skeleton = rust_and_skeleton(norm, "admin")
    source, target = torch.tensor([[5, 6, 7], [8, 9, 2]]), torch.tensor([[0, 14], [0, 16]])  # no padding
    table = rust.state_dict()["embedding.weight"]
    rust.profile(source, target)
    causal = torch.ones(2, 2, dtype=torch.bool).triu(1)
    assert nfnn.profile(skeleton, embed(table, source), embed(table, target), tgt_mask=causal) == 2 * 2 + 3 * 3
    state, found = rust.state_dict(), 0
    for name, p in skeleton.named_parameters():
        if "residual_scale" in name:
            found += 1
            torch.testing.assert_close(p.detach(), state[name], rtol=1e-6, atol=1e-6)
    assert found == 13 and not (state["decoder.layers.2.residual_scale3"] == 1).all()


def test_the_releases_powernorm_warms_up_for_less_at_the_end():
    layer = nfnn.TransformerEncoderLayer(
        D, HEADS, FF, norm="powernorm", residual="prenorm", powernorm_mode="release", powernorm_warmup=8000
    )
    model = nfnn.TransformerEncoder(layer, 1)
    assert (model.layers[0].norm1.warmup_iters, model.norm.warmup_iters) == (8000, 1000)


def test_padding_reaches_norms_with_statistics():
    """What stands at padding enters no statistic, in either layout."""
    for batch_first in (True, False):
        layer = nfnn.TransformerEncoderLayer(D, HEADS, FF, 0.0, batch_first=batch_first, norm="powernorm-v")
        x, padding = torch.randn(2, 5, D), torch.zeros(2, 5, dtype=torch.bool)
        padding[1, 3:] = True
        other = x.masked_fill(padding[..., None], 100.0)
        outputs = []
        for given in (x, other):
            twin = copy.deepcopy(layer)
            y = twin(given if batch_first else given.transpose(0, 1), src_key_padding_mask=padding)
            outputs.append(((y if batch_first else y.transpose(0, 1))[~padding], twin.norm1.running_phi))
        for a, b in zip(*outputs):
            torch.testing.assert_close(a, b)


def test_parameter_groups():
    model = encoder("admin", norm="layernorm")
    decayed, others = nfnn.parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, others = ({names[id(p)] for p in group["params"]} for group in (decayed, others))
    assert decayed | others == set(names.values())
    assert all("norm" in name or "bias" in name or "scale" in name for name in others)
    assert all(name.endswith("weight") for name in decayed) and len(decayed) == 8
    torch.optim.AdamW(nfnn.parameter_groups(model, 0.1))


def _ddp(rank, path, residual, gradients):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(encoder(residual))
    torch.manual_seed(1)
    x = torch.randn(4, 5, D)
    model(x[2 * rank : 2 * rank + 2]).square().mean().backward()
    if rank == 0:
        torch.save([p.grad for p in model.parameters()], gradients)
    dist.destroy_process_group()


@pytest.mark.parametrize("residual", ["prenorm", "branchnorm"])
def test_ddp(residual, tmp_path):
    mp.spawn(_ddp, (str(tmp_path / "meet"), residual, str(tmp_path / "gradients")), nprocs=2)
    torch.manual_seed(0)
    model = encoder(residual)
    torch.manual_seed(1)
    model(torch.randn(4, 5, D)).square().mean().backward()
    for p, grad in zip(model.parameters(), torch.load(tmp_path / "gradients")):
        torch.testing.assert_close(grad, p.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: nfnn.TransformerEncoderLayer(D, HEADS, residual="prnorm"), r"did you mean .prenorm"),
        (lambda: nfnn.TransformerEncoderLayer(D, HEADS, norm="scalnorm"), r"did you mean .scalenorm"),
        (lambda: nfnn.TransformerEncoderLayer(D, HEADS, init="deepnrm"), r"did you mean .deepnorm"),
        (lambda: nfnn.TransformerEncoderLayer(D, HEADS, branchnorm_step=3), r"did you mean .branchnorm_steps"),
        (lambda: nfnn.TransformerEncoderLayer(D, HEADS, activation="rel"), r"did you mean .relu"),
        (lambda: nfnn.TransformerEncoderLayer(D, HEADS, layer=3, encoder_layers=2), r"layer must lie in 0 … 1"),
        (lambda: nfnn.TransformerEncoder(encoder().layers[0], 0), "at least 1"),
        (lambda: encoder()(torch.randn(2, 5, D), torch.ones(4, 5, dtype=torch.bool)), r"must be \(5, 5\) or"),
        (
            lambda: encoder()(torch.randn(2, 5, D), src_key_padding_mask=torch.ones(2, 4, dtype=torch.bool)),
            r"key padding mask must be \(2, 5\); got \(2, 4\)",
        ),
        (lambda: encoder()(torch.randn(2, 5, D), torch.ones(5, 5, dtype=torch.long)), "must be bool"),
        (lambda: encoder("t-fixup")(torch.randn(2, 5, D + 1)), "16"),
    ],
)
def test_bad_input_is_said(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_profiling_restarts_with_each_chain_of_residuals():
    def chain():
        make = lambda i: nfnn.Residual(nn.Linear(D, D), D, scheme="admin", layer=i, layers=2)  # noqa: E731
        return nn.Sequential(make(0), make(1))

    model = nn.Sequential(chain(), chain())
    nfnn.profile(model, torch.randn(8, D))
    first, second = ([layer.residual_scale2 for layer in chained] for chained in model)
    for gains in (first, second):
        assert torch.equal(gains[0], torch.ones_like(gains[0])) and not torch.equal(gains[1], gains[0])
