"""fairseq's updates per second with the plug-in against without, on the Multi30k recipe, in alternating windows.

    python benches/fairseq_speed.py CORPUS [--windows 5] [--seconds 20]

Stock `transformer_tiny` and the plug-in's `nfrs_transformer_tiny` (with its fused loss, one norm after the other) train
on the same batches in processes of their own; only one runs at a time. The first window of each is not counted. Prints
updates per second by window, medians, and the plug-in's ratios to stock.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from fairseq_data import FAIRSEQ, prepare
from training import HERE, Worker

PLUGIN = "--arch nfrs_transformer_tiny --criterion nfrs_label_smoothed_cross_entropy --residual postnorm --norm"
BARS = {"layernorm": 1.1, "scalenorm": 1.15}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--max-tokens", default="4096")
    parser.add_argument("--tuned", action="store_true", help="both with the allocator told to keep its memory")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        data = prepare(arguments.corpus, Path(scratch) / "data", [*FAIRSEQ, "preprocess"])
        command = [sys.executable, str(HERE / "fairseq_worker.py"), str(data), "--max-tokens", arguments.max_tokens]
        asked = [sys.executable, "-m", "normformer_rs", "fairseq-user-dir"]
        plugin = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
        workers = {"stock": Worker("stock", command, arguments.tuned)}
        for norm in BARS:
            given = ["--user-dir", plugin, *PLUGIN.split(), norm]
            workers[norm] = Worker(f"plug-in, {norm}", [*command, *given], arguments.tuned)
        for worker in workers.values():
            worker.window(4, "updates")
        for round_ in range(arguments.windows):
            for worker in workers.values():
                worker.rates.append(worker.window(arguments.seconds, "updates"))
                print(f"window {round_ + 1}: {worker.name:45} {worker.rates[-1]:6.3f} updates/s", flush=True)
        for worker in workers.values():
            worker.quit()

    print(f"\nmedians of {arguments.windows} windows of {arguments.seconds:g} s, {os.cpu_count()} cores")
    medians = {name: statistics.median(worker.rates) for name, worker in workers.items()}
    for name, bar in BARS.items():
        ratio = medians[name] / medians["stock"]
        print(f"{name:10} {medians[name]:6.3f} / {medians['stock']:6.3f} updates/s = {ratio:.2f} (bar {bar})")


if __name__ == "__main__":
    main()
