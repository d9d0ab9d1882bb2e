"""Small runs of the training loop, and what they log."""

import json
from pathlib import Path

import torch

import normformer_rs as nfrs
import reference as ref

TINY = {"d_model": 16, "d_ff": 24, "heads": 2, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}


def fit(output, data, model=(), training=(), **options):
    trainer = nfrs.Trainer(
        nfrs.TransformerConfig(**{**TINY, **dict(model)}),
        nfrs.TrainingConfig(
            **{"updates": 10, "max_tokens": 10000, "schedule": "constant", "lr": 1e-2, "warmup": 0, **dict(training)}
        ),
        nfrs.DataConfig(**data, no_bpe=True),
    )
    return trainer.fit(output, progress=False, **options)


def events(output, kind):
    lines = (Path(output) / "log.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == kind]


def losses(output):
    return {e["update"]: e["loss"] for e in events(output, "updated")}


def weights(output, name="last"):
    return nfrs.Transformer.from_checkpoint(output, name).state_dict()


def whole_batch(output, corpus, start="bos"):
    """The training text as one batch of the oracle's, and the target vocabulary."""
    vocabulary = [line.split()[0] for line in (output / "vocabulary.txt").read_text().splitlines()]
    ids = {piece: i + 4 for i, piece in enumerate(vocabulary)}
    sides = [
        [[ids[piece] for piece in line.split()] for line in Path(corpus[f"train_{side}"]).read_text().splitlines()]
        for side in ("source", "target")
    ]
    mask = torch.zeros(len(ids) + 4, dtype=torch.bool)
    mask[[ref.EOS, ref.UNK, *(t for line in sides[1] for t in line)]] = True
    batch = ref.Batch(
        ref.pad([[*line, ref.EOS] for line in sides[0]]),
        ref.pad([[{"bos": ref.BOS, "eos": ref.EOS}[start], *line] for line in sides[1]]),
        ref.pad([[*line, ref.EOS] for line in sides[1]]),
    )
    return batch, mask


RESIDUALS = [entry["name"] for entry in nfrs.tables()["residuals"]]
