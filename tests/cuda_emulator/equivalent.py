"""Mutants that no case can find, each with the reason."""

from typing import NamedTuple

from .mutants import Mutant


class Equivalent(NamedTuple):
    """Mutants of a file by their rule and a part of their line; `nth`: which of the line's mutants of that rule."""

    file: str
    rule: str
    code: str
    reason: str
    nth: tuple[int, ...] = ()

    def holds(self, mutant: Mutant, place: int) -> bool:
        """`place`: the mutant's number among those of its line and rule."""
        is_named = (mutant.file, mutant.rule) == (self.file, self.rule) and self.code in mutant.code
        return is_named and (not self.nth or place in self.nth)


EQUIVALENT: list[Equivalent] = []
