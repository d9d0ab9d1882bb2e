"""What a user registers: `register_norm` and `register_block` ask for all that a swap needs."""

import pytest
import torch
from torch import nn

from normformer_rs import InputError
from normformer_rs import nn as nfnn
from normformer_rs.surgery import (
    Linear,
    Part,
    Row,
    Swaps,
    recognise,
    register_block,
    register_norm,
    swap_norms,
    swap_residuals,
)
from normformer_rs.surgery.block_residual import BlockResidual

D = 8


class Block(nn.Module):
    """Pre-norm, with two heads."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.query, self.key, self.value, self.out = (nn.Linear(D, D) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def attend(self, x):
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def feed(self, x):
        return self.fc2(torch.relu(self.fc1(x)))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Converted(Block):
    def parts(self):
        names = {"query": "query", "key": "key", "value": "value", "out": "output"}
        attention = tuple(Linear(path, (role,)) for path, role in names.items())
        feed = (Linear("fc1", ("fc1",)), Linear("fc2", ("fc2",)))
        return [Part("self-attention", "norm1", attention), Part("feed-forward", "norm2", feed)]

    def heads(self):
        return 2

    def forward(self, x):
        return self.residual.step(1, self.residual.step(0, x, self.attend), self.feed)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.final = nn.ModuleList(Block() for _ in range(3)), nn.LayerNorm(D)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.final(x)


@pytest.fixture(scope="module", autouse=True)
def registered():
    register_block(Block, Converted)


@pytest.mark.one_in(test=4, all=3)
def test_its_own_scheme_changes_nothing():
    model, x = Stack().double(), torch.randn(2, 5, D, dtype=torch.float64)
    before = model(x)
    swaps = swap_residuals(model, "prenorm", init=None, example=x)
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-12)
    assert isinstance(swaps, Swaps) and "blocks.2" in str(swaps)
    swaps.undo()
    assert torch.equal(model(x), before)


def test_another_scheme_takes_its_norms_and_the_last_one():
    model, x = Stack(), torch.randn(2, 5, D)
    swap_residuals(model, "postnorm", init=None, example=x)
    assert isinstance(model.blocks[0].residual, BlockResidual)
    assert isinstance(model.final, nn.Identity)  # post-norm ends in a norm already
    y = x
    with torch.no_grad():
        for block in model.blocks:
            y = block.norm1(y + block.attend(y))
            y = block.norm2(y + block.feed(y))
    torch.testing.assert_close(model(x), y)


def test_what_is_no_subclass_is_refused():
    with pytest.raises(InputError, match="Linear must be a subclass of Block"):
        register_block(Block, nn.Linear)
    assert Row("a", "b", "c").note == ""


class Unasked(nn.Module):
    """A norm whose forward wants more than x, so that no call shows it to be one."""

    def __init__(self, **parameters):
        super().__init__()
        for name, values in parameters.items():
            setattr(self, name, nn.Parameter(values))

    def forward(self, x, shift):
        raise NotImplementedError


@pytest.fixture
def unregistered(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(recognise, "_READERS", {})


@pytest.mark.usefixtures("unregistered")
def test_a_registered_norm_is_swapped_whatever_its_parameters_are_called():
    class LN(Unasked):
        eps = 1e-3

    register_norm(LN, lambda m: (m.weight.numel(), "layernorm"))
    model = nn.Sequential(LN(weight=torch.arange(4.0), bias=torch.ones(4)))
    swaps = swap_norms(model, "layernorm")
    assert torch.equal(model[0].weight, torch.arange(4.0)) and torch.equal(model[0].bias, torch.ones(4))
    assert model[0].eps == 1e-3 and swaps[0].note == ""

    register_norm(LN, lambda m: (4, "rmsnorm"))
    model = nn.Sequential(LN(), LN(g=torch.arange(4.0)), LN(beta=torch.ones(4), weight=torch.arange(4.0)))
    swaps = swap_norms(model, "layernorm")
    assert model[0].weight is None and model[0].bias is None
    assert torch.equal(model[1].weight, torch.arange(4.0)) and swaps[1].note == "weight is the old g"
    assert torch.equal(model[2].weight, torch.arange(4.0)) and torch.equal(model[2].bias, torch.ones(4))

    register_norm(LN, lambda m: (4, "scalenorm"))
    model = nn.Sequential(LN(scale=torch.tensor(3.0)))
    swap_norms(model, "scalenorm")
    assert model[0].weight.shape == (1,) and model[0].weight.item() == 3.0


@pytest.mark.usefixtures("unregistered")
def test_a_registered_norm_that_can_be_called_is_read_by_its_numbers():
    class FromZero(Unasked):
        def forward(self, x):
            return nn.functional.layer_norm(x, (4,)) * (1 + self.w) + self.b

    class LN(FromZero):
        pass

    register_norm(LN, lambda m: (m.w.numel(), "layernorm"))
    model = nn.Sequential(LN(b=torch.ones(4), w=torch.arange(4.0)))
    swap_norms(model, nn.LayerNorm)
    assert torch.equal(model[0].weight, 1 + torch.arange(4.0)) and torch.equal(model[0].bias, torch.ones(4))


@pytest.mark.usefixtures("unregistered")
def test_what_a_reader_may_return():
    model = nn.Sequential(nn.LayerNorm(4))
    register_norm(nn.LayerNorm, lambda m: None)
    with pytest.raises(InputError, match=r"0, a LayerNorm, stays: its reader says that it is no norm"):
        swap_norms(model, "scalenorm")
    register_norm(nn.LayerNorm, lambda m: 4)
    with pytest.raises(InputError, match=r"reader of LayerNorm must return \(width, computes\), .* got 4"):
        swap_norms(model, "scalenorm")
    register_norm(nn.LayerNorm, lambda m: (4, "layernrm"))
    with pytest.raises(InputError, match=r"did you mean .layernorm"):
        swap_norms(model, "scalenorm")
    with pytest.raises(InputError, match=r"kind must be a subclass of torch.nn.Module; got 3"):
        register_norm(3, lambda m: None)
    register_norm(nn.LayerNorm, lambda m: (4, "layernorm"))
    swap_norms(model, "scalenorm")
    assert type(model[0]) is nfnn.ScaleNorm
