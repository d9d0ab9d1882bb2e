"""The build backend: which torch it takes, and what it refuses before anything is downloaded or compiled."""

import importlib.util
import os
import platform
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from normformer_rs import _core, _loading

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("_build", ROOT / "_build.py")
_build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_build)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Puts a torch of some version into the user's site-packages, which the isolated build cannot import from."""
    monkeypatch.setattr(_build.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(_build.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(_build.sys, "prefix", "a virtual environment's")

    def install(version):
        (tmp_path / "torch" / "lib").mkdir(parents=True, exist_ok=True)
        (tmp_path / "torch" / "version.py").write_text(f"__all__ = ['x']\n__version__ = '{version}'\ncuda = '13.0'\n")
        return tmp_path / "torch"

    return install


def test_without_torch_the_build_asks_for_it(installed):
    assert _build.get_requires_for_build_wheel() == ["torch>=2.11,<2.16"] == _build.get_requires_for_build_editable()


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cu130", "2.15.1+cpu", "2.15.0a0+git123"])
def test_the_users_torch_is_built_against_where_it_lies(installed, version):
    folder = installed(version)
    assert _build.get_requires_for_build_wheel() == []
    assert _build._find_torch() == (folder, version)


@pytest.mark.parametrize("version", ["2.10.0+cu128", "1.13.1"])
def test_an_older_torch_is_refused_before_pip_replaces_it(installed, version):
    installed(version)
    with pytest.raises(SystemExit, match=r'works with torch >=2.11,<2.16, found .*: `pip install "torch>=2.11,<2.16"`'):
        _build.get_requires_for_build_wheel()


def test_a_newer_torch_is_refused_or_tried(installed, monkeypatch, capsys):
    folder = installed("2.16.0")
    with pytest.raises(SystemExit, match="NORMFORMER_RS_ANY_TORCH=1"):
        _build.get_requires_for_build_wheel()
    monkeypatch.setenv("NORMFORMER_RS_ANY_TORCH", "1")
    assert _build._find_torch() == (folder, "2.16.0")
    assert "warning" in capsys.readouterr().err


def test_a_named_torch_goes_before(installed, monkeypatch, tmp_path):
    folder = installed("2.12.0")
    for named in (folder, tmp_path):
        monkeypatch.setenv("NORMFORMER_RS_TORCH_DIR", str(named))
        assert _build._find_torch() == (folder, "2.12.0")
    monkeypatch.setenv("NORMFORMER_RS_TORCH_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(SystemExit, match="holds no torch: expected the folder"):
        _build._find_torch()


def test_without_isolation_a_missing_torch_is_said(installed):
    with pytest.raises(SystemExit, match=r'`pip install "torch>=2\.11,<2\.16"` first, or drop --no-build-isolation'):
        _build._prepare()


@pytest.mark.parametrize(
    "module, name, value, message",
    [
        (sys, "version_info", (3, 9, 18), "needs Python 3.10 to 3.15"),
        (sys, "version_info", (3, 16, 0), "needs Python 3.10 to 3.15"),
        (sys, "platform", "darwin", "builds on Linux x86-64, Linux aarch64 and macOS arm64, this is darwin"),
        (sys, "platform", "win32", "use such a machine, a container or WSL 2"),
        (platform, "machine", lambda: "riscv64", "and macOS arm64, this is linux riscv64"),
    ],
)
def test_other_machines_are_refused(installed, monkeypatch, module, name, value, message):
    monkeypatch.setattr(module, name, value)
    with pytest.raises(SystemExit, match=message):
        _build.get_requires_for_build_wheel()


@pytest.mark.parametrize(
    "present, message",
    [
        ({}, "needs a C\\+\\+ compiler, c\\+\\+ was not found: `apt install g\\+\\+`"),
        ({"c++": ""}, "needs Rust 1.89 or later, cargo was not found: https://rustup.rs"),
        ({"c++": "", "cargo": "", "rustc": "echo rustc 1.70.0"}, "found 1.70: `rustup update`"),
        ({"c++": "", "cargo": "", "rustc": "echo no toolchain >&2; exit 1"}, "`rustc --version` fails: no toolchain"),
    ],
)
def test_missing_tools_are_named(installed, monkeypatch, tmp_path, present, message):
    for name, script in present.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(SystemExit, match=message):
        _build.get_requires_for_build_wheel()


def test_the_extension_remembers_its_torch():
    import torch

    assert _loading._built() == torch.__version__.partition("+")[0]
    assert _loading._built() in _core.BUILT_AGAINST


def beside(version, tmp_path, **environment):
    """`import normformer_rs` where the torch at hand is of that version; None: where there is none."""
    if version is not None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text(f"__version__ = '{version}'")
        (tmp_path / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
    hide = "" if version is not None else "sys.path = [p for p in sys.path if 'site-packages' not in p]; "
    program = f"import sys; {hide}sys.path.insert(0, {str(ROOT / 'python')!r}); "
    program += f"sys.path.insert(0, {str(tmp_path)!r}); import normformer_rs"
    variables = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
    return done.returncode, (done.stderr.strip().splitlines() or [""])[-1]


@pytest.mark.parametrize("version", ["2.10.0", "2.99.0+cu130"])
def test_another_torch_at_import_is_one_line_with_the_command(tmp_path, version):
    code, line = beside(version, tmp_path)
    built = _loading._minor(_loading._built())
    assert code == 1 and line.startswith(
        f"ImportError: normformer_rs was built against torch {built}, found torch {version}"
    )
    assert "pip install --force-reinstall --no-deps --no-cache-dir" in line and f'"torch=={built}.*"' in line


def test_no_torch_at_import_is_one_line(tmp_path):
    code, line = beside(None, tmp_path)
    assert code == 1 and "which is not installed: `pip install" in line


def test_another_torch_may_be_tried(tmp_path):
    code, line = beside("2.99.0", tmp_path, NORMFORMER_RS_ANY_TORCH="1", PYTHONWARNINGS="always")
    assert code == 0, line


def test_cargo_gets_the_builds_environment(monkeypatch):
    """The words that decide whether pyo3 is compiled anew are those that maturin sets."""
    called = []
    monkeypatch.setattr(_build, "_prepare", lambda: None)
    monkeypatch.setattr(_build.os, "execvp", lambda *call: called.append(call))
    monkeypatch.setenv("PYO3_PYTHON", "")
    monkeypatch.setenv("PYO3_ENVIRONMENT_SIGNATURE", "")
    _build._cargo(["clippy", "--release"])
    assert called == [("cargo", ["cargo", "clippy", "--release"])]
    assert os.environ["PYO3_PYTHON"].endswith("/python3")
    assert os.environ["PYO3_ENVIRONMENT_SIGNATURE"] == "cpython-{}.{}-64bit".format(*sys.version_info)


def test_a_python_that_pyo3_does_not_know_gets_a_wheel_of_its_own(tmp_path):
    """maturin names it for every Python, because pyo3 uses the stable interface; torch-sys does not."""
    name = "normformer_rs-0.1.0-cp310-abi3-linux_x86_64.whl"
    info = "normformer_rs-0.1.0.dist-info/"
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("normformer_rs/_core.abi3.so", b"\x7fELF")
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\nTag: cp310-abi3-linux_x86_64\n")
        archive.writestr(info + "RECORD", "stale,sha256=0,0\n")
    made = _build._for_this_python(tmp_path, name)
    tag = "cp{}{}".format(*sys.version_info)
    assert made == f"normformer_rs-0.1.0-{tag}-{tag}-linux_x86_64.whl"
    assert [path.name for path in tmp_path.iterdir()] == [made]
    with zipfile.ZipFile(tmp_path / made) as archive:
        files = {path: archive.read(path) for path in archive.namelist()}
    assert f"Tag: {tag}-{tag}-linux_x86_64" in files[info + "WHEEL"].decode()
    core = f"normformer_rs/_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert files[core] == b"\x7fELF" and f"{core},sha256=" in files[info + "RECORD"].decode()
    assert _build._for_this_python(tmp_path, made) == made


def test_forward_compatibility_is_asked_for_where_it_is_needed(installed, monkeypatch, tmp_path):
    installed("2.15.0")
    monkeypatch.setenv("CARGO_TARGET_DIR", str(tmp_path / "target"))
    for name in ("PATH", "CPLUS_INCLUDE_PATH", "LIBTORCH_USE_PYTORCH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    for name in ("PYO3_USE_ABI3_FORWARD_COMPATIBILITY", "MATURIN_PEP517_ARGS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(_build, "_check_machine", lambda: None)
    for version, wanted in ((3, 13), ""), ((3, 14), "1"), ((3, 15), "1"):
        monkeypatch.setattr(_build.sys, "version_info", (*version, 0))
        monkeypatch.setenv("MATURIN_PEP517_ARGS", "")
        _build._prepare()
        assert os.environ["PYO3_USE_ABI3_FORWARD_COMPATIBILITY"] == wanted
        assert os.environ["MATURIN_PEP517_ARGS"] == "--features python,abi3" * bool(wanted)
