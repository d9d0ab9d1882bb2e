"""normformer_rs.nn against torch.nn, and against the Rust model whose skeleton it is."""

import pytest
import torch
from nn_support import FF, HEADS, PAIRS, SHAPE, SOURCES, TARGETS, D, embed, rust_and_skeleton, shake
from torch import nn

import normformer_rs as nfrs
import reference as ref
from normformer_rs import nn as nfnn

LLAMA = {"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "linear_biases": False, "kv_heads": 2}
FAMILIES = [entry["name"] for entry in nfrs.tables()["families"]]


def run_skeleton(skeleton, table, source, target, has_positions=True):
    length = target.shape[1]
    out = skeleton(
        embed(table, source, has_positions),
        embed(table, target, has_positions),
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
    has_positions = rust.config.positions != "rotary"
    expected, logits = rust(source, target), run_skeleton(skeleton, table, source, target, has_positions)
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


@pytest.mark.parametrize("norm,residual", PAIRS)
@pytest.mark.one_in(test=94, all=62)
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
        {"residual": "attnres", "attnres_block": 3},
        {"residual": "mhc", "mhc_streams": 3, "mhc_iterations": 2},
        {"residual": "attnres", "attnres_form": "normed", "attnres_block": 2},
        {"residual": "attnres", "attnres_form": "normed", "attnres_queries": 3},
        {"residual": "mhc", "mhc_streams": 3, "mhc_end": "mean"},
        {"residual": "mhc", "mhc_streams": 3, "mhc_mixing": "none", "mhc_magnitude": 1.5},
        {"residual": "mhc", "mhc_streams": 3, "mhc_mixing": "channel", "mhc_rank": 5},
        {"residual": "mhc", "mhc_mixing": "channel", "mhc_rank": 3, "mhc_end": "mean", "norm": "scalenorm-fixed"},
        {"residual": "hyper-connections", "hyper_connections_streams": 3},
        {"residual": "mhc-lite", "mhc_lite_streams": 3},
        {"residual": "keel", "keel_alpha": 1.5},
        {"residual": "ngpt"},
        {"residual_multiplier": 0.4, "attention_multiplier": 0.3, "residual": "deepnorm"},
        {"residual": "x0-lambdas", "x0_lambdas_backout": True},
        {"residual": "hyper-connections", "hyper_connections_dynamic": False},
        {"residual": "prores", "prores_scheme": "deepnorm"},
        {"residual": "prores", "prores_scheme": "ln-scaling"},
        {"residual": "prores", "prores_scheme": "ln-scaling", "ln_scaling_mode": "weight"},
        {"residual": "b2t*1,prenorm", "norm": "scalenorm"},
        {"qk_l2norm": 72},
        {"qk_l2norm": 5, "norm": "scalenorm", "residual": "r-fixup"},
        {"norm": "rmsnorm:gemma", "residual": "ln-scaling", "ln_scaling_mode": "weight"},
        {"norm": "rmsnorm", "rmsnorm_part": 0.5, "rmsnorm_eps_place": "outside", "rmsnorm_cast": "before"},
        *({"norm": name, "residual": "postnorm"} for name in FAMILIES),
        {"qk_norm": True},
        {"qk_norm": True, "norm": "scalenorm", "residual": "r-fixup"},
        {"qk_norm": True, "qk_norm_over": "all-heads", "qk_norm_scale": 1.2, "v_norm": "weighted"},
        {"qk_norm": True, "qk_norm_weight": False, "norm": "rmsnorm:gemma", "v_norm": "unweighted"},
        {"output_gate": "head", "residual": "normformer"},
        {"output_gate": "element", "residual": "r-fixup", "qk_l2norm": 30},
        {"kv_heads": 2},
        {"kv_heads": 1, "residual": "value-residual", "v_norm": "weighted", "sinks": True},
        {"positions": "rotary", "rope_theta": 100.0},
        {"positions": "rotary", "residual": "ngpt", "activation": "swiglu", "kv_heads": 2},
        {**LLAMA, "qk_norm": True, "qk_norm_after_rotation": True, "qk_norm_over": "all-heads"},
        {**LLAMA, "residual": "olmo2", "output_gate": "element"},
        {"activation": "geglu", "residual": "subln"},
        {"activation": "relu2", "residual": "r-fixup"},
        {"activation": "silu", "linear_biases": False},
        {"sinks": True},
        {"sinks": True, "score_softcap": 0.5, "output_gate": "head", "residual": "subln"},
        {"score_softcap": 0.5, "v_norm": "weighted", "norm": "scalenorm"},
        {"residual": "postnorm*1/3,prenorm"},
        {"residual": "ln-scaling", "ln_scaling_mode": "weight"},
        {"residual": "peri-ln*1,olmo2", "norm": "scalenorm"},
        {"residual": "subln*1,rezero"},
        {"residual": "sandwich*1,postnorm", "norm": "scalenorm-fixed"},
        {"norm": "powernorm", "powernorm_mode": "release", "residual": "prenorm"},
        {"norm": "lpnorm", "lpnorm_p": 3.0, "groupscaling": 0},
        {"encoder_norm": "scalenorm", "decoder_norm": "rmsnorm", "residual": "sandwich"},
    ],
    ids=str,
)
@pytest.mark.one_in(test=24, all=16)
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
@pytest.mark.one_in(test=3, all=2)
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
@pytest.mark.one_in(test=5, all=3)
@pytest.mark.parametrize("parts", [{}, {"kv_heads": 1, "activation": "swiglu"}], ids=["plain", "grouped and gated"])
def test_initial_standard_deviations(init, parts):
    options = {**SHAPE, "vocab_size": 5, "d_model": 128, "d_ff": 320, "init": init, "residual": "deepnorm", **parts}
    rust = nfrs.Transformer(nfrs.TransformerConfig(**options), seed=1).state_dict()
    model = nfnn.Transformer(128, HEADS, 2, 3, 320, residual="deepnorm", init=init, **parts)
    rows = [128, 32, 32] if parts else [128, 128, 128]
    alone = nfnn.TransformerDecoder(
        nfnn.TransformerDecoderLayer(128, HEADS, 320, residual="deepnorm", init=init, **parts), 3, encoder_layers=2
    )
    for prefix, module in (("", model), ("decoder.", alone)):
        for name, p in module.named_parameters():
            value, made = rust[prefix + name], p.detach()
            for a, b in zip(value.split(rows), made.split(rows)) if "in_proj_weight" in name else [(value, made)]:
                is_drawn = name.endswith("bias") and a.std() > 0
                if not is_drawn and (a.std() == 0 or a.numel() < 1000):
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
