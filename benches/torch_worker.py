"""PyTorch's side of the training benchmark: torch.nn.Transformer, run in timed windows by the protocol of windows.py.

    python torch_worker.py CORPUS [--max-tokens 4096] [--update-freq 2] [--precision f32] [--eager]

The model, its tied embedding, the full projection and the loss are one module under torch.compile; AdamW is fused. The
sentences are all of the corpus, in batches whose two lengths are padded to multiples of 8. One graph serves all shapes
(dynamic): one for each of their 26 would compile for half an hour. Every shape is met once before the first window;
a compilation after that is an error.
"""

import argparse
import contextlib
import gzip
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from our_worker import MODEL, TRAINING
from torch import Tensor
from windows import Quit, Windows

from normformer_rs.bench.training import PAD, Reference

BEGIN, END, UNKNOWN = 0, 2, 3
Sentence = list[int]


class Batch(NamedTuple):
    source: Tensor
    before: Tensor
    """The decoder's input: the mark of the beginning, then the words of the target."""
    target: Tensor
    tokens: int
    """The number of real target tokens."""


def read(corpus: Path) -> tuple[list[tuple[Sentence, Sentence]], int]:
    """Returns all pairs of training sentences as numbers, and the size of the common vocabulary."""

    def lines(language: str) -> list[list[str]]:
        with gzip.open(corpus / f"train.{language}.gz", "rt", encoding="utf-8") as file:
            return [line.split() for line in file]

    sides = lines("en"), lines("de")
    words = sorted({word for side in sides for line in side for word in line})
    numbers = {word: number for number, word in enumerate(words, start=UNKNOWN + 1)}
    numbered = [[[numbers[word] for word in line] for line in side] for side in sides]
    return list(zip(*numbered, strict=True)), UNKNOWN + 1 + len(words)


def batches(pairs: list[tuple[Sentence, Sentence]], max_tokens: int) -> list[Batch]:
    """Returns batches with at most `max_tokens` padded tokens on each side. All pairs of a batch have the same two
    padded lengths."""

    def lengths(pair: tuple[Sentence, Sentence]) -> tuple[int, int]:
        return -(-(len(pair[0]) + 1) // 8) * 8, -(-(len(pair[1]) + 1) // 8) * 8

    def padded(rows: list[Sentence], length: int) -> Tensor:
        return torch.tensor([row + [PAD] * (length - len(row)) for row in rows])

    found = []
    for (source, target), same in itertools.groupby(sorted(pairs, key=lengths), key=lengths):
        group, count = list(same), max_tokens // max(source, target)
        for start in range(0, len(group), count):
            theirs, ours = zip(*group[start : start + count], strict=True)
            found.append(
                Batch(
                    padded([[*row, END] for row in theirs], source),
                    padded([[BEGIN, *row] for row in ours], target),
                    padded([[*row, END] for row in ours], target),
                    sum(len(row) + 1 for row in ours),
                )
            )
    return found


def train(corpus: Path, windows, max_tokens: int, update_freq: int, precision: str, eager: bool) -> None:
    """Trains until `windows` raises Quit."""
    pairs, types = read(corpus)
    data = batches(pairs, max_tokens)
    shape = {name: MODEL[name] for name in ("d_model", "d_ff", "heads", "encoder_layers", "decoder_layers", "dropout")}
    model = Reference(shape, types, norm_first=MODEL["residual"] == "prenorm")
    optimizer = torch.optim.AdamW(model.parameters(), lr=TRAINING["lr"], betas=(0.9, 0.98), fused=True)
    warmed = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(update / TRAINING["warmup"], 1.0))
    step = model if eager else torch.compile(model, dynamic=True)

    def update(group: list[Batch]) -> float:
        tokens, total = sum(batch.tokens for batch in group), 0.0
        for batch in group:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = step(batch.source, batch.before, batch.target) * (batch.tokens / tokens)
            loss.backward()
            total += loss.item()
        optimizer.step()
        warmed.step()
        optimizer.zero_grad()
        return total

    first_of_shape = {tuple(batch.source.shape) + tuple(batch.target.shape): batch for batch in reversed(data)}
    for batch in first_of_shape.values():
        update([batch])
    torch._dynamo.config.error_on_recompile = True
    with contextlib.suppress(Quit):
        for group in updates(data, update_freq):
            windows.before_update()
            windows.after_update(sum(batch.tokens for batch in group), update(group))


def updates(data: list[Batch], update_freq: int) -> Iterator[list[Batch]]:
    """Yields the batches of each update, without end. Each epoch has another order."""
    draw = random.Random(1)
    while True:
        draw.shuffle(data)
        yield from (data[i : i + update_freq] for i in range(0, len(data), update_freq))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="folder with train.en.gz and train.de.gz")
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--update-freq", type=int, default=2)
    parser.add_argument("--precision", default="f32", choices=["f32", "bf16"])
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    arguments = vars(parser.parse_args())

    greeting = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    train(windows=Windows(sys.stdin, sys.stdout, greeting), **arguments)


if __name__ == "__main__":
    main()
