"""Generates a page for every norm and every residual scheme from Rust's tables, docs/spec.md, docs/notes.md and
benches/results. A new name has a page as soon as it is in the tables."""

import re
from pathlib import Path
from typing import Any

from benches import figures

from normformer_rs import config
from normformer_rs import nn as nfnn

from . import arguments, equations, links, spec
from .examples import shown
from .tables import RESULTS, results, table

NOTES = spec.ROOT / "docs" / "notes.md"
KINDS = {"norms": "Norms", "residuals": "Residual schemes"}
_CHOOSERS = {"norm", "encoder_norm", "decoder_norm", "residual", "init"}
"""Options that choose a norm, a scheme or an initialisation. The page of a single norm or scheme omits them."""
# The numbers of encoder and decoder layers, and the table in benches/results of the runs with that depth.
_DEPTHS = (("18+18", "brn-table1-18-here"), ("50+50", "brn-table1-50-here"))


def pages(folder: Path) -> dict[str, str]:
    """Returns the pages by path. Pictures are written to `folder`/images."""
    made = {}
    for kind, title in KINDS.items():
        entries = config.tables()[kind]
        made[f"{kind}/index.md"] = _index(kind, title, entries)
        for entry in entries:
            page = _norm if kind == "norms" else _residual
            made[f"{kind}/{entry['name']}.md"] = page(entry, folder)
    return made


def _index(kind: str, title: str, entries: list[dict[str, Any]]) -> str:
    """Returns the page that lists all norms or all schemes. `entries` are their entries in Rust's tables."""
    rows = [(f"[`{e['name']}`]({e['name']}.md)", equations.render(e["equation"]), e["source"]) for e in entries]
    option = "norm" if kind == "norms" else "residual"
    about = f'`--{option} NAME` on the command line, `{option}="NAME"` in Python. [Names](../names.md) has the'
    about += " initialisations and presets, too; the [specification](../spec.md) its notation."
    return f"# {title}\n\n{about}\n\n{table(('name', 'definition', 'source'), rows)}"


_ANCHORS = {"Initialisations": "init-", "Parametrisations": "parametrisation-", "Presets": "preset-"}
"""Prefixes of anchors, by section. They keep anchors apart: `deepnorm` is both a scheme and an initialisation."""


def overview(page: str) -> str:
    """Returns docs/names.md with drawn definitions and an anchor for each name. Norms and schemes link to their
    pages."""
    homes = links.homes()

    def section(match: re.Match[str]) -> str:
        """Returns a section of the page with its table changed."""
        title, text = match[1], match[2]

        def row(cells: re.Match[str]) -> str:
            """Returns the first two cells of a row, name and definition, with anchor, link and drawn equation."""
            name, definition = cells[1], cells[2]
            anchor = f'<a id="{_ANCHORS.get(title, "")}{name}"></a>' if " " not in name else ""
            has_page = title in KINDS.values()
            shown = f"[`{name}`]({homes[name]})" if has_page else f"`{name}`"
            drawn = definition if title == "Presets" else equations.render(definition)
            return f"| {anchor}{shown} | {definition if '<math' not in drawn else drawn} |"

        return f"## {title}\n" + re.sub(r"^\| `([^`]+)` \| (.*?) \|", row, text, flags=re.M)

    return re.sub(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", section, page, flags=re.M | re.S)


def _head(entry: dict[str, Any]) -> list[str]:
    """Returns the parts with which the page of a norm or scheme begins: definition, papers, comparisons."""
    parts = [f"# `{entry['name']}`", f'<div class="equation">{equations.render(entry["equation"])}</div>']
    papers = spec.papers(entry["source"], entry["name"])
    parts.append(f"Source: {_with_code(entry['source'])}." + "".join(f"\n\n- {_linked(paper)}" for paper in papers))
    parts.append(comparisons(entry["name"]))
    return parts


def comparisons(name: str) -> str:
    """Returns sentences about the other implementations with which this one of `name` was compared."""
    rows = [row for row in results("authors") if row["name"] == name]
    if not rows:
        return "Compared only with this project's second implementation in plain PyTorch (`tests/reference`)."
    ways = {"authors": "the authors' code (`tests/authors`)", "library": "another implementation"}
    by_kind = {whose: [_compared(row) for row in rows if row["whose"] == whose] for whose in ways}
    return " ".join(f"Compared with {ways[whose]}: {'; '.join(some)}." for whose, some in by_kind.items() if some)


def _compared(row: dict[str, Any]) -> str:
    """Returns a sentence about one comparison, which is a row of benches/results/authors.csv."""
    is_version = "." in row["commit"]  # a commit has no dot
    where = f"version {row['commit']}" if is_version else f"commit {row['commit'][:7]}"
    sizes = ", ".join(f"{what} {row[what]}" for what in ("outputs", "gradients") if row[what])
    largest = f". Largest differences: {sizes}" if sizes else ""
    return f"[{row['repository']}](https://github.com/{row['repository']}) at {where}, in f64: {row['what']}{largest}"


_CODE = {"nanochat": "karpathy/nanochat", "transformers": "huggingface/transformers"}
"""Repositories whose code defines a norm or scheme, if no paper defines it."""


def _with_code(source: str) -> str:
    """Returns a source with links to the repositories that it names."""
    for name, repository in _CODE.items():
        source = re.sub(rf"\b{name}\b(?!-)", f"[{name}](https://github.com/{repository})", source, count=1)
    return source


def _linked(paper: str) -> str:
    """Returns a paper's line with its address as a link."""
    paper = re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", paper)
    return re.sub(r"(?<!\()(https://\S+)", r"<\1>", paper)


def _specification(name: str) -> list[str]:
    """Returns the section of docs/spec.md about a name, with a heading and a link; an empty list if there is none."""
    section = spec.section(name)
    if section is None:
        return []
    anchor, text = section
    # Relative links are changed, because the text of the specification is shown on a page in another folder.
    text = re.sub(r"\]\((#[\w-]+)\)", r"](../spec.md\1)", text)
    text = re.sub(r"\]\((results[\w-]*\.md)", r"](../\1", text)
    text = text.replace("](names.md", "](../names.md").replace("](roadmap.md", "](../roadmap.md")
    return ["## Definition", equations.blocks("\n\n" + text + "\n\n").strip(),
            f"[The specification](../spec.md#{anchor}) has the notation and further rules."]  # fmt: skip


def notes(name: str) -> list[str]:
    """Returns the section of docs/notes.md about a name, under a heading; an empty list if there is none."""
    match = re.search(rf"^## `{re.escape(name)}`\n(.*?)(?=^## |\Z)", NOTES.read_text(encoding="utf-8"), re.M | re.S)
    if match is None:
        return []
    return ["## Where it helps and fails", re.sub(r"\]\(([\w-]+\.md)", r"](../\1", match[1]).strip()]


def options(name: str, kind: str) -> list[config.Field]:
    """Returns the options of `TransformerConfig` that belong to a norm or scheme: their names begin with its name. An
    option of another norm, or `groupscaling`, also belongs to a norm that its help names."""
    # The longest name that fits owns an option: powernorm-v comes before powernorm.
    names = sorted((e["name"] for e in config.tables()[kind]), key=len, reverse=True)
    belonging = []
    for field in config.TransformerConfig.FIELDS:
        if field.group != "norm and residual" or field.name in _CHOOSERS:
            continue
        owner = next((n for n in names if field.name.startswith(n.replace("-", "_") + "_")), None)
        is_named = re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", field.help) is not None
        is_for_norms = field.name == "groupscaling" or (owner is not None and kind == "norms")
        if owner == name or (kind == "norms" and is_named and is_for_norms):
            belonging.append(field)
    return belonging


def option_table(fields: list[config.Field]) -> str:
    """Returns a table of options with type, default and help."""
    rows = [(f"`{f.name}`", _type(f), f"`{f.default!r}`", _escaped(f.help)) for f in fields]
    return table(("option", "type", "default", "what"), rows)


def _type(field: config.Field) -> str:
    """Returns an option's type as text, or the values that it may have."""
    kind = ", ".join(f"`{choice}`" for choice in field.choices) or field.kind
    return kind + (", or none" if field.optional else "")


def _escaped(text: str) -> str:
    """Returns a help text, which is plain text, escaped for Markdown."""
    return re.sub(r"([*_<])", r"\\\1", text)


def _norm(entry: dict[str, Any], folder: Path) -> str:
    """Returns the page of a norm, from its entry in Rust's tables. `folder` is not used; `_residual` has the same
    arguments."""
    name, module = entry["name"], entry["module"]
    more = f"{_MORE[name]}\n" if name in _MORE else ""
    call = f"nfnn.{module}(64)" if module in nfnn.__all__ else f'nfnn.norm_class("{name}")(64)'
    code = f"""\
import torch
import normformer_rs as nfrs
from normformer_rs import nn as nfnn

norm = {call}
print(norm)
y = norm(torch.randn(8, 10, 64))

model = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
print(nfrs.swap_norms(model, "{name}"))
{more}"""
    parts = [*_head(entry), "## Example", shown(code)]
    parts.append(f'In the training loop: `--norm {name}`, or `normformer_rs.TransformerConfig(norm="{name}")`.')
    parts.append(f"With fairseq: `normformer-rs fairseq train … --norm {name}`.")
    parts += _specification(name) + notes(name)
    parts += ["## Options", f"Options of {module} in `normformer_rs.nn`:", arguments.rows(nfnn.norm_class(name))]
    if fields := options(name, "norms"):
        parts += ["Options of the training loop and of `normformer_rs.TransformerConfig`:", option_table(fields)]
    kept = [(f"`{k['name']}`", what, _shape(k["shape"]), k["start"])
            for what, key in (("parameter", "parameters"), ("buffer", "buffers")) for k in entry[key]]  # fmt: skip
    parts += ["## Parameters and buffers", table(("name", "what", "shape", "at the start"), kept)]
    rows = [(r["encoder_norm"], r["bleu"], r["train_nll"], r["valid_nll"]) for r in results("pn-table1-here")]
    if any(row[0] == name for row in rows):
        rows = [tuple(f"**{cell}**" for cell in row) if row[0] == name else row for row in rows]
        parts += ["## Measured", table(("encoder's norm", "BLEU", "training NLL", "validation NLL"), rows)]
        parts.append(
            "[Multi30k, 2,500 updates, one seed](../results-training.md#the-encoders-norms-exchanged-as-in-pn-table-1)"
        )
    return "\n\n".join(parts) + "\n"


def _shape(shape: str | list[int | str]) -> str:
    """Returns the shape of a parameter as text, where d is the norm's width. `shape` is a list of sides or the name of
    a shape."""
    if not isinstance(shape, str):
        return f"({', '.join('d' if side == 'width' else str(side) for side in shape)})"
    return {"one": "(1,)", "width": "(d,)", "column": "(1, d, 1, 1)"}[shape]


# A last line of the example, for names that need a call besides the swap.
_MORE = {
    "admin": "nfnn.profile(model, torch.randn(2, 5, 64))  # once, before training: sets ω",
    "prepbn": "nfnn.set_num_updates(model, 1000)       # t; an optimizer of torch moves it by itself",
    "prores": "nfnn.set_num_updates(model, 1000)       # t; an optimizer of torch moves it by itself",
    "branchnorm": "nfnn.set_num_updates(model, 1000)       # t; an optimizer of torch moves it by itself",
}


def _residual(entry: dict[str, Any], folder: Path) -> str:
    """Returns the page of a residual scheme, from its entry in Rust's tables. Its picture is written to
    `folder`/images."""
    name = entry["name"]
    more = f"{_MORE[name]}\n" if name in _MORE else ""
    code = f"""\
import torch
import normformer_rs as nfrs
from normformer_rs import nn as nfnn

layer = nfnn.TransformerEncoderLayer(64, 4, 128, residual="{name}", batch_first=True)
encoder = nfnn.TransformerEncoder(layer, 2)
y = encoder(torch.randn(2, 5, 64))

model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)
print(nfrs.swap_residuals(model, "{name}"))
{more}"""
    parts = [*_head(entry), "## Example", shown(code)]
    parts.append(f'In the training loop: `--residual {name}`, or `normformer_rs.TransformerConfig(residual="{name}")`.')
    parts.append(f"With fairseq: `normformer-rs fairseq train … --residual {name}`.")
    parts += _specification(name) + notes(name)
    fields = options(name, "residuals")
    parts += ["## Options", option_table(fields) or "This scheme has no options."]
    rows = [(depth, f"{float(r['lr']):g}", r["verdict"], r["train_nll"], r["valid_nll"], r["largest_grad_norm"])
            for depth, table_name in _DEPTHS for r in results(table_name) if r["residual"] == name]  # fmt: skip
    if rows:
        head = ("layers", "learning rate", "verdict", "training NLL", "validation NLL", "largest gradient norm")
        parts += ["## Measured", "Multi30k, d 64, constant rate without warm-up, one seed; NLL in nats per token. "
                  "[18+18 layers](../results-training.md#1818-layers): 600 updates; "
                  "[50+50](../results-training.md#5050-layers): 300. "
                  "[The verdicts](../spec.md#verdicts).", table(head, rows)]  # fmt: skip
    sources = [(depth, RESULTS / f"{table_name}-gradients.csv") for depth, table_name in _DEPTHS]
    picture = folder / "images" / f"gradients-{name}.png"
    if figures.scheme(name, sources, picture):
        parts.append(f"![gradient norms of the first 100 updates: {name}, the other schemes in grey]"
                     f"(../images/{picture.name})")  # fmt: skip
    return "\n\n".join(parts) + "\n"
