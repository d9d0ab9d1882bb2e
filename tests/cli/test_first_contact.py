"""The first minute with the package: help and mistakes are answered at once; torch is imported where it is needed."""

import pickle
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import normformer_rs as nfrs
from normformer_rs import DataConfig, TrainingConfig, TransformerConfig, _core, _stubs, _tables, cli
from normformer_rs.commands import fairseq

SCRIPT = Path(sys.executable).with_name("normformer-rs")
COMMAND = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "normformer_rs"]
HEAVY = ("torch", "numpy", "normformer_rs._core")
LIMIT = 0.5
"""Seconds."""
AT_ONCE = {
    "--help": 0,
    "--version": 0,
    "train --help": 0,
    "translate --help": 0,
    "demo --help": 0,
    "reproduce --help": 0,
    "reproduce twt-tabel3 --scale check": 2,
    "train --nrom rmsnorm --help": 0,
    "trian": 2,
    "train --nrom rmsnorm": 2,
    "train --norm scalnorm": 2,
    "translate --beam 4": 2,
    "fairseq train": 2,
}


def python(code: str) -> str:
    """Runs the code in a fresh interpreter, which must end well, and returns its output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.parametrize("words", AT_ONCE)
def test_help_and_mistakes_need_no_torch(words):
    code = (
        "import sys\nfrom normformer_rs.cli import main\ntry:\n    code = main(sys.argv[1:])\n"
        "except SystemExit as ended:\n    code = ended.code\n"
        f"print('end', code or 0, [name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == f"end {AT_ONCE[words]} []", done.stdout + done.stderr


@pytest.mark.parametrize("words", ["--help", "train --help", "reproduce --help", "train --nrom rmsnorm"])
def test_the_answer_takes_half_a_second_at_most(words):
    seconds = []
    for _ in range(3):
        start = time.monotonic()
        subprocess.run([*COMMAND, *words.split()], capture_output=True)
        seconds.append(time.monotonic() - start)
    assert min(seconds) < LIMIT, seconds


@pytest.mark.parametrize(
    "words, message, where",
    [
        ("train --nrom x", 'unknown option "--nrom" (did you mean "--norm"?)', "train --help lists the options"),
        ("train --nrom=x", 'unknown option "--nrom" (did you mean "--norm"?)', "train --help lists the options"),
        ("train surplus", 'unexpected argument "surplus"; options begin with --', "train --help lists the options"),
        ("train --xyzzy", 'unknown option "--xyzzy"', "train --help lists the options"),
        ("train -norm x", 'unknown option "-norm" (did you mean "--norm"?)', "train --help lists the options"),
        # before what argparse would say of --model, which is missing
        (
            "translate --modle m",
            'unknown option "--modle" (did you mean "--model"?)',
            "translate --help lists the options",
        ),
        (
            "reproduce twt-tabel3 --scale check",
            'unknown name "twt-tabel3" (did you mean "twt-table3"?)',
            "reproduce --help lists the names",
        ),
        ("translate", "the following arguments are required: --model", "translate --help lists the options"),
        (
            "average --model m --last two",
            "argument --last: invalid int value: 'two'",
            "average --help lists the options",
        ),
        (
            "trian",
            'unknown command "trian" (did you mean "train"?); expected one of train, translate, ',
            "--help lists",
        ),
        ("--norm rmsnorm train", 'unknown option "--norm"', "--help lists the commands"),
        ("fairseq", "the following arguments are required: COMMAND", "fairseq --help lists the commands"),
        ("", "the following arguments are required: COMMAND", "--help lists the commands"),
    ],
)
def test_a_wrong_command_line_is_two_lines(capsys, words, message, where):
    assert cli.main(words.split()) == 2
    captured = capsys.readouterr()
    first, second = captured.err.splitlines()
    assert first.startswith(f"normformer-rs: error: {message}") and len(first) < 200, first
    assert second.startswith(f"normformer-rs {where}"), second
    assert captured.out == ""


def test_a_wrong_value_names_the_closest_before_all(capsys):
    assert cli.main(["train", "--norm", "scalnorm"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    begin = 'normformer-rs: error: unknown norm "scalnorm" (did you mean "scalenorm"?); expected one of layernorm, '
    assert line.startswith(begin)


def test_a_wrong_name_in_a_file_is_short(capsys, tmp_path):
    (tmp_path / "options.toml").write_text("d-modle = 8\n")
    assert cli.main(["train", "--config", str(tmp_path / "options.toml")]) == 2
    (line,) = capsys.readouterr().err.replace(str(tmp_path), "").splitlines()
    assert 'unknown option "d-modle" (did you mean "d_model"?); ' in line and len(line) < 200


def help_of(monkeypatch, capsys, *words: str, columns: int = 80) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit, match="0"):
        cli.main([*words, "--help"])
    return capsys.readouterr().out


def test_help_of_train_groups_every_option(monkeypatch, capsys):
    shown = help_of(monkeypatch, capsys, "train")
    headings = re.findall(r"^(\w[\w ]*):$", shown, re.M)
    assert headings == ["options", "common", "data", "model", "norm and residual", "parametrisation", "training", "run"]
    sections = dict(zip(headings, re.split(r"^\w[\w ]*:$", shown, flags=re.M)[1:], strict=True))
    flags = {heading: re.findall(r"^  --(?:\[no-\])?([\w-]+)", section, re.M) for heading, section in sections.items()}
    assert flags["common"][:3] == ["output", "preset", "config"]
    assert {"train-source", "norm", "residual", "updates", "lr", "device", "seed"} <= set(flags["common"])
    listed = [name for section in flags.values() for name in section]
    for kind in (DataConfig, TransformerConfig, TrainingConfig):
        for field in kind.FIELDS:
            name = field.name.replace("_", "-")
            assert listed.count(name) == (name != "vocab-size"), name
            assert name in flags[field.group] or name in flags["common"] or name == "vocab-size", name
    assert {"resume", "overwrite", "dry-run", "no-progress"} <= set(listed)
    assert shown.startswith("usage: normformer-rs train --output DIR")


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    "command", ["train", "translate", "evaluate", "average", "demo", "reproduce", "convert", "fairseq"]
)
def test_help_fits_the_terminal(monkeypatch, capsys, command, columns):
    lines = help_of(monkeypatch, capsys, command, columns=columns).splitlines()
    assert max(map(len, lines)) <= columns


LAZY = """
import sys
import normformer_rs
assert "torch" not in sys.modules and "numpy" not in sys.modules
model, training = normformer_rs.preset("transformer-tiny")
assert issubclass(normformer_rs.InputError, ValueError) and "Trainer" in dir(normformer_rs)
assert "torch" not in sys.modules
"""
OPERATOR = """
assert "normformer_rs._core" in sys.modules
x = torch.ones(2, 4)
assert torch.ops.normformer_rs.scale_norm(x, torch.ones(1), None, 1e-5)[0].shape == x.shape
assert not any(type(finder).__module__.startswith("normformer_rs") for finder in sys.meta_path)
import inspect
assert "import" in inspect.getsource(torch)
"""


@pytest.mark.parametrize(
    "code",
    [
        LAZY + "import torch\n" + OPERATOR,
        LAZY
        + "import importlib.util\nassert importlib.util.find_spec('torch')\n"
        + "assert importlib.util.find_spec('normformer_rs._core') and 'torch' not in sys.modules\nimport torch.nn\n"
        + OPERATOR,
        LAZY + "normformer_rs.nn\nimport torch\n" + OPERATOR,
        LAZY + "from normformer_rs import surgery, analysis, nn\nimport torch\n" + OPERATOR,
        "import sys, torch, normformer_rs\n" + OPERATOR,
        "import sys, normformer_rs._core\nimport torch\n" + OPERATOR,
        "import sys\nfrom normformer_rs import _core\nimport torch\n" + OPERATOR,
        "import sys\nimport normformer_rs.translation\nimport torch\n" + OPERATOR,
        "import sys\nfrom normformer_rs import *\nimport torch\nTransformer, nn.ScaleNorm\n" + OPERATOR,
    ],
    ids=["torch later", "looked for", "an attribute", "modules", "torch first", "core", "from", "a module", "star"],
)
def test_the_core_comes_with_torch(code):
    python(code)


def test_the_package_has_all_its_names():
    lazy = {name for names in nfrs._HOMES.values() for name in names} | {"analysis", "nn", "surgery"}
    assert lazy == set(nfrs.__all__) and set(nfrs.__all__) <= set(dir(nfrs))
    for name in nfrs.__all__:
        assert getattr(nfrs, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'trainer'"):
        _ = nfrs.trainer


def test_errors_are_one_set_of_classes():
    for name, base in (("InputError", ValueError), ("DivergedError", RuntimeError), ("Interrupted", Exception)):
        kind = getattr(nfrs, name)
        assert kind is getattr(_core, name) and kind.__base__ is base and kind.__doc__
        copy = pickle.loads(pickle.dumps(kind("what to do")))
        assert type(copy) is kind and str(copy) == "what to do"
    with pytest.raises(nfrs.InputError, match="unknown field"):
        _core.parameters('{"d_modle": 8}', 0, "cpu")


def test_tables_are_the_core_s():
    assert _tables.PATH.read_text(encoding="utf-8") == _stubs.tables()
    _tables.check(_core.tables())
    assert nfrs.__version__ == _core.__version__


@pytest.mark.parametrize("content", [None, "<<<<<<< HEAD\n", '{"version": "0.0.0"}'], ids=["missing", "merging", "old"])
def test_tables_of_another_core_are_refused(tmp_path, content):
    path = tmp_path / "_tables.json"
    if content is not None:
        path.write_text(content)
    begin = f"from pathlib import Path\nfrom normformer_rs import _tables\n_tables.PATH = Path({str(path)!r})\n"
    caught = "try:\n    import {}\nexcept ImportError as error:\n    print(error)"
    for name in ("torch", "normformer_rs.translation") if content else ("normformer_rs.nn",):
        assert "python -m normformer_rs._stubs --write" in python(begin + caught.format(name))
    # what writes the file anew does without it
    code = "from normformer_rs import _stubs\n_tables.PATH.write_text(_stubs.tables())\nimport normformer_rs.nn"
    python(begin + code)


COMPLETE = {
    "preprocess": "-s de -t en --trainpref train",
    "train": "DATA --arch=nfrs_transformer --optimizer adam --batch-size 8",
    "generate": "DATA --path best.pt",
    "interactive": "DATA --path best.pt",
    "validate": "DATA --path best.pt --task translation",
    "score": "--ref reference",
    "eval-lm": "DATA --path best.pt",
    "hydra-train": "task=translation",
}


@pytest.mark.parametrize("command", fairseq.COMMANDS)
def test_fairseq_without_arguments_prints_usage(monkeypatch, capsys, command):
    monkeypatch.setitem(sys.modules, "fairseq", None)  # not imported for this
    assert cli.main(["fairseq", command]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"normformer-rs: error: fairseq {command} needs ")
    assert second.startswith(f"usage: normformer-rs fairseq {command} ")
    for complete in (COMPLETE[command], "--help", "-h"):
        fairseq.check(command, complete.split())


@pytest.mark.parametrize(
    "arguments, missing",
    [
        ("train DATA", "--arch, --optimizer, --max-tokens"),
        ("train DATA --arch nfrs_transformer --optimizer adam", "--max-tokens"),
        ("validate DATA --path best.pt", "--task"),
        ("preprocess -sde -ten", "--trainpref"),
    ],
)
def test_fairseq_names_what_is_missing(capsys, arguments, missing):
    assert cli.main(["fairseq", *arguments.split()]) == 2
    first, _ = capsys.readouterr().err.splitlines()
    assert first == f"normformer-rs: error: fairseq {arguments.split()[0]} needs {missing}"
