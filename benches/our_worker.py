"""This package's side of the training benchmark: its training loop, run in timed windows by the protocol of windows.py.

    python our_worker.py CORPUS [--max-tokens 4096] [--update-freq 2] [--precision f32] [--model JSON] [--training JSON]

`--model` and `--training` take options of TransformerConfig and TrainingConfig beside those of the benchmark. The
observer, which the loop calls between updates, is where training waits.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from windows import Quit, Windows

import normformer_rs as nfrs
from normformer_rs.nn.distributed import world

# This is the model of fairseq_worker.RECIPE, with the same shape, dropout, optimizer and schedule.
MODEL = {
    "d_model": 128,
    "d_ff": 256,
    "heads": 4,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "residual": "postnorm",
    "norm": "layernorm",
    "init": "fairseq",
    "dropout": 0.3,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
NEVER = 10**9
TRAINING = {"updates": NEVER, "evaluate_every": NEVER, "lr": 0.005, "warmup": 2000}


class Observer:
    """Passes the training loop's reports to `before_update` and `after_update` of a Windows object. If that raises
    Quit, KeyboardInterrupt is raised, with which the loop ends a run properly."""

    def __init__(self, windows):
        self.windows = windows

    def started(self, event: dict[str, Any]) -> None:
        self._before_update()

    def updated(self, event: dict[str, Any]) -> None:
        self.windows.after_update(event["tokens"], event["loss"])
        self._before_update()

    def _before_update(self) -> None:
        try:
            self.windows.before_update()
        except Quit:
            raise KeyboardInterrupt from None

    def evaluated(self, event: dict[str, Any]) -> None: ...

    def message(self, level: str, text: str) -> None: ...


def train(corpus: Path, windows, model: dict[str, Any], training: dict[str, Any]) -> None:
    """Trains until `windows` raises Quit. `corpus` has train.en.gz, train.de.gz, valid.en.gz and valid.de.gz."""
    sides = {"source": "en", "target": "de"}
    files = {f"{part}_{s}": str(corpus / f"{part}.{e}.gz") for part in ("train", "valid") for s, e in sides.items()}
    config, text = nfrs.TransformerConfig(**{**MODEL, **model}), nfrs.DataConfig(**files, no_bpe=True)
    schedule = nfrs.TrainingConfig(**{**TRAINING, **training})
    ends = contextlib.suppress(KeyboardInterrupt, nfrs.Interrupted)
    with tempfile.TemporaryDirectory() as output, ends:
        place, observer = world("cpu"), Observer(windows)
        nfrs._core.train(config.to_json(), schedule.to_json(), text.to_json(), output, "new", place, observer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="folder with train.en.gz, train.de.gz, valid.en.gz, valid.de.gz")
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--update-freq", type=int, default=2)
    parser.add_argument("--precision", default="f32", choices=["f32", "bf16"])
    parser.add_argument("--model", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--training", type=json.loads, default={}, metavar="JSON")
    arguments = parser.parse_args()

    size = {"max_tokens": arguments.max_tokens, "accumulate": arguments.update_freq, "precision": arguments.precision}
    greeting = {"normformer_rs": nfrs.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    windows = Windows(sys.stdin, sys.stdout, greeting)
    train(arguments.corpus, windows, arguments.model, {**size, **arguments.training})


if __name__ == "__main__":
    main()
