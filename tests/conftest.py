"""Where the corpora are, and what a missing one means."""

import os
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
DATA = Path(os.environ.get("NORMFORMER_RS_DATA", ROOT.parent / "shared" / "data"))
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
