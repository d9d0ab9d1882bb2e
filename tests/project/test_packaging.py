"""Wheels, the page that pip finds them by, the workflows, and every command that tells a user what to install."""

import base64
import hashlib
import importlib.util
import re
import subprocess
import sys
import zipfile
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest

from normformer_rs import _optional

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PYTHON = f"cp{sys.version_info[0]}{sys.version_info[1]}"
METADATA = "Metadata-Version: 2.4\nName: normformer_rs\nVersion: 0.1.0\nRequires-Dist: torch>=2.11,<2.16\n"
METADATA += "Requires-Dist: torchmetrics>=1 ; extra == 'x'\n\nVersion: this line is prose.\n"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


wheels, index_page = script("wheels"), script("index_page")


# What users are told to install.


def requirement_name(requirement: str) -> str:
    """As the module is imported."""
    return re.match(r"[\w.-]+", requirement)[0].replace("-", "_")


def test_messages_name_what_the_extras_name():
    stated = set(chain.from_iterable(EXTRAS.values()))
    assert set(_optional.REQUIREMENTS.values()) <= stated
    assert all(requirement_name(value) == key for key, value in _optional.REQUIREMENTS.items())


@pytest.mark.parametrize("package", _optional.REQUIREMENTS)
def test_a_missing_package_says_the_command(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"^the test needs") as raised:
        _optional.require(package, "the test")
    requirement = next(r for r in chain.from_iterable(EXTRAS.values()) if requirement_name(r) == package)
    assert str(raised.value) == f'the test needs {package}: pip install "{requirement}"'


def texts() -> list[Path]:
    folders = (ROOT.glob("*.md"), *(ROOT.joinpath(name).rglob("*") for name in ("docs", "notebooks", "python")))
    found = [path for path in chain(*folders) if path.suffix in (".md", ".py") and path.name != "CHANGELOG.md"]
    assert {"README.md", "quickstart.py", "_optional.py"} <= {path.name for path in found}
    return found


def test_every_install_command_works_before_a_release():
    stated = {requirement_name(r): r for r in chain.from_iterable(EXTRAS.values()) if "[" not in r}
    extras = set()
    for path in texts():
        for command in re.findall(r"pip install ([^`\n]*)", path.read_text()):
            assert "normformer_rs[" not in command, f"{path}: no index has normformer_rs: {command}"
            extras.update(re.findall(r'"\.\[(\w+)\]"', command))
            for requirement in re.findall(r'"([\w-]+[=<>]=[^"{]*)"', command):
                name = requirement_name(requirement)
                assert requirement == stated.get(name, requirement), f"{path}: {requirement}, expected {stated[name]}"
    assert extras == {"train", "demo", "data", "fairseq", "notebooks", "trainers"} == set(EXTRAS)


# Wheels.


def fake_wheel(folder: Path, torch: str) -> Path:
    """normformer_rs 0.1.0 as maturin makes it, in small."""
    folder.mkdir(parents=True)
    path = folder / f"normformer_rs-0.1.0-{PYTHON}-{PYTHON}-linux_x86_64.whl"
    info = "normformer_rs-0.1.0.dist-info/"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("normformer_rs/_core.so", f"\x7fELF normformer_rs is built against torch {torch};")
        archive.writestr(info + "METADATA", METADATA)
        archive.writestr(
            info + "WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {PYTHON}-{PYTHON}-linux_x86_64\n"
        )
        archive.writestr(info + "RECORD", "stale,sha256=0,0\n")
    return path


def released(folder: Path, torch: str) -> Path:
    (folder / "v0.1.0").mkdir(parents=True, exist_ok=True)
    return wheels.retag(fake_wheel(folder / "built" / torch, torch), "manylinux_2_17_x86_64", folder / "v0.1.0")


def test_a_wheel_says_which_torch_and_platform_it_fits(tmp_path):
    path = released(tmp_path, "2.13.0")
    assert path.name == f"normformer_rs-0.1.0+torch2.13-{PYTHON}-{PYTHON}-manylinux_2_17_x86_64.whl"
    assert wheels.platform_of(path) == "manylinux_2_17_x86_64"
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    info = "normformer_rs-0.1.0+torch2.13.dist-info/"
    expected = METADATA.replace("Version: 0.1.0", "Version: 0.1.0+torch2.13").replace(">=2.11,<2.16", ">=2.13,<2.14")
    assert files[info + "METADATA"].decode() == expected
    assert f"Tag: {PYTHON}-{PYTHON}-manylinux_2_17_x86_64\n" in files[info + "WHEEL"].decode()
    assert files["normformer_rs/_core.so"] == b"\x7fELF normformer_rs is built against torch 2.13.0;"

    *record, last = files[info + "RECORD"].decode().splitlines()
    assert last == f"{info}RECORD,,"
    assert {line.split(",")[0] for line in record} == set(files) - {info + "RECORD"}
    for line in record:
        name, digest, size = line.split(",")
        sha = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).decode().rstrip("=")
        assert (digest, int(size)) == (f"sha256={sha}", len(files[name]))


def test_a_wheel_that_hides_its_torch_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="one extension that says its torch, found 1"):
        released(tmp_path, "unknown")
    assert wheels.built_against({"normformer_rs/_core.abi.so": b"normformer_rs is built against torch 2.15.0;"}) == (
        2,
        15,
    )
    with pytest.raises(SystemExit, match="found 0"):
        wheels.built_against({})


def report(**changes) -> dict:
    """What auditwheel says of a wheel of this package, abridged."""
    said = {"wheel": "a.whl", "sym_tag": "manylinux_2_34_x86_64", "pyfpe": False, "ucs2": False}
    libraries = {"libtorch_cpu.so": None, "libc10.so": None, "libgomp.so.1": None}
    return {**said, "unsupported_isa": False, "external_libs": libraries, **changes}


def test_the_platform_tag_is_auditwheels():
    assert wheels.platform_tag(report()) == "manylinux_2_34_x86_64"
    with pytest.raises(SystemExit, match=r"needs libfoo\.so\.1"):
        wheels.platform_tag(report(external_libs={"libfoo.so.1": None, "libc10.so": None}))
    with pytest.raises(SystemExit, match="no manylinux tag"):
        wheels.platform_tag(report(sym_tag="linux_x86_64"))
    with pytest.raises(SystemExit, match="unsupported_isa"):
        wheels.platform_tag(report(unsupported_isa=True))


def test_a_version_of_torch_may_leave_the_patch_open():
    assert wheels.torch_requirement("2.11.0") == "torch==2.11.0"
    assert wheels.torch_requirement("2.15") == "torch==2.15.*"


# The page.


def pip_download(page: Path, requirement: str, folder: Path) -> subprocess.CompletedProcess:
    """What pip finds on the page alone, into the folder."""
    flags = ("--no-index", "--no-deps", "--no-cache-dir", "--isolated", "--find-links", page.as_uri())
    command = [sys.executable, "-m", "pip", "download", *flags, "--dest", str(folder), requirement]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_pip_finds_the_wheel_of_a_torch_on_the_page(tmp_path):
    releases = tmp_path / "releases"
    made = {torch: released(releases, f"{torch}.0") for torch in ("2.11", "2.13")}
    page = tmp_path / "index.html"
    page.write_text(index_page.page(releases, releases.as_uri() + "/"))
    assert page.read_text().count("<a ") == 2 and "0.1.0%2Btorch2.11" in page.read_text()

    found = pip_download(page, "normformer_rs==0.1.0+torch2.11", tmp_path / "one")
    assert found.returncode == 0, found.stderr
    assert [path.name for path in (tmp_path / "one").iterdir()] == [made["2.11"].name]

    made["2.13"].write_bytes(made["2.13"].read_bytes() + b"!")  # not the file that the page names
    refused = pip_download(page, "normformer_rs", tmp_path / "two")
    assert refused.returncode != 0 and "HASHES" in refused.stderr


def test_a_page_without_a_release_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="expected the files of a release"):
        index_page.page(tmp_path, "https://example.org")


# The workflows.


def workflow(name: str) -> dict:
    return pytest.importorskip("yaml").safe_load((ROOT / ".github" / "workflows" / name).read_text())


def test_the_matrix_is_what_the_package_supports():
    job = workflow("wheels.yml")["jobs"]["wheel"]["strategy"]["matrix"]
    (torch,) = (requirement for requirement in PROJECT["dependencies"] if requirement_name(requirement) == "torch")
    for versions, stated in ((job["torch"], torch), (job["python"], PROJECT["requires-python"])):
        lowest, beyond = (int(minor) for minor in re.findall(r"\d\.(\d+)", stated))
        assert [int(version.split(".")[1]) for version in versions] == list(range(lowest, beyond))


def test_workflows_call_what_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    called = set()
    for path in ROOT.glob(".github/workflows/*.yml"):
        for job in workflow(path.name)["jobs"].values():
            commands = "\n".join(step.get("run", "") for step in job["steps"])
            called.update(re.findall(r"^make ([a-z-]+)", commands, re.M))
            for file in re.findall(r"\.ci/\w+(?:\.py)?", commands):
                assert (ROOT / file).exists(), f"{path.name}: {file}"
    assert called == {"docs", "wheels", "test-torch"} and called <= targets


def test_what_the_audit_leaves_out_is_not_called():
    """.cargo/audit.toml's advisories: iterators over Python's lists and tuples, and functions made of closures."""
    text = (ROOT / ".cargo" / "audit.toml").read_text()
    ignored = tomllib.loads(text)["advisories"]["ignore"]
    assert ignored == ["RUSTSEC-2026-0176", "RUSTSEC-2026-0177"]
    assert all(re.search(rf'"{name}", # \w', text) for name in ignored)  # each with its reason
    lock = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    versions = {package["name"]: package["version"] for package in lock}
    mended = [int(part) for part in versions["pyo3"].split(".")] >= [0, 29]
    assert not mended, "pyo3 is at a version without these faults: empty .cargo/audit.toml"
    for path in ROOT.glob("src/**/*.rs"):
        found = re.search(r"new_closure|PyList|PyTuple|BoundListIterator|BoundTupleIterator", path.read_text())
        assert found is None, f"{path}: {found[0]} is what an advisory of pyo3 is about; see .cargo/audit.toml"
