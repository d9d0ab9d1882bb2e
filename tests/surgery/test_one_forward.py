"""Modules whose one forward runs through all layers, as x-transformers' and vit-pytorch's do.

What every scheme computes in them is in test_second_route.py, by the zoo's models "in a part".
"""

import copy
import io

import pytest
import torch
from torch import nn
from zoo import Around, Attention, GainedNorm, Lucidrains, Stack, Within, XTransformers, mlp

from normformer_rs import InputError, swap_norms, swap_residuals

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = torch.arange(3, 11).repeat(2, 1)


class Block(nn.Module):
    """A layer of Lucidrains as a block."""

    def __init__(self):
        super().__init__()
        self.attn, self.ff = Within(Attention()), Within(mlp())

    def forward(self, x):
        x = self.attn(x) + x
        return self.ff(x) + x


def made():
    torch.manual_seed(0)
    return Around(Lucidrains, embeds=False).eval()


def test_the_table_has_a_row_for_each_layer():
    rows = [*swap_residuals(made(), "deepnorm", init=None, example=TOKENS)]
    assert [row.name for row in rows] == ["loop[0]", "loop[1]", "loop[2]", "loop.norm"]
    assert rows[0].new == "Lucidrains, deepnorm" and "heads" in rows[0].note
    assert rows[3][1:] == ("LayerNorm", "Identity", "last norm removed")


@pytest.mark.parametrize("scheme", ["deepnorm", "ds-init", "ln-scaling"])
def test_first_values_are_those_of_blocks(scheme):
    """A layer of a loop is drawn as the block with the same parts is, with the same number and depth."""
    loop, blocks = made(), Stack(Block).eval()
    given = {"init": "ds-init"} if scheme == "ds-init" else {"init": "scheme"}
    for model in (loop, blocks):
        torch.manual_seed(1)
        swap_residuals(model, "prenorm" if scheme == "ds-init" else scheme, example=TOKENS, **given)
    for pair, block in zip(loop.loop.layers, blocks.layers):
        for own, other in zip(pair, (block.attn, block.ff)):
            for p, q in zip(own.parameters(), other.parameters(), strict=True):
                assert torch.equal(p, q)


@pytest.mark.parametrize("scheme", ["value-residual", "mhc", "branchnorm", "dlcl"])
def test_copies_and_files_have_the_scheme(scheme):
    model = made()
    before = model(TOKENS)
    swap = swap_residuals(model, scheme, init=None, example=TOKENS)
    twin, file = copy.deepcopy(model), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    other = made()
    swap_residuals(other, scheme, init=None, example=TOKENS)
    with torch.no_grad():
        for one in (model, twin, loaded):
            for p in one.parameters():
                p.add_(torch.arange(p.numel()).view(p.shape).sin() * 0.05)
    other.load_state_dict(model.state_dict())
    expected = model(TOKENS)
    assert not torch.allclose(expected, before)
    assert all(torch.equal(one(TOKENS), expected) for one in (twin, loaded, other))
    with pytest.raises(InputError, match="Lucidrains has another residual scheme"):
        swap_residuals(model, "deepnorm", init=None, example=TOKENS)
    swap.undo()
    assert [*model.state_dict()] == [*made().state_dict()]


def test_undo_brings_the_outputs_back():
    model = made()
    before = model(TOKENS)
    swap_residuals(model, "postnorm", init=None, example=TOKENS).undo()
    assert torch.equal(model(TOKENS), before)


def test_a_loop_in_the_model_itself_is_refused_and_unchanged():
    """Its stream begins within the forward, with an embedding."""
    torch.manual_seed(0)
    model = Lucidrains().eval()
    before = model(TOKENS)
    with pytest.raises(InputError, match="holds no blocks that add branches"):
        swap_residuals(model, "deepnorm", init=None, example=TOKENS)
    assert torch.equal(model(TOKENS), before)


def test_sublayers_that_do_not_repeat_are_refused():
    model = made()
    model.loop.layers[1] = nn.ModuleList([Within(mlp()), Within(Attention())])
    with pytest.raises(InputError):
        swap_residuals(model.eval(), "deepnorm", init=None, example=TOKENS)


def test_a_norm_around_torchs_is_one_norm():
    torch.manual_seed(0)
    model = Around(XTransformers, norm=GainedNorm).eval()
    with torch.no_grad():
        for norm in (m for m in model.modules() if isinstance(m, GainedNorm)):
            norm.gamma.uniform_(0.5, 1.5)
    before = model(TOKENS)
    rows = swap_norms(model, "layernorm", example=TOKENS)
    assert [row.old for row in rows].count("GainedNorm") == 6
    torch.testing.assert_close(model(TOKENS), before)
    assert not any(isinstance(m, GainedNorm) for m in model.modules())
