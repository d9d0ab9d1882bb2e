"""Reads fields of records as text, from JSON, CSV, Parquet and Arrow files and from data sets of the Hugging Face
hub."""

import contextlib
import csv
import gzip
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from .. import _optional
from ..config import closest
from ..errors import InputError
from ..text import RECORDS

_BREAKS = re.compile(r"[\r\n]+")
_TABLES: dict[str, dict[str, Any]] = {".csv": {}, ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE}}
"""The options with which the csv module reads each kind of table, by the file's ending."""
_JSON = (".jsonl", ".ndjson", ".json")


def read(
    source: str,
    fields: Sequence[str],
    *,
    split: str = "train",
    config: str | None = None,
    streaming: bool = False,
    limit: int | None = None,
) -> Iterator[tuple[str, ...]]:
    """Yields the named fields of each record, in the records' order.

    Line breaks within a field become spaces. A dot leads into a nested record: `translation.de`.

    Args:
        source: a file (.jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow, plain or gzip), or the name of a data set
            of the Hugging Face hub, such as `wmt/wmt14`.
        split: the part of a hub's data set.
        config: the configuration of a hub's data set, where it has several, such as `de-en`.
        streaming: read a hub's data set while it is downloaded, instead of into the cache of `datasets` first.
        limit: the maximum number of records.

    Errors: ImportError if `datasets` is missing, which .parquet, .arrow and the hub need; InputError for a file or data
    set that is not there or cannot be read, for a field that a record lacks, and for one that is no text.
    """
    end = Path(source.removesuffix(".gz")).suffix.lower()
    with contextlib.ExitStack() as open_files:
        with _as_input_errors(source):
            if end in RECORDS and not Path(source).is_file():
                raise InputError(f"{source}: no such file; expected a file of records: check the path")
            rows: Iterator[Any]
            if end in _TABLES or end in _JSON:
                # The file is read here, not by `datasets`, which would read 2019-01-01 as a date, NA as a missing value
                # and 007 as the number 7.
                opened = gzip.open if source.endswith(".gz") else open
                file = open_files.enter_context(opened(source, "rt", encoding="utf-8-sig", newline=""))
                rows = _objects(file) if end in _JSON else csv.DictReader(file, strict=True, **_TABLES[end])
            elif end in RECORDS:
                load = _optional.require("datasets", f"reading {end} files").load_dataset
                # The reader has the ending's name without its dot; it puts the rows of a file in the split "train".
                rows = iter(load(end[1:], data_files=source, split="train", streaming=True))
            elif Path(source).exists():
                raise InputError(f"{source}: expected a file that ends in {', '.join(RECORDS)}, or a data set's name")
            else:
                load = _optional.require("datasets", "reading a data set of the hub").load_dataset
                rows = iter(load(source, config, split=split, streaming=streaming))
        yield from _fields(rows, fields, source, limit)


def _objects(file: TextIO) -> Iterator[Any]:
    """Yields the values in a JSON file, which holds either one list or one value per line."""
    # The first character that is no white space tells the two forms apart.
    first = file.read(1)
    while first.isspace():
        first = file.read(1)
    file.seek(0)
    if first == "[":
        yield from json.load(file)
        return
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise InputError(f"{file.name}: line {number} is not valid JSON ({error})") from error


_END = object()
"""Marks the end of the records. None cannot mark it: a JSON null is read as None, and must be refused as a record."""


def _fields(rows: Iterator[Any], fields: Sequence[str], source: str, limit: int | None) -> Iterator[tuple[str, ...]]:
    """Yields the named fields of the records in `rows`, up to `limit` records; None for all. `source`: the file or data
    set, for messages. Errors: InputError for a record that is no object, and for no records."""
    number = 0
    while limit is None or number < limit:
        with _as_input_errors(source):
            record = next(rows, _END)
        if record is _END:
            break
        number += 1
        if not isinstance(record, dict):
            raise InputError(f"{source}: record {number} is {record!r:.80}; expected an object with fields")
        yield tuple(_BREAKS.sub(" ", _field(record, name, f"{source}: record {number}")) for name in fields)
    if number == 0:
        raise InputError(f"{source}: no records")


def _field(record: dict[str, Any], name: str, place: str) -> str:
    """Returns the text of the named field. A dot in the name leads into a nested record, unless the record itself has
    a field of the whole name. `place` names the record in errors."""
    value: Any = record
    for part in [name] if name in record else name.split("."):
        if not isinstance(value, dict) or part not in value:
            known = _names(record)
            raise InputError(f'{place}: no field "{name}"{closest(name, known)}; expected one of {", ".join(known)}')
        value = value[part]
    if not isinstance(value, str):
        raise InputError(f'{place}: field "{name}" is {value!r:.80}; expected text')
    return value


def _names(record: dict[str, Any], before: str = "") -> list[str]:
    """Returns the names of all fields, those of nested records with dots. `before` precedes each name."""
    names = []
    for key, value in record.items():
        names += _names(value, f"{before}{key}.") if isinstance(value, dict) else [f"{before}{key}"]
    return names


@contextlib.contextmanager
def _as_input_errors(source: str) -> Iterator[None]:
    """Turns an error inside the block into an InputError with a message of one line. Readers of files raise errors of
    many classes; the original error is the InputError's cause."""
    try:
        yield
    except (InputError, ImportError, MemoryError):
        raise
    except Exception as error:
        cause = error.__cause__ or error
        line = next(iter(str(cause).strip().splitlines()), "")
        raise InputError(f"{source}: {type(cause).__name__}: {line}") from error
