"""Cases of the norms with statistics of columns, on the emulated device."""

import os

import torch

from normformer_rs.nn.norm_table import DECLARED

from .checks import COLUMN_NORMS, OPS, REAL, TYPES, check, close, detects, leaves, on_device, randn


def fresh_buffers(norm, width, dtype=torch.float32):
    """The buffers of a norm with statistics of columns, by the names that operator and twin give them."""
    entry = next(entry for entry in DECLARED.values() if entry.operator == norm)  # others may share the operator
    return {
        buffer.name: torch.full(buffer.size(width), buffer.start, dtype=torch.int64 if buffer.is_counter else dtype)
        for buffer in entry.buffers
    }


def padding(rows, padded):
    """A mask of rows: None, some or all."""
    return {None: None, "some": torch.rand(rows) < 0.3, "all": torch.ones(rows, dtype=torch.bool)}[padded]


@detects(
    ("power_norm_v", "f32", 40),
    ("power_norm", "f32", 40),
    ("power_norm", "f32", 40, 600),  # slabs that a warp takes some of at a time, y written ahead
    ("power_norm", "f32", 40, 9, "some", "release"),
    ("batch_norm", "f32", 40, 9, None, "paper", 1000.0),
    ("power_norm_v", "f32", 40, 9, "all"),
    ("power_norm_v", "f32", 40, 130),
    ("batch_norm", "f32", 100),
    ("batch_norm", "f32", 40, 600),
    ("power_norm_v", "f32", 40, 600),
    ("power_norm_v", "f32", 1, 140_000, None, "paper", 0.0, 1),
)
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

        given = {"refused": torch.zeros(1, dtype=torch.int64), **buffers}
        own = {name: None if buffer is None else there(buffer).clone() for name, buffer in given.items()}
        inputs = leaves([there(t) for t in (x, *arguments[:2])])
        options_of = {"train": True, **{name: there(value) for name, value in options.items()}}
        rest = [there(value) for value in arguments[2:]]
        y, stats = getattr(OPS, norm)(*inputs, *rest, **own, **options_of)
        used = [t for t in inputs if t is not None]
        return {
            "y": y.detach(),
            "stats": stats,
            "gradients": torch.autograd.grad(y, used, there(backs)),
            **own,
        }

    on_cpu = step("cpu")
    with on_device(norm):
        on_gpu = step(REAL or "cpu")
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-5, atol=1e-5, equal_nan=True, check_device=False)
    return on_gpu


@detects(("power_norm_v",), ("power_norm",), ("batch_norm",))
def column_corners(norm):
    """What twins do not define, and the shapes that kernels might trip over."""
    x, weight, bias = torch.randn(9, 300), torch.randn(300), torch.randn(300)
    buffers = fresh_buffers(norm, 300)
    some, every = padding(9, "some"), padding(9, "all")
    if norm == "power_norm":
        buffers["ema_gz"].normal_()
    for bad, column in ((float("nan"), 3), (float("inf"), 299)):
        spoilt = x.clone()
        spoilt[3, column] = bad
        found = as_on_the_cpu(norm, spoilt, weight, bias, buffers=buffers)
        assert found["refused"] == (2 if norm == "power_norm" else 1)  # ν too
        uncounted = as_on_the_cpu(norm, spoilt, weight, bias, buffers={**buffers, "refused": None})
        for name, buffer in buffers.items():
            assert torch.equal(found[name], buffer) and torch.equal(uncounted[name], buffer)
    for pad in (None, some, every):
        for variant in ("paper", "release"):
            for warmup in (0, 1):
                options = {"variant": variant, "warmup": warmup, "eps": 0.01}
                as_on_the_cpu(norm, x, weight, bias, pad, buffers=buffers, **options)
    as_on_the_cpu(norm, x, None, None, some, buffers=buffers)
    for eps in (1e-5, 1e-12):  # with the latter the scale is 1
        as_on_the_cpu(norm, x, weight, bias, some, buffers=buffers, train=False, eps=eps)
    if norm == "power_norm":  # x̂ is not finite, and the batch's own statistics are 0 nevertheless
        nothing = {name: torch.zeros_like(buffer) for name, buffer in buffers.items()}
        with on_device(norm):
            assert not OPS.power_norm(x, **nothing, train=False, eps=0.0)[1][3:].any()
    for dtype in (torch.float64, torch.bfloat16):
        as_on_the_cpu(norm, x, weight, bias, some, buffers=fresh_buffers(norm, 300, dtype))
    if norm != "power_norm":
        for train in (True, False):
            as_on_the_cpu(norm, x, weight, bias, some, buffers={}, train=train)
    given = as_on_the_cpu(norm, x, weight, bias, buffers=buffers)["stats"]
    again = as_on_the_cpu(norm, x + 1, weight, bias, buffers=buffers, stats=given)
    assert torch.equal(again["stats"], given)
    for shape in [(0, 5), (3, 0), (2, 0, 4), (7,), (9, 1), (2, 3, 4)]:
        given = (torch.randn(shape), torch.randn(shape[-1]), None)
        # A single row has no spread: ε keeps what cancels small.
        as_on_the_cpu(norm, *given, buffers=fresh_buffers(norm, shape[-1]), eps=1.0)


@detects(())
def refuses_a_gradient():
    """PowerNorm's ν is not moved by a gradient that is not finite, in any column."""
    x, buffers = torch.randn(9, 300), fresh_buffers("power_norm", 300)
    for column in (3, 299):
        dy = torch.randn(9, 300)
        dy[4, column] = float("inf")
        for more in ({}, {"refused": None}):
            found = as_on_the_cpu("power_norm", x, None, None, buffers=buffers | more, dy=dy)
            assert not found["ema_gz"].any() and found["iters"] == 1
            assert more or found["refused"] == 1


@detects(())
def late_rows():
    """Slabs of 79 rows, more than a guess is made from: of two with real rows one has late ones alone, or the late rows
    are others and one of them is infinite."""
    x, buffers = 1000.0 + 10 * torch.randn(40_000, 3), fresh_buffers("batch_norm", 3)
    pad = torch.ones(40_000, dtype=torch.bool)
    pad[64:158] = False
    as_on_the_cpu("batch_norm", x, None, None, pad, buffers=buffers)
    x[torch.arange(40_000) % 79 >= 64] += 50
    x[503 * 79 + 70, 2] = float("inf")  # the last slab of the last warp: none is merged with its mean later
    as_on_the_cpu("batch_norm", x, None, None, buffers=buffers)


@detects(())
def tiny_spread():
    """Rows about a guess have squares below f32's range: the variance is 0, and not less."""
    x, buffers = 1e-24 * torch.randn(3, 40), fresh_buffers("batch_norm", 40)
    with on_device("batch_norm"):
        y, stats = OPS.batch_norm(x, **buffers, train=True, eps=1e-70)
    assert y.isfinite().all()
    torch.testing.assert_close(stats[1], torch.full((40,), 1e35))


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
