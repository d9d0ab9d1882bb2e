"""Each promise of docs/reliability.md that Python code keeps is held by the tests that its row names: a fault in that
code, planted into a copy of the package, makes one of them fail."""

import functools
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from planted import ELSEWHERE, PLANTED

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "normformer_rs"


@functools.cache
def rows() -> dict[str, str]:
    """The table's rows: each promise, and the tests that it names."""
    lines = (ROOT / "docs" / "reliability.md").read_text().splitlines()
    found = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return {promise: named for promise, named in found if promise != "promise"}


def row_of(beginning: str) -> str:
    """The one promise that begins so."""
    (promise,) = [promise for promise in rows() if promise.startswith(beginning)]
    return promise


def named_in(row: str) -> list[str]:
    """The files and folders of tests that a row names, below `tests`, with {a,b} written out."""
    names = re.findall(r"`([\w/.]+)`", rows()[row])
    return [name for name in names if (ROOT / "tests" / name).exists()]


def test_every_row_has_a_fault_or_a_reason():
    planted, elsewhere = {row_of(fault.row) for fault in PLANTED}, {*map(row_of, ELSEWHERE)}
    assert planted | elsewhere == {*rows()} and not planted & elsewhere


@pytest.mark.parametrize("row", rows())
def test_the_named_files_are_there(row):
    files = re.findall(r"`([\w/]+\.py)`", rows()[row])
    assert all((ROOT / "tests" / name).exists() or (ROOT / name).exists() for name in files)


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: f"{fault.file}: {fault.old.strip()[:40]}")
def test_a_faults_place_is_there(fault):
    """Its text stands in the code once, and its tests in files that the row names."""
    assert (PACKAGE / fault.file).read_text().count(fault.old) == 1
    named = named_in(row_of(fault.row))
    for test in fault.tests:
        path, _, function = test.partition("::")
        assert any(path == name or path.startswith(f"{name}/") for name in named), (path, named)
        assert re.search(rf"^def {re.escape(function.partition('[')[0])}\(", (ROOT / "tests" / path).read_text(), re.M)


def asked(folder: Path, tests: set[str]) -> tuple[int, str]:
    """pytest's exit code and output, with the copy of the package in this folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    where = [sys.executable, "-c", "import normformer_rs; print(normformer_rs.__file__)"]
    done = subprocess.run(where, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(folder)), "the copy is not the package that is imported"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--timeout-method=thread",
        "--timeout=120",
        *sorted(f"tests/{t}" for t in tests),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, preexec_fn=_limit_memory
    )
    return done.returncode, done.stdout + done.stderr


def _limit_memory() -> None:
    """Without a bound that a fault takes away, a test may want any memory; or any time, which --timeout limits."""
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, resource.RLIM_INFINITY))


@pytest.mark.long
def test_the_tests_pass_on_the_package_as_it_is(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "normformer_rs")
    code, said = asked(tmp_path, {test for fault in PLANTED for test in fault.tests})
    assert code == 0, said[-5000:]


@pytest.mark.long
@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: f"{fault.file}: {fault.old.strip()[:40]}")
def test_a_fault_is_noticed(tmp_path, fault):
    """By a test that fails: pytest says 1, and another number where it could not begin."""
    shutil.copytree(PACKAGE, tmp_path / "normformer_rs")
    file = tmp_path / "normformer_rs" / fault.file
    file.write_text(file.read_text().replace(fault.old, fault.new))
    code, said = asked(tmp_path, {*fault.tests})
    assert code == 1, f"no test of the row {row_of(fault.row)!r} noticed:\n{said[-3000:]}"
