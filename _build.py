"""The build backend: runs maturin, and makes torch-sys use the libtorch of the user's torch.

pip builds in an isolated environment, which hides the user's site-packages from imports but keeps `sys.prefix`. If a
torch is under `sys.prefix`, the build uses it in place, and pip downloads no other. Otherwise the build requires a
torch in the range that pyproject.toml names. uv and `python -m build` change the prefix: with them,
NORMFORMER_RS_TORCH_DIR names the folder of the torch to build against.

torch-sys asks the first `python3` on PATH where libtorch is, and does not ask again when PATH changes. So each version
of Python and torch has its own target folder. A symbolic link in the target folder points at torch: the torch of an
isolated build is in a new temporary folder each time, and cargo would compile everything again for a new path.

As a program: `python _build.py check` checks whether this machine can build; `python _build.py test --lib` runs
`cargo test --lib` in the environment of a build.
"""

from __future__ import annotations  # so that an old Python can run this file up to the check of its version

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
MACHINES = {
    ("linux", "x86_64"): "x86_64-unknown-linux-gnu",
    ("linux", "aarch64"): "aarch64-unknown-linux-gnu",
    ("darwin", "arm64"): "aarch64-apple-darwin",
}
"""The systems and processors that the package builds on → Rust's names for them."""
PYO3_KNOWS = (3, 13)
"""The newest Python whose full C API pyo3 0.24 supports; for later versions it uses the stable ABI."""


# pip calls the public functions below by these names and arguments (PEP 517 and 660).


def get_requires_for_build_wheel(config_settings=None):
    """Returns torch if the environment has none. Exits, before pip downloads anything, if the build cannot work."""
    _check_machine()
    torch = _find_torch()
    return [] if torch else [f"torch{_range()}"]


get_requires_for_build_editable = get_requires_for_build_wheel


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Builds a wheel in `wheel_directory`, and returns its name."""
    _prepare()
    # A wheel is compiled once. Incremental compilation saves time only in later builds, and costs an eighth of the
    # crate's processor time.
    os.environ.setdefault("CARGO_INCREMENTAL", "0")
    wheel = _maturin().build_wheel(wheel_directory, config_settings, metadata_directory)
    return _for_this_python(wheel_directory, wheel)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """Builds an editable wheel in `wheel_directory`, and returns its name."""
    _prepare()
    wheel = _maturin().build_editable(wheel_directory, config_settings, metadata_directory)
    # A build with the stable ABI names the extension module in another way. It gets the usual name.
    core = ROOT / "python" / "normformer_rs" / "_core.abi3.so"
    if core.exists():
        core.replace(core.with_name(f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"))
    return _for_this_python(wheel_directory, wheel)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    return _maturin().prepare_metadata_for_build_wheel(metadata_directory, config_settings)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_sdist(sdist_directory, config_settings=None):
    return _maturin().build_sdist(sdist_directory, config_settings)


def _for_this_python(folder, name: str) -> str:
    """Renames a wheel with the tag of the stable ABI to the tag of this Python, and returns its name.

    maturin chooses that tag because pyo3 uses the stable ABI for a Python later than those that it supports. But
    torch-sys is compiled with this Python's headers, so the wheel works with this Python only.
    """
    if "-abi3-" not in name:
        return name
    tag = "cp{}{}".format(*sys.version_info)
    old = Path(folder, name)
    new = Path(folder, re.sub(r"-cp\d+-abi3-", f"-{tag}-{tag}-", name))
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    with zipfile.ZipFile(old) as source:
        files = {entry.filename: source.read(entry) for entry in source.infolist() if not entry.is_dir()}
    # RECORD lists the hash of every file, so it is written again.
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
    """Imports maturin late, because `python _build.py check` runs before anything is installed."""
    import maturin

    return maturin


def _check_machine() -> None:
    """Exits with a message if the package cannot be built on this machine."""
    if (sys.platform, platform.machine()) not in MACHINES:
        raise SystemExit(
            f"normformer_rs builds on Linux x86-64, Linux aarch64 and macOS arm64, this is {sys.platform} "
            f"{platform.machine()}: use such a machine, a container or WSL 2"
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
    rustc = subprocess.run(["rustc", "--version"], capture_output=True, text=True)
    found = re.search(r"rustc (\d+)\.(\d+)", rustc.stdout)
    if found is None:
        raise SystemExit(
            f"building normformer_rs needs {wanted} or later, `rustc --version` fails: {rustc.stderr.strip()}"
        )
    if tuple(map(int, found.groups())) < tuple(map(int, needed.groups())):
        raise SystemExit(
            f"building normformer_rs needs {wanted} or later, found {found[1]}.{found[2]}: `rustup update`"
        )


def _range() -> str:
    """Returns the versions of torch that pyproject.toml allows, such as >=2.11,<2.16."""
    return re.search(r'"torch(>=[^"]*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]


def _find_torch() -> tuple[Path, str] | None:
    """Returns the folder of the torch to build against and its version; None if the environment has no torch.

    Exits with a message for a version that the package does not work with: pip would replace that torch afterwards.
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
    problem = f"normformer_rs works with torch {_range()}, found {version} in {folder}"
    if minor < lowest:
        raise SystemExit(f'{problem}: `pip install "torch{_range()}"` first')
    if os.environ.get("NORMFORMER_RS_ANY_TORCH") != "1":
        raise SystemExit(
            f'{problem}: `pip install "torch{_range()}"` first, or try this one with NORMFORMER_RS_ANY_TORCH=1 and '
            "pip's --no-deps"
        )
    print(f"warning: {problem}, and never tested with it", file=sys.stderr)
    return folder, version


def _torch_folder() -> Path | None:
    """Returns the folder in NORMFORMER_RS_TORCH_DIR, else that of the importable torch, else of the user's torch."""
    named = os.environ.get("NORMFORMER_RS_TORCH_DIR")
    if named:
        for folder in (Path(named), Path(named) / "torch"):
            if (folder / "version.py").is_file() and (folder / "lib").is_dir():
                return folder.absolute()
        raise SystemExit(
            f"NORMFORMER_RS_TORCH_DIR is {named}, which holds no torch: expected the folder that "
            '`python -c "import torch; print(torch.__path__[0])"` prints'
        )
    spec = importlib.util.find_spec("torch")  # it finds a torch unless pip's isolation hides it
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
    """Sets the environment variables that cargo and torch-sys read."""
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
    """Creates a folder with `python` and `python3`, which torch-sys runs, and returns it.

    Both start this interpreter, and import torch through the link `target/packages`.
    """
    bin = target / "bin"
    bin.mkdir(parents=True, exist_ok=True)
    link = _link(target / "packages", packages)
    for name in ("python", "python3"):
        script = _beside(bin / name)
        script.write_text(
            f"#!/bin/sh\nPYTHONPATH={shlex.quote(str(link))}${{PYTHONPATH:+:$PYTHONPATH}} "
            f'exec {shlex.quote(sys.executable)} "$@"\n'
        )
        script.chmod(0o755)
        script.replace(bin / name)
    return bin


def _headers(target: Path) -> Path:
    """Returns a link to the folder of the header that .cargo/config.toml includes.

    The link's path is the same for all copies of the sources that share a target folder. With another path cargo would
    compile all C++ again.
    """
    return _link(target / "compat", ROOT.absolute() / "src" / "operator" / "shim" / "compat")


def _link(link: Path, folder: Path) -> Path:
    """Makes `link` a symbolic link to the folder, in place of an older one, and returns it."""
    new = _beside(link)
    new.unlink(missing_ok=True)  # a killed build with this process's number may have left one
    new.symlink_to(folder, target_is_directory=True)
    new.replace(link)
    return link


def _beside(path: Path) -> Path:
    """Returns a path that no other process has, from which a file is moved to `path` in one step: another build may
    use that one at the same time."""
    return path.with_name(f"{path.name}.{os.getpid()}")


def _cargo(arguments: list[str]) -> None:
    """Replaces this process by cargo, in the environment of a build by pip, so that both share compiled code."""
    _prepare()
    # maturin sets the same values. With different ones, cargo would compile pyo3 and its dependents again.
    os.environ["PYO3_PYTHON"] = str(Path(sys.executable).with_name("python3"))
    os.environ["PYO3_ENVIRONMENT_SIGNATURE"] = "cpython-{}.{}-64bit".format(*sys.version_info)
    options = [*_compiled_torch_sys(), "--config", NOT_OPTIMISED] if arguments[:1] == ["test"] else []
    os.execvp("cargo", ["cargo", *options, *arguments])


NOT_OPTIMISED = "profile.release.package.normformer_rs.opt-level=0"
"""The setting with which cargo compiles the Rust tests: optimised, they compile 110 s longer than they run shorter. The
Python tests use the optimised code."""


def _compiled_torch_sys() -> list[str]:
    """Returns arguments with which cargo uses the extension's compiled torch-sys; none before the extension is built.

    Tests have other features than the extension, so cargo would compile torch-sys's C++ again, which takes 100 seconds.
    """
    target = Path(os.environ["CARGO_TARGET_DIR"]).absolute()
    archives = sorted(target.glob("release/build/torch-sys-*/out/libtch.a"), key=lambda path: path.stat().st_mtime)
    if not archives:
        return []
    lib = target / "packages" / "torch" / "lib"
    cuda = ["torch_cuda"] if (lib / "libtorch_cuda.so").exists() else []
    settings = {
        "rustc-link-lib": ["static=tch", *cuda, "torch_cpu", "torch", "c10", *(["gomp"] * (sys.platform == "linux"))],
        "rustc-link-search": [f"native={archives[-1].parent}", f"native={lib}"],
    }
    table = f"target.{MACHINES[sys.platform, platform.machine()]}.tch"
    return [part for key, value in settings.items() for part in ("--config", f"{table}.{key}={json.dumps(value)}")]


if __name__ == "__main__":
    if sys.argv[1:] == ["check"]:
        _check_machine()
    else:
        _cargo(sys.argv[1:])
