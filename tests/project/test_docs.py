"""What the documentation shows works: its Python, its commands, docstrings' examples, the notebooks."""

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

import normformer_rs
from normformer_rs import cli
from normformer_rs._optional import available
from normformer_rs.commands.train import plan_of
from normformer_rs.study import Study

sys.path.insert(0, str(Path(__file__).parents[2]))
from docs.generate import notebooks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# the last two need packages that the wheel does without
WITHOUT = ("_core", "fairseq_plugin")
NAMES = [m.name.removeprefix("normformer_rs.") for m in pkgutil.walk_packages(normformer_rs.__path__, "normformer_rs.")]
MODULES = [name for name in NAMES if not name.startswith(WITHOUT) and not name.endswith("__main__")]


WRITTEN = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
"""The pages that are written by hand."""


def of_pages(*kinds: str) -> list:
    """The pages' blocks of code of these kinds: page, text, and the output that stands below it, if any."""
    found = []
    for name in WRITTEN:
        text = (ROOT / name).read_text()
        for match in re.finditer(r"^```(\S*).*?\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", text, re.M | re.S):
            line = text[: match.start()].count("\n") + 1
            if match[1] in kinds:
                found.append(pytest.param(name, match[2], match[3], id=f"{name}:{line}"))
    return found


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # of torch.export.load
@pytest.mark.parametrize("page, code, output", of_pages("python"))
@pytest.mark.full
def test_python_of_the_pages(page, code, output, monkeypatch, tmp_path):
    """It runs, and prints what stands below it."""
    monkeypatch.chdir(tmp_path)  # a page may write into the folder where it runs
    if "import wandb" in code:  # which no test installs
        monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, page, "exec"), {})
    if output is not None:
        assert printed.getvalue() == output


def test_readme_begins_with_a_swap_and_what_it_prints():
    begin = (ROOT / "README.md").read_text().partition("## ")[0]
    assert re.search(r"```python\n.*swap_norms.*```\n\n```text\nswap_residuals to", begin, re.S)
    assert re.search(r"!\[[^\]]*\]\(https://raw", begin)


def test_the_first_sentence_counts_the_names():
    tables = normformer_rs.tables()
    counts = {word: len(tables[table]) for word, table in FIRST.items()}
    for page in ("README.md", "docs/index.md"):
        said = re.search(r"^(\d+) (\w+), (\d+) residual (\w+) and (\d+) (\w+)", (ROOT / page).read_text(), re.M)
        assert {said[2 * i]: int(said[2 * i - 1]) for i in (1, 2, 3)} == counts, page


FIRST = {"normalisations": "norms", "schemes": "residuals", "initialisations": "inits"}


def test_readmes_links_are_absolute_and_lead_to_files():
    """An index's page shows README without the project's files."""
    home = PROJECT["urls"]["Repository"]
    raw = home.replace("github.com", "raw.githubusercontent.com")
    for link in re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text()):
        if link == f"{home}/releases":
            continue
        path = re.fullmatch(rf"(?:{home}/blob|{raw})/main/([^#]+)(?:#.*)?", link)
        assert path and (ROOT / path[1]).exists(), link


def test_readmes_ratios_are_in_the_rows_they_lead_to():
    """As they are, or as the ratio of two of a row's numbers."""
    begin, results = (
        (ROOT / "README.md").read_text().partition("## ")[0],
        (ROOT / "docs" / "results-speed.md").read_text(),
    )
    ratios = re.findall(r"\[([\d.]+)\]\([^)]*/docs/results-speed\.md#([\w-]+)\)", begin)
    assert len(ratios) == 5
    for ratio, anchor in ratios:
        (row,) = re.findall(rf'^\|.*id="{anchor}".*$', results, re.M)
        numbers = [float(cell) for cell in re.findall(r"(?<= )[\d.]+(?= \|)", row)]
        found = [*numbers, *(a / b for a in numbers for b in numbers if b)]
        assert any(abs(float(ratio) - number) < 0.005 for number in found), f"{ratio} is not in {row}"


@pytest.mark.parametrize("page, code, output", of_pages("", "console", "bash"))
def test_commands_of_the_pages(page, code, output):
    """Their flags exist. What has … in it is no whole command."""
    lines = re.sub(r"\\\n *", "", code).splitlines()
    for line in lines:
        command = re.split(r" +#| *&& ", line)[0]
        if command.startswith("normformer-rs ") and "…" not in command:
            cli._parser().parse_args(shlex.split(command)[1:])


@pytest.mark.parametrize("page, code, output", of_pages("toml"))
def test_files_of_options_of_the_pages(page, code, output, tmp_path):
    """The options exist, their values are allowed; those that are commented out, too."""
    if "arms." in code:
        path = tmp_path / "study.toml"
        path.write_text(code)
        assert len(Study.read(path).cells) > 1 and len(code.splitlines()) <= 15
        return
    for text in (code, re.sub(r"(?m)^# (?=\w+ = )", "", code)):
        path = tmp_path / "options.toml"
        path.write_text(text)
        plan = plan_of(cli._parser().parse_args(["train", "--config", str(path)]))
        assert plan.training.updates > 0 and plan.output


def test_every_entry_of_the_tables_is_documented():
    readme, names = (ROOT / "README.md").read_text(), (ROOT / "docs" / "names.md").read_text()
    for kind in ("norms", "residuals", "inits", "others"):
        for entry in normformer_rs.tables()[kind]:
            assert f"`{entry['name']}`" in readme or "profiling" in entry["name"], f"README lacks {entry['name']}"
            assert f"| `{entry['name']}` | {entry['equation'][:20]}" in names


@pytest.mark.parametrize("name", ["", *MODULES])
@pytest.mark.one_in(test=5)
def test_docstrings(name):
    module = importlib.import_module(f"normformer_rs.{name}".rstrip("."))
    assert doctest.testmod(module).failed == 0


SCRIPTS = [pytest.param(path, id=path.stem) for path in sorted((ROOT / "notebooks").glob("*.py"))]


@pytest.mark.parametrize("path", SCRIPTS)
def test_the_notebook_is_its_script_with_outputs(path):
    """Small, without this machine's paths; it says before a picture what to look for and after it what it shows."""
    jupytext, nbformat = pytest.importorskip("jupytext"), pytest.importorskip("nbformat")
    file = path.with_suffix(".ipynb")
    assert file.exists(), f"make it: python -m docs.generate notebooks {path.stem}"
    text = file.read_text()
    kept, script = nbformat.reads(text, as_version=4), jupytext.read(path)
    told, wanted = (
        [(cell.cell_type, cell.source, cell.metadata.get("tags")) for cell in notebook.cells]
        for notebook in (kept, script)
    )
    assert told == wanted, f"{file.name} is old: python -m docs.generate notebooks {path.stem}"
    assert len(text) <= notebooks.LARGEST and not re.search(r"/(?:tmp|root|home|work)/", text)
    shown = [any("image/png" in output.get("data", {}) for output in cell.get("outputs", [])) for cell in kept.cells]
    for number in (number for number, has_picture in enumerate(shown) if has_picture):
        around = [kept.cells[i].cell_type for i in range(number - 1, min(number + 2, len(shown)))]
        assert around.count("markdown") == 2 or kept.cells[number - 2].cell_type == "markdown", f"cell {number}"
    code = [cell for cell in kept.cells if cell.cell_type == "code"]
    assert code[-1].outputs, "the last cell shows nothing"
    assert max(len(cell.outputs) for cell in code) < 10, "a bar that cannot be redrawn"
    assert all(output.output_type != "error" for cell in code for output in cell.outputs)


@pytest.mark.parametrize("path", SCRIPTS)
@pytest.mark.long
def test_the_notebook(path):
    """Executed anew it gives what is kept, but for what floats decide."""
    nbformat, _ = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    if path.stem == "fairseq" and not available("fairseq"):
        pytest.skip("fairseq is not installed: make fairseq")
    kept = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    for number, (old, new) in enumerate(zip(kept.cells, notebooks.executed(path).cells, strict=True)):
        assert notebooks.alike(new) == notebooks.alike(old), f"cell {number}"


PUBLIC = ("normformer_rs", "normformer_rs.nn", "normformer_rs.surgery", "normformer_rs.analysis")


@pytest.mark.parametrize("module", PUBLIC)
@pytest.mark.one_in(test=2)
def test_every_public_name_is_explained_and_exercised(module):
    """It has a docstring, and a test names it, or its docstring has an example, or it is the type of a result."""
    home = importlib.import_module(module)
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    code = "".join(path.read_text() for path in (ROOT / "python").rglob("*.py"))
    own = [n for n in vars(home) if n[0] != "_" and getattr(getattr(home, n), "__module__", "") == module]
    for name in getattr(home, "__all__", own):
        if name.startswith("__"):
            continue
        document = getattr(home, name).__doc__
        assert document, f"{module}.{name} has no docstring"
        found = re.search(rf"\b{name}\b", tests) or ">>>" in document or re.search(rf"(->|\w:) [^\n]*\b{name}\b", code)
        assert found, f"{module}.{name} is in no test"
