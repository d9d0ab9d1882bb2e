"""`rmsnorm:olmo` in the whole model of OLMo's authors, with OLMo 2's norms after sublayers and with prenorm, in f64."""

import enum
from unittest.mock import MagicMock

import pytest
import torch
from authors_support import assert_same_language_models, module

from normformer_rs import Transformer, TransformerConfig

AUTHORS = "allenai/OLMo", "59a53e3f68e546330ca5a99ec626e58f9ab96494"
CHANGES = {"from .": "from olmo.", "torch.float32": "torch.float64", "torch.float)": "torch.double)"}
CHANGES |= {".float()": ".double()"}
LAYERS, D_FF = 3, 20
OUTER = {"target_embedding": "wte", "output_projection": "ff_out", "decoder.norm": "ln_f"}
INNER = {"self_attn.out_proj.weight": "attn_out", "self_attn.in_proj_weight": "att_proj", "linear2.weight": "ff_out"}
INNER |= {"norm1.weight": "attn_norm", "norm2.weight": "ff_norm"}
NORMS = {"prenorm": {}, "olmo2": {"self_attn.q_norm.weight": "q_norm", "self_attn.k_norm.weight": "k_norm"}}
OPTIONS = {"architecture": "decoder-only", "encoder_layers": 0, "decoder_layers": LAYERS, "vocab_size": 11}
OPTIONS |= {"d_model": 16, "d_ff": D_FF, "heads": 4, "dropout": 0.0, "activation": "swiglu", "positions": "rotary"}
OPTIONS |= {"linear_biases": False, "scale_embeddings": False, "tie_embeddings": "none", "norm": "rmsnorm:olmo"}


def their_model(kv_heads, **options):
    names = ["beam_search", "exceptions", "initialization", "torch_util"]  # what a forward pass does not need
    beside = {f"olmo__{name}": MagicMock() for name in names} | {"olmo": MagicMock(), "olmo__util": enum}
    beside |= {name: MagicMock() for name in ("omegaconf", "omegaconf__errors", "config", "model")}
    beside["olmo__aliases"] = module(*AUTHORS, "olmo/aliases.py")
    config = module(*AUTHORS, "olmo/config.py", {"from .": "from olmo."}, **beside)
    authors = module(*AUTHORS, "olmo/model.py", CHANGES, **beside, olmo__config=config)
    sizes = {"d_model": 16, "n_heads": 4, "n_layers": LAYERS, "mlp_hidden_size": 2 * D_FF, "vocab_size": 11}
    options |= {"n_kv_heads": kv_heads, "rope": True, "include_bias": False, "weight_tying": False}
    options |= {"layer_norm_type": "rms", "layer_norm_eps": 1e-6, "embedding_size": 11, "max_sequence_length": 16}
    options |= {f"{place}_dropout": 0.0 for place in ("attention", "residual", "embedding")}
    model = authors.OLMo(config.ModelConfig(**sizes, **options), init_params=False)
    forward = model.forward
    model.forward = lambda ids, **_: forward(ids)
    return model


def in_our_names(weights, residual):
    """Of the authors' two joined matrices of a feed-forward, the second is the gate's."""
    ours = {f"{a}.weight": weights[f"transformer.{b}.weight"] for a, b in OUTER.items()}
    for a, b in ((f"decoder.layers.{i}.", f"transformer.blocks.{i}.") for i in range(LAYERS)):
        names = INNER | NORMS[residual]
        ours |= {a + name: weights[f"{b}{theirs}.weight"] for name, theirs in names.items()}
        ours[a + "linear3.weight"], ours[a + "linear1.weight"] = weights[b + "ff_proj.weight"].chunk(2)
    return ours


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("residual", NORMS)
def test_model(residual, kv_heads):
    """First norms; then logits and all gradients with random weights."""
    is_olmo2 = residual == "olmo2"
    theirs = their_model(kv_heads, norm_after=is_olmo2, attention_layer_norm=is_olmo2)
    ours = Transformer(TransformerConfig(**OPTIONS, residual=residual, kv_heads=kv_heads))
    as_ours = lambda weights: in_our_names(weights, residual)  # noqa: E731
    first = as_ours(dict(theirs.named_parameters()))
    assert all(torch.equal(w, first[name]) for name, w in ours.named_parameters() if "norm" in name)
    ours, theirs = ours.double(), theirs.double()
    assert_same_language_models(ours, theirs, as_ours, lambda ids: ours(None, ids))
