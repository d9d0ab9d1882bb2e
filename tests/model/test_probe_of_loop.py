"""`analysis.probe` on the loop's Transformer, against the oracle in f64: activations by role, layers and attentions."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_architecture import build

from normformer_rs import InputError
from normformer_rs.analysis import MEASURES, Probe, Readings, probe
from reference import model as oracle

NEAR = {"rel": 1e-6, "abs": 1e-9}
D = 16
SOURCES = torch.tensor([[5, 6, 7, 8, 9, 2], [10, 2, 1, 1, 1, 1], [11, 12, 13, 2, 1, 1]])
TARGETS = torch.tensor([[0, 14, 15, 1], [0, 16, 17, 18], [0, 11, 9, 1]])
LLAMA = {"positions": "rotary", "activation": "swiglu", "kv_heads": 2, "norm": "rmsnorm", "linear_biases": False}
MODELS = {
    "translation": {"architecture": "encoder-decoder"},
    "postnorm": {"architecture": "encoder-decoder", "residual": "postnorm", "norm": "scalenorm", "qk_norm": True},
    "llama": {**LLAMA, "score_softcap": 3.0, "sinks": True},
    "two streams": {"residual": "resi-dual", "kv_heads": 1},
    "mixing": {"residual": "mhc"},
    "sums": {"residual": "denseformer", "qk_norm": True, "output_gate": "head"},
    "inside": {"residual": "normformer", "norm": "batchnorm"},
    "tensorized": {"attention": "tensorized", "tensorized_rank": 4, "tensorized_segment": 5},
    "u-mup": {
        **LLAMA,
        "parametrisation": "u-mup",
        "attention_length": 4,
        "tie_embeddings": "none",
        "scale_embeddings": False,
    },
}


class Heard(oracle.Run):
    """The oracle, which keeps what it computes at real positions, by the names and measures of `Readings`."""

    def __init__(self, *given):
        super().__init__(*given, None)
        self.found = {}
        self.layer_inputs = {}

    def put(self, name, role, x):
        x = x.detach().numpy()
        centred = x - x.mean()
        self.found[name, role, "rms"] = math.sqrt((x**2).mean())
        self.found[name, role, "largest"] = np.abs(x).max()
        self.found[name, role, "kurtosis"] = (centred**4).mean() / (centred**2).mean() ** 2

    def linear(self, name, x):
        y = super().linear(name, x)
        role = {"out_proj": "out", "linear1": "fc1", "linear2": "fc2", "linear3": "gate"}.get(name.rpartition(".")[2])
        if role and x.dim() == 3:
            self.put(name, role, y[self.real])
            if role == "fc2":
                self.found[name, role, "active"] = float((x[self.real] > 0).double().mean())
        return y

    def norm(self, stack, norm, x, real):
        y = super().norm(stack, norm, x, real)
        # By head, (B, heads, T, d_head), or rows (B, T, d).
        self.put(norm.name, "norm", y.transpose(1, 2)[real] if y.dim() > 3 else y[real])
        return y

    def feed_forward(self, place, x, real):
        self.real = real
        return super().feed_forward(place, x, real)

    def multihead(self, place, query, memory, allowed, query_real, key_real):
        self.real = query_real
        name = f"{place.prefix}.{place.kind}"
        weight, bias = self.state[f"{name}.in_proj_weight"], self.state.get(f"{name}.in_proj_bias")
        kv = (len(weight) - D) // 2
        parts = zip("qkv", (query, memory, memory), (query_real, key_real, key_real), weight.split([D, kv, kv]))
        biases = (0, 0, 0) if bias is None else bias.split([D, kv, kv])
        for (role, x, real, matrix), b in zip(parts, biases):
            self.put(name, role, ((x @ matrix.T + b) * self.of_products(D))[real])
        self.attending = f"{place.prefix} (2)" if place.kind == "multihead_attn" else place.prefix
        self.seen = allowed & query_real[:, None, :, None]
        return super().multihead(place, query, memory, allowed, query_real, key_real)

    def tensorized(self, place, x, real):
        self.real = real
        for role, y in zip("qkv", (x @ self.state[f"{place.prefix}.self_attn.in_proj_weight"].T).chunk(3, -1)):
            self.put(f"{place.prefix}.self_attn", role, y[real])
        return super().tensorized(place, x, real)

    def attended(self, q, k, softcap, sinks):
        """Keeps the numbers of an attention, from queries and keys (B, heads, T, d_head)."""
        name, scores = self.attending, (q @ k.mT / math.sqrt(q.shape[-1])).detach()
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        seen = self.seen.expand_as(scores)
        if sinks is not None:
            column = sinks.detach().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores, seen = torch.cat([scores, column], -1), torch.cat([seen, seen.any(-1, keepdim=True)], -1)
        logits = scores.masked_fill(~seen, -math.inf)
        real = seen.any(-1)
        entropies = torch.special.entr(logits[real].softmax(-1)).sum(-1)
        self.found[name, "attention", "entropy"] = float(entropies.mean())
        self.found[name, "attention", "logit"] = float(logits.max())
        for head, largest in enumerate(logits.amax((0, 2, 3)).tolist()):
            self.found[f"{name} head {head}", f"head {head}", "head_logit"] = largest

    def sublayer(self, place, x, streams, function, real, bottom):
        mean = (lambda x, streams: torch.stack([x, *streams]).mean(0)) if self.is_mixing else (lambda x, streams: x)
        if place.index == 1:
            self.layer_inputs[place.prefix] = mean(x, streams).detach()[real]
        x, streams = super().sublayer(place, x, streams, function, real, bottom)
        if place.kind == "feed_forward":
            y = mean(x, streams).detach()[real]
            self.put(place.prefix, "layer", y)
            cosines = F.cosine_similarity(self.layer_inputs[place.prefix], y, -1)
            self.found[place.prefix, "layer", "cosine"] = float(cosines.mean())
            shares = np.linalg.svd(y.numpy(), compute_uv=False)
            shares = shares[shares > 0] / shares.sum()
            self.found[place.prefix, "layer", "rank"] = math.exp(-(shares * np.log(shares)).sum())
        return x, streams


def built(**options):
    model, _, options = build(**options)
    return model, options, (SOURCES if options["architecture"] == "encoder-decoder" else None, TARGETS)


def passes(readings: Readings) -> dict:
    outside = ("gradient", "weight", "gain", "update")
    return {(one.name, one.role, one.measure): one.value for one in readings if one.measure not in outside}


@pytest.mark.parametrize("name", MODELS)
def test_every_number_of_a_pass(name, monkeypatch):
    model, options, batch = built(**MODELS[name])
    state = {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}
    heard = Heard(state, options)
    heard.is_mixing = options.get("residual") == "mhc"
    attention = oracle.attention

    def listening(q, k, v, allowed, keep, scale, softcap, sinks):
        heard.attended(q, k, softcap, sinks)
        return attention(q, k, v, allowed, keep, scale, softcap=softcap, sinks=sinks)

    monkeypatch.setattr(oracle, "attention", listening)
    with torch.no_grad():
        heard.logits(*batch)
    found = passes(probe(model, batch))
    assert found.keys() == heard.found.keys(), found.keys() ^ heard.found.keys()
    assert found == pytest.approx(heard.found, **NEAR)


def test_parameters_by_role():
    """Gradients, sizes and gains of a gated model with grouped heads, and the update of a step."""
    model, _, batch = built(**LLAMA)
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = Probe(model)
    with watch:
        model(*batch).square().mean().backward()
    other(*batch).square().mean().backward()
    assert model._heard is None, "nothing is hooked outside"
    for layer in range(2):
        path = f"decoder.layers.{layer}"
        stacked, widths = other.get_parameter(f"{path}.self_attn.in_proj_weight"), [D, D // 2, D // 2]
        matrices = dict(zip("qkv", zip(stacked.split(widths), stacked.grad.split(widths))))
        for role, part in {"out": "self_attn.out_proj", "fc1": "linear1", "gate": "linear3", "fc2": "linear2"}.items():
            weight = other.get_parameter(f"{path}.{part}.weight")
            matrices[role] = weight, weight.grad
        for role, (weight, gradient) in matrices.items():
            assert watch.readings.layers("weight", role)[layer] == pytest.approx(float(weight.detach().norm()), **NEAR)
            assert watch.readings.layers("gradient", role)[layer] == pytest.approx(float(gradient.norm()), **NEAR)
        gain = other.get_parameter(f"{path}.norm1.weight")
        assert watch.readings.of("gain", "norm")[f"{path}.norm1.weight"] == pytest.approx(
            float(gain.detach().mean()), **NEAR
        )
    with watch.step():
        optimizer.step()
    for role, (weight, gradient) in matrices.items():  # those of the last layer
        ratio = 0.1 * float(gradient.norm() / weight.detach().norm())
        assert watch.readings.layers("update", role)[1] == pytest.approx(ratio, **NEAR)
    assert {one.measure for one in watch.readings} == set(MEASURES)
    assert watch.readings.of("weight", "other").keys() == {"embedding.weight"}


def test_a_probe_changes_nothing():
    """Neither the output of a model in training with statistics, nor what an update of them computes."""
    options = {"norm": "powernorm", "residual": "postnorm", "dropout": 0.1}
    model, _, batch = built(**options)
    model.train()
    other = copy.deepcopy(model)
    probe(model, batch)  # restores the statistics
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values()))
    torch.manual_seed(1)
    expected = other(*batch)
    torch.manual_seed(1)
    with Probe(model):
        assert torch.equal(model(*batch), expected)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values()))


def test_the_latest_pass_counts():
    model, _, batch = built(architecture="encoder-decoder")
    other = SOURCES.flip(0), TARGETS.flip(1)
    watch, alone = Probe(model), Probe(model)
    with watch, torch.no_grad():
        model(*batch)
        model(*other)
    with alone, torch.no_grad():
        model(*other)
    assert watch.readings == alone.readings


def test_probes_nest_and_are_not_copied():
    model, _, batch = built()
    with Probe(model) as outer:
        with Probe(model) as inner, torch.no_grad():
            model(*batch)
        assert copy.deepcopy(model)._heard is None
    assert outer.readings == inner.readings and len(inner.readings.of("logit")) == 2 and model._heard is None


def test_errors_of_a_pass_are_raised(monkeypatch):
    model, _, batch = built(architecture="encoder-decoder")

    def fail(*_):
        raise InputError("stopped here")

    monkeypatch.setattr(Probe, "_attended", fail)
    with pytest.raises(InputError, match="stopped here"):
        probe(model, batch)
    monkeypatch.undo()
    assert model._heard is None
    watch = Probe(model)
    with watch, torch.no_grad():
        with monkeypatch.context() as patched, pytest.raises(InputError):
            patched.setattr(Probe, "_product", fail)
            model(*batch)
        model(*batch)
    assert watch.readings.of("logit") == pytest.approx(probe(model, batch).of("logit"))
