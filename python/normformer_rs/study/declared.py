"""Defines a study: its arms, rates, seeds and budget, given in Python or in a TOML file."""

import dataclasses
import functools
import hashlib
import inspect
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..commands.options import layered
from ..config import (
    ENTRIES,
    OWN,
    DataConfig,
    Field,
    TrainingConfig,
    TransformerConfig,
    __version__,
    closest,
    split,
)
from ..declarations.file_class import refuse_code
from ..errors import InputError
from ..reproduce.corpora import CORPORA, Corpus, found
from ..reproduce.declared import Options, Reproduction, Row, Scale, Shown, digest, source
from ..text import read_small
from .checks import OWN_LOOP, OWN_START, PARTS, TUNING, check_kinds, check_values

_Study = TypeVar("_Study", bound="Study")

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_CLOCKS = {"warmup": 0.1, "branchnorm_steps": 0.2, "prores_steps": 0.5, "powernorm_warmup": 0.1, "prepbn_steps": 0.5}
"""The default durations, as shares of the run. For prores_steps the share is for all layers together; each layer gets
this number divided by the number of layers."""
_FIELDS: dict[str, Field] = {
    field.name: field for kind in (TransformerConfig, TrainingConfig, DataConfig) for field in kind.FIELDS
}
"""The options of model, training and data, by name."""


class Cell(NamedTuple):
    """An arm at one depth with one initialisation."""

    key: dict[str, str]
    """The columns that name the cell: arm, and also layers and init if the study has several of them."""
    options: Options

    @property
    def name(self) -> str:
        """The values of the key as a name for messages and the page, such as "pre, layers 12"."""
        return ", ".join(value if column == "arm" else f"{column} {value}" for column, value in self.key.items())


@dataclasses.dataclass(frozen=True)
class Study:
    """A comparison of norms, residual schemes or any other options.

    Every arm is trained with every rate of `lr`. For each reported seed s, the rate of an arm is the one with the best
    metric on seed s + 1000; then the arm is trained with this rate and seed s, and only these runs are compared. So
    no reported run has chosen its own rate, and the seeds are independent of each other.

    >>> import normformer_rs as nfrs
    >>> study = nfrs.Study(
    ...     arms={"pre": {"residual": "prenorm"}, "post": {"residual": "postnorm"}},
    ...     options={"preset": "transformer-tiny"}, layers=[12], updates=200,
    ... )
    >>> len(study.cells), study.runs
    (2, 24)

    Args:
        arms: options of model, training and data by the arm's name. In a loop of your own (`for trial in study`) also a
            function that changes a model.
        options: the options that all arms share; `preset` is a name of `PRESETS`.
        lr: the learning rates, the same for all arms.
        seeds: the number of reported seeds; 3 or more give intervals.
        layers: depths, each of encoder and decoder; empty for that of the options.
        init: initialisations, "own" for each scheme's own; the arms are compared under each of them.
        updates, tokens, flop: the budget of a run: its updates, its padded tokens, or its operations by
            6 · parameters · tokens (Kaplan et al. 2020). Give one.
        metric: "valid_nll" or "bleu".
        baseline: the arm with which the others are compared; "" for the first.
        text: a corpus of `reproduce` ("numbers" is made on the spot), or the files train_target, valid_target, … and
            the options of the text, such as bpe_operations. "own loop" for arms that only `for trial in study` trains.
        margin: the difference, in the metric's unit, below which arms count as equal. None: nothing is called equal.
        title, question: the title of the page of results, and the question that it answers.
        data: the folder of `reproduce`'s corpora.

    An integer option may be a share of the run: `warmup = 0.1` is a tenth of the updates. By default warmup and
    powernorm_warmup are a tenth, branchnorm_steps a fifth, and prores and prepbn end after half of the run.

    Errors: InputError for unknown names, wrong values, and options that do not fit together.
    """

    arms: Mapping[str, Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lr: Sequence[float] = (1e-3, 3e-3, 1e-2)
    seeds: int = 3
    layers: Sequence[int] = ()
    init: Sequence[str] = (OWN_START,)
    updates: int | None = None
    tokens: int | None = None
    flop: float | None = None
    metric: str = "valid_nll"
    baseline: str = ""
    text: str | Mapping[str, Any] = "numbers"
    margin: float | None = None
    title: str = ""
    question: str = "Which arm trains best?"
    data: str | PathLike[str] = "data"

    def __post_init__(self) -> None:
        """Checks the arguments, turns single values into tuples, and fills in the default baseline and title."""

        def put(name: str, value: Any) -> None:
            # A frozen dataclass refuses assignments, but not this call.
            object.__setattr__(self, name, value)

        check_kinds(self)
        for name in ("lr", "layers", "init"):
            value = getattr(self, name)
            put(name, tuple(value) if isinstance(value, (list, tuple)) else (value,))
        put("baseline", self.baseline or next(iter(self.arms)))
        put("title", self.title or ", ".join(self.arms))
        check_values(self)
        # All options are checked here, with two exceptions. In a loop of the user's own they are arguments of swaps,
        # which check them (`Trial.apply`). With a budget in operations the number of updates depends on the text, which
        # need not be on this machine yet.
        for cell in self.cells if self.is_of_the_loop and self.flop is None else ():
            # `check_values` has checked all rates, and no other check depends on the rate, so one is enough.
            self._resolved(cell, self.lr[0])

    @classmethod
    def read(cls: type[_Study], path: str | PathLike[str], *, trust: bool = False) -> _Study:
        """Returns the study in a TOML file. The file's names are this class' arguments; an arm is a table [arms.NAME].

        Errors: InputError for a missing file, wrong syntax, unknown names and, without `trust`, a text that names code.
        """
        try:
            content = tomllib.loads(read_small(path))
        except FileNotFoundError as error:
            raise InputError(f"{path}: no such file; expected a study in TOML") from error
        except InputError:  # this class is a ValueError, which the next clause would catch
            raise
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: not valid TOML: {error}") from error
        names = [field.name for field in dataclasses.fields(cls)]
        for name in content:
            if name not in names:
                raise InputError(f'{path}: unknown name "{name}"{closest(name, names)}; expected {", ".join(names)}')
        if "arms" not in content:
            raise InputError(f"{path}: a study needs arms: tables [arms.NAME] of options")
        arms = content["arms"]
        tables = [content.get("options"), *(arms.values() if isinstance(arms, dict) else ())]
        for table in tables:
            if isinstance(table, dict):
                refuse_code({name: value for name, value in table.items() if name in OWN}, path, trust)
        try:
            return cls(**content)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    @property
    def is_of_the_loop(self) -> bool:
        """True if this package's training loop can train all arms: none is a function, and `text` is not "own loop"."""
        return self.text != OWN_LOOP and all(isinstance(arm, Mapping) for arm in self.arms.values())

    @functools.cached_property
    def cells(self) -> list[Cell]:
        """The combinations of depth, initialisation and arm, in the order of the page. A key has layers or init only if
        the study has several of them."""
        cells = []
        for layers, init, (name, arm) in itertools.product(self.layers or (None,), self.init, self.arms.items()):
            key = {"arm": name}
            options: Options = dict(arm) if isinstance(arm, Mapping) else {}
            if layers is not None:
                options |= {"encoder_layers": layers, "decoder_layers": layers}
                key |= {"layers": str(layers)} if len(self.layers) > 1 else {}
            if init != OWN_START:
                options["init"] = init
            key |= {"init": init} if len(self.init) > 1 else {}
            cells.append(Cell(key, options))
        return cells

    @property
    def runs(self) -> int:
        """The number of runs. Each cell has, for each seed, one run per rate to choose the rate, and one reported
        run."""
        return len(self.cells) * self.seeds * (len(self.lr) + 1)

    def baseline_of(self, cell: Cell) -> Cell | None:
        """Returns the cell of the baseline arm that has the same depth and initialisation as this one; None if this one
        is that cell."""
        wanted = {**cell.key, "arm": self.baseline}
        return None if wanted == cell.key else next(other for other in self.cells if other.key == wanted)

    def row(self, cell: Cell, lr: float, seed: int) -> Row:
        """Returns the row that describes the run of a cell with this rate and seed."""
        arm = self.arms[cell.key["arm"]]
        if self.is_of_the_loop:
            cache_key = (*cell.key.values(), lr)
            if cache_key not in self._options:
                self._options[cache_key] = self._resolved(cell, lr)
            options = {**self._options[cache_key], "seed": seed}
        else:
            options = {**self.options, **cell.options, "lr": lr, "seed": seed, "updates": self.updates}
            # With the digest in its options, a row of an older version of the function is not used again.
            options |= {"function": digest(_captured(arm, ()))} if callable(arm) else {}
        return Row({**cell.key, "lr": f"{lr:g}"}, options, self.corpus[0], version=__version__)

    def tuning(self, cell: Cell, number: int) -> list[Row]:
        """Returns the rows of the runs, one for each rate, that choose the rate for the reported seed `number`; seeds
        begin at 1."""
        return [self.row(cell, lr, TUNING + number) for lr in self.lr]

    @functools.cached_property
    def corpus(self) -> tuple[str, Corpus]:
        """The name of the corpus, and the corpus. If the study has files of its own, the name is a digest of their
        content at the first use."""
        if self.text == OWN_LOOP:
            return OWN_LOOP, Corpus("a text of the user's own", origin="", files={}, options={})
        if isinstance(self.text, str):
            return self.text, CORPORA[self.text]
        files = {role: str(Path(path).absolute()) for role, path in self.text.items() if role in PARTS}
        options = {name: value for name, value in self.text.items() if name not in PARTS}
        content = hashlib.sha256()
        for role, path in files.items():
            if (file := found(Path(path))) is None:
                raise InputError(f"text: {role}: no such file: {path}")
            content.update(role.encode() + hashlib.sha256(file.read_bytes()).digest())
        content.update(digest(options).encode())
        title = Path(files["train_target"]).name
        name = f"text-{content.hexdigest()[:8]}"
        return name, Corpus(title, origin="the study's own", files=files, options=options, tokenize="13a")

    @property
    def reproduction(self) -> Reproduction:
        """The study in the form of a reproduction, so that the tables and files of `reproduce` can be used for it."""
        measures = ("first", *(["bleu"] if self.metric == "bleu" else []))
        rows = tuple(self.row(cell, lr, seed=1) for cell in self.cells for lr in self.lr)
        scored = "test" if isinstance(self.text, str) or "test_target" in self.text else "valid"
        scale = Scale(self.question, rows, Shown(measures=measures), checkpoint="last", scored=scored, seeds=self.seeds)
        return Reproduction("study", self.title, source="ours", claim=self.question, scales={"rows": scale})

    @functools.cached_property
    def _options(self) -> dict[tuple[Any, ...], Options]:
        """A cache of `_resolved`, by the values of the cell's key and the rate."""
        return {}

    def _resolved(self, cell: Cell, lr: float) -> Options:
        """Returns all options of a cell's runs except the seed. Errors: InputError that names the arm."""
        shared = dict(self.options)
        preset = shared.pop("preset", None)
        try:
            options = layered(preset, _CLOCKS, shared, cell.options, {"lr": lr})
            updates = self._updates(options)
            # All runs are equally long, so epochs and early stopping are off.
            options |= {"updates": updates, "epochs": 0, "patience": 0, "keep": options.get("keep", 1)}
            if "evaluate_every" not in {**shared, **cell.options}:
                options["evaluate_every"] = max(1, updates // 4)  # four evaluations of each run
            if "evaluation_beam" not in {**shared, **cell.options} and not _uses_bleu(options):
                options["evaluation_beam"] = 0  # nothing reads BLEU, so evaluations translate nothing
            if "prores_steps" not in {**shared, **cell.options}:
                # The share in `_CLOCKS` is for all layers together; the option is for one layer.
                options["prores_steps"] /= _count(options, "decoder_layers")
            options = {name: _duration(name, value, updates) for name, value in options.items()}
            options = _needed(options)
            options["init"] = options.get("init") or _own_start(options.get("residual"))
            model, training, data = split(options, TransformerConfig, TrainingConfig, DataConfig)
            configs = TransformerConfig(**model), TrainingConfig(**training), DataConfig(**data)
        except InputError as error:
            raise InputError(f"arm {cell.name}: {error}") from error
        # The configurations have every option with its checked value; those that were not set are left out.
        return {name: value for config in configs for name, value in config.asdict().items() if name in options}

    def _updates(self, options: Options) -> int:
        """Returns the number of updates of a run with these options, which the study's budget determines."""
        if self.updates is not None:
            return self.updates
        batch = _count(options, "max_tokens") * _count(options, "accumulate")  # the padded tokens of an update
        if self.tokens is not None:
            return max(1, math.ceil(self.tokens / batch))
        if self.flop is not None:
            from ..reproduce.runs import parameters_of

            # An update takes 6·parameters·tokens operations. Durations, which may still be shares of the run here, are
            # left out, because no model's size depends on them.
            names = {field.name for kind in (TransformerConfig, DataConfig) for field in kind.FIELDS} - {*_CLOCKS}
            sizes = {name: value for name, value in options.items() if name in names}
            return max(1, math.ceil(self.flop / (6 * parameters_of(sizes, *self.corpus, Path(self.data)) * batch)))
        return _count(options, "updates")


def _source(function: Any, seen: tuple[Any, ...] = ()) -> str:
    """Returns a digest of a function's source, defaults and captured values. The digest is part of a row's options, so
    that rows measured with an earlier version of the function are not reused. `seen`: as in `_captured`."""
    seen = (*seen, function)
    captured = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    defaults = getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)
    return digest([source(function), _captured([*defaults, *captured], seen)])


def _captured(value: Any, seen: tuple[Any, ...]) -> Any:
    """Returns a description of a value that is equal in each process for equal values. An object is described by its
    class's source and its attributes. `seen`: the values that contain this one; a value may contain itself."""
    if any(value is outer for outer in seen):
        return "itself"
    if inspect.isfunction(value):
        return _source(value, seen)
    seen = (*seen, value)

    def each(values: Any) -> list[Any]:
        return [_captured(inner, seen) for inner in values]

    if inspect.ismethod(value):
        return each((value.__func__, value.__self__))
    if isinstance(value, functools.partial):
        return each((value.func, value.args, value.keywords))
    if isinstance(value, (list, tuple)):
        return each(value)
    if isinstance(value, Mapping):
        return [each(pair) for pair in value.items()]
    if isinstance(value, type):
        return [source(value), value.__qualname__]
    text = repr(value)
    if f"{id(value):x}" in text and hasattr(value, "__dict__"):  # the default representation, which has the address
        return [source(type(value)), each(vars(value).items())]
    return text


def _count(options: Options, name: str) -> int:
    """Returns the value of an option that must be at least 1. Errors: InputError if it is less."""
    field = _FIELDS[name]
    value = field.check(options.get(name, field.default))
    if value < 1:
        raise InputError(f"{name} must be at least 1; got {value}")
    return int(value)


def _duration(name: str, value: Any, updates: int) -> Any:
    """Returns the value in updates if it is a share of the run, between 0 and 1, for an integer option. Returns other
    values unchanged."""
    is_share = name in _FIELDS and _FIELDS[name].kind == "int" and isinstance(value, float) and 0 < value < 1
    return max(1, round(value * updates)) if is_share else value


def _needed(options: Options) -> Options:
    """Returns the options without the durations that belong to norms and schemes that the model does not have."""
    norms_and_scheme = {str(options.get(name)) for name in OWN}
    owners = {"branchnorm_steps": "branchnorm", "prores_steps": "prores", "powernorm_warmup": "powernorm"}
    owners |= {"prepbn_steps": "prepbn"}
    return {option: value for option, value in options.items()
            if option not in owners or any(owners[option] in name for name in norms_and_scheme)}  # fmt: skip


def _uses_bleu(options: Options) -> bool:
    """Returns True if a run's best checkpoint or its rate depends on BLEU of its evaluations."""
    return options.get("criterion") == "bleu" or options.get("schedule") in ("val-decay", "no-warmup")


def _own_start(residual: Any) -> str:
    """Returns the name of the residual scheme's own initialisation; xavier for a scheme that is not in the table, such
    as a user's own."""
    scheme = TransformerConfig().residual if residual is None else residual  # type: ignore[attr-defined]
    return next((entry["init"] for entry in ENTRIES["residuals"] if entry["name"] == scheme), "xavier")
