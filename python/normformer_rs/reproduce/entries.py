"""Makes the reproductions from entries.toml. The comments at the beginning of that file describe its format."""

import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import unknown
from ..errors import InputError
from ..loop.presets import PRESETS
from .declared import SCALES, Options, Reproduction, Row, Scale, Shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Table = Mapping[str, Any]
_FILE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("entries.toml").read_text(encoding="utf-8"))
WORDS, _BASES, _VALUES, _SHOWN, _SCALES = (_FILE.pop(name) for name in ("words", "bases", "values", "shown", "scales"))
# The fields that a table of figures, of an entry and of a scale may have. Other names in `figures` are its rows.
_OF_FIGURES = ("heading", "columns", "only")
_OF_ENTRIES = ("title", "source", "claim", "like")
_OF_SCALES = (*Scale._fields, "outer", "options", "where", "corpus", "search", "figures")


def _merged(first: Table, *others: Table) -> dict[str, Any]:
    """Returns one table with the names of all tables. If several tables have a name, the last value counts; values that
    are tables are merged in the same way. A `shown` with a `base` is not merged: it replaces the earlier one."""
    merged = dict(first)
    for name, value in itertools.chain.from_iterable(table.items() for table in others):
        are_tables = isinstance(value, dict) and isinstance(merged.get(name), dict)
        replaces = name == "shown" and "base" in value
        merged[name] = _merged(merged[name], value) if are_tables and not replaces else value
    return merged


def _like(table: Table, tables: Table) -> dict[str, Any]:
    """Returns the table merged into the one that its field `like` names, which may have a `like` itself."""
    if "like" not in table:
        return dict(table)
    return _merged(_like(tables[table["like"]], tables), table)


def _added(before: Options, *tables: Table) -> Options:
    """Returns the options `before`, overridden by those of each table in turn. A table's own options override those of
    the bases that it names. The value "" removes an option."""
    options = dict(before)
    for table in tables:
        for name in table.get("base", ()):
            options = _added(options, _BASES[name] if name in _BASES else PRESETS[name].options)
        options |= {name: value for name, value in table.items() if name not in ("base", "layers")}
        if "layers" in table:
            options |= {"encoder_layers": table["layers"], "decoder_layers": table["layers"]}
    return {name: value for name, value in options.items() if value != ""}


def base(name: str) -> Options:
    """Returns the options of a table in [bases]."""
    return _added({}, _BASES[name])


def _values(column: str, values: Any, figures: Table) -> list[tuple[str, Table]]:
    """Returns the values of a column of keys, each with the options that it stands for. `values` is a list of values, a
    table of options by value, "figures" for all rows of `figures`, or "all" for all of [values.COLUMN]."""
    options_of = _VALUES.get(column, {})
    if isinstance(values, dict):
        return [(name, own if isinstance(own, dict) else {column: own}) for name, own in values.items()]
    if values == "figures":
        values = [name for name in figures if name not in _OF_FIGURES]
    elif values == "all":
        values = options_of
    # A value without options in [values.COLUMN] is the value of the option that has the column's name.
    return [(str(value), options_of.get(str(value), {column: value})) for value in values]


def _published(figures: Table, key: dict[str, str]) -> dict[str, str]:
    """Returns the paper's figures for the run with this key, by the heading of their column."""
    if not figures:
        return {}
    row: Any = figures
    # The rows are nested tables, by the values of the first one or two columns. A run without figures gets empty ones.
    for name in key.values():
        if isinstance(row, dict):
            row = row.get(name, [""] * len(figures["columns"]))
    only = figures.get("only", "").format_map(key)  # the one column that has a figure for this run; "" for all
    return {figures.get("heading", "{}").format(column): figure
            for column, figure in zip(figures["columns"], row) if only in ("", column)}  # fmt: skip


def _rows(scale: Table) -> tuple[Row, ...]:
    """Returns a row for each combination of the values of the columns that the scale's table `rows` lists. `where` has
    further options for rows with a certain value, and `figures` the paper's figures."""
    figures, where = scale.get("figures") or {}, scale.get("where", {})
    columns = {name: _values(name, values, figures) for name, values in scale["rows"].items() if values != ""}
    # The values of the column `outer` vary slowest, wherever the column stands in the table.
    outer_first = sorted(columns, key=lambda column: column != scale.get("outer"))
    text_options = {name: scale[name] for name in ("corpus", "search") if name in scale}
    shared = _added(text_options, scale.get("options", {}))
    rows = []
    for chosen in itertools.product(*(columns[column] for column in outer_first)):
        names = {column: name for column, (name, _) in zip(outer_first, chosen)}
        key = {column: names[column] for column in columns}
        more_options = (where[name] for name in key.values() if name in where)
        options = _added(shared, *(own for _, own in chosen), *more_options)
        # Row has fields for `search` and `corpus`, so these leave the options.
        search = {"search": options.pop("search")} if "search" in options else {}
        rows.append(Row(key, options, options.pop("corpus"), _published(figures, key), **search))
    return tuple(rows)


def _scale(table: Table) -> Scale:
    """Returns the scale that a table declares; the table has the fields of the entry, too. Errors: InputError for an
    unknown field."""
    for name in table:
        if name not in (*_OF_ENTRIES, *_OF_SCALES):
            raise InputError(f"entries.toml, {table['title']}: {unknown('field', name, (*SCALES, *_OF_SCALES))}")
    shown = table["shown"]
    while "base" in shown:  # a base may have a base itself
        shown = _merged(_SHOWN[shown["base"]], {name: value for name, value in shown.items() if name != "base"})
    shown = {name: tuple(value) if name in ("measures", "columns") else value for name, value in shown.items()}
    optional_fields = {name: table[name] for name in ("checkpoint", "scored", "seeds") if name in table}
    return Scale(table["about"].format_map(WORDS), _rows(table), Shown(**shown), **optional_fields)


def made(name: str, entry: Table) -> Reproduction:
    """Returns the reproduction that a table of entries.toml declares. Errors: InputError for an unknown field."""
    entry = _like(entry, _FILE)
    shared = {field: value for field, value in entry.items() if field not in SCALES}
    # A scale has the fields of the entry. They are overridden by the fields of this scale for all entries, and then by
    # the entry's own table of the scale. Only scale check needs no such table.
    scales = {
        scale: _scale(_merged(shared, _SCALES.get(scale, {}), _like(entry.get(scale, {}), _SCALES)))
        for scale in SCALES
        if scale == "check" or entry.get(scale)
    }
    return Reproduction(name, entry["title"], entry["source"], entry["claim"], scales)


ENTRIES = tuple(made(name, entry) for name, entry in _FILE.items())
