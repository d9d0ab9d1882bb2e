"""Training and translating on a busy machine: another process spins, pinned to one of the cores.

    python benches/busy.py CORPUS [--windows 5] [--seconds 10]

Prints real target tokens per second in bf16, quiet and busy by turns, with this package's watch over libgomp's waits
(src/cpu/contention.rs), without it, and with OMP_WAIT_POLICY=passive in its place; then the seconds that translating
the validation set with beam 5 takes. Medians.
CORPUS is as benches/training.py has it. The machine must be quiet but for this.
"""

import argparse
import contextlib
import gzip
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from training import HERE, Worker

COMMAND = [sys.executable, "-m", "normformer_rs"]
WAITS = {
    "watched": [],
    "libgomp's own": ["env", "NORMFORMER_RS_WAITS=libgomp"],
    "passive": ["env", "NORMFORMER_RS_WAITS=libgomp", "OMP_WAIT_POLICY=passive"],
}


@contextlib.contextmanager
def spinning(core: int) -> Iterator[None]:
    """Runs a process during the block that uses one core entirely."""
    program = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", program])
    time.sleep(1)
    yield
    process.kill()
    process.wait()


def train(arguments: argparse.Namespace) -> None:
    ours = [sys.executable, str(HERE / "our_worker.py"), str(arguments.corpus), "--precision", "bf16"]
    workers = [Worker(f"training, waits {name}", [*prefix, *ours], tuned=False) for name, prefix in WAITS.items()]
    rates: dict[tuple[str, str], list[float]] = {}
    for worker in workers:
        worker.window(4)
    for _ in range(arguments.windows):
        for worker in workers:
            rates.setdefault((worker.name, "quiet"), []).append(worker.window(arguments.seconds))
            with spinning(arguments.core):
                rates.setdefault((worker.name, "busy"), []).append(worker.window(arguments.seconds))
    for worker in workers:
        worker.quit()
        quiet, busy = (statistics.median(rates[worker.name, state]) for state in ("quiet", "busy"))
        print(
            f"{worker.name:32} quiet {quiet:8,.0f}  busy {busy:8,.0f} target tokens/s  busy / quiet {busy / quiet:.2f}"
        )


def translate(arguments: argparse.Namespace, folder: Path) -> None:
    data = {
        side: str(arguments.corpus / f"{{}}.{language}.gz") for side, language in (("source", "en"), ("target", "de"))
    }
    flags = [f"--{part}-{side}={path.format(part)}" for part in ("train", "valid") for side, path in data.items()]
    shape = {"d-model": 128, "d-ff": 256, "heads": 4, "encoder-layers": 4, "decoder-layers": 4, "updates": 60}
    size = [f"--{name}={value}" for name, value in shape.items()] + ["--no-bpe", "--no-progress"]
    subprocess.run([*COMMAND, "train", "--output", str(folder / "run"), *flags, *size], check=True)
    with gzip.open(arguments.corpus / "valid.en.gz") as packed:
        lines = packed.readlines()[: arguments.lines]
    for name, prefix in WAITS.items():
        command = [*prefix, *COMMAND, "translate", "--model", str(folder / "run"), "--beam", "5"]

        def seconds(command: list[str] = command) -> float:
            start = time.perf_counter()
            subprocess.run(command, input=b"".join(lines), check=True, capture_output=True)
            return time.perf_counter() - start

        quiet, busy = [], []
        for _ in range(3):
            quiet.append(seconds())
            with spinning(arguments.core):
                busy.append(seconds())
        one, other = statistics.median(quiet), statistics.median(busy)
        shown = f"quiet {one:6.1f} s  busy {other:6.1f} s  busy / quiet {other / one:.2f}"
        print(f"translating {len(lines)} lines, waits {name:14} {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--lines", type=int, default=300)
    parser.add_argument(
        "--core", type=int, default=max(os.sched_getaffinity(0)), help="that the other process spins on"
    )
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}")
    train(arguments)
    with tempfile.TemporaryDirectory() as folder:
        translate(arguments, Path(folder))


if __name__ == "__main__":
    main()
