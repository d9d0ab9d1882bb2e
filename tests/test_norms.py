"""Norms as operators and modules against the oracle: values, gradients, state, masks, and how PyTorch calls them."""

import copy
import math
import pickle
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from torch.autograd import gradcheck, gradgradcheck

import normformer_rs as nfrs
import reference as ref
from cuda_emulator.cases import calls
from normformer_rs import _core, nn

pytestmark = pytest.mark.device
OPS = torch.ops.normformer_rs
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5
CLASSES = {"batchnorm": nn.BatchNorm, "powernorm-v": nn.PowerNormV, "powernorm": nn.PowerNorm}
OPERATORS = {name: cls.operator_name for name, cls in CLASSES.items()}
# norm → settings of the module; each also runs with a mask
CASES = {
    "batchnorm": ("batchnorm", {}),
    "powernorm-v": ("powernorm-v", {"alpha": 0.8}),
    "powernorm": ("powernorm", {"warmup_iters": 0, "alpha_fwd": 0.95}),
    "powernorm, warming up": ("powernorm", {"warmup_iters": 100}),
    "powernorm, release": ("powernorm", {"mode": "release", "warmup_iters": 0}),
    "powernorm, release, warming up": ("powernorm", {"mode": "release", "warmup_iters": 100}),
}
TRUE = [name for name in CASES if not name.startswith("powernorm, release") and name != "powernorm"]


def oracle(norm, name, eps=EPS):
    """The oracle with copies of the module's parameters and buffers."""
    settings = {
        "batchnorm": lambda: {"alpha": norm.alpha},
        "powernorm-v": lambda: {"alpha": norm.alpha},
        "powernorm": lambda: {
            "mode": norm.mode,
            "warmup": norm.warmup_iters,
            "alpha_fwd": norm.alpha_fwd,
            "alpha_bwd": norm.alpha_bwd,
        },
    }[name]()
    weight, bias = (p.detach().clone().requires_grad_() for p in (norm.weight, norm.bias))
    buffers = {key: b.clone() for key, b in norm.state_dict().items() if key not in ("weight", "bias")}
    return ref.BATCH_NORMS[name](weight, bias, buffers, eps=eps, **settings)


def build(case, width, dtype=torch.float64, seed=0):
    """The module with random parameters and statistics (and no group scaling, which the oracle has apart)."""
    name, settings = CASES[case]
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    norm = CLASSES[name](width, eps=EPS, dtype=dtype, **settings)
    norm.groups = 0
    with torch.no_grad():
        for p in norm.parameters():
            p.copy_(torch.randn(width, generator=generator))
        for key, b in norm.state_dict().items():
            if key in ("running_mean", "running_var", "running_phi", "ema_gz"):
                noise = torch.randn(b.shape, generator=generator)
                b.copy_(noise if key in ("running_mean", "ema_gz") else noise.square() + 0.1)
    return norm, name


def data(width, dtype=torch.float64, rows=(3, 5), masked=False):
    x = (1.5 * torch.randn(*rows, width, dtype=torch.float64) + 0.3).to(dtype)
    mask = torch.rand(rows) < 0.4 if masked else None
    return x, mask


def run(f, norm, x, dy):
    """y, dx, dγ, dβ."""
    x = x.detach().clone().requires_grad_()
    y = f(x)
    return [y.detach(), *torch.autograd.grad(y, (x, norm.weight, norm.bias), dy)]


def close(found, wanted, tolerance=1e-11):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def same_buffers(norm, twin, tolerance=1e-11):
    for key, b in twin.buffers.items():
        torch.testing.assert_close(
            getattr(norm, key), b, rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
        )


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "strided": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "expanded": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [1, 7, 33, 123, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
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
def test_fifty_steps_are_the_formulas(case, masked):
    """SPEC's own steps in f64, warm-up ending on the way: y, gradients and state after every one."""
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
    x, mask = data(6, masked=masked)
    dy, results = torch.randn_like(x), []
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for device in ("CPU", "CUDA"):
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
    close(*results)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", TRUE)
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


def test_more_forwards_than_are_kept_is_an_error():
    norm = nn.BatchNorm(4)
    batches = torch.randn(40, 3, 4, requires_grad=True)
    total = sum(torch.utils.checkpoint.checkpoint(norm, x, use_reentrant=False).square().sum() for x in batches)
    with pytest.raises(RuntimeError, match="call backward more often"):
        total.backward()


# Row norms as modules, and what has no kernel of its own.


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


MODULES = {
    "layernorm": lambda **k: nn.LayerNorm(8, **k),
    "rmsnorm": lambda **k: nn.RMSNorm(8, **k),
    "scalenorm": lambda **k: nn.ScaleNorm(8, **k),
    "lpnorm": lambda **k: nn.LpNorm(8, p=3, **k),
    "lpnorm, inf": lambda **k: nn.LpNorm(8, p=math.inf, **k),
    "batchnorm": lambda **k: nn.BatchNorm(8, **k),
    "powernorm-v": lambda **k: nn.PowerNormV(8, **k),
    "powernorm": lambda **k: nn.PowerNorm(8, warmup_iters=0, **k),
    "powernorm, release": lambda **k: nn.PowerNorm(8, mode="release", warmup_iters=2, groups=2, **k),
}


@pytest.mark.parametrize("name", [n for n in MODULES if n in ref.ROW_NORMS])
def test_row_modules_are_the_oracle(name):
    norm = MODULES[name](dtype=torch.float64)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 8, dtype=torch.float64)
    options = {"p": 3.0} if name == "lpnorm" else {}
    expected = ref.apply_norm(name, x, norm.weight, getattr(norm, "bias", None), **options)
    torch.testing.assert_close(norm(x), expected)


def test_several_dimensions_and_torchs_reprs():
    x = torch.randn(2, 3, 4)
    for ours, theirs in [
        (nn.LayerNorm((3, 4)), torch.nn.LayerNorm((3, 4))),
        (nn.LayerNorm([3, 4], bias=False), torch.nn.LayerNorm([3, 4], bias=False)),
        (nn.RMSNorm(4, eps=None), torch.nn.RMSNorm(4)),
        (nn.RMSNorm((3, 4), eps=1e-3, elementwise_affine=False), torch.nn.RMSNorm((3, 4), 1e-3, False)),
    ]:
        assert repr(ours) == repr(theirs) and ours.state_dict().keys() == theirs.state_dict().keys()
        torch.testing.assert_close(ours(x), theirs(x))
    bf16 = x.bfloat16()
    torch.testing.assert_close(
        nn.RMSNorm(4, eps=None, dtype=torch.bfloat16)(bf16), ref.rms_norm(bf16, torch.ones(4), None)
    )
    assert repr(nn.PowerNorm(8)).startswith(
        "PowerNorm(8, eps=1e-05, alpha_fwd=0.9, alpha_bwd=0.9, warmup_iters=4000, mode=paper"
    )


def test_the_table_of_classes():
    config = nfrs.TransformerConfig(
        lpnorm_p=math.inf, powernorm_mode="release", heads=4, norm_eps=0.01, batchnorm_alpha=0.5
    )
    for entry in nfrs.tables()["norms"]:
        norm = nn.norm_of_config(entry["name"], 8, config)
        assert isinstance(norm, nn.norm_class(entry["name"])) and norm.eps == 0.01
    assert nn.norm_of_config("lpnorm", 8, config).p == math.inf
    assert (
        nn.norm_of_config("powernorm", 8, config).groups == 4 and nn.norm_of_config("batchnorm", 8, config).groups == 1
    )
    fixed = [nn.norm_of_config("scalenorm-fixed", 8, config, last_of_decoder=last).weight for last in (False, True)]
    assert fixed[0] is None and fixed[1] is not None
    with pytest.raises(ValueError, match="did you mean"):
        nn.norm_class("powernorm-w")
    assert nfrs.TransformerConfig.from_json(config.to_json()) == config


def test_foreign_state_dicts():
    d = 16
    x = torch.randn(3, d)
    ours = nn.ScaleNorm(d)
    ours.load_state_dict({"scale": torch.tensor(3.0)})  # Nguyen and Salazar's code
    torch.testing.assert_close(ours(x), 3 * torch.nn.functional.normalize(x, dim=-1))
    unit = torch.nn.functional.normalize(x, dim=-1) * math.sqrt(d)
    for g, offset in ((torch.tensor([0.7]), False), (torch.tensor([-0.3]), True)):  # x-transformers
        ours = torch.nn.Sequential(nn.ScaleNorm(d, unit_offset=offset))
        ours.load_state_dict({"0.g": g})
        torch.testing.assert_close(ours(x), unit * (g + offset))
        rms = nn.RMSNorm(d, eps=1e-12, unit_offset=offset)
        rms.load_state_dict({"g": g * torch.arange(d)})
        torch.testing.assert_close(rms(x), unit * (g * torch.arange(d) + offset))
    release = {
        "weight": torch.rand(d),
        "bias": torch.rand(d),
        "running_phi": torch.rand(1, d, 1, 1),
        "ema_gz": torch.rand(1, d, 1, 1),
        "iters": torch.tensor([123]),
    }
    for mode in ("paper", "release"):
        norm = nn.PowerNorm(d, mode=mode)
        norm.load_state_dict(release)
        assert norm.state_dict().keys() == release.keys() and all(
            torch.equal(norm.state_dict()[key], value) for key, value in release.items()
        )


@pytest.mark.parametrize("name", MODULES)
def test_modules_travel(name):
    norm = MODULES[name]()
    x = torch.randn(3, 5, 8)
    norm(x).sum().backward()
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert torch.equal(twin.eval()(x), copy.deepcopy(norm).eval()(x))
    fresh = MODULES[name]()
    fresh.load_state_dict(norm.state_dict())
    assert torch.equal(fresh.eval()(x), copy.deepcopy(norm).eval()(x))
    meta = MODULES[name](device="meta")
    y = meta(torch.empty(3, 5, 8, device="meta"))
    assert y.is_meta and y.shape == x.shape
    empty = meta.to_empty(device=torch.get_default_device())
    empty.reset_parameters()
    torch._dynamo.reset()
    compiled = torch.compile(empty, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), MODULES[name]()(x))
    empty.reset_parameters()
    assert torch.equal(empty(x), MODULES[name]()(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_low_precision(name, dtype):
    norm = MODULES[name]()
    norm(torch.randn(3, 5, 8))
    before = {key: b.clone() for key, b in norm.named_buffers()}
    norm.to(dtype)
    for key, b in norm.named_buffers():
        assert b.dtype == before[key].dtype and torch.equal(b, before[key])
    assert all(p.dtype == dtype for p in norm.parameters())
    assert all(b.dtype == torch.float64 for b in norm.double().buffers() if b.is_floating_point())
    made = MODULES[name](dtype=dtype)
    assert made(torch.randn(3, 5, 8).to(dtype)).dtype == dtype
    assert all(b.dtype == torch.float32 for b in made.buffers() if b.is_floating_point())
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        h = torch.nn.Linear(8, 8)(torch.randn(4, 8))
        assert MODULES[name]()(h).dtype == h.dtype == torch.bfloat16
    assert MODULES[name]()(torch.randn(4, 8, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_compile_fullgraph(name, training):
    torch._dynamo.reset()
    norm = MODULES[name]().train(training)
    plain = copy.deepcopy(norm)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    for step in range(4):
        torch.manual_seed(step)
        x, dy = torch.randn(3, 5, 8), torch.randn(3, 5, 8)
        found, wanted = (run_module(module, x, dy) for module in (compiled, plain))
        close(found, wanted, 1e-6)
        close(norm.buffers(), plain.buffers(), 1e-6)


def run_module(module, x, dy):
    x = x.clone().requires_grad_()
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy)]


@pytest.mark.parametrize("name", MODULES)
def test_export(name):
    norm = MODULES[name]().eval()
    x = torch.randn(3, 5, 8)
    program = torch.export.export(norm, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    close([program.module()(torch.cat([x, x]))], [norm(torch.cat([x, x]))], 1e-6)


@pytest.mark.parametrize("name", MODULES)
def test_functorch(name):
    norm = MODULES[name]().eval()
    x = torch.randn(3, 5, 8)
    close([torch.vmap(norm)(x)], [norm(x)], 1e-5)
    own = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(norm(own).sin().sum(), own)
    close([torch.func.grad(lambda x: norm(x).sin().sum())(x)], [wanted], 1e-5)
    assert torch.func.jacrev(norm)(x[0, 0]).shape == (8, 8)
    if name in CLASSES:
        with pytest.raises(NotImplementedError, match="vmap"):
            torch.vmap(norm.train())(x)


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case):
    norm, name = build(case, 8, torch.float32)
    x, mask = data(8, torch.float32, masked=True)
    state = [None if b is None else b.clone() for b in norm.state()]
    arguments = (x.requires_grad_(), norm.weight, norm.bias, mask, *state, norm.refused)
    torch.library.opcheck(
        getattr(OPS, OPERATORS[name]).default, arguments, {"train": True, "eps": EPS, **norm.settings()}
    )


# Masks.


class Foreign(torch.nn.Module):
    """A model that knows nothing of masks in norms."""

    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(4, 4), nn.PowerNormV(4))
        self.decoder = torch.nn.Sequential(torch.nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm(4))

    def forward(self, source, target):
        return self.encoder(source), self.decoder(target)


def test_masks_reach_foreign_models():
    model = Foreign()
    source, target = torch.randn(2, 5, 4), torch.randn(2, 3, 4)
    masks = torch.zeros(2, 5, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.bool)
    masks[0][1, 3:], masks[1][0, 2] = True, True
    with nn.padding_mask(*masks):
        a, b = model(source, target)
    assert (a[masks[0]] == 0).all() and (b[masks[1]] == 0).all() and (a[~masks[0]] != 0).all()
    with nn.padding_mask(*masks, batch_first=False):
        swapped = Foreign()
        swapped.load_state_dict(Foreign().state_dict())
        c, _ = model(source.transpose(0, 1), target.transpose(0, 1))
        assert (c.transpose(0, 1)[masks[0]] == 0).all()
        d = model.encoder(source.transpose(0, 1).reshape(10, 4))
        assert (d.view(5, 2, 4).transpose(0, 1)[masks[0]] == 0).all()
    # an argument goes before the context, and the context ends
    with nn.padding_mask(masks[0]):
        assert (model.encoder[1](source, padding_mask=torch.zeros(2, 5, dtype=torch.bool)) != 0).all()
    assert (model(source, target)[0] != 0).all()


def test_compiled_models_take_masks():
    torch._dynamo.reset()
    norm, mask = nn.PowerNormV(4), torch.tensor([[False, False, True]])
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 3, 4)
    close([compiled(x, mask)], [copy.deepcopy(norm).train()(x, mask)], 1e-6)
    with nn.padding_mask(mask):
        assert (compiled(x)[mask] == 0).all()
    assert (compiled(x) != 0).all()


X = torch.ones(2, 3, 4)


@pytest.mark.parametrize(
    "call,error,message",
    [
        (lambda: nn.BatchNorm(4)(X, torch.zeros(3, 2, dtype=torch.bool)), ValueError, r"pad_mask must have x's shape"),
        (lambda: nn.BatchNorm(4)(X, torch.zeros(2, 3)), TypeError, "pad_mask must be bool"),
        (lambda: nn.PowerNorm(5)(X), ValueError, r"x must be \(…, 5\), got \(2, 3, 4\)"),
        (lambda: nn.PowerNorm(4)(X.long()), TypeError, "float32, float64"),
        (lambda: nn.LayerNorm(5)(X), ValueError, r"x must end in \(5,\)"),
        (lambda: nn.LpNorm(4)(X.long()), TypeError, "float32, float64"),
        (lambda: nn.LpNorm(4, p=0.5), ValueError, "at least 1"),
        (lambda: OPS.lp_norm(X, None, math.nan, EPS), ValueError, "at least 1"),
        (lambda: nn.GroupScaling(3)(X), ValueError, "must divide the width"),
        (lambda: nn.PowerNorm(4, mode="papr"), ValueError, 'did you mean "paper"'),
        (lambda: nn.PowerNorm(4, mode="release", groups=0), ValueError, "at least 1"),
        (lambda: nn.PowerNormV(4, groups=3), ValueError, "must divide"),
        (lambda: nn.PowerNormV(4, alpha=1.0), ValueError, r"alpha must lie in \[0, 1\)"),
        (lambda: OPS.power_norm(X, train=True), ValueError, "needs its buffers running_phi, ema_gz and iters"),
        (lambda: OPS.batch_norm(X, torch.ones(3), train=True), ValueError, "weight must hold 4 numbers"),
        (lambda: OPS.batch_norm(X, train=True, variant="other"), ValueError, "variant must be one of paper, release"),
        (lambda: in_mask(torch.zeros(2, 4, dtype=torch.bool)), ValueError, "none fits"),
        (
            lambda: in_mask(torch.zeros(2, 3, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool)),
            ValueError,
            "several",
        ),
        (lambda: in_mask(torch.zeros(2, 3)), ValueError, "must be bool"),
        (lambda: nfrs.TransformerConfig(lpnorm_p="two"), ValueError, "lpnorm_p must be a number"),
        (lambda: model(lpnorm_p=0.5, norm="lpnorm"), ValueError, "lpnorm_p must be at least 1"),
        (lambda: model(powernorm_alpha_bwd=1.0), ValueError, "powernorm_alpha_bwd must lie in"),
        (lambda: model(groupscaling=3, norm="batchnorm"), ValueError, "in 3 groups"),
        (lambda: model(powernorm_warmup=-1), ValueError, "at least 0"),
    ],
)
def test_bad_input_is_said(call, error, message):
    with pytest.raises(error, match=message):
        call()


def in_mask(*masks):
    with nn.padding_mask(*masks):
        nn.BatchNorm(4)(X)


SHAPE = {"vocab_size": 23, "d_model": 16, "d_ff": 24, "heads": 4, "encoder_layers": 2, "decoder_layers": 2}


def model(**options):
    return nfrs.Transformer(nfrs.TransformerConfig(**{**SHAPE, "dropout": 0.0, **options}), seed=3)


# In models.

IN_MODELS = [
    {"norm": "lpnorm", "lpnorm_p": math.inf},
    {"norm": "lpnorm", "lpnorm_p": 1.5},
    {"norm": "batchnorm", "batchnorm_alpha": 0.5},
    {"norm": "powernorm-v", "groupscaling": 0},
    {"norm": "powernorm-v", "groupscaling": 2, "residual": "postnorm"},
    {"encoder_norm": "powernorm", "powernorm_warmup": 2},
    {"norm": "powernorm", "powernorm_mode": "release", "powernorm_warmup": 2},
    {"norm": "powernorm", "powernorm_warmup": 0, "residual": "subln"},
]


@pytest.mark.parametrize("options", IN_MODELS, ids=str)
def test_models_train_as_the_oracle_does(options):
    """Four forward and backward passes in training, the state after each, then evaluation."""
    ours = model(**options).double()
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    state = {name: p.detach().clone().requires_grad_() for name, p in ours.named_parameters()}
    state |= {name: b.clone() for name, b in ours.named_buffers()}
    dropout = ref.Dropout(embedding=0, attention=0, activation=0, residual=0, seed=1, update=1, micro_batch=0)
    for step in range(4):
        torch.manual_seed(step)
        source = torch.randint(4, 23, (3, 5))
        target = torch.randint(4, 23, (3, 4))
        if options.get("powernorm_mode") != "release":  # which takes means over padding, and packed rows have none
            source[1, 3:], target[2, 2:] = ref.PAD, ref.PAD
        for training in (True, False):
            logits = ours.train(training)(source, target)
            expected = ref.forward(state, {**SHAPE, **options}, source, target, dropout if training else None)
            real = target != ref.PAD
            torch.testing.assert_close(logits[real], expected[real], rtol=1e-9, atol=1e-9)
            if training:
                weight = torch.randn_like(expected)[real]
                (logits[real] * weight).sum().backward()
                (expected[real] * weight).sum().backward()
        for name, p in ours.named_parameters():
            torch.testing.assert_close(
                p.grad, state[name].grad, rtol=1e-8, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}"
            )
        for name, b in ours.named_buffers():
            torch.testing.assert_close(b, state[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
