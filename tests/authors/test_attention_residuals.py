"""attnres against flash-linear-attention's Transformer: first values, logits and all gradients, in f64."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from authors_support import assert_same_language_models, module

from normformer_rs import Transformer, TransformerConfig

AUTHORS = "fla-org/flash-linear-attention", "bc3b101dcb713ddc5bd8924b66754eb68b5ccf89"
CHANGES = {'_tied_weights_keys = ["lm_head.weight"]': "_tied_weights_keys = None"}  # a list is transformers 4's
OUTER = {"target_embedding": "model.embeddings", "output_projection": "lm_head", "decoder.norm": "model.norm"}
INNER = {"self_attn.out_proj": "attn.o_proj", "linear1": "mlp.gate_proj", "linear2": "mlp.down_proj"}
INNER |= {"linear3": "mlp.up_proj", "norm1": "attn_norm", "norm2": "mlp_norm"}
SHAPE = {"d_model": 8, "d_ff": 12, "heads": 2, "vocab_size": 11, "norm": "rmsnorm:llama", "dropout": 0.0}
SHAPE |= {"activation": "swiglu", "positions": "none", "linear_biases": False, "tie_embeddings": "none"}
SHAPE |= {"architecture": "decoder-only", "encoder_layers": 0, "decoder_layers": 4, "scale_embeddings": False}


class Attention(torch.nn.Module):
    """Stands in for one that runs on GPUs alone; without positions."""

    def __init__(self, hidden_size, num_heads, **_):
        super().__init__()
        self.heads = num_heads
        for name in "qkvo":
            setattr(self, f"{name}_proj", torch.nn.Linear(hidden_size, hidden_size, bias=False))

    def forward(self, hidden_states, **_):
        projected = (getattr(self, f"{name}_proj")(hidden_states) for name in "qkv")
        heads = (x.unflatten(2, (self.heads, -1)).transpose(1, 2) for x in projected)
        o = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o_proj(o.transpose(1, 2).flatten(2)), None, None


class FeedForward(torch.nn.Module):
    """Stands in for one that runs on GPUs alone."""

    def __init__(self, hidden_size, intermediate_size, **_):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(hidden_size, intermediate_size, bias=False) for _ in range(2))
        self.down_proj = torch.nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x, **_):
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def their_model(block):
    """Returns the authors' model, with the function that they test their kernels against."""
    einsum = SimpleNamespace(einsum=lambda x, y, pattern: torch.einsum(pattern.replace(" ", ""), x, y))
    naive = module(*AUTHORS, "fla/ops/attnres/naive.py", {".float()": ".double()"}, einops=einsum).naive_attnres
    beside = {"fla__layers__attn": SimpleNamespace(Attention=Attention), "fla__modules__l2warp": MagicMock()}
    beside |= {
        "fla__modules": MagicMock(GatedMLP=FeedForward),
        "fla__ops__attnres": SimpleNamespace(fused_attnres=naive),
    }
    beside |= {"fla__models__utils": SimpleNamespace(Cache=None, FLAGenerationMixin=type("Mixin", (), {}))}
    folder, name = "fla/models/transformer", "fla__models__transformer__configuration_transformer"
    beside[name] = module(*AUTHORS, f"{folder}/configuration_transformer.py")
    size = {"hidden_size": 8, "intermediate_size": 12, "num_heads": 2, "num_hidden_layers": 4, "vocab_size": 11}
    config = beside[name].TransformerConfig(**size, attnres_block_size=block, fuse_norm=False)
    authors = module(*AUTHORS, f"{folder}/modeling_transformer.py", CHANGES, **beside)
    return authors.TransformerForCausalLM(config)


def as_ours(weights):
    """Names the authors' weights, or their gradients, as this package does; the first sublayer's query is unused."""
    ours = {f"{a}.weight": weights[f"{b}.weight"] for a, b in OUTER.items()}
    queries = {"end_depth_{}": "model.res"}
    for a, b in ((f"layers.{i}.", f"model.layers.{i}.") for i in range(4)):
        ours |= {f"decoder.{a}{name}.weight": weights[f"{b}{theirs}.weight"] for name, theirs in INNER.items()}
        queries |= {f"{a}depth_{{}}1": f"{b}attn_res", f"{a}depth_{{}}2": f"{b}mlp_res"}
        qkv = [weights[f"{b}attn.{x}_proj.weight"] for x in "qkv"]
        ours[f"decoder.{a}self_attn.in_proj_weight"] = torch.cat(qkv)
    del queries["layers.0.depth_{}1"]
    ours |= {f"decoder.{a}".format("query"): weights[f"{b}_proj.weight"].flatten() for a, b in queries.items()}
    return ours | {f"decoder.{a}".format("gain"): weights[f"{b}_norm.weight"] for a, b in queries.items()}


@pytest.mark.parametrize("block", [1, 2, 4])
def test_attnres(block):
    """The full form, and blocks of two and of four sublayers."""
    theirs, ours = their_model(block), Transformer(TransformerConfig(residual="attnres", attnres_block=block, **SHAPE))
    first, weights = ours.state_dict(), as_ours(dict(theirs.named_parameters()))
    assert all(torch.equal(first[name], w) for name, w in weights.items() if "depth" in name or "norm" in name)
    ours = ours.double()
    assert_same_language_models(ours, theirs.double(), as_ours, lambda ids: ours(None, ids))
