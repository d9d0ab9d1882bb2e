"""`to_torch`: models in torch's own operations, which TorchScript compiles, saves and runs without this package."""

import subprocess
import sys
import warnings

import pytest
import torch
from test_export import NORMS, TABLE, Block, D, stirred
from torch import nn

import normformer_rs as nfrs
import reference as ref
from normformer_rs import nn as nfnn
from normformer_rs.export import to_torch
from normformer_rs.surgery import swap_norms

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SCHEMES = [entry["name"] for entry in nfrs.tables()["residuals"]]


def scripted(model):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'norm' was found in ScriptModule constants")  # of torch.nn's own stacks
        return torch.jit.script(model)


def same_everywhere(model, *inputs):
    """The copy, and the copy scripted and traced, equal the model to 1e-12 in f64. Returns the copy."""
    model = stirred(model.double(), *inputs)
    expected, copied = model(*inputs), to_torch(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        for found in (copied, scripted(copied), torch.jit.trace(copied, inputs, check_trace=False)):
            torch.testing.assert_close(found(*inputs), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(model(*inputs), expected)  # which stays as it was
    return copied


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_becomes_plain(name):
    copied = same_everywhere(NORMS[name](), numbers(3, 5, D))
    kinds = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}
    kind = kinds.get(name.partition(",")[0])
    assert kind is None or type(copied) is kind


@pytest.mark.parametrize("name", TABLE)
def test_a_swapped_encoder_becomes_plain(name):
    options = {"activation": "gelu", "batch_first": True, "norm_first": name == "rmsnorm"}
    layer = nn.TransformerEncoderLayer(D, 2, 16, 0.0, **options)
    model = nn.TransformerEncoder(layer, 1, nn.LayerNorm(D), enable_nested_tensor=False)
    swap_norms(model, name)
    copied = same_everywhere(model, numbers(2, 5, D))
    x, causal = numbers(2, 5, D), nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    masks = {"mask": causal, "src_key_padding_mask": padding.double().masked_fill(padding, -torch.inf)}
    found, expected = (module(x, **masks)[~padding] for module in (scripted(copied), model))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scheme_becomes_plain(scheme):
    fitting = [norm for norm in TABLE if ref.is_defined(norm, scheme)]
    norm = fitting[SCHEMES.index(scheme) % len(fitting)]
    model = nfnn.Transformer(D, 2, 2, 2, 16, 0.0, norm=norm, residual=scheme)
    same_everywhere(model, numbers(5, 2, D), numbers(3, 2, D))


def test_lengths_of_one_become_plain():
    model = nfnn.Transformer(D, 2, 1, 1, 16, 0.0, residual="prenorm", norm="rmsnorm:gemma", qk_l2norm=72)
    same_everywhere(model, numbers(5, 2, D), numbers(3, 2, D))


@pytest.mark.parametrize("first", [False, True])
def test_torchs_layers_become_torchs(first):
    model = nfnn.Transformer(D, 2, 1, 1, 16, 0.0, batch_first=True, norm_first=first)
    copied = same_everywhere(model, numbers(2, 5, D), numbers(2, 3, D))
    assert all(type(module).__module__.startswith("torch.nn") for module in copied.modules())
    assert copied.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("scheme", ["normformer", "deepnorm"])
def test_masks_of_a_plain_transformer(scheme):
    model = stirred(
        nfnn.Transformer(D, 2, 1, 1, 16, 0.0, batch_first=True, residual=scheme), *[torch.randn(2, 4, D)] * 2
    )
    source, target = torch.randn(2, 5, D), torch.randn(2, 4, D)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    masks = {
        "src_key_padding_mask": padding,
        "memory_key_padding_mask": padding,
        "tgt_key_padding_mask": padding[:, 1:],
    }
    compiled = scripted(to_torch(model))
    causal = torch.ones(4, 4, dtype=torch.bool).triu(1)
    for more in ({}, {"tgt_mask": causal}, masks, {**masks, "tgt_mask": causal}):
        found, expected = (module(source, target, **more) for module in (compiled, model))
        torch.testing.assert_close(found, expected)
    found, expected = (module.decoder(target, source, tgt_is_causal=True) for module in (compiled, model))
    torch.testing.assert_close(found, expected)


def test_attention_and_residuals_become_plain():
    same_everywhere(nfnn.FixNormEmbedding(9, D, scale=2.0), torch.randint(9, (2, 3)))
    for scheme in ("prenorm", "branchnorm", "layerscale", "prores"):
        same_everywhere(nfnn.Residual(nn.Linear(D, D), D, scheme=scheme), numbers(3, D))
    x = numbers(2, 5, D)
    attention = nfnn.MultiheadAttention(D, 2, batch_first=True).double().eval()
    copied = to_torch(attention)
    assert type(copied) is nn.MultiheadAttention
    torch.testing.assert_close(copied(x, x, x), attention(x, x, x))


def test_a_copy_shares_what_the_model_shares():
    model = Block()
    model.norm2 = model.norm1
    swap_norms(model, "scalenorm")
    copied = to_torch(model)
    assert copied.norm1 is copied.norm2 and copied.norm1.weight is not model.norm1.weight
    assert [p.requires_grad for p in copied.parameters()] == [p.requires_grad for p in model.parameters()]


def test_a_saved_file_runs_without_the_package(tmp_path):
    x = torch.randn(2, 5, D)
    layer = nfnn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True, norm="powernorm", residual="sandwich")
    model = stirred(nn.Sequential(layer, nfnn.ScaleNorm(D)), x)
    torch.jit.save(scripted(to_torch(model)), tmp_path / "model.pt")
    torch.save((x, model(x)), tmp_path / "numbers.pt")
    code = (
        "import sys, torch; model = torch.jit.load('model.pt'); x, y = torch.load('numbers.pt');"
        "torch.testing.assert_close(model(x), y); assert 'normformer_rs' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


class Own(nfnn.LayerNorm):
    """A user's subclass, which may compute anything."""


def with_hook():
    norm = nfnn.LayerNorm(D)
    norm.register_forward_hook(lambda *_: None)
    return norm


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: Own(D), "1: Own has no form in torch's own operations"),
        (with_hook, "1: LayerNorm has hooks"),
        (
            lambda: nfrs.Transformer(nfrs.TransformerConfig(vocab_size=5, d_model=D, d_ff=8, heads=2), seed=0),
            r"1: normformer_rs\.Transformer is one call into Rust: give to_torch a model around",
        ),
    ],
    ids=["subclass", "hook", "Rust"],
)
def test_what_has_no_plain_form(make, message):
    with pytest.raises(nfrs.InputError, match=message):
        to_torch(nn.Sequential(nn.Linear(D, D), make()))


def test_plain_statistics_do_not_train():
    norm = to_torch(nfnn.BatchNorm(D))
    with pytest.raises(RuntimeError, match=r"cannot train: call eval\(\)"):
        norm(torch.randn(3, D))


@pytest.mark.parametrize("name", TABLE)
def test_torchscript_names_to_torch(name):
    model = Block()
    swap_norms(model, name)
    with pytest.raises(nfrs.InputError, match=r"cannot compile \w+,.* script normformer_rs\.to_torch\(model\)"):
        torch.jit.script(model)
