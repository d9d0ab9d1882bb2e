"""One side of decoding.py: loads a model and translates the same lines when it is asked to.

    python decoding_worker.py {ours,ctranslate2} MODEL LINES OUTPUT --threads N

Each line of standard input is a JSON object with beam and max_tokens. The reply is one line of JSON with the seconds
and the user CPU seconds of the translation, loading excluded; OUTPUT gets the translations, a line each, their pieces
joined. `ours` loads the model in each call, so a call without lines is timed beside it and subtracted.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

Translate = Callable[[int, int], list[str]]


def timed(work: Callable[[], object]) -> tuple[object, float, float]:
    cpu, start = os.times().user, time.perf_counter()
    result = work()
    return result, time.perf_counter() - start, os.times().user - cpu


def ours(model: Path, lines: list[str], threads: int) -> Callable[[int, int], tuple[list[str], float, float]]:
    import torch

    import normformer_rs as nfrs

    torch.set_num_threads(threads)

    def translate(beam: int, max_tokens: int) -> tuple[list[str], float, float]:
        search = nfrs.SearchConfig(beam=beam, rule="fairseq", alpha=1.0)
        loads = [timed(lambda: nfrs.translate(model, [], search)) for _ in range(5)]
        found, seconds, cpu = timed(lambda: nfrs.translate(model, lines, search, max_tokens=max_tokens))
        _, load, load_cpu = (statistics.median(column) for column in ([0], *list(zip(*loads, strict=True))[1:]))
        return [hypotheses[0].text for hypotheses in found], seconds - load, cpu - load_cpu

    return translate


def ctranslate2(model: Path, lines: list[str], threads: int) -> Callable[[int, int], tuple[list[str], float, float]]:
    import ctranslate2 as ct2

    pieces = [line.split() for line in lines]
    # CTranslate2 can use threads to share each operation, or for separate batches. Both are tried; the faster counts.
    ways = [{"inter_threads": threads, "intra_threads": 1}, {"inter_threads": 1, "intra_threads": threads}]
    translators = [ct2.Translator(str(model), device="cpu", compute_type="float32", **way) for way in ways]

    def translate(beam: int, max_tokens: int) -> tuple[list[str], float, float]:
        def run(translator: ct2.Translator) -> list[str]:
            results = translator.translate_batch(
                pieces,
                beam_size=beam,
                length_penalty=1.0,
                max_batch_size=max_tokens,
                batch_type="tokens",
                max_decoding_length=200,
            )
            # The space is added, because a text that the limit cuts off may end in "@@", inside a word.
            return [(" ".join(result.hypotheses[0]) + " ").replace("@@ ", "").rstrip() for result in results]

        return min((timed(lambda translator=t: run(translator)) for t in translators), key=lambda found: found[1])

    return translate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=["ours", "ctranslate2"])
    parser.add_argument("model", type=Path)
    parser.add_argument("lines", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    lines = arguments.lines.read_text(encoding="utf-8").splitlines()
    make = {"ours": ours, "ctranslate2": ctranslate2}[arguments.side]
    translate = make(arguments.model, lines, arguments.threads)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        found, seconds, cpu = translate(**json.loads(line))
        arguments.output.write_text("".join(text + "\n" for text in found), encoding="utf-8")
        print(json.dumps({"seconds": seconds, "cpu": cpu}), flush=True)


if __name__ == "__main__":
    main()
