"""torch.compile of a model with ScaleNorm, against the same model eager: forward and backward, in alternating windows.

    python benches/compiled.py [--repeats 3] [--windows 25]

The model is six times Linear → ReLU → Linear after a ScaleNorm, added to its input, as in a feed-forward stack. Prints
the milliseconds of either (medians of the windows' medians), their ratio, and the number of graph breaks.
"""

import argparse
import statistics

import torch
import torch._dynamo
from kernels import seconds
from torch import Tensor, nn

from normformer_rs import nn as nfnn


class FeedForward(nn.Module):
    """The sublayer x + F(N(x)), with N = ScaleNorm and F = Linear → ReLU → Linear."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nfnn.ScaleNorm(width)
        self.linear1, self.linear2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear2(torch.relu(self.linear1(self.norm(x))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--windows", type=int, default=25)
    arguments = parser.parse_args()
    for width, hidden in ((128, 256), (512, 512)):
        model = nn.Sequential(*(FeedForward(width, hidden) for _ in range(6)))
        x = torch.randn(arguments.rows, width, requires_grad=True)
        breaks = torch._dynamo.explain(model)(x).graph_break_count
        compiled = torch.compile(model, fullgraph=True)
        inputs = [x, *model.parameters()]

        def run(module: nn.Module, x: Tensor = x, inputs: list[Tensor] = inputs) -> None:
            torch.autograd.grad(module(x).square().mean(), inputs)

        times: dict[str, list[float]] = {"eager": [], "compiled": []}
        for _ in range(arguments.windows):
            for name, module in (("eager", model), ("compiled", compiled)):
                times[name].append(seconds(lambda m=module: run(m), arguments.repeats))
        eager, fast = (1000 * statistics.median(times[name]) for name in ("eager", "compiled"))
        print(
            f"{torch.get_num_threads()} threads, {arguments.rows} rows, width {width}: eager {eager:.2f} ms, compiled "
            f"{fast:.2f} ms, {eager / fast:.2f} times as fast; {breaks} graph breaks",
            flush=True,
        )


if __name__ == "__main__":
    main()
