"""Tests the oracle's norms against torch.nn.functional, gradcheck, and the papers' equations, written out step by
step."""

import math

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

import reference as ref
from reference.parameters import norm_buffers
from reference.residual import Norm

EPS, WIDTH = 1e-5, 3
PADDED = torch.tensor([[False, False, True, True], [False, False, False, True]])


def randn(*shape, **options):
    return torch.randn(shape, dtype=torch.float64, **options)


def buffers(name, dtype=torch.float64):
    """Returns a norm's buffers of width 3 with their initial values."""
    declared = norm_buffers(name, Norm("norm", WIDTH))
    kinds = [torch.int64 if isinstance(buffer.start, int) else dtype for buffer in declared]
    return {
        buffer.name.removeprefix("norm."): torch.full(buffer.shape, buffer.start, dtype=kind)
        for buffer, kind in zip(declared, kinds, strict=True)
    }


def build(name, weight=None, bias=None, dtype=torch.float64, **options):
    weight = torch.linspace(0.5, 2, WIDTH, dtype=torch.float64) if weight is None else weight
    bias = torch.linspace(-1, 1, WIDTH, dtype=torch.float64) if bias is None else bias
    return ref.BATCH_NORMS[name](weight, bias, buffers(name, dtype), **options)


def copied(norm):
    return {name: value.clone() for name, value in norm.buffers.items()}


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, math.inf])
def test_lp_norm(p):
    g = torch.tensor([1.7], dtype=torch.float64, requires_grad=True)
    x = torch.cat([randn(4, 5), 1e-3 * randn(2, 5), torch.zeros(1, 5)]).requires_grad_()
    dy = randn(7, 5)
    ours, theirs = ref.lp_norm(x, g, p, eps=0.1), g * nn.functional.normalize(x, p=p, dim=-1, eps=0.1)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, (x, g), dy), torch.autograd.grad(theirs, (x, g), dy))
    assert gradcheck(lambda x, g: ref.apply_norm("lpnorm", x, g, p=p), (randn(3, 5, requires_grad=True), g))


def test_lp_norm_shares_its_slope_among_ties_at_infinity():
    x, dy = torch.tensor([[2.0, -2.0, 1.0]], requires_grad=True), torch.tensor([[1.0, 10.0, 100.0]])
    (dx,) = torch.autograd.grad(ref.lp_norm(x, 3.0, math.inf), x, dy)
    along = 1 - 10 + 50  # ⟨u, dy⟩, u = (1, −1, ½), w = (½, −½, 0)
    torch.testing.assert_close(dx, 3 / 2 * torch.tensor([[1.0 - along / 2, 10 + along / 2, 100]]))


def test_group_scaling():
    x = randn(3, 6)
    parts = [nn.functional.rms_norm(part, (2,), eps=EPS) for part in x.split(2, -1)]
    torch.testing.assert_close(ref.group_scaling(x, 3), torch.cat(parts, -1))
    assert gradcheck(lambda x: ref.group_scaling(x, 2), x.requires_grad_())


def test_batch_norm_equals_torch():
    norm, x, dy = build("batchnorm", alpha=0.8), (3 + 2 * randn(2, 4, WIDTH)).requires_grad_(), randn(2, 4, WIDTH)
    w, b = (t.requires_grad_() for t in (norm.weight, norm.bias))
    mean, variance = torch.zeros(WIDTH, dtype=torch.float64), torch.ones(WIDTH, dtype=torch.float64)
    theirs = nn.functional.batch_norm(x.view(-1, WIDTH), mean, variance, w, b, True, 0.2, EPS).view_as(x)
    ours = norm(x)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, (x, w, b), dy), torch.autograd.grad(theirs, (x, w, b), dy))
    torch.testing.assert_close(norm.buffers["running_mean"], mean)
    unbiased = (norm.buffers["running_var"] - 0.8) * 8 / 7 + 0.8  # torch keeps the unbiased variance of the 8 rows
    torch.testing.assert_close(unbiased, variance)
    theirs = nn.functional.batch_norm(x.view(-1, WIDTH), mean, norm.buffers["running_var"], w, b, False, 0.2, EPS)
    torch.testing.assert_close(norm(x, training=False), theirs.view_as(x))


@pytest.mark.parametrize("pad_mask", [None, PADDED], ids=["full", "padded"])
@pytest.mark.parametrize("name", ref.BATCH_NORMS)
def test_true_gradients(name, pad_mask):
    """PowerNorm's gradient is exact in warm-up, where this test is. Results are computed from the batch's statistics,
    so changing buffers do not matter."""

    def call(x, weight, bias):
        return build(name, weight, bias)(x, pad_mask)

    x, w, b = randn(2, 4, WIDTH, requires_grad=True), randn(WIDTH, requires_grad=True), randn(WIDTH, requires_grad=True)
    assert gradcheck(call, (x, w, b))


@pytest.mark.parametrize("warmup", [0, 10])
def test_power_norm_is_the_papers_equations_over_fifty_steps(warmup):
    alpha, alpha_b = 0.9, 0.8
    norm = build("powernorm", warmup=warmup, alpha_fwd=alpha, alpha_bwd=alpha_b)
    w, b = norm.weight.requires_grad_(), norm.bias.requires_grad_()
    phi, nu = torch.ones(WIDTH, dtype=torch.float64), torch.zeros(WIDTH, dtype=torch.float64)
    seen = []
    for t in range(1, 51):
        x, dy = (1 + t / 10) * randn(6, WIDTH), randn(6, WIDTH)
        phi_b = x.square().mean(0)
        seen.append(phi_b)
        psi = (phi_b + EPS).sqrt() if t <= warmup else (phi + EPS).sqrt()
        x_hat = x / psi  # eq 8
        y = w * x_hat + b  # eq 9
        phi = torch.stack(seen).mean(0) if t <= warmup else phi + (1 - alpha) * (phi_b - phi)  # eq 10
        big_g = dy * w
        gamma, lamda = (x_hat * x_hat).mean(0), (big_g * x_hat).mean(0)
        x_prime = big_g - (lamda if t <= warmup else nu) * x_hat  # eq 11; the gradient of PN-V in warm-up
        dx = x_prime / psi  # eq 12
        nu = nu * (1 - (1 - alpha_b) * gamma) + (1 - alpha_b) * lamda  # eq 13
        x.requires_grad_()
        ours = norm(x)
        torch.testing.assert_close(ours, y)
        theirs = dx, (dy * x_hat).sum(0), dy.sum(0)
        torch.testing.assert_close(torch.autograd.grad(ours, (x, w, b), dy), theirs)
        torch.testing.assert_close(norm.buffers["running_phi"].flatten(), phi)
        torch.testing.assert_close((1 - alpha_b) * norm.buffers["ema_gz"].flatten(), nu)
        assert norm.buffers["iters"].item() == t
    torch.testing.assert_close(norm(x, training=False), w * x / (phi + EPS).sqrt() + b)


def test_power_norms_release_is_the_published_steps():
    """In the published backward pass, A is eq 11, and the update of ema_gz is eq 13 with ν = (1−α_b)·ema_gz."""
    alpha, alpha_b, warmup = 0.9, 0.8, 5
    norm = build("powernorm", mode="release", warmup=warmup, alpha_fwd=alpha, alpha_bwd=alpha_b)
    phi, nu = torch.ones(WIDTH, dtype=torch.float64), torch.zeros(WIDTH, dtype=torch.float64)
    for t in range(1, 51):
        x, dy = (1 + t / 10) * randn(2, 4, WIDTH), randn(2, 4, WIDTH)
        phi_b = x[~PADDED].square().mean(0)
        z = x / ((phi_b if t <= warmup else phi) + EPS).sqrt()
        if t < warmup:
            phi = phi * (t - 1) / t + phi_b / t
        phi = alpha * phi + (1 - alpha) * phi_b
        big_g, every = norm.weight * dy, (0, 1)  # the means are over all positions, including padding
        x_prime = big_g - nu * z
        nu = nu * (1 - (1 - alpha_b) * (z * z).mean(every)) + (1 - alpha_b) * (big_g * z).mean(every)
        y, saved = norm.forward(x, PADDED)
        dx, dw, db = norm.backward(dy, saved)
        torch.testing.assert_close(y, norm.weight * z + norm.bias)
        torch.testing.assert_close(dx, x_prime / (phi_b + EPS).sqrt())  # the batch's ψ, even after warm-up
        torch.testing.assert_close((dw, db), ((dy * z).sum(every), dy.sum(every)))
        torch.testing.assert_close(norm.buffers["running_phi"].flatten(), phi)
        torch.testing.assert_close((1 - alpha_b) * norm.buffers["ema_gz"].flatten(), nu)
    torch.testing.assert_close(norm(x, PADDED, False), norm.weight * x / (phi + EPS).sqrt() + norm.bias)


@pytest.mark.parametrize("warmup", [0, 9])
@pytest.mark.parametrize("name", ref.BATCH_NORMS)
def test_padding_adds_nothing_but_zeros(name, warmup):
    options = {"warmup": warmup} if name == "powernorm" else {}
    plain, padded = build(name, **options), build(name, **options)
    for _ in range(3):
        rows, d_rows = randn(5, WIDTH), randn(5, WIDTH)
        x, dy = torch.full((2, 4, WIDTH), math.nan).double(), torch.full((2, 4, WIDTH), math.inf).double()
        x[~PADDED], dy[~PADDED] = rows, d_rows
        y, saved = plain.forward(rows)
        y_padded, saved_padded = padded.forward(x, PADDED)
        dx, *d_parameters = plain.backward(d_rows, saved)
        dx_padded, *d_padded = padded.backward(dy, saved_padded)
        torch.testing.assert_close((y_padded[~PADDED], dx_padded[~PADDED], d_padded), (y, dx, d_parameters))
        assert not y_padded[PADDED].any() and not dx_padded[PADDED].any()
        torch.testing.assert_close(padded.buffers, plain.buffers)
    evaluated = padded(x, PADDED, False)
    torch.testing.assert_close(evaluated[~PADDED], plain(rows, training=False))
    assert not evaluated[PADDED].any()


@pytest.mark.parametrize("warmup", [0, 9])
@pytest.mark.parametrize("name", ref.BATCH_NORMS)
def test_what_is_not_finite_or_not_there_leaves_the_state_alone(name, warmup):
    norm = build(name, **({"warmup": warmup} if name == "powernorm" else {}))
    norm.backward(randn(4, WIDTH), norm.forward(1 + randn(4, WIDTH))[1])
    before = copied(norm)
    assert not torch.equal(next(iter(before.values())), next(iter(buffers(name).values())))
    x = randn(2, 4, WIDTH)
    y, saved = norm.forward(x, torch.ones_like(PADDED))
    dx, *d_parameters = norm.backward(x, saved)
    assert not any(t.any() for t in (y, dx, *d_parameters))
    torch.testing.assert_close(norm.buffers, before, rtol=0, atol=0)
    for bad in (math.nan, math.inf):
        x[0, 0, 1] = bad
        _, saved = norm.forward(x)
        norm.backward(x, saved)
        torch.testing.assert_close(norm.buffers, before, rtol=0, atol=0)
    norm(randn(2, 4, WIDTH), training=False)
    torch.testing.assert_close(norm.buffers, before, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["paper", "release"])
def test_two_forwards_before_a_backward_keep_their_own_psi(mode):
    norm = build("powernorm", mode=mode, warmup=0)
    first, second, dy = randn(5, WIDTH), 3 * randn(5, WIDTH), randn(5, WIDTH)
    _, saved = norm.forward(first)
    after = copied(norm)["running_phi"].flatten()
    _, saved_second = norm.forward(second)
    roots = {"paper": (torch.ones(WIDTH).double(), after), "release": (first.square().mean(0), second.square().mean(0))}
    for each, phi in zip((saved, saved_second), roots[mode]):
        dx, *_ = build("powernorm", mode=mode).backward(dy, each)  # ν = 0
        torch.testing.assert_close(dx, norm.weight * dy / (phi + EPS).sqrt())
    norm.backward(dy, saved)
    nu = (1 - 0.9) * norm.buffers["ema_gz"].flatten()
    dx, *_ = norm.backward(dy, saved_second)
    expected = (norm.weight * dy - nu * saved_second.x_hat) / saved_second.root
    torch.testing.assert_close(dx, expected)


@pytest.mark.parametrize("name", ref.BATCH_NORMS)
def test_half_precision_keeps_f32_statistics(name):
    halves, floats = build(name, dtype=torch.float32), build(name, dtype=torch.float32)
    x = randn(6, WIDTH).bfloat16()
    y, saved = halves.forward(x)
    theirs, theirs_saved = floats.forward(x.float())
    torch.testing.assert_close(y, theirs.bfloat16())
    dx, *_ = halves.backward(x, saved)
    torch.testing.assert_close(dx, floats.backward(x.float(), theirs_saved)[0].bfloat16())
    torch.testing.assert_close(halves.buffers, floats.buffers)
    assert all(value.dtype in (torch.float32, torch.int64) for value in halves.buffers.values())
