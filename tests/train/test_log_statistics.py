"""`log_statistics`: sizes of the stream, the model's change and batches' statistics over training, which it leaves
alone."""

import numpy as np
import pytest
import torch
from train_support import TINY, events, fit, losses, weights, whole_batch

import normformer_rs as nfrs
import reference as ref
from normformer_rs import analysis

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "model",
    [
        {"norm": "batchnorm"},
        {"norm": "powernorm", "powernorm_warmup": 2},
        {"norm": "powernorm", "powernorm_mode": "release", "powernorm_warmup": 2},
        {"residual": "branchnorm", "branchnorm_steps": 5},
        {"residual": "mhc", "norm": "powernorm-v"},
        {"residual": "admin"},
    ],
    ids=str,
)
@pytest.mark.one_in(all=6)
def test_it_changes_no_bit(tmp_path, corpus, model):
    training = {"updates": 4, "accumulate": 2, "max_tokens": 150}
    for name, every in (("plain", 0), ("watched", 1)):
        fit(tmp_path / name, corpus, {"dropout": 0.3, **model}, {**training, "log_statistics": every})
    assert losses(tmp_path / "plain") == losses(tmp_path / "watched")
    plain, watched = weights(tmp_path / "plain"), weights(tmp_path / "watched")
    assert all(torch.equal(plain[k], watched[k]) for k in plain)


@pytest.mark.full
def test_the_numbers_are_the_models(tmp_path, corpus):
    """One batch holds the whole corpus, so that what is logged of an update is what `analysis` sees of it."""
    model = {"norm": "layernorm", "encoder_norm": "batchnorm", "dropout": 0.0}
    history = fit(tmp_path / "run", corpus, model, {"log_statistics": 2, "updates": 4, "evaluate_every": 1, "keep": 9})
    batch, mask = whole_batch(tmp_path / "run", corpus)
    assert [n for n, e in enumerate(events(tmp_path / "run", "updated"), 1) if "statistics" in e] == [2, 4]
    config = nfrs.TransformerConfig(**{**TINY, **model}, vocab_size=len(mask))
    first = nfrs.Transformer(config, seed=1)
    for update in (2, 4):
        before = nfrs.Transformer.from_checkpoint(tmp_path / "run", update - 1)
        logged = {name: values[update - 1] for name, values in history.layers.items()}

        def nll(logits):
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.target.flatten(), ignore_index=ref.PAD)

        seen = analysis.observe(before.train(), batch.source, batch.target_input, nll)
        for stack, of_stack in seen.items():
            for layer, size in enumerate(of_stack.sizes):
                assert logged[f"size/{stack}.{layer}"] == pytest.approx(size, rel=1e-5)
            for norm, found in enumerate(of_stack.statistics):
                assert logged[f"batch_distance/{stack}.{norm}.mean"] == pytest.approx(found[0], rel=1e-4)
                assert logged[f"batch_gradient/{stack}.{norm}.variance"] == pytest.approx(found[4], rel=1e-3)
        assert not any("power" in name for name in logged), "BatchNorm has no ψ"
        outputs = [m.eval()(batch.source, batch.target_input) for m in (before, first)]
        assert logged["change/decoder"] > 0 and not torch.equal(*outputs)
    assert history.layers["change/decoder"][3] > history.layers["change/decoder"][1]
    assert history.layers["size/decoder.0"].shape == (4,) and np.isnan(history.layers["size/decoder.0"][0])


@pytest.mark.full
def test_a_resumed_run_knows_its_beginning(tmp_path, corpus):
    training = {"log_statistics": 3, "max_tokens": 150}
    fit(tmp_path / "whole", corpus, {}, {**training, "updates": 6})
    fit(tmp_path / "parts", corpus, {}, {**training, "updates": 4})
    fit(tmp_path / "parts", corpus, {}, {**training, "updates": 6}, resume=True)
    whole, parts = (events(tmp_path / name, "updated")[-1]["statistics"] for name in ("whole", "parts"))
    assert whole == parts and whole["change/decoder"] > 0
