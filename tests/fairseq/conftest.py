"""fairseq with the plug-in, and a small corpus that it has binarised."""

import random
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def fairseq():
    """fairseq with the plug-in."""
    import fairseq_support

    import normformer_rs.fairseq_plugin

    fairseq_support.compose_once()
    return normformer_rs.fairseq_plugin


@pytest.fixture(scope="session")
def data(tmp_path_factory, fairseq) -> Path:
    """A corpus that fairseq has binarised: letters, and the same letters as capitals; "k" only on the source side."""
    import fairseq_support

    folder, chosen = tmp_path_factory.mktemp("data"), random.Random(0)
    for split, lines in (("train", 200), ("valid", 24), ("test", 24)):
        texts = [chosen.choices("abcdefghij", k=chosen.randint(2, 9)) for _ in range(lines)]
        source = "".join(" ".join(text) + " k\n" for text in texts)
        (folder / f"{split}.de").write_text(source)
        (folder / f"{split}.en").write_text("".join(" ".join(text).upper() + "\n" for text in texts))
    return fairseq_support.preprocess(folder, folder / "bin")
