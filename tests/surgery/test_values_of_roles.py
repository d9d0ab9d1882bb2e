"""First values of swapped models: each role's rows have the mean and the standard deviation that the same init gives
that role in the loop. Which rows are what stands here by hand, from transformers' code."""

import pytest
import torch

from normformer_rs.surgery import residuals, swap_residuals
from normformer_rs.surgery.init import initialise
from reference.init import INIT_NAMES, Linear, matrix_std

transformers = pytest.importorskip("transformers")

D, HEADS, FF, LAYERS, SEEDS = 48, 4, 96, 2, 20
WIDTH = D // HEADS
SIZES = {"hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": FF}
SIZES |= {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = SIZES | {"num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 8}
BY_ADDITIONS = "deepnorm", "subln", "r-fixup"
"""Their constants depend on the number of additions."""
T5 = {"d_model": D, "d_kv": WIDTH, "d_ff": FF, "num_layers": LAYERS, "num_heads": HEADS, "vocab_size": 40}


def repeated(groups, **rows):
    """The roles of the rows of a matrix that has for each group so many rows of one role, so many of the next, …"""
    return [role for role, many in rows.items() for _ in range(many)] * groups


ATTENTION = {"self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v", "self_attn.o_proj": "out"}
GATED = {"gate_proj": "fc1", "up_proj": "gate", "down_proj": "fc2"}
STACKED = {"experts.gate_up_proj": ["fc1"] * 24 + ["gate"] * 24, "experts.down_proj": "fc2"}
BIG_EXPERTS = {"experts.gate_up_proj": ["fc1"] * FF + ["gate"] * FF, "experts.down_proj": "fc2"}
FUSED = {"dense": "out", "dense_h_to_4h": "fc1", "dense_4h_to_h": "fc2"}
FALCON = {"parallel_attn": False, "multi_query": False}
MODELS = {
    "Llama": ("LlamaForCausalLM", GROUPED, ATTENTION | GATED),
    "Phi3": (
        "Phi3ForCausalLM",
        GROUPED,
        {"qkv_proj": repeated(1, q=D, k=2 * WIDTH, v=2 * WIDTH), "o_proj": "out"}
        | {"gate_up_proj": repeated(1, fc1=FF, gate=FF), "down_proj": "fc2"},
    ),
    "Mixtral": ("MixtralForCausalLM", GROUPED | {"num_local_experts": 3}, ATTENTION | BIG_EXPERTS),
    "Qwen2Moe": (
        "Qwen2MoeForCausalLM",
        GROUPED | EXPERTS | {"num_experts": 3, "shared_expert_intermediate_size": 40},
        ATTENTION | GATED | STACKED,
    ),
    "DeepseekV3": (
        "DeepseekV3ForCausalLM",
        SIZES
        | EXPERTS
        | LATENT
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
        {"q_b_proj": "q", "kv_b_proj": repeated(HEADS, k=10, v=8), "o_proj": "out"} | GATED | STACKED,
    ),
    "Falcon, by heads": (
        "FalconForCausalLM",
        SIZES | FALCON,
        FUSED | {"query_key_value": repeated(4, q=12, k=12, v=12)},
    ),
    "Falcon, one key": (
        "FalconForCausalLM",
        SIZES | FALCON | {"multi_query": True},
        FUSED | {"query_key_value": repeated(1, q=D, k=12, v=12)},
    ),
    "Falcon, groups": (
        "FalconForCausalLM",
        SIZES | {"new_decoder_architecture": True, "num_kv_heads": 2},
        FUSED | {"query_key_value": repeated(2, q=24, k=12, v=12)},
    ),
    "GPTNeoX": (
        "GPTNeoXForCausalLM",
        SIZES | {"use_parallel_residual": False},
        FUSED | {"query_key_value": repeated(4, q=12, k=12, v=12)},
    ),
    "Bert": (
        "BertForMaskedLM",
        SIZES,
        {"self.query": "q", "self.key": "k", "self.value": "v", "attention.output.dense": "out"}
        | {"intermediate.dense": "fc1", "output.dense": "fc2"},
    ),
    "T5": (
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0},
        {"Attention.q": "q", "Attention.k": "k", "Attention.v": "v", "Attention.o": "out"}
        | {"wi_0": "fc1", "wi_1": "gate", "wo": "fc2"},
    ),
}


def as_list(rows):
    return [rows] if isinstance(rows, str) else rows


def of_layers(model, roles):
    """Yields, for each role in each matrix of the layers: its key, its place, the matrix, the indices of its rows."""
    for name, parameter in model.named_parameters():
        path = name.removesuffix(".weight")
        ends = [end for end in roles if path.endswith(f".{end}") or (end.startswith("Att") and path.endswith(end))]
        if parameter.dim() < 2 or not ends:
            continue
        layer = next(int(word) for word in path.split(".") if word.isdigit())
        side = "encoder" if path.startswith("encoder.") else "decoder"
        given = roles[max(ends, key=len)]
        rows = [given] * parameter.shape[-2] if isinstance(given, str) else given
        for role in dict.fromkeys(rows):
            at = [i for i, one in enumerate(rows) if one == role]
            yield (name, role), Linear(side, layer + 1, role, "EncDec" in path), parameter, at


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("init", INIT_NAMES)
@pytest.mark.one_in(test=13, all=5)
def test_each_role_has_its_first_values(name, init, monkeypatch):
    """Twenty seeds: mean and standard deviation within five standard errors."""
    kind, sizes, roles = MODELS[name]
    kind = getattr(transformers, kind)
    model, drawn = kind(kind.config_class(**sizes)), {}

    def initialise_often(*given):
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            parameters = {*initialise(*given)}
            for where, linear, parameter, rows in of_layers(model, roles):
                if parameter in parameters:
                    drawn.setdefault(where, (linear, []))[1].append(parameter.data[..., rows, :].clone())
        return [*parameters]

    monkeypatch.setattr(residuals, "initialise", initialise_often)
    swap_residuals(model, "prenorm", init=init)
    assert {linear.role for linear, _ in drawn.values()} == {role for rows in roles.values() for role in as_list(rows)}
    is_pair = name == "T5"
    config = {"d_model": D, "heads": HEADS, "d_ff": FF, "init": init, "decoder_layers": LAYERS}
    config |= {"encoder_layers": LAYERS} if is_pair else {"encoder_layers": 0, "architecture": "decoder-only"}
    if name == "Falcon, groups" and init in BY_ADDITIONS:
        config["decoder_layers"] = LAYERS // 2  # it adds attention and feed-forward at once
    for where, (linear, samples) in drawn.items():
        assert len(samples) == SEEDS
        fan_out, fan_in = samples[0].shape[-2:]
        expected = matrix_std(config, linear, fan_out, fan_in)
        if is_pair and linear.role == "q":
            expected *= WIDTH**-0.5  # T5 does not divide its scores by √d_head
        values = torch.stack(samples).double()
        error = expected / values.numel() ** 0.5
        assert abs(values.mean()) <= 5 * error, where
        assert abs(values.std() - expected) <= 5 * error, where
