"""Generates the API reference from signatures and docstrings."""

import importlib
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from normformer_rs.config import Config

from . import arguments, equations, examples, links
from .arguments import escape
from .names import option_table
from .tables import table

MODULES = {
    "normformer_rs": "Configurations, training, translation, and swaps by one call.",
    "normformer_rs.nn": "Modules: norms, residual connections, torch.nn's Transformer with every scheme.",
    "normformer_rs.norms": "Custom norms, declared in Python.",
    "normformer_rs.schemes": "Custom residual schemes, declared in Python.",
    "normformer_rs.surgery": "Swaps of norms and residual schemes in existing models.",
    "normformer_rs.analysis": "Measurements of trained models, as in the papers.",
    "normformer_rs.figures": "Plots of finished runs, as in the papers.",
    "normformer_rs.integrations.huggingface": "A callback for Hugging Face's Trainer.",
    "normformer_rs.integrations.lightning": "A callback for Lightning's Trainer.",
}


def pages() -> dict[str, str]:
    """Returns the pages of the reference by path."""
    pages = {f"api/{name}.md": module(name) for name in MODULES}
    pages["api/operators.md"] = operators()
    rows = [(f"[`{name}`]({name}.md)", what) for name, what in MODULES.items()]
    rows.append(("[`torch.ops.normformer_rs`](operators.md)", "The operators, as PyTorch's dispatcher has them."))
    pages["api/index.md"] = f"# Reference\n\nMade from docstrings and signatures.\n\n{table(('module', 'what'), rows)}"
    return pages


def public(name: str) -> list[str]:
    """Returns a module's public names: those in `__all__`, or else all names without underscore that it defines."""
    imported = importlib.import_module(name)
    own = [n for n, value in vars(imported).items() if n[0] != "_" and getattr(value, "__module__", "") == name]
    return [n for n in getattr(imported, "__all__", own) if not n.startswith("__")]


def module(name: str) -> str:
    """Returns the page of a module."""
    imported = importlib.import_module(name)
    names = sorted(public(name), key=lambda n: (not n[0].isupper(), n.lower()))
    parts = [f"# {name}", document(inspect.getdoc(imported) or ""), _summary(imported, names)]
    shown: dict[str, str] = {}  # the examples on the page so far, and the name beside which each is shown
    for public_name in names:
        value = getattr(imported, public_name)
        if inspect.ismodule(value):
            parts.append(f"## {public_name}\n\nA module: [`{value.__name__}`]({value.__name__}.md).")
        else:
            code = examples.of_names().get(f"{name}.{public_name}", "")
            example = f"**Example**\n\n{examples.shown(code)}" if code and code not in shown else ""
            if code in shown:
                example = f"[An example](#{shown[code].lower()}) stands beside {shown[code]}."
            elif code:
                shown[code] = public_name
            parts += _entry(public_name, value, example)
    return "\n\n".join(part for part in parts if part) + "\n"


def _summary(imported: ModuleType, names: list[str]) -> str:
    """Returns a table of the page's names and the first sentences of their docstrings."""
    rows, anchors = [], Counter[str]()
    for name in names:
        anchor, value = name.lower(), getattr(imported, name)
        link = f"#{anchor}_{anchors[anchor]}" if anchors[anchor] else f"#{anchor}"
        anchors[anchor] += 1
        is_plain = isinstance(value, (dict, str))  # such values have the docstring of their type, which is left out
        rows.append((f"[`{name}`]({link})", "" if is_plain else _opening(inspect.getdoc(value) or "")[0]))
    return table(("name", "what"), rows)


_OPENING = re.compile(r"(.+?(?<!\bal)\.)(?: |$)", re.S)
"""Matches a paragraph's first sentence. The full stop of "et al." does not end it."""
_EQUATION = re.compile(r"[A-Za-z\u0370-\u03ff]\S* = .*[⊙√²‖·(]|softmax\(")
"""Matches the beginning of a sentence that is an equation."""


def _opening(text: str) -> tuple[str, str]:
    """Returns a docstring's first sentence, as MathML if it is an equation, and the rest of its first paragraph."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    match = _OPENING.match(paragraph)
    first, rest = (match[1], paragraph[match.end() :]) if match else (paragraph, "")
    return (_drawn(first) if _EQUATION.match(first) else _marked(first)), rest


def _drawn(sentence: str) -> str:
    """Returns a sentence that begins with an equation, as HTML. Its first clauses, as far as they are equations, become
    MathML."""
    head, mark, tail = sentence.partition("; source: ")
    clauses = head.split(", ")
    # Try to draw all clauses, then one less, and so on.
    for count in range(len(clauses), 0, -1):
        drawn = equations.render(", ".join(clauses[:count]))  # without <math> if it could not be read
        if "<math" in drawn:
            return drawn + _marked("".join(f", {clause}" for clause in clauses[count:]) + mark + tail)
    return _marked(sentence)


def _entry(name: str, value: Any, example: str) -> Iterator[str]:
    """Yields the parts that a module's page has for a name. The example comes before the methods."""
    yield f"## {name}"
    yield links.source(value)
    if inspect.isclass(value) and issubclass(value, Config):
        yield f"```python\n{value.__name__}(**options)\n```"
        yield document((inspect.getdoc(value) or "").partition("\n\n")[0])  # the options follow as a table
        for group in dict.fromkeys(field.group for field in value.FIELDS):
            yield f"**{group}**"
            yield option_table([field for field in value.FIELDS if field.group == group])
    elif isinstance(value, dict):
        yield "A mapping."
        yield table(("key", "source"), [(f"`{key}`", item[0]) for key, item in value.items()])
    elif isinstance(value, str):
        yield f"The string `{value!r}`."
    else:
        is_error = inspect.isclass(value) and issubclass(value, BaseException)
        yield "" if is_error else _signature(name, value)
        yield document(inspect.getdoc(value) or "", "" if is_error else arguments.rows(value))
    yield example
    if inspect.isclass(value):
        yield from _methods(value)


_MODULE_METHODS = {
    "forward", "from_checkpoint", "from_pretrained", "generate_square_subsequent_mask", "normalised_weight", "profile",
    "refused_batches", "reset_parameters", "reset_running_stats", "set_num_updates", "set_parts", "step",
}  # fmt: skip
"""Methods of the package's torch modules that are for users. Other methods of modules are internal."""
_INTERNAL = {"Trainer.warn", "Part.moves", "Part.norms"}
"""Methods of other classes that are internal, although their names have no underscore."""


def is_for_users(kind: type, name: str) -> bool:
    """Returns True if users may call or override the method."""
    if name.startswith("_") or name == "extra_repr" or f"{kind.__name__}.{name}" in _INTERNAL:
        return False
    return name in _MODULE_METHODS or not issubclass(kind, torch.nn.Module)


def methods(kind: type) -> dict[str, Any]:
    """Returns the methods and properties of a class that are for users and have a docstring, including those of base
    classes in this package."""
    by_name: dict[str, Any] = {}
    for base in kind.__mro__:
        for name, value in vars(base).items() if base.__module__.startswith("normformer_rs") else ():
            plain = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            is_method = (callable(plain) or isinstance(plain, property)) and plain.__doc__
            if is_method and name not in by_name and is_for_users(kind, name):
                by_name[name] = value if isinstance(value, property) else getattr(kind, name)
    return by_name


def _methods(kind: type) -> Iterator[str]:
    """Yields the parts that a module's page has for the methods and properties of a class."""
    for name, value in methods(kind).items():
        yield f"### {kind.__name__}.{name}"
        yield links.source(value)
        yield "A property." if isinstance(value, property) else _signature(name, value)
        yield document(inspect.getdoc(value) or "", "" if isinstance(value, property) else arguments.rows(value))


def _signature(name: str, value: Any) -> str:
    """Returns the signature as code, with types and defaults; "" if Python knows none."""
    parts, star = [], False  # `star`: whether later parameters are keyword-only
    parameters = arguments.parameters(value)
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not star and not any(q.kind is q.VAR_POSITIONAL for q in parameters):
            parts.append("*")
        star = star or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        kind = "" if p.annotation is p.empty else f": {arguments.kind_of(p.annotation)}"
        default = "" if p.default is p.empty else (" = " if kind else "=") + arguments.default_of(p.default)
        parts.append(f"{stars}{p.name}{kind}{default}")
    try:
        result = inspect.signature(value).return_annotation
    except (TypeError, ValueError):
        return ""
    has_result = not inspect.isclass(value) and result not in (inspect.Parameter.empty, None)
    arrow = f" -> {arguments.kind_of(result)}" if has_result else ""
    line = f"{name}({', '.join(parts)}){arrow}"
    if len(line) > 88:
        line = f"{name}(\n    " + ",\n    ".join(parts) + f",\n){arrow}"
    return f"```python\n{line}\n```"


def operators() -> str:
    """Returns the page of `torch.ops.normformer_rs`, with the schema of every operator."""
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
    """Returns an operator's schema in lines of at most 88 characters."""
    begin, _, rest = schema.partition("(")
    arguments, arrow, result = rest.rpartition(") -> ")
    return textwrap.fill(begin + "(" + arguments + arrow + result, 88, subsequent_indent="    ", break_long_words=False)


_WORDS = re.compile(r"(?m)(?:^|(?<=\. ))((?:Returns|Errors|Shapes?|Source|Modules and parameters|Example):)(?= |$)")
"""Matches the words that begin a section of a docstring."""


def document(text: str, rows: str = "") -> str:
    """Returns a docstring as Markdown, with its sections, lists of arguments, examples and equations.

    `rows` is a table of the arguments. It replaces the docstring's list of arguments; if there is no list, it follows
    the first paragraph.
    """
    parts: list[str] = []
    for number, paragraph in enumerate(_paragraphs(text)):
        lines = paragraph.splitlines()
        head = re.fullmatch(r"(Args|Attributes):", lines[0])
        if head and len(lines) > 1:
            parts.append(f"**{'Arguments' if head[1] == 'Args' else head[1]}**")
            listed = [(f"`{name}`", escape(what)) for name, what in arguments.listed(paragraph).items()]
            parts.append(rows or table(("argument", "what"), listed))
            rows = ""  # the table is shown once
        elif lines[0].startswith(">>>"):
            parts.append("```pycon\n" + paragraph + "\n```")
        elif all(line.startswith("    ") for line in lines):
            parts.append(f"```text\n{textwrap.dedent(paragraph)}\n```")
        elif number == 0:
            first, rest = _opening(paragraph)
            is_drawn = first.startswith("<math")  # a paragraph of Markdown cannot begin with this tag
            parts += [equations.division([first]), _marked(rest)] if is_drawn else [f"{first} {_marked(rest)}".strip()]
        else:
            parts.append(_marked(paragraph))
    if rows:
        parts.insert(1, rows)
    return "\n\n".join(part for part in parts if part)


def _marked(paragraph: str) -> str:
    """Returns prose with the heads of sections in bold, and with links to pages such as docs/train.md."""
    marked = _WORDS.sub(r"**\1**", escape(paragraph))
    return re.sub(r"docs/(\w+)\.md", r"[\1](../\1.md)", marked)


def _paragraphs(text: str) -> list[str]:
    """Returns the parts of a docstring between empty lines. An example may follow prose without an empty line."""
    blocks = re.split(r"\n\s*\n", text.strip("\n"))
    split = [[part] if part.startswith(">>>") else re.split(r"\n(?=>>> )", part, maxsplit=1) for part in blocks]
    return [part for parts in split for part in parts if part.strip()]
