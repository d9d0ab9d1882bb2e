"""`normformer-rs data`: releases as their publishers pack them, in small, become the files that entries read."""

import gzip
import random
import struct
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from normformer_rs import InputError, cli
from normformer_rs.reproduce import REPRODUCTIONS, moses, releases, verses
from normformer_rs.reproduce.corpora import CORPORA, missing
from normformer_rs.reproduce.releases import RELEASES, Counted, Raw

WORDS = {
    "en": ["it", "'s", "a", "well-known", "house", "tree", "which", "\u201crains\u201d", "today", "&", "grows",
           "slowly"],
    "de": ["es", "ist", "ein", "Haus", "Baum", "der", "H\u00f6he", "w\u00e4chst", "langsam", "heute", "und", "wohl"],
}  # fmt: skip
WORDS["fr"] = WORDS["vi"] = WORDS["ar"] = WORDS["zh"] = WORDS["de"]


def sentence(language: str, number: int, words: int = 12) -> str:
    chosen = random.Random(f"{language} {number}")
    return " ".join(chosen.choices(WORDS[language][-words:], k=6 + number % 3)) + "."


def write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8", newline="") as file:
        file.writelines(f"{line}\n" for line in lines)


def sgm(language: str, count: int) -> list[str]:
    inside = [f'<seg id="{i}"> {sentence(language, i)} </seg>' for i in range(1, count + 1)]
    return ['<refset setid="x">', "<doc>", *inside, "</doc>"]


_NOTE = '<note placement="foot"><reference type="annotateRef">1:1 </reference>or else</note>'
VERSES = {
    "en": [f"God{_NOTE}<w lemma='x'>made</w> “<w>it</w> ”, &amp; ", "<w>He</w> <w>saw</w> <l level='1'/>it. ",
           "<title type='psalm'>A Psalm</title>It rains today. ", "One.", "It is so."],
    "es": ["<w>DIOS</w> lo<w>hizo</w> , <w>así</w> . ", "<w>Y</w> lo <w>vió</w>. ", "Hoy <w>llueve</w> mucho. ",
           "Uno.", "Y fué así, como Dios lo quiso."],
}  # fmt: skip


def sword(raw: Path, language: str, chapters: Sequence[str]) -> None:
    """A module of the SWORD project: two testaments, each a book with these chapters."""
    (raw / "mods.d").mkdir(parents=True, exist_ok=True)
    name = verses.MODULES[language]
    (raw / "mods.d" / f"{name}.conf").write_text(f"[{name}]\n")
    folder = raw / "modules" / "texts" / "ztext" / name
    folder.mkdir(parents=True)
    for testament, book in (("ot", "Gen"), ("nt", "Matt")):
        slots = ["", '<milestone type="x-importer"/>', f'<div canonical="true" osisID="{book}" sID="g" type="book"/>']
        for chapter in chapters:
            slots += [f'<chapter n="{chapter}" osisID="{book}.{chapter}" sID="c"/>', *VERSES[language]]
            slots[-1] += '<chapter eID="c"/><div canonical="true" eID="g" type="book"/>'
        texts = [slot.encode() for slot in slots]
        block = zlib.compress(b"".join(texts))
        at = [sum(map(len, texts[:i])) for i in range(len(texts))]
        (folder / f"{testament}.bzz").write_bytes(block)
        (folder / f"{testament}.bzs").write_bytes(struct.pack("<III", 0, len(block), sum(map(len, texts))))
        places = [struct.pack("<IIH", 0, begin, len(one)) for begin, one in zip(at, texts)]
        (folder / f"{testament}.bzv").write_bytes(b"".join(places))


def release(name: str, raw: Path) -> None:
    """Files of the publisher's names and form."""
    if name == "ted":
        header = "\t".join(["talk_name", "en", "gl", "sk", "he", "ar"])
        for part, size in (("train", 30), ("dev", 5), ("test", 6)):
            rows = [header]
            for i in range(size):
                cells = [f"talk_{i}", *(f"{language} {i} ." for language in ("en", "gl", "sk", "he", "ar"))]
                if i % 3 == 0:
                    cells[2] = "__NULL__"
                if i % 5 == 0:
                    cells[3] = "_ _ NULL _ _"
                rows.append("\t".join(cells))
            write(raw / "ted_talks" / f"all_talks_{part}.tsv", rows)
    elif name == "iwslt14":
        for language in ("de", "en"):
            talk = [f"<url>x</url> {language}", "<talkid>1</talkid>", f"<title>{sentence(language, 0, 2)}</title>"]
            talk += [*(sentence(language, i, 2) for i in range(1, 70)), "" if language == "en" else "leer"]
            write(raw / "de-en" / f"train.tags.de-en.{language}", talk)
            for test in releases._IWSLT14_TESTS:
                write(raw / "de-en" / f"IWSLT14.{test}.de-en.{language}.xml", sgm(language, 3))
    elif name in ("wmt17", "wmt14-fr"):
        for file in RELEASES[name].files:
            language = file.removesuffix(".sgm").rpartition(".")[2]
            packed = ".gz" if file.startswith("giga") else ""
            write(raw / "training" / f"{file}{packed}", sgm(language, 4) if file.endswith(".sgm") else
                  [sentence(language, i, 12 if i < 90 else 2) for i in range(300)])  # fmt: skip
    elif name == "opus100":
        for pair in ("ar-en", "en-fr"):
            for part, size in (("train", 7), ("dev", 2), ("test", 3)):
                for language in pair.split("-"):
                    write(raw / "v1.0" / "supervised" / pair / f"opus.{pair}-{part}.{language}",
                          [sentence(language, i) for i in range(size)])  # fmt: skip
    elif name == "multiun":
        for pair in ("ar-en", "en-zh"):
            for language in pair.split("-"):
                write(raw / f"MultiUN.{pair}.{language}", [f"{language} {i}" for i in range(8010)])
    elif name == "verses":
        for language in ("en", "es"):
            sword(raw / "usr" / "share" / "sword", language, ["1", "4", "6", "12", "18"])
    else:
        for file in RELEASES[name].files:
            language = file.rpartition(".")[2]
            write(raw / "files" / file, [sentence(language if language in WORDS else "en", i) for i in range(20)])


@pytest.mark.parametrize("name", RELEASES)
@pytest.mark.one_in(test=7, all=3)
def test_makes_what_entries_read(name, tmp_path):
    release(name, tmp_path / "raw")
    assert releases.missing(name, Raw(tmp_path / "raw")) == []
    counts = releases.prepare(name, tmp_path / "raw", tmp_path / "data", workers=1)
    assert missing(RELEASES[name].corpora, tmp_path / "data") == {}
    parts = {"train", "valid", "test"} if name != "shakespeare" else {"text"}
    assert {(count.corpus, count.part) for count in counts} == {
        (corpus, part) for corpus in RELEASES[name].corpora for part in parts
    }
    assert not list((tmp_path / "data").glob(".*"))
    for corpus in RELEASES[name].corpora:
        files = CORPORA[corpus].files
        for part in parts - {"text"}:
            sides = [
                (tmp_path / "data" / files[role]).read_text("utf-8").split("\n")
                for role in (f"{part}_source", f"{part}_target")
                if role in files
            ]
            assert len({len(lines) for lines in sides}) == 1 and len(sides[0]) > 1
    with pytest.raises(InputError, match="there already"):
        releases.prepare(name, tmp_path / "raw", tmp_path / "data", workers=1)


def test_every_corpus_of_a_paper_has_a_release():
    made = {corpus for entry in RELEASES.values() for corpus in entry.corpora}
    read = {row.corpus for entry in REPRODUCTIONS.values() for scale in entry.scales.values() for row in scale.rows}
    assert read - {"demo", "demo-words"} == made - {"verses"}


def test_ted_pairs_are_rows_that_have_both(tmp_path):
    release("ted", tmp_path)
    releases.prepare("ted", tmp_path, tmp_path / "data", workers=1)
    galician = (tmp_path / "data/gl-en/train.gl").read_text("utf-8").splitlines()
    assert galician == [f"gl {i} ." for i in range(30) if i % 3]
    assert (tmp_path / "data/sk-en/dev.en").read_text("utf-8").splitlines() == [f"en {i} ." for i in range(5) if i % 5]
    assert len((tmp_path / "data/en-he/test.he").read_text("utf-8").splitlines()) == 6


def test_verses_are_plain_text_and_chapters_are_held_out(tmp_path, capsys):
    """Notes, titles and markup are gone; single words and a pair of unlike lengths are, too."""
    release("verses", tmp_path)
    assert cli.main(["data", "verses", "--raw", str(tmp_path), "--data", str(tmp_path / "data")]) == 2
    said = capsys.readouterr()
    assert 'read by: normformer-rs compare (text = "verses")' in said.out
    assert "verses train has 18 lines" in said.err and "train.en has another text than results" in said.err
    english, spanish = ((tmp_path / f"data/verses-en-es/train.{side}").read_text("utf-8").split("\n")
                        for side in ("en", "es"))  # fmt: skip
    assert english[:4] == ["God made “it”, &", "He saw it.", "It rains today.", "God made “it”, &"]
    assert spanish[:3] == ["DIOS lo hizo, así.", "Y lo vió.", "Hoy llueve mucho."]
    for part, chapters in (("valid", 2), ("test", 2)):
        assert len((tmp_path / f"data/verses-en-es/{part}.es").read_text("utf-8").splitlines()) == 3 * chapters


@pytest.mark.parametrize("damage", ["bzz", "bzs", "bzv", "none"])
def test_damaged_verses_are_refused(tmp_path, damage):
    release("verses", tmp_path)
    for path in tmp_path.rglob(f"nt.{damage.replace('none', 'bzz')}"):
        data = path.read_bytes()
        if damage == "none":
            path.unlink()
        else:
            path.write_bytes(data[:-5] if damage == "bzz" else data[:-1])
    with pytest.raises(InputError, match="no such file: unpack the whole" if damage == "none" else "a damaged module"):
        releases.prepare("verses", tmp_path, tmp_path / "data", workers=1)
    assert not list((tmp_path / "data").glob("*"))


@pytest.mark.data
def test_verses_of_the_tests_are_those_that_are_made(corpora):
    assert len(releases.counted("verses", corpora)) == 3 and releases.altered("verses", corpora) == []


def test_iwslt14_is_tokenised_split_and_cut(tmp_path):
    """70 pairs, of which one is empty on a side: every 23rd of the 70 is held out, tags and numbers are gone."""
    release("iwslt14", tmp_path)
    releases.prepare("iwslt14", tmp_path, tmp_path / "data", workers=1)
    folder = tmp_path / "data" / "iwslt14.tokenized.de-en"
    train, valid, test = (
        (folder / f"{part}.en").read_text("utf-8").splitlines() for part in ("train", "valid", "test")
    )
    assert (len(train), len(valid), len(test)) == (67, 3, 15)
    whole = [line.replace("@@ ", "") for line in [*train, *valid]]
    assert not any("<" in line or line != line.lower() for line in whole)
    assert whole[0] == " ".join(moses.tokenized([sentence("en", 0, 2)], "en", 1)).lower()
    assert valid[0].replace("@@ ", "") == next(moses.tokenized([sentence("en", 22, 2)], "en", 1)).lower()
    assert (folder / "code").read_text("utf-8").startswith("#version: 0.2")
    assert not (folder / "whole").exists()


def test_wmt_splits_at_dashes_and_drops_unlike_pairs(tmp_path):
    release("wmt17", tmp_path)
    long = tmp_path / "training" / "commoncrawl.de-en.en"
    lines = long.read_text("utf-8").splitlines()
    lines[0] = " ".join(["it"] * 40)
    write(long, lines)
    releases.prepare("wmt17", tmp_path, tmp_path / "data", workers=1)
    folder = tmp_path / "data" / "wmt17_en_de"
    train = (folder / "train.en").read_text("utf-8").splitlines()
    assert "it it it it it it" not in "\n".join(train).replace("@@ ", "")
    text = "\n".join(train).replace("@@ ", "")
    assert "well @-@ known" in text and "&quot; rains &quot;" in text and "&amp;" in text


def test_many_languages_name_their_target(tmp_path):
    release("opus100", tmp_path)
    releases.prepare("opus100", tmp_path, tmp_path / "data", workers=1)
    to_english = (tmp_path / "data/opus100-to-en/test.source").read_text("utf-8").splitlines()
    assert len(to_english) == 6 and all(line.startswith("<2en> ") for line in to_english)
    source = (tmp_path / "data/opus100-from-en/test.source").read_text("utf-8").splitlines()
    assert [line.split()[0] for line in source] == ["<2ar>"] * 3 + ["<2fr>"] * 3


@pytest.mark.full
def test_processes_keep_the_order():
    lines = [sentence("en", i) for i in range(4500)]
    assert list(moses.tokenized(lines, "en", 2)) == list(moses.tokenized(lines, "en", 1))


@pytest.mark.parametrize(
    ("paper", "lines", "agrees"),
    [("10k", 10_017, True), ("10k", 10_501, False), ("4.5M", 4_500_966, True), ("4.5M", 4_449_999, False),
     ("3,003", 3003, True), ("3,003", 3002, False), ("", 5, True)],
)  # fmt: skip
def test_numbers_as_papers_round_them(paper, lines, agrees):
    assert Counted("x", "train", lines, paper).agrees is agrees


def test_missing_files_are_named_with_where_they_come_from(tmp_path, capsys):
    assert cli.main(["data", "iwslt14", "--raw", str(tmp_path), "--data", str(tmp_path / "data")]) == 2
    said = capsys.readouterr().err
    assert "train.tags.de-en.de" in said and "19 MB" in said and "wit3.fbk.eu" in said
    assert not (tmp_path / "data").exists()


def test_unlike_counts_are_said_and_the_files_kept(tmp_path, capsys):
    release("ptb", tmp_path)
    assert cli.main(["data", "ptb", "--raw", str(tmp_path), "--data", str(tmp_path / "data")]) == 2
    out, err = capsys.readouterr()
    assert "ptb train: 20 lines (42,068 expected)" in out and "pn-table2" in out
    assert "ptb train has 20 lines" in err
    assert (tmp_path / "data/ptb/ptb.train.txt").is_file()


def test_sides_of_unlike_length_and_other_encodings(tmp_path):
    release("iwslt14", tmp_path)
    file = tmp_path / "de-en" / "train.tags.de-en.en"
    file.write_bytes(file.read_bytes() + b"one more\n")
    with pytest.raises(InputError, match="one side ends before line 72"):
        releases.prepare("iwslt14", tmp_path, tmp_path / "data", workers=1)
    file.write_bytes(b"caf\xe9\n")
    with pytest.raises(InputError, match="line 1 is not UTF-8"):
        releases.prepare("iwslt14", tmp_path, tmp_path / "data", workers=1)
    assert not list((tmp_path / "data").glob("*"))


def test_what_was_made_is_no_release(tmp_path):
    release("ptb", tmp_path)
    releases.prepare("ptb", tmp_path, tmp_path / "data", workers=1)
    (tmp_path / "files").rename(tmp_path / "gone")
    assert releases.missing("ptb", Raw(tmp_path, but=tmp_path / "data")) == []
    (tmp_path / "gone").rename(tmp_path / "data" / "raw")
    assert len(releases.missing("ptb", Raw(tmp_path, but=tmp_path / "data"))) == 3
    assert releases.missing("ptb", Raw(tmp_path / "data" / "raw", but=tmp_path / "data")) == []


def test_without_a_name_it_lists(tmp_path, capsys):
    release("shakespeare", tmp_path)
    releases.prepare("shakespeare", tmp_path, tmp_path / "data", workers=1)
    assert cli.main(["data", "--data", str(tmp_path / "data")]) == 0
    out = capsys.readouterr().out
    assert "shakespeare: tinyshakespeare; here" in out and "ptb: Penn Treebank, Mikolov's; not in" in out


@pytest.mark.full
def test_two_processes_from_the_command_line(tmp_path):
    release("iwslt14", tmp_path)
    command = [sys.executable, "-m", "normformer_rs", "data", "iwslt14", "--raw", ".", "--data", "made"]
    command += ["--workers", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "67 lines (160k expected)" in done.stdout and done.returncode == 2, done.stderr
