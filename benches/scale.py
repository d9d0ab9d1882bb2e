"""Cost against work: tokens a second and memory by width, depth, batch, threads and processes, and what limits each.

    python benches/scale.py CORPUS [--output results/scale.csv] [--points d_model=512,tokens=2048 threads=1,ranks=2]

A training run for each row of `POINTS`, in processes of its own. An update's time is divided in three:

products   what its matrix products would take at the rate of a 2048² product: the higher of one before and one after it
calls      an update of hardly any tokens: the operations' own cost, and the optimizer's pass over all weights
traffic    the rest: tensors between the products, products slower than 2048², waiting for other threads and processes

Writes the rows as CSV and a picture beside it. Rows that are there already are not measured again.
"""

import argparse
import csv
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import our_worker
import torch
import torch_worker
from threads import product_rate
from windows import Quit

from normformer_rs.pictures.drawing import INK, heading, new_figure, save

SHARES = {"products": "#3b6fb5", "traffic": "#e0a458", "calls": "#d1495b"}


@dataclass(frozen=True)
class Point:
    """The size of a run. `layers` counts both stacks together; `tokens` are padded tokens of one side in an update."""

    d_model: int = 128
    layers: int = 8
    tokens: int = 8192
    threads: int = 2
    ranks: int = 1

    def options(self) -> tuple[dict, dict]:
        half = self.layers // 2
        sizes = {"d_model": self.d_model, "d_ff": 2 * self.d_model, "heads": max(self.d_model // 64, 4)}
        model = {**sizes, "encoder_layers": half, "decoder_layers": half}
        return model, {"max_tokens": max(self.tokens // self.ranks, 64), "accumulate": 1, "keep": 1}

    def multiplications(self, vocabulary: int) -> tuple[float, float]:
        """Returns the multiplications in the matrix products of one forward pass, for a source token and for a target
        token."""
        d, half = self.d_model, self.layers // 2
        return half * (8 * d * d + 2 * d * d), half * (10 * d * d) + vocabulary * d


POINTS = [
    *(Point(d_model=d) for d in (128, 256, 512)),
    Point(d_model=1024, tokens=4096),
    *(Point(layers=n) for n in (4, 24)),
    Point(layers=100, tokens=4096),
    *(Point(tokens=n) for n in (1024, 2048, 4096, 16384, 32768)),
    Point(threads=1),
    Point(threads=1, ranks=2),
    Point(d_model=512, tokens=2048, threads=1),
    Point(d_model=512, tokens=2048),
    Point(d_model=512, tokens=2048, threads=1, ranks=2),
]


class Timed:
    """Takes the place of a worker's `Windows`. It times each update; the first two do not count, then `updates`
    follow."""

    def __init__(self, updates: int) -> None:
        self.left, self.seconds, self.tokens = updates + 2, [], []

    def before_update(self) -> None:
        if self.left == 0:
            raise Quit
        self.start = time.perf_counter()

    def after_update(self, target_tokens: int, loss: float) -> None:
        self.left -= 1
        self.seconds.append(time.perf_counter() - self.start)
        self.tokens.append(target_tokens)

    def rate(self) -> tuple[float, float]:
        """Returns the median seconds and the mean number of target tokens of an update."""
        return statistics.median(self.seconds[2:]), statistics.mean(self.tokens[2:])


def here(corpus: Path, point: Point, updates: int) -> dict[str, float]:
    """Measures a point in this process, and returns its figures."""
    torch.set_num_threads(point.threads)
    before = product_rate(torch.float32)
    model, training = point.options()
    few, all_ = Timed(8), Timed(updates)
    our_worker.train(corpus, few, model, {**training, "max_tokens": 64})
    our_worker.train(corpus, all_, model, training)
    (calls, _), (seconds, tokens) = few.rate(), all_.rate()
    return {
        "seconds": seconds,
        "tokens": tokens,
        "calls": calls,
        "product_rate": max(before, product_rate(torch.float32)),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def measure(corpus: Path, point: Point, vocabulary: int) -> dict[str, str]:
    """Measures a point in new processes, and returns its row of the table."""
    multiplications = sum(point.multiplications(vocabulary))
    # The number of updates is such that they take about 12 seconds at 40 GFLOP/s, if 70 % of the tokens are real.
    guess = 6 * multiplications * point.tokens * 0.7 / 4e10
    updates = str(min(max(round(12 / guess), 3), 40))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, __file__, str(corpus), "--here", json.dumps(asdict(point)), "--updates", updates]
    processes = []
    for rank in range(point.ranks):
        environment = {**os.environ, "OMP_NUM_THREADS": str(point.threads)}
        if point.ranks > 1:
            environment |= {"RANK": str(rank), "WORLD_SIZE": str(point.ranks), "LOCAL_RANK": str(rank),
                            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    first = found[0]
    products = 6 * multiplications * first["tokens"] / sum(one["product_rate"] for one in found)
    return {
        **{name: str(value) for name, value in asdict(point).items()},
        "seconds": f"{first['seconds']:.4f}",
        "target_tokens_per_second": f"{first['tokens'] / first['seconds']:.0f}",
        "peak_gib": f"{sum(one['peak_gib'] for one in found):.2f}",
        "product_gflops": f"{sum(one['product_rate'] for one in found) / 1e9:.1f}",
        "products": f"{products / first['seconds']:.3f}",
        "calls": f"{first['calls'] / first['seconds']:.3f}",
        "traffic": f"{1 - (products + first['calls']) / first['seconds']:.3f}",
    }


def draw(rows: list[dict[str, str]], path: Path) -> None:
    figure = new_figure(7.6, 0.3 * len(rows) + 1.3)
    axis = figure.subplots()
    for height, row in enumerate(reversed(rows)):
        left = 0.0
        for share, colour in SHARES.items():
            axis.barh(height, float(row[share]), left=left, color=colour, height=0.7)
            left += float(row[share])
        text = f"{int(row['target_tokens_per_second']):,} tokens/s, {float(row['peak_gib']):.1f} GiB"
        axis.annotate(text, (1.02, height), fontsize=7.5, va="center", color=INK)
    names = [f"d {row['d_model']}, {row['layers']} layers, {int(row['tokens']):,} tokens, "
             + ("2 processes" if row["ranks"] == "2" else f"{row['threads']} thread" + "s" * (row["threads"] != "1"))
             for row in reversed(rows)]  # fmt: skip
    axis.set_yticks(range(len(rows)), names, fontsize=8)
    axis.set_xlim(0, 1.4)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False, labelsize=8)
    axis.set_xlabel("share of an update's time", fontsize=8.5)
    heading(figure, "Where an update's time goes, by size", list(SHARES.items()))
    save(figure, path)


def point(text: str) -> Point:
    """Returns the point of a text such as d_model=512,tokens=2048; other sizes have the defaults of Point."""
    return Point(**{name: int(value) for name, _, value in (part.partition("=") for part in text.split(","))})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="folder with train.en.gz, train.de.gz, valid.en.gz, valid.de.gz")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "scale.csv")
    parser.add_argument("--points", nargs="+", type=point, default=POINTS, metavar="d_model=512,tokens=2048")
    parser.add_argument("--here", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--updates", type=int, default=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(here(arguments.corpus, Point(**arguments.here), arguments.updates)))
        return
    _, vocabulary = torch_worker.read(arguments.corpus)
    rows = []
    if arguments.output.exists():
        with arguments.output.open(newline="") as file:
            rows = list(csv.DictReader(file))
    known = {tuple(row[name] for name in asdict(POINTS[0])) for row in rows}
    for chosen in arguments.points:
        if tuple(str(value) for value in asdict(chosen).values()) in known:
            continue
        rows.append(measure(arguments.corpus, chosen, vocabulary))
        print(rows[-1], flush=True)
        with arguments.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    draw(rows, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
