"""The distributions of parameters' initial values (docs/spec.md §3): mean, standard deviation, limit.

TwT is Nguyen & Salazar 2019, BrN Liu et al. 2023.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from .config import Config, complete, is_one_stack, kv_width, layer_counts
from .parameters import parameters
from .parametrisation import base_width

GATES = ("gate", "output_gate")
"""The roles of the third matrix of a gated feed-forward, and of the matrix of attention's output gate."""


class Linear(NamedTuple):
    """A weight matrix of a layer: its stack, the layer's number from 1, and its role, which is q, k, v, out, fc1, fc2
    or one of GATES."""

    stack: str
    layer: int
    role: str
    is_cross_attention: bool


def expected_mean(config: Config, name: str) -> float | Tensor:
    """Returns the initial value of a constant parameter: 1, 0, √d, … or DLCL's matrix. Returns 0 for a parameter whose
    values are drawn."""
    start = parameters(config)[name].start
    return 0.0 if start is None else start


def expected_std(config: Config, name: str, part: int = 0) -> float:
    """Returns the standard deviation of parameter `name` under config["init"]; 0 for a parameter that is constant.

    Xavier's is gain·√(2/(fan_in+fan_out)), for the normal and for the uniform distribution. q, k and v are separate
    matrices, each with its own number of rows: `part` 0, 1 and 2 of an in_proj_weight. Embeddings are N(0, 1/d); under
    FixNorm they are U(−0.01, 0.01), whose std is 0.01/√3. Learned positions are drawn like the words of their side
    without FixNorm.
    """
    c, parameter = complete(config), parameters(config)[name]
    d, init = base_width(c), c["init"]
    if init not in INIT_NAMES:
        raise ValueError(f"unknown init {init!r}; the inits are {', '.join(INIT_NAMES)}")
    if init in BY_TORCH and name.endswith(BIASES_BY_TORCH):
        return (c["d_ff"] if name.endswith("linear2.bias") else c["d_model"]) ** -0.5 / math.sqrt(3)
    if parameter.start is not None:
        return 0.0
    if parameter.std is not None:
        return parameter.std
    if name.endswith(".sinks"):
        return 0.02
    if name.endswith(("value_gate.weight", "smear_gate.weight")):
        return 0.02 / math.sqrt(12)  # uniform from 0 to 0.02
    if name.endswith("value_embedding.weight"):  # the same as for the matrix of values
        return expected_std(c, name.replace("value_embedding.weight", "in_proj_weight"), 2)
    if _is_fixed(c, name):
        return 0.01 / math.sqrt(3)
    if ".layers." in name:
        d = c["d_model"]
        fan_out, fan_in = ((d, *[kv_width(c)] * 2)[part], d) if name.endswith("in_proj_weight") else parameter.shape
        return matrix_std(c, _linear(name, part), fan_out, fan_in)
    if init == "gpt2":
        return 0.02
    if init in CUT:
        return _cut_std_of_table(c, name)
    if name.endswith("embedding.weight"):
        return d**-0.5 * (t_fixup_embedding_gain(c, name) if init == "t-fixup" else 1.0)
    fairseqs = dict.fromkeys(("fairseq", *BY_TORCH), d**-0.5)
    return {**fairseqs, "r-fixup": 0.0}.get(init, _xavier(d, c["vocab_size"]))


def matrix_std(config: Config, linear: Linear, fan_out: int, fan_in: int) -> float:
    """Returns the standard deviation of a layer's matrix, or of those rows of a stacked matrix that have one role."""
    c = complete(config)
    init = c["init"]
    if init == "gpt2":
        return _gpt2_std(c, linear)
    if init in CUT:
        return _cut_std(c, linear, fan_in)
    if init in BY_TORCH and linear.role in ("fc1", "fc2", *GATES):
        return GAINS[init](c, linear) * fan_in**-0.5 / math.sqrt(3)
    if init == "smallinit" and linear.role not in ("fc1", "fc2", *GATES):
        return math.sqrt(2 / (5 * c["d_model"]))  # this does not depend on the matrix' shape (TwT §2.2)
    return GAINS[init](c, linear) * _xavier(fan_in, fan_out)


def expected_bound(config: Config, name: str, part: int = 0) -> float | None:
    """Returns the limit a of a uniform distribution U(−a, a), which is √3 times its standard deviation. Returns None if
    the parameter is normally distributed or constant."""
    c, std = complete(config), expected_std(config, name, part)
    if parameters(config)[name].std is not None:
        return None
    if name.endswith("embedding.weight"):
        is_uniform = _is_fixed(c, name)
    else:
        is_untied = name == "output_projection.weight" and c["init"] in ("fairseq", *BY_TORCH)
        is_normal = is_untied or name.endswith(".sinks")
        is_uniform = c["init"] in UNIFORM_INITS and not is_normal
    return math.sqrt(3) * std if is_uniform and std > 0 else None


def _is_fixed(config: Config, name: str) -> bool:
    """Returns True if the parameter is an embedding of words under FixNorm."""
    return config["fixnorm"] and name.endswith("embedding.weight") and "position" not in name


# For each init, the gain on a matrix of a layer. A gate has the gain of fc1 without the factor for the depth.


def xavier_gain(config: Config, linear: Linear) -> float:
    return 1.0


def fairseq_gain(config: Config, linear: Linear) -> float:
    """Returns 1/√2 for q, k and v (the baseline of TwT App C), otherwise 1."""
    return 1 / math.sqrt(2) if linear.role in ("q", "k", "v") else 1.0


def deepnorm_gain(config: Config, linear: Linear) -> float:
    """Returns β for v, out, fc1 and fc2, also in cross-attention; otherwise 1."""
    return 1.0 if linear.role in ("q", "k", *GATES) else deepnorm_beta(config, linear.stack)


def subln_gain(config: Config, linear: Linear) -> float:
    """Returns γ for v, out, fc1 and fc2, but not in the decoder's cross-attention; otherwise 1."""
    is_plain = linear.role in ("q", "k", *GATES) or linear.is_cross_attention
    return 1.0 if is_plain else subln_gamma(config, linear.stack)


def ds_init_gain(config: Config, linear: Linear) -> float:
    """Returns 1/√l in layer l = 1, 2, …; in release mode l^{−1/4} (Zhang et al. 2019a)."""
    return linear.layer ** (-1 / 4 if config["ds_init_mode"] == "release" else -1 / 2)


def t_fixup_gain(config: Config, linear: Linear) -> float:
    """Returns 1/√2 for q and k, as fairseq has it, and the stack's factor for v, out, fc1 and fc2 (Huang et al. 2020,
    release)."""
    if linear.role in GATES:
        return 1.0
    return 1 / math.sqrt(2) if linear.role in ("q", "k") else t_fixup_factor(config, linear.stack)


def r_fixup_gain(config: Config, linear: Linear) -> float:
    """Returns, in a model with L branches, L^{−1/6} for q, k and v, L^{−1/2} for fc1, and 0 for out and fc2 (Fixup)."""
    branches = fixup_branches(config)
    if linear.role in ("q", "k", "v"):
        return branches ** (-1 / 6)
    return {"fc1": branches ** (-1 / 2), **dict.fromkeys(GATES, 1.0)}.get(linear.role, 0.0)


def b2t_gain(config: Config, linear: Linear) -> float:
    """Returns the gain of fairseq 0.12.2 times L^{−1/2}, in a stack of L layers (Takase et al. 2023)."""
    layers = config["decoder_layers"] if is_one_stack(config) else config[f"{linear.stack}_layers"]
    return fairseq_gain(config, linear) / math.sqrt(layers)


GAINS: dict[str, Callable[[Config, Linear], float]] = {
    "xavier": xavier_gain,
    "smallinit": xavier_gain,
    "fairseq": fairseq_gain,
    "fairseq-0.12.2": fairseq_gain,
    "deepnorm": deepnorm_gain,
    "subln": subln_gain,
    "ds-init": ds_init_gain,
    "t-fixup": t_fixup_gain,
    "r-fixup": r_fixup_gain,
    "b2t": b2t_gain,
}
BY_TORCH = ("fairseq-0.12.2", "b2t")
"""The inits whose feed-forward matrices, and the biases in BIASES_BY_TORCH, are drawn as nn.Linear does: U(−a, a) with
a = 1/√fan_in."""
BIASES_BY_TORCH = ("in_proj_bias", "linear1.bias", "linear2.bias", "linear3.bias", "gate_proj.bias")
CUT = ("normal", "llama-depth", "fan-in")
"""The inits with normal distributions that are cut off at three standard deviations."""
INIT_NAMES = (*GAINS, "gpt2", *CUT)
UNIFORM_INITS = ("fairseq", "fairseq-0.12.2", "ds-init", "t-fixup", "b2t")
OF_CUT = math.sqrt(1 - 6 * math.exp(-4.5) / math.sqrt(2 * math.pi) / math.erf(3 / math.sqrt(2)))
"""The standard deviation of N(0, 1) that is cut off at ±3: 0.98658."""


def _cut_std_of_table(config: Config, name: str) -> float:
    """Returns the standard deviation outside layers for OLMo-core's inits normal, llama_depth and fan_in."""
    init, d = config["init"], base_width(config)
    if name.endswith("embedding.weight"):
        of_fan_in = d**-0.5 if config["scale_embeddings"] else 1.0
        return {"normal": OF_CUT * config["init_std"], "llama-depth": 1.0, "fan-in": of_fan_in}[init]
    return OF_CUT * (config["init_std"] if init == "normal" else d**-0.5)


def _cut_std(config: Config, linear: Linear, fan_in: int) -> float:
    """Returns the standard deviation in layers for OLMo-core's inits. A parametrisation divides it by √m_d if it does
    not depend on fan_in."""
    if config["init"] == "fan-in":
        return OF_CUT * fan_in**-0.5
    is_late = config["init"] == "llama-depth" and linear.role in ("out", "fc2", "gate")
    depth = math.sqrt(2 * linear.layer) if is_late else 1.0
    return OF_CUT * config["init_std"] / depth / math.sqrt(config["d_model"] / base_width(config))


def _gpt2_std(config: Config, linear: Linear) -> float:
    """Returns 0.02, divided by √(2L) for out and fc2 in a stack of L layers. A parametrisation has 0.02/√m_d
    instead."""
    if config["parametrisation"] != "standard":
        return 0.02 / math.sqrt(config["d_model"] / config["base_width"])
    layers = config["decoder_layers"] if is_one_stack(config) else config[f"{linear.stack}_layers"]
    return 0.02 / math.sqrt(2 * layers) if linear.role in ("out", "fc2") else 0.02


# The constants of these inits, in a model with N encoder and M decoder layers or a single stack of L layers.


def deepnorm_beta(config: Config, stack: str) -> float:
    """Returns β: encoder 0.87(N⁴M)^{−1/16}, decoder (12M)^{−1/4}, a single stack (8L)^{−1/4} (BrN eq 3)."""
    n, m = layer_counts(config)
    if is_one_stack(config):
        return (8 * m) ** (-1 / 4)
    return 0.87 * (n**4 * m) ** (-1 / 16) if stack == "encoder" else (12 * m) ** (-1 / 4)


def subln_gamma(config: Config, stack: str) -> float:
    """Returns γ: encoder √(⅓·ln 3M·ln 2N), decoder √(ln 3M), a single stack √(ln 2L) (Wang et al. 2022b)."""
    n, m = layer_counts(config)
    if is_one_stack(config):
        return math.sqrt(math.log(2 * m))
    return math.sqrt(math.log(3 * m) * (math.log(2 * n) / 3 if stack == "encoder" else 1))


def t_fixup_factor(config: Config, stack: str) -> float:
    """Returns the factor of a stack: encoder 0.67·N^{−1/4}, decoder (9M)^{−1/4}."""
    n, m = layer_counts(config)
    return 0.67 * n ** (-1 / 4) if stack == "encoder" else (9 * m) ** (-1 / 4)


def t_fixup_embedding_gain(config: Config, name: str) -> float:
    """Returns (9N)^{−1/4} for the source or the shared embedding; (9M)^{−1/4} for a separate target embedding, and if
    there is no encoder."""
    n, m = layer_counts(config)
    is_target = name.startswith("target_") or is_one_stack(config)
    return (9 * (m if is_target else n)) ** (-1 / 4)


def fixup_branches(config: Config) -> int:
    """Returns the number of branches (sublayers): 2N+3M; 2L for a single stack."""
    n, m = layer_counts(config)
    return 2 * m if is_one_stack(config) else 2 * n + 3 * m


def _linear(name: str, part: int) -> Linear:
    """Returns the matrix with that name. For encoder.layers.0.self_attn.in_proj_weight and part 2 it is the encoder's v
    in layer 1."""
    stack, _, layer, *_ = name.split(".")
    if name.endswith("in_proj_weight"):
        role = ("q", "k", "v")[part]
    else:
        roles = {"out_proj": "out", "linear1": "fc1", "linear2": "fc2", "linear3": "gate", "gate_proj": "output_gate"}
        role = roles[name.split(".")[-2]]
    return Linear(stack, int(layer) + 1, role, ".multihead_attn." in name)


def _xavier(fan_in: int, fan_out: int) -> float:
    return math.sqrt(2 / (fan_in + fan_out))
