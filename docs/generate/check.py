"""Checks the finished site, in addition to zensical's checks: links and pictures must lead to places in the site or to
the project's sources, and pages must load nothing from other sites."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .links import GITHUB
from .spec import ROOT

# The attribute with the address that a browser loads, for each tag that loads something.
_LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}


class _Page(HTMLParser):
    """The anchors and links of a page, and the addresses that it loads."""

    def __init__(self, text: str) -> None:
        """Reads the page's HTML."""
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Notes the tag's anchor, its link, and the address that it loads."""
        given = dict(attributes)
        self.anchors |= {value for key in ("id", "name") if (value := given.get(key))}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")
        if (key := _LOADED.get(tag)) and given.get(key) and given.get("rel") != "canonical":
            self.loaded.append(given[key] or "")


def faults(site: Path) -> list[str]:
    """Returns a line for each link that leads nowhere, and for each file that a page loads from another host."""
    pages = {path.resolve(): _Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    lines = [] if pages else [f"{site}: there are no pages here"]
    for path, page in pages.items():
        here = path.relative_to(site.resolve())
        lines += [f"{here}: loads {url}" for url in page.loaded if urlsplit(url).netloc]
        for url in page.links + page.loaded:
            parts = urlsplit(url)
            # Links to sources are absolute. Other absolute links lead to other sites and are not checked.
            if url.startswith(GITHUB) and not _is_source(url.removeprefix(GITHUB)):
                lines.append(f"{here}: {url} is no line of the sources")
            if parts.scheme or parts.netloc:
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                if here.name != "404.html":  # links of 404.html are relative to the root of a host, so they are skipped
                    lines.append(f"{here}: {url} is not there")
            # Anchors that begin with "__" are made by the theme.
            elif parts.fragment and target in pages and not parts.fragment.startswith("__"):
                has_anchor = unquote(parts.fragment) in pages[target].anchors
                lines += [] if has_anchor else [f"{here}: {url} names no anchor"]
    return sorted(set(lines))


def _is_source(target: str) -> bool:
    """Returns True if `target` is a file of the project. With #LFIRST-LLAST, the file must have these lines."""
    name, _, lines = target.partition("#")
    path, last = ROOT / unquote(name), lines.rpartition("L")[2]
    if not lines.startswith("L") or not path.is_file():
        return path.exists()
    return last.isdigit() and int(last) <= len(path.read_text(encoding="utf-8").splitlines())
