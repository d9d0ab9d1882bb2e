"""Compiles every variant of the CUDA kernels and checks the binaries. No device is needed.

    python tests/cuda/binaries.py [--output CSV] [--architectures 80 90] [--of N]

compiles the variants (all, or every N-th) for each architecture and writes a row for each kernel: registers, shared
memory, the parameter block, and how many of a multiprocessor's warps can be resident. A kernel fails here if

- its registers spill, or it has local memory,
- its parameter block has not the size of Rust's struct (NVRTC checks the fields' offsets, as it compiles them here),
- a shuffle runs where some of a warp's threads may be missing.

cuobjdump comes with Triton, which comes with torch's CUDA wheels. Version 12.8 knows no sm_103 and no sm_121.
"""

import argparse
import csv
import itertools
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from normformer_rs import _core
from normformer_rs.nn.norm_table import DECLARED

SOURCES = Path(__file__).parents[2] / "src"
ARCHITECTURES = [80, 86, 89, 90, 100, 103, 120, 121]
WITHOUT_CUOBJDUMP = [103, 121]
MOST_WARPS = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 103: 64, 120: 48, 121: 48}
"""Of a multiprocessor (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""
MOST_BLOCKS = {80: 32, 86: 16, 89: 24, 90: 32, 100: 32, 103: 32, 120: 24, 121: 24}
SHARED_KIB = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 103: 228, 120: 100, 121: 100}
SYSTEM_SHARED = 1024
"""Bytes of shared memory that CUDA takes of every block."""
REGISTERS = 65536
"""Of a multiprocessor, handed out to warps in units of 256."""


@dataclass
class Kernel:
    """One variant's binary for one architecture."""

    program: str
    options: str
    architecture: int
    kernel: str
    registers: int
    shared: int
    parameters: int | None = None
    """Bytes; None where cuobjdump does not know the architecture."""

    @property
    def threads(self) -> int:
        return declared()[self.kernel].threads(self.options)

    @property
    def warps(self) -> int:
        """Of a multiprocessor, at the launch bounds' number of threads."""
        warps = -(-self.threads // 32)
        by_registers = REGISTERS // (-(-self.registers * 32 // 256) * 256) // warps
        by_shared = (SHARED_KIB[self.architecture] << 10) // (self.shared + SYSTEM_SHARED)
        blocks = min(by_registers, by_shared, MOST_BLOCKS[self.architecture], MOST_WARPS[self.architecture] // warps)
        return blocks * warps


@dataclass
class Declared:
    """A kernel's launch bound and the struct that it takes, as its source declares them."""

    bound: str
    struct: str

    def threads(self, options: str) -> int:
        if self.bound.isdecimal():
            return int(self.bound)
        lanes, rows = (re.search(rf"-DK_{name}=(\d+)", options) for name in ("LANES", "ROWS"))
        return int(lanes[1]) * int(rows[1]) if lanes and rows else 256


@cache
def declared() -> dict[str, Declared]:
    """By the kernel's name."""
    found = {}
    for path in (*SOURCES.rglob("*.cu"), *SOURCES.rglob("*.cuh")):
        for bound, name, struct in re.findall(r"^KERNEL\((\w+), (\w+), (\w+)\)", path.read_text(), re.M):
            found[name] = Declared(bound, struct)
    return found


@cache
def cuobjdump() -> str | None:
    triton = find_spec("triton")
    folders = triton.submodule_search_locations if triton else None
    places = [Path(folder) / "backends/nvidia/bin/cuobjdump" for folder in folders or []]
    return next((str(place) for place in places if place.exists()), None)


def compiled(program: str, options: str, architecture: int) -> list[Kernel]:
    """The kernels of a variant. AssertionError where one is not as it should be."""
    binary, remarks = _core.cuda_compile(program, options, architecture)
    assert bytes(binary[:4]) == b"\x7fELF"
    assert "warning" not in remarks, remarks
    spills = [int(n) for n in re.findall(r"(\d+) bytes (?:spill|stack)", remarks)]
    assert spills and not any(spills), f"{program} {options}: registers spill\n{remarks}"
    kernels = []
    for name, used in re.findall(r"entry function '(\w+)'.*?(Used .*?)\n", remarks, re.S):
        registers, shared = re.search(r"Used (\d+) registers", used), re.search(r"(\d+) bytes smem", used)
        kernels.append(Kernel(program, options, architecture, name, int(registers[1]), int(shared[1]) if shared else 0))
    assert kernels, remarks
    if cuobjdump() and architecture not in WITHOUT_CUOBJDUMP:
        look_into(bytes(binary), kernels)
    return kernels


def look_into(binary: bytes, kernels: list[Kernel]) -> None:
    """Reads parameter blocks and instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        words = [cuobjdump(), "-elf", "-sass", file.name]
        dump = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    for kernel in kernels:
        # Sections such as `.nv.info.adam`, and the listing behind `Function : adam`.
        (info,) = re.findall(rf"^\.nv\.info\.{kernel.kernel}\n(.*?)^\.[\w.]+", dump, re.M | re.S)
        blocks = re.findall(r"EIATTR_KPARAM_INFO.*?Ordinal : (\w+)\s+Offset  : (\w+)\s+Size    : (\w+)", info, re.S)
        assert [block[:2] for block in blocks] == [("0x0", "0x0")], (
            f"{kernel.kernel} takes more than a struct: {blocks}"
        )
        kernel.parameters = int(blocks[0][2], 16)
        struct = declared()[kernel.kernel].struct
        expected = _core.cuda_programs()[kernel.program][struct]
        assert kernel.parameters == expected, f"{kernel}: Rust's {struct} has {expected} bytes"
        (listing,) = re.findall(rf"Function : {kernel.kernel}\n(.*?)(?=\tFunction : |\Z)", dump, re.S)
        check_instructions(kernel, listing)


@dataclass
class Instruction:
    address: int
    guard: str
    name: str
    operands: str

    @property
    def base(self) -> str:
        return self.name.split(".")[0]

    @property
    def first(self) -> str:
        return self.operands.split(",")[0].strip()


INSTRUCTION = re.compile(
    r"/\*([0-9a-f]+)\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)([^;&?]*)[^;]*;"
)  # &req and ?trans: how it is issued


def check_instructions(kernel: Kernel, listing: str) -> None:
    found = [Instruction(int(address, 16), *rest) for address, *rest in INSTRUCTION.findall(listing)]
    assert any(one.base == "EXIT" for one in found), f"{kernel}: no listing"
    for place, one in enumerate(found):
        said = f"{kernel}: {one}"
        assert one.base not in ("LDL", "STL"), f"local memory: {said}"
        if one.base == "SHFL":
            assert one.guard in ("", "@PT"), f"a shuffle without some threads: {said}"
        if one.base == "WARPSYNC" and ".ALL" not in one.name:
            masks = values(found, place, one.first) if one.first.startswith("R") else {one.first}
            assert masks <= {"0xffffffff", "-0x1"}, f"a part of a warp, {masks}: {said}"


def values(instructions: list[Instruction], place: int, register: str) -> set[str]:
    """The constants that a register may hold at an instruction, whatever way led there; "?" for what is no constant.
    What a call does to registers is not followed."""
    jumps: dict[int, list[int]] = {}
    for i, one in enumerate(instructions):
        target = re.search(r"(0x[0-9a-f]+) *$", one.operands)
        if one.base in ("BRA", "CALL") and target:
            jumps.setdefault(int(target[1], 16), []).append(i)
    found, seen, left = set(), {place}, [place]
    while left:
        here = left.pop()
        before = list(jumps.get(instructions[here].address, ()))
        last = instructions[here - 1] if here else None
        if last and last.base != "RET" and (last.guard or last.name not in ("BRA", "EXIT")):
            before.append(here - 1)
        if not before:
            found.add("?")
        for i in before:
            one = instructions[i]
            constant = re.search(r"(-?0x[0-9a-f]+) *$", one.operands)
            if one.first == register and one.base in ("MOV", "IMAD", "HFMA2", "CS2R", "UMOV"):
                found.add(constant[1] if constant and not one.guard else "?")
            elif one.first == register and one.base != "WARPSYNC":  # which reads it
                found.add("?")
            elif i not in seen:
                seen.add(i)
                left.append(i)
    return found


# ---- the variants ----


def layouts():
    """Every layout, and every kind of types and parameters, but not all of their combinations."""
    layouts = [(32, 4, 1), (32, 4, 2), (32, 4, 4), (128, 1, 2), (128, 1, 4), (256, 1, 4), (512, 1, 0)]
    types = [("f32", "f32", "f32"), ("bf16", "bf16", "bf16"), ("f16", "f16", "f16"), ("f32", "bf16", "bf16")]
    types += [("f32", "f16", "f32")]
    for (i, (lanes, rows, held)), (j, (x, f, y)) in itertools.product(enumerate(layouts), enumerate(types)):
        vec = 1 if (i + j) % 4 == 3 else 4 if (x, f, y) == ("f32",) * 3 else 8
        full = int(held > 0 and (i + j) % 3 > 0)
        layout = f"-DK_VEC={vec} -DK_LANES={lanes} -DK_ROWS={rows} -DK_HELD={held} -DK_FULL={full} -DK_P={x}"
        step = x != y or (i + j) % 2
        gains = [0, 2, 1][(i + j) % 3] if step else 0
        yield f"{layout} -DK_STEP={int(step)} -DK_X={x} -DK_F={f} -DK_Y={y} -DK_ALPHA={gains} -DK_BETA={gains}"


def every_variant():
    """(program, options) of all kernels: each layout with each combination of types, the rest by turns."""
    weights = {"layer_norm.cu": (2, 2), "rms_norm.cu": (2, 0), "scale_norm.cu": (1, 0)}
    weights |= {"dyt.cu": (2, 2), "derf.cu": (2, 2)}
    norms = itertools.cycle([*weights.items(), ("no_norm.cu", (0, 0))])
    for options, (program, (weight, bias)) in zip(layouts(), norms):
        for backward in (0, 1):
            # Without a norm there is nothing but the step.
            step = options.replace("-DK_STEP=0", "-DK_STEP=1") if program == "no_norm.cu" else options
            yield program, f"{step} -DK_BACKWARD={backward} -DK_WEIGHT={weight} -DK_BIAS={bias}"
    for turn, (options, order) in enumerate(zip(layouts(), itertools.cycle(["0.0f", "1.0f", "1.5f", "3.0f"]))):
        if "-DK_STEP=0" in options:
            yield "scale_norm.cu", f"{options} -DK_BACKWARD={turn % 4 // 2} -DK_WEIGHT=1 -DK_BIAS=0 -DK_ORDER={order}"
    for x, vec in CHUNKS:
        for mode in range(3):
            yield "cross_entropy.cu", f"-DK_LANES=256 -DK_ROWS=1 -DK_VEC={vec} -DK_X={x} -DK_GRADIENT={mode}"
        for norm in (entry.operator for entry in DECLARED.values() if entry.form == "columns"):
            state = "double" if norm == "power_norm_v" else "f32"
            yield f"{norm}.cu", f"-DK_LANES=256 -DK_ROWS=1 -DK_VEC={vec} -DK_X={x} -DK_STATE={state}"
    for vec, moments in itertools.product((1, 4), ("f32", "bf16")):
        yield "adam.cu", f"-DK_VEC={vec} -DK_FIRST={moments} -DK_SECOND={moments}"
    yield "sums.cu", ""


CHUNKS = [("f32", 4), ("bf16", 8), ("f16", 8), ("f32", 1), ("bf16", 1), ("f16", 1)]
VARIANTS = list(every_variant())
# The others work element by element, as relu_dropout.cu does.
ELEMENTWISE = sorted({*_core.cuda_programs()} - {program for program, _ in VARIANTS})
VARIANTS += [
    (program, f"-DK_VEC={vec} -DK_X={x} -DK_BACKWARD={backward}")
    for program in ELEMENTWISE
    for x, vec in CHUNKS
    for backward in range(2)
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a csv")
    parser.add_argument("--architectures", nargs="+", type=int, choices=ARCHITECTURES, default=ARCHITECTURES)
    parser.add_argument("--of", type=int, default=1, metavar="N", help="every N-th variant")
    arguments = parser.parse_args()
    wanted = [(*v, a) for a in arguments.architectures for v in VARIANTS[:: arguments.of]]
    with ThreadPoolExecutor(2) as pool:
        kernels = [kernel for found in pool.map(lambda one: compiled(*one), wanted) for kernel in found]
    names = [*(field.name for field in fields(Kernel)), "threads", "warps"]
    with arguments.output.open("w", newline="") if arguments.output else sys.stdout as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows({**asdict(kernel), "threads": kernel.threads, "warps": kernel.warps} for kernel in kernels)


if __name__ == "__main__":
    main()
