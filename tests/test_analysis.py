"""What is seen in the Rust model, against hooks on its skeleton in normformer_rs.nn."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import normformer_rs as nfrs
import reference as ref
from normformer_rs import analysis
from normformer_rs import nn as nfnn

D = 16
SHAPE = {"d_model": D, "d_ff": 24, "heads": 4, "encoder_layers": 2, "decoder_layers": 3, "dropout": 0.3}
SOURCE = torch.tensor([[5, 6, 7, 8, 9, 2], [10, 2, 1, 1, 1, 1], [11, 12, 13, 2, 1, 1]])
TARGET = torch.tensor([[0, 14, 15, 1], [0, 16, 17, 18], [0, 1, 1, 1]])
SCHEMES = ["prenorm", "postnorm", "dlcl", "normformer", "rezero"]


def built(norm="layernorm", residual="prenorm", **options):
    """A model away from its first values, in training mode, and its skeleton."""
    config = nfrs.TransformerConfig(vocab_size=20, norm=norm, residual=residual, **{**SHAPE, **options})
    model = nfrs.Transformer(config, seed=3).double()
    with torch.no_grad():
        for t in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
            t.add_(torch.rand_like(t) * 0.1)
    sizes = (D, config.heads, config.encoder_layers, config.decoder_layers, config.d_ff, 0.0)
    given = {"norm": norm, "residual": residual, "dtype": torch.float64, **options}
    skeleton = nfnn.Transformer(*sizes, batch_first=True, **given).eval()
    stacks = {name: t for name, t in model.state_dict().items() if name.startswith(("encoder.", "decoder."))}
    skeleton.load_state_dict(stacks)
    return model, skeleton


def run(model, skeleton):
    """The skeleton on what the model's stacks read."""
    table = model.state_dict()["embedding.weight"]

    def embed(tokens):
        real = tokens != ref.PAD
        positions = (real.cumsum(-1) - 1).clamp(min=0)
        return (table[tokens] * D**0.5 + ref.sinusoids(positions, D, "twt")) * real.unsqueeze(-1)

    ends = {"encoder": embed(SOURCE), "decoder": embed(TARGET)}
    masks = {f"{name}_key_padding_mask": tokens == ref.PAD for name, tokens in (("src", SOURCE), ("tgt", TARGET))}
    causal = torch.ones(4, 4, dtype=torch.bool).triu(1)
    skeleton(*ends.values(), tgt_mask=causal, memory_key_padding_mask=SOURCE == ref.PAD, **masks)
    return ends


@pytest.mark.parametrize("residual", SCHEMES)
def test_layers_and_activations_are_the_skeletons(residual):
    model, skeleton = built(residual=residual)
    outputs, active = {"encoder": [], "decoder": []}, {"encoder": [], "decoder": []}
    for name, tokens in (("encoder", SOURCE), ("decoder", TARGET)):
        real = tokens != ref.PAD
        for layer in getattr(skeleton, name).layers:
            layer.register_forward_hook(lambda _m, _i, out, to=outputs[name], real=real: to.append(out[real]))
            layer.linear1.register_forward_hook(lambda _m, _i, out, to=active[name], real=real: to.append(out[real]))
    ends = run(model, skeleton)
    seen = analysis.observe(model.eval(), SOURCE, TARGET)
    assert list(seen) == ["encoder", "decoder"]
    for name, tokens in (("encoder", SOURCE), ("decoder", TARGET)):
        chain = [ends[name][tokens != ref.PAD], *outputs[name]]
        cosines = [nn.functional.cosine_similarity(a, b, dim=-1).mean().item() for a, b in itertools.pairwise(chain)]
        np.testing.assert_allclose(seen[name].cosines, cosines, rtol=1e-9)
        np.testing.assert_allclose(seen[name].active, [(h > 0).double().mean() for h in active[name]], rtol=1e-12)
        assert seen[name].active.shape == (len(outputs[name]),) and (seen[name].active > 0.1).all()
        assert seen[name].distances.shape == (0, 3)


@pytest.mark.parametrize("groups", [0, 2])
@pytest.mark.parametrize("norm", ["batchnorm", "powernorm-v", "powernorm"])
def test_distances_of_statistics(norm, groups):
    options = {"encoder_norm": norm, "decoder_norm": "layernorm", "groupscaling": groups}
    model, skeleton = built(**options)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    inputs = []
    for module in skeleton.encoder.modules():
        if isinstance(module, (nfnn.BatchNorm, nfnn.PowerNormV, nfnn.PowerNorm)):
            module.register_forward_pre_hook(lambda m, args: inputs.append((m, args[0][SOURCE != ref.PAD])))
    run(model, skeleton)
    found = analysis.observe(model.eval(), SOURCE, TARGET)
    assert found["encoder"].distances.shape == (5, 3) and len(inputs) == 5
    assert found["decoder"].distances.shape == (0, 3)
    for row, (module, x) in zip(found["encoder"].distances, inputs):
        if groups:
            x = x.unflatten(-1, (groups, -1))
            x = (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2)
        if norm == "batchnorm":
            own = [(x.mean(0), module.running_mean), (x.var(0, correction=0), module.running_var), None]
        else:
            own = [None, None, (x.square().mean(0), module.running_phi.flatten())]
        expected = [np.nan if pair is None else (pair[0] - pair[1]).norm().item() / D for pair in own]
        np.testing.assert_allclose(row, expected, rtol=1e-9)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize(
    ("norm", "alpha", "first", "which"),
    [("batchnorm", "batchnorm_alpha", "mean", 0), ("powernorm-v", "powernorm_alpha_fwd", "phi", 2)],
)
def test_in_training_statistics_are_those_that_training_takes_in(norm, alpha, first, which):
    """With dropout. new = old/2 + batch/2, so that batch − new = new − old."""
    model, _ = built(norm, **{alpha: 0.5})
    buffer = model.get_buffer(f"encoder.layers.0.norm1.running_{first}")
    before = buffer.clone()
    torch.manual_seed(3)
    model(SOURCE, TARGET)
    after = {name: b.clone() for name, b in model.named_buffers()}
    torch.manual_seed(3)
    distance = analysis.observe(model, SOURCE, TARGET)["encoder"].distances[0, which]
    assert distance == pytest.approx((buffer - before).norm().item() / D, rel=1e-9)
    assert all(torch.equal(b, after[name]) for name, b in model.named_buffers())
    assert analysis.observe(model.eval(), SOURCE, TARGET)["encoder"].distances[0, which] != distance


def test_a_language_model_has_one_stack():
    shape = {**SHAPE, "architecture": "decoder-only"}
    model = nfrs.Transformer(nfrs.TransformerConfig(vocab_size=20, **shape))
    seen = analysis.observe(model, None, TARGET)
    assert list(seen) == ["decoder"] and seen["decoder"].cosines.shape == (3,)
    with pytest.raises(nfrs.InputError, match="takes no source sentences"):
        analysis.observe(model, SOURCE, TARGET)


@pytest.mark.parametrize("norm", ["scalenorm", "lpnorm", "scalenorm-fixed", "layernorm"])
def test_gains(norm):
    model, skeleton = built(norm)
    found = analysis.gains(model)
    assert {gain.name: gain.g for gain in found} == {gain.name: gain.g for gain in analysis.gains(skeleton)}
    assert len(found) == {"layernorm": 0, "scalenorm-fixed": 1}.get(norm, 2 * 2 + 3 * 3 + 2)
    state = model.state_dict()
    assert all(gain.g == state[f"{gain.name}.weight"].item() for gain in found)
    depths = {kind: [gain.layer for gain in found if gain.kind == kind] for kind in {gain.kind for gain in found}}
    if len(found) > 1:
        assert depths.pop("encoder.norm") == depths.pop("decoder.norm") == [None]
        assert depths == {
            f"{stack}.layers.*.norm{i}": list(range(n))
            for stack, n in (("encoder", 2), ("decoder", 3))
            for i in range(1, n + 1)
        }


def test_gains_inside_other_modules():
    model, _ = built("scalenorm", "dlcl")
    inner, outer = analysis.gains(model), analysis.gains(nn.ModuleDict({"theirs": model}))
    assert [(f"theirs.{gain.name}", gain.layer, gain.g) for gain in inner] == [(g.name, g.layer, g.g) for g in outer]
    assert {gain.layer for gain in inner if "combine" in gain.name} == {None}


def test_gains_of_a_swapped_model():
    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2, enable_nested_tensor=False)
    nfrs.surgery.swap_norms(theirs, "scalenorm")
    assert [gain[1:] for gain in analysis.gains(theirs)] == [
        (layer, f"layers.*.norm{i}", pytest.approx(8**0.5)) for layer in (0, 1) for i in (1, 2)
    ]


def test_gradient_norms():
    model, _ = built()
    with pytest.raises(nfrs.InputError, match=r"call backward\(\) first"):
        analysis.gradient_norms(model)
    model.eval()(SOURCE, TARGET).logsumexp(-1).sum().backward()
    found = analysis.gradient_norms(model)
    layers = [f"{stack}.layers.{i}" for stack, n in (("encoder", 2), ("decoder", 3)) for i in range(n)]
    assert set(found) == {*layers, "encoder", "decoder", "embedding"}
    last = [p.grad.flatten() for name, p in model.named_parameters() if name.startswith("decoder.layers.2.")]
    assert found["decoder.layers.2"] == pytest.approx(torch.cat(last).norm().item(), rel=1e-12)
    whole = nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()
    assert sum(norm**2 for norm in found.values()) == pytest.approx(whole**2, rel=1e-12)


def test_spectrum():
    weight = torch.randn(12, 7, dtype=torch.float64)
    values = analysis.spectrum(weight.requires_grad_())
    np.testing.assert_allclose(values * np.linalg.norm(weight.detach(), 2), np.linalg.svd(weight.detach())[1])
    assert analysis.spectrum(weight.detach().bfloat16()).shape == (7,)
    wrongs = [torch.ones(3), torch.ones(2, 0), [[1], [1, 2]], "text", nn.Linear(2, 2), torch.ones(2, 2) * 1j]
    for wrong, said in [*((w, "a matrix of numbers") for w in wrongs), (torch.zeros(2, 2), "not all 0")]:
        with pytest.raises(nfrs.InputError, match=said):
            analysis.spectrum(wrong)
    with pytest.raises(nfrs.InputError, match="finite"):
        analysis.spectrum(torch.tensor([[1.0, torch.nan]]))
    with pytest.raises(nfrs.InputError, match=r"a normformer_rs.Transformer; got a Linear"):
        analysis.observe(nn.Linear(2, 2), None, TARGET)
