"""Kills training again and again, resumes it, and compares the final weights with an uninterrupted run's, bit by bit.

Kills come at random delays (`--kills N`) and at every system act of a checkpoint write; at each of those acts a full
disk is injected too. `make kill-test N=20` runs it whole; the test-suite a short version.
"""

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OPTIONS = {
    "d-model": 32,
    "d-ff": 64,
    "heads": 2,
    "encoder-layers": 2,
    "decoder-layers": 2,
    "norm": "scalenorm",
    "dropout": 0.2,
    "max-tokens": 300,
    "warmup": 10,
    "evaluate-every": 10,
    "keep": 2,
    "seed": 3,
}


def write_corpus(folder: Path) -> dict[str, Path]:
    generator = random.Random(1)
    paths = {}
    for part, n in (("train", 200), ("valid", 20)):
        lines = [[generator.choice("0123456789") for _ in range(generator.randint(1, 9))] for _ in range(n)]
        for side, text in (("source", lines), ("target", [[chr(97 + int(d)) for d in line[::-1]] for line in lines])):
            paths[f"{part}-{side}"] = folder / f"{part}.{side}"
            paths[f"{part}-{side}"].write_text("".join(" ".join(line) + "\n" for line in text))
    return paths


class Run:
    """Training in a folder of its own, as another process."""

    def __init__(self, folder: Path, corpus: dict[str, Path], updates: int):
        self.folder = folder
        self.command = [sys.executable, "-m", "normformer_rs", "train", "--no-bpe", "--output", str(folder)]
        for key, value in {**OPTIONS, **corpus, "updates": updates}.items():
            self.command += [f"--{key}", str(value)]

    def start(self, fault: str | None = None) -> subprocess.Popen:
        resume = ["--resume"] if (self.folder / "config.json").exists() else []
        environment = {**os.environ, **({"NORMFORMER_RS_FAULT": fault} if fault else {})}
        return subprocess.Popen(self.command + resume, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def finish(self, fault: str | None = None) -> int:
        process = self.start(fault)
        _, err = process.communicate()
        if process.returncode not in (0, 2, -signal.SIGKILL):
            raise SystemExit(f"training ended with {process.returncode}:\n{err.decode()}")
        if process.returncode == 2 and b"No space left" not in err:
            raise SystemExit(f"training failed:\n{err.decode()}")
        return process.returncode

    def checksum(self) -> str:
        return hashlib.sha256((self.folder / "checkpoints" / "last" / "model.safetensors").read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="kills at random delays")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--stride", type=int, default=1, help="take every so many-th act of the checkpoint writes")
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="kill-test-"))
    try:
        corpus = write_corpus(scratch)
        whole = Run(scratch / "whole", corpus, arguments.updates)
        start = time.monotonic()
        assert whole.finish() == 0
        duration, expected = time.monotonic() - start, whole.checksum()

        generator = random.Random(os.getpid())
        killed = Run(scratch / "killed", corpus, arguments.updates)
        kills = 0
        while kills < arguments.kills:
            process = killed.start()
            try:
                process.communicate(timeout=generator.uniform(0.3, 1.0) * duration)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                kills += 1
            if process.returncode == 0:  # it got to the end: begin anew
                assert killed.checksum() == expected, "the weights differ after a kill at a random moment"
                shutil.rmtree(killed.folder)
        assert killed.finish() == 0 and killed.checksum() == expected, "the weights differ after random kills"
        print(f"{kills} kills at random moments: the weights are the uninterrupted run's")

        for kind, ended in (("kill", -signal.SIGKILL), ("enospc", 2)):
            act = 1
            while True:
                run = Run(scratch / f"{kind}-{act}", corpus, 20)
                code = run.finish(f"{kind}:{act}")
                if code == 0:  # fewer acts than that
                    break
                assert code == ended, f"{kind} at act {act} ended with {code}"
                assert run.finish() == 0
                reference = Run(scratch / "reference", corpus, 20)
                if not reference.folder.exists():
                    assert reference.finish() == 0
                assert run.checksum() == reference.checksum(), f"the weights differ after {kind} at act {act}"
                shutil.rmtree(run.folder)
                act += arguments.stride
            print(f"{kind} at each of {act - 1} acts of the checkpoint writes: the weights are the uninterrupted run's")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
