"""gpt2, mup, depth-mup and completep against nanoGPT and nanoGPT-mup: outputs, gradients, first values and groups."""

import pytest
import torch
from authors_support import assert_same_language_models, module
from torch.testing import assert_close

from normformer_rs import Transformer, TransformerConfig, param_groups

NANOGPT = "karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291", "model.py"
NANOGPT_MUP = "EleutherAI/nanoGPT-mup", "6f8bc3bdc744556141255f810a22387b2255b6c1", "model.py"
SHAPE = {"d_model": 24, "d_ff": 96, "heads": 3, "decoder_layers": 6, "vocab_size": 11, "encoder_layers": 0}
SHAPE |= {"architecture": "decoder-only", "positions": "learned", "max_positions": 16, "scale_embeddings": False}
SHAPE |= {"activation": "gelu", "residual": "prenorm", "norm": "layernorm", "init": "gpt2", "dropout": 0.0}
SCALED = {"base_width": 8, "input_alpha": 3.0, "output_alpha": 0.5}
OURS = {"gpt2": {}, "mup": SCALED | {"parametrisation": "mup"}}
OURS |= {name: SCALED | {"parametrisation": name, "base_depth": 2} for name in ("depth-mup", "completep")}
MUP = {"mup_enabled": True, "mup_width_multiplier": 3.0, "mup_input_alpha": 3.0, "mup_output_alpha": 0.5}
DEPTH = MUP | {"depth_alpha_enabled": True, "depth_multiplier": 3.0}
THEIRS = {"gpt2": {}, "mup": MUP, "depth-mup": DEPTH | {"depth_alpha_exp": 0.5}}
THEIRS |= {"completep": DEPTH | {"depth_alpha_exp": 1.0}}
NAMES = {"transformer.h": "decoder.layers", "transformer.wte": "embedding", "transformer.ln_f": "decoder.norm"}
NAMES |= {"transformer.wpe": "target_position_embedding", "attn.c_attn.": "self_attn.in_proj_", "ln_": "norm"}
NAMES |= {"attn.c_proj": "self_attn.out_proj", "mlp.c_fc": "linear1", "mlp.c_proj": "linear2"}
pytestmark = pytest.mark.parametrize("name", OURS)


def as_ours(weights):
    """Names the authors' weights, or their gradients, as this package does."""
    ours = {}
    for name, weight in weights.items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        ours[name] = weight
    return ours


def their_model(name):
    """Returns the authors' model, which gives all logits only where it is given targets."""
    authors = module(*(NANOGPT if name == "gpt2" else NANOGPT_MUP))
    size = {"block_size": 16, "vocab_size": 11, "n_layer": 6, "n_head": 3, "n_embd": 24}
    model = type("GPT", (authors.GPT,), {"forward": lambda self, ids, **_: authors.GPT.forward(self, ids, ids)})
    return model(authors.GPTConfig(**size, **THEIRS[name]))


def our_model(name, **options):
    torch.manual_seed(0)
    return Transformer(TransformerConfig(**SHAPE | OURS[name] | options))


def test_outputs_and_gradients(name):
    ours = our_model(name).double()
    assert_same_language_models(ours, their_model(name).double(), as_ours, lambda ids: ours(None, ids))


def test_first_values(name, monkeypatch):
    """The authors' matrices get their standard deviations in place of draws; ours are those of Xavier's initialisation,
    from the same seed, times its standard deviation's ratio to theirs. Xavier's tables have that of the base model."""
    with monkeypatch.context() as held:
        held.setattr(torch.nn.init, "normal_", lambda weight, mean=0.0, std=1.0: weight.data.fill_(std))
        expected = as_ours(dict(their_model(name).named_parameters()))
    xavier = our_model(name, init="xavier").state_dict()
    for path, value in our_model(name).named_parameters():
        if value.ndim == 2:
            fans = 2 * 24 if "self_attn" in path else sum(value.shape)
            std = OURS[name].get("base_width", 24) ** -0.5 if "embedding" in path else (2 / fans) ** 0.5
            assert_close(value, xavier[path] / std * expected[path], rtol=1e-6, atol=0)
        else:
            assert_close(value, expected[path], rtol=0, atol=0)


def test_groups(name):
    """Each parameter's rate, decay and ε. Where the papers differ ours are the papers' (spec.md, 3.7): ε falls with the
    width under mup, too, and outside layers not with the depth, as the authors' code has it since January 2026."""
    theirs, given = their_model(name), [0.1, 1e-2, (0.9, 0.95)] + ([] if name == "gpt2" else [1e-8])
    expected, paths = {}, {id(p): path for path, p in as_ours(dict(theirs.named_parameters())).items()}
    for group in theirs.configure_optimizers(*given, "cpu").param_groups:
        rate = group["lr"] * group.get("lr_scale", 1.0)
        expected |= {paths[id(p)]: (rate, group["weight_decay"], group["eps"]) for p in group["params"]}
    ours, found = our_model(name), {}
    paths = {id(p): path for path, p in ours.named_parameters()}
    for group in param_groups(ours, 1e-2, weight_decay=0.1, eps=1e-8):
        found |= {paths[id(p)]: (group["lr"], group["weight_decay"], group["eps"]) for p in group["params"]}
    assert found.keys() == expected.keys()
    for path, (rate, decay, eps) in expected.items():
        factor = 1 / 3 if name == "mup" else 1.0
        if name in ("depth-mup", "completep") and ".layers." not in path:
            factor = 3.0 ** THEIRS[name]["depth_alpha_exp"]
        assert found[path] == pytest.approx((rate, decay, eps * factor), rel=1e-12), path
