"""Liu et al. 2023, BranchNorm (BrN): Tables 1 to 3, Figs 1 and 3 to 9, and deep stacks with warm-up."""

import itertools
from collections.abc import Iterable

from ..config import tables
from ..presets import PRESETS
from .declared import Options, Reproduction, Row, Scale, Shown
from .recipes import CONSTANT, DECODED, RECIPE, SMALL, SMALL_ABOUT, TINY, layers

_DEPTHS = (6, 18, 50, 100, 250)
_DIVERGED = ("diverged",)
_BLEU_OF: dict[str, tuple[str, ...]] = {
    "prenorm": ("27.0", "28.1", "28.0", "27.4", "27.5"),
    "postnorm": ("28.1", *_DIVERGED * 4),
    "deepnorm": ("28.6", "29.1", "29.7", "29.3", "29.0"),
    "branchnorm": ("29.3", "30.3", "30.7*", "29.8", "29.6"),
    "rezero": ("26.9", *_DIVERGED * 4),
    "r-fixup": ("27.5", "28.4", "27.7", *_DIVERGED * 2),
    "t-fixup": ("27.5", "28.4", "27.9", *_DIVERGED * 2),
    "admin": ("27.9", "28.8", *_DIVERGED * 3),
    "dlcl": ("27.4", "28.2", "diverged", "27.5", "27.7"),
    "normformer": ("27.0", "28.3", "27.8", *_DIVERGED * 2),
    "subln": ("27.5", "28.3", "28.7", "27.7", "27.9"),
    "ds-init": ("27.9", *_DIVERGED * 4),
}
"""BLEU of WMT17 en→de by layers; DeepNorm and Sub-LN as the authors ran them. *: better than DeepNorm, p < 0.03."""
_PAPER = {depth: {name: row[i] for name, row in _BLEU_OF.items()} for i, depth in enumerate(_DEPTHS)}
_ALL = tuple(entry["name"] for entry in tables()["residuals"])
_DEEP = (
    "prenorm",
    "postnorm",
    "deepnorm",
    "branchnorm",
    "subln",
    "admin",
    *(name for name in _BLEU_OF if name not in ("prenorm", "postnorm", "deepnorm", "branchnorm", "subln", "admin")),
)
_FIRST = ("postnorm", "deepnorm", "branchnorm")
_RATES = (5e-4, 2e-3)
_CELL = "{verdict}; {train_nll:.2f} / {valid_nll:.2f}; {largest_grad_norm:.1f}"
_VERDICTS = Shown(measures=("gradients",), across="lr", cell=_CELL, picture="gradients")
_BLEU = Shown(
    measures=("bleu", "gradients"), columns=("bleu", "p", "verdict"), compared="deepnorm", picture="dots", value="bleu"
)
_NARROW: Options = {**TINY, **RECIPE, "d_model": 64, "d_ff": 128, "dropout": 0.1, "max_tokens": 2048, "keep": 1}
_ABOUT = (
    "updates of 2,048 padded tokens, seed 1, each scheme with its own initialisation; verdict; training NLL of the "
    "last 50 updates / validation NLL, in nats; the largest gradient norm"
)
_BEAM: Options = {"beam": 4, "rule": "fairseq", "alpha": 0.6}


_OWN_STARTS = ("r-fixup", "t-fixup", "subln")
"""Schemes that are their start; all others begin with DeepNorm's, as the paper says of all its experiments."""


def _scheme(residual: str, steps: int) -> Options:
    """DS-Init is postnorm from a start of its own."""
    if residual == "ds-init":
        return {"residual": "postnorm", "init": "ds-init"}
    name, _, init = residual.partition(", from ")
    own: Options = {"init": init} if init else {}
    return {"residual": name, **own, **({"branchnorm_steps": steps} if name == "branchnorm" else {})}


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
    start: Options = {} if residual in _OWN_STARTS else {"init": "deepnorm"}
    options = {**PRESETS["brn"].options, **layers(number), **start, **_scheme(residual, 4000), **more}
    return Row(
        {"residual": residual, "lr": str(options["lr"])},
        options,
        "wmt17",
        {"BrN": _PAPER[number].get(residual, "") if number in _PAPER else ""},
        _BEAM,
    )


_EQUAL = ("prenorm, from deepnorm", "postnorm, from deepnorm")
"""From the start of the paper's experiments, beside each scheme's own."""


def _table1(number: int, updates: int, residuals: tuple[str, ...]) -> Reproduction:
    small = {**SMALL, **layers(max(2, number // 9 if number < 100 else number // 25)), **CONSTANT, "keep": 1}
    # T = 4000 would outlast these runs: α reaches 1 after a fifth of them.
    here = _rows(residuals, _without_warmup(number, updates), updates // 5, "multi30k-bpe", number)
    few = small["encoder_layers"]
    scales = {
        "check": Scale(
            f"{SMALL_ABOUT}, {few}+{few} layers, no warm-up", _rows(residuals, small, 2, "demo", number), _VERDICTS
        ),
        "here": Scale(f"d 64, d_ff 128, constant rate without warm-up, bf16, {updates} {_ABOUT}", here, _VERDICTS),
        "paper": Scale(
            "d 512, 100,000 updates of 128 batches of 4,096 tokens (the authors: 32 A100), lr 5e-4 after 4,000 updates "
            "of warm-up, T = 4,000, DeepNorm's start but for schemes that are a start; BLEU at beam 4, p against "
            "DeepNorm by paired bootstrap. The paper stops early without saying when; this does not",
            tuple(_authors(residual, number) for residual in _BLEU_OF),
            _BLEU,
            checkpoint="best",
        ),
    }
    if not updates:
        del scales["here"]
    return Reproduction(
        f"brn-table1-{number}",
        f"{number}+{number} layers",
        f"Liu et al. 2023, Table 1, column {number}L-{number}L" + (", and Fig 3" if number in (18, 50) else ""),
        "Postnorm diverges in deep stacks; BranchNorm trains and ends above DeepNorm and every pre-norm scheme."
        if number > 6
        else "With 6 layers all schemes train; BranchNorm is best.",
        scales,
    )


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

# Table 2: WMT'14 en→fr.

_FRENCH_DEPTHS = (6, 18, 50, 100, 250, 500)
_FRENCH: dict[str, tuple[str, ...]] = {
    "postnorm": ("41.48", "43.27", *_DIVERGED * 4),
    "prenorm": ("40.96", "42.48", "42.70", "43.12", "43.25", "43.18"),
    "dlcl": ("41.33", "42.81", "43.05", *_DIVERGED * 3),
    "subln": ("41.12", "42.68", "43.28", "43.31", "43.42", "43.21"),
    "deepnorm": ("41.47", "42.92", "43.79", "43.93", "43.87", "43.67"),
    "branchnorm": ("41.67", "43.53", "43.89", "44.20", "44.30*", "44.27"),
}
"""BLEU by layers. The paper's row MixNorm has no definition there."""
_BY_DEPTH = Shown(
    measures=("bleu",), across="layers", cell="{bleu:.2f}; {verdict}", compared="deepnorm", significance=0.03,
    picture="by_key", value="bleu",
)  # fmt: skip
_MEDIUM: Options = {"dropout": 0.2}
"""Table 4: dropout of WMT14 en→fr; OPUS-100 and MultiUN have 0.1, WMT17 0.4."""


def _depths(
    schemes: Iterable[str], depths: tuple[int, ...], options: Options, steps: int, corpus: str
) -> tuple[Row, ...]:
    return tuple(
        Row({"residual": scheme, "layers": str(number)}, {**options, **layers(number), **_scheme(scheme, steps)},
            corpus)
        for scheme in schemes for number in depths
    )  # fmt: skip


def _french(residual: str, number: int, bleu: str, **more: object) -> Row:
    row = _authors(residual, number, **{**_MEDIUM, **more})
    return Row({"residual": residual, "layers": str(number)}, row.options, "wmt14-fr", {f"BrN, {number}": bleu}, _BEAM)


_SHALLOW: Options = {**_NARROW, "updates": 600, "evaluate_every": 600}
TABLE2 = Reproduction(
    "brn-table2",
    "BrN Table 2: WMT'14 en→fr by depth",
    "Liu et al. 2023, Table 2",
    "BranchNorm is best from 18 layers on, and gains up to 250.",
    {
        "check": Scale(f"{SMALL_ABOUT}, 2+2 and 3+3 layers",
                       _depths(_FRENCH, (2, 3), {**SMALL, "keep": 1}, 2, "demo"), _BY_DEPTH),
        "here": Scale(
            "Multi30k en→de, d 64, d_ff 128, lr 5e-3 after 2,000 updates of warm-up, bf16, 600 updates of 2,048 padded "
            f"tokens, T = 120, each scheme with its own initialisation; {DECODED}",
            _depths(_FRENCH, (6, 18), _SHALLOW, 120, "multi30k-bpe"), _BY_DEPTH,
        ),
        "paper": Scale(
            "d 512, dropout 0.2, 100,000 updates of 128 batches of 4,096 tokens, lr 5e-4 after 4,000 updates of "
            "warm-up, T = 4,000, DeepNorm's start; BLEU at beam 4, p against DeepNorm by paired bootstrap",
            tuple(_french(scheme, number, bleu) for scheme, row in _FRENCH.items()
                  for number, bleu in zip(_FRENCH_DEPTHS, row)),
            _BY_DEPTH,
            checkpoint="best",
        ),
    },
)  # fmt: skip

# Table 3: many languages.

_MANY: dict[tuple[str, int], tuple[str, ...]] = {
    ("prenorm", 100): ("34.6", "26.4", "30.5", "49.1", "56.3", "52.7"),
    ("prenorm", 500): ("34.0", "28.0", "31.0", "50.1", "56.7", "53.4"),
    ("deepnorm", 100): ("33.9", "28.2", "31.1", "49.2", "56.9", "53.1"),
    ("deepnorm", 500): ("34.8", "29.4", "32.1", "50.3", "57.2", "53.8"),
    ("branchnorm", 100): ("34.2", "28.5", "31.4*", "49.7", "57.2", "53.4*"),
    ("branchnorm", 500): ("35.0", "29.6", "32.3*", "50.8", "57.6", "54.2*"),
}
"""BLEU of OPUS-100 and of MultiUN, X→En, En→X and the mean, by scheme and layers of each stack. *: p < 0.05."""
_LANGUAGES = Shown(
    measures=("bleu",),
    across="text",
    cell="{bleu:.1f}; {verdict}",
    compared="deepnorm",
    significance=0.05,
    mean=True,
    picture="dots",
    value="bleu",
)


def _many(options: Options, corpora: dict[str, tuple[str, int]], depth: int | None = None) -> tuple[Row, ...]:
    """`corpora`: by the text's name its corpus, and where the paper's figure of it stands; `depth`: other layers."""
    return tuple(
        Row({"residual": scheme, "layers": str(number), "text": text},
            {**options, **layers(number if depth is None else depth * number // 100), "init": "deepnorm",
             **_scheme(scheme, 2 if depth else 4000)},
            corpus, {f"BrN, {text}": row[at]}, _BEAM if depth is None else {"beam": 5, "rule": "fairseq"})
        for (scheme, number), row in _MANY.items() for text, (corpus, at) in corpora.items()
    )  # fmt: skip


TABLE3 = Reproduction(
    "brn-table3",
    "BrN Table 3: many languages",
    "Liu et al. 2023, Table 3",
    "With 100 and 500 layers a stack BranchNorm is above DeepNorm and prenorm in the mean over languages.",
    {
        "check": Scale(f"{SMALL_ABOUT}, 1+1 and 5+5 layers", _many({**SMALL, "keep": 1}, {"demo": ("demo", 2)}, 1),
                       _LANGUAGES),
        "paper": Scale(
            "OPUS-100 (a tag of the target language before each source sentence) and MultiUN, dropout 0.1, 128 batches "
            "of 4,096 tokens, 100,000 updates; BLEU of all test sets of a direction as one",
            _many({**PRESETS["brn"].options, "dropout": 0.1},
                  {"OPUS-100 X→En": ("opus100-to-en", 0), "OPUS-100 En→X": ("opus100-from-en", 1),
                   "MultiUN X→En": ("multiun-to-en", 3), "MultiUN En→X": ("multiun-from-en", 4)}),
            _LANGUAGES,
            checkpoint="best",
        ),
    },
)  # fmt: skip

# The figures.

_CURVES = Shown(measures=("bleu_curve",), columns=("best_bleu", "valid_nll"), picture="curves", value="best_bleu")
_PAIR = ("deepnorm", "branchnorm")


def _two(options: Options, number: int, steps: int, corpus: str) -> tuple[Row, ...]:
    return tuple(Row({"residual": scheme}, {**options, **layers(number), **_scheme(scheme, steps)}, corpus)
                 for scheme in _PAIR)  # fmt: skip


FIG1 = Reproduction(
    "brn-fig1",
    "BrN Fig 1: what DeepNorm costs a shallow model",
    "Liu et al. 2023, Fig 1",
    "With 18 layers vanilla postnorm ends above DeepNorm; BranchNorm closes the gap.",
    {
        "check": Scale(SMALL_ABOUT, _depths(("postnorm", *_PAIR), (2,), {**SMALL, "keep": 1}, 2, "demo"),
                       _BY_DEPTH._replace(compared="first")),
        "here": Scale(
            f"runs of brn-table2: Multi30k en→de, 6+6 and 18+18 layers, d 64, 600 updates; {DECODED}",
            _depths(("postnorm", *_PAIR), (6, 18), _SHALLOW, 120, "multi30k-bpe"), _BY_DEPTH._replace(compared="first"),
        ),
        "paper": Scale("runs of brn-table2: WMT14 en→fr",
                       tuple(_french(scheme, number, _FRENCH[scheme][i]) for scheme in ("postnorm", *_PAIR)
                             for i, number in enumerate(_FRENCH_DEPTHS[:2])),
                       _BY_DEPTH._replace(compared="first"), checkpoint="best"),
    },
)  # fmt: skip
FIG4 = Reproduction(
    "brn-fig4",
    "BrN Fig 4: BLEU over training",
    "Liu et al. 2023, Fig 4",
    "With 50 layers BranchNorm learns faster than DeepNorm and ends higher.",
    {
        "check": Scale(f"{SMALL_ABOUT}, 5+5 layers", _two({**SMALL, "keep": 1}, 5, 2, "demo"), _CURVES),
        "here": Scale(
            "Multi30k, 50+50 layers, d 64, d_ff 128, lr 2e-3 after 24 updates of warm-up, T = 24, 600 updates of 2,048 "
            "padded tokens, evaluated every 50",
            _two({**_NARROW, "updates": 600, "warmup": 24, "evaluate_every": 50, "lr": 2e-3}, 50, 24, "multi30k-bpe"),
            _CURVES,
        ),
        "paper": Scale("WMT17 en→de, 50+50 layers as in Table 1",
                       tuple(_authors(scheme, 50)._replace(key={"residual": scheme}, paper={}) for scheme in _PAIR),
                       _CURVES),
    },
)  # fmt: skip
FIG5 = Reproduction(
    "brn-fig5",
    "BrN Fig 5: BLEU by depth and text",
    "Liu et al. 2023, Fig 5",
    "On little text BLEU falls with many layers, on more it keeps growing.",
    {
        "check": Scale(f"{SMALL_ABOUT}, 2+2 and 3+3 layers",
                       _depths(_PAIR, (2, 3), {**SMALL, "keep": 1}, 2, "demo"), _BY_DEPTH),
        "here": Scale(f"runs of brn-table2: Multi30k, 6+6 and 18+18 layers, d 64, 600 updates; {DECODED}",
                      _depths(_PAIR, (6, 18), _SHALLOW, 120, "multi30k-bpe"), _BY_DEPTH),
        "paper": Scale(
            "WMT17 en→de and WMT14 en→fr as in Tables 1 and 2, up to 250+250 layers; IWSLT14 de→en, whose figures the "
            "paper's picture has without numbers",
            tuple(Row({"residual": scheme, "text": text, "layers": str(number)},
                      _authors(scheme, number, dropout=dropout).options, corpus, {}, _BEAM)
                  for text, corpus, dropout in (("IWSLT14", "iwslt14", 0.4), ("WMT17", "wmt17", 0.4),
                                                ("WMT14 en→fr", "wmt14-fr", 0.2))
                  for scheme in _PAIR for number in _DEPTHS),
            _BY_DEPTH._replace(compared=""), checkpoint="best",
        ),
    },
)  # fmt: skip


def _rates_and_warmups(
    options: Options, number: int, steps: int, corpus: str, warmups: tuple[int, ...], rates: tuple[float, ...]
) -> tuple[Row, ...]:
    return tuple(
        Row({"residual": scheme, "warmup": str(warmup), "lr": str(lr)},
            {**options, **layers(number), **_scheme(scheme, steps), "warmup": warmup, "lr": lr,
             **({"schedule": "constant"} if warmup == 0 else {})},
            corpus)
        for scheme in _PAIR for warmup in warmups for lr in rates
    )  # fmt: skip


_BY_RATE = Shown(across="lr", cell=_CELL, picture="dots", value="valid_nll")
FIG6 = Reproduction(
    "brn-fig6",
    "BrN Fig 6: warm-up and rate",
    "Liu et al. 2023, Fig 6",
    "BranchNorm trains 100 layers without warm-up, and bears higher rates than DeepNorm.",
    {
        "check": Scale(f"{SMALL_ABOUT}, 4+4 layers",
                       _rates_and_warmups({**SMALL, "keep": 1}, 4, 2, "demo", (0, 4), (5e-3,)), _BY_RATE),
        "here": Scale(
            "Multi30k, 50+50 layers, d 64, d_ff 128, bf16, 300 updates of 2,048 padded tokens, T = 60; verdict; "
            "training NLL of the last 50 updates / validation NLL; the largest gradient norm",
            _rates_and_warmups({**_NARROW, "updates": 300, "evaluate_every": 300}, 50, 60, "multi30k-bpe", (0, 24),
                               (5e-4, 2e-3)),
            _BY_RATE,
        ),
        "paper": Scale(
            "WMT14 en→fr, 100+100 layers; the paper's picture names no rates: 5e-4, 1e-3 and 2e-3, without warm-up and "
            "with 4,000 updates of it",
            _rates_and_warmups({**PRESETS["brn"].options, **_MEDIUM, "init": "deepnorm"}, 100, 4000, "wmt14-fr",
                               (0, 4000), (5e-4, 1e-3, 2e-3)),
            _BY_RATE, checkpoint="best",
        ),
    },
)  # fmt: skip
_GROWTHS = {"linear": "44.20", "exp": "44.15", "sigmoid": "44.21"}
"""BLEU of 100+100 layers on WMT14 en→fr (§5.1)."""


def _growths(options: Options, number: int, steps: int, corpus: str) -> tuple[Row, ...]:
    grown = {**options, **layers(number), **_scheme("branchnorm", steps)}
    return tuple(Row({"growth": growth}, {**grown, "branchnorm_growth": growth}, corpus,
                     {"BrN, WMT14 en→fr": bleu}, _BEAM if number == 100 else {"beam": 5, "rule": "fairseq"})
                 for growth, bleu in _GROWTHS.items())  # fmt: skip


_GROWN = Shown(
    measures=("bleu", "growth_curve"), columns=("bleu", "verdict"), compared="first", picture="growth", value="bleu"
)
FIG7 = Reproduction(
    "brn-fig7",
    "BrN Fig 7: how α grows",
    "Liu et al. 2023, Fig 7 and §5.1",
    "Linear, exponential and sigmoid growth end within 0.06 BLEU of each other.",
    {
        "check": Scale(f"{SMALL_ABOUT}, 3+3 layers, T = 4", _growths({**SMALL, "keep": 1}, 3, 4, "demo"), _GROWN),
        "here": Scale(
            f"Multi30k, 18+18 layers, d 64, d_ff 128, 600 updates of 2,048 padded tokens, T = 120; {DECODED}",
            _growths(_SHALLOW, 18, 120, "multi30k-bpe"), _GROWN,
        ),
        "paper": Scale("WMT14 en→fr, 100+100 layers, T = 4,000",
                       _growths({**PRESETS["brn"].options, **_MEDIUM, "init": "deepnorm"}, 100, 4000, "wmt14-fr"),
                       _GROWN, checkpoint="best"),
    },
)  # fmt: skip
_LAYERS = Shown(measures=("layers",), columns=("cosine", "active"), picture="layers", value="cosine")


def _redundancy(name: str, figure: str, claim: str) -> Reproduction:
    return Reproduction(
        name, f"BrN {figure}", f"Liu et al. 2023, {figure}", claim,
        {
            "check": Scale(f"{SMALL_ABOUT}, 4+4 layers", _two({**SMALL, "keep": 1}, 4, 2, "demo"), _LAYERS),
            "here": Scale(
                "Multi30k, 18+18 layers, d 64, d_ff 128, 600 updates of 2,048 padded tokens, T = 120; the last "
                "checkpoint reads held-out text: cosines of each layer's output and the one before, and the share of "
                "active units of each feed-forward",
                _two(_SHALLOW, 18, 120, "multi30k-bpe"), _LAYERS,
            ),
            "paper": Scale("WMT14 en→fr, 100+100 layers as in Table 2",
                           tuple(_french(scheme, 100, "")._replace(key={"residual": scheme}, paper={})
                                 for scheme in _PAIR), _LAYERS, checkpoint="best"),
        },
    )  # fmt: skip


FIG8 = _redundancy("brn-fig8", "Fig 8: cosines of neighbouring layers",
                   "DeepNorm's layers resemble the ones before them more than BranchNorm's.")  # fmt: skip
FIG9 = _redundancy("brn-fig9", "Fig 9: active units", "BranchNorm's feed-forwards are sparser than DeepNorm's.")

ENTRIES = (
    _table1(6, 600, tuple(_BLEU_OF)),
    _table1(18, 600, (*_ALL, "ds-init", *_EQUAL)),
    _table1(50, 300, (*_DEEP, *_EQUAL)),
    _table1(100, 0, tuple(_BLEU_OF)),
    _table1(250, 0, tuple(_BLEU_OF)),
    FIG3,
    WARMUP,
    TABLE2,
    TABLE3,
    FIG1,
    FIG4,
    FIG5,
    FIG6,
    FIG7,
    FIG8,
    FIG9,
)
