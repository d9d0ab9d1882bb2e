"""mup against its authors' package and Transformer: outputs, gradients, ratios of first values and MuAdam's groups."""

import functools
import types
from unittest.mock import MagicMock

import pytest
import torch
from authors_support import assert_same_language_models, module
from torch.testing import assert_close

from normformer_rs import Transformer, TransformerConfig, param_groups

AUTHORS = "microsoft/mup", "19814971934ef91dd546f88e913fc963e096d11c"
CHANGES = {"dtype=torch.float)": "dtype=torch.float64)", ".float()": ".double()"}
CHANGES |= {"torch.zeros(max_len, d_model)": "torch.zeros(max_len, d_model, dtype=torch.float64)"}
CHANGES |= {"Encoder(encoder_layers, nlayers)": "Encoder(encoder_layers, nlayers, enable_nested_tensor=False)"}
CHANGES |= {"        self.init_weights()\n": ""}  # zeros in place of the output's first values
SHAPE = {"heads": 2, "decoder_layers": 3, "vocab_size": 11, "encoder_layers": 0, "architecture": "decoder-only"}
SHAPE |= {"residual": "postnorm", "norm": "layernorm", "init": "gpt2", "dropout": 0.0, "scale_embeddings": False}
SHAPE |= {"tie_embeddings": "none", "linear_biases": False, "parametrisation": "mup", "base_width": 8}
OUTER = {"encoder.weight": "target_embedding.weight", "decoder.weight": "output_projection.weight"}


@pytest.fixture
def authors():
    """Returns the authors' package, whose Transformer is their example's."""
    parts = {"yaml": MagicMock()}
    for name in ("infshape", "layer", "shape", "optim"):
        parts[f"mup__{name}"] = module(*AUTHORS, f"mup/{name}.py", **parts)
    layer, shape, optim = (parts[f"mup__{name}"] for name in ("layer", "shape", "optim"))
    example = module(*AUTHORS, "examples/Transformer/model.py", CHANGES, mup=layer, _overrides=MagicMock())

    def of_width(width):
        options = types.SimpleNamespace(attn_mult=1.0, output_mult=0.5)
        return example.TransformerModel(options, 11, width, 2, 2 * width, 3, dropout=0.0, bias=False)

    def build(width):
        """Their output is log p, with positions first; torch's stack no longer takes their layers."""
        model = shape.set_base_shapes(of_width(width), of_width(8), delta=of_width(16))
        stack, forward = model.transformer_encoder, model.forward
        stack.forward = lambda x, mask: functools.reduce(lambda x, layer: layer(x, mask), stack.layers, x)
        model.forward = lambda ids, **_: [forward(ids.T).transpose(0, 1)]
        return model

    return types.SimpleNamespace(build=build, optim=optim)


def as_ours(weights):
    """Names the authors' weights, or their gradients, as this package does."""
    names = {name: OUTER.get(name, name.replace("transformer_encoder.", "decoder.")) for name in weights}
    return {names[name]: weight for name, weight in weights.items()}


def our_model(width, **options):
    sizes = {"d_model": width, "d_ff": 2 * width, "output_alpha": 0.5}
    return Transformer(TransformerConfig(**SHAPE | sizes | options), seed=1)


def test_outputs_and_gradients(authors):
    theirs, ours = authors.build(24).double(), our_model(24).double()
    assert_same_language_models(ours, theirs, as_ours, lambda ids: ours(None, ids).log_softmax(-1))


def test_first_values(authors, monkeypatch):
    """Standard deviations at width 24 over those at width 8, the base. The authors' are told by what they draw with,
    ours by what the same seed gives with Xavier's initialisation. Their queries are zero, and not compared."""
    with monkeypatch.context() as held:
        held.setattr(torch.Tensor, "normal_", lambda t, mean=0.0, std=1.0, **_: t.data.fill_(std))
        held.setattr(torch.Tensor, "uniform_", lambda t, start, end, **_: t.data.fill_(end))
        theirs = [as_ours(dict(authors.build(width).named_parameters())) for width in (24, 8)]
    ours = []
    for width in (24, 8):
        drawn, xavier = our_model(width).state_dict(), our_model(width, init="xavier").state_dict()
        fans = {name: 2 * width if "self_attn" in name else sum(p.shape) for name, p in drawn.items()}
        fans |= {"target_embedding.weight": 2 * 8, "output_projection.weight": 8 + 11}  # the base model's
        ours.append({name: p / xavier[name] * (2 / fans[name]) ** 0.5 for name, p in drawn.items()})
    for name, wide in theirs[0].items():
        if wide.ndim == 2:
            ratios = ((w[name][-1, -1] / base[name][-1, -1]).detach() for w, base in (ours, theirs))
            assert_close(*ratios, rtol=1e-5, atol=0)


def test_groups(authors):
    """Rates of all parameters, and decay of matrices. MuAdam also decays vectors, and leaves ε alone (spec.md, 3.7)."""
    theirs, ours, options = authors.build(24), our_model(24), {"weight_decay": 0.1, "eps": 1e-8}
    optimizer = authors.optim.MuAdamW(theirs.parameters(), lr=1e-2, decoupled_wd=True, **options)
    expected, paths = {}, {id(p): path for path, p in as_ours(dict(theirs.named_parameters())).items()}
    for group in optimizer.param_groups:
        expected |= {paths[id(p)]: (group["lr"], group["weight_decay"], group["eps"]) for p in group["params"]}
    found, paths = {}, {id(p): path for path, p in ours.named_parameters()}
    for group in param_groups(ours, 1e-2, **options):
        found |= {paths[id(p)]: (group["lr"], group["weight_decay"], group["eps"] * 3) for p in group["params"]}
    assert found.keys() == expected.keys() and len({rate for rate, _, _ in found.values()}) == 2
    for path, (rate, decay, eps) in expected.items():
        is_matrix = ours.get_parameter(path).ndim == 2
        assert found[path] == pytest.approx((rate, decay if is_matrix else 0.0, eps), rel=1e-12), path
