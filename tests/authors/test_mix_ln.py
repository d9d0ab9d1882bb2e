"""Mix-LN against its authors' Llama."""

from types import SimpleNamespace

import pytest
from authors_support import assert_same_language_models, module

import normformer_rs

llama = pytest.importorskip("transformers.models.llama.modeling_llama")
AUTHORS = ("pixeli99/MixLN", "ff458269dff837f1900025fb7cc864b404b9c7e6", "peft_pretraining/modeling_llama.py")
DECORATORS = ("add_start_docstrings", "add_start_docstrings_to_model_forward", "replace_return_docstrings")


def models(layers, options):
    """Returns the authors' model and transformers' own with our scheme, in f64."""
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers, "num_attention_heads": 4}
    configs = [llama.LlamaConfig(vocab_size=11, **shape) for _ in range(2)]  # each keeps its kind of attention
    utils = SimpleNamespace(logging=llama.logging)
    vars(utils).update(dict.fromkeys(DECORATORS, lambda *_, **__: lambda decorated: decorated))
    authors = module(*AUTHORS, {"torch.float32": "torch.float64"}, transformers__utils=utils)
    theirs = authors.LlamaForCausalLM(configs[0]).double()
    ours = llama.LlamaForCausalLM(configs[1]).double()
    normformer_rs.swap_norms(ours, "rmsnorm")  # transformers' computes in f32
    normformer_rs.swap_residuals(ours, "mix-ln", init=None, **options)
    return theirs, ours


def in_our_names(tensors):
    """Returns the authors' parameters, or their gradients, in our names: post-norm layers keep the stock's."""
    ours = {}
    for name, tensor in tensors.items():
        layer, _, norm = name.partition("post_attention_layernorm")
        if norm and layer + "post_feedforward_layernorm.weight" in tensors:
            name = layer + "input_layernorm.weight"
        ours[name.replace("post_feedforward", "post_attention")] = tensor
    return ours


@pytest.mark.parametrize(("layers", "post", "options"), [(4, 1, {}), (7, 1, {}), (6, 3, {"mix_ln_part": 0.5})])
def test_outputs_and_gradients(layers, post, options, monkeypatch):
    """Random weights in place of the first ones. The words' gradient has the input's in it."""
    monkeypatch.setenv("NORM_TYPE", "post_pre")
    monkeypatch.setenv("POST_NUM", str(post))
    theirs, ours = models(layers, options)
    assert_same_language_models(ours, theirs, in_our_names, lambda ids: ours(ids).logits, (1e-11, 1e-10))
