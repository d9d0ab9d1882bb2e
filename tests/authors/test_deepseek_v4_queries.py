"""`rmsnorm:deepseek-v4` on the queries of its authors' attention, in f64.

The checkout is a copy of the release: its `inference/model.py` is, by git's name of its contents, the one published
with the weights (d53ae0fb332dc62f052c4b2405a9edb72c75ab23).
"""

import types

import pytest
import torch
from authors_support import module
from torch.testing import assert_close

from normformer_rs import nn

AUTHORS = "Mockingjay1316/deepseek-v4-flash-spark", "0825add42734731a285e30f657b0ccfc5bad74c9", "inference/model.py"
NORM = "q *= torch.rsqrt(q.square().mean(-1, keepdim=True) + self.eps)"
CHANGES = {".float()": ".double()", "torch.float32": "torch.float64", "torch.bfloat16": "torch.float64"}
SIZES = {"dim": 16, "n_heads": 4, "head_dim": 8, "rope_head_dim": 4, "q_lora_rank": 12, "window_size": 4}
SIZES |= {"compress_ratios": (0,), "o_groups": 2, "o_lora_rank": 6, "max_seq_len": 16, "max_batch_size": 2}


def attend(q, kv, sink, chosen, scale):  # over the numbers of the positions chosen; -1 is none
    kv = torch.stack([rows[index.clamp(min=0)] for rows, index in zip(kv, chosen.long(), strict=True)])
    scores = (torch.einsum("bshd,bskd->bshk", q, kv) * scale).masked_fill(chosen[:, :, None] < 0, -torch.inf)
    scores = torch.cat([scores, sink[None, None, :, None].expand(*scores.shape[:3], 1)], -1)
    return torch.einsum("bshk,bskd->bshd", scores.softmax(-1)[..., :-1], kv)


def run(norm, scale):
    """Returns the attention's output and all gradients, with `norm` as the statement for the queries."""
    names = ["act_quant", "fp4_act_quant", "fp8_gemm", "fp4_gemm", "sparse_attn", "hc_split_sinkhorn"]
    kernel = types.SimpleNamespace(**dict.fromkeys(names, lambda *_: None))  # numbers stay as precise as they are
    kernel.sparse_attn = attend
    authors = module(*AUTHORS, CHANGES | {NORM: norm}, kernel=kernel, model=types.SimpleNamespace())
    authors.ours = nn.norm_class("rmsnorm:deepseek-v4")(8)
    torch.manual_seed(0)
    attention = authors.Attention(0, authors.ModelArgs(**SIZES)).double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    attention.wq_b.weight.data.mul_(scale)
    x = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    y = attention(x, 0)
    return y, *torch.autograd.grad(y, [x, *attention.parameters()], torch.randn_like(y))


@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["usual", "small"])
def test_attention(scale):
    """Theirs, out of place so that autograd can follow, and ours. With small queries, too, beside which ε counts."""
    theirs, ours = run("q = q * " + NORM.removeprefix("q *= "), scale), run("q = ours(q)", scale)
    assert_close(ours[0], theirs[0], rtol=0, atol=1e-12)
    assert_close(ours[1:], theirs[1:], rtol=0, atol=1e-10)
    assert not list(nn.norm_class("rmsnorm:deepseek-v4")(8).parameters())
