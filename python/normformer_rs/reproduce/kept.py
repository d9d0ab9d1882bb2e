"""Files beside a table, from which the figures of a row can be recomputed.

A row has two files in the folder `NAME-SCALE-kept`: a JSON object, and the translations, one per line. The object holds
the digest of the translations; the table's row holds the digest of the object. The latter is also the name of both
files, so a file is never overwritten with other content.
"""

import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import text
from ..errors import InputError
from .corpora import CORPORA
from .declared import Row, Scale

LARGEST = 1 << 28
"""The maximum size of an unpacked file, in bytes."""
KEPT = "kept"
"""The column of the table with the object's digest. It is empty in rows from before 2026-11-29 and in rows of
studies."""
Content = dict[str, Any]
"""The content of the JSON object: the results of `about` and `of_log`, and `Measured.kept` of each measurement."""


class Kept(NamedTuple):
    """The data that are kept of a run."""

    content: Content
    translations: list[str] = []  # noqa: RUF012 (never written to)
    """The translations of the scored part, one per line; empty if the run translates nothing."""


def about(row: Row, scale: Scale) -> Content:
    """Returns the values that identify the run and say how it was scored."""
    run = {"key": row.key, "seed": row.seed, "recipe": row.recipe, "corpus": row.corpus, "search": row.search}
    scoring = {"checkpoint": scale.checkpoint, "scored": scale.scored}
    return {**run, **scoring, "tokenize": CORPORA[row.corpus].tokenize if row.corpus in CORPORA else None}


def of_log(evaluations: Any, entropy: float) -> Content:
    """Returns the numbers of the log that figures are computed from: its `Evaluations` and the unigram model's
    entropy."""
    names = ("update", "loss", "nll", "perplexity", "bleu")
    return {"unigram_entropy": entropy, "evaluations": {name: getattr(evaluations, name).tolist() for name in names}}


def digest_of(lines: Sequence[str]) -> str:
    """Returns the SHA-256 of a file with these lines."""
    return hashlib.sha256(_joined(lines)).hexdigest()


def write(folder: Path, kept: Kept) -> str:
    """Writes the files of a row, each completely or not at all. Returns the object's digest."""
    folder.mkdir(parents=True, exist_ok=True)
    # The object holds the digest of the translations, so its own digest, the files' name, fixes both files.
    translated = {"translations": digest_of(kept.translations)} if kept.translations else {}
    data = json.dumps({**kept.content, **translated}, ensure_ascii=False, separators=(",", ":")).encode()
    digest = _short(data)
    translations_path, object_path = paths(folder, digest)
    if translated:
        text.write_whole(translations_path, _packed(_joined(kept.translations)))
    text.write_whole(object_path, _packed(data))
    return digest


def read(folder: Path, digest: str) -> Kept:
    """Returns the content of a row's files. Errors: InputError if a file is missing, damaged or changed."""
    translations_path, object_path = paths(folder, digest)
    data = _unpacked(object_path)
    if _short(data) != digest:
        raise InputError(f"{object_path}: changed: its digest is {_short(data)}")
    try:
        content = json.loads(data)
        wanted = content.get("translations")
    except (ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{object_path}: expected an object of JSON ({error})") from error
    if wanted is None:
        return Kept(content)
    written = _unpacked(translations_path)
    if hashlib.sha256(written).hexdigest() != wanted:
        raise InputError(f"{translations_path}: changed: these are not the translations that were scored")
    # The text is split at newlines only, and empty lines stay, because a translation may be empty.
    return Kept(content, written.decode("utf-8").split("\n")[:-1])


def keep_only(folder: Path, digests: Container[str]) -> None:
    """Removes the files whose digest is not in `digests`, such as files that a crash has left. Files whose name is not
    a digest stay."""
    for path in folder.glob("*.gz"):
        match = _FILE.fullmatch(path.name)
        if match and match[1] not in digests:
            path.unlink(missing_ok=True)


_FILE = re.compile(r"([0-9a-f]{16})\.(txt|json)\.gz")
"""Matches the name of a row's file; its first group is the digest."""


def paths(folder: Path, digest: str) -> tuple[Path, Path]:
    """Returns the paths of a row's translations and of its JSON object. Errors: InputError if `digest` is not 16
    hexadecimal digits."""
    if not re.fullmatch("[0-9a-f]{16}", digest):
        raise InputError(f"{KEPT}: expected 16 hexadecimal digits; got {digest[:80]!r}")
    return folder / f"{digest}.txt.gz", folder / f"{digest}.json.gz"


def _joined(lines: Sequence[str]) -> bytes:
    """Returns the content of a text file with these lines."""
    return "".join(f"{line}\n" for line in lines).encode()


def _short(data: bytes) -> str:
    """Returns the first 16 hexadecimal digits of the data's SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


def _packed(data: bytes) -> bytes:
    """Returns the data as a gzip file without name and time, so that equal data give equal bytes."""
    buffer = io.BytesIO()
    with gzip.GzipFile("", "wb", fileobj=buffer, mtime=0) as file:
        file.write(data)
    return buffer.getvalue()


def _unpacked(path: Path) -> bytes:
    """Returns the unpacked content of a gzip file. Errors: InputError if it is missing, damaged or larger than
    `LARGEST`."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(text.read_regular(path))) as file:
            data = file.read(LARGEST + 1)  # the byte beyond the limit shows a file that is too large
        if len(data) > LARGEST:
            raise InputError(f"{path}: unpacks to more than {LARGEST} bytes, which no run keeps")
        return data
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file, and the table has a row that was made with it") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: a damaged gzip file ({error})") from error
