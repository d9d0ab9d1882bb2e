"""Where the corpora are, and what a missing one means."""

import gc
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch

import samples
from environment import DATA, DEVICE, REQUIRED
from normformer_rs import _core

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread for each of the processes, theirs included
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts commands in the background like this
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder of real corpora; a test that needs it skips where it is absent, unless NORMFORMER_RS_REQUIRE=data."""
    if not DATA.is_dir():
        message = f"no corpora at {DATA}: set NORMFORMER_RS_DATA to their folder (docs/data.md says where to get them)"
        if "data" in REQUIRED:
            pytest.fail(message)
        pytest.skip(message)
    return DATA


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(items):
    """Marks what is left to `make test-all` and `make test-long`, and what can run on a real CUDA device too."""
    samples.leave(items)
    for item in items:
        if "on_device" in getattr(item, "fixturenames", ()):
            item.add_marker("device")


def pytest_collection_finish():
    """What exists by now stays until the end, so the garbage collector need not look through it again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    """Seconds that each area's tests took, summed over the processes."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "nodeid") and hasattr(report, "duration"):
                seconds[Path(report.nodeid.partition("::")[0]).parent.name] += report.duration
    terminalreporter.section("seconds by area")
    for area, spent in seconds.most_common():
        terminalreporter.write_line(f"{spent:7.1f} {area}")


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
