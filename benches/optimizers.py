"""The cost of Muon: an update of the training loop against AdamW's, and one step against torch.optim.Muon's.

    python benches/optimizers.py CORPUS [--shapes tiny 12x512] [--precision f32 bf16] [--windows 7] [--seconds 5]

Prints, for each shape and precision, the medians and quartiles of the ratios of alternating windows: seconds of an
update with optimizer = "muon" over those with "adam", on CORPUS (train.en.gz, train.de.gz, valid.en.gz,
valid.de.gz); and seconds of a step of torch.optim.Muon over those of the loop's rule, for the matrices of the shape's
layers, each by itself, one after the other. torch.optim.Muon iterates in bf16, whatever the matrices' type.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from training import Worker

from normformer_rs import _core

HERE = Path(__file__).parent
SHAPES = {
    "tiny": {},  # the shape of our_worker.py: 4 + 4 layers, d_model 128, d_ff 256
    "12x512": {"d_model": 512, "d_ff": 2048, "heads": 8, "encoder_layers": 6, "decoder_layers": 6},
}
OF_LAYER = {
    "tiny": [(128, 128)] * 4 + [(256, 128), (128, 256)],
    "12x512": [(512, 512)] * 4 + [(2048, 512), (512, 2048)],
}


def quartiles(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def updates(arguments: argparse.Namespace, shape: str, precision: str) -> str:
    """Returns the ratio of an update's seconds, Muon's over Adam's."""

    def worker(optimizer: str) -> Worker:
        given = {"--model": SHAPES[shape], "--training": {"optimizer": optimizer}}
        options = [part for name, value in given.items() for part in (name, json.dumps(value))]
        command = [sys.executable, str(HERE / "our_worker.py"), str(arguments.corpus), "--precision", precision]
        return Worker(optimizer, [*command, *options], tuned=False)

    sides = [worker("muon"), worker("adam")]
    rates = [[side.window(arguments.seconds) for side in sides] for _ in range(arguments.windows + 1)][1:]
    for side in sides:
        side.process.kill()
    return quartiles([adam / muon for muon, adam in rates])


def steps(arguments: argparse.Namespace, shape: str, precision: str) -> str:
    """Returns the ratio of a step's seconds, torch's over ours."""
    torch.manual_seed(0)
    matrices = [torch.randn(size) for size in OF_LAYER[shape]]
    gradients = [torch.randn_like(p) for p in matrices]
    states = [torch.zeros_like(p) for p in matrices]
    theirs = [torch.nn.Parameter(p.clone()) for p in matrices]
    for p, gradient in zip(theirs, gradients):
        p.grad = gradient.clone()
    optimizer = torch.optim.Muon(theirs, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    options = json.dumps({"optimizer": "muon", "weight_decay": 0.1, "precision": precision})

    def ours() -> None:
        for p, gradient, state in zip(matrices, gradients, states):
            _core.step_by_rule(options, p, gradient, [state], 1e-3)

    def seconds(step) -> float:
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < arguments.seconds / 5:
            step()
            count += 1
        return (time.perf_counter() - start) / count

    pairs = [(seconds(optimizer.step), seconds(ours)) for _ in range(arguments.windows + 1)][1:]
    return quartiles([torchs / own for torchs, own in pairs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--precision", nargs="+", choices=["f32", "bf16"], default=["f32", "bf16"])
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    for shape in arguments.shapes:
        for precision in arguments.precision:
            print(f"{shape} {precision}: update, Muon over AdamW {updates(arguments, shape, precision)}", flush=True)
            print(
                f"{shape} {precision}: step, torch.optim.Muon over ours {steps(arguments, shape, precision)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
