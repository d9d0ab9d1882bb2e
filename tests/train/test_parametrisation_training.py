"""The training loop under a parametrisation: its update is torch's with `param_groups`, and it resumes."""

from pathlib import Path

import pytest
import torch
from train_support import TINY, events, fit, losses, vocabulary, weights, whole_batch

import normformer_rs as nfrs
import reference as ref

pytestmark = pytest.mark.usefixtures("one_thread")
SCALED = {
    "standard": {},
    "standard, mhc": {"residual": "mhc", "norm": "gated-rmsnorm"},
    "mup, attnres": {"parametrisation": "mup", "base_width": 4, "residual": "attnres"},
    "completep, denseformer": {
        "parametrisation": "completep",
        "base_width": 4,
        "base_depth": 1,
        "encoder_layers": 4,
        "residual": "denseformer",
    },
    "mup": {"parametrisation": "mup", "base_width": 4},
    "depth-mup": {"parametrisation": "depth-mup", "base_width": 4, "base_depth": 1},
    "completep": {"parametrisation": "completep", "base_width": 4, "base_depth": 1, "encoder_layers": 4},
}


@pytest.mark.parametrize("clip_norm", [0.0, 0.3])
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.one_in(all=14)
def test_an_update_is_torchs(tmp_path, corpus, name, clip_norm):
    """ε is as large as gradients are, so that a wrong one shows."""
    lr, eps, decay = 1e-3, 1e-2, 0.1
    training = {"adam_form": "torch", "adam_eps": eps, "lr": lr, "weight_decay": decay, "clip_norm": clip_norm}
    fit(tmp_path / "run", corpus, SCALED[name], {**training, "updates": 1, "label_smoothing": 0.0, "vocab_mask": False})
    batch, mask = whole_batch(tmp_path / "run", corpus)
    model = nfrs.Transformer(nfrs.TransformerConfig(**{**TINY, **SCALED[name]}, vocab_size=len(mask)), seed=1)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    logits = model(batch.source, batch.target_input)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.target.flatten(), ignore_index=ref.PAD).backward()
    if clip_norm:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        assert norm > clip_norm and events(tmp_path / "run", "updated")[0]["grad_norm"] == pytest.approx(norm.item())
    groups = nfrs.param_groups(model, lr, weight_decay=decay, eps=eps)
    torch.optim.AdamW(groups, betas=(0.9, 0.98)).step()
    ours = weights(tmp_path / "run")
    for key, p in model.named_parameters():
        torch.testing.assert_close(ours[key], p.detach(), rtol=1e-6, atol=1e-7, msg=lambda m, k=key: f"{k}: {m}")
        assert not torch.equal(p.detach(), before[key]) or not p.grad.any(), key


UNIT = {"parametrisation": "u-mup", "attention_length": 8, "architecture": "decoder-only", "activation": "swiglu"}
UNIT |= {"norm": "rmsnorm", "positions": "rotary", "tie_embeddings": "none", "res_attn_ratio": 0.5, "output_alpha": 2.0}


def test_two_updates_of_a_unit_scaled_model_are_torchs(tmp_path, corpus):
    """During a warm-up, so that decay follows the schedule but not the highest rate; ε is as large as gradients are. A
    resume lies between. Then the oracle, which has no cache, decodes as the run does."""
    training = {"adam_form": "torch", "adam_eps": 0.1, "lr": 0.2, "lr_multiplier": 0.5, "weight_decay": 0.1}
    training |= {"warmup": 2, "label_smoothing": 0.0, "vocab_mask": False}
    data = {key: path for key, path in corpus.items() if key.endswith("target")} | {"segment_length": 8}
    fit(tmp_path / "run", data, UNIT, training | {"updates": 1})
    fit(tmp_path / "run", data, UNIT, training | {"updates": 2}, resume=True)
    ids = vocabulary(tmp_path / "run")
    lines = Path(corpus["train_target"]).read_text().splitlines()
    stream = [token for line in lines for token in [*(ids[piece] for piece in line.split()), ref.EOS]]
    batches = ref.language_model_batches(stream, 8, 10000, 1)
    model = nfrs.Transformer(nfrs.TransformerConfig(**{**TINY, **UNIT}, vocab_size=len(ids) + 4), seed=1)
    adam = torch.optim.AdamW(nfrs.param_groups(model, 0.1, weight_decay=0.1, eps=0.1), betas=(0.9, 0.98))
    rates = [group["lr"] for group in adam.param_groups]
    for update in (1, 2):
        batch = next(batches)
        logits = model(None, batch.target_input)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.target.flatten(), ignore_index=ref.PAD).backward()
        for group, rate in zip(adam.param_groups, rates, strict=True):
            group["lr"] = rate * update / 2
        adam.step()
        adam.zero_grad()
    ours = weights(tmp_path / "run")
    for key, p in model.named_parameters():
        torch.testing.assert_close(ours[key], p.detach(), rtol=1e-5, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")
    how = {"max_length": 6, "sentences": 0}
    ((text,),) = nfrs.generate(tmp_path / "run", ["a b"], nfrs.GenerationConfig(temperature=0, **how))
    state = {key: weight.double() for key, weight in ours.items()}
    mask = torch.arange(len(ids) + 4) >= ref.EOS  # neither BOS nor PAD is ever made
    tokens, total = ref.greedy_text(state, model.config.asdict(), [ids["a"], ids["b"]], context=8, mask=mask, **how)
    assert len(tokens) == text.tokens == 6 and text.log_probability == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("name", ["mup", "completep"])
@pytest.mark.one_in(all=2)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, corpus, name):
    training = {"max_tokens": 100, "schedule": "inverse-sqrt", "lr": None, "warmup": 4, "evaluate_every": 5}
    model = {"dropout": 0.3, **SCALED[name]}
    fit(tmp_path / "whole", corpus, model, {**training, "updates": 12})
    fit(tmp_path / "parts", corpus, model, {**training, "updates": 7})
    fit(tmp_path / "parts", corpus, model, {**training, "updates": 12}, resume=True)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(a[k], b[k]) for k in a)
    with pytest.raises(nfrs.InputError, match=r"base_width was 4, now 8; resume with the same options"):
        fit(tmp_path / "parts", corpus, {**model, "base_width": 8}, {**training, "updates": 14}, resume=True)


def test_the_schedules_own_rate_is_the_bases(tmp_path, corpus):
    """λ/√d·n_w^-½ has the base's d, so that the rate is that of the base model."""
    training = {"schedule": "inverse-sqrt", "lr": None, "warmup": 4, "updates": 4}
    fit(tmp_path / "run", corpus, SCALED["mup"], training)
    assert events(tmp_path / "run", "updated")[3]["lr"] == pytest.approx(4**-0.5 * 4**-0.5)


@pytest.mark.full
def test_decoding_scales_as_training_does(tmp_path, corpus):
    """Greedy translations are the oracle's, whose every step reads the whole prefix."""
    model = SCALED["completep"]
    fit(tmp_path / "run", corpus, model, {"updates": 30})
    lines = [line.split() for line in Path(corpus["valid_source"]).read_text().splitlines()]
    vocabulary = [line.split()[0] for line in (tmp_path / "run" / "vocabulary.txt").read_text().splitlines()]
    ids = {piece: i + 4 for i, piece in enumerate(vocabulary)}
    state = {key: value.double() for key, value in weights(tmp_path / "run", "best").items()}
    options = {**TINY, **model, "vocab_size": len(ids) + 4}
    del options["dropout"]
    search = nfrs.SearchConfig(beam=1)
    found = nfrs.translate(tmp_path / "run", [" ".join(line) for line in lines], search=search)
    _, mask = whole_batch(tmp_path / "run", corpus)
    for line, (translation,) in zip(lines, found, strict=True):
        source = [*(ids[piece] for piece in line), ref.EOS]
        best = ref.greedy(state, options, source, vocabulary_mask=mask)
        pieces = [vocabulary[token - 4] for token in best.tokens if token > ref.UNK]
        assert translation.text == " ".join(pieces)
