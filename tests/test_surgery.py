"""Norms and residual schemes swapped into models that somebody else wrote."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import normformer_rs as nfrs
from normformer_rs import nn as nfnn
from normformer_rs import surgery
from normformer_rs.surgery import swap_norms, swap_residuals

NORMS = [entry["name"] for entry in nfrs.tables()["norms"]]
RESIDUALS = [entry["name"] for entry in nfrs.tables()["residuals"]]
D, HEADS, FF = 16, 4, 32
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested tensors")


def torchs_encoder(**options):
    layer = nn.TransformerEncoderLayer(D, HEADS, FF, 0.1, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2)


def torchs_transformer():
    return nn.Transformer(D, HEADS, 2, 3, FF, 0.1, batch_first=True)


class Task(nn.Module):
    """Embeds tokens, runs a model of torch.nn, and predicts each token again."""

    def __init__(self, model):
        super().__init__()
        self.embedding, self.model = nn.Embedding(11, D), model

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = self.model(x, x) if isinstance(self.model, nn.Transformer) else self.model(x)
        logits = x @ self.embedding.weight.T
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def hugging_face(name):
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 40, "pad_token_id": 0}
    if name == "bert":
        config = transformers.BertConfig(
            hidden_size=D, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=FF, **common
        )
        return transformers.BertForMaskedLM(config)
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=D, n_layer=2, n_head=HEADS, n_positions=32, bos_token_id=1, eos_token_id=2, **common
        )
        return transformers.GPT2LMHeadModel(config)
    if name.startswith("t5"):
        config = transformers.T5Config(
            d_model=D,
            d_kv=6 if "gated" in name else 4,  # T5 1.1 small: heads·d_kv is not d_model, nor does heads divide it
            d_ff=FF,
            num_layers=2,
            num_heads=3 if "gated" in name else HEADS,
            feed_forward_proj="gated-gelu" if "gated" in name else "relu",
            decoder_start_token_id=0,
            **common,
        )
        return transformers.T5ForConditionalGeneration(config)
    config = transformers.MarianConfig(
        d_model=D,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=FF,
        decoder_ffn_dim=FF,
        max_position_embeddings=32,
        decoder_start_token_id=0,
        eos_token_id=2,
        forced_eos_token_id=None,
        decoder_vocab_size=40,
        **common,
    )
    return transformers.MarianMTModel(config)


HUGGING_FACE = ["bert", "gpt2", "t5", "t5-gated", "marian"]
MODELS = ["encoder", "transformer", *HUGGING_FACE]


def build(name):
    torch.manual_seed(0)
    if name in HUGGING_FACE:
        return hugging_face(name)
    return Task(torchs_encoder() if name == "encoder" else torchs_transformer())


def run(model):
    """(logits, loss) on fixed tokens."""
    tokens = torch.arange(3, 11).repeat(2, 1)
    if isinstance(model, Task):
        return model(tokens)
    out = model(input_ids=tokens, labels=tokens)
    return out.logits, out.loss


def train(model, optimizer, updates=8):
    model.train()
    losses = []
    for _ in range(updates):
        loss = run(model)[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def state_of(model):
    return {name: (id(p), p.detach().clone()) for name, p in model.state_dict(keep_vars=True).items()}


def assert_same(a, b):
    assert list(a) == list(b)
    for name in a:
        assert a[name][0] == b[name][0] and torch.equal(a[name][1], b[name][1]), name


# Norms


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", MODELS)
def test_norms_swap_train_and_return(name, norm):
    model = build(name).eval()
    before, state = run(model)[0], state_of(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    done = swap_norms(model, norm, optimizer=optimizer)
    olds = [
        m for m in model.modules() if type(m).__name__ in ("LayerNorm", "T5LayerNorm") and type(m) is not nfnn.LayerNorm
    ]
    assert not olds and len(done) >= 5 and not model.training
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    assert len(swap_norms(model, norm)) == 0, "idempotent"
    if norm != "layernorm" or name.startswith("t5"):
        assert not torch.equal(run(model)[0], before)
    back = done.undo()
    assert "bit-equal" in back[0].note
    assert torch.equal(run(model)[0], before)
    assert_same(state_of(model), state)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}

    done = swap_norms(model, norm, optimizer=optimizer)
    losses = train(model, optimizer)
    assert losses[-1] < losses[0]
    norms = [m for m in model.modules() if isinstance(m, nfnn.norm_class(norm))]
    fresh = [p for m in norms for p in m.parameters()]
    assert all(p.grad is not None and p in optimizer.state for p in fresh if p.requires_grad)
    assert "those from before the swap" in done.undo()[0].note
    for key, (identity, value) in state_of(model).items():
        if "norm" in key.lower() or "ln_" in key:
            assert state[key][0] == identity and torch.equal(state[key][1], value), key
    with pytest.raises(ValueError, match="taken back already"):
        done.undo()


def test_the_fast_path_is_off():
    """torch.nn's fused evaluation would compute LayerNorm of whatever weights it finds."""
    model = torchs_encoder()
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[0, -2:] = True
    x = torch.randn(3, 5, D)
    swap_norms(model, "rmsnorm")
    model.eval()
    slow = model(x, src_key_padding_mask=mask)  # parameters need gradients: no fast path
    with torch.no_grad():
        fast = model(x, src_key_padding_mask=mask)
    torch.testing.assert_close(fast[~mask], slow[~mask])
    single = torchs_encoder().layers[0].eval()
    done = swap_norms(single, "scalenorm", filter=lambda name, _: name == "norm1")
    slow = single(x)
    with torch.no_grad():
        torch.testing.assert_close(single(x), slow)
    assert "fast path" in repr(done)
    done.undo()
    assert single.activation_relu_or_gelu == 1


def test_device_dtype_hooks_sharing_mode_and_filter_are_kept():
    model = nn.ModuleDict({"a": nn.LayerNorm(4), "b": nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))})
    model["c"] = model["a"]
    model = model.double()
    model["a"].eval()
    model["a"].weight.requires_grad_(False)
    heard = []
    handle = model["a"].register_forward_hook(lambda *_: heard.append(1))
    model["a"].register_forward_pre_hook(lambda *_: heard.append(2))
    seen = []
    done = swap_norms(
        model, "rmsnorm", filter=lambda name, module: seen.append((name, type(module))) or not name.startswith("b")
    )
    assert model["a"] is model["c"] and type(model["a"]) is nfnn.RMSNorm and type(model["b"][0]) is nn.LayerNorm
    assert ("b.0", nn.LayerNorm) in seen
    assert model["a"].weight.dtype == torch.float64 and not model["a"].training and not model["a"].weight.requires_grad
    model["a"](torch.randn(2, 4).double())
    assert heard == [2, 1]
    handle.remove()
    model["a"](torch.randn(2, 4).double())
    assert heard == [2, 1, 2]
    assert [row.name for row in done] == ["a", "c"]
    done.undo()
    assert model["a"] is model["c"] and type(model["a"]) is nn.LayerNorm
    on_meta = nn.Sequential(nn.LayerNorm(4, device="meta", dtype=torch.bfloat16))
    swap_norms(on_meta, "scalenorm")
    assert on_meta[0].weight.is_meta and on_meta[0].weight.dtype == torch.bfloat16


def test_undo_leaves_what_others_have_changed():
    model = torchs_encoder().eval()
    x, calls = torch.randn(2, 3, D), []
    early = model.layers[0].register_forward_hook(lambda *_: calls.append("early"))
    done = swap_residuals(model, "deepnorm")
    norms = swap_norms(model, "scalenorm")
    late = model.layers[0].register_forward_hook(lambda *_: calls.append("late"))
    model.layers[0].add_module("extra", nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"swap_norms to scalenorm came after swap_residuals to deepnorm .* undo"):
        done.undo()
    assert type(model.layers[0]) is nfnn.TransformerEncoderLayer
    norms.undo(), done.undo()
    assert type(model.layers[0]) is nn.TransformerEncoderLayer and model.layers[0].extra.in_features == 2
    model(x)
    assert calls == ["early", "late"]
    early.remove(), late.remove()
    model(x)
    assert len(calls) == 2
    again = swap_norms(model, "rmsnorm")  # and the way is free for others
    again.undo()


@pytest.mark.parametrize("name", MODELS)
def test_what_comes_back_follows_the_model(name):
    model = build(name)
    plain = copy.deepcopy(model).double().eval()
    norms = swap_norms(model, "scalenorm")
    scheme = swap_residuals(model, "rezero", init=None)
    model.double()
    scheme.undo(), norms.undo()
    assert {t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()} == {torch.float64}
    assert torch.equal(run(model.eval())[0], run(plain)[0])


def test_norms_without_parameters_and_shared_ones():
    model = nn.Sequential(nn.LayerNorm(D, elementwise_affine=False), nn.Linear(D, D)).to("meta", torch.bfloat16)
    swap_norms(model, "batchnorm")
    assert model[0].weight is None and model[0].running_mean.is_meta
    swap_norms(nn.Sequential(nn.LayerNorm(D, elementwise_affine=False)), "powernorm")
    model = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.LayerNorm(D), nn.LayerNorm(D))
    model[2].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    done = swap_norms(model, "scalenorm", optimizer=optimizer)
    assert model[2].weight is model[0].weight and model[3].weight is not model[0].weight
    assert {*optimizer.param_groups[0]["params"]} == {*model.parameters()}
    done.undo()
    assert {*optimizer.param_groups[0]["params"]} == {*model.parameters()}


def test_swaps_that_share_an_optimizer_come_back_in_any_order():
    model = nn.ModuleList([torchs_encoder(), torchs_encoder()])
    names = [{"params": [*part.parameters()]} for part in model]
    for groups in (names, [{"params": [*model.parameters()]}]):
        optimizer = torch.optim.SGD(groups, 0.1)
        before = [[*group["params"]] for group in optimizer.param_groups]
        first, second = (swap_norms(part, "scalenorm", optimizer=optimizer) for part in model)
        extra = nn.Parameter(torch.ones(1))
        optimizer.param_groups[0]["params"].append(extra)
        first.undo()
        inside = {p for group in optimizer.param_groups for p in group["params"]}
        assert inside == {*model.parameters(), extra}
        second.undo()
        before[0].append(extra)
        after = [group["params"] for group in optimizer.param_groups]
        assert [[*map(id, group)] for group in after] == [[*map(id, group)] for group in before]


def test_shared_parameters_stay_with_whoever_keeps_them():
    model = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.LayerNorm(D))
    model[2].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    swap_norms(model, "rmsnorm", filter=lambda name, _: name == "0", optimizer=optimizer)
    assert {*optimizer.param_groups[0]["params"]} == {*model.parameters()}
    model = nn.Sequential(nn.RMSNorm(D), nn.RMSNorm(D))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    swap_norms(model, "layernorm", optimizer=optimizer)
    assert {*optimizer.param_groups[0]["params"]} == {*model.parameters()} and model[1].weight is model[0].weight


def test_what_comes_back_is_in_the_models_mode():
    for before in (False, True):
        for swap in (swap_norms, swap_residuals):
            model = torchs_encoder().train(before)
            done = swap(model, {swap_norms: "scalenorm", swap_residuals: "rezero"}[swap])
            assert {m.training for m in model.modules()} == {before}
            model.train(not before).requires_grad_(False)
            done.undo()
            assert {m.training for m in model.modules()} == {not before}
            if swap is swap_norms:
                assert not any(p.requires_grad for p in model.parameters())


def test_a_swapped_model_without_biases_gets_none():
    model = torchs_encoder(bias=False)
    swap_residuals(model, "subln")
    assert not [name for name, _ in model.named_parameters() if "bias" in name]


def test_reset_parameters_after_a_swap_draws_the_schemes_values():
    layer = nn.TransformerEncoderLayer(64, HEADS, 256, batch_first=True)
    model = nn.TransformerEncoder(layer, 18)
    swap_residuals(model, "deepnorm")
    before = model.layers[0].linear1.weight.std().item()
    model.reset_parameters()
    assert model.layers[0].linear1.weight.std().item() == pytest.approx(before, rel=0.05)


def test_matching_values():
    def swapped(norm, to, init="match"):
        model = nn.Sequential(norm)
        swap_norms(model, to, init=init)
        return model[0]

    norm = nn.LayerNorm(9)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(9.0)), norm.bias.fill_(2.0)
    assert torch.equal(swapped(norm, "layernorm").weight, norm.weight)
    assert torch.equal(swapped(norm, "layernorm").bias, norm.bias)
    assert torch.equal(swapped(norm, "rmsnorm").weight, norm.weight)
    torch.testing.assert_close(swapped(norm, "scalenorm").weight, norm.weight.norm().reshape(1))
    assert swapped(norm, "scalenorm", "default").weight.item() == 3.0
    gain = nfnn.ScaleNorm(9)
    nn.init.constant_(gain.weight, 6.0)
    torch.testing.assert_close(swapped(gain, "rmsnorm").weight, torch.full((9,), 2.0))
    assert swapped(nn.LayerNorm(4, elementwise_affine=False), "rmsnorm").weight is None


def test_the_optimizers_groups_and_states():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.RMSNorm(4))
    groups = [
        {"params": [model[1].weight, model[1].bias, model[3].weight], "weight_decay": 0.0, "lr": 0.5},
        {"params": [*model[0].parameters(), *model[2].parameters()], "weight_decay": 0.1},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    kept = optimizer.state[model[0].weight]
    done = swap_norms(model, "scalenorm", optimizer=optimizer)

    def first_group():
        names = {id(p): name for name, p in model.named_parameters()}
        return [names[id(p)] for p in optimizer.param_groups[0]["params"]]

    assert first_group() == ["1.weight", "3.weight"]
    assert optimizer.param_groups[0]["weight_decay"] == 0.0 and optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.state[model[0].weight] is kept and len(optimizer.state) == 4
    done.undo()
    done = swap_norms(model, "layernorm", optimizer=optimizer)
    assert first_group() == ["1.weight", "1.bias", "3.weight", "3.bias"]
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    before = list(model.modules())
    with pytest.raises(ValueError, match="does not own"):
        swap_norms(model, "scalenorm", optimizer=stranger)
    assert list(model.modules()) == before


def test_bad_input_is_said():
    model = torchs_encoder()
    with pytest.raises(ValueError, match=r"did you mean .scalenorm"):
        swap_norms(model, "scalnorm")
    with pytest.raises(ValueError, match=r"did you mean .match"):
        swap_norms(model, "scalenorm", init="macth")
    with pytest.raises(ValueError, match="register_norm"):
        swap_norms(nn.Linear(2, 2), "scalenorm")
    with pytest.raises(ValueError, match="itself a LayerNorm"):
        swap_norms(nn.LayerNorm(4), "scalenorm")
    with pytest.raises(ValueError, match=r"did you mean .deepnorm"):
        swap_residuals(model, "deepnrm")
    with pytest.raises(ValueError, match=r"known are .*TransformerEncoderLayer.*register_block"):
        swap_residuals(nn.Linear(2, 2), "deepnorm")
    with pytest.raises(ValueError, match=r"did you mean .branchnorm_steps"):
        swap_residuals(model, "branchnorm", branchnorm_step=3)
    with pytest.raises(ValueError, match=r"must be a torch\.nn\.Module"):
        swap_norms("model", "scalenorm")
    with pytest.raises(ValueError, match="depth must be at least 2"):
        swap_residuals(model, "deepnorm", depth=1)
    with pytest.raises(ValueError, match="depth must be one number"):
        swap_residuals(model, "deepnorm", depth=(2, 2))
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    state, kinds = state_of(model), [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match="does not own"):
        swap_residuals(model, "rezero", optimizer=optimizer)
    assert_same(state_of(model), state)
    assert [type(m) for m in model.modules()] == kinds


def test_wrapped_models_are_refused(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(torchs_encoder())
        for swap, to in ((swap_norms, "scalenorm"), (swap_residuals, "deepnorm")):
            with pytest.raises(ValueError, match=r"DistributedDataParallel.*swap first, then wrap"):
                swap(wrapped, to)
            with pytest.raises(ValueError, match="model is wrapped"):
                swap(nn.ModuleDict({"model": wrapped}), to)
    finally:
        dist.destroy_process_group()


# Residual schemes


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("name", MODELS)
def test_residuals_swap_train_and_return(name, residual):
    model = build(name).eval()
    before, state, kinds = run(model)[0], state_of(model), [type(m) for m in model.modules()]
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    if residual == "dlcl" and name in HUGGING_FACE:
        with pytest.raises(ValueError, match="connects layers"):
            swap_residuals(model, residual, optimizer=optimizer)
        return
    done = swap_residuals(model, residual, optimizer=optimizer)
    owned = {id(p) for g in optimizer.param_groups for p in g["params"]}
    assert owned == {id(p) for p in model.parameters()} and not model.training
    assert len(swap_residuals(model, residual)) == 0, "idempotent"
    assert not torch.equal(run(model)[0], before)
    assert "bit-equal" in done.undo()[0].note
    assert torch.equal(run(model)[0], before)
    assert_same(state_of(model), state)
    assert [type(m) for m in model.modules()] == kinds
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}

    options = {"branchnorm_steps": 8} if residual == "branchnorm" else {}
    swap_residuals(model, residual, optimizer=optimizer, **options)
    losses = train(model, optimizer, 12)
    assert min(losses[-3:]) < losses[0]
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing
    if residual == "branchnorm":
        assert {b.item() for n, b in model.named_buffers() if n.endswith(".t")} == {13}


@pytest.mark.parametrize("name", MODELS)
def test_without_a_change_the_blocks_compute_what_they_did(name):
    """The scheme that a model has already, weights kept: the same outputs, by way of the converted blocks."""
    model = build(name).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    before = run(model)[0]
    ends = {n: m for n, m in model.named_modules() if n in ("model.encoder.norm", "model.decoder.norm")}
    swap_residuals(model, "prenorm" if name[:2] in ("gp", "t5") else "postnorm", init=None)
    for end, norm in ends.items():  # torch.nn.Transformer's post-norm stacks have a norm more than the equation
        model.get_submodule(end.removesuffix(".norm")).norm = norm
    torch.testing.assert_close(run(model)[0], before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_cross_attention_and_masks_of_hugging_face(name):
    """Decoders that attend to an encoder's output, with padding on both sides: the converted blocks change nothing."""
    torch.manual_seed(0)
    config = hugging_face(name).config
    config.is_decoder = config.add_cross_attention = True
    transformers = pytest.importorskip("transformers")
    model = {"bert": transformers.BertLMHeadModel, "gpt2": transformers.GPT2LMHeadModel}[name](config).eval()
    tokens, memory = torch.arange(3, 11).repeat(2, 1), torch.randn(2, 5, D)
    mask, memory_mask = torch.ones(2, 8), torch.ones(2, 5)
    mask[0, 6:], memory_mask[1, 3:] = 0, 0
    given = {"attention_mask": mask, "encoder_hidden_states": memory, "encoder_attention_mask": memory_mask}
    before = model(input_ids=tokens, **given).logits
    done = swap_residuals(model, "prenorm" if name == "gpt2" else "postnorm", init=None)
    torch.testing.assert_close(model(input_ids=tokens, **given).logits, before, rtol=1e-5, atol=1e-6)
    done.undo()
    swap_residuals(model, "subln")
    model(input_ids=tokens, **given).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_end_norms_follow_the_scheme():
    """prenorm ends in a norm, deepnorm's last sublayer does: the stack's own goes, or one is added."""
    for name, end in (("gpt2", "transformer.ln_f"), ("t5", "decoder.final_layer_norm")):
        model = hugging_face(name)
        norm = model.get_submodule(end)
        done = swap_residuals(model, "deepnorm")
        assert end in repr(done)
        assert type(model.get_submodule(end)) is nn.Identity
        done.undo()
        swap_residuals(model, "sandwich")
        assert model.get_submodule(end) is norm
    model = hugging_face("bert")
    swap_residuals(model, "prenorm")
    blocks = model.bert.encoder.layer
    assert type(blocks[1].residual.norm) is nfnn.LayerNorm and not hasattr(blocks[0].residual, "norm")
    model = torchs_transformer()
    swap_residuals(model, "rezero")
    assert model.encoder.norm is model.decoder.norm is None


def test_schemes_on_torchs_transformer_are_the_packages():
    """Converted from torch.nn, or built with the scheme: from the same weights the same outputs."""
    for residual in RESIDUALS:
        model = torchs_transformer().eval()
        swap_residuals(model, residual)
        built = nfnn.Transformer(D, HEADS, 2, 3, FF, 0.1, batch_first=True, residual=residual).eval()
        state = {k: v for k, v in model.state_dict().items() if "bias" not in k or residual != "r-fixup"}
        built.load_state_dict(state, strict=True)
        x, y = torch.randn(2, 5, D), torch.randn(2, 4, D)
        torch.testing.assert_close(model(x, y), built(x, y), rtol=1e-5, atol=1e-6)
        constants = [s.alpha for stack in (model.encoder, model.decoder) for s in stack.layers[0].place.sublayers]
        assert constants == [
            s.alpha for stack in (built.encoder, built.decoder) for s in stack.layers[0].place.sublayers
        ]


def test_depth_is_what_the_constants_count():
    model = hugging_face("bert")
    swap_residuals(model, "deepnorm", depth=50)
    assert model.bert.encoder.layer[0].residual.sublayers[0].alpha == pytest.approx(100**0.25)
    model = hugging_face("marian")
    swap_residuals(model, "deepnorm", depth=(6, 6))
    assert model.model.encoder.layers[0].residual.sublayers[0].alpha == pytest.approx(1.4179, abs=1e-4)
    assert model.model.decoder.layers[1].residual.sublayers[2].alpha == pytest.approx(2.0598, abs=1e-4)
    model = torchs_transformer()
    swap_residuals(model, "admin-const", depth=6)
    assert model.encoder.layers[0].place.sublayers[0].alpha == pytest.approx(2.017, abs=1e-3)


class Gemma(nn.Module):
    """RMSNorm whose gain counts from zero, as in the models of that name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(D))

    def forward(self, x):
        return (1 + self.weight) * torch.nn.functional.rms_norm(x, (D,), eps=1e-6)


Gemma.__name__ = "GemmaRMSNorm"


class ChannelsFirst(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class InSingle(nn.LayerNorm):
    """CLIP's kind of subclass."""

    def forward(self, x):
        return super().forward(x.float()).to(x.dtype)


def test_what_only_looks_like_a_norm_is_left_alone():
    model = nn.Sequential(Gemma(), ChannelsFirst(D), InSingle(D))
    swaps = swap_norms(model, "rmsnorm")
    assert [type(m) for m in model] == [Gemma, ChannelsFirst, nfnn.RMSNorm] and len(swaps) == 1


@pytest.mark.parametrize("to", ["layernorm", "rmsnorm"])
def test_epsilon_is_carried_over(to):
    model = nn.Sequential(nn.LayerNorm(D, eps=1e-12))
    swap_norms(model, to)
    assert model[0].eps == 1e-12
    other = nn.Sequential(nn.LayerNorm(D, eps=1e-12))
    swap_norms(other, to, eps=1e-3)
    assert other[0].eps == 1e-3


def test_blocks_that_differ_are_groups_of_their_own():
    """An encoder's and a decoder's layer beside each other; the decoder keeps its attention to the encoder."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.TransformerEncoderLayer(D, HEADS, FF, batch_first=True)
            self.dec = nn.TransformerDecoderLayer(D, HEADS, FF, batch_first=True)

        def forward(self, x):
            return self.dec(torch.ones_like(x), self.enc(x))

    model, x = Model().eval(), torch.randn(2, 5, D)
    expected = model(x)
    print(swaps := swap_residuals(model, "postnorm", init=None))
    assert [row.name for row in swaps][:2] == ["enc", "dec"]
    torch.testing.assert_close(model(x), expected)


def test_layers_of_other_inner_widths_are_one_stack():
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, HEADS, FF, batch_first=True), 3)
    stack.layers[1].linear1, stack.layers[1].linear2 = nn.Linear(D, 2 * FF), nn.Linear(2 * FF, D)
    swap_residuals(stack, "deepnorm")
    assert [(layer.place.layer, layer.place.depth) for layer in stack.layers] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("name", ["marian", "t5"])
def test_profiling_begins_anew_with_each_stack(name):
    model = hugging_face(name)
    swap_residuals(model, "admin")
    tokens = torch.randint(3, 40, (4, 7))
    nfnn.profile(model, input_ids=tokens, labels=tokens)
    for side in (model.get_encoder(), model.get_decoder()):
        blocks = [m for m in side.modules() if hasattr(m, "residual")]
        gains = [p for n, p in blocks[0].residual.named_parameters() if "residual_scale" in n]
        assert torch.allclose(gains[0], torch.ones(1)) and not torch.allclose(gains[1], torch.ones(1)), gains


def test_branchnorm_says_that_t_stays_and_follows_a_later_optimizer():
    model, tokens = hugging_face("bert"), torch.randint(3, 40, (2, 5))
    swap_residuals(model, "branchnorm")
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step():
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    step()
    with pytest.warns(UserWarning, match="t has not moved"):
        step()
    swap_residuals(model, "branchnorm", optimizer=optimizer)
    held = [m for m in model.modules() if getattr(m, "growth", None) is not None]
    step()
    swap_residuals(model, "branchnorm", optimizer=optimizer)  # no second hook
    step()
    assert held and all(int(m.t) == 3 for m in held)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), 1e-3)
    swap_residuals(twin, "branchnorm", optimizer=optimizer)
    optimizer.step()
    assert all(int(m.t) == 4 for m in twin.modules() if getattr(m, "growth", None) is not None)


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_the_schemes_first_values(name):
    """deepnorm's on every linear layer of a block, whichever way round it keeps its matrix."""
    torch.manual_seed(0)
    transformers = pytest.importorskip("transformers")
    model = hugging_face(name)
    config = model.config
    for key in ("hidden_size", "n_embd", "d_model"):
        if key in config.to_dict():
            setattr(config, key, 128)
    for key in ("intermediate_size", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"):
        if key in config.to_dict():
            setattr(config, key, 512)
    if name.startswith("t5"):
        config.d_kv = 32
    model = type(model)(config)
    assert transformers
    swap_residuals(model, "deepnorm")
    both = name.startswith(("t5", "marian"))
    for path, module in model.named_modules():
        if not hasattr(module, "residual"):
            continue
        beta = {"enc": 0.87 * (2**4 * 2) ** (-1 / 16), "dec": (12 * 2) ** -0.25, "one": (8 * 2) ** -0.25}
        beta = beta["one" if not both else "dec" if "decoder" in path else "enc"]
        for part in module.parts():
            for linear in part.linears:
                layer = module.get_submodule(linear.path)
                weight = layer.weight.T if type(layer).__name__ == "Conv1D" else layer.weight
                for role, block in zip(linear.roles, weight.chunk(len(linear.roles))):
                    fan_out, fan_in = block.shape
                    gain = (1.0 if role in ("query", "key") else beta) * (
                        32**-0.5 if role == "query" and name[:2] == "t5" else 1
                    )
                    expected = gain * (2 / (fan_in + fan_out)) ** 0.5
                    assert abs(block.std().item() / expected - 1) < 5 / (2 * block.numel()) ** 0.5, (path, linear)
                if getattr(layer, "bias", None) is not None:
                    assert not layer.bias.any()


@pytest.mark.parametrize(
    "residual,norm",
    [("deepnorm", "scalenorm"), ("branchnorm", "rmsnorm"), ("sandwich", "scalenorm"), ("rezero", None)],
)
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_saved_and_loaded_by_hugging_face(name, residual, norm, tmp_path):
    """The recipe: a subclass that swaps as it is built; from_pretrained then finds every name."""

    def swap(model):
        swap_residuals(model, residual)
        if norm is not None:
            swap_norms(model, norm)
        return model

    model = swap(build(name)).eval()
    kind = type(model)

    class Swapped(kind):
        def __init__(self, config):
            super().__init__(config)
            swap(self)

    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:  # Marian's positions are constants, not saved
                p.add_(0.1 * torch.randn_like(p))
    nfnn.set_num_updates(model, 7)
    model.save_pretrained(tmp_path)
    loaded, report = Swapped.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert torch.equal(run(loaded.eval())[0], run(model)[0])


@pytest.mark.parametrize("name", MODELS)
def test_converted_models_copy_and_pickle(name):
    model = build(name)
    for residual in ("branchnorm", "subln"):
        done = swap_residuals(model, residual)
        model.eval()
        expected = run(model)[0]
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(run(twin)[0], expected)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.5)
            assert torch.equal(run(twin)[0], expected), "the copy stands alone"
            with torch.no_grad():
                for p in model.parameters():
                    p.div_(1.5)
        done.undo()


def test_generation_attentions_and_checkpointing_of_hugging_face():
    for name in HUGGING_FACE:
        model = build(name)
        swap_residuals(model, "deepnorm")
        tokens = torch.arange(3, 8).repeat(2, 1)
        if name != "bert":
            cached, plain = (
                model.eval().generate(tokens, max_new_tokens=4, do_sample=False, use_cache=use) for use in (True, False)
            )
            assert torch.equal(cached, plain)
        model.train()
        for module in model.modules():
            for rate in ("p", "dropout", "activation_dropout", "attention_dropout"):
                if isinstance(getattr(module, rate, None), float):
                    setattr(module, rate, 0.0)
        loss = run(model)[1]
        loss.backward()
        expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.gradient_checkpointing_enable({"use_reentrant": False})
            run(model)[1].backward()
        for n, p in model.named_parameters():
            torch.testing.assert_close(p.grad, expected.get(n), rtol=1e-4, atol=1e-5)


def test_both_swaps_and_admins_profile():
    model = build("bert")
    swap_residuals(model, "admin")
    swap_norms(model, "scalenorm")
    tokens = torch.arange(3, 11).repeat(2, 1)
    assert nfnn.profile(model, input_ids=tokens) == 4
    gains = [p for n, p in model.named_parameters() if "residual_scale" in n]
    assert len(gains) == 4 and all((p == p[0]).all() for p in gains) and gains[0][0] == 1 and gains[3][0] > 1


@pytest.mark.parametrize("name", ["rust", "rust, decoder-only", *MODELS])
def test_admins_gains_fold_into_the_weights(name):
    if name.startswith("rust"):
        shape = {"d_model": D, "heads": HEADS, "d_ff": FF, "encoder_layers": 2, "decoder_layers": 2}
        alone = {"architecture": "decoder-only"} if "only" in name else {}
        model = nfrs.Transformer(nfrs.TransformerConfig(vocab_size=20, residual="admin", **shape | alone))
        tokens = torch.arange(4, 18).reshape(2, 7)
        outputs = lambda: model(None if alone else tokens, tokens)  # noqa: E731
    else:
        model = build(name)
        swap_residuals(model, "admin")
        outputs = lambda: run(model)[0]  # noqa: E731
    gains = [p for n, p in model.named_parameters() if "residual_scale" in n]
    with torch.no_grad():
        for p in gains:
            p.uniform_(0.5, 2)
    model.eval().double()
    expected = outputs()
    stacks = 2 if name in ("rust", "transformer", "t5", "t5-gated", "marian") else 1
    assert surgery.fold_admin(model) == len(gains) - stacks
    assert sum(bool((p == 1).all()) for p in gains) == len(gains) - stacks
    torch.testing.assert_close(outputs(), expected, rtol=1e-9, atol=1e-9)
    assert surgery.fold_admin(model) == len(gains) - stacks  # nothing is left to fold


def test_what_cannot_be_folded():
    with pytest.raises(ValueError, match='holds no layer with residual="admin"'):
        surgery.fold_admin(nfnn.Transformer(D, HEADS, 1, 1, FF, residual="deepnorm"))
    model = nfnn.Transformer(D, HEADS, 1, 1, FF, residual="admin", norm="scalenorm")
    with pytest.raises(ValueError, match="ScaleNorm, has no gain for each column"):
        surgery.fold_admin(model)
    model = nfnn.Transformer(D, HEADS, 1, 1, FF, residual="admin")
    with torch.no_grad():
        model.decoder.layers[0].residual_scale2[3] = 0
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="norm2 has a zero"):
        surgery.fold_admin(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


class Block(nn.Module):
    """Somebody's own pre-norm block."""

    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn, self.drop = nn.MultiheadAttention(D, HEADS, batch_first=True), nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(D, FF), nn.ReLU(), nn.Linear(FF, D), nn.Dropout(0.1))

    def forward(self, x):
        y = self.ln1(x)
        x = x + self.drop(self.attn(y, y, y)[0])
        return x + self.mlp(self.ln2(x))


class ConvertedBlock(Block):
    def parts(self):
        stacked = surgery.Linear("attn.in_proj_weight", ("query", "key", "value"))
        return [
            surgery.Part("self-attention", "ln1", (stacked, surgery.Linear("attn.out_proj", ("output",)))),
            surgery.Part(
                "feed-forward", "ln2", (surgery.Linear("mlp.0", ("fc1",)), surgery.Linear("mlp.2", ("fc2",))), "mlp.3"
            ),
        ]

    def heads(self):
        return self.attn.num_heads

    def forward(self, x):
        x, *_ = self.residual.step(0, x, lambda y: self.attn(y, y, y), self.drop)
        return self.residual.step(1, x, self.mlp)


def test_a_registered_block():
    model = nn.Sequential(Block(), Block()).eval()
    with pytest.raises(ValueError, match="register_block"):
        swap_residuals(model, "deepnorm")
    surgery.register_block(Block, ConvertedBlock)
    x = torch.randn(2, 3, D)
    before = model(x)
    kept = swap_residuals(model, "prenorm", init=None)
    final = copy.deepcopy(model[-1].residual.norm)
    torch.testing.assert_close(model(x), final(before))
    kept.undo()
    assert torch.equal(model(x), before)
    swap_residuals(model, "sandwich")
    assert type(model[0].residual.post_norm1) is nfnn.LayerNorm and model(x).shape == x.shape
    with pytest.raises(ValueError, match="has another residual scheme"):
        swap_residuals(model, "deepnorm")
    with pytest.raises(ValueError, match="subclass of Block"):
        surgery.register_block(Block, nn.Linear)


def test_layers_outside_a_stack():
    model = nn.ModuleList(nn.TransformerEncoderLayer(D, HEADS, FF, batch_first=True) for _ in range(3))
    done = swap_residuals(model, "prenorm")
    assert "yours to add" in repr(done) and type(model[2]) is nfnn.TransformerEncoderLayer
    x = torch.randn(2, 3, D)
    for layer in model:
        x = layer(x)
    done.undo()
    assert type(model[2]) is nn.TransformerEncoderLayer


def test_a_lightning_module(tmp_path):
    """Swapped in `configure_model`, trained by Lightning's loop, taken back bit-equal where it has not been trained."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.task, self.losses = build("encoder"), []

        def training_step(self, batch, _):
            loss = run(self.task)[1]
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-2)

    module = Module()
    module.eval()
    before = run(module.task)[0]
    done = [swap_residuals(module, "deepnorm"), swap_norms(module, "scalenorm")]
    for swap in reversed(done):
        swap.undo()
    assert torch.equal(run(module.task)[0], before)
    swap_residuals(module, "deepnorm"), swap_norms(module, "scalenorm")
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(max_steps=12, accelerator="cpu", default_root_dir=tmp_path, **quiet)
        trainer.fit(module, torch.utils.data.DataLoader(range(12), batch_size=1))
    assert len(module.losses) == 12 and min(module.losses[-3:]) < module.losses[0]
