"""`unit_matrices_` on models of several libraries: which matrices, along which dimension, and what is refused."""

import pytest
import torch
from torch import nn

import normformer_rs as nfrs

transformers = pytest.importorskip("transformers")
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
LLAMA = transformers.LlamaConfig(vocab_size=20, **SHAPE)
GPT2 = transformers.GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=4, n_positions=8)
MIXTRAL = transformers.MixtralConfig(vocab_size=20, num_local_experts=3, num_key_value_heads=2, **SHAPE)
COLUMNS = {"o_proj.weight": 0, "down_proj.weight": 0, "down_proj": 1, "gate_up_proj": 2}
CONV1D = {"c_attn.weight": 0, "c_fc.weight": 0, "c_proj.weight": 1}  # they keep (fan_in, fan_out)


def swapped(kind, config):
    model = kind(config)
    nfrs.swap_residuals(model, "prenorm", init=None)
    return model


def of_ours():
    shape = {"d_model": 16, "d_ff": 24, "heads": 4, "encoder_layers": 1, "decoder_layers": 2}
    options = {"output_gate": "head", "activation": "swiglu", "positions": "learned", "max_positions": 9}
    return nn.Sequential(nfrs.Transformer(nfrs.TransformerConfig(vocab_size=20, **shape, **options)))


def of_layers():
    parts = {"output_gate": "element", "activation": "swiglu", "kv_heads": 2}
    layer = nfrs.nn.TransformerDecoderLayer(16, 4, 24, residual="ngpt", **parts)
    return nfrs.nn.TransformerDecoder(layer, 2)


def of_values():
    shape = {"d_model": 16, "d_ff": 24, "heads": 4, "architecture": "decoder-only", "decoder_layers": 2}
    options = {"value_embeddings": True, "smear": True, "kv_heads": 2}
    return nfrs.Transformer(nfrs.TransformerConfig(vocab_size=20, **shape, **options))


WRITERS = {"out_proj.weight": 0, "linear2.weight": 0}
MODELS = {
    "Llama": (lambda: swapped(transformers.LlamaForCausalLM, LLAMA), COLUMNS, 16),
    "GPT-2": (lambda: swapped(transformers.GPT2LMHeadModel, GPT2), CONV1D, 9),
    "normformer_rs.Transformer": (of_ours, WRITERS, 1 + 6 + 2 * 9),
    "normformer_rs.nn": (of_layers, WRITERS, 2 * 9),
    "value embeddings": (of_values, WRITERS, 1 + 2 * 4),
    "torch.nn": (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 24), 2), WRITERS, 2 * 6),
}


@pytest.mark.parametrize("name", MODELS)
def test_each_vector_along_the_width_has_length_one(name):
    build, dimensions, count = MODELS[name]
    model = build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = nfrs.unit_matrices_(model)
    assert len(names) == len({*names}) == count, names
    for path, p in model.named_parameters():
        if path not in names:
            assert torch.equal(p, before[path]), path
            continue
        dimension = next((d for end, d in dimensions.items() if path.endswith(end)), 1)
        lengths = before[path].norm(dim=dimension, keepdim=True)
        torch.testing.assert_close(p.data, before[path] / lengths.clamp_min(1e-12), rtol=0, atol=1e-6, msg=path)


def test_what_is_not_known_is_refused_and_unchanged():
    """Blocks that were not swapped, a router, tables of another model."""
    plain = transformers.GPT2LMHeadModel(GPT2)
    with pytest.raises(nfrs.InputError, match=r"found no matrices in GPT2LMHeadModel: expected a normformer_rs"):
        nfrs.unit_matrices_(plain)
    mixture = swapped(transformers.MixtralForCausalLM, MIXTRAL)
    before = [p.detach().clone() for p in mixture.parameters()]
    with pytest.raises(nfrs.InputError, match=r"mlp.gate.weight is neither of attention nor of a feed-forward"):
        nfrs.unit_matrices_(mixture)
    assert all(map(torch.equal, before, mixture.parameters()))
    for table in (nn.Embedding(3, 16), nn.Conv2d(3, 16, 2), nn.ReLU()):
        with pytest.raises(nfrs.InputError, match=r"tables: a \w+ has no table \(V, d\) among the model's parameters"):
            nfrs.unit_matrices_(of_layers(), [table])
