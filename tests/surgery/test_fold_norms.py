"""`fold_norms`: γ and β of norms folded into the linear layers that read them."""

import copy

import exact_support as own
import pytest
import torch
from exact_support import TOKENS, Block, Lora, Model, Normed, Parallel, build, gap, run, scattered
from torch import nn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn
from normformer_rs.surgery import fold_norms, folding

KEPT = {
    # families whose last norm stays: its reader is tied to the embedding, unknown, or the last norm is the output
    "GPT2": 1,
    "OPT": 1,
    "T5": 2,
    "MBart": 4,
    "Pegasus": 2,
    "M2M100": 2,
    "Whisper": 2,
    "CLIP": 2,
    "Wav2Vec2, stable": 0,
    "Llama": 0,
    "Gemma": 1,
    "Qwen3": 0,
    "GPTNeoX": 0,
    "RobertaPreLayerNorm": 1,
    "ViT": 0,
    "timm": 0,
}
"""Norms that keep weights, of those that read or write a stream, by family."""


def weighted(model):
    """Norms as wide as the model that have a weight; norms of single heads and of features are others."""
    width = 16
    norms = [m for n, m in model.named_modules() if "norm" in type(m).__name__.lower() and not n.startswith("lm_head")]
    norms = [m for m in norms if getattr(m, "weight", None) is not None and m.weight.shape == (width,)]
    return len(norms)


def folded_and_back(model, name):
    """Folds, compares outputs, and takes it back; returns the number of norms that keep weights."""
    expected = run(model, name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    done = fold_norms(model)
    assert gap(run(model, name), expected) < 1e-9
    left = weighted(model)
    done.undo()
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], before[key]) for key in before)
    assert torch.equal(run(model, name), expected)
    return left


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.one_in(test=8, all=3)
def test_outputs_are_equal_and_undo_is_bit_for_bit(name):
    assert folded_and_back(build(name), name) == KEPT[name]


@pytest.mark.parametrize(
    "name,options,left",
    [
        ("GPTNeoX", {"use_parallel_residual": True}, 0),
        ("GPT2", {"add_cross_attention": True}, 1),
        ("RobertaPreLayerNorm", {"add_cross_attention": True, "is_decoder": True}, 1),
        ("OPT", {"word_embed_proj_dim": 8}, 0),  # the last norm's reader is project_out
    ],
)
@pytest.mark.one_in(test=2)
def test_variants(name, options, left):
    assert folded_and_back(build(name, **options), name) == left


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Gemma"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.one_in(test=3)
def test_the_last_norm_is_folded_where_the_head_is_untied(name, tied):
    model = build(name, tie_word_embeddings=tied)
    expected = run(model, name)
    table = {row.name: row for row in fold_norms(model)}
    row = table["transformer.ln_f" if name == "GPT2" else "model.norm"]
    assert ("stays: lm_head shares a parameter with" in row.note) == tied, row
    assert tied or row.new == f"{'LayerNorm' if name == 'GPT2' else 'RMSNorm'}, unweighted"
    assert gap(run(model, name), expected) < 1e-9
    # β needs a bias, which GPT-2's head had not
    assert (model.lm_head.bias is not None) == (name == "GPT2" and not tied)


@pytest.mark.parametrize("name", ["Llama", "Gemma", "GPT2", "RobertaPreLayerNorm", "ViT"])
@pytest.mark.one_in(all=5)
def test_the_error_in_bf16_is_at_most_twice_the_originals(name):
    """Root mean squares over models, against the same weights in f64."""
    errors = torch.zeros(2, dtype=torch.float64)
    for seed in range(6):
        plain = build(name, seed).bfloat16()
        folded = copy.deepcopy(plain)
        fold_norms(folded)
        expected = run(copy.deepcopy(plain).double(), name)
        errors += torch.stack([(run(m, name).double() - expected).square().sum() for m in (plain, folded)]).detach()
    assert 0 < errors[1] <= 4 * errors[0], errors.sqrt()


@pytest.mark.parametrize("name", ["GPT2", "RobertaPreLayerNorm", "ViT"])
@pytest.mark.one_in(test=2)
def test_after_an_exact_swap(name):
    model = build(name)
    expected = run(model, name)
    swapped = nfrs.swap_norms(model, "rmsnorm", exact=True)
    done = fold_norms(model)
    assert gap(run(model, name), expected) < 1e-9 and weighted(model) == KEPT[name]
    with pytest.raises(nfrs.InputError, match="fold_norms came after"):
        swapped.undo()
    done.undo(), swapped.undo()
    assert torch.equal(run(model, name), expected)


@pytest.mark.parametrize("name", ["Llama", "Gemma", "GPT2"])
@pytest.mark.one_in(test=3)
def test_the_stock_class_loads_the_file(name, tmp_path):
    """It puts norms of one where the file has none."""
    model = build(name, tie_word_embeddings=name == "GPT2")
    expected = run(model, name)
    fold_norms(model)
    model.save_pretrained(tmp_path)
    stock = type(model).from_pretrained(tmp_path).double().eval()
    assert weighted(stock) == 5 and gap(run(stock, name), expected) < 1e-9


@pytest.mark.parametrize("cross", [False, True])
def test_torchs_layers_and_the_packages(cross):
    """In attention to an encoder the norm is read by the queries alone."""
    side = "Decoder" if cross else "Encoder"
    torchs, ours = (getattr(home, f"Transformer{side}Layer") for home in (nn, nfnn))
    pre = {"norm_first": True, "batch_first": True}
    own_way = {"residual": "prenorm", "batch_first": True}
    modern = own_way | {"kv_heads": 1, "activation": "swiglu", "positions": "rotary", "output_gate": "head"}
    for kind, options in (
        (torchs, pre),
        (torchs, pre | {"bias": False}),
        (ours, own_way | {"qk_norm": True}),
        (ours, modern),
    ):
        model = scattered(kind(own.D, 2, 12, 0.1, **options))
        x = (torch.randn(2, 3, own.D, dtype=torch.float64), torch.randn(2, 4, own.D, dtype=torch.float64))[: 1 + cross]
        expected = model(*x)
        done = fold_norms(model)
        with torch.no_grad():
            assert gap(model(*x), expected) < 1e-9
        norms = [child for name, child in model.named_children() if name.startswith("norm")]
        assert len(norms) == 2 + cross and all(type(m) is nfnn.LayerNorm and m.weight is None for m in norms)
        done.undo()
        assert torch.equal(model(*x), expected)


class Attends(nn.Module):
    """Two norms make what an attention reads, and its arguments come in another order."""

    def __init__(self, attention):
        super().__init__()
        self.first, self.second, self.attention = nn.LayerNorm(own.D), nn.LayerNorm(own.D), attention

    def forward(self, x):
        return self.attention(key=self.second(x), value=self.second(x), query=self.first(x))[0]


def _gated():
    return nfnn.TransformerEncoderLayer(own.D, 2, 12, residual="prenorm", output_gate="head").self_attn


def _hooked_attention():
    attention = nn.MultiheadAttention(own.D, 2)
    attention.register_forward_pre_hook(lambda *_: None)
    return attention


@pytest.mark.parametrize(
    "make,notes",
    [
        (lambda: nn.MultiheadAttention(own.D, 2), ["weight, bias into attention"] * 2),
        (lambda: nfnn.MultiheadAttention(own.D, 2), ["weight, bias into attention"] * 2),
        (_gated, ["weight, bias into attention, gate_proj", "weight, bias into attention"]),
        (lambda: nn.MultiheadAttention(own.D, 2, kdim=own.D, vdim=own.D), ["weight, bias into attention"] * 2),
        (_hooked_attention, None),
    ],
)
def test_each_third_of_an_attentions_projection_may_read_another_norm(make, notes):
    model, x = scattered(Attends(make())), torch.randn(2, 3, own.D, dtype=torch.float64)
    expected = model(x)
    if notes is None:
        with pytest.raises(nfrs.InputError, match="attention has forward hooks"):
            fold_norms(model, example=x)
        return
    notes_of = {row.name: row.note for row in fold_norms(model, example=x)}
    assert [notes_of["first"], notes_of["second"]] == notes and gap(model(x), expected) < 1e-9


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("home", [nn, nfnn])
def test_an_encoders_last_norm_is_folded_into_the_decoders_keys_and_values(home):
    model = scattered(home.Transformer(own.D, 2, 1, 2, 12, 0.1, norm_first=True, batch_first=True))
    x = [torch.randn(2, n, own.D, dtype=torch.float64) for n in (4, 3)]
    expected, state = model(*x), torch.get_rng_state()
    notes = {row.name: row.note for row in fold_norms(model)}
    assert notes["encoder.norm"] == "weight, bias into multihead_attn"
    assert notes["decoder.norm"] == "stays: the model returns it"
    assert gap(model(*x), expected) < 1e-9 and torch.equal(torch.get_rng_state(), state)


def test_a_norm_before_what_a_scheme_changes_inside_attention_stays():
    layer = nfnn.TransformerEncoderLayer(own.D, 2, 12, batch_first=True, residual=Normed("input"))
    model, x = scattered(nfnn.TransformerEncoder(layer, 2)), torch.randn(2, 3, own.D, dtype=torch.float64)
    expected = model(x)
    notes = {row.name: row.note for row in fold_norms(model)}
    assert notes["layers.0.norm1"] == "stays: layers.0.self_attn, a MultiheadAttention, reads it, too"
    assert notes["layers.0.norm2"] == "weight, bias into linear1" and gap(model(x), expected) < 1e-9


def test_a_linear_layer_without_a_bias_gets_one():
    model = build("ViT", qkv_bias=False)
    expected = run(model, "ViT")
    done = fold_norms(model)
    query = model.vit.layers[0].attention.q_proj
    assert query.bias.shape == (16,) and query.bias.any() and gap(run(model, "ViT"), expected) < 1e-9
    done.undo()
    assert query.bias is None


def test_norms_without_weights_and_second_calls():
    model = build("Llama")
    assert len(fold_norms(model)) == 5
    after = run(model, "Llama")
    assert not fold_norms(model) and torch.equal(run(model, "Llama"), after)


def test_a_norm_that_two_sublayers_read():
    model = scattered(Model(Parallel(), Parallel()))
    expected = run(model)
    assert [row.note for row in fold_norms(model, example=TOKENS)][:2] == ["weight, bias into value, fc1"] * 2
    assert gap(run(model), expected) < 1e-9
    assert model.blocks[0].ln1 is model.blocks[0].ln2 and model.blocks[0].ln1.weight is None


def test_one_block_in_two_places_is_folded_once():
    block = Block()
    model = scattered(Model(block, block))
    expected = run(model)
    fold_norms(model, example=TOKENS)
    assert block.ln1.weight is None and gap(run(model), expected) < 1e-9


def _shared_layer(model):
    model.blocks[1].fc1 = model.blocks[0].fc1


def _shared_weight(model):
    model.blocks[1].fc1.weight = model.blocks[0].fc1.weight


def _same_storage(model):
    model.blocks[1].fc1.weight.data = model.blocks[0].fc1.weight.data


def _wrapped(model):
    model.blocks[1].fc1 = Lora(model.blocks[1].fc1)


def _parametrized(model):
    nn.utils.parametrizations.weight_norm(model.blocks[1].fc1)


def _hooked(model):
    model.blocks[1].fc1.register_forward_pre_hook(lambda _, args: (args[0] + 1,))


def _norm_elsewhere(model):
    model.other = model.blocks[1].ln2


def _reader_elsewhere(model):
    model.other = model.blocks[1].fc1


@pytest.mark.parametrize(
    "change,reason",
    [
        (_shared_layer, "stays: blocks.0.fc1 reads something else, too"),
        (_shared_weight, "stays: blocks.1.fc1 shares a parameter with blocks.0.fc1.weight"),
        (_same_storage, "stays: blocks.1.fc1 shares a parameter with blocks.0.fc1.weight"),
        (_parametrized, "stays: blocks.1.fc1 is a ParametrizedLinear, and no plain linear layer"),
        (_hooked, "stays: the operation add reads it, too"),
    ],
)
def test_what_cannot_be_folded_stays(change, reason):
    model = scattered(Model(Block(), Block()))
    change(model)
    expected, kept = run(model), model.blocks[1].ln2
    table = {row.name: row.note for row in fold_norms(model, example=TOKENS)}
    assert table["blocks.1.ln2"] == reason and table["blocks.1.ln1"] == "weight, bias into value"
    assert model.blocks[1].ln2 is kept and gap(run(model), expected) < 1e-9


@pytest.mark.parametrize(
    "change,name", [(_wrapped, "blocks.1.ln2"), (_norm_elsewhere, "other"), (_reader_elsewhere, "blocks.1.ln2")]
)
def test_what_a_run_shows_to_be_folded(change, name):
    """All layers of a wrapper around the linear layer take part, and a norm's names are folded together."""
    model = scattered(Model(Block(), Block()))
    change(model)
    model.blocks[1].ln2.bias = None
    expected = run(model)
    table = {row.name: row.note for row in fold_norms(model, example=TOKENS)}
    assert table[name] == ("weight into base_layer, down" if change is _wrapped else "weight into fc1")
    assert model.blocks[1].ln2.weight is None and gap(run(model), expected) < 1e-9


def _pooler(model):
    model.vit.pooler = nn.Linear(16, 16).double()


def _base(model):
    model.base = model.vit


@pytest.mark.parametrize("change", [_pooler, _base])
def test_the_last_norm_folds_into_whatever_reads_it(change):
    model = build("ViT")
    change(model)
    expected = run(model, "ViT")
    notes = {row.note for row in fold_norms(model) if row.name.endswith(".layernorm")}
    assert len(notes) == 1 and notes.pop().startswith("weight, bias into") and gap(run(model, "ViT"), expected) < 1e-9


def test_norm_and_reader_shared_together_are_folded_once():
    model = scattered(Model(Block(), Block()))
    first, second = model.blocks
    second.ln2, second.fc1 = first.ln2, first.fc1
    expected = run(model)
    fold_norms(model, example=TOKENS)
    assert second.ln2 is first.ln2 and first.ln2.weight is None and gap(run(model), expected) < 1e-9


def test_a_norm_of_readers_that_share_a_weight_stays():
    model = scattered(Model(Block(), Block()))
    first, second = model.blocks
    second.ln2, second.fc1.weight = first.ln2, first.fc1.weight
    expected = run(model)
    table = {row.name: row.note for row in fold_norms(model, example=TOKENS)}
    assert "shares a parameter with another layer" in table["blocks.0.ln2"]
    assert gap(run(model), expected) < 1e-9


def test_two_norms_of_one_linear_layer():
    """x + A(N(x)) and x + F(M(x)) with A = F."""

    class Twice(Block):
        def forward(self, x):
            x = x + self.fc2(self.act(self.fc1(self.ln1(x))))
            return x + self.fc2(self.act(self.fc1(self.ln2(x))))

    model = scattered(Model(Twice()))
    expected = run(model)
    notes = [row.note for row in fold_norms(model, example=TOKENS)]
    assert notes[:2] == ["stays: blocks.0.fc1 reads something else, too"] * 2 and gap(run(model), expected) < 1e-9


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: scattered(nn.Sequential(nn.LayerNorm(4))), "Sequential's parts are found by .*: pass example=, the"),
        (lambda: _meta(), r"fold_norms changes weights' values, and .* is on the meta device.*load the weights first"),
        (lambda: nn.DataParallel(Model(Block())), "swap first, then wrap"),
        (lambda: nn.TransformerEncoderLayer(8, 2, 12), "of norm1, the operation __?add__? reads it, too|of norm1, "),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(nfrs.InputError, match=message):
        fold_norms(make())


def test_norms_that_the_stream_reads_stay():
    """BERT's: all but the last, which only the head reads."""
    model = build("Bert")
    expected = run(model, "Bert")
    done = fold_norms(model)
    assert [row.name for row in done if not row.note.startswith("stays")] == ["bert.encoder.layer.1.output.LayerNorm"]
    assert gap(run(model, "Bert"), expected) < 1e-9


def _meta():
    with torch.device("meta"):
        return own.first_values("Llama")


def test_training_goes_on_from_equal_outputs():
    """Folds are exact in training mode, too, and every weight that is left learns."""
    model = build("Llama", attention_dropout=0.0).train()
    expected = run(model, "Llama")
    fold_norms(model)
    assert gap(run(model, "Llama"), expected) < 1e-9 and all(m.training for m in model.modules())
    run(model, "Llama").sum().backward()
    assert all(p.grad is not None for p in model.parameters())


class Shared(nn.Module):
    """A stack whose only norm an addition reads beside the linear layer."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.norm(x)
        return y + self.linear(y)


def test_what_reads_a_norm_is_told_where_an_example_was_given():
    with pytest.raises(nfrs.InputError, match="finds no norm of Shared that linear layers alone read: of norm, t"):
        fold_norms(Shared(), example={"x": torch.randn(2, 8)})


def test_an_example_that_the_model_does_not_take():
    with pytest.raises(nfrs.InputError, match=r"the run of Shared on example failed \(TypeError: .*'ids'"):
        fold_norms(Shared(), example={"ids": torch.randn(2, 8)})


def test_a_fold_that_stops_half_way_is_taken_back(monkeypatch):
    model = build("Llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fold, calls = folding._fold, iter(range(9))

    def second_fails(*given):
        adds = fold(*given)
        if next(calls) == 1:
            raise KeyboardInterrupt
        return adds

    monkeypatch.setattr(folding, "_fold", second_fails)
    with pytest.raises(KeyboardInterrupt):
        fold_norms(model)
    after = model.state_dict()
    assert [*after] == [*before] and all(torch.equal(after[name], value) for name, value in before.items())


# What only training, only trained gains or only a merge would show.


def same(model, state, kinds):
    """The model as it was."""
    now = model.state_dict()
    assert [*now] == [*state] and all(torch.equal(now[name], value) for name, value in state.items())
    assert [(name, id(module)) for name, module in model.named_modules()] == kinds


def kept(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return state, [(name, id(module)) for name, module in model.named_modules()]


class DropPath(nn.Module):
    def forward(self, x):
        return x * (torch.rand(len(x), 1, 1) > 0.3) / 0.7 if self.training else x


class Dropping(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.first, self.second = nn.LayerNorm(D), nn.LayerNorm(D)
        self.up, self.down, self.drop = nn.Linear(D, 6), nn.Linear(6, D), drop

    def forward(self, x):
        x = x + self.down(self.up(self.first(x)).tanh())
        drop = self.drop if isinstance(self.drop, nn.Module) else lambda y: self.drop(y, 0.3, self.training)
        return self.tail(drop(self.second(x))) if hasattr(self, "tail") else x


D = own.D
DROPS = [nn.Dropout(0.3), nn.AlphaDropout(0.3), DropPath(), nn.functional.dropout, nn.functional.alpha_dropout]


@pytest.mark.parametrize("drop", DROPS, ids=lambda drop: getattr(drop, "__name__", type(drop).__name__))
def test_a_norm_before_an_active_dropout_stays(drop):
    model = Dropping(drop)
    model.tail = nn.Linear(D, D)
    model = scattered(model).train()
    x = torch.randn(2, 3, D, dtype=torch.float64)

    def trained():
        torch.manual_seed(1)
        return model(x)

    expected = trained()
    notes = {row.name: row.note for row in fold_norms(model, example=x)}
    assert notes["first"] == "weight, bias into up" and notes["second"].startswith("stays: ")
    assert notes["second"].endswith("reads it, too") and gap(trained(), expected) < 1e-9
    assert gap(model.eval()(x), expected) > 0.01


def test_a_dropout_of_probability_zero_does_not_matter():
    model = Dropping(nn.Dropout(0.0))
    model.tail = nn.Linear(D, D)
    model, x = scattered(model), torch.randn(2, 3, D, dtype=torch.float64)
    expected = model(x)
    assert not [row for row in fold_norms(model, example=x) if row.note.startswith("stays")]
    assert gap(model(x), expected) < 1e-9


class Auxiliary(Model):
    """In training mode another head reads the last norm, or an addition reads a block's."""

    def __init__(self, way):
        super().__init__(Block())
        self.way, self.other = way, nn.Linear(D, 2)
        self.first = nn.Linear(D, D)

    def forward(self, tokens):
        y = self.norm(self.embedding(tokens))
        if not self.training:
            return self.head(y)
        if self.way == "a head":
            return self.head(y), self.other(y)
        if self.way == "a loss":
            return self.head(y), y.square().mean()
        if self.way == "a loss that it keeps":
            self.loss = y.square().mean()
            return self.head(y)
        if self.way == "a penalty":
            return self.head(y), self.norm.weight.square().sum()
        return self.head(y), self.head.weight.square().sum()


@pytest.mark.parametrize("way", ["a head", "a loss", "a loss that it keeps", "a penalty", "a penalty of the head"])
def test_what_only_training_reads_counts(way):
    model = scattered(Auxiliary(way))
    del model.blocks
    tokens, state = torch.arange(5)[None], kept(model)
    expected = model.train()(tokens)
    if way == "a head":
        fold_norms(model, example=tokens)
        for found, right in zip(model(tokens), expected):
            assert gap(found, right) < 1e-9
        return
    with pytest.raises(nfrs.InputError, match=r"no norm of Auxiliary that linear layers alone read: of norm, .*the op"):
        fold_norms(model, example=tokens)
    same(model, *state)


def test_a_model_that_fails_in_training_mode_is_refused():
    class Trains(Dropping):
        def forward(self, x):
            if self.training:
                raise ValueError("needs labels")
            return super().forward(x)

    model, x = scattered(Trains(nn.Identity())), torch.randn(2, 3, D, dtype=torch.float64)
    state = kept(model)
    with pytest.raises(nfrs.InputError, match=r"Trains does not run in training mode \(ValueError: needs labels\)"):
        fold_norms(model, example=x)
    same(model, *state)


@pytest.mark.parametrize("scheme", ["postnorm", "deepnorm"])
@pytest.mark.one_in(test=2)
def test_norms_that_write_the_stream_are_refused_before_their_gains_are_trained(scheme):
    model = own.first_values("Llama")
    nfrs.swap_residuals(model, scheme, init=None)
    state = kept(model)
    with pytest.raises(nfrs.InputError, match="would change what LlamaForCausalLM computes"):
        fold_norms(model)
    same(model, *state)


def test_sandwichs_branch_norms_stay_before_their_gains_are_trained():
    model = own.first_values("Llama")
    nfrs.swap_residuals(model, "sandwich", init=None)
    notes = {row.name: row.note for row in fold_norms(model)}
    assert notes["model.layers.0.input_layernorm"] == "weight into q_proj, k_proj, v_proj"
    assert notes["model.layers.0.residual.post_norm1"].startswith("stays")


@pytest.mark.parametrize("has_bias", [True, False])
def test_adapters_get_no_bias_that_a_merge_would_lose(has_bias):
    model = build("ViT")
    model.classifier = Lora(model.classifier)
    if not has_bias:
        model.vit.layernorm.bias = None
    expected = run(model, "ViT")
    (note,) = [row.note for row in fold_norms(model) if row.name.endswith(".layernorm")]
    assert gap(run(model, "ViT"), expected) < 1e-9
    lora = model.classifier
    with torch.no_grad():
        lora.base_layer.weight += lora.up.weight @ lora.down.weight
    model.classifier = lora.base_layer
    assert gap(run(model, "ViT"), expected) < 1e-9
    if has_bias:
        assert note == "stays: classifier.down has no bias, and a merge of the Lora around it would lose one"
    else:
        assert note == "weight into base_layer, down"
