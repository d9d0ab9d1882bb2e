"""Initial values of layers: what a scheme or an option adds does not shift the draws of the other parameters."""

import copy

import pytest
import torch
from nn_support import OPTIONS, RESIDUALS

from normformer_rs import nn as nfnn


def built(seed=3, init="gpt2", **options):
    torch.manual_seed(seed)
    model = nfnn.Transformer(32, 4, 2, 2, 48, 0.0, batch_first=True, init=init, **options)
    return dict(model.named_parameters()), torch.rand(())


def weights(named):
    ends = ("in_proj_weight", "out_proj.weight", "linear1.weight", "linear2.weight")
    return {name: p for name, p in named.items() if name.endswith(ends)}


OTHERS = ("ngpt", "r-fixup")
"""ngpt's matrices have unit vectors; r-fixup has no biases, for which torch.nn's constructors draw."""
CASES = [{"residual": name, **OPTIONS.get(name, {})} for name in RESIDUALS if name not in OTHERS]
CASES += [{"residual": "dlcl", "norm": "gated-rmsnorm", "against": {"residual": "dlcl"}}]
CASES += [{"output_gate": "element"}, {"sinks": True}, {"norm": "gated-rmsnorm"}]


@pytest.mark.parametrize("options", CASES, ids=lambda options: str(next(iter(options.values()))))
def test_matrices_start_alike(options):
    options = dict(options)
    plain, after = built(**{"residual": "prenorm", **options.pop("against", {})})
    ours, after_ours = built(**{"residual": "prenorm", **options})
    expected, found = weights(plain), weights(ours)
    assert found.keys() == expected.keys() and len(expected) == 20
    for name, p in expected.items():
        torch.testing.assert_close(found[name], p, rtol=0, atol=0, msg=name)
    assert after == after_ours


def test_neighbours_draw_differently():
    """Modules that draw nothing but the scheme's parameters, and so begin from one state of the generator."""
    torch.manual_seed(0)
    made = [nfnn.Residual(torch.nn.Identity(), 16, layers=2, layer=0, norm="gated-rmsnorm") for _ in range(2)]
    gates = [next(p for name, p in one.named_parameters() if name.endswith("gate_down")) for one in made]
    drawn = [gate.clone() for gate in gates]
    made[1].reset_parameters()
    drawn.append(gates[1])
    assert not any(torch.equal(drawn[i], drawn[j]) for i in range(3) for j in range(i))


def test_what_is_drawn_apart_follows_the_seed_and_differs_by_place():
    drawn = [built(seed, residual="prenorm", norm="gated-rmsnorm")[0] for seed in (3, 3, 4)]
    names = [name for name, p in drawn[0].items() if ".norm" in name and p.numel() > 32 and p.std() > 0]
    assert len(names) > 10
    for i, name in enumerate(names):
        first, again, other = (found[name] for found in drawn)
        assert torch.equal(first, again) and not torch.equal(first, other)
        assert not any(torch.equal(first, drawn[0][before]) for before in names[:i]), name


def test_copies_that_are_placed_by_hand_draw_their_own_values():
    torch.manual_seed(0)
    layer = nfnn.TransformerEncoderLayer(16, 2, 24, norm="gated-rmsnorm", residual="prenorm", init="xavier")
    layers = [copy.deepcopy(layer) for _ in range(3)]
    nfnn.place_layers(layers, init=True)
    gates = [one.norm1.gate_down for one in layers]
    assert not any(torch.equal(gates[i], gates[j]) for i in range(3) for j in range(i))
