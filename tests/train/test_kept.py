"""`normformer-rs reproduce --recompute`: stored figures are recomputed from the files beside their table."""

import csv
import gzip
import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
import sacrebleu

from normformer_rs import InputError, cli, demo, scores
from normformer_rs.reproduce import REPRODUCTIONS, Reproduction, Row, Scale, Shown, corpora, kept
from normformer_rs.reproduce.remade import remade
from normformer_rs.reproduce.results import Results
from normformer_rs.reproduce.runs import Runs

pytestmark = pytest.mark.usefixtures("one_thread")
TABLE, FOLDER = "out/check/twt-table3-check.csv", "out/check/twt-table3-check-kept"


def call(words: str, capsys) -> tuple[int, list[str], list[str]]:
    code = cli.main(["reproduce", *words.split(), "--scale", "check", "--output", "out", "--no-progress"])
    said = capsys.readouterr()
    return code, said.out.splitlines(), said.err.splitlines()


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder with three measured tables. Good translations stand in for those of models of 6 updates."""
    folder = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        scale = REPRODUCTIONS["twt-table3"].scales["check"]
        runs = Runs(Path("out/check/runs"), Path("data"), device="cpu", progress=False)
        references = [pair.vietnamese for pair in demo.corpus().test[:30]]
        for row, every in zip(scale.rows, (2, 9, 3, 5)):
            run = runs.run(row)
            runs.translations(run, scale)
            (saved,) = run.output.glob("test-*.txt")
            lines = [line if i % every else line[::-1] for i, line in enumerate(references)]
            saved.write_text("".join(f"{line}\n" for line in ["", *lines[1:]]))
        entries = ["twt-table3", "twt-table8", "pn-table2"]
        assert cli.main(["reproduce", *entries, "--scale", "check", "--output", "out", "--no-progress"]) == 0
    return folder


@pytest.fixture
def there(measured, tmp_path, monkeypatch):
    """A copy of the tables, without the runs."""
    shutil.copytree(measured / "out", tmp_path / "out", ignore=shutil.ignore_patterns("runs"))
    monkeypatch.chdir(tmp_path)


def rows() -> list[dict[str, str]]:
    with open(TABLE, newline="") as file:
        return list(csv.DictReader(file))


def write_rows(found: list[dict[str, str]]) -> None:
    with open(TABLE, "w", newline="") as file:
        table = csv.DictWriter(file, [*found[0]])
        table.writeheader()
        table.writerows(found)


@pytest.mark.usefixtures("there")
def test_stored_figures_are_made_again(capsys):
    """Without the runs: BLEU, p, losses and perplexities; the lines of before the flag stay as they are."""
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    code, said, errors = call("twt-table3 twt-table8 pn-table2 --recompute", capsys)
    assert (code, errors) == (0, [])
    assert said[-1] == "39 recomputed figures equal the stored ones, 0 differ, 0 rows or figures cannot be recomputed"
    first, second = rows()[:2]
    for line in (f"equal: postnorm+layernorm, seed 1, bleu {first['bleu']}",
                 f"equal: prenorm+layernorm, seed 1, p {second['p']}",
                 f"equal: prenorm+layernorm, seed 1, valid_nll {second['valid_nll']}"):  # fmt: skip
        assert f"  {line}" in said
    assert sum(" perplexity " in line for line in said) == 4 and sum(" gap " in line for line in said) == 2
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before


@pytest.mark.usefixtures("there")
def test_translations_are_plain_lines_that_others_score():
    """sacreBLEU's own scorer gives the table's BLEU of them."""
    references = [pair.vietnamese for pair in demo.corpus().test[:30]]
    for row in rows():
        lines = gzip.decompress(Path(FOLDER, f"{row['kept']}.txt.gz").read_bytes()).decode().split("\n")
        assert len(lines) == 31 and lines[0] == lines[-1] == ""
        assert str(round(sacrebleu.corpus_bleu(lines[:-1], [references]).score, 2)) == row["bleu"]
    assert len({*Path(FOLDER).iterdir()}) == 8


def change_text(row: dict[str, str]) -> None:
    path = Path(FOLDER, f"{row['kept']}.txt.gz")
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b" ", b"  ", 1)))


def change_object(row: dict[str, str]) -> None:
    path = Path(FOLDER, f"{row['kept']}.json.gz")
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b'"seed":1', b'"seed":2')))


def cut(row: dict[str, str]) -> None:
    path = Path(FOLDER, f"{row['kept']}.json.gz")
    path.write_bytes(path.read_bytes()[:-9])


def forge(row: dict[str, str], **changed) -> None:
    """Changes both files and all digests, so that they agree."""
    found = kept.read(Path(FOLDER), row["kept"])
    told = {name: value for name, value in {**found.content, **changed}.items() if value is not None}
    row["kept"] = kept.write(Path(FOLDER), kept.Kept(told, changed.get("translations") or found.translations))


CHANGES = {
    "a translation": (change_text, "changed: these are not the translations that were scored"),
    "the object": (change_object, "changed: its digest is "),
    "a file that is cut": (cut, "a damaged gzip file"),
    "no translations": (lambda row: Path(FOLDER, f"{row['kept']}.txt.gz").unlink(), "no such file"),
    "no object": (lambda row: Path(FOLDER, f"{row['kept']}.json.gz").unlink(), "no such file"),
    "BLEU": (lambda row: row.update(bleu="41.02"), ", bleu: stored 41.02, recomputed "),
    "p": (lambda row: row.update(p="0.0001"), ", p: stored 0.0001, recomputed "),
    "a loss": (lambda row: row.update(valid_nll="1.5"), ", valid_nll: stored 1.5, recomputed "),
    "sacreBLEU's line": (lambda row: row.update(sacrebleu=f"{row['sacrebleu']}."), ", sacrebleu: stored BLEU|nrefs:1|"),
    "another row's": (lambda row: row.update(kept=rows()[0]["kept"]), "kept of another run"),
    "a path": (lambda row: row.update(kept="../../../etc/x"), "expected 16 hexadecimal digits"),
    "other translations": (lambda row: forge(row, translations=["x"] * 30), "counts of lines are not those"),
    "other references": (lambda row: forge(row, references="0" * 64), "--data has another text"),
    "no counts": (lambda row: forge(row, counts=None), "expected what a run keeps"),
    "counts that are none": (lambda row: forge(row, counts={"lines": [["a"]]}), "the counts of lines are not those"),
    "a log that is none": (lambda row: forge(row, evaluations=3), "expected what a run keeps"),
    "a list": (lambda row: forge(row, evaluations=[]), "expected what a run keeps"),
}


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change, capsys):
    found = rows()
    changed, wanted = CHANGES[change]
    changed(found[2])
    write_rows(found)
    code, said, errors = call("twt-table3 --recompute", capsys)
    wrong = [line for line in said if line.startswith("  different: ")]
    assert code == 2 and wrong[0].startswith("  different: prenorm+fixnorm+layernorm, seed 1") and wanted in wrong[0]
    assert errors[-1].endswith("differ from what is kept of their runs: see above")


@pytest.mark.usefixtures("there")
def test_rows_of_before_are_listed(capsys):
    """Nothing is kept of them; p of the row after such a one cannot be made again, either."""
    found = rows()
    found[1]["kept"] = ""
    write_rows(found)
    code, said, _ = call("twt-table3 --recompute", capsys)
    assert code == 0
    assert "  cannot be recomputed: prenorm+layernorm, seed 1: nothing is kept of its run" in said
    p = "prenorm+fixnorm+layernorm, seed 1, p: no translations of prenorm+layernorm are kept"
    assert f"  cannot be recomputed: {p}" in said
    assert said[-1] == "10 recomputed figures equal the stored ones, 0 differ, 2 rows or figures cannot be recomputed"
    write_rows([{name: value for name, value in row.items() if name != "kept"} for row in found])
    code, said, _ = call("twt-table3 --recompute", capsys)
    assert code == 0 and said[-1].startswith("0 recomputed figures equal the stored ones, 0 differ, 4 rows")
    assert cli.main(["reproduce", "twt-table3", "--scale", "check", "--no-train", "--output", "out"]) == 0


@pytest.mark.usefixtures("there")
def test_without_the_text_counts_are_taken_as_they_are(capsys, monkeypatch):
    row = corpora.CORPORA["demo"]._replace(files={"train_source": "demo/train.en"})
    monkeypatch.setitem(corpora.CORPORA, "demo", row)
    code, said, _ = call("twt-table3 --recompute --data nowhere", capsys)
    assert code == 0 and said[-1].startswith("15 recomputed figures equal the stored ones, 0 differ, 0 rows")
    wanted = (
        "  the translations were not scored again: the demo's number words, English to Vietnamese is not in nowhere"
    )
    assert wanted in said
    found = rows()
    found[1]["bleu"] = "30.0"
    write_rows(found)
    assert call("twt-table3 --recompute --data nowhere", capsys)[0] == 2


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("other", ["--dry-run", "--write page.md"])
def test_it_only_compares(other, capsys):
    Path("page.md").write_text("# Page\n")
    code, said, errors = call(f"twt-table3 --recompute {other}", capsys)
    assert (code, said) == (2, []) and f"--recompute and {other.split()[0]}: expected one of them" in errors[0]
    code, said, _ = call("twt-table3 twt-fig2 --recompute", capsys)
    assert code == 0
    assert "out/check/twt-fig2-check.csv: cannot be recomputed: its figures are of logs and weights alone" in said
    code, said, errors = call("bf16 --recompute", capsys)
    assert (code, said) == (2, []) and "nothing has been measured yet: leave --recompute out" in errors[0]


def entry(updates: int = 1) -> Reproduction:
    rows = tuple(Row({"arm": arm}, {"residual": arm, "updates": updates}, "demo") for arm in ("base", "other"))
    return Reproduction("x", "X", "ours", "?", {"here": Scale("", rows, Shown(("bleu",), ("bleu", "p"), "first"))})


REFERENCES = [f"a b c d e f g {i}" for i in range(40)]


def add(results: Results, row: Row, every: int, **columns: float) -> None:
    lines = [line if i % every else "a b c d x" for i, line in enumerate(REFERENCES)]
    counted = {
        "tokenize": "13a",
        "resamples": 1000,
        "seed": "12345",
        **scores.counts(lines, REFERENCES, "13a")._asdict(),
    }
    log = {"unigram_entropy": 2.0, "evaluations": {"nll": [1.5]}}
    told = {**kept.about(row, results.scale), **log, "references": kept.digest_of(REFERENCES), "counts": counted}
    told["baseline"] = "0" * 64  # translations that nobody has
    columns |= {"bleu": round(scores.score(lines, REFERENCES).bleu, 2), "valid_nll": 1.5}
    results.add(row, columns, {"gradients": [1.0]}, kept.Kept(told, lines))


def die_after(acts: int) -> None:
    """Ends this process at the act of writing after so many, as a kill would."""
    left = itertools.count(acts, -1)

    def dying(act):
        return lambda *given, **named: act(*given, **named) if next(left) > 0 else os._exit(9)

    for name in ("replace", "fsync", "unlink"):
        setattr(os, name, dying(getattr(os, name)))


def test_a_kill_leaves_figures_with_all_that_they_were_made_of(tmp_path):
    """Killed at every act of writing, a row is there with both files, or it is not there; so it is where a row of other
    options is replaced. The next call leaves the files of the rows alone."""
    for act in range(20):
        folder = tmp_path / str(act)
        first = Results(entry(), "here", folder)
        for row in first.scale.rows:
            add(first, row, 2)
        after = Results(entry(2), "here", folder)
        child = os.fork()
        if child == 0:
            try:
                die_after(act)
                add(after, after.scale.rows[0], 3)
            finally:
                os._exit(0)
        is_killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        there = [Results(entry(updates), "here", folder) for updates in (1, 2)]
        figures = [figure for results in there for figure in remade(results, lambda row: REFERENCES)]
        assert {figure.state for figure in figures} == {"equal"} and len(figures) == 4
        add(after, after.scale.rows[0], 3)
        add(after, after.scale.rows[1], 4)
        figures = [*remade(Results(entry(2), "here", folder), lambda row: REFERENCES)]
        assert {figure.state for figure in figures} == {"equal"} and len(figures) == 4
        names = {path.name for path in (folder / "x-here-kept").glob("*.gz") if not path.name.startswith(".")}
        assert names == {f"{row['kept']}{end}" for row in after.rows for end in (".txt.gz", ".json.gz")}
        if not is_killed:
            break
    assert act > 6


def test_files_of_other_names_and_cells_that_are_no_digests_stay(tmp_path):
    """A table that somebody else wrote names no file to be removed."""
    results = Results(entry(), "here", tmp_path / "results")
    add(results, results.scale.rows[0], 2)
    others = [tmp_path / "other.txt.gz", results.kept / "notes.txt.gz"]
    for path in others:
        path.write_bytes(b"mine")
    results.rows[0]["kept"] = "../../other"
    results.rows[0]["recipe"] = "stale"
    with results.path(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(results.rows[0]))
        writer.writeheader()
        writer.writerows(results.rows)
    again = Results(entry(), "here", tmp_path / "results")
    add(again, again.scale.rows[0], 3)
    assert all(path.read_bytes() == b"mine" for path in others)


def test_a_language_models_rows_need_no_references(tmp_path):
    row = Row({"arm": "base"}, {"residual": "base"}, "shakespeare")
    scale = Scale("", (row,), Shown(("perplexity",), ("perplexity",), None))
    results = Results(Reproduction("x", "X", "ours", "?", {"here": scale}), "here", tmp_path)
    log = {"unigram_entropy": 2.0, "evaluations": {"nll": [1.5], "perplexity": [4.5]}}
    results.add(row, {"valid_nll": 1.5, "perplexity": 4.5}, {}, kept.Kept({**kept.about(row, scale), **log}))

    def references(row):
        raise KeyError("test_target")

    figures = [*remade(results, references)]
    assert [(figure.name, figure.state) for figure in figures] == [("valid_nll", "equal"), ("perplexity", "equal")]


def test_a_p_against_translations_that_are_gone_is_not_recomputed(tmp_path):
    results = Results(entry(), "here", tmp_path)
    for row in results.scale.rows:
        add(results, row, 2, p=0.5)
    figures = {
        figure.name: figure for figure in remade(results, lambda row: REFERENCES) if figure.row.key["arm"] == "other"
    }
    assert figures["p"].state == "cannot" and "another run of base" in figures["p"].made


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    digest = kept.write(tmp_path, kept.Kept({"a": "x" * 1000}))
    monkeypatch.setattr(kept, "LARGEST", 999)
    with pytest.raises(InputError, match="unpacks to more than 999 bytes"):
        kept.read(tmp_path, digest)


def test_equal_runs_keep_equal_bytes(tmp_path, monkeypatch):
    found = []
    for now in (1e9, 2e9):
        monkeypatch.setattr("time.time", lambda now=now: now)
        digest = kept.write(tmp_path / str(now), kept.Kept({"a": [1.5, float("nan")]}, ["ä", "", "b"]))
        found.append([path.read_bytes() for path in kept.paths(tmp_path / str(now), digest)])
    assert found[0] == found[1] and found[0][0][4:8] == bytes(4)
    assert kept.read(tmp_path / str(now), digest).translations == ["ä", "", "b"]
    with pytest.raises(InputError, match="no such file"):
        kept.read(tmp_path, digest)


@pytest.mark.parametrize("tokenize", ["13a", "none"])
def test_counts_are_enough_for_bleu_and_p(tokenize):
    lines = [[line if i % every else line[3:] for i, line in enumerate(REFERENCES)] for every in (2, 3)]
    wanted = scores.score(lines[0], REFERENCES, lines[1], tokenize=tokenize, resamples=200)
    ours, theirs = (scores.counts(one, REFERENCES, tokenize) for one in lines)
    written = scores.Counts(**json.loads(json.dumps(ours._asdict())))
    bleu, line, comparison = scores.score_counts(written, theirs, resamples=200)
    assert (bleu, line, comparison) == (wanted.bleu, wanted.sacrebleu, wanted.comparison)
    assert scores.score_counts(ours)[2] is None
    with pytest.raises(InputError, match=f"counts of {len(ours.lines)} lines, got {len(ours.lines) - 1}"):
        scores.score_counts(ours, theirs._replace(lines=theirs.lines[1:]))
