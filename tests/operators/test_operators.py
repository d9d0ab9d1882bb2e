"""The registered operators against the plain PyTorch oracle, in every way PyTorch calls an operator."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import normformer_rs as nfrs
import reference as ref
from cuda_emulator.cases import calls
from normformer_rs import _core

pytestmark = pytest.mark.device
OPS = torch.ops.normformer_rs
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 2, 7, 16, 31, 123, 512, 1000]
EPS = 1e-5
# name → oracle(x, weight, bias) with the parameters the norm has
NORMS = {
    "layer_norm": lambda x, w, b: ref.layer_norm(x, w, b, EPS),
    "rms_norm": lambda x, w, b: ref.rms_norm(x, w, EPS),
    "scale_norm": lambda x, w, b: ref.scale_norm(x, w, EPS),
}


def parameters(norm, width, dtype=torch.float64):
    weight = torch.randn(1 if norm == "scale_norm" else width, dtype=dtype)
    bias = torch.randn(width, dtype=dtype) if norm == "layer_norm" else None
    return weight, bias


def leaves(*tensors):
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


def gradients(y, inputs, dy):
    return torch.autograd.grad(y, [t for t in inputs if t is not None], dy)


def test_the_table_is_tested():
    registered = {name for name in _core.operator_counts() if name + "_residual" in _core.operator_counts()}
    assert registered == set(NORMS)


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "strided": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "expanded": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_error_is_at_most_twice_pytorchs(norm, dtype, width, layout):
    x = LAYOUTS[layout](torch.randn(3, 5, width, dtype=torch.float64).to(dtype))
    weight, bias = parameters(norm, width, dtype)
    dy = torch.randn_like(x)
    before = _core.operator_counts()[norm]

    def run(f, kind):
        own = leaves(*(None if t is None else t.to(kind) for t in (x, weight, bias)))
        y = f(*own)
        return [y.detach(), *gradients(y, own, dy.to(kind))]

    exact = run(NORMS[norm], torch.float64)
    ours = run(lambda *a: getattr(OPS, norm)(*a, EPS)[0], dtype)
    after = _core.operator_counts()[norm]
    assert (after[0] - before[0], after[1] - before[1]) == calls(dtype), "kernel, composed formula"
    theirs = run(lambda x, w, b: NORMS[norm](x, w, b), dtype)
    # What is summed, before it cancels: for dx the rows of w⊙dy·scale, for parameters dy⊙x̂ and dy.
    stats = getattr(OPS, norm)(x, weight, bias, EPS)[1].double()
    row = dy.double().abs().amax(-1) * weight.double().abs().max() * stats[..., -1].abs()
    hat = getattr(OPS, norm)(x.double(), None, None, EPS)[0]
    terms = {
        "y": 0,
        "dx": row.max(),
        "dweight": (dy.double() * hat).abs().sum(),
        "dbias": dy.double().abs().sum((0, 1)).max(),
    }
    for name, e, o, t in zip(terms, exact, ours, theirs):
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
def test_gradients_of_both_orders(norm):
    x = torch.randn(3, 6, dtype=torch.float64)
    x[1] = 1e-7 * x[1]  # inside scale_norm's clamp
    inputs = leaves(x, *parameters(norm, 6))
    inputs = [t for t in inputs if t is not None]

    def f(x, w, b=None):
        return getattr(OPS, norm)(x, w, b, 1e-3)[0]

    assert gradcheck(f, inputs)
    assert gradgradcheck(f, inputs)


@pytest.mark.parametrize("norm", NORMS)
def test_extreme_rows_stay_in_their_rows(norm):
    weight, bias = parameters(norm, 8, torch.float32)
    x = torch.randn(6, 8)
    x[1] = 0
    x[2] *= 1e30  # squares overflow f32
    x[3] *= 1e-30
    x[4, 3] = float("nan")
    x[5, 3] = float("inf")
    y = getattr(OPS, norm)(x, weight, bias, EPS)[0]
    exact = NORMS[norm](x.double(), weight.double(), None if bias is None else bias.double())
    assert y[:4].isfinite().all() and not y[4].isfinite().any() and not y[5].isfinite().all()
    torch.testing.assert_close(y[:4].double(), exact[:4], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 4), (7,)])
@pytest.mark.parametrize("norm", NORMS)
def test_empty_tensors_and_vectors(norm, shape):
    weight, bias = leaves(*parameters(norm, shape[-1], torch.float32))
    x = torch.randn(shape, requires_grad=True)
    y = getattr(OPS, norm)(x, weight, bias, EPS)[0]
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape and weight.grad.shape == weight.shape


@pytest.mark.cpu
@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize("norm", NORMS)
def test_each_instruction_set(norm, level):
    if _core.cpu_level(level) != level:
        _core.cpu_level(None)
        pytest.skip(f"this processor has no {level}")
    try:
        x, (weight, bias) = torch.randn(9, 123), parameters(norm, 123, torch.float32)
        inputs = leaves(x, weight, bias)
        y = getattr(OPS, norm)(*inputs, EPS)[0]
        expected = NORMS[norm](*inputs)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        dy = torch.randn_like(y)
        for ours, theirs in zip(gradients(y, inputs, dy), gradients(expected, inputs, dy)):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    finally:
        _core.cpu_level(None)


def residual_arguments(norm, width=8, p=0.0, gains=False, x_type=torch.float64, f_type=torch.float64):
    x, f = torch.randn(4, width).to(x_type), torch.randn(4, width).to(f_type)
    weight, bias = parameters(norm, width, torch.float64) if norm else (None, None)
    alpha, beta = (torch.rand(1).double() + 0.5, torch.rand(width).double() + 0.5) if gains else (None, None)
    seed = torch.tensor([77, 3, 1]) if p else None
    return leaves(x, f, alpha, beta, weight, bias), seed


def residual(norm):
    return getattr(OPS, f"{norm}_residual" if norm else "residual")


def residual_oracle(norm, tensors, p, kind=torch.float64):
    x, f, alpha, beta, weight, bias = (None if t is None else t.to(kind) for t in tensors)
    keep = ref.dropout_keep(77, 3, 1, 5, 4, x.shape[-1], p).to(x.device) if p else None
    x_plus = (1 if alpha is None else alpha) * x
    branch = f if keep is None else f * keep * ref.dropout_scale(p)
    x_plus = x_plus + (1 if beta is None else beta) * branch
    return x_plus, NORMS[norm](x_plus, weight, bias) if norm else None


@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("norm", [None, *NORMS])
def test_the_residual_step(norm, p, gains):
    tensors, seed = residual_arguments(norm, 19, p, gains)
    x_plus, y, _ = residual(norm)(*tensors, EPS, p, seed, 5)
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
def test_the_residual_steps_second_derivative(norm):
    tensors, seed = residual_arguments(norm, 5, 0.3, True)

    def f(*used):
        filled = iter(used)
        out = residual(norm)(*(None if t is None else next(filled) for t in tensors), 1e-3, 0.3, seed, 5)
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
    x_plus, y, _ = residual(norm)(*tensors, EPS, 0.2, seed, 5, y_type)
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

    def step(x):
        out = residual(norm)(x, torch.sin(x @ w), *tensors[2:], 1e-3, 0.0, None, 0)
        return (out[0].sin() * out[1]).sum() if norm else out[0].sin().sum()

    (plain,) = torch.autograd.grad(step(x), x)
    (kept,) = torch.autograd.grad(step(x), x, create_graph=True)
    torch.testing.assert_close(kept, plain)
    if norm:
        y = lambda x: getattr(OPS, norm)(x, x.mean(0), None, 1e-3)[0].sin().sum()  # noqa: E731
        (plain,), (kept,) = (torch.autograd.grad(y(x), x, create_graph=graph) for graph in (False, True))
        torch.testing.assert_close(kept, plain)
    assert gradgradcheck(step, x)


def test_attentions_gradient_of_itself():
    x, ranges = torch.randn(5, 6, dtype=torch.float64, requires_grad=True), torch.tensor([[0, 2, 0, 2], [2, 3, 2, 3]])
    y = lambda: OPS.attention(x, x, x, ranges, 2, True, 0.4, 0.0, None, 0)[0].sin().sum()  # noqa: E731
    (plain,), (kept,) = (torch.autograd.grad(y(), x, create_graph=graph) for graph in (False, True))
    torch.testing.assert_close(kept, plain)


@pytest.mark.parametrize("norm", NORMS)
def test_a_bias_of_one_number(norm):
    x, bias = torch.randn(3, 5, dtype=torch.float64), torch.randn(1, dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(x)
    (found,) = torch.autograd.grad(getattr(OPS, norm)(x, None, bias, EPS)[0], bias, dy)
    torch.testing.assert_close(found, dy.sum().reshape(1))


@pytest.mark.parametrize("norm", NORMS)
def test_rows_of_zeros_have_second_derivatives(norm):
    x = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    (dx,) = torch.autograd.grad(getattr(OPS, norm)(x, None, None, EPS)[0].sum(), x, create_graph=True)
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


def test_autograd_hears_of_what_is_written_in_place():
    logits = torch.randn(3, 5, requires_grad=True)
    used = (2 * logits).exp()
    target, one = torch.tensor([0, 1, 2]), torch.ones((), dtype=torch.float64)
    with torch.no_grad():
        OPS.label_smoothed_cross_entropy_(used, target, None, 1.0, 0.0, -1, one)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        used.sum().backward()


LENGTHS = [(3, 5), (1, 1), (9, 70), (33, 2), (0, 4)]  # (queries, keys) of each sentence


def attention_arguments(causal, dtype=torch.float64, heads=3, d_head=5):
    lengths = [(k, k) if causal else (q, k) for q, k in LENGTHS]
    starts = list(itertools.accumulate(lengths, lambda a, b: (a[0] + b[0], a[1] + b[1]), initial=(0, 0)))
    ranges = torch.tensor([[qs, q, ks, k] for (qs, ks), (q, k) in zip(starts, lengths)])
    q_rows, k_rows = starts[-1]
    # slices of a fused projection: rows further apart than they are wide
    q = torch.randn(q_rows, 2 * heads * d_head).to(dtype)[:, : heads * d_head]
    kv = torch.randn(k_rows, 2 * heads * d_head).to(dtype)
    return q, kv[:, : heads * d_head], kv[:, heads * d_head :], ranges, heads


def attention_oracle(q, k, v, ranges, heads, causal, scale, p):
    keep = ref.dropout_keep(9, 8, 7, 6, len(q) * heads, max(ranges[:, 3]).item(), p).to(q.device) if p else None
    rows = []
    for q_start, q_len, k_start, k_len in ranges.tolist():
        cut = lambda t, start, n: t[start : start + n].unflatten(1, (heads, -1)).transpose(0, 1)  # noqa: E731
        mask = ref.causal_mask(k_len) if causal else None
        own = None
        if p:
            own = keep[q_start * heads : (q_start + q_len) * heads, :k_len].unflatten(0, (q_len, heads)).transpose(0, 1)
        out = ref.attention(
            cut(q, q_start, q_len) * scale,
            cut(k, k_start, k_len),
            cut(v, k_start, k_len),
            mask,
            own,
            ref.dropout_scale(p) if p else 1.0,
        )
        rows.append(out.transpose(0, 1).flatten(1))
    return torch.cat(rows)


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


def sample(op):
    """A call of each operator: (arguments, those that are differentiable)."""
    if op in NORMS:
        x, weight, bias = leaves(torch.randn(4, 8), *parameters(op, 8, torch.float32))
        return (x, weight, bias, EPS)
    if op == "residual" or op.endswith("_residual"):
        norm = op.removesuffix("residual").removesuffix("_") or None
        tensors, seed = residual_arguments(norm, 8, 0.2, True, torch.float32, torch.float32)
        return (*tensors, EPS, 0.2, seed, 5)
    if op == "lp_norm":
        return (*leaves(torch.randn(4, 8), torch.randn(1)), 3.0, EPS)
    if op in COLUMN_NORMS:
        x, weight, bias = leaves(torch.randn(4, 8), torch.randn(8), torch.randn(8))
        phi, nu, iters, refused = torch.ones(8), torch.zeros(8), torch.zeros(1).long(), torch.zeros(1).long()
        mask = torch.tensor([False, True, False, False])
        return (x, weight, bias, mask, phi, nu, iters if op == "power_norm" else None, refused)
    if op == "relu_dropout":
        return (torch.randn(4, 8, requires_grad=True), 0.2, torch.tensor([1, 2, 3]), 4)
    if op == "attention":
        q, k, v, ranges, heads = attention_arguments(False, torch.float32)
        return (*leaves(q, k, v), ranges, heads, False, 0.4, 0.2, torch.tensor([1, 2, 3]), 4)
    logits = torch.randn(5, 7, requires_grad=True)
    return (logits, torch.tensor([0, 2, 3, 1, 6]), torch.ones(7, dtype=torch.bool), 0.88, 0.02, 1)


# Those that work in place are the trainer's, without autograd: tests/cuda has them.
OPERATORS = sorted(op for op in _core.operator_counts() if not op.endswith("_"))
# Norms with statistics over rows; tests/norms has more. In warm-up every call's result is the batch's own.
COLUMN_NORMS = ("batch_norm", "power_norm", "power_norm_v")


def options(op):
    return {"train": True, "warmup": 1000} if op in COLUMN_NORMS else {}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # opcheck of torch 2.15 reads it
@pytest.mark.parametrize("op", OPERATORS)
def test_opcheck(op):
    opcheck(getattr(OPS, op).default, sample(op), options(op))


@pytest.mark.parametrize("op", OPERATORS)
def test_compile_fullgraph(op):
    torch._dynamo.reset()
    arguments = sample(op)
    call = getattr(OPS, op).default
    inputs = [t for t in arguments if isinstance(t, torch.Tensor) and t.requires_grad]

    def f(*a):
        out = call(*a, **options(op))
        first = out if isinstance(out, torch.Tensor) else out[0]
        return first.tanh().sum()

    eager = torch.autograd.grad(f(*arguments), inputs)
    compiled = torch.autograd.grad(torch.compile(f, fullgraph=True, backend="aot_eager")(*arguments), inputs)
    for a, b in zip(eager, compiled):
        torch.testing.assert_close(a, b)


def test_compile_with_inductor_and_dynamic_shapes():
    weight = torch.tensor([4.0], requires_grad=True)
    f = lambda x: OPS.scale_norm(torch.relu(x), weight, None, EPS)[0].tanh().sum()  # noqa: E731
    compiled = torch.compile(f, fullgraph=True, dynamic=True)
    for rows in (4, 7):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(
            torch.autograd.grad(compiled(x), weight)[0], torch.autograd.grad(f(x), weight)[0], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("norm", NORMS)
def test_functorch_takes_the_composed_formula(norm):
    x, (weight, bias) = torch.randn(3, 5, 8), parameters(norm, 8, torch.float32)
    f = lambda x: getattr(OPS, norm)(x, weight, bias, EPS)[0]  # noqa: E731
    expected = NORMS[norm](x, weight, bias)
    torch.testing.assert_close(torch.vmap(f)(x), expected)
    ours = torch.func.grad(lambda x: f(x).sin().sum())(x)
    theirs = torch.func.grad(lambda x: NORMS[norm](x, weight, bias).sin().sum())(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    jacobian = torch.func.jacrev(f)(x[0, 0])
    assert jacobian.shape == (8, 8)


def test_autocast_leaves_dtypes_alone():
    linear, weight = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.tensor([2.0]))
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        h = linear(torch.randn(4, 8))
        y = OPS.scale_norm(h, weight, None, EPS)[0]
        z = linear(y)
    assert h.dtype == y.dtype == z.dtype == torch.bfloat16
    z.float().sum().backward()
    assert weight.grad.dtype == linear.weight.grad.dtype == torch.float32


@pytest.mark.cpu
def test_kernels_run_on_torchs_threads():
    x, threads, found = torch.randn(1000, 256), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert _core.threads_in_kernels() == count
            found.append(OPS.layer_norm(x, None, None, EPS)[0])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_meta_tensors():
    x = torch.empty(3, 4, device="meta", requires_grad=True)
    y, stats = OPS.layer_norm(x, None, None, EPS)
    assert y.device.type == "meta" and y.shape == (3, 4) and stats.shape == (3, 2)


@pytest.mark.parametrize(
    "call,error,message",
    [
        (lambda: OPS.scale_norm(torch.ones(3, dtype=torch.long), None, None, 0.0), TypeError, "float32, float64"),
        (lambda: OPS.layer_norm(torch.ones(2, 3), torch.ones(4), None, 0.0), ValueError, "must hold 1 or 3 numbers"),
        (lambda: OPS.layer_norm(torch.tensor(1.0), None, None, 0.0), ValueError, "got a scalar"),
        (lambda: OPS.relu_dropout(torch.ones(2, 3), 1.5, None, 0), ValueError, r"must lie in \[0, 1\)"),
        (lambda: OPS.relu_dropout(torch.ones(2, 3), 0.5, None, 0), ValueError, "a seed is needed"),
        (
            lambda: OPS.residual(torch.ones(2, 3), torch.ones(2, 4), None, None, None, None, 0.0, 0.0, None, 0),
            ValueError,
            r"f must have shape \[2, 3\], got shape \[2, 4\]",
        ),
        pytest.param(
            lambda: OPS.residual(
                torch.ones(2, 3).bfloat16(), torch.ones(2, 3), None, None, None, None, 0.0, 0.0, None, 0
            ),
            RuntimeError,
            "convert the inputs",
            marks=pytest.mark.cpu,  # a GPU takes any two
        ),
        (
            lambda: OPS.attention(*[torch.ones(4, 6)] * 3, torch.tensor([[0, 5, 0, 4]]), 2, False, 1.0, 0.0, None, 0),
            RuntimeError,
            "lies outside the 4 query",
        ),
        (
            lambda: OPS.attention(*[torch.ones(4, 6)] * 3, torch.tensor([[0, 4, 0, 4]]), 4, False, 1.0, 0.0, None, 0),
            ValueError,
            "multiple of the number of heads",
        ),
        (
            lambda: OPS.attention(*[torch.ones(4, 0)] * 3, torch.tensor([[0, 4, 0, 4]]), 2, False, 1.0, 0.0, None, 0),
            ValueError,
            "and not 0",
        ),
        (
            lambda: OPS.attention(*[torch.ones(4, 6)] * 3, torch.tensor([[2**62] * 4]), 2, False, 1.0, 0.0, None, 0),
            RuntimeError,
            "lies outside the 4 query",
        ),
        (
            lambda: OPS.label_smoothed_cross_entropy(torch.ones(2, 0), torch.tensor([0, 0]), None, 1.0, 0.0, -1),
            ValueError,
            "at least one class",
        ),
        (
            lambda: OPS.rms_norm_backward(torch.ones(2, 3), torch.ones(4, 3), None, None, torch.ones(4, 1), EPS),
            ValueError,
            r"dy must have shape \[4, 3\], got shape \[2, 3\]",
        ),
        pytest.param(
            lambda: OPS.label_smoothed_cross_entropy(torch.ones(2, 3), torch.tensor([0, 3]), None, 1.0, 0.0, -1),
            RuntimeError,
            "target of row 1 is 3",
            marks=pytest.mark.cpu,  # a GPU answers with NaN: to say more it would have to wait
        ),
    ],
)
def test_bad_input_is_said(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_backward_operators_refuse_autograd():
    x = torch.randn(4, 8, requires_grad=True)
    stats = OPS.scale_norm(x.detach(), None, None, EPS)[1]
    with pytest.raises(RuntimeError, match="not implemented"):
        OPS.scale_norm_backward(x, x, None, None, stats, EPS)[0].sum().backward()


def test_layer_norm_is_torchs():
    x, (weight, bias) = torch.randn(30, 77), parameters("layer_norm", 77, torch.float32)
    torch.testing.assert_close(OPS.layer_norm(x, weight, bias, EPS)[0], F.layer_norm(x, (77,), weight, bias, EPS))
    assert nfrs.__version__
