"""Converts corpora from the form in which their publishers release them to the files that reproductions read.

The user unpacks a release below one folder; sub-folders do not matter. `prepare` finds the files by name, makes the
corpora in a temporary folder, and moves them to their place when they are complete.
"""

import gzip
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from itertools import zip_longest
from pathlib import Path
from typing import IO, NamedTuple

from ..errors import InputError
from . import moses, verses
from .corpora import CORPORA, Corpus, found


class Raw:
    """The files below a folder, found by their names. Files below the folder `but` are left out; there the corpora may
    lie that were made earlier."""

    def __init__(self, folder: Path, but: Path | None = None):
        """Finds all files below `folder`, in alphabetical order, except those below `but`."""
        self.folder = folder
        paths = sorted(Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
        # Only a `but` inside the folder has files to leave out.
        if but is not None and folder.resolve() in but.resolve().parents:
            paths = [path for path in paths if but.resolve() not in path.resolve().parents]
        self._paths = paths

    def find(self, pattern: str) -> list[Path]:
        """Returns the files whose names, without .gz, match the `fnmatch` pattern. If several files have the same name,
        only the first one is returned."""
        by_name: dict[str, Path] = {}
        for path in self._paths:
            if fnmatch(name := path.name.removesuffix(".gz"), pattern):
                by_name.setdefault(name, path)
        return list(by_name.values())

    def lines(self, name: str) -> Iterator[str]:
        """Yields the lines of the file with that name, without their line ends."""
        return lines_of(self.find(name)[0])


Make = Callable[[Raw, Path, int], None]
"""A function that writes a release's corpora; its arguments are the files, the folder to write to and the number of
processes."""


class Release(NamedTuple):
    """A publisher's files, and the corpora that are made from them."""

    about: str
    fetch: tuple[str, ...]
    """The downloads, each described by its name, size and page."""
    files: tuple[str, ...]
    """Names or patterns of the files that are needed; at least one file must match each of them."""
    corpora: tuple[str, ...]
    make: Make
    digests: Mapping[str, str] = {}
    """The SHA-256 of the corpora's files, by path. For others only the number of lines is checked."""


def lines_of(path: Path) -> Iterator[str]:
    """Yields the lines of a UTF-8 file, plain or gzip. Only a newline ends a line, not Unicode's other separators."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.rstrip(b"\r\n").decode("utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"{path}: line {number} is not UTF-8 ({error.reason}): fetch the file again") from None


def _opened(path: Path) -> IO[bytes]:
    """Opens a file to read its bytes, unpacked if it is a gzip file."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"  # the bytes with which every gzip file begins
    return gzip.open(path) if packed else path.open("rb")  # type: ignore[return-value]


def _write(path: Path, lines: Iterable[str]) -> None:
    """Writes a text file, and makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        file.writelines(f"{line}\n" for line in lines)


def _write_pairs(paths: tuple[Path, Path], pairs: Iterable[tuple[str, str]]) -> None:
    """Writes the first sides of the pairs to the first path and the second sides to the second, and makes the
    folders."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    with (
        paths[0].open("w", encoding="utf-8", newline="") as first,
        paths[1].open("w", encoding="utf-8", newline="") as second,
    ):
        for source, target in pairs:
            first.write(f"{source}\n")
            second.write(f"{target}\n")


def _pairs(first: Iterable[str], second: Iterable[str], what: str) -> Iterator[tuple[str, str]]:
    """Yields the pairs of lines of two texts. Errors: InputError, which names `what`, if one text is shorter."""
    for number, (source, target) in enumerate(zip_longest(first, second), 1):
        if source is None or target is None:
            raise InputError(f"{what}: one side ends before line {number}, the other goes on: fetch both files again")
        yield source, target


# Corpora of TED talks

_TED_PAIRS = {"gl→en": ("gl", "en"), "sk→en": ("sk", "en"), "en→he": ("en", "he"), "ar→en": ("ar", "en")}
_ABSENT = {"", "__NULL__", "_ _ NULL _ _"}
"""The entries that stand for a missing translation in the table of TED talks."""


def _make_ted(raw: Raw, folder: Path, _: int) -> None:
    """Makes the TED corpora. The table of Qi et al. has a column for each language; the corpus of a pair gets the rows
    in which both languages have a text."""
    for part in ("train", "dev", "test"):
        rows = raw.lines(f"all_talks_{part}.tsv")
        columns = next(rows).split("\t")
        places = {language: columns.index(language) for pair in _TED_PAIRS.values() for language in pair}
        kept: dict[str, list[tuple[str, str]]] = {name: [] for name in _TED_PAIRS}
        for row in rows:
            cells = row.split("\t")
            for name, (source, target) in _TED_PAIRS.items():
                pair = cells[places[source]].strip(), cells[places[target]].strip()
                if _ABSENT.isdisjoint(pair):
                    kept[name].append(pair)
        for name, (source, target) in _TED_PAIRS.items():
            prefix = folder / f"{source}-{target}" / part
            _write_pairs((prefix.with_suffix(f".{source}"), prefix.with_suffix(f".{target}")), kept[name])


# Corpora of IWSLT

_IWSLT15 = {"train": "train", "dev": "tst2012", "test": "tst2013"}
"""For each part of the corpus, the name of the release's file."""
_IWSLT14_TESTS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
# Lines with the first tags hold no speech. The other tags enclose sentences, which stay.
_NO_TEXT = ("<url>", "<talkid>", "<keywords>")
_TAGS = re.compile("</?(?:title|description)>")


def _make_iwslt15(raw: Raw, folder: Path, _: int) -> None:
    """Copies the files of IWSLT'15 under the corpus' names."""
    for part, name in _IWSLT15.items():
        for language in ("en", "vi"):
            _write(folder / "en-vi" / f"{part}.{language}", raw.lines(f"{name}.{language}"))


def _make_iwslt14(raw: Raw, folder: Path, workers: int) -> None:
    """Follows fairseq's prepare-iwslt14.sh: Moses' tokeniser, pairs with 1 to 175 words and a ratio of at most 1.5,
    lower case, every 23rd pair for validation, 10,000 joint BPE merges."""
    languages = ("de", "en")

    def training_lines(language: str) -> Iterator[str]:
        """Yields the sentences of the talks, without the lines and the tags that hold no speech."""
        lines = raw.lines(f"train.tags.de-en.{language}")
        return (_TAGS.sub("", line) for line in lines if not any(tag in line for tag in _NO_TEXT))

    def test_lines(language: str) -> Iterator[str]:
        """Yields the sentences of all test sets, which are joined to one."""
        for name in _IWSLT14_TESTS:
            yield from moses.segments(raw.lines(f"IWSLT14.{name}.de-en.{language}.xml"))

    def tokenized(lines: Iterator[str], language: str) -> Iterator[str]:
        return moses.tokenized(lines, language, workers)

    german, english = (tokenized(training_lines(language), language) for language in languages)
    training_pairs = _pairs(german, english, "train.tags.de-en")
    kept = moses.cleaned(training_pairs, most=175, ratio=1.5)
    pairs = ((source.lower(), target.lower()) for source, target in kept)
    parts = _Parts(folder / "iwslt14.tokenized.de-en", languages)
    parts.split(pairs, every=23)
    for language in languages:
        _write(parts.whole("test", language), (line.lower() for line in tokenized(test_lines(language), language)))
    parts.cut(10_000, workers, most=None)


class _Parts:
    """A corpus that is being made. Its parts are written with whole words first, and then with words split by BPE."""

    def __init__(self, folder: Path, languages: tuple[str, str]):
        """`folder` is the corpus' folder, `languages` are its source and target."""
        self.folder, self.languages = folder, languages

    def whole(self, part: str, language: str) -> Path:
        """Returns the path of a part's file with whole words."""
        return self.folder / "whole" / f"{part}.{language}"

    def _both(self, part: str) -> tuple[Path, Path]:
        """Returns the paths of both sides of a part with whole words: source, target."""
        return self.whole(part, self.languages[0]), self.whole(part, self.languages[1])

    def split(self, pairs: Iterable[tuple[str, str]], every: int) -> None:
        """Writes every pair whose number is a multiple of `every` to the validation part, all others to the training
        part."""
        valid_source, valid_target = self._both("valid")
        valid_source.parent.mkdir(parents=True, exist_ok=True)
        with (
            valid_source.open("w", encoding="utf-8", newline="") as first,
            valid_target.open("w", encoding="utf-8", newline="") as second,
        ):

            def training_pairs() -> Iterator[tuple[str, str]]:
                """Yields the training pairs, and writes the validation pairs that lie between them."""
                for number, (source, target) in enumerate(pairs, 1):
                    if number % every:
                        yield source, target
                    else:
                        first.write(f"{source}\n")
                        second.write(f"{target}\n")

            _write_pairs(self._both("train"), training_pairs())

    def cut(self, operations: int, workers: int, most: int | None) -> None:
        """Learns joint BPE from the training part and applies it to all parts. If `most` is given, pairs of training
        and validation stay only with 1 to `most` pieces on each side and a ratio of at most 1.5."""
        codes = self.folder / "code"
        moses.learn_bpe([*self._both("train")], codes, operations)
        for part in ("train", "valid", "test"):
            sources, targets = (moses.split(lines_of(path), codes, workers) for path in self._both(part))
            pairs = _pairs(sources, targets, part)
            if most is not None and part != "test":
                pairs = moses.cleaned(pairs, most, ratio=1.5)
            first, second = (self.folder / f"{part}.{language}" for language in self.languages)
            _write_pairs((first, second), pairs)
        shutil.rmtree(self.folder / "whole")


# Corpora of WMT

_GOOGLE = {"train": "train.tok.clean.bpe.32000", "valid": "newstest2013.tok.bpe.32000",
           "test": "newstest2014.tok.bpe.32000"}  # fmt: skip
"""For each part of the corpus, the name of Google's file."""


def _make_wmt14(raw: Raw, folder: Path, _: int) -> None:
    """Copies Google's files of WMT'14, which are tokenised and in pieces, under the corpus' names."""
    for part, name in _GOOGLE.items():
        for language in ("en", "de"):
            _write(folder / "wmt16_en_de_bpe32k" / f"{part}.{language}", raw.lines(f"{name}.{language}"))


def _statmt(folder: str, target: str, parts: tuple[str, ...], test: str, every: int) -> Make:
    """Returns a function that follows fairseq's prepare-wmt14en2de.sh and -en2fr.sh: it normalises punctuation, removes
    non-printing characters, tokenises as Moses does with dashes, takes every `every`-th pair for validation, learns
    40,000 joint BPE merges, and keeps pairs with 1 to 250 pieces and a ratio of at most 1.5. The arguments: the corpus'
    folder, the language into which English is translated, the names of the training files and of the test set, and
    `every`."""

    def make(raw: Raw, into: Path, workers: int) -> None:
        """Makes the corpus from the files `raw`, in the folder `into`."""

        def training_lines(language: str) -> Iterator[str]:
            """Yields the lines of all training files of a language."""
            for part in parts:
                yield from raw.lines(f"{part}.{language}")

        def test_lines(language: str) -> Iterator[str]:
            """Yields the sentences of the test set in a language. English is the source."""
            side = "src" if language == "en" else "ref"
            return moses.segments(raw.lines(f"{test}-{side}.{language}.sgm"))

        languages = ("en", target)
        first, second = (moses.tokenized(training_lines(language), language, workers, dashes=True, normalised=True)
                         for language in languages)  # fmt: skip
        corpus = _Parts(into / folder, languages)
        corpus.split(_pairs(first, second, "the training text"), every)
        for language in languages:
            # fairseq's scripts do not normalise the test set.
            lines = moses.tokenized(test_lines(language), language, workers, dashes=True)
            _write(corpus.whole("test", language), lines)
        corpus.cut(40_000, workers, most=250)

    return make


def _statmt_files(target: str, parts: tuple[str, ...], test: str) -> tuple[str, ...]:
    """Returns the names of the files that `_statmt` reads, with the same arguments."""
    texts = (f"{part}.{language}" for part in parts for language in ("en", target))
    return (*texts, f"{test}-src.en.sgm", f"{test}-ref.{target}.sgm")


_WMT17 = ("europarl-v7.de-en", "commoncrawl.de-en", "news-commentary-v12.de-en")
_WMT14_FR = ("europarl-v7.fr-en", "commoncrawl.fr-en", "undoc.2000.fr-en", "news-commentary-v9.fr-en",
             "giga-fren.release2.fixed")  # fmt: skip

# Corpora of many languages

_OPUS_NAME = re.compile(r"opus\.(?P<pair>\w+-\w+)-(?P<part>train|dev|test)\.(?P<language>\w+)")
_UN_NAME = re.compile(r"MultiUN\.(?P<pair>\w+-\w+)\.(?P<language>\w+)")
_HELD_OUT = 4000
"""The number of pairs of each language of MultiUN in the validation set, and in the test set."""


def _make_opus100(raw: Raw, folder: Path, _: int) -> None:
    """Makes the OPUS-100 corpora: all languages in one file for each direction and part."""
    for part, name in (("train", "train"), ("valid", "dev"), ("test", "test")):
        _append_pairs(folder, "opus100", part, _with_english(raw, f"opus.*-{name}.*", _OPUS_NAME))


def _with_english(raw: Raw, pattern: str, form: re.Pattern[str]) -> Iterator[tuple[str, Iterator[tuple[str, str]]]]:
    """Yields the name of each language that is paired with English, and its sentence pairs (other language, English),
    in the alphabetical order of the language pairs' names. `pattern` finds the files; `form` reads the groups `pair`
    and `language` from a file's name."""
    sides: dict[str, dict[str, Path]] = {}
    for path in raw.find(pattern):
        match = form.fullmatch(path.name.removesuffix(".gz"))
        if match and "en" in match["pair"].split("-"):
            sides.setdefault(match["pair"], {})[match["language"]] = path
    for pair, files in sorted(sides.items()):
        first, second = pair.split("-")
        other = second if first == "en" else first
        if {"en", other} <= files.keys():
            yield other, _pairs(lines_of(files[other]), lines_of(files["en"]), pair)


def _append_pairs(
    folder: Path, name: str, part: str, languages: Iterable[tuple[str, Iterable[tuple[str, str]]]]
) -> None:
    """Appends the sentence pairs (other language, English) of all languages to a part's files, in both directions, with
    the target language's tag before each source sentence (Johnson et al. 2017)."""
    paths = [
        folder / f"{name}-{way}" / f"{part}.{side}" for way in ("to-en", "from-en") for side in ("source", "target")
    ]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.open("a", encoding="utf-8", newline="") for path in paths]
    try:
        for language, pairs in languages:
            for other, english in pairs:
                # In the order of `paths`: source and target to English, then source and target from English.
                lines = (f"<2en> {other}", english, f"<2{language}> {english}", other)
                for file, line in zip(files, lines):
                    file.write(f"{line}\n")
    finally:
        for file in files:
            file.close()


def _make_multiun(raw: Raw, folder: Path, _: int) -> None:
    """Makes the MultiUN corpora. Of each language's last 8,000 pairs, 4,000 are for validation and 4,000 for the
    test."""
    for language, pairs in _with_english(raw, "MultiUN.*", _UN_NAME):
        last: list[tuple[str, str]] = []

        # A generator reads a loop's variables only when it runs, so the defaults keep the values of this language.
        def training_pairs(pairs: Iterator[tuple[str, str]] = pairs, last: list[tuple[str, str]] = last) -> Iterator:
            """Yields all pairs but the last 8,000, which are left in `last`."""
            for pair in pairs:
                last.append(pair)
                if len(last) > 2 * _HELD_OUT:
                    yield last.pop(0)

        # Writing the training part runs `training_pairs` to its end, so `last` is complete afterwards.
        _append_pairs(folder, "multiun", "train", [(language, training_pairs())])
        _append_pairs(folder, "multiun", "valid", [(language, last[:_HELD_OUT])])
        _append_pairs(folder, "multiun", "test", [(language, last[_HELD_OUT:])])


# Corpora whose files are only copied


def _copied(corpus: str) -> Make:
    """Returns a function that copies the files of a corpus, which have the same names in the release."""

    def make(raw: Raw, folder: Path, _: int) -> None:
        """Copies the files. A file of the release is found by its name, in any sub-folder."""
        for path in CORPORA[corpus].files.values():
            _write(folder / path, raw.lines(Path(path).name))

    return make


def _names(corpus: str) -> tuple[str, ...]:
    """Returns the names of a corpus' files without their folders."""
    return tuple(Path(path).name for path in CORPORA[corpus].files.values())


def _make_verses(raw: Raw, folder: Path, _: int) -> None:
    """Makes the corpus of Bible verses from the two modules of the SWORD project."""
    modules = {language: raw.find(f"{name}.conf")[0] for language, name in verses.MODULES.items()}
    kept: dict[str, list[tuple[str, str]]] = {"train": [], "valid": [], "test": []}
    for part, source, target in verses.pairs(modules["en"], modules["es"]):
        kept[part].append((source, target))
    for part, pairs in kept.items():
        prefix = folder / "verses-en-es" / part
        _write_pairs((prefix.with_suffix(".en"), prefix.with_suffix(".es")), pairs)


_EUROPARL = "training-parallel-europarl-v7.tgz (658 MB), https://www.statmt.org/wmt13/"
_COMMONCRAWL = "training-parallel-commoncrawl.tgz (918 MB), https://www.statmt.org/wmt13/"
_TESTS = "test-full.tgz (a few MB), https://www.statmt.org/wmt14/translation-task.html"

RELEASES: dict[str, Release] = {
    "multi30k": Release(
        "Multi30k en→fr, raw text",
        ("data/task1/raw/{train,val,test_2016_flickr}.{en,fr}.gz (2 MB), https://github.com/multi30k/dataset",),
        _names("multi30k-french"), ("multi30k-french",), _copied("multi30k-french"),
    ),
    "multi30k-bpe": Release(
        "Multi30k en→de in pieces",
        ("the files {train,valid,test.2016}.{en,de} of its BPE text (7 MB), https://github.com/LividWo/Revisit-MMT",),
        _names("multi30k-bpe"), ("multi30k-bpe",), _copied("multi30k-bpe"),
    ),
    "verses": Release(
        "verses en→es, the World English Bible and the Reina-Valera of 1909, both in the public domain",
        ("Debian's packages sword-text-web 426.0-1 (4 MB) and sword-text-sparv 2.60-1 (3 MB): `apt-get download NAME`, "
         "`dpkg-deb -x FILE .`",),
        tuple(f"{name}.conf" for name in verses.MODULES.values()), ("verses",), _make_verses,
        {f"verses-en-es/{name}": digest for name, digest in verses.DIGESTS.items()},
    ),
    "shakespeare": Release(
        "tinyshakespeare",
        ("data/tinyshakespeare/input.txt (1 MB), https://github.com/karpathy/char-rnn",),
        ("input.txt",), ("shakespeare",), _copied("shakespeare"),
    ),
    "ted": Release(
        "TED talks: gl→en, sk→en, en→he, ar→en",
        ("ted_talks.tar.gz (352 MB), https://github.com/neulab/word-embeddings-for-nmt",),
        tuple(f"all_talks_{part}.tsv" for part in ("train", "dev", "test")), tuple(_TED_PAIRS), _make_ted,
    ),
    "iwslt15": Release(
        "IWSLT'15 en→vi",
        ("{train,tst2012,tst2013}.{en,vi} (32 MB), https://nlp.stanford.edu/projects/nmt/",),
        tuple(f"{name}.{language}" for name in _IWSLT15.values() for language in ("en", "vi")), ("en→vi",),
        _make_iwslt15,
    ),
    "iwslt14": Release(
        "IWSLT'14 de→en",
        ("de-en.tgz of 2014-01 (19 MB), https://wit3.fbk.eu/2014-01",),
        (*(f"train.tags.de-en.{language}" for language in ("de", "en")),
         *(f"IWSLT14.{name}.de-en.{language}.xml" for name in _IWSLT14_TESTS for language in ("de", "en"))),
        ("iwslt14",), _make_iwslt14,
    ),
    "wmt14": Release(
        "WMT'14 en→de in pieces, as Vaswani et al. 2017 had it",
        ("wmt16_en_de.tar.gz (4.5 million pairs), https://github.com/facebookresearch/fairseq/tree/main/examples/scaling_nmt",),
        tuple(f"{name}.{language}" for name in _GOOGLE.values() for language in ("en", "de")), ("wmt14",), _make_wmt14,
    ),
    "wmt14-fr": Release(
        "WMT'14 en→fr",
        (_EUROPARL, _COMMONCRAWL, "training-parallel-un.tgz (2.37 GB), https://www.statmt.org/wmt13/",
         "training-parallel-nc-v9.tgz (about 0.1 GB), https://www.statmt.org/wmt14/translation-task.html",
         "training-giga-fren.tar (2.6 GB), https://www.statmt.org/wmt10/", _TESTS),
        _statmt_files("fr", _WMT14_FR, "newstest2014-fren"), ("wmt14-fr",),
        _statmt("wmt14_en_fr", "fr", _WMT14_FR, "newstest2014-fren", every=1333),
    ),
    "wmt17": Release(
        "WMT'17 en→de",
        (_EUROPARL, _COMMONCRAWL,
         "training-parallel-nc-v12.tgz (about 0.1 GB), https://www.statmt.org/wmt17/translation-task.html", _TESTS),
        _statmt_files("de", _WMT17, "newstest2014-deen"), ("wmt17",),
        _statmt("wmt17_en_de", "de", _WMT17, "newstest2014-deen", every=100),
    ),
    "ptb": Release(
        "Penn Treebank, Mikolov's",
        ("simple-examples.tgz (35 MB), https://www.fit.vut.cz/person/imikolov/public/rnnlm/",),
        _names("ptb"), ("ptb",), _copied("ptb"),
    ),
    "wikitext103": Release(
        "WikiText-103, words",
        ("wikitext-103-v1.zip (190 MB), https://huggingface.co/datasets/Salesforce/wikitext",),
        _names("wikitext103"), ("wikitext103",), _copied("wikitext103"),
    ),
    "opus100": Release(
        "OPUS-100, 99 languages with English",
        ("opus-100-corpus-v1.0.tar.gz (55 million pairs), https://opus.nlpl.eu/opus-100.php",),
        ("opus.*-train.en", "opus.*-dev.en", "opus.*-test.en"), ("opus100-to-en", "opus100-from-en"), _make_opus100,
    ),
    "multiun": Release(
        "MultiUN, all languages with English that are there",
        ("the Moses files of ar-en, en-es, en-fr, en-ru, en-zh (about 10 million pairs each), https://opus.nlpl.eu/MultiUN.php",),
        ("MultiUN.*-*.en",), ("multiun-to-en", "multiun-from-en"), _make_multiun,
    ),
}  # fmt: skip


class Counted(NamedTuple):
    """The number of lines of a corpus' part, and the number that the paper states."""

    corpus: str
    part: str
    lines: int
    paper: str
    """The number as the paper prints it: "10k" means a number that rounds to 10,000. It is "" if there is none."""

    @property
    def agrees(self) -> bool:
        """True if the number of lines rounds to the paper's number, equals it if it is exact, or if there is none."""
        number = re.fullmatch(r"([\d,]+)(?:\.(\d+))?([kM]?)", self.paper)
        if number is None:
            return True
        whole, decimals, suffix = number.groups()
        unit = {"": 1, "k": 1_000, "M": 1_000_000}[suffix]
        precision = unit / 10 ** len(decimals or "")  # the lines that the last printed digit stands for
        value = float(f"{whole.replace(',', '')}.{decimals or 0}") * unit
        return abs(self.lines - value) <= precision / 2 if unit > 1 else self.lines == value


def missing(name: str, raw: Raw) -> list[str]:
    """Returns those names and patterns in the release's `files` that no file in `raw` matches."""
    return [pattern for pattern in RELEASES[name].files if not raw.find(pattern)]


def prepare(name: str, raw: Path, data: Path, workers: int) -> list[Counted]:
    """Makes the release's corpora in `data`; they are written completely or not at all.

    Errors: InputError for missing or wrong files, and for corpora that exist already; ImportError without sacremoses
    and subword-nmt, if text is tokenised.
    """
    release = RELEASES[name]
    existing = [folder for folder in _folders(release) if (data / folder).exists()]
    if existing:
        raise InputError(
            f"{', '.join(str(data / folder) for folder in existing)}: there already; remove it first, or give --data"
        )
    files = Raw(raw, data)
    absent = missing(name, files)
    if absent:
        shown = ", ".join(absent[:6]) + (f" and {len(absent) - 6} more" if len(absent) > 6 else "")
        raise InputError(
            f"{raw} lacks {shown}. Fetch {'; '.join(release.fetch)}. Unpack what is packed; any sub-folder will do"
        )
    unfinished = data / f".{name}.part"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        release.make(files, unfinished, workers)
        for folder in _folders(release):
            (data / folder).parent.mkdir(parents=True, exist_ok=True)
            os.replace(unfinished / folder, data / folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return counted(name, data)


def _folders(release: Release) -> list[str]:
    """Returns the folders of the release's corpora, relative to the folder of data."""
    paths = [path for corpus in release.corpora for path in CORPORA[corpus].files.values()]
    return list(dict.fromkeys(Path(path).parts[0] for path in paths))


def counted(name: str, data: Path) -> list[Counted]:
    """Returns the number of lines of each part of the release's corpora in `data`. Parts that do not exist are left
    out."""
    return [count for corpus in RELEASES[name].corpora for count in _counted(corpus, CORPORA[corpus], data)]


def altered(name: str, data: Path) -> list[str]:
    """Returns those files of the release's corpora in `data` whose text differs from the text that results were
    measured on."""
    files = [(path, found(data / path), digest) for path, digest in RELEASES[name].digests.items()]
    return [path for path, file, digest in files if file is not None and _digest(file) != digest]


def _digest(path: Path) -> str:
    """Returns the SHA-256 of a file's content; of a gzip file, of the unpacked content."""
    with _opened(path) as file:
        return hashlib.sha256(file.read()).hexdigest()


def _counted(name: str, corpus: Corpus, data: Path) -> Iterator[Counted]:
    """Yields the number of lines of each part of a corpus that exists in `data`."""
    for role, relative in corpus.files.items():
        part, _, side = role.partition("_")
        if side == "source":  # it has as many lines as the target, which is counted
            continue
        path = found(data / relative)
        if path is not None:
            yield Counted(name, part, sum(1 for _ in lines_of(path)), corpus.lines.get(part, ""))
