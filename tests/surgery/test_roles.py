"""What each row of a matrix is for: told by a run, whatever names and layouts a model has, and drawn accordingly."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normformer_rs as nfrs
from normformer_rs.surgery.blocks import structure_of
from normformer_rs.surgery.discover import find_stacks

D, H, FF, L = 32, 4, 48, 2
SHAPE = {"vocab_size": 50, "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": H, "intermediate_size": FF}
GPT = {"vocab_size": 50, "n_embd": D, "n_layer": L, "n_head": H, "n_positions": 32}
FALCON = {"vocab_size": 50, "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": H, "alibi": False}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
APART = "q_proj (query, 4 heads), k_proj (key, 2 heads), v_proj (value, 2 heads), o_proj (output)"
GATED = "gate_proj (fc1), up_proj (gate), down_proj (fc2)"
STACKED = "gate_up_proj (fc1+gate), down_proj (fc2)"
BLOOM = "query_key_value (query+key+value, 4+4+4 heads), dense (output)"
WIDER = "dense_h_to_4h (fc1), dense_4h_to_h (fc2)"
MODELS = {
    "GPT2LMHeadModel": (GPT, ["c_attn (query+key+value, 4+4+4 heads), c_proj (output)", "c_fc (fc1), c_proj (fc2)"]),
    "LlamaForCausalLM": (SHAPE | {"num_key_value_heads": 2}, [APART, GATED]),
    "Olmo2ForCausalLM": (SHAPE | {"num_key_value_heads": 2}, [APART, GATED]),
    "Phi3ForCausalLM": (
        SHAPE | {"num_key_value_heads": 2, "pad_token_id": 0},
        ["qkv_proj (query+key+value, 4+2+2 heads), o_proj (output)", STACKED],
    ),
    "FalconForCausalLM": (
        FALCON | {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False},
        [BLOOM, WIDER],
    ),
    "FalconForCausalLM, parallel": (
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
        [f"query_key_value (query+key+value, 4+2+2 heads), dense (output), {WIDER}"],
    ),
    "PersimmonForCausalLM": (SHAPE, [BLOOM, WIDER]),
    "GPTNeoXForCausalLM": (SHAPE, [f"{BLOOM}, {WIDER}"]),
    "BloomForCausalLM": ({"vocab_size": 50, "hidden_size": D, "n_layer": L, "n_head": H}, [BLOOM, WIDER]),
    "CodeGenForCausalLM": (
        GPT | {"rotary_dim": 4},
        ["qkv_proj (query+value+key, 4+4+4 heads), out_proj (output), fc_in (fc1), fc_out (fc2)"],
    ),
    "DebertaV2Model": (
        SHAPE | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        [
            "query_proj (query, 4 heads), key_proj (key, 4 heads), value_proj (value, 4 heads), dense (output)",
            "dense (fc1), dense (fc2)",
        ],
    ),
    "MixtralForCausalLM": (
        SHAPE | {"num_key_value_heads": 2, "num_local_experts": 4},
        [APART, f"gate (stays), {STACKED}"],
    ),
    "Qwen2MoeForCausalLM": (
        SHAPE
        | {"num_key_value_heads": 2, "moe_intermediate_size": FF, "shared_expert_intermediate_size": FF}
        | {"num_experts": 4, "num_experts_per_tok": 2},
        [APART, f"{GATED}, gate (stays), shared_expert_gate (stays), {STACKED}"],
    ),
    "DeepseekV3ForCausalLM": (
        SHAPE | LATENT | {"num_key_value_heads": H, "first_k_dense_replace": L},
        [
            "q_a_proj (stays), q_b_proj (query, 4 heads), kv_a_proj_with_mqa (key, 1 heads), "
            "kv_b_proj (key+value, 4+4 heads), o_proj (output)",
            GATED,
        ],
    ),
}


def build(name):
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name.partition(",")[0])
    torch.manual_seed(0)
    return kind(kind.config_class(**MODELS[name][0])).eval()


def parts_of(model, example=None):
    (group, *_) = find_stacks(model, example).groups
    return [structure_of(block).parts for block in group.blocks]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(test=3, all=2)
def test_roles_of_a_model(name):
    for parts in parts_of(build(name)):
        assert [str(part) for part in parts] == MODELS[name][1]


class Attention(nn.Module):
    """Attention of one fused matrix, whose rows stand in any order, by any spelling of the products."""

    def __init__(self, order, spelling):
        super().__init__()
        self.mixed, self.last = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.register_buffer("order", order)
        self.spelling = spelling

    def forward(self, x):
        q, k, v = self.mixed(x)[..., self.order].view(*x.shape[:2], 3, H, D // H).permute(2, 0, 3, 1, 4)
        if self.spelling == "operator":
            y = F.scaled_dot_product_attention(query=q, value=v, key=k)
        elif self.spelling == "einsum":
            weights = torch.einsum("bhid,bhjd->bhij", q / D, k).softmax(-1)
            y = torch.einsum("bhij,bhjd->bhid", weights, v)
        elif self.spelling == "bmm":
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            y = torch.bmm(torch.softmax(torch.baddbmm(torch.ones(()), q, k.mT, alpha=0.3), 2), v)
        else:
            y = (v.mT @ (q @ k.mT).softmax(-1).mT).mT
        return self.last(y.reshape(x.shape[0], H, x.shape[1], -1).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention, feed_forward):
        super().__init__()
        self.n1, self.n2, self.one, self.two = nn.LayerNorm(D), nn.LayerNorm(D), attention, feed_forward

    def forward(self, x):
        x = x + self.one(self.n1(x))
        return x + self.two(self.n2(x))


class Gated(nn.Module):
    """(W₁x) ⊙ φ(W₂x) in one matrix, rows in any order."""

    def __init__(self, order, act):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(D, 2 * FF), nn.Linear(FF, D), act
        self.register_buffer("order", order)

    def forward(self, x):
        a, b = self.up(x)[..., self.order].chunk(2, -1)
        return self.down(a * self.act(b))


def stack(attention, feed_forward):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(attention(), feed_forward()) for _ in range(L)), nn.LayerNorm(D)).eval()


X = torch.randn(2, 6, D, generator=torch.Generator().manual_seed(1))


def roles_by_row(linear):
    return [(rows.role, rows.head) for rows in linear.rows for _ in range(rows.size)]


@pytest.mark.parametrize("spelling", ["operator", "einsum", "bmm", "turned"])
def test_any_order_of_rows(spelling):
    order = torch.randperm(3 * D, generator=torch.Generator().manual_seed(2))
    model = stack(lambda: Attention(order, spelling), lambda: Gated(torch.randperm(2 * FF), F.silu))
    for block, (attention, feed_forward) in zip(model, parts_of(model, X)):
        want = [(role, head) for role in ("query", "key", "value") for head in range(H) for _ in range(D // H)]
        assert [roles_by_row(attention.linears[0])[i] for i in order] == want
        found = [role for role, _ in roles_by_row(feed_forward.linears[0])]
        assert [found[i] for i in block.two.order] == ["gate"] * FF + ["fc1"] * FF
        assert attention.linears[1].roles == ("output",) and feed_forward.linears[1].roles == ("fc2",)


@pytest.mark.parametrize("act", [F.silu, F.gelu, torch.sigmoid, lambda x: F.relu(x).square()], ids=range(4))
def test_the_activated_factor_is_fc1(act):
    model = stack(lambda: Attention(torch.arange(3 * D), "operator"), lambda: Gated(torch.arange(2 * FF), act))
    for _, feed_forward in parts_of(model, X):
        assert [(rows.role, rows.size) for rows in feed_forward.linears[0].rows] == [("gate", FF), ("fc1", FF)]


@pytest.mark.parametrize("act", [lambda x: x, lambda x: x * 2.0])
def test_factors_that_cannot_be_told_apart_are_not_drawn(act):
    model = stack(lambda: Attention(torch.arange(3 * D), "operator"), lambda: Gated(torch.arange(2 * FF), act))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(nfrs.InputError, match=r"two\.up is a factor of a product"):
        nfrs.swap_residuals(model, "deepnorm", example=X)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    nfrs.swap_residuals(model, "deepnorm", init=None, example=X)


@pytest.mark.full
def test_rows_are_drawn_by_their_roles():
    """β on values, the output, fc1 and fc2; 1 on queries, keys and the gate: deepnorm's Xavier values, each role for
    itself."""
    order = torch.randperm(3 * D, generator=torch.Generator().manual_seed(2))
    gated = torch.randperm(2 * FF, generator=torch.Generator().manual_seed(3))
    found = {role: [] for role in ("query", "key", "value", "gate", "fc1", "output", "fc2")}
    for seed in range(20):
        model = stack(lambda: Attention(order, "operator"), lambda: Gated(gated, F.silu))
        torch.manual_seed(seed)
        nfrs.swap_residuals(model, "deepnorm", example=X)
        for block in model[:L]:
            for role, rows in zip(("query", "key", "value"), block.one.mixed.weight[order].chunk(3)):
                found[role].append(rows)
            for role, rows in zip(("gate", "fc1"), block.two.up.weight[gated].chunk(2)):
                found[role].append(rows)
            found["output"].append(block.one.last.weight)
            found["fc2"].append(block.two.down.weight)
    beta = (8 * L) ** -0.25
    for role, rows in found.items():
        fan = 2 * D if role in ("query", "key", "value", "output") else D + FF
        right = (1.0 if role in ("query", "key", "gate") else beta) * (2 / fan) ** 0.5
        all_rows = torch.stack(rows)
        assert abs(all_rows.std().item() / right - 1) < 4 / (2 * all_rows.numel()) ** 0.5, role
        assert abs(all_rows.mean().item()) < 4 * right / all_rows.numel() ** 0.5, role


@pytest.mark.parametrize("spelling", ["operator", "einsum"])
def test_values_are_mixed_head_by_head(spelling):
    """value-residual, V ← V/2 + V₁/2, on the rows that make values, compared with the formula."""
    order = torch.randperm(3 * D, generator=torch.Generator().manual_seed(2))
    model = stack(lambda: Attention(order, spelling), lambda: Gated(torch.arange(2 * FF), F.silu)).double()
    x = X.double()
    rows, first = order[2 * D :], {}

    def mix(i):
        def hook(module, args, output):
            first.setdefault("v", output[..., rows])
            return output.index_copy(-1, rows, output[..., rows] / 2 + first["v"] / 2) if i else output

        return hook

    handles = [block.one.mixed.register_forward_hook(mix(i)) for i, block in enumerate(model[:L])]
    right = model(x)
    for handle in handles:
        handle.remove()
    nfrs.swap_residuals(model, "value-residual", init=None, example=x)
    torch.testing.assert_close(model(x), right, rtol=1e-9, atol=1e-9)


class Whole(nn.Module):
    """Attention by another operator: a kernel instead of a softmax."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.last = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        weights = torch.sigmoid(self.q(x) @ self.k(x).mT)
        return self.last(weights @ self.v(x))


def test_an_attention_that_is_not_known_is_refused_where_the_scheme_acts_in_it():
    model = stack(Whole, lambda: Gated(torch.arange(2 * FF), F.silu))
    before = [*model.modules()]
    with pytest.raises(nfrs.InputError, match="does not show which columns"):
        nfrs.swap_residuals(model, "value-residual", init=None, example=X)
    assert before == [*model.modules()] and all(not m._forward_hooks for m in before)
    (swapped, *_) = nfrs.swap_residuals(model, "sandwich", init=None, example=X)
    assert "q (stays)" in swapped.note and "last (output)" in swapped.note


def test_torchs_attention_in_a_block_of_ones_own():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(D, H, batch_first=True)

        def forward(self, x):
            return self.inner(x, x, x, need_weights=False)[0]

    model = stack(Own, lambda: Gated(torch.arange(2 * FF), F.silu))
    for attention, _ in parts_of(model, X):
        assert str(attention) == "in_proj_weight (query+key+value, 4+4+4 heads), out_proj (output)"
    before = model[0].one.inner.in_proj_weight.clone()
    nfrs.swap_residuals(model, "deepnorm", example=X)
    drawn = model[0].one.inner.in_proj_weight
    assert (drawn != before).all(1).all() and 0.3 < drawn[2 * D :].std() / drawn[:D].std() < 0.7


def test_the_run_changes_nothing():
    model = build("GPT2LMHeadModel")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    parts_of(model)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert flags == [p.requires_grad for p in model.parameters()] and all(p.grad is None for p in model.parameters())
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
