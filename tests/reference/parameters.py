"""The names, shapes and initial values of a model's parameters and buffers. They have the names of torch.nn.Transformer
if it has such parameters."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .batch_norms import BATCH_NORMS, BLENDED_NORMS
from .config import Config, complete, is_gated, kv_width, stacks
from .norms import FAMILIES, rms_conventions
from .residual import Growth, Norm, Parameter, Place, describe_stack, describe_sublayer, own_parts, places

State = Mapping[str, Tensor]
GAINS = (".weight", ".share", ".row_weight")


def parameters(config: Config) -> dict[str, Parameter]:
    """Returns the declaration of every parameter, by name."""
    return {parameter.name: parameter for parameter in _parameters(complete(config))}


def buffers(config: Config) -> dict[str, Parameter]:
    """Returns the declaration of every buffer, by name: running statistics, and t of BranchNorm, ProRes and PRepBN."""
    return {buffer.name: buffer for buffer in _buffers(complete(config))}


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter, by name."""
    return {name: parameter.shape for name, parameter in parameters(config).items()}


def buffer_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every buffer, by name."""
    return {name: buffer.shape for name, buffer in buffers(config).items()}


def fresh_buffers(config: Config, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Returns every buffer with its value before training. A buffer whose initial value is an int is a counter, and is
    int64."""
    return {
        name: torch.full(buffer.shape, buffer.start, dtype=torch.int64 if isinstance(buffer.start, int) else dtype)
        for name, buffer in buffers(config).items()
    }


def random_state(config: Config, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Returns random parameters and buffers for comparisons. Weights have std 1/√fan_in; all else is near its initial
    value, but not constant.

    BranchNorm's t is at a quarter of its growth, ProRes' t is where the first layer has grown fully. PowerNorm's iters
    is 0, and running squares are positive.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    state = {}
    for name, parameter in parameters(config).items():
        if parameter.start is None:
            value = noise(parameter.shape) * parameter.shape[-1] ** -0.5
        else:
            start = torch.as_tensor(parameter.start, dtype=torch.float64)
            value = start + 0.1 * start.abs().clamp(min=1) * noise(parameter.shape)
        state[name] = value.to(dtype)
    for name, value in fresh_buffers(config, dtype).items():
        if value.is_floating_point():
            value = value + 0.1 * noise(value.shape).to(dtype)
        elif name.endswith(".t"):
            c = complete(config)
            value = value * (c["prores_steps"] if "prores" in c["residual"] else c["branchnorm_steps"] // 4)
        state[name] = value
    return state


def norm_parameters(kind: str, norm: Norm, config: Config) -> list[Parameter]:
    """Returns a norm's parameters and their initial values: γ = 1 and β = 0 (width,), or g (1,), which is √d, or
    d^{1/p} for lpnorm; α = 1/2 for dyt and derf, s = 0 for derf."""
    weight, bias = f"{norm.name}.weight", f"{norm.name}.bias"
    if kind == "rmsnorm" or kind in FAMILIES:
        how = rms_conventions(kind, config)
        start = norm.start - how["zero_centred"]
        return [Parameter(weight, (norm.width,), start)] if how["weight"] and norm.is_weighted else []
    if kind == "gated-rmsnorm":
        d, r = norm.width, config["gated_rmsnorm_rank"]
        matrices = [Parameter(f"{norm.name}.gate_down", (r, d)), Parameter(f"{norm.name}.gate_up", (d, r))]
        return [Parameter(weight, (d,), norm.start), *matrices]
    if kind in ("dyt", "derf"):
        inside = [Parameter(f"{norm.name}.alpha", (1,), 0.5), Parameter(f"{norm.name}.s", (1,), 0.0)]
        affine = [Parameter(weight, (norm.width,), 1.0), Parameter(bias, (norm.width,), 0.0)]
        return inside[: 1 if kind == "dyt" else 2] + affine
    if kind in ("layernorm", *BATCH_NORMS):
        return [Parameter(weight, (norm.width,), 1.0), Parameter(bias, (norm.width,), 0.0)]
    if kind in BLENDED_NORMS:
        first, rows = float(config["repbn_start"] == "ones"), f"{norm.name}.row"
        repbn = [Parameter(weight, (norm.width,), first), Parameter(bias, (norm.width,), 0.0)]
        repbn += [Parameter(f"{norm.name}.share", (1,), first)]
        of_rows = [Parameter(f"{rows}_weight", (norm.width,), 1.0), Parameter(f"{rows}_bias", (norm.width,), 0.0)]
        kept = {"repbn": 0, "prepbn": 1 if config["prepbn_row"] == "rmsnorm" else 2}[kind]
        return repbn + of_rows[:kept]
    if kind == "lpnorm":
        return [Parameter(weight, (1,), norm.width ** (1 / config["lpnorm_p"]))]
    if kind == "scalenorm" or (kind == "scalenorm-fixed" and norm.is_last_of_decoder):
        return [Parameter(weight, (1,), norm.width**0.5)]
    return []


def norm_buffers(kind: str, norm: Norm) -> list[Parameter]:
    """Returns a norm's buffers: its running statistics, and t."""

    def buffer(name: str, shape: tuple[int, ...], start: float) -> Parameter:
        return Parameter(f"{norm.name}.{name}", shape, start)

    column = (1, norm.width, 1, 1)
    moments = [buffer("running_mean", (norm.width,), 0.0), buffer("running_var", (norm.width,), 1.0)]
    return {
        "batchnorm": moments,
        "repbn": moments,
        "prepbn": [*moments, buffer("t", (1,), 1)],
        "powernorm-v": [buffer("running_phi", (norm.width,), 1.0)],
        "powernorm": [buffer("running_phi", column, 1.0), buffer("ema_gz", column, 0.0), buffer("iters", (1,), 0)],
    }.get(kind, [])


def _parameters(c: Config) -> Iterator[Parameter]:
    d, vocab = c["d_model"], c["vocab_size"]
    if c["tie_embeddings"] == "all":
        yield Parameter("embedding.weight", (vocab, d))
    else:
        if c["architecture"] == "encoder-decoder":
            yield Parameter("source_embedding.weight", (vocab, d))
        yield Parameter("target_embedding.weight", (vocab, d))
    if c["positions"] == "learned":
        for side in ("source", "target") if c["architecture"] == "encoder-decoder" else ("target",):
            yield Parameter(f"{side}_position_embedding.weight", (c["max_positions"], d))
    for stack in stacks(c):
        for place in places(c, stack):
            yield from _linears(place)
        for part in _parts(c, stack):
            if isinstance(part, Norm):
                kind = c[f"{stack}_norm"]
                for parameter in norm_parameters(kind, part, c):
                    is_gain = parameter.name.endswith(GAINS) and not kind.startswith("rmsnorm")
                    start = parameter.start * part.start if is_gain else parameter.start
                    yield dataclasses.replace(parameter, start=start)
            elif isinstance(part, Parameter):
                yield part
    if c["smear"]:
        yield Parameter("decoder.smear_gate.weight", (1, min(24, d)))
        yield Parameter("decoder.smear_scale", (1,), 0.0)
    if c["tie_embeddings"] == "none":
        yield Parameter("output_projection.weight", (vocab, d))
    if c["output_bias"]:
        yield Parameter("output_projection.bias", (vocab,), 0.0)
    if c["logit_scale"]:
        yield Parameter("output_projection.scale", (vocab,), d**-0.5)


def _buffers(c: Config) -> Iterator[Parameter]:
    for stack in stacks(c):
        for part in _parts(c, stack):
            if isinstance(part, Norm):
                yield from norm_buffers(c[f"{stack}_norm"], part)
            elif isinstance(part, Growth):
                yield part.t


def _parts(c: Config, stack: str) -> Iterator[Any]:
    """Yields the parts that the scheme has in a stack: norms, parameters and growths. Of changes such as Shift and
    Scale it yields the parameter."""
    for place in places(c, stack):
        for part in describe_sublayer(place).parts():
            yield from own_parts(part)
    for part in describe_stack(c, stack).parts():
        yield from own_parts(part)


def _linears(place: Place) -> Iterator[Parameter]:
    d, d_ff = place.config["d_model"], place.config["d_ff"]
    if place.kind == "self_attn" and place.config["attention"] == "tensorized":
        yield from _tensorized(f"{place.prefix}.self_attn", place.config)
        return
    if place.kind == "feed_forward":
        linears = {"linear1.weight": (d_ff, d), "linear2.weight": (d, d_ff)}
        biases = {"linear1.bias": (d_ff,), "linear2.bias": (d,)}
        if is_gated(place.config):
            linears, biases = linears | {"linear3.weight": (d_ff, d)}, biases | {"linear3.bias": (d_ff,)}
    else:
        rows = d + 2 * kv_width(place.config)
        linears = {f"{place.kind}.in_proj_weight": (rows, d), f"{place.kind}.out_proj.weight": (d, d)}
        biases = {f"{place.kind}.in_proj_bias": (rows,), f"{place.kind}.out_proj.bias": (d,)}
        if place.config["output_gate"] is not None:
            gates = d if place.config["output_gate"] == "element" else place.config["heads"]
            linears |= {f"{place.kind}.gate_proj.weight": (gates, d)}
            biases |= {f"{place.kind}.gate_proj.bias": (gates,)}
    if place.kind != "feed_forward" and place.config["sinks"]:
        yield Parameter(f"{place.prefix}.{place.kind}.sinks", (place.config["heads"],))
    for name, shape in linears.items():
        yield Parameter(f"{place.prefix}.{name}", shape)
    if place.kind == "self_attn" and has_value_embedding(place.config, place.layer):
        c, at = place.config, f"{place.prefix}.self_attn"
        yield Parameter(f"{at}.value_embedding.weight", (c["vocab_size"], kv_width(c)))
        yield Parameter(f"{at}.value_gate.weight", (c["kv_heads"], min(12, d)))
    if describe_sublayer(place).has_biases and place.config["linear_biases"]:
        for name, shape in biases.items():
            yield Parameter(f"{place.prefix}.{name}", shape, 0.0)


def has_value_embedding(c: Config, layer: int) -> bool:
    """Returns True if the layer, counted from 0, has a value embedding. The last layer has one, and every second layer
    before it."""
    return c["value_embeddings"] and (c["decoder_layers"] - layer) % 2 == 1


def _tensorized(name: str, c: Config) -> Iterator[Parameter]:
    d, rank = c["d_model"], c["tensorized_rank"]
    yield Parameter(f"{name}.in_proj_weight", (3 * rank, d))
    yield Parameter(f"{name}.position_proj.weight", (rank, d))
    yield Parameter(f"{name}.core", (rank,), 1 / rank)
    yield Parameter(f"{name}.content_bias", (rank,), 0.0)
    yield Parameter(f"{name}.position_bias", (rank,), 0.0)
    yield Parameter(f"{name}.out_proj.weight", (d, c["tensorized_segment"] ** 2))
