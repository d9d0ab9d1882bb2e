"""The cost of swapped blocks: the time of a GPT-2 swapped to deepnorm over that of transformers' own GPT-2.

    python benches/swapped.py [--layers 4] [--width 256] [--pairs 15]

Forward and backward of 8 x 128 tokens, eager and compiled by inductor, in alternating pairs. Prints the swapped model's
time over the stock model's (medians), the 95 % interval by bootstrap over pairs, and the milliseconds of either.
"""

import argparse
import copy
import random
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import transformers

import normformer_rs as nfrs

TOKENS = 8, 128


def seconds(step: Callable[[], None], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - start) / calls


def compared(stock: torch.nn.Module, swapped: torch.nn.Module, pairs: int) -> None:
    ids = torch.randint(1000, TOKENS)

    def step_of(model: torch.nn.Module) -> Callable[[], None]:
        def step() -> None:
            model(input_ids=ids, labels=ids).loss.backward()

        return step

    steps = [step_of(model) for model in (stock, swapped)]
    for step in steps:
        seconds(step, 3)
    calls = max(1, round(1.0 / seconds(steps[0], 2)))
    times = []
    for i in range(pairs):
        order = (0, 1) if i % 2 else (1, 0)
        found = {side: seconds(steps[side], calls) for side in order}
        times.append((found[0], found[1]))
    ratios = [after / before for before, after in times]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=pairs)) for _ in range(10_000))
    before, after = (1e3 * statistics.median(side) for side in zip(*times))
    interval = f"[{medians[250]:.3f}, {medians[9750]:.3f}]"
    print(f"{statistics.median(ratios):.3f} {interval}, {after:.1f} ms over {before:.1f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=15)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    nfrs.keep_memory()
    config = transformers.GPT2Config(
        vocab_size=1000, n_embd=arguments.width, n_layer=arguments.layers, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    stock = transformers.GPT2LMHeadModel(config)
    swapped = copy.deepcopy(stock)
    nfrs.swap_residuals(swapped, "deepnorm", init=None)
    print("eager:    ", end="")
    compared(stock, swapped, arguments.pairs)
    print("compiled: ", end="")
    compared(torch.compile(stock), torch.compile(swapped), arguments.pairs)


if __name__ == "__main__":
    main()
