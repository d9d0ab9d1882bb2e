"""Writes all pages: the generated ones, and the handwritten ones with their links changed to places in the site."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from normformer_rs import config

from . import api, commands, equations, files, links, names, notebooks, reproductions
from .spec import ROOT

WRITTEN = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
           "tests/README.md": "tests.md"}  # fmt: skip
"""Handwritten pages outside docs/, with their names in the site."""
CONTENTS: list[tuple[str, list[str]]] = [
    (
        "Start",
        [
            "index.md",
            "overview.md",
            "install.md",
            "swap.md",
            "swap-train.md",
            "swap-convert.md",
            "swap-limits.md",
            "models.md",
            "own.md",
            "own-reference.md",
            "train.md",
            "language-models.md",
            "fairseq.md",
        ],
    ),
    ("Notebooks", ["notebooks/"]),
    ("Norms", ["norms/"]),
    ("Residual schemes", ["residuals/"]),
    ("Reference", ["names.md", "spec.md", "notes.md", "commands.md", "examples.md", "api/"]),
    (
        "Evidence",
        [
            "results.md",
            "results-training.md",
            "results-speed.md",
            "results-checks.md",
            "compare.md",
            "reproduce.md",
            "reliability.md",
            "data.md",
        ],
    ),
    (
        "Project",
        ["architecture.md", "files.md", "tests.md", "cuda.md", "roadmap.md", "contributing.md", "changelog.md"],
    ),
]
"""The entries of the site's menu. An entry is a page, or a folder that stands for all of its pages. Missing pages are
left out."""


def write(output: Path) -> dict[str, str]:
    """Writes `output`/pages and `output`/mkdocs.yml. Returns the text of the pages by path."""
    folder = output / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    pages = {WRITTEN.get(path, Path(path).name): _moved(path, folder) for path in _sources()}
    pages["spec.md"] = equations.blocks(pages["spec.md"])
    pages["names.md"] = names.overview(pages["names.md"])
    pages["commands.md"] = commands.page()
    pages["files.md"] = files.page()
    pages["reproduce.md"] = reproductions.entries(pages["reproduce.md"], folder)
    pages["overview.md"] = re.sub(r"^# .*", "# Overview", pages["overview.md"])
    pages |= names.pages(folder) | api.pages() | notebooks.pages(folder)
    pages = {name: text if name == "names.md" else links.linked(name, text) for name, text in pages.items()}
    pages = {name: equations.searchable(text) for name, text in pages.items()}
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    settings = {
        "INHERIT": "../mkdocs.yml",
        "docs_dir": "pages",
        "site_dir": "html",
        "theme": {"custom_dir": "../docs/theme"},
        "nav": menu(pages),
    }
    output.joinpath("mkdocs.yml").write_text(json.dumps(settings, indent=1, ensure_ascii=False), encoding="utf-8")
    return pages


def _sources() -> list[str]:
    """Returns the paths of all handwritten pages."""
    return [*WRITTEN, *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


def menu(pages: dict[str, str]) -> list[Any]:
    """Returns the `nav` of mkdocs.yml. Errors: ValueError if CONTENTS does not list a page."""
    sections: list[Any] = []
    listed = set()
    for title, entries in CONTENTS:
        inside: list[Any] = []
        for entry in entries:
            if entry.endswith("/"):
                members = sorted((name for name in pages if name.startswith(entry)), key=_order)
                inside += [
                    {_title(name, pages[name]): name} if not name.endswith("index.md") else name for name in members
                ]
                listed.update(members)
            elif entry in pages:
                inside.append({"Start": entry} if entry == "index.md" else {_title(entry, pages[entry]): entry})
                listed.add(entry)
        if inside:
            sections.append({title: inside})
    if missing := set(pages) - listed:
        raise ValueError(f"pages that pages.CONTENTS does not list: {', '.join(sorted(missing))}")
    return sections


def _order(name: str) -> tuple[int, Any]:
    """Returns a page's sort key in its folder: the index comes first, norms and schemes are in the tables' order,
    notebooks in that of `notebooks.ORDER`, other pages by name."""
    tables = [entry["name"] for kind in ("norms", "residuals") for entry in config.tables()[kind]]
    stem = Path(name).stem
    if stem == "index":
        return 0, ""
    if name.startswith("notebooks/"):
        return 1, f"{notebooks.order(stem):04} {stem}"
    return 1, f"{tables.index(stem):04}" if stem in tables else stem


def _title(name: str, text: str) -> str:
    """Returns the heading of the page `name`. Errors: ValueError if it has none."""
    match = re.search(r"^# (.+)$", text, re.M)
    if match is None:
        raise ValueError(f"{name} has no heading")
    return match[1].replace("`", "")


_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")
_ABSOLUTE = re.compile(
    r"https://(?:github\.com/[\w-]+/normformer_rs/blob|raw\.githubusercontent\.com/[\w-]+/normformer_rs)/main/(.*)"
)
"""Matches the absolute addresses with which README links to files of the project. They are absolute, so that the links
also work on the page of a package index."""


def _moved(source: str, folder: Path) -> str:
    """Returns a page's text with its links changed to places in the site. Errors: ValueError for a link that leads
    nowhere."""
    text = (ROOT / source).read_text(encoding="utf-8")
    text = _lists(re.sub(r"^<!--.*?-->\n+", "", text, flags=re.S))
    # The word after a block's language is its file, which zensical shows as the block's title.
    text = re.sub(r"(?m)^( *```\w+) (\S+)$", r'\1 title="\2"', text)

    def link(match: re.Match[str]) -> str:
        """Returns a link with its target in the site. A picture is copied there."""
        target, _, anchor = match[2].partition("#")
        inside = _ABSOLUTE.fullmatch(target)
        if not target or ("://" in target and not inside):
            return match[0]
        path = ((ROOT / inside[1]) if inside else (ROOT / source).parent.joinpath(target)).resolve()
        if not path.exists():
            raise ValueError(f"{source}: {match[0]} leads nowhere")
        name = path.relative_to(ROOT).as_posix()
        if path.suffix == ".png":
            folder.joinpath("images").mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / "images" / path.name)
            return f"{match[1]}(images/{path.name})"
        if path.suffix == ".md":
            page = WRITTEN.get(name, path.name)
        elif path.parent == notebooks.NOTEBOOKS:
            page = f"notebooks/{path.stem}.md"
        elif (module := _module(name)) in api.MODULES:
            page = f"api/{module}.md"
        elif inside:
            return match[0]  # an absolute link to a file that is not in the site stays
        else:
            raise ValueError(f"{source}: {match[0]} is no page of the site: name the file without a link")
        return f"{match[1]}({page}{'#' + anchor if anchor else ''})"

    # Code may contain text that looks like a link, so code is not changed.
    parts = re.split(r"(^ *```.*?^ *```$|`[^`\n]+`)", text, flags=re.M | re.S)
    return "".join(part if i % 2 else _LINK.sub(link, part) for i, part in enumerate(parts))


def _module(path: str) -> str:
    """Returns the name of the module in a Python file."""
    return path.removeprefix("python/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _lists(text: str) -> str:
    """Returns the text with the lines of numbered items indented by four spaces, which zensical needs. The sources have
    three, which is enough for GitHub."""
    lines, is_item = [], False
    for line in text.splitlines():
        if re.match(r"\d+\. ", line):
            is_item = True
        elif line and not line.startswith("   "):
            is_item = False
        lines.append(" " + line if is_item and line.startswith("   ") else line)
    return "\n".join(lines) + "\n"
