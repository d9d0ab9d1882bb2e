"""Rates and ε of what a scheme adds to a swapped model are those that it has in a stack of ours."""

import pytest

import normformer_rs as nfrs
from normformer_rs import nn as nfnn
from normformer_rs.surgery import swap_residuals

SCHEMES = [entry["name"] for entry in nfrs.tables()["residuals"]]
OPTIONS = {"parametrisation": "completep", "base_width": 16, "base_depth": 2}  # width times 2, depth times 2
SHAPE = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}


def rates(model, **more):
    at = {id(p): (g["lr"], g["eps"]) for g in nfrs.param_groups(model, 1.0, eps=1.0, **more) for p in g["params"]}
    found = {}
    for name, p in model.named_parameters():
        found.setdefault("combine" if "combine" in name else name.rpartition(".")[2], set()).add(at[id(p)])
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.one_in(test=32, all=31)
def test_rates_of_a_swapped_model_are_those_of_a_stack(scheme):
    transformers = pytest.importorskip("transformers")
    try:
        layer = nfnn.TransformerEncoderLayer(32, 4, 48, residual=scheme, norm="rmsnorm", **OPTIONS)
    except nfrs.InputError:
        pytest.skip(f"completep refuses {scheme}")
    right = rates(nfnn.TransformerEncoder(layer, 4))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    before = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    try:
        swap_residuals(model, scheme, init=None)
    except nfrs.InputError:
        pytest.skip(f"{scheme} is refused in Llama")
    came = rates(model, **OPTIONS)
    own = {name for name in came if name in right and name not in before}
    assert {name: came[name] for name in own} == {name: right[name] for name in own}
    if scheme in ("hyper-connections", "denseformer"):
        assert own
