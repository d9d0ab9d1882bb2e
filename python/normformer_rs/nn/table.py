"""Rust's table of norms, as tuples."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from ..config import ENTRIES


class Kept(NamedTuple):
    """A parameter or a buffer."""

    name: str
    shape: Literal["one", "width", "column"]
    start: float | Literal["length"]
    """The first value of every element; "length": d^{1/p}, the length of a row of ones."""
    is_counter: bool = False

    def size(self, width: int) -> tuple[int, ...]:
        return {"one": (1,), "width": (width,), "column": (1, width, 1, 1)}[self.shape]


class Declared(NamedTuple):
    """A norm's entry: its module's class, parameters, buffers and options, and its operator."""

    name: str
    module: str
    form: Literal["composed", "rows", "columns", "chosen"]
    operator: str | None
    """None: it has none of its own, or its options choose one."""
    parameters: tuple[Kept, ...]
    buffers: tuple[Kept, ...]
    options: tuple[str, ...]

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "Declared":
        """From an entry of `normformer_rs.tables()`."""
        parameters, buffers = (tuple(Kept(**kept) for kept in entry[key]) for key in ("parameters", "buffers"))
        options = tuple(option["name"] for option in entry["options"])
        plain = {key: entry[key] for key in ("name", "module", "form", "operator")}
        return cls(**plain, parameters=parameters, buffers=buffers, options=options)


class Family(NamedTuple):
    """A norm of the table with the options that a family of models has."""

    name: str
    norm: str
    settings: Mapping[str, Any]
    """The module's keyword arguments."""


FAMILIES: dict[str, Family] = {
    entry["name"]: Family(entry["name"], entry["norm"], entry["settings"]) for entry in ENTRIES["families"]
}
"""Every family, by its name: rmsnorm:llama, …"""
DECLARED: dict[str, Declared] = {entry["name"]: Declared.of(entry) for entry in ENTRIES["norms"]}
"""Every norm of the table."""
