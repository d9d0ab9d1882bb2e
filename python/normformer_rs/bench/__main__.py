"""`python -m normformer_rs.bench gpu --output FOLDER`: everything that is claimed of a GPU, measured on this one."""

import argparse
from pathlib import Path

from . import gpu


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m normformer_rs.bench", description=gpu.__doc__, formatter_class=raw)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("gpu", help="kernels, training and correctness on a GPU")
    command.add_argument("--output", type=Path, default=Path("bench-gpu"), help="gets gpu.csv, gpu.png and gpu.log")
    command.add_argument("--tests", type=Path, default=Path("tests"), help="the project's tests")
    command.add_argument("--device", default="cuda", help="cpu: small sizes, to see that this program works")
    command.add_argument("--megabytes", type=int, default=512, help="of each buffer")
    command.add_argument("--updates", type=int, default=60, help="of each training run")
    command.add_argument("--quick", action="store_true", help="leave out what torch.compile has to compile")
    arguments = parser.parse_args()
    gpu.measure(
        arguments.output, arguments.tests, arguments.device, arguments.megabytes, arguments.updates, arguments.quick
    )


if __name__ == "__main__":
    main()
