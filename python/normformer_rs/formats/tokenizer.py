"""Exports a run's tokenisation as the files that Hugging Face's `AutoTokenizer` reads.

In these files a normalizer splits the text into pieces, and the model only looks up their ids. The BPE model of
`tokenizers` is not suitable: it needs an id for every piece that a merge makes, while here a piece that is not in the
vocabulary must become unknown.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import InputError

_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
"""The special pieces, in the order of their ids, which begin at 0."""
_BOS, _PAD, _EOS, _UNK = _SPECIALS
_WORD_END = "</w>"
_SPACES = "".join(c for c in map(chr, range(0x3001)) if c.isspace() and c != "\n")
"""The characters of white space, except the newline, that separate pieces in text that is tokenised already."""
_AT_START, _AT_END = r"(?<![^ \n])", r"(?![^ \n])"
"""Patterns that match at the start and at the end of a piece."""
_MOST = 200_000
"""The maximum number of merges that a tokenizer is written with."""
_AFTER_WORD = r"(?=  |\n|\z)"
"""A pattern that matches at the end of a word. While merges are applied, one space separates the pieces of a word, and
two spaces separate words."""


def tokenizer_files(vocabulary: str, codes: str | None, unseen: Sequence[int], size: int) -> dict[str, str]:
    """Returns tokenizer.json and tokenizer_config.json, by name.

    Args:
        vocabulary: the run's vocabulary.txt.
        codes: the run's bpe.codes; None if its text is tokenised already.
        unseen: ids that no text is converted to, because the target vocabulary does not contain them.
        size: the size of the model's vocabulary.

    Errors: InputError for files of other sizes or forms.
    """
    pieces = [*_SPECIALS, *(line.rpartition(" ")[0] for line in vocabulary.removesuffix("\n").split("\n"))]
    if len(pieces) != size:
        raise InputError(
            f"vocabulary.txt has {len(pieces)} types and the model {size}: the file is damaged, or another run's"
        )
    splitting = _split() if codes is None else list(_merged(codes))
    # A text may contain these pieces; there they become unknown.
    never = "|".join(re.escape(piece) for piece in (_BOS, _PAD, _EOS, *(pieces[i] for i in unseen)))
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": piece, **special} for i, piece in enumerate(_SPECIALS)],
        "normalizer": _sequence(
            "normalizers",
            [*splitting, _replace(f"{_AT_START}(?:{never}){_AT_END}", _UNK), _replace(r"\n", f" {_EOS} ")],
        ),
        "pre_tokenizer": {"type": "CharDelimiterSplit", "delimiter": " "},
        "model": {"type": "WordLevel", "vocab": {piece: i for i, piece in enumerate(pieces)}, "unk_token": _UNK},
        "post_processor": _after_end_of_sentence(),
        "decoder": _sequence("decoders", _joined()),
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), _SPECIALS)),
        "split_special_tokens": True,  # "</s>" in a text is ordinary text, not the end of a sentence
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    files = {"tokenizer.json": content, "tokenizer_config.json": config}
    return {name: json.dumps(values, indent=2) + "\n" for name, values in files.items()}


def _replace(pattern: str, content: str) -> dict[str, Any]:
    """Returns a step that replaces each match of a regular expression by a text."""
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _sequence(parts: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns steps that are applied one after another. `parts` is the name of their list: "normalizers" or
    "decoders"."""
    return {"type": "Sequence", parts: steps}


def _split() -> list[dict[str, Any]]:
    """Returns the normalizer's step that splits text into pieces at white space."""
    return [_replace(f"[{_SPACES}]", " ")]


def _merged(codes: str) -> Iterator[dict[str, Any]]:
    """Yields the normalizer's steps that split words into pieces as `src/data/bpe.rs` does. Each merge is one step, or
    several, that replaces text."""
    version, *lines = codes.removesuffix("\n").split("\n")
    if not version.startswith("#version:"):
        raise InputError(f"bpe.codes is damaged: expected #version: 0.2, or 0.1, first; got {version[:80]!r}")
    # Each line has a pair of pieces to merge. If a pair occurs twice in the file, only its first line counts.
    merges = [*dict.fromkeys((left, right) for left, _, right in (line.partition(" ") for line in lines))]
    if len(merges) > _MOST:
        raise InputError(
            f"bpe.codes has {len(merges):,} merges; a tokenizer applies them one by one, and takes {_MOST:,}"
        )
    yield _replace(" +", "  ")  # puts two spaces between words
    yield _replace(r"(?<![^\n])[\r ]+|[\r ]+(?![^\n])", "")  # removes spaces at the start and end of a line
    yield _replace(r"(?<=[^ \n])(?=[^ \n])", " ")  # puts one space between the characters of a word
    # The mark of a word's end is a piece by itself in version 0.1, a part of the last character in 0.2.
    yield _replace(rf"(?<=[^ \n]){_AFTER_WORD}", f" {_WORD_END}" if version.endswith("0.1") else _WORD_END)
    for left, right in _passes(merges):
        yield _replace(f"{_AT_START}{re.escape(left)} {re.escape(right)}{_AT_END}", left + right)
    yield _replace(f" ?{_WORD_END}{_AFTER_WORD}", "")  # removes the marks of the words' ends
    yield _replace("(?<! ) (?! )", "@@ ")  # a single space lies within a word


def _passes(merges: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yields merges in an order in which applying each of them once to the whole text gives the result of BPE.

    It is the merges' own order, with repetitions: after a merge whose result is a part of an earlier merge's pair, the
    earlier merge follows again.
    """
    users = defaultdict(set)  # for each piece, the ranks of the merges whose pair contains it
    for rank, pair in enumerate(merges):
        for part in pair:
            users[part].add(rank)
    for rank in range(len(merges)):
        pending = {rank}
        while pending:
            first = min(pending)
            pending.remove(first)
            yield merges[first]
            pending |= {user for user in users["".join(merges[first])] if user <= rank}


def _after_end_of_sentence() -> dict[str, Any]:
    """Returns the post-processor that puts an end of sentence before a text, as in training."""
    end = {"SpecialToken": {"id": _EOS, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [end, first],
        "pair": [end, first, end, second],
        "special_tokens": {_EOS: {"id": _EOS, "ids": [_SPECIALS.index(_EOS)], "tokens": [_EOS]}},
    }


def _joined() -> list[dict[str, Any]]:
    """Returns the decoder's steps that join pieces into text as `src/data/joiner.rs` does. An end of sentence becomes a
    newline."""
    # The steps before Fuse are applied to each piece, and the step after it to the whole text.
    return [
        _replace(rf"\A(?:{_BOS}|{_PAD})\z", ""),
        _replace(rf"\A{_EOS}\z", "\n"),
        _replace(r"(?<=[^\n])\z", " "),  # each piece gets a space after it; the next step removes "@@ "
        _replace("@@ ", ""),
        {"type": "Fuse"},
        _replace(r" (?=\n|\z)", ""),
    ]
