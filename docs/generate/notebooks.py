"""The notebooks, executed, as pages with their outputs."""

import base64
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .spec import ROOT

NOTEBOOKS = ROOT / "notebooks"
ORDER = ("quickstart", "huggingface", "depth", "powernorm", "fairseq", "own_norm")
TIMEOUT = 600
"""Seconds for a cell."""


def pages(folder: Path, kept: Path) -> dict[str, str]:
    """The pages by path; pictures are written to `folder`/images. `kept` holds executed notebooks: one is not executed
    again while its text and the package's Python are what they were."""
    paths = sorted(NOTEBOOKS.glob("*.py"), key=lambda path: (order(path.stem), path.stem))
    return {f"notebooks/{path.stem}.md": page(path, folder, kept) for path in paths}


def order(name: str) -> int:
    """The place in the menu; one that is not listed comes last."""
    return ORDER.index(name) if name in ORDER else len(ORDER)


def executed(path: Path, kept: Path) -> Any:
    """The notebook with its outputs."""
    import jupytext
    import nbclient
    import nbformat

    sources = [path, *sorted((ROOT / "python").rglob("*.py")), ROOT / "python" / "normformer_rs" / "_tables.json"]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    stored = kept / f"{path.stem}-{digest}.ipynb"
    if not stored.exists():
        notebook = jupytext.read(path)
        work = kept / "work"
        work.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        client = nbclient.NotebookClient(notebook, timeout=TIMEOUT, resources={"metadata": {"path": str(work)}})
        client.execute(env=environment)
        for old in kept.glob(f"{path.stem}-*.ipynb"):
            old.unlink()
        nbformat.write(notebook, stored)
    return nbformat.read(stored, as_version=4)


def page(path: Path, folder: Path, kept: Path) -> str:
    """One notebook as Markdown."""
    parts = []
    for number, cell in enumerate(executed(path, kept).cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.source.strip():
            parts.append(f"```python\n{cell.source}\n```")
            parts += _outputs(cell.outputs, f"{path.stem}-{number}", folder)
        if number == 0:
            parts.append(f"*Made of `notebooks/{path.name}`, executed when this page was made. A notebook of it: "
                         f"`jupytext --to ipynb notebooks/{path.name}`.*")  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _outputs(outputs: list[Any], name: str, folder: Path) -> Iterator[str]:
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
    """The text as a terminal shows it at the end, where a progress bar has overwritten itself."""
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in plain.split("\n"))
