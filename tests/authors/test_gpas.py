"""GPAS against its authors' Llama: first gates and norms, then logits and all gradients with random weights, in f64."""

import pytest
import torch
from authors_support import INNER, OUTER, SHAPE, assert_same_language_models, module

from normformer_rs import Transformer, TransformerConfig

AUTHORS = "dandingsky/GPAS", "31980688f4cbb1b0cff59bca9077e6fc52dab3f0"
CHANGES = {"torch.float32": "torch.float64", ".float()": ".double()", "from peft_pretraining import": "import"}
KINDS = {"prenorm": "pre", "ln-scaling": "lns", "sandwich": "sandwich", "deepnorm": "deeppost"}
KINDS |= {"postnorm": "post_pre", "mix-ln": "post_pre"}


def as_ours(weights):
    """Names the authors' weights, or their gradients, as this package does."""
    ours = {f"{a}.weight": weights[f"{b}.weight"] for a, b in OUTER.items() if f"{b}.weight" in weights}
    for a, b in ((f"decoder.layers.{i}.", f"model.layers.{i}.") for i in range(4)):
        norms = sorted(name for name in weights if name.startswith(b) and "norm" in name)  # input, post_…, pre_…
        names = ("norm1", "norm2") if len(norms) == 2 else ("norm1", "post_norm1", "post_norm2", "norm2")
        ours |= {f"{a}{name}.weight": weights[theirs] for name, theirs in zip(names, norms, strict=True)}
        ours |= {f"{a}{name}.weight": weights[f"{b}{theirs}_proj.weight"] for name, theirs in INNER.items()}
        ours[a + "self_attn.in_proj_weight"] = torch.cat([weights[f"{b}self_attn.{x}_proj.weight"] for x in "qkv"])
        ours[a + "forward_gate"] = weights[b + "gpas_block.gate"].reshape(1)
    return ours


@pytest.mark.parametrize("scheme", KINDS)
def test_gpas(scheme, monkeypatch):
    """The authors' model has a norm after any stack; ours has none after postnorm's and deepnorm's, and theirs goes."""
    monkeypatch.setenv("NORM_TYPE", KINDS[scheme] + "_gpas")
    monkeypatch.setenv("POST_NUM", "4" if scheme == "postnorm" else "1")
    monkeypatch.setattr("transformers.utils.doc.get_docstring_indentation_level", lambda _: 4)  # else reads a file
    activations = module(*AUTHORS, "peft_pretraining/custom_activations.py")
    llama = module(*AUTHORS, "peft_pretraining/modeling_llama.py", CHANGES, custom_activations=activations)
    size = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_hidden_layers": 4}
    theirs = llama.LlamaForCausalLM(llama.LlamaConfig(vocab_size=11, **size)).double()
    theirs.model.norm = torch.nn.Identity() if scheme in ("postnorm", "deepnorm") else theirs.model.norm
    options = SHAPE | {"gpas_scheme": scheme, "ln_scaling_mode": "weight"}
    ours = Transformer(TransformerConfig(residual="gpas", **options)).double()
    first, weights = ours.state_dict(), dict(theirs.named_parameters())
    assert all(torch.equal(first[name], w) for name, w in as_ours(weights).items() if "norm" in name or "gate" in name)
    assert_same_language_models(ours, theirs, as_ours, lambda ids: ours(None, ids))
