"""Makes tables of a callable's arguments: name, type, default, meaning. Meanings come from docstrings."""

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
    "device": "The device of the parameters, as in torch.nn.",
    "dtype": "The type of the parameters, as in torch.nn.",
    "elementwise_affine": "Whether it has γ and, with `bias`, β.",
    "bias": "Whether it has β.",
    "eps": "ε.",
    "x": "The input; its last dimensions are the module's.",
}
"""The meanings of arguments that many modules share, used if no docstring gives one."""


class Argument(NamedTuple):
    """One row of the table."""

    name: str
    type: str
    default: str
    what: str


def of(value: Any) -> list[Argument]:
    """Returns the arguments of a callable, without `self`. Those that it takes as `**keywords` stand before these."""
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
    """Returns the arguments as a table without empty columns; "" if there are none."""
    lines = [(f"`{a.name}`", _code(a.type), _code(a.default), escape(a.what)) for a in of(value)]
    columns = [column for column in zip(HEAD, *lines) if not lines or any(column[1:])]  # column[0] is the heading
    head, *cells = zip(*columns)
    return table(head, cells)


def parameters(value: Any) -> list[inspect.Parameter]:
    """Returns the parameters of a callable's signature, without `self`; none if Python knows no signature."""
    try:
        all_parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p for p in all_parameters if p.name != "self"]


def kind_of(annotation: Any) -> str:
    """Returns an annotation as text, without the modules of its names."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text).replace("NoneType", "None")


def default_of(default: Any) -> str:
    """Returns a default as Python writes it; a function or class is written as its name."""
    return re.sub(r"<(?:function|class) '?(?:[\w.]*\.)?(\w+).*>", r"\1", repr(default))


def escape(text: str) -> str:
    """Returns plain text escaped for Markdown. Text in backticks is not changed."""
    parts = re.split(r"(``[^`]+``|`[^`]+`)", text)  # texts in backticks have odd indices
    return "".join(part if i % 2 else re.sub(r"([*_<>\[\]])", r"\\\1", part) for i, part in enumerate(parts))


def fields(kind: type) -> dict[str, str]:
    """Returns the fields of a dataclass or a named tuple, with the docstrings below them."""
    if not (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
        return {}
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    documents = {}
    for item, following in zip(tree.body, [*tree.body[1:], None]):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            documents[item.target.id] = inspect.cleandoc(str(following.value.value)) if is_text else ""  # type: ignore[union-attr]
    return documents


_SECTION = re.compile(r"^(?:Args|Attributes):[ \n](.*(?:\n(?: {4}.*)?)*)", re.M)
"""Matches the section of a docstring that lists arguments or attributes; the group is its text without the head."""
_NAMES = re.compile(r"(?:^ {0,4}|(?<=[.] ))((?:\*{0,2}[a-z]\w*, )*\*{0,2}[a-z]\w*):\s", re.M)
"""Matches the names at the beginning of an entry in such a section: `name: ` or `name, other: `."""


def listed(document: str) -> dict[str, str]:
    """Returns the names and meanings that a docstring lists under `Args:` or `Attributes:`. A line may list several
    names."""
    section = _SECTION.search(document)
    text = section[1] if section else ""
    starts = [*_NAMES.finditer(text)]
    ends = [*(start.start() for start in starts[1:]), len(text)]
    return {name.strip(" *"): " ".join(text[start.end() : end].split())
            for start, end in zip(starts, ends) for name in start[1].split(",")}  # fmt: skip


def _keywords(value: Any) -> dict[str, str]:
    """Returns the arguments that a callable takes as `**keywords`, with their meanings, from its docstring."""
    declared = parameters(value)
    if not any(p.kind is p.VAR_KEYWORD for p in declared):
        return {}
    entries = listed(inspect.getdoc(value) or "")
    return {name: what for name, what in entries.items() if name not in {p.name for p in declared}}


def _meanings(value: Any) -> dict[str, str]:
    """Returns the meaning of each argument, from the first of `_places` that has one."""
    names = [p.name for p in parameters(value)]
    meanings: dict[str, str] = {}
    for place in _places(value, names):
        meanings |= {name: what for name, what in place.items() if what and name in names and name not in meanings}
    return meanings


def _places(value: Any, names: list[str]) -> Iterator[dict[str, str]]:
    """Yields the places that may give meanings: the docstring's list, its prose, classes that it refers to, a class's
    fields, its bases, shapes, torch's module of the same name, and at last `_SHARED`."""
    document = inspect.getdoc(value) or ""
    yield listed(document)
    yield {name: _sentence(document, name) for name in names}
    for other in _referred(document):
        yield listed(inspect.getdoc(other) or "")
    if inspect.isclass(value):
        yield fields(value)
        for base in value.__mro__[1:]:
            if base.__module__.startswith("normformer_rs"):
                yield listed(inspect.getdoc(base) or "")
    owner = _owner(value)
    yield {name: _shape(inspect.getdoc(owner) or "", name) for name in names}
    torch_class = getattr(torch.nn, owner.__name__, None) if owner else None
    if torch_class:
        same = torch_class if owner is value else getattr(torch_class, value.__name__, None)  # the same class or method
        known = [p.name for p in parameters(same)] if same else []
        yield {name: f"As in `torch.nn.{same.__qualname__}`." for name in names if name in known}
    if owner and issubclass(owner, torch.nn.Module):
        yield {name: _SHARED[name] for name in names if name in _SHARED}


def _owner(value: Any) -> type | None:
    """Returns the class itself, or the class of a method; None for a function."""
    if inspect.isclass(value):
        return value
    outermost = getattr(sys.modules.get(value.__module__), value.__qualname__.partition(".")[0], None)
    return outermost if inspect.isclass(outermost) else None


def _shape(document: str, name: str) -> str:
    """Returns a sentence with the shape of a tensor, from the part `Shapes:` of a class's docstring; "" if there is
    none."""
    text = re.search(r"^Shapes: (.*(?:\n.+)*)", document, re.M)
    match = re.search(rf"\b{re.escape(name)}`? (\([^)]*\))", text[1]) if text else None
    return f"Shape {match[1]}." if match else ""


def _referred(document: str) -> list[type]:
    """Returns the classes of `normformer_rs.nn` to whose arguments a docstring refers."""
    match = re.search(r"^(?:.*\. )?(?:Args|Arguments)\b.*", document, re.M)
    named = re.findall(r"\w+", match[0]) if match else []
    return [getattr(nfnn, name) for name in named if name in nfnn.__all__ and inspect.isclass(getattr(nfnn, name))]


def _sentence(document: str, name: str) -> str:
    """Returns the first sentence of a docstring's prose that contains the name in backticks; "" if there is none."""
    prose = re.split(r"^(?:Args|Attributes|>>>)", document, maxsplit=1, flags=re.M)
    # The lines of examples are left out.
    text = " ".join(re.sub(r"^(?:>>>|\.\.\.).*$", "", " ".join(prose[:1]), flags=re.M).split())
    sentences = re.split(r"(?<=[.:;]) (?=[A-Z`])", text)
    return next((sentence for sentence in sentences if f"`{name}`" in sentence), "")


def _code(text: str) -> str:
    """Returns the text as code in Markdown; "" for an empty text."""
    return f"`{text}`" if text else ""
