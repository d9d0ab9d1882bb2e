"""Builds the sdist and, from it, one wheel per Python with a core for each torch; each wheel is used in empty
environments, one for each torch.

    python3 .ci/wheels.py python3.11 python3.12 --torch 2.11 2.13 --output dist

A core works with one minor version of torch, so the wheel has one for each, and the package loads the one that fits
(python/normformer_rs/_loading.py). The wheel requires the torches that it has cores for. Its platform tag is the newest
of its cores' tags, which on Linux auditwheel reads from their symbols.
"""

import argparse
import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "requirements-wheels.txt"
PROVIDED = {
    *("libc10.so", "libc10_cuda.so", "libgomp.so.1", "libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so"),
    "libtorch_python.so",
}
"""The libraries that the torch wheel brings. They do not count for the platform tag of this package's wheel."""


def main() -> None:
    """Builds the wheels that the command line names, and uses each of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+", metavar="PYTHON", help="an interpreter, such as python3.12")
    parser.add_argument(
        "--torch", nargs="+", required=True, help="versions to build against: 2.11.0, or 2.11 for its newest patch"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder of the sdist and the wheels")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)

    sdist, made = None, []
    for python in options.pythons:
        with tempfile.TemporaryDirectory() as together:
            built, platforms = [], []
            for torch in options.torch:
                with tempfile.TemporaryDirectory() as temporary:  # it gets 5 GB, most of it CUDA
                    print(f"== {python}: building against torch {torch}", flush=True)
                    bin = environment(python, Path(temporary, "env"), torch_requirement(torch), "--requirement", TOOLS)
                    sdist = sdist or build_sdist(bin, options.output)
                    folder = Path(together, torch)
                    folder.mkdir()
                    built.append(build_wheel(bin, sdist, folder))
                    platforms.append(platform_of(bin, built[-1]))
                    tag = names(bin).partition("-")[0]
            wheel = combined(built, tag, max(platforms, key=_by_number), options.output)
        for torch in options.torch:
            with tempfile.TemporaryDirectory() as temporary:
                print(f"== {python}: using {wheel.name} with torch {torch}", flush=True)
                bin = environment(python, Path(temporary, "env"), torch_requirement(torch), f"{wheel}[demo]")
                use(bin, wheel, torch, Path(temporary))
        made.append(wheel)
    for path in (sdist, *made):
        print(f"{path.name}  {path.stat().st_size / 1e6:.1f} MB")


def torch_requirement(version: str) -> str:
    """Returns the requirement for pip: 2.11.0 → torch==2.11.0; 2.11 → torch==2.11.*"""
    return f"torch=={version}" if version.count(".") > 1 else f"torch=={version}.*"


def environment(python: str, folder: Path, *install: str | Path) -> Path:
    """Makes a new virtual environment with the packages `install`, and returns its folder of programs."""
    run(python, "-m", "venv", folder)
    run(folder / "bin" / "pip", "install", "--quiet", *install)
    return folder / "bin"


def names(bin: Path) -> str:
    """Returns the environment's Python and torch, such as cp312-torch2.11.0."""
    program = "import sys; from importlib.metadata import version; v = sys.version_info; "
    program += "print(f'cp{v[0]}{v[1]}-torch{version(\"torch\")}')"
    return run(bin / "python", "-c", program, capture=True).strip()


def build_sdist(bin: Path, output: Path) -> Path:
    """Builds the sdist in the folder `output`, and returns its path."""
    with tempfile.TemporaryDirectory() as folder:
        run(bin / "maturin", "sdist", "--out", folder, cwd=ROOT)
        (sdist,) = Path(folder).glob("*.tar.gz")
        return Path(shutil.copy(sdist, output))


def build_wheel(bin: Path, sdist: Path, folder: Path) -> Path:
    """Builds the wheel of the sdist for the environment's Python and torch, and returns its path.

    Products of the compiler stay in target/wheels for the next build. The source lies there, too, because cargo
    recognises a package by its path.
    """
    products = ROOT / "target" / "wheels" / names(bin)
    source = products / "source"
    shutil.rmtree(source, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(source, filter="data")
    for path in source.rglob("*"):
        os.utime(path)  # an sdist's files are from 2006, and cargo takes an old file for an unchanged one
    (root,) = source.iterdir()
    flags = ("--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", folder)
    path = f"{bin}{os.pathsep}{os.environ['PATH']}"  # pip finds maturin there
    changes = {"PATH": path, "CARGO_TARGET_DIR": str(products / "cargo")}
    run(bin / "pip", "wheel", *flags, root, env={**os.environ, **changes})
    (wheel,) = folder.glob("*.whl")
    return wheel


def platform_of(bin: Path, wheel: Path) -> str:
    """Returns the platform's tag of a wheel: on macOS the one that maturin has chosen, such as macosx_11_0_arm64, and
    on Linux that of the extension's symbols."""
    if sys.platform == "darwin":
        return wheel.stem.rpartition("-")[2]
    return platform_tag(audit(bin, wheel))


def audit(bin: Path, wheel: Path) -> dict:
    """Returns auditwheel's report. auditwheel gets an empty folder of libraries, so that only the extension's own
    symbols count."""
    with tempfile.TemporaryDirectory() as nowhere:
        return json.loads(run(bin / "auditwheel", "show", "--json", "--ldpaths", nowhere, wheel, capture=True))


def platform_tag(report: dict) -> str:
    """Returns the oldest platform whose symbols suffice, such as manylinux_2_34_x86_64, from auditwheel's report."""
    foreign = sorted(set(report["external_libs"]) - PROVIDED)
    if foreign:
        raise SystemExit(f"{report['wheel']} needs {', '.join(foreign)}, which torch does not bring: expected none")
    faults = [fault for fault in ("pyfpe", "ucs2", "unsupported_isa") if report[fault]]
    if faults or not report["sym_tag"].startswith("manylinux_"):
        raise SystemExit(f"{report['wheel']} fits no manylinux tag: auditwheel says {report['sym_tag']}, {faults}")
    return report["sym_tag"]


def _by_number(platform: str) -> list[int]:
    """Returns the version in a platform's tag: manylinux_2_34_x86_64 → [2, 34]"""
    return [int(part) for part in platform.split("_")[1:3]]


def combined(wheels: list[Path], tag: str, platform: str, output: Path) -> Path:
    """Joins the wheels of several torches into one in the folder `output`, and returns its path. The wheels are equal
    but for their core.

    In the joined wheel a core's name contains its torch. A core's path to libtorch is relative and fits any
    environment.
    """
    contents = [_content(wheel) for wheel in wheels]
    minors = [built_against(files) for files in contents]
    if len(set(minors)) < len(minors):
        raise SystemExit(f"two wheels have a core for one torch: {sorted(minors)}")
    by_minor = dict(sorted(zip(minors, contents)))
    name, version, *_ = wheels[0].stem.split("-")
    info = f"{name}-{version}.dist-info/"
    first = next(iter(by_minor.values()))
    files = {path: data for path, data in first.items() if not _CORE.fullmatch(path)}
    for (major, minor), content in by_minor.items():
        for path, data in content.items():
            if core := _CORE.fullmatch(path):
                files[f"{core[1]}-torch{major}.{minor}{core[2]}"] = data
            elif path != info + "RECORD" and files.get(path) != data:
                raise SystemExit(f"{path} differs between the wheels of torch {minors[0]} and {major}.{minor}")
    metadata = _replace(files[info + "METADATA"].decode(), r"Requires-Dist: torch\b[^-_;]*", _required(list(by_minor)))
    files[info + "METADATA"] = metadata.encode()
    files[info + "WHEEL"] = _replace(
        files[info + "WHEEL"].decode(), r"Tag: .*", f"Tag: {tag}-{tag}-{platform}"
    ).encode()
    del files[info + "RECORD"]
    target = output / f"{name}-{version}-{tag}-{tag}-{platform}.whl"
    record = []
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(data)}\n")
            entry = zipfile.ZipInfo(path, date_time=(1980, 1, 1, 0, 0, 0))  # a fixed date makes wheels equal
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
        archive.writestr(info + "RECORD", "".join(record) + f"{info}RECORD,,\n")
    return target


_CORE = re.compile(r"(normformer_rs/_core)(\.[\w.-]*so)")
"""Matches the path of the extension module in a wheel: its name, and its ending."""


def _content(wheel: Path) -> dict[str, bytes]:
    """Returns the content of a wheel's files by their paths."""
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: archive.read(entry) for entry in archive.infolist() if not entry.is_dir()}


def _required(minors: list[tuple[int, int]]) -> str:
    """Returns the line of the metadata that requires one of these torches: torch>=2.11,<2.14,!=2.12.*"""
    (major, lowest), (_, highest) = minors[0], minors[-1]
    missing = [f",!={major}.{minor}.*" for minor in range(lowest, highest) if (major, minor) not in minors]
    return f"Requires-Dist: torch>={major}.{lowest},<{major}.{highest + 1}{''.join(missing)}"


def built_against(files: dict[str, bytes]) -> tuple[int, int]:
    """Returns the minor version of torch that the wheel's extension says it was built against."""
    extensions = [data for name, data in files.items() if _CORE.fullmatch(name)]
    statements = [re.search(rb"normformer_rs is built against torch (\d+)\.(\d+)", data) for data in extensions]
    if len(statements) != 1 or statements[0] is None:
        raise SystemExit(f"expected one extension that says its torch, found {len(extensions)}: {sorted(files)[:9]}")
    return int(statements[0][1]), int(statements[0][2])


def _replace(text: str, line: str, by: str) -> str:
    """Returns the metadata with `by` in place of its one line that the pattern `line` matches."""
    head, blank, body = text.partition("\n\n")  # README follows the metadata after an empty line
    head, count = re.subn(rf"^{line}$", by, head, flags=re.M)
    if count != 1:
        raise SystemExit(f"expected one line {line!r} in the wheel's metadata, found {count}")
    return head + blank + body


def use(bin: Path, wheel: Path, torch: str, folder: Path) -> None:
    """Runs use_wheel.py and the demo in `folder`, away from the checkout, so that the installed package is the one that
    is imported."""
    _, version, *_ = wheel.stem.split("-")
    run(bin / "python", "-I", Path(__file__).with_name("use_wheel.py"), version, torch, cwd=folder)
    run(bin / "normformer-rs", "--version", cwd=folder)
    run(bin / "normformer-rs", "demo", "--updates", "20", "--output", "demo", "--no-progress", cwd=folder)


def run(*command: str | Path, capture: bool = False, cwd: Path | None = None, env: dict | None = None) -> str:
    """Runs a command and returns its output, which is "" without `capture`. If the command fails, the program ends with
    the same status."""
    done = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE if capture else None, text=True, cwd=cwd, env=env, check=False
    )
    if done.returncode != 0:
        print(f"failed ({done.returncode}): {' '.join(map(str, command))}", flush=True)
        raise SystemExit(done.returncode)
    return done.stdout or ""


if __name__ == "__main__":
    main()
