"""DS-Init against its author's encoder and decoder in TensorFlow, of which only bounds of first values are read."""

import contextlib
from unittest.mock import MagicMock

import pytest
from authors_support import module

from normformer_rs import Transformer, TransformerConfig

AUTHORS = "bzhangGo/zero", "d97e2c21b1c6d0467fe821223042247bf2b46bf9", "models/transformer.py"
LAYERS = {"encoder": 3, "decoder": 4}
SHAPE = {"d_model": 128, "d_ff": 192, "heads": 2, "vocab_size": 50, "residual": "postnorm", "init": "ds-init"}
PARTS = {"dot_attention": "attn", "ffn_layer": "linear"}


def variance_scaling(scale, mode, distribution):
    """Returns what TensorFlow's initialiser of this name makes of a matrix: the bound of its numbers."""
    assert (mode, distribution) == ("fan_avg", "uniform")
    return lambda fans: (3 * scale / (sum(fans) / 2)) ** 0.5


def their_bounds(gain):
    """Runs the author's model with stand-ins for tensors. Returns each sublayer's part and initialiser, in order."""
    now, found = [None], []

    @contextlib.contextmanager
    def variable_scope(name, initializer=None):
        before, now[0] = now[0], initializer or now[0]
        yield
        now[0] = before

    beside = {name: MagicMock() for name in ("tensorflow", "func", "models", "utils")}
    beside["tensorflow"].variable_scope = variable_scope
    beside["tensorflow"].variance_scaling_initializer = variance_scaling
    for name in PARTS:
        getattr(beside["func"], name).side_effect = (
            lambda *rest, name=name, **options: found.append((name, now[0])) or MagicMock()
        )
    for name in ("remove_invalid_seq", "label_smooth"):
        getattr(beside["utils"].util, name).return_value = MagicMock(), MagicMock()
    authors = module(*AUTHORS, **beside)
    params = MagicMock(hidden_size=128, deep_transformer_init=True, initializer_gain=gain)
    params.configure_mock(num_encoder_layer=LAYERS["encoder"], num_decoder_layer=LAYERS["decoder"])
    state = authors.encoder(MagicMock(), params)
    authors.decoder(MagicMock(), state, params)
    return found


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_bounds(alpha):
    """The release's form, a ∝ l^(-1/4), by every matrix's largest number; q, k and v count apart (docs/spec.md, 3.1).

    The author's gain is α²: it scales variances.
    """
    layers = {f"{stack}_layers": depth for stack, depth in LAYERS.items()}
    model = Transformer(TransformerConfig(ds_init_mode="release", ds_init_alpha=alpha, **SHAPE, **layers))
    found = [(name, weight) for name, weight in model.named_parameters() if "layers" in name and weight.ndim == 2]
    for (part, bound), first, second in zip(their_bounds(alpha**2), found[::2], found[1::2], strict=True):
        for name, weight in (first, second):
            assert PARTS[part] in name
            for matrix in weight.detach().chunk(3 if "in_proj" in name else 1):
                assert 0.999 < matrix.abs().max().item() / bound(matrix.shape) < 1 + 1e-6
