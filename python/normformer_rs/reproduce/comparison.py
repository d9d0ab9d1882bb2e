"""Compares every residual scheme and every norm on one small text; this is the project's own comparison, `modern`."""

import itertools

from ..config import tables
from .declared import Options, Reproduction, Row, Scale, Shown
from .entries import WORDS, base

_TABLES = tables()
_SCHEMES = tuple(entry["name"] for entry in _TABLES["residuals"])
_NORMS = tuple(entry["name"] for entry in _TABLES["norms"])
_NAMES = [(scheme, "layernorm") for scheme in _SCHEMES]
_NAMES += [("prenorm", norm) for norm in _NORMS if norm != "layernorm"]
"""The compared pairs (scheme, norm): each scheme with LayerNorm, each other norm with prenorm."""
_RATES = (1e-3, 3e-3)
_EQUAL = "xavier"
"""The initialisation that all runs share. A scheme whose own initialisation differs is also trained with that one."""
_OWN = {entry["name"]: entry["init"] for entry in _TABLES["residuals"]}
"""The name of each scheme's own initialisation."""
_SHOWN = Shown(
    measures=("growth",),
    across="lr",
    cell="{valid_nll:.3f}; {largest_grad_norm:.1f}; {growth:.1f}",
    picture="comparison",
    value="valid_nll",
)
# The scale "here" has the options _NARROW, the scale "check" has _SMALLER.
_LANGUAGE_MODEL: Options = {"architecture": "decoder-only", "label_smoothing": 0.0, "schedule": "constant"}
_NARROW: Options = {
    **_LANGUAGE_MODEL,
    "d_model": 64,
    "d_ff": 256,
    "heads": 4,
    "decoder_layers": 6,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "warmup": 20,
    "max_tokens": 2048,
    "updates": 200,
    "evaluate_every": 200,
    "keep": 1,
}
_SMALLER: Options = {**base("small"), **_LANGUAGE_MODEL, "warmup": 2, "evaluate_every": 6, "keep": 1}
_CELLS = (
    "validation NLL in nats; the largest gradient norm; mean |x| after the last layer over that before the first, of "
    "held-out text at the end"
)


def _row(residual: str, norm: str, init: str, lr: float, options: Options, corpus: str) -> Row:
    """Returns a row, with the durations that some schemes and norms need, as parts of the run's length."""
    own: Options = {"residual": residual, "norm": norm, "init": init, "lr": lr}
    if residual == "branchnorm":
        own["branchnorm_steps"] = options["updates"] // 5
    if residual == "prores":  # the layers are switched on one after another; the last one is on after half of the run
        own["prores_steps"] = max(1, options["updates"] // (2 * options["decoder_layers"]))
    if norm == "powernorm":
        own["powernorm_warmup"] = options["warmup"]
    if norm == "prepbn":  # it fades to repbn, which evaluation uses, so the fade must end within the run
        own["prepbn_steps"] = options["updates"] // 2
    name = residual if norm == "layernorm" else f"{residual}, {norm}"
    return Row({"name": name, "init": init, "lr": str(lr)}, {**options, **own}, corpus)


def _rows(rates: tuple[float, ...], options: Options, corpus: str) -> tuple[Row, ...]:
    """Returns a row for each rate, and for each scheme and norm with the common initialisation and, if a scheme's own
    one differs, with that one too."""
    # Each element is (scheme, norm, initialisation).
    chosen = [(*names, _EQUAL) for names in _NAMES]
    chosen += [(scheme, norm, _OWN[scheme]) for scheme, norm in _NAMES if _OWN[scheme] != _EQUAL]
    return tuple(
        _row(residual, norm, init, lr, options, corpus)
        for (residual, norm, init), lr in itertools.product(chosen, rates)
    )


MODERN = Reproduction(
    "modern",
    "Every scheme and norm on one text",
    "ours",
    "Which schemes and norms train a small language model best in 200 updates from one initialisation, and how much of "
    "the difference is that of their own initialisations?",
    {
        "check": Scale(
            f"decoder-only, {WORDS['small']}, 2 layers; {_CELLS}", _rows(_RATES[1:], _SMALLER, "demo-words"), _SHOWN
        ),
        "here": Scale(
            "decoder-only, d 64, 4 heads, 6 layers; each scheme with LayerNorm, each other norm with prenorm; "
            "all from Xavier's normal distribution, and each from its scheme's own initialisation where that is "
            "another; f32, 4,000 merges, 200 updates of 2,048 padded tokens, both rates for all, constant after 20 "
            f"updates of warm-up; {_CELLS}",
            _rows(_RATES, _NARROW, "shakespeare"),
            _SHOWN,
            seeds=3,
        ),
    },
)

ENTRIES = (MODERN,)
