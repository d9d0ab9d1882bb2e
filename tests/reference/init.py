"""What a freshly initialised parameter's values are drawn from (SPEC §3): their mean and standard deviation."""

import math

from .model import Config, complete, parameter_shapes

INIT_NAMES = ("xavier", "smallinit", "fairseq")


def expected_mean(config: Config, name: str) -> float:
    """√d for ScaleNorm's g, 1 for the other norms' weights, 0 for everything else."""
    if not _is_norm(name) or name.endswith("bias"):
        return 0.0
    return math.sqrt(complete(config)["d_model"]) if parameter_shapes(config)[name] == (1,) else 1.0


def expected_std(config: Config, name: str) -> float:
    """The standard deviation of parameter `name` under config["init"]; 0 for what starts constant.

    Xavier: gain·√(2/(fan_in+fan_out)), the same for the normal and for the uniform (limit √3·std). q, k and v count
    separately, d×d each. Embeddings N(0, 1/d), under FixNorm U(−0.01, 0.01), whose std is 0.01/√3.
    """
    c = complete(config)
    shape, d, d_ff, init = parameter_shapes(config)[name], c["d_model"], c["d_ff"], config["init"]
    if init not in INIT_NAMES:
        raise ValueError(f"unknown init {init!r}; the inits are {', '.join(INIT_NAMES)}")
    if _is_norm(name) or name.endswith("bias"):
        return 0.0
    if name.endswith("embedding.weight"):
        return 0.01 / math.sqrt(3) if c["fixnorm"] else d**-0.5
    if name == "output_projection.weight":
        return d**-0.5 if init == "fairseq" else _xavier(*shape)
    if name.endswith(("in_proj_weight", "out_proj.weight")):
        if init == "smallinit":
            return _xavier(d, 4 * d)  # √(2/(5d)) (TwT §2.2)
        gain = 1 / math.sqrt(2) if init == "fairseq" and name.endswith("in_proj_weight") else 1.0
        return gain * _xavier(d, d)
    return _xavier(d, d_ff)  # linear1, linear2


def _xavier(fan_in: int, fan_out: int) -> float:
    return math.sqrt(2 / (fan_in + fan_out))


def _is_norm(name: str) -> bool:
    return name.split(".")[-2].startswith("norm")
