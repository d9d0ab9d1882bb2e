"""The API reference, made of signatures and docstrings."""

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import torch

from normformer_rs.config import Config

from . import examples
from .names import option_table
from .tables import table

MODULES = {
    "normformer_rs": "Configurations, training, translation, surgery by one call.",
    "normformer_rs.nn": "Modules: norms, residual connections, torch.nn's Transformer with every scheme.",
    "normformer_rs.norms": "A norm of one's own, declared in Python.",
    "normformer_rs.schemes": "A residual scheme of one's own, declared in Python.",
    "normformer_rs.surgery": "Norms and residual schemes exchanged in models that exist already.",
    "normformer_rs.analysis": "What the papers look at in a trained model.",
    "normformer_rs.figures": "The papers' pictures of runs that are over.",
    "normformer_rs.integrations.huggingface": "A callback for Hugging Face's Trainer.",
    "normformer_rs.integrations.lightning": "A callback for Lightning's Trainer.",
}


def pages() -> dict[str, str]:
    """The pages by path."""
    made = {f"api/{name}.md": module(name) for name in MODULES}
    made["api/operators.md"] = operators()
    rows = [(f"[`{name}`]({name}.md)", what) for name, what in MODULES.items()]
    rows.append(("[`torch.ops.normformer_rs`](operators.md)", "The operators, as PyTorch's dispatcher has them."))
    made["api/index.md"] = f"# Reference\n\nMade of the docstrings and signatures.\n\n{table(('module', 'what'), rows)}"
    return made


def public(name: str) -> list[str]:
    """A module's public names, as its `__all__` or its own definitions give them."""
    home = importlib.import_module(name)
    own = [n for n, value in vars(home).items() if n[0] != "_" and getattr(value, "__module__", "") == name]
    return [n for n in getattr(home, "__all__", own) if not n.startswith("__")]


def module(name: str) -> str:
    """The page of a module."""
    home = importlib.import_module(name)
    parts = [f"# {name}", document(inspect.getdoc(home) or "")]
    shown: dict[str, str] = {}  # code of examples, and the name that has it
    for found in sorted(public(name), key=lambda n: (not n[0].isupper(), n.lower())):
        value = getattr(home, found)
        if inspect.ismodule(value):
            parts.append(f"## {found}\n\nA module: [`{value.__name__}`]({value.__name__}.md).")
        else:
            code = examples.of_names().get(f"{name}.{found}", "")
            example = f"**Example**\n\n{examples.shown(code)}" if code and code not in shown else ""
            if code in shown:
                example = f"[An example](#{shown[code].lower()}) stands beside {shown[code]}."
            elif code:
                shown[code] = found
            parts += _entry(found, value, example)
    return "\n\n".join(part for part in parts if part) + "\n"


def _entry(name: str, value: Any, example: str) -> Iterator[str]:
    """A name's part of its module's page; the example stands before the methods."""
    yield f"## {name}"
    if inspect.isclass(value) and issubclass(value, Config):
        yield f"```python\n{value.__name__}(**options)\n```"
        yield document((inspect.getdoc(value) or "").partition("\n\n")[0])  # the options follow as a table
        for group in dict.fromkeys(field.group for field in value.FIELDS):
            yield f"**{group}**"
            yield option_table([field for field in value.FIELDS if field.group == group])
    elif isinstance(value, dict):
        yield "A mapping."
        yield table(("key", "source"), [(f"`{key}`", item[0]) for key, item in value.items()])
    else:
        is_error = inspect.isclass(value) and issubclass(value, BaseException)
        yield "" if is_error else _signature(name, value)
        yield document(inspect.getdoc(value) or "")
        yield table(("attribute", "type", "what"), _attributes(value)) if inspect.isclass(value) else ""
    yield example
    if inspect.isclass(value):
        yield from _methods(value)


def _methods(kind: type) -> Iterator[str]:
    """Public methods and properties, those of bases in this package too, with what their docstrings say."""
    seen = set()
    for base in kind.__mro__:
        if not base.__module__.startswith("normformer_rs"):
            continue
        for name, value in vars(base).items():
            is_public = not name.startswith("_") and name != "extra_repr"
            plain = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if name in seen or not is_public or not (callable(plain) or isinstance(plain, property)):
                continue
            seen.add(name)
            text = inspect.getdoc(getattr(kind, name)) if not isinstance(plain, property) else inspect.getdoc(plain)
            if not text or (not isinstance(plain, property) and plain.__doc__ is None):
                continue
            yield f"### {kind.__name__}.{name}"
            yield "A property." if isinstance(plain, property) else _signature(name, getattr(kind, name))
            yield document(text)


def _signature(name: str, value: Any) -> str:
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [p for p in found.parameters.values() if p.name != "self"]
    shown, star = [], False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not star and not any(q.kind is q.VAR_POSITIONAL for q in parameters):
            shown.append("*")
        star = star or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        kind = "" if p.annotation is p.empty else f": {_type(p.annotation)}"
        default = "" if p.default is p.empty else (" = " if kind else "=") + _value(p.default)
        shown.append(f"{stars}{p.name}{kind}{default}")
    result = found.return_annotation
    after = "" if inspect.isclass(value) or result in (found.empty, None) else f" -> {_type(result)}"
    line = f"{name}({', '.join(shown)}){after}"
    if len(line) > 88:
        line = f"{name}(\n    " + ",\n    ".join(shown) + f",\n){after}"
    return f"```python\n{line}\n```"


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text).replace("NoneType", "None")


def _value(default: Any) -> str:
    text = repr(default)
    return re.sub(r"<(?:function|class) '?(?:[\w.]*\.)?(\w+).*>", r"\1", text)


def _attributes(kind: type) -> list[tuple[str, str, str]]:
    """A dataclass's or a named tuple's fields, with the strings that stand below them."""
    if not (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
        return []
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    found = []
    for item, following in zip(tree.body, [*tree.body[1:], None]):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id[0] != "_":
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            text = inspect.cleandoc(str(following.value.value)) if is_text else ""  # type: ignore[union-attr]
            kind_of = re.sub(r"\b(?:\w+\.)+(?=\w)", "", ast.unparse(item.annotation))
            found.append((f"`{item.target.id}`", f"`{kind_of}`", escape(text)))
    return found


def operators() -> str:
    """The page of `torch.ops.normformer_rs`: every operator's schema."""
    import normformer_rs.nn  # noqa: F401  (registers them)

    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("normformer_rs::")]
    about = (
        "Every operator's schema, as PyTorch's dispatcher has it. Modules of [`normformer_rs.nn`](normformer_rs.nn.md) "
    )
    about += "call them; [the specification](../spec.md) defines what they compute. An operator whose name ends in "
    about += "`_backward` is the first derivative of the one before it."
    lines = ["# torch.ops.normformer_rs", about]
    lines += [f"## {schema.name.partition('::')[2]}\n\n```text\n{_wrapped(str(schema))}\n```"
              for schema in sorted(schemas, key=lambda s: s.name)]  # fmt: skip
    return "\n\n".join(lines) + "\n"


def _wrapped(schema: str) -> str:
    begin, _, rest = schema.partition("(")
    arguments, arrow, result = rest.rpartition(") -> ")
    return textwrap.fill(begin + "(" + arguments + arrow + result, 88, subsequent_indent="    ", break_long_words=False)


def escape(text: str) -> str:
    """Plain text for Markdown: what stands in backticks stays."""
    parts = re.split(r"(``[^`]+``|`[^`]+`)", text)
    return "".join(part if i % 2 else re.sub(r"([*_<>\[\]])", r"\\\1", part) for i, part in enumerate(parts))


_WORDS = re.compile(r"(?m)(?:^|(?<=\. ))((?:Returns|Errors|Shapes?|Source|Modules and parameters|Example):)(?= |$)")
"""The words that begin a part of a docstring."""


def document(text: str) -> str:
    """A docstring as Markdown: its sections, lists of arguments, examples and equations."""
    parts: list[str] = []
    for paragraph in _paragraphs(text):
        lines = paragraph.splitlines()
        head = re.fullmatch(r"(Args|Attributes):", lines[0])
        if head and len(lines) > 1:
            parts.append(f"**{'Arguments' if head[1] == 'Args' else head[1]}**")
            parts.append(_arguments(lines[1:]))
        elif lines[0].startswith(">>>"):
            parts.append("```pycon\n" + paragraph + "\n```")
        elif all(line.startswith("    ") for line in lines):
            parts.append("```text\n" + textwrap.dedent(paragraph) + "\n```")
        else:
            marked = _WORDS.sub(r"**\1**", escape(paragraph))
            parts.append(re.sub(r"docs/(\w+)\.md", r"[\1](../\1.md)", marked))
    return "\n\n".join(parts)


def _paragraphs(text: str) -> list[str]:
    """Parts between empty lines; a list of arguments and an example hold such lines too."""
    found: list[str] = []
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        if not part.strip():
            continue
        is_more = part.startswith(" ") and found and re.match(r"(Args|Attributes):", found[-1])
        if is_more:
            found[-1] += "\n" + part
        else:
            # an example may follow prose without an empty line
            found += [part] if part.startswith(">>>") else re.split(r"\n(?=>>> )", part, maxsplit=1)
    return found


def _arguments(lines: list[str]) -> str:
    """`name: what`, one a line, continued where a line stands further in."""
    entries: list[list[str]] = []
    for line in lines:
        match = re.match(r"    (\*{0,2}\w[\w, *]*): (.*)", line)
        if match:
            entries.append([match[1], match[2]])
        elif entries:
            entries[-1][1] += " " + line.strip()
    rows = []
    for names, what in entries:
        code = ", ".join(f"`{name.strip()}`" for name in names.split(","))
        rows.append((code, escape(what)))
    return table(("argument", "what"), rows)
