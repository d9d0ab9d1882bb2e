"""Modules whose one forward runs through all layers, as x-transformers' and vit-pytorch's do.

What every scheme computes in them is in test_second_route.py, by the zoo's models "in a part".
"""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from block_models import D
from torch import nn
from zoo import Around, Attention, GainedNorm, Lucidrains, Stack, Within, XTransformers, mlp

from normformer_rs import InputError, swap_norms, swap_residuals, tables

SCHEMES = [entry["name"] for entry in tables()["residuals"]]

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


class Embeds(Lucidrains):
    """The model of `made`, but its loop's forward also embeds the tokens and computes the logits. `begin`: what the
    stream begins with: the embedding, a sum with it, or the output of a dropout."""

    def __init__(self, begin="embedding"):
        super().__init__()
        self.positions, self.dropout, self.begin = nn.Parameter(torch.randn(8, D)), nn.Dropout(0.2), begin

    def begun(self, x):
        """Returns the stream's first tensor, from the embeddings."""
        if self.begin == "dropout":
            return self.dropout(x + self.positions)
        return x if self.begin == "embedding" else F.dropout(x * 3.0 + self.positions, 0.1, self.training)

    def run(self, x):
        """Returns the stream's last tensor."""
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return x

    def forward(self, tokens=None, embedded=None):
        return self.head(self.norm(self.run(self.begun(self.embed(tokens) if embedded is None else embedded))))


def alike(begin="embedding"):
    """The model `made`, and one that embeds in the same forward, with its weights."""
    apart, whole = made(), Embeds(begin).eval()
    weights = {key.removeprefix("loop."): value for key, value in apart.state_dict().items()}
    whole.load_state_dict({**whole.state_dict(), **weights})
    return apart, whole


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme != "ngpt"])
@pytest.mark.parametrize("begin", ["embedding", "sum", "dropout"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.one_in(test=20, all=3)
def test_a_loop_that_embeds_computes_as_one_that_does_not(scheme, begin, training):
    apart, whole = alike(begin)
    for model in (apart, whole):
        model.double()
        torch.manual_seed(1)  # some schemes draw values of their own
        swap_residuals(model, scheme, init=None, example=TOKENS)
        model.train(training)
        with torch.no_grad():
            for p in (p for name, p in model.named_parameters() if name != "positions"):
                p.add_(torch.arange(p.numel()).view(p.shape).sin() * 0.05)
    outputs, gradients = [], []
    # outside the loop's forward its modules compute as ever, so that `begun` gives the other model's loop its input
    for run in (lambda: apart.head(apart.loop(whole.begun(whole.embed(TOKENS)))), lambda: whole(TOKENS)):
        torch.manual_seed(2)  # the dropout's
        outputs.append(run())
        every = {**dict(apart.named_parameters()), **{f"whole.{n}": p for n, p in whole.named_parameters()}}
        parameters = {name: p for name, p in every.items() if p.requires_grad}
        parts = torch.autograd.grad(outputs[-1].sin().sum(), [*parameters.values()], allow_unused=True)
        named = ((name.removeprefix("whole.").removeprefix("loop."), g) for name, g in zip(parameters, parts))
        gradients.append({name: g for name, g in named if g is not None})
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-12, atol=1e-12)
    assert gradients[0].keys() == gradients[1].keys()
    for name, g in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], g, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scheme", ["deepnorm", "dlcl"])
def test_a_loop_that_embeds_is_found_on_the_meta_device(scheme):
    with torch.device("meta"):
        model, tokens = Embeds("sum"), torch.zeros(2, 8, dtype=torch.long)
    swap_residuals(model, scheme, init=None, example=tokens)
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    model = alike("sum")[1]
    swap_residuals(model, scheme, init=None, example=TOKENS)
    assert {key: value.shape for key, value in model.state_dict().items()} == shapes


def test_a_loop_that_embeds_is_copied_kept_and_taken_back():
    _, model = alike("dropout")
    before = model(TOKENS)
    swap = swap_residuals(model, "dlcl", init=None, example=TOKENS)
    expected, file = model(TOKENS), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with torch.no_grad():
            other.layers[0][0].norm.weight.mul_(2.0)
        assert torch.equal(model(TOKENS), expected) and not torch.equal(other(TOKENS), expected)
    swap.undo()
    assert torch.equal(model(TOKENS), before) and not model.embed._forward_hooks


@pytest.mark.parametrize("begin", ["embedding", "sum"])
def test_a_loop_that_embeds_runs_compiled(begin):
    _, model = alike(begin)
    swap_residuals(model, "peri-ln", init=None, example=TOKENS)
    expected = model(TOKENS)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(TOKENS), expected)


@pytest.mark.parametrize(
    "scheme, match", [("t-fixup", "runs from the output of embed to"), ("deepnorm", "its LayerNorm on")]
)
def test_a_call_without_the_begin_of_the_stream_is_an_error(scheme, match):
    _, model = alike()
    swap_residuals(model, scheme, init=None, example=TOKENS)
    with pytest.raises(InputError, match=match):
        model(embedded=torch.randn(2, 8, D))


class Ways(Embeds):
    """Has other ways through its modules than the forward that the example runs."""

    def forward(self, tokens, more=None):
        y = super().forward(tokens)
        y = y if more is None else y + super().forward(more)
        return y

    def bag(self, tokens):
        return self.embed(tokens) + torch.ones(2, 8, D)


@pytest.mark.parametrize("scheme", ["rezero", "sandwich", "dlcl"])
def test_the_stream_begins_in_the_loops_forward_alone(scheme):
    torch.manual_seed(0)
    model = Ways().eval()
    other = Embeds().eval()  # a model without a scheme that shares the embedding
    other.embed = model.embed
    bag, result = model.bag(TOKENS), other(TOKENS)
    swap_residuals(model, scheme, init=None, example=TOKENS)
    assert torch.equal(model.bag(TOKENS), bag) and torch.equal(other(TOKENS), result)
    assert type(copy.deepcopy(model.embed)(TOKENS)) is torch.Tensor
    want = model(TOKENS) + model(TOKENS.flip(1))
    with pytest.raises(InputError, match="calls its embed twice, where its residual stream begins"):
        model(TOKENS, more=TOKENS.flip(1))
    assert torch.equal(model(TOKENS) + model(TOKENS.flip(1)), want)


class Tied(Embeds):
    """Its logits are products with the embeddings, and of the last tokens alone."""

    def forward(self, tokens):
        x = self.norm(self.run(self.embed(tokens)))
        return F.linear(x[:, -1:], self.embed.weight) + x.mean()


@pytest.mark.parametrize("scheme", ["prenorm", "deepnorm", "rezero", "sandwich", "peri-ln", "mhc"])
def test_a_norm_that_ends_a_loop_is_the_stacks(scheme):
    torch.manual_seed(0)
    apart = Around(Lucidrains, embeds=False).eval()
    model = Tied().eval()
    weights = {key.removeprefix("loop."): value for key, value in apart.state_dict().items()}
    model.load_state_dict({**model.state_dict(), **weights})
    rows = []
    for each in (apart, model):
        torch.manual_seed(1)
        rows.append([row[2:] for row in swap_residuals(each.double(), scheme, init=None, example=TOKENS)])
    assert [note for *_, note in rows[0]] == [note for *_, note in rows[1]]
    h = apart.loop(apart.embed(TOKENS))
    torch.testing.assert_close(model(TOKENS), F.linear(h[:, -1:], apart.embed.weight) + h.mean())
    assert len([*apart.parameters()]) == len([*model.parameters()]) - 1  # its positions


@pytest.mark.parametrize("scheme", ["rezero", "sandwich"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_other_ways_are_errors_compiled_too(scheme, is_compiled):
    model = alike()[1]
    swap_residuals(model, scheme, init=None, example=TOKENS)
    run = torch.compile(model, backend="eager") if is_compiled else model
    with pytest.raises(Exception, match=r"went another way|on another tensor|Observed exception"):
        run(embedded=torch.randn(2, 8, D))


class Scaled(Lucidrains):
    """Its stream begins with a product, and it is a part of a model."""

    def __init__(self):
        super().__init__(embeds=False)

    def forward(self, x):
        return super().forward(x * 4.0)


def test_a_factor_before_the_first_layer_stays():
    """As the factor is not the layers', the stream begins behind it."""
    torch.manual_seed(0)
    model = Around(Scaled).eval()
    before = model(TOKENS)
    swap_residuals(model, "prenorm", init=None, example=TOKENS)
    torch.testing.assert_close(model(TOKENS), before)
    alone = Scaled().eval()
    with pytest.raises(InputError, match="holds no blocks that add branches"):
        swap_residuals(alone, "prenorm", init=None, example=torch.randn(2, 8, D))


class UsesTwice(Embeds):
    def forward(self, tokens):
        x = self.run(self.embed(tokens))
        return self.head(self.norm(x)) + x.mean()


class TwoStreams(Embeds):
    """Two loops in one forward."""

    def __init__(self):
        super().__init__()
        self.more = nn.ModuleList(nn.ModuleList([Within(Attention()), Within(mlp())]) for _ in range(2))
        self.embed_more = nn.Embedding(40, D)

    def forward(self, tokens):
        y = self.embed_more(tokens)
        for attn, ff in self.more:
            y = attn(y) + y
            y = ff(y) + y
        return super().forward(tokens) * y.mean()


@pytest.mark.parametrize("kind", [UsesTwice, TwoStreams])
def test_a_stream_with_other_uses_or_loops_is_refused(kind):
    torch.manual_seed(0)
    model = kind().eval()
    before = model(TOKENS)
    with pytest.raises(InputError, match="holds no blocks that add branches"):
        swap_residuals(model, "deepnorm", init=None, example=TOKENS)
    assert torch.equal(model(TOKENS), before)


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
