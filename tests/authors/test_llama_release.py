"""`rmsnorm:llama`, and `rmsnorm` at its own ε, in the whole model of Llama's authors, in f64."""

import types

import pytest
import torch
from authors_support import assert_same_language_models, module

from normformer_rs import Transformer, TransformerConfig

AUTHORS = "meta-llama/llama", "689c7f261b9c5514636ecc3c5fefefcbb3e6eed7", "llama/model.py"
CHANGES = {".float()": ".double()", ".cuda()": "", "@torch.inference_mode()": "@torch.enable_grad()"}
OUTER = {"target_embedding": "tok_embeddings", "output_projection": "output", "decoder.norm": "norm"}
INNER = {"self_attn.out_proj": "attention.wo", "norm1": "attention_norm", "norm2": "ffn_norm"}
INNER |= {f"linear{i}": f"feed_forward.w{i}" for i in (1, 2, 3)}
SHAPE = {"d_model": 16, "d_ff": 42, "heads": 4, "vocab_size": 11, "dropout": 0.0, "activation": "swiglu"}
SHAPE |= {"positions": "rotary", "linear_biases": False, "tie_embeddings": "none", "scale_embeddings": False}
SHAPE |= {"architecture": "decoder-only", "encoder_layers": 0, "decoder_layers": 3, "residual": "prenorm"}


def their_model(options):
    """Returns the authors' model; plain layers stand for fairscale's parallel ones."""
    linear = lambda rows, columns, bias, **_: torch.nn.Linear(rows, columns, bias)  # noqa: E731
    layers = types.SimpleNamespace(ColumnParallelLinear=linear, RowParallelLinear=linear)
    layers.ParallelEmbedding = lambda words, width, **_: torch.nn.Embedding(words, width)
    start = types.SimpleNamespace(get_model_parallel_world_size=lambda: 1)
    parallel = types.SimpleNamespace(initialize=start, layers=layers)
    fairscale = types.SimpleNamespace(nn=types.SimpleNamespace(model_parallel=parallel))
    beside = {f"fairscale__nn__model_parallel__{name}": value for name, value in vars(parallel).items()}
    authors = module(*AUTHORS, CHANGES, **beside, fairscale=fairscale)
    sizes = {"dim": 16, "n_layers": 3, "n_heads": 4, "vocab_size": 11, "multiple_of": 2, "max_seq_len": 16}
    model = authors.Transformer(authors.ModelArgs(**sizes, **options))
    forward = model.forward
    model.forward = lambda ids, **_: [forward(ids, 0)]
    return model


def as_ours(weights):
    """Names the authors' weights, or their gradients, as this package does. They rotate neighbours, x₂ⱼ with x₂ⱼ₊₁;
    here x_j turns with x_{j+2} of a head's four numbers."""
    ours = {f"{a}.weight": weights[f"{b}.weight"] for a, b in OUTER.items()}
    for a, b in ((f"decoder.layers.{i}.", f"layers.{i}.") for i in range(3)):
        ours |= {f"{a}{name}.weight": weights[f"{b}{theirs}.weight"] for name, theirs in INNER.items()}
        q, k, v = (weights[f"{b}attention.w{x}.weight"] for x in "qkv")
        q, k = (x.unflatten(0, (-1, 2, 2)).transpose(1, 2).flatten(0, 2) for x in (q, k))
        ours[a + "self_attn.in_proj_weight"] = torch.cat([q, k, v])
    return ours


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("norm", "options"), [("rmsnorm:llama", {"norm_eps": 1e-6}), ("rmsnorm", {})])
def test_model(norm, options, kv_heads):
    """1e-6 is the ε of the authors' class, 1e-5 that of their models. First norms; then logits and all gradients."""
    theirs = their_model(options | {"n_kv_heads": kv_heads})
    ours = Transformer(TransformerConfig(norm=norm, kv_heads=kv_heads, **SHAPE))
    first = as_ours(dict(theirs.named_parameters()))
    assert all(torch.equal(w, first[name]) for name, w in ours.named_parameters() if "norm" in name)
    ours, theirs = ours.double(), theirs.double()
    assert_same_language_models(ours, theirs, as_ours, lambda ids: ours(None, ids))
