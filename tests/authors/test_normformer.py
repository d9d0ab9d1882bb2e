"""NormFormer's layers against its authors' code in fairseq, in f64, over a stand-in for fairseq's attention.

The decoder is fairseq's, whose encoder has no NormFormer; the encoder is that of the authors' branch `normformer2`,
which does not scale heads. That branch's decoder transposes the heads that it scales, and is left out.
"""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from authors_support import module
from torch.testing import assert_close

from normformer_rs import nn

PATH = "fairseq/modules/transformer_layer.py"
DECODER = "facebookresearch/fairseq", "3d262bb25690e4eb2e7d3c1309b1e9c406ca4b99", PATH
ENCODER = "facebookresearch/fairseq", "9e80e19e9a4cc18c08144233394c5db18f72e82a", PATH
SWITCHES = {"heads": "head_scale", "attn": "attention_norm", "fc": "ffn_norm", "resids": "residual_scale"}
NAMES = {"self_attn_layer_norm": "norm1", "encoder_attn_layer_norm": "norm2", "encoder_attn.": "multihead_attn."}
NAMES |= {"c_attn": "self_attn.head_scale", "attn_ln": "post_norm1", "ffn_layernorm": "inner_norm"}
NAMES |= {"fc": "linear", "w_resid": "residual_scale3", "alpha2": "residual_scale2"}


class Attention(torch.nn.MultiheadAttention):
    """In place of fairseq's, without its past tokens of decoding."""

    def __init__(self, width, heads, **options):
        super().__init__(width, heads)

    def forward(self, query, key, value, key_padding_mask=None, attn_mask=None, **rest):
        return super().forward(query, key, value, key_padding_mask, False, attn_mask)

    def _get_input_buffer(self, state):
        return None


def their_layers(where, kind, cfg):
    utils = SimpleNamespace(get_activation_fn=lambda activation: torch.relu, safe_getattr=getattr)
    kinds = {"LayerNorm": lambda width, export=False: torch.nn.LayerNorm(width), "MultiheadAttention": Attention}
    beside = {"": MagicMock(utils=utils), "__modules": MagicMock(**kinds), "__models__transformer": MagicMock()}
    beside["__modules__quant_noise"] = SimpleNamespace(quant_noise=lambda linear, *rest, **options: linear)
    beside["__modules__fairseq_dropout"] = SimpleNamespace(FairseqDropout=lambda p, module_name: torch.nn.Identity())
    beside |= {"__modules__fused_bias_gelu": MagicMock(has_fused_bias_gelu=False), "__modules__moe": MagicMock()}
    authors = module(*where, **{f"fairseq{name}": made for name, made in beside.items()})
    return torch.nn.ModuleList([getattr(authors, kind)(cfg) for _ in range(2)])


def our_name(name, norms):
    for old, new in ({"final_layer_norm": f"norm{norms}"} | NAMES).items():
        name = name.replace(old, new)
    return name


@pytest.mark.parametrize("on", ["", "heads", "attn", "fc", "resids", "heads attn fc resids"])
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_layers(stack, on):
    """First values of scales and norms; then outputs and gradients of two layers and a norm, with padding."""
    on = on.replace("heads", "").split() if stack == "encoder" else on.split()
    sizes = {"embed_dim": 8, "ffn_embed_dim": 12, "attention_heads": 2, "normalize_before": True}
    cfg = MagicMock(cross_self_attention=False, **{f"scale_{name}": name in on for name in SWITCHES})
    cfg.configure_mock(scale_first_resids=False, quant_noise_pq=0, quant_noise_pq_block_size=8)
    cfg.decoder.configure_mock(**sizes)
    cfg.configure_mock(**{f"encoder_{name}": size for name, size in sizes.items()})
    where, kind = (
        (DECODER, "TransformerDecoderLayerBase") if stack == "decoder" else (ENCODER, "TransformerEncoderLayer")
    )
    theirs = torch.nn.ModuleDict({"layers": their_layers(where, kind, cfg), "norm": torch.nn.LayerNorm(8)}).double()
    options = {f"normformer_{ours}": name in on for name, ours in SWITCHES.items()} | {"normformer_mode": "fairseq"}
    layer = getattr(nn, f"Transformer{stack.title()}Layer")(8, 2, 12, 0.0, residual="normformer", **options)
    ours = getattr(nn, f"Transformer{stack.title()}")(layer, 2).double()
    found = dict(ours.named_parameters())
    names = {name: our_name(name, 3 if stack == "decoder" else 2) for name, _ in theirs.named_parameters()}
    assert sorted(names.values()) == sorted(found)
    for name, weight in theirs.named_parameters():
        if weight.ndim == 1 and "proj" not in name and "fc" not in name:
            assert_close(found[names[name]], weight, rtol=0, atol=0)
        found[names[name]].data.copy_(torch.nn.init.normal_(weight, std=0.5))
    x, memory = (torch.randn(6, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    pads, future = torch.arange(6) >= torch.tensor([[6], [4], [3]]), torch.ones(6, 6, dtype=torch.bool).triu(1)
    expected = x
    for each in theirs["layers"]:
        given = (memory, pads, None, None, None, future, pads) if stack == "decoder" else (pads,)
        expected = each(expected, *given)[0]
    expected, inputs = theirs["norm"](expected)[~pads.T], [x, memory][: 2 if stack == "decoder" else 1]
    y = ours(x, memory, future, None, pads, pads) if stack == "decoder" else ours(x, None, pads)
    assert_close(y[~pads.T], expected, rtol=0, atol=1e-12)
    slope = torch.randn_like(expected)
    gradients = torch.autograd.grad(y[~pads.T], [*inputs, *(found[name] for name in names.values())], slope)
    assert_close(gradients, torch.autograd.grad(expected, [*inputs, *theirs.parameters()], slope), rtol=0, atol=1e-11)
