"""`analysis.probe` on models of other libraries, against formulas in f64 by hooks and attentions of the models' own."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normformer_rs as nfrs
from normformer_rs.analysis import MEASURES, Probe, probe

transformers = pytest.importorskip("transformers")
NEAR = {"rel": 1e-6, "abs": 1e-9}
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 40}


def llama(**more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=2, **more))


def gpt2(**more):
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=40, **more))


def bert(**more):
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **more))


def t5(**more):
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 40}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0, **more))


MODELS = {"llama": llama, "gpt2": gpt2, "bert": bert, "t5": t5}
# The matrices by layer: role → path; gpt2 has q, k and v in one.
PATHS = {
    "llama": ("model.layers", {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
                               "out": "self_attn.o_proj", "gate": "mlp.up_proj", "fc1": "mlp.gate_proj",
                               "fc2": "mlp.down_proj"}),
    "gpt2": ("transformer.h", {"q": "attn.c_attn", "k": "attn.c_attn", "v": "attn.c_attn", "out": "attn.c_proj",
                               "fc1": "mlp.c_fc", "fc2": "mlp.c_proj"}),
    "bert": ("bert.encoder.layer", {"q": "attention.self.query", "k": "attention.self.key",
                                    "v": "attention.self.value", "out": "attention.output.dense",
                                    "fc1": "intermediate.dense", "fc2": "output.dense"}),
    "t5": ("encoder.block", {"q": "layer.0.SelfAttention.q", "k": "layer.0.SelfAttention.k",
                             "v": "layer.0.SelfAttention.v", "out": "layer.0.SelfAttention.o",
                             "fc1": "layer.1.DenseReluDense.wi", "fc2": "layer.1.DenseReluDense.wo"}),
}  # fmt: skip


def made(name: str, **more):
    torch.manual_seed(3)
    model = MODELS[name](**more).double().eval()
    ids = torch.randint(3, 40, (2, 5))
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    return model, {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def third(name: str, role: str, t: torch.Tensor, axis: int) -> torch.Tensor:
    return t.chunk(3, axis)["qkv".index(role)] if name == "gpt2" and role in "qkv" else t


def moments(x: torch.Tensor) -> dict[str, float]:
    x = x.detach().numpy()
    centred = x - x.mean()
    return {
        "rms": math.sqrt((x**2).mean()),
        "largest": np.abs(x).max(),
        "kurtosis": (centred**4).mean() / (centred**2).mean() ** 2,
    }


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(test=2)
def test_matrices_and_layers(name):
    model, batch = made(name, attn_implementation="eager")
    found = probe(model, batch)
    outputs, inputs = {}, {}
    for path, module in model.named_modules():

        def hear(_, given, out, path=path):
            inputs[path], outputs[path] = given, out

        module.register_forward_hook(hear)
    model(**batch).loss.backward()
    stack, paths = PATHS[name]
    for layer, (role, path) in [(n, pair) for n in range(2) for pair in paths.items()]:
        full = f"{stack}.{layer}.{path}"
        module = model.get_submodule(full)
        axis = 1 if name == "gpt2" else 0
        for measure, t in (("gradient", module.weight.grad), ("weight", module.weight)):
            told = found.of(measure, role)[f"{full}.weight"]
            assert told == pytest.approx(float(third(name, role, t.detach(), axis).norm()), **NEAR), (full, measure)
        for measure, value in moments(third(name, role, outputs[full], -1)).items():
            assert found.of(measure, role)[full] == pytest.approx(value, **NEAR), (full, measure)
        if role == "fc2":
            share = float((inputs[full][0] > 0).double().mean())
            assert found.of("active", role)[full] == pytest.approx(share, **NEAR)
    for layer in range(2):
        out = outputs[f"{stack}.{layer}"]
        out = (out if isinstance(out, torch.Tensor) else out[0]).detach()
        rows = out.reshape(-1, 16).numpy()
        shares = np.linalg.svd(rows, compute_uv=False)
        shares /= shares.sum()
        assert found.layers("rank", "layer")[layer] >= found.of("rank")[f"{stack}.{layer}"]
        assert found.of("rank")[f"{stack}.{layer}"] == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), **NEAR)
        given = inputs[f"{stack}.{layer}"]
        if given:
            cosine = F.cosine_similarity(given[0].detach(), out, -1).mean()
            assert found.of("cosine")[f"{stack}.{layer}"] == pytest.approx(float(cosine), **NEAR)
    assert {one.measure for one in found} == set(MEASURES) - {"update"}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(test=2)
def test_attention_sees_the_pairs_of_softmax(name):
    """Entropies from the weights that the model returns; equal through torch's operator and products with a softmax."""
    eager, batch = made(name, attn_implementation="eager")
    told = {name: probe(eager, batch).of("entropy")}
    weights = eager(**batch, output_attentions=True)
    stack = PATHS[name][0]
    own = weights.encoder_attentions if name == "t5" else weights.attentions
    for layer, p in enumerate(own):
        expected = float(torch.special.entr(p.detach()).sum(-1).mean())
        assert told[name][f"{stack}.{layer}"] == pytest.approx(expected, **NEAR)
    if name != "t5":  # which has no other form
        operator, _ = made(name, attn_implementation="sdpa")
        other = probe(operator, batch)
        for measure in ("entropy", "logit"):
            assert other.of(measure) == pytest.approx(probe(eager, batch).of(measure), **NEAR)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_long_attentions_are_measured_in_parts(name, monkeypatch):
    """A query at a time, with masks and with the operator's own causal one: the same numbers."""
    for form, is_masked in (("sdpa", True), ("sdpa", False), ("eager", True)):
        model, batch = made(name, attn_implementation=form)
        batch = batch if is_masked else {"input_ids": batch["input_ids"]}
        whole = probe(model, batch)
        monkeypatch.setattr("normformer_rs.analysis.logits._ELEMENTS", 1)
        parts = probe(model, batch)
        monkeypatch.undo()
        for measure in ("entropy", "logit", "head_logit"):
            assert parts.of(measure) == pytest.approx(whole.of(measure), rel=1e-12)


def test_a_block_alone():
    found = probe(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(1, 3, 8), lambda out: out.sum())
    assert found.layers("gradient", "q").keys() == {0} and found.layers("logit", "attention").keys() == {0}


def test_logits_are_those_of_queries_and_keys():
    model, batch = made("bert")
    found, seen = probe(model, batch), {}
    for part in ("query", "key"):

        def hear(_, given, out, part=part):
            seen[part] = out.detach()

        model.bert.encoder.layer[1].attention.self.get_submodule(part).register_forward_hook(hear)
    model(**batch)
    q, k = (seen[part].view(2, 5, 4, 4).transpose(1, 2) for part in ("query", "key"))
    scores = (q @ k.mT / 2)[batch["attention_mask"].bool()[:, None, None, :].expand(2, 4, 5, 5)]
    assert found.of("logit")["bert.encoder.layer.1"] == pytest.approx(float(scores.max()), **NEAR)
    seen = batch["attention_mask"].bool()[:, None, None, :]
    of_heads = (q @ k.mT / 2).masked_fill(~seen, -math.inf).amax((0, 2, 3)).tolist()
    for head, expected in enumerate(of_heads):
        assert found.layers("head_logit", f"head {head}")[1] == pytest.approx(expected, **NEAR)
    told = {f"bert.encoder.layer.{layer} head {head}" for layer in range(2) for head in range(4)}
    assert found.of("head_logit").keys() == told and max(of_heads) == pytest.approx(float(scores.max()))


@pytest.mark.parametrize("causal", [False, True])
def test_torchs_own_attention(causal):
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).double()
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 4, 8, dtype=torch.double)
    mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.double) if causal else None
    padding = torch.tensor([[False] * 4, [False, False, False, True]])
    float_padding = torch.zeros(2, 4, dtype=torch.double).masked_fill(padding, -math.inf)
    padding = float_padding if causal else padding
    batch = {"src": x, "mask": mask, "src_key_padding_mask": padding}
    found = probe(model, batch, lambda out: out.square().mean())
    attention, seen = model.layers[1].self_attn, {}
    model.layers[1].register_forward_pre_hook(lambda m, given: seen.update(x=given[0]))
    model(**batch)
    h = seen["x"].detach()
    _, p = attention(h, h, h, attn_mask=mask, key_padding_mask=float_padding, average_attn_weights=False)
    expected = float(torch.special.entr(p.detach()).sum(-1).mean())
    assert found.of("entropy")["layers.1"] == pytest.approx(expected, **NEAR)
    q, k = (w.view(8, 8) for w in attention.in_proj_weight.detach().chunk(3)[:2])
    gradient = found.of("gradient", "k")["layers.1.self_attn.in_proj_weight"]
    assert gradient > 0 and found.of("weight", "q")["layers.1.self_attn.in_proj_weight"] == pytest.approx(
        float(q.norm())
    )
    assert found.of("weight", "k")["layers.1.self_attn.in_proj_weight"] == pytest.approx(float(k.norm()), **NEAR)


def test_in_a_loop_of_ones_own():
    """Gradients before clipping, and the update of a step over the weights."""
    model, batch = made("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = Probe(model, batch)
    with watch:
        model(**batch).loss.backward()
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    name = "transformer.h.1.attn.c_attn.weight"
    gradient, weight = watch.readings.of("gradient", "k")[name], watch.readings.of("weight", "k")[name]
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    with watch.step():
        optimizer.step()
    assert watch.readings.of("update", "k")[name] == pytest.approx(0.1 * gradient / weight, **NEAR)
    before = len(watch.readings)
    with watch.step():
        optimizer.step()
    assert len(watch.readings) == before and "<table>" in watch.readings._repr_html_()


@pytest.mark.full
def test_heat_maps_by_layer_and_time(tmp_path):
    import matplotlib.image

    model, batch = made("llama")
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1.0), []
    for _ in range(3):
        found.append(probe(model, batch))
        model(**batch).loss.backward()
        optimizer.step()
    path = nfrs.figures.readings(found, "gradient", "q", steps=[0, 10, 20], path=tmp_path / "heat.png")
    pixels = matplotlib.image.imread(path)[..., :3]
    assert len({tuple(pixel) for pixel in pixels.reshape(-1, 3).round(2).tolist()}) > 20
    with pytest.raises(nfrs.InputError, match=r"no gradient of queries was read; there are .*gradient of q"):
        nfrs.figures.readings(found, "gradient", "queries")
    with pytest.raises(nfrs.InputError, match="a step for each of the 3 readings; got 1"):
        nfrs.figures.readings(found, "gradient", "q", steps=[1])


def test_the_latest_pass_counts():
    model, batch = made("bert")
    other = {**batch, "input_ids": batch["input_ids"].flip(0)}
    watch = Probe(model, batch)
    with watch, torch.no_grad():
        model(**batch)
        model(**other)
    alone = Probe(model, other)
    with alone, torch.no_grad():
        model(**other)
    assert watch.readings == alone.readings and len(watch.readings.of("logit")) == 2
    assert len(watch.readings.of("head_logit")) == 8


def test_each_attention_of_a_block_has_its_heads():
    """Those of a decoder's layer: its own, and to the encoder's output."""
    torch.manual_seed(2)
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 2).double()
    x, memory = torch.randn(1, 3, 8).double(), torch.randn(1, 4, 8).double()
    watch = Probe(model, {"tgt": x, "memory": memory})
    for _ in range(2):  # a second pass replaces the first
        with watch, torch.no_grad():
            model(x, memory)
    names = [f"layers.{layer}{which} head {head}" for layer in (0, 1) for which in ("", " (2)") for head in (0, 1)]
    assert [*watch.readings.of("head_logit")] == sorted(names)


def test_numbers_that_are_not_finite_do_not_end_the_run():
    model, batch = made("gpt2")
    with torch.no_grad():
        model.transformer.h[0].mlp.c_proj.bias[0] = math.inf
    found = probe(model, batch)
    assert math.isnan(found.of("rank")["transformer.h.0"]) and found.of("largest")["transformer.h.0"] == math.inf


def test_a_probe_changes_nothing():
    torch.manual_seed(0)
    model, batch = made("bert")
    model.train()
    kept = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.grad = kept[name]
    state = torch.get_rng_state()
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    first, second = probe(model, batch), probe(model, batch)
    assert first == second and torch.equal(state, torch.get_rng_state()) and model.training
    assert all(p.grad is kept[name] for name, p in model.named_parameters())
    assert all(torch.equal(t, weights[name]) for name, t in model.state_dict().items())


def test_swapped_models_are_read_too():
    model, batch = made("llama")
    nfrs.swap_residuals(model, "deepnorm", init=None, example={"input_ids": batch["input_ids"]})
    found = probe(model, batch)
    assert len(found.layers("gradient", "q")) == 2 and len(found.layers("logit", "attention")) == 2


def test_wrong_calls_are_named():
    model, batch = made("bert")
    with pytest.raises(nfrs.InputError, match="loss must be one number that depends on the parameters"):
        probe(model, batch, lambda out: 3.0)
    with pytest.raises(nfrs.InputError, match="holds no list of modules"):
        probe(nn.Linear(2, 2), torch.ones(1, 2))
    assert all(not module._forward_hooks for module in model.modules())


def test_parts_of_our_layers_have_their_roles():
    """Fewer heads of keys, a gated feed-forward, a gate of attention's output."""
    parts = {"kv_heads": 2, "activation": "swiglu", "output_gate": "head", "residual": "prenorm"}
    model = nfrs.nn.TransformerEncoder(nfrs.nn.TransformerEncoderLayer(16, 4, 24, 0.0, batch_first=True, **parts), 2)
    layer = model.layers[1]
    queries, keys, values = layer.self_attn.in_proj_weight.split([16, 8, 8])
    wanted = {"q": queries, "k": keys, "v": values, "gate": layer.linear3.weight}
    wanted["output_gate"] = layer.self_attn.gate_proj.weight
    with torch.no_grad():
        queries *= 100
    readings = [one for one in probe(model, torch.randn(2, 5, 16)) if one.layer == 1 and one.measure == "weight"]
    found = {one.role: one.value for one in readings if one.role in wanted and not one.name.endswith("bias")}
    assert found == pytest.approx({role: float(weight.detach().norm()) for role, weight in wanted.items()}, rel=1e-5)
