"""Shen et al. 2020, PowerNorm (PN): Tables 1 and 2, Figs 2 to 6, and PowerNorm beyond its warm-up."""

from ..presets import PRESETS
from .declared import Options, Reproduction, Row, Scale, Shown
from .recipes import DECODED, RECIPE, SMALL, SMALL_ABOUT, TINY, TWO_CORES

_PAPER = {
    "layernorm": ("35.5", "29.5"),
    "batchnorm": ("34.4", "28.1"),
    "powernorm-v": ("35.5", "28.5"),
    "powernorm": ("35.9", "30.1"),
}
"""BLEU of IWSLT14 and WMT14."""
_SHOWN = Shown(
    measures=("bleu",),
    columns=("bleu", "p", "train_nll", "valid_nll"),
    compared="first",
    picture="dots",
    value="bleu",
)


def _encoder_norm(norm: str, warmup: int) -> Options:
    """The encoder's norms; the decoder keeps LayerNorm, which knows nothing of padding and future."""
    of_its_own = {"powernorm_warmup": warmup} if norm == "powernorm" else {}
    # The model of the ladder's second row, where nothing is exchanged.
    exchanged = {"norm": "layernorm"} if norm == "layernorm" else {"encoder_norm": norm}
    return {"residual": "prenorm", **exchanged, **of_its_own}


_STARTS = {"ds-init": ("34.4", "29.1"), "r-fixup": ("34.5", "29.3")}
"""BLEU of the paper's rows that differ in their start: DS-Init, and Fixup."""


def _start(name: str) -> Options:
    """Postnorm from DS-Init's start; Fixup has no norms."""
    return {"residual": "postnorm", "norm": "layernorm", "init": "ds-init"} if name == "ds-init" else {"residual": name}


def _rows(norms: tuple[str, ...], options: Options, warmup: int, corpus: str) -> tuple[Row, ...]:
    papers = {norm: {"PN, IWSLT14": _PAPER[norm][0]} if norm in _PAPER else {} for norm in norms}
    return tuple(Row({"encoder_norm": norm}, {**options, **_encoder_norm(norm, warmup)}, corpus, papers[norm])
                 for norm in norms)  # fmt: skip


_NORMS = (*_PAPER, "scalenorm", "rmsnorm")
TABLE1 = Reproduction(
    "pn-table1",
    "The encoder's norms exchanged, as in PN Table 1",
    "Shen et al. 2020, Table 1",
    "BatchNorm in the encoder loses 1.1 BLEU against LayerNorm, PN-V nothing, and PowerNorm gains 0.4 (IWSLT14).",
    {
        "check": Scale(SMALL_ABOUT, _rows(_NORMS, SMALL, SMALL["warmup"], "demo"), _SHOWN),
        "here": Scale(
            f"prenorm, the decoder keeps LayerNorm; 2,500 updates of 4,096 padded tokens, {TWO_CORES}, lr 5e-3 after "
            f"2,000 updates of warm-up, which are PowerNorm's warm-up, too; {DECODED}; NLL in nats",
            _rows(_NORMS, {**TINY, **RECIPE}, RECIPE["warmup"], "multi30k-bpe"),
            _SHOWN,
        ),
        "paper": Scale(
            "IWSLT14 de→en (d 512, 6+6 layers, 4,096 tokens) and WMT14 en→de (transformer-big, 32 batches of 4,096 "
            "tokens an update), warm-up of 8,000 updates, which are PowerNorm's, too; norms with statistics have group "
            "scaling before them, as in the release, but for one row; mean of the last ten checkpoints. The authors' "
            "32 devices had statistics of their own; here an update's last batch moves them",
            tuple(
                Row({"encoder_norm": norm, "text": text},
                    {**PRESETS[preset].options, **own}, corpus,
                    {f"PN, {t}": b for t, b in zip(("IWSLT14", "WMT14"), bleu)}, search)
                for text, preset, corpus, search in (
                    ("IWSLT14", "pn-iwslt", "iwslt14", {"beam": 5, "rule": "fairseq", "alpha": 1.0}),
                    ("WMT14", "pn-wmt", "wmt14", {"beam": 4, "rule": "fairseq", "alpha": 0.6}))
                for norm, own, bleu in (
                    *((norm, _encoder_norm(norm, 8000), bleu) for norm, bleu in _PAPER.items()),
                    ("batchnorm, no group scaling", {**_encoder_norm("batchnorm", 8000), "groupscaling": 0}, ("", "")),
                    *((name, _start(name), bleu) for name, bleu in _STARTS.items()))
            ),
            _SHOWN._replace(columns=(), across="text", cell="{bleu:.2f}"),
        ),
    },
)  # fmt: skip

_LONG = _SHOWN._replace(measures=("bleu", "validation"), picture="validation")
_BEYOND: Options = {**TINY, **RECIPE, "warmup": 250}
BEYOND = Reproduction(
    "powernorm-beyond",
    "PowerNorm beyond its warm-up",
    "ours, after Shen et al. 2020, Table 1",
    "Does PowerNorm keep up with LayerNorm where it divides by running statistics for nine tenths of the run?",
    {
        "check": Scale(f"{SMALL_ABOUT}, warm-up of one update",
                       _rows(tuple(_PAPER), {**SMALL, "warmup": 1}, 1, "demo"), _LONG),
        "here": Scale(
            f"prenorm, the decoder keeps LayerNorm; 2,500 updates of 4,096 padded tokens, {TWO_CORES}, lr 5e-3 after "
            "250 updates of warm-up, which are PowerNorm's warm-up, too (the paper: 8,000 of 100,000); "
            f"{DECODED}; NLL in nats",
            _rows(tuple(_PAPER), _BEYOND, _BEYOND["warmup"], "multi30k-bpe"),
            _LONG,
        ),
    },
)  # fmt: skip

# Table 2: language models.

_PERPLEXITY = {
    "layernorm": ("53.2", "20.9"),
    "batchnorm": ("60.7", "27.2"),
    "powernorm-v": ("55.3", "21.3"),
    "powernorm": ("47.6", "17.9"),
}
"""Test perplexity of PTB and WikiText-103."""
_MODELS = Shown(
    ("test_perplexity", "validation"), ("perplexity", "test_perplexity"), picture="validation", value="test_perplexity"
)
_TENSORIZED: Options = {
    "architecture": "decoder-only",
    "attention": "tensorized",
    "segment_length": 32,
    "label_smoothing": 0.0,
}


def _language_model(norm: str, warmup: int) -> Options:
    return {"norm": norm, **({"powernorm_warmup": warmup} if norm == "powernorm" else {})}


def _models(options: Options, warmup: int, corpus: str) -> tuple[Row, ...]:
    """Tensorized attention has no weights to drop."""
    own = {name: value for name, value in {**options, **_TENSORIZED}.items() if name != "attention_dropout"}
    return tuple(Row({"norm": norm}, {**own, **_language_model(norm, warmup)}, corpus) for norm in _PERPLEXITY)


TABLE2 = Reproduction(
    "pn-table2",
    "PN Table 2: language models",
    "Shen et al. 2020, Table 2",
    "With tensorized attention BatchNorm loses 7.5 points of perplexity against LayerNorm; PowerNorm gains 5.6 (PTB).",
    {
        "check": Scale(f"tensorized, {SMALL_ABOUT}", _models(SMALL, SMALL["warmup"], "demo-words"),
                       _MODELS._replace(measures=("perplexity", "validation"), columns=("perplexity",),
                                        value="perplexity")),
        "here": Scale(
            "tinyshakespeare, 3 layers, d 128, tensorized attention, bf16, 4,000 merges, 1,500 updates of 4,096 padded "
            "tokens, lr 1e-3 after 250 updates of warm-up, which are PowerNorm's, too; the last tenth is held out",
            _models({**TINY, **RECIPE, "decoder_layers": 3, "updates": 1500, "warmup": 250, "lr": 1e-3}, 250,
                    "shakespeare"),
            _MODELS._replace(measures=("perplexity", "validation"), columns=("perplexity", "unigram", "ratio"),
                             value="perplexity"),
        ),
        "paper": Scale(
            "PTB with 3 and WikiText-103 with 6 layers of tensorized attention, d 256, d_ff 2,100, 30 epochs; words as "
            "the corpora have them. The published code of this attention sees the future, so its figures are no "
            "reference for a causal model",
            tuple(
                Row({"norm": norm, "text": text},
                    {**PRESETS["pn-ptb"].options, **_TENSORIZED, "decoder_layers": number,
                     **_language_model(norm, 4000)}, corpus,
                    {f"PN, {t}": p for t, p in zip(("PTB", "WikiText-103"), figures)})
                for text, number, corpus in (("PTB", 3, "ptb"), ("WikiText-103", 6, "wikitext103"))
                for norm, figures in _PERPLEXITY.items()
            ),
            _MODELS._replace(columns=(), across="text", cell="{test_perplexity:.1f}"),
        ),
    },
)  # fmt: skip

# Figs 2 to 4: statistics of batches over training.

_STATISTICS = Shown(
    measures=("statistics",), columns=("distance", "gradient", "bleu_valid"), picture="statistics", value="distance"
)


def _watched(norms: tuple[str, ...], options: Options, every: int, warmup: int, corpus: str) -> tuple[Row, ...]:
    return tuple(
        Row({"encoder_norm": norm}, {**options, **_encoder_norm(norm, warmup), "log_statistics": every}, corpus)
        for norm in norms
    )


def _statistics(name: str, figure: str, claim: str, norms: tuple[str, ...]) -> Reproduction:
    return Reproduction(
        name,
        f"PN {figure}: statistics of batches over training",
        f"Shen et al. 2020, {figure}",
        claim,
        {
            "check": Scale(SMALL_ABOUT, _watched(norms, SMALL, 1, SMALL["warmup"], "demo"), _STATISTICS),
            "here": Scale(
                f"the encoder's norms exchanged, 2,500 updates of 4,096 padded tokens, {TWO_CORES}; of the first norm, "
                "every 25 updates: how far the batch's statistics are from the running ones, and what they add to the "
                "gradient of its input",
                _watched(norms, {**TINY, **RECIPE}, 25, RECIPE["warmup"], "multi30k-bpe"),
                _STATISTICS,
            ),
            "paper": Scale(
                "IWSLT14 de→en as in Table 1, without group scaling; the paper's ResNet20 on CIFAR-10 is not made here",
                tuple(Row(row.key, {**row.options, "groupscaling": 0}, row.corpus)
                      for row in _watched(norms, PRESETS["pn-iwslt"].options, 100, 8000, "iwslt14")),
                _STATISTICS,
            ),
        },
    )  # fmt: skip


FIG2 = _statistics(
    "pn-fig2", "Fig 2", "BatchNorm's mean and variance of a batch stay far from the running ones.", ("batchnorm",)
)
FIG3 = _statistics(
    "pn-fig3", "Fig 3", "What they add to gradients is large, and varies from batch to batch.", ("batchnorm",)
)
FIG4 = _statistics(
    "pn-fig4",
    "Fig 4",
    "The quadratic mean of PN-V varies orders of magnitude less than BatchNorm's variance.",
    ("batchnorm", "powernorm-v"),
)

# Fig 5: batches that statistics are of.

_BATCHES = (512, 1024, 2048, 4096)


def _batches(options: Options, sizes: tuple[int, ...], warmup: int, corpus: str) -> tuple[Row, ...]:
    """As many tokens an update, in more and more micro-batches."""
    return tuple(
        Row(
            {"encoder_norm": norm, "batch": str(size)},
            {**options, **_encoder_norm(norm, warmup), "max_tokens": size, "accumulate": sizes[-1] // size},
            corpus,
        )
        for norm in _PAPER
        for size in sizes
    )


_BY_BATCH = Shown(measures=("bleu",), across="batch", cell="{bleu:.2f}", picture="by_key", value="bleu")
FIG5 = Reproduction(
    "pn-fig5",
    "PN Fig 5: statistics of smaller batches",
    "Shen et al. 2020, Fig 5",
    "PowerNorm stays above LayerNorm whatever the batch; PN-V reaches it at 4,096 tokens; BatchNorm is worst.",
    {
        "check": Scale(f"{SMALL_ABOUT}, in 2 and 1 batches", _batches(SMALL, (500, 1000), SMALL["warmup"], "demo"),
                       _BY_BATCH),
        "here": Scale(
            "the encoder's norms exchanged, 2,500 updates of 4,096 padded tokens in 8, 4, 2 and 1 batches, "
            f"{TWO_CORES}; {DECODED}",
            _batches({**TINY, **RECIPE}, _BATCHES, RECIPE["warmup"], "multi30k-bpe"),
            _BY_BATCH,
        ),
        "paper": Scale(
            "IWSLT14 de→en, 4,096 tokens an update in 8, 4, 2 and 1 batches; PowerNorm's steps are updates",
            _batches(PRESETS["pn-iwslt"].options, _BATCHES, 8000, "iwslt14"),
            _BY_BATCH,
        ),
    },
)  # fmt: skip

# Fig 6: singular values.

_SINGULAR = Shown(measures=("singular",), columns=("half", "tenth"), picture="singular", value="half")
FIG6 = Reproduction(
    "pn-fig6",
    "PN Fig 6: singular values of the embedding",
    "Shen et al. 2020, Fig 6",
    "The singular values of the embedding fall more slowly with PowerNorm than with LayerNorm.",
    {
        "check": Scale(SMALL_ABOUT, _rows(("layernorm", "powernorm"), SMALL, SMALL["warmup"], "demo"), _SINGULAR),
        "here": Scale(f"the runs of pn-table1, 2,500 updates, {TWO_CORES}",
                      _rows(("layernorm", "powernorm"), {**TINY, **RECIPE}, RECIPE["warmup"], "multi30k-bpe"),
                      _SINGULAR),
        "paper": Scale(
            "WMT14 en→de as in Table 1",
            tuple(Row({"encoder_norm": norm}, {**PRESETS["pn-wmt"].options, **_encoder_norm(norm, 8000)}, "wmt14")
                  for norm in ("layernorm", "powernorm")),
            _SINGULAR,
        ),
    },
)  # fmt: skip

ENTRIES = (TABLE1, BEYOND, TABLE2, FIG2, FIG3, FIG4, FIG5, FIG6)
