"""Reads measurements of a finished run from its folder. Each function returns one or more series of numbers by name."""

import re
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import _core, analysis, text
from ..errors import InputError
from ..loop.history import History
from ..loop.model import Transformer

Found = dict[str, list[float]]
"""The name of a series → its numbers."""

_ROWS, _LENGTH, _BOS, _PAD, _EOS = 32, 64, 0, 1, 2
"""The number of rows of a text that a model reads, the number of tokens in a language model's row, and the ids of the
special tokens."""
_PLACES = {
    "encoder": ("encoder-attention", "encoder-feed-forward"),
    "decoder": ("decoder-attention", "decoder-encoder", "decoder-feed-forward"),
}
"""The places of a stack's norms, in the order of the layer's sublayers."""


def brief(values: Iterable[float]) -> list[float]:
    """Rounds each number to five digits."""
    return [float(f"{value:.5g}") for value in values]


def gradient_norms(history: History) -> Found:
    """Returns the series `raw`: the gradient norm of each update, before clipping."""
    return {"raw": brief(history.grad_norm)}


def bleu(history: History) -> Found:
    """Returns two series: `bleu`, the validation set's BLEU at each evaluation, and `evaluated`, the number of the
    update at each evaluation."""
    evaluations = history.evaluations
    return {"evaluated": brief(evaluations.update), "bleu": brief(evaluations.bleu)}


def gains(output: str | PathLike[str], checkpoint: str) -> Found:
    """Returns a series `gain-PLACE` for each place of a norm in the layers of a pre-norm model: the learned g of the
    ScaleNorm (or LpNorm) there, from the first layer to the last. `gain-final` has the g of the decoder's last norm.

    Errors: InputError for a model whose norms learn no g.
    """
    model = Transformer.from_checkpoint(output, checkpoint)
    if not analysis.gains(model):
        raise InputError(f'{output}: norm = "{model.config.norm}" learns no g; expected scalenorm or lpnorm')
    return {f"gain-{place}": brief(values) for place, values in gains_by_place(model.state_dict()).items()}


def gains_by_place(state: Mapping[str, torch.Tensor]) -> Found:
    """Returns the gains in a state dict by their norms' places: encoder-attention, encoder-feed-forward,
    decoder-attention, decoder-encoder and decoder-feed-forward, each from the first layer to the last, and final.
    Places that the model lacks are left out."""
    has_encoder = any(name.startswith("encoder.layers.") for name in state)
    gains: Found = {}
    for stack, all_places in _PLACES.items():
        places = [place for place in all_places if has_encoder or place != "decoder-encoder"]
        for number, place in enumerate(places, 1):  # the norms of a layer are called norm1, norm2, …
            pattern = re.compile(rf"{stack}\.layers\.(\d+)\.norm{number}\.weight")
            by_layer = {int(m[1]): value.item() for name, value in state.items() if (m := pattern.fullmatch(name))}
            if by_layer:
                gains[place] = [by_layer[layer] for layer in sorted(by_layer)]
    if "decoder.norm.weight" in state:
        gains["final"] = [state["decoder.norm.weight"].item()]
    return gains


def singular_values(output: str | PathLike[str], checkpoint: str) -> Found:
    """Returns the series `singular`: the singular values of the target words' embedding, divided by the largest."""
    state = Transformer.from_checkpoint(output, checkpoint).state_dict()
    table = state["embedding.weight" if "embedding.weight" in state else "target_embedding.weight"]
    return {"singular": brief(analysis.spectrum(table))}


def statistics(history: History) -> Found:
    """Returns statistics of the encoder's first norm (in a language model, of the decoder's) over training, as
    `log_statistics` logged them. Empty if nothing was logged.

    The series `distance-STATISTIC` has the distances of the batches' statistics from the running ones,
    `gradient-STATISTIC` the statistics' part in the gradient of the norm's input, and `logged` the updates' numbers.
    """
    # A name is such as batch_distance/encoder.0.mean, where 0 is the norm's number in its stack.
    of_first_norm = re.compile(r"batch_(distance|gradient)/(encoder|decoder)\.0\.\w+")
    logged = {name: values for name, values in history.layers.items() if of_first_norm.fullmatch(name)}
    stack = "encoder" if any("/encoder." in name for name in logged) else "decoder"
    logged = {name: values for name, values in logged.items() if f"/{stack}." in name}
    if not logged:
        return {}
    was_logged = ~np.isnan(next(iter(logged.values())))  # statistics are logged only at some updates
    series = {name.replace("batch_", "").replace(f"/{stack}.0.", "-"): brief(values[was_logged])
             for name, values in logged.items()}  # fmt: skip
    series["logged"] = brief(history.update[was_logged])
    return series


def changes(history: History) -> Found:
    """Returns two series: `change`, ‖F(x; θ) − F(x; θ₀)‖₂ of the decoder's output over training, as `log_statistics`
    logged it, and `logged`, the updates' numbers. Empty if nothing was logged."""
    values = history.layers.get("change/decoder")
    if values is None:
        return {}
    was_logged = ~np.isnan(values)
    return {"change": brief(values[was_logged]), "logged": brief(history.update[was_logged])}


def layers(output: str | PathLike[str], checkpoint: str, source: str | None, target: str) -> Found:
    """Returns measurements of a model on the first lines of a text, three series for each stack. `cosine-STACK` has the
    cosine of each layer's output with the output before it, `active-STACK` the share of active units in each
    feed-forward, and `size-STACK` the mean |x| of the stack's input and of each layer's output.

    Args:
        source, target: files of text in the form that the run reads; no source for a language model.
    """
    model = Transformer.from_checkpoint(output, checkpoint)
    observed = analysis.observe(model, *_read(model, Path(output), source, target))
    series: Found = {}
    for stack, measured in observed.items():
        parts = (("cosine", measured.cosines), ("active", measured.active), ("size", measured.sizes))
        series |= {f"{what}-{stack}": brief(values) for what, values in parts}
    return series


def _read(model: Transformer, output: Path, source: str | None, target: str) -> tuple[Any, torch.Tensor]:
    """Returns the token ids of a text's first lines: (source or None, the decoder's input). `output` is the run's
    folder; `source` and `target` are files."""
    lines = text.read_lines(target)
    if source is None:  # a language model: its rows are cut from one sequence of all lines
        tokens = [_EOS, *(token for line in _core.encode(str(output), lines) for token in [*line, _EOS])]
        rows = max(1, min(_ROWS, len(tokens) // _LENGTH))
        return None, torch.tensor(tokens[: rows * _LENGTH]).view(rows, -1)
    read = [text.read_lines(source)[:_ROWS], lines[:_ROWS]]
    sources, targets = (_padded(_core.encode(str(output), part)) for part in read)
    begin = torch.full((len(targets), 1), _EOS if model.config.decoder_start == "eos" else _BOS)
    return sources, torch.cat([begin, targets], 1)


def _padded(rows: list[list[int]]) -> torch.Tensor:
    """Returns the rows of token ids as one tensor. Each row is followed by EOS and padded on the right."""
    width = max(map(len, rows)) + 1
    return torch.tensor([[*row, _EOS, *[_PAD] * (width - len(row) - 1)] for row in rows])
