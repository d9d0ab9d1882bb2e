"""Very deep stacks with activation checkpointing: build, step, save, load again; peak memory and seconds per update.

    python benches/depth.py [--layers 100 500] [--updates 3]

The text is made on the spot: 64 sentences of 16 words. Each depth runs in a process of its own.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import normformer_rs as nfrs


def measure(layers: int, updates: int) -> dict:
    generator = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for part in ("train", "valid"):
            for side in ("source", "target"):
                lines = [" ".join(generator.choices("abcdefghij", k=15)) + "\n" for _ in range(64)]
                path = Path(folder) / f"{part}.{side}"
                path.write_text("".join(lines))
                paths[f"{part}_{side}"] = str(path)
        model = nfrs.TransformerConfig(
            d_model=64, d_ff=128, heads=4, encoder_layers=layers, decoder_layers=layers, residual="deepnorm"
        )
        training = nfrs.TrainingConfig(updates=updates, max_tokens=1024, lr=1e-3, warmup=0, schedule="constant", keep=1,
                                     activation_checkpointing=True)  # fmt: skip
        output = Path(folder) / "run"
        history = nfrs.Trainer(model, training, nfrs.DataConfig(**paths, no_bpe=True)).fit(output, progress=False)
        loaded = nfrs.Transformer.from_checkpoint(output, "last")
        return {
            "layers": f"{layers}+{layers}",
            "parameters": sum(p.numel() for p in loaded.parameters()),
            "seconds_per_update": round(float(history.seconds[-1] / len(history.update)), 2),
            "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[100, 500])
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measure(arguments.layers[0], arguments.updates)))
        return
    for layers in arguments.layers:
        command = [sys.executable, __file__, "--here", "--layers", str(layers), "--updates", str(arguments.updates)]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip(), flush=True)


if __name__ == "__main__":
    main()
