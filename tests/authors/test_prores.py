"""ProRes against its authors' Llama and the rule of their training loop: every α, logits and all gradients, in f64."""

import textwrap
import types

import numpy
import pytest
import torch
from authors_support import INNER, OUTER, SHAPE, assert_same_language_models, module, source

from normformer_rs import Transformer, TransformerConfig

AUTHORS = "dandingsky/ProRes", "5253e0dea6cff62f69c8f7fe1cc3151ec572fab6"
CHANGES = {"torch.float32": "torch.float64", ".float()": ".double()"}
KINDS = {"prenorm": "pre", "ln-scaling": "lns", "sandwich": "sandwich", "deepnorm": "deeppost", "postnorm": "post"}


def as_ours(weights):
    """Names the authors' weights, or their gradients, as this package does."""
    ours = {f"{a}.weight": weights[f"{b}.weight"] for a, b in OUTER.items() if f"{b}.weight" in weights}
    for a, b in ((f"decoder.layers.{i}.", f"model.layers.{i}.") for i in range(4)):
        norms = [f"{b}{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")]
        norms += [f"{b}{name}_feedforward_layernorm.weight" for name in ("post", "pre")]
        norms = [name for name in norms if name in weights]  # in alphabetical order, but not in that of a layer
        names = ("norm1", "norm2") if len(norms) == 2 else ("norm1", "post_norm1", "post_norm2", "norm2")
        ours |= {f"{a}{name}.weight": weights[theirs] for name, theirs in zip(names, norms, strict=True)}
        ours |= {f"{a}{name}.weight": weights[f"{b}{theirs}_proj.weight"] for name, theirs in INNER.items()}
        ours[a + "self_attn.in_proj_weight"] = torch.cat([weights[f"{b}self_attn.{x}_proj.weight"] for x in "qkv"])
    return ours


def set_alpha(model, kind, updates, steps):
    """Runs the part of the authors' training loop that gives each layer its α after so many updates."""
    loop = source(*AUTHORS, "torchrun_main.py")
    start, end = "    def get_layerwise_warmup_steps", "        # simply switch to no alpha case"
    rule = textwrap.dedent(loop[loop.index(start) : loop.index(end)])
    given = {"model": types.SimpleNamespace(module=model), "model_config": model.config, "update_step": updates}
    given |= {"args": types.SimpleNamespace(prores_warmup_steps=steps), "norm_type": kind}
    exec(rule, {"np": numpy, "os": types.SimpleNamespace(getenv=lambda _, default: default)} | given)


@pytest.mark.parametrize("updates", [1, 70, 250, 1000])
@pytest.mark.parametrize("scheme", KINDS)
def test_prores(scheme, updates, monkeypatch):
    """T = 100 is the authors' 400 steps for four layers. Our t-th update has their α after t updates, one update
    earlier than theirs. Their model has a norm after any stack; ours has none after postnorm's and deepnorm's."""
    monkeypatch.setenv("NORM_TYPE", KINDS[scheme] + "_prores")
    monkeypatch.setattr("transformers.utils.doc.get_docstring_indentation_level", lambda _: 4)  # else reads a file
    llama = module(*AUTHORS, "peft_pretraining/modeling_llama.py", CHANGES)
    size = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_hidden_layers": 4}
    theirs = llama.LlamaForCausalLM(llama.LlamaConfig(vocab_size=11, **size)).double()
    theirs.model.norm = torch.nn.Identity() if scheme in ("postnorm", "deepnorm") else theirs.model.norm
    options = SHAPE | {"prores_scheme": scheme, "prores_steps": 100, "ln_scaling_mode": "weight"}
    ours = Transformer(TransformerConfig(residual="prores", **options)).double()
    first = ours.state_dict()
    norms = {name: w for name, w in as_ours(dict(theirs.named_parameters())).items() if "norm" in name}
    assert all(torch.equal(first[name], weight) for name, weight in norms.items())
    set_alpha(theirs, KINDS[scheme] + "_prores", updates, 400)
    ours.set_num_updates(updates)
    assert_same_language_models(ours, theirs, as_ours, lambda ids: ours(None, ids))
