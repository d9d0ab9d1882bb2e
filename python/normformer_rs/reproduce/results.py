"""The measured rows of a reproduction, kept in a CSV file as they come, and the series of its picture beside it."""

import csv
import io
import itertools
from collections.abc import Iterable
from pathlib import Path

from .. import text
from .declared import Options, Reproduction, Row

Series = dict[tuple[str, ...], list[float]]
"""Numbers of the first updates by the row's key."""


class Results:
    """`FOLDER/NAME-SCALE.csv`, its series and its picture. A row that is there is not measured again."""

    def __init__(self, entry: Reproduction, scale: str, folder: Path) -> None:
        self.stem, self.folder = f"{entry.name}-{scale}", folder
        self.scale = entry.scales[scale]
        self.wanted = self.scale.rows
        table = self.path(".csv")
        self.rows: list[dict[str, str]] = []
        if table.exists():
            self.rows = list(csv.DictReader(text.read_lines(str(table))))
        width = len(self.wanted[0].key)
        self.series = {path.stem.removeprefix(f"{self.stem}-"): read_series(path, width)
                       for path in sorted(folder.glob(f"{self.stem}-*.csv"))}  # fmt: skip

    def path(self, ending: str) -> Path:
        return self.folder / f"{self.stem}{ending}"

    def find(self, row: Row) -> dict[str, str] | None:
        """What was measured of the row; None: nothing yet."""
        return next((found for found in self.rows if all(found.get(k) == v for k, v in row.key.items())), None)

    @property
    def measured(self) -> list[tuple[Row, dict[str, str]]]:
        """The rows that were measured, in the entry's order."""
        return [(row, found) for row in self.wanted if (found := self.find(row)) is not None]

    def add(self, row: Row, columns: Options, series: dict[str, list[float]]) -> None:
        """Keeps a row, in files that are whole after a crash."""
        self.rows.append({**row.key, **{name: str(value) for name, value in columns.items()}})
        self.folder.mkdir(parents=True, exist_ok=True)
        # the series first: a row that is there is whole
        for name, numbers in series.items():
            self.series.setdefault(name, {})[tuple(row.key.values())] = numbers
            _write(self.path(f"-{name}.csv"), ([*key, *values] for key, values in self.series[name].items()))
        columns_of_all = list(dict.fromkeys(itertools.chain.from_iterable(self.rows)))
        _write(self.path(".csv"), [columns_of_all, *([r.get(name, "") for name in columns_of_all] for r in self.rows)])


def read_series(path: Path, width: int = 2) -> Series:
    """The numbers of each line by the `width` columns before them."""
    lines = csv.reader(text.read_lines(str(path)))
    return {tuple(line[:width]): [float(number) for number in line[width:]] for line in lines}


def _write(path: Path, lines: Iterable[Iterable[object]]) -> None:
    made = io.StringIO(newline="")
    csv.writer(made, lineterminator="\n").writerows(lines)
    text.write_lines(str(path), made.getvalue().splitlines())
