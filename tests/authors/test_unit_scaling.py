"""u-mup against its authors' package unit-scaling: logits, gradients times known factors, steps, first values."""

import functools

import pytest
import torch
from torch.testing import assert_close

from normformer_rs import Transformer, TransformerConfig, param_groups

uu = pytest.importorskip("unit_scaling")  # graphcore-research/unit-scaling a7b5b3cff2a4415d8308eabf5c1793439eee8c1b
SHAPE = {"d_model": 16, "d_ff": 64, "heads": 2, "decoder_layers": 3, "vocab_size": 23, "dropout": 0.0}
SHAPE |= {"architecture": "decoder-only", "activation": "swiglu", "tie_embeddings": "none", "linear_biases": False}
SHAPE |= {"norm": "rmsnorm", "rmsnorm_weight": False, "positions": "none", "parametrisation": "u-mup"}
ALPHAS = {"attn_softmax_alpha": 3.0, "ffn_act_alpha": 0.6, "res_alpha": 0.7, "res_attn_ratio": 1.7}
ALPHAS, SHAPE = ALPHAS | {"output_alpha": 1.3}, SHAPE | {"attention_length": 7}
NAMES = {"layers.": "decoder.layers.", "mhsa.linear_qkv.": "self_attn.in_proj_", "projection": "output_projection"}
NAMES |= {"mlp.linear_gate": "linear1", "mlp.linear_1": "linear3", "mlp.linear_2": "linear2"}
NAMES |= {"mhsa.linear_o": "self_attn.out_proj", "embedding": "target_embedding"}


def named(model):
    """Returns the parameters of the authors' model under our names."""
    return {functools.reduce(lambda n, x: n.replace(*x), NAMES.items(), n): p for n, p in model.named_parameters()}


@pytest.mark.parametrize("alphas", [dict.fromkeys(ALPHAS, 1.0), ALPHAS], ids=["1", "alphas"])
def test_steps(alphas, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # in which RMSNorm computes
    for name, alpha in (("scaled_dot_product_attention", "attn_softmax_alpha"), ("silu_glu", "ffn_act_alpha")):
        scaled, mult = getattr(uu.functional, name), alphas[alpha]
        monkeypatch.setattr(uu.functional, name, lambda *x, f=scaled, m=mult, **o: f(*x, **o | {"mult": m}))
    rule = uu.transformer_residual_scaling_rule(alphas["res_alpha"], alphas["res_attn_ratio"])
    torch.manual_seed(0)
    theirs = uu.TransformerDecoder(16, 23, 3, 2, residual_scaling=rule).double()
    ours, weights = Transformer(TransformerConfig(**SHAPE | alphas)).double(), named(theirs)
    ours.load_state_dict({name: p.detach() for name, p in weights.items()})
    (ids, targets), root = torch.randint(4, 23, (2, 3, 7)), 21**0.5
    factors = {id(p): root / group["eps"] for group in param_groups(ours, 1.0, eps=1.0) for p in group["params"]}
    adams = [uu.optim.AdamW(theirs.parameters(), lr=0.05, eps=1e-3, weight_decay=0.1)]
    adams += [torch.optim.AdamW(param_groups(ours, 0.05, eps=1e-3 / root, weight_decay=0.1))]
    for _ in range(5):
        logits = theirs(ids).flatten(0, 1), ours(None, ids).flatten(0, 1)
        assert_close(logits[0] * alphas["output_alpha"], logits[1], rtol=0, atol=1e-9)
        uu.functional.cross_entropy(logits[0], targets.flatten(), mult=alphas["output_alpha"]).backward()
        torch.nn.functional.cross_entropy(logits[1], targets.flatten()).backward()
        gradients = {name: p.grad * factors[id(p)] for name, p in ours.named_parameters()}
        assert_close(gradients, {name: p.grad for name, p in weights.items()}, rtol=1e-9, atol=1e-9)
        [(adam.step(), adam.zero_grad()) for adam in adams]
        assert_close(dict(ours.named_parameters()), weights, rtol=0, atol=1e-9)


def test_first_values():
    """Standard deviations over 20 models. The first rows are left out: our row of padding is zero."""
    torch.manual_seed(0)
    ours = [dict(Transformer(TransformerConfig(**SHAPE), seed=seed).named_parameters()) for seed in range(20)]
    theirs = [named(uu.TransformerDecoder(16, 23, 3, 2)) for _ in range(20)]
    for name, side in ((name, side) for name in ours[0] for side in (ours, theirs)):
        drawn = torch.stack([model[name].detach()[2:] for model in side])
        assert abs(drawn.std() - 1) < 5 / (2 * drawn.numel()) ** 0.5, name
