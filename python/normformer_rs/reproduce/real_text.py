"""Multi30k by the recipe of the number to beat, and the project's own runs on real text."""

from ..presets import PRESETS
from .declared import Options, Reproduction, Row, Scale, Shown
from .recipes import DECODED, RECIPE, SMALL, SMALL_ABOUT, TINY

_SCALENORM: Options = {"residual": "prenorm", "norm": "scalenorm", "fixnorm": True}
_BEST: Options = {
    **PRESETS["transformer-tiny"].options,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "max_tokens": 8192,
    "updates": 8000,
    "precision": "bf16",
    "keep": 10,
    "seed": 1,
}
_ABOUT = (
    "transformer-tiny, prenorm, FixNorm, bf16, seed 1; 8,000 updates of 8,192 padded tokens; mean of the last ten "
    "epochs' checkpoints, beam 5, length exponent 1; tokenised BLEU of test.2016"
)
_SHOWN = Shown(
    measures=("bleu", "validation"), columns=("bleu", "train_nll", "valid_nll"), picture="validation", value="bleu"
)
_NUMBER_TO_BEAT = {"transformer_tiny as reported": "41.02"}


def _multi30k(norms: tuple[str, ...], options: Options, corpus: str) -> tuple[Row, ...]:
    papers = [_NUMBER_TO_BEAT if norm == "scalenorm" else {} for norm in norms]
    return tuple(Row({"norm": norm}, {**options, **_SCALENORM, "norm": norm}, corpus, paper)
                 for norm, paper in zip(norms, papers))  # fmt: skip


def _both(about: str, norms: tuple[str, ...], shown: Shown) -> dict[str, Scale]:
    return {
        "check": Scale(SMALL_ABOUT, _multi30k(norms, SMALL, "demo"), shown),
        "here": Scale(about, _multi30k(norms, _BEST, "multi30k-bpe"), shown),
    }


_ALONE = _both(_ABOUT, ("scalenorm",), _SHOWN)
MULTI30K = Reproduction(
    "multi30k",
    "Multi30k, the recipe of the number to beat",
    "transformer_tiny of Wu et al. 2021 (github LividWo/Revisit-MMT)",
    "fairseq's transformer_tiny (postnorm, LayerNorm) reaches 41.02 BLEU by this recipe.",
    {**_ALONE, "paper": _ALONE["here"]},  # its budget suits two cores
)
LAYERNORM = Reproduction(
    "multi30k-layernorm",
    "LayerNorm beside ScaleNorm over 8,000 updates",
    "ours, after Nguyen & Salazar 2019, Table 3",
    "Is ScaleNorm's loss against LayerNorm within 2,500 updates (twt-table3) gone in runs that have converged?",
    _both(_ABOUT, ("layernorm", "scalenorm"),
          _SHOWN._replace(columns=("bleu", "p", "train_nll", "valid_nll"), compared="before")),
)  # fmt: skip


def _french(options: Options, corpus: str) -> tuple[Row, ...]:
    return (Row({"pair": "en-fr"}, {**options, **_SCALENORM}, corpus),)


FRENCH = Reproduction(
    "multi30k-french",
    "Multi30k from raw text, en→fr",
    "ours",
    "Does raw text train, with merges learned on the spot?",
    {
        "check": Scale(SMALL_ABOUT, _french(SMALL, "demo"), _SHOWN),
        "here": Scale(
            f"6,000 merges learned, 2,500 updates of 4,096 padded tokens, transformer-tiny, bf16; {DECODED}; "
            "detokenised sacreBLEU of test_2016_flickr",
            _french({**TINY, **RECIPE}, "multi30k-french"),
            _SHOWN,
        ),
    },
)

_PERPLEXITY = Shown(
    ("perplexity", "validation"), ("perplexity", "unigram", "ratio"), picture="validation", value="perplexity"
)


def _language_model(options: Options, corpus: str, name: str) -> tuple[Row, ...]:
    of_both = {"architecture": "decoder-only", "norm": "scalenorm", "fixnorm": True, "label_smoothing": 0.0}
    return (Row({"text": name}, {**options, **of_both}, corpus),)


SHAKESPEARE = Reproduction(
    "shakespeare",
    "A language model of tinyshakespeare",
    "ours",
    "Is its validation perplexity below 0.4 of the unigram model's?",
    {
        "check": Scale(SMALL_ABOUT, _language_model(SMALL, "demo-words", "number words"), _PERPLEXITY),
        "here": Scale(
            "decoder-only, 4 layers, d 128, ScaleNorm, FixNorm, bf16, 4,000 merges, 1,500 updates of 4,096 padded "
            "tokens, lr 3e-3; the last tenth of the text is held out",
            _language_model(
                {**TINY, **RECIPE, "updates": 1500, "warmup": 500, "lr": 3e-3}, "shakespeare", "tinyshakespeare"
            ),
            _PERPLEXITY,
        ),
    },
)

_LOSS = Shown(
    ("loss", "validation"), ("valid_loss", "train_nll", "valid_nll"), picture="validation", value="valid_loss"
)


def _precisions(options: Options, corpus: str) -> tuple[Row, ...]:
    return tuple(Row({"precision": precision}, {**options, **_SCALENORM, "precision": precision}, corpus)
                 for precision in ("f32", "bf16"))  # fmt: skip


BF16 = Reproduction(
    "bf16",
    "bf16 against f32",
    "ours",
    "Is the validation loss in bf16 within 1% of f32's?",
    {
        "check": Scale(SMALL_ABOUT, _precisions(SMALL, "demo"), _LOSS),
        "here": Scale(
            "transformer-tiny, prenorm, ScaleNorm, FixNorm, 1,000 updates of 4,096 padded tokens, seed 1",
            _precisions({**TINY, **RECIPE, "updates": 1000}, "multi30k-bpe"),
            _LOSS,
        ),
    },
)


def _moments(options: Options, corpus: str) -> tuple[Row, ...]:
    return tuple(Row({"moments": moments}, {**options, **_SCALENORM, "beta2": 0.999, "moments": moments}, corpus)
                 for moments in ("f32", "bf16"))  # fmt: skip


_LOSSES = Shown(("loss",), ("valid_loss", "train_nll", "valid_nll"), picture="dots", value="valid_loss")

MOMENTS = Reproduction(
    "bf16-moments",
    "Adam's moments in bf16 against f32",
    "ours",
    "Is the validation loss with moments in bf16 within 1% of the loss with moments in f32?",
    {
        "check": Scale(f"{SMALL_ABOUT}, β₂ = 0.999", _moments(SMALL, "demo"), _LOSSES),
        "here": Scale(
            "transformer-tiny, prenorm, ScaleNorm, FixNorm, f32, β₂ = 0.999, warm-up of 50, 150 updates of 4,096 "
            "padded tokens",
            _moments({**TINY, **RECIPE, "precision": "f32", "updates": 150, "warmup": 50}, "multi30k-bpe"),
            _LOSSES,
            seeds=3,
        ),
    },
)

ENTRIES = (MULTI30K, LAYERNORM, FRENCH, SHAKESPEARE, BF16, MOMENTS)
