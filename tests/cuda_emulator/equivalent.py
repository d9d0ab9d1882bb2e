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
EQUAL = "both answers are the same number there"
COUNTED = "a number of rows, or a row's share, is not NaN"
UNCOUNTED = "the merge passes over slabs without real rows"
NAN = "the row's scale is NaN, and with it the gradient"
MEAN = "where the mean is not finite, the square is not"
EQUIVALENT = [
    Equivalent("reduce.cuh", "swap", "Operation::of(v[k], ", "the operations commute"),
    Equivalent("reduce.cuh", "always factor", "if (lane % 32 == 0)", SAME),
    Equivalent("parameter.cuh", "always", "if (team.lane == 0) scratch[team.row] = sum[0];", SAME),
    Equivalent("parameter.cuh", "always", "if (threadIdx.x == 0) {", SAME),
    Equivalent("parameter.cuh", "always", "if (team.row == 0)", "only the first row's sum is stored", (0,)),
    Equivalent("parameter.cuh", "part", "if (FULL && chunks == 0) return;", "no chunk is below 0", (0,)),
    Equivalent("parameter.cuh", "part", "if (FULL || lane + i * LANES < chunks)", "FULL means that it holds", (0,)),
    Equivalent(
        "parameter.cuh", "part", "if (KIND == NONE || !total) return;", "an absent parameter has no total", (0,)
    ),
    Equivalent("parameter.cuh", "never", "if (!total) return;", "an unwanted number's sum stays in a register", (1,)),
    Equivalent("column_norm.cuh", "nan", "used.share = b.count > 0.0", COUNTED),
    Equivalent("columns.cuh", "bound", "end = first + rows.slab < rows.count", EQUAL),
    Equivalent("columns.cuh", "bound", "const i64 last = round + ROUND * WARPS < end", EQUAL),
    Equivalent("columns.cuh", "over", "round < end; round +=", "zeros are added: no row is below the end"),
    Equivalent("columns.cuh", "over", "row < last; row += ABREAST", "no row is below the last"),
    Equivalent("columns.cuh", "never", "const i64 iters = ahead.iters", "the later pass writes y instead"),
    Equivalent("columns.cuh", "bound", "measure(first, first + FEW < p.end", EQUAL),
    Equivalent("columns.cuh", "always bound", "guess.v[j] = sums[COUNT] > 0.0", UNCOUNTED),
    Equivalent("columns.cuh", "nan", "guess.v[j] = sums[COUNT] > 0.0", COUNTED),
    Equivalent("columns.cuh", "part", "if (p.warp > 0 || p.first == p.end) return;", SAME, (0, 2)),
    Equivalent("columns.cuh", "always bound", "const double share = sums[COUNT] > 0.0", UNCOUNTED),
    Equivalent("columns.cuh", "nan", "const double share = sums[COUNT] > 0.0", COUNTED),
    Equivalent("columns.cuh", "always", "if (p.chunk == 0) a.counts[p.slab]", SAME),
    Equivalent("columns.cuh", "factor", "shift = load<f32>(a.stats, SHIFT * chunks", "SHIFT is 0", (0,)),
    Equivalent("columns.cuh", "always", "if (writes) write_gradient(", "the later pass writes dx again"),
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
    Equivalent("rows.cuh", "over", "first < a.rows; first +=", "a row past the end has no chunks"),
    Equivalent("rows.cuh", "always", "Line<K_X> line(K_STEP ?", "alone x_plus is x"),
    Equivalent("rows.cuh", "part", "if (team.lane == 0 && chunks > 0)", SAME, (0,)),
    Equivalent("rows.cuh", "nan", "const f32 sign = x > 0.f", NAN),
    Equivalent("rows.cuh", "part", "const bool normed = NORMED && a.dy;", "without a norm there is no dy", (0,)),
    Equivalent("rows.cuh", "part", "if (K_STEP && a.dx_plus)", "without a step there is no dx_plus", (0,)),
    Equivalent("rows.cuh", "part", "if (K_ALPHA != NONE && a.dalpha)", "without alpha there is no dalpha", (0,)),
    Equivalent("rows.cuh", "part", "if (K_BETA != NONE && a.dbeta)", "there is a dbeta if and only if there is a beta"),
    Equivalent("rows.cuh", "part", "if (K_STEP && a.df)", "without a step there is no df", (0,)),
    Equivalent("rows.cuh", "nan", "if (!OF_LARGEST && !(squares >=", "NaN fails the other comparison too"),
    Equivalent("rows.cuh", "part", "if (!OF_LARGEST && !(squares >=", ROUNDING, (1,)),
    Equivalent("rows.cuh", "bound", "if (!OF_LARGEST && !(squares >=", ROUNDING, (0,)),
    Equivalent("rows.cuh", "bound", "if (!OF_LARGEST && !(squares >=", "0x1p127 + 1 rounds to 0x1p127", (1,)),
    Equivalent("rows.cuh", "never", "return EUCLIDEAN ? __uint_as_float", ROUNDING),
    Equivalent("rows.cuh", "always bound", "if (HELD > 0) line.kept[i] = stored;", "nothing reads it where HELD is 0"),
    Equivalent("rows.cuh", "always", "if (Norm::STATS == 2) {", "nothing reads the second sum"),
    Equivalent("settle.cuh", "over", "first < a.slabs; first +=", "no slab is below their number"),
    Equivalent("settle.cuh", "part", "if (a.count && column == 0)", SAME, (1,)),
    Equivalent("settle.cuh", "part", "moves = o.train && a.first", "evaluation has no buffers or no count", (0,)),
    Equivalent("settle.cuh", "nan", "moves = o.train && a.first", COUNTED),
    Equivalent("settle.cuh", "nan neighbour", "fabs(a.mean[c])", MEAN, (0,)),
    Equivalent("settle.cuh", "part", "fabs(a.mean[c])", MEAN, (1, 2)),
    Equivalent("settle.cuh", "bound", "<= a.largest", "the largest number less 1 is itself"),
    Equivalent("settle.cuh", "part", "if (moves && !taken", "without moves no thread refuses", (0, 6)),
    Equivalent("settle.cuh", "part", "if (a.iters && c == 0)", SAME, (1,)),
    Equivalent("settle.cuh", "swap", "slope_ahead(weight, scale, nu)", "p is a product, and nothing reads q"),
    Equivalent(
        "settle.cuh",
        "always",
        "if (is_exact(a.stats, a.cols))",
        "nothing reads the slopes of statistics that are not exact",
    ),
    Equivalent("settle.cuh", "nan", "const bool moves = a.second", COUNTED),
    Equivalent("settle.cuh", "always", "if (moves)", "without moves nothing reads whether all agree", (1,)),
    Equivalent("adam.cu", "bound", "fabsf(scale) < __uint_as_float(0x7f800000u)", "infinity + 1 is infinity"),
    Equivalent("cross_entropy.cu", "part", "if (K_GRADIENT != FROM_LSE && team.lane == 0)", SAME, (1,)),
    Equivalent("cross_entropy.cu", "never", "if (K_GRADIENT == FROM_LSE) continue;", "nothing reads these sums"),
    Equivalent("cross_entropy.cu", "nan", "if (z.v[j] > most[0])", "the sum of a row with a NaN is NaN"),
    Equivalent("cross_entropy.cu", "always", "if (team.lane == 0) {", SAME),
    Equivalent("power_norm.cu", "nan", "b.count > 0.0", COUNTED),
    Equivalent("scale_norm.cu", "nan", "static DEV f32 pull(", NAN),
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
