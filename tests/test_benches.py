"""The benchmarks run, in miniature; what they measure is not looked at."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from normformer_rs.bench import gpu, training

BENCHES = Path(__file__).parent.parent / "benches"


@pytest.mark.data
def test_a_window_of_the_training_benchmark(corpora):
    """Our side of benches/training.py, by its protocol."""
    command = [sys.executable, BENCHES / "our_worker.py", corpora / "multi30k-bpe-en-de", "--max-tokens", "512"]
    done = subprocess.run(command, input="window 0.1\nquit\n", capture_output=True, text=True, check=True)
    ready, window = map(json.loads, done.stdout.splitlines())
    assert ready["ready"] and window["updates"] >= 1 and window["target_tokens"] > 100


def test_the_gpu_benchmark_reports_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "REPEATS", 2)
    monkeypatch.setattr(training, "SENTENCES", 100)
    gpu.measure(tmp_path / "out", tmp_path, "cpu", megabytes=1, updates=2, quick=True)
    rows = list(csv.DictReader((tmp_path / "out" / "gpu.csv").read_text().splitlines()))
    found = {row["what"]: row["value"] for row in rows}
    for suite in ("cuda", "operators", "norms", "norm_modules"):  # none in that folder
        assert found[f"tests/test_{suite}.py on the device"].startswith("unmeasured: FileNotFoundError")
    assert found["4096×512"].startswith("unmeasured")  # no CUDA graphs on a CPU
    assert found["Liger's rms_norm, bf16"].startswith("unmeasured")
    assert float(found["ten losses as on the CPU, f32"]) == 0
    for figure in ("layer_norm, backward, bf16", "power_norm, forward, f32", "normformer_rs", "against eager"):
        assert float(found[figure]) > 0
    assert (tmp_path / "out" / "gpu.png").stat().st_size > 1000
