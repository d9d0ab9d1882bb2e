"""The presets, which are named sizes of models with training settings, in common use or from papers.

A preset sets no residual scheme and no initialisation, because users compare these and choose each by its own option.
For the same reason only llama-tiny sets a norm.
"""

from typing import Any, NamedTuple

from ..config import TrainingConfig, TransformerConfig, split, unknown
from ..errors import InputError


class Preset(NamedTuple):
    """The options that a preset sets, for the model and its training, and their source. Other options keep their
    defaults."""

    source: str
    options: dict[str, Any]


def _layers(number: int) -> dict[str, int]:
    """Returns the options for an encoder and a decoder of this many layers each."""
    return {"encoder_layers": number, "decoder_layers": number}


_BASE = {"d_model": 512, "d_ff": 2048, "heads": 8, **_layers(6)}
"""The sizes of the base Transformer."""
_FAIRSEQ = {"positions": "fairseq", "decoder_start": "eos", "vocab_mask": False, "count_from_zero": True}
"""The conventions of models that were trained with fairseq."""
_TWT = {
    "word_dropout": 0.1,
    "smoothing": "twt",
    "beta2": 0.999,
    "adam_form": "torch",
    "clip_norm": 1.0,
    "warmup": 8000,
    "max_tokens": 4096,
    "criterion": "bleu",
    "evaluation_beam": 4,
}
"""The options that the presets twt and twt-gl-en share."""

PRESETS: dict[str, Preset] = {
    "transformer-tiny": Preset(
        "shape and rates of the Multi30k recipe, whose whole command is in docs/train.md",
        {
            "d_model": 128,
            "d_ff": 256,
            "heads": 4,
            **_layers(4),
            "dropout": 0.3,
            "lr": 5e-3,
            "warmup": 2000,
            "beta2": 0.98,
            "label_smoothing": 0.1,
            "keep": 10,
        },
    ),
    "transformer-small": Preset(
        "fairseq's transformer_iwslt_de_en", {"d_model": 512, "d_ff": 1024, "heads": 4, **_layers(6)}
    ),
    "transformer-base": Preset("Vaswani et al. 2017, Table 3", {**_BASE}),
    "twt": Preset(
        "Nguyen & Salazar 2019, App A and Table 1 (en→vi: BPE of 8,000 operations, 200 epochs of 1,500 updates; sk→en: "
        "600; en→he and ar→en: 2,000)",
        {**_BASE, **_TWT, "dropout": 0.3, "updates": 200 * 1500, "evaluate_every": 1500, "patience": 20},
    ),
    "twt-gl-en": Preset(
        "the same for gl→en: BPE of 3,000 operations, 1,000 epochs of 100 updates",
        {
            **_BASE,
            **_TWT,
            "heads": 4,
            **_layers(4),
            "dropout": 0.4,
            "updates": 1000 * 100,
            "evaluate_every": 100,
            "patience": 50,
        },
    ),
    "twt-wmt": Preset(
        "Nguyen & Salazar 2019, App C (WMT14 En-De)",
        {
            **_BASE,
            **_FAIRSEQ,
            "dropout": 0.1,
            "lr": 1e-3,
            "warmup": 4000,
            "warmup_init_lr": 1e-7,
            "beta2": 0.98,
            "clip_norm": 1.0,
            "max_tokens": 8192,
            "accumulate": 10,
            "updates": 0,
            "epochs": 40,
        },
    ),
    "pn-iwslt": Preset(
        "Shen et al. 2020, App A.1 (IWSLT14 De-En, BPE of 10,000 operations), rates and dropout of the release; theirs "
        "comes with `--encoder-norm powernorm --powernorm-warmup 8000`",
        {
            "d_model": 512,
            "d_ff": 1024,
            "heads": 4,
            **_layers(6),
            **_FAIRSEQ,
            "dropout": 0.3,
            "attention_dropout": 0.1,
            "activation_dropout": 0.1,
            "lr": 1.5e-3,
            "warmup": 8000,
            "warmup_init_lr": 1e-7,
            "beta2": 0.98,
            "weight_decay": 1e-4,
            "weight_decay_of": "all",
            "max_tokens": 4096,
            "updates": 100_000,
            "patience": 5,
            "keep": 10,
        },
    ),
    "pn-wmt": Preset(
        "the same for WMT14 En-De, 37,000 types; dropout of transformer_wmt_en_de_big_t2t, 32 GPUs' batch",
        {
            "d_model": 1024,
            "d_ff": 4096,
            "heads": 16,
            **_layers(6),
            **_FAIRSEQ,
            "dropout": 0.3,
            "attention_dropout": 0.1,
            "activation_dropout": 0.1,
            "lr": 3e-3,
            "warmup": 8000,
            "warmup_init_lr": 1e-7,
            "beta2": 0.98,
            "max_tokens": 4096,
            "accumulate": 32,
            "updates": 300_000,
            "patience": 10,
            "keep": 10,
        },
    ),
    "pn-ptb": Preset(
        "Shen et al. 2020, App A.2 (language modelling of PTB, 30 epochs), sizes and rate of Ma et al. 2019 (core-1); "
        "comes with `--segment-length 32`, and theirs with `--norm powernorm`",
        {
            "architecture": "decoder-only",
            "attention": "tensorized",
            "d_model": 256,
            "d_ff": 2100,
            "decoder_layers": 3,
            "vocab_mask": False,
            "dropout": 0.3,
            "lr": 2.5e-4,
            "warmup": 4000,
            "beta2": 0.98,
            "updates": 0,
            "epochs": 30,
        },
    ),
    "llama-tiny": Preset(
        "Touvron et al. 2023, §2.2; size and rates of llama2.c (15 million parameters with its 32,000 types), but two "
        "heads of queries for each of keys (Ainslie et al. 2023)",
        {
            "architecture": "decoder-only",
            "d_model": 288,
            "d_ff": 768,
            "heads": 6,
            "kv_heads": 3,
            "decoder_layers": 6,
            "norm": "rmsnorm",
            "positions": "rotary",
            "activation": "swiglu",
            "linear_biases": False,
            "scale_embeddings": False,
            "vocab_mask": False,
            "dropout": 0.0,
            "lr": 5e-4,
            "warmup": 1000,
            "beta2": 0.95,
            "adam_form": "torch",
            "weight_decay": 0.1,
            "clip_norm": 1.0,
            "label_smoothing": 0.0,
        },
    ),
    "brn": Preset(
        "Liu et al. 2023, Table 4 (small data, with early stopping, whose patience is not said; dropout 0.2 for WMT14 "
        "En-Fr, 0.1 for OPUS-100 and MultiUN; none elsewhere, as fairseq has it where nothing is said)",
        {
            **_BASE,
            **_FAIRSEQ,
            "dropout": 0.4,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "lr": 5e-4,
            "warmup": 4000,
            "warmup_init_lr": 1e-7,
            "beta2": 0.98,
            "weight_decay": 1e-4,
            "weight_decay_of": "all",
            "max_tokens": 4096,
            "accumulate": 128,
            "updates": 100_000,
        },
    ),
}


def find_preset(name: str) -> dict[str, Any]:
    """Returns the options of a preset; InputError with the valid names if there is none."""
    if not isinstance(name, str):
        raise InputError(f"preset must be a name, one of {', '.join(PRESETS)}; got {name!r}")
    if name not in PRESETS:
        raise InputError(unknown("preset", name, PRESETS))
    return dict(PRESETS[name].options)


def preset(name: str) -> tuple[TransformerConfig, TrainingConfig]:
    """Returns the model and training options of a preset; `PRESETS` has the names and their sources.

    The model's `vocab_size` is 0; a Trainer takes it from the data.
    """
    model, training = split(find_preset(name), TransformerConfig, TrainingConfig)
    return TransformerConfig(**model), TrainingConfig(**training)
