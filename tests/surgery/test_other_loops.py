"""`swap_residuals` in the loops and blocks of research code: each is taken with the scheme's equations, written out
here, or refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import normformer_rs as nfrs
from normformer_rs import InputError

D, FF, LAYERS = 8, 16, 3
TOKENS = torch.arange(10).view(2, 5)
ALPHA = (2 * LAYERS) ** 0.25
"""DeepNorm's α of a stack of three layers."""


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Pre(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.n1, self.n2 = Attention(), nn.LayerNorm(D), nn.LayerNorm(D)
        self.mlp = nn.Sequential(nn.Linear(D, FF), nn.GELU(), nn.Linear(FF, D))

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class Post(Pre):
    def forward(self, x):
        x = self.n1(x + self.attn(x))
        return self.n2(x + self.mlp(x))


class Model(nn.Module):
    """Embedding, blocks, norm and head. `skip`: the numbers of blocks that are left out."""

    def __init__(self, blocks, has_norm=True):
        super().__init__()
        self.embedding, self.layers, self.head = nn.Embedding(10, D), nn.ModuleList(blocks), nn.Linear(D, 4)
        self.norm = nn.LayerNorm(D) if has_norm else nn.Identity()

    order = staticmethod(list)

    def forward(self, tokens, skip=()):
        x = self.embedding(tokens)
        for i, layer in enumerate(self.order(self.layers)):
            x = x if i in skip else layer(x)
        return self.head(self.norm(x))


def made(build):
    """A model in f64 whose parameters are away from their first values."""
    torch.manual_seed(0)
    model = build().double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def swapped(model, scheme, example=TOKENS):
    """The model's table, with the scheme's parameters away from their first values."""
    table = nfrs.swap_residuals(model, scheme, init=None, example=example)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "residual" in name:
                p.add_(0.2 * torch.randn_like(p))
    return table


def near(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def deepnorm(layer, x):
    x = layer.n1(ALPHA * x + layer.attn(x))
    return layer.n2(ALPHA * x + layer.mlp(x))


@pytest.mark.parametrize("scheme", ["peri-ln", "resi-dual", "x0-lambdas"])
@pytest.mark.parametrize("how", ["method", "wrapper"])
def test_compiled_blocks_end_their_stack(scheme, how):
    """Compiled code does not see the call of the module around the stack."""
    model = made(lambda: Model(Pre() for _ in range(LAYERS)))
    swapped(model, scheme)
    expected = model(TOKENS)
    for i, layer in enumerate(model.layers):
        if how == "method":
            layer.compile(backend="eager")
        else:
            model.layers[i] = torch.compile(layer, backend="eager")
    with torch.no_grad():
        near(model(TOKENS), expected)


@pytest.mark.parametrize("scheme", ["peri-ln", "resi-dual"])
def test_a_stack_begins_once_if_some_blocks_are_compiled(scheme):
    model = made(lambda: Model(Pre() for _ in range(LAYERS)))
    swapped(model, scheme)
    expected = model(TOKENS)
    for layer in model.layers[:-1]:
        layer.compile(backend="eager")
    with torch.no_grad():
        near(model(TOKENS), expected)


@pytest.mark.parametrize("scheme", ["prenorm", "deepnorm", "rezero"])
def test_blocks_compiled_alone_share_their_code(scheme):
    """Else the ninth layer would run eagerly, since torch compiles a function eight times at most."""
    model = made(lambda: Model(Pre() for _ in range(12)))
    swapped(model, scheme)
    expected, graphs = model(TOKENS), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    for layer in model.layers:
        layer.compile(backend=backend)
    near(model(TOKENS), expected)
    # two if a norm or a factor of the first layer differs from the others'
    assert len(graphs) <= 2


def test_a_shared_block_is_not_compiled_alone_where_its_layer_counts():
    model = made(lambda: Model([Pre()] * LAYERS))
    swapped(model, "peri-ln")
    expected = model(TOKENS)
    model.layers[0].compile(backend="eager")
    try:
        with torch.no_grad():
            near(model(TOKENS), expected)  # where Dynamo gives up and runs it eagerly
    except InputError as error:
        assert "compiled alone, and peri-ln must know which layer" in str(error)


def test_a_block_that_stands_in_the_list_three_times_is_three_layers():
    model = made(lambda: Model([Pre()] * LAYERS))
    swapped(model, "deepnorm")
    x = model.embedding(TOKENS)
    for layer in model.layers:
        x = deepnorm(layer, x)
    near(model(TOKENS), model.head(x))


def test_the_order_of_layers_is_that_of_the_run():
    class Reversed(Model):
        order = staticmethod(lambda layers: [*layers][::-1])

    model = made(lambda: Reversed((Post() for _ in range(LAYERS)), has_norm=False))
    swapped(model, "prenorm")
    x = model.embedding(TOKENS)
    for layer in [*model.layers][::-1]:
        x = x + layer.attn(layer.n1(x))
        x = x + layer.mlp(layer.n2(x))
    near(model(TOKENS), model.head(model.stack_residual.norm(x)))


def test_blocks_in_two_lists_are_swapped_once():
    class Twice(Model):
        def __init__(self):
            super().__init__(Pre() for _ in range(LAYERS))
            self.every = nn.ModuleList([*self.layers])

        def forward(self, tokens):
            x = self.embedding(tokens)
            for layer in self.every:
                x = layer(x)
            return self.head(self.norm(x))

    model, once = made(Twice), made(lambda: Model(Pre() for _ in range(LAYERS)))
    swapped(model, "resi-dual")
    swapped(once, "resi-dual")
    assert {*model.state_dict()} - {*once.state_dict()} == {n for n in model.state_dict() if n.startswith("every.")}

    class Half(Twice):
        def __init__(self):
            super().__init__()
            self.every = nn.ModuleList([*self.layers[:2], Pre()])

        def forward(self, tokens):
            x = self.embedding(tokens)
            for layer in [*self.layers, self.every[2]]:
                x = layer(x)
            return self.head(self.norm(x))

    with pytest.raises(InputError, match="every shares some of its blocks with another list"):
        nfrs.swap_residuals(made(Half), "deepnorm", init=None, example=TOKENS)


class Bare(Pre):
    """A block without attention, of one sublayer."""

    def forward(self, x):
        return x + self.mlp(self.n2(x))


@pytest.mark.parametrize("scheme", ["deepnorm", "peri-ln"])
def test_a_stack_has_layers_of_one_form(scheme):
    def mixed():
        return made(lambda: Model([Pre(), Bare(), Pre()]))

    with pytest.raises(InputError, match=r"the stream goes from layers\.0 straight to layers\.1, whose layers are not"):
        nfrs.swap_residuals(mixed(), scheme, init=None, example=TOKENS)
    model = mixed()
    swapped(model, "postnorm")  # it treats each layer for itself
    x = model.embedding(TOKENS)
    for layer in model.layers:
        x = x if isinstance(layer, Bare) else layer.n1(x + layer.attn(x))
        x = layer.n2(x + layer.mlp(x))
    near(model(TOKENS), model.head(x))

    class TwoLists(Model):  # of which one runs several times
        def __init__(self):
            super().__init__([Pre()])
            self.core = nn.ModuleList([Pre()])

        def forward(self, tokens):
            x = self.layers[0](self.embedding(tokens))
            for _ in range(2):
                x = self.core[0](x)
            return self.head(self.norm(x))

    with pytest.raises(InputError, match=r"the stream goes from layers\.0 straight to core\.0"):
        nfrs.swap_residuals(made(TwoLists), scheme, init=None, example=TOKENS)


def test_the_last_norm_goes_under_all_its_names():
    class Named(Model):
        def __init__(self):
            super().__init__(Pre() for _ in range(LAYERS))
            self.out = nn.Sequential(self.norm, self.head)

        def forward(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.out(x)

    model = made(Named)
    before = model(TOKENS)
    table = swapped(model, "deepnorm")
    x = model.embedding(TOKENS)
    for layer in model.layers:
        x = deepnorm(layer, x)
    near(model(TOKENS), model.head(x))
    table.undo()
    assert torch.equal(model(TOKENS), before) and model.out[0] is model.norm


def test_a_last_norm_that_also_norms_the_embeddings_is_not_removed():
    class Early(Model):
        def forward(self, tokens):
            x = self.norm(self.embedding(tokens))
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x))

    model = made(lambda: Early(Pre() for _ in range(LAYERS)))
    before = model(TOKENS)
    with pytest.raises(InputError, match=r"deepnorm removes norm, .* calls it before the first layer"):
        nfrs.swap_residuals(model, "deepnorm", init=None, example=TOKENS)
    assert torch.equal(model(TOKENS), before)
    swapped(model, "sandwich")


def test_a_block_that_goes_another_way_than_in_the_run_is_an_error():
    """DETR's blocks add positions to what queries and keys read, if they get any."""

    class Block(Post):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(D, 2, batch_first=True)

        def forward(self, x, positions=None):
            q = x if positions is None else x + positions
            x = self.n1(x + self.attn(q, q, x, need_weights=False)[0])
            return self.n2(x + self.mlp(x))

    class Detr(Model):
        def forward(self, tokens, positions=None):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x, positions)
            return self.head(x)

    positions = torch.randn(2, 5, D, dtype=torch.float64)
    model = made(lambda: Detr((Block() for _ in range(LAYERS)), has_norm=False))
    swapped(model, "deepnorm")
    with pytest.raises(InputError, match="adds to its residual stream as it was before an earlier addition"):
        model(TOKENS, positions)
    model = made(lambda: Detr((Block() for _ in range(LAYERS)), has_norm=False))
    swapped(model, "deepnorm", {"tokens": TOKENS, "positions": positions})
    x = model.embedding(TOKENS)
    for layer in model.layers:
        q = x + positions
        x = layer.n1(ALPHA * x + layer.attn(q, q, x, need_weights=False)[0])
        x = layer.n2(ALPHA * x + layer.mlp(x))
    near(model(TOKENS, positions), model.head(x))


def test_a_condition_in_the_feed_forward_is_no_memory():
    class Film(Pre):
        def __init__(self):
            super().__init__()
            self.condition, self.up, self.down = nn.Linear(4, FF), nn.Linear(D, FF), nn.Linear(FF, D)

        def forward(self, x, c):
            x = x + self.attn(self.n1(x))
            return x + self.down(F.gelu(self.up(self.n2(x)) + self.condition(c)[:, None]))

    class Conditioned(Model):
        def forward(self, tokens, c):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x, c)
            return self.head(self.norm(x))

    c = torch.randn(2, 4, dtype=torch.float64)
    model = made(lambda: Conditioned(Film() for _ in range(LAYERS)))
    swapped(model, "deepnorm", {"tokens": TOKENS, "c": c})
    x = model.embedding(TOKENS)
    for layer in model.layers:
        x = layer.n1(ALPHA * x + layer.attn(x))
        x = layer.n2(ALPHA * x + layer.down(F.gelu(layer.up(x) + layer.condition(c)[:, None])))
    near(model(TOKENS, c), model.head(x))


def test_norms_outside_the_tree_of_modules_are_not_removed():
    class Listed(Pre):
        def forward(self, x):
            if "subs" not in vars(self):
                vars(self)["subs"] = [(self.n1, self.attn), (self.n2, self.mlp)]
            for norm, function in self.subs:
                x = x + function(norm(x))
            return x

    model = made(lambda: Model(Listed() for _ in range(LAYERS)))
    before = model(TOKENS)
    with pytest.raises(InputError, match="Model still calls a LayerNorm that rezero removes"):
        nfrs.swap_residuals(model, "rezero", init=None, example=TOKENS)
    assert torch.equal(model(TOKENS), before)


def test_what_follows_a_last_layer_that_did_not_run():
    model = made(lambda: Model((Post() for _ in range(LAYERS)), has_norm=False))
    swapped(model, "prenorm")
    with pytest.raises(InputError, match="the last of 3 layers did not run, and prenorm does something after it"):
        model(TOKENS, (2,))

    class Loss(Model):
        def forward(self, tokens, only_loss=False):
            return self.embedding(tokens).mean() if only_loss else super().forward(tokens)

    model = made(lambda: Loss(Pre() for _ in range(LAYERS)))
    swapped(model, "mhc")
    near(model(TOKENS, True), model.embedding(TOKENS).mean())

    class Dictionary(nn.Module):  # nanoGPT's layout, whose dictionary is never called
        def __init__(self):
            super().__init__()
            parts = {"e": nn.Embedding(10, D), "h": nn.ModuleList(Pre() for _ in range(LAYERS)), "n": nn.LayerNorm(D)}
            self.parts, self.head = nn.ModuleDict(parts), nn.Linear(D, 4)

        def forward(self, tokens, skip=()):
            x = self.parts["e"](tokens)
            for i, layer in enumerate(self.parts["h"]):
                x = x if i in skip else layer(x)
            return self.head(self.parts["n"](x))

    model = made(Dictionary)
    swapped(model, "peri-ln")
    for skip in ((0,), (2,), ()):
        x = model.stack_residual.embedding_norm(model.parts["e"](TOKENS))
        for i, layer in enumerate(model.parts["h"]):
            if i not in skip:
                x = x + layer.residual.post_norm1(layer.attn(layer.n1(x)))
                x = x + layer.residual.post_norm2(layer.mlp(layer.n2(x)))
        near(model(TOKENS, skip), model.head(model.parts["n"](x)))


def test_a_shared_block_runs_as_often_as_in_the_run():
    class Looped(Model):
        def forward(self, tokens, times=3):
            x = self.embedding(tokens)
            for _ in range(times):
                x = self.layers[0](x)
            return self.head(self.norm(x))

    model = made(lambda: Looped([Pre()]))
    swapped(model, "resi-dual")
    with pytest.raises(InputError, match="a block ran more than 3 times"):
        model(TOKENS, 5)
    model = made(lambda: Looped([Pre()]))
    swapped(model, "peri-ln")  # the model's own norm ends it
    assert model(TOKENS, 5).isfinite().all()


def test_checkpoints_inside_a_block():
    """Reentrant ones would lose gradients of the branch; the others recompute the same."""

    class Checkpointed(Pre):
        form = None

        def attend(self, x, positions):
            q = self.n1(x + positions)
            return x + self.attn(q)

        def forward(self, x):
            positions = torch.ones(D, dtype=x.dtype).expand_as(x)
            form = {} if self.form is None else {"use_reentrant": self.form}
            x = checkpoint(self.attend, x, positions, **form) if form else self.attend(x, positions)
            return x + self.mlp(self.n2(x))

    class Read(Checkpointed):  # the addition of positions reads the stream
        def attend(self, x, positions):
            return self.n1(x + self.attn(x + positions))

        def forward(self, x):
            positions = torch.ones(D, dtype=x.dtype).expand_as(x)
            form = {} if self.form is None else {"use_reentrant": self.form}
            x = checkpoint(self.attend, x, positions, **form) if form else self.attend(x, positions)
            return self.n2(x + self.mlp(x))

    model = made(lambda: Model((Read() for _ in range(LAYERS)), has_norm=False)).train()
    swapped(model, "deepnorm")
    gradients = []
    for form in (None, False):
        Read.form = form
        model.zero_grad()
        model(TOKENS).sin().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    near(gradients[1], gradients[0])
    Read.form = True
    with pytest.raises(InputError, match="uses its residual stream within a reentrant checkpoint"):
        model(TOKENS)

    class Branch(Pre):  # only the branch is checkpointed
        is_on = False

        def forward(self, x):
            x = x + self.attn(self.n1(x))
            branch = lambda z: self.mlp(self.n2(z))  # noqa: E731
            return x + (checkpoint(branch, x, use_reentrant=True) if self.is_on else branch(x))

    model = made(lambda: Model(Branch() for _ in range(3))).train()
    swapped(model, "sandwich")
    Branch.is_on = True
    with pytest.raises(InputError, match="within a reentrant checkpoint"):
        model(TOKENS)

    class Frozen(Pre):
        def forward(self, x):
            with torch.no_grad():
                x = x + self.attn(self.n1(x))
            return x + self.mlp(self.n2(x))

    model = made(lambda: Model(Frozen() for _ in range(LAYERS))).train()
    swapped(model, "sandwich")
    model(TOKENS).sum().backward()


def test_what_cannot_be_told_apart_is_refused():
    class Injected(Pre):
        def __init__(self):
            super().__init__()
            self.value = nn.Linear(D, D)

        def forward(self, x, x0):
            x = self.n1(x + self.attn(x) * self.value(x0))
            return self.n2(x + self.mlp(x))

    class Aliased(Model):
        def forward(self, tokens):
            x = x0 = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x, x0)
            return self.head(x)

    with pytest.raises(InputError, match=r"layers\.0, an Injected, gets its input as its argument x0, too"):
        nfrs.swap_residuals(made(lambda: Aliased(Injected() for _ in range(3))), "prenorm", init=None, example=TOKENS)


def test_a_branch_may_read_what_an_earlier_one_has_made():
    """Its norm is still its own."""

    class Reused(Pre):
        def __init__(self):
            super().__init__()
            self.of_attention = nn.Linear(D, D)

        def forward(self, x):
            a = self.attn(self.n1(x))
            x = x + a
            return x + self.mlp(self.n2(x) + self.of_attention(a))

    model = made(lambda: Model(Reused() for _ in range(LAYERS)))
    swapped(model, "postnorm")
    x = model.embedding(TOKENS)
    for layer in model.layers:
        a = layer.attn(x)
        x = layer.n1(x + a)
        x = layer.n2(x + layer.mlp(x + layer.of_attention(a)))
    near(model(TOKENS), model.head(x))


def test_modules_keep_attributes_of_any_name():
    class Norm(nn.LayerNorm):
        def __init__(self):
            super().__init__(D)
            self.kind, self.how, self.names = "ln", 2, ["a"]

    class Block(Pre):
        def __init__(self):
            super().__init__()
            self.kind, self.how, self.names, self.n1 = "local", 1, ("x",), Norm()

    model = made(lambda: Model(Block() for _ in range(LAYERS)))
    swapped(model, "postnorm")
    assert model.layers[0].kind == "local" and model.layers[0].n1.names == ["a"]
    near(copy.deepcopy(model)(TOKENS), model(TOKENS))


def test_factors_of_an_addition_are_the_branchs():
    class Scaled(Pre):
        def forward(self, x):
            x = torch.add(x, self.attn(self.n1(x)), alpha=0.3)
            return x + 0.3 * self.mlp(self.n2(x))

    model = made(lambda: Model(Scaled() for _ in range(LAYERS)))
    assert "the branch's factor 0.3 gone" in str(swapped(model, "prenorm"))
    x = model.embedding(TOKENS)
    for layer in model.layers:
        x = x + layer.attn(layer.n1(x))
        x = x + layer.mlp(layer.n2(x))
    near(model(TOKENS), model.head(model.norm(x)))


def test_a_second_stream_is_named():
    """MMDiT's blocks have one for the text, which a swap leaves as it is."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.of_x, self.of_y, self.out_x, self.out_y = (nn.Linear(D, n) for n in (3 * D, 3 * D, D, D))
            self.norm_x, self.norm_y = nn.LayerNorm(D), nn.LayerNorm(D)

        def forward(self, x, y):
            both = torch.cat([self.of_x(self.norm_x(x)), self.of_y(self.norm_y(y))], 1)
            q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in both.chunk(3, -1))
            a, b = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).split([x.shape[1], y.shape[1]], 1)
            return x + self.out_x(a), y + self.out_y(b)

    class Mixed(Model):
        def forward(self, tokens):
            x, y = self.embedding(tokens), self.embedding(tokens[:, :3])
            for layer in self.layers:
                x, y = layer(x, y)
            return self.head(self.norm(x)), self.head(y)

    model = made(lambda: Mixed(Two() for _ in range(LAYERS)))
    with pytest.warns(UserWarning, match="leaves y, a second stream of the blocks in layers, as it is"):
        table = nfrs.swap_residuals(model, "deepnorm", init=None, example=TOKENS)
    assert "its second stream y stays as it is" in str(table)
    assert model(TOKENS)[0].isfinite().all()
