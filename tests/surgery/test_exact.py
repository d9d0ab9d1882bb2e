"""`swap_norms(model, "rmsnorm", exact=True)`: LayerNorm becomes RMSNorm and no output changes."""

import copy
import pickle

import exact_support as own
import pytest
import torch
from exact_support import Block, Lora, Model, Parallel, Torchs, Towers, build, exact, gap, run, scattered
from torch import nn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn
from normformer_rs.nn.norms import BiasedRMSNorm

MODELS = {
    "GPT2": {},
    "GPT2, attending to an encoder": {"add_cross_attention": True},
    "RobertaPreLayerNorm": {},
    "RobertaPreLayerNorm, attending to an encoder": {"add_cross_attention": True, "is_decoder": True},
    "ViT": {},
    "OPT": {},
    "OPT, projected": {"word_embed_proj_dim": 8},
    "GPTNeoX": {},
    "GPTNeoX, parallel": {"use_parallel_residual": True},
    "CLIP's text": {},
    "timm": {},
    "own": {},
    "own, parallel": {},
    "own, one block twice": {},
    "own, around torch.nn's encoder": {},
    "own, around the package's encoder": {},
    "own, around the package's sandwich": {},
    "own, two widths": {},
    "own, positions in a buffer": {},
}


def made(case):
    """(model, the name for `run`)."""
    if case.startswith("own"):
        if "around" in case:
            scheme = None if "torch" in case else "sandwich" if "sandwich" in case else "prenorm"
            return scattered(Torchs(scheme)), None
        if "widths" in case:
            return scattered(Towers()), None
        if "buffer" in case:
            model = Model(Block())
            del model.position
            model.register_buffer("position", torch.randn(5, own.D))
            return scattered(model), None
        shared = Block()
        blocks = {"own": (Block(), Block()), "own, parallel": (Parallel(), Parallel())}.get(case, (shared, shared))
        return scattered(Model(*blocks)), None
    name = case.partition(",")[0].partition("'")[0]
    model = build(name, **MODELS[case])
    return (model.text_model if name == "CLIP" else model), name


def blocks_of(model):
    return [m for m in model.modules() if type(m).__name__.endswith(("Block", "Layer", "Parallel"))]


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.one_in(test=5, all=2)
def test_outputs_are_equal_and_undo_is_bit_for_bit(case):
    model, name = made(case)
    expected = run(model, name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    kinds = [type(m) for m in model.modules()]
    swapped = exact(model)
    assert gap(run(model, name), expected) < 1e-9
    # no LayerNorm reads the stream any more, and the stream has no mean
    means = []
    for block in blocks_of(model):
        assert not any(isinstance(m, nn.LayerNorm) for m in block.modules())
        block.register_forward_hook(lambda _, args, y: means.append((y[0] if isinstance(y, tuple) else y).mean(-1)))
    run(model, name)
    assert means and max(mean.abs().max().item() for mean in means) < 1e-12
    for block in blocks_of(model):
        block._forward_hooks.clear()
    assert any(not torch.equal(value, before[key]) for key, value in model.state_dict().items() if key in before)
    swapped.undo()
    assert [type(m) for m in model.modules()] == kinds
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], before[key]) for key in before)
    assert torch.equal(run(model, name), expected)


@pytest.mark.parametrize("name", ["GPT2", "RobertaPreLayerNorm", "ViT"])
@pytest.mark.one_in(all=3)
def test_the_error_in_bf16_is_at_most_twice_the_originals(name):
    """Root mean squares over models, against the same weights in f64."""
    errors = torch.zeros(2, dtype=torch.float64)
    for seed in range(6):
        plain = build(name, seed).bfloat16()
        swapped = copy.deepcopy(plain)
        exact(swapped)
        expected = run(copy.deepcopy(plain).double(), name)
        errors += torch.stack([(run(m, name).double() - expected).square().sum() for m in (plain, swapped)]).detach()
    assert 0 < errors[1] <= 4 * errors[0], errors.sqrt()


def test_where_each_bias_goes():
    model = build("GPT2")
    table = {row.name: row for row in exact(model)}
    assert table["transformer.h.0.ln_1"].new == "RMSNorm" and "into c_attn" in table["transformer.h.0.ln_1"].note
    last = table["transformer.ln_f"]
    assert last.new == "BiasedRMSNorm" and "lm_head shares a parameter with transformer.wte.weight" in last.note
    model = build("ViT", qkv_bias=False)
    expected = run(model, "ViT")
    table = {row.name: row.note for row in exact(model)}
    assert table["vit.layers.0.layernorm_before"] == "bias kept: vit.layers.0.attention.q_proj has none"
    assert table["vit.layers.0.layernorm_after"] == "bias into fc1"
    assert gap(run(model, "ViT"), expected) < 1e-9


def test_a_tied_embedding_is_centred_after_the_look_up():
    model = build("GPT2")
    before, tokens = model.lm_head.weight.clone(), torch.arange(5)
    exact(model)
    assert model.lm_head.weight is model.transformer.wte.weight and torch.equal(model.lm_head.weight, before)
    assert model.transformer.wte(tokens).mean(-1).abs().max() < 1e-15
    assert isinstance(model.transformer.wte, nn.Embedding)
    model = build("GPT2", tie_word_embeddings=False)
    head, expected = model.lm_head.weight.clone(), run(model, "GPT2")
    exact(model)
    assert type(model.transformer.wte) is nn.Embedding and model.transformer.wte.weight.mean(-1).abs().max() < 1e-15
    assert torch.equal(model.lm_head.weight, head) and gap(run(model, "GPT2"), expected) < 1e-9


@pytest.mark.parametrize("option", ["max_norm", "subclass"])
def test_an_embedding_that_is_more_than_a_table(option):
    model = scattered(Model(Block(), Block()))
    if option == "max_norm":
        model.embedding.max_norm = 0.5
    else:
        model.embedding.__class__ = type("Shifted", (nn.Embedding,), {"forward": lambda m, x: m.weight[x] ** 2})
    expected = run(model)
    assert {row.name: row.note for row in exact(model)}["embedding"] == "output centred"
    assert gap(run(model), expected) < 1e-9


def test_copies_pickles_and_generation():
    model = build("GPT2")
    tokens = torch.arange(3, 9)[None]
    expected, logits = model.generate(tokens, max_new_tokens=6, do_sample=False), run(model, "GPT2")
    exact(model)
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert gap(run(twin, "GPT2"), logits) < 1e-9
        assert torch.equal(twin.generate(tokens, max_new_tokens=6, do_sample=False), expected)


@pytest.mark.parametrize("name", ["GPT2", "RobertaPreLayerNorm", "ViT"])
@pytest.mark.one_in(test=2)
def test_the_file_loads_into_the_stock_class_and_into_a_swapped_one(name, tmp_path):
    model = build(name)
    expected = run(model, name)
    exact(model)
    model.save_pretrained(tmp_path)
    stock = type(model).from_pretrained(tmp_path).double().eval()
    assert any(isinstance(m, nn.LayerNorm) for m in stock.modules())
    assert gap(run(stock, name), expected) < 1e-9
    again = build(name, seed=5)
    exact(again)
    again.load_state_dict(model.state_dict())
    assert gap(run(again, name), expected) < 1e-9


def test_a_filter_leaves_norms_and_keeps_outputs():
    model = build("ViT")
    expected = run(model, "ViT")
    exact(model, filter=lambda name, _: "before" in name)
    kinds = [type(m) for m in model.modules()]
    assert nfnn.RMSNorm in kinds and nn.LayerNorm in kinds and gap(run(model, "ViT"), expected) < 1e-9


def test_a_norm_with_two_names_goes_by_both():
    """A filter that takes one of them leaves the norm, whose bias would else be added twice."""
    model = scattered(Model(Parallel(), Parallel()))
    expected = run(model)
    exact(model, filter=lambda name, _: not name.endswith("ln2"))
    assert type(model.blocks[0].ln1) is nn.LayerNorm and type(model.norm) is not nn.LayerNorm
    assert gap(run(model), expected) < 1e-9


def test_the_optimizer_holds_the_new_norms():
    model = build("ViT")
    optimizer = torch.optim.AdamW(model.parameters())
    run(model, "ViT").sum().backward()
    optimizer.step()
    done = exact(model, optimizer=optimizer)
    (group,) = optimizer.param_groups
    assert {*group["params"]} == {*model.parameters()}
    assert not optimizer.state[model.vit.layers[0].mlp.fc2.weight] and optimizer.state[model.classifier.weight] == {}
    done.undo()
    assert {*group["params"]} == {*model.parameters()}


def test_a_wrapped_reader_keeps_the_bias_in_the_norm():
    model = build("ViT")
    mlp = model.vit.layers[0].mlp
    mlp.fc1 = Lora(mlp.fc1)
    expected = run(model, "ViT")
    table = {row.name: row for row in exact(model)}
    row = table["vit.layers.0.layernorm_after"]
    assert row.new == "BiasedRMSNorm" and "bias kept: vit.layers.0.mlp.fc1" in row.note
    assert gap(run(model, "ViT"), expected) < 1e-9


@pytest.mark.parametrize("kind", ["weight", "layer", "bias"])
def test_shared_linear_layers(kind):
    """Writers may share: all are centred. Readers that share keep their norms' biases apart."""
    model = build("ViT")
    first, second = (layer.mlp for layer in model.vit.layers)
    if kind == "layer":
        second.fc1, second.fc2 = first.fc1, first.fc2
    else:
        for a, b in ((first.fc1, second.fc1), (first.fc2, second.fc2)):
            setattr(b, kind, getattr(a, kind))
    expected = run(model, "ViT")
    swapped = exact(model)
    table = {row.name: row for row in swapped}
    for i in range(2):
        row = table[f"vit.layers.{i}.layernorm_after"]
        assert row.new == "BiasedRMSNorm" and "bias kept" in row.note, row
    assert gap(run(model, "ViT"), expected) < 1e-9
    swapped.undo()
    assert torch.equal(run(model, "ViT"), expected)


def test_norms_that_compute_rmsnorm_already():
    model = build("Llama")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert not exact(model.train()) and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    model = build("GPT2")
    exact(model)
    after = run(model, "GPT2")
    assert all("no residual stream" in row.note for row in exact(model)) and torch.equal(run(model, "GPT2"), after)


def test_the_biased_norm():
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    norm = BiasedRMSNorm(6, dtype=torch.float64)
    scattered(norm)
    expected = norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() + norm.bias
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)
    low = copy.deepcopy(norm).bfloat16()
    near = low.weight.double() * low(x.bfloat16()).double().new_tensor(0) + copy.deepcopy(low).double()(
        x.bfloat16().double()
    )
    assert torch.equal(low(x.bfloat16()), near.bfloat16())  # rounded once
    norm.reset_parameters()
    assert (norm.weight == 1).all() and not norm.bias.any()
    exported = torch.export.export(nn.Sequential(scattered(norm)), (x,)).module()
    torch.testing.assert_close(exported(x), norm(x), rtol=1e-12, atol=1e-12)


def test_the_package_s_own_pre_norm_scheme_comes_after_an_exact_swap():
    model = build("GPT2")
    expected = run(model, "GPT2")
    done = nfrs.swap_residuals(model, "prenorm", init=None)
    with pytest.raises(nfrs.InputError, match="begins with an input of the model, or in a swapped block"):
        exact(model.eval())
    done.undo()
    exact(model.eval())
    nfrs.swap_residuals(model, "prenorm", init=None)
    assert gap(run(model, "GPT2"), expected) < 1e-9
