"""Layers in torch.nn's stacks, in lists of other modules, and alone: they compute what our stacks do, or refuse."""

import copy

import pytest
import torch
from nn_support import FF, HEADS, OPTIONS, RESIDUALS, SHAPE, D, shake
from torch import nn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn

BETWEEN = {"dlcl", "denseformer", "resi-dual", "attnres", "mhc", "hyper-connections", "peri-ln", "r-fixup"}
BETWEEN |= {"value-residual", "x0-lambdas"}
"""Schemes with parts outside layers, other than a norm at the end."""
MORE = [("postnorm*1/4,prenorm", {}), ("prenorm", {"init": "ds-init"}), ("prores", {"prores_scheme": "deepnorm"})]
CASES = [*((name, OPTIONS.get(name, {})) for name in RESIDUALS), *MORE]
DEPTH = 3
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)


class Model(nn.Module):
    """A model of somebody else's, with a list of layers."""

    def __init__(self, layers, norm):
        super().__init__()
        self.blocks, self.norm = layers, norm

    def forward(self, x, *rest):
        for block in self.blocks:
            x = block(x, *rest)
        return x if self.norm is None else self.norm(x)


def layer_of(kind, residual, options, **more):
    made = getattr(nfnn, f"Transformer{kind.capitalize()}Layer")
    return made(D, HEADS, FF, 0.0, batch_first=True, norm="scalenorm", residual=residual, **options, **more)


def end_of(residual, options):
    needs = nfnn.TransformerEncoder(layer_of("encoder", residual, options), 1).norm
    return None if needs is None else nfnn.ScaleNorm(D)


def in_torchs(layer, kind, norm):
    made = getattr(nn, f"Transformer{kind.capitalize()}")
    return made(layer, DEPTH, norm, **({"enable_nested_tensor": False} if kind == "encoder" else {}))


def in_list(layer, kind, norm):
    return Model(nn.ModuleList(copy.deepcopy(layer) for _ in range(DEPTH)), norm)


def in_sequence(layer, kind, norm):
    return Model(nn.Sequential(*(copy.deepcopy(layer) for _ in range(DEPTH))), norm)


def ours(kind, residual, options):
    torch.manual_seed(2)
    return getattr(nfnn, f"Transformer{kind.capitalize()}")(layer_of(kind, residual, options), DEPTH)


@pytest.mark.parametrize("stack", [in_torchs, in_list, in_sequence])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("residual,options", CASES, ids=str)
def test_layers_take_their_places(residual, options, kind, stack):
    """First values, outputs and gradients are our stack's, of one seed; or the layer refuses by the scheme's name."""
    wanted, end = ours(kind, residual, options), end_of(residual, options)
    torch.manual_seed(2)
    found = stack(layer_of(kind, residual, options), kind, end)
    inputs = torch.randn(1 if kind == "encoder" else 2, 2, 5, D)
    if residual in BETWEEN:
        with pytest.raises(ValueError, match=f'residual "{residual}" works between layers, too'):
            found(*inputs)
        return
    theirs = [*(p for _, p in sorted(found.named_parameters(), key=order))]
    own = [*(p for _, p in sorted(wanted.named_parameters(), key=order))]
    assert len(theirs) == len(own) and all(torch.equal(a, b) for a, b in zip(theirs, own))
    for update in (1, 3):
        for model in (found, wanted):
            if any(hasattr(m, "growth") and m.growth is not None for m in model.modules()):
                nfnn.set_num_updates(model, update)
        y, expected = found(*inputs), wanted(*inputs)
        assert torch.equal(y, expected)
        for a, b in zip(*(torch.autograd.grad(y.square().sum(), p) for y, p in ((y, theirs), (expected, own)))):
            torch.testing.assert_close(a, b)
    twin = copy.deepcopy(found)
    assert torch.equal(twin(*inputs), y)


def order(named):
    name = named[0].removeprefix("blocks.").removeprefix("layers.")
    return ("0" if name[0].isdigit() else "1") + name


@pytest.mark.parametrize("residual", ["deepnorm", "sandwich", "branchnorm", "admin", "b2t"])
def test_torchs_transformer_with_our_layers(residual):
    """torch.nn.Transformer draws all matrices anew but for the scheme's."""
    options = OPTIONS.get(residual, {})
    end = end_of(residual, options)
    found = nn.Transformer(
        D,
        HEADS,
        dropout=0.0,
        batch_first=True,
        custom_encoder=in_torchs(layer_of("encoder", residual, options, decoder_layers=DEPTH), "encoder", end),
        custom_decoder=in_torchs(layer_of("decoder", residual, options), "decoder", copy.deepcopy(end)),
    )
    wanted = nfnn.Transformer(
        D, HEADS, DEPTH, DEPTH, FF, 0.0, batch_first=True, norm="scalenorm", residual=residual, **options
    )
    for name, p in found.named_parameters():
        twin = wanted.get_parameter(name)
        assert p.shape == twin.shape and (p.numel() < 200 or abs(p.std() / twin.std() - 1) < 0.3), name
    wanted.load_state_dict(found.state_dict(), strict=False)
    x, y = torch.randn(2, 2, 5, D)
    torch.testing.assert_close(found(x, y, tgt_mask=CAUSAL), wanted(x, y, tgt_mask=CAUSAL))
    own = nn.Transformer(D, HEADS, 2, 2, FF, custom_encoder=ours("encoder", "mhc", {}))
    for name, value in ours("encoder", "mhc", {}).state_dict().items():
        assert torch.equal(own.encoder.state_dict()[name], value), name
    plain = own.decoder.layers[0].linear1.weight  # torch.nn's own are drawn as ever
    assert plain.std().item() == pytest.approx((2 / (D + FF)) ** 0.5, rel=0.2)


def test_the_end_is_asked_for():
    stack = in_torchs(layer_of("encoder", "prenorm", {}), "encoder", None)
    with pytest.raises(ValueError, match=r'"prenorm" ends a stack with a norm.* give it norm=.*"scalenorm"\)\(16\)'):
        stack(torch.randn(2, 5, D))
    stack.norm = nfnn.ScaleNorm(D)
    assert stack(torch.randn(2, 5, D)).isfinite().all()
    plain = nfnn.TransformerEncoderLayer(D, HEADS, FF, norm_first=True, batch_first=True)  # torch.nn's arrangement
    assert in_torchs(plain, "encoder", None)(torch.randn(2, 5, D)).isfinite().all()


def test_layers_without_a_place_refuse_what_asks_for_one():
    x = torch.randn(2, 5, D)
    for residual in ("deepnorm", "postnorm*1/4,prenorm", "subln", "ln-scaling", "branchnorm"):
        layer = layer_of("encoder", residual, {})
        with pytest.raises(ValueError, match=r"nobody has told this layer.*give layer= and encoder_layers="):
            layer(x)
        told = layer_of("encoder", residual, {}, encoder_layers=4)
        assert told(x).isfinite().all()
    for residual in ("prenorm", "postnorm", "sandwich", "rezero", "layerscale", "olmo2"):
        assert layer_of("encoder", residual, {})(x).isfinite().all()
    assert nfnn.TransformerEncoderLayer(D, HEADS, FF, batch_first=True)(x).isfinite().all()
    loaded = layer_of("encoder", "subln", {})  # the depth is in its first values only
    loaded.load_state_dict(layer_of("encoder", "subln", {}, encoder_layers=4).state_dict())
    assert loaded(x).isfinite().all()


def test_told_layers_keep_their_places_in_a_list():
    layers = [layer_of("encoder", "ln-scaling", {}, layer=i, encoder_layers=6) for i in (3, 4, 5)]
    Model(nn.ModuleList(layers), None)
    assert [layer.place.layer for layer in layers] == [3, 4, 5] and layers[0].place.depth == 6
    told = layer_of("encoder", "ln-scaling", {}, encoder_layers=DEPTH)
    assert [layer.place.layer for layer in in_list(told, "encoder", None).blocks] == [0, 1, 2]
    with pytest.raises(ValueError, match="some have the same one, of a depth of 6: give each its own layer="):
        in_list(layer_of("encoder", "ln-scaling", {}, encoder_layers=6), "encoder", None)


def test_a_list_that_grows_loses_its_places():
    model = in_list(layer_of("encoder", "deepnorm", {}), "encoder", None)
    x = torch.randn(2, 5, D)
    assert model(x).isfinite().all()
    model.blocks[1] = model.blocks[1].double().float()  # as those who wrap or convert layers set them again
    assert model(x).isfinite().all()
    model.blocks.append(layer_of("encoder", "deepnorm", {}))
    with pytest.raises(ValueError, match='residual "deepnorm" asks for the depth'):
        model(x)
    model.blocks = nn.ModuleList(model.blocks.children())
    assert model(x).isfinite().all() and model.blocks[3].place.depth == 4


def test_weights_that_were_written_are_kept():
    layers = [layer_of("encoder", "deepnorm", {}) for _ in range(DEPTH)]
    layers[1].load_state_dict(shake(copy.deepcopy(layers[0])).state_dict())
    before = [layer.linear1.weight.clone() for layer in layers]
    Model(nn.ModuleList(copy.deepcopy(layers)).double(), None)
    model = Model(nn.ModuleList(copy.deepcopy(layer) for layer in layers), None)
    kept = [torch.equal(layer.linear1.weight, w) for layer, w in zip(model.blocks, before)]
    assert kept == [False, True, False]
    expected = nfnn.TransformerEncoder(layer_of("encoder", "deepnorm", {}), DEPTH).layers[1].place.sublayers
    assert model.blocks[1].place.sublayers == expected


def test_profiling_restarts_in_each_stack():
    """Admin's gains in torch's Transformer are ours'."""
    found = nn.Transformer(
        D,
        HEADS,
        dropout=0.0,
        batch_first=True,
        custom_encoder=in_torchs(layer_of("encoder", "admin", {}, decoder_layers=DEPTH), "encoder", None),
        custom_decoder=in_torchs(layer_of("decoder", "admin", {}), "decoder", None),
    )
    wanted = nfnn.Transformer(D, HEADS, DEPTH, DEPTH, FF, 0.0, batch_first=True, norm="scalenorm", residual="admin")
    wanted.load_state_dict(found.state_dict())
    x, y = torch.randn(2, 2, 5, D)
    assert nfnn.profile(found, x, y) == nfnn.profile(wanted, x, y)
    for (name, a), b in zip(found.named_parameters(), wanted.parameters()):
        torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{n}: {m}")


def test_shapes_of_the_table_agree():
    """Every scheme of the table is in the test above."""
    assert {name for name, _ in CASES} >= {entry["name"] for entry in nfrs.tables()["residuals"]} and SHAPE
