"""The field's other words for names and options: error messages look here before they compare spellings."""

from collections.abc import Iterable

_WORDS = {
    # residual schemes
    "prenorm": "pre-ln preln pre-norm pre-layernorm pre-layer-norm prelayernorm norm-first normalize-before",
    "postnorm": "post-ln postln post-norm post-layernorm post-layer-norm postlayernorm vanilla norm-last transformer",
    "deepnorm": "deepnet deep-norm deep-ln",
    "subln": "magneto sub-layernorm",
    "rezero": "re-zero rezero-init skipinit",
    "layerscale": "layer-scale cait",
    "resi-dual": "residual-dual dual-residual",
    "peri-ln": "periln peri-norm",
    "sandwich": "sandwich-ln sandwich-norm cogview gemma2",
    "mix-ln": "mixln",
    "hyper-connections": "hc hyperconnections",
    "hybridnorm": "hybrid-norm hybrid",
    "denseformer": "dwa",
    # norms
    "layernorm": "ln layer-norm layer-normalization",
    "rmsnorm": "rms rms-norm t5-norm",
    "scalenorm": "scale-norm scale sn",
    "batchnorm": "bn batch-norm",
    "powernorm": "pn power-norm",
    "dyt": "dynamic-tanh tanh",
    "derf": "dynamic-erf erf",
    "l2norm": "l2",
    # initialisations
    "xavier": "glorot xavier-uniform glorot-uniform",
    "smallinit": "small-init small",
    "gpt2": "gpt-2 gpt",
    "ds-init": "dsinit depth-scaled",
    # other values
    "rotary": "rope rotary-embedding",
    "twt": "sinusoidal sinusoid sin sincos absolute",
    "learned": "learnt trainable",
    "swiglu": "swish-glu llama",
    "silu": "swish",
    "bf16": "bfloat16 bf-16 mixed half fp16 float16 f16 amp",
    "f32": "fp32 float32 float single full",
    "encoder-decoder": "seq2seq encdec translation",
    "decoder-only": "lm causal-lm language-model gpt decoder causal",
    "inverse-sqrt": "noam isqrt inverse-square-root rsqrt",
    "adam": "adamw",
    "mup": "mu-p μp maximal-update",
    "completep": "complete-p",
    "u-mup": "umup u-μp unit-mup unit-scaling unit-scaled",
    # options
    "lr": "learning-rate",
    "optimizer": "optim",
    "init-from": "from-pretrained finetune-from-model pretrained load-model",
    "updates": "steps max-steps num-steps iterations max-iters train-steps max-updates",
    "epochs": "num-epochs max-epochs num-train-epochs",
    "max-tokens": "batch-size batch tokens-per-batch per-device-train-batch-size",
    "accumulate": "gradient-accumulation gradient-accumulation-steps grad-accum accumulation",
    "schedule": "scheduler lr-schedule lr-scheduler lr-scheduler-type",
    "warmup": "warmup-steps num-warmup-steps warm-up",
    "clip-norm": "max-grad-norm grad-clip gradient-clip clip clip-grad gradient-clipping",
    "weight-decay": "wd decay",
    "adam-eps": "adam-epsilon",
    "label-smoothing": "label-smoothing-factor ls",
    "evaluate-every": "eval-steps eval-every eval-interval validate-every",
    "keep": "save-total-limit",
    "patience": "early-stopping early-stopping-patience",
    "activation-checkpointing": "gradient-checkpointing checkpointing recompute",
    "precision": "dtype mixed-precision",
    "output": "output-dir out out-dir save-dir run-dir",
    "d-model": "hidden-size embed-dim embedding-dim dim hidden-dim n-embd model-dim width",
    "d-ff": "ffn-dim intermediate-size ff-dim feed-forward dim-feedforward ffn-embed-dim hidden-ff",
    "heads": "num-heads n-heads n-head nhead attention-heads num-attention-heads",
    "kv-heads": "num-key-value-heads n-kv-heads",
    "encoder-layers": "num-layers n-layers n-layer layers depth num-hidden-layers num-encoder-layers",
    "decoder-layers": "num-layers n-layers n-layer layers depth num-hidden-layers num-decoder-layers",
    "dropout": "dropout-rate hidden-dropout resid-pdrop dropout-p",
    "attention-dropout": "attn-dropout attn-pdrop",
    "norm": "normalization norm-type norm-layer",
    "norm-eps": "epsilon layer-norm-eps rms-norm-eps layernorm-eps",
    "eps": "epsilon layer-norm-eps rms-norm-eps",
    "residual": "scheme residual-scheme",
    "init": "initialization initialisation initializer",
    "positions": "pos positional-encoding position-embeddings pos-encoding",
    "tie-embeddings": "tie-weights weight-tying share-embeddings tie-word-embeddings",
    "linear-biases": "bias biases use-bias",
    "logit-softcap": "final-logit-softcapping softcap",
    "rope-theta": "rope-base rotary-base",
    "train-source": "src source train-src src-train train",
    "train-target": "tgt target train-tgt tgt-train train text train-file dataset",
    "valid-source": "valid-src dev-src dev-source val-source eval-source valid",
    "valid-target": "valid-tgt dev-tgt dev-target val-target eval-target valid val dev",
    "bpe-operations": "bpe vocab-size num-merges merges bpe-merges",
    "segment-length": "block-size seq-len sequence-length context-length max-length",
    "beam": "num-beams beam-size beams",
    "alpha": "length-penalty lenpen",
    "max-length": "max-new-tokens max-len",
    "model": "checkpoint-dir run model-dir",
}
"""For each name its other words, in lower case and with hyphens. A word may mean several names."""


def plain(word: str) -> str:
    """Returns the word in lower case, with hyphens for underscores and without the hyphens of a flag."""
    return word.lower().replace("_", "-").removeprefix("--")


def meant(word: str, choices: Iterable[str]) -> list[str]:
    """Returns the choices that the field also calls by this word."""
    names = {name for name, words in _WORDS.items() if plain(word) in words.split()}
    return [choice for choice in choices if plain(choice) in names]
