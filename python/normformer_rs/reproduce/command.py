"""`normformer-rs reproduce`: checks the data, makes the missing runs, prints the table, draws the picture, and writes
both into a Markdown file."""

import contextlib
import logging
import math
import tempfile
import time
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._optional import available, command
from ..commands.options import UsageError
from ..config import closest, unknown
from ..errors import InputError
from ..loop.progress import write
from ..text import escaped
from . import REPRODUCTIONS
from .corpora import CORPORA, missing
from .declared import Reproduction, Row, Scale
from .facts import deviations
from .results import Results, made_by
from .tables import baseline_of, markdown, table, write_section

if TYPE_CHECKING:
    from .kept import Kept
    from .measures import Measured
    from .remade import Figure
    from .runs import Run, Runs


def chosen(names: Sequence[str], scale: str) -> list[Reproduction]:
    """Returns the entries with these names, or, for `all`, those that have the scale.

    Errors: UsageError for an unknown name, InputError for a scale that an entry lacks.
    """
    for name in names:
        if name not in (*REPRODUCTIONS, "all"):
            near = closest(name, REPRODUCTIONS)
            raise UsageError(f'unknown name "{name}"{near}', "normformer-rs reproduce --help lists the names")
    if "all" in names:
        return [entry for entry in REPRODUCTIONS.values() if scale in entry.scales]
    entries = [REPRODUCTIONS[name] for name in dict.fromkeys(names)]
    for entry in entries:
        if scale not in entry.scales:
            raise InputError(unknown(f"scale of {entry.name}", scale, entry.scales))
    return entries


def plan(entry: Reproduction, scale: str, data: Path, seeds: int | None = None) -> str:
    """Returns a description of the recipe, the runs and the files that they need; at scale `paper` also of the
    deviations from the paper."""
    declared_scale = entry.scales[scale]
    seeds = declared_scale.seeds if seeds is None else seeds
    corpora = list(dict.fromkeys(row.corpus for row in declared_scale.rows))
    # The options that all rows share are listed once.
    shared = {name: value for name, value in declared_scale.rows[0].options.items()
              if all(row.options.get(name) == value for row in declared_scale.rows)}  # fmt: skip
    lines = [
        f"{entry.name}, scale {scale}: {entry.title}",
        f"  source: {entry.source}",
        f"  {entry.stance}",
        f"  recipe: {declared_scale.about}",
    ]
    for name in corpora:
        corpus, lacking = CORPORA[name], missing([name], data).get(name, [])
        lines.append(f"  text: {corpus.title}; {corpus.origin}")
        lines += [f"    {data / path}{' (missing)' if path in lacking else ''}" for path in corpus.files.values()]
    if seeds > 1:
        lines.append(f"  each of the {len(declared_scale.rows)} runs with {seeds} seeds")
    if scale == "paper" and (differing := deviations(entry)):
        lines += ["  deviations from the paper:", *(f"    {line}" for line in differing)]
    lines.append(f"  options of all {len(declared_scale.rows)} runs: {_listed(shared)}")
    for row in declared_scale.rows:
        own_options = {name: value for name, value in row.options.items() if name not in shared}
        lines.append(f"    {', '.join(row.key.values())}: {_listed(own_options)}")
    return "\n".join(lines) + "\n"


def _listed(options: dict[str, object]) -> str:
    """Returns names and values as text: name value, name value, …"""
    return ", ".join(f"{name} {value}" for name, value in options.items())


def run(
    names: Sequence[str],
    scale: str,
    *,
    data: Path = Path("data"),
    output: Path = Path("runs/reproduce"),
    results: Path | None = None,
    write_to: Path | None = None,
    train: bool = True,
    dry_run: bool = False,
    recompute: bool = False,
    seeds: int | None = None,
    device: str = "cpu",
    progress: bool = True,
) -> None:
    """Makes the reproductions, one after another; `flags.py` says what each argument does.

    Errors: InputError for a scale that an entry lacks, for missing data, for damaged runs, and with `recompute` if a
    stored figure differs; Interrupted after Ctrl-C (the same call continues the run); ImportError without sacrebleu or,
    at scale check, num2words.
    """
    entries = chosen(names, scale)
    if recompute and (dry_run or write_to is not None):
        other = "--dry-run" if dry_run else "--write"
        raise UsageError(f"--recompute and {other}: expected one of them", "--recompute only compares stored figures")
    if write_to is not None and not write_to.is_file():
        raise InputError(f"--write {write_to}: no such file; expected a Markdown file, as docs/results-training.md")
    if seeds is not None and seeds < 1:
        raise InputError(f"--seeds must be at least 1; got {seeds}")
    if dry_run or (scale == "paper" and not recompute):
        print("\n".join(plan(entry, scale, data, seeds) for entry in entries))
    if dry_run:
        return
    settings: dict[str, Any] = {"data": data, "device": device, "progress": progress}
    all_results = [Results(entry, scale, results or output / scale, seeds) for entry in entries]
    if recompute:
        _recompute(all_results, data)
        return
    if train:
        _check_data(entries, scale, data, all_results)
    for entry, entry_results in zip(entries, all_results):
        if train:
            with quiet(scale == "check"):
                runs = _runs(output / scale / "runs", settings)
                if others_rows := measure(entry_results.wanted, entry.scales[scale], entry_results, runs):
                    write(f"{entry_results.stem}: {len(others_rows)} rows are another process's")
        _show(entry, scale, entry_results, write_to)


def _check_data(entries: Sequence[Reproduction], scale: str, data: Path, all_results: Sequence[Results]) -> None:
    """Checks that the texts of the rows that are still to be measured exist. Errors: UsageError if one is missing."""
    readers = {row.corpus: entry.name for entry, results in zip(entries, all_results)
               for row in results.wanted if results.find(row) is None}  # fmt: skip
    for name, files in missing(readers, data).items():  # the error is about the first corpus that lacks files
        raise UsageError(
            f"reproduce {readers[name]} --scale {scale} needs {len(files)} files that {data} lacks (plain or .gz): "
            f"{', '.join(files)}",
            f"{CORPORA[name].title}: {CORPORA[name].origin}. --data DIR says where they are",
        )


@contextlib.contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """Logs only warnings inside the block, if `wanted`. It is for the runs of scale check, which take a second each."""
    logger = logging.getLogger("normformer_rs")
    level = logger.level
    if wanted:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _runs(folder: Path, settings: dict[str, Any]) -> "Runs":
    """Returns the runs whose folders are in `folder`. `settings`: the data's folder, the device, and progress
    (bool)."""
    from .runs import Runs

    # Inside `quiet` only warnings are logged. Then there is no progress bar, either.
    progress = settings["progress"] and logging.getLogger("normformer_rs").level < logging.WARNING
    return Runs(folder, **{**settings, "progress": progress})


def measure(rows: Sequence[Row], scale: Scale, results: Results, runs: "Runs", ends: float = math.inf) -> list[Row]:
    """Trains and measures the rows that the table lacks. Returns the rows that it has not measured, because another
    process makes their runs, or because they would begin after `ends`, a time of `time.monotonic`."""
    not_measured = []
    for number, row in enumerate(rows, 1):
        results.read()
        if results.find(row) is not None:
            continue
        if time.monotonic() >= ends:
            not_measured.append(row)
            continue
        with runs.claim(row) as is_ours:
            if is_ours:
                write(f"{results.stem}: {_named(row)} ({number} of {len(rows)})")
                _measure_row(scale, results, row, runs)
            else:
                not_measured.append(row)
    return not_measured


def _named(row: Row) -> str:
    """Returns a name for the row in messages: the values of its key and its seed."""
    return ", ".join([*row.key.values(), f"seed {row.seed}"])


def _measure_row(scale: Scale, results: Results, row: Row, runs: "Runs") -> None:
    """Trains the row's run, if that is not done yet, measures it, and adds the row to the table."""
    from .measures import MEASURES

    finished = runs.run(row)
    measured = [MEASURES[name](runs, finished, scale) for name in scale.shown.measures]
    if scale.shown.compared:
        measured.append(_p_value(scale, row, finished, runs))
    columns = {name: value for measurement in measured for name, value in measurement.columns.items()}
    series = {name: numbers for measurement in measured for name, numbers in measurement.series.items()}
    columns |= {**finished.verdict, **made_by()}
    results.add(row, columns, series, _kept(scale, finished, measured, results))


def _kept(scale: Scale, finished: "Run", measured: Sequence["Measured"], results: Results) -> "Kept | None":
    """Returns the data from which the row's figures can be recomputed later; None if the table stores no such data, or
    if no figure of the scale can be recomputed."""
    from .kept import Kept, about
    from .made import is_kept
    from .measures import kept_of_log

    if not results.keeps or not is_kept(scale.shown.measures):
        return None
    content = about(finished.row, scale) | kept_of_log(finished)
    for measurement in measured:
        content |= measurement.kept
    return Kept(content, [line for measurement in measured for line in measurement.translations])


def _p_value(scale: Scale, row: Row, finished: "Run", runs: "Runs") -> "Measured":
    """Returns the p-value of the row against its baseline. It is "" if there is no baseline, if BLEU is not measured,
    or if the baseline's run is not in the folder of runs."""
    from .measures import Measured, p_value

    baseline = baseline_of(scale, row)
    if baseline is None or "bleu" not in scale.shown.measures:
        return Measured({"p": ""})
    if not runs.is_over(baseline):
        name = ", ".join(baseline.key.values())
        write(f"no p-value: the run of {name} is not in {runs.folder}, only its row is in the table")
        return Measured({"p": ""})
    return p_value(runs, finished, runs.run(baseline), scale)


def _recompute(tables: Sequence[Results], data: Path) -> None:
    """Prints each stored figure, and whether the recomputed one is equal. Errors: InputError if a figure differs, or if
    nothing has been measured."""
    from .made import is_kept
    from .remade import left_out, remade
    from .runs import Runs

    if not any(results.rows for results in tables):
        raise InputError(f"{tables[0].path('.csv')}: nothing has been measured yet: leave --recompute out")
    counted = {"equal": 0, "different": 0, "cannot": 0}
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), data, device="cpu", progress=False)
        for results in tables:
            if not is_kept(results.scale.shown.measures):
                print(f"{results.path('.csv')}: cannot be recomputed: its figures are of logs and weights alone")
                continue
            lacking = missing({row.corpus for row in results.scale.rows}, data)

            # A function reads a loop's variables only when it runs, so the defaults keep the values of this table.
            def references(row: Row, scale: Scale = results.scale, lacking: Container[str] = lacking) -> Any:
                return None if row.corpus in lacking else runs.references(row, scale)

            print(f"{results.path('.csv')}:{'' if results.rows else ' nothing has been measured'}")
            figures = list(remade(results, references))
            for figure in figures:
                print(f"  {escaped(_words(figure))}")
                counted[figure.state] += 1
            for corpus in lacking:
                if any(figure.row.corpus == corpus and figure.name == "bleu" for figure in figures):
                    print(f"  the translations were not scored again: {CORPORA[corpus].title} is not in {data}")
            if results.stale:
                print(f"  rows that were measured with other options, and are not compared: {results.stale}")
            recomputed = {figure.name for figure in figures if figure.name}  # a figure without a name is a whole row
            if recomputed and (not_recomputed := left_out(results, recomputed)):
                print(f"  not recomputed, since logs and weights are not kept: {', '.join(not_recomputed)}")
    summary = f"{counted['equal']} recomputed figures equal the stored ones, {counted['different']} differ"
    print(f"{summary}, {counted['cannot']} rows or figures cannot be recomputed", flush=True)
    if counted["different"]:
        raise InputError(f"{counted['different']} stored figures differ from what is kept of their runs: see above")


def _words(figure: "Figure") -> str:
    """Returns a line about a figure: equal, different, or why it cannot be recomputed."""
    name = ", ".join([_named(figure.row), *([figure.name] if figure.name else [])])
    if figure.state == "equal":
        # sacreBLEU's line is shown without the signature before " = ".
        return f"equal: {name} {figure.stored.partition(' = ')[2] or figure.stored}"
    if figure.state == "cannot":
        return f"cannot be recomputed: {name}: {figure.made}"
    return f"different: {name}: " + (
        f"stored {figure.stored}, recomputed {figure.made}" if figure.name else figure.made
    )


def _show(entry: Reproduction, scale: str, results: Results, write_to: Path | None) -> None:
    """Prints the table, and draws the picture if matplotlib is installed. With `write_to`, both also go into that
    Markdown file."""
    shown = entry.scales[scale].shown
    if not results.measured:
        raise InputError(f"{results.path('.csv')}: nothing of {entry.name} has been measured yet: leave --no-train out")
    lacking = sum(results.find(row) is None for row in results.wanted)
    print(f"{entry.title}\nsource: {entry.source}\n{entry.stance}\n")
    print(markdown(*table(results, shown), aligned=True))
    print(f"{entry.scales[scale].about}." + (f" Rows that are still to be measured: {lacking}." if lacking else ""))
    if results.stale:
        print(f"Rows that were measured with other options, and are not shown: {results.stale}.")
    if scale == "check":
        print("A check shows that the command works; its figures say nothing about the paper.")
    print(f"table: {results.path('.csv')}")
    if available("matplotlib"):
        from .pictures import draw

        print(f"picture: {draw(entry, scale, results) or f'not drawn, its series are not in {results.folder}'}")
    else:
        print(f"picture: not drawn, {command('matplotlib')}")
    if write_to is not None:
        write_section(write_to, entry, scale, results)
        print(f"written: {write_to}")
    print(flush=True)
