"""How much faster a second thread makes training, and a product of 2048² matrices.

    python benches/threads.py CORPUS [--precision bf16] [--windows 5] [--seconds 15]

Training as in training.py on one thread and on two, in alternating windows; before each window the product in the same
type on as many threads. Prints the medians, both ratios, and the share of the product's ratio that training reaches.
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch
from training import HERE, Worker

from normformer_rs.bench import kernels

SIZE, PRODUCTS = 2048, 15


def product_rate(dtype: torch.dtype) -> float:
    """Returns the floating-point operations per second of a product of 2048² matrices, on as many threads as torch
    uses."""
    a, b = (torch.randn(SIZE, SIZE).to(dtype) for _ in range(2))
    return 2 * SIZE**3 / kernels.seconds(lambda: a @ b, "cpu", PRODUCTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--precision", default="bf16", choices=["f32", "bf16"])
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15)
    arguments = parser.parse_args()

    command = [sys.executable, str(HERE / "our_worker.py"), str(arguments.corpus), "--precision", arguments.precision]
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[arguments.precision]
    workers = {threads: Worker(f"{threads} thread", command, tuned=True, threads=threads) for threads in (1, 2)}
    products: dict[int, list[float]] = {1: [], 2: []}
    for worker in workers.values():
        worker.window(4)
    for _ in range(arguments.windows):
        for threads, worker in workers.items():
            torch.set_num_threads(threads)
            products[threads].append(product_rate(dtype))
            worker.rates.append(worker.window(arguments.seconds))
    for worker in workers.values():
        worker.quit()

    training = {threads: statistics.median(worker.rates) for threads, worker in workers.items()}
    product = {threads: statistics.median(rates) for threads, rates in products.items()}
    for threads in workers:
        print(f"{threads} thread{'s' * (threads > 1)}: {training[threads]:8,.0f} target tokens/s, "
              f"product {product[threads] / 1e9:7,.0f} GFLOP/s")  # fmt: skip
    scales, could = training[2] / training[1], product[2] / product[1]
    print(f"two threads against one: training {scales:.2f}, product {could:.2f}; share {scales / could:.2f}")


if __name__ == "__main__":
    main()
