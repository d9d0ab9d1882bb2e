"""The paired bootstrap: p is sacreBLEU's where no resample ties, and 1 for systems that are equal."""

import random

import numpy as np
import pytest

from normformer_rs import InputError, scores

sacrebleu = pytest.importorskip("sacrebleu")


def corpus(lines=60, wrong=0.3, seed=1):
    """References, and a system that gets a share of the words wrong."""
    draw = random.Random(seed)
    words = [f"w{i}" for i in range(40)]
    references = [[draw.choice(words) for _ in range(draw.randint(4, 12))] for _ in range(lines)]
    made = [[draw.choice(words) if draw.random() < wrong else word for word in line] for line in references]
    return [" ".join(line) for line in made], [" ".join(line) for line in references]


def theirs(hypotheses, references, baseline, resamples=1000, **options):
    """sacreBLEU's own p-value."""
    from sacrebleu.metrics import BLEU
    from sacrebleu.significance import PairedTest

    metric = BLEU(force=True, references=[references], **options)
    systems = [("baseline", baseline), ("system", hypotheses)]
    _, found = PairedTest(systems, {"BLEU": metric}, None, test_type="bs", n_samples=resamples)()
    return found["BLEU"][1].p_value


def p_value(*systems, **options):
    return scores.score(*systems, **options).comparison.p_value


@pytest.mark.parametrize("wrong", [0.28, 0.31, 0.35, 0.5])
def test_p_is_sacrebleus_where_no_resample_ties(wrong):
    hypotheses, references = corpus()
    baseline, _ = corpus(wrong=wrong, seed=1)
    found = scores.score(hypotheses, references, baseline, tokenize="none").comparison
    assert found.p_value == theirs(hypotheses, references, baseline, tokenize="none")
    assert found.resamples == 1000 and 0 < found.p_value < 1


def test_the_seed_is_sacrebleus(monkeypatch):
    systems = (*corpus(), corpus(wrong=0.31)[0])
    default = p_value(*systems, resamples=200)
    monkeypatch.setenv("SACREBLEU_SEED", "8")
    assert p_value(*systems, resamples=200) == theirs(*systems, resamples=200) != default
    monkeypatch.setenv("SACREBLEU_SEED", "none")
    assert 0 < p_value(*systems, resamples=200) <= 1
    monkeypatch.setenv("SACREBLEU_SEED", "seven")
    with pytest.raises(InputError, match='SACREBLEU_SEED must be a whole number or "none"; got "seven"'):
        p_value(*systems)


HYPOTHESES, REFERENCES = corpus()
EQUAL = {
    "the same lines": (HYPOTHESES, {}),
    "words that match nothing": ([line.replace(" w1 ", " x1 ") for line in HYPOTHESES], {}),
    "spaces": ([line.replace(" ", "  ") + " " for line in HYPOTHESES], {}),
    "case": ([line.upper() for line in HYPOTHESES], {"lowercase": True}),
}


@pytest.mark.parametrize("tokenize", ["13a", "none"])
@pytest.mark.parametrize("difference", EQUAL)
def test_equal_systems_have_p_one(difference, tokenize):
    baseline, options = EQUAL[difference]
    hypotheses = HYPOTHESES
    if difference == "words that match nothing":
        hypotheses = [line.replace(" w1 ", " y1 ") for line in HYPOTHESES]
        assert hypotheses != baseline
    assert p_value(hypotheses, REFERENCES, baseline, tokenize=tokenize, resamples=50, **options) == 1.0


def test_systems_that_match_nothing_have_p_one():
    nothing = ["x"] * len(REFERENCES)
    assert p_value(nothing, REFERENCES, ["y"] * len(REFERENCES), resamples=50) == 1.0


def test_the_parts_are_counted_in_integers():
    """float32, in which sacreBLEU adds, holds integers up to 2²⁴."""
    statistics = np.full((2, 10), 2**24 + 1)
    rows = np.zeros((1, 3), int)
    metric = sacrebleu.metrics.BLEU()
    exact = metric.compute_bleu([3 * (2**24 + 1)] * 4, [3 * (2**24 + 1)] * 4, 3 * (2**24 + 1), 3 * (2**24 + 1)).score
    assert scores._resampled(metric, statistics, rows)[0] == exact


@pytest.mark.parametrize("resamples", [0, -1, 2.5, True, "10"])
def test_a_bootstrap_needs_a_resample(resamples):
    with pytest.raises(InputError, match="resamples must be a whole number of at least 1; got"):
        scores.score(["a"], ["a"], ["a"], resamples=resamples)


@pytest.mark.parametrize("systems", [([], []), ([], [], [])])
def test_no_lines_are_refused(systems):
    with pytest.raises(InputError, match="there is nothing to score: the hypothesis and the reference have no lines"):
        scores.score(*systems)


@pytest.mark.parametrize("systems", [("a", ["a"]), (["a"], "a"), (["a"], ["a"], "a")])
def test_a_text_is_no_list_of_lines(systems):
    with pytest.raises(InputError, match="must be a list of lines; got one text"):
        scores.score(*systems)


@pytest.mark.parametrize("systems", [([None], ["a"]), (["a"], [3]), (["a"], ["a"], [b"a"])])
def test_a_line_is_text(systems):
    with pytest.raises(InputError, match=r"line 1 is .*; expected text"):
        scores.score(*systems)


@pytest.mark.parametrize("systems", [(["a\ud800"], ["a"]), (["a"], ["\udcff"]), (["a"], ["a"], ["\udc80"])])
def test_a_line_is_text_that_utf_8_can_hold(systems):
    with pytest.raises(InputError, match=r"line 1 holds a lone surrogate, which no text in UTF-8 has"):
        scores.score(*systems)
    assert scores.score(["a \U0001f600"] * 2, ["a \U0001f600"] * 2).bleu == 0.0  # two words have no four-grams
