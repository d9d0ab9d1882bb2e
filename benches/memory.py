"""Compares `--dry-run`'s estimate of memory with the peak of training, for twelve shapes on the CPU.

    python benches/memory.py [--only NAME ...]

Each shape trains for four updates on made-up text, in a process of its own. All batches are alike. The peak is that of
the process's resident memory (VmHWM). Prints estimate, peak and their ratio.
"""

import argparse
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

BASE = "--d-model 512 --d-ff 2048 --heads 8 --encoder-layers 6 --decoder-layers 6 --max-tokens 4096"
LM = "--architecture decoder-only --d-model 512 --d-ff 1365 --heads 8 --max-tokens 4096 --segment-length 512"
SHAPES = {
    "transformer-base": BASE,
    "base, bf16": f"{BASE} --precision bf16",
    "base, postnorm": f"{BASE} --residual postnorm",
    "base, rmsnorm, 16,384 tokens": f"{BASE} --norm rmsnorm --max-tokens 16384",
    "base, 12+12 layers, deepnorm": f"{BASE} --residual deepnorm --encoder-layers 12 --decoder-layers 12",
    "base, activation checkpointing": f"{BASE} --activation-checkpointing",
    "base, 12+12 layers, dlcl": f"{BASE} --residual dlcl --encoder-layers 12 --decoder-layers 12",
    "narrow, 24+24 layers": (
        "--d-model 256 --d-ff 1024 --heads 4 --encoder-layers 24 --decoder-layers 24 --max-tokens 4096"
    ),
    "big": "--d-model 1024 --d-ff 4096 --heads 16 --encoder-layers 6 --decoder-layers 6 --max-tokens 2048",
    "language model, swiglu": f"{LM} --decoder-layers 12 --activation swiglu --norm rmsnorm",
    "language model, mhc": f"{LM} --decoder-layers 8 --residual mhc",
    "language model, attnres": f"{LM} --decoder-layers 16 --residual attnres",
}
PEAK = """
import sys
from normformer_rs import cli
code = cli.main(sys.argv[1:])
print("VmHWM", next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""


def corpus(folder: Path) -> list[str]:
    """Writes lines of 24 random words out of 8,000. Returns the paths of the files: training source and target, then
    validation source and target."""
    chance = random.Random(1)
    words = [f"w{i}" for i in range(8000)]
    files = [folder / f"{part}.{side}" for part in ("train", "valid") for side in ("source", "target")]
    for file in files:
        lines = 1400 if file.stem == "train" else 2
        file.write_text("".join(" ".join(chance.choices(words, k=24)) + "\n" for _ in range(lines)))
    return [str(file) for file in files]


def said(words: list[str]) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=SHAPES, choices=SHAPES)
    shapes = parser.parse_args().only
    with tempfile.TemporaryDirectory() as folder:
        sides = corpus(Path(folder))
        for name in shapes:
            flags = ("--train-source", "--train-target", "--valid-source", "--valid-target")
            if "decoder-only" in SHAPES[name]:
                data = [flags[1], sides[1], flags[3], sides[3]]
            else:
                data = [word for pair in zip(flags, sides) for word in pair]
            command = ["train", "--no-bpe", *data, *SHAPES[name].split(), "--updates", "4", "--criterion", "loss"]
            estimate = re.search(
                r"memory to train: about ([\d.]+) (\w+)", said(["-m", "normformer_rs", *command, "--dry-run"])
            )
            scale = {"MiB": 2**20, "GiB": 2**30}[estimate[2]]
            out = said(["-c", PEAK, *command, "--output", f"{folder}/run", "--overwrite", "--no-progress"])
            peak = int(re.search(r"VmHWM (\d+)", out)[1]) * 1024
            print(
                f"{name:34}  {float(estimate[1]) * scale / 2**20:8,.0f} MiB  {peak / 2**20:8,.0f} MiB  "
                f"{float(estimate[1]) * scale / peak:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
