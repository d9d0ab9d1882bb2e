"""Options that several reproductions share."""

from .declared import Options

TINY: Options = {
    "d_model": 128,
    "d_ff": 256,
    "heads": 4,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "dropout": 0.3,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
"""The model of most runs on two cores."""
RECIPE: Options = {
    "lr": 5e-3,
    "warmup": 2000,
    "max_tokens": 4096,
    "updates": 2500,
    "evaluate_every": 250,
    "keep": 5,
    "precision": "bf16",  # the type of products; parameters, moments, statistics and the residual stream are f32
}
SMALL: Options = {
    **TINY,
    **RECIPE,
    "d_model": 16,
    "d_ff": 32,
    "heads": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "warmup": 4,
    "max_tokens": 1000,
    "updates": 6,
    "evaluate_every": 3,
    "keep": 2,
}
"""The model and the recipe of `--scale check`."""
SMALL_ABOUT = "d 16, 6 updates of 1,000 padded tokens of number words"
TWO_CORES = "transformer-tiny (d 128, 4+4 layers), bf16, seed 1"
DECODED = "mean of the kept checkpoints, beam 5"
CONSTANT: Options = {"schedule": "constant", "warmup": 0}


def layers(number: int) -> Options:
    """Returns the options of as many layers in the encoder as in the decoder."""
    return {"encoder_layers": number, "decoder_layers": number}
