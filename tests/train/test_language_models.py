"""Language models of today's shapes in the whole loop, against the oracle with torch's optimizer."""

from pathlib import Path

import pytest
import torch
from train_support import TorchAdam, events, fit, vocabulary

import normformer_rs as nfrs
import reference as ref

pytestmark = pytest.mark.usefixtures("one_thread")
SEGMENT = 8
SHAPE = {"architecture": "decoder-only", "d_model": 16, "d_ff": 24, "heads": 4, "decoder_layers": 2, "dropout": 0.0}
LOOP = {"updates": 10, "max_tokens": 40, "accumulate": 2, "adam_form": "torch", "schedule": "inverse-sqrt"}
MIXED = {"positions": "rotary", "rope_theta": 50.0, "activation": "geglu", "kv_heads": 1, "scale_embeddings": False}
LLAMA, LLAMA_LOOP = nfrs.preset("llama-tiny")
CASES = {
    "llama": (
        LLAMA.replace(**SHAPE, kv_heads=2).asdict(),
        {**LLAMA_LOOP.asdict(), "warmup": 4, "lr": 1e-2, "weight_decay_of": "all"},
    ),
    "gpt2": (
        {"positions": "learned", "max_positions": SEGMENT, "activation": "gelu", "scale_embeddings": False},
        {"lr": None, "lr_scale": 0.2, "warmup": 5, "weight_decay": 0.1, "weight_decay_of": "all", "clip_norm": 0.5},
    ),
    "mixed": (
        {**MIXED, "norm": "scalenorm", "residual": "sandwich"},
        {
            "lr": 1e-2,
            "warmup": 2,
            "smoothing": "twt",
            "weight_decay": 0.2,
            "weight_decay_of": "all",
            "beta1": 0.8,
            "clip_norm": 0.4,
        },
    ),
    "mixed-untied": (
        {**MIXED, "tie_embeddings": "none", "output_bias": True},
        {"lr": 1e-2, "warmup": 3, "vocab_mask": False, "label_smoothing": 0.2, "adam_eps": 1e-3},
    ),
    "gated": (
        {**MIXED, "output_gate": "element"},
        {"lr": 1e-2, "warmup": 2, "clip_norm": 0.5},
    ),
    "capped-logits": (
        {**MIXED, "logit_softcap": 1.5, "output_bias": True, "output_gate": "head"},
        {"lr": 1e-2, "warmup": 2, "clip_norm": 0.5},
    ),
    "normed": (
        {**MIXED, "norm": "rmsnorm", "qk_norm": True, "qk_norm_after_rotation": True, "v_norm": "unweighted"},
        {"lr": 1e-2, "warmup": 2, "clip_norm": 0.5},
    ),
    "sinks": (
        {**MIXED, "sinks": True},
        {"lr": 1e-2, "warmup": 2, "clip_norm": 0.5},
    ),
    "capped-scores": (
        {**MIXED, "sinks": True, "score_softcap": 5.0},
        {"lr": 1e-2, "warmup": 2, "clip_norm": 0.5},
    ),
}


def learning_rate(training, n):
    if training.lr is None:
        return ref.inverse_sqrt_lambda(n, SHAPE["d_model"], training.warmup, training.lr_scale)
    return ref.inverse_sqrt_peak(n, training.lr, training.warmup)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(all=9)
def test_ten_losses_of_a_language_model(tmp_path, corpus, name):
    """Ten updates of two batches read the text four times, each time in another order."""
    model, training = {**SHAPE, **CASES[name][0]}, nfrs.TrainingConfig(**{**CASES[name][1], **LOOP})
    data = {key: path for key, path in corpus.items() if key.endswith("target")}
    fit(tmp_path / "run", {**data, "segment_length": SEGMENT}, model, training.asdict())
    ids = vocabulary(tmp_path / "run")
    lines = Path(corpus["train_target"]).read_text().splitlines()
    stream = [token for line in lines for token in [*(ids[piece] for piece in line.split()), ref.EOS]]
    mask = None
    if training.vocab_mask:
        mask = torch.zeros(len(ids) + 4, dtype=torch.bool)
        mask[[ref.EOS, ref.UNK, *stream]] = True
    batches = ref.language_model_batches(stream, SEGMENT, training.max_tokens, training.seed)
    first = nfrs.Transformer(nfrs.TransformerConfig(**{**model, "vocab_size": len(ids) + 4}), seed=training.seed)
    state = {key: value.double() for key, value in first.named_parameters()}
    betas = (training.beta1, training.beta2)
    optimizer = TorchAdam(betas=betas, eps=training.adam_eps, weight_decay=training.weight_decay)
    for n, found in enumerate(events(tmp_path / "run", "updated"), 1):
        lr = learning_rate(training, n)
        step = ref.train_step(
            state,
            first.config.asdict(),
            [next(batches), next(batches)],
            optimizer,
            lr,
            smoothing=training.label_smoothing,
            formula=training.smoothing,
            vocabulary_mask=mask,
            max_norm=training.clip_norm,
        )
        assert (found["update"], found["tokens"]) == (n, step.tokens)
        assert found["lr"] == pytest.approx(lr, rel=1e-12)
        # f32 against f64: a loss is about 2, and a rounding of it 6e-8 of it; the norm gathers a few dozen roundings
        assert found["loss"] == pytest.approx(step.loss, rel=5e-7), n
        assert found["nll"] == pytest.approx(step.nll, rel=5e-7), n
        assert found["grad_norm"] == pytest.approx(step.grad_norm, rel=1e-5), n
        state = step.state
    assert n == LOOP["updates"]
