"""Attention modules of others in the places of ours: torch.nn's, one's own, and wrappers of ours."""

import pytest
import torch
from torch import nn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn

D, FF, HEADS = 16, 32, 2
SCHEMES = [entry["name"] for entry in nfrs.tables()["residuals"]]


class Own(nn.Module):
    """Attends with torch.nn.MultiheadAttention's signature, and keeps the masks that it got."""

    def __init__(self, batch_first):
        super().__init__()
        self.batch_first, self.num_heads, self.in_proj_bias, self._qkv_same_embed_dim = batch_first, HEADS, None, True
        self.inner = nn.MultiheadAttention(D, HEADS, batch_first=batch_first)
        self.got = {}

    def forward(self, query, key, value, attn_mask=None, key_padding_mask=None, need_weights=True, is_causal=False):
        self.got = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}
        return self.inner(query, key, value, key_padding_mask, need_weights, attn_mask, is_causal=is_causal)


class Wrapper(nn.Module):
    """Passes calls on, as adapters of whole modules do, but no attributes except torch.nn's."""

    def __init__(self, base):
        super().__init__()
        self.base, self.batch_first = base, base.batch_first

    def forward(self, *inputs, **options):
        return self.base(*inputs, **options)[:2]


MAKERS = {"torch.nn": lambda first: nn.MultiheadAttention(D, HEADS, batch_first=first), "own": Own}


def both(kind, batch_first, **options):
    """torch.nn's layer and ours with the same weights."""
    name = {"encoder": "TransformerEncoderLayer", "decoder": "TransformerDecoderLayer"}[kind]
    made = [getattr(home, name)(D, HEADS, FF, 0.0, batch_first=batch_first, **options) for home in (nn, nfnn)]
    made[1].load_state_dict(made[0].state_dict())
    return made


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("masks", ["none", "bool", "float", "causal"])
@pytest.mark.one_in(test=4, all=3)
def test_another_attention_computes_as_in_torchs_layer(maker, kind, batch_first, masks):
    torch.manual_seed(0)
    layers = both(kind, batch_first)
    x = torch.randn(2, 3, D) if batch_first else torch.randn(3, 2, D)
    inputs = (x, torch.randn_like(x)) if kind == "decoder" else (x,)
    word = "tgt" if kind == "decoder" else "src"
    options, causal = {}, torch.ones(3, 3, dtype=torch.bool).triu(1)
    if masks != "none":
        padding = torch.tensor([[False, False, True], [False] * 3])
        options[f"{word}_key_padding_mask"] = padding
        options[f"{word}_mask"] = causal
        if kind == "decoder":
            options["memory_key_padding_mask"] = padding
        if masks == "float":
            options = {k: torch.zeros(m.shape).masked_fill(m, -torch.inf) for k, m in options.items()}
        if masks == "causal":
            options[f"{word}_is_causal" if kind == "decoder" else "is_causal"] = True
    found = []
    others = {name: MAKERS[maker](batch_first) for name in (["self_attn", "multihead_attn"][: len(inputs)])}
    for layer in layers:
        for name, other in others.items():
            setattr(layer, name, other.zero_grad() or other)
        y = layer(*inputs, **options)
        y.square().sum().backward()
        grads = [p.grad.clone() for other in others.values() for p in other.parameters()]
        found.append((y, grads, [getattr(other, "got", {}) for other in others.values()]))
    torch.testing.assert_close(found[1][:2], found[0][:2], rtol=1e-5, atol=1e-5)
    for mine, its in zip(found[1][2], found[0][2]):
        assert {k: None if m is None else m.dtype for k, m in mine.items()} == {
            k: None if m is None else m.dtype for k, m in its.items()
        }


def test_a_causal_call_without_a_mask_is_causal_with_another_attention():
    _, layer = both("encoder", True)
    mine = layer(x := torch.randn(2, 3, D), is_causal=True)
    other = nn.MultiheadAttention(D, HEADS, batch_first=True)
    other.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = other
    torch.testing.assert_close(layer(x, is_causal=True), mine)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.one_in(test=2)
def test_a_scheme_runs_with_another_attention_or_refuses_it_by_name(scheme):
    torch.manual_seed(0)
    layer = nfnn.TransformerEncoderLayer(D, HEADS, FF, 0.0, batch_first=True, residual=scheme)
    stack, x = nfnn.TransformerEncoder(layer, 3).eval(), torch.randn(2, 3, D)
    want = stack(x)
    needs_ours = any(
        one.self_attn.inside or one.self_attn.reads_apart or one.self_attn.scale is not None for one in stack.layers
    )
    for one in stack.layers:
        other = nn.MultiheadAttention(D, HEADS, bias=one.self_attn.in_proj_bias is not None, batch_first=True)
        other.load_state_dict(one.self_attn.state_dict(), strict=False)
        one.self_attn = other
    if needs_ours:
        with pytest.raises(
            nfrs.InputError, match=rf"self_attn is a torch.*MultiheadAttention, but residual '{scheme}'"
        ):
            stack(x)
    else:
        torch.testing.assert_close(stack(x), want)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.one_in(test=4, all=3)
def test_a_wrapper_of_our_attention_computes_the_scheme_or_is_refused(scheme):
    layer = nfnn.TransformerEncoderLayer(D, HEADS, FF, 0.0, batch_first=True, residual=scheme)
    stack, x = nfnn.TransformerEncoder(layer, 3).eval(), torch.randn(2, 3, D)
    want = stack(x)
    for one in stack.layers:
        one.self_attn = Wrapper(one.self_attn)
    try:
        torch.testing.assert_close(stack(x), want, rtol=0, atol=0)
    except nfrs.InputError as error:
        assert scheme == "value-residual" and "self_attn is a " in str(error)


PARTS = ({"output_gate": "head"}, {"sinks": True}, {"score_softcap": 10.0}, {"qk_norm": True}, {"kv_heads": 1})


@pytest.mark.parametrize("part", [*PARTS, {"positions": "rotary"}], ids=str)
def test_parts_of_attention_refuse_another_by_name(part):
    layer = nfnn.TransformerEncoderLayer(D, HEADS, FF, 0.0, batch_first=True, **part)
    layer.self_attn = nn.MultiheadAttention(D, HEADS, batch_first=True)
    with pytest.raises(nfrs.InputError, match=f"{next(iter(part))}=|changes at"):
        layer(torch.randn(2, 3, D))


@pytest.mark.parametrize("scheme", ["prenorm", "subln"])
def test_lora_on_the_whole_attention_trains(scheme):
    peft = pytest.importorskip("peft")
    found = {}
    for home, options in ((nn, {}), (nfnn, {}), (nfnn, {"residual": scheme, "decoder_layers": None})):
        layer = home.TransformerEncoderLayer(D, HEADS, FF, 0.0, batch_first=True, **options)
        stack = nn.Sequential(layer) if not options else nfnn.TransformerEncoder(layer, 1)
        model = peft.get_peft_model(stack, peft.LoraConfig(target_modules=["self_attn"], r=4)).train()
        model(torch.randn(2, 3, D)).square().sum().backward()
        grads = [n for n, p in model.named_parameters() if p.grad is not None]
        found[home.__name__, bool(options)] = sorted(n.partition("self_attn")[2] for n in grads)
    assert found["torch.nn", False] and len({str(v) for v in found.values()}) == 1
