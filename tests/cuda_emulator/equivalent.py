"""Mutants that no case finds: EQUIVALENT with the reason why none can, UNFOUND those that nobody has judged yet."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from .mutants import Mutant

UNFOUND = Path(__file__).with_name("unfound.txt")
"""A line for each: file, rule, which of the mutants by that rule in such a line, and the line's text. `python -m
cuda_emulator.hunt` looks for them with every case and says which are found now."""


class Equivalent(NamedTuple):
    """The mutants by some rules of the lines of a file that hold a text."""

    file: str
    rules: str
    code: str
    reason: str
    places: tuple[int, ...] = ()
    """Which of the mutants by one rule in such lines; empty: all."""


AGAIN = "the later pass writes the same numbers again"
SAME = "all these threads hold the same number"
ROUNDING = "the result is the same but for rounding"
EQUIVALENT = [
    Equivalent("reduce.cuh", "swap", "Operation::of(v[k], ", "the operations commute"),
    Equivalent("reduce.cuh", "always factor", "if (lane % 32 == 0)", SAME),
    Equivalent("parameter.cuh", "always", "if (team.lane == 0) scratch[team.row] = sum[0];", SAME),
    Equivalent("parameter.cuh", "always", "if (threadIdx.x == 0) {", SAME),
    Equivalent("parameter.cuh", "always", "if (team.row == 0)", "only the first row's sum is stored", (0,)),
    Equivalent("columns.cuh", "never part statement", "*ahead.wrote = writes ? 1.f : 0.f;", AGAIN),
    Equivalent("columns.cuh", "always", "*ahead.wrote = writes ? 1.f : 0.f;", SAME, (0,)),
    Equivalent("columns.cuh", "never", "(a.wrote && *a.wrote == 1.f)) return;", AGAIN),
    Equivalent("columns.cuh", "part", "(a.wrote && *a.wrote == 1.f)) return;", AGAIN, (0, 1)),
    Equivalent("columns.cuh", "never part", "!is_exact(a.stats, chunks * VEC)) return;", AGAIN),
    Equivalent("philox.cuh", "never", "if (threshold == 0) return;", "no 16 bits are below 0", (1,)),
    Equivalent("prelude.cuh", "last", "i += 2", "the step is 2 and N is even"),
    Equivalent("rows.cuh", "never", "widen(HELD > 0 ? kept[i] :", "what is read again is what was kept"),
    Equivalent("rows.cuh", "always", "const f32 d = UNITS ? fmaf", "times 1 changes nothing", (0,)),
    Equivalent("rows.cuh", "never", "const f32 d = UNITS ? fmaf", "the shift is 0 where the power is 1", (1,)),
    Equivalent("rows.cuh", "always never", "return EUCLIDEAN ? __uint_as_float", ROUNDING),
    Equivalent("rows.cuh", "always", "if (!OF_LARGEST && !(squares >=", ROUNDING),
    Equivalent("rows.cuh", "always bound", "if (HELD > 0) line.kept[i] = stored;", "nothing reads it where HELD is 0"),
    Equivalent("rows.cuh", "always", "if (Norm::STATS == 2) {", "nothing reads the second sum"),
]


def places(mutants: Iterable[Mutant]) -> dict[int, int]:
    """For each mutant's number which it is of the mutants by its rule in lines of its text."""
    counts: Counter[tuple[str, str, str]] = Counter()
    found = {}
    for mutant in mutants:
        key = (mutant.file, mutant.code, mutant.rule)
        found[mutant.number] = counts[key]
        counts[key] += 1
    return found


def lines(mutants: list[Mutant]) -> dict[int, str]:
    """Each mutant's line of UNFOUND."""
    where = places(mutants)
    return {m.number: f"{m.file} {m.rule} {where[m.number]} {m.code}" for m in mutants}


def judged(mutants: list[Mutant]) -> dict[int, Equivalent]:
    """The entries by the numbers of the mutants that they name."""
    where = places(mutants)
    return {
        mutant.number: entry
        for mutant in mutants
        for entry in EQUIVALENT
        if mutant.file == entry.file and mutant.rule in entry.rules.split() and entry.code in mutant.code
        if not entry.places or where[mutant.number] in entry.places
    }


def unfound(mutants: list[Mutant]) -> set[int]:
    """The numbers of the mutants in UNFOUND."""
    listed = {*UNFOUND.read_text().splitlines()}
    return {number for number, line in lines(mutants).items() if line in listed}
