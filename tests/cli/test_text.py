"""What is read: byte order marks, other encodings, files that are none, and what a message may print."""

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import subprocess
import sys
import tarfile
import threading
import zipfile

import pytest

import normformer_rs as nfrs
from normformer_rs import InputError, cli, text
from normformer_rs.commands.options import read_run, read_toml

BOM = codecs.BOM_UTF8


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_byte_order_mark_is_no_text(tmp_path, pack):
    (tmp_path / "text").write_bytes(pack(BOM + "a b\n\ufeffc\n".encode()))
    assert text.read_lines(str(tmp_path / "text")) == ["a b", "\ufeffc"]  # inside, it is a character


def test_a_byte_order_mark_on_standard_input_is_no_text(tmp_path):
    code = "from normformer_rs import text; print(text.read_lines('-'))"
    done = subprocess.run([sys.executable, "-c", code], input=BOM + b"a\n", capture_output=True)
    assert done.stdout == b"['a']\n", done.stderr


def test_evaluate_sees_no_byte_order_mark(tmp_path, capsys):
    pytest.importorskip("sacrebleu")
    (tmp_path / "marked").write_bytes(BOM + b"a b c d\n")
    (tmp_path / "plain").write_bytes(b"a b c d\n")
    for names in (("marked", "plain"), ("plain", "marked")):
        given = [word for flag, name in zip(("--hypothesis", "--reference"), names) for word in (flag, name)]
        given = [str(tmp_path / word) if not word.startswith("--") else word for word in given]
        assert cli.main(["evaluate", *given, "--tokenize", "none"]) == 0
        assert capsys.readouterr().out.count("= 100.00") == 2


def test_a_byte_order_mark_alone_is_an_empty_file(tmp_path):
    (tmp_path / "text").write_bytes(BOM)
    with pytest.raises(InputError, match="the file is empty"):
        text.read_lines(str(tmp_path / "text"))


PACKED = {
    "an xz": lzma.compress,
    "an lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
    "a bzip2": bz2.compress,
    "a zip": lambda data: archive(data, lambda to: zipfile.ZipFile(to, "w"), lambda a, member: a.writestr("t", member)),
    "a tar": lambda data: archive(data, lambda to: tarfile.TarFile(fileobj=to, mode="w"), into_tar),
    "a zstd": lambda data: b"\x28\xb5\x2f\xfd" + data,
    "a 7z": lambda data: b"7z\xbc\xaf\x27\x1c" + data,
}


def archive(data, opened, put):
    to = io.BytesIO()
    with opened(to) as written:
        put(written, data)
    return to.getvalue()


def into_tar(written, data):
    member = tarfile.TarInfo("t")
    member.size = len(data)
    written.addfile(member, io.BytesIO(data))


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "in gzip"])
@pytest.mark.parametrize("name", PACKED)
def test_packed_files_are_refused_by_name(tmp_path, name, pack):
    """By both readers, and nobody is told to convert their bytes."""
    path = str(tmp_path / "text")
    (tmp_path / "text").write_bytes(pack(PACKED[name](b"the one and two are here\n" * 40)))
    run = nfrs.DataConfig(train_target=path, valid_target=path, no_bpe=True)
    model = nfrs.TransformerConfig(architecture="decoder-only", d_model=16, d_ff=24, heads=2, decoder_layers=1)
    for read in (lambda: text.read_lines(path), nfrs.Trainer(model, nfrs.TrainingConfig(updates=1), run).dry_run):
        with pytest.raises(InputError, match=rf"text: {name} file; .*unpack it first \(`[a-z0-9]+ .*`\)") as raised:
            read()
        assert "iconv" not in str(raised.value)


@pytest.mark.parametrize("end", [".jsonl", ".json", ".csv", ".TSV", ".parquet", ".jsonl.gz"])
def test_records_are_refused_by_both_readers(tmp_path, end):
    """Their brackets and commas would be trained on."""
    path = tmp_path / f"text{end}"
    path.write_text('{"text": "the old tree"}\n' * 40)
    run = nfrs.DataConfig(train_target=str(path), valid_target=str(path), no_bpe=True)
    model = nfrs.TransformerConfig(architecture="decoder-only", d_model=16, d_ff=24, heads=2, decoder_layers=1)
    for read in (lambda: text.read_lines(str(path)), nfrs.Trainer(model, nfrs.TrainingConfig(updates=1), run).dry_run):
        with pytest.raises(InputError, match=r"files hold records; .*make one of a field first \(`.+`\), or rename"):
            read()


@pytest.mark.parametrize("start", ["PK", "BZh91AY", "LZIP", "7z", "x" * 257 + "ustar"])
def test_text_that_begins_like_a_packed_file_is_text(tmp_path, start):
    (tmp_path / "text").write_text(start)
    assert text.read_lines(str(tmp_path / "text")) == [start]


def test_binary_files_are_not_called_latin1(tmp_path):
    (tmp_path / "text").write_bytes(b"fine\nm\xe4\0nner\n")
    with pytest.raises(InputError, match=r"line 2: byte 2 .0xe4. is not valid UTF-8; .*holds zero bytes") as raised:
        text.read_lines(str(tmp_path / "text"))
    assert "iconv" not in str(raised.value)


def test_files_of_options_may_begin_with_one(tmp_path):
    (tmp_path / "options.toml").write_bytes(BOM + b"heads = 2\n")
    assert read_toml(tmp_path / "options.toml", ["heads"]) == {"heads": 2}
    (tmp_path / "config.json").write_bytes(BOM + b'{"model": {"heads": 2}}')
    assert read_run(tmp_path, ["heads"]) == {"heads": 2}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("read", [text.read_lines, lambda path: read_toml(path, ["heads"])], ids=["lines", "TOML"])
def test_utf_16_is_named_with_the_command_that_converts_it(tmp_path, encoding, read):
    mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
    (tmp_path / "text").write_bytes(mark + "heads = 2\n".encode(encoding))
    name = "utf-32" if encoding == "utf-32" else "utf-16"
    with pytest.raises(InputError, match=rf"text is {name.upper()};.*`iconv -f {name} -t utf-8`"):
        read(str(tmp_path / "text"))


# Files of options: whatever lies in a run's folder is refused at once.


def fifo(path):
    os.mkfifo(path)


REFUSED = {
    "a FIFO": (fifo, "expected a regular file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "expected a regular file"),
    "a folder": (lambda path: path.mkdir(), "a folder, .*expected a regular file"),
    "large": (lambda path: path.write_bytes(b" " * (text.SMALL + 1)), "larger than 4 MiB"),
    "no object": (lambda path: path.write_text("[1]"), r"expected a JSON object; got a list"),
    "null": (lambda path: path.write_text("null"), r"expected a JSON object; got null"),
    "deep": (lambda path: path.write_text('{"model":' + "[" * 100_000), "not valid JSON"),
    "long digits": (lambda path: path.write_text('{"updates": ' + "1" * 5000 + "}"), "not valid JSON"),
    "latin1": (lambda path: path.write_bytes(b'{"a": "\xe4"}'), "not valid UTF-8"),
    "cut": (lambda path: path.write_text('{"model": {'), "not valid JSON"),
    "a wrong value": (lambda path: path.write_text('{"model": {"heads": "two"}}'), "heads must be an integer"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_run_s_options_are_a_small_file(tmp_path, what):
    make, words = REFUSED[what]
    make(tmp_path / "config.json")
    found = []

    def read():
        with pytest.raises(InputError, match=rf"config\.json: .*{words}"):
            read_run(tmp_path, ["heads", "updates"])
        found.append(True)

    thread = threading.Thread(target=read, daemon=True)  # a FIFO must not make it wait
    thread.start()
    thread.join(5)
    assert found


def test_a_pipe_may_give_options(tmp_path):
    """As in `--config <(…)`."""
    read, write = os.pipe()
    os.write(write, b"heads = 2\n")
    os.close(write)
    assert read_toml(f"/dev/fd/{read}", ["heads"]) == {"heads": 2}
    os.close(read)
    with pytest.raises(InputError, match="larger than 4 MiB"):
        read_toml("/dev/zero", ["heads"])


@pytest.mark.parametrize("content", ["a = " + "[" * 100_000, "a = " + "1" * 5000], ids=["deep", "long"])
def test_toml_that_python_cannot_hold_is_not_valid(tmp_path, content):
    (tmp_path / "options.toml").write_text(content)
    with pytest.raises(InputError, match=r"options\.toml: not valid TOML"):
        read_toml(tmp_path / "options.toml", ["a"])


# Messages.

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202etxt\x00\r"


def test_control_characters_are_escaped():
    found = text.escaped(f"a{ESCAPES}b \u00e4\u4e16\u00a0\U0001f600")
    assert found == r"a\x1b]0;owned\x07\x1b[2J\x9b31m\u202etxt\x00\rb ä世" + "\u00a0\U0001f600"
    assert text.escaped("\udc80\ud800") == r"\udc80\ud800"
    assert text.escaped("plain") == "plain"


def is_plain(shown):
    return not any(ord(c) < 32 or 127 <= ord(c) < 160 or c == "\u202e" for c in shown.replace("\n", ""))


@pytest.mark.parametrize(
    "content",
    [{"model": {"norm": ESCAPES}}, {"model": {ESCAPES: 1}}, {"model": ESCAPES}, {ESCAPES: {}}],
    ids=["a value", "a name", "a table", "a table's name"],
)
def test_what_a_file_says_reaches_the_terminal_escaped(tmp_path, capsys, content):
    folder = tmp_path / f"run{ESCAPES}".replace("\x00", "")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(InputError) as raised:
        read_run(folder, ["norm"])
    assert not is_plain(str(raised.value))  # the folder's name is as it is
    cli.report(raised.value)
    shown = capsys.readouterr().err
    assert shown.startswith("normformer-rs: error: ") and shown.count("\n") == 1
    assert is_plain(shown) and r"run\x1b]0;owned\x07" in shown


def test_a_wrong_command_line_is_escaped_too(capsys):
    assert cli.main(["translate", "--model", "m", "--\x1b[2J"]) == 2
    shown = capsys.readouterr().err
    assert is_plain(shown) and r"\x1b[2J" in shown


def test_text_that_utf_8_cannot_hold_is_named(tmp_path):
    from normformer_rs import DataConfig

    with pytest.raises(InputError, match=r"train_source: .*\\ud800.* lone surrogate"):
        DataConfig(train_source="a\ud800")
    assert DataConfig(train_source=os.fsdecode("naïve".encode())).train_source == "naïve"
    assert DataConfig(train_source=b"na\xc3\xafve".decode("ascii", "surrogateescape")).train_source == "naïve"


def in_c_locale(*words, **options):
    """A command in a locale whose encoding is ASCII."""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "normformer_rs", *words]
    return subprocess.run(command, env=environment, capture_output=True, **options)


@pytest.mark.full
def test_a_utf_8_name_works_in_a_locale_without_it(tmp_path):
    folder = tmp_path / "naïve"
    folder.mkdir()
    (folder / "a").write_text("ä b c d\n", encoding="utf-8")
    done = in_c_locale("evaluate", "--hypothesis", str(folder / "a"), "--reference", str(folder / "a"))
    assert done.returncode == 0 and b"= 100.00" in done.stdout, done.stderr
    done = in_c_locale("train", "--config", str(folder / "none.toml"))
    assert done.returncode == 2 and "naïve/none.toml: no such file".encode() in done.stderr, done.stderr
    done = in_c_locale("train", "--config", os.fsencode(folder) + b"\xff")
    assert done.returncode == 2 and b"is not UTF-8" in done.stderr and b"Traceback" not in done.stderr


def test_help_is_printed_in_such_a_locale():
    done = in_c_locale("train", "--help")
    assert done.returncode == 0 and "β₁".encode() in done.stdout, done.stderr
