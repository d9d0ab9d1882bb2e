"""Checks the arguments of a study, and defines the special values that some of them may have."""

import math
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

from ..config import ENTRIES, unknown
from ..errors import InputError
from ..reproduce.corpora import CORPORA

if TYPE_CHECKING:
    from .declared import Study

OWN_LOOP = "own loop"
"""The value of `text` for a study that is trained in a loop of the user's own."""
OWN_START = "own"
"""The value in `init` that means that each scheme is initialised in its own way."""
TUNING = 1000
"""The offset of the seeds that choose rates: the rate for the reported seed s is chosen with runs of seed s + 1000."""
METRICS = {"valid_nll": "validation NLL, in nats per token", "bleu": "BLEU"}
_MADE_PAIRS = ("demo", "numbers")
"""Corpora for translation that are generated, not read from files."""
PARTS = [f"{part}_{side}" for part in ("train", "valid", "test") for side in ("source", "target")]
"""The roles that the files of a study's own text may have."""

_RESERVED = {
    "lr": "the study's lr, a list of rates for all arms",
    "seed": "the study's seeds",
    "updates": "the study's updates, tokens or flop",
    "layers": "the study's layers",
    "epochs": "the study's updates, tokens or flop",
    "patience": "the study's updates, tokens or flop, since all runs are equally long",
    "device": "an argument of the run: compare --device, or Study.run(device=…)",
}
"""Options that an arm may not have, each with what to set instead. They would make the comparison unfair."""


def check_kinds(study: "Study") -> None:
    """Checks the types of the study's arguments. Errors: InputError for a wrong one."""
    if not isinstance(study.arms, Mapping) or not study.arms:
        raise InputError(f"arms must be a table of options by name, at least one; got {study.arms!r}")
    for name, arm in study.arms.items():
        if not isinstance(name, str) or not name or not (isinstance(arm, Mapping) or callable(arm)):
            raise InputError(f"arms must be tables of options by name; got {name!r}: {arm!r}")
        if not name.isprintable():  # the name becomes a cell of the CSV file and of the page
            raise InputError(f"an arm's name must be printable characters on one line; got {name!r}")
    if not isinstance(study.options, Mapping):
        raise InputError(f"options must be a table; got {study.options!r}")
    if not isinstance(study.data, (str, PathLike)):
        raise InputError(f"data must be the path of a folder; got {study.data!r}")
    for name in ("metric", "baseline", "title", "question"):
        if not isinstance(getattr(study, name), str):
            raise InputError(f"{name} must be a string; got {getattr(study, name)!r}")
    if not isinstance(study.text, (str, Mapping)):
        raise InputError(f"text must be a name or a table of files; got {study.text!r}")
    if isinstance(study.text, Mapping):
        for role in PARTS:
            if not isinstance(study.text.get(role, ""), (str, PathLike)):
                raise InputError(f"text: {role} must be a path; got {study.text[role]!r}")


def check_values(study: "Study") -> None:
    """Checks the values of the study's arguments, except the options of the arms. Errors: InputError for a wrong
    one."""
    if not study.lr or not all(_is_number(rate) and 0 < rate < math.inf for rate in study.lr):
        raise InputError(f"lr must be one or several positive rates; got {[*study.lr]}")
    if len({f"{rate:g}" for rate in study.lr}) < len(study.lr):
        raise InputError(f"lr must be different rates; got {[*study.lr]}")
    # The rate of seed s is chosen on seed s + TUNING. With fewer than TUNING seeds, none of these is a reported seed.
    if not _is_whole(study.seeds) or not 1 <= study.seeds < TUNING:
        raise InputError(f"seeds must be a number from 1 to {TUNING - 1}; got {study.seeds!r}")
    are_depths = all(_is_whole(depth) and 1 <= depth <= 10_000 for depth in study.layers)
    if not are_depths or len({*study.layers}) < len(study.layers):
        raise InputError(f"layers must be different numbers from 1 to 10000; got {[*study.layers]}")
    if not study.init or len({*map(str, study.init)}) < len(study.init):
        raise InputError(f"init must be one or several different initialisations; got {[*study.init]}")
    for name in study.init:
        if name not in (known := [OWN_START, *(entry["name"] for entry in ENTRIES["inits"])]):
            raise InputError(unknown("init", name, known))
    budgets = {name: getattr(study, name) for name in ("updates", "tokens", "flop")}
    given = [name for name, value in budgets.items() if value is not None]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} exclude each other; give one budget")
    for name in given:
        has_right_type = _is_number(budgets[name]) if name == "flop" else _is_whole(budgets[name])
        # 2**63: updates and tokens must fit into a signed 64-bit integer
        if not has_right_type or not 1 <= budgets[name] < (math.inf if name == "flop" else 2**63):
            raise InputError(f"{name} must be a positive number; got {budgets[name]!r}")
    if study.metric not in METRICS:
        raise InputError(unknown("metric", study.metric, METRICS))
    if study.baseline not in study.arms:
        raise InputError(unknown("baseline", study.baseline, study.arms))
    if study.margin is not None and not (_is_number(study.margin) and 0 < study.margin < math.inf):
        raise InputError(f"margin must be a positive number, in the metric's unit; got {study.margin!r}")
    if isinstance(study.text, str) and study.text not in (*CORPORA, OWN_LOOP):
        raise InputError(unknown("text", study.text, [*CORPORA, OWN_LOOP]))
    if not isinstance(study.text, str) and not {"train_target", "valid_target"} <= {*study.text}:
        raise InputError(f"text must name the files train_target and valid_target; got {', '.join(study.text)}")
    if study.metric == "bleu" and not _is_scored(study.text):
        raise InputError("metric bleu needs sources and targets of a test set, or of the validation set, in the text")
    for name, options in [("options", study.options), *study.arms.items()]:
        for option, instead in _RESERVED.items():
            if isinstance(options, Mapping) and option in options:
                where = "" if option == "device" else ": give it to the study, beside arms"
                raise InputError(f"{name}: {option} is {instead}{where}")
    for name, arm in study.arms.items():
        if isinstance(arm, Mapping) and "preset" in arm:
            raise InputError(f"arm {name}: a preset belongs to the options that all arms share")


def _is_scored(text: str | Mapping[str, Any]) -> bool:
    """Returns True if BLEU can be measured on the text: its test set, or its validation set, has sources and
    targets."""
    if isinstance(text, str):
        return text in _MADE_PAIRS or text == OWN_LOOP or {"test_source", "test_target"} <= CORPORA[text].files.keys()
    part = "test" if "test_target" in text else "valid"
    return {f"{part}_source", f"{part}_target"} <= {*text}


def _is_whole(value: Any) -> bool:
    """Returns True for an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """Returns True for an int or a float that is not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
