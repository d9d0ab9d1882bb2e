"""Studies compare norms, residual schemes or other options over several learning rates and seeds; the command is
`normformer-rs compare`.

`declared.py` defines what a study consists of, `measured.py` makes its runs and chooses rates, `outcome.py` compares
the arms, `page.py` writes the page of results. `trials.py` is for training loops of the user's own.
"""

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import declared

if TYPE_CHECKING:
    from .outcome import Outcome
    from .trials import Trial

__all__ = ["Study"]


class Study(declared.Study):
    __doc__ = declared.Study.__doc__

    def run(self, output: str | PathLike[str] = "study", **how: Any) -> "Outcome":
        """Makes the runs that are missing and writes the page of results, as the command `compare` does. Returns the
        outcome.

        `how`: device, only (the names of the arms to make), max_hours (no run begins later), progress (False: no bar).
        """
        from .command import run

        return run(self, Path(output), **how)

    def trials(self, output: str | PathLike[str] = "study") -> Iterator["Trial"]:
        """Yields the trials that are missing, for a training loop of your own; after the last one it writes the
        page."""
        from .trials import trials

        return trials(self, Path(output))

    def __iter__(self) -> Iterator["Trial"]:
        """Yields the missing trials of `trials`, with its default folder."""
        return self.trials()
