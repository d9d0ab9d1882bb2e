"""keel against x-transformers' norms before and after each sublayer, with a scaled residual: output and all gradients,
in f64. Its authors have no public code."""

import types

import pytest
import torch
from authors_support import module
from torch.testing import assert_close

from normformer_rs import nn

REPOSITORY = "lucidrains/x-transformers", "9252ed7838021ee61e6c5be0930b3a9a88efdf06"
IN_F64 = {"@torch.jit.script\n": "", "dtype = torch.float32": "dtype = torch.float64"}
WIDTH, HEADS, DEPTH = 12, 3, 2
NAMES = {"norm1": "0.0.0", "post_norm1": "0.0.2", "norm2": "1.0.0", "post_norm2": "1.0.2"}
NAMES = {f"{name}.weight": f"{theirs}.gamma" for name, theirs in NAMES.items()}
NAMES |= {"self_attn.out_proj.weight": "0.1.to_out.weight"}
NAMES |= {f"linear1.{part}": f"1.1.ff.0.0.{part}" for part in ("weight", "bias")}
NAMES |= {f"linear2.{part}": f"1.1.ff.2.{part}" for part in ("weight", "bias")}


def in_our_names(tensors):
    """The authors' tensors under our names; their numbered layers are our sublayers."""
    made = {}
    for layer in range(DEPTH):
        of = lambda name, layer=layer: tensors[f"layers.{2 * layer + int(name[0])}{name[1:]}"]  # noqa: E731
        made |= {f"layers.{layer}.{ours}": of(theirs) for ours, theirs in NAMES.items()}
        rows = torch.cat([of(f"0.1.to_{part}.weight") for part in "qkv"])
        made[f"layers.{layer}.self_attn.in_proj_weight"] = rows
    return made


@pytest.mark.parametrize("alpha", [0.0, 1.5])
def test_stack(alpha):
    for name in ("einx", "einops", "loguru", "torch_einops_utils"):
        pytest.importorskip(name)
    attend = module(*REPOSITORY, "x_transformers/attend.py", IN_F64)
    beside = {"x_transformers__attend": attend, "x_transformers__autoregressive_wrapper": types.SimpleNamespace()}
    beside["x_transformers__autoregressive_wrapper"].AutoregressiveWrapper = None
    authors = module(*REPOSITORY, "x_transformers/x_transformers.py", x_transformers=types.SimpleNamespace(), **beside)
    size = {"dim": WIDTH, "depth": DEPTH, "heads": HEADS, "attn_dim_head": WIDTH // HEADS, "pre_and_post_norm": True}
    theirs = authors.Encoder(**size, scale_residual_constant=alpha or 2.0 * DEPTH).double()
    given = {"batch_first": True, "activation": "gelu", "dtype": torch.float64, "encoder_layers": DEPTH}
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, residual="keel", keel_alpha=alpha, **given)
    ours = nn.TransformerEncoder(layer, DEPTH)
    torch.manual_seed(0)
    weights, mine = dict(theirs.named_parameters()), dict(ours.named_parameters())
    for weight in weights.values():
        torch.nn.init.normal_(weight, std=0.5)
    for name, weight in in_our_names(weights).items():
        mine[name].data.copy_(weight + 1 if weight.dim() == 1 and "norm" in name else weight)  # theirs is γ − 1
    for name in mine.keys() - in_our_names(weights).keys():  # theirs have no biases there
        assert name.endswith(("norm1.bias", "norm2.bias", "in_proj_bias", "out_proj.bias"))
        torch.nn.init.zeros_(mine[name])
    x = torch.randn(3, 7, WIDTH, dtype=torch.float64)
    outputs = ours(x), theirs(x)
    assert_close(*outputs, rtol=0, atol=1e-12)
    torch.autograd.backward(outputs, [torch.randn_like(outputs[0])] * 2)
    expected = in_our_names({name: weight.grad for name, weight in weights.items()})
    assert_close({name: mine[name].grad for name in expected}, expected, rtol=0, atol=1e-10)
