"""HTML tables for notebooks."""

import html
from collections.abc import Iterable, Sequence
from typing import Any

_CELL = 'style="text-align: left; vertical-align: top"'


def table(head: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """Returns an HTML table; cells are escaped, so they may hold any text."""
    lines = [f"<caption style='text-align: left'><b>{html.escape(caption)}</b></caption>" if caption else ""]
    lines.append(_row(head, "th"))
    lines += [_row(row, "td") for row in rows]
    return f"<table>{''.join(lines)}</table>"


def _row(cells: Sequence[object], tag: str) -> str:
    """Returns a table's row. `tag`: "th" for cells of the head, "td" for others."""
    return "<tr>" + "".join(f"<{tag} {_CELL}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"


class Table(list[dict[str, Any]]):
    """A list of dicts with the same keys. A notebook shows the columns name, equation and source, as far as they exist,
    or else all columns of text."""

    def _repr_html_(self) -> str:
        shown = [key for key in self[0] if isinstance(self[0][key], str)] if self else []
        shown = [key for key in ("name", "equation", "source") if key in shown] or shown
        return table(shown, ([row[key] for key in shown] for row in self))


class Tables(dict[str, list[dict[str, Any]]]):
    """Named tables, which a notebook shows one below the other."""

    def _repr_html_(self) -> str:
        return "".join(f"<h4>{html.escape(name)}</h4>{Table(rows)._repr_html_()}" for name, rows in self.items())
