"""Training: equal to the oracle, reproducible, and able to learn."""

import platform
import sys
from pathlib import Path

import pytest
import torch
from train_support import RESIDUALS, TINY, TorchAdam, events, fit, losses, weights, whole_batch

import normformer_rs as nfrs
import reference as ref
from normformer_rs.formats.convert import to_fairseq

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "norm,residual,smoothing,start",
    [(norm, residual, "fairseq", "bos") for norm in ("layernorm", "scalenorm") for residual in RESIDUALS]
    + [("layernorm", "prenorm", "twt", "eos"), ("scalenorm", "postnorm", "twt", "bos")],
)
@pytest.mark.one_in(test=66, all=65)
def test_ten_losses_equal_the_oracles(tmp_path, corpus, norm, residual, smoothing, start):
    """One batch holds the whole corpus, so its order does not matter; seed 1 fixes the first weights."""
    model = {"norm": norm, "residual": residual, "decoder_start": start}
    fit(
        tmp_path / "run",
        corpus,
        model,
        {"smoothing": smoothing, "clip_norm": 0.5, "weight_decay": 0.01, "weight_decay_of": "all", "lr": 1e-3},
    )
    batch, mask = whole_batch(tmp_path / "run", corpus, start)
    config = nfrs.TransformerConfig(**TINY, **model, vocab_size=len(mask))
    first = nfrs.Transformer(config, seed=1)
    state = {k: v.double() for k, v in first.named_parameters()} | dict(first.named_buffers())
    options = {
        k: v for k, v in {**TINY, **model, "vocab_size": len(mask)}.items() if k not in ("dropout", "decoder_start")
    }
    if residual == "admin":
        state |= ref.profile_admin(state, options, batch.source, batch.target_input, ref.Dropout())
    optimizer = ref.Adam(betas=(0.9, 0.98), weight_decay=0.01)
    for update, loss in losses(tmp_path / "run").items():
        if residual in ("branchnorm", "prores"):
            state |= {"encoder.t": torch.tensor([update]), "decoder.t": torch.tensor([update])}
        step = ref.train_step(
            state, options, [batch], optimizer, 1e-3, formula=smoothing, vocabulary_mask=mask, max_norm=0.5
        )
        # f32 against f64: the loss is about 3, a rounding of it 2e-7; the norm gathers a few dozen roundings
        assert abs(loss - step.loss) < 2e-6, f"update {update}: {loss} against {step.loss}"
        assert abs(events(tmp_path / "run", "updated")[update - 1]["grad_norm"] / step.grad_norm - 1) < 2e-5
        state = step.state


@pytest.mark.parametrize("form", ["torch", "fairseq"])
@pytest.mark.one_in(all=2)
def test_adam_s_epsilon_stands_where_the_form_says(tmp_path, corpus, form):
    """Losses of ten updates; ε is so large that the other form's first rate is a seventh."""
    eps, betas = 1e-2, (0.9, 0.98)
    fit(tmp_path / "run", corpus, training={"adam_form": form, "adam_eps": eps, "lr": 1e-2})
    batch, mask = whole_batch(tmp_path / "run", corpus)
    options = {k: v for k, v in {**TINY, "vocab_size": len(mask)}.items() if k != "dropout"}

    def oracle(optimizer):
        first = nfrs.Transformer(nfrs.TransformerConfig(**TINY, vocab_size=len(mask)), seed=1)
        state = {k: v.double() for k, v in first.named_parameters()} | dict(first.named_buffers())
        for _ in range(10):
            step = ref.train_step(state, options, [batch], optimizer, 1e-2, vocabulary_mask=mask)
            yield step.loss
            state = step.state

    found = [*losses(tmp_path / "run").values()]
    of_torch, of_twin = oracle(TorchAdam(betas=betas, eps=eps)), oracle(ref.Adam(betas, eps, form="torch"))
    other = [*oracle(ref.Adam(betas, eps))]
    of_torch, of_twin = [*of_torch], [*of_twin]
    assert of_twin == pytest.approx(of_torch, rel=1e-12)
    expected, wrong = (of_torch, other) if form == "torch" else (other, of_torch)
    assert found == pytest.approx(expected, abs=2e-6)
    assert abs(found[-1] - wrong[-1]) > 1e-3


@pytest.mark.full
def test_accumulation_is_one_batch(tmp_path, corpus):
    fit(tmp_path / "one", corpus, training={"updates": 1})
    fit(tmp_path / "count", corpus, training={"updates": 1, "max_tokens": 150})
    batches = round(events(tmp_path / "count", "started")[0]["updates_per_epoch"])
    assert batches > 1
    fit(tmp_path / "many", corpus, training={"updates": 1, "max_tokens": 150, "accumulate": batches})
    one, many = (events(tmp_path / name, "updated")[0] for name in ("one", "many"))
    assert one["tokens"] == many["tokens"]
    # f32 sums in another order
    assert abs(one["loss"] / many["loss"] - 1) < 1e-6 and abs(one["grad_norm"] / many["grad_norm"] - 1) < 1e-5


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.one_in(all=2)
def test_the_same_seed_gives_the_same_bits(tmp_path, corpus, precision):
    training = {"max_tokens": 100, "precision": precision, "word_dropout": 0.1}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        fit(tmp_path / name, corpus, {"dropout": 0.3}, {**training, "seed": seed})
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")
    first, second = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="/proc/cpuinfo says what x86 has")
@pytest.mark.full
def test_bf16_without_instructions_for_its_products_is_warned_of(tmp_path, corpus):
    for precision in ("bf16", "f32"):
        fit(tmp_path / precision, corpus, training={"precision": precision, "updates": 2})
        said = [event["text"] for event in events(tmp_path / precision, "message")]
        warned = any("no instructions for products of bf16" in text for text in said)
        assert warned == (precision == "bf16" and "avx512_bf16" not in Path("/proc/cpuinfo").read_text())


STATISTICS = [{"norm": name} for name in ("batchnorm", "powernorm-v", "repbn", "prepbn")] + [
    {"norm": "powernorm", "powernorm_mode": mode, "powernorm_warmup": 2, "residual": residual}
    for mode, residual in [("paper", "prenorm"), ("paper", "postnorm"), ("release", "prenorm")]
]
SEVERAL = [
    {"residual": "attnres", "attnres_form": "normed", "attnres_queries": 3, "attnres_block": 2},
    {"residual": "mhc", "mhc_mixing": "none", "mhc_end": "mean"},
    {"residual": "mhc", "mhc_mixing": "channel", "mhc_rank": 3},
]


@pytest.mark.parametrize("model", [{"residual": name} for name in RESIDUALS] + STATISTICS + SEVERAL, ids=str)
@pytest.mark.one_in(all=40)
def test_activation_checkpointing_changes_no_bit(tmp_path, corpus, model):
    """Nor any statistic, though two micro-batches go forward and back between updates; layers do run twice."""
    calls = {}
    for name, recompute in (("plain", False), ("checkpointed", True)):
        training = {"updates": 2, "accumulate": 2, "max_tokens": 150, "activation_checkpointing": recompute}
        before = nfrs._core.operator_counts()["relu_dropout"]
        fit(tmp_path / name, corpus, {"dropout": 0.3, **model}, training)
        calls[name] = sum(nfrs._core.operator_counts()["relu_dropout"]) - sum(before)
    assert calls["checkpointed"] >= calls["plain"] + 2 * 2 * 4  # updates, micro-batches, layers
    assert losses(tmp_path / "plain") == losses(tmp_path / "checkpointed")
    plain, checkpointed = weights(tmp_path / "plain"), weights(tmp_path / "checkpointed")
    assert all(torch.equal(plain[k], checkpointed[k]) for k in plain)


def test_growth_is_in_the_checkpoint(tmp_path, corpus):
    model = {"residual": "branchnorm", "branchnorm_steps": 10}
    fit(tmp_path / "run", corpus, model, {"updates": 7})
    assert weights(tmp_path / "run")["decoder.t"].tolist() == [7]


@pytest.mark.full
def test_the_rate_decays_by_bleu(tmp_path, corpus):
    """Held-out text that training leads away from: its loss rises between evaluations, its BLEU stays zero."""
    lines = {"train": ["a b c"] * 40 + ["d d d d"], "valid": ["d d d d"] * 4}
    for name in corpus:
        (tmp_path / name).write_text("\n".join(lines[name[:5]]) + "\n")
    files = {name: str(tmp_path / name) for name in corpus}
    training = {"updates": 12, "evaluate_every": 1, "schedule": "no-warmup", "lr": 0.01, "label_smoothing": 0.0}
    fit(tmp_path / "run", files, training=training | {"criterion": "loss", "max_tokens": 100})
    evaluated = events(tmp_path / "run", "evaluated")
    assert all(e["bleu"] == 0 for e in evaluated)
    losses = [e["loss"] for e in evaluated]
    assert any(losses[i] > max(losses[i - 3 : i]) for i in range(3, 11)), "by the loss the rate would have decayed"
    assert {e["lr"] for e in events(tmp_path / "run", "updated")} == {0.01}
    # A language model has no BLEU: there the loss counts, which rises.
    text = {name: files[name] for name in ("train_target", "valid_target")}
    fit(tmp_path / "lm", text, {"architecture": "decoder-only"}, training | {"max_tokens": 100})
    assert min(e["lr"] for e in events(tmp_path / "lm", "updated")) < 0.01


@pytest.mark.full
def test_a_run_has_its_own_modes(tmp_path, corpus):
    """Whatever gradients and autocast are around it."""
    fit(tmp_path / "plain", corpus, training={"updates": 3})
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        fit(tmp_path / "other", corpus, training={"updates": 3})
    assert losses(tmp_path / "plain") == losses(tmp_path / "other")


def test_training_leaves_torchs_generator_alone(tmp_path, corpus):
    state = torch.get_rng_state()
    fit(tmp_path / "run", corpus, training={"updates": 2})
    nfrs.Transformer.from_checkpoint(tmp_path / "run")
    nfrs.Transformer(nfrs.TransformerConfig(**TINY, vocab_size=9), seed=3)
    assert torch.equal(torch.get_rng_state(), state)


def test_it_learns_translates_and_averages(tmp_path, corpus):
    training = {"updates": 150, "evaluate_every": 50, "max_tokens": 400, "lr": 5e-3}
    history = fit(tmp_path / "run", corpus, {"d_model": 32, "d_ff": 64, "norm": "scalenorm", "fixnorm": True}, training)
    assert history.loss[-1] < 0.7 * history.loss[0] and len(history.loss) == 150
    path = nfrs.average(tmp_path / "run", last=3)
    assert Path(path).name == "average"
    lines = Path(corpus["train_source"]).read_text().splitlines()
    for checkpoint in ("best", "last", "average"):
        found = nfrs.translate(tmp_path / "run", lines, checkpoint=checkpoint)
        assert len(found) == len(lines)
    newest = [
        weights(tmp_path / "run", p.name) for p in sorted((tmp_path / "run" / "checkpoints").glob("update-*"))[-3:]
    ]
    for name, tensor in weights(tmp_path / "run", "average").items():
        mean = sum(w[name].double() for w in newest) / 3
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("segment_length", [2, 64])
@pytest.mark.one_in(test=2)
def test_unigrams_of_a_language_model(tmp_path, corpus, segment_length):
    """Each token counts once, however the stream is cut."""
    files = {name: path for name, path in corpus.items() if name.endswith("target")} | {
        "segment_length": segment_length
    }
    fit(tmp_path / "run", files, {"architecture": "decoder-only"}, {"updates": 1})
    lines = Path(corpus["train_target"]).read_text().splitlines()
    tokens = [token for line in lines for token in [*line.split(), "</s>"]]
    shares = torch.tensor([tokens.count(token) / len(tokens) for token in {*tokens}], dtype=torch.float64)
    (started,) = events(tmp_path / "run", "started")
    assert started["unigram_entropy"] == pytest.approx(-(shares * shares.log()).sum().item(), rel=1e-12)


@pytest.mark.full
def test_a_language_model(tmp_path, corpus):
    data = {k: v for k, v in corpus.items() if k.endswith("target")}
    model = {"architecture": "decoder-only", "norm": "rmsnorm"}
    history = fit(tmp_path / "run", {**data, "segment_length": 8}, model, {"updates": 30, "max_tokens": 200})
    assert history.loss[-1] < history.loss[0]
    assert events(tmp_path / "run", "evaluated")[-1]["bleu"] is None


@pytest.mark.full
def test_a_tensorized_language_model(tmp_path, corpus):
    data = {k: v for k, v in corpus.items() if k.endswith("target")}
    model = {"architecture": "decoder-only", "attention": "tensorized", "tensorized_segment": 8, "tensorized_rank": 5}
    model["positions"] = "fairseq"
    with pytest.raises(ValueError, match=r"64 tokens in a row, .*at most tensorized_segment = 8: cut the text shorter"):
        fit(tmp_path / "run", data, model, {"updates": 30})
    data["segment_length"] = 8
    training = {"updates": 30, "max_tokens": 200, "evaluate_every": 10}
    history = fit(tmp_path / "run", data, model, training)
    assert history.loss[-1] < history.loss[0]
    fit(tmp_path / "again", data, model, training | {"activation_checkpointing": True})
    assert losses(tmp_path / "again") == pytest.approx(losses(tmp_path / "run"), rel=1e-5)
    with pytest.raises(nfrs.InputError, match="its attention is tensorized"):
        to_fairseq(tmp_path / "run", tmp_path / "run.pt")


@pytest.mark.data
@pytest.mark.full
def test_real_text_trains_and_translates(tmp_path, corpora):
    """A short version of the long runs: 40 updates on Multi30k beat the unigram model."""
    folder = corpora / "multi30k-bpe-en-de"
    data = {
        f"{part}_{side}": str(folder / f"{part}.{ext}.gz")
        for part in ("train", "valid")
        for side, ext in (("source", "en"), ("target", "de"))
    }
    trainer = nfrs.Trainer(
        nfrs.TransformerConfig(d_model=64, d_ff=128, heads=4, encoder_layers=2, decoder_layers=2, dropout=0.1),
        nfrs.TrainingConfig(updates=40, max_tokens=2048, lr=5e-3, warmup=40, evaluate_every=40),
        nfrs.DataConfig(**data, no_bpe=True),
    )
    history = trainer.fit(tmp_path / "run", progress=False)
    entropy = events(tmp_path / "run", "started")[0]["unigram_entropy"]
    assert history.nll[-1] < 0.95 * entropy
    assert events(tmp_path / "run", "evaluated")[-1]["bleu"] is not None


@pytest.mark.parametrize("mode", ["paper", "release"])
@pytest.mark.one_in(all=2)
def test_powernorms_steps_are_updates(tmp_path, corpus, mode):
    """However many micro-batches an update has: its warm-up ends with the same update, and the last one moves them."""
    model = {"norm": "powernorm", "powernorm_mode": mode, "powernorm_warmup": 3, "dropout": 0.0}
    fit(tmp_path / "one", corpus, model, {"updates": 5, "max_tokens": 150})
    fit(tmp_path / "several", corpus, model, {"updates": 5, "max_tokens": 150, "accumulate": 3})
    for name in ("one", "several"):
        assert weights(tmp_path / name)["encoder.layers.0.norm1.iters"].tolist() == [5]
    batch_norms = {"norm": "batchnorm"}
    fit(tmp_path / "moving", corpus, batch_norms, {"updates": 2, "max_tokens": 150, "accumulate": 3})
    assert weights(tmp_path / "moving")["encoder.layers.0.norm1.running_var"].ne(1).all()


@pytest.mark.parametrize("norm", ["powernorm", "batchnorm", "repbn"])
@pytest.mark.one_in(all=2)
def test_updates_of_several_batches_are_the_oracles(tmp_path, corpus, norm):
    """Ten updates of two micro-batches that hold the whole corpus, with the statistics that these leave."""
    own = {"norm": norm, **({"powernorm_warmup": 2} if norm == "powernorm" else {})}
    training = {"updates": 5, "accumulate": 2, "label_smoothing": 0.0, "lr": 1e-3}
    fit(tmp_path / "run", corpus, own, training)
    batch, mask = whole_batch(tmp_path / "run", corpus)
    config = nfrs.TransformerConfig(**{**TINY, **own, "dropout": 0.0}, vocab_size=len(mask))
    first = nfrs.Transformer(config, seed=1)
    state = {k: v.double() if v.is_floating_point() else v for k, v in first.state_dict().items()}
    options = {**TINY, **own, "dropout": 0.0, "vocab_size": len(mask)}
    del options["dropout"]
    adam = ref.Adam(betas=(0.9, 0.98))
    for found in events(tmp_path / "run", "updated"):
        step = ref.train_step(state, options, [batch, batch], adam, 1e-3, smoothing=0.0, vocabulary_mask=mask)
        assert found["nll"] == pytest.approx(step.nll, rel=1e-4)
        state = step.state
