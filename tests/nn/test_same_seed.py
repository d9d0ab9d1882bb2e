"""One seed gives one model: what the package computes once in a process, for its tables, draws no random number."""

import subprocess
import sys

import pytest

from normformer_rs.config import tables

SCRIPT = """
import sys

import pytest
import torch
from normformer_rs import nn

def values(**names):
    torch.default_generator.manual_seed(1)
    built = [
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, **names), 2),
        nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, **names), 2),
    ]
    return [value for stack in built for value in stack.state_dict().values()] + [torch.get_rng_state()]

torch.manual_seed = lambda seed: print("seeded every device:", seed)
norms, schemes = (names.split(",") for names in sys.argv[1:])
for names in [{"norm": norm, "residual": "prenorm"} for norm in norms] + [{"residual": scheme} for scheme in schemes]:
    first, second = values(**names), values(**names)
    if not all(map(torch.equal, first, second)):
        print(names)
"""


@pytest.mark.full
def test_the_first_model_of_a_process_equals_the_second():
    """Stacks of every norm and every scheme, built twice from one seed in a new process."""
    names = [",".join(entry["name"] for entry in tables()[kind]) for kind in ("norms", "residuals")]
    ran = subprocess.run([sys.executable, "-c", SCRIPT, *names], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
