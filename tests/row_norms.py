"""The row norms' operators, as the package's table declares them: their oracles, parameters and calls."""

import torch

import normformer_rs as nfrs
import reference as ref

OPS = torch.ops.normformer_rs
EPS = 1e-5
ENTRIES: dict[str, dict] = {}
"""Operator → the first entry of the table that names it."""
for entry in nfrs.tables()["norms"]:
    if entry["form"] == "rows":
        ENTRIES.setdefault(entry["operator"], entry)


def names(norm):
    """The parameters."""
    return [parameter["name"] for parameter in ENTRIES[norm]["parameters"]]


def numbers(norm):
    """Those that are neither weight nor bias: the learned numbers of a curve."""
    return [name for name in names(norm) if name not in ("weight", "bias")]


def has_one_gain(norm):
    return any(p["name"] == "weight" and p["shape"] == "one" for p in ENTRIES[norm]["parameters"])


def oracle(norm):
    """(x, weight, bias, *numbers, eps) → y; the operators know a bias for every norm."""

    def apply(x, weight=None, bias=None, *given, eps=EPS):
        if weight is None and has_one_gain(norm):
            weight = 1.0
        inside = {name: number.reshape(1) for name, number in zip(numbers(norm), given, strict=True)}
        own = bias if "bias" in names(norm) else None
        y = ref.apply_norm(ENTRIES[norm]["name"], x, weight, own, eps, inside=inside)
        return y if bias is own else y + bias

    return apply


NORMS = {norm: oracle(norm) for norm in ENTRIES}


def parameters(norm, width, dtype=torch.float64):
    """[weight, bias, *numbers], those that the norm declares."""
    weight = torch.randn(1 if has_one_gain(norm) else width, dtype=dtype)
    bias = torch.randn(width, dtype=dtype) if "bias" in names(norm) else None
    return [weight, bias, *(torch.randn(1, dtype=dtype) + 1 for _ in numbers(norm))]


def call(norm, x, weight=None, bias=None, *given, eps=EPS):
    """(y, statistics)."""
    return getattr(OPS, norm)(x, weight, bias, *(given or (eps,)))


def step(norm, x, f, alpha, beta, weight, bias, *given, eps=EPS, rest=(0.0, None, 0)):
    """(x⁺, y, statistics) of the fused step; `rest`: p, seed, site and, if it is given, dtype."""
    operator = getattr(OPS, f"{norm}_residual" if norm else "residual")
    return operator(x, f, alpha, beta, weight, bias, *(given or (eps,)), *rest)


def bare(norm):
    """What a call needs where weight and bias are absent: one of each number."""
    return [torch.full((1,), 0.75, dtype=torch.float64) for _ in numbers(norm)]
