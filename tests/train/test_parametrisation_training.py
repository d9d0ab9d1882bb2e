"""The training loop under a parametrisation: its update is torch's with `param_groups`, and it resumes."""

from pathlib import Path

import pytest
import torch
from train_support import TINY, events, fit, losses, weights, whole_batch

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
