"""The first minute with the package: help and mistakes are answered at once; torch is imported where it is needed."""

import os
import pickle
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import normformer_rs as nfrs
from normformer_rs import DataConfig, TrainingConfig, TransformerConfig, _core, _stubs, _tables, cli
from normformer_rs.commands import fairseq, fairseq_words
from normformer_rs.commands.train import plan_of

SCRIPT = Path(sys.executable).with_name("normformer-rs")
COMMAND = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "normformer_rs"]
HEAVY = ("torch", "numpy", "normformer_rs._core")
LIMIT = 0.5
"""Seconds of the processor, whatever else it does meanwhile."""
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
@pytest.mark.one_in(test=13, all=3)
def test_help_and_mistakes_need_no_torch(words):
    code = (
        "import sys\nfrom normformer_rs.cli import main\ntry:\n    code = main(sys.argv[1:])\n"
        "except SystemExit as ended:\n    code = ended.code\n"
        f"print('end', code or 0, [name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == f"end {AT_ONCE[words]} []", done.stdout + done.stderr


@pytest.mark.parametrize("words", ["--help", "train --help", "reproduce --help", "train --nrom rmsnorm"])
@pytest.mark.one_in(test=4, all=3)
def test_the_answer_takes_half_a_second_at_most(words):
    seconds = []
    for _ in range(3):
        start = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*COMMAND, *words.split()], capture_output=True)
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime)
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
    ],
)
def test_a_wrong_command_line_is_two_lines(capsys, words, message, where):
    assert cli.main(words.split()) == 2
    captured = capsys.readouterr()
    first, second = captured.err.splitlines()
    assert first.startswith(f"normformer-rs: error: {message}") and len(first) < 240, first
    assert second.startswith(f"normformer-rs {where}"), second
    assert captured.out == ""


FAIRSEQ = {
    "train --arch transformer": "--arch is fairseq's; here: --preset NAME",
    "train --arch=transformer": "--arch is fairseq's; here: --preset NAME",
    "train --max-epoch 3": "--max-epoch is fairseq's; here: --epochs N --updates 0",
    "train --batch-size 32": "--batch-size is fairseq's; here: --max-tokens N",
    "train --lr-scheduler inverse_sqrt": "--lr-scheduler is fairseq's; here: --schedule NAME",
    "train --adam-betas (0.9,0.98)": "--adam-betas is fairseq's; here: --beta1 X --beta2 X",
    "train --fp16": "--fp16 is fairseq's; here: --precision bf16",
    "train --bf16": "--bf16 is fairseq's; here: --precision bf16",
    "train --restore-file x.pt": "--restore-file is fairseq's; here: --resume",
    "train --keep-last-epochs 5": "--keep-last-epochs is fairseq's; here: --keep N",
    "train --share-all-embeddings": "--share-all-embeddings is fairseq's; here: --tie-embeddings all",
    "train --encoder-embed-dim 64": "--encoder-embed-dim is fairseq's; here: --d-model N",
    "train --encoder-normalize-before": "--encoder-normalize-before is fairseq's; here: --residual prenorm",
    "train data-bin/x": 'unexpected argument "data-bin/x"; options begin with --; fairseq\'s folder is --data-bin DIR',
    "train --criterion label_smoothed_cross_entropy": "--criterion decides which checkpoint is best",
    "translate --lenpen 0.6": "--lenpen is fairseq's; here: --alpha X --rule fairseq",
    "translate --path best.pt": "--path is fairseq's; here: --model DIR",
    "generate --sampling-topk 5": "--sampling-topk is fairseq's; here: --top-k N",
    "plot --arch x": 'unknown option "--arch"',  # which has no --preset
    "average --max-update 3": 'unknown option "--max-update"',  # whose --updates are others
}


@pytest.mark.parametrize("words", FAIRSEQ)
def test_fairseq_s_words_are_answered_by_ours(capsys, words):
    assert cli.main(words.split()) == 2
    first, *more = capsys.readouterr().err.splitlines()
    assert first.startswith(f"normformer-rs: error: {FAIRSEQ[words]}") and len(first) < 200, first
    assert len(more) <= 1


def test_fairseq_s_words_of_equal_meaning_are_taken(tmp_path):
    words = f"train --save-dir {tmp_path} --max-update=7 --update-freq 2 --warmup-updates 3"
    plan = plan_of(cli._parser().parse_args(words.split()))
    assert (plan.output, plan.training.updates) == (str(tmp_path), 7)
    assert (plan.training.accumulate, plan.training.warmup) == (2, 3)
    assert cli._parser().parse_args(["translate", "--model", "m", "--nbest", "2"]).n_best == "2"


def test_fairseq_s_words_name_options_that_exist():
    """Each answer is given by a command, and none hides an option of ours."""
    for flag in fairseq_words.OTHERS:
        subcommands = cli._parser()._subparsers._group_actions[0].choices
        for parser in subcommands.values():
            parser.add_options()
        flags = {name: parser._option_string_actions for name, parser in subcommands.items()}
        assert any(fairseq_words.answer(flag, known) for known in flags.values()), flag
        assert not any(flag in known for known in flags.values()), flag
    for command, words in fairseq_words.SAME.items():
        assert set(words.values()) <= set(flags[command]) and not set(words) & set(flags[command])


@pytest.mark.parametrize(
    "option, value, said",
    [
        ("norm", "mixnorm", 'unknown norm "mixnorm"; expected one of layernorm'),
        ("residual", "mixnorm", 'unknown residual "mixnorm"; expected one of'),
        ("norm", "mix-ln", 'unknown norm "mix-ln" ("mix-ln" is a residual scheme: residual="mix-ln"); expected'),
        ("residual", "rmsnorm", 'unknown residual "rmsnorm" ("rmsnorm" is a norm: norm="rmsnorm"); expected'),
        ("init", "mup", 'unknown init "mup" ("mup" is a parametrisation: parametrisation="mup"); expected'),
        ("norm", "RMSNorm", 'unknown norm "RMSNorm" (did you mean "rmsnorm"?)'),
        ("norm", "batch_norm", 'unknown norm "batch_norm" (did you mean "batchnorm"?)'),
        ("norm", "group", 'unknown norm "group"; expected'),
    ],
)
def test_suggestions_are_near_or_name_the_right_option(option, value, said, capsys):
    """In the language of the call: keywords in Python, flags on the command line."""
    with pytest.raises(nfrs.InputError) as raised:
        TransformerConfig(**{option: value})
    assert str(raised.value).startswith(said)
    assert cli.main(["train", "--output", "x", f"--{option}", value]) == 2
    as_flag = re.sub(r'(\w+)="(\S+)"\)', r"--\1 \2)", said)
    assert as_flag in capsys.readouterr().err


WORDS = {
    "residual": {
        **dict.fromkeys(("pre_ln", "preln", "Pre-LN", "pre-norm", "norm_first"), "prenorm"),
        **dict.fromkeys(("post-ln", "postln", "vanilla", "post_layer_norm"), "postnorm"),
        "deepnet": "deepnorm",
        "sub-ln": "subln",
        "hc": "hyper-connections",
        "magneto": "subln",
    },
    "norm": {"ln": "layernorm", "layer-norm": "layernorm", "rms": "rmsnorm", "bn": "batchnorm", "dynamic-tanh": "dyt"},
    "init": {"glorot": "xavier", "small-init": "smallinit"},
    "positions": {"rope": "rotary", "sinusoidal": "twt"},
    "activation": {"swish": "silu"},
    "precision": {"bfloat16": "bf16", "fp32": "f32", "float32": "f32", "bf-16": "bf16"},
    "optimizer": {"adamw": "adam"},
    "schedule": {"noam": "inverse-sqrt", "inverse_sqrt": "inverse-sqrt"},
}
FLAGS = {
    "--learning-rate": ["--lr"],
    "--learning_rate": ["--lr"],
    "--num-layers": ["--encoder-layers", "--decoder-layers"],
    "--hidden-size": ["--d-model"],
    "--n-embd": ["--d-model"],
    "--intermediate-size": ["--d-ff"],
    "--num-heads": ["--heads"],
    "--batch_size": ["--max-tokens"],
    "--max-steps": ["--updates"],
    "--num-train-epochs": ["--epochs"],
    "--warmup-steps": ["--warmup"],
    "--max-grad-norm": ["--clip-norm"],
    "--gradient-accumulation-steps": ["--accumulate"],
    "--eval-steps": ["--evaluate-every"],
    "--gradient-checkpointing": ["--activation-checkpointing"],
    "--output-dir": ["--output"],
    "--src": ["--train-source"],
    "--tgt": ["--train-target"],
    "--vocab-size": ["--bpe-operations"],
    "--scheduler": ["--schedule"],
}


@pytest.mark.parametrize(("option", "word"), [(option, word) for option in WORDS for word in WORDS[option]])
def test_other_words_of_the_field_name_ours(option, word):
    config = TransformerConfig if option in (f.name for f in TransformerConfig.FIELDS) else nfrs.TrainingConfig
    with pytest.raises(nfrs.InputError) as raised:
        config(**{option: word})
    assert f'unknown {option} "{word}" (did you mean "{WORDS[option][word]}"?)' in str(raised.value)


@pytest.mark.parametrize("flag", FLAGS)
def test_other_trainers_flags_name_ours(flag, capsys):
    assert cli.main(["train", "--output", "x", flag, "2"]) == 2
    said = capsys.readouterr().err.split("--help lists")[0].replace(f'"{flag}"', "")
    named = re.findall(r"--[a-z][\w-]*", said)
    assert set(FLAGS[flag]) <= set(named) <= {*FLAGS[flag], "--updates", "--save-dir", flag.replace("_", "-")}, said


@pytest.mark.parametrize("words", ["", "help", "-h", "help train", "-h train", "--help train", "train --help"])
def test_help_is_shown_however_it_is_asked_for(words, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(words.split())
    shown = capsys.readouterr().out
    assert ("--residual" in shown) if "train" in words else ("translate" in shown and "reproduce" in shown)


def test_flags_take_underscores():
    words = ["train", "--output", "x", "--d_model", "16", "--encoder_layers=2", "--no_bpe"]
    found = cli._parser().parse_args(words)
    assert (found.d_model, found.encoder_layers, found.no_bpe) == ("16", "2", True)


def mistakes(folder: Path) -> dict[str, tuple[str, str]]:
    """A new user's: the command, and what is said."""
    for name, lines in (("short", 2), ("long", 3)):
        (folder / name).write_text("a b c\n" * lines)
    (folder / "value.toml").write_text('norm = "scalnorm"\n')
    (folder / "syntax.toml").write_text("norm = \n")
    (folder / "preset.toml").write_text('preset = "transformer-tini"\n')
    (folder / "run" / "checkpoints" / "update-00000010").mkdir(parents=True)
    (folder / "run" / "checkpoints" / "best").symlink_to("update-00000010")
    (folder / "run" / "config.json").write_text("{}")
    (folder / "run" / "checksums.txt").write_text("")
    text = "--train-source short --train-target long --valid-source short --valid-target long --no-bpe"
    return {
        "fairseq's word": ("train --arch transformer", "--arch is fairseq's; here: --preset NAME"),
        "a wrong value in a file": ("train --config value.toml", 'value.toml: unknown norm "scalnorm" (did you mean'),
        "a wrong preset in a file": ("train --config preset.toml", 'preset.toml: unknown preset "transformer-tini"'),
        "wrong syntax in a file": (
            "train --config syntax.toml",
            "syntax.toml: not valid TOML: Invalid value (at line 1",
        ),
        "no such file of options": ("train --config none.toml", "none.toml: no such file; expected a TOML file"),
        "no such text": (
            f"train --output new {text.replace('long', 'none', 1)}",
            "none: no such file; expected a text",
        ),
        "a typo in a norm": ("train --norm scalnorm", 'unknown norm "scalnorm" (did you mean "scalenorm"?)'),
        "no output": (f"train {text}", "train needs --output DIR"),
        "no text": ("train --output new", "train_target is missing: give a text file"),
        "no source": ("train --output new --train-target long", "train_source is missing: an encoder-decoder model"),
        "no held-out text": (f"train --output new {text.split(' --valid')[0]} --no-bpe", "valid_target is missing"),
        "no way to cut words": (f"train --output new {text[:-9]}", "how is text cut into pieces? Give one of"),
        "no run to resume": (f"train --output new --resume {text}", "new holds no run to resume: leave out --resume"),
        "a run is there": (f"train --output run {text}", "run already holds a run: --resume continues it, --overwrite"),
        "no such run": ("translate --model none --input short", "none holds no model: expected the output folder of a"),
        "a wrong checkpoint": (
            "translate --model run --checkpoint bset --input short",
            'there is no checkpoint "bset"; run/checkpoints has best, update-00000010',
        ),
        "no such update": ("generate --model run --checkpoint 20 --prompt a", 'there is no checkpoint "20"; run/check'),
        "no such input": ("translate --model run --input none", "none: no such file; expected a text file in UTF-8"),
        "no such reference": ("evaluate --hypothesis short --reference none", "none: no such file; expected a text"),
        "no folder for the output": (
            "translate --model run --input short --output no/out",
            "no/out: there is no folder",
        ),
        "a wrong search": ("translate --model run --input short --beam 0", "beam must be at least 1; got 0"),
        "a senseless search": ("translate --model run --input short --alpha 1e6", "alpha must lie between -10 and 10"),
        "no model to export": ("export --model none --output new", "none holds no model: expected the output folder"),
        "nothing to average": ("average --model none --last 2", "none holds no model: expected the output folder"),
        "no such .pt": ("convert --from none.pt --to new", "none.pt: no such file; expected a checkpoint of fairseq"),
        "a folder that is there": ("convert --from none.pt --to run", "run exists already; give a new folder"),
        "no log": ("plot none", "none: no log.jsonl there; expected the --output folder of a run"),
        "a closed output": ("evaluate --hypothesis short --reference short >&-", "standard output is closed; open it"),
    }


NAMES = list(mistakes(Path(tempfile.mkdtemp())))


@pytest.mark.parametrize("what", NAMES)
@pytest.mark.one_in(test=7, all=3)
def test_a_mistake_is_answered_at_once(tmp_path, what):
    words, said = mistakes(tmp_path)[what]
    (tmp_path / "main.py").write_text(
        "import sys\nfrom normformer_rs.cli import main\ncode = main(sys.argv[1:])\n"
        "print([name for name in ('torch', 'normformer_rs._core') if name in sys.modules], file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} main.py {words}"], cwd=tmp_path, capture_output=True, text=True
    )
    first, *more, imported = done.stderr.splitlines()
    assert first.startswith(f"normformer-rs: error: {said}"), done.stderr
    assert (done.returncode, imported, done.stdout) == (2, "[]", "") and len(more) <= 1
    assert not (tmp_path / "new").exists()


def test_uneven_texts_are_one_line(tmp_path, monkeypatch, capsys):
    mistakes(tmp_path)
    monkeypatch.chdir(tmp_path)
    text = "--train-source short --train-target long --valid-source short --valid-target long --no-bpe"
    assert cli.main(["train", "--output", "new", *text.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("normformer-rs: error: short has 2 lines and long has 3")


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
import builtins, sys
before = [*sys.meta_path], [*sys.path_hooks], builtins.__import__, {*sys.modules}
import normformer_rs
assert before[:3] == ([*sys.meta_path], [*sys.path_hooks], builtins.__import__)
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
assert type(torch.__spec__.loader.exec_module).__name__ == "method" and "exec_module" not in vars(torch.__spec__.loader)
import inspect
assert "import" in inspect.getsource(torch)
"""


@pytest.mark.parametrize(
    "code",
    [
        LAZY + "import torch\nnormformer_rs.nn\n" + OPERATOR,
        LAZY
        + "import importlib.util\nassert importlib.util.find_spec('torch')\n"
        + "assert importlib.util.find_spec('normformer_rs._core') and 'torch' not in sys.modules\nimport torch.nn\n"
        + "normformer_rs._core\n"
        + OPERATOR,
        LAZY + "normformer_rs.nn\nimport torch\n" + OPERATOR,
        LAZY + "from normformer_rs import surgery, analysis, nn\nimport torch\n" + OPERATOR,
        "import sys, torch, normformer_rs\n" + OPERATOR,
        "import sys\nfrom normformer_rs import _core\nimport torch\n" + OPERATOR,
        "import sys\nimport normformer_rs.loop.translation\nimport torch\n" + OPERATOR,
        "import sys\nfrom normformer_rs import *\nimport torch\nTransformer, nn.ScaleNorm\n" + OPERATOR,
    ],
    ids=["torch later", "looked for", "an attribute", "modules", "torch first", "from", "a module", "star"],
)
@pytest.mark.one_in(all=8)
def test_the_core_comes_with_torch(code):
    python(code)


def test_the_package_has_all_its_names():
    lazy = {name for names in nfrs._HOMES.values() for name in names} | {
        "analysis",
        "figures",
        "nn",
        "norms",
        "schemes",
        "surgery",
    }
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
@pytest.mark.one_in(all=3)
def test_tables_of_another_core_are_refused(tmp_path, content):
    path = tmp_path / "_tables.json"
    if content is not None:
        path.write_text(content)
    begin = f"from pathlib import Path\nfrom normformer_rs import _tables\n_tables.PATH = Path({str(path)!r})\n"
    caught = "try:\n    import {}\nexcept ImportError as error:\n    print(error)"
    for name in ("torch, normformer_rs.nn", "normformer_rs.loop.translation") if content else ("normformer_rs.nn",):
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


PROPOSED = {
    "tra": {"train", "translate"},
    "train --norm scal": {"scalenorm", "scalenorm-fixed"},
    "train --warmup-in": {"--warmup-init-lr"},
    "--print-completion z": {"zsh"},
}


@pytest.mark.parametrize("words", PROPOSED)
def test_tab_completes(words, tmp_path):
    pytest.importorskip("shtab")
    script = tmp_path / "completion"
    script.write_text(
        subprocess.run([*COMMAND, "--print-completion", "bash"], capture_output=True, text=True, check=True).stdout
    )
    function = re.search(r"complete .*-F (\w+) normformer-rs", script.read_text())[1]
    typed = ["normformer-rs", *words.split()]
    code = f"source {script}; COMP_WORDS=({' '.join(typed)}); COMP_CWORD={len(typed) - 1}; {function}; "
    done = subprocess.run(["bash", "-c", code + "echo ${COMPREPLY[@]}"], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == PROPOSED[words]


@pytest.mark.full
def test_version_all_says_what_a_report_needs():
    done = subprocess.run([*COMMAND, "--version", "--all"], capture_output=True, text=True, check=True)
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert lines["normformer-rs"].startswith(f"{nfrs.__version__}, built against torch ")
    assert re.match(r"2\.\d+\.\d+.*, \d+ threads?$", lines["torch"])
    assert f"{sys.version_info.major}.{sys.version_info.minor}." in lines["Python"]
    assert set(lines) >= {"processor", "devices", "system", "packages", "variables"}


@pytest.mark.full
def test_doctor_says_what_is_here_and_what_to_do(tmp_path):
    (tmp_path / "a.verdicts").write_text("H100, driver 13.0\tdyt.cu\t-DK_VEC=4\trows_forward\tright\n"
                                         "H100, driver 13.0\tdyt.cu\t-DK_VEC=4\trows_backward\twrong\n")  # fmt: skip
    env = {**os.environ, "NORMFORMER_RS_CACHE": str(tmp_path)}
    done = subprocess.run([*COMMAND, "doctor"], capture_output=True, text=True, check=True, env=env)
    assert "(in use)" in done.stdout and "\nkernels on H100, driver 13.0: 1 proven right, 1 wrong\n" in done.stdout
    last = "to do: report this, whose formula runs in its place: dyt.cu -DK_VEC=4 rows_backward on H100, driver 13.0"
    assert done.stdout.splitlines()[-1] == last


@pytest.mark.parametrize(
    "damage",
    [
        b"H100, dri",
        b"",
        b"\n\n",
        b"\t\t\t\t",
        b"a\tb\tc\td\tmaybe",
        b"a\tb\tc\td\te\tright",
        b"\xff\xfe\t\0",
        b"\0" * 4096,
    ],
    ids=repr,
)
def test_doctor_leaves_damaged_verdicts_out(tmp_path, capsys, monkeypatch, damage):
    whole = b"H100\x1b[2J, driver 13.0\tdyt.cu\t-DK_VEC=4\trows_forward\tright\n"
    (tmp_path / "a.verdicts").write_bytes(whole + damage)
    (tmp_path / "a.verdicts").chmod(0o600)
    monkeypatch.setenv("NORMFORMER_RS_CACHE", str(tmp_path))
    assert cli.main(["doctor"]) == 0
    captured = capsys.readouterr()
    assert "\nkernels on H100\\x1b[2J, driver 13.0: 1 proven right, 0 wrong\n" in captured.out
    assert ("\nkernels: 1 of the kept verdicts' lines are damaged" in captured.out) == (damage != b"")


@pytest.mark.full
def test_doctor_does_not_read_what_others_may_have_written(tmp_path):
    (tmp_path / "a.verdicts").write_text("H100, driver 13.0\tdyt.cu\t-DK_VEC=4\trows_forward\tright\n")
    (tmp_path / "a.verdicts").chmod(0o666)
    (tmp_path / "b.verdicts").symlink_to("a.verdicts")
    os.mkfifo(tmp_path / "c.verdicts")
    env = {**os.environ, "NORMFORMER_RS_CACHE": str(tmp_path)}
    done = subprocess.run([*COMMAND, "doctor"], capture_output=True, text=True, check=True, env=env)
    assert "kernels on" not in done.stdout and "kernels:" not in done.stdout
    said = {line.partition(f"{tmp_path}/")[2][:28] for line in done.stderr.splitlines() if "does not trust" in line}
    assert said == {"a.verdicts can be written by", "b.verdicts is a symbolic lin", "c.verdicts is a pipe; expect"}
