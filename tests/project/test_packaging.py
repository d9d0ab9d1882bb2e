"""Wheels, the page that pip finds them by, the workflows, and every command that tells a user what to install."""

import base64
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest
import torch

import normformer_rs as nfrs
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
    assert extras == set(EXTRAS)


# Wheels.


def fake_wheel(folder: Path, torch: str) -> Path:
    """normformer_rs 0.1.0 as maturin makes it, in small."""
    folder.mkdir(parents=True)
    path = folder / f"normformer_rs-0.1.0-{PYTHON}-{PYTHON}-linux_x86_64.whl"
    info = "normformer_rs-0.1.0.dist-info/"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("normformer_rs/__init__.py", "")
        archive.writestr("normformer_rs/_core.so", f"\x7fELF normformer_rs is built against torch {torch};")
        archive.writestr(info + "METADATA", METADATA)
        archive.writestr(
            info + "WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {PYTHON}-{PYTHON}-linux_x86_64\n"
        )
        archive.writestr(info + "RECORD", "stale,sha256=0,0\n")
    return path


def released(folder: Path, *torches: str, version: str = "v0.1.0") -> Path:
    (folder / version).mkdir(parents=True, exist_ok=True)
    made = [fake_wheel(folder / "built" / version / torch, torch) for torch in torches]
    return wheels.combined(made, PYTHON, "manylinux_2_17_x86_64", folder / version)


def test_a_wheel_has_a_core_for_each_torch_and_requires_them(tmp_path):
    path = released(tmp_path, "2.13.0", "2.11.0")
    assert path.name == f"normformer_rs-0.1.0-{PYTHON}-{PYTHON}-manylinux_2_17_x86_64.whl"
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    info = "normformer_rs-0.1.0.dist-info/"
    expected = METADATA.replace("torch>=2.11,<2.16", "torch>=2.11,<2.14,!=2.12.*")
    assert files[info + "METADATA"].decode() == expected
    assert f"Tag: {PYTHON}-{PYTHON}-manylinux_2_17_x86_64\n" in files[info + "WHEEL"].decode()
    cores = {name: data for name, data in files.items() if name.endswith(".so")}
    assert cores == {
        f"normformer_rs/_core-torch{minor}.so": b"\x7fELF normformer_rs is built against torch %s;"
        % f"{minor}.0".encode()
        for minor in ("2.11", "2.13")
    }

    *record, last = files[info + "RECORD"].decode().splitlines()
    assert last == f"{info}RECORD,,"
    assert {line.split(",")[0] for line in record} == set(files) - {info + "RECORD"}
    for line in record:
        name, digest, size = line.split(",")
        sha = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).decode().rstrip("=")
        assert (digest, int(size)) == (f"sha256={sha}", len(files[name]))


def test_wheels_that_differ_beside_their_core_are_refused(tmp_path):
    first, second = fake_wheel(tmp_path / "a", "2.11.0"), fake_wheel(tmp_path / "b", "2.12.0")
    with zipfile.ZipFile(second, "a") as archive:
        archive.writestr("normformer_rs/more.py", "")
    with pytest.raises(SystemExit, match=r"more\.py differs"):
        wheels.combined([first, second], PYTHON, "manylinux_2_17_x86_64", tmp_path)
    with pytest.raises(SystemExit, match="two wheels have a core for one torch"):
        wheels.combined([first, first], PYTHON, "manylinux_2_17_x86_64", tmp_path)


def test_a_wheel_that_hides_its_torch_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="one extension that says its torch, found 1"):
        released(tmp_path, "unknown")
    assert wheels.built_against({"normformer_rs/_core.abi3.so": b"normformer_rs is built against torch 2.15.0;"}) == (
        2,
        15,
    )
    with pytest.raises(SystemExit, match="found 0"):
        wheels.built_against({})


@pytest.fixture(scope="module")
def fat(tmp_path_factory) -> Path:
    """The package as a wheel of an index has it: this build's core, and one that cannot be loaded."""
    site = tmp_path_factory.mktemp("site")
    source = Path(nfrs.__file__).parent
    shutil.copytree(source, site / "normformer_rs", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (core,) = source.glob("_core.*.so")
    minor = ".".join(torch.__version__.split(".")[:2])
    shutil.copy(core, site / "normformer_rs" / core.name.replace("_core.", f"_core-torch{minor}.", 1))
    (site / "normformer_rs" / core.name.replace("_core.", "_core-torch2.99.", 1)).write_bytes(b"no library")
    return site


def imported(fat: Path, program: str, **environment: str) -> subprocess.CompletedProcess:
    code = f"import sys; sys.path.insert(0, {str(fat)!r})\n{program}"
    return subprocess.run([sys.executable, "-P", "-c", code] if sys.version_info >= (3, 11) else
                          [sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env={**os.environ, **environment})  # fmt: skip


@pytest.mark.parametrize("first", ["import normformer_rs as nfrs", "import torch, normformer_rs as nfrs",
                                   "from normformer_rs import _core; import normformer_rs as nfrs"])  # fmt: skip
@pytest.mark.full
def test_import_chooses_the_core_of_the_torch_that_is_there(fat, first):
    done = imported(
        fat,
        f"""{first}
assert nfrs.__file__.startswith({str(fat)!r}), nfrs.__file__
import torch
assert "_core-torch" + ".".join(torch.__version__.split(".")[:2]) in nfrs._core.__file__
model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
nfrs.swap_norms(model, "scalenorm")
model(torch.randn(2, 3, 16)).sum().backward()
print(model.norm1)""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ScaleNorm")


def test_a_torch_without_a_core_is_one_line(fat, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '3.5.0'")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '3.5.0'\n")
    done = imported(fat, f"sys.path.insert(0, {str(tmp_path)!r}); import normformer_rs")
    line = done.stderr.strip().splitlines()[-1]
    minor = ".".join(torch.__version__.split(".")[:2])
    assert done.returncode == 1
    assert line.startswith(f"ImportError: this wheel of normformer_rs works with torch {minor}, 2.99;")
    assert "found torch 3.5.0" in line and f'pip install "torch>={minor},<2.100"' in line
    done = imported(fat, f"sys.path.insert(0, {str(tmp_path)!r}); import normformer_rs", NORMFORMER_RS_ANY_TORCH="1")
    assert "going on with the core for 2.99" in done.stderr


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


@pytest.mark.full
def test_pip_finds_the_newest_wheel_on_the_page(tmp_path):
    releases = tmp_path / "releases"
    made = released(releases, "2.11.0", "2.13.0")
    page = tmp_path / "index.html"
    page.write_text(index_page.page(releases, releases.as_uri() + "/"))
    assert page.read_text().count("<a ") == 1

    found = pip_download(page, "normformer_rs", tmp_path / "one")
    assert found.returncode == 0, found.stderr
    assert [path.name for path in (tmp_path / "one").iterdir()] == [made.name]

    made.write_bytes(made.read_bytes() + b"!")  # not the file that the page names
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
    by_python = {entry["python"]: entry["torch"].split() for entry in job["include"]}
    assert list(by_python) == job["python"]
    torches = sorted({version for versions in by_python.values() for version in versions})
    for versions, stated in ((torches, torch), (job["python"], PROJECT["requires-python"])):
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
    assert called == {"docs", "wheels", "test", "test-torch"} and called <= targets


def test_actions_are_pinned():
    """By commit, with the version that dependabot keeps in step."""
    for path in ROOT.glob(".github/workflows/*.yml"):
        for used in re.findall(r"uses: (.*)", path.read_text()):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", used), f"{path.name}: {used}"


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
