"""Optimizers beside Adam: their steps against torch.optim.Muon and formulas in f64, and in the training loop."""

import json

import pytest
import torch
from torch.optim import _muon
from train_support import fit, losses, weights, whole_batch

import normformer_rs as nfrs
import reference as ref
from normformer_rs import _core

QUIET = {"curves": False, "tensorboard": False}
SIZES = [(6, 10), (10, 6), (7, 7)]


def orthogonalised(matrix, norm):
    """The singular vectors with the quintic's values: no Newton-Schulz step."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / norm
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


def in_f64(gradient, ns_coefficients, ns_steps, eps):
    """What torch.optim.Muon does in bf16, in the matrix's own type."""
    assert ns_steps == 5 and ns_coefficients == (3.4445, -4.7750, 2.0315)
    return orthogonalised(gradient, gradient.norm().clamp(min=eps))


def twenty_steps(options, size, state, step):
    """A matrix after 20 of our steps, and after 20 of `step`'s."""
    torch.manual_seed(1)
    ours = torch.randn(size, dtype=torch.float64)
    theirs = torch.nn.Parameter(ours.clone())
    training = json.dumps({"weight_decay": 0.1, **options})
    for t in range(20):
        gradient = torch.randn(size, dtype=torch.float64) * 10 ** (t % 5 - 2)
        theirs.grad = gradient.clone()
        step(theirs)
        _core.step_by_rule(training, ours, gradient, state, 0.02)
    return ours, theirs.detach()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", ["rms", "spectral"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs(size, scale, nesterov, monkeypatch):
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", in_f64)
    made = {}

    def step(p):
        adjust = {"rms": "match_rms_adamw", "spectral": "original"}[scale]
        given = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust}
        made.setdefault("optimizer", torch.optim.Muon([p], **given)).step()

    options = {"optimizer": "muon", "muon_scale": scale, "muon_nesterov": nesterov, "muon_momentum": 0.9}
    ours, theirs = twenty_steps(options, size, [torch.zeros(size, dtype=torch.float64)], step)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_in_bf16_the_iteration_is_as_near_as_torchs(size):
    """torch.optim.Muon iterates in bf16, too: after 20 steps ours are as far from exact steps as torch's, within a
    factor of two."""

    def steps_of_torch():
        made = {}

        def step(p):
            given = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "original"}
            made.setdefault("optimizer", torch.optim.Muon([p], **given)).step()

        options = {"optimizer": "muon", "muon_scale": "spectral", "muon_momentum": 0.9, "precision": "bf16"}
        return twenty_steps(options, size, [torch.zeros(size, dtype=torch.float64)], step)

    ours, in_bf16 = steps_of_torch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_muon, "_zeropower_via_newtonschulz", in_f64)
        _, exact = steps_of_torch()
    rounding = (in_bf16 - exact).norm()
    assert rounding / 2 < (ours - exact).norm() < 2 * rounding


@pytest.mark.parametrize("size", SIZES)
def test_normuon_is_its_equations(size):
    m, v = torch.zeros(size, dtype=torch.float64), torch.zeros(size[0], 1, dtype=torch.float64)

    def step(p):
        m.mul_(0.95).add_(0.05 * p.grad)
        d = 0.05 * p.grad + 0.95 * m
        found = orthogonalised(d, d.norm() + 1e-7)
        v.mul_(0.9).add_(0.1 * (found**2).mean(1, keepdim=True))
        rows = found / (v.sqrt() + 1e-10)
        rows *= found.norm() / (rows.norm() + 1e-10) * max(1, size[0] / size[1]) ** 0.5
        p.data = p.data * (1 - 0.02 * 0.1) - 0.02 * rows

    state = [torch.zeros_like(m), torch.zeros_like(v)]
    options = {"optimizer": "normuon", "normuon_beta2": 0.9, "muon_scale": "spectral"}
    ours, theirs = twenty_steps(options, size, state, step)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_lion_is_its_algorithm():
    m = torch.zeros(5, dtype=torch.float64)

    def step(p):
        c = 0.9 * m + 0.1 * p.grad
        p.data = p.data - 0.02 * (torch.sign(c) + 0.1 * p.data)
        m.copy_(0.98 * m + 0.02 * p.grad)

    ours, theirs = twenty_steps({"optimizer": "lion"}, (5,), [torch.zeros_like(m)], step)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_on_the_sphere_a_matrix_keeps_its_norm():
    torch.manual_seed(0)
    p, state = torch.randn(6, 4, dtype=torch.float64), [torch.zeros(6, 4, dtype=torch.float64)]
    before, plain = p.clone(), p.clone()
    gradient = torch.randn(6, 4, dtype=torch.float64)
    _core.step_by_rule('{"optimizer": "muon", "muon_on_sphere": true}', p, gradient, state, 0.1)
    _core.step_by_rule('{"optimizer": "muon"}', plain, gradient, [torch.zeros_like(p)], 0.1)
    torch.testing.assert_close(p, plain * before.norm() / plain.norm(), rtol=0, atol=1e-12)


# In the training loop.

LOOP = {"updates": 6, "evaluate_every": 3, "weight_decay": 0.1, "clip_norm": 1.0}


@pytest.mark.parametrize("name", ["muon", "normuon", "lion"])
def test_a_run_with_another_optimizer_goes_on_to_the_same_bits(name, tmp_path, corpus):
    fit(tmp_path / "whole", corpus, training={**LOOP, "optimizer": name}, **QUIET)
    fit(tmp_path / "run", corpus, training={**LOOP, "optimizer": name, "updates": 3}, **QUIET)
    fit(tmp_path / "run", corpus, training={**LOOP, "optimizer": name}, resume=True, **QUIET)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole") and len(losses(tmp_path / "run")) == 6
    fit(tmp_path / "adam", corpus, training=LOOP, **QUIET)
    adam, other = losses(tmp_path / "adam"), losses(tmp_path / "run")
    assert adam[1] == other[1] and adam[3] != other[3]
    with pytest.raises(nfrs.InputError, match="optimizer"):
        fit(tmp_path / "run", corpus, training={**LOOP, "optimizer": "adam", "updates": 8}, resume=True, **QUIET)


def test_muon_learns(tmp_path, corpus):
    training = {"updates": 60, "evaluate_every": 60, "lr": 1e-2, "optimizer": "muon", "schedule": "cosine", "warmup": 6}
    fit(tmp_path / "run", corpus, training=training, **QUIET)
    found = [*losses(tmp_path / "run").values()]
    assert sum(found[-5:]) < 0.8 * sum(found[:5])


NGPT = {"residual": "ngpt", "logit_scale": True, "tie_embeddings": "none", "scale_embeddings": False}


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_unit_matrices_stay_on_the_sphere(optimizer, tmp_path, corpus):
    """After every update each vector along the width has length 1. A run that stopped and went on has the same bits:
    vectors of length 1 stay as they are when it begins."""
    training = {**LOOP, "optimizer": optimizer, "weight_decay": 0.0, "unit_matrices": True, "keep": 9}
    fit(tmp_path / "whole", corpus, model=NGPT, training=training, **QUIET)
    fit(tmp_path / "run", corpus, model=NGPT, training={**training, "updates": 3}, **QUIET)
    fit(tmp_path / "run", corpus, model=NGPT, training=training, resume=True, **QUIET)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole") and len(losses(tmp_path / "run")) == 6
    state = weights(tmp_path / "whole")
    again = weights(tmp_path / "run")
    assert all(torch.equal(value, again[name]) for name, value in state.items())
    model = nfrs.Transformer.from_checkpoint(tmp_path / "whole", "last")
    matrices = [name for name, p in model.named_parameters() if p.dim() == 2]
    assert sorted(matrices) == sorted(nfrs.unit_matrices_(model))
    for name in matrices:
        lengths = state[name].norm(dim=0 if name.endswith(("out_proj.weight", "linear2.weight")) else 1)
        is_near = (lengths - 1).abs() < 1e-6
        assert is_near.all() or (name.endswith("embedding.weight") and (is_near | (lengths == 0)).all()), name


def test_unit_matrices_are_those_of_torchs_adam(tmp_path, corpus):
    """One update of the loop, from the gradients of the same model in PyTorch."""
    plain = {"updates": 1, "evaluate_every": 1, "adam_form": "torch", "label_smoothing": 0.0}
    fit(
        tmp_path / "start",
        corpus,
        model=NGPT,
        training={**plain, "lr": 1e-30, "min_lr": 0.0, "unit_matrices": True},
        **QUIET,
    )
    fit(tmp_path / "run", corpus, model=NGPT, training={**plain, "unit_matrices": True}, **QUIET)
    model = nfrs.Transformer.from_checkpoint(tmp_path / "start", "last").double()
    batch, mask = whole_batch(tmp_path / "start", corpus)
    logits = model(batch.source, batch.target_input).masked_fill(~mask, -torch.inf)
    real = batch.target != ref.PAD
    torch.nn.functional.cross_entropy(logits[real], batch.target[real]).backward()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, betas=(0.9, 0.98))
    optimizer.step()
    nfrs.unit_matrices_(model)
    found = weights(tmp_path / "run")
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(found[name].double(), expected, rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"muon_momentum": 0.9}, 'muon_momentum would do nothing with optimizer = "adam"'),
        ({"optimizer": "muon", "normuon_beta2": 0.9}, 'normuon_beta2 would do nothing with optimizer = "muon"'),
        ({"optimizer": "muon", "muon_lr_multiplier": 0.0}, "muon_lr_multiplier must be greater than 0"),
        (
            {"optimizer": "muon", "muon_on_sphere": True, "unit_matrices": True},
            "muon_on_sphere keeps each matrix's norm",
        ),
        ({"schedule": "wsd", "updates": 0, "epochs": 1}, 'schedule = "wsd" needs the length of the run: give updates'),
        ({"lr_end": 0.1}, 'lr_end would do nothing with schedule = "constant"'),
        ({"schedule": "cosine", "decay_share": 0.5}, 'decay_share would do nothing with schedule = "cosine"'),
        ({"warmup_share": 2.0}, r"warmup_share must lie in \(0, 1\], got 2"),
    ],
)
def test_options_that_do_nothing_are_refused(options, said, tmp_path, corpus):
    with pytest.raises(nfrs.InputError, match=said):
        fit(tmp_path / "run", corpus, training=options, **QUIET)


@pytest.mark.parametrize("scale", ["rms", "spectral"])
@pytest.mark.parametrize("parametrisation", ["mup", "completep"])
def test_rates_under_a_parametrisation_are_those_of_param_groups(parametrisation, scale, monkeypatch, tmp_path, corpus):
    """One update of the loop, from the gradients of the same model in PyTorch, by torch's optimizers with the groups'
    rates."""
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", in_f64)
    model = {"parametrisation": parametrisation, "base_width": 4, "linear_biases": False} | BASE_DEPTH[parametrisation]
    plain = {"updates": 1, "evaluate_every": 1, "adam_form": "torch", "label_smoothing": 0.0, "weight_decay": 0.1}
    plain |= {"clip_norm": 0.0, "optimizer": "muon", "muon_scale": scale}
    fit(tmp_path / "start", corpus, model=model, training={**plain, "lr": 1e-30, "min_lr": 0.0}, **QUIET)
    fit(tmp_path / "run", corpus, model=model, training=plain, **QUIET)
    start = nfrs.Transformer.from_checkpoint(tmp_path / "start", "last").double()
    batch, mask = whole_batch(tmp_path / "start", corpus)
    logits = start(batch.source, batch.target_input).masked_fill(~mask, -torch.inf)
    real = batch.target != ref.PAD
    torch.nn.functional.cross_entropy(logits[real], batch.target[real]).backward()
    groups = nfrs.param_groups(start, 1e-2, weight_decay=0.1, optimizer="muon", muon_scale=scale)
    adjust = {"rms": "match_rms_adamw", "spectral": "original"}[scale]
    of_muon = [group for group in groups if group["optimizer"] == "muon"]
    torch.optim.Muon([separate(group, start.config.d_model) for group in of_muon], adjust_lr_fn=adjust).step()
    torch.optim.AdamW([group for group in groups if group["optimizer"] == "adam"], betas=(0.9, 0.98)).step()
    found = weights(tmp_path / "run")
    for name, expected in start.state_dict().items():
        torch.testing.assert_close(found[name].double(), expected, rtol=0, atol=2e-5, msg=name)


BASE_DEPTH = {"mup": {}, "completep": {"base_depth": 1}}


def separate(group, d_model):
    """A group in which queries, keys and values are matrices of their own, as the loop updates them."""
    params = []
    for p in group["params"]:
        is_stacked = p.shape[0] == 3 * d_model and p.shape[1] == d_model
        for part, gradient in zip(*(t.chunk(3 if is_stacked else 1) for t in (p.data, p.grad))):
            params.append(torch.nn.Parameter(part))
            params[-1].grad = gradient
    return {**group, "params": params, "names": [str(i) for i in range(len(params))]}


UNIT = {"parametrisation": "u-mup", "attention_length": 8, "architecture": "decoder-only", "activation": "swiglu"}
UNIT |= {"norm": "rmsnorm", "positions": "rotary", "tie_embeddings": "none"}


def test_other_optimizers_are_refused_under_unit_scaling(tmp_path, corpus):
    data = {key: path for key, path in corpus.items() if key.endswith("target")} | {"segment_length": 8}
    with pytest.raises(
        nfrs.InputError, match='parametrisation "u-mup" has rates for Adam alone, got optimizer = "lion"'
    ):
        fit(tmp_path / "run", data, model=UNIT, training={**LOOP, "optimizer": "lion"}, **QUIET)
    model = nfrs.Transformer(nfrs.TransformerConfig(**UNIT, vocab_size=20, dropout=0.0), seed=1)
    with pytest.raises(nfrs.InputError, match='parametrisation "u-mup" has rates for Adam alone: leave optimizer out'):
        nfrs.param_groups(model, 1e-3, optimizer="muon", muon_scale="rms")


def test_unit_matrices_under_a_parametrisation_are_refused(tmp_path, corpus):
    model = {"parametrisation": "mup", "base_width": 8}
    with pytest.raises(nfrs.InputError, match="unit_matrices sets the lengths of matrices, which the parametrisation"):
        fit(tmp_path / "run", corpus, model=model, training={"unit_matrices": True}, **QUIET)


# Groups for torch.optim.Muon.


def layers():
    torch.manual_seed(0)
    return torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)


def test_groups_for_muon_name_every_parameter_once():
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**shape))
    nfrs.swap_residuals(model, "hyper-connections")
    groups = nfrs.param_groups(model, 1e-3, weight_decay=0.1, optimizer="muon")
    muon, adam = ([n for g in groups if g["optimizer"] == kind for n in g["names"]] for kind in ("muon", "adam"))
    parameters = dict(model.named_parameters())
    assert sorted(muon + adam) == sorted(parameters)
    ends = {name.partition("layers.")[2].partition(".")[2] for name in muon}
    assert {f"self_attn.{x}_proj.weight" for x in "qkvo"} <= ends and not any("hyper" in end for end in ends), ends
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= {*adam}
    assert all(parameters[name].dim() == 2 for name in muon)


def test_groups_for_muon_train_with_torchs():
    model = layers()
    groups = nfrs.param_groups(model, 1e-2, weight_decay=0.1, optimizer="muon")
    muon = torch.optim.Muon([g for g in groups if g["optimizer"] == "muon"], adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW([g for g in groups if g["optimizer"] == "adam"])
    assert [g["eps"] for g in muon.param_groups] == [1e-7] and {g["lr"] for g in muon.param_groups} == {1e-2}
    before = {name: p.clone() for name, p in model.named_parameters()}
    (model(torch.randn(2, 5, 16)) ** 3).mean().backward()
    muon.step(), adam.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_groups_for_another_optimizer_are_refused():
    with pytest.raises(nfrs.InputError, match=r'unknown optimizer "moun" \(did you mean "muon"\?\)'):
        nfrs.param_groups(layers(), 1e-3, optimizer="moun")
    with pytest.raises(nfrs.InputError, match="the rate of Muon's matrices depends on its steps' scale"):
        nfrs.param_groups(layers(), 1e-3, optimizer="muon", parametrisation="mup", base_width=8)
    with pytest.raises(nfrs.InputError, match='muon_scale would do nothing with optimizer = "adam"'):
        nfrs.param_groups(layers(), 1e-3, muon_scale="rms")
    with pytest.raises(nfrs.InputError, match=r'unknown muon_scale "rmz" \(did you mean "rms"\?\)'):
        nfrs.param_groups(layers(), 1e-3, optimizer="muon", muon_scale="rmz")
