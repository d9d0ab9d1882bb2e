"""Norms are recognised by their numbers, and asking for them changes nothing."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn
from normformer_rs.surgery import swap_norms
from normformer_rs.surgery.probe import RecognisedNorm, Widened
from normformer_rs.surgery.recognise import examine

D = 16


def module(forward, **attributes):
    """A module with this forward; tensors become parameters."""

    class Anonymous(nn.Module):
        def __init__(self):
            super().__init__()
            for name, value in attributes.items():
                setattr(self, name, nn.Parameter(value) if isinstance(value, torch.Tensor) else value)

    Anonymous.forward = forward
    return Anonymous()


def gain(*shape):
    return torch.rand(shape or (D,)) + 0.5


def unit(x):
    return F.normalize(x, dim=-1)


def from_zero(self, x):
    x = x.float()
    return ((1 + self.w) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 3e-6)).half()


def clamped(self, x):
    return x / (x.norm(dim=-1, keepdim=True) * D**-0.5).clamp(min=self.eps) * self.g


def of_numpy(self, x):
    """f32 even where f64 is asked for."""
    rows = x.numpy().astype("float32")
    return torch.from_numpy(rows / ((rows * rows).mean(-1, keepdims=True) + 1e-3) ** 0.5).to(x) * self.g


class InSingle(nn.LayerNorm):
    """CLIP's kind of subclass."""

    def forward(self, x):
        return super().forward(x.float()).to(x.dtype)


NORMS = {
    "a subclass": (lambda: InSingle(D), RecognisedNorm(D, "layernorm", "weight", "bias", 1e-5)),
    "names of its own": (
        lambda: module(lambda m, x: F.layer_norm(x, (D,), m.gamma, m.beta, 1e-4), beta=gain(), gamma=gain()),
        RecognisedNorm(D, "layernorm", "gamma", "beta", 1e-4),
    ),
    "no bias": (
        lambda: module(lambda m, x: F.layer_norm(x, (D,), m.alpha), alpha=gain(), bias=None),
        RecognisedNorm(D, "layernorm", "alpha", None, 1e-5),
    ),
    "gain from zero": (lambda: module(from_zero, w=gain()), RecognisedNorm(D, "rmsnorm", "w", None, 3e-6, 1.0)),
    "unit vector": (
        lambda: module(lambda m, x: unit(x) * m.g, g=gain()),
        RecognisedNorm(D, "rmsnorm", "g", None, 6.25e-26, 0.0, 0.25),
    ),
    "unit vector, from zero": (
        lambda: module(lambda m, x: unit(x) * m.scale * (m.g + 1), g=gain(), scale=4.0),
        RecognisedNorm(D, "rmsnorm", "g", None, 6.25e-26, 1.0),
    ),
    "one gain": (
        lambda: module(lambda m, x: unit(x) * m.s, s=gain(1), dim=D),
        RecognisedNorm(D, "scalenorm", "s", None, 1e-12, 0.0, 0.25),
    ),
    "one gain, of no dimension": (
        lambda: module(clamped, g=torch.tensor(2.0), eps=1e-5, dim=(D,)),
        RecognisedNorm(D, "scalenorm", "g", None, 4e-5),
    ),
    "no parameters": (
        lambda: module(lambda m, x: F.layer_norm(x, m.normalized_shape), normalized_shape=(D,)),
        RecognisedNorm(D, "layernorm", None, None, 1e-5, 1.0),
    ),
    "ε of the type": (
        lambda: module(lambda m, x: F.rms_norm(x, (D,), m.g), g=gain(), eps=None),
        RecognisedNorm(D, "rmsnorm", "g", None, None),
    ),
    "f32 alone": (lambda: module(of_numpy, g=gain(), eps=1e-3), RecognisedNorm(D, "rmsnorm", "g", None, 1e-3)),
    "on the meta device": (
        lambda: module(lambda m, x: F.rms_norm(x, (D,), m.g, 1e-6), g=gain()).to("meta"),
        RecognisedNorm(D, "rmsnorm", "g", None, 1e-6),
    ),
}


@pytest.mark.parametrize("make, expected", NORMS.values(), ids=NORMS)
def test_what_computes_a_norm_is_one(make, expected):
    found = examine(make())
    assert isinstance(found, RecognisedNorm), found
    assert found[:4] == expected[:4]
    assert found.eps == (expected.eps if expected.eps is None else pytest.approx(expected.eps, rel=1e-9))
    assert found[5:] == pytest.approx(expected[5:], rel=1e-12)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.one_in(test=2)
def test_the_same_norm_keeps_its_outputs(name):
    make, expected = NORMS[name]
    model = nn.Sequential(make())
    if name == "on the meta device":
        swap_norms(model, expected.computes)
        assert model[0].weight.is_meta
        return
    x = torch.randn(3, 5, D, dtype=torch.float64)
    model.double()
    with torch.no_grad(), Widened():
        before = model(x)
        swap_norms(model, expected.computes)
        assert type(model[0]) is nfnn.norm_class(expected.computes)
        tolerance = 1e-6 if name == "f32 alone" else 1e-12
        torch.testing.assert_close(model(x), before, rtol=0, atol=tolerance)


def test_sigma_plus_epsilon_is_a_layernorm():
    """The annotated Transformer's: unbiased σ, ε added to it."""

    def forward(self, x):
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.b_2

    model, x = nn.Sequential(module(forward, a_2=gain(), b_2=gain(), eps=1e-6)).double(), torch.randn(3, D).double()
    before = model(x)
    (row,) = swap_norms(model, "layernorm")
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-5)
    assert row.note == f"weight is {math.sqrt(15 / 16):.6g}·the old a_2"


STRANGERS = {
    "scales alone": (lambda m, x: x * m.g, {"g": gain()}, "computes no norm"),
    "mixes rows": (lambda m, x: (x - x.mean((0, 1))) / x.std((0, 1)) * m.g, {"g": gain()}, "computes no norm"),
    "channels first": (lambda m, x: F.layer_norm(x.mT, (D,), m.g).mT, {"g": gain()}, "takes no rows of width 16"),
    "another shape": (lambda m, x: F.layer_norm(x, (D,), m.g)[0], {"g": gain()}, r"returns \(3, 16\)"),
    "dropout": (lambda m, x: F.dropout(F.layer_norm(x, (D,), m.g), 0.5, m.training), {"g": gain()}, "computes no norm"),
    "an exponential gain": (lambda m, x: F.layer_norm(x, (D,)) * m.g.exp(), {"g": gain()}, "computes no norm"),
    "a gate": (lambda m, x, gate=None: F.rms_norm(x, (D,), m.g), {"g": gain()}, "its forward takes gate=None beside x"),
    "unit length": (lambda m, x: unit(x), {"dim": D}, "multiplies by 0.25"),
    "no width": (lambda m, x: unit(x) * m.g, {"g": gain(1)}, "its width is unknown"),
    "a gain without a sign": (lambda m, x: F.rms_norm(x, (D,), m.g.abs()), {"g": gain()}, "for some rows, gains"),
    "one gain without a sign": (lambda m, x: unit(x) * m.s.abs(), {"s": gain(1), "dim": D}, "for some rows, gains"),
    "a bounded gain": (lambda m, x: F.rms_norm(x, (D,), m.g.clamp(-99, 99)), {"g": gain()}, "for some rows, gains"),
    "a bounded input": (lambda m, x: F.rms_norm(x.clamp(-1e9, 1e9), (D,), m.g), {"g": gain()}, "for some rows"),
    "a bounded x̂": (lambda m, x: F.rms_norm(x, (D,)).clamp(-3.5, 3.5) * m.g, {"g": gain()}, "computes"),
    "many rows": (
        lambda m, x: F.rms_norm(x, (D,), m.g) if x.shape[-2] < 99 else F.layer_norm(x, (D,), m.g),
        {"g": gain()},
        "for some rows",
    ),
    "rows alone": (
        lambda m, x: F.rms_norm(x, (D,), m.g) if x.dim() == 3 else F.layer_norm(x, (D,), m.g),
        {"g": gain()},
        "for some rows",
    ),
    "modes": (lambda m, x: F.rms_norm(x, (D,), m.g) * (1 + m.training), {"g": gain()}, "computes no norm"),
    "modes of huge rows": (
        lambda m, x: F.rms_norm(x.clamp(max=1e9) if m.training else x, (D,), m.g),
        {"g": gain()},
        "for some rows, gains or modes",
    ),
    "a gradient without the statistics": (
        lambda m, x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6).detach() * m.g,
        {"g": gain()},
        "for some rows, gains or modes",
    ),
    "no gradient": (lambda m, x: F.rms_norm(x, (D,), m.g).detach(), {"g": gain()}, "for some rows, gains or modes"),
    "two gains": (lambda m, x: F.layer_norm(x, (D,)) * (m.g + m.h), {"g": gain(), "h": gain()}, "a gain and a bias"),
}


@pytest.mark.parametrize("forward, attributes, reason", STRANGERS.values(), ids=STRANGERS)
@pytest.mark.one_in(test=3, all=2)
def test_what_computes_none_is_not_one(forward, attributes, reason):
    stranger = module(forward, **attributes)
    found = examine(stranger)
    assert isinstance(found, str) and re.search(reason, found), found
    with pytest.raises(nfrs.InputError, match="holds no known norm"):
        swap_norms(nn.Sequential(stranger), "scalenorm")


def test_asking_changes_nothing():
    def forward(self, x):
        self.calls += 1
        self.seen.append(x)
        torch.rand(1)
        return F.layer_norm(x, (D,), self.g)

    norm = module(forward, g=gain(), calls=0, seen=[]).bfloat16()
    norm.register_forward_hook(lambda *_: pytest.fail("a hook was called"))
    norm.g.grad = torch.ones_like(norm.g)
    state, before, random = {**vars(norm)}, norm.g.detach().clone(), torch.get_rng_state()
    assert isinstance(examine(norm), RecognisedNorm)
    assert norm.calls == 0 and norm.seen == [] and norm.training
    assert vars(norm) == state and torch.equal(norm.g, before) and norm.g.grad is not None
    assert torch.equal(torch.get_rng_state(), random)


def test_a_forward_that_was_put_into_the_module_counts():
    norm = module(lambda m, x: F.layer_norm(x, (D,), m.g), g=gain())
    norm.forward = (lambda m, x: F.rms_norm(x, (D,), m.g, 1e-6)).__get__(norm)
    assert examine(norm) == RecognisedNorm(D, "rmsnorm", "g", None, 1e-6)


def test_norms_that_are_alike_are_asked_once_and_others_each_for_itself():
    calls = []

    class Counted(nn.Module):
        def __init__(self, eps, offset):
            super().__init__()
            self.w, self.eps, self.offset = nn.Parameter(gain()), eps, offset

        def forward(self, x):
            calls.append((self.eps, self.offset))
            return F.rms_norm(x, (D,), self.w + self.offset, self.eps)

    model = nn.Sequential(*(Counted(eps, offset) for eps in (1e-3, 1e-2) for offset in (0, 1) for _ in range(30)))
    swap_norms(model, "rmsnorm")
    assert [norm.eps for norm in model] == [1e-3] * 60 + [1e-2] * 60
    each = {calls.count(pair) for pair in {*calls}}
    assert len({*calls}) == 4 and max(each) < 30


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def test_what_is_called_a_norm_but_stays_is_listed_with_the_reason():
    model = nn.ModuleDict(
        {
            "batch": nn.BatchNorm2d(D),
            "group": nn.GroupNorm(2, D),
            "wide": nn.LayerNorm((2, D)),
            "first": LayerNorm2d(D),
            "last": nn.LayerNorm(D),
            "normalize": nn.Softmax(-1),
        }
    )
    swaps = swap_norms(model, "rmsnorm")
    assert [(row.name, row.old, row.new) for row in swaps] == [
        ("last", "LayerNorm", "RMSNorm"),
        ("batch", "BatchNorm2d", "BatchNorm2d"),
        ("group", "GroupNorm", "GroupNorm"),
        ("wide", "LayerNorm", "LayerNorm"),
        ("first", "LayerNorm2d", "LayerNorm2d"),
    ]
    assert all(row.note.startswith("stays: ") for row in swaps[1:])
    assert "last 2 dimensions" in swaps[3].note and "takes no rows of width 16" in swaps[4].note
    back = swaps.undo()
    assert [row.old for row in back] == ["RMSNorm", *(row.old for row in swaps[1:])]
    assert len(swap_norms(model, "rmsnorm", filter=lambda name, _: name == "last")) == 1


@pytest.mark.parametrize("norm", [entry["name"] for entry in nfrs.tables()["norms"]])
def test_a_class_of_the_package_is_its_name(norm):
    model = nn.Sequential(nn.LayerNorm(D), nn.LayerNorm(D))
    swaps = nfrs.swap_norms(model, nfnn.norm_class(norm))
    assert isinstance(swaps, nfrs.Swaps) and swaps.title == f"swap_norms to {norm}"
    assert type(model[0]) is nfnn.norm_class(norm) and len(nfrs.swap_norms(model, norm)) == 0


class Tanh(nn.Module):
    """No norm at all: Zhu et al.'s dynamic tanh."""

    def __init__(self, width, alpha=0.5):
        super().__init__()
        self.alpha, self.weight = nn.Parameter(torch.tensor(alpha)), nn.Parameter(torch.full((width,), 2.0))

    def forward(self, x):
        return torch.tanh(self.alpha * x) * self.weight


class FromZero(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.w, self.eps = nn.Parameter(torch.zeros(width)), eps

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], 1 + self.w, self.eps)


def test_a_class_of_the_users_own():
    model = nn.Sequential(nn.RMSNorm(D, 1e-3), nn.Linear(D, D)).double().eval()
    nn.init.uniform_(model[0].weight)
    model[0].weight.requires_grad_(False)
    x = torch.randn(3, D).double()
    before, optimizer = model(x), torch.optim.SGD(model.parameters(), 0.1)
    swaps = swap_norms(model, FromZero, optimizer=optimizer)
    assert type(model[0]) is FromZero and model[0].eps == 1e-3 and not model[0].training
    assert not model[0].w.requires_grad and {*optimizer.param_groups[0]["params"]} == {*model.parameters()}
    assert swaps[0].note == "w is -1 + the old weight"
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-12)
    assert len(swap_norms(model, FromZero)) == 0
    swap_norms(model, nn.LayerNorm, bias=False)
    assert type(model[0]) is nn.LayerNorm and model[0].bias is None and model[0].eps == 1e-3
    swap_norms(model, lambda width: nn.RMSNorm(width, eps=1e-2))
    assert type(model[0]) is nn.RMSNorm and model[0].eps == 1e-2
    (row,) = swap_norms(model, Tanh, alpha=0.25)
    assert model[0].alpha.item() == 0.25 and torch.equal(model[0].weight, torch.full((D,), 2.0).double())
    assert row.note == "Tanh is no known norm: its own first values"


def test_what_makes_no_norm_is_refused():
    model = nn.Sequential(nn.LayerNorm(D))
    for to, message in (
        (3, r"to must be one of layernorm, .*, a class of norms, or a function .*; got 3"),
        (nn.LayerNorm(D), r"to must be one of layernorm, .*; got LayerNorm"),
        (int, r"to must be one of layernorm, .*; got <class 'int'>"),
        (nn.Linear, r"Linear must make a norm of the width alone; Linear\(16\): .*out_features"),
        (lambda width: width, r"<lambda>\(16\) must be a torch.nn.Module; got int"),
    ):
        with pytest.raises(nfrs.InputError, match=message):
            swap_norms(model, to)
    with pytest.raises(nfrs.InputError, match=r'unknown option of FromZero "epz" \(did you mean "eps"\?\)'):
        swap_norms(model, FromZero, epz=1)
    assert type(model[0]) is nn.LayerNorm


def test_a_gain_of_another_name_keeps_its_place_sharing_and_state():
    """The optimizer is re-pointed by the parameters' own names."""

    def norm():
        return module(lambda m, x: F.layer_norm(x, (D,), m.gamma, m.beta), beta=gain(), gamma=gain())

    model = nn.Sequential(norm(), nn.Linear(D, D), norm())
    model[2].gamma = model[0].gamma
    groups = [{"params": [model[0].gamma, *model[1].parameters()], "lr": 0.1}]
    groups += [{"params": [model[0].beta, model[2].beta], "lr": 0.2}]
    optimizer = torch.optim.SGD(groups)
    before = [[*group["params"]] for group in optimizer.param_groups]
    swaps = swap_norms(model, "layernorm", optimizer=optimizer)
    assert model[2].weight is model[0].weight
    assert [[*map(id, g["params"])] for g in optimizer.param_groups] == [
        [*map(id, (model[0].weight, *model[1].parameters()))],
        [*map(id, (model[0].bias, model[2].bias))],
    ]
    swaps.undo()
    assert [[*map(id, g["params"])] for g in optimizer.param_groups] == [[*map(id, group)] for group in before]
