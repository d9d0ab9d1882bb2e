"""Exact swaps that are refused: each names the module and the way out, and leaves the model as it was."""

import functools
import re

import exact_support as own
import pytest
import torch
from exact_support import Block, Lora, Model, OwnLinear, build, exact, gap, run, scattered
from torch import nn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn
from normformer_rs.surgery import register_stack


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


def _patched():
    model = build("GPT2")
    model.transformer.wte.forward = functools.partial(model.transformer.wte.forward)
    return model


def _tied_writer():
    model = scattered(Model(Block()))
    model.probe = nn.Linear(12, own.D, dtype=torch.float64).eval()
    model.probe.weight = model.blocks[0].fc2.weight
    register_stack(Model, "norm", writers=("embedding", "position"), after=("head", "probe"))
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


def _no_writers():
    register_stack(Model, "norm", writers=())
    return scattered(Model(Block()))


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


def _undeclared_writers():
    model = scattered(Model(Block()))
    register_stack(Model, "norm")
    return model


def _wrong_writers():
    register_stack(Model, "norm", writers=("embedding", "position", "type.weight"), after=("head",))
    return scattered(Model(Block()))


def _wide_writer():
    register_stack(Model, "norm", writers=("embedding", "position", "head"))
    return scattered(Model(Block()))


REFUSED = {
    "a linear of its own": (_own_linear, r"blocks\.0\.fc2 is a OwnLinear, and no plain"),
    "a hook": (_hooked, r"vit\.layers\.0\.mlp\.fc2 has forward hooks, .* leave exact=True out"),
    "a forward": (_patched, r"transformer\.wte has a forward of its own, .* cannot be centred"),
    "a tied writer": (_tied_writer, r"blocks\.0\.fc2 shares a parameter with probe\.weight"),
    "LayerScale": (_layer_scale, r"blocks\.0\.scale, a Linear, changes what blocks\.0\.mixer\.out writes"),
    "a weight of another class": (
        _quantized,
        r"blocks\.0\.fc2 has a Packed of torch\.float64, .* leave exact=True out",
    ),
    "an empty list of writers": (_no_writers, "nothing is declared to write it"),
    "a plain attribute": (_attribute, "position is a Tensor, and neither a module, a parameter nor a buffer"),
    "a parameter": (_parameter, r"prompt, a Parameter of Model, may write"),
    "a stranger": (
        _stranger,
        r"GPT2LMHeadModel holds no block that .* knows by its class, and no input|GPT2LMHeadModel holds no block",
    ),
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
    "not said": (lambda: scattered(Model(own.Undeclared())), r"blocks\.0, a Undeclared, .*norm_first=True"),
    "writers not declared": (_undeclared_writers, r"nothing is declared to write it.*register_stack\("),
    "no such writer": (_wrong_writers, r"Model has no type.weight, which its declaration says"),
    "another width": (_wide_writer, r"head has 11 outputs, .* has 8: correct the declaration"),
    "no blocks": (
        lambda: scattered(nn.Sequential(nn.LayerNorm(4))),
        r"holds no block .*register_block",
    ),
    "another scheme": (lambda: _with_scheme(), r"GPT2Block, is not declared to be pre-norm"),
}


def _train_a_part():
    model = build("GPT2")
    model.transformer.h[1].mlp.dropout.train()
    return model


def _with_scheme():
    model = build("GPT2")
    nfrs.swap_residuals(model, "sandwich", init=None)
    return model.eval()


@pytest.mark.parametrize("make", [_clip, _lora_writer, _adapter])
def test_what_a_run_finds(make):
    """Blocks or writers that no declaration names: their norms are swapped as far as outputs stay."""
    model = make()
    given = {"CLIPModel": "CLIP", "ViTForImageClassification": "ViT", "GPT2LMHeadModel": "GPT2"}[type(model).__name__]
    expected = run(model, given)
    done = exact(model)
    assert len(done) > 4 and gap(run(model, given), expected) < 1e-9
    if make is _clip:
        assert any("a norm" in row.note or "LayerNorm" in row.note for row in done if row.note.startswith("stays"))


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_is_refused_and_nothing_changes(case):
    make, message = REFUSED[case]
    try:
        model = make()
        before = {key: (id(value), value.clone()) for key, value in model.state_dict(keep_vars=True).items()}
        with pytest.raises(nfrs.InputError) as caught:
            exact(model)
    finally:
        register_stack(Model, "norm", writers=("embedding", "position"), after=("head",))
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
