"""Which cases `make test` leaves to `make test-all`, and which that leaves to `make test-long`.

`make test` covers every area, every norm and scheme, every command and every public name in minutes. A slow test is
marked `full` (run by `make test-all`) or `long` (run by `make test-long`). A test with many cases that look alike is
marked `one_in(test=8, all=3)`: `make test` runs its cases 0, 8, 16 and so on, `make test-all` every third of the
others, and `make test-long` the rest. Without `test`, `make test` runs no case of it.
"""


def leave(items) -> None:
    """Marks as `full` what `make test` leaves out, and as `long` too what `make test-all` leaves out."""
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker("full")
    _leave_cases(items, "test", "full")
    _leave_cases([item for item in items if item.get_closest_marker("full")], "all", "long")


def _leave_cases(items, command: str, marker: str) -> None:
    seen: dict[tuple[str, str], int] = {}
    for item in items:
        sample = item.get_closest_marker("one_in")
        if sample is None:
            continue
        test = (str(item.path), item.originalname)
        seen[test] = seen.get(test, -1) + 1
        step = sample.kwargs.get(command, 0 if command == "test" else 1)
        if step == 0 or seen[test] % step:
            item.add_marker(marker)
