"""HybridNorm and HybridNorm* against their authors' dense model, an OLMo, in f64."""

import enum
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from authors_support import assert_same_language_models, module

from normformer_rs import Transformer, TransformerConfig

AUTHORS = "BryceZhuo/HybridNorm", "f0dd60589c4cafcbd5496d60884d2745ff340805"
PACKAGE = {"from .": "from olmo."}
CHANGES = {"torch.float32": "torch.float64", "dtype=torch.float)": "dtype=torch.double)"}
CHANGES |= {
    "q.float(), k.float()": "q, k",
    "last_logits_only: bool = False,": "return_dict=None, last_logits_only=None,",
}
STAR = "_{0:{'attn_norm':True,'ffn_residual':False}}_"  # as in the authors' README
THEIRS = {"d_model": 16, "n_heads": 4, "n_kv_heads": 2, "n_layers": 3, "mlp_hidden_size": 24, "max_sequence_length": 8}
THEIRS |= {"rope": True, "rope_theta": 500, "weight_tying": False, "include_bias": False, "vocab_size": 11}
THEIRS |= {"use_query_norm": True, "use_key_norm": True, "use_value_norm": True, "layer_norm_type": "rms"}
THEIRS |= {"attn_norm": False, "ffn_residual_after_norm": True, "embedding_size": None, "init_device": "cpu"}
OURS = {"d_model": 16, "heads": 4, "kv_heads": 2, "decoder_layers": 3, "encoder_layers": 0, "d_ff": 12, "dropout": 0.0}
OURS |= {"architecture": "decoder-only", "positions": "rotary", "rope_theta": 500, "tie_embeddings": "none"}
OURS |= {"linear_biases": False, "vocab_size": 11, "norm": "rmsnorm", "activation": "swiglu", "scale_embeddings": False}
OUTER = {"target_embedding.weight": "wte.weight", "output_projection.weight": "ff_out.weight"}
OUTER |= {"decoder.norm.weight": "ln_f.weight"}


def as_ours(weights):
    """Names the authors' weights, or their gradients, as this package does."""
    ours = {a: weights[f"transformer.{b}"] for a, b in OUTER.items()}
    for a, b in ((f"decoder.layers.{i}.", f"transformer.blocks.{i}.") for i in range(3)):
        own = {name.removeprefix(b).removesuffix(".weight"): w for name, w in weights.items() if name.startswith(b)}
        norms = [own.pop(name) for name in ("attn_norm", "ff_norm") if name in own]
        ours |= {f"{a}norm{i}.weight": norm for i, norm in enumerate(norms, 1)}
        ours |= {f"{a}self_attn.{x}_norm.weight": own[f"{x}_norm"] for x in "qkv"}
        ours |= {f"{a}self_attn.in_proj_weight": own["att_proj"], f"{a}self_attn.out_proj.weight": own["attn_out"]}
        ours[f"{a}linear2.weight"] = own["ff_out"]
        ours[f"{a}linear3.weight"], ours[f"{a}linear1.weight"] = own["ff_proj"].chunk(2)
    return ours


@pytest.mark.parametrize("scheme", ["hybridnorm", "hybridnorm-star"])
def test_hybridnorm(scheme):
    """Logits and all gradients with random weights; keys and values have two heads for the queries' four."""
    beside = {"olmo": MagicMock(), "olmo__util": SimpleNamespace(StrEnum=enum.StrEnum), "omegaconf": MagicMock()}
    beside |= {f"olmo__{name}": MagicMock() for name in ("aliases", "beam_search", "exceptions", "torch_util")}
    beside |= {"omegaconf__errors": SimpleNamespace(OmegaConfBaseException=Exception), "config": MagicMock()}
    for name, changes in {"config": PACKAGE, "initialization": {}, "model": PACKAGE | CHANGES}.items():
        made = module(*AUTHORS, f"dense_model/olmo/{name}.py", changes, **beside)
        beside[f"olmo__{name}"] = made
    options = THEIRS | {"norm_pos_special_config": STAR if scheme == "hybridnorm-star" else ""}
    options |= dict.fromkeys(("residual_dropout", "embedding_dropout", "attention_dropout"), 0.0)
    theirs = made.OLMo(beside["olmo__config"].ModelConfig(**options)).double()
    ours = Transformer(TransformerConfig(residual=scheme, **OURS)).double()
    assert_same_language_models(ours, theirs, as_ours, lambda ids: ours(None, ids))
