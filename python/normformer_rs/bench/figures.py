"""Collects the figures of all calls that share an output folder, in gpu.csv, and draws gpu.png from them."""

import csv
import datetime
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .. import _core
from ..pictures.curves import literal

Row = dict[str, str]
"""A row of gpu.csv: the name of each column → its text."""


class Figures:
    """The rows of gpu.csv, which is written after each new figure. A figure that is measured again, in this call or a
    later one, replaces the earlier one."""

    def __init__(self, folder: Path, device: str) -> None:
        """Makes the folder. Ends the program if gpu.csv there holds figures of another device."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / "gpu.csv"
        self.on_cuda = device.startswith("cuda")
        name = torch.cuda.get_device_name(device) if self.on_cuda else "cpu"
        date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        self.common = {"device": name, "date": date, "torch": torch.__version__, "version": _core.__version__}
        if others := {row["device"] for row in self.rows()} - {name}:
            raise SystemExit(f"{self.path} holds figures of {', '.join(others)}, this is {name}: name another --output")

    def rows(self, section: str | None = None) -> list[Row]:
        """Returns the rows of the section, or all rows if it is None."""
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            return [row for row in csv.DictReader(file) if section in (None, row["section"])]

    def add(
        self, section: str, what: str, value: float | str, unit: str, bar: float | None = None, most: bool = False
    ) -> None:
        """Adds the figure `what` and prints it. `value` is a number, or a text in its place. `bar` is the value that it
        should reach on a GPU, None for no demand; with `most` it is the value that it should not exceed."""
        bar = bar if self.on_cuda else None
        shown = value if isinstance(value, str) else f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
        met = ""
        if bar is not None and not isinstance(value, str):
            met = "yes" if (value <= bar if most else value >= bar) else "no"
        shown_bar = "" if bar is None else f"{bar:g}"
        row = {"section": section, "what": what, "value": shown, "unit": unit, "bar": shown_bar, "met": met}
        row |= self.common
        # The new row is the last one, so it replaces an earlier row of the same section and figure.
        self._write({(row["section"], row["what"]): row for row in [*self.rows(), row]})
        print(line(row), flush=True)

    @contextmanager
    def attempt(self, section: str, what: str) -> Iterator[None]:
        """Catches any error inside the block and adds the figure as "unmeasured", with the error as the reason."""
        try:
            yield
        except Exception as error:  # any error, because it is not known what a user's machine lacks
            traceback.print_exc()
            reason = " ".join(str(error).split())[:200]
            self.add(section, what, f"unmeasured: {type(error).__name__}: {reason}", "")

    def forget_unmeasured(self, section: str) -> None:
        """Removes the section's rows that read "unmeasured", before the section is measured again."""
        kept = [row for row in self.rows() if row["section"] != section or not row["value"].startswith("unmeasured")]
        self._write({(row["section"], row["what"]): row for row in kept})

    def _write(self, rows: dict[tuple[str, str], Row]) -> None:
        """Replaces gpu.csv by these rows: (section, what) → the row."""
        names = ["section", "what", "value", "unit", "bar", "met", *self.common]
        aside = self.path.with_suffix(".part")  # gpu.csv stays whole if a kill interrupts the writing
        with aside.open("w", newline="") as file:
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows.values())
        aside.replace(self.path)

    def draw(self) -> None:
        """Draws gpu.png: a bar for each figure that is a share of the copy rate. Errors: ImportError without
        matplotlib."""
        from matplotlib.figure import Figure

        # barh draws from the bottom up, so the last row comes first.
        shares = [row for row in reversed(self.rows()) if row["unit"] == "of the copy"]
        if not shares:
            return
        figure = Figure(figsize=(8, 0.3 * len(shares) + 1), dpi=150, layout="constrained")
        axis = figure.subplots()
        axis.barh([row["what"] for row in shares], [float(row["value"]) for row in shares], color="#4878a8")
        axis.margins(y=0.01)
        axis.axvline(1.0, color="#555555", linewidth=0.8)
        axis.set(xlabel="share of the copy rate", title=f"{shares[0]['device']}, {shares[0]['date']}")
        literal(figure).savefig(self.folder / "gpu.png")


def line(row: Row) -> str:
    """Formats a row for a terminal."""
    verdict = f"  (bar {row['bar']}: {row['met']})" if row["met"] else ""
    return f"{row['section']:10} {row['what']:48} {row['value']:>10} {row['unit']}{verdict}"
