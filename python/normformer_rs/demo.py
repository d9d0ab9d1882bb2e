"""A generated translation task: numbers, ordinals and dates in words, English to Vietnamese.

num2words writes the words; nothing is downloaded. Sentence pairs are split by their content (a number, a date), so no
test item occurs in training.
"""

import functools
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ._optional import command, require
from .config import DataConfig, SearchConfig, TrainingConfig, TransformerConfig
from .errors import InputError
from .loop.progress import duration
from .text import read_json, write_lines

if TYPE_CHECKING:
    from .loop.history import History

MODEL: dict[str, Any] = {
    "d_model": 128,
    "d_ff": 256,
    "heads": 4,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "norm": "scalenorm",
    "fixnorm": True,
    "dropout": 0.1,
}
TRAINING: dict[str, Any] = {
    "updates": 400,
    "max_tokens": 3000,
    "lr": 3e-3,
    "warmup": 100,
    "clip_norm": 1.0,
    "evaluate_every": 100,
    "criterion": "bleu",
    "keep": 2,
}
DATA: dict[str, Any] = {"bpe_operations": 200}
"""With the settings MODEL, TRAINING and DATA, training takes at most 3 minutes on 2 cores and reaches BLEU 80 or
more."""

SIZES = {"train": 6000, "valid": 200, "test": 400}
SEED = 1
SHOWN = 5
"""The number of translations that a run prints."""
_DAYS = {
    "january": 31,
    "february": 28,
    "march": 31,
    "april": 30,
    "may": 31,
    "june": 30,
    "july": 31,
    "august": 31,
    "september": 30,
    "october": 31,
    "november": 30,
    "december": 31,
}
_APRIL = 4
_THU = {1: "nhất", 4: "tư"}
"""The words after "thứ" in the two ordinals where it is not the word of the number."""


class Pair(NamedTuple):
    """A sentence and its translation."""

    english: str
    vietnamese: str


class Corpus(NamedTuple):
    """Disjoint sets of pairs."""

    train: list[Pair]
    valid: list[Pair]
    test: list[Pair]


class Outcome(NamedTuple):
    """The result of a demo run."""

    bleu: float
    """The BLEU of the test set, 0 to 100, by multi-bleu.perl's formula."""
    seconds: float
    """The time of training and translation."""
    history: "History"
    translations: list[tuple[str, str, str]]
    """Triples of the English, the model's Vietnamese and the right Vietnamese."""


def corpus(seed: int = SEED) -> Corpus:
    """Returns the demo's pairs, the same for the same seed. Every number below 100 is in the training set.

    Errors: ImportError without num2words.
    """
    words = _words()
    draw = random.Random(seed)
    wanted = sum(SIZES.values())
    pairs: list[Pair] = []
    seen: set[str] = set()
    for pair in _items(draw, words):
        # A pair is left out if one of its sentences has occurred already, so that the sets share no sentence.
        if pair.english not in seen and pair.vietnamese not in seen:
            seen.update(pair)
            pairs.append(pair)
        if len(pairs) == wanted:
            break
    basics, rest = pairs[:_BASICS], pairs[_BASICS:]
    draw.shuffle(rest)
    valid, test = SIZES["valid"], SIZES["test"]
    return Corpus(basics + rest[valid + test :], rest[:valid], rest[valid : valid + test])


_BASICS = 200  # the first 100 numbers and 100 ordinals, in which every word occurs; all are in the training set


def _items(draw: random.Random, words: Callable[..., str]) -> Iterator[Pair]:
    """Yields the basics, then random items without end: 40 % cardinals, 20 % ordinals, 40 % dates. `words`: the
    function of `_words`."""
    for n in range(100):
        yield _cardinal(n, words)
        yield _ordinal(n + 1, words)
    while True:
        kind = draw.random()
        if kind < 0.4:
            yield _cardinal(draw.randrange(10 ** draw.randint(3, 6)), words)
        elif kind < 0.6:
            yield _ordinal(draw.randrange(1, 10 ** draw.randint(3, 4)), words)
        else:
            month = draw.choice(list(_DAYS))
            yield _date(draw.randint(1, _DAYS[month]), month, draw.randrange(1100, 2030), words)


def _cardinal(n: int, words: Callable[..., str]) -> Pair:
    """Returns the number n in both languages. `words`: the function of `_words`."""
    return Pair(words(n, lang="en"), words(n, lang="vi"))


def _ordinal(n: int, words: Callable[..., str]) -> Pair:
    """Returns the ordinal of n in both languages: "the" or "thứ", and a word. `words`: the function of `_words`."""
    return Pair(f"the {words(n, lang='en', to='ordinal')}", f"thứ {_THU.get(n) or words(n, lang='vi')}")


def _date(day: int, month: str, year: int, words: Callable[..., str]) -> Pair:
    """Returns a date in both languages. `month`: its English name; `words`: the function of `_words`."""
    english = f"the {words(day, lang='en', to='ordinal')} of {month} {words(year, lang='en', to='year')}"
    number = 1 + list(_DAYS).index(month)
    # Vietnamese calls April "tháng tư", with the ordinal's word. All other months have the number's word.
    month_vi = _THU[number] if number == _APRIL else words(number, lang="vi")
    return Pair(english, f"ngày {words(day, lang='vi')} tháng {month_vi} năm {words(year, lang='vi')}")


@functools.cache
def _words() -> Callable[..., str]:
    """Returns a function that writes numbers in words, without commas and hyphens."""
    num2words = require("num2words", "the demo's text").num2words

    @functools.cache  # most numbers occur many times
    def words(n: int, lang: str, to: str = "cardinal") -> str:
        return num2words(n, lang=lang, to=to).replace(",", "").replace("-", " ")

    return words


def write_corpus(folder: str | Path, made: Corpus | None = None) -> DataConfig:
    """Writes train, valid and test as .en and .vi files into the folder; returns the options that name them. `made`:
    the pairs; None for those of `corpus()`."""
    made, folder = made or corpus(), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in made._asdict().items():
        write_lines(str(folder / f"{name}.en"), [pair.english for pair in pairs])
        write_lines(str(folder / f"{name}.vi"), [pair.vietnamese for pair in pairs])
    # The keys are DataConfig's options train_source, train_target, valid_source and valid_target.
    files: dict[str, Any] = {
        f"{part}_{side}": str(folder / f"{part}.{ending}")
        for part in ("train", "valid")
        for side, ending in (("source", "en"), ("target", "vi"))
    }
    return DataConfig(**files, **DATA)


def configs(updates: int | None = None) -> tuple[TransformerConfig, TrainingConfig]:
    """Returns the demo's options of model and training, with another number of updates if it is given."""
    training = TrainingConfig(**TRAINING)
    if updates is not None:
        if updates < 1:
            raise InputError(f"updates must be at least 1, got {updates}")
        every = max(1, min(training.evaluate_every, updates))  # type: ignore[attr-defined]
        training = training.replace(updates=updates, evaluate_every=every)
    return TransformerConfig(**MODEL), training


def is_demo(output: Path, texts: Path) -> bool:
    """Returns True if `output` holds a run on the demo's text. `texts`: the folder of that text."""
    config = output / "config.json"
    if not config.exists():
        return False
    try:
        source = read_json(config, "it is no demo's")["data"]["train_source"]
        return Path(source).resolve() == (texts / "train.en").resolve()
    except (ValueError, KeyError, TypeError):  # the config.json belongs to another program or to a language model
        return False


def run(output: str | Path, *, updates: int | None = None, progress: bool = True) -> Outcome:
    """Trains on the corpus, translates the test set, and prints translations, BLEU, the time and the curves' path.

    The run goes to `output`, where it replaces only an earlier demo's, and the text to `output`-text.
    Errors: InputError if `output` holds another run.
    """
    from . import _core  # imported only here, so that `demo --help` does not import torch
    from .loop.training import Trainer
    from .loop.translation import translate

    output = Path(output)
    demo_corpus, texts = corpus(), output.with_name(output.name + "-text")
    overwrite = is_demo(output, texts)
    if not overwrite and output.joinpath("config.json").exists():
        raise InputError(f"{output} already holds a run that is not the demo's: choose another output")
    data = write_corpus(texts, demo_corpus)
    start = time.monotonic()
    history = Trainer(*configs(updates), data).fit(output, overwrite=overwrite, progress=progress)
    trained = time.monotonic() - start
    translated = translate(output, [pair.english for pair in demo_corpus.test], SearchConfig(beam=4))
    hypotheses = [translations[0].text for translations in translated]
    seconds = time.monotonic() - start
    scored = json.loads(_core.bleu(hypotheses, [pair.vietnamese for pair in demo_corpus.test]))
    shown = [(pair.english, hypothesis, pair.vietnamese) for pair, hypothesis in zip(demo_corpus.test, hypotheses)]
    outcome = Outcome(scored["bleu"], seconds, history, shown)
    _report(outcome, trained, scored["text"], output)
    return outcome


def _report(outcome: Outcome, trained: float, bleu: str, output: Path) -> None:
    """Prints some translations, BLEU, the times and the path of the curves. `trained`: the seconds of training; `bleu`:
    BLEU and its parts, as one line; `output`: the run's folder."""
    for english, hypothesis, reference in outcome.translations[:SHOWN]:
        print(f"\n  {english}\n  → {hypothesis}")
        if hypothesis != reference:
            print(f"  ✗ {reference}")
    print(f"\ntest set, {len(outcome.translations)} items that training never saw: {bleu}")
    print(f"time: {duration(trained)} training, {duration(outcome.seconds)} in all")
    curves = output / "curves.png"
    print(f"curves: {curves}" if curves.exists() else f"curves: not drawn, {command('matplotlib')}")
