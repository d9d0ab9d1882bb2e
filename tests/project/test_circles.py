"""The tables of what `make test` and `make test-all` leave out name tests that exist."""

import re
from pathlib import Path

import circles

TESTS = Path(__file__).parents[1]


def test_every_name_is_a_tests():
    sources = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    missing = [name for name in circles.KEPT | circles.KEPT_IN_ALL if not re.search(rf"^def {name}\(", sources, re.M)]
    assert not missing


def test_cases_that_are_kept(monkeypatch):
    class Item:
        def __init__(self, name, path):
            self.originalname, self.path, self.markers = name, path, []

        def add_marker(self, marker):
            self.markers.append(marker)

        def get_closest_marker(self, marker):
            return marker in self.markers or None

    monkeypatch.setattr(circles, "KEPT", {"test_each_fourth": 4, "test_none": circles.NONE})
    monkeypatch.setattr(circles, "KEPT_IN_ALL", {"test_each_fourth": 2, "test_all": 2})
    items = [Item("test_each_fourth", "a.py") for _ in range(6)] + [Item("test_none", "b.py"), Item("test_all", "b.py")]
    circles.sort(items)
    full, long = ["full"], ["full", "long"]
    assert [item.markers for item in items] == [[], full, long, full, [], long, full, []]
