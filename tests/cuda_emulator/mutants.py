"""Mutants of the CUDA kernels: small changes, made by rule at every place of the sources where the rule fits.

Each must change what some case of the emulated device computes. All mutants of a file are compiled into one program,
which asks `mutant(n)` at each place (mutants.hpp); so a mutant costs a run, not a compilation.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SRC = Path(__file__).resolve().parents[2] / "src"
HEADER = Path(__file__).with_name("mutants.hpp")
RULES = {
    "barrier": "a __syncthreads is left out",
    "statement": "an assignment or a call is left out",
    "always": "a condition is taken for true",
    "never": "a condition is taken for false",
    "first": "a loop leaves out its first turn",
    "last": "a loop leaves out its last turn",
    "over": "a loop takes a turn too many",
    "bound": "a comparison is off by one",
    "part": "a part of a condition is left out",
    "nan": "a comparison with NaN answers the other way",
    "sign": "+ and - are exchanged",
    "factor": "a factor, divisor or stride is 1",
    "neighbour": "memory is indexed one place further",
    "swap": "a function's first two arguments are exchanged",
}
TYPED = {"nan", "swap"}
"""Rules whose place the compiler decides: only where the types fit is there a mutant."""


class Mutant(NamedTuple):
    number: int
    rule: str
    file: str
    line: int
    code: str
    """The line's text."""
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column} {self.rule}"


class Edit(NamedTuple):
    """A mutant's text before and after a part of the source; `{}` in it is the mutant's number."""

    rule: str
    start: int
    end: int
    before: str = ""
    after: str = ""


PREFIX = 1 << 30
"""Added to the end of an edit that has no text after its part: it comes before all others that start there."""


_ALIKE = re.compile(r"static DEV \w+ (\w+)\((f32|double|int|i64) \w+, \2 ")


def sources() -> list[Path]:
    """Every CUDA source, in a fixed order."""
    return sorted([*SRC.rglob("*.cu"), *SRC.rglob("*.cuh")])


def mutants() -> tuple[list[Mutant], dict[Path, str]]:
    """All mutants, and each file's text with all of its mutants in it."""
    found: list[Mutant] = []
    written = {}
    texts = {path: path.read_text() for path in sources()}
    declared = {name for text in texts.values() for name, _ in _ALIKE.findall(text)}
    for path, text in texts.items():
        lines, numbered = text.splitlines(), []
        for edit in sorted(edits(text, declared), key=lambda edit: (edit.start, edit.rule)):
            line = text.count("\n", 0, edit.start) + 1
            column = edit.start - text.rfind("\n", 0, edit.start)
            numbered.append((len(found), edit))
            found.append(Mutant(len(found), edit.rule, path.name, line, lines[line - 1].strip(), column))
        written[path] = f'#include "{HEADER}"\n{_edited(text, numbered)}'
    return found, written


def _edited(text: str, numbered: list[tuple[int, Edit]]) -> str:
    """The text with all edits: of those that start together the longest is outermost."""
    inserts = []
    for number, edit in numbered:
        if edit.before:
            inserts.append((edit.start, 1, -edit.end, number, edit.before.format(number)))
        if edit.after:
            inserts.append((edit.end, 0, -edit.start, -number, edit.after.format(number)))
    parts, last = [], 0
    for place, *_, part in sorted(inserts):
        parts += [text[last:place], part]
        last = place
    return "".join([*parts, text[last:]])


# The rules.


def edits(text: str, declared: set[str]) -> Iterator[Edit]:
    """The places of every rule. Declarations, templates, `if constexpr` and preprocessor lines have none. `declared`:
    functions whose first two arguments are of one type."""
    code = _functions(text)
    headers = [*_loops(code)]
    yield from _in_loops(code, headers)
    for start, clauses, end in headers:
        # Steps and bounds have their own rules; the beginning of a loop is code like any other.
        code = code[: clauses[0]] + " " * (end - clauses[0] - 1) + ";" + code[end:]
        code = code[:start] + "     " + code[start + 5 :]
    yield from _statements(code)
    yield from _conditions(code)
    yield from _comparisons(code)
    yield from _arithmetic(code)
    yield from _indices(code, text)
    yield from _calls(code, declared)


def _functions(text: str) -> str:
    """The text with everything blank but what functions do when they run."""
    code = re.sub(r"//[^\n]*", _blank, text)
    code = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", _blank, code, flags=re.M)
    code = re.sub(r"\benum\b[^;]*;", _blank, code)
    code = re.sub(r"\b(?:static_assert|SHARED)\b[^;]*;|\btemplate <[^>]*>|\bif constexpr (?=\()", _blank, code)
    inside, kinds = [False] * len(code), []
    previous = 0
    for at, letter in enumerate(code):
        inside[at] = any(kinds)
        if letter == "{":
            kinds.append(any(kinds) or code[previous:at].rstrip().endswith((")", "const")))
        elif letter == "}":
            kinds.pop()
        if letter in "{};":
            previous = at + 1
    for match in re.finditer(r"\)\s*:(?= \w+\()([^;]*?)\{", code):  # a constructor's list
        inside[match.start(1) : match.end(1)] = [True] * len(match[1])
    code = "".join(c if keep or c in "\n" else " " for c, keep in zip(code, inside))
    for match in re.finditer(r"\bif constexpr ", text):  # what the compiler decides
        opened = match.end()
        if opened < len(code) and code[opened] == "(":
            closed = _closing(code, opened)
            code = code[:opened] + " " * (closed + 1 - opened) + code[closed + 1 :]
    # Sizes of arrays.
    types = r"f32|double|int|u32|i64|bool|decltype\([^()]*\([^()]*\)\)|Pack<[^>]*>"
    sized = rf"(?<![\w.])(?:{types}) \w+(?:\[[^\]]*\])+(?:, \w+(?:\[[^\]]*\])+)*"
    return re.sub(r"\((?:&\w+)\)\[[^\]]*\]|&\)\[[^\]]*\]", _blank, re.sub(sized, _blank, code))


def _blank(match: "re.Match[str]") -> str:
    return re.sub(r"[^\n]", " ", match[0])


def _closing(code: str, opened: int) -> int:
    """Where the bracket closes that opens there."""
    depth = 0
    for at in range(opened, len(code)):
        depth += code[at] in "([{"
        depth -= code[at] in ")]}"
        if depth == 0:
            return at
    raise ValueError(f"a bracket does not close: {code[opened : opened + 60]!r}")


def _loops(code: str) -> Iterator[tuple[int, tuple[int, int], int]]:
    """(start, the ends of the first two clauses, end) of each loop with three clauses."""
    for match in re.finditer(r"\bfor \(", code):
        end = _closing(code, match.end() - 1)
        semicolons = [at for at in range(match.end(), end) if code[at] == ";"]
        if len(semicolons) == 2:
            yield match.start(), (semicolons[0], semicolons[1]), end + 1
        elif not semicolons:
            yield match.start(), (match.end(), end), end + 1


def _in_loops(code: str, headers: list) -> Iterator[Edit]:
    for _, (first, second), end in headers:
        bound = re.search(r" (<|>) (?!.* [<>] )(.*)", code[first:second])
        if code[first] != ";" or bound is None:
            continue
        yield Edit("first", _begin(code, first), first, after=_step(code[second + 1 : end - 1]))
        short, far = ("-", "+") if bound[1] == "<" else ("+", "-")
        compared = first + bound.start(2)
        yield Edit("last", compared, second, after=f" {short} mutant({{}})")
        if bound[1] == "<" and re.search("[a-z]", bound[2]):  # else it is the size of an array
            yield Edit("over", compared, second, after=f" {far} mutant({{}})")


def _step(clause: str) -> str:
    """What leaves out the first turn: a step more at the beginning."""
    added = re.search(r"\+= (.+)$", clause)
    if added is not None:
        return f" + mutant({{}}) * ({added[1]})"
    return " + mutant({})" if "++" in clause else " / (1 + mutant({}))"


_PLACE = r"\*?(?:\+\+|--)?\*?[A-Za-z_]\w*(?:\.\w+|\[[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\])*"
_ASSIGNMENT = re.compile(rf"{_PLACE}(?: [-+*/^&|]?= [^;{{}}]*| ?(?:\+\+|--))?;")
_CALL = re.compile(r"(?!return|if|for|while|continue|break)[A-Za-z_][\w.]*(?:<[\w:]+>)?\([^;{}]*\);")


def _statements(code: str) -> Iterator[Edit]:
    for match in re.finditer(r"(?<=[;{})])\s+(?=[*+\w])|\belse\s+(?=[*\w])", code):
        at = match.end()
        if re.search(r"while \([^;{}]*\)\s*$", code[:at]):
            continue
        if code.startswith("__syncthreads();", at):
            yield Edit("barrier", at, PREFIX + at, before="if (mutant({})) {{}} else ")
        elif ((found := _ASSIGNMENT.match(code, at)) and re.search(r"[=+-]", found[0])) or _CALL.match(code, at):
            yield Edit("statement", at, PREFIX + at, before="if (mutant({})) {{}} else ")


def _conditions(code: str) -> Iterator[Edit]:
    for match in re.finditer(r"\b(if|while) (\()", code):
        rules = ("always", "never") if match[1] == "if" else ("never",)
        yield from _decided(match.end(), _closing(code, match.start(2)), rules)
    for match in re.finditer(r" (?:==|!=) ", code):
        start, end = _begin(code, match.start()), _end(code, match.end(), is_whole=True)
        if code[end] == ";" and "?" not in code[start:end] and re.search(r"(?:return |[^=!<>]= )$", code[:start]):
            yield from _decided(start, end, ("always", "never"))
    for match in re.finditer(r"\s\? ", code):
        yield from _decided(_begin(code, match.start()), match.start(), ("always", "never"))
    for match in re.finditer(r" (&&|\|\|) ", code):
        for start, end in ((_begin(code, match.start(), True), match.start()), (match.end(), _end(code, match.end()))):
            before, after = ("(mutant({}) || (", "))") if match[1] == "&&" else ("(!mutant({}) && (", "))")
            yield Edit("part", start, end, before, after)


def _decided(start: int, end: int, rules: tuple[str, ...]) -> Iterator[Edit]:
    if "always" in rules:
        yield Edit("always", start, end, "(mutant({}) || (", "))")
    yield Edit("never", start, end, "(!mutant({}) && (", "))")


_BEFORE = re.compile(r"(?:[-+*/^&|]?= | \? | : |\breturn |&& |\|\| )$")


def _begin(code: str, end: int, stop_at_logic: bool = False) -> int:
    """Where the expression begins that ends there."""
    depth = 0
    for at in range(end - 1, -1, -1):
        letter = code[at]
        if letter in ")]}":
            depth += 1
        elif letter in "([{":
            if depth == 0:
                return at + 1
            depth -= 1
        elif depth == 0:
            if letter in ",;":
                return at + 1 + (code[at + 1] == " ")
            before = _BEFORE.search(code, max(0, at - 7), at + 1)
            is_comparison = re.search(r"[=!<>]= $", code[max(0, at - 3) : at + 1]) is not None
            if before and not is_comparison and (stop_at_logic or before[0] not in ("&& ", "|| ")):
                return at + 1
    return 0


def _end(code: str, start: int, is_whole: bool = False) -> int:
    """Where the operand of a comparison ends that begins there, or the whole expression."""
    depth = 0
    for at in range(start, len(code)):
        letter = code[at]
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            if depth == 0:
                return at
            depth -= 1
        elif (depth == 0 and letter in ",;") or (
            depth == 0 and not is_whole and code.startswith((" &&", " ||", " ?", " :", "\n"), at)
        ):
            return at
    raise ValueError("an expression does not end")


def _comparisons(code: str) -> Iterator[Edit]:
    for match in re.finditer(r" (<|<=|>|>=) ", code):
        end = _end(code, match.end())
        more = "+" if match[1] in ("<", ">=") else "-"
        yield Edit("bound", match.end(), end, after=f" {more} mutant({{}})")
        yield Edit("nan", _begin(code, match.start(), stop_at_logic=True), match.start(), "compared({}, ", ")")


_OPERAND = re.compile(
    r"(?:\((?:double|f32|i64|int|u32|u64)\))?\*?[A-Za-z_0-9][\w.]*(?:<[\w:]+>)?"
    r"(?:\[[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|\.\w+)*"
    r"|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
)


def _arithmetic(code: str) -> Iterator[Edit]:
    for match in re.finditer(r"(?<=[\w)\]]) [-+] (?=[\w(*])", code):
        yield Edit("sign", match.end(), PREFIX + match.end(), "flip({}) * ")
    for match in re.finditer(r" [-+]= (?=\S)", code):
        yield Edit("sign", match.end(), _end(code, match.end(), is_whole=True), "flip({}) * (", ")")
    for match in re.finditer(r"(?:[(,=] ?|return )-(?=[A-Za-z_(])", code):
        yield Edit("sign", match.end(), PREFIX + match.end(), "flip({}) * ")
    for match in re.finditer(r"(?<=[\w)\]]) [*/%] (?=[\w(])", code):
        operand = _OPERAND.match(code, match.end())
        if operand is not None and operand[0] != "1" and not code.startswith("::", operand.end()):
            yield Edit("factor", match.end(), operand.end(), "(mutant({}) ? 1 : ", ")")
    for match in re.finditer(r" [*/]= (?=\S)", code):
        yield Edit("factor", match.end(), _end(code, match.end(), is_whole=True), "(mutant({}) ? 1 : ", ")")


def _indices(code: str, text: str) -> Iterator[Edit]:
    pointers = {*re.findall(r"\*\s?(?:const )?(\w+)(?=[,;)=])", text), *re.findall(r"SHARED\([\w]+, (\w+)", text)}
    for match in re.finditer(r"(?<![\w.])(?:\w+\.)*(\w+)(\[)", code):
        if match[1] in pointers:
            yield Edit("neighbour", match.end(), _closing(code, match.start(2)), after=" + mutant({})")


def _calls(code: str, declared: set[str]) -> Iterator[Edit]:
    for name in sorted(declared):
        for match in re.finditer(rf"(?<![\w.:])(?:\w+::)?{name}(?=\()", code):
            yield Edit("swap", match.start(), match.end(), "SWAPPED({}, ", ")")
