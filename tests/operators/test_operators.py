"""The registered operators against the plain PyTorch oracle, in every way PyTorch calls an operator."""

import functools
import math

import pytest
import torch
from fuzz_twins import FAMILIES
from operators_support import EPS, NORMS, OPS, leaves, parameters, residual_arguments, usual
from torch.library import opcheck

from normformer_rs import _core
from normformer_rs.nn.norm_table import DECLARED
from row_norms import call, numbers

pytestmark = pytest.mark.device


def test_the_table_is_tested():
    registered = {name for name in _core.operator_counts() if name + "_residual" in _core.operator_counts()}
    assert registered == set(NORMS)


def test_autograd_hears_of_what_is_written_in_place():
    logits = torch.randn(3, 5, requires_grad=True)
    used = (2 * logits).exp()
    target, one = torch.tensor([0, 1, 2]), torch.ones((), dtype=torch.float64)
    with torch.no_grad():
        OPS.label_smoothed_cross_entropy_(used, target, None, 1.0, 0.0, -1, one)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        used.sum().backward()


def sample(op):
    """A call of each operator: (arguments, those that are differentiable)."""
    if op in NORMS:
        return (*leaves(torch.randn(4, 8), *parameters(op, 8, torch.float32)), *([] if numbers(op) else [EPS]))
    if op == "residual" or op.endswith("_residual"):
        norm = op.removesuffix("residual").removesuffix("_") or None
        tensors, seed = residual_arguments(norm, 8, 0.2, True, torch.float32, torch.float32)
        return (*tensors, *([EPS] if norm is None or not numbers(norm) else []), 0.2, seed, 5)
    if op in COLUMN_NORMS:
        x, weight, bias = leaves(torch.randn(4, 8), torch.randn(8), torch.randn(8))
        phi, nu, iters, refused = torch.ones(8), torch.zeros(8), torch.zeros(1).long(), torch.zeros(1).long()
        mask = torch.tensor([False, True, False, False])
        return (x, weight, bias, mask, phi, nu, iters if op == "power_norm" else None, refused)
    return usual(op)


# Those that work in place are the trainer's, without autograd: tests/cuda has them.
OPERATORS = sorted(op for op in {*_core.operator_counts(), *FAMILIES} if not op.endswith(("_", "_forward")))
# Norms with statistics over rows; tests/norms has more. In warm-up every call's result is the batch's own.
COLUMN_NORMS = [entry.operator for entry in DECLARED.values() if entry.form == "columns"]


def options(op):
    return {"train": True, "warmup": 1000} if op in COLUMN_NORMS else {}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # opcheck of torch 2.15 reads it
@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.one_in(test=5, all=2)
def test_opcheck(op):
    opcheck(getattr(OPS, op).default, sample(op), options(op))


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.one_in(test=3)
def test_compile_fullgraph(op):
    torch._dynamo.reset()
    arguments = sample(op)
    call = getattr(OPS, op).default
    inputs = [t for t in arguments if isinstance(t, torch.Tensor) and t.requires_grad]

    def f(*a):
        out = call(*a, **options(op))
        first = out if isinstance(out, torch.Tensor) else out[0]
        return first.tanh().sum()

    def made(f):
        y = f(*arguments)
        return torch.autograd.grad(y, inputs) if inputs else (y,)

    torch.testing.assert_close(made(torch.compile(f, fullgraph=True, backend="aot_eager")), made(f))


@pytest.mark.long  # half a minute of the C++ compiler
def test_compile_with_inductor_and_dynamic_shapes():
    weight = torch.tensor([4.0], requires_grad=True)
    f = lambda x: OPS.scale_norm(torch.relu(x), weight, None, EPS)[0].tanh().sum()  # noqa: E731
    compiled = torch.compile(f, fullgraph=True, dynamic=True)
    for rows in (4, 7):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(
            torch.autograd.grad(compiled(x), weight)[0], torch.autograd.grad(f(x), weight)[0], rtol=1e-5, atol=1e-6
        )


SEED = torch.tensor([11, 3, 1])
WITH_DROPOUT = {
    "relu_dropout": lambda x, seed: OPS.relu_dropout(x, 0.5, seed, 2),
    "residual": lambda x, seed: OPS.residual(x, x.sin(), None, None, None, None, EPS, 0.5, seed, 2)[0],
    "layer_norm_residual": lambda x, seed: OPS.layer_norm_residual(
        x, x.sin(), None, None, None, None, EPS, 0.5, seed, 2
    )[1],
    "attention": lambda x, seed: OPS.attention(
        x, x.sin(), x.cos(), torch.tensor([[0, 4, 0, 4]]), 2, True, 0.5, 0.5, seed, 2
    )[0],
}


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_functorch_draws_the_kernels_masks(name):
    """The formula reads the seed through the dispatcher, whatever wraps it."""
    f, x, dx = WITH_DROPOUT[name], torch.randn(4, 8), torch.randn(4, 8)
    sums = lambda x, seed: f(x, seed).sin().sum()  # noqa: E731
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(sums(leaf, SEED), leaf)
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    close(torch.func.grad(sums)(x, SEED), expected)
    y, dy = torch.func.jvp(lambda x: f(x, SEED), (x,), (dx,))
    close(y, f(x, SEED))
    close((dy * f(x, SEED).cos()).sum(), (expected * dx).sum())
    close(torch.func.functional_call(torch.nn.Identity(), {}, (f(x, SEED),)), f(x, SEED))


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_vmap_draws_one_mask_or_one_for_each_example(name):
    f, xs = WITH_DROPOUT[name], torch.randn(3, 4, 8)
    seeds = torch.stack([SEED, SEED + 1, SEED + 2])
    grad = torch.func.grad(lambda x, seed: f(x, seed).sin().sum())
    for dims, given in ((None, [SEED] * 3), (0, seeds)):
        close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
        seed = SEED if dims is None else seeds
        close(torch.vmap(f, (0, dims))(xs, seed), torch.stack([f(x, s) for x, s in zip(xs, given)]))
        found = torch.vmap(grad, (0, dims))(xs, seed)
        close(found, torch.stack([grad(x, s) for x, s in zip(xs, given)]))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_seeds_that_are_drawn_under_vmap(randomness):
    def dropped(x):
        return OPS.relu_dropout(x, 0.5, torch.randint(2**31, (3,)), 0)

    y = torch.vmap(dropped, randomness=randomness)(torch.ones(2, 64))
    assert torch.equal(y[0], y[1]) == (randomness == "same") and set(y.flatten().tolist()) == {0.0, 2.0}


def test_a_dropout_mask_is_what_the_kernel_draws():
    ones = torch.ones(5, 40, dtype=torch.float64)
    mask = OPS.dropout_mask(SEED, 5, 40, 0.3, 7)
    assert mask.dtype == torch.float64 and torch.equal(mask, OPS.relu_dropout(ones, 0.3, SEED, 7))
    assert OPS.dropout_mask(SEED.to("meta"), 5, 40, 0.3, 7).shape == (5, 40)
    with pytest.raises(ValueError, match="rows and cols must be at least 0, got -1 and 2"):
        OPS.dropout_mask(SEED, -1, 2, 0.3, 7)


@pytest.mark.parametrize("size", [1e25, 1e-25, 1e37])
@pytest.mark.parametrize("norm", [norm for norm in NORMS if norm in ("layer_norm", "rms_norm", "scale_norm")])
def test_formulas_of_rows_whose_squares_leave_the_range(norm, size):
    """torch.func runs the formula, and the kernel scales such rows."""
    x, given, eps = torch.randn(3, 64), parameters(norm, 64, torch.float32), 1e-5 * min(size, 1) ** 2
    f = lambda x: getattr(OPS, norm)(x, *given, eps)[0]  # noqa: E731
    torch.testing.assert_close(torch.vmap(f)(x * size), f(x * size), rtol=1e-4, atol=1e-5)
    leaf = (x * size).requires_grad_()
    (expected,) = torch.autograd.grad(f(leaf).sin().sum(), leaf)
    found = torch.func.grad(lambda x: f(x).sin().sum())(x * size)
    torch.testing.assert_close(found * size, expected * size, rtol=1e-3, atol=1e-4)


def infinite(rows, columns):
    """Random numbers and one infinity."""
    numbers = torch.randn(rows, columns)
    numbers[1, 2] = math.inf
    return numbers


def statistics(norm):
    """x, weight, the buffer that the backward pass gets, and the statistics of an evaluation."""
    x, weight, ones = torch.randn(4, 3), torch.randn(3), torch.ones(3)
    iters = torch.full((1,), 9)
    _, stats = getattr(OPS, norm)(x, weight, None, None, torch.zeros(3), ones, iters, None, None, train=False)
    return x, weight, None, ones, None, stats


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("operator", "arguments", "options"),
    [
        ("batch_norm_backward", lambda: (infinite(4, 3), *statistics("batch_norm")), {"train": False}),
        ("power_norm_v_backward", lambda: (infinite(4, 3), *statistics("power_norm_v")), {"train": False}),
        ("power_norm_backward", lambda: (infinite(4, 3), *statistics("power_norm")), {"train": False}),
        ("relu_dropout_backward", lambda: (infinite(4, 3), torch.zeros(4, 3), 0.5), {}),
        (
            "label_smoothed_cross_entropy",
            lambda: (-infinite(4, 3), torch.tensor([0, 1, 1, 0]), None, 1.0, 0.0, -1),
            {},
        ),
    ],
)
def test_formulas_multiply_no_infinity_by_zero(operator, arguments, options):
    """A kernel leaves out what a factor of zero would, and so must the formula, which devices without kernels run."""
    keys, given = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), arguments()
    with torch.no_grad():
        kernel, formula = (
            torch.library.get_kernel(f"normformer_rs::{operator}", device).call_boxed(keys, *given, **options)
            for device in ("CPU", "MPS")
        )
    listed = lambda found: [found] if isinstance(found, torch.Tensor) else list(found)[:2]  # noqa: E731
    assert not any(t.isnan().any() for t in listed(kernel))
    torch.testing.assert_close(listed(formula), listed(kernel))


@pytest.mark.parametrize("norm", NORMS)
def test_functorch_takes_the_composed_formula(norm):
    x, given = torch.randn(3, 5, 8), parameters(norm, 8, torch.float32)
    f = lambda x: call(norm, x, *given)[0]  # noqa: E731
    expected = NORMS[norm](x, *given)
    torch.testing.assert_close(torch.vmap(f)(x), expected)
    ours = torch.func.grad(lambda x: f(x).sin().sum())(x)
    theirs = torch.func.grad(lambda x: NORMS[norm](x, *given).sin().sum())(x)
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
        (
            lambda: OPS.dyt(torch.ones(2, 3), None, None, torch.ones(3)),
            ValueError,
            "alpha must hold 1 number, got shape",
        ),
        (
            lambda: OPS.dyt(torch.ones(2, 3), None, None, torch.ones(1).long()),
            TypeError,
            "alpha must be float32, float64",
        ),
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
