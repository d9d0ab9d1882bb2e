"""The floors of src: a folder imports only folders below it, and files do not import each other in circles.

Read from the sources without compiling: `use` declarations and paths, tests left out. A re-export is followed to where
the name is declared. `python tests/project/test_floors.py` prints circles and docs/architecture.md's table.
"""

import collections
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = (
    ("error",),
    ("host",),
    ("options", "analysis", "atomic", "cpu", "cuda"),
    ("data", "kernel", "ownership", "parametrisation"),
    ("metrics", "norm", "residual"),
    ("init",),
    ("config", "operator"),
    ("model",),
    ("search",),
    ("train",),
    ("run",),
    ("bindings",),
)
"""From the bottom up; those of a floor do not know each other."""
LONGEST = 5
"""Files that may import each other in a circle."""

Module = tuple[str, ...]
_SKIPPED = re.compile(
    r"""//[^\n]*|/\*.*?\*/|\bb?r(?P<h>#*)".*?"(?P=h)|\bb?"(?:\\.|[^"\\])*"|"(?:\\.|[^"\\])*"|'(?:\\[^']+|[^'\\\n])'""",
    re.S,
)
_USE = re.compile(r"\b(?P<shown>pub(?:\([^)]*\))?\s+)?use\s+(?P<tree>[^;]+);")
_PATH = re.compile(r"(?<![\w:])\w+(?:\s*::\s*\w+)+")
_TYPE = re.compile(r"^ {0,4}(?:pub(?:\([^)]*\))? +)?(?:unsafe +)?(?:struct|enum|trait|union) +(\w+)", re.M)


class Source:
    """A file: its names, what it re-exports, and the paths that it writes."""

    def __init__(self, text: str) -> None:
        code = _SKIPPED.sub('""', text).replace("$crate", "crate")
        self.code, self.test_modules = _without_tests(code)
        self.uses = [
            (path, name, bool(use["shown"])) for use in _USE.finditer(self.code) for path, name in _leaves(use["tree"])
        ]
        self.names = {name: path for path, name, _ in self.uses if path[-1:] != ("*",)}
        self.body = _USE.sub("", self.code)
        self.paths = {tuple(re.split(r"\s*::\s*", path)) for path in _PATH.findall(self.body)}
        self.types = _TYPE.findall(self.code)
        self.macros = re.findall(r"#\[macro_export\]\s*macro_rules!\s+(\w+)", self.code)


def _without_tests(code: str) -> tuple[str, list[str]]:
    """The code without what is compiled for tests only, and the names of modules that are."""
    kept, modules, start = [], [], 0
    for found in re.finditer(r"#\[cfg\(test\)\]", code):
        if found.start() < start:
            continue
        kept.append(code[start : found.start()])
        end = re.compile(r"[;{]").search(code, found.end())
        assert end
        start = end.end()
        if end[0] == ";":
            modules += re.findall(r"\bmod\s+(\w+)", code[found.end() : start])
        depth = int(end[0] == "{")
        while depth:
            brace = re.compile(r"[{}]").search(code, start)
            assert brace
            depth, start = depth + (1 if brace[0] == "{" else -1), brace.end()
    return "".join([*kept, code[start:]]), modules


def _leaves(tree: str, before: Module = ()) -> Iterator[tuple[Module, str]]:
    """(path, name in scope) of everything that a `use` declares."""
    tree = tree.strip()
    head, brace, rest = tree.partition("{")
    if not brace:
        path, _, name = (part.strip() for part in re.sub(r"\s+as\s+", "=", tree).partition("="))
        full = before + tuple(re.split(r"\s*::\s*", path))
        full = full[:-1] if full[-1] == "self" and len(full) > 1 else full
        yield full, name or full[-1]
        return
    before += tuple(part.strip() for part in head.strip().removesuffix("::").split("::") if part)
    depth, item = 0, ""
    for letter in rest.rpartition("}")[0] + ",":
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            if item.strip():
                yield from _leaves(item, before)
            item = ""
        else:
            item += letter


class Crate:
    """The files of a crate by module, and what each imports."""

    def __init__(self, src: Path) -> None:
        self.sources: dict[Module, Source] = {}
        self.files: dict[Module, str] = {}
        for path in sorted(src.rglob("*.rs")):
            module = path.relative_to(src).with_suffix("").parts
            module = module[:-1] if module[-1] in ("mod", "lib") else module
            self.files[module] = str(path.relative_to(src))
            self.sources[module] = Source(path.read_text(encoding="utf-8"))
        tests = {(*module, name) for module, source in self.sources.items() for name in source.test_modules}
        for module in [m for m in self.sources if any(m[: len(test)] == test for test in tests)]:
            del self.sources[module], self.files[module]
        self.macros = {name: module for module, source in self.sources.items() for name in source.macros}
        self.imports = {self.files[module]: self._imports(module) for module in self.sources}

    def _imports(self, module: Module) -> set[str]:
        source = self.sources[module]
        found = {self._of(module, path) for path in source.paths}
        for path, name, is_shown in source.uses:
            if not is_shown or re.search(rf"\b{name}\b", source.body):
                found.add(self._of(module, path))
        return {self.files[target] for target in found if target is not None and target != module}

    def _of(self, module: Module, path: Module, depth: int = 0) -> Module | None:
        """The module that declares what a path in this module names; none: another crate, or a name of this file."""
        first, at = path[0], module
        if first == "crate":
            at = ()
        elif first == "super":
            at = module[:-1]
        elif first == "self":
            pass
        elif (*module, first) in self.sources:
            at = (*module, first)
        elif first in self.sources[module].names and self.sources[module].names[first] != path and depth < 20:
            target = self.sources[module].names[first]
            return self._of(module, target + path[1:], depth + 1) if target != (first,) else None
        else:
            return None
        for i, part in enumerate(path[1:], 1):
            if part == "super":
                at = at[:-1]
            elif (*at, part) in self.sources:
                at = (*at, part)
            elif part in self.sources[at].names and depth < 20:
                target = self.sources[at].names[part]
                return self._of(at, target + path[i + 1 :], depth + 1) or at
            elif not at and part in self.macros:
                return self.macros[part]
            else:
                return at
        return at

    def circles(self) -> list[list[str]]:
        """The groups of files that import each other, the largest first (Tarjan's strongly connected components)."""
        number: dict[str, int] = {}
        low: dict[str, int] = {}
        stack: list[str] = []
        circles: list[list[str]] = []

        def visit(file: str) -> None:
            number[file] = low[file] = len(number)
            stack.append(file)
            for other in sorted(self.imports[file]):
                if other not in number:
                    visit(other)
                if other in stack:
                    low[file] = min(low[file], low[other])
            if low[file] == number[file]:
                place = stack.index(file)
                circles.append(sorted(stack[place:]))
                del stack[place:]

        for file in self.imports:
            if file not in number:
                visit(file)
        return sorted((circle for circle in circles if len(circle) > 1), key=lambda circle: (-len(circle), circle))

    def folders(self) -> dict[str, dict[str, list[str]]]:
        """By folder, the folders that it imports, and the files that do."""
        found: dict[str, dict[str, list[str]]] = {}
        for file, others in self.imports.items():
            folder = _folder(file)
            found.setdefault(folder, {})
            for other in {_folder(other) for other in others} - {folder}:
                found[folder].setdefault(other, []).append(file)
        return found

    def twice(self) -> dict[str, list[str]]:
        """Names of types that are declared more than once, and where."""
        found = collections.defaultdict(list)
        for module, source in self.sources.items():
            for name in source.types:
                found[name].append(self.files[module])
        return {name: files for name, files in sorted(found.items()) if len(files) > 1}


def _folder(file: str) -> str:
    return file.partition("/")[0].removesuffix(".rs")


def _row(folder: str, imports: set[str]) -> str:
    order = [name for floor in FLOORS for name in floor]
    shown = sorted(imports - {"error"}, key=order.index)
    return f"| {folder} | {', '.join(shown) or 'nothing'} |"


@pytest.fixture(scope="module")
def crate() -> Crate:
    return Crate(ROOT / "src")


def test_each_folder_imports_only_folders_below_it(crate):
    height = {name: floor for floor, names in enumerate(FLOORS) for name in names}
    folders = crate.folders()
    folders.pop("lib")
    assert set(folders) == set(height), "a folder has no floor, or a floor no folder"
    wrong = [
        f"{folder} imports {other} ({', '.join(files)})"
        for folder, imports in folders.items()
        for other, files in imports.items()
        if height[other] >= height[folder]
    ]
    assert not wrong


def test_files_do_not_import_each_other_in_large_circles(crate):
    assert [circle for circle in crate.circles() if len(circle) > LONGEST] == []


def test_the_documented_imports(crate):
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition("\n## Floors\n")[2].partition("\n## ")[0]
    documented = [re.sub(r" \([^)]*\)", "", line) for line in section.splitlines() if line.startswith("| ")][1:]
    folders = crate.folders()
    rows = [_row(name, set(folders[name])) for floor in FLOORS for name in floor]
    assert documented == rows


def test_a_types_name_is_its_own(crate):
    assert crate.twice() == {}, "a type has another's name"


def test_what_is_read(tmp_path):
    files = {
        "lib.rs": "pub mod a;\npub mod b;\n#[cfg(test)]\nmod t;\n",
        "t.rs": "use crate::a;",
        "a/mod.rs": "mod c;\npub use c::{Shown, Used};\nfn f() -> Used { g('{', \"crate::b\") } // crate::b\n",
        "a/c.rs": "use super::super::b::{self as other, Thing};\nfn f() { other::g() }\n"
        "#[cfg(test)]\nmod tests { use crate::t; fn g() { {} } }\npub struct Shown;\npub struct Used;\n",
        "b.rs": "use crate::a::Shown;\npub struct Thing;\npub struct Used;\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    crate = Crate(tmp_path)
    assert crate.imports == {"lib.rs": set(), "a/mod.rs": {"a/c.rs"}, "a/c.rs": {"b.rs"}, "b.rs": {"a/c.rs"}}
    assert crate.circles() == [["a/c.rs", "b.rs"]]
    assert crate.twice() == {"Used": ["a/c.rs", "b.rs"]}


if __name__ == "__main__":
    read = Crate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "src")
    for circle in read.circles():
        print(len(circle), "files:", *circle)
    print("twice:", read.twice())
    known = {name for floor in FLOORS for name in floor}
    for folder, imports in sorted(read.folders().items()):
        print(_row(folder, set(imports) & known))
