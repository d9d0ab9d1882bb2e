"""The cost of schemes that carry several tensors: an update of the training loop over prenorm's.

    python benches/streams.py CORPUS [--schemes mhc hyper-connections attnres] [--other CHECKOUT] [--precision f32]

Prints, for each scheme, the median and quartiles of the ratios of alternating windows: seconds of an update of 6 + 6
layers of d 128 with the scheme over those with prenorm, on CORPUS (train.en.gz, train.de.gz, valid.en.gz,
valid.de.gz). With `--other`, a checkout whose extension is built, its updates with the scheme take turns in the same
run.
"""

import argparse
import json
import sys
from pathlib import Path

from optimizers import quartiles
from training import Worker

HERE = Path(__file__).parent
LAYERS = {"encoder_layers": 6, "decoder_layers": 6}


def worker(arguments: argparse.Namespace, scheme: str, checkout: Path | None = None) -> Worker:
    model = json.dumps({**LAYERS, "residual": scheme})
    place = [] if checkout is None else ["env", f"PYTHONPATH={checkout / 'python'}"]
    command = [sys.executable, str(HERE / "our_worker.py"), str(arguments.corpus), "--precision", arguments.precision]
    return Worker(scheme, [*place, *command, "--model", model], tuned=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--schemes", nargs="+", default=["mhc", "hyper-connections", "attnres"])
    parser.add_argument("--other", type=Path)
    parser.add_argument("--precision", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    for scheme in arguments.schemes:
        sides = {"prenorm": worker(arguments, "prenorm"), scheme: worker(arguments, scheme)}
        if arguments.other is not None:
            sides[f"{scheme} of {arguments.other.name}"] = worker(arguments, scheme, arguments.other)
        rounds = [
            {name: side.window(arguments.seconds) for name, side in sides.items()} for _ in range(arguments.windows + 1)
        ]
        for side in sides.values():
            side.process.kill()
        for name in list(sides)[1:]:
            ratios = [one["prenorm"] / one[name] for one in rounds[1:]]  # of tokens a second
            print(f"{arguments.precision} {name}: {quartiles(ratios)} of prenorm's time", flush=True)


if __name__ == "__main__":
    main()
