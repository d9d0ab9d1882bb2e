"""QK-clip against Megatron-LM's: the rows of queries and keys after a clip, for own and for shared keys."""

import ast
import textwrap
import types

import pytest
import torch
from authors_support import source

import normformer_rs as nfrs
from normformer_rs import _core

HEADS, WIDTH, LIMIT = 4, 16, 2.0


def megatron():
    """The two methods of Megatron's attention, as functions. For a negative largest logit they give weights that are
    not numbers; ours stay as they are."""
    path, commit = "megatron/core/transformer/attention.py", "d98e8a64ddf34856e74b24714e3bedb2f5a39553"
    text = source("NVIDIA/Megatron-LM", commit, path)
    (attention,) = [
        node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "SelfAttention"
    ]
    methods = [node for node in attention.body if getattr(node, "name", "") in ("clip_qk", "_clip_linear_qkv")]
    found = {"torch": torch}
    for node in methods:
        exec(textwrap.dedent(" " * node.col_offset + ast.get_source_segment(text, node)), found)
    return found["clip_qk"], found["_clip_linear_qkv"]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_the_clip_is_megatrons(kv_heads):
    clip, of_weight = megatron()
    shape = {"d_model": WIDTH, "d_ff": 8, "heads": HEADS, "kv_heads": kv_heads, "decoder_layers": 1, "vocab_size": 9}
    config = nfrs.TransformerConfig(architecture="decoder-only", linear_biases=False, **shape)
    model = nfrs.Transformer(config, seed=1).double()
    weight = model.get_parameter("decoder.layers.0.self_attn.in_proj_weight")
    logits = torch.tensor([1.0, 5.0, 1.5, 0.5], dtype=torch.float64)
    size, shared = WIDTH // HEADS, HEADS // kv_heads
    # Megatron's rows: for each head of keys, the queries that share it, its keys and its values
    queries, keys, values = (part.detach().unflatten(0, (kv_heads, -1)) for part in weight.split(
        [WIDTH, kv_heads * size, kv_heads * size]
    ))  # fmt: skip
    fused = torch.cat([queries, keys, values], 1).flatten(0, 1).clone()
    stand_in = types.SimpleNamespace(
        config=types.SimpleNamespace(qk_clip=True, qk_clip_threshold=LIMIT, qk_clip_alpha=0.5),
        core_attention=types.SimpleNamespace(current_max_attn_logits=logits),
        linear_qkv=types.SimpleNamespace(weight=torch.nn.Parameter(fused)),
        num_attention_heads_per_partition=HEADS,
        num_query_groups_per_partition=kv_heads,
        query_projection_size=WIDTH,
        kv_projection_size=kv_heads * size,
    )
    stand_in._clip_linear_qkv = types.MethodType(of_weight, stand_in)
    clip(stand_in)
    largest = {f"decoder.layers.0.self_attn.{head}": value for head, value in enumerate(logits.tolist())}
    before = weight.detach().clone()
    _core.clip_queries_and_keys(model._options, *model._tensors()[:2], largest, LIMIT)
    theirs = stand_in.linear_qkv.weight.detach().unflatten(0, (kv_heads, -1))
    expected = torch.cat([part.flatten(0, 1) for part in theirs.split([shared * size, size, size], 1)])
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-15)
    assert not torch.equal(weight, before)
