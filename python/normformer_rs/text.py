"""Reads text from files and standard input, and writes it. All of the package's Python code reads text here, by the
same rules as Rust.

A line ends at \\n only; gzip is recognised; a byte order mark at the start is not part of the text.
"""

import codecs
import fcntl
import gzip
import io
import json
import os
import re
import shlex
import stat
import sys
import threading
import zlib
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

from .errors import InputError

STANDARD = "-"
"""The name of standard input or output."""
SMALL = 4 << 20
"""The maximum size of a file of options, 4 MiB; a run's config.json has less than 10 kB."""
_OTHERS = (
    *((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32")),
    *((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16")),
)
"""The byte order marks of other encodings; UTF-32's come first, because they begin with UTF-16's."""
_PACKED = (
    *(("an xz", 0, b"\xfd7zXZ\0", "xz -dc"), ("an lzma", 0, b"]\0\0", "xz -dc")),
    *(("a bzip2", 4, b"1AY&SY", "bzip2 -dc"), ("a bzip2", 4, b"\x17rE8P\x90", "bzip2 -dc")),
    *(("a zip", 0, b"PK\x03\x04", "unzip -p"), ("a zip", 0, b"PK\x05\x06", "unzip -p")),
    *(("a zstd", 0, b"\x28\xb5\x2f\xfd", "zstd -dc"), ("an lz4", 0, b"\x04\x22\x4d\x18", "lz4 -dc")),
    *(("an lzip", 0, b"LZIP\x01", "lzip -dc"), ("a 7z", 0, b"7z\xbc\xaf\x27\x1c", "7z x -so")),
    *(("a rar", 0, b"Rar!\x1a\x07", "unrar p -inul"), ("a compress", 0, b"\x1f\x9d", "gzip -dc")),
    *(("a tar", 257, b"ustar\0", "tar -xOf"), ("a tar", 257, b"ustar  \0", "tar -xOf")),
    ("a gzip", 0, b"\x1f\x8b", "gzip -dc"),
)
"""Formats of packed files, as in src/data/text.rs: the name, the offset and value of the bytes that identify the
format, and a command that unpacks it. The last entry is found if gzip was applied twice."""
RECORDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
"""The endings of the names of files that hold records."""
# _SURROGATE matches lone surrogates, which UTF-8 cannot encode; _UNSHOWN, the characters that `escaped` replaces.
_SURROGATE = re.compile("[\ud800-\udfff]")
_UNSHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str) -> str:
    r"""Returns the text on one line, for a terminal: characters that would move or recolour its words become \x1b or
    \u202e.

    Such characters are the controls, U+2028 and U+2029, the marks that change the writing direction, and surrogates.

    >>> escaped("a\x1b[2J\n")
    'a\\x1b[2J\\n'
    """
    return _UNSHOWN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def read_lines(path: str, *, empty: bool = False, records: bool = False) -> list[str]:
    """Returns the lines of a UTF-8 file, plain or gzip, or of standard input for "-", without their ends.

    Args:
        empty: allow an empty file, which has no lines.
        records: allow a file whose name ends as that of records, such as .csv.

    Errors: InputError for a missing or empty file, a closed standard input, a damaged gzip file, another packed format,
    too little memory, UTF-16, and invalid UTF-8 (with line number).
    """
    check_readable(path, records=records)
    name = "standard input" if path == STANDARD else path
    try:
        data = sys.stdin.buffer.read() if path == STANDARD else Path(path).read_bytes()
        if data.startswith(b"\x1f\x8b"):  # gzip's first two bytes
            data = gzip.decompress(data)
    except MemoryError as error:
        raise InputError(f"{name}: its text does not fit into memory: give a smaller file, or more memory") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{name}: a damaged gzip file ({error}); compress it again or give the plain text") from error
    for packed, offset, magic, unpack in _PACKED:
        if data.startswith(magic, offset):
            raise InputError(
                f"{name}: {packed} file; expected text in UTF-8, plain or gzip: unpack it first (`{unpack}`)"
            )
    data = _without_mark(data, name)
    if not data:
        if empty:
            return []
        raise InputError(f"{name}: the file is empty; expected text in UTF-8 with one sentence a line")
    advice = "convert the file first (for example `iconv -f latin1 -t utf-8`)"
    if b"\0" in data:
        advice = "and this file holds zero bytes: it is packed, binary or UTF-16"
    lines = enumerate(data.removesuffix(b"\n").split(b"\n"), 1)
    return [_decode(line, f"{name}: line {number}", advice) for number, line in lines]


def _decode(line: bytes, place: str, advice: str) -> str:
    """Returns a line as text, without the \\r of a Windows line end. Errors: InputError for invalid UTF-8; its message
    begins with `place`, the file and the line, and ends with `advice`."""
    try:
        return line.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{place}: byte {error.start + 1} (0x{line[error.start]:02x}) is not valid UTF-8; expected text in UTF-8, "
            f"{advice}"
        ) from error


def _without_mark(data: bytes, name: str) -> bytes:
    """Returns the bytes without UTF-8's byte order mark. `name`: the file, for messages. Errors: InputError for text
    that begins with the mark of UTF-16 or UTF-32."""
    for mark, encoding in _OTHERS:
        if data.startswith(mark):
            raise InputError(
                f"{name}: the text is {encoding.upper()}; expected UTF-8, convert the file first (`iconv -f {encoding} "
                "-t utf-8`)"
            )
    return data.removeprefix(codecs.BOM_UTF8)


def open_regular(path: str | PathLike[str]) -> BinaryIO:
    """Opens a regular file for reading. A FIFO or a device is refused at once, without waiting for it.

    Errors: InputError for a folder, a device or a pipe; FileNotFoundError.
    """
    # With O_NONBLOCK a FIFO without a writer opens at once, and is refused below.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    raise InputError(f"{path}: a folder, a device or a pipe; expected a regular file")


def read_regular(path: str | PathLike[str], most: int = -1) -> bytes:
    """Returns the first `most` bytes of a regular file; -1 for all. Errors: as for `open_regular`."""
    with open_regular(path) as file:
        return file.read(most)


def read_small(path: str | PathLike[str], *, pipe: bool = False) -> str:
    """Returns the text of a file of options.

    Args:
        pipe: True to allow a pipe or a device, for a path that the user has given. Files in a run's folder must be
            regular.

    Errors: FileNotFoundError; InputError for another kind of file, more than 4 MiB, and invalid UTF-8.
    """
    if pipe and not os.path.isdir(path):
        with open(path, "rb") as file:
            data = file.read(SMALL + 1)
    else:
        data = read_regular(path, SMALL + 1)
    if len(data) > SMALL:
        raise InputError(f"{path}: larger than 4 MiB; expected a file of options")
    try:
        return _without_mark(data, str(path)).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: byte {error.start + 1} (0x{data[error.start]:02x}) is not valid UTF-8; expected a file of options"
        ) from error


def read_json(path: str | PathLike[str], consequence: str) -> dict[str, Any]:
    """Reads the JSON object of a file in a folder. `consequence` ends the error's message.

    Errors: as for `read_small`; InputError for another value and for wrong syntax.
    """
    text = read_small(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error}); {consequence}") from error
    if not isinstance(content, dict):
        kind = {list: "a list", str: "text", type(None): "null"}.get(type(content), repr(content))
        raise InputError(f"{path}: expected a JSON object; got {kind}; {consequence}")
    return content


def check_lines(name: str, lines: Iterable[str]) -> None:
    """Raises InputError for one text instead of a list of lines, and for a line that is no text or not valid in
    UTF-8. `name`: the argument with the lines, for messages."""
    if isinstance(lines, str | bytes):
        raise InputError(f"{name} must be a list of lines; got one text: split it into lines first")
    for number, line in enumerate(lines, 1):
        if not isinstance(line, str):
            raise InputError(f"{name}: line {number} is {line!r}; expected text")
        if _SURROGATE.search(line):
            raise InputError(f"{name}: line {number} holds a lone surrogate, which no text in UTF-8 has: {line[:80]!r}")


def check_readable(path: str, *, records: bool = False) -> None:
    """Raises InputError if `read_lines` could not read; call it before the work. The file is not opened. `records`: as
    in `read_lines`."""
    if path == STANDARD:
        if not _is_open(sys.stdin, os.O_WRONLY):
            raise InputError("standard input is closed; give the text there, or name a file")
        return
    try:
        kind = os.stat(path).st_mode
    except FileNotFoundError as error:
        raise InputError(
            f"{path}: no such file; expected a text file in UTF-8, plain or gzip: check the path"
        ) from error
    if stat.S_ISDIR(kind):
        raise InputError(f"{path}: a folder; expected a text file in UTF-8, plain or gzip")
    ending = Path(path.removesuffix(".gz")).suffix.lower()
    if ending in RECORDS and not records:
        raise InputError(
            f"{path}: {ending} files hold records; expected text with one sentence a line: make one of a field first "
            f"(`normformer-rs text {shlex.quote(path)} --field NAME --output FILE`), or rename the file if it is plain "
            "text"
        )


def check_writable(path: str) -> None:
    """Raises InputError if `write_lines` could not write; call it before the work."""
    target = Path(path)
    if path == STANDARD:
        if not _is_open(sys.stdout, os.O_RDONLY):
            raise InputError("standard output is closed; open it, for example `> FILE`")
        return
    if target.is_dir():
        raise InputError(f"{path}: a folder; give the name of a file in it")
    if not target.parent.is_dir():
        raise InputError(f"{path}: there is no folder {target.parent}; make it, or choose another output")
    # A device must be writable itself. A file is replaced by a new one, so its folder must be writable.
    if not os.access(target if target.exists() and not target.is_file() else target.parent, os.W_OK):
        raise InputError(f"{path}: {target.parent} is not writable; choose another output")


def _is_open(stream: Any, refused: int) -> bool:
    """Returns True if the stream has an open file whose access mode is not `refused`, such as os.O_WRONLY. The stream
    is None if its file was closed when Python started."""
    if stream is None or stream.closed:
        return False
    try:
        return fcntl.fcntl(stream.fileno(), fcntl.F_GETFL) & os.O_ACCMODE != refused
    except (AttributeError, io.UnsupportedOperation):  # the streams of notebooks and tests have no file
        return True
    except OSError:
        return False


def hold_standard_files() -> None:
    """Opens /dev/null as standard input, output or error if one of them is closed, so that no file of a run gets its
    descriptor.

    Otherwise libtorch's messages would go into that file. `sys.stdin` and `sys.stdout` stay None, which the checks use.
    """
    # A new descriptor is the lowest free number, so this loop fills the gaps among 0, 1 and 2.
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)  # otherwise print() would write to standard output


def write_out(data: bytes = b"") -> None:
    """Writes to standard output, after what has been printed, and empties its buffers.

    Errors: OSError that names standard output; BrokenPipeError if its reader has closed it.
    """
    try:
        sys.stdout.flush()
        if data:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from error


def write_lines(path: str, lines: Iterable[str]) -> None:
    """Writes the lines so that `path` holds either its old content or all of the new one; "-" is standard output."""
    text = "".join(f"{line}\n" for line in lines).encode("utf-8")
    if path == STANDARD:
        write_out(text)
        return
    target = Path(path)
    if target.exists() and not target.is_file():  # /dev/stdout and the like cannot be replaced
        target.write_bytes(text)
        return
    write_whole(target, text)


def write_whole(target: Path, data: bytes) -> None:
    """Writes the bytes to the file `target`; on failure its old content stays. If `target` is a link, the link is
    replaced, not the file that it points to."""
    # The extension module names unfinished files in the same way, with the process's id. A run deletes such files from
    # its folder if no process has that id any more. Here the thread's id keeps two threads from using the same name.
    unfinished = target.with_name(f".{target.name}.tmp-{threading.get_native_id()}")
    unfinished.unlink(missing_ok=True)
    try:
        with unfinished.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
