"""Warnings about options of a training run that are valid but rarely wanted."""

from ..config import TrainingConfig, TransformerConfig

_WARMING = ("inverse-sqrt", "val-decay", "constant")
"""The schedules that begin with a warm-up."""
_SIZES = {"d_model", "d_ff", "heads", "encoder_layers", "decoder_layers"}
"""The options that set a model's size."""
_LARGE = 20_000_000
"""A model with more parameters than this takes seconds for each update on a CPU."""
_PRESET = {"encoder-decoder": "transformer-tiny", "decoder-only": "llama-tiny"}
"""The preset with a small model, by architecture."""


def warnings_of(
    model: TransformerConfig, training: TrainingConfig, parameters: int, chosen: set[str] | None = None
) -> list[str]:
    """Returns warnings about options that are valid but rarely wanted.

    Args:
        parameters: the number of the model's parameters.
        chosen: the names of the options that a user has given, including "preset". None means that they are unknown;
            then there is no warning about a default size.
    """
    run_options, model_options = training.asdict(), model.asdict()
    updates, warmup = run_options["updates"], run_options["warmup"]
    warnings = []
    last = updates - run_options["count_from_zero"]  # the last update's number in the schedule; True counts as 1
    if updates and run_options["schedule"] in _WARMING and last < warmup:
        warnings.append(
            f"the warm-up of {warmup:,} updates is longer than the run of {updates:,}: the learning rate "
            "never reaches its peak; choose a smaller warmup, or more updates"
        )
    stacks = ("decoder",) if model_options["architecture"] == "decoder-only" else ("encoder", "decoder")
    uses_prepbn = "prepbn" in {model_options[f"{stack}_norm"] or model_options["norm"] for stack in stacks}
    # The number of updates after which prepbn has faded: those before the fading begins, and those that it takes.
    faded_after = model_options["prepbn_warm"] + model_options["prepbn_steps"] if uses_prepbn else 0
    if updates and updates < faded_after:
        warnings.append(
            f"prepbn fades for {faded_after:,} updates, and the run has {updates:,}: validation uses repbn alone, "
            "which has not learned its part by then; choose smaller prepbn_steps"
        )
    is_default = chosen is not None and not chosen & {"preset", *_SIZES}
    if is_default and run_options["device"] == "cpu" and parameters > _LARGE:
        warnings.append(
            f"the default size has {parameters:,} parameters, which is slow on a CPU; a smaller one is "
            f"--preset {_PRESET[model_options['architecture']]}"
        )
    return warnings
