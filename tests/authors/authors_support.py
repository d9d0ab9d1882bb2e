"""The authors' own code, from a checkout that stands outside this repository. None of it is kept here.

NORMFORMER_RS_AUTHORS names a folder of checkouts, each called OWNER+NAME: a git repository, with or without a work
tree. Without it the tests skip.
"""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

FOLDER = os.environ.get("NORMFORMER_RS_AUTHORS")


def source(repository: str, commit: str, path: str) -> str:
    """Returns the text of a file at a commit; skips the test without a checkout."""
    name = repository.replace("/", "+")
    found = [Path(FOLDER, name), Path(FOLDER, name, "repo")] if FOLDER else []
    there = [folder for folder in found if (folder / "HEAD").exists() or (folder / ".git").exists()]
    if not there:
        pytest.skip(f"NORMFORMER_RS_AUTHORS has no checkout of https://github.com/{repository}")
    show = subprocess.run(
        ["git", "-C", str(there[0]), "show", f"{commit}:{path}"], capture_output=True, text=True, check=False
    )
    if show.returncode:
        pytest.fail(f"{there[0]} has no {path} at commit {commit}: {show.stderr.strip()}")
    return show.stdout


def module(
    repository: str, commit: str, path: str, changes: dict[str, str] | None = None, **beside
) -> types.ModuleType:
    """Runs a file as a module. `changes`: texts to replace, each of which must occur (such as a cast to 16 bits);
    `beside`: modules that it imports, by name with __ for the dot, which are there while it runs."""
    text = source(repository, commit, path)
    for old, new in (changes or {}).items():
        assert old in text, f"{repository}'s {path} has no {old!r}"
        text = text.replace(old, new)
    made = types.ModuleType(Path(path).stem)
    names = {name.replace("__", "."): value for name, value in beside.items()}
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        exec(compile(text, f"{repository}/{path}", "exec"), made.__dict__)
    finally:
        for name, value in before.items():
            sys.modules.pop(name) if value is None else sys.modules.update({name: value})
    return made
