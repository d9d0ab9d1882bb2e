"""The one door to a tensor's memory: what has no numbers where they should lie is named, and nothing is read there."""

import json
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from operators_support import OF_X
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import normformer_rs as nfrs
from normformer_rs import _core
from normformer_rs.errors import InputError

OPS = torch.ops.normformer_rs
EPS = 1e-5
SEED = torch.tensor([3, 5, 7])
SMALL = {"vocab_size": 9, "d_model": 8, "d_ff": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
IDS = torch.tensor([[5, 6, 2], [4, 2, 1]])


def faked(t):
    return FakeTensorMode().from_tensor(t)


def freed(t):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def quantised(t):
    return torch.quantize_per_tensor(t.float(), 1.0, 0, torch.qint32)


HOLLOW = {
    "fake": (faked, "has no memory of its own"),
    "a wrapper": (lambda t: TwoTensor(t, t), "has no memory of its own"),
    "freed": (freed, "only 0 bytes of storage: its memory was freed"),
    "meta": (lambda t: t.to("meta"), "is on the meta device"),
    "nested": (lambda t: torch.nested.nested_tensor(list(t)), "is a nested tensor: call to_padded_tensor"),
    "sparse": (lambda t: t.to_sparse(), "has layout Sparse: call to_dense"),
    "quantised": (quantised, "is quantised: call dequantize"),
}


@pytest.fixture(params=HOLLOW)
def hollow(request):
    """(makes a tensor without numbers in memory, what a message says of it)."""
    return HOLLOW[request.param]


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage", "ignore:.*quantize_per_tensor")
class TestNoMemory:
    def test_a_file_of_arrays(self, hollow, tmp_path):
        make, message = hollow
        with pytest.raises(InputError, match=re.escape(message)):
            _core.write_arrays(str(tmp_path / "a"), {}, ["w"], [make(torch.ones(3, 4))])

    @pytest.mark.parametrize("side", ["source", "target_input"])
    def test_token_ids(self, hollow, side):
        make, message = hollow
        model = nfrs.Transformer(nfrs.TransformerConfig(**SMALL)).eval()
        ids = {"source": IDS, "target_input": IDS, side: make(IDS)}
        with pytest.raises(InputError, match=f"{side} .*{message}"):
            model(ids["source"], ids["target_input"])

    def test_parameters(self, hollow):
        """No signal: libtorch computes with what it knows of, and refuses the rest."""
        make, _ = hollow
        model = nfrs.Transformer(nfrs.TransformerConfig(**SMALL)).eval()
        state = {name: make(t.detach()) if t.dim() == 2 else t for name, t in model.state_dict().items()}
        try:
            _core.forward(model.config.to_json(), list(state), list(state.values()), IDS, IDS, None, "f32")
        except Exception as error:
            assert isinstance(error, (RuntimeError, TypeError, ValueError, AssertionError)), error

    def test_statistics(self, hollow):
        make, _ = hollow
        with pytest.raises((RuntimeError, InputError, TypeError, AssertionError)):
            _core.statistics(make(torch.ones(3, 4)), None, None, None, make(torch.ones(1, 4)), EPS, None)

    def test_a_seed_of_a_formula(self, hollow):
        make, _ = hollow
        x = torch.randn(4, 8)
        with pytest.raises((RuntimeError, TypeError, ValueError, AssertionError)):
            torch.func.grad(lambda x: OPS.relu_dropout(x, 0.5, make(SEED.view(3, 1))[:2], 0).sum())(x)


@pytest.mark.parametrize(
    "config",
    [{}, {"architecture": "decoder-only", "encoder_layers": 0}, {"norm": "powernorm", "residual": "deepnorm"}],
    ids=str,
)
@pytest.mark.parametrize("training", [False, True])
def test_a_model_in_fake_mode(config, training):
    """The Rust model reads token ids, and says that it cannot; with real ones libtorch meets the fake parameters."""
    model, mode = nfrs.Transformer(nfrs.TransformerConfig(**SMALL | config)).train(training), FakeTensorMode()
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            module._parameters[name] = mode.from_tensor(p)
    with mode:
        ids = mode.from_tensor(IDS)
        with pytest.raises(InputError, match="has no memory of its own, as in FakeTensorMode"):
            model(None if config.get("encoder_layers") == 0 else ids, ids)
    refused = pytest.raises((RuntimeError, ValueError, TypeError, AssertionError))
    with refused:
        model(None if config.get("encoder_layers") == 0 else IDS, IDS)
    for non_fake in (False, True):  # where new tensors have no memory either
        with refused, FakeTensorMode(allow_non_fake_inputs=non_fake):
            model(None if config.get("encoder_layers") == 0 else IDS, IDS)


def test_functional_tensors_have_the_numbers_of_what_they_wrap(tmp_path):
    def write(t):
        t = t.add_(1)
        _core.write_arrays(str(tmp_path / "a"), {}, ["w"], [t])
        return t * 1

    torch.func.functionalize(write)(torch.ones(3))
    assert safetensors.torch.load_file(tmp_path / "a" / "model.safetensors")["w"].tolist() == [2, 2, 2]


def negated(t):
    return torch._neg_view(-t)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
def test_a_negated_view_is_written_with_its_signs(dtype, tmp_path):
    t = torch.tensor([[1, -2], [3, 4]]).to(dtype)
    _core.write_arrays(str(tmp_path / "a"), {}, ["w", "v"], [negated(t), negated(t).t()])
    found = safetensors.torch.load_file(tmp_path / "a" / "model.safetensors")
    assert torch.equal(found["w"], t) and torch.equal(found["v"], t.t())


def test_a_model_of_negated_views():
    model = nfrs.Transformer(nfrs.TransformerConfig(**SMALL)).eval()
    state = model.state_dict()
    given = (model.config.to_json(), list(state))
    plain = _core.forward(*given, list(state.values()), IDS, IDS, None, "f32")
    turned = [negated(t) if t.is_floating_point() else t for t in state.values()]
    torch.testing.assert_close(_core.forward(*given, turned, negated(IDS), IDS, None, "f32"), plain)


# ---- operators that write their arguments ----


@pytest.mark.parametrize("name", ["parameters", "first", "second", "gradients", "grad_scale", "keep"])
def test_adam_of_a_negated_view(name):
    names = ("parameters", "first", "second", "gradients", "grad_scale", "step_size", "keep")
    plain = {n: torch.rand(65 if i < 4 else 1) for i, n in enumerate(names)}
    given = {n: t.clone() for n, t in plain.items()} | {name: negated(plain[name])}
    for _ in range(20):  # before the mend each call wrote past the dispatcher's stack
        OPS.adam_(*plain.values(), 0.9, 0.99, EPS)
        OPS.adam_(*given.values(), 0.9, 0.99, EPS)
    assert given[name].is_neg()
    for n in names:
        assert torch.equal(given[n], plain[n]), n


@pytest.mark.parametrize("name", ["update", "place"])
def test_adam_refuses_a_negative_number(name):
    buffers = [torch.ones(4) for _ in range(4)]
    with pytest.raises((RuntimeError, ValueError), match=f"{name} must be at least 0, got -1"):
        OPS.adam_(*buffers, *[torch.ones(1)] * 3, 0.9, 0.99, EPS, **{name: -1})
    assert all(torch.equal(buffer, torch.ones(4)) for buffer in buffers)


def test_adam_refuses_complex_numbers():
    buffers = [torch.zeros(8) for _ in range(4)]
    buffers[1] = torch.zeros(8, dtype=torch.complex64).conj()
    with pytest.raises(TypeError, match="first must be float32"):
        OPS.adam_(*buffers, *[torch.ones(1)] * 3, 0.9, 0.9, EPS)


def test_cross_entropy_in_place_of_a_negated_view():
    z, target, scale = torch.randn(5, 7), torch.arange(5), torch.ones((), dtype=torch.float64)
    given = negated(z)
    losses = [OPS.label_smoothed_cross_entropy_(t, target, None, 0.9, 0.01, -1, scale) for t in (z, given)]
    assert torch.equal(*(loss for loss, _ in losses)) and torch.equal(given, z)


@pytest.mark.parametrize("negative", ["x", "first", "second", "all"])
def test_statistics_in_negated_views(negative):
    x, states = torch.randn(6, 4), [[torch.zeros(4) + 0.5, torch.ones(4)] for _ in range(2)]
    if negative != "x":
        chosen = (0, 1) if negative == "all" else (("first", "second").index(negative),)
        states[1] = [negated(t) if i in chosen else t for i, t in enumerate(states[1])]
    xs = (x, negated(x) if negative in ("x", "all") else x)
    found = [OPS.batch_norm(x, None, None, None, *state, train=True)[0] for x, state in zip(xs, states)]
    assert torch.equal(*found) and all(torch.equal(*pair) for pair in zip(*states))


# ---- what formulas read ----


@pytest.mark.parametrize(
    "make", [faked, lambda t: TwoTensor(t, t), freed, negated], ids=["fake", "wrapper", "freed", "neg"]
)
def test_hooks_that_change_the_ranges_of_attention(make):
    x = torch.randn(6, 8, requires_grad=True)
    ranges = torch.tensor([[0, 4, 0, 4], [4, 2, 4, 2]])
    with saved_tensors_hooks(lambda t: t, lambda t: make(t) if t.dtype == torch.int64 else t):
        y = OPS.attention(x, x, x, ranges, 2, False, 1.0, 0.0, None, 0)[0]
    if make is negated:
        (found,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        again = OPS.attention(x, x, x, ranges, 2, False, 1.0, 0.0, None, 0)[0]
        (expected,) = torch.autograd.grad(again.square().sum(), x, create_graph=True)
        assert torch.equal(found, expected)
    else:
        with pytest.raises((RuntimeError, ValueError), match=r"ranges ha|FakeTensor|freed"):
            torch.autograd.grad(y.square().sum(), x, create_graph=True)


def test_a_wrapped_seed_that_is_differentiated_again():
    x = torch.randn(6, 8, requires_grad=True)

    def gradient(seed):
        y = OPS.layer_norm_residual(x, x, None, None, None, None, EPS, 0.5, seed, 0)[1]
        return torch.autograd.grad((y * y.detach()).sum(), x, create_graph=True)[0]

    found = gradient(TwoTensor(SEED, SEED.clone()))
    torch.testing.assert_close(found.a, gradient(SEED))


# ---- exceptions of Python's ----


class Stop(Exception):
    pass


def stops_at(count):
    """A hook that raises at the tensor of this number."""
    seen = [0]

    def pack(t):
        seen[0] += 1
        if seen[0] == count:
            raise Stop("as it was")
        return t

    return pack, seen


LAST = {
    **OF_X,
    "lp_norm, p = 2": lambda x: OPS.lp_norm(x, torch.ones(8), 2.0, EPS),
    "residual": lambda x: OPS.rms_norm_residual(x, x, None, None, None, None, EPS, 0.5, SEED, 0)[1],
    "attention": lambda x: OPS.attention(x, x, x, torch.tensor([[0, 6, 0, 6]]), 2, False, 1.0, 0.5, SEED, 0)[0],
    "cross_entropy": lambda x: OPS.label_smoothed_cross_entropy(x, torch.arange(6), None, 0.9, 0.01, -1)[0],
    "batch_norm": lambda x: OPS.batch_norm(x, train=True)[0],
    "power_norm_v": lambda x: OPS.power_norm_v(x, train=True)[0],
    "composed_norm": lambda x: OPS.composed_norm(x, [torch.ones(1), None, None], [], "dyt"),
    "conventional_rms_norm": lambda x: OPS.conventional_rms_norm(x, torch.ones(8), EPS, "before", "outside", 0.5),
    "conventional_rms_norm, by kernels": lambda x: OPS.conventional_rms_norm(x, None, EPS, "after", "inside", 1.0),
}


@pytest.mark.parametrize("name", LAST)
def test_an_operator_last_in_a_checkpointed_region(name):
    """torch ends the recomputation by an exception in a hook, as the last saved tensor is packed."""
    x = torch.randn(6, 8, requires_grad=True)
    cotangent = torch.randn_like(LAST[name](x))
    found, expected = (
        torch.autograd.grad(f(x), x, cotangent)[0]
        for f in (lambda x: checkpoint(LAST[name], x, use_reentrant=False), LAST[name])
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", LAST)
def test_an_exception_of_a_hook_arrives_as_it_was(name):
    x = torch.randn(6, 8, requires_grad=True)
    pack, seen = stops_at(0)
    with saved_tensors_hooks(pack, lambda t: t):
        LAST[name](x)
    for count in range(1, seen[0] + 1):
        with pytest.raises(Stop, match="as it was"), saved_tensors_hooks(stops_at(count)[0], lambda t: t):
            LAST[name](x)
    with pytest.raises((ValueError, RuntimeError), match=r"has layout|must be a dense|strided"):
        LAST[name](x.detach().to_sparse())  # and none comes twice


def test_an_exception_of_a_hook_passes_the_model():
    model = nfrs.Transformer(nfrs.TransformerConfig(**SMALL))
    pack, seen = stops_at(0)
    with saved_tensors_hooks(pack, lambda t: t):
        model(IDS, IDS)
    assert seen[0] > 4
    for count in (1, seen[0] // 2, seen[0]):
        with pytest.raises(Stop, match="as it was"), saved_tensors_hooks(stops_at(count)[0], lambda t: t):
            model(IDS, IDS)
    with pytest.raises(InputError, match="holds token 77"):
        model(IDS, torch.full((1, 2), 77))


def test_a_model_in_a_checkpointed_region():
    model = nfrs.Transformer(nfrs.TransformerConfig(**SMALL | {"dropout": 0.1}))
    found = []
    for f in (lambda *a: checkpoint(model, *a, use_reentrant=False), model):
        torch.manual_seed(3)
        model.zero_grad()
        f(IDS, IDS).square().sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and found[0]
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name])


# ---- panics ----


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
def test_a_panic_is_a_runtime_error():
    """pyo3's PanicException is no Exception: `except Exception` lets it pass. tch panics at sizes of nested tensors."""
    with pytest.raises(RuntimeError, match="normformer_rs panicked") as caught:
        _core.draw_linear(nested_matrix(), ["fc1"], json.dumps(SMALL | {"residual": "postnorm"}), "encoder", 0, 0)
    assert "frame #" not in str(caught.value)


def nested_matrix():
    return torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)])


def test_every_binding_catches_panics():
    """Whoever lets go of Python's lock does it by `released`, which catches panics."""
    folder = Path(__file__).parents[2] / "src" / "bindings"
    direct = {path.name: path.read_text().count(".allow_threads(") for path in folder.glob("*.rs")}
    assert {name: count for name, count in direct.items() if count} == {"mod.rs": 1, "inspect.rs": 1}
