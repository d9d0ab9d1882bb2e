"""Initial values in every type: one seed draws one model, which 16 bits only round."""

import pytest
import torch

import normformer_rs as nfrs
from normformer_rs import nn as nfnn

pytestmark = pytest.mark.usefixtures("one_thread")
HALVES = (torch.bfloat16, torch.float16)
LAYERS = {
    **{name: {"residual": "prenorm", "init": name} for name in (e["name"] for e in nfrs.tables()["inits"])},
    "by channel": {"residual": "mhc", "mhc_mixing": "channel", "mhc_rank": 8},
    "variance-gate": {"residual": "variance-gate"},
    "gated-rmsnorm": {"residual": "prenorm", "norm": "gated-rmsnorm"},
    "gate and sinks": {"residual": "prenorm", "output_gate": "element", "sinks": True},
}


def equal_but_for_rounding(half, whole):
    """Draws in 16 bits would be other numbers, and coarser ones at that."""
    assert half.keys() == whole.keys() and half
    for name, p in half.items():
        assert torch.equal(p, whole[name].to(p.dtype)), name


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.one_in(test=2)
def test_layers_of_16_bits_are_drawn_in_f32(case, dtype):
    def made(dtype, resets):
        torch.manual_seed(3)
        layer = nfnn.TransformerEncoderLayer(16, 4, 32, encoder_layers=2, layer=1, dtype=dtype, **LAYERS[case])
        if resets:
            layer.reset_parameters()
        return dict(layer.named_parameters())

    for resets in (False, True):
        half = made(dtype, resets)
        assert {p.dtype for p in half.values()} == {dtype}
        equal_but_for_rounding(half, made(torch.float32, resets))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_tables_and_norms_of_16_bits_are_drawn_in_f32(dtype):
    makers = (lambda **k: nfnn.FixNormEmbedding(10, 8, **k), lambda **k: nfnn.GatedRMSNorm(8, rank=3, **k))
    for make in makers:
        of_type = []
        for kind in (dtype, torch.float32):
            torch.manual_seed(5)
            of_type.append(dict(make(dtype=kind).named_parameters()))
        equal_but_for_rounding(*of_type)
