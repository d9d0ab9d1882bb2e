"""Norms of the models that people use are found by what they compute, exchanged, trained, and brought back."""

import pytest
import torch
from norm_families import FAMILIES, build_family, outputs
from surgery_support import assert_same, state_of

from normformer_rs import nn as nfnn
from normformer_rs.surgery import swap_norms
from normformer_rs.surgery.probe import Widened
from normformer_rs.surgery.recognise import looks_like_a_norm, read_norm

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested tensors")
STAYING = {"wav2vec2": {"GroupNorm"}}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.one_in(test=19, all=18)
def test_every_norm_of_a_family_swaps_trains_and_returns(name):
    model = build_family(name)
    with torch.no_grad():
        before, state = outputs(name, model), state_of(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    done = swap_norms(model, "scalenorm", optimizer=optimizer)
    left = {type(m).__name__ for m in model.modules() if looks_like_a_norm(m) and not isinstance(m, nfnn.ScaleNorm)}
    assert left == STAYING.get(name, set())
    norms = [m for m in model.modules() if isinstance(m, nfnn.ScaleNorm)]
    assert len(norms) >= 2

    y = outputs(name, model.train())
    assert y.isfinite().all()
    y.square().mean().backward()
    gains = [m.weight for m in norms if m.weight is not None]
    old = [gain.detach().clone() for gain in gains]
    optimizer.step()
    assert all(gain.isfinite().all() and gain.grad is not None for gain in gains)
    assert any(not torch.equal(gain, was) for gain, was in zip(gains, old)) or not gains

    done.undo()
    model.load_state_dict({key: value for key, (_, value) in state.items()})
    assert_same(state_of(model), state)
    with torch.no_grad():
        assert torch.equal(outputs(name, model.eval()), before)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.one_in(test=38, all=19)
def test_the_same_norm_keeps_a_familys_outputs(name):
    model = build_family(name).double()
    with torch.no_grad(), Widened():
        before = outputs(name, model)
        swapped = 0
        for norm in ("layernorm", "rmsnorm"):
            kinds = {key for key, m in model.named_modules() if getattr(read_norm(m), "computes", None) == norm}
            if kinds:
                swapped += len(swap_norms(model, norm, filter=lambda key, _, kinds=kinds: key in kinds))
        assert swapped >= 2
        torch.testing.assert_close(outputs(name, model), before, rtol=0, atol=1e-12)
