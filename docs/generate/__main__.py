"""Commands that make and check the documentation's pages.

`python -m docs.generate write [--output site]` comes first, then zensical, then `… check site/html`.
"""

import argparse
import sys
from pathlib import Path


def main() -> int:
    """Runs a command. Returns 0, or 1 if the finished site has a fault."""
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="write the pages and mkdocs.yml")
    write.add_argument("--output", type=Path, default=Path("site"))
    check = commands.add_parser("check", help="look for dead links in the finished site")
    check.add_argument("site", type=Path)
    commands.add_parser("results", help="write the tables on the pages of results, from benches/results")
    commands.add_parser("files", help="print every file with its first sentence")
    executed = commands.add_parser("notebooks", help="execute notebooks/NAME.py and write it with its outputs")
    executed.add_argument("names", metavar="NAME", nargs="*", help="Default: all.")
    executed.add_argument("--texts", action="store_true", help="execute nothing: only copy changed texts")
    arguments = parser.parse_args()
    if arguments.command == "files":
        from . import files

        print(files.page())
        return 0
    if arguments.command == "results":
        from . import measured

        for page in measured.PAGES:
            page.write_text(measured.filled(page.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    if arguments.command == "notebooks":
        from . import notebooks

        if arguments.texts:
            notebooks.write_texts()
        else:
            notebooks.write(arguments.names)
        return 0
    if arguments.command == "write":
        from . import pages

        print(f"{len(pages.write(arguments.output))} pages")
        return 0
    from .check import faults

    lines = faults(arguments.site)
    print("\n".join(lines) or f"{arguments.site}: no dead link, nothing loaded from elsewhere", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
