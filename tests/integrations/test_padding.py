"""Padding reaches the statistics of swapped models by the models' own arguments."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from normformer_rs import nn as nfnn
from normformer_rs.nn.masks import given, mask_for
from normformer_rs.nn.running import RunningNorm
from normformer_rs.surgery import swap_norms

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:.gradient_checkpointing_enable")
D, HEADS, FF = 16, 4, 32
SHAPE = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": FF}
IDS = torch.arange(14).reshape(2, 7) + 5
IDS[0, 4:] = 0
MASK = (IDS != 0).long()


def bert(norm="powernorm-v", **options):
    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=40, **SHAPE, **dropout, **options))
    swap_norms(model, norm)
    return model.train()


def seq2seq(name):
    common = {"vocab_size": 40, "d_model": D, "pad_token_id": 0, "decoder_start_token_id": 0}
    if name == "t5":
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(d_kv=4, d_ff=FF, num_layers=1, num_heads=HEADS, **common)
        )
    widths = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", FF))}
    heads = {f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")}
    common |= {"eos_token_id": 2, "forced_eos_token_id": None, "decoder_vocab_size": 40}
    return transformers.MarianMTModel(
        transformers.MarianConfig(max_position_embeddings=16, **widths, **heads, **common)
    )


def statistics(model):
    return [b.clone() for m in model.modules() if isinstance(m, RunningNorm) for b in m.buffers(recurse=False)]


def masks_seen(model):
    """The mask that each norm is under, by its name, filled by forwards."""
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, RunningNorm):
            module.register_forward_pre_hook(lambda _, args, name=name: seen.__setitem__(name, mask_for(args[0])))
    return seen


ADDED = (1.0 - MASK) * torch.finfo(torch.float32).min


def far(mask):
    return (1.0 - mask) * -1e9


GIVEN = {
    "by position": lambda model: model(IDS, MASK),
    "integers": lambda model: model(IDS, attention_mask=MASK),
    "bool": lambda model: model(IDS, attention_mask=MASK.bool()),
    "float": lambda model: model(IDS, attention_mask=MASK.float()),
    "four dimensions, added": lambda model: model(IDS, attention_mask=ADDED[:, None, None, :].expand(2, 1, 7, 7)),
    "four dimensions, −1e9": lambda model: model(IDS, attention_mask=far(MASK)[:, None, None, :].expand(2, 1, 7, 7)),
    "four dimensions, −1e4 in 16 bits": lambda model: model(
        IDS, attention_mask=((1 - MASK) * -1e4).bfloat16()[:, None, None, :].expand(2, 1, 7, 7).float()
    ),
    "four dimensions, bool": lambda model: model(IDS, attention_mask=MASK.bool()[:, None, None, :].expand(2, 1, 7, 7)),
}


@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.one_in(test=8, all=7)
def test_every_kind_of_mask_counts(kind):
    expected, model = bert(), bert()
    with nfnn.padding_mask(MASK == 0):
        expected(IDS, attention_mask=MASK)
    GIVEN[kind](model)
    assert given() is None
    torch.testing.assert_close(statistics(model), statistics(expected), rtol=1e-6, atol=1e-6)
    without = bert()
    without.bert(IDS[:, :4])
    assert not torch.allclose(statistics(without)[1], statistics(expected)[1])


def test_a_bias_that_is_no_mask_hides_nothing():
    model = bert()
    seen = masks_seen(model)
    model(IDS, attention_mask=far(MASK)[:, None, None, :].expand(2, 1, 7, 7) - torch.rand(7, 7) - 0.1)
    assert all(torch.equal(mask, MASK == 0) for mask in seen.values())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.one_in(test=2)
def test_recomputation_has_the_masks_of_the_first_run(reentrant):
    plain, model = bert("powernorm", use_cache=False), bert("powernorm", use_cache=False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for one in (plain, model):
        one(IDS, attention_mask=MASK).logits[MASK.bool()].square().sum().backward()
    for a, b in zip(plain.parameters(), model.parameters()):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(statistics(model), statistics(plain))


@pytest.mark.parametrize("decoders", [True, False])
@pytest.mark.parametrize("name", ["t5", "marian"])
@pytest.mark.filterwarnings("ignore:norms with statistics stand in a causal")
@pytest.mark.one_in(test=2)
def test_each_stack_has_its_own_mask_where_shapes_are_equal(name, decoders):
    model, other = seq2seq(name).train(), MASK.flip(0)
    swap_norms(model, "batchnorm")
    seen = masks_seen(model)
    model(IDS, attention_mask=MASK, decoder_input_ids=IDS.flip(0), decoder_attention_mask=other if decoders else None)
    assert {path.partition("coder")[0][-2:] for path in seen} == {"en", "de"}
    for path, mask in seen.items():
        assert torch.equal(mask, (other if "decoder" in path else MASK) == 0), path
    model.eval().generate(IDS, attention_mask=MASK, max_new_tokens=3)


@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_modules(batch_first):
    """(T, B) as well as (B, T), where B = T and nothing but the layout tells them apart."""
    model = nn.Transformer(D, HEADS, 1, 1, FF, batch_first=batch_first)
    swap_norms(model, "powernorm-v")
    seen, (source, target) = masks_seen(model), torch.zeros(2, 5, 5, dtype=torch.bool)
    source[0, 3:], target[2, 1:] = True, True
    x = torch.randn(5, 5, D)
    model(x, x, src_key_padding_mask=source, tgt_key_padding_mask=target)
    for path, mask in seen.items():
        expected = target if "decoder" in path else source
        assert torch.equal(mask, expected if batch_first else expected.T), path
    for fill in (-torch.inf, -1e9, torch.finfo(torch.float32).min):
        floats = torch.full((5, 5), -0.5).masked_fill(source, fill)  # a soft bias hides nothing
        model.encoder(x, src_key_padding_mask=floats)
        assert torch.equal(seen["encoder.norm"], source if batch_first else source.T)


# Decoders without decoder_attention_mask, which transformers' collator does not make


LABELS = torch.tensor([[7, 8, 9, 2, -100, -100, -100], [7, 8, 9, 10, 11, 12, 2]])
HIDDEN = torch.tensor([[False] * 5 + [True] * 2, [False] * 7])  # of the labels, shifted
CALLS = {
    "labels": lambda model, ids: {"labels": LABELS},
    "labels that end in padding": lambda model, ids: {"labels": LABELS.masked_fill(LABELS == -100, 0)},
    "tokens": lambda model, ids: {"decoder_input_ids": ids},
    "tokens and labels": lambda model, ids: {"decoder_input_ids": ids, "labels": LABELS},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["t5", "marian"])
@pytest.mark.filterwarnings("ignore:norms with statistics stand in a causal")
@pytest.mark.one_in(test=4, all=2)
def test_a_decoders_padding_is_read_from_its_labels_or_tokens(name, call):
    model = seq2seq(name).train()
    swap_norms(model, "batchnorm")
    seen, got = masks_seen(model), []
    model.get_decoder().register_forward_pre_hook(lambda _, a, k: got.append(k["input_ids"]), with_kwargs=True)
    model(IDS, attention_mask=MASK, labels=LABELS)
    ids = got[0]  # as the model shifts them
    seen.clear()
    model(IDS, attention_mask=MASK, **CALLS[call](model, ids))
    assert any("decoder" in path for path in seen) and any("encoder" in path for path in seen)
    for path, mask in seen.items():
        assert torch.equal(mask, HIDDEN if "decoder" in path else MASK == 0), path
    explicit = torch.ones(2, 7)
    explicit[1, 3:] = 0
    model(IDS, attention_mask=MASK, decoder_attention_mask=explicit, **CALLS[call](model, ids))
    assert all(torch.equal(mask, explicit == 0) for path, mask in seen.items() if "decoder" in path)


@pytest.mark.filterwarnings("ignore:norms with statistics stand in a causal")
def test_padding_that_ends_sentences_too_is_read_from_labels_or_told_of():
    """pad = eos, as Whisper has it: tokens do not tell, labels do."""
    model = seq2seq("marian").train()
    for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        config.pad_token_id = config.eos_token_id = 2
    swap_norms(model, "batchnorm")
    seen = masks_seen(model)
    model(IDS, attention_mask=MASK, labels=LABELS)
    assert all(torch.equal(mask, HIDDEN) for path, mask in seen.items() if "decoder" in path)
    ids = torch.tensor([[0, 7, 8, 9, 2, 2, 2], [0, 7, 8, 9, 10, 11, 12]])
    with pytest.warns(UserWarning, match="call MarianMTModel with its decoder_attention_mask, or"):
        model(IDS, attention_mask=MASK, decoder_input_ids=ids)
    model(IDS, attention_mask=MASK, decoder_input_ids=ids)


@pytest.mark.filterwarnings("ignore:norms with statistics stand in a causal")
def test_an_encoder_without_a_mask_is_told_of_although_the_decoder_has_one():
    model = seq2seq("t5").train()
    swap_norms(model, "batchnorm")
    seen = masks_seen(model)
    with pytest.warns(UserWarning, match="call T5ForConditionalGeneration with its attention_mask, or"):
        model(IDS, labels=LABELS)
    assert all((mask is not None) == ("decoder" in path) for path, mask in seen.items())


def test_the_statistics_are_those_without_padding():
    """The collator's batch, and the same sentences with the padding's mask by hand."""
    collated, by_hand = seq2seq("t5"), seq2seq("t5")
    by_hand.load_state_dict(collated.state_dict())
    for model in (collated, by_hand):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
        swap_norms(model.train(), "powernorm", warmup_iters=0)
    collated(IDS, attention_mask=MASK, labels=LABELS)
    by_hand(IDS, attention_mask=MASK, decoder_attention_mask=~HIDDEN, labels=LABELS)
    torch.testing.assert_close(statistics(collated), statistics(by_hand))


def test_with_padding_mask_comes_first_and_undo_takes_hooks_away():
    model, explicit = bert(), torch.zeros(2, 7, dtype=torch.bool)
    explicit[1, 6] = True
    seen = masks_seen(model)
    with nfnn.padding_mask(explicit):
        model(IDS, attention_mask=MASK)
    assert all(torch.equal(mask, explicit) for mask in seen.values())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(bert()))):
        seen = masks_seen(twin)
        twin(IDS, attention_mask=MASK)
        assert all(torch.equal(mask, MASK == 0) for mask in seen.values())
    model = transformers.BertModel(transformers.BertConfig(vocab_size=40, **SHAPE))
    swap_norms(model, "powernorm-v").undo()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_a_forward_that_raises_leaves_no_mask_behind():
    model = bert()
    model.bert.encoder.layer[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(IDS, attention_mask=MASK)
    assert given() is None


def test_an_interrupted_call_gives_no_mask_to_the_next():
    def interrupt(*_):
        raise KeyboardInterrupt

    model = bert()
    handle = model.bert.encoder.layer[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(IDS, attention_mask=MASK)
    handle.remove()
    seen = masks_seen(model)
    model(IDS + 1)
    assert len(seen) == 6 and set(seen.values()) == {None} and given() is None


def test_padding_without_a_mask_is_told_once_and_nothing_else():
    model = bert()
    with pytest.warns(UserWarning, match="call BertForMaskedLM with its attention_mask"):
        model(IDS)
    model(IDS), model(IDS, attention_mask=MASK)
    full = bert()
    full(IDS[:, :4])  # no token of padding, no warning
    full.eval()(IDS)
    with torch.no_grad():
        bert().eval()(IDS)


class Wrapped(nn.Module):
    """Takes a mask for itself, and has a part that takes none."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D))

    def forward(self, x, attention_mask=None):
        return self.body(x)


def test_rows_of_another_order_take_the_masks_of_the_model_around_them():
    model = Wrapped()
    swap_norms(model, "batchnorm")
    seen, x = masks_seen(model), torch.randn(2, 7, D)
    for rows, expected in ((x, MASK == 0), (x.transpose(0, 1), MASK.T == 0), (x.flatten(0, 1), MASK.flatten() == 0)):
        model(rows, attention_mask=MASK)
        assert torch.equal(seen["body.1"], expected)


@pytest.mark.full
def test_compiled_and_exported_models_read_masks_too():
    model, x = Wrapped(), torch.randn(2, 7, D)
    swap_norms(model, "powernorm-v")
    twin = copy.deepcopy(model)
    expected = model(x, attention_mask=MASK)
    found = torch.compile(twin, backend="aot_eager", fullgraph=True)(x, attention_mask=MASK)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(statistics(twin), statistics(model))
    model.eval()
    found = torch.export.export(model, (x, MASK)).module()(x, MASK)
    torch.testing.assert_close(found, model(x, MASK))
    assert not found[0, 4:].any()


def test_masks_that_fit_no_norm_are_told_of():
    class Strided(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(D)

        def forward(self, x, attention_mask=None):
            return self.norm(x[:, ::2])

    model = Strided()
    swap_norms(model, "batchnorm")
    with pytest.warns(UserWarning, match=r"other shapes than the padding masks \(2, 6\)"):
        model(torch.randn(2, 6, D), attention_mask=torch.ones(2, 6))
    model(torch.randn(2, 6, D), attention_mask=torch.ones(2, 6))


def gpt2():
    shape = {"n_embd": D, "n_layer": 1, "n_head": HEADS, "n_positions": 16, "vocab_size": 40}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=1, eos_token_id=2))


def test_causal_models_are_told_of_leaks():
    """A later token moves earlier logits in training, and the model says so; PowerNorm without a warm-up takes the
    statistics of earlier batches, so it has nothing to say."""
    told = "later tokens move its outputs at earlier ones"
    for norm, options, leaks in (
        ("powernorm", {}, True),
        ("batchnorm", {}, True),
        ("powernorm", {"warmup_iters": 0}, False),
    ):
        model, ids = gpt2(), IDS[1:].clone()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        swap_norms(model, norm, **options)
        other = copy.deepcopy(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            before = model.train()(ids).logits[:, :5]
            ids[0, 6] = 3
            moved = (other.train()(ids).logits[:, :5] - before).abs().max().item()
        assert (moved > 1e-3) == leaks and (told in "".join(str(w.message) for w in caught)) == leaks
    layer = nn.TransformerEncoderLayer(D, HEADS, FF, batch_first=True)
    swap_norms(layer, "batchnorm")
    layer(torch.randn(2, 5, D))
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    with pytest.warns(UserWarning, match=told):
        layer(torch.randn(2, 5, D), src_mask=causal, is_causal=True)
