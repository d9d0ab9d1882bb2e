"""This package's side of the training benchmark: its training loop, run in timed windows.

Speaks `fairseq_worker.py`'s protocol: `window SECONDS` trains whole updates until the first that ends after SECONDS and
answers with one line of JSON; `quit` ends. A window counts everything an update costs, waiting for the batch included;
validation and checkpoints stay outside. The observer, which the loop calls between updates, is where training waits.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import normformer_rs as nfrs

# transformer_tiny as in fairseq_worker.RECIPE: the same shape, dropout, optimizer and schedule.
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


class Windows:
    """Counts updates and, where a window is over, waits for the next command."""

    def __init__(self, reply):
        self.reply = reply
        self.deadline: float | None = None

    def started(self, event: dict[str, Any]) -> None:
        self.reply(ready=True, normformer_rs=nfrs.__version__, torch=torch.__version__, threads=torch.get_num_threads())
        self._wait()

    def updated(self, event: dict[str, Any]) -> None:
        self.updates += 1
        self.tokens += event["tokens"]
        self.loss += event["loss"] * event["tokens"]
        now = time.perf_counter()
        if now >= self.deadline:
            loss = self.loss / self.tokens
            self.reply(updates=self.updates, target_tokens=self.tokens, seconds=now - self.start, loss=loss)
            self._wait()

    def evaluated(self, event: dict[str, Any]) -> None: ...

    def message(self, level: str, text: str) -> None: ...

    def _wait(self) -> None:
        command = sys.stdin.readline().split()
        if not command or command[0] == "quit":
            raise KeyboardInterrupt
        self.updates, self.tokens, self.loss = 0, 0, 0.0
        self.start = time.perf_counter()
        self.deadline = self.start + float(command[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="folder with train.en.gz, train.de.gz, valid.en.gz, valid.de.gz")
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--update-freq", type=int, default=2)
    parser.add_argument("--precision", default="f32", choices=["f32", "bf16"])
    arguments = parser.parse_args()

    sides = {"source": "en", "target": "de"}
    data = {
        f"{part}_{s}": str(arguments.corpus / f"{part}.{e}.gz") for part in ("train", "valid") for s, e in sides.items()
    }
    training = nfrs.TrainingConfig(
        updates=NEVER,
        max_tokens=arguments.max_tokens,
        accumulate=arguments.update_freq,
        lr=0.005,
        warmup=2000,
        evaluate_every=NEVER,
        precision=arguments.precision,
    )
    model, text = nfrs.TransformerConfig(**MODEL), nfrs.DataConfig(**data, no_bpe=True)
    with tempfile.TemporaryDirectory() as output:
        observer = Windows(lambda **reply: print(json.dumps(reply), flush=True))
        with contextlib.suppress(KeyboardInterrupt, nfrs.Interrupted):
            nfrs._core.train(model.to_json(), training.to_json(), text.to_json(), output, "new", None, observer)


if __name__ == "__main__":
    main()
