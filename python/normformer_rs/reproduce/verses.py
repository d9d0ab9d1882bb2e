"""Makes the corpus `verses` from two Bibles, which are modules of the SWORD project: one verse per line, with whole
chapters for validation and test.

A module has three files for each testament: compressed blocks (`.bzz`), the positions of the blocks in that file
(`.bzs`: offset, size, unpacked size), and the slots in the blocks (`.bzv`: block, offset, length). A slot holds a
heading or a verse; the verses of a chapter follow its heading.
"""

import html
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from ..errors import InputError

Verses = dict[tuple[str, int], str]
"""Verses by their chapter, such as Gen.4, and their number in it."""
MODULES = {"en": "engWEB2015eb", "es": "spaRV1909eb"}
"""The name of the module for each language."""
HELD_OUT = {
    "valid": "Gen.6 Gen.14 Gen.26 Gen.37 Exod.31 Exod.35 Josh.10 Josh.12 2Sam.4 2Chr.8 Ezra.4 Job.6 Job.40 Ps.42 Ps.53 "
    "Ps.100 Ps.119 Ps.128 Ps.137 Prov.26 Isa.25 Isa.35 Jer.5 Jer.51 Ezek.5 Ezek.29 Hos.10 Mic.4 Mal.3 Matt.18 Matt.19 "
    "Matt.24 Matt.25 Acts.6 1Cor.11 2Cor.12",
    "test": "Gen.4 Exod.2 Num.2 Num.7 Deut.2 Deut.25 Judg.17 1Sam.27 2Sam.2 2Sam.12 1Chr.8 2Chr.7 Neh.9 Job.22 Job.23 "
    "Ps.1 Ps.9 Ps.95 Ps.103 Ps.117 Ps.138 Prov.3 Prov.20 Ezek.25 Hos.6 Hab.2 Matt.12 Mark.15 Luke.7 Luke.8 Luke.17 "
    "Luke.20 John.18 Rom.11",
}
"""The chapters of the validation set and of the test set, about 1,000 pairs each."""
DIGESTS = {
    "train.en": "05b12bbd7676d4e1df696a50d3b0e15a940f071c97c41b0f62bcf1f3c74f3c63",
    "train.es": "e513107ed4c712781639bfb2d967c0cc11bb054eff861b5b2e5f2c956565aacb",
    "valid.en": "0306418956d3bb369687a95b16b46a81662b04c01a27b2399c25ceb2ba70511c",
    "valid.es": "25c659b6ea3a2de653a4381a71d1e76a2c814a293900d14adeed29a908bfb480",
    "test.en": "a598a8dd45f1965ee09d3155358cddd922d15569883f3835cda01594694557ea",
    "test.es": "0c4ec09f44b495b1c9d64c07cf5aefd7ea60680425b0b9a0b33a9e4f5a05c12c",
}
"""The SHA-256 of each file with which results were measured."""
_WORDS, _RATIO = (2, 80), 2
"""Limits for a pair: the least and the most words of each side, and the ratio of their lengths in characters."""
# These patterns match tags of OSIS, the modules' markup: the start of a chapter (the group is its name), and the start
# of a book.
_CHAPTER = re.compile(rb'<chapter[^>]*osisID="(\w+\.\d+)"[^>]*sID')
_BOOK = re.compile(rb'<div canonical="true"[^>]*sID')
# Notes and titles are removed with their content.
_NO_TEXT = re.compile(r"<(note|title)\b.*?</\1>", re.S)
# `cleaned` puts a space in place of each OSIS tag. These patterns find such spaces before closing and after opening
# punctuation.
_BEFORE, _AFTER = re.compile(r" ([,.;:!?’”)\]])"), re.compile(r"([“‘(\[¡¿]) ")


def pairs(english: Path, spanish: Path) -> Iterator[tuple[str, str, str]]:
    """Yields the part (train, valid or test), the English and the Spanish text of each verse that both modules have and
    that is within the limits, in the order of the Spanish module.

    Args:
        english, spanish: the modules' .conf files in the folder `mods.d`.

    Errors: InputError for damaged modules.
    """
    part_of = {chapter: part for part, chapters in HELD_OUT.items() for chapter in chapters.split()}
    sources = read(english)
    for (chapter, number), target in read(spanish).items():
        source = sources.get((chapter, number), "")
        if _is_pair(source, target):
            yield part_of.get(chapter, "train"), source, target


def _is_pair(source: str, target: str) -> bool:
    """Returns True if both texts have enough words, not too many, and similar lengths: the limits `_WORDS` and
    `_RATIO`."""
    least, most = _WORDS
    shorter, longer = sorted((len(source), len(target)))
    return all(least <= len(side.split()) <= most for side in (source, target)) and longer <= _RATIO * shorter


def read(module: Path) -> Verses:
    """Returns the verses of a module, given its .conf file in `mods.d`. Errors: InputError for a damaged module."""
    folder = module.parent.parent / "modules" / "texts" / "ztext" / module.stem
    verses: Verses = {}
    try:
        for testament in ("ot", "nt"):
            # The chapter and number of the latest verse. Before a book's first chapter there are only headings.
            chapter, number = "", 0
            for slot in _slots(folder / testament):
                if chapter_start := _CHAPTER.search(slot):
                    chapter, number = chapter_start[1].decode(), 0
                elif _BOOK.match(slot):
                    chapter = ""
                elif chapter:
                    number += 1
                    verses[chapter, number] = cleaned(slot.decode("utf-8"))
    except (zlib.error, struct.error, IndexError, UnicodeDecodeError) as error:
        raise InputError(f"{folder}: a damaged module ({error}): fetch its package again") from error
    except FileNotFoundError as error:
        raise InputError(f"{error.filename}: no such file: unpack the whole package of {module.name}") from error
    return verses


def _slots(path: Path) -> Iterator[bytes]:
    """Yields the content of each slot of a testament, in order; b"" for an empty slot."""
    positions, packed, slots = (path.with_suffix(end).read_bytes() for end in (".bzs", ".bzz", ".bzv"))
    blocks = []
    for offset, size, _ in struct.iter_unpack("<III", positions):
        blocks.append(zlib.decompress(packed[offset : offset + size]) if size else b"")
    for block, offset, size in struct.iter_unpack("<IIH", slots):
        yield blocks[block][offset : offset + size] if size else b""


def cleaned(verse: str) -> str:
    """Returns the text of a verse from its OSIS markup, without notes, titles and tags."""
    words = " ".join(html.unescape(re.sub("<[^>]*>", " ", _NO_TEXT.sub(" ", verse))).split())
    return _AFTER.sub(r"\1", _BEFORE.sub(r"\1", words))
