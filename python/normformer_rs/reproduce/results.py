"""Keeps the measured rows of a reproduction in a CSV file, as they come, and the series of its picture in files beside
it."""

import contextlib
import csv
import fcntl
import functools
import io
import itertools
import os
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .. import text
from ..commands.versions import processor
from ..config import __version__
from ..errors import InputError
from . import kept as keeping
from .declared import Options, Reproduction, Row
from .spread import Spread, merged

if TYPE_CHECKING:
    from ..pictures.drawing import Series

RECIPE = "recipe"
"""The column that holds `Row.recipe`. Rows from before 2026-11-28 have none; they are assumed to be measured with the
entry's options."""
Found = dict[str, str | Spread]
"""The measurements of a row, by column. With several seeds a number is a Spread."""


class Results:
    """The table `FOLDER/NAME-SCALE.csv` and the files of its series. A row in the table is not measured again. Several
    processes may add rows at the same time."""

    def __init__(
        self, entry: Reproduction, scale: str, folder: Path, seeds: int | None = None, *, keeps: bool = True
    ) -> None:
        """Reads the table of a scale of the entry in `folder`. `seeds`: the number of seeds; None for the scale's
        own."""
        self.stem, self.folder = f"{entry.name}-{scale}", folder
        self.keeps = keeps
        """True if translations and losses are kept in files beside the table."""
        self.scale = entry.scales[scale]
        self.seeds = self.scale.seeds if seeds is None else seeds
        self.read()

    def read(self) -> None:
        """Reads the table and the series from their files, including rows that other processes have added."""
        table = self.path(".csv")
        self.rows: list[dict[str, str]] = []
        if table.exists():
            self.rows = list(csv.DictReader(text.read_lines(str(table), records=True)))
        width = len(self.scale.rows[0].key)
        self.series = {path.stem.removeprefix(f"{self.stem}-"): read_series(path, width)
                       for path in sorted(self.folder.glob(f"{self.stem}-*.csv"))}  # fmt: skip

    def path(self, ending: str) -> Path:
        """Returns the path of one of the table's files: the folder, NAME-SCALE and `ending`."""
        return self.folder / f"{self.stem}{ending}"

    @property
    def kept(self) -> Path:
        """The folder of the files that are kept of the runs (see `kept.py`)."""
        return self.path("-kept")

    @property
    def wanted(self) -> list[Row]:
        """All rows with all seeds: first every row with its first seed, then every row with its second, and so on."""
        return [row.seeded(number) for number in range(self.seeds) for row in self.scale.rows]

    def find(self, row: Row) -> dict[str, str] | None:
        """Returns the measurements of the row with its seed. Returns None if it has not been measured yet, or only with
        other options."""
        lines = (line for line in self.rows if _is_of(line, row))
        return next((line for line in lines if line.get(RECIPE, "") in ("", row.recipe)), None)

    @property
    def stale(self) -> int:
        """The number of wanted rows for which `is_stale` is True."""
        return sum(map(self.is_stale, self.wanted))

    def is_stale(self, row: Row) -> bool:
        """Returns True if the row was measured, but only with other options, another text, another search or another
        version than it has now."""
        return self.find(row) is None and any(_is_of(line, row) for line in self.rows)

    def each_seed(self, row: Row) -> dict[int, dict[str, str]]:
        """Returns the measurements of the row by seed, for those seeds that have been measured."""
        by_seed = {row.seeded(number).seed: self.find(row.seeded(number)) for number in range(self.seeds)}
        return {seed: columns for seed, columns in by_seed.items() if columns is not None}

    @property
    def measured(self) -> list[tuple[Row, Found]]:
        """The rows that have been measured with at least one seed, in the entry's order, with their measurements merged
        over the seeds."""
        measured: list[tuple[Row, Found]] = []
        for row in self.scale.rows:
            if lines := [*self.each_seed(row).values()]:
                names = dict.fromkeys(itertools.chain.from_iterable(lines))
                measured.append((row, {name: merged([line.get(name) or "" for line in lines]) for name in names}))
        return measured

    def add(
        self, row: Row, columns: Options, series: dict[str, list[float]], kept: "keeping.Kept | None" = None
    ) -> None:
        """Writes a measured row to the table, and its series to their files. A crash damages neither. Series are
        written for a row's first seed only.

        Args:
            kept: the data from which the row's figures can be recomputed. They replace those of an earlier measurement
                of the row.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with alone(self.folder):
            self.read()
            # The table is written last. So a row in it has all its files, even after a crash.
            if kept is not None:
                columns = {**columns, keeping.KEPT: keeping.write(self.kept, kept)}
            new_line = {**row.key, "seed": str(row.seed), RECIPE: row.recipe, **columns}
            # A row of a study, which has a version, replaces only a row with the same recipe: rows of another study in
            # this folder may have the same key, and more columns that name them.
            self.rows = [line for line in self.rows
                         if not _is_of(line, row) or (row.version and line.get(RECIPE) != row.recipe)]  # fmt: skip
            self.rows.append({name: str(value) for name, value in new_line.items()})
            # `scale.rows` has each row with its first seed only.
            is_first_seed = any((other.key, other.seed) == (row.key, row.seed) for other in self.scale.rows)
            for name, numbers in series.items() if is_first_seed else ():
                self.series.setdefault(name, {})[tuple(row.key.values())] = numbers
                _write(self.path(f"-{name}.csv"), ([*key, *values] for key, values in self.series[name].items()))
            names = list(dict.fromkeys(itertools.chain.from_iterable(self.rows)))
            _write(self.path(".csv"), [names, *([line.get(name, "") for name in names] for line in self.rows)])
            keeping.keep_only(self.kept, self._digests())

    def _digests(self) -> set[str]:
        """Returns the digests of the files that rows of the table name."""
        return {line[keeping.KEPT] for line in self.rows if line.get(keeping.KEPT)}


def _is_of(line: dict[str, str], row: Row) -> bool:
    """Returns True if a line of the table has the row's key and seed. A line without a seed has seed 1."""
    key = {**row.key, "seed": str(row.seed)}
    return all((line.get(name) or ("1" if name == "seed" else None)) == value for name, value in key.items())


def made_by() -> dict[str, str]:
    """Returns the columns that say when and with which software and hardware a row is measured: date, the package's
    version and commit, torch, processor."""
    return {"date": time.strftime("%Y-%m-%d"), **_installed()}


@functools.cache
def _installed() -> dict[str, str]:
    """Returns those columns of `made_by` that cannot change while the process runs."""
    import torch

    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "log", "-1", "--format=%h", "--", str(folder)]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # for example if git is not installed
        commit = ""
    return {
        "version": __version__,
        "commit": commit,
        "torch": torch.__version__,
        "processor": f"{processor()}, {torch.get_num_threads()} threads",
    }


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Locks the folder during the block. It waits first if another process has locked the folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:  # NFS locks only files that are open for writing
            os.close(handle)
            handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def read_series(path: Path, width: int = 2) -> "Series":
    """Returns the series in a file: each line's numbers, by the tuple of the `width` names before them."""
    lines = csv.reader(text.read_lines(str(path), records=True))
    try:
        return {tuple(line[:width]): [float(number) for number in line[width:]] for line in lines}
    except ValueError as error:
        raise InputError(f"{path}: expected numbers after {width} names in each line; {error}: move it away") from error


def _write(path: Path, lines: Iterable[Iterable[object]]) -> None:
    """Writes the lines, each a list of cells, as a CSV file."""
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator="\n").writerows(lines)
    text.write_lines(str(path), buffer.getvalue().splitlines())
