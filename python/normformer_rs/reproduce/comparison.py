"""Every residual scheme and every norm on one small text: the project's own comparison."""

import itertools
from collections.abc import Iterable, Sequence

from ..config import tables
from .declared import Options, Reproduction, Row, Scale, Shown
from .recipes import SMALL, SMALL_ABOUT

_TABLES = tables()
_SCHEMES = tuple(entry["name"] for entry in _TABLES["residuals"])
_NORMS = tuple(entry["name"] for entry in _TABLES["norms"])
_DEEP = ("prenorm", "postnorm", "deepnorm", "resi-dual", "hybridnorm", "peri-ln", "mhc", "attnres")
"""Schemes that are compared at a second depth."""
_RATES = (1e-3, 3e-3)
_SHOWN = Shown(
    measures=("growth",),
    across="lr",
    cell="{valid_nll:.3f}; {largest_grad_norm:.1f}; {growth:.1f}",
    picture="comparison",
    value="valid_nll",
)
_LANGUAGE_MODEL: Options = {"architecture": "decoder-only", "label_smoothing": 0.0, "schedule": "constant"}
_NARROW: Options = {
    **_LANGUAGE_MODEL,
    "d_model": 64,
    "d_ff": 256,
    "heads": 4,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "warmup": 30,
    "max_tokens": 2048,
    "updates": 300,
    "evaluate_every": 300,
    "keep": 1,
}
_SMALLER: Options = {**SMALL, **_LANGUAGE_MODEL, "warmup": 2, "evaluate_every": 6, "keep": 1}
_CELLS = (
    "validation NLL in nats; the largest gradient norm; mean |x| after the last layer over that before the first, of "
    "held-out text at the end"
)


def _row(residual: str, norm: str, layers: int, seed: int, lr: float, options: Options, corpus: str) -> Row:
    """A scheme with LayerNorm, or prenorm with another norm."""
    updates = options["updates"]
    own: Options = {"residual": residual, "norm": norm, "decoder_layers": layers, "seed": seed, "lr": lr}
    if residual == "branchnorm":
        own["branchnorm_steps"] = updates // 5
    if norm == "powernorm":
        own["powernorm_warmup"] = options["warmup"]
    name = residual if norm == "layernorm" else f"{residual}, {norm}"
    key = {"name": name, "layers": str(layers), "seed": str(seed), "lr": str(lr)}
    return Row(key, {**options, **own}, corpus)


def _rows(
    depths: tuple[int, int],
    rates: Sequence[float],
    deep: Iterable[str],
    options: Options,
    corpus: str,
) -> tuple[Row, ...]:
    """All names at the first depth; some schemes at the second, with two seeds."""
    first, second = depths
    names = [(scheme, "layernorm") for scheme in _SCHEMES]
    names += [("prenorm", norm) for norm in _NORMS if norm != "layernorm"]
    rows = [_row(scheme, norm, first, 1, lr, options, corpus) for (scheme, norm), lr in itertools.product(names, rates)]
    rows += [_row(scheme, "layernorm", second, seed, lr, options, corpus)
             for scheme, seed, lr in itertools.product(deep, (1, 2), rates)]  # fmt: skip
    return tuple(rows)


MODERN = Reproduction(
    "modern",
    "Every scheme and norm on one text",
    "ours",
    "Which schemes and norms train a small language model best in 300 updates, and how does their stream grow?",
    {
        "check": Scale(
            f"decoder-only, {SMALL_ABOUT}, 2 layers, two schemes at 4 layers, too; {_CELLS}",
            _rows((2, 4), _RATES[1:], _DEEP[:2], _SMALLER, "demo-words"),
            _SHOWN,
        ),
        "here": Scale(
            "decoder-only, d 64, d_ff 256, 4 heads, 6 layers, eight schemes at 18 layers with two seeds, too; each "
            "scheme with LayerNorm and its own initialisation, each other norm with prenorm; f32, 4,000 merges, 300 "
            f"updates of 2,048 padded tokens, constant rate after 30 updates of warm-up; {_CELLS}",
            _rows((6, 18), _RATES, _DEEP, _NARROW, "shakespeare"),
            _SHOWN,
        ),
    },
)

ENTRIES = (MODERN,)
