"""LayerScale against its authors' CaiT, in f64."""

from unittest.mock import MagicMock

import pytest
import torch
from authors_support import module
from torch.testing import assert_close

from normformer_rs import nn

AUTHORS = "facebookresearch/deit", "7e160fe43f0252d17191b71cbb5826254114ea5b", "cait_models.py"
NAMES = {"attn.qkv.": "self_attn.in_proj_", "attn.proj": "self_attn.out_proj", "mlp.fc": "linear"}
NAMES |= {"blocks": "layers", "gamma_": "branch_scale"}


class Mlp(torch.nn.Module):
    """In place of timm's."""

    def __init__(self, in_features, hidden_features, act_layer, drop):
        super().__init__()
        self.fc1, self.fc2 = (
            torch.nn.Linear(in_features, hidden_features),
            torch.nn.Linear(hidden_features, in_features),
        )
        self.act = act_layer()

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


def our_name(name):
    for old, new in NAMES.items():
        name = name.replace(old, new)
    return name


@pytest.mark.parametrize("start", [1e-4, 0.1])
def test_blocks(start):
    """First scales, then outputs and gradients with random weights. Heads do not talk, and the authors' mixing goes."""
    vision = MagicMock(Mlp=Mlp, PatchEmbed=lambda **sizes: MagicMock(num_patches=5))
    beside = {"registry": MagicMock(), "layers": MagicMock(trunc_normal_=torch.nn.init.trunc_normal_)}
    beside = {f"timm__models__{name}": made for name, made in beside.items()} | {"timm": MagicMock()}
    authors = module(*AUTHORS, timm__models=MagicMock(), timm__models__vision_transformer=vision, **beside)
    options = {} if start == 1e-4 else {"init_values": start}
    blocks = [authors.LayerScale_Block(8, 2, 1.5, qkv_bias=True, **options) for _ in range(3)]
    for block in blocks:
        block.attn.proj_l = block.attn.proj_w = torch.nn.Identity()
    theirs = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(blocks), "norm": torch.nn.LayerNorm(8)}).double()
    layer = nn.TransformerEncoderLayer(
        8, 2, 12, 0.0, "gelu", batch_first=True, residual="layerscale", layerscale_init=start
    )
    ours = nn.TransformerEncoder(layer, 3).double()
    found = dict(ours.named_parameters())
    assert sorted(found) == sorted(our_name(name) for name, _ in theirs.named_parameters())
    for name, weight in theirs.named_parameters():
        if "gamma" in name:
            assert_close(found[our_name(name)], weight, rtol=0, atol=0)
        found[our_name(name)].data.copy_(torch.nn.init.normal_(weight, std=0.5))
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    y, expected = ours(x), theirs["norm"](torch.nn.Sequential(*blocks)(x))
    assert_close(y, expected, rtol=0, atol=1e-12)
    slope = torch.randn_like(y)
    gradients = torch.autograd.grad(y, [x, *(found[our_name(name)] for name, _ in theirs.named_parameters())], slope)
    assert_close(gradients, torch.autograd.grad(expected, [x, *theirs.parameters()], slope), rtol=0, atol=1e-11)
