"""torch.export of whole models: every residual scheme and norm, with masks, in torch's own operations alone."""

import subprocess
import sys

import pytest
import torch
from test_export import TABLE, Beside, D, stirred
from torch import nn

import normformer_rs as nfrs
import reference as ref
from normformer_rs import nn as nfnn

FULL = pytest.mark.full
# torch's own, on copying and writing graphs
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
SCHEMES = [entry["name"] for entry in nfrs.tables()["residuals"]]


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def grown(model, *inputs):
    """Parameters, statistics and t away from their start; then in evaluation."""
    model = stirred(model, *inputs)
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] == "t":
            buffer.fill_(1234)
    return model


def exported(model, *inputs, dynamic_shapes=None, **masks):
    """The program: no operator of this package, and all of the model's values."""
    program = torch.export.export(model, inputs, masks, dynamic_shapes=dynamic_shapes)
    assert "normformer_rs" not in str(program.graph)
    state = model.state_dict()
    assert state.keys() == program.state_dict.keys()
    assert all(torch.equal(program.state_dict[name], value) for name, value in state.items())
    return program.module()


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def norm_of(scheme):
    """A norm that the scheme can have, another one for each scheme."""
    fitting = [norm for norm in TABLE if ref.is_defined(norm, scheme)]
    return fitting[SCHEMES.index(scheme) % len(fitting)]


def stack(kind, scheme, norm, layers=2, **options):
    """An encoder or a decoder, or a Transformer of both."""
    options = {"batch_first": True, "norm": norm, "residual": scheme, **options}
    if kind == "Transformer":
        return nfnn.Transformer(D, 2, layers, layers, 16, 0.1, **options)
    return getattr(nfnn, kind)(getattr(nfnn, f"{kind}Layer")(D, 2, 16, 0.1, **options), layers)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.one_in(test=32, all=31)
def test_every_scheme_exports(scheme):
    x, y = numbers(2, 5, D), numbers(2, 3, D)
    model = grown(stack("Transformer", scheme, norm_of(scheme)).double(), x, y)
    program = exported(model, x, y)
    close(program(2 * x, y - 1), model(2 * x, y - 1))


@FULL
@pytest.mark.parametrize("kind", ["TransformerEncoder", "TransformerDecoder", "Transformer"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.one_in(all=16)
def test_every_scheme_in_f32(scheme, kind):
    """As near to f64 as the module is: stirred weights may amplify its rounding to 8e-6."""
    inputs = [torch.randn(2, 5, D)] if kind == "TransformerEncoder" else [torch.randn(2, 5, D), torch.randn(2, 3, D)]
    model = grown(stack(kind, scheme, norm_of(scheme)), *inputs)
    found, eager = exported(model, *inputs)(*inputs), model(*inputs)
    exact = model.double()(*(x.double() for x in inputs))
    assert (found - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-6


@pytest.mark.parametrize("kind", ["TransformerEncoder", "TransformerDecoder"])
@pytest.mark.one_in(all=2)
def test_every_norm(kind):
    model = Beside(stack(kind, "postnorm", norm, layers=1) for norm in TABLE).double()
    x = numbers(2, 5, D)
    if kind == "TransformerDecoder":
        for module in model.each:
            module.register_forward_pre_hook(lambda _, args: (*args, args[0].flip(1)))  # what it attends to
    grown(model, x)
    for norm, found, expected in zip(TABLE, exported(model, x)(3 * x), model(3 * x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=lambda m, n=norm: f"{n}: {m}")


@pytest.mark.full
def test_schemes_with_more_options():
    x, y = numbers(2, 5, D), numbers(2, 3, D)
    options = {"qk_l2norm": 72, "parametrisation": "completep", "base_width": 4, "base_depth": 1}
    model = grown(stack("Transformer", "prenorm", "rmsnorm:gemma", layers=1, **options).double(), x, y)
    close(exported(model, x, y)(x, y), model(x, y))
    model = grown(stack("TransformerEncoder", "branchnorm", "layernorm", branchnorm_growth="exp").double(), x)
    close(exported(model, x)(x), model(x))
    for scheme, options in (
        ("attnres", {"attnres_form": "normed", "attnres_queries": 3}),
        ("mhc", {"mhc_mixing": "none", "mhc_end": "mean"}),
        ("mhc", {"mhc_mixing": "channel", "mhc_rank": 3}),
        ("hyper-connections", {"hyper_connections_dynamic": False}),
    ):
        model = grown(stack("Transformer", scheme, "rmsnorm", layers=1, **options).double(), x, y)
        close(exported(model, x, y)(x, y), model(x, y))
    for first in (False, True):  # torch.nn's own arrangement
        model = nfnn.Transformer(D, 2, 1, 1, 16, batch_first=True, norm_first=first, activation="gelu").double()
        close(exported(grown(model, x, y), x, y)(x, y), model(x, y))


# Masks, and sizes that the program was not exported with.


def masked(batch, source, target, batch_first):
    """Inputs and masks of these sizes, and the target's real positions."""
    x, y = numbers(batch, source, D), numbers(batch, target, D)
    padding, hidden = (torch.arange(length) >= torch.randint(1, length + 1, (batch, 1)) for length in (source, target))
    if not batch_first:
        x, y = x.transpose(0, 1).contiguous(), y.transpose(0, 1).contiguous()
    masks = {
        "tgt_mask": torch.ones(target, target, dtype=torch.bool).triu(1),
        "src_key_padding_mask": padding,
        "tgt_key_padding_mask": hidden,
        "memory_key_padding_mask": padding.double().masked_fill(padding, -torch.inf),
    }
    return (x, y), masks, ~hidden if batch_first else ~hidden.T


def any_size(batch_first):
    """The dynamic dimensions of `masked`'s inputs and masks."""
    batch, source, target = (torch.export.Dim(name, min=2, max=100) for name in ("batch", "source", "target"))

    def rows(length):
        return {0: batch, 1: length}

    sequences = {"src": rows(source), "tgt": rows(target)} if batch_first else {"src": {0: source, 1: batch}}
    sequences.setdefault("tgt", {0: target, 1: batch})
    masks = {"src_key_padding_mask": rows(source), "memory_key_padding_mask": rows(source)}
    return {**sequences, **masks, "tgt_mask": {0: target, 1: target}, "tgt_key_padding_mask": rows(target)}


CASES = [(scheme, norm_of(scheme), True) for scheme in SCHEMES]
CASES += [("prores", norm, first) for norm in TABLE for first in (True, False)]
SHARP = (("prores", "layernorm", False), ("prores", "powernorm", True))


@pytest.mark.parametrize(
    ("scheme", "norm", "batch_first"), [pytest.param(*case, marks=[] if case in SHARP else [FULL]) for case in CASES]
)
@pytest.mark.one_in(all=56)
def test_masks_and_any_batch_and_length(scheme, norm, batch_first):
    inputs, masks, _ = masked(2, 5, 3, batch_first)
    model = grown(stack("Transformer", scheme, norm, batch_first=batch_first).double(), *inputs)
    program = exported(model, *inputs, **masks, dynamic_shapes=any_size(batch_first))
    for sizes in ((2, 5, 3), (4, 6, 7), (1, 3, 1)):
        inputs, masks, real = masked(*sizes, batch_first)
        close(program(*inputs, **masks)[real], model(*inputs, **masks)[real])


@pytest.mark.full
def test_masks_of_every_kind():
    x, y = numbers(2, 5, D), numbers(2, 4, D)
    layer = grown(stack("TransformerDecoder", "normformer", "batchnorm", layers=1).double(), x, y)
    causal, padding = torch.ones(5, 5, dtype=torch.bool).triu(1), torch.arange(5) >= torch.tensor([[5], [3]])
    for masks in (
        {"tgt_is_causal": True},
        {"tgt_mask": causal.double().masked_fill(causal, -torch.inf), "tgt_is_causal": True},
        {"tgt_mask": causal.expand(4, 5, 5), "tgt_key_padding_mask": padding},  # a mask for each head
        {"memory_mask": causal[:, :4], "tgt_is_causal": True, "tgt_key_padding_mask": padding},
    ):
        close(exported(layer, x, y, **masks)(x, y, **masks), layer(x, y, **masks))


def test_parts_of_a_model():
    x = numbers(2, 5, D)
    for scheme in ("prenorm", "branchnorm", "layerscale", "prores"):
        block = grown(nfnn.Residual(nn.Linear(D, D), D, scheme=scheme, layers=1).double(), x)
        close(exported(block, x)(x), block(x))
    attention = nfnn.MultiheadAttention(D, 2, batch_first=True).double().eval()
    for found, expected in zip(exported(attention, x, x, x)(x, x, x), attention(x, x, x), strict=True):
        close(found, expected)  # the output, and the weights
    table, ids = nfnn.FixNormEmbedding(9, D, scale=2.0).double(), torch.randint(9, (2, 3))
    close(exported(table, ids)(ids), table(ids))


@pytest.mark.parametrize(("kind", "scheme"), [("bert", "branchnorm"), ("llama", "peri-ln")])
@pytest.mark.one_in(all=2)
def test_models_of_hugging_face(kind, scheme):
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    if kind == "bert":
        model = transformers.BertModel(transformers.BertConfig(vocab_size=20, **shape))
    else:
        model = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=20, use_cache=False, **shape))
    nfrs.swap_residuals(model, scheme)
    nfrs.swap_norms(model, "scalenorm")
    ids = torch.randint(20, (2, 7))
    inputs = {"input_ids": ids, "attention_mask": (ids > 1).long()}
    program = torch.export.export(model.double().eval(), (), inputs)
    assert "normformer_rs" not in str(program.graph)
    close(program.module()(**inputs).last_hidden_state, model(**inputs).last_hidden_state)


# Files.

READ = """
import sys, torch
sys.modules["normformer_rs"] = None  # importing it is an ImportError
model = torch.export.load("f.pt2").module()
for x, y in torch.load("numbers.pt"):
    torch.testing.assert_close(model(x), y, rtol=1e-6, atol=1e-6)
"""


@pytest.mark.full
def test_a_saved_program_runs_without_the_package(tmp_path):
    x = torch.randn(2, 5, D)
    layer = stack("TransformerEncoder", "prores", "powernorm")
    model = grown(nn.Sequential(layer, nfnn.ScaleNorm(D), stack("TransformerEncoder", "dlcl", "dyt", layers=1)), x)
    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=512)}
    torch.export.save(torch.export.export(model, (x,), dynamic_shapes=(sizes,)), tmp_path / "f.pt2")
    given = [x, torch.randn(3, 9, D)]
    torch.save([(x, model(x).detach()) for x in given], tmp_path / "numbers.pt")
    subprocess.run([sys.executable, "-c", READ], cwd=tmp_path, check=True)


@pytest.mark.full
def test_growth_stays_an_operator_in_compiled_graphs():
    """Dynamo takes is_exporting() for true, and cannot trace the core."""
    graphs, x = [], numbers(2, 5, D)

    def keep(graph, _):
        graphs.append(str(graph.graph))
        return graph

    layer = grown(stack("TransformerEncoder", "prores", "layernorm").double(), x)
    close(torch.compile(layer, backend=keep, fullgraph=True)(x), layer(x))
    assert graphs[0].count("normformer_rs.growth") == 2
