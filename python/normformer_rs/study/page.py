"""Writes the page of a study as a self-contained HTML file, as Markdown, LaTeX and JSON."""

import base64
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .. import _html, text
from .._optional import available, command
from ..loop.progress import duration
from ..reproduce.results import made_by
from ..reproduce.tables import COLUMNS, markdown
from .checks import METRICS, TUNING
from .declared import Study
from .outcome import Arm, Outcome, as_json, main_table, mean

PAGE = "study"
"""The name of the page's files without their endings."""
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;font-size:14px}td,th{padding:.25em .8em;border-bottom:1px solid #ddd}"
    "img{max-width:100%}pre{background:#f4f4f4;padding:.8em;overflow:auto;font-size:13px}h2{margin-top:2em}"
)


# The page is a list of blocks of the following classes. Each format is written from this list.


class Heading(NamedTuple):
    text: str


class Paragraph(NamedTuple):
    text: str


class Listing(NamedTuple):
    lines: list[str]


class Code(NamedTuple):
    text: str


class Table(NamedTuple):
    head: list[str]
    lines: list[list[str]]


class Picture(NamedTuple):
    path: Path
    text: str


Block = Heading | Paragraph | Listing | Code | Table | Picture


def write(outcome: Outcome, output: Path, words: str) -> Path:
    """Writes study.html, study.md, study.tex, study.json and the pictures into `output`; returns study.html's path.

    `words` is the command or the Python call that makes the study; the page shows it.
    """
    blocks = _blocks(outcome, output, words)
    text.write_lines(str(output / f"{PAGE}.md"), _markdown(outcome.study.title, blocks, output).split("\n"))
    text.write_lines(str(output / f"{PAGE}.tex"), latex(outcome).split("\n"))
    text.write_lines(str(output / f"{PAGE}.json"), [json.dumps(as_json(outcome), indent=1, ensure_ascii=False)])
    text.write_lines(str(output / f"{PAGE}.html"), _page(outcome.study.title, blocks).split("\n"))
    return output / f"{PAGE}.html"


# ---- the content of the page ----


def sentence(outcome: Outcome, arm: Arm) -> str:
    """Returns the sentences that say what the study found about an arm."""
    study, column = outcome.study, COLUMNS[outcome.study.metric]
    name, base = arm.cell.name, study.baseline
    if not arm.values:
        return f"{name} has not been measured yet."
    edge = ""  # this sentence is appended to each of the results below
    if arm.edges:
        edge = f" {name} had a rate at the edge of the grid with {arm.edges} of {len(arm.values)} seeds: "
        edge += "a better one may lie beyond."
    if arm.failed:
        return f"{name} failed with {arm.failed} of {len(arm.values)} seeds, so it is not compared.{edge}"
    if study.baseline_of(arm.cell) is None:
        return f"{name} is the baseline: {column.heading} {mean(arm, column.form)}.{edge}"
    if arm.compared is None or (difference := arm.compared.difference) is None:
        measured = next((other.values for other in outcome.arms if other.cell == study.baseline_of(arm.cell)), {})
        reason = "too few seeds" if measured else f"{base} has not been measured yet"
        explanation = arm.compared.words if arm.compared is not None else reason
        return f"{name} is not compared with {base}: {explanation}.{edge}"
    distance = f"{abs(difference.spread.mean):{column.form}}"
    if arm.compared.p < 0.05:
        direction = ("lower" if difference.spread.mean < 0 else "higher") + (
            ", better" if arm.compared.is_better else ", worse"
        )
        sentences = f"{name} is {distance} {direction} than {base} (p = {arm.compared.p:.3f} after Holm's correction)."
    else:
        sentences = (
            f"No difference between {name} and {base} was found (p = {arm.compared.p:.3f}); {len(arm.values)} seeds "
            f"find one of {difference.least:{column.form}} in four of five studies."
        )
    if arm.is_equal is not None:
        margin = f"the margin of {study.margin:g}"
        sentences += (
            f" It is equal within {margin}." if arm.is_equal else f" It is not shown to be equal within {margin}."
        )
    return sentences + edge


def rules(study: Study) -> list[str]:
    """Returns the study's rules, which are fixed before the first run."""
    seeds, rates = study.seeds, len(study.lr)
    margin = "No margin is named, so no arms are called equal." if study.margin is None else (
        f"Arms count as equal if the 90 % interval of their difference lies within ±{study.margin:g}."
    )  # fmt: skip
    return [
        f"The metric is {METRICS[study.metric]}, at the end of the run."
        + (
            ""
            if study.is_of_the_loop
            else " It is the last validation loss that the loop reported, or without one the "
            "mean training loss of the last 50 updates, or of the last third of fewer than 150."
        ),
        f"Each arm is trained with the same {rates} rates: {', '.join(f'{rate:g}' for rate in study.lr)}.",
        f"Reported seeds are 1 to {seeds}. For seed s each arm has the rate that is best on seed s + {TUNING}; ties go "
        "to the lower rate. No reported run takes part in a choice.",
        "Equal seeds have equal batches, and parameters of equal name, shape and distribution start bit-equal."
        if study.is_of_the_loop
        else "torch, numpy and random are seeded before each trial and after its swap, its generator once.",
        "A run that diverges counts as failed; an arm with a failed seed is named and not tested.",
        f"Each arm is compared with {study.baseline} by the two-sided t test on differences of equal seeds, corrected "
        "for the number of comparisons, one for each arm, depth and initialisation (Holm 1979). A star marks an arm "
        "that is better at p < 0.05.",
        margin,
        "Verdicts (diverged, trains, slow, stuck) follow docs/spec.md §4.14.",
    ]


def _limits(outcome: Outcome) -> list[str]:
    """Returns sentences about what the study cannot show, and about runs that are missing."""
    study = outcome.study
    options = outcome.results.scale.rows[0].options
    depth = ", ".join(map(str, study.layers)) or str(options.get("decoder_layers", "the model's"))
    lengths = sorted({row.options["updates"] for row in outcome.results.scale.rows})
    # Without a budget in updates, the length of a run is unknown.
    length = (
        " or ".join(f"{updates:,}" for updates in lengths) + " updates" if options["updates"] else "runs of this length"
    )
    limits = [
        f"It speaks of this text, {length} and {depth} layers. Longer runs and other sizes may rank the arms "
        "otherwise.",
        f"An interval over {study.seeds} seeds covers initialisation and order of batches, not other texts.",
    ]
    if any(arm.edges for arm in outcome.arms):
        limits.append("Where a rate is at the edge of the grid, the arm's best value was perhaps not reached.")
    if outcome.missing:
        limits.append(f"{outcome.missing} of {study.runs} runs have not been made.")
    if outcome.stale:
        limits.append(f"{outcome.stale} runs were measured only with other options or versions, and are not shown.")
    return limits


def _blocks(outcome: Outcome, output: Path, words: str) -> list[Block]:
    """Returns the content of the page. Pictures are drawn into the folder `output`."""
    study = outcome.study
    blocks: list[Block] = [Paragraph(study.question), Heading("Result"), Table(*main_table(outcome))]
    blocks.append(Listing([sentence(outcome, arm) for arm in outcome.arms]))
    blocks += _pictures(outcome, output)
    blocks += [Heading("Rules"), Listing(rules(study)), Heading("What it does not say"), Listing(_limits(outcome))]
    if study.is_of_the_loop:
        from .starts import unequal

        head, lines = ["arm", "parameters", "start bit-equal", "start unlike, or have no counterpart"], unequal(study)
        blocks += [Heading(f"Starts, against {study.baseline}"), Table(head, lines)]
    # The numbers of runs include those that chose the rates.
    costs = [[arm.cell.name, str(len(arm.values) + sum(map(len, arm.curve.values()))), duration(arm.seconds)]
             for arm in outcome.arms]  # fmt: skip
    blocks += [Heading("Cost"), Table(["arm", "runs", "time of training"], costs)]
    blocks += [Heading("How it was made"), Paragraph(_provenance(outcome)), Code(words)]
    return blocks


def _provenance(outcome: Outcome) -> str:
    """Returns a text that says when and with which versions and processors the rows were measured."""
    facts = {name: sorted({row[name] for row in outcome.results.rows if row.get(name)}) for name in made_by()}
    # The page shows only the first and the last date.
    facts["date"] = [*dict.fromkeys((facts["date"][0], facts["date"][-1]))] if facts["date"] else []
    return "; ".join(f"{name} {', '.join(values)}" for name, values in facts.items() if values)


def _pictures(outcome: Outcome, output: Path) -> list[Block]:
    """Draws the pictures into `output`. Without matplotlib it returns a sentence with the command that installs it."""
    if not available("matplotlib"):
        return [Paragraph(f"No pictures: {command('matplotlib')}")]
    from .pictures import drawn

    return [Picture(path, description) for path, description in drawn(outcome, output)]


# ---- the formats of the page ----


def _markdown(title: str, blocks: Sequence[Block], output: Path) -> str:
    """Returns the page in Markdown. Paths of pictures are relative to the folder `output`."""
    parts = [f"# {title}"]
    for block in blocks:
        if isinstance(block, Heading):
            parts.append(f"## {block.text}")
        elif isinstance(block, Listing):
            parts.append("\n".join(f"- {line}" for line in block.lines))
        elif isinstance(block, Code):
            parts.append(f"```\n{block.text}\n```")
        elif isinstance(block, Table):
            parts.append(markdown(block.head, block.lines).rstrip())
        elif isinstance(block, Picture):
            parts.append(f"![{block.text}]({block.path.relative_to(output).as_posix()})")
        else:
            parts.append(block.text)
    return "\n\n".join(parts)


def _page(title: str, blocks: Sequence[Block]) -> str:
    """Returns the page in HTML. Pictures are embedded, so that the page is one file."""
    parts = []
    for block in blocks:
        if isinstance(block, Heading):
            parts.append(f"<h2>{html.escape(block.text)}</h2>")
        elif isinstance(block, Listing):
            parts.append("<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in block.lines) + "</ul>")
        elif isinstance(block, Code):
            parts.append(f"<pre>{html.escape(block.text)}</pre>")
        elif isinstance(block, Table):
            parts.append(_html.table(block.head, block.lines))
        elif isinstance(block, Picture):
            data = base64.b64encode(block.path.read_bytes()).decode()
            parts.append(f'<img alt="{html.escape(block.text)}" src="data:image/png;base64,{data}">')
        else:
            parts.append(f"<p>{html.escape(block.text)}</p>")
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    body = "\n".join([f"<h1>{html.escape(title)}</h1>", *parts])
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}\n</body></html>'


def latex(outcome: Outcome) -> str:
    """Returns the table of arms in LaTeX, with the rules of the package booktabs."""
    head, lines = main_table(outcome)
    rows = [" & ".join(map(_tex, line)) + r" \\" for line in lines]
    begin = [rf"\begin{{tabular}}{{{'l' * len(head)}}}", r"\toprule", " & ".join(map(_tex, head)) + r" \\", r"\midrule"]
    return "\n".join([*begin, *rows, r"\bottomrule", r"\end{tabular}"])


def _tex(cell: str) -> str:
    """Returns a cell of a table with LaTeX's special characters escaped."""
    special = {**{letter: f"\\{letter}" for letter in "&%$#_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}"}
    special |= {"^": r"\textasciicircum{}", "±": r"$\pm$", "<": r"\textless{}", ">": r"\textgreater{}"}
    special |= {"|": r"\textbar{}", '"': r"\textquotedbl{}"}
    return "".join(special.get(letter, letter) for letter in cell)
