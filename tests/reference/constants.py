"""Constants of residual schemes that depend on the depth or on the update (docs/spec.md §2)."""

import math

from .config import Config, is_one_stack, layer_counts


def deepnorm_alpha(config: Config, stack: str) -> float:
    """Returns α of the stack: encoder 0.81(N⁴M)^{1/16}, decoder (3M)^{1/4}, a single stack (2L)^{1/4} (BrN eq 3)."""
    n, m = layer_counts(config)
    if is_one_stack(config):
        return (2 * m) ** 0.25
    return 0.81 * (n**4 * m) ** (1 / 16) if stack == "encoder" else (3 * m) ** 0.25


def admin_omega(config: Config, stack: str) -> float:
    """Returns ω = √((n+1)/ln(n+1) − 1) for a stack with n sublayers: encoder n = 2N, decoder 3M, a single stack 2L
    (admin-torch)."""
    encoder_layers, decoder_layers = layer_counts(config)
    n = 2 * encoder_layers if stack == "encoder" else (2 if is_one_stack(config) else 3) * decoder_layers
    return math.sqrt((n + 1) / math.log(n + 1) - 1)


def branchnorm_alpha(t: int, steps: int, growth: str = "linear") -> float:
    """Returns α_t, which grows to 1 in T = `steps` updates, with u = t/T (BrN eq 8). It is 1 for T = 0.

    linear: u; exp: (e^{5u}−1)/(e⁵−1); sigmoid: logistic(10(u−½)), rescaled to run from 0 at u = 0 to 1 at u = 1.
    """
    if steps == 0 or t >= steps:
        return 1.0
    u = t / steps
    if growth == "linear":
        return u
    if growth == "exp":
        return math.expm1(5 * u) / math.expm1(5)
    if growth == "sigmoid":
        low, here, high = (1 / (1 + math.exp(-10 * (v - 0.5))) for v in (0.0, u, 1.0))
        return (here - low) / (high - low)
    raise ValueError(f"unknown growth {growth!r}; the growths are linear, exp, sigmoid")
