"""What is run on the emulated device: every kernel against its float64 twin, forward and backward."""

import json
import os
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import torch

import normformer_rs as nfrs
import reference as ref
from normformer_rs import _core

OPS = torch.ops.normformer_rs
EPS = 1e-5
SEED = (77, 3, 1)
SITE = 5
NORMS = {
    None: None,
    "layer_norm": lambda x, w, b: ref.layer_norm(x, w, b, EPS),
    "rms_norm": lambda x, w, b: ref.rms_norm(x, w, EPS),
    "scale_norm": lambda x, w, b: ref.scale_norm(x, w, EPS),
}
COLUMN_NORMS = {"batch_norm": ref.BatchNorm, "power_norm_v": ref.PowerNormV, "power_norm": ref.PowerNorm}
REAL = os.environ.get("NORMFORMER_RS_TEST_DEVICE", "").replace("emulated", "") or None
"""A real device to run on, where the tests were told of one."""


def calls(dtype):
    """Calls of kernel and of composed formula that one of an operator makes: CUDA's kernels are not for float64."""
    return (0, 1) if REAL and dtype == torch.float64 else (1, 0)


TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@contextmanager
def on_device(operator):
    """Tensors of the CPU take the CUDA kernels' way inside (those of a real device take it anyway), and `operator` must
    have run them."""
    before = _core.operator_counts()[operator]
    _core.cuda_stand_in(not REAL)
    try:
        yield
    finally:
        _core.cuda_stand_in(False)
    after = _core.operator_counts()[operator]
    assert after[0] > before[0] and after[1] == before[1], f"{operator} ran its formula, not its kernel"


def randn(rows, width, dtype, misaligned=False):
    """A contiguous matrix; misaligned, it starts one element past a 16-byte border."""
    start = int(misaligned)
    flat = torch.randn(rows * width + start, dtype=torch.float64).to(dtype)[start:]
    assert (flat.data_ptr() % 16 != 0) == misaligned
    return flat.view(rows, width)


def parameters(norm, width):
    if norm is None:
        return None, None
    weight = torch.randn(1 if norm == "scale_norm" else width)
    return weight, torch.randn(width) if norm == "layer_norm" else None


def leaves(tensors, dtype=None):
    return [None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]


def close(name, ours, exact, theirs, terms):
    """At most twice the error of the formula in PyTorch with the same dtype, and free: one rounding of the result, and
    in f32 one of each of the factors that are summed."""
    assert ours.shape == exact.shape, name
    own, wide = torch.finfo(ours.dtype), torch.finfo(torch.float32)
    free = own.eps * exact.abs().max() + own.tiny + 4 * wide.eps * terms
    error = (ours.double() - exact).abs().max()
    allowed = 2 * (theirs.double() - exact).abs().max() + free
    assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def check(function, formula, inputs, outputs, operator, slope=1.0):
    """Outputs and gradients of function(*inputs) on the device against formula(*inputs) in float64.

    Outputs are (name, whether a gradient comes back); inputs may be None. `slope` is what a gradient is multiplied by
    before parts of it cancel.
    """
    own = leaves(inputs)
    with on_device(operator):
        ours = function(*own)
        backs = [torch.randn_like(y) if back else None for y, (_, back) in zip(ours, outputs)]
        chosen = [(y, d) for y, d in zip(ours, backs) if d is not None]
        used = [t for t in own if t is not None]
        found = torch.autograd.grad(
            [y for y, _ in chosen], used, [d for _, d in chosen], materialize_grads=True, allow_unused=True
        )

    def by_formula(dtype):
        copies = leaves(inputs, dtype)
        results = formula(*copies)
        used = [t for t in copies if t is not None]
        loss = sum((y.double() * d.double()).sum() for y, d in zip(results, backs) if d is not None)
        return results, torch.autograd.grad(loss, used, materialize_grads=True, allow_unused=True)

    exact, exact_gradients = by_formula(torch.float64)
    theirs, their_gradients = by_formula(torch.float32)
    for (name, _), o, e, t in zip(outputs, ours, exact, theirs):
        close(name, o.detach(), e.detach(), t.detach().to(o.dtype), e.detach().abs().max())
    size = slope * max(d.double().abs().max() for d in backs if d is not None)
    for i, (o, e, t) in enumerate(zip(found, exact_gradients, their_gradients)):
        # What is summed over rows and columns before it cancels.
        terms = e.abs().max() + size * (ours[0].numel() if o.numel() == 1 else ours[0].shape[0]) ** 0.5
        close(f"gradient {i}", o, e, t.to(o.dtype), terms)


def row_norm(norm, dtype, width, rows=9, misaligned=False, per_column=None, types=("f32", "f32")):
    """A norm alone. `per_column` overrides whether the weight is one number or one per column; `types`: of weight and
    bias."""
    weight, bias = parameters(norm, width)
    if per_column is not None:
        weight = torch.randn(width if per_column else 1)
    weight, bias = (None if t is None else t.to(TYPES[type]) for t, type in zip((weight, bias), types))
    x = randn(rows, width, TYPES[dtype], misaligned)

    def formula(x, w, b):
        return [NORMS[norm](x, w, b)]

    stats = getattr(OPS, norm)(x.double().cpu(), None, None, EPS)[1]  # a GPU has no kernel, so no statistics, in f64
    slope = stats[..., -1].max().to(x.device) * weight.abs().max()
    check(lambda *a: [getattr(OPS, norm)(*a, EPS)[0]], formula, [x, weight, bias], [("y", True)], norm, slope)


def lp_norm(p, dtype, width, rows=9, clamped=False):
    """A norm whose lengths are of another order."""
    x, weight = randn(rows, width, TYPES[dtype]), torch.randn(1)
    if clamped:
        x *= 1e-9
        x[0] = 0
    slope = (weight / torch.linalg.vector_norm(x.double(), p, dim=-1).clamp(min=EPS).min()).abs()

    def formula(x, w):
        return [ref.lp_norm(x, w, p, EPS)]

    check(lambda x, w: [OPS.lp_norm(x, w, p, EPS)], formula, [x, weight], [("y", True)], "lp_norm", slope.item())


def residual(norm, types, width, p=0.0, gains=None, rows=9, backs=(True, True), of_norm="f32"):
    """The fused step: x of the first type, f and y of the second; gains are None, "one" or "each". `of_norm`: the type
    of the norm's parameters."""
    stream, branch = (TYPES[t] for t in types)
    x, f = randn(rows, width, stream), randn(rows, width, branch)
    weight, bias = (None if t is None else t.to(TYPES[of_norm]) for t in parameters(norm, width))
    alpha, beta = (torch.rand(1 if gains == "one" else width) + 0.5 if gains else None for _ in range(2))
    seed = torch.tensor(SEED) if p else None
    keep = ref.dropout_keep(*SEED, SITE, rows, width, p).to(x.device) if p else None
    operator = f"{norm}_residual" if norm else "residual"

    def step(*a):
        x_plus, y, _ = getattr(OPS, operator)(*a, EPS, p, seed, SITE)
        return [x_plus, y] if norm else [x_plus]

    def formula(x, f, alpha, beta, weight, bias):
        dropped = f if keep is None else f * keep * ref.dropout_scale(p)
        x_plus = (1 if alpha is None else alpha) * x + (1 if beta is None else beta) * dropped
        # N reads x⁺ as it is stored; its rounding has slope one.
        x_plus = x_plus + (x_plus.detach().to(stream).to(x_plus.dtype) - x_plus.detach())
        return [x_plus, NORMS[norm](x_plus, weight, bias)] if norm else [x_plus]

    outputs = [("x_plus", backs[0])] + ([("y", backs[1])] if norm else [])
    check(step, formula, [x, f, alpha, beta, weight, bias], outputs, operator)


def extreme_rows(norm):
    """Rows of zeros, huge, tiny and not finite keep to themselves."""
    weight, bias = parameters(norm, 8)
    x = torch.randn(6, 8)
    x[1] = 0
    x[2] *= 1e30  # squares overflow f32
    x[3] *= 1e-30
    x[4, 3] = float("nan")
    x[5, 3] = float("inf")
    with on_device(norm):
        y = getattr(OPS, norm)(x, weight, bias, EPS)[0]
    exact = NORMS[norm](x.double(), weight.double(), None if bias is None else bias.double())
    assert y[:4].isfinite().all() and not y[4].isfinite().any() and not y[5].isfinite().all()
    torch.testing.assert_close(y[:4].double(), exact[:4], rtol=1e-5, atol=1e-5)


def clamped():
    """ScaleNorm under its clamp: y = (g/ε)x, with a slope to match."""
    x, weight = 0.1 * torch.randn(5, 32), torch.randn(1)  # ‖x‖ is about 0.6

    def formula(x, w):
        return [ref.scale_norm(x, w, 1.0)]

    check(lambda x, w: [OPS.scale_norm(x, w, None, 1.0)[0]], formula, [x, weight], [("y", True)], "scale_norm")


def relu_dropout(dtype, width, p, rows=9, misaligned=False):
    """drop(max(x, 0)), with NaNs kept."""
    x = randn(rows, width, TYPES[dtype], misaligned)
    seed = torch.tensor(SEED) if p else None
    keep = ref.dropout_keep(*SEED, SITE, rows, width, p).to(x.device) if p else None

    def formula(x):
        return [ref.relu_dropout(x, keep, ref.dropout_scale(p))]

    check(lambda x: [OPS.relu_dropout(x, p, seed, SITE)], formula, [x], [("y", True)], "relu_dropout")
    x[0, 0] = float("nan")
    with on_device("relu_dropout"):
        y = OPS.relu_dropout(x, p, seed, SITE)
    assert y[0, 0].isnan() and y.isnan().sum() == 1


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


def bad_targets():
    """A target outside the vocabulary makes its own row NaN and no other."""
    logits, mask = torch.randn(4, 100, requires_grad=True), torch.ones(100, dtype=torch.bool)
    mask[7] = False
    with on_device("label_smoothed_cross_entropy"):
        loss = OPS.label_smoothed_cross_entropy(logits, torch.tensor([3, 7, 100, -5]), mask, 0.9, 0.001, -1)[0]
        loss.sum().backward()
    assert loss.isnan().tolist() == [False, True, True, True]
    assert logits.grad.isnan().all(-1).tolist() == [False, True, True, True] and logits.grad[0].isfinite().all()


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


def adams_formula():
    """The composed formula agrees with the kernel."""
    tensors = [torch.randn(40), torch.randn(40), torch.rand(40), torch.randn(40)]
    numbers = [torch.tensor(0.3), torch.tensor(0.01), torch.tensor(0.999)]
    copies = [t.cpu().clone() for t in tensors]
    with on_device("adam_"):
        OPS.adam_(*tensors, *numbers, 0.9, 0.98, 1e-8)
    OPS.adam_(*copies, *(t.cpu() for t in numbers), 0.9, 0.98, 1e-8)
    for ours, formulas in zip(tensors, copies):
        torch.testing.assert_close(ours, formulas, check_device=False)


def fresh_buffers(norm, width, dtype=torch.float32):
    """The buffers of a norm with statistics of columns, by the names that operator and twin give them."""
    if norm == "batch_norm":
        return {"running_mean": torch.zeros(width, dtype=dtype), "running_var": torch.ones(width, dtype=dtype)}
    buffers = {"running_phi": torch.ones(1, width, 1, 1, dtype=dtype)}
    if norm == "power_norm":
        buffers |= {"ema_gz": torch.zeros(1, width, 1, 1, dtype=dtype), "iters": torch.zeros(1, dtype=torch.int64)}
    return buffers


def padding(rows, padded):
    """A mask of rows: None, some or all."""
    return {None: None, "some": torch.rand(rows) < 0.3, "all": torch.ones(rows, dtype=torch.bool)}[padded]


def column_norm(
    norm,
    dtype,
    width,
    rows=9,
    padded="some",
    mode="paper",
    mean=0.0,
    steps=4,
    misaligned=False,
    buffers=torch.float32,
    weights_from=0,
):
    """Training steps, then an evaluation: results, gradients, buffers. PowerNorm's warm-up is the first two steps. The
    weights start that many numbers past a 16-byte border."""
    more = {"mode": mode, "warmup": 2} if norm == "power_norm" else {}
    options = {"variant": mode, "warmup": 2}
    own = fresh_buffers(norm, width, buffers)
    refused = torch.zeros(1, dtype=torch.int64)
    twins = {
        kind: COLUMN_NORMS[norm](None, None, fresh_buffers(norm, width, kind), **more)
        for kind in (torch.float64, torch.float32)
    }
    for step in range(steps + 1):
        train = step < steps
        x = randn(rows, width, TYPES[dtype], misaligned).add_(mean)
        weight, bias = torch.randn(width + weights_from)[weights_from:], torch.randn(width)
        pad = padding(rows, padded)
        if pad is not None and mode == "paper":
            x[pad] = float("nan")  # nobody may look at it
        copies = {name: buffer.clone() for name, buffer in own.items()}
        stats = getattr(OPS, norm)(x.double(), None, None, pad, **copies, train=train, **options)[1]
        slope = stats[1:3].max() * weight.abs().max()

        def ours(x, weight, bias, pad=pad, train=train):
            return [getattr(OPS, norm)(x, weight, bias, pad, **own, refused=refused, train=train, **options)[0]]

        def formula(x, weight, bias, pad=pad, train=train):
            twin = twins[x.dtype]
            twin.weight, twin.bias = weight, bias
            return [twin(x, pad, train)]

        check(ours, formula, [x, weight, bias], [("y", True)], norm, slope)
        for name, buffer in own.items():
            exact, theirs = twins[torch.float64].buffers[name], twins[torch.float32].buffers[name]
            if name == "iters":
                assert buffer == exact == (0 if padded == "all" else min(step + 1, steps))
            else:
                close(f"{name} after step {step}", buffer, exact, theirs, exact.abs().max())
    assert not refused


def as_on_the_cpu(norm, x, *arguments, buffers, dy=None, **options):
    """y, stats, gradients and buffers of one training step, and what was refused: the CPU's kernels agree."""
    backs = torch.randn_like(x) if dy is None else dy

    def step(device):
        def there(value):
            return value.to(device) if isinstance(value, torch.Tensor) else value

        own = {name: there(buffer).clone() for name, buffer in buffers.items()}
        refused = there(torch.zeros(1, dtype=torch.int64))
        inputs = leaves([there(t) for t in (x, *arguments[:2])])
        options_of = {"train": True, **{name: there(value) for name, value in options.items()}}
        rest = [there(value) for value in arguments[2:]]
        y, stats = getattr(OPS, norm)(*inputs, *rest, **own, refused=refused, **options_of)
        used = [t for t in inputs if t is not None]
        return {
            "y": y.detach(),
            "stats": stats,
            "gradients": torch.autograd.grad(y, used, there(backs)),
            "refused": refused,
            **own,
        }

    on_cpu = step("cpu")
    with on_device(norm):
        on_gpu = step(REAL or "cpu")
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-5, atol=1e-5, equal_nan=True, check_device=False)
    return on_gpu


def column_corners(norm):
    """What twins do not define, and the shapes that kernels might trip over."""
    x, weight, bias = torch.randn(9, 300), torch.randn(300), torch.randn(300)
    buffers = fresh_buffers(norm, 300)
    some, every = padding(9, "some"), padding(9, "all")
    for bad in (float("nan"), float("inf")):
        spoilt = x.clone()
        spoilt[3, 270] = bad
        found = as_on_the_cpu(norm, spoilt, weight, bias, buffers=buffers)
        assert found["refused"] == (2 if norm == "power_norm" else 1)  # ν too
        assert all(torch.equal(found[name], buffer) for name, buffer in buffers.items())
    for pad in (None, some, every):
        for variant in ("paper", "release"):
            for warmup in (0, 1):
                as_on_the_cpu(norm, x, weight, bias, pad, buffers=buffers, variant=variant, warmup=warmup)
    as_on_the_cpu(norm, x, None, None, some, buffers=buffers)
    as_on_the_cpu(norm, x, weight, bias, some, buffers=buffers, train=False)
    for dtype in (torch.float64, torch.bfloat16):
        as_on_the_cpu(norm, x, weight, bias, some, buffers=fresh_buffers(norm, 300, dtype))
    if norm != "power_norm":
        for train in (True, False):
            as_on_the_cpu(norm, x, weight, bias, some, buffers={}, train=train)
    given = as_on_the_cpu(norm, x, weight, bias, buffers=buffers)["stats"]
    again = as_on_the_cpu(norm, x + 1, weight, bias, buffers=buffers, stats=given)
    assert torch.equal(again["stats"], given)
    for shape in [(0, 5), (3, 0), (2, 0, 4), (7,), (2, 3, 4)]:
        given = (torch.randn(shape), torch.randn(shape[-1]), None)
        # A single row has no spread: ε keeps what cancels small.
        as_on_the_cpu(norm, *given, buffers=fresh_buffers(norm, shape[-1]), eps=1.0)


def refuses_a_gradient():
    """PowerNorm's ν is not moved by a gradient that is not finite, in any column."""
    buffers, dy = fresh_buffers("power_norm", 300), torch.randn(9, 300)
    dy[4, 299] = float("inf")
    found = as_on_the_cpu("power_norm", torch.randn(9, 300), None, None, buffers=buffers, dy=dy)
    assert found["refused"] == 1 and not found["ema_gz"].any() and found["iters"] == 1


def late_rows():
    """Slabs of 79 rows, more than a guess is made from: the real rows come late, or the late rows are others."""
    x, buffers = 1000.0 + 10 * torch.randn(40_000, 2), fresh_buffers("batch_norm", 2)
    pad = torch.ones(40_000, dtype=torch.bool)
    pad[75:79] = False
    as_on_the_cpu("batch_norm", x, None, None, pad, buffers=buffers)
    x[torch.arange(40_000) % 79 >= 64] += 50
    as_on_the_cpu("batch_norm", x, None, None, buffers=buffers)


def columns_are_repeatable(norm, width):
    """Bitwise, whatever order the threads run in and however many columns are read at a time."""
    x, dy, weight = torch.randn(600, width), torch.randn(600, width), torch.randn(width)
    misaligned = torch.empty(600 * width + 1)[1:].view(600, width).copy_(x)
    results = []
    for seed, rows in enumerate([x, x, misaligned]):
        os.environ["MOCK_SEED"] = str(seed)
        inputs, buffers = leaves([rows, weight]), fresh_buffers(norm, width)
        with on_device(norm):
            y = getattr(OPS, norm)(*inputs, **buffers, train=True)[0]
            results.append([y, *torch.autograd.grad(y, inputs, dy), *buffers.values()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def empty(norm):
    """No rows, no columns, a vector."""
    for shape in [(0, 5), (3, 0), (2, 0, 4), (7,)]:
        weight, bias = leaves(parameters(norm, shape[-1]))
        x = torch.randn(shape, requires_grad=True)
        with on_device(norm):
            y = getattr(OPS, norm)(x, weight, bias, EPS)[0]
            y.sum().backward()
        assert y.shape == x.shape == x.grad.shape and weight.grad.shape == weight.shape
        assert x.numel() or not weight.grad.any()


def repeatable(norm, width):
    """Bitwise, whatever order the threads run in."""
    x, dy = torch.randn(40, width), torch.randn(40, width)
    weight, bias = parameters(norm, width)
    results = []
    for seed in range(3):
        os.environ["MOCK_SEED"] = str(seed)
        own = [t for t in leaves([x, weight, bias]) if t is not None]
        with on_device(norm):
            y = getattr(OPS, norm)(own[0], own[1], own[2] if bias is not None else None, EPS)[0]
            results.append([y, *torch.autograd.grad(y, own, dy)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def rows_are_independent(norm):
    """A row's result does not depend on how many there are, nor on its place."""
    x = torch.randn(13, 64)
    weight, bias = parameters(norm, 64)
    with on_device(norm):
        whole = getattr(OPS, norm)(x, weight, bias, EPS)[0]
        parts = [getattr(OPS, norm)(part, weight, bias, EPS)[0] for part in (x[:1], x[1:6], x[6:])]
    assert torch.equal(whole, torch.cat(parts))


def norms_made_of_others():
    """ScaleNorm's and RMSNorm's kernels run where p = 2, and for the rows that groups are."""
    x = torch.randn(5, 12)
    with on_device("scale_norm"):
        torch.testing.assert_close(OPS.lp_norm(x, None, 2.0, EPS), ref.lp_norm(x, 1.0, 2.0, EPS))
    with on_device("rms_norm"):
        torch.testing.assert_close(OPS.group_scaling(x, 3), ref.group_scaling(x, 3))


def launches(norm, **options):
    """The kernels that a forward and a backward pass put on the stream."""
    log = Path(os.environ["MOCK_LOG"])
    x, weight = torch.randn(9, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    options |= {"eps": EPS} if norm in NORMS else fresh_buffers(norm, 64)
    with on_device(norm):
        getattr(OPS, norm)(x, weight, None, **options)[0].sum().backward()
    return [line.split()[0] for line in log.read_text().splitlines()]


def training_by_graphs(folder, fails=None):
    """Two updates of one shape of batch, the second recorded and replayed, and the same two without graphs. For torch's
    graphs stands what the CPU can do: what is recorded is done, and nothing when it is replayed. Returns what torch was
    asked, the warnings, and for each graph whether it was freed before any operator ran after the failure; `fails`:
    which of the questions does."""
    asked, warnings, freed, at_failure = [], [], [], []

    def said(name, result=None):
        def call(*arguments, **options):
            asked.append((name, *arguments, *options.items()))
            if name == fails:
                at_failure.append(_core.operator_counts())
                raise RuntimeError("operation not permitted when stream is capturing")
            return result

        return call

    class Graph:
        def __init__(self):
            self.capture_begin, self.capture_end = said("capture_begin"), said("capture_end")
            self.replay = said("replay")

        def __del__(self):
            freed.append(at_failure == [_core.operator_counts()])

    torch._C._CUDAGraph, torch._C._graph_pool_handle = Graph, lambda: (0, 1)
    for name in ("_cuda_synchronize", "_cuda_emptyCache", "_cuda_endAllocateToPool"):
        setattr(torch._C, name, said(name))
    text = Path(folder, "text")
    text.write_text("a b c\nc b\nb b a a c\n")
    data = {f"{part}_{side}": str(text) for part in ("train", "valid") for side in ("source", "target")}
    model = {"d_model": 16, "d_ff": 24, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.2}
    results = []
    for has_graphs in (True, False):
        # An ε that keeps rounding in gradients of nothing (those of key biases) from becoming steps.
        training = {"updates": 2, "max_tokens": 64, "lr": 1e-2, "warmup": 0, "schedule": "constant", "adam_eps": 1e-4}
        configs = (
            nfrs.TransformerConfig(**model, encoder_norm="batchnorm"),
            nfrs.TrainingConfig(**training, cuda_graphs=has_graphs),
            nfrs.DataConfig(**data, no_bpe=True),
        )
        output = Path(folder, str(has_graphs))
        _core.cuda_stand_in(True)
        history = nfrs.Trainer(*configs).fit(output, progress=False, curves=False)
        _core.cuda_stand_in(False)
        log = map(json.loads, (output / "log.jsonl").read_text().splitlines())
        warnings += [event["text"] for event in log if event["event"] == "message" and event["level"] == "warning"]
        results.append((history.loss, nfrs.Transformer.from_checkpoint(output, "last").state_dict()))
    if fails != "capture_end":  # what a device would not have done by then, the CPU has
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
    return asked, warnings, freed


def attention_of_two_threads(folder):
    """Two trainings at once; the first to call torch's attention leaves it while the second is inside. Returns torch's
    switch for cuDNN's attention as the second has it then, and as both leave it."""
    text = Path(folder, "text")
    text.write_text("a b c\nc b\nb b a a c\n")
    data = {f"{part}_{side}": str(text) for part in ("train", "valid") for side in ("source", "target")}
    model = {"d_model": 16, "d_ff": 24, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
    training = {"updates": 1, "max_tokens": 64, "lr": 1e-2, "warmup": 0, "schedule": "constant", "cuda_graphs": True}
    inside, left = [threading.Event(), threading.Event()], threading.Event()
    enabled, found = torch.backends.cuda.cudnn_sdp_enabled, []

    def train(number, meet):
        def keep(t):  # attention alone keeps tensors of four dimensions, before it returns
            if t.dim() == 4 and not inside[number].is_set():
                assert not enabled()
                inside[number].set()
                meet()
            return t

        configs = nfrs.TransformerConfig(**model), nfrs.TrainingConfig(**training), nfrs.DataConfig(**data, no_bpe=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            nfrs.Trainer(*configs).fit(Path(folder, str(number)), progress=False, curves=False, tensorboard=False)

    def first():
        train(0, lambda: inside[1].wait(60))
        left.set()

    def second():
        left.wait(60)
        found.append(enabled())

    _core.cuda_stand_in(True)
    thread = threading.Thread(target=first)
    thread.start()
    assert inside[0].wait(60)
    train(1, second)
    thread.join()
    _core.cuda_stand_in(False)
    return [*found, enabled()]


def warns_and_falls_back():
    """One warning, with the reason, and the composed formula's result. Returns the warning."""
    x, weight = torch.randn(3, 5), torch.randn(5)
    before = _core.operator_counts()["rms_norm"]
    with tempfile.TemporaryFile("w+") as said:
        os.dup2(said.fileno(), 2)  # libtorch's warnings go there
        _core.cuda_stand_in(True)
        y, *_ = (OPS.rms_norm(x, weight, None, EPS)[0] for _ in range(3))
        _core.cuda_stand_in(False)
        said.seek(0)
        warnings = [line for line in said if "Warning: normformer_rs" in line]
    after = _core.operator_counts()["rms_norm"]
    assert (after[0] - before[0], after[1] - before[1]) == (0, 3)
    torch.testing.assert_close(y, ref.rms_norm(x, weight, EPS))
    assert len(warnings) == 1, warnings
    return warnings[0]


def refuses():
    """The message of the error where kernels are required."""
    _core.cuda_stand_in(True)
    try:
        OPS.rms_norm(torch.randn(3, 5), torch.randn(5), None, EPS)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("it ran")


def launch_fails():
    """The error of a launch that fails after the device was found ready."""
    x = torch.randn(3, 5)
    with on_device("rms_norm"):
        OPS.rms_norm(x, None, None, EPS)
        os.environ["MOCK_FAIL"] = "cuLaunchKernel"
        try:
            OPS.rms_norm(x, None, None, EPS)
        except RuntimeError as error:
            return str(error)
    raise AssertionError("it ran")


def double_runs_the_formula():
    """f64 has no kernel: the composed formula runs on a GPU, and on the CPU its own kernels."""
    x = torch.randn(3, 5, dtype=torch.float64)
    _core.cuda_stand_in(True)
    y = OPS.rms_norm(x, None, None, EPS)[0]
    _core.cuda_stand_in(False)
    torch.testing.assert_close(y, ref.rms_norm(x, None, EPS))
