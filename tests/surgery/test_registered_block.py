"""A registered class of blocks with a forward of its own, through a whole swap."""

import copy

import pytest
import torch
from surgery_support import FF, HEADS, D
from torch import nn

from normformer_rs import nn as nfnn
from normformer_rs import surgery
from normformer_rs.surgery import swap_residuals


class Block(nn.Module):
    """Somebody's own pre-norm block."""

    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn, self.drop = nn.MultiheadAttention(D, HEADS, batch_first=True), nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(D, FF), nn.ReLU(), nn.Linear(FF, D), nn.Dropout(0.1))

    def forward(self, x):
        y = self.ln1(x)
        x = x + self.drop(self.attn(y, y, y)[0])
        return x + self.mlp(self.ln2(x))


class ConvertedBlock(Block):
    def parts(self):
        stacked = surgery.Linear("attn.in_proj_weight", ("query", "key", "value"))
        return [
            surgery.Part("self-attention", "ln1", (stacked, surgery.Linear("attn.out_proj", ("output",)))),
            surgery.Part(
                "feed-forward", "ln2", (surgery.Linear("mlp.0", ("fc1",)), surgery.Linear("mlp.2", ("fc2",))), "mlp.3"
            ),
        ]

    def heads(self):
        return self.attn.num_heads

    def forward(self, x):
        x, *_ = self.residual.step(0, x, lambda y: self.attn(y, y, y), self.drop)
        return self.residual.step(1, x, self.mlp)


def test_a_registered_block():
    model = nn.Sequential(Block(), Block()).eval()
    with pytest.raises(ValueError, match="pass example="):
        swap_residuals(model, "deepnorm")
    surgery.register_block(Block, ConvertedBlock)
    x = torch.randn(2, 3, D)
    before = model(x)
    kept = swap_residuals(model, "prenorm", init=None, example=x)
    final = copy.deepcopy(model[0].residual.stack.norm)
    torch.testing.assert_close(model(x), final(before))
    kept.undo()
    assert torch.equal(model(x), before)
    swap_residuals(model, "sandwich", example=x)
    assert type(model[0].residual.post_norm1) is nfnn.LayerNorm and model(x).shape == x.shape
    with pytest.raises(ValueError, match="has another residual scheme"):
        swap_residuals(model, "deepnorm")
    with pytest.raises(ValueError, match="subclass of Block"):
        surgery.register_block(Block, nn.Linear)
