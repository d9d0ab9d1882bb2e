"""Makes the tables of docs/results-speed.md and docs/results-checks.md from the CSV files in benches/results."""

import re
from collections.abc import Callable
from statistics import median_low

from .spec import ROOT
from .tables import results, table

__all__ = ["PAGES", "filled"]
PAGES = [ROOT / "docs" / name for name in ("results-speed.md", "results-checks.md")]


def filled(page: str) -> str:
    """Returns the page with a new table between each pair of marks `<!-- MAKER NAME -->` and `<!-- end of NAME -->`.

    Raises:
        ValueError: a table has no rows.
    """

    def fill(mark: re.Match) -> str:
        maker, name = mark[1], mark[2]
        text = _MAKERS[maker](name)
        if not text:
            raise ValueError(f"no row of benches/results is for the table {maker} {name}")
        return f"<!-- {maker} {name} -->\n\n{text}\n<!-- end of {name} -->"

    return re.sub(rf"<!-- ({'|'.join(_MAKERS)}) (\S+) -->\n(?:.*?\n)??<!-- end of \2 -->", fill, page, flags=re.DOTALL)


def _ledger(name: str) -> str:
    """Returns a table of the rows of ledger.csv that belong to the table `name`."""
    rows = [row for row in results("ledger") if row["table"] == name]
    where = [", ".join(filter(None, (row["machine"], row["date"], row["commit"]))) for row in rows]
    cells = [(row["what"], row["bar"], row["value"], place) for row, place in zip(rows, where, strict=True)]
    return table(("what", "bar", "measured", "machine, day, commit"), cells)


def _norms(name: str) -> str:
    """Returns a table of the ratios that benches/norms.py measured, with a row for each memory, type and operator, and
    a column for each size."""
    sizes: dict[tuple[str, ...], dict[str, str]] = {}
    for row in results(name):
        what = f"{row['what']}, {'forward' if row['pass'] == 'forward' else 'both ways'}"
        sizes.setdefault((row["memory"], row["dtype"], what), {})[row["megabytes"]] = f"{float(row['ratio']):.2f}"
    columns = sorted({size for by_size in sizes.values() for size in by_size}, key=int)
    cells = [(*key, *(by_size.get(size, "") for size in columns)) for key, by_size in sizes.items()]
    return table(("memory", "type", "what", *(f"{size} MB" for size in columns)), cells)


def _binaries(name: str) -> str:
    """Returns a table of the kernels that tests/cuda/binaries.py has measured: their registers, and how many warps fit
    on a multiprocessor."""
    rows, architectures = results(name), ("80", "90", "100", "120")
    cells = []
    for kernel in sorted({row["kernel"] for row in rows}):
        of_kernel = [row for row in rows if row["kernel"] == kernel]
        warps = [[int(row["warps"]) for row in of_kernel if row["architecture"] == a] for a in architectures]
        # the field is empty for architectures that cuobjdump does not know
        size = max((row["parameters"] for row in of_kernel), key=lambda number: int(number or 0))
        registers = _range([int(row["registers"]) for row in of_kernel])
        cells.append((kernel, size, registers, *(f"{_range(numbers)}, {median_low(numbers)}" for numbers in warps)))
    header = ("kernel", "bytes of its struct", "registers", *(f"warps on sm_{a}: range, median" for a in architectures))
    return table(header, cells)


def _range(numbers: list[int]) -> str:
    """Returns the least and the largest number as text."""
    return f"{min(numbers)} to {max(numbers)}"


_MAKERS: dict[str, Callable[[str], str]] = {
    "ledger": _ledger,
    "norms": _norms,
    "binaries": _binaries,
}
"""The functions that make the tables, by the MAKER of a mark. Each gets the mark's NAME."""
