"""Exact swaps that are refused: each names the module and the way out, and leaves the model as it was."""

import functools
import re

import exact_support as own
import pytest
import torch
from exact_support import Block, Lora, Model, Normed, OwnLinear, build, exact, gap, run, scattered
from torch import nn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn


def _clip():
    return build("CLIP")


def _lora_writer():
    model = build("ViT")
    model.vit.layers[1].mlp.fc2 = Lora(model.vit.layers[1].mlp.fc2)
    return model


def _own_linear():
    model = scattered(Model(Block()))
    model.blocks[0].fc2 = OwnLinear(12, own.D).double().eval()
    return model


def _hooked():
    model = build("ViT")
    model.vit.layers[0].mlp.fc2.register_forward_hook(lambda *_: None)
    return model


def _hooked_attention():
    model = scattered(own.Torchs())
    model.encoder.layers[0].self_attn.register_forward_hook(lambda _, args, out: (out[0] + 1, out[1]))
    return model


def _patched():
    model = build("GPT2")
    model.transformer.wte.forward = functools.partial(model.transformer.wte.forward)
    return model


def _tied_writer():
    model = scattered(Model(Block()))
    model.probe = nn.Linear(12, own.D, dtype=torch.float64).eval()
    model.probe.weight = model.blocks[0].fc2.weight
    return model


def _layer_scale():
    model = scattered(Model(Block()))
    model.blocks[0].scale = nn.Linear(own.D, own.D, dtype=torch.float64).eval()
    return model


def _adapter():
    model = build("GPT2")
    model.transformer.adapter = nn.Linear(16, 16).eval()
    return model


def _quantized():
    model = scattered(Model(Block()))

    class Packed(nn.Parameter):
        pass

    weight = model.blocks[0].fc2.weight.detach().as_subclass(Packed)
    model.blocks[0].fc2._parameters["weight"] = weight
    return model


def _attribute():
    model = scattered(Model(Block()))
    del model.position
    model.position = torch.ones(5, own.D, dtype=torch.float64)
    return model


def _parameter():
    model = scattered(Model(Block()))
    model.prompt = nn.Parameter(torch.ones(own.D))
    return model


def _stranger():
    model = build("GPT2")
    model.transformer.h.append(nn.Linear(16, 16).eval())
    return model


def _mixed():
    model = build("ViT")
    model.vit.layers[0].layernorm_after = nfnn.RMSNorm(16).double().eval()
    return model


def _no_end():
    model = build("ViT")
    model.vit.layernorm = nn.Identity().eval()
    return model


def _meta():
    with torch.device("meta"):
        return own.first_values("GPT2").eval()


REFUSED = {
    "a linear of its own": (_own_linear, r"blocks\.0\.fc2 is a OwnLinear, and no plain"),
    "a hook": (_hooked, r"vit\.layers\.0\.mlp\.fc2 has forward hooks, .* leave exact=True out"),
    "a forward": (_patched, r"transformer\.wte has a forward of its own, .* cannot be centred"),
    "a tied writer": (_tied_writer, r"blocks\.0\.fc2 shares a parameter with probe\.weight"),
    "a weight of another class": (
        _quantized,
        r"blocks\.0\.fc2 has a Packed of torch\.float64, .* leave exact=True out",
    ),
    "a plain attribute": (_attribute, r"of blocks\.0\.ln1 the residual stream begins with an input of the model"),
    "a stranger": (_stranger, "GPT2LMHeadModel's parts are found by running .* no input is known that it takes"),
    "a norm after attention": (
        lambda: scattered(own.Torchs(Normed("after_output"))),
        r"of encoder\.layers\.0\.norm1 encoder.*self_attn, a MultiheadAttention, writes the residual stream",
    ),
    "a hook of attention": (_hooked_attention, r"of encoder\.layers\.0\.norm1 encoder.* has forward hooks"),
    "RMSNorm beside LayerNorm": (_mixed, r"layers\.0\.layernorm_after, a RMSNorm, reads the residual stream"),
    "no last norm": (_no_end, r"classifier, a Linear, reads the residual stream"),
    "training": (lambda: build("GPT2").train(), r"the model|it is in training mode: .* Call model\.eval\(\)"),
    "a part in training": (lambda: _train_a_part(), r"transformer\.h\.1\.mlp\.dropout is in training mode"),
    "meta": (_meta, r"transformer\.wte\.weight is on the meta device, .* load the weights first"),
    "post-norm": (lambda: build("Bert"), r"finds no LayerNorm .*query, a Linear, reads the residual stream"),
    "OPT, post-norm": (
        lambda: build("OPT, post-norm"),
        r"finds no LayerNorm .*q_proj, a Linear, reads the residual stream",
    ),
    "no input": (lambda: scattered(nn.Sequential(nn.LayerNorm(4))), "Sequential's parts are found by .* pass example="),
    "another scheme": (lambda: _with_scheme(), "finds no LayerNorm .* or in a swapped block"),
}


def _train_a_part():
    model = build("GPT2")
    model.transformer.h[1].mlp.dropout.train()
    return model


def _with_scheme():
    model = build("GPT2")
    nfrs.swap_residuals(model, "sandwich", init=None)
    return model.eval()


@pytest.mark.parametrize("make", [_clip, _lora_writer, _adapter, _layer_scale, _parameter])
def test_what_a_run_finds(make):
    """Norms are swapped as far as outputs stay, whatever writes the stream."""
    model = make()
    names = {"CLIPModel": "CLIP", "ViTForImageClassification": "ViT", "GPT2LMHeadModel": "GPT2"}
    given = names.get(type(model).__name__)
    expected = run(model, given)
    done = exact(model)
    assert len(done) > 4 and gap(run(model, given), expected) < 1e-9
    if make is _clip:
        assert any("a norm" in row.note or "LayerNorm" in row.note for row in done if row.note.startswith("stays"))


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_is_refused_and_nothing_changes(case):
    make, message = REFUSED[case]
    model = make()
    before = {key: (id(value), value.clone()) for key, value in model.state_dict(keep_vars=True).items()}
    with pytest.raises(nfrs.InputError) as caught:
        exact(model)
    assert re.search(message, str(caught.value)), caught.value
    after = model.state_dict(keep_vars=True)
    assert [*after] == [*before] and all(id(after[key]) == there for key, (there, _) in before.items())
    assert all(after[key].is_meta or torch.equal(after[key], value) for key, (_, value) in before.items())


@pytest.mark.parametrize("arguments", [("layernorm",), ("scalenorm",), ("rmsnorm", "default"), ("rmsnorm", "eps")])
def test_exact_takes_no_other_target_or_option(arguments):
    to, *more = arguments
    options = {"eps": {"eps": 1e-3}, "default": {"init": "default"}}.get(*more, {}) if more else {}
    with pytest.raises(
        nfrs.InputError, match=r'call swap_norms\(model, "rmsnorm", exact=True\) without init'
    ) as caught:
        nfrs.swap_norms(build("GPT2"), to, exact=True, **options)
    assert repr(to) in str(caught.value) and all(f"{name}=" in str(caught.value) for name in options)
