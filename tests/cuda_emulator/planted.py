"""Bugs planted in the kernels' sources: each must be caught by the case named with it.

A bug is (what, text, replacement, case, arguments); the text must occur once in a program that the case compiles.
"""

from typing import Any, NamedTuple

from . import cases


class Bug(NamedTuple):
    what: str
    text: str
    replacement: str
    case: Any
    arguments: tuple
    sanitized: bool = False  # only the address sanitizer sees it


WIDE = ("layer_norm", "f32", 1030)  # several warps a row, read again
NARROW = ("layer_norm", "bf16", 512)  # four rows a block, kept in registers
BETWEEN = ("layer_norm", "f32", 1024)  # several warps a row, kept in registers
STEP = ("layer_norm", ("f32", "bf16"), 64, 0.3, "each")

BUGS = [
    # reduce.cuh
    Bug(
        "a row's threads read each other's sums before they are written",
        "      __syncthreads();\n#pragma unroll\n      for (int k = 0; k < N; k++) {\n        v[k] = to[k * WARPS];",
        "#pragma unroll\n      for (int k = 0; k < N; k++) {\n        v[k] = to[k * WARPS];",
        cases.row_norm,
        WIDE,
    ),
    Bug("one buffer for two reductions", "      buffer ^= 1;\n", "", cases.row_norm, WIDE),
    Bug("a shuffle short", "step > 0; step /= 2", "step > 1; step /= 2", cases.row_norm, NARROW),
    Bug(
        "a warp's sum is left out",
        "for (int w = 1; w < WARPS; w++)",
        "for (int w = 2; w < WARPS; w++)",
        cases.row_norm,
        BETWEEN,
    ),
    Bug(
        "a barrier that only some threads meet",
        "    if constexpr (WARPS > 1) {\n",
        "    if constexpr (WARPS > 1) {\n      if (lane == 5) return;\n",
        cases.row_norm,
        WIDE,
    ),
    # parameter.cuh
    Bug(
        "a row of the block is not summed",
        "for (int r = 1; r < ROWS; r++)",
        "for (int r = 2; r < ROWS; r++)",
        cases.row_norm,
        NARROW,
    ),
    Bug(
        "sums are read before every row has written its own",
        "all[j];\n          __syncthreads();",
        "all[j];",
        cases.row_norm,
        NARROW,
    ),
    Bug(
        "sums are overwritten before they are read",
        "          __syncthreads();\n        }\n        if (team.row == 0 && chunk < chunks)",
        "        }\n        if (team.row == 0 && chunk < chunks)",
        cases.row_norm,
        ("layer_norm", "bf16", 1024),
    ),
    Bug("the workspace is not cleared", "total[chunk * VEC + j] = 0.f;", ";", cases.row_norm, WIDE),
    Bug(
        "one number's sum lacks a row",
        "for (int r = 0; r < ROWS; r++) all",
        "for (int r = 1; r < ROWS; r++) all",
        cases.row_norm,
        ("scale_norm", "f32", 100),
    ),
    Bug("one block's sum lands on another's", "totals + (i64)blockIdx.x * width", "totals", cases.row_norm, NARROW),
    # rows.cuh
    Bug(
        "a loop that stops short",
        "      if (lane + i * LANES < chunks) work",
        "      if (lane + i * LANES < chunks - 1) work",
        cases.row_norm,
        NARROW,
    ),
    Bug(
        "a store past the row",
        "      if (lane + i * LANES < chunks) work",
        "      if (lane + i * LANES <= chunks && chunks) work",
        cases.row_norm,
        ("rms_norm", "f32", 100),
        True,
    ),
    Bug(
        "the mean's share has the wrong sign",
        "-fmaf(pull, hat, share)",
        "-fmaf(pull, hat, -share)",
        cases.row_norm,
        NARROW,
    ),
    Bug(
        "the statistics are the next row's",
        "a.stats[Norm::STATS * (row + 1) - 1] = found.scale",
        "a.stats[Norm::STATS * (row + 0)] = found.scale",
        cases.row_norm,
        ("layer_norm", "f32", 32),
    ),
    Bug(
        "the bias is left out",
        "found.scale, bias.v[j]);",
        "found.scale, 0.f * bias.v[j]);",
        cases.row_norm,
        ("layer_norm", "f32", 32),
    ),
    Bug(
        "x⁺ is read before it is rounded",
        "if (HELD > 0) line.kept[i] = stored;",
        "if (HELD > 0) line.kept[i] = Pack<K_X, VEC>(stored), line.kept[i].words[0] ^= 1u << 18;",
        cases.residual,
        ("layer_norm", ("bf16", "bf16"), 64),
    ),
    Bug(
        "dropout forgets its scale",
        "f.v[j] *= beta.v[j] * a.dropout.scale;",
        "f.v[j] *= beta.v[j];",
        cases.residual,
        STEP,
    ),
    Bug(
        "α's gradient takes dx",
        "d.v[j] *= total.v[j];\n        dalpha",
        "d.v[j] *= dx.v[j];\n        dalpha",
        cases.residual,
        STEP,
    ),
    Bug(
        "β's gradient is not dropped",
        "        mask.apply(row, chunk, d.v);\n        dbeta",
        "        dbeta",
        cases.residual,
        STEP,
    ),
    Bug(
        "df is not dropped",
        "        mask.apply(row, chunk, d.v);\n        store",
        "        store",
        cases.residual,
        STEP,
    ),
    Bug("dx⁺ is left out", "total.v[j] += d.v[j];", "total.v[j] += 0.f * d.v[j];", cases.residual, STEP),
    Bug(
        "huge rows are measured like others",
        "if (!(squares >= 0x1p-100f && squares < 0x1p127f)) {",
        "if (false) {",
        cases.extreme_rows,
        ("layer_norm",),
    ),
    # philox.cuh
    Bug("nine rounds", "round < 10", "round < 9", cases.residual, STEP),
    Bug(
        "the mask is the block's first half twice",
        "const int first = chunk * N % 8;",
        "const int first = 0;",
        cases.residual,
        ("rms_norm", ("f32", "f32"), 64, 0.3),
    ),
    Bug("the micro-batch is forgotten", " | (u32)d.seed[2] << 16", "", cases.residual, STEP),
    # sums.cu
    Bug(
        "a warp's blocks are not added",
        "for (int w = 1; w < 8; w++)",
        "for (int w = 1; w < 7; w++)",
        cases.row_norm,
        ("layer_norm", "f32", 32, 300),
    ),
    Bug(
        "sums are added before they are there",
        "  parts[threadIdx.x] = sum;\n  __syncthreads();",
        "  parts[threadIdx.x] = sum;",
        cases.row_norm,
        ("layer_norm", "f32", 32, 300),
    ),
    Bug(
        "the last column goes to another output",
        "if (column >= a.outputs[k].first)",
        "if (column > a.outputs[k].first)",
        cases.row_norm,
        ("layer_norm", "f32", 32),
    ),
    Bug(
        "a store past the last column",
        "if (warp > 0 || column >= a.columns) return;",
        "if (warp > 0 || column > a.columns) return;",
        cases.row_norm,
        ("rms_norm", "f32", 100),
        True,
    ),
    # relu_dropout.cu
    Bug("a chunk too many", "at < a.count;", "at <= a.count;", cases.relu_dropout, ("f32", 64, 0.3), True),
    Bug(
        "the slope at dropped elements",
        "v.v[j] == 0.f ? 0.f :",
        "v.v[j] < 0.f ? 0.f :",
        cases.relu_dropout,
        ("f32", 64, 0.3),
    ),
    Bug(
        "the mask of another row",
        "mask.apply(row, (int)",
        "mask.apply(row + 1, (int)",
        cases.relu_dropout,
        ("f32", 64, 0.3),
    ),
    Bug(
        "a loop that takes one chunk a thread too few",
        "at < a.count;",
        "at < a.count - 1;",
        cases.relu_dropout,
        ("bf16", 64, 0.0),
    ),
    Bug(
        "a NaN becomes 0", "(v.v[j] <= 0.f ? 0.f : v.v[j])", "fmaxf(v.v[j], 0.f)", cases.relu_dropout, ("f32", 64, 0.0)
    ),
    # cross_entropy.cu
    Bug(
        "old exponentials keep the old unit",
        "sums[0] *= expf(most[0] - z.v[j]);",
        "",
        cases.cross_entropy,
        ("f32", 1200, False),
    ),
    Bug(
        "threads' sums keep their own units",
        "sums[0] *= own == most[0] ? 1.f : expf(own - most[0]);",
        "",
        cases.cross_entropy,
        ("f32", 100, False),
    ),
    Bug(
        "columns outside the vocabulary get a gradient",
        "inside(a.mask, column) ? dz : 0.f",
        "dz",
        cases.cross_entropy,
        ("f32", 100, True),
    ),
    Bug(
        "the target is pushed the wrong way",
        "-uniform) - (column",
        "-uniform) + (column",
        cases.cross_entropy,
        ("bf16", 96, True),
    ),
    Bug(
        "the vocabulary is counted with its mask off",
        "size[0] += 1.f;",
        "size[0] += 2.f;",
        cases.cross_entropy,
        ("f32", 100, True),
    ),
    Bug(
        "a loop over the row that stops short",
        "chunk < a.chunks; chunk += LANES) {\n    const Values z",
        "chunk < a.chunks - 1; chunk += LANES) {\n    const Values z",
        cases.cross_entropy,
        ("f32", 100, False),
    ),
    Bug(
        "an ignored row counts",
        "const bool ignored = target == a.ignore_index;",
        "const bool ignored = false;",
        cases.cross_entropy,
        ("f32", 100, False),
    ),
    Bug(
        "a gradient past the row",
        "chunk < a.chunks; chunk += LANES) {\n    Values z",
        "chunk <= a.chunks; chunk += LANES) {\n    Values z",
        cases.cross_entropy,
        ("f32", 100, False),
        True,
    ),
    # adam.cu
    Bug("the step goes uphill", "keep, p.v[j], -(step", "keep, p.v[j], (step", cases.adam, (40,)),
    Bug("gradients are kept", "g.v[j] = 0.f;", ";", cases.adam, (40,)),
    Bug("a scale that is NaN is used", "if (finite) {", "if (true) {", cases.adam, (40,)),
    Bug("the last chunk is left out", "at < a.count;", "at < a.count - 1;", cases.adam, (40,)),
    Bug("a chunk past the buffers", "at < a.count;", "at <= a.count;", cases.adam, (40,), True),
    # the norms
    Bug(
        "LayerNorm's pull is not shared out",
        "return scale / cols * sum_gx;",
        "return scale * sum_gx;",
        cases.row_norm,
        ("layer_norm", "f32", 32),
    ),
    Bug(
        "RMSNorm forgets ε",
        "hypotf(x.unit * (x.root / sqrtf(cols)), sqrtf(eps))",
        "(x.unit * (x.root / sqrtf(cols)))",
        cases.extreme_rows,
        ("rms_norm",),
    ),
    Bug("ScaleNorm's clamp pulls", "scale >= 1.f / eps ? 0.f : scale * sum_gx", "scale * sum_gx", cases.clamped, ()),
    Bug("ScaleNorm pushes", "0.f : scale * sum_gx", "0.f : -scale * sum_gx", cases.row_norm, ("scale_norm", "f32", 32)),
]
