"""Writes what is made of Rust's tables: `python -m normformer_rs._stubs --check | --write`.

config.pyi, whose classes are generated at import, and docs/names.md, every norm, residual scheme, initialisation and
preset.
"""

import argparse
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from . import config, presets
from .config import Config

STUB = Path(__file__).with_name("config.pyi")
NAMES = Path(__file__).parents[2] / "docs" / "names.md"
_GENERATED = (config.TransformerConfig, config.TrainingConfig, config.DataConfig, config.SearchConfig)

_HEAD = '''\
"""Made by `python -m normformer_rs._stubs --write` out of the lists of options in Rust; do not edit."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

_C = TypeVar("_C", bound=Config)

class Field(NamedTuple):
    name: str
    kind: str
    optional: bool
    default: Any
    choices: tuple[str, ...]
    help: str
    def check(self, value: Any) -> Any: ...

class Config:
    FIELDS: ClassVar[tuple[Field, ...]]
    def __init__(self, **options: Any) -> None: ...
    def asdict(self) -> dict[str, Any]: ...
    def replace(self: _C, **options: Any) -> _C: ...
    def to_json(self) -> str: ...
    @classmethod
    def from_dict(cls: type[_C], options: Mapping[str, Any]) -> _C: ...
    @classmethod
    def from_json(cls: type[_C], text: str) -> _C: ...

'''

_TAIL = """\
LANGUAGE_MODELS: tuple[str, ...]

def unknown(what: str, got: str, choices: Iterable[str]) -> str: ...
def split(options: Mapping[str, Any], *kinds: type[Config]) -> list[dict[str, Any]]: ...
def tables() -> dict[str, list[dict[str, Any]]]: ...
"""


def stub() -> str:
    """The text of config.pyi."""
    return _HEAD + "".join(_choices()) + "\n" + "".join(_class(kind) for kind in _GENERATED) + _TAIL


def names() -> str:
    """The text of docs/names.md."""
    tables = config.tables()
    lines = [
        "<!-- Made by `python -m normformer_rs._stubs --write` out of Rust's tables and presets.py; do not edit. -->",
        "",
        "# Names",
        "",
        "What each name computes and where it comes from. d is the width, F a sublayer with dropout on its output, N a",
        "norm; as depths, N and M are the layers of encoder and decoder, L those of a single stack.",
    ]
    for title, table, how in (
        (
            "Norms",
            "norms",
            "`--norm NAME`; shown by `pytest tests/test_model.py tests/test_norms.py tests/test_norm_modules.py "
            "-k NAME`.",
        ),
        (
            "Residual schemes",
            "residuals",
            "`--residual NAME`; shown by `pytest tests/test_model.py tests/test_training.py -k NAME`.",
        ),
        ("Initialisations", "inits", "`--init NAME`; shown by `pytest tests/test_model.py -k NAME`."),
        (
            "Beside them",
            "others",
            "`--groupscaling N`, `--fixnorm`, `--attention tensorized`, and with `--residual admin` by itself (in\n"
            "plain PyTorch `normformer_rs.nn.profile`); shown by\n"
            "`pytest tests/test_model.py tests/test_norms.py -k 'group_scaling or fixnorm or tensorized or profil'`.",
        ),
    ):
        lines += ["", f"## {title}", "", how, ""]
        lines += ["| name | definition | source |", "|---|---|---|"]
        for entry in tables[table]:
            cells = (f"`{entry['name']}`", entry["equation"].replace("|", "\\|"), entry["source"])
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "## Presets",
        "",
        "`--preset NAME`; each option beside it counts more. Shown by `pytest -k preset`.",
        "",
    ]
    lines += ["| name | options | source |", "|---|---|---|"]
    for name, (source, options) in presets.PRESETS.items():
        lines.append(f"| `{name}` | {', '.join(f'{key} {value}' for key, value in options.items())} | {source} |")
    return "\n".join([*lines, ""])


def _class(kind: type[Config]) -> str:
    summary = inspect.getdoc(kind).splitlines()[0]  # type: ignore[union-attr]
    lines = ["@dataclass(frozen=True)", f"class {kind.__name__}(Config):", f'    """{summary}"""', ""]
    lines += [f"    {field.name}: {_annotation(field)}" for field in kind.FIELDS]
    lines += ["    def __init__(", "        self,", "        *,"]
    lines += [f"        {field.name}: {_annotation(field)} = ...," for field in kind.FIELDS]
    return "\n".join([*lines, "    ) -> None: ...", "", ""])


def _aliases() -> dict[tuple[str, ...], str]:
    """A type for every set of choices, named after the first option that has it."""
    aliases: dict[tuple[str, ...], str] = {}
    for field in (field for kind in _GENERATED for field in kind.FIELDS if field.choices):
        aliases.setdefault(field.choices, "_" + field.name.title().replace("_", ""))
    return aliases


def _choices() -> Iterator[str]:
    for choices, alias in _aliases().items():
        words = [json_string(choice) for choice in choices]
        line = f"{alias} = Literal[{', '.join(words)}]\n"
        yield line if len(line) <= 121 else f"{alias} = Literal[\n" + "".join(f"    {w},\n" for w in words) + "]\n"


def _annotation(field: config.Field) -> str:
    kind = _aliases()[field.choices] if field.choices else field.kind
    return kind + " | None" * field.optional


def json_string(text: str) -> str:
    """The text in double quotes."""
    return '"' + text + '"'


def main() -> int:
    """0 if the files are what they should be, or have been written."""
    parser = argparse.ArgumentParser(prog="python -m normformer_rs._stubs", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="fail if a file is out of date")
    what.add_argument("--write", action="store_true", help="write the files")
    is_writing = parser.parse_args().write
    stale = []
    for path, text in ((STUB, stub()), (NAMES, names())):
        if is_writing:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path)
            print(f"{path} is out of date: python -m normformer_rs._stubs --write", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
