"""The factors of a parametrisation in the forward pass (docs/spec.md §3.7; Dey et al. 2025, Table 1 and eq 40). μP has
those for the width, but none for the depth."""

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
    return c["base_width"] or c["d_model"]


def forward_factors(config: Config, stack: str) -> Forward:
    c = complete(config)
    name, d_head = c["parametrisation"], c["d_model"] // c["heads"]
    scores = {None: None, "inverse": 1 / d_head, "inverse-sqrt": 1 / math.sqrt(d_head)}[c["attention_scale"]]
    scores = c["attention_multiplier"] or scores
    words = math.sqrt(base_width(c)) if c["scale_embeddings"] else 1.0
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
