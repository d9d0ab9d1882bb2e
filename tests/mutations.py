"""Damaged and forged copies of JSON data: one or two values replaced, taken away, renamed or repeated at random."""

import copy
import random

DEEP: list = []
for _ in range(60):
    DEEP = [DEEP]
ODD = [
    *(None, True, False, 0, 1, -1, 5, 0.5, -3.0, 10**9, 10**12, 2**63, 10**400, 1e308, float("inf"), float("nan")),
    *("", "x", "norm", "no/such.py:Class", "a\x00b", "\u2028", "x" * 5000, "0.5", "inf", "meta"),
    *([], {}, [[]], [None], {"a": 1}, ["x", 5], {"normal": "x"}, {"name": None}, [1, 2, 3], DEEP),
]


def mutations(data, seed, count):
    """Copies of the data, each with one or two mutations that the seed draws."""
    generator = random.Random(seed)
    for _ in range(count):
        made = copy.deepcopy(data)
        for _ in range(generator.choice((1, 1, 2))):
            made = _mutate(made, generator)
        yield made


def _mutate(data, generator):
    places = [*_places(data)]
    if not places:
        return copy.deepcopy(generator.choice(ODD))
    holder, key = generator.choice(places)
    how = generator.choice(("replace", "replace", "replace", "remove", "add"))
    if how == "replace":
        holder[key] = copy.deepcopy(generator.choice(ODD))
    elif how == "remove":
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(generator.randrange(len(holder) + 1), copy.deepcopy(generator.choice([holder[key], *ODD])))
    else:
        holder[generator.choice((f"{key}s", "extra", "init", "optimizer"))] = copy.deepcopy(generator.choice(ODD))
    return data


def _places(data):
    """(holder, key) of everything inside."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in [*items]:
        yield data, key
        yield from _places(value)
