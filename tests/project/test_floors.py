"""The floors of src and of Python's package: a folder imports only folders below it, and files import each other in no
large circles, in Python in none.

Read from the sources without compiling: `use` declarations and paths, tests left out; of Python the imports, those
inside functions too, from its syntax tree. A re-export is followed to where the name is declared.
`python tests/project/test_floors.py` prints circles and what each folder imports.
"""

import ast
import collections
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "python" / "normformer_rs"
FLOORS = (
    ("error",),
    ("atomic", "host"),
    ("options", "analysis", "cpu", "cuda"),
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
PYTHON_FLOORS = (
    (
        "__init__",
        "_core",
        "_html",
        "_loading",
        "_optional",
        "_tables",
        "declarations",
        "errors",
        "schemes",
        "text",
    ),
    ("config", "pictures"),
    ("nn", "scores"),
    ("loop", "norms"),
    ("_stubs", "bench", "demo", "formats", "surgery"),
    ("analysis",),
    ("commands", "integrations"),
    ("fairseq_plugin", "figures", "reproduce"),
    ("study",),
    ("cli",),
    ("__main__",),
)
"""The same of python/normformer_rs: packages, and files beside them. Only the lowest floor's know each other."""
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
_ALIAS_OR_BRACE = re.compile(r"[{};]|^\s*(?:pub(?:\([^)]*\))? +)?type +(\w+)[^;]*=", re.M)
_FOR_TYPES = ("TYPE_CHECKING", "typing.TYPE_CHECKING")
_IMPL = re.compile(r"(?:pub(?:\([^)]*\))? +)?(?:unsafe +)?(?:impl|trait)\b")


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
        self.types = _TYPE.findall(self.code) + list(_aliases(self.code))
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


def _aliases(code: str) -> Iterator[str]:
    """Names that `type` gives, but for those of a trait or of its implementation."""
    blocks: list[bool] = []
    start = 0
    for found in _ALIAS_OR_BRACE.finditer(code):
        if found[1]:
            if not (blocks and blocks[-1]):
                yield found[1]
            continue
        if found[0] == "{":
            head = re.sub(r"#!?\[[^\]]*\]", "", code[start : found.start()]).strip()
            blocks.append(bool(_IMPL.match(head)))
        elif found[0] == "}" and blocks:
            blocks.pop()
        start = found.end()


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

    def twice(self) -> dict[str, list[str]]:
        """Names of types that are declared more than once, and where."""
        found = collections.defaultdict(list)
        for module, source in self.sources.items():
            for name in source.types:
                found[name].append(self.files[module])
        return {name: files for name, files in sorted(found.items()) if len(files) > 1}


def _folder(file: str) -> str:
    return file.partition("/")[0].removesuffix(".rs").removesuffix(".py")


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """The groups of files that import each other, the largest first (Tarjan's strongly connected components)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(file: str) -> None:
        number[file] = low[file] = len(number)
        stack.append(file)
        for other in sorted(imports[file]):
            if other not in number:
                visit(other)
            if other in stack:
                low[file] = min(low[file], low[other])
        if low[file] == number[file]:
            place = stack.index(file)
            found.append(sorted(stack[place:]))
            del stack[place:]

    for file in imports:
        if file not in number:
            visit(file)
    return sorted((circle for circle in found if len(circle) > 1), key=lambda circle: (-len(circle), circle))


def folders(imports: dict[str, set[str]]) -> dict[str, dict[str, list[str]]]:
    """By folder, the folders that it imports, and the files that do."""
    found: dict[str, dict[str, list[str]]] = {}
    for file, others in imports.items():
        folder = _folder(file)
        found.setdefault(folder, {})
        for other in {_folder(other) for other in others} - {folder}:
            found[folder].setdefault(other, []).append(file)
    return found


def _imported(body: Iterable[ast.AST]) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports but those for type checkers alone."""
    for statement in body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield statement
        elif isinstance(statement, ast.If) and ast.unparse(statement.test) in _FOR_TYPES:
            yield from _imported(statement.orelse)
        else:
            for part in ("body", "handlers", "cases", "orelse", "finalbody"):
                yield from _imported(getattr(statement, part, ()))


class Package:
    """The files of a package of Python's, and what each imports."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.files: dict[Module, str] = {}
        trees: dict[Module, ast.Module] = {}
        for path in sorted([*folder.rglob("*.py"), *folder.glob("_core.pyi")]):
            module = path.relative_to(folder).with_suffix("").parts
            module = module[:-1] if module[-1] == "__init__" else module
            self.files[module] = str(path.relative_to(folder).with_suffix(".py"))
            trees[module] = ast.parse(path.read_text(encoding="utf-8") if path.suffix == ".py" else "")
        # Names that the package loads when they are asked for: its __init__ imports them for type checkers.
        shown = [s for s in ast.walk(trees[()]) if isinstance(s, ast.ImportFrom) and s.level]
        self.homes = {alias.asname or alias.name: self._of((), s, alias.name) for s in shown for alias in s.names}
        self.imports = {file: self._imports(module, trees[module]) for module, file in self.files.items()}

    def _imports(self, module: Module, tree: ast.Module) -> set[str]:
        file = self.files[module]
        package = module if file.endswith("__init__.py") else module[:-1]
        found: set[Module | None] = set()
        for statement in _imported(tree.body):
            for alias in statement.names:
                if isinstance(statement, ast.ImportFrom):
                    found.add(self._of(package, statement, alias.name))
                else:
                    first, *rest = alias.name.split(".")
                    found.add(tuple(rest) if first == self.name else None)
        return {self.files[target] for target in found if target is not None} - {file}

    def _of(self, package: Module, statement: ast.ImportFrom, name: str) -> Module | None:
        """The module that `from … import name` reads, in a module of `package`; none: of another package."""
        parts = tuple((statement.module or "").split(".")) if statement.module else ()
        if statement.level:
            base = package[: len(package) - statement.level + 1] + parts
        elif parts[:1] == (self.name,):
            base = parts[1:]
        else:
            return None
        if (*base, name) in self.files:
            return (*base, name)
        return self.homes.get(name, ()) if not base and hasattr(self, "homes") else base


def _row(folder: str, imports: set[str], floors: tuple[tuple[str, ...], ...] = FLOORS) -> str:
    order = [name for floor in floors for name in floor]
    shown = sorted(imports - {"error", "errors"}, key=order.index)
    return f"| {folder} | {', '.join(shown) or 'nothing'} |"


def _packages(found: dict[str, dict[str, list[str]]]) -> list[str]:
    """The table of Python's packages."""
    names = [name for floor in PYTHON_FLOORS for name in floor if (PYTHON / name).is_dir()]
    return [_row(name, set(found[name]), PYTHON_FLOORS) for name in names]


def _upwards(found: dict[str, dict[str, list[str]]], floors: tuple[tuple[str, ...], ...]) -> list[str]:
    """Imports of a higher floor, or of a neighbour."""
    height = {name: floor for floor, names in enumerate(floors) for name in names}
    assert set(found) == set(height), "a folder has no floor, or a floor no folder"
    return [
        f"{folder} imports {other} ({', '.join(files)})"
        for folder, imports in found.items()
        for other, files in imports.items()
        if height[other] >= height[folder]
    ]


@pytest.fixture(scope="module")
def crate() -> Crate:
    return Crate(ROOT / "src")


@pytest.fixture(scope="module")
def package() -> Package:
    return Package(PYTHON)


def test_each_folder_imports_only_folders_below_it(crate):
    found = folders(crate.imports)
    found.pop("lib")
    assert not _upwards(found, FLOORS)


@pytest.mark.full
def test_each_package_imports_only_packages_below_it(package):
    found = folders(package.imports)
    lowest = PYTHON_FLOORS[0]
    for name in lowest:
        found[name] = {other: files for other, files in found[name].items() if other not in lowest}
    assert not _upwards(found, PYTHON_FLOORS)


def test_files_do_not_import_each_other_in_large_circles(crate):
    assert [circle for circle in circles(crate.imports) if len(circle) > LONGEST] == []


@pytest.mark.full
def test_modules_do_not_import_each_other_in_circles(package):
    assert circles(package.imports) == []


def test_a_types_name_is_its_own(crate):
    assert crate.twice() == {}, "a type has another's name"


def test_what_is_read(tmp_path):
    files = {
        "lib.rs": "pub mod a;\npub mod b;\n#[cfg(test)]\nmod t;\n",
        "t.rs": "use crate::a;",
        "a/mod.rs": "mod c;\npub use c::{Shown, Used};\nfn f() -> Used { g('{', \"crate::b\") } // crate::b\n",
        "a/c.rs": "use super::super::b::{self as other, Thing};\nfn f() { other::g() }\n"
        "#[cfg(test)]\nmod tests { use crate::t; fn g() { {} } }\npub struct Shown;\npub struct Used;\n",
        "b.rs": "use crate::a::Shown;\npub struct Thing;\npub type Used = u8;\n"
        "impl Iterator for Thing {\n    type Shown = u8;\n    fn f() {\n        type Thing = u8;\n    }\n}\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    crate = Crate(tmp_path)
    assert crate.imports == {"lib.rs": set(), "a/mod.rs": {"a/c.rs"}, "a/c.rs": {"b.rs"}, "b.rs": {"a/c.rs"}}
    assert circles(crate.imports) == [["a/c.rs", "b.rs"]]
    assert crate.twice() == {"Thing": ["b.rs", "b.rs"], "Used": ["a/c.rs", "b.rs"]}


def test_what_is_read_of_python(tmp_path):
    files = {
        "__init__.py": "if TYPE_CHECKING:\n    from .a import Shown\n",
        "a.py": "import json\nimport p.b\ndef f():\n    from . import c\n",
        "b.py": "try:\n    from .c.d import f\nexcept ImportError:\n    from p import Shown\n",
        "c/__init__.py": "from . import d\n",
        "c/d.py": "if TYPE_CHECKING:\n    from .. import a\nelse:\n    from . import __name__\n",
    }
    for name, text in files.items():
        path = tmp_path / "p" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    package = Package(tmp_path / "p")
    within = {"__init__.py": set(), "c/__init__.py": {"c/d.py"}, "c/d.py": {"c/__init__.py"}}
    assert package.imports == {"a.py": {"b.py", "c/__init__.py"}, "b.py": {"a.py", "c/d.py"}, **within}
    assert circles(package.imports) == [["a.py", "b.py"], ["c/__init__.py", "c/d.py"]]
    assert folders(package.imports)["b"] == {"a": ["b.py"], "c": ["b.py"]}


if __name__ == "__main__":
    read, python = Crate(ROOT / "src"), Package(PYTHON)
    for circle in circles(read.imports) + circles(python.imports):
        print(len(circle), "files:", *circle)
    print("twice:", read.twice())
    known = {name for floor in FLOORS for name in floor}
    for folder, imports in sorted(folders(read.imports).items()):
        print(_row(folder, set(imports) & known))
    print(*_packages(folders(python.imports)), sep="\n")
