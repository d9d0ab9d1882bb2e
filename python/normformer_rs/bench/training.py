"""The training loop against torch.nn.Transformer, and a GPU's losses against the CPU's, on made-up sentences."""

import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import DataConfig, TrainingConfig, TransformerConfig
from ..history import History
from ..training import Trainer

SENTENCES = 4000
FEW = 280
WORDS = 8000
MAX_TOKENS = 4096
BASE = {"d_model": 512, "d_ff": 2048, "heads": 8, "encoder_layers": 6, "decoder_layers": 6, "dropout": 0.1}
TINY = {"d_model": 64, "d_ff": 128, "heads": 4, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.1}
# Dropout of embeddings and sublayers only, in either model: SDPA's on attention weights is another than the CPU's.
PLAIN: dict[str, Any] = {"attention_dropout": 0.0, "activation_dropout": 0.0, "tie_embeddings": "all"}
SPECIAL = 4
"""Types before the words: beginning, padding, end, unknown."""
PAD = 1


def sentences(count: int) -> list[list[int]]:
    """Words by Zipf's law, 5 to 47 of them."""
    draw = random.Random(1)
    ranks = range(WORDS)
    weights = [1 / (rank + 10) for rank in ranks]
    return [draw.choices(ranks, weights, k=draw.randint(5, 47)) for _ in range(count)]


@contextmanager
def corpus(count: int) -> Iterator[DataConfig]:
    """So many sentences as files; the target is the source, reversed."""
    with tempfile.TemporaryDirectory() as folder:
        files: dict[str, Any] = {}
        for part, chosen in (("train", sentences(count)), ("valid", sentences(50))):
            for side, step in (("source", 1), ("target", -1)):
                path = Path(folder) / f"{part}.{side}"
                path.write_text("".join(" ".join(f"w{word}" for word in s[::step]) + "\n" for s in chosen))
                files[f"{part}_{side}"] = str(path)
        yield DataConfig(**files, no_bpe=True)


def history(
    shape: dict[str, Any],
    device: str,
    updates: int,
    precision: Literal["f32", "bf16"],
    count: int = SENTENCES,
    cuda_graphs: bool = True,
) -> History:
    """A run of the training loop."""
    model = TransformerConfig(**shape, **PLAIN, norm="layernorm", residual="prenorm")
    training = TrainingConfig(
        updates=updates, max_tokens=MAX_TOKENS, device=device, precision=precision, lr=1e-3, warmup=100, clip_norm=1.0,
        evaluate_every=updates + 1, keep=1, cuda_graphs=cuda_graphs,
    )  # fmt: skip
    with corpus(count) as data, tempfile.TemporaryDirectory() as output:
        return Trainer(model, training, data).fit(output, progress=False, curves=False)


PRECISIONS: tuple[Literal["f32", "bf16"], ...] = ("f32", "bf16")


def losses(device: str) -> dict[str, float]:
    """The largest difference of ten losses to the CPU's, by precision. An epoch has so few batches that most of the ten
    are replayed from CUDA graphs."""
    found: dict[str, float] = {}
    for precision in PRECISIONS:
        here, there = (history(TINY, d, 10, precision, FEW).loss for d in (device, "cpu"))
        found[precision] = float(np.abs(here - there).max())
    return found


def rates(device: str, updates: int, quick: bool) -> Iterator[tuple[str, Callable[[], float]]]:
    """(name, real target tokens a second) of ours and of torch.nn.Transformer, each measured when called."""
    shape = BASE if device.startswith("cuda") else TINY

    def rate(cuda_graphs: bool) -> float:
        # History's rate is that of the latest 50 updates.
        return float(history(shape, device, updates, "bf16", cuda_graphs=cuda_graphs).tokens_per_second[-1])

    yield "normformer_rs", partial(rate, True)
    yield "normformer_rs, no CUDA graphs", partial(rate, False)
    modes = {"eager": None, "compiled": "default", "compiled, reduce-overhead": "reduce-overhead"}
    for name, mode in list(modes.items())[: 1 if quick else None]:
        yield f"torch.nn.Transformer, {name}", partial(torch_rate, device, updates, mode, shape)


class Reference(nn.Module):
    """torch.nn.Transformer with tied embeddings, learned positions and the loss."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        d = shape["d_model"]
        self.embedding, self.positions = nn.Embedding(SPECIAL + WORDS, d, PAD), nn.Embedding(64, d)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a fast path for evaluation, which is not measured
            self.transformer = nn.Transformer(
                d, shape["heads"], shape["encoder_layers"], shape["decoder_layers"], shape["d_ff"], shape["dropout"],
                batch_first=True, norm_first=True,
            )  # fmt: skip
        for layer in (*self.transformer.encoder.layers, *self.transformer.decoder.layers):
            layer.dropout.p = layer.self_attn.dropout = getattr(layer, "multihead_attn", layer.self_attn).dropout = 0.0
        self.drop = nn.Dropout(shape["dropout"])

    def embed(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.drop(self.embedding(tokens) * self.embedding.embedding_dim**0.5 + self.positions(places))

    def forward(self, source: Tensor, target: Tensor, output: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        hidden = self.transformer(
            self.embed(source), self.embed(target), tgt_mask=causal, tgt_is_causal=True,
            src_key_padding_mask=source == PAD, memory_key_padding_mask=source == PAD,
        )  # fmt: skip
        logits = F.linear(hidden, self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), output.flatten(), ignore_index=PAD, label_smoothing=0.1)


def batches(device: str) -> list[tuple[Tensor, Tensor, Tensor, int]]:
    """(source, decoder input, decoder output, real target tokens): full batches of a width that is a multiple of 8, so
    that there are six shapes."""
    chosen = sorted(sentences(SENTENCES), key=len)
    found, start = list[tuple[Tensor, Tensor, Tensor, int]](), 0
    while start < len(chosen):
        width = -(-(len(chosen[start]) + 1) // 8) * 8
        group = [s for s in chosen[start : start + MAX_TOKENS // width] if len(s) < width]
        start += len(group)
        if len(group) < MAX_TOKENS // width and found:
            continue
        rows = [[SPECIAL + word for word in s] for s in group]

        def padded(rows: list[list[int]], width: int = width) -> Tensor:
            return torch.tensor([row + [PAD] * (width - len(row)) for row in rows], device=device)

        source, output = padded([[*row, 2] for row in rows]), padded([[*row[::-1], 2] for row in rows])
        found.append((source, padded([[0, *row[::-1]] for row in rows]), output, sum(len(row) + 1 for row in rows)))
    random.Random(2).shuffle(found)
    return found


def torch_rate(device: str, updates: int, mode: str | None, shape: dict[str, Any]) -> float:
    """Real target tokens a second, bf16 autocast and fused AdamW, compiling and the first tenth left out."""
    on_cuda = device.startswith("cuda")
    model = Reference(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=on_cuda)
    # One compilation for all shapes: one for each would take longer than all other measurements together.
    step = torch.compile(model, mode=mode, dynamic=True) if mode else model
    data = batches(device)
    # A shape's first call compiles, its second is recorded as a graph: the clock runs after the third.
    warm_up = 3 * list({tuple(batch[0].shape): batch for batch in data}.values())
    tokens, start = 0, 0.0
    for number, (source, target, output, real) in enumerate(warm_up + [data[i % len(data)] for i in range(updates)]):
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
        tokens += real if number >= len(warm_up) else 0
    if on_cuda:
        torch.cuda.synchronize()
    return tokens / (time.perf_counter() - start)
