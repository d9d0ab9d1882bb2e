"""RMSNorm's conventions and the families that have them: vectors, the oracle, and transformers' own classes."""

import copy
import pickle

import pytest
import torch
from torch import nn

import normformer_rs as nfrs
import reference as ref
from normformer_rs import _core
from normformer_rs import nn as nfnn
from normformer_rs.nn.norms import RMSNorm

X, GAMMA = [1.0, -2.0, 3.0, 0.5], [1.0, 0.5, 2.0, -1.0]
FAMILIES = [entry["name"] for entry in nfrs.tables()["families"]]
OPTIONS = [
    {"zero_centred": True},
    {"zero_centred": True, "cast": "before"},
    {"cast": "before"},
    {"cast": "scale"},
    {"eps_place": "outside"},
    {"eps_place": "outside", "cast": "scale", "part": 0.3},
    {"part": 0.5, "zero_centred": True},
    {"part": 0.5, "cast": "before", "elementwise_affine": False},
    {"zero_centred": True, "elementwise_affine": False},
]


def made(options, width, **more):
    """A norm of these options, or of the family, its weight away from its start, and the oracle's options."""
    kind = nfnn.norm_class(options) if isinstance(options, str) else RMSNorm
    norm = kind(width, **({} if isinstance(options, str) else options), **more)
    if norm.weight is not None:
        with torch.no_grad():
            norm.weight.add_(0.5 * torch.randn_like(norm.weight))
    names = ("zero_centred", "cast", "eps_place", "part")
    return norm, {name: getattr(norm, name) for name in names} | {"eps": norm.eps}


@pytest.mark.parametrize(
    "norm,weight,expected",
    [
        (lambda: nfnn.norm_class("rmsnorm:llama")(4), GAMMA, [0.52981287, -0.52981287, 3.17887721, -0.26490643]),
        (lambda: nfnn.norm_class("rmsnorm:olmo")(4), GAMMA, [0.52981287, -0.52981287, 3.17887721, -0.26490643]),
        (lambda: nfnn.norm_class("rmsnorm:gemma")(4), GAMMA, [1.05962574, -1.58943861, 4.76831582, 0.0]),
        (
            lambda: nfnn.norm_class("rmsnorm:nanochat")(4, eps=0.0),
            None,
            [0.52981294, -1.05962589, 1.58943883, 0.26490647],
        ),
        (
            lambda: nfnn.norm_class("rmsnorm:partial")(4, part=0.5),
            GAMMA,
            [0.63245553, -0.63245553, 3.79473317, -0.31622776],
        ),
    ],
    ids=["llama", "olmo", "gemma", "simple", "partial"],
)
def test_the_published_numbers(norm, weight, expected):
    norm = norm().double()
    if weight is not None:
        norm.weight.data = torch.tensor(weight, dtype=torch.float64)
    found = norm(torch.tensor(X, dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-8)


@pytest.mark.parametrize("options", [*OPTIONS, *FAMILIES], ids=str)
def test_it_is_the_oracle_in_f64(options):
    norm, how = made(options, 33, dtype=torch.float64)
    x = torch.randn(5, 3, 33, dtype=torch.float64, requires_grad=True)
    weight = None if norm.weight is None else norm.weight.detach().clone().requires_grad_()
    y, expected = norm(x), ref.rms_norm(x, weight, **how)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm.formula(x), expected, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(y)
    ours = torch.autograd.grad(y, [x, *norm.parameters()], dy)
    theirs = torch.autograd.grad(expected, [x, *([] if weight is None else [weight])], dy)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    assert torch.autograd.gradcheck(norm, (torch.randn(2, 33, dtype=torch.float64, requires_grad=True),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [*OPTIONS, *FAMILIES], ids=str)
def test_it_rounds_where_the_oracle_does(options, dtype):
    norm, how = made(options, 48, dtype=dtype)
    x = torch.randn(64, 48).to(dtype)
    close_in_16_bits(norm(x), ref.rms_norm(x, norm.weight, **how), units_of(norm))


def units_of(norm):
    """Units in the last place that two roundings of a norm may lie apart. Where x̂ is rounded before its product with γ,
    one unit of x̂ just above a power of two is two units of a product just below one."""
    return 2 if norm.cast == "before" else 1


def close_in_16_bits(found, expected, units=1, share=0.999):
    """At least 99.9 % of the values equal, the others so many units in the last place apart. In f32, a few units."""
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        return
    assert found.dtype == expected.dtype and (found == expected).double().mean() >= share
    apart = (found.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    assert apart.max() <= units


def theirs(name, width):
    """transformers' norm of a family."""
    models = pytest.importorskip("transformers").models
    module, kind = {
        "rmsnorm:llama": ("llama.modeling_llama", "LlamaRMSNorm"),
        "rmsnorm:olmo": ("olmo2.modeling_olmo2", "Olmo2RMSNorm"),
        "rmsnorm:gemma": ("gemma.modeling_gemma", "GemmaRMSNorm"),
        "rmsnorm:gemma4": ("gemma4.modeling_gemma4", "Gemma4RMSNorm"),
        "rmsnorm:deepseek-v4": ("deepseek_v4.modeling_deepseek_v4", "DeepseekV4UnweightedRMSNorm"),
    }[name]
    loaded = pytest.importorskip(f"{models.__name__}.{module}")
    return getattr(loaded, kind)() if name == "rmsnorm:deepseek-v4" else getattr(loaded, kind)(width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*(n for n in FAMILIES if n not in ("rmsnorm:original", "rmsnorm:partial"))])
def test_it_is_the_familys_own_norm(name, dtype):
    """The composed form to the bit, the kernels but for one rounding in a thousand."""
    width = 320
    ours, _ = made(name, width, dtype=dtype)
    x = (3 * torch.randn(200, width)).to(dtype)
    if name == "rmsnorm:nanochat":
        expected = nn.functional.rms_norm(x, (width,), eps=ours.eps)
    else:
        norm = theirs(name, width).to(dtype)
        norm.load_state_dict(ours.state_dict())
        expected = norm(x)
        assert vars(norm).get("eps", vars(norm).get("variance_epsilon")) == ours.eps
    assert torch.equal(ours.formula(x), expected)
    close_in_16_bits(ours(x), expected, units_of(ours))
    for weight in ours.parameters():
        nn.init.constant_(weight, 0.0 if ours.zero_centred else 1.0)  # γ = 1
    close_in_16_bits(ours(x), ours.formula(x))


def test_the_sum_of_a_zero_centred_weight_is_in_f32():
    norm = RMSNorm(2, zero_centred=True, dtype=torch.bfloat16)
    assert norm.weight.tolist() == [0.0, 0.0]
    norm.weight.data.fill_(0.00390625)  # 1 + it is 1 in bf16
    norm = norm.to(torch.bfloat16)
    assert norm(torch.tensor([256.0, 256.0])).tolist() == pytest.approx([1.00390625] * 2, abs=1e-6)


def test_rows_of_zeros_stay_and_have_a_slope():
    for options in OPTIONS:
        x = torch.zeros(2, 8, dtype=torch.float64, requires_grad=True)
        norm = RMSNorm(8, **options, dtype=torch.float64)
        (dx,) = torch.autograd.grad(norm(x).sum(), x)
        assert norm(x).eq(0).all() and dx.isfinite().all()


def test_kernels_where_there_are_some():
    """Zero-centred, unweighted and rounded first by RMSNorm's kernels; ε outside, parts and 16-bit scales composed."""

    def calls(norm, x):
        before = _core.operator_counts()["rms_norm"]
        norm(x)
        return [b - a for a, b in zip(before, _core.operator_counts()["rms_norm"], strict=True)]

    wide, narrow = torch.randn(3, 32), torch.randn(3, 32).bfloat16()
    for name in FAMILIES:
        norm = nfnn.norm_class(name)(32)
        has_kernel = name not in ("rmsnorm:original", "rmsnorm:partial")
        assert calls(norm, wide) == [int(has_kernel), 0], name
        assert calls(norm, narrow) == [int(has_kernel and name != "rmsnorm:deepseek-v4"), 0], name


@pytest.mark.full
def test_several_dimensions_copies_and_compilation():
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    for options in (*OPTIONS, *FAMILIES):
        norm, how = made(options, (4, 5), dtype=torch.float64)
        weight = None if norm.weight is None else norm.weight.flatten()
        expected = ref.rms_norm(x.flatten(1), weight, **how).view(3, 4, 5)
        for twin in (norm, copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
            torch.testing.assert_close(twin(x), expected, rtol=1e-12, atol=1e-12)
    compiled = torch.compile(nfnn.norm_class("rmsnorm:llama")(8), fullgraph=True, backend="aot_eager")
    rows = torch.randn(2, 8).bfloat16()
    assert torch.equal(compiled(rows), compiled._orig_mod(rows))


def test_16_bit_streams_are_fused_only_where_nothing_is_rounded_between():
    wide, narrow = torch.ones(1, 32), torch.ones(1, 32, dtype=torch.bfloat16)
    fused = {name: [nfnn.norm_class(name)(32).fuses(x) for x in (wide, narrow)] for name in FAMILIES}
    assert {name for name, found in fused.items() if found == [True, True]} == {
        f"rmsnorm:{family}" for family in ("olmo", "gemma", "gemma4", "nanochat")
    }
    assert [fused[f"rmsnorm:{family}"] for family in ("llama", "original")] == [[True, False], [False, False]]
    layer = nfnn.TransformerEncoderLayer(32, 2, 64, 0.0, norm="rmsnorm:llama", residual="prenorm", batch_first=True)
    layer, x, seen = layer.bfloat16(), torch.randn(2, 3, 32).bfloat16(), []
    layer.linear1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    layer.dropout1.register_forward_hook(lambda _, inputs, out: seen.append(x + out))  # so that no step is fused
    layer(x)
    stream, read = seen
    assert torch.equal(read, layer.norm2(stream))


def test_reprs_and_mistakes():
    assert repr(RMSNorm(4)) == "RMSNorm((4,), eps=1e-05, elementwise_affine=True)"
    shown = repr(nfnn.norm_class("rmsnorm:partial")(32))
    assert shown == "RMSNorm((32,), eps=1e-08, eps_place=outside, part=0.0625, elementwise_affine=True)"
    for make, message in (
        (lambda: RMSNorm(4, cast="befor"), "did you mean .before"),
        (lambda: RMSNorm(4, eps_place="beside"), "outside"),
        (lambda: RMSNorm(4, part=0.0), r"part must lie in \(0, 1\]"),
        (lambda: RMSNorm(4, part=0.2), "part = 0.2 of 4 numbers is none"),
        (lambda: nfnn.norm_class("rmsnorm:lama"), "did you mean .rmsnorm:llama"),
        (lambda: nfrs.TransformerConfig(norm="rmsnorm:lama"), "did you mean .rmsnorm:llama"),
        (lambda: model(norm="rmsnorm:gemma", rmsnorm_cast="before"), "rmsnorm:gemma has conventions of its own"),
        (lambda: model(rmsnorm_part=0.5), "rmsnorm_part = 0.5 is an option of rmsnorm"),
        (lambda: model(norm="rmsnorm", rmsnorm_part=1.5), r"rmsnorm_part must lie in \(0, 1\]"),
        (lambda: model(norm="rmsnorm", rmsnorm_part=0.01), "rmsnorm_part = 0.01 of 16 numbers is none"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def model(**options):
    return nfrs.Transformer(nfrs.TransformerConfig(vocab_size=9, d_model=16, heads=2, **options))


def test_x_transformers_gains_are_converted():
    norm = RMSNorm(2, zero_centred=True)
    norm.load_state_dict({"g": torch.tensor([1.5, 0.5])})
    assert norm.weight.tolist() == [0.5, -0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [*OPTIONS, *FAMILIES], ids=str)
def test_huge_rows_are_not_zero(options, dtype):
    """The composed conventions square no number that overflows; no kernel does."""
    norm, _ = made(options, 48, dtype=dtype)
    dy, found = torch.randn(16, 48).to(dtype), []
    rows = torch.randn(16, 48).to(dtype)
    for factor in (2.0**13, 2.0 ** (600 if dtype == torch.float64 else 83)):  # ε is beyond the digits of both
        x = (rows * factor).requires_grad_()
        y = norm(x)
        found.append((y.detach(), torch.autograd.grad(y, x, dy)[0] * factor))
    for (small, huge), rtol in zip(zip(*found), (2**-7, 0.1) if dtype == torch.bfloat16 else (1e-5, 1e-4)):
        torch.testing.assert_close(huge, small, rtol=0, atol=rtol * small.abs().max().item())


@pytest.mark.parametrize("options", [*OPTIONS, *FAMILIES], ids=str)
def test_gradients_of_large_rows_in_float16(options):
    norm, _ = made(options, 512, dtype=torch.float16)
    wide, _ = made(options, 512)
    wide.load_state_dict(norm.state_dict())
    for size in (1.0, 30.0, 1000.0):
        x = (size * torch.randn(4, 512)).half().requires_grad_()
        dy = torch.randn(4, 512).half() + x.detach().sign()  # Σ dy⊙x is large
        rows = x.detach().float().requires_grad_()
        found, wanted = (torch.autograd.grad(n(r), r, d)[0] for n, r, d in ((norm, x, dy), (wide, rows, dy.float())))
        torch.testing.assert_close(found.float(), wanted, rtol=0, atol=2e-3 * wanted.abs().max().item() + 1e-7)
