"""Writes the files that are generated from Rust's tables: `python -m normformer_rs._stubs --check | --write`.

- _tables.json: the tables themselves, which the package reads without loading the extension module.
- config.pyi: the types of the configuration classes, which the package builds when it is imported.
- nn/composed.pyi: the types of the modules that are built from their entries in Rust's table of norms.
- docs/names.md: every norm, residual scheme, initialisation, preset, and block that `swap_residuals` knows.
"""

import argparse
import importlib
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _loading, _tables

if TYPE_CHECKING:
    from .config import Config, Field

STUB = Path(__file__).with_name("config.pyi")
NORMS = Path(__file__).parent / "nn" / "composed.pyi"
NAMES = Path(__file__).parents[2] / "docs" / "names.md"

_HEAD = '''\
"""Made by `python -m normformer_rs._stubs --write` out of the lists of options in Rust; do not edit."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from .norms import Norm
from .schemes import Scheme

_C = TypeVar("_C", bound=Config)

class Field(NamedTuple):
    name: str
    kind: str
    optional: bool
    default: Any
    choices: tuple[str, ...]
    help: str
    group: str
    per_layer: bool = False
    def check(self, value: Any) -> Any: ...

class Config:
    FIELDS: ClassVar[tuple[Field, ...]]
    def __init__(self, **options: Any) -> None: ...
    def asdict(self) -> dict[str, Any]: ...
    def replace(self: _C, **options: Any) -> _C: ...
    def to_json(self, kinds: tuple[str, ...] | None = None) -> str: ...
    @classmethod
    def from_dict(cls: type[_C], options: Mapping[str, Any], *, trust: bool = False) -> _C: ...
    @classmethod
    def from_json(cls: type[_C], text: str, *, trust: bool = False) -> _C: ...

'''

_TAIL = """\
ENTRIES: dict[str, list[dict[str, Any]]]
LANGUAGE_MODELS: tuple[str, ...]
ATTENTION: tuple[str, ...]
PARAMETRISATION: tuple[str, ...]
__version__: str

def readable(name: str, text: str) -> str: ...
def speaking_flags() -> AbstractContextManager[None]: ...

OWN: dict[str, str]

def closest(got: str, choices: Iterable[str]) -> str: ...
def unknown(what: str, got: str, choices: Iterable[str]) -> str: ...
def split(options: Mapping[str, Any], *kinds: type[Config]) -> list[dict[str, Any]]: ...
def tables() -> dict[str, list[dict[str, Any]]]: ...
"""


def tables() -> str:
    """Returns the text of _tables.json, with one line per option or name."""
    # `_loading.load` would refuse an extension module that differs from _tables.json, the file that is made anew here.
    importlib.import_module("torch")
    core: Any = importlib.import_module(_loading.CORE)
    return _json(json.loads(core.tables())) + "\n"


def _json(value: Any, indent: str = "") -> str:
    """Returns a value of the tables as JSON. Each object of a list gets one line, which begins with its name. `indent`:
    the spaces before the line on which the value begins."""
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {_json(item, indent + '  ')}" for key, item in value.items()]
    elif isinstance(value, list):
        lines = [json.dumps({"name": item["name"], **item}, ensure_ascii=False) for item in value]
    else:
        return json.dumps(value, ensure_ascii=False)
    begin, end = ("{", "}") if isinstance(value, dict) else ("[", "]")
    return begin + ",".join(f"\n{indent}  {line}" for line in lines) + f"\n{indent}{end}"


def stub() -> str:
    """Returns the text of config.pyi."""
    kinds = _configs()
    return _HEAD + "".join(_choices(kinds)) + "\n" + "".join(_class(kind, kinds) for kind in kinds) + _TAIL


def _configs() -> "list[type[Config]]":
    """Returns the configuration classes, in their order in config.pyi."""
    from . import config  # reads _tables.json, so it comes after the file is written

    kinds = (config.TransformerConfig, config.TrainingConfig, config.DataConfig, config.SearchConfig)
    return [*kinds, config.GenerationConfig]


_NORMS_HEAD = '''\
"""Made by `python -m normformer_rs._stubs --write` out of Rust's table of norms; do not edit."""

import collections.abc
import inspect
from typing import Any

import torch
from torch.nn import Parameter

from .norms import RowNorm
from .running import RunningNorm

ENTRIES: list[collections.abc.Mapping[str, Any]]
CLASSES: dict[str, type[RowNorm | RunningNorm]]

def signature(entry: collections.abc.Mapping[str, Any]) -> inspect.Signature: ...
def doc(entry: collections.abc.Mapping[str, Any]) -> str: ...
def build(entry: collections.abc.Mapping[str, Any]) -> type[RowNorm | RunningNorm]: ...

'''


def norms() -> str:
    """Returns the text of nn/composed.pyi."""
    from .nn import composed

    entries = composed.ENTRIES
    exported = ", ".join(json_string(entry["module"]) for entry in sorted(entries, key=lambda entry: entry["module"]))
    parts = [_NORMS_HEAD + f"__all__ = [{exported}]\n"]
    for entry in entries:
        # The docstring is indented by 4 spaces, so its lines of 116 characters make lines of 120.
        about = textwrap.fill(f'"""{composed.doc(entry)}"""', 116, break_on_hyphens=False).replace("\n", "\n    ")
        base = "RunningNorm" if entry["form"] == "columns" else "RowNorm"
        lines = [f"class {entry['module']}({base}):", f"    {about}", ""]
        for parameter in entry["parameters"]:
            # weight and bias are None in a module that does not learn them; a text times False is "".
            optional = " | None" * (parameter["name"] in ("weight", "bias"))
            lines.append(f"    {parameter['name']}: Parameter{optional}")
        lines += [f"    {option['name']}: {option['kind']}" for option in entry["options"]]
        lines += [f"    {buffer['name']}: torch.Tensor" for buffer in entry["buffers"]]
        lines += ["    def __init__("]
        arguments = [f"        {p},".replace("typing.", "") for p in composed.signature(entry).parameters.values()]
        if entry["form"] == "columns":  # elementwise_affine and what follows it are given by keyword
            first_keyword = next(i for i, line in enumerate(arguments) if "elementwise_affine" in line)
            arguments.insert(first_keyword, "        *,")
        lines += arguments
        parts.append("\n".join([*lines, "    ) -> None: ...", ""]))
    text = "\n".join(parts)
    # The file imports Literal only if an annotation uses it.
    return text.replace("import Any\n", "import Any, Literal\n", 1) if " Literal[" in text else text


def names() -> str:
    """Returns the text of docs/names.md."""
    from . import _tables, config
    from .loop import presets

    tables = config.tables()
    lines = [
        "<!-- Made by `python -m normformer_rs._stubs --write` out of Rust's tables and presets.py;",
        "do not edit. -->",
        "",
        "# Names",
        "",
        "What each name computes and where it comes from. d is the width, F a sublayer with dropout on its output, N a",
        "norm; as depths, N and M are the layers of encoder and decoder, L those of a single stack. A norm is also",
        "called a normalization layer, a residual scheme a residual or skip connection, and an initialisation an",
        "initialization.",
    ]
    for title, table, usage in (
        (
            "Norms",
            "norms",
            "`--norm NAME`.",
        ),
        (
            "Families of norms",
            "families",
            "`--norm NAME`: a norm with its conventions said.",
        ),
        (
            "Residual schemes",
            "residuals",
            "`--residual NAME`.",
        ),
        ("Initialisations", "inits", "`--init NAME`."),
        (
            "Parametrisations",
            "parametrisations",
            "`--parametrisation NAME` with `--base-width` and `--base-depth`; in plain PyTorch\n"
            "`normformer_rs.param_groups`.",
        ),
        (
            "Beside them",
            "others",
            "`--groupscaling N`, `--fixnorm`, `--attention tensorized`, and with `--residual admin` by itself (in\n"
            "plain PyTorch `normformer_rs.nn.profile`).",
        ),
    ):
        lines += ["", f"## {title}", "", usage, ""]
        lines += ["| name | definition | source |", "|---|---|---|"]
        for entry in tables[table]:
            cells = (f"`{entry['name']}`", entry["equation"].replace("|", "\\|"), entry["source"])
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "## Presets",
        "",
        "`--preset NAME`; each option beside it counts more.",
        "",
    ]
    lines += ["| name | options | source |", "|---|---|---|"]
    for name, (source, options) in presets.PRESETS.items():
        lines.append(f"| `{name}` | {', '.join(f'{key} {value}' for key, value in options.items())} | {source} |")
    lines += ["", "## Options of a resume", ""]
    lines += ["`train --resume` and `Trainer.fit(resume=True)` compare each option with the checkpoint's. The model's"]
    lines += ["options may not change. On the command line an option that is not given is the checkpoint's.", ""]
    lines += ["| a change of | is |", "|---|---|"]
    effects: dict[str, list[str]] = {}
    for option, effect in _tables.read()["resume"].items():
        effects.setdefault(effect, []).append(f"`{option}`")
    lines += [f"| {', '.join(options)} | {effect} |" for effect, options in effects.items()]
    lines += [
        "",
        "## Blocks of other libraries",
        "",
        "`swap_residuals` recognises blocks by what they compute: [the models that it was tried on](models.md).",
    ]
    return "\n".join([*lines, ""])


def _class(kind: "type[Config]", kinds: "list[type[Config]]") -> str:
    """Returns the declaration of the class `kind` in config.pyi. `kinds`: all configuration classes."""
    summary = inspect.getdoc(kind).splitlines()[0]  # type: ignore[union-attr]
    lines = ["@dataclass(frozen=True)", f"class {kind.__name__}(Config):", f'    """{summary}"""', ""]
    lines += [f"    {field.name}: {_annotation(field, kinds)}" for field in kind.FIELDS]
    lines += ["    def __init__(", "        self,", "        *,"]
    lines += [f"        {field.name}: {_annotation(field, kinds)} = ...," for field in kind.FIELDS]
    return "\n".join([*lines, "    ) -> None: ...", "", ""])


def _aliases(kinds: "list[type[Config]]") -> dict[tuple[str, ...], str]:
    """Returns the name of a type for every set of choices: that of the first option with the set."""
    aliases: dict[tuple[str, ...], str] = {}
    for field in (field for kind in kinds for field in kind.FIELDS if field.choices):
        aliases.setdefault(field.choices, "_" + field.name.title().replace("_", ""))
    return aliases


def _choices(kinds: "list[type[Config]]") -> Iterator[str]:
    """Yields, for each set of choices, the lines that declare its type."""
    for choices, alias in _aliases(kinds).items():
        words = [json_string(choice) for choice in choices]
        line = f"{alias} = Literal[{', '.join(words)}]\n"
        # `line` ends with a newline, so 121 characters make a line of 120.
        yield line if len(line) <= 121 else f"{alias} = Literal[\n" + "".join(f"    {w},\n" for w in words) + "]\n"


def _annotation(field: "Field", kinds: "list[type[Config]]") -> str:
    """Returns an option's type as config.pyi writes it. `kinds`: all configuration classes."""
    from . import config

    kind = _aliases(kinds)[field.choices] if field.choices else field.kind
    # Some options also accept an object of the user's own, so its type is added.
    kind += {"schemes": " | Scheme", "norms": " | Norm | str"}.get(config.OWN.get(field.name, ""), "")
    # An option with choices by layer also accepts a text such as `prenorm*2,postnorm`. A text times False is "".
    return kind + " | str" * field.per_layer + " | None" * field.optional


def json_string(text: str) -> str:
    """Returns the text in double quotes."""
    return '"' + text + '"'


def main() -> int:
    """Returns 0 if the files are up to date or have been written, otherwise 1."""
    parser = argparse.ArgumentParser(prog="python -m normformer_rs._stubs", description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="fail if a file is out of date")
    mode.add_argument("--write", action="store_true", help="write the files")
    is_writing = parser.parse_args().write
    stale = []
    # _tables.json comes first, because the other files are made from it.
    files = {_tables.PATH: tables, STUB: stub, NORMS: norms, NAMES: names}
    for path, make in files.items():
        text = make()
        if is_writing:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path)
            print(f"{path} is out of date: python -m normformer_rs._stubs --write", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
