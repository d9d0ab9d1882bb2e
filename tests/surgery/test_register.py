"""A block of the user's own: what `register_block` and `register_stack` ask for is all that a swap needs."""

import pytest
import torch
from torch import nn

from normformer_rs import InputError
from normformer_rs.surgery import Linear, Part, Row, Swaps, register_block, register_stack, swap_residuals
from normformer_rs.surgery.steps import BlockResidual

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
    register_stack(Stack, "final")


def test_its_own_scheme_changes_nothing():
    model, x = Stack().double(), torch.randn(2, 5, D, dtype=torch.float64)
    before = model(x)
    swaps = swap_residuals(model, "prenorm", init=None)
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-12)
    assert isinstance(swaps, Swaps) and "blocks.2" in str(swaps)
    swaps.undo()
    assert torch.equal(model(x), before)


def test_another_scheme_takes_its_norms_and_the_last_one():
    model, x = Stack(), torch.randn(2, 5, D)
    swap_residuals(model, "postnorm", init=None)
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
