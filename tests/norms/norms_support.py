"""Norms with statistics, made and run for tests, beside their oracles."""

import torch

import reference as ref
from normformer_rs import nn

EPS = 1e-5
CLASSES = {name: nn.norm_class(name) for name in ref.BATCH_NORMS}
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


def oracle(norm, name, eps=EPS):
    """The oracle with copies of the module's parameters and buffers."""
    names = {"warmup_iters": "warmup"}
    settings = {names.get(option, option): getattr(norm, option) for option in norm.shown}
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
            if key not in ("weight", "bias", "iters"):
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
