"""Forged and damaged files: each command ends well, or with one line that says what is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import forge
import pytest

import normformer_rs as nfrs
from normformer_rs import cli

SECONDS, MIB, LETTERS = 2, 1024, 4000
"""The most that a refusal may take, a command beyond what it takes on a whole run, and a line of a message."""
NOT_SAID = ("Traceback", "Warning", "panicked", "terminate called", "allocate")
"""Words of Python's, Rust's and C++'s own messages."""


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    forge.make(folder)
    return folder


def outcomes(runs: Path, scratch: Path, first: int, count: int, *files: str) -> list[dict]:
    """The outcome of each case, the whole runs' first; a process that dies says in which case."""
    command = [sys.executable, forge.__file__, str(runs), str(scratch), str(first), str(count), *files]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"ended by {done.returncode} in {found[-1:]}: {done.stderr[-2000:]}"
    return [outcome for outcome in found if "code" in outcome]


def fault(outcome: dict, whole: dict) -> str:
    """What is wrong with an outcome; nothing where the command ended well or with one line. `whole`: of a whole run."""
    lines = outcome["said"].splitlines()
    errors = [line for line in lines if line.startswith("normformer-rs: error: ") and len(line) > 30]
    most = SECONDS + (2 * whole["seconds"] if outcome["code"] == 0 else 0)
    faults = {
        "a traceback": outcome["code"] not in (0, 2),
        "not one line": len(errors) != (outcome["code"] == 2),
        "another's words": any(word in outcome["said"] for word in NOT_SAID),
        "a long line": max(map(len, lines), default=0) > LETTERS,
        "memory": outcome["largest"] - whole["before"] > MIB,
        "time": outcome["seconds"] > most,
    }
    return ", ".join(name for name, is_so in faults.items() if is_so)


def check(runs: Path, scratch: Path, first: int, count: int, *files: str) -> int:
    """Asserts that no case has a fault; how many were refused."""
    found = outcomes(runs, scratch, first, count, *files)
    whole = {outcome["command"]: outcome for outcome in found if outcome["whole"]}
    assert [outcome for outcome in whole.values() if outcome["code"] != 0] == []
    before = max(outcome["largest"] for outcome in whole.values())
    damaged = [outcome for outcome in found if not outcome["whole"]]
    assert len(damaged) == count * len(files)
    judged = [(fault(outcome, {**whole[outcome["command"]], "before": before}), outcome) for outcome in damaged]
    refused = [outcome["seconds"] for outcome in damaged if outcome["code"] == 2]
    largest = max(outcome["largest"] for outcome in damaged) - before
    print(
        f"{files}: {len(refused)} of {len(damaged)} refused in at most {max(refused, default=0)} s; {largest} MiB more"
    )
    assert [(wrong, outcome) for wrong, outcome in judged if wrong] == []
    return len(refused)


@pytest.mark.full
def test_a_damaged_file_is_one_line(runs, tmp_path):
    assert check(runs, tmp_path, 0, 20, *forge.FILES) > 40, "damage was not noticed"


def test_a_message_that_quotes_a_forged_file_is_cut(capsys):
    cli.report(nfrs.InputError("x: got " + "9" * 10_000 + "\0" * 10_000 + "; choose another"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("normformer-rs: error: x: got 999") and line.endswith("\\x00; choose another")
    assert 3000 <= len(line) <= 3100


@pytest.mark.long
@pytest.mark.parametrize("file", forge.FILES)
def test_300_damages_of_a_file_are_one_line_each(runs, tmp_path, file):
    check(runs, tmp_path, 20, 300, file)
