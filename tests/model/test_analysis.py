"""What is seen in the Rust model, against hooks on its skeleton in normformer_rs.nn."""

import contextlib
import functools
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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
    features = skeleton(*ends.values(), tgt_mask=causal, memory_key_padding_mask=SOURCE == ref.PAD, **masks)
    return ends, features @ table.T


def loss(logits):
    """Uneven over positions and words, and padding without part in it."""
    return (logits.logsumexp(-1) * torch.linspace(0.5, 2, 12).view(3, 4))[TARGET != ref.PAD].sum() - logits[0, 0, 5]


def test_scores_are_of_the_pairs_that_the_softmax_gets():
    """No pairs of two sentences, of the future, or of padding: in self-attention and cross-attention."""
    model, skeleton = built()
    expected = {"encoder": [], "decoder": []}

    def seen(attention, args, kwargs, name, is_cross):
        query, key = args[:2]
        real = TARGET if name == "decoder" else SOURCE, SOURCE if is_cross or name == "encoder" else TARGET
        pairs = (real[0] != ref.PAD)[:, :, None] & (real[1] != ref.PAD)[:, None]
        if name == "decoder" and not is_cross:
            pairs = pairs.tril()
        w, b = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
        q, k = (nn.functional.linear(x, w[i], b[i]).unflatten(-1, (4, -1)) for i, x in enumerate((query, key)))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(D // 4)
        expected[name].append(scores.abs().movedim(1, -1)[pairs].mean().item())

    for name in expected:
        for layer in getattr(skeleton, name).layers:
            for part in ("self_attn", "multihead_attn"):
                if (attention := getattr(layer, part, None)) is not None:
                    hook = functools.partial(seen, name=name, is_cross=part == "multihead_attn")
                    attention.register_forward_pre_hook(hook, with_kwargs=True)
    run(model, skeleton)
    found = analysis.observe(model.eval(), SOURCE, TARGET)
    for name, scores in expected.items():
        np.testing.assert_allclose(found[name].scores, scores, rtol=1e-9)


@pytest.mark.parametrize("residual", SCHEMES)
def test_layers_and_activations_are_the_skeletons(residual):
    model, skeleton = built(residual=residual)
    outputs, active = {"encoder": [], "decoder": []}, {"encoder": [], "decoder": []}
    for name, tokens in (("encoder", SOURCE), ("decoder", TARGET)):
        real = tokens != ref.PAD
        for layer in getattr(skeleton, name).layers:
            layer.register_forward_hook(lambda _m, _i, out, to=outputs[name], real=real: to.append(out[real]))
            layer.linear1.register_forward_hook(lambda _m, _i, out, to=active[name], real=real: to.append(out[real]))
    ends, _ = run(model, skeleton)
    seen = analysis.observe(model.eval(), SOURCE, TARGET)
    assert list(seen) == ["encoder", "decoder"]
    for name, tokens in (("encoder", SOURCE), ("decoder", TARGET)):
        chain = [ends[name][tokens != ref.PAD], *outputs[name]]
        cosines = [nn.functional.cosine_similarity(a, b, dim=-1).mean().item() for a, b in itertools.pairwise(chain)]
        np.testing.assert_allclose(seen[name].cosines, cosines, rtol=1e-9)
        np.testing.assert_allclose(seen[name].active, [(h > 0).double().mean() for h in active[name]], rtol=1e-12)
        assert seen[name].active.shape == (len(outputs[name]),) and (seen[name].active > 0.1).all()
        assert seen[name].statistics == []


RUNNING = ["batchnorm", "powernorm-v", "powernorm"]


@pytest.mark.parametrize("groups", [0, 2])
@pytest.mark.parametrize("norm", RUNNING)
@pytest.mark.one_in(test=2)
def test_statistics_of_norms(norm, groups):
    """Against their definitions, in training, with padding."""
    options = {"encoder_norm": norm, "decoder_norm": "layernorm", "groupscaling": groups}
    model, skeleton = built(**options)
    before = {name: buffer.clone() for name, buffer in skeleton.named_buffers()}
    kinds, met = (nfnn.BatchNorm, nfnn.PowerNormV, nfnn.PowerNorm), {}

    def keep(name):
        def hook(_module, args, y):
            y.retain_grad()
            met[name] = args[0], y

        return hook

    for name, module in skeleton.named_modules():
        if isinstance(module, kinds):
            module.register_forward_hook(keep(name))
    with analysis.statistics(skeleton.train()) as found:
        loss(run(model, skeleton)[1]).backward()
    assert list(found) == [f"encoder.layers.{i}.norm{j}" for i in (0, 1) for j in (1, 2)] + ["encoder.norm"]
    for name, (x, y) in met.items():
        x, dy, module = x[SOURCE != ref.PAD], y.grad[SOURCE != ref.PAD], skeleton.get_submodule(name)
        if groups:
            x = x.unflatten(-1, (groups, -1))
            x = (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2)
        mean = x.mean(0) if norm == "batchnorm" else torch.zeros(D)
        square = (x - mean).square().mean(0)
        gain = module.weight / (square + 1e-5).sqrt()
        of_mean, of_square = gain * dy.mean(0), gain * (dy * (x - mean) / (square + 1e-5).sqrt()).mean(0)
        if norm == "batchnorm":
            old = mean - before[f"{name}.running_mean"], square - before[f"{name}.running_var"]
            expected = [*old, None, of_mean, of_square, None]
        else:
            expected = [None, None, square - before[f"{name}.running_phi"].flatten(), None, None, of_square]
        expected = [np.nan if v is None else v.norm().item() / D for v in expected]
        np.testing.assert_allclose(found[name], [*expected, (gain.abs() <= 1).double().mean()], rtol=1e-9)
        assert not any(torch.equal(b, before[f"{name}.{own}"]) for own, b in module.named_buffers())


@pytest.mark.parametrize("norm", [*RUNNING, "repbn"])
@pytest.mark.one_in(test=2)
def test_the_models_statistics_are_the_skeletons(norm):
    # With η = 1 the stream doubles at each norm, until softmax lets no gradient through.
    model, skeleton = built(norm, **{"repbn_start": "zeros"} if norm == "repbn" else {})
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with analysis.statistics(skeleton) as expected, torch.no_grad():
        run(model, skeleton)
    seen = analysis.observe(model.eval(), SOURCE, TARGET)
    found = [*seen["encoder"].statistics, *seen["decoder"].statistics]
    np.testing.assert_allclose(found, list(expected.values()), rtol=1e-9)
    assert len(found) == 2 * 2 + 3 * 3 + 2 and np.isnan([norm[3:6] for norm in found]).all()
    with analysis.statistics(skeleton) as expected:
        loss(run(model, skeleton)[1]).backward()
    with torch.no_grad():
        seen = analysis.observe(model, SOURCE, TARGET, loss)
    found = [*seen["encoder"].statistics, *seen["decoder"].statistics]
    np.testing.assert_allclose(found, list(expected.values()), rtol=1e-7)
    assert min(np.nanmin(one[3:6]) for one in found) > 0
    in_training = analysis.observe(model.train(), SOURCE, TARGET, loss)["encoder"].statistics  # with dropout
    assert all(np.nanmin(norm[:3]) > 0 and np.nanmin(norm[3:6]) > 0 for norm in in_training)
    assert not np.allclose(in_training[0], found[0], equal_nan=True)
    model.requires_grad_(False)
    frozen = analysis.observe(model.eval(), SOURCE, TARGET, loss)["encoder"].statistics
    np.testing.assert_array_equal(frozen, seen["encoder"].statistics)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_statistics_under_activation_checkpointing(use_reentrant):
    """And with padding, against the real rows alone."""
    x, mask = torch.randn(3, 5, 4, requires_grad=True), torch.arange(5).expand(3, 5) > torch.tensor([[2], [4], [3]])
    found = []
    for run in (lambda f, x: f(x[~mask]), lambda f, x: checkpoint(f, x, use_reentrant=use_reentrant)):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nfnn.BatchNorm(4), nn.Linear(4, 4), nfnn.PowerNorm(4, warmup_iters=0))
        masks = nfnn.padding_mask(mask) if found else contextlib.nullcontext()
        with analysis.statistics(model) as statistics, masks:
            run(model, x).square().sum().backward()
        found.append(statistics)
    assert list(found[0]) == ["1", "3"] and found[0]["3"].power_gradient > 0
    for name, statistics in found[0].items():
        np.testing.assert_allclose(found[1][name], statistics, rtol=1e-6)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_last_forward_counts(use_reentrant):
    """With its own gradient, whichever forward is run again first; what changes in place afterwards does not."""
    first, last = torch.randn(6, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    model = nn.Sequential(nn.Linear(4, 4), nfnn.PowerNormV(4))
    with analysis.statistics(model) as expected:
        model(first), model(last).square().sum().backward()
    model[1].reset_running_stats()
    with analysis.statistics(model) as found:
        sums = [checkpoint(model, x, use_reentrant=use_reentrant).square().sum() for x in (first, last)]
        (sums[0] + sums[1]).backward()
    np.testing.assert_allclose(found["1"], expected["1"], rtol=1e-6)
    with analysis.statistics(model) as none:  # of a forward before the block only the second run comes
        pass
    late = checkpoint(model, last, use_reentrant=use_reentrant).sum()
    with analysis.statistics(model) as none:
        late.backward()
    assert none == {}
    norm, x = nfnn.BatchNorm(4), torch.randn(5, 4)
    with analysis.statistics(norm) as expected:
        norm.eval()(x)
    with analysis.statistics(norm) as found:
        norm(x)
        x += 1
    assert found[""][:2] == expected[""][:2]


def test_statistics_end_with_their_block():
    model = nn.Sequential(nfnn.PowerNormV(4), nfnn.BatchNorm(4))
    with pytest.raises(ZeroDivisionError), analysis.statistics(model) as found:
        raise ZeroDivisionError
    with analysis.statistics(model) as found:
        model[1](torch.randn(3, 4))
        model[1](torch.full((3, 4), torch.nan), padding_mask=torch.ones(3, dtype=torch.bool))
    assert list(found) == ["1"] and np.isnan(found["1"]).all()
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda logits: logits, r"one number that depends on the logits; got a Tensor of shape \(3, 4, 20\)"),
        (lambda logits: logits.detach().sum(), "one number that depends on the logits; got a Tensor"),
        (lambda logits: 1.0, "got a float"),
    ],
)
def test_a_loss_is_one_number(wrong, said):
    model, _ = built("batchnorm")
    with pytest.raises(nfrs.InputError, match=said):
        analysis.observe(model, SOURCE, TARGET, wrong)
    with pytest.raises(ZeroDivisionError):
        analysis.observe(model, SOURCE, TARGET, lambda logits: 1 / 0)


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
    distance = analysis.observe(model, SOURCE, TARGET)["encoder"].statistics[0][which]
    assert distance == pytest.approx((buffer - before).norm().item() / D, rel=1e-9)
    assert all(torch.equal(b, after[name]) for name, b in model.named_buffers())
    assert analysis.observe(model.eval(), SOURCE, TARGET)["encoder"].statistics[0][which] != distance


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
