"""Sandwich norms against their authors' model, CogView, in f64."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from authors_support import module
from torch.testing import assert_close

from normformer_rs import nn

AUTHORS = "THUDM/CogView", "189a12bbe87227d3d127fa74abe968dd795cad39", "mpu/sparse_transformer.py"
CHANGES = {"@torch.jit.script": "", "from .": "from mpu.", "return gelu_impl(x)": "return torch.nn.functional.gelu(x)"}
NAMES = {"input_layernorm": "norm1", "third_layernorm": "post_norm1", "post_attention_layernorm": "norm2"}
NAMES |= {"fourth_layernorm": "post_norm2", "attention.query_key_value.": "self_attn.in_proj_"}
NAMES |= {"attention.dense": "self_attn.out_proj", "mlp.dense_h_to_4h": "linear1", "mlp.dense_4h_to_h": "linear2"}
EPSILON = 1e-30


class ParallelLinear(torch.nn.Linear):
    """In place of one that is spread over several devices."""

    def __init__(self, inputs, outputs, **options):
        super().__init__(inputs, outputs)


def their_model():
    """Returns the authors' three layers. Their positions are zero, and their GELU, which is tanh's, is made ours."""
    beside = {"initialize": MagicMock(get_model_parallel_world_size=lambda: 1)}
    beside["layers"] = SimpleNamespace(ColumnParallelLinear=ParallelLinear, RowParallelLinear=ParallelLinear)
    beside["utils"] = SimpleNamespace(divide=int.__floordiv__, split_tensor_along_last_dim=lambda x, n: x.chunk(n, -1))
    beside |= {"mappings": MagicMock(), "random": MagicMock()}
    beside = {f"mpu__{name}": made for name, made in beside.items()} | {"mpu": MagicMock(), "deepspeed": MagicMock()}
    beside["deepspeed"].checkpointing.is_configured.return_value = False
    apex = SimpleNamespace(FusedLayerNorm=torch.nn.LayerNorm)
    authors = module(*AUTHORS, CHANGES, apex__normalization__fused_layer_norm=apex, **beside)
    theirs = authors.GPT2ParallelTransformer(3, 8, 2, 9, 0, 0.0, 0.0, 0.0, False, layernorm_epsilon=EPSILON).double()
    theirs.position_embeddings.weight.requires_grad_(False).zero_()
    return theirs


def our_name(name):
    for old, new in (NAMES | {"final_layernorm": "norm"}).items():
        name = name.replace(old, new)
    return name


def test_sandwich():
    """The authors' norms divide x by its largest number, so that 16 bits suffice: with so small an ε both are equal."""
    theirs, layer = their_model(), {"residual": "sandwich", "batch_first": True, "layer_norm_eps": EPSILON}
    ours = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 32, 0.0, "gelu", **layer), 3).double()
    weights = {our_name(name): weight for name, weight in theirs.named_parameters() if weight.requires_grad}
    found = dict(ours.named_parameters())
    assert sorted(found) == sorted(weights)
    for name, weight in weights.items():
        if "norm" in name:
            assert_close(found[name], weight, rtol=0, atol=0)
        found[name].data.copy_(torch.nn.init.normal_(weight, std=0.5))
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    y, expected = ours(x, mask), theirs(x, torch.zeros(3, 5, dtype=torch.long), 0, None, None)[0]
    assert_close(y, expected, rtol=0, atol=1e-12)
    slope = torch.randn_like(y)
    gradients = torch.autograd.grad(y, [x, *(found[name] for name in weights)], slope)
    assert_close(gradients, torch.autograd.grad(expected, [x, *weights.values()], slope), rtol=0, atol=1e-11)
