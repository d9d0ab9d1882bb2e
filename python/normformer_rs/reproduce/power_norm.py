"""Shen et al. 2020, PowerNorm (PN): Table 1, and PowerNorm beyond its warm-up."""

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
            "tokens an update), warm-up of 8,000 updates; mean of the last ten checkpoints",
            tuple(
                Row({"encoder_norm": norm, "text": text},
                    {**PRESETS[preset].options, **_encoder_norm(norm, 8000)}, corpus,
                    {f"PN, {t}": b for t, b in zip(("IWSLT14", "WMT14"), bleu)}, search)
                for text, preset, corpus, search in (
                    ("IWSLT14", "pn-iwslt", "iwslt14", {"beam": 5, "rule": "fairseq", "alpha": 1.0}),
                    ("WMT14", "pn-wmt", "wmt14", {"beam": 4, "rule": "fairseq", "alpha": 0.6}))
                for norm, bleu in _PAPER.items()
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

ENTRIES = (TABLE1, BEYOND)
