"""`python -m normformer_rs.bench gpu --output FOLDER`: measures every claim about GPUs on this one."""

import argparse
import os
import signal
import sys
from pathlib import Path

from . import gpu


def main() -> None:
    """Measures the sections that the command line names, each in its own process or, with --here, in this one."""
    parser = argparse.ArgumentParser(prog="python -m normformer_rs.bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    raw, listed = argparse.RawDescriptionHelpFormatter, "sections, in their order:\n"
    for name, section in gpu.SECTIONS.items():
        listed += f"  {name:12} {section.what}; at most {section.limit:g} s\n"
    command = commands.add_parser(
        "gpu", help="kernels, training and correctness on a GPU", description=gpu.__doc__, epilog=listed,
        formatter_class=raw,
    )  # fmt: skip
    command.add_argument("--output", type=Path, default=Path("bench-gpu"), help="folder for gpu.csv, gpu.png and logs")
    command.add_argument("--tests", type=Path, default=Path("tests"), help="the project's tests")
    command.add_argument("--device", default="cuda", help="cpu: small sizes, to see that this program works")
    command.add_argument("--megabytes", type=int, default=512, help="size of each buffer, in MiB")
    command.add_argument("--updates", type=int, default=120, help="updates of each training run")
    command.add_argument("--only", type=sections, default=list(gpu.SECTIONS), metavar="SECTION[,SECTION]")
    command.add_argument(
        "--limit", type=float, metavar="SECONDS", help="time limit of each section, in place of its own"
    )
    command.add_argument("--here", action="store_true", help="in this process, without limits")
    arguments = vars(parser.parse_args())
    only, limit, here = (arguments.pop(name) for name in ("only", "limit", "here"))
    # Missing kernels are an error, so that composed formulas are not measured in their place.
    os.environ["NORMFORMER_RS_CUDA"] = "require"
    options = gpu.Options(**arguments)
    if here:
        gpu.here(options, only)
    else:
        # On SIGTERM this process exits as after Ctrl-C, so that it also ends the section's process. The exit code is
        # 128 + SIGTERM = 143.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        gpu.measure(options, only, limit)


def sections(text: str) -> list[str]:
    """Parses the value of --only: names of sections with commas between them."""
    chosen = text.split(",")
    if unknown := set(chosen) - set(gpu.SECTIONS):
        raise argparse.ArgumentTypeError(f"no section is called {', '.join(unknown)}: {', '.join(gpu.SECTIONS)}")
    return chosen


if __name__ == "__main__":
    main()
