"""Arguments of a callable as rows: name, type, default, meaning. Meanings come from docstrings."""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from normformer_rs import nn as nfnn

from .tables import table

HEAD = ("argument", "type", "default", "what")
_SHARED = {
    "device": "The device of what it learns, as in torch.nn.",
    "dtype": "The type of what it learns, as in torch.nn.",
    "elementwise_affine": "Whether it has γ and, with `bias`, β.",
    "bias": "Whether it has β.",
    "eps": "ε.",
    "x": "The input; its last dimensions are the module's.",
}
"""Arguments that many modules share."""


class Argument(NamedTuple):
    """One row."""

    name: str
    type: str
    default: str
    what: str


def of(value: Any) -> list[Argument]:
    """A callable's arguments, without `self`."""
    meanings = _meanings(value)
    found = []
    for p in parameters(value):
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        kind = "" if p.annotation is p.empty else kind_of(p.annotation)
        default = "" if p.default is p.empty else default_of(p.default)
        if p.kind is p.VAR_KEYWORD:
            found += [Argument(name, "", "", what) for name, what in _keywords(value).items()]
        found.append(Argument(stars + p.name, kind, default, meanings.get(p.name, "")))
    return found


def rows(value: Any) -> str:
    """The arguments as a table without empty columns; empty where there are none."""
    found = [(f"`{a.name}`", _code(a.type), _code(a.default), escape(a.what)) for a in of(value)]
    head, *cells = zip(*(column for column in zip(HEAD, *found) if not found or any(column[1:])))
    return table(head, cells)


def parameters(value: Any) -> list[inspect.Parameter]:
    """Of the signature, without `self`; none where Python knows no signature."""
    try:
        found = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p for p in found if p.name != "self"]


def kind_of(annotation: Any) -> str:
    """An annotation without the modules of its names."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text).replace("NoneType", "None")


def default_of(default: Any) -> str:
    """A default as Python writes it, a function or class by its name."""
    return re.sub(r"<(?:function|class) '?(?:[\w.]*\.)?(\w+).*>", r"\1", repr(default))


def escape(text: str) -> str:
    """Plain text for Markdown: what stands in backticks stays."""
    parts = re.split(r"(``[^`]+``|`[^`]+`)", text)
    return "".join(part if i % 2 else re.sub(r"([*_<>\[\]])", r"\\\1", part) for i, part in enumerate(parts))


def fields(kind: type) -> dict[str, str]:
    """A dataclass's or a named tuple's fields, with the strings that stand below them."""
    if not (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
        return {}
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for item, following in zip(tree.body, [*tree.body[1:], None]):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            found[item.target.id] = inspect.cleandoc(str(following.value.value)) if is_text else ""  # type: ignore[union-attr]
    return found


_SECTION = re.compile(r"^(?:Args|Attributes):[ \n](.*(?:\n(?: {4}.*)?)*)", re.M)


_NAMES = re.compile(r"(?:^ {0,4}|(?<=[.] ))((?:\*{0,2}[a-z]\w*, )*\*{0,2}[a-z]\w*):\s", re.M)


def told(document: str) -> dict[str, str]:
    """Names and meanings that a docstring lists under `Args:` or `Attributes:`. One line may list several names."""
    section = _SECTION.search(document)
    text = section[1] if section else ""
    starts = [*_NAMES.finditer(text)]
    ends = [*(start.start() for start in starts[1:]), len(text)]
    return {name.strip(" *"): " ".join(text[start.end() : end].split())
            for start, end in zip(starts, ends) for name in start[1].split(",")}  # fmt: skip


def _keywords(value: Any) -> dict[str, str]:
    """Arguments that a callable takes among `**keywords`, as its docstring names them."""
    found = parameters(value)
    if not any(p.kind is p.VAR_KEYWORD for p in found):
        return {}
    entries = told(inspect.getdoc(value) or "")
    return {name: what for name, what in entries.items() if name not in {p.name for p in found}}


def _meanings(value: Any) -> dict[str, str]:
    """The meaning of each argument, from the first place that has one."""
    names = [p.name for p in parameters(value)]
    found: dict[str, str] = {}
    for place in _places(value, names):
        found |= {name: what for name, what in place.items() if what and name in names and name not in found}
    return found


def _places(value: Any, names: list[str]) -> Iterator[dict[str, str]]:
    """The docstring, a class's fields, what it refers to, prose, and at last torch's module of the same name."""
    document = inspect.getdoc(value) or ""
    yield told(document)
    yield {name: _sentence(document, name) for name in names}
    for other in _referred(document):
        yield told(inspect.getdoc(other) or "")
    if inspect.isclass(value):
        yield fields(value)
        yield told(inspect.getdoc(value.__init__) or "")
        for base in value.__mro__[1:]:
            if base.__module__.startswith("normformer_rs"):
                yield told(inspect.getdoc(base) or "")
    owner = _owner(value)
    yield {name: _shape(inspect.getdoc(owner) or "", name) for name in names}
    theirs = getattr(torch.nn, owner.__name__, None) if owner else None
    if theirs and (callable_ := theirs if owner is value else getattr(theirs, value.__name__, None)):
        known = [p.name for p in parameters(callable_)]
        path = f"torch.nn.{callable_.__qualname__}"
        yield {name: f"As in `{path}`." for name in names if name in known}
    if owner and issubclass(owner, torch.nn.Module):
        yield {name: _SHARED[name] for name in names if name in _SHARED}


def _owner(value: Any) -> type | None:
    """The class itself, or that of a method."""
    if inspect.isclass(value):
        return value
    found = getattr(sys.modules.get(value.__module__), value.__qualname__.partition(".")[0], None)
    return found if inspect.isclass(found) else None


def _shape(document: str, name: str) -> str:
    """A tensor's shape, of the part `Shapes:` of its class's docstring."""
    text = re.search(r"^Shapes: (.*(?:\n.+)*)", document, re.M)
    found = re.search(rf"\b{re.escape(name)}`? (\([^)]*\))", text[1]) if text else None
    return f"Shape {found[1]}." if found else ""


def _referred(document: str) -> list[type]:
    """Classes of `normformer_rs.nn` whose arguments a docstring says it has."""
    match = re.search(r"^(?:.*\. )?(?:Args|Arguments)\b.*", document, re.M)
    named = re.findall(r"\w+", match[0]) if match else []
    return [getattr(nfnn, name) for name in named if name in nfnn.__all__ and inspect.isclass(getattr(nfnn, name))]


def _sentence(document: str, name: str) -> str:
    """The first sentence of the prose that has the name as code."""
    prose = re.split(r"^(?:Args|Attributes|>>>)", document, maxsplit=1, flags=re.M)
    text = " ".join(re.sub(r"^(?:>>>|\.\.\.).*$", "", " ".join(prose[:1]), flags=re.M).split())
    sentences = re.split(r"(?<=[.:;]) (?=[A-Z`])", text)
    return next((sentence for sentence in sentences if f"`{name}`" in sentence), "")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""
