"""The benchmarks run, in miniature; what they measure is not looked at, but that kept memory is no fresh memory."""

import csv
import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from normformer_rs import DataConfig
from normformer_rs.bench import correctness, gpu, kernels, training
from normformer_rs.bench.figures import Figures

BENCHES = Path(__file__).parents[2] / "benches"
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.data
@pytest.mark.full
def test_a_window_of_the_training_benchmark(corpora):
    """Our side of benches/training.py, by its protocol."""
    command = [sys.executable, BENCHES / "our_worker.py", corpora / "multi30k-bpe-en-de", "--max-tokens", "512"]
    done = subprocess.run(command, input="window 0.1\nquit\n", capture_output=True, text=True, check=True)
    ready, window = map(json.loads, done.stdout.splitlines())
    assert ready["ready"] and window["updates"] >= 1 and window["target_tokens"] > 100


@pytest.mark.full
@pytest.mark.data
@pytest.mark.long
def test_pytorch_s_side_and_the_shares_of_both(corpora):
    """benches/torch_worker.py by benches/shares.py: no millisecond of an update is counted twice."""
    command = [sys.executable, BENCHES / "shares.py", corpora / "multi30k-bpe-en-de", "--precision", "f32"]
    done = subprocess.run(
        [*command, "--updates", "1", "--max-tokens", "512"], capture_output=True, text=True, check=True
    )
    header, *lines = done.stdout.splitlines()
    rows = {line[:32].strip(): [float(cell) for cell in re.findall(r"(-?[0-9.]+)%", line)] for line in lines}
    assert header.split()[-4:] == ["ours", "f32", "eager", "f32"]
    assert all(len(row) == 2 for row in rows.values()) and min(rows["products"]) > 0
    for side in range(2):
        assert all(rows[kind][side] > 0 for kind in ("products", "attention", "norms and residual steps", "loss"))
        assert rows["outside"][side] > 0


@pytest.mark.full
@pytest.mark.data
@pytest.mark.long
def test_cost_against_work(corpora, tmp_path):
    """A point of benches/scale.py in one process and in two."""
    command = [sys.executable, BENCHES / "scale.py", corpora / "multi30k-bpe-en-de", "--output", tmp_path / "scale.csv"]
    subprocess.run(
        [*command, "--points", "tokens=256", "threads=1,ranks=2,tokens=256"], capture_output=True, check=True
    )
    alone, two = csv.DictReader((tmp_path / "scale.csv").read_text().splitlines())
    assert (alone["ranks"], two["ranks"]) == ("1", "2") and (tmp_path / "scale.png").stat().st_size > 1000
    for row in (alone, two):
        assert 0 < float(row["products"]) < 1 and float(row["calls"]) > 0
        assert float(row["target_tokens_per_second"]) > 0
    assert float(two["peak_gib"]) > 1.2 * float(alone["peak_gib"])


@pytest.mark.full
@pytest.mark.data
@pytest.mark.long
def test_a_second_thread_beside_a_product(corpora):
    command = [sys.executable, BENCHES / "threads.py", corpora / "multi30k-bpe-en-de", "--precision", "f32"]
    done = subprocess.run(
        [*command, "--windows", "1", "--seconds", "1"], capture_output=True, text=True, check=True
    ).stdout
    one, two, last = done.splitlines()
    rates = [float(re.search(r"([0-9,]+) target", line)[1].replace(",", "")) for line in (one, two)]
    assert float(re.search(r"training ([0-9.]+)", last)[1]) == pytest.approx(rates[1] / rates[0], abs=0.02)


@pytest.mark.parametrize(
    "command, lines",
    [
        ("kernels.py --megabytes 1 --repeats 1 --rows 64", 7),
        ("norms.py --megabytes 1 --rounds 1 --only forward", 13),
        ("products.py --rows 30 --rounds 1", 25),
        ("depth.py --layers 2 --updates 1", 1),
        (f"against.py {BENCHES.parent} speed --pairs 1 --megabytes 1", 10),
    ],
)
@pytest.mark.one_in(all=3)
def test_benchmarks_that_nothing_else_runs(command, lines):
    script, *flags = command.split()
    done = subprocess.run([sys.executable, BENCHES / script, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= lines


@pytest.mark.full
def test_every_benchmark_imports_what_there_is():
    """All in one process: those that need another library or a corpus are run by hand alone."""
    names = sorted(path.stem for path in BENCHES.glob("*.py"))
    code = f"import importlib\nfor name in {names}:\n    importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_kept_memory_costs_no_fresh_pages():
    """Pages that five tensors of 64 MiB take, one after another: as the allocator comes, and told to keep them. The
    least of three times: the system may take a tensor's pages back meanwhile."""
    code = """
import resource, torch, normformer_rs
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.zeros(1 << 24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
fresh = pages()
normformer_rs.keep_memory()
torch.zeros(1 << 24)
print(fresh, min(pages() for _ in range(3)))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GLIBC_", "MALLOC_"))}
    environment.pop("NORMFORMER_RS_ALLOCATOR", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    fresh, kept = map(int, done.stdout.split())
    assert kept < fresh / 10, (fresh, kept)


@pytest.mark.skipif("[never]" in THP.read_text() if THP.exists() else True, reason="the system has no large pages")
@pytest.mark.full
def test_results_lie_on_large_pages():
    """The system's list says for which memory large pages were asked: whether it has any left is its own affair."""
    code = """
import re, torch, normformer_rs
x, weight = torch.ones(1 << 15, 512), torch.ones(512)
def asked(tensor):
    at, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in open("/proc/self/smaps"):
        if area := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(area[1], 16) <= at < int(area[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
ours, torchs = torch.ops.normformer_rs.layer_norm(x, weight, None, 1e-5)[0], x + 1
print(asked(ours), asked(torchs))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GLIBC_", "MALLOC_"))}
    for allocator, said in (("", "True False"), ("system", "False False")):
        environment["NORMFORMER_RS_ALLOCATOR"] = allocator
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == said, allocator


def options(folder, **others):
    """Of the GPU's benchmark on a CPU, in miniature."""
    return gpu.Options(**{"output": folder, "tests": folder, "device": "cpu", "megabytes": 1, "updates": 2} | others)


def values(folder):
    """What gpu.csv says, by (section, what)."""
    rows = csv.DictReader((folder / "gpu.csv").read_text().splitlines())
    return {(row["section"], row["what"]): row["value"] for row in rows}


@pytest.mark.long
def test_the_gpu_benchmark(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "REPEATS", 2)
    gpu.here(options(tmp_path), ["losses", "graph", "bandwidth", "training", "reference", "tests", "memcheck"])
    figures = Figures(tmp_path, "cpu")
    training.compare(figures)
    figures.draw()
    found = values(tmp_path)
    for precision in ("f32", "bf16"):
        assert float(found["losses", f"ten losses as on the CPU, {precision}"]) == 0
    for figure in (
        "copy, bf16",
        "layer_norm, backward, bf16",
        "power_norm, forward, f32",
        "residual step, p = 0.1, f32",
    ):
        assert float(found["bandwidth", figure]) > 0
    for figure in ("normformer_rs", "normformer_rs, no CUDA graphs", "against eager", "whole section"):
        assert float(found["training", figure]) > 0
    for section, what in [
        ("graph", "whole section"),  # no CUDA graphs on a CPU
        ("bandwidth", "Liger's rms_norm, bf16"),
        ("training", "against the better compiled form"),
        ("tests", "tests/cuda/test_cuda.py on the device"),  # none in that folder
        ("memcheck", "compute-sanitizer"),
    ]:
        assert found[section, what].startswith("unmeasured"), (section, what)
    assert (tmp_path / "gpu.png").stat().st_size > 1000


@pytest.mark.full
def test_a_call_of_the_gpu_benchmark_adds_to_an_earlier_one(tmp_path):
    Figures(tmp_path, "cpu").add("reference", training.EAGER, 1000.0, training.RATE)
    command = [sys.executable, "-m", "normformer_rs.bench", "gpu", "--device=cpu", "--updates=2", "--only=training"]
    said = subprocess.run([*command, f"--output={tmp_path}"], check=True, capture_output=True, text=True).stdout
    found = values(tmp_path)
    ours = float(found["training", training.OURS])
    assert float(found["training", "against eager"]) == pytest.approx(ours / 1000, rel=1e-3)
    for text in (said, (tmp_path / "gpu.log").read_text()):
        assert training.OURS in text and "whole section" in text


@pytest.mark.parametrize(
    "code, reason",
    [
        ("import os; print('about to', flush=True); os.abort()", "SIGABRT"),
        ("import os; os.system(': > alive; sleep 600 > alive')", "stopped after 3 s"),
        ("raise OSError('why')", "exit 1: OSError: why"),
    ],
    ids=["crashes", "hangs", "fails"],
)
@pytest.mark.one_in(test=2)
def test_a_section_that_dies_leaves_the_others(tmp_path, monkeypatch, code, reason):
    monkeypatch.chdir(tmp_path)
    Figures(tmp_path, "cpu").add("losses", "of an earlier call", 1.0, "")
    codes = {"losses": code, "graph": "open('next', 'w')"}
    os.mkfifo("alive")
    alive = os.open("alive", os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setattr(gpu, "command", lambda section, _: [sys.executable, "-c", codes[section]])
    monkeypatch.setitem(gpu.SECTIONS, "losses", gpu.SECTIONS["losses"]._replace(limit=3 if "sleep" in code else 150))
    gpu.measure(options(tmp_path), ["losses", "graph"])
    assert values(tmp_path) == {
        ("losses", "of an earlier call"): "1",
        ("losses", "whole section"): f"unmeasured: {reason}",
    }
    assert (tmp_path / "next").exists()
    has_ended(alive)
    assert reason != "SIGABRT" or "about to" in (tmp_path / "gpu.log").read_text()


@pytest.mark.full
def test_what_ends_the_command_ends_its_section(tmp_path):
    suite = "import time; alive = open('alive', 'w'); time.sleep(600)"
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "test_cuda.py").write_text(suite)
    command = [sys.executable, "-m", "normformer_rs.bench", "gpu", "--device=cpu", "--only=tests", "--tests=."]
    os.mkfifo(tmp_path / "alive")
    alive = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    with subprocess.Popen(command, cwd=tmp_path) as running:
        with suppress(BlockingIOError):
            while not os.read(alive, 1):  # until the suite has opened it
                assert running.poll() is None
                time.sleep(0.1)
        running.terminate()
    assert running.returncode == 143
    has_ended(alive)


def has_ended(alive):
    """No process holds the pipe open for writing, or soon none does: the end of a process closes it."""
    for _ in range(600):
        with suppress(BlockingIOError):
            assert os.read(alive, 1) == b""
            break
        time.sleep(0.1)
    else:
        pytest.fail("a process lives on")
    os.close(alive)


def test_a_figure_takes_the_place_of_the_earlier_one(tmp_path):
    for value in (1.0, 2.0):
        figures = Figures(tmp_path, "cpu")
        figures.add("graph", "a", value, "µs")
        figures.add("graph", f"b {value:g}", 123456.7, "µs")
        with figures.attempt("graph", f"c {value:g}"):
            raise ValueError("not\nhere")
        if value == 1:
            figures.forget_unmeasured("graph")
    found = {what: value for (_, what), value in values(tmp_path).items()}
    assert found == {"a": "2", "b 1": "123457", "b 2": "123457", "c 2": "unmeasured: ValueError: not here"}


def test_figures_of_two_devices_are_not_mixed(tmp_path):
    (tmp_path / "gpu.csv").write_text("section,what,value,unit,bar,met,device,date,torch,version\na,b,1,,,,NVIDIA,,,\n")
    with pytest.raises(SystemExit, match="holds figures of NVIDIA, this is cpu"):
        Figures(tmp_path, "cpu")


def test_a_run_with_a_warning_is_not_measured(monkeypatch):
    monkeypatch.setattr(training, "MAX_TOKENS", 40)
    monkeypatch.setattr(training, "DataConfig", partial(DataConfig, skip_long=True))
    with pytest.raises(RuntimeError, match="longer than a batch of --max-tokens 40"):
        training.history(training.TINY, "cpu", 1, "f32", 100)


@pytest.mark.parametrize("count", [4, 280, 4000])
def test_made_up_sentences_have_all_words(count):
    words = {word for sentence in training.sentences(count) for word in sentence}
    assert len(words) + training.SPECIAL == training.types(count) and training.types(count) % 8 == 0


SUITE = """
import os, pytest

@pytest.mark.device
@pytest.mark.parametrize("number", range(30))
def test_of_the_device(number):
    assert os.environ["NORMFORMER_RS_TEST_DEVICE"] == "cpu" and {holds}

def test_of_none():
    raise AssertionError
"""


def test_the_suites_on_the_device(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = device\n    cpu")
    for suite, holds in zip(correctness.SUITES, ["True", "os.abort()", "number % 2", "False", "True"]):
        (tmp_path / suite).parent.mkdir(exist_ok=True)
        (tmp_path / suite).write_text(SUITE.format(holds=holds))
    correctness.tests(Figures(tmp_path, "cpu"), tmp_path, "cpu")
    found = values(tmp_path)
    expected = ["30 passed, 1 deselected", "exit -6: ", "15 failed, 15 passed, 1 deselected", "20 failed, 1 deselected"]
    expected.append(expected[0])
    for suite, said in zip(correctness.SUITES, expected):
        assert found["tests", f"tests/{suite} on the device"].startswith(said)


@pytest.mark.parametrize(
    "status, said, value",
    [
        (0, "", "clean"),
        (9, "", "errors: see memcheck.log"),
        (0, "Device not supported", "unmeasured: RuntimeError: Device not supported"),
    ],
)
def test_what_compute_sanitizer_says(tmp_path, monkeypatch, status, said, value):
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "test_cuda.py").touch()
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(f"#!/bin/sh\necho $@ {said}\nexit {status}")
    sanitizer.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    correctness.sanitized(Figures(tmp_path, "cpu"), tmp_path, "cpu", "memcheck")
    assert values(tmp_path) == {("memcheck", "compute-sanitizer"): value}
    assert "--tool memcheck --report-api-errors no" in (tmp_path / "memcheck.log").read_text()
