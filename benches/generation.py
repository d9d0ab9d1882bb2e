"""Measures how long a language model takes for a prompt of 1,000 tokens, also with another build of the package.

    python benches/generation.py [OTHER]

OTHER is a folder with another normformer_rs package. Both packages read the same prompt with the same weights, in
turns. Printed are medians of five times, and how far apart the log p of the first tokens are. Models: the preset
llama-tiny, and one with 100 million parameters.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SIZES = {
    "llama-tiny": {"preset": "llama-tiny"},
    "100 million": {"preset": "llama-tiny", "d_model": 1024, "d_ff": 2730, "heads": 16, "kv_heads": 8,
                    "decoder_layers": 10},
}  # fmt: skip
REPEATS = 5
TRAIN = """
import json, sys
import normformer_rs as nfrs
run, text, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model, training = nfrs.preset(options.pop("preset"))
data = nfrs.DataConfig(train_target=text, valid_target=text, no_bpe=True, segment_length=1100)
short = training.replace(updates=1, max_tokens=1100, evaluate_every=1, keep=1)
nfrs.Trainer(model.replace(**options), short, data).fit(run, progress=False, curves=False, tensorboard=False)
"""
PROGRAM = """
import json, sys, time
import normformer_rs as nfrs
run, prompt, continuations = sys.argv[1], open(sys.argv[2]).read(), int(sys.argv[3])
drawn = {"temperature": 1.0, "max_length": 1, "context": 1100, "samples": continuations, "sentences": 0}
nfrs.generate(run, [prompt[:200]], nfrs.GenerationConfig(**drawn))
start = time.perf_counter()
found = nfrs.generate(run, [prompt], nfrs.GenerationConfig(**drawn))
print(json.dumps([time.perf_counter() - start, found[0][0].text, found[0][0].log_probability]))
"""


def main() -> None:
    others = [Path(sys.argv[1]).absolute()] if len(sys.argv) > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
        lines = [" ".join(words[(i * i + j) % 8] for j in range(1 + i % 9)) for i in range(400)]
        text.write_text("\n".join(lines) + "\n")
        prompt = Path(folder, "prompt.txt")
        prompt.write_text(" ".join(words[(7 * i * i + i) % 8] for i in range(1000)))
        for size, options in SIZES.items():
            run = Path(folder, size.replace(" ", "-"))
            oldest = (others or [None])[0]  # OTHER trains, because an older package cannot read runs of a newer one
            _run(oldest, TRAIN, [str(run), str(text), json.dumps(options)])
            for continuations in (1, 8):
                arguments = [str(run), str(prompt), str(continuations)]
                times: dict[str, list[float]] = {}
                said = {}
                for _ in range(REPEATS):
                    for name, package in (("this", None), *(("other", other) for other in others)):
                        seconds, word, log_p = _generate(package, arguments)
                        times.setdefault(name, []).append(seconds)
                        said[name] = (word, log_p)
                medians = {name: statistics.median(found) for name, found in times.items()}
                line = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in medians.items())
                if others:
                    apart = abs(said["this"][1] - said["other"][1])
                    line += f"; {medians['other'] / medians['this']:.1f} times as fast, log p apart by {apart:.1e}"
                print(f"{size}, 1,000 tokens, {continuations} continuations: {line}", flush=True)


def _generate(package: Path | None, arguments: list[str]) -> tuple[float, str, float]:
    seconds, word, log_p = json.loads(_run(package, PROGRAM, arguments).strip().splitlines()[-1])
    return seconds, word, log_p


def _run(package: Path | None, program: str, arguments: list[str]) -> str:
    paths = {"PYTHONPATH": str(package)} if package else {}
    done = subprocess.run([sys.executable, "-c", program, *arguments], env={**os.environ, **paths}, text=True,
                          stdout=subprocess.PIPE, check=True)  # fmt: skip
    return done.stdout


if __name__ == "__main__":
    main()
