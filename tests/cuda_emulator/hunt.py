"""Which case finds which mutant. What is found out is kept in a folder that several processes may share."""

import fcntl
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from . import cases, column_cases, device, equivalent  # noqa: F401  the cases name their detectors
from .checks import DETECTORS
from .mutants import Mutant, mutants

SECONDS = 20
"""Of computing, after which a mutant counts as one that does not end. Compilers' seconds do not count."""
MORE_SECONDS = 60
"""For a run without a mutant, or under the sanitizer."""


class Hunt:
    """Runs detectors on mutants. A detector runs only where its own kernels meet the mutant's place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        with self._alone("sources"):
            sources = folder / "sources"
            if not sources.exists():
                sources.mkdir()
                for path, text in mutants()[1].items():
                    (sources / f"{path.name}.old").write_text(path.read_text())
                    (sources / f"{path.name}.new").write_text(text)

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """One process at a time."""
        with (self.folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _environment(self, cache: str, seconds: float, **more: str) -> dict[str, str]:
        patches = str(self.folder / "sources")
        return device.environment(self.folder / cache, MOCK_PATCHES=patches, MOCK_SECONDS=str(seconds), **more)

    @cached_property
    def plain(self) -> device.Server:
        """Runs kernels as they are."""
        return device.Server()

    @cached_property
    def sanitized(self) -> device.Server:
        """Runs kernels under the address sanitizer."""
        return device.Server(is_sanitized=True)

    def close(self) -> None:
        """Ends the processes in which detectors run."""
        for name in ("plain", "sanitized"):
            if name in self.__dict__:
                self.__dict__[name].close()

    def met(self, index: int) -> tuple[set[int], float]:
        """The mutants whose places a detector meets, and the seconds that it takes. It passes without a mutant."""
        kept = self.folder / f"met{index}.json"
        with self._alone(f"met{index}"):
            if not kept.exists():
                numbers = self.folder / f"met{index}"
                for more in ({"MOCK_REACHED": str(numbers)}, {}):
                    start = time.perf_counter()
                    wrong = self.plain.run(index, self._environment("cache", MORE_SECONDS, **more))
                    assert not wrong, f"{DETECTORS[index]} fails without a mutant: {wrong}"
                found = [*map(int, numbers.read_text().split())] if numbers.exists() else []
                kept.write_text(json.dumps([found, time.perf_counter() - start]))
        found, seconds = json.loads(kept.read_text())
        return set(found), seconds

    def detectors(self, mutant: Mutant) -> list[int]:
        """Those that meet the mutant's place, the quickest first."""
        known = self._known
        return sorted((i for i, (met, _) in enumerate(known) if mutant.number in met), key=lambda i: known[i][1])

    @cached_property
    def _known(self) -> list[tuple[set[int], float]]:
        return [self.met(index) for index in range(len(DETECTORS))]

    def finds(self, index: int, mutant: Mutant) -> bool:
        """Whether a detector fails on the mutant: by a wrong result, a deadlock, a crash, or no end."""
        wrong = self.plain.run(index, self._environment("cache", SECONDS, MOCK_MUTANT=str(mutant.number)))
        assert "COMPILATION" not in wrong, wrong
        return bool(wrong)

    def is_caught(self, index: int, mutant: Mutant) -> bool:
        """Whether a mutant's kernels are refused, so that the formula runs in their place, or pass after all."""
        with TemporaryDirectory(dir=self.folder) as cache:  # verdicts of its own
            more = {"MOCK_MUTANT": str(mutant.number), "NORMFORMER_RS_CUDA": "auto"}
            wrong = self.plain.run(index, self._environment(cache, SECONDS * 2, **more))
            is_off = "could not be compared" in wrong  # by a fault of the proof's own
            return not is_off and (not wrong or "the formula runs from now on" in wrong)

    def is_proven(self, index: int) -> bool:
        """Whether the kernels as they are pass their proofs."""
        with TemporaryDirectory(dir=self.folder) as cache:
            more = {"NORMFORMER_RS_CUDA": "auto"}
            return not self.plain.run(index, self._environment(cache, MORE_SECONDS, **more))

    def is_unsafe(self, index: int, mutant: Mutant | None) -> bool:
        """Whether a detector leaves its tensors' memory, or does not end, with the mutant or without any."""
        chosen = {} if mutant is None else {"MOCK_MUTANT": str(mutant.number)}
        wrong = self.sanitized.run(index, self._environment("sanitized", MORE_SECONDS, **chosen))
        # Past a tensor lies what was never given away, or what was given back.
        pattern = "AddressSanitizer: heap-(buffer-overflow|use-after-free)|ended by (SIGPROF|SIGALRM)"
        return re.search(pattern, wrong) is not None

    def finder(self, mutant: Mutant) -> str | None:
        """The first detector that finds a mutant: plainly, or else under the address sanitizer."""
        indices = self.detectors(mutant)
        found = next((str(DETECTORS[i]) for i in indices if self.finds(i, mutant)), None)
        return found or next((f"sanitized {DETECTORS[i]}" for i in indices if self.is_unsafe(i, mutant)), None)


def main() -> None:
    """Looks for every mutant of UNFOUND, and prints what finds it."""
    every, _ = mutants()
    unfound = equivalent.unfound(every)
    with TemporaryDirectory() as folder:
        hunt = Hunt(Path(folder))
        for mutant in every:
            if mutant.number in unfound:
                print(f"{mutant}: {hunt.finder(mutant) or 'not found'}: {mutant.code}", flush=True)
        hunt.close()


if __name__ == "__main__":
    main()
