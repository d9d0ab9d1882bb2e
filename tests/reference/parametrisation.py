"""The factors of a parametrisation in the forward pass (docs/spec.md §3.7; Dey et al. 2025, Table 1 and eq 40; Blake et
al. 2024, Table 2 and App G). μP has those for the width, but none for the depth."""

import math
from typing import NamedTuple

from .config import Config, complete, is_one_stack

ALPHAS = {"depth-mup": 0.5, "completep": 1.0}


class Forward(NamedTuple):
    embedding: float
    """The factor of word embeddings: √d in the standard parametrisation, √d of the base model in others; 1 without
    `scale_embeddings`."""
    input: float
    """The factor of the sum of word embeddings and positions."""
    branch: float
    """The factor of every F(x) in the stack."""
    logits: float
    scores: float


def base_width(config: Config) -> int:
    c = complete(config)
    return c["base_width"] or (1 if c["parametrisation"] == "u-mup" else c["d_model"])


def forward_factors(config: Config, stack: str) -> Forward:
    c = complete(config)
    name, d_head = c["parametrisation"], c["d_model"] // c["heads"]
    scores = {None: None, "inverse": 1 / d_head, "inverse-sqrt": 1 / math.sqrt(d_head)}[c["attention_scale"]]
    scores = c["attention_multiplier"] or scores
    words = math.sqrt(base_width(c)) if c["scale_embeddings"] else 1.0
    if name == "u-mup":
        return Forward(1.0, 1.0, 1.0, c["output_alpha"] / c["d_model"], c["attn_softmax_alpha"] / d_head)
    if name == "standard":
        factors = c["input_alpha"], c["residual_multiplier"], c["output_alpha"]
        return Forward(words, *factors, scores or 1 / math.sqrt(d_head))
    layers = c["decoder_layers"] if is_one_stack(c) else c[f"{stack}_layers"]
    alpha = c["depth_alpha"] or ALPHAS.get(name)
    return Forward(
        embedding=words,
        input=c["input_alpha"],
        branch=c["residual_multiplier"] * (1.0 if alpha is None else (layers / c["base_depth"]) ** -alpha),
        logits=c["output_alpha"] * c["base_width"] / c["d_model"],
        scores=scores or 1 / d_head,
    )


class UnitScaled(NamedTuple):
    """The factors that u-μP has beside those of other parametrisations; all are 1 under these."""

    skip: float = 1.0
    """The factor of x in a sublayer's sum."""
    branch: float = 1.0
    """The factor of F(x) in it."""
    heads: float = 1.0
    """The factor of attention's output before its last matrix."""
    activation: float = 1.0
    """α of g·σ(αg)."""
    gated: float = 1.0
    """The factor of x·g·σ(αg)."""
    has_products: bool = False
    """True if the product with a matrix of a layer is multiplied by 1/√fan_in."""


def unit_factors(config: Config, sublayer: int) -> UnitScaled:
    """Returns the factors in the stack's sublayer of this number, from 0.

    Attention's sublayers, which are the even ones, all add a_attn², and the feed-forwards a_ffn², to a stream whose
    embedding counts as half the number of sublayers. τ² is what a sublayer adds, over what is there before it.
    """
    c = complete(config)
    if c["parametrisation"] != "u-mup":
        return UnitScaled()
    r, q, layers = c["res_alpha"], c["res_attn_ratio"], c["decoder_layers"]
    ffn = r * math.sqrt(2 / (1 + q**2))
    squares = [(q * ffn) ** 2, ffn**2] * layers
    tau2 = squares[sublayer] / (layers + sum(squares[:sublayer]))
    length, d_head = c["attention_length"], c["d_model"] // c["heads"]
    sharp = 1 / (1 + 4 * d_head / c["attn_softmax_alpha"] ** 2)
    linear = 1 / (1 + 1 / c["ffn_act_alpha"] ** 2)
    return UnitScaled(
        skip=1 / math.sqrt(1 + tau2),
        branch=math.sqrt(tau2 / (1 + tau2)),
        heads=(length / math.log(length)) ** ((1 - sharp) / 2),
        activation=c["ffn_act_alpha"],
        gated=2 ** (1 - linear / 2),
        has_products=True,
    )


def unit_multipliers(config: Config, name: str, shape: tuple[int, ...]) -> tuple[float, float, float]:
    """Returns a parameter's multipliers under u-μP: of the rate, of weight decay and of ε.

    Below the loss, Blake et al. 2024 multiply gradients by constants of their own. `scaled` is what has gathered where
    the parameter is, for a batch of one token; of N tokens, a parameter's is √N times that.
    """
    c = complete(config)
    d, words, layers = c["d_model"], c["vocab_size"], c["decoder_layers"]
    scaled = words / math.sqrt(words - 1) / c["output_alpha"]
    if name == "output_projection.weight":
        return 1.0, 1.0, 1 / (scaled * d)
    scaled *= d / math.sqrt(words)
    if name == "target_embedding.weight":
        return d**-0.5, d**0.5, 1 / (scaled * math.sqrt(words))
    if ".layers." not in name:
        return 1.0, 1.0, 1 / scaled
    layer, module = name.split(".")[2:4]
    is_norm, is_ffn = "norm" in name, module.startswith("linear") or module.endswith("2")
    scaled /= unit_factors(c, 2 * int(layer) + is_ffn).branch
    scaled *= 1.0 if is_norm else math.sqrt(c["d_ff"] if is_ffn else d)
    rate = (layers * (1 if len(shape) == 1 else shape[1])) ** -0.5
    return rate, 1 / rate, 1 / scaled
