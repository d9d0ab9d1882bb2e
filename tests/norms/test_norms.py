"""Norms with statistics, ℓp norms and group scaling against the oracle: values, gradients, state."""

import copy
import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from norms_support import CASES, CLASSES, EPS, OPERATORS, build, close, data, oracle, run, same_buffers
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

import reference as ref
from cuda_emulator.checks import calls
from layouts import LAYOUTS
from normformer_rs import _core, nn

pytestmark = pytest.mark.device
OPS = torch.ops.normformer_rs
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TRUE = [name for name in CASES if not name.startswith("powernorm, release") and name != "powernorm"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [1, 7, 33, 123, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(test=13, all=8)
def test_error_is_at_most_twice_pytorchs(case, dtype, width, masked, layout):
    x, mask = data(width, dtype, (4, 6), masked)
    x, dy = LAYOUTS[layout](x), torch.randn(4, 6, width, dtype=torch.float64).to(dtype)
    if mask is not None:
        mask[0, 0] = False
    norm, name = build(case, width, dtype)
    count = OPERATORS[name]
    wide = copy.deepcopy(norm).double()
    exact_twin, twin = oracle(wide, name), oracle(norm, name)
    exact = run(lambda x: exact_twin(x, mask), exact_twin, x.double(), dy.double())
    theirs = run(lambda x: twin(x, mask), twin, x, dy)
    before = _core.operator_counts()[count]
    ours = run(lambda x: norm(x, mask), norm, x, dy)
    after = _core.operator_counts()[count]
    assert (after[0] - before[0], after[1] - before[1]) == calls(dtype), "kernel, composed formula"
    buffers = [(getattr(norm, key), b, exact_twin.buffers[key]) for key, b in twin.buffers.items()]
    everything = [*zip(("y", "dx", "dweight", "dbias"), ours, theirs, exact)]
    everything += [(key, *values) for key, values in zip(twin.buffers, buffers)]
    accumulator = torch.finfo(torch.float32 if dtype != torch.float64 else torch.float64)
    for key, o, t, e in everything:
        assert o.dtype == t.dtype and o.shape == e.shape
        # free are one rounding to the dtype and, in the computing type, a rounding of each of the terms that are summed
        # (at most all rows of the largest one, after they have been multiplied by the norm's largest factor)
        own = torch.finfo(o.dtype if o.dtype.is_floating_point else torch.float64)
        largest = max(e.abs().max().item(), dy.double().abs().max().item(), 1.0)
        factor = (1 / wide.running_phi.min().sqrt() if hasattr(wide, "running_phi") else torch.tensor(1.0)).item()
        free = own.eps * e.abs().max() + own.tiny * own.eps + 8 * accumulator.eps * largest * max(1.0, factor)
        assert (o.double() - e).abs().max() <= 2 * (t.double() - e).abs().max() + free, key


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(test=6, all=4)
def test_fifty_steps_are_the_formulas(case, masked):
    """The steps of docs/spec.md §1.9 in f64, warm-up ending on the way: y, gradients and state after every one."""
    norm, name = build(case, 6)
    if name == "powernorm" and norm.warmup_iters:
        norm.warmup_iters = 20
    twin = oracle(norm, name)
    for step in range(50):
        torch.manual_seed(step)
        x, mask = data(6, masked=masked)
        dy = torch.randn_like(x)
        if mask is not None:
            mask[0, 0] = False
        found = run(lambda x, mask=mask: norm(x, mask), norm, x, dy)
        wanted = run(lambda x, mask=mask: twin(x, mask), twin, x, dy)
        close(found, wanted)
        same_buffers(norm, twin)
    if name == "powernorm":
        assert norm.iters.item() == 50
    x, mask = data(6, masked=masked)
    dy = torch.randn_like(x)
    close(run(lambda x: norm.eval()(x, mask), norm, x, dy), run(lambda x: twin(x, mask, training=False), twin, x, dy))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_composed_form_is_the_kernel(case, training, masked):
    """What runs on devices without kernels, called on CPU tensors."""
    norm, name = build(case, 6)
    composed_calls = lambda: _core.operator_counts()[OPERATORS[name]][1]  # noqa: E731
    before = composed_calls()
    x, mask = data(6, masked=masked)
    dy, results = torch.randn_like(x), []
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for device in ("CPU", "MPS"):
        operator, backward = (
            torch.library.get_kernel(f"normformer_rs::{OPERATORS[name]}{suffix}", device)
            for suffix in ("", "_backward")
        )
        own = copy.deepcopy(norm)
        options = own.settings()
        with torch.no_grad():
            y, stats = operator.call_boxed(
                keys, x, own.weight, own.bias, mask, *own.state(), own.refused, None, train=training, eps=EPS, **options
            )
            moved = [own.state()[1], own.refused]
            options = {k: v for k, v in options.items() if k in ("alpha_bwd", "variant")}
            d = backward.call_boxed(keys, dy, x, own.weight, mask, *moved, stats, train=training, **options)
        results.append([y, stats, *d, *own.state_dict().values(), own.refused])
    assert composed_calls() == before + 1
    close(*results)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", TRUE)
@pytest.mark.one_in(test=2)
def test_true_gradients_of_both_orders(case, masked):
    norm, name = build(case, 4)
    x, mask = data(4, rows=(2, 3), masked=masked)
    run_operator = getattr(OPS, OPERATORS[name])
    settings = norm.settings()

    def f(x, weight, bias):
        state = [None if b is None else b.clone() for b in norm.state()]
        return run_operator(x, weight, bias, mask, *state, train=True, eps=EPS, **settings)[0]

    inputs = [x.requires_grad_(), norm.weight, norm.bias]
    assert gradcheck(f, inputs)
    if name != "powernorm":
        assert gradgradcheck(f, inputs)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(test=2)
def test_evaluations_gradients_of_both_orders(case):
    norm, _ = build(case, 4)
    norm.eval()
    x, mask = data(4, rows=(2, 3), masked=True)
    inputs = [x.requires_grad_(), norm.weight, norm.bias]
    call = lambda x, w, b: torch.func.functional_call(norm, {"weight": w, "bias": b}, (x, mask))  # noqa: E731
    before = {key: b.clone() for key, b in norm.state_dict().items()}
    assert gradcheck(call, inputs)
    assert gradgradcheck(call, inputs)
    assert all(torch.equal(b, before[key]) for key, b in norm.state_dict().items()), "evaluation moves nothing"


def test_powernorm_has_no_second_derivative():
    norm, _ = build("powernorm", 4)
    x = data(4)[0].requires_grad_()
    with pytest.raises(NotImplementedError, match="no function's derivative"):
        torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="call eval"):
        torch.func.grad(lambda x: norm(x).sum())(x.detach())


@pytest.mark.parametrize("case", CASES)
def test_two_forwards_before_one_backward(case):
    norm, name = build(case, 5)
    twin = oracle(norm, name)
    results = []
    for module in (norm, twin):
        torch.manual_seed(1)
        xs = [data(5)[0].requires_grad_() for _ in range(2)]
        ys = [module(x, None) for x in xs]
        dys = [torch.randn_like(y) for y in ys]
        results.append(torch.autograd.grad(ys, xs, dys))
    close(*results)
    # ν moves with each of two backward passes, in an order that is autograd's
    if name != "powernorm":
        same_buffers(norm, twin)


@pytest.mark.parametrize("case", [c for c in CASES if "release" not in c])
def test_padding_changes_nothing(case):
    norm, _ = build(case, 5)
    alone = copy.deepcopy(norm)
    x, dy = data(5, rows=(8,))[0], torch.randn(8, 5, dtype=torch.float64)
    mask = torch.tensor([False, True, False, False, True, True, False, True])
    padded, padded_dy = x.clone(), dy.clone()
    padded[mask], padded_dy[mask] = float("nan"), float("inf")
    found = run(lambda x: norm(x, mask), norm, padded, padded_dy)
    wanted = run(alone, alone, x[~mask], dy[~mask])
    for i in (0, 1):
        assert (found[i][mask] == 0).all()
        found[i] = found[i][~mask]
    close(found, wanted, 1e-12)
    close(norm.buffers(), alone.buffers(), 1e-12)


@pytest.mark.parametrize("case", CASES)
def test_a_batch_of_padding_leaves_the_state_alone(case):
    norm, _ = build(case, 5)
    before = copy.deepcopy(norm.state_dict())
    x = data(5)[0]
    found = run(lambda x: norm(x, torch.ones(3, 5, dtype=torch.bool)), norm, x, torch.randn_like(x))
    assert all(torch.equal(b, before[key]) for key, b in norm.state_dict().items()) and norm.refused_batches() == 0
    if "release" not in case:
        assert all((t == 0).all() for t in found)
    assert all(t.isfinite().all() for t in found)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_statistics_that_are_not_finite_are_refused(case, bad):
    norm, name = build(case, 5, torch.float32)
    before = copy.deepcopy(norm.state_dict())
    x = torch.randn(3, 5, 5)
    x[1, 2, 3] = bad  # the square of 1e30 overflows f32
    y = norm(x)
    assert norm.refused_batches() == 1
    y.sum().backward()
    assert all(torch.equal(b, before[key]) for key, b in norm.state_dict().items()), "nothing is taken in"
    y = norm(torch.randn(3, 5, 5))
    y.sum().backward()
    assert all(b.isfinite().all() for b in norm.state_dict().values())
    assert name != "powernorm" or norm.iters.item() == 1


@pytest.mark.parametrize("case", CASES)
def test_f16_squares_do_not_overflow(case):
    norm, _ = build(case, 16, torch.float16)
    x = torch.full((4, 16), 6e4, dtype=torch.float16) * torch.randn(4, 16).sign()
    x.requires_grad_()
    norm(x).sum().backward()
    assert norm.refused_batches() == 0 and x.grad.isfinite().all()
    phi = getattr(norm, "running_phi", None)
    assert phi is None or (phi > 1e8).all()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 4), (7,)])
@pytest.mark.parametrize("case", CASES)
def test_empty_tensors_and_vectors(case, shape):
    norm, _ = build(case, shape[-1], torch.float32)
    x = torch.randn(shape, requires_grad=True)
    y = norm(x)
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape and norm.weight.grad.shape == norm.weight.shape
    assert all(b.isfinite().all() for b in norm.buffers())


@pytest.mark.cpu
@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize("case", CASES)
def test_each_instruction_set(case, level):
    if _core.cpu_level(level) != level:
        _core.cpu_level(None)
        pytest.skip(f"this processor has no {level}")
    try:
        norm, name = build(case, 123, torch.float32)
        twin = oracle(norm, name)
        x, mask = data(123, torch.float32, masked=True)
        dy = torch.randn_like(x)
        close(run(lambda x: norm(x, mask), norm, x, dy), run(lambda x: twin(x, mask), twin, x, dy), 2e-4)
    finally:
        _core.cpu_level(None)


def test_thousands_of_rows_far_from_zero():
    """Σx² − μ² in f32 would have no digit left; and neither would plain sums of so many rows."""
    x = torch.randn(20000, 8) + 4096
    norm = nn.BatchNorm(8, alpha=0.0)
    y = norm(x)
    torch.testing.assert_close(norm.running_var, x.double().var(0, correction=0).float(), rtol=1e-5, atol=0)
    torch.testing.assert_close(norm.running_mean, x.double().mean(0).float(), rtol=1e-7, atol=0)
    torch.testing.assert_close(y.double(), ref.BatchNorm(*parameters(8), statistics(8))(x.double()), rtol=0, atol=1e-3)


def parameters(width):
    return torch.ones(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)


def statistics(width):
    return {"running_mean": torch.zeros(width).double(), "running_var": torch.ones(width).double()}


@pytest.mark.parametrize("case", CASES)
def test_activation_checkpointing_moves_statistics_once(case):
    for reentrant in (False, True):
        norm, _ = build(case, 5)
        plain = copy.deepcopy(norm)
        x, dy = data(5)[0], torch.randn(3, 5, 5, dtype=torch.float64)
        again = lambda x, n=norm, r=reentrant: torch.utils.checkpoint.checkpoint(n, x, use_reentrant=r)  # noqa: E731
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        again(ours).backward(dy)
        plain(theirs).backward(dy)
        close([ours.grad, norm.weight.grad], [theirs.grad, plain.weight.grad], 1e-12)
        close(norm.buffers(), plain.buffers(), 1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("order", ["one backward", "as they came", "backwards"])
@pytest.mark.parametrize("case", CASES)
def test_forwards_before_their_backward_keep_their_own_statistics(case, order, reentrant):
    """Of different batches, of the same one twice, and with masks that are gone when the second runs begin."""
    norm, _ = build(case, 5)
    plain = copy.deepcopy(norm)
    x, dys = data(5)[0], torch.randn(4, 3, 5, 5, dtype=torch.float64)
    # Of two forwards of one batch the second is taken for the one that comes back first.
    batches = [x, 2 * x + 1, x + 1 if order == "as they came" else x, x.roll(1, 0)]
    column = torch.arange(5).expand(3, 5)
    masks = [column > 3, column < 0, None, column < 1]

    def grads(module):
        own, losses = [batch.clone().requires_grad_() for batch in batches], []
        for batch, mask, dy in zip(own, masks, dys):
            with nullcontext() if mask is None else nn.padding_mask(mask):
                losses.append((module(batch) * dy).sum())
        if order == "one backward":
            sum(losses).backward()
        for loss in losses if order == "as they came" else losses[::-1] if order == "backwards" else ():
            loss.backward()
        return [b.grad for b in own]

    ours = grads(lambda x: torch.utils.checkpoint.checkpoint(norm, x, use_reentrant=reentrant))
    theirs = grads(plain)
    close([*ours, norm.weight.grad], [*theirs, plain.weight.grad], 1e-12)
    close(norm.buffers(), plain.buffers(), 1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_forwards_of_one_batch_are_told_apart_by_their_masks(reentrant):
    norm, plain = nn.PowerNorm(4, warmup_iters=0).double(), nn.PowerNorm(4, warmup_iters=0).double()
    x, column, found = torch.randn(3, 5, 4, dtype=torch.float64), torch.arange(5).expand(3, 5), []
    for module in (norm, plain):
        call = (
            module if module is plain else partial(torch.utils.checkpoint.checkpoint, module, use_reentrant=reentrant)
        )
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        losses = [call(x, column > i + 2).square().sum() for i, x in enumerate(inputs)]
        for loss in losses:
            loss.backward()
        found.append([x.grad for x in inputs])
    close(*found, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "module",
    [
        *(partial(nn.LpNorm, 8, p=p) for p in (1.0, 2.0, 3.0, math.inf)),
        partial(nn.LpNorm, (2, 8), p=3),
        *(partial(nn.GroupScaling, groups) for groups in (1, 4)),
        partial(nn.BatchNorm, 8, groups=2),
        partial(nn.PowerNorm, 8, groups=4),
    ],
    ids=lambda made: f"{made.func.__name__} {made.args} {made.keywords}",
)
def test_compositions_under_checkpoints_that_stop_early(module, dtype):
    """Checkpointing ends the second run by an exception out of a hook, which must come through."""
    x, dy = torch.randn(4, 2, 8).to(dtype), torch.randn(4, 2, 8).to(dtype)
    plain, kept = module(), module()
    found, within = [], torch.nn.Sequential(kept, torch.nn.Identity())
    for call in (plain, partial(torch.utils.checkpoint.checkpoint, within, use_reentrant=False)):
        rows = x.clone().requires_grad_()
        y = call(rows)
        y.backward(dy)
        found.append((y.detach(), rows.grad))
    assert torch.equal(*[y for y, _ in found]) or module.func is nn.LpNorm
    close(*found, 1e-6 if dtype == torch.float32 else 2**-6)
    ours, theirs = ([p.grad for p in module.parameters()] for module in (kept, plain))
    close(ours, theirs, 1e-5 if dtype == torch.float32 else 0.1)


def test_more_forwards_than_are_kept_is_an_error():
    norm = nn.BatchNorm(4)
    batches = torch.randn(40, 3, 4, requires_grad=True)
    total = sum(torch.utils.checkpoint.checkpoint(norm, x, use_reentrant=False).square().sum() for x in batches)
    with pytest.raises(RuntimeError, match="call backward more often"):
        total.backward()


# What has no kernel of its own on the CPU.


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lp_norm(dtype, p):
    x = torch.randn(6, 9, dtype=torch.float64).to(dtype)
    x[1] *= 1e-7
    x[2] = 0
    g, dy = torch.tensor([1.7], dtype=dtype), torch.randn(6, 9, dtype=torch.float64).to(dtype)

    def each(f, kind):
        own, gain = x.to(kind).requires_grad_(), g.to(kind).requires_grad_()
        y = f(own, gain)
        return [y.detach(), *torch.autograd.grad(y, (own, gain), dy.to(kind))]

    exact = each(lambda x, g: ref.lp_norm(x, g, p, EPS), torch.float64)
    theirs = each(lambda x, g: ref.lp_norm(x, g, p, EPS), dtype)
    ours = each(lambda x, g: OPS.lp_norm(x, g, p, EPS), dtype)
    for e, t, o in zip(exact, theirs, ours):
        own = torch.finfo(dtype)
        free = (own.eps + 1e-14) * e.abs().max() + own.eps * own.tiny
        assert o.dtype == dtype and (o.double() - e).abs().max() <= 2 * (t.double() - e).abs().max() + free


@pytest.mark.parametrize("p", [1.5, 2.0, 3.0, math.inf])
def test_lp_norms_gradients_of_both_orders(p):
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    g = torch.tensor([1.3], dtype=torch.float64, requires_grad=True)
    f = lambda x, g: OPS.lp_norm(x, g, p, EPS)  # noqa: E731
    assert gradcheck(f, (x, g))
    assert gradgradcheck(f, (x, g))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_those_that_tie_for_the_largest_share_the_slope(dtype):
    """torch.amax's own gradient does so, too; x·dx = 0 then."""
    x = (4 * torch.randn(9, 40, dtype=torch.float64)).round().clamp(-5, 5).to(dtype)
    assert ((x.abs() == x.abs().amax(-1, keepdim=True)).sum(-1) > 1).sum() > 4
    dy = torch.randn(9, 40, dtype=torch.float64).to(dtype)
    ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    (found,) = torch.autograd.grad(OPS.lp_norm(ours, None, math.inf, EPS), ours, dy)
    (wanted,) = torch.autograd.grad(exact / exact.abs().amax(-1, keepdim=True), exact, dy.double())
    eps = max(torch.finfo(dtype).eps, 1e-12)
    torch.testing.assert_close(found.double(), wanted, rtol=2 * eps, atol=1e-5 * (dtype != torch.float64) + 1e-12)
    along = (x.double() * found.double()).sum(-1).abs()
    assert (along <= 4 * eps * (x.double() * found.double()).abs().sum(-1) + 1e-5).all()
    (twin,) = torch.autograd.grad(ref.lp_norm(exact, 1.0, math.inf, EPS), exact, dy.double())
    torch.testing.assert_close(twin, wanted)


def test_the_second_derivative_where_two_tie():
    x = torch.tensor([[3.0, -3.0, 1.0, 0.5], [2.0, 1.0, 0.0, -2.0]], dtype=torch.float64, requires_grad=True)
    second = []
    for y in (OPS.lp_norm(x, None, math.inf, EPS), x / x.abs().amax(-1, keepdim=True)):
        (dx,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        second += torch.autograd.grad(dx.square().sum(), x)
    torch.testing.assert_close(*second)


@pytest.mark.cpu
def test_lp_norms_kernels_are_a_gpus():
    with pytest.raises(RuntimeError, match="are for CUDA tensors: call lp_norm"):
        OPS.lp_norm_forward(torch.ones(2, 3), None, 3.0, EPS)


@pytest.mark.parametrize("p", [1.0, 3.0, math.inf])
def test_lp_norm_keeps_extreme_rows_in_their_rows(p):
    x = torch.randn(5, 8)
    x[1], x[2] = 0, 1e30 * x[2]
    x[3, 3], x[4, 3] = float("nan"), float("inf")
    x.requires_grad_()
    y = OPS.lp_norm(x, None, p, EPS)
    y[:3].sum().backward()
    assert y[:3].isfinite().all() and x.grad[:3].isfinite().all() and not y[3].isfinite().any()
    assert not y[4].isfinite().all()
    wide = ref.lp_norm(x.detach().double()[:3], 1.0, p, EPS)
    torch.testing.assert_close(y[:3].double(), wide, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_group_scaling(dtype, groups):
    x = torch.randn(3, 4, 16, dtype=torch.float64).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    y, exact = nn.GroupScaling(groups)(x), ref.group_scaling(wide, groups)
    dy = torch.randn_like(y)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), exact, rtol=2 * eps, atol=eps)
    found, wanted = torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(exact, wide, dy.double())[0]
    # before it cancels, dx is dy times what x is multiplied by
    steepest = (exact / wide).abs().max().item() * dy.abs().max().item()
    torch.testing.assert_close(found.double(), wanted, rtol=4 * eps, atol=4 * eps * steepest)
    if dtype == torch.float64:
        assert gradgradcheck(lambda x: OPS.group_scaling(x, groups), x.detach()[:1, :1].requires_grad_())


@pytest.mark.parametrize("case", ["batchnorm", "powernorm-v", "powernorm"])
def test_group_scaling_comes_first(case):
    name, settings = CASES[case]
    norm = CLASSES[name](8, groups=2, dtype=torch.float64, **settings)
    bare = CLASSES[name](8, dtype=torch.float64, **settings)
    x = torch.randn(3, 4, 8, dtype=torch.float64)
    close([norm(x)], [bare(ref.group_scaling(x, 2))])
    close([norm.eval()(x)], [bare.eval()(ref.group_scaling(x, 2))])
    assert nn.PowerNorm(8, mode="release").groups == 1


# Long rows


WIDTH = 2**20 + 3
LONG = ("layernorm", "rmsnorm", "rmsnorm:original", "rmsnorm:partial", "gated-rmsnorm", "lpnorm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LONG)
@pytest.mark.one_in(test=2)
def test_long_rows_are_summed_in_parts(name, dtype):
    """Within 4e-6 in f32 of the same module in f64: one running sum of 2²⁰ numbers would lose a decimal digit."""
    torch.manual_seed(0)
    norm = nn.norm_class(name)(WIDTH, **({"part": 0.5} if name == "rmsnorm:partial" else {}))
    x = torch.randn(1, WIDTH).to(dtype)
    expected = copy.deepcopy(norm).double()(x.double())
    bound = 4e-6 if dtype == torch.float32 else 2**-8
    assert (norm(x).double() - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("name", ["rmsnorm:original", "gated-rmsnorm"])
def test_sums_in_parts_have_the_same_gradients(name):
    norm = nn.norm_class(name)(2**16 + 5).double()
    x = torch.randn(2, 2**16 + 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[1] = 0.0
    x.requires_grad_()
    y = norm(x)
    dx, *found = torch.autograd.grad(y, [x, *norm.parameters()], torch.ones_like(y))
    r = x.detach().requires_grad_()
    square = r.square().mean(-1, keepdim=True)
    n = r / (torch.sqrt(square + 1e-300) + norm.eps) if "original" in name else r * torch.rsqrt(square + norm.eps)
    n = n * norm.weight
    if name == "gated-rmsnorm":
        hidden = torch.nn.functional.silu(torch.nn.functional.linear(n, norm.gate_down))
        n = n * torch.sigmoid(torch.nn.functional.linear(hidden, norm.gate_up))
    of_oracle, *expected = torch.autograd.grad(n, [r, *norm.parameters()], torch.ones_like(n))
    torch.testing.assert_close(y[0], n[0])
    torch.testing.assert_close(dx, of_oracle)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", CLASSES)
def test_functionalize(name):
    """In evaluation as torch.nn.BatchNorm1d; in training, where the statistics move, refused by name."""
    norm, x = CLASSES[name](8).double(), data(8)[0]
    norm(x)  # moves the statistics
    norm.eval()
    traced = make_fx(functionalize(lambda x: norm(x)))(x)
    torch.testing.assert_close(traced(x), norm(x))
    norm.train()
    with pytest.raises(
        ValueError, match=f"functionalize cannot follow the running statistics of {type(norm).__name__}"
    ):
        functionalize(lambda x: norm(x))(x)
