"""An optimizer that a swap was not told of warns at its next step."""

import warnings

import pytest
import torch
from surgery_support import SWAPPABLE, build, hugging_face, run
from torch import nn

from normformer_rs.surgery import fold_norms, swap_norms, swap_residuals

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested tensors")
FORGOTTEN = "no optimizer has them: this AdamW still has the parameters from before"


def step(model, optimizer):
    optimizer.zero_grad()
    run(model)[1].backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("swap", "first"),
    [
        (
            lambda m: swap_norms(m, "rmsnorm"),
            "rmsnorm made transformer.h.0.ln_1.weight and 4 more",
        ),
        (
            lambda m: swap_residuals(m, "layerscale", init=None),
            "layerscale made transformer.h.0.residual.",
        ),
        (
            lambda m: swap_residuals(m, "sandwich", init=None),
            "sandwich made transformer.h.0.residual.",
        ),
    ],
)
@pytest.mark.one_in(all=3)
def test_a_forgotten_optimizer_warns_once_by_name(swap, first):
    model = hugging_face("gpt2")
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    done = swap(model)
    with pytest.warns(UserWarning, match=FORGOTTEN) as caught:
        step(model, optimizer)
    assert first in str(caught[0].message) and caught[0].filename == __file__
    step(model, optimizer)  # once

    later = torch.optim.AdamW(model.parameters())  # has everything
    step(model, later)
    step(model, optimizer)
    done.undo()
    step(model, optimizer)  # its parameters are back
    if "rmsnorm" in first:
        with pytest.warns(UserWarning, match=r"^undo\(\) of swap_norms to rmsnorm made .*\.0\.ln_1\.weight and"):
            only = torch.optim.AdamW([p for g in later.param_groups for p in g["params"]])
            optimizer.param_groups.clear()
            step(model, only)


@pytest.mark.full
def test_optimizers_that_know_are_silent():
    model = hugging_face("gpt2")
    optimizer = torch.optim.AdamW(model.parameters())
    done = [swap_norms(model, "rmsnorm", optimizer=optimizer)]
    done.append(swap_residuals(model, "sandwich", init=None, optimizer=optimizer))
    step(model, optimizer)
    while done:
        done.pop().undo()
        step(model, optimizer)
    # undone before a step; frozen gains; another optimizer for the new ones
    optimizer = torch.optim.AdamW(model.parameters())
    swap_norms(model, "rmsnorm").undo()
    swap_residuals(model, "layerscale", init=None).undo()
    step(model, optimizer)
    for p in model.transformer.ln_f.parameters():
        p.requires_grad_(False)
    before = {id(p) for p in model.parameters()}
    swap_norms(model, "rmsnorm", filter=lambda name, _: name == "transformer.ln_f")
    swap_residuals(model, "layerscale", init=None)
    others = torch.optim.SGD([p for p in model.parameters() if id(p) not in before and p.requires_grad], 0.1)
    step(model, optimizer)
    step(model, others)


def test_a_fold_that_makes_biases_and_a_model_that_is_gone():
    model = build("encoder")
    optimizer = torch.optim.AdamW(model.parameters())
    swap_norms(model, "rmsnorm")
    del model
    held = torch.nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(held.parameters())})
    held(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    model = nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
    model.linear1.register_parameter("bias", None)
    optimizer = torch.optim.AdamW(model.parameters())
    fold_norms(model)
    model(torch.randn(1, 2, 8)).sum().backward()
    with pytest.warns(UserWarning, match=f"^fold_norms made linear1.bias, and {FORGOTTEN}"):
        optimizer.step()


@pytest.mark.full
def test_a_compiled_step_warns_too():
    model = build("encoder")
    optimizer = torch.optim.AdamW(model.parameters())
    swap_norms(model, "rmsnorm")
    run(model)[1].backward()
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled()
    assert [w for w in caught if FORGOTTEN in str(w.message)]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("residual", SWAPPABLE)
@pytest.mark.one_in(test=11, all=6)
def test_new_parameters_join_the_groups_of_vectors_or_matrices_of_their_layer(residual, kind):
    """Groups as recipes make them: by layer, and with decay for matrices alone."""
    model = hugging_face(kind)

    def group_of(name, p):
        parts = [] if "stack_residual" in name else name.split(".")
        return next((part for part in parts if part.isdigit()), "none"), p.dim() > 1

    before = dict(model.named_parameters())
    groups = {}
    for name, p in before.items():
        groups.setdefault(group_of(name, p), []).append(p)
    optimizer = torch.optim.AdamW(
        [{"params": ps, "weight_decay": 0.1 * key[1], "of": key} for key, ps in groups.items()]
    )
    swaps = swap_residuals(model, residual, init=None, optimizer=optimizer)
    found = {p: group["of"] for group in optimizer.param_groups for p in group["params"]}
    assert {*found} == {*model.parameters()}
    for name, p in model.named_parameters():
        if name not in before or before[name] is not p:
            layer, is_matrix = group_of(name, p)
            assert found[p][1] == is_matrix and (layer == "none" or found[p][0] == layer), (name, found[p])
    swaps.undo()
    assert [[*map(id, group["params"])] for group in optimizer.param_groups] == [
        [*map(id, ps)] for ps in groups.values()
    ]
