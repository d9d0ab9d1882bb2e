"""Coordinate checks of every residual scheme and norm: slopes over the width under mup, over the depth under completep.

    python benches/coordinates.py [NAME ...] [--seeds 5] [--updates 16] [--lr 0.003] [--csv FILE]

Prints, by name, the slope of the size of each place against the width (64 to 512), of the stream's against the depth (2
to 32). NAME: schemes and norms; all where none is given. What a parametrisation refuses is left out.
"""

import argparse
import csv
import time
from pathlib import Path

import torch

import normformer_rs as nfrs
from normformer_rs import analysis
from normformer_rs.analysis.coordinates import PLACES

SHAPE = {"architecture": "decoder-only", "vocab_size": 40, "d_model": 64, "d_ff": 128, "heads": 2, "decoder_layers": 4}
WIDTHS, DEPTHS = (64, 128, 256, 512), (2, 4, 8, 16, 32)
BAR = 0.15
WANTED = {"width": ("logits", "scores", "mixing scores"), "depth": ("embedding", "middle layer", "last layer")}
"""The places whose slopes must stay within the bar. The first layer is not among those over the depth, because the part
of the residual stream that it adds shrinks with the depth by design."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--over", choices=("width", "depth"))
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = nfrs.tables()
    chosen = [({"residual": entry["name"]}, entry["name"]) for entry in found["residuals"]]
    chosen += [({"residual": "prenorm", "norm": entry["name"]}, entry["name"]) for entry in found["norms"]]
    seeds = tuple(range(1, arguments.seeds + 1))
    rows = []
    for options, name in chosen:
        if arguments.names and name not in arguments.names:
            continue
        for over, sizes in (("width", WIDTHS), ("depth", DEPTHS)):
            if arguments.over not in (None, over):
                continue
            scaled = {"parametrisation": "mup", "base_width": 64}
            if over == "depth":
                scaled = {"parametrisation": "completep", "base_width": 64, "base_depth": 2}
            start = time.perf_counter()
            try:
                config = nfrs.TransformerConfig(**SHAPE, **options, **scaled)
                given = {"widths": sizes} if over == "width" else {"depths": sizes}
                check = analysis.coordinate_check(
                    config, **given, seeds=seeds, updates=arguments.updates, lr=arguments.lr
                )
            except nfrs.InputError as error:
                print(f"{name:18} {over}: refused: {error}", flush=True)
                continue
            slopes = check.slopes()
            wanted = {place: slope for place, slope in slopes.items()
                      if place in WANTED[over]}  # fmt: skip
            worst = max(wanted.values(), key=abs, default=0.0)
            shown = "  ".join(f"{place} {slope:+.2f}" for place, slope in slopes.items())
            mark = "" if abs(worst) <= BAR else "  MISSED"
            print(f"{name:18} {over}: {shown}  [{time.perf_counter() - start:.0f} s]{mark}", flush=True)
            rows.append({"name": name, "over": over, **{place: f"{slope:.3f}" for place, slope in slopes.items()}})
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["name", "over", *PLACES])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
