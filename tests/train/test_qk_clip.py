"""QK-clip against the oracle: in f64, in the training loop, over ranks and micro-batches; and what it refuses."""

import itertools
from pathlib import Path

import pytest
import torch
from test_distributed import run
from train_support import TINY, events, fit, losses, vocabulary, weights, whole_batch

import normformer_rs as nfrs
import reference as ref
from normformer_rs import _core
from normformer_rs.schemes import Learned, Scheme, shift

pytestmark = pytest.mark.usefixtures("one_thread")
LIMIT = 0.05
"""Logits of the small models begin below 1; so every head is clipped in some updates, and some heads in none."""
EPS = 1e-3
"""So large that Adam makes no step of the rounding errors that are the gradients of keys' biases."""
SEGMENT = 8
QUIET = {"curves": False, "tensorboard": False}
TRAINING = {"qk_clip": LIMIT, "updates": 5, "lr": 3e-3, "log_layers": 1}
MODELS = {
    "plain": {},
    "grouped": {"heads": 4, "kv_heads": 2},
    "rotary": {"positions": "rotary", "residual": "prenorm"},
    "multiplier": {"attention_multiplier": 0.3, "linear_biases": False},
    "sinks": {"sinks": True, "output_gate": "head"},
    "scaled": {"residual": "value-residual"},
    "text": {"architecture": "decoder-only", "heads": 4, "kv_heads": 1, "value_embeddings": True},
}


def batch(generator, is_text, sentences=3):
    """Sentences of different lengths, padded on the right."""

    def side():
        lengths = torch.randint(1, 7, (sentences,), generator=generator).tolist()
        return [torch.randint(4, 20, (n,), generator=generator).tolist() for n in lengths]

    source, target = side(), side()
    read = ref.pad([[ref.BOS, *line] for line in target])
    return ref.Batch(None if is_text else ref.pad(source), read, ref.pad([[*line, ref.EOS] for line in target]))


def by_head(largest):
    return {f"{name}.{head}": float(value) for name, found in largest.items() for head, value in enumerate(found)}


@pytest.mark.parametrize("name", MODELS)
def test_five_updates_in_f64(name):
    """The model's gradients, torch's AdamW and the loop's clip, of two micro-batches, against the oracle's updates."""
    options = {**TINY, **MODELS[name], "vocab_size": 20}
    model = nfrs.Transformer(nfrs.TransformerConfig(**options), seed=3).double()
    with torch.no_grad():
        for parameter in (p for key, p in model.named_parameters() if key.endswith("in_proj_bias")):
            parameter.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(0))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    config = {key: value for key, value in options.items() if key != "dropout"}
    adam = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.9, 0.98), eps=EPS, weight_decay=0.0)
    oracle = ref.Adam(eps=EPS, form="torch")
    generator, clipped = torch.Generator().manual_seed(5), set()
    for _ in range(5):
        batches = [batch(generator, "text" in name) for _ in range(2)]
        tokens = sum(int((one.target != ref.PAD).sum()) for one in batches)
        for one in batches:
            loss, _ = ref.label_smoothed_cross_entropy(model(one.source, one.target_input), one.target, 0.1)
            (loss / tokens).backward()
        names, tensors, precision = model._tensors()
        read = [(one.source, one.target_input) for one in batches]
        found = _core.largest_logits(model._options, names, tensors, read, precision)
        adam.step(), adam.zero_grad()
        _core.clip_queries_and_keys(model._options, *model._tensors()[:2], found, LIMIT)
        step = ref.train_step(state, config, batches, oracle, 3e-3, qk_clip=LIMIT)
        assert found == pytest.approx(by_head(step.largest), rel=1e-12, abs=1e-13)
        clipped |= {key for key, value in found.items() if value > LIMIT}
        for key, value in model.named_parameters():
            torch.testing.assert_close(value.detach(), step.state[key], rtol=0, atol=1e-12, msg=key)
        state = step.state
    assert clipped, "no head was clipped"


@pytest.mark.parametrize("name", ["plain", "grouped", "rotary", "text"])
def test_the_loop_is_the_oracles(name, tmp_path, corpus):
    """Losses, weights and logged logits of five updates in f32; one batch holds the whole corpus."""
    model, is_text = MODELS[name], name == "text"
    data = {key: path for key, path in corpus.items() if not is_text or "target" in key}
    training = {**TRAINING, "adam_eps": EPS, **({"max_tokens": 40, "accumulate": 2} if is_text else {})}
    fit(tmp_path / "run", data | ({"segment_length": SEGMENT} if is_text else {}), model, training, **QUIET)
    if is_text:
        lines, ids = Path(corpus["train_target"]).read_text().splitlines(), vocabulary(tmp_path / "run")
        stream = [token for line in lines for token in [*(ids[piece] for piece in line.split()), ref.EOS]]
        batches = ref.language_model_batches(stream, SEGMENT, 40, 1)
        mask = torch.zeros(len(ids) + 4, dtype=torch.bool)
        mask[[ref.EOS, ref.UNK, *stream]] = True
    else:
        one, mask = whole_batch(tmp_path / "run", corpus)
        batches = itertools.repeat(one)
    options = {**TINY, **model, "vocab_size": len(mask)}
    first = nfrs.Transformer(nfrs.TransformerConfig(**options), seed=1)
    state = {key: value.double() for key, value in first.named_parameters()} | dict(first.named_buffers())
    options.pop("dropout")
    optimizer = ref.Adam(eps=EPS)
    clipped = 0
    for event in events(tmp_path / "run", "updated"):
        micro_batches = list(itertools.islice(batches, 2 if is_text else 1))
        step = ref.train_step(state, options, micro_batches, optimizer, 3e-3, vocabulary_mask=mask, qk_clip=LIMIT)
        expected = by_head(step.largest)
        assert event["layers"]["logits"] == pytest.approx(expected, rel=1e-4, abs=2e-6)
        assert event["largest_logit"] == max(event["layers"]["logits"].values())
        assert abs(event["loss"] - step.loss) < 2e-6
        clipped += sum(value > LIMIT for value in expected.values())
        state = step.state
    assert clipped
    found = weights(tmp_path / "run")
    for key, expected in state.items():
        torch.testing.assert_close(found[key].double(), expected, rtol=0, atol=3e-5, msg=key)


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True}, {"precision": "bf16"}], ids=str)
def test_the_largest_logit_is_that_of_all_micro_batches(options, tmp_path, corpus):
    """One update of the whole corpus, in one batch or in several, plain, with layers that run twice, and in bf16."""
    training = {**TRAINING, "updates": 1, **options}
    fit(tmp_path / "one", corpus, training=training, **QUIET)
    fit(tmp_path / "count", corpus, training={"updates": 1, "max_tokens": 150}, **QUIET)
    count = round(events(tmp_path / "count", "started")[0]["updates_per_epoch"])
    fit(tmp_path / "many", corpus, training={**training, "max_tokens": 150, "accumulate": count}, **QUIET)
    one, many = (events(tmp_path / name, "updated")[0]["layers"]["logits"] for name in ("one", "many"))
    assert count > 1 and many == pytest.approx(one, rel=1e-2 if "precision" in options else 1e-5)
    first, second = weights(tmp_path / "one"), weights(tmp_path / "many")
    for name, expected in first.items():
        if name.endswith("in_proj_weight"):
            near = 1e-2 if "precision" in options else 1e-4
            torch.testing.assert_close(second[name].norm(), expected.norm(), rtol=near, atol=0)


@pytest.mark.full
def test_the_largest_logit_is_that_of_all_ranks(tmp_path, corpus):
    """Two ranks take turns with the micro-batches that one rank accumulates."""
    options = {"qk-clip": LIMIT, "log-layers": 1, "kv-heads": 1, "updates": 5}
    for output, ranks, accumulate in [("alone", 1, 4), ("two", 2, 2)]:
        done = run(tmp_path / output, corpus, ranks, accumulate=accumulate, **options)
        assert done.returncode == 0, done.stderr
    alone, two = (events(tmp_path / name, "updated") for name in ("alone", "two"))
    for one, other in zip(alone, two, strict=True):
        assert other["layers"]["logits"] == pytest.approx(one["layers"]["logits"], rel=2e-4)
        assert other["loss"] == pytest.approx(one["loss"], rel=2e-6)
    assert alone[0]["largest_logit"] > LIMIT
    for name, expected in weights(tmp_path / "alone").items():
        torch.testing.assert_close(weights(tmp_path / "two")[name], expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("optimizer", ["adam", "muon", "normuon", "lion"])
@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.one_in(test=4)
def test_a_resumed_run_has_the_same_bits(optimizer, precision, tmp_path, corpus):
    """And the clip takes part in it: without it the weights differ."""
    training = {**TRAINING, "updates": 6, "evaluate_every": 3, "optimizer": optimizer, "precision": precision}
    model = MODELS["grouped"] | {"dropout": 0.2}
    fit(tmp_path / "whole", corpus, model, training, **QUIET)
    fit(tmp_path / "run", corpus, model, {**training, "updates": 3}, **QUIET)
    fit(tmp_path / "run", corpus, model, training, resume=True, **QUIET)
    fit(tmp_path / "off", corpus, model, {**training, "qk_clip": 0.0}, **QUIET)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole") != losses(tmp_path / "off")
    whole, again = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert all(torch.equal(value, again[name]) for name, value in whole.items())
    assert not any("largest_logit" in event for event in events(tmp_path / "off", "updated"))
    queries = next(name for name in whole if name.endswith("in_proj_weight"))
    assert whole[queries][:16].norm() < weights(tmp_path / "off")[queries][:16].norm()


def test_a_limit_above_all_logits_changes_no_bit(tmp_path, corpus):
    for name, limit in (("off", 0.0), ("on", 1e6)):
        history = fit(tmp_path / name, corpus, training={**TRAINING, "qk_clip": limit}, **QUIET)
        assert (history.largest_logit > 0).all() == (name == "on")
    assert losses(tmp_path / "off") == losses(tmp_path / "on")
    head = history.layers["logit/decoder.layers.1.multihead_attn.1"]
    assert len(history.layers) > 12 and (head <= history.largest_logit).all()
    assert not any(name.startswith("logit/") for name in nfrs.History.read(tmp_path / "off").layers)


class Shifted(Scheme):
    name = "shifted-queries"

    def inside(self, place):
        is_encoders = place.stack == "encoder" and place.sublayer == "self-attention"
        return {"query": shift(Learned("query_shift", 0.0, (place.config.d_model,)))} if is_encoders else {}


@pytest.mark.parametrize(
    ("model", "training", "named"),
    [
        ({"qk_norm": True, "norm": "rmsnorm"}, {}, "qk_norm"),
        ({"qk_l2norm": 16}, {}, "qk_l2norm"),
        ({"score_softcap": 5.0}, {}, "score_softcap"),
        ({"residual": "olmo2", "norm": "rmsnorm"}, {}, 'residual = "olmo2"'),
        ({"residual": "hybridnorm"}, {}, 'residual = "hybridnorm"'),
        ({"residual": "ngpt"}, {}, 'residual = "ngpt"'),
        ({"residual": Shifted()}, {}, 'residual = "shifted-queries"'),
        (
            {"attention": "tensorized", "architecture": "decoder-only", "tensorized_segment": 64},
            {},
            'attention = "tensorized"',
        ),
        ({}, {"unit_matrices": True}, "unit_matrices"),
        ({}, {"optimizer": "muon", "muon_on_sphere": True}, "muon_on_sphere"),
    ],
    ids=str,
)
def test_what_does_not_scale_with_queries_and_keys_is_refused(model, training, named, tmp_path, corpus):
    data = {k: v for k, v in corpus.items() if "target" in k} if "attention" in model else corpus
    with pytest.raises(nfrs.InputError, match=f"qk_clip = 100 scales .* with {named} they would not"):
        fit(tmp_path / "run", data, model, {"qk_clip": 100.0, **training}, **QUIET)
    with pytest.raises(nfrs.InputError, match="qk_clip must be at least 0, got -1"):
        fit(tmp_path / "run", corpus, training={"qk_clip": -1.0}, **QUIET)
