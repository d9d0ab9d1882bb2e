"""What fuzz.py knows of operators: valid arguments, and the formulas of tests/reference that give the same in float64.

A family builds arguments by name. Its oracle takes them, floating ones as float64 leaves, and returns outputs by number
and written buffers by name, differentiable.
"""

import math

import torch
from fuzz_tensors import FLOATS, LAYOUTS, Draw, has_overlap, laid_out
from torch import Tensor

import reference as ref
import row_norms
from normformer_rs.nn.norm_table import DECLARED  # registers the operators

OPS = torch.ops.normformer_rs
OPS_BY_NAME = {
    name.removeprefix("normformer_rs::"): getattr(OPS, name.removeprefix("normformer_rs::")).default._schema.arguments
    for name in sorted(torch._C._dispatch_get_all_op_names())
    if name.startswith("normformer_rs::")
}


def written(op: str) -> list[str]:
    return [s.name for s in OPS_BY_NAME[op] if s.is_out or (s.alias_info is not None and s.alias_info.is_write)]


def gain(d: Draw, width: int, like: torch.dtype) -> Tensor | None:
    dtype = like if d.chance(0.6) else d.one(*FLOATS)
    return d.one(None, d.normal((width,), dtype), d.normal((1,), dtype), d.normal((), dtype))


def matrix(d: Draw, least: int = 1) -> tuple[Tensor, torch.dtype, int]:
    dtype, shape = d.one(*FLOATS), d.shape(least)
    return d.normal(shape, dtype, d.one(1.0, 1.0, 1e-3, 10.0)), dtype, shape[-1] if shape else 1


def eps(d: Draw) -> float:
    return d.one(1e-5, 1e-5, 1.0)


def own(d: Draw, op: str) -> dict:
    """A norm's own arguments: ε, or the learned numbers of a curve."""
    norm = op.removesuffix("_residual")
    prefix = "norm_" if norm != op else ""
    of_curve = row_norms.numbers(norm) if norm in row_norms.ENTRIES else []
    number = lambda: d.normal(d.one((1,), (1,), (), (1, 1)), d.one(*FLOATS))  # noqa: E731
    return {prefix + name: number() for name in of_curve} or {"eps": eps(d)}


def norm_of(op: str, x: Tensor, a: dict) -> Tensor:
    norm = op.removesuffix("_residual")
    given = [a[name] for name in (("norm_" + n if norm != op else n) for n in row_norms.numbers(norm))]
    return row_norms.NORMS[norm](x, a["weight"], a["bias"], *given, eps=a.get("eps"))


def row_norm(d: Draw, op: str):
    x, dtype, width = matrix(d)
    return {"x": x, "weight": gain(d, width, dtype), "bias": gain(d, width, dtype), **own(d, op)}


def row_norm_oracle(op: str, a: dict):
    return {0: norm_of(op, a["x"], a)}


def seed_of(d: Draw, p: float) -> Tensor | None:
    if p == 0 and d.chance(0.7):
        return None
    return laid_out(torch.tensor([d.random.getrandbits(bits) for bits in (63, 31, 15)]), "contiguous")


def keep_of(a: dict, rows: int, cols: int) -> Tensor | None:
    if a["p"] == 0:
        return None
    seed, update, micro_batch = a["seed"].flatten().tolist()
    if ref.dropout_threshold(a["p"]) == 0:
        return None
    return ref.dropout_keep(seed, update, micro_batch, a["site"], rows, cols, a["p"])


def dropped(t: Tensor, a: dict) -> Tensor:
    cols = t.shape[-1] if t.dim() else 1
    keep = keep_of(a, t.numel() // max(cols, 1), cols) if t.numel() else None
    return t if keep is None else torch.where(keep.view(t.shape), t * ref.dropout_scale(a["p"]), 0.0)


def residual(d: Draw, op: str):
    x, dtype, width = matrix(d)
    branch = d.one(dtype, dtype, torch.bfloat16, torch.float16) if dtype == torch.float32 else dtype
    p = d.one(0.0, 0.0, 0.1, 0.5)
    gains = {name: gain(d, width, torch.float32) for name in ("alpha", "beta", "weight", "bias")}
    if op == "residual":
        gains["weight"] = gains["bias"] = None
    return {
        "x": x,
        "f": d.normal(x.shape, branch),
        **gains,
        **own(d, op),
        "p": p,
        "seed": seed_of(d, p),
        "site": d.random.randrange(65536),
        "dtype": d.one(None, branch, dtype),
    }


def residual_oracle(op: str, a: dict):
    one = lambda t: 1.0 if t is None else t  # noqa: E731
    x_plus = one(a["alpha"]) * a["x"] + one(a["beta"]) * dropped(a["f"], a)
    outputs = {0: x_plus}
    if op != "residual":
        # N reads x⁺ as it is stored; its rounding has slope one.
        stored = x_plus + (a["stored"][0].double() - x_plus.detach())
        outputs[1] = norm_of(op, stored, a)
    return outputs


def lp_norm(d: Draw, op: str):
    x, dtype, width = matrix(d)
    if d.chance(0.3):  # ties
        x = laid_out((x.double() * 2).round().to(dtype), d.one(*LAYOUTS))
    return {"x": x, "weight": gain(d, width, dtype), "p": d.one(1.0, 2.0, 3.0, 1.5, math.inf), "eps": eps(d)}


def lp_norm_oracle(op: str, a: dict):
    x, p = a["x"], a["p"]
    if x.shape[-1] == 0:
        return {0: x.clone()}
    magnitude = x.abs()
    if p == math.inf:
        n = magnitude.amax(-1, keepdim=True)  # torch shares the slope among those that tie
    else:
        unit = magnitude.detach().amax(-1, keepdim=True)
        unit = torch.where(unit == 0, 1.0, unit)
        powers = ((magnitude / unit) ** p).sum(-1, keepdim=True)
        n = torch.where(powers.detach() == 0, 1.0, powers) ** (1 / p) * unit * (powers.detach() != 0)
    length = torch.where(n.detach() > a["eps"], n, a["eps"])
    return {0: x / length * (1.0 if a["weight"] is None else a["weight"])}


def conventional(d: Draw, op: str):
    x, dtype, width = matrix(d)
    how = {"cast": "after", "eps_place": d.one("inside", "outside"), "part": d.one(1.0, 0.5) if width > 1 else 1.0}
    return {"x": x, "weight": gain(d, width, dtype), "eps": eps(d), **how}


def conventional_oracle(op: str, a: dict):
    x, measured = a["x"], int(a["part"] * a["x"].shape[-1])
    if x.numel() == 0:
        return {0: x.clone()}
    mean = x[..., :measured].square().mean(-1, keepdim=True)
    if a["eps_place"] == "outside":
        root = torch.where(mean.detach() > 0, torch.where(mean.detach() > 0, mean, 1.0).sqrt(), 0.0) + a["eps"]
    else:
        root = (mean + a["eps"]).sqrt()
    return {0: x / root * (1.0 if a["weight"] is None else a["weight"])}


def group_scaling(d: Draw, op: str):
    x, _, width = matrix(d)
    return {"x": x, "groups": d.one(*[g for g in range(1, max(width, 1) + 1) if width % g == 0])}


def group_scaling_oracle(op: str, a: dict):
    return {0: ref.group_scaling(a["x"], a["groups"]) if a["x"].numel() else a["x"].clone()}


COLUMN = {DECLARED[name].operator: twin for name, twin in ref.BATCH_NORMS.items()}


def column_norm(d: Draw, op: str):
    x, dtype, width = matrix(d)
    affine = lambda: d.normal((width,), d.one(dtype, torch.float32)) if d.chance(0.7) else None  # noqa: E731
    positive = lambda: laid_out(d.normal((width,), torch.float32).double().square().add(0.1).float(), "contiguous")  # noqa: E731
    has_state = op == "power_norm" or d.chance(0.7)
    first, second = OPS_BY_NAME[op][4].name, OPS_BY_NAME[op][5].name
    real = lambda: laid_out(torch.randn(width, generator=d.generator), "contiguous")  # noqa: E731
    state = {first: positive() if op != "batch_norm" else real(), second: real() if op != "batch_norm" else positive()}
    if second == "unused":
        state[second] = None
    return {
        "x": x,
        "weight": affine(),
        "bias": affine(),
        "pad_mask": d.whole(x.shape[:-1], 0, 2, torch.bool) if d.chance(0.4) else None,
        **(state if has_state else {first: None, second: None}),
        "iters": laid_out(torch.tensor([d.random.randrange(20)]), "contiguous") if op == "power_norm" else None,
        "refused": laid_out(torch.zeros(1, dtype=torch.int64), "contiguous") if d.chance(0.5) else None,
        "stats": None,
        "train": d.chance(0.7),
        "alpha": d.one(0.0, 0.9),
        "eps": 1e-5,
        "alpha_bwd": d.one(0.5, 0.9),
        "warmup": d.one(0, 10, 100),
        "variant": d.one("paper", "release") if op == "power_norm" else "paper",
        "group": "",
    }


def column_oracle(op: str, a: dict):
    x = a["x"].unsqueeze(0) if a["x"].dim() == 1 else a["x"]
    pad = a["pad_mask"].unsqueeze(0) if a["pad_mask"] is not None and a["x"].dim() == 1 else a["pad_mask"]
    width = x.shape[-1]
    real = x.numel() // max(width, 1) if pad is None else int((~pad).sum())
    if real == 0 or a["stats"] is not None or x.numel() == 0:
        return {}
    first, second = OPS_BY_NAME[op][4].name, OPS_BY_NAME[op][5].name
    has_state = a["before"][first] is not None
    names = [name for name in (first, second) if name != "unused"]
    buffers = dict.fromkeys(names, torch.ones(width, dtype=torch.float64))
    for name, b in ((first, a["before"][first]), (second, a["before"][second])):
        if b is not None and name in buffers:
            buffers[name] = b.double().flatten().clone()
    options = {"alpha": a["alpha"]}
    if op == "power_norm":
        buffers["iters"] = a["before"]["iters"].clone().flatten()
        options = {"mode": a["variant"], "warmup": a["warmup"], "alpha_fwd": a["alpha"], "alpha_bwd": a["alpha_bwd"]}
    ones, zeros = torch.ones(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    weight = ones.requires_grad_() if a["weight"] is None else a["weight"].flatten()
    bias = zeros.requires_grad_() if a["bias"] is None else a["bias"].flatten()
    twin = COLUMN[op](weight, bias, buffers, eps=a["eps"], **options)
    y = twin(x, pad, a["train"] or not has_state)
    outputs = {0: y.view(a["x"].shape)}
    if has_state and a["train"]:
        outputs[first] = buffers[first].detach()
    return outputs


def relu_dropout(d: Draw, op: str):
    x, _, _ = matrix(d, 0)
    p = d.one(0.0, 0.1, 0.5)
    return {"x": x, "p": p, "seed": seed_of(d, p), "site": d.random.randrange(65536)}


def relu_oracle(op: str, a: dict):
    return {0: dropped(torch.relu(a["x"]), a)}


def dropout_mask(d: Draw, op: str):
    shape = {"rows": d.one(0, 1, 5, 40), "cols": d.one(0, 1, 3, 17, 300)}
    p = d.one(0.0, 0.1, 0.5)
    return {"seed": seed_of(d, p or 0.1), **shape, "p": p, "site": d.random.randrange(65536)}


def dropout_mask_oracle(op: str, a: dict):
    ones = torch.ones(a["rows"], a["cols"], dtype=torch.float64)
    return {0: dropped(ones, a) if ones.numel() else ones}


def attention(d: Draw, op: str):
    dtype, heads, d_head = d.one(*FLOATS), d.one(1, 2, 3), d.one(1, 3, 8, 17)
    pairs = [(d.one(0, 1, 3, 9), d.one(0, 1, 2, 20)) for _ in range(d.random.randint(0, 4))]
    ranges, q, k = [], d.one(0, 1), d.one(0, 2)
    for q_len, k_len in pairs:
        ranges.append([q, q_len, k, k_len])
        q, k = q + q_len, k + k_len
    p = d.one(0.0, 0.3, 0.0)
    rows = lambda n: d.normal((n + d.one(0, 1), heads * d_head), dtype)  # noqa: E731
    keys = rows(k)
    return {
        "q": rows(q),
        "k": keys,
        "v": d.normal(keys.shape, dtype),
        "ranges": laid_out(torch.tensor(ranges, dtype=torch.int64).view(-1, 4), "contiguous"),
        "heads": heads,
        "causal": d.chance(0.4),
        "scale": d.one(0.3, 1.0),
        "p": p,
        "seed": seed_of(d, p),
        "site": d.random.randrange(65536),
    }


def attention_oracle(op: str, a: dict):
    q, k, v, heads = a["q"], a["k"], a["v"], a["heads"]
    ranges = a["ranges"].tolist()
    keep = keep_of(a, len(q) * heads, max([r[3] for r in ranges], default=0))
    out = q * 0.0 + (k.sum() + v.sum()) * 0.0
    for q_start, q_len, k_start, k_len in ranges:
        if q_len == 0 or k_len == 0:
            continue
        cut = lambda t, start, n: t[start : start + n].unflatten(1, (heads, -1)).transpose(0, 1)  # noqa: E731
        own = None
        if keep is not None:
            own = keep[q_start * heads : (q_start + q_len) * heads, :k_len].unflatten(0, (q_len, heads)).transpose(0, 1)
        # j ≤ i + k_len − q_len
        i, j = torch.arange(q_len).unsqueeze(1), torch.arange(k_len)
        mask = j <= i + k_len - q_len if a["causal"] else None
        wide = math.sqrt(q.shape[1] // heads) * a["scale"]
        scale = 1.0 if keep is None else ref.dropout_scale(a["p"])
        part = ref.attention(
            cut(q, q_start, q_len) * wide, cut(k, k_start, k_len), cut(v, k_start, k_len), mask, own, scale
        )
        rows = torch.arange(q_start, q_start + q_len)
        out = out.index_add(0, rows, part.transpose(0, 1).flatten(1))
    return {0: out}


def cross_entropy(d: Draw, op: str):
    dtype, n, c = d.one(*FLOATS), d.one(0, 1, 5, 40), d.one(1, 2, 7, 33, 700)
    mask = torch.rand(c, generator=d.generator) < 0.6
    mask[d.random.randrange(c)] = True
    mask = mask if d.chance(0.5) else None
    allowed = torch.arange(c) if mask is None else mask.nonzero().flatten()
    target = allowed[torch.randint(len(allowed), (n,), generator=d.generator)]
    ignore = d.one(-100, 0, 3)
    target[torch.rand(n, generator=d.generator) < 0.2] = ignore
    logits = d.normal((n, c), dtype, 2.0)
    a = {
        "logits": logits if not op.endswith("_") else laid_out(logits, "contiguous"),
        "target": laid_out(target, d.one("contiguous", "strided")),
        "mask": None if mask is None else laid_out(mask, "contiguous"),
        "nll_weight": 0.88,
        "uniform_weight": d.one(0.0, 0.02),
        "ignore_index": ignore,
    }
    return a | ({"scale": laid_out(torch.tensor(0.5, dtype=torch.float64), "contiguous")} if op.endswith("_") else {})


def cross_entropy_oracle(op: str, a: dict):
    z, ignored = a["logits"], a["target"] == a["ignore_index"]
    mask = torch.ones(z.shape[1], dtype=torch.bool) if a["mask"] is None else a["mask"]
    log_p = ref.masked_log_softmax(z, mask)
    nll = -log_p.gather(-1, a["target"].masked_fill(ignored, mask.nonzero()[0].item()).unsqueeze(-1)).squeeze(-1)
    loss = a["nll_weight"] * nll - a["uniform_weight"] * log_p[:, mask].sum(-1)
    loss, nll = loss.masked_fill(ignored, 0.0), nll.masked_fill(ignored, 0.0)
    outputs = {0: loss, 1: nll.detach()}
    if op.endswith("_"):
        outputs["logits"] = torch.autograd.grad(loss.sum() * a["scale"].item(), z)[0] if z.numel() else z
        outputs[0] = loss.detach()
    return outputs


def adam(d: Draw, op: str):
    n = d.one(0, 1, 7, 500)
    one = lambda value: laid_out(torch.tensor([value]), "contiguous")  # noqa: E731
    names = ("parameters", "first", "second", "gradients")
    buffers = {name: laid_out(torch.randn(n, generator=d.generator), "contiguous") for name in names}
    buffers["second"].square_()
    numbers = {"grad_scale": one(0.5), "step_size": one(0.01), "keep": one(0.99)}
    # Of moments in bf16.
    rounding = {"random_seed": d.one(0, 2**40 + 3), "update": d.one(0, 9), "place": d.one(0, 1021)}
    return {**buffers, **numbers, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, **rounding}


def adam_oracle(op: str, a: dict):
    g = a["gradients"] * a["grad_scale"]
    m = a["beta1"] * a["first"] + (1 - a["beta1"]) * g
    v = a["beta2"] * a["second"] + (1 - a["beta2"]) * g * g
    parameters = a["parameters"] * a["keep"] - a["step_size"] * m / (v.sqrt() + a["eps"])
    made = {"parameters": parameters, "first": m, "second": v, "gradients": torch.zeros_like(g)}
    return {name: t.detach() for name, t in made.items()}


def sinkhorn(d: Draw, op: str):
    n = d.one(1, 2, 3, 4, 4, 7)
    logits = d.normal((*d.shape(0), n, n), d.one(*FLOATS), d.one(1.0, 1.0, 1e-3, 10.0))
    return {"logits": logits, "iterations": d.one(1, 2, 20), "eps": d.one(1e-6, 1e-6, 0.1)}


def sinkhorn_oracle(op: str, a: dict):
    return {0: ref.sinkhorn(a["logits"], a["iterations"], a["eps"])}


def mix_streams(d: Draw, op: str):
    dtype, shape = d.one(*FLOATS), d.shape(0)
    m, n, width, is_added = d.one(1, 2, 4), d.one(1, 2, 4, 5), d.one(1, 7, 32, 96), d.one(True, False)
    computing = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        "streams": d.normal((*shape, n, width), dtype),
        "weights": d.normal((*shape, m, n + is_added), computing),
        "added": d.normal((*shape, width), dtype) if is_added else None,
    }


def mix_streams_oracle(op: str, a: dict):
    rows = a["streams"] if a["added"] is None else torch.cat([a["streams"], a["added"].unsqueeze(-2)], -2)
    return {0: torch.einsum("...ij,...jd->...id", a["weights"], rows)}


FAMILIES = {
    **dict.fromkeys(row_norms.NORMS, (row_norm, row_norm_oracle)),
    "lp_norm": (lp_norm, lp_norm_oracle),
    "lp_norm_forward": (lp_norm, None),  # CUDA's alone
    "conventional_rms_norm": (conventional, conventional_oracle),
    "group_scaling": (group_scaling, group_scaling_oracle),
    **dict.fromkeys(COLUMN, (column_norm, column_oracle)),
    "relu_dropout": (relu_dropout, relu_oracle),
    "dropout_mask": (dropout_mask, dropout_mask_oracle),
    "attention": (attention, attention_oracle),
    "sinkhorn": (sinkhorn, sinkhorn_oracle),
    "mix_streams": (mix_streams, mix_streams_oracle),
    "label_smoothed_cross_entropy": (cross_entropy, cross_entropy_oracle),
    "label_smoothed_cross_entropy_": (cross_entropy, cross_entropy_oracle),
    "adam_": (adam, adam_oracle),
}
NUMBERS = {prefix + name for norm in row_norms.NORMS for name in row_norms.numbers(norm) for prefix in ("", "norm_")}
DIFFERENTIABLE = (
    "x",
    "f",
    "alpha",
    "beta",
    "q",
    "k",
    "v",
    "logits",
    "streams",
    "weights",
    "added",
    "weight",
    "bias",
    *sorted(NUMBERS - {"alpha"}),
)


def family(op: str):
    if op == "residual" or op.endswith("_residual"):
        known = op == "residual" or op.removesuffix("_residual") in row_norms.NORMS
        return (residual, residual_oracle if known else None)
    return FAMILIES.get(op)


# ---- comparing ----


class Wrong(Exception):
    """A value that differs from its twin's."""


def is_plain(a: dict) -> bool:
    """Finite dense numbers of moderate size on the CPU: what a twin is asked about."""
    tensors = [t.detach() for t in a.values() if isinstance(t, Tensor)]
    if not all(t.device.type == "cpu" and t.layout == torch.strided and is_whole(t) for t in tensors):
        return False
    numbers = [v for name, v in a.items() if isinstance(v, float) and not (name == "p" and v == math.inf)]
    seed = [0] if a.get("seed") is None else a["seed"].flatten().tolist()
    return (
        all((t.double().abs() <= 100).all() for t in tensors if t.is_floating_point())
        and all(abs(v) <= 10 for v in numbers)
        and ("parameters" in a or a.get("eps", 1.0) >= 1e-6)
        and 0 <= a.get("alpha_bwd", 0) < 1
        and 0 <= a.get("site", 0) < 2**16
        and 0 <= a.get("warmup", 0) < 2**40
        and all(0 <= v < limit for v, limit in zip(seed, (2**63, 2**32, 2**16)))
    )


def is_whole(t: Tensor) -> bool:
    """Its memory has not been taken away."""
    return t.untyped_storage().nbytes() >= (1 if has_overlap(t) else t.nbytes)


def wide(a: dict) -> dict:
    """Floating tensors as float64 leaves."""
    return {
        name: t.detach().double().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t
        for name, t in a.items()
    }


def compare(
    what: str, ours: Tensor, twin: Tensor, largest: float, rows: int, is_double: bool, eps: float = 0.0
) -> None:
    if tuple(ours.shape) != tuple(twin.shape):
        raise Wrong(f"{what} has shape {tuple(ours.shape)}, its twin {tuple(twin.shape)}")
    if twin.numel() == 0:
        return
    ours, twin, own = ours.detach().double(), twin.detach(), torch.finfo(ours.dtype)
    judged = twin.isfinite() & (twin.abs() < 0.9 * own.max)
    if not judged.any():
        return
    computing = torch.finfo(torch.float64 if is_double else torch.float32)
    size = twin[judged].abs().max().item()
    terms = max(1.0, largest) ** 3 * max(1.0, rows / 10) + size  # what may be summed before it cancels
    allowed = 4 * own.eps * size + own.tiny + max(100 * computing.eps, 4 * eps) * terms
    error = (ours - twin).abs()[judged].max().item()
    if not error <= allowed:
        raise Wrong(f"{what} is {error:.3g} from its twin's, of at most {size:.3g}; allowed are {allowed:.3g}")


def scale_of(a: dict) -> tuple[float, int, bool]:
    """The largest number, the most rows, and whether all is computed in float64."""
    floating = [t for t in a.values() if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
    largest = max((t.detach().double().abs().max().item() for t in floating), default=1.0)
    rows = max((t.numel() // max(t.shape[-1], 1) for t in floating if t.dim()), default=1)
    leader = next(a[n] for n in ("x", "x_plus", "q", "logits", "streams", "parameters", "seed") if n in a)
    return largest, rows, leader.dtype == torch.float64
