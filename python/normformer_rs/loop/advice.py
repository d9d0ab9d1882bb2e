"""Warnings about options of a training run that are valid but rarely wanted."""

from ..config import TrainingConfig, TransformerConfig

_WARMING = ("inverse-sqrt", "val-decay", "constant")
"""The schedules that begin with a warm-up."""
_SIZES = {"d_model", "d_ff", "heads", "encoder_layers", "decoder_layers"}
_LARGE = 20_000_000
"""A model with more parameters than this takes seconds for each update on a CPU."""
_PRESET = {"encoder-decoder": "transformer-tiny", "decoder-only": "llama-tiny"}


def warnings_of(
    model: TransformerConfig, training: TrainingConfig, parameters: int, chosen: set[str] | None = None
) -> list[str]:
    """Returns warnings about options that are valid but rarely wanted.

    Args:
        parameters: the number of the model's parameters.
        chosen: the names of the options that a user has given, including "preset". None means that they are not known;
            then there is no warning about a default size.
    """
    how, what = training.asdict(), model.asdict()
    found = []
    last = how["updates"] - how["count_from_zero"]  # the last update's number in the schedule
    if how["updates"] and how["schedule"] in _WARMING and last < how["warmup"]:
        found.append(
            f"the warm-up of {how['warmup']:,} updates is longer than the run of {how['updates']:,}: the learning rate "
            "never reaches its peak; choose a smaller warmup, or more updates"
        )
    faded = what["prepbn_warm"] + what["prepbn_steps"] if "prepbn" in (what["norm"], what["decoder_norm"]) else 0
    if how["updates"] and how["updates"] < faded:
        found.append(
            f"prepbn fades for {faded:,} updates, and the run has {how['updates']:,}: validation uses repbn alone, "
            "which has not learned its part by then; choose smaller prepbn_steps"
        )
    is_default = chosen is not None and not chosen & {"preset", *_SIZES}
    if is_default and how["device"] == "cpu" and parameters > _LARGE:
        found.append(
            f"the default size has {parameters:,} parameters, which is slow on a CPU; a smaller one is "
            f"--preset {_PRESET[what['architecture']]}"
        )
    return found
