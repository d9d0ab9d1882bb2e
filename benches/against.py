"""This checkout against another build of the package, such as an earlier commit: speed in alternating pairs, and bits.

    python benches/against.py OTHER speed [--corpus CORPUS] [--pairs 15]
    python benches/against.py OTHER decoding --corpus CORPUS [--pairs 15]
    python benches/against.py OTHER schemes [--pairs 15]
    python benches/against.py OTHER bits

OTHER is a checkout whose extension is built. `speed` times the norms' forward and backward (f32 and bf16; 1, 8 and
64 MB) and, with a corpus, training. It prints OTHER's time over this checkout's (1.1: this one is 1.1 times as fast)
and the 95 % interval of that median by bootstrap over pairs. Both allocators keep freed memory. `schemes` does so for
forward and backward of the loop's model with every residual scheme that both have, with LayerNorm. `decoding` trains a
small model for 200 updates with OTHER, and times its translations, greedy and by beam 5. `bits` compares, for
every norm and residual scheme that both have, a small model's logits and gradients and the first ten losses of a run,
in f32 on one thread. Each side runs in a process of its own, and only one at a time.
"""

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fairseq_worker import TUNED_ALLOCATOR

HERE = Path(__file__).resolve().parent
NORMS = ("LayerNorm", "RMSNorm", "ScaleNorm", "BatchNorm", "PowerNorm")
MEGABYTES = (1, 8, 64)
RESAMPLES = 10_000
PAGE = 4096
"""The size of a memory page in bytes."""


class Side:
    """One build of the package, in a process that answers each line of its input with a line of JSON."""

    def __init__(self, checkout: Path, arguments: list[str], threads: int | None = None):
        environment = {**os.environ, **TUNED_ALLOCATOR, "PYTHONPATH": str(checkout / "python")}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        self.checkout = checkout
        self.process = subprocess.Popen(
            [sys.executable, *arguments], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.checkout} ended with {self.process.wait()}")
        return json.loads(line)

    def ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)
        return self.read()

    def quit(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("what", choices=["speed", "decoding", "schemes", "bits"])
    parser.add_argument("--corpus", type=Path, help="folder with train.en.gz, train.de.gz, valid.en.gz, valid.de.gz")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=5, help="length of a window of training")
    parser.add_argument("--megabytes", type=int, nargs="+", default=MEGABYTES)
    parser.add_argument("--norms", nargs="*", default=NORMS, choices=NORMS)
    arguments = parser.parse_args()
    checkouts = (HERE.parent, arguments.other.resolve())
    if arguments.what == "bits":
        compare_bits(*checkouts)
    elif arguments.what == "schemes":
        compare_schemes(checkouts, arguments.pairs)
    elif arguments.what == "decoding":
        compare_decoding(checkouts, arguments.corpus, arguments.pairs)
    else:
        compare_kernels(checkouts, arguments.pairs, arguments.megabytes, arguments.norms)
        if arguments.corpus:
            for precision in ("f32", "bf16"):
                compare_training(checkouts, precision, arguments)


# ---- speed ----


def compare_kernels(checkouts: tuple[Path, Path], pairs: int, megabytes: list[int], norms: list[str]) -> None:
    own, other = (Side(checkout, [__file__, "--worker", "kernels"]) for checkout in checkouts)
    for dtype in ("float32", "bfloat16"):
        for size in megabytes:
            for norm in norms:
                call = f"{norm} {dtype} {size}"
                report(f"{norm:10} {dtype:8} {size:3} MB", lambda side, call=call: side.ask(call), own, other, pairs)
    own.quit()
    other.quit()


def compare_schemes(checkouts: tuple[Path, Path], pairs: int) -> None:
    own, other = (Side(checkout, [__file__, "--worker", "schemes"]) for checkout in checkouts)
    known = other.read()
    for scheme in (name for name in own.read() if name in known):
        report(scheme, lambda side, scheme=scheme: side.ask(scheme), own, other, pairs)
    own.quit()
    other.quit()


def compare_training(checkouts: tuple[Path, Path], precision: str, arguments: argparse.Namespace) -> None:
    command = [str(HERE / "our_worker.py"), str(arguments.corpus), "--precision", precision]
    own, other = (Side(checkout, command) for checkout in checkouts)

    def seconds(side: Side) -> float:
        window = side.ask(f"window {arguments.seconds}")
        return window["seconds"] / window["target_tokens"]

    for side in (own, other):
        side.read()
        seconds(side)
    report(f"training, {precision}", seconds, own, other, arguments.pairs)
    own.quit()
    other.quit()


def compare_decoding(checkouts: tuple[Path, Path], corpus: Path, pairs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        flags = {"preset": "transformer-tiny", "updates": 200, "warmup": 100, "lr": 1e-3, "output": run}
        flags |= {f"{part}-{side}": corpus / f"{part}.{language}.gz" for part in ("train", "valid")
                  for side, language in (("source", "en"), ("target", "de"))}  # fmt: skip
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        environment = {**os.environ, "PYTHONPATH": str(checkouts[1] / "python")}
        command = [sys.executable, "-m", "normformer_rs", "train", "--no-bpe", "--no-progress", *words]
        subprocess.run(command, env=environment, check=True)
        worker = [__file__, "--worker", "decoding", str(run), str(corpus / "valid.en.gz")]
        own, other = (Side(checkout, worker) for checkout in checkouts)
        for beam in (1, 5):
            report(f"decoding, beam {beam}", lambda side, beam=beam: side.ask(str(beam)), own, other, pairs)
        own.quit()
        other.quit()


def report(name: str, seconds: Callable[[Side], float], own: Side, other: Side, pairs: int) -> None:
    """Measures pairs of times and prints the median of time of `other` / time of `own`, with its interval. The two
    sides take turns in going first."""
    ratios = []
    for pair in range(pairs):
        order = (own, other) if pair % 2 == 0 else (other, own)
        took = {side: seconds(side) for side in order}
        ratios.append(took[other] / took[own])
    low, high = interval(ratios)
    print(f"{name:28} {statistics.median(ratios):5.3f}  [{low:5.3f}, {high:5.3f}]  {pairs} pairs", flush=True)


def interval(ratios: list[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the median, by bootstrap."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def answer_kernels() -> None:
    """The worker for kernels: prints, for each line `NORM DTYPE MEGABYTES`, the median seconds of forward and backward.

    Each line gets new tensors, at random offsets within a page. Otherwise a process would have its tensors at the same
    offsets in every pair, depending on its earlier allocations, and all pairs would compare the same two placements.
    """
    import torch

    import normformer_rs as nfrs

    width, draw = 512, random.Random()
    for line in sys.stdin:
        name, dtype, megabytes = line.split()
        kind = getattr(torch, dtype)
        rows = int(megabytes) * 2**20 // (width * kind.itemsize)
        norm = getattr(nfrs.nn, name)(width)
        room = torch.empty(2, rows * width + PAGE, dtype=kind)
        at = [64 * draw.randrange(PAGE // 64) // kind.itemsize for _ in room]
        x, dy = (row[i : i + rows * width].view(rows, width).normal_() for row, i in zip(room, at, strict=True))
        inputs = (x.requires_grad_(), *norm.parameters())
        times = []
        for _ in range(max(3, 64 // int(megabytes))):
            start = time.perf_counter()
            torch.autograd.grad(norm(x), inputs, dy)
            times.append(time.perf_counter() - start)
        print(json.dumps(statistics.median(times)), flush=True)


def answer_decoding() -> None:
    """The worker for decoding: prints, for each line `BEAM`, the seconds that translating the text takes."""
    import gzip

    import normformer_rs as nfrs

    with gzip.open(sys.argv[4], "rt", encoding="utf-8") as text:
        lines = text.read().splitlines()[:500]
    for line in sys.stdin:
        search = nfrs.SearchConfig(beam=int(line), max_length=40)
        start = time.perf_counter()
        nfrs.translate(sys.argv[3], lines, search)
        print(json.dumps(time.perf_counter() - start), flush=True)


def answer_schemes() -> None:
    """The worker for schemes: prints the names of all schemes; then, for each line `SCHEME`, the median seconds of
    forward and backward."""
    import torch

    import normformer_rs as nfrs

    print(json.dumps([scheme["name"] for scheme in nfrs.tables()["residuals"]]), flush=True)
    torch.manual_seed(1)
    source, target = torch.randint(4, 1000, (32, 24)), torch.randint(4, 1000, (32, 24))
    shape = {"d_model": 128, "d_ff": 256, "heads": 4, "encoder_layers": 4, "decoder_layers": 4, "dropout": 0.1}
    models: dict[str, Any] = {}
    for line in sys.stdin:
        scheme = line.strip()
        if scheme not in models:
            config = nfrs.TransformerConfig(vocab_size=1000, norm="layernorm", residual=scheme, **shape)
            models[scheme] = nfrs.Transformer(config, seed=1)
            if scheme == "admin":
                models[scheme].profile(source, target)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            models[scheme](source, target).sum().backward()
            times.append(time.perf_counter() - start)
        print(json.dumps(statistics.median(times)), flush=True)


# ---- bits ----


def compare_bits(own: Path, other: Path) -> None:
    digests = []
    for checkout in (own, other):
        side = Side(checkout, [__file__, "--worker", "bits"], threads=1)
        digests.append(side.read())
        side.quit()
    both = [name for name in digests[0] if name in digests[1]]
    differ = {
        name: [what for what in digests[0][name] if digests[0][name][what] != digests[1][name].get(what)]
        for name in both
    }
    for name, what in differ.items():
        if what:
            print(f"{name}: {', '.join(what)} differ")
    print(f"{len(both)} pairs of norm and scheme, {sum(map(bool, differ.values()))} differ")


def answer_bits() -> None:
    """The worker for bits: prints, for each "NORM SCHEME", {"logits": digest, "gradients": digest, "losses": list}, or
    {"refused": reason}."""
    import torch

    import normformer_rs as nfrs

    torch.manual_seed(1)
    source, target = torch.randint(4, 50, (4, 9)), torch.randint(4, 50, (4, 7))
    source[0, 6:], target[1, 5:] = 1, 1
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        text = written_text(Path(folder))
        for norm, scheme in pairs():
            shape = {"d_model": 32, "d_ff": 64, "heads": 4, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.1}
            options = {**shape, "norm": norm, "residual": scheme}
            try:
                model = nfrs.Transformer(nfrs.TransformerConfig(vocab_size=50, **options), seed=1)
            except nfrs.InputError as refusal:
                found[f"{norm} {scheme}"] = {"refused": str(refusal)}
                continue
            if scheme == "admin":
                model.profile(source, target)
            torch.manual_seed(2)
            logits = model(source, target)
            logits.square().mean().backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            found[f"{norm} {scheme}"] = {
                "logits": digest([logits]),
                "gradients": digest(gradients),
                "losses": first_losses(options, text, Path(folder) / f"{norm} {scheme}"),
            }
    print(json.dumps(found), flush=True)


def pairs() -> Iterator[tuple[str, str]]:
    import normformer_rs as nfrs

    tables = nfrs.tables()
    for norm in tables["norms"]:
        for scheme in tables["residuals"]:
            yield norm["name"], scheme["name"]


def written_text(folder: Path) -> dict[str, str]:
    """Writes a small parallel text of random numbers, and returns its paths by role."""
    draw, paths = random.Random(1), {}
    for part, lines in (("train", 200), ("valid", 20)):
        for side in ("source", "target"):
            words = (" ".join(str(draw.randrange(40)) for _ in range(draw.randrange(3, 12))) for _ in range(lines))
            path = folder / f"{part}.{side}"
            path.write_text("\n".join(words) + "\n", encoding="utf-8")
            paths[f"{part}_{side}"] = str(path)
    return paths


def first_losses(options: dict[str, Any], text: dict[str, str], output: Path) -> list[str]:
    """Returns the first ten losses of a run, as hexadecimal numbers."""
    import normformer_rs as nfrs

    losses: list[str] = []

    class Observer:
        def started(self, event: dict[str, Any]) -> None: ...
        def evaluated(self, event: dict[str, Any]) -> None: ...
        def message(self, level: str, text: str) -> None: ...
        def updated(self, event: dict[str, Any]) -> None:
            losses.append(float(event["loss"]).hex())

    training = nfrs.TrainingConfig(updates=10, max_tokens=256, warmup=5, lr=1e-3, evaluate_every=10**6)
    config, data = nfrs.TransformerConfig(**options), nfrs.DataConfig(**text, no_bpe=True)
    # None is the place among several processes, which a single process does not have.
    try:
        nfrs._core.train(config.to_json(), training.to_json(), data.to_json(), str(output), "new", None, Observer())
    except nfrs.DivergedError as error:
        losses.append(str(error))
    return losses


def digest(tensors: list[Any]) -> str:
    together = hashlib.sha256()
    for t in tensors:
        together.update(t.detach().contiguous().numpy().tobytes())
    return together.hexdigest()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        workers = {
            "kernels": answer_kernels,
            "decoding": answer_decoding,
            "schemes": answer_schemes,
            "bits": answer_bits,
        }
        workers[sys.argv[2]]()
    else:
        main()
