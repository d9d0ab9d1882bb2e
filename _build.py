"""The build backend: maturin, with torch-sys told to take libtorch from the torch that the user has.

pip builds in an isolated environment, which hides the user's site-packages from imports but keeps `sys.prefix`. So a
torch found under `sys.prefix` is built against where it lies, and none is downloaded. Without one the build asks for
torch in the range that pyproject.toml names. uv and `python -m build` have another prefix: there
NORMFORMER_RS_TORCH_DIR names the folder of the torch to build against.

torch-sys asks the first `python3` on PATH where libtorch is, and does not run again when PATH changes. So each version
of Python and torch has a target folder of its own. A symbolic link in it points at torch: an isolated build's torch
lies in a new temporary folder each time, and everything would be compiled anew.

As a program: `python _build.py check` says whether this machine can build, `python _build.py test --lib` is
`cargo test --lib` in the environment of a build.
"""

from __future__ import annotations  # an old Python shall get as far as the sentence that refuses it

import base64
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent
PYTHONS = ((3, 10), (3, 15))
"""The oldest and the newest Python that the package is tested with."""
PYO3_KNOWS = (3, 13)
"""The newest Python whose whole interface pyo3 0.24 knows; later ones are reached by the stable one."""


def get_requires_for_build_wheel(config_settings=None):
    """maturin, and torch where the environment has none. Refuses what cannot work before anything is downloaded."""
    _check_machine()
    torch = _find_torch()
    return [] if torch else [f"torch{_range()}"]


get_requires_for_build_editable = get_requires_for_build_wheel


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _prepare()
    # A wheel is compiled once: what later edits would save costs an eighth of the crate's processor time.
    os.environ.setdefault("CARGO_INCREMENTAL", "0")
    made = _maturin().build_wheel(wheel_directory, config_settings, metadata_directory)
    return _for_this_python(wheel_directory, made)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _prepare()
    made = _maturin().build_editable(wheel_directory, config_settings, metadata_directory)
    core = ROOT / "python" / "normformer_rs" / "_core.abi3.so"
    if core.exists():
        core.replace(core.with_name(f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"))
    return _for_this_python(wheel_directory, made)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    return _maturin().prepare_metadata_for_build_wheel(metadata_directory, config_settings)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_sdist(sdist_directory, config_settings=None):
    return _maturin().build_sdist(sdist_directory, config_settings)


def _for_this_python(folder, name: str) -> str:
    """The wheel under this Python's tag, where maturin gave it that of the stable interface.

    pyo3 reaches a Python later than its own by that interface. torch-sys is compiled with Python's headers all the
    same, so the wheel fits this Python alone.
    """
    if "-abi3-" not in name:
        return name
    tag = "cp{}{}".format(*sys.version_info)
    old = Path(folder, name)
    new = Path(folder, re.sub(r"-cp\d+-abi3-", f"-{tag}-{tag}-", name))
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    with zipfile.ZipFile(old) as source:
        files = {entry.filename: source.read(entry) for entry in source.infolist() if not entry.is_dir()}
    record = next(path for path in files if path.endswith(".dist-info/RECORD"))
    metadata = record.replace("RECORD", "WHEEL")
    files[metadata] = re.sub(rb"(?m)^Tag: cp\d+-abi3-", f"Tag: {tag}-{tag}-".encode(), files[metadata])
    del files[record]
    files = {path.replace("_core.abi3.so", f"_core{suffix}"): data for path, data in files.items()}
    lines = []
    with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as target:
        for path, data in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{path},sha256={digest},{len(data)}\n")
            target.writestr(path, data)
        target.writestr(record, "".join(lines) + f"{record},,\n")
    old.unlink()
    return new.name


def _maturin():
    """Imported late: `python _build.py check` runs before anything is installed."""
    import maturin

    return maturin


def _check_machine() -> None:
    """Stops, with one sentence, where the package cannot be built."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise SystemExit(
            f"normformer_rs builds on Linux x86-64 and aarch64, this is {sys.platform} {platform.machine()}: "
            "use such a machine, a container or WSL 2"
        )
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        raise SystemExit(
            f"normformer_rs needs Python {'.'.join(map(str, PYTHONS[0]))} to {'.'.join(map(str, PYTHONS[1]))}, "
            f"this is {platform.python_version()}: create the virtual environment with one of those"
        )
    compiler = shlex.split(os.environ.get("CXX", "c++"))[0]
    if shutil.which(compiler) is None:
        raise SystemExit(
            f"building normformer_rs needs a C++ compiler, {compiler} was not found: "
            "`apt install g++` (Debian, Ubuntu) or `dnf install gcc-c++` (Fedora), or set CXX"
        )
    needed = re.search(r'^rust-version = "(\d+)\.(\d+)"', (ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.M)
    wanted = f"Rust {needed[1]}.{needed[2]}"
    if shutil.which("cargo") is None or shutil.which("rustc") is None:
        raise SystemExit(f"building normformer_rs needs {wanted} or later, cargo was not found: https://rustup.rs")
    said = subprocess.run(["rustc", "--version"], capture_output=True, text=True)
    found = re.search(r"rustc (\d+)\.(\d+)", said.stdout)
    if found is None:
        raise SystemExit(
            f"building normformer_rs needs {wanted} or later, `rustc --version` fails: {said.stderr.strip()}"
        )
    if tuple(map(int, found.groups())) < tuple(map(int, needed.groups())):
        raise SystemExit(
            f"building normformer_rs needs {wanted} or later, found {found[1]}.{found[2]}: `rustup update`"
        )


def _range() -> str:
    """The versions of torch that pyproject.toml allows, such as >=2.11,<2.16."""
    return re.search(r'"torch(>=[^"]*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]


def _find_torch() -> tuple[Path, str] | None:
    """The folder of the torch to build against and its version; None where the environment has none.

    Stops, with one sentence, at a torch that the package does not work with: pip would replace it afterwards.
    """
    folder = _torch_folder()
    if folder is None:
        return None
    text = (folder / "version.py").read_text(encoding="utf-8")  # importing torch would cost seconds
    version = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.M)[1]
    lowest, beyond = (tuple(map(int, part)) for part in re.findall(r"(\d+)\.(\d+)", _range()))
    minor = tuple(map(int, re.match(r"(\d+)\.(\d+)", version).groups()))
    if lowest <= minor < beyond:
        return folder, version
    what = f"normformer_rs works with torch {_range()}, found {version} in {folder}"
    if minor < lowest:
        raise SystemExit(f'{what}: `pip install "torch{_range()}"` first')
    if os.environ.get("NORMFORMER_RS_ANY_TORCH") != "1":
        raise SystemExit(
            f'{what}: `pip install "torch{_range()}"` first, or try this one with NORMFORMER_RS_ANY_TORCH=1 and '
            "pip's --no-deps"
        )
    print(f"warning: {what}, and never tested with it", file=sys.stderr)
    return folder, version


def _torch_folder() -> Path | None:
    named = os.environ.get("NORMFORMER_RS_TORCH_DIR")
    if named:
        for folder in (Path(named), Path(named) / "torch"):
            if (folder / "version.py").is_file() and (folder / "lib").is_dir():
                return folder.absolute()
        raise SystemExit(
            f"NORMFORMER_RS_TORCH_DIR is {named}, which holds no torch: expected the folder that "
            '`python -c "import torch; print(torch.__path__[0])"` prints'
        )
    spec = importlib.util.find_spec("torch")  # not isolated, or the isolated build's own
    if spec is not None and spec.origin:
        return Path(spec.origin).parent
    places = [sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    if sys.prefix == sys.base_prefix:  # no virtual environment: `pip install --user` is possible
        places.append(site.getusersitepackages())
    for place in places:
        if (Path(place) / "torch" / "version.py").is_file():
            return Path(place) / "torch"
    return None


def _prepare() -> None:
    """Sets what cargo and torch-sys read."""
    _check_machine()
    torch = _find_torch()
    if torch is None:
        raise SystemExit(
            f'building normformer_rs needs torch{_range()}: `pip install "torch{_range()}"` first, '
            "or drop --no-build-isolation"
        )
    folder, version = torch
    os.environ["LIBTORCH_USE_PYTORCH"] = "1"
    if sys.version_info[:2] > PYO3_KNOWS:
        os.environ["PYO3_USE_ABI3_FORWARD_COMPATIBILITY"] = "1"
        given = os.environ.get("MATURIN_PEP517_ARGS", "")
        os.environ["MATURIN_PEP517_ARGS"] = f"{given} --features python,abi3".strip()
    if "CARGO_TARGET_DIR" not in os.environ:
        key = hashlib.sha256(f"{sys.version} {version}".encode()).hexdigest()[:12]
        os.environ["CARGO_TARGET_DIR"] = str(ROOT / "target" / f"python-{key}")
    target = Path(os.environ["CARGO_TARGET_DIR"]).absolute()
    for name, value in (("PATH", _interpreter(target, folder.parent)), ("CPLUS_INCLUDE_PATH", _headers(target))):
        os.environ[name] = os.pathsep.join(filter(None, (str(value), os.environ.get(name))))


def _interpreter(target: Path, packages: Path) -> Path:
    """A folder with this interpreter under both names that torch-sys uses; it imports torch from `target/packages`."""
    bin = target / "bin"
    bin.mkdir(parents=True, exist_ok=True)
    link = _link(target / "packages", packages)
    for name in ("python", "python3"):
        script = bin / name
        script.write_text(
            f"#!/bin/sh\nPYTHONPATH={shlex.quote(str(link))}${{PYTHONPATH:+:$PYTHONPATH}} "
            f'exec {shlex.quote(sys.executable)} "$@"\n'
        )
        script.chmod(0o755)
    return bin


def _headers(target: Path) -> Path:
    """The folder of the header that .cargo/config.toml includes, by a path that is the same for every checkout.

    cargo compiles all C++ anew where the path differs, as it would for a copy of the sources with the same target.
    """
    return _link(target / "compat", ROOT.absolute() / "src" / "operator" / "shim" / "compat")


def _link(link: Path, folder: Path) -> Path:
    link.unlink(missing_ok=True)
    link.symlink_to(folder, target_is_directory=True)
    return link


def _cargo(arguments: list[str]) -> None:
    """Becomes cargo, in the environment of a build by pip: what either has compiled serves the other."""
    _prepare()
    # As maturin sets them; pyo3 and all that uses it are compiled anew where they differ.
    os.environ["PYO3_PYTHON"] = str(Path(sys.executable).with_name("python3"))
    os.environ["PYO3_ENVIRONMENT_SIGNATURE"] = "cpython-{}.{}-64bit".format(*sys.version_info)
    os.execvp("cargo", ["cargo", *(_compiled_torch_sys() if arguments[:1] == ["test"] else []), *arguments])


def _compiled_torch_sys() -> list[str]:
    """Arguments that give cargo the extension's compiled torch-sys; none before the extension is built.

    Tests have other features than the extension, for which cargo would compile torch-sys's C++ again: 100 seconds.
    """
    target = Path(os.environ["CARGO_TARGET_DIR"]).absolute()
    archives = sorted(target.glob("release/build/torch-sys-*/out/libtch.a"), key=lambda path: path.stat().st_mtime)
    if not archives:
        return []
    lib = target / "packages" / "torch" / "lib"
    cuda = ["torch_cuda"] if (lib / "libtorch_cuda.so").exists() else []
    told = {
        "rustc-link-lib": ["static=tch", *cuda, "torch_cpu", "torch", "c10", "gomp"],
        "rustc-link-search": [f"native={archives[-1].parent}", f"native={lib}"],
    }
    table = f"target.{platform.machine()}-unknown-linux-gnu.tch"
    return [part for key, value in told.items() for part in ("--config", f"{table}.{key}={json.dumps(value)}")]


if __name__ == "__main__":
    if sys.argv[1:] == ["check"]:
        _check_machine()
    else:
        _cargo(sys.argv[1:])
