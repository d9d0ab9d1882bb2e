"""Lines of text from files and standard input, and back. Rust's rules: a line ends at \\n alone; gzip is recognised."""

import gzip
import os
import sys
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from .errors import InputError

STANDARD = "-"
"""Standard input or output."""


def read_lines(path: str) -> list[str]:
    """The lines of a UTF-8 file, plain or gzip, or of standard input for "-", without their ends.

    Errors: InputError for a missing or empty file, a damaged gzip file, too little memory, and invalid UTF-8 (with line
    number).
    """
    name = "standard input" if path == STANDARD else path
    try:
        data = sys.stdin.buffer.read() if path == STANDARD else Path(path).read_bytes()
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
    except FileNotFoundError as error:
        raise InputError(
            f"{name}: no such file; expected a text file in UTF-8, plain or gzip: check the path"
        ) from error
    except IsADirectoryError as error:
        raise InputError(f"{name}: a folder; expected a text file in UTF-8, plain or gzip") from error
    except MemoryError as error:
        raise InputError(f"{name}: its text does not fit into memory: give a smaller file, or more memory") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{name}: a damaged gzip file ({error}); compress it again or give the plain text") from error
    if not data:
        raise InputError(f"{name}: the file is empty; expected text in UTF-8 with one sentence a line")
    return [_decode(line, number, name) for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), 1)]


def _decode(line: bytes, number: int, name: str) -> str:
    try:
        return line.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}: line {number}: byte {error.start + 1} (0x{line[error.start]:02x}) is not valid UTF-8; expected "
            "text in UTF-8, convert the file first (for example `iconv -f latin1 -t utf-8`)"
        ) from error


def check_writable(path: str) -> None:
    """InputError where `write_lines` could not write; called before the work."""
    target = Path(path)
    if path == STANDARD:
        return
    if target.is_dir():
        raise InputError(f"{path}: a folder; give the name of a file in it")
    if not target.parent.is_dir():
        raise InputError(f"{path}: there is no folder {target.parent}; make it, or choose another output")
    if not os.access(target if target.exists() and not target.is_file() else target.parent, os.W_OK):
        raise InputError(f"{path}: {target.parent} is not writable; choose another output")


def write_lines(path: str, lines: Iterable[str]) -> None:
    """Writes the lines so that `path` holds either its old content or all of the new; "-" is standard output."""
    text = "".join(f"{line}\n" for line in lines).encode("utf-8")
    if path == STANDARD:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
        return
    target = Path(path)
    if target.exists() and not target.is_file():  # /dev/stdout and its kind cannot be renamed over
        target.write_bytes(text)
        return
    handle, beside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(beside, 0o666 & ~mask)  # mkstemp's files are the owner's alone
        os.replace(beside, target)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
