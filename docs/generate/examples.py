"""Runs the code of examples when the pages are generated, and shows the code with its output."""

import contextlib
import io
import re
import warnings
from functools import cache

from .spec import ROOT


def run(code: str, name: str = "example") -> str:
    """Runs the code and returns its output. A warning is raised like an error, so that no pages are generated."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        exec(compile(code, name, "exec"), {"__name__": name})
    return printed.getvalue()


def shown(code: str) -> str:
    """Returns the code and its output, as Markdown."""
    printed = run(code).rstrip()
    return f"```python\n{code.rstrip()}\n```" + (f"\n\n```text\n{printed}\n```" if printed else "")


@cache
def of_names() -> dict[str, str]:
    """Returns the code in docs/examples.md for each name in the head of a section."""
    code_of = {}
    text = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        head, _, rest = section.partition("```python\n")
        code_of |= dict.fromkeys(re.findall(r"`(normformer_rs[\w.]+)`", head), rest.partition("```")[0])
    return code_of
