"""Nguyen & Salazar 2019, Transformers without Tears (TwT): Tables 2 to 8, Figs 1 to 4."""

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
            _LADDER._replace(columns=(), across="pair", cell="{bleu:.2f}", mean=True, significance=0.01),
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

# Table 2: initialisation and warm-up.

_STARTS: dict[tuple[str, str, int], str] = {
    ("xavier", "postnorm", 4): "fail",
    ("xavier", "postnorm", 8): "fail",
    ("xavier", "postnorm", 16): "5.76",
    ("xavier", "prenorm", 4): "28.52",
    ("xavier", "prenorm", 8): "28.73",
    ("xavier", "prenorm", 16): "28.32",
    ("smallinit", "postnorm", 4): "28.17",
    ("smallinit", "postnorm", 8): "28.20",
    ("smallinit", "postnorm", 16): "28.62",
    ("smallinit", "prenorm", 4): "28.26",
    ("smallinit", "prenorm", 8): "28.44",
    ("smallinit", "prenorm", 16): "28.33",
}
"""Development BLEU of en→vi by initialisation, scheme and thousands of warm-up updates."""


def _starts(options: Options, thousand: int, corpus: str, search: Options | None = None) -> tuple[Row, ...]:
    """`thousand`: the updates that stand for the paper's thousand."""
    return tuple(
        Row(
            {"init": init, "residual": residual, "warmup": f"{warmup}k"},
            {**options, "init": init, "residual": residual, "norm": "layernorm", "warmup": warmup * thousand},
            corpus,
            {f"TwT, {warmup}k": bleu},
            search or {"beam": 5, "rule": "fairseq"},
        )
        for (init, residual, warmup), bleu in _STARTS.items()
    )


_BY_WARMUP = Shown(measures=("bleu",), across="warmup", cell="{bleu:.2f}; {verdict}", picture="dots", value="bleu")
TABLE2 = Reproduction(
    "twt-table2",
    "TwT Table 2: initialisation and warm-up",
    "Nguyen & Salazar 2019, Table 2",
    "With Xavier's start postnorm fails where prenorm trains; SmallInit restores it.",
    {
        "check": Scale(f"{SMALL_ABOUT}, warm-up of 1, 2 and 4 updates, which stand for 4, 8 and 16 thousand",
                       tuple(row._replace(options={**row.options, "warmup": row.options["warmup"] // 4})
                             for row in _starts(SMALL, 1, "demo")), _BY_WARMUP),
        "here": Scale(
            "6+6 layers, d 128, lr 5e-3, 2,500 updates of 4,096 padded tokens, bf16; warm-up of 500, 1,000 and 2,000 "
            f"updates, which stand for 4, 8 and 16 thousand; {DECODED}",
            _starts({**TINY, **RECIPE, **layers(6)}, 125, "multi30k-bpe"),
            _BY_WARMUP,
        ),
        "paper": Scale(
            "en→vi, d 512, 6+6 layers, 200 epochs of 1,500 updates at most, patience 20; BLEU of the development set, "
            "beam 4",
            _starts({**_of_pair("en→vi")}, 1000, "en→vi", {"beam": 4}),
            _BY_WARMUP,
            checkpoint="best",
            scored="valid",
        ),
    },
)  # fmt: skip

# Table 4: schedules.

_SCHEDULES: dict[str, tuple[Options, tuple[str, ...]]] = {
    "no-warmup": ({"schedule": "no-warmup", "warmup": 0, "lr": 3e-4}, ("18.00", "28.92", "28.91", "30.33", "35.40")),
    "inverse-sqrt": ({"schedule": "inverse-sqrt"}, ("22.18", "29.08", "28.84", "30.30", "35.33")),
    "val-decay": ({"schedule": "val-decay"}, ("21.45", "29.46", "28.67", "30.69", "35.46")),
    "inverse-sqrt, 2x-lr": (
        {"schedule": "inverse-sqrt", "lr_multiplier": 2.0},
        ("21.92", "29.03", "28.76", "30.50", "35.33"),
    ),
    "val-decay, 2x-lr": (
        {"schedule": "val-decay", "lr_multiplier": 2.0},
        ("21.63", "29.49", "28.46", "30.13", "34.95"),
    ),
}
"""Options, and development BLEU of the pairs. The authors' code decays by the release's rule."""
_SCALENORM: Options = {"residual": "prenorm", "norm": "scalenorm", "fixnorm": True}
_OF_PAIRS = Shown(measures=("bleu",), across="pair", cell="{bleu:.2f}", mean=True, picture="dots", value="bleu")


def _schedules(options: Options, corpus: str) -> tuple[Row, ...]:
    return tuple(Row({"schedule": name}, {**options, **_SCALENORM, **own}, corpus)
                 for name, (own, _) in _SCHEDULES.items())  # fmt: skip


TABLE4 = Reproduction(
    "twt-table4",
    "TwT Table 4: schedules",
    "Nguyen & Salazar 2019, Table 4",
    "Without warm-up, and with a rate that follows validation, models do as well as with the inverse square root.",
    {
        "check": Scale(SMALL_ABOUT, _schedules(SMALL, "demo"), _LADDER._replace(columns=("bleu", "valid_nll"),
                                                                              compared="")),
        "here": Scale(
            f"prenorm, ScaleNorm, FixNorm, 2,500 updates of 4,096 padded tokens, {TWO_CORES}, lr 5e-3 after 2,000 "
            f"updates of warm-up, without warm-up 3e-4; evaluation every 250 updates; {DECODED}",
            _schedules({**TINY, **RECIPE}, "multi30k-bpe"),
            _LADDER._replace(columns=("bleu", "train_nll", "valid_nll"), compared=""),
        ),
        "paper": Scale(
            "five pairs of languages as in Table 3, n_w 8,000; α_decay 0.8, patience 3; BLEU of the development set, "
            "beam 4",
            tuple(
                Row({"schedule": name, "pair": pair}, {**_of_pair(pair), **_SCALENORM, **own}, pair,
                    {f"TwT, {p}": b for p, b in zip(_PAIRS, bleu)}, {"beam": 4})
                for pair in _PAIRS for name, (own, bleu) in _SCHEDULES.items()
            ),
            _OF_PAIRS,
            checkpoint="best",
            scored="valid",
        ),
    },
)  # fmt: skip

# Table 6: WMT'14.

_WMT: dict[str, tuple[Options, str]] = {
    "prenorm+layernorm": ({"residual": "prenorm", "norm": "layernorm"}, "26.83"),
    "prenorm+fixnorm+scalenorm": (_SCALENORM, "27.07"),
    "postnorm+layernorm": ({"residual": "postnorm", "norm": "layernorm"}, "27.58"),
    "postnorm+fixnorm+scalenorm": ({**_SCALENORM, "residual": "postnorm"}, "27.57"),
}


def _high_resource(options: Options, corpus: str, search: Options) -> tuple[Row, ...]:
    return tuple(Row({"run": name}, {**options, **own}, corpus, {"TwT, newstest2014": bleu}, search)
                 for name, (own, bleu) in _WMT.items())  # fmt: skip


TABLE6 = Reproduction(
    "twt-table6",
    "TwT Table 6: WMT'14",
    "Nguyen & Salazar 2019, Table 6",
    "On much text ScaleNorm and FixNorm do as well as LayerNorm, and postnorm better than prenorm.",
    {
        "check": Scale(SMALL_ABOUT, _high_resource(SMALL, "demo", {"beam": 5, "rule": "fairseq"}), _LADDER),
        "here": Scale(
            f"2,500 updates of 4,096 padded tokens of Multi30k, {TWO_CORES}, lr 5e-3 after 2,000 updates of warm-up; "
            f"{DECODED}",
            _high_resource({**TINY, **RECIPE}, "multi30k-bpe", {"beam": 5, "rule": "fairseq"}),
            _LADDER,
        ),
        "paper": Scale(
            "WMT14 en→de by fairseq, transformer-base, lr 1e-3 after 4,000 updates of warm-up, batches of 8,192 tokens "
            "times 10, 40 epochs; tokenised BLEU of newstest2014, beam 4, length exponent 0.6",
            _high_resource({**PRESETS["twt-wmt"].options, "init": "smallinit"}, "wmt14",
                           {"beam": 4, "rule": "fairseq", "alpha": 0.6}),
            _LADDER,
        ),
    },
)  # fmt: skip

# Table 7: how many g are learned.

_GAINS: dict[str, tuple[Options, tuple[str, ...]]] = {
    "rmsnorm+fixnorm": ({**_SCALENORM, "norm": "rmsnorm"}, ("20.92", "30.36", "32.54", "28.29", "33.67")),
    "scalenorm+fixnorm": (_SCALENORM, ("20.91", "30.25", "32.79", "28.44", "34.15")),
    "scalenorm-fixed+fixnorm": (
        {**_SCALENORM, "norm": "scalenorm-fixed"},
        ("21.18", "30.36", "32.66", "28.19", "34.11"),
    ),
    "scalenorm-fixed+fixnorm, val-decay": (
        {**_SCALENORM, "norm": "scalenorm-fixed", "schedule": "val-decay"},
        ("20.36", "30.45", "32.83", "27.97", "33.98"),
    ),
    "scalenorm-fixed+fixnorm, val-decay, 2x-lr": (
        {**_SCALENORM, "norm": "scalenorm-fixed", "schedule": "val-decay", "lr_multiplier": 2.0},
        ("21.15", "30.57", "31.81", "25.00", "28.92"),
    ),
}


def _gains(options: Options, corpus: str) -> tuple[Row, ...]:
    return tuple(Row({"norm": name}, {**options, **own}, corpus) for name, (own, _) in _GAINS.items())


TABLE7 = Reproduction(
    "twt-table7",
    "TwT Table 7: how many gains are learned",
    "Nguyen & Salazar 2019, Table 7",
    "One g a norm does as well as one for each number; a fixed g does, too, but for high rates.",
    {
        "check": Scale(SMALL_ABOUT, _gains(SMALL, "demo"), _LADDER._replace(compared="first")),
        "here": Scale(
            f"prenorm, 2,500 updates of 4,096 padded tokens, {TWO_CORES}, lr 5e-3 after 2,000 updates of warm-up; "
            f"{DECODED}",
            _gains({**TINY, **RECIPE}, "multi30k-bpe"),
            _LADDER._replace(compared="first"),
        ),
        "paper": Scale(
            "five pairs of languages as in Table 3; the checkpoint of the best development BLEU, beam 4",
            tuple(
                Row({"norm": name, "pair": pair}, {**_of_pair(pair), **own}, pair,
                    {f"TwT, {p}": b for p, b in zip(_PAIRS, bleu)}, {"beam": 4})
                for pair in _PAIRS for name, (own, bleu) in _GAINS.items()
            ),
            _OF_PAIRS,
            checkpoint="best",
        ),
    },
)  # fmt: skip

# Table 8: smoothed perplexities.

_PERPLEXITIES = {
    "layernorm": (("11.792", "54.300"), ("14.078", "20.460"), ("15.961", "17.950"), ("15.562", "14.950"),
                  ("14.372", "13.450")),
    "scalenorm": (("10.151", "45.770"), ("14.004", "19.080"), ("16.719", "17.100"), ("15.906", "15.080"),
                  ("14.165", "13.290")),
}  # fmt: skip
"""Of training and test text, by pair."""
_SMOOTHED = Shown(
    measures=("smoothed",),
    columns=("train_perplexity", "test_perplexity", "gap"),
    picture="dots",
    value="test_perplexity",
)


def _two_norms(options: Options, corpus: str) -> tuple[Row, ...]:
    return tuple(Row({"norm": norm}, {**options, **_SCALENORM, "norm": norm}, corpus) for norm in _PERPLEXITIES)


TABLE8 = Reproduction(
    "twt-table8",
    "TwT Table 8: perplexities of training and test text",
    "Nguyen & Salazar 2019, Table 8",
    "ScaleNorm's perplexity of test text is lower on little text, and the gap to training text narrower on all.",
    {
        "check": Scale(SMALL_ABOUT, _two_norms(SMALL, "demo"), _SMOOTHED),
        "here": Scale(
            "the runs of twt-table3: prenorm, FixNorm, 2,500 updates of 4,096 padded tokens; exponentials of the "
            "label-smoothed loss of the last checkpoint, without dropout, of the first 1,000 training sentences and of "
            "all test sentences",
            _two_norms({**TINY, **RECIPE}, "multi30k-bpe"),
            _SMOOTHED,
        ),
        "paper": Scale(
            "five pairs of languages as in Table 3, prenorm with FixNorm",
            tuple(
                Row({"norm": norm, "pair": pair}, {**_of_pair(pair), **_SCALENORM, "norm": norm}, pair,
                    {f"TwT, {pair}, train / test": " / ".join(figures)})
                for norm, of_pairs in _PERPLEXITIES.items() for pair, figures in zip(_PAIRS, of_pairs)
            ),
            _SMOOTHED._replace(columns=(), across="pair", cell="{train_perplexity:.3f} / {test_perplexity:.3f}"),
        ),
    },
)  # fmt: skip

# The figures.

_CURVES = Shown(measures=("bleu_curve",), columns=("best_bleu", "valid_nll"), picture="curves", value="best_bleu")
_RAW = Shown(measures=("raw_gradients",), columns=("median_norm", "largest_norm"), picture="raw", value="median_norm")
_FIGURE_STEPS = {name: step for name, (step, _, _) in _STEPS.items()}
_FIGURE_STEPS["prenorm+fixnorm+scalenorm, no warm-up"] = {**_SCALENORM, "schedule": "no-warmup", "warmup": 0,
                                                          "lr": 3e-4}  # fmt: skip


def _figure_rows(options: Options, corpus: str, search: Options | None = None) -> tuple[Row, ...]:
    return tuple(Row({"run": name}, {**options, **step}, corpus, {}, search or {"beam": 5, "rule": "fairseq"})
                 for name, step in _FIGURE_STEPS.items())  # fmt: skip


def _figure(name: str, title: str, source: str, claim: str, shown: Shown, what: str) -> Reproduction:
    """The runs of the ladder, and one without warm-up, looked at over training."""
    return Reproduction(name, title, source, claim, {
        "check": Scale(f"{SMALL_ABOUT}; {what}", _figure_rows(SMALL, "demo"), shown),
        "here": Scale(
            f"the runs of twt-table3, and one without warm-up; 2,500 updates, {TWO_CORES}; {what}",
            _figure_rows({**TINY, **RECIPE}, "multi30k-bpe"), shown,
        ),
        "paper": Scale(f"en→vi as in Table 3; {what}", _figure_rows(_of_pair("en→vi"), "en→vi", {"beam": 4}), shown,
                       checkpoint="best"),
    })  # fmt: skip


FIG1 = _figure(
    "twt-fig1",
    "TwT Fig 1: development BLEU over training",
    "Nguyen & Salazar 2019, Fig 1",
    "Prenorm learns faster than postnorm, and ends higher.",
    _CURVES,
    "BLEU of held-out text by greedy search at each evaluation",
)
FIG2 = _figure(
    "twt-fig2",
    "TwT Fig 2: gradient norms over training",
    "Nguyen & Salazar 2019, Fig 2",
    "Postnorm's gradient norms have sharp spikes to the end; prenorm's are fewer and smaller, without warm-up, too.",
    _RAW,
    "gradient norms before clipping, update by update",
)
_LEARNED = Shown(measures=("gains",), columns=("largest_gain", "final_gain"), picture="gains", value="final_gain")


def _smoothing(options: Options, corpus: str) -> tuple[Row, ...]:
    return tuple(Row({"label_smoothing": str(rate)}, {**options, **_SCALENORM, "label_smoothing": rate}, corpus)
                 for rate in (0.1, 0.0))  # fmt: skip


FIG3 = Reproduction(
    "twt-fig3",
    "TwT Fig 3: learned g by depth",
    "Nguyen & Salazar 2019, Fig 3",
    "But for attention to the encoder, g grows with the depth; most clearly in the decoder.",
    {
        "check": Scale(SMALL_ABOUT, _smoothing(SMALL, "demo")[:1], _LEARNED),
        "here": Scale(
            "the run of twt-table3 with ScaleNorm and FixNorm", _smoothing({**TINY, **RECIPE}, "multi30k-bpe")[:1],
            _LEARNED
        ),
        "paper": Scale(
            "the pairs with 100,000 sentences and more, ScaleNorm and FixNorm",
            tuple(Row({"pair": pair}, {**_of_pair(pair), **_SCALENORM}, pair) for pair in _PAIRS[2:]), _LEARNED,
            checkpoint="best",
        ),
    },
)  # fmt: skip
FIG4 = Reproduction(
    "twt-fig4",
    "TwT Fig 4: learned g with and without label smoothing",
    "Nguyen & Salazar 2019, Fig 4",
    "Without label smoothing g grows larger in the decoder's later layers.",
    {
        "check": Scale(SMALL_ABOUT, _smoothing(SMALL, "demo"), _LEARNED),
        "here": Scale(f"prenorm, ScaleNorm, FixNorm, 2,500 updates of 4,096 padded tokens, {TWO_CORES}",
                      _smoothing({**TINY, **RECIPE}, "multi30k-bpe"), _LEARNED),
        "paper": Scale("en→vi, ScaleNorm and FixNorm", _smoothing(_of_pair("en→vi"), "en→vi"), _LEARNED,
                       checkpoint="best"),
    },
)  # fmt: skip

ENTRIES = (TABLE2, TABLE3, LONG, TABLE4, TABLE5, TABLE6, TABLE7, TABLE8, FIG1, FIG2, FIG3, FIG4)
