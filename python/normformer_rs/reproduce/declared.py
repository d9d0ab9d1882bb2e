"""The parts of a reproduction. An entry consists of these, and holds no code that runs."""

import hashlib
import json
from typing import Any, NamedTuple

Options = dict[str, Any]
SCALES = {
    "check": "seconds, on the demo's text: shows that the command works, and nothing about the paper",
    "here": "hours on two cores",
    "paper": "the authors' own budget; prints what it needs before it asks for data",
}


def digest(value: Any) -> str:
    """Returns eight letters that tell a value of JSON from others; a user's own norm or scheme counts by its class and
    its fields."""
    written = json.dumps(value, sort_keys=True, ensure_ascii=False, default=_object)
    return hashlib.sha256(written.encode()).hexdigest()[:8]


def _object(value: Any) -> Any:
    kind = value if isinstance(value, type) else type(value)
    return [kind.__module__, kind.__qualname__, {} if isinstance(value, type) else getattr(value, "__dict__", {})]


class Row(NamedTuple):
    """One training run, and its line in the table."""

    key: dict[str, str]
    """The columns that name the row."""
    options: Options
    """The options of model and training, and of the data if they differ from the corpus'."""
    corpus: str
    """A name of `corpora.CORPORA`."""
    paper: dict[str, str] = {}  # noqa: RUF012
    """The paper's figures for this row, by column."""
    search: Options = {"beam": 5, "rule": "fairseq"}  # noqa: RUF012
    """The options of `SearchConfig`."""
    version: str = ""
    """The package's version, for a row that must be measured anew with another; "" if it need not."""

    @property
    def seed(self) -> int:
        return int(self.options.get("seed", 1))

    @property
    def recipe(self) -> str:
        """A digest of the options, the corpus, the search and, if it counts, the version."""
        return digest([self.corpus, self.options, self.search, *([self.version] if self.version else [])])

    def seeded(self, number: int) -> "Row":
        """Returns the row with its `number`-th seed, from 0."""
        return self if number == 0 else self._replace(options={**self.options, "seed": self.seed + number})


class Shown(NamedTuple):
    """The measurements of an entry, and the way in which table and picture show them."""

    measures: tuple[str, ...] = ()
    """Names of `measures.MEASURES`; each run's losses and verdict are always measured."""
    columns: tuple[str, ...] = ()
    """The measured columns of the table, which are names of `tables.COLUMNS`."""
    compared: str = ""
    """The baseline of each row's paired bootstrap: "before", the row before it, "first", the first row, or the row with
    this value of the first key and the same ones of all others."""
    across: str = ""
    """A key whose values become columns; each cell is formatted by `cell`."""
    cell: str = ""
    """A format string with the names of measured columns."""
    mean: bool = False
    """True to add the mean of `value` over the values that run across, and its distance from the first line's mean."""
    significance: float = 0.0
    """The p below which cells have a star, as the papers mark them."""
    picture: str = ""
    """The name of a picture in `pictures.PICTURES`."""
    value: str = ""
    """The column that a picture of dots shows."""


class Scale(NamedTuple):
    """The runs of a reproduction at one size."""

    about: str
    """The recipe in words, a part of a sentence."""
    rows: tuple[Row, ...]
    shown: Shown
    checkpoint: str = "average"
    """The checkpoint that translates: average (of the evaluations kept) or best."""
    scored: str = "test"
    """The part of the corpus that is translated: test or valid."""
    seeds: int = 1
    """The number of seeds with which each row is trained by default."""


class Reproduction(NamedTuple):
    """A comparison from a paper, or of the project, that one command makes."""

    name: str
    title: str
    source: str
    """The paper and its table; "ours" if there is none."""
    claim: str
    """The paper's statement, or the question."""
    scales: dict[str, Scale]
    """The scales by names of `SCALES`."""

    @property
    def stance(self) -> str:
        """The claim or question, after the word that says which it is."""
        return f"{'question' if self.source.startswith('ours') else 'claim'}: {self.claim}"
