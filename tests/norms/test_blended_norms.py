"""RepBN and PRepBN as modules: against the oracle, their clock, and what no forward may change."""

import copy
import warnings
from functools import partial

import pytest
import torch
from norms_support import close
from torch.utils.checkpoint import checkpoint

import normformer_rs as nfrs
import reference as ref
from normformer_rs import nn
from normformer_rs.nn.step_hooks import PATIENCE

pytestmark = pytest.mark.device
KINDS = {
    "repbn": ("repbn", {}),
    "repbn, zeros": ("repbn", {"start": "zeros", "alpha": 0.5}),
    "prepbn": ("prepbn", {"steps": 3}),
    "prepbn, rmsnorm": ("prepbn", {"steps": 2, "warm": 2, "row": "rmsnorm", "start": "zeros"}),
}


def build(kind, width=6, dtype=torch.float64, **more):
    """The module, with parameters away from their first values."""
    name, options = KINDS[kind]
    norm = nn.norm_class(name)(width, dtype=dtype, **options, **more)
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(0.5 * torch.randn_like(p))
    return norm


def oracle(norm):
    """The oracle with copies of the module's tensors, and those of them that learn, by name."""
    learned = {name: p.detach().clone().requires_grad_() for name, p in norm.named_parameters()}
    state = learned | {name: b.clone() for name, b in norm.named_buffers()}
    options = {name: getattr(norm, name) for name in ("alpha", "steps", "warm", "row") if hasattr(norm, name)}
    twin = ref.BLENDED_NORMS[norm.declared.name](learned["weight"], learned["bias"], state, eps=norm.eps, **options)
    return twin, learned


def batch(dtype=torch.float64, masked=False, width=6):
    x = (2 * torch.randn(4, 5, width, dtype=torch.float64) + 0.7).to(dtype)
    mask = (torch.rand(4, 5) < 0.4) if masked else None
    return x, torch.randn(4, 5, width, dtype=torch.float64).to(dtype), mask


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_formula(kind, masked):
    """Seven updates, through warm-up and fade: y, all gradients and the statistics; then evaluation. What stands at
    padding, even NaN, reaches nothing."""
    norm = build(kind)
    twin, learned = oracle(norm)
    for t in range(1, 8):
        for clock in (b for b in (twin.buffers.get("t"), getattr(norm, "t", None)) if b is not None):
            clock.fill_(t)
        for training in (True, False):
            x, dy, mask = batch(masked=masked)
            ours = (x if mask is None else x.masked_fill(mask.unsqueeze(-1), torch.nan)).requires_grad_()
            theirs = x.clone().requires_grad_()
            y, expected = norm.train(training)(ours, mask), twin(theirs, mask, training)
            wanted = torch.autograd.grad(expected, [theirs, *learned.values()], dy, allow_unused=True)
            found = torch.autograd.grad(y, [ours, *norm.parameters()], dy, allow_unused=True)
            close([y, *found], [expected, *(zero(a, b) for a, b in zip(found, wanted))])
            close(norm.buffers(), [twin.buffers[name] for name, _ in norm.named_buffers()])


def zero(found, wanted):
    """What the oracle does not compute has a gradient of 0."""
    return torch.zeros_like(found) if wanted is None and found is not None else wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_bits_are_rounded_once(kind, dtype):
    norm = build(kind, dtype=dtype)
    exact, (x, dy, mask) = copy.deepcopy(norm).double(), batch(dtype, masked=True)
    found, wanted = [], []
    for module, given, to in ((norm, x, found), (exact, x.double(), wanted)):
        given = given.requires_grad_()
        y = module(given, mask)
        to += [y, *torch.autograd.grad(y, given, dy.to(y.dtype))]
    assert found[0].dtype == found[1].dtype == dtype and norm.share.dtype == dtype
    for ours, theirs in zip(found, wanted):
        torch.testing.assert_close(ours, theirs.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_true_gradients_of_both_orders(kind):
    norm, (x, _, mask) = build(kind, 3), batch(masked=True, width=3)
    if hasattr(norm, "t"):
        norm.set_t(norm.warm + 2)
    inputs = (x.requires_grad_(), *norm.parameters())
    names = [name for name, _ in norm.named_parameters()]

    def f(x, *values):
        again = copy.deepcopy(norm)
        return torch.func.functional_call(again, dict(zip(names, values)), (x, mask))

    assert torch.autograd.gradcheck(f, inputs) and torch.autograd.gradgradcheck(f, inputs)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_moves_statistics_once(kind, reentrant):
    """With a mask that is gone in the second run, during the fade."""
    norm = build(kind)
    if hasattr(norm, "t"):
        norm.set_t(norm.warm + 2)
    plain, (x, dy, mask) = copy.deepcopy(norm), batch(masked=True)
    found = []
    for module, call in ((norm, partial(checkpoint, norm, use_reentrant=reentrant)), (plain, plain)):
        given = x.clone().requires_grad_()
        with nn.padding_mask(mask):
            y = call(given)
        y.backward(dy)
        found.append([y, given.grad, *(p.grad for p in module.parameters()), *module.buffers()])
    close(*found, 1e-12)


@pytest.mark.parametrize("start", ["ones", "zeros"])
@pytest.mark.parametrize("name", ref.BLENDED_NORMS)
def test_first_values_and_their_factor(name, start):
    norm = nn.norm_class(name)(4, start=start)
    first = float(start == "ones")
    wanted = {"weight": first, "bias": 0.0, "share": first, "row_weight": 1.0, "row_bias": 0.0}
    assert all((p == wanted[key]).all() for key, p in norm.named_parameters())
    norm.first_scale = 0.5  # as a scheme declares it
    norm.reset_parameters()
    for key, p in norm.named_parameters():
        assert (p == wanted[key] / (2 if key in ("weight", "share", "row_weight") else 1)).all(), key
    bare = nn.norm_class(name)(4, elementwise_affine=False)
    assert [key for key, _ in bare.named_parameters()] == ["share"] and bare(torch.randn(3, 4)).isfinite().all()
    assert not any("bias" in key for key, _ in nn.norm_class(name)(4, bias=False).named_parameters())


def test_optimizers_and_callers_move_the_clock():
    """Steps do, a reset and `reset_running_stats` do what they say, and who moves t by no means is told."""
    norm, x = nn.PRepBN(4, steps=2), torch.randn(3, 5, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), norm)
    rule = torch.optim.AdamW(model.parameters())
    for t in (1, 2, 3, 4):
        assert norm.t.item() == t and (norm.grown() == min(1.0, (t - 1) / 2)).all()
        model(x).square().sum().backward()
        rule.step()
    norm.reset_running_stats()
    assert norm.t.item() == 5 and (norm.running_mean == 0).all()
    norm.reset_parameters()
    assert norm.t.item() == 1 and nn.set_num_updates(model, 7) == 1 and norm.t.item() == 7
    restored = nn.PRepBN(4, steps=2)
    restored.load_state_dict(norm.state_dict())
    assert restored.t.item() == 7
    with pytest.raises(nfrs.InputError, match="must be the number of an update"):
        restored.load_state_dict(norm.state_dict() | {"t": torch.tensor([6.5])})
    still = nn.PRepBN(4, warm=3)
    with pytest.warns(UserWarning, match=r"t of the residual scheme or norm has not moved.*set_num_updates"):
        for _ in range(PATIENCE + 1):
            still(x).square().sum().backward()
            still.row_weight.data.sub_(0.01 * still.row_weight.grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        still(x)


def test_a_copy_of_averaged_weights_takes_over_the_clock():
    norm, x = nn.PRepBN(4, steps=9), torch.randn(3, 5, 4)
    average = torch.optim.swa_utils.AveragedModel(norm)
    rule = torch.optim.SGD(norm.parameters(), 0.1)
    for _ in range(3):
        norm(x).square().sum().backward()
        rule.step()
        average.update_parameters(norm)
    assert average.state_dict()["module.t"].item() == 4


def test_swaps_keep_the_model_until_the_fade():
    """A fresh prepbn computes in training what the LayerNorms computed, with their gains; repbn takes gains as γ."""
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    x, before = torch.randn(3, 5, 8), copy.deepcopy(model)
    nfrs.swap_norms(model, "prepbn", steps=2)
    torch.testing.assert_close(model(x), before(x))
    assert torch.equal(model.layers[0].norm1.row_weight, before.layers[0].norm1.weight)
    assert nn.set_num_updates(model, 3) == 4 and not torch.allclose(model(x), before(x))
    nfrs.swap_norms(before, "repbn")
    assert not torch.equal(before.layers[0].norm1.weight, torch.ones(8))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: nn.RepBN(4, start="one"), 'unknown .*"one".*did you mean "ones"'),
        (lambda: nn.PRepBN(4, row="rms"), 'unknown .*"rms".*layernorm, rmsnorm'),
        (lambda: nn.PRepBN(4, steps=0), "steps must be at least 1, got 0"),
        (lambda: nn.PRepBN(4, warm=-1), "warm must be at least 0, got -1"),
        (lambda: nn.RepBN(4, alpha=1.0), "alpha must lie in"),
        (lambda: nn.PRepBN(4, groups=2), "PRepBN has no group scaling, got groups=2: leave it out"),
        (lambda: nn.RepBN(4)(torch.ones(2, 3)), r"x must be \(…, 4\)"),
        (lambda: nfrs.TransformerConfig(norm="repbn", repbn_start="one"), 'did you mean "ones"'),
        (
            lambda: nfrs.Transformer(nfrs.TransformerConfig(vocab_size=9, norm="repbn", qk_norm=True)),
            "which repbn cannot be",
        ),
    ],
)
def test_bad_input_is_said(call, message):
    with pytest.raises(nfrs.InputError, match=message):
        call()
    with pytest.raises(TypeError, match="float32, float64"):
        nn.RepBN(4)(torch.ones(2, 4).long())


def test_a_trained_prepbn_becomes_the_repbn_that_it_evaluates_as():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.Linear(6, 6))
    nfrs.swap_norms(model, "prepbn", steps=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5):
        model(torch.randn(4, 3, 6) + 1).square().mean().backward()
        optimizer.step()
    x = torch.randn(4, 3, 6)
    expected = model.eval()(x)
    with pytest.raises(nfrs.InputError, match="0 is a PRepBN that has begun to fade, and layernorm cannot take"):
        nfrs.swap_norms(model, "layernorm")
    table = nfrs.swap_norms(model, "repbn")
    assert type(model[0]) is nn.RepBN and torch.equal(model(x), expected) and "the same in evaluation" in str(table)
    nfrs.swap_norms(model, "prepbn")
    assert type(model[0]) is nn.PRepBN and torch.equal(model.eval()(x), expected)
    assert "share dropped" in str(nfrs.swap_norms(torch.nn.Sequential(nn.RepBN(6)), "rmsnorm"))
