"""Text of records: JSON, CSV, Parquet and Arrow files, and data sets of the hub."""

import csv
import gzip
import json
import subprocess
import sys

import pytest

import normformer_rs as nfrs
from normformer_rs import cli

datasets = pytest.importorskip("datasets")

PAIRS = [
    ("the old tree", "der alte Baum"),
    ('"no", he said', "„nein“, sagte er"),
    ("NA", "k. A."),
    ("007", "null\nnull"),
    ("2019-01-01", "true"),
    ("", "leer"),
    ("a\ttab", "ein\r\nTab"),
] * 20
FIELDS = ["translation.en", "translation.de"]
JOINED = [tuple(" ".join(side.replace("\r", "\n").split("\n")).replace("  ", " ") for side in pair) for pair in PAIRS]
"""The pairs, each side on one line."""


def json_lines(path):
    path.write_text("".join(json.dumps({"id": i, "translation": {"en": en, "de": de}}) + "\n"
                            for i, (en, de) in enumerate(PAIRS)))  # fmt: skip
    return path, FIELDS


def json_list(path):
    path.write_text(json.dumps([{"translation": {"en": en, "de": de}} for en, de in PAIRS], indent=1))
    return path, FIELDS


def packed(path):
    plain = path.with_suffix(".plain")
    json_lines(plain)
    path.write_bytes(gzip.compress(plain.read_bytes()))
    return path, FIELDS


def table(path):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("en", "de"), *PAIRS])
    return path, ["en", "de"]


def parquet(path):
    datasets.Dataset.from_list([{"translation": {"en": en, "de": de}} for en, de in PAIRS]).to_parquet(path)
    return path, FIELDS


def arrow(path):
    datasets.Dataset.from_list([{"en": en, "de": de} for en, de in PAIRS]).save_to_disk(path.parent / "saved")
    return next((path.parent / "saved").glob("*.arrow")).rename(path), ["en", "de"]


FILES = {
    "r.jsonl": json_lines,
    "r.json": json_list,
    "r.jsonl.gz": packed,
    "r.csv": table,
    "r.parquet": parquet,
    "r.arrow": arrow,
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def make(folder, source, fields, *more):
    """The command; its exit code and the lines of both sides."""
    outputs = [folder / "out.en", folder / "out.de"]
    words = [word for pair in zip(fields, outputs) for word in ("--field", pair[0], "--output", str(pair[1]))]
    code = cli.main(["text", str(source), *words, *more])
    return code, [path.read_text().split("\n") if path.exists() else None for path in outputs]


@pytest.mark.parametrize("name", FILES)
def test_fields_become_lines_in_the_records_order(tmp_path, name):
    source, fields = FILES[name](tmp_path / name)
    code, sides = make(tmp_path, source, fields)
    assert code == 0 and sides == [[*side, ""] for side in zip(*JOINED)]


def test_quotation_marks_in_a_tsv_file_are_text(tmp_path):
    (tmp_path / "r.tsv").write_text('en\tde\n"quoted\tzitiert"\nNaN\tnull\n')
    code, sides = make(tmp_path, tmp_path / "r.tsv", ["en", "de"])
    assert code == 0 and sides == [['"quoted', "NaN", ""], ['zitiert"', "null", ""]]


def test_limit(tmp_path):
    source, fields = json_lines(tmp_path / "r.jsonl")
    code, (english, _) = make(tmp_path, source, fields, "--limit", "3")
    assert code == 0 and english == [*(pair[0] for pair in JOINED[:3]), ""]


HUB = """
import sys, datasets
from normformer_rs import cli
raise SystemExit(cli.main(["text", "someone/pairs", *sys.argv[1:]]))
"""


@pytest.mark.full
def test_a_hubs_data_set_in_the_cache(tmp_path, monkeypatch, capfd):
    """Offline, from the cache of `datasets`, which a data set of the same layout fills."""
    parquet(tmp_path / "train.parquet")
    cache = tmp_path / "cache"
    datasets.load_dataset("parquet", data_files={"test": str(tmp_path / "train.parquet")}, cache_dir=str(cache))
    (made,) = (cache / "parquet").glob("*/*/*/")
    place = cache / "someone___pairs" / "default" / "0.0.0"
    place.mkdir(parents=True)
    made.rename(place / "0123456789abcdef0123456789abcdef01234567")
    for file in place.glob("*/parquet-*.arrow"):
        file.rename(file.with_name(file.name.replace("parquet", "pairs")))
    environment = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(cache)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    words = ["--split", "test", "--field", "translation.en", "--output", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", HUB, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out").read_text().split("\n") == [*(pair[0] for pair in JOINED), ""]
    words[1] = "train"
    done = subprocess.run([sys.executable, "-c", HUB, *words], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and last.startswith("normformer-rs: error: someone/pairs: ") and "train" in last


RECORD = {"en": "a", "more": {"de": "b"}, "n": 1, "none": None}
WRONG = {
    "--field enn --output out": 'record 1: no field "enn" (did you mean "en"?); expected one of en, more.de, n, none',
    "--field more --output out": "record 1: field \"more\" is {'de': 'b'}; expected text",
    "--field n --output out": 'record 1: field "n" is 1; expected text',
    "--field en.x --output out": 'record 1: no field "en.x"',
    "--field none --output out": 'record 1: field "none" is None; expected text',
    "--field en --field n --output out": "2 times --field and 1 times --output; expected one --output for each --field",
    "--field en --field n --output out --output out": "two fields would be written to one file",
    "--field en --output out --limit 0": "--limit must be at least 1; got 0",
    "--field en --output no/out": "there is no folder no",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_one_line_and_nothing_is_written(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.jsonl").write_text(json.dumps(RECORD) + "\n")
    assert cli.main(["text", "r.jsonl", *words.split()]) == 2
    assert WRONG[words] in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


NO_RECORDS = {
    "none.jsonl": None,
    "r.jsonl": "{no json\n",
    "r.json": "",
    "r.parquet": "PAR2",
    "r.txt": "a\n",
    "no/set": None,
    "r.ndjson": "[1]\n[2]",
    "null.jsonl": '{"en": "a"}\nnull\n{"en": "b"}\n',
}


@pytest.mark.parametrize("source", NO_RECORDS)
def test_what_holds_no_records_is_one_line(tmp_path, monkeypatch, capsys, source):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    if (content := NO_RECORDS[source]) is not None:
        (tmp_path / source).write_text(content)
    assert cli.main(["text", source, "--field", "en", "--output", "out"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("normformer-rs: error: ")]
    assert len(errors) == 1 and source in errors[0] and len(errors[0]) > 30
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_a_run_on_records_is_the_run_on_text(tmp_path, corpus_of_pairs):
    """Trained, stopped and resumed: the losses are those of the text files."""
    english, german = corpus_of_pairs
    (tmp_path / "r.jsonl").write_text("".join(json.dumps({"en": a, "de": b}) + "\n" for a, b in zip(english, german)))
    for name, lines in (("en", english), ("de", german)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    assert make(tmp_path, tmp_path / "r.jsonl", ["en", "de"])[0] == 0
    found = []
    for source, target, run in (
        (tmp_path / "en", tmp_path / "de", "text"),
        (tmp_path / "out.en", tmp_path / "out.de", "records"),
    ):
        model = nfrs.TransformerConfig(d_model=16, d_ff=24, heads=2, encoder_layers=1, decoder_layers=1)
        sides = {"train_source": source, "train_target": target, "valid_source": source, "valid_target": target}
        data = nfrs.DataConfig(**sides, no_bpe=True)
        for updates in (3, 6):
            training = nfrs.TrainingConfig(updates=updates, seed=1)
            nfrs.Trainer(model, training, data).fit(tmp_path / run, resume=updates == 6)
        rows = [json.loads(line) for line in (tmp_path / run / "log.jsonl").read_text().splitlines()]
        found.append([row["loss"] for row in rows if "loss" in row and "grad_norm" in row])
    assert len(found[0]) >= 6 and found[0] == found[1]


@pytest.fixture
def corpus_of_pairs():
    words = [("one", "eins"), ("two", "zwei"), ("three", "drei"), ("four", "vier")]
    rows = [[words[(i * k + k) % 4] for k in range(1, 2 + i % 5)] for i in range(60)]
    return [" ".join(a for a, _ in row) for row in rows], [" ".join(b for _, b in row) for row in rows]
