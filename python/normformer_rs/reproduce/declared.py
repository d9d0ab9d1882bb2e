"""The classes of which a reproduction's declaration consists. They hold data only, no code that trains or measures."""

import hashlib
import inspect
import json
import tokenize
from typing import Any, NamedTuple

Options = dict[str, Any]
SCALES = {
    "check": "seconds, on the demo's text: shows that the command works, and nothing about the paper",
    "here": "hours on two cores",
    "paper": "the authors' own budget; prints what it needs before it asks for data",
}


def digest(value: Any) -> str:
    """Returns eight hexadecimal digits of the value's SHA-256, computed from its JSON. A user's own norm or scheme is
    written as the source of its classes and its fields."""
    written = json.dumps(value, sort_keys=True, ensure_ascii=False, default=_object)
    return hashlib.sha256(written.encode()).hexdigest()[:8]


def _object(value: Any) -> Any:
    """Returns lists and dictionaries that stand for an object which JSON cannot write: the name of its class, its
    fields, the source of its class and of that one's bases."""
    cls = value if isinstance(value, type) else type(value)
    fields = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    # Classes of this package and of torch are left out: their versions stand for them. The last base is `object`.
    classes = [base for base in cls.__mro__[:-1] if base.__module__.partition(".")[0] not in ("normformer_rs", "torch")]
    return [cls.__module__, cls.__qualname__, fields, *map(source, classes)]


def source(value: Any) -> str:
    """Returns the source of a function or class; its full name if there is none, as of one that was typed at a
    prompt."""
    try:
        return inspect.getsource(value)
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # a changed file may raise the last two
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return f"{getattr(value, '__module__', '')}.{name}"


class Row(NamedTuple):
    """One training run, which is one line of the table."""

    key: dict[str, str]
    """The columns of the table that name the row, such as its scheme and learning rate."""
    options: Options
    """The options of model and training, and those of the data that differ from the corpus' options."""
    corpus: str
    """A name of `corpora.CORPORA`."""
    paper: dict[str, str] = {}  # noqa: RUF012
    """The paper's figures for this row, by column."""
    search: Options = {"beam": 5, "rule": "fairseq"}  # noqa: RUF012
    """The options of `SearchConfig`."""
    version: str = ""
    """The package's version, if the row must be measured again after a new version; "" if it need not."""

    @property
    def seed(self) -> int:
        return int(self.options.get("seed", 1))

    @property
    def recipe(self) -> str:
        """A digest of corpus, options, search and, unless it is "", the version."""
        return digest([self.corpus, self.options, self.search, *([self.version] if self.version else [])])

    def seeded(self, number: int) -> "Row":
        """Returns the row with its `number`-th seed, from 0."""
        return self if number == 0 else self._replace(options={**self.options, "seed": self.seed + number})


class Shown(NamedTuple):
    """Names the measurements of an entry, and says how table and picture show them."""

    measures: tuple[str, ...] = ()
    """Names in `measures.MEASURES` of the measurements besides losses and verdict, which every run has."""
    columns: tuple[str, ...] = ()
    """The measured columns that the table shows, by their names in `tables.COLUMNS`."""
    compared: str = ""
    """The baseline with which each row is compared. "before" is the row before it, "first" is the first row. Another
    text is a value of the first key: the baseline has this value there, and otherwise the row's own keys."""
    across: str = ""
    """A key whose values become the columns of the table, with cells formatted by `cell`; "" if no key does."""
    cell: str = ""
    """A format string with the names of measured columns."""
    mean: bool = False
    """True to add two columns: the mean of `value` over the line's cells, and its difference from the first line's."""
    significance: float = 0.0
    """Cells whose p is below this number get a star, as in the papers."""
    picture: str = ""
    """The name of a picture in `pictures.PICTURES`."""
    value: str = ""
    """The column that a picture of dots shows."""


class Scale(NamedTuple):
    """The runs of a reproduction at one size."""

    about: str
    """The recipe in words, without a full stop."""
    rows: tuple[Row, ...]
    shown: Shown
    checkpoint: str = "average"
    """The checkpoint that translates: "average" (of the kept checkpoints) or "best"."""
    scored: str = "test"
    """The part of the corpus that is translated: test or valid."""
    seeds: int = 1
    """The number of seeds with which each row is trained by default."""


class Reproduction(NamedTuple):
    """A comparison from a paper, or one of the project's own, that one command makes."""

    name: str
    title: str
    source: str
    """The paper and its table; "ours" if there is none."""
    claim: str
    """The paper's statement; for a comparison of the project's own, the question that it answers."""
    scales: dict[str, Scale]
    """The scales of this comparison by name, a name in `SCALES`."""

    @property
    def stance(self) -> str:
        """The claim after the word "claim:", or the question after the word "question:"."""
        return f"{'question' if self.source.startswith('ours') else 'claim'}: {self.claim}"
