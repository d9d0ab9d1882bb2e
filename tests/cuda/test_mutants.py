"""Mutants of the CUDA kernels (cuda_emulator/mutants.py): each is found by a case, or listed (equivalent.py)."""

import os
import random

import pytest

from cuda_emulator import device, equivalent, mutants
from cuda_emulator.checks import DETECTORS, REAL
from cuda_emulator.hunt import Hunt
from normformer_rs import _core

pytestmark = pytest.mark.skipif(REAL is not None, reason="mutants live on the emulated device")
SEED = 1
SAMPLED_DETECTORS, SAMPLED_MUTANTS = 5, 4
ALL, TEXTS = mutants.mutants()


JUDGED, UNFOUND = equivalent.judged(ALL), equivalent.unfound(ALL)
SOUGHT = [mutant for mutant in ALL if mutant.number not in JUDGED.keys() | UNFOUND]


@pytest.fixture(scope="session")
def hunt(tmp_path_factory):
    """One folder for all of pytest's processes, so that each program is compiled once."""
    base = tmp_path_factory.getbasetemp()
    made = Hunt((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "mutants")
    yield made
    made.close()


def test_each_source_has_mutants_and_each_program_a_source():
    files = {mutant.file for mutant in ALL}
    assert files == {path.name for path in mutants.sources()} - {"norm.cuh", "no_norm.cu"}  # declarations alone
    assert set(_core.cuda_programs()) <= {path.name for path in TEXTS}
    assert {mutant.rule for mutant in ALL} == set(mutants.RULES)


def test_each_entry_names_a_mutant():
    unused = [entry for entry in equivalent.EQUIVALENT if entry not in JUDGED.values()]
    unused += sorted({*equivalent.UNFOUND.read_text().splitlines()} - {*equivalent.lines(ALL).values()})
    assert not unused, "these mutants are no more: take the entries out"
    assert not JUDGED.keys() & UNFOUND


@pytest.mark.full
def test_a_process_that_waits_for_ever_is_ended(hunt, tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\nsleep 20\n")
    compiler.chmod(0o700)
    env = device.environment(
        tmp_path / "cache",
        MOCK_STORE=str(tmp_path / "store"),
        MOCK_SECONDS="0.5",
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    )
    assert "SIGALRM" in hunt.plain.run(0, env)


@pytest.mark.full
def test_some_detectors_find_most_of_the_mutants_that_they_meet(hunt):
    """By a fixed seed. Some mutants need another detector: `test_a_mutant_is_found` asks them all."""
    draw = random.Random(SEED)
    sought = {mutant.number: mutant for mutant in SOUGHT}
    found = []
    for index in draw.sample(range(len(DETECTORS)), SAMPLED_DETECTORS):
        met = sorted(hunt.met(index)[0] & sought.keys())
        found += [hunt.finds(index, sought[number]) for number in draw.sample(met, SAMPLED_MUTANTS)]
    assert sum(found) > len(found) / 2


PROVEN = [
    "adam(1027,)",
    "adams_formula('bf16', 1020)",
    "adams_formula('f32', 0)",
    "ignored_words()",
    "short_rows(1.0,)",
]


@pytest.mark.parametrize("case", PROVEN)
@pytest.mark.one_in(all=5)
def test_right_kernels_pass_their_proofs(hunt, case):
    assert hunt.is_proven(next(i for i, detector in enumerate(DETECTORS) if str(detector) == case))


@pytest.mark.full
def test_proofs_refuse_wrong_kernels(hunt):
    """Of mutants by a fixed seed that a detector finds: with proofs the formula runs in their place."""
    draw = random.Random(SEED)
    caught, sought = [], {mutant.number: mutant for mutant in SOUGHT}
    for index in draw.sample(range(len(DETECTORS)), SAMPLED_DETECTORS):
        met = sorted(hunt.met(index)[0] & sought.keys())
        for number in draw.sample(met, SAMPLED_MUTANTS):
            if hunt.finds(index, sought[number]):
                caught.append(hunt.is_caught(index, sought[number]))
    assert len(caught) > 5 and sum(caught) > 0.7 * len(caught)


@pytest.mark.full
def test_proofs_make_statistics_of_their_own_rows(hunt):
    """Those of a call whose columns lie around 1000 would hide what is wrong with the slopes of other rows."""
    index = next(i for i, detector in enumerate(DETECTORS) if detector.arguments[-1:] == (1000.0,))
    found = [m for m in SOUGHT if m.file == "settle.cuh" and m.code.startswith("found.r = ") and m.rule == "statement"]
    assert [hunt.finds(index, mutant) and hunt.is_caught(index, mutant) for mutant in found] == [True]


@pytest.mark.parametrize(
    ("finder", "file", "code", "rule"),
    [
        # the release, and nothing but padding
        ("column_corners('power_norm',)", "settle.cuh", "const bool moves = a.second", "bound"),
        # a gradient that is not finite
        ("refuses_a_gradient()", "settle.cuh", "finite = finite && fabs(slope(a, c).second)", "first"),
        # rows about as long as epsilon
        ("short_rows(1.0,)", "scale_norm.cu", "return scale >= 1.f / eps", "bound"),
        # a NaN before other numbers
        ("extreme_lengths(inf,)", "rows.cuh", "return sum > fabsf(d)", "nan"),
        # rounding at random
        ("adams_formula('bf16', 1020)", "philox.cuh", "const u32 word = half < 4", "never"),
    ],
)
@pytest.mark.long
def test_proofs_meet_corner_cases(hunt, finder, file, code, rule):
    index = next(i for i, detector in enumerate(DETECTORS) if str(detector) == finder)
    mutant = next(m for m in SOUGHT if m.file == file and code in m.code and m.rule == rule)
    assert hunt.finds(index, mutant) and hunt.is_caught(index, mutant)


@pytest.mark.parametrize("mutant", SOUGHT, ids=str)
@pytest.mark.long
def test_a_mutant_is_found(hunt, mutant):
    if mutant.rule in mutants.TYPED and not hunt.detectors(mutant):
        return  # the types do not fit, so there is no mutant
    assert hunt.detectors(mutant), f"no detector meets {mutant}: {mutant.code}"
    assert hunt.finder(mutant), f"nothing finds {mutant}: {mutant.code}"


@pytest.mark.parametrize("index", range(0, len(DETECTORS), 3), ids=lambda index: str(DETECTORS[index]))
@pytest.mark.long
def test_the_address_sanitizer_finds_nothing(hunt, index):
    assert not hunt.is_unsafe(index, None)
