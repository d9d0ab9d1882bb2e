"""Writes the page that `pip install --find-links` reads: every wheel and sdist of the releases, with its SHA-256.

    python3 .ci/index_page.py releases https://github.com/OWNER/REPOSITORY/releases/download > index.html

The folder has one folder per tag, as the address does: releases/v0.1.0/normformer_rs-0.1.0.tar.gz.
"""

import hashlib
import html
import sys
from pathlib import Path
from urllib.parse import quote

PACKAGES = (".whl", ".tar.gz")
HINT = """A wheel works with every torch that its metadata names. With the address of this page for PAGE:
pip install normformer_rs --find-links PAGE"""


def page(releases: Path, address: str) -> str:
    """Returns the page as HTML, with a link to each file. A link's fragment is the hash that pip checks after the
    download. `releases` has a folder for each tag; `address` is the address of these folders."""
    files = sorted(path for path in releases.glob("*/*") if path.name.endswith(PACKAGES))
    if not files:
        raise SystemExit(f"{releases} holds no TAG/*.whl and no TAG/*.tar.gz: expected the files of a release")
    links = "\n".join(f"{_link(path, address)}<br>" for path in files)
    head = '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>normformer_rs</title></head>'
    return f"{head}\n<body>\n<p>{html.escape(HINT)}</p>\n{links}\n</body>\n</html>\n"


def _link(path: Path, address: str) -> str:
    """Returns the link to a file as HTML."""
    # A plus sign, which the version of a private build may have, is escaped, because some servers read it as a space.
    url = f"{address.rstrip('/')}/{quote(path.parent.name)}/{quote(path.name)}"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f'<a href="{html.escape(url)}#sha256={digest}">{html.escape(path.name)}</a>'


if __name__ == "__main__":
    folder, url = sys.argv[1:]
    sys.stdout.write(page(Path(folder), url))
