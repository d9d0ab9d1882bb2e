"""Mutants of the CUDA kernels (cuda_emulator/mutants.py): each is found by a case, or listed with the reason."""

import os
import random
from collections import Counter

import pytest

from cuda_emulator import cases, column_cases, launcher_cases, mutants  # noqa: F401  the cases name their detectors
from cuda_emulator.checks import DETECTORS, REAL
from cuda_emulator.equivalent import EQUIVALENT
from cuda_emulator.hunt import Hunt
from normformer_rs import _core

pytestmark = pytest.mark.skipif(REAL is not None, reason="mutants live on the emulated device")
SEED = 1
SAMPLED_DETECTORS, SAMPLED_MUTANTS = 2, 10
ALL, TEXTS = mutants.mutants()


def listed():
    """Numbers of the mutants in EQUIVALENT, with the entries that name them."""
    found, places = {}, Counter()
    for mutant in ALL:
        place = (mutant.file, mutant.line, mutant.rule)
        entry = next((e for e in EQUIVALENT if e.holds(mutant, places[place])), None)
        places[place] += 1
        if entry is not None:
            found[mutant.number] = entry
    return found


LISTED = listed()
SOUGHT = [mutant for mutant in ALL if mutant.number not in LISTED]


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
    unused = [entry for entry in EQUIVALENT if entry not in LISTED.values()]
    assert not unused, "these mutants are no more: take the entries out"


def test_a_sample_of_mutants_is_found(hunt):
    """Of some detectors, by a fixed seed, some of the mutants that they meet."""
    draw = random.Random(SEED)
    sought = {mutant.number: mutant for mutant in SOUGHT}
    for index in draw.sample(range(len(DETECTORS)), SAMPLED_DETECTORS):
        met = sorted(hunt.met(index)[0] & sought.keys())
        for number in draw.sample(met, SAMPLED_MUTANTS):
            mutant = sought[number]
            assert hunt.finds(index, mutant) or hunt.finder(mutant), f"nothing finds {mutant}: {mutant.code}"


@pytest.mark.parametrize("mutant", SOUGHT, ids=str)
def test_a_mutant_is_found(hunt, mutant):
    if mutant.rule in mutants.TYPED and not hunt.detectors(mutant):
        return  # the types do not fit, so there is no mutant
    assert hunt.detectors(mutant), f"no detector meets {mutant}: {mutant.code}"
    assert hunt.finder(mutant), f"nothing finds {mutant}: {mutant.code}"


@pytest.mark.parametrize("index", range(len(DETECTORS)), ids=lambda index: str(DETECTORS[index]))
def test_the_address_sanitizer_finds_nothing(hunt, index):
    assert not hunt.is_unsafe(index, None)
