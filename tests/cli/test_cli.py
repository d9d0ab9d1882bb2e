"""The command line: from flags and files to options, what is printed, exit codes. Training itself is stood in for."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import normformer_rs as nfrs
from normformer_rs import DataConfig, InputError, TrainingConfig, TransformerConfig, _core, cli, commands
from normformer_rs.commands.options import layered, read_toml
from normformer_rs.loop import progress
from normformer_rs.loop.presets import PRESETS

STARTED = {"parameters": 10, "vocabulary": 7, "device": "cpu", "update": 0, "updates": 2, "updates_per_epoch": 2.0}
UPDATED = {"epoch": 1, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_second": 100.0, "time_left": None}
EVALUATED = {"epoch": 1, "loss": 2.5, "nll": 2.0, "perplexity": 7.4, "bleu": 12.5, "best": True, "seconds": 0.1}


@pytest.fixture
def trained(monkeypatch):
    """`_core.train` stood in for: the list of calls, each the options by name, output and mode."""
    calls = []

    def train(model, training, data, output, mode, group, observer, from_checkpoint, init_from):
        assert group is None
        options = {**json.loads(model), **json.loads(training), **json.loads(data)}
        calls.append({**options, "output": output, "mode": mode, "from_checkpoint": from_checkpoint})
        events = [("started", STARTED)]
        events += [
            ("updated", {"update": u, "loss": 3.0 / u, "nll": 2.0 / u, "seconds": 0.5 * u, **UPDATED}) for u in (1, 2)
        ]
        events += [("evaluated", {"update": 2, **EVALUATED})]
        for name, event in events:
            getattr(observer, name)(event)
        observer.message("warning", "two sentences left out")
        with open(f"{output}/log.jsonl", "w") as log:
            log.writelines(json.dumps({"event": name, **event}) + "\n" for name, event in events)

    monkeypatch.setattr(_core, "train", train)
    monkeypatch.setattr(commands.train, "check_data", lambda model, data: None)
    return calls


def fails_with(capsys, argv, *words, code=2):
    """Runs the command, which must print one line with those words and return the code; the line."""
    assert cli.main(argv) == code
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith(("normformer-rs: error: ", "normformer-rs: interrupted: ")), lines
    assert captured.out == ""
    for word in words:
        assert word in lines[0], lines[0]
    return lines[0]


@pytest.fixture
def run(trained, tmp_path):
    """Runs `train` into a folder; the options that the loop was given."""

    def train(*flags):
        assert cli.main(["train", "--output", str(tmp_path), "--no-progress", *flags]) == 0
        return trained[-1]

    return train


def test_the_bar_ends_with_the_last_evaluation(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # wide enough for the whole line
    update = {"update": 3, "tokens_per_second": 1000.0, "loss": 2.0, "lr": 1e-3, "time_left": 0.0}
    for events in (["updated", "evaluated"], ["evaluated"]):  # a resumed run may begin with one
        bar = progress.Bar()
        bar.started({"updates": 3, "update": 0})
        for name in events:
            getattr(bar, name)(update | {"bleu": 38.1, "loss": 1.5} if name == "evaluated" else update)
        bar.close()
        shown = capsys.readouterr().err.replace("\r", "\n").split("\n")
        assert [line for line in shown if line][-1].endswith("valid 1.500 BLEU 38.10]")


@pytest.mark.parametrize("widgets", [True, False])
def test_a_notebook_without_widgets_gets_lines(monkeypatch, widgets):
    monkeypatch.setattr(progress, "_in_notebook", lambda: True)
    monkeypatch.setattr(progress, "available", lambda name: widgets or name != "ipywidgets")
    assert type(progress.choose(True)) is (progress.Bar if widgets else progress.Lines)


@pytest.mark.full
def test_defaults_are_the_core_s(run):
    options = run()
    for which in ("model", "training", "data"):
        for field in json.loads(_core.tables())["options"][which]:
            assert options[field["name"]] == field["default"], field["name"]
    assert options["mode"] == "new"


def test_flags_go_before_the_file_and_the_file_before_the_preset(run, tmp_path):
    config = tmp_path / "options.toml"
    config.write_text('preset = "transformer-tiny"\nlr = 1e-3\nd-model = 64\nnorm = "scalenorm"\n')
    options = run("--config", str(config), "--norm", "rmsnorm", "--heads", "2", "--no-vocab-mask", "--fixnorm")
    assert (options["norm"], options["heads"], options["vocab_mask"], options["fixnorm"]) == ("rmsnorm", 2, False, True)
    assert (options["lr"], options["d_model"]) == (1e-3, 64)  # the file's
    assert (options["d_ff"], options["warmup"], options["encoder_layers"]) == (256, 2000, 4)  # the preset's


def test_a_preset_flag_replaces_the_file_s_preset(run, tmp_path):
    config = tmp_path / "options.toml"
    config.write_text('preset = "transformer-tiny"\n')
    assert run("--config", str(config), "--preset", "transformer-base")["d_model"] == 512


def test_files_may_group_options_in_tables(tmp_path):
    config = tmp_path / "options.toml"
    config.write_text('output = "run"\n[model]\nheads = 2\n[training]\nmax-tokens = 100\n[data]\nno_bpe = true\n')
    known = ["output", "heads", "max_tokens", "no_bpe"]
    assert read_toml(config, known) == {"output": "run", "heads": 2, "max_tokens": 100, "no_bpe": True}


def test_one_way_of_cutting_words_replaces_another():
    assert layered(None, {"bpe_operations": 10}, {"no_bpe": True}) == {"no_bpe": True}
    assert layered(None, {"bpe_operations": 10}, {"no_bpe": False}) == {"bpe_operations": 10, "no_bpe": False}


@pytest.mark.parametrize("line", ["preset = 3", 'preset = ["a"]', "output = 5", "output = true"])
def test_names_in_files_are_words(capsys, tmp_path, line):
    config = tmp_path / "options.toml"
    config.write_text(line + "\n")
    fails_with(capsys, ["train", "--config", str(config)], f"{line.split()[0]} must be a")


@pytest.mark.parametrize("options", ["[1]", "3", "null", '"text"'])
def test_options_have_names(options):
    with pytest.raises(InputError, match="TransformerConfig takes options by name; got"):
        TransformerConfig.from_json(options)


def test_numbers_of_numpy_and_paths_are_taken():
    import numpy as np

    model = TransformerConfig(d_model=np.int64(64), dropout=np.float32(0.5))
    assert (model.d_model, model.dropout, type(model.d_model)) == (64, 0.5, int)
    assert DataConfig(train_source=Path("x")).train_source == "x"


@pytest.mark.parametrize(
    "option,value,message",
    [
        ("seed", -1, "seed must be at least 0"),
        ("updates", 2**63, "updates must be a whole number of 64 bits"),
        ("lr", float("nan"), "lr must be a finite number"),
        ("lr", float("inf"), "lr must be a finite number"),
        ("dropout", float("nan"), "dropout must be a finite number"),
    ],
)
def test_numbers_out_of_range_are_named(option, value, message):
    kind = TransformerConfig if option == "dropout" else TrainingConfig
    with pytest.raises(InputError, match=message):
        kind(**{option: value})


SCHEMES = ["--norm scalenorm --fixnorm", "--encoder-norm powernorm --powernorm-warmup 8000 --init xavier"]
SCHEMES += ["--residual branchnorm --branchnorm-steps 100", "--residual rezero --schedule no-warmup --lr none"]


SETUPS = {  # layers, width, feed-forward, heads; dropouts; rate, warm-up; tokens an update, updates
    "transformer-tiny": ((4, 128, 256, 4), (0.3, None), (5e-3, 2000), (4096, 10000)),
    "transformer-small": ((6, 512, 1024, 4), (0.3, None), (None, 4000), (4096, 10000)),
    "transformer-base": ((6, 512, 2048, 8), (0.3, None), (None, 4000), (4096, 10000)),
    "twt": ((6, 512, 2048, 8), (0.3, None), (None, 8000), (4096, 300_000)),
    "twt-gl-en": ((4, 512, 2048, 4), (0.4, None), (None, 8000), (4096, 100_000)),
    "twt-wmt": ((6, 512, 2048, 8), (0.1, None), (1e-3, 4000), (81_920, 0)),
    "pn-iwslt": ((6, 512, 1024, 4), (0.3, 0.1), (1.5e-3, 8000), (4096, 100_000)),
    "pn-wmt": ((6, 1024, 4096, 16), (0.3, 0.1), (3e-3, 8000), (131_072, 300_000)),
    "pn-ptb": ((3, 256, 2100, 8), (0.3, None), (2.5e-4, 4000), (4096, 0)),
    "llama-tiny": ((6, 288, 768, 6), (0.0, None), (5e-4, 1000), (4096, 10000)),
    "brn": ((6, 512, 2048, 8), (0.4, 0.0), (5e-4, 4000), (524_288, 100_000)),
}


def test_presets_are_the_papers():
    found = {}
    for name in PRESETS:
        model, training = nfrs.preset(name)
        assert training.adam_form == ("torch" if name in ("twt", "twt-gl-en", "llama-tiny") else "fairseq")
        assert model.architecture == "decoder-only" or model.encoder_layers == model.decoder_layers
        assert model.attention_dropout == model.activation_dropout
        shape = (model.decoder_layers, model.d_model, model.d_ff, model.heads)
        batch = (training.max_tokens * training.accumulate, training.updates)
        found[name] = (shape, (model.dropout, model.attention_dropout), (training.lr, training.warmup), batch)
    assert found == SETUPS


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.one_in(test=11, all=4)
def test_every_preset_takes_every_scheme(name, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("a b c d e f g h\n" * 3)
    files = [f"--{part}-{side}={text}" for part in ("train", "valid") for side in ("source", "target")]
    small, schemes = ["--encoder-layers", "1", "--decoder-layers", "1"], SCHEMES
    if nfrs.preset(name)[0].architecture == "decoder-only":
        files = [*(file for file in files if "target" in file), "--segment-length", "32"]
        schemes = [scheme.replace("--encoder-norm", "--norm") for scheme in SCHEMES]
    for scheme in schemes:
        given = [*files, "--no-bpe", "--preset", name, *small, *scheme.split(), "--dry-run"]
        assert cli.main(["train", *given]) == 0, capsys.readouterr().err


def test_none_unsets_what_a_preset_sets(run):
    assert run("--preset", "transformer-tiny", "--lr", "none")["lr"] is None


def test_resuming_takes_the_run_s_own_options(run, tmp_path):
    (tmp_path / "config.json").write_text('{"model": {"d_model": 64, "norm_eps": null}, "training": {"updates": 100}}')
    options = run("--resume", "--updates", "200")
    assert (options["d_model"], options["updates"], options["mode"]) == (64, 200, "resume")


@pytest.mark.full
def test_the_checkpoint_to_go_on_from_is_chosen(run, capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert run("--resume", "--from-checkpoint", "20")["from_checkpoint"] == "20"
    assert run("--resume")["from_checkpoint"] is None
    capsys.readouterr()
    fails_with(
        capsys, ["train", "--output", str(tmp_path), "--from-checkpoint", "20"], "from_checkpoint", "give resume"
    )


@pytest.mark.parametrize("command", ["train", "translate", "average"])
def test_a_name_that_is_not_utf8_is_said(capsys, tmp_path, command):
    folder = str(tmp_path / "na\udcefve")
    argv = {
        "train": ["--output", folder],
        "translate": ["--model", folder],
        "average": ["--last", "2", "--model", folder],
    }
    fails_with(capsys, [command, *argv[command]], r"na\xefve' is not UTF-8; expected a name in UTF-8")
    with pytest.raises(InputError, match=r"train_source: .* is not UTF-8"):
        DataConfig(train_source=folder)


def test_a_text_larger_than_memory_is_not_damaged(translated, monkeypatch, capsys, tmp_path):
    def decompress(_):
        raise MemoryError

    source = tmp_path / "in.gz"
    source.write_bytes(gzip.compress(b"a"))
    monkeypatch.setattr(gzip, "decompress", decompress)
    line = fails_with(capsys, ["translate", "--model", "m", "--input", str(source)], "does not fit into memory")
    assert "damaged" not in line


class Executes:
    """A pickle of this makes a folder where it is loaded."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_a_file_that_would_execute_something_is_refused(capsys, tmp_path):
    torch.save({"model": {}, "args": Executes(tmp_path / "executed")}, tmp_path / "evil.pt")
    argv = ["convert", "--from", str(tmp_path / "evil.pt"), "--to", str(tmp_path / "run")]
    fails_with(capsys, argv, "holds posix.mkdir, which is neither a tensor nor plain data")
    assert not (tmp_path / "executed").exists() and not (tmp_path / "run").exists()


def test_what_train_writes_is_said_once(capsys, tmp_path):
    fails_with(capsys, ["train"], "--output")
    fails_with(capsys, ["train", "--output", str(tmp_path), "--resume", "--overwrite"], "exclude")


@pytest.mark.full
def test_a_run_reports_its_best_evaluation_and_draws(run, tmp_path, capsys):
    run()
    error = capsys.readouterr().err
    assert "best: update 2" in error and "BLEU 12.50" in error and "warning: two sentences left out" in error
    pytest.importorskip("matplotlib")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_dry_run_prints_and_does_not_train(trained, monkeypatch, capsys):
    needs = {
        "parameters": 1234,
        "parameter_bytes": 4936,
        "activation_bytes": 2,
        "training_bytes": 3 << 20,
        "vocabulary": 9712,
    }
    needs |= {"sentences": 40, "skipped": 2}
    monkeypatch.setattr(_core, "dry_run", lambda *_: json.dumps(needs))
    assert cli.main(["train", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "left out:   2 of 42 sentences" in output
    assert "1,234" in output and "9,712" in output and "3 MiB" in output and not trained


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--norm", "scalnorm"], ['unknown norm "scalnorm"', 'did you mean "scalenorm"', "expected one of layernorm"]),
        (["--residual", "x"], ['unknown residual "x"; expected one of', "prenorm"]),
        (["--preset", "transformer-tini"], ["transformer-base", 'did you mean "transformer-tiny"']),
        (["--heads", "two"], ["heads must be an integer", "'two'"]),
        (["--dropout", "much"], ["dropout must be a number"]),
        (["--bpe-operations", "10", "--no-bpe"], ["--no-bpe", "--bpe-operations"]),
        (["--config", "missing.toml"], ["missing.toml", "no such file"]),
    ],
)
def test_wrong_flags_name_the_right_ones(trained, capsys, tmp_path, flags, words):
    fails_with(capsys, ["train", "--output", str(tmp_path), *flags], *words)
    assert not trained and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text, words",
    [
        ('nrom = "rmsnorm"', ['did you mean "norm"', "options.toml"]),
        ('norm = "scalnorm"', ['did you mean "scalenorm"']),
        ("heads = 2.5", ["heads must be an integer", "2.5"]),
        ("heads = true", ["heads must be an integer", "True"]),
        ("heads = 2\n[model]\nheads = 4", ["given twice"]),
        ("model = 3", ["[model]"]),
        ("heads = ", ["not valid TOML"]),
    ],
)
def test_wrong_files_name_the_right_options(trained, capsys, tmp_path, text, words):
    config = tmp_path / "options.toml"
    config.write_text(text)
    fails_with(capsys, ["train", "--output", str(tmp_path), "--config", str(config)], *words)
    assert not trained


@pytest.mark.parametrize(
    "error",
    [
        _core.InputError("a folder that holds a run"),
        _core.DivergedError("the loss of update 7 is not finite"),
        OSError(28, "No space left on device"),
        _core.Interrupted("saved; go on with --resume"),
    ],
)
def test_what_fails_is_one_line(monkeypatch, capsys, tmp_path, error):
    def train(*_, **options):
        raise error

    monkeypatch.setattr(_core, "train", train)
    monkeypatch.setattr(commands.train, "check_data", lambda model, data: None)
    codes = {_core.InputError: 2, _core.DivergedError: 3, OSError: 4, _core.Interrupted: 130}
    line = fails_with(capsys, ["train", "--output", str(tmp_path)], str(error), code=codes[type(error)])
    assert ("interrupted" in line.split()[1]) == isinstance(error, _core.Interrupted)


def test_a_traceback_is_shown_on_request(monkeypatch, tmp_path):
    monkeypatch.setenv("NORMFORMER_RS_TRACEBACK", "1")
    with pytest.raises(InputError, match="did you mean"):
        cli.main(["train", "--output", str(tmp_path), "--norm", "scalnorm"])


def test_help_lists_choices_and_defaults(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["train", "--help"])
    output = " ".join(capsys.readouterr().out.split())
    for words in ("--encoder-norm", "scalenorm-fixed", "Default: 8.", "--no-bpe", "--[no-]vocab-mask", "val-decay"):
        assert words in output, words
    assert "--vocab-size" not in output and "--no-no-bpe" not in output


@pytest.fixture
def translated(monkeypatch, tmp_path_factory):
    """`_core.translate` stood in for: hypotheses are the lines in upper case, and again with their number. "m" is a
    run's folder."""
    calls = []
    folder = tmp_path_factory.mktemp("runs")
    for name in ("best", "average"):
        (folder / "m" / "checkpoints" / name).mkdir(parents=True)
    (folder / "m" / "config.json").write_text("{}")
    monkeypatch.chdir(folder)

    def translate(model, lines, search, checkpoint, batch_tokens, precision, device):
        calls.append({**json.loads(search), "checkpoint": checkpoint, "batch_tokens": batch_tokens})
        return [
            [(f"{line.upper()}{' ' + str(i) if i else ''}", -1.0 - i) for i in range(calls[-1]["n_best"])]
            for line in lines
        ]

    monkeypatch.setattr(_core, "translate", translate)
    return calls


def test_translate_writes_a_line_for_a_line(translated, tmp_path):
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(gzip.compress("a b\n\nc\u2028d\r\n".encode()))
    flags = ["--beam", "3", "--rule", "google", "--alpha", "0.6", "--checkpoint", "average", "--max-tokens", "99"]
    assert cli.main(["translate", "--model", "m", "--input", str(source), "--output", str(target), *flags]) == 0
    assert target.read_text(encoding="utf-8").split("\n") == ["A B", "", "C\u2028D", ""]
    expected = {"beam": 3, "rule": "google", "alpha": 0.6, "checkpoint": "average", "batch_tokens": 99}
    assert translated[0].items() >= expected.items()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_translate_writes_n_best_in_moses_format(translated, tmp_path, capfdbinary):
    source = tmp_path / "in"
    source.write_text("a\nb\n")
    assert cli.main(["translate", "--model", "m", "--input", str(source), "--n-best", "2"]) == 0
    lines = capfdbinary.readouterr().out.decode().splitlines()
    assert lines == [
        "0 ||| A ||| -1.000000",
        "0 ||| A 1 ||| -2.000000",
        "1 ||| B ||| -1.000000",
        "1 ||| B 1 ||| -2.000000",
    ]


@pytest.mark.parametrize(
    "content, words",
    [
        (None, ["no such file"]),
        (b"ok\nna\xefve\n", ["line 2", "byte 3", "0xef"]),
        (b"\x1f\x8bxx", ["gzip"]),
    ],
)
def test_unreadable_input_leaves_the_output_alone(translated, capsys, tmp_path, content, words):
    source, target = tmp_path / "in", tmp_path / "out"
    target.write_text("old")
    if content is not None:
        source.write_bytes(content)
    argv = ["translate", "--model", "m", "--input", str(source), "--output", str(target)]
    fails_with(capsys, argv, str(source), *words)
    assert target.read_text() == "old" and not translated


@pytest.mark.parametrize("content", [b"", gzip.compress(b""), b"\xef\xbb\xbf"], ids=["empty", "gzip", "a mark"])
@pytest.mark.parametrize("way", ["file", "pipe", "n-best"])
def test_nothing_is_translated_by_nothing(translated, monkeypatch, capfdbinary, tmp_path, content, way):
    """An empty shard ends no pipeline."""
    source = tmp_path / "in"
    source.write_bytes(content)
    with source.open() as pipe:
        monkeypatch.setattr("sys.stdin", pipe)
        argv = ["translate", "--model", "m", *(["--input", str(source)] if way != "pipe" else [])]
        assert cli.main([*argv, *(["--n-best", "2"] if way == "n-best" else [])]) == 0
        assert capfdbinary.readouterr().out == b""
        if way != "pipe":
            assert cli.main([*argv, "--output", str(tmp_path / "out")]) == 0
            assert (tmp_path / "out").read_bytes() == b""


def test_cut_translations_are_counted(translated, monkeypatch, capsys, tmp_path):
    (tmp_path / "in").write_text("a\nb\nc\n")
    argv = ["translate", "--model", "m", "--input", str(tmp_path / "in")]
    assert cli.main(argv) == 0
    assert "translated 3 lines" in (said := capsys.readouterr().err) and "cut" not in said
    monkeypatch.setattr(
        _core, "translate", lambda *_: [[("A", -1.0, False)], [("B", -1.0, True)], [("C", -1.0, False)]]
    )
    assert cli.main(argv) == 0
    shown = capsys.readouterr()
    assert shown.out == "A\nB\nC\n" and "; the greatest length (--max-length) cut 2 translations" in shown.err


def test_evaluate_prints_both_bleus_and_the_bootstrap(capsys, tmp_path):
    pytest.importorskip("sacrebleu")
    reference = [f"line {i} says the number {i * i} and goes on" for i in range(30)]
    texts = {"reference": reference, "hypothesis": [*reference[:28], "no", "no"], "baseline": ["line 1 says"] * 30}
    flags = []
    for name, lines in texts.items():
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        flags += [f"--{name}", str(tmp_path / name)]
    assert cli.main(["evaluate", *flags, "--tokenize", "none"]) == 0
    sacrebleu, multi_bleu, bootstrap = capsys.readouterr().out.splitlines()
    assert "tok:none" in sacrebleu and "version:" in sacrebleu
    ours, theirs = (float(line.split(" = ")[1].split()[0].rstrip(",")) for line in (sacrebleu, multi_bleu))
    assert ours == pytest.approx(theirs, abs=0.01)
    assert "baseline BLEU" in bootstrap and "p = 0.0010" in bootstrap


def test_evaluate_joins_split_text(capsys, tmp_path):
    pytest.importorskip("sacrebleu")
    (tmp_path / "split").write_text("a b@@ c d e@@\n" * 3)
    (tmp_path / "whole").write_text("a bc d e\n" * 3)
    argv = ["evaluate", "--hypothesis", str(tmp_path / "whole"), "--reference", str(tmp_path / "split")]
    assert cli.main([*argv, "--no-bpe", "--tokenize", "none"]) == 0
    assert "= 100.00" in capsys.readouterr().out


def test_evaluate_splits_compounds(capsys, tmp_path):
    """the well ##AT##-##AT## known a ##AT##-##AT## b-c - goes (a match takes its letters, so of three two stay one)"""
    pytest.importorskip("sacrebleu")
    (tmp_path / "text").write_text("the well-known a-b-c - goes\n" * 2)
    (tmp_path / "other").write_text("the well-thought a-b-d - goes\n" * 2)
    argv = ["evaluate", "--hypothesis", str(tmp_path / "other"), "--reference", str(tmp_path / "text")]
    assert cli.main([*argv, "--split-compounds", "--tokenize", "none"]) == 0
    for line, begin in zip(capsys.readouterr().out.splitlines(), ("sacreBLEU:  BLEU|", "multi-bleu: "), strict=True):
        assert line.startswith(begin) and " 77.8/" in line and "ref_len" in line and "18" in line  # 7 of 9 words
        assert ("|compounds:split = " in line) == (begin == "sacreBLEU:  BLEU|")
    assert cli.main([*argv, "--tokenize", "none"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(" 60.0/" in line and "compounds" not in line for line in lines)  # 3 of 5
    fails_with(capsys, [*argv, "--split-compounds"], 'tokenize = "none"', '"13a"')


@pytest.mark.parametrize("output", ["none/out", "."])
def test_an_output_that_cannot_be_written_is_said_before_the_work(translated, capsys, tmp_path, output):
    (tmp_path / "in").write_text("a\n")
    argv = ["translate", "--model", "m", "--input", str(tmp_path / "in"), "--output", str(tmp_path / output)]
    fails_with(capsys, argv, "folder")
    assert not translated


@pytest.mark.parametrize("flags", [["--last", "-1"], ["--last", "0"], ["--updates", "3", "-5"], ["--last", str(2**80)]])
def test_average_counts_from_one(capsys, tmp_path, flags):
    fails_with(capsys, ["average", "--model", str(tmp_path), *flags], "must be at least")


def test_average_makes_no_folder(capsys, tmp_path):
    fails_with(capsys, ["average", "--model", str(tmp_path / "typo"), "--last", "2"], "holds no model")
    assert not (tmp_path / "typo").exists()


def test_the_demo_takes_no_other_run_s_place(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"data": {"train_source": "train.en"}}')
    fails_with(capsys, ["demo", "--output", str(tmp_path)], "not the demo's")
    assert not tmp_path.with_name(tmp_path.name + "-text").exists()


def test_evaluate_refuses_files_of_different_length(capsys, tmp_path):
    pytest.importorskip("sacrebleu")
    (tmp_path / "a").write_text("x\ny\n")
    (tmp_path / "b").write_text("x\n")
    argv = ["evaluate", "--hypothesis", str(tmp_path / "a"), "--reference", str(tmp_path / "b")]
    fails_with(capsys, argv, "2 lines", "1")


def test_a_missing_package_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    (tmp_path / "a").write_text("x\n")
    argv = ["evaluate", "--hypothesis", str(tmp_path / "a"), "--reference", str(tmp_path / "a")]
    fails_with(capsys, argv, 'pip install "sacrebleu>=2.4"')


def test_python_m_is_the_command_and_imports_no_extras():
    extras = ("sacrebleu", "matplotlib", "num2words")
    code = f"import sys, normformer_rs.cli; print([name for name in {extras} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    command = [sys.executable, "-m", "normformer_rs", "train", "--norm", "x"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 2 and found.stderr.startswith('normformer-rs: error: unknown norm "x"')
    assert "Traceback" not in found.stderr
