"""Numbers of layers from a caller are counts that a stack may have, or refused at once."""

import numpy as np
import pytest
import torch

import normformer_rs as nfrs
from normformer_rs import nn
from normformer_rs.nn.place import in_short
from normformer_rs.nn.scheme import MOST_LAYERS

D = 8
NO_COUNT = [10**9, 2**62, 2**70, MOST_LAYERS + 1, 0, -1, 2.0, float("nan"), True, "3", (1, 2), [3] * 10**5]


def layer(**options):
    return nn.TransformerEncoderLayer(D, 2, D, residual="deepnorm", **options)


@pytest.mark.parametrize("count", NO_COUNT, ids=in_short)
def test_depths(count):
    for make in (
        lambda: layer(encoder_layers=count),
        lambda: nn.TransformerDecoderLayer(D, 2, D, residual="deepnorm", decoder_layers=count),
        lambda: nn.Residual(torch.nn.Linear(D, D), D, scheme="deepnorm", norm="layernorm", layers=count),
        lambda: nn.TransformerEncoder(layer(), count),
        lambda: nn.Transformer(D, 2, count, 2, D, residual="deepnorm"),
        lambda: nn.Transformer(D, 2, 2, count, D, residual="deepnorm"),
    ):
        with pytest.raises(nfrs.InputError) as refusal:
            make()
        assert len(str(refusal.value)) < 10**6


@pytest.mark.parametrize("number", [value for value in NO_COUNT if value != 0], ids=in_short)
def test_numbers_of_layers(number):
    with pytest.raises(nfrs.InputError, match=r"^layer must (lie in 0 … 3|be a whole number)") as refusal:
        layer(encoder_layers=4, layer=number)
    assert len(str(refusal.value)) < 200


def test_integers_of_numpy_count():
    assert layer(encoder_layers=np.int64(4), layer=np.int32(3)).place.layer == 3
    assert len(nn.TransformerEncoder(layer(), np.int64(2)).layers) == 2


def test_rust_has_the_same_bound():
    for count in (MOST_LAYERS + 1, 10**9):
        config = nfrs.TransformerConfig(architecture="decoder-only", vocab_size=9, decoder_layers=count)
        with pytest.raises(nfrs.InputError, match=f"decoder_layers must be at most {MOST_LAYERS}, got {count}"):
            nfrs.Transformer(config)
