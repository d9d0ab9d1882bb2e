"""Norms as modules: conventions of torch.nn, how PyTorch treats them, masks, bad input, and norms in models."""

import copy
import math
import pickle
from typing import Literal

import pytest
import torch
from norms_support import CASES, CLASSES, EPS, OPERATORS, build, close, data

import normformer_rs as nfrs
import reference as ref
from normformer_rs import nn
from normformer_rs.nn import composed
from normformer_rs.nn.norm_table import DECLARED, Numbers, TensorSpec
from normformer_rs.nn.row_norm import RowNorm

pytestmark = pytest.mark.device
OPS = torch.ops.normformer_rs
MODULES = {
    "layernorm": lambda **k: nn.LayerNorm(8, **k),
    "rmsnorm": lambda **k: nn.RMSNorm(8, **k),
    "scalenorm": lambda **k: nn.ScaleNorm(8, **k),
    "lpnorm": lambda **k: nn.LpNorm(8, p=3, **k),
    "lpnorm, inf": lambda **k: nn.LpNorm(8, p=math.inf, **k),
    "dyt": lambda **k: nn.DyT(8, **k),
    "derf": lambda **k: nn.Derf(8, **k),
    "l2norm": lambda **k: nn.L2Norm(8, **k),
    "gated-rmsnorm": lambda **k: nn.GatedRMSNorm(8, rank=3, **k),
    "batchnorm": lambda **k: nn.BatchNorm(8, **k),
    "powernorm-v": lambda **k: nn.PowerNormV(8, **k),
    "powernorm": lambda **k: nn.PowerNorm(8, warmup_iters=0, **k),
    "powernorm, release": lambda **k: nn.PowerNorm(8, mode="release", warmup_iters=2, groups=2, **k),
    "repbn": lambda **k: nn.RepBN(8, **k),
    "prepbn": lambda **k: nn.PRepBN(8, **k),
}


@pytest.mark.parametrize("name", [n for n in MODULES if n in ref.ROW_NORMS])
def test_row_modules_are_the_oracle(name):
    norm = MODULES[name](dtype=torch.float64)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 8, dtype=torch.float64)
    options = {"p": 3.0} if name == "lpnorm" else {}
    inside = {number: getattr(norm, number) for number in norm.numbers}
    expected = ref.apply_norm(name, x, norm.weight, norm.bias, inside=inside, **options)
    torch.testing.assert_close(norm(x), expected)


def test_several_dimensions_and_torchs_reprs():
    x = torch.randn(2, 3, 4)
    for ours, theirs in [
        (nn.LayerNorm((3, 4)), torch.nn.LayerNorm((3, 4))),
        (nn.LayerNorm([3, 4], bias=False), torch.nn.LayerNorm([3, 4], bias=False)),
        (nn.RMSNorm(4, eps=None), torch.nn.RMSNorm(4)),
        (nn.RMSNorm((3, 4), eps=1e-3, elementwise_affine=False), torch.nn.RMSNorm((3, 4), 1e-3, False)),
    ]:
        assert repr(ours) == repr(theirs) and ours.state_dict().keys() == theirs.state_dict().keys()
        torch.testing.assert_close(ours(x), theirs(x))
    bf16 = x.bfloat16()
    torch.testing.assert_close(
        nn.RMSNorm(4, eps=None, dtype=torch.bfloat16)(bf16), ref.rms_norm(bf16, torch.ones(4), None)
    )
    assert repr(nn.PowerNorm(8)).startswith(
        "PowerNorm(8, eps=1e-05, alpha_fwd=0.9, alpha_bwd=0.9, warmup_iters=4000, mode=paper"
    )


def test_dyts_parameters_are_the_papers():
    norm = nn.DyT(8)
    assert repr(norm) == "DyT((8,), elementwise_affine=True)"
    shapes = {name: tuple(p.shape) for name, p in norm.named_parameters()}
    assert shapes == {"alpha": (1,), "weight": (8,), "bias": (8,)} and next(iter(shapes)) == "alpha"
    assert norm.alpha.item() == 0.5 and (norm.weight == 1).all() and (norm.bias == 0).all()
    assert [name for name, _ in nn.DyT(8, bias=False).named_parameters()] == ["alpha", "weight"]
    assert [name for name, _ in nn.DyT((2, 8), False).named_parameters()] == ["alpha"]
    x = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    wide = nn.DyT((2, 8), dtype=torch.float64)
    torch.testing.assert_close(wide(x), torch.tanh(0.5 * x))
    assert torch.autograd.gradcheck(wide, (x,)) and torch.autograd.gradgradcheck(wide, (x,))
    values = torch.tensor([1.0, -2.0, 3.0, -0.1])
    torch.testing.assert_close(nn.DyT(4)(2 * values), torch.tensor([0.76159416, -0.96402758, 0.99505475, -0.09966799]))


GAMMA, BETA = [1.0, 0.5, 2.0, -1.0], [0.1, -0.1, 0.0, 0.2]
# Beside each the numbers of x = (1, −2, 3, 1/2), computed apart from this package: the papers' equations in f64.
VECTORS = [
    ("layernorm", {}, {}, [0.31055839, -0.83695436, 2.66707294, 0.27018613]),
    ("rmsnorm", {"eps": 1e-6}, {}, [0.52981287, -0.52981287, 3.17887721, -0.26490643]),
    ("dyt", {}, {}, [0.56211716, -0.48079708, 1.81029651, -0.04491866]),
    ("derf", {}, {}, [0.62049988, -0.5213504, 1.93221029, -0.07632639]),
    ("derf", {}, {"s": 0.1}, [0.70385609, -0.49845411, 1.95269677, -0.17938205]),
    ("l2norm", {}, {}, [0.26490647, -0.52981294, 0.79471941, 0.13245324]),
]


@pytest.mark.parametrize("name, options, inside, wanted", VECTORS)
def test_the_papers_numbers(name, options, inside, wanted):
    norm = nn.norm_class(name)(4, **options, dtype=torch.float64)
    given = {"weight": GAMMA, "bias": BETA} | {number: [value] for number, value in inside.items()}
    own = dict(norm.named_parameters())
    norm.load_state_dict({key: torch.tensor(given[key]) if key in given else own[key].detach() for key in own})
    x = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(norm(x), torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-8)


def test_derf_and_l2norm():
    derf = nn.Derf(8)
    assert {name: tuple(p.shape) for name, p in derf.named_parameters()} == {
        "alpha": (1,),
        "s": (1,),
        "weight": (8,),
        "bias": (8,),
    }
    assert (derf.alpha.item(), derf.s.item()) == (0.5, 0.0) and repr(derf) == "Derf((8,), elementwise_affine=True)"
    norm = nn.L2Norm((2, 4))
    assert not list(norm.parameters()) and repr(norm) == "L2Norm((2, 4), eps=1e-12)"
    x = torch.randn(3, 2, 4)
    x[1] = 0
    torch.testing.assert_close(norm(x).flatten(1), torch.nn.functional.normalize(x.flatten(1)))
    with pytest.raises(TypeError, match="unexpected keyword argument 'elementwise_affine'"):
        nn.L2Norm(4, elementwise_affine=False)


@pytest.mark.parametrize("name", ["layernorm", "scalenorm", "dyt", "lpnorm", "batchnorm", "repbn"])
def test_operators_get_transformed_parameters(name):
    """An operator and its formula get factor·(offset + p), a reset scales that."""
    (norm, plain), x = (MODULES[name]() for _ in range(2)), torch.randn(3, 8)
    numbers = Numbers(0.25, 0.0, 0.5, 4.0)
    for key in norm.numbers_of:
        norm.numbers_of[key] = numbers
    norm.reset_parameters()
    for key, p in plain.named_parameters():
        assert (getattr(norm, key) == 0.25).all()
        torch.nn.init.constant_(p, 3.0)
    assert torch.equal(norm(x), plain(x)) and numbers.at_start() == 3.0
    (loss, expected) = (n(x).sin().sum() for n in (norm, plain))
    for found, wanted in zip(*(torch.autograd.grad(y, n.parameters()) for y, n in ((loss, norm), (expected, plain)))):
        torch.testing.assert_close(found, 4 * wanted)
    if isinstance(norm, RowNorm):
        torch.testing.assert_close(norm.formula(x), plain(x))
    norm.first_scale = 2.0
    norm.reset_parameters()
    assert (norm.weight == 1.0).all() and numbers.inverse(torch.tensor(3.0)) == 0.25  # 4·(0.5 + 1) is twice 3


def test_a_weight_that_is_not_learned_is_what_operators_get_at_the_start():
    norm, x = nn.RMSNorm(8, elementwise_affine=False), torch.randn(3, 8)
    plain = norm(x)
    norm.numbers_of["weight"] = Numbers(0.5, factor=4.0)
    torch.testing.assert_close(norm(x), 2 * plain)
    torch.testing.assert_close(norm.formula(x), 2 * plain)
    assert torch.equal(nn.RMSNorm(8, elementwise_affine=False, zero_centred=True)(x), plain)


def test_a_fused_step_gets_transformed_parameters():
    layers = [nn.TransformerEncoderLayer(8, 2, 16, 0.0, norm="rmsnorm", residual="prenorm") for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    for norm in (layers[0].norm1, layers[0].norm2):
        norm.numbers_of["weight"] = Numbers(1.0, 0.0, 0.5, 2.0)
    for norm in (layers[1].norm1, layers[1].norm2):
        torch.nn.init.constant_(norm.weight, 3.0)
    x = torch.randn(5, 2, 8)
    assert torch.equal(layers[0](x), layers[1](x))


def test_numbers_of_the_table():
    entries = {entry["name"]: entry["parameters"] for entry in nfrs.tables()["norms"]}
    (gain,), (weight,) = entries["lpnorm"], entries["rmsnorm"]
    assert gain == {"name": "weight", "shape": "one", "start": "d^(1/p)", "std": 0.0, "offset": 0.0, "factor": 1.0}
    assert weight["offset"] == "0, or 1 if zero_centred" and weight["factor"] == 1.0
    assert nn.LpNorm(8, p=3).numbers_of == {"weight": Numbers(2.0)} and nn.ScaleNorm((2, 8)).gain() == 4.0
    assert nn.RMSNorm(8, zero_centred=True).numbers_of == {"weight": Numbers(0.0, offset=1.0)}
    for make in (lambda: nn.LpNorm(8, p=math.nan), lambda: nn.LpNorm(8, p=0.5), lambda: nn.RMSNorm(8, part=2.0)):
        with pytest.raises(nfrs.InputError, match=r"^p must be|^part must lie in|^p: "):
            make()


def test_a_constructor_takes_options_of_every_type():
    kinds = {"eps": 1e-5, "beta": 0.5, "groups": 4, "learned": True, "place": "inside"}
    options = [{"name": n, "kind": type(o).__name__, "default": o} for n, o in kinds.items()]
    options[-1]["choices"] = ["inside", "outside"]
    entry = {"name": "made", "parameters": [], "options": options}
    own = composed.signature(entry).parameters
    assert {name: own[name].default for name in kinds} == kinds
    assert own["groups"].annotation is int and own["place"].annotation == Literal["inside", "outside"]
    declared = DECLARED["layernorm"]._replace(options=kinds, choices={"place": ["inside", "outside"]})
    assert declared.as_floats(place="outside", learned=False) == [1e-5, 0.5, 4.0, 0.0, 1.0]


def test_a_norm_with_statistics_is_made_of_its_entry():
    (entry,) = (entry for entry in nfrs.tables()["norms"] if entry["name"] == "powernorm-v")
    made, written = composed.build(entry), nn.PowerNormV
    assert made(8, 1e-3, 0.5).extra_repr() == written(8, 1e-3, 0.5).extra_repr()
    assert made.__name__ == "PowerNormV" and "PowerNormV" not in composed.__all__
    pair = [kind(8, alpha=0.8, groups=2, dtype=torch.float64) for kind in (made, written)]
    x, mask = data(8, masked=True)
    results = []
    for norm in pair:
        own = x.clone().requires_grad_()
        y = norm(own, mask)
        y.square().sum().backward()
        results.append([y, own.grad, norm.weight.grad, *norm.state_dict().values(), norm.eval()(x)])
    close(*results, tolerance=0)
    pair[0].reset_running_stats()
    assert torch.equal(pair[0].running_phi, torch.ones(8).double())
    for wrong, why in [
        ({"alpha": 1.0}, "alpha must lie in"),
        ({"groups": 3}, "must divide"),
        ({"eps": 0.0}, "eps must"),
    ]:
        with pytest.raises(ValueError, match=why):
            made(8, **wrong)
    with pytest.raises(TypeError, match="beta"):
        made(8, beta=1.0)


@pytest.mark.parametrize(
    "change, why",
    [
        ({"buffers": ()}, "the buffers : .* one or two statistics"),
        ({"buffers": (TensorSpec("size", "one", 1.0),)}, r"the buffers size \(one\)"),
        ({"buffers": (TensorSpec("a", "width", 0.0),) * 3}, "one or two statistics"),
        ({"buffers": (TensorSpec("a", "width", 0.0), *(TensorSpec("t", "one", 0, True),) * 2)}, "at most one counter"),
        ({"parameters": DECLARED["layernorm"].parameters[:1]}, "the parameters weight: .* WEIGHT and BIAS"),
        ({"options": {"eps": 1e-5, "beta": 0.5}}, "the option beta: .* has eps, alpha, "),
    ],
)
def test_statistics_that_an_operator_would_drop_are_refused(change, why):
    for name in ref.BATCH_NORMS:
        assert DECLARED[name].with_columns() is DECLARED[name]
    with pytest.raises(ImportError, match=f"^norm batchnorm declares .*{why}"):
        DECLARED["batchnorm"]._replace(**change).with_columns()


@pytest.mark.parametrize("case", CASES)
def test_evaluation_divides_by_what_frozen_says(case):
    """Exported programs compute evaluation from `frozen`; the operator says what it has used."""
    norm, _ = build(case, 8)
    options = {"train": False, "eps": norm.eps, **norm.settings()}
    _, stats = getattr(OPS, norm.operator_name)(
        torch.randn(3, 8).double(), None, None, None, *norm.state(), None, None, **options
    )
    mean, square = norm.frozen()
    shift = torch.zeros(8).double() if mean is None else mean.flatten()
    close(stats[:2], [shift, (square.flatten() + norm.eps).rsqrt()])


def test_the_table_of_classes():
    config = nfrs.TransformerConfig(
        lpnorm_p=math.inf, powernorm_mode="release", heads=4, norm_eps=0.01, batchnorm_alpha=0.5
    )
    for entry in nfrs.tables()["norms"]:
        norm = nn.norm_of_config(entry["name"], 8, config.replace(norm_eps=None))
        assert type(norm) is nn.norm_class(entry["name"]) and type(norm).__name__ == entry["module"]
        assert [name for name, _ in norm.named_parameters()] == [
            parameter["name"] for parameter in entry["parameters"] if entry["name"] != "scalenorm-fixed"
        ]
        eps = [getattr(norm, "eps", None), getattr(nn.norm_of_config(entry["name"], 8, config), "eps", None)]
        own = next((option["default"] for option in entry["options"] if option["name"] == "eps"), None)
        assert eps == ([None, None] if own is None else [own, 0.01])
    assert nn.norm_of_config("lpnorm", 8, config).p == math.inf
    assert (
        nn.norm_of_config("powernorm", 8, config).groups == 4 and nn.norm_of_config("batchnorm", 8, config).groups == 1
    )
    fixed = [nn.norm_of_config("scalenorm-fixed", 8, config, last_of_decoder=last).weight for last in (False, True)]
    assert fixed[0] is None and fixed[1] is not None
    with pytest.raises(ValueError, match="did you mean"):
        nn.norm_class("powernorm-w")
    assert nfrs.TransformerConfig.from_json(config.to_json()) == config


def test_foreign_state_dicts():
    d = 16
    x = torch.randn(3, d)
    ours = nn.ScaleNorm(d)
    ours.load_state_dict({"scale": torch.tensor(3.0)})  # Nguyen and Salazar's code
    torch.testing.assert_close(ours(x), 3 * torch.nn.functional.normalize(x, dim=-1))
    unit = torch.nn.functional.normalize(x, dim=-1) * math.sqrt(d)
    for g, offset in ((torch.tensor([0.7]), False), (torch.tensor([-0.3]), True)):  # x-transformers
        ours = torch.nn.Sequential(nn.ScaleNorm(d, unit_offset=offset))
        ours.load_state_dict({"0.g": g})
        torch.testing.assert_close(ours(x), unit * (g + offset))
        rms = nn.RMSNorm(d, eps=1e-12, unit_offset=offset)
        rms.load_state_dict({"g": g * torch.arange(d)})
        torch.testing.assert_close(rms(x), unit * (g * torch.arange(d) + offset))
    release = {
        "weight": torch.rand(d),
        "bias": torch.rand(d),
        "running_phi": torch.rand(1, d, 1, 1),
        "ema_gz": torch.rand(1, d, 1, 1),
        "iters": torch.tensor([123]),
    }
    for mode in ("paper", "release"):
        norm = nn.PowerNorm(d, mode=mode)
        norm.load_state_dict(release)
        assert norm.state_dict().keys() == release.keys() and all(
            torch.equal(norm.state_dict()[key], value) for key, value in release.items()
        )


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.one_in(test=7, all=4)
def test_modules_travel(name):
    norm = MODULES[name]()
    x = torch.randn(3, 5, 8)
    norm(x.clone().requires_grad_()).sum().backward()
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert torch.equal(twin.eval()(x), copy.deepcopy(norm).eval()(x))
    fresh = MODULES[name]()
    fresh.load_state_dict(norm.state_dict())
    assert torch.equal(fresh.eval()(x), copy.deepcopy(norm).eval()(x))
    meta = MODULES[name](device="meta")
    y = meta(torch.empty(3, 5, 8, device="meta"))
    assert y.is_meta and y.shape == x.shape
    empty = meta.to_empty(device=torch.get_default_device())
    torch.manual_seed(1)
    new = MODULES[name]()
    torch.manual_seed(1)
    empty.reset_parameters()
    torch._dynamo.reset()
    compiled = torch.compile(empty, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), copy.deepcopy(new)(x))
    torch.manual_seed(1)
    empty.reset_parameters()
    assert torch.equal(empty(x), new(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_low_precision(name, dtype):
    norm = MODULES[name]()
    norm(torch.randn(3, 5, 8))
    before = {key: b.clone() for key, b in norm.named_buffers()}
    norm.to(dtype)
    for key, b in norm.named_buffers():
        assert b.dtype == before[key].dtype and torch.equal(b, before[key])
    assert all(p.dtype == dtype for p in norm.parameters())
    assert all(b.dtype == torch.float64 for b in norm.double().buffers() if b.is_floating_point())
    made = MODULES[name](dtype=dtype)
    assert made(torch.randn(3, 5, 8).to(dtype)).dtype == dtype
    assert all(b.dtype == torch.float32 for b in made.buffers() if b.is_floating_point())
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        h = torch.nn.Linear(8, 8)(torch.randn(4, 8))
        assert MODULES[name]()(h).dtype == h.dtype == torch.bfloat16
    assert MODULES[name]()(torch.randn(4, 8, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.one_in(test=13, all=12)
def test_compile_fullgraph(name, training):
    torch._dynamo.reset()
    norm = MODULES[name]().train(training)
    plain = copy.deepcopy(norm)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    for step in range(4):
        torch.manual_seed(step)
        x, dy = torch.randn(3, 5, 8), torch.randn(3, 5, 8)
        found, wanted = (run_module(module, x, dy) for module in (compiled, plain))
        for ours, theirs in zip(found, wanted, strict=True):
            # Terms of the gradient cancel, so the error is relative to the largest number. The rounding of a sum grows
            # with the root of the number of its terms.
            terms = max(1, x.numel() // max(1, ours.numel()))
            atol = 5e-7 * terms**0.5 * max(1.0, theirs.abs().max().item())
            torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
        close(norm.buffers(), plain.buffers(), 1e-6)


def run_module(module, x, dy):
    x = x.clone().requires_grad_()
    y = module(x)
    # The parameters of prepbn's norm of rows have no gradient in evaluation.
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy, materialize_grads=True)]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.one_in(test=5, all=3)
def test_export(name):
    norm = MODULES[name]().eval()
    x = torch.randn(3, 5, 8)
    program = torch.export.export(norm, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    close([program.module()(torch.cat([x, x]))], [norm(torch.cat([x, x]))], 1e-6)


@pytest.mark.parametrize("name", MODULES)
def test_functorch(name):
    norm = MODULES[name]().eval()
    x = torch.randn(3, 5, 8)
    close([torch.vmap(norm)(x)], [norm(x)], 1e-5)
    own = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(norm(own).sin().sum(), own)
    close([torch.func.grad(lambda x: norm(x).sin().sum())(x)], [wanted], 1e-5)
    assert torch.func.jacrev(norm)(x[0, 0]).shape == (8, 8)
    if name in (*CLASSES, *ref.BLENDED_NORMS):
        with pytest.raises(NotImplementedError, match="vmap"):
            torch.vmap(norm.train())(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # opcheck of torch 2.15 reads it
@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(test=6, all=5)
def test_opcheck(case):
    norm, name = build(case, 8, torch.float32)
    x, mask = data(8, torch.float32, masked=True)
    state = [None if b is None else b.clone() for b in norm.state()]
    arguments = (x.requires_grad_(), norm.weight, norm.bias, mask, *state, norm.refused)
    torch.library.opcheck(
        getattr(OPS, OPERATORS[name]).default, arguments, {"train": True, "eps": EPS, **norm.settings()}
    )


# Masks.


class Foreign(torch.nn.Module):
    """A model that knows nothing of masks in norms."""

    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(4, 4), nn.PowerNormV(4))
        self.decoder = torch.nn.Sequential(torch.nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm(4))

    def forward(self, source, target):
        return self.encoder(source), self.decoder(target)


def test_masks_reach_foreign_models():
    model = Foreign()
    source, target = torch.randn(2, 5, 4), torch.randn(2, 3, 4)
    masks = torch.zeros(2, 5, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.bool)
    masks[0][1, 3:], masks[1][0, 2] = True, True
    with nn.padding_mask(*masks):
        a, b = model(source, target)
    assert (a[masks[0]] == 0).all() and (b[masks[1]] == 0).all() and (a[~masks[0]] != 0).all()
    with nn.padding_mask(*masks, batch_first=False):
        swapped = Foreign()
        swapped.load_state_dict(Foreign().state_dict())
        c, _ = model(source.transpose(0, 1), target.transpose(0, 1))
        assert (c.transpose(0, 1)[masks[0]] == 0).all()
        d = model.encoder(source.transpose(0, 1).reshape(10, 4))
        assert (d.view(5, 2, 4).transpose(0, 1)[masks[0]] == 0).all()
    # an argument goes before the context, and the context ends
    with nn.padding_mask(masks[0]):
        assert (model.encoder[1](source, padding_mask=torch.zeros(2, 5, dtype=torch.bool)) != 0).all()
    assert (model(source, target)[0] != 0).all()


def test_compiled_models_take_masks():
    torch._dynamo.reset()
    norm, mask = nn.PowerNormV(4), torch.tensor([[False, False, True]])
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 3, 4)
    close([compiled(x, mask)], [copy.deepcopy(norm).train()(x, mask)], 1e-6)
    with nn.padding_mask(mask):
        assert (compiled(x)[mask] == 0).all()
    assert (compiled(x) != 0).all()


def x():
    return torch.ones(2, 3, 4)


@pytest.mark.parametrize(
    "call,error,message",
    [
        (
            lambda: nn.BatchNorm(4)(x(), torch.zeros(3, 2, dtype=torch.bool)),
            ValueError,
            r"pad_mask must have shape \[2, 3\], got shape \[3, 2\]",
        ),
        (lambda: nn.BatchNorm(4)(x(), torch.zeros(2, 3)), TypeError, "padding_mask must be bool, True at padding"),
        (lambda: nn.PowerNorm(4)(x(), torch.ones(2, 3).long()), TypeError, "int64: .* give attention_mask == 0"),
        (lambda: nn.PowerNormV(4)(x(), [[True] * 3] * 2), TypeError, "padding_mask must be bool.* got list"),
        (lambda: nn.ScaleNorm(-3), ValueError, "normalized_shape must be at least 0, got -3"),
        (lambda: nn.L2Norm((4, -1)), ValueError, "normalized_shape must be at least 0, got -1"),
        (lambda: nn.LayerNorm(2.5), TypeError, "must be a whole number, or several for a row norm; got 2.5"),
        (lambda: nn.RMSNorm("4"), TypeError, "must be a whole number.*; got '4'"),
        (lambda: nn.BatchNorm(-3), ValueError, "num_features must be at least 0, got -3"),
        (lambda: nn.PowerNorm((4, 2)), nfrs.InputError, r"num_features must be one width.*; got \(4, 2\)"),
        (
            lambda: nn.LayerNorm(4)(x().numpy()),
            TypeError,
            "LayerNorm takes a torch.Tensor, got numpy.ndarray: torch.as",
        ),
        (lambda: nn.PowerNorm(4)([1.0]), TypeError, "PowerNorm takes a torch.Tensor, got list"),
        (
            lambda: nn.FixNormEmbedding.from_pretrained(x()),
            ValueError,
            r"must be a table \(V, d\); got shape \(2, 3, 4\)",
        ),
        (lambda: nn.PowerNorm(5)(x()), ValueError, r"x must be \(…, 5\), got \(2, 3, 4\)"),
        (lambda: nn.PowerNorm(4)(x().long()), TypeError, "float32, float64"),
        (lambda: nn.LayerNorm(5)(x()), ValueError, r"x must end in \(5,\)"),
        (lambda: nn.LpNorm(4)(x().long()), TypeError, "float32, float64"),
        (lambda: nn.LpNorm(4, p=0.5), ValueError, "at least 1"),
        (lambda: OPS.lp_norm(x(), None, math.nan, EPS), ValueError, "at least 1"),
        (lambda: nn.GroupScaling(3)(x()), ValueError, "must divide the width"),
        (lambda: nn.PowerNorm(4, mode="papr"), ValueError, 'did you mean "paper"'),
        (lambda: nn.PowerNorm(4, mode="release", groups=0), ValueError, "at least 1"),
        (lambda: nn.PowerNormV(4, groups=3), ValueError, "must divide"),
        (lambda: nn.PowerNormV(4, alpha=1.0), ValueError, r"alpha must lie in \[0, 1\)"),
        (lambda: OPS.power_norm(x(), train=True), ValueError, "needs its buffers running_phi, ema_gz and iters"),
        (lambda: OPS.batch_norm(x(), torch.ones(3), train=True), ValueError, "weight must hold 4 numbers"),
        (lambda: OPS.batch_norm(x(), train=True, variant="other"), ValueError, "variant must be one of paper, release"),
        (lambda: in_mask(torch.zeros(2, 4, dtype=torch.bool)), ValueError, "none fits"),
        (
            lambda: in_mask(torch.zeros(2, 3, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool)),
            ValueError,
            "several",
        ),
        (lambda: in_mask(torch.zeros(2, 3)), ValueError, "must be bool"),
        (lambda: nfrs.TransformerConfig(lpnorm_p="two"), ValueError, "lpnorm_p must be a number"),
        (lambda: model(lpnorm_p=0.5, norm="lpnorm"), ValueError, "lpnorm_p must be at least 1"),
        (lambda: model(powernorm_alpha_bwd=1.0), ValueError, "powernorm_alpha_bwd must lie in"),
        (lambda: model(groupscaling=3, norm="batchnorm"), ValueError, "in 3 groups"),
        (lambda: model(powernorm_warmup=-1), ValueError, "at least 0"),
        (lambda: model(norm="dyt", norm_eps=0.1), ValueError, 'norm "dyt" has no epsilon, so norm_eps = 0.1 would do'),
        (lambda: nn.TransformerEncoderLayer(8, 2, layer_norm_eps=0.1, norm="dyt"), ValueError, "has no epsilon"),
        (lambda: nn.DyT(8, eps=0.1), TypeError, "unexpected keyword argument 'eps'"),
        (lambda: nn.DyT(), TypeError, "missing a required argument: 'normalized_shape'"),
        (lambda: nn.DyT(5)(x()), ValueError, r"x must end in \(5,\)"),
        (lambda: nn.DyT(4)(x().long()), TypeError, "float32, float64"),
        (lambda: OPS.composed_norm(x(), [None], [], "dyt"), RuntimeError, "3 parameters and 0 options, got 1 and 0"),
        (lambda: OPS.composed_norm(x(), [None] * 3, [], "dyt"), RuntimeError, "needs its parameter alpha, got none"),
        (lambda: OPS.composed_norm(x(), [torch.ones(3)], [], "dyt"), ValueError, "must hold 1 or 4 numbers"),
        (
            lambda: OPS.composed_norm(x(), [torch.ones(4, 4)], [1e-5], "scalenorm"),
            RuntimeError,
            "at most one dimension",
        ),
        (
            lambda: OPS.composed_norm(x(), [None, torch.ones(4), torch.ones(4)], [0, 2], "gated-rmsnorm"),
            RuntimeError,
            "must be a matrix",
        ),
        (lambda: OPS.composed_norm(x(), [None] * 3, [0, 2], "gated-rmsnorm"), RuntimeError, "needs its parameter gate"),
        (lambda: nn.GatedRMSNorm(4, rank=0), ValueError, "rank must be at least 1, got 0"),
        (lambda: OPS.composed_norm(x(), [], [], "layernorm"), RuntimeError, "2 parameters and 1 options, got 0 and 0"),
        (lambda: OPS.composed_norm(x(), [None] * 2, [0.0] * 4, "batchnorm"), RuntimeError, "an operator of its own"),
        (lambda: OPS.composed_norm(x(), [], [], "layernrm"), RuntimeError, "did you mean"),
    ],
)
def test_bad_input_is_said(call, error, message):
    with pytest.raises(error, match=message):
        call()


def in_mask(*masks):
    with nn.padding_mask(*masks):
        nn.BatchNorm(4)(x())


SHAPE = {"vocab_size": 23, "d_model": 16, "d_ff": 24, "heads": 4, "encoder_layers": 2, "decoder_layers": 2}


def model(**options):
    return nfrs.Transformer(nfrs.TransformerConfig(**{**SHAPE, "dropout": 0.0, **options}), seed=3)


# In models.

IN_MODELS = [
    {"norm": "lpnorm", "lpnorm_p": math.inf},
    {"norm": "lpnorm", "lpnorm_p": 1.5},
    {"norm": "batchnorm", "batchnorm_alpha": 0.5},
    {"norm": "powernorm-v", "groupscaling": 0},
    {"norm": "powernorm-v", "groupscaling": 2, "residual": "postnorm"},
    {"encoder_norm": "powernorm", "powernorm_warmup": 2},
    {"norm": "powernorm", "powernorm_mode": "release", "powernorm_warmup": 2},
    {"norm": "powernorm", "powernorm_warmup": 0, "residual": "subln"},
    {"norm": "repbn", "residual": "postnorm"},
    {"encoder_norm": "prepbn", "decoder_norm": "repbn", "repbn_start": "zeros", "residual": "normformer"},
    {"norm": "prepbn", "prepbn_steps": 3, "prepbn_row": "rmsnorm", "residual": "branchnorm"},
    {"norm": "prepbn", "prepbn_steps": 2, "prepbn_warm": 1, "residual": "ln-scaling", "ln_scaling_mode": "weight"},
]


@pytest.mark.parametrize("options", IN_MODELS, ids=str)
@pytest.mark.one_in(test=4, all=3)
def test_models_train_as_the_oracle_does(options):
    """Four forward and backward passes in training, the state after each, then evaluation."""
    ours = model(**options).double()
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    state = {name: p.detach().clone().requires_grad_() for name, p in ours.named_parameters()}
    state |= {name: b.clone() for name, b in ours.named_buffers()}
    dropout = ref.Dropout(embedding=0, attention=0, activation=0, residual=0, seed=1, update=1, micro_batch=0)
    for step in range(4):
        torch.manual_seed(step)
        ours.set_num_updates(step + 1)
        state |= {name: b.clone() for name, b in ours.named_buffers() if name.endswith(".t")}
        source = torch.randint(4, 23, (3, 5))
        target = torch.randint(4, 23, (3, 4))
        if options.get("powernorm_mode") != "release":  # which takes means over padding, and packed rows have none
            source[1, 3:], target[2, 2:] = ref.PAD, ref.PAD
        for training in (True, False):
            logits = ours.train(training)(source, target)
            expected = ref.forward(state, {**SHAPE, **options}, source, target, dropout if training else None)
            real = target != ref.PAD
            torch.testing.assert_close(logits[real], expected[real], rtol=1e-9, atol=1e-9)
            if training:
                weight = torch.randn_like(expected)[real]
                (logits[real] * weight).sum().backward()
                (expected[real] * weight).sum().backward()
        for name, p in ours.named_parameters():
            wanted = torch.zeros_like(p) if state[name].grad is None else state[name].grad
            torch.testing.assert_close(p.grad, wanted, rtol=1e-8, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")
        for name, b in ours.named_buffers():
            torch.testing.assert_close(b, state[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_fixnorms_embedding():
    """Rows and the tied matrix have length one; the padding row gets no gradient."""
    table = nn.FixNormEmbedding(7, 5, padding_idx=1, scale=5**0.5, dtype=torch.float64)
    ids = torch.tensor([[2, 1, 6], [2, 2, 0]])
    weight = table.weight.detach().clone().requires_grad_()
    rows = ref.fixnorm(weight)[ids] * 5**0.5
    torch.testing.assert_close(table(ids), rows)
    torch.testing.assert_close(table.normalised_weight(), ref.fixnorm(weight))
    dy = torch.randn_like(rows)
    (theirs,) = torch.autograd.grad(rows, weight, dy.masked_fill(ids.unsqueeze(-1) == 1, 0))
    (ours,) = torch.autograd.grad(table(ids), table.weight, dy)
    torch.testing.assert_close(ours, theirs)
    assert table.weight.abs().max() <= 0.01 and not ours[1].any()
