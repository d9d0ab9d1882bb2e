"""`python -m docs.generate write [--output site] [--without-notebooks]`, then mkdocs, then `… check site/html`."""

import argparse
import sys
from pathlib import Path


def main() -> int:
    """0, or 1 where the finished site has a fault."""
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="write the pages and mkdocs.yml")
    write.add_argument("--output", type=Path, default=Path("site"))
    write.add_argument("--without-notebooks", action="store_true", help="leave out what takes minutes")
    check = commands.add_parser("check", help="look for dead links in the finished site")
    check.add_argument("site", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "write":
        from . import pages

        print(f"{len(pages.write(arguments.output, not arguments.without_notebooks))} pages")
        return 0
    from .check import faults

    found = faults(arguments.site)
    print("\n".join(found) or f"{arguments.site}: no dead link, nothing loaded from elsewhere", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
