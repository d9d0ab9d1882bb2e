"""ResFormer against its authors' Llama with grouped queries: logits, and the gradients of all weights, in f64."""

import pytest
import torch
from authors_support import assert_same_language_models, module

from normformer_rs import Transformer, TransformerConfig

AUTHORS = "Zcchill/Value-Residual-Learning", "95652f64aba7db6c095f4e92eafb9e76e6ed9e02"
CHANGES = {"torch.float32": "torch.float64", ".float()": ".double()"}
CHANGES |= {"config.rope_scaling is not None": "False", "config.rope_theta": "10000.0"}  # names of another version
FACTORS = {"0.5*formal_layer_values[0] + 0.5*value": "self.first*formal_layer_values[0] + self.own*value"}
OUTER = {"target_embedding": "model.embed_tokens", "output_projection": "lm_head", "decoder.norm": "model.norm"}
INNER = {"self_attn.out_proj": "self_attn.o_proj", "norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
INNER |= {"linear1": "mlp.gate_proj", "linear2": "mlp.down_proj", "linear3": "mlp.up_proj"}
SHAPE = {"d_model": 16, "d_ff": 12, "heads": 4, "kv_heads": 2, "vocab_size": 11, "norm": "rmsnorm:llama"}
SHAPE |= {"activation": "swiglu", "positions": "rotary", "linear_biases": False, "tie_embeddings": "none"}
SHAPE |= {"architecture": "decoder-only", "encoder_layers": 0, "decoder_layers": 3, "scale_embeddings": False}


def as_ours(weights):
    """Names the authors' weights, or their gradients, as this package does."""
    ours = {f"{name}.weight": weights[f"{theirs}.weight"] for name, theirs in OUTER.items()}
    for a, b in ((f"decoder.layers.{i}.", f"model.layers.{i}.") for i in range(3)):
        ours |= {f"{a}{name}.weight": weights[f"{b}{theirs}.weight"] for name, theirs in INNER.items()}
        ours[a + "self_attn.in_proj_weight"] = torch.cat([weights[f"{b}self_attn.{x}_proj.weight"] for x in "qkv"])
        if b + "self_attn.own" in weights:
            ours[a + "self_attn.value_scale"] = weights[b + "self_attn.own"]
            ours[a + "self_attn.first_value_scale"] = weights[b + "self_attn.first"]
    return ours


@pytest.mark.parametrize(("start", "learned"), [(0.5, False), (0.3, False), (0.5, True)])
def test_value_residual(start, learned, monkeypatch):
    """(0.5, False) is the authors' text, in which both factors are ½; for the others names stand in place of the ½."""
    changes = CHANGES if (start, learned) == (0.5, False) else CHANGES | FACTORS
    monkeypatch.setattr("transformers.utils.doc.get_docstring_indentation_level", lambda _: 4)  # else reads a file
    llama = module(*AUTHORS, "src/modeling/modeling_llama_resformer.py", changes)
    llama.ROPE_INIT_FUNCTIONS = {"default": lambda *_: (10000.0 ** -torch.tensor([0, 0.5]).double(), 1.0)}  # moved
    size = {"hidden_size": 16, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = llama.LlamaConfig(vocab_size=11, num_hidden_layers=3, attn_implementation="eager", **size)
    theirs = llama.LlamaForCausalLM(config).double()
    options = {"value_residual_start": start, "value_residual_learned": learned}
    ours = Transformer(TransformerConfig(residual="value-residual", **SHAPE, **options)).double().eval()
    for attention in (layer.self_attn for layer in theirs.model.layers[1:]):
        factors = torch.full([2, 1], start, dtype=torch.float64)
        attention.own, attention.first = map(torch.nn.Parameter, factors) if learned else factors
    first, weights = ours.state_dict(), dict(theirs.named_parameters())
    assert all(torch.equal(first[name], w) for name, w in as_ours(weights).items() if "norm" in name or "scale" in name)
    assert_same_language_models(ours, theirs, as_ours, lambda ids: ours(None, ids))
