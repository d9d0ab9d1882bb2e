"""Liu et al. 2023, BranchNorm (BrN): Table 1, Fig 3, and deep stacks with warm-up."""

import itertools
from collections.abc import Iterable

from ..config import tables
from ..presets import PRESETS
from .declared import Options, Reproduction, Row, Scale, Shown
from .recipes import CONSTANT, RECIPE, SMALL, SMALL_ABOUT, TINY, layers

_PAPER = {
    18: {"prenorm": "28.1", "postnorm": "diverged", "deepnorm": "29.1", "branchnorm": "30.3", "rezero": "diverged",
         "r-fixup": "28.4", "t-fixup": "28.4", "admin": "28.8", "dlcl": "28.2", "normformer": "28.3", "subln": "28.3"},
    50: {"prenorm": "28.0", "postnorm": "diverged", "deepnorm": "29.7", "branchnorm": "30.7", "subln": "28.7",
         "admin": "diverged"},
}  # fmt: skip
"""BLEU of WMT17 en→de by layers; DeepNorm and Sub-LN as the authors ran them."""
_ALL = tuple(entry["name"] for entry in tables()["residuals"])
_DEEP = tuple(_PAPER[50])
_FIRST = ("postnorm", "deepnorm", "branchnorm")
_RATES = (5e-4, 2e-3)
_CELL = "{verdict}; {train_nll:.2f} / {valid_nll:.2f}; {largest_grad_norm:.1f}"
_VERDICTS = Shown(measures=("gradients",), across="lr", cell=_CELL, picture="gradients")
_BLEU = Shown(measures=("bleu", "gradients"), columns=("bleu", "verdict"), picture="dots", value="bleu")
_NARROW: Options = {**TINY, **RECIPE, "d_model": 64, "d_ff": 128, "dropout": 0.1, "max_tokens": 2048, "keep": 1}
_ABOUT = (
    "updates of 2,048 padded tokens, seed 1, each scheme with its own initialisation; verdict; training NLL of the "
    "last 50 updates / validation NLL, in nats; the largest gradient norm"
)
_BEAM: Options = {"beam": 4, "rule": "fairseq", "alpha": 0.6}


def _scheme(residual: str, steps: int) -> Options:
    return {"residual": residual, **({"branchnorm_steps": steps} if residual == "branchnorm" else {})}


def _rows(residuals: Iterable[str], options: Options, steps: int, corpus: str, number: int) -> tuple[Row, ...]:
    """Each scheme at both rates."""
    return tuple(
        Row(
            {"residual": residual, "lr": str(lr)},
            {**options, **_scheme(residual, steps), "lr": lr},
            corpus,
            {f"BrN, {number}+{number} layers": _PAPER[number].get(residual, "")},
        )
        for residual, lr in itertools.product(residuals, _RATES)
    )


def _without_warmup(number: int, updates: int) -> Options:
    return {**_NARROW, **layers(number), **CONSTANT, "updates": updates, "evaluate_every": updates}


def _authors(residual: str, number: int, **more: object) -> Row:
    options = {**PRESETS["brn"].options, **layers(number), **_scheme(residual, 4000), **more}
    return Row(
        {"residual": residual, "lr": str(options["lr"])},
        options,
        "wmt17",
        {"BrN": _PAPER[number].get(residual, "")},
        _BEAM,
    )


def _table1(number: int, updates: int, residuals: tuple[str, ...]) -> Reproduction:
    small = {**SMALL, **layers(number // 9), **CONSTANT, "keep": 1}
    # T = 4000 would outlast these runs: α reaches 1 after a fifth of them.
    here = _rows(residuals, _without_warmup(number, updates), updates // 5, "multi30k-bpe", number)
    return Reproduction(
        f"brn-table1-{number}",
        f"{number}+{number} layers",
        f"Liu et al. 2023, Table 1, column {number}L-{number}L, and Fig 3",
        "Postnorm diverges in deep stacks; BranchNorm trains and ends above DeepNorm and every pre-norm scheme.",
        {
            "check": Scale(f"{SMALL_ABOUT}, {number // 9}+{number // 9} layers, no warm-up",
                           _rows(residuals, small, 2, "demo", number), _VERDICTS),
            "here": Scale(f"d 64, d_ff 128, constant rate without warm-up, bf16, {updates} {_ABOUT}", here, _VERDICTS),
            "paper": Scale(
                "d 512, 100,000 updates of 128 batches of 4,096 tokens (the authors: 32 A100), lr 5e-4 after 4,000 "
                "updates of warm-up, T = 4,000; BLEU at beam 4. The paper stops early without saying when; this does "
                "not",
                tuple(_authors(residual, number) for residual in _PAPER[number]),
                _BLEU,
                checkpoint="best",
            ),
        },
    )  # fmt: skip


_START = Shown(
    measures=("start", "gradients", "losses"),
    columns=("first_norm", "median_norm", "largest_norm", "last_nll"),
    picture="start",
)
FIG3 = Reproduction(
    "brn-fig3",
    "BrN Fig 3: gradient norms at the start",
    "Liu et al. 2023, Fig 3 (a picture without numbers; its depth is not said)",
    "At the very beginning BranchNorm's gradient norms are smoother than DeepNorm's and postnorm's.",
    {
        "check": Scale(f"{SMALL_ABOUT}, 5+5 layers, no warm-up",
                       _rows(_FIRST, {**SMALL, **layers(5), **CONSTANT, "keep": 1}, 2, "demo", 50), _START),
        "here": Scale(
            "the runs of brn-table1-50: 50+50 layers, d 64, constant rate without warm-up, bf16, 2,048 padded tokens; "
            "gradient norms before clipping and training NLL of the first 100 of 300 updates, T = 60",
            tuple(row._replace(paper={}) for row in
                  _rows(_FIRST, _without_warmup(50, 300), 60, "multi30k-bpe", 50)),
            _START,
        ),
        "paper": Scale(
            "50+50 layers, d 512, the first 100 updates of 128 batches of 4,096 tokens, T = 4,000 and a warm-up of "
            "4,000 updates",
            tuple(_authors(residual, 50, updates=100, evaluate_every=100)._replace(paper={}) for residual in _FIRST),
            _START,
        ),
    },
)  # fmt: skip

_WARM: Options = {**_NARROW, **layers(50), "updates": 600, "warmup": 24, "evaluate_every": 200}
WARMUP = Reproduction(
    "branchnorm-warmup",
    "50+50 layers with warm-up",
    "ours, after Liu et al. 2023, Table 1",
    "Does BranchNorm hold above DeepNorm where warm-up and T have the paper's share of the budget, 4%?",
    {
        "check": Scale(f"{SMALL_ABOUT}, 5+5 layers", _rows(_FIRST, {**SMALL, **layers(5)}, 2, "demo", 50), _VERDICTS),
        "here": Scale(
            "d 64, d_ff 128, the highest rate after 24 updates of warm-up, then inverse square root, T = 24, bf16, "
            f"600 {_ABOUT}",
            _rows(_FIRST, _WARM, 24, "multi30k-bpe", 50),
            _VERDICTS,
        ),
    },
)  # fmt: skip

ENTRIES = (_table1(18, 600, _ALL), _table1(50, 300, _DEEP), FIG3, WARMUP)
