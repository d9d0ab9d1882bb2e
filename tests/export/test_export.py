"""torch.export, ONNX and torch.fx see norms of this package as they see torch.nn's."""

import copy
import math

import pytest
import torch
from torch import nn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn
from normformer_rs.nn.norms import BiasedRMSNorm
from normformer_rs.surgery import swap_norms

D = 8
FULL = pytest.mark.full
# torch's own, on copying and writing graphs
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
TABLE = [entry["name"] for entry in nfrs.tables()["norms"]]
NORMS = {name: (lambda name=name: nfnn.norm_class(name)(D)) for name in TABLE} | {
    "layernorm, two dimensions": lambda: nfnn.LayerNorm((5, D), bias=False),
    "rmsnorm, two dimensions": lambda: nfnn.RMSNorm((5, D), eps=None),
    "conventions, zero-centred": lambda: nfnn.RMSNorm(D, zero_centred=True),
    "conventions, original": lambda: nfnn.RMSNorm(D, eps_place="outside", part=0.5, zero_centred=True),
    "conventions, two dimensions": lambda: nfnn.RMSNorm((5, D), cast="scale", eps_place="outside"),
    "dyt, bare": lambda: nfnn.DyT(D, elementwise_affine=False),
    "dyt, two dimensions": lambda: nfnn.DyT((5, D)),
    "lpnorm, 1": lambda: nfnn.LpNorm(D, p=1),
    "lpnorm, 3": lambda: nfnn.LpNorm(D, p=3),
    "lpnorm, inf": lambda: nfnn.LpNorm(D, p=math.inf),
    "batchnorm, bare": lambda: nfnn.BatchNorm(D, elementwise_affine=False),
    "powernorm, release": lambda: nfnn.PowerNorm(D, mode="release", groups=2),
    "group scaling": lambda: nfnn.GroupScaling(2),
}
RUNNING = ("batchnorm", "powernorm-v", "powernorm", "powernorm, release", "repbn", "prepbn")


def stirred(module, *inputs):
    """Parameters and statistics away from their start; then in evaluation."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    for _ in range(2):
        module.train()(*inputs)
    return module.eval()


class Beside(nn.Module):
    """Modules that read the same x: one graph is exported sooner than many."""

    def __init__(self, modules):
        super().__init__()
        self.each = nn.ModuleList(modules)

    def forward(self, x):
        return [module(x) for module in self.each]


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.one_in(all=2)
def test_norms_decompose(strict):
    x = torch.randn(3, 5, D, dtype=torch.float64)
    model = stirred(Beside(make() for make in NORMS.values()).double(), 2 * x + 1)
    before = copy.deepcopy(model.state_dict())
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},), strict=strict).run_decompositions()
    assert "normformer_rs" not in str(program.graph)
    more = torch.cat([x, 3 * x - 1, torch.zeros_like(x)])
    for name, y, expected in zip(NORMS, program.module()(more), model(more), strict=True):
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
    assert all(torch.equal(value, before[key]) for key, value in program.state_dict.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.one_in(test=10, all=4)
def test_an_exported_norm_keeps_the_dtype(name, dtype):
    x = (1e3 * torch.randn(3, 5, D)).to(dtype)
    norm = stirred(NORMS[name](), x)
    found = torch.export.export(norm, (x,)).module()(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, norm(x), rtol=8e-3 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("name", RUNNING)
@pytest.mark.one_in(test=4, all=2)
def test_statistics_move_in_an_exported_training_step(name):
    x = torch.randn(3, 5, D)
    norm = NORMS[name]().train()
    twin = copy.deepcopy(norm)
    program = torch.export.export(norm, (x,)).run_decompositions().module()
    torch.testing.assert_close(program(x), twin(x))
    for key, buffer in twin.named_buffers():
        torch.testing.assert_close(dict(program.named_buffers())[key], buffer)


@pytest.mark.full
def test_lengths_of_one_decompose():
    x = torch.randn(2, 5, D, dtype=torch.float64)
    layer = nfnn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True, qk_l2norm=72).double()
    program = torch.export.export(layer, (x,)).run_decompositions()
    assert "normformer_rs" not in str(program.graph)
    torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-12, atol=1e-12)


def test_an_exported_norm_takes_padding():
    x, mask = torch.randn(2, 5, D), torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    norm = stirred(nfnn.PowerNorm(D), x)
    program = torch.export.export(norm, (x, mask)).run_decompositions().module()
    holes = x.masked_fill(mask.unsqueeze(-1), math.nan)
    torch.testing.assert_close(program(holes, mask), norm(holes, mask))


def swapped_layer(name):
    layer = nn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True)
    swap_norms(layer, name)
    return layer


def own_layer(scheme, norm="powernorm"):
    return nfnn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True, norm=norm, residual=scheme, encoder_layers=1)


@pytest.mark.filterwarnings("ignore")  # onnxscript's and onnx_ir's
@pytest.mark.parametrize(
    "make",
    [
        lambda: [make() for make in NORMS.values()],
        lambda: [swapped_layer(name) for name in TABLE],
        lambda: [swapped_layer("powernorm"), own_layer("normformer")],
        lambda: [own_layer("deepnorm"), own_layer("r-fixup")],
        lambda: [own_layer("branchnorm"), own_layer("prores"), own_layer("hybridnorm", "rmsnorm")],
    ],
    ids=["norms", "every norm in a layer", "layers", "more layers", "growing layers"],
)
@pytest.mark.one_in(all=5)
def test_onnx(make):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    x = torch.randn(2, 5, D)
    model = stirred(Beside(make()), x)
    program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    session = runtime.InferenceSession(program.model_proto.SerializeToString())
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    for y, expected in zip(found, model(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(y), expected.detach(), rtol=1e-5, atol=1e-5)


OPSETS = [
    pytest.param(opset, dtype, marks=[] if (opset, dtype) in {(18, torch.float32), (23, torch.float16)} else [FULL])
    for opset in range(18, 24)
    for dtype in (torch.float32, torch.float16)
]


@pytest.mark.filterwarnings("ignore")  # onnxscript's and onnx_ir's
@pytest.mark.parametrize(("opset", "dtype"), OPSETS, ids=str)
@pytest.mark.one_in(all=12)
def test_onnxruntime_loads_every_opset(opset, dtype):
    """onnxscript joins a norm's nodes to one of the opset: RMSNormalization is 23's, and of 16-bit rows with a gain in
    f32 onnxruntime cannot load it."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    x = torch.randn(2, 5, 32, dtype=dtype)
    names = [*TABLE, *(family["name"] for family in nfrs.tables()["families"])]
    norms = {name: nfnn.norm_class(name)(32) for name in names} | {"with a bias": BiasedRMSNorm(32)}
    own = (nn.Sequential(nn.Linear(32, 32), norm) for norm in norms.values())  # nodes that norms share are not joined
    model = stirred(Beside(own).to(dtype), x)
    program = torch.onnx.export(model, (x,), dynamo=True, opset_version=opset, verbose=False)
    session = runtime.InferenceSession(program.model_proto.SerializeToString())
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float16 else {"rtol": 1e-5, "atol": 1e-5}
    for name, y, expected in zip(norms, found, model(x), strict=True):
        assert y.dtype == expected.detach().numpy().dtype, name
        torch.testing.assert_close(
            torch.from_numpy(y), expected.detach(), **tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


class Block(nn.Module):
    """A small model that torch.fx traces before its norms are swapped."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.linear = nn.LayerNorm(D), nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x):
        return self.norm2(x + self.linear(self.norm1(x)).relu())


@pytest.mark.parametrize("name", TABLE)
def test_fx_traces_a_swapped_model(name):
    model, x = Block(), torch.randn(3, 5, D)
    plain = torch.fx.symbolic_trace(model).graph
    swap_norms(model, name)
    stirred(model, x)
    traced = torch.fx.symbolic_trace(model)
    assert [(n.op, n.target) for n in traced.graph.nodes] == [(n.op, n.target) for n in plain.nodes]
    assert torch.equal(traced(x), model(x))


def test_fx_takes_layers_for_leaves():
    embedding, layer = nfnn.FixNormEmbedding(9, D), nfnn.TransformerEncoderLayer(D, 2, 16, batch_first=True)
    model = nn.Sequential(embedding, layer, nfnn.Residual(nn.Linear(D, D), D), nfnn.GroupScaling(2)).eval()
    traced, ids = torch.fx.symbolic_trace(model), torch.randint(9, (2, 3))
    assert [node.op for node in traced.graph.nodes] == ["placeholder", *["call_module"] * 4, "output"]
    assert torch.equal(traced(ids), model(ids))


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_the_rust_transformer_says_why_it_does_not_export(strict):
    options = {"d_model": D, "d_ff": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    model = nfrs.Transformer(nfrs.TransformerConfig(vocab_size=9, **options), seed=0).eval()
    ids = torch.tensor([[4, 5, 2]])
    with pytest.raises(Exception, match=r"one call into Rust.*export a model around normformer_rs\.nn\.Transformer"):
        torch.export.export(model, (ids, ids), strict=strict)
