"""The measured rows of a reproduction, kept in a CSV file as they come, and its picture's series in files beside it."""

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
"""The column of `Row.recipe`; rows of before 2026-11-28 have none, and are taken to be of the entry's options."""
Found = dict[str, str | Spread]
"""The measurements of a row: columns by name, with the spread of several seeds."""


class Results:
    """`FOLDER/NAME-SCALE.csv`, its series and its picture. A row that exists is not measured again. Several
    processes may add rows."""

    def __init__(
        self, entry: Reproduction, scale: str, folder: Path, seeds: int | None = None, *, keeps: bool = True
    ) -> None:
        self.stem, self.folder = f"{entry.name}-{scale}", folder
        self.keeps = keeps
        """True to keep translations and losses beside the table."""
        self.scale = entry.scales[scale]
        self.seeds = self.scale.seeds if seeds is None else seeds
        self.read()

    def read(self) -> None:
        """Reads the rows that other processes have added, too."""
        table = self.path(".csv")
        self.rows: list[dict[str, str]] = []
        if table.exists():
            self.rows = list(csv.DictReader(text.read_lines(str(table), records=True)))
        width = len(self.scale.rows[0].key)
        self.series = {path.stem.removeprefix(f"{self.stem}-"): read_series(path, width)
                       for path in sorted(self.folder.glob(f"{self.stem}-*.csv"))}  # fmt: skip

    def path(self, ending: str) -> Path:
        return self.folder / f"{self.stem}{ending}"

    @property
    def kept(self) -> Path:
        """The folder of what is kept of the runs."""
        return self.path("-kept")

    @property
    def wanted(self) -> list[Row]:
        """All rows, with each of their seeds: first all rows with their first seed."""
        return [row.seeded(number) for number in range(self.seeds) for row in self.scale.rows]

    def find(self, row: Row) -> dict[str, str] | None:
        """Returns the measurements of the row with its seed; None if there are none yet, or only of other options."""
        found = (one for one in self.rows if _is_of(one, row))
        return next((one for one in found if one.get(RECIPE, "") in ("", row.recipe)), None)

    @property
    def stale(self) -> int:
        """How many rows were measured with other options, text or search than the entry's now."""
        return sum(map(self.is_stale, self.wanted))

    def is_stale(self, row: Row) -> bool:
        """True if the row was measured only with other options, another text, search or version."""
        return self.find(row) is None and any(_is_of(one, row) for one in self.rows)

    def each_seed(self, row: Row) -> dict[int, dict[str, str]]:
        """Returns the measurements of the row, by seed."""
        found = {row.seeded(number).seed: self.find(row.seeded(number)) for number in range(self.seeds)}
        return {seed: columns for seed, columns in found.items() if columns is not None}

    @property
    def measured(self) -> list[tuple[Row, Found]]:
        """The rows that have been measured, in the entry's order."""
        made: list[tuple[Row, Found]] = []
        for row in self.scale.rows:
            if seeds := [*self.each_seed(row).values()]:
                names = dict.fromkeys(itertools.chain.from_iterable(seeds))
                made.append((row, {name: merged([found.get(name) or "" for found in seeds]) for name in names}))
        return made

    def add(
        self, row: Row, columns: Options, series: dict[str, list[float]], kept: "keeping.Kept | None" = None
    ) -> None:
        """Keeps a row, in files that are whole after a crash. Series are kept for a row's first seed only.

        Args:
            kept: the data to recompute the row's figures; that of a row which this one replaces is removed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with alone(self.folder):
            self.read()
            # Everything else is written before the table, so that a row in it is complete.
            if kept is not None:
                columns = {**columns, keeping.KEPT: keeping.write(self.kept, kept)}
            made = {**row.key, "seed": str(row.seed), RECIPE: row.recipe, **columns}
            # A row of a study replaces only itself: another study in this folder may name its rows by more columns.
            self.rows = [one for one in self.rows
                         if not _is_of(one, row) or (row.version and one.get(RECIPE) != row.recipe)]  # fmt: skip
            self.rows.append({name: str(value) for name, value in made.items()})
            is_first = any((one.key, one.seed) == (row.key, row.seed) for one in self.scale.rows)
            for name, numbers in series.items() if is_first else ():
                self.series.setdefault(name, {})[tuple(row.key.values())] = numbers
                _write(self.path(f"-{name}.csv"), ([*key, *values] for key, values in self.series[name].items()))
            names = list(dict.fromkeys(itertools.chain.from_iterable(self.rows)))
            _write(self.path(".csv"), [names, *([r.get(name, "") for name in names] for r in self.rows)])
            keeping.keep_only(self.kept, self._digests())

    def _digests(self) -> set[str]:
        return {one[keeping.KEPT] for one in self.rows if one.get(keeping.KEPT)}


def _is_of(found: dict[str, str], row: Row) -> bool:
    """True if the measurements have the row's key and seed."""
    key = {**row.key, "seed": str(row.seed)}
    return all((found.get(name) or ("1" if name == "seed" else None)) == value for name, value in key.items())


def made_by() -> dict[str, str]:
    """Returns the columns that say when and by what a row is measured: date, package, commit, torch, processor."""
    return {"date": time.strftime("%Y-%m-%d"), **_installed()}


@functools.cache
def _installed() -> dict[str, str]:
    import torch

    folder = Path(__file__).parent
    asked = ["git", "-C", str(folder), "log", "-1", "--format=%h", "--", str(folder)]
    try:
        commit = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # not installed
        commit = ""
    return {
        "version": __version__,
        "commit": commit,
        "torch": torch.__version__,
        "processor": f"{processor()}, {torch.get_num_threads()} threads",
    }


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Waits until no other process is inside this block for the same folder."""
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
    """Reads the numbers of each line by the `width` columns before them."""
    lines = csv.reader(text.read_lines(str(path), records=True))
    try:
        return {tuple(line[:width]): [float(number) for number in line[width:]] for line in lines}
    except ValueError as error:
        raise InputError(f"{path}: expected numbers after {width} names in each line; {error}: move it away") from error


def _write(path: Path, lines: Iterable[Iterable[object]]) -> None:
    made = io.StringIO(newline="")
    csv.writer(made, lineterminator="\n").writerows(lines)
    text.write_lines(str(path), made.getvalue().splitlines())
