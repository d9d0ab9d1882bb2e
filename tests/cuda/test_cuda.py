"""The CUDA kernels and their launcher without a GPU (docs/cuda.md).

With one, `NORMFORMER_RS_TEST_DEVICE=cuda pytest -m device tests/cuda` runs the same cases on it.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import binaries
import pytest
import torch

from cuda_emulator import cases, checks, column_cases, device, launcher_cases
from normformer_rs import _core

NORMS = [norm for norm in checks.NORMS if norm]
WIDTHS = [1, 3, 32, 100, 512, 1030, 8200]
COLUMN_WIDTHS = [1, 3, 32, 100, 512, 2056]


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Compiled kernels, shared by the session's processes."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def on_device(emulated):
    """Runs a case on the emulated device, or on the real one that NORMFORMER_RS_TEST_DEVICE names."""
    if not checks.REAL:
        return emulated

    def run(case, *arguments, **options):
        with torch.device(checks.REAL):
            case(*arguments, **options)

    return run


@pytest.fixture
def emulated(cache):
    def run(case, *arguments, env=(), **options):
        return device.run(partial(case, **options), *arguments, env=device.environment(cache, **dict(env)))

    return run


# ---- kernels against their float64 twins ----


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.one_in(test=35, all=34)
def test_a_norm(on_device, norm, width):
    # Every norm meets every width and every dtype.
    dtype = list(checks.TYPES)[(WIDTHS.index(width) + NORMS.index(norm)) % 3]
    on_device(cases.row_norm, norm, dtype, width, 3 if width > 5000 else 9)


LENGTHS = [(p, dtype, 100) for p in (1.0, 1.5, 3.0, math.inf) for dtype in checks.TYPES]


@pytest.mark.parametrize("p, dtype, width", [*LENGTHS, (3.0, "f32", 1), (1.0, "bf16", 8200), (math.inf, "f32", 1030)])
@pytest.mark.one_in(test=15, all=14)
def test_lengths_of_another_order(on_device, p, dtype, width):
    on_device(cases.lp_norm, p, dtype, width)


@pytest.mark.parametrize("p", [1.0, 3.0, math.inf])
@pytest.mark.one_in(test=3, all=2)
def test_lengths_of_another_order_under_the_clamp(on_device, p):
    on_device(cases.lp_norm, p, "f32", 40, clamped=True)


@pytest.mark.parametrize("dtype", checks.TYPES)
@pytest.mark.one_in(test=3, all=2)
def test_misaligned_rows(on_device, dtype):
    on_device(cases.row_norm, "layer_norm", dtype, 96, misaligned=True)


@pytest.mark.parametrize("norm, per_column", [("layer_norm", False), ("scale_norm", True)])
@pytest.mark.one_in(test=2)
def test_gains_of_either_kind(on_device, norm, per_column):
    on_device(cases.row_norm, norm, "f32", 100, per_column=per_column)


@pytest.mark.parametrize(
    "norm, dtype, types",
    [
        ("layer_norm", "bf16", ("bf16", "bf16")),
        ("rms_norm", "f32", ("f16", "f16")),
        ("scale_norm", "bf16", ("bf16", "bf16")),
        ("layer_norm", "bf16", ("bf16", "f16")),
        ("layer_norm", "f32", ("bf16", "f32")),
    ],
)
@pytest.mark.one_in(all=5)
def test_parameters_of_16_bits(on_device, norm, dtype, types):
    on_device(cases.row_norm, norm, dtype, 512, types=types)
    if types[0] == types[1]:
        on_device(cases.residual, norm, (dtype, "bf16"), 100, 0.3, of_norm=types[0])


STEPS = [
    (None, ("f32", "f32"), 19, 0.3, "each"),
    (None, ("bf16", "bf16"), 64, 0.0, None),
    ("layer_norm", ("f32", "bf16"), 64, 0.3, "each"),
    ("layer_norm", ("bf16", "bf16"), 1030, 0.3, "one"),
    ("dyt", ("bf16", "bf16"), 1030, 0.3, "one"),
    ("derf", ("f32", "f16"), 100, 0.3, "each"),
    ("rms_norm", ("f32", "f32"), 64, 0.3, None),
    ("rms_norm", ("f32", "f16"), 136, 0.1, "one"),
    ("scale_norm", ("f16", "f16"), 520, 0.3, "each"),
    ("scale_norm", ("f32", "f32"), 1, 0.5, None),
]


@pytest.mark.parametrize("norm, types, width, p, gains", STEPS, ids=str)
@pytest.mark.one_in(test=10, all=9)
def test_the_residual_step(on_device, norm, types, width, p, gains):
    on_device(cases.residual, norm, types, width, p, gains)


@pytest.mark.parametrize("backs", [(True, False), (False, True)], ids=["x_plus", "y"])
@pytest.mark.one_in(test=2)
def test_a_gradient_from_one_side(on_device, backs):
    on_device(cases.residual, "layer_norm", ("f32", "f32"), 64, 0.3, "one", backs=backs)


@pytest.mark.parametrize(
    "case", [cases.extreme_rows, cases.empty, cases.rows_are_independent], ids=lambda c: c.__name__
)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.one_in(test=8, all=5)
def test_properties(on_device, norm, case):
    on_device(case, norm)


@pytest.mark.parametrize("width", COLUMN_WIDTHS)
@pytest.mark.parametrize("norm", checks.COLUMN_NORMS)
@pytest.mark.one_in(test=18, all=17)
def test_a_column_norm(on_device, norm, width):
    dtype = list(checks.TYPES)[(COLUMN_WIDTHS.index(width) + list(checks.COLUMN_NORMS).index(norm)) % 3]
    on_device(column_cases.column_norm, norm, dtype, width)


COLUMNS = [
    ("batch_norm", "f32", 40, {"padded": None, "mean": 1000.0}),
    ("batch_norm", "f32", 40, {"padded": "some", "mean": 1000.0, "rows": 600}),
    ("batch_norm", "bf16", 24, {"padded": "all"}),
    ("batch_norm", "f32", 1, {"rows": 140_000, "steps": 1}),
    ("batch_norm", "f16", 64, {"buffers": torch.float64}),
    ("power_norm_v", "f16", 24, {"padded": None, "rows": 600}),
    ("power_norm_v", "f32", 40, {"padded": "all"}),
    ("power_norm_v", "f32", 100, {"misaligned": True}),
    ("power_norm_v", "bf16", 40, {"weights_from": 1}),
    ("power_norm", "f32", 40, {"padded": None}),
    ("power_norm", "bf16", 24, {"padded": "all"}),
    ("power_norm", "f32", 40, {"mode": "release"}),
    ("power_norm", "bf16", 24, {"mode": "release", "padded": None}),
    ("power_norm", "f16", 64, {"rows": 130, "misaligned": True}),
]


@pytest.mark.parametrize("norm, dtype, width, options", COLUMNS, ids=str)
@pytest.mark.one_in(test=14, all=13)
def test_columns(on_device, norm, dtype, width, options):
    on_device(column_cases.column_norm, norm, dtype, width, **options)


@pytest.mark.parametrize("norm", checks.COLUMN_NORMS)
@pytest.mark.one_in(all=3)
def test_corners_of_columns(on_device, norm):
    on_device(column_cases.column_corners, norm)


@pytest.mark.parametrize("case", [column_cases.late_rows, column_cases.tiny_spread], ids=lambda c: c.__name__)
@pytest.mark.one_in(all=2)
def test_odd_rows_of_columns(on_device, case):
    on_device(case)


def test_a_gradient_of_columns_is_refused(on_device):
    on_device(column_cases.refuses_a_gradient)


@pytest.mark.parametrize("norm", checks.COLUMN_NORMS)
@pytest.mark.one_in(all=3)
def test_columns_are_repeatable(on_device, norm):
    on_device(column_cases.columns_are_repeatable, norm, 40)


def test_norms_made_of_others(on_device):
    on_device(cases.norms_made_of_others)


@pytest.mark.parametrize("eps", [1.0, 0.1])
@pytest.mark.one_in(test=2)
def test_short_rows(on_device, eps):
    on_device(cases.short_rows, eps)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 200.0, math.inf])
def test_extreme_lengths(on_device, p):
    on_device(cases.extreme_lengths, p)


@pytest.mark.parametrize("width", [64, 1030])
@pytest.mark.one_in(test=2)
def test_a_gain_without_a_gradient(on_device, width):
    on_device(cases.fixed_alpha, width)


@pytest.mark.parametrize("width", [64, 1030])
@pytest.mark.one_in(all=2)
def test_results_are_repeatable(on_device, width):
    on_device(cases.repeatable, "layer_norm", width)
    on_device(cases.repeatable, "derf", width)


@pytest.mark.parametrize(
    "dtype, width, masked, options",
    [
        ("f32", 2, False, {}),
        ("f32", 1200, True, {}),
        ("bf16", 2056, False, {}),
        ("f16", 515, True, {}),
        ("f32", 96, False, {"misaligned": True}),
        ("f32", 1030, False, {"smoothing": 0.0, "scale": 30.0}),
    ],
    ids=str,
)
@pytest.mark.one_in(all=6)
def test_cross_entropy(on_device, dtype, width, masked, options):
    on_device(cases.cross_entropy, dtype, width, masked, **options)


@pytest.mark.parametrize("count", [1, 40, 1027])
@pytest.mark.one_in(test=2)
def test_adam(on_device, count):
    on_device(cases.adam, count)


@pytest.mark.parametrize("moments, place", [("f32", 0), ("bf16", 0), ("bf16", 1020), ("bf16", 1021)])
@pytest.mark.one_in(test=2)
def test_adams_formula(on_device, moments, place):
    on_device(cases.adams_formula, moments, place)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.one_in(test=2)
def test_targets_outside_the_vocabulary(on_device, masked):
    on_device(cases.bad_targets, masked)


@pytest.mark.parametrize("offset", [0.0, 1e6, 3e38])
def test_cross_entropy_of_logits_with_an_offset(on_device, offset):
    on_device(cases.offset_logits, offset)


@pytest.mark.parametrize(
    "case", [cases.ignored_words, cases.falling_logits, cases.infinite_logits], ids=lambda c: c.__name__
)
def test_losses_of_odd_rows(on_device, case):
    on_device(case)


UNNAMED = [d for d in checks.DETECTORS if f"cases.{d.case.__name__}" not in Path(__file__).read_text()]


@pytest.mark.parametrize("detector", UNNAMED, ids=str)
@pytest.mark.one_in(test=4, all=3)
def test_a_case_without_a_test_of_its_own(on_device, detector):
    on_device(detector.case, *detector.arguments)


# ---- the launcher ----


def test_the_launches_of_a_norm(emulated, tmp_path):
    log = str(tmp_path / "log")
    names = emulated(launcher_cases.launches, "layer_norm", env={"MOCK_LOG": log})
    assert names == ["rows_forward", "rows_backward", "sum_partials"]


@pytest.mark.parametrize("train", [True, False])
def test_the_launches_of_a_column_norm(emulated, tmp_path, train):
    log = str(tmp_path / "log")
    names = emulated(launcher_cases.launches, "batch_norm", train=train, env={"MOCK_LOG": log})
    measured = ["columns_measure", "columns_merge"] if train else []
    back = ["columns_gradient_sums", "sum_partials", "columns_slopes", "columns_gradient"]
    assert names == [*measured, "columns_settle", "columns_normalise", *back]


REQUIRED = "cuInit cuDeviceGet cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuCtxPushCurrent_v2 cuModuleLoadData"
REQUIRED += " cuModuleGetFunction cuThreadExchangeStreamCaptureMode nvrtcCreateProgram nvrtcCompileProgram"
REQUIRED += " nvrtcGetCUBINSize nvrtcGetCUBIN"


@pytest.mark.parametrize("function", REQUIRED.split())
def test_a_failing_function_means_the_formula(tmp_path, function):
    env = device.environment(tmp_path, MOCK_FAIL=function)
    warning = device.run(launcher_cases.warns_and_falls_back, env=env)
    said = "NVRTC says" if function.startswith("nvrtc") else "the CUDA driver says invalid argument"
    assert "composed formulas run" in warning and said in warning, warning


def test_the_streams_of_hyper_connections_take_formulas(tmp_path):
    counts = device.run(launcher_cases.streams_by_formula, env=device.environment(tmp_path))
    assert all(kernels == 0 and formulas > 0 for kernels, formulas in counts), counts


def test_kernels_may_be_required(tmp_path):
    env = device.environment(tmp_path, MOCK_FAIL="cuInit", NORMFORMER_RS_CUDA="require")
    message = device.run(launcher_cases.refuses, env=env)
    assert "NORMFORMER_RS_CUDA=require" in message and "cuInit" in message


def test_kernels_may_be_off(tmp_path):
    warning = device.run(
        launcher_cases.warns_and_falls_back, env=device.environment(tmp_path, NORMFORMER_RS_CUDA="off")
    )
    assert "NORMFORMER_RS_CUDA=off" in warning


def test_a_wish_may_be_misspelt(tmp_path):
    message = device.run(launcher_cases.refuses, env=device.environment(tmp_path, NORMFORMER_RS_CUDA="requir"))
    assert "expected one of auto, require, trust, off" in message


def test_the_first_use_of_a_kernel_proves_it_once(tmp_path):
    launched = ["rows_forward", "rows_backward", "sum_partials"]
    env = device.environment(tmp_path, NORMFORMER_RS_CUDA="auto", MOCK_LOG=str(tmp_path / "log"))
    names, verdicts, warned = device.run(launcher_cases.proven_launches, env=env)
    assert len(names) > 3 * len(launched) and names[-1] == "sum_partials" and not warned
    assert {(line.split("\t")[3], line.split("\t")[4]) for line in verdicts} == {(name, "right") for name in launched}
    assert all(line.startswith("emulated, driver 13.0\t") for line in verdicts)
    (tmp_path / "log").unlink()
    assert device.run(launcher_cases.proven_launches, env=env) == (launched, verdicts, [])  # another process


@pytest.mark.full
def test_a_first_call_without_rows_proves_nothing(tmp_path):
    env = device.environment(tmp_path, NORMFORMER_RS_CUDA="auto")
    verdicts, warned = device.run(launcher_cases.launches_without_rows, env=env)
    assert verdicts and {line.split("\t")[4] for line in verdicts} == {"right"} and not warned


@pytest.mark.full
def test_a_kernel_that_was_wrong_stays_off(tmp_path):
    env = device.environment(tmp_path, NORMFORMER_RS_CUDA="auto", MOCK_LOG=str(tmp_path / "log"))
    device.run(launcher_cases.proven_launches, env=env)
    for file in tmp_path.glob("*.verdicts"):
        file.write_text(file.read_text().replace("rows_backward\tright", "rows_backward\twrong"))
    (tmp_path / "log").unlink()
    names, verdicts, warned = device.run(launcher_cases.proven_launches, env=env)
    assert names == ["rows_forward"] and not warned and "wrong" in "".join(verdicts)
    trusted = device.run(launcher_cases.proven_launches, env={**env, "NORMFORMER_RS_CUDA": "trust"})
    assert trusted[0][1:] == ["rows_forward", "rows_backward", "sum_partials"]


@pytest.mark.parametrize("distrusted", ["file for all", "linked file", "folder for all", "linked folder"])
@pytest.mark.one_in(all=4)
def test_what_others_may_have_written_is_not_trusted(tmp_path, distrusted):
    folder = tmp_path / "kernels"
    env = device.environment(folder, NORMFORMER_RS_CUDA="auto", MOCK_LOG=str(tmp_path / "log"))
    names, verdicts, _ = device.run(launcher_cases.proven_launches, env=env)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    for file in folder.glob("*.verdicts"):  # forged
        file.write_text(file.read_text().replace("right", "wrong"))
        if distrusted == "file for all":
            file.chmod(0o666)
        elif distrusted == "linked file":
            file.symlink_to(file.rename(tmp_path / file.name))
    if distrusted == "folder for all":
        folder.chmod(0o777)
    elif distrusted == "linked folder":
        folder.symlink_to(folder.rename(tmp_path / "elsewhere"))
    (tmp_path / "log").unlink()
    again, kept, warned = device.run(launcher_cases.proven_launches, env=env)
    assert (again, warned) == (names, []), "the verdicts do not count, and kernels are proven again"
    assert kept == (verdicts if "file" in distrusted else [])


def test_no_library_means_the_formula(tmp_path):
    env = {"NORMFORMER_RS_CUDA_LIBRARIES": str(tmp_path), "NORMFORMER_RS_CACHE": str(tmp_path)}
    assert "libcuda.so.1 cannot be loaded" in device.run(launcher_cases.warns_and_falls_back, env=env)


def test_a_launch_that_fails_is_an_error(emulated):
    assert "cuLaunchKernel: the CUDA driver says invalid argument" in emulated(launcher_cases.launch_fails)


def test_double_precision(emulated):
    emulated(launcher_cases.double_runs_the_formula)


# ---- the training loop ----


@pytest.mark.full
def test_a_step_is_recorded_and_replayed(emulated, tmp_path):
    asked, warnings, _ = emulated(launcher_cases.training_by_graphs, tmp_path)
    assert [name for name, *_ in asked[:2]] == ["_cuda_synchronize", "_cuda_emptyCache"]
    assert asked[2:4] == [BEGIN, ("capture_end",)] and asked[4:] == [("replay",)] and not warnings


BEGIN = ("capture_begin", ("pool", (0, 1)), ("capture_error_mode", "thread_local"))


@pytest.mark.parametrize("fails", ["_cuda_emptyCache", "capture_begin", "capture_end"])
@pytest.mark.one_in(all=3)
def test_a_step_that_cannot_be_recorded_is_done(emulated, tmp_path, fails):
    """And the memory of its graph is free by then."""
    asked, warnings, freed = emulated(launcher_cases.training_by_graphs, tmp_path, fails=fails)
    assert len(warnings) == 1
    assert "no CUDA graphs" in warnings[0] and "not permitted when stream is capturing" in warnings[0]
    # Once the allocator gives from the graphs' pool it is told to stop.
    assert (("_cuda_endAllocateToPool", 0, (0, 1)) in asked) == (fails != "_cuda_emptyCache")
    assert freed == ([] if fails == "_cuda_emptyCache" else [True])


def test_cudnns_attention_stays_off_until_the_last_thread_leaves(emulated, tmp_path):
    assert emulated(launcher_cases.attention_of_two_threads, tmp_path) == [False, True]


# ---- the cache ----


def compilations(cache, counter):
    """How many programs a process compiles that runs one norm forward and backward."""
    before = counter.stat().st_size if counter.exists() else 0
    device.run(cases.row_norm, "rms_norm", "f32", 32, env=device.environment(cache, MOCK_COUNT=str(counter)))
    return (counter.stat().st_size if counter.exists() else 0) - before


def test_kernels_are_compiled_once(tmp_path):
    cache, counter = tmp_path / "deep" / "cache", tmp_path / "count"
    assert compilations(cache, counter) == 3  # forward, backward, sums
    assert compilations(cache, counter) == 0


@pytest.mark.full
def test_a_broken_cache_costs_time_only(tmp_path):
    cache, counter = tmp_path / "cache", tmp_path / "count"
    compilations(cache, counter)
    cut, flipped, emptied = sorted(cache.iterdir())
    cut.write_bytes(cut.read_bytes()[:-100])
    damaged = bytearray(flipped.read_bytes())
    damaged[-1000] ^= 1
    flipped.write_bytes(damaged)
    emptied.write_bytes(b"")
    assert compilations(cache, counter) == 3
    assert compilations(cache, counter) == 0


def test_processes_share_a_cache(tmp_path):
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda i: compilations(cache, tmp_path / f"count{i}"), range(2)))
    assert len(list(cache.iterdir())) == 3
    assert compilations(cache, tmp_path / "count") == 0


def test_an_unwritable_cache_costs_time_only(tmp_path):
    (tmp_path / "file").touch()
    counter = tmp_path / "count"
    assert [compilations(tmp_path / "file" / "cache", counter) for _ in range(2)] == [3, 3]


# ---- the real compiler ----


def real_compiler():
    """Whether NVIDIA's compiler is there: torch's CUDA wheels bring it, or nvidia-cuda-nvrtc."""
    try:
        _core.cuda_compile("sums.cu", "", binaries.ARCHITECTURES[0])
    except RuntimeError as error:
        return str(error)


def test_every_program_has_variants():
    assert {program for program, _ in binaries.VARIANTS} == set(_core.cuda_programs())


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("architecture", binaries.ARCHITECTURES)
@pytest.mark.one_in(all=16)
def test_binaries(architecture, half):
    """Each variant for one of the architectures; binaries.py by itself takes all for all."""
    if why := real_compiler():
        pytest.skip(why)
    turn = binaries.ARCHITECTURES.index(architecture) + half * len(binaries.ARCHITECTURES)
    chosen = binaries.VARIANTS[turn :: 2 * len(binaries.ARCHITECTURES)]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(binaries.compiled, *variant, architecture) for variant in chosen]:
            done.result()


def test_a_struct_with_other_bytes_is_refused():
    if why := real_compiler():
        pytest.skip(why)
    with pytest.raises(RuntimeError, match=r"(?s)Output.dtype: Rust has it at 12.*Sums: Rust has 120 bytes") as refused:
        _core.cuda_compile("sums.cu", "-Dfirst=one,first", 90)
    assert "Output.to:" not in str(refused.value)


@pytest.mark.parametrize(
    "line, said, allowed",
    [
        ("@P0 SHFL.BFLY PT, R1, R2, 0x10, 0x1f", "a shuffle without some", "SHFL.BFLY PT, R1, R2, 0x10, 0x1f"),
        ("STL.64 [R1], R2", "local memory", "STG.E.64 [R2], R4"),
        ("WARPSYNC 0xffff", "a part of a warp", "WARPSYNC.ALL"),
        ("MOV R3, 0xffff ;\n/*0010*/ WARPSYNC R3", "a part of a warp", "MOV R3, -0x1 ;\n/*0010*/ WARPSYNC R3"),
    ],
)
def test_instructions_that_are_refused(line, said, allowed):
    kernel = binaries.Kernel("sums.cu", "", 90, "sum_partials", 32, 0)

    def check(text):
        lines = (f"        /*{place:04x}*/    {instruction} ;" for place, instruction in enumerate([text, "EXIT"]))
        binaries.check_instructions(kernel, "\n".join(lines))

    with pytest.raises(AssertionError, match=said):
        check(line)
    check(allowed)
