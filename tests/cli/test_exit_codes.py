"""Exit codes, by the table in normformer_rs/cli.py and docs/train.md."""

import contextlib
import errno
import functools
import os
import signal
import subprocess
import sys
import time

import pytest

from normformer_rs import DivergedError, InputError, Interrupted, cli
from processes import errors_of

COMMAND = [sys.executable, "-m", "normformer_rs"]


@pytest.fixture
def train(tmp_path):
    """The words of a training that never ends by itself."""
    (tmp_path / "text").write_text("the old tree stands by the river\n" * 40)
    text = str(tmp_path / "text")
    sizes = "--d-model 16 --d-ff 16 --heads 2 --decoder-layers 1 --max-tokens 64 --evaluate-every 1000000 --no-progress"
    data = ["--architecture", "decoder-only", "--train-target", text, "--valid-target", text, "--no-bpe"]
    return ["train", *data, *sizes.split(), "--updates", "1000000", "--output", str(tmp_path / "run")]


ERRORS = [
    (InputError("x"), 2),
    (ImportError("x"), 2),
    (UnicodeError("x"), 2),
    (FileNotFoundError(errno.ENOENT, "x"), 2),
    (PermissionError(errno.EACCES, "x"), 2),
    (DivergedError("x"), 3),
    (OSError(errno.ENOSPC, "x"), 4),
    (OSError(errno.EIO, "x"), 4),
    (RuntimeError("x"), 4),
    (MemoryError("x"), 4),
    (Interrupted("x"), 130),
    (KeyboardInterrupt(), 130),
    (BrokenPipeError(errno.EPIPE, "x"), 141),
]


@pytest.mark.parametrize(("error", "code"), ERRORS, ids=lambda value: type(value).__name__)
def test_each_error_has_its_code(error, code, monkeypatch):
    def run(_):
        raise error

    monkeypatch.setitem(cli.COMMANDS, "doctor", lambda: ("", run, lambda parser: None))
    assert cli.main(["doctor"]) == code


def test_a_diverged_run_and_a_mistyped_option_differ(train, capsys):
    wild = ["--lr", "1e30", "--residual", "postnorm", "--warmup", "0", "--schedule", "constant"]
    assert cli.main([*train, *wild]) == 3
    assert cli.main([*train, "--nrom", "rmsnorm"]) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.one_in(test=3)
def test_a_stopped_command_dies_by_the_signal(train, tmp_path, number):
    log = tmp_path / "run" / "log.jsonl"
    heard = functools.partial(signal.signal, number, signal.SIG_DFL)  # what nohup starts begins with SIGHUP ignored
    process = subprocess.Popen([*COMMAND, *train], stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") > 3):
        time.sleep(0.01)
    process.send_signal(number)
    assert "everything is saved" in errors_of(process)
    assert process.returncode == -number


@pytest.mark.full
def test_ctrl_c_ends_a_loop_of_the_shell(train, tmp_path):
    """The terminal sends SIGINT to the whole group; bash goes on unless its child died by it."""
    words = " ".join(f"'{word}'" for word in (*COMMAND, *train[:-1]))
    loop = f"for s in 1 2 3; do echo > begun$s; {words} '{tmp_path}/'r$s; done"
    process = subprocess.Popen(["bash", "-c", loop], cwd=tmp_path, stderr=subprocess.DEVNULL, start_new_session=True)
    log = tmp_path / "r1" / "log.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") > 3):
        time.sleep(0.01)
    signal_group(process, signal.SIGINT)
    try:
        process.wait(60)
    finally:
        signal_group(process, signal.SIGKILL)
    assert [path.name for path in tmp_path.glob("begun*")] == ["begun1"]
    assert any((tmp_path / "r1" / "checkpoints").iterdir())


def signal_group(process, number):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def test_a_command_without_a_reader_dies_by_the_signal():
    """The reader closes its input at once, and lives until the command has ended."""
    command = f"{' '.join(COMMAND)} train --help | (exec <&-; sleep 5); echo ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "141" and not found.stderr


def test_what_libraries_do_at_exit_is_done_before_the_death(tmp_path):
    program = (
        "import atexit, os, signal, sys\nfrom normformer_rs import cli\n"
        "def run(_):\n    atexit.register(print, 'closed')\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "cli.COMMANDS['doctor'] = lambda: ('', run, lambda parser: None)\n"
        "sys.argv = ['normformer-rs', 'doctor']\nsys.exit(cli.main())"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (-signal.SIGTERM, "closed\n"), found.stderr
