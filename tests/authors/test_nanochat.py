"""nanochat's norm, and its whole model against its authors', in f64."""

import copy as copies
import types

import pytest
import torch
from authors_support import module
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from normformer_rs import Transformer, TransformerConfig, nn

AUTHORS = "karpathy/nanochat", "92d63d4e8bb4df75c3b71618f31ddde2378b2bcd"
HEADS, WORDS = 4, 64
IN_F64 = {"logits.float()": "logits", "dtype=torch.float32": "dtype=torch.float64"}
NAMES = {"self_attn.out_proj": "attn.c_proj", "linear1": "mlp.c_fc", "linear2": "mlp.c_proj"}
OUTSIDE = {"target_embedding.weight": "transformer.wte.weight", "output_projection.weight": "lm_head.weight"}
OUTSIDE |= {"decoder.smear_gate.weight": "smear_gate.weight", "decoder.smear_scale": "smear_lambda"}
OPTIONS = {"architecture": "decoder-only", "encoder_layers": 0, "vocab_size": WORDS}
OPTIONS |= {
    "x0_lambdas_backout": True,
    "value_embeddings": True,
    "smear": True,
    "d_model": 32,
    "d_ff": 128,
    "heads": HEADS,
    "dropout": 0.0,
    "residual": "x0-lambdas",
}
OPTIONS |= {"positions": "rotary", "rope_theta": 100000.0, "activation": "relu2", "logit_softcap": 15.0}
OPTIONS |= {"linear_biases": False, "scale_embeddings": False, "tie_embeddings": "none", "norm": "rmsnorm:nanochat"}
OPTIONS |= {"qk_norm": True, "qk_norm_after_rotation": True, "qk_norm_weight": False, "qk_norm_scale": 1.2}
OPTIONS |= {"norm_eps": torch.finfo(torch.float64).eps}  # the authors' norm has the ε of the type that it computes in


OPTIMIZER_IN_F64 = {".float()": "", "dtype=torch.float32": "dtype=torch.float64"}
OPTIMIZER_IN_F64 |= {"@torch.compile(dynamic=False, fullgraph=True)\n": ""}


def nanochat():
    """Runs the authors' gpt.py with their attention and optimizers, in f64 and not compiled."""
    common = types.SimpleNamespace(get_dist_info=None, print0=print, COMPUTE_DTYPE=torch.float64)
    beside = {"nanochat": types.SimpleNamespace(), "nanochat__common": common}
    beside["nanochat__flash_attention"] = module(*AUTHORS, "nanochat/flash_attention.py", **beside)
    beside["nanochat__optim"] = module(*AUTHORS, "nanochat/optim.py", OPTIMIZER_IN_F64, **beside)
    return module(*AUTHORS, "nanochat/gpt.py", IN_F64, **beside)


def as_ours(weights, layers):
    """Names the authors' weights, or their gradients, as this package does. They rotate queries and keys by minus the
    angle, which is the rotation here with the two halves of a head swapped."""
    ours = {name: weights[theirs] for name, theirs in OUTSIDE.items()}
    for i in range(layers):
        a, b = f"decoder.layers.{i}.", f"transformer.h.{i}."
        ours |= {f"{a}{name}.weight": weights[f"{b}{theirs}.weight"] for name, theirs in NAMES.items()}
        q, k, v = (weights[f"{b}attn.c_{x}.weight"] for x in "qkv")
        q, k = (x.unflatten(0, (-1, 2, 32 // HEADS // 2)).flip(1).flatten(0, 2) for x in (q, k))
        ours[a + "self_attn.in_proj_weight"] = torch.cat([q, k, v])
        if f"value_embeds.{i}.weight" in weights:
            ours[a + "self_attn.value_embedding.weight"] = weights[f"value_embeds.{i}.weight"]
            ours[a + "self_attn.value_gate.weight"] = weights[f"{b}attn.ve_gate.weight"]
        ours[a + "stream_scale"] = weights["resid_lambdas"][i : i + 1]
        ours[a + "embedding_scale"] = weights["x0_lambdas"][i : i + 1]
    return {**ours, "decoder.backout_scale": -weights["backout_lambda"]}


def models(kv_heads, layers):
    """Makes our model and theirs, each with its own first values."""
    authors = nanochat()
    sizes = {"n_layer": layers, "n_head": HEADS, "n_kv_head": kv_heads, "n_embd": 32}
    theirs = authors.GPT(authors.GPTConfig(sequence_len=16, vocab_size=WORDS, **sizes))
    theirs.init_weights()
    ours = Transformer(TransformerConfig(**OPTIONS, kv_heads=kv_heads, decoder_layers=layers))
    return ours.double(), theirs.double()


def randomly(model):
    torch.manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)


@pytest.mark.parametrize(("kv_heads", "layers"), [(4, 3), (2, 3), (4, 2), (4, 1), (4, 4)])
def test_model(kv_heads, layers):
    """First lambdas; then logits and all gradients of the whole model with random weights."""
    ours, theirs = models(kv_heads, layers)
    weights, first = dict(theirs.named_parameters()), as_ours(dict(theirs.named_parameters()), layers)
    assert all(torch.equal(w, first[name]) for name, w in ours.named_parameters() if name.endswith("_scale"))
    randomly(theirs)
    ours.load_state_dict(as_ours(weights, layers))
    ids, targets = torch.randint(2, WORDS, (2, 3, 7))
    logits = ours(None, ids)
    assert_close(logits, theirs(ids), rtol=0, atol=1e-12)
    cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    theirs(ids, targets, loss_reduction="sum").backward()
    gradients = as_ours({name: weight.grad for name, weight in weights.items()}, layers)
    assert_close({name: weight.grad for name, weight in ours.named_parameters()}, gradients, rtol=0, atol=1e-11)


def test_five_steps_of_the_two_optimizers():
    """The authors' model trains with its own gradients, and a copy of it with ours: after each of five steps of their
    Muon and AdamW, with weight decay, the weights are equal."""
    ours, theirs = models(2, 3)
    randomly(theirs)
    copy = copies.deepcopy(theirs)
    optimizers = [model.setup_optimizer(weight_decay=0.1) for model in (theirs, copy)]
    for _ in range(5):
        ours.load_state_dict(as_ours(dict(copy.named_parameters()), 3))
        ids, targets = torch.randint(2, WORDS, (2, 3, 7))
        for model in (ours, theirs, copy):
            model.zero_grad()
        theirs(ids, targets).backward()
        cross_entropy(ours(None, ids).flatten(0, 1), targets.flatten()).backward()
        # as_ours is linear and one to one: its transpose carries our gradients to the authors' names.
        named = {name: weight.detach().requires_grad_() for name, weight in copy.named_parameters()}
        mapped, found = as_ours(named, 3), {name: weight.grad for name, weight in ours.named_parameters()}
        assert mapped.keys() == found.keys()
        whole = sum((mapped[name] * gradient).sum() for name, gradient in found.items())
        gradients = torch.autograd.grad(whole, list(named.values()))
        for weight, gradient in zip(copy.parameters(), gradients, strict=True):
            weight.grad = gradient
        before = [weight.clone() for weight in theirs.parameters()]
        for optimizer in optimizers:
            optimizer.step()
        assert not any(torch.equal(*pair) for pair in zip(before, theirs.parameters()))
        assert_close(list(copy.parameters()), list(theirs.parameters()), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("dtype", "eps", "atol"), [(torch.float32, {}, 1e-6), (torch.float64, {"eps": 2**-52}, 1e-12)])
def test_norm(dtype, eps, atol):
    """Outputs and input gradients of numbers so small that ε counts. Ours is by default that of f32, in f64 too."""
    torch.manual_seed(0)
    norm, scale = nn.norm_class("rmsnorm:nanochat")(16, **eps), torch.finfo(dtype).eps ** 0.5
    ours, theirs = ((scale * torch.randn(5, 16, dtype=dtype)).requires_grad_() for _ in range(2))
    theirs.data.copy_(ours.data)
    results, factors = (norm(ours), nanochat().norm(theirs)), torch.randn(5, 16, dtype=dtype)
    assert not list(norm.parameters())
    assert_close(*results, rtol=0, atol=atol)
    for result in results:
        (result * factors).sum().backward()
    assert_close(ours.grad * scale, theirs.grad * scale, rtol=0, atol=atol)
