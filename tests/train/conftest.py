"""The training tests' text, and their Ctrl-C."""

import random

import pytest


@pytest.fixture
def corpus(tmp_path):
    """Digits to letters, reversed: 40 training pairs, 8 held out."""
    generator = random.Random(5)
    paths = {}
    for part, n in (("train", 40), ("valid", 8)):
        pairs = [[generator.choice("0123456789") for _ in range(generator.randint(1, 6))] for _ in range(n)]
        pairs += [list("0123456789")] if part == "train" else []
        for side, lines in (("source", pairs), ("target", [[chr(97 + int(d)) for d in p[::-1]] for p in pairs])):
            path = tmp_path / f"{part}.{side}"
            path.write_text("".join(" ".join(line) + "\n" for line in lines))
            paths[f"{part}_{side}"] = str(path)
    return paths


@pytest.fixture
def ctrl_c(monkeypatch):
    """Makes the next run be interrupted after an update."""
    from normformer_rs.loop import training as module

    original = module._core.train

    def at(update):
        def interrupted(*arguments, **options):
            observer = arguments[-1]
            updated = observer.updated

            def stop(event):
                updated(event)
                if event["update"] == update:
                    monkeypatch.undo()
                    raise KeyboardInterrupt

            observer.updated = stop
            return original(*arguments, **options)

        monkeypatch.setattr(module._core, "train", interrupted)

    return at
