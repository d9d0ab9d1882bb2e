"""What the way back from a swap leaves alone."""

import copy

import pytest
import torch
from surgery_support import (
    MODELS,
    D,
    build,
    run,
    torchs_encoder,
)
from torch import nn

from normformer_rs import nn as nfnn
from normformer_rs.surgery import swap_norms, swap_residuals

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested tensors")


def test_undo_leaves_what_others_have_changed():
    model = torchs_encoder().eval()
    x, calls = torch.randn(2, 3, D), []
    early = model.layers[0].register_forward_hook(lambda *_: calls.append("early"))
    done = swap_residuals(model, "deepnorm")
    norms = swap_norms(model, "scalenorm")
    calls.clear()  # the swap's runs
    late = model.layers[0].register_forward_hook(lambda *_: calls.append("late"))
    model.layers[0].add_module("extra", nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"swap_norms to scalenorm came after swap_residuals to deepnorm .* undo"):
        done.undo()
    assert type(model.layers[0]) is nfnn.TransformerEncoderLayer
    norms.undo(), done.undo()
    assert type(model.layers[0]) is nn.TransformerEncoderLayer and model.layers[0].extra.in_features == 2
    model(x)
    assert calls == ["early", "late"]
    early.remove(), late.remove()
    model(x)
    assert len(calls) == 2
    again = swap_norms(model, "rmsnorm")  # and the way is free for others
    again.undo()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(test=3)
def test_what_comes_back_follows_the_model(name):
    model = build(name)
    plain = copy.deepcopy(model).double().eval()
    norms = swap_norms(model, "scalenorm")
    scheme = swap_residuals(model, "rezero", init=None)
    model.double()
    scheme.undo(), norms.undo()
    assert {t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()} == {torch.float64}
    assert torch.equal(run(model.eval())[0], run(plain)[0])


def test_swaps_that_share_an_optimizer_come_back_in_any_order():
    model = nn.ModuleList([torchs_encoder(), torchs_encoder()])
    names = [{"params": [*part.parameters()]} for part in model]
    for groups in (names, [{"params": [*model.parameters()]}]):
        optimizer = torch.optim.SGD(groups, 0.1)
        before = [[*group["params"]] for group in optimizer.param_groups]
        first, second = (swap_norms(part, "scalenorm", optimizer=optimizer) for part in model)
        extra = nn.Parameter(torch.ones(1))
        optimizer.param_groups[0]["params"].append(extra)
        first.undo()
        inside = {p for group in optimizer.param_groups for p in group["params"]}
        assert inside == {*model.parameters(), extra}
        second.undo()
        before[0].append(extra)
        after = [group["params"] for group in optimizer.param_groups]
        assert [[*map(id, group)] for group in after] == [[*map(id, group)] for group in before]


def test_what_comes_back_is_in_the_models_mode():
    for before in (False, True):
        for swap in (swap_norms, swap_residuals):
            model = torchs_encoder().train(before)
            done = swap(model, {swap_norms: "scalenorm", swap_residuals: "rezero"}[swap])
            assert {m.training for m in model.modules()} == {before}
            model.train(not before).requires_grad_(False)
            done.undo()
            assert {m.training for m in model.modules()} == {not before}
            if swap is swap_norms:
                assert not any(p.requires_grad for p in model.parameters())


def test_undo_tells_whether_anything_moved():
    """A fused optimizer moves no counter of writes, and running statistics move without one."""
    model, x = torchs_encoder(), torch.randn(2, 5, D)
    swapped = swap_norms(model, "scalenorm")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(x).square().sum().backward()
    optimizer.step()
    assert "trained since" in swapped.undo()[0].note
    model = torchs_encoder()
    swap_norms(model, "batchnorm")
    swapped = swap_residuals(model, "prenorm", init=None)
    model.train()(x)
    assert "trained since" in swapped.undo()[0].note
