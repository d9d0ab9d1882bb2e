"""Schemes that read x from several tensors: published vectors, first values, and what a layer does alone."""

import re
from unittest import mock

import pytest
import torch
from nn_support import FF, HEADS, MIXED, SHAPE, SOURCES, TARGETS, D
from torch import nn

import normformer_rs as nfrs
import reference as ref
from normformer_rs import nn as nfnn
from normformer_rs.nn import formulas
from normformer_rs.schemes import (
    Channel,
    Dynamic,
    Each,
    HyperConnection,
    Joint,
    Learned,
    Normal,
    Permuted,
    ResidualSpec,
    StackSpec,
    norm,
)

X0, X, F = [0.2, 0.1, -0.3, 0.4], [1.0, -2.0, 3.0, 0.5], [0.5, 0.5, -1.0, 2.0]


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def stack_of(residual, outputs, **options):
    """A one-layer encoder of width 4 without its last norm. Its sublayers give these outputs, whatever they read."""
    layer = nfnn.TransformerEncoderLayer(
        4, 1, 8, 0.0, residual=residual, encoder_layers=1, dtype=torch.float64, **options
    )
    encoder = nfnn.TransformerEncoder(layer, 1)
    encoder.norm = nn.Identity()
    with torch.no_grad():
        for linear, output in zip((encoder.layers[0].self_attn.out_proj, encoder.layers[0].linear2), outputs):
            linear.weight.zero_()
            linear.bias.copy_(numbers(*output))
    return encoder


def close(found, *values):
    torch.testing.assert_close(found, numbers(*values), rtol=0, atol=1e-8)


def test_denseformers_weights():
    encoder = stack_of("denseformer", ([x - x0 for x, x0 in zip(X, X0)], [0.0] * 4))
    with torch.no_grad():
        close(encoder(numbers(X0))[0], *X)
        encoder.combine.weight[1] = numbers(0.25, 0.75)
        close(encoder(numbers(X0))[0], 0.8, -1.475, 2.175, 0.475)


def test_attention_over_depth():
    encoder = stack_of("attnres", (X, F))
    assert not encoder.end_depth_query.any() and (encoder.end_depth_gain == 1).all()
    with torch.no_grad():
        close(encoder(numbers(X0))[0], *(sum(v) / 3 for v in zip(X0, X, F)))
        encoder.end_depth_query.copy_(numbers(0.5, -0.25, 0.1, 0.0))
        expected = 0.65318207, -0.80017767, 1.09715588, 0.83747047
        close(encoder(numbers(X0))[0], *expected)
        outputs = [numbers(*v) for v in (X0, X, F)]
        close(formulas.depth_attention(outputs, encoder.end_depth_query, torch.ones(4)), *expected)
        shares = formulas.depth_attention(list(torch.eye(3, 4).double() * 1e4), numbers(*[0.0] * 4), torch.ones(4))
        close(shares / 1e4, *[1 / 3] * 3, 0.0)


def test_attention_over_blocks():
    """The embedding, and one sum of both outputs."""
    encoder = stack_of("attnres", (X, F), attnres_block=2)
    with torch.no_grad():
        close(encoder(numbers(X0))[0], *(sum(v) / 2 for v in zip(X0, X, F)))


@pytest.mark.parametrize("is_added", [True, False])
def test_streams_are_not_rounded_under_autocast(is_added):
    """A product of matrices would be, where the formula runs: under vmap, in exported programs, on CUDA."""
    streams, weights = torch.randn(3, 5, 4, 16), torch.randn(3, 5, 4, 4 + is_added)
    given = (streams, weights, torch.randn(3, 5, 16)) if is_added else (streams, weights)
    rows = torch.cat([streams, *(t.unsqueeze(-2) for t in given[2:])], -2)
    wanted = torch.einsum("...ij,...jd->...id", weights, rows)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [torch.vmap(torch.ops.normformer_rs.mix_streams)(*given)]
        with mock.patch("torch.compiler.is_exporting", return_value=True):
            found.append(formulas.mix_streams(*given))
    for y in found:
        torch.testing.assert_close(y, wanted, rtol=0, atol=1e-5)


def test_sinkhorn_as_deepseek_has_it():
    logits = numbers([1.0, 0.2], [-0.3, 0.5])
    close(formulas.sinkhorn(logits, 10), [0.68997341, 0.31002559], [0.31002559, 0.68997341])
    first = logits.softmax(-1) + 1e-6
    close(formulas.sinkhorn(logits, 1), *(first / (first.sum(0) + 1e-6)).tolist())


def test_streams_are_read_and_written():
    """With φ = 0, weights are those of the biases: H⁺_j = g_j f + Σ_i R_ij H_i, and R is not symmetric."""
    encoder = stack_of("mhc", (X, F), mhc_streams=3, mhc_iterations=2)
    layer, logits = encoder.layers[0], numbers([1.0, 0.2, -2.0], [-0.3, 0.5, 1.0], [0.7, -1.0, 0.1])
    gates, shares = ((0.3, -0.7, 1.0), (-1.0, 0.4, 0.0)), (2.0, -0.5, 0.1)
    with torch.no_grad():
        for i in (1, 2):
            bias = getattr(layer, f"hyper_bias{i}")
            bias[3:6] = numbers(*gates[i - 1])
            bias[6:] = logits.flatten()
        encoder.end_hyper_bias.copy_(numbers(*shares))
        r = logits.softmax(-1) + 1e-6
        for over in (0, 1, 0):
            r = r / (r.sum(over, keepdim=True) + 1e-6)
        streams = numbers(X0, X0, X0)
        for f, g in zip((X, F), gates):
            streams = r.T @ streams + 2 * numbers(*g).sigmoid()[:, None] * numbers(f)
        close(encoder(numbers(X0))[0], *((numbers(*shares).sigmoid() + 1e-6) @ streams).tolist())


def test_how_streams_start():
    layer = nfnn.TransformerEncoderLayer(D, HEADS, FF, residual="mhc", mhc_streams=3)
    encoder = nfnn.TransformerEncoder(layer, 2)
    for number, (block, i) in enumerate((block, i) for block in encoder.layers for i in (1, 2)):
        weight, scale, bias = (getattr(block, f"hyper_{part}{i}") for part in ("weight", "scale", "bias"))
        assert weight.shape == (15, 3 * D) and not weight.any()
        assert scale.tolist() == pytest.approx([0.01] * 3)
        near = [1.0 if stream == number % 3 else -1.0 for stream in range(3)]
        apart = [0.0 if i == j else -8.0 for i in range(3) for j in range(3)]
        assert bias.tolist() == [*near, *near, *apart]
    assert encoder.end_hyper_weight.shape == (3, 3 * D) and encoder.end_hyper_bias.tolist() == [0.0] * 3


@pytest.mark.parametrize("residual", MIXED)
def test_a_layer_alone_begins_and_ends_its_streams(residual):
    layer = nfnn.TransformerEncoderLayer(D, HEADS, FF, 0.0, batch_first=True, residual=residual, encoder_layers=1)
    x = torch.randn(2, 5, D)
    assert layer(x).shape == x.shape and layer(x[0]).shape == x[0].shape
    x.requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad.abs().sum() > 0


COUNTS = [{"mhc_streams": 0}, {"mhc_iterations": 0}, {"mhc_rank": 0}, {"attnres_block": 0}]
COUNTS += [{"hyper_connections_streams": 0}, {"mhc_lite_streams": 0}]


@pytest.mark.parametrize("options", COUNTS, ids=str)
def test_counts_begin_at_one(options):
    name = next(iter(options))
    residual = max((scheme for scheme in MIXED if name.startswith(scheme.replace("-", "_"))), key=len)
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        nfnn.TransformerEncoderLayer(D, HEADS, FF, residual=residual, **options)


@pytest.mark.parametrize(
    "residual,options,message",
    [
        (
            "mhc",
            {"mhc_mixing": "none", "mhc_iterations": 3},
            'mhc_iterations = 3 is an option of mhc_mixing = "sinkhorn"',
        ),
        ("mhc", {"mhc_rank": 3}, 'mhc_rank = 3 is an option of mhc_mixing = "channel", and here it is "sinkhorn"'),
        ("mhc", {"mhc_mixing": "chanel"}, "channel"),
        ("mhc", {"mhc_end": "sum"}, "gates"),
        ("mhc", {"mhc_magnitude": 0.0}, "mhc_magnitude must be above 0, got 0"),
        ("mhc-lite", {"mhc_lite_streams": 7}, "mhc_lite_streams must be at most 6, got 7"),
        ("keel", {"keel_alpha": -1.0}, "keel_alpha must be at least 0, got -1"),
        ("attnres", {"attnres_queries": 3}, 'attnres_queries = 3 is an option of attnres_form = "normed"'),
        ("attnres", {"attnres_queries": 2}, "attnres_queries must be 1 or 3, got 2"),
        (
            "prenorm",
            {"hyper_connections_streams": 3},
            "hyper_connections_streams = 3 is an option of hyper-connections",
        ),
    ],
)
def test_options_without_effect_are_refused_by_name(residual, options, message):
    with pytest.raises(nfrs.InputError, match=re.escape(message)):
        nfnn.TransformerEncoderLayer(D, HEADS, FF, residual=residual, encoder_layers=1, **options)


def test_tensorized_attention_reads_one_input():
    config = config_of(
        residual="attnres",
        attnres_form="normed",
        attnres_queries=3,
        architecture="decoder-only",
        attention="tensorized",
    )
    with pytest.raises(nfrs.InputError, match="tensorized attention reads one input"):
        nfrs.Transformer(config)


class Streams(nfrs.Scheme):
    """hyper-connections or one of mhc's forms, said as data; without a norm before F but in the first."""

    name = "streams"
    n, d, rank = 2, D, 3

    def __init__(self, form):
        self.form = form

    def around(self, place):
        has_norm = self.form != "channel"
        gates = self.gates(place, False)
        return ResidualSpec(before=norm() if has_norm else (), mixing=HyperConnection(self.n, gates))

    def stack(self, place):
        has_norm = self.form != "channel"
        return StackSpec(mixing=HyperConnection(self.n, self.gates(place, True)), end=norm() if has_norm else ())

    def gates(self, place, at_end):
        n, width, stem = self.n, self.n * self.d, "end_hyper" if at_end else "hyper"

        def drawn(part, *shape):
            return Learned(f"{stem}_{part}", Normal(0.02), shape)

        if self.form == "channel":
            write = None if at_end else drawn("weight", n, width)
            gain = Learned(f"{stem}_gain", 1.0, width)
            return Channel(gain, drawn("down", self.rank, width), drawn("up", width, self.rank), write)
        if self.form == "none":
            rows, scales = (n, 1) if at_end else (2 * n, 2)
            bias = Learned(f"{stem}_bias", 0.0, rows)
            return Joint(drawn("weight", rows, width), Learned(f"{stem}_scale", 0.01, scales), bias, 2.0, 0)
        if at_end:
            return 1.0
        if self.form == "permuted":
            rows = 2 * n + 2  # two streams have two permutations
            gate = [1.0 if i == place.number % n else -1.0 for i in range(n)]
            return Permuted(
                Learned("hyper_gain", 1.0, width), Learned("hyper_weight", 0.0, (rows, width)),
                Learned("hyper_scale", 0.01, 3), Learned("hyper_bias", [*gate, *gate, 0.0, -8.0], rows),
            )  # fmt: skip
        p = [float(i == place.number % n) for i in range(n)]
        rows = [number for i in range(n) for number in (p[i], *(float(i == j) for j in range(n)), 1.0)]
        dynamic = Dynamic(
            Learned("hyper_norm_weight", 1.0, self.d), Learned("hyper_norm_bias", 0.0, self.d),
            Learned("hyper_weight", 0.0, (n + 2, self.d)), Learned("hyper_scale", 0.01, 2),
        )  # fmt: skip
        return Each(Learned("hyper_bias", rows, n * (n + 2)), dynamic)


SAID = {
    "each": {"residual": "hyper-connections", "hyper_connections_streams": 2},
    "none": {"residual": "mhc", "mhc_mixing": "none", "mhc_streams": 2},
    "permuted": {"residual": "mhc-lite", "mhc_lite_streams": 2},
    "channel": {"residual": "mhc", "mhc_mixing": "channel", "mhc_rank": 3, "mhc_streams": 2},
}


def config_of(**options):
    return nfrs.TransformerConfig(**{**SHAPE, "dropout": 0.0, "init": "xavier", **options})


@pytest.mark.parametrize("form", SAID)
def test_said_as_data_it_is_the_tables(form):
    told = nfrs.Transformer(config_of(residual=Streams(form)), seed=3).double()
    named = nfrs.Transformer(config_of(**SAID[form]), seed=3).double()
    assert [*told.state_dict()] == [*named.state_dict()]
    for name, value in named.state_dict().items():
        assert torch.equal(value, told.state_dict()[name]), name
    source, target = ref.pad(SOURCES), ref.pad(TARGETS)
    assert torch.equal(told(source, target), named(source, target))


class Wrong(Streams):
    """One that cannot be built."""

    name = "wrong"

    def __init__(self, at, gates):
        self.form, self.at, self.wrong = "each", at, gates

    def gates(self, place, at_end):
        return self.wrong if at_end == (self.at == "end") else super().gates(place, at_end)


def a(*shape):
    return Learned("_".join(map(str, ("a", *shape))), 0.0, shape)


@pytest.mark.parametrize(
    "at,gates,message",
    [
        ("around", 1.0, "a sum of streams writes nothing, so only a stack can end with it"),
        ("end", Each(Learned("a", 0.0, 8)), "no stack can end with them"),
        ("around", Joint(a(8, 2 * D), a(2), a(8)), 'has "a_21" of shape [2], expected one of [[3]]'),
        ("around", Joint(a(8, 2 * D), a(3), a(8), 2.0, -1), "at least 0 iterations, got -1"),
        ("around", Channel(a(2 * D), a(3, 2 * D), a(2 * D, 3)), "need `write` around a sublayer"),
        ("around", Each(a(3)), "expected one of [[8]]"),
        ("around", Permuted(a(2 * D), a(5, 2 * D), a(3), a(6)), "expected one of [[6, 32]]"),
        ("end", Permuted(a(2 * D), a(6, 2 * D), a(3), a(6)), "no stack can end with them"),
    ],
)
def test_wrong_gates_are_refused(at, gates, message):
    with pytest.raises((nfrs.InputError, ValueError), match=re.escape(message)):
        nfrs.Transformer(config_of(residual=Wrong(at, gates)), seed=3)
