"""The parts of a reproduction. An entry is made of these, and holds nothing that runs."""

from typing import Any, NamedTuple

Options = dict[str, Any]
SCALES = {
    "check": "seconds, on the demo's text: shows that the command works, and nothing about the paper",
    "here": "hours on two cores",
    "paper": "the authors' own budget; prints what it needs before it asks for data",
}


class Row(NamedTuple):
    """One training run, and its line in the table."""

    key: dict[str, str]
    """The columns that name it."""
    options: Options
    """Of model and training, and of the data beside what the corpus says."""
    corpus: str
    """A name of `corpora.CORPORA`."""
    paper: dict[str, str] = {}  # noqa: RUF012
    """What the paper has in this line, by column."""
    search: Options = {"beam": 5, "rule": "fairseq"}  # noqa: RUF012
    """Of `SearchConfig`."""

    @property
    def seed(self) -> int:
        return int(self.options.get("seed", 1))

    def seeded(self, number: int) -> "Row":
        """The row with its `number`-th seed, from 0."""
        return self if number == 0 else self._replace(options={**self.options, "seed": self.seed + number})


class Shown(NamedTuple):
    """What is measured, and how table and picture show it."""

    measures: tuple[str, ...] = ()
    """Names of `measures.MEASURES`; each run's losses and verdict are measured anyway."""
    columns: tuple[str, ...] = ()
    """The measured columns of the table, names of `tables.COLUMNS`."""
    compared: str = ""
    """The baseline of each row's paired bootstrap: "before", the row before it, "first", the first row, or the row with
    this value of the first key and the same ones of all others."""
    across: str = ""
    """A key whose values become columns, each filled with `cell`."""
    cell: str = ""
    """A format of measured columns."""
    mean: bool = False
    """Beside the values that run across stand the mean of `value` over them, and its distance from the first line's."""
    significance: float = 0.0
    """Cells whose p is below it have a star, as the papers mark them."""
    picture: str = ""
    """A name of `pictures.PICTURES`."""
    value: str = ""
    """The column that a picture of dots shows."""


class Scale(NamedTuple):
    """The runs of a reproduction at one size."""

    about: str
    """The recipe in words, a part of a sentence."""
    rows: tuple[Row, ...]
    shown: Shown
    checkpoint: str = "average"
    """The one that translates: average (of the evaluations kept) or best."""
    scored: str = "test"
    """The part of the corpus that is translated: test or valid."""
    seeds: int = 1
    """How many each row is trained with, where nothing else is asked for."""


class Reproduction(NamedTuple):
    """A comparison of a paper, or of the project, that one command makes."""

    name: str
    title: str
    source: str
    """Paper and table; "ours" where there is none."""
    claim: str
    """What the paper says, or the question."""
    scales: dict[str, Scale]
    """By names of `SCALES`."""

    @property
    def stance(self) -> str:
        """The claim, or question, and a word that says which."""
        return f"{'question' if self.source.startswith('ours') else 'claim'}: {self.claim}"
