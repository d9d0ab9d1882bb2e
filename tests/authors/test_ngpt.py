"""nGPT's whole model against its authors', in f64: first values, logits, all gradients, and five steps with unit
matrices. Positions are left out: the release's rotary embedding scales pairs of numbers and does not rotate them."""

import types

import pytest
import torch
from authors_support import module
from test_justnorm import AUTHORS, IN_F64, attend
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from normformer_rs import Transformer, TransformerConfig, unit_matrices_

D, HEADS, LAYERS, WORDS = 16, 2, 3, 11
OPTIONS = {"architecture": "decoder-only", "encoder_layers": 0, "decoder_layers": LAYERS, "d_model": D, "d_ff": 4 * D}
OPTIONS |= {"vocab_size": WORDS, "heads": HEADS, "dropout": 0.0, "residual": "ngpt", "logit_scale": True}
OPTIONS |= {"activation": "swiglu", "positions": "none", "linear_biases": False, "tie_embeddings": "none"}
OPTIONS |= {"scale_embeddings": False}
COLUMNS = "att_c_proj", "mlp_c_proj"  # train.py's normalize_matrices takes all other matrices by rows


def as_ours(weights):
    """Names the authors' weights, or their gradients, as this package does."""
    named = {"transformer.wte.weight": "target_embedding.weight", "lm_head.weight": "output_projection.weight"}
    ours = {name: weights[theirs] for theirs, name in named.items()} | {"output_projection.scale": weights["sz"]}
    for i in range(LAYERS):
        a, b = f"decoder.layers.{i}.", f"transformer.h.{i}."
        ours[a + "self_attn.in_proj_weight"] = torch.cat([weights[f"{b}{x}.weight"] for x in ("query", "key", "value")])
        ours[a + "self_attn.out_proj.weight"] = weights[b + "att_c_proj.weight"]
        gate, first = weights[b + "c_fc.weight"].chunk(2)
        ours |= {a + "linear1.weight": first, a + "linear3.weight": gate}
        ours[a + "linear2.weight"] = weights[b + "mlp_c_proj.weight"]
        gate, first = weights[b + "suv"].chunk(2)
        ours |= {a + "linear1_scale": first, a + "linear3_scale": gate, a + "self_attn.qk_scale": weights[b + "sqk"]}
        ours |= {a + "share1": weights[b + "attn_alpha"], a + "share2": weights[b + "mlp_alpha"]}
    return ours


@pytest.fixture
def models():
    flash = types.SimpleNamespace(flash_attn_func=attend, flash_attn_qkvpacked_func=None)
    authors = module(*AUTHORS, IN_F64, flash_attn=flash, model=types.SimpleNamespace())
    authors.apply_rotary_position_embeddings = lambda position, q, k: (q, k)
    sizes = {"vocab_size": WORDS, "n_layer": LAYERS, "n_head": HEADS, "n_embd": D}
    theirs = authors.GPT(authors.GPTConfig(**sizes, base_scale=D**-0.5, use_nGPT=1)).double()
    return Transformer(TransformerConfig(**OPTIONS)).double(), theirs


def test_first_values(models):
    ours, theirs = models
    first = as_ours(dict(theirs.named_parameters()))
    for name, p in ours.named_parameters():
        assert p.shape == first[name].shape, name
        if p.dim() == 1:
            assert_close(p, first[name], rtol=0, atol=1e-15)


def test_model_and_five_steps(models):
    ours, theirs = models
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ours.load_state_dict(as_ours(theirs.state_dict()))
    batches = torch.randint(2, WORDS, (5, 2, 3, 7))  # 0 and 1 are BOS and padding
    optimizers = [torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.0) for model in models]
    for step, (ids, targets) in enumerate(batches):
        for optimizer in optimizers:
            optimizer.zero_grad()
        logits = ours(None, ids)
        expected, _ = theirs(ids, targets)
        assert_close(logits, expected, rtol=0, atol=1e-12)
        cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
        if step == 0:
            gradients = as_ours({name: p.grad for name, p in theirs.named_parameters()})
            assert_close({name: p.grad for name, p in ours.named_parameters()}, gradients, rtol=0, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
        names = unit_matrices_(ours)
        with torch.no_grad():
            for name, p in theirs.named_parameters():
                if p.dim() > 1:
                    p.div_(p.norm(dim=0 if name.removesuffix(".weight").endswith(COLUMNS) else 1, keepdim=True))
        assert len(names) == 2 + 5 * LAYERS
        assert_close(dict(ours.named_parameters()), as_ours(theirs.state_dict()), rtol=0, atol=1e-12)
