"""Where the corpora are, and what a missing one means."""

import os
import random
from pathlib import Path

import pytest
import torch

from normformer_rs import _core

ROOT = Path(__file__).parent.parent
DATA = Path(os.environ.get("NORMFORMER_RS_DATA", ROOT.parent / "shared" / "data"))
DEVICE = os.environ.get("NORMFORMER_RS_TEST_DEVICE")
"""Where tests marked `device` run: a CUDA device, "emulated" (CPU tensors through CUDA's kernels), or None: the CPU."""
REQUIRED = set(filter(None, os.environ.get("NORMFORMER_RS_REQUIRE", "").split(",")))


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder of real corpora; a test that needs it skips where it is absent, unless NORMFORMER_RS_REQUIRE=data."""
    if not DATA.is_dir():
        message = f"no corpora at {DATA}: set NORMFORMER_RS_DATA to their folder (docs/data.md says where to get them)"
        if "data" in REQUIRED:
            pytest.fail(message)
        pytest.skip(message)
    return DATA


def pytest_collection_modifyitems(items):
    """Marks what can run on a real CUDA device too."""
    for item in items:
        if "on_device" in getattr(item, "fixturenames", ()):
            item.add_marker("device")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def one_thread():
    """Tiny models are slower on two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def emulator(tmp_path_factory):
    """This process has the emulated device."""
    from cuda_emulator import device

    os.environ.update(device.environment(tmp_path_factory.mktemp("kernels")))
    torch._C._set_deterministic_algorithms(True)  # new tensors are full of NaN: what a kernel leaves unwritten shows
    return device


@pytest.fixture(autouse=True)
def device(request):
    """What a test marked `device` makes is on the device, without a word about it in the test."""
    if DEVICE is None or request.node.get_closest_marker("device") is None:
        yield
    elif request.node.get_closest_marker("cpu") is not None:
        pytest.skip("about the CPU's own kernels")
    elif DEVICE == "emulated":
        request.getfixturevalue("emulator")
        _core.cuda_stand_in(True)
        yield
        _core.cuda_stand_in(False)
    else:
        with torch.device(DEVICE):
            yield


@pytest.fixture(scope="session")
def fairseq():
    """fairseq with the plug-in."""
    import normformer_rs.fairseq_plugin

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
