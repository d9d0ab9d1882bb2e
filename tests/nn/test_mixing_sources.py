"""Hyper-connections and attention over depth against the classes that define them, from the same weights, in f64."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from nn_support import FF, HEADS, D, shake
from torch import nn
from torch.nn import functional

from normformer_rs import nn as nfnn

N, RANK, LAYERS = 3, 5, 4
EXACT = {"rtol": 1e-9, "atol": 1e-9}
CONFIG = SimpleNamespace(
    hidden_size=D, rms_norm_eps=1e-6, initializer_range=0.02,
    hc_mult=N, hc_count=N, hc_eps=1e-6, hc_sinkhorn_iters=5, hc_magnitude=1.5, hc_lowrank=RANK,
)  # fmt: skip


@pytest.fixture
def in_f64(monkeypatch):
    """The classes compute in f32 wherever they are; here in the type of their inputs."""
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *a, **k: self if a == (torch.float32,) else to(self, *a, **k))


def classes(name):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def encoder_of(residual, **options):
    layer = nfnn.TransformerEncoderLayer(
        D, HEADS, FF, 0.0, batch_first=True, residual=residual, encoder_layers=LAYERS, dtype=torch.float64, **options
    )
    return nfnn.TransformerEncoder(layer, LAYERS)


def sublayers(encoder):
    """(layer, number in it, N then F) of each sublayer."""
    for layer in encoder.layers:
        attention = layer.self_attn
        yield layer, 1, lambda y, attention=attention: attention(y, y, y, need_weights=False)[0]
        yield layer, 2, lambda y, layer=layer: layer.linear2(functional.relu(layer.linear1(y)))


def normed(owner, name, y):
    return getattr(owner, name)(y) if hasattr(owner, name) else y


def put(module, **weights):
    """Puts these tensors in the place of a module's parameters of these names, so that gradients reach them."""
    for name, weight in weights.items():
        owner, _, last = name.replace("__", ".").rpartition(".")
        owner = module.get_submodule(owner)
        assert getattr(owner, last).shape == weight.shape
        del owner._parameters[last]
        setattr(owner, last, weight)
    assert {*module.parameters()} <= {*weights.values()}
    return module


def compare(encoder, run):
    """Outputs, and the gradients of x and of every parameter, of the stack and of `run`."""
    shake(encoder)
    found = []
    for forward in (encoder, run):
        x = torch.randn(2, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        weights = dict(encoder.named_parameters())
        y = forward(x)
        grads = torch.autograd.grad((y * torch.arange(1.0, D + 1)).sin().sum(), [x, *weights.values()])
        found.append({"y": y.detach(), **dict(zip(["x", *weights], grads))})
    for name, value in found[0].items():
        assert value.abs().max() > 0, name
        torch.testing.assert_close(value, found[1][name], **EXACT, msg=lambda m, n=name: f"{n}: {m}")


def glm(owner, i):
    module = classes("glm5_next").Glm5NextTextHyperConnection(CONFIG)
    weight, scale, bias = (getattr(owner, f"hyper_{part}{i}") for part in ("weight", "scale", "bias"))
    return put(module, fn=weight, scale=scale, base=bias)


def test_the_mean_of_glm(in_f64):
    encoder = encoder_of("mhc", mhc_streams=N, mhc_iterations=5, mhc_end="mean")

    def run(x):
        streams = x.unsqueeze(2).repeat(1, 1, N, 1)
        for layer, i, f in sublayers(encoder):
            post, comb, y = glm(layer, i)(streams)
            y = f(normed(layer, f"norm{i}", y))
            streams = post.unsqueeze(-1) * y.unsqueeze(-2) + comb.transpose(-1, -2) @ streams
        return encoder.norm(classes("glm5_next").Glm5NextTextHyperHead()(streams))

    compare(encoder, run)


def test_the_streams_of_hunyuan(in_f64):
    encoder, hunyuan = encoder_of("mhc", mhc_streams=N, mhc_mixing="none", mhc_magnitude=1.5), classes("hy_v4")

    def run(x):
        streams = x.unsqueeze(2).repeat(1, 1, N, 1)
        for layer, i, f in sublayers(encoder):
            weight, scale, bias = (getattr(layer, f"hyper_{part}{i}") for part in ("weight", "scale", "bias"))
            post, y = put(hunyuan.HYV4HyperConnection(CONFIG), fn=weight, scale=scale, base=bias)(streams)
            streams = post.unsqueeze(-1) * f(normed(layer, f"norm{i}", y)).unsqueeze(-2) + streams
        weights = encoder.end_hyper_weight, encoder.end_hyper_scale, encoder.end_hyper_bias
        head = put(hunyuan.HYV4HyperHead(CONFIG), **dict(zip(("hc_fn", "hc_scale", "hc_base"), weights)))
        return encoder.norm(head(streams))

    compare(encoder, run)


def qwen(owner, stem, i=""):
    parts = {"hc_norm__weight": "gain", "input_mix_weight_down__weight": "down", "input_mix_weight_up__weight": "up"}
    parts |= {} if stem.startswith("end") else {"block_inject_weight__weight": "weight"}
    module = classes("qwen4_exp").Qwen4ExpTextGatedResidual(CONFIG, use_combine=not stem.startswith("end"))
    weights = {name: getattr(owner, f"{stem}_{part}{i}") for name, part in parts.items()}
    weights["hc_norm__weight"] = weights["hc_norm__weight"] - 1.0  # the class multiplies by 1 + its weight
    return put(module, **weights)


def test_the_channels_of_qwen(in_f64):
    encoder = encoder_of("mhc", mhc_streams=N, mhc_mixing="channel", mhc_rank=RANK)
    assert encoder.norm is None and not hasattr(encoder.layers[0], "norm1")

    def run(x):
        streams = x.repeat(1, 1, N)
        for layer, i, f in sublayers(encoder):
            y, before, gates = qwen(layer, "hyper", i)(streams)
            streams = before + (f(y).unsqueeze(-2) * gates.unsqueeze(-1)).flatten(-2)
        return qwen(encoder, "end_hyper")(streams)

    compare(encoder, run)


@pytest.mark.parametrize("block", [1, 4])
def test_the_normed_outputs_of_inkling(in_f64, block):
    encoder, inkling = encoder_of("attnres", attnres_form="normed", attnres_block=block), classes("inkling2")

    def run(x):
        blocks, newest = [], x
        for number, (layer, i, f) in enumerate(sublayers(encoder)):
            y = x
            if number > 0:
                attend = put(inkling.Inkling2BlockAttentionResidual(CONFIG), query=getattr(layer, f"depth_query{i}"))
                y = attend(torch.stack(blocks, -2) if blocks else x.unsqueeze(-2)[..., :0, :], newest)[0]
            y = f(normed(layer, f"norm{i}", y))
            if number % block == 0:
                blocks, newest = [*blocks, newest], y
            else:
                newest = newest + y
        attend = put(inkling.Inkling2BlockAttentionResidual(CONFIG), query=encoder.end_depth_query)
        return encoder.norm(attend(torch.stack(blocks, -2), newest)[0])

    compare(encoder, run)


def test_the_three_queries_of_inkling(in_f64):
    """Its full-attention layers: q, k and v each read by a query of their own, and have norms of their own."""
    encoder = encoder_of("attnres", attnres_form="normed", attnres_queries=3, norm="rmsnorm", layer_norm_eps=1e-6)
    inkling = classes("inkling2")

    def run(x):
        blocks, newest = [], x
        for number, (layer, i, f) in enumerate(sublayers(encoder)):
            reads = [x] * 3
            if number > 0:
                query = getattr(layer, f"depth_query{i}")
                attend = put(inkling.Inkling2BlockAttentionResidual(CONFIG, 1 if i == 2 else 3), query=query)
                reads = attend(torch.stack(blocks, -2), newest)
            if i == 2:
                y = f(normed(layer, "norm2", reads[0]))
            else:
                attention, inputs = layer.self_attn, []
                for name, read in zip("qkv", reads):
                    own = inkling.Inkling2RMSNorm(D, 1e-6)
                    inputs.append(put(own, weight=getattr(attention, f"{name}_input_norm").weight)(read))
                weights = attention.in_proj_weight, attention.in_proj_bias, None, None, False, 0.0
                out = attention.out_proj
                given = (t.transpose(0, 1) for t in inputs)
                y = functional.multi_head_attention_forward(*given, D, HEADS, *weights, out.weight, out.bias)[0]
                y = y.transpose(0, 1)
            blocks, newest = [*blocks, newest], y
        attend = put(inkling.Inkling2BlockAttentionResidual(CONFIG), query=encoder.end_depth_query)
        return encoder.norm(attend(torch.stack(blocks, -2), newest)[0])

    compare(encoder, run)


@pytest.mark.parametrize("is_dynamic", [True, False])
def test_algorithm_2_of_hyper_connections(is_dynamic):
    """Zhu et al. 2024: width connection, sublayer, depth connection; the streams' sum at the end."""
    encoder = encoder_of("hyper-connections", hyper_connections_streams=N, hyper_connections_dynamic=is_dynamic)

    def run(x):
        streams = torch.stack([x] * N, -2)
        for layer, i, f in sublayers(encoder):
            static = getattr(layer, f"hyper_bias{i}").view(N, N + 2)
            alpha, beta = static[:, :-1], static[:, -1]
            if is_dynamic:
                weight, scale = getattr(layer, f"hyper_weight{i}"), getattr(layer, f"hyper_scale{i}")
                affine = getattr(layer, f"hyper_norm_weight{i}"), getattr(layer, f"hyper_norm_bias{i}")
                h = functional.layer_norm(streams, (D,), *affine)
                alpha = (h @ weight[:-1].T).tanh() * scale[0] + alpha
                beta = (h @ weight[-1]).tanh() * scale[1] + beta
            mixed = alpha.transpose(-1, -2) @ streams
            y = f(normed(layer, f"norm{i}", mixed[..., 0, :]))
            streams = torch.einsum("...d,...n->...nd", y, beta.expand(*y.shape[:-1], N)) + mixed[..., 1:, :]
        return encoder.norm(streams.sum(-2))

    compare(encoder, run)


def test_hyper_connections_start_as_prenorm():
    """alpha = (e_{l mod n}, I) and beta = 1 in sublayer l, W = 0: every stream is prenorm's x, and their sum n of
    it."""
    encoder, prenorm = encoder_of("hyper-connections", hyper_connections_streams=N), encoder_of("prenorm")
    for number, (layer, i, _) in enumerate(sublayers(encoder)):
        static = getattr(layer, f"hyper_bias{i}").view(N, N + 2)
        assert torch.equal(static[:, 0], torch.eye(N, dtype=torch.float64)[number % N])
        assert torch.equal(static[:, 1:-1], torch.eye(N, dtype=torch.float64)) and (static[:, -1] == 1).all()
        assert not getattr(layer, f"hyper_weight{i}").any()
        assert getattr(layer, f"hyper_scale{i}").tolist() == pytest.approx([0.01] * 2)
        assert (getattr(layer, f"hyper_norm_weight{i}") == 1).all() and not getattr(layer, f"hyper_norm_bias{i}").any()
    prenorm.load_state_dict({k: v for k, v in encoder.state_dict().items() if "hyper" not in k})
    encoder.norm, prenorm.norm = nn.Identity(), nn.Identity()
    x = torch.randn(2, 5, D, dtype=torch.float64)
    torch.testing.assert_close(encoder(x), N * prenorm(x), **EXACT)


def test_hunyuans_and_qwens_first_values():
    """Their `_init_weights`: p = 1/n, g = c/2, scales 0.01; matrices of N(0, 0.02²)."""
    hunyuan = classes("hy_v4")
    model = hunyuan.HYV4PreTrainedModel(hunyuan.HYV4Config(initializer_range=0.02))
    theirs, head = hunyuan.HYV4HyperConnection(CONFIG), hunyuan.HYV4HyperHead(CONFIG)
    for module in (theirs, head):
        model._init_weights(module)
    encoder = encoder_of("mhc", mhc_streams=N, mhc_mixing="none")
    layer = encoder.layers[1]
    for name, ours, expected in [
        ("bias", layer.hyper_bias2, theirs.base), ("scale", layer.hyper_scale2, theirs.scale),
        ("end bias", encoder.end_hyper_bias, head.hc_base), ("end scale", encoder.end_hyper_scale, head.hc_scale),
    ]:  # fmt: skip
        torch.testing.assert_close(ours.detach(), expected.detach().double(), rtol=1e-6, atol=0, msg=name)
    drawn = [layer.hyper_weight2, encoder.end_hyper_weight]
    encoder = encoder_of("mhc", mhc_streams=N, mhc_mixing="channel")
    layer = encoder.layers[1]
    assert layer.hyper_down1.shape == (320, N * D) and (layer.hyper_gain1 == 1).all()
    drawn += [layer.hyper_down1, layer.hyper_up2, layer.hyper_weight2, encoder.end_hyper_down, encoder.end_hyper_up]
    for weight in drawn:  # a sample's standard deviation of n numbers is within 5/√(2n) of the true one
        assert abs(weight.std().item() / 0.02 - 1) < 5 / (2 * weight.numel()) ** 0.5
