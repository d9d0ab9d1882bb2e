"""The texts of the reproductions: the files that each needs, their origin, and their preparation."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from .. import demo, text
from ..errors import InputError
from .declared import Options

Files = dict[str, Path]
"""Paths by role: train_source, train_target, valid_source, …, test_target. A language model has no sources."""
_DEMO = {"train": 300, "valid": 20, "test": 30}
"""The number of the demo's pairs in each part of the corpus `demo`."""


class Corpus(NamedTuple):
    """A text with its validation and test sets."""

    title: str
    origin: str
    """Where the files come from."""
    files: dict[str, str]
    """Paths relative to the folder of data, by role. Each file may also be packed, with .gz at the end of its name."""
    options: Options
    """Options of `DataConfig` that say how the text is split into pieces."""
    tokenize: str = "none"
    """The name of sacreBLEU's tokeniser for scoring; "none" if the text is tokenised already."""
    make: Callable[[Files, Path], Files] | None = None
    """A function that makes the files for training from `files`, in a folder, and returns them; None if `files` can be
    read as they are."""
    lines: dict[str, str] = {}  # noqa: RUF012 (never written to)
    """The number of lines of each part, as the paper or the publisher states it: "10k" means a number that rounds to
    10,000."""

    @property
    def is_split(self) -> bool:
        """True if the lines are pieces that end in `@@`, which must be joined before they are scored."""
        return bool(self.options.get("no_bpe"))


def _demo(_: Files, folder: Path) -> Files:
    """Writes the first pairs of the demo's corpus, for scale check."""
    corpus = demo.corpus()
    parts = {part: getattr(corpus, part)[:size] for part, size in _DEMO.items()}
    demo.write_corpus(folder, demo.Corpus(**parts))
    return {f"{part}_{side}": folder / f"{part}.{language}" for part in _DEMO
            for side, language in (("source", "en"), ("target", "vi"))}  # fmt: skip


def _numbers(_: Files, folder: Path) -> Files:
    """Writes the demo's whole corpus."""
    demo.write_corpus(folder)
    return {f"{part}_{side}": folder / f"{part}.{language}" for part in _DEMO
            for side, language in (("source", "en"), ("target", "vi"))}  # fmt: skip


def _demo_words(files: Files, folder: Path) -> Files:
    """Writes the same pairs as `_demo`, and returns the target sides only: a text for a language model."""
    return {role: path for role, path in _demo(files, folder).items() if role.endswith("target")}


def _last_tenth_held_out(files: Files, folder: Path) -> Files:
    """Writes the lines of the file `text` that are not blank: nine tenths for training, the last tenth for
    validation."""
    lines = [line for line in text.read_lines(str(files["text"])) if line.strip()]
    cut = len(lines) * 9 // 10
    files_made = {"train_target": folder / "train.txt", "valid_target": folder / "valid.txt"}
    for path, part in zip(files_made.values(), (lines[:cut], lines[cut:])):
        text.write_lines(str(path), part)
    return files_made


def _pair(folder: str, source: str, target: str, valid: str = "valid", test: str = "test") -> dict[str, str]:
    """Returns the files of a pair of languages by role, in `folder`. `valid` and `test` are the names of these parts in
    the files' names."""
    prefix = f"{folder}/" if folder else ""
    names = {"train": "train", "valid": valid, "test": test}
    return {f"{part}_{side}": f"{prefix}{name}.{language}" for part, name in names.items()
            for side, language in (("source", source), ("target", target))}  # fmt: skip


def _alone(folder: str, form: str) -> dict[str, str]:
    """Returns the files of a corpus for a language model, which has target sides only. `form` is a file's name with {}
    in place of the part's name."""
    return {f"{part}_target": f"{folder}/{form.format(part)}" for part in ("train", "valid", "test")}


_BPE: Options = {"no_bpe": True}
_SENTENCEPIECE: Options = {"bpe_operations": 64_000}
_OPUS = (
    "OPUS-100 v1.0 of opus.nlpl.eu, all pairs in one file each, `<2xx>` before each source sentence (Zhang et al. 2020)"
)
_UN = "MultiUN of opus.nlpl.eu, all pairs in one file each, `<2xx>` before each source sentence (Wang et al. 2022a)"
_TED = "the TED talks of Qi et al. 2018 (github neulab/word-embeddings-for-nmt), one sentence a line"
_NEWSTEST = {"test": "3,003"}
_OPUS_LINES = {"train": "55M", "valid": "188,000", "test": "188,000"}
_MULTI30K = {"train": "29,000", "valid": "1,014", "test": "1,000"}

CORPORA: dict[str, Corpus] = {
    "demo": Corpus("the demo's number words, English to Vietnamese", "made on the spot", {},
                   {"bpe_operations": 100}, "13a", _demo),
    "numbers": Corpus("the demo's number words, all of them", "made on the spot", {}, {"bpe_operations": 200}, "13a",
                      _numbers),
    "demo-words": Corpus("the demo's Vietnamese", "made on the spot", {}, {"bpe_operations": 100}, "13a", _demo_words),
    "multi30k-bpe": Corpus("Multi30k en→de, lower-cased, tokenised, split by BPE", "github LividWo/Revisit-MMT",
                           _pair("multi30k-bpe-en-de", "en", "de", test="test.2016"), _BPE, lines=_MULTI30K),
    "multi30k-french": Corpus("Multi30k en→fr, raw text", "github multi30k/dataset, task 1",
                              _pair("multi30k", "en", "fr", "val", "test_2016_flickr"),
                              {"bpe_operations": 6000}, "13a", lines=_MULTI30K),
    "verses": Corpus("verses en→es", "the World English Bible 426.0 and the Reina-Valera of 1909, both public "
                     "domain: Debian's sword-text-web and sword-text-sparv", _pair("verses-en-es", "en", "es"),
                     {"bpe_operations": 4000}, "13a", lines={"train": "28,979", "valid": "1,010", "test": "1,007"}),
    "shakespeare": Corpus("tinyshakespeare", "github karpathy/char-rnn", {"text": "tinyshakespeare/input.txt"},
                          {"bpe_operations": 4000}, make=_last_tenth_held_out),
    "gl→en": Corpus("TED gl→en", _TED, _pair("gl-en", "gl", "en", "dev"), {"bpe_operations": 3000},
                    lines={"train": "10k"}),
    "sk→en": Corpus("TED sk→en", _TED, _pair("sk-en", "sk", "en", "dev"), {"bpe_operations": 8000},
                    lines={"train": "61k"}),
    "en→vi": Corpus("IWSLT'15 en→vi", "the IWSLT'15 English-Vietnamese data of the Stanford NLP group, tokenised",
                    _pair("en-vi", "en", "vi", "dev"), {"bpe_operations": 8000}, lines={"train": "133k"}),
    "en→he": Corpus("TED en→he", _TED, _pair("en-he", "en", "he", "dev"), {"bpe_operations": 8000},
                    lines={"train": "212k"}),
    "ar→en": Corpus("TED ar→en", _TED, _pair("ar-en", "ar", "en", "dev"), {"bpe_operations": 8000},
                    lines={"train": "214k"}),
    "iwslt14": Corpus("IWSLT'14 de→en", "fairseq's examples/translation/prepare-iwslt14.sh writes them",
                      _pair("iwslt14.tokenized.de-en", "de", "en"), _BPE,
                      lines={"train": "160k", "valid": "7k", "test": "6,750"}),
    "wmt14": Corpus("WMT'14 en→de", "Google's wmt16_en_de.tar.gz, which fairseq's examples/scaling_nmt names",
                    _pair("wmt16_en_de_bpe32k", "en", "de"), _BPE,
                    lines={"train": "4.5M", "valid": "3,000", **_NEWSTEST}),
    "wmt14-fr": Corpus("WMT'14 en→fr", "fairseq's examples/translation/prepare-wmt14en2fr.sh writes them",
                       _pair("wmt14_en_fr", "en", "fr"), _BPE, lines=_NEWSTEST),
    "ptb": Corpus("Penn Treebank", "Mikolov's ptb.train.txt, ptb.valid.txt and ptb.test.txt",
                  _alone("ptb", "ptb.{}.txt"), _BPE, lines={"train": "42,068", "valid": "3,370", "test": "3,761"}),
    "wikitext103": Corpus("WikiText-103", "wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens of the word-level "
                          "release", _alone("wikitext-103", "wiki.{}.tokens"), _BPE,
                          lines={"train": "1,801,350", "valid": "3,760", "test": "4,358"}),
    "opus100-to-en": Corpus("OPUS-100 X→en", _OPUS, _pair("opus100-to-en", "source", "target"), _SENTENCEPIECE, "13a",
                            lines=_OPUS_LINES),
    "opus100-from-en": Corpus("OPUS-100 en→X", _OPUS, _pair("opus100-from-en", "source", "target"), _SENTENCEPIECE,
                              "13a", lines=_OPUS_LINES),
    "multiun-to-en": Corpus("MultiUN X→en", _UN, _pair("multiun-to-en", "source", "target"), _SENTENCEPIECE, "13a"),
    "multiun-from-en": Corpus("MultiUN en→X", _UN, _pair("multiun-from-en", "source", "target"), _SENTENCEPIECE, "13a"),
    "wmt17": Corpus("WMT'17 en→de", "fairseq's examples/translation/prepare-wmt14en2de.sh writes them",
                    _pair("wmt17_en_de", "en", "de"), _BPE, lines=_NEWSTEST),
}  # fmt: skip


def found(path: Path) -> Path | None:
    """Returns the path of the file, or of the file with .gz at the end of its name; None if neither exists."""
    return next((p for p in (path, path.with_name(path.name + ".gz")) if p.is_file()), None)


def missing(names: Iterable[str], data: Path) -> dict[str, list[str]]:
    """Returns, for each named corpus whose files are not all in the folder `data`, the missing ones."""
    lacking = {name: [path for path in CORPORA[name].files.values() if found(data / path) is None] for name in names}
    return {name: paths for name, paths in lacking.items() if paths}


def check_text(name: str, data: Path) -> None:
    """Checks that the files of the corpus exist. A name that is not in CORPORA, a user's own text, is not checked.
    Errors: InputError that lists the missing files."""
    for _, files in missing([name] if name in CORPORA else [], data).items():  # at most one corpus
        raise InputError(
            f"text {name} needs {len(files)} files that {data} lacks (plain or .gz): {', '.join(files)}. "
            f"{CORPORA[name].title}: {CORPORA[name].origin}"
        )


def prepare(name: str, data: Path, folder: Path, corpora: Mapping[str, Corpus] = CORPORA) -> Files:
    """Returns the corpus' files by role. If they have to be made first, they are written to `folder`/`name`.

    Errors: ImportError without num2words, for the demo's text; OSError from the file system.
    """
    corpus = corpora[name]
    files = {role: path for role, part in corpus.files.items() if (path := found(data / part)) is not None}
    if corpus.make is None:
        return files
    os.makedirs(folder / name, exist_ok=True)
    return corpus.make(files, folder / name)
