"""BLEU by sacreBLEU's and multi-bleu.perl's words; the paired bootstrap: p is 1 for systems that are equal."""

import json
import random
import shutil
import subprocess

import numpy as np
import pytest

from normformer_rs import InputError, _core, scores

sacrebleu = pytest.importorskip("sacrebleu")


def corpus(lines=60, wrong=0.3, seed=1):
    """References, and a system that gets a share of the words wrong."""
    draw = random.Random(seed)
    words = [f"w{i}" for i in range(40)]
    references = [[draw.choice(words) for _ in range(draw.randint(4, 12))] for _ in range(lines)]
    made = [[draw.choice(words) if draw.random() < wrong else word for word in line] for line in references]
    return [" ".join(line) for line in made], [" ".join(line) for line in references]


def expected(hypotheses, references, baseline, resamples=200, seed=12345, **options):
    """p of differences d: how often a resample's is as far from their mean as the whole text's is from 0."""
    metric = sacrebleu.metrics.BLEU(force=True, **options)

    def difference(rows):
        ours, theirs, right = ([lines[i] for i in rows] for lines in (hypotheses, baseline, references))
        return metric.corpus_score(ours, [right]).score - metric.corpus_score(theirs, [right]).score

    draws = np.random.default_rng(seed).choice(len(references), size=(resamples, len(references)))
    found = np.array([difference(rows) for rows in draws])
    d = difference(range(len(references)))
    return (1 + (np.abs(found - found.mean()) >= abs(d) - 1e-7).sum()) / (1 + resamples)


def p_value(*systems, **options):
    return scores.score(*systems, **options).comparison.p_value


@pytest.mark.parametrize("wrong", [0.28, 0.31, 0.35, 0.5])
def test_p_is_of_the_shifted_resamples(wrong):
    hypotheses, references = corpus()
    baseline, _ = corpus(wrong=wrong, seed=1)
    found = scores.score(hypotheses, references, baseline, tokenize="none", resamples=200).comparison
    assert found.p_value == pytest.approx(expected(hypotheses, references, baseline, tokenize="none"), abs=1e-12)
    assert found.resamples == 200 and 0 < found.p_value < 1


def test_the_seed_is_sacrebleus(monkeypatch):
    systems = (*corpus(), corpus(wrong=0.31)[0])
    default = p_value(*systems, resamples=200)
    monkeypatch.setenv("SACREBLEU_SEED", "8")
    assert p_value(*systems, resamples=200) == pytest.approx(expected(*systems, seed=8), abs=1e-12) != default
    monkeypatch.setenv("SACREBLEU_SEED", "none")
    assert 0 < p_value(*systems, resamples=200) <= 1
    monkeypatch.setenv("SACREBLEU_SEED", "seven")
    with pytest.raises(InputError, match='SACREBLEU_SEED must be a whole number or "none"; got "seven"'):
        p_value(*systems)


@pytest.mark.long
def test_equal_systems_are_called_different_in_one_of_twenty_cases():
    """1,000 pairs of systems that are as good as each other."""
    found = []
    for seed in range(1000):
        ours, references = corpus(lines=80, wrong=0.25, seed=2 * seed)
        draw, words = random.Random(2 * seed + 1), [f"w{i}" for i in range(40)]
        theirs = [" ".join(draw.choice(words) if draw.random() < 0.25 else word for word in line.split())
                  for line in references]  # fmt: skip
        found.append(p_value(ours, references, theirs, tokenize="none", resamples=200))
    assert 0.04 <= np.mean(np.array(found) < 0.05) <= 0.06
    assert 0.45 <= np.mean(np.array(found) > 0.5) <= 0.55


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


# Words.

ALPHABETS = (
    *("aAzZ09", " ", ".,-\u2010\u2013'", '!"#$%&()*+/:;<=>?@[]^_`{|}~', "\u4e2d\u6587\u4db5\u4db6\u9fbb\u9fbc\u3400"),
    *(
        "\u3002\uff0c\u300c\u3000\u30a2\u3042",
        "\u0416\u0431\u00e9\u00df\u00dc\u0130",
        "\u2000\u2001\u2a6d\u2a6e\u2028",
        "\t\x0b\x1c\x85\u00a0",
    ),
    *("\U00020000\U0002a6d6\U0002f800\U0001f600", "\u200b\ufeff\ufffd", "\uf900\ufa2e\ufad9\ufe10\ufe50\uffef\ufff0"),
)
PIECES = ["&quot;", "&amp;lt;", "<skipped>", "1,000.5", "a.b", "5-6", ". . ,", "--", "<unk>"]


def random_line(draw):
    pieces = (draw.choice(PIECES) if draw.random() < 0.1 else draw.choice(draw.choice(ALPHABETS)) for _ in range(40))
    return "".join(pieces)[: draw.randint(0, 60)]


@pytest.mark.parametrize("tokenize", ["none", "13a", "zh", "char"])
@pytest.mark.one_in(test=2)
def test_words_of_evaluations_are_sacrebleus(tokenize):
    """On random lines in many scripts, and on single characters: the same counts, so the same words."""
    draw = random.Random(tokenize)
    metric = sacrebleu.metrics.BLEU(tokenize=tokenize, smooth_method="none", force=True)
    characters = [
        f"a{chr(c)}b{chr(c)}{chr(c)}1" for c in range(1, 0x30000, 401) if c != 10 and not 0xD800 <= c < 0xE000
    ]
    lines = [random_line(draw) for _ in range(250)] + characters
    for line in lines:
        cut = draw.randint(0, len(line))
        hypothesis, reference = line, line[:cut] + random_line(draw)[:5] + line[cut:]
        found = json.loads(_core.bleu([hypothesis], [reference], False, tokenize))
        wanted = metric.corpus_score([hypothesis], [[reference]])
        assert (found["hyp_len"], found["ref_len"]) == (wanted.sys_len, wanted.ref_len), ascii(line)
        assert found["precisions"] == pytest.approx(wanted.precisions), ascii(line)
        assert wanted.sys_len == 0 or found["bleu"] == pytest.approx(wanted.score), ascii(line)


def test_an_unknown_tokeniser_of_evaluations_is_named():
    with pytest.raises(
        InputError, match=r'unknown evaluation_tokenize "zhh" \(did you mean "zh"\?\).*none, 13a, zh, char'
    ):
        _core.bleu(["a"], ["a"], False, "zhh")


def test_the_multi_bleu_line_reads_bytes():
    def line(hypothesis, reference, **options):
        return scores.score([hypothesis], [reference], **options).multi_bleu

    split = line("it costs 10\u00a0000 euros in the town", "it costs 10\u00a0000 euros in a town")
    assert split.endswith("hyp_len=7, ref_len=7)")
    upper, lower = (
        "\u00dcBER den \u00c4rger der \u00d6ffentlichkeit",
        "\u00fcber den \u00e4rger der \u00f6ffentlichkeit",
    )
    assert line(upper, lower, lowercase=True).startswith("BLEU = 0.00, 40.0/")
    assert line("THE CAT SAT DOWN", "the cat sat down", lowercase=True).startswith("BLEU = 100.00")


PERL = r"""
open(A, $ARGV[0]); open(B, $ARGV[1]); my $lower = $ARGV[2];
while (my $a = <A>) { my $b = <B>; chomp($a, $b); ($a, $b) = (lc $a, lc $b) if $lower;
  my (@a) = split(" ", $a); my (@b) = split(" ", $b); my %b; $b{$_}++ for @b; my %a; $a{$_}++ for @a;
  my $match = 0; for (keys %a) { my $most = $b{$_} || 0; $match += $a{$_} < $most ? $a{$_} : $most; }
  print scalar(@a), " ", scalar(@b), " $match\n"; }
"""
"""Words and matches of lines, read as Perl reads a file: by bytes."""


@pytest.mark.skipif(shutil.which("perl") is None, reason="needs Perl")
@pytest.mark.parametrize("lowercase", [False, True])
def test_words_of_the_multi_bleu_line_are_perls(tmp_path, lowercase):
    draw = random.Random(3)
    pairs = [(random_line(draw), random_line(draw)) for _ in range(150)]
    for name, lines in zip("ab", zip(*pairs)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    command = ["perl", "-e", PERL, tmp_path / "a", tmp_path / "b", "1" if lowercase else ""]
    counts = subprocess.run(
        command, capture_output=True, check=True, env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"}
    ).stdout
    for (a, b), line in zip(pairs, counts.decode().splitlines(), strict=True):
        found = json.loads(_core.bleu([a], [b], lowercase))
        matches = round(found["precisions"][0] * found["hyp_len"] / 100)
        assert [found["hyp_len"], found["ref_len"], matches] == [int(n) for n in line.split()], ascii((a, b))
