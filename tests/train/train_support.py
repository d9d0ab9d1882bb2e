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


class TorchAdam:
    """torch.optim.AdamW where the oracle's training step wants its own Adam."""

    def __init__(self, betas, eps=1e-8, weight_decay=0.0):
        self.settings, self.adam = {"betas": betas, "eps": eps, "weight_decay": weight_decay}, None

    def step(self, state, grads, lr):
        if self.adam is None:
            self.parameters = {name: state[name].detach().clone() for name in grads}
            self.adam = torch.optim.AdamW(self.parameters.values(), **self.settings)
        for name, grad in grads.items():
            self.parameters[name].grad = grad
        self.adam.param_groups[0]["lr"] = lr
        self.adam.step()
        return {name: parameter.clone() for name, parameter in self.parameters.items()}


def vocabulary(output):
    """Ids by piece; four are before them."""
    return {line.split()[0]: i + 4 for i, line in enumerate((output / "vocabulary.txt").read_text().splitlines())}


def whole_batch(output, corpus, start="bos"):
    """The training text as one batch of the oracle's, and the target vocabulary."""
    ids = vocabulary(output)
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
