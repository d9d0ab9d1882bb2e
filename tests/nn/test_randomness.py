"""Dropout masks are the same in forward and backward, and eager's, where torch takes the forward pass apart: under
torch.compile with a memory budget, torch.func, and activation checkpointing."""

import copy

import pytest
import torch
import torch._functorch.config as functorch
from nn_support import FF, HEADS, NORMS, RESIDUALS, D, encoder, shake
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from normformer_rs import nn as nfnn

BACKEND = "aot_eager_decomp_partition"  # inductor's partitioner without its compiler


def layer_of(residual="prenorm", dropout=0.3, **options):
    torch.manual_seed(0)
    given = {"batch_first": True, "dtype": torch.float64, "norm": "scalenorm", "encoder_layers": 1}
    return shake(nfnn.TransformerEncoderLayer(D, HEADS, FF, dropout, residual=residual, **{**given, **options}))


def slope(f, x, v, seed=5, h=1e-5):
    """The derivative of f along v by differences, each of the same masks."""

    def at(point):
        torch.manual_seed(seed)
        return f(point).detach()

    return (at(x + h * v) - at(x - h * v)) / (2 * h)


def check_slope(f, x):
    v = torch.randn_like(x)
    torch.manual_seed(5)
    found = (torch.autograd.grad(f(x.requires_grad_()), x)[0] * v).sum()
    torch.testing.assert_close(found, slope(f, x.detach(), v), rtol=1e-6, atol=1e-6)


@pytest.fixture
def budget():
    torch._dynamo.reset()
    yield lambda share: functorch.patch(activation_memory_budget=share)
    torch._dynamo.reset()


@pytest.mark.parametrize("share", [0.7, 0.3])
@pytest.mark.parametrize("residual", ["rezero", "postnorm"])
@pytest.mark.one_in(test=2)
def test_a_compiled_residual_has_one_mask(budget, residual, share):
    """y = x + drop(x) at x = 1, so that dy/dx is y."""
    block = nfnn.Residual(nn.Identity(), 64, scheme=residual, norm="l2norm", dropout=0.5)
    if residual == "rezero":
        nn.init.ones_(block.branch_scale1 if hasattr(block, "branch_scale1") else next(block.parameters()))
    x, seen = torch.ones(32, 64, requires_grad=True), []

    def call(x):
        return block(x * 1.0)

    with budget(share):
        for f in (torch.compile(call, backend=BACKEND, fullgraph=True), call):
            torch.manual_seed(3)
            y = f(x)
            seen.append((y.detach(), torch.autograd.grad(y.square().sum(), x)[0]))
    (y, dx), (eager, d_eager) = seen
    torch.testing.assert_close(y, eager)  # the masks are eager's
    torch.testing.assert_close(dx, d_eager)


@pytest.mark.parametrize(
    "share,options",
    [
        (0.3, {}),
        (0.7, {"activation": "gelu"}),
        *(
            pytest.param(share, {"residual": residual}, marks=pytest.mark.full)
            for share in (0.3, 0.7)
            for residual in ("prenorm", "sandwich", "mhc", "attnres")
        ),
    ],
    ids=str,
)
@pytest.mark.one_in(all=16)
def test_a_compiled_layer_has_one_mask(budget, share, options):
    layer, x = layer_of(**options), torch.randn(2, 5, D, dtype=torch.float64)
    weight = torch.randn_like(x)
    with budget(share):
        compiled = torch.compile(lambda x: (layer(x) * weight).sum(), backend=BACKEND, fullgraph=True)
        check_slope(compiled, x)


def test_two_calls_on_one_input_draw_two_masks(budget):
    """The partitioner merges nodes of equal arguments, random ones excepted."""
    block, x = nfnn.Residual(nn.Identity(), 64, scheme="rezero", dropout=0.5), torch.ones(8, 64, requires_grad=True)
    nn.init.ones_(next(block.parameters()))
    with budget(0.5):
        one, other = torch.compile(lambda x: (block(x), block(x)), backend=BACKEND, fullgraph=True)(x)
        assert not torch.equal(one, other)
        torch.testing.assert_close(torch.autograd.grad((one + other).sum(), x)[0], (one + other).detach())


def test_no_budget_at_all_is_refused(budget):
    block = nfnn.Residual(nn.Identity(), 64, scheme="rezero", dropout=0.5)
    with budget(0.0):
        with pytest.raises(Exception, match="take a budget above 0, or dropout 0"):
            torch.compile(block, backend=BACKEND)(torch.ones(2, 64))
        torch._dynamo.reset()
        assert torch.equal(torch.compile(block.eval(), backend=BACKEND)(torch.ones(2, 64)), torch.ones(2, 64))


def test_graphs_without_a_budget_keep_torchs_dropout(budget):
    """Compilers fuse it."""
    block, seen = nfnn.Residual(nn.Identity(), 64, scheme="rezero", dropout=0.5), []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.compile(block, backend=backend, fullgraph=True)(torch.ones(2, 64))
    assert any("dropout" in name for name in seen) and not any("kept_seed" in name for name in seen)


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.one_in(test=5, all=3)
def test_grad_jvp_and_functional_call(residual):
    """torch.func's gradients are autograd's of the same seed."""
    model = encoder(residual, dropout=0.3).double()
    x, v = torch.randn(2, 3, 5, D, dtype=torch.float64)
    state, weight = {**dict(model.named_parameters()), **dict(model.named_buffers())}, torch.randn_like(x)

    def loss(state, x):
        return (torch.func.functional_call(model, state, (x,)) * weight).sum()

    torch.manual_seed(5)
    expected = torch.autograd.grad(loss(state, x), [*model.parameters()])
    learned = {name: p for name, p in state.items() if p.is_floating_point()}
    torch.manual_seed(5)
    found = torch.func.grad(lambda learned: loss({**state, **learned}, x))(learned)
    torch.testing.assert_close([*found.values()], [*expected])
    torch.manual_seed(5)
    value, tangent = torch.func.jvp(lambda x: loss(state, x), (x,), (v,))
    if residual != "gpas":  # whose derivative is not the function's slope
        torch.testing.assert_close(tangent, slope(lambda x: loss(state, x), x, v), rtol=1e-6, atol=1e-6)
    torch.manual_seed(5)
    torch.testing.assert_close(value, loss(state, x))


@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("residual", ["prenorm", "sandwich", "mhc", "attnres"])
def test_vmap_of_grad(residual, randomness):
    """Gradients of single examples are those of their own masks."""
    model = encoder(residual, dropout=0.5)
    x, weight = torch.ones(6, 5, D), torch.randn(5, D)

    def loss(x):
        return (model(x.unsqueeze(0)) * weight).sum()

    torch.manual_seed(1)
    values = torch.vmap(loss, randomness=randomness)(x)
    torch.manual_seed(1)
    found, again = torch.vmap(torch.func.grad_and_value(loss), randomness=randomness)(x)
    torch.testing.assert_close(again, values)
    is_same = bool((values - values[0]).abs().max() < 1e-4)
    assert is_same == (randomness == "same")
    assert found.isfinite().all() and found.shape == x.shape
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(loss)(x)


def test_masks_under_vmap_are_those_of_the_drawn_seeds():
    block = nfnn.Residual(nn.Identity(), 64, scheme="rezero", dropout=0.5).double()
    nn.init.ones_(next(block.parameters()))
    x = torch.ones(4, 3, 64, dtype=torch.float64)
    for randomness in ("same", "different"):
        f = torch.vmap(torch.func.grad(lambda x: block(x).sum()), randomness=randomness)
        torch.manual_seed(2)
        dx = f(x)
        torch.manual_seed(2)
        y = torch.vmap(block, randomness=randomness)(x)
        assert torch.equal(dx, y) and set(dx.flatten().tolist()) == {1.0, 3.0}
        assert torch.equal(dx[0], dx[1]) == (randomness == "same")
    nested = torch.vmap(torch.vmap(block, randomness="different"), randomness="different")(x)
    rows = nested.flatten(0, 1)
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)


@pytest.mark.parametrize("share", [0.5, pytest.param(1.0, marks=pytest.mark.full)])
@pytest.mark.one_in(all=2)
def test_a_compiled_checkpoint_has_one_mask(budget, share):
    layer, x = layer_of(), torch.randn(2, 5, D, dtype=torch.float64)
    weight = torch.randn_like(x)
    with budget(share):
        call = lambda x: (checkpoint(layer, x, use_reentrant=False) * weight).sum()  # noqa: E731
        check_slope(torch.compile(call, backend=BACKEND, fullgraph=True), x)


def saves_products(_, op, *args, **kwargs):
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("way", ["non-reentrant", "reentrant", "selective"])
@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.one_in(test=16, all=12)
def test_checkpoints_repeat_their_masks(residual, way):
    check_checkpoint(encoder(residual, dropout=0.3).double(), way)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.one_in(test=3, all=2)
def test_checkpoints_of_every_norm(norm):
    for way in ("non-reentrant", "selective"):
        check_checkpoint(encoder("prenorm", norm, dropout=0.3).double(), way)


def check_checkpoint(model, way):
    x, statistics = torch.randn(2, 5, D, dtype=torch.float64), copy.deepcopy(model.state_dict())
    options = {"use_reentrant": way == "reentrant"}
    if way == "selective":
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(saves_products)
    found = []
    for call in (model, lambda x: checkpoint(model, x, **options)):
        torch.manual_seed(7)
        model.load_state_dict(statistics)
        model.zero_grad()
        rows = x.clone().requires_grad_()
        call(rows).square().sum().backward()
        found.append([rows.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    torch.testing.assert_close(*found)
