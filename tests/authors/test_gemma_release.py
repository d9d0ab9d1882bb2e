"""`rmsnorm:gemma` in its authors' whole models, Gemma 1 to 3, and `rmsnorm:gemma4` in its authors' class, in f64."""

import types

import pytest
import torch
from authors_support import assert_same_language_models, module
from torch.testing import assert_close

from normformer_rs import Transformer, TransformerConfig, nn

AUTHORS = "google/gemma_pytorch", "014acb7ac4563a5f77c76d7ff98f31b568c16508"
GEMMA4 = "google-deepmind/gemma", "7691fd4e7f26c9ec5db38110dddb3addfab4d767", "gemma/gm/nn/gemma4/_layers.py"
CHANGES = {".float()": ".double()", "requires_grad=False": "requires_grad=True", "@torch.no_grad()": ""}
CHANGES |= {'approximate="tanh"': 'approximate="none"'}  # as our geglu
OUTER = {"target_embedding": "embedder", "decoder.norm": "model.norm"}
INNER = {"self_attn.out_proj": "self_attn.o_proj", "self_attn.in_proj_weight": "self_attn.qkv_proj"}
INNER |= {"linear1": "mlp.gate_proj", "linear2": "mlp.down_proj", "linear3": "mlp.up_proj"}
INNER |= {"self_attn.q_norm": "self_attn.query_norm", "self_attn.k_norm": "self_attn.key_norm"}
NORMS = {"prenorm": {"norm1": "input", "norm2": "post_attention"}}
NORMS["sandwich"] = {"norm1": "input", "post_norm1": "post_attention"}
NORMS["sandwich"] |= {"norm2": "pre_feedforward", "post_norm2": "post_feedforward"}
SIZES = {"d_model": "hidden_size", "d_ff": "intermediate_size", "heads": "num_attention_heads"}
SIZES |= {"kv_heads": "num_key_value_heads", "decoder_layers": "num_hidden_layers", "vocab_size": "vocab_size"}
SHAPE = dict(zip(SIZES, (16, 20, 4, 2, 3, 11), strict=True))
OPTIONS = {"architecture": "decoder-only", "encoder_layers": 0, "activation": "geglu", "positions": "rotary"}
OPTIONS |= {"linear_biases": False, "tie_embeddings": "decoder", "dropout": 0.0, "norm": "rmsnorm:gemma"}
SANDWICH, BOTH = {"residual": "sandwich"}, {"use_pre_ffw_norm": True, "use_post_ffw_norm": True}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
MODELS = {"GEMMA_1": ({"residual": "prenorm"}, {})}
MODELS["GEMMA_2"] = SANDWICH | {"score_softcap": 5.0, "logit_softcap": 3.0}, BOTH | CAPS
MODELS["GEMMA_3"] = SANDWICH | {"qk_norm": True}, BOTH | {"use_qk_norm": True, "rope_wave_length": {}}


def their_model(name, options):
    """Returns the authors' model, which then takes words alone and returns the logits of all of them."""
    vision = types.SimpleNamespace(SiglipVisionModelConfig=object)
    beside = {"gemma__siglip_vision": types.SimpleNamespace(config=vision)}
    changes = {"from .siglip_vision": "from gemma.siglip_vision"}
    config = module(*AUTHORS, "gemma/config.py", changes, **beside, gemma=types.SimpleNamespace())
    gemma = types.SimpleNamespace(config=config, tokenizer=types.SimpleNamespace(Tokenizer=lambda _: None))
    authors = module(*AUTHORS, "gemma/model.py", CHANGES, gemma=gemma)
    sizes = {theirs: SHAPE[ours] for ours, theirs in SIZES.items()} | {"head_dim": 4, "max_position_embeddings": 16}
    model = authors.GemmaForCausalLM(config.GemmaConfig(config.Architecture[name], **sizes, **options))
    forward = model.forward

    def logits(ids, **_):
        places, minus = torch.arange(ids.shape[1]), torch.full((ids.shape[1],) * 2, -torch.inf, dtype=torch.float64)
        caches = [[torch.zeros(*ids.shape, 2, 4, dtype=torch.float64) for _ in "kv"] for _ in range(3)]
        given = {"mask": minus.triu(1), "temperatures": None, "top_ps": None, "top_ks": None}
        return forward(ids, places, None, caches, output_positions=places, **given)[1:]

    model.forward = logits
    return model


def in_our_names(weights, residual):
    ours = {f"{a}.weight": weights[f"{b}.weight"] for a, b in OUTER.items()}
    names = INNER | {name: f"{theirs}_layernorm" for name, theirs in NORMS[residual].items()}
    for i in range(3):
        found = {a: weights.get(f"model.layers.{i}.{b}.weight") for a, b in names.items()}
        found = {a + ".weight" * ("in_proj" not in a): weight for a, weight in found.items() if weight is not None}
        ours |= {f"decoder.layers.{i}.{name}": weight for name, weight in found.items()}
    return ours


@pytest.mark.parametrize("name", MODELS)
def test_gemma(name):
    """First norms; then logits and all gradients. Gemma 2 and 3 with global attention in every layer."""
    options, their_options = MODELS[name]
    theirs = their_model(name, their_options)
    ours = Transformer(TransformerConfig(**SHAPE, **OPTIONS, **options))
    as_ours = lambda weights: in_our_names(weights, options["residual"])  # noqa: E731
    first = as_ours(dict(theirs.named_parameters()))
    assert all(torch.equal(w, first[name]) for name, w in ours.named_parameters() if "norm" in name)
    ours, theirs = ours.double(), theirs.double()
    assert_same_language_models(ours, theirs, as_ours, lambda ids: ours(None, ids))


class Module:  # of flax
    def param(self, name, first, size):
        return self.__dict__.setdefault(name, first(size).double().requires_grad_())


@pytest.mark.parametrize("weighted", [True, False])
def test_gemma4(weighted):
    """Torch's functions stand for those of JAX. The class has no weight where it norms values."""
    jnp = types.SimpleNamespace(mean=torch.mean, square=torch.square, dtype=torch.dtype)
    jnp.expand_dims = lambda x, axis: x[(None,) * len(axis)]
    jax = types.SimpleNamespace(Array=torch.Tensor, lax=torch, numpy=jnp)
    first = types.SimpleNamespace(ones=torch.ones, normal=lambda: None, Initializer=object)
    linen = types.SimpleNamespace(Module=Module, compact=lambda function: function, initializers=first)
    authors = module(*GEMMA4, jax=jax, jax__numpy=jnp, flax=types.SimpleNamespace(linen=linen))
    torch.manual_seed(0)
    theirs = authors.RMSNorm()
    theirs.with_scale = weighted
    ours = nn.norm_class("rmsnorm:gemma4")(16, elementwise_affine=weighted, dtype=torch.float64)
    x = (1e-3 * torch.randn(5, 7, 16, dtype=torch.float64)).requires_grad_()  # so small that ε counts
    theirs(x)
    weights = [theirs.scale] if weighted else []
    for weight in weights:
        assert torch.equal(ours.weight, weight)  # the first values
        torch.nn.init.normal_(weight)
        ours.load_state_dict({"weight": weight})
    results, slope = (ours(x), theirs(x)), torch.randn(5, 7, 16, dtype=torch.float64)
    assert_close(*results, rtol=0, atol=1e-12)
    found = torch.autograd.grad(results[0], [x, *ours.parameters()], slope)
    assert_close(found, torch.autograd.grad(results[1], [x, *weights], slope), rtol=0, atol=1e-10)
