"""Tensors for fuzz.py: each ends at a page that cannot be touched, in any layout, type and shape."""

import ctypes
import math
import mmap
import random

import torch
from torch import Tensor

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OTHERS = [torch.int64, torch.int32, torch.bool, torch.uint8, torch.complex64, torch.float8_e5m2]
PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)


def guarded(count: int, dtype: torch.dtype) -> Tensor:
    """(count,) of zeros whose last byte is a page's last; the next page cannot be touched."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    size = count * dtype.itemsize
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 1) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if LIBC.mprotect(ctypes.c_void_p(start + pages * PAGE), ctypes.c_size_t(PAGE), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    return torch.frombuffer(memory, dtype=dtype, offset=pages * PAGE - size, count=count)


LAYOUTS = ["contiguous"] * 6 + ["transposed", "expanded", "overlapping", "strided"]


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same numbers (expanded and overlapping ones: some of them, repeated) in guarded memory."""
    shape, dims = list(values.shape), values.dim()
    strides, step = [0] * dims, 1
    order = range(dims) if layout == "transposed" else reversed(range(dims))
    for d in order:
        strides[d] = step
        step *= max(shape[d], 1)
    if layout == "strided":
        strides = [2 * s for s in strides]
    if layout == "expanded" and dims:
        strides[0] = 0
    if layout == "overlapping":
        strides = [1] * dims
    needed = 1 + sum((n - 1) * s for n, s in zip(shape, strides)) if values.numel() else 0
    made = guarded(needed, values.dtype).as_strided(shape, strides)
    if layout in ("expanded", "overlapping") and dims and values.numel():
        flat = guarded(needed, values.dtype)
        flat.copy_(values.flatten().repeat(-(-needed // values.numel()))[:needed])
        return flat.as_strided(shape, strides)
    return made.copy_(values)


class Draw:
    """What a call is drawn from."""

    def __init__(self, seed: int, number: int) -> None:
        self.random = random.Random(f"{seed}:{number}")
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(63))

    def one(self, *choices):
        return self.random.choice(choices)

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def normal(self, shape, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
        """Guarded, in any layout."""
        values = scale * torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return laid_out(values.to(dtype), self.one(*LAYOUTS))

    def whole(self, shape, low: int, high: int, dtype: torch.dtype = torch.int64) -> Tensor:
        values = torch.randint(low, high, shape, generator=self.generator, dtype=torch.int64)
        return laid_out(values.to(dtype), self.one(*LAYOUTS))

    def shape(self, least: int = 0) -> list[int]:
        dims = self.random.randint(least, 6)
        if dims == 2 and self.chance(0.1):
            return [self.one(300, 2500), self.one(1, 8, 33)]
        most = 40 if dims < 3 else 4
        return [self.one(1, 2, 3, self.random.randint(1, most), 0 if self.chance(0.1) else 3) for _ in range(dims)]

    def anything(self) -> Tensor:
        """A tensor of any shape, type, layout and kind."""
        dtype = self.one(*FLOATS, *FLOATS, *OTHERS)
        if dtype in FLOATS:
            t = self.normal(self.shape(), dtype)
            if t.numel() and self.chance(0.2) and not has_overlap(t):
                t.view(-1)[0] = self.one(math.nan, math.inf, -math.inf, 6e4) if t.is_contiguous() else 0
        elif dtype in (torch.complex64, torch.float8_e5m2):
            t = laid_out(torch.zeros(self.shape()).to(dtype), self.one(*LAYOUTS))
        else:
            t = self.whole(self.shape(), *self.one((0, 2), (0, 9), (-5, 100)), dtype)
        return self.of_another_kind(t) if self.chance(0.06) else t

    def of_another_kind(self, t: Tensor) -> Tensor:
        kind = self.one("meta", "sparse", "mkldnn", "csr")
        try:
            return {
                "meta": lambda: t.to("meta"),
                "sparse": t.to_sparse,
                "mkldnn": lambda: t.contiguous().to_mkldnn(),
                "csr": t.to_sparse_csr,
            }[kind]()
        except (RuntimeError, NotImplementedError):
            return t.to("meta")

    def scalar(self, kind: str):
        if kind == "float":
            return self.one(0.0, -0.0, 1.0, 0.1, 0.5, -1.0, 3.0, 1e-5, 1e300, math.nan, math.inf, -math.inf)
        if kind == "int":
            return self.one(0, 1, 2, 3, -1, 7, -100, 2**31, 2**62, 2**63 - 1, -(2**63))
        if kind == "bool":
            return self.chance(0.5)
        if kind == "str":
            return self.one("paper", "release", "", "layernorm", "no such name", "\0", "x" * 1000)
        if kind == "Optional[int]":  # a dtype: schemas print it so
            return self.one(None, *FLOATS, torch.int64)
        raise AssertionError(f"fuzz.py draws no argument of type {kind}")


def has_overlap(t: Tensor) -> bool:
    return any(s == 0 and n > 1 for n, s in zip(t.shape, t.stride())) or not t.is_contiguous()


def is_freed(t: Tensor) -> bool:
    """Its storage has been taken away: torch's own functions would crash."""
    if t.layout != torch.strided or not t.numel() or t.device.type == "meta":
        return False
    last = t.storage_offset() + sum((n - 1) * abs(s) for n, s in zip(t.shape, t.stride()))
    return t.untyped_storage().nbytes() < (last + 1) * t.element_size()


def faulty(d: Draw, t: Tensor, may_free: bool = True) -> Tensor:
    """t with a fault, or what may pass for it. `may_free`: its storage may be taken away."""
    if is_freed(t):
        return t
    kind = d.one(
        "dtype",
        "dtype",
        "longer",
        "shorter",
        "dims",
        "flat",
        "empty",
        "numbers",
        "other",
        "kind",
        "transposed",
        "freed",
    )
    dtype = t.dtype
    if kind == "dtype":
        return laid_out(t.to(d.one(*FLOATS, *OTHERS)), "contiguous")
    if kind in ("longer", "shorter") and t.dim():
        shape = list(t.shape)
        at = d.random.randrange(t.dim())
        shape[at] = shape[at] + 1 if kind == "longer" else max(shape[at] - 1, 0)
        fresh = torch.zeros(shape, dtype=dtype)
        return laid_out(fresh, d.one(*LAYOUTS))
    if kind == "dims":
        return t.unsqueeze(0) if d.chance(0.5) or t.dim() == 0 else laid_out(t[0] if len(t) else t, "contiguous")
    if kind == "flat":
        return t.flatten()
    if kind == "empty":
        return torch.empty(d.one((0,), (0, 4), (3, 0)), dtype=dtype)
    if kind == "numbers" and t.numel() and not t.is_complex():
        bad = d.one(math.nan, math.inf, 1e30) if t.is_floating_point() else d.one(-1, 2**62, -(2**63), 5)
        if t.dtype == torch.int64 or t.is_floating_point():
            t = laid_out(t, "contiguous")
            t.view(-1)[d.random.randrange(t.numel())] = bad
        return t
    if kind == "other":
        return d.anything()
    if kind == "kind":
        return d.of_another_kind(t)
    if kind == "transposed" and t.dim() >= 2:
        return t.transpose(0, -1)
    if kind == "freed" and may_free and t.numel():
        t = t.clone(memory_format=torch.contiguous_format)
        t.untyped_storage().resize_(d.one(0, t.nbytes // 2))
    return t
