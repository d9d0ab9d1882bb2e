"""Writes config.pyi, whose classes are generated at import: `python -m normformer_rs._stubs --check | --write`."""

import argparse
import inspect
import sys
from pathlib import Path

from . import config
from .config import Config

STUB = Path(__file__).with_name("config.pyi")
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
PRESETS: dict[str, dict[str, Any]]

def unknown(what: str, got: str, choices: Iterable[str]) -> str: ...
def find_preset(name: str) -> dict[str, Any]: ...
def split(options: Mapping[str, Any], *kinds: type[Config]) -> list[dict[str, Any]]: ...
def preset(name: str) -> tuple[TransformerConfig, TrainingConfig]: ...
def tables() -> dict[str, list[dict[str, str]]]: ...
"""


def stub() -> str:
    """The text of config.pyi."""
    return _HEAD + "".join(_class(kind) for kind in _GENERATED) + _TAIL


def _class(kind: type[Config]) -> str:
    summary = inspect.getdoc(kind).splitlines()[0]  # type: ignore[union-attr]
    lines = ["@dataclass(frozen=True)", f"class {kind.__name__}(Config):", f'    """{summary}"""', ""]
    lines += [f"    {field.name}: {_annotation(field)}" for field in kind.FIELDS]
    lines += ["    def __init__(", "        self,", "        *,"]
    lines += [f"        {field.name}: {_annotation(field)} = ...," for field in kind.FIELDS]
    return "\n".join([*lines, "    ) -> None: ...", "", ""])


def _annotation(field: config.Field) -> str:
    kind = field.kind
    if field.choices:
        kind = f"Literal[{', '.join(json_string(choice) for choice in field.choices)}]"
    return kind + " | None" * field.optional


def json_string(text: str) -> str:
    """The text in double quotes."""
    return '"' + text + '"'


def main() -> int:
    """0 if config.pyi is what it should be, or has been written."""
    parser = argparse.ArgumentParser(prog="python -m normformer_rs._stubs", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="fail if config.pyi is out of date")
    what.add_argument("--write", action="store_true", help="write config.pyi")
    if parser.parse_args().write:
        STUB.write_text(stub(), encoding="utf-8")
        return 0
    if not STUB.exists() or STUB.read_text(encoding="utf-8") != stub():
        print(f"{STUB} is out of date: python -m normformer_rs._stubs --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
