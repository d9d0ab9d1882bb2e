"""Kills training, starts it again, and compares the final weights with an uninterrupted run's, bit by bit.

Kills come at random moments of a whole run, from its first millisecond on (`--kills N`), and at every system act that
writes into the folder, from its making and the lock on; at each of those acts a full disk, an input/output error and a
write that ends in its middle are injected too. Two processes at once train into one folder, while the first stands
still at such an act or at random moments, and one of them is killed.
All of it on two corpora: in one the last evaluation is the best, in the other the first. `make kill-test N=20` runs it
whole; the test-suite a short version.

A run is a fork of this process, which has the package and torch loaded: so 260 kills take minutes.
"""

import argparse
import contextlib
import fcntl
import hashlib
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from normformer_rs import cli
from normformer_rs.loop import training  # noqa: F401  (a run imports training)

OPTIONS = {
    "bpe-operations": 12,
    "d-model": 16,
    "d-ff": 24,
    "heads": 2,
    "encoder-layers": 1,
    "decoder-layers": 1,
    "norm": "scalenorm",
    "dropout": 0.2,
    "max-tokens": 300,
    "warmup": 10,
    "evaluate-every": 4,
    "keep": 1,
    "seed": 3,
}
FAULTS = {"kill": -signal.SIGKILL, "enospc": 4, "eio": 4, "short": 4}
"""How a run ends after each."""
STARTED = "checkpoints/last"
"""There as soon as a checkpoint stands."""


def write_corpus(folder: Path, best: str) -> dict[str, Path]:
    """`best`: the evaluation with the best BLEU. "first": no held-out target can be said, so that BLEU is always 0."""
    generator = random.Random(1)
    folder.mkdir()
    paths = {}
    for part, n in (("train", 200), ("valid", 6)):
        lines = [[generator.choice("0123456789") for _ in range(generator.randint(1, 9))] for _ in range(n)]
        letters = "ABCDEFGHIJ" if (part, best) == ("valid", "first") else "abcdefghij"
        for side, text in (("source", lines), ("target", [[letters[int(d)] for d in line[::-1]] for line in lines])):
            paths[f"{part}-{side}"] = folder / f"{part}.{side}"
            paths[f"{part}-{side}"].write_text("".join("".join(line) + "\n" for line in text))
    return paths


class Run:
    """Training in a folder of its own, as another process."""

    def __init__(self, folder: Path, corpus: dict[str, Path], updates: int):
        self.folder = folder
        self.said = folder.with_name(folder.name + ".said")
        self.command = ["train", "--no-progress", "--output", str(folder)]
        for key, value in {**OPTIONS, **corpus, "updates": updates}.items():
            self.command += [f"--{key}", str(value)]

    def start(self, fault: str | None = None) -> int:
        """The number of the process."""
        resume = ["--resume"] if (self.folder / "config.json").exists() else []
        child = os.fork()
        if child:
            return child
        code = 1
        with contextlib.suppress(BaseException):
            log = os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if fault:
                os.environ["NORMFORMER_RS_FAULT"] = fault
            code = cli.main(self.command + resume)
        os._exit(code)

    def wait(self, process: int, seconds: float | None = None) -> int:
        """The process's end, by a kill after so many seconds; its exit code, or minus the signal's number."""
        if seconds is not None:
            time.sleep(seconds)
            os.kill(process, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        said = self.said.read_text() if self.said.exists() else ""
        expected = ("No space left", "Input/output error", "in use by", "already holds a run")
        if code not in (0, 2, 4, -signal.SIGKILL) or (code in (2, 4) and not any(text in said for text in expected)):
            raise SystemExit(f"training in {self.folder} ended with {code}:\n{said}")
        return code

    def finish(self, fault: str | None = None) -> int:
        return self.wait(self.start(fault))

    def events(self) -> list[dict[str, Any]]:
        """Without lines that a write has left half; what they told is told again."""
        found = []
        for line in (self.folder / "log.jsonl").read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    def best(self) -> str:
        return (self.folder / "checkpoints" / "best").resolve().name

    def checksum(self) -> str:
        """Of all that decides what the run is good for."""
        names = ["vocabulary.txt", "bpe.codes", "target_types.txt", "checksums.txt", "config.json"]
        names += [
            f"checkpoints/{link}/{name}.safetensors" for link in ("best", "last") for name in ("model", "optimizer")
        ]
        evaluated = {event["update"]: event["loss"] for event in self.events() if event["event"] == "evaluated"}
        hidden = [path.name for path in self.folder.iterdir() if path.name.startswith(".")]
        assert not hidden, f"{self.folder} still holds {hidden}"
        content = (
            b"".join((self.folder / name).read_bytes() for name in names) + repr(sorted(evaluated.items())).encode()
        )
        return hashlib.sha256(content).hexdigest()


def kill_at_random(fresh: Iterator[Run], kills: int, expected: str, duration: float) -> None:
    """Each run is killed again and again, a third of the times before it can have a checkpoint."""
    generator, early, done = random.Random(os.getpid()), 0, 0
    run = next(fresh)
    while done < kills:
        moment = generator.uniform(0, duration * generator.choice([0.3, 1.0, 1.0]))
        code = run.wait(run.start(), moment)
        if code == 0:  # it got to the end: begin anew
            assert run.checksum() == expected, "the weights differ after a kill at a random moment"
            run = next(fresh)
            continue
        done += 1
        early += not (run.folder / STARTED).exists()
        if generator.random() < 0.25:  # many beginnings
            assert run.finish() == 0 and run.checksum() == expected, "the weights differ after random kills"
            run = next(fresh)
    assert run.finish() == 0 and run.checksum() == expected, "the weights differ after random kills"
    print(
        f"{done} kills at random moments, {early} before the first checkpoint: the weights are the uninterrupted run's"
    )


def fail_at_writes(fresh: Iterator[Run], kind: str, ended: int, expected: str, stride: int) -> None:
    early = 0
    for act in itertools.count(1, stride):
        run = next(fresh)
        code = run.finish(f"{kind}:{act}")
        if code == 0:  # fewer acts than that
            break
        assert code == ended, f"{kind} at act {act} ended with {code}"
        early += not (run.folder / STARTED).exists()
        assert run.finish() == 0
        assert run.checksum() == expected, f"the weights differ after {kind} at act {act}"
        shutil.rmtree(run.folder)
    told = f"{kind} at {(act - 1) // stride} acts of writing, {early} of them before the first checkpoint"
    print(f"{told}: the weights are the uninterrupted run's")


def two_at_once(fresh: Iterator[Run], rounds: int, expected: str, duration: float, stride: int) -> None:
    """A second process comes while the first stands still at an act of writing, or at a random moment. It is refused by
    name if the first has the folder; after the first's death or end the run goes on."""
    generator, refused = random.Random(1), 0
    acts = range(1, 30, stride)  # at the first of them it has no lock yet
    for act, is_killed in itertools.product([*acts, *[None] * rounds], (True, False)):
        run = next(fresh)
        twin = Run(run.folder, {}, 0)
        twin.command, twin.said = list(run.command), run.said.with_suffix(".twin")
        if act is None:
            first = run.start()
            time.sleep(generator.uniform(0, 0.3) * duration)
        else:
            first = run.start(f"stop:{act}")
            assert os.WIFSTOPPED(os.waitpid(first, os.WUNTRACED)[1]), f"the run ended before act {act}"
        has_folder = act is not None and is_locked(run.folder)
        second, code = twin.start(), None
        if act is None:
            time.sleep(generator.uniform(0, 0.3) * duration)
        else:
            code = twin.wait(second)
        os.kill(first, signal.SIGKILL if is_killed else signal.SIGCONT)
        codes = run.wait(first), twin.wait(second) if code is None else code
        assert codes[1] == 2 or not has_folder, f"both ran from act {act} of the first on"
        refused += codes.count(2)
        if is_killed:
            assert codes[0] in (0, 2, -signal.SIGKILL) and codes[1] in (0, 2), codes
        else:
            # Where one came after the other's end, it had nothing left to do.
            assert sorted(codes) in ([0, 0], [0, 2]), codes
            started = [event for event in run.events() if event["event"] == "started"]
            assert [event["update"] for event in started] in ([0], [0, started[-1]["updates"]]), started
        for said, code in ((run.said, codes[0]), (twin.said, codes[1])):
            other = first if said == twin.said else second
            # Or it came between the config and the death of the other, or between the lock and the owner's name.
            named = (f"in use by process {other} on", "already holds a run", "in use by another process")
            assert code != 2 or any(text in said.read_text() for text in named), said.read_text()
        assert run.finish() == 0 and run.checksum() == expected, "the weights differ after two processes at once"
    assert refused >= len(acts), f"two processes met only {refused} times"
    told = f"two processes at once, {2 * (len(acts) + rounds)} times, {refused} refused by name"
    print(f"{told}: the weights are the uninterrupted run's")


def is_locked(folder: Path) -> bool:
    """Whether a process has the folder."""
    try:
        with (folder / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError) as e:
        return isinstance(e, BlockingIOError)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="kills at random moments")
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--stride", type=int, default=1, help="take every so many-th act of writing")
    parser.add_argument("--best", choices=("last", "first"), action="append", help="take one of the corpora")
    arguments = parser.parse_args()
    for name in ("matplotlib.pyplot", "torch.utils.tensorboard"):  # a run would import them each time
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Threads would not live through a fork.
    torch.set_num_threads(1)
    for best in arguments.best or ("last", "first"):
        print(f"the {best} evaluation is the best", flush=True)
        harm(best, arguments)


def harm(best: str, arguments: argparse.Namespace) -> None:
    """All faults on one corpus."""
    scratch = Path(tempfile.mkdtemp(prefix="kill-test-"))
    try:
        corpus = write_corpus(scratch / "corpus", best)
        fresh = (Run(scratch / f"run-{number}", corpus, arguments.updates) for number in itertools.count())
        whole = next(fresh)
        assert whole.finish() == 0
        at = OPTIONS["evaluate-every"] if best == "first" else arguments.updates
        assert whole.best() == f"update-{at:08}", f"the best evaluation is {whole.best()}, not the {best}"
        expected, again = whole.checksum(), next(fresh)
        start = time.monotonic()
        assert again.finish() == 0
        duration = time.monotonic() - start
        assert again.checksum() == expected, "two uninterrupted runs differ"
        kill_at_random(fresh, arguments.kills, expected, duration)
        two_at_once(fresh, max(2, arguments.kills // 10), expected, duration, arguments.stride)
        for kind, ended in FAULTS.items():
            fail_at_writes(fresh, kind, ended, expected, arguments.stride)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
