"""Training speed against fairseq 0.12.2 and PyTorch: same data, shape, dropout and batch size, alternating windows.

    python benches/training.py CORPUS [--fairseq PYTHON | --alone] [--torch] [--precision f32 bf16] [--tuned]
                                      [--windows 5] [--seconds 20]

Prints, per window and as medians, real target tokens per second of fairseq and of this package in f32 and bf16, each
with the allocator as it comes and with the same setting for both (--tuned: that alone), and their ratios. Only one side
runs at a time; the others stand still between updates. The first window of each is not counted. fairseq is the one that
`make fairseq` installs, or that of another interpreter; with --alone it stays out. --torch adds torch.nn.Transformer
under torch.compile (torch_worker.py), with the same allocator setting.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from fairseq_data import FAIRSEQ, prepare
from fairseq_worker import TUNED_ALLOCATOR

HERE = Path(__file__).parent


class Worker:
    """One side of the benchmark, in its own process."""

    def __init__(self, name: str, command: list[str], tuned: bool, threads: int | None = None):
        self.name = f"{name}, {'same allocator setting' if tuned else 'allocator as it comes'}"
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("GLIBC_TUNABLES", "MALLOC_"))}
        # By default this package's trainer itself makes the allocator keep memory. If both sides have the same setting,
        # it is set by the environment, and NORMFORMER_RS_ALLOCATOR=system keeps the trainer from changing it.
        environment = {**plain, **TUNED_ALLOCATOR, "NORMFORMER_RS_ALLOCATOR": "system"} if tuned else plain
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.rates: list[float] = []
        self.read()

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: the worker ended with {self.process.wait()}; run it by hand to see why")
        return json.loads(line)

    def window(self, seconds: float, what: str = "target_tokens") -> float:
        """Runs a window of `seconds` seconds, and returns the number of `what` per second in it."""
        self.process.stdin.write(f"window {seconds}\n")
        self.process.stdin.flush()
        reply = self.read()
        return reply[what] / reply["seconds"]

    def quit(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    sides = parser.add_mutually_exclusive_group()
    sides.add_argument("--fairseq", metavar="PYTHON", help="another interpreter that has fairseq 0.12.2")
    sides.add_argument("--alone", action="store_true", help="without fairseq")
    parser.add_argument("--torch", action="store_true", help="with torch.nn.Transformer under torch.compile, too")
    parser.add_argument("--precision", nargs="+", default=["f32", "bf16"], choices=["f32", "bf16"])
    parser.add_argument("--tuned", action="store_true", help="with the same allocator setting only")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--update-freq", type=int, default=2)
    arguments = parser.parse_args()

    size = ["--max-tokens", str(arguments.max_tokens), "--update-freq", str(arguments.update_freq)]
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory() as scratch:
        ours = [sys.executable, str(HERE / "our_worker.py"), str(arguments.corpus), *size]
        for tuned in (True,) if arguments.tuned else (False, True):
            if not arguments.alone:
                python = arguments.fairseq or sys.executable
                preprocess = [python, "-m", "fairseq_cli.preprocess"] if arguments.fairseq else [*FAIRSEQ, "preprocess"]
                data = prepare(arguments.corpus, Path(scratch) / "data", preprocess)
                command = [python, str(HERE / "fairseq_worker.py"), str(data), *size]
                workers[f"fairseq {tuned}"] = Worker("fairseq f32", command, tuned)
            for precision in arguments.precision:
                command = [*ours, "--precision", precision]
                workers[f"{precision} {tuned}"] = Worker(f"normformer_rs {precision}", command, tuned)
        for precision in arguments.precision if arguments.torch else ():
            command = [sys.executable, str(HERE / "torch_worker.py"), str(arguments.corpus), *size]
            name = f"torch.nn.Transformer compiled {precision}"
            workers[f"torch {precision} True"] = Worker(name, [*command, "--precision", precision], tuned=True)
        for worker in workers.values():
            worker.window(4)
        for round_ in range(arguments.windows):
            for worker in workers.values():
                worker.rates.append(worker.window(arguments.seconds))
                print(f"window {round_ + 1}: {worker.name:45} {worker.rates[-1]:8,.0f} target tokens/s", flush=True)
        for worker in workers.values():
            worker.quit()

    print(f"\nmedians of {arguments.windows} windows of {arguments.seconds:g} s, {os.cpu_count()} cores")
    medians = {key: statistics.median(worker.rates) for key, worker in workers.items()}
    for key, worker in workers.items():
        print(f"{worker.name:45} {medians[key]:8,.0f} target tokens/s")
    print()
    for tuned, setting in ((False, "as installed"), (True, "same allocator setting")):
        for precision in arguments.precision:
            ours = f"{precision} {tuned}"
            for theirs in (f"fairseq {tuned}", f"torch {precision} {tuned}"):
                if {ours, theirs} <= medians.keys():
                    what = f"{precision} / {theirs.rpartition(' ')[0]}, {setting}"
                    print(f"{what:45} {medians[ours] / medians[theirs]:.2f}")


if __name__ == "__main__":
    main()
