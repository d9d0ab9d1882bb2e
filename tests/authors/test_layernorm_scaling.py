"""LayerNorm Scaling against its authors' Llama.

Their code compares a name in lower case with LNS, and so never reaches its own branch; here it may.
"""

from types import SimpleNamespace

import pytest
from authors_support import assert_same_language_models, module

import normformer_rs

llama = pytest.importorskip("transformers.models.llama.modeling_llama")
AUTHORS = ("lmsdss/LayerNorm-Scaling", "3ac54dde961b04780b152bc8b38b71b2f8e1c16a", "peft_pretraining/modeling_llama.py")
CHANGES = {"norm_type == 'LNS'": "norm_type == 'lns'", "torch.float32": "torch.float64"}
DECORATORS = ("add_start_docstrings", "add_start_docstrings_to_model_forward", "replace_return_docstrings")


def models():
    """Returns the authors' model and transformers' own with our scheme, in f64. Parameters have the same names."""
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4}
    configs = [llama.LlamaConfig(vocab_size=11, **shape) for _ in range(2)]  # each keeps its kind of attention
    utils = SimpleNamespace(logging=llama.logging)
    vars(utils).update(dict.fromkeys(DECORATORS, lambda *_, **__: lambda decorated: decorated))
    theirs = module(*AUTHORS, CHANGES, transformers__utils=utils).LlamaForCausalLM(configs[0]).double()
    ours = llama.LlamaForCausalLM(configs[1]).double()
    normformer_rs.swap_norms(ours, "rmsnorm")  # transformers' computes in f32
    normformer_rs.swap_residuals(ours, "ln-scaling", init=None)
    return theirs, ours


def test_outputs_and_gradients(monkeypatch):
    """Random weights in place of the first ones. The words' gradient has the input's in it."""
    monkeypatch.setenv("NORM_TYPE", "LNS")
    theirs, ours = models()
    assert_same_language_models(ours, theirs, dict, lambda ids: ours(ids).logits, (1e-11, 1e-10))
