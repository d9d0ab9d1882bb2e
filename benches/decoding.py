"""Speed of translation: this package, CTranslate2 and fairseq-generate on the same weights, in alternating runs.

    pip install --no-deps --requirement benches/requirements-decoding.txt
    python benches/decoding.py CORPUS [--model RUN] [--rounds 5] [--threads 2] [--no-fairseq]

CORPUS is multi30k-bpe-en-de (docs/data.md). All translate test.2016 in f32, greedily and with beam 5 (length penalty
1), each with the batch size that it is fastest with. RUN is a trained run of a prenorm LayerNorm encoder-decoder with
fairseq's positions, started by EOS; without it a small one is trained first, for some hundreds of updates, until its
sentences end as real ones do. CTranslate2's model is built through its specification and fairseq's is a checkpoint of
its own `transformer`; FixNorm is multiplied into both.

Prints medians of seconds and of user CPU seconds, and how many times as fast as each other side this package is.
Loading is excluded. Fails where greedy translations differ in more than 1 % of the lines, or BLEU with beam 5 by more
than 0.1.
"""

import argparse
import gzip
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq_data import FAIRSEQ, prepare
from torch import Tensor

import normformer_rs as nfrs
from normformer_rs.loop.model import load_run
from normformer_rs.scores import score

HERE = Path(__file__).resolve().parent
BEAMS = {"greedy": 1, "beam 5": 5}
BATCHES = [1024, 2048, 4096, 8192, 16384]
"""The numbers of source tokens in a batch that are tried. Each side is measured with its fastest one."""
TEST = "test.2016"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--no-fairseq", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = arguments.model or trained(arguments.corpus, folder / "run", arguments.updates)
        config, weights = baked(model)
        types = [line.rsplit(" ", 1)[0] for line in (model / "vocabulary.txt").read_text("utf-8").splitlines()]
        to_ctranslate2(config, weights, types, folder / "ctranslate2")
        lines = unpacked(arguments.corpus / f"{TEST}.en.gz", folder / "lines")
        threads = str(arguments.threads)
        sides: dict[str, Any] = {
            "ours": Worker("ours", model, lines, folder, threads),
            "ctranslate2": Worker("ctranslate2", folder / "ctranslate2", lines, folder, threads),
        }
        if not arguments.no_fairseq:
            to_fairseq(config, weights, folder / "fairseq.pt")
            sides["fairseq"] = Fairseq(arguments.corpus, folder, threads)
        references = unpacked(arguments.corpus / f"{TEST}.de.gz", folder / "references").read_text("utf-8")
        references = references.replace("@@ ", "").splitlines()
        failed = [name for name, beam in BEAMS.items() if not compare(name, beam, sides, references, arguments.rounds)]
    if failed:
        raise SystemExit(f"the sides do not translate alike: {', '.join(failed)}")


def compare(name: str, beam: int, sides: dict[str, Any], references: list[str], rounds: int) -> bool:
    """Measures one kind of search and prints its figures. Returns True if all sides translate alike."""
    best = {side: min(BATCHES, key=lambda size: least_seconds(worker, beam, size)) for side, worker in sides.items()}
    taken: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, worker in sides.items():
            taken[side].append(worker.run(beam, best[side]))
    texts = {side: worker.output.read_text("utf-8").splitlines() for side, worker in sides.items()}
    medians = {
        side: {what: statistics.median(run[what] for run in runs) for what in ("seconds", "cpu")}
        for side, runs in taken.items()
    }
    agree = True
    for side, times in medians.items():
        same = sum(a == b for a, b in zip(texts["ours"], texts[side], strict=True)) / len(references)
        bleu = score(texts[side], references, tokenize="none").bleu
        ours = score(texts["ours"], references, tokenize="none").bleu
        agree &= same >= 0.99 if beam == 1 else abs(bleu - ours) <= 0.1
        ratio = {what: times[what] / medians["ours"][what] for what in times}
        print(
            f"{name:8} {side:12} {times['seconds']:7.3f} s  {times['cpu']:7.3f} s CPU  batches of {best[side]:5}  "
            f"ours is {ratio['seconds']:5.2f} times as fast ({ratio['cpu']:5.2f} by CPU)  "
            f"BLEU {bleu:5.2f}  same lines {100 * same:5.1f} %",
            flush=True,
        )
    return agree


def least_seconds(worker: Any, beam: int, size: int) -> float:
    """Returns the seconds of the fastest of three runs. fairseq runs only once, because it is slow."""
    return min(worker.run(beam, size)["seconds"] for _ in range(1 if isinstance(worker, Fairseq) else 3))


# ---- the sides ----


class Worker:
    """A side that translates in its own process, `decoding_worker.py`."""

    def __init__(self, side: str, model: Path, lines: Path, folder: Path, threads: str):
        self.output = folder / f"{side}.txt"
        command = [sys.executable, str(HERE / "decoding_worker.py"), side, model, lines, self.output]
        environment = {**os.environ, "OMP_NUM_THREADS": threads}
        self.process = subprocess.Popen(
            [*command, "--threads", threads],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def run(self, beam: int, max_tokens: int) -> dict[str, float]:
        assert self.process.stdin
        print(json.dumps({"beam": beam, "max_tokens": max_tokens}), file=self.process.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker {self.output.stem} ended with {self.process.wait()}")
        return json.loads(line)


class Fairseq:
    """The side of fairseq-generate, which itself prints how long it translated, without loading."""

    def __init__(self, corpus: Path, folder: Path, threads: str):
        self.data = prepare(corpus, folder / "data", [*FAIRSEQ, "preprocess"], test=TEST)
        self.path, self.output = folder / "fairseq.pt", folder / "fairseq.txt"
        self.environment = {**os.environ, "OMP_NUM_THREADS": threads}

    def run(self, beam: int, max_tokens: int) -> dict[str, float]:
        options = ["--beam", str(beam), "--lenpen", "1", "--max-len-b", "200", "--post-process", "subword_nmt", "--cpu"]
        command = [*FAIRSEQ, "generate", self.data, "--path", self.path, "--max-tokens", str(max_tokens), *options]
        before = os.times().children_user
        asked = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        if asked.returncode:
            raise SystemExit(asked.stderr)
        found = re.findall(r"^H-(\d+)\t\S+\t(.*)$", asked.stdout, re.MULTILINE)
        texts = [text for _, text in sorted(found, key=lambda hypothesis: int(hypothesis[0]))]
        self.output.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
        (seconds,) = re.findall(
            r"Translated [\d,]+ sentences \([\d,]+ tokens\) in ([\d.]+)s", asked.stdout + asked.stderr
        )
        # The CPU seconds are those of the whole process, including loading.
        return {"seconds": float(seconds), "cpu": os.times().children_user - before}


# ---- the weights ----


MODEL = {
    "d_model": 128,
    "d_ff": 256,
    "heads": 4,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "dropout": 0.1,
    "residual": "prenorm",
    "norm": "layernorm",
    "positions": "fairseq",
    "decoder_start": "eos",
}
"""The shape of transformer-tiny, with less dropout, because the model is trained only for a short time."""


def trained(corpus: Path, output: Path, updates: int) -> Path:
    """Trains a model for `updates` updates, and returns the run's folder."""
    data = {
        f"{part}_{side}": str(corpus / f"{part}.{language}.gz")
        for part in ("train", "valid")
        for side, language in (("source", "en"), ("target", "de"))
    }
    training = nfrs.TrainingConfig(
        updates=updates,
        evaluate_every=updates,
        max_tokens=4096,
        lr=0.005,
        warmup=updates // 4,
        vocab_mask=False,
    )
    trainer = nfrs.Trainer(nfrs.TransformerConfig(**MODEL), training, nfrs.DataConfig(**data, no_bpe=True))
    trainer.fit(output, tensorboard=False, curves=False)
    return output


def baked(run: Path) -> tuple[nfrs.TransformerConfig, dict[str, Tensor]]:
    """Returns the configuration and the parameters of a run. Under FixNorm the embedding's rows are scaled to length
    one."""
    config, weights = load_run(run, "best")
    wanted = {"norm": "layernorm", "residual": "prenorm", "positions": "fairseq", "decoder_start": "eos"}
    for field, value in wanted.items():
        if getattr(config, field) != value:
            raise SystemExit(f"{run}: its {field} is {getattr(config, field)}, expected {value}")
    if config.tie_embeddings != "all" or config.output_bias:
        raise SystemExit(f"{run}: expected one table of word vectors for all, and no bias of the output")
    if config.fixnorm:
        table = weights["embedding.weight"]
        weights["embedding.weight"] = table / table.norm(dim=1, keepdim=True).clamp_min(1e-12)
    return config, weights


def positions(d: int, rows: int) -> np.ndarray:
    """Returns fairseq's sinusoids (rows, d), in which the first token has position 2."""
    rates = np.exp(np.arange(d // 2) * -(math.log(10000) / (d // 2 - 1)))
    angles = (np.arange(rows)[:, None] + 2) * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)


SUBLAYERS = {
    "encoder": [("self_attn", "self_attention", "self_attn_layer_norm")],
    "decoder": [
        ("self_attn", "self_attention", "self_attn_layer_norm"),
        ("multihead_attn", "attention", "encoder_attn_layer_norm"),
    ],
}
"""For each stack its attentions: their names here, their names in CTranslate2's specification, and fairseq's names of
their norms."""


def to_ctranslate2(config: nfrs.TransformerConfig, weights: dict[str, Tensor], types: list[str], output: Path) -> None:
    from ctranslate2.specs import TransformerSpec

    depths, d = (config.encoder_layers, config.decoder_layers), config.d_model
    spec = TransformerSpec.from_config(depths, config.heads, pre_norm=True)
    array = {name: value.numpy() for name, value in weights.items()}

    whole = slice(None)

    def put(to: Any, weight: str, bias: str, rows: slice = whole) -> None:
        to.weight, to.bias = array[weight][rows].copy(), array[bias][rows].copy()

    def norm(to: Any, name: str) -> None:
        to.gamma, to.beta = array[f"{name}.weight"], array[f"{name}.bias"]

    for stack in ("encoder", "decoder"):
        to = getattr(spec, stack)
        (to.embeddings[0] if stack == "encoder" else to.embeddings).weight = array["embedding.weight"]
        to.scale_embeddings, to.position_encodings.encodings = math.sqrt(d), positions(d, 1024)
        norm(to.layer_norm, f"{stack}.norm")
        for number, layer in enumerate(to.layer):
            name = f"{stack}.layers.{number}"
            for i, (own, theirs, _) in enumerate(SUBLAYERS[stack]):
                attention, at = getattr(layer, theirs), f"{name}.{own}"
                parts = [slice(None)] if own == "self_attn" else [slice(d), slice(d, None)]
                for linear, rows in zip(attention.linear, parts, strict=False):
                    put(linear, f"{at}.in_proj_weight", f"{at}.in_proj_bias", rows)
                put(attention.linear[-1], f"{at}.out_proj.weight", f"{at}.out_proj.bias")
                norm(attention.layer_norm, f"{name}.norm{i + 1}")
            put(layer.ffn.linear_0, f"{name}.linear1.weight", f"{name}.linear1.bias")
            put(layer.ffn.linear_1, f"{name}.linear2.weight", f"{name}.linear2.bias")
            norm(layer.ffn.layer_norm, f"{name}.norm{len(SUBLAYERS[stack]) + 1}")
    spec.decoder.projection.weight = array["embedding.weight"]
    vocabulary = ["<s>", "<blank>", "</s>", "<unk>", *types]
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    spec.config.decoder_start_token, spec.config.add_source_eos = spec.config.eos_token, True
    spec.validate()
    output.mkdir()
    spec.save(str(output))


def to_fairseq(config: nfrs.TransformerConfig, weights: dict[str, Tensor], output: Path) -> None:
    """Writes the parameters as a checkpoint of fairseq's own `transformer`."""
    state: dict[str, Tensor] = {}
    for name, value in weights.items():
        if name == "embedding.weight":
            holders = ("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection")
            state |= {f"{holder}.weight": value for holder in holders}
            continue
        stack = name.split(".")[0]
        norms = [norm for *_, norm in SUBLAYERS[stack]] + ["final_layer_norm"]
        name = name.replace("linear", "fc").replace("multihead_attn", "encoder_attn")
        name = re.sub(r"\.norm(\d)\.", lambda found, norms=norms: f".{norms[int(found[1]) - 1]}.", name)
        name = name.replace(f"{stack}.norm.", f"{stack}.layer_norm.")
        if ".in_proj_" in name:
            for which, part in zip("qkv", value.chunk(3), strict=True):
                state[name.replace(".in_proj_", f".{which}_proj.")] = part
        else:
            state[name] = value
    for stack in ("encoder", "decoder"):
        state |= {f"{stack}.version": torch.tensor([3.0]), f"{stack}.embed_positions._float_tensor": torch.zeros(1)}
    flags: dict[str, Any] = {"arch": "transformer", "task": "translation", "criterion": "cross_entropy", "data": "."}
    flags |= {"share_all_embeddings": True, "source_lang": "en", "target_lang": "de", "dropout": 0.0}
    for stack in ("encoder", "decoder"):
        flags |= {
            f"{stack}_normalize_before": True,
            f"{stack}_embed_dim": config.d_model,
            f"{stack}_ffn_embed_dim": config.d_ff,
            f"{stack}_layers": getattr(config, f"{stack}_layers"),
            f"{stack}_attention_heads": config.heads,
        }
    history = {"optimizer_name": "adam", "criterion_name": "cross_entropy", "num_updates": 0}
    history |= {"lr_scheduler_state": {"best": None}}
    extra = {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}}
    saved = {"args": argparse.Namespace(**flags), "model": state, "optimizer_history": [history]}
    torch.save(saved | {"extra_state": extra, "last_optimizer_state": None}, output)


def unpacked(packed: Path, output: Path) -> Path:
    with gzip.open(packed, "rb") as file:
        output.write_bytes(file.read())
    return output


if __name__ == "__main__":
    main()
