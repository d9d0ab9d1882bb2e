"""Standard streams that are closed, full or of the wrong kind: one line before the work, no traceback."""

import os
import subprocess
import sys

import pytest

COMMAND = f"{sys.executable} -m normformer_rs"
CLOSED = "normformer-rs: error: standard output is closed; open it, for example `> FILE`"


@pytest.fixture
def folder(tmp_path):
    """A text, and what looks like a run to all that does not read its weights."""
    (tmp_path / "text").write_text("a b c d\ne f g h\n")
    (tmp_path / "run" / "checkpoints" / "best").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    return tmp_path


def shell(folder, command):
    """The code, the output and the lines on standard error of a command."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr.splitlines()


SPEAKING = [
    *("--help", "--version", "train --help", "reproduce --help", "fairseq-user-dir"),
    *("translate --model run --input text", "generate --model run --prompt a"),
    *("evaluate --hypothesis text --reference text", "evaluate --model run --reference text"),
    *("plot run", "average --model run --last 1", "demo", "reproduce modern --scale check", "train --dry-run"),
    "fairseq train DATA --arch a --optimizer adam --max-tokens 9",
]


@pytest.mark.parametrize("words", SPEAKING)
@pytest.mark.parametrize("how", [">&-", "1< /dev/null"], ids=["closed", "for reading alone"])
@pytest.mark.one_in(test=10, all=7)
def test_a_closed_output_is_said_before_the_work(folder, words, how):
    code = (
        "import sys\nfrom normformer_rs.cli import main\nmade = main(sys.argv[1:])\n"
        "heavy = [name for name in ('torch', 'numpy') if name in sys.modules]\n"
        "print(*heavy, file=sys.stderr)\nsys.exit(made)"
    )
    (folder / "main.py").write_text(code)
    code, _, lines = shell(folder, f"{sys.executable} main.py {words} {how}")
    assert code == 2 and lines == [CLOSED, ""]


def test_a_run_needs_no_output(folder):
    """As a service has none: `train` gets as far as its text."""
    words = "train --output new --train-target text --valid-target text --train-source no --valid-source text --no-bpe"
    code, _, lines = shell(folder, f"{COMMAND} {words} >&-")
    assert code == 2 and lines == [
        "normformer-rs: error: no: no such file; expected a text file in UTF-8, plain or gzip: check the path"
    ]


@pytest.mark.parametrize("words", ["--help", "evaluate --hypothesis text --reference text"])
@pytest.mark.parametrize("buffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.one_in(test=4, all=3)
def test_a_full_output_is_one_line(folder, words, buffered):
    pytest.importorskip("sacrebleu")
    code, _, (line,) = shell(folder, f"PYTHONUNBUFFERED={buffered} {COMMAND} {words} > /dev/full")
    assert code == 4 and line.startswith("normformer-rs: error: [Errno 28] No space left on device")
    assert buffered or line.endswith("'standard output'")


def test_a_reader_that_has_gone_is_no_error(folder):
    _, output, lines = shell(folder, f"{COMMAND} train --help | head -n 1")
    assert output.startswith("usage: ") and lines == []


@pytest.mark.parametrize("how", ["<&-", "0> /dev/null"], ids=["closed", "for writing alone"])
@pytest.mark.parametrize(
    "words",
    ["translate --model run", "generate --model run", "evaluate --hypothesis - --reference text"],
)
@pytest.mark.one_in(test=2)
def test_a_closed_input_is_one_line(folder, words, how):
    code, output, lines = shell(folder, f"{COMMAND} {words} {how}")
    assert (code, output) == (2, "")
    assert lines == ["normformer-rs: error: standard input is closed; give the text there, or name a file"]


@pytest.mark.full
def test_a_closed_error_output_changes_nothing(folder):
    pytest.importorskip("sacrebleu")
    words = "evaluate --hypothesis text --reference text"
    expected = shell(folder, f"{COMMAND} {words}")
    assert expected[0] == 0 and "= 100.00" in expected[1]
    for how in ("2>&-", "<&- 2>&-", "2> /dev/full"):
        code, output, _ = shell(folder, f"{COMMAND} {words} {how}")
        assert (code, output) == expected[:2], how
    assert shell(folder, f"{COMMAND} train --norm x >&- 2>&-") == (2, "", [])
    assert shell(folder, f"{COMMAND} train --norm x 2>&-") == (2, "", [])


def test_no_file_of_a_run_becomes_a_closed_stream(folder):
    """The lowest free number would be given to the next file, and libtorch's messages would go into it."""
    code = (
        "from normformer_rs import text\ntext.hold_standard_files()\n"
        "file = open('file', 'w')\nassert file.fileno() > 2, file.fileno()\nopen('done', 'w').close()"
    )
    (folder / "main.py").write_text(code)
    shell(folder, f"{sys.executable} main.py <&- >&- 2>&-")
    assert (folder / "done").exists()
