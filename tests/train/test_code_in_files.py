"""`file.py:Class` runs code where a user writes it, and never where a file holds it: every reader of files is tried."""

import argparse
import contextlib
import copy
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from train_support import TINY, fit, losses

import normformer_rs as nfrs
from normformer_rs import DataConfig, InputError, TrainingConfig, TransformerConfig, cli
from normformer_rs.commands.options import read_run, read_toml
from normformer_rs.config import OWN
from normformer_rs.formats import convert

NORM = """
import pathlib
import normformer_rs as nfrs

pathlib.Path(__file__).with_name("ran").touch()

class Mine(nfrs.Norm):
    name, parameters = "from-a-file", {"weight": nfrs.norms.Parameter()}

    def normalize(self, x, weight):
        return weight * x / (1 + x.abs().mean(-1, keepdim=True))

class Plain(nfrs.Scheme):
    name = "from-a-file"

    def around(self, place):
        return nfrs.schemes.ResidualSpec(before=nfrs.schemes.norm())

    def stack(self, place):
        return nfrs.schemes.StackSpec(end=nfrs.schemes.norm())
"""
FIELDS = {kind: [field.name for field in kind.FIELDS] for kind in (TransformerConfig, TrainingConfig, DataConfig)}
SECTIONS = {TransformerConfig: "model", TrainingConfig: "training", DataConfig: "data"}
PLACES = [(SECTIONS[kind], name) for kind, names in FIELDS.items() for name in names]


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A file that leaves a trace when it runs, and a test's end that finds none."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.py"
    file.write_text(NORM)
    yield file
    assert not (tmp_path / "ran").exists(), "the file's code ran"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    text = folder / "text"
    text.write_text("a b c d\nb c d a\n" * 8)
    data = {"train_target": str(text), "valid_target": str(text)}
    fit(folder / "run", data, {"architecture": "decoder-only", "decoder_layers": 1}, {"updates": 1})
    return folder / "run"


def forms(file, name):
    """Texts and other forms that may stand for the class in JSON."""
    text = f"{file}:{'Plain' if name == 'residual' else 'Mine'}"
    return [text, f"{file.name}:Mine", {"name": text, "parameters": [], "options": {}, "stacks": {}}, [text]]


def readers(folder):
    """Everything that reads a run's folder."""
    output = str(folder)
    known = {*FIELDS[TransformerConfig], *FIELDS[TrainingConfig], *FIELDS[DataConfig]}
    return [
        lambda: cli.main(["train", "--output", output, "--resume", "--updates", "2", "--no-progress"]),
        lambda: cli.main(["average", "--model", output, "--last", "1"]),
        lambda: read_run(output, sorted(known)),
        lambda: nfrs.Transformer.from_checkpoint(folder, "last"),
        lambda: nfrs.Transformer.from_checkpoint(folder, "best"),
        lambda: nfrs.generate(folder, ["a"]),
        lambda: cli.main(["generate", "--model", output, "--prompt", "a"]),
        lambda: cli.main(["evaluate", "--model", output, "--reference", str(folder.parent / "text")]),
        lambda: cli.main(["translate", "--model", output, "--input", str(folder.parent / "text")]),
        lambda: nfrs.to_huggingface(folder, folder.parent / "exported"),
        lambda: convert.to_fairseq(folder, folder.parent / "exported.pt"),
        lambda: cli.main(["plot", output, "--output", str(folder.parent / "curves.png")]),
    ]


def try_all(run, tmp_path, section, name, count=4):
    """Writes each form into the place of config.json, of the run and of its checkpoints, and reads by all readers."""
    folder = tmp_path / "copy"
    shutil.copytree(run, folder)
    (tmp_path / "text").write_text("a b\n")
    (folder / "checksums.txt").unlink(missing_ok=True)
    whole = {path: json.loads(path.read_text()) for path in sorted(folder.rglob("config.json"))}
    for form in forms(tmp_path / "mine.py", name)[:count]:
        for path, content in whole.items():
            forged = copy.deepcopy(content)
            forged[section][name] = form
            path.write_text(json.dumps(forged))
        for read in readers(folder):
            with contextlib.suppress(InputError, RuntimeError, OSError, ImportError):
                read()
        assert not (tmp_path / "ran").exists(), form


@pytest.mark.parametrize("name", ["norm", "residual"])
@pytest.mark.one_in(all=2)
def test_no_reader_of_a_run_runs_code(run, code, tmp_path, name):
    try_all(run, tmp_path, "model", name, 1)


@pytest.mark.parametrize(("section", "name"), PLACES)
@pytest.mark.one_in(all=40)
def test_no_reader_of_a_run_runs_code_of_any_field(run, code, tmp_path, section, name):
    try_all(run, tmp_path, section, name)


ALL = sorted({name for names in FIELDS.values() for name in names})
EACH = [pytest.param(OWN, id="own"), pytest.param(ALL, id="all", marks=pytest.mark.full)]


@pytest.mark.parametrize("section", ["", "model", "training", "data"])
@pytest.mark.parametrize("names", EACH)
def test_option_files_run_no_code(code, tmp_path, section, names):
    file = tmp_path / "options.toml"
    for name in names:
        for form in forms(code, name):
            head = f"[{section}]\n" if section else ""
            value = json.dumps(form) if not isinstance(form, dict) else f'{{name = "{form["name"]}"}}'
            file.write_text(f"{head}{name} = {value}\n")
            try:
                found = read_toml(file, ALL)
            except InputError:
                continue
            assert name not in OWN or isinstance(found[name], nfrs.Scheme), (name, form)


def test_option_files_say_how_to_allow_it(code, tmp_path, capsys):
    file = tmp_path / "options.toml"
    file.write_text('norm = "mine.py:Mine"\n')
    assert cli.main(["train", "--config", str(file), "--output", "run"]) == 2
    said = capsys.readouterr().err
    assert "options.toml: norm is 'mine.py:Mine', which names Python code" in said and "--trust" in said


def test_configurations_as_data_run_no_code(code):
    text = f"{code}:Mine"
    for name in OWN:
        with pytest.raises(InputError, match="names Python code"):
            TransformerConfig.from_dict({name: text})
        with pytest.raises(InputError, match="trust=True"):
            TransformerConfig.from_json(json.dumps({name: text}))


FLAGS = {
    "arch": "nfrs_transformer", "task": "translation", "data": "ck", "source_lang": "a", "target_lang": "b",
    "encoder_embed_dim": 8, "decoder_embed_dim": 8, "encoder_ffn_embed_dim": 8, "decoder_ffn_embed_dim": 8,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "dropout": 0.1, "attention_dropout": 0.0, "residual": "prenorm", "norm": "layernorm",
}  # fmt: skip


def checkpoint(path, kind, flags):
    args = argparse.Namespace(**flags)
    saved = {"args": args} if kind == "args" else {"cfg": {"model": args, "task": args}}
    torch.save({**saved, "model": {"w": torch.zeros(1)}}, path)


@pytest.mark.parametrize("kind", ["args", "cfg"])
@pytest.mark.parametrize("names", EACH)
def test_fairseqs_checkpoints_run_no_code(code, tmp_path, kind, names):
    (tmp_path / "ck").mkdir()
    for language in "ab":
        (tmp_path / "ck" / f"dict.{language}.txt").write_text("x 1\ny 1\n")
    for name in sorted({*names, *(FLAGS if names is ALL else ())}):
        checkpoint(tmp_path / "ck" / "x.pt", kind, {**FLAGS, name: f"{code}:Mine"})
        with pytest.raises(InputError):
            convert.from_fairseq(tmp_path / "ck" / "x.pt", tmp_path / "new")
        if name in OWN:
            assert cli.main(["convert", "--from", "ck/x.pt", "--to", "new"]) == 2


@pytest.fixture
def trusted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(NORM)
    return "mine.py:Mine"


def test_trusted_files_may_name_code(trusted, tmp_path):
    assert TransformerConfig.from_dict({"norm": trusted}, trust=True).norm.name == "from-a-file"
    (tmp_path / "options.toml").write_text(f'norm = "{trusted}"\n')
    assert read_toml(tmp_path / "options.toml", FIELDS[TransformerConfig], trust=True)["norm"].name == "from-a-file"
    (tmp_path / "ck").mkdir()
    for language in "ab":
        (tmp_path / "ck" / f"dict.{language}.txt").write_text("x 1\ny 1\n")
    checkpoint(tmp_path / "ck" / "x.pt", "args", {**FLAGS, "norm": trusted})
    with pytest.raises(InputError, match=r"its model lacks|x\.pt: .*weight"):  # it has no weights
        convert.from_fairseq(tmp_path / "ck" / "x.pt", tmp_path / "new", trust=True)


def test_users_may_name_code_in_every_call(trusted):
    kind = type(TransformerConfig(norm=trusted).norm)
    model = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    nfrs.swap_norms(model, trusted)
    assert type(model.norm1.norm) is kind
    layer = nfrs.nn.TransformerEncoderLayer(16, 2, 24, norm=trusted, residual="mine.py:Plain")
    assert type(layer.norm1.norm) is kind
    alone = nfrs.nn.Residual(nn.Linear(16, 16), 16, scheme="mine.py:Plain", norm=trusted)
    assert alone(torch.ones(1, 16)).isfinite().all()


@pytest.mark.full
def test_a_run_of_a_files_norm_resumes_with_it(trusted, tmp_path, corpus):
    words = [word for key, value in corpus.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    words += [word for key, value in TINY.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    words = ["train", *words, "--output", "run", "--no-bpe", "--no-progress", "--norm", trusted]
    assert cli.main([*words, "--updates", "2"]) == 0
    saved = json.loads(Path("run/config.json").read_text())["model"]["norm"]
    assert saved["name"] == "from-a-file" and saved["source"] == ""
    assert cli.main(["train", "--output", "run", "--resume", "--norm", trusted, "--updates", "4", "--no-progress"]) == 0
    assert len(losses("run")) == 4


# A file's module.

DATACLASS = """
from __future__ import annotations
import dataclasses
import normformer_rs as nfrs

@dataclasses.dataclass
class Options:
    factor: float = 2.0

class Mine(nfrs.Norm):
    name, parameters = "of-a-module", {"weight": nfrs.norms.Parameter()}

    def normalize(self, x, weight):
        return weight * x * Options().factor

class Plain(nfrs.Scheme):
    name = "of-a-module"

    def around(self, place):
        return nfrs.schemes.ResidualSpec(before=nfrs.schemes.norm())
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(DATACLASS)
    return tmp_path / "mine.py"


def test_a_file_is_a_module_like_any(module, tmp_path):
    config = TransformerConfig(norm="mine.py:Mine", residual="mine.py:Plain")
    kind = type(config.norm)
    assert vars(sys.modules[kind.__module__])["Mine"] is kind
    assert type(TransformerConfig(norm=f"{module}:Mine").norm) is kind
    back = pickle.loads(pickle.dumps(config))
    assert back == config and type(back.norm) is kind
    torch.save(config.norm(8), tmp_path / "module.pt")
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    x = torch.randn(3, 8)
    assert torch.equal(loaded(x), 2 * x) and type(loaded.norm) is kind
    assert copy.deepcopy(config.norm) == config.norm


def test_an_edited_file_is_another_module(module):
    old = TransformerConfig(norm="mine.py:Mine").norm
    module.write_text(DATACLASS.replace("2.0", "3.0"))
    new = TransformerConfig(norm="mine.py:Mine").norm
    assert type(new) is not type(old) and type(pickle.loads(pickle.dumps(old))) is type(old)
    x = torch.ones(2, 8)
    assert torch.equal(old(8)(x), 2 * x) and torch.equal(new(8)(x), 3 * x)
    copied = module.with_name("folder") / "mine.py"
    copied.parent.mkdir()
    copied.write_text(DATACLASS)
    there = TransformerConfig(norm=f"{copied}:Mine").norm
    assert sys.modules[type(there).__module__].__file__ == str(copied) and type(there) is not type(old)


def test_a_file_that_fails_leaves_no_module(module):
    module.write_text("raise ValueError('half')\n")
    before = {*sys.modules}
    with pytest.raises(ValueError, match="half"):
        TransformerConfig(norm="mine.py:Mine")
    assert {*sys.modules} == before


READ = """
import pickle, sys
import normformer_rs as nfrs
if sys.argv[1:]:
    nfrs.TransformerConfig(norm=sys.argv[1])
print(pickle.load(open("config.pkl", "rb")).norm)
"""


@pytest.mark.full
def test_another_process_reads_a_pickle_where_the_file_is_named_first(module, tmp_path):
    for what in ("norm", "residual"):
        config = TransformerConfig(**{what: f"mine.py:{'Mine' if what == 'norm' else 'Plain'}"})
        (tmp_path / "config.pkl").write_bytes(pickle.dumps(config))
        done = subprocess.run([sys.executable, "-c", READ, "mine.py:Mine"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        done = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True)
        assert "name that file first" in done.stderr.splitlines()[-1] and "mine.py" in done.stderr.splitlines()[-1]
