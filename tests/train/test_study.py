"""Studies: what a file says, how rates are chosen, what the comparison reports, runs and pages, loops of one's own."""

import contextlib
import csv
import dataclasses
import functools
import html
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.image
import pytest
import torch

import normformer_rs as nfrs
from normformer_rs import cli
from normformer_rs.norms import Parameter
from normformer_rs.reproduce.results import RECIPE
from normformer_rs.reproduce.runs import folder_of
from normformer_rs.reproduce.spread import difference
from normformer_rs.study import Study, flags, page
from normformer_rs.study.measured import Chosen, choose, results_of
from normformer_rs.study.outcome import as_json, outcome
from normformer_rs.study.starts import unequal

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"d_model": 16, "d_ff": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "max_tokens": 500}
ARMS = {"pre": {"residual": "prenorm"}, "post": {"residual": "postnorm"}}
FILE = """
text = "demo"
updates = 6
lr = [1e-3, 3e-3]
seeds = 2
baseline = "post"
options = { d_model = 16, d_ff = 32, heads = 2, encoder_layers = 1, decoder_layers = 1, max_tokens = 500 }
arms.pre = { residual = "prenorm" }
arms.post = { residual = "postnorm" }
"""


@pytest.fixture
def compare(tmp_path, capsys):
    """Runs the command in an empty folder; its exit code, output and error lines."""
    before = Path.cwd()
    os.chdir(tmp_path)
    Path("study.toml").write_text(FILE)

    def run(words: str):
        code = cli.main(["compare", *words.split(), "--no-progress"])
        captured = capsys.readouterr()
        return code, captured.out, captured.err.splitlines()

    yield run
    os.chdir(before)


def rows(folder: str = "study") -> list[dict[str, str]]:
    with open(f"{folder}/study-rows.csv", newline="") as file:
        return list(csv.DictReader(file))


def measured(study: Study, value, *, failed=()) -> object:
    """The results of a study whose values `value(arm, rate, seed)` gives."""
    results = results_of(study, Path("nowhere"))
    for cell, seed in itertools.product(study.cells, range(1, study.seeds + 1)):
        for row in [*study.tuning(cell, seed), *(study.row(cell, rate, seed) for rate in study.lr)]:
            number = value(cell.key["arm"], float(row.key["lr"]), row.seed)
            verdict = "diverged" if (cell.key["arm"], row.seed) in failed else "trains"
            columns = {"valid_nll": str(number), "first_nll": "5.0", "verdict": verdict, "seconds": "1"}
            results.rows.append({**row.key, "seed": str(row.seed), RECIPE: row.recipe, **columns})
    return results


# ---- what a study says ----


def test_a_file_says_what_the_class_takes(compare):
    read = Study.read("study.toml")
    same = Study(arms=ARMS, options=SMALL, lr=[1e-3, 3e-3], seeds=2, updates=6, text="demo", baseline="post")
    assert read == same and read.runs == 2 * 2 * 3
    assert len(flags.DEFAULT.read_text().splitlines()) <= 15 and len(Study.read(flags.DEFAULT).cells) == 4


def test_depths_and_initialisations_make_cells():
    study = Study(arms=ARMS, options=SMALL, layers=[1, 2], init=["own", "xavier"], updates=10)
    assert [(*cell.key.values(),) for cell in study.cells[:4]] == [
        ("pre", "1", "own"), ("post", "1", "own"), ("pre", "1", "xavier"), ("post", "1", "xavier"),
    ]  # fmt: skip
    options = study.row(study.cells[-1], 1e-3, 2).options
    assert (options["encoder_layers"], options["init"], options["lr"], options["seed"]) == (2, "xavier", 1e-3, 2)
    assert study.row(study.cells[0], 1e-3, 1).options["init"] == "smallinit", "prenorm's own"
    assert study.baseline_of(study.cells[-1]).key == {"arm": "pre", "layers": "2", "init": "xavier"}


def test_durations_are_shares_of_the_run():
    """A clock that is longer than the run would compare schemes before they are what they are called."""
    arms = {"branchnorm": {"residual": "branchnorm"}, "slow": {"residual": "branchnorm", "branchnorm_steps": 0.5},
            "prores": {"residual": "prores"}}  # fmt: skip
    study = Study(arms=arms, options={"preset": "transformer-tiny"}, updates=200)
    branch, slow, prores = (study.row(cell, 1e-3, 1).options for cell in study.cells)
    assert (branch["branchnorm_steps"], slow["branchnorm_steps"], branch["warmup"]) == (40, 100, 20)
    assert prores["prores_steps"] * prores["decoder_layers"] == 100 and "prores_steps" not in branch
    own = Study(arms={"often": {"evaluate_every": 20}, "seldom": {}}, updates=200)
    assert [own.row(cell, 1e-3, 1).options["evaluate_every"] for cell in own.cells] == [20, 50]
    fixed = Study(arms={"branchnorm": {"residual": "branchnorm"}}, options={"warmup": 7}, updates=200)
    assert fixed.row(fixed.cells[0], 1e-3, 1).options["warmup"] == 7


def test_budgets_of_tokens_and_operations():
    def updates(**budget):
        study = Study(arms={"pre": ARMS["pre"]}, options=SMALL, text="demo", **budget)
        return study.row(study.cells[0], 1e-3, 1).options["updates"]

    assert updates(tokens=5_000) == 10 and updates(tokens=5_001) == 11
    parameters = 7_248  # with the 101 types of the demo's text
    assert updates(flop=6 * parameters * 500 * 12) == 12
    with pytest.raises(nfrs.InputError, match="text verses needs 6 files that nowhere lacks"):
        study = Study(arms=ARMS, flop=1e9, text="verses", data="nowhere")
        study.row(study.cells[0], 1e-3, 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"arms": {}}, "arms must be a table"),
        ({"lr": []}, "lr must be one or several positive rates"),
        ({"lr": [1e-3, 0.001]}, "lr must be different rates"),
        ({"seeds": 0}, "seeds must be a number from 1 to 999"),
        ({"layers": [0]}, "layers must be different numbers from 1"),
        ({"layers": [2, 2]}, "layers must be different numbers from 1"),
        ({"init": []}, "init must be one or several different initialisations"),
        ({"init": ["xaver"]}, 'unknown init "xaver" (did you mean "xavier"?)'),
        ({"tokens": 5, "updates": 5}, "updates and tokens exclude each other"),
        ({"metric": "loss"}, 'unknown metric "loss"'),
        ({"baseline": "pst"}, 'unknown baseline "pst" (did you mean "post"?)'),
        ({"margin": 0}, "margin must be a positive number"),
        ({"text": "dem"}, 'unknown text "dem" (did you mean "demo"?)'),
        ({"text": {"train_target": "a"}}, "text must name the files train_target and valid_target"),
        ({"arms": {"a": {"lr": 1}}}, "a: lr is the study's lr, a list of rates for all arms"),
        ({"options": {"patience": 3}}, "options: patience is the study's updates, tokens or flop"),
        ({"arms": {"options": {"preset": "transformer-tiny"}}}, "arm options: a preset belongs to the options"),
        ({"arms": {"a": {"norm": "layernrm"}}}, 'arm a: unknown norm "layernrm"'),
        ({"arms": {"a": {"nrm": "layernorm"}}}, 'arm a: unknown option "nrm"'),
        ({"options": {"preset": "tiny"}}, 'unknown preset "tiny"'),
    ],
)
def test_wrong_studies_are_named(change, said):
    with pytest.raises(nfrs.InputError, match=re.escape(said)):
        Study(**{"arms": ARMS, "options": SMALL, "updates": 5, **change})


FIELDS = [field.name for field in dataclasses.fields(Study)]


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.one_in(test=3)
def test_no_kind_of_value_ends_in_a_traceback(name):
    """A TOML file may have any of these in any place."""
    for value in (3, -1, 0, 2.5, math.nan, math.inf, True, "", "x", [], [3], ["x"], [{}], {}, {"x": 1}, {"x": {}}):
        given = {
            "arms": ARMS,
            "options": SMALL,
            "updates": 5,
            **({"updates": None} if name in ("tokens", "flop") else {}),
        }
        try:
            study = Study(**{**given, name: value})
            study.row(study.cells[0], study.lr[0], 1)
        except nfrs.InputError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("option", ["decoder_layers", "encoder_layers", "max_tokens", "accumulate", "warmup", "norm"])
def test_no_value_of_an_option_ends_in_a_traceback(option):
    for value in (0, -1, 2.5, 0.3, math.nan, True, "6", "", None, [], {}):
        for budget in ({"updates": 5}, {"tokens": 5000}, {}):
            with contextlib.suppress(nfrs.InputError):
                Study(arms={"a": {option: value}}, options=SMALL, **budget)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("arms", "not valid TOML"),
        ("lr = [1e-3]", "a study needs arms"),
        ("arm.a = {}", 'unknown name "arm" (did you mean "arms"?)'),
        ("seed = 3\narms.a = {}", 'unknown name "seed" (did you mean "seeds"?)'),
        ('arms.a = { norm = "own.py:Mine" }', "--trust"),
        ("arms = 3", "arms must be a table"),
        ('arms.a = { residual = "prenrm" }', "did you mean"),
    ],
)
def test_wrong_files_are_one_line(compare, text, said):
    Path("study.toml").write_text(text)
    code, out, lines = compare("study.toml")
    assert (code, out, len(lines)) == (2, "", 1) and "study.toml" in lines[0] and said in lines[0]
    assert not Path("study").exists()


# ---- choice and comparison ----


def test_the_best_rate_is_chosen_and_edges_are_told():
    assert choose({1e-3: 3.0, 2e-3: 2.0, 3e-3: 2.5}, True) == Chosen(2e-3, False)
    assert choose({1e-3: 3.0, 2e-3: 2.0, 3e-3: 2.5}, False) == Chosen(1e-3, True)
    assert choose({2e-3: 2.0, 1e-3: 2.0}, True) == Chosen(1e-3, True), "the lowest of equal ones"
    assert choose({1e-3: None, 2e-3: 2.0, 3e-3: None}, True) == Chosen(2e-3, False)
    assert choose({1e-3: 2.0}, True) == Chosen(1e-3, False), "one rate has no edge"
    assert choose({1e-3: None}, True) == Chosen(None, False)


def test_a_rate_is_chosen_on_a_seed_that_is_not_reported():
    study = Study(arms=ARMS, options=SMALL, seeds=3, updates=5)
    # The lowest rate is the best of the tuning seeds, the highest of the reported ones.
    found = outcome(study, measured(study, lambda arm, rate, seed: rate if seed > 1000 else -rate))
    assert all(arm.rates == {1: 1e-3, 2: 1e-3, 3: 1e-3} and arm.values[1] == -1e-3 for arm in found.arms)
    assert [arm.edges for arm in found.arms] == [3, 3] and "edge in 3" in str(found)


@pytest.mark.long
def test_equal_arms_differ_in_one_of_twenty_studies():
    """One arm under two names; the rates' means lie so that noise decides between two of them."""
    draw, alarms = random.Random(5), 0
    study = Study(arms={"a": ARMS["pre"], "b": ARMS["pre"]}, options=SMALL, seeds=3, updates=5)
    template = measured(study, lambda *_: 0.0)
    means = {1e-3: 3.02, 3e-3: 3.0, 1e-2: 3.01}
    keys = [(float(row["lr"]), int(row["seed"])) for row in template.rows]
    for _ in range(1000):
        shared = {seed: draw.gauss(0, 0.02) for _, seed in keys}
        for row, (rate, seed) in zip(template.rows, keys):
            row["valid_nll"] = repr(means[rate] + shared[seed] + draw.gauss(0, 0.03))
        compared = outcome(study, template).arms[1].compared
        alarms += compared is not None and compared.p < 0.05
    assert 40 <= alarms <= 60


@pytest.mark.long
def test_rates_chosen_on_the_other_reported_seeds_would_find_too_much():
    """Why each reported seed has a tuning seed of its own: with equal arms, and eight seeds of which each has the rate
    that is best on the other seven, far more than 5 % of studies find a difference."""
    draw, alarms, seeds = random.Random(1), 0, range(8)
    for _ in range(1000):
        arms = [[[draw.gauss(3, 0.03) for _ in range(3)] for _ in seeds] for _ in range(2)]
        values = []
        for losses in arms:
            best = [min(range(3), key=lambda r: sum(losses[o][r] for o in seeds if o != s)) for s in seeds]
            values.append([losses[s][best[s]] for s in seeds])
        found = difference([a - b for a, b in zip(*values)])
        alarms += found is not None and found.p < 0.05
    assert alarms > 100


@pytest.mark.long
def test_several_equal_arms_differ_as_rarely_as_one():
    draw, alarms = random.Random(2), 0
    study = Study(arms=dict.fromkeys("abcd", ARMS["pre"]), options=SMALL, lr=[1e-3], seeds=4, updates=5)
    template = measured(study, lambda *_: 0.0)
    for _ in range(1000):
        for row in template.rows:
            row["valid_nll"] = repr(draw.gauss(3, 0.03))
        compared = [arm.compared for arm in outcome(study, template).arms[1:]]
        alarms += any(one is not None and one.p < 0.05 for one in compared)
    assert alarms <= 60


def test_a_better_arm_is_starred_and_a_worse_one_is_not():
    draw = random.Random(1)
    study = Study(arms={**ARMS, "deep": {"residual": "deepnorm"}}, options=SMALL, seeds=5, updates=5, baseline="pre")
    means = {"pre": 3.0, "post": 3.09, "deep": 2.91}  # three standard deviations
    found = outcome(study, measured(study, lambda arm, rate, seed: means[arm] + draw.gauss(0, 0.03)))
    _, post, deep = found.arms
    assert deep.compared.is_better and deep.compared.p < 0.05 and not post.compared.is_better
    lines = {line[0]: line for line in page.main_table(found)[1]}
    assert lines["deep"][-2].endswith(" *") and "*" not in lines["post"][-2] and lines["pre"][-2] == "baseline"
    assert re.search(r"deep is 0\.\d+ lower, better than pre", page.sentence(found, deep))
    assert re.search(r"post is 0\.\d+ higher, worse than pre", page.sentence(found, post))


def test_a_diverging_arm_is_named_and_not_tested():
    study = Study(arms=ARMS, options=SMALL, seeds=3, updates=5, baseline="pre")
    found = outcome(study, measured(study, lambda arm, rate, seed: 2.0 + 0.01 * seed, failed={("post", 2)}))
    post = found.arms[1]
    assert post.failed == 1 and post.values[2] is None and post.verdicts == "trains 2, diverged 1"
    assert "1 of 3 pairs failed" in str(found) and "p =" not in str(found)
    assert page.sentence(found, post).startswith("post failed with 1 of 3 seeds")
    none = outcome(study, measured(study, lambda arm, *_: 2.0, failed={("post", s) for s in (1001, 1002, 1003)}))
    assert none.arms[1].rates == {1: None, 2: None, 3: None} and "failed with every rate" in str(none)


def test_only_a_named_margin_makes_arms_equal():
    draw = random.Random(1)
    for margin, is_equal in ((None, None), (0.1, True), (0.001, False)):
        study = Study(arms=ARMS, options=SMALL, seeds=4, updates=5, margin=margin)
        found = outcome(study, measured(study, lambda *_: 3 + draw.gauss(0, 0.01)))
        assert found.arms[1].is_equal is is_equal
        assert ("equal within" in page.sentence(found, found.arms[1])) == (margin is not None)


def test_sensitivity_is_wortsmans():
    """The mean over rates of min(loss, loss at the start) over the best one; a failed run has the start's loss."""
    study = Study(arms={"pre": ARMS["pre"]}, options=SMALL, lr=[1, 2, 3], seeds=1, updates=5)
    values = {1.0: 3.0, 2.0: 2.0, 3.0: 9.0}  # 5 before the first update
    found = outcome(study, measured(study, lambda arm, rate, seed: values[rate]))
    assert math.isclose(found.arms[0].sensitivity, (3 + 2 + 5) / 3 - 2)


def test_rows_of_other_options_are_stale():
    study = Study(arms=ARMS, options=SMALL, seeds=2, updates=5)
    results = measured(study, lambda *_: 2.0)
    for row in results.rows:
        if row["seed"] in ("1001", "1002") and row["lr"] == "0.001":  # of both arms
            row[RECIPE] = "other"
    found = outcome(study, results)
    assert found.stale == 4 and found.missing == 4 + 4, "nor can the reported runs be chosen"
    assert "4 runs were measured only with other options or versions" in "".join(page._limits(found))


@pytest.mark.parametrize(
    ("options", "beam"),
    [({}, 0), ({"evaluation_beam": 2}, 2), ({"criterion": "bleu"}, None), ({"schedule": "no-warmup"}, None)],
)
def test_evaluations_translate_only_for_what_depends_on_bleu(options, beam):
    study = Study(arms={"pre": {**ARMS["pre"], **options}}, options=SMALL, updates=5)
    assert study.row(study.cells[0], 1e-3, 1).options.get("evaluation_beam") == beam


class Edited(nfrs.Norm):
    """A norm of one's own, of which the test makes another version."""

    name, parameters = "mine-of-a-study", {"weight": Parameter()}

    def normalize(self, x, weight):
        return weight * x


def test_a_row_knows_the_source_of_ones_own_norm(monkeypatch):
    def recipe(norm):
        study = Study(arms={"mine": {"norm": norm}}, options=SMALL, updates=5)
        return study.row(study.cells[0], 1e-3, 1).recipe

    before = [recipe(Edited), recipe(Edited())]
    assert before == [recipe(Edited), recipe(Edited())]
    source = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda kind: source(kind).replace("weight * x", "0.01 * weight * x"))
    assert before[0] != recipe(Edited) and before[1] != recipe(Edited())


def test_a_function_is_known_by_what_it_captures():
    def study_of(factor):
        def inner(model):
            return model, factor

        bound = functools.partial(inner)
        study = Study(arms={"f": lambda model: bound(inner(model)), "g": bound}, updates=5, text="own loop")
        return [study.row(cell, 1e-3, 1).recipe for cell in study.cells]

    assert study_of(1) == study_of(1), "addresses of functions are no part of them"
    assert study_of(1)[0] != study_of(2)[0] and study_of(1)[1] != study_of(2)[1]

    class Swap:
        def __init__(self, factor):
            self.factors = [factor]

        def __call__(self, model):
            return model

        def apply(self, model):
            return model

    def recipes(factor):
        given = Swap(factor)
        arms = {"object": given, "method": given.apply, "partial": functools.partial(Swap.apply, given)}
        arms |= {
            "default": lambda model, swap=given: swap(model),
            "list": (lambda given: lambda m: given[0](m))([given]),
        }
        study = Study(arms=arms, updates=5, text="own loop")
        return [study.row(cell, 1e-3, 1).recipe for cell in study.cells]

    assert recipes(1) == recipes(1)
    assert all(one != other for one, other in zip(recipes(1), recipes(2), strict=True))


@pytest.mark.parametrize("bad", [{"d_model": 18, "heads": 4}, {"dropout": 1.5}, {"residual": "prenorm*3"}])
def test_arms_are_checked_before_the_first_run(bad, tmp_path):
    study = Study(arms={"a": {}, "c": bad}, options={**SMALL, "decoder_layers": 2}, updates=2, lr=[1e-3], text="demo")
    with pytest.raises(nfrs.InputError, match=r"^arm c: "):
        study.run(tmp_path / "study", progress=False)
    assert not [*tmp_path.glob("study/runs/*")], "no arm was trained"


def test_another_version_trains_anew(monkeypatch):
    study = Study(arms=ARMS, options=SMALL, updates=5)
    before = study.row(study.cells[0], 1e-3, 1)
    monkeypatch.setattr("normformer_rs.study.declared.__version__", "9.9")
    after = study.row(study.cells[0], 1e-3, 1)
    assert before.recipe != after.recipe and folder_of(before) != folder_of(after)


def test_rows_of_an_edited_study_stay(tmp_path):
    arms = {"pre": ARMS["pre"]}
    wide = Study(arms=arms, options=SMALL, lr=[1e-3], seeds=1, updates=2, layers=[1, 2], text="demo")
    narrow = Study(arms=arms, options=SMALL, lr=[1e-3], seeds=1, updates=2, layers=[3], text="demo")
    for study in (wide, narrow):
        results = results_of(study, tmp_path)
        assert not results.keeps, "translations and losses are kept for `reproduce --recompute` alone"
        for cell in study.cells:
            results.add(study.row(cell, 1e-3, 1), {"valid_nll": 2.0}, {})
    assert [results_of(study, tmp_path).find(study.row(cell, 1e-3, 1)) is not None
            for study in (wide, narrow) for cell in study.cells] == [True] * 3  # fmt: skip


def test_bleu_needs_translations():
    options = {"train_target": "a", "valid_target": "b", "no_bpe": True}
    for text in ("shakespeare", "demo-words", options, {**options, "test_target": "c", "valid_source": "d"}):
        with pytest.raises(nfrs.InputError, match="metric bleu needs sources and targets"):
            Study(arms=ARMS, metric="bleu", updates=5, text=text)
    for text in ("demo", "verses", {**options, "train_source": "c", "valid_source": "d"}):
        Study(arms=ARMS, metric="bleu", updates=5, text=text)


# ---- runs and page ----


def test_a_study_by_one_command(compare):
    code, said, lines = compare("study.toml")
    assert code == 0 and len(rows()) == 12 and "page: study/study.html" in said
    assert lines[0] == "study-rows: pre, 0.001, seed 1001 (1 of 4)" and len(lines) == 12
    found = {(row["arm"], row["lr"], row["seed"]): row for row in rows()}
    for arm, seed in itertools.product(ARMS, ("1", "2")):
        tuned = {rate: float(found[arm, rate, f"100{seed}"]["valid_nll"]) for rate in ("0.001", "0.003")}
        assert (arm, min(tuned, key=tuned.get), seed) in found
    assert all(row["torch"] == torch.__version__ and row["version"] == nfrs.__version__ for row in rows())
    whole = Path("study/study.html").read_text()
    assert whole.count('src="data:image/png;base64,') == 2 and "http" not in whole
    assert 'arms.pre = { residual = "prenorm" }' in html.unescape(whole)
    made = json.loads(Path("study/study.json").read_text())
    assert [arm["arm"] for arm in made["arms"]] == ["pre", "post"] and made["missing_runs"] == 0
    mean = statistics.fmean(made["arms"][0]["values"].values())
    assert f"{mean:.3f} [" in said and r"\toprule" in Path("study/study.tex").read_text()
    for name in ("by-rate", "sensitivity"):
        pixels = matplotlib.image.imread(f"study/{name}.png")[..., :3]
        assert ((pixels.max(-1) - pixels.min(-1)) > 0.2).mean() > 0.0005
    logs = {path: path.stat().st_mtime_ns for path in Path().glob("study/runs/*/log.jsonl")}
    assert compare("study.toml")[:2] == (0, said), "a second call says the same"
    assert {path: path.stat().st_mtime_ns for path in logs} == logs, "and trains nothing"


def test_a_part_of_a_study_says_what_is_missing(compare):
    code, said, _ = compare("study.toml --only pre")
    assert code == 0 and len(rows()) == 6 and "not measured" in said
    assert "6 of 12 runs have not been made" in Path("study/study.md").read_text()
    code, _, lines = compare("study.toml --only nobody")
    assert code == 2 and 'unknown arm "nobody"' in lines[0]
    code, _, lines = compare("study.toml --output elsewhere --no-train")
    assert code == 2 and "nothing of this study has been measured yet" in lines[0]


def test_no_run_begins_after_the_hours_that_are_given(compare):
    assert compare("study.toml --max-hours 1e-9")[0] == 2 and not Path("study/runs").exists()
    assert compare("study.toml --max-hours -1")[0] == 2


def test_a_plan_costs_the_study_before_it_runs(compare):
    code, said, _ = compare("study.toml --dry-run")
    assert code == 0 and not Path("study").exists()
    flop = 6 * 7248 * 6 * 500 * 6
    assert re.search(
        rf"pre: 6 runs, 7,248 parameters, {re.escape(f'{flop:.2g}')} FLOP, .* of memory, .* on the disk", said
    )
    Path("study.toml").write_text(FILE.replace("max_tokens = 500", "max_tokens = 500, accumulate = 4"))
    assert f"{4 * flop:.2g} FLOP" in compare("study.toml --dry-run")[1]
    assert "Reported seeds are 1 to 2" in said and "12 runs" in said


def test_a_text_of_ones_own_is_known_by_what_it_holds(compare):
    for part in ("train", "valid"):
        Path(f"{part}.txt").write_text("".join(f"one two {n} three\n" for n in range(60)))
    text = {"train_target": "train.txt", "valid_target": "valid.txt", "no_bpe": True}
    options = {"architecture": "decoder-only", "d_model": 16, "d_ff": 32, "heads": 2, "decoder_layers": 1}
    study = Study(arms=ARMS, options=options, lr=[1e-3], seeds=1, updates=3, text=text)
    found = study.run("own", progress=False)
    assert [len(arm.values) for arm in found.arms] == [1, 1] and found.missing == 0
    before = study.row(study.cells[0], 1e-3, 1).recipe
    Path("train.txt").write_text("another text\n" * 60)
    study = Study(arms=ARMS, options=options, lr=[1e-3], seeds=1, updates=3, text=text)
    assert study.row(study.cells[0], 1e-3, 1).recipe != before
    study = Study(arms=ARMS, options=options, updates=3, text={**text, "word_dropout": 0.1} | {"bpe_operations": 9})
    other = Study(arms=ARMS, options=options, updates=3, text={**text} | {"bpe_operations": 8})
    assert study.corpus[0] != other.corpus[0]
    with pytest.raises(nfrs.InputError, match=r"train_target: no such file: .*nowhere\.txt"):
        Study(arms=ARMS, options=options, updates=3, text={**text, "train_target": "nowhere.txt"}).run("own")


class Mine(nfrs.Norm):
    """x over its root mean square."""

    name = "mine"
    equation = "x/√mean(x²)"

    def normalize(self, x):
        return x * x.square().mean(-1, keepdim=True).rsqrt()


@pytest.mark.full
def test_norms_of_ones_own_are_arms(tmp_path):
    arms = {"layernorm": {"norm": "layernorm"}, "mine": {"norm": Mine}}
    found = Study(arms=arms, options=SMALL, lr=[1e-3], seeds=1, updates=3, text="demo").run(tmp_path, progress=False)
    assert [arm.verdicts for arm in found.arms] and all(arm.found for arm in found.arms)


def first_values(**options) -> dict[str, torch.Tensor]:
    shape = {"vocab_size": 50, "d_model": 32, "d_ff": 64, "heads": 4, "decoder_layers": 4, "init": "xavier"}
    return nfrs.Transformer(nfrs.TransformerConfig(**shape, encoder_layers=2, **options), seed=1).state_dict()


def test_arms_start_alike():
    """Norms and gates of a scheme do not shift the first values of other parameters; nor does a third matrix."""
    base = first_values()
    others = [{"residual": entry["name"]} for entry in nfrs.tables()["residuals"]]
    others += [{"norm": entry["name"]} for entry in nfrs.tables()["norms"]] + [{"activation": "swiglu"}]
    for options in others:
        other = first_values(**options)
        both = [name for name, t in base.items() if t.dim() > 1 and name in other and t.shape == other[name].shape]
        assert both and all(base[name].equal(other[name]) for name in both), options
    matrices = [t for t in base.values() if t.dim() > 1]
    alike = [(a.shape, b.shape) for a, b in itertools.combinations(matrices, 2) if a.shape == b.shape and a.equal(b)]
    assert alike == [], "each parameter has numbers of its own"


def test_the_page_tells_which_parameters_start_unlike():
    arms = {"pre": {"residual": "prenorm"}, "rms": {"norm": "rmsnorm"}, "deep": {"residual": "deepnorm"}}
    lines = unequal(Study(arms=arms, options=SMALL, updates=5))
    assert [line[0] for line in lines] == ["rms", "deep"] and lines[0][3] == "none"
    assert int(lines[1][2]) < int(lines[1][1]) and "encoder.layers.*.self_attn.in_proj_weight" in lines[1][3]


def start(toml: str, folder: Path) -> subprocess.Popen:
    (folder / "study.toml").write_text(toml)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-m", "normformer_rs", "compare", "study.toml", "--no-progress"]
    return subprocess.Popen(words, cwd=folder, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("kills", [pytest.param(1, marks=pytest.mark.full), pytest.param(20, marks=pytest.mark.long)])
def test_a_study_that_is_killed_goes_on_to_the_same_rows(tmp_path, kills):
    """kill −9 at random places, then two processes together."""
    folders = whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in folders:
        folder.mkdir()
    begun = time.monotonic()
    assert start(FILE, whole).wait() == 0
    lasts, draw = time.monotonic() - begun, random.Random(3)
    for _ in range(kills):
        process = start(FILE, killed)
        time.sleep(draw.uniform(0.2, 1) * lasts)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert [one.wait() for one in [start(FILE, killed), start(FILE, killed)]] == [0, 0]
    own = ("seconds", "date")

    def made(folder: Path) -> list:
        found = [{name: value for name, value in row.items() if name not in own} for row in rows(folder / "study")]
        return sorted(found, key=lambda row: (row["arm"], row["lr"], row["seed"]))

    assert made(whole) == made(killed) and len(made(whole)) == 12


class Client:
    """Stands in for wandb and trackio, whose calls are alike."""

    def __init__(self):
        self.runs, self.open = {}, None

    def init(self, project, name, config):
        assert self.open is None
        self.open = self.runs[project, name] = (config, {})

    def log(self, values, step):
        assert step not in self.open[1], "once for each step, in order"
        self.open[1][step] = values

    def finish(self):
        self.open = None


@pytest.mark.parametrize("name", ["wandb", "trackio"])
@pytest.mark.full
def test_curves_and_rows_are_reported(compare, monkeypatch, name):
    client = Client()
    monkeypatch.setitem(sys.modules, name, client)
    assert compare(f"study.toml --only pre --report {name}")[0] == 0
    assert len(client.runs) == 6 and client.open is None
    config, logged = client.runs["pre, post", "pre, 0.001, seed 1001"]
    row = next(row for row in rows() if (row["lr"], row["seed"]) == ("0.001", "1001"))
    assert config == {"arm": "pre", "lr": "0.001", "seed": 1001} and [*logged] == [1, 2, 3, 4, 5, 6]
    assert logged[1]["train/nll"] == pytest.approx(float(row["first_nll"]), abs=1e-4)
    assert logged[6]["row/valid_nll"] == float(row["valid_nll"]) == pytest.approx(logged[6]["valid/nll"], abs=1e-4)


@pytest.mark.full
def test_curves_and_rows_are_written_for_tensorboard(compare):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert compare("study.toml --only pre --report tensorboard")[0] == 0
    folders = [*Path("study/tensorboard").iterdir()]
    assert len(folders) == 6
    events = reader.EventAccumulator(str(folders[0])).Reload()
    assert [event.step for event in events.Scalars("train/nll")] == [1, 2, 3, 4, 5, 6]
    assert math.isfinite(events.Scalars("valid_nll")[0].value)


def test_every_client_has_a_flag():
    from normformer_rs.study import reports

    assert {*flags.REPORTS} == {*reports.REPORTS}


@pytest.mark.full
def test_jobs_make_the_same_rows(compare):
    """submitit's local executor: two jobs, then the page; one that has nothing to do says the same."""
    pytest.importorskip("submitit")
    setting = "--job-setting cluster=local --job-setting timeout_min=10"
    code, said, lines = compare(f"study.toml --jobs 2 {setting} --output jobs")
    assert code == 0 and lines[0].startswith("jobs: ") and len(rows("jobs")) == 12 and "page: jobs/study.html" in said
    assert {(row["arm"], row["seed"]) for row in rows("jobs")} == {
        (arm, seed) for arm in ARMS for seed in ("1", "2", "1001", "1002")
    }
    assert compare("study.toml --output jobs")[1] == said


def test_wrong_jobs_are_named(compare):
    if importlib.util.find_spec("submitit"):
        said = compare("study.toml --jobs 1 --job-setting cluster=local --job-setting unheard_of=1")[2][0]
        assert "submitit does not take these settings" in said and "unheard_of" in said
    assert "expected NAME=VALUE" in compare("study.toml --jobs 1 --job-setting gpu")[2][0]
    assert "--jobs must not be negative" in compare("study.toml --jobs -1")[2][0]


def test_the_page_of_numbers_is_json(tmp_path):
    study = Study(arms=ARMS, options=SMALL, seeds=2, updates=5)
    found = as_json(outcome(study, measured(study, lambda arm, rate, seed: rate + seed)))
    assert json.loads(json.dumps(found, allow_nan=False))["arms"][1]["least_difference"] == 0.0
