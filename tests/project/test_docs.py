"""What the documentation shows works: README's Python, docstrings' examples, the notebook."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import normformer_rs

ROOT = Path(__file__).parents[2]
# the last two need packages that the wheel does without
WITHOUT = ("_core", "fairseq_plugin")
NAMES = [m.name.removeprefix("normformer_rs.") for m in pkgutil.walk_packages(normformer_rs.__path__, "normformer_rs.")]
MODULES = [name for name in NAMES if not name.startswith(WITHOUT) and not name.endswith("__main__")]


def test_readmes_python():
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_every_entry_of_the_tables_is_documented():
    readme, names = (ROOT / "README.md").read_text(), (ROOT / "docs" / "names.md").read_text()
    for kind in ("norms", "residuals", "inits", "others"):
        for entry in normformer_rs.tables()[kind]:
            assert f"`{entry['name']}`" in readme or "profiling" in entry["name"], f"README lacks {entry['name']}"
            assert f"| `{entry['name']}` | {entry['equation'][:20]}" in names


@pytest.mark.parametrize("name", ["", *MODULES])
def test_docstrings(name):
    module = importlib.import_module(f"normformer_rs.{name}".rstrip("."))
    assert doctest.testmod(module).failed == 0


def test_the_notebook(tmp_path):
    jupytext, nbclient = pytest.importorskip("jupytext"), pytest.importorskip("nbclient")
    notebook = jupytext.read(ROOT / "notebooks" / "quickstart.py")
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert "→" in printed
    assert max(len(cell.get("outputs", [])) for cell in notebook.cells) < 10, "a bar that cannot be redrawn"


PUBLIC = ("normformer_rs", "normformer_rs.nn", "normformer_rs.surgery", "normformer_rs.analysis")


@pytest.mark.parametrize("module", PUBLIC)
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
