"""The operators' results and gradients against the oracle: row norms, residual step, attention, loss."""

import math

import pytest
import torch
import torch.nn.functional as F
from operators_support import (
    DTYPES,
    EPS,
    NORMS,
    OPS,
    WIDTHS,
    attention_arguments,
    attention_oracle,
    gradients,
    leaves,
    parameters,
    residual_arguments,
    residual_oracle,
)
from torch.autograd import gradcheck, gradgradcheck

import normformer_rs as nfrs
import reference as ref
from cuda_emulator.checks import calls
from layouts import LAYOUTS
from normformer_rs import _core
from row_norms import bare, call, numbers, step

pytestmark = pytest.mark.device


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.one_in(test=7, all=3)
def test_error_is_at_most_twice_pytorchs(norm, dtype, width, layout):
    x = LAYOUTS[layout](torch.randn(3, 5, width, dtype=torch.float64).to(dtype))
    weight, bias, *learned = given = parameters(norm, width, dtype)
    dy = torch.randn_like(x)
    before = _core.operator_counts()[norm]

    def run(f, kind):
        own = leaves(*(None if t is None else t.to(kind) for t in (x, *given)))
        y = f(*own)
        return [y.detach(), *gradients(y, own, dy.to(kind))]

    exact = run(NORMS[norm], torch.float64)
    ours = run(lambda *a: call(norm, *a)[0], dtype)
    after = _core.operator_counts()[norm]
    assert (after[0] - before[0], after[1] - before[1]) == calls(dtype), "kernel, composed formula"
    theirs = run(NORMS[norm], dtype)
    # What is summed, before it cancels: for dx the rows of w⊙dy·scale, for parameters dy⊙x̂ and dy, for numbers
    # of a curve w⊙dy⊙x and w⊙dy.
    stats = call(norm, x, *given)[1].double()
    scale = stats[..., -1].abs() if stats.numel() else learned[0].double().abs()
    row = dy.double().abs().amax(-1) * weight.double().abs().max() * scale
    hat = call(norm, x.double(), None, None, *(t.double() for t in learned))[0]
    through = (dy * weight).double()
    terms = {
        "y": 0,
        "dx": row.max(),
        "dweight": (dy.double() * hat).abs().sum(),
        **({} if bias is None else {"dbias": dy.double().abs().sum((0, 1)).max()}),
        **{f"d{name}": (through * by).abs().sum() for name, by in zip(numbers(norm), (x.double(), 1.0))},
    }
    for name, e, o, t in zip(terms, exact, ours, theirs, strict=True):
        assert o.dtype == dtype and o.shape == e.shape
        if dtype == torch.float64:  # the oracle's own
            torch.testing.assert_close(o, e, rtol=1e-11, atol=1e-11)
            continue
        # twice PyTorch's error; free are one rounding to the dtype (f16's subnormals: 6e-8) and, in f32, one of
        # each of the two factors of what is summed
        own, wide = torch.finfo(dtype), torch.finfo(torch.float32)
        free = own.eps * e.abs().max() + own.eps * own.tiny + 2 * wide.eps * terms[name]
        assert (o.double() - e).abs().max() <= 2 * (t.double() - e).abs().max() + free, name


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.one_in(test=2)
def test_gradients_of_both_orders(norm):
    x = torch.randn(3, 6, dtype=torch.float64)
    x[1] = 1e-7 * x[1]  # inside scale_norm's clamp
    all_inputs = leaves(x, *parameters(norm, 6))
    inputs = [t for t in all_inputs if t is not None]

    def f(*used):
        filled = iter(used)
        return call(norm, *(None if t is None else next(filled) for t in all_inputs), eps=1e-3)[0]

    assert gradcheck(f, inputs)
    assert gradgradcheck(f, inputs)


@pytest.mark.parametrize("norm", NORMS)
def test_extreme_rows_stay_in_their_rows(norm):
    given = parameters(norm, 8, torch.float32)
    x = torch.randn(6, 8)
    x[1] = 0
    x[2] *= 1e30  # squares overflow f32
    x[3] *= 1e-30
    x[4, 3] = float("nan")
    x[5, 3] = float("inf")
    y = call(norm, x, *given)[0]
    exact = NORMS[norm](x.double(), *(None if t is None else t.double() for t in given))
    if numbers(norm):  # a curve knows no rows
        assert y.isfinite().sum() == 47 and y[4, 3].isnan()
        torch.testing.assert_close(y[5].double(), exact[5], rtol=1e-5, atol=1e-5)
    else:
        assert y[:4].isfinite().all() and not y[4].isfinite().any() and not y[5].isfinite().all()
    torch.testing.assert_close(y[:4].double(), exact[:4], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 4), (7,)])
@pytest.mark.parametrize("norm", NORMS)
def test_empty_tensors_and_vectors(norm, shape):
    given = leaves(*parameters(norm, shape[-1], torch.float32))
    x = torch.randn(shape, requires_grad=True)
    y = call(norm, x, *given)[0]
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape
    assert all(t.grad.shape == t.shape and (x.numel() or not t.grad.any()) for t in given if t is not None)


@pytest.mark.cpu
@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize("norm", NORMS)
def test_each_instruction_set(norm, level):
    if _core.cpu_level(level) != level:
        _core.cpu_level(None)
        pytest.skip(f"this processor has no {level}")
    try:
        inputs = leaves(torch.randn(9, 123), *parameters(norm, 123, torch.float32))
        y = call(norm, *inputs)[0]
        expected = NORMS[norm](*inputs)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        dy = torch.randn_like(y)
        for ours, theirs in zip(gradients(y, inputs, dy), gradients(expected, inputs, dy)):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    finally:
        _core.cpu_level(None)


@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("norm", [None, *NORMS])
@pytest.mark.one_in(test=3, all=3)
def test_the_residual_step(norm, p, gains):
    tensors, seed = residual_arguments(norm, 19, p, gains)
    x_plus, y, _ = step(norm, *tensors, rest=(p, seed, 5))
    outputs, expected = [x_plus], list(residual_oracle(norm, tensors, p))[: 2 if norm else 1]
    outputs += [y] if norm else []
    used = [t for t in tensors if t is not None]
    for o, e in zip(outputs, expected):
        torch.testing.assert_close(o, e, rtol=1e-12, atol=1e-12)
    # both outputs, and each alone
    for chosen in ([0, 1], [0], [1]) if norm else ([0],):
        weights = {i: torch.randn_like(outputs[i]) for i in chosen}
        ours = sum((outputs[i] * weights[i]).sum() for i in chosen)
        theirs = sum((expected[i] * weights[i]).sum() for i in chosen)
        found = torch.autograd.grad(ours, used, retain_graph=True, materialize_grads=True)
        wanted = torch.autograd.grad(theirs, used, retain_graph=True, materialize_grads=True)
        for a, b in zip(found, wanted):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("norm", [None, *NORMS])
@pytest.mark.one_in(test=3)
def test_the_residual_steps_second_derivative(norm):
    tensors, seed = residual_arguments(norm, 5, 0.3, True)

    def f(*used):
        filled = iter(used)
        all_tensors = (None if t is None else next(filled) for t in tensors)
        out = step(norm, *all_tensors, eps=1e-3, rest=(0.3, seed, 5))
        return out[:2] if norm else out[0]

    used = [t for t in tensors if t is not None]
    assert gradcheck(f, used)
    assert gradgradcheck(f, used)


@pytest.mark.parametrize("out", ["branch", "stream"])
@pytest.mark.parametrize("f_type", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_the_residual_step_keeps_each_dtype(norm, f_type, out):
    tensors, seed = residual_arguments(norm, 64, 0.2, False, torch.float32, f_type)
    y_type = f_type if out == "branch" else torch.float32
    x_plus, y, _ = step(norm, *tensors, rest=(0.2, seed, 5, y_type))
    assert (x_plus.dtype, y.dtype) == (torch.float32, y_type)
    expected = residual_oracle(norm, tensors, 0.2)
    torch.testing.assert_close(x_plus.double(), expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(y.double(), expected[1], rtol=torch.finfo(y_type).eps, atol=1e-5)
    (x_plus.sum() + y.float().square().sum()).backward()
    assert (tensors[0].grad.dtype, tensors[1].grad.dtype) == (torch.float32, f_type)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relu_dropout(dtype, p):
    x = torch.randn(40, 33).to(dtype).requires_grad_()
    y = OPS.relu_dropout(x, p, torch.tensor([5, 6, 7]) if p else None, 8)
    keep = ref.dropout_keep(5, 6, 7, 8, 40, 33, p).to(x.device) if p else torch.ones(40, 33, dtype=torch.bool)
    scale = ref.dropout_scale(p) if p else 1.0
    torch.testing.assert_close(y.double(), (x.double().relu() * keep * scale), rtol=torch.finfo(dtype).eps, atol=0)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(dx.double(), dy.double() * (x > 0) * keep * scale, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("norm", [None, *NORMS])
def test_gradients_of_either_order_where_one_input_is_made_of_another(norm):
    """A branch is a function of the stream, and what flows back through it is not the step's to count."""
    tensors, _ = residual_arguments(norm, 5)
    x, w = torch.randn(4, 5, dtype=torch.float64, requires_grad=True), torch.randn(5, 5, dtype=torch.float64)

    def loss(x):
        out = step(norm, x, torch.sin(x @ w), *tensors[2:], eps=1e-3)
        return (out[0].sin() * out[1]).sum() if norm else out[0].sin().sum()

    (plain,) = torch.autograd.grad(loss(x), x)
    (kept,) = torch.autograd.grad(loss(x), x, create_graph=True)
    torch.testing.assert_close(kept, plain)
    if norm:
        y = lambda x: call(norm, x, x.mean(0), None, *bare(norm), eps=1e-3)[0].sin().sum()  # noqa: E731
        (plain,), (kept,) = (torch.autograd.grad(y(x), x, create_graph=graph) for graph in (False, True))
        torch.testing.assert_close(kept, plain)
    assert gradgradcheck(loss, x)


def test_attentions_gradient_of_itself():
    x, ranges = torch.randn(5, 6, dtype=torch.float64, requires_grad=True), torch.tensor([[0, 2, 0, 2], [2, 3, 2, 3]])
    y = lambda: OPS.attention(x, x, x, ranges, 2, True, 0.4, 0.0, None, 0)[0].sin().sum()  # noqa: E731
    (plain,), (kept,) = (torch.autograd.grad(y(), x, create_graph=graph) for graph in (False, True))
    torch.testing.assert_close(kept, plain)


@pytest.mark.parametrize("norm", NORMS)
def test_a_bias_of_one_number(norm):
    x, bias = torch.randn(3, 5, dtype=torch.float64), torch.randn(1, dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(x)
    (found,) = torch.autograd.grad(call(norm, x, None, bias, *bare(norm))[0], bias, dy)
    torch.testing.assert_close(found, dy.sum().reshape(1))


@pytest.mark.parametrize("norm", NORMS)
def test_rows_of_zeros_have_second_derivatives(norm):
    x = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    (dx,) = torch.autograd.grad(call(norm, x, None, None, *bare(norm))[0].sum(), x, create_graph=True)
    assert torch.autograd.grad(dx.square().sum(), x)[0].isfinite().all()


@pytest.mark.cpu
@pytest.mark.parametrize("rows,width", [(8193, 128), (22002, 48), (70000, 16)])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_large_tensors_of_any_shape(dtype, rows, width):
    """Results of 4 MB and more are written past the caches, in units that rows need not fill."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x, f = (torch.randn(rows * 4 // dtype.itemsize, width).to(dtype).requires_grad_() for _ in range(2))
        x_plus, y = OPS.layer_norm_residual(x, f, None, None, None, None, EPS, 0.0, None, 0)[:2]
        normed = OPS.layer_norm(x, None, None, EPS)[0]
        dx, df = torch.autograd.grad([x_plus, y, normed], [x, f], [x_plus, y, normed])
    finally:
        torch.set_num_threads(threads)
    for part in (slice(0, 5), slice(-5, None)):
        few = x[part].detach().requires_grad_(), f[part].detach().requires_grad_()
        outs = (*OPS.layer_norm_residual(*few, None, None, None, None, EPS, 0.0, None, 0)[:2],)
        outs += (OPS.layer_norm(few[0], None, None, EPS)[0],)
        assert all(torch.equal(a[part], b) for a, b in zip((x_plus, y, normed), outs))
        for a, b in zip((dx, df), torch.autograd.grad(outs, few, outs)):
            assert torch.equal(a[part], b)


@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal, p):
    q, k, v, ranges, heads = attention_arguments(causal)
    q, k, v = leaves(q, k, v)
    seed = torch.tensor([9, 8, 7]) if p else None
    out, _ = OPS.attention(q, k, v, ranges, heads, causal, 5**-0.5, p, seed, 6)
    # the oracle scales by 1/√d_head itself
    expected = attention_oracle(q, k, v, ranges, heads, causal, 1.0, p)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    dout = torch.randn_like(out)
    for a, b in zip(gradients(out, (q, k, v), dout), gradients(expected, (q, k, v), dout)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_attention_in_other_dtypes(dtype):
    q, k, v, ranges, heads = attention_arguments(False, dtype)
    out, _ = OPS.attention(q, k, v, ranges, heads, False, 5**-0.5, 0.0, None, 0)
    expected = attention_oracle(q.double(), k.double(), v.double(), ranges, heads, False, 1.0, 0.0)
    torch.testing.assert_close(out.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


def test_attentions_second_derivative():
    q, k, v, _, heads = attention_arguments(True)
    ranges = torch.tensor([[0, 2, 0, 2], [2, 3, 2, 3]])
    inputs = leaves(q[:5], k[:5], v[:5])
    f = lambda *a: OPS.attention(*a, ranges, heads, True, 0.4, 0.2, torch.tensor([9, 8, 7]), 6)[0]  # noqa: E731
    assert gradcheck(f, inputs)
    assert gradgradcheck(f, inputs)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("formula", ["fairseq", "twt"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.one_in(test=3, all=3)
def test_cross_entropy(dtype, formula, masked):
    rows, classes = 17, 301
    logits = (3 * torch.randn(rows, classes)).to(dtype).requires_grad_()
    mask = torch.rand(classes) < 0.6 if masked else None
    allowed = mask.nonzero().flatten() if masked else torch.arange(classes)
    target = allowed[torch.randint(len(allowed), (rows,))]
    target[target == 1] = allowed[-1]
    target[3] = 1
    count = len(allowed)
    each = 0.1 / (count - 1) if formula == "fairseq" else 0.1 / count
    weights = (0.9 - each, each) if formula == "fairseq" else (0.9, each)
    loss, nll, _ = OPS.label_smoothed_cross_entropy(logits, target, mask, *weights, 1)
    wide = logits.detach().double().requires_grad_()
    expected = ref.label_smoothed_cross_entropy(wide, target, 0.1, formula, mask, 1)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(loss.sum().double(), expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(nll.sum().double(), expected[1], rtol=tolerance, atol=tolerance)
    assert loss[3] == nll[3] == 0
    (found,) = torch.autograd.grad(loss.sum(), logits)
    (wanted,) = torch.autograd.grad(expected[0], wide)
    eps = max(torch.finfo(dtype).eps, 1e-12)
    torch.testing.assert_close(found.double(), wanted, rtol=4 * eps, atol=4 * eps)
    # in place: the gradient where the logits were
    buffer = logits.detach().clone()
    half = torch.tensor(0.5, dtype=torch.float64)
    again, _ = OPS.label_smoothed_cross_entropy_(buffer, target, mask, *weights, 1, half)
    torch.testing.assert_close(again, loss.detach())
    torch.testing.assert_close(buffer.double(), 0.5 * wanted, rtol=4 * eps, atol=4 * eps)


def off(found, wanted):
    return (found.double() - wanted).abs().max().item()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("offset", [0.0, 1e4, 1e6, -1e6])
def test_an_offset_of_all_logits(offset, smoothing):
    """A gradient from max + log Σ in f32 was 500 times less exact than torch's at 1e4: they are kept apart."""
    logits, target = torch.randn(5, 2000) + offset, torch.randint(2000, (5,))

    def ours(z):
        return OPS.label_smoothed_cross_entropy(z, target, None, 1 - smoothing, smoothing / 2000, -1)[0].sum()

    def theirs(z):
        log_p = z.log_softmax(-1)
        return -((1 - smoothing) * log_p.gather(1, target[:, None]).sum() + smoothing / 2000 * log_p.sum())

    def gradient(loss, z):
        z = z.clone().requires_grad_()
        return torch.autograd.grad(loss(z), z)[0]

    exact = gradient(theirs, logits.double())
    assert off(gradient(ours, logits), exact) <= 1.1 * off(gradient(theirs, logits), exact) + 1e-9
    assert off(ours(logits), theirs(logits.double())) <= 1e-6 * theirs(logits.double()).item()
    buffer, one = logits.clone(), torch.ones((), dtype=torch.float64)
    given = (target, None, 1 - smoothing, smoothing / 2000, -1, one)
    loss, _ = OPS.label_smoothed_cross_entropy_(buffer, *given)
    assert off(buffer, exact) <= 1.1 * off(gradient(theirs, logits), exact) + 1e-9
    torch.testing.assert_close(loss.sum(), ours(logits))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_logits_at_the_end_of_the_range(smoothing):
    given = (torch.tensor([0, 5]), None, 1 - smoothing, smoothing / 6, -1)
    loss, nll, _ = OPS.label_smoothed_cross_entropy(torch.full((2, 6), 3e38), *given)
    torch.testing.assert_close(loss, torch.full((2,), math.log(6)))
    torch.testing.assert_close(nll, torch.full((2,), math.log(6)))


@pytest.mark.parametrize("score", [1, 300, 1600, 2000])
def test_attention_of_large_scores(score):
    """Within twice torch's error. At 1,600 the log sum has lost 1e-4, which D took from P, and dq was off by 3e-2."""

    def ours(q, k, v):
        return OPS.attention(q, k, v, torch.tensor([[0, 16, 0, 16]]), 1, False, 1.0, 0.0, None, 0)[0]

    def theirs(q, k, v):
        return F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], scale=1.0)[0, 0]

    def gradients(attention, given, dout, kind):
        leaves = [t.to(kind).requires_grad_() for t in given]
        return torch.autograd.grad(attention(*leaves), leaves, dout.to(kind))

    largest = {}
    for seed in range(4):
        torch.manual_seed(seed)
        direction = torch.nn.functional.normalize(torch.randn(8), dim=0) * score**0.5
        q, k = (0.1 * torch.randn(16, 8) + direction for _ in range(2))
        given = ((q, k, torch.randn(16, 8) + 3), torch.randn(16, 8))
        exact = gradients(theirs, *given, torch.float64)
        found, torchs = gradients(ours, *given, torch.float32), gradients(theirs, *given, torch.float32)
        for name, *three in zip("qkv", found, torchs, exact):
            own, other = off(three[0], three[2]), off(three[1], three[2])
            largest[name] = [max(pair) for pair in zip(largest.get(name, (0.0, 0.0)), (own, other))]
    for name, (own, other) in largest.items():
        assert own <= 2 * other + 1e-6, (name, own, other)


def test_layer_norm_is_torchs():
    x, (weight, bias) = torch.randn(30, 77), parameters("layer_norm", 77, torch.float32)
    torch.testing.assert_close(OPS.layer_norm(x, weight, bias, EPS)[0], F.layer_norm(x, (77,), weight, bias, EPS))
    assert nfrs.__version__


@pytest.mark.parametrize("norm", [norm for norm in NORMS if numbers(norm)])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_a_number_of_any_shape(norm, shape):
    x = torch.randn(5)
    given = [torch.full(shape, 0.5, requires_grad=True) for _ in numbers(norm)]
    y = call(norm, x, None, None, *given)[0]
    torch.testing.assert_close(y, NORMS[norm](x, None, None, *given))
    (double,) = torch.autograd.grad(y.sum(), given[0], create_graph=True)
    assert double.shape == shape and torch.autograd.grad(double, given[0])[0].shape == shape
    with pytest.raises(ValueError, match=f"{numbers(norm)[-1]} must hold 1 number, got shape"):
        call(norm, x, None, None, *given[1:], torch.ones(5))
