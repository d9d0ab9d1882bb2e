"""The markers that leave cases to the longer commands."""

from types import SimpleNamespace

import samples


class Item:
    path, originalname = "test_a.py", "test_a"

    def __init__(self, *marks, **sample):
        self.marks = dict.fromkeys(marks, True)
        if sample:
            self.marks["one_in"] = SimpleNamespace(kwargs=sample)

    def add_marker(self, name):
        self.marks[name] = True

    def get_closest_marker(self, name):
        return self.marks.get(name)


def left(items):
    samples.leave(items)
    return ["long" if "long" in item.marks else "full" if "full" in item.marks else "test" for item in items]


def test_cases_in_make_test_and_in_make_test_all():
    assert left([Item(test=4, all=2) for _ in range(6)]) == ["test", "full", "long", "full", "test", "long"]
    assert left([Item(all=2) for _ in range(3)]) == ["full", "long", "full"]
    assert left([Item(test=2) for _ in range(4)]) == ["test", "full", "test", "full"]


def test_marks_of_whole_tests():
    items = [Item(), Item("full"), Item("long")]
    assert left(items) == ["test", "full", "long"]
    assert "full" in items[2].marks  # `-m "not full"` leaves it out
