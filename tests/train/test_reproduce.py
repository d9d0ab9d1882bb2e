"""`normformer-rs reproduce`: run as a user would, stopped and resumed, without its data, written into a page."""

import csv
import json
import math
import os
import random
import re
import statistics
import time
from pathlib import Path

import matplotlib.image
import pytest

import normformer_rs as nfrs
from normformer_rs import cli, demo, scores
from normformer_rs.config import split
from normformer_rs.reproduce import (
    REPRODUCTIONS,
    SCALES,
    Reproduction,
    Row,
    Scale,
    Shown,
    command,
    corpora,
    entries,
    spread,
    tables,
)
from normformer_rs.reproduce.results import Results
from normformer_rs.reproduce.runs import _NUMBERS, Runs, folder_of, judge, read_verdict

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def reproduce(tmp_path, capsys):
    """Runs the command in an empty folder; its exit code, output and error lines."""
    before = Path.cwd()
    os.chdir(tmp_path)  # monkeypatch is undone by ctrl_c

    def run(words: str):
        code = cli.main(["reproduce", *words.split(), "--no-progress"])
        captured = capsys.readouterr()
        return code, captured.out, captured.err.splitlines()

    yield run
    os.chdir(before)


def rows_of(name: str) -> list[dict[str, str]]:
    with open(f"runs/reproduce/check/{name}-check.csv", newline="") as file:
        return list(csv.DictReader(file))


def is_drawn(path: str | Path) -> bool:
    """The picture has more than a background: lines or dots in colour."""
    pixels = matplotlib.image.imread(path)[..., :3]
    return bool(((pixels.max(-1) - pixels.min(-1)) > 0.2).mean() > 0.0005)


def test_a_table_beside_its_picture(reproduce):
    days = [time.strftime("%Y-%m-%d")]
    code, said, _ = reproduce("bf16 --scale check")
    days.append(time.strftime("%Y-%m-%d"))
    assert code == 0
    found = {row["precision"]: row for row in rows_of("bf16")}
    assert set(found) == {"f32", "bf16"} and re.search(r"\| precision +\| validation loss +\| training NLL", said)
    for precision, row in found.items():
        assert re.search(rf"\| {precision} +\| {float(row['valid_loss']):.4f} ", said)
        assert float(row["valid_nll"]) < math.log(1000) and row["date"] in days
    assert found["f32"]["train_nll"] != "nan" and "figures say nothing about the paper" in said
    assert is_drawn("runs/reproduce/check/bf16-check.png")
    logs = {path: path.stat().st_mtime_ns for path in Path().glob("runs/reproduce/check/runs/*/log.jsonl")}
    assert len(logs) == 2
    again = reproduce("bf16 --scale check")
    assert (again[0], again[1]) == (0, said), "a second call says the same"
    assert {path: path.stat().st_mtime_ns for path in logs} == logs, "and trains nothing"


@pytest.mark.long
def test_every_reproduction(reproduce):
    """All names, their tables, pictures and parts of a page."""
    Path("page.md").write_text("# Results\n")
    code, said, _ = reproduce("all --scale check --write page.md")
    assert code == 0
    page = Path("page.md").read_text()
    for name, entry in REPRODUCTIONS.items():
        wanted, measured = entry.scales["check"].rows, rows_of(name)
        assert [{key: found[key] for key in wanted[0].key} for found in measured] == [row.key for row in wanted]
        assert all(found["verdict"] in ("trains", "slow", "stuck", "diverged") for found in measured)
        assert all(math.isfinite(float(found["valid_nll"])) for found in measured)
        assert f"source: {entry.source}" in said
        assert is_drawn(f"runs/reproduce/check/{name}-check.png"), name
        assert page.count(f"<!-- reproduce {name} --scale check -->\n") == 1
        for figure in {figure for row in wanted for figure in row.paper.values()}:
            assert re.search(rf"\| {re.escape(figure)} +\|", said), (name, figure)
    assert {row["residual"] for row in rows_of("brn-table1-18")} >= {e["name"] for e in nfrs.tables()["residuals"]}


@pytest.mark.full
def test_bleu_and_p_are_those_of_the_runs_translations(reproduce, monkeypatch):
    """Of good ones, which stand in for those of models of 6 updates; no run is made again for them."""
    entry = REPRODUCTIONS["twt-table3"]
    scale = entry.scales["check"]._replace(rows=entry.scales["check"].rows[:3])
    monkeypatch.setitem(REPRODUCTIONS, "twt-table3", entry._replace(scales={"check": scale}))
    assert reproduce("twt-table3 --scale check")[0] == 0
    references = [pair.vietnamese for pair in demo.corpus().test[:30]]
    runs = Runs(Path("runs/reproduce/check/runs"), Path("data"), device="cpu", progress=False)
    logs = {path: path.stat().st_mtime_ns for path in runs.folder.glob("*/log.jsonl")}
    good = [[line if i % every else line[::-1] for i, line in enumerate(references)] for every in (2, 9, 3)]
    for row, lines in zip(scale.rows, good):
        run = runs.run(row)
        made, wanted = runs.translations(run, scale)
        assert len(made) == 30 and wanted == references
        (saved,) = run.output.glob("test-*.txt")
        saved.write_text("".join(line + "\n" for line in lines))
    os.remove("runs/reproduce/check/twt-table3-check.csv")
    assert reproduce("twt-table3 --scale check")[0] == 0
    assert {path: path.stat().st_mtime_ns for path in logs} == logs and len(logs) == 3
    pairs = [(good[0], None), (good[1], good[0]), (good[2], good[1])]
    found = [scores.score(lines, references, baseline) for lines, baseline in pairs]
    table = rows_of("twt-table3")
    assert [row["bleu"] for row in table] == [str(round(score.bleu, 2)) for score in found]
    assert [row["p"] for row in table] == ["", *(str(round(score.comparison.p_value, 4)) for score in found[1:])]
    assert len({row["bleu"] for row in table}) == 3


@pytest.mark.full
def test_a_stopped_reproduction_goes_on(reproduce, ctrl_c, tmp_path):
    ctrl_c(4)
    code, said, lines = reproduce("multi30k-french --scale check")
    assert code == 130 and said == ""
    assert lines[-1].startswith("normformer-rs: interrupted: prenorm-scalenorm-")
    assert lines[-1].endswith("stopped after update 4; the same command goes on")
    assert not Path("runs/reproduce/check/multi30k-french-check.csv").exists()
    assert reproduce("multi30k-french --scale check")[0] == 0
    (log,) = Path().glob("runs/reproduce/check/runs/*/log.jsonl")
    starts = [event for event in map(json.loads, log.read_text().splitlines()) if event["event"] == "started"]
    assert [event["update"] for event in starts] == [0, 4]
    stopped = rows_of("multi30k-french")
    whole = f"multi30k-french --scale check --output {tmp_path / 'whole'}"
    assert reproduce(whole)[0] == 0
    with open(tmp_path / "whole/check/multi30k-french-check.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    for column in ("bleu", "train_nll", "valid_nll", "updates", "largest_grad_norm"):
        assert row[column] == stopped[0][column]


def test_rows_that_are_there_stay(reproduce):
    folder = Path("kept")
    folder.mkdir()
    (folder / "bf16-check.csv").write_text("precision,valid_loss,train_nll,valid_nll\nbf16,1.2345,1,2\n")
    code, said, _ = reproduce("bf16 --scale check --no-train --results kept")
    assert code == 0 and "| bf16      | 1.2345 " in said and "Rows that are still to be measured: 1." in said
    assert reproduce("bf16 --scale check --results kept")[0] == 0
    with open(folder / "bf16-check.csv", newline="") as file:
        rows = {row["precision"]: row for row in csv.DictReader(file)}
    assert rows["bf16"]["valid_loss"] == "1.2345" and rows["bf16"]["date"] == "" and float(rows["f32"]["valid_loss"])
    (run,) = Path("runs/reproduce/check/runs").glob("*/config.json")
    assert json.loads(run.read_text())["training"]["precision"] == "f32"


def test_a_run_that_diverges_is_a_row(reproduce, monkeypatch):
    """Its loss is not finite; the others are measured all the same."""
    entry = REPRODUCTIONS["multi30k-layernorm"]
    first, second = entry.scales["check"].rows
    wild = first._replace(options={**first.options, "lr": 1e30, "schedule": "constant", "warmup": 0})
    short = entry.scales["check"]._replace(rows=(wild, second))
    monkeypatch.setitem(REPRODUCTIONS, entry.name, entry._replace(scales={"check": short}))
    code, said, _ = reproduce("multi30k-layernorm --scale check")
    assert code == 0 and re.search(r"\| layernorm \| diverged \| +\| +[\d.]+ +\| +\| +\|\n", said)
    assert "| not compared: 1 of 1 pairs failed |" in said
    assert is_drawn("runs/reproduce/check/multi30k-layernorm-check.png")
    diverged, other = rows_of("multi30k-layernorm")
    assert (diverged["verdict"], diverged["bleu"]) == ("diverged", "")
    assert other["bleu"] != "" and other["p"] == ""


def test_runs_with_the_same_options_are_one(reproduce):
    ladder, norms = REPRODUCTIONS["twt-table3"], REPRODUCTIONS["pn-table1"]
    for scale in ("check", "here"):
        assert folder_of(ladder.scales[scale].rows[1]) == folder_of(norms.scales[scale].rows[0])
    folders = [
        folder_of(row)
        for entry in REPRODUCTIONS.values()
        for row in entry.scales.get("here", entry.scales["check"]).rows
    ]
    fig3 = [folder_of(row) for row in REPRODUCTIONS["brn-fig3"].scales["here"].rows]
    assert len(fig3) == 6 and all(folders.count(folder) >= 2 for folder in fig3)
    for entry in REPRODUCTIONS.values():
        for scale in entry.scales.values():
            assert len({folder_of(row) for row in scale.rows}) == len(scale.rows)


COMPARED = r"\| [+-]\d+\.\d\d \[[+-]\d+\.\d\d, [+-]\d+\.\d\d\], p = \d\.\d{3}; least \d+\.\d\d"


@pytest.mark.full
def test_several_seeds(reproduce, monkeypatch):
    """Each row with each seed, the first seed's run being the one without the flag; mean ± standard deviation."""
    entry = REPRODUCTIONS["multi30k-layernorm"]
    assert reproduce(f"{entry.name} --scale check")[0] == 0
    logs = {path: path.stat().st_mtime_ns for path in Path().glob("runs/reproduce/check/runs/*/log.jsonl")}
    code, said, _ = reproduce(f"{entry.name} --scale check --seeds 3")
    assert code == 0 and {path: path.stat().st_mtime_ns for path in logs} == logs
    assert len([*Path().glob("runs/reproduce/check/runs/*/log.jsonl")]) == 6
    rows = rows_of(entry.name)
    assert [(row["norm"], row["seed"]) for row in rows] == [(n, s) for s in "123" for n in ("layernorm", "scalenorm")]
    ours, theirs = (
        [float(row["valid_nll"]) for row in rows if row["norm"] == norm] for norm in ("scalenorm", "layernorm")
    )
    assert len({*ours, *theirs}) == 6
    assert f" {statistics.fmean(ours):.3f} ± {statistics.stdev(ours):.3f} " in said
    assert "difference from the row before" in said and re.search(COMPARED, said)
    assert reproduce(f"{entry.name} --scale check --seeds 0")[2][-1].endswith("--seeds must be at least 1; got 0")
    assert "each of the 2 runs with 3 seeds" in reproduce(f"{entry.name} --scale check --seeds 3 --dry-run")[1]


def test_differences_are_paired_by_seed():
    """Student's t with 1 to 15 degrees of freedom; a difference that all seeds share is none of chance."""
    for freedom, t in ((1, 12.706205), (2, 4.302653), (3, 3.182446), (4, 2.776445), (10, 2.228139), (15, 2.131450)):
        assert spread.within(t, freedom) == pytest.approx(0.95, abs=1e-6)
        assert spread.within(-t, freedom) == spread.within(t, freedom)
        assert spread.quantile(0.95, freedom) == pytest.approx(t, abs=1e-5)
    found = spread.difference([0.5, 0.6, 0.5])
    assert found.spread.mean == pytest.approx(0.5333333) and found.p == pytest.approx(0.00389, abs=1e-5)
    assert found.interval == pytest.approx((0.5333333 - 0.1434218, 0.5333333 + 0.1434218), abs=1e-6)
    assert found.least == pytest.approx(0.0333333 * (4.302653 + 1.060660), abs=1e-6)
    assert spread.difference([-1.0, 1.0, -0.1]).p > 0.9 and spread.difference([1.0]) is None
    assert spread.corrected([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert f"{spread.Spread((1.0, 2.0, 4.5)):+.2f}" == "+2.50 ± 1.80"
    assert spread.merged(["trains", "trains", "slow"]) == "trains 2, slow 1"
    assert spread.merged(["1.5", "", "2.5"]) == "2 ± 0.7071 (2 of 3)"


def test_processes_share_the_rows(reproduce, tmp_path):
    """A run that another process makes is left to it; what it has measured is taken in."""
    entry = REPRODUCTIONS["bf16"]
    first, second = entry.scales["check"].rows
    runs = Runs(Path("runs/reproduce/check/runs"), Path("data"), device="cpu", progress=False)
    with runs.claim(first) as is_ours:
        assert is_ours
        code, said, lines = reproduce("bf16 --scale check")
        assert code == 0 and "Rows that are still to be measured: 1." in said
        assert "bf16-check: 1 rows are another process's" in lines
        (row,) = rows_of("bf16")
        assert row["precision"] == second.key["precision"]
        results = Results(entry, "check", Path("runs/reproduce/check"))
        os.rename("runs/reproduce/check/bf16-check.csv", "moved.csv")
        other = Results(entry, "check", Path("runs/reproduce/check"))
        other.add(first, {"valid_nll": 1.0}, {})
        results.add(second, {"valid_nll": 2.0}, {})
        assert {row["precision"] for row in rows_of("bf16")} == {"f32", "bf16"}


def test_missing_data_is_asked_for(reproduce):
    (Path("data") / "multi30k-bpe-en-de").mkdir(parents=True)
    Path("data/multi30k-bpe-en-de/train.en.gz").touch()
    Path("data/multi30k-bpe-en-de/train.de").touch()
    code, said, lines = reproduce("twt-table3 --scale here")
    files = ["valid.en", "valid.de", "test.2016.en", "test.2016.de"]
    listed = ", ".join(f"multi30k-bpe-en-de/{file}" for file in files)
    assert (code, said) == (2, "")
    assert lines == [
        "normformer-rs: error: reproduce twt-table3 --scale here needs 4 files that data lacks (plain or .gz): "
        + listed,
        "Multi30k en→de, lower-cased, tokenised, split by BPE: github LividWo/Revisit-MMT. "
        "--data DIR says where they are",
    ]
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", [name for name, entry in REPRODUCTIONS.items() if "paper" in entry.scales])
@pytest.mark.one_in(test=2)
def test_the_papers_scale_says_what_it_needs_first(reproduce, name):
    scale = REPRODUCTIONS[name].scales["paper"]
    code, said, lines = reproduce(f"{name} --scale paper")
    assert code == 2 and len(lines) == 2 and f"reproduce {name} --scale paper needs " in lines[0]
    assert scale.about in said and f"options of all {len(scale.rows)} runs" in said
    for row in scale.rows:
        assert f"    {', '.join(row.key.values())}: " in said
        for path in corpora.CORPORA[row.corpus].files.values():
            assert f"    data/{path} (missing)\n" in said
    assert reproduce(f"{name} --scale paper --dry-run") == (0, said, [])


def test_a_scale_that_an_entry_lacks(reproduce):
    _, said, lines = reproduce("bf16 --scale paper")
    message = 'normformer-rs: error: unknown scale of bf16 "paper"; expected one of check, here'
    assert (said, lines) == ("", [message])
    assert {entry.name for entry in command.chosen(["all"], "paper")} == {
        name for name, entry in REPRODUCTIONS.items() if "paper" in entry.scales
    }


def test_nothing_measured_is_said(reproduce):
    code, said, lines = reproduce("bf16 --scale here --no-train")
    assert code == 2 and said == "" and "nothing of bf16 has been measured yet: leave --no-train out" in lines[0]


def _kept(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "bf16-here.csv").write_text(text)


def test_a_page_is_written_between_its_marks(reproduce):
    _kept(
        Path("kept"), "precision,valid_loss,train_nll,valid_nll,date\nbf16,1.5,1,2,2026-01-02\nf32,2.5,1,2,2026-01-01\n"
    )
    for name, values in (("evaluated", "1,2"), ("validation", "3,2.5")):
        Path(f"kept/bf16-here-{name}.csv").write_text(f"f32,{values}\nbf16,{values}\n")
    page = Path("docs/page.md")
    page.parent.mkdir()
    begin, end = "<!-- reproduce bf16 --scale here -->", "<!-- end of bf16 --scale here -->"
    page.write_text(f"# Page\n\nbefore\n\n{begin}\nold\n{end}\n\nafter | stays\n")
    call = "bf16 --scale here --no-train --results kept --write docs/page.md"
    assert reproduce(call)[0] == 0
    text = page.read_text()
    assert text.startswith(f"# Page\n\nbefore\n\n{begin}\n\n`normformer-rs reproduce bf16 --scale here`: ")
    assert text.endswith(f"\n\n![bf16 against f32](../kept/bf16-here.png)\n\n{end}\n\nafter | stays\n")
    assert "2026-01-01 to 2026-01-02" in text and "old" not in text
    assert "\n| f32 | 2.5000 | 1.000 | 2.000 |\n| bf16 | 1.5000 | 1.000 | 2.000 |\n" in text, "in the entry's order"
    assert reproduce(call)[0] == 0 and page.read_text() == text
    page.write_text("# Page\n")
    assert reproduce(call)[0] == 0
    assert page.read_text().startswith(f"# Page\n\n## bf16 against f32\n\n{begin}\n")
    page.write_text(f"{end}\n{begin}\n")
    assert "one is missing: write both, or none" in reproduce(call)[2][-1]
    assert "no such file" in reproduce(call.replace("page.md", "pag.md"))[2][0]


def test_a_new_entry_is_everywhere(reproduce, monkeypatch, tmp_path, capsys):
    old = REPRODUCTIONS["bf16"]
    title = "An entry that was added, with a long title, so that it is broken into lines in help"
    monkeypatch.setitem(REPRODUCTIONS, "added", old._replace(name="added", title=title))
    with pytest.raises(SystemExit, match="0"):
        cli.main(["reproduce", "--help"])
    assert f"added: {title}; ours." in " ".join(capsys.readouterr().out.split())
    assert reproduce("added --scale check --dry-run")[1].startswith(f"added, scale check: {title}\n")
    assert "added" in [entry.name for entry in command.chosen(["all"], "check")]


def test_an_entry_is_data():
    table = {
        "title": "Norms",
        "source": "a paper",
        "claim": "Both train.",
        "rows": {"norm": "figures", "layers": {"few": 1, "many": {"layers": 3, "dropout": ""}}},
        "where": {"rmsnorm": {"lr": 0.25}},
        "shown": {"base": "bleu", "picture": "curves"},
        "figures": {"columns": ["few", "many"], "only": "{layers}", "heading": "theirs, {}", "layernorm": ["1", "2"]},
        "check": {"rows": {"norm": ["layernorm", "rmsnorm"]}, "seeds": 2},
    }
    scale = entries.made("norms", table).scales["check"]
    few, many, other, last = scale.rows
    assert (few.key, few.paper) == ({"norm": "layernorm", "layers": "few"}, {"theirs, few": "1"})
    assert (last.key, last.paper) == ({"norm": "rmsnorm", "layers": "many"}, {"theirs, many": ""})
    assert [row.options["decoder_layers"] for row in scale.rows] == [1, 3, 1, 3]
    assert (few.options["dropout"], "dropout" in many.options, other.options["lr"]) == (0.3, False, 0.25)
    assert (scale.seeds, scale.shown.value, scale.shown.picture, few.corpus) == (2, "bleu", "curves", "demo")
    with pytest.raises(nfrs.InputError, match=r'entries\.toml, Norms: unknown field "seed" \(did you mean "seeds"\?\)'):
        entries.made("norms", {**table, "seed": 3})


@pytest.mark.parametrize("name", REPRODUCTIONS)
@pytest.mark.one_in(all=43)
def test_every_rows_options_are_taken(name, tmp_path):
    """By the configurations and by the loop; with one layer, so that no large model is laid out."""
    entry, text = REPRODUCTIONS[name], tmp_path / "text"
    text.write_text("a b c d e f g h\n" * 3)
    assert set(entry.scales) <= set(SCALES) and "check" in entry.scales and len(entry.scales) > 1
    for scale in entry.scales.values():
        assert scale.shown.columns or scale.shown.cell
        for row in scale.rows:
            corpus = corpora.CORPORA[row.corpus]
            is_alone = row.options.get("architecture") == "decoder-only"
            files = {f"{part}_{side}": str(text) for part in ("train", "valid")
                     for side in (("target",) if is_alone else ("source", "target"))}  # fmt: skip
            options = {**corpus.options, **files, **row.options, "encoder_layers": 1, "decoder_layers": 1}
            options = {name: value for name, value in options.items() if name != "bpe_operations"} | {"no_bpe": True}
            model, training, data = split(options, nfrs.TransformerConfig, nfrs.TrainingConfig, nfrs.DataConfig)
            configs = nfrs.TransformerConfig(**model), nfrs.TrainingConfig(**training), nfrs.DataConfig(**data)
            assert nfrs.Trainer(*configs).dry_run().parameters > 0
            nfrs.SearchConfig(**row.search)


@pytest.mark.parametrize(
    "train, valid, has_ended, verdict",
    [
        ([9.0] * 60 + [1.0] * 50, 0.75 * 2, True, "trains"),
        ([1.9] * 150, 0.76 * 2, True, "stuck"),
        ([1.9 + 0.1 * (-1) ** i for i in range(150)], 0.76 * 2, True, "stuck"),
        ([9.0 - 0.01 * i for i in range(150)], 0.76 * 2, True, "slow"),
        ([1.9, 1.8], 0.76 * 2, True, "stuck"),
        ([1.0] * 60 + [0.95 * 2] * 50, 1.0, True, "diverged"),
        ([5.0 + 0.01 * i for i in range(150)], 1.0, True, "diverged"),
        ([4.09, 4.14, 3.62, 4.08, 4.08, 4.13], 4.09, True, "stuck"),  # the third batch is an easy one
        ([1.0] * 50, 1.0, False, "diverged"),
        ([], None, False, "diverged"),
    ],
)
def test_verdicts_are_the_specifications(tmp_path, train, valid, has_ended, verdict):
    """E = 2 nats."""
    events = [{"event": "started", "update": 0, "unigram_entropy": 2.0}]
    events += [
        {"event": "updated", "update": i, "nll": nll, "grad_norm": 1.0, "seconds": 1.0 * i}
        for i, nll in enumerate(train, 1)
    ]
    events += [{"event": "evaluated", "update": len(train), "nll": valid}] if valid else []
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert judge(tmp_path, has_ended)["verdict"] == verdict


def test_cells_of_a_table(tmp_path):
    """A key that runs across; what was not measured; a bar in a cell."""
    keys = [{"scheme": scheme, "lr": lr} for scheme in ("a|b", "c") for lr in ("0.1", "0.2")]
    shown = Shown(across="lr", cell="{verdict}; {valid_nll:.1f}")
    rows = tuple(Row(key, {}, "demo", {"the paper": key["scheme"].upper()}) for key in keys)
    entry = Reproduction("x", "X", "ours", "?", {"here": Scale("about", rows, shown)})
    results = Results(entry, "here", tmp_path)
    for key, columns in ((keys[0], {"verdict": "trains", "valid_nll": 1.25}), (keys[3], {"verdict": "diverged"})):
        results.add(Row(key, {}, "demo"), columns, {"gradients": [1.0, 2.5]})
    for read in (results, Results(entry, "here", tmp_path)):
        head, lines = tables.table(read, shown)
        assert head == ["scheme", "lr 0.1", "lr 0.2", "the paper"]
        assert lines == [["a|b", "trains; 1.2", "", "A|B"], ["c", "", "diverged", "C"]]
        assert read.series == {"gradients": {("a|b", "0.1"): [1.0, 2.5], ("c", "0.2"): [1.0, 2.5]}}
    assert tables.markdown(head, lines).splitlines()[2] == "| a\\|b | trains; 1.2 |  | A\\|B |"


def study(tmp_path, values, shown=None, **options):
    """Two rows, a baseline and another, each with a list of columns for every seed."""
    shown = shown or Shown(("bleu",), ("bleu", "p", "verdict"), "first", value="bleu")
    rows = tuple(Row({"arm": arm}, {"residual": arm, **options}, "demo") for arm in ("base", "other"))
    entry = Reproduction("x", "X", "ours", "?", {"here": Scale("about", rows, shown)})
    results = Results(entry, "here", tmp_path, len(values[0]))
    for row, seeds in zip(rows, values):
        for number, columns in enumerate(seeds):
            results.add(row.seeded(number), {"verdict": "trains", **columns}, {})
    return results


def test_a_failed_seed_is_named_and_not_left_out(tmp_path):
    base = [{"bleu": 41.1}, {"bleu": 41.2}, {"bleu": 41.3}]
    lost = [{"bleu": 41.6}, {"bleu": 41.7}, {"bleu": "", "verdict": "diverged"}]
    for i, columns in enumerate(([base, lost], [lost, base])):
        results = study(tmp_path / str(i), columns)
        line = tables.table(results, results.scale.shown)[1][1]
        assert line[2] == "not compared: 1 of 3 pairs failed"
    for value in ("nan", "inf"):
        results = study(tmp_path / value, [base, [*base[:2], {"bleu": value}]])
        assert tables.table(results, results.scale.shown)[1][1][2] == "not compared: 1 of 3 pairs failed"


@pytest.mark.parametrize(
    "others, star",
    [
        ([{"bleu": 20.0, "p": 0.001}], ""),
        ([{"bleu": 31.0, "p": 0.001}], "*"),
        ([{"bleu": 31.0, "p": 0.2}], ""),
        ([{"bleu": 30.0, "p": 0.001}, {"bleu": 30.0, "p": 0.001}, {"bleu": 20.0, "p": 0.001}], ""),
        ([{"bleu": 30.0, "p": 0.9}, {"bleu": 30.1, "p": 0.9}, {"bleu": 30.0, "p": 0.9}], "*"),
        ([{"bleu": 27.0}, {"bleu": 27.1}, {"bleu": 27.0}], ""),
    ],
)
def test_a_star_is_for_what_is_better(tmp_path, others, star):
    """By the t test over seeds, or by the bootstrap of the one seed."""
    shown = Shown(("bleu",), (), "first", "text", "{bleu:.1f}", significance=0.05, value="bleu")
    results = study(tmp_path, [[{"bleu": 29.0, "p": ""}] * len(others), others], shown)
    results.scale = results.scale._replace(
        rows=tuple(r._replace(key={**r.key, "text": "a"}) for r in results.scale.rows)
    )
    for row in results.rows:
        row["text"] = "a"
    cell = tables.table(results, shown)[1][1][1]
    assert cell.endswith("*") == bool(star), cell


@pytest.mark.parametrize("value, others, star", [
    ("valid_nll", [{"bleu": 31.0, "p": 0.001, "valid_nll": 2.5}], True),
    ("valid_nll", [{"bleu": 27.0, "p": 0.001, "valid_nll": 1.5}], False),
    ("valid_nll", [{"valid_nll": 1.5}, {"valid_nll": 1.6}, {"valid_nll": 1.5}], True),
    ("valid_nll", [{"valid_nll": 2.5}, {"valid_nll": 2.6}, {"valid_nll": 2.5}], False),
])  # fmt: skip
def test_a_lower_loss_is_better_and_p_of_one_seed_is_of_bleu(tmp_path, value, others, star):
    shown = Shown(("bleu",), ("p",), "first", value=value, significance=0.05)
    results = study(tmp_path, [[{"bleu": 29.0, "p": "", "valid_nll": 2.0}] * len(others), others], shown)
    (one,) = tables.comparisons(results, shown).values()
    assert one.is_better == star and one.p < 0.05


def test_equal_arms_are_called_different_in_one_of_twenty_studies():
    draw = random.Random(0)
    found = [spread.difference([draw.gauss(0, 1) - draw.gauss(0, 1) for _ in range(5)]).p for _ in range(5000)]
    assert 0.04 <= sum(p < 0.05 for p in found) / 5000 <= 0.06


def test_rows_of_other_options_are_measured_again(tmp_path):
    results = study(tmp_path, [[{"bleu": 1.0}], [{"bleu": 2.0}]], updates=20)
    assert results.stale == 0 and len(results.measured) == 2
    changed = study(tmp_path, [[], []], updates=400)
    changed.seeds = 1
    assert changed.stale == 2 and changed.measured == []
    changed.add(changed.scale.rows[0], {"bleu": 3.0}, {})
    assert changed.stale == 1 and [found["bleu"] for _, found in changed.measured] == ["3.0"]
    entry = Reproduction("x", "X", "ours", "?", {"here": changed.scale})
    said = " ".join(tables.section(entry, "here", changed, tmp_path / "page.md").split())
    assert "1 of 2 runs have not been made, 1 of them only with other options" in said


@pytest.mark.full
def test_a_table_without_its_series_has_no_picture(reproduce):
    assert reproduce("brn-fig3 --scale check")[0] == 0
    for path in Path().rglob("*-gradients.csv"):
        path.unlink()
    code, said, _ = reproduce("brn-fig3 --scale check --no-train")
    assert code == 0 and "picture: not drawn, its series are not in" in said


@pytest.mark.parametrize(
    "forged",
    [
        "",
        "[]",
        "{}",
        "null",
        "[" * 100_000,
        {"has_ended": "yes"},
        {"has_ended": 1},
        {"verdict": ["trains"]},
        {"train_nll": "2"},
        {"updates": True},
        {"unigram_entropy": 1e308},
        {"largest_grad_norm": None},
        {"more": 1},
    ],
    ids=lambda forged: str(forged)[:20],
)
def test_a_damaged_verdict_is_refused(tmp_path, forged):
    whole = {**dict.fromkeys(_NUMBERS, 2.0), "valid_nll": math.nan, "verdict": "trains", "has_ended": True}
    (tmp_path / "verdict.json").write_text(json.dumps(whole))
    assert read_verdict(tmp_path / "verdict.json")["has_ended"] is True
    (tmp_path / "verdict.json").write_text(forged if isinstance(forged, str) else json.dumps({**whole, **forged}))
    with pytest.raises(nfrs.InputError, match=r"verdict\.json: .*remove it to judge the run again"):
        read_verdict(tmp_path / "verdict.json")


def test_a_damaged_log_is_judged_without_its_damage(tmp_path, caplog):
    started = {"event": "started", "update": 0, "unigram_entropy": 4.0}
    update = {"event": "updated", "update": 1, "nll": 2.0, "grad_norm": 1.5, "seconds": None}
    lines = [json.dumps(started).encode(), b"\xff", json.dumps(update).encode(), b"[]"]
    (tmp_path / "log.jsonl").write_bytes(b"\n".join(lines))
    found = judge(tmp_path, has_ended=True)
    assert (found["updates"], found["train_nll"], found["unigram_entropy"]) == (1, 2.0, 4.0)
    assert len(caplog.messages) == 1
    (tmp_path / "log.jsonl").write_bytes(b"\n".join(lines[1:]))
    with pytest.raises(nfrs.InputError, match="the line of the run's start is damaged: remove"):
        judge(tmp_path, has_ended=True)
