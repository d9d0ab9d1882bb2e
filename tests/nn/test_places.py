"""Layers in torch.nn's stacks, in lists of other modules, and alone: told their places, they compute what our stacks
do; else they refuse where their scheme asks for a place."""

import copy

import pytest
import torch
from nn_support import FF, HEADS, OPTIONS, RESIDUALS, SHAPE, D, shake
from torch import nn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn

BETWEEN = {"dlcl", "denseformer", "resi-dual", "attnres", "mhc", "hyper-connections", "mhc-lite", "peri-ln", "r-fixup"}
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


def in_torchs(layer, kind, norm, place=True):
    made = getattr(nn, f"Transformer{kind.capitalize()}")
    stack = made(layer, DEPTH, norm, **({"enable_nested_tensor": False} if kind == "encoder" else {}))
    if place:
        nfnn.place_layers(stack, init=True)
    return stack


def in_list(layer, kind, norm, place=True):
    model = Model(nn.ModuleList(copy.deepcopy(layer) for _ in range(DEPTH)), norm)
    if place:
        nfnn.place_layers(model.blocks, init=True)
    return model


def in_sequence(layer, kind, norm, place=True):
    model = Model(nn.Sequential(*(copy.deepcopy(layer) for _ in range(DEPTH))), norm)
    if place:
        nfnn.place_layers([*model.blocks], init=True)
    return model


def ours(kind, residual, options):
    torch.manual_seed(2)
    return getattr(nfnn, f"Transformer{kind.capitalize()}")(layer_of(kind, residual, options), DEPTH)


@pytest.mark.parametrize("stack", [in_torchs, in_list, in_sequence])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("residual,options", CASES, ids=str)
@pytest.mark.one_in(test=42, all=30)
def test_layers_take_their_places(residual, options, kind, stack):
    """First values, outputs and gradients are our stack's, of one seed; or the layer refuses by the scheme's name."""
    wanted, end = ours(kind, residual, options), end_of(residual, options)
    inputs = torch.randn(1 if kind == "encoder" else 2, 2, 5, D)
    if residual in BETWEEN:
        refusal = pytest.raises(ValueError, match=f'residual "{residual}" works between layers, too')
        with refusal:
            stack(layer_of(kind, residual, options), kind, end)
        with refusal:
            stack(layer_of(kind, residual, options), kind, end, place=False)(*inputs)
        return
    torch.manual_seed(2)
    found = stack(layer_of(kind, residual, options), kind, end)
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
    """torch.nn.Transformer draws all matrices of given stacks; placed afterwards, the layers have the scheme's."""
    options = OPTIONS.get(residual, {})
    end = end_of(residual, options)
    found = nn.Transformer(
        D,
        HEADS,
        dropout=0.0,
        batch_first=True,
        custom_encoder=in_torchs(layer_of("encoder", residual, options, decoder_layers=DEPTH), "encoder", end, False),
        custom_decoder=in_torchs(layer_of("decoder", residual, options), "decoder", copy.deepcopy(end), False),
    )
    nfnn.place_layers(found.encoder, init=True)
    nfnn.place_layers(found.decoder, init=True)
    wanted = nfnn.Transformer(
        D, HEADS, DEPTH, DEPTH, FF, 0.0, batch_first=True, norm="scalenorm", residual=residual, **options
    )
    for name, p in found.named_parameters():
        twin = wanted.get_parameter(name)
        assert p.shape == twin.shape and (p.numel() < 200 or abs(p.std() / twin.std() - 1) < 0.3), name
    wanted.load_state_dict(found.state_dict(), strict=False)
    x, y = torch.randn(2, 2, 5, D)
    torch.testing.assert_close(found(x, y, tgt_mask=CAUSAL), wanted(x, y, tgt_mask=CAUSAL))


def test_torchs_transformer_with_our_stack():
    own, wanted = (
        nn.Transformer(D, HEADS, 2, 2, FF, custom_encoder=ours("encoder", "mhc", {})),
        ours("encoder", "mhc", {}),
    )
    for stack in (own.encoder, wanted):
        torch.manual_seed(3)
        stack.reset_parameters()
    for name, value in wanted.state_dict().items():
        assert torch.equal(own.encoder.state_dict()[name], value), name
    plain = own.decoder.layers[0].linear1.weight  # torch.nn's own are drawn as ever
    assert plain.std().item() == pytest.approx((2 / (D + FF)) ** 0.5, rel=0.2)


def test_the_end_is_asked_for():
    stack = in_torchs(layer_of("encoder", "prenorm", {}), "encoder", None, False)
    with pytest.raises(ValueError, match=r'"prenorm" ends a stack with a norm.* give it norm=.*"scalenorm"\)\(16\)'):
        nfnn.place_layers(stack, init=True)
    stack.norm = nfnn.ScaleNorm(D)
    nfnn.place_layers(stack, init=True)
    assert stack(torch.randn(2, 5, D)).isfinite().all()
    plain = nfnn.TransformerEncoderLayer(D, HEADS, FF, norm_first=True, batch_first=True)  # torch.nn's arrangement
    assert in_torchs(plain, "encoder", None)(torch.randn(2, 5, D)).isfinite().all()


ASKS = r"nobody has told this layer: build normformer_rs.nn's stack.*place_layers\(layers, init=True\).*or give layer="


def test_layers_without_a_place_refuse_what_asks_for_one():
    x = torch.randn(2, 5, D)
    for residual in ("deepnorm", "postnorm*1/4,prenorm", "subln", "ln-scaling", "branchnorm"):
        layer = layer_of("encoder", residual, {})
        with pytest.raises(ValueError, match=ASKS):
            layer(x)
        for stack in (in_torchs, in_list, in_sequence):
            with pytest.raises(ValueError, match=ASKS):
                stack(layer, "encoder", nfnn.ScaleNorm(D), place=False)(x)
        told = layer_of("encoder", residual, {}, layer=1, encoder_layers=4)
        assert told(x).isfinite().all() and layer_of("encoder", residual, {}, encoder_layers=1)(x).isfinite().all()
    for residual in ("prenorm", "postnorm", "sandwich", "rezero", "layerscale", "olmo2"):
        assert layer_of("encoder", residual, {})(x).isfinite().all()
    assert nfnn.TransformerEncoderLayer(D, HEADS, FF, batch_first=True)(x).isfinite().all()


@pytest.mark.parametrize("residual,options", CASES, ids=str)
@pytest.mark.one_in(test=3, all=2)
def test_a_depth_without_a_number(residual, options):
    """It is enough where the number changes nothing, initial values included."""
    x = torch.randn(2, 5, D)
    if residual in BETWEEN:
        return
    alone = layer_of("encoder", residual, options, encoder_layers=4)
    outputs = []
    for i in range(4):
        torch.manual_seed(2)
        told = layer_of("encoder", residual, options, encoder_layers=4, layer=i)
        outputs.append((told(x), [*told.parameters()]))
    same = all(torch.equal(y, outputs[0][0]) and all(map(torch.equal, p, outputs[0][1])) for y, p in outputs)
    if same:
        assert alone(x).isfinite().all() or "," in residual
    else:
        with pytest.raises(ValueError, match="asks for the layer's number, and nobody"):
            alone(x)


def test_told_layers_keep_their_places_in_a_list():
    layers = [layer_of("encoder", "ln-scaling", {}, layer=i, encoder_layers=6) for i in (3, 4, 5)]
    Model(nn.ModuleList(layers), None)
    assert [layer.place.layer for layer in layers] == [3, 4, 5] and layers[0].place.depth == 6
    with pytest.raises(ValueError, match="arguments of layer 0 gave a depth of 6, and the stack has 3 layers"):
        nfnn.place_layers(layers, init=True)
    told = layer_of("encoder", "ln-scaling", {}, encoder_layers=DEPTH)
    assert [layer.place.layer for layer in in_list(told, "encoder", None).blocks] == [0, 1, 2]


def test_a_list_that_grows_is_told_again():
    model = in_list(layer_of("encoder", "deepnorm", {}), "encoder", None)
    x = torch.randn(2, 5, D)
    model.blocks[1] = model.blocks[1].double().float()  # as those who wrap or convert layers set them again
    assert model(x).isfinite().all()
    model.blocks.append(layer_of("encoder", "deepnorm", {}))
    with pytest.raises(ValueError, match='residual "deepnorm" asks for the depth'):
        model(x)
    before = copy.deepcopy(model.state_dict())
    nfnn.place_layers(model.blocks, init=False)
    assert model(x).isfinite().all() and {layer.place.depth for layer in model.blocks} == {4}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    wanted = nfnn.TransformerEncoder(layer_of("encoder", "deepnorm", {}), 4)
    wanted.load_state_dict({name.replace("blocks", "layers"): value for name, value in before.items()})
    assert torch.equal(model(x), wanted(x))


@pytest.mark.parametrize("residual,options", CASES, ids=str)
@pytest.mark.one_in(test=4, all=2)
def test_placed_again_weights_and_t_stay(residual, options):
    if residual in BETWEEN:
        return
    model = in_list(layer_of("encoder", residual, options), "encoder", None)
    shake(model)
    if any("t" in m._buffers for m in model.modules()):
        nfnn.set_num_updates(model, 7)
    before = copy.deepcopy(model.state_dict())
    nfnn.place_layers(model.blocks, init=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    nfnn.place_layers(model.blocks, init=True)
    assert all(
        not torch.equal(b.linear1.weight, before[f"blocks.{i}.linear1.weight"]) for i, b in enumerate(model.blocks)
    )
    assert all(m._buffers["t"] == 1 for m in model.modules() if "t" in m._buffers)


def test_stages_and_shared_layers():
    x = torch.randn(2, 5, D)

    def told(layer, i, n):
        other = layer_of("encoder", layer.place.config.residual, {}, layer=i, encoder_layers=n)
        other.load_state_dict(layer.state_dict())
        return other

    for residual in ("deepnorm", "ln-scaling", "admin-const", "prores"):
        layers = [layer_of("encoder", residual, {}) for _ in range(6)]
        model = nn.Sequential(nn.Sequential(*layers[:2]), nn.ModuleList(layers[2:3]), nn.Sequential(*layers[3:]))
        nfnn.place_layers(model, init=True)
        for i, layer in enumerate(layers):
            assert layer.place.layer == i and torch.equal(layer(x), told(layer, i, 6)(x))
        shared = nn.ModuleList([*layers[:3]] * 2)
        if residual in ("deepnorm", "admin-const"):
            for blocks in ([layers[0]] * 6, shared):
                nfnn.place_layers(blocks, init=False)
                assert all(torch.equal(layer(x), told(layer, 0, 6)(x)) for layer in blocks)
        else:
            before = [layer.place for layer in layers]
            with pytest.raises(
                ValueError, match="asks for each layer's number, and of the 6 layers some are one module"
            ):
                nfnn.place_layers(shared, init=False)
            assert [layer.place for layer in layers] == before


def test_the_other_stacks_depth_is_the_arguments():
    encoder = nn.ModuleList(layer_of("encoder", "deepnorm", {}, decoder_layers=9) for _ in range(2))
    decoder = nn.ModuleList(layer_of("decoder", "deepnorm", {}, encoder_layers=9) for _ in range(2))
    alone = nn.ModuleList(layer_of("decoder", "deepnorm", {}) for _ in range(2))
    for layers in (encoder, decoder, alone, decoder):
        nfnn.place_layers(layers, init=True)
    depths = [
        (i.place.config.encoder_layers, i.place.config.decoder_layers) for i in (encoder[0], decoder[0], alone[0])
    ]
    assert depths == [(2, 9), (9, 2), (2, 2)]


@pytest.mark.parametrize(
    "layers,message",
    [
        (list, "needs the layers of a stack; got none"),
        (lambda: [nn.Linear(2, 2)], "entry 0 is a Linear: give the layers themselves"),
        (
            lambda: [layer_of("encoder", "deepnorm", {}), layer_of("encoder", "prenorm", {})],
            "entry 1 differs from entry 0",
        ),
        (
            lambda: [layer_of("encoder", "deepnorm", {}), layer_of("decoder", "deepnorm", {})],
            "entry 1 differs from entry 0",
        ),
        (lambda: ours("encoder", "deepnorm", {}), "got a TransformerEncoder: stacks of normformer_rs.nn place their"),
        (lambda: weight_normed(), "the weight of a Linear is computed from other parameters"),
    ],
    ids=["none", "linear", "two schemes", "two kinds", "ours", "old weight_norm"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_what_cannot_be_placed(layers, message):
    with pytest.raises(nfrs.InputError, match=message):
        nfnn.place_layers(layers(), init=True)


def weight_normed():
    layer = layer_of("encoder", "deepnorm", {})
    nn.utils.weight_norm(layer.linear1)
    return [layer]


def test_parametrised_weights_get_initial_values():
    from torch.nn.utils.parametrizations import weight_norm

    torch.manual_seed(2)
    plain = nfnn.TransformerEncoder(layer_of("encoder", "deepnorm", {}), DEPTH)
    torch.manual_seed(2)
    layer = layer_of("encoder", "deepnorm", {})
    for module, name in ((layer.linear1, "weight"), (layer.self_attn, "in_proj_weight")):
        weight_norm(module, name)
    stack = nfnn.TransformerEncoder(layer, DEPTH)
    for a, b in zip(stack.layers, plain.layers):
        torch.testing.assert_close(a.linear1.weight, b.linear1.weight)
        torch.testing.assert_close(a.self_attn.in_proj_weight, b.self_attn.in_proj_weight)
    nn.utils.parametrize.register_parametrization(layer.linear2, "weight", NoInverse())
    with pytest.raises(nfrs.InputError, match=r"weight of a .* is computed from other parameters"):
        nfnn.TransformerEncoder(layer, DEPTH)


class NoInverse(nn.Module):
    def forward(self, weight):
        return weight * 2


WAYS = {
    "a copy added": lambda layers: [*layers, copy.deepcopy(layers[1])],
    "one twice": lambda layers: [layers[0], layers[1], layers[1], layers[2]],
    "without the first": lambda layers: layers[1:],
    "without the last": lambda layers: layers[:-1],
    "reversed": lambda layers: layers[::-1],
}


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("residual,options", CASES, ids=str)
@pytest.mark.one_in(test=35, all=23)
def test_a_stack_whose_layers_were_changed(residual, options, kind):
    """It runs, or names the scheme."""
    inputs = torch.randn(1 if kind == "encoder" else 2, 2, 5, D)
    for way in WAYS.values():
        stack = ours(kind, residual, options)
        stack.layers = nn.ModuleList(way([*stack.layers]))
        is_wired = residual in ("dlcl", "denseformer", "resi-dual", "attnres", "mhc", "hyper-connections", "mhc-lite")
        if is_wired or residual in ("value-residual", "x0-lambdas"):
            with pytest.raises(
                nfrs.InputError, match=f'residual "{residual}" connects layers 0 … 2, one after the other'
            ):
                stack(*inputs)
        else:
            assert stack(*inputs).isfinite().all()


def test_layers_taken_out_of_a_growing_stack():
    stack, x = ours("encoder", "branchnorm", {}), torch.randn(2, 5, D)
    nfnn.set_num_updates(stack, 9)
    layers = [*stack.layers]
    with pytest.raises(nfrs.InputError, match="grows with t, which the stack of this layer holds"):
        layers[0](x)
    before = copy.deepcopy(stack.layers.state_dict())
    nfnn.place_layers(layers, init=False)
    assert all(torch.equal(v, before[k]) for k, v in nn.ModuleList(layers).state_dict().items() if k in before)
    model = Model(nn.ModuleList(layers), stack.norm)
    nfnn.set_num_updates(model, 9)
    assert torch.equal(model(x), stack(x))


def test_profiling_restarts_in_each_stack():
    """Admin's gains in torch's Transformer are ours'."""
    found = nn.Transformer(
        D,
        HEADS,
        dropout=0.0,
        batch_first=True,
        custom_encoder=in_torchs(layer_of("encoder", "admin", {}, decoder_layers=DEPTH), "encoder", None, False),
        custom_decoder=in_torchs(layer_of("decoder", "admin", {}), "decoder", None, False),
    )
    x, y = torch.randn(2, 2, 5, D)
    with pytest.raises(nfrs.InputError, match=r"profiling needs the number of each layer.*place_layers"):
        nfnn.profile(found, x, y)
    nfnn.place_layers(found.encoder, init=True)
    nfnn.place_layers(found.decoder, init=True)
    wanted = nfnn.Transformer(D, HEADS, DEPTH, DEPTH, FF, 0.0, batch_first=True, norm="scalenorm", residual="admin")
    wanted.load_state_dict(found.state_dict())
    assert nfnn.profile(found, x, y) == nfnn.profile(wanted, x, y)
    for (name, a), b in zip(found.named_parameters(), wanted.parameters()):
        torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{n}: {m}")


def test_shapes_of_the_table_agree():
    """Every scheme of the table is in the test above."""
    assert {name for name, _ in CASES} >= {entry["name"] for entry in nfrs.tables()["residuals"]} and SHAPE
