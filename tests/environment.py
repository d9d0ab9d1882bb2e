"""What the environment tells the tests."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("NORMFORMER_RS_DATA", ROOT.parent / "shared" / "data"))
DEVICE = os.environ.get("NORMFORMER_RS_TEST_DEVICE")
"""Where tests marked `device` run: a CUDA device, "emulated" (CPU tensors through CUDA's kernels), or None: the CPU."""
REQUIRED = set(filter(None, os.environ.get("NORMFORMER_RS_REQUIRE", "").split(",")))
"""What must be there: a test that lacks it fails instead of skipping."""
