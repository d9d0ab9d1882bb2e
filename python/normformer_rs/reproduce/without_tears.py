"""Nguyen & Salazar 2019, Transformers without Tears (TwT): Tables 3 and 5."""

import itertools

from ..presets import PRESETS
from .declared import Options, Reproduction, Row, Scale, Shown
from .recipes import CONSTANT, DECODED, RECIPE, SMALL, SMALL_ABOUT, TINY, TWO_CORES, layers

_PAIRS = ("gl→en", "sk→en", "en→vi", "en→he", "ar→en")
_EPOCH = {"gl→en": 100, "sk→en": 600, "en→vi": 1500, "en→he": 2000, "ar→en": 2000}
"""Updates, TwT Table 1."""
_STEPS: dict[str, tuple[Options, str, tuple[str, ...]]] = {
    "postnorm+layernorm": (
        {"residual": "postnorm", "norm": "layernorm"},
        "+0.00",
        ("18.47", "29.37", "31.94", "27.85", "33.39"),
    ),
    "prenorm+layernorm": (
        {"residual": "prenorm", "norm": "layernorm"},
        "+0.27",
        ("19.09", "29.45", "31.92", "28.13", "33.79"),
    ),
    "prenorm+fixnorm+layernorm": (
        {"residual": "prenorm", "norm": "layernorm", "fixnorm": True},
        "+0.61",
        ("19.38", "29.50", "32.45", "28.39", "34.35"),
    ),
    "prenorm+fixnorm+scalenorm": (
        {"residual": "prenorm", "norm": "scalenorm", "fixnorm": True},
        "+1.10",
        ("20.91", "30.25", "32.79", "28.44", "34.15"),
    ),
}
"""Options, the mean gain over the first row, and test BLEU of the pairs."""
_LADDER = Shown(
    measures=("bleu",),
    columns=("bleu", "p", "train_nll", "valid_nll"),
    compared="before",
    picture="dots",
    value="bleu",
)


def _ladder(options: Options, corpus: str) -> tuple[Row, ...]:
    return tuple(Row({"run": name}, {**options, **step}, corpus, {"TwT's mean gain over the first row, BLEU": gain})
                 for name, (step, gain, _) in _STEPS.items())  # fmt: skip


def _of_pair(pair: str) -> Options:
    """The paper's options; they do not depend on norm and scheme."""
    preset = PRESETS["twt-gl-en" if pair == "gl→en" else "twt"].options
    epochs = 1000 if pair == "gl→en" else 200
    return {**preset, "init": "smallinit", "updates": epochs * _EPOCH[pair], "evaluate_every": _EPOCH[pair]}


TABLE3 = Reproduction(
    "twt-table3",
    "The ladder of TwT Table 3",
    "Nguyen & Salazar 2019, Table 3",
    "Prenorm, FixNorm and ScaleNorm each add 0.3 BLEU or more, on average over five pairs of languages.",
    {
        "check": Scale(SMALL_ABOUT, _ladder(SMALL, "demo"), _LADDER),
        "here": Scale(
            f"2,500 updates of 4,096 padded tokens, {TWO_CORES}, lr 5e-3 after 2,000 updates of warm-up; {DECODED}",
            _ladder({**TINY, **RECIPE}, "multi30k-bpe"),
            _LADDER,
        ),
        "paper": Scale(
            "five pairs of languages, d 512, 6+6 layers (gl→en 4+4), SmallInit, batches of 4,096 tokens, epochs of 100 "
            "to 2,000 updates, 200 epochs at most (gl→en 1,000), patience 20 (50); the checkpoint of the best "
            "development BLEU, beam 4",
            tuple(
                Row({"run": name, "pair": pair}, {**_of_pair(pair), **step}, pair,
                    {f"TwT, {p}": b for p, b in zip(_PAIRS, bleu)}, {"beam": 4})
                for pair in _PAIRS for name, (step, _, bleu) in _STEPS.items()
            ),
            _LADDER._replace(columns=(), across="pair", cell="{bleu:.2f}"),
            checkpoint="best",
        ),
    },
)  # fmt: skip

_LONG = _LADDER._replace(measures=("bleu", "validation"), picture="validation")
LONG = Reproduction(
    "twt-table3-long",
    "The ladder of TwT Table 3 over 8,000 updates",
    "ours, after Nguyen & Salazar 2019, Table 3",
    "Does the order of the ladder's steps stand in runs that are more than three times as long?",
    {
        "check": Scale(SMALL_ABOUT, _ladder(SMALL, "demo"), _LONG),
        "here": Scale(
            f"8,000 updates of 4,096 padded tokens, {TWO_CORES}, lr 5e-3 after 2,000 updates of warm-up; {DECODED}",
            _ladder({**TINY, **RECIPE, "updates": 8000, "evaluate_every": 500, "keep": 5}, "multi30k-bpe"),
            _LONG,
        ),
    },
)

_VERDICTS = Shown(across="lr", cell="{verdict}; {train_nll:.2f} / {valid_nll:.2f}", picture="dots", value="valid_nll")
_SIX_LAYERS = {"postnorm": "fails", "prenorm": "28.32"}
_BY_LAYERS = {"postnorm": ("18.31", "fails", "fails"), "prenorm": ("28.33", "28.13", "28.32")}


def _no_warmup(options: Options, corpus: str) -> tuple[Row, ...]:
    return tuple(
        Row(
            {"residual": residual, "lr": str(lr)},
            {**options, **CONSTANT, "init": "smallinit", "residual": residual, "lr": lr},
            corpus,
            {"TwT, 3e-4, en→vi, BLEU": _SIX_LAYERS[residual]},
        )
        for residual, lr in itertools.product(_SIX_LAYERS, (3e-4, 1e-3, 3e-3))
    )


TABLE5 = Reproduction(
    "twt-table5",
    "TwT Table 5: no warm-up",
    "Nguyen & Salazar 2019, Table 5",
    "Without warm-up postnorm fails with 5 and 6 layers and does worse with 4; prenorm trains with all.",
    {
        "check": Scale(f"{SMALL_ABOUT}, no warm-up", _no_warmup(SMALL, "demo"), _VERDICTS),
        "here": Scale(
            "no warm-up, constant rate, 6+6 layers, d 128, SmallInit, bf16, 1,000 updates of 4,096 padded tokens; "
            "verdict, training NLL of the last 50 updates / validation NLL, in nats",
            _no_warmup({**TINY, **RECIPE, **layers(6), "updates": 1000, "keep": 1}, "multi30k-bpe"),
            _VERDICTS,
            seeds=3,
        ),
        "paper": Scale(
            "en→vi, d 512, 4, 5 and 6 layers, SmallInit, 3e-4 from the first update, decayed by 0.8 when development "
            "BLEU stalls; 200 epochs of 1,500 updates at most; BLEU of the development set, beam 4",
            tuple(
                Row({"residual": residual, "layers": str(number)},
                    {**_of_pair("en→vi"), **layers(number), "schedule": "no-warmup", "warmup": 0, "lr": 3e-4,
                     "residual": residual},
                    "en→vi", {f"TwT, {n} layers": b for n, b in zip((4, 5, 6), _BY_LAYERS[residual])}, {"beam": 4})
                for residual in _BY_LAYERS for number in (4, 5, 6)
            ),
            Shown(measures=("bleu",), across="layers", cell="{bleu:.2f}", picture="dots", value="bleu"),
            checkpoint="best",
            scored="valid",
        ),
    },
)  # fmt: skip

ENTRIES = (TABLE3, LONG, TABLE5)
