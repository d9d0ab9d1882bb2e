"""What is run on the emulated device: every kernel against its float64 twin, forward and backward."""

import math
import os

import torch

import reference as ref

from .checks import (
    EPS,
    NORMS,
    OPS,
    SEED,
    SITE,
    TYPES,
    call,
    check,
    close,
    detects,
    leaves,
    on_device,
    parameters,
    randn,
    step,
)

P = 19718 / 65536
"""A dropout rate: element (6, 11) draws the very threshold, so it is kept."""


@detects(
    ("layer_norm", "f32", 1030, 3),  # several warps a row, read again
    ("layer_norm", "f32", 4104, 3),  # the same, four columns at a time
    ("layer_norm", "f32", 1024, 3),  # several warps a row, kept in registers
    ("layer_norm", "f32", 32, 300),
    ("rms_norm", "f32", 100, 59),  # every block leaves a sum, of 100 columns
    ("rms_norm", "bf16", 512),
    ("derf", "f32", 100),
    ("dyt", "bf16", 1030, 3),
    *(("layer_norm", "bf16", 64, 9, False, None, (type, type)) for type in ("bf16", "f16")),
)
def row_norm(norm, dtype, width, rows=9, misaligned=False, per_column=None, types=("f32", "f32")):
    """A norm alone. `per_column` overrides whether the weight is one number or one per column; `types`: of weight and
    bias."""
    weight, bias, *numbers = parameters(norm, width)
    if per_column is not None:
        weight = torch.randn(width if per_column else 1)
    weight, bias = (None if t is None else t.to(TYPES[type]) for t, type in zip((weight, bias), types))
    x = randn(rows, width, TYPES[dtype], misaligned)

    def formula(*a):
        return [NORMS[norm](*a)]

    # A GPU has no kernel, so no statistics, in f64.
    stats = call(norm, x.double().cpu(), None, None, *(n.cpu() for n in numbers))[1]
    largest = stats[..., -1].max().to(x.device) if stats.numel() else max(numbers[0].abs().max(), x.abs().max())
    slope = largest * weight.abs().max()
    check(lambda *a: [call(norm, *a)[0]], formula, [x, weight, bias, *numbers], [("y", True)], norm, slope)


@detects((3.0, "f32", 40), (1.0, "f32", 40), (math.inf, "f32", 40), (math.inf, "f32", 400))
def lp_norm(p, dtype, width, rows=9, clamped=False):
    """A norm whose lengths are of another order."""
    x, weight = randn(rows, width, TYPES[dtype]), torch.randn(1)
    x[2, 1:2] = 0
    x[3, :2] = 9  # two are the largest
    if clamped:
        x *= 1e-9
        x[0] = 0
    slope = (weight / torch.linalg.vector_norm(x.double(), p, dim=-1).clamp(min=EPS).min()).abs()

    def formula(x, w):
        return [ref.lp_norm(x, w, p, EPS)]

    check(lambda x, w: [OPS.lp_norm(x, w, p, EPS)], formula, [x, weight], [("y", True)], "lp_norm", slope.item())


@detects((1.0,), (2.0,), (3.0,), (200.0,), (math.inf,))
def extreme_lengths(p):
    """Rows whose powers leave the range, or that are not finite, keep to themselves."""
    x, weight, eps = torch.randn(9, 124), torch.randn(1), 1e-37
    x[0] = 0
    x[1] *= 1e30
    x[2] *= 1e-30
    x[3, 0] = x[4, 123] = 1e30
    x[5, 0] = x[6, 123] = math.nan
    x[7, 5] = math.inf
    x[8, 0] = 3.8  # (3.8/2)^200 is too large
    with on_device("scale_norm" if p == 2 else "lp_norm"):
        y = OPS.lp_norm(x, weight, p, eps)
    exact = ref.lp_norm(x.double(), weight.double(), p, eps)
    known = [0, 8]
    if p != 200:  # which leaves float64's range too
        known += [1, 2, 3, 4]
    if p == math.inf:  # in other lengths inf/inf may reach the whole row
        known += [7]
    torch.testing.assert_close(y[known].double(), exact[known], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert y[5:7].isnan().all() and y[7, 5].isnan()


@detects(
    ("layer_norm", ("f32", "bf16"), 64, 0.3, "each"),
    ("layer_norm", ("f32", "f32"), 64, 0.3, "one", 9, (False, True)),
    ("layer_norm", ("f32", "f32"), 1030, 0.3, "one", 5, (True, False)),
    ("layer_norm", ("bf16", "bf16"), 64),
    ("layer_norm", ("f32", "f32"), 1030, 0.3, "one", 5),
    ("rms_norm", ("f32", "f32"), 64, P),
    (None, ("f32", "f32"), 300, 0.3, None, 40),
    ("derf", ("f32", "bf16"), 64, 0.3, "each"),
    (None, ("f32", "f16"), 19, 0.3, "each"),
)
def residual(norm, types, width, p=0.0, gains=None, rows=9, backs=(True, True), of_norm="f32"):
    """The fused step: x of the first type, f and y of the second; gains are None, "one" or "each". `of_norm`: the type
    of the norm's parameters."""
    stream, branch = (TYPES[t] for t in types)
    x, f = randn(rows, width, stream), randn(rows, width, branch)
    given = [None if t is None else t.to(TYPES[of_norm]) for t in parameters(norm, width)]
    alpha, beta = (torch.rand(1 if gains == "one" else width) + 0.5 if gains else None for _ in range(2))
    seed = torch.tensor(SEED) if p else None
    keep = ref.dropout_keep(*SEED, SITE, rows, width, p).to(x.device) if p else None
    operator = f"{norm}_residual" if norm else "residual"

    def run(*a):
        x_plus, y, _ = step(norm, *a, rest=(p, seed, SITE))
        return [x_plus, y] if norm else [x_plus]

    def formula(x, f, alpha, beta, *given):
        dropped = f if keep is None else f * keep * ref.dropout_scale(p)
        x_plus = (1 if alpha is None else alpha) * x + (1 if beta is None else beta) * dropped
        # N reads x⁺ as it is stored; its rounding has slope one.
        x_plus = x_plus + (x_plus.detach().to(stream).to(x_plus.dtype) - x_plus.detach())
        return [x_plus, NORMS[norm](x_plus, *given)] if norm else [x_plus]

    outputs = [("x_plus", backs[0])] + ([("y", backs[1])] if norm else [])
    check(run, formula, [x, f, alpha, beta, *given], outputs, operator)


@detects((64,), (1030,))
def fixed_alpha(width):
    """Without the gradient of alpha the others stay the same."""
    given = [randn(9, width, torch.float32) for _ in range(4)]
    alpha, beta, weight, bias = (torch.randn(width) for _ in range(4))
    gradients = []
    for wanted in (True, False):
        x, f, *gains = leaves([*given[:2], beta, weight, bias])
        with on_device("layer_norm_residual"):
            x_plus, y, _ = step("layer_norm", x, f, alpha.clone().requires_grad_(wanted), *gains)
            gradients.append(torch.autograd.grad([x_plus, y], [x, f, *gains], given[2:]))
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


@detects(("layer_norm",), ("rms_norm",), ("scale_norm",), ("dyt",))
def extreme_rows(norm):
    """Rows of zeros, huge, tiny and not finite keep to themselves."""
    _, _, *numbers = given = parameters(norm, 8)
    x = torch.randn(6, 8)
    x[1] = 0
    x[2] *= 1e30  # squares overflow f32
    x[3] *= 1e-30
    x[4, 3] = float("nan")
    x[5, 3] = float("inf")
    with on_device(norm):
        y = call(norm, x, *given)[0]
    exact = NORMS[norm](x.double(), *(None if t is None else t.double() for t in given))
    if numbers:  # a curve knows no rows
        assert y.isfinite().sum() == 47 and y[4, 3].isnan()
    else:
        assert y[:4].isfinite().all() and not y[4].isfinite().any() and not y[5].isfinite().all()
    torch.testing.assert_close(y[:4].double(), exact[:4], rtol=1e-5, atol=1e-5)


@detects((1.0,), (0.1,))
def short_rows(eps):
    """ScaleNorm under its clamp, y = (g/ε)x with a slope to match, and of rows shorter than 1 over it."""
    x, weight = 0.1 * torch.randn(5, 32), torch.randn(1)  # ‖x‖ is about 0.6

    def formula(x, w):
        return [ref.scale_norm(x, w, eps)]

    check(lambda x, w: [OPS.scale_norm(x, w, None, eps)[0]], formula, [x, weight], [("y", True)], "scale_norm", 2.0)


@detects(("f32", 64, 0.3, 40), ("bf16", 64, 0.0), ("f16", 19, 0.3), ("f32", 64, 0.5, 9, True))
def relu_dropout(dtype, width, p, rows=9, misaligned=False):
    """drop(max(x, 0)), with NaNs kept."""
    x = randn(rows, width, TYPES[dtype], misaligned)
    seed = torch.tensor(SEED) if p else None
    keep = ref.dropout_keep(*SEED, SITE, rows, width, p).to(x.device) if p else None

    def formula(x):
        return [ref.relu_dropout(x, keep, ref.dropout_scale(p))]

    check(lambda x: [OPS.relu_dropout(x, p, seed, SITE)], formula, [x], [("y", True)], "relu_dropout")
    x[0, 0] = float("nan")
    x.requires_grad_()
    with on_device("relu_dropout"):
        y = OPS.relu_dropout(x, p, seed, SITE)
        y.backward(torch.ones_like(y))
    for found in (y, x.grad):
        assert found[0, 0].isnan() and found.isnan().sum() == 1


@detects(("f32", 1200, False), ("bf16", 96, True), ("f32", 1030, False, 0.0, 5, False, 30.0))
def cross_entropy(dtype, width, masked, smoothing=0.1, rows=5, misaligned=False, scale=1.0):
    """Loss, NLL and gradient, by autograd and in place; one row is ignored."""
    op = "label_smoothed_cross_entropy"
    logits = (scale * randn(rows, width, torch.float64)).to(TYPES[dtype])
    if misaligned:
        logits = randn(rows, width, TYPES[dtype], misaligned=True)
    mask = torch.rand(width) < 0.7 if masked else None
    words = torch.arange(width) if mask is None else mask.nonzero().flatten()
    target = words[torch.randint(len(words), (rows,))]
    target[1] = -1
    each = smoothing / max(len(words) - 1, 1)
    weights = (1 - smoothing - each, each)

    def by_rows(z):
        real = [r for r in range(rows) if r != 1]
        result = [
            ref.label_smoothed_cross_entropy(
                z[r : r + 1], target[r : r + 1], smoothing, vocabulary_mask=mask, ignore_index=-1
            )
            for r in real
        ]
        loss, nll = torch.zeros(2, rows, dtype=result[0][0].dtype)
        for r, (a, b) in zip(real, result):
            loss = loss.index_put((torch.tensor([r]),), a)
            nll = nll.index_put((torch.tensor([r]),), b)
        return [loss, nll]

    def ours(z):
        return list(OPS.label_smoothed_cross_entropy(z, target, mask, *weights, -1)[:2])

    outputs = [("loss", True), ("nll", False)]
    check(ours, by_rows, [logits], outputs, op)
    own = logits.clone()
    with on_device(op):
        quarter = torch.tensor(0.25, dtype=torch.float64)
        loss, nll = OPS.label_smoothed_cross_entropy_(own, target, mask, *weights, -1, quarter)
    z = logits.double().requires_grad_()
    exact = by_rows(z)
    (gradient,) = torch.autograd.grad(0.25 * exact[0].sum(), z)
    for name, o, e in [("loss", loss, exact[0]), ("nll", nll, exact[1]), ("gradient", own, gradient)]:
        close(name + " in place", o, e.detach(), e.detach().to(o.dtype), e.detach().abs().max())


@detects((False,), (True,))
def bad_targets(masked):
    """A target outside the vocabulary makes its own row NaN and no other."""
    logits, mask = torch.randn(5, 100, requires_grad=True), torch.ones(100, dtype=torch.bool)
    mask[7] = not masked
    targets, bad = torch.tensor([0, 7, 100, -5, 99]), [False, masked, True, True, False]
    with on_device("label_smoothed_cross_entropy"):
        given = (targets, mask if masked else None, 0.9, 0.001, -1)
        loss = OPS.label_smoothed_cross_entropy(logits, *given)[0]
        loss.sum().backward()
    assert loss.isnan().tolist() == logits.grad.isnan().all(-1).tolist() == logits.grad.isnan().any(-1).tolist() == bad


def whole(lse):
    """log sum exp from its two numbers: the maximum, and the sum of exponentials relative to it."""
    return lse[:, 0] + lse[:, 1].log()


@detects((0.0,), (3e38,), (1e6,))
def offset_logits(offset):
    """Logits with a common offset: as exact as torch's, but for the rounding of the logits."""
    logits = torch.randn(3, 1200) if offset < 1e30 else torch.zeros(3, 1200)
    logits, target = (logits + offset).requires_grad_(), torch.tensor([5, 0, 1199])
    weights = (0.9, 0.1 / 1200, -1)
    with on_device("label_smoothed_cross_entropy"):
        loss = OPS.label_smoothed_cross_entropy(logits, target, None, *weights)[0]
        loss.sum().backward()
    z = (logits.detach().double() - offset).requires_grad_()
    log_p = z.log_softmax(-1)
    exact = -0.9 * log_p.gather(1, target[:, None])[:, 0] - 0.1 / 1200 * log_p.sum(-1)
    exact.sum().backward()
    torch.testing.assert_close(loss.double(), exact.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits.grad.double(), z.grad, rtol=2e-6, atol=1e-8)


@detects(())
def ignored_words():
    """Rows whose target is the ignored word have no loss and no gradient."""
    logits, targets = torch.randn(4, 100, requires_grad=True), torch.tensor([7, 3, 0, 7])
    with on_device("label_smoothed_cross_entropy"):
        loss, nll, lse = OPS.label_smoothed_cross_entropy(logits, targets, None, 1.0, 0.0, 7)
        loss.sum().backward()
    z = logits.detach().double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(z, targets, ignore_index=7, reduction="none")
    exact.sum().backward()
    real = targets != 7
    assert (lse[~real] == 0).all()
    sums = z.detach().logsumexp(-1)[real]
    for ours, wanted in [(loss, exact), (nll, exact), (whole(lse)[real], sums), (logits.grad, z.grad)]:
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-6)


@detects(())
def falling_logits():
    """A thread meets 104 logits, each below the one before by 0.9: their sum stays relative to the largest."""
    columns, target = torch.arange(104 * 256), torch.tensor([5])
    logits = -0.9 * (columns // 1024 * 4 + columns % 4).float()[None]
    with on_device("label_smoothed_cross_entropy"):
        loss = OPS.label_smoothed_cross_entropy(logits, target, None, 1.0, 0.0, -1)[0]
    torch.testing.assert_close(loss.double(), torch.nn.functional.cross_entropy(logits.double(), target)[None])


@detects(())
def infinite_logits():
    """One row has words of probability 0, the other a word of probability 1."""
    logits, targets = torch.randn(2, 1200), torch.tensor([3, 3])
    logits[0, ::5] = -math.inf
    logits[1, 40] = math.inf
    logits.requires_grad_()
    with on_device("label_smoothed_cross_entropy"):
        loss, nll, lse = OPS.label_smoothed_cross_entropy(logits, targets, None, 1.0, 0.0, -1)
        loss[0].backward()
    z = logits.detach().double().requires_grad_()
    sums = z.logsumexp(-1)
    exact = sums - z[:, 3]
    exact[0].backward()
    for ours, wanted in [(loss, exact), (nll, exact), (whole(lse), sums)]:
        torch.testing.assert_close(ours.double(), wanted.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.grad[0].double(), z.grad[0], rtol=1e-5, atol=1e-6)
    # Smoothed, both have an infinite loss, though the second one's parts are infinities of either sign.
    with on_device("label_smoothed_cross_entropy"):
        smoothed = OPS.label_smoothed_cross_entropy(logits.detach(), targets, None, 0.9, 1e-4, -1)[0]
    assert smoothed.tolist() == [math.inf, math.inf]


@detects((40,), (1027,))
def adam(count):
    """Three updates against Kingma & Ba's recurrences in float64, then one whose scale is not finite."""
    beta1, beta2, eps = 0.9, 0.98, 1e-8
    p, m, v = torch.randn(count), torch.zeros(count), torch.zeros(count)
    exact = [t.double() for t in (p, m, v)]
    for t in range(1, 4):
        g, scale = torch.randn(count), torch.tensor(0.3)
        size = torch.tensor([0.01 * (1 - beta2**t) ** 0.5 / (1 - beta1**t)])
        keep = torch.tensor(1 - 0.01 * 0.1)
        d = g.double() * scale.double()
        with on_device("adam_"):
            OPS.adam_(p, m, v, g, scale, size, keep, beta1, beta2, eps)
        exact[1] = beta1 * exact[1] + (1 - beta1) * d
        exact[2] = beta2 * exact[2] + (1 - beta2) * d * d
        exact[0] = keep.double() * exact[0] - size.double() * exact[1] / (exact[2].sqrt() + eps)
        assert not g.any()
        for ours, wanted in zip((p, m, v), exact):
            torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-7)
    before, g = p.clone(), torch.randn(count)
    with on_device("adam_"):
        OPS.adam_(p, m, v, g, torch.tensor(float("nan")), size, keep, beta1, beta2, eps)
    assert torch.equal(p, before) and not g.any()


@detects(("f32", 0), ("bf16", 1020), ("bf16", 1021))
def adams_formula(moments, place):
    """The composed formula agrees with the kernel, in bf16 with all but a few roundings: it draws the same ones."""
    moments = TYPES[moments]
    tensors = [torch.randn(3000), torch.randn(3000).to(moments), torch.rand(3000).to(moments), torch.randn(3000)]
    numbers = [torch.tensor(0.3), torch.tensor(0.01), torch.tensor(0.999)]
    settings = (0.9, 0.98, 1e-8, 2**40 + 7, 5, place)
    copies = [t.cpu().clone() for t in tensors]
    with on_device("adam_"):
        OPS.adam_(*tensors, *numbers, *settings)
    OPS.adam_(*copies, *(t.cpu() for t in numbers), *settings)
    for ours, formulas in zip(tensors, copies):
        torch.testing.assert_close(ours, formulas, check_device=False)
        if ours.dtype == torch.bfloat16:
            # A last bit of f32 decides one rounding in 65,536.
            assert (ours.cpu() != formulas).float().mean() < 1e-3


def empty(norm):
    """No rows, no columns, a vector."""
    for shape in [(0, 5), (3, 0), (2, 0, 4), (7,)]:
        given = leaves(parameters(norm, shape[-1]))
        x = torch.randn(shape, requires_grad=True)
        with on_device(norm):
            y = call(norm, x, *given)[0]
            y.sum().backward()
        assert y.shape == x.shape == x.grad.shape
        assert all(t.grad.shape == t.shape and (x.numel() or not t.grad.any()) for t in given if t is not None)


def repeatable(norm, width):
    """Bitwise, whatever order the threads run in."""
    x, dy = torch.randn(40, width), torch.randn(40, width)
    given = parameters(norm, width)
    results = []
    for seed in range(3):
        os.environ["MOCK_SEED"] = str(seed)
        own = leaves([x, *given])
        with on_device(norm):
            y = call(norm, *own)[0]
            results.append([y, *torch.autograd.grad(y, [t for t in own if t is not None], dy)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def rows_are_independent(norm):
    """A row's result does not depend on how many there are, nor on its place."""
    x = torch.randn(13, 64)
    given = parameters(norm, 64)
    with on_device(norm):
        whole = call(norm, x, *given)[0]
        parts = [call(norm, part, *given)[0] for part in (x[:1], x[1:6], x[6:])]
    assert torch.equal(whole, torch.cat(parts))


def norms_made_of_others():
    """ScaleNorm's and RMSNorm's kernels run where p = 2, and for the rows that groups are."""
    x = torch.randn(5, 12)
    with on_device("scale_norm"):
        torch.testing.assert_close(OPS.lp_norm(x, None, 2.0, EPS), ref.lp_norm(x, 1.0, 2.0, EPS))
    with on_device("rms_norm"):
        torch.testing.assert_close(OPS.group_scaling(x, 3), ref.group_scaling(x, 3))
