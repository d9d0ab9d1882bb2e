"""Measures the speed of the training loop against torch.nn.Transformer, on made-up sentences."""

import json
import random
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import DataConfig, TrainingConfig, TransformerConfig
from ..loop.history import LOG, History
from ..loop.training import Trainer
from .figures import Figures

MAX_TOKENS = 4096
BASE = {"d_model": 512, "d_ff": 2048, "heads": 8, "encoder_layers": 6, "decoder_layers": 6, "dropout": 0.1}
TINY = {"d_model": 64, "d_ff": 128, "heads": 4, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.1}
# This package's model and torch's have dropout of embeddings and sublayers only. Attention weights have no dropout,
# because scaled dot-product attention draws other masks on a GPU than on a CPU.
PLAIN: dict[str, Any] = {"attention_dropout": 0.0, "activation_dropout": 0.0, "tie_embeddings": "all"}
SPECIAL = 4
"""The number of vocabulary entries before the words: beginning, padding, end, unknown."""
PAD = 1
WINDOW = 50
"""The number of latest updates over which `History.tokens_per_second` is measured."""
RATE = "target tokens/s"
OURS, UNRECORDED, EAGER = "normformer_rs", "normformer_rs, no CUDA graphs", "torch.nn.Transformer, eager"
COMPILED = {
    "torch.nn.Transformer, compiled": "default",
    "torch.nn.Transformer, compiled, reduce-overhead": "reduce-overhead",
}
Precision = Literal["f32", "bf16"]
SLOW_BF16 = "no instructions for products of bf16"
"""A part of the text of a warning, which the training loop gives on CPUs without such instructions."""


def size(device: str) -> tuple[dict[str, Any], int]:
    """Returns the model's shape and the number of sentences. On a CPU both are small, because runs there only try the
    program."""
    return (BASE, 4000) if device.startswith("cuda") else (TINY, 100)


def types(count: int) -> int:
    """Returns the size of the vocabulary for `count` sentences, whose 5·count or more words suffice for all entries. It
    is a multiple of 8 if `count` is even."""
    return min(8192, 4 * count)


def sentences(count: int) -> list[list[int]]:
    """Returns `count` sentences of 5 to 47 words. Each word occurs at least once, so that a vocabulary read from the
    text has all words; the rest are drawn by Zipf's law."""
    generator, words = random.Random(1), range(types(count) - SPECIAL)
    lengths = [generator.randint(5, 47) for _ in range(count)]
    weights = [1 / (rank + 10) for rank in words]
    drawn = [*words, *generator.choices(words, weights, k=sum(lengths) - len(words))]
    generator.shuffle(drawn)
    return [[drawn.pop() for _ in range(length)] for length in lengths]


@contextmanager
def corpus(count: int) -> Iterator[DataConfig]:
    """Yields data options for a corpus of `count` sentences in temporary files, whose targets are the reversed sources.
    The validation set is small and has short sentences, because a run ends by translating it."""
    held_out = [words[:5] for words in sentences(4)]
    with tempfile.TemporaryDirectory() as folder:
        files: dict[str, Any] = {}
        for part, chosen in (("train", sentences(count)), ("valid", held_out)):
            for side, step in (("source", 1), ("target", -1)):  # a step of −1 reverses a sentence
                path = Path(folder) / f"{part}.{side}"
                lines = (" ".join(f"w{word}" for word in sentence[::step]) for sentence in chosen)
                path.write_text("".join(line + "\n" for line in lines))
                files[f"{part}_{side}"] = str(path)
        yield DataConfig(**files, no_bpe=True)


def history(
    shape: dict[str, Any], device: str, updates: int, precision: Precision, count: int, cuda_graphs: bool = True
) -> History:
    """Returns the history of a run of the training loop. `shape` are options of the model's size, `count` is the number
    of sentences.

    Errors: RuntimeError if the run logs a warning other than that of slow bf16 products, or if its vocabulary has
    another size than `types` gives.
    """
    model = TransformerConfig(**shape, **PLAIN, norm="layernorm", residual="prenorm")
    # The first evaluation would come after the last update, so that none interrupts the measured updates.
    training = TrainingConfig(
        updates=updates, max_tokens=MAX_TOKENS, device=device, precision=precision, lr=1e-3, warmup=100, clip_norm=1.0,
        evaluate_every=updates + 1, keep=1, cuda_graphs=cuda_graphs,
    )  # fmt: skip
    with corpus(count) as data, tempfile.TemporaryDirectory() as output:
        measured = Trainer(model, training, data).fit(output, progress=False, tensorboard=False, curves=False)
        for event in map(json.loads, (Path(output) / LOG).read_text().splitlines()):
            # Any warning ends the measurement, since it may say that there are no CUDA graphs. The one about slow bf16
            # products is allowed: it comes on CPUs only, and of a CPU's run only the losses are compared.
            if event.get("level") == "warning" and SLOW_BF16 not in event["text"]:
                raise RuntimeError(event["text"])
            if event.get("vocabulary", types(count)) != types(count):
                raise RuntimeError(f"{event['vocabulary']} types, not {types(count)}")
    return measured


def ours(figures: Figures, device: str, updates: int) -> None:
    """Measures the training loop's real target tokens per second, with CUDA graphs and without."""
    shape, count = size(device)
    for name, cuda_graphs in ((OURS, True), (UNRECORDED, False)):
        with figures.attempt("training", name):
            measured = history(shape, device, updates, "bf16", count, cuda_graphs)
            # The first batch of a shape runs without a graph, and the second is recorded as a graph. Every epoch (28
            # batches) has the same shapes, so from the third epoch on all batches are replayed.
            if figures.on_cuda and (updates < WINDOW or measured.epoch[-WINDOW] < 3):
                raise ValueError(f"{updates} updates are too few: the latest {WINDOW} must be of the third epoch on")
            figures.add("training", name, float(measured.tokens_per_second[-1]), RATE)


def reference(figures: Figures, device: str, updates: int) -> None:
    """Measures torch.nn.Transformer without torch.compile."""
    with figures.attempt("reference", EAGER):
        figures.add("reference", EAGER, torch_rate(device, updates, None), RATE)


def compiled(figures: Figures, device: str, updates: int) -> None:
    """Measures torch.nn.Transformer with each of two modes of torch.compile."""
    for name, mode in COMPILED.items():
        with figures.attempt("compiled", name):
            figures.add("compiled", name, torch_rate(device, updates, mode), RATE)


def compare(figures: Figures) -> None:
    """Adds the ratios of our rate to other rates, each to the best one of a group that has been measured."""
    rates = {row["what"]: float(row["value"]) for row in figures.rows() if row["unit"] == RATE}

    def ratio(what: str, others: Iterable[str], bar: float | None = None) -> None:
        """Adds our rate over the best of the others' rates; `bar` is the ratio that it should reach."""
        known = [rates[other] for other in others if other in rates]
        if OURS in rates and known:
            figures.add("training", what, rates[OURS] / max(known), "times", bar)
        else:
            figures.add("training", what, "unmeasured: a rate is missing", "")

    ratio("CUDA graphs against none", [UNRECORDED])
    ratio("against eager", [EAGER], bar=2.0)
    ratio("against the better compiled form", COMPILED, bar=1.2)


class Reference(nn.Module):
    """A translation model around torch.nn.Transformer, with tied embeddings and learned positions; it returns the
    loss."""

    def __init__(self, shape: dict[str, Any], types: int, norm_first: bool = True) -> None:
        super().__init__()
        d = shape["d_model"]
        # No sentence has more than 48 tokens, so 64 positions suffice.
        self.embedding, self.positions = nn.Embedding(types, d, PAD), nn.Embedding(64, d)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning is about a fast path for evaluation, which is not measured
            self.transformer = nn.Transformer(
                d, shape["heads"], shape["encoder_layers"], shape["decoder_layers"], shape["d_ff"], shape["dropout"],
                batch_first=True, norm_first=norm_first,
            )  # fmt: skip
        # As in PLAIN, activations and attention weights have no dropout. Only the decoder's layers have multihead_attn.
        for layer in (*self.transformer.encoder.layers, *self.transformer.decoder.layers):
            layer.dropout.p = layer.self_attn.dropout = getattr(layer, "multihead_attn", layer.self_attn).dropout = 0.0
        self.drop = nn.Dropout(shape["dropout"])

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the stack's input for token ids: word embeddings times √d, plus positions, with dropout."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.drop(self.embedding(tokens) * self.embedding.embedding_dim**0.5 + self.positions(positions))

    def forward(self, source: Tensor, target: Tensor, output: Tensor) -> Tensor:
        """Returns the loss. `target` is the decoder's input, `output` the tokens that it should predict."""
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        hidden = self.transformer(
            self.embed(source), self.embed(target), tgt_mask=causal, tgt_is_causal=True,
            src_key_padding_mask=source == PAD, memory_key_padding_mask=source == PAD,
        )  # fmt: skip
        logits = F.linear(hidden, self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), output.flatten(), ignore_index=PAD, label_smoothing=0.1)


def batches(device: str, count: int) -> list[tuple[Tensor, Tensor, Tensor, int]]:
    """Returns batches of (source, decoder input, decoder output, number of real target tokens). Each batch is full, and
    its width is a multiple of 8, so that there are only six shapes."""
    chosen = sorted(sentences(count), key=len)
    made, start = list[tuple[Tensor, Tensor, Tensor, int]](), 0
    while start < len(chosen):
        width = -(-(len(chosen[start]) + 1) // 8) * 8  # the words and an end, rounded up to a multiple of 8
        group = [s for s in chosen[start : start + MAX_TOKENS // width] if len(s) < width]
        start += len(group)
        if len(group) < MAX_TOKENS // width and made:  # not full; left out, unless it would be the only batch
            continue
        rows = [[SPECIAL + word for word in s] for s in group]

        # A function reads a loop's variable only when it runs, so the default keeps the width of this turn.
        def padded(rows: list[list[int]], width: int = width) -> Tensor:
            return torch.tensor([row + [PAD] * (width - len(row)) for row in rows], device=device)

        # 0 begins a sentence and 2 ends it; targets are the reversed sources.
        source, output = padded([[*row, 2] for row in rows]), padded([[*row[::-1], 2] for row in rows])
        made.append((source, padded([[0, *row[::-1]] for row in rows]), output, sum(len(row) + 1 for row in rows)))
    random.Random(2).shuffle(made)
    return made


def torch_rate(device: str, updates: int, mode: str | None) -> float:
    """Returns torch.nn.Transformer's real target tokens per second, with bf16 autocast and fused AdamW. `mode` is a
    mode of torch.compile, None for eager. The time of compilation is not counted."""
    (shape, count), on_cuda = size(device), device.startswith("cuda")
    model = Reference(shape, types(count)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=on_cuda)
    # The model is compiled once for all shapes (dynamic), because a compilation for each shape would take longer than
    # all other measurements together.
    step = torch.compile(model, mode=mode, dynamic=True) if mode else model
    data = batches(device, count)
    # The first call with a shape may compile, and the second may be recorded as a graph. So the time is measured after
    # three calls with each shape.
    warm_up = 3 * list({tuple(batch[0].shape): batch for batch in data}.values())
    measured = [data[i % len(data)] for i in range(updates)]
    tokens, start = 0, 0.0
    for number, (source, target, output, real_tokens) in enumerate(warm_up + measured):
        if number == len(warm_up):
            if on_cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
        with torch.autocast(device.partition(":")[0], torch.bfloat16):
            loss = step(source, target, output)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += real_tokens if number >= len(warm_up) else 0
    if on_cuda:
        torch.cuda.synchronize()
    return tokens / (time.perf_counter() - start)
