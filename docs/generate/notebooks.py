"""Executes the notebooks, writes them with their outputs beside their scripts, and turns them into pages.

`python -m docs.generate notebooks [NAME …]` executes notebooks/NAME.py and writes notebooks/NAME.ipynb, without
paths of the machine, times and execution counts.
"""

import base64
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .spec import ROOT

NOTEBOOKS = ROOT / "notebooks"
ORDER = ("quickstart", "huggingface", "depth", "powernorm", "fairseq", "own_norm")
TIMEOUT = 600
"""The maximum time for a cell, in seconds."""
LARGEST = 300_000
"""The maximum size of a notebook, in bytes."""


def pages(folder: Path) -> dict[str, str]:
    """Returns the pages by path. Pictures are written to `folder`/images."""
    paths = sorted(NOTEBOOKS.glob("*.ipynb"), key=lambda path: (order(path.stem), path.stem))
    return {f"notebooks/{path.stem}.md": page(path, folder) for path in paths}


def order(name: str) -> int:
    """Returns the place of a notebook in the menu. A notebook that ORDER does not list comes last."""
    return ORDER.index(name) if name in ORDER else len(ORDER)


def write(names: Sequence[str]) -> None:
    """Executes the notebooks with these names, or all if no name is given, and writes them."""
    import nbformat

    for script in sorted(NOTEBOOKS.glob("*.py")):
        if not names or script.stem in names:
            nbformat.write(executed(script), script.with_suffix(".ipynb"))


def write_texts() -> None:
    """Copies the text and tags of the scripts into the notebooks, and keeps their outputs. Errors: ValueError if a
    script's code has changed."""
    import jupytext
    import nbformat

    for script in sorted(NOTEBOOKS.glob("*.py")):
        kept, new = nbformat.read(script.with_suffix(".ipynb"), as_version=4), jupytext.read(script)
        old_code, new_code = (
            [cell.source for cell in notebook.cells if cell.cell_type == "code"] for notebook in (kept, new)
        )
        if old_code != new_code or len(kept.cells) != len(new.cells):
            raise ValueError(f"{script.name}: its code has changed: python -m docs.generate notebooks {script.stem}")
        for old, cell in zip(kept.cells, new.cells):
            old.source = cell.source
            old.metadata = _tags(cell)
        nbformat.write(kept, script.with_suffix(".ipynb"))


def executed(script: Path) -> Any:
    """Executes a script, and returns it as a notebook with its outputs, without paths, times and execution counts."""
    import jupytext
    import nbclient

    notebook = jupytext.read(script)
    with tempfile.TemporaryDirectory() as work:
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        client = nbclient.NotebookClient(notebook, timeout=TIMEOUT, resources={"metadata": {"path": work}})
        client.execute(env=environment)
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"{script.stem}-{number}".replace("_", "-")
        cell.metadata = _tags(cell)
        if cell.cell_type == "code":
            cell.outputs = _stable(cell.outputs)
            cell.execution_count = None
    return notebook


def _tags(cell: Any) -> dict[str, Any]:
    """Returns those metadata of a cell that are kept: its tags."""
    return {key: value for key, value in cell.metadata.items() if key == "tags"}


def _stable(outputs: list[Any]) -> list[Any]:
    """Returns a cell's outputs in a form that does not change from run to run. Parts of a stream are joined, progress
    bars and paths of the machine are removed, and pictures are made small."""
    kept: list[Any] = []
    for output in outputs:
        if output.output_type == "stream":
            text = "\n".join(line for line in _last_states(output.text).split("\n") if "it/s]" not in line)
            if kept and kept[-1].output_type == "stream" and kept[-1].name == output.name:
                kept[-1].text += text
            elif text.strip():
                output.text = text
                kept.append(output)
            continue
        data = output.get("data", {})
        if "application/vnd.jupyter.widget-view+json" in data:
            continue
        if "image/png" in data:
            data["image/png"] = _small(data["image/png"])
        output.metadata = {}
        if "execution_count" in output:
            output.execution_count = None
        for kind, value in data.items():
            if kind.startswith("text/"):
                data[kind] = _ANYWHERE.sub("…", value)
        kept.append(output)
    for output in kept:
        if output.output_type == "stream":
            output.text = _ANYWHERE.sub("…", output.text)
    return kept


_ANYWHERE = re.compile(re.escape(tempfile.gettempdir()) + r"/[\w.-]+")
"""Matches paths of temporary folders."""


def _small(picture: str) -> str:
    """Returns a PNG with 64 colours, which are enough for graphs, and a width of at most 1,100 pixels."""
    import io

    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB").quantize(64)
    if image.width > 1100:
        image = image.convert("RGB").resize((1100, round(image.height * 1100 / image.width))).quantize(64)
    buffer = io.BytesIO()
    image.save(buffer, "png", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def page(path: Path, folder: Path) -> str:
    """Returns a notebook as Markdown. Its pictures are written to `folder`/images."""
    import nbformat

    parts = []
    for number, cell in enumerate(nbformat.read(path, as_version=4).cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.source.strip():
            parts.append(f"```python\n{cell.source}\n```")
            parts += _outputs(cell.outputs, f"{path.stem}-{number}", folder)
        if number == 0:
            parts.append(f"*This page is `notebooks/{path.name}`, which Jupyter opens.*")
    return "\n\n".join(parts) + "\n"


def _outputs(outputs: list[Any], name: str, folder: Path) -> Iterator[str]:
    """Yields the outputs of a cell as Markdown: pictures and tables first, then all text in one block. Pictures are
    written to `folder`/images, with names that begin with `name`."""
    text = ""
    for index, output in enumerate(outputs):
        if output.output_type == "stream":
            text += output.text
            continue
        data = output.get("data", {})
        if "image/png" in data:
            picture = folder / "images" / f"{name}-{index}.png"
            picture.parent.mkdir(parents=True, exist_ok=True)
            picture.write_bytes(base64.b64decode(data["image/png"]))
            yield f"![output](../images/{picture.name})"
        elif "text/html" in data:
            body = re.sub(r"\s*\n\s*", "", data["text/html"])
            yield f'<div class="output">{body}</div>'
        elif "text/plain" in data:
            text += data["text/plain"] + "\n"
    if text.strip():
        yield f"```text\n{_last_states(text).rstrip()}\n```"


def _last_states(text: str) -> str:
    """Returns the text as a terminal shows it at the end: only the last state of a progress bar that overwrites itself
    stays."""
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in plain.split("\n"))


def alike(cell: Any) -> list[tuple[str, str]]:
    """Returns those parts of a cell's outputs that are the same on every machine: their kinds, and texts without
    numbers.

    Lines of progress are left out, too, and so are the texts of a cell tagged `nbval-ignore-output`, which prints the
    output of a trained model.
    """
    stable = []
    for output in cell.get("outputs", []):
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        kinds = output.output_type if output.output_type == "stream" else " ".join(sorted(output.get("data", {})))
        if kinds == "stream":
            text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("update "))
        if "nbval-ignore-output" in cell.metadata.get("tags", ()):
            text = ""
        elif not text.strip():
            continue  # the output had only lines of progress
        stable.append((kinds, re.sub(r"(?:-?[\d.,]*\d(?:e[+-]?\d+)?\.?\s*)+|\s+", _number_or_space, text).strip()))
    return stable


def _number_or_space(match: re.Match[str]) -> str:
    """Returns "#" in place of numbers, a space in place of white space."""
    return "#" if match[0].strip() else " "
