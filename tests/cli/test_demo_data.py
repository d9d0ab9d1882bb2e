"""The demo's corpus: what its sentences say, and that nothing tested was trained on."""

import pytest

from normformer_rs import demo

pytest.importorskip("num2words")


@pytest.fixture(scope="module")
def corpus():
    return demo.corpus()


def test_sizes_are_those_announced(corpus):
    assert {name: len(pairs) for name, pairs in corpus._asdict().items()} == demo.SIZES


def test_no_sentence_of_valid_or_test_occurs_elsewhere(corpus):
    for side in ("english", "vietnamese"):
        sentences = [getattr(pair, side) for pairs in corpus for pair in pairs]
        assert len(sentences) == len(set(sentences)), side


def test_training_shows_every_word(corpus):
    trained = {word for pair in corpus.train for side in pair for word in side.split()}
    tested = {word for pair in corpus.valid + corpus.test for side in pair for word in side.split()}
    assert tested <= trained


def test_the_same_seed_makes_the_same_corpus(corpus):
    assert demo.corpus() == corpus
    assert demo.corpus(seed=2).test != corpus.test


@pytest.mark.parametrize(
    "pair",
    [
        ("zero", "không"),
        ("fifty five", "năm mươi lăm"),
        ("the first", "thứ nhất"),
        ("the fourth", "thứ tư"),
        ("the twenty first", "thứ hai mươi mốt"),
    ],
)
def test_basics_are_trained(corpus, pair):
    assert pair in corpus.train


def test_dates_follow_both_languages(corpus):
    words = demo._words()
    assert demo._date(21, "april", 1984, words) == (
        "the twenty first of april nineteen eighty four",
        "ngày hai mươi mốt tháng tư năm một nghìn chín trăm tám mươi bốn",
    )


def test_files_are_the_corpus(corpus, tmp_path):
    small = demo.Corpus(corpus.train[:5], corpus.valid[:2], corpus.test[:3])
    data = demo.write_corpus(tmp_path, small)
    assert (tmp_path / "test.vi").read_text(encoding="utf-8").splitlines() == [pair.vietnamese for pair in small.test]
    assert data.train_source == str(tmp_path / "train.en")
    assert data.valid_target == str(tmp_path / "valid.vi")
