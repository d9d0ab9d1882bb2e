"""Checks the finished site, beyond zensical: links and pictures lead to places inside it or to the project's sources;
pages load nothing from other sites."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .links import GITHUB
from .spec import ROOT

_LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}


class _Page(HTMLParser):
    """A page's anchors, links and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.anchors |= {value for key in ("id", "name") if (value := given.get(key))}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")
        if (key := _LOADED.get(tag)) and given.get(key) and given.get("rel") != "canonical":
            self.loaded.append(given[key] or "")


def faults(site: Path) -> list[str]:
    """One line for each link that leads nowhere and each thing that another host would have to send."""
    pages = {path.resolve(): _Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    found = [] if pages else [f"{site}: there are no pages here"]
    for path, page in pages.items():
        here = path.relative_to(site.resolve())
        found += [f"{here}: loads {url}" for url in page.loaded if urlsplit(url).netloc]
        for url in page.links + page.loaded:
            parts = urlsplit(url)
            if url.startswith(GITHUB) and not _is_source(url.removeprefix(GITHUB)):
                found.append(f"{here}: {url} is no line of the sources")
            if parts.scheme or parts.netloc:
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                if here.name != "404.html":  # its links are written for the root of a host
                    found.append(f"{here}: {url} is not there")
            elif parts.fragment and target in pages and not parts.fragment.startswith("__"):  # the theme's own
                has_anchor = unquote(parts.fragment) in pages[target].anchors
                found += [] if has_anchor else [f"{here}: {url} names no anchor"]
    return sorted(set(found))


def _is_source(target: str) -> bool:
    """Whether a path, with #LFIRST-LLAST where lines are meant, is in the project."""
    name, _, lines = target.partition("#")
    path, last = ROOT / unquote(name), lines.rpartition("L")[2]
    if not lines.startswith("L") or not path.is_file():
        return path.exists()
    return last.isdigit() and int(last) <= len(path.read_text(encoding="utf-8").splitlines())
