"""Learning BPE, against the `tokenizers` library's trainer."""

import json
import random

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from normformer_rs import _core
from normformer_rs.errors import InputError

WORD_END = "</w>"


def by_tokenizers(lines: list[str], operations: int) -> list[tuple[str, str]]:
    """Its merges, when its first symbols have their numbers beforehand, alphabetically."""
    words = [word for line in lines for word in line.split(" ") if word]
    symbols = sorted({c for word in words for c in word} | {word[-1] + WORD_END for word in words})
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    trainer = trainers.BpeTrainer(
        show_progress=False,
        special_tokens=symbols,
        vocab_size=len(symbols) + operations,
        min_frequency=2,
        end_of_word_suffix=WORD_END,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return [tuple(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]][:operations]


def lines_of(letters: list[str], longest: int) -> list[str]:
    """Up to twelve lines of three words."""
    word = ["".join(random.choices(letters, k=random.randint(1, longest))) for _ in range(36)]
    return [" ".join(word[3 * i : 3 * i + 3]) for i in range(random.randint(1, 12))]


@pytest.mark.parametrize("operations", [1, 7, 60])
@pytest.mark.one_in(test=2)
def test_merges_are_those_of_tokenizers(operations):
    """Few letters and long words: overlapping pairs, ties, and symbols that several merges spell."""
    random.seed(11)
    learned = 0
    for _ in range(200):
        lines = lines_of(["a", "b", "\u00fc", WORD_END][: random.randint(1, 4)], random.randint(1, 30))
        expected = by_tokenizers(lines, operations)
        if not expected:
            with pytest.raises(InputError, match="no pair of characters occurs twice"):
                _core.learn_bpe(lines, operations)
        else:
            assert _core.learn_bpe(lines, operations) == expected, lines
            learned += 1
    assert learned > 150
